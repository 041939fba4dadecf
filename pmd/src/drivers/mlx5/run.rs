//! The way of nearly all packets: of one buffer and one step each, the next in turn, told of by entries of their own or in sessions.
//! Whatever else there is stays where it is, for [`super::arrival`] to look at.

use std::iter::once;
use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_memory::View;
use wirepath_nic_defs::mlx5::{CqeFlags, MINI_FORMAT_HASH, StrideCount};

use super::arrival::{Arrival, Arrivals, PLAIN, RARE, Session, TITLE, verdicts};
use super::cq::{CompletionQueue, Entry, Whole};
use crate::packet::offload::Verdicts;
use crate::packet::{Burst, Lengths, Noted, Packet, Received, Tellings};

/// A receive queue of places of `N` words, the second of which is a buffer's address.
pub(super) struct Run<'a, const N: usize> {
    pub(super) places: Places<'a, N>,
    pub(super) completions: &'a mut CompletionQueue,
    pub(super) arrivals: &'a mut Arrivals,
    /// The buffer of each step of the ring.
    pub(super) posted: &'a mut [Packet],
    pub(super) lengths: Lengths,
    /// What is added to an address of ours to make it the device's.
    pub(super) shift: u64,
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
    /// Appends packets until there are no more, or something else, or no buffers. Returns their bytes, and whether there is more to look at.
    #[inline(always)]
    pub(super) fn go<const STRIDED: bool>(&mut self, burst: &mut Burst<'_>) -> (u64, bool) {
        let mut bytes = 0;
        loop {
            let session = match self.arrivals.session {
                None => {
                    let Some((entry, tail)) = self.completions.look() else { return (bytes, false) };
                    if tail.kind() == TITLE {
                        let session = self.arrivals.begin(entry, tail, self.completions.count());
                        let Ok(session) = session else { return (bytes, true) };
                        Some(session)
                    } else {
                        None
                    }
                }
                open => open,
            };
            let (n, more) = match session {
                None => self.entries::<STRIDED>(burst),
                Some(session) if self.arrivals.format == Some(MINI_FORMAT_HASH) => {
                    self.session::<STRIDED, true>(session, burst)
                }
                Some(session) => self.session::<STRIDED, false>(session, burst),
            };
            bytes += more;
            if burst.is_full() {
                return (bytes, false);
            }
            if n == 0 {
                return (bytes, true);
            }
        }
    }

    /// Packets of entries of their own, as far as entries, slots and places lie in a row: how many, and their bytes.
    #[inline(always)]
    fn entries<const STRIDED: bool>(&mut self, burst: &mut Burst<'_>) -> (usize, u64) {
        let (step, places, tick) = (self.arrivals.step(), self.places, self.arrivals.tick);
        let (entries, last) = self.completions.rest(PLAIN);
        let position = if STRIDED { places.stride(step) } else { step };
        let mut by = Entries::<N, STRIDED> {
            expected: last | position << 16,
            request: places.request(step),
            lengths: self.lengths,
            base: counted::<STRIDED>(self.lengths.shortest()),
            shift: self.shift,
            tick,
            always: u32::from(tick != 0),
            bytes: 0,
        };
        let at = step as usize & (self.posted.len() - 1);
        let n = burst.run(&mut self.posted[at..], places.from::<STRIDED>(step), once(entries), &mut by);
        self.completions.advance(n as u32);
        self.arrivals.passed(step.wrapping_add(n as u32));
        (n, by.bytes)
    }

    /// Packets of a session, in the same way.
    #[inline(always)]
    fn session<const STRIDED: bool, const HASH: bool>(
        &mut self,
        session: Session,
        burst: &mut Burst<'_>,
    ) -> (usize, u64) {
        let Session { count, read } = session;
        let (step, places) = (self.arrivals.step(), self.places);
        let (title, tail) = Entry::again(self.completions.title());
        if STRIDED && title.request() != places.request(step) {
            return (0, 0);
        }
        let described = title.described();
        let mut by = Minis::<'_, N, STRIDED, HASH> {
            expected: u64::from(places.stride(step)) << 32 | u64::from(counted::<STRIDED>(self.lengths.shortest())),
            lengths: self.lengths,
            noted: Noted::new(verdicts(described), HASH && title.is_hashed()),
            rare: tail.low24() != 0 || described & RARE != 0,
            title: self.completions.title(),
            shift: self.shift,
            bytes: 0,
        };
        let at = step as usize & (self.posted.len() - 1);
        let slots = &mut self.posted[at..];
        let n = burst.run(slots, places.from::<STRIDED>(step), self.completions.arrays(read, count), &mut by);
        let bytes = by.bytes;
        self.arrivals.passed(step.wrapping_add(n as u32));
        let read = read + n as u32;
        if read == count {
            self.arrivals.end_session(self.completions, count);
        } else {
            self.arrivals.session = Some(Session { count, read });
        }
        (n, bytes)
    }
}

