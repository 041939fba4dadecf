//! Flow rules of a program: reading them from the configuration and running them around the program's stages.

mod config;
mod control;
pub mod engine;
mod judge;

pub use config::{Entry, Hardware, RULES, RuleSettings, port_names};
pub use control::{ControlWithRules, location_name, run};
pub use judge::UnopenedPorts;
