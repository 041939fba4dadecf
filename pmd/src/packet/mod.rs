// UNSAFETY: a packet is a pointer to the metadata line of a buffer that it owns.
#![allow(unsafe_code)]

//! Packets, the pools their buffers come from, and batches of them.
//!
//! A [`Packet`] is owned by exactly one place and one machine word wide. Its buffer is laid out as
//!
//! ```text
//! | metadata 64 | headroom 256        | data 2048                              |   stride 2368
//!                        ^ data_off ... data_off + data_len ^
//! ```
//!
//! Encapsulation moves the data's start into the headroom, decapsulation moves it forward; payload is never copied. A packet longer
//! than one buffer is a chain of segments. A payload that several packets share is [`Frozen`].

mod batch;
mod eight;
pub(crate) mod front;
mod frozen;
mod hand;
mod held;
mod meta;
pub mod offload;
mod pool;
mod stack;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;

use wirepath_memory::Region;

pub use batch::{BATCH, Batch};
pub(crate) use eight::{EIGHT, Eight};
pub use frozen::Frozen;
pub(crate) use hand::{Burst, Hand, Lengths, Noted, Received, Tellings, Told};
pub use held::Held;
pub use meta::{DATA_ROOM, HEADROOM, L3, L4, Layers, STRIDE};
use meta::{END, FIRST, Meta, NO_SEGMENT};
use offload::{Flags, Verdicts};
pub use pool::{Arena, Blank, LentBuffers, MAX_BUFFERS, MAX_POOLS, Pool, PoolError};

/// Bytes of the metadata line at the start of every buffer; data never starts before it.
pub const METADATA: usize = meta::META;

/// Longest packet that the framework carries, over all segments: a 9216-byte frame with its tags fits many times; what the kernel
/// hands over unsegmented (64 KiB and headers) fits too.
pub const MAX_PACKET: usize = 1 << 18;

/// Identity of a buffer that can cross a process: pool id and index, never a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    /// Id of the pool.
    pub pool: u8,
    /// Index of the buffer in its pool, below 2²⁴.
    pub index: u32,
}

impl Handle {
    const fn pack(self) -> u32 {
        (self.pool as u32) << 24 | self.index
    }

    const fn unpack(handle: u32) -> Self {
        Self { pool: (handle >> 24) as u8, index: handle & 0xff_ffff }
    }
}

/// An owned packet. Dropping it gives its buffers back to the thread's cache of their pool.
#[repr(transparent)]
pub struct Packet {
    meta: NonNull<Meta>,
}

// SAFETY: the packet owns its segments; frozen ones behind it are read-only and counted atomically.
unsafe impl Send for Packet {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Packet {}

impl Packet {
    /// # Safety
    /// `meta` is the metadata of a buffer that nobody else owns.
    #[inline(always)]
    unsafe fn from_meta(meta: NonNull<Meta>) -> Self {
        Self { meta }
    }

    #[inline(always)]
    fn into_meta(self) -> NonNull<Meta> {
        std::mem::ManuallyDrop::new(self).meta
    }

    #[inline(always)]
    fn meta(&self) -> &Meta {
        // SAFETY: the packet's own.
        unsafe { self.meta.as_ref() }
    }

    #[inline(always)]
    fn meta_mut(&mut self) -> &mut Meta {
        // SAFETY: the packet's own.
        unsafe { self.meta.as_mut() }
    }

    #[inline(always)]
    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!((FIRST..=END).contains(&offset));
        // SAFETY: callers pass offsets inside the buffer.
        unsafe { self.meta.as_ptr().cast::<u8>().add(offset) }
    }

    /// Data of the first segment.
    #[inline(always)]
    pub fn data(&self) -> &[u8] {
        let meta = self.meta();
        // SAFETY: `data_off + data_len <= END` always holds, and buffers are initialised memory (fresh mappings are zeroed).
        unsafe { std::slice::from_raw_parts(self.at(meta.data_off.into()), meta.data_len.into()) }
    }

    /// Data of the first segment, to change it. The first segment is never shared.
    #[inline(always)]
    pub fn data_mut(&mut self) -> &mut [u8] {
        let meta = self.meta();
        // SAFETY: as in `data`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at(meta.data_off.into()), meta.data_len.into()) }
    }

