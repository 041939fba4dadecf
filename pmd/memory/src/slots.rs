// UNSAFETY: looks at slots by masked index instead of checking a range each time.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::DeviceMemory;

mod sealed {
    pub trait Sealed {}
}

/// A slot that can be looked at while a device writes it: an array of atomics, valid whatever its bytes are.
pub trait Slot: sealed::Sealed + Sync {}
impl<const N: usize> sealed::Sealed for [AtomicU32; N] {}
impl<const N: usize> Slot for [AtomicU32; N] {}
impl<const N: usize> sealed::Sealed for [AtomicU64; N] {}
impl<const N: usize> Slot for [AtomicU64; N] {}

/// A ring of slots that a device reads or writes, indexed by free-running counters: the slot is the counter modulo the number of slots,
/// so that no counter leads outside.
#[derive(Clone)]
pub struct Slots<S: Slot> {
    base: NonNull<S>,
    mask: u32,
    memory: DeviceMemory,
}

// SAFETY: gives out shared references to atomics only, and keeps the memory.
unsafe impl<S: Slot> Send for Slots<S> {}
// SAFETY: as above.
unsafe impl<S: Slot> Sync for Slots<S> {}

impl<S: Slot> Slots<S> {
    /// As many slots as the memory holds; `None` if that is no power of two, or more than 2³¹.
    pub fn new(memory: &DeviceMemory) -> Option<Self> {
        const { assert!(align_of::<S>() <= 8 && size_of::<S>() > 0) };
        let count = u32::try_from(memory.bytes() / size_of::<S>()).ok().filter(|count| count.is_power_of_two())?;
        // The memory is aligned to 8.
        Some(Self { base: memory.base().cast(), mask: count - 1, memory: memory.clone() })
    }

    /// The slot that a free-running counter stands at.
    #[inline(always)]
    pub fn at(&self, counter: u32) -> &S {
        // SAFETY: the mask keeps the index below the number of slots that the memory holds; it lives with self, and is accessed by
        // atomics only.
        unsafe { self.base.add((counter & self.mask) as usize).as_ref() }
    }

    /// Number of slots: a power of two.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.mask + 1
    }

    /// Where the slots are.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }
}

impl<S: Slot> Slots<S> {
    /// The ring as a value of two words, for loops: what is written to slots may, as far as the compiler knows, change the ring.
    #[inline(always)]
    pub fn view(&self) -> View<'_, S> {
        View { base: self.base, mask: self.mask, _slots: PhantomData }
    }
}

impl<const N: usize> Slots<[AtomicU64; N]> {
    /// Writes a whole slot, its first word last.
    #[inline(always)]
    pub fn write(&self, counter: u32, words: [u64; N]) {
        self.view().write(counter, words);
    }
}

/// [`Slots`], borrowed.
#[derive(Debug)]
pub struct View<'a, S: Slot> {
    base: NonNull<S>,
    mask: u32,
    _slots: PhantomData<&'a Slots<S>>,
}

impl<S: Slot> Clone for View<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Slot> Copy for View<'_, S> {}

impl<'a, S: Slot> View<'a, S> {
    /// The slot that a free-running counter stands at.
    #[inline(always)]
    pub fn at(self, counter: u32) -> &'a S {
        // SAFETY: as in `Slots::at`; the slots are borrowed.
        unsafe { self.base.add((counter & self.mask) as usize).as_ref() }
    }

    /// The slots from the one that a free-running counter stands at to the end of the ring.
    #[inline(always)]
    pub fn run(self, counter: u32) -> &'a [S] {
        let at = counter & self.mask;
        // SAFETY: as in `at`: so many slots lie between that one and the end of the ring.
        unsafe { std::slice::from_raw_parts(self.base.add(at as usize).as_ptr(), (self.mask - at) as usize + 1) }
    }

    /// Number of slots, less one.
    #[inline(always)]
    pub fn mask(self) -> u32 {
        self.mask
    }
}

impl<const N: usize> View<'_, [AtomicU64; N]> {
    /// Writes a whole slot, its first word last.
    #[inline(always)]
    pub fn write(self, counter: u32, words: [u64; N]) {
        write(self.at(counter), words);
    }
}

/// Writes a whole slot, its first word last.
#[inline(always)]
pub fn write<const N: usize>(slot: &[AtomicU64; N], words: [u64; N]) {
    // Not by iterators: this must become N stores.
    let mut i = N;
    while i > 0 {
        i -= 1;
        slot[i].store(words[i], Ordering::Relaxed);
    }
}

impl<S: Slot> fmt::Debug for Slots<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("bytes", &size_of::<S>()).field("count", &self.count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn memory(words: usize) -> DeviceMemory {
        let buffer: Arc<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        // SAFETY: the buffer is kept, aligned to 8, and only reached through views.
        unsafe { DeviceMemory::new(NonNull::from(&buffer[0]).cast(), words * 8, Arc::new(buffer)) }
    }

    #[test]
    fn counters_run_round_the_ring() {
        let slots: Slots<[AtomicU64; 4]> = Slots::new(&memory(32)).unwrap();
        assert_eq!(slots.count(), 8);
        slots.write(u32::MAX, [1, 2, 3, 4]);
        assert_eq!(slots.at(7).each_ref().map(|word| word.load(Ordering::Relaxed)), [1, 2, 3, 4]);
        assert_eq!(slots.memory().load64(7 * 32 + 24), 4);
        assert_eq!(slots.at(8)[0].load(Ordering::Relaxed), 0);
        let run = slots.view().run(8 * 9 + 5);
        assert_eq!((run.len(), run[2][3].load(Ordering::Relaxed)), (3, 4));
        assert_eq!((slots.view().run(16).len(), slots.view().run(u32::MAX).len()), (8, 1));
    }

    #[test]
    fn only_powers_of_two() {
        assert!(Slots::<[AtomicU64; 4]>::new(&memory(48)).is_none());
        assert!(Slots::<[AtomicU32; 16]>::new(&memory(4)).is_none(), "not even one");
    }
}
