// UNSAFETY: buckets are accessed without a bounds check of the masked index, which would be a large part of a
// lookup.
#![allow(unsafe_code)]

//! Concurrent hash table from keys of a fixed number of words to 31-bit values: one writer, readers without
//! locks.
//!
//! The FDB has a table of its own (`crate::table::HashTable`). Its readers also store a timestamp in the
//! entry that they find. Four of its entries of key, destination and timestamp fill a cache line. Here
//! readers write nothing, and a bucket packs up to three keys with their values. One layout cannot serve both
//! without a cost.

use std::hint::select_unpredictable;
use std::ops::Range;
use std::sync::Arc;

use crate::sync::{AtomicU64, Ordering};
use crate::table::prefetch;

use super::hash_seed::HashSeed;
use super::match_key::WORDS;
use crate::zeroed_memory::{Line, Pages, Zeroed};

/// Maximum number of buckets in a search. It bounds the cost of a lookup for any keys.
const MAX_PROBE: usize = 32;

/// Bit of a slot's half word that marks a used slot. The bits below hold the value plus one; 0: no value.
const USED: u32 = 1 << 31;
const VALUE: u32 = USED - 1;
/// Bit in a bucket's last word: a key was inserted into a later bucket because this one was full.
const OVERFLOW: u64 = 1 << 32;
/// Index of the word with the value of the first slot, and of the word with the values of the other two
/// slots.
const LAST: usize = 7;
const OTHERS: usize = 6;

/// Longest key, in words, of which several fit into a line.
const SHORT: usize = 3;

/// Returns the number of slots of a bucket with keys of this many words.
const fn slots_of(words: usize) -> usize {
    match words {
        0..=2 => 3,
        SHORT => 2,
        _ => 1,
    }
}

/// Returns the index in the bucket of word `i` of a slot's key.
#[inline(always)]
const fn key_offset(words: usize, slot: usize, i: usize) -> usize {
    match words {
        0..=2 => slot * 2 + i,
        SHORT => slot * SHORT + i,
        // A long key surrounds the value word.
        _ => i + (i >= LAST) as usize,
    }
}

/// Reads the key once if it is compared with several slots. Otherwise the compiler would rebuild the key for
/// each slot, because it does not merge code across atomic loads.
#[inline(always)]
fn load_key(words: usize, key: &impl Fn(usize) -> u64) -> [u64; SHORT] {
    let mut read = [0; SHORT];
    if slots_of(words) > 1 {
        for (i, word) in read.iter_mut().enumerate().take(words) {
            *word = key(i);
        }
    }
    read
}

/// Returns the index of the word that holds a slot's value, and the shift of the value in it.
#[inline(always)]
const fn value_offset(slot: usize) -> (usize, u32) {
    // The result is calculated without a branch, because an insertion does not know the slot in advance.
    (LAST - (slot > 0) as usize, (slot / 2 * 32) as u32)
}

/// Largest capacity of a small table. Its filter stays in the first-level cache. The filter of a large table
/// would cost as much as the table.
const SMALL: usize = 4096;
/// Filter bits per key of the capacity. One in sixteen searches for an absent key passes the filter.
const FILTER_BITS: usize = 16;

/// Largest value.
pub(crate) const MAX_VALUE: u32 = VALUE - 1;

/// Hash function of a table.
#[derive(Clone, Debug)]
pub(crate) enum Hash {
    /// Hash of the words of the key.
    Pairs(Arc<HashSeed>),
    /// Sum of products. The slice holds the index of each key word in the packet's vector.
    Sums(Arc<HashSeed>, Arc<[u8]>),
}

/// Returns the contribution of one word to a hash that is a sum of products.
#[inline(always)]
pub(crate) fn product(factors: [u64; 2], word: u64) -> u64 {
    let (low, high) = (word & 0xffff_ffff, word >> 32);
    factors[0].wrapping_mul(low).wrapping_add(factors[1].wrapping_mul(high))
}

