//! The preload library, which puts emulated NICs under a program: `LD_PRELOAD=libwirepath_nic.so`.
//!
//! It replaces about a dozen functions of libc (`libc_hooks`). Calls that open `/dev/infiniband/uverbsN` or
//! an RDMA netlink socket, and calls on these descriptors, go to the emulator. All other calls go to libc.
//! Doorbell pages are protected, and `traps` emulates the stores that fault. Without `WIREPATH_NIC_TOPOLOGY`
//! the library does nothing.
//!
//! A child process after `fork` starts without an emulator, because a child may not use the RDMA objects of
//! its parent. Programs that are linked statically, or that use system calls directly, are not reached.

// UNSAFETY: this library defines and calls functions of libc, accesses memory of the program at addresses in
// its descriptors, and handles faults. All decisions are made in wirepath-nic-emulator, which has no unsafe
// code.
#![allow(unsafe_code)]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "words lie in pages at multiples of their size, or the pointer is checked, or read unaligned"
)]

mod control;
mod interfaces;
mod libc_hooks;
mod lifecycle;
mod memory;
mod next_symbol;
mod process;
mod remote_doorbells;
mod ring;
mod thread;
mod traps;
mod waker;
