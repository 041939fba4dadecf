//! Emulated NICs in user space, below the unmodified libraries of rdma-core.
//!
//! A program that runs with the library of `preload/` finds RDMA devices. libibverbs asks [`netlink`] for
//! them, opens a character device and sends [`uverbs`] commands. The device ([`mana`], [`mlx5`]) processes
//! the queues in the program's memory and checks every descriptor and address. It forwards frames over links
//! to other ports, to network interfaces of the machine, or to files. It refuses what a real NIC refuses, in
//! the same way: by an error code, an error completion or a stopped queue. The log names the reason.
//!
//! - [`topology`] reads the file that describes the devices; [`faults`] injects failures of devices and
//!   kernel.
//! - [`Emulator`] holds all devices of a process behind one lock. It reaches the process only through
//!   [`host::Host`]. This crate therefore has no unsafe code, and its tests run in a memory host of plain
//!   vectors ([`mem_host`]).
//! - [`store_decoder`] decodes the instructions that ring doorbells, and [`load_decoder`] those that read the clock.
//! - [`launch`] starts programs on emulated NICs: `wirepath emulate`, and tests.

#![forbid(unsafe_code)]

pub mod attributes;
mod call;
mod connectx;
mod core_clock;
pub mod device;
mod emulator;
pub mod faults;
pub mod frame;
pub mod host;
mod identity;
mod keys;
pub mod launch;
mod links;
pub mod load_decoder;
mod log;
pub mod mana;
pub mod mem_host;
pub mod mlx5;
pub mod netlink;
mod outbox;
pub mod rules;
pub mod segment;
mod slots;
pub mod store_decoder;
pub mod sysfs;
pub mod topology;
pub mod tunnel;
pub mod uverbs;

pub use core_clock::{ClockPage, CoreClock, StampFormat};
pub use emulator::{DOORBELL_BYTES, Emulator, FILE_BYTES, FILE_NAME, OpenDevice};
pub use keys::{KeyError, MkeyTable, Mr};
pub use log::Log;
pub use outbox::{Frame, Outbox};
