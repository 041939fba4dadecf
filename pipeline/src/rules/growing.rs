//! The writer's side of a hash table that grows while it is used.

use std::sync::Arc;

use super::slots::{Full, Position, SlotTable};

/// Tables with less room are replaced by a larger one at once: that takes no longer than a few page faults.
const STEPWISE: usize = 1 << 14;
/// Part of the room that is left when the next table is begun, ...
const RESERVE: usize = 32;
/// ... and buckets that each insertion copies from then on. Of keys with a slot each there are twice as many buckets as room.
const STEP: usize = 2 * RESERVE;

/// A hash table, and while it is nearly full the one that will take its place.
///
/// **No pause:** each insertion copies some buckets, and what changes in those that are copied changes in both tables. Readers see the
/// old one until the new one is whole. So the longest insertion takes as long as the system needs for two huge pages.
#[derive(Debug)]
pub(super) struct Growing {
    slots: Arc<SlotTable>,
    /// Slots that have a key, and those of them that have a value.
    used: usize,
    keys: usize,
    /// Used slots from which on there is more to do than to put in a key.
    calm: usize,
    next: Option<Box<Next>>,
}

#[derive(Debug)]
struct Next {
    slots: SlotTable,
    used: usize,
    /// Buckets of the old table that are copied.
    copied: usize,
}

impl Growing {
    pub(super) fn new(slots: SlotTable) -> Self {
        let calm = calm(&slots);
        Self { slots: Arc::new(slots), used: 0, keys: 0, calm, next: None }
    }

    /// Capacity with which a table takes so many keys before it begins to grow.
    pub(super) fn capacity_for(keys: usize) -> usize {
        if keys < STEPWISE { keys } else { keys + keys.div_ceil(RESERVE - 1) }
    }

    /// What readers look into.
    #[inline(always)]
    pub(super) fn slots(&self) -> &Arc<SlotTable> {
        &self.slots
    }

    /// Keys with a value.
    pub(super) fn keys(&self) -> usize {
        self.keys
    }

    /// Whether there are two tables.
    #[cfg(test)]
    pub(super) fn is_growing(&self) -> bool {
        self.next.is_some()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.slots.bytes() + self.next.as_ref().map_or(0, |next| next.slots.bytes())
    }

    /// As [`SlotTable::insert_at_once`].
    #[inline(always)]
    pub(super) fn insert_at_once(&mut self, words: usize, hash: u32, key: impl Fn(usize) -> u64, value: u32) -> bool {
        let done = self.used < self.calm && self.slots.insert_at_once(words, hash, key, value);
        self.used += usize::from(done);
        self.keys += usize::from(done);
        done
    }

    /// Replaces or removes the value at the position of a key.
    pub(super) fn set(&mut self, position: Position, hash: u32, key: &[u64], value: Option<u32>) {
        self.keys -= usize::from(self.slots.get(position).is_some());
        self.keys += usize::from(value.is_some());
        self.slots.set(position, value);
        self.copy_again(position, hash, key);
    }

    /// Puts in a key that is not there. True: readers are to see another table from now on.
    pub(super) fn insert(&mut self, hash: u32, key: &[u64], value: u32) -> Result<bool, Full> {
        let mut another = false;
        loop {
            if self.used < self.slots.room()
                && let Ok(position) = self.slots.insert(hash, key, value)
            {
                self.used += 1;
                self.keys += 1;
                self.copy_again(position, hash, key);
                return Ok(self.step() | another);
            }
            self.rebuild()?;
            another = true;
        }
    }

    /// What is in both tables is made the same in both.
    fn copy_again(&mut self, position: Position, hash: u32, key: &[u64]) {
        let Some(next) = self.next.as_mut().filter(|next| self.slots.bucket_of(position) < next.copied) else { return };
        let value = self.slots.get(position);
        let done = match (next.slots.position(hash, |i| key[i]), value) {
            (Some(there), _) => {
                next.slots.set(there, value);
                Ok(())
            }
            (None, Some(value)) => next.insert(hash, key, value),
            (None, None) => Ok(()),
        };
        if done.is_err() {
            self.give_up();
        }
    }

    /// Part of every insertion: begins the next table, copies some buckets, or changes over.
    fn step(&mut self) -> bool {
        if self.used < self.calm || self.slots.room() < STEPWISE {
            return false;
        }
        let capacity = Self::capacity_for(self.keys * 2);
        let slots = &self.slots;
        let next = self.next.get_or_insert_with(|| Box::new(Next { slots: slots.like(capacity), used: 0, copied: 0 }));
        let end = (next.copied + STEP).min(slots.buckets());
        let mut full = false;
        slots.for_each(next.copied..end, |key, value| {
            full |= !full && next.insert(next.slots.hash(key), key, value).is_err();
        });
        next.copied = end;
        if full {
            self.give_up();
        } else if end == self.slots.buckets()
            && let Some(next) = self.next.take()
        {
            self.calm = calm(&next.slots);
            (self.slots, self.used) = (Arc::new(next.slots), next.used);
            return true;
        } else {
            // From here on, whatever the numbers are.
            self.calm = 0;
        }
        false
    }

    /// Keys meet in the next table. The present one is filled, and then replaced at once by one with more room.
    #[cold]
    fn give_up(&mut self) {
        self.next = None;
        self.calm = self.slots.room();
    }

    /// A larger table at once, or one without removed keys.
    fn rebuild(&mut self) -> Result<(), Full> {
        // Not full, and yet no place was found: only more room helps.
        let crowded = self.used < self.slots.room();
        let capacity = (self.keys * 2).max(if crowded { self.slots.room() * 2 } else { 0 });
        self.slots = Arc::new(self.slots.rebuilt(capacity)?);
        (self.used, self.calm, self.next) = (self.keys, calm(&self.slots), None);
        Ok(())
    }
}

impl Next {
    fn insert(&mut self, hash: u32, key: &[u64], value: u32) -> Result<(), Full> {
        self.slots.insert(hash, key, value)?;
        self.used += 1;
        Ok(())
    }
}

fn calm(slots: &SlotTable) -> usize {
    if slots.room() < STEPWISE { slots.room() } else { slots.room() - slots.room() / RESERVE }
}
