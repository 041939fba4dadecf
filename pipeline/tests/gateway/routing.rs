//! Routing between segments, step by step: lookups, neighbours, ICMP errors, several VRFs and next hops.

use std::collections::HashMap;
use std::net::IpAddr;

use serde_json::Value;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::registry::{Filter, Listing, Registry};
use wirepath_pipeline::route::NetworkPrefix;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{ExternalChanges, ExternalPlace, GatewayConfig};
use wirepath_settings::Source;
use wirepath_wire::build::{OuterChecksum, OuterHeaders, VxlanConfig};
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::{
    EtherType, IpProtocol, L4Type, MacAddr, Vni, checksum, ethernet, icmpv4, icmpv6, ipv4, ipv6, parse, udp,
};

use crate::lab::{LAN, Lab, PEER, SECOND, US, WAN, vxlan};

const LAN2: PortId = PortId::new(2);
const A: MacAddr = MacAddr([2, 0, 0, 0, 1, 1]);
const B: MacAddr = MacAddr([2, 0, 0, 0, 1, 2]);
const FAR_ROUTER: MacAddr = MacAddr([2, 0, 0, 0, 9, 9]);

const UNDERLAY: &str = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n";
/// Two segments with a router, each with one port.
const TWO: &str = "[[segment]]\nname = 'one'\nvni = 1\nports = [{ port = 'lan' }]\n\
    addresses = ['10.1.0.1/24', 'fd01::1/64']\n\
    [[segment]]\nname = 'two'\nvni = 2\nports = [{ port = 'lan2' }]\naddresses = ['10.2.0.1/24', 'fd02::1/64']\n";

fn lab(text: &str) -> Lab {
    Lab::with_ports(&format!("{UNDERLAY}{text}"), &["wan", "lan", "lan2"])
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns a frame with a UDP datagram of `len` bytes.
pub(crate) fn datagram(dst_mac: MacAddr, src_mac: MacAddr, src: &str, dst: &str, ttl: u8, len: usize) -> Vec<u8> {
    packet(dst_mac, src_mac, src, dst, ttl, IpProtocol::UDP, &{
        let mut body = vec![0x5a; 8 + len];
        udp::Repr { src_port: 4000, dst_port: 33434, payload_len: len as u16 }.emit(&mut body).unwrap();
        body
    })
}

pub(crate) fn packet(
    dst_mac: MacAddr,
    src_mac: MacAddr,
    src: &str,
    dst: &str,
    ttl: u8,
    protocol: IpProtocol,
    body: &[u8],
) -> Vec<u8> {
    let v6 = dst.contains(':');
    let at = 14 + if v6 { 40 } else { 20 };
    let mut frame = vec![0; at + body.len()];
    let ethertype = if v6 { EtherType::IPV6 } else { EtherType::IPV4 };
    ethernet::Repr { dst: dst_mac, src: src_mac, ethertype }.emit(&mut frame).unwrap();
    frame[at..].copy_from_slice(body);
    let payload_len = body.len() as u16;
    match (ip(src), ip(dst)) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let repr = ipv4::Repr {
                src,
                dst,
                protocol,
                payload_len,
                ttl,
                traffic_class: 0,
                ident: 7,
                fragment_word: ipv4::DONT_FRAGMENT,
            };
            repr.emit(&mut frame[14..]).unwrap();
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let repr = ipv6::Repr {
                src,
                dst,
                next_header: protocol,
                payload_len,
                hop_limit: ttl,
                traffic_class: 0,
                flow_label: 0,
            };
            repr.emit(&mut frame[14..]).unwrap();
            if protocol == IpProtocol::ICMPV6 {
                checksum::icmpv6(src, dst, &mut frame[at..]);
            } else if protocol == IpProtocol::UDP {
                checksum::udp6(src, dst, &mut frame[at..]);
            }
        }
        _ => panic!("one version"),
    }
    frame
}

/// Hosts on the local ports. They answer ARP and ND.
struct Hosts(HashMap<PortId, UnderlayHost>);

impl Hosts {
    fn two() -> Self {
        let host = |mac, v4: &str, v6: &str| {
            let addresses = vec![v4.parse().unwrap(), v6.parse().unwrap()];
            UnderlayHost::new(Addresses { mac, addresses, gateways: vec![] })
        };
        Self(HashMap::from([
            (LAN, host(A, "10.1.0.10/24", "fd01::10/64")),
            (LAN2, host(B, "10.2.0.10/24", "fd02::10/64")),
        ]))
    }

    /// Runs the control thread and answers ARP and ND. Returns all other frames.
    fn settle(&mut self, lab: &mut Lab) -> Vec<(PortId, Vec<u8>)> {
        let mut sent = Vec::new();
        for _ in 0..8 {
            for (port, bytes) in lab.settle() {
                match self.0.get_mut(&port).map(|host| host.handle(&bytes, 0)) {
                    Some(outcome) if outcome.nd_event.is_some() || outcome.conflict.is_some() => {
                        if let HostReply::Frame(reply) = outcome.reply {
                            lab.send(port, &reply);
                        }
                    }
                    _ => sent.push((port, bytes)),
                }
            }
        }
        lab.assert_balanced();
        // ARP and ND of the router for others.
        sent.retain(|(_, bytes)| {
            let icmp = parse(bytes).ok().filter(|it| it.outer().l4_type() == L4Type::Icmpv6);
            let kind = icmp.and_then(|it| bytes.get(it.outer().l4()).copied());
            bytes[12..14] != [8, 6] && !matches!(kind, Some(135 | 136))
        });
        sent
    }
}

