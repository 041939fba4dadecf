//! Writer side of a hash table that is resized incrementally while it is used.

use std::sync::Arc;

use super::hash_table::{ConcurrentTable, Full, Position, RetiredMemory};

/// Minimum room (number of slots) of a table that is resized incrementally. A smaller table is rebuilt at once, which
/// takes no longer than a few page faults.
const INCREMENTAL_MIN_ROOM: usize = 1 << 10;
/// Divisor of the room: while a resize runs, the present table takes up to `room / OVERFILL_DIVISOR` keys beyond its
/// room.
const OVERFILL_DIVISOR: usize = 8;

/// A hash table with one writer. During a resize there are two tables: the present one and the next one.
///
/// **No pause:** each insertion copies some buckets. Changes to copied buckets are made in both tables.
/// Readers use the present table until the next one is complete. The next table is allocated in small pages, of
/// which an insertion faults one or two. The memory of a replaced table is freed in steps of 256 KiB. So the
/// longest insertion takes as long as copying 8 to 16 buckets and faulting two pages.
#[derive(Debug)]
pub(crate) struct ResizableTable {
    slots: Arc<ConcurrentTable>,
    /// Number of slots with a key, removed keys included.
    used: usize,
    /// Number of slots with a removed key: they have no value.
    removed: usize,
    /// Number of used slots up to which the fast path may insert; 0 while a resize or a release needs its steps.
    fast_path_limit: usize,
    /// Number of used slots at which a resize begins.
    resize_start: usize,
    /// Number of used slots at which the next table must be complete.
    resize_deadline: usize,
    /// Table that replaces the present one when it is complete.
    next: Option<Box<NextTable>>,
    /// Table that was replaced last, until its memory is freed.
    previous: Option<PreviousTable>,
}

/// The next table while it is filled.
#[derive(Debug)]
struct NextTable {
    slots: ConcurrentTable,
    /// Number of slots with a key.
    used: usize,
    /// Number of buckets of the present table that are copied already.
    copied: usize,
}

/// A table that was replaced.
#[derive(Debug)]
enum PreviousTable {
    /// Readers may still use the table.
    Referenced(Arc<ConcurrentTable>),
    /// The memory of the table is being freed in steps.
    Releasing(RetiredMemory),
}

impl ResizableTable {
    pub(crate) fn new(slots: ConcurrentTable) -> Self {
        let room = slots.room();
        let slots = Arc::new(slots);
        Self {
            slots,
            used: 0,
            removed: 0,
            fast_path_limit: room,
            resize_start: room,
            resize_deadline: resize_deadline(room),
            next: None,
            previous: None,
        }
    }

    /// Returns the table that readers use.
    #[inline(always)]
    pub(crate) fn slots(&self) -> &Arc<ConcurrentTable> {
        &self.slots
    }

    /// Returns the number of keys with a value.
    pub(crate) fn keys(&self) -> usize {
        self.used - self.removed
    }

    /// Returns true during a resize.
    #[cfg(test)]
    pub(crate) fn is_resizing(&self) -> bool {
        self.next.is_some()
    }

    /// Returns true if the memory of the replaced table is freed.
    #[cfg(test)]
    pub(crate) fn is_reclaimed(&self) -> bool {
        self.previous.is_none()
    }

