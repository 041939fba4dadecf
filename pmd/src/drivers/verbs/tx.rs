//! Transmit queues.

use std::fmt;
use std::sync::Arc;

use wirepath_verbs::{CompletionQueue, Completions, RawPacketQp, Segment, SendRequests};

use crate::counters::QueueCounters;
use crate::drivers::direct::SHORTEST;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::send::{self, Burst, Flight, Limits};
use crate::drivers::requests;
use crate::drops::DropReason;
use crate::packet::offload::Flags;
use crate::packet::{BATCH, Batch, L3, L4, Packet};

/// Requests that the device does not carry out, whatever it can.
const NEVER: Flags =
    Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM).with(Flags::TX_SEGMENT).with(Flags::VLAN);

/// A send queue. Positions are requests.
pub(super) struct SendRing {
    pair: RawPacketQp,
    completions: CompletionQueue,
    room: Completions,
    requests: SendRequests,
    reach: Reach,
    depth: u32,
    /// Last: whoever keeps the hardware's queue goes before.
    flight: Flight,
}

impl fmt::Debug for SendRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRing").field("pair", &self.pair).field("flight", &self.flight).finish_non_exhaustive()
    }
}

/// What the device can do with a packet.
struct Reach {
    keys: Arc<Keys>,
    /// Most segments of a request.
    segments: usize,
    /// Whether it computes checksums.
    checksums: bool,
}

impl SendRing {
    /// A ring that no packet has gone through, for `depth` packets of up to `segments` segments.
    pub(super) fn new(
        ending: Ending,
        pair: RawPacketQp,
        completions: CompletionQueue,
        keys: Arc<Keys>,
        depth: u32,
        segments: usize,
        checksums: bool,
    ) -> Self {
        Self {
            pair,
            completions,
            room: Completions::default(),
            requests: SendRequests::new(BATCH, segments),
            reach: Reach { keys, segments, checksums },
            depth,
            flight: Flight::new(depth, depth, ending),
        }
    }
}

impl Reach {
    /// Makes the packet one that the device can send; whether it shall compute the checksums.
    fn prepare(&self, packet: &mut Packet, limits: &Limits<'_>) -> Result<bool, DropReason> {
        match packet.len() {
            0..SHORTEST => return Err(DropReason::TooShort),
            len if len > limits.longest => return Err(DropReason::TooLong),
            _ => {}
        }
        let by_device = self.checksums && is_for_device(packet);
        if !by_device {
            requests::fulfil(packet)?;
        }
        if packet.segment_count() > self.segments || self.pieces(packet).any(|piece| piece.is_none()) {
            let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
            limits.counters.copied.add(1);
            *packet = copy;
        }
        Ok(by_device)
    }

    /// Where the packet lies; `None` in place of what the device cannot reach.
    fn pieces<'a>(&self, packet: &'a Packet) -> impl Iterator<Item = Option<Segment>> + use<'a, '_> {
        packet.segments().filter(|segment| !segment.is_empty()).map(|segment| {
            let address = segment.as_ptr() as u64;
            let (address, key) = self.keys.reach(address)?;
            Some(Segment { address, bytes: segment.len() as u32, key })
        })
    }
}

/// Whether all that the packet asks for is what `IBV_SEND_IP_CSUM` does: both checksums of a packet without a tunnel.
fn is_for_device(packet: &Packet) -> bool {
    let (flags, layers) = (packet.flags(), packet.layers());
    flags.contains(Flags::TX_L4_CHECKSUM)
        && !flags.intersects(NEVER)
        && layers.outer_len == 0
        && (layers.l3() == L3::Ipv6 || (layers.l3() == L3::Ipv4 && flags.contains(Flags::TX_L3_CHECKSUM)))
        && layers.l4() != L4::Other
}

/// Takes note that the request `name` was carried out, and with it everything before; returns how many packets that is. A burst whose post
/// failed halfway has a last position behind its end: nothing tells of it but what comes later.
fn land(flight: &mut Flight, name: u64) -> Result<usize, Fault> {
    let mut packets = 0;
    while let Some(burst) = flight.eldest_burst() {
        let is_silent = burst.last == burst.end;
        if !is_silent && u64::from(burst.last) != name {
            return Err(Fault::OutOfOrder);
        }
        packets += burst.packets as usize;
        flight.landed(burst);
        if !is_silent {
            return Ok(packets);
        }
    }
    Err(Fault::NothingOnItsWay)
}

impl send::SendRing for SendRing {
    fn flight(&self) -> &Flight {
        &self.flight
    }

    fn complete(&mut self, _: &QueueCounters) -> Result<(), Fault> {
        if self.flight.len() == 0 {
            return Ok(());
        }
        let Self { room, completions, flight, .. } = self;
        let told = room.poll(completions, BATCH).map_err(|error| {
            tracing::warn!("{error}");
            Fault::Library
        })?;
        let (mut through, mut result) = (0, Ok(()));
        for said in told {
            if said.status != 0 {
                result = Err(Fault::Failed { status: said.status, vendor: said.vendor_error });
                break;
            }
            match land(flight, said.request) {
                Ok(packets) => through += packets,
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            }
        }
        flight.free(through);
        result
    }

    fn post(&mut self, batch: &mut Batch, limits: &Limits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let start = self.flight.next;
        let most = self.flight.room().min(batch.len()).min((self.depth - self.flight.used()) as usize);
        let Self { pair, requests, reach, .. } = self;
        requests.clear();
        let mut result = Ok(());
        for (n, packet) in batch.as_mut_slice()[..most].iter_mut().enumerate() {
            let name = u64::from(start.wrapping_add(n as u32));
            match reach.prepare(packet, limits) {
                Ok(checksums) if requests.push(name, checksums, reach.pieces(packet).flatten()) => {}
                Ok(_) => break,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
            }
        }
        let mut count = requests.len();
        let mut is_silent = false;
        if let Err(refused) = requests.post(pair) {
            tracing::debug!("{}", refused.error);
            (count, is_silent, result) = (refused.accepted, true, Err(DropReason::TxError));
        }
        let bytes = batch.as_slice()[..count].iter().map(|packet| packet.len() as u64).sum();
        if count > 0 {
            let end = start.wrapping_add(count as u32);
            let last = if is_silent { end } else { end.wrapping_sub(1) };
            self.flight.launch(batch, Burst { packets: count as u32, last, end });
        }
        (count, bytes, result)
    }

    /// Posting told the device.
    fn ring_doorbell(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Pool;

    #[test]
    fn a_burst_that_failed_halfway_is_freed_with_the_next() {
        let pool = Pool::new("land", 64).unwrap();
        let mut flight = Flight::new(16, 16, Ending::none());
        let launch = |flight: &mut Flight, packets: u32, is_silent: bool| {
            let mut batch = Batch::new();
            pool.take_batch(packets as usize, &mut batch);
            let end = flight.next + packets;
            flight.launch(&mut batch, Burst { packets, last: if is_silent { end } else { end - 1 }, end });
        };
        launch(&mut flight, 2, false);
        launch(&mut flight, 3, true);
        launch(&mut flight, 4, false);
        assert_eq!(land(&mut flight, 0), Err(Fault::OutOfOrder));
        assert_eq!(land(&mut flight, u64::MAX), Err(Fault::OutOfOrder));
        assert_eq!(land(&mut flight, 1), Ok(2));
        assert_eq!(land(&mut flight, 8), Ok(7));
        assert_eq!(land(&mut flight, 8), Err(Fault::NothingOnItsWay));
        assert_eq!(flight.used(), 0);
        flight.free(9);
        assert_eq!(pool.outstanding(), 0);
    }
}
