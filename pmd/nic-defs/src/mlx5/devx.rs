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
/// Group of [`QUERY_HCA_CAP`]: atomic operations (`atomic_caps`).
pub const CAPABILITIES_ATOMIC: u16 = 3;
/// Group of [`QUERY_HCA_CAP`]: memory of the device (`device_mem_cap`).
pub const CAPABILITIES_DEVICE_MEMORY: u16 = 0xf;
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
    /// Format of timestamps that receive queues can have: [`super::TIMESTAMPS_FREE_RUNNING`] and following.
    pub const RQ_TS_FORMAT: CommandField = CommandField::new(0x442, 2);
}

/// Value of [`general_capability::RQ_TS_FORMAT`]: ticks of the core clock.
pub const TIMESTAMPS_FREE_RUNNING: u32 = 0;
/// Value of [`general_capability::RQ_TS_FORMAT`]: time of day, with seconds and nanoseconds in 32 bits each.
pub const TIMESTAMPS_REAL_TIME: u32 = 1;
/// Value of [`general_capability::RQ_TS_FORMAT`]: both, as the driver wants.
pub const TIMESTAMPS_BOTH: u32 = 2;

/// Fields of [`CAPABILITIES_ETHERNET`].
pub mod ethernet_capability {
    use super::CommandField;

    /// 1 if the device computes and checks checksums.
    pub const CSUM_CAP: CommandField = CommandField::new(0x00, 1);
    /// 1 if the device strips VLAN tags.
    pub const VLAN_CAP: CommandField = CommandField::new(0x01, 1);
    /// 1 if a send descriptor can insert a VLAN tag.
    pub const WQE_VLAN_INSERT: CommandField = CommandField::new(0x07, 1);
    /// Maximum payload of a TSO descriptor in bytes, as a binary logarithm.
    pub const MAX_LSO_CAP: CommandField = CommandField::new(0x0b, 5);
    /// 1 if a send descriptor can carry several packets.
    pub const MULTI_PKT_SEND_WQE: CommandField = CommandField::new(0x10, 2);
    /// Headers that send descriptors must contain: [`super::INLINE_MODE_L2`] or [`super::INLINE_MODE_NOT_REQUIRED`].
    pub const WQE_INLINE_MODE: CommandField = CommandField::new(0x12, 2);
    /// Maximum size of a receive queue table, as a binary logarithm.
    pub const RSS_IND_TBL_CAP: CommandField = CommandField::new(0x14, 4);
    /// 1 if these descriptors have the enhanced form.
    pub const ENHANCED_MULTI_PKT_SEND_WQE: CommandField = CommandField::new(0x1a, 1);
    /// 1 if the device parses the headers behind GRE.
    pub const TUNNEL_STATELESS_GRE: CommandField = CommandField::new(0x1e, 1);
    /// 1 if the device parses the headers behind VXLAN.
    pub const TUNNEL_STATELESS_VXLAN: CommandField = CommandField::new(0x1f, 1);
    /// 1 if a send descriptor can have offsets of headers (software parser).
    pub const SWP: CommandField = CommandField::new(0x20, 1);
    /// 1 if the device then computes checksums.
    pub const SWP_CSUM: CommandField = CommandField::new(0x21, 1);
    /// 1 if the device then segments TCP.
    pub const SWP_LSO: CommandField = CommandField::new(0x22, 1);
    /// 1 if the device parses the headers behind GENEVE.
    pub const TUNNEL_STATELESS_GENEVE_RX: CommandField = CommandField::new(0x3f, 1);
}

/// Value of [`ethernet_capability::WQE_INLINE_MODE`]: the Ethernet header.
pub const INLINE_MODE_L2: u8 = 0;
/// Value of [`ethernet_capability::WQE_INLINE_MODE`]: none.
pub const INLINE_MODE_NOT_REQUIRED: u8 = 2;

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

