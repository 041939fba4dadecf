//! Flow rules of a program: where its configuration has them, and the programs' stages between them.

mod config;
mod control;
mod gateway;
mod socket;

pub use config::{Entry, Hardware, RuleSettings, port_names};
pub use control::{WithRules, run, word};
pub use gateway::{Hop, OwnRule, PRIORITY, decap, encap, gateway_rules};
pub use socket::ask;
