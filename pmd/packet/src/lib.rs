// UNSAFETY: a packet is a pointer to the metadata line of a buffer that it owns.
#![allow(unsafe_code)]

//! Packets, packet pools, batches, drop reasons and counters.
//!
//! A [`Packet`] is one machine word that owns a buffer. The layout of a buffer is
//!
//! ```text
//! | metadata 64 | headroom 256        | data 2048                              |   stride 2368
//!                        ^ data_off ... data_off + data_len ^
//! ```
//!
//! Encapsulation moves the start of the data into the headroom, decapsulation moves it forward. Payload is
//! never copied. A packet that is longer than a buffer is a chain of segments. Several packets can share a
//! payload as a [`SharedSegment`].

mod batch;
pub mod counters;
pub mod drops;
pub mod fragment;
pub mod gro;
mod headers;
mod meta;
pub mod offload;
mod pool;
mod port_id;
pub mod reassembly;
mod red_zones;
pub mod registered;
mod rx_burst;
mod shared_segment;
mod simd;
mod stack;
pub mod superframe;
#[cfg(test)]
mod tests;
mod tx_burst;
mod tx_ring;

use std::fmt;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;

use wirepath_memory::Region;

pub use batch::{BATCH, Batch};
pub use meta::{BUFFER_BYTES, DATA_ROOM, HEADROOM, HeaderLengths, PtypeL3, PtypeL4, STRIDE};
use meta::{BUFFER_END, BUFFER_START, Meta, NO_SEGMENT, shift};
use offload::{ChecksumStatus, Flags};
pub use pool::{Arena, LeasedBuffers, MAX_BUFFERS, MAX_POOLS, MetaTemplate, Pool, PoolError};
pub use port_id::PortId;
pub use shared_segment::SharedSegment;

/// Building blocks of drivers: receive bursts, transmit bursts, and packets in flight.
pub mod driver {
    pub use crate::prefetch;
    pub use crate::rx_burst::{
        CompletionSource, LengthRange, OffloadResult, PoolCacheHandle, RxBurst, RxDescriptorOps, RxPacketInfo,
    };
    pub use crate::simd::{LANES, U64x8};
    pub use crate::tx_burst::{FastPathFilter, TxBurst};
    pub use crate::tx_ring::InFlight;
}

/// Bytes of the metadata line at the start of every buffer; data never starts before its end.
pub const METADATA: usize = meta::META;

/// Longest packet in bytes, over all segments.
///
/// A jumbo frame of 9216 bytes with VLAN tags fits many times, and a GSO packet of the kernel (64 KiB and
/// headers) fits too.
pub const MAX_PACKET: usize = 1 << 18;

/// Identity of a buffer, valid in other processes too: pool id and index instead of a pointer.
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

/// Packet that owns its buffers. Dropping it returns them to the thread's cache of their pool.
#[repr(transparent)]
pub struct Packet {
    meta: NonNull<Meta>,
}

// SAFETY: the packet owns its private segments. Shared segments behind them are read-only, with an atomic
// reference count.
unsafe impl Send for Packet {}
// SAFETY: methods that take `&self` only read.
unsafe impl Sync for Packet {}

/// Adds `n` to the offset of the data or subtracts it, and does the opposite with both lengths. No field may leave its
/// range. One access to the word of the three fields costs less than three accesses to memory.
#[inline(always)]
fn move_front(meta: &mut Meta, n: usize, change: impl Fn(u64, u64) -> u64) {
    const ONE: u64 = (1u64 << shift(offset_of!(Meta, data_off), 0))
        .wrapping_sub(1 << shift(offset_of!(Meta, data_len), 0))
        .wrapping_sub(1 << shift(offset_of!(Meta, packet_len), 0));
    let word = std::ptr::from_mut(meta).cast::<u64>();
    // SAFETY: the metadata line is aligned to 64 bytes, and the word of the three integers is its start. All values of
    // integers are valid. The borrow of the line is exclusive.
    unsafe { *word = change(*word, ONE.wrapping_mul(n as u64)) };
}

