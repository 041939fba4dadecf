//! Completion-queue entries.

use zerocopy::big_endian::{U16, U32, U64};

use crate::table::{bits, constants, structures};

constants! {
    /// What is compared with infiniband/mlx5dv.h.
    CQE_CONSTANTS;
    /// A send WQE is done.
    CQE_REQUEST: u8 = 0, "MLX5_CQE_REQ";
    /// A packet with immediate data came.
    CQE_RESPONDER_WRITE_IMM: u8 = 1, "MLX5_CQE_RESP_WR_IMM";
    /// A packet came.
    CQE_RESPONDER_SEND: u8 = 2, "MLX5_CQE_RESP_SEND";
    /// A packet with immediate data came.
    CQE_RESPONDER_SEND_IMM: u8 = 3, "MLX5_CQE_RESP_SEND_IMM";
    /// A packet that invalidates a key came.
    CQE_RESPONDER_SEND_INVALIDATE: u8 = 4, "MLX5_CQE_RESP_SEND_INV";
    /// The queue was resized.
    CQE_RESIZE: u8 = 5, "MLX5_CQE_RESIZE_CQ";
    /// No packet.
    CQE_NO_PACKET: u8 = 6, "MLX5_CQE_NO_PACKET";
    /// Signature error.
    CQE_SIGNATURE_ERROR: u8 = 12, "MLX5_CQE_SIG_ERR";
    /// A send WQE failed.
    CQE_REQUEST_ERROR: u8 = 13, "MLX5_CQE_REQ_ERR";
    /// A receive WQE failed.
    CQE_RESPONDER_ERROR: u8 = 14, "MLX5_CQE_RESP_ERR";
    /// Nothing was written here yet.
    CQE_INVALID: u8 = 15, "MLX5_CQE_INVALID";
    /// Wrong length.
    SYNDROME_LOCAL_LENGTH: u8 = 0x01, "MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR";
    /// A malformed WQE.
    SYNDROME_LOCAL_QP_OPERATION: u8 = 0x02, "MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR";
    /// A key or address that the queue may not use.
    SYNDROME_LOCAL_PROTECTION: u8 = 0x04, "MLX5_CQE_SYNDROME_LOCAL_PROT_ERR";
    /// The queue failed before.
    SYNDROME_FLUSHED: u8 = 0x05, "MLX5_CQE_SYNDROME_WR_FLUSH_ERR";
    /// Binding of a memory window.
    SYNDROME_WINDOW_BIND: u8 = 0x06, "MLX5_CQE_SYNDROME_MW_BIND_ERR";
    /// An unexpected response.
    SYNDROME_BAD_RESPONSE: u8 = 0x10, "MLX5_CQE_SYNDROME_BAD_RESP_ERR";
    /// Local access.
    SYNDROME_LOCAL_ACCESS: u8 = 0x11, "MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR";
    /// The peer refused the request.
    SYNDROME_REMOTE_INVALID: u8 = 0x12, "MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR";
    /// The peer refused the access.
    SYNDROME_REMOTE_ACCESS: u8 = 0x13, "MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR";
    /// The peer failed.
    SYNDROME_REMOTE_OPERATION: u8 = 0x14, "MLX5_CQE_SYNDROME_REMOTE_OP_ERR";
    /// Too many retries.
    SYNDROME_RETRIES: u8 = 0x15, "MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR";
    /// The peer was not ready too often.
    SYNDROME_RNR_RETRIES: u8 = 0x16, "MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR";
    /// The peer aborted.
    SYNDROME_ABORTED: u8 = 0x22, "MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR";
    /// Format of compressed entries, as the verbs interface numbers it: hash in each mini entry.
    MINI_FORMAT_HASH: u8 = 1, "MLX5DV_CQE_RES_FORMAT_HASH";
    /// Checksum in each mini entry.
    MINI_FORMAT_CSUM: u8 = 2, "MLX5DV_CQE_RES_FORMAT_CSUM";
    /// Checksum and stride index in each mini entry.
    MINI_FORMAT_CSUM_STRIDE: u8 = 4, "MLX5DV_CQE_RES_FORMAT_CSUM_STRIDX";
}

