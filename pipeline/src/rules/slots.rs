// UNSAFETY: leaves out the bounds check of a masked index, which is a good part of a lookup.
#![allow(unsafe_code)]

//! Hash tables of keys of a fixed number of words: one writer, readers without locks.

use std::hint::select_unpredictable;
use std::ops::Range;
use std::sync::Arc;

use crate::sync::{AtomicU64, Ordering};
use crate::table::prefetch;

use super::hash::Secret;
use super::memory::{Line, Zeroed};
use super::words::WORDS;

/// Buckets that a search looks at, at most: bounds what a lookup costs whatever the keys.
const MAX_PROBE: usize = 32;

/// A key was put into a later bucket because this one was full.
const OVERFLOW: u64 = 1 << 31;
const VALUE: u64 = OVERFLOW - 1;

/// Words of the longest key of which two fit a line.
const PAIRED: usize = 3;

/// Keys up to which a table is small: its filter stays in the first-level cache, where that of a large one would cost what the table does.
const SMALL: usize = 4096;
/// Bits of the filter for each key that there is room for: one in sixteen searches for another key goes on behind it.
const FILTER_BITS: usize = 16;

/// Largest value.
pub(super) const MAX_VALUE: u32 = VALUE as u32 - 1;

/// How keys are hashed.
#[derive(Clone, Debug)]
pub(super) enum Hash {
    /// By their words.
    Pairs(Arc<Secret>),
    /// As sums of products; with the index that each word of a key has in a packet's vector.
    Sums(Arc<Secret>, Arc<[u8]>),
}

/// The part of a hash that is a sum which one word contributes.
#[inline(always)]
pub(super) fn product(factors: [u64; 2], word: u64) -> u64 {
    let (low, high) = (word & 0xffff_ffff, word >> 32);
    factors[0].wrapping_mul(low).wrapping_add(factors[1].wrapping_mul(high))
}

/// The bucket to look into after `distance` others. The second is the other line of the same 128 bytes, which processors fetch along
/// with the first.
#[inline(always)]
fn probe(hash: u32, distance: usize) -> usize {
    (hash as usize + (distance & !1)) ^ (distance & 1)
}

/// What a bucket says about a key.
enum Probe {
    Value(u32),
    Nothing,
    /// Not there, but perhaps in the next one.
    Full,
    /// Another key has this tag, or had it: that of the other slot may be the one.
    Unclear,
}

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
    /// Of small tables, a bit for each hash that was ever put in: most searches end there. Empty: there is none.
    filter: Box<[AtomicU64]>,
    words: usize,
    /// Two slots in a bucket.
    pairs: bool,
    /// Lines of a bucket, as a power of two.
    shift: u32,
    mask: usize,
    hash: Hash,
    /// Slots that may be used before the table should grow.
    room: usize,
}

impl SlotTable {
    /// For keys of `words` words, and room for `capacity` of them.
    pub(super) fn new(words: usize, capacity: usize, hash: Hash) -> Self {
        let slot = (words + 1).next_power_of_two().max(4);
        let (pairs, lines) = (slot == 4, slot.div_ceil(8));
        // Small tables are kept sparse: there are many of them, each looked into for every new flow, and a bucket that is full costs a
        // branch that goes wrong.
        let small = capacity <= SMALL;
        let sparse = if small { 4 } else { 2 };
        let slots = (capacity.max(8) * sparse).next_power_of_two();
        let buckets = if pairs { slots / 2 } else { slots };
        let room = slots / sparse;
        Self {
            lines: Zeroed::new(buckets * lines),
            filter: (0..if small { room * FILTER_BITS / 64 } else { 0 }).map(|_| AtomicU64::new(0)).collect(),
            words,
            pairs,
            shift: lines.trailing_zeros(),
            mask: buckets - 1,
            hash,
            room,
        }
    }

