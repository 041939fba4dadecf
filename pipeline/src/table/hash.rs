// UNSAFETY: uses the processor's CRC and prefetch intrinsics.
#![allow(unsafe_code)]

/// CRC32C of a number. Uses the processor's instruction if the build enables it (3 cycles).
#[inline(always)]
pub fn hash_u64(value: u64) -> u32 {
    #[cfg(all(target_arch = "x86_64", target_feature = "sse4.2"))]
    {
        // SAFETY: the build enables SSE 4.2, which is checked by the `cfg` above.
        unsafe { std::arch::x86_64::_mm_crc32_u64(0, value) as u32 }
    }
    #[cfg(not(all(target_arch = "x86_64", target_feature = "sse4.2")))]
    {
        // Another hash function with good mixing. Nothing depends on all machines using the same function.
        let x = (value ^ (value >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
    }
}

/// Hash of two numbers, all of whose bits depend on both. It costs four instructions with the processor's CRC.
#[inline(always)]
pub(crate) fn hash_pair(first: u64, second: u64) -> u32 {
    #[cfg(all(target_arch = "x86_64", target_feature = "sse4.2"))]
    // SAFETY: the build enables SSE 4.2, which is checked by the `cfg` above.
    let crc = unsafe {
        use std::arch::x86_64::_mm_crc32_u64;
        _mm_crc32_u64(_mm_crc32_u64(0, first), second) as u32
    };
    #[cfg(not(all(target_arch = "x86_64", target_feature = "sse4.2")))]
    let crc = hash_u64(u64::from(hash_u64(first)) << 32 ^ second);
    // The CRC is linear. The product is not, and its upper bits depend on all of the CRC.
    crc.wrapping_mul(0x9e37_79b1)
}

/// Prefetches the cache line of `value`.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    prefetch_at(value);
}

/// Prefetches the cache line at an address that may no longer hold a value.
#[inline(always)]
pub(crate) fn prefetch_at<T>(_value: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not access memory in the sense of the language and cannot fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_value.cast());
    }
}
