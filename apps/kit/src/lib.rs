//! The application kit: all that a packet program needs besides its stages.
//!
//! A program writes one or more stages, functions of a batch of packets. The kit does the rest: command line,
//! configuration, ports, flow rules, workers, control socket, metrics, reloads and summary.
//!
//! ```no_run
//! use wirepath::prelude::*;
//!
//! /// Sends every packet back to the port that it came from.
//! fn reflect(context: &mut Context<'_>, batch: &mut Batch) {
//!     if let Some(port) = context.in_port() {
//!         context.send_batch(port, batch);
//!     }
//! }
//!
//! const GENERATED: &str = "[[port]]\nname = 'a'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n";
//!
//! fn main() -> ExitCode {
//!     wirepath::main(|| {
//!         let app = App::<()>::from_args("reflect", "Returns packets.", GENERATED)?;
//!         app.run_stages(|_worker| reflect)
//!     })
//! }
//! ```
//!
//! # Guide
//!
//! | Page | Content |
//! |---|---|
//! | [`first_application`](guide::first_application) | a first program, on generated traffic, a veth and a NIC |
//! | [`batches`](guide::batches) | packets, ownership, headers, drops with reasons |
//! | [`workers`](guide::workers) | queues, RSS, state of a worker, handovers, idle modes |
//! | [`control`](guide::control) | control thread, shared tables, timers, jobs, commands, own settings, reload |
//! | [`rules`](guide::rules) | flow rules around the stages, in software and in the NIC |
//! | [`testing`](guide::testing) | stepped time, memory ports, pcap files, faults |
//! | [`ports`](guide::ports) | drivers: what each needs and how to start; MANA on Azure |
//! | [`performance`](guide::performance) | what costs, and how to measure it |
//! | [`operating`](guide::operating) | systemd, log, control socket, metrics, captures |
//! | [`troubleshooting`](guide::troubleshooting) | causes and remedies by symptom |
//!
//! # Main types
//!
//! [`App`] runs a program, and [`Config`] is its configuration; [`AppSettings`] are tables of its own.
//! [`Stage`](pipeline::Stage), [`Context`](pipeline::Context), [`Batch`](packet::Batch) and
//! [`Packet`](packet::Packet) are the burst path. [`Control`](pipeline::Control) and
//! [`ControlPlane`](pipeline::ControlPlane) are the control thread.
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
pub mod guide;
pub mod prelude;
pub mod privileges;
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
