//! The tool `wirepath`: what this machine has, what stands in the way, and flow rules.

pub mod devices;
pub mod doctor;
pub mod flow;
