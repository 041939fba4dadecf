//! The application kit: all that a packet program needs besides its stages.
#![forbid(unsafe_code)]

pub mod capture;
pub mod cli;
pub mod configuration;
pub mod control_socket;
pub mod rules;
