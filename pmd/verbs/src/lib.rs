//! Safe objects over RDMA verbs (libibverbs and the providers' direct verbs) for raw Ethernet queues.
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
//! **Lifetimes.** Every object keeps what it was made from: a queue its protection domain and completion queues, those the context, the
//! context its device. The last handle that goes destroys the object, so no order of dropping is wrong. A destruction that the kernel
//! refuses is logged, and memory that the device could still write stays mapped until the context is closed.
//!
//! **Errors** name the call, the errno and, where it is known, what is in the way and what removes it ([`Cause`]).
//!
//! **Threads.** Control calls may come from any thread. Nothing here is meant for a burst path: drivers take the memory of their queues
//! ([`mana`], [`mlx5`]) and work on that.

mod allocator;
mod attributes;
mod completion;
mod context;
mod device;
mod domain;
mod error;
mod events;
mod fate;
pub mod flow;
pub mod hbl;
mod lease;
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
pub use device::{Device, Interface, Verbs};
pub use domain::{Domain, ImportedDomain, ParentDomain, ProtectionDomain};
pub use error::{CallError, Cause, Error, Result};
pub use events::{AsyncEvent, AsyncEvents, Element, EventKind};
pub use fate::Fate;
pub use flow::{Counters, Flow, FlowRule, FlowTarget};
pub use lease::{Lease, LeaseView};
pub use memory_region::{Access, ImportedRegion, MemoryRegion};
pub use queue_pair::{QueuePairState, QueueSizes, RawPacketQp, RawPacketQpOptions};
pub use rdma_core_sys::{LIBRARY_DIRECTORY_VARIABLE, LoadError, MissingSymbol, Search, Version};
pub use requests::{Completions, ReceiveRequests, Refused, Segment, SendRequests, status_text};
pub use work_queue::{HashFields, IndirectionTable, RssQp, WorkQueue, WorkQueueOptions};
