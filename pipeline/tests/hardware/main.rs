//! Tests of rule offload to modelled and emulated NICs.

mod bench;
mod emulated;
mod emulated_ports;
mod matching;
mod model;
mod modelled;
mod scale;
