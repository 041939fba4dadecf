// UNSAFETY: the rings are memory shared with the kernel.
#![allow(unsafe_code)]

//! The four rings of an AF_XDP socket as types. A producer reserves, fills and commits entries; a consumer
//! peeks and releases them.
//!
//! Layout: `XDP_MMAP_OFFSETS` (`linux/if_xdp.h`). Protocol: Documentation/networking/af_xdp.rst.

use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::net::xdp::XdpRingOffset;
use wirepath_memory::ring::RingSize;

use crate::drivers::kernel::common::mapping::Mapping;

/// `XDP_RING_NEED_WAKEUP`.
const NEED_WAKEUP: u32 = 1;

/// `struct xdp_desc`, in memory shared with the kernel.
#[repr(C)]
pub(super) struct SharedDescriptor {
    address: AtomicU64,
    len: AtomicU32,
    options: AtomicU32,
}
const _: () = assert!(size_of::<SharedDescriptor>() == 16);

/// Value of a descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// Address in the UMEM: the offset of a chunk. In unaligned mode the upper 16 bits hold the distance of
    /// the data from it.
    pub(super) address: u64,
    /// Length of the data in bytes.
    pub(super) len: u32,
    /// `XDP_PKT_CONTD` and others.
    pub(super) options: u32,
}

/// An entry of a ring: a descriptor (RX, TX) or an address (fill, completion).
pub(super) trait RingEntry {
    /// Value of an entry.
    type Value: Copy;
    fn read(&self) -> Self::Value;
    fn write(&self, value: Self::Value);
}

// Entries are accessed with relaxed atomics. The ring counters decide which side owns an entry; they are
// loaded with acquire and stored with release. A kernel that breaks the protocol can then cause wrong values,
// but no undefined behaviour.
impl RingEntry for SharedDescriptor {
    type Value = Descriptor;

    #[inline(always)]
    fn read(&self) -> Descriptor {
        Descriptor {
            address: self.address.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            options: self.options.load(Ordering::Relaxed),
        }
    }

    #[inline(always)]
    fn write(&self, value: Descriptor) {
        self.address.store(value.address, Ordering::Relaxed);
        self.len.store(value.len, Ordering::Relaxed);
        self.options.store(value.options, Ordering::Relaxed);
    }
}

impl RingEntry for AtomicU64 {
    type Value = u64;

    #[inline(always)]
    fn read(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn write(&self, value: u64) {
        self.store(value, Ordering::Relaxed);
    }
}

/// A mapped ring.
struct Ring<E> {
    _mapping: Mapping,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<E>,
    size: RingSize,
    _entries: PhantomData<E>,
}

// SAFETY: the ring owns its mapping. Its unique owner is the only writer of one counter; the kernel writes
// the other one.
unsafe impl<E> Send for Ring<E> {}

impl<E: RingEntry> Ring<E> {
    fn map(socket: BorrowedFd<'_>, page_offset: u64, offsets: &XdpRingOffset, size: RingSize) -> io::Result<Self> {
        let entries_bytes = size.entries() as usize * size_of::<E>();
        let at = |offset: u64| usize::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
        let (producer, consumer, entries) = (at(offsets.producer)?, at(offsets.consumer)?, at(offsets.desc)?);
        // Kernels before 5.4 have no flags. The consumer counter then stands in; its bit 0 is not misread,
        // because such kernels lack unaligned chunks and need-wakeup is not requested from them.
        let flags = at(offsets.flags.unwrap_or(offsets.consumer))?;
        let bytes = entries.checked_add(entries_bytes).ok_or(io::ErrorKind::InvalidData)?;
        for (offset, len, align) in [(producer, 4, 4), (consumer, 4, 4), (flags, 4, 4), (entries, entries_bytes, 8)] {
            if offset % align != 0 || offset.checked_add(len).is_none_or(|end| end > bytes) {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        let mapping = Mapping::new(socket, page_offset, bytes, true)?;
        let start = mapping.start();
        // SAFETY: all offsets were checked to be aligned and inside the mapping, which lives as long as the
        // ring.
        unsafe {
            Ok(Self {
                _mapping: mapping,
                producer: start.add(producer).cast(),
                consumer: start.add(consumer).cast(),
                flags: start.add(flags).cast(),
                entries: start.add(entries).cast(),
                size,
                _entries: PhantomData,
            })
        }
    }

    #[inline(always)]
    fn producer(&self) -> &AtomicU32 {
        // SAFETY: the counter is aligned and lies inside the mapping, which lives as long as `self`.
        unsafe { self.producer.as_ref() }
    }

    #[inline(always)]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: the counter is aligned and lies inside the mapping, which lives as long as `self`.
        unsafe { self.consumer.as_ref() }
    }

    #[inline(always)]
    fn entry(&self, counter: u32) -> &E {
        // SAFETY: a slot is always below the number of entries, and all entries are mapped as long as `self`
        // lives.
        unsafe { self.entries.add(self.size.slot(counter)).as_ref() }
    }

    #[inline(always)]
    fn needs_wakeup(&self) -> bool {
        // SAFETY: the flags are aligned and lie inside the mapping, which lives as long as `self`.
        unsafe { self.flags.as_ref() }.load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }
}

/// A ring that the driver fills: fill ring and TX ring.
pub(super) struct Producer<E> {
    ring: Ring<E>,
    /// Local producer counter. The shared one is updated by a commit.
    next: u32,
    /// Last valid consumer counter of the kernel.
    consumed: u32,
}

impl<E: RingEntry> Producer<E> {
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        offsets: &XdpRingOffset,
        size: RingSize,
    ) -> io::Result<Self> {
        let ring = Ring::map(socket, page_offset, offsets, size)?;
        let next = ring.producer().load(Ordering::Relaxed);
        Ok(Self { consumed: next, ring, next })
    }

