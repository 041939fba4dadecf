// UNSAFETY: tells AddressSanitizer which bytes of packet buffers nobody may touch.
#![allow(unsafe_code)]

//! Red zones of packet buffers for AddressSanitizer.
//!
//! `scripts/test address` builds with `--cfg asan`. Each buffer then has a red zone behind its data room. A free buffer
//! is a red zone itself, except its metadata line. The list of a magazine, at the start of its first buffer's data
//! room, is accessible while the magazine is in the shared list. Code of this process that reads or writes in a red
//! zone ends the process with a report. Devices, the kernel and other processes are not watched.
//!
//! Without `asan` all functions are empty.

use super::meta::Meta;
#[cfg(asan)]
use super::{
    meta::{BUFFER_END, DATA_START, META, STRIDE},
    pool::MAGAZINE_BYTES,
};

// AddressSanitizer protects units of eight bytes.
#[cfg(asan)]
const _: () = assert!(MAGAZINE_BYTES.is_multiple_of(8));

#[cfg(asan)]
unsafe extern "C" {
    fn __asan_poison_memory_region(address: *const std::ffi::c_void, bytes: usize);
    fn __asan_unpoison_memory_region(address: *const std::ffi::c_void, bytes: usize);
}

/// Protects the red zone behind a buffer of a new pool.
///
/// # Safety
/// `meta` is the start of a buffer, which has [`STRIDE`](super::STRIDE) bytes.
#[inline(always)]
pub(super) unsafe fn created(meta: *mut Meta) {
    #[cfg(asan)]
    // SAFETY: the red zone lies in the stride of the buffer. The function changes shadow memory only.
    unsafe {
        __asan_poison_memory_region(meta.cast::<u8>().add(BUFFER_END).cast(), STRIDE - BUFFER_END);
    }
    let _ = meta;
}

/// Protects a buffer that becomes free. The metadata line stays accessible.
///
/// # Safety
/// `meta` is the start of a buffer that the caller owns.
#[inline(always)]
pub(super) unsafe fn freed(meta: *mut Meta) {
    #[cfg(asan)]
    // SAFETY: the range lies in the buffer. The function changes shadow memory only.
    unsafe {
        __asan_poison_memory_region(meta.cast::<u8>().add(META).cast(), BUFFER_END - META);
    }
    let _ = meta;
}

/// Makes the list of a magazine accessible, or protects it again.
///
/// # Safety
/// `meta` is the start of a free buffer that the caller owns.
#[inline(always)]
pub(super) unsafe fn list(meta: *mut Meta, accessible: bool) {
    #[cfg(asan)]
    // SAFETY: the list lies in the buffer. The functions change shadow memory only.
    unsafe {
        let start = meta.cast::<u8>().add(DATA_START).cast();
        if accessible {
            __asan_unpoison_memory_region(start, MAGAZINE_BYTES);
        } else {
            __asan_poison_memory_region(start, MAGAZINE_BYTES);
        }
    }
    let _ = (meta, accessible);
}

/// Makes a free buffer accessible again that somebody takes.
///
/// # Safety
/// `meta` is the start of a free buffer that the caller owns.
#[inline(always)]
pub(super) unsafe fn taken(meta: *mut Meta) {
    #[cfg(asan)]
    // SAFETY: the range is the buffer without its red zone. The function changes shadow memory only.
    unsafe {
        __asan_unpoison_memory_region(meta.cast(), BUFFER_END);
    }
    let _ = meta;
}

/// Makes all bytes of a pool accessible before its memory can be unmapped and get another use.
///
/// # Safety
/// `bytes` bytes behind `base` are mapped.
pub(super) unsafe fn destroyed(base: *const u8, bytes: usize) {
    #[cfg(asan)]
    // SAFETY: the caller guarantees the range. The function changes shadow memory only.
    unsafe {
        __asan_unpoison_memory_region(base.cast(), bytes);
    }
    let _ = (base, bytes);
}

#[cfg(all(test, asan))]
mod tests {
    use std::process::Command;

    use super::STRIDE;
    use crate::Pool;
    use crate::meta::{BUFFER_END, BUFFER_START, DATA_START};

    unsafe extern "C" {
        fn __asan_address_is_poisoned(address: *const std::ffi::c_void) -> i32;
    }

    #[test]
    fn free_buffers_and_gaps_are_red_zones() {
        let pool = Pool::new("red zones", 300).unwrap();
        let packet = pool.take().unwrap();
        let region = pool.region().clone();
        let start = pool.region_offset() + packet.handle().index as usize * STRIDE;
        let poisoned = |at: usize| {
            assert!(start + at < region.bytes());
            // SAFETY: the address lies in the region, and the function reads shadow memory only.
            unsafe { __asan_address_is_poisoned(region.base().as_ptr().add(start + at).cast()) != 0 }
        };
        let places = [BUFFER_START, DATA_START, DATA_START + 8, BUFFER_END - 1];
        assert_eq!(places.map(poisoned), [false; 4]);
        assert!(poisoned(BUFFER_END) && poisoned(STRIDE - 1));

        drop(packet);
        assert_eq!(places.map(poisoned), [true; 4]);
        assert!(!poisoned(0));

        // All buffers pass through magazines of the shared list, and back.
        let packets: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(packets.len(), 300);
        assert_eq!(places.map(poisoned), [false; 4]);
        drop((packets, pool));
        assert!(!(0..STRIDE).any(poisoned));
    }

    /// Runs the test `name` in a process of its own, and returns what it writes before it ends with an error.
    fn report_of(name: &str) -> String {
        let program = std::env::current_exe().unwrap();
        let output = Command::new(program).args(["--exact", "--ignored", "--nocapture", name]).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    #[test]
    fn wrong_accesses_end_the_process() {
        for name in ["read_after_free", "write_beyond_a_buffer"] {
            let report = report_of(&format!("red_zones::tests::{name}"));
            assert!(report.contains("use-after-poison"), "{report}");
        }
    }

    #[test]
    #[ignore = "ends its process; run by wrong_accesses_end_the_process"]
    fn read_after_free() {
        let pool = Pool::new("read", 1).unwrap();
        let mut packet = pool.take().unwrap();
        let first = packet.append(1).unwrap().as_ptr();
        drop(packet);
        // SAFETY: none. The packet is free, which AddressSanitizer reports.
        assert_eq!(unsafe { first.read_volatile() }, 0);
    }

    #[test]
    #[ignore = "ends its process; run by wrong_accesses_end_the_process"]
    fn write_beyond_a_buffer() {
        let pool = Pool::new("write", 2).unwrap();
        let mut packet = pool.take().unwrap();
        let end = packet.append(2048).unwrap().as_mut_ptr_range().end;
        // SAFETY: none. The byte lies behind the data room, which AddressSanitizer reports.
        unsafe { end.write_volatile(1) };
    }
}
