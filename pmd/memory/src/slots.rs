// UNSAFETY: addresses slots by masked index, without a bounds check.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::DeviceMemory;

mod sealed {
    pub trait Sealed {}
}

/// Ring entry that a device may write while it is read: an array of atomics, valid for any bytes.
pub trait Slot: sealed::Sealed + Sync {}
impl<const N: usize> sealed::Sealed for [AtomicU32; N] {}
impl<const N: usize> Slot for [AtomicU32; N] {}
impl<const N: usize> sealed::Sealed for [AtomicU64; N] {}
impl<const N: usize> Slot for [AtomicU64; N] {}

/// Descriptor ring in device memory, indexed by free-running counters.
///
/// The slot is the counter modulo the number of slots, so every counter is in bounds.
#[derive(Clone)]
pub struct Slots<S: Slot> {
    base: NonNull<S>,
    mask: u32,
    memory: DeviceMemory,
}

// SAFETY: the ring gives out shared references to atomics only, and keeps the memory mapped.
unsafe impl<S: Slot> Send for Slots<S> {}
// SAFETY: the ring gives out shared references to atomics only, and keeps the memory mapped.
unsafe impl<S: Slot> Sync for Slots<S> {}

impl<S: Slot> Slots<S> {
    /// Divides the memory into slots; `None` if their number is not a power of two, or exceeds 2³¹.
    pub fn new(memory: &DeviceMemory) -> Option<Self> {
        const { assert!(align_of::<S>() <= 8 && size_of::<S>() > 0) };
        let count = u32::try_from(memory.bytes() / size_of::<S>()).ok().filter(|count| count.is_power_of_two())?;
        // Device memory is aligned to 8.
        Some(Self { base: memory.base().cast(), mask: count - 1, memory: memory.clone() })
    }

    /// Slot of a free-running counter.
    #[inline(always)]
    pub fn at(&self, counter: u32) -> &S {
        // SAFETY: the mask keeps the index below the number of slots in the memory. The memory lives as long
        // as `self`, and all accesses are atomic.
        unsafe { self.base.add((counter & self.mask) as usize).as_ref() }
    }

    /// Number of slots: a power of two.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.mask + 1
    }

    /// Memory of the slots.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }
}

impl<S: Slot> Slots<S> {
    /// Returns the ring as a value of two words, for loops. The compiler must otherwise assume that a write
    /// to a slot changes the ring itself.
    #[inline(always)]
    pub fn view(&self) -> SlotsView<'_, S> {
        SlotsView { base: self.base, mask: self.mask, _slots: PhantomData }
    }
}

impl<const N: usize> Slots<[AtomicU64; N]> {
    /// Writes a whole slot, its first word last.
    #[inline(always)]
    pub fn write(&self, counter: u32, words: [u64; N]) {
        self.view().write(counter, words);
    }
}

/// Borrowed [`Slots`], as a value of two words.
#[derive(Debug)]
pub struct SlotsView<'a, S: Slot> {
    base: NonNull<S>,
    mask: u32,
    _slots: PhantomData<&'a Slots<S>>,
}

impl<S: Slot> Clone for SlotsView<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Slot> Copy for SlotsView<'_, S> {}

impl<'a, S: Slot> SlotsView<'a, S> {
    /// Slot of a free-running counter.
    #[inline(always)]
    pub fn at(self, counter: u32) -> &'a S {
        // SAFETY: the mask keeps the index below the number of slots. The memory lives as long as the
        // borrowed ring, and all accesses are atomic.
        unsafe { self.base.add((counter & self.mask) as usize).as_ref() }
    }

    /// Slots from that of a free-running counter to the end of the ring.
    #[inline(always)]
    pub fn run(self, counter: u32) -> &'a [S] {
        let at = counter & self.mask;
        // SAFETY: `mask - at + 1` slots lie between slot `at` and the end of the ring. The memory lives as
        // long as the borrowed ring, and all accesses are atomic.
        unsafe { std::slice::from_raw_parts(self.base.add(at as usize).as_ptr(), (self.mask - at) as usize + 1) }
    }

    /// Number of slots less one.
    #[inline(always)]
    pub fn mask(self) -> u32 {
        self.mask
    }
}

impl<const N: usize> SlotsView<'_, [AtomicU64; N]> {
    /// Writes a whole slot, its first word last.
    #[inline(always)]
    pub fn write(self, counter: u32, words: [u64; N]) {
        write(self.at(counter), words);
    }
}

/// Writes a whole slot, its first word last.
#[inline(always)]
pub fn write<const N: usize>(slot: &[AtomicU64; N], words: [u64; N]) {
    // A loop instead of iterators: it must compile to N stores.
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
    use super::*;
    use crate::device::tests::memory;

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
        assert!(Slots::<[AtomicU32; 16]>::new(&memory(4)).is_none(), "less than one slot");
    }
}
