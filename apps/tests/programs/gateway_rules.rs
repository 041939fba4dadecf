//! The gateway's tunnels expressed as rules produce the same packets as the gateway.

#[path = "../../../pipeline/tests/gateway/lab.rs"]
#[allow(dead_code, reason = "the tests of the gateway use the rest")]
mod lab;

use std::net::IpAddr;

use lab::{LAN, Lab, PEER, US, WAN};
use wirepath::rules::engine::RuleEngine;
use wirepath_apps::gateway::{GatewayRule, gateway_rules};
use wirepath_flow::Direction;
use wirepath_packet::{Packet, Pool, PortId};
use wirepath_pipeline::rules::Outcome;
use wirepath_wire::Tunnels;

/// Returns a gateway with one remote that answers, 10.9.0.2 or fd00:9::2.
fn gateway(underlay: &str, segment: &str) -> Lab {
    Lab::of(underlay, segment).with_peer()
}

fn rules_of(lab: &Lab) -> Vec<GatewayRule> {
    gateway_rules(lab.control.config(), &|_: IpAddr| (US, PEER))
}

fn packet(pool: &Pool, bytes: &[u8]) -> Packet {
    let mut packet = pool.take().unwrap();
    assert!(packet.extend_from_slice(bytes, pool));
    packet
}

fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().flatten().copied().collect()
}

/// Applies the rules and returns the packet, if one of them matches.
fn by_rules(rules: &[GatewayRule], direction: Direction, mut packet: Packet, pool: &Pool) -> Option<Packet> {
    let rules = rules.iter().flat_map(|it| &it.rule);
    let mut engine = RuleEngine::new(rules, Tunnels::default(), pool.clone()).unwrap();
    let hit = engine.apply(&mut packet, direction, 0).unwrap()?;
    assert_eq!(hit.outcome, Outcome::Next);
    Some(packet)
}

/// Returns a broadcast frame of a host, which the gateway sends to every remote.
fn from_host() -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 1, 1, 0x88, 0xb5]);
    frame.extend([0x5a; 60]);
    frame
}

/// Clears the fields that may differ: the IPv4 identification and header checksum, the UDP source port, and a
/// checksum.
fn comparable(mut frame: Vec<u8>, checksummed: bool) -> Vec<u8> {
    let l3 = if frame[12..14] == [0x81, 0] { 18 } else { 14 };
    let udp = if frame[l3] >> 4 == 4 {
        frame[l3 + 4..l3 + 6].fill(0);
        frame[l3 + 10..l3 + 12].fill(0);
        l3 + 20
    } else {
        l3 + 40
    };
    assert_ne!(frame[udp..udp + 2], [0, 0], "an entropy port");
    frame[udp..udp + 2].fill(0);
    if checksummed {
        assert_ne!(frame[udp + 6..udp + 8], [0, 0], "a checksum");
        frame[udp + 6..udp + 8].fill(0);
    }
    frame
}

const CASES: [(&str, &str, bool); 6] = [
    ("", "remotes = ['10.9.0.2']", false),
    ("", "remotes = ['fd00:9::2']", true),
    ("vlan = 7\nttl = 9\ndscp = 12\nudp_port = 8472", "remotes = ['10.9.0.2']", false),
    ("udp_checksum = 'always'", "remotes = ['10.9.0.2']", true),
    ("udp_checksum = 'zero'\ndscp = 46", "remotes = ['fd00:9::2']", false),
    ("vlan = 4094", "remotes = ['fd00:9::2']", true),
];

