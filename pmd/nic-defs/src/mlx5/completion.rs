//! Completion-queue entries (CQEs).

use zerocopy::big_endian::{U16, U32, U64};

use crate::table::{bits, constants, structures};

constants! {
    /// Constants that `tests/headers.rs` compares with infiniband/mlx5dv.h.
    CQE_CONSTANTS;
    /// Opcode: a send WQE completed.
    CQE_REQUEST: u8 = 0, "MLX5_CQE_REQ";
    /// Opcode: a packet with immediate data was received.
    CQE_RESPONDER_WRITE_IMM: u8 = 1, "MLX5_CQE_RESP_WR_IMM";
    /// Opcode: a packet was received.
    CQE_RESPONDER_SEND: u8 = 2, "MLX5_CQE_RESP_SEND";
    /// Opcode: a packet with immediate data was received.
    CQE_RESPONDER_SEND_IMM: u8 = 3, "MLX5_CQE_RESP_SEND_IMM";
    /// Opcode: a packet that invalidates a key was received.
    CQE_RESPONDER_SEND_INVALIDATE: u8 = 4, "MLX5_CQE_RESP_SEND_INV";
    /// Opcode: the completion queue was resized.
    CQE_RESIZE: u8 = 5, "MLX5_CQE_RESIZE_CQ";
    /// Opcode: no packet.
    CQE_NO_PACKET: u8 = 6, "MLX5_CQE_NO_PACKET";
    /// Opcode: signature error.
    CQE_SIGNATURE_ERROR: u8 = 12, "MLX5_CQE_SIG_ERR";
    /// Opcode: a send WQE failed.
    CQE_REQUEST_ERROR: u8 = 13, "MLX5_CQE_REQ_ERR";
    /// Opcode: a receive WQE failed.
    CQE_RESPONDER_ERROR: u8 = 14, "MLX5_CQE_RESP_ERR";
    /// Opcode of an entry that the device has not written.
    CQE_INVALID: u8 = 15, "MLX5_CQE_INVALID";
    /// Syndrome: wrong length.
    SYNDROME_LOCAL_LENGTH: u8 = 0x01, "MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR";
    /// Syndrome: malformed WQE.
    SYNDROME_LOCAL_QP_OPERATION: u8 = 0x02, "MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR";
    /// Syndrome: the queue may not use a key or an address of the WQE.
    SYNDROME_LOCAL_PROTECTION: u8 = 0x04, "MLX5_CQE_SYNDROME_LOCAL_PROT_ERR";
    /// Syndrome: flushed, because the queue is already in the error state.
    SYNDROME_FLUSHED: u8 = 0x05, "MLX5_CQE_SYNDROME_WR_FLUSH_ERR";
    /// Syndrome: binding of a memory window failed.
    SYNDROME_WINDOW_BIND: u8 = 0x06, "MLX5_CQE_SYNDROME_MW_BIND_ERR";
    /// Syndrome: unexpected response.
    SYNDROME_BAD_RESPONSE: u8 = 0x10, "MLX5_CQE_SYNDROME_BAD_RESP_ERR";
    /// Syndrome: local access error.
    SYNDROME_LOCAL_ACCESS: u8 = 0x11, "MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR";
    /// Syndrome: the peer rejected the request.
    SYNDROME_REMOTE_INVALID: u8 = 0x12, "MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR";
    /// Syndrome: the peer denied the access.
    SYNDROME_REMOTE_ACCESS: u8 = 0x13, "MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR";
    /// Syndrome: the operation failed at the peer.
    SYNDROME_REMOTE_OPERATION: u8 = 0x14, "MLX5_CQE_SYNDROME_REMOTE_OP_ERR";
    /// Syndrome: transport retries exceeded.
    SYNDROME_RETRIES: u8 = 0x15, "MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR";
    /// Syndrome: receiver-not-ready (RNR) retries exceeded.
    SYNDROME_RNR_RETRIES: u8 = 0x16, "MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR";
    /// Syndrome: the peer aborted.
    SYNDROME_ABORTED: u8 = 0x22, "MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR";
    /// Format of compressed CQEs, as numbered by the verbs interface: hash in each mini CQE.
    MINI_FORMAT_HASH: u8 = 1, "MLX5DV_CQE_RES_FORMAT_HASH";
    /// Format of compressed CQEs: checksum in each mini CQE.
    MINI_FORMAT_CSUM: u8 = 2, "MLX5DV_CQE_RES_FORMAT_CSUM";
    /// Format of compressed CQEs: checksum and stride index in each mini CQE.
    MINI_FORMAT_CSUM_STRIDE: u8 = 4, "MLX5DV_CQE_RES_FORMAT_CSUM_STRIDX";
}

