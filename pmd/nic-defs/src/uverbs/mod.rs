//! uverbs kernel interface: commands of `/dev/infiniband/uverbsN`.
//!
//! A command has one of three forms: [`mod@write`], `write` wrapped in an ioctl, and [`ioctl`]. In the `write` form,
//! the driver part follows the core structure of the command. In the ioctl form, it is an attribute of its own
//! ([`ioctl::UHW_IN`], [`ioctl::UHW_OUT`]). [`mana`] and [`mlx5`] define the driver parts.

mod flow;
pub mod ioctl;
pub mod mana;
pub mod mlx5;
pub mod write;

pub use flow::*;

use crate::table::constants;

constants! {
    /// Constants that `tests/headers.rs` compares with rdma/ib_user_ioctl_verbs.h and infiniband/verbs.h.
    CONSTANTS;
    /// Driver ID of ConnectX.
    DRIVER_MLX5: u32 = 1, "RDMA_DRIVER_MLX5";
    /// Access flag: the device may write.
    ACCESS_LOCAL_WRITE: u32 = 1, "IB_UVERBS_ACCESS_LOCAL_WRITE";
    /// Access flag: a peer may write.
    ACCESS_REMOTE_WRITE: u32 = 2, "IB_UVERBS_ACCESS_REMOTE_WRITE";
    /// Access flag: a peer may read.
    ACCESS_REMOTE_READ: u32 = 4, "IB_UVERBS_ACCESS_REMOTE_READ";
    /// Access flag: a peer may use atomic operations.
    ACCESS_REMOTE_ATOMIC: u32 = 8, "IB_UVERBS_ACCESS_REMOTE_ATOMIC";
    /// Access flag: memory windows may be bound.
    ACCESS_MW_BIND: u32 = 0x10, "IB_UVERBS_ACCESS_MW_BIND";
    /// Access flag: addresses count from the start of the region.
    ACCESS_ZERO_BASED: u32 = 0x20, "IB_UVERBS_ACCESS_ZERO_BASED";
    /// Access flag: pages are not pinned.
    ACCESS_ON_DEMAND: u32 = 0x40, "IB_UVERBS_ACCESS_ON_DEMAND";
    /// Access flag: huge pages.
    ACCESS_HUGETLB: u32 = 0x80, "IB_UVERBS_ACCESS_HUGETLB";
    /// Access flag: writes may be reordered.
    ACCESS_RELAXED_ORDERING: u32 = 1 << 20, "IB_UVERBS_ACCESS_RELAXED_ORDERING";
    /// First optional access flag. The kernel may ignore optional flags.
    ACCESS_OPTIONAL_FIRST: u32 = 1 << 20, "IB_UVERBS_ACCESS_OPTIONAL_FIRST";
    /// Last optional access flag.
    ACCESS_OPTIONAL_LAST: u32 = 1 << 29, "IB_UVERBS_ACCESS_OPTIONAL_LAST";
    /// Core capability: the kernel ignores optional access flags that it does not know.
    CORE_SUPPORT_OPTIONAL_MR_ACCESS: u64 = 1, "IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS";
    /// Work queue type: receive queue.
    WQT_RQ: u32 = 0, "IB_UVERBS_WQT_RQ";
    /// Queue pair type: raw Ethernet frames.
    QPT_RAW_PACKET: u32 = 8, "IB_UVERBS_QPT_RAW_PACKET";
    /// Queue pair type: reliable connection.
    QPT_RC: u32 = 2, "IB_UVERBS_QPT_RC";
    /// Queue pair type: unreliable datagrams.
    QPT_UD: u32 = 4, "IB_UVERBS_QPT_UD";
    /// Work queue flag: strip the VLAN tag.
    WQ_FLAGS_CVLAN_STRIPPING: u32 = 1, "IB_UVERBS_WQ_FLAGS_CVLAN_STRIPPING";
    /// Raw packet capability: checksum insertion at transmission.
    RAW_PACKET_CAP_IP_CSUM: u32 = 4, "IB_UVERBS_RAW_PACKET_CAP_IP_CSUM";
    /// Raw packet capability: VLAN stripping at reception.
    RAW_PACKET_CAP_CVLAN_STRIPPING: u32 = 1, "IB_UVERBS_RAW_PACKET_CAP_CVLAN_STRIPPING";
    /// Device capability: RNR NAK.
    DEVICE_RC_RNR_NAK_GEN: u64 = 1 << 12, "IB_UVERBS_DEVICE_RC_RNR_NAK_GEN";
    /// Device capability: checksums of raw packets.
    DEVICE_RAW_IP_CSUM: u64 = 1 << 26, "IB_UVERBS_DEVICE_RAW_IP_CSUM";
    /// Device capability: flow rules.
    DEVICE_MANAGED_FLOW_STEERING: u64 = 1 << 29, "IB_UVERBS_DEVICE_MANAGED_FLOW_STEERING";
    /// GID type: RoCE version 2.
    GID_TYPE_ROCE_V2: u32 = 2, "IB_UVERBS_GID_TYPE_ROCE_V2";
}

