//! Keyed hash of the rule engine. An attacker cannot choose colliding packets without knowing the key.
//!
//! The hash is pair-multiply-shift (Dietzfelbinger, "Universal hashing and k-wise independent random
//! variables via integer arithmetic without primes", 1996; Thorup, "High speed hashing for integers and
//! strings", section 3.5). For any two different keys of the same length, the pair of their hashes is
//! uniformly distributed over the choice of the seed. A CRC with a secret start value is no substitute. It is
//! linear, so two keys that collide under one start value collide under all of them.
//!
//! Uniformity for two keys does not give uniformity for many. Consecutive keys (addresses, ports, VNIs) have
//! consecutive sums. One seed in fourteen puts them so close together that more than a tenth lie in other
//! buckets than their own. [`scatter`] prevents that.

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::table::hash_u64;

use super::match_key::WORDS;

/// Breaks the order of the sums of consecutive keys. The CRC is a bijection, so the hashes of two keys stay
/// as uniform as their sums.
#[inline(always)]
fn scatter(sum: u64) -> u32 {
    hash_u64(sum >> 32)
}

/// Random numbers that key the hash.
pub(crate) struct HashSeed {
    pairs: [[u64; 2]; WORDS],
    offset: u64,
}

impl HashSeed {
    /// Creates a seed from the operating system's random numbers, by way of the standard library's keyed
    /// hasher.
    pub(crate) fn new() -> Self {
        let mut n = 0u64;
        let state = RandomState::new();
        let mut next = || {
            n += 1;
            let mut hasher = state.build_hasher();
            hasher.write_u64(n);
            hasher.finish()
        };
        Self { pairs: std::array::from_fn(|_| [next(), next()]), offset: next() }
    }

    /// Returns the term of one word, which is added to those of the other words.
    #[inline(always)]
    fn term(pair: &[u64; 2], word: u64) -> u64 {
        let (low, high) = (word & 0xffff_ffff, word >> 32);
        (pair[0].wrapping_add(low)).wrapping_mul(pair[1].wrapping_add(high))
    }

    /// Returns the hash of a key. `words` gives its words in order, at most [`WORDS`] of them.
    #[inline(always)]
    pub(crate) fn hash(&self, words: impl Iterator<Item = u64>) -> u32 {
        scatter(words.zip(&self.pairs).fold(self.offset, |sum, (word, pair)| sum.wrapping_add(Self::term(pair, word))))
    }

    /// Returns the factors of the two halves of a word of the packet vector, lower half first, for
    /// [`Self::sum`].
    #[inline(always)]
    pub(crate) fn factors(&self, word: u8) -> [u64; 2] {
        self.pairs[usize::from(word) % WORDS]
    }

    /// Returns the hash for the sum of the products of all halves with their factors. This multilinear hash
    /// is as universal as the other one (same sources). Tables that compare the same bits share products.
    #[inline(always)]
    pub(crate) fn sum(&self, products: u64) -> u32 {
        scatter(self.offset.wrapping_add(products))
    }

    /// Returns the hash of a key in a slice.
    #[inline(always)]
    pub(crate) fn hash_row(&self, row: &[u64]) -> u32 {
        // The usual lengths have no loop.
        match *row {
            [a] => self.hash([a].into_iter()),
            [a, b] => self.hash([a, b].into_iter()),
            [a, b, c] => self.hash([a, b, c].into_iter()),
            [a, b, c, d] => self.hash([a, b, c, d].into_iter()),
            [a, b, c, d, e] => self.hash([a, b, c, d, e].into_iter()),
            [a, b, c, d, e, f] => self.hash([a, b, c, d, e, f].into_iter()),
            ref all => self.hash(all.iter().copied()),
        }
    }
}

impl std::fmt::Debug for HashSeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashSeed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_and_every_key_bit_affects_the_hash() {
        let (a, b) = (HashSeed::new(), HashSeed::new());
        let keys: Vec<[u64; 3]> =
            (0..3 * 64).map(|bit| std::array::from_fn(|w| u64::from(w == bit / 64) << (bit % 64))).collect();
        let hash = |seed: &HashSeed, key: &[u64; 3]| seed.hash(key.iter().copied());
        assert!(keys.iter().filter(|key| hash(&a, key) == hash(&b, key)).count() < 3);
        let mut seen: Vec<u32> = keys.iter().map(|key| hash(&a, key)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert!(seen.len() > keys.len() - 3, "{} different hashes", seen.len());
    }

    /// Counts the keys beyond the third in each of 1024 buckets for a thousand keys. The count is about 23
    /// for random numbers, and must stay low for every seed and every order of the keys.
    #[test]
    fn consecutive_keys_spread_over_the_table() {
        let crowded = |hash: &dyn Fn(u64) -> u32| {
            let mut places = [0u32; 1024];
            (0..1000).for_each(|i| places[hash(i) as usize % 1024] += 1);
            places.iter().map(|keys| keys.saturating_sub(3)).sum::<u32>()
        };
        let rows: [fn(u64) -> [u64; 2]; 4] = [
            |i| [i, 0],
            |i| [i << 8, 0],
            |i| [i % 32, i / 32],
            |i| [0x0a00_0001 << 32 | u64::from((i as u32).swap_bytes()), 0],
        ];
        for (n, row) in rows.into_iter().enumerate() {
            for _ in 0..300 {
                let seed = HashSeed::new();
                let sum = |key: [u64; 2]| {
                    let products = [0, 1]
                        .map(|word| super::super::hash_table::product(seed.factors(word), key[usize::from(word)]));
                    seed.sum(products[0].wrapping_add(products[1]))
                };
                let (pairs, sums) = (crowded(&|i| seed.hash_row(&row(i))), crowded(&|i| sum(row(i))));
                assert!(pairs.max(sums) < 80, "row {n}: {pairs} by pairs, {sums} by sums");
            }
        }
    }
}
