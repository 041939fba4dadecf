//! One frame for each parse error, with the requirement of the RFC.

use std::collections::BTreeSet;

use wirepath_wire::{L3Type, L4Type, ParseError, Parser, Tunnel, Tunnels, ipv4, ipv6, parse, tcp};

const MACS: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

fn eth(ethertype: u16, rest: &[u8]) -> Vec<u8> {
    [&MACS[..], &ethertype.to_be_bytes(), rest].concat()
}

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Builds IPv4 with matching length and checksum.
fn v4(protocol: u8, fragment: u16, options: &[u8], body: &[u8]) -> Vec<u8> {
    let mut h = vec![0x45 + (options.len() / 4) as u8, 0];
    h.extend(((20 + options.len() + body.len()) as u16).to_be_bytes());
    h.extend([0, 1]);
    h.extend(fragment.to_be_bytes());
    h.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    h.extend(options);
    let sum = checksum(&h).to_be_bytes();
    h[10..12].copy_from_slice(&sum);
    h.extend(body);
    eth(0x800, &h)
}

fn v6(next: u8, body: &[u8]) -> Vec<u8> {
    let mut h = vec![0x60, 0, 0, 0];
    h.extend((body.len() as u16).to_be_bytes());
    h.extend([next, 64]);
    h.extend([0xfd; 32]);
    h.extend(body);
    eth(0x86dd, &h)
}

fn udp(port: u16, len: u16, body: &[u8]) -> Vec<u8> {
    [&[0x13, 0x88][..], &port.to_be_bytes(), &len.to_be_bytes(), &[0, 0], body].concat()
}

fn vxlan(body: &[u8]) -> Vec<u8> {
    v4(17, 0, &[], &udp(4789, 8 + body.len() as u16, body))
}

