//! Transmit queues.

use std::fmt;
use std::iter::once;
use std::mem::replace;
use std::ops::Range;
use std::sync::Arc;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::{
    CQE_TX_GDMA_ERR, CQE_TX_OKAY, CQE_TX_SA_DROP, CQE_TX_VLAN_TAGGING_VIOLATION, SqDoorbell, TX_OFFSET, TxOffset,
};

use super::cq::{CompletionQueue, Positions};
use super::offload;
use super::wqe::{
    Addressing, Lso, MAX_SEGMENTS, MAX_UNITS, SUPPRESS, TxOffloads, UNIT, Units, Wqe, pair, short_header, tail,
};
use crate::drivers::nic::common::ETHERNET_HEADER;
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::tx_queue::{self, PostedBurst, TxInFlight, TxLimits};
use crate::drivers::sw_offload::REQUESTS;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::driver::{FastPathFilter, TxBurst};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Batch, Packet, Pool};

/// Memory of a send queue, as `manadv_init_obj` reports it.
#[derive(Debug)]
pub(super) struct TxQueueMemory {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// The completion queue, with as many bytes as the requested entries need.
    pub(super) completions: DeviceMemory,
    /// Number of the send queue.
    pub(super) sq: u32,
    /// Number of the completion queue.
    pub(super) cq: u32,
    /// Virtual port in the out-of-band part of every packet.
    pub(super) vport: u32,
    /// Doorbell register of send queues.
    pub(super) doorbell: Doorbell,
}

/// A send ring.
pub(super) struct TxRing {
    ring: Units,
    completions: CompletionQueue,
    doorbell: Doorbell,
    mrs: Arc<MrTable>,
    number: u32,
    addressing: Addressing,
    plain: u64,
    positions: Positions,
    /// Packets in flight; positions are units. Last field, so that the owner of the hardware queue is dropped
    /// first.
    in_flight: TxInFlight,
}

impl fmt::Debug for TxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxRing").field("number", &self.number).field("flight", &self.in_flight).finish_non_exhaustive()
    }
}

/// A described packet. Its last descriptor is written except for the first unit.
struct Described {
    unit: [u64; UNIT],
    /// Units of the first descriptor, if there are two.
    lead: u32,
    /// Units of all descriptors.
    units: u32,
}

/// Returns the parts of a packet's segments that lie in a byte range.
fn pieces(packet: &Packet, part: Range<usize>) -> impl Iterator<Item = &[u8]> {
    let mut at = 0;
    packet.segments().filter_map(move |segment| {
        let within = |position: usize| position.saturating_sub(at).min(segment.len());
        let piece = &segment[within(part.start)..within(part.end)];
        at += segment.len();
        (!piece.is_empty()).then_some(piece)
    })
}

impl TxRing {
    /// Creates an unused ring. `None` if sizes are not powers of two.
    pub(super) fn new(
        teardown: QueueTeardown,
        mrs: Arc<MrTable>,
        queue_memory: TxQueueMemory,
        positions: Positions,
    ) -> Option<Self> {
        let completions = CompletionQueue::new(&queue_memory.completions, queue_memory.sq, true)?;
        let addressing = Addressing::new(queue_memory.sq, queue_memory.cq, queue_memory.vport);
        let depth = completions.count();
        Some(Self {
            ring: Units::new(&queue_memory.ring)?,
            completions,
            doorbell: queue_memory.doorbell,
            mrs,
            number: queue_memory.sq,
            plain: addressing.plain(),
            addressing,
            positions,
            // Every packet may get a completion, in bursts of one packet or after errors.
            in_flight: TxInFlight::new(depth, depth, teardown),
        })
    }

    /// Handles the completion of a packet that was not sent. Returns true if it was the last of its burst,
    /// which its position tells. If the position is unknown, the queue is recreated: keeping the burst open
    /// might last forever, and ending it might free packets that are still to be sent.
    #[cold]
    fn failed(
        &self,
        kind: u32,
        reported: u32,
        burst: PostedBurst,
        counters: &QueueCounters,
    ) -> Result<bool, QueueFault> {
        match kind {
            CQE_TX_SA_DROP..=CQE_TX_VLAN_TAGGING_VIOLATION => {}
            CQE_TX_GDMA_ERR => return Err(QueueFault::Stopped),
            _ => return Err(QueueFault::UnknownType),
        }
        let last = burst.last.wrapping_sub(self.in_flight.oldest);
        let distance = self.positions.distance(reported, self.in_flight.oldest, last + 1, self.ring.count() - 1);
        let into = distance.ok_or(QueueFault::UnknownPosition)?;
        // Its bytes stay counted: the completion does not tell which packet of the burst it was.
        counters.count_unsent(DropReason::TxError, 1, 0);
        Ok(into == last)
    }

