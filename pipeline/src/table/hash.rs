// UNSAFETY: the processor's CRC and prefetch instructions are intrinsics.
#![allow(unsafe_code)]

/// CRC32C of a number, by the processor's instruction where the build has it (3 cycles).
#[inline(always)]
pub fn hash_u64(value: u64) -> u32 {
    #[cfg(all(target_arch = "x86_64", target_feature = "sse4.2"))]
    {
        // SAFETY: the build demands SSE 4.2.
        unsafe { std::arch::x86_64::_mm_crc32_u64(0, value) as u32 }
    }
    #[cfg(not(all(target_arch = "x86_64", target_feature = "sse4.2")))]
    {
        // Another good mixer: nothing depends on the function being the same on all machines.
        let x = (value ^ (value >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
    }
}

/// Asks the processor to fetch the cache line of `value`.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    prefetch_at(value);
}

/// The same for a place that may be no value any more.
#[inline(always)]
pub(crate) fn prefetch_at<T>(_value: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not access memory in the sense of the language and cannot fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_value.cast());
    }
}