    /// Returns the number of entries.
    pub(super) fn entries(&self) -> u32 {
        self.ring.size.entries()
    }

    /// Reads the kernel's consumer counter. An invalid value is ignored: no entry becomes free then.
    #[inline(always)]
    fn refresh_consumed(&mut self) {
        // Acquire: the kernel's reads of an entry happen before the driver's next write to it.
        let consumed = self.ring.consumer().load(Ordering::Acquire);
        if self.ring.size.used(self.next, consumed).is_some() {
            self.consumed = consumed;
        }
    }

    /// Returns the number of entries that the kernel has not consumed.
    #[inline(always)]
    pub(super) fn pending(&mut self) -> u32 {
        self.refresh_consumed();
        self.next.wrapping_sub(self.consumed)
    }

    /// Passes the entries that the kernel has not consumed to `each`.
    pub(super) fn each_pending(&mut self, mut each: impl FnMut(E::Value)) {
        for at in 0..self.pending() {
            each(self.ring.entry(self.consumed.wrapping_add(at)).read());
        }
    }

    /// Returns whether the kernel waits for a system call before it reads the ring.
    #[inline(always)]
    pub(super) fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }

    /// Reserves up to `want` entries. The kernel sees them only after [`Reserved::commit`].
    #[inline(always)]
    pub(super) fn reserve(&mut self, want: u32) -> Reserved<'_, E> {
        let mut free = self.ring.size.entries() - self.next.wrapping_sub(self.consumed);
        if free < want {
            self.refresh_consumed();
            free = self.ring.size.entries() - self.next.wrapping_sub(self.consumed);
        }
        Reserved { free: free.min(want), written: 0, ring: self }
    }
}

/// Reserved entries of a [`Producer`].
#[must_use = "without commit nothing reaches the kernel"]
pub(super) struct Reserved<'r, E: RingEntry> {
    ring: &'r mut Producer<E>,
    free: u32,
    written: u32,
}

impl<E: RingEntry> Reserved<'_, E> {
    /// Returns the number of reserved entries that are not written.
    #[inline(always)]
    pub(super) fn space(&self) -> u32 {
        self.free - self.written
    }

    /// Writes the next entry. Returns `false` if none is left.
    #[inline(always)]
    pub(super) fn push(&mut self, value: E::Value) -> bool {
        if self.written == self.free {
            return false;
        }
        self.ring.ring.entry(self.ring.next.wrapping_add(self.written)).write(value);
        self.written += 1;
        true
    }

    /// Publishes the written entries to the kernel and returns their number.
    #[inline(always)]
    pub(super) fn commit(self) -> u32 {
        self.ring.next = self.ring.next.wrapping_add(self.written);
        // Release: the kernel, which acquires the counter, sees the written entries and the packets behind
        // them.
        self.ring.ring.producer().store(self.ring.next, Ordering::Release);
        self.written
    }
}

/// A ring that the kernel fills: RX ring and completion ring.
pub(super) struct Consumer<E> {
    ring: Ring<E>,
    next: u32,
    /// Last valid producer counter of the kernel.
    produced: u32,
    invalid_indices: u64,
}

impl<E: RingEntry> Consumer<E> {
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        offsets: &XdpRingOffset,
        size: RingSize,
    ) -> io::Result<Self> {
        let ring = Ring::map(socket, page_offset, offsets, size)?;
        let next = ring.consumer().load(Ordering::Relaxed);
        Ok(Self { produced: next, ring, next, invalid_indices: 0 })
    }

    /// Returns up to `max_entries` available entries.
    #[inline(always)]
    pub(super) fn peek(&mut self, max_entries: u32) -> Peeked<'_, E> {
        let mut there = self.produced.wrapping_sub(self.next);
        if there < max_entries {
            // Acquire: the kernel wrote the entries and the packets behind them before the counter.
            let produced = self.ring.producer().load(Ordering::Acquire);
            match self.ring.size.used(produced, self.next) {
                Some(used) => (self.produced, there) = (produced, used),
                // More entries than the ring has: the value is invalid.
                None => self.invalid_indices += 1,
            }
        }
        Peeked { len: there.min(max_entries), ring: self }
    }

    /// Returns the number of available entries. A packet of several buffers has several.
    pub(super) fn available(&mut self) -> u32 {
        self.peek(u32::MAX).len()
    }

    /// Returns whether no entry is available.
    pub(super) fn is_empty(&mut self) -> bool {
        self.peek(1).len() == 0
    }

    /// Returns how often the kernel's counter was invalid since the last call.
    #[inline(always)]
    pub(super) fn take_invalid_indices(&mut self) -> u64 {
        std::mem::take(&mut self.invalid_indices)
    }
}

