// UNSAFETY: leaves out the bounds check of a masked index, which is a good part of a lookup.
#![allow(unsafe_code)]

//! Hash tables of keys of a fixed number of words: one writer, readers without locks.

use std::sync::Arc;

use crate::sync::{AtomicU64, Ordering};
use crate::table::prefetch;

use super::hash::Secret;
use super::memory::{Line, Zeroed};

/// Buckets that a search looks at, at most: bounds what a lookup costs whatever the keys.
const MAX_PROBE: usize = 32;

/// A key was put into a later bucket because this one was full.
const OVERFLOW: u64 = 1 << 31;
const VALUE: u64 = OVERFLOW - 1;

/// Largest value.
pub(super) const MAX_VALUE: u32 = VALUE as u32 - 1;

/// The neighbourhood of the key is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Where a key lies; stays true for the life of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position(usize);

/// A slot is the word *tag, value* and the words of the key, padded to 4, 8, 16, ... words. A bucket is a cache line with two slots of
/// four words, or one longer slot. Tag: the key's hash; value: 0 if there is none.
///
/// **Why a reader is never led astray:** a slot's key is written once, before the tag. Removal only clears the value; the slot stays
/// that key's until the writer makes the next table. So a reader that finds tag and key reads a value of that key.
#[derive(Debug)]
pub(super) struct SlotTable {
    lines: Zeroed<Line>,
    words: usize,
    /// Two slots in a bucket.
    pairs: bool,
    /// Lines of a bucket, as a power of two.
    shift: u32,
    mask: usize,
    secret: Arc<Secret>,
    /// Slots that may be used before the table should grow.
    room: usize,
}

impl SlotTable {
    /// For keys of `words` words, and room for `capacity` of them.
    pub(super) fn new(words: usize, capacity: usize) -> Self {
        Self::with_secret(words, capacity, Arc::new(Secret::new()))
    }

    fn with_secret(words: usize, capacity: usize, secret: Arc<Secret>) -> Self {
        let slot = (words + 1).next_power_of_two().max(4);
        let (pairs, lines) = (slot == 4, slot.div_ceil(8));
        // Small tables are kept sparse: there are many of them, each looked into for every new flow, and a slot that is taken by
        // another key costs a branch that goes wrong.
        let sparse = if capacity <= 4096 { 4 } else { 2 };
        let slots = (capacity.max(8) * sparse).next_power_of_two();
        let buckets = if pairs { slots / 2 } else { slots };
        let room = slots / sparse;
        Self {
            lines: Zeroed::new(buckets * lines),
            words,
            pairs,
            shift: lines.trailing_zeros(),
            mask: buckets - 1,
            secret,
            room,
        }
    }

    /// Slots, used by a key or removed one, beyond which the table should be replaced by a larger one.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }

    /// The secret of the hashes that the other methods take.
    #[inline(always)]
    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    #[inline(always)]
    fn bucket(&self, index: usize) -> *const AtomicU64 {
        let index = (index & self.mask) << self.shift;
        debug_assert!(index < self.lines.len());
        // SAFETY: there are `(mask + 1) << shift` lines.
        unsafe { self.lines.as_ptr().add(index) }.cast()
    }

    /// Asks for the line where a search starts.
    #[inline(always)]
    pub(super) fn prefetch(&self, hash: u32) {
        // SAFETY: a pointer to the first word of a bucket.
        prefetch(unsafe { &*self.bucket(hash as usize) });
    }

    /// Whether the slot at `slot` has this key, and its value; 0 if not.
    ///
    /// # Safety
    /// `slot` points to a slot of this table.
    #[inline(always)]
    unsafe fn value_at(&self, slot: *const AtomicU64, meta: u64, key: &impl Fn(usize) -> u64) -> u32 {
        // SAFETY: a slot has `words + 1` words.
        let same = |i: usize| unsafe { &*slot.add(1 + i) }.load(Ordering::Relaxed) == key(i);
        if (0..self.words).all(same) { (meta & VALUE) as u32 } else { 0 }
    }

