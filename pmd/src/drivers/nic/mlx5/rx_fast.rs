//! Fast path: single-buffer packets. Each takes one step, in order, with a completion of its own or in a
//! session. All other completions are left for [`super::cqe`].

use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_memory::SlotsView;
use wirepath_nic_defs::mlx5::{CqeFlags, MINI_FORMAT_HASH, StrideCount};

use super::cq::{CompletionQueue, Entry, MiniArrays, RawCqe, Tail};
use super::cqe::{CqeParser, PLAIN, ParsedCqe, RARE, Session, TITLE, checksum_status};
use wirepath_packet::Packet;
use wirepath_packet::driver::{CompletionSource, LANES, OffloadResult, RxBurst, RxDescriptorOps, RxPacketInfo, U64x8};
use wirepath_packet::offload::ChecksumStatus;

/// Receive state for work requests of `N` words per slot; the second word is a buffer's address.
pub(super) struct RxFastPath<'a, const N: usize> {
    pub(super) ring_slots: BufferSlots<'a, N>,
    pub(super) completions: &'a mut CompletionQueue,
    pub(super) parser: &'a mut CqeParser,
    /// The buffer of each step of the ring.
    pub(super) posted: &'a mut [Packet],
    /// Offset from an address of this process to the device's IOVA.
    pub(super) iova_offset: u64,
}

/// Fields of a title, which hold for all packets of its session.
#[derive(Clone, Copy)]
struct Title {
    /// The work request that contains the strides.
    request: u16,
    /// See [`Entry::flags_and_vlan`].
    flags_and_vlan: u32,
    /// True if the packets have hashes.
    hashed: bool,
    /// True if the packets have a flow tag.
    marked: bool,
}

impl Title {
    #[inline(always)]
    fn of(entry: Entry<'_>, tail: Tail) -> Self {
        Self {
            request: entry.request(),
            flags_and_vlan: entry.flags_and_vlan(),
            hashed: entry.is_hashed(),
            marked: tail.low24() != 0,
        }
    }
}

/// Ring slots of the buffers.
#[derive(Clone, Copy)]
pub(super) struct BufferSlots<'a, const N: usize> {
    pub(super) ring: SlotsView<'a, [AtomicU64; N]>,
    /// Log2 of the steps of a work request.
    pub(super) log: u32,
    /// Slots of a work request, and slots in front of its first step.
    pub(super) segments_per_wqe: u32,
    pub(super) lead: u32,
}

impl<'a, const N: usize> BufferSlots<'a, N> {
    /// Returns the stride of a step within its work request.
    #[inline(always)]
    fn stride(self, step: u32) -> u32 {
        step & ((1 << self.log) - 1)
    }

    /// Returns the number of the work request.
    #[inline(always)]
    fn request(self, step: u32) -> u16 {
        (step >> self.log) as u16
    }

    /// Returns the slots from a step to the end of its work request, or of the ring if each request has one
    /// step.
    #[inline(always)]
    fn from<const STRIDED: bool>(self, step: u32) -> &'a [[AtomicU64; N]] {
        if !STRIDED {
            return self.ring.run(step);
        }
        let stride = self.stride(step);
        let rest = self.ring.run((step >> self.log).wrapping_mul(self.segments_per_wqe) + self.lead + stride);
        &rest[..(1 << self.log) - stride as usize]
    }
}

/// Returns the byte-count word of a CQE for a length, with a stride count of 1 in striding queues.
const fn counted<const STRIDED: bool>(bytes: u32) -> u32 {
    if STRIDED { StrideCount(0).with_strides(1).with_length(bytes).0 } else { bytes }
}

