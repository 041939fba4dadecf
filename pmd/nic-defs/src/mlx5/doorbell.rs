//! Doorbell records and registers.

use crate::table::{bits, constants};

constants! {
    /// Constants that `tests/headers.rs` compares with infiniband/mlx5dv.h.
    DOORBELL_CONSTANTS;
    /// Word index in a queue's doorbell record: posted receive entries (16 bits).
    RECORD_RECEIVE: usize = 0, "MLX5_RCV_DBR";
    /// Word index in a queue's doorbell record: posted send basic blocks (16 bits).
    RECORD_SEND: usize = 1, "MLX5_SND_DBR";
}

/// Word index in a completion queue's doorbell record: consumed entries, 24 bits (rdma-core `MLX5_CQ_SET_CI`).
pub const RECORD_CONSUMED: usize = 0;
/// Word index in a completion queue's doorbell record: [`Arm`] (rdma-core `MLX5_CQ_ARM_DB`).
pub const RECORD_ARM: usize = 1;
/// Bits of a completion queue's consumer counter that the device reads.
pub const CONSUMED_MASK: u32 = 0xff_ffff;
/// Byte offset in a UAR page of the register that arms completion queues (rdma-core `MLX5_CQ_DOORBELL`).
pub const UAR_ARM: usize = 0x20;
/// Byte offset in a UAR page of the first BlueFlame register (rdma-core `MLX5_BF_OFFSET`).
pub const UAR_BLUE_FLAME: usize = 0x800;

bits! {
    /// Word that arms a completion queue. It goes to the doorbell record, and to the register followed by the queue
    /// number.
    struct Arm: u32 {
        /// Consumer counter.
        consumed, with_consumed: 0, 24;
        /// 1 to request an event for solicited completions only.
        solicited_only, with_solicited_only: 24, 1;
        /// Number of times the queue was armed, modulo 4.
        sequence, with_sequence: 28, 2;
    }
}
