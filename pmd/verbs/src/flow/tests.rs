use super::*;

const FULL_MAC: EthFilter = EthFilter { dst_mac: [0xff; 6], src_mac: [0; 6], ether_type: 0, vlan_tag: 0 };
const HOST_MAC: [u8; 6] = [0x66, 0x11, 0x22, 0x33, 0x44, 0x55];
const PEER_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 9];

/// Returns a flow to one host from 11.134.200.6, which is what the manual page describes for its example.
fn ours() -> (FlowAttr, Vec<Spec>) {
    let address = u32::from_be_bytes([11, 134, 200, 6]);
    let specs = vec![
        EthFilter { dst_mac: HOST_MAC, ..EthFilter::default() }.with_mask(FULL_MAC),
        Ipv4Filter { src_ip: address, dst_ip: 0 }.with_mask(Ipv4Filter { src_ip: u32::MAX, dst_ip: 0 }),
    ];
    (FlowAttr { flow_type: FlowType::NORMAL, priority: 0, port: 1, flags: 0 }, specs)
}

/// Returns the example of ibv_create_flow(3), with its initialisers laid out as a C compiler does.
fn page() -> Vec<u8> {
    let mut bytes = vec![0u8; 84];
    let mut put = |at: usize, what: &[u8]| bytes[at..at + what.len()].copy_from_slice(what);
    put(8, &84u16.to_ne_bytes());
    put(12, &[2, 1]);
    put(20, &ETH.to_ne_bytes());
    put(24, &40u16.to_ne_bytes());
    put(26, &HOST_MAC);
    put(42, &[0xff; 12]);
    put(60, &IPV4.to_ne_bytes());
    put(64, &24u16.to_ne_bytes());
    put(68, &0x0b86_c806_u32.to_ne_bytes());
    put(76, &0xffff_ffff_u32.to_ne_bytes());
    bytes
}

/// Returns true if a frame matches specs of Ethernet and IPv4. It compares bytes where the mask is 1, as a NIC does.
fn fits(bytes: &[u8], destination: [u8; 6], source: [u8; 6], from: [u8; 4]) -> bool {
    let under = |at: usize, mask: usize, what: &[u8]| {
        what.iter().enumerate().all(|(i, byte)| (byte ^ bytes[at + i]) & bytes[mask + i] == 0)
    };
    under(26, 42, &destination) && under(32, 48, &source) && under(68, 76, &from)
}

#[test]
#[cfg(target_endian = "little")]
fn encodings_match_the_test_vectors() {
    let (attr, specs) = ours();
    #[rustfmt::skip]
    let user: &[u8] = &[
        0, 0, 0, 0, 0, 0, 0, 0, 0x54, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0,
        0x20, 0, 0, 0, 0x28, 0, 0x66, 0x11, 0x22, 0x33, 0x44, 0x55, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0x30, 0, 0, 0, 0x18, 0, 0, 0, 0x0b, 0x86, 0xc8, 0x06, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0,
    ];
    assert_eq!(encode(&attr, &specs), user);
    #[rustfmt::skip]
    let kernel: &[u8] = &[
        0, 0, 0, 0, 0x0f, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 0,
        0x20, 0, 0, 0, 0x28, 0, 0, 0, 0x66, 0x11, 0x22, 0x33, 0x44, 0x55, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0x30, 0, 0, 0, 0x18, 0, 0, 0, 0x0b, 0x86, 0xc8, 0x06, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0,
    ];
    assert_eq!(kernel_command(&attr, &specs, 0x0f), kernel);
}

