//! Floods of packets for the gateway itself: tunnels with known next hops lose nothing.

use std::net::{Ipv4Addr, Ipv6Addr};

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::neighbour::NeighbourState;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, Prefix, UnderlayHost};
use wirepath_wire::{EtherType, IpProtocol, MacAddr, ethernet, icmpv4, icmpv6, ipv4, ipv6, parse, udp};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, US, WAN, frame, vxlan};

const STRANGER: MacAddr = MacAddr([2, 5, 5, 5, 5, 5]);
const FAR6: MacAddr = MacAddr([2, 0, 0, 0, 6, 1]);
const MILLISECOND: u64 = 1_000_000;
/// Frames of a flood in one millisecond.
const PER_MILLISECOND: u32 = 100;

fn ethernet_to_us(ethertype: EtherType, len: usize) -> Vec<u8> {
    let mut out = vec![0; 14 + len];
    ethernet::Repr { dst: US, src: STRANGER, ethertype }.emit(&mut out).unwrap();
    out
}

fn over_ipv4(src: Ipv4Addr, protocol: IpProtocol, payload: &[u8]) -> Vec<u8> {
    let mut out = ethernet_to_us(EtherType::IPV4, 20 + payload.len());
    let ip = ipv4::Repr {
        src,
        dst: [10, 9, 0, 1].into(),
        protocol,
        payload_len: payload.len() as u16,
        ttl: 9,
        traffic_class: 0,
        ident: 7,
        fragment_word: 0,
    };
    ip.emit(&mut out[14..]).unwrap();
    out[34..].copy_from_slice(payload);
    out
}

fn icmp4(src: Ipv4Addr, kind: icmpv4::Type, len: usize) -> Vec<u8> {
    let mut message = vec![0x5a; len];
    icmpv4::Repr { kind, code: 0, rest: 0x0001_0002 }.emit(&mut message).unwrap();
    over_ipv4(src, IpProtocol::ICMPV4, &message)
}

fn icmp6(src: Ipv6Addr, kind: icmpv6::Type, len: usize) -> Vec<u8> {
    let dst: Ipv6Addr = "fd00:9::1".parse().unwrap();
    let mut message = vec![0x5a; len];
    icmpv6::Repr { kind, code: 0 }.emit(&mut message, src, dst).unwrap();
    let mut out = ethernet_to_us(EtherType::IPV6, 40 + message.len());
    let ip = ipv6::Repr {
        src,
        dst,
        next_header: IpProtocol::ICMPV6,
        payload_len: message.len() as u16,
        hop_limit: 9,
        traffic_class: 0,
        flow_label: 0,
    };
    ip.emit(&mut out[14..]).unwrap();
    out[54..].copy_from_slice(&message);
    out
}

fn datagram(src: Ipv4Addr) -> Vec<u8> {
    let mut payload = vec![0; 28];
    udp::Repr { src_port: 9, dst_port: 53, payload_len: 20 }.emit(&mut payload).unwrap();
    over_ipv4(src, IpProtocol::UDP, &payload)
}

fn syn(src: Ipv4Addr) -> Vec<u8> {
    let mut payload = vec![0; 20];
    payload[..4].copy_from_slice(&[0, 9, 0, 80]);
    payload[12..14].copy_from_slice(&[5 << 4, 2]);
    over_ipv4(src, IpProtocol::TCP, &payload)
}

/// A host that floods, in the network of the underlay or outside.
fn stranger(ip: impl std::fmt::Display, len: u8) -> Addresses {
    let prefix: Prefix = format!("{ip}/{len}").parse().unwrap();
    Addresses { mac: STRANGER, addresses: vec![prefix], gateways: vec![] }
}

/// Returns an unsolicited reply.
fn unasked_reply(from: &Addresses) -> Vec<u8> {
    let (asker, target) = match from.addresses[0].address {
        std::net::IpAddr::V4(_) => ("10.9.0.1/24", from.addresses[0].address),
        std::net::IpAddr::V6(_) => ("fd00:9::1/64", from.addresses[0].address),
    };
    let us = Addresses { mac: US, addresses: vec![asker.parse().unwrap()], gateways: vec![] };
    let solicitation = us.solicitation(target, None).unwrap();
    match UnderlayHost::new(from.clone()).handle(&solicitation, 0).reply {
        HostReply::Frame(reply) => reply,
        other => panic!("{other:?}"),
    }
}