    /// Slots, used by a key or removed one, beyond which the table should be replaced by a larger one.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    pub(super) fn buckets(&self) -> usize {
        self.mask + 1
    }

    /// An empty table of the same keys and hashes.
    pub(super) fn like(&self, capacity: usize) -> Self {
        Self::new(self.words, capacity, self.hash.clone())
    }

    /// Another hash, before there is a key.
    pub(super) fn with_hash(mut self, hash: Hash) -> Self {
        self.hash = hash;
        self
    }

    /// Has the system provide all of the memory now, rather than in the middle of insertions.
    pub(super) fn touch(&self) {
        self.lines.touch();
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>() + size_of_val(&*self.filter)
    }

    /// The hash of a key, which the other methods take.
    pub(super) fn hash(&self, key: &[u64]) -> u32 {
        match &self.hash {
            Hash::Pairs(secret) => secret.hash_row(key),
            Hash::Sums(secret, words) => {
                let products = words.iter().zip(key).map(|(&word, key)| product(secret.factors(word), *key));
                secret.sum(products.fold(0, u64::wrapping_add))
            }
        }
    }

    #[inline(always)]
    fn bucket(&self, words: usize, index: usize) -> *const AtomicU64 {
        // One line, where the length of keys is known to be short.
        let shift = if words <= PAIRED { 0 } else { self.shift };
        let index = (index & self.mask) << shift;
        debug_assert!(index < self.lines.len());
        // SAFETY: there are `(mask + 1) << shift` lines.
        unsafe { self.lines.as_ptr().add(index) }.cast()
    }

    /// Whether a key with this hash may be there.
    #[inline(always)]
    pub(super) fn may_have(&self, hash: u32) -> bool {
        let place = hash as usize & (self.filter.len() * 64).wrapping_sub(1);
        self.filter.get(place / 64).is_none_or(|word| word.load(Ordering::Acquire) >> (place % 64) & 1 != 0)
    }

    /// Writer only, before the key can be found.
    #[inline(always)]
    fn note(&self, hash: u32) {
        let place = hash as usize & (self.filter.len() * 64).wrapping_sub(1);
        if let Some(word) = self.filter.get(place / 64) {
            word.store(word.load(Ordering::Relaxed) | 1 << (place % 64), Ordering::Release);
        }
    }

    /// Asks for the line where a search starts.
    #[inline(always)]
    pub(super) fn prefetch(&self, words: usize, hash: u32) {
        // SAFETY: a pointer to the first word of a bucket.
        prefetch(unsafe { &*self.bucket(words, hash as usize) });
    }

    /// The value of a key, `None` if it is not there; `key` gives its words, of which there are `words`: a constant where the caller
    /// knows it, so that nothing is left of the loops.
    #[inline(always)]
    pub(super) fn find(&self, words: usize, hash: u32, key: impl Fn(usize) -> u64) -> Option<u32> {
        debug_assert_eq!(words, self.words);
        match self.find_in(words, probe(hash, 0), hash, &key) {
            Probe::Value(value) => return Some(value),
            Probe::Nothing => return None,
            Probe::Unclear => return self.find_farther(hash, key),
            Probe::Full => {}
        }
        match self.find_in(words, probe(hash, 1), hash, &key) {
            Probe::Value(value) => Some(value),
            Probe::Nothing => None,
            Probe::Full | Probe::Unclear => self.find_farther(hash, key),
        }
    }

    /// A look into one bucket.
    #[inline(always)]
    fn find_in(&self, words: usize, index: usize, hash: u32, key: &impl Fn(usize) -> u64) -> Probe {
        let tag = u64::from(hash.max(1));
        let bucket = self.bucket(words, index);
        // SAFETY: every bucket begins with a slot.
        let first = unsafe { &*bucket }.load(Ordering::Acquire);
        let (slot, meta) = if words <= PAIRED {
            // SAFETY: with keys of at most three words, a bucket has two slots of four words.
            let second = unsafe { &*bucket.add(4) }.load(Ordering::Acquire);
            // Which of the two it is cannot be foreseen. A single question for both: asked for each, the compiler makes branches of it.
            let is_first = first >> 32 == tag;
            let offset = select_unpredictable(is_first, 0, 4);
            // SAFETY: as above.
            (unsafe { bucket.add(offset) }, select_unpredictable(is_first, first, second))
        } else {
            (bucket, first)
        };
        if meta >> 32 == tag {
            // SAFETY: a slot has `words + 1` words.
            let word = |i: usize| unsafe { &*slot.add(1 + i) }.load(Ordering::Relaxed);
            let differs = (0..words).fold(0, |differs, i| differs | (word(i) ^ key(i)));
            if differs == 0 && meta & VALUE != 0 {
                return Probe::Value((meta & VALUE) as u32 - 1);
            }
            return Probe::Unclear;
        }
        if first & OVERFLOW == 0 { Probe::Nothing } else { Probe::Full }
    }

    /// The same in all buckets, one by one.
    #[cold]
    #[inline(never)]
    fn find_farther(&self, hash: u32, key: impl Fn(usize) -> u64) -> Option<u32> {
        let position = self.position(hash, &key)?;
        // Acquire: with the value comes what was written before it.
        ((self.word(position.0).load(Ordering::Acquire) & VALUE) as u32).checked_sub(1)
    }

    fn word(&self, position: usize) -> &AtomicU64 {
        &self.lines[position / 8].0[position % 8]
    }

    /// First words of the slots of a bucket.
    fn slots_of(&self, index: usize) -> impl Iterator<Item = usize> + use<> {
        let first = ((index & self.mask) << self.shift) * 8;
        [Some(first), self.pairs.then_some(first + 4)].into_iter().flatten()
    }

    /// Where a key lies, with a value or without.
    pub(super) fn position(&self, hash: u32, key: impl Fn(usize) -> u64) -> Option<Position> {
        let tag = u64::from(hash.max(1));
        for distance in 0..MAX_PROBE {
            let mut first = None;
            for slot in self.slots_of(probe(hash, distance)) {
                let meta = self.word(slot).load(Ordering::Acquire);
                first = first.or(Some(meta));
                let same = |i: usize| self.word(slot + 1 + i).load(Ordering::Relaxed) == key(i);
                if meta >> 32 == tag && (0..self.words).all(same) {
                    return Some(Position(slot));
                }
            }
            if first.is_none_or(|first| first & OVERFLOW == 0) {
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

    /// Puts in a key if it is quickly clear that it is not there and where there is room; writer only. Without a branch on which of
    /// two slots is free, so that insertions in a row wait for memory together and not one after the other.
    #[inline(always)]
    pub(super) fn insert_at_once(&self, words: usize, hash: u32, key: impl Fn(usize) -> u64, value: u32) -> bool {
        debug_assert_eq!(words, self.words);
        let tag = u64::from(hash.max(1));
        let bucket = self.bucket(words, hash as usize);
        // SAFETY: every bucket begins with a slot.
        let first = unsafe { &*bucket }.load(Ordering::Relaxed);
        let is_free = first == 0;
        let (slot, possible) = if words <= PAIRED {
            // SAFETY: with keys of at most three words, a bucket has two slots of four words.
            let second = unsafe { &*bucket.add(4) }.load(Ordering::Relaxed);
            let offset = if is_free { 0 } else { 4 };
            let other = (first >> 32 != tag) & (first & OVERFLOW == 0) & (second >> 32 != tag);
            // SAFETY: as above.
            (unsafe { bucket.add(offset) }, other & (is_free | (second == 0)))
        } else {
            (bucket, is_free)
        };
        if possible {
            self.note(hash);
            for i in 0..words {
                // SAFETY: a slot has `words + 1` words.
                unsafe { &*slot.add(1 + i) }.store(key(i), Ordering::Relaxed);
            }
            // SAFETY: the slot. Release: who sees the tag sees the key.
            unsafe { &*slot }.store(tag << 32 | (u64::from(value) + 1), Ordering::Release);
        }
        possible
    }

    /// Puts in a key that is not there. Writer only.
    pub(super) fn insert(&self, hash: u32, key: &[u64], value: u32) -> Result<Position, Full> {
        debug_assert!(key.len() == self.words && value <= MAX_VALUE);
        let tag = u64::from(hash.max(1)) << 32;
        for distance in 0..MAX_PROBE {
            for slot in self.slots_of(probe(hash, distance)) {
                let meta = self.word(slot).load(Ordering::Relaxed);
                if meta & !OVERFLOW != 0 {
                    continue;
                }
                self.note(hash);
                for (i, word) in key.iter().enumerate() {
                    self.word(slot + 1 + i).store(*word, Ordering::Relaxed);
                }
                for passed in 0..distance {
                    let first = self.word(((probe(hash, passed) & self.mask) << self.shift) * 8);
                    first.store(first.load(Ordering::Relaxed) | OVERFLOW, Ordering::Release);
                }
                // Release: who sees the tag sees the key.
                self.word(slot).store(meta | tag | (u64::from(value) + 1), Ordering::Release);
                return Ok(Position(slot));
            }
        }
        Err(Full)
    }

    /// The bucket of a position.
    pub(super) fn bucket_of(&self, position: Position) -> usize {
        (position.0 / 8) >> self.shift
    }

    /// Keys of some buckets with their values. Writer only.
    pub(super) fn for_each(&self, buckets: Range<usize>, mut each: impl FnMut(&[u64], u32)) {
        let key = &mut [0; WORDS][..self.words];
        for index in buckets {
            for slot in self.slots_of(index) {
                if let Some(value) = self.get(Position(slot)) {
                    for (i, word) in key.iter_mut().enumerate() {
                        *word = self.word(slot + 1 + i).load(Ordering::Relaxed);
                    }
                    each(key, value);
                }
            }
        }
    }

    /// A table with the same keys and hashes and room for `capacity`, or more if they do not fit.
    pub(super) fn rebuilt(&self, mut capacity: usize) -> Result<Self, Full> {
        /// How often the room is doubled for keys that meet in spite of it: so many keys have one and the same hash.
        const TRIES: usize = 6;
        for _ in 0..TRIES {
            let next = self.like(capacity);
            let mut full = false;
            self.for_each(0..self.buckets(), |key, value| {
                full |= !full && next.insert(next.hash(key), key, value).is_err();
            });
            if !full {
                return Ok(next);
            }
            capacity *= 2;
        }
        Err(Full)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn some_hash() -> Hash {
        Hash::Pairs(Arc::new(Secret::new()))
    }

    #[test]
    fn keys_with_equal_hashes_are_told_apart() {
        let table = SlotTable::new(2, 1000, some_hash());
        for i in 0..5 {
            table.insert(7, &[i, 0], i as u32).unwrap();
        }
        for i in 0..5 {
            assert_eq!(table.find(2, 7, |word| [i, 0][word]), Some(i as u32));
        }
        assert_eq!(table.find(2, 7, |word| [5, 0][word]), None);
    }

    #[test]
    fn a_neighbourhood_that_is_full_refuses_and_is_bounded() {
        let table = SlotTable::new(2, 1000, some_hash());
        let fits = (0..1000).take_while(|&i| table.insert(5, &[i, 0], 1).is_ok()).count();
        assert_eq!(fits, 2 * MAX_PROBE);
        assert_eq!(table.find(2, 5, |i| [63, 0][i]), Some(1));
        assert_eq!(table.find(2, 5, |i| [64, 0][i]), None);
        let next = table.rebuilt(1000).unwrap();
        let hash = next.hash(&[63, 0]);
        assert_eq!(next.find(2, hash, |i| [63, 0][i]), Some(1));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    /// While the writer puts in, removes and revives keys of one bucket, a reader finds a key not at all or with a value of its own.
    #[test]
    fn readers_never_see_the_value_of_another_key() {
        loom::model(|| {
            let table = Arc::new(SlotTable::new(2, 8, Hash::Pairs(Arc::new(Secret::new()))));
            let reader = {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    for (key, own) in [([1, 1], [10, 11]), ([2, 2], [20, 20])] {
                        // The same hash for both: the key alone tells them apart.
                        let found = table.find(2, 3, |i| key[i]);
                        assert!(found.is_none_or(|value| own.contains(&value)), "{found:?}");
                    }
                })
            };
            let position = table.insert(3, &[1, 1], 10).unwrap();
            table.insert(3, &[2, 2], 20).unwrap();
            table.set(position, None);
            table.set(position, Some(11));
            reader.join().unwrap();
            assert_eq!((table.find(2, 3, |_| 1), table.find(2, 3, |_| 2)), (Some(11), Some(20)));
        });
    }
}
