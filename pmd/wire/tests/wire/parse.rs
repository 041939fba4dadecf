//! Parser tests with frames of known layout, with etherparse, and with truncated frames.

use std::net::Ipv6Addr;

use etherparse::{LinkExtSlice, NetSlice, SlicedPacket, TransportSlice};
use fastrand::Rng;
use proptest::prelude::*;
use wirepath_wire::{
    EtherType, HeaderOffsets, IpProtocol, L3Type, L4Type, MacAddr, ParseError, Parser, Tunnel, Tunnels, ethernet, ipv6,
    parse, srh,
};

use crate::frames::{Expect, any_spec, plain};
use crate::stacks;

fn check(layers: &HeaderOffsets, e: &Expect) {
    assert_eq!(layers.l2(), e.l2);
    let tags: Vec<_> = (0..3).filter_map(|i| layers.tag(i)).map(|t| (t.tpid.0, t.tci)).collect();
    assert_eq!(tags, e.tags);
    assert_eq!(layers.tag_count(), e.tags.len());
    assert_eq!(layers.ethertype().0, e.ethertype);
    assert_eq!((layers.l3(), layers.l4(), layers.payload(), layers.end()), (e.l3, e.l4, e.payload, e.end));
    assert_eq!(layers.protocol().0, e.protocol);
    assert_eq!((layers.is_first_fragment(), layers.is_later_fragment()), (e.first_fragment, e.later_fragment));
    let l3 = match e.ethertype {
        0x800 => L3Type::Ipv4,
        0x86dd => L3Type::Ipv6,
        0x806 => L3Type::Arp,
        _ => L3Type::Other,
    };
    assert_eq!(layers.l3_type(), l3);
    let l4 = match (e.protocol, e.later_fragment) {
        (0, _) | (_, true) => L4Type::None,
        (6, _) => L4Type::Tcp,
        (17, _) => L4Type::Udp,
        (1, _) => L4Type::Icmpv4,
        (58, _) => L4Type::Icmpv6,
        _ => L4Type::Other,
    };
    assert_eq!(layers.l4_type(), l4);
}

