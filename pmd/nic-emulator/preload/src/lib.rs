//! The library that puts emulated NICs under a program: `LD_PRELOAD=libwirepath_nic.so`.
//!
//! It stands between the program and libc at a dozen functions (`entry`) and nowhere else: opening `/dev/infiniband/uverbsN`, RDMA
//! netlink sockets, and what follows on those descriptors goes to the emulator; everything else goes on to libc. Doorbell pages are
//! closed to the program, and the stores that fault are carried out by `traps`. Without `WIREPATH_NIC_TOPOLOGY` it does nothing.
//!
//! A child after `fork` begins anew: what it has inherited of the emulator is dead, as a child may not use its parent's RDMA objects.
//! Programs that are linked statically, or that make system calls themselves, are not reached.

// UNSAFETY: functions of libc are defined and called, memory of the program is read and written where its descriptors say, faults are
// handled. Everything that decides anything is in wirepath-nic-emulator, which has no unsafe code.
#![allow(unsafe_code)]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "words lie in pages at multiples of their size, or the pointer is checked, or read unaligned"
)]

mod control;
mod entry;
mod memory;
mod next;
mod process;
mod shared;
mod thread;
mod traps;
mod wires;
