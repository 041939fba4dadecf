use std::sync::Arc;

use super::hash_seed::HashSeed;
use super::hash_table::{ConcurrentTable, Full, Hash, MAX_VALUE};
use super::incremental_resize::ResizableTable;

/// A hash table from keys of `N` words to numbers, owned by one thread. It offers the tables of the rule
/// engine to callers with exact keys only.
///
/// ```
/// let mut table = wirepath_pipeline::rules::ExactMatchTable::with_capacity(100);
/// table.insert(&[1, 2], 7);
/// let mut found = [None; 2];
/// table.find_batch(&[[1, 2], [2, 1]], &mut found);
/// assert_eq!(found, [Some(7), None]);
/// ```
#[derive(Debug)]
pub struct ExactMatchTable<const N: usize> {
    table: ResizableTable,
    seed: Arc<HashSeed>,
}

impl<const N: usize> ExactMatchTable<N> {
    /// Creates a table with room for `capacity` keys before it grows.
    ///
    /// # Panics
    /// Panics if keys have no words or more than 32.
    pub fn with_capacity(capacity: usize) -> Self {
        assert!((1..=32).contains(&N));
        let seed = Arc::new(HashSeed::new());
        let slots = ConcurrentTable::new(N, capacity, Hash::Pairs(Arc::clone(&seed)));
        slots.prefault();
        Self { table: ResizableTable::new(slots), seed }
    }

    /// Inserts a key or gives it a new value, at most `2^31 - 2`. Returns the old value. The table grows
    /// incrementally, so no insertion waits for a copy of the whole table.
    ///
    /// # Panics
    /// Panics if the value is larger.
    // Inlined: as a call it needs half as many instructions again, so fewer consecutive insertions overlap
    // their cache misses. It takes 230 cycles instead of 145.
    #[inline(always)]
    pub fn insert(&mut self, key: &[u64; N], value: u32) -> Option<u32> {
        assert!(value <= MAX_VALUE);
        let hash = self.hash(key);
        if self.table.try_insert_fast(N, hash, |i| key[i], value) {
            return None;
        }
        self.insert_slow(hash, key, value)
    }

    #[inline(always)]
    fn hash(&self, key: &[u64; N]) -> u32 {
        self.seed.hash(key.iter().copied())
    }

    #[inline(never)]
    fn insert_slow(&mut self, mut hash: u32, key: &[u64; N], value: u32) -> Option<u32> {
        let slots = self.table.slots();
        if let Some(position) = slots.position(hash, |i| key[i]) {
            let old = slots.get(position);
            self.table.set(position, hash, key, Some(value));
            return old;
        }
        while let Err(Full) = self.table.insert(hash, key, value) {
            self.rehash_with_new_seed();
            hash = self.hash(key);
        }
        None
    }

    /// Rehashes all keys with a new seed, because too many keys have the same hash. An attacker cannot cause
    /// this without the seed.
    #[cold]
    fn rehash_with_new_seed(&mut self) {
        let slots = self.table.slots();
        self.seed = Arc::new(HashSeed::new());
        let next = slots.like(self.table.keys() * 2);
        let mut table = ResizableTable::new(next.with_hash(Hash::Pairs(Arc::clone(&self.seed))));
        let mut full = false;
        slots.for_each(0..slots.buckets(), |key, value| {
            full |= table.insert(table.slots().hash(key), key, value).is_err();
        });
        if full {
            return self.rehash_with_new_seed();
        }
        self.table = table;
    }

    /// Removes a key and returns its value.
    pub fn remove(&mut self, key: &[u64; N]) -> Option<u32> {
        let (hash, slots) = (self.hash(key), self.table.slots());
        let position = slots.position(hash, |i| key[i])?;
        let old = slots.get(position)?;
        self.table.set(position, hash, key, None);
        Some(old)
    }

    /// Returns the value of a key.
    #[inline]
    pub fn find(&self, key: &[u64; N]) -> Option<u32> {
        self.table.slots().find(N, self.hash(key), |i| key[i])
    }

