// UNSAFETY: moves buffers between a thread's cache, a driver's ring and a batch by address.
#![allow(unsafe_code)]

//! Filled buffers against fresh ones: what receive queues do with every packet.

use std::hint::black_box;
use std::mem::{MaybeUninit, replace};
use std::ptr::NonNull;

use super::Packet;
use super::batch::Batch;
use super::meta::{DATA_ROOM, FRESH, META, Meta, shift};
use super::offload::{Flags, Verdicts};
use super::pool::{Blank, Cache, Pool, Shared};

/// Bytes of a packet in one buffer: never more than there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Length(u32);

impl Length {
    /// In bytes.
    #[inline(always)]
    pub(crate) fn bytes(self) -> u32 {
        self.0
    }
}

/// The lengths that a queue takes in one buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lengths {
    shortest: u32,
    /// The longest less the shortest; together at most [`DATA_ROOM`].
    range: u32,
}

impl Lengths {
    /// From `shortest` to `longest` bytes, or what a buffer holds.
    pub(crate) fn new(shortest: u32, longest: u32) -> Self {
        let longest = longest.min(DATA_ROOM as u32);
        let shortest = shortest.min(longest);
        Self { shortest, range: longest - shortest }
    }

    /// The shortest.
    #[inline(always)]
    pub(crate) fn shortest(self) -> u32 {
        self.shortest
    }

    /// The length that is so much above the shortest, if it is one of these. What is below wraps round, and is none.
    #[inline(always)]
    pub(crate) fn above(self, over: u64) -> Option<Length> {
        if over <= self.range.into() { Some(Length(self.shortest + over as u32)) } else { None }
    }
}

/// What a device said of checksums, and whether there is a hash, as it lies in the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noted(u64);

impl Noted {
    #[inline(always)]
    pub(crate) const fn new(verdicts: Verdicts, hashed: bool) -> Self {
        let flags = if hashed { Flags::RSS_HASH } else { Flags::NONE };
        Self((verdicts.bits() as u64) << VERDICTS_SHIFT | (flags.bits() as u64) << FLAGS_SHIFT)
    }
}

/// What a device said of a packet that lies in one buffer behind the full headroom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) len: Length,
    pub(crate) noted: Noted,
    /// RSS hash, if it is one.
    pub(crate) hash: u32,
    /// There is more to say: [`Tellings::note`] does.
    pub(crate) more: bool,
}

impl Received {
    /// So many bytes of which nothing is known; `None`: a buffer does not hold them.
    pub(crate) fn of(bytes: u32) -> Option<Self> {
        let len = Lengths::new(0, u32::MAX).above(bytes.into())?;
        Some(Self { len, noted: Noted::new(Verdicts::NONE, false), hash: 0, more: false })
    }
}

/// How a device tells of packets, and how it is given buffers.
pub(crate) trait Tellings {
    /// What tells of one packet.
    type Entry;
    /// The place of a buffer in the device's ring.
    type Place;
    /// What [`Self::note`] needs beside the entry. Not all of `self`, which would have to lie in memory for that.
    type More: Copy;

    /// The packet that an entry tells of. `None`: nothing yet, or something that is not to be treated here.
    fn next(&mut self, entry: &Self::Entry) -> Option<Received>;

    /// Puts a fresh buffer, whose data goes to `address` of ours, there.
    fn post(&self, place: &Self::Place, address: u64);

    /// For [`Self::note`].
    fn more(&self) -> Self::More;

    /// Puts what else an entry says into the packet.
    fn note(more: Self::More, entry: &Self::Entry, packet: &mut Packet);
}

/// The calling thread's buffers of a pool, for receive queues that put a fresh buffer in the place of each filled one. Metadata is written
/// once for each packet, whole and from registers, when it has arrived: that of posted buffers is whatever the buffer's last packet left,
/// in which only length and place of the data are of any meaning, and of none to anybody.
pub(crate) struct Hand<'a> {
    shared: &'a Shared,
    cache: &'a Cache,
    /// The first words of the line of fresh packets; the others are zero.
    line: [u64; 3],
    /// What a byte adds to the first word: a value that the compiler does not know, so that it multiplies instead of moving bits about.
    byte: u64,
}

impl Pool {
    /// This thread's buffers; `None` in a thread that ends.
    ///
    /// # Panics
    /// If `blank` was made by another pool.
    #[inline(always)]
    pub(crate) fn hand(&self, blank: &Blank) -> Option<Hand<'_>> {
        let shared = self.shared();
        assert!(blank.pool() == self.id());
        let [first, second, third, ..] = blank.line();
        debug_assert!(first >> DATA_LEN_SHIFT == 0, "lengths are the device's");
        let byte = black_box(1 << DATA_LEN_SHIFT | 1 << PACKET_LEN_SHIFT);
        Some(Hand { shared, cache: shared.local()?, line: [first, second, third], byte })
    }
}

/// Packets on their way from a ring into a batch.
pub(crate) struct Burst<'a> {
    hand: Hand<'a>,
    batch: &'a mut Batch,
    /// Where the first of them goes.
    out: *mut MaybeUninit<Packet>,
    /// Fresh buffers in the thread's cache at first.
    len: usize,
    /// Packets for which there is room, of these those for which there are fresh buffers, and those that have come.
    room: usize,
    most: usize,
    done: usize,
}

/// Cache and batch learn what has come, even if the burst ends in a panic.
impl Drop for Burst<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.hand.cache.set_len(self.len - self.done);
        // SAFETY: so many packets were written behind the batch's last.
        unsafe { self.batch.grow(self.done) };
    }
}

