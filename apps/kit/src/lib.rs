//! The application kit: all that a packet program needs besides its stages.
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
