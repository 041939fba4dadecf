//! Built frames, compared with vectors from the RFCs, with the own parser and with etherparse.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::SlicedPacket;
use proptest::prelude::*;
use wirepath_wire::build::{
    self, EncapError, EncapFields, IcmpError, NoReply, OuterChecksum, OuterConfig, OuterHeaders, PLAIN_LEN,
    PayloadType, ShortFields, Transport, VariableFields, VxlanConfig,
};
use wirepath_wire::checksum::{self, State};
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::{
    BufferTooShort, L4Type, MacAddr, ParseError, Parser, Tag, Vni, arp, icmpv4, ipv4, ipv6, ndp, parse, tcp, udp,
};

const A: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 1);
const B: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 0x99);
const TAGS: [Tag; 2] = [Tag { tpid: wirepath_wire::EtherType::QINQ, tci: 0x2005 }, Tag::new(7)];

fn config<'a>(v6: bool, tags: &'a [Tag], checksum: OuterChecksum) -> VxlanConfig<'a> {
    let (src, dst) = if v6 {
        (IpAddr::V6("2001:db8::1".parse().unwrap()), IpAddr::V6("2001:db8::2".parse().unwrap()))
    } else {
        (IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2)))
    };
    VxlanConfig {
        src_mac: A,
        dst_mac: B,
        tags,
        src,
        dst,
        dst_port: 4789,
        vni: Vni::new(10).unwrap(),
        ttl: 64,
        traffic_class: 0,
        flow_label: 0,
        checksum,
    }
}

#[test]
fn vxlan_over_ipv4_byte_by_byte() {
    let encap = OuterHeaders::vxlan(&config(false, &[], OuterChecksum::Standard)).unwrap();
    assert_eq!((encap.len(), encap.needs_sum()), (50, false));
    let mut room = [0xa5u8; 64];
    encap.emit(&mut room, &encap.fields(64, 0xc123)).unwrap();
    #[rustfmt::skip]
    let expected = [
        // Ethernet
        2, 0, 0, 0, 0, 0x99, 2, 0, 0, 0, 0, 1, 8, 0,
        // IPv4: total length 100, DF, TTL 64, UDP. Sum: 4500+0064+0000+4000+4011+0a09+0001+0a09+0002 = d98a.
        0x45, 0, 0, 100, 0, 0, 0x40, 0, 64, 17, 0x26, 0x75, 10, 9, 0, 1, 10, 9, 0, 2,
        // UDP: length 80, no checksum
        0xc1, 0x23, 0x12, 0xb5, 0, 80, 0, 0,
        // VXLAN
        8, 0, 0, 0, 0, 0, 10, 0,
    ];
    assert_eq!(room[..14], [0xa5; 14], "only the tail of the headroom is written");
    assert_eq!(room[14..], expected);
}

#[test]
fn encapsulation_errors() {
    let mixed = VxlanConfig { src: Ipv6Addr::LOCALHOST.into(), ..config(false, &[], OuterChecksum::Standard) };
    assert_eq!(OuterHeaders::vxlan(&mixed).unwrap_err(), EncapError::MixedVersions);
    let three = [Tag::new(1); 3];
    let tags = config(false, &three, OuterChecksum::Standard);
    assert_eq!(OuterHeaders::vxlan(&tags).unwrap_err(), EncapError::TooManyTags);
    for v6 in [false, true] {
        let encap = OuterHeaders::vxlan(&config(v6, &TAGS, OuterChecksum::Standard)).unwrap();
        let mut room = [0xa5u8; build::MAX_ENCAP_LEN];
        let longest = 65535 - if v6 { 16 } else { 36 };
        let len = encap.len();
        assert_eq!(encap.emit(&mut room, &encap.fields(longest + 1, 0)), Err(EncapError::TooLong));
        assert_eq!(encap.emit(&mut room[..len - 1], &encap.fields(64, 0)), Err(EncapError::NoHeadroom));
        assert_eq!(room, [0xa5; build::MAX_ENCAP_LEN], "nothing is written on error");
        assert_eq!(encap.emit(&mut room[..len], &encap.fields(longest, 0)), Ok(()));
    }
}