    /// Bytes of the packet over all its segments.
    #[allow(clippy::len_without_is_empty)]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.meta().packet_len as usize
    }

    /// Address of the first byte behind the full headroom, without a look at the metadata.
    #[inline(always)]
    pub(crate) fn fresh_address(&self) -> u64 {
        self.at(meta::FRESH) as u64
    }

    /// Whether the packet has more than one segment.
    #[inline(always)]
    pub fn is_chain(&self) -> bool {
        self.meta().next != NO_SEGMENT
    }

    /// Free bytes in front of the data.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        usize::from(self.meta().data_off) - FIRST
    }

    /// Free bytes behind the first segment's data.
    #[inline(always)]
    pub fn tailroom(&self) -> usize {
        let meta = self.meta();
        END - usize::from(meta.data_off) - usize::from(meta.data_len)
    }

    /// Extends the data by `N` bytes at the front and returns them (their content is whatever lay there); `None`, and no change, if
    /// the headroom is too small.
    #[inline(always)]
    pub fn prepend<const N: usize>(&mut self) -> Option<&mut [u8; N]> {
        let bytes = self.prepend_slice(N)?;
        bytes.first_chunk_mut()
    }

    /// [`Self::prepend`] for a length known at run time only.
    #[inline(always)]
    pub fn prepend_slice(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.headroom() {
            return None;
        }
        let meta = self.meta_mut();
        meta.data_off -= n as u16;
        meta.data_len += n as u16;
        meta.packet_len += n as u32;
        Some(&mut self.data_mut()[..n])
    }

    /// Takes `n` bytes off the front of the first segment; `false`, and no change, if it is shorter.
    #[inline(always)]
    #[must_use]
    pub fn trim_front(&mut self, n: usize) -> bool {
        let meta = self.meta_mut();
        if n > usize::from(meta.data_len) {
            return false;
        }
        meta.data_off += n as u16;
        meta.data_len -= n as u16;
        meta.packet_len -= n as u32;
        true
    }

    /// Extends the first segment by `n` bytes at its end and returns them (content undefined, but initialised); `None`, and no change,
    /// if there is no room or the packet is a chain.
    #[inline(always)]
    pub fn append(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.tailroom() || self.is_chain() {
            return None;
        }
        let meta = self.meta_mut();
        let old = usize::from(meta.data_len);
        meta.data_len += n as u16;
        meta.packet_len += n as u32;
        Some(&mut self.data_mut()[old..])
    }

    /// Cuts the packet to its first `len` bytes; no change if it is shorter, or if the cut would fall into a shared segment (then
    /// `false`).
    pub fn truncate(&mut self, len: usize) -> bool {
        if len >= self.len() {
            return true;
        }
        let mut left = len;
        let mut at = self.meta;
        let mut private = true;
        loop {
            // SAFETY: the chain's segments are alive; only private ones are changed.
            unsafe {
                // Only the first of several shared segments counts references; what hangs on it is shared with it.
                private &= !frozen::is_shared(at);
                let here = usize::from((*at.as_ptr()).data_len);
                let next = (*at.as_ptr()).next;
                if left > here || (left == here && next != NO_SEGMENT && left > 0 && !private) {
                    left -= here;
                    at = pool::resolve(next);
                    continue;
                }
                if !private {
                    return false;
                }
                (*at.as_ptr()).data_len = left as u16;
                (*at.as_ptr()).next = NO_SEGMENT;
                if next != NO_SEGMENT {
                    pool::release(pool::resolve(next));
                }
            }
            self.meta_mut().packet_len = len as u32;
            return true;
        }
    }

    /// Sets the data to `len` bytes behind `headroom` bytes of headroom: for receive queues, whose device wrote there. `false`, and no
    /// change, if that is not inside the buffer or the packet is a chain.
    #[inline(always)]
    #[must_use]
    pub fn set_data(&mut self, headroom: usize, len: usize) -> bool {
        if headroom > END - FIRST || len > END - FIRST - headroom || self.is_chain() {
            return false;
        }
        let meta = self.meta_mut();
        meta.data_off = (FIRST + headroom) as u16;
        meta.data_len = len as u16;
        meta.packet_len = len as u32;
        true
    }

    /// Appends a copy of `bytes` to the packet, in further segments from `pool` where the last one has no room. `false`, with what
    /// fitted appended, if the pool ran dry or the packet would exceed [`MAX_PACKET`] or ends in a shared segment.
    pub fn extend_from_slice(&mut self, bytes: &[u8], pool: &Pool) -> bool {
        if self.len() + bytes.len() > MAX_PACKET {
            return false;
        }
        let mut bytes = bytes;
        if !self.is_chain() {
            let n = bytes.len().min(self.tailroom());
            let (now, later) = bytes.split_at(n);
            self.append(n).expect("tailroom was looked at").copy_from_slice(now);
            bytes = later;
        }
        while !bytes.is_empty() {
            let Some(mut segment) = pool.take() else { return false };
            let n = bytes.len().min(segment.tailroom());
            let (now, later) = bytes.split_at(n);
            segment.append(n).expect("tailroom was looked at").copy_from_slice(now);
            if self.append_segment(segment).is_err() {
                return false;
            }
            bytes = later;
        }
        true
    }

    /// Puts `segment` (itself possibly a chain) behind the packet's last segment; gives it back if that one is shared or the whole
    /// would exceed [`MAX_PACKET`].
    pub fn append_segment(&mut self, segment: Self) -> Result<(), Self> {
        let mut at = self.meta;
        // SAFETY: the chain's segments are alive.
        unsafe {
            loop {
                if frozen::is_shared(at) {
                    return Err(segment);
                }
                match (*at.as_ptr()).next {
                    NO_SEGMENT => break,
                    next => at = pool::resolve(next),
                }
            }
            let len = self.len() + segment.len();
            if len > MAX_PACKET {
                return Err(segment);
            }
            (*at.as_ptr()).next = pool::handle_of(segment.into_meta()).pack();
            self.meta_mut().packet_len = len as u32;
        }
        Ok(())
    }

    fn set_next(&mut self, next: Handle, packet_len: u32) {
        let meta = self.meta_mut();
        meta.next = next.pack();
        meta.packet_len = packet_len;
    }

    /// The data of all segments in order.
    #[inline]
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: the chain lives as long as the borrow.
        unsafe { segments_from(Some(self.meta)) }
    }

    /// Number of segments.
    pub fn segment_count(&self) -> usize {
        self.segments().count()
    }

    /// Copies the first bytes of the packet into `to`; returns how many.
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let mut done = 0;
        for segment in self.segments() {
            let n = segment.len().min(to.len() - done);
            to[done..done + n].copy_from_slice(&segment[..n]);
            done += n;
            if done == to.len() {
                break;
            }
        }
        done
    }

    /// Makes the first `n` bytes contiguous and writable, so that headers that lie in several segments or in a shared one can be
    /// worked on. `false`, and no change, if the packet is shorter or the first buffer has no room.
    pub fn pull_up(&mut self, n: usize) -> bool {
        let here = self.data().len();
        if n <= here {
            return true;
        }
        if n > self.len() || n - here > self.tailroom() {
            return false;
        }
        // The bytes move to the first segment; private segments behind it give them up, shared ones cannot: they are replaced by
        // nothing only if they are taken whole. Otherwise the packet stays as it is.
        // SAFETY: the chain's segments are alive; only private ones are changed.
        unsafe {
            let (mut want, mut at) = (n - here, (*self.meta.as_ptr()).next);
            while want > 0 {
                let segment = pool::resolve(at);
                let len = usize::from((*segment.as_ptr()).data_len);
                if frozen::is_shared(segment) {
                    return false;
                }
                if len >= want {
                    break;
                }
                want -= len;
                at = (*segment.as_ptr()).next;
            }
            while self.data().len() < n {
                let want = n - self.data().len();
                let segment = pool::resolve((*self.meta.as_ptr()).next);
                let meta = &mut *segment.as_ptr();
                let take = want.min(meta.data_len.into());
                let from = segment.as_ptr().cast::<u8>().add(meta.data_off.into());
                let end = usize::from(self.meta().data_off) + self.data().len();
                std::ptr::copy_nonoverlapping(from, self.at(end), take);
                self.meta_mut().data_len += take as u16;
                meta.data_off += take as u16;
                meta.data_len -= take as u16;
                if meta.data_len == 0 {
                    self.meta_mut().next = meta.next;
                    meta.next = NO_SEGMENT;
                    pool::release(segment);
                }
            }
        }
        true
    }

    /// A copy of the packet with its metadata in buffers of `pool`, or `None` if the pool ran dry.
    pub fn duplicate(&self, pool: &Pool) -> Option<Self> {
        let mut copy = pool.take()?;
        for segment in self.segments() {
            if !copy.extend_from_slice(segment, pool) {
                return None;
            }
        }
        copy.copy_metadata(self);
        Some(copy)
    }

    /// Takes over all metadata of `from` that describes the frame; not its length and place.
    pub fn copy_metadata(&mut self, from: &Self) {
        let meta = self.meta_mut();
        *meta = Meta {
            data_off: meta.data_off,
            data_len: meta.data_len,
            packet_len: meta.packet_len,
            next: meta.next,
            pool: meta.pool,
            references: AtomicU16::new(0),
            ..*from.meta()
        };
    }

    /// Identity of the first segment.
    pub fn handle(&self) -> Handle {
        // SAFETY: alive.
        unsafe { pool::handle_of(self.meta) }
    }

    /// Region that holds the first segment's buffer, and the offset there of the buffer's first byte (the metadata line).
    pub fn place(&self) -> (&Arc<Region>, usize) {
        // SAFETY: alive as long as the borrow.
        unsafe { pool::region_of(self.meta) }
    }

    /// Region and offset of the first data byte, and the length, of every segment: what a driver hands to its device.
    pub fn segment_places(&self) -> impl Iterator<Item = SegmentPlace<'_>> {
        let mut at = Some(self.meta);
        std::iter::from_fn(move || {
            let meta = at?;
            // SAFETY: the chain lives as long as the borrow.
            unsafe {
                let (region, buffer) = pool::region_of(meta);
                let it = &*meta.as_ptr();
                at = (it.next != NO_SEGMENT).then(|| pool::resolve(it.next));
                Some(SegmentPlace { region, offset: buffer + usize::from(it.data_off), len: it.data_len.into() })
            }
        })
    }

    /// Gives the packet to a device or another process, as an address: the metadata line of the buffer. It is out of reach of the
    /// program until [`Self::from_raw`].
    pub fn into_raw(self) -> NonNull<u8> {
        self.into_meta().cast()
    }

    /// Takes the packet back.
    ///
    /// # Safety
    /// The address came from [`Self::into_raw`] and has not been taken back since; no device writes the buffer any more.
    pub unsafe fn from_raw(raw: NonNull<u8>) -> Self {
        Self { meta: raw.cast() }
    }
}

