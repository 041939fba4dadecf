//! MANA: rings, descriptors and doorbells of the Microsoft Azure Network Adapter, as user space sees them through raw-packet queue
//! pairs. Sources: openvmm `vm/devices/net/gdma_defs`, DPDK `drivers/net/mana/mana.h`, rdma-core `providers/mana`.
//!
//! Everything is little-endian. A work queue is a ring of basic units ([`WQE_UNIT`] bytes); head and tail count on for ever, in units
//! (inside) or in bytes (doorbells). A completion queue is a ring of [`CQE_BYTES`]-byte entries, whose owner bits say which pass of
//! the ring an entry belongs to.

mod completion;
mod doorbell;
mod wqe;

pub use completion::*;
pub use doorbell::*;
pub use wqe::*;

const _: () = assert!(cfg!(target_endian = "little"), "device structures are read as they lie in memory");