proptest! {
    #[test]
    fn etherparse_reads_the_encapsulation(
        v6: bool, tags in 0usize..3,
        mode in prop_oneof![Just(OuterChecksum::Standard), Just(OuterChecksum::Always), Just(OuterChecksum::Zero)],
        inner in proptest::collection::vec(any::<u8>(), 14..200),
        port: u16, class: u8, ttl in 1u8.., flow_label in 0u32..1 << 20,
    ) {
        let mut inner = inner;
        inner[12..14].copy_from_slice(&[0x88, 0xb5]);
        let config = VxlanConfig { flow_label, ..config(v6, &TAGS[..tags], mode) };
        let encap = OuterHeaders::vxlan(&config).unwrap();
        let mut frame = vec![0xa5; encap.len()];
        let inner_sum = checksum::sum(&inner);
        let fields = build::EncapFields { traffic_class: class, ttl, inner_sum, ..encap.fields(inner.len(), port) };
        encap.emit(&mut frame, &fields).unwrap();
        frame.extend(&inner);

        let sliced = SlicedPacket::from_ethernet(&frame).unwrap();
        let Some(etherparse::TransportSlice::Udp(udp)) = &sliced.transport else { panic!("{sliced:?}") };
        prop_assert_eq!((udp.source_port(), udp.destination_port()), (port, 4789));
        let right = match &sliced.net {
            Some(etherparse::NetSlice::Ipv4(ip)) => {
                prop_assert_eq!(ip.header().ttl(), ttl);
                prop_assert_eq!(ip.header().dcp().value() << 2 | ip.header().ecn().value(), class);
                prop_assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
                udp.to_header().calc_checksum_ipv4(&ip.header().to_header(), udp.payload()).unwrap()
            }
            Some(etherparse::NetSlice::Ipv6(ip)) => {
                prop_assert_eq!(ip.header().hop_limit(), ttl);
                prop_assert_eq!(ip.header().traffic_class(), class);
                prop_assert_eq!(ip.header().flow_label().value(), flow_label);
                udp.to_header().calc_checksum_ipv6(&ip.header().to_header(), udp.payload()).unwrap()
            }
            other => panic!("{other:?}"),
        };
        let computed = match mode {
            OuterChecksum::Standard => v6,
            OuterChecksum::Always => true,
            OuterChecksum::Zero => false,
        };
        prop_assert_eq!(udp.checksum(), if computed { right } else { 0 });

        let parsed = parse(&frame).unwrap();
        prop_assert_eq!(parsed.vni(), Vni::new(10));
        prop_assert_eq!(parsed.inner().unwrap().l2(), encap.len());
        prop_assert_eq!(parsed.inner().unwrap().end(), frame.len());
        prop_assert_eq!(parsed.outer().tag_count(), tags);
    }

    #[test]
    fn ip_and_transport_reprs_round_trip(
        src: [u8; 4], dst: [u8; 4], src6: [u8; 16], dst6: [u8; 16],
        protocol: u8, ttl: u8, class: u8, ident: u16, word: u16,
        label in 0u32..1 << 20, ports: (u16, u16), numbers: (u32, u32), flags: u8, window: u16, urgent: u16,
        payload in proptest::collection::vec(any::<u8>(), 0..60),
    ) {
        let len = payload.len() as u16;
        let mut out = vec![0xa5; 60 + payload.len()];

        let protocol = wirepath_wire::IpProtocol(protocol);
        let v4 = ipv4::Repr {
            src: src.into(),
            dst: dst.into(),
            protocol,
            payload_len: len,
            ttl,
            traffic_class: class,
            ident,
            fragment_word: word,
        };
        prop_assert_eq!(v4.emit(&mut out).unwrap(), 20);
        let view = ipv4::View::new(&out).unwrap();
        prop_assert_eq!(ipv4::Repr::parse(&view), v4);
        prop_assert!(view.checksum_is_valid());
        prop_assert_eq!(view.payload().len(), payload.len());

        let v6 = ipv6::Repr {
            src: src6.into(),
            dst: dst6.into(),
            next_header: protocol,
            payload_len: len,
            hop_limit: ttl,
            traffic_class: class,
            flow_label: label,
        };
        prop_assert_eq!(v6.emit(&mut out).unwrap(), 40);
        if len > 0 || protocol.0 != 0 {
            let view = ipv6::View::new(&out).unwrap();
            prop_assert_eq!(ipv6::Repr::parse(&view), v6);
            prop_assert_eq!(view.flow_label(), label);
        }

        let u = udp::Repr { src_port: ports.0, dst_port: ports.1, payload_len: len };
        prop_assert_eq!(u.emit(&mut out).unwrap(), 8);
        prop_assert_eq!(udp::Repr::parse(&udp::View::new(&out).unwrap()), u);
        let (src_port, dst_port) = ports;
        let t = tcp::Repr { src_port, dst_port, seq: numbers.0, ack: numbers.1, flags, window, urgent };
        prop_assert_eq!(t.emit(&mut out).unwrap(), 20);
        prop_assert_eq!(tcp::Repr::parse(&tcp::View::new(&out).unwrap()), t);
        prop_assert_eq!(t.emit(&mut out[..19]), Err(BufferTooShort { need: 20, have: 19 }));
    }
}

