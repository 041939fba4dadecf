//! Doorbell page: one 64-bit register for each kind of queue, shared by all queues of that kind.

use crate::table::bits;

/// Bytes of the doorbell page. It is mapped at offset 0 of the device file.
pub const DOORBELL_PAGE: usize = 4096;
/// Byte offset of the doorbell of send queues.
pub const DOORBELL_SQ: usize = 0x000;
/// Byte offset of the doorbell of receive queues.
pub const DOORBELL_RQ: usize = 0x400;
/// Byte offset of the doorbell of a client's receive queues.
pub const DOORBELL_RQ_CLIENT: usize = 0x408;
/// Byte offset of the doorbell of completion queues.
pub const DOORBELL_CQ: usize = 0x800;
/// Byte offset of the doorbell of event queues.
pub const DOORBELL_EQ: usize = 0xff8;
/// Byte offset of the 32-bit doorbell of send queues.
pub const DOORBELL_SQ_SHORT: usize = 0x010;
/// Byte offset of the 32-bit doorbell of receive queues.
pub const DOORBELL_RQ_SHORT: usize = 0x410;
/// Byte offset of the 32-bit doorbell of completion queues.
pub const DOORBELL_CQ_SHORT: usize = 0x810;
/// Byte offset of the 32-bit doorbell of event queues.
pub const DOORBELL_EQ_SHORT: usize = 0xff0;

bits! {
    /// Doorbell value of a send queue.
    struct SqDoorbell: u64 {
        /// Number of the queue.
        id, with_id: 0, 24;
        /// Bytes posted so far, modulo 2³².
        tail, with_tail: 32, 32;
    }

    /// Doorbell value of a receive queue.
    struct RqDoorbell: u64 {
        /// Number of the queue.
        id, with_id: 0, 24;
        /// Number of WQEs; zero for raw packets.
        wqe_count, with_wqe_count: 24, 8;
        /// Bytes posted so far, modulo 2³².
        tail, with_tail: 32, 32;
    }

    /// Doorbell value of a completion queue.
    struct CqDoorbell: u64 {
        /// Number of the queue.
        id, with_id: 0, 24;
        /// Entries consumed so far, modulo 8 times the ring size.
        tail, with_tail: 32, 31;
        /// 1 to request an event at the next completion.
        arm, with_arm: 63, 1;
    }

    /// Value of a 32-bit doorbell.
    struct ShortDoorbell: u32 {
        /// Increment of the tail: bytes, or entries for a completion queue.
        increment, with_increment: 0, 16;
        /// Number of the queue.
        id, with_id: 16, 12;
        /// 1 to request an event; for completion queues only.
        arm, with_arm: 31, 1;
    }
}
