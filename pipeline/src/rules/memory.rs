// UNSAFETY: zeroed memory from the system as a slice, in huge pages where it is large.
#![allow(unsafe_code)]

//! Large arrays that start as zeros.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use crate::sync::{AtomicU64, Ordering};

/// What may be made of zero bytes.
///
/// # Safety
/// All-zero bytes must be a valid value that needs no drop, and the same value as [`Self::zero`] gives.
pub(super) unsafe trait Zero {
    /// That value.
    fn zero() -> Self;
}

/// One cache line of words that several threads see.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Line(pub(super) [AtomicU64; 8]);

// SAFETY: zeros are atomics of value zero (those of loom are never made of bytes, see below).
unsafe impl Zero for Line {
    fn zero() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

// SAFETY: a number.
unsafe impl Zero for u64 {
    fn zero() -> Self {
        0
    }
}

/// An array of zeros. If it is large it is mapped: what is never written takes no memory then.
pub(super) struct Zeroed<T: Zero> {
    start: NonNull<T>,
    count: usize,
    /// Keeps the memory; `None`: it is the heap's.
    #[cfg(not(loom))]
    region: Option<wirepath_memory::Region>,
    _owns: PhantomData<T>,
}

// SAFETY: owns its elements, like a box.
unsafe impl<T: Zero + Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Zero + Sync> Sync for Zeroed<T> {}

/// How the system is to provide the memory of a large array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// In huge pages, as far as it can.
    Huge,
    /// In small pages: each first write costs little. Huge ones may be asked for when all is written.
    Gradual,
}

impl Pages {
    /// Bytes from which on an array is mapped rather than taken from the heap, which writes all of it at once.
    fn mapped_from(self) -> usize {
        match self {
            Self::Huge => 1 << 20,
            Self::Gradual => 1 << 15,
        }
    }
}

impl<T: Zero> Zeroed<T> {
    pub(super) fn new(count: usize, pages: Pages) -> Self {
        #[cfg(loom)]
        let _ = pages;
        #[cfg(not(loom))]
        if count * size_of::<T>() >= pages.mapped_from() {
            // Reserved huge pages are for packets.
            let builder = wirepath_memory::RegionBuilder::new(count * size_of::<T>()).huge_pages(false);
            let builder = if pages == Pages::Gradual { builder.gradual() } else { builder };
            if let Ok(region) = builder.map() {
                return Self { start: region.base().cast(), count, region: Some(region), _owns: PhantomData };
            }
        }
        let all: Box<[T]> = (0..count).map(|_| T::zero()).collect();
        // SAFETY: a box is not null.
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

impl<T: Zero> Zeroed<T> {
    /// Has the system make huge pages of the memory when it has time.
    pub(super) fn ask_for_huge_pages(&self) {
        #[cfg(not(loom))]
        if let Some(region) = &self.region {
            region.ask_for_huge_pages();
        }
    }

    /// Forgets all elements but the first `count`, and gives back their memory as far as it is mapped. False: that is everything, or
    /// it cannot be done in parts.
    pub(super) fn truncate(&mut self, count: usize) -> bool {
        #[cfg(loom)]
        let _ = count;
        #[cfg(not(loom))]
        if let Some(region) = self.region.as_mut().filter(|_| count > 0) {
            self.count = self.count.min(count);
            // SAFETY: the elements are numbers without a drop, and none behind `count` can be reached: `&mut self` is the only reference,
            // and lends no more than `count` from now on.
            unsafe { region.truncate(self.count * size_of::<T>()) };
            return true;
        }
        false
    }
}

impl<T: Zero> Drop for Zeroed<T> {
    fn drop(&mut self) {
        #[cfg(not(loom))]
        if self.region.is_some() {
            return;
        }
        // SAFETY: without a region the memory came from a box of so many.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.count)) });
    }
}

impl Zeroed<Line> {
    /// Has the system provide the pages that begin in this part.
    pub(super) fn touch(&self, lines: Range<usize>) {
        const PAGE: usize = 4096 / size_of::<Line>();
        for line in (lines.start.next_multiple_of(PAGE)..lines.end).step_by(PAGE) {
            // Written, whatever is there: a page that was read first is provided twice, once for reading and once for writing.
            let _ = self[line].0[0].compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl<T: Zero> Deref for Zeroed<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: so many elements: from a box, or a region that was asked for at that size, starts on a page and is zeroed (a valid value,
        // by `Zero`). It lives as long as `self`, and nothing else knows the address.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T: Zero> DerefMut for Zeroed<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.count) }
    }
}

impl<T: Zero> fmt::Debug for Zeroed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements", self.len())
    }
}
