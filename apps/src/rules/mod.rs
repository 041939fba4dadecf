//! Flow rules of a program: where its configuration has them.

mod config;

pub use config::{Entry, RuleSettings, port_names};