/// `RDMA_DRIVER_MANA`. Headers older than Linux 6.2 do not have it.
pub const DRIVER_MANA: u32 = 20;

constants! {
    /// Constants that `tests/headers.rs` compares with infiniband/verbs.h.
    EVENT_CONSTANTS;
    /// Event: a completion queue overran.
    EVENT_CQ_ERR: u32 = 0, "IBV_EVENT_CQ_ERR";
    /// Event: a queue pair is in the error state.
    EVENT_QP_FATAL: u32 = 1, "IBV_EVENT_QP_FATAL";
    /// Event: the device failed or was removed.
    EVENT_DEVICE_FATAL: u32 = 8, "IBV_EVENT_DEVICE_FATAL";
    /// Event: the link came up.
    EVENT_PORT_ACTIVE: u32 = 9, "IBV_EVENT_PORT_ACTIVE";
    /// Event: the link went down.
    EVENT_PORT_ERR: u32 = 10, "IBV_EVENT_PORT_ERR";
    /// Event: a work queue is in the error state.
    EVENT_WQ_FATAL: u32 = 19, "IBV_EVENT_WQ_FATAL";
    /// Port state.
    PORT_DOWN: u8 = 1, "IBV_PORT_DOWN";
    /// Port state.
    PORT_ACTIVE: u8 = 4, "IBV_PORT_ACTIVE";
    /// Link layer: Ethernet.
    LINK_LAYER_ETHERNET: u8 = 2, "IBV_LINK_LAYER_ETHERNET";
    /// MTU code.
    MTU_256: u8 = 1, "IBV_MTU_256";
    /// MTU code.
    MTU_512: u8 = 2, "IBV_MTU_512";
    /// MTU code.
    MTU_1024: u8 = 3, "IBV_MTU_1024";
    /// MTU code.
    MTU_2048: u8 = 4, "IBV_MTU_2048";
    /// MTU code.
    MTU_4096: u8 = 5, "IBV_MTU_4096";
    /// Hashed field: IPv4 source address.
    RX_HASH_SRC_IPV4: u64 = 1, "IBV_RX_HASH_SRC_IPV4";
    /// Hashed field: IPv4 destination address.
    RX_HASH_DST_IPV4: u64 = 2, "IBV_RX_HASH_DST_IPV4";
    /// Hashed field: IPv6 source address.
    RX_HASH_SRC_IPV6: u64 = 4, "IBV_RX_HASH_SRC_IPV6";
    /// Hashed field: IPv6 destination address.
    RX_HASH_DST_IPV6: u64 = 8, "IBV_RX_HASH_DST_IPV6";
    /// Hashed field: TCP source port.
    RX_HASH_SRC_PORT_TCP: u64 = 0x10, "IBV_RX_HASH_SRC_PORT_TCP";
    /// Hashed field: TCP destination port.
    RX_HASH_DST_PORT_TCP: u64 = 0x20, "IBV_RX_HASH_DST_PORT_TCP";
    /// Hashed field: UDP source port.
    RX_HASH_SRC_PORT_UDP: u64 = 0x40, "IBV_RX_HASH_SRC_PORT_UDP";
    /// Hashed field: UDP destination port.
    RX_HASH_DST_PORT_UDP: u64 = 0x80, "IBV_RX_HASH_DST_PORT_UDP";
}
