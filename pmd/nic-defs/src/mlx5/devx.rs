//! DevX commands, which the kernel passes to the firmware unchanged (`mlx5dv_devx_obj_create` and related calls).
//! Sources: rdma-core `providers/mlx5/mlx5_ifc.h`, Linux `include/linux/mlx5/mlx5_ifc.h` and DPDK
//! `drivers/common/mlx5/mlx5_prm.h`.
//!
//! Every command starts with an opcode. The first byte of its output is 0 if the command succeeded.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::MatchField;

/// A bit field of a command, of its output or of capabilities. Bits are counted as in match parameters.
pub type CommandField = MatchField;

/// Value of [`Command::opcode`]: queries capabilities. The modifier is [`capability_modifier`].
pub const QUERY_HCA_CAP: u16 = 0x100;
/// Bytes of the input of [`QUERY_HCA_CAP`] (`query_hca_cap_in`).
pub const QUERY_HCA_CAP_IN_BYTES: usize = 16;
/// Byte offset of the capabilities in the output of [`QUERY_HCA_CAP`] (`query_hca_cap_out`).
pub const CAPABILITIES_OFFSET: usize = 16;
/// Bytes of the output of [`QUERY_HCA_CAP`].
pub const QUERY_HCA_CAP_OUT_BYTES: usize = CAPABILITIES_OFFSET + 0x1000;

/// Group of [`QUERY_HCA_CAP`]: the device (`cmd_hca_cap`).
pub const CAPABILITIES_GENERAL: u16 = 0;
/// Group of [`QUERY_HCA_CAP`]: Ethernet offloads (`per_protocol_networking_offload_caps`).
pub const CAPABILITIES_ETHERNET: u16 = 1;
/// Group of [`QUERY_HCA_CAP`]: flow tables of the NIC (`flow_table_nic_cap`).
pub const CAPABILITIES_NIC_FLOW_TABLE: u16 = 7;

/// Returns the modifier of [`QUERY_HCA_CAP`] for the current capabilities of a group (`HCA_CAP_OPMOD_GET_CUR`).
pub const fn capability_modifier(group: u16) -> u16 {
    group << 1 | 1
}

/// Fields of [`CAPABILITIES_GENERAL`].
pub mod general_capability {
    use super::CommandField;

    /// 1 if the device has flow tables for received and sent packets ([`super::CAPABILITIES_NIC_FLOW_TABLE`]).
    pub const NIC_FLOW_TABLE: CommandField = CommandField::new(0x1a6, 1);
    /// 1 if the device has Ethernet offloads ([`super::CAPABILITIES_ETHERNET`]).
    pub const ETH_NET_OFFLOADS: CommandField = CommandField::new(0x21c, 1);
}

/// Fields of [`CAPABILITIES_NIC_FLOW_TABLE`].
pub mod flow_table_capability {
    use super::CommandField;

    /// Maximum number of bytes of an encapsulation header.
    pub const MAX_ENCAP_HEADER: CommandField = CommandField::new(0x36, 10);
    /// Maximum number of header modifications of a rule for received packets (`max_modify_header_actions`).
    pub const RX_MODIFY_ACTIONS: CommandField = CommandField::new(0x200 + 0x30, 8);
    /// Maximum number of header modifications of a rule for sent packets.
    pub const TX_MODIFY_ACTIONS: CommandField = CommandField::new(0x800 + 0x30, 8);
}

/// Value of [`Command::opcode`]: allocates a counter.
pub const ALLOC_FLOW_COUNTER: u16 = 0x939;
/// Value of [`Command::opcode`]: frees a counter.
pub const DEALLOC_FLOW_COUNTER: u16 = 0x93a;
/// Value of [`Command::opcode`]: reads a counter.
pub const QUERY_FLOW_COUNTER: u16 = 0x93b;

/// Header of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Command {
    /// Operation, such as [`ALLOC_FLOW_COUNTER`].
    pub opcode: U16,
    /// User that owns the objects. The kernel writes it.
    pub uid: U16,
    /// Reserved.
    pub reserved: U16,
    /// Variant of the command.
    pub modifier: U16,
}

impl Command {
    /// Creates the header of a command with this opcode.
    pub fn new(opcode: u16) -> Self {
        Self { opcode: opcode.into(), ..Self::default() }
    }
}

/// Header of a command's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CommandOutput {
    /// 0 if the command succeeded.
    pub status: u8,
    /// Reserved.
    pub reserved: [u8; 3],
    /// Firmware-specific error code.
    pub syndrome: U32,
}

/// Input of [`ALLOC_FLOW_COUNTER`] (`alloc_flow_counter_in`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AllocFlowCounterIn {
    /// Header with opcode [`ALLOC_FLOW_COUNTER`].
    pub command: Command,
    /// Reserved.
    pub id: U32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// Number of counters in units of 128, a power of two. 0 allocates one counter.
    pub bulk: u8,
}

/// Output of [`ALLOC_FLOW_COUNTER`] (`alloc_flow_counter_out`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AllocFlowCounterOut {
    /// Header with the status.
    pub output: CommandOutput,
    /// Counter ID.
    pub id: U32,
    /// Reserved.
    pub reserved: U32,
}

/// Input of [`QUERY_FLOW_COUNTER`] (`query_flow_counter_in`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QueryFlowCounterIn {
    /// Header with opcode [`QUERY_FLOW_COUNTER`].
    pub command: Command,
    /// Reserved.
    pub reserved: U32,
    /// Memory key of the buffer for bulk queries.
    pub key: U32,
    /// Address of the buffer for bulk queries.
    pub address: U64,
    /// Bit 31: clear the counters after reading. Bit 30: write to memory. Other bits: number of counters.
    pub flags: U32,
    /// Counter ID.
    pub id: U32,
}

/// Output of [`QUERY_FLOW_COUNTER`] (`query_flow_counter_out`) with one `traffic_counter`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QueryFlowCounterOut {
    /// Header with the status.
    pub output: CommandOutput,
    /// Reserved.
    pub reserved: U64,
    /// Packets.
    pub packets: U64,
    /// Bytes of these packets.
    pub bytes: U64,
}

// The sizes in bits are those of mlx5_ifc.h.
const _: () = assert!(size_of::<AllocFlowCounterIn>() * 8 == 0x80 && size_of::<AllocFlowCounterOut>() * 8 == 0x80);
const _: () = assert!(size_of::<QueryFlowCounterIn>() * 8 == 0x100 && size_of::<QueryFlowCounterOut>() * 8 == 0x100);