/// Returns the bucket to search after `distance` others. The second bucket is the other line of the same 128
/// bytes, which processors fetch together.
#[inline(always)]
fn probe(hash: u32, distance: usize) -> usize {
    (hash as usize + (distance & !1)) ^ (distance & 1)
}

/// Result of searching one bucket.
enum Probe {
    Value(u32),
    Nothing,
    /// The key is not in this bucket, but may be in the next one.
    Full,
}

/// All buckets of a key's probe sequence are full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// Position of a key, valid for the life of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    line: usize,
    slot: usize,
}

/// A concurrent hash table.
///
/// A bucket is one cache line with three keys of up to two words or two keys of three words. A longer key
/// takes one or more lines. The last words of a bucket hold a half word for each slot: a used bit and the
/// value. Slots are filled in order.
///
/// **Why three keys per line:** a table with as many buckets as keys finds 98 % of its keys in the first
/// line. With two keys per line it would be 90 %. Each of the others costs a mispredicted branch and another
/// cache miss. There is no room for tags, and no need, because all keys of the line are compared.
///
/// **Why concurrent reads are consistent:** a slot's key is written once, before its half word. Removal
/// clears only the value. The slot keeps its key until the writer builds the next table. So a reader that
/// finds the used bit and the key reads a value of that key.
#[derive(Debug)]
pub(crate) struct ConcurrentTable {
    lines: Zeroed<Line>,
    /// Filter of small tables: one bit per inserted hash. Most searches for absent keys end here. It is empty
    /// for large tables.
    filter: Box<[AtomicU64]>,
    words: usize,
    /// Binary logarithm of the lines per bucket.
    shift: u32,
    mask: usize,
    hash: Hash,
    /// Slots that may be used before the table should be resized.
    room: usize,
}

/// Memory of a table that is not used any more, to be freed in small steps.
#[derive(Debug)]
pub(crate) struct RetiredMemory(Zeroed<Line>);

impl RetiredMemory {
    /// Frees a small part of the memory. Returns false if the rest can be freed at once.
    pub(crate) fn release_some(&mut self) -> bool {
        /// 256 KiB: 64 small pages.
        const LINES: usize = (256 << 10) / size_of::<Line>();
        self.0.truncate(self.0.len().saturating_sub(LINES))
    }

    /// Returns the memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

impl ConcurrentTable {
    /// Creates a table for keys of `words` words, with room for `capacity` of them.
    pub(crate) fn new(words: usize, capacity: usize, hash: Hash) -> Self {
        Self::with_pages(words, capacity, hash, Pages::Huge)
    }

    fn with_pages(words: usize, capacity: usize, hash: Hash, pages: Pages) -> Self {
        // Small tables of longer keys are kept sparse. There are many of them, each is searched for every new
        // flow, and a full bucket costs a mispredicted branch.
        let small = capacity <= SMALL;
        let buckets_for_a_key = match slots_of(words) {
            3 => 1,
            2 if !small => 1,
            1 if small => 4,
            _ => 2,
        };
        let room = capacity.max(8).next_power_of_two();
        let (buckets, lines) = (room * buckets_for_a_key, (words + 1).div_ceil(8).next_power_of_two());
        Self {
            lines: Zeroed::new(buckets * lines, pages),
            filter: (0..if small { room * FILTER_BITS / 64 } else { 0 }).map(|_| AtomicU64::new(0)).collect(),
            words,
            shift: lines.trailing_zeros(),
            mask: buckets - 1,
            hash,
            room,
        }
    }

    /// Returns the number of slots, used by present or removed keys, beyond which the table should be
    /// resized.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    pub(crate) fn buckets(&self) -> usize {
        self.mask + 1
    }

    /// Creates an empty table with the same key length and hash.
    pub(crate) fn like(&self, capacity: usize) -> Self {
        Self::new(self.words, capacity, self.hash.clone())
    }

    /// Sets another hash function. The table must be empty.
    pub(crate) fn with_hash(mut self, hash: Hash) -> Self {
        self.hash = hash;
        self
    }