#[test]
fn encapsulated_as_the_gateway_does() {
    for (underlay, segment, checksummed) in CASES {
        let mut lab = gateway(underlay, segment);
        if underlay.contains("vlan") {
            // The peer does not support VLANs. These cases are covered by the decapsulation test below.
            continue;
        }
        // The first frame triggers the resolution of the next hop.
        let mut by_gateway = None;
        for _ in 0..2 {
            lab.send(LAN, &from_host());
            let tunnelled = |(port, frame): &(PortId, Vec<u8>)| *port == WAN && frame.len() > from_host().len();
            by_gateway = lab.settle().into_iter().find(tunnelled).map(|(_, frame)| frame).or(by_gateway);
        }
        let by_gateway = by_gateway.expect("encapsulated");
        let rules = rules_of(&lab);
        let mut packet = packet(&lab.pool, &from_host());
        packet.set_out_port(WAN);
        packet.set_app([1, 0]);
        let by_rule_stage = bytes(&by_rules(&rules, Direction::Egress, packet, &lab.pool).expect("fits"));
        assert_eq!(comparable(by_rule_stage, checksummed), comparable(by_gateway, checksummed), "{underlay} {segment}");
    }
}

#[test]
fn nic_decapsulates_only_the_gateways_tunnels() {
    for (underlay, segment, _) in CASES {
        // The packets come from the rules of the other end.
        let mut lab = gateway(underlay, segment);
        let mut turned = lab.control.config().clone();
        let remote = turned.segments[0].remotes[0];
        (turned.segments[0].remotes[0].address, turned.segments[0].remotes[0].local) = (remote.local, remote.address);
        let theirs = gateway_rules(&turned, &|_: IpAddr| (PEER, US));
        let mut inner = packet(&lab.pool, &from_host());
        inner.set_out_port(WAN);
        inner.set_app([1, 0]);
        let tunnelled = bytes(&by_rules(&theirs, Direction::Egress, inner, &lab.pool).expect("fits"));

        lab.send(WAN, &tunnelled);
        let delivered: Vec<Vec<u8>> =
            lab.settle().into_iter().filter(|(port, _)| *port == LAN).map(|(_, frame)| frame).collect();
        assert_eq!(delivered, [from_host()], "{underlay} {segment}: the gateway takes it");

        // The rules recognise VXLAN on the gateway's UDP port.
        let rules = rules_of(&lab);
        let port = lab.control.config().underlay.udp_port;
        let fits = |rules: &[GatewayRule], frame: &[u8]| {
            let mut packet = packet(&lab.pool, frame);
            packet.set_in_port(WAN);
            if port != 4789 {
                // The test's parser knows only the standard port.
                return None;
            }
            by_rules(rules, Direction::Ingress, packet, &lab.pool)
        };
        let Some(out) = fits(&rules, &tunnelled) else {
            // Over IPv6 a NIC does not see whether there is a checksum.
            assert!(port != 4789 || segment.contains("fd00") && !underlay.contains("zero"), "{underlay} {segment}");
            continue;
        };
        assert_eq!((bytes(&out), out.mark()), (from_host(), Some(1)));
        let mut other = lab.control.config().clone();
        other.segments[0].vni = Some(43);
        assert!(fits(&gateway_rules(&other, &|_: IpAddr| (US, PEER)), &tunnelled).is_none(), "another VNI");
        let other_address = gateway_rules(lab.control.config(), &|_: IpAddr| (PEER, US));
        assert!(fits(&other_address, &tunnelled).is_none(), "to another host");
    }
}

#[test]
fn two_rules_for_each_remote() {
    let lab = gateway("", "remotes = ['10.9.0.2', '10.9.0.3']");
    let rules = rules_of(&lab);
    let tags: Vec<u32> = rules.iter().map(|it| it.tag).collect();
    assert_eq!(tags, [1, 1, 2, 2]);
    let in_nic = |it: &GatewayRule| it.rule.as_ref().is_ok_and(|rule| rule.software_only().is_none());
    assert!(rules.iter().all(in_nic), "nothing that no NIC could take");
}

/// Returns a frame with an IP packet of this version, from 10.1.0.1 or fd00:1::1.
fn ip_frame(version: u8) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8];
    if version == 4 {
        frame.extend([8, 0, 0x45, 0, 0, 60, 0, 0, 0x40, 0, 64, 253, 0, 0, 10, 1, 0, 1, 10, 2, 0, 1]);
        let sum = wirepath_wire::checksum::sum(&frame[14..34]).checksum();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 40, 253, 64]);
        for network in [1, 2] {
            frame.extend([0xfd, 0, 0, network, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        }
    }
    frame.extend([0x5a; 40]);
    frame
}

