//! Transmit queues.

use std::fmt;
use std::sync::Arc;

use wirepath_verbs::{CompletionBatch, CompletionQueue, RawPacketQp, Segment, SendRequests};

use crate::drivers::nic::common::ETHERNET_HEADER;
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::tx_queue::{self, PostedBurst, TxInFlight, TxLimits};
use crate::drivers::sw_offload;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{BATCH, Batch, Packet, PtypeL3, PtypeL4};

/// Requests that the driver never leaves to the device.
const NEVER: Flags =
    Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM).with(Flags::TX_SEGMENT).with(Flags::VLAN);

/// A send ring. Positions count requests.
pub(super) struct TxRing {
    pair: RawPacketQp,
    completions: CompletionQueue,
    room: CompletionBatch,
    requests: SendRequests,
    device: DeviceLimits,
    depth: u32,
    /// Last field, so that the owner of the hardware queue is dropped first.
    in_flight: TxInFlight,
}

impl fmt::Debug for TxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxRing").field("pair", &self.pair).field("flight", &self.in_flight).finish_non_exhaustive()
    }
}

/// Limits of the device for packets.
struct DeviceLimits {
    mrs: Arc<MrTable>,
    /// Most segments of a request.
    segments: usize,
    /// True if the device computes checksums.
    checksums: bool,
}

impl TxRing {
    /// Creates an unused ring for `depth` packets of up to `segments` segments.
    pub(super) fn new(
        teardown: QueueTeardown,
        pair: RawPacketQp,
        completions: CompletionQueue,
        mrs: Arc<MrTable>,
        depth: u32,
        segments: usize,
        checksums: bool,
    ) -> Self {
        Self {
            pair,
            completions,
            room: CompletionBatch::default(),
            requests: SendRequests::new(BATCH, segments),
            device: DeviceLimits { mrs, segments, checksums },
            depth,
            in_flight: TxInFlight::new(depth, depth, teardown),
        }
    }
}

impl DeviceLimits {
    /// Prepares a packet for the device. Returns whether the device computes its checksums.
    fn prepare(&self, packet: &mut Packet, limits: &TxLimits<'_>) -> Result<bool, DropReason> {
        match packet.len() {
            0..ETHERNET_HEADER => return Err(DropReason::TooShort),
            len if len > limits.longest => return Err(DropReason::TooLong),
            _ => {}
        }
        let by_device = self.checksums && is_for_device(packet);
        if !by_device {
            sw_offload::apply(packet)?;
        }
        if packet.segment_count() > self.segments || self.pieces(packet).any(|piece| piece.is_none()) {
            let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
            limits.counters.copied.add(1);
            *packet = copy;
        }
        Ok(by_device)
    }

    /// Returns the segments of the packet. `None` stands for one outside registered memory.
    fn pieces<'a>(&self, packet: &'a Packet) -> impl Iterator<Item = Option<Segment>> + use<'a, '_> {
        packet.segments().filter(|segment| !segment.is_empty()).map(|segment| {
            let address = segment.as_ptr() as u64;
            let (address, key) = self.mrs.translate(address)?;
            Some(Segment { address, bytes: segment.len() as u32, key })
        })
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
        let Self { pair, requests, device, .. } = self;
        requests.clear();
        let mut result = Ok(());
        for (n, packet) in batch.as_mut_slice()[..max_packets].iter_mut().enumerate() {
            let name = u64::from(start.wrapping_add(n as u32));
            match device.prepare(packet, limits) {
                Ok(checksums) if requests.push(name, checksums, device.pieces(packet).flatten()) => {}
                Ok(_) => break,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
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
