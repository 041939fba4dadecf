//! Packets, pools, batches, ports and poll-mode drivers.
//!
//! A program opens ports by driver name or with `auto` ([`drivers::plan`]), configures and starts them ([`port`]), and polls the
//! queues it gets. It never names a driver in code. Packets come from [`packet::Pool`]s and travel in [`packet::Batch`]es.

pub mod counters;
pub mod drivers;
pub mod drops;
pub mod flow;
pub mod packet;
pub mod port;

/// Queues of a running port in another process.
pub use drivers::direct::attach;
/// Configuration files, read key by key.
pub use wirepath_settings as settings;