structures! {
    /// What is compared with infiniband/mlx5dv.h.
    CQE_STRUCTURES;

    /// An entry. What the header calls reserved is named by the constants below, after DPDK and Linux.
    struct Cqe = "struct mlx5_cqe64" {
        /// [`CQE_PACKET_INFO`].
        rsvd0: [u8; 2],
        /// Index of the WQE, of striding receive queues.
        wqe_id: U16,
        /// LRO, hash ([`CQE_RX_HASH`]) and hash type ([`CQE_RX_HASH_TYPE`]).
        rsvd4: [u8; 13],
        /// Of InfiniBand.
        ml_path: u8,
        /// Checksum ([`CQE_CHECKSUM`]).
        rsvd20: [u8; 4],
        /// Of InfiniBand.
        slid: U16,
        /// Of InfiniBand.
        flags_rqpn: U32,
        /// High byte of [`CqeFlags`].
        hds_ip_ext: u8,
        /// Low byte of [`CqeFlags`].
        l4_hdr_type_etc: u8,
        /// The VLAN tag that was taken off.
        vlan_info: U16,
        /// User index, or number of the shared receive queue, in 24 bits; above them LRO.
        srqn_uidx: U32,
        /// Register B.
        imm_inval_pkey: U32,
        /// Tag matching.
        app: u8,
        /// Tag matching.
        app_op: u8,
        /// Tag matching.
        app_info: U16,
        /// Bytes of the packet; of striding queues [`StrideCount`]; of the title of a compressed session, the number of mini entries.
        byte_cnt: U32,
        /// In ticks of the device, or seconds and nanoseconds.
        timestamp: U64,
        /// Received: flow tag in 24 bits. Sent: opcode (8 bits) and queue.
        sop_drop_qpn: U32,
        /// Received: WQE, or first stride. Sent: block counter of the WQE.
        wqe_counter: U16,
        /// Zero.
        signature: u8,
        /// [`CqeOwner`].
        op_own: u8,
    }

    /// An entry of [`CQE_REQUEST_ERROR`] or [`CQE_RESPONDER_ERROR`].
    struct ErrorCqe = "struct mlx5_err_cqe" {
        /// Unused.
        rsvd0: [u8; 32],
        /// As in [`Cqe`].
        srqn: U32,
        /// Unused.
        rsvd1: [u8; 18],
        /// For the vendor.
        vendor_err_synd: u8,
        /// `SYNDROME_*`.
        syndrome: u8,
        /// Opcode and queue.
        s_wqe_opcode_qpn: U32,
        /// As in [`Cqe`].
        wqe_counter: U16,
        /// Zero.
        signature: u8,
        /// [`CqeOwner`].
        op_own: u8,
    }
}

/// Bytes of an entry.
pub const CQE_BYTES: usize = 64;
/// Offset of a byte with bit 0 for tunneled packets and bit 1 for an outer IPv6 header (DPDK `pkt_info`).
pub const CQE_PACKET_INFO: usize = 0x00;
/// Offset of the hash (32 bits).
pub const CQE_RX_HASH: usize = 0x0c;
/// Offset of [`HashType`].
pub const CQE_RX_HASH_TYPE: usize = 0x10;
/// Offset of the sum over the packet (16 bits).
pub const CQE_CHECKSUM: usize = 0x14;
/// Offset of [`CqeFlags`].
pub const CQE_FLAGS: usize = 0x1c;
/// Offset of [`CqeOwner`], written last.
pub const CQE_OWNER: usize = 0x3f;
/// [`CqeOwner`] of a fresh ring: [`CQE_INVALID`], which no pass owns.
pub const CQE_FRESH: u8 = CQE_INVALID << 4;
/// Flow tag of packets that no rule has tagged.
pub const NO_TAG: u32 = 0;

/// [`CqeOwner::format`] of a whole entry.
pub const FORMAT_NONE: u8 = 0;
/// [`CqeOwner::format`] of the title of a compressed session.
pub const FORMAT_COMPRESSED: u8 = 3;

/// Bytes of a mini entry: four as the format says, then the length (32 bits).
pub const MINI_BYTES: usize = 8;
/// Mini entries of an array, which takes the place of one entry.
pub const MINIS_PER_ENTRY: usize = 8;

