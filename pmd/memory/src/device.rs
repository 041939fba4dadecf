// UNSAFETY: reads and writes memory that a device accesses at the same time, by address.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Memory that a device, or a process that emulates one, accesses at the same time: a ring, a doorbell record
/// or a page of registers.
///
/// All accesses are aligned words and atomic, so concurrent accesses by the device are never undefined
/// behaviour.
///
/// Offsets come from the driver, never from the device. An offset that is out of range or unaligned is a bug
/// of the driver and panics.
#[derive(Clone)]
pub struct DeviceMemory {
    start: NonNull<u8>,
    bytes: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: all accesses are atomic, and `keep`, which is `Send` and `Sync`, keeps the memory mapped.
unsafe impl Send for DeviceMemory {}
// SAFETY: all accesses are atomic, and `keep`, which is `Send` and `Sync`, keeps the memory mapped.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Creates a view of the memory at `start`, which `keep` keeps mapped.
    ///
    /// # Safety
    /// While `keep` lives:
    /// - `bytes` bytes from `start` are mapped for reading and writing. A mapping for writing is enough if
    ///   nothing is loaded.
    /// - The process accesses them only through views of this type.
    ///
    /// # Panics
    /// If `start` is not aligned to 8.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        assert_eq!(start.as_ptr() as usize % 8, 0, "device memory at {start:p} is not aligned to 8");
        Self { start, bytes, keep }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte. It is valid for [`Self::bytes`] bytes while this view or a clone of it
    /// lives.
    pub fn base(&self) -> NonNull<u8> {
        self.start
    }

    /// Creates a view of a part of the memory.
    ///
    /// # Panics
    /// If the part is not inside the memory, or does not start at a multiple of 8.
    pub fn part(&self, offset: usize, bytes: usize) -> Self {
        assert!(offset.is_multiple_of(8) && offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: the assertion above guarantees that the part lies inside the memory.
        let start = unsafe { self.start.add(offset) };
        Self { start, bytes, keep: Arc::clone(&self.keep) }
    }

    #[inline(always)]
    fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset & 3 == 0 && offset < self.bytes && self.bytes - offset >= 4,
            "no 32-bit word at offset {offset}"
        );
        // SAFETY: the assertion above guarantees range and alignment. The address is valid while `self`
        // lives, and all accesses are atomic.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    #[inline(always)]
    fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset & 7 == 0 && offset < self.bytes && self.bytes - offset >= 8,
            "no 64-bit word at offset {offset}"
        );
        // SAFETY: the assertion above guarantees range and alignment. The address is valid while `self`
        // lives, and all accesses are atomic.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// Loads the 32-bit word at `offset`, in native byte order.
    #[inline(always)]
    pub fn load32(&self, offset: usize) -> u32 {
        self.word32(offset).load(Ordering::Relaxed)
    }

    /// Loads the 64-bit word at `offset`, in native byte order.
    #[inline(always)]
    pub fn load64(&self, offset: usize) -> u64 {
        self.word64(offset).load(Ordering::Relaxed)
    }

    /// Loads the 32-bit word at `offset` before all later loads: for the word with the owner bits, which a
    /// device writes last.
    #[inline(always)]
    pub fn load32_acquire(&self, offset: usize) -> u32 {
        self.word32(offset).load(Ordering::Acquire)
    }

    /// Stores the 32-bit word at `offset`.
    #[inline(always)]
    pub fn store32(&self, offset: usize, value: u32) {
        self.word32(offset).store(value, Ordering::Relaxed);
    }

    /// Stores the 64-bit word at `offset`.
    #[inline(always)]
    pub fn store64(&self, offset: usize, value: u64) {
        self.word64(offset).store(value, Ordering::Relaxed);
    }

    /// Stores the 32-bit word at `offset` after all earlier stores: for a doorbell record.
    #[inline(always)]
    pub fn store32_release(&self, offset: usize, value: u32) {
        self.word32(offset).store(value, Ordering::Release);
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("start", &self.start).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Doorbell: a 64-bit register that tells a device about new work.
///
/// Ringing it contains both fences. Earlier stores reach the device before the register, and the register,
/// which is mapped write-combining, does not stay in a write buffer.
#[derive(Clone, Debug)]
pub struct Doorbell {
    page: DeviceMemory,
    offset: usize,
}

impl Doorbell {
    /// The register at `offset` of a page of registers.
    ///
    /// # Panics
    /// If the page has no 64-bit word at that offset.
    pub fn new(page: &DeviceMemory, offset: usize) -> Self {
        let _ = page.word64(offset);
        Self { page: page.clone(), offset }
    }

    /// Writes the register.
    #[inline(always)]
    pub fn ring(&self, value: u64) {
        store_fence();
        // Volatile: the compiler must not merge two writes of the register.
        self.write(0, value);
        store_fence();
    }

    /// Writes `count` 64-bit words in order, the first one to the register.
    ///
    /// Write-combining memory sends each line of 64 bytes in one piece, so the words should fill whole lines.
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
        // SAFETY: `word64` has checked range and alignment; the memory is mapped for writing while `self`
        // lives.
        unsafe { self.page.word64(self.offset + 8 * at).as_ptr().write_volatile(value) };
    }
}

/// Orders all earlier stores before all later ones, for memory and devices.
///
/// A compiler barrier and the store order of x86 are not enough, since registers are mapped write-combining.
#[inline(always)]
fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` is part of every x86-64 processor.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier has no operands and no effect on memory safety.
    unsafe {
        std::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Zeroed memory of `words` 64-bit words.
    pub(crate) fn memory(words: usize) -> DeviceMemory {
        let buffer: Arc<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let start = NonNull::from(&*buffer).cast();
        // SAFETY: the view keeps the buffer alive. It is aligned to 8 and only accessed through views.
        unsafe { DeviceMemory::new(start, words * 8, Arc::new(buffer)) }
    }

    #[test]
    fn parts_and_doorbells_address_the_same_words() {
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
        assert_eq!(end.load32(4), 0xaabb_ccdd, "a part keeps the memory mapped");
    }

    #[test]
    fn accesses_out_of_range_or_unaligned_panic() {
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
