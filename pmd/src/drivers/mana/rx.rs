//! Receive queues.

use std::fmt;
use std::mem::swap;
use std::sync::Arc;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::{
    CQE_RX_COALESCED_4, CQE_RX_OBJECT_FENCE, CQE_RX_OKAY, CQE_RX_TRUNCATED, OOB_SHORT, RX_COALESCED, RX_FLAGS,
    RX_PACKET_BYTES, RX_PACKETS, RX_WQE_OFFSET, RqDoorbell, RxFlags, wqe_units,
};

use super::cq::{CompletionQueue, Entry, Positions};
use super::wqe::{Units, Wqe, pair, short_header, tail};
use crate::drivers::direct;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::receive::{self, AHEAD, PoolDry, Posted, Spread, Supply, buffers_for, give_back};
use crate::drops::DropReason;
use crate::packet::offload::Verdicts;
use crate::packet::{BATCH, Batch, Blank, DATA_ROOM, HEADROOM, Packet, Pool, Received};

/// Bytes of an Ethernet header.
const SHORTEST: u32 = direct::SHORTEST as u32;

/// Where a receive queue is, as `manadv_init_obj` says.
#[derive(Debug)]
pub(super) struct ReceivePlace {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// The completion queue: as many bytes as entries were asked for.
    pub(super) completions: DeviceMemory,
    /// Number of the receive queue.
    pub(super) rq: u32,
    /// Register of receive queues.
    pub(super) doorbell: Doorbell,
}

/// Most packets of one completion.
const COALESCED: usize = RX_COALESCED as usize;

/// Completions without a packet that one look takes note of: a device that writes them without an end must not keep the worker there.
const FENCES: u32 = 8;

/// A packet of which a completion told.
#[derive(Clone, Copy, Debug, Default)]
struct Arrival {
    /// Bytes; 0 for [`TRUNCATED`].
    len: u32,
    /// [`RxFlags`].
    flags: u32,
    hash: u32,
}

/// A packet that did not fit into its buffers.
const TRUNCATED: Arrival = Arrival { len: 0, flags: 0, hash: 0 };

/// A receive queue.
pub(super) struct ReceiveRing {
    ring: Units,
    completions: CompletionQueue,
    doorbell: Doorbell,
    number: u32,
    lkey: u32,
    /// What is added to an address of ours to make it the device's.
    distance: u64,
    /// Buffers of one work request, and the units that it takes.
    buffers: usize,
    units: u32,
    /// Work requests, counted for ever: the one whose turn it is. As many as there are stand posted behind it.
    next: u32,
    positions: Positions,
    /// Packets that the device told of and that were not handed over yet: the first `known`.
    arrivals: Box<[Arrival; BATCH + COALESCED]>,
    known: usize,
    posted: Posted,
}

impl fmt::Debug for ReceiveRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveRing")
            .field("number", &self.number)
            .field("buffers", &self.buffers)
            .finish_non_exhaustive()
    }
}

impl ReceiveRing {
    /// Posts buffers for as many packets as the completion queue has entries, each in `buffers` buffers, and tells the device. `None` if
    /// sizes are no powers of two or the ring is too small; `Err` if the pool runs dry.
    pub(super) fn new(
        spread: Arc<Spread>,
        keys: &Keys,
        place: ReceivePlace,
        pool: &Pool,
        blank: &Blank,
        buffers: usize,
        positions: Positions,
    ) -> Result<Option<Self>, PoolDry> {
        let Some(completions) = CompletionQueue::new(&place.completions, place.rq, false) else { return Ok(None) };
        let Some(ring) = Units::new(&place.ring) else { return Ok(None) };
        let (depth, units) = (completions.count(), wqe_units(OOB_SHORT, buffers as u32));
        if depth.checked_mul(units).is_none_or(|all| all > ring.count()) {
            return Ok(None);
        }
        let posted = Posted::take(depth as usize * buffers, pool, blank, spread)?;
        let mut this = Self {
            ring,
            completions,
            doorbell: place.doorbell,
            number: place.rq,
            lkey: keys.home().lkey(),
            distance: keys.home().distance(),
            buffers,
            units,
            next: 0u32.wrapping_sub(depth),
            positions,
            arrivals: Box::new([TRUNCATED; BATCH + COALESCED]),
            known: 0,
            posted,
        };
        for _ in 0..depth {
            this.post();
        }
        this.ring_doorbell();
        Ok(Some(this))
    }