#[test]
fn arp_request_and_reply() {
    let mut out = [0xa5u8; 60];
    let len = build::arp_request(&mut out, A, Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)).unwrap();
    #[rustfmt::skip]
    assert_eq!(out[..len], [
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 8, 6,
        0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 2,
    ]);
    assert_eq!(out[len..], [0xa5; 18]);
    let request = arp::Repr::parse(&parse(&out).unwrap().outer().arp(&out).unwrap());
    let mut answer = [0xa5u8; build::ARP_FRAME_LEN];
    build::arp_reply(&mut answer, &request, B).unwrap();
    #[rustfmt::skip]
    assert_eq!(answer, [
        2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0x99, 8, 6,
        0, 1, 8, 0, 6, 4, 0, 2, 2, 0, 0, 0, 0, 0x99, 10, 0, 0, 2, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1,
    ]);
    assert_eq!(build::arp_reply(&mut [0; 41], &request, B), Err(BufferTooShort { need: 42, have: 41 }));
    // Other address formats are refused.
    out[18] = 8;
    assert_eq!(arp::View::new(&out[14..]).unwrap_err(), ParseError::ArpBadFormat);
}

fn ndp_of(frame: &[u8]) -> Result<Option<ndp::Repr>, ParseError> {
    let parsed = parse(frame).unwrap();
    ndp::Repr::parse(&parsed.outer().ipv6(frame).unwrap())
}

#[test]
fn neighbour_solicitation_and_advertisement() {
    let (me, you): (Ipv6Addr, Ipv6Addr) = ("fe80::1".parse().unwrap(), "fe80::1:2:ab03".parse().unwrap());
    let mut out = [0xa5u8; 100];
    let len = build::neighbor_solicitation(&mut out, A, me, you, None).unwrap();
    assert_eq!(len, build::NDP_FRAME_LEN);
    let frame = &out[..len];
    // RFC 2464 section 7 and RFC 4291 section 2.7.1.
    assert_eq!(frame[..6], [0x33, 0x33, 0xff, 0x02, 0xab, 0x03]);
    assert_eq!(frame[38..54], "ff02::1:ff02:ab03".parse::<Ipv6Addr>().unwrap().octets());
    // RFC 4861 section 7.1.1: hop limit 255, code 0. The option is "source link-layer address" with length 1.
    assert_eq!(frame[21], 255);
    assert_eq!((frame[54], frame[55], &frame[78..]), (135, 0, &[1, 1, 2, 0, 0, 0, 0, 1][..]));
    assert_eq!(ndp_of(frame), Ok(Some(ndp::Repr::Solicitation { target: you, source: Some(A) })));
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(etherparse::TransportSlice::Icmpv6(icmp)) = sliced.transport else { panic!() };
    assert!(icmp.is_checksum_valid(me.octets(), frame[38..54].try_into().unwrap()));

    let mut answer = [0xa5u8; 100];
    let len = build::neighbor_advertisement(&mut answer, B, you, Some((A, me)), ndp::FLAG_OVERRIDE).unwrap();
    let flags = ndp::FLAG_OVERRIDE | ndp::FLAG_SOLICITED;
    let frame = &mut answer[..len];
    assert_eq!((&frame[..6], frame[58]), (&A.0[..], 0x60));
    assert_eq!(ndp_of(frame), Ok(Some(ndp::Repr::Advertisement { target: you, flags, address: Some(B) })));
    // RFC 4861 section 7.1.2: the node MUST silently discard it if the hop limit is not 255, or the checksum is wrong.
    frame[21] = 254;
    assert_eq!(ndp_of(frame), Err(ParseError::NdpInvalid));
    frame[21] = 255;
    frame[60] ^= 1;
    assert_eq!(ndp_of(frame), Err(ParseError::Icmpv6BadChecksum));

    // Duplicate address detection: no option. The reply goes to all nodes and is not "solicited".
    let mut out = [0xa5u8; 100];
    let len = build::neighbor_solicitation(&mut out, A, Ipv6Addr::UNSPECIFIED, you, None).unwrap();
    assert_eq!(ndp_of(&out[..len]), Ok(Some(ndp::Repr::Solicitation { target: you, source: None })));
    let len = build::neighbor_advertisement(&mut out, B, you, Some((A, Ipv6Addr::UNSPECIFIED)), 0).unwrap();
    assert_eq!(out[..6], [0x33, 0x33, 0, 0, 0, 1]);
    assert_eq!(ndp_of(&out[..len]), Ok(Some(ndp::Repr::Advertisement { target: you, flags: 0, address: Some(B) })));
}