    /// Returns the memory of all tables in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let previous = match &self.previous {
            Some(PreviousTable::Referenced(slots)) => slots.bytes(),
            Some(PreviousTable::Releasing(memory)) => memory.bytes(),
            None => 0,
        };
        self.slots.bytes() + self.next.as_ref().map_or(0, |next| next.slots.bytes()) + previous
    }

    /// Inserts a key on the fast path; see [`ConcurrentTable::try_insert_fast`].
    #[inline(always)]
    pub(crate) fn try_insert_fast(&mut self, words: usize, hash: u32, key: impl Fn(usize) -> u64, value: u32) -> bool {
        let done = self.used < self.fast_path_limit && self.slots.try_insert_fast(words, hash, key, value);
        self.used += usize::from(done);
        done
    }

    /// Replaces or removes the value at the position of a key.
    pub(crate) fn set(&mut self, position: Position, hash: u32, key: &[u64], value: Option<u32>) {
        self.removed -= usize::from(self.slots.get(position).is_none());
        self.removed += usize::from(value.is_none());
        self.slots.set(position, value);
        self.update_copy(position, hash, key);
    }

    /// Inserts a key that is not in the table. Returns true if the table was replaced: readers must then use the result
    /// of [`Self::slots`].
    pub(crate) fn insert(&mut self, hash: u32, key: &[u64], value: u32) -> Result<bool, Full> {
        let mut replaced = false;
        loop {
            if self.used < self.resize_deadline
                && let Ok(position) = self.slots.insert(hash, key, value)
            {
                self.used += 1;
                self.update_copy(position, hash, key);
                return Ok(self.resize_step() | replaced);
            }
            self.rebuild()?;
            replaced = true;
        }
    }

    /// Repeats the change of a key in the next table if its bucket is copied already.
    fn update_copy(&mut self, position: Position, hash: u32, key: &[u64]) {
        let Some(next) = self.next.as_mut().filter(|next| self.slots.bucket_of(position) < next.copied) else { return };
        let value = self.slots.get(position);
        let done = match (next.slots.position(hash, |i| key[i]), value) {
            (Some(copy), _) => {
                next.slots.set(copy, value);
                Ok(())
            }
            (None, Some(value)) => next.insert(hash, key, value),
            (None, None) => Ok(()),
        };
        if done.is_err() {
            self.abandon_resize();
        }
    }

    /// Does the resize work of one insertion: creates the next table, copies some buckets, or replaces the
    /// present table by the next one. Returns true if the table was replaced.
    fn resize_step(&mut self) -> bool {
        self.release_some();
        if self.resize_start == self.resize_deadline || (self.used < self.resize_start && self.next.is_none()) {
            return false;
        }
        let (slots, keys) = (&self.slots, self.keys());
        let next = self.next.get_or_insert_with(|| {
            Box::new(NextTable { slots: slots.like_with_small_pages(next_capacity(keys)), used: 0, copied: 0 })
        });
        let step = slots.buckets() / (self.resize_deadline - self.resize_start);
        let copied = (next.copied + step).min(slots.buckets());
        let mut full = false;
        next.slots.prefault_for(next.copied..copied, slots.buckets());
        slots.for_each(next.copied..copied, |key, value| {
            full |= !full && next.insert(next.slots.hash(key), key, value).is_err();
        });
        next.copied = copied;
        if full {
            self.abandon_resize();
        } else if copied == self.slots.buckets()
            && let Some(next) = self.next.take()
        {
            next.slots.request_huge_pages();
            let replaced = std::mem::replace(&mut self.slots, Arc::new(next.slots));
            (self.used, self.removed) = (next.used, next.used - keys);
            self.previous = Some(PreviousTable::Referenced(replaced));
            self.set_thresholds();
            self.fast_path_limit = 0;
            return true;
        } else {
            self.fast_path_limit = 0;
        }
        false
    }

    /// Frees a part of the replaced table when no reader uses it any more.
    fn release_some(&mut self) {
        self.previous = match self.previous.take() {
            Some(PreviousTable::Referenced(slots)) => match Arc::try_unwrap(slots) {
                Ok(slots) => Some(PreviousTable::Releasing(slots.into_retired_memory())),
                Err(slots) => Some(PreviousTable::Referenced(slots)),
            },
            Some(PreviousTable::Releasing(mut memory)) => {
                memory.release_some().then_some(PreviousTable::Releasing(memory))
            }
            None => return,
        };
        if self.previous.is_none() {
            self.reset_fast_path_limit();
        }
    }

    /// Frees the whole replaced table if no reader uses it any more.
    pub(crate) fn free_previous(&mut self) {
        if matches!(&self.previous, Some(previous) if !previous.is_referenced()) {
            self.previous = None;
            self.reset_fast_path_limit();
        }
    }

    /// Sets the thresholds for the present table.
    fn set_thresholds(&mut self) {
        self.resize_start = self.slots.room();
        self.resize_deadline = resize_deadline(self.resize_start);
        self.fast_path_limit = self.resize_start;
    }

    /// Permits the fast path again unless a resize is running.
    fn reset_fast_path_limit(&mut self) {
        self.fast_path_limit = if self.next.is_none() { self.resize_start } else { 0 };
    }

    /// Abandons the next table, because too many keys collide in it. The present table is filled up to the deadline
    /// and then rebuilt with more room.
    #[cold]
    fn abandon_resize(&mut self) {
        self.next = None;
        (self.fast_path_limit, self.resize_start) = (self.resize_deadline, self.resize_deadline);
    }

    /// Replaces the table at once by a larger one, or by one without removed keys.
    fn rebuild(&mut self) -> Result<(), Full> {
        // The table is below its deadline, but the probe sequence of the key is full, so the table needs more
        // room.
        let probe_sequence_full = self.used < self.resize_deadline;
        let capacity = next_capacity(self.keys()).max(if probe_sequence_full { self.slots.room() * 2 } else { 0 });
        self.slots = Arc::new(self.slots.rebuilt(capacity)?);
        (self.used, self.removed, self.next, self.previous) = (self.keys(), 0, None, None);
        self.set_thresholds();
        Ok(())
    }
}

/// Returns the number of used slots at which the next table must be complete. It may exceed the room, which is not a
/// hard limit.
fn resize_deadline(room: usize) -> usize {
    if room < INCREMENTAL_MIN_ROOM { room } else { room + room / OVERFILL_DIVISOR }
}

/// Returns the number of keys for which the next table is allocated: 1.75 times the present keys. The room of the next
/// table is then twice the present room, or the same if many keys were removed. The factor is below 2 because a table
/// may have a few more keys than its room.
fn next_capacity(keys: usize) -> usize {
    keys + keys / 4 * 3
}

impl PreviousTable {
    fn is_referenced(&self) -> bool {
        matches!(self, Self::Referenced(slots) if Arc::strong_count(slots) > 1)
    }
}

impl NextTable {
    fn insert(&mut self, hash: u32, key: &[u64], value: u32) -> Result<(), Full> {
        self.slots.insert(hash, key, value)?;
        self.used += 1;
        Ok(())
    }
}
