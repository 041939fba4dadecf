//! Bit layouts that drivers and the emulator share. Tests compare them with C headers.
//!
//! - [`uverbs`]: kernel interface of libibverbs in its `write` and `ioctl` forms, with the driver parts of its
//!   commands.
//! - [`netlink`]: RDMA netlink family. libibverbs uses it to find devices.
//! - [`mlx5`]: descriptors, completions, doorbells and steering layouts of ConnectX.
//! - [`mana`]: work-queue elements, completions and doorbells of the Microsoft Azure Network Adapter (GDMA).
//!
//! Structures are plain bytes (`zerocopy`). Numbers that the kernel reads are in host order, those of MANA are
//! little-endian, and those of ConnectX are big-endian. Supported machines are little-endian; [`mana`] checks this at
//! compile time. A code that a device or a peer writes is an integer with named constants. It is never an enum,
//! because values without a name are possible.
//!
//! This crate contains no logic. A driver and the emulator that tests it share these tables, but not the code that
//! reads them.

#![no_std]
#![forbid(unsafe_code)]

mod table;

pub mod mana;
pub mod mlx5;
pub mod netlink;
pub mod uverbs;

pub use table::{Constant, Field, Structure};
