//! Memory that devices and other processes see: regions of huge pages, buffers for queues cut from them, views of what a device writes,
//! doorbells, rings of slots, files passed between processes, and free-running ring counters.
//!
//! Everything above this crate names memory by *region and offset*; raw addresses stay in here and in the ring code of drivers.

mod buffers;
mod device;
pub mod passing;
mod region;
pub mod ring;
mod slots;

pub use buffers::{
    BufferAllocator, BufferAllocatorBuilder, BufferError, Charge, Place, RegionReport, Usage, charge_to,
};
pub use device::{DeviceMemory, Doorbell};
pub use region::{Backing, Region, RegionBuilder, RegionError};
pub use slots::{Slot, Slots, View, write as write_slot};
