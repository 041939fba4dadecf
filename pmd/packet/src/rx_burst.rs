// UNSAFETY: moves buffers between a thread's cache, a driver's ring and a batch by address.
#![allow(unsafe_code)]

//! Receive bursts: every filled buffer of a ring is swapped for a free one, and the filled ones become
//! packets of a batch.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m128i, _mm_set_epi64x, _mm_storeu_si128};
use std::cell::Cell;
use std::hint::black_box;
use std::mem::{MaybeUninit, replace};
use std::ptr::{self, NonNull};
use std::slice;

use super::Packet;
use super::batch::Batch;
use super::meta::{DATA_ROOM, DATA_START, META, Meta, shift};
use super::offload::{ChecksumStatus, Flags};
use super::pool::{Cache, MetaTemplate, Pool, PoolState};
use super::red_zones;
use super::simd::{LANES, U64x8};

/// Packet lengths that a receive queue accepts in one buffer.
#[derive(Clone, Copy, Debug)]
pub struct LengthRange {
    shortest: u32,
    /// Longest length less the shortest. The longest length is at most [`DATA_ROOM`].
    range: u32,
}

impl LengthRange {
    /// Lengths from `shortest` to `longest` bytes, both limited to what a buffer holds.
    pub fn new(shortest: u32, longest: u32) -> Self {
        let longest = longest.min(DATA_ROOM as u32);
        let shortest = shortest.min(longest);
        Self { shortest, range: longest - shortest }
    }

    /// Shortest length in bytes.
    #[inline(always)]
    pub fn shortest(self) -> u32 {
        self.shortest
    }
}

/// Checksum status and RSS-hash flag of a received packet, in the bit positions of the metadata line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadResult(u64);

impl OffloadResult {
    /// No checksum status and no hash.
    pub const NOTHING: Self = Self::new(ChecksumStatus::NONE, false);

    /// The given checksum status; `hashed` says that the RSS hash is valid.
    #[inline(always)]
    pub const fn new(checksum_status: ChecksumStatus, hashed: bool) -> Self {
        let flags = if hashed { Flags::RSS_HASH } else { Flags::NONE };
        Self((checksum_status.bits() as u64) << CHECKSUM_STATUS_SHIFT | (flags.bits() as u64) << FLAGS_SHIFT)
    }
}

/// Parsed completion of a packet that lies in one buffer, behind the full headroom.
#[derive(Clone, Copy, Debug)]
pub struct RxPacketInfo {
    /// Packet length less the shortest length that the queue accepts. The difference wraps round for shorter
    /// packets, which makes it as invalid as that of a packet that is too long.
    pub excess_len: u64,
    /// Offload result; `None` stands for [`RxDescriptorOps::default_offload`].
    pub offload: Option<OffloadResult>,
    /// RSS hash, if the completion has one.
    pub hash: Option<u32>,
    /// True if the completion has further metadata, which [`RxDescriptorOps::write_metadata`] copies.
    pub has_metadata: bool,
}

impl RxPacketInfo {
    /// A packet with a length and nothing else.
    const fn of(excess_len: u64) -> Self {
        Self { excess_len, offload: None, hash: None, has_metadata: false }
    }
}

/// Descriptor format of a device: parses receive completions and posts buffers.
///
/// The methods run while a burst owns the thread's cache of the pool. They must follow the contract of
/// [`Pool::cache_handle`].
pub trait RxDescriptorOps: Copy {
    /// Number of completions that are parsed before the first of their packets is built; 0 disables this, the
    /// largest value is 8.
    ///
    /// It applies to completions with the default offload result and no further metadata. Parsing and
    /// building are then two loops of constant length without early exit.
    const UNROLL: usize = 0;

    /// True if the upper halves of the words that [`Self::parse_x8`] returns are RSS hashes.
    const HAS_RSS_HASH: bool = false;

    /// Completion of one packet.
    type Completion;
    /// Ring entry that holds the address of one buffer.
    type Descriptor;

    /// Offload result of most packets.
    fn default_offload(&self) -> OffloadResult;

    /// Parses a completion. `None`: it is not written yet, or it is not for the fast path.
    fn parse(&mut self, completion: &Self::Completion) -> Option<RxPacketInfo>;

    /// Advances to the next descriptor. Called when the parsed packet has been accepted.
    fn advance(&mut self);

