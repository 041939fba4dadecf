//! Transmit queues.

use std::fmt;
use std::sync::Arc;

use wirepath_verbs::{CompletionBatch, CompletionQueue, RawPacketQp, Segment, SendRequests, TsoRequest};

use super::ring_end::RingEnd;
use crate::drivers::nic::common::ETHERNET_HEADER;
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::rx_queue::buffers_for;
use crate::drivers::nic::common::tso::{self, Tso};
use crate::drivers::nic::common::tx_queue::{self, PostedBurst, TxInFlight, TxLimits};
use crate::drivers::sw_offload;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe;
use wirepath_packet::{BATCH, Batch, Packet, PtypeL3, PtypeL4};

/// Most header bytes of a TSO packet: Ethernet with a tag, IPv6, and TCP with 20 bytes of options. Superframes with
/// longer headers are cut in software.
pub(super) const MAX_TSO_HEADER: usize = 14 + 4 + 40 + 40;
/// Requests that the driver never leaves to the device, except in packets that it segments.
const NEVER: Flags =
    Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM).with(Flags::TX_SEGMENT).with(Flags::VLAN);

/// A send ring. Positions count requests.
pub(super) struct TxRing {
    pair: RawPacketQp,
    completions: CompletionQueue,
    room: CompletionBatch,
    requests: SendRequests,
    /// Segments of the packet that is being posted.
    pieces: Vec<Segment>,
    device: DeviceLimits,
    depth: u32,
    /// Position in libmlx5's ring where the last call left a superframe.
    left_at: Option<u32>,
    /// Last field, so that the owner of the hardware queue is dropped first.
    in_flight: TxInFlight,
}

impl fmt::Debug for TxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxRing").field("pair", &self.pair).field("flight", &self.in_flight).finish_non_exhaustive()
    }
}

/// Limits of the device for packets.
pub(super) struct DeviceLimits {
    pub(super) mrs: Arc<MrTable>,
    /// Most segments of a request.
    pub(super) segments: usize,
    /// True if the device computes checksums.
    pub(super) checksums: bool,
    /// Most payload bytes of a TSO packet. 0: no TSO.
    pub(super) max_tso: usize,
    /// The part of libmlx5's ring where no TSO request may start.
    pub(super) ring_end: Option<RingEnd>,
}

/// Offload by the device.
enum Offload {
    Nothing,
    Checksums,
    Segmentation(Tso),
}

impl Offload {
    /// Returns the number of header bytes that are apart from the segments.
    fn header(&self) -> Option<usize> {
        match self {
            Offload::Segmentation(tso) => Some(tso.header.into()),
            Offload::Nothing | Offload::Checksums => None,
        }
    }
}

impl TxRing {
    /// Creates an unused ring for `depth` packets.
    pub(super) fn new(
        teardown: QueueTeardown,
        pair: RawPacketQp,
        completions: CompletionQueue,
        depth: u32,
        device: DeviceLimits,
    ) -> Self {
        let max_header = if device.max_tso > 0 { MAX_TSO_HEADER } else { 0 };
        Self {
            pair,
            completions,
            room: CompletionBatch::default(),
            requests: SendRequests::new(BATCH, device.segments).with_tso(max_header as u16),
            pieces: Vec::with_capacity(device.segments),
            device,
            depth,
            left_at: None,
            in_flight: TxInFlight::new(depth, depth, teardown),
        }
    }
}

