// UNSAFETY: vector loads from memory that a device writes, and vector stores to metadata lines.
#![allow(unsafe_code)]

//! Vectors of eight 64-bit words, with the operations that receive queues and comparisons of headers need.
//!
//! In a program compiled for processors with AVX2, a vector is two registers. In others it is an array.

use std::sync::atomic::AtomicU64;

/// Words of a vector, and packets that are received at once.
pub const LANES: usize = 8;

pub use words::U64x8;

#[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
mod words {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256i, _mm_storeu_si128, _mm256_add_epi64, _mm256_and_si256, _mm256_blend_epi32, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_max_epu32, _mm256_min_epu32, _mm256_or_si256,
        _mm256_set_epi64x, _mm256_set1_epi64x, _mm256_setr_epi8, _mm256_shuffle_epi8, _mm256_sub_epi64,
        _mm256_testz_si256, _mm256_unpackhi_epi64, _mm256_unpacklo_epi64, _mm256_xor_si256,
    };

    use super::{AtomicU64, LANES};

    /// Eight 64-bit words.
    #[derive(Clone, Copy, Debug)]
    pub struct U64x8([__m256i; 2]);

    impl U64x8 {
        /// Eight copies of `word`.
        #[inline(always)]
        pub fn splat(word: u64) -> Self {
            // SAFETY: this module is compiled only for processors with AVX2.
            Self([unsafe { _mm256_set1_epi64x(word.cast_signed()) }; 2])
        }

        /// The words `from`, `from + step`, `from + 2 * step` and so on.
        #[inline(always)]
        pub fn iota(from: u64, step: u64) -> Self {
            let four = |from: u64| {
                let word = |i: u64| from.wrapping_add(step.wrapping_mul(i)).cast_signed();
                // SAFETY: this module is compiled only for processors with AVX2.
                unsafe { _mm256_set_epi64x(word(3), word(2), word(1), word(0)) }
            };
            Self([four(from), four(from.wrapping_add(step.wrapping_mul(4)))])
        }

        /// Loads eight words.
        ///
        /// # Safety
        /// `from` is valid for reading eight words and is aligned to 8.
        #[inline(always)]
        pub unsafe fn load(from: *const u64) -> Self {
            // SAFETY: the caller guarantees eight words at `from`; unaligned loads accept an alignment of 8;
            // this module is compiled only for processors with AVX2.
            unsafe { Self([_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(4).cast())]) }
        }

        /// The words of 64 bytes, in the order of the processor.
        #[inline(always)]
        pub fn from_bytes(bytes: &[u8; 8 * LANES]) -> Self {
            let at = bytes.as_ptr();
            // SAFETY: 64 bytes can be read at `at`, and unaligned loads accept any address; this module is compiled
            // only for processors with AVX2.
            unsafe { Self([_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())]) }
        }

        /// True if all words are equal to those of `other` in the bits of `mask`.
        #[inline(always)]
        pub fn equals_in(self, other: Self, mask: Self) -> bool {
            // SAFETY: this module is compiled only for processors with AVX2.
            unsafe {
                let differ = self.zip(other, |a, b| _mm256_xor_si256(a, b));
                let [low, high] = differ.zip(mask, |a, b| _mm256_and_si256(a, b)).0;
                let differ = _mm256_or_si256(low, high);
                _mm256_testz_si256(differ, differ) != 0
            }
        }

        /// The words as an array.
        #[inline(always)]
        pub fn to_array(self) -> [u64; LANES] {
            // SAFETY: both types have 64 bytes, and every bit pattern is valid for both.
            unsafe { std::mem::transmute(self.0) }
        }

        /// Stores word `i` to the second word of `slots[i]`, in big-endian byte order, for a device.
        #[inline(always)]
        pub fn store_be_word1<const WORDS: usize>(self, slots: &[[AtomicU64; WORDS]; LANES]) {
            const { assert!(WORDS > 1) };
            let (fours, _) = slots.as_chunks::<4>();
            for (four, to) in self.swap_bytes().0.into_iter().zip(fours) {
                // SAFETY: this module is compiled only for processors with AVX2.
                let [low, high] = unsafe { [_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four)] };
                // Assembler, since a store of half a register has no atomic equivalent in Rust.
                //
                // SAFETY: the offsets address the second word of each of the four elements of `to`. Each
                // store is one aligned word, hence atomic.
                unsafe {
                    asm!(
                        "vmovq [{to} + {first}], {low}",
                        "vmovhps [{to} + {second}], {low}",
                        "vmovq [{to} + {third}], {high}",
                        "vmovhps [{to} + {fourth}], {high}",
                        to = in(reg) to.as_ptr(),
                        low = in(xmm_reg) low,
                        high = in(xmm_reg) high,
                        first = const 8,
                        second = const 8 * (WORDS + 1),
                        third = const 8 * (2 * WORDS + 1),
                        fourth = const 8 * (3 * WORDS + 1),
                        options(nostack, preserves_flags),
                    );
                }
            }
        }

        /// Loads eight words that a device may be writing, each once and in memory order.
        #[inline(always)]
        pub fn load_atomic(words: &[AtomicU64; LANES]) -> Self {
            let at = words.as_ptr();
            let read = |at: *const AtomicU64| {
                let four;
                // SAFETY: `words` has eight words, and each half is four of them. A device may write them
                // meanwhile: the compiler sees one value, and cannot load it a second time.
                unsafe {
                    asm!(
                        "vmovdqu {}, [{}]",
                        out(ymm_reg) four,
                        in(reg) at,
                        options(readonly, nostack, preserves_flags),
                    );
                };
                four
            };
            Self([read(at), read(at.wrapping_add(4))])
        }

        /// Reorders the bytes of each word. `order[i]` is the source of byte `i`; -1 makes it zero.
        #[inline(always)]
        fn shuffle(self, order: [i8; 8]) -> Self {
            let [a, b, c, d, e, f, g, h] = order;
            let [i, j, k, l, m, n, o, p] = order.map(|byte| if byte < 0 { byte } else { byte + 8 });
            // SAFETY: this module is compiled only for processors with AVX2.
            unsafe {
                let order = _mm256_setr_epi8(
                    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p,
                );
                Self(self.0.map(|four| _mm256_shuffle_epi8(four, order)))
            }
        }

        /// Reverses the bytes of each word: big-endian to native and back.
        #[inline(always)]
        pub fn swap_bytes(self) -> Self {
            self.shuffle([7, 6, 5, 4, 3, 2, 1, 0])
        }

        /// The low `KEPT` bytes (4 or 6) of each word; the others become zero.
        #[inline(always)]
        pub fn low_bytes<const KEPT: usize>(self) -> Self {
            const { assert!(KEPT == 4 || KEPT == 6) };
            self.shuffle(if KEPT == 6 { [0, 1, 2, 3, 4, 5, -1, -1] } else { [0, 1, 2, 3, -1, -1, -1, -1] })
        }

        /// The upper halves of these words above the lower halves of `low`.
        #[inline(always)]
        pub fn high_halves_over(self, low: Self) -> Self {
            // SAFETY: this module is compiled only for processors with AVX2.
            low.zip(self, |low, high| unsafe { _mm256_blend_epi32::<0b1010_1010>(low, high) })
        }

        #[inline(always)]
        fn zip(self, other: Self, f: impl Fn(__m256i, __m256i) -> __m256i) -> Self {
            Self([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
        }

        /// Word-wise sums modulo 2⁶⁴.
        #[inline(always)]
        pub fn wrapping_add(self, other: Self) -> Self {
            // SAFETY: this module is compiled only for processors with AVX2.
            self.zip(other, |a, b| unsafe { _mm256_add_epi64(a, b) })
        }

        /// Word-wise differences modulo 2⁶⁴.
        #[inline(always)]
        pub fn wrapping_sub(self, other: Self) -> Self {
            // SAFETY: this module is compiled only for processors with AVX2.
            self.zip(other, |a, b| unsafe { _mm256_sub_epi64(a, b) })
        }

        /// The low two bytes of each word at bits 16 and 32: the positions of the two length fields of a
        /// metadata line.
        #[inline(always)]
        pub fn to_length_fields(self) -> Self {
            self.shuffle([-1, -1, 0, 1, 0, 1, -1, -1])
        }

        /// True if both halves of every word are at most those of `most`.
        #[inline(always)]
        pub fn at_most(self, max: u64) -> bool {
            // SAFETY: this module is compiled only for processors with AVX2.
            unsafe {
                let largest = _mm256_max_epu32(self.0[0], self.0[1]);
                let cut = _mm256_min_epu32(largest, _mm256_set1_epi64x(max.cast_signed()));
                let over = _mm256_xor_si256(largest, cut);
                _mm256_testz_si256(over, over) != 0
            }
        }

        /// Sum of the words modulo 2⁶⁴.
        #[inline(always)]
        pub fn sum(self) -> u64 {
            // SAFETY: this module is compiled only for processors with AVX2. Both types have 32 bytes, and
            // every bit pattern is valid for both.
            let four: [u64; 4] = unsafe { std::mem::transmute(_mm256_add_epi64(self.0[0], self.0[1])) };
            four.into_iter().fold(0, u64::wrapping_add)
        }

        /// For each `i`, writes word `i` of all columns to `to(i)`, one behind the other, then calls `then`
        /// with the address behind them.
        ///
        /// # Safety
        /// `to(i)` is valid for writing `2 * PAIRS` words and is aligned to 8, for every `i` below 8.
        #[inline(always)]
        pub unsafe fn write_rows<const PAIRS: usize>(
            columns: [[Self; 2]; PAIRS],
            to: impl Fn(usize) -> *mut u64,
            then: impl Fn(*mut u64),
        ) {
            for half in 0..2 {
                let pairs = columns.map(|[first, second]| {
                    let (first, second) = (first.0[half], second.0[half]);
                    // SAFETY: this module is compiled only for processors with AVX2.
                    unsafe {
                        let (even, odd) = (_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
                        let high = [even, odd].map(|two| _mm256_extracti128_si256::<1>(two));
                        [_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd), high[0], high[1]]
                    }
                });
                for i in 0..4 {
                    let mut at = to(4 * half + i);
                    for pair in &pairs {
                        // SAFETY: the caller guarantees room for all columns at `to(i)`; unaligned stores
                        // accept an alignment of 8; SSE2 is part of AVX2.
                        unsafe {
                            _mm_storeu_si128(at.cast(), pair[i]);
                            at = at.add(2);
                        }
                    }
                    then(at);
                }
            }
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_feature = "avx2")))]
mod words {
    use std::sync::atomic::Ordering;