impl<const N: usize> RxFastPath<'_, N> {
    /// Appends packets until there are no more of this kind, or no buffers. Returns true if other completions
    /// follow.
    #[inline(always)]
    pub(super) fn run<const STRIDED: bool>(&mut self, burst: &mut RxBurst<'_>) -> bool {
        loop {
            let session = match self.parser.session {
                None => {
                    let Some((entry, tail)) = self.completions.peek() else { return false };
                    if tail.kind() == TITLE {
                        let session = self.parser.begin(entry, tail);
                        let Ok(session) = session else { return true };
                        Some((session, Title::of(entry, tail)))
                    } else {
                        None
                    }
                }
                Some(open) => {
                    let (entry, tail) = Entry::reread(self.completions.title());
                    Some((open, Title::of(entry, tail)))
                }
            };
            let n = match session {
                None => self.entries::<STRIDED>(burst),
                // Striding queues have the stride in the place of the hash.
                Some((session, title)) if !STRIDED && self.parser.format == Some(MINI_FORMAT_HASH) => {
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

    /// Appends packets with their own entries, as long as entries, buffers and slots are contiguous. Returns
    /// their number.
    #[inline(always)]
    fn entries<const STRIDED: bool>(&mut self, burst: &mut RxBurst<'_>) -> usize {
        let (step, ring_slots, tick) = (self.parser.step(), self.ring_slots, self.parser.tick);
        let (entries, last) = self.completions.rest(PLAIN);
        let position = if STRIDED { ring_slots.stride(step) } else { step };
        let mut by = Entries::<N, STRIDED> {
            expected: last | position << 16,
            request: ring_slots.request(step),
            base: counted::<STRIDED>(burst.lengths().shortest()),
            iova_offset: self.iova_offset,
        };
        let at = step as usize & (self.posted.len() - 1);
        let (slots, ring_slots) = (&mut self.posted[at..], ring_slots.from::<STRIDED>(step));
        let n = burst.receive(slots, ring_slots, usize::MAX, |at| &entries[at..], &mut by);
        if tick != 0 {
            stamp(tick, entries, burst.last_packets(n));
        }
        self.completions.advance(n as u32);
        self.parser.advance_to(step.wrapping_add(n as u32));
        n
    }

    /// Appends packets of a session in the same way.
    #[inline(always)]
    fn session<const STRIDED: bool, const HASH: bool>(
        &mut self,
        Session { count, read }: Session,
        title: Title,
        burst: &mut RxBurst<'_>,
    ) -> usize {
        let (step, ring_slots) = (self.parser.step(), self.ring_slots);
        if STRIDED && title.request != ring_slots.request(step) {
            return 0;
        }
        let mut by = Minis::<N, STRIDED, HASH> {
            expected: u64::from(if STRIDED { ring_slots.stride(step) } else { 0 }) << 32
                | u64::from(counted::<STRIDED>(burst.lengths().shortest())),
            offload: OffloadResult::new(checksum_status(title.flags_and_vlan), HASH && title.hashed),
            iova_offset: self.iova_offset,
        };
        let at = step as usize & (self.posted.len() - 1);
        let (slots, ring_slots) = (&mut self.posted[at..], ring_slots.from::<STRIDED>(step));
        let (minis, rest) = (Portion { arrays: self.completions.minis(), read }, (count - read) as usize);
        let n = burst.receive(slots, ring_slots, rest, minis, &mut by);
        if title.marked || title.flags_and_vlan & RARE != 0 {
            note_all(self.completions.title(), burst.last_packets(n));
        }
        self.parser.advance_to(step.wrapping_add(n as u32));
        let read = read + n as u32;
        if read == count {
            self.parser.end_session(self.completions, count);
        } else {
            self.parser.session = Some(Session { count, read });
        }
        n
    }
}

/// Writes the timestamps of entries into their packets.
#[cold]
#[inline(never)]
fn stamp(tick: u64, entries: &[RawCqe], packets: &mut [Packet]) {
    for (entry, packet) in entries.iter().zip(packets) {
        let (entry, tail) = Entry::reread(entry);
        ParsedCqe::at_time(entry, tail, tick).note(packet);
    }
}

/// Writes metadata of a title, other than checksums, into the packets of its session.
#[cold]
#[inline(never)]
fn note_all(title: &RawCqe, packets: &mut [Packet]) {
    let (entry, tail) = Entry::reread(title);
    // The packets already have their hashes; the title's hash belongs to one of them.
    let title = ParsedCqe::of_title(entry, tail, false);
    packets.iter_mut().for_each(|packet| title.note(packet));
}

/// Flags of nearly all packets: both checksums good. [`MATTER`] adds the flag for a stripped VLAN tag, which
/// must be clear.
const RIGHT: CqeFlags = CqeFlags(0).with_l3_ok(1).with_l4_ok(1);
const MATTER: CqeFlags = RIGHT.with_vlan_stripped(1);

/// Source of packets with their own entries.
#[derive(Clone, Copy)]
struct Entries<const N: usize, const STRIDED: bool> {
    /// Last word of the next entry ([`Entry::expect`]).
    expected: u32,
    /// The work request that contains the strides.
    request: u16,
    /// Byte-count word of the shortest packet.
    base: u32,
    iova_offset: u64,
}

impl<const N: usize, const STRIDED: bool> RxDescriptorOps for Entries<N, STRIDED> {
    const UNROLL: usize = 4;
    type Completion = RawCqe;
    type Descriptor = [AtomicU64; N];

    #[inline(always)]
    fn default_offload(&self) -> OffloadResult {
        const { OffloadResult::new(ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_GOOD), true) }
    }

    #[inline(always)]
    fn parse(&mut self, entry: &RawCqe) -> Option<RxPacketInfo> {
        let entry = Entry::expect(entry, self.expected)?;
        if STRIDED && entry.request() != self.request {
            return None;
        }
        let excess_len = entry.byte_count().wrapping_sub(self.base).into();
        let (mut offload, mut has_metadata) = (None, entry.tagged() != 0);
        if !(entry.has_flags(MATTER, RIGHT) && entry.is_hashed()) {
            let flags_and_vlan = entry.flags_and_vlan();
            offload = Some(OffloadResult::new(checksum_status(flags_and_vlan), entry.is_hashed()));
            has_metadata |= flags_and_vlan & RARE != 0;
        }
        Some(RxPacketInfo { excess_len, offload, hash: Some(entry.hash()), has_metadata })
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.expected = self.expected.wrapping_add(1 << 16);
    }

    #[inline(always)]
    fn post(&self, descriptor: &[AtomicU64; N], address: u64) {
        post(descriptor, address.wrapping_add(self.iova_offset));
    }

    #[cold]
    #[inline(never)]
    fn write_metadata(entry: &RawCqe, packet: &mut Packet) {
        let (entry, tail) = Entry::reread(entry);
        ParsedCqe::of(entry, tail).note(packet);
    }
}

/// Mini CQEs of a session, from packet `read` on.
struct Portion<'a> {
    arrays: MiniArrays<'a>,
    read: u32,
}

impl<'a> CompletionSource<'a, AtomicU64> for Portion<'a> {
    #[inline(always)]
    fn completions(&self, packet: usize) -> &'a [AtomicU64] {
        self.arrays.from(self.read + packet as u32)
    }

    #[inline(always)]
    fn chunks_x8(&self, packet: usize) -> Option<impl FnMut() -> &'a [AtomicU64; LANES]> {
        self.arrays.whole(self.read + packet as u32)
    }
}

