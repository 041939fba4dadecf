//! Things by number.

use std::ops::{Deref, DerefMut, Range};

/// In lines of memory of its own. The program's heap is the emulator's too: what the device looks at for each packet would else share a line
/// with what the driver writes for each packet, or not, as chance has it.
#[derive(Clone, Debug)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub(crate) T);

impl<T> Deref for Apart<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Apart<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Things by slot.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Apart<Option<T>>>,
    /// No slot before this one is free.
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
            self.slots.push(Apart(Some(thing)));
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

    /// Slots ever used.
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

/// Numbers of queues. A number comes back late, so that a stale one is found out.
#[derive(Debug)]
pub(crate) struct Numbers {
    range: Range<u32>,
    next: u32,
    used: Vec<bool>,
}

impl Numbers {
    pub(crate) fn new(range: Range<u32>) -> Self {
        Self { next: 0, used: vec![false; range.len()], range }
    }

    pub(crate) fn take(&mut self) -> Option<u32> {
        let count = self.used.len() as u32;
        let at = (0..count).map(|i| (self.next + i) % count).find(|at| !self.used[*at as usize])?;
        self.used[at as usize] = true;
        self.next = at + 1;
        Some(self.range.start + at)
    }

    pub(crate) fn give_back(&mut self, number: u32) {
        if self.range.contains(&number) {
            self.used[(number - self.range.start) as usize] = false;
        }
    }
}
