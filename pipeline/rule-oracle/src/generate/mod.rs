//! Random valid rules, and random packets that match them.

mod encap_headers;
mod packets;
mod rules;
mod values;

pub use packets::packet;
pub use rules::{change, rule, rules};
