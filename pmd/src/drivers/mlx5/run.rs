//! The way of nearly all packets: of one buffer and one step each, the next in turn, told of by entries of their own or in sessions.
//! Whatever else there is stays where it is, for [`super::arrival`] to look at.

use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_memory::View;
use wirepath_nic_defs::mlx5::{CqeFlags, MINI_FORMAT_HASH, StrideCount};

use super::arrival::{Arrival, Arrivals, PLAIN, RARE, Session, TITLE, verdicts};
use super::cq::{CompletionQueue, Entry, MiniArrays, Tail, Whole};
use crate::packet::offload::Verdicts;
use crate::packet::{Burst, EIGHT, Eight, Noted, Packet, Received, Tellings, Told};

/// A receive queue of places of `N` words, the second of which is a buffer's address.
pub(super) struct Run<'a, const N: usize> {
    pub(super) places: Places<'a, N>,
    pub(super) completions: &'a mut CompletionQueue,
    pub(super) arrivals: &'a mut Arrivals,
    /// The buffer of each step of the ring.
    pub(super) posted: &'a mut [Packet],
    /// What is added to an address of ours to make it the device's.
    pub(super) shift: u64,
}

/// What the title of a session says of all of its packets.
#[derive(Clone, Copy)]
struct Title {
    /// The work request that strides are of.
    request: u16,
    /// As [`Entry::described`].
    described: u32,
    /// Whether there are hashes.
    hashed: bool,
    /// Whether there is a flow tag.
    marked: bool,
}

impl Title {
    #[inline(always)]
    fn of(entry: Entry<'_>, tail: Tail) -> Self {
        Self {
            request: entry.request(),
            described: entry.described(),
            hashed: entry.is_hashed(),
            marked: tail.low24() != 0,
        }
    }
}

/// Where in the ring the buffers of steps are.
#[derive(Clone, Copy)]
pub(super) struct Places<'a, const N: usize> {
    pub(super) ring: View<'a, [AtomicU64; N]>,
    /// Steps of a work request, logarithm.
    pub(super) log: u32,
    /// Places from one work request to the next, and those in front of its first step's.
    pub(super) distance: u32,
    pub(super) lead: u32,
}

impl<'a, const N: usize> Places<'a, N> {
    /// The stride in its work request that a step is.
    #[inline(always)]
    fn stride(self, step: u32) -> u32 {
        step & ((1 << self.log) - 1)
    }

    /// The number of the work request.
    #[inline(always)]
    fn request(self, step: u32) -> u16 {
        (step >> self.log) as u16
    }

    /// Places from a step on, to the end of the work request or, if it has only one, of the ring.
    #[inline(always)]
    fn from<const STRIDED: bool>(self, step: u32) -> &'a [[AtomicU64; N]] {
        if !STRIDED {
            return self.ring.run(step);
        }
        let stride = self.stride(step);
        let rest = self.ring.run((step >> self.log).wrapping_mul(self.distance) + self.lead + stride);
        &rest[..(1 << self.log) - stride as usize]
    }
}

/// The word of a length in bytes, with the number of strides where they are counted.
const fn counted<const STRIDED: bool>(bytes: u32) -> u32 {
    if STRIDED { StrideCount(0).with_strides(1).with_length(bytes).0 } else { bytes }
}