/// Flags of nearly all packets, and those that matter: both checksums right, no tag taken off.
const RIGHT: CqeFlags = CqeFlags(0).with_l3_ok(1).with_l4_ok(1);
const MATTER: CqeFlags = RIGHT.with_vlan_stripped(1);

/// Entries of packets.
struct Entries<const N: usize, const STRIDED: bool> {
    /// What the last word of the next entry says ([`Entry::expect`]).
    expected: u32,
    /// The work request that strides are of.
    request: u16,
    lengths: Lengths,
    /// What is told of the shortest packet.
    base: u32,
    shift: u64,
    tick: u64,
    /// 1 if there is more to note of every packet.
    always: u32,
    bytes: u64,
}

impl<const N: usize, const STRIDED: bool> Tellings for Entries<N, STRIDED> {
    type Entry = Whole;
    type Place = [AtomicU64; N];
    type More = u64;

    #[inline(always)]
    fn next(&mut self, entry: &Whole) -> Option<Received> {
        let entry = Entry::expect(entry, self.expected)?;
        if STRIDED && entry.request() != self.request {
            return None;
        }
        let len = self.lengths.above(entry.byte_count().wrapping_sub(self.base).into())?;
        let (noted, untagged) = if entry.has_flags(MATTER, RIGHT) && entry.is_hashed() {
            (const { Noted::new(Verdicts::L3_GOOD.with(Verdicts::L4_GOOD), true) }, 0)
        } else {
            let described = entry.described();
            (Noted::new(verdicts(described), entry.is_hashed()), described & RARE)
        };
        self.expected = self.expected.wrapping_add(1 << 16);
        self.bytes += u64::from(len.bytes());
        Some(Received { len, noted, hash: entry.hash(), more: entry.tagged() | untagged | self.always != 0 })
    }

    #[inline(always)]
    fn post(&self, place: &[AtomicU64; N], address: u64) {
        post(place, address.wrapping_add(self.shift));
    }

    #[inline(always)]
    fn more(&self) -> u64 {
        self.tick
    }

    #[cold]
    #[inline(never)]
    fn note(tick: u64, entry: &Whole, packet: &mut Packet) {
        let (entry, tail) = Entry::again(entry);
        Arrival::at_time(entry, tail, tick).note(packet);
    }
}

/// The arrays of a session.
struct Minis<'a, const N: usize, const STRIDED: bool, const HASH: bool> {
    /// What is told of the shortest packet of the next stride: stride, count of strides, and length.
    expected: u64,
    lengths: Lengths,
    noted: Noted,
    rare: bool,
    title: &'a Whole,
    shift: u64,
    bytes: u64,
}

impl<'a, const N: usize, const STRIDED: bool, const HASH: bool> Tellings for Minis<'a, N, STRIDED, HASH> {
    type Entry = AtomicU64;
    type Place = [AtomicU64; N];
    type More = &'a Whole;

    #[inline(always)]
    fn next(&mut self, mini: &AtomicU64) -> Option<Received> {
        let word = u64::from_be(mini.load(Ordering::Relaxed));
        let len = if STRIDED {
            // Without the checksum in front. Stride, filler and count of strides are right if nothing is left of them.
            let len = self.lengths.above((word & (u64::MAX >> 16)).wrapping_sub(self.expected))?;
            self.expected += 1 << 32;
            len
        } else {
            self.lengths.above((word as u32).wrapping_sub(self.lengths.shortest()).into())?
        };
        self.bytes += u64::from(len.bytes());
        Some(Received { len, noted: self.noted, hash: if HASH { (word >> 32) as u32 } else { 0 }, more: self.rare })
    }

    #[inline(always)]
    fn post(&self, place: &[AtomicU64; N], address: u64) {
        post(place, address.wrapping_add(self.shift));
    }

    #[inline(always)]
    fn more(&self) -> &'a Whole {
        self.title
    }

    #[cold]
    #[inline(never)]
    fn note(title: &'a Whole, mini: &AtomicU64, packet: &mut Packet) {
        let (entry, tail) = Entry::again(title);
        let mut arrival = Arrival::of_title(entry, tail, HASH);
        if HASH {
            arrival.hash = (u64::from_be(mini.load(Ordering::Relaxed)) >> 32) as u32;
        }
        arrival.note(packet);
    }
}

/// Writes the device's address of a buffer; length and key stay as they are.
#[inline(always)]
pub(super) fn post(place: &[AtomicU64], address: u64) {
    place[1].store(address.to_be(), Ordering::Relaxed);
}
