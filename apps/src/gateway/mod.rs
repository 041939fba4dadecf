//! `tunnel-gateway`: reading its configuration, running it, and its demonstration.

mod capture;
pub mod demo;
mod offload;
mod report;
mod setup;

pub use capture::Capture;
pub use offload::{Offload, leave_to_nic};
pub use report::{Report, Reporting};
pub use setup::{EXAMPLE, Setup, check_tags, warn_of_lost_tags};
