// UNSAFETY: reads and writes memory that a device accesses at the same time, by address.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Memory that a device (or a process that plays one) reads and writes while we do: a ring, a doorbell record, a page of registers. It
/// is only ever accessed in whole aligned words, as atomics, so that what the device does meanwhile is never undefined.
///
/// Offsets come from the driver, never from the device: one that is out of range or not aligned is a bug of the driver, and panics.
#[derive(Clone)]
pub struct DeviceMemory {
    start: NonNull<u8>,
    bytes: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: all access is by atomics; the memory is kept alive by `keep`, which is Send and Sync.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Memory from `start`, aligned to 8, for as long as `keep` lives.
    ///
    /// # Safety
    /// `bytes` bytes from `start` are mapped for reading and writing (only writing, if nothing is loaded) while `keep` lives, and the
    /// process accesses them in no other way than through views like this one.
    ///
    /// # Panics
    /// `start` is not aligned to 8.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        assert_eq!(start.as_ptr() as usize % 8, 0, "memory of a device starts at {start:p}, which is not aligned to 8");
        Self { start, bytes, keep }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// First byte: valid for [`Self::bytes`] bytes while this view, or a clone of it, lives.
    pub fn base(&self) -> NonNull<u8> {
        self.start
    }

    /// A part of it.
    ///
    /// # Panics
    /// The part is not inside, or does not start at a multiple of 8.
    pub fn part(&self, offset: usize, bytes: usize) -> Self {
        assert!(offset.is_multiple_of(8) && offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: inside, as just checked.
        let start = unsafe { self.start.add(offset) };
        Self { start, bytes, keep: Arc::clone(&self.keep) }
    }

    #[inline(always)]
    fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset & 3 == 0 && offset < self.bytes && self.bytes - offset >= 4, "no word at offset {offset}");
        // SAFETY: in range and aligned; the address is valid while self lives, and nothing is accessed but by atomics.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    #[inline(always)]
    fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset & 7 == 0 && offset < self.bytes && self.bytes - offset >= 8,
            "no double word at offset {offset}"
        );
        // SAFETY: in range and aligned; the address is valid while self lives, and nothing is accessed but by atomics.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// The word at `offset`, in the machine's byte order.
    #[inline(always)]
    pub fn load32(&self, offset: usize) -> u32 {
        self.word32(offset).load(Ordering::Relaxed)
    }

    /// The double word at `offset`.
    #[inline(always)]
    pub fn load64(&self, offset: usize) -> u64 {
        self.word64(offset).load(Ordering::Relaxed)
    }

    /// The word at `offset`, before anything that is loaded later: for the word with the owner bits, which a device writes last.
    #[inline(always)]
    pub fn load32_acquire(&self, offset: usize) -> u32 {
        self.word32(offset).load(Ordering::Acquire)
    }

    /// Writes the word at `offset`.
    #[inline(always)]
    pub fn store32(&self, offset: usize, value: u32) {
        self.word32(offset).store(value, Ordering::Relaxed);
    }

    /// Writes the double word at `offset`.
    #[inline(always)]
    pub fn store64(&self, offset: usize, value: u64) {
        self.word64(offset).store(value, Ordering::Relaxed);
    }

    /// Writes the word at `offset` after everything that was stored before: for a doorbell record.
    #[inline(always)]
    pub fn store32_release(&self, offset: usize, value: u32) {
        self.word32(offset).store(value, Ordering::Release);
    }

    /// Writes the double word at `offset` after everything that was stored before.
    #[inline(always)]
    pub fn store64_release(&self, offset: usize, value: u64) {
        self.word64(offset).store(value, Ordering::Release);
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("start", &self.start).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// A 64-bit register that tells a device that there is work. Ringing it contains both fences: nothing that was stored before is seen
/// later than the register, and the register (write-combining memory) does not wait in a buffer.
#[derive(Clone, Debug)]
pub struct Doorbell {
    page: DeviceMemory,
    offset: usize,
}

impl Doorbell {
    /// The register at `offset` of a page of registers.
    ///
    /// # Panics
    /// There is no double word at that offset.
    pub fn new(page: &DeviceMemory, offset: usize) -> Self {
        let _ = page.word64(offset);
        Self { page: page.clone(), offset }
    }

    /// Writes the register.
    #[inline(always)]
    pub fn ring(&self, value: u64) {
        store_fence();
        // Volatile: a register is written once for each time it is rung, however often that is.
        self.write(0, value);
        store_fence();
    }

    /// Writes the register, and what follows in the buffer behind it, in order: `count` double words in all. Write-combining memory sends
    /// each line of 64 bytes in one piece, so that it is to be whole lines.
    #[inline(always)]
    pub fn ring_with(&self, count: usize, word: impl Fn(usize) -> u64) {
        store_fence();
        for i in 0..count {
            self.write(i, word(i));
        }
        store_fence();
    }

    #[inline(always)]
    fn write(&self, at: usize, value: u64) {
        // SAFETY: the word is mapped for writing while self lives.
        unsafe { self.page.word64(self.offset + 8 * at).as_ptr().write_volatile(value) };
    }
}

/// Stores before it reach memory and devices before stores after it. A compiler barrier and x86's own order are not enough: registers are
/// mapped write-combining.
#[inline(always)]
fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: sfence is part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier has no operands.
    unsafe {
        std::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(words: usize) -> DeviceMemory {
        let buffer: Arc<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let start = NonNull::from(&buffer[0]).cast();
        // SAFETY: the buffer is kept, aligned to 8, and only reached through the view.
        unsafe { DeviceMemory::new(start, words * 8, Arc::new(buffer)) }
    }

    #[test]
    fn words_are_where_they_were_put() {
        let all = memory(4);
        let end = all.part(24, 8);
        drop(all.clone());
        all.store64(24, 0x1122_3344_5566_7788);
        assert_eq!(end.load64(0), 0x1122_3344_5566_7788);
        end.store32_release(4, 0xaabb_ccdd);
        assert_eq!(all.load32_acquire(28), 0xaabb_ccdd);
        Doorbell::new(&all, 8).ring(7);
        assert_eq!(all.load64(8), 7);
        Doorbell::new(&all, 0).ring_with(2, |i| 5 + i as u64);
        assert_eq!([0, 8, 16].map(|at| all.load64(at)), [5, 6, 0]);
        drop(all);
        assert_eq!(end.load32(4), 0xaabb_ccdd, "a part keeps the whole");
    }

    #[test]
    fn nothing_outside_or_askew_is_touched() {
        let refused = |access: &dyn Fn(&DeviceMemory)| {
            let memory = memory(2);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| access(&memory))).is_err()
        };
        assert!(refused(&|m| m.store32(16, 0)));
        assert!(refused(&|m| m.store64(12, 0)));
        assert!(refused(&|m| assert_eq!(m.load32(14), 0)));
        assert!(refused(&|m| assert_eq!(m.load64(usize::MAX & !7), 0)));
        assert!(refused(&|m| drop(m.part(8, usize::MAX))));
        assert!(refused(&|m| drop(m.part(4, 4))));
        assert!(refused(&|m| drop(Doorbell::new(m, 16))));
        assert!(refused(&|m| Doorbell::new(m, 8).ring_with(2, |_| 0)));
        assert!(!refused(&|m| m.store64(8, 0)));
    }
}