impl DeviceLimits {
    /// Prepares a packet for the device, and stores its segments in `pieces`. Returns what the device does.
    fn prepare(
        &self,
        packet: &mut Packet,
        limits: &TxLimits<'_>,
        pieces: &mut Vec<Segment>,
    ) -> Result<Offload, DropReason> {
        if packet.len() < ETHERNET_HEADER {
            return Err(DropReason::TooShort);
        }
        let offload = if self.max_tso > 0 && packet.flags().contains(Flags::TX_SEGMENT) {
            let tso = tso::prepare(packet, MAX_TSO_HEADER)?;
            let header = usize::from(tso.header);
            if packet.len() - header > self.max_tso || header + usize::from(tso.mss) > limits.longest {
                return Err(DropReason::KernelOffload);
            }
            Offload::Segmentation(tso)
        } else if packet.len() > limits.longest {
            return Err(DropReason::TooLong);
        } else if self.checksums && is_for_device(packet) {
            Offload::Checksums
        } else {
            sw_offload::apply(packet)?;
            Offload::Nothing
        };
        let skip = offload.header().unwrap_or(0);
        if !self.gather(packet, skip, pieces) {
            // Too many segments, or a segment outside registered memory.
            let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
            limits.counters.copied.add(1);
            *packet = copy;
            if !self.gather(packet, skip, pieces) {
                return Err(DropReason::TxError);
            }
        }
        Ok(offload)
    }

    /// Stores the segments of the packet, without its first `skip` bytes. Returns false if there are too many, or one
    /// is outside registered memory.
    fn gather(&self, packet: &Packet, skip: usize, pieces: &mut Vec<Segment>) -> bool {
        pieces.clear();
        superframe::parts_from(packet, skip).all(|part| {
            let translated = self.mrs.translate(part.as_ptr() as u64).filter(|_| pieces.len() < self.segments);
            let piece = translated.map(|(address, key)| Segment { address, bytes: part.len() as u32, key });
            pieces.extend(piece);
            piece.is_some()
        })
    }

    /// Returns whether the device takes a superframe, if it is plain TCP.
    fn takes_superframe(&self, packet: &Packet) -> bool {
        let tag = if packet.vlan().is_some() { 4 } else { 0 };
        // A copy has as few buffers as possible.
        tso::fits(packet, MAX_TSO_HEADER, self.max_tso)
            && buffers_for(packet.len() + tag) <= self.segments
            && self.ring_end.as_ref().is_none_or(|end| !end.is_last_block(end.position()))
    }
}

/// Returns true if `IBV_SEND_IP_CSUM` covers all requests of the packet: both checksums of a packet without a
/// tunnel.
fn is_for_device(packet: &Packet) -> bool {
    let (flags, layers) = (packet.flags(), packet.header_lengths());
    flags.contains(Flags::TX_L4_CHECKSUM)
        && !flags.intersects(NEVER)
        && layers.outer_len == 0
        && (layers.l3() == PtypeL3::Ipv6 || (layers.l3() == PtypeL3::Ipv4 && flags.contains(Flags::TX_L3_CHECKSUM)))
        && layers.l4() != PtypeL4::Other
}

/// Completes request `name` and all earlier ones. Returns their number of packets. If posting a burst failed
/// halfway, its last position equals its end: no completion names it, so that the next burst completes it.
fn complete_through(in_flight: &mut TxInFlight, name: u64) -> Result<usize, QueueFault> {
    let mut packets = 0;
    while let Some(burst) = in_flight.oldest_burst() {
        let is_unsignaled = burst.last == burst.end;
        if !is_unsignaled && u64::from(burst.last) != name {
            return Err(QueueFault::OutOfOrder);
        }
        packets += burst.packets as usize;
        in_flight.complete_oldest(burst);
        if !is_unsignaled {
            return Ok(packets);
        }
    }
    Err(QueueFault::UnexpectedCompletion)
}

impl tx_queue::TxRing for TxRing {
    fn in_flight(&self) -> &TxInFlight {
        &self.in_flight
    }

    fn complete(&mut self, _: &QueueCounters) -> Result<(), QueueFault> {
        if self.in_flight.len() == 0 {
            return Ok(());
        }
        let Self { room, completions, in_flight, .. } = self;
        let polled = room.poll(completions, BATCH).map_err(|error| {
            tracing::debug!("{error}");
            QueueFault::ProviderFailed { call: "ibv_poll_cq" }
        })?;
        let (mut through, mut result) = (0, Ok(()));
        for reported in polled {
            if reported.status != 0 {
                result = Err(QueueFault::ErrorStatus { status: reported.status, vendor: reported.vendor_error });
                break;
            }
            match complete_through(in_flight, reported.request) {
                Ok(packets) => through += packets,
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            }
        }
        in_flight.free(through);
        result
    }