#[test]
fn invalid_neighbour_messages_of_rfc4861() {
    let (me, you): (Ipv6Addr, Ipv6Addr) = ("fe80::1".parse().unwrap(), "fe80::2".parse().unwrap());
    let mut good = [0u8; build::NDP_FRAME_LEN];
    build::neighbor_solicitation(&mut good, A, me, you, None).unwrap();
    let refused = |change: &dyn Fn(&mut [u8])| {
        let mut frame = good;
        change(&mut frame);
        let (src, dst): ([u8; 16], [u8; 16]) = (frame[22..38].try_into().unwrap(), frame[38..54].try_into().unwrap());
        checksum::icmpv6(src.into(), dst.into(), &mut frame[54..]);
        ndp_of(&frame)
    };
    assert!(refused(&|_| ()).is_ok());
    assert_eq!(refused(&|f| f[55] = 1), Err(ParseError::NdpInvalid), "ICMP code is 0");
    assert_eq!(refused(&|f| f[62] = 0xff), Err(ParseError::NdpInvalid), "target is not a multicast address");
    assert_eq!(refused(&|f| f[79] = 0), Err(ParseError::NdpInvalid), "options have a length greater than zero");
    assert_eq!(refused(&|f| f[79] = 2), Err(ParseError::NdpInvalid), "options end with the message");
    assert_eq!(
        refused(&|f| f[22..38].fill(0)),
        Err(ParseError::NdpInvalid),
        "no source link-layer address from the unspecified address"
    );
}

fn ip_packet(v6: bool, len: usize, tags: &[Tag]) -> Vec<u8> {
    let mut frame = [B.0, A.0].concat();
    for tag in tags {
        frame.extend(tag.bytes());
    }
    frame.extend(if v6 { [0x86, 0xdd] } else { [8, 0] });
    let at = frame.len();
    let header = if v6 { 40 } else { 20 };
    frame.resize(at + header + 8 + len, 0x5a);
    let payload_len = 8 + len as u16;
    if v6 {
        let (src, dst) = ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
        let next_header = wirepath_wire::IpProtocol::UDP;
        ipv6::Repr { src, dst, next_header, payload_len, hop_limit: 9, traffic_class: 0, flow_label: 0 }
            .emit(&mut frame[at..])
            .unwrap();
    } else {
        ipv4::Repr {
            src: [192, 168, 0, 1].into(),
            dst: [192, 168, 0, 2].into(),
            protocol: wirepath_wire::IpProtocol::UDP,
            payload_len,
            ttl: 9,
            traffic_class: 0,
            ident: 1,
            fragment_word: ipv4::DONT_FRAGMENT,
        }
        .emit(&mut frame[at..])
        .unwrap();
    }
    udp::Repr { src_port: 1, dst_port: 2, payload_len: len as u16 }.emit(&mut frame[at + header..]).unwrap();
    frame
}

const TOO_BIG: IcmpError = IcmpError::TooBig(1450);