/// Where a segment lies, for a device.
#[derive(Clone, Copy, Debug)]
pub struct SegmentPlace<'a> {
    /// Registered region.
    pub region: &'a Arc<Region>,
    /// Offset of the first data byte in the region.
    pub offset: usize,
    /// Bytes of data.
    pub len: usize,
}

/// Metadata of the frame.
impl Packet {
    /// Port that the packet came in by: an index that the application gave (see [`crate::port::PortId`]).
    #[inline(always)]
    pub fn in_port(&self) -> u16 {
        self.meta().in_port
    }

    /// Notes the receiving port.
    #[inline(always)]
    pub fn set_in_port(&mut self, port: u16) {
        self.meta_mut().in_port = port;
    }

    /// Port that the packet shall leave by; [`crate::port::NO_PORT`] in a fresh packet.
    #[inline(always)]
    pub fn out_port(&self) -> u16 {
        self.meta().out_port
    }

    /// Decides the port that the packet shall leave by.
    #[inline(always)]
    pub fn set_out_port(&mut self, port: u16) {
        self.meta_mut().out_port = port;
    }

    /// RSS hash of the device, if it gave one.
    #[inline(always)]
    pub fn rss_hash(&self) -> Option<u32> {
        self.meta().flags.contains(Flags::RSS_HASH).then(|| self.meta().rss_hash)
    }

