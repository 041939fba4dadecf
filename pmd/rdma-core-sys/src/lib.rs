//! The only foreign interface to rdma-core: C types, constants and run-time loaded functions of libibverbs, libmlx5, libmana and libhbl,
//! for rdma-core 44 (Debian 12) to 65.
//!
//! Nothing is linked. [`RdmaCore::load`] opens the libraries with `dlopen`; where they are absent it gives one error that says so, and
//! the rest of a program works. Every function is optional: [`MissingSymbol`] names the library, the version found and the version
//! that first had it.
//!
//! The names are those of the C headers (`infiniband/verbs.h`, `mlx5dv.h`, `manadv.h`), where their meaning is documented; a comment
//! here says only what the header does not. Every struct and constant is declared through one table, from which a test generates a C
//! program and compares sizes, offsets and values with the headers that are installed. What is younger than those headers carries the
//! rdma-core version that brought it.
//!
//! The published crate of this name (0.1.10, 2018) builds rdma-core 18 with shell scripts and has neither mlx5dv nor manadv; this one
//! shares nothing with it but the name.

// UNSAFETY: a foreign interface: it loads libraries and declares what they export. Callers hold the contracts of the C functions.
#![allow(unsafe_code)]
// Documented by the C headers that they mirror.
#![allow(missing_docs, non_camel_case_types)]

#[macro_use]
mod mirror;
#[macro_use]
mod load;
pub mod hbldv;
mod ibverbs;
pub mod manadv;
pub mod mlx5dv;
pub mod verbs;

pub use ibverbs::Ibverbs;
pub use load::{LIBRARY_DIRECTORY_VARIABLE, Library, LoadError, MissingSymbol, RdmaCore, Search, Symbol, Version};
pub use mirror::{Constant, Field, Table, TypeLayout};

/// Everything mirrored from C headers, for the comparison with the installed ones.
pub fn tables() -> [&'static Table; 8] {
    [
        &verbs::device::DEVICE_LAYOUTS,
        &verbs::context::CONTEXT_LAYOUTS,
        &verbs::memory::MEMORY_LAYOUTS,
        &verbs::queue::QUEUE_LAYOUTS,
        &verbs::flow::FLOW_LAYOUTS,
        &manadv::MANADV_LAYOUTS,
        &mlx5dv::MLX5DV_LAYOUTS,
        &hbldv::HBLDV_LAYOUTS,
    ]
}
