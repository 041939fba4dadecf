// UNSAFETY: zeroed memory from the system as a slice, in huge pages where it is large.
#![allow(unsafe_code)]

//! Large arrays that start as zeros.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::sync::AtomicU64;

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

/// An array of zeros. From 1 MiB on it is mapped: then huge pages are asked for, and what is never written takes no memory.
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

impl<T: Zero> Zeroed<T> {
    pub(super) fn new(count: usize) -> Self {
        #[cfg(not(loom))]
        if count * size_of::<T>() >= 1 << 20 {
            // Reserved huge pages are for packets.
            let region = wirepath_memory::RegionBuilder::new(count * size_of::<T>()).huge_pages(false).map();
            if let Ok(region) = region {
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
    /// Has the system provide all of the memory.
    pub(super) fn touch(&self) {
        const PAGE: usize = 4096;
        for line in self.iter().step_by(PAGE / size_of::<Line>().min(PAGE)) {
            // Written, since pages that are only read may stay one and the same.
            line.0[0].store(line.0[0].load(crate::sync::Ordering::Relaxed), crate::sync::Ordering::Relaxed);
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
