//! mlx5: descriptors, completions, doorbells and steering layouts of ConnectX, as user space sees them through raw-packet queues.
//! Sources: rdma-core `libibverbs/mlx5dv.h` (`providers/mlx5/mlx5dv.h`), DPDK `drivers/common/mlx5/mlx5_prm.h`, Linux
//! `include/linux/mlx5/device.h`.
//!
//! Every word is big-endian. A send queue is a ring of basic blocks ([`SEND_BLOCK`] bytes) of four segments of 16 bytes; its counter
//! counts blocks, modulo 2^16. A receive queue is a ring of strides and counts entries. A completion queue is a ring of a power of two
//! of entries; the owner bit says which pass of the ring an entry belongs to.

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
