//! Random rules that mean something, and random packets that hit them.

mod packets;
mod pool;
mod rules;
mod templates;

pub use packets::packet;
pub use rules::{change, rule, rules};