    /// Parses eight completions that consist of one word each; returns their [`RxPacketInfo::excess_len`].
    ///
    /// The packets have the default offload result, a hash if [`Self::HAS_RSS_HASH`] is true, and no further
    /// metadata. A length that is too long marks a completion that [`Self::parse`] would not accept. `None`:
    /// the format has no such completions.
    #[inline(always)]
    fn parse_x8(&self, completions: &[Self::Completion; LANES]) -> Option<U64x8> {
        let _ = completions;
        None
    }

    /// Writes a free buffer to a descriptor; the device shall write the packet to `address` of this process.
    fn post(&self, descriptor: &Self::Descriptor, address: u64);

    /// Does the same as [`Self::post`] for eight descriptors.
    #[inline(always)]
    fn post_x8(&self, descriptors: &[Self::Descriptor; LANES], addresses: U64x8) {
        for (descriptor, address) in descriptors.iter().zip(addresses.to_array()) {
            self.post(descriptor, address);
        }
    }

    /// Copies the further metadata of a completion into the packet.
    ///
    /// It takes no `self`, so that the state of the parser can stay in registers.
    fn write_metadata(completion: &Self::Completion, packet: &mut Packet);
}

/// Completions of a burst, addressed by packet number.
pub trait CompletionSource<'t, E> {
    /// Returns the completion of a packet and some that follow it. Empty: there are none.
    fn completions(&self, packet: usize) -> &'t [E];

    /// Returns the completion of a packet and all that follow it, in groups of eight.
    ///
    /// `None`: the format has no such groups, or the packet is not the first of a group.
    #[inline(always)]
    fn chunks_x8(&self, packet: usize) -> Option<impl FnMut() -> &'t [E; LANES]>
    where
        E: 't,
    {
        let _ = packet;
        None::<fn() -> &'t [E; LANES]>
    }
}

impl<'t, E: 't, F: Fn(usize) -> &'t [E]> CompletionSource<'t, E> for F {
    #[inline(always)]
    fn completions(&self, packet: usize) -> &'t [E] {
        self(packet)
    }
}

/// Two words that are stored with one instruction where the processor has one.
#[derive(Clone, Copy)]
struct U64x2(#[cfg(target_arch = "x86_64")] __m128i, #[cfg(not(target_arch = "x86_64"))] [u64; 2]);

impl U64x2 {
    #[inline(always)]
    fn new(low: u64, high: u64) -> Self {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE2 is part of every x86-64 processor.
        let words = unsafe { _mm_set_epi64x(high as i64, low as i64) };
        #[cfg(not(target_arch = "x86_64"))]
        let words = [low, high];
        Self(words)
    }

    /// Writes both words.
    ///
    /// # Safety
    /// `to` is valid for writing two words and is aligned to 8.
    #[inline(always)]
    unsafe fn write(self, to: *mut u64) {
        // SAFETY: the caller guarantees that `to` is valid for two words; the unaligned store accepts an
        // alignment of 8.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            _mm_storeu_si128(to.cast(), self.0);
            #[cfg(not(target_arch = "x86_64"))]
            to.cast::<[u64; 2]>().write(self.0);
        }
    }
}

/// Metadata line of the packets of a burst, without the fields that differ from packet to packet.
struct MetaLine {
    /// Longest length less the shortest.
    range: u64,
    /// First word of the shortest packet.
    first: u64,
    /// Amount by which one more byte of length raises the first word.
    len_step: u64,
    /// Second word without an offload result.
    second: u64,
    /// Second word with the default offload result.
    default_second: u64,
    /// Third word of a packet without a hash. All further words are zero.
    third: u64,
    /// `default_second` and `third` together.
    default_pair: U64x2,
}

/// Largest [`RxDescriptorOps::UNROLL`].
const MAX_UNROLL: usize = 8;

/// Source and destination of the next packet of a burst.
///
/// Pointers instead of indices: an index would need a register of its own next to that of its base.
struct BurstCursor<D> {
    slot: *mut Packet,
    descriptor: *const D,
    /// Slot of the next free buffer in the cache. Free buffers are taken in descending order.
    free: *const Cell<*mut Meta>,
    out: *mut MaybeUninit<Packet>,
}