    /// The value of a key, `None` if it is not there; `key` gives its words.
    #[inline(always)]
    pub(super) fn find(&self, hash: u32, key: impl Fn(usize) -> u64) -> Option<u32> {
        let tag = u64::from(hash.max(1));
        for distance in 0..MAX_PROBE {
            let bucket = self.bucket(hash as usize + distance);
            // SAFETY: every bucket has at least the words of one slot; with pairs, of two slots of four words.
            let first = unsafe { &*bucket }.load(Ordering::Acquire);
            if first >> 32 == tag {
                // SAFETY: the first slot of a bucket.
                let value = unsafe { self.value_at(bucket, first, &key) };
                if value != 0 {
                    return Some(value - 1);
                }
            }
            if self.pairs {
                // SAFETY: as above.
                let second = unsafe { &*bucket.add(4) }.load(Ordering::Acquire);
                if second >> 32 == tag {
                    // SAFETY: the second slot of a bucket.
                    let value = unsafe { self.value_at(bucket.add(4), second, &key) };
                    if value != 0 {
                        return Some(value - 1);
                    }
                }
            }
            if first & OVERFLOW == 0 {
                return None;
            }
        }
        None
    }

    fn word(&self, position: usize) -> &AtomicU64 {
        &self.lines[position / 8].0[position % 8]
    }

    /// First words of the slots of a bucket.
    fn slots_of(&self, index: usize) -> impl Iterator<Item = usize> + use<> {
        let first = ((index & self.mask) << self.shift) * 8;
        [Some(first), self.pairs.then_some(first + 4)].into_iter().flatten()
    }

    fn has_key(&self, slot: usize, key: &[u64]) -> bool {
        key.iter().enumerate().all(|(i, word)| self.word(slot + 1 + i).load(Ordering::Relaxed) == *word)
    }

    /// Where a key lies, with a value or without. Writer only.
    pub(super) fn position(&self, hash: u32, key: &[u64]) -> Option<Position> {
        let tag = u64::from(hash.max(1));
        for distance in 0..MAX_PROBE {
            for slot in self.slots_of(hash as usize + distance) {
                if self.word(slot).load(Ordering::Relaxed) >> 32 == tag && self.has_key(slot, key) {
                    return Some(Position(slot));
                }
            }
            let first = self.slots_of(hash as usize + distance).next()?;
            if self.word(first).load(Ordering::Relaxed) & OVERFLOW == 0 {
                return None;
            }
        }
        None
    }

    /// The value at a position.
    pub(super) fn get(&self, position: Position) -> Option<u32> {
        ((self.word(position.0).load(Ordering::Relaxed) & VALUE) as u32).checked_sub(1)
    }

    /// Replaces or removes the value at a position. Writer only.
    pub(super) fn set(&self, position: Position, value: Option<u32>) {
        let meta = self.word(position.0);
        let rest = meta.load(Ordering::Relaxed) & !VALUE;
        // Release: who sees the value sees what was written before it.
        meta.store(rest | value.map_or(0, |value| u64::from(value) + 1), Ordering::Release);
    }

    /// Puts in a key that is not there. Writer only.
    pub(super) fn insert(&self, hash: u32, key: &[u64], value: u32) -> Result<Position, Full> {
        debug_assert!(key.len() == self.words && value <= MAX_VALUE);
        let tag = u64::from(hash.max(1)) << 32;
        for distance in 0..MAX_PROBE {
            for slot in self.slots_of(hash as usize + distance) {
                let meta = self.word(slot).load(Ordering::Relaxed);
                if meta & !OVERFLOW != 0 {
                    continue;
                }
                for (i, word) in key.iter().enumerate() {
                    self.word(slot + 1 + i).store(*word, Ordering::Relaxed);
                }
                for passed in 0..distance {
                    let first = self.word((((hash as usize + passed) & self.mask) << self.shift) * 8);
                    first.store(first.load(Ordering::Relaxed) | OVERFLOW, Ordering::Release);
                }
                // Release: who sees the tag sees the key.
                self.word(slot).store(meta | tag | (u64::from(value) + 1), Ordering::Release);
                return Ok(Position(slot));
            }
        }
        Err(Full)
    }