    /// Describes a packet that is not eligible for the fast path. `None`: the ring has no room at the moment.
    #[inline(never)]
    fn describe(
        &self,
        packet: &mut Packet,
        limits: &TxLimits<'_>,
        at: u32,
        free: u32,
    ) -> Result<Option<Described>, DropReason> {
        // Room for the longest descriptor, so that no packet is processed twice for lack of room.
        let max_units = if packet.flags().contains(Flags::TX_SEGMENT) { 2 * MAX_UNITS } else { MAX_UNITS };
        if (free as usize) < max_units {
            return Ok(None);
        }
        let offloads =
            if packet.flags().intersects(REQUESTS) { offload::tx_offloads(packet)? } else { TxOffloads::default() };
        let len = packet.len();
        if len < ETHERNET_HEADER {
            return Err(DropReason::TooShort);
        }
        if len > if offloads.segment.is_some() { offload::MAX_TSO } else { limits.longest } {
            return Err(DropReason::TooLong);
        }
        let (first, last) = match self.gather(packet, &offloads, limits.pool) {
            Some(wqes) => wqes,
            None => {
                // Too many segments, or a segment outside registered memory.
                let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
                limits.counters.copied.add(1);
                *packet = copy;
                self.gather(packet, &offloads, limits.pool).ok_or(DropReason::TxError)?
            }
        };
        let lead = first.as_ref().map_or(0, |wqe| wqe.units() as u32);
        if let Some(first) = first {
            let start = first.write_rest(&self.ring, at);
            self.ring.write(at, start);
        }
        let unit = last.write_rest(&self.ring, at.wrapping_add(lead));
        Ok(Some(Described { unit, lead, units: lead + last.units() as u32 }))
    }

    /// Returns the packet's descriptor, or two for a TSO packet with too many segments. `None` if two are not
    /// sufficient, or a segment is outside registered memory.
    fn gather(&self, packet: &mut Packet, offloads: &TxOffloads, pool: &Pool) -> Option<(Option<Wqe>, Wqe)> {
        // The first entry of a TSO packet must consist of the headers.
        let headers = offloads.segment.map_or(0, |lso| lso.header.into());
        let whole = pieces(packet, 0..headers).chain(pieces(packet, headers..packet.len()));
        if let Some(wqe) = self.list(whole, offloads) {
            return Some((None, wqe));
        }
        // Pool buffers hold 2 KB: a TSO packet of 64 KB has more of them than a descriptor has entries.
        let Lso { mss, .. } = offloads.segment?;
        let segments = (packet.len() - headers) / 2 / usize::from(mss);
        let cut = headers + segments * usize::from(mss);
        if segments == 0 {
            return None;
        }
        let mut second = pool.take()?;
        second.append(headers)?.copy_from_slice(packet.data().get(..headers)?);
        offload::make_latter(second.data_mut(), packet.header_lengths(), segments, cut - headers);
        let first = self.list(pieces(packet, 0..headers).chain(pieces(packet, headers..cut)), offloads)?;
        let last = self.list(once(second.data()).chain(pieces(packet, cut..packet.len())), offloads)?;
        // The copied headers stay with the packet until it is sent.
        packet.append_segment(second).ok()?;
        let layers = packet.header_lengths();
        offload::make_former(packet.data_mut(), layers);
        Some((Some(first), last))
    }

    /// Returns a descriptor of these pieces. `None` if there are too many, or one is outside registered
    /// memory.
    fn list<'p>(&self, pieces: impl Iterator<Item = &'p [u8]>, offloads: &TxOffloads) -> Option<Wqe> {
        let mut wqe = self.addressing.begin(offloads);
        let mut entries = 0;
        for piece in pieces {
            let (address, key) = self.mrs.translate(piece.as_ptr() as u64)?;
            if entries == MAX_SEGMENTS || !wqe.push(address, key, piece.len()) {
                return None;
            }
            entries += 1;
        }
        wqe.finish(entries as u32);
        Some(wqe)
    }
}