impl Burst<'_> {
    /// Whether the batch has no more room.
    #[inline(always)]
    pub(crate) fn is_full(&self) -> bool {
        self.done == self.room
    }

    /// Takes the filled buffer out of a slot and puts a fresh one there, for each packet that `told` tells of, in order, until it says no
    /// more, or batch, `slots`, `places` or fresh buffers are used up. Returns how many.
    #[inline(always)]
    pub(crate) fn run<'t, T: Tellings>(
        &mut self,
        slots: &mut [Packet],
        places: &[T::Place],
        told: impl Iterator<Item = &'t [T::Entry]>,
        by: &mut T,
    ) -> usize
    where
        T::Entry: 't,
    {
        let before = self.done;
        let most = slots.len().min(places.len()).min(self.most - before);
        let mut start = 0;
        for entries in told {
            let n = entries.len().min(most - start);
            for i in 0..n {
                // SAFETY: `entries` has more than `i`, slots and places have more than `start + i`, room in the batch and free buffers are
                // more than `before + start + i`. What a slot of the cache held is left alone from here on.
                unsafe {
                    let at = start + i;
                    let Some(what) = by.next(entries.get_unchecked(i)) else { return at };
                    let fresh = self.hand.cache.slot(self.len - 1 - before - at).get();
                    by.post(places.get_unchecked(at), fresh as u64 + FRESH as u64);
                    let packet = self.hand.swap(slots.get_unchecked_mut(at), fresh, what);
                    let packet = (*self.out.add(before + at)).write(packet);
                    self.done = before + at + 1;
                    if what.more {
                        T::note(by.more(), entries.get_unchecked(i), packet);
                    }
                }
            }
            start += n;
            if start == most {
                break;
            }
        }
        start
    }
}

impl<'a> Hand<'a> {
    /// Begins to fill a batch.
    #[inline(always)]
    pub(crate) fn burst(self, batch: &'a mut Batch) -> Burst<'a> {
        let room = batch.space();
        let most = self.fresh(room);
        let (len, out) = (self.cache.len(), batch.spare());
        Burst { hand: self, batch, out, len, room, most, done: 0 }
    }

    /// Fresh buffers at hand: `wanted`, or as many as there are.
    #[inline(always)]
    fn fresh(&self, wanted: usize) -> usize {
        let len = self.cache.len();
        // SAFETY: the cache is this thread's, which a hand does not leave.
        let len = if len < wanted { unsafe { self.shared.refill(self.cache) as usize } } else { len };
        len.min(wanted)
    }

    /// Whether so many fresh buffers are at hand.
    pub(crate) fn has(&self, wanted: usize) -> bool {
        self.fresh(wanted) == wanted
    }

    /// Makes a packet of the filled buffer in `slot` and puts the fresh one there.
    ///
    /// # Safety
    /// `fresh` is a free buffer of this pool that nobody else has.
    #[inline(always)]
    unsafe fn swap(&self, slot: &mut Packet, fresh: *mut Meta, what: Received) -> Packet {
        let [first, second, third] = self.line;
        let (bytes, hash) = (u64::from(what.len.0), u64::from(what.hash));
        // SAFETY: the fresh buffer's line says that it is one segment of this pool that nobody shares, as that of every free buffer does. The
        // line of the filled one, which the packet owns, is written whole.
        unsafe {
            let packet = replace(slot, Packet::from_meta(NonNull::new_unchecked(fresh)));
            let words: *mut u64 = packet.meta.as_ptr().cast();
            words.write(first.wrapping_add(bytes.wrapping_mul(self.byte)));
            words.add(1).write(second | what.noted.0);
            words.add(2).write(third | hash << HASH_SHIFT);
            words.add(3).cast::<[u64; META / 8 - 3]>().write([0; META / 8 - 3]);
            packet
        }
    }

    /// Takes the filled buffer out of `slot`, as a packet that was received, and puts a fresh one there. `None`, and no change, if no buffer
    /// is free.
    pub(crate) fn exchange(&self, slot: &mut Packet, what: Received) -> Option<Packet> {
        self.fresh(1).checked_sub(1)?;
        let at = self.cache.len() - 1;
        self.cache.set_len(at);
        // SAFETY: the slot that was the last holds a free buffer, which is `slot`'s from here on.
        Some(unsafe { self.swap(slot, self.cache.slot(at).get(), what) })
    }
}

const DATA_LEN_SHIFT: u32 = shift(std::mem::offset_of!(Meta, data_len), 0);
const PACKET_LEN_SHIFT: u32 = shift(std::mem::offset_of!(Meta, packet_len), 0);
const VERDICTS_SHIFT: u32 = shift(std::mem::offset_of!(Meta, verdicts), 1);
const FLAGS_SHIFT: u32 = shift(std::mem::offset_of!(Meta, flags), 1);
const HASH_SHIFT: u32 = shift(std::mem::offset_of!(Meta, rss_hash), 2);
// What a fresh line has in these places is zero, and so is everything behind the third word.
const _: () = {
    let line = Blank::fresh(0).line();
    let mut at = 3;
    while at < line.len() {
        assert!(line[at] == 0);
        at += 1;
    }
    assert!(line[0] >> 16 == 0 && (line[1] >> VERDICTS_SHIFT) & 0xff == 0 && line[1] >> FLAGS_SHIFT == 0);
    assert!(line[2] >> HASH_SHIFT == 0);
};
