//! Drivers of interfaces that the kernel keeps.

pub mod af_packet;
pub mod af_xdp;
pub(crate) mod common;
pub mod tap;