/// Value of [`Command::opcode`]: creates a completion queue. Fields: [`create_cq`].
pub const CREATE_CQ: u16 = 0x400;
/// Value of [`Command::opcode`]: allocates a counter of packets without a receive buffer.
pub const ALLOC_Q_COUNTER: u16 = 0x771;
/// Value of [`Command::opcode`]: reads such a counter. The output has [`QUERY_Q_COUNTER_OUT_BYTES`] bytes.
pub const QUERY_Q_COUNTER: u16 = 0x773;
/// Value of [`Command::opcode`]: allocates a transport domain.
pub const ALLOC_TRANSPORT_DOMAIN: u16 = 0x816;
/// Value of [`Command::opcode`]: creates a transport interface for received packets. Fields: [`create_tir`].
pub const CREATE_TIR: u16 = 0x900;
/// Value of [`Command::opcode`]: changes such an interface. Fields: [`modify_tir`].
pub const MODIFY_TIR: u16 = 0x901;
/// Value of [`Command::opcode`]: creates a send queue. Fields: [`create_sq`].
pub const CREATE_SQ: u16 = 0x904;
/// Value of [`Command::opcode`]: changes the state of a send queue. Fields: [`modify_queue`].
pub const MODIFY_SQ: u16 = 0x905;
/// Value of [`Command::opcode`]: creates a receive queue. Fields: [`create_rq`].
pub const CREATE_RQ: u16 = 0x908;
/// Value of [`Command::opcode`]: changes the state of a receive queue. Fields: [`modify_queue`].
pub const MODIFY_RQ: u16 = 0x909;
/// Value of [`Command::opcode`]: creates a transport interface for sent packets.
pub const CREATE_TIS: u16 = 0x912;
/// Value of [`Command::opcode`]: creates a table of receive queues. Fields: [`create_rqt`].
pub const CREATE_RQT: u16 = 0x916;
/// Value of [`Command::opcode`]: changes such a table. Fields: [`modify_rqt`].
pub const MODIFY_RQT: u16 = 0x917;

/// Value of [`Command::opcode`]: queries a transport interface for sent packets.
pub const QUERY_TIS: u16 = 0x915;
/// Number of the object in the input of [`QUERY_TIS`].
pub const QUERIED_NUMBER: CommandField = CommandField::new(0x48, 24);
/// Bytes of the output of [`QUERY_TIS`] (`query_tis_out`).
pub const QUERY_TIS_OUT_BYTES: usize = (0x80 + 0x500) / 8;
/// Transport domain in the output of [`QUERY_TIS`].
pub const QUERIED_TRANSPORT_DOMAIN: CommandField = CommandField::new(0x80 + 0x128, 24);

/// Bytes of the output of commands that create an object.
pub const CREATE_OUT_BYTES: usize = 16;
/// Number of the new object, in the output of the command that creates it.
pub const CREATED_NUMBER: CommandField = CommandField::new(0x48, 24);
/// Number of the new counter, in the output of [`ALLOC_Q_COUNTER`].
pub const ALLOCATED_Q_COUNTER: CommandField = CommandField::new(0x58, 8);
/// Bytes of the output of [`QUERY_Q_COUNTER`].
pub const QUERY_Q_COUNTER_OUT_BYTES: usize = 256;
/// Number of packets without a receive buffer, in the output of [`QUERY_Q_COUNTER`].
pub const OUT_OF_BUFFER: CommandField = CommandField::new(0x180, 32);

/// State of a queue: nothing is processed.
pub const QUEUE_RST: u8 = 0;
/// State of a queue: ready.
pub const QUEUE_RDY: u8 = 1;
/// State of a queue: error.
pub const QUEUE_ERR: u8 = 3;

/// Fields of [`CREATE_CQ`] (`create_cq_in` with `cqc`).
pub mod create_cq {
    use super::CommandField;

    /// Bytes of the input.
    pub const BYTES: usize = 0x880 / 8;
    /// 0 for entries of 64 bytes.
    pub const CQE_SIZE: CommandField = CommandField::new(0x80 + 0x08, 3);
    /// 1 if completions of received packets may be compressed.
    pub const COMPRESS: CommandField = CommandField::new(0x80 + 0x11, 1);
    /// Format of mini entries: 0 hash, 1 checksum, 3 checksum and stride index.
    pub const MINI_FORMAT: CommandField = CommandField::new(0x80 + 0x12, 2);
    /// Memory of the doorbell record.
    pub const RECORD_UMEM: CommandField = CommandField::new(0x80 + 0x20, 32);
    /// Number of entries, as a binary logarithm.
    pub const LOG_ENTRIES: CommandField = CommandField::new(0x80 + 0x63, 5);
    /// Byte offset of the doorbell record in its memory.
    pub const RECORD_OFFSET: CommandField = CommandField::new(0x80 + 0x1c0, 64);
    /// Byte offset of the ring in its memory.
    pub const RING_OFFSET: CommandField = CommandField::new(0x280, 64);
    /// Memory of the ring.
    pub const RING_UMEM: CommandField = CommandField::new(0x2c0, 32);
}

