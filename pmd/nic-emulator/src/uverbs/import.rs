//! Imported contexts: contexts that another process has open.
//!
//! The kernel keeps one state for all processes that have a descriptor of a context. Here the state is in the
//! process that opened the device. A process that imports the context queries objects there, and answers
//! commands about the device itself.

use rustix::io::Errno;

/// Queries of an importing process to the owner of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ImportQuery {
    /// Returns the minor number of the device and the argument of
    /// [`Device::import_context`](crate::device::Device::import_context).
    Context = 1,
    /// Returns the hardware number of a protection domain.
    Pd = 2,
    /// Returns local key, remote key and length of a memory region.
    Mr = 3,
}

impl ImportQuery {
    /// Decodes a query that another process wrote to shared memory.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Context, Self::Pd, Self::Mr].into_iter().find(|query| *query as u32 == number)
    }
}

/// Connection to the process that owns a context.
pub trait ContextOwner: Send + std::fmt::Debug {
    /// Queries an object by its handle.
    ///
    /// # Errors
    /// The errors of [`crate::Emulator::answer_import`]; `EIO` if the owner does not answer.
    fn ask(&self, query: ImportQuery, handle: u32) -> Result<[u64; 3], Errno>;
}