/// Type and code of an ICMP message, and its source.
fn icmp(frame: &[u8]) -> (u8, u8, IpAddr) {
    let parsed = parse(frame).unwrap();
    let layers = parsed.outer();
    let src = match (layers.ipv4(frame), layers.ipv6(frame)) {
        (Some(v4), _) => IpAddr::V4(v4.src()),
        (_, Some(v6)) => IpAddr::V6(v6.src()),
        _ => panic!("no IP"),
    };
    if let Some(message) = layers.icmpv4(frame) {
        assert!(message.checksum_is_valid());
    } else {
        assert!(ChecksumSpan::of(frame, layers).is_some());
    }
    (frame[layers.l4()], frame[layers.l4() + 1], src)
}

#[test]
fn hosts_of_two_segments_reach_each_other() {
    let (mut lab, mut hosts) = (lab(TWO), Hosts::two());
    hosts.settle(&mut lab);
    for (from, mac, to, to_mac, src, dst) in [
        (LAN, A, LAN2, B, "10.1.0.10", "10.2.0.10"),
        (LAN2, B, LAN, A, "10.2.0.10", "10.1.0.10"),
        (LAN, A, LAN2, B, "fd01::10", "fd02::10"),
        (LAN2, B, LAN, A, "fd02::10", "fd01::10"),
    ] {
        // The first packet waits for its neighbour, the others have a host route.
        for _ in 0..3 {
            lab.send(from, &datagram(US, mac, src, dst, 64, 100));
            let sent = hosts.settle(&mut lab);
            assert_eq!(sent, [(to, datagram(to_mac, US, src, dst, 63, 100))], "{src} {:?}", lab.stepped.drops());
        }
    }
    assert_eq!(lab.stepped.drops().values().sum::<u64>(), 0, "{:?}", lab.stepped.drops());
    let stats = lab.control.segment_stats(0);
    assert_eq!((stats.routed_in.0, stats.routed_out.0), (8, 6));
}

#[test]
fn the_router_answers_its_hosts() {
    let (mut lab, mut hosts) = (lab(TWO), Hosts::two());
    hosts.settle(&mut lab);
    for router in ["10.1.0.1", "fd01::1"] {
        // ARP and ND: the router's address is that of the underlay port.
        let host = hosts.0.get_mut(&LAN).unwrap();
        let request = host.addresses().solicitation(ip(router), None).unwrap();
        lab.send(LAN, &request);
        let replies = lab.settle();
        let outcome = host.handle(&replies[0].1, 0);
        assert_eq!((replies.len(), replies[0].0), (1, LAN));
        assert_eq!(outcome.nd_event.map(|(ip, mac, _)| (ip, mac)), Some((ip(router), Some(US))));
    }
    // Echo, also to the router's address in another segment.
    for (src, router) in [("10.1.0.10", "10.1.0.1"), ("10.1.0.10", "10.2.0.1"), ("fd01::10", "fd02::1")] {
        let v6 = router.contains(':');
        let mut body = vec![if v6 { 128 } else { 8 }, 0, 0, 0, 1, 2, 3, 4, 9, 9];
        if !v6 {
            icmpv4::Repr { kind: icmpv4::Type::ECHO_REQUEST, code: 0, rest: 0x0102_0304 }.emit(&mut body).unwrap();
        }
        let protocol = if v6 { IpProtocol::ICMPV6 } else { IpProtocol::ICMPV4 };
        lab.send(LAN, &packet(US, A, src, router, 1, protocol, &body));
        let sent = hosts.settle(&mut lab);
        assert_eq!((sent.len(), sent[0].0, &sent[0].1[..6]), (1, LAN, &A.0[..]), "{:?}", lab.stepped.drops());
        let reply = if v6 { icmpv6::Type::ECHO_REPLY.0 } else { icmpv4::Type::ECHO_REPLY.0 };
        assert_eq!(icmp(&sent[0].1), (reply, 0, ip(router)));
    }
}

#[test]
fn icmp_errors_go_to_the_sender() {
    let text = format!(
        "{TWO}[[vrf]]\nname = 'default'\nroutes = [{{ to = '10.7.0.0/16', discard = 'prohibit' }}, \
         {{ to = '10.8.0.0/16', discard = 'blackhole' }}, {{ to = '10.6.0.0/16', discard = 'unreachable' }}, \
         {{ to = 'fd08::/16', discard = 'blackhole' }}, {{ to = 'fd07::/16', discard = 'prohibit' }}]\n"
    );
    let (mut lab, mut hosts) = (lab(&text), Hosts::two());
    hosts.settle(&mut lab);
    let cases = [
        ("10.2.0.10", 1, Some((11, 0)), DropReason::HopLimit),
        ("10.2.0.10", 0, Some((11, 0)), DropReason::HopLimit),
        ("10.5.0.1", 64, Some((3, 0)), DropReason::NoRoute),
        ("10.6.0.1", 64, Some((3, 0)), DropReason::NoRoute),
        ("10.7.0.1", 64, Some((3, 13)), DropReason::Prohibited),
        ("10.8.0.1", 64, None, DropReason::Blackhole),
        ("10.2.0.1", 64, Some((3, 3)), DropReason::NotForUs),
        ("10.2.0.255", 64, None, DropReason::NotRoutable),
        ("10.2.0.0", 64, None, DropReason::NotRoutable),
        ("224.0.0.5", 64, None, DropReason::NotRoutable),
        ("127.0.0.1", 64, None, DropReason::NotRoutable),
        ("fd02::10", 1, Some((3, 0)), DropReason::HopLimit),
        ("fd05::1", 64, Some((1, 0)), DropReason::NoRoute),
        ("fd07::1", 64, Some((1, 1)), DropReason::Prohibited),
        ("fd08::1", 64, None, DropReason::Blackhole),
        ("fd02::1", 64, Some((1, 4)), DropReason::NotForUs),
        ("fe80::1", 64, None, DropReason::NotRoutable),
        ("ff0e::1", 64, None, DropReason::NotRoutable),
    ];
    for (dst, ttl, expected, reason) in cases {
        let v6 = dst.contains(':');
        let src = if v6 { "fd01::10" } else { "10.1.0.10" };
        let before = lab.dropped(reason);
        lab.send(LAN, &datagram(US, A, src, dst, ttl, 20));
        lab.stepped.advance(SECOND);
        let sent = hosts.settle(&mut lab);
        assert_eq!(lab.dropped(reason), before + 1, "{dst}: {:?}", lab.stepped.drops());
        let router = ip(if v6 { "fd01::1" } else { "10.1.0.1" });
        match expected {
            Some((kind, code)) => {
                assert_eq!((sent.len(), sent[0].0, &sent[0].1[..6]), (1, LAN, &A.0[..]), "{dst}");
                assert_eq!(icmp(&sent[0].1), (kind, code, router), "{dst}");
            }
            None => assert_eq!(sent, [], "{dst}"),
        }
    }
    // No error about an error.
    let mut error = vec![3, 3, 0, 0, 0, 0, 0, 0];
    icmpv4::Repr { kind: icmpv4::Type::DESTINATION_UNREACHABLE, code: 3, rest: 0 }.emit(&mut error).unwrap();
    lab.send(LAN, &packet(US, A, "10.1.0.10", "10.5.0.1", 64, IpProtocol::ICMPV4, &error));
    assert_eq!(hosts.settle(&mut lab), []);
    assert_eq!(lab.control.segment_stats(0).icmp_errors, 10);
}

