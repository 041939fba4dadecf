//! Tunnels.

pub mod config;
pub mod ecn;
pub mod neighbour;
pub mod rate;
pub mod underlay;
