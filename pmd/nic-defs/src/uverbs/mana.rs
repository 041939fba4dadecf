//! Driver parts of MANA (`rdma/mana-abi.h`).

use crate::table::structures;

/// ABI version of the driver.
pub const ABI_VERSION: u64 = 1;
/// [`CreateCq::flags`]: a queue of the RDMA function, not of raw packets.
pub const CREATE_RNIC_CQ: u16 = 1;
/// [`CreateRssQp::rx_hash_function`].
pub const HASH_TOEPLITZ: u8 = 1;
/// Entries of [`RssReply`].
pub const MAX_INDIRECTION: usize = 64;
/// Bytes of the hash key.
pub const KEY_BYTES: usize = 40;

structures! {
    /// What is compared with rdma/mana-abi.h, where it is installed.
    STRUCTURES;

    /// Completion queue. rdma-core 44 sends the first 8 bytes only.
    struct CreateCq = "struct mana_ib_create_cq" {
        /// Address of the ring.
        buf_addr: u64,
        /// [`CREATE_RNIC_CQ`].
        flags: u16,
        /// Zero.
        reserved0: u16,
        /// Zero.
        reserved1: u32,
    }

    /// Reply; rdma-core 44 asks for none.
    struct CreateCqReply = "struct mana_ib_create_cq_resp" {
        /// Number, for queues of the RDMA function.
        cqid: u32,
        /// Zero.
        reserved: u32,
    }

    /// Raw-packet queue pair: the send queue.
    struct CreateQp = "struct mana_ib_create_qp" {
        /// Address of the ring.
        sq_buf_addr: u64,
        /// Bytes of the ring.
        sq_buf_size: u32,
        /// From 1.
        port: u32,
    }

    /// Reply.
    struct CreateQpReply = "struct mana_ib_create_qp_resp" {
        /// Number of the send queue.
        sqid: u32,
        /// Number of the completion queue, told here for the first time.
        cqid: u32,
        /// What every packet names as its virtual port.
        tx_vp_offset: u32,
        /// Zero.
        reserved: u32,
    }

    /// Work queue.
    struct CreateWq = "struct mana_ib_create_wq" {
        /// Address of the ring.
        wq_buf_addr: u64,
        /// Bytes of the ring.
        wq_buf_size: u32,
        /// Zero.
        reserved: u32,
    }

    /// Queue pair that spreads packets over an indirection table.
    struct CreateRssQp = "struct mana_ib_create_qp_rss" {
        /// `RX_HASH_*`.
        rx_hash_fields_mask: u64,
        /// [`HASH_TOEPLITZ`].
        rx_hash_function: u8,
        /// Zero.
        reserved: [u8; 7],
        /// [`KEY_BYTES`].
        rx_hash_key_len: u32,
        /// Key.
        rx_hash_key: [u8; 40],
        /// From 1.
        port: u32,
    }

    /// Numbers behind one entry of the indirection table.
    struct RssEntry = "struct rss_resp_entry" {
        /// Completion queue.
        cqid: u32,
        /// Work queue.
        wqid: u32,
    }

    /// Reply.
    struct RssReply = "struct mana_ib_create_qp_rss_resp" {
        /// Entries that count.
        num_entries: u64,
        /// One for each entry of the table.
        entries: [RssEntry; 64],
    }
}
