//! Wakes the device thread.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// True while the thread sleeps.
static SLEEPING: AtomicBool = AtomicBool::new(false);
/// Eventfd that wakes the thread; -1 if there is none.
static WAKER: AtomicI32 = AtomicI32::new(-1);

/// Sets the eventfd that wakes the thread; -1 for none.
pub(crate) fn set_waker(fd: RawFd) {
    WAKER.store(fd, Ordering::Release);
}

/// Records that the thread sleeps, or that it is awake.
pub(crate) fn set_sleeping(sleeping: bool) {
    SLEEPING.store(sleeping, Ordering::Release);
}

/// Wakes the thread for a queued doorbell, if it sleeps.
pub(crate) fn wake_for_doorbell() {
    if SLEEPING.load(Ordering::Acquire) {
        wake();
    }
}

/// Wakes the thread.
pub(crate) fn wake() {
    let fd = WAKER.load(Ordering::Acquire);
    if fd >= 0 {
        let one = 1u64;
        // SAFETY: the kernel reads the 8 bytes of `one`. A failed write only delays the wake-up.
        unsafe { libc::syscall(libc::SYS_write, fd, &raw const one, 8usize) };
    }
}