/// Sends 100,000 frames per second while neighbours are probed. One frame per millisecond and direction goes
/// through two tunnels, over IPv4 and IPv6, and the peer asks for the gateway's addresses once a second.
fn tunnels_survive(make: impl Fn(u32) -> Vec<u8>) -> Lab {
    let mut lab = Lab::new("remotes = ['10.9.0.2', 'fd00:9::2']").with_peer();
    lab.settle();
    let mut peer6 = lab.peer.as_ref().unwrap().addresses().clone();
    let peer4 = peer6.clone();
    peer6.addresses.remove(0);
    let back = [vxlan(&peer4, &frame(HOST, FAR)), vxlan(&peer6, &frame(HOST, FAR6))];
    let out = [frame(FAR, HOST), frame(FAR6, HOST)];
    // The addresses of both ends are learned, and then the neighbour entries are about to be probed.
    for _ in 0..340 {
        lab.send(LAN, &out[0]);
        lab.send_all(WAN, back.iter().map(Vec::as_slice));
        lab.stepped.advance(SECOND / 10);
        lab.settle();
    }
    let mut random = fastrand::Rng::with_seed(1);
    let flood: Vec<Vec<u8>> = (0..20_000).map(|_| make(random.u32(..))).collect();
    let questions = [
        peer4.solicitation("10.9.0.1".parse().unwrap(), None).unwrap(),
        peer6.solicitation("fd00:9::1".parse().unwrap(), None).unwrap(),
    ];
    let (mut inward, mut outward, mut answers) = (0, 0, 0);
    // Replies of the peer come right after a part of the flood, when it has used up every shared limit.
    let mut peer = lab.peer.take().unwrap();
    let mut replies: Vec<Vec<u8>> = Vec::new();
    for millisecond in 0..8_000u32 {
        let at = (millisecond * PER_MILLISECOND) as usize % flood.len();
        lab.send_all(WAN, flood[at..at + PER_MILLISECOND as usize].iter().map(Vec::as_slice));
        lab.send_all(WAN, replies.iter().map(Vec::as_slice));
        replies.clear();
        if millisecond % 1000 == 500 {
            lab.send_all(WAN, questions.iter().map(Vec::as_slice));
        }
        lab.send_all(WAN, back.iter().map(Vec::as_slice));
        lab.send_all(LAN, out.iter().map(Vec::as_slice));
        lab.stepped.advance(MILLISECOND);
        for (port, bytes) in lab.settle() {
            if port == LAN {
                inward += u32::from(bytes[..6] == HOST.0);
            } else if bytes[12..14] == [8, 6] {
                answers += u32::from(bytes[..6] == PEER.0 && bytes[21] == 2);
            } else if bytes[20] == 58 {
                answers += u32::from(bytes[..6] == PEER.0 && bytes[54] == 136);
            } else if parse(&bytes).is_ok_and(|parsed| parsed.vni().is_some()) {
                outward += 1;
            }
            if let (WAN, HostReply::Frame(reply)) = (port, peer.handle(&bytes, 0).reply) {
                replies.push(reply);
            }
        }
    }
    assert_eq!((inward, outward), (16_000, 16_000), "{:?}", lab.stepped.drops());
    assert!(lab.control.neighbours().all(|(_, state, _)| state == NeighbourState::Reachable));
    assert_eq!(answers, 16, "answers to the peer");
    assert_eq!(lab.dropped(DropReason::QueueFull), 0);
    lab
}

#[test]
fn echo_requests_from_random_sources() {
    let lab = tunnels_survive(|n| icmp4(Ipv4Addr::from_bits(n), icmpv4::Type::ECHO_REQUEST, 56));
    assert!(lab.dropped(DropReason::RateLimited) > 500_000, "{:?}", lab.stepped.drops());
}

#[test]
fn echo_requests_over_ipv6() {
    let lab = tunnels_survive(|n| {
        let src = Ipv6Addr::from_bits((0xfd01 << 112) | (u128::from(n) + 1));
        icmp6(src, icmpv6::Type::ECHO_REQUEST, 56)
    });
    assert!(lab.dropped(DropReason::RateLimited) > 500_000, "{:?}", lab.stepped.drops());
}

#[test]
fn arp_requests_and_replies() {
    for reply in [false, true] {
        let lab = tunnels_survive(|n| {
            let from = stranger(Ipv4Addr::new(10, 9, (n >> 8) as u8, n as u8 | 4), 16);
            match reply {
                false => from.solicitation("10.9.0.1".parse().unwrap(), None).unwrap(),
                true => unasked_reply(&from),
            }
        });
        assert!(lab.stepped.punted() < 20_000, "{}", lab.stepped.punted());
    }
}

#[test]
fn solicitations_and_advertisements() {
    for reply in [false, true] {
        let lab = tunnels_survive(|n| {
            let from = stranger(Ipv6Addr::from_bits(0xfd00_0009 << 96 | u128::from(n) | 4), 64);
            match reply {
                false => from.solicitation("fd00:9::1".parse().unwrap(), None).unwrap(),
                true => unasked_reply(&from),
            }
        });
        assert!(lab.stepped.punted() < 20_000, "{}", lab.stepped.punted());
    }
}

