//! What the programs share: the command-line contract ([`cli`]) and the parts of the tool `wirepath`.
#![forbid(unsafe_code)]

pub mod cli;
pub mod gateway;
pub mod l2fwd;
pub mod rules;
pub mod tools;
