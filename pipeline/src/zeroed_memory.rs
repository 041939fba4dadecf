// UNSAFETY: memory that the kernel zeroed is used as a slice, in huge pages if it is large.
#![allow(unsafe_code)]

//! Large arrays that are initialised to zero.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use crate::sync::{AtomicU64, Ordering};

/// A type whose all-zero bytes are a valid value.
///
/// # Safety
/// All-zero bytes must be a valid value that needs no drop, and must be the value that [`Self::zero`]
/// returns.
pub(crate) unsafe trait Zeroable {
    /// Returns the all-zero value.
    fn zero() -> Self;
}

/// One cache line of words that several threads access.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Line(pub(crate) [AtomicU64; 8]);

// SAFETY: zero bytes are `AtomicU64`s of value 0, which need no drop. Under loom, `Zeroed` never makes its
// atomics from bytes but calls `zero`.
unsafe impl Zeroable for Line {
    fn zero() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

// SAFETY: zero bytes are the `u64` 0, which needs no drop.
unsafe impl Zeroable for u64 {
    fn zero() -> Self {
        0
    }
}

/// An array of zeros. A large array is mapped, so that pages that are never written take no memory.
pub(crate) struct Zeroed<T: Zeroable> {
    start: NonNull<T>,
    count: usize,
    /// The mapping that holds the elements; `None` if they are on the heap.
    #[cfg(not(loom))]
    region: Option<wirepath_memory::Region>,
    _owns: PhantomData<T>,
}

// SAFETY: `Zeroed` owns its elements, as a `Box<[T]>` does, so it can move to another thread if `T` can.
unsafe impl<T: Zeroable + Send> Send for Zeroed<T> {}
// SAFETY: a shared `Zeroed` gives out only `&[T]`, so it can be shared if `T` can.
unsafe impl<T: Zeroable + Sync> Sync for Zeroed<T> {}

/// Page size for the memory of a large array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Huge pages where possible.
    Huge,
    /// Small pages, so that each first write is cheap. Huge pages may be requested when all of it is written.
    Small,
}

impl Pages {
    /// Returns the size in bytes from which on an array is mapped. The heap would write all of it at once.
    fn mmap_threshold(self) -> usize {
        match self {
            Self::Huge => 1 << 20,
            Self::Small => 1 << 15,
        }
    }
}

impl<T: Zeroable> Zeroed<T> {
    pub(crate) fn new(count: usize, pages: Pages) -> Self {
        #[cfg(loom)]
        let _ = pages;
        #[cfg(not(loom))]
        if count * size_of::<T>() >= pages.mmap_threshold() {
            // Reserved huge pages are left to packet buffers.
            let builder = wirepath_memory::RegionBuilder::new(count * size_of::<T>()).huge_pages(false);
            let builder = if pages == Pages::Small { builder.without_thp() } else { builder };
            if let Ok(region) = builder.map() {
                return Self { start: region.base().cast(), count, region: Some(region), _owns: PhantomData };
            }
        }
        let all: Box<[T]> = (0..count).map(|_| T::zero()).collect();
        // SAFETY: `Box::into_raw` never returns null.
        let start = unsafe { NonNull::new_unchecked(Box::into_raw(all).cast()) };
        Self {
            start,
            count,
            #[cfg(not(loom))]
            region: None,
            _owns: PhantomData,
        }
    }
}

impl<T: Zeroable> Zeroed<T> {
    /// Reserves addresses for an array in huge pages, of which only written pages take memory. Returns `None` if the
    /// kernel refuses so many.
    pub(crate) fn reserve(count: usize) -> Option<Self> {
        #[cfg(loom)]
        return Some(Self::new(count, Pages::Huge));
        #[cfg(not(loom))]
        {
            let builder = wirepath_memory::RegionBuilder::new(count.checked_mul(size_of::<T>())?).huge_pages(false);
            let region = builder.map().ok()?;
            Some(Self { start: region.base().cast(), count, region: Some(region), _owns: PhantomData })
        }
    }

    /// Advises the kernel to back the memory with huge pages.
    pub(crate) fn advise_huge_pages(&self) {
        #[cfg(not(loom))]
        if let Some(region) = &self.region {
            region.advise_huge_pages();
        }
    }

    /// Drops all elements after the first `count`, and frees their memory if it is mapped. Returns false if
    /// nothing would be left or if the memory cannot be freed in parts.
    pub(crate) fn truncate(&mut self, count: usize) -> bool {
        #[cfg(loom)]
        let _ = count;
        #[cfg(not(loom))]
        if let Some(region) = self.region.as_mut().filter(|_| count > 0) {
            self.count = self.count.min(count);
            // SAFETY: the dropped elements need no drop (`Zeroable`). No reference to them exists, because
            // `&mut self` is the only reference, and `self.count` now excludes them.
            unsafe { region.truncate(self.count * size_of::<T>()) };
            return true;
        }
        false
    }
}

impl<T: Zeroable> Drop for Zeroed<T> {
    fn drop(&mut self) {
        #[cfg(not(loom))]
        if self.region.is_some() {
            return;
        }
        // SAFETY: without a region, `start` and `count` come from a `Box<[T]>` of `count` elements that `new`
        // leaked, and it is freed only here.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.count)) });
    }
}

impl Zeroed<Line> {
    /// Prefaults the pages that begin in this range.
    pub(crate) fn prefault(&self, lines: Range<usize>) {
        const PAGE: usize = 4096 / size_of::<Line>();
        for line in (lines.start.next_multiple_of(PAGE)..lines.end).step_by(PAGE) {
            // The page is written, not read: a page that is read first is faulted twice, once for reading and
            // once for writing.
            let _ = self[line].0[0].compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl<T: Zeroable> Deref for Zeroed<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `start` points to `count` initialised elements. They come from a box, or from a
        // page-aligned zeroed region of at least that size, whose zeros are valid values by `Zeroable`. They
        // live as long as `self`, and no other owner exists.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T: Zeroable> DerefMut for Zeroed<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `start` points to `count` initialised elements that live as long as `self`, and `&mut self`
        // guarantees that no other reference exists.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.count) }
    }
}

impl<T: Zeroable> fmt::Debug for Zeroed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements", self.len())
    }
}
