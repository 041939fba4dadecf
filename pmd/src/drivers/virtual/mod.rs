//! Drivers without a device: ports in memory, in files, and generators.

pub mod memory;
pub mod null;
pub mod pcap;
