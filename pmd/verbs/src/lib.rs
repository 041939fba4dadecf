//! Safe wrappers of RDMA verbs (libibverbs and the providers' direct verbs) for raw Ethernet queues.
//!
//! ```no_run
//! # fn main() -> wirepath_verbs::Result<()> {
//! use wirepath_verbs::{Verbs, mana::Mana};
//!
//! let verbs = Verbs::load()?;
//! for device in verbs.devices()? {
//!     let context = device.open()?;
//!     println!("{}: {}, {} ports", device.name(), context.provider(), context.attributes()?.ports);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! **Lifetimes.** Every object keeps the objects that it was created from: a queue keeps its protection domain and
//! completion queues, these keep the context, and the context keeps its device. Dropping the last handle destroys the
//! object, so every drop order is valid. A failed destruction is logged, and memory that the device could still write
//! stays mapped until the context is closed.
//!
//! **Errors** contain the call, the errno and, where it is known, the cause and the remedy ([`Cause`]).
//!
//! **Threads.** Control calls may come from any thread. The mlx5 and MANA drivers do not use this crate on the data
//! path: they access the memory of their queues directly ([`mana`], [`mlx5`]).

mod allocator;
mod attributes;
mod completion;
mod context;
mod destroyed_flag;
mod device;
mod domain;
mod error;
mod events;
pub mod flow;
pub mod hbl;
mod liveness;
pub mod mana;
mod memory_region;
pub mod mlx5;
mod queue_pair;
mod registers;
mod requests;
mod work_queue;

pub use allocator::QueueAllocator;
pub use attributes::{DeviceAttributes, LinkLayer, PortAttributes, PortState, RawPacketCapabilities, RssCapabilities};
pub use completion::{CompletionChannel, CompletionQueue, CompletionQueueOptions, WorkCompletion};
pub use context::{Context, ObjectId, Provider};
pub use destroyed_flag::DestroyedFlag;
pub use device::{Device, Interface, Verbs};
pub use domain::{Domain, ImportedDomain, ParentDomain, ProtectionDomain};
pub use error::{CallError, Cause, Error, Result};
pub use events::{AsyncEvent, AsyncEvents, Element, EventKind};
pub use flow::{Counters, Flow, FlowRule, FlowTarget};
pub use liveness::{Liveness, LivenessView};
pub use memory_region::{Access, ImportedRegion, MemoryRegion};
pub use queue_pair::{QueuePairState, QueueSizes, RawPacketQp, RawPacketQpOptions};
pub use rdma_core_sys::{LIBRARY_DIRECTORY_VARIABLE, LoadError, MissingSymbol, Search, Version};
pub use requests::{CompletionBatch, PostError, ReceiveRequests, Segment, SendRequests, TsoRequest, status_text};
pub use work_queue::{HashFields, IndirectionTable, RssQp, WorkQueue, WorkQueueOptions};