structures! {
    /// Structures that `tests/headers.rs` compares with infiniband/mlx5dv.h.
    CQE_STRUCTURES;

    /// A CQE. The constants below name the fields that the header calls reserved, after DPDK and Linux.
    struct Cqe = "struct mlx5_cqe64" {
        /// Packet information, see [`CQE_PACKET_INFO`].
        rsvd0: [u8; 2],
        /// WQE index, for striding receive queues.
        wqe_id: U16,
        /// LRO, hash ([`CQE_RX_HASH`]) and hash type ([`CQE_RX_HASH_TYPE`]).
        rsvd4: [u8; 13],
        /// InfiniBand only.
        ml_path: u8,
        /// Checksum ([`CQE_CHECKSUM`]).
        rsvd20: [u8; 4],
        /// InfiniBand only.
        slid: U16,
        /// InfiniBand only.
        flags_rqpn: U32,
        /// High byte of [`CqeFlags`].
        hds_ip_ext: u8,
        /// Low byte of [`CqeFlags`].
        l4_hdr_type_etc: u8,
        /// Stripped VLAN tag.
        vlan_info: U16,
        /// Low 24 bits: user index or number of the shared receive queue. High 8 bits: LRO.
        srqn_uidx: U32,
        /// Register B.
        imm_inval_pkey: U32,
        /// Tag matching.
        app: u8,
        /// Tag matching.
        app_op: u8,
        /// Tag matching.
        app_info: U16,
        /// Bytes of the packet. Striding queues: [`StrideCount`]. Title of a compressed session: number of mini CQEs.
        byte_cnt: U32,
        /// Timestamp in device clock ticks, or in seconds and nanoseconds.
        timestamp: U64,
        /// Receive: flow tag (24 bits). Send: opcode (8 bits) and queue number.
        sop_drop_qpn: U32,
        /// Receive: WQE index, or first stride. Send: basic-block counter of the WQE.
        wqe_counter: U16,
        /// Zero.
        signature: u8,
        /// [`CqeOwner`].
        op_own: u8,
    }

    /// A CQE with opcode [`CQE_REQUEST_ERROR`] or [`CQE_RESPONDER_ERROR`].
    struct ErrorCqe = "struct mlx5_err_cqe" {
        /// Unused.
        rsvd0: [u8; 32],
        /// Same as in [`Cqe`].
        srqn: U32,
        /// Unused.
        rsvd1: [u8; 18],
        /// Vendor error code.
        vendor_err_synd: u8,
        /// `SYNDROME_*`.
        syndrome: u8,
        /// Opcode (8 bits) and queue number.
        s_wqe_opcode_qpn: U32,
        /// Same as in [`Cqe`].
        wqe_counter: U16,
        /// Zero.
        signature: u8,
        /// [`CqeOwner`].
        op_own: u8,
    }
}

/// Bytes of a CQE.
pub const CQE_BYTES: usize = 64;
/// Byte offset of the packet information (DPDK `pkt_info`). Bit 0: tunnelled packet. Bit 1: outer IPv6 header.
pub const CQE_PACKET_INFO: usize = 0x00;
/// Byte offset of the RSS hash (32 bits).
pub const CQE_RX_HASH: usize = 0x0c;
/// Byte offset of [`HashType`].
pub const CQE_RX_HASH_TYPE: usize = 0x10;
/// Byte offset of the checksum over the packet (16 bits).
pub const CQE_CHECKSUM: usize = 0x14;
/// Byte offset of [`CqeFlags`].
pub const CQE_FLAGS: usize = 0x1c;
/// Byte offset of [`CqeOwner`]. The device writes it last.
pub const CQE_OWNER: usize = 0x3f;
/// Initial value of [`CqeOwner`] in a new ring: opcode [`CQE_INVALID`], which is invalid in every pass.
pub const CQE_OWNER_INIT: u8 = CQE_INVALID << 4;
/// Flow tag of packets that no rule tagged.
pub const NO_TAG: u32 = 0;

