//! The application kit: all that a packet program needs besides its stages.
//!
//! # Features
//!
//! | Feature | Drivers |
//! |---|---|
//! | `nic` | mlx5, mana and verbs, and queues shared with other processes (`wirepath_pmd::ipc`) |
//! | `kernel` | af_xdp, af_packet and tap |
//! | `pcap` | pcap |
//!
//! All are on by default. The drivers auto, memory and null are always built in. A program with few drivers chooses:
//!
//! ```toml
//! wirepath = { version = "0.1", default-features = false, features = ["kernel"] }
//! ```
//!
//! A configuration that names a driver without its feature is refused, and the error names the feature
//! ([`pmd::drivers::LEFT_OUT`]). Captures need no feature.
#![forbid(unsafe_code)]

mod app;
pub mod capture;
pub mod cli;
mod config;
pub mod configuration;
pub mod control_socket;
pub mod prelude;
pub mod reference;
pub mod rules;

pub use app::{App, AppArguments, Built};
pub use cli::{Failure, main};
pub use config::{AppSettings, Config, common_tables};
pub use wirepath_flow as flow;
pub use wirepath_packet as packet;
pub use wirepath_pipeline as pipeline;
pub use wirepath_pmd as pmd;
pub use wirepath_settings as settings;
pub use wirepath_wire as wire;

/// The examples of the readme, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