/// The rules of one end decapsulate the packets of the other end's rules.
#[test]
fn rules_of_each_kind_are_inverse() {
    let routed = "\naddresses = ['10.255.0.1/30', 'fd00:ff::1/64']";
    for (keys, is_routed) in [
        ("kind = 'geneve'\nvni = 7", false),
        ("kind = 'gretap'", false),
        ("kind = 'gretap'\nvni = 7", false),
        ("kind = 'nvgre'\nvni = 7", false),
        ("kind = 'gre'", true),
        ("kind = 'gre'\nvni = 7", true),
        ("kind = 'geneve'\nvni = 7\npayload = 'ip'", true),
        ("kind = 'ipip'", true),
    ] {
        let ports = if is_routed { routed } else { "\nports = [{ port = 'lan' }]" };
        let lab = Lab::of_segments("", &format!("[[segment]]\nname = 'blue'\n{keys}\nremotes = ['10.9.0.2']{ports}\n"));
        let config = lab.control.config().clone();
        let rules = gateway_rules(&config, &|_: IpAddr| (US, PEER));
        let mut turned = config.clone();
        let remote = turned.segments[0].remotes[0];
        (turned.segments[0].remotes[0].address, turned.segments[0].remotes[0].local) = (remote.local, remote.address);
        let theirs = gateway_rules(&turned, &|_: IpAddr| (PEER, US));
        let pool = lab.pool.clone();
        let frames = if is_routed { vec![ip_frame(4), ip_frame(6)] } else { vec![from_host()] };
        assert_eq!(rules.len(), 2 * frames.len(), "{keys}: {rules:?}");
        for frame in frames {
            let mut inner = packet(&pool, &frame);
            inner.set_out_port(WAN);
            inner.set_app([1, 0]);
            let tunnelled = bytes(&by_rules(&theirs, Direction::Egress, inner, &pool).expect("fits"));
            let mut outer = packet(&pool, &tunnelled);
            outer.set_in_port(WAN);
            let out = by_rules(&rules, Direction::Ingress, outer, &pool).unwrap_or_else(|| panic!("{keys}"));
            // A layer-3 tunnel carries no Ethernet addresses.
            let start = if is_routed { 12 } else { 0 };
            assert_eq!((&bytes(&out)[start..], out.mark()), (&frame[start..], Some(1)), "{keys}");
        }
    }
}

/// A part that no NIC does has a reason.
#[test]
fn reasons_name_what_a_nic_lacks() {
    let v4 = "remotes = ['10.9.0.2']";
    for (underlay, segment, direction, reason) in [
        // A copied DSCP cannot be part of a constant header.
        ("dscp = 'copy'", v4, Direction::Egress, "copy the DSCP"),
        ("source_ports = '1024-2047'", v4, Direction::Egress, "chooses source ports"),
        ("", "remotes = ['fd00:9::2']", Direction::Ingress, "RFC 8200 section 8.1"),
        ("", "kind = 'gretap'\nremotes = ['fd00:9::2']", Direction::Egress, "flow label"),
        ("", "kind = 'gretap'\ngre = { checksum = true }\nremotes = ['10.9.0.2']", Direction::Egress, "no checksum"),
        ("", "kind = 'gretap'\ngre = { sequence = true }\nremotes = ['10.9.0.2']", Direction::Egress, "sequence"),
    ] {
        let rules = rules_of(&gateway(underlay, segment));
        let it = rules.iter().find(|it| it.direction == direction).expect("a part");
        let why = it.rule.as_ref().err().unwrap_or_else(|| panic!("{underlay} {segment}"));
        assert!(why.contains(reason), "{why}");
        assert_eq!(rules.len(), 2, "{underlay} {segment}");
    }
}