#[test]
fn too_long_packets_cause_errors() {
    let text = TWO.replace("[[segment]]\nname = 'two'", "[[segment]]\nmtu = 1300\nname = 'two'");
    let (mut lab, mut hosts) = (lab(&text), Hosts::two());
    hosts.settle(&mut lab);
    for (src, dst, header, kind) in [("10.1.0.10", "10.2.0.10", 28, (3, 4)), ("fd01::10", "fd02::10", 48, (2, 0))] {
        for (len, fits) in [(1300 - header, true), (1301 - header, false)] {
            lab.send(LAN, &datagram(US, A, src, dst, 64, len));
            let sent = hosts.settle(&mut lab);
            assert_eq!((sent.len(), sent[0].0), (1, if fits { LAN2 } else { LAN }), "{src} {len}");
            if !fits {
                let (found, code, _) = icmp(&sent[0].1);
                let l4 = parse(&sent[0].1).unwrap().outer().l4();
                let mtu = u32::from_be_bytes(*sent[0].1[l4 + 4..].first_chunk().unwrap());
                assert_eq!(((found, code), mtu), (kind, 1300));
            }
        }
    }
    assert_eq!(lab.dropped(DropReason::TooBigForMtu), 2);
}

#[test]
fn long_packets_without_df_are_fragmented() {
    let text = TWO.replace("[[segment]]\nname = 'two'", "[[segment]]\nmtu = 576\nname = 'two'");
    let (mut lab, mut hosts) = (lab(&text), Hosts::two());
    hosts.settle(&mut lab);
    for (round, len) in [400, 600, 1400].into_iter().enumerate() {
        let mut frame = datagram(US, A, "10.1.0.10", "10.2.0.10", 64, len);
        frame[20..22].fill(0);
        frame[24..26].fill(0);
        let sum = checksum::sum(&frame[14..34]).checksum();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        lab.send(LAN, &frame);
        let sent = hosts.settle(&mut lab);
        // 552 bytes of payload are the largest multiple of 8 beside the header.
        assert_eq!(sent.len(), (len + 8).div_ceil(552), "{len} {:?}", lab.stepped.drops());
        let mut joined: Vec<u8> = Vec::new();
        for (port, bytes) in &sent {
            assert_eq!((*port, &bytes[..12]), (LAN2, &[&B.0[..], &US.0].concat()[..]));
            assert!(checksum::sum(&bytes[14..34]).is_valid());
            assert_eq!((bytes[22], &bytes[18..20]), (63, &frame[18..20]));
            assert_eq!(usize::from(u16::from_be_bytes([bytes[20], bytes[21]]) & 0x1fff) * 8, joined.len());
            joined.extend(&bytes[34..]);
        }
        assert_eq!(joined, frame[34..]);
        assert_eq!(lab.control.segment_stats(1).routed_out.0, [1, 3, 6][round]);
    }
    assert!(lab.stepped.drops().is_empty(), "{:?}", lab.stepped.drops());
}

#[test]
fn a_neighbour_that_does_not_answer_is_unreachable() {
    let (mut lab, mut hosts) = (lab(TWO), Hosts::two());
    hosts.settle(&mut lab);
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.2.0.77", 64, 10));
    assert_eq!(hosts.settle(&mut lab), []);
    assert_eq!(lab.control.waiting_frames(), 1);
    let mut errors = Vec::new();
    for _ in 0..50 {
        lab.stepped.advance(SECOND / 10);
        errors.extend(hosts.settle(&mut lab));
    }
    assert_eq!((errors.len(), errors[0].0), (1, LAN), "{:?}", lab.stepped.drops());
    assert_eq!(icmp(&errors[0].1), (3, 1, ip("10.1.0.1")));
    // Another packet gets the error at once.
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.2.0.77", 64, 10));
    assert_eq!(icmp(&hosts.settle(&mut lab)[0].1), (3, 1, ip("10.1.0.1")));
    assert_eq!(lab.dropped(DropReason::NoNeighbour), 2);
    let routes = lab.control.routes();
    for _ in 0..200 {
        lab.stepped.advance(SECOND / 10);
        hosts.settle(&mut lab);
    }
    assert_eq!(lab.control.routes(), routes - 1, "the neighbour is forgotten");
    assert_eq!(lab.control.waiting_frames(), 0);
}