    /// Keys with their values; `key` is used for each. Writer only.
    pub(super) fn for_each(&self, mut each: impl FnMut(&[u64], u32)) {
        let mut key = vec![0; self.words];
        for index in 0..=self.mask {
            for slot in self.slots_of(index) {
                if let Some(value) = self.get(Position(slot)) {
                    for (i, word) in key.iter_mut().enumerate() {
                        *word = self.word(slot + 1 + i).load(Ordering::Relaxed);
                    }
                    each(&key, value);
                }
            }
        }
    }

    /// A table with the same keys and room for `capacity`; with the same hashes, unless too many of them meet.
    pub(super) fn rebuilt(&self, mut capacity: usize) -> Self {
        let mut secret = Arc::clone(&self.secret);
        loop {
            let next = Self::with_secret(self.words, capacity, Arc::clone(&secret));
            let mut full = false;
            self.for_each(|key, value| {
                let hash = secret.hash(key.iter().copied());
                full |= !full && next.insert(hash, key, value).is_err();
            });
            if !full {
                return next;
            }
            secret = Arc::new(Secret::new());
            capacity *= 2;
        }
    }

    /// Whether another table has the same hashes.
    pub(super) fn hashes_like(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.secret, &other.secret)
    }
}

/// A hash table from keys of `N` words to numbers, owned by one thread: what the rule engine's tables are made of, for whoever has
/// exact keys only.
///
/// ```
/// let mut table = wirepath_pipeline::rules::ExactTable::with_capacity(100);
/// table.insert(&[1, 2], 7);
/// let mut found = [None; 2];
/// table.find_batch(&[[1, 2], [2, 1]], &mut found);
/// assert_eq!(found, [Some(7), None]);
/// ```
#[derive(Debug)]
pub struct ExactTable<const N: usize> {
    slots: SlotTable,
    used: usize,
    len: usize,
}

impl<const N: usize> ExactTable<N> {
    /// With room for so many keys before it is rebuilt.
    ///
    /// # Panics
    /// If keys have no words or more than 32.
    pub fn with_capacity(capacity: usize) -> Self {
        assert!((1..=32).contains(&N));
        Self { slots: SlotTable::new(N, capacity), used: 0, len: 0 }
    }

    /// Puts a key in or gives it a new value, at most `2^31 - 2`; returns the old one. Time is constant but for one rebuild each time
    /// that the number of keys has doubled.
    ///
    /// # Panics
    /// If the value is too large.
    pub fn insert(&mut self, key: &[u64; N], value: u32) -> Option<u32> {
        assert!(value <= MAX_VALUE);
        let mut hash = self.slots.secret.hash(key.iter().copied());
        if let Some(position) = self.slots.position(hash, key) {
            let old = self.slots.get(position);
            self.len += usize::from(old.is_none());
            self.slots.set(position, Some(value));
            return old;
        }
        loop {
            if self.used < self.slots.room() && self.slots.insert(hash, key, value).is_ok() {
                break;
            }
            let full = self.used < self.slots.room();
            self.slots = self.slots.rebuilt((self.len * 2).max(self.slots.room() << u32::from(full)));
            self.used = self.len;
            hash = self.slots.secret.hash(key.iter().copied());
        }
        self.used += 1;
        self.len += 1;
        None
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: &[u64; N]) -> Option<u32> {
        let hash = self.slots.secret.hash(key.iter().copied());
        let position = self.slots.position(hash, key)?;
        let old = self.slots.get(position)?;
        self.slots.set(position, None);
        self.len -= 1;
        Some(old)
    }

    /// The value of a key.
    #[inline]
    pub fn find(&self, key: &[u64; N]) -> Option<u32> {
        self.slots.find(self.slots.secret.hash(key.iter().copied()), |i| key[i])
    }

