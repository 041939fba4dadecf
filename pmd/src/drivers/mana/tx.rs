//! Transmit queues.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::{
    CQE_TX_GDMA_ERR, CQE_TX_OKAY, CQE_TX_SA_DROP, CQE_TX_VLAN_TAGGING_VIOLATION, SqDoorbell, TX_OFFSET, TxOffset,
};

use super::cq::{CompletionQueue, Positions};
use super::exchange::Exchange;
use super::fault::Fault;
use super::keys::Keys;
use super::offload::{self, REQUESTS};
use super::wqe::{Addressing, MAX_SEGMENTS, MAX_UNITS, SUPPRESS, UNIT, Units, Wishes, Wqe, pair, short_header, tail};
use crate::counters::QueueCounters;
use crate::drops::DropReason;
use crate::packet::{Batch, Held, Packet, Pool};
use crate::port::TransmitQueue;

/// Bytes of an Ethernet header.
const SHORTEST: usize = 14;
/// VLAN tags that may come on top of the MTU.
const TAGS: usize = 8;
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

/// Packets of one burst: only the last of them gets a completion, which stands for all.
#[derive(Clone, Copy, Debug, Default)]
struct Burst {
    packets: u32,
    /// Position of the last WQE, and of what follows it, in units.
    last: u32,
    end: u32,
}

/// A send queue with the packets that are on their way. Dropped, it first destroys the hardware's queue, then frees the packets.
pub(super) struct SendRing {
    // What keeps the hardware's queue comes before what that queue reads.
    _hardware: Box<dyn Any + Send>,
    ring: Units,
    completions: CompletionQueue,
    doorbell: Doorbell,
    held: Held,
    keys: Arc<Keys>,
    number: u32,
    addressing: Addressing,
    plain: u64,
    /// Positions, in units, counted for ever: of the next WQE, and of the eldest that is on its way.
    next: u32,
    eldest: u32,
    positions: Positions,
    /// Bursts on their way, `first_burst` the eldest; a power of two of slots.
    bursts: Box<[Burst]>,
    first_burst: u32,
    end_burst: u32,
}

impl fmt::Debug for SendRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRing").field("number", &self.number).field("held", &self.held).finish_non_exhaustive()
    }
}

impl SendRing {
    /// A ring that no packet has gone through. `hardware` is what is dropped before the packets are freed. `None` if sizes are no powers
    /// of two.
    pub(super) fn new(
        hardware: Box<dyn Any + Send>,
        keys: Arc<Keys>,
        place: SendPlace,
        positions: Positions,
    ) -> Option<Self> {
        let completions = CompletionQueue::new(&place.completions, place.sq, true)?;
        let addressing = Addressing::new(place.sq, place.cq, place.vport);
        let depth = completions.count();
        Some(Self {
            _hardware: hardware,
            ring: Units::new(&place.ring)?,
            completions,
            doorbell: place.doorbell,
            // Every packet may get a completion, if bursts are of one packet each or go wrong.
            held: Held::with_room_for(depth),
            keys,
            number: place.sq,
            plain: addressing.plain(),
            addressing,
            next: 0,
            eldest: 0,
            positions,
            bursts: vec![Burst::default(); depth as usize].into(),
            first_burst: 0,
            end_burst: 0,
        })
    }

    /// Packets on their way.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    #[inline(always)]
    fn burst(&mut self, counter: u32) -> &mut Burst {
        let mask = self.bursts.len() - 1;
        &mut self.bursts[counter as usize & mask]
    }

    /// Takes note of what the device has sent, and frees it.
    #[inline(always)]
    fn complete(&mut self, counters: &QueueCounters) -> Result<(), Fault> {
        let mut through = 0;
        let mask = self.ring.count() - 1;
        // A device that writes without an end must not keep the worker here.
        for _ in 0..self.bursts.len() {
            let mut reader = self.completions.reader();
            let Some(entry) = reader.look()? else { break };
            let (kind, said) = (entry.cqe_type(), TxOffset(entry.word(TX_OFFSET)).wqe());
            reader.advance();
            let next = reader.next();
            if self.first_burst == self.end_burst {
                return Err(Fault::NothingOnItsWay);
            }
            let burst = *self.burst(self.first_burst);
            let done = if kind == CQE_TX_OKAY {
                if !self.positions.fits(said, burst.last, 1, mask) {
                    return Err(Fault::OutOfOrder);
                }
                true
            } else {
                self.failed(kind, said, self.eldest, burst, counters)?
            };
            self.completions.resume(next);
            if done {
                through += burst.packets as usize;
                self.eldest = burst.end;
                self.first_burst = self.first_burst.wrapping_add(1);
            }
        }
        if through > 0 {
            self.held.free_front(through);
        }
        Ok(())
    }

