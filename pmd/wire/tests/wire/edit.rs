//! Setters of headers against plain writes whose checksums are computed again in full.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use fastrand::Rng;
use wirepath_wire::checksum::{State, Transport, pseudo4, pseudo6, sum};
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::edit::PendingChecksums;
use wirepath_wire::{
    EtherType, HeadersMut, IpProtocol, L3Type, L4Type, MacAddr, Parsed, Tunnel, Vni, arp, ethernet, icmpv4, icmpv6,
    ipv4, ipv6, parse,
};

use crate::stacks;

/// Computes all checksums of a frame, the inner ones first. UDP checksums that are zero stay zero.
fn fill(frame: &mut [u8], parsed: &Parsed) {
    for layers in parsed.inner().into_iter().chain([parsed.outer()]) {
        if layers.l3_type() == L3Type::Ipv4 {
            let len = usize::from(frame[layers.l3()] & 15) * 4;
            let header = &mut frame[layers.l3()..][..len];
            header[10..12].fill(0);
            let checksum = sum(header).checksum();
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        if let Some(span) = ChecksumSpan::of(frame, layers) {
            let segment = &mut frame[span.start..span.end];
            if layers.l4_type() != L4Type::Udp || segment[6..8] != [0, 0] {
                assert!(span.transport.fill(segment, span.pseudo));
            }
        }
        let rest = &mut frame[layers.l4()..layers.end()];
        let at = match layers.l4_type() {
            L4Type::Icmpv4 => 2,
            L4Type::Gre if rest[0] & 0x80 != 0 => 4,
            _ => continue,
        };
        rest[at..at + 2].fill(0);
        let checksum = sum(rest).checksum();
        rest[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}

/// Makes a random change by a setter, and the same change as plain bytes: their offset and value. `None` if the
/// chosen header does not exist.
fn change(random: &mut Rng, mut headers: HeadersMut<'_>, bytes: &[u8]) -> Option<(&'static str, usize, Vec<u8>)> {
    let layers = *headers.layers();
    let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let (l2, l3, l4) = (layers.l2(), layers.l3(), layers.l4());
    let mac = MacAddr::from_u64(random.u64(..));
    let (number, address, address6) = (random.u16(..), Ipv4Addr::from(random.u32(..)), Ipv6Addr::from(random.u128(..)));
    let [high, low] = number.to_be_bytes();
    let swapped = |at: usize, len: usize| [&bytes[at + len..at + 2 * len], &bytes[at..at + len]].concat();
    Some(match random.usize(..40) {
        0 => (headers.ethernet()?.set_dst(mac), ("dst_mac", l2, mac.0.to_vec())).1,
        1 => (headers.ethernet()?.set_src(mac), ("src_mac", l2 + 6, mac.0.to_vec())).1,
        2 => (headers.ethernet()?.swap_addresses(), ("swap_mac", l2, swapped(l2, 6))).1,
        3 => {
            (
                headers.vlan(0)?.set_id(number),
                ("vlan", l2 + 14, (word(l2 + 14) & 0xf000 | number & 0xfff).to_be_bytes().to_vec()),
            )
                .1
        }
        4 => {
            (
                headers.vlan(1)?.set_pcp(low & 7),
                ("pcp", l2 + 18, (word(l2 + 18) & 0x1fff | u16::from(low & 7) << 13).to_be_bytes().to_vec()),
            )
                .1
        }
        5 => (headers.arp()?.set_sender_mac(mac), ("arp_mac", l3 + 8, mac.0.to_vec())).1,
        6 => (headers.arp()?.set_target_ip(address), ("arp_ip", l3 + 24, address.octets().to_vec())).1,
        7 => (headers.arp()?.set_operation(arp::Operation(number)), ("arp_op", l3 + 6, vec![high, low])).1,
        8 | 9 => (headers.ipv4()?.set_src(address), ("ipv4_src", l3 + 12, address.octets().to_vec())).1,
        10 | 11 => (headers.ipv4()?.set_dst(address), ("ipv4_dst", l3 + 16, address.octets().to_vec())).1,
        12 => (headers.ipv4()?.set_ttl(low), ("ttl", l3 + 8, vec![low])).1,
        13 => (headers.ipv4()?.set_traffic_class(low), ("tos", l3 + 1, vec![low])).1,
        14 => (headers.ipv4()?.set_ident(number), ("ident", l3 + 4, vec![high, low])).1,
        15 => {
            headers.ipv4()?.set_dont_fragment(low & 1 != 0);
            ("df", l3 + 6, vec![bytes[l3 + 6] & !0x40 | (low & 1) << 6])
        }
        16 => {
            (
                headers.ip()?.swap_addresses(),
                match layers.l3_type() {
                    L3Type::Ipv4 => ("swap_ipv4", l3 + 12, swapped(l3 + 12, 4)),
                    _ => ("swap_ipv6", l3 + 8, swapped(l3 + 8, 16)),
                },
            )
                .1
        }
        17 => {
            let at = if layers.l3_type() == L3Type::Ipv4 { l3 + 8 } else { l3 + 7 };
            assert_eq!(headers.ip()?.hop_limit(), bytes[at]);
            assert_eq!(headers.ip()?.decrement_hop_limit(), bytes[at] > 1);
            ("decrement", at, vec![if bytes[at] > 1 { bytes[at] - 1 } else { bytes[at] }])
        }
        18 | 19 => (headers.ipv6()?.set_src(address6), ("ipv6_src", l3 + 8, address6.octets().to_vec())).1,
        20 | 21 => (headers.ipv6()?.set_dst(address6), ("ipv6_dst", l3 + 24, address6.octets().to_vec())).1,
        22 => (headers.ipv6()?.set_hop_limit(low), ("hop_limit", l3 + 7, vec![low])).1,
        23 => {
            (
                headers.ipv6()?.set_traffic_class(low),
                ("class", l3, (word(l3) & 0xf00f | u16::from(low) << 4).to_be_bytes().to_vec()),
            )
                .1
        }
        24 => {
            (
                headers.ipv6()?.set_flow_label(u32::from(number)),
                ("label", l3 + 1, vec![bytes[l3 + 1] & 0xf0, high, low]),
            )
                .1
        }
        25 | 26 => (headers.udp()?.set_src_port(number), ("udp_src", l4, vec![high, low])).1,
        // The destination port of a tunnel decides how the rest is parsed.
        27 => (headers.udp()?.set_src_port(!number), ("udp_src", l4, vec![!high, !low])).1,
        28 if headers.layers().l4_type() == L4Type::Udp && number > 10_000 => {
            (headers.udp()?.swap_ports(), ("swap_udp", l4, swapped(l4, 2))).1
        }
        29 => (headers.tcp()?.set_src_port(number), ("tcp_src", l4, vec![high, low])).1,
        30 => (headers.tcp()?.set_dst_port(number), ("tcp_dst", l4 + 2, vec![high, low])).1,
        31 => (headers.tcp()?.set_flags(low), ("tcp_flags", l4 + 13, vec![low])).1,
        32 => (headers.tcp()?.set_seq(address.to_bits()), ("seq", l4 + 4, address.octets().to_vec())).1,
        33 => (headers.tcp()?.set_ack(address.to_bits()), ("ack", l4 + 8, address.octets().to_vec())).1,
        34 => (headers.tcp()?.swap_ports(), ("swap_tcp", l4, swapped(l4, 2))).1,
        35 => (headers.icmpv4()?.set_kind(icmpv4::Type(low)), ("icmp_type", l4, vec![low])).1,
        36 => (headers.icmpv4()?.set_rest(address.to_bits()), ("icmp_rest", l4 + 4, address.octets().to_vec())).1,
        37 => (headers.icmpv6()?.set_code(low), ("icmpv6_code", l4 + 1, vec![low])).1,
        38 => (headers.icmpv6()?.set_kind(icmpv6::Type(low)), ("icmpv6_type", l4, vec![low])).1,
        _ => {
            let vni = Vni::from_low_bits(random.u32(..));
            let [_, a, b, c] = vni.get().to_be_bytes();
            headers.set_vni(vni).then(|| ("vni", layers.payload() + 4, vec![a, b, c]))?
        }
    })
}

#[test]
fn setters_keep_all_checksums_of_every_stack() {
    let mut changes = BTreeMap::new();
    for (i, spec) in stacks::all_specs(40).into_iter().enumerate() {
        for seed in 0..60 {
            let random = &mut Rng::with_seed(i as u64 * 1000 + seed);
            let mut bytes = stacks::frame(random, stacks::StackSpec { unfragmented: true, ..spec }).bytes;
            let first = parse(&bytes).unwrap();
            // Half of the UDP checksums are present.
            for layers in [Some(first.outer()), first.inner()].into_iter().flatten() {
                let hidden = layers.hidden_addresses(&bytes);
                if layers.l4_type() == L4Type::Udp && random.bool() && !hidden.src && !hidden.dst {
                    bytes[layers.l4() + 6] = 1;
                }
            }
            fill(&mut bytes, &first);
            for _ in 0..30 {
                let parsed = parse(&bytes).unwrap();
                let level = random.usize(..2);
                if parsed.stack(level).is_none_or(|layers| layers.hidden_addresses(&bytes) != Default::default()) {
                    continue;
                }
                let mut edited = bytes.clone();
                let headers =
                    if level == 0 { Some(parsed.outer_mut(&mut edited)) } else { parsed.inner_mut(&mut edited) };
                let Some((name, at, value)) = change(random, headers.unwrap(), &bytes) else { continue };
                let mut expected = bytes.clone();
                expected[at..at + value.len()].copy_from_slice(&value);
                fill(&mut expected, &parsed);
                assert_eq!(edited, expected, "{spec:?} seed {seed} level {level}: {name} at {at}\n{parsed:?}");
                *changes.entry((name, level, parsed.tunnel_of(0) as u8)).or_insert(0) += 1;
                // The parser reads the types of ICMP messages and the ports of tunnels.
                if parse(&edited).is_ok_and(|again| {
                    again.tunnel() == parsed.tunnel() && again.inner().is_some() == parsed.inner().is_some()
                }) {
                    bytes = edited;
                }
            }
        }
    }
    let names =
        |level| changes.keys().filter(|key| key.1 == level).map(|key| key.0).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(names(0).len(), 35, "{:?}", names(0));
    assert_eq!(names(1).len(), 35, "{:?}", names(1));
    for tunnel in [Tunnel::Vxlan, Tunnel::VxlanGpe, Tunnel::Geneve, Tunnel::Gre, Tunnel::Mpls, Tunnel::Ip] {
        let inside: i32 = changes.iter().filter(|(key, _)| key.1 == 1 && key.2 == tunnel as u8).map(|(_, n)| n).sum();
        assert!(inside > 100, "{tunnel:?}: {inside} changes inside");
    }
}

/// Returns an Ethernet frame with an IPv4 packet.
fn frame4(protocol: IpProtocol, fragment_word: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0xa5; 34];
    let link = ethernet::Repr { dst: [2; 6].into(), src: [4; 6].into(), ethertype: EtherType::IPV4 };
    link.emit(&mut frame).unwrap();
    let (src, dst) = ([192, 0, 2, 1].into(), [198, 51, 100, 2].into());
    let (payload_len, ttl, traffic_class) = (payload.len() as u16, 9, 0);
    let ip = ipv4::Repr { src, dst, protocol, payload_len, ttl, traffic_class, ident: 7, fragment_word };
    ip.emit(&mut frame[14..]).unwrap();
    frame.extend(payload);
    frame
}

/// Returns the sum of the IPv4 pseudo header as it stands in `frame`.
fn pseudo_of(frame: &[u8], protocol: IpProtocol, len: usize) -> wirepath_wire::Sum {
    let ip = parse(frame).unwrap().outer().ipv4(frame).map(|ip| (ip.src(), ip.dst())).unwrap();
    pseudo4(ip.0, ip.1, protocol, len as u16)
}

#[test]
fn protocols_that_are_not_parsed_keep_their_checksum() {
    for (protocol, transport) in [(IpProtocol::UDP_LITE, Transport::Udp), (IpProtocol::DCCP, Transport::Tcp)] {
        for number in 0..100_000u32 {
            // The checksum of both lies at offset 6. It is computed here as the last word of the segment.
            let mut segment = [&number.to_be_bytes()[..], &[0, 8, 0, 0]].concat();
            let total = pseudo4([192, 0, 2, 1].into(), [198, 51, 100, 2].into(), protocol, 8).and(sum(&segment));
            segment[6..].copy_from_slice(&transport.encode(total).to_be_bytes());
            let mut frame = frame4(protocol, 0, &segment);
            let parsed = parse(&frame).unwrap();
            parsed.outer_mut(&mut frame).ipv4().unwrap().set_dst((number.wrapping_mul(0x9e37_79b9)).into());
            assert!(pseudo_of(&frame, protocol, 8).and(sum(&frame[34..])).is_valid(), "{protocol} {number}");
            assert!(protocol == IpProtocol::DCCP || frame[40..42] != [0, 0], "RFC 3828 section 3.1");
        }
    }
}

#[test]
fn icmp_messages_of_zeros_have_a_checksum() {
    // An echo request with identifier and number zero becomes a reply, whose type is zero too.
    let mut message = [8, 0, 0, 0, 0, 0, 0, 0];
    let checksum = sum(&message).checksum();
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let mut frame = frame4(IpProtocol::ICMPV4, 0, &message);
    let parsed = parse(&frame).unwrap();
    parsed.outer_mut(&mut frame).icmpv4().unwrap().set_kind(icmpv4::Type::ECHO_REPLY);
    assert_eq!(frame[34], 0);
    assert!(sum(&frame[34..]).is_valid(), "{:02x?}", &frame[34..]);
}

#[test]
fn all_fragments_of_a_packet_may_get_new_addresses() {
    let mut datagram = [&[0x12, 0x34, 0, 53, 0, 32, 0, 0][..], &[0x5a; 24]].concat();
    Transport::Udp.fill(&mut datagram, pseudo4([192, 0, 2, 1].into(), [198, 51, 100, 2].into(), IpProtocol::UDP, 32));
    let mut joined = Vec::new();
    for (word, part) in [(ipv4::MORE_FRAGMENTS, &datagram[..16]), (2, &datagram[16..])] {
        let mut frame = frame4(IpProtocol::UDP, word, part);
        let parsed = parse(&frame).unwrap();
        let mut headers = parsed.outer_mut(&mut frame);
        headers.ipv4().unwrap().set_src([203, 0, 113, 200].into());
        assert_eq!(headers.udp().is_some(), word == ipv4::MORE_FRAGMENTS);
        assert!(parse(&frame).unwrap().outer().ipv4(&frame).unwrap().checksum_is_valid());
        joined.extend(&frame[34..]);
    }
    let pseudo = pseudo4([203, 0, 113, 200].into(), [198, 51, 100, 2].into(), IpProtocol::UDP, 32);
    assert_eq!(Transport::Udp.state(&joined, pseudo), State::Good);
}

#[test]
fn addresses_outside_of_the_pseudo_header() {
    let (src, dst, last) = ("fd00::1", "fd00::2", "fd00:7::9");
    let [src, dst, last]: [Ipv6Addr; 3] = [src, dst, last].map(|text| text.parse().unwrap());
    let mut segment = [0xa5; 20];
    segment[12] = 0x50;
    Transport::Tcp.fill(&mut segment, pseudo6(src, last, IpProtocol::TCP, 20));
    // A routing header of type 2 with one segment left (RFC 6275 section 6.4).
    let routing = [&[6, 2, 2, 1, 0, 0, 0, 0][..], &last.octets()].concat();
    let mut frame = vec![0; 54];
    let link = ethernet::Repr { dst: [2; 6].into(), src: [4; 6].into(), ethertype: EtherType::IPV6 };
    link.emit(&mut frame).unwrap();
    let (next_header, payload_len) = (IpProtocol::ROUTING, 44);
    let ip = ipv6::Repr { src, dst, next_header, payload_len, hop_limit: 9, traffic_class: 0, flow_label: 0 };
    ip.emit(&mut frame[14..]).unwrap();
    frame.extend(routing);
    frame.extend(segment);
    let parsed = parse(&frame).unwrap();
    let valid =
        |frame: &[u8], src| Transport::Tcp.state(&frame[78..], pseudo6(src, last, IpProtocol::TCP, 20)) == State::Good;
    let new: Ipv6Addr = "2001:db8::5".parse().unwrap();
    let mut headers = parsed.outer_mut(&mut frame);
    headers.ipv6().unwrap().set_dst(new);
    assert!(valid(&frame, src), "the routing header has the destination of the pseudo header");
    parsed.outer_mut(&mut frame).ip().unwrap().swap_addresses();
    assert!(valid(&frame, new), "the destination of the pseudo header did not change");
}

#[test]
fn fields_that_a_device_completes_keep_the_pseudo_sum() {
    let random = &mut Rng::with_seed(7);
    let mut stacks_seen = 0;
    for (i, spec) in stacks::all_specs(160).into_iter().enumerate() {
        let mut bytes = stacks::frame(random, stacks::StackSpec { unfragmented: true, ..spec }).bytes;
        let parsed = parse(&bytes).unwrap();
        let level = usize::from(parsed.inner().is_some());
        let layers = parsed.innermost();
        if layers.hidden_addresses(&bytes) != Default::default() {
            continue;
        }
        let Some(span) = ChecksumSpan::of(&bytes, layers) else { continue };
        // What a device makes of the changed frame is what it makes of the frame before, then changed.
        let outer_udp = level == 1 && parsed.outer().l4_type() == L4Type::Udp;
        if outer_udp {
            bytes[parsed.outer().l4() + 6] = 1;
        }
        bytes[span.start + span.transport.checksum_offset()] = 1;
        fill(&mut bytes, &parsed);
        let before = bytes.clone();
        let mut pending = bytes.clone();
        span.transport.set_field(&mut pending[span.start..], span.pseudo.fold());
        let flags = PendingChecksums { outer: level == 0, inner: level == 1 };
        let edit = |mut headers: HeadersMut<'_>| {
            match headers.layers().l3_type() {
                L3Type::Ipv4 => headers.ipv4().unwrap().set_src([203, 0, 113, 77].into()),
                _ => headers.ipv6().unwrap().set_src("2001:db8::77".parse().unwrap()),
            }
            if let Some(mut udp) = headers.udp() {
                udp.set_src_port(999);
            }
            if let Some(mut tcp) = headers.tcp() {
                tcp.set_src_port(999);
            }
        };
        if level == 0 {
            edit(parsed.outer_mut_with(&mut pending, flags));
            edit(parsed.outer_mut(&mut bytes));
        } else {
            edit(parsed.inner_mut_with(&mut pending, flags).unwrap());
            edit(parsed.inner_mut(&mut bytes).unwrap());
        }
        if outer_udp {
            // If a device computes the outer checksum too, a change of the inner headers does not matter to it.
            let (mut both, at) = (before.clone(), parsed.outer().l4() + 6);
            edit(parsed.inner_mut_with(&mut both, PendingChecksums { outer: true, inner: true }).unwrap());
            assert_eq!(both[at..at + 2], before[at..at + 2]);
        }
        let span = ChecksumSpan::of(&pending, layers).unwrap();
        assert_eq!(span.transport.field(&pending[span.start..]), Some(span.pseudo.fold()), "{i}");
        // The outer checksum is that of the complete frame.
        assert!(span.transport.complete(&mut pending[span.start..span.end]));
        assert_eq!(pending, bytes, "{i}: {parsed:?}");
        stacks_seen += 1;
    }
    assert!(stacks_seen > 60, "{stacks_seen}");
}

#[test]
fn results_of_other_frames_give_no_header_and_never_panic() {
    let random = &mut Rng::with_seed(3);
    let specs = stacks::all_specs(40);
    let (mut absent, mut present) = (0, 0);
    for _ in 0..4000 {
        let spec = *random.choice(&specs).unwrap();
        let parsed = parse(&stacks::frame(random, spec).bytes).unwrap();
        let len = random.usize(..160);
        let mut other: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(len).collect();
        let copy = other.clone();
        for level in 0..2 {
            let headers = match level {
                0 => Some(parsed.outer_mut(&mut other)),
                _ => parsed.inner_mut(&mut other),
            };
            let Some(headers) = headers else { continue };
            // Plain bytes are read only to know the new value.
            let padded = [&copy[..], &[0; 400]].concat();
            match change(random, headers, &padded) {
                Some(_) => present += 1,
                None => absent += 1,
            }
        }
        let beyond = parsed.outer().l2() + 14 > len;
        assert_eq!(parsed.outer_mut(&mut other).ethernet().is_none(), beyond);
        assert!(parsed.outer_mut(&mut []).ethernet().is_none());
    }
    assert!(absent > 1000 && present > 100, "{absent} {present}");
    // A result without headers.
    let mut bytes = [0; 64];
    let parsed = Parsed::default();
    let mut headers = parsed.outer_mut(&mut bytes);
    assert!(headers.ip().is_none() && headers.udp().is_none() && headers.vlan(0).is_none() && headers.arp().is_none());
    assert!(!headers.set_vni(Vni::from_low_bits(7)));
}