impl<D> BurstCursor<D> {
    /// Makes a packet of the filled buffer `j` slots behind the next one, and posts a free buffer in its
    /// place.
    ///
    /// # Safety
    /// More than `j` slots, descriptors, free buffers and free batch entries are left, and the packet length
    /// is within the queue's range.
    #[inline(always)]
    unsafe fn swap<T: RxDescriptorOps<Descriptor = D>>(
        &mut self,
        j: usize,
        line: &MetaLine,
        info: &RxPacketInfo,
        ops: &T,
    ) -> &mut Packet {
        // SAFETY: the caller guarantees that the four pointers are valid at `j`. The burst does not use the
        // cache slot again, so the free buffer has one owner. `post` runs before anything moves: a panic
        // there changes nothing.
        unsafe {
            let free = (*self.free.sub(j)).get();
            ops.post(&*self.descriptor.add(j), free as u64 + DATA_START as u64);
            (*self.out.add(j)).write(swap(&mut *self.slot.add(j), free, line, info))
        }
    }

    /// Does the same for the next eight packets, whose lengths and hashes are in `excess_lens`.
    ///
    /// # Safety
    /// At least eight slots, descriptors, free buffers and free batch entries are left, and all lengths are
    /// within the queue's range.
    #[inline(always)]
    unsafe fn swap_x8<T: RxDescriptorOps<Descriptor = D>>(&mut self, line: &MetaLine, excess_lens: U64x8, ops: &T) {
        let Self { slot, descriptor, free, out } = *self;
        // SAFETY: the caller guarantees that eight entries are valid behind `slot`, `descriptor` and `out`,
        // and eight down from `free`. A packet is a pointer to its metadata line, so packets and free buffers
        // may be copied as pointers. The burst does not use the eight cache slots again. `post_x8` runs
        // before anything moves: a panic there changes nothing.
        unsafe {
            let last = free.sub(LANES - 1);
            (0..LANES).for_each(|j| red_zones::taken((*last.add(j)).get()));
            ops.post_x8(&*descriptor.cast(), U64x8::load(last.cast()).wrapping_add(U64x8::splat(DATA_START as u64)));
            ptr::copy_nonoverlapping(slot, out.cast(), LANES);
            ptr::copy_nonoverlapping(last.cast(), slot, LANES);
            let (first, third) =
                (U64x8::splat(line.first).wrapping_add(excess_lens.to_length_fields()), U64x8::splat(line.third));
            let third = if T::HAS_RSS_HASH { excess_lens.high_halves_over(third) } else { third };
            U64x8::write_rows(
                [[first, U64x8::splat(line.default_second)], [third, U64x8::splat(0)]],
                |j| (*out.cast::<Packet>().add(j)).meta.as_ptr().cast(),
                |rest| rest.cast::<[u64; META / 8 - 4]>().write([0; META / 8 - 4]),
            );
        }
    }

    /// Advances by `n` packets.
    #[inline(always)]
    fn advance(&mut self, n: usize) {
        (self.slot, self.descriptor) = (self.slot.wrapping_add(n), self.descriptor.wrapping_add(n));
        (self.free, self.out) = (self.free.wrapping_sub(n), self.out.wrapping_add(n));
    }
}

/// The calling thread's cache of a pool, for receive queues that swap each filled buffer for a free one.
///
/// The metadata line of a packet is written once, whole and from registers, when the packet has arrived. The
/// line of a posted buffer holds what the buffer's last packet left there, and nothing reads it.
pub struct PoolCacheHandle<'a> {
    shared: &'a PoolState,
    cache: &'a Cache,
    /// Second and third word of the metadata line of received packets. All further words are zero.
    line: [u64; 2],
    /// Amount by which one more byte of length raises the first word.
    ///
    /// The value is hidden from the compiler, which then multiplies by it instead of shifting and adding.
    len_step: u64,
}

impl Pool {
    /// Returns the calling thread's cache of the pool; `None` in a thread that has given its caches back
    /// because it ends.
    ///
    /// The length in `template` is ignored: received packets have the length that the device reports.
    ///
    /// # Panics
    /// If `template` was made by another pool.
    ///
    /// # Safety
    /// The caller guarantees the following until the handle, and the burst made of it, are dropped:
    /// - Both are dropped and not leaked, and neither is kept in a thread-local variable.
    /// - While a burst lives, its thread neither takes packets from this pool nor frees packets of it in
    ///   another way. This binds the methods of [`RxDescriptorOps`] and [`CompletionSource`] too.
    /// - All packets in the slots that [`PoolCacheHandle::swap`] and [`RxBurst::receive`] get belong to this
    ///   pool.
    #[inline(always)]
    pub unsafe fn cache_handle(&self, template: &MetaTemplate) -> Option<PoolCacheHandle<'_>> {
        let shared = self.shared();
        assert!(template.pool() == self.id());
        let [_, second, third, ..] = template.line();
        let len_step = black_box(1 << DATA_LEN_SHIFT | 1 << PACKET_LEN_SHIFT);
        Some(PoolCacheHandle { shared, cache: shared.thread_cache()?, line: [second, third], len_step })
    }
}