    /// Creates an empty table like this one in small pages, so that no insertion waits until a huge page is
    /// zeroed.
    pub(crate) fn like_with_small_pages(&self, capacity: usize) -> Self {
        Self::with_pages(self.words, capacity, self.hash.clone(), Pages::Small)
    }

    /// Prefaults all memory of the table, so that insertions cause no page faults.
    pub(crate) fn prefault(&self) {
        self.lines.prefault(0..self.lines.len());
    }

    /// Prefaults the memory that these buckets of a table with `of` buckets are copied to.
    pub(crate) fn prefault_for(&self, buckets: Range<usize>, of: usize) {
        for start in (buckets.start..self.buckets()).step_by(of) {
            self.lines.prefault(start << self.shift..(start + buckets.len()) << self.shift);
        }
    }

    /// Advises the kernel to use huge pages, because the whole memory is in use now.
    pub(crate) fn request_huge_pages(&self) {
        self.lines.advise_huge_pages();
    }

    /// Returns the memory of a table without readers.
    pub(crate) fn into_retired_memory(self) -> RetiredMemory {
        RetiredMemory(self.lines)
    }

    /// Returns the memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>() + size_of_val(&*self.filter)
    }

    /// Returns the hash of a key, which the other methods take.
    pub(crate) fn hash(&self, key: &[u64]) -> u32 {
        match &self.hash {
            Hash::Pairs(seed) => seed.hash_row(key),
            Hash::Sums(seed, words) => {
                let products = words.iter().zip(key).map(|(&word, key)| product(seed.factors(word), *key));
                seed.sum(products.fold(0, u64::wrapping_add))
            }
        }
    }

    #[inline(always)]
    fn bucket(&self, words: usize, index: usize) -> *const AtomicU64 {
        // A short key has one line per bucket. The constant lets the compiler remove the shift.
        let shift = if words <= SHORT { 0 } else { self.shift };
        let index = (index & self.mask) << shift;
        debug_assert!(index < self.lines.len());
        // SAFETY: `lines` has `(mask + 1) << shift` elements. For short keys `self.shift` is 0 as well. So
        // the masked and shifted index is in bounds.
        unsafe { self.lines.as_ptr().add(index) }.cast()
    }

    /// Returns true if a key with this hash may be in the table.
    #[inline(always)]
    pub(crate) fn may_contain(&self, hash: u32) -> bool {
        let bit = hash as usize & (self.filter.len() * 64).wrapping_sub(1);
        self.filter.get(bit / 64).is_none_or(|word| word.load(Ordering::Acquire) >> (bit % 64) & 1 != 0)
    }

    /// Adds a hash to the filter. Only the writer may call this, before the key becomes visible.
    #[inline(always)]
    fn add_to_filter(&self, hash: u32) {
        if !self.filter.is_empty() {
            self.set_filter_bit(hash);
        }
    }

    #[inline(never)]
    fn set_filter_bit(&self, hash: u32) {
        let bit = hash as usize & (self.filter.len() * 64).wrapping_sub(1);
        if let Some(word) = self.filter.get(bit / 64) {
            word.store(word.load(Ordering::Relaxed) | 1 << (bit % 64), Ordering::Release);
        }
    }

    /// Prefetches the line where a search starts.
    #[inline(always)]
    pub(crate) fn prefetch(&self, words: usize, hash: u32) {
        // SAFETY: `bucket` returns a pointer to the first word of a bucket inside `self.lines`, which live as
        // long as `self`.
        prefetch(unsafe { &*self.bucket(words, hash as usize) });
    }

    /// Returns a word of a bucket.
    ///
    /// # Safety
    /// `bucket` must be a pointer that [`Self::bucket`] of this table returned, and the bucket must have more
    /// than `i` words.
    #[inline(always)]
    unsafe fn word(&self, bucket: *const AtomicU64, i: usize) -> &AtomicU64 {
        // SAFETY: the caller guarantees that `bucket` points to a bucket of this table with more than `i`
        // words. The lines live as long as `self` and are only accessed as atomics.
        unsafe { &*bucket.add(i) }
    }

    /// Returns the bits in which the key of a slot differs from another key; 0 if they are equal.
    ///
    /// # Safety
    /// `bucket` must be a pointer that [`Self::bucket`] of this table returned, `words` the key length of the
    /// table, and `slot` less than `slots_of(words)`.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "long keys are not in `read`")]
    unsafe fn differs(
        &self,
        bucket: *const AtomicU64,
        words: usize,
        slot: usize,
        (read, key): (&[u64; SHORT], &impl Fn(usize) -> u64),
    ) -> u64 {
        let several = slots_of(words) > 1;
        let mut differs = 0;
        // A plain loop, because the compiler does not inline iterators and closures here.
        for i in 0..words {
            // SAFETY: the caller guarantees that `bucket` is a bucket of this table and that `slot` exists.
            // `key_offset` gives words inside the bucket for all words of its key.
            let word = unsafe { self.word(bucket, key_offset(words, slot, i)) }.load(Ordering::Relaxed);
            differs |= word ^ if several { read[i] } else { key(i) };
        }
        differs
    }

    /// Returns the value of a key, or `None`. `key` returns the words of the key, of which there are `words`.
    /// Callers that know `words` pass a constant, so that the compiler unrolls the loops.
    #[inline(always)]
    pub(crate) fn find(&self, words: usize, hash: u32, key: impl Fn(usize) -> u64) -> Option<u32> {
        debug_assert_eq!(words, self.words);
        match self.find_in(words, probe(hash, 0), &key) {
            Probe::Value(value) => Some(value),
            Probe::Nothing => None,
            Probe::Full => match self.find_in(words, probe(hash, 1), &key) {
                Probe::Value(value) => Some(value),
                Probe::Nothing => None,
                Probe::Full => self.find_slow(hash, key),
            },
        }
    }

    /// Searches one bucket.
    #[inline(always)]
    fn find_in(&self, words: usize, index: usize, key: &impl Fn(usize) -> u64) -> Probe {
        let bucket = self.bucket(words, index);
        // SAFETY: `bucket` is a bucket of this table. A bucket has at least eight words, and only `LAST` and
        // `OTHERS` are read.
        let word = |i: usize| unsafe { self.word(bucket, i) };
        let read = load_key(words, key);
        // Acquire: the used bit makes the key visible, and the value makes everything visible that was
        // written before it.
        let last = word(LAST).load(Ordering::Acquire);
        let slots = slots_of(words);
        let others = if slots > 1 { word(OTHERS).load(Ordering::Acquire) } else { 0 };
        // There is no branch on the slot, because it would not be predictable. No two slots have the same
        // key, and unused slots have a half word of zero.
        let of = |slot: usize, half: u32| {
            // SAFETY: `bucket` is a bucket of this table with keys of `words` words, and `slot` is less than
            // `slots_of(words)`.
            let differs = unsafe { self.differs(bucket, words, slot, (&read, key)) };
            select_unpredictable(differs == 0, half, 0)
        };
        let mut half = of(0, last as u32);
        if slots > 1 {
            half |= of(1, others as u32);
        }
        if slots > 2 {
            half |= of(2, (others >> 32) as u32);
        }
        match half & VALUE {
            0 if half == 0 && last & OVERFLOW != 0 => Probe::Full,
            0 => Probe::Nothing,
            value => Probe::Value(value - 1),
        }
    }

    /// Searches all buckets of the probe sequence, one by one.
    #[cold]
    #[inline(never)]
    fn find_slow(&self, hash: u32, key: impl Fn(usize) -> u64) -> Option<u32> {
        self.get(self.position(hash, &key)?)
    }

    /// Returns the index of the first line of a bucket.
    fn line(&self, index: usize) -> usize {
        (index & self.mask) << self.shift
    }

    fn at(&self, line: usize, i: usize) -> &AtomicU64 {
        &self.lines[line + i / 8].0[i % 8]
    }

    /// Returns the half word of a slot.
    fn half(&self, Position { line, slot }: Position) -> u32 {
        let (word, shift) = value_offset(slot);
        // Acquire: the used bit makes the key visible, and the value makes everything visible that was
        // written before it.
        (self.at(line, word).load(Ordering::Acquire) >> shift) as u32
    }

    /// Writes the half word of a slot. Writer only.
    fn set_half(&self, Position { line, slot }: Position, half: u32) {
        let (word, shift) = value_offset(slot);
        let word = self.at(line, word);
        let rest = word.load(Ordering::Relaxed) & !(u64::from(u32::MAX) << shift);
        // Release: a reader that sees the half word sees the key and what was written before the value.
        word.store(rest | u64::from(half) << shift, Ordering::Release);
    }

    /// Returns the positions in a bucket.
    fn positions(&self, index: usize) -> impl Iterator<Item = Position> + use<> {
        let line = self.line(index);
        (0..slots_of(self.words)).map(move |slot| Position { line, slot })
    }

    /// Returns the position of a key, with or without a value.
    pub(crate) fn position(&self, hash: u32, key: impl Fn(usize) -> u64) -> Option<Position> {
        for distance in 0..MAX_PROBE {
            let index = probe(hash, distance);
            for position in self.positions(index) {
                let same = |i: usize| {
                    self.at(position.line, key_offset(self.words, position.slot, i)).load(Ordering::Relaxed) == key(i)
                };
                if self.half(position) != 0 && (0..self.words).all(same) {
                    return Some(position);
                }
            }
            if self.at(self.line(index), LAST).load(Ordering::Acquire) & OVERFLOW == 0 {
                return None;
            }
        }
        None
    }

    /// Returns the value at a position.
    pub(crate) fn get(&self, position: Position) -> Option<u32> {
        (self.half(position) & VALUE).checked_sub(1)
    }

    /// Replaces or removes the value at a position. Writer only.
    pub(crate) fn set(&self, position: Position, value: Option<u32>) {
        self.set_half(position, USED | value.map_or(0, |value| value + 1));
    }

    /// Inserts a key if its first bucket has a free slot and shows that the key is absent. Returns false
    /// otherwise. Writer only. There is no branch on the free slot, and few instructions are needed, so that
    /// the cache misses of consecutive insertions overlap.
    #[inline(always)]
    pub(crate) fn try_insert_fast(&self, words: usize, hash: u32, key: impl Fn(usize) -> u64, value: u32) -> bool {
        debug_assert_eq!(words, self.words);
        let bucket = self.bucket(words, hash as usize);
        // SAFETY: `bucket` is a bucket of this table. A bucket has at least eight words, and as many as its
        // keys need; only its keys and value words are accessed.
        let word = |i: usize| unsafe { self.word(bucket, i) };
        let read = load_key(words, &key);
        let last = word(LAST).load(Ordering::Relaxed);
        let slots = slots_of(words);
        let others = if slots > 1 { word(OTHERS).load(Ordering::Relaxed) } else { 0 };
        let halves = [last as u32, others as u32, (others >> 32) as u32];
        // Slots are filled in order. If the last slot is free, no key overflowed into a later bucket.
        if halves[slots - 1] != 0 {
            return false;
        }
        for slot in 0..slots {
            // SAFETY: `bucket` is a bucket of this table with keys of `words` words, and `slot` is less than
            // `slots_of(words)`.
            let differs = unsafe { self.differs(bucket, words, slot, (&read, &key)) };
            // A key of zeros equals that of a free slot, so it is not inserted here.
            if differs == 0 {
                return false;
            }
        }
        self.add_to_filter(hash);
        let used = halves[..slots - 1].iter().map(|half| usize::from(*half != 0)).sum();
        for i in 0..words {
            word(key_offset(words, used, i)).store(key(i), Ordering::Relaxed);
        }
        let (at, shift) = value_offset(used);
        let rest = select_unpredictable(used == 0, last, others);
        // Release: a reader that sees the half word sees the key.
        word(at).store(rest | u64::from(USED | (value + 1)) << shift, Ordering::Release);
        true
    }

    /// Inserts a key that is not in the table. Writer only.
    pub(crate) fn insert(&self, hash: u32, key: &[u64], value: u32) -> Result<Position, Full> {
        debug_assert!(key.len() == self.words && value <= MAX_VALUE);
        for distance in 0..MAX_PROBE {
            let free = self.positions(probe(hash, distance)).find(|position| self.half(*position) == 0);
            let Some(position) = free else { continue };
            self.add_to_filter(hash);
            for (i, word) in key.iter().enumerate() {
                self.at(position.line, key_offset(self.words, position.slot, i)).store(*word, Ordering::Relaxed);
            }
            for passed in 0..distance {
                let last = self.at(self.line(probe(hash, passed)), LAST);
                last.store(last.load(Ordering::Relaxed) | OVERFLOW, Ordering::Release);
            }
            self.set(position, Some(value));
            return Ok(position);
        }
        Err(Full)
    }

    /// Returns the bucket of a position.
    pub(crate) fn bucket_of(&self, position: Position) -> usize {
        position.line >> self.shift
    }

    /// Passes the keys and values of some buckets to `each`. Writer only.
    pub(crate) fn for_each(&self, buckets: Range<usize>, mut each: impl FnMut(&[u64], u32)) {
        let key = &mut [0; WORDS][..self.words];
        for position in buckets.flat_map(|index| self.positions(index)) {
            if let Some(value) = self.get(position) {
                for (i, word) in key.iter_mut().enumerate() {
                    *word = self.at(position.line, key_offset(self.words, position.slot, i)).load(Ordering::Relaxed);
                }
                each(key, value);
            }
        }
    }

    /// Creates a table with the same keys and hash, and with room for `capacity` keys, or more if they do not
    /// fit.
    pub(crate) fn rebuilt(&self, mut capacity: usize) -> Result<Self, Full> {
        /// Number of times that the capacity is doubled because keys collide. After that, too many keys have
        /// the same hash.
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
        Hash::Pairs(Arc::new(HashSeed::new()))
    }

    #[test]
    fn keys_with_equal_hashes_are_distinguished() {
        let table = ConcurrentTable::new(2, 1000, some_hash());
        for i in 0..5 {
            table.insert(7, &[i, 0], i as u32).unwrap();
        }
        for i in 0..5 {
            assert_eq!(table.find(2, 7, |word| [i, 0][word]), Some(i as u32));
        }
        assert_eq!(table.find(2, 7, |word| [5, 0][word]), None);
    }

    #[test]
    fn insertion_fails_when_the_probe_sequence_is_full() {
        let table = ConcurrentTable::new(2, 1000, some_hash());
        let fits = (0..1000).take_while(|&i| table.insert(5, &[i, 0], 1).is_ok()).count();
        assert_eq!(fits, 3 * MAX_PROBE);
        assert_eq!(table.find(2, 5, |i| [95, 0][i]), Some(1));
        assert_eq!(table.find(2, 5, |i| [96, 0][i]), None);
        let next = table.rebuilt(1000).unwrap();
        let hash = next.hash(&[95, 0]);
        assert_eq!(next.find(2, hash, |i| [95, 0][i]), Some(1));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    /// While the writer inserts, removes and restores keys of one bucket, a reader finds a key either not at
    /// all or with its own value.
    #[test]
    fn readers_never_see_the_value_of_another_key() {
        loom::model(|| {
            let table = Arc::new(ConcurrentTable::new(2, 8, Hash::Pairs(Arc::new(HashSeed::new()))));
            let reader = {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    for (key, own) in [([1, 1], [10, 11]), ([2, 2], [20, 20])] {
                        // Both keys have the same hash, so only the key comparison separates them.
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