#[test]
fn a_moved_neighbour_is_found() {
    let (mut lab, mut hosts) = (lab(TWO), Hosts::two());
    hosts.settle(&mut lab);
    let request = || datagram(US, A, "10.1.0.10", "10.2.0.10", 64, 10);
    lab.send(LAN, &request());
    assert_eq!(hosts.settle(&mut lab)[0].1[..6], B.0);
    // Another host takes over the address and announces it.
    let other = MacAddr([2, 0, 0, 0, 1, 7]);
    hosts.0.get_mut(&LAN2).unwrap().set_mac(other);
    lab.stepped.advance(2 * SECOND);
    let announcement = hosts.0[&LAN2].addresses().announcement(ip("10.2.0.10"));
    lab.send(LAN2, &announcement);
    hosts.settle(&mut lab);
    lab.send(LAN, &request());
    assert_eq!(hosts.settle(&mut lab)[0].1[..6], other.0);
}

#[test]
fn vrfs_are_separate_until_a_route_joins_them() {
    let segment = |name: &str, vni: u32, port: &str| {
        format!(
            "[[segment]]\nname = '{name}'\nvni = {vni}\nports = [{{ port = '{port}' }}]\nvrf = '{name}'\n\
             addresses = ['10.{vni}.0.1/24']\n"
        )
    };
    let segments = segment("red", 1, "lan") + &segment("blue", 2, "lan2");
    let vrfs = "[[vrf]]\nname = 'red'\n[[vrf]]\nname = 'blue'\n";
    let (mut separate, mut hosts) = (lab(&format!("{segments}{vrfs}")), Hosts::two());
    hosts.settle(&mut separate);
    let request = datagram(US, A, "10.1.0.10", "10.2.0.10", 64, 10);
    separate.send(LAN, &request);
    assert_eq!(icmp(&hosts.settle(&mut separate)[0].1), (3, 0, ip("10.1.0.1")));
    let joined = "[[vrf]]\nname = 'red'\nroutes = [{ to = '10.2.0.0/16', lookup = 'blue' }]\n\
        [[vrf]]\nname = 'blue'\nroutes = [{ to = '10.3.0.0/16', lookup = 'red' }]\n\
        [[vrf]]\nname = 'loop'\nroutes = [{ to = '0.0.0.0/0', lookup = 'red' }]\n";
    let (mut joined, mut hosts) = (lab(&format!("{segments}{joined}")), Hosts::two());
    hosts.settle(&mut joined);
    joined.send(LAN, &request);
    assert_eq!(hosts.settle(&mut joined), [(LAN2, datagram(B, US, "10.1.0.10", "10.2.0.10", 63, 10))]);
    // Addresses of the router in the other VRF answer too.
    joined.send(LAN, &datagram(US, A, "10.1.0.10", "10.2.0.1", 64, 10));
    assert_eq!(icmp(&hosts.settle(&mut joined)[0].1), (3, 3, ip("10.1.0.1")));
}

#[test]
fn vrfs_that_refer_to_each_other_drop() {
    let text = format!(
        "{TWO}[[vrf]]\nname = 'default'\nroutes = [{{ to = '10.4.0.0/16', lookup = 'b' }}]\n\
         [[vrf]]\nname = 'b'\nroutes = [{{ to = '10.4.0.0/16', lookup = 'default' }}]\n"
    );
    let (mut lab, mut hosts) = (lab(&text), Hosts::two());
    hosts.settle(&mut lab);
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.4.0.1", 64, 10));
    assert_eq!(icmp(&hosts.settle(&mut lab)[0].1), (3, 0, ip("10.1.0.1")));
}

#[test]
fn sources_are_checked() {
    for (check, spoofed, unknown) in [("off", true, true), ("loose", true, false), ("strict", false, false)] {
        let text = format!("{TWO}[[vrf]]\nname = 'default'\nsource_check = '{check}'\n");
        let (mut lab, mut hosts) = (lab(&text), Hosts::two());
        hosts.settle(&mut lab);
        for (src, passes) in [("10.1.0.10", true), ("10.2.0.99", spoofed), ("10.77.0.1", unknown)] {
            lab.send(LAN, &datagram(US, A, src, "10.2.0.10", 64, 10));
            assert_eq!(hosts.settle(&mut lab).len(), usize::from(passes), "{check} {src}");
        }
        let dropped = 2 - u64::from(spoofed) - u64::from(unknown);
        assert_eq!(lab.dropped(DropReason::SourceCheck), dropped);
    }
}

/// Returns a VXLAN packet of the peer with this VNI.
pub(crate) fn tunnelled(vni: u32, inner: &[u8]) -> Vec<u8> {
    let encap = OuterHeaders::vxlan(&VxlanConfig {
        src_mac: PEER,
        dst_mac: US,
        tags: &[],
        src: ip("10.9.0.2"),
        dst: ip("10.9.0.1"),
        dst_port: 4789,
        vni: Vni::new(vni).unwrap(),
        ttl: 64,
        traffic_class: 0,
        flow_label: 0,
        checksum: OuterChecksum::Standard,
    })
    .unwrap();
    let mut out = vec![0; encap.len()];
    encap.emit(&mut out, &encap.fields(inner.len(), 50_000)).unwrap();
    out.extend_from_slice(inner);
    out
}