/// Fields of the work queue in [`CREATE_SQ`] and [`CREATE_RQ`] (`wq`).
pub mod create_wq {
    use super::CommandField;

    const WQ: u16 = 0x100 + 0x180;
    /// [`TYPE_CYCLIC`] or [`TYPE_CYCLIC_STRIDING`].
    pub const TYPE: CommandField = CommandField::new(WQ, 4);
    /// Value of [`TYPE`]: a ring.
    pub const TYPE_CYCLIC: u8 = 1;
    /// Value of [`TYPE`]: a ring whose entries are divided into strides.
    pub const TYPE_CYCLIC_STRIDING: u8 = 3;
    /// Protection domain.
    pub const PD: CommandField = CommandField::new(WQ + 0x48, 24);
    /// Byte offset of the doorbell records in their memory.
    pub const RECORD_OFFSET: CommandField = CommandField::new(WQ + 0x80, 64);
    /// Size of an entry in bytes, as a binary logarithm.
    pub const LOG_STRIDE: CommandField = CommandField::new(WQ + 0x10c, 4);
    /// Number of entries, as a binary logarithm.
    pub const LOG_ENTRIES: CommandField = CommandField::new(WQ + 0x11b, 5);
    /// Number of strides of an entry, as a binary logarithm minus 9, in two's complement.
    pub const LOG_STRIDES: CommandField = CommandField::new(WQ + 0x134, 4);
    /// 1 if received packets begin two bytes behind the start of a stride.
    pub const TWO_BYTE_SHIFT: CommandField = CommandField::new(WQ + 0x138, 1);
    /// Size of a stride in bytes, as a binary logarithm minus 6.
    pub const LOG_STRIDE_BYTES: CommandField = CommandField::new(WQ + 0x13d, 3);
    /// Memory of the doorbell records.
    pub const RECORD_UMEM: CommandField = CommandField::new(WQ + 0x140, 32);
    /// Memory of the ring.
    pub const RING_UMEM: CommandField = CommandField::new(WQ + 0x160, 32);
    /// Byte offset of the ring in its memory.
    pub const RING_OFFSET: CommandField = CommandField::new(WQ + 0x180, 64);
}

/// Fields of [`CREATE_SQ`] (`create_sq_in` with `sqc`). Those of the ring are in [`create_wq`].
pub mod create_sq {
    use super::CommandField;

    /// Bytes of the input.
    pub const BYTES: usize = 0x880 / 8;
    /// Initial state, `QUEUE_*`.
    pub const STATE: CommandField = CommandField::new(0x108, 4);
    /// User index, which completions carry.
    pub const USER_INDEX: CommandField = CommandField::new(0x128, 24);
    /// Completion queue.
    pub const CQ: CommandField = CommandField::new(0x148, 24);
    /// Transport interface.
    pub const TIS: CommandField = CommandField::new(0x268, 24);
}

/// Fields of [`CREATE_RQ`] (`create_rq_in` with `rqc`). Those of the ring are in [`create_wq`].
pub mod create_rq {
    use super::CommandField;

    /// Bytes of the input.
    pub const BYTES: usize = 0x880 / 8;
    /// 1 if VLAN tags stay in the packets.
    pub const VLAN_STRIP_DISABLE: CommandField = CommandField::new(0x103, 1);
    /// 1 if packets keep their frame check sequence.
    pub const SCATTER_FCS: CommandField = CommandField::new(0x102, 1);
    /// 0 if the queue has a ring of its own.
    pub const MEMORY_TYPE: CommandField = CommandField::new(0x104, 4);
    /// Initial state, `QUEUE_*`.
    pub const STATE: CommandField = CommandField::new(0x108, 4);
    /// User index, which completions carry.
    pub const USER_INDEX: CommandField = CommandField::new(0x128, 24);
    /// Completion queue.
    pub const CQ: CommandField = CommandField::new(0x148, 24);
}