    /// Notes the device's RSS hash.
    #[inline(always)]
    pub fn set_rss_hash(&mut self, hash: u32) {
        let meta = self.meta_mut();
        meta.rss_hash = hash;
        meta.flags = meta.flags.with(Flags::RSS_HASH);
    }

    /// Mark that a flow rule of the device put on the packet (24 bits).
    #[inline(always)]
    pub fn mark(&self) -> Option<u32> {
        self.meta().flags.contains(Flags::MARK).then(|| self.meta().mark)
    }

    /// Puts a mark on the packet.
    #[inline(always)]
    pub fn set_mark(&mut self, mark: u32) {
        let meta = self.meta_mut();
        meta.mark = mark;
        meta.flags = meta.flags.with(Flags::MARK);
    }

    /// VLAN tag control information that the device stripped (receive) or shall insert (transmit).
    #[inline(always)]
    pub fn vlan(&self) -> Option<u16> {
        self.meta().flags.contains(Flags::VLAN).then(|| self.meta().vlan_tci)
    }

    /// Notes a stripped tag, or orders one to be inserted.
    #[inline(always)]
    pub fn set_vlan(&mut self, tci: u16) {
        let meta = self.meta_mut();
        meta.vlan_tci = tci;
        meta.flags = meta.flags.with(Flags::VLAN);
    }