/// Received packets on their way from a ring into a batch.
pub struct RxBurst<'a> {
    handle: PoolCacheHandle<'a>,
    /// Number of packets in the batch. It grows when the burst ends.
    batch_len: &'a mut usize,
    /// Entry of the batch for the first packet of the burst.
    out: *mut MaybeUninit<Packet>,
    /// Free buffers in the thread's cache when the burst began.
    len: usize,
    /// Free entries of the batch when the burst began.
    room: usize,
    /// Most packets of the burst: the smaller one of `room` and the number of free buffers.
    limit: usize,
    /// Packets received so far.
    done: usize,
    lengths: LengthRange,
    /// Sum of the excess lengths of packets that were received one by one.
    excess_len: u64,
    /// Sums of the excess lengths of packets that were received in eights. The upper halves sum up hashes and
    /// mean nothing.
    excess_lens: U64x8,
}

/// Updates cache and batch, even if the burst ends in a panic.
impl Drop for RxBurst<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.handle.cache.set_len(self.len - self.done);
        *self.batch_len += self.done;
    }
}

impl RxBurst<'_> {
    /// True if the batch has no more room.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.done == self.room
    }

    /// Packet lengths that the queue accepts.
    #[inline(always)]
    pub fn lengths(&self) -> LengthRange {
        self.lengths
    }

    /// Bytes of the packets received so far.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        let excess_lens = u64::from(self.excess_lens.sum() as u32);
        self.done as u64 * u64::from(self.lengths.shortest) + self.excess_len + excess_lens
    }

    /// The last `n` packets received.
    ///
    /// # Panics
    /// If fewer than `n` packets were received.
    pub fn last_packets(&mut self, n: usize) -> &mut [Packet] {
        assert!(n <= self.done);
        // SAFETY: the burst has written `done` packets from `out` on, and `n` is at most `done`.
        unsafe { slice::from_raw_parts_mut(self.out.add(self.done - n).cast(), n) }
    }

    /// Receives packets: swaps the filled buffer in each slot for a free one. Returns their number.
    ///
    /// Slot, descriptor and completion of a packet have the same number. Packets are received in order until
    /// one of these ends: completions, `limit`, the batch, `slots`, `descriptors`, or the free buffers. A
    /// completion that [`RxDescriptorOps::parse`] does not accept, and a length that the queue does not
    /// accept, end it too.
    #[inline(always)]
    pub fn receive<'t, T: RxDescriptorOps>(
        &mut self,
        slots: &mut [Packet],
        descriptors: &[T::Descriptor],
        limit: usize,
        source: impl CompletionSource<'t, T::Completion>,
        ops: &mut T,
    ) -> usize
    where
        T::Completion: 't,
    {
        let before = self.done;
        let count = slots.len().min(descriptors.len()).min(limit).min(self.limit - before);
        let line = self.handle.line(self.lengths, ops.default_offload());
        let mut next = BurstCursor {
            slot: slots.as_mut_ptr(),
            descriptor: descriptors.as_ptr(),
            free: self.handle.cache.slots().wrapping_add(self.len - before).wrapping_sub(1),
            out: self.out.wrapping_add(before),
        };
        let (end, mut excess_len) = (before + count, 0);
        'run: while self.done < end {
            if let Some(mut chunks) = source.chunks_x8(self.done - before) {
                while end - self.done >= LANES
                    && let Some(excess_lens) = ops.parse_x8(chunks())
                    && excess_lens.at_most(if T::HAS_RSS_HASH { line.range | u64::MAX << 32 } else { line.range })
                {
                    // SAFETY: `end - done` is at least eight, and `end` is within slots, descriptors, free
                    // buffers and batch.
                    unsafe { next.swap_x8(&line, excess_lens, ops) };
                    // First, so that no buffer has two owners should `advance` panic.
                    self.done += LANES;
                    (0..LANES).for_each(|_| ops.advance());
                    next.advance(LANES);
                    self.excess_lens = self.excess_lens.wrapping_add(excess_lens);
                }
            }
            let completions = if self.done < end { source.completions(self.done - before) } else { &[] };
            let mut completions = &completions[..completions.len().min(end - self.done)];
            if completions.is_empty() {
                break;
            }
            // SAFETY: `completions` has at most `end - done` entries, and `end` is within slots, descriptors,
            // free buffers and batch.
            unsafe {
                while T::UNROLL > 0
                    && let Some((first, rest)) = completions.split_at_checked(T::UNROLL)
                    && let Some(more) = self.receive_unrolled(&line, &mut next, first, ops)
                {
                    (excess_len, completions) = (excess_len + more, rest);
                }
                for completion in completions {
                    let Some(more) = self.receive_one(&line, &mut next, completion, ops) else { break 'run };
                    excess_len += more;
                }
            }
        }
        let n = self.done - before;
        self.excess_len += excess_len;
        n
    }

    /// Receives [`RxDescriptorOps::UNROLL`] packets; returns the sum of their excess lengths. `None`: no
    /// packet was received, since one has no completion yet, or is not a plain packet with the default
    /// offload result.
    ///
    /// # Safety
    /// At least `UNROLL` slots, descriptors, free buffers and free batch entries are left.
    #[inline(always)]
    unsafe fn receive_unrolled<T: RxDescriptorOps>(
        &mut self,
        line: &MetaLine,
        next: &mut BurstCursor<T::Descriptor>,
        completions: &[T::Completion],
        ops: &mut T,
    ) -> Option<u64> {
        const { assert!(T::UNROLL <= MAX_UNROLL) };
        let mut infos = [const { RxPacketInfo::of(0) }; MAX_UNROLL];
        let (mut ahead, mut excess_len) = (*ops, 0);
        for (j, info) in infos[..T::UNROLL].iter_mut().enumerate() {
            *info = ahead.parse(&completions[j])?;
            if info.excess_len > line.range || info.offload.is_some() || info.has_metadata {
                return None;
            }
            ahead.advance();
        }
        *ops = ahead;
        for (j, info) in infos[..T::UNROLL].iter().enumerate() {
            // SAFETY: `j` is below `UNROLL`, and the caller guarantees that so many entries are left; the
            // length was compared with the range.
            unsafe { next.swap(j, line, info, ops) };
            self.done += 1;
            excess_len += info.excess_len;
        }
        next.advance(T::UNROLL);
        Some(excess_len)
    }

    /// Receives one packet; returns its excess length. `None`: the completion or the length is not accepted.
    ///
    /// # Safety
    /// At least one slot, descriptor, free buffer and free batch entry is left.
    #[inline(always)]
    unsafe fn receive_one<T: RxDescriptorOps>(
        &mut self,
        line: &MetaLine,
        next: &mut BurstCursor<T::Descriptor>,
        completion: &T::Completion,
        ops: &mut T,
    ) -> Option<u64> {
        let info = ops.parse(completion)?;
        if info.excess_len > line.range {
            return None;
        }
        ops.advance();
        // SAFETY: the caller guarantees that one entry of everything is left; the length was compared with the range.
        let packet = unsafe { next.swap(0, line, &info, ops) };
        self.done += 1;
        if info.has_metadata {
            T::write_metadata(completion, packet);
        }
        next.advance(1);
        Some(info.excess_len)
    }
}

