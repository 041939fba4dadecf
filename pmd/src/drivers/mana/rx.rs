//! Receive queues.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use wirepath_memory::{DeviceMemory, Doorbell, write_slot};
use wirepath_nic_defs::mana::{
    CQE_RX_COALESCED_4, CQE_RX_OBJECT_FENCE, CQE_RX_OKAY, CQE_RX_TRUNCATED, CqDoorbell, OOB_SHORT, RX_COALESCED,
    RX_FLAGS, RX_PACKET_BYTES, RX_PACKETS, RX_WQE_OFFSET, RqDoorbell, RxFlags, wqe_units,
};

use super::cq::{CompletionQueue, Entry, Positions, Whole};
use super::wqe::{UNIT, Units, Wqe, pair, short_header, tail};
use crate::drivers::direct;
use crate::drivers::direct::bell::Bell;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::receive::{self, PoolDry, Posted, Spread, Supply, take_out};
use crate::drops::DropReason;
use crate::packet::offload::Verdicts;
use crate::packet::{BATCH, Batch, Blank, DATA_ROOM, Lengths, Noted, Packet, Pool, Received, Tellings};

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

/// How a worker that sleeps is woken.
#[derive(Debug)]
pub(super) struct Waker {
    pub(super) bell: Bell,
    /// Number of the completion queue.
    pub(super) cq: u32,
    /// Register of completion queues.
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

/// The part of a ring that is posted before the device is told: one of so many.
const HELD_BACK: u32 = 8;

/// A receive queue.
pub(super) struct ReceiveRing {
    ring: Units,
    completions: CompletionQueue,
    doorbell: Doorbell,
    number: u32,
    lkey: u32,
    /// What is added to an address of ours to make it the device's.
    distance: u64,
    /// Lengths of packets in one buffer.
    lengths: Lengths,
    /// Buffers of one work request, and the units that it takes.
    buffers: usize,
    units: u32,
    /// Work requests, counted for ever: the one whose turn it is. As many as there are stand posted behind it.
    next: u32,
    /// The one whose turn it was when the device was told how far the ring is filled.
    told: u32,
    positions: Positions,
    /// Packets that the device told of and that were not handed over yet: the first `known`.
    arrivals: Box<[Arrival; BATCH + COALESCED]>,
    known: usize,
    waker: Option<Waker>,
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
            lengths: Lengths::new(SHORTEST, DATA_ROOM as u32),
            buffers,
            units,
            next: 0u32.wrapping_sub(depth),
            told: 0,
            positions,
            arrivals: Box::new([TRUNCATED; BATCH + COALESCED]),
            known: 0,
            waker: None,
            posted,
        };
        for _ in 0..depth {
            this.post();
        }
        this.ring_doorbell();
        Ok(Some(this))
    }

    /// Tells how its worker can be woken.
    pub(super) fn wakes_by(&mut self, waker: Option<Waker>) {
        self.waker = waker;
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

    /// Hands over packets of one buffer each as they are found, until there is no more, or something that [`Self::look`] has to see. Returns
    /// their bytes, and whether that is so.
    #[inline(always)]
    fn run(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, bool) {
        let Some(hand) = supply.pool.hand(supply.blank) else { return (0, true) };
        let mut burst = hand.burst(batch, self.lengths);
        loop {
            let (entries, expected) = self.completions.rest();
            let mut by = Entries {
                expected,
                next: self.next,
                positions: self.positions,
                mask: self.ring.count() - 1,
                shortest: self.lengths.shortest(),
                distance: self.distance,
                what: pair(self.lkey, DATA_ROOM as u32),
            };
            let (at, places) = ((self.next & self.mask()) as usize, self.next.wrapping_add(self.completions.count()));
            let (slots, places) = (&mut self.posted[at..], self.ring.view().run(places));
            let n = burst.run(slots, places, usize::MAX, |at| &entries[at..], &mut by);
            (self.next, self.positions) = (by.next, by.positions);
            self.completions.advance(n as u32);
            if burst.is_full() {
                return (burst.bytes(), false);
            }
            match self.completions.reader().look() {
                Ok(None) => return (burst.bytes(), false),
                // At the end of the ring, which goes on at its start.
                Ok(Some(_)) if n > 0 => {}
                _ => return (burst.bytes(), true),
            }
        }
    }

    /// Takes note of what the device tells of, until `room` packets are known.
    #[inline(never)]
    fn look(&mut self, room: usize) -> Result<(), Fault> {
        let longest = (self.buffers * DATA_ROOM) as u32;
        let (units, step) = (self.ring.count() - 1, self.units);
        // Values, not fields: as far as the compiler knows, what is noted could change them.
        let mut reader = self.completions.reader();
        let (next, mut known, mut positions) = (self.next, self.known, self.positions);
        let arrivals = &mut *self.arrivals;
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
        let hand = supply.pool.hand(supply.blank);
        let (mut packets, mut bytes) = (0, 0);
        for i in 0..n {
            let arrival = self.arrivals[i];
            let first = (self.next & self.mask()) as usize * self.buffers;
            let slots = &mut self.posted[first..first + self.buffers];
            let taken = hand.as_ref().filter(|_| arrival.len >= SHORTEST);
            match taken.and_then(|hand| take_out(hand, slots, arrival.len)) {
                Some(mut packet) => {
                    note(&mut packet, arrival);
                    // There is room: the caller looked.
                    drop(batch.push(packet));
                    packets += 1;
                    bytes += u64::from(arrival.len);
                }
                None => supply.drop_one(reason(arrival)),
            }
            self.post();
        }
        // A completion of several packets may have told of more than there was room for.
        self.arrivals.copy_within(n..self.known, 0);
        self.known -= n;
        (packets, bytes)
    }

    /// Posts the buffers in the slots of the work request whose turn it is once more, and goes on to the next.
    fn post(&mut self) {
        let first = (self.next & self.mask()) as usize * self.buffers;
        let mut wqe = Wqe::new(&[short_header(self.buffers as u32), 0]);
        for packet in &self.posted[first..first + self.buffers] {
            let address = packet.fresh_address().wrapping_add(self.distance);
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
    fn ring_doorbell(&mut self) {
        self.told = self.next;
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
    fn is_idle(&mut self) -> bool {
        self.known == 0 && matches!(self.completions.reader().look(), Ok(None))
    }

    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch, supply: &Supply<'_>) -> (u64, u64, Result<(), Fault>) {
        let start = batch.len();
        let plain = self.buffers == 1 && self.known == 0;
        let (mut bytes, unusual) = if plain { self.run(batch, supply) } else { (0, true) };
        let (mut packets, mut result) = ((batch.len() - start) as u64, Ok(()));
        if unusual {
            let (more, further, looked) = self.receive_any(batch, supply);
            (packets, bytes, result) = (packets + more, bytes + further, looked);
        }
        // Not for every few packets: a register is far away, and the device has the rest of the ring.
        if self.next.wrapping_sub(self.told) >= (self.completions.count() / HELD_BACK).max(1) {
            self.ring_doorbell();
        }
        (packets, bytes, result)
    }

    fn wait(&mut self) -> Option<BorrowedFd<'_>> {
        let Waker { bell, cq, doorbell } = self.waker.as_ref()?;
        bell.answer()?;
        let value = CqDoorbell::default().with_id((*cq).into()).with_tail(self.completions.taken().into()).with_arm(1);
        doorbell.ring(value.0);
        // What came before it was asked, it need not announce.
        let is_empty = self.known == 0 && matches!(self.completions.reader().look(), Ok(None));
        is_empty.then(|| bell.descriptor())
    }
}

/// Completions of a packet each, whose work requests are one unit.
#[derive(Clone, Copy)]
struct Entries {
    /// The known bits of their last words.
    expected: u32,
    /// The work request whose turn it is, and where its packet lies.
    next: u32,
    positions: Positions,
    mask: u32,
    /// Bytes of the shortest packet.
    shortest: u32,
    distance: u64,
    /// Key and size of a buffer.
    what: u64,
}

impl Tellings for Entries {
    type Entry = Whole;
    type Place = [AtomicU64; UNIT];

    #[inline(always)]
    fn usual(&self) -> Noted {
        const { Noted::new(Verdicts::L3_GOOD.with(Verdicts::L4_GOOD), true) }
    }

    #[inline(always)]
    fn next(&mut self, entry: &Whole) -> Option<Received> {
        let entry = Entry::expect(entry, self.expected)?;
        let Arrival { len, flags, hash } = packet_of(entry, 0);
        if entry.cqe_type() != CQE_RX_OKAY || !self.positions.fits(entry.word(RX_WQE_OFFSET), self.next, 1, self.mask) {
            return None;
        }
        let noted = Some(Noted::new(verdicts(flags), is_hashed(flags)));
        Some(Received {
            over: len.wrapping_sub(self.shortest).into(),
            noted,
            hash: Some(hash),
            more: flags & RARE != 0,
        })
    }

    #[inline(always)]
    fn took(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    #[inline(always)]
    fn post(&self, place: &[AtomicU64; UNIT], address: u64) {
        write_slot(place, [short_header(1), 0, address.wrapping_add(self.distance), self.what]);
    }

    #[cold]
    #[inline(never)]
    fn note(entry: &Whole, packet: &mut Packet) {
        note_rare(packet, Entry::again(entry).word(RX_FLAGS));
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

/// Notes on a packet what the device found out.
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