#[test]
fn too_big_goes_to_the_sender() {
    for (v6, len, tags) in [(false, 2000, 0), (true, 2000, 1), (false, 100, 2), (true, 100, 0)] {
        let frame = ip_packet(v6, len, &TAGS[2 - tags..]);
        let parsed = parse(&frame).unwrap();
        let from: IpAddr = if v6 { "2001:db8::ff".parse().unwrap() } else { "192.168.0.254".parse().unwrap() };
        let mut out = vec![0xa5u8; build::max_icmp_error_len(parsed.outer())];
        let n =
            build::icmp_error(&mut out, &frame, parsed.outer(), MacAddr::new(2, 0, 0, 0, 0, 7), from, TOO_BIG).unwrap();
        let answer = &out[..n];
        let parsed_answer = parse(answer).unwrap();
        let layers = parsed_answer.outer();
        assert_eq!((&answer[..6], layers.tag_count()), (&A.0[..], tags));
        let quoted = &frame[parsed.outer().l3()..];
        if v6 {
            let icmp = layers.icmpv6(answer).unwrap();
            assert_eq!((icmp.kind().0, icmp.code(), icmp.rest()), (2, 0, Some(1450)));
            let src = layers.ipv6(answer).unwrap();
            assert!(icmp.checksum_is_valid(src.src(), src.dst()));
            // RFC 4443 section 3.2: as much of the packet as fits without exceeding the minimum MTU.
            assert_eq!(layers.end() - layers.l3(), (48 + quoted.len()).min(1280));
            assert!(quoted.starts_with(&icmp.payload()[4..]));
        } else {
            let icmp = layers.icmpv4(answer).unwrap();
            assert_eq!((icmp.kind().0, icmp.code(), icmp.next_hop_mtu()), (3, 4, 1450));
            assert!(icmp.checksum_is_valid());
            assert_eq!(layers.ipv4(answer).unwrap().dst(), Ipv4Addr::new(192, 168, 0, 1));
            assert_eq!(layers.end() - layers.l3(), (28 + quoted.len()).min(576));
            assert!(quoted.starts_with(icmp.payload()));
        }
        let again = build::icmp_error(&mut [0u8; 2000], answer, layers, A, from, TOO_BIG);
        assert_eq!(again, Err(NoReply::IsError), "an error is not answered with an error");
        assert_eq!(
            build::icmp_error(&mut out[..n - 1], &frame, parsed.outer(), A, from, TOO_BIG),
            Err(NoReply::BufferTooShort)
        );
    }
}

#[test]
fn too_big_is_suppressed_for_groups_and_without_df() {
    let from = "192.168.0.254".parse().unwrap();
    let answer = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = ip_packet(false, 100, &[]);
        change(&mut frame);
        let layers = *Parser { verify_ipv4: false, ..Parser::default() }.parse(&frame).unwrap().outer();
        build::icmp_error(&mut [0u8; 700], &frame, &layers, A, from, IcmpError::TooBig(100))
    };
    assert!(answer(&|_| ()).is_ok());
    assert_eq!(answer(&|f| f[20] = 0), Err(NoReply::MayFragment));
    assert_eq!(answer(&|f| f[21] = 9), Err(NoReply::LaterFragment));
    assert_eq!(answer(&|f| f[0] = 1), Err(NoReply::NotUnicast));
    assert_eq!(answer(&|f| f[6] = 1), Err(NoReply::NotUnicast));
    assert_eq!(answer(&|f| f[30] = 224), Err(NoReply::NotUnicast));
    assert_eq!(answer(&|f| f[26..30].fill(0)), Err(NoReply::NotUnicast));
    assert_eq!(answer(&|f| f[12..14].fill(0x55)), Err(NoReply::NotIp));
}

/// RFC 4443 excludes no fragments. A router must report each packet that is too big (RFC 4443 section 3.2).
#[test]
fn later_fragments_of_ipv6_get_errors() {
    let mut frame = ip_packet(true, 100, &[]);
    let l3 = 14;
    // A Fragment header with an offset of 800 bytes.
    let protocol = std::mem::replace(&mut frame[l3 + 6], 44);
    frame.splice(l3 + 40..l3 + 40, [protocol, 0, 3, 0x20, 0, 0, 0, 7]);
    let len = (frame.len() - l3 - 40) as u16;
    frame[l3 + 4..l3 + 6].copy_from_slice(&len.to_be_bytes());
    let layers = *parse(&frame).unwrap().outer();
    assert!(layers.is_later_fragment());
    let from = "2001:db8::ff".parse().unwrap();
    for (error, kind) in [(IcmpError::TooBig(1280), 2), (IcmpError::HostUnreachable, 1)] {
        let mut out = [0u8; 1400];
        let n = build::icmp_error(&mut out, &frame, &layers, A, from, error).unwrap();
        let answer = parse(&out[..n]).unwrap();
        let icmp = answer.outer().icmpv6(&out[..n]).unwrap();
        assert_eq!(icmp.kind().0, kind);
        assert_eq!(&icmp.payload()[4..], &frame[l3..], "the whole fragment");
    }
}

