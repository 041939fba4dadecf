//! Tunnels: VXLAN (RFC 7348) between local segments and remote VTEPs.
//!
//! ```text
//! local port ──> stage: encap ──────────────> underlay port          config   what was asked for, checked
//!                  │  flood, too big                                 tables   what workers read: layout, remotes
//!                  v                                                 neighbour, underlay: next hops; ARP, ND, echo
//!               control <── ARP, ND, echo, unresolved, learned       control  puts them together on the control thread
//!                  ^                                                 counters per segment and worker
//! local port <── stage: decap <────────────── underlay port          ecn, rate: RFC 6040, limits
//! ```
//!
//! [`GatewayControl`] is made from a [`GatewayConfig`] and the opened ports; it makes a [`Gateway`] stage for each worker.

pub mod config;
mod control;
pub mod counters;
mod decap;
pub mod ecn;
mod encap;
mod flood;
pub mod neighbour;
pub mod rate;
mod stage;
pub mod tables;
pub mod underlay;

pub use config::GatewayConfig;
pub use control::{GatewayControl, LearnStats, Tunnel};
pub use stage::{Gateway, GatewayTables, PuntCode};
