//! Memory that devices and other processes access.
//!
//! - regions of huge pages, and an allocator of queue buffers
//! - views of device memory, doorbells and descriptor rings
//! - descriptor passing between processes
//! - ring counters
//!
//! Code above this crate names memory by *region and offset*. Raw addresses stay in here and in the ring code
//! of drivers.

mod buffers;
mod device;
pub mod fd_passing;
mod region;
pub mod ring;
mod slots;

pub use buffers::{
    BufferAllocator, BufferAllocatorBuilder, BufferError, BufferLocation, Charge, RegionReport, Usage, charge_to,
};
pub use device::{DeviceMemory, Doorbell};
pub use region::{Backing, Region, RegionBuilder, RegionError};
pub use slots::{Slot, Slots, SlotsView, write as write_slot};