    /// Looks up many keys: every line is asked for before the first one is looked at, 64 at a time.
    ///
    /// # Panics
    /// If the slices differ in length.
    #[inline]
    pub fn find_batch(&self, keys: &[[u64; N]], found: &mut [Option<u32>]) {
        assert_eq!(keys.len(), found.len());
        for (keys, found) in keys.chunks(64).zip(found.chunks_mut(64)) {
            let mut hashes = [0; 64];
            for (hash, key) in hashes.iter_mut().zip(keys) {
                *hash = self.slots.secret.hash(key.iter().copied());
                self.slots.prefetch(*hash);
            }
            for ((found, hash), key) in found.iter_mut().zip(&hashes).zip(keys) {
                *found = self.slots.find(*hash, |i| key[i]);
            }
        }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.slots.bytes()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn next(x: &mut u64) -> u64 {
        *x ^= *x << 13;
        *x ^= *x >> 7;
        *x ^= *x << 17;
        *x
    }

    fn agrees_with_a_map<const N: usize>() {
        let (mut table, mut map, mut x) = (ExactTable::<N>::with_capacity(4), HashMap::new(), 0x9e37_79b9_7f4a_7c15u64);
        for round in 0..20_000u32 {
            let mut key = [0; N];
            key[0] = next(&mut x) % 3000;
            key[N - 1] ^= next(&mut x) % 2;
            if next(&mut x).is_multiple_of(3) {
                assert_eq!(table.remove(&key), map.remove(&key));
            } else {
                assert_eq!(table.insert(&key, round), map.insert(key, round));
            }
            assert_eq!(table.len(), map.len());
        }
        for (key, value) in &map {
            assert_eq!(table.find(key), Some(*value));
        }
        let keys: Vec<[u64; N]> = (0..6000)
            .map(|i| {
                let mut key = [0; N];
                key[0] = i;
                key
            })
            .collect();
        let mut found = vec![None; keys.len()];
        table.find_batch(&keys, &mut found);
        assert!(keys.iter().zip(&found).all(|(key, found)| map.get(key) == found.as_ref()));
    }

    #[test]
    fn behaves_like_a_map_for_keys_of_every_length() {
        agrees_with_a_map::<1>();
        agrees_with_a_map::<2>();
        agrees_with_a_map::<3>();
        agrees_with_a_map::<4>();
        agrees_with_a_map::<7>();
        agrees_with_a_map::<8>();
        agrees_with_a_map::<16>();
    }

    #[test]
    fn a_neighbourhood_that_is_full_refuses_and_is_bounded() {
        let table = SlotTable::new(2, 1000);
        let fits = (0..1000).take_while(|&i| table.insert(5, &[i, 0], 1).is_ok()).count();
        assert_eq!(fits, 2 * MAX_PROBE);
        assert_eq!(table.find(5, |i| [63, 0][i]), Some(1));
        assert_eq!(table.find(5, |i| [64, 0][i]), None);
        let next = table.rebuilt(1000);
        assert!(next.hashes_like(&table), "these hashes were made up, those of the keys are all right");
        let hash = next.secret.hash([63, 0].into_iter());
        assert_eq!(next.find(hash, |i| [63, 0][i]), Some(1));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;
    use loom::thread;

    /// While the writer puts in, removes and revives keys of one bucket, a reader finds a key not at all or with a value of its own.
    #[test]
    fn readers_never_see_the_value_of_another_key() {
        loom::model(|| {
            let table = Arc::new(SlotTable::new(2, 8));
            let reader = {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    for (key, own) in [([1, 1], [10, 11]), ([2, 2], [20, 20])] {
                        // The same hash for both: the key alone tells them apart.
                        let found = table.find(3, |i| key[i]);
                        assert!(found.is_none_or(|value| own.contains(&value)), "{found:?}");
                    }
                })
            };
            let position = table.insert(3, &[1, 1], 10).unwrap();
            table.insert(3, &[2, 2], 20).unwrap();
            table.set(position, None);
            table.set(position, Some(11));
            reader.join().unwrap();
            assert_eq!((table.find(3, |_| 1), table.find(3, |_| 2)), (Some(11), Some(20)));
        });
    }
}