    /// Forgets the tag beside the frame.
    #[inline(always)]
    pub fn clear_vlan(&mut self) {
        let meta = self.meta_mut();
        meta.flags = meta.flags.without(Flags::VLAN).without(Flags::VLAN_SERVICE);
    }

    /// What the device said of the checksums.
    #[inline(always)]
    pub fn verdicts(&self) -> Verdicts {
        self.meta().verdicts
    }

    /// Notes what is known of the checksums.
    #[inline(always)]
    pub fn set_verdicts(&mut self, verdicts: Verdicts) {
        self.meta_mut().verdicts = verdicts;
    }

    /// Which metadata is valid and what the transmitting device is asked to do.
    #[inline(always)]
    pub fn flags(&self) -> Flags {
        self.meta().flags
    }

    /// Replaces the flags.
    #[inline(always)]
    pub fn set_flags(&mut self, flags: Flags) {
        self.meta_mut().flags = flags;
    }

    /// Maximum segment size in bytes for [`Flags::TX_SEGMENT`].
    #[inline(always)]
    pub fn mss(&self) -> u16 {
        self.meta().mss
    }

    /// Sets the maximum segment size.
    #[inline(always)]
    pub fn set_mss(&mut self, mss: u16) {
        self.meta_mut().mss = mss;
    }

    /// Where the headers are.
    #[inline(always)]
    pub fn layers(&self) -> Layers {
        self.meta().layers
    }

    /// Notes where the headers are.
    #[inline(always)]
    pub fn set_layers(&mut self, layers: Layers) {
        self.meta_mut().layers = layers;
    }

    /// Arrival time in nanoseconds, of the clock that the port's capabilities name.
    #[inline(always)]
    pub fn timestamp(&self) -> Option<u64> {
        self.meta().flags.contains(Flags::TIMESTAMP).then(|| self.meta().timestamp)
    }

    /// Notes the arrival time.
    #[inline(always)]
    pub fn set_timestamp(&mut self, nanoseconds: u64) {
        let meta = self.meta_mut();
        meta.timestamp = nanoseconds;
        meta.flags = meta.flags.with(Flags::TIMESTAMP);
    }

    /// Sixteen bytes for the application; zero in a fresh packet, carried from stage to stage.
    #[inline(always)]
    pub fn app(&self) -> [u64; 2] {
        self.meta().app
    }

    /// Sets the application's bytes.
    #[inline(always)]
    pub fn set_app(&mut self, app: [u64; 2]) {
        self.meta_mut().app = app;
    }

    /// Asks the processor to fetch the packet's metadata line.
    #[inline(always)]
    pub fn prefetch_metadata(&self) {
        prefetch(self.meta.as_ptr().cast());
    }

    /// Asks the processor to fetch the line where the data of a fresh packet starts.
    #[inline(always)]
    pub fn prefetch_data(&self) {
        prefetch(self.at(meta::FRESH));
    }
}

/// Asks the processor to fetch a cache line for reading.
#[inline(always)]
pub(crate) fn prefetch(_address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not access memory in the sense of the language and cannot fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_address.cast());
    }
}

/// # Safety
/// The segments live as long as `'a`, and their data does not change meanwhile.
unsafe fn segments_from<'a>(first: Option<NonNull<Meta>>) -> impl Iterator<Item = &'a [u8]> {
    let mut at = first;
    std::iter::from_fn(move || {
        let meta = at?;
        // SAFETY: as promised; the data lies in the buffer.
        unsafe {
            let it = &*meta.as_ptr();
            at = (it.next != NO_SEGMENT).then(|| pool::resolve(it.next));
            let start = meta.as_ptr().cast::<u8>().add(it.data_off.into());
            Some(std::slice::from_raw_parts(start, it.data_len.into()))
        }
    })
}

impl Drop for Packet {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the packet is the owner and ends here.
        unsafe { pool::release(self.meta) };
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handle = self.handle();
        f.debug_struct("Packet")
            .field("pool", &handle.pool)
            .field("index", &handle.index)
            .field("len", &self.len())
            .field("segments", &self.segment_count())
            .finish_non_exhaustive()
    }
}