#[test]
fn manual_page_example_has_two_errors() {
    let (attr, right) = ours();
    let (page_attr, page_specs) = decode(&page()).unwrap();
    assert_eq!(page_attr, attr);
    // First error: the example compares the source address with zero instead of ignoring it.
    let Spec::Eth { value, mask, .. } = page_specs[0] else { panic!("{:?}", page_specs[0]) };
    assert_eq!((value.dst_mac, mask.dst_mac), (HOST_MAC, [0xff; 6]));
    assert_eq!((value.src_mac, mask.src_mac), ([0; 6], [0xff; 6]));
    // Second error: the address must be in network byte order, but on a little-endian machine it is in host byte order.
    let Spec::Ipv4 { value, .. } = page_specs[1] else { panic!("{:?}", page_specs[1]) };
    #[cfg(target_endian = "little")]
    assert_eq!(value.src_ip.to_be_bytes(), [6, 200, 134, 11]);
    #[cfg(target_endian = "big")]
    assert_eq!(value.src_ip.to_be_bytes(), [11, 134, 200, 6]);
    // Therefore the frame that the page describes does not match, and other frames do.
    let page = page();
    let wanted = [11, 134, 200, 6];
    assert!(!fits(&page, HOST_MAC, PEER_MAC, wanted));
    #[cfg(target_endian = "little")]
    {
        assert!(!fits(&page, HOST_MAC, [0; 6], wanted), "each error alone prevents the match");
        assert!(!fits(&page, HOST_MAC, PEER_MAC, [6, 200, 134, 11]));
        assert!(fits(&page, HOST_MAC, [0; 6], [6, 200, 134, 11]));
    }
    let ours = encode(&attr, &right);
    assert!(fits(&ours, HOST_MAC, PEER_MAC, wanted) && fits(&ours, HOST_MAC, [0; 6], wanted));
    assert!(!fits(&ours, PEER_MAC, PEER_MAC, wanted) && !fits(&ours, HOST_MAC, PEER_MAC, [6, 200, 134, 11]));
}

#[test]
fn spec_layouts_match_c_structures() {
    use std::mem::offset_of;
    macro_rules! layout {
        ($($kind:ident $structure:ident;)*) => {$({
            let layout = LAYOUTS.iter().find(|layout| layout.kind == $kind).unwrap();
            assert_eq!(
                (layout.size, layout.value, layout.mask),
                (size_of::<$structure>(), offset_of!($structure, val), offset_of!($structure, mask)),
                stringify!($structure)
            );
        })*};
    }
    layout! {
        ETH ibv_flow_spec_eth;
        IPV4 ibv_flow_spec_ipv4;
        IPV6 ibv_flow_spec_ipv6;
        IPV4_EXT ibv_flow_spec_ipv4_ext;
        ESP ibv_flow_spec_esp;
        TCP ibv_flow_spec_tcp_udp;
        UDP ibv_flow_spec_tcp_udp;
        VXLAN ibv_flow_spec_tunnel;
        GRE ibv_flow_spec_gre;
        MPLS ibv_flow_spec_mpls;
    }
    let kinds = [ETH, IPV4, IPV6, IPV4_EXT, ESP, TCP, UDP, VXLAN, GRE, MPLS, INNER, TAG, DROP, HANDLE, COUNT];
    let header = [
        IBV_FLOW_SPEC_ETH,
        IBV_FLOW_SPEC_IPV4,
        IBV_FLOW_SPEC_IPV6,
        IBV_FLOW_SPEC_IPV4_EXT,
        IBV_FLOW_SPEC_ESP,
        IBV_FLOW_SPEC_TCP,
        IBV_FLOW_SPEC_UDP,
        IBV_FLOW_SPEC_VXLAN_TUNNEL,
        IBV_FLOW_SPEC_GRE,
        IBV_FLOW_SPEC_MPLS,
        IBV_FLOW_SPEC_INNER,
        IBV_FLOW_SPEC_ACTION_TAG,
        IBV_FLOW_SPEC_ACTION_DROP,
        IBV_FLOW_SPEC_ACTION_HANDLE,
        IBV_FLOW_SPEC_ACTION_COUNT,
    ];
    assert_eq!(kinds, header);
    assert_eq!((DONT_TRAP, EGRESS), (IBV_FLOW_ATTR_FLAGS_DONT_TRAP, IBV_FLOW_ATTR_FLAGS_EGRESS));
    let types = [FlowType::NORMAL, FlowType::ALL_DEFAULT, FlowType::MC_DEFAULT, FlowType::SNIFFER].map(|kind| kind.0);
    assert_eq!(
        types,
        [IBV_FLOW_ATTR_NORMAL, IBV_FLOW_ATTR_ALL_DEFAULT, IBV_FLOW_ATTR_MC_DEFAULT, IBV_FLOW_ATTR_SNIFFER]
    );
    assert_eq!(ATTR_LEN, size_of::<ibv_flow_attr>());
}
