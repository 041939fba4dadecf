//! The bundled programs: `l2fwd`, `tunnel-gateway` and the subcommands of `wirepath`.
#![forbid(unsafe_code)]

#[cfg(any(test, fuzzing))]
mod fuzz_input;
pub mod gateway;
pub mod l2fwd;
pub mod machine;
pub mod ndr;
pub mod pktgen;
pub mod tools;
