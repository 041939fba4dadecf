use std::sync::Arc;

use super::growing::Growing;
use super::hash::Secret;
use super::slots::{Full, Hash, MAX_VALUE, SlotTable};

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
    table: Growing,
    secret: Arc<Secret>,
}

impl<const N: usize> ExactTable<N> {
    /// With room for so many keys before it grows.
    ///
    /// # Panics
    /// If keys have no words or more than 32.
    pub fn with_capacity(capacity: usize) -> Self {
        assert!((1..=32).contains(&N));
        let secret = Arc::new(Secret::new());
        let slots = SlotTable::new(N, capacity, Hash::Pairs(Arc::clone(&secret)));
        slots.touch();
        Self { table: Growing::new(slots), secret }
    }

    /// Puts a key in or gives it a new value, at most `2^31 - 2`; returns the old one. The table grows step by step: no insertion waits
    /// for a whole copy.
    ///
    /// # Panics
    /// If the value is larger.
    // As a call it is half as many instructions again, and so fewer insertions in a row wait for memory together: 230 cycles for 145.
    #[inline(always)]
    pub fn insert(&mut self, key: &[u64; N], value: u32) -> Option<u32> {
        assert!(value <= MAX_VALUE);
        let hash = self.hash(key);
        if self.table.insert_at_once(N, hash, |i| key[i], value) {
            return None;
        }
        self.insert_anyhow(hash, key, value)
    }

    #[inline(always)]
    fn hash(&self, key: &[u64; N]) -> u32 {
        self.secret.hash(key.iter().copied())
    }

    #[inline(never)]
    fn insert_anyhow(&mut self, mut hash: u32, key: &[u64; N], value: u32) -> Option<u32> {
        let slots = self.table.slots();
        if let Some(position) = slots.position(hash, |i| key[i]) {
            let old = slots.get(position);
            self.table.set(position, hash, key, Some(value));
            return old;
        }
        while let Err(Full) = self.table.insert(hash, key, value) {
            self.with_another_secret();
            hash = self.hash(key);
        }
        None
    }

    /// Too many keys have the same hash, which nobody can bring about who does not know the secret.
    #[cold]
    fn with_another_secret(&mut self) {
        let slots = self.table.slots();
        self.secret = Arc::new(Secret::new());
        let next = slots.like(self.table.keys() * 2);
        let mut table = Growing::new(next.with_hash(Hash::Pairs(Arc::clone(&self.secret))));
        let mut full = false;
        slots.for_each(0..slots.buckets(), |key, value| {
            full |= table.insert(table.slots().hash(key), key, value).is_err();
        });
        if full {
            return self.with_another_secret();
        }
        self.table = table;
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: &[u64; N]) -> Option<u32> {
        let (hash, slots) = (self.hash(key), self.table.slots());
        let position = slots.position(hash, |i| key[i])?;
        let old = slots.get(position)?;
        self.table.set(position, hash, key, None);
        Some(old)
    }

    /// The value of a key.
    #[inline]
    pub fn find(&self, key: &[u64; N]) -> Option<u32> {
        self.table.slots().find(N, self.hash(key), |i| key[i])
    }

    /// Looks up many keys: their lines are asked for before they are looked at.
    ///
    /// # Panics
    /// If the slices differ in length.
    #[inline]
    pub fn find_batch(&self, keys: &[[u64; N]], found: &mut [Option<u32>]) {
        assert_eq!(keys.len(), found.len());
        /// Lines on their way at a time: about as many as a core can wait for.
        const AHEAD: usize = 16;
        let slots = &**self.table.slots();
        // A ring of hashes; the first are asked for ahead, and then one for each that is looked at.
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

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.table.keys()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
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

    /// Enough for growth in steps, several times over, with removals and new values in what is already copied and what is not.
    #[test]
    fn behaves_like_a_map_while_it_grows() {
        let (mut table, mut map, mut x) = (ExactTable::<2>::with_capacity(0), HashMap::new(), 0x1234_5678_9abc_def1u64);
        let (mut recent, mut both) = (Vec::new(), 0);
        for round in 0..300_000u32 {
            let key = [next(&mut x), next(&mut x)];
            assert_eq!(table.insert(&key, round), map.insert(key, round));
            recent.push(key);
            let old = recent[next(&mut x) as usize % recent.len()];
            match next(&mut x) % 8 {
                0 => assert_eq!(table.remove(&old), map.remove(&old)),
                1 => assert_eq!(table.insert(&old, !round >> 2), map.insert(old, !round >> 2)),
                _ => assert_eq!(table.find(&old), map.get(&old).copied()),
            }
            both += u32::from(table.table.is_growing());
            assert_eq!(table.len(), map.len());
        }
        assert!(both > 1000, "in two tables for {both} rounds");
        while table.table.is_growing() || !table.table.is_settled() {
            let key = [next(&mut x), next(&mut x)];
            assert_eq!(table.insert(&key, 1), map.insert(key, 1));
            assert!(map.len() < 400_000, "the memory of a table that was replaced is still there");
        }
        for key in &recent {
            assert_eq!(table.find(key), map.get(key).copied());
        }
        // Room for as many as was said.
        let mut table = ExactTable::<1>::with_capacity(100_000);
        let bytes = table.bytes();
        (0..100_000).for_each(|i| assert_eq!(table.insert(&[i], 1), None));
        assert_eq!((table.bytes(), table.table.is_growing()), (bytes, false));
    }

    #[test]
    fn another_secret_keeps_the_keys() {
        let mut table = ExactTable::<2>::with_capacity(0);
        (0..50_000).for_each(|i| assert_eq!(table.insert(&[i, i], i as u32), None));
        table.with_another_secret();
        assert_eq!(table.len(), 50_000);
        (0..50_000).for_each(|i| assert_eq!(table.find(&[i, i]), Some(i as u32)));
    }
}
