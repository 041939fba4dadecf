//! DevX commands of flow counters, which the kernel passes to the firmware unchanged (`mlx5dv_devx_obj_create` and
//! related calls). Sources: rdma-core `providers/mlx5/mlx5_ifc.h` and Linux `include/linux/mlx5/mlx5_ifc.h`.
//!
//! Every command starts with an opcode. The first byte of its output is 0 if the command succeeded.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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
