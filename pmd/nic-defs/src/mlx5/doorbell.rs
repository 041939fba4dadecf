//! Doorbell records and registers.

use crate::table::{bits, constants};

constants! {
    /// What is compared with infiniband/mlx5dv.h.
    DOORBELL_CONSTANTS;
    /// Word of a queue's doorbell record: entries posted for receiving, 16 bits.
    RECORD_RECEIVE: usize = 0, "MLX5_RCV_DBR";
    /// Word of a queue's doorbell record: basic blocks posted for sending, 16 bits.
    RECORD_SEND: usize = 1, "MLX5_SND_DBR";
}

/// Word of a completion queue's doorbell record: entries consumed, 24 bits (rdma-core `MLX5_CQ_SET_CI`).
pub const RECORD_CONSUMED: usize = 0;
/// Word of a completion queue's doorbell record: [`Arm`] (rdma-core `MLX5_CQ_ARM_DB`).
pub const RECORD_ARM: usize = 1;
/// Bits of the completion queue's consumer counter that the device looks at.
pub const CONSUMED_MASK: u32 = 0xff_ffff;
/// Offset, in a UAR page, of the register that arms completion queues (rdma-core `MLX5_CQ_DOORBELL`).
pub const UAR_ARM: usize = 0x20;
/// Offset, in a UAR page, of the first BlueFlame register (rdma-core `MLX5_BF_OFFSET`).
pub const UAR_BLUE_FLAME: usize = 0x800;

bits! {
    /// Word that arms a completion queue, in its record and, with the queue's number behind it, in the register.
    struct Arm: u32 {
        /// Consumer counter.
        consumed, with_consumed: 0, 24;
        /// Events for solicited completions only.
        solicited_only, with_solicited_only: 24, 1;
        /// Counts the arms modulo 4.
        sequence, with_sequence: 28, 2;
    }
}