#[test]
fn every_error_has_a_frame() {
    let good_udp = udp(53, 8, &[]);
    let mut bad_sum = v4(17, 0, &[], &good_udp);
    bad_sum[24] ^= 1;
    let mut tcp = vec![0; 20];
    tcp[12] = 0x40;
    let mut long_tcp = vec![0; 20];
    long_tcp[12] = 0x60;
    let options: Vec<u8> = (0..9).flat_map(|i| [if i == 8 { 59 } else { 60 }, 0, 1, 4, 0, 0, 0, 0]).collect();
    let fragment = |next: u8, word: u16| [&[next, 0][..], &word.to_be_bytes(), &[0, 0, 0, 9]].concat();
    let patch = |mut frame: Vec<u8>, at: usize, bytes: &[u8]| {
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let seal = |mut frame: Vec<u8>| {
        frame[24..26].fill(0);
        let sum = checksum(&frame[14..34]).to_be_bytes();
        frame[24..26].copy_from_slice(&sum);
        frame
    };
    use ParseError::*;
    let cases: Vec<(ParseError, Vec<u8>)> = vec![
        (EthernetTruncated, MACS.to_vec()),
        (VlanTruncated, eth(0x8100, &[0, 1, 8])),
        (VlanTooDeep, eth(0x88a8, &[0, 1, 0x81, 0, 0, 2, 0x81, 0, 0, 3, 8, 0])),
        (ArpTruncated, eth(0x806, &[0; 27])),
        (Ipv4Truncated, v4(17, 0, &[], &good_udp)[..33].to_vec()),
        (Ipv4BadVersion, patch(v4(17, 0, &[], &good_udp), 14, &[0x65])),
        (Ipv4BadHeaderLength, patch(v4(17, 0, &[], &good_udp), 14, &[0x44])),
        (Ipv4BadHeaderLength, patch(v4(17, 0, &[], &good_udp), 16, &[0, 19])),
        (Ipv4BadHeaderLength, patch(v4(17, 0, &[], &good_udp), 14, &[0x4f])),
        (Ipv4BadTotalLength, patch(v4(17, 0, &[], &good_udp), 16, &[0, 29])),
        (Ipv4BadTotalLength, patch(v4(17, 0, &[], &good_udp), 16, &[0xff, 0xff])),
        (Ipv4BadChecksum, bad_sum.clone()),
        (Ipv4BadChecksum, patch(v4(17, 0, &[1; 4], &good_udp), 37, &[2])),
        // RFC 3128 section 2: "IF PROTOCOL=TCP and FRAGMENT OFFSET=1 THEN DROP PACKET"
        (FragmentOverlap, v4(6, 1, &[], &[0; 16])),
        (FragmentOverlap, v6(44, &[fragment(6, 1 << 3), vec![0; 16]].concat())),
        (FragmentTooLong, v4(17, 0x1fff, &[], &[0; 8])),
        // RFC 8200 section 4.5: a fragment must be discarded if the payload length of the reassembled packet
        // "would exceed 65,535 octets".
        (FragmentTooLong, v6(44, &[fragment(17, 0xfff8), vec![0; 8]].concat())),
        // RFC 8200 section 4.5: a fragment must be discarded if its length "is not a multiple of 8 octets and the
        // M flag of that fragment is 1".
        (FragmentUnaligned, v6(44, &[fragment(17, 9), vec![0; 12]].concat())),
        (FragmentUnaligned, v4(17, 0x2000, &[], &[0; 12])),
        (Ipv6Truncated, v6(17, &good_udp)[..53].to_vec()),
        (Ipv6BadVersion, patch(v6(17, &good_udp), 14, &[0x40])),
        (Ipv6BadPayloadLength, patch(v6(17, &good_udp), 18, &[0, 9])),
        (Ipv6Jumbogram, v6(0, &[])),
        // RFC 2675 section 3: the option with a non-zero payload length is an error.
        (Ipv6Jumbogram, v6(0, &[59, 0, 0xc2, 4, 0, 1, 0, 0])),
        (ExtensionTruncated, v6(60, &[59, 0, 1, 4, 0, 0, 0])),
        (ExtensionTruncated, v6(43, &[59, 1, 0, 0, 0, 0, 0, 0])),
        // RFC 8200 section 4.1: hop-by-hop options only directly after the IPv6 header.
        (ExtensionOrder, v6(60, &[0, 0, 1, 4, 0, 0, 0, 0, 59, 0, 1, 4, 0, 0, 0, 0])),
        (ExtensionOrder, v6(44, &[fragment(44, 0), fragment(59, 0)].concat())),
        (ExtensionMalformed, v6(60, &[59, 0, 1, 5, 0, 0, 0, 0])),
        // RFC 4302 section 2: AH has at least 12 bytes.
        (ExtensionMalformed, v6(51, &[59, 0, 0, 0, 0, 0, 0, 0])),
        (ExtensionTooMany, v6(60, &options)),
        (TcpTruncated, v4(6, 0, &[], &[0; 19])),
        (TcpTruncated, v4(6, 0, &[], &long_tcp)),
        (TcpBadOffset, v4(6, 0, &[], &tcp)),
        // A first fragment must hold the whole header (RFC 1858; RFC 7112 for IPv6).
        (TcpTruncated, v4(6, 0x2000, &[], &[0; 8])),
        (UdpTruncated, v6(17, &[0; 7])),
        (UdpBadLength, v4(17, 0, &[], &udp(53, 9, &[]))),
        (UdpBadLength, v4(17, 0, &[], &udp(53, 7, &[]))),
        (UdpBadLength, v6(17, &udp(53, 0, &[]))),
        (Icmpv4Truncated, v4(1, 0, &[], &[8, 0, 0, 0])),
        (Icmpv6Truncated, v6(58, &[128, 0, 0])),
        (EspTruncated, v4(50, 0, &[], &[0; 7])),
    ];
    let mut seen = BTreeSet::new();
    for (error, frame) in &cases {
        // The checksum is corrected where it is not the tested error.
        let sealed = matches!(error, Ipv4BadVersion | Ipv4BadTotalLength) || frame[12..].starts_with(&[8, 0, 0x44]);
        let frame = if sealed { seal(frame.clone()) } else { frame.clone() };
        assert_eq!(parse(&frame), Err(*error), "{frame:02x?}");
        seen.insert(*error);
        // In a tunnel, the same error concerns only the inner frame.
        let wrapped = vxlan(&[&[8, 0, 0, 0, 0, 0, 42, 0], &frame[..]].concat());
        let parsed = parse(&wrapped).unwrap();
        assert_eq!((parsed.tunnel(), parsed.tunnel_error(), parsed.inner()), (Tunnel::Vxlan, Some(*error), None));
        assert_eq!(parsed.vni().map(|v| v.get()), Some(42), "counted for its segment");
    }
    // An invalid tunnel header: the frame is valid, the tunnel type is known, and there is no inner stack.
    let datagram = |port, body: &[u8]| v4(17, 0, &[], &udp(port, 8 + body.len() as u16, body));
    let label = |bottom: u8| [0, 1, bottom, 64];
    let deep = [label(0).repeat(16), label(1).to_vec()].concat();
    let cases = [
        (VxlanTruncated, Tunnel::Vxlan, datagram(4789, &[8, 0, 0, 0, 0, 0, 42])),
        // The packet has enough bytes, but the datagram has not.
        (VxlanTruncated, Tunnel::Vxlan, v4(17, 0, &[], &udp(4789, 15, &[8; 40]))),
        (VxlanBadFlags, Tunnel::Vxlan, datagram(4789, &[0xf7, 0, 0, 0, 0, 0, 42, 0])),
        (VxlanGpeTruncated, Tunnel::VxlanGpe, datagram(4790, &[0x0c, 0, 0, 3, 0, 0, 42])),
        (VxlanGpeBadVersion, Tunnel::VxlanGpe, datagram(4790, &[0x2c, 0, 0, 3, 0, 0, 42, 0])),
        (GeneveTruncated, Tunnel::Geneve, datagram(6081, &[0, 0, 0x65, 0x58, 0, 0, 42])),
        (GeneveTruncated, Tunnel::Geneve, datagram(6081, &[1, 0, 0x65, 0x58, 0, 0, 42, 0, 0, 0, 0])),
        (GeneveBadVersion, Tunnel::Geneve, datagram(6081, &[0x40, 0, 0x65, 0x58, 0, 0, 42, 0])),
        (GeneveBadOption, Tunnel::Geneve, datagram(6081, &[1, 0, 0x65, 0x58, 0, 0, 42, 0, 0, 0, 0, 1])),
        (GreTruncated, Tunnel::Gre, v4(47, 0, &[], &[0, 0, 8])),
        (GreTruncated, Tunnel::Gre, v6(47, &[0x20, 0, 8, 0, 0, 0, 0])),
        (MplsTruncated, Tunnel::Mpls, datagram(6635, &[label(0), label(0)].concat())),
        (MplsTruncated, Tunnel::Mpls, eth(0x8847, &label(1)[..3])),
        (MplsTooDeep, Tunnel::Mpls, eth(0x8848, &deep)),
        (MplsTooDeep, Tunnel::Mpls, datagram(6635, &deep)),
    ];
    for (error, tunnel, frame) in cases {
        let parsed = parse(&frame).unwrap();
        assert_eq!((parsed.tunnel(), parsed.tunnel_error()), (tunnel, Some(error)));
        assert_eq!((parsed.inner(), parsed.vni(), parsed.tunnel_of(0)), (None, None, Tunnel::None), "{error:?}");
        assert!(!parsed.outer().has_labels() && !parsed.has_tunnel_labels(0));
        seen.insert(error);
    }
    // The tunnel header is valid, but what follows it is not.
    let cases = [
        (GreBadFlags, v4(47, 0, &[], &[0, 1, 8, 0])),
        (GreBadFlags, v4(47, 0, &[], &[0x40, 0, 8, 0, 0, 0, 0, 0])),
        (MplsTruncated, v4(47, 0, &[], &[&[0, 0, 0x88, 0x47][..], &label(0)].concat())),
        (MplsTooDeep, v6(47, &[&[0, 0, 0x88, 0x47][..], &deep].concat())),
    ];
    for (error, frame) in cases {
        let parsed = parse(&frame).unwrap();
        assert_eq!((parsed.outer().l4_type(), parsed.tunnel_of(0)), (L4Type::Gre, Tunnel::Gre));
        assert_eq!((parsed.tunnel_error(), parsed.inner(), parsed.has_tunnel_labels(0)), (Some(error), None, false));
        seen.insert(error);
    }
    // Invalid IP after labels: the frame can still be switched by its labels.
    let broken = eth(0x8847, &[&label(1)[..], &bad_sum[14..]].concat());
    let parsed = parse(&broken).unwrap();
    assert!(parsed.outer().has_labels());
    assert_eq!((parsed.outer().l3_type(), parsed.outer().labels()), (L3Type::Other, 14..18));
    assert_eq!((parsed.tunnel_error(), parsed.inner()), (Some(Ipv4BadChecksum), None));
    // Errors of views and of payload checks, and split headers, which are a property of buffers.
    let elsewhere = [
        HeaderSplit,
        ArpBadFormat,
        Ipv4BadOption,
        TcpBadOption,
        UdpBadChecksum,
        TcpBadChecksum,
        Icmpv4BadChecksum,
        Icmpv6BadChecksum,
        NdpInvalid,
    ];
    for error in ParseError::ALL {
        assert!(seen.contains(error) != elsewhere.contains(error), "{error:?}");
    }
    let lenient = Parser { verify_ipv4: false, ..Parser::default() };
    assert!(lenient.parse(&bad_sum).is_ok());
}

#[test]
fn other_ports_and_no_tunnels() {
    let header = [8, 0, 0, 0, 0, 0, 42, 0];
    let frame = v4(17, 0, &[], &udp(8472, 36, &[&header[..], &eth(0x88b5, &[0; 6])].concat()));
    assert_eq!(parse(&frame).unwrap().tunnel(), Tunnel::None);
    let linux = Parser { tunnels: Tunnels::default().with_vxlan(Some(8472)), ..Parser::default() };
    let parsed = linux.parse(&frame).unwrap();
    assert_eq!(parsed.inner().unwrap().ethertype().0, 0x88b5);
    assert_eq!(parsed.inner().unwrap().end(), frame.len());
    let none = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
    assert_eq!(none.parse(&vxlan(&header)).unwrap().tunnel(), Tunnel::None);
    // A fragment of a VXLAN datagram is not parsed further: it is not the whole datagram.
    let first = v4(17, 0x2000, &[], &udp(4789, 400, &[&header[..], &eth(0x88b5, &[0; 2])].concat()));
    let parsed = parse(&first).unwrap();
    assert_eq!((parsed.tunnel(), parsed.outer().is_first_fragment()), (Tunnel::None, true));
}

#[test]
fn atomic_fragments_are_whole() {
    // RFC 6946: offset 0 without more fragments is a complete packet.
    let frame = v6(44, &[&[17, 0, 0, 0, 0, 0, 0, 9][..], &udp(53, 8, &[])].concat());
    let parsed = parse(&frame).unwrap();
    assert!(!parsed.outer().is_fragment() && parsed.outer().has_ip_options());
    assert_eq!(parsed.outer().l4_type(), L4Type::Udp);
    // The UDP length may be shorter than the packet: the remaining bytes are not part of the datagram.
    let frame = v4(17, 0, &[], &udp(53, 8, &[1, 2, 3]));
    assert_eq!(parse(&frame).unwrap().outer().udp(&frame).unwrap().payload(), []);
}

#[test]
fn ipv4_options_one_by_one() {
    let frame = v4(17, 0, &[1, 148, 4, 0, 0, 7, 3, 4, 0, 0xaa, 0xbb, 0xcc], &udp(53, 8, &[]));
    let parsed = parse(&frame).unwrap();
    assert!(parsed.outer().has_ip_options());
    let view = parsed.outer().ipv4(&frame).unwrap();
    assert_eq!(view.header_len(), 32);
    let options: Vec<_> = view.options().map(|o| o.unwrap()).collect();
    assert_eq!(options, [(148, &[0, 0][..]), (7, &[4][..])]);
    for broken in [[148, 5, 0, 0], [148, 1, 0, 0], [148, 0, 0, 0], [1, 1, 1, 148]] {
        let frame = v4(17, 0, &broken, &udp(53, 8, &[]));
        let view = ipv4::View::new(&frame[14..]).unwrap();
        assert_eq!(view.options().last(), Some(Err(ParseError::Ipv4BadOption)), "{broken:?}");
    }
}

#[test]
fn tcp_options_one_by_one() {
    let mut segment = vec![0; 20];
    segment[12] = 0x80;
    segment.extend([2, 4, 5, 0xb4, 1, 3, 3, 7, 4, 2, 0, 0]);
    let view = tcp::View::new(&segment).unwrap();
    let options: Vec<_> = view.options().map(|o| o.unwrap()).collect();
    assert_eq!(options, [(2, &[5, 0xb4][..]), (3, &[7][..]), (4, &[][..])]);
    segment[21] = 40;
    let view = tcp::View::new(&segment).unwrap();
    assert_eq!(view.options().collect::<Vec<_>>(), [Err(ParseError::TcpBadOption)]);
}

#[test]
fn ipv6_extensions_one_by_one() {
    let body = [
        &[60, 0, 5, 2, 0, 0, 1, 0][..],
        &[43, 1, 1, 4, 0, 0, 0, 0, 201, 2, 8, 9, 1, 2, 0, 0],
        &[51, 0, 0, 0, 0, 0, 0, 0],
        &[44, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[17, 0, 0, 0, 1, 2, 3, 4],
        &udp(53, 8, &[]),
    ]
    .concat();
    let frame = v6(0, &body);
    let parsed = parse(&frame).unwrap();
    assert_eq!((parsed.outer().l4(), parsed.outer().l4_type()), (frame.len() - 8, L4Type::Udp));
    let view = parsed.outer().ipv6(&frame).unwrap();
    let mut extensions = view.extensions();
    let kinds: Vec<_> = extensions.by_ref().map(|e| e.unwrap()).collect();
    assert_eq!(
        kinds.iter().map(|e| (e.kind.0, e.bytes.len())).collect::<Vec<_>>(),
        [(0, 8), (60, 16), (43, 8), (51, 12), (44, 8)]
    );
    assert_eq!(extensions.next_header().0, 17);
    assert_eq!(extensions.rest().len(), 8);
    assert_eq!(kinds[0].options().unwrap().collect::<Vec<_>>(), [Ok((5, &[0, 0][..]))]);
    assert_eq!(kinds[1].options().unwrap().collect::<Vec<_>>(), [Ok((201, &[8, 9][..]))]);
    assert_eq!(kinds[4].fragment(), Some((0, false, 0x0102_0304)));
    assert!(kinds[2].options().is_none() && kinds[2].fragment().is_none());
    let many: Vec<u8> = (0..12).flat_map(|_| [60, 0, 1, 4, 0, 0, 0, 0]).collect();
    let frame = v6(60, &many);
    let view = ipv6::View::new(&frame[14..]).unwrap();
    assert_eq!(view.extensions().last(), Some(Err(ParseError::ExtensionTooMany)));
    assert_eq!(view.extensions().count(), ipv6::MAX_EXTENSIONS + 1);
}
