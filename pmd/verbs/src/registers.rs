// UNSAFETY: maps pages of a device.
#![allow(unsafe_code)]

//! Pages of registers, mapped from an open device file.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use wirepath_memory::DeviceMemory;

use crate::context::last_errno;
use crate::error::{Situation, diagnose};
use crate::{CallError, Error, Result};

/// Mapped registers, unmapped with the last view of them.
struct Pages(NonNull<c_void>, usize);

// SAFETY: an address range, unmapped once.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: ours; views of it kept it.
        unsafe { libc::munmap(self.0.as_ptr(), self.1) };
    }
}

/// Maps `bytes` of a device at `offset`. The file may be closed afterwards: the mapping keeps the kernel's side.
pub(crate) fn map(
    device: BorrowedFd<'_>,
    offset: libc::off_t,
    bytes: usize,
    protection: c_int,
) -> Result<DeviceMemory> {
    // By the C library, as rdma-core does it, and not by a bare system call: an emulated NIC watches for this.
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, device.as_raw_fd(), offset) };
    let failed = |errno: i32| {
        let cause = diagnose("mmap", errno, &Situation::default());
        let subject = format!("the device file {}", device.as_raw_fd());
        Error::Call(CallError { call: "mmap", subject, errno, cause })
    };
    if start == libc::MAP_FAILED {
        return Err(failed(last_errno()));
    }
    let start = NonNull::new(start).ok_or_else(|| failed(libc::ENOMEM))?;
    let keep = Arc::new(Pages(start, bytes));
    // SAFETY: mapped for writing while `keep` lives, and used through the view only.
    Ok(unsafe { DeviceMemory::new(start.cast(), bytes, keep) })
}