    /// Work requests of the ring, less one.
    #[inline(always)]
    fn mask(&self) -> u32 {
        self.completions.count() - 1
    }

    /// Position in units of the work request that a counter stands at.
    #[inline(always)]
    fn position(&self, counter: u32) -> u32 {
        counter.wrapping_mul(self.units)
    }

    /// Hands over packets of one buffer each, one after the other, until there is no more, or something that [`Self::look`] has to see.
    /// Returns packets and bytes, and whether that is so.
    #[inline(always)]
    fn hand_over_plain(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, bool) {
        let Some(hand) = supply.pool.hand(supply.blank) else { return (0, 0, true) };
        // Values, not fields: as far as the compiler knows, what is written could change them.
        let mut reader = self.completions.reader();
        let (ring, what, units) = (self.ring.view(), pair(self.lkey, DATA_ROOM as u32), self.ring.count() - 1);
        let (depth, mask, distance) = (self.completions.count(), self.mask(), self.distance);
        let (start, mut next, mut positions) = (self.next, self.next, self.positions);
        let slots = &mut *self.posted;
        let (mut bytes, mut unusual) = (0, true);
        batch.fill(BATCH, || {
            let entry = match reader.look() {
                Ok(Some(entry)) => entry,
                Ok(None) => {
                    unusual = false;
                    return None;
                }
                Err(_) => return None,
            };
            let Arrival { len, flags, hash } = packet_of(entry, 0);
            if (entry.cqe_type() != CQE_RX_OKAY)
                | (len.wrapping_sub(SHORTEST) > DATA_ROOM as u32 - SHORTEST)
                | !positions.fits(entry.word(RX_WQE_OFFSET), next, 1, units)
            {
                return None;
            }
            if let Some(later) = slots.get((next.wrapping_add(AHEAD) & mask) as usize) {
                later.prefetch_metadata();
                later.prefetch_data();
            }
            let slot = slots.get_mut((next & mask) as usize)?;
            let what_came = Received { len, verdicts: verdicts(flags), hash, hashed: is_hashed(flags) };
            let mut packet = hand.exchange(slot, what_came)?;
            let address = slot.fresh_address().wrapping_add(distance);
            ring.write(next.wrapping_add(depth), [short_header(1), 0, address, what]);
            reader.advance();
            next = next.wrapping_add(1);
            bytes += u64::from(len);
            if flags & RARE != 0 {
                note_rare(&mut packet, flags);
            }
            Some(packet)
        });
        let read = reader.next();
        self.completions.resume(read);
        (self.next, self.positions) = (next, positions);
        (next.wrapping_sub(start).into(), bytes, unusual && !batch.is_full())
    }