impl<const N: usize> Run<'_, N> {
    /// Appends packets until there are no more, or something else, or no buffers. Returns whether there is more to look at.
    #[inline(always)]
    pub(super) fn go<const STRIDED: bool>(&mut self, burst: &mut Burst<'_>) -> bool {
        loop {
            let session = match self.arrivals.session {
                None => {
                    let Some((entry, tail)) = self.completions.look() else { return false };
                    if tail.kind() == TITLE {
                        let session = self.arrivals.begin(entry, tail);
                        let Ok(session) = session else { return true };
                        Some((session, Title::of(entry, tail)))
                    } else {
                        None
                    }
                }
                Some(open) => {
                    let (entry, tail) = Entry::again(self.completions.title());
                    Some((open, Title::of(entry, tail)))
                }
            };
            let n = match session {
                None => self.entries::<STRIDED>(burst),
                // Strides are told where a hash would be.
                Some((session, title)) if !STRIDED && self.arrivals.format == Some(MINI_FORMAT_HASH) => {
                    self.session::<STRIDED, true>(session, title, burst)
                }
                Some((session, title)) => self.session::<STRIDED, false>(session, title, burst),
            };
            if burst.is_full() {
                return false;
            }
            if n == 0 {
                return true;
            }
        }
    }

    /// Packets of entries of their own, as far as entries, slots and places lie in a row: how many.
    #[inline(always)]
    fn entries<const STRIDED: bool>(&mut self, burst: &mut Burst<'_>) -> usize {
        let (step, places, tick) = (self.arrivals.step(), self.places, self.arrivals.tick);
        let (entries, last) = self.completions.rest(PLAIN);
        let position = if STRIDED { places.stride(step) } else { step };
        let mut by = Entries::<N, STRIDED> {
            expected: last | position << 16,
            request: places.request(step),
            base: counted::<STRIDED>(burst.lengths().shortest()),
            shift: self.shift,
        };
        let at = step as usize & (self.posted.len() - 1);
        let (slots, places) = (&mut self.posted[at..], places.from::<STRIDED>(step));
        let n = burst.run(slots, places, usize::MAX, |at| &entries[at..], &mut by);
        if tick != 0 {
            stamp(tick, entries, burst.latest(n));
        }
        self.completions.advance(n as u32);
        self.arrivals.passed(step.wrapping_add(n as u32));
        n
    }

    /// Packets of a session, in the same way.
    #[inline(always)]
    fn session<const STRIDED: bool, const HASH: bool>(
        &mut self,
        Session { count, read }: Session,
        title: Title,
        burst: &mut Burst<'_>,
    ) -> usize {
        let (step, places) = (self.arrivals.step(), self.places);
        if STRIDED && title.request != places.request(step) {
            return 0;
        }
        let mut by = Minis::<N, STRIDED, HASH> {
            expected: u64::from(if STRIDED { places.stride(step) } else { 0 }) << 32
                | u64::from(counted::<STRIDED>(burst.lengths().shortest())),
            noted: Noted::new(verdicts(title.described), HASH && title.hashed),
            shift: self.shift,
        };
        let at = step as usize & (self.posted.len() - 1);
        let (slots, places) = (&mut self.posted[at..], places.from::<STRIDED>(step));
        let (minis, rest) = (Portion { arrays: self.completions.minis(), read }, (count - read) as usize);
        let n = burst.run(slots, places, rest, minis, &mut by);
        if title.marked || title.described & RARE != 0 {
            note_all(self.completions.title(), burst.latest(n));
        }
        self.arrivals.passed(step.wrapping_add(n as u32));
        let read = read + n as u32;
        if read == count {
            self.arrivals.end_session(self.completions, count);
        } else {
            self.arrivals.session = Some(Session { count, read });
        }
        n
    }
}

/// Puts the time stamps of entries into their packets.
#[cold]
#[inline(never)]
fn stamp(tick: u64, entries: &[Whole], packets: &mut [Packet]) {
    for (entry, packet) in entries.iter().zip(packets) {
        let (entry, tail) = Entry::again(entry);
        Arrival::at_time(entry, tail, tick).note(packet);
    }
}

/// Puts what a title says beside checksums, which are in there, into the packets of its session.
#[cold]
#[inline(never)]
fn note_all(title: &Whole, packets: &mut [Packet]) {
    let (entry, tail) = Entry::again(title);
    // The hashes are in the packets too: the title's would be of one of them only.
    let title = Arrival::of_title(entry, tail, false);
    packets.iter_mut().for_each(|packet| title.note(packet));
}

/// Flags of nearly all packets, and those that matter: both checksums right, no tag taken off.
const RIGHT: CqeFlags = CqeFlags(0).with_l3_ok(1).with_l4_ok(1);
const MATTER: CqeFlags = RIGHT.with_vlan_stripped(1);

/// Entries of packets.
#[derive(Clone, Copy)]
struct Entries<const N: usize, const STRIDED: bool> {
    /// What the last word of the next entry says ([`Entry::expect`]).
    expected: u32,
    /// The work request that strides are of.
    request: u16,
    /// What is told of the shortest packet.
    base: u32,
    shift: u64,
}

impl<const N: usize, const STRIDED: bool> Tellings for Entries<N, STRIDED> {
    const TOGETHER: usize = 4;
    type Entry = Whole;
    type Place = [AtomicU64; N];

