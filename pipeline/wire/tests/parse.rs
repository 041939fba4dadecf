//! The parser against frames of known shape, against etherparse, and against frames cut short.

mod common;
#[path = "common/stacks.rs"]
mod stacks;

use common::{Expect, any_spec, plain};
use etherparse::{LinkExtSlice, NetSlice, SlicedPacket, TransportSlice};
use proptest::prelude::*;
use wirepath_wire::{L3, L4, Layers, ParseError, Parser, Tunnel, parse};

fn check(layers: &Layers, e: &Expect) {
    assert_eq!(layers.l2(), e.l2);
    let tags: Vec<_> = (0..3).filter_map(|i| layers.tag(i)).map(|t| (t.tpid.0, t.tci)).collect();
    assert_eq!(tags, e.tags);
    assert_eq!(layers.tag_count(), e.tags.len());
    assert_eq!(layers.ethertype().0, e.ethertype);
    assert_eq!((layers.l3(), layers.l4(), layers.payload(), layers.end()), (e.l3, e.l4, e.payload, e.end));
    assert_eq!(layers.protocol().0, e.protocol);
    assert_eq!((layers.is_first_fragment(), layers.is_later_fragment()), (e.first_fragment, e.later_fragment));
    let l3 = match e.ethertype {
        0x800 => L3::Ipv4,
        0x86dd => L3::Ipv6,
        0x806 => L3::Arp,
        _ => L3::Other,
    };
    assert_eq!(layers.l3_kind(), l3);
    let l4 = match (e.protocol, e.later_fragment) {
        (0, _) | (_, true) => L4::None,
        (6, _) => L4::Tcp,
        (17, _) => L4::Udp,
        (1, _) => L4::Icmpv4,
        (58, _) => L4::Icmpv6,
        _ => L4::Other,
    };
    assert_eq!(layers.l4_kind(), l4);
}

