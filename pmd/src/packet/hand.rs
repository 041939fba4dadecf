// UNSAFETY: moves buffers between a thread's cache, a driver's ring and a batch by address.
#![allow(unsafe_code)]

//! Filled buffers against fresh ones: what receive queues do with every packet.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m128i, _mm_set_epi64x, _mm_storeu_si128};
use std::cell::Cell;
use std::hint::black_box;
use std::mem::{MaybeUninit, replace};
use std::ptr::{self, NonNull};
use std::slice;

use super::Packet;
use super::batch::Batch;
use super::eight::{EIGHT, Eight};
use super::meta::{DATA_ROOM, FRESH, META, Meta, shift};
use super::offload::{Flags, Verdicts};
use super::pool::{Blank, Cache, Pool, Shared};

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
}

/// What a device said of checksums, and whether there is a hash, as it lies in the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noted(u64);

impl Noted {
    /// Nothing, and no hash.
    pub(crate) const NOTHING: Self = Self::new(Verdicts::NONE, false);

    #[inline(always)]
    pub(crate) const fn new(verdicts: Verdicts, hashed: bool) -> Self {
        let flags = if hashed { Flags::RSS_HASH } else { Flags::NONE };
        Self((verdicts.bits() as u64) << VERDICTS_SHIFT | (flags.bits() as u64) << FLAGS_SHIFT)
    }
}

/// What a device said of a packet that lies in one buffer behind the full headroom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// Bytes above the shortest that the queue takes. Of shorter ones it wraps round, which makes it too much, as that of longer ones is.
    pub(crate) over: u64,
    /// `None`: [`Tellings::usual`].
    pub(crate) noted: Option<Noted>,
    /// RSS hash, if it is one.
    pub(crate) hash: Option<u32>,
    /// There is more to say: [`Tellings::note`] does.
    pub(crate) more: bool,
}

impl Received {
    /// So many bytes above the shortest, and nothing else.
    const fn of(over: u64) -> Self {
        Self { over, noted: None, hash: None, more: false }
    }
}

/// How a device tells of packets, and how it is given buffers.
pub(crate) trait Tellings: Copy {
    /// Packets that are treated at once, if nothing is to be said of them but length and hash; at most [`MOST_TOGETHER`], and 0: none are.
    /// What is asked of each packet and what is done with it then are two loops without an end in between, and without a count.
    const TOGETHER: usize = 0;

    /// Whether [`Self::eight`] has the RSS hashes of packets in the upper halves.
    const HASHES: bool = false;

    /// What tells of one packet.
    type Entry;
    /// The place of a buffer in the device's ring.
    type Place;

    /// What is noted of most packets.
    fn usual(&self) -> Noted;

    /// The packet that an entry tells of. `None`: nothing yet, or something that is not to be treated here.
    fn next(&mut self, entry: &Self::Entry) -> Option<Received>;

    /// The packet was of a length that the queue takes: the next one is behind it.
    fn took(&mut self);

    /// Bytes above the shortest of eight packets of which [`Self::usual`] and a hash is all that is to be noted, if entries are words that
    /// can be looked at in vectors. Too many stand for whatever [`Self::next`] does not treat.
    #[inline(always)]
    fn eight(&self, entries: &[Self::Entry; EIGHT]) -> Option<Eight> {
        let _ = entries;
        None
    }

    /// Puts a fresh buffer, whose data goes to `address` of ours, there.
    fn post(&self, place: &Self::Place, address: u64);

    /// The same for eight.
    #[inline(always)]
    fn post_eight(&self, places: &[Self::Place; EIGHT], addresses: Eight) {
        for (place, address) in places.iter().zip(addresses.words()) {
            self.post(place, address);
        }
    }

    /// Puts what else an entry says into the packet. Not with all of `self`, which would have to lie in memory for that.
    fn note(entry: &Self::Entry, packet: &mut Packet);
}

/// Where the entries of a run are, by packet of the run.
pub(crate) trait Told<'t, E> {
    /// Those of a packet and of some behind it.
    fn from(&self, packet: usize) -> &'t [E];

    /// Those of a packet and of all behind it in eights, if they are looked at like that and the packet is the first of eight.
    #[inline(always)]
    fn eights(&self, packet: usize) -> Option<impl FnMut() -> &'t [E; EIGHT]>
    where
        E: 't,
    {
        let _ = packet;
        None::<fn() -> &'t [E; EIGHT]>
    }
}

