//! Commands of the device that go through the kernel as they are (`mlx5dv_devx_obj_create` and its sisters): those of flow counters.
//! Sources: rdma-core `providers/mlx5/mlx5_ifc.h` and Linux `include/linux/mlx5/mlx5_ifc.h`.
//!
//! Every command begins with an opcode and ends in an answer whose first byte is 0 if it was carried out.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// [`Command::opcode`]: makes a counter.
pub const ALLOC_FLOW_COUNTER: u16 = 0x939;
/// [`Command::opcode`]: destroys one.
pub const DEALLOC_FLOW_COUNTER: u16 = 0x93a;
/// [`Command::opcode`]: reads one.
pub const QUERY_FLOW_COUNTER: u16 = 0x93b;

/// The first words of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Command {
    /// What to do.
    pub opcode: U16,
    /// Whose objects; written by the kernel.
    pub uid: U16,
    /// Reserved.
    pub reserved: U16,
    /// Variant of the command.
    pub modifier: U16,
}

impl Command {
    /// A command of this opcode.
    pub fn new(opcode: u16) -> Self {
        Self { opcode: opcode.into(), ..Self::default() }
    }
}

/// The first words of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Answer {
    /// 0: done.
    pub status: u8,
    /// Reserved.
    pub reserved: [u8; 3],
    /// What was wrong, in firmware's own numbers.
    pub syndrome: U32,
}

/// `alloc_flow_counter_in`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AllocFlowCounter {
    /// [`ALLOC_FLOW_COUNTER`].
    pub command: Command,
    /// Reserved.
    pub id: U32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// Counters in units of 128, a power of two; 0: one counter.
    pub bulk: u8,
}

/// `alloc_flow_counter_out`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AllocFlowCounterAnswer {
    /// Whether it worked.
    pub answer: Answer,
    /// Name of the counter.
    pub id: U32,
    /// Reserved.
    pub reserved: U32,
}

/// `query_flow_counter_in`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QueryFlowCounter {
    /// [`QUERY_FLOW_COUNTER`].
    pub command: Command,
    /// Reserved.
    pub reserved: U32,
    /// Key of the memory where many are written to.
    pub key: U32,
    /// Where there.
    pub address: U64,
    /// Bit 31: set to 0 afterwards; bit 30: written to memory; below: how many.
    pub flags: U32,
    /// Name of the counter.
    pub id: U32,
}

/// `query_flow_counter_out` with one `traffic_counter`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QueryFlowCounterAnswer {
    /// Whether it worked.
    pub answer: Answer,
    /// Reserved.
    pub reserved: U64,
    /// Packets.
    pub packets: U64,
    /// Bytes of them.
    pub bytes: U64,
}

// As long as mlx5_ifc.h has them, in bits.
const _: () = assert!(size_of::<AllocFlowCounter>() * 8 == 0x80 && size_of::<AllocFlowCounterAnswer>() * 8 == 0x80);
const _: () = assert!(size_of::<QueryFlowCounter>() * 8 == 0x100 && size_of::<QueryFlowCounterAnswer>() * 8 == 0x100);