/// What etherparse says of a frame without looking into tunnels.
fn judge(frame: &[u8], layers: &Layers) {
    let said = SlicedPacket::from_ethernet(frame).expect("etherparse refuses what we take");
    let tags: Vec<u16> = said
        .link_exts
        .iter()
        .map(|ext| match ext {
            LinkExtSlice::Vlan(v) => u16::from_be_bytes([v.slice()[0], v.slice()[1]]),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(tags, (0..2).filter_map(|i| layers.tag(i)).map(|t| t.tci).collect::<Vec<_>>());
    let at = |part: &[u8]| part.as_ptr() as usize - frame.as_ptr() as usize;
    let payload = match &said.net {
        Some(NetSlice::Ipv4(ip)) => {
            assert_eq!(layers.l3_kind(), L3::Ipv4);
            assert_eq!(at(ip.header().slice()), layers.l3());
            assert_eq!(layers.ipv4_header(frame).unwrap()[12..16], ip.header().source());
            Some(ip.payload())
        }
        Some(NetSlice::Ipv6(ip)) => {
            assert_eq!(layers.l3_kind(), L3::Ipv6);
            assert_eq!(at(ip.header().slice()), layers.l3());
            Some(ip.payload())
        }
        Some(NetSlice::Arp(_)) => {
            assert_eq!(layers.l3_kind(), L3::Arp);
            None
        }
        None => {
            assert_eq!(layers.l3_kind(), L3::Other);
            None
        }
    };
    if let Some(payload) = payload {
        assert_eq!(at(payload.payload), layers.l4());
        // etherparse takes an IPv6 payload length of zero for "up to the end".
        let whole = layers.ipv6_header(frame).is_some_and(|h| h[4..6] == [0, 0]);
        assert!(whole || payload.payload.len() == layers.end() - layers.l4());
        assert_eq!(payload.fragmented, layers.is_fragment());
        assert_eq!(payload.ip_number.0, layers.protocol().0);
    }
    match said.transport {
        Some(TransportSlice::Udp(udp)) => {
            assert_eq!((layers.l4_kind(), at(udp.payload())), (L4::Udp, layers.payload()));
            assert_eq!(layers.udp(frame).unwrap().dst_port(), udp.destination_port());
        }
        Some(TransportSlice::Tcp(tcp)) => {
            assert_eq!((layers.l4_kind(), at(tcp.payload())), (L4::Tcp, layers.payload()));
            assert_eq!(layers.tcp(frame).unwrap().src_port(), tcp.source_port());
        }
        Some(TransportSlice::Icmpv4(_)) => assert_eq!(layers.l4_kind(), L4::Icmpv4),
        Some(TransportSlice::Icmpv6(_)) => assert_eq!(layers.l4_kind(), L4::Icmpv6),
        Some(other) => panic!("{other:?}"),
        // etherparse does not look for layer 4 in any fragment; we do in the first.
        None => {
            let unknown = matches!(layers.l4_kind(), L4::None | L4::Other | L4::Gre | L4::Esp);
            assert!(unknown || layers.is_first_fragment());
        }
    }
}

#[test]
fn agrees_with_etherparse_in_every_tunnel() {
    let mut inner_stacks = 0;
    for seed in 0..4000 {
        let random = &mut stacks::Random::new(seed);
        let tunnel = Some(random.pick(&stacks::TUNNELS)).filter(|_| !seed.is_multiple_of(4));
        let bytes = stacks::frame(random, stacks::Wish { tunnel, ..Default::default() }).bytes;
        let parsed = parse(&bytes).unwrap();
        // Labels are what etherparse does not know.
        if !parsed.outer().ethertype().is_mpls() {
            judge(&bytes, parsed.outer());
        }
        let Some(inner) = parsed.inner().filter(|inner| !inner.ethertype().is_mpls()) else { continue };
        inner_stacks += 1;
        let alone = &bytes[inner.l2()..parsed.outer().udp_end(&bytes).unwrap_or(parsed.outer().end())];
        if inner.has_link() {
            judge(alone, &inner.moved(-(inner.l2() as i32)).unwrap());
        } else {
            // With an Ethernet header where there is none.
            let mut frame = vec![0; 12];
            frame.extend(inner.ethertype().0.to_be_bytes());
            frame.extend(alone);
            let mut layers = inner.moved(14 - inner.l2() as i32).unwrap();
            assert_eq!(layers.l2(), layers.l3());
            judge(&frame, &layers);
            layers = *parse(&frame).unwrap().outer();
            assert_eq!(
                (layers.l4(), layers.payload()),
                (inner.l4() + 14 - inner.l2(), inner.payload() + 14 - inner.l2())
            );
        }
    }
    assert!(inner_stacks > 1500, "{inner_stacks}");
}

/// The errors that cutting a frame short may give.
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
        judge(&frame, parsed.outer());
        if let (Some(inner), Some(at)) = (parsed.inner(), parsed.tunnel_header()) {
            let inner_frame = &frame[at + 8..parsed.outer().end()];
            judge(inner_frame, &inner.moved(-((at + 8) as i32)).unwrap());
        }
    }

    #[test]
    fn cut_at_every_length(spec in any_spec()) {
        let frame = spec.build();
        let whole = parse(&frame.bytes).unwrap();
        for len in 0..frame.bytes.len() {
            let cut = &frame.bytes[..len];
            match parse(cut) {
                Ok(parsed) => {
                    // Only padding or bytes of something without a length of its own may be missing.
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
            // In a chain nothing is missing, but the headers must be at hand.
            match Parser::default().parse_chain(cut, frame.bytes.len()) {
                Ok(parsed) => prop_assert_eq!(parsed.outer(), whole.outer()),
                Err(error) => prop_assert_eq!(error, ParseError::HeaderSplit),
            }
        }
    }

    #[test]
    fn any_bytes_do_no_harm(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), spec in any_spec(), flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
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
                    let _ = (layers.udp(candidate), layers.tcp(candidate), layers.icmpv4(candidate), layers.icmpv6(candidate));
                    let _ = (layers.arp(candidate), layers.ipv4(candidate), layers.ipv6(candidate));
                }
                wirepath_wire::finish::complete(candidate, &parsed);
            }
        }
    }

    #[test]
    fn fast_path_and_slow_path_agree(spec in plain()) {
        // A tag in front sends the same headers through the general path.
        let mut tagged = spec.clone();
        tagged.tags = vec![(0x8100, 7)];
        let mut plain = spec.clone();
        plain.tags = vec![];
        let (a, b) = (plain.build().bytes, tagged.build().bytes);
        let (a, b) = (parse(&a).unwrap(), parse(&b).unwrap());
        let (a, b) = (a.outer(), b.outer());
        prop_assert_eq!((a.l3() + 4, a.l4() + 4, a.payload() + 4, a.end() + 4), (b.l3(), b.l4(), b.payload(), b.end()));
        prop_assert_eq!((a.l3_kind(), a.l4_kind(), a.protocol(), a.is_fragment()), (b.l3_kind(), b.l4_kind(), b.protocol(), b.is_fragment()));
        prop_assert_eq!(a.has_ip_options(), b.has_ip_options());
    }
}