impl<'t, E: 't, F: Fn(usize) -> &'t [E]> Told<'t, E> for F {
    #[inline(always)]
    fn from(&self, packet: usize) -> &'t [E] {
        self(packet)
    }
}

/// Two words that are stored at once, where a processor can.
#[derive(Clone, Copy)]
struct Pair(#[cfg(target_arch = "x86_64")] __m128i, #[cfg(not(target_arch = "x86_64"))] [u64; 2]);

impl Pair {
    #[inline(always)]
    fn new(low: u64, high: u64) -> Self {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE2 is part of every x86-64.
        let words = unsafe { _mm_set_epi64x(high as i64, low as i64) };
        #[cfg(not(target_arch = "x86_64"))]
        let words = [low, high];
        Self(words)
    }

    /// Writes them.
    ///
    /// # Safety
    /// There is room for two words.
    #[inline(always)]
    unsafe fn write(self, to: *mut u64) {
        // SAFETY: as promised; the processor asks for no more alignment than the pointer has.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            _mm_storeu_si128(to.cast(), self.0);
            #[cfg(not(target_arch = "x86_64"))]
            to.cast::<[u64; 2]>().write(self.0);
        }
    }
}

/// The metadata line of a packet of a run, but for what is told of each.
struct Line {
    /// The longest less the shortest.
    range: u64,
    /// The first word of the shortest packet, and what a byte adds to it.
    first: u64,
    byte: u64,
    /// The second word without what is noted; the second and third of most packets, and both together. The others are zero.
    second: u64,
    noted: u64,
    third: u64,
    usual: Pair,
}

/// Most packets that are treated at once.
const MOST_TOGETHER: usize = 8;

/// Where the next packet of a run takes from and goes to. Addresses rather than indices, each of which would take a register of its own beside
/// that of its base.
struct Cursors<P> {
    slot: *mut Packet,
    place: *const P,
    /// Fresh buffers are taken from the last on.
    fresh: *const Cell<*mut Meta>,
    out: *mut MaybeUninit<Packet>,
}

impl<P> Cursors<P> {
    /// Makes a packet of the filled buffer that is `j` behind the next, and puts a fresh one in its place.
    ///
    /// # Safety
    /// So many are there of everything, and a buffer has room for the length.
    #[inline(always)]
    unsafe fn swap<T: Tellings<Place = P>>(&mut self, j: usize, line: &Line, what: &Received, by: &T) -> &mut Packet {
        // SAFETY: as promised. What a slot of the cache held is left alone from here on.
        unsafe {
            let fresh = (*self.fresh.sub(j)).get();
            by.post(&*self.place.add(j), fresh as u64 + FRESH as u64);
            (*self.out.add(j)).write(swap(&mut *self.slot.add(j), fresh, line, what))
        }
    }