/// Value of [`CqeOwner::format`] for an uncompressed CQE.
pub const FORMAT_NONE: u8 = 0;
/// Value of [`CqeOwner::format`] for the title of a compressed session.
pub const FORMAT_COMPRESSED: u8 = 3;

/// Bytes of a mini CQE: four bytes that depend on the format, then the length (32 bits).
pub const MINI_BYTES: usize = 8;
/// Mini CQEs in an array. An array occupies one CQE.
pub const MINIS_PER_ENTRY: usize = 8;

bits! {
    /// Last byte of a CQE.
    struct CqeOwner: u8 {
        /// Owner bit. It toggles with each pass of the ring and is 0 in the first.
        owner, with_owner: 0, 1;
        /// 1 for a solicited completion.
        solicited, with_solicited: 1, 1;
        /// `FORMAT_*`.
        format, with_format: 2, 2;
        /// `CQE_*`.
        opcode, with_opcode: 4, 4;
    }

    /// Parse results of a received packet: 16 bits at [`CQE_FLAGS`] (DPDK `hdr_type_etc`).
    struct CqeFlags: u16 {
        /// 1 if the VLAN tag was stripped.
        vlan_stripped, with_vlan_stripped: 0, 1;
        /// 1 if there are IPv4 options or IPv6 extension headers.
        ip_options, with_ip_options: 1, 1;
        /// `L3_*`.
        l3_type, with_l3_type: 2, 2;
        /// `L4_*`.
        l4_type, with_l4_type: 4, 3;
        /// 1 for an IP fragment.
        fragment, with_fragment: 7, 1;
        /// 1 if the link-layer header is valid.
        l2_ok, with_l2_ok: 8, 1;
        /// 1 if the IPv4 header checksum is good. Also 1 for IPv6.
        l3_ok, with_l3_ok: 9, 1;
        /// 1 if the TCP or UDP checksum is good.
        l4_ok, with_l4_ok: 10, 1;
    }

    /// Headers covered by the RSS hash (Linux `CQE_RSS_HTYPE_*`).
    struct HashType: u8 {
        /// 1: IPv4. 2: IPv6.
        ip, with_ip: 2, 2;
        /// 1: TCP. 2: UDP. 3: IPsec.
        l4, with_l4: 6, 2;
    }

    /// Layout of [`Cqe::byte_cnt`] for striding receive queues.
    struct StrideCount: u32 {
        /// Bytes of the packet.
        length, with_length: 0, 16;
        /// Strides that the packet occupies.
        strides, with_strides: 16, 14;
        /// 1 for a filler CQE: no packet, the strides are skipped.
        filler, with_filler: 31, 1;
    }
}

/// Value of [`CqeFlags::l3_type`].
pub const L3_IPV6: u16 = 1;
/// Value of [`CqeFlags::l3_type`].
pub const L3_IPV4: u16 = 2;
/// Value of [`CqeFlags::l4_type`].
pub const L4_TCP: u16 = 1;
/// Value of [`CqeFlags::l4_type`].
pub const L4_UDP: u16 = 2;
/// Value of [`CqeFlags::l4_type`]: TCP with ACK and without payload.
pub const L4_TCP_EMPTY_ACK: u16 = 3;
/// Value of [`CqeFlags::l4_type`]: TCP with ACK.
pub const L4_TCP_ACK: u16 = 4;

/// Returns the owner bit of the CQE at a free-running consumer counter, in a ring of `1 << log_entries` entries.
#[inline(always)]
pub const fn cqe_owner(counter: u32, log_entries: u32) -> u8 {
    (counter >> log_entries & 1) as u8
}

/// Returns a description of a syndrome for error texts.
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
    fn owner_bit_toggles_per_pass_and_initial_ring_is_invalid() {
        assert_eq!([0, 255, 256, 511, 512, u32::MAX].map(|ci| cqe_owner(ci, 8)), [0, 0, 1, 1, 0, 1]);
        let initial = CqeOwner(CQE_OWNER_INIT);
        assert_eq!((initial.opcode(), initial.owner()), (CQE_INVALID, 0));
    }

    #[test]
    fn compressed_title_op_own_matches_dpdk_and_vpp() {
        // DPDK and VPP compare op_own & 0xfc with 0x2c.
        let title = CqeOwner::default().with_opcode(CQE_RESPONDER_SEND).with_format(FORMAT_COMPRESSED).with_owner(1);
        assert_eq!(title.0, 0x2d);
    }
}
