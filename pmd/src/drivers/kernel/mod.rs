//! Drivers of interfaces that the kernel keeps.

#[cfg(feature = "kernel")]
pub mod af_packet;
#[cfg(feature = "kernel")]
pub mod af_xdp;
#[cfg_attr(not(feature = "kernel"), allow(dead_code, reason = "`auto` and the inventory use a part"))]
pub(crate) mod common;
#[cfg(feature = "kernel")]
pub mod tap;
#[cfg(feature = "kernel")]
pub mod xdp_live;
