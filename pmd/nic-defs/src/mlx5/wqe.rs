//! Work-queue elements (WQEs).

use zerocopy::big_endian::{U16, U32, U64};

use crate::table::{bits, constants, structures};

constants! {
    /// Constants that `tests/headers.rs` compares with infiniband/mlx5dv.h.
    WQE_CONSTANTS;
    /// Bytes of a basic block of the send queue.
    SEND_BLOCK: u32 = 64, "MLX5_SEND_WQE_BB";
    /// Opcode: no operation.
    OPCODE_NOP: u8 = 0x00, "MLX5_OPCODE_NOP";
    /// Opcode: sends one packet.
    OPCODE_SEND: u8 = 0x0a, "MLX5_OPCODE_SEND";
    /// Opcode: segments a large TCP packet (TSO).
    OPCODE_TSO: u8 = 0x0e, "MLX5_OPCODE_TSO";
    /// Flag of [`ControlSegment::fm_ce_se`]: always generate a completion.
    CONTROL_COMPLETE: u8 = 8, "MLX5_WQE_CTRL_CQ_UPDATE";
    /// Flag of [`ControlSegment::fm_ce_se`]: solicited event.
    CONTROL_SOLICITED: u8 = 2, "MLX5_WQE_CTRL_SOLICITED";
    /// Flag of [`EthernetSegment::cs_flags`]: insert the outer IPv4 header checksum.
    ETH_L3_CSUM: u8 = 0x40, "MLX5_ETH_WQE_L3_CSUM";
    /// Flag of [`EthernetSegment::cs_flags`]: insert the outer TCP or UDP checksum.
    ETH_L4_CSUM: u8 = 0x80, "MLX5_ETH_WQE_L4_CSUM";
    /// Flag of [`DataSegment::byte_count`]: data follows instead of an address.
    INLINE_SEGMENT: u32 = 0x8000_0000, "MLX5_INLINE_SEG";
    /// Key of the entry that ends the list of a receive WQE early.
    INVALID_LKEY: u32 = 0x100, "MLX5_INVALID_LKEY";
}

/// Opcode: enhanced multi-packet write, several packets in one WQE (DPDK `MLX5_OPCODE_ENHANCED_MPSW`).
pub const OPCODE_ENHANCED_MPW: u8 = 0x29;
/// Flag of [`EthernetSegment::cs_flags`]: insert the inner IPv4 header checksum (DPDK `MLX5_ETH_WQE_L3_INNER_CSUM`).
pub const ETH_L3_INNER_CSUM: u8 = 0x10;
/// Flag of [`EthernetSegment::cs_flags`]: insert the inner TCP or UDP checksum (DPDK `MLX5_ETH_WQE_L4_INNER_CSUM`).
pub const ETH_L4_INNER_CSUM: u8 = 0x20;
/// Flag of [`EthernetSegment::rsvd1`] (DPDK `swp_flags`): the inner L3 is IPv6.
pub const SWP_INNER_IPV6: u8 = 1;
/// Flag of `swp_flags`: the inner L4 is UDP.
pub const SWP_INNER_UDP: u8 = 2;
/// Flag of `swp_flags`: the outer L3 is IPv6.
pub const SWP_OUTER_IPV6: u8 = 0x10;
/// Flag of `swp_flags`: the outer L4 is UDP.
pub const SWP_OUTER_UDP: u8 = 0x20;
/// Flag of the word at [`ETH_INLINE_OFFSET`]: insert the VLAN tag in its low 16 bits (DPDK `MLX5_ETH_WQE_VLAN_INSERT`).
pub const ETH_INSERT_VLAN: u32 = 1 << 31;

