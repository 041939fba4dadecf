//! Access to the program's memory, for devices (pinned regions) and for the kernel side (copies).

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use wirepath_nic_emulator::host::Region;

const PAGE: u64 = 4096;
const MADV_POPULATE_READ: c_int = 22;
const MADV_POPULATE_WRITE: c_int = 23;

/// A registered memory region. A program that unmaps it too early is broken. With a real NIC it would not
/// notice; here [`crate::traps`] reports it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned {
    base: *mut u8,
    length: u64,
    writable: bool,
}

// SAFETY: the pointer refers to plain memory that any thread may access. Its content is shared with the
// program in any case.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Makes all pages present, as the kernel does when it pins them.
    pub(crate) fn new(address: u64, length: u64, writable: bool) -> Result<Self, Errno> {
        let end = address.checked_add(length).filter(|_| length > 0).ok_or(Errno::FAULT)?;
        let first = address & !(PAGE - 1);
        let size = (end.checked_next_multiple_of(PAGE).ok_or(Errno::FAULT)? - first) as usize;
        let advice = if writable { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
        // SAFETY: the advice makes pages present and does not change their content. It fails for unmapped
        // pages.
        if unsafe { libc::madvise(first as *mut c_void, size, advice) } != 0 {
            match Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) {
                // Kernels before 5.14 do not know the advice; there it is enough that the pages are mapped.
                Errno::INVAL => {
                    let mut present = vec![0u8; size / PAGE as usize];
                    // SAFETY: `present` has one byte for each page of the range.
                    if unsafe { libc::mincore(first as *mut c_void, size, present.as_mut_ptr()) } != 0 {
                        return Err(Errno::FAULT);
                    }
                }
                _ => return Err(Errno::FAULT),
            }
        }
        Ok(Self { base: address as *mut u8, length, writable })
    }

    #[inline]
    fn at(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let fits = offset <= self.length && length as u64 <= self.length - offset;
        // SAFETY: `offset` is at most the length of the region, so the pointer stays inside the pinned range
        // or at its end.
        fits.then(|| unsafe { self.base.add(offset as usize) })
    }
}

impl Region for Pinned {
    fn address(&self) -> u64 {
        self.base as u64
    }

    fn length(&self) -> u64 {
        self.length
    }

    #[inline]
    fn read(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(at) = self.at(offset, to.len()) else { return false };
        // SAFETY: `at` is valid for reads of `to.len()` bytes inside the pinned region. The program may write
        // there concurrently, as with DMA; the copy then contains old and new bytes.
        unsafe { copy(at, to.as_mut_ptr(), to.len()) };
        true
    }

    #[inline]
    fn write(&self, offset: u64, from: &[u8]) -> bool {
        let Some(at) = self.at(offset, from.len()).filter(|_| self.writable) else { return false };
        // SAFETY: `at` is valid for writes of `from.len()` bytes inside the pinned region, which is writable.
        // The program has given this memory to the device.
        unsafe { copy(from.as_ptr(), at, from.len()) };
        true
    }

    #[inline]
    fn load(&self, offset: u64) -> u32 {
        match self.at(offset, 4) {
            Some(at) if at.cast::<u32>().is_aligned() => {
                // SAFETY: `at` refers to 4 bytes inside the pinned region and is aligned to 4 bytes.
                unsafe { AtomicU32::from_ptr(at.cast()) }.load(Ordering::Acquire)
            }
            _ => 0,
        }
    }