/// Fields of [`MODIFY_SQ`] and [`MODIFY_RQ`] (`modify_sq_in`, `modify_rq_in`).
pub mod modify_queue {
    use super::CommandField;

    /// Bytes of the input.
    pub const BYTES: usize = 0x880 / 8;
    /// State before the command.
    pub const CURRENT_STATE: CommandField = CommandField::new(0x40, 4);
    /// Number of the queue.
    pub const NUMBER: CommandField = CommandField::new(0x48, 24);
    /// State after the command.
    pub const STATE: CommandField = CommandField::new(0x108, 4);
}

/// Fields of [`CREATE_RQT`] (`create_rqt_in` with `rqtc`). The numbers of the queues follow as words of 32 bits.
pub mod create_rqt {
    use super::CommandField;

    /// Maximum number of entries, also of later changes.
    pub const MAX_ENTRIES: CommandField = CommandField::new(0x100 + 0xb0, 16);
    /// Number of entries.
    pub const ENTRIES: CommandField = CommandField::new(0x100 + 0xd0, 16);
    /// Byte offset of the first entry.
    pub const LIST: usize = (0x100 + 0x780) / 8;
}

/// Fields of [`MODIFY_RQT`] (`modify_rqt_in`). The others are those of [`create_rqt`], the number is
/// [`modify_queue::NUMBER`].
pub mod modify_rqt {
    use super::CommandField;

    /// Parts that the command changes.
    pub const MASK: CommandField = CommandField::new(0x80, 64);
    /// Bit of [`MASK`]: the queues.
    pub const QUEUES: u64 = 1;
}

/// Fields of [`MODIFY_TIR`] (`modify_tir_in`). The others are those of [`create_tir`], the number is
/// [`modify_queue::NUMBER`].
pub mod modify_tir {
    use super::CommandField;

    /// Parts that the command changes.
    pub const MASK: CommandField = CommandField::new(0x80, 64);
    /// Bit of [`MASK`]: the table of receive queues.
    pub const TABLE: u64 = 1 << 1;
    /// Bit of [`MASK`]: hash function, key and fields.
    pub const HASH: u64 = 1 << 2;
    /// Bit of [`MASK`]: which sent packets the interface does not receive.
    pub const SELF_LOOPBACK: u64 = 1 << 4;
}

/// Fields of [`CREATE_TIR`] (`create_tir_in` with `tirc`).
pub mod create_tir {
    use super::CommandField;

    /// Bytes of the input.
    pub const BYTES: usize = 0x880 / 8;
    /// 0 for one receive queue, 1 for a table of them.
    pub const DISPATCH: CommandField = CommandField::new(0x100 + 0x20, 4);
    /// The receive queue.
    pub const RQ: CommandField = CommandField::new(0x100 + 0xe8, 24);
    /// 1 if the device parses inner headers.
    pub const TUNNELS: CommandField = CommandField::new(0x100 + 0x102, 1);
    /// The table.
    pub const TABLE: CommandField = CommandField::new(0x100 + 0x108, 24);
    /// Hash function: [`HASH_TOEPLITZ`].
    pub const HASH_FUNCTION: CommandField = CommandField::new(0x100 + 0x120, 4);
    /// Value of [`HASH_FUNCTION`].
    pub const HASH_TOEPLITZ: u8 = 2;
    /// Byte offset of the Toeplitz key of 40 bytes.
    pub const KEY: usize = (0x100 + 0x140) / 8;
    /// Hashed fields of the outer headers. The fields of a selector are in [`super::hash_selector`].
    pub const OUTER: CommandField = CommandField::new(0x100 + 0x280, 32);
    /// Hashed fields of the inner headers.
    pub const INNER: CommandField = CommandField::new(0x100 + 0x2a0, 32);
}

/// Bits of a selector of hashed fields (`rx_hash_field_select`).
pub mod hash_selector {
    /// IPv6 instead of IPv4.
    pub const IPV6: u32 = 1 << 31;
    /// UDP instead of TCP.
    pub const UDP: u32 = 1 << 30;
    /// Source address.
    pub const SRC_IP: u32 = 1;
    /// Destination address.
    pub const DST_IP: u32 = 2;
    /// Source port.
    pub const SRC_PORT: u32 = 4;
    /// Destination port.
    pub const DST_PORT: u32 = 8;
    /// SPI of ESP.
    pub const SPI: u32 = 16;
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