/// Removes `n` bytes from the front of a segment. Returns false, and changes nothing, if it is shorter.
#[inline(always)]
fn trim_front(meta: &mut Meta, n: usize) -> bool {
    let is_long = n <= usize::from(meta.data_len);
    if is_long {
        move_front(meta, n, u64::wrapping_add);
    }
    is_long
}

impl Packet {
    /// Makes a packet of a buffer.
    ///
    /// # Safety
    /// `meta` is the metadata line of a buffer that has no other owner.
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
        // SAFETY: the packet owns its first segment, so the metadata line is alive and initialised.
        unsafe { self.meta.as_ref() }
    }

    #[inline(always)]
    fn meta_mut(&mut self) -> &mut Meta {
        // SAFETY: the packet owns its first segment, and the borrow of the packet is exclusive.
        unsafe { self.meta.as_mut() }
    }

    #[inline(always)]
    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!((BUFFER_START..=BUFFER_END).contains(&offset));
        // SAFETY: callers pass offsets of at most `BUFFER_END`, so the address lies inside the buffer or at
        // its end.
        unsafe { self.meta.as_ptr().cast::<u8>().add(offset) }
    }

    /// Data of the first segment.
    #[inline(always)]
    pub fn data(&self) -> &[u8] {
        let meta = self.meta();
        // SAFETY: the range lies inside the buffer, since `data_off + data_len <= BUFFER_END` always holds.
        // Buffers are initialised memory, since new mappings are zeroed.
        unsafe { std::slice::from_raw_parts(self.at(meta.data_off.into()), meta.data_len.into()) }
    }

    /// Data of the first segment, with mutable access. The first segment is never shared.
    #[inline(always)]
    pub fn data_mut(&mut self) -> &mut [u8] {
        let meta = self.meta();
        // SAFETY: the range lies inside the buffer, which is initialised memory. The packet owns the segment,
        // and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at(meta.data_off.into()), meta.data_len.into()) }
    }

    /// Bytes of the packet over all its segments.
    #[allow(clippy::len_without_is_empty)]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.meta().packet_len as usize
    }

    /// Address of the byte behind the full headroom. The metadata is not read.
    #[inline(always)]
    pub fn default_data_address(&self) -> u64 {
        self.at(meta::DATA_START) as u64
    }

    /// True if the packet has more than one segment.
    #[inline(always)]
    pub fn is_chain(&self) -> bool {
        self.meta().next != NO_SEGMENT
    }

    /// Free bytes in front of the data.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        usize::from(self.meta().data_off) - BUFFER_START
    }

    /// Free bytes behind the data of the first segment.
    #[inline(always)]
    pub fn tailroom(&self) -> usize {
        let meta = self.meta();
        BUFFER_END - usize::from(meta.data_off) - usize::from(meta.data_len)
    }

    /// Extends the data by `N` bytes at the front and returns them; their content is arbitrary.
    ///
    /// Returns `None`, and changes nothing, if the headroom is too small.
    #[inline(always)]
    pub fn prepend<const N: usize>(&mut self) -> Option<&mut [u8; N]> {
        let bytes = self.prepend_slice(N)?;
        bytes.first_chunk_mut()
    }

    /// Does the same as [`Self::prepend`] for a length known at run time only.
    #[inline(always)]
    pub fn prepend_slice(&mut self, n: usize) -> Option<&mut [u8]> {
        if n > self.headroom() {
            return None;
        }
        move_front(self.meta_mut(), n, u64::wrapping_sub);
        Some(&mut self.data_mut()[..n])
    }

    /// Removes `n` bytes from the front of the first segment. Returns false, and changes nothing, if it is
    /// shorter.
    #[inline(always)]
    #[must_use]
    pub fn trim_front(&mut self, n: usize) -> bool {
        trim_front(self.meta_mut(), n)
    }

    /// Does the same as [`Self::trim_front`], and gives the rest an output port. Its checksum status is unknown. One
    /// call reads the packet's address once.
    #[inline(always)]
    #[must_use]
    pub fn trim_front_for(&mut self, n: usize, port: PortId) -> bool {
        let meta = self.meta_mut();
        let is_long = trim_front(meta, n);
        if is_long {
            meta.redirect(port);
        }
        is_long
    }

    /// Does the same as [`Self::prepend`], and gives the packet an output port. Its checksum status is unknown.
    #[inline(always)]
    pub fn prepend_for<const N: usize>(&mut self, port: PortId) -> Option<&mut [u8; N]> {
        if N > self.headroom() {
            return None;
        }
        self.meta_mut().redirect(port);
        self.prepend::<N>()
    }

    /// Extends the first segment by `n` bytes at its end and returns them; their content is arbitrary.
    ///
    /// Returns `None`, and changes nothing, if there is no room or the packet is a chain.
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

    /// Truncates the packet to `len` bytes. A shorter packet stays as it is.
    ///
    /// Returns false, and changes nothing, if the new end would lie in a shared segment.
    pub fn truncate(&mut self, len: usize) -> bool {
        if len >= self.len() {
            return true;
        }
        let mut left = len;
        let mut at = self.meta;
        let mut private = true;
        loop {
            // SAFETY: the packet keeps all segments of its chain alive, and only private ones are changed.
            unsafe {
                // Of consecutive shared segments, only the first counts references. The others are shared
                // with it.
                private &= !shared_segment::is_shared(at);
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

    /// Sets the data to `len` bytes behind `headroom` bytes of headroom, for receive queues whose device
    /// wrote there.
    ///
    /// Returns false, and changes nothing, if the range is not inside the buffer or the packet is a chain.
    #[inline(always)]
    #[must_use]
    pub fn set_data(&mut self, headroom: usize, len: usize) -> bool {
        if headroom > BUFFER_END - BUFFER_START || len > BUFFER_END - BUFFER_START - headroom || self.is_chain() {
            return false;
        }
        let meta = self.meta_mut();
        meta.data_off = (BUFFER_START + headroom) as u16;
        meta.data_len = len as u16;
        meta.packet_len = len as u32;
        true
    }

    /// Appends a copy of `bytes` to the packet. Further segments come from `pool` where the last one has no
    /// room.
    ///
    /// Returns false if the pool is exhausted, the packet would exceed [`MAX_PACKET`], or it ends in a shared
    /// segment. Bytes appended until then stay.
    pub fn extend_from_slice(&mut self, bytes: &[u8], pool: &Pool) -> bool {
        if self.len() + bytes.len() > MAX_PACKET {
            return false;
        }
        let mut bytes = bytes;
        if !self.is_chain() {
            let n = bytes.len().min(self.tailroom());
            let (now, later) = bytes.split_at(n);
            self.append(n).expect("the tailroom was checked").copy_from_slice(now);
            bytes = later;
        }
        while !bytes.is_empty() {
            let Some(mut segment) = pool.take() else { return false };
            let n = bytes.len().min(segment.tailroom());
            let (now, later) = bytes.split_at(n);
            segment.append(n).expect("the tailroom was checked").copy_from_slice(now);
            if self.append_segment(segment).is_err() {
                return false;
            }
            bytes = later;
        }
        true
    }

    /// Appends `segment`, which may be a chain, to the packet.
    ///
    /// Returns it in `Err` if the last segment is shared or the result would exceed [`MAX_PACKET`].
    pub fn append_segment(&mut self, segment: Self) -> Result<(), Self> {
        let mut at = self.meta;
        // SAFETY: the packet keeps all segments of its chain alive, and only a private one is changed.
        unsafe {
            loop {
                if shared_segment::is_shared(at) {
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

    /// Iterates over the data of all segments in order.
    #[inline]
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: the packet is borrowed, so its segments are alive and do not change.
        unsafe { segments_from(Some(self.meta)) }
    }

    /// Number of segments.
    pub fn segment_count(&self) -> usize {
        self.segments().count()
    }

    /// Copies the first bytes of the packet into `to`; returns their number.
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

    /// Makes the first `n` bytes contiguous and writable, for headers that lie in several segments.
    ///
    /// Returns false, and changes nothing, if the packet is shorter, the first buffer has no room, or the
    /// bytes lie in a shared segment.
    pub fn pull_up(&mut self, n: usize) -> bool {
        let here = self.data().len();
        if n <= here {
            return true;
        }
        if n > self.len() || n - here > self.tailroom() {
            return false;
        }
        // The bytes are moved from the private segments behind the first one; a shared segment cannot give
        // bytes up.
        //
        // SAFETY: the packet keeps all segments of its chain alive, and only private ones are changed. The
        // tailroom was compared above, so the copied bytes fit.
        unsafe {
            let (mut want, mut at) = (n - here, (*self.meta.as_ptr()).next);
            while want > 0 {
                let segment = pool::resolve(at);
                let len = usize::from((*segment.as_ptr()).data_len);
                if shared_segment::is_shared(segment) {
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

    /// Copies the packet with its metadata into buffers of `pool`; `None` if the pool is exhausted.
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

    /// Copies all metadata that describes the frame from another packet. Length and position of the data
    /// stay.
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

    /// Handle of the first segment.
    pub fn handle(&self) -> Handle {
        // SAFETY: the packet owns its first segment, so it is alive.
        unsafe { pool::handle_of(self.meta) }
    }

    /// Region of the first segment's buffer, and offset of the buffer (its metadata line) in that region.
    pub fn buffer_location(&self) -> (&Arc<Region>, usize) {
        // SAFETY: the packet is borrowed, so its first segment is alive as long as the result.
        unsafe { pool::region_of(self.meta) }
    }

    /// Region, offset and length of the data of every segment, for the scatter-gather list of a device.
    pub fn dma_segments(&self) -> impl Iterator<Item = DmaSegment<'_>> {
        let mut at = Some(self.meta);
        std::iter::from_fn(move || {
            let meta = at?;
            // SAFETY: the packet is borrowed, so its segments are alive and do not change.
            unsafe {
                let (region, buffer) = pool::region_of(meta);
                let it = &*meta.as_ptr();
                at = (it.next != NO_SEGMENT).then(|| pool::resolve(it.next));
                Some(DmaSegment { region, offset: buffer + usize::from(it.data_off), len: it.data_len.into() })
            }
        })
    }

    /// Converts the packet into the address of its metadata line, to pass it to a device or another process.
    ///
    /// The program cannot access the packet until [`Self::from_raw`].
    pub fn into_raw(self) -> NonNull<u8> {
        self.into_meta().cast()
    }

    /// Converts an address back into the packet.
    ///
    /// # Safety
    /// The address came from [`Self::into_raw`] and was not converted back since. No device writes to the
    /// buffer any more.
    pub unsafe fn from_raw(raw: NonNull<u8>) -> Self {
        Self { meta: raw.cast() }
    }
}

/// Data of one segment in DMA memory.
#[derive(Clone, Copy, Debug)]
pub struct DmaSegment<'a> {
    /// Region of the buffer, which ports register.
    pub region: &'a Arc<Region>,
    /// Offset of the first data byte in the region.
    pub offset: usize,
    /// Bytes of data.
    pub len: usize,
}

/// Metadata of the frame.
impl Packet {
    /// Port that received the packet; `None` in a packet that the application made.
    #[inline(always)]
    pub fn in_port(&self) -> Option<PortId> {
        self.meta().in_port
    }

    /// Sets the receiving port.
    #[inline(always)]
    pub fn set_in_port(&mut self, port: impl Into<Option<PortId>>) {
        self.meta_mut().in_port = port.into();
    }

    /// Port that sends the packet; `None` until a stage has chosen one.
    #[inline(always)]
    pub fn out_port(&self) -> Option<PortId> {
        self.meta().out_port
    }

    /// Sets the port that sends the packet.
    #[inline(always)]
    pub fn set_out_port(&mut self, port: impl Into<Option<PortId>>) {
        self.meta_mut().out_port = port.into();
    }

    /// RSS hash of the device, if there is one.
    #[inline(always)]
    pub fn rss_hash(&self) -> Option<u32> {
        self.meta().flags.contains(Flags::RSS_HASH).then(|| self.meta().rss_hash)
    }

    /// Sets the RSS hash of the device.
    #[inline(always)]
    pub fn set_rss_hash(&mut self, hash: u32) {
        let meta = self.meta_mut();
        meta.rss_hash = hash;
        meta.flags = meta.flags.with(Flags::RSS_HASH);
    }

    /// Mark that a flow rule of the device set (24 bits).
    #[inline(always)]
    pub fn mark(&self) -> Option<u32> {
        self.meta().flags.contains(Flags::MARK).then(|| self.meta().mark)
    }

    /// Sets the mark.
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

    /// Sets the VLAN tag: one that was stripped, or one to insert.
    #[inline(always)]
    pub fn set_vlan(&mut self, tci: u16) {
        let meta = self.meta_mut();
        meta.vlan_tci = tci;
        meta.flags = meta.flags.with(Flags::VLAN);
    }

    /// Removes the VLAN tag from the metadata; tags in the frame stay.
    #[inline(always)]
    pub fn clear_vlan(&mut self) {
        let meta = self.meta_mut();
        meta.flags = meta.flags.without(Flags::VLAN).without(Flags::VLAN_SERVICE);
    }

    /// Checksum status.
    #[inline(always)]
    pub fn checksum_status(&self) -> ChecksumStatus {
        self.meta().checksum_status
    }

    /// Sets the checksum status.
    #[inline(always)]
    pub fn set_checksum_status(&mut self, checksum_status: ChecksumStatus) {
        self.meta_mut().checksum_status = checksum_status;
    }

    /// Flags: valid metadata fields, and offload requests to the transmitting device.
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

    /// Header lengths.
    #[inline(always)]
    pub fn header_lengths(&self) -> HeaderLengths {
        self.meta().header_lengths
    }

    /// Sets the header lengths.
    #[inline(always)]
    pub fn set_header_lengths(&mut self, lengths: HeaderLengths) {
        self.meta_mut().header_lengths = lengths;
    }

    /// Arrival time in nanoseconds, of the clock that the port's capabilities name.
    #[inline(always)]
    pub fn timestamp(&self) -> Option<u64> {
        self.meta().flags.contains(Flags::TIMESTAMP).then(|| self.meta().timestamp)
    }

    /// Sets the arrival time.
    #[inline(always)]
    pub fn set_timestamp(&mut self, nanoseconds: u64) {
        let meta = self.meta_mut();
        meta.timestamp = nanoseconds;
        meta.flags = meta.flags.with(Flags::TIMESTAMP);
    }

    /// Sixteen bytes for the application. They are zero in an empty packet and stay unchanged from stage to
    /// stage.
    #[inline(always)]
    pub fn app(&self) -> [u64; 2] {
        self.meta().app
    }

    /// Sets the sixteen bytes of the application.
    #[inline(always)]
    pub fn set_app(&mut self, app: [u64; 2]) {
        self.meta_mut().app = app;
    }

    /// Prefetches the cache line at the default data offset.
    #[inline(always)]
    pub fn prefetch_data(&self) {
        prefetch(self.at(meta::DATA_START));
    }
}

/// Prefetches a cache line for reading.
#[inline(always)]
pub fn prefetch(_address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint, which accesses no memory in the sense of the language and cannot fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_address.cast());
    }
}

/// Iterates over the data of a chain of segments, from `first` on.
///
/// # Safety
/// The segments are alive and their data does not change during `'a`.
unsafe fn segments_from<'a>(first: Option<NonNull<Meta>>) -> impl Iterator<Item = &'a [u8]> {
    let mut at = first;
    std::iter::from_fn(move || {
        let meta = at?;
        // SAFETY: the caller guarantees that the segments are alive and unchanged during `'a`. Data lies
        // inside the buffer, since `data_off + data_len <= BUFFER_END` always holds.
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
        // SAFETY: the packet owns its segments and is not used again.
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
