//! Code shared by the programs: the command-line conventions ([`cli`]) and the subcommands of `wirepath`.
#![forbid(unsafe_code)]

pub mod capture;
pub mod cli;
pub mod configuration;
pub mod control_socket;
pub mod gateway;
pub mod l2fwd;
pub mod rules;
pub mod tools;
