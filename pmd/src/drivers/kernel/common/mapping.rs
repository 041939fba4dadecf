// UNSAFETY: maps memory that the kernel writes too, and unmaps it.
#![allow(unsafe_code)]

//! Memory of a descriptor that this process shares with the kernel.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// A shared mapping for reading and writing. The kernel or one of its programs may access it too, so each user says
/// when which side does.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone, whichever thread has it.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes of a descriptor from an offset on. With `populate`, its pages are there at once.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, bytes: usize, populate: bool) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = if populate { MapFlags::SHARED | MapFlags::POPULATE } else { MapFlags::SHARED };
        // SAFETY: a new mapping at an address of the kernel's choice replaces no existing memory.
        let start = unsafe { mmap(ptr::null_mut(), bytes, protection, flags, fd, offset) }?;
        let it = Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?, bytes };
        // A child that has the mapping too would keep what it belongs to, such as a ring of a socket.
        // SAFETY: the mapping is new, and nobody depends on its being in a child.
        unsafe { madvise(start, bytes, Advice::LinuxDontFork) }?;
        Ok(it)
    }

    /// Address of the first byte. The mapping stays there as long as this value lives.
    #[inline(always)]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping has this address and length, and its user has no reference into it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
