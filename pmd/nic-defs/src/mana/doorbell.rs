//! The doorbell page: one 64-bit register for each kind of queue, shared by all queues of that kind.

use crate::table::bits;

/// Bytes of the page, mapped at offset 0 of the device file.
pub const DOORBELL_PAGE: usize = 4096;
/// Send queues.
pub const DOORBELL_SQ: usize = 0x000;
/// Receive queues.
pub const DOORBELL_RQ: usize = 0x400;
/// Receive queues of a client.
pub const DOORBELL_RQ_CLIENT: usize = 0x408;
/// Completion queues.
pub const DOORBELL_CQ: usize = 0x800;
/// Event queues.
pub const DOORBELL_EQ: usize = 0xff8;
/// Send queues, 32 bits.
pub const DOORBELL_SQ_SHORT: usize = 0x010;
/// Receive queues, 32 bits.
pub const DOORBELL_RQ_SHORT: usize = 0x410;
/// Completion queues, 32 bits.
pub const DOORBELL_CQ_SHORT: usize = 0x810;
/// Event queues, 32 bits.
pub const DOORBELL_EQ_SHORT: usize = 0xff0;

bits! {
    /// Value for a send queue.
    struct SqDoorbell: u64 {
        /// Number of the queue.
        id, with_id: 0, 24;
        /// Bytes posted so far, modulo 2³².
        tail, with_tail: 32, 32;
    }

    /// Value for a receive queue.
    struct RqDoorbell: u64 {
        /// Number of the queue.
        id, with_id: 0, 24;
        /// Zero for raw packets.
        wqe_count, with_wqe_count: 24, 8;
        /// Bytes posted so far, modulo 2³².
        tail, with_tail: 32, 32;
    }

    /// Value for a completion queue.
    struct CqDoorbell: u64 {
        /// Number of the queue.
        id, with_id: 0, 24;
        /// Entries taken so far, modulo 8 times the ring.
        tail, with_tail: 32, 31;
        /// An event is wanted.
        arm, with_arm: 63, 1;
    }

    /// Value of a 32-bit doorbell.
    struct ShortDoorbell: u32 {
        /// What is added to the tail: bytes, or entries of a completion queue.
        increment, with_increment: 0, 16;
        /// Number of the queue.
        id, with_id: 16, 12;
        /// An event is wanted, for completion queues.
        arm, with_arm: 31, 1;
    }
}