impl tx_queue::TxRing for TxRing {
    #[inline(always)]
    fn in_flight(&self) -> &TxInFlight {
        &self.in_flight
    }

    #[inline(always)]
    fn complete(&mut self, counters: &QueueCounters) -> Result<(), QueueFault> {
        let mut through = 0;
        let mask = self.ring.count() - 1;
        // The bound keeps a device that writes endlessly from blocking the worker.
        for _ in 0..self.in_flight.max_bursts() {
            let mut reader = self.completions.reader();
            let Some(entry) = reader.peek()? else { break };
            let (kind, reported) = (entry.cqe_type(), TxOffset(entry.word(TX_OFFSET)).wqe());
            reader.advance();
            let next = reader.next();
            let Some(burst) = self.in_flight.oldest_burst() else { return Err(QueueFault::UnexpectedCompletion) };
            let done = if kind == CQE_TX_OKAY {
                if !self.positions.fits(reported, burst.last, 1, mask) {
                    return Err(QueueFault::OutOfOrder);
                }
                true
            } else {
                self.failed(kind, reported, burst, counters)?
            };
            self.completions.resume(next);
            if done {
                through += burst.packets as usize;
                self.in_flight.complete_oldest(burst);
            }
        }
        self.in_flight.free(through);
        Ok(())
    }

    #[inline(always)]
    fn post(&mut self, batch: &mut Batch, limits: &TxLimits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let mut burst = TxBurst::new(batch, self.in_flight.room(), FastPathFilter::new(limits.pool, REQUESTS));
        // Local copies: from fields, the compiler would reload them after each write to the ring.
        let (ring, primary) = (self.ring.view(), self.mrs.primary_mr());
        let (lkey, iova_offset, plain, range) =
            (primary.lkey(), primary.iova_offset(), self.plain, limits.longest - ETHERNET_HEADER);
        let (start, free) = (self.in_flight.next, self.ring.count() - self.in_flight.used());
        let (mut bytes, mut result) = (0, Ok(()));
        // First unit of the previous WQE. It is written once it is known whether another one follows: only
        // the last requests a completion.
        let (mut deferred, mut deferred_at) = ([0; UNIT], start);
        let (mut at, mut is_first) = (start, true);
        let mut defer = |Described { unit, lead, units }| {
            if !replace(&mut is_first, false) {
                ring.write(deferred_at, deferred);
            }
            (deferred, deferred_at) = (unit, at.wrapping_add(lead));
            at = at.wrapping_add(units);
            at.wrapping_sub(start)
        };
        let mut used = 0;
        while burst.remaining() > 0 {
            let room = if self.addressing.needs_long { 0 } else { free - used };
            let taken = burst.describe_fast(room as usize, |address, len| {
                if len.wrapping_sub(ETHERNET_HEADER) > range {
                    return false;
                }
                bytes += len as u64;
                let address = address.wrapping_add(iova_offset);
                let unit = [short_header(1), plain, address, pair(lkey, len as u32)];
                used = defer(Described { unit, lead: 0, units: 1 });
                true
            });
            if taken > 0 {
                continue;
            }
            let at = start.wrapping_add(used);
            match burst.describe_any(|packet| self.describe(packet, limits, at, free - used)) {
                Ok(Some((described, len))) => {
                    used = defer(described);
                    bytes += len;
                }
                Ok(None) => break,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
            }
        }
        let taken = burst.taken();
        if taken > 0 {
            deferred[1] &= !SUPPRESS;
            ring.write(deferred_at, deferred);
            self.in_flight.post_burst(burst, deferred_at, at);
        }
        (taken, bytes, result)
    }

    #[inline(always)]
    fn ring_doorbell(&mut self) {
        let tail = tail(self.in_flight.next);
        self.doorbell.ring(SqDoorbell::default().with_id(self.number.into()).with_tail(tail.into()).0);
    }

    fn segments(&self, packet: &Packet) -> Option<bool> {
        if offload::takes_superframe(packet) { None } else { Some(false) }
    }
}