#[test]
fn symmetric_irb() {
    // RFC 9135: the VNI 900 carries packets between the routers.
    let text = format!(
        "{TWO}[[segment]]\nname = 'transit'\nvni = 900\nvrf = 'default'\nremotes = ['10.9.0.2']\n\
         [[vrf]]\nname = 'default'\nroutes = [{{ to = '10.3.0.0/16', next_hops = [{{ segment = 'transit', \
         remote = '10.9.0.2', mac = '{FAR_ROUTER}' }}] }}]\n"
    );
    let (mut lab, mut hosts) = (lab(&text).with_peer(), Hosts::two());
    hosts.settle(&mut lab);
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.3.0.5", 64, 50));
    let sent = hosts.settle(&mut lab);
    assert_eq!((sent.len(), sent[0].0), (1, WAN), "{:?}", lab.stepped.drops());
    assert_eq!(parse(&sent[0].1).unwrap().vni(), Vni::new(900));
    assert!(sent[0].1.ends_with(&datagram(FAR_ROUTER, US, "10.1.0.10", "10.3.0.5", 63, 50)));
    // The way back.
    lab.send(WAN, &tunnelled(900, &datagram(US, FAR_ROUTER, "10.3.0.5", "10.1.0.10", 63, 50)));
    assert_eq!(hosts.settle(&mut lab), [(LAN, datagram(A, US, "10.3.0.5", "10.1.0.10", 62, 50))]);
    // The error goes back into the tunnel, with an address of the VRF.
    lab.send(WAN, &tunnelled(900, &datagram(US, FAR_ROUTER, "10.3.0.5", "10.1.0.10", 1, 50)));
    let sent = hosts.settle(&mut lab);
    assert_eq!((sent.len(), sent[0].0), (1, WAN));
    assert_eq!((&sent[0].1[50..56], icmp(&sent[0].1[50..])), (&FAR_ROUTER.0[..], (11, 0, ip("10.1.0.1"))));
    // One Ethernet address is behind one remote, and at no other place of the segment.
    let read = |keys: &str, hops: &str| {
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 'transit'\nvni = 900\n\
             vrf = 'default'\nremotes = ['10.9.0.2', '10.9.0.3']\n{keys}\n[[vrf]]\nname = 'default'\n\
             routes = [{{ to = '10.3.0.0/16', next_hops = [{hops}] }}]\n"
        );
        let source = Source::new("test", text);
        source.parse().unwrap().read(|root| GatewayConfig::read(root, &["wan"])).map(drop).map_err(|it| it.to_string())
    };
    let hop = |remote: &str| format!("{{ segment = 'transit', remote = '{remote}', mac = '{FAR_ROUTER}' }}");
    let fixed = |remote: &str| format!("static = [{{ mac = '{FAR_ROUTER}', remote = '{remote}' }}]");
    assert_eq!(read(&fixed("10.9.0.2"), &hop("10.9.0.2")), Ok(()));
    for (keys, hops, message) in [
        (String::new(), [hop("10.9.0.2"), hop("10.9.0.3")].join(", "), "behind two remotes of segment \"transit\""),
        (fixed("10.9.0.3"), hop("10.9.0.2"), "is behind another remote or port of \"transit\" already"),
        (format!("router_mac = '{FAR_ROUTER}'"), hop("10.9.0.2"), "is behind another remote or port"),
    ] {
        let found = read(&keys, &hops).unwrap_err();
        assert!(found.contains(message), "{keys}\n  gave {found}\n  not  {message}");
    }
    // A router with another Ethernet address in the segment gets nothing.
    lab.send(WAN, &tunnelled(900, &datagram(B, FAR_ROUTER, "10.3.0.5", "10.1.0.10", 63, 50)));
    assert_eq!(hosts.settle(&mut lab), []);
    assert_eq!(lab.dropped(DropReason::NoDestination), 1);
}

/// Changes of the routes of VNI 900 from another control plane.
fn routes(changes: &[(&str, &[MacAddr])]) -> ExternalChanges {
    let route = |(to, routers): &(&str, &[MacAddr])| ((900, to.parse().unwrap()), routers.to_vec());
    ExternalChanges { routes: changes.iter().map(route).collect(), ..ExternalChanges::default() }
}