/// Source of packets in a session.
#[derive(Clone, Copy)]
struct Minis<const N: usize, const STRIDED: bool, const HASH: bool> {
    /// Mini CQE of the shortest packet at the next stride: stride, stride count and length. Without strides:
    /// the length.
    expected: u64,
    offload: OffloadResult,
    iova_offset: u64,
}

impl<const N: usize, const STRIDED: bool, const HASH: bool> RxDescriptorOps for Minis<N, STRIDED, HASH> {
    const HAS_RSS_HASH: bool = HASH;
    type Completion = AtomicU64;
    type Descriptor = [AtomicU64; N];

    #[inline(always)]
    fn default_offload(&self) -> OffloadResult {
        self.offload
    }

    #[inline(always)]
    fn parse(&mut self, mini: &AtomicU64) -> Option<RxPacketInfo> {
        let word = u64::from_be(mini.load(Ordering::Relaxed));
        let excess_len = if STRIDED {
            // Without the checksum in the high bits. A valid stride, filler flag and stride count leave only
            // a length.
            (word & (u64::MAX >> 16)).wrapping_sub(self.expected)
        } else {
            (word as u32).wrapping_sub(self.expected as u32).into()
        };
        Some(RxPacketInfo { excess_len, offload: None, hash: HASH.then_some((word >> 32) as u32), has_metadata: false })
    }

    #[inline(always)]
    fn advance(&mut self) {
        if STRIDED {
            self.expected += 1 << 32;
        }
    }

    #[inline(always)]
    fn parse_x8(&self, minis: &[AtomicU64; LANES]) -> Option<U64x8> {
        let words = U64x8::load_atomic(minis).swap_bytes();
        // Without the checksum or hash in the high bits.
        let (words, step) = match (STRIDED, HASH) {
            (true, _) => (words.low_bytes::<6>(), 1 << 32),
            (false, true) => (words, 0),
            (false, false) => (words.low_bytes::<4>(), 0),
        };
        Some(words.wrapping_sub(U64x8::iota(self.expected, step)))
    }

    #[inline(always)]
    fn post(&self, descriptor: &[AtomicU64; N], address: u64) {
        post(descriptor, address.wrapping_add(self.iova_offset));
    }

    #[inline(always)]
    fn post_x8(&self, ring_slots: &[[AtomicU64; N]; LANES], addresses: U64x8) {
        addresses.wrapping_add(U64x8::splat(self.iova_offset)).store_be_word1(ring_slots);
    }

    /// Does nothing: other metadata in a title holds for all of its packets.
    fn write_metadata(_: &AtomicU64, _: &mut Packet) {}
}

/// Writes the IOVA of a buffer; length and lkey stay.
#[inline(always)]
pub(super) fn post(descriptor: &[AtomicU64], address: u64) {
    descriptor[1].store(address.to_be(), Ordering::Relaxed);
}
