//! mlx5: descriptors, completions, doorbells and steering layouts of ConnectX.
//!
//! The layouts are those that user space sees through raw-packet queues.
//! Sources: rdma-core `libibverbs/mlx5dv.h` (`providers/mlx5/mlx5dv.h`), DPDK `drivers/common/mlx5/mlx5_prm.h`, Linux
//! `include/linux/mlx5/device.h`.
//!
//! All words are big-endian. A send queue is a ring of basic blocks of [`SEND_BLOCK`] bytes, each with four 16-byte
//! segments. Its counter counts blocks modulo 2^16. A receive queue is a ring of entries of equal size, and its
//! counter counts entries. A completion queue is a ring with a power-of-two number of entries. The owner bit of an
//! entry identifies the pass of the ring.

mod completion;
mod devx;
mod doorbell;
mod steering;
mod wqe;

pub use completion::*;
pub use devx::*;
pub use doorbell::*;
pub use steering::*;
pub use wqe::*;