    /// Looks up many keys, and prefetches their cache lines before they are searched.
    ///
    /// # Panics
    /// Panics if the slices differ in length.
    #[inline]
    pub fn find_batch(&self, keys: &[[u64; N]], found: &mut [Option<u32>]) {
        assert_eq!(keys.len(), found.len());
        /// Cache lines in flight at a time: about as many as a core can have outstanding.
        const AHEAD: usize = 16;
        let slots = &**self.table.slots();
        // A ring of hashes. The first ones are prefetched ahead, and one more for each key that is searched.
        let mut hashes = [0; AHEAD];
        let ask = |key: &[u64; N]| {
            let hash = self.hash(key);
            slots.prefetch(N, hash);
            hash
        };
        for (hash, key) in hashes.iter_mut().zip(keys) {
            *hash = ask(key);
        }
        let next = keys.get(AHEAD..).unwrap_or_default();
        for (i, (found, key)) in found.iter_mut().zip(keys).enumerate() {
            let hash = hashes[i % AHEAD];
            if let Some(next) = next.get(i) {
                hashes[i % AHEAD] = ask(next);
            }
            *found = slots.find(N, hash, |i| key[i]);
        }
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.table.keys()
    }

    /// Returns true if the table has no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory in bytes.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn agrees_with_a_map<const N: usize>() {
        let (mut table, mut map) = (ExactMatchTable::<N>::with_capacity(4), HashMap::new());
        let mut rng = fastrand::Rng::with_seed(1);
        for round in 0..20_000u32 {
            let mut key = [0; N];
            key[0] = rng.u64(..3000);
            key[N - 1] ^= rng.u64(..2);
            if rng.u8(..3) == 0 {
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

    /// Covers several incremental resizes, with removals and new values in buckets that are copied and in
    /// those that are not.
    #[test]
    fn behaves_like_a_map_while_it_grows() {
        let (mut table, mut map) = (ExactMatchTable::<2>::with_capacity(0), HashMap::new());
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut recent, mut both) = (Vec::new(), 0);
        for round in 0..300_000u32 {
            let key = [rng.u64(..), rng.u64(..)];
            assert_eq!(table.insert(&key, round), map.insert(key, round));
            recent.push(key);
            let old = recent[rng.usize(..recent.len())];
            match rng.u8(..8) {
                0 => assert_eq!(table.remove(&old), map.remove(&old)),
                1 => assert_eq!(table.insert(&old, !round >> 2), map.insert(old, !round >> 2)),
                _ => assert_eq!(table.find(&old), map.get(&old).copied()),
            }
            both += u32::from(table.table.is_resizing());
            assert_eq!(table.len(), map.len());
        }
        assert!(both > 1000, "in two tables for {both} rounds");
        while table.table.is_resizing() || !table.table.is_reclaimed() {
            let key = [rng.u64(..), rng.u64(..)];
            assert_eq!(table.insert(&key, 1), map.insert(key, 1));
            assert!(map.len() < 400_000, "the memory of a table that was replaced is still there");
        }
        for key in &recent {
            assert_eq!(table.find(key), map.get(key).copied());
        }
        // The table has room for as many keys as requested.
        let mut table = ExactMatchTable::<1>::with_capacity(100_000);
        let bytes = table.bytes();
        (0..100_000).for_each(|i| assert_eq!(table.insert(&[i], 1), None));
        assert_eq!((table.bytes(), table.table.is_resizing()), (bytes, false));
    }

    #[test]
    fn a_rehash_with_another_seed_keeps_the_keys() {
        let mut table = ExactMatchTable::<2>::with_capacity(0);
        (0..50_000).for_each(|i| assert_eq!(table.insert(&[i, i], i as u32), None));
        table.rehash_with_new_seed();
        assert_eq!(table.len(), 50_000);
        (0..50_000).for_each(|i| assert_eq!(table.find(&[i, i]), Some(i as u32)));
    }
}