/// Bytes of a WQE segment, the unit of [`ControlDs::segments`].
pub const SEGMENT: u32 = 16;
/// Segments of a basic block.
pub const SEGMENTS_PER_BLOCK: u32 = SEND_BLOCK / SEGMENT;
/// Bytes of the control segment.
pub const CONTROL_BYTES: usize = 16;
/// Bytes of an Ethernet segment that has no inline header.
pub const ETH_BYTES: usize = 16;
/// Byte offset in the Ethernet segment of the inline header's length, or of the word with [`ETH_INSERT_VLAN`].
pub const ETH_INLINE_OFFSET: usize = 12;
/// Byte offset in the Ethernet segment of the inline header.
pub const ETH_INLINE_DATA: usize = 14;
/// Bytes of the inline header that some devices require: Ethernet with a VLAN tag.
/// Source: rdma-core `MLX5_ETH_L2_INLINE_HEADER_SIZE`.
pub const ETH_L2_INLINE: usize = 18;
/// Maximum number of segments that [`ControlDs::segments`] can hold.
pub const MAX_SEGMENTS: u32 = 63;
/// Bytes of a data segment.
pub const DATA_BYTES: usize = 16;

structures! {
    /// Structures that `tests/headers.rs` compares with infiniband/mlx5dv.h.
    WQE_STRUCTURES;

    /// First segment of a send WQE.
    struct ControlSegment = "struct mlx5_wqe_ctrl_seg" {
        /// [`ControlOpcode`].
        opmod_idx_opcode: U32,
        /// [`ControlDs`].
        qpn_ds: U32,
        /// Zero.
        signature: u8,
        /// Zero.
        dci_stream_channel_id: U16,
        /// Fence, completion and event flags, such as [`CONTROL_COMPLETE`].
        fm_ce_se: u8,
        /// Available to software for the opcodes of this module.
        imm: U32,
    }

    /// Second segment of a send WQE: offloads of the packet. DPDK (`struct mlx5_wqe_eseg`) names the fields that the
    /// header calls reserved.
    struct EthernetSegment = "struct mlx5_wqe_eth_seg" {
        /// Offsets for software parsing, in units of two bytes: outer L4, outer L3, inner L4, inner L3 (DPDK
        /// `swp_offs`).
        rsvd0: U32,
        /// Checksum flags `ETH_*_CSUM`.
        cs_flags: u8,
        /// Software parser flags `SWP_*` (DPDK `swp_flags`).
        rsvd1: u8,
        /// Largest payload of a segment, for [`OPCODE_TSO`].
        mss: U16,
        /// Register A for egress rules (DPDK `metadata`).
        rsvd2: U32,
        /// Bytes of the inline header.
        inline_hdr_sz: U16,
        /// First two bytes of the inline header.
        inline_hdr_start: [u8; 2],
        /// Remaining bytes of the inline header.
        inline_hdr: [u8; 16],
    }

    /// Address and length of data.
    struct DataSegment = "struct mlx5_wqe_data_seg" {
        /// Bytes. With [`INLINE_SEGMENT`], the data itself follows.
        byte_count: U32,
        /// Key of the memory region.
        lkey: U32,
        /// Address.
        addr: U64,
    }

    /// First segment of a striding receive WQE.
    struct NextSegment = "struct mlx5_wqe_srq_next_seg" {
        /// Zero.
        rsvd0: [u8; 2],
        /// Index of the next WQE, for shared queues.
        next_wqe_index: U16,
        /// Zero.
        signature: u8,
        /// Zero.
        rsvd1: [u8; 11],
    }
}

bits! {
    /// First word of the control segment.
    struct ControlOpcode: u32 {
        /// `OPCODE_*`.
        opcode, with_opcode: 0, 8;
        /// Basic-block counter at this WQE.
        index, with_index: 8, 16;
        /// Modifier.
        modifier, with_modifier: 24, 8;
    }

    /// Second word of the control segment.
    struct ControlDs: u32 {
        /// Number of segments, including the control segment.
        segments, with_segments: 0, 6;
        /// Number of the queue pair or send queue.
        queue, with_queue: 8, 24;
    }
}