#[test]
fn errors_have_their_types_and_codes() {
    let errors = [
        (IcmpError::TimeExceeded, (11, 0), (3, 0)),
        (IcmpError::NoRoute, (3, 0), (1, 0)),
        (IcmpError::HostUnreachable, (3, 1), (1, 3)),
        (IcmpError::PortUnreachable, (3, 3), (1, 4)),
        (IcmpError::Prohibited, (3, 13), (1, 1)),
    ];
    for (error, v4, v6) in errors {
        for (is_v6, expected) in [(false, v4), (true, v6)] {
            let mut frame = ip_packet(is_v6, 100, &[]);
            if !is_v6 {
                // Only "too big" depends on "don't fragment".
                frame[20] = 0;
                ipv4::ViewMut::new(&mut frame[14..]).unwrap().fill_checksum();
            }
            let from: IpAddr = if is_v6 { "2001:db8::ff".parse().unwrap() } else { "192.168.0.254".parse().unwrap() };
            let layers = *parse(&frame).unwrap().outer();
            let mut out = vec![0xa5u8; build::max_icmp_error_len(&layers)];
            let n = build::icmp_error(&mut out, &frame, &layers, B, from, error).unwrap();
            let parsed = parse(&out[..n]).unwrap();
            let l4 = parsed.outer().l4();
            assert_eq!((out[l4], out[l4 + 1]), expected, "{error:?}");
            assert_eq!(out[l4 + 4..l4 + 8], [0; 4], "{error:?}");
            if is_v6 {
                assert_eq!(ChecksumSpan::of(&out[..n], parsed.outer()).unwrap().state(&out[..n]), State::Good);
            } else {
                assert!(parsed.outer().icmpv4(&out[..n]).unwrap().checksum_is_valid());
            }
            let mut group = frame.clone();
            group[0] = 1;
            let refused = build::icmp_error(&mut out, &group, &layers, B, from, error);
            assert_eq!(refused, Err(NoReply::NotUnicast), "{error:?}");
        }
    }
}

#[test]
fn echo_reply_in_place() {
    for v6 in [false, true] {
        let mut frame = ip_packet(v6, 9, &TAGS[..1]);
        let l4 = frame.len() - 17;
        frame[l4..l4 + 8].copy_from_slice(&[if v6 { 128 } else { 8 }, 0, 0, 0, 1, 2, 3, 4]);
        let at = 18;
        frame[at + if v6 { 6 } else { 9 }] = if v6 { 58 } else { 1 };
        if v6 {
            let (src, dst) = ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
            assert!(checksum::icmpv6(src, dst, &mut frame[l4..]));
        } else {
            ipv4::ViewMut::new(&mut frame[at..]).unwrap().fill_checksum();
            let rest = 0x0102_0304;
            icmpv4::Repr { kind: icmpv4::Type::ECHO_REQUEST, code: 0, rest }.emit(&mut frame[l4..]).unwrap();
        }
        let request = frame.clone();
        let layers = *parse(&frame).unwrap().outer();
        build::echo_reply(&mut frame, &layers).unwrap();
        assert_eq!((&frame[..6], &frame[6..12]), (&A.0[..], &B.0[..]));
        let parsed = parse(&frame).unwrap();
        assert_eq!(frame[l4 + 4..], request[l4 + 4..], "identifier, sequence and data come back");
        if v6 {
            let ip = parsed.outer().ipv6(&frame).unwrap();
            assert_eq!((ip.src(), ip.hop_limit()), ("2001:db8::2".parse().unwrap(), 64));
            let icmp = parsed.outer().icmpv6(&frame).unwrap();
            assert_eq!(icmp.kind().0, 129);
            assert_eq!(ChecksumSpan::of(&frame, parsed.outer()).unwrap().state(&frame), State::Good);
        } else {
            let ip = parsed.outer().ipv4(&frame).unwrap();
            assert_eq!((ip.dst(), ip.ttl()), (Ipv4Addr::new(192, 168, 0, 1), 64));
            let icmp = parsed.outer().icmpv4(&frame).unwrap();
            assert_eq!((icmp.kind().0, icmp.checksum_is_valid(), icmp.rest() as u16), (0, true, 0x304));
        }
        assert_eq!(build::echo_reply(&mut frame, &layers), Err(NoReply::NotEcho), "a reply is not answered");
        let mut broken = request.clone();
        *broken.last_mut().unwrap() ^= 1;
        let before = broken.clone();
        assert_eq!(build::echo_reply(&mut broken, &layers), Err(NoReply::NotEcho));
        assert_eq!(broken, before, "and nothing changes then");
    }
}

