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
use super::offload::{self, REQUESTS};
use super::wqe::{
    Addressing, Lso, MAX_SEGMENTS, MAX_UNITS, SUPPRESS, UNIT, Units, Wishes, Wqe, pair, short_header, tail,
};
use crate::counters::QueueCounters;
use crate::drivers::direct::SHORTEST;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::send::{self, Burst, Flight, Limits};
use crate::drops::DropReason;
use crate::packet::front::{Front, Plain};
use crate::packet::offload::Flags;
use crate::packet::{Batch, Packet, Pool};

/// Longest packet that the device is asked to cut.
const LONGEST_LSO: usize = 1 << 16;

/// Where a send queue is, as `manadv_init_obj` says.
#[derive(Debug)]
pub(super) struct SendPlace {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// The completion queue: as many bytes as entries were asked for.
    pub(super) completions: DeviceMemory,
    /// Number of the send queue.
    pub(super) sq: u32,
    /// Number of the completion queue.
    pub(super) cq: u32,
    /// What every packet names as its virtual port.
    pub(super) vport: u32,
    /// Register of send queues.
    pub(super) doorbell: Doorbell,
}

/// A send queue.
pub(super) struct SendRing {
    ring: Units,
    completions: CompletionQueue,
    doorbell: Doorbell,
    keys: Arc<Keys>,
    number: u32,
    addressing: Addressing,
    plain: u64,
    positions: Positions,
    /// Positions in units. Last: whoever keeps the hardware's queue goes before.
    flight: Flight,
}

impl fmt::Debug for SendRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRing").field("number", &self.number).field("flight", &self.flight).finish_non_exhaustive()
    }
}

/// What a packet became in the ring, where all but one unit is written.
struct Described {
    unit: [u64; UNIT],
    /// Units in front of it: those of the first descriptor, where there are two.
    lead: u32,
    /// Units in all.
    units: u32,
}

/// What of a packet lies in a range of its bytes.
fn pieces(packet: &Packet, part: Range<usize>) -> impl Iterator<Item = &[u8]> {
    let mut at = 0;
    packet.segments().filter_map(move |segment| {
        let within = |position: usize| position.saturating_sub(at).min(segment.len());
        let piece = &segment[within(part.start)..within(part.end)];
        at += segment.len();
        (!piece.is_empty()).then_some(piece)
    })
}

impl SendRing {
    /// A ring that no packet has gone through. `None` if sizes are no powers of two.
    pub(super) fn new(ending: Ending, keys: Arc<Keys>, place: SendPlace, positions: Positions) -> Option<Self> {
        let completions = CompletionQueue::new(&place.completions, place.sq, true)?;
        let addressing = Addressing::new(place.sq, place.cq, place.vport);
        let depth = completions.count();
        Some(Self {
            ring: Units::new(&place.ring)?,
            completions,
            doorbell: place.doorbell,
            keys,
            number: place.sq,
            plain: addressing.plain(),
            addressing,
            positions,
            // Every packet may get a completion, if bursts are of one packet each or go wrong.
            flight: Flight::new(depth, depth, ending),
        })
    }

    /// A packet that was not sent. It has a completion of its own; whether it was the last of its burst, so that there will be no other,
    /// its position tells. If that is not known, the queue is made anew: to leave the burst open might be for ever, to end it might free
    /// packets that are still to be sent.
    #[cold]
    fn failed(&self, kind: u32, said: u32, burst: Burst, counters: &QueueCounters) -> Result<bool, Fault> {
        match kind {
            CQE_TX_SA_DROP..=CQE_TX_VLAN_TAGGING_VIOLATION => {}
            CQE_TX_GDMA_ERR => return Err(Fault::Stopped),
            _ => return Err(Fault::UnknownType),
        }
        let last = burst.last.wrapping_sub(self.flight.eldest);
        let place = self.positions.place(said, self.flight.eldest, last + 1, self.ring.count() - 1);
        let into = place.ok_or(Fault::Unplaced)?;
        counters.drops.add(DropReason::TxError, 1);
        Ok(into == last)
    }