    use super::{AtomicU64, LANES};

    /// Eight 64-bit words.
    #[derive(Clone, Copy, Debug)]
    pub struct U64x8([u64; LANES]);

    impl U64x8 {
        /// Eight copies of `word`.
        #[inline(always)]
        pub fn splat(word: u64) -> Self {
            Self([word; LANES])
        }

        /// The words `from`, `from + step`, `from + 2 * step` and so on.
        #[inline(always)]
        pub fn iota(from: u64, step: u64) -> Self {
            Self(std::array::from_fn(|i| from.wrapping_add(step.wrapping_mul(i as u64))))
        }

        /// Loads eight words.
        ///
        /// # Safety
        /// `from` is valid for reading eight words and is aligned to 8.
        #[inline(always)]
        pub unsafe fn load(from: *const u64) -> Self {
            // SAFETY: the caller guarantees eight aligned words at `from`.
            Self(unsafe { from.cast::<[u64; LANES]>().read() })
        }

        /// The words of 64 bytes, in the order of the processor.
        #[inline(always)]
        pub fn from_bytes(bytes: &[u8; 8 * LANES]) -> Self {
            let (words, _) = bytes.as_chunks::<8>();
            Self(std::array::from_fn(|i| words.get(i).map_or(0, |word| u64::from_ne_bytes(*word))))
        }