/// Compares the result with that of etherparse, which does not parse tunnels.
fn check_with_etherparse(frame: &[u8], layers: &HeaderOffsets) {
    let sliced = SlicedPacket::from_ethernet(frame).expect("etherparse refuses a frame that the parser accepts");
    let tags: Vec<u16> = sliced
        .link_exts
        .iter()
        .map(|ext| match ext {
            LinkExtSlice::Vlan(v) => u16::from_be_bytes([v.slice()[0], v.slice()[1]]),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(tags, (0..2).filter_map(|i| layers.tag(i)).map(|t| t.tci).collect::<Vec<_>>());
    let at = |part: &[u8]| part.as_ptr() as usize - frame.as_ptr() as usize;
    let payload = match &sliced.net {
        Some(NetSlice::Ipv4(ip)) => {
            assert_eq!(layers.l3_type(), L3Type::Ipv4);
            assert_eq!(at(ip.header().slice()), layers.l3());
            assert_eq!(layers.ipv4_header(frame).unwrap()[12..16], ip.header().source());
            Some(ip.payload())
        }
        Some(NetSlice::Ipv6(ip)) => {
            assert_eq!(layers.l3_type(), L3Type::Ipv6);
            assert_eq!(at(ip.header().slice()), layers.l3());
            Some(ip.payload())
        }
        Some(NetSlice::Arp(_)) => {
            assert_eq!(layers.l3_type(), L3Type::Arp);
            None
        }
        None => {
            assert_eq!(layers.l3_type(), L3Type::Other);
            None
        }
    };
    if let Some(payload) = payload {
        assert_eq!(at(payload.payload), layers.l4());
        // etherparse treats an IPv6 payload length of zero as "up to the end".
        let whole = layers.ipv6_header(frame).is_some_and(|h| h[4..6] == [0, 0]);
        assert!(whole || payload.payload.len() == layers.end() - layers.l4());
        assert_eq!(payload.fragmented, layers.is_fragment());
        assert_eq!(payload.ip_number.0, layers.protocol().0);
    }
    match sliced.transport {
        Some(TransportSlice::Udp(udp)) => {
            assert_eq!((layers.l4_type(), at(udp.payload())), (L4Type::Udp, layers.payload()));
            assert_eq!(layers.udp(frame).unwrap().dst_port(), udp.destination_port());
        }
        Some(TransportSlice::Tcp(tcp)) => {
            assert_eq!((layers.l4_type(), at(tcp.payload())), (L4Type::Tcp, layers.payload()));
            assert_eq!(layers.tcp(frame).unwrap().src_port(), tcp.source_port());
        }
        Some(TransportSlice::Icmpv4(_)) => assert_eq!(layers.l4_type(), L4Type::Icmpv4),
        Some(TransportSlice::Icmpv6(_)) => assert_eq!(layers.l4_type(), L4Type::Icmpv6),
        Some(other) => panic!("{other:?}"),
        // etherparse does not parse layer 4 in fragments; our parser does in the first.
        None => {
            let unknown = matches!(layers.l4_type(), L4Type::None | L4Type::Other | L4Type::Gre | L4Type::Esp);
            assert!(unknown || layers.is_first_fragment());
        }
    }
}

#[test]
fn agrees_with_etherparse_in_every_tunnel() {
    let mut inner_stacks = 0;
    for seed in 0..4000 {
        let random = &mut Rng::with_seed(seed);
        let tunnel = Some(stacks::pick(random, &stacks::TUNNELS)).filter(|_| !seed.is_multiple_of(4));
        let bytes = stacks::frame(random, stacks::StackSpec { tunnel, ..Default::default() }).bytes;
        let parsed = parse(&bytes).unwrap();
        // etherparse does not know labels.
        if !parsed.outer().ethertype().is_mpls() {
            check_with_etherparse(&bytes, parsed.outer());
        }
        let Some(inner) = parsed.inner().filter(|inner| !inner.ethertype().is_mpls()) else { continue };
        inner_stacks += 1;
        let alone = &bytes[inner.l2()..parsed.outer().udp_end(&bytes).unwrap_or(parsed.outer().end())];
        if inner.has_ethernet() {
            check_with_etherparse(alone, &inner.moved(-(inner.l2() as i32)).unwrap());
        } else {
            // An inner stack that starts with IP gets an Ethernet header.
            let mut frame = vec![0; 12];
            frame.extend(inner.ethertype().0.to_be_bytes());
            frame.extend(alone);
            let mut layers = inner.moved(14 - inner.l2() as i32).unwrap();
            assert_eq!(layers.l2(), layers.l3());
            check_with_etherparse(&frame, &layers);
            layers = *parse(&frame).unwrap().outer();
            assert_eq!(
                (layers.l4(), layers.payload()),
                (inner.l4() + 14 - inner.l2(), inner.payload() + 14 - inner.l2())
            );
        }
    }
    assert!(inner_stacks > 1500, "{inner_stacks}");
}

/// True for the errors that truncation may cause.
fn is_truncation(e: ParseError) -> bool {
    use ParseError::*;
    matches!(
        e,
        EthernetTruncated
            | VlanTruncated
            | ArpTruncated
            | Ipv4Truncated
            | Ipv4BadTotalLength
            | Ipv6Truncated
            | Ipv6BadPayloadLength
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn finds_every_header(spec in any_spec()) {
        let frame = spec.build();
        let parsed = parse(&frame.bytes).unwrap();
        check(parsed.outer(), &frame.expect);
        prop_assert_eq!(parsed.tunnel_error(), None);
        prop_assert_eq!(parsed.vni().map(|v| v.get()), frame.expect.vni);
        match &frame.expect.inner {
            Some(inner) => {
                prop_assert_eq!(parsed.tunnel(), Tunnel::Vxlan);
                check(parsed.inner().unwrap(), inner);
            }
            None => prop_assert_eq!(parsed.inner(), None),
        }
    }

    #[test]
    fn agrees_with_etherparse(spec in any_spec()) {
        let frame = spec.build().bytes;
        let parsed = parse(&frame).unwrap();
        check_with_etherparse(&frame, parsed.outer());
        if let (Some(inner), Some(at)) = (parsed.inner(), parsed.tunnel_header()) {
            let inner_frame = &frame[at + 8..parsed.outer().end()];
            check_with_etherparse(inner_frame, &inner.moved(-((at + 8) as i32)).unwrap());
        }
    }

    #[test]
    fn truncation_at_every_length(spec in any_spec()) {
        let frame = spec.build();
        let whole = parse(&frame.bytes).unwrap();
        for len in 0..frame.bytes.len() {
            let cut = &frame.bytes[..len];
            match parse(cut) {
                Ok(parsed) => {
                    // Only padding may be missing, or data without a length field.
                    let e = &frame.expect;
                    if e.protocol != 0 {
                        prop_assert!(len >= e.end);
                        prop_assert_eq!(parsed, whole);
                    } else {
                        let least = if e.ethertype == 0x806 { 28 } else { 0 };
                        prop_assert!(len >= e.l3 + least);
                    }
                }
                Err(error) => {
                    prop_assert!(is_truncation(error), "{:?} at {}", error, len);
                    let e = &frame.expect;
                    let expected = if len < 14 {
                        ParseError::EthernetTruncated
                    } else if len < e.l3 {
                        ParseError::VlanTruncated
                    } else {
                        match e.ethertype {
                            0x800 if len < e.l3 + 20 => ParseError::Ipv4Truncated,
                            0x800 => ParseError::Ipv4BadTotalLength,
                            0x86dd if len < e.l3 + 40 => ParseError::Ipv6Truncated,
                            0x86dd => ParseError::Ipv6BadPayloadLength,
                            _ => ParseError::ArpTruncated,
                        }
                    };
                    prop_assert_eq!(error, expected);
                }
            }
            // A chain is complete, but all headers must lie in its first buffer.
            match Parser::default().parse_chain(cut, frame.bytes.len()) {
                Ok(parsed) => prop_assert_eq!(parsed.outer(), whole.outer()),
                Err(error) => prop_assert_eq!(error, ParseError::HeaderSplit),
            }
        }
    }

    #[test]
    fn random_bytes_do_not_panic(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..200), spec in any_spec(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let lenient = Parser { verify_ipv4: false, ..Parser::default() };
        let mut frame = spec.build().bytes;
        for (at, value) in flips {
            let at = at.index(frame.len());
            frame[at] = value;
        }
        for candidate in [&mut bytes, &mut frame] {
            for parser in [lenient, Parser::default()] {
                let Ok(parsed) = parser.parse(candidate) else { continue };
                for layers in [Some(parsed.outer()), parsed.inner()].into_iter().flatten() {
                    prop_assert!(layers.l2() <= layers.l3() && layers.l3() <= layers.l4());
                    prop_assert!(layers.l4() <= layers.payload() && layers.payload() <= layers.end());
                    prop_assert!(layers.end() <= candidate.len());
                    let _ = (layers.udp(candidate), layers.tcp(candidate));
                    let _ = (layers.icmpv4(candidate), layers.icmpv6(candidate));
                    let _ = (layers.arp(candidate), layers.ipv4(candidate), layers.ipv6(candidate));
                }
                wirepath_wire::checksum_offload::complete(candidate, &parsed);
            }
        }
    }

    #[test]
    fn fast_path_and_slow_path_agree(spec in plain()) {
        // A tag forces the same headers through the general path.
        let mut tagged = spec.clone();
        tagged.tags = vec![(0x8100, 7)];
        let mut plain = spec.clone();
        plain.tags = vec![];
        let (a, b) = (plain.build().bytes, tagged.build().bytes);
        let (a, b) = (parse(&a).unwrap(), parse(&b).unwrap());
        let (a, b) = (a.outer(), b.outer());
        prop_assert_eq!((a.l3() + 4, a.l4() + 4, a.payload() + 4, a.end() + 4), (b.l3(), b.l4(), b.payload(), b.end()));
        prop_assert_eq!((a.l3_type(), a.l4_type()), (b.l3_type(), b.l4_type()));
        prop_assert_eq!((a.protocol(), a.is_fragment()), (b.protocol(), b.is_fragment()));
        prop_assert_eq!(a.has_ip_options(), b.has_ip_options());
    }
}

/// Ethernet and IP behind a segment routing header, as SRv6 carries them (RFC 8986 section 5), and directly behind IP.
/// The headers are those that [`srh`] writes.
#[test]
fn tunnels_behind_a_segment_routing_header() {
    let sids: Vec<Ipv6Addr> = ["fc00:5::1", "fc00:2::100"].iter().map(|sid| sid.parse().unwrap()).collect();
    for (next, ethertype) in [(143, EtherType::TRANSPARENT_ETHERNET), (4, EtherType::IPV4), (41, EtherType::IPV6)] {
        let inner = plain_packet(ethertype);
        for (path, segments_left) in [(&sids[..0], 0), (&sids[..1], 0), (&sids[..1], 1), (&sids[..], 1), (&sids[..], 0)]
        {
            let header = srh::Repr { next_header: IpProtocol(next), segments_left, tag: 0, path };
            let mut bytes = vec![0; if path.is_empty() { 0 } else { header.header_len() }];
            if !path.is_empty() {
                header.emit(&mut bytes).unwrap();
            }
            let outer = ipv6::Repr {
                src: "fd00:9::1".parse().unwrap(),
                dst: sids[0],
                next_header: IpProtocol(if path.is_empty() { next } else { 43 }),
                payload_len: (bytes.len() + inner.len()) as u16,
                hop_limit: 64,
                traffic_class: 0,
                flow_label: 0,
            };
            let mut frame = vec![0; 54];
            let link = ethernet::Repr { dst: MacAddr::ZERO, src: MacAddr::ZERO, ethertype: EtherType::IPV6 };
            link.emit(&mut frame).unwrap();
            outer.emit(&mut frame[14..]).unwrap();
            let start = 54 + bytes.len();
            let frame = [frame, bytes, inner.clone()].concat();
            let parsed = parse(&frame).unwrap();
            assert_eq!((parsed.tunnel(), parsed.tunnel_error(), parsed.vni()), (Tunnel::Ip, None, None));
            let found = parsed.inner().unwrap();
            assert_eq!((found.l2(), found.has_ethernet()), (start, next == 143));
            assert_eq!((found.l4_type(), found.end()), (L4Type::Udp, frame.len()));
            assert_eq!(&frame[found.payload()..], b"abc");
            let extensions = parsed.outer().ipv6(&frame).unwrap().extensions();
            let headers: Vec<_> = extensions.map(|it| srh::View::new(it.unwrap().bytes).unwrap()).collect();
            assert_eq!(headers.len(), usize::from(!path.is_empty()));
            assert!(headers.iter().all(|it| it.segments().rev().eq(path.iter().copied())));
            // An Ethernet header that is cut off.
            let mut cut = frame[..start + 10].to_vec();
            cut[18..20].copy_from_slice(&((start + 10 - 54) as u16).to_be_bytes());
            let parsed = parse(&cut).unwrap();
            assert!(parsed.inner().is_none() && parsed.tunnel_error().is_some());
            let none = Parser { tunnels: Tunnels::ALL.with_ip(false), ..Parser::default() };
            assert_eq!(none.parse(&frame).unwrap().tunnel(), Tunnel::None);
        }
    }
}

/// Returns a UDP datagram with the payload "abc" in IP, with an Ethernet header if that is the type.
fn plain_packet(ethertype: EtherType) -> Vec<u8> {
    let udp = [0, 7, 0, 8, 0, 11, 0, 0, b'a', b'b', b'c'];
    let v4 = [0x45, 0, 0, 31, 0, 0, 0, 0, 64, 17, 0x66, 0xcc, 10, 0, 0, 1, 10, 0, 0, 2];
    let mut v6 = [0; 40];
    v6[..8].copy_from_slice(&[0x60, 0, 0, 0, 0, 11, 17, 64]);
    match ethertype {
        EtherType::IPV4 => [&v4[..], &udp].concat(),
        EtherType::IPV6 => [&v6[..], &udp].concat(),
        _ => [&[2; 12][..], &[0x86, 0xdd], &v6, &udp].concat(),
    }
}
