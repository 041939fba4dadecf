//! The writer's side of a hash table that grows while it is used.

use std::sync::Arc;

use super::slots::{Full, Position, Remains, SlotTable};

/// Tables with less room are replaced by a larger one at once: that takes no longer than a few page faults.
const STEPWISE: usize = 1 << 10;
/// The next table is made while so many keys come, as a part of the room.
const PART: usize = 8;

/// A hash table, and while it is nearly full the one that will take its place.
///
/// **No pause:** each insertion copies some buckets, and what changes in those that are copied changes in both tables. Readers see the
/// old one until the new one is whole. The memory of the new one comes in small pages, of which an insertion needs one or two, and that
/// of the old one goes by 256 KiB. So the longest insertion takes as long as the copies of 8 to 16 buckets and a page or two.
#[derive(Debug)]
pub(super) struct Growing {
    slots: Arc<SlotTable>,
    /// Slots that have a key, and those of them that have no value any more.
    used: usize,
    gone: usize,
    /// Used slots from which on there is more to do than to put in a key.
    calm: usize,
    /// Used slots at which the next table is begun, and those at which it must be there.
    begin: usize,
    end: usize,
    next: Option<Box<Next>>,
    old: Option<Old>,
}

#[derive(Debug)]
struct Next {
    slots: SlotTable,
    used: usize,
    /// Buckets of the old table that are copied.
    copied: usize,
}

/// A table that was replaced.
#[derive(Debug)]
enum Old {
    /// Readers may still look into it.
    Seen(Arc<SlotTable>),
    Unseen(Remains),
}

impl Growing {
    pub(super) fn new(slots: SlotTable) -> Self {
        let begin = slots.room();
        let slots = Arc::new(slots);
        Self { slots, used: 0, gone: 0, calm: begin, begin, end: end(begin), next: None, old: None }
    }

    /// What readers look into.
    #[inline(always)]
    pub(super) fn slots(&self) -> &Arc<SlotTable> {
        &self.slots
    }

    /// Keys with a value.
    pub(super) fn keys(&self) -> usize {
        self.used - self.gone
    }

    /// Whether there are two tables.
    #[cfg(test)]
    pub(super) fn is_growing(&self) -> bool {
        self.next.is_some()
    }

    /// Whether all memory of the table before this one is given back.
    #[cfg(test)]
    pub(super) fn is_settled(&self) -> bool {
        self.old.is_none()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        let old = match &self.old {
            Some(Old::Seen(slots)) => slots.bytes(),
            Some(Old::Unseen(remains)) => remains.bytes(),
            None => 0,
        };
        self.slots.bytes() + self.next.as_ref().map_or(0, |next| next.slots.bytes()) + old
    }

    /// As [`SlotTable::insert_at_once`].
    #[inline(always)]
    pub(super) fn insert_at_once(&mut self, words: usize, hash: u32, key: impl Fn(usize) -> u64, value: u32) -> bool {
        let done = self.used < self.calm && self.slots.insert_at_once(words, hash, key, value);
        self.used += usize::from(done);
        done
    }

    /// Replaces or removes the value at the position of a key.
    pub(super) fn set(&mut self, position: Position, hash: u32, key: &[u64], value: Option<u32>) {
        self.gone -= usize::from(self.slots.get(position).is_none());
        self.gone += usize::from(value.is_none());
        self.slots.set(position, value);
        self.copy_again(position, hash, key);
    }

    /// Puts in a key that is not there. True: readers are to see another table from now on.
    pub(super) fn insert(&mut self, hash: u32, key: &[u64], value: u32) -> Result<bool, Full> {
        let mut another = false;
        loop {
            if self.used < self.end
                && let Ok(position) = self.slots.insert(hash, key, value)
            {
                self.used += 1;
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
        self.dissolve();
        if self.begin == self.end || (self.used < self.begin && self.next.is_none()) {
            return false;
        }
        let (slots, keys) = (&self.slots, self.keys());
        let next = self
            .next
            .get_or_insert_with(|| Box::new(Next { slots: slots.like_gradually(more_than(keys)), used: 0, copied: 0 }));
        let some = slots.buckets() / (self.end - self.begin);
        let end = (next.copied + some).min(slots.buckets());
        let mut full = false;
        next.slots.touch_for(next.copied..end, slots.buckets());
        slots.for_each(next.copied..end, |key, value| {
            full |= !full && next.insert(next.slots.hash(key), key, value).is_err();
        });
        next.copied = end;
        if full {
            self.give_up();
        } else if end == self.slots.buckets()
            && let Some(next) = self.next.take()
        {
            next.slots.settle();
            let old = std::mem::replace(&mut self.slots, Arc::new(next.slots));
            (self.used, self.gone, self.old) = (next.used, next.used - keys, Some(Old::Seen(old)));
            self.set_bounds();
            self.calm = 0;
            return true;
        } else {
            self.calm = 0;
        }
        false
    }

    /// Gives back some memory of the table before this one, if readers do not see it any more.
    fn dissolve(&mut self) {
        self.old = match self.old.take() {
            Some(Old::Seen(slots)) => match Arc::try_unwrap(slots) {
                Ok(slots) => Some(Old::Unseen(slots.into_remains())),
                Err(slots) => Some(Old::Seen(slots)),
            },
            Some(Old::Unseen(mut remains)) => remains.dissolve().then_some(Old::Unseen(remains)),
            None => return,
        };
        if self.old.is_none() {
            self.be_calm();
        }
    }

    /// Gives back all that there is to give back.
    pub(super) fn tidy(&mut self) {
        if matches!(&self.old, Some(old) if !old.is_seen()) {
            self.old = None;
            self.be_calm();
        }
    }

    /// Those of another table.
    fn set_bounds(&mut self) {
        self.begin = self.slots.room();
        self.end = end(self.begin);
        self.calm = self.begin;
    }

    fn be_calm(&mut self) {
        self.calm = if self.next.is_none() { self.begin } else { 0 };
    }

    /// Keys meet in the next table. The present one is filled, and then replaced at once by one with more room.
    #[cold]
    fn give_up(&mut self) {
        self.next = None;
        (self.calm, self.begin) = (self.end, self.end);
    }

    /// A larger table at once, or one without removed keys.
    fn rebuild(&mut self) -> Result<(), Full> {
        // Not full, and yet no place was found: only more room helps.
        let crowded = self.used < self.end;
        let capacity = more_than(self.keys()).max(if crowded { self.slots.room() * 2 } else { 0 });
        self.slots = Arc::new(self.slots.rebuilt(capacity)?);
        (self.used, self.gone, self.next, self.old) = (self.keys(), 0, None, None);
        self.set_bounds();
        Ok(())
    }
}

/// Room is a measure and no limit: while the next table is made, some more keys go into this one.
fn end(room: usize) -> usize {
    if room < STEPWISE { room } else { room + room / PART }
}

/// Capacity of the table after one with so many keys: twice the room, or as much if many keys are gone. Not for twice the keys: there may
/// be a few more than room.
fn more_than(keys: usize) -> usize {
    keys + keys / 4 * 3
}

impl Old {
    fn is_seen(&self) -> bool {
        matches!(self, Self::Seen(slots) if Arc::strong_count(slots) > 1)
    }
}

impl Next {
    fn insert(&mut self, hash: u32, key: &[u64], value: u32) -> Result<(), Full> {
        self.slots.insert(hash, key, value)?;
        self.used += 1;
        Ok(())
    }
}