#[test]
fn entropy_is_per_flow_and_shared_by_fragments() {
    use wirepath_wire::tuple::{FiveTuple, entropy, source_port};
    let lenient = Parser { verify_ipv4: false, ..Parser::default() };
    let of = |f: &[u8]| entropy(f, lenient.parse(f).unwrap().outer());
    let whole = ip_packet(false, 104, &[]);
    let mut first = whole.clone();
    first[20] = 0x20;
    let mut later = whole.clone();
    later[20..22].copy_from_slice(&[0, 14]);
    later[34..].fill(0x33);
    assert_eq!(of(&first), of(&later));
    assert_eq!(lenient.parse(&later).unwrap().outer().l4_type(), L4Type::None);
    let mut other = whole.clone();
    other[35] ^= 1;
    assert_ne!(of(&whole), of(&other));
    let tuple = FiveTuple::of(&whole, lenient.parse(&whole).unwrap().outer()).unwrap();
    let (a, b) = ([192, 168, 0, 1].into(), [192, 168, 0, 2].into());
    assert_eq!(Some(tuple), FiveTuple::new(a, b, wirepath_wire::IpProtocol::UDP, 1, 2));
    assert_eq!((tuple.src(), tuple.dst(), tuple.src_port(), tuple.dst_port(), tuple.words().len()), (a, b, 1, 2, 2));
    let tuple = |f: &[u8]| FiveTuple::of(f, parse(f).unwrap().outer()).unwrap();
    let v6 = tuple(&ip_packet(true, 1, &[]));
    assert_eq!((v6.src(), v6.words().len()), ("2001:db8::1".parse().unwrap(), 5));
    // RFC 7348 section 5: source ports are in the dynamic range, and spread over all of it.
    let mut buckets = [0u32; 16];
    for port in 0..4096u16 {
        let mut f = whole.clone();
        f[34..36].copy_from_slice(&port.to_be_bytes());
        let source = source_port(of(&f));
        assert!(source >= 49152);
        buckets[usize::from(source >> 10 & 15)] += 1;
    }
    assert!(buckets.iter().all(|n| (180..340).contains(n)), "{buckets:?}");
}

/// Headers with IPv4 options or with an extension header have no short form.
#[test]
fn short_headers_have_no_options() {
    for v6 in [false, true] {
        let plain = OuterHeaders::vxlan(&config(v6, &[], OuterChecksum::Standard)).unwrap();
        let (l3, l4) = (plain.l3(), plain.udp_offset().unwrap());
        let of = |bytes: &[u8], l4| OuterHeaders::from_bytes(bytes, l3, l4, if v6 { 6 } else { 4 }).unwrap();
        assert!(of(plain.bytes(), l4).is_short_with(0));
        let mut longer = plain.bytes().to_vec();
        longer.splice(l4..l4, if v6 { vec![17, 0, 1, 4, 0, 0, 0, 0] } else { vec![1; 4] });
        longer[l3] += u8::from(!v6);
        assert!(!of(&longer, longer.len() - 16).is_short_with(0));
    }
}

