// UNSAFETY: leaves out the bounds check of a masked index, which is a good part of a lookup.
#![allow(unsafe_code)]

//! Hash tables of keys of a fixed number of words: one writer, readers without locks.

use std::hint::select_unpredictable;
use std::ops::Range;
use std::sync::Arc;

use crate::sync::{AtomicU64, Ordering};
use crate::table::prefetch;

use super::hash::Secret;
use super::memory::{Line, Pages, Zeroed};
use super::words::WORDS;

/// Buckets that a search looks at, at most: bounds what a lookup costs whatever the keys.
const MAX_PROBE: usize = 32;

/// Half of a word that belongs to a slot: it has a key, and above the zero of "no value" the value plus one.
const USED: u32 = 1 << 31;
const VALUE: u32 = USED - 1;
/// Of a bucket's last word: a key was put into a later bucket because this one was full.
const OVERFLOW: u64 = 1 << 32;
/// The word with the first slot's value, and the one with those of the two others.
const LAST: usize = 7;
const OTHERS: usize = 6;

/// Words of the longest key of which several fit a line.
const SHORT: usize = 3;

/// Slots of a bucket with keys of so many words.
const fn slots_of(words: usize) -> usize {
    match words {
        0..=2 => 3,
        SHORT => 2,
        _ => 1,
    }
}

/// Where in its bucket a slot has a word of its key.
#[inline(always)]
const fn place(words: usize, slot: usize, i: usize) -> usize {
    match words {
        0..=2 => slot * 2 + i,
        SHORT => slot * SHORT + i,
        // Around the value.
        _ => i + (i >= LAST) as usize,
    }
}

/// The key, read once where it is compared with that of several slots: between loads that are atomic the compiler would put it together
/// anew for each of them.
#[inline(always)]
fn read_once(words: usize, key: &impl Fn(usize) -> u64) -> [u64; SHORT] {
    let mut read = [0; SHORT];
    if slots_of(words) > 1 {
        for (i, word) in read.iter_mut().enumerate().take(words) {
            *word = key(i);
        }
    }
    read
}

/// Where in its bucket a slot has its value: index of the word, and bits below.
#[inline(always)]
const fn value_at(slot: usize) -> (usize, u32) {
    // Calculated: an insertion does not know the slot in advance.
    (LAST - (slot > 0) as usize, (slot / 2 * 32) as u32)
}

/// Keys up to which a table is small: its filter stays in the first-level cache, where that of a large one would cost what the table does.
const SMALL: usize = 4096;
/// Bits of the filter for each key that there is room for: one in sixteen searches for another key goes on behind it.
const FILTER_BITS: usize = 16;

/// Largest value.
pub(super) const MAX_VALUE: u32 = VALUE - 1;

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
}

/// The neighbourhood of the key is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Where a key lies; stays true for the life of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    line: usize,
    slot: usize,
}

/// A bucket is one cache line with three keys of up to two words or two of three words, or as many lines as one longer key takes. Its
/// last words hold a half for each slot: whether it has a key, and the value. Slots are taken in order.
///
/// **Why three to a line:** a table with one key for each bucket finds 98 of 100 keys in the line that was asked for, where two to a
/// line would find 90; what the others cost is a branch that goes wrong and another wait for memory. There is no room for tags, and no need: all
/// keys of the line are compared.
///
/// **Why a reader is never led astray:** a slot's key is written once, before the half that says so. Removal only clears the value;
/// the slot stays that key's until the writer makes the next table. So a reader that finds the half and the key reads a value of that
/// key.
#[derive(Debug)]
pub(super) struct SlotTable {
    lines: Zeroed<Line>,
    /// Of small tables, a bit for each hash that was ever put in: most searches end there. Empty: there is none.
    filter: Box<[AtomicU64]>,
    words: usize,
    /// Lines of a bucket, as a power of two.
    shift: u32,
    mask: usize,
    hash: Hash,
    /// Slots that may be used before the table should grow.
    room: usize,
}

/// The memory of a table that nobody needs, to be given back bit by bit.
#[derive(Debug)]
pub(super) struct Remains(Zeroed<Line>);

