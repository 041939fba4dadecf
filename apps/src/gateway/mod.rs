//! `tunnel-gateway`: reading its configuration, running it, and its demonstration.

mod capture;
pub mod demo;
mod report;
mod setup;

pub use capture::Capture;
pub use report::{Report, Reporting};
pub use setup::{EXAMPLE, Setup, check_tags, warn_of_lost_tags};