    fn post(&mut self, batch: &mut Batch, limits: &TxLimits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let start = self.in_flight.next;
        let max_packets = self.in_flight.room().min(batch.len()).min((self.depth - self.in_flight.used()) as usize);
        let Self { pair, requests, pieces, device, left_at, .. } = self;
        requests.clear();
        let last_left_at = left_at.take();
        let mut position = device.ring_end.as_ref().map_or(0, RingEnd::position);
        let mut result = Ok(());
        for (n, packet) in batch.as_mut_slice()[..max_packets].iter_mut().enumerate() {
            let name = u64::from(start.wrapping_add(n as u32));
            let offload = match device.prepare(packet, limits, pieces) {
                Ok(offload) => offload,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
            };
            if let Some(end) = &device.ring_end {
                if offload.header().is_some() && end.is_last_block(position) {
                    // It stays for the next call, and software GSO cuts it before. Without GSO it would stay for ever.
                    if requests.is_empty() && last_left_at == Some(position) {
                        result = Err(DropReason::TxError);
                    } else {
                        *left_at = Some(position);
                    }
                    break;
                }
                position = end.place(position, offload.header(), pieces, device.segments);
            }
            let segments = pieces.iter().copied();
            let pushed = match offload {
                Offload::Segmentation(Tso { mss, header }) => {
                    let headers = &packet.data()[..header.into()];
                    requests.push_tso(name, TsoRequest { headers, mss }, segments)
                }
                Offload::Checksums => requests.push(name, true, segments),
                Offload::Nothing => requests.push(name, false, segments),
            };
            if !pushed {
                break;
            }
        }
        let mut count = requests.len();
        let mut is_unsignaled = false;
        if let Err(refused) = requests.post(pair) {
            tracing::debug!("{}", refused.error);
            (count, is_unsignaled, result) = (refused.accepted, true, Err(DropReason::TxError));
        }
        let bytes = batch.as_slice()[..count].iter().map(|packet| packet.len() as u64).sum();
        if count > 0 {
            let end = start.wrapping_add(count as u32);
            let last = if is_unsignaled { end } else { end.wrapping_sub(1) };
            self.in_flight.post_batch(batch, PostedBurst { packets: count as u32, last, end });
        }
        (count, bytes, result)
    }

    /// Posting has already rung the doorbell.
    fn ring_doorbell(&mut self) {}

    fn segments(&self, packet: &Packet) -> Option<bool> {
        if self.device.max_tso > 0 && self.device.takes_superframe(packet) { None } else { Some(false) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_packet::Pool;

    #[test]
    fn partly_posted_bursts_are_freed_with_the_next() {
        let pool = Pool::new("complete_through", 64).unwrap();
        let mut in_flight = TxInFlight::new(16, 16, QueueTeardown::empty());
        let launch = |in_flight: &mut TxInFlight, packets: u32, is_unsignaled: bool| {
            let mut batch = Batch::new();
            pool.take_batch(packets as usize, &mut batch);
            let end = in_flight.next + packets;
            in_flight
                .post_batch(&mut batch, PostedBurst { packets, last: if is_unsignaled { end } else { end - 1 }, end });
        };
        launch(&mut in_flight, 2, false);
        launch(&mut in_flight, 3, true);
        launch(&mut in_flight, 4, false);
        assert_eq!(complete_through(&mut in_flight, 0), Err(QueueFault::OutOfOrder));
        assert_eq!(complete_through(&mut in_flight, u64::MAX), Err(QueueFault::OutOfOrder));
        assert_eq!(complete_through(&mut in_flight, 1), Ok(2));
        assert_eq!(complete_through(&mut in_flight, 8), Ok(7));
        assert_eq!(complete_through(&mut in_flight, 8), Err(QueueFault::UnexpectedCompletion));
        assert_eq!(in_flight.used(), 0);
        in_flight.free(9);
        assert_eq!(pool.outstanding(), 0);
    }
}