impl Remains {
    /// Gives back so little of it that it takes no time to speak of. False: the rest can go at once.
    pub(super) fn dissolve(&mut self) -> bool {
        /// 256 KiB: 64 small pages.
        const LINES: usize = (256 << 10) / size_of::<Line>();
        self.0.truncate(self.0.len().saturating_sub(LINES))
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

impl SlotTable {
    /// For keys of `words` words, and room for `capacity` of them.
    pub(super) fn new(words: usize, capacity: usize, hash: Hash) -> Self {
        Self::with_pages(words, capacity, hash, Pages::Huge)
    }

    fn with_pages(words: usize, capacity: usize, hash: Hash, pages: Pages) -> Self {
        // Small tables of longer keys are kept sparse: there are many of them, each looked into for every new flow, and a bucket that is
        // full costs a branch that goes wrong.
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

    /// The same, whose memory the system provides bit by bit: nobody waits for the zeros of a huge page.
    pub(super) fn like_gradually(&self, capacity: usize) -> Self {
        Self::with_pages(self.words, capacity, self.hash.clone(), Pages::Gradual)
    }

    /// Has the system provide all of the memory now, rather than in the middle of insertions.
    pub(super) fn touch(&self) {
        self.lines.touch(0..self.lines.len());
    }

    /// The same for what some buckets of a table with `of` of them are copied to.
    pub(super) fn touch_for(&self, buckets: Range<usize>, of: usize) {
        for start in (buckets.start..self.buckets()).step_by(of) {
            self.lines.touch(start << self.shift..(start + buckets.len()) << self.shift);
        }
    }

    /// The memory is in use from end to end: the system may make huge pages of it when it has time.
    pub(super) fn settle(&self) {
        self.lines.ask_for_huge_pages();
    }

    /// What is left of a table that nobody looks into any more.
    pub(super) fn into_remains(self) -> Remains {
        Remains(self.lines)
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
        let shift = if words <= SHORT { 0 } else { self.shift };
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
        if !self.filter.is_empty() {
            self.note_in_filter(hash);
        }
    }

    #[inline(never)]
    fn note_in_filter(&self, hash: u32) {
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

    /// A word of a bucket.
    ///
    /// # Safety
    /// The bucket is one of this table, and has such a word.
    #[inline(always)]
    unsafe fn word(&self, bucket: *const AtomicU64, i: usize) -> &AtomicU64 {
        // SAFETY: the caller's; the table keeps its lines.
        unsafe { &*bucket.add(i) }
    }

    /// Bits in which the key of a slot differs from another.
    ///
    /// # Safety
    /// As of [`Self::word`], for all words of the key.
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
        // A plain loop: of iterators and closures the compiler makes calls here.
        for i in 0..words {
            // SAFETY: the caller's.
            let word = unsafe { self.word(bucket, place(words, slot, i)) }.load(Ordering::Relaxed);
            differs |= word ^ if several { read[i] } else { key(i) };
        }
        differs
    }

    /// The value of a key, `None` if it is not there; `key` gives its words, of which there are `words`: a constant where the caller
    /// knows it, so that nothing is left of the loops.
    #[inline(always)]
    pub(super) fn find(&self, words: usize, hash: u32, key: impl Fn(usize) -> u64) -> Option<u32> {
        debug_assert_eq!(words, self.words);
        match self.find_in(words, probe(hash, 0), &key) {
            Probe::Value(value) => Some(value),
            Probe::Nothing => None,
            Probe::Full => match self.find_in(words, probe(hash, 1), &key) {
                Probe::Value(value) => Some(value),
                Probe::Nothing => None,
                Probe::Full => self.find_farther(hash, key),
            },
        }
    }

    /// A look into one bucket.
    #[inline(always)]
    fn find_in(&self, words: usize, index: usize, key: &impl Fn(usize) -> u64) -> Probe {
        let bucket = self.bucket(words, index);
        // SAFETY: a bucket has eight words at least, and as many as its keys need.
        let word = |i: usize| unsafe { self.word(bucket, i) };
        let read = read_once(words, key);
        // Acquire: with the half that says so comes the key, with the value what was written before it.
        let last = word(LAST).load(Ordering::Acquire);
        let slots = slots_of(words);
        let others = if slots > 1 { word(OTHERS).load(Ordering::Acquire) } else { 0 };
        // Which of them it is cannot be foreseen: no branch. No two slots have one key, and unused ones a half of zero.
        let of = |slot: usize, half: u32| {
            // SAFETY: a slot of the bucket.
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

    /// The same in all buckets, one by one.
    #[cold]
    #[inline(never)]
    fn find_farther(&self, hash: u32, key: impl Fn(usize) -> u64) -> Option<u32> {
        self.get(self.position(hash, &key)?)
    }

    /// Index of the first line of a bucket.
    fn line(&self, index: usize) -> usize {
        (index & self.mask) << self.shift
    }

    fn at(&self, line: usize, i: usize) -> &AtomicU64 {
        &self.lines[line + i / 8].0[i % 8]
    }

    /// What a slot's half says.
    fn half(&self, Position { line, slot }: Position) -> u32 {
        let (word, shift) = value_at(slot);
        // Acquire: see `find_in`.
        (self.at(line, word).load(Ordering::Acquire) >> shift) as u32
    }

    /// Writer only.
    fn set_half(&self, Position { line, slot }: Position, half: u32) {
        let (word, shift) = value_at(slot);
        let word = self.at(line, word);
        let rest = word.load(Ordering::Relaxed) & !(u64::from(u32::MAX) << shift);
        // Release: who sees the half sees the key, and what was written before the value.
        word.store(rest | u64::from(half) << shift, Ordering::Release);
    }

    /// Positions in a bucket.
    fn positions(&self, index: usize) -> impl Iterator<Item = Position> + use<> {
        let line = self.line(index);
        (0..slots_of(self.words)).map(move |slot| Position { line, slot })
    }

    /// Where a key lies, with a value or without.
    pub(super) fn position(&self, hash: u32, key: impl Fn(usize) -> u64) -> Option<Position> {
        for distance in 0..MAX_PROBE {
            let index = probe(hash, distance);
            for position in self.positions(index) {
                let same = |i: usize| {
                    self.at(position.line, place(self.words, position.slot, i)).load(Ordering::Relaxed) == key(i)
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

    /// The value at a position.
    pub(super) fn get(&self, position: Position) -> Option<u32> {
        (self.half(position) & VALUE).checked_sub(1)
    }

    /// Replaces or removes the value at a position. Writer only.
    pub(super) fn set(&self, position: Position, value: Option<u32>) {
        self.set_half(position, USED | value.map_or(0, |value| value + 1));
    }

    /// Puts in a key if it is quickly clear that it is not there and where there is room; writer only. Without a branch on which of
    /// the slots is free, and in few instructions, so that insertions in a row wait for memory together and not one after the other.
    #[inline(always)]
    pub(super) fn insert_at_once(&self, words: usize, hash: u32, key: impl Fn(usize) -> u64, value: u32) -> bool {
        debug_assert_eq!(words, self.words);
        let bucket = self.bucket(words, hash as usize);
        // SAFETY: as in `find_in`.
        let word = |i: usize| unsafe { self.word(bucket, i) };
        let read = read_once(words, &key);
        let last = word(LAST).load(Ordering::Relaxed);
        let slots = slots_of(words);
        let others = if slots > 1 { word(OTHERS).load(Ordering::Relaxed) } else { 0 };
        let halves = [last as u32, others as u32, (others >> 32) as u32];
        // They are taken in order: if the last is free, nothing is in a later bucket either.
        if halves[slots - 1] != 0 {
            return false;
        }
        for slot in 0..slots {
            // SAFETY: a slot of the bucket.
            let differs = unsafe { self.differs(bucket, words, slot, (&read, &key)) };
            // A key of zeros is like that of a free slot, and not put in here.
            if differs == 0 {
                return false;
            }
        }
        self.note(hash);
        let used = halves[..slots - 1].iter().map(|half| usize::from(*half != 0)).sum();
        for i in 0..words {
            word(place(words, used, i)).store(key(i), Ordering::Relaxed);
        }
        let (at, shift) = value_at(used);
        let rest = select_unpredictable(used == 0, last, others);
        // Release: who sees the half sees the key.
        word(at).store(rest | u64::from(USED | (value + 1)) << shift, Ordering::Release);
        true
    }

    /// Puts in a key that is not there. Writer only.
    pub(super) fn insert(&self, hash: u32, key: &[u64], value: u32) -> Result<Position, Full> {
        debug_assert!(key.len() == self.words && value <= MAX_VALUE);
        for distance in 0..MAX_PROBE {
            let free = self.positions(probe(hash, distance)).find(|position| self.half(*position) == 0);
            let Some(position) = free else { continue };
            self.note(hash);
            for (i, word) in key.iter().enumerate() {
                self.at(position.line, place(self.words, position.slot, i)).store(*word, Ordering::Relaxed);
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

    /// The bucket of a position.
    pub(super) fn bucket_of(&self, position: Position) -> usize {
        position.line >> self.shift
    }

    /// Keys of some buckets with their values. Writer only.
    pub(super) fn for_each(&self, buckets: Range<usize>, mut each: impl FnMut(&[u64], u32)) {
        let key = &mut [0; WORDS][..self.words];
        for position in buckets.flat_map(|index| self.positions(index)) {
            if let Some(value) = self.get(position) {
                for (i, word) in key.iter_mut().enumerate() {
                    *word = self.at(position.line, place(self.words, position.slot, i)).load(Ordering::Relaxed);
                }
                each(key, value);
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