        /// True if all words are equal to those of `other` in the bits of `mask`.
        #[inline(always)]
        pub fn equals_in(self, other: Self, mask: Self) -> bool {
            let differ = self.zip(other, |a, b| a ^ b).zip(mask, |a, b| a & b);
            differ.0.into_iter().fold(0, |all, word| all | word) == 0
        }

        /// The words as an array.
        #[inline(always)]
        pub fn to_array(self) -> [u64; LANES] {
            self.0
        }

        /// Stores word `i` to the second word of `slots[i]`, in big-endian byte order, for a device.
        #[inline(always)]
        pub fn store_be_word1<const WORDS: usize>(self, slots: &[[AtomicU64; WORDS]; LANES]) {
            const { assert!(WORDS > 1) };
            self.0.iter().zip(slots).for_each(|(word, slot)| slot[1].store(word.to_be(), Ordering::Relaxed));
        }

        /// Loads eight words that a device may be writing, each once and in memory order.
        #[inline(always)]
        pub fn load_atomic(words: &[AtomicU64; LANES]) -> Self {
            Self(words.each_ref().map(|word| word.load(Ordering::Relaxed)))
        }

        /// Reverses the bytes of each word: big-endian to native and back.
        #[inline(always)]
        pub fn swap_bytes(self) -> Self {
            Self(self.0.map(u64::from_be))
        }

