//! Work-queue entries.

use zerocopy::big_endian::{U16, U32, U64};

use crate::table::{bits, constants, structures};

constants! {
    /// What is compared with infiniband/mlx5dv.h.
    WQE_CONSTANTS;
    /// Bytes of a basic block of the send queue.
    SEND_BLOCK: u32 = 64, "MLX5_SEND_WQE_BB";
    /// Does nothing.
    OPCODE_NOP: u8 = 0x00, "MLX5_OPCODE_NOP";
    /// Sends one packet.
    OPCODE_SEND: u8 = 0x0a, "MLX5_OPCODE_SEND";
    /// Cuts a large TCP packet into segments (TSO).
    OPCODE_TSO: u8 = 0x0e, "MLX5_OPCODE_TSO";
    /// [`ControlSegment::fm_ce_se`]: always a completion.
    CONTROL_COMPLETE: u8 = 8, "MLX5_WQE_CTRL_CQ_UPDATE";
    /// [`ControlSegment::fm_ce_se`]: solicited event.
    CONTROL_SOLICITED: u8 = 2, "MLX5_WQE_CTRL_SOLICITED";
    /// [`EthernetSegment::cs_flags`]: fill in the outer IPv4 header checksum.
    ETH_L3_CSUM: u8 = 0x40, "MLX5_ETH_WQE_L3_CSUM";
    /// [`EthernetSegment::cs_flags`]: fill in the outer TCP or UDP checksum.
    ETH_L4_CSUM: u8 = 0x80, "MLX5_ETH_WQE_L4_CSUM";
    /// [`DataSegment::byte_count`]: what follows is data, not an address.
    INLINE_SEGMENT: u32 = 0x8000_0000, "MLX5_INLINE_SEG";
    /// Key of the entry that ends a short list of a receive WQE.
    INVALID_LKEY: u32 = 0x100, "MLX5_INVALID_LKEY";
}

/// Enhanced multi-packet write: several packets in one WQE (DPDK `MLX5_OPCODE_ENHANCED_MPSW`).
pub const OPCODE_ENHANCED_MPW: u8 = 0x29;
/// [`EthernetSegment::cs_flags`]: fill in the inner IPv4 header checksum (DPDK `MLX5_ETH_WQE_L3_INNER_CSUM`).
pub const ETH_L3_INNER_CSUM: u8 = 0x10;
/// [`EthernetSegment::cs_flags`]: fill in the inner TCP or UDP checksum (DPDK `MLX5_ETH_WQE_L4_INNER_CSUM`).
pub const ETH_L4_INNER_CSUM: u8 = 0x20;
/// [`EthernetSegment::rsvd1`], which DPDK calls `swp_flags`: the inner L3 is IPv6.
pub const SWP_INNER_IPV6: u8 = 1;
/// `swp_flags`: the inner L4 is UDP.
pub const SWP_INNER_UDP: u8 = 2;
/// `swp_flags`: the outer L3 is IPv6.
pub const SWP_OUTER_IPV6: u8 = 0x10;
/// `swp_flags`: the outer L4 is UDP.
pub const SWP_OUTER_UDP: u8 = 0x20;
/// Word at [`ETH_INLINE_OFFSET`]: insert the VLAN tag of the low 16 bits (DPDK `MLX5_ETH_WQE_VLAN_INSERT`).
pub const ETH_INSERT_VLAN: u32 = 1 << 31;

/// Bytes of a segment, the unit of [`ControlDs::segments`].
pub const SEGMENT: u32 = 16;
/// Segments of a basic block.
pub const SEGMENTS_PER_BLOCK: u32 = SEND_BLOCK / SEGMENT;
/// Bytes of the control segment.
pub const CONTROL_BYTES: usize = 16;
/// Bytes of an Ethernet segment that has no inline header.
pub const ETH_BYTES: usize = 16;
/// Offset, in the Ethernet segment, of the length of the inline header or of the word with [`ETH_INSERT_VLAN`].
pub const ETH_INLINE_OFFSET: usize = 12;
/// Offset, in the Ethernet segment, of the inline header.
pub const ETH_INLINE_DATA: usize = 14;
/// Inline header that devices with a minimum want: Ethernet with room for a tag (rdma-core `MLX5_ETH_L2_INLINE_HEADER_SIZE`).
pub const ETH_L2_INLINE: usize = 18;
/// Most segments of a WQE that the field can say.
pub const MAX_SEGMENTS: u32 = 63;
/// Bytes of a data segment.
pub const DATA_BYTES: usize = 16;

structures! {
    /// What is compared with infiniband/mlx5dv.h.
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
        /// Fence, completion and event: [`CONTROL_COMPLETE`].
        fm_ce_se: u8,
        /// Free for software in the opcodes that are used here.
        imm: U32,
    }

    /// Second segment: what to do with the packet. What the header calls reserved is named by DPDK (`struct mlx5_wqe_eseg`).
    struct EthernetSegment = "struct mlx5_wqe_eth_seg" {
        /// Offsets for software parsing, in units of two bytes: outer L4, outer L3, inner L4, inner L3 (DPDK `swp_offs`).
        rsvd0: U32,
        /// `ETH_*_CSUM`.
        cs_flags: u8,
        /// `SWP_*` (DPDK `swp_flags`).
        rsvd1: u8,
        /// Largest payload of a segment, for [`OPCODE_TSO`].
        mss: U16,
        /// Register A for egress rules (DPDK `metadata`).
        rsvd2: U32,
        /// Bytes of the inline header.
        inline_hdr_sz: U16,
        /// The inline header begins here.
        inline_hdr_start: [u8; 2],
        /// And goes on.
        inline_hdr: [u8; 16],
    }

    /// Where data lies.
    struct DataSegment = "struct mlx5_wqe_data_seg" {
        /// Bytes; with [`INLINE_SEGMENT`] the data itself follows.
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
        /// Counter of basic blocks at this WQE.
        index, with_index: 8, 16;
        /// Modifier.
        modifier, with_modifier: 24, 8;
    }

    /// Second word of the control segment.
    struct ControlDs: u32 {
        /// Segments, this one included.
        segments, with_segments: 0, 6;
        /// Number of the queue pair or send queue.
        queue, with_queue: 8, 24;
    }
}
