//! `infiniband/verbs.h`: types, and functions that the header defines inline.

pub mod context;
pub mod device;
pub mod flow;
mod inline;
pub mod memory;
pub mod queue;

pub use context::*;
pub use device::*;
pub use flow::*;
pub use inline::*;
pub use memory::*;
pub use queue::*;
