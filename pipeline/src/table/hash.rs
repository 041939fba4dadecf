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

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of source ports of tunnels.
    const PORTS: usize = 16_384;
    const FLOWS: u64 = 65_536;

    /// The words of addresses and ports of a flow by its number.
    type Flow = fn(u64) -> (u64, u64);

    /// Returns the word of two addresses that differ by these numbers, and the word of TCP ports.
    fn tcp((source, destination): (u64, u64), (from, to): (u64, u64)) -> (u64, u64) {
        ((0x0a00_0000 + source) << 32 | (0x0b00_0001 + destination), 6 << 32 | (from & 0xffff) << 16 | to)
    }

    /// Flows whose addresses and ports count up fill source ports as evenly as random ones: four each, at most 17 or
    /// so, and none for 1.8 % of the ports.
    #[test]
    fn similar_flows_have_different_hashes() {
        let patterns: [(&str, Flow); 8] = [
            ("source ports", |i| tcp((0, 0), (1024 + i, 443))),
            ("destination ports", |i| tcp((0, 0), (1024, i))),
            ("source addresses", |i| tcp((i, 0), (1024, 443))),
            ("destination addresses", |i| tcp((0, i), (1024, 443))),
            ("pairs of addresses", |i| tcp((i, i), (1024, 443))),
            ("all pairs of two networks", |i| tcp((i & 0xff, i >> 8), (1024, 443))),
            ("addresses and ports", |i| tcp((i & 0xff, 0), (40_000 + (i >> 8), 443))),
            ("networks", |i| tcp((i << 8, 0), (5, 443))),
        ];
        for (what, flow) in patterns {
            let mut counts = vec![0; PORTS];
            for i in 0..FLOWS {
                let (addresses, ports) = flow(i);
                counts[((u64::from(hash_pair(addresses, ports)) * PORTS as u64) >> 32) as usize] += 1;
            }
            let most = counts.iter().max().unwrap();
            let used = counts.iter().filter(|count| **count > 0).count();
            assert!(*most <= 24 && used >= 15_800, "{what}: {used} ports, at most {most} flows each");
        }
    }
}
