//! Integration tests of the verbs wrappers: with the real rdma-core on emulated NICs, and with stub libraries.
//!
//! They are one test program, because each program links the emulator.

mod common;
mod emulated;
mod no_device;
mod steering;
mod stubs;
mod var;
