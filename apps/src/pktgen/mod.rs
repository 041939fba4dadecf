//! Generates traffic on ports and measures what comes back: rate, loss, order, duplicates, corruption and delay.
//!
//! [`Generator::open`] starts the ports, and [`Generator::run`] offers a [`Trial`] and returns its [`TrialResult`]. It
//! prints nothing. The program `wirepath pktgen` is a user of it. [`receive::Receiver`] only receives: its generator is
//! another process.
//!
//! The threads do not use the runtime of packet programs. A worker drops packets that a port does not accept. A
//! generator keeps them, and reads the clock just before it builds each packet.

pub mod clock;
pub mod density;
pub mod flows;
pub mod headers;
pub mod nic_clock;
pub mod ports;
pub mod rate;
pub mod receive;
pub mod report;
pub mod signature;
pub mod size;
pub mod tracker;
mod trial;
pub mod usage;

pub use trial::{Generator, Limit, PortResult, Progress, StampResult, Trial, TrialResult};
