//! Ports and poll-mode drivers.
//!
//! A program opens ports by driver name or with `auto` ([`drivers::plan`]), configures and starts them
//! ([`port`]), and polls their queues. Drivers are named in the configuration, never in code. Packets come
//! from [`wirepath_packet::Pool`]s and travel in [`wirepath_packet::Batch`]es.

pub mod drivers;
#[cfg(feature = "nic")]
pub mod ipc;
pub mod port;
#[cfg(feature = "kernel")]
pub mod rtnetlink;