/// Makes a packet of the filled buffer in `slot` and puts the free buffer there.
///
/// # Safety
/// - `free` is a free buffer of the line's pool and has no other owner.
/// - The packet in `slot` belongs to the same pool.
/// - The length fits into a buffer.
#[inline(always)]
unsafe fn swap(slot: &mut Packet, free: *mut Meta, line: &MetaLine, info: &RxPacketInfo) -> Packet {
    // SAFETY: the line of a free buffer names its pool, one segment and no reference, so `free` may become a
    // packet; the caller guarantees that it has no other owner. The filled buffer belongs to the packet taken
    // out of `slot`; its line is written whole.
    unsafe {
        red_zones::taken(free);
        let packet = replace(slot, Packet::from_meta(NonNull::new_unchecked(free)));
        let words: *mut u64 = packet.meta.as_ptr().cast();
        words.write(line.first.wrapping_add(info.excess_len.wrapping_mul(line.len_step)));
        line.default_pair.write(words.add(1));
        words.add(3).cast::<[u64; META / 8 - 3]>().write([0; META / 8 - 3]);
        if let Some(offload) = info.offload {
            words.add(1).write(line.second | offload.0);
        }
        if let Some(hash) = info.hash {
            (*packet.meta.as_ptr()).rss_hash = hash;
        }
        packet
    }
}