    #[inline(always)]
    fn usual(&self) -> Noted {
        const { Noted::new(Verdicts::L3_GOOD.with(Verdicts::L4_GOOD), true) }
    }

    #[inline(always)]
    fn next(&mut self, entry: &Whole) -> Option<Received> {
        let entry = Entry::expect(entry, self.expected)?;
        if STRIDED && entry.request() != self.request {
            return None;
        }
        let over = entry.byte_count().wrapping_sub(self.base).into();
        let (mut noted, mut more) = (None, entry.tagged() != 0);
        if !(entry.has_flags(MATTER, RIGHT) && entry.is_hashed()) {
            let described = entry.described();
            noted = Some(Noted::new(verdicts(described), entry.is_hashed()));
            more |= described & RARE != 0;
        }
        Some(Received { over, noted, hash: Some(entry.hash()), more })
    }

    #[inline(always)]
    fn took(&mut self) {
        self.expected = self.expected.wrapping_add(1 << 16);
    }

    #[inline(always)]
    fn post(&self, place: &[AtomicU64; N], address: u64) {
        post(place, address.wrapping_add(self.shift));
    }

    #[cold]
    #[inline(never)]
    fn note(entry: &Whole, packet: &mut Packet) {
        let (entry, tail) = Entry::again(entry);
        Arrival::of(entry, tail).note(packet);
    }
}

/// The arrays of a session from packet `read` on.
struct Portion<'a> {
    arrays: MiniArrays<'a>,
    read: u32,
}

impl<'a> Told<'a, AtomicU64> for Portion<'a> {
    #[inline(always)]
    fn from(&self, packet: usize) -> &'a [AtomicU64] {
        self.arrays.from(self.read + packet as u32)
    }

    #[inline(always)]
    fn eights(&self, packet: usize) -> Option<impl FnMut() -> &'a [AtomicU64; EIGHT]> {
        self.arrays.whole(self.read + packet as u32)
    }
}

/// What minis tell.
#[derive(Clone, Copy)]
struct Minis<const N: usize, const STRIDED: bool, const HASH: bool> {
    /// What is told of the shortest packet of the next stride: stride, count of strides, and length; without strides the length.
    expected: u64,
    noted: Noted,
    shift: u64,
}

impl<const N: usize, const STRIDED: bool, const HASH: bool> Tellings for Minis<N, STRIDED, HASH> {
    const HASHES: bool = HASH;
    type Entry = AtomicU64;
    type Place = [AtomicU64; N];

    #[inline(always)]
    fn usual(&self) -> Noted {
        self.noted
    }

    #[inline(always)]
    fn next(&mut self, mini: &AtomicU64) -> Option<Received> {
        let word = u64::from_be(mini.load(Ordering::Relaxed));
        let over = if STRIDED {
            // Without the checksum in front. Stride, filler and count of strides are right if nothing is left of them.
            (word & (u64::MAX >> 16)).wrapping_sub(self.expected)
        } else {
            (word as u32).wrapping_sub(self.expected as u32).into()
        };
        Some(Received { over, noted: None, hash: HASH.then_some((word >> 32) as u32), more: false })
    }

    #[inline(always)]
    fn took(&mut self) {
        if STRIDED {
            self.expected += 1 << 32;
        }
    }

    #[inline(always)]
    fn eight(&self, minis: &[AtomicU64; EIGHT]) -> Option<Eight> {
        let words = Eight::take(minis).turned();
        // As above.
        let (words, step) = match (STRIDED, HASH) {
            (true, _) => (words.low::<6>(), 1 << 32),
            (false, true) => (words, 0),
            (false, false) => (words.low::<4>(), 0),
        };
        Some(words.minus(Eight::steps(self.expected, step)))
    }

    #[inline(always)]
    fn post(&self, place: &[AtomicU64; N], address: u64) {
        post(place, address.wrapping_add(self.shift));
    }

    #[inline(always)]
    fn post_eight(&self, places: &[[AtomicU64; N]; EIGHT], addresses: Eight) {
        addresses.plus(Eight::all(self.shift)).give(places);
    }

    /// There is none: what else a title says, it says of all packets.
    fn note(_: &AtomicU64, _: &mut Packet) {}
}

/// Writes the device's address of a buffer; length and key stay as they are.
#[inline(always)]
pub(super) fn post(place: &[AtomicU64], address: u64) {
    place[1].store(address.to_be(), Ordering::Relaxed);
}