    /// The same for the next eight, of which `overs` is told.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn swap_eight<T: Tellings<Place = P>>(&mut self, line: &Line, overs: Eight, by: &T) {
        let Self { slot, place, fresh, out } = *self;
        // SAFETY: as promised. A packet is a pointer to its metadata; what the slots of the cache held is left alone from here on.
        unsafe {
            let last = fresh.sub(EIGHT - 1);
            by.post_eight(&*place.cast(), Eight::read(last.cast()).plus(Eight::all(FRESH as u64)));
            ptr::copy_nonoverlapping(slot, out.cast(), EIGHT);
            ptr::copy_nonoverlapping(last.cast(), slot, EIGHT);
            let (first, third) = (Eight::all(line.first).plus(overs.twice()), Eight::all(line.third));
            let third = if T::HASHES { overs.above(third) } else { third };
            Eight::write_rows(
                [[first, Eight::all(line.noted)], [third, Eight::all(0)]],
                |j| (*out.cast::<Packet>().add(j)).meta.as_ptr().cast(),
                |rest| rest.cast::<[u64; META / 8 - 4]>().write([0; META / 8 - 4]),
            );
        }
    }

    /// Goes on by `n` packets.
    #[inline(always)]
    fn pass(&mut self, n: usize) {
        (self.slot, self.place) = (self.slot.wrapping_add(n), self.place.wrapping_add(n));
        (self.fresh, self.out) = (self.fresh.wrapping_sub(n), self.out.wrapping_add(n));
    }
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
    lengths: Lengths,
    /// Bytes above the shortest: of packets one by one, and of those in eights in the lower half of the sum, below that of their hashes.
    over: u64,
    overs: Eight,
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

    /// What the queue takes.
    #[inline(always)]
    pub(crate) fn lengths(&self) -> Lengths {
        self.lengths
    }

    /// Bytes of the packets that have come.
    #[inline(always)]
    pub(crate) fn bytes(&self) -> u64 {
        self.done as u64 * u64::from(self.lengths.shortest) + self.over + u64::from(self.overs.sum() as u32)
    }

    /// The last `n` of those that have come.
    ///
    /// # Panics
    /// If they are fewer.
    pub(crate) fn latest(&mut self, n: usize) -> &mut [Packet] {
        assert!(n <= self.done);
        // SAFETY: all of them were written there.
        unsafe { slice::from_raw_parts_mut(self.out.add(self.done - n).cast(), n) }
    }

    /// Takes the filled buffer out of a slot and puts a fresh one there, for each packet of the queue's lengths that is told of, in order: of the
    /// packet `at` of the run and of some behind it by the entries that are `told`. Ends where these say no more, after `limit` packets, or when
    /// batch, `slots`, `places` or fresh buffers are used up. Returns how many there were.
    #[inline(always)]
    pub(crate) fn run<'t, T: Tellings>(
        &mut self,
        slots: &mut [Packet],
        places: &[T::Place],
        limit: usize,
        told: impl Told<'t, T::Entry>,
        by: &mut T,
    ) -> usize
    where
        T::Entry: 't,
    {
        let before = self.done;
        let most = slots.len().min(places.len()).min(limit).min(self.most - before);
        let line = self.hand.line(self.lengths, by.usual());
        let mut next = Cursors {
            slot: slots.as_mut_ptr(),
            place: places.as_ptr(),
            fresh: self.hand.cache.slots().wrapping_add(self.len - before).wrapping_sub(1),
            out: self.out.wrapping_add(before),
        };
        let (end, mut over) = (before + most, 0);
        'run: while self.done < end {
            if let Some(mut eights) = told.eights(self.done - before) {
                while end - self.done >= EIGHT
                    && let Some(overs) = by.eight(eights())
                    && overs.at_most(if T::HASHES { line.range | u64::MAX << 32 } else { line.range })
                {
                    // SAFETY: of everything as many are left.
                    unsafe { next.swap_eight(&line, overs, by) };
                    (0..EIGHT).for_each(|_| by.took());
                    next.pass(EIGHT);
                    self.done += EIGHT;
                    self.overs = self.overs.plus(overs);
                }
            }
            let entries = if self.done < end { told.from(self.done - before) } else { &[] };
            let mut entries = &entries[..entries.len().min(end - self.done)];
            if entries.is_empty() {
                break;
            }
            // SAFETY: of everything at least as many are left as there are entries, all in all at most `most`.
            unsafe {
                while T::TOGETHER > 0
                    && let Some((first, rest)) = entries.split_at_checked(T::TOGETHER)
                    && let Some(more) = self.together(&line, &mut next, first, by)
                {
                    (over, entries) = (over + more, rest);
                }
                for entry in entries {
                    let Some(more) = self.one(&line, &mut next, entry, by) else { break 'run };
                    over += more;
                }
            }
        }
        let n = self.done - before;
        self.over += over;
        n
    }

    /// Treats [`Tellings::TOGETHER`] packets. Returns their bytes above the shortest; `None`, and no change: there is something to be said of
    /// one, or it is not there.
    ///
    /// # Safety
    /// For so many more there is room in the batch, and of everything else as many are left.
    #[inline(always)]
    unsafe fn together<T: Tellings>(
        &mut self,
        line: &Line,
        next: &mut Cursors<T::Place>,
        entries: &[T::Entry],
        by: &mut T,
    ) -> Option<u64> {
        const { assert!(T::TOGETHER <= MOST_TOGETHER) };
        let mut said = [const { Received::of(0) }; MOST_TOGETHER];
        let (mut ahead, mut over) = (*by, 0);
        for (j, what) in said[..T::TOGETHER].iter_mut().enumerate() {
            *what = ahead.next(&entries[j])?;
            if what.over > line.range || what.noted.is_some() || what.more {
                return None;
            }
            ahead.took();
        }
        *by = ahead;
        for (j, what) in said[..T::TOGETHER].iter().enumerate() {
            // SAFETY: as promised.
            unsafe { next.swap(j, line, what, by) };
            self.done += 1;
            over += what.over;
        }
        next.pass(T::TOGETHER);
        Some(over)
    }

    /// Treats one packet, in the same way.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn one<T: Tellings>(
        &mut self,
        line: &Line,
        next: &mut Cursors<T::Place>,
        entry: &T::Entry,
        by: &mut T,
    ) -> Option<u64> {
        let what = by.next(entry)?;
        if what.over > line.range {
            return None;
        }
        by.took();
        // SAFETY: as promised.
        let packet = unsafe { next.swap(0, line, &what, by) };
        self.done += 1;
        if what.more {
            T::note(entry, packet);
        }
        next.pass(1);
        Some(what.over)
    }
}

