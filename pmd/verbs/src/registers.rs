// UNSAFETY: maps register pages of a device.
#![allow(unsafe_code)]

//! Register pages that are mapped from an open device file.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use wirepath_memory::DeviceMemory;

use crate::context::last_errno;
use crate::error::{CallContext, diagnose};
use crate::{CallError, Error, Result};

/// Mapped register pages. They are unmapped when the last view is dropped.
struct Pages(NonNull<c_void>, usize);

// SAFETY: the mapping is owned and unmapped once, on any thread.
unsafe impl Send for Pages {}
// SAFETY: a shared reference gives no access to the mapping.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping of `self.1` bytes. Views keep `self` alive, so none is left.
        unsafe { libc::munmap(self.0.as_ptr(), self.1) };
    }
}

/// Maps `bytes` bytes of a device at `offset`. The file may be closed afterwards: the mapping keeps the kernel
/// objects alive.
pub(crate) fn map(
    device: BorrowedFd<'_>,
    offset: libc::off_t,
    bytes: usize,
    protection: c_int,
) -> Result<DeviceMemory> {
    // This calls `mmap` of the C library, as rdma-core does, and not the system call: the NIC emulator intercepts the
    // function. SAFETY: the kernel chooses the address of the new mapping, so it replaces no other mapping.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, device.as_raw_fd(), offset) };
    let failed = |errno: i32| {
        let cause = diagnose("mmap", errno, &CallContext::default());
        let subject = format!("the device file descriptor {}", device.as_raw_fd());
        Error::Call(CallError { call: "mmap", subject, errno, cause })
    };
    if start == libc::MAP_FAILED {
        return Err(failed(last_errno()));
    }
    let start = NonNull::new(start).ok_or_else(|| failed(libc::ENOMEM))?;
    let keep = Arc::new(Pages(start, bytes));
    // SAFETY: `bytes` bytes are mapped at `start` while `keep` lives, and they are accessed through the view only.
    Ok(unsafe { DeviceMemory::new(start.cast(), bytes, keep) })
}
