// UNSAFETY: the rings are memory shared with the kernel.
#![allow(unsafe_code)]

//! The four rings of an AF_XDP socket as types: what may be written is reserved, filled and committed; what may be read is peeked
//! and released. Layout: `XDP_MMAP_OFFSETS` (`linux/if_xdp.h`), protocol: Documentation/networking/af_xdp.rst.

use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::XdpRingOffset;
use wirepath_memory::ring::RingSize;

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

/// A descriptor that was read, or is to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// Address in the UMEM: the offset of a chunk, and in unaligned mode the distance of the data from there in the upper 16 bits.
    pub(super) address: u64,
    /// Bytes.
    pub(super) len: u32,
    /// `XDP_PKT_CONTD` and others.
    pub(super) options: u32,
}

/// An entry of a ring: a descriptor (RX, TX) or an address (fill, completion).
pub(super) trait Entry {
    /// The value of an entry.
    type Value: Copy;
    fn read(&self) -> Self::Value;
    fn write(&self, value: Self::Value);
}

// Entries are read and written with relaxed atomics: which of the two sides owns an entry is decided by the counters, whose loads
// acquire and stores release; a kernel that breaks the protocol can then yield nonsense, but no undefined behaviour.
impl Entry for SharedDescriptor {
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

impl Entry for AtomicU64 {
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
    mapping: NonNull<u8>,
    bytes: usize,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<E>,
    size: RingSize,
    _entries: PhantomData<E>,
}

// SAFETY: the mapping belongs to the ring; one side of each counter is written by the ring's owner only, which is unique.
unsafe impl<E> Send for Ring<E> {}

impl<E: Entry> Ring<E> {
    fn map(socket: BorrowedFd<'_>, page_offset: u64, offsets: &XdpRingOffset, size: RingSize) -> io::Result<Self> {
        let entries_bytes = size.entries() as usize * size_of::<E>();
        let at = |offset: u64| usize::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
        let (producer, consumer, entries) = (at(offsets.producer)?, at(offsets.consumer)?, at(offsets.desc)?);
        // Kernels before 5.4 have no flags; the consumer, whose bit 0 would be misread, does not stand in: such kernels lack
        // unaligned chunks too and need-wakeup is not asked of them.
        let flags = at(offsets.flags.unwrap_or(offsets.consumer))?;
        let bytes = entries.checked_add(entries_bytes).ok_or(io::ErrorKind::InvalidData)?;
        for (offset, len, align) in [(producer, 4, 4), (consumer, 4, 4), (flags, 4, 4), (entries, entries_bytes, 8)] {
            if offset % align != 0 || offset.checked_add(len).is_none_or(|end| end > bytes) {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        let (protection, flags_of_map) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { mmap(ptr::null_mut(), bytes, protection, flags_of_map, socket, page_offset) }?;
        let mapping = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::InvalidData)?;
        // SAFETY: all offsets lie inside the mapping and are aligned, as checked above; the mapping lives as long as the ring.
        unsafe {
            Ok(Self {
                mapping,
                bytes,
                producer: mapping.add(producer).cast(),
                consumer: mapping.add(consumer).cast(),
                flags: mapping.add(flags).cast(),
                entries: mapping.add(entries).cast(),
                size,
                _entries: PhantomData,
            })
        }
    }

    #[inline(always)]
    fn producer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping.
        unsafe { self.producer.as_ref() }
    }

    #[inline(always)]
    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping.
        unsafe { self.consumer.as_ref() }
    }

    #[inline(always)]
    fn entry(&self, counter: u32) -> &E {
        // SAFETY: a slot is always below the number of entries, all of which are mapped.
        unsafe { self.entries.add(self.size.slot(counter)).as_ref() }
    }

    #[inline(always)]
    fn needs_wakeup(&self) -> bool {
        // SAFETY: inside the mapping.
        unsafe { self.flags.as_ref() }.load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }
}

impl<E> Drop for Ring<E> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        let _ = unsafe { munmap(self.mapping.as_ptr().cast(), self.bytes) };
    }
}

/// A ring that we fill: fill and TX.
pub(super) struct Producer<E> {
    ring: Ring<E>,
    /// Our counter; the shared one follows at commit.
    next: u32,
    /// The kernel's counter as last seen, always a possible one.
    consumed: u32,
}

impl<E: Entry> Producer<E> {
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

    /// Number of entries.
    pub(super) fn entries(&self) -> u32 {
        self.ring.size.entries()
    }

    /// Looks where the kernel is. An impossible counter is ignored: then nothing more is free.
    #[inline(always)]
    fn look(&mut self) {
        // Acquire: what the kernel read from an entry lies before our next write to it.
        let consumed = self.ring.consumer().load(Ordering::Acquire);
        if self.ring.size.used(self.next, consumed).is_some() {
            self.consumed = consumed;
        }
    }

    /// Entries that the kernel has not consumed yet.
    #[inline(always)]
    pub(super) fn pending(&mut self) -> u32 {
        self.look();
        self.next.wrapping_sub(self.consumed)
    }

    /// Whether the kernel waits for a system call before it looks at the ring again.
    #[inline(always)]
    pub(super) fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }

    /// Reserves up to `want` entries. What is written to them reaches the kernel with [`Reserved::commit`]; without that, nothing
    /// does.
    #[inline(always)]
    pub(super) fn reserve(&mut self, want: u32) -> Reserved<'_, E> {
        let mut free = self.ring.size.entries() - self.next.wrapping_sub(self.consumed);
        if free < want {
            self.look();
            free = self.ring.size.entries() - self.next.wrapping_sub(self.consumed);
        }
        Reserved { free: free.min(want), written: 0, ring: self }
    }
}