    /// Describes a packet that is a chain, asks for something or lies elsewhere. `None`: no room in the ring at the moment.
    #[inline(never)]
    fn describe(
        &self,
        packet: &mut Packet,
        limits: &Limits<'_>,
        at: u32,
        free: u32,
    ) -> Result<Option<Described>, DropReason> {
        // Enough for the longest, so that nothing is worked on twice for want of room.
        let most = if packet.flags().contains(Flags::TX_SEGMENT) { 2 * MAX_UNITS } else { MAX_UNITS };
        if (free as usize) < most {
            return Ok(None);
        }
        let wishes = if packet.flags().intersects(REQUESTS) { offload::wishes(packet)? } else { Wishes::default() };
        let len = packet.len();
        if len < SHORTEST {
            return Err(DropReason::TooShort);
        }
        if len > if wishes.segment.is_some() { LONGEST_LSO } else { limits.longest } {
            return Err(DropReason::TooLong);
        }
        let (first, last) = match self.gather(packet, &wishes, limits.pool) {
            Some(wqes) => wqes,
            None => {
                // Too many segments, or in memory that the device cannot reach.
                let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
                limits.counters.copied.add(1);
                *packet = copy;
                self.gather(packet, &wishes, limits.pool).ok_or(DropReason::TxError)?
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

    /// The packet's descriptor; or two, of one that is cut and has more segments than a descriptor. `None` if even these do not take it, or
    /// a segment lies where the device cannot read.
    fn gather(&self, packet: &mut Packet, wishes: &Wishes, pool: &Pool) -> Option<(Option<Wqe>, Wqe)> {
        // What is cut needs the headers, and nothing else, in the first entry.
        let headers = wishes.segment.map_or(0, |lso| lso.header.into());
        let whole = pieces(packet, 0..headers).chain(pieces(packet, headers..packet.len()));
        if let Some(wqe) = self.list(whole, wishes) {
            return Some((None, wqe));
        }
        // Pool buffers hold 2 KB, so that a TCP packet of 64 KB has more of them than entries fit.
        let Lso { mss, .. } = wishes.segment?;
        let segments = (packet.len() - headers) / 2 / usize::from(mss);
        let cut = headers + segments * usize::from(mss);
        if segments == 0 {
            return None;
        }
        let mut behind = pool.take()?;
        behind.append(headers)?.copy_from_slice(packet.data().get(..headers)?);
        offload::make_latter(behind.data_mut(), packet.layers(), segments, cut - headers);
        let first = self.list(pieces(packet, 0..headers).chain(pieces(packet, headers..cut)), wishes)?;
        let last = self.list(once(behind.data()).chain(pieces(packet, cut..packet.len())), wishes)?;
        // Its headers are kept with the packet until it is sent.
        packet.append_segment(behind).ok()?;
        let layers = packet.layers();
        offload::make_former(packet.data_mut(), layers);
        Some((Some(first), last))
    }

    /// A descriptor of these pieces; `None` if there are too many, or one where the device cannot read.
    fn list<'p>(&self, pieces: impl Iterator<Item = &'p [u8]>, wishes: &Wishes) -> Option<Wqe> {
        let mut wqe = self.addressing.begin(wishes);
        let mut entries = 0;
        for piece in pieces {
            let (address, key) = self.keys.reach(piece.as_ptr() as u64)?;
            if entries == MAX_SEGMENTS || !wqe.push(address, key, piece.len()) {
                return None;
            }
            entries += 1;
        }
        wqe.finish(entries as u32);
        Some(wqe)
    }
}

impl send::SendRing for SendRing {
    #[inline(always)]
    fn flight(&self) -> &Flight {
        &self.flight
    }

    #[inline(always)]
    fn complete(&mut self, counters: &QueueCounters) -> Result<(), Fault> {
        let mut through = 0;
        let mask = self.ring.count() - 1;
        // A device that writes without an end must not keep the worker here.
        for _ in 0..self.flight.most_bursts() {
            let mut reader = self.completions.reader();
            let Some(entry) = reader.look()? else { break };
            let (kind, said) = (entry.cqe_type(), TxOffset(entry.word(TX_OFFSET)).wqe());
            reader.advance();
            let next = reader.next();
            let Some(burst) = self.flight.eldest_burst() else { return Err(Fault::NothingOnItsWay) };
            let done = if kind == CQE_TX_OKAY {
                if !self.positions.fits(said, burst.last, 1, mask) {
                    return Err(Fault::OutOfOrder);
                }
                true
            } else {
                self.failed(kind, said, burst, counters)?
            };
            self.completions.resume(next);
            if done {
                through += burst.packets as usize;
                self.flight.landed(burst);
            }
        }
        self.flight.free(through);
        Ok(())
    }

    #[inline(always)]
    fn post(&mut self, batch: &mut Batch, limits: &Limits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let mut front = Front::new(batch, self.flight.room(), Plain::of(limits.pool, REQUESTS));
        // Values, not fields: as far as the compiler knows, what is written to the ring could change them.
        let (ring, home) = (self.ring.view(), self.keys.home());
        let (lkey, distance, plain, range) = (home.lkey(), home.distance(), self.plain, limits.longest - SHORTEST);
        let (start, free) = (self.flight.next, self.ring.count() - self.flight.used());
        let (mut bytes, mut result) = (0, Ok(()));
        // The first unit of the WQE before, which is written when it is known whether another follows: only the last gets a completion.
        let (mut held_back, mut held_back_at) = ([0; UNIT], start);
        let (mut at, mut is_first) = (start, true);
        let mut hold_back = |Described { unit, lead, units }| {
            if !replace(&mut is_first, false) {
                ring.write(held_back_at, held_back);
            }
            (held_back, held_back_at) = (unit, at.wrapping_add(lead));
            at = at.wrapping_add(units);
            at.wrapping_sub(start)
        };
        let mut used = 0;
        while front.left() > 0 {
            let room = if self.addressing.needs_long { 0 } else { free - used };
            let taken = front.plain(room as usize, |address, len| {
                if len.wrapping_sub(SHORTEST) > range {
                    return false;
                }
                bytes += len as u64;
                let address = address.wrapping_add(distance);
                let unit = [short_header(1), plain, address, pair(lkey, len as u32)];
                used = hold_back(Described { unit, lead: 0, units: 1 });
                true
            });
            if taken > 0 {
                continue;
            }
            let at = start.wrapping_add(used);
            match front.any(|packet| self.describe(packet, limits, at, free - used)) {
                Ok(Some((described, len))) => {
                    used = hold_back(described);
                    bytes += len;
                }
                Ok(None) => break,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
            }
        }
        let taken = front.taken();
        if taken > 0 {
            held_back[1] &= !SUPPRESS;
            ring.write(held_back_at, held_back);
            self.flight.launch_front(front, held_back_at, at);
        }
        (taken, bytes, result)
    }

    #[inline(always)]
    fn ring_doorbell(&mut self) {
        let tail = tail(self.flight.next);
        self.doorbell.ring(SqDoorbell::default().with_id(self.number.into()).with_tail(tail.into()).0);
    }
}