impl<'a> PoolCacheHandle<'a> {
    /// Begins a burst that appends packets of these lengths to a batch.
    #[inline(always)]
    pub fn burst(self, batch: &'a mut Batch, lengths: LengthRange) -> RxBurst<'a> {
        let room = batch.space();
        let limit = self.free_buffers(room);
        let len = self.cache.len();
        // SAFETY: the number grows by `done`, that of the packets written from `out` on, when the burst is dropped.
        let (batch_len, out) = unsafe { batch.len_and_spare_slots() };
        let excess_lens = U64x8::splat(0);
        RxBurst { handle: self, batch_len, out, len, room, limit, done: 0, lengths, excess_len: 0, excess_lens }
    }

    /// Number of free buffers in the cache, at most `wanted`. Refills the cache if it has fewer.
    #[inline(always)]
    fn free_buffers(&self, wanted: usize) -> usize {
        let len = self.cache.len();
        // SAFETY: the cache belongs to this thread, since a handle is not `Send`.
        let len = if len < wanted { unsafe { self.shared.refill(self.cache) as usize } } else { len };
        len.min(wanted)
    }

    /// True if the thread's cache has `wanted` free buffers.
    pub fn has_free(&self, wanted: usize) -> bool {
        self.free_buffers(wanted) == wanted
    }

    /// Metadata line of packets of these lengths.
    #[inline(always)]
    fn line(&self, lengths: LengthRange, default: OffloadResult) -> MetaLine {
        let ([second, third], len_step) = (self.line, self.len_step);
        let first = (DATA_START as u64).wrapping_add(u64::from(lengths.shortest).wrapping_mul(len_step));
        let (range, default_second) = (lengths.range.into(), second | default.0);
        let default_pair = U64x2::new(default_second, third);
        MetaLine { range, first, len_step, second, default_second, third, default_pair }
    }

    /// Swaps the filled buffer in `slot` for a free one; returns it as a packet of `bytes` bytes. `None`, and
    /// no change, if no buffer is free or `bytes` exceeds what a buffer holds.
    pub fn swap(&self, slot: &mut Packet, bytes: u32) -> Option<Packet> {
        let lengths = LengthRange::new(0, u32::MAX);
        if bytes > lengths.range || self.free_buffers(1) == 0 {
            return None;
        }
        let last = self.cache.len() - 1;
        self.cache.set_len(last);
        let info = RxPacketInfo::of(bytes.into());
        let line = self.line(lengths, OffloadResult::NOTHING);
        // SAFETY: the cache slot `last` held a free buffer of this pool and is outside of the cache now. The
        // creator of the handle guarantees that the packet in `slot` belongs to the pool.
        Some(unsafe { swap(slot, self.cache.slot(last).get(), &line, &info) })
    }
}

// [`U64x8::to_length_fields`] relies on these positions.
const _: () = assert!(DATA_LEN_SHIFT == 16 && PACKET_LEN_SHIFT == 32);
const DATA_LEN_SHIFT: u32 = shift(std::mem::offset_of!(Meta, data_len), 0);
const PACKET_LEN_SHIFT: u32 = shift(std::mem::offset_of!(Meta, packet_len), 0);
// [`RxDescriptorOps::HAS_RSS_HASH`] relies on this position.
const _: () = assert!(shift(std::mem::offset_of!(Meta, rss_hash), 2) == 32);
const CHECKSUM_STATUS_SHIFT: u32 = shift(std::mem::offset_of!(Meta, checksum_status), 1);
const FLAGS_SHIFT: u32 = shift(std::mem::offset_of!(Meta, flags), 1);
// In the line of an empty packet, the fields that a burst fills in are zero, and so are all words behind the third.
const _: () = {
    let line = MetaTemplate::new(0).line();
    let mut at = 3;
    while at < line.len() {
        assert!(line[at] == 0);
        at += 1;
    }
    assert!(line[0] == DATA_START as u64);
    assert!((line[1] >> CHECKSUM_STATUS_SHIFT) & 0xff == 0 && line[1] >> FLAGS_SHIFT == 0);
    assert!(line[2] >> shift(std::mem::offset_of!(Meta, rss_hash), 2) == 0);
};
