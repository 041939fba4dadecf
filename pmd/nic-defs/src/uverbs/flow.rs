//! Numbers of `ibv_create_flow(3)`.

use crate::table::constants;

constants! {
    /// What is compared with infiniband/verbs.h.
    FLOW_CONSTANTS;
    /// Type of a rule: what its headers say.
    FLOW_NORMAL: u32 = 0, "IBV_FLOW_ATTR_NORMAL";
    /// Type of a rule: what no other rule has.
    FLOW_ALL_DEFAULT: u32 = 1, "IBV_FLOW_ATTR_ALL_DEFAULT";
    /// Type of a rule: groups that no other rule has.
    FLOW_MC_DEFAULT: u32 = 2, "IBV_FLOW_ATTR_MC_DEFAULT";
    /// Type of a rule: a copy of everything.
    FLOW_SNIFFER: u32 = 3, "IBV_FLOW_ATTR_SNIFFER";
    /// Flag: rules behind have the packet as well.
    FLOW_DONT_TRAP: u32 = 2, "IBV_FLOW_ATTR_FLAGS_DONT_TRAP";
    /// Flag: of packets that are sent.
    FLOW_EGRESS: u32 = 4, "IBV_FLOW_ATTR_FLAGS_EGRESS";
    /// Spec: addresses, EtherType, VLAN tag.
    SPEC_ETH: u32 = 0x20, "IBV_FLOW_SPEC_ETH";
    /// Spec: IPv4.
    SPEC_IPV4: u32 = 0x30, "IBV_FLOW_SPEC_IPV4";
    /// Spec: IPv6.
    SPEC_IPV6: u32 = 0x31, "IBV_FLOW_SPEC_IPV6";
    /// Spec of programs only: the kernel has [`SPEC_IPV4`] with longer filters.
    SPEC_IPV4_EXT: u32 = 0x32, "IBV_FLOW_SPEC_IPV4_EXT";
    /// Spec: IPsec.
    SPEC_ESP: u32 = 0x34, "IBV_FLOW_SPEC_ESP";
    /// Spec: ports of TCP.
    SPEC_TCP: u32 = 0x40, "IBV_FLOW_SPEC_TCP";
    /// Spec: ports of UDP.
    SPEC_UDP: u32 = 0x41, "IBV_FLOW_SPEC_UDP";
    /// Spec: VXLAN.
    SPEC_VXLAN: u32 = 0x50, "IBV_FLOW_SPEC_VXLAN_TUNNEL";
    /// Spec: GRE.
    SPEC_GRE: u32 = 0x51, "IBV_FLOW_SPEC_GRE";
    /// Spec: a label stack entry.
    SPEC_MPLS: u32 = 0x60, "IBV_FLOW_SPEC_MPLS";
    /// Added to a spec: headers of the packet in the tunnel.
    SPEC_INNER: u32 = 0x100, "IBV_FLOW_SPEC_INNER";
    /// Spec: the packet carries a number.
    SPEC_TAG: u32 = 0x1000, "IBV_FLOW_SPEC_ACTION_TAG";
    /// Spec: dropped.
    SPEC_DROP: u32 = 0x1001, "IBV_FLOW_SPEC_ACTION_DROP";
    /// Spec: a flow action.
    SPEC_HANDLE: u32 = 0x1002, "IBV_FLOW_SPEC_ACTION_HANDLE";
    /// Spec: counters.
    SPEC_COUNT: u32 = 0x1003, "IBV_FLOW_SPEC_ACTION_COUNT";
}
