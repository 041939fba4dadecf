//! MANA: rings, descriptors and doorbells of the Microsoft Azure Network Adapter.
//!
//! The layouts are those that user space sees through raw-packet queue pairs. Sources: openvmm
//! `vm/devices/net/gdma_defs`, DPDK `drivers/net/mana/mana.h`, rdma-core `providers/mana`.
//!
//! All values are little-endian. A work queue is a ring of basic units of [`WQE_UNIT`] bytes. Head and tail are
//! free-running: drivers count units, doorbells take bytes. A completion queue is a ring of [`CQE_BYTES`]-byte
//! entries. The owner bits of an entry identify the pass of the ring that wrote it.

mod completion;
mod doorbell;
mod wqe;

pub use completion::*;
pub use doorbell::*;
pub use wqe::*;

const _: () =
    assert!(cfg!(target_endian = "little"), "MANA structures are little-endian and are read without conversion");