/// Available entries of a [`Consumer`].
pub(super) struct Peeked<'r, E: RingEntry> {
    ring: &'r mut Consumer<E>,
    len: u32,
}

impl<E: RingEntry> Peeked<'_, E> {
    /// Returns the number of entries.
    #[inline(always)]
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the entry at `index`, which must be below [`Self::len`]. A larger index yields a stale entry
    /// of the ring.
    #[inline(always)]
    pub(super) fn get(&self, index: u32) -> E::Value {
        self.ring.ring.entry(self.ring.next.wrapping_add(index)).read()
    }

    /// Returns all the entries to the kernel.
    #[inline(always)]
    pub(super) fn release(self) {
        self.ring.next = self.ring.next.wrapping_add(self.len);
        // Release: the driver's reads of the entries happen before the kernel's next write to them.
        self.ring.ring.consumer().store(self.ring.next, Ordering::Release);
    }
}

/// Rings in a file, for tests that act as the kernel.
#[cfg(test)]
pub(super) mod fake {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const OFFSETS: XdpRingOffset = XdpRingOffset { producer: 0, consumer: 64, desc: 192, flags: Some(128) };
    const BYTES: u64 = 1 << 16;

    /// Returns both sides of a ring: the driver's and the kernel's.
    pub(crate) fn pair<E: RingEntry>(entries: u32) -> (Producer<E>, Consumer<E>) {
        let file = file();
        let size = RingSize::new(entries).unwrap();
        (
            Producer::map(file.as_fd(), 0, &OFFSETS, size).unwrap(),
            Consumer::map(file.as_fd(), 0, &OFFSETS, size).unwrap(),
        )
    }

    pub(crate) fn file() -> OwnedFd {
        let file = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, BYTES).unwrap();
        file
    }

    /// Writes a producer counter as a faulty kernel could.
    pub(crate) fn set_producer<E: RingEntry>(ring: &Consumer<E>, value: u32) {
        ring.ring.producer().store(value, Ordering::Release);
    }

    pub(crate) fn set_consumer<E: RingEntry>(ring: &Producer<E>, value: u32) {
        ring.ring.consumer().store(value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn committed_entries_arrive_in_order_across_the_wrap() {
        let (mut producer, mut consumer) = fake::pair::<AtomicU64>(8);
        for round in 0..100u64 {
            let mut reserved = producer.reserve(5);
            assert_eq!(reserved.space(), 5);
            for i in 0..5 {
                assert!(reserved.push(round * 5 + i));
            }
            assert!(!reserved.push(99), "no more than was reserved");
            assert_eq!(reserved.commit(), 5);
            assert_eq!(producer.pending(), 5);
            let peeked = consumer.peek(64);
            let got: Vec<u64> = (0..peeked.len()).map(|i| peeked.get(i)).collect();
            assert_eq!(got, (round * 5..round * 5 + 5).collect::<Vec<_>>());
            peeked.release();
            assert!(consumer.is_empty());
        }
    }

    #[test]
    fn uncommitted_entries_change_nothing() {
        let (mut producer, mut consumer) = fake::pair::<SharedDescriptor>(4);
        let mut reserved = producer.reserve(4);
        reserved.push(Descriptor { address: 1, len: 2, options: 3 });
        drop(reserved);
        assert!(consumer.is_empty());
        let mut reserved = producer.reserve(4);
        let descriptor = Descriptor { address: 4, len: 5, options: 6 };
        reserved.push(descriptor);
        reserved.commit();
        assert_eq!(consumer.peek(4).get(0), descriptor);
        assert_eq!(consumer.peek(4).len(), 1, "still there");
        assert_eq!(producer.reserve(4).space(), 3);
    }

    #[test]
    fn invalid_indices_are_ignored() {
        let (mut producer, mut consumer) = fake::pair::<AtomicU64>(8);
        for value in [9, 1000, 1 << 31] {
            fake::set_producer(&consumer, value);
            assert_eq!(consumer.peek(8).len(), 0);
            assert_eq!(consumer.take_invalid_indices(), 1);
            fake::set_consumer(&producer, value);
            let mut reserved = producer.reserve(9);
            assert_eq!(reserved.space(), 8, "an empty ring stays an empty ring");
            reserved.push(1);
        }
    }

    #[test]
    fn a_layout_outside_the_mapping_is_refused() {
        let file = fake::file();
        let size = RingSize::new(8).unwrap();
        for (producer, consumer, desc) in
            [(u64::MAX, 64, 192), (0, 1 << 40, 192), (0, 64, 191), (3, 64, 192), (0, 64, u64::MAX - 8)]
        {
            let offsets = XdpRingOffset { producer, consumer, desc, flags: Some(128) };
            assert!(Producer::<AtomicU64>::map(file.as_fd(), 0, &offsets, size).is_err());
        }
    }
}