    #[inline]
    fn load_pair(&self, offset: u64) -> u64 {
        match self.at(offset, 8) {
            Some(at) if at.cast::<u64>().is_aligned() => {
                // SAFETY: `at` refers to 8 bytes inside the pinned region and is aligned to 8 bytes.
                unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire)
            }
            _ => 0,
        }
    }

    #[inline(always)]
    fn load_pairs<const N: usize>(&self, offset: u64) -> [u64; N] {
        match self.at(offset, 8 * N) {
            Some(at) if at.cast::<u64>().is_aligned() => std::array::from_fn(|i| {
                // SAFETY: `at` refers to `8 * N` bytes inside the pinned region and is aligned to 8 bytes,
                // and `i` is less than `N`.
                unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(i)) }.load(Ordering::Acquire)
            }),
            _ => [0; N],
        }
    }

    #[inline]
    fn store(&self, offset: u64, value: u32) {
        if let Some(at) = self.at(offset, 4).filter(|at| self.writable && at.cast::<u32>().is_aligned()) {
            // SAFETY: `at` refers to 4 bytes inside the pinned region, which is writable, and is aligned to 4
            // bytes.
            unsafe { AtomicU32::from_ptr(at.cast()) }.store(value, Ordering::Release);
        }
    }

    #[inline]
    fn store_pair(&self, offset: u64, value: u64) {
        if let Some(at) = self.at(offset, 8).filter(|at| self.writable && at.cast::<u64>().is_aligned()) {
            // SAFETY: `at` refers to 8 bytes inside the pinned region, which is writable, and is aligned to 8
            // bytes.
            unsafe { AtomicU64::from_ptr(at.cast()) }.store(value, Ordering::Release);
        }
    }

    #[inline(always)]
    fn store_line(&self, offset: u64, pairs: &[u64; 8]) {
        if let Some(at) = self.at(offset, 64).filter(|at| self.writable && at.cast::<u64>().is_aligned()) {
            let ([front @ .., last], at) = (pairs, at.cast::<u64>());
            for (i, pair) in front.iter().enumerate() {
                // SAFETY: `at` refers to 64 bytes inside the pinned region, which is writable, is aligned to
                // 8 bytes, and `i` is less than 8.
                unsafe { AtomicU64::from_ptr(at.add(i)) }.store(*pair, Ordering::Relaxed);
            }
            // SAFETY: `at` refers to 64 bytes inside the pinned region, which is writable, is aligned to 8
            // bytes, and the index is 7.
            unsafe { AtomicU64::from_ptr(at.add(front.len())) }.store(*last, Ordering::Release);
        }
    }

    #[inline]
    fn demote(&self, offset: u64) {
        if let Some(at) = self.at(offset, 1) {
            // SAFETY: the instruction is a hint: it neither faults nor changes memory. Processors without it
            // execute a no-operation.
            unsafe { std::arch::asm!("cldemote [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) };
        }
    }

    #[inline]
    fn prefetch(&self, offset: u64) {
        if let Some(at) = self.at(offset, 1) {
            // SAFETY: the instruction is a hint: it neither faults nor changes memory.
            unsafe { std::arch::asm!("prefetcht0 [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) };
        }
    }

    #[inline]
    fn prefetch_write(&self, offset: u64) {
        if let Some(at) = self.at(offset, 1) {
            // SAFETY: the instruction is a hint: it neither faults nor changes memory. Processors without it
            // execute a no-operation.
            unsafe { std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) };
        }
    }
}

/// Copies bytes. Descriptors, completions and short frames are copied without a function call.
///
/// # Safety
/// The caller must guarantee what [`std::ptr::copy_nonoverlapping`] requires.
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    const HALF: usize = 32;
    type Half = [u8; HALF];
    if (HALF..=2 * HALF).contains(&length) {
        // SAFETY: the length is between one and two halves, so both halves are inside the ranges that the
        // caller guarantees. They may overlap each other, but both are read before either is written. `[u8;
        // 32]` has no alignment requirement.
        unsafe {
            let halves: [Half; 2] = [from.cast::<Half>().read(), from.add(length - HALF).cast::<Half>().read()];
            to.cast::<Half>().write(halves[0]);
            to.add(length - HALF).cast::<Half>().write(halves[1]);
        }
        return;
    }
    // SAFETY: the caller guarantees that both ranges are valid for `length` bytes and do not overlap.
    unsafe { from.copy_to_nonoverlapping(to, length) };
}

/// Copies within this process by a system call, which reports a wrong address as an error.
fn transfer(read: bool, address: u64, ours: *mut u8, length: usize) -> Result<(), Errno> {
    if length == 0 {
        return Ok(());
    }
    let local = libc::iovec { iov_base: ours.cast(), iov_len: length };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: length };
    // SAFETY: `local` refers to a live buffer of `length` bytes. The kernel checks the range of `remote`.
    let copied = unsafe {
        let own = libc::getpid();
        if read {
            libc::process_vm_readv(own, &raw const local, 1, &raw const remote, 1, 0)
        } else {
            libc::process_vm_writev(own, &raw const local, 1, &raw const remote, 1, 0)
        }
    };
    if copied == length as isize {
        return Ok(());
    }
    let refused = std::io::Error::last_os_error().raw_os_error();
    if copied < 0 && matches!(refused, Some(libc::EPERM | libc::ENOSYS)) {
        // Containers may forbid the system call. A wrong address then terminates the program, as it would in
        // a library. SAFETY: the program names the range in a command, and so claims that it is valid for
        // `length` bytes.
        unsafe {
            if read {
                (address as *const u8).copy_to_nonoverlapping(ours, length);
            } else {
                (address as *mut u8).copy_from_nonoverlapping(ours, length);
            }
        }
        return Ok(());
    }
    Err(Errno::FAULT)
}

/// Copies from the program's memory, like `copy_from_user` of the kernel.
pub(crate) fn copy_in(address: u64, to: &mut [u8]) -> Result<(), Errno> {
    transfer(true, address, to.as_mut_ptr(), to.len())
}

/// Copies to the program's memory, like `copy_to_user` of the kernel.
pub(crate) fn copy_out(address: u64, from: &[u8]) -> Result<(), Errno> {
    transfer(false, address, from.as_ptr().cast_mut(), from.len())
}
