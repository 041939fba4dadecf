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
        __m256i, _mm_storeu_si128, _mm256_add_epi64, _mm256_castsi256_pd, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_movemask_pd, _mm256_or_si256, _mm256_set_epi64x,
        _mm256_set1_epi64x, _mm256_setr_epi8, _mm256_shuffle_epi8, _mm256_sub_epi64, _mm256_unpackhi_epi64,
        _mm256_unpacklo_epi64,
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
            for (four, to) in self.0.into_iter().zip(fours) {
                // SAFETY: as above.
                let [low, high] = unsafe {
                    let order = _mm256_setr_epi8(
                        7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8, //
                        7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8,
                    );
                    let four = _mm256_shuffle_epi8(four, order);
                    [_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four)]
                };
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

        /// The low `KEPT` bytes (4 or 6) of words that a device has written, most significant byte first.
        #[inline(always)]
        pub(crate) fn low_of<const KEPT: usize>(words: &[AtomicU64; EIGHT]) -> Self {
            const { assert!(KEPT == 4 || KEPT == 6) };
            let at = words.as_ptr();
            let read = |at: *const AtomicU64| {
                let four;
                // SAFETY: four words. The device may write them meanwhile: the compiler sees one value, which it cannot read again.
                unsafe {
                    asm!("vmovdqu {}, [{}]", out(ymm_reg) four, in(reg) at, options(readonly, nostack, preserves_flags));
                };
                four
            };
            // Byte i of a word comes from byte 7 - i; a negative index makes a zero.
            let none = -1;
            let [b4, b5] = if KEPT == 6 { [3, 2] } else { [none; 2] };
            let [c4, c5] = if KEPT == 6 { [11, 10] } else { [none; 2] };
            // SAFETY: as above.
            let order = unsafe {
                _mm256_setr_epi8(
                    7, 6, 5, 4, b4, b5, none, none, 15, 14, 13, 12, c4, c5, none, none, //
                    7, 6, 5, 4, b4, b5, none, none, 15, 14, 13, 12, c4, c5, none, none,
                )
            };
            Self(
                [read(at), read(at.wrapping_add(4))]
                    // SAFETY: as above.
                    .map(|four| unsafe { _mm256_shuffle_epi8(four, order) }),
            )
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
            let none = -1;
            // SAFETY: as above.
            unsafe {
                let order = _mm256_setr_epi8(
                    none, none, 0, 1, 0, 1, none, none, none, none, 8, 9, 8, 9, none, none, //
                    none, none, 0, 1, 0, 1, none, none, none, none, 8, 9, 8, 9, none, none,
                );
                Self(self.0.map(|four| _mm256_shuffle_epi8(four, order)))
            }
        }

        /// Whether each is at most the same one of `most`, which are below 2^63.
        #[inline(always)]
        pub(crate) fn at_most(self, most: Self) -> bool {
            // Too much: above 2^63 by itself, or the difference is.
            let [some, others] = most.minus(self).0;
            // SAFETY: as above.
            unsafe {
                let too = _mm256_or_si256(_mm256_or_si256(self.0[0], some), _mm256_or_si256(self.0[1], others));
                _mm256_movemask_pd(_mm256_castsi256_pd(too)) == 0
            }
        }

        /// All of them together.
        #[inline(always)]
        pub(crate) fn sum(self) -> u64 {
            // SAFETY: as above, and both are 32 bytes of plain numbers.
            let four: [u64; 4] = unsafe { std::mem::transmute(_mm256_add_epi64(self.0[0], self.0[1])) };
            four.into_iter().fold(0, u64::wrapping_add)
        }

        /// Writes word `i`, and the same one of `seconds` behind it, to `to(i)`, and has `then` go on there.
        ///
        /// # Safety
        /// There is room for two words.
        #[inline(always)]
        pub(crate) unsafe fn write_pairs(
            self,
            seconds: Self,
            to: impl Fn(usize) -> *mut u64,
            mut then: impl FnMut(usize, *mut u64),
        ) {
            for (half, (first, second)) in self.0.into_iter().zip(seconds.0).enumerate() {
                // SAFETY: as above.
                let pairs = unsafe {
                    let (even, odd) = (_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
                    let high = [even, odd].map(|two| _mm256_extracti128_si256::<1>(two));
                    [_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd), high[0], high[1]]
                };
                for (i, pair) in pairs.into_iter().enumerate() {
                    let at = to(4 * half + i);
                    // SAFETY: as promised, and as above; the processor asks for no more alignment than the pointer has.
                    unsafe { _mm_storeu_si128(at.cast(), pair) };
                    then(4 * half + i, at);
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

        /// The low `KEPT` bytes (4 or 6) of words that a device has written, most significant byte first.
        #[inline(always)]
        pub(crate) fn low_of<const KEPT: usize>(words: &[AtomicU64; EIGHT]) -> Self {
            const { assert!(KEPT == 4 || KEPT == 6) };
            Self(
                words.each_ref().map(|word| u64::from_be(word.load(Ordering::Relaxed)) & (u64::MAX >> (64 - 8 * KEPT))),
            )
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

        /// Whether each is at most the same one of `most`, which are below 2^63.
        #[inline(always)]
        pub(crate) fn at_most(self, most: Self) -> bool {
            self.0.iter().zip(most.0).all(|(word, most)| *word <= most)
        }

        /// All of them together.
        #[inline(always)]
        pub(crate) fn sum(self) -> u64 {
            self.0.into_iter().fold(0, u64::wrapping_add)
        }

        /// Writes word `i`, and the same one of `seconds` behind it, to `to(i)`, and has `then` go on there.
        ///
        /// # Safety
        /// There is room for two words.
        #[inline(always)]
        pub(crate) unsafe fn write_pairs(
            self,
            seconds: Self,
            to: impl Fn(usize) -> *mut u64,
            mut then: impl FnMut(usize, *mut u64),
        ) {
            for (i, pair) in self.0.into_iter().zip(seconds.0).enumerate() {
                let at = to(i);
                // SAFETY: as promised.
                unsafe { at.cast::<[u64; 2]>().write_unaligned(pair.into()) };
                then(i, at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By both ways in which they are read.
    fn words(eight: Eight) -> [u64; EIGHT] {
        let mut pairs = [[0; 2]; EIGHT];
        let at = pairs.as_mut_ptr().cast::<u64>();
        // SAFETY: room for a pair each.
        unsafe { eight.write_pairs(Eight::steps(100, 1), |i| at.add(2 * i), |_, _| ()) };
        assert_eq!(pairs.map(|[_, second]| second), [100, 101, 102, 103, 104, 105, 106, 107]);
        assert_eq!(pairs.map(|[first, _]| first), eight.words());
        eight.words()
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
        assert_eq!(words(Eight::low_of::<6>(&there)), std::array::from_fn(|i| 0xf3f4_f5f6_f700 + i as u64));
        assert_eq!(words(Eight::low_of::<4>(&there)), std::array::from_fn(|i| 0xf5f6_f700 + i as u64));
    }

    #[test]
    fn one_that_is_too_much_is_found_wherever_it_is() {
        let most = Eight::all(9000);
        assert!(Eight::all(9000).at_most(most) && Eight::all(0).at_most(most));
        for at in 0..EIGHT {
            for bad in [9001, u64::from(u32::MAX), 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 9001, u64::MAX] {
                assert!(
                    !from(std::array::from_fn(|i| if i == at { bad } else { 9000 })).at_most(most),
                    "{bad:#x} at {at}"
                );
            }
            assert!(from(std::array::from_fn(|i| if i == at { 8999 } else { 9000 })).at_most(most));
        }
    }

    /// Any eight words.
    fn from(words: [u64; 8]) -> Eight {
        // SAFETY: there are eight.
        unsafe { Eight::read(words.as_ptr()) }
    }
}
