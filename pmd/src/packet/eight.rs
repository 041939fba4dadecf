// UNSAFETY: words by vectors, read from a device's memory and written to metadata.
#![allow(unsafe_code)]

//! Eight words at once, as far as receive queues need it: in two vectors where the processor the program is built for has AVX2.

use std::sync::atomic::AtomicU64;

/// Packets that are treated at once.
pub(crate) const EIGHT: usize = 8;

pub(crate) use words::Eight;

#[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
mod words {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256i, _mm_storeu_si128, _mm256_add_epi64, _mm256_blend_epi32, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_max_epu32, _mm256_min_epu32, _mm256_set_epi64x,
        _mm256_set1_epi64x, _mm256_setr_epi8, _mm256_shuffle_epi8, _mm256_sub_epi64, _mm256_testz_si256,
        _mm256_unpackhi_epi64, _mm256_unpacklo_epi64, _mm256_xor_si256,
    };

    use super::{AtomicU64, EIGHT};

    #[derive(Clone, Copy)]
    pub(crate) struct Eight([__m256i; 2]);

    impl Eight {
        /// The same word eight times.
        #[inline(always)]
        pub(crate) fn all(word: u64) -> Self {
            // SAFETY: the module is there in programs for processors that have these only.
            Self([unsafe { _mm256_set1_epi64x(word.cast_signed()) }; 2])
        }

        /// `from`, and each of the others `step` above the one before.
        #[inline(always)]
        pub(crate) fn steps(from: u64, step: u64) -> Self {
            let four = |from: u64| {
                let word = |i: u64| from.wrapping_add(step.wrapping_mul(i)).cast_signed();
                // SAFETY: as above.
                unsafe { _mm256_set_epi64x(word(3), word(2), word(1), word(0)) }
            };
            Self([four(from), four(from.wrapping_add(step.wrapping_mul(4)))])
        }

        /// What lies there.
        ///
        /// # Safety
        /// Eight words do.
        #[inline(always)]
        pub(crate) unsafe fn read(from: *const u64) -> Self {
            // SAFETY: as promised, and as above; the processor asks for no more alignment than the pointer has.
            unsafe { Self([_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(4).cast())]) }
        }

        /// One after the other.
        #[inline(always)]
        pub(crate) fn words(self) -> [u64; EIGHT] {
            // SAFETY: both are 64 bytes of plain numbers.
            unsafe { std::mem::transmute(self.0) }
        }

        /// Writes word `i` to the second word of place `i`, for a device, most significant byte first.
        #[inline(always)]
        pub(crate) fn give<const WORDS: usize>(self, places: &[[AtomicU64; WORDS]; EIGHT]) {
            const { assert!(WORDS > 1) };
            let (fours, _) = places.as_chunks::<4>();
            for (four, to) in self.turned().0.into_iter().zip(fours) {
                // SAFETY: as above.
                let [low, high] = unsafe { [_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four)] };
                // Half a vector at a time, which atomic stores of the language are not.
                // SAFETY: inside the four places; stores of aligned words, whole to whoever reads them.
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

        /// What a device has written, as it lies there: each is read once.
        #[inline(always)]
        pub(crate) fn take(words: &[AtomicU64; EIGHT]) -> Self {
            let at = words.as_ptr();
            let read = |at: *const AtomicU64| {
                let four;
                // SAFETY: four words. The device may write them meanwhile: the compiler sees one value, which it cannot read again.
                unsafe {
                    asm!("vmovdqu {}, [{}]", out(ymm_reg) four, in(reg) at, options(readonly, nostack, preserves_flags));
                };
                four
            };
            Self([read(at), read(at.wrapping_add(4))])
        }

        /// Bytes in another order, by a vector's lane: which of a word's goes where; -1 makes a zero.
        #[inline(always)]
        fn shuffled(self, order: [i8; 8]) -> Self {
            let [a, b, c, d, e, f, g, h] = order;
            let [i, j, k, l, m, n, o, p] = order.map(|byte| if byte < 0 { byte } else { byte + 8 });
            // SAFETY: as above.
            unsafe {
                let order = _mm256_setr_epi8(
                    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p,
                );
                Self(self.0.map(|four| _mm256_shuffle_epi8(four, order)))
            }
        }

        /// Each as a number, where it lies with the most significant byte first.
        #[inline(always)]
        pub(crate) fn turned(self) -> Self {
            self.shuffled([7, 6, 5, 4, 3, 2, 1, 0])
        }

        /// The low `KEPT` bytes (4 or 6); what is above is zero.
        #[inline(always)]
        pub(crate) fn low<const KEPT: usize>(self) -> Self {
            const { assert!(KEPT == 4 || KEPT == 6) };
            self.shuffled(if KEPT == 6 { [0, 1, 2, 3, 4, 5, -1, -1] } else { [0, 1, 2, 3, -1, -1, -1, -1] })
        }

        /// The upper halves, above the lower ones of others.
        #[inline(always)]
        pub(crate) fn above(self, low: Self) -> Self {
            // SAFETY: as above.
            low.zip(self, |low, high| unsafe { _mm256_blend_epi32::<0b1010_1010>(low, high) })
        }

        #[inline(always)]
        fn zip(self, other: Self, f: impl Fn(__m256i, __m256i) -> __m256i) -> Self {
            Self([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
        }

        /// Sums that wrap round.
        #[inline(always)]
        pub(crate) fn plus(self, other: Self) -> Self {
            // SAFETY: as above.
            self.zip(other, |a, b| unsafe { _mm256_add_epi64(a, b) })
        }

        /// Differences that wrap round.
        #[inline(always)]
        pub(crate) fn minus(self, other: Self) -> Self {
            // SAFETY: as above.
            self.zip(other, |a, b| unsafe { _mm256_sub_epi64(a, b) })
        }

        /// The low two bytes of each, shifted to the left by 16 bits and by 32.
        #[inline(always)]
        pub(crate) fn twice(self) -> Self {
            self.shuffled([-1, -1, 0, 1, 0, 1, -1, -1])
        }

        /// Whether the halves of each are at most those of `most`.
        #[inline(always)]
        pub(crate) fn at_most(self, most: u64) -> bool {
            // SAFETY: as above.
            unsafe {
                let largest = _mm256_max_epu32(self.0[0], self.0[1]);
                let cut = _mm256_min_epu32(largest, _mm256_set1_epi64x(most.cast_signed()));
                let over = _mm256_xor_si256(largest, cut);
                _mm256_testz_si256(over, over) != 0
            }
        }

        /// All of them together.
        #[inline(always)]
        pub(crate) fn sum(self) -> u64 {
            // SAFETY: as above, and both are 32 bytes of plain numbers.
            let four: [u64; 4] = unsafe { std::mem::transmute(_mm256_add_epi64(self.0[0], self.0[1])) };
            four.into_iter().fold(0, u64::wrapping_add)
        }

        /// Writes the words `i` of all `columns`, one behind the other, to `to(i)`, and has `then` go on behind them.
        ///
        /// # Safety
        /// There is room for them.
        #[inline(always)]
        pub(crate) unsafe fn write_rows<const PAIRS: usize>(
            columns: [[Self; 2]; PAIRS],
            to: impl Fn(usize) -> *mut u64,
            then: impl Fn(*mut u64),
        ) {
            for half in 0..2 {
                let pairs = columns.map(|[first, second]| {
                    let (first, second) = (first.0[half], second.0[half]);
                    // SAFETY: as above.
                    unsafe {
                        let (even, odd) = (_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
                        let high = [even, odd].map(|two| _mm256_extracti128_si256::<1>(two));
                        [_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd), high[0], high[1]]
                    }
                });
                for i in 0..4 {
                    let mut at = to(4 * half + i);
                    for pair in &pairs {
                        // SAFETY: as promised, and as above; the processor asks for no more alignment than the pointer has.
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

    use super::{AtomicU64, EIGHT};

    #[derive(Clone, Copy)]
    pub(crate) struct Eight([u64; EIGHT]);

    impl Eight {
        /// The same word eight times.
        #[inline(always)]
        pub(crate) fn all(word: u64) -> Self {
            Self([word; EIGHT])
        }

        /// `from`, and each of the others `step` above the one before.
        #[inline(always)]
        pub(crate) fn steps(from: u64, step: u64) -> Self {
            Self(std::array::from_fn(|i| from.wrapping_add(step.wrapping_mul(i as u64))))
        }

        /// What lies there.
        ///
        /// # Safety
        /// Eight words do.
        #[inline(always)]
        pub(crate) unsafe fn read(from: *const u64) -> Self {
            // SAFETY: as promised.
            Self(unsafe { from.cast::<[u64; EIGHT]>().read() })
        }

        /// One after the other.
        #[inline(always)]
        pub(crate) fn words(self) -> [u64; EIGHT] {
            self.0
        }

        /// Writes word `i` to the second word of place `i`, for a device, most significant byte first.
        #[inline(always)]
        pub(crate) fn give<const WORDS: usize>(self, places: &[[AtomicU64; WORDS]; EIGHT]) {
            const { assert!(WORDS > 1) };
            self.0.iter().zip(places).for_each(|(word, place)| place[1].store(word.to_be(), Ordering::Relaxed));
        }

        /// What a device has written, as it lies there: each is read once.
        #[inline(always)]
        pub(crate) fn take(words: &[AtomicU64; EIGHT]) -> Self {
            Self(words.each_ref().map(|word| word.load(Ordering::Relaxed)))
        }

        /// Each as a number, where it lies with the most significant byte first.
        #[inline(always)]
        pub(crate) fn turned(self) -> Self {
            Self(self.0.map(u64::from_be))
        }

        /// The low `KEPT` bytes (4 or 6); what is above is zero.
        #[inline(always)]
        pub(crate) fn low<const KEPT: usize>(self) -> Self {
            const { assert!(KEPT == 4 || KEPT == 6) };
            Self(self.0.map(|word| word & (u64::MAX >> (64 - 8 * KEPT))))
        }

        /// The upper halves, above the lower ones of others.
        #[inline(always)]
        pub(crate) fn above(self, low: Self) -> Self {
            low.zip(self, |low, high| low & u64::MAX >> 32 | high & u64::MAX << 32)
        }

        #[inline(always)]
        fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
            Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
        }

        /// Sums that wrap round.
        #[inline(always)]
        pub(crate) fn plus(self, other: Self) -> Self {
            self.zip(other, u64::wrapping_add)
        }

        /// Differences that wrap round.
        #[inline(always)]
        pub(crate) fn minus(self, other: Self) -> Self {
            self.zip(other, u64::wrapping_sub)
        }

        /// The low two bytes of each, shifted to the left by 16 bits and by 32.
        #[inline(always)]
        pub(crate) fn twice(self) -> Self {
            Self(self.0.map(|word| (word & 0xffff) << 16 | (word & 0xffff) << 32))
        }

        /// Whether the halves of each are at most those of `most`.
        #[inline(always)]
        pub(crate) fn at_most(self, most: u64) -> bool {
            self.0.iter().all(|word| *word as u32 <= most as u32 && word >> 32 <= most >> 32)
        }

        /// All of them together.
        #[inline(always)]
        pub(crate) fn sum(self) -> u64 {
            self.0.into_iter().fold(0, u64::wrapping_add)
        }

        /// Writes the words `i` of all `columns`, one behind the other, to `to(i)`, and has `then` go on behind them.
        ///
        /// # Safety
        /// There is room for them.
        #[inline(always)]
        pub(crate) unsafe fn write_rows<const PAIRS: usize>(
            columns: [[Self; 2]; PAIRS],
            to: impl Fn(usize) -> *mut u64,
            then: impl Fn(*mut u64),
        ) {
            for i in 0..EIGHT {
                let mut at = to(i);
                for pair in &columns {
                    // SAFETY: as promised.
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

    /// By both ways in which they are read.
    fn words(eight: Eight) -> [u64; EIGHT] {
        let mut rows = [[0; 5]; EIGHT];
        let at = rows.as_mut_ptr().cast::<u64>();
        let columns = [[Eight::steps(100, 1), eight], [Eight::all(7), Eight::steps(200, 1)]];
        // SAFETY: room for five words each.
        unsafe { Eight::write_rows(columns, |i| at.add(5 * i), |behind| behind.write(9)) };
        let words = eight.words();
        assert_eq!(rows, std::array::from_fn(|i| [100 + i as u64, words[i], 7, 200 + i as u64, 9]));
        words
    }

    #[test]
    fn they_are_as_eight_words_one_after_the_other() {
        assert_eq!(words(Eight::all(u64::MAX - 3)), [u64::MAX - 3; 8]);
        let steps = Eight::steps(u64::MAX, 1 << 32);
        let expected: [u64; 8] = std::array::from_fn(|i| u64::MAX.wrapping_add((i as u64) << 32));
        assert_eq!(words(steps), expected);
        let more: [u64; 8] = std::array::from_fn(|i| expected[i].wrapping_add(1 + 3 * i as u64));
        assert_eq!(words(steps.plus(Eight::steps(1, 3))), more);
        assert_eq!(words(from(more)), more);
        assert_eq!(words(steps.minus(steps)), [0; 8]);
        let lengths = Eight::steps(0x7fff_0000_0000_0800, 0x1000);
        let twice: [u64; 8] = std::array::from_fn(|i| (0x800 + 0x1000 * i as u64) * 0x1_0001_0000);
        assert_eq!(words(lengths.twice()), twice);
        // SAFETY: there are eight.
        assert_eq!(words(unsafe { Eight::read(more.as_ptr()) }), more);
        let places = [const { [const { AtomicU64::new(0) }; 3] }; 8];
        from(more).give(&places);
        assert_eq!(places.map(|place| place.map(AtomicU64::into_inner)), more.map(|word| [0, word.to_be(), 0]));
        assert_eq!(Eight::steps(5, 7).sum(), 8 * 5 + 28 * 7);
        assert_eq!(Eight::steps(u64::MAX, 0).sum(), u64::MAX.wrapping_mul(8));
    }

    #[test]
    fn what_a_device_wrote_is_turned_and_cut() {
        let there: [AtomicU64; 8] =
            std::array::from_fn(|i| AtomicU64::new((0xf1f2_f3f4_f5f6_f700u64 + i as u64).to_be()));
        let taken = Eight::take(&there);
        assert_eq!(words(taken), there.map(AtomicU64::into_inner));
        let turned = taken.turned();
        assert_eq!(words(turned), std::array::from_fn(|i| 0xf1f2_f3f4_f5f6_f700 + i as u64));
        assert_eq!(words(turned.low::<6>()), std::array::from_fn(|i| 0xf3f4_f5f6_f700 + i as u64));
        assert_eq!(words(turned.low::<4>()), std::array::from_fn(|i| 0xf5f6_f700 + i as u64));
        assert_eq!(words(turned.above(Eight::all(0x1234_5678_9abc_def0))), [0xf1f2_f3f4_9abc_def0; 8]);
    }

    #[test]
    fn one_that_is_too_much_is_found_wherever_it_is() {
        assert!(Eight::all(9000).at_most(9000) && Eight::all(0).at_most(9000));
        let with = |at, word, others| from(std::array::from_fn(|i| if i == at { word } else { others }));
        for at in 0..EIGHT {
            for bad in [9001, u64::from(u32::MAX), 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 9001, u64::MAX] {
                assert!(!with(at, bad, 9000).at_most(9000), "{bad:#x} at {at}");
            }
            assert!(with(at, 8999, 9000).at_most(9000));
            // Whatever is above them.
            let most = u64::MAX << 32 | 9000;
            for above in [0, 1, 1 << 31, u64::from(u32::MAX)] {
                assert!(with(at, above << 32 | 9000, 1 << 40).at_most(most));
                assert!(!with(at, above << 32 | 9001, 1 << 40).at_most(most));
                assert!(!with(at, above << 32 | u64::from(u32::MAX), 1 << 40).at_most(most));
            }
        }
    }

    /// Any eight words.
    fn from(words: [u64; 8]) -> Eight {
        // SAFETY: there are eight.
        unsafe { Eight::read(words.as_ptr()) }
    }
}
