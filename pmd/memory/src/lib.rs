//! Memory that devices and other processes see: regions of huge pages, and free-running ring counters.
//!
//! Everything above this crate names memory by *region and offset*; raw addresses stay in here and in the ring code of drivers.

mod region;
pub mod ring;

pub use region::{Backing, Region, RegionBuilder, RegionError};