/// Entries of a [`Producer`] that may be written.
#[must_use = "without commit nothing reaches the kernel"]
pub(super) struct Reserved<'r, E: Entry> {
    ring: &'r mut Producer<E>,
    free: u32,
    written: u32,
}

impl<E: Entry> Reserved<'_, E> {
    /// Entries left.
    #[inline(always)]
    pub(super) fn space(&self) -> u32 {
        self.free - self.written
    }

    /// Writes the next entry; `false` if none is left.
    #[inline(always)]
    pub(super) fn push(&mut self, value: E::Value) -> bool {
        if self.written == self.free {
            return false;
        }
        self.ring.ring.entry(self.ring.next.wrapping_add(self.written)).write(value);
        self.written += 1;
        true
    }

    /// Hands the written entries to the kernel; returns how many.
    #[inline(always)]
    pub(super) fn commit(self) -> u32 {
        self.ring.next = self.ring.next.wrapping_add(self.written);
        // Release: the kernel, which acquires the counter, finds the entries (and the packets behind them) written.
        self.ring.ring.producer().store(self.ring.next, Ordering::Release);
        self.written
    }
}

/// A ring that the kernel fills: RX and completion.
pub(super) struct Consumer<E> {
    ring: Ring<E>,
    next: u32,
    /// The kernel's counter as last seen, always a possible one.
    produced: u32,
    impossible: u64,
}

impl<E: Entry> Consumer<E> {
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        offsets: &XdpRingOffset,
        size: RingSize,
    ) -> io::Result<Self> {
        let ring = Ring::map(socket, page_offset, offsets, size)?;
        let next = ring.consumer().load(Ordering::Relaxed);
        Ok(Self { produced: next, ring, next, impossible: 0 })
    }

    /// Entries that are there, at most `most`, to be looked at in order.
    #[inline(always)]
    pub(super) fn peek(&mut self, most: u32) -> Peeked<'_, E> {
        let mut there = self.produced.wrapping_sub(self.next);
        if there < most {
            // Acquire: the entries (and the packets behind them) were written before the counter was.
            let produced = self.ring.producer().load(Ordering::Acquire);
            match self.ring.size.used(produced, self.next) {
                Some(used) => (self.produced, there) = (produced, used),
                // More than the ring holds: nothing new is believed.
                None => self.impossible += 1,
            }
        }
        Peeked { len: there.min(most), ring: self }
    }

    /// Whether anything is there.
    pub(super) fn is_empty(&mut self) -> bool {
        self.peek(1).len() == 0
    }

    /// How often the kernel's counter was impossible since the last call.
    #[inline(always)]
    pub(super) fn take_impossible(&mut self) -> u64 {
        std::mem::take(&mut self.impossible)
    }
}

/// Entries of a [`Consumer`] that may be read.
pub(super) struct Peeked<'r, E: Entry> {
    ring: &'r mut Consumer<E>,
    len: u32,
}

impl<E: Entry> Peeked<'_, E> {
    /// How many.
    #[inline(always)]
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// The entry at `index`, which is below [`Self::len`] (above it: whatever stands in the ring).
    #[inline(always)]
    pub(super) fn get(&self, index: u32) -> E::Value {
        self.ring.ring.entry(self.ring.next.wrapping_add(index)).read()
    }

    /// Gives all the entries back to the kernel.
    #[inline(always)]
    pub(super) fn release(self) {
        self.ring.next = self.ring.next.wrapping_add(self.len);
        // Release: our reads of the entries lie before the kernel's next write to them.
        self.ring.ring.consumer().store(self.ring.next, Ordering::Release);
    }
}

/// Rings over a file, of which the test plays the kernel's part.
#[cfg(test)]
pub(super) mod fake {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const OFFSETS: XdpRingOffset = XdpRingOffset { producer: 0, consumer: 64, desc: 192, flags: Some(128) };
    const BYTES: u64 = 1 << 16;

    /// A ring seen from both sides: as we produce and as the kernel consumes, or the other way round.
    pub(crate) fn pair<E: Entry>(entries: u32) -> (Producer<E>, Consumer<E>) {
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

    /// What a kernel could write if it were broken.
    pub(crate) fn set_producer<E: Entry>(ring: &Consumer<E>, value: u32) {
        ring.ring.producer().store(value, Ordering::Release);
    }

    pub(crate) fn set_consumer<E: Entry>(ring: &Producer<E>, value: u32) {
        ring.ring.consumer().store(value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_is_committed_arrives_in_order_round_the_end_of_the_ring() {
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
    fn what_is_not_committed_or_released_changes_nothing() {
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
    fn impossible_counters_are_not_believed() {
        let (mut producer, mut consumer) = fake::pair::<AtomicU64>(8);
        for value in [9, 1000, 1 << 31] {
            fake::set_producer(&consumer, value);
            assert_eq!(consumer.peek(8).len(), 0);
            assert_eq!(consumer.take_impossible(), 1);
            fake::set_consumer(&producer, value);
            let mut reserved = producer.reserve(9);
            assert_eq!(reserved.space(), 8, "an empty ring stays an empty ring");
            reserved.push(1);
        }
    }

    #[test]
    fn a_layout_that_reaches_outside_is_refused() {
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