#[test]
fn routes_of_another_control_plane() {
    const OTHER_ROUTER: MacAddr = MacAddr([2, 0, 0, 0, 9, 8]);
    let with = |routes: &str| {
        format!(
            "{UNDERLAY}{TWO}[[segment]]\nname = 'transit'\nvni = 900\nvrf = 'default'\ncontrol = 'kernel'\n\
             [[vrf]]\nname = 'default'\nroutes = [{routes}]\n"
        )
    };
    let names = ["wan", "lan", "lan2"];
    let (mut lab, mut hosts) = (Lab::with_ports(&with(""), &names).with_peer(), Hosts::two());
    hosts.settle(&mut lab);
    let change = |lab: &mut Lab, changes| {
        let Lab { stepped, control, .. } = lab;
        stepped.with_plane(|plane| control.apply_external(changes, plane.ports(), plane.seconds()));
    };
    let shown = |lab: &mut Lab| -> Vec<(Value, Value, Value)> {
        let rows = lab.rows("routes").into_iter().filter(|row| row[2] == "kernel");
        rows.map(|row| (row[1].clone(), row[3].clone(), row[4].clone())).collect()
    };
    let mut behind = ExternalChanges::default();
    behind.macs.extend([FAR_ROUTER, OTHER_ROUTER].map(|mac| ((900, mac), Some(ExternalPlace::Vtep(ip("10.9.0.2"))))));
    behind.merge(routes(&[("10.3.0.0/16", &[FAR_ROUTER]), ("10.2.0.77/32", &[FAR_ROUTER])]));
    change(&mut lab, behind);
    hosts.settle(&mut lab);
    let to = |lab: &mut Lab, hosts: &mut Hosts, dst: &str| {
        lab.send(LAN, &datagram(US, A, "10.1.0.10", dst, 64, 50));
        hosts.settle(lab)
    };
    // A network, and a host of a connected network, which is behind a tunnel too.
    for dst in ["10.3.0.5", "10.2.0.77"] {
        let sent = to(&mut lab, &mut hosts, dst);
        assert_eq!((sent.len(), sent[0].0), (1, WAN), "{dst}: {:?}", lab.stepped.drops());
        assert_eq!(parse(&sent[0].1).unwrap().vni(), Vni::new(900));
        assert!(sent[0].1.ends_with(&datagram(FAR_ROUTER, US, "10.1.0.10", dst, 63, 50)));
    }
    lab.send(WAN, &tunnelled(900, &datagram(US, FAR_ROUTER, "10.3.0.5", "10.1.0.10", 63, 50)));
    assert_eq!(hosts.settle(&mut lab), [(LAN, datagram(A, US, "10.3.0.5", "10.1.0.10", 62, 50))]);
    let via = format!("{FAR_ROUTER} in segment transit");
    let row = |to: &str| (to.into(), via.clone().into(), "ready".into());
    assert_eq!(shown(&mut lab), [row("10.2.0.77/32"), row("10.3.0.0/16")]);
    // A neighbour of the network, which has a host route, moves behind the tunnel and back.
    assert_eq!(to(&mut lab, &mut hosts, "10.2.0.10")[0].0, LAN2);
    change(&mut lab, routes(&[("10.2.0.10/32", &[FAR_ROUTER])]));
    assert_eq!(to(&mut lab, &mut hosts, "10.2.0.10")[0].0, WAN);
    change(&mut lab, routes(&[("10.2.0.10/32", &[]), ("10.2.0.77/32", &[])]));
    assert_eq!(to(&mut lab, &mut hosts, "10.2.0.10")[0].0, LAN2);
    assert_eq!(shown(&mut lab), [row("10.3.0.0/16")]);
    // The worker has asked for a neighbour when the route to it comes.
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.2.0.88", 64, 50));
    change(&mut lab, routes(&[("10.2.0.88/32", &[FAR_ROUTER])]));
    hosts.settle(&mut lab);
    for _ in 0..60 {
        lab.stepped.advance(SECOND / 2);
        hosts.settle(&mut lab);
    }
    assert_eq!(to(&mut lab, &mut hosts, "10.2.0.88")[0].0, WAN);
    change(&mut lab, routes(&[("10.2.0.88/32", &[])]));
    assert_eq!(shown(&mut lab), [row("10.3.0.0/16")]);
    // Two routers share the flows.
    change(&mut lab, routes(&[("10.3.0.0/16", &[OTHER_ROUTER, FAR_ROUTER])]));
    let mut shares = HashMap::new();
    for n in 0..200 {
        let sent = to(&mut lab, &mut hosts, &format!("10.3.1.{}", n + 1));
        *shares.entry(sent[0].1[50..56].to_vec()).or_insert(0) += 1;
    }
    assert!(shares.len() == 2 && shares.values().all(|n| *n > 60), "{shares:?}");
    // A route of the configuration counts more, and the other one returns after it.
    let configure = |lab: &mut Lab, text: &str| {
        let source = Source::new("test", text.to_owned());
        let config = source.parse().unwrap().read(|root| GatewayConfig::read(root, &names)).unwrap();
        let Lab { stepped, control, .. } = lab;
        stepped.with_plane(|plane| {
            let change = control.prepare(config, plane.seconds()).unwrap();
            control.reconfigure(change, plane.ports(), plane.seconds());
        });
    };
    configure(&mut lab, &with("{ to = '10.3.0.0/16', discard = 'blackhole' }"));
    assert_eq!((to(&mut lab, &mut hosts, "10.3.0.5"), shown(&mut lab)), (vec![], vec![]));
    change(&mut lab, routes(&[("10.3.0.0/16", &[FAR_ROUTER])]));
    assert_eq!((to(&mut lab, &mut hosts, "10.3.0.5"), shown(&mut lab)), (vec![], vec![]));
    configure(&mut lab, &with(""));
    assert_eq!((to(&mut lab, &mut hosts, "10.3.0.5")[0].0, shown(&mut lab)), (WAN, vec![row("10.3.0.0/16")]));
    // The routes go with the segment, and its number can return without them.
    configure(&mut lab, &format!("{UNDERLAY}{TWO}"));
    assert_eq!(shown(&mut lab), []);
    configure(&mut lab, &with(""));
    assert_eq!(shown(&mut lab), []);
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.3.0.5", 64, 50));
    assert_eq!(icmp(&hosts.settle(&mut lab)[0].1), (3, 0, ip("10.1.0.1")), "network unreachable");
}

#[test]
fn two_segments_have_a_route_to_one_network() {
    let segment =
        |vni: u32| format!("[[segment]]\nname = 'transit{vni}'\nvni = {vni}\nvrf = 'default'\ncontrol = 'kernel'\n");
    let text = format!("{UNDERLAY}{TWO}{}{}", segment(900), segment(901));
    let mut lab = Lab::with_ports(&text, &["wan", "lan", "lan2"]);
    let mut via = |vni: u32, routers: &[MacAddr]| -> Option<Value> {
        let mut changes = ExternalChanges::default();
        changes.routes.insert((vni, "10.3.0.0/16".parse().unwrap()), routers.to_vec());
        let Lab { stepped, control, .. } = &mut lab;
        stepped.with_plane(|plane| control.apply_external(changes, plane.ports(), plane.seconds()));
        lab.rows("routes").into_iter().find(|row| row[1] == "10.3.0.0/16").map(|row| row[3].clone())
    };
    let by = |vni: u32| Some(Value::from(format!("{FAR_ROUTER} in segment transit{vni}")));
    assert_eq!(via(900, &[FAR_ROUTER]), by(900));
    assert_eq!(via(901, &[FAR_ROUTER]), by(901), "the later one");
    assert_eq!(via(901, &[]), by(900), "the one that remains");
    assert_eq!(via(901, &[FAR_ROUTER]), by(901));
    assert_eq!(via(900, &[]), by(901));
    assert_eq!((via(901, &[]), lab.control.routes()), (None, 12), "those of the configuration");
}

