//! The hash of the rule engine: keyed, so that nobody can choose packets that collide without knowing the key.
//!
//! Pair-multiply-shift (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without
//! primes", 1996; Thorup, "High speed hashing for integers and strings", section 3.5): for any two different keys of the same length the
//! pair of their hashes is distributed evenly over the choice of the secret, whatever the keys. A CRC with a secret start value is no
//! substitute: it is linear, so two keys that collide under one start value collide under all of them.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::words::WORDS;

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
        let sum =
            words.zip(&self.pairs).fold(self.offset, |sum, (word, pair)| sum.wrapping_add(Self::term(pair, word)));
        (sum >> 32) as u32
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
        (self.offset.wrapping_add(products) >> 32) as u32
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
}
