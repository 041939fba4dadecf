//! The hash of the rule engine: keyed, so that nobody can choose packets that collide without knowing the key.
//!
//! Pair-multiply-shift (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without
//! primes", 1996; Thorup, "High speed hashing for integers and strings", section 3.5): for any two different keys of the same length the
//! pair of their hashes is distributed evenly over the choice of the secret, whatever the keys. A CRC with a secret start value is no
//! substitute: it is linear, so two keys that collide under one start value collide under all of them.
//!
//! What is even for two keys need not be for many: those in a row (addresses, ports, VNIs) have sums in a row, and one secret in
//! fourteen puts them so close together that a tenth and more lie in other buckets than their own. [`scatter`] ends that.

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::table::hash_u64;

use super::words::WORDS;

/// Breaks the order of sums of keys that follow each other. The CRC is one to one: the hashes of two keys stay as evenly distributed as
/// their sums.
#[inline(always)]
fn scatter(sum: u64) -> u32 {
    hash_u64(sum >> 32)
}

/// Random numbers that a hash depends on.
pub(super) struct Secret {
    pairs: [[u64; 2]; WORDS],
    offset: u64,
}

impl Secret {
    /// From the operating system's random numbers, by way of the standard library's keyed hasher.
    pub(super) fn new() -> Self {
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

    /// Hash of one word, to be added to that of the others.
    #[inline(always)]
    fn term(pair: &[u64; 2], word: u64) -> u64 {
        let (low, high) = (word & 0xffff_ffff, word >> 32);
        (pair[0].wrapping_add(low)).wrapping_mul(pair[1].wrapping_add(high))
    }

    /// Hash of a key; `words` gives its words in order, at most [`WORDS`] of them.
    #[inline(always)]
    pub(super) fn hash(&self, words: impl Iterator<Item = u64>) -> u32 {
        scatter(words.zip(&self.pairs).fold(self.offset, |sum, (word, pair)| sum.wrapping_add(Self::term(pair, word))))
    }

    /// Factors of the two halves of a word of a packet's vector, lower half first, for hashes that are sums ([`Self::sum`]).
    #[inline(always)]
    pub(super) fn factors(&self, word: u8) -> [u64; 2] {
        self.pairs[usize::from(word) % WORDS]
    }

    /// Hash out of the sum of the products of all halves with their factors: multilinear, as universal as the other (same sources). Tables
    /// that compare the same bits share products.
    #[inline(always)]
    pub(super) fn sum(&self, products: u64) -> u32 {
        scatter(self.offset.wrapping_add(products))
    }

    /// The same of a slice.
    #[inline(always)]
    pub(super) fn hash_row(&self, row: &[u64]) -> u32 {
        // The usual lengths without a loop.
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

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ_and_every_bit_counts() {
        let (a, b) = (Secret::new(), Secret::new());
        let keys: Vec<[u64; 3]> =
            (0..3 * 64).map(|bit| std::array::from_fn(|w| u64::from(w == bit / 64) << (bit % 64))).collect();
        let hash = |secret: &Secret, key: &[u64; 3]| secret.hash(key.iter().copied());
        assert!(keys.iter().filter(|key| hash(&a, key) == hash(&b, key)).count() < 3);
        let mut seen: Vec<u32> = keys.iter().map(|key| hash(&a, key)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert!(seen.len() > keys.len() - 3, "{} different hashes", seen.len());
    }

    /// Of a thousand keys in 1024 places, so many lie where three others do already, whatever the secret and the order in the keys: about
    /// 23, as of random numbers.
    #[test]
    fn keys_in_a_row_do_not_crowd() {
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
                let secret = Secret::new();
                let sum = |key: [u64; 2]| {
                    let products =
                        [0, 1].map(|word| super::super::slots::product(secret.factors(word), key[usize::from(word)]));
                    secret.sum(products[0].wrapping_add(products[1]))
                };
                let (pairs, sums) = (crowded(&|i| secret.hash_row(&row(i))), crowded(&|i| sum(row(i))));
                assert!(pairs.max(sums) < 80, "row {n}: {pairs} by pairs, {sums} by sums");
            }
        }
    }
}