    /// Takes note of what the device tells of, until `room` packets are known.
    #[inline(never)]
    fn look(&mut self, room: usize) -> Result<(), Fault> {
        let longest = (self.buffers * DATA_ROOM) as u32;
        let (mask, units, step) = (self.mask(), self.ring.count() - 1, self.units);
        // Values, not fields: as far as the compiler knows, what is noted could change them.
        let mut reader = self.completions.reader();
        let (next, mut known, mut positions) = (self.next, self.known, self.positions);
        let (arrivals, posted) = (&mut *self.arrivals, &*self.posted);
        let mut fences = 0;
        let result = loop {
            if known >= room.min(BATCH) {
                break Ok(());
            }
            let entry = match reader.look() {
                Ok(Some(entry)) => entry,
                Ok(None) => break Ok(()),
                Err(fault) => break Err(fault),
            };
            let counter = next.wrapping_add(known as u32);
            let (at, said) = (counter.wrapping_mul(step), entry.word(RX_WQE_OFFSET));
            if entry.cqe_type() == CQE_RX_OKAY {
                if !positions.fits(said, at, step, units) {
                    break Err(Fault::OutOfOrder);
                }
                let arrival = packet_of(entry, 0);
                if arrival.len.wrapping_sub(1) >= longest {
                    break Err(Fault::BadLength);
                }
                if let Some(packet) = posted.get((counter & mask) as usize) {
                    packet.prefetch_metadata();
                    packet.prefetch_data();
                }
                arrivals[known] = arrival;
                known += 1;
            } else {
                match unusual(entry, &mut arrivals[known..], longest) {
                    Ok(n) if n > 0 && !positions.fits(said, at, n as u32 * step, units) => {
                        break Err(Fault::OutOfOrder);
                    }
                    Ok(n) => {
                        known += n;
                        fences += u32::from(n == 0);
                    }
                    Err(fault) => break Err(fault),
                }
            }
            reader.advance();
            if fences == FENCES {
                break Ok(());
            }
        };
        let read = reader.next();
        self.completions.resume(read);
        (self.known, self.positions) = (known, positions);
        result
    }

    /// Hands over what is known, at most as many packets as the batch has room for, and posts as many buffers anew. Returns packets and
    /// bytes.
    fn hand_over(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64) {
        let n = self.known.min(batch.space());
        if n == 0 {
            return (0, 0);
        }
        let moved = if self.buffers == 1 {
            self.hand_over_single(n, batch, supply)
        } else {
            self.hand_over_chains(n, batch, supply)
        };
        // A completion of several packets may have told of more than there was room for.
        self.arrivals.copy_within(n..self.known, 0);
        self.known -= n;
        moved
    }

    fn hand_over_single(&mut self, n: usize, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64) {
        let start = batch.len();
        let got = supply.pool.take_batch_like(n, batch, supply.blank);
        let (mut used, mut bytes) = (0, 0);
        let mut fresh = batch.as_mut_slice()[start..].iter_mut();
        let (ring, what, depth, mask) =
            (self.ring.view(), pair(self.lkey, DATA_ROOM as u32), self.completions.count(), self.mask());
        let (mut next, distance, slots) = (self.next, self.distance, &mut *self.posted);
        for arrival in &self.arrivals[..n] {
            let arrival = *arrival;
            let Some(posted) = slots.get_mut((next & mask) as usize) else { break };
            let taken = if arrival.len >= SHORTEST { fresh.next() } else { None };
            match taken {
                Some(packet) => {
                    swap(packet, posted);
                    describe(packet, arrival);
                    bytes += u64::from(arrival.len);
                    used += 1;
                }
                None => supply.drop_one(reason(arrival)),
            }
            let address = (posted.data().as_ptr() as u64).wrapping_add(distance);
            ring.write(next.wrapping_add(depth), [short_header(1), 0, address, what]);
            next = next.wrapping_add(1);
        }
        self.next = next;
        if used < got {
            give_back(batch, got - used);
        }
        (used as u64, bytes)
    }

    fn hand_over_chains(&mut self, n: usize, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64) {
        let (mut packets, mut bytes) = (0, 0);
        for i in 0..n {
            let arrival = self.arrivals[i];
            if arrival.len < SHORTEST {
                supply.drop_one(reason(arrival));
            } else {
                match self.chain(arrival, supply) {
                    Some(packet) => {
                        // There is room: the caller looked.
                        let _ = batch.push(packet);
                        packets += 1;
                        bytes += u64::from(arrival.len);
                    }
                    None => supply.drop_one(reason(arrival)),
                }
            }
            self.post();
        }
        (packets, bytes)
    }

