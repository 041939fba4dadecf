//! The tool `wirepath`: what this machine has, and what stands in the way.

pub mod devices;
pub mod doctor;