        /// The low `KEPT` bytes (4 or 6) of each word; the others become zero.
        #[inline(always)]
        pub fn low_bytes<const KEPT: usize>(self) -> Self {
            const { assert!(KEPT == 4 || KEPT == 6) };
            Self(self.0.map(|word| word & (u64::MAX >> (64 - 8 * KEPT))))
        }

        /// The upper halves of these words above the lower halves of `low`.
        #[inline(always)]
        pub fn high_halves_over(self, low: Self) -> Self {
            low.zip(self, |low, high| low & u64::MAX >> 32 | high & u64::MAX << 32)
        }

        #[inline(always)]
        fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
            Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
        }

        /// Word-wise sums modulo 2⁶⁴.
        #[inline(always)]
        pub fn wrapping_add(self, other: Self) -> Self {
            self.zip(other, u64::wrapping_add)
        }

        /// Word-wise differences modulo 2⁶⁴.
        #[inline(always)]
        pub fn wrapping_sub(self, other: Self) -> Self {
            self.zip(other, u64::wrapping_sub)
        }

        /// The low two bytes of each word at bits 16 and 32: the positions of the two length fields of a
        /// metadata line.
        #[inline(always)]
        pub fn to_length_fields(self) -> Self {
            Self(self.0.map(|word| (word & 0xffff) << 16 | (word & 0xffff) << 32))
        }

        /// True if both halves of every word are at most those of `most`.
        #[inline(always)]
        pub fn at_most(self, max: u64) -> bool {
            self.0.iter().all(|word| *word as u32 <= max as u32 && word >> 32 <= max >> 32)
        }

        /// Sum of the words modulo 2⁶⁴.
        #[inline(always)]
        pub fn sum(self) -> u64 {
            self.0.into_iter().fold(0, u64::wrapping_add)
        }

