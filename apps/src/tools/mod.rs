//! The tool `wirepath`: what this machine has, what stands in the way, flow rules, ports of running programs, and NICs
//! that are not there.

pub mod attach;
pub mod devices;
pub mod doctor;
pub mod emulate;
pub mod flow;