    /// Takes the filled buffers of the work request whose turn it is and puts fresh ones in their place; all or, if the pool has too few,
    /// none.
    fn chain(&mut self, arrival: Arrival, supply: &Supply<'_>) -> Option<Packet> {
        let mut fresh = Batch::new();
        let wanted = buffers_for(arrival.len as usize);
        if supply.pool.take_batch_like(wanted, &mut fresh, supply.blank) < wanted {
            return None;
        }
        let first = (self.next & self.mask()) as usize * self.buffers;
        let mut left = arrival.len as usize;
        let mut chain: Option<Packet> = None;
        for slot in &mut self.posted[first..first + wanted] {
            let mut segment = fresh.pop()?;
            swap(&mut segment, slot);
            let here = left.min(DATA_ROOM);
            left -= here;
            if !segment.set_data(HEADROOM, here) {
                return None;
            }
            match &mut chain {
                None => chain = Some(segment),
                Some(chain) => chain.append_segment(segment).ok()?,
            }
        }
        let mut packet = chain?;
        note(&mut packet, arrival);
        Some(packet)
    }

    /// Posts the buffers in the slots of the work request whose turn it is once more, and goes on to the next.
    fn post(&mut self) {
        let first = (self.next & self.mask()) as usize * self.buffers;
        let mut wqe = Wqe::new(&[short_header(self.buffers as u32), 0]);
        for packet in &self.posted[first..first + self.buffers] {
            let address = (packet.data().as_ptr() as u64).wrapping_add(self.distance);
            let pushed = wqe.push(address, self.lkey, DATA_ROOM);
            debug_assert!(pushed, "no frame has as many buffers as a WQE has room for");
        }
        let at = self.position(self.next.wrapping_add(self.completions.count()));
        let start = wqe.write_rest(&self.ring, at);
        self.ring.write(at, start);
        self.next = self.next.wrapping_add(1);
    }

    /// Tells the device how far the ring is filled.
    #[inline(always)]
    fn ring_doorbell(&self) {
        let tail = tail(self.position(self.next.wrapping_add(self.completions.count())));
        self.doorbell.ring(RqDoorbell::default().with_id(self.number.into()).with_tail(tail.into()).0);
    }
}

impl ReceiveRing {
    /// Receives whatever there may be.
    #[inline(never)]
    fn receive_any(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>) {
        let looked = self.look(batch.space());
        let (packets, bytes) = self.hand_over(batch, supply);
        (packets, bytes, looked)
    }
}

impl receive::ReceiveRing for ReceiveRing {
    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>) {
        let before = self.next;
        let plain = self.buffers == 1 && self.known == 0;
        let (mut packets, mut bytes, unusual) = if plain { self.hand_over_plain(batch, supply) } else { (0, 0, true) };
        let mut result = Ok(());
        if unusual {
            let (more, further, looked) = self.receive_any(batch, supply);
            (packets, bytes, result) = (packets + more, bytes + further, looked);
        }
        if self.next != before {
            self.ring_doorbell();
        }
        (packets, bytes, result)
    }
}

/// Why a packet is dropped whose buffer stays posted.
#[cold]
fn reason(arrival: Arrival) -> DropReason {
    match arrival.len {
        0 => DropReason::TooLong,
        1..SHORTEST => DropReason::TooShort,
        _ => DropReason::NoBuffer,
    }
}

/// The packet at place `i` of a completion.
#[inline(always)]
fn packet_of(entry: Entry<'_>, i: u32) -> Arrival {
    let at = RX_PACKETS + i * RX_PACKET_BYTES;
    Arrival { len: entry.word(at) & 0xffff, flags: entry.word(RX_FLAGS), hash: entry.word(at + 8) }
}