        /// For each `i`, writes word `i` of all columns to `to(i)`, one behind the other, then calls `then`
        /// with the address behind them.
        ///
        /// # Safety
        /// `to(i)` is valid for writing `2 * PAIRS` words and is aligned to 8, for every `i` below 8.
        #[inline(always)]
        pub unsafe fn write_rows<const PAIRS: usize>(
            columns: [[Self; 2]; PAIRS],
            to: impl Fn(usize) -> *mut u64,
            then: impl Fn(*mut u64),
        ) {
            for i in 0..LANES {
                let mut at = to(i);
                for pair in &columns {
                    // SAFETY: the caller guarantees room for all columns at `to(i)`.
                    unsafe {
                        at.cast::<[u64; 2]>().write_unaligned(pair.map(|column| column.0[i]));
                        at = at.add(2);
                    }
                }
                then(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of a vector; checks that both ways to read them agree.
    fn words(eight: U64x8) -> [u64; LANES] {
        let mut rows = [[0; 5]; LANES];
        let at = rows.as_mut_ptr().cast::<u64>();
        let columns = [[U64x8::iota(100, 1), eight], [U64x8::splat(7), U64x8::iota(200, 1)]];
        // SAFETY: each row has room for five words.
        unsafe { U64x8::write_rows(columns, |i| at.add(5 * i), |behind| behind.write(9)) };
        let words = eight.to_array();
        assert_eq!(rows, std::array::from_fn(|i| [100 + i as u64, words[i], 7, 200 + i as u64, 9]));
        words
    }

    #[test]
    fn they_are_as_eight_words_one_after_the_other() {
        assert_eq!(words(U64x8::splat(u64::MAX - 3)), [u64::MAX - 3; 8]);
        let steps = U64x8::iota(u64::MAX, 1 << 32);
        let expected: [u64; 8] = std::array::from_fn(|i| u64::MAX.wrapping_add((i as u64) << 32));
        assert_eq!(words(steps), expected);
        let more: [u64; 8] = std::array::from_fn(|i| expected[i].wrapping_add(1 + 3 * i as u64));
        assert_eq!(words(steps.wrapping_add(U64x8::iota(1, 3))), more);
        assert_eq!(words(from(more)), more);
        assert_eq!(words(steps.wrapping_sub(steps)), [0; 8]);
        let lengths = U64x8::iota(0x7fff_0000_0000_0800, 0x1000);
        let twice: [u64; 8] = std::array::from_fn(|i| (0x800 + 0x1000 * i as u64) * 0x1_0001_0000);
        assert_eq!(words(lengths.to_length_fields()), twice);
        // SAFETY: the array has eight words.
        assert_eq!(words(unsafe { U64x8::load(more.as_ptr()) }), more);
        let slots = [const { [const { AtomicU64::new(0) }; 3] }; 8];
        from(more).store_be_word1(&slots);
        assert_eq!(slots.map(|slot| slot.map(AtomicU64::into_inner)), more.map(|word| [0, word.to_be(), 0]));
        assert_eq!(U64x8::iota(5, 7).sum(), 8 * 5 + 28 * 7);
        assert_eq!(U64x8::iota(u64::MAX, 0).sum(), u64::MAX.wrapping_mul(8));
    }

    #[test]
    fn headers_are_compared_in_the_bits_of_a_mask() {
        let bytes: [u8; 64] = std::array::from_fn(|i| i as u8 * 3 + 1);
        let (all, none) = (U64x8::splat(u64::MAX), U64x8::splat(0));
        let one = U64x8::from_bytes(&bytes);
        let expected: [u64; 8] =
            std::array::from_fn(|i| u64::from_ne_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap()));
        assert_eq!(words(one), expected);
        assert!(one.equals_in(one, all));
        for bit in 0..512 {
            let (mut other, mut mask) = (bytes, [0xff; 64]);
            other[bit / 8] ^= 1 << (bit % 8);
            let other = U64x8::from_bytes(&other);
            assert!(!one.equals_in(other, all), "bit {bit}");
            mask[bit / 8] ^= 1 << (bit % 8);
            assert!(one.equals_in(other, U64x8::from_bytes(&mask)), "bit {bit}");
            assert!(one.equals_in(other, none));
        }
    }

    #[test]
    fn what_a_device_wrote_is_turned_and_cut() {
        let there: [AtomicU64; 8] =
            std::array::from_fn(|i| AtomicU64::new((0xf1f2_f3f4_f5f6_f700u64 + i as u64).to_be()));
        let taken = U64x8::load_atomic(&there);
        assert_eq!(words(taken), there.map(AtomicU64::into_inner));
        let turned = taken.swap_bytes();
        assert_eq!(words(turned), std::array::from_fn(|i| 0xf1f2_f3f4_f5f6_f700 + i as u64));
        assert_eq!(words(turned.low_bytes::<6>()), std::array::from_fn(|i| 0xf3f4_f5f6_f700 + i as u64));
        assert_eq!(words(turned.low_bytes::<4>()), std::array::from_fn(|i| 0xf5f6_f700 + i as u64));
        assert_eq!(words(turned.high_halves_over(U64x8::splat(0x1234_5678_9abc_def0))), [0xf1f2_f3f4_9abc_def0; 8]);
    }

    #[test]
    fn one_that_is_too_much_is_found_wherever_it_is() {
        assert!(U64x8::splat(9000).at_most(9000) && U64x8::splat(0).at_most(9000));
        let with = |at, word, others| from(std::array::from_fn(|i| if i == at { word } else { others }));
        for at in 0..LANES {
            for bad in [9001, u64::from(u32::MAX), 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 9001, u64::MAX] {
                assert!(!with(at, bad, 9000).at_most(9000), "{bad:#x} at {at}");
            }
            assert!(with(at, 8999, 9000).at_most(9000));
            // The bound of the upper halves is the largest value, so any upper half is accepted.
            let max = u64::MAX << 32 | 9000;
            for above in [0, 1, 1 << 31, u64::from(u32::MAX)] {
                assert!(with(at, above << 32 | 9000, 1 << 40).at_most(max));
                assert!(!with(at, above << 32 | 9001, 1 << 40).at_most(max));
                assert!(!with(at, above << 32 | u64::from(u32::MAX), 1 << 40).at_most(max));
            }
        }
    }

    /// A vector of these words.
    fn from(words: [u64; 8]) -> U64x8 {
        // SAFETY: the array has eight words.
        unsafe { U64x8::load(words.as_ptr()) }
    }
}
