//! NICs in user space, under the unmodified libraries of rdma-core.
//!
//! A program that is started with `preload/`'s library finds RDMA devices: libibverbs asks [`netlink`] for them, opens a character device
//! and sends [`uverbs`] commands; the device ([`mana`]) works on the queues that the program keeps in its own memory, checks every
//! descriptor and address, and moves frames over links to other ports, to interfaces of the machine, or to files. What a real NIC would
//! refuse is refused in its way (an error code, an error completion, a queue that stops), and a line of the log says why.
//!
//! - [`topology`] is the file that says which devices there are, [`faults`] what goes wrong with them on order.
//! - [`Emulator`] is all devices of a process behind one lock. It reaches the process only through [`host::Host`], so that everything here
//!   is free of unsafe code and runs on plain vectors in tests.
//! - [`trap`] understands the instructions that ring doorbells.
//! - [`launch`] starts programs on emulated NICs: `wirepath emulate`, and tests.

#![forbid(unsafe_code)]

mod connectx;
pub mod device;
mod emulator;
mod fabric;
pub mod faults;
pub mod frame;
pub mod host;
mod identity;
mod keys;
pub mod launch;
mod log;
pub mod mana;
pub mod mlx5;
pub mod netlink;
pub mod rules;
pub mod segment;
mod slab;
pub mod sysfs;
pub mod topology;
pub mod trap;
pub mod tunnel;
pub mod uverbs;
pub mod vectors;
mod wire;

pub use emulator::{DOORBELL_BYTES, Emulator, FILE_BYTES, FILE_NAME, Opened};
pub use keys::{Keys, Mr, Refusal};
pub use log::Log;
pub use wire::{Frame, Outbox};

/// Nanoseconds since this was first asked: the clock of devices that stamp packets.
pub(crate) fn clock() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
}