/// A completion that is not of one packet; returns how many work requests it used up.
#[inline(never)]
fn unusual(entry: Entry<'_>, arrivals: &mut [Arrival], longest: u32) -> Result<usize, Fault> {
    match entry.cqe_type() {
        CQE_RX_COALESCED_4 => {
            let mut n = 0;
            for (i, arrival) in (0..RX_COALESCED).zip(arrivals) {
                *arrival = packet_of(entry, i);
                if arrival.len == 0 {
                    break;
                }
                if arrival.len > longest {
                    return Err(Fault::BadLength);
                }
                n += 1;
            }
            if n == 0 { Err(Fault::BadLength) } else { Ok(n) }
        }
        CQE_RX_TRUNCATED => {
            let Some(first) = arrivals.first_mut() else { return Ok(0) };
            *first = TRUNCATED;
            Ok(1)
        }
        CQE_RX_OBJECT_FENCE => Ok(0),
        _ => Err(Fault::UnknownType),
    }
}

/// Notes on a packet in one buffer what the device found out.
#[inline(always)]
fn describe(packet: &mut Packet, arrival: Arrival) {
    let fits = packet.set_received(arrival.len, verdicts(arrival.flags), arrival.hash, is_hashed(arrival.flags));
    debug_assert!(fits, "lengths were looked at");
    if arrival.flags & RARE != 0 {
        note_rare(packet, arrival.flags);
    }
}

/// The same on a chain, whose lengths are there.
fn note(packet: &mut Packet, arrival: Arrival) {
    packet.set_verdicts(verdicts(arrival.flags));
    if is_hashed(arrival.flags) {
        packet.set_rss_hash(arrival.hash);
    }
    if arrival.flags & RARE != 0 {
        note_rare(packet, arrival.flags);
    }
}

/// A VLAN tag that was taken off, or verdicts on an outer header.
const RARE: u32 = RxFlags(0).with_vlan_present(1).with_outer_ip_ok(1).with_outer_ip_bad(1).0;

#[cold]
#[inline(never)]
fn note_rare(packet: &mut Packet, flags: u32) {
    let flags = RxFlags(flags);
    if flags.vlan_present() != 0 {
        packet.set_vlan(flags.vlan_id() as u16);
    }
    let outer = match (flags.outer_ip_ok(), flags.outer_ip_bad()) {
        (_, 1) => Verdicts::OUTER_L3_BAD,
        (1, _) => Verdicts::OUTER_L3_GOOD,
        _ => Verdicts::NONE,
    };
    packet.set_verdicts(packet.verdicts().with(outer));
}

#[inline(always)]
fn is_hashed(flags: u32) -> bool {
    flags & RxFlags(0).with_hash_type(u32::MAX).0 != 0
}

/// The device's six bits on the headers of a packet, from IPv4 good to UDP bad, as verdicts. Where it calls a checksum both good and bad, it
/// is bad.
static VERDICTS: [Verdicts; 64] = {
    let mut table = [Verdicts::NONE; 64];
    let mut bits = 0;
    while bits < 64 {
        let flags = RxFlags((bits as u32) << IP_OK);
        let mut verdicts = Verdicts::NONE;
        if flags.ip_bad() == 1 {
            verdicts = verdicts.with(Verdicts::L3_BAD);
        } else if flags.ip_ok() == 1 {
            verdicts = verdicts.with(Verdicts::L3_GOOD);
        }
        if flags.tcp_bad() == 1 || flags.udp_bad() == 1 {
            verdicts = verdicts.with(Verdicts::L4_BAD);
        } else if flags.tcp_ok() == 1 || flags.udp_ok() == 1 {
            verdicts = verdicts.with(Verdicts::L4_GOOD);
        }
        table[bits] = verdicts;
        bits += 1;
    }
    table
};
const IP_OK: u32 = RxFlags(0).with_ip_ok(1).0.trailing_zeros();

#[inline(always)]
fn verdicts(flags: u32) -> Verdicts {
    VERDICTS[(flags >> IP_OK) as usize % VERDICTS.len()]
}