#[test]
fn a_routed_segment_reaches_hosts_behind_a_tunnel() {
    // Asymmetric: the router is in a segment whose hosts are behind a remote.
    let text =
        format!("{TWO}[[segment]]\nname = 'far'\nvni = 42\nremotes = ['10.9.0.2']\naddresses = ['10.3.0.1/24']\n");
    let (mut lab, mut hosts) = (lab(&text).with_peer(), Hosts::two());
    hosts.settle(&mut lab);
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.3.0.5", 64, 50));
    let host = Addresses { mac: FAR_ROUTER, addresses: vec!["10.3.0.5/24".parse().unwrap()], gateways: vec![] };
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    let asked = lab.settle();
    let request = asked.iter().find(|(port, bytes)| *port == WAN && bytes[50 + 12..50 + 14] == [8, 6]).unwrap();
    assert_eq!((&request.1[50..56], request.1[50 + 38..50 + 42].to_vec()), (&[0xff; 6][..], vec![10, 3, 0, 5]));
    let HostReply::Frame(reply) = UnderlayHost::new(host).handle(&request.1[50..], 0).reply else { panic!() };
    lab.send(WAN, &vxlan(&peer, &reply));
    let sent = hosts.settle(&mut lab);
    assert!(sent[0].1.ends_with(&datagram(FAR_ROUTER, US, "10.1.0.10", "10.3.0.5", 63, 50)), "{sent:?}");
}

#[test]
fn flows_are_spread_over_next_hops() {
    let text = format!(
        "{TWO}[[vrf]]\nname = 'default'\nroutes = [{{ to = '10.5.0.0/16', next_hops = [{{ via = '10.2.0.10' }}, \
         {{ via = '10.2.0.11', weight = 3 }}] }}]\n"
    );
    let (mut lab, mut hosts) = (lab(&text), Hosts::two());
    hosts.settle(&mut lab);
    // Both next hops are one host with two addresses; the second one does not answer at first.
    let flow = |n: u32| datagram(US, A, "10.1.0.10", &format!("10.5.{}.{}", n / 200, n % 200 + 1), 64, 10);
    for _ in 0..60 {
        lab.stepped.advance(SECOND / 10);
        hosts.settle(&mut lab);
    }
    for n in 0..400 {
        lab.send(LAN, &flow(n));
    }
    assert_eq!(hosts.settle(&mut lab).len(), 400, "the next hop that does not answer gets nothing");
    // It answers, and gets its share.
    let other = MacAddr([2, 0, 0, 0, 1, 11]);
    let addresses = vec!["10.2.0.10/24".parse().unwrap(), "fd02::10/64".parse().unwrap()];
    hosts.0.insert(LAN2, UnderlayHost::new(Addresses { mac: B, addresses, gateways: vec![] }));
    let second = Addresses { mac: other, addresses: vec!["10.2.0.11/24".parse().unwrap()], gateways: vec![] };
    for _ in 0..400 {
        lab.stepped.advance(SECOND / 10);
        for (port, bytes) in lab.settle() {
            let outcome = UnderlayHost::new(second.clone()).handle(&bytes, 0);
            if let (HostReply::Frame(reply), LAN2) = (outcome.reply, port) {
                lab.send(port, &reply);
            }
            if let Some(HostReply::Frame(reply)) = hosts.0.get_mut(&port).map(|host| host.handle(&bytes, 0).reply) {
                lab.send(port, &reply);
            }
        }
    }
    let share = |lab: &mut Lab| {
        let mut to = HashMap::new();
        for n in 0..4000 {
            lab.send(LAN, &flow(n));
            if n % 100 == 99 {
                for (_, bytes) in lab.sent() {
                    let mac = MacAddr(*bytes.first_chunk().unwrap());
                    to.insert(bytes[30..34].to_vec(), mac);
                }
            }
        }
        to
    };
    let first = share(&mut lab);
    let to_other = first.values().filter(|mac| **mac == other).count();
    assert_eq!(first.len(), 4000);
    assert!((2800..3200).contains(&to_other), "{to_other} of 4000");
    assert_eq!(share(&mut lab), first, "a flow keeps its next hop");
}

/// Sends a datagram of each flow. Returns the Ethernet address that it goes to.
fn next_hops_of_flows(lab: &mut Lab, flows: u32) -> Vec<MacAddr> {
    let mut found = Vec::new();
    for n in 0..flows {
        lab.send(LAN, &datagram(US, A, "10.1.0.10", &format!("10.5.{}.{}", n / 200, n % 200 + 1), 64, 10));
        let sent = lab.sent();
        assert_eq!((sent.len(), sent[0].0), (1, LAN2), "flow {n}: {:?}", lab.stepped.drops());
        found.push(MacAddr(*sent[0].1.first_chunk().unwrap()));
    }
    found
}

/// Runs the control thread for some seconds. These hosts on the second port answer.
fn live(lab: &mut Lab, hosts: &[&Addresses], seconds: u32) {
    for _ in 0..10 * seconds {
        lab.stepped.advance(SECOND / 10);
        for (port, bytes) in lab.settle() {
            for host in hosts.iter().filter(|_| port == LAN2) {
                if let HostReply::Frame(reply) = UnderlayHost::new((*host).clone()).handle(&bytes, 0).reply {
                    lab.send(port, &reply);
                }
            }
        }
    }
}

