//! The uverbs kernel interface: commands of `/dev/infiniband/uverbsN`.
//!
//! A command comes in one of three forms: [`mod@write`], `write` wrapped in an ioctl, and [`ioctl`]. Driver parts follow the core structure
//! of the command (`write`) or come as attributes of their own ([`ioctl::UHW_IN`], [`ioctl::UHW_OUT`]); [`mana`] and
//! [`mlx5`] have those of the devices.

mod flow;
pub mod ioctl;
pub mod mana;
pub mod mlx5;
pub mod write;

pub use flow::*;

use crate::table::constants;

constants! {
    /// What is compared with rdma/ib_user_ioctl_verbs.h and infiniband/verbs.h.
    CONSTANTS;
    /// ConnectX.
    DRIVER_MLX5: u32 = 1, "RDMA_DRIVER_MLX5";
    /// Memory may be written by the device.
    ACCESS_LOCAL_WRITE: u32 = 1, "IB_UVERBS_ACCESS_LOCAL_WRITE";
    /// Memory may be written by a peer.
    ACCESS_REMOTE_WRITE: u32 = 2, "IB_UVERBS_ACCESS_REMOTE_WRITE";
    /// Memory may be read by a peer.
    ACCESS_REMOTE_READ: u32 = 4, "IB_UVERBS_ACCESS_REMOTE_READ";
    /// Atomic operations by a peer.
    ACCESS_REMOTE_ATOMIC: u32 = 8, "IB_UVERBS_ACCESS_REMOTE_ATOMIC";
    /// Memory windows may be bound.
    ACCESS_MW_BIND: u32 = 0x10, "IB_UVERBS_ACCESS_MW_BIND";
    /// Addresses count from the start of the region.
    ACCESS_ZERO_BASED: u32 = 0x20, "IB_UVERBS_ACCESS_ZERO_BASED";
    /// Pages are not pinned.
    ACCESS_ON_DEMAND: u32 = 0x40, "IB_UVERBS_ACCESS_ON_DEMAND";
    /// Huge pages.
    ACCESS_HUGETLB: u32 = 0x80, "IB_UVERBS_ACCESS_HUGETLB";
    /// Writes may pass each other.
    ACCESS_RELAXED_ORDERING: u32 = 1 << 20, "IB_UVERBS_ACCESS_RELAXED_ORDERING";
    /// First of the accesses that a kernel may ignore.
    ACCESS_OPTIONAL_FIRST: u32 = 1 << 20, "IB_UVERBS_ACCESS_OPTIONAL_FIRST";
    /// Last of the accesses that a kernel may ignore.
    ACCESS_OPTIONAL_LAST: u32 = 1 << 29, "IB_UVERBS_ACCESS_OPTIONAL_LAST";
    /// The kernel ignores optional accesses that it does not know.
    CORE_SUPPORT_OPTIONAL_MR_ACCESS: u64 = 1, "IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS";
    /// A work queue for receiving.
    WQT_RQ: u32 = 0, "IB_UVERBS_WQT_RQ";
    /// Raw Ethernet frames.
    QPT_RAW_PACKET: u32 = 8, "IB_UVERBS_QPT_RAW_PACKET";
    /// Reliable connection.
    QPT_RC: u32 = 2, "IB_UVERBS_QPT_RC";
    /// Unreliable datagrams.
    QPT_UD: u32 = 4, "IB_UVERBS_QPT_UD";
    /// The receive queue takes the VLAN tag off.
    WQ_FLAGS_CVLAN_STRIPPING: u32 = 1, "IB_UVERBS_WQ_FLAGS_CVLAN_STRIPPING";
    /// The transmit side can insert checksums.
    RAW_PACKET_CAP_IP_CSUM: u32 = 4, "IB_UVERBS_RAW_PACKET_CAP_IP_CSUM";
    /// The receive side can take VLAN tags off.
    RAW_PACKET_CAP_CVLAN_STRIPPING: u32 = 1, "IB_UVERBS_RAW_PACKET_CAP_CVLAN_STRIPPING";
    /// Device capability: RNR NAK.
    DEVICE_RC_RNR_NAK_GEN: u64 = 1 << 12, "IB_UVERBS_DEVICE_RC_RNR_NAK_GEN";
    /// Device capability: checksums of raw packets.
    DEVICE_RAW_IP_CSUM: u64 = 1 << 26, "IB_UVERBS_DEVICE_RAW_IP_CSUM";
    /// Device capability: flow rules.
    DEVICE_MANAGED_FLOW_STEERING: u64 = 1 << 29, "IB_UVERBS_DEVICE_MANAGED_FLOW_STEERING";
    /// RoCE version 2.
    GID_TYPE_ROCE_V2: u32 = 2, "IB_UVERBS_GID_TYPE_ROCE_V2";
}

/// `RDMA_DRIVER_MANA`. Headers older than Linux 6.2 do not have it.
pub const DRIVER_MANA: u32 = 20;

constants! {
    /// What is compared with infiniband/verbs.h.
    EVENT_CONSTANTS;
    /// The completion queue overran.
    EVENT_CQ_ERR: u32 = 0, "IBV_EVENT_CQ_ERR";
    /// The queue pair is in the error state.
    EVENT_QP_FATAL: u32 = 1, "IBV_EVENT_QP_FATAL";
    /// The device is gone.
    EVENT_DEVICE_FATAL: u32 = 8, "IBV_EVENT_DEVICE_FATAL";
    /// The link came up.
    EVENT_PORT_ACTIVE: u32 = 9, "IBV_EVENT_PORT_ACTIVE";
    /// The link went down.
    EVENT_PORT_ERR: u32 = 10, "IBV_EVENT_PORT_ERR";
    /// The work queue is in the error state.
    EVENT_WQ_FATAL: u32 = 19, "IBV_EVENT_WQ_FATAL";
    /// Port state.
    PORT_DOWN: u8 = 1, "IBV_PORT_DOWN";
    /// Port state.
    PORT_ACTIVE: u8 = 4, "IBV_PORT_ACTIVE";
    /// Layer above the link.
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
    /// Hash the source address.
    RX_HASH_SRC_IPV4: u64 = 1, "IBV_RX_HASH_SRC_IPV4";
    /// Hash the destination address.
    RX_HASH_DST_IPV4: u64 = 2, "IBV_RX_HASH_DST_IPV4";
    /// Hash the source address.
    RX_HASH_SRC_IPV6: u64 = 4, "IBV_RX_HASH_SRC_IPV6";
    /// Hash the destination address.
    RX_HASH_DST_IPV6: u64 = 8, "IBV_RX_HASH_DST_IPV6";
    /// Hash the source port.
    RX_HASH_SRC_PORT_TCP: u64 = 0x10, "IBV_RX_HASH_SRC_PORT_TCP";
    /// Hash the destination port.
    RX_HASH_DST_PORT_TCP: u64 = 0x20, "IBV_RX_HASH_DST_PORT_TCP";
    /// Hash the source port.
    RX_HASH_SRC_PORT_UDP: u64 = 0x40, "IBV_RX_HASH_SRC_PORT_UDP";
    /// Hash the destination port.
    RX_HASH_DST_PORT_UDP: u64 = 0x80, "IBV_RX_HASH_DST_PORT_UDP";
}