bits! {
    /// Last byte of an entry.
    struct CqeOwner: u8 {
        /// Changes with each pass of the ring; 0 in the first.
        owner, with_owner: 0, 1;
        /// Solicited.
        solicited, with_solicited: 1, 1;
        /// `FORMAT_*`.
        format, with_format: 2, 2;
        /// `CQE_*`.
        opcode, with_opcode: 4, 4;
    }

    /// What the device found out about a received packet, 16 bits at [`CQE_FLAGS`] (DPDK `hdr_type_etc`).
    struct CqeFlags: u16 {
        /// The VLAN tag was taken off.
        vlan_stripped, with_vlan_stripped: 0, 1;
        /// IPv4 options or IPv6 extension headers.
        ip_options, with_ip_options: 1, 1;
        /// `L3_*`.
        l3_type, with_l3_type: 2, 2;
        /// `L4_*`.
        l4_type, with_l4_type: 4, 3;
        /// A fragment.
        fragment, with_fragment: 7, 1;
        /// Link layer in order.
        l2_ok, with_l2_ok: 8, 1;
        /// IPv4 header checksum good (or IPv6).
        l3_ok, with_l3_ok: 9, 1;
        /// TCP or UDP checksum good.
        l4_ok, with_l4_ok: 10, 1;
    }

    /// What was hashed (Linux `CQE_RSS_HTYPE_*`).
    struct HashType: u8 {
        /// 1 IPv4, 2 IPv6.
        ip, with_ip: 2, 2;
        /// 1 TCP, 2 UDP, 3 IPsec.
        l4, with_l4: 6, 2;
    }

    /// [`Cqe::byte_cnt`] of striding receive queues.
    struct StrideCount: u32 {
        /// Bytes of the packet.
        length, with_length: 0, 16;
        /// Strides that it took.
        strides, with_strides: 16, 14;
        /// No packet, only strides that are passed over.
        filler, with_filler: 31, 1;
    }
}

/// [`CqeFlags::l3_type`].
pub const L3_IPV6: u16 = 1;
/// [`CqeFlags::l3_type`].
pub const L3_IPV4: u16 = 2;
/// [`CqeFlags::l4_type`].
pub const L4_TCP: u16 = 1;
/// [`CqeFlags::l4_type`].
pub const L4_UDP: u16 = 2;
/// [`CqeFlags::l4_type`]: TCP without payload and with ACK.
pub const L4_TCP_EMPTY_ACK: u16 = 3;
/// [`CqeFlags::l4_type`]: TCP with ACK.
pub const L4_TCP_ACK: u16 = 4;

/// Owner bit of the entry that a free-running consumer counter stands at, in a ring of `1 << log_entries`.
#[inline(always)]
pub const fn cqe_owner(counter: u32, log_entries: u32) -> u8 {
    (counter >> log_entries & 1) as u8
}

/// What a syndrome says, for people.
pub const fn syndrome_text(syndrome: u8) -> &'static str {
    match syndrome {
        SYNDROME_LOCAL_LENGTH => "local length error: a descriptor's length fits neither the packet nor the queue",
        SYNDROME_LOCAL_QP_OPERATION => "local queue operation error: a malformed descriptor",
        SYNDROME_LOCAL_PROTECTION => "local protection error: a key or address outside the registered memory",
        SYNDROME_FLUSHED => "flushed: the queue had failed before",
        SYNDROME_WINDOW_BIND => "memory window bind error",
        SYNDROME_BAD_RESPONSE => "bad response",
        SYNDROME_LOCAL_ACCESS => "local access error",
        SYNDROME_REMOTE_INVALID => "remote invalid request",
        SYNDROME_REMOTE_ACCESS => "remote access error",
        SYNDROME_REMOTE_OPERATION => "remote operation error",
        SYNDROME_RETRIES => "transport retry counter exceeded",
        SYNDROME_RNR_RETRIES => "receiver-not-ready retry counter exceeded",
        SYNDROME_ABORTED => "remote aborted",
        _ => "unknown syndrome",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_bit_changes_with_every_pass_and_fresh_rings_are_nobodys() {
        assert_eq!([0, 255, 256, 511, 512, u32::MAX].map(|ci| cqe_owner(ci, 8)), [0, 0, 1, 1, 0, 1]);
        let fresh = CqeOwner(CQE_FRESH);
        assert_eq!((fresh.opcode(), fresh.owner()), (CQE_INVALID, 0));
    }

    #[test]
    fn titles_of_compressed_sessions_have_the_byte_that_other_drivers_look_for() {
        // DPDK and VPP compare op_own & 0xfc with 0x2c.
        let title = CqeOwner::default().with_opcode(CQE_RESPONDER_SEND).with_format(FORMAT_COMPRESSED).with_owner(1);
        assert_eq!(title.0, 0x2d);
    }
}
