//! Bit layouts and nothing else: what drivers and the emulator must agree on, and what C headers can check.
//!
//! - [`uverbs`]: the kernel interface of libibverbs, in its `write` and its `ioctl` form, and the driver parts of its commands.
//! - [`netlink`]: the RDMA netlink family, by which libibverbs finds devices.
//! - [`mlx5`]: descriptors, completions, doorbells and steering layouts of ConnectX.
//! - [`mana`]: work-queue elements, completions and doorbells of the Microsoft Azure Network Adapter (GDMA).
//!
//! Structures are plain values of bytes (`zerocopy`), numbers are in host order where the kernel reads them, little-endian where MANA
//! does (the same on the machines that this runs on, which [`mana`] checks at compile time), and big-endian where ConnectX does. A code that a device or
//! a peer writes is an integer with named constants, never an enum: a value without a name is a value all the same.
//!
//! No logic lives here: a driver and the emulator that judges it may share these tables, but not the code that reads them.

#![no_std]
#![forbid(unsafe_code)]

mod table;

pub mod mana;
pub mod mlx5;
pub mod netlink;
pub mod uverbs;

pub use table::{Constant, Field, Structure};