proptest! {
    /// The fast path writes the same bytes as the general one.
    #[test]
    fn plain_headers_are_the_same(
        inner_len in 0usize..=65_499, port: u16, ttl: u8, class: u8, ports in any::<(u8, u8)>(),
    ) {
        let mut config = config(false, &[], OuterChecksum::Standard);
        (config.ttl, config.traffic_class) = (ttl, class);
        config.src = Ipv4Addr::new(10, ports.0, ports.1, 1).into();
        let encap = OuterHeaders::vxlan(&config).unwrap();
        prop_assert!(encap.is_plain());
        let (mut plain, mut long) = ([0xa5; PLAIN_LEN], [0xa5; PLAIN_LEN]);
        encap.emit_plain(&mut plain, inner_len as u16, port);
        encap.emit(&mut long, &encap.fields(inner_len, port)).unwrap();
        prop_assert_eq!(plain, long);
    }

    /// The short form has the same bytes as the general one, for all transports, lengths and types of payloads.
    #[test]
    fn short_headers_are_the_same(
        bits in any::<[bool; 6]>(), checksum in 0usize..3, transport in 0..4, tunnel_len in 0usize..=48,
        type_at in 0u8..4, inner in proptest::collection::vec(any::<u8>(), 1..=200), port: u16, entropy: u32,
        numbers in any::<[u8; 4]>(),
    ) {
        let [v6, carries_packets, carries_ipv6, flow_id, flow_label, has_tag] = bits;
        let [ttl, class, a, b] = numbers;
        let address = |last: u8| -> std::net::IpAddr {
            if v6 { [0xfd00, 0, 0, 0, 0, 0, a.into(), last.into()].into() } else { [10, a, b, last].into() }
        };
        let checksum = [OuterChecksum::Standard, OuterChecksum::Always, OuterChecksum::Zero][checksum];
        let mut header: Vec<u8> = (0..tunnel_len as u8).map(|i| i.wrapping_mul(a) ^ b).collect();
        let fits = |at: u8, n: usize| usize::from(at) + n <= tunnel_len;
        let kinds = [
            Some(PayloadType::IpProtocol),
            fits(2, 2).then_some(PayloadType::EtherType(2)),
            fits(type_at | 1, 1).then_some(PayloadType::NextProtocol(type_at | 1)),
            fits(type_at & !1, 2).then_some(PayloadType::NextHeader(type_at & !1)),
        ];
        let is_udp = transport < 2;
        let is_behind_udp =
            |kind: &PayloadType| matches!(kind, PayloadType::EtherType(_) | PayloadType::NextProtocol(_));
        let payload_type =
            kinds[usize::from(type_at)].filter(|kind| carries_packets && (!is_udp || is_behind_udp(kind)));
        match payload_type {
            Some(PayloadType::EtherType(at)) => header[usize::from(at)..][..2].fill(0),
            Some(PayloadType::NextProtocol(at) | PayloadType::NextHeader(at)) => header[usize::from(at)] = 0,
            _ => {}
        }
        // The byte of entropy is not covered by a UDP checksum.
        let flow_id = (flow_id && !is_udp && tunnel_len >= 8).then_some(7);
        if flow_id.is_some() {
            header[7] = 0;
        }
        let transport = match is_udp {
            true => Transport::Udp { dst_port: port ^ 0x55, checksum },
            false => Transport::Protocol(wirepath_wire::IpProtocol(if transport == 2 { 47 } else { 4 })),
        };
        let tag = [wirepath_wire::Tag::new(5)];
        let encap = OuterHeaders::new(&OuterConfig {
            src_mac: MacAddr([2, 0, 0, 0, 0, a]),
            dst_mac: MacAddr([2, 0, 0, 0, 1, b]),
            tags: if has_tag && a > 200 { &tag } else { &[] },
            src: address(1),
            dst: address(2),
            ttl,
            traffic_class: class,
            flow_label: 0,
            transport,
            tunnel_header: &header,
            variable: VariableFields { flow_id, flow_label, payload_type, ..VariableFields::default() },
        });
        let encap = encap.unwrap();
        let has_tag = has_tag && a > 200;
        prop_assert_eq!(encap.is_short_with(0), !has_tag && encap.len() <= 96);
        prop_assert!(!encap.is_short_with(1));
        if encap.is_short_with(0) {
            let inner_sum = wirepath_wire::checksum::sum(&inner);
            let (mut short, mut long) = (vec![0xa5; encap.len()], vec![0xa5; encap.len()]);
            let inner_len = inner.len() as u16;
            let fields = ShortFields { inner_len, source_port: port, entropy, carries_ipv6, inner_sum };
            prop_assert!(encap.emit_short(&mut short, &fields).is_some());
            let mut other = vec![0; encap.len() + 1];
            prop_assert!(encap.emit_short(&mut other, &fields).is_none());
            let fields = EncapFields { entropy, carries_ipv6, inner_sum, ..encap.fields(inner.len(), port) };
            encap.emit(&mut long, &fields).unwrap();
            prop_assert_eq!(short, long);
        }
    }
}
