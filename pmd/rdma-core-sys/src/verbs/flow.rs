//! Flow rules of `ibv_create_flow`, counters, and the provider's flow actions.
//!
//! A rule is an [`ibv_flow_attr`] followed at byte 20 by its specs without gaps. The `size` of a spec is its
//! length. This is not a C struct: specs with a pointer (handle, count) lie at offsets that are not a
//! multiple of 8. Build it as bytes.

use std::ffi::{c_int, c_void};

use super::ibv_context;

mirror! {
    header "infiniband/verbs.h" as FLOW_LAYOUTS;
    structs {
        ibv_flow_attr {
            comp_mask: u32,
            type_ as "type": u32,
            size: u16,
            priority: u16,
            num_of_specs: u8,
            port: u8,
            flags: u32,
        }
        ibv_flow {
            comp_mask: u32,
            context: *mut ibv_context,
            handle: u32,
        }
        ibv_flow_action { context: *mut ibv_context }
        ibv_counters { context: *mut ibv_context }
        ibv_counters_init_attr { comp_mask: u32 }
        ibv_counter_attach_attr {
            counter_desc: u32,
            index: u32,
            comp_mask: u32,
        }
        ibv_flow_eth_filter {
            dst_mac: [u8; 6],
            src_mac: [u8; 6],
            /// Network byte order.
            ether_type: u16,
            /// Network byte order: priority 3, CFI 1, VLAN id 12.
            vlan_tag: u16,
        }
        ibv_flow_spec_eth {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_eth_filter,
            mask: ibv_flow_eth_filter,
        }
        ibv_flow_ipv4_filter {
            /// Network byte order.
            src_ip: u32,
            /// Network byte order.
            dst_ip: u32,
        }
        ibv_flow_spec_ipv4 {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_ipv4_filter,
            mask: ibv_flow_ipv4_filter,
        }
        ibv_flow_ipv4_ext_filter {
            /// Network byte order.
            src_ip: u32,
            /// Network byte order.
            dst_ip: u32,
            proto: u8,
            tos: u8,
            ttl: u8,
            flags: u8,
        }
        ibv_flow_spec_ipv4_ext {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_ipv4_ext_filter,
            mask: ibv_flow_ipv4_ext_filter,
        }
        ibv_flow_ipv6_filter {
            src_ip: [u8; 16],
            dst_ip: [u8; 16],
            /// Network byte order, low 20 bits.
            flow_label: u32,
            next_hdr: u8,
            traffic_class: u8,
            hop_limit: u8,
        }
        ibv_flow_spec_ipv6 {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_ipv6_filter,
            mask: ibv_flow_ipv6_filter,
        }
        ibv_flow_esp_filter {
            /// Network byte order.
            spi: u32,
            /// Network byte order.
            seq: u32,
        }
        ibv_flow_spec_esp {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_esp_filter,
            mask: ibv_flow_esp_filter,
        }
        ibv_flow_tcp_udp_filter {
            /// Network byte order.
            dst_port: u16,
            /// Network byte order.
            src_port: u16,
        }
        ibv_flow_spec_tcp_udp {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_tcp_udp_filter,
            mask: ibv_flow_tcp_udp_filter,
        }
        ibv_flow_gre_filter {
            /// Network byte order, as all fields of this filter.
            c_ks_res0_ver: u16,
            protocol: u16,
            key: u32,
        }
        ibv_flow_spec_gre {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_gre_filter,
            mask: ibv_flow_gre_filter,
        }
        ibv_flow_mpls_filter {
            /// Network byte order, the whole label word.
            label: u32,
        }
        ibv_flow_spec_mpls {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_mpls_filter,
            mask: ibv_flow_mpls_filter,
        }
        ibv_flow_tunnel_filter {
            /// Network byte order, VNI in the low 24 bits.
            tunnel_id: u32,
        }
        ibv_flow_spec_tunnel {
            type_ as "type": u32,
            size: u16,
            val: ibv_flow_tunnel_filter,
            mask: ibv_flow_tunnel_filter,
        }
        ibv_flow_spec_action_tag {
            type_ as "type": u32,
            size: u16,
            tag_id: u32,
        }
        ibv_flow_spec_action_drop {
            type_ as "type": u32,
            size: u16,
        }
        ibv_flow_spec_action_handle {
            type_ as "type": u32,
            size: u16,
            action: *const ibv_flow_action,
        }
        ibv_flow_spec_counter_action {
            type_ as "type": u32,
            size: u16,
            counters: *mut ibv_counters,
        }
        ibv_flow_action_esp_attr {
            esp_attr: *mut c_void,
            keymat_proto: c_int,
            keymat_len: u16,
            keymat_ptr: *mut c_void,
            replay_proto: c_int,
            replay_len: u16,
            replay_ptr: *mut c_void,
            esp_encap: *mut c_void,
            comp_mask: u32,
            esn: u32,
        }
    }
    unions {}
    constants {
        u32 {
            IBV_FLOW_ATTR_FLAGS_DONT_TRAP = 1 << 1,
            IBV_FLOW_ATTR_FLAGS_EGRESS = 1 << 2,
            IBV_FLOW_ATTR_NORMAL = 0,
            IBV_FLOW_ATTR_ALL_DEFAULT = 1,
            IBV_FLOW_ATTR_MC_DEFAULT = 2,
            IBV_FLOW_ATTR_SNIFFER = 3,
            IBV_FLOW_SPEC_ETH = 0x20,
            IBV_FLOW_SPEC_IPV4 = 0x30,
            IBV_FLOW_SPEC_IPV6 = 0x31,
            IBV_FLOW_SPEC_IPV4_EXT = 0x32,
            IBV_FLOW_SPEC_ESP = 0x34,
            IBV_FLOW_SPEC_TCP = 0x40,
            IBV_FLOW_SPEC_UDP = 0x41,
            IBV_FLOW_SPEC_VXLAN_TUNNEL = 0x50,
            IBV_FLOW_SPEC_GRE = 0x51,
            IBV_FLOW_SPEC_MPLS = 0x60,
            IBV_FLOW_SPEC_INNER = 0x100,
            IBV_FLOW_SPEC_ACTION_TAG = 0x1000,
            IBV_FLOW_SPEC_ACTION_DROP = 0x1001,
            IBV_FLOW_SPEC_ACTION_HANDLE = 0x1002,
            IBV_FLOW_SPEC_ACTION_COUNT = 0x1003,
            IBV_COUNTER_PACKETS = 0,
            IBV_COUNTER_BYTES = 1,
            IBV_READ_COUNTERS_ATTR_PREFER_CACHED = 1 << 0,
        }
    }
}