#[test]
fn datagrams_connections_and_icmp_errors() {
    let not_for_us = DropReason::NotForUs;
    type Flood = (fn(u32) -> Vec<u8>, DropReason);
    let kinds: [Flood; 4] = [
        (|n| datagram(Ipv4Addr::from_bits(n)), not_for_us),
        (|n| syn(Ipv4Addr::from_bits(n)), not_for_us),
        (|n| icmp4(Ipv4Addr::from_bits(n), icmpv4::Type::DESTINATION_UNREACHABLE, 64), not_for_us),
        (
            |n| icmp6(Ipv6Addr::from_bits((0xfd01 << 112) | (u128::from(n) + 1)), icmpv6::Type::PACKET_TOO_BIG, 64),
            DropReason::BadIcmpQuote,
        ),
    ];
    for (make, reason) in kinds {
        let lab = tunnels_survive(make);
        assert_eq!(lab.dropped(reason), 800_000, "{:?}", lab.stepped.drops());
    }
}

#[test]
fn a_flood_to_other_hosts_is_not_punted() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
    lab.settle();
    let before = lab.stepped.punted();
    let mut other = icmp6("fd01::5".parse().unwrap(), icmpv6::Type::ECHO_REQUEST, 56);
    other[38..54].copy_from_slice(&"fd00:9::77".parse::<Ipv6Addr>().unwrap().octets());
    for _ in 0..100 {
        lab.send(WAN, &other);
    }
    assert_eq!((lab.stepped.punted() - before, lab.dropped(DropReason::NotForUs)), (0, 100));
}

/// Verifies an echo reply: addresses, TTL, content and checksums.
fn assert_replies(request: &[u8], reply: &[u8], tag: usize) {
    let without_tag = [&reply[..12], &reply[12 + tag..]].concat();
    assert_eq!((&reply[..6], &reply[6..12]), (&request[6..12], &request[..6]));
    let parsed = parse(&without_tag).unwrap();
    let outer = parsed.outer();
    if let Some(ip) = outer.ipv4(&without_tag) {
        assert_eq!((ip.src().octets(), ip.ttl()), ([10, 9, 0, 1], 64));
        assert_eq!(ip.dst().octets(), request[26..30]);
        assert!(ip.checksum_is_valid());
        let icmp = outer.icmpv4(&without_tag).unwrap();
        assert!(icmp.kind() == icmpv4::Type::ECHO_REPLY && icmp.checksum_is_valid());
        assert_eq!(without_tag[38..], request[38..]);
    } else {
        let ip = outer.ipv6(&without_tag).unwrap();
        assert_eq!((ip.src(), ip.hop_limit()), ("fd00:9::1".parse().unwrap(), 64));
        assert_eq!(ip.dst().octets(), request[22..38]);
        let icmp = outer.icmpv6(&without_tag).unwrap();
        assert!(icmp.kind() == icmpv6::Type::ECHO_REPLY && icmp.checksum_is_valid(ip.src(), ip.dst()));
        assert_eq!(without_tag[58..], request[58..]);
    }
}

#[test]
fn workers_answer_echo_requests() {
    // The longest request lies in several buffers.
    for len in [8, 56, 1400, 8000] {
        let requests = [
            icmp4([10, 9, 0, 2].into(), icmpv4::Type::ECHO_REQUEST, len),
            icmp6("fd00:9::2".parse().unwrap(), icmpv6::Type::ECHO_REQUEST, len),
        ];
        for request in requests {
            let mut lab = Lab::new("remotes = ['10.9.0.2']");
            lab.settle();
            let punted = lab.stepped.punted();
            lab.send(WAN, &request);
            let sent = lab.settle();
            assert_eq!((sent.len(), lab.stepped.punted()), (1, punted), "{:?}", lab.stepped.drops());
            assert_replies(&request, &sent[0].1, 0);
            // A request with a wrong checksum is not answered.
            let mut wrong = request.clone();
            *wrong.last_mut().unwrap() ^= 1;
            lab.send(WAN, &wrong);
            assert_eq!((lab.settle().len(), lab.dropped(DropReason::NotForUs)), (0, 1));
        }
    }
    let mut lab = Lab::of("vlan = 9", "remotes = ['10.9.0.2']");
    lab.settle();
    let request = icmp4([10, 9, 0, 2].into(), icmpv4::Type::ECHO_REQUEST, 56);
    let tagged = [&request[..12], &[0x81, 0, 0, 9], &request[12..]].concat();
    lab.send(WAN, &tagged);
    let sent = lab.settle();
    assert_eq!((sent.len(), &sent[0].1[12..16]), (1, &[0x81, 0, 0, 9][..]));
    assert_replies(&request, &sent[0].1, 4);
}