    /// A packet that was not sent. It has a completion of its own; whether it was the last of its burst, so that there will be no other,
    /// its position tells.
    #[cold]
    fn failed(&self, kind: u32, said: u32, eldest: u32, burst: Burst, counters: &QueueCounters) -> Result<bool, Fault> {
        match kind {
            CQE_TX_SA_DROP..=CQE_TX_VLAN_TAGGING_VIOLATION => {}
            CQE_TX_GDMA_ERR => return Err(Fault::Stopped),
            _ => return Err(Fault::UnknownType),
        }
        counters.drops.add(DropReason::TxError, 1);
        let mask = self.ring.count() - 1;
        let into = self.positions.units(said).wrapping_sub(eldest) & mask;
        // A position that is nowhere in the burst says nothing: then the burst ends here, as it would without positions.
        Ok(into >= burst.last.wrapping_sub(eldest))
    }

    /// Describes packets from the front of the batch to the device, tells it, and takes them in. Returns how many, with their bytes; an error
    /// is about the packet behind them, which can never be sent.
    #[inline(always)]
    fn post(&mut self, batch: &mut Batch, limits: &Limits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let most = self.held.room().min(batch.len());
        // Values, not fields: as far as the compiler knows, what is written to the ring could change them.
        let ring = self.ring.view();
        let (home, home_bytes, lkey, distance) = self.keys.home().bounds();
        let (plain, all_long, longest) = (self.plain, self.addressing.needs_long, limits.longest);
        let (start, free) = (self.next, self.ring.count() - self.next.wrapping_sub(self.eldest));
        let (mut n, mut bytes, mut result) = (0, 0, Ok(()));
        // The first unit of the WQE before, which is written when it is known whether another follows: only the last gets a completion.
        let (mut held_back, mut held_back_at) = ([0; UNIT], start);
        let mut at = start;
        for packet in &mut batch.as_mut_slice()[..most] {
            let used = at.wrapping_sub(start);
            let data = packet.data();
            let (address, len) = (data.as_ptr() as u64, data.len());
            let simple = !packet.flags().intersects(REQUESTS)
                & !packet.is_chain()
                & (len.wrapping_sub(SHORTEST) <= longest - SHORTEST)
                & (address.wrapping_sub(home) < home_bytes)
                & !all_long;
            let (unit, units) = if simple {
                if used >= free {
                    break;
                }
                bytes += len as u64;
                ([short_header(1), plain, address.wrapping_add(distance), pair(lkey, len as u32)], 1)
            } else {
                match self.describe(packet, limits, at, free - used) {
                    Ok(Some(described)) => {
                        bytes += packet.len() as u64;
                        described
                    }
                    Ok(None) => break,
                    Err(reason) => {
                        result = Err(reason);
                        break;
                    }
                }
            };
            if n > 0 {
                ring.write(held_back_at, held_back);
            }
            (held_back, held_back_at) = (unit, at);
            at = at.wrapping_add(units);
            n += 1;
        }
        if n > 0 {
            held_back[1] &= !SUPPRESS;
            ring.write(held_back_at, held_back);
            self.next = at;
            *self.burst(self.end_burst) = Burst { packets: n as u32, last: held_back_at, end: at };
            self.end_burst = self.end_burst.wrapping_add(1);
            self.held.take_front(batch, n);
        }
        (n, bytes, result)
    }

