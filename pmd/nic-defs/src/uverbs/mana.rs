//! Driver parts of MANA commands (`rdma/mana-abi.h`).

use crate::table::structures;

/// ABI version of the driver.
pub const ABI_VERSION: u64 = 1;
/// Flag of [`CreateCq::flags`]: a queue of the RDMA function, not of raw packets.
pub const CREATE_RNIC_CQ: u16 = 1;
/// Value of [`CreateRssQp::rx_hash_function`].
pub const HASH_TOEPLITZ: u8 = 1;
/// Maximum number of entries of [`RssReply`].
pub const MAX_INDIRECTION: usize = 64;
/// Bytes of the RSS hash key.
pub const KEY_BYTES: usize = 40;

structures! {
    /// Structures that `tests/headers.rs` compares with rdma/mana-abi.h, where it is installed.
    STRUCTURES;

    /// Request to create a completion queue. rdma-core 44 sends the first 8 bytes only.
    struct CreateCq = "struct mana_ib_create_cq" {
        /// Address of the ring.
        buf_addr: u64,
        /// Flags: [`CREATE_RNIC_CQ`].
        flags: u16,
        /// Zero.
        reserved0: u16,
        /// Zero.
        reserved1: u32,
    }

    /// Reply to [`CreateCq`]. rdma-core 44 does not request it.
    struct CreateCqReply = "struct mana_ib_create_cq_resp" {
        /// Queue number, for queues of the RDMA function.
        cqid: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request to create a raw-packet queue pair, which has a send queue only.
    struct CreateQp = "struct mana_ib_create_qp" {
        /// Address of the ring.
        sq_buf_addr: u64,
        /// Bytes of the ring.
        sq_buf_size: u32,
        /// Port number, counted from 1.
        port: u32,
    }

    /// Reply to [`CreateQp`].
    struct CreateQpReply = "struct mana_ib_create_qp_resp" {
        /// Number of the send queue.
        sqid: u32,
        /// Number of the completion queue. No earlier reply contains it.
        cqid: u32,
        /// Virtual port offset that every packet carries in its OOB.
        tx_vp_offset: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request to create a work queue.
    struct CreateWq = "struct mana_ib_create_wq" {
        /// Address of the ring.
        wq_buf_addr: u64,
        /// Bytes of the ring.
        wq_buf_size: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request to create an RSS queue pair over an indirection table.
    struct CreateRssQp = "struct mana_ib_create_qp_rss" {
        /// Hashed fields `RX_HASH_*`.
        rx_hash_fields_mask: u64,
        /// Hash function: [`HASH_TOEPLITZ`].
        rx_hash_function: u8,
        /// Zero.
        reserved: [u8; 7],
        /// Length of the key: [`KEY_BYTES`].
        rx_hash_key_len: u32,
        /// RSS hash key.
        rx_hash_key: [u8; 40],
        /// Port number, counted from 1.
        port: u32,
    }

    /// Queue numbers of one entry of the indirection table.
    struct RssEntry = "struct rss_resp_entry" {
        /// Number of the completion queue.
        cqid: u32,
        /// Number of the work queue.
        wqid: u32,
    }

    /// Reply to [`CreateRssQp`].
    struct RssReply = "struct mana_ib_create_qp_rss_resp" {
        /// Number of valid entries.
        num_entries: u64,
        /// One element for each entry of the indirection table.
        entries: [RssEntry; 64],
    }
}