/// Makes a packet of the filled buffer in `slot` and puts the fresh one there.
///
/// # Safety
/// `fresh` is a free buffer of the line's pool that nobody else has, and a buffer has room for the length.
#[inline(always)]
unsafe fn swap(slot: &mut Packet, fresh: *mut Meta, line: &Line, what: &Received) -> Packet {
    // SAFETY: the fresh buffer's line says that it is one segment of this pool that nobody shares, as that of every free buffer does. The
    // line of the filled one, which the packet owns, is written whole.
    unsafe {
        let packet = replace(slot, Packet::from_meta(NonNull::new_unchecked(fresh)));
        let words: *mut u64 = packet.meta.as_ptr().cast();
        words.write(line.first.wrapping_add(what.over.wrapping_mul(line.byte)));
        line.usual.write(words.add(1));
        words.add(3).cast::<[u64; META / 8 - 3]>().write([0; META / 8 - 3]);
        if let Some(noted) = what.noted {
            words.add(1).write(line.second | noted.0);
        }
        if let Some(hash) = what.hash {
            (*packet.meta.as_ptr()).rss_hash = hash;
        }
        packet
    }
}

impl<'a> Hand<'a> {
    /// Begins to fill a batch with packets of these lengths.
    #[inline(always)]
    pub(crate) fn burst(self, batch: &'a mut Batch, lengths: Lengths) -> Burst<'a> {
        let room = batch.space();
        let most = self.fresh(room);
        let (len, out) = (self.cache.len(), batch.spare());
        Burst { hand: self, batch, out, len, room, most, done: 0, lengths, over: 0, overs: Eight::all(0) }
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

    /// The line of packets of these lengths, most of which `usual` is noted of.
    #[inline(always)]
    fn line(&self, lengths: Lengths, usual: Noted) -> Line {
        let ([first, second, third], byte) = (self.line, self.byte);
        let first = first.wrapping_add(u64::from(lengths.shortest).wrapping_mul(byte));
        let noted = second | usual.0;
        Line { range: lengths.range.into(), first, byte, second, noted, third, usual: Pair::new(noted, third) }
    }

    /// Takes the filled buffer out of `slot`, as a packet of so many bytes, and puts a fresh one there. `None`, and no change, if no buffer
    /// is free or one does not hold them.
    pub(crate) fn exchange(&self, slot: &mut Packet, bytes: u32) -> Option<Packet> {
        let lengths = Lengths::new(0, u32::MAX);
        if bytes > lengths.range || self.fresh(1) == 0 {
            return None;
        }
        let at = self.cache.len() - 1;
        self.cache.set_len(at);
        let what = Received::of(bytes.into());
        let line = self.line(lengths, Noted::NOTHING);
        // SAFETY: the slot that was the last holds a free buffer, which is `slot`'s from here on.
        Some(unsafe { swap(slot, self.cache.slot(at).get(), &line, &what) })
    }
}

// As [`Eight::twice`] has it.
const _: () = assert!(DATA_LEN_SHIFT == 16 && PACKET_LEN_SHIFT == 32);
const DATA_LEN_SHIFT: u32 = shift(std::mem::offset_of!(Meta, data_len), 0);
const PACKET_LEN_SHIFT: u32 = shift(std::mem::offset_of!(Meta, packet_len), 0);
// As [`Tellings::HASHES`] has it.
const _: () = assert!(shift(std::mem::offset_of!(Meta, rss_hash), 2) == 32);
const VERDICTS_SHIFT: u32 = shift(std::mem::offset_of!(Meta, verdicts), 1);
const FLAGS_SHIFT: u32 = shift(std::mem::offset_of!(Meta, flags), 1);
// What a fresh line has in these places is zero, and so is everything behind the third word.
const _: () = {
    let line = Blank::fresh(0).line();
    let mut at = 3;
    while at < line.len() {
        assert!(line[at] == 0);
        at += 1;
    }
    assert!(line[0] >> 16 == 0 && (line[1] >> VERDICTS_SHIFT) & 0xff == 0 && line[1] >> FLAGS_SHIFT == 0);
    assert!(line[2] >> shift(std::mem::offset_of!(Meta, rss_hash), 2) == 0);
};
