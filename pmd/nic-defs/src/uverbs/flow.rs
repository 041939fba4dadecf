//! Constants of ibv_create_flow(3).

use crate::table::constants;

constants! {
    /// Constants that `tests/headers.rs` compares with infiniband/verbs.h.
    FLOW_CONSTANTS;
    /// Rule type: packets that match its specs.
    FLOW_NORMAL: u32 = 0, "IBV_FLOW_ATTR_NORMAL";
    /// Rule type: packets that match no other rule.
    FLOW_ALL_DEFAULT: u32 = 1, "IBV_FLOW_ATTR_ALL_DEFAULT";
    /// Rule type: multicast packets that match no other rule.
    FLOW_MC_DEFAULT: u32 = 2, "IBV_FLOW_ATTR_MC_DEFAULT";
    /// Rule type: a copy of all packets.
    FLOW_SNIFFER: u32 = 3, "IBV_FLOW_ATTR_SNIFFER";
    /// Flag: rules of lower priority receive the packet as well.
    FLOW_DONT_TRAP: u32 = 2, "IBV_FLOW_ATTR_FLAGS_DONT_TRAP";
    /// Flag: the rule applies to sent packets.
    FLOW_EGRESS: u32 = 4, "IBV_FLOW_ATTR_FLAGS_EGRESS";
    /// Spec: addresses, EtherType, VLAN tag.
    SPEC_ETH: u32 = 0x20, "IBV_FLOW_SPEC_ETH";
    /// Spec: IPv4.
    SPEC_IPV4: u32 = 0x30, "IBV_FLOW_SPEC_IPV4";
    /// Spec: IPv6.
    SPEC_IPV6: u32 = 0x31, "IBV_FLOW_SPEC_IPV6";
    /// Spec of user space only. The kernel has [`SPEC_IPV4`] with a longer filter instead.
    SPEC_IPV4_EXT: u32 = 0x32, "IBV_FLOW_SPEC_IPV4_EXT";
    /// Spec: IPsec ESP.
    SPEC_ESP: u32 = 0x34, "IBV_FLOW_SPEC_ESP";
    /// Spec: TCP ports.
    SPEC_TCP: u32 = 0x40, "IBV_FLOW_SPEC_TCP";
    /// Spec: UDP ports.
    SPEC_UDP: u32 = 0x41, "IBV_FLOW_SPEC_UDP";
    /// Spec: VXLAN.
    SPEC_VXLAN: u32 = 0x50, "IBV_FLOW_SPEC_VXLAN_TUNNEL";
    /// Spec: GRE.
    SPEC_GRE: u32 = 0x51, "IBV_FLOW_SPEC_GRE";
    /// Spec: MPLS label stack entry.
    SPEC_MPLS: u32 = 0x60, "IBV_FLOW_SPEC_MPLS";
    /// Flag of a spec type: the spec applies to the inner headers of a tunnelled packet.
    SPEC_INNER: u32 = 0x100, "IBV_FLOW_SPEC_INNER";
    /// Spec: marks the packet with a tag.
    SPEC_TAG: u32 = 0x1000, "IBV_FLOW_SPEC_ACTION_TAG";
    /// Spec: drops the packet.
    SPEC_DROP: u32 = 0x1001, "IBV_FLOW_SPEC_ACTION_DROP";
    /// Spec: applies a flow action.
    SPEC_HANDLE: u32 = 0x1002, "IBV_FLOW_SPEC_ACTION_HANDLE";
    /// Spec: counts the packet.
    SPEC_COUNT: u32 = 0x1003, "IBV_FLOW_SPEC_ACTION_COUNT";
}
