//! Foreign interface to rdma-core: C types, constants and functions of libibverbs, libmlx5, libmana and
//! libhbl, for rdma-core 44 (Debian 12) to 65. It is the only one in the workspace.
//!
//! Nothing is linked: the libraries are loaded at run time. [`RdmaCore::load`] opens them with `dlopen`. If
//! they are absent, it returns one error that says so, and the rest of the program works. Every function is
//! optional: [`MissingSymbol`] names the library, the version found and the first version with the function.
//!
//! Names are those of the C headers (`infiniband/verbs.h`, `mlx5dv.h`, `manadv.h`), which document them.
//! Comments here add only what the headers do not say. One table declares every struct and constant. A test
//! generates a C program from it and compares sizes, offsets and values with the installed headers. Entries
//! that are younger than those headers carry the first rdma-core version that has them.
//!
//! The published crate of this name (0.1.10, 2018) builds rdma-core 18 with shell scripts and has neither
//! mlx5dv nor manadv. This crate shares only the name with it.

// UNSAFETY: this is a foreign interface, which loads libraries and declares their exports. Callers uphold the
// contracts of the C functions.
#![allow(unsafe_code)]
// The C headers document the mirrored items.
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

/// Returns all tables of mirrored C headers, for the comparison with the installed headers.
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