#[test]
fn only_flows_of_a_lost_next_hop_move() {
    const FLOWS: u32 = 3000;
    let text = |hops: &str| {
        format!("{UNDERLAY}{TWO}[[vrf]]\nname = 'default'\nroutes = [{{ to = '10.5.0.0/16', next_hops = [{hops}] }}]\n")
    };
    let via = |n: u8| format!("{{ via = '10.2.0.{n}' }}, ");
    let host = |n: u8| Addresses {
        mac: MacAddr([2, 0, 0, 0, 5, n]),
        addresses: vec![format!("10.2.0.{n}/24").parse().unwrap()],
        gateways: vec![],
    };
    let all = [host(11), host(12), host(13)];
    let mut lab = lab(&text(&(via(11) + &via(12) + &via(13)))[UNDERLAY.len()..]);
    live(&mut lab, &[&all[0], &all[1], &all[2]], 2);
    let count = |flows: &[MacAddr]| all.each_ref().map(|host| flows.iter().filter(|mac| **mac == host.mac).count());
    let moved = |old: &[MacAddr], new: &[MacAddr]| {
        std::iter::zip(old, new).filter(|(old, new)| old != new).map(|(old, new)| (*old, *new)).collect::<Vec<_>>()
    };
    let first = next_hops_of_flows(&mut lab, FLOWS);
    assert!(count(&first).iter().all(|flows| (900..1100).contains(flows)), "{:?}", count(&first));

    // The third one stops answering, without a word.
    live(&mut lab, &[&all[0], &all[1]], 60);
    let second = next_hops_of_flows(&mut lab, FLOWS);
    let gone = moved(&first, &second);
    assert_eq!(gone.len(), count(&first)[2], "exactly its flows move");
    assert!(gone.iter().all(|(old, new)| *old == all[2].mac && *new != all[2].mac));
    assert!(count(&second)[..2].iter().all(|flows| (1350..1650).contains(flows)), "{:?}", count(&second));

    // It answers again. It takes flows of the others, and no flow moves between those.
    live(&mut lab, &[&all[0], &all[1], &all[2]], 60);
    let third = next_hops_of_flows(&mut lab, FLOWS);
    let back = moved(&second, &third);
    assert!(back.iter().all(|(_, new)| *new == all[2].mac));
    assert_eq!(back.len(), count(&third)[2]);

    // A changed configuration has another one instead of the second.
    let change = |lab: &mut Lab, hops: &str| {
        let text = text(hops);
        let source = Source::new("test", text.as_str());
        let document = source.parse().unwrap();
        let config = GatewayConfig::read(&document.settings(), &["wan", "lan", "lan2"]).unwrap();
        let (ports, seconds) = lab.stepped.with_plane(|plane| (plane.ports().to_vec(), plane.seconds()));
        let change = lab.control.prepare(config, seconds).unwrap();
        lab.control.reconfigure(change, &ports, seconds);
    };
    let fourth_host = host(14);
    change(&mut lab, &(via(11) + &via(13) + &via(14)));
    live(&mut lab, &[&all[0], &all[1], &all[2], &fourth_host], 2);
    let fourth = next_hops_of_flows(&mut lab, FLOWS);
    let replaced = moved(&third, &fourth);
    assert_eq!(replaced.len(), count(&third)[1], "exactly the flows of the removed one move");
    assert!(replaced.iter().all(|(old, new)| *old == all[1].mac && *new == fourth_host.mac));
    // One with most of the weight, which needs more buckets.
    change(&mut lab, &(via(11) + &via(13) + "{ via = '10.2.0.14', weight = 200 }"));
    let fifth = next_hops_of_flows(&mut lab, FLOWS);
    assert!(moved(&fourth, &fifth).iter().all(|(_, new)| *new == fourth_host.mac));
    let shares = count(&fifth);
    assert!(shares[0] <= 45 && shares[2] <= 45 && shares[1] == 0, "{shares:?}");
}

#[test]
fn routes_are_listed_page_by_page() {
    let routes: Vec<String> =
        (0..150).map(|n| format!("{{ to = '10.{}.{}.0/24', discard = 'blackhole' }}", 50 + n % 7, n)).collect();
    let text = format!(
        "{TWO}[[vrf]]\nname = 'default'\nroutes = [{0}, {{ to = 'fd09::/32', via = ['fd02::10'] }}]\n\
         [[vrf]]\nname = 'a'\nroutes = [{0}]\n[[vrf]]\nname = 'z'\nroutes = [{0}]\n",
        routes.join(", ")
    );
    let mut lab = lab(&text);
    lab.send(LAN, &datagram(US, A, "10.1.0.10", "10.2.0.10", 64, 100));
    lab.settle();
    let key = |row: &[Value]| (row[0].as_str().unwrap().to_owned(), row[1].as_str().unwrap().to_owned());
    let Lab { stepped, control, .. } = &mut lab;
    stepped.with_plane(|plane| {
        let mut registry = Registry { control, plane };
        let table = registry.table("routes").unwrap();
        let all = registry.rows(table);
        // Each network has its own route, the router's address, and two reserved ones with IPv4.
        assert_eq!(all.len(), 450 + 1 + 2 * (4 + 2) + 1, "{all:?}");
        let sorted = |row: &Vec<Value>| (key(row).0, key(row).1.parse::<NetworkPrefix>().unwrap());
        assert!(all.is_sorted_by_key(sorted));
        let origins: Vec<&str> = all.iter().map(|row| row[2].as_str().unwrap()).collect();
        let count = |origin| origins.iter().filter(|found| **found == origin).count();
        assert_eq!(["configured", "local", "connected", "neighbour"].map(count), [451, 4, 8, 1]);
        for entries in [1, 7, 64, 1000] {
            let (mut listing, mut paged) = (Listing::new(table, Filter::default()), Vec::new());
            while !listing.is_done() {
                let page = registry.next_page(&mut listing, entries);
                assert!(page.len() <= entries);
                paged.extend(page);
            }
            assert_eq!(paged, all);
        }
    });
}