    /// Describes a packet that is a chain, asks for something or lies elsewhere; all but the first unit is written. `None`: no room in the
    /// ring at the moment.
    #[inline(never)]
    fn describe(
        &self,
        packet: &mut Packet,
        limits: &Limits<'_>,
        at: u32,
        free: u32,
    ) -> Result<Option<([u64; UNIT], u32)>, DropReason> {
        // Enough for the longest, so that nothing is worked on twice for want of room.
        if (free as usize) < MAX_UNITS {
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
        let wqe = match self.gather(packet, &wishes) {
            Some(wqe) => wqe,
            None => {
                // Too many segments, or in memory that the device cannot reach.
                let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
                limits.counters.copied.add(1);
                *packet = copy;
                self.gather(packet, &wishes).ok_or(DropReason::TxError)?
            }
        };
        Ok(Some((wqe.write_rest(&self.ring, at), wqe.units() as u32)))
    }

    /// The packet's segments as a list; `None` if there are too many, or one where the device cannot read.
    fn gather(&self, packet: &Packet, wishes: &Wishes) -> Option<Wqe> {
        let mut wqe = self.addressing.begin(wishes);
        let mut entries = 0;
        // What is cut needs the headers, and nothing else, in the first entry.
        let mut split = wishes.segment.map_or(0, |lso| lso.header.into());
        for segment in packet.segments() {
            let (head, rest) = segment.split_at_checked(split)?;
            split = 0;
            for piece in [head, rest].into_iter().filter(|piece| !piece.is_empty()) {
                let (address, key) = self.keys.reach(piece.as_ptr() as u64)?;
                if entries == MAX_SEGMENTS || !wqe.push(address, key, piece.len()) {
                    return None;
                }
                entries += 1;
            }
        }
        wqe.finish(entries as u32);
        Some(wqe)
    }

    /// Tells the device how far the ring is filled.
    #[inline(always)]
    fn ring_doorbell(&self) {
        let tail = tail(self.next);
        self.doorbell.ring(SqDoorbell::default().with_id(self.number.into()).with_tail(tail.into()).0);
    }
}

/// What a port lets through, and where copies come from.
struct Limits<'a> {
    longest: usize,
    pool: &'a Pool,
    counters: &'a QueueCounters,
}

/// Sends packets of one worker.
pub(super) struct Sender {
    ring: Option<SendRing>,
    exchange: Arc<Exchange<SendRing>>,
    counters: Arc<QueueCounters>,
    pool: Pool,
    /// Bytes of the longest frame.
    longest: usize,
}

impl Sender {
    /// Sends by the ring that waits in `exchange`; copies of packets that the device cannot reach come from `pool`.
    pub(super) fn new(exchange: Arc<Exchange<SendRing>>, pool: Pool, mtu: u16) -> Self {
        let longest = usize::from(mtu) + SHORTEST + TAGS;
        let mut ring = None;
        exchange.visit(&mut ring);
        Self { ring, exchange, counters: Arc::default(), pool, longest }
    }

    /// Whether nothing is on its way any more, after a look.
    pub(super) fn is_idle(&mut self) -> bool {
        self.reclaim();
        self.ring.as_ref().is_none_or(|ring| ring.len() == 0)
    }

    /// What is on its way will not arrive: nobody knows which of it did.
    #[cold]
    fn give_up(&mut self, fault: Fault) {
        let lost = self.ring.as_ref().map_or(0, SendRing::len);
        self.counters.drops.add(DropReason::TxError, lost as u64);
        self.exchange.give_up(&mut self.ring, fault);
    }

    #[cold]
    fn visit(&mut self) -> bool {
        let lost = self.ring.as_ref().map_or(0, SendRing::len);
        let living = self.exchange.visit(&mut self.ring);
        if self.ring.is_none() {
            self.counters.drops.add(DropReason::DeviceLost, lost as u64);
        }
        living
    }
}

impl TransmitQueue for Sender {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        if self.exchange.calls() && !self.visit() {
            self.counters.drops.add(DropReason::DeviceLost, batch.len() as u64);
            batch.clear();
            return;
        }
        let Some(ring) = &mut self.ring else { return self.counters.empty.add(1) };
        if let Err(fault) = ring.complete(&self.counters) {
            self.give_up(fault);
            return self.counters.empty.add(1);
        }
        let limits = Limits { longest: self.longest, pool: &self.pool, counters: &self.counters };
        let (mut packets, mut bytes) = (0, 0);
        loop {
            let (n, sum, result) = ring.post(batch, &limits);
            packets += n as u64;
            bytes += sum;
            match result {
                Ok(()) => break,
                Err(reason) => {
                    self.counters.drops.add(reason, 1);
                    batch.free_front(1);
                }
            }
        }
        if packets > 0 {
            ring.ring_doorbell();
        }
        self.counters.count_burst(packets, bytes);
    }

    fn reclaim(&mut self) {
        if self.exchange.calls() {
            self.visit();
        }
        if let Some(Err(fault)) = self.ring.as_mut().map(|ring| ring.complete(&self.counters)) {
            self.give_up(fault);
        }
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
