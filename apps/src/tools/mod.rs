//! The tool `wirepath`: what this machine has, what stands in the way, flow rules, and NICs that are not there.

pub mod devices;
pub mod doctor;
pub mod emulate;
pub mod flow;
