//! Containers of objects by slot number, and allocation of queue numbers.

use std::ops::{Deref, DerefMut, Range};

/// A value that is aligned to two cache lines of its own.
///
/// The heap of the program is the emulator's heap too. Data that the device reads for each packet could
/// otherwise share a cache line with data that the driver writes for each packet.
#[derive(Clone, Debug)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);

impl<T> Deref for CachePadded<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for CachePadded<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Objects by slot number.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<CachePadded<Option<T>>>,
    /// All slots before this one are occupied.
    full_to: usize,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), full_to: 0 }
    }
}

impl<T> Slab<T> {
    pub(crate) fn add(&mut self, thing: T) -> u32 {
        let free = self.slots[self.full_to..].iter().position(|slot| slot.0.is_none());
        let slot = free.map_or(self.slots.len(), |at| self.full_to + at);
        self.full_to = slot + 1;
        if slot == self.slots.len() {
            self.slots.push(CachePadded(Some(thing)));
        } else {
            self.slots[slot].0 = Some(thing);
        }
        slot as u32
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.0.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.slots.get_mut(slot as usize)?.0.as_mut()
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Option<T> {
        let thing = self.slots.get_mut(slot as usize)?.0.take()?;
        self.full_to = self.full_to.min(slot as usize);
        Some(thing)
    }

    /// Returns the number of slots that were ever used.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, thing)| Some((slot as u32, thing.0.as_ref()?)))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.0.as_mut())
    }
}

/// Allocator of queue numbers. A freed number is reused as late as possible, so that stale numbers are
/// detected.
#[derive(Debug)]
pub(crate) struct IdAllocator {
    range: Range<u32>,
    next: u32,
    used: Vec<bool>,
}

impl IdAllocator {
    pub(crate) fn new(range: Range<u32>) -> Self {
        Self { next: 0, used: vec![false; range.len()], range }
    }

    pub(crate) fn alloc(&mut self) -> Option<u32> {
        let count = self.used.len() as u32;
        let at = (0..count).map(|i| (self.next + i) % count).find(|at| !self.used[*at as usize])?;
        self.used[at as usize] = true;
        self.next = at + 1;
        Some(self.range.start + at)
    }

    pub(crate) fn free(&mut self, number: u32) {
        if self.range.contains(&number) {
            self.used[(number - self.range.start) as usize] = false;
        }
    }
}
