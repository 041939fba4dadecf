//! Filters of segments and VRFs.

use serde_json::Value;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_settings::Source;
use wirepath_wire::{IpProtocol, MacAddr, parse, udp};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, US, WAN, vxlan};
use crate::routing::packet;

const LAN2: PortId = PortId::new(2);
const OTHER: MacAddr = MacAddr([2, 0, 0, 0, 1, 2]);
const UNDERLAY: &str = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n";
const BRIDGE: &str = "[[segment]]\nname = 'blue'\nvni = 42\nports = [{ port = 'lan' }]\nremotes = ['10.9.0.2']\n";

fn read(text: &str) -> Result<GatewayConfig, String> {
    let source = Source::new("test", format!("{UNDERLAY}{text}"));
    let document = source.parse().unwrap();
    document.read(|root| GatewayConfig::read(root, &["wan", "lan", "lan2"])).map_err(|error| error.to_string())
}

fn lab(text: &str) -> Lab {
    Lab::with_ports(&format!("{UNDERLAY}{text}"), &["wan", "lan", "lan2"]).with_peer()
}

fn reconfigure(lab: &mut Lab, text: &str) {
    let config = read(text).unwrap();
    let Lab { stepped, control, .. } = lab;
    stepped.with_plane(|plane| {
        let change = control.prepare(config, plane.seconds()).unwrap();
        control.reconfigure(change, plane.ports(), plane.seconds());
    });
}

/// Returns owner, name, text and packets of each rule.
fn rows(lab: &mut Lab) -> Vec<(String, String, String, u64)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let rows = lab.rows("filters").into_iter();
    rows.map(|row| (text(&row[0]), text(&row[1]), text(&row[2]), row[3].as_u64().unwrap())).collect()
}

fn packets(lab: &mut Lab) -> Vec<u64> {
    rows(lab).into_iter().map(|row| row.3).collect()
}

/// Returns a UDP datagram of a host.
fn datagram(dst_mac: MacAddr, src_mac: MacAddr, (src, dst): (&str, &str), port: u16) -> Vec<u8> {
    let mut body = vec![0x5a; 40];
    udp::Repr { src_port: 4000, dst_port: port, payload_len: 32 }.emit(&mut body).unwrap();
    packet(dst_mac, src_mac, src, dst, 64, IpProtocol::UDP, &body)
}

/// Returns the destination ports of the sent datagrams, with the port of the gateway.
fn sent(lab: &mut Lab) -> Vec<(PortId, u16)> {
    let inner = |bytes: &[u8]| {
        let parsed = parse(bytes).ok()?;
        Some(parsed.innermost().udp(bytes)?.dst_port())
    };
    let sent = lab.sent().into_iter().filter_map(|(port, bytes)| Some((port, inner(&bytes)?))).collect();
    lab.assert_balanced();
    sent
}

#[test]
fn frames_of_ports_and_tunnels_are_compared() {
    let filter = "filter = ['ingress prio 1: udp dst 53 => count', 'ingress prio 2: udp => count, drop', \
                  'ingress prio 3: port id lan2 => drop']\n";
    let other = "[[segment]]\nname = 'red'\nvni = 43\nports = [{ port = 'lan2' }]\nremotes = ['10.9.0.2']\n";
    let mut lab = lab(&format!("{BRIDGE}{filter}{other}"));
    lab.settle();
    let far = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    let pair = ("10.1.0.1", "10.1.0.2");
    // Both ends become known, so that all later frames could take the fast path.
    lab.send(LAN, &datagram(FAR, HOST, pair, 53));
    lab.send(WAN, &vxlan(&far, &datagram(HOST, FAR, pair, 53)));
    lab.stepped.control(&mut lab.control);
    assert_eq!(sent(&mut lab), [(WAN, 53), (LAN, 53)]);
    let (good, bad) = (datagram(FAR, HOST, pair, 53), datagram(FAR, HOST, pair, 54));
    lab.send_all(LAN, [&good[..], &bad, &bad, &good].into_iter());
    assert_eq!(sent(&mut lab), [(WAN, 53), (WAN, 53)]);
    let (good, bad) = (datagram(HOST, FAR, pair, 53), datagram(HOST, FAR, pair, 54));
    let frames: Vec<Vec<u8>> = [&bad, &good, &bad].into_iter().map(|inner| vxlan(&far, inner)).collect();
    lab.send_all(WAN, frames.iter().map(Vec::as_slice));
    assert_eq!(sent(&mut lab), [(LAN, 53)]);
    assert_eq!((packets(&mut lab), lab.dropped(DropReason::RuleDrop)), (vec![5, 4, 0], 4));
    // Another segment has no filter.
    lab.send(LAN2, &datagram(FAR, OTHER, pair, 54));
    assert_eq!(sent(&mut lab), [(WAN, 54)]);
    // A frame with a malformed packet matches no rule reliably.
    let mut malformed = datagram(FAR, HOST, pair, 53);
    malformed[14] = 0x44;
    lab.send(LAN, &malformed);
    assert_eq!((sent(&mut lab), packets(&mut lab)), (vec![], vec![5, 4, 0]));
    let (of, name, text, _) = rows(&mut lab).swap_remove(2);
    assert_eq!(
        (of.as_str(), name.as_str(), text.as_str()),
        ("segment", "blue", "ingress prio 3: port id lan2 => drop")
    );
}

#[test]
fn a_change_keeps_the_counters_of_unchanged_rules() {
    let with = |rules: &str| format!("{BRIDGE}filter = [{rules}]\n");
    let (a, b, c) =
        ("'ingress prio 1: udp dst 53 => drop'", "'ingress prio 2: udp => drop'", "'ingress prio 3: tcp => drop'");
    let mut lab = lab(&with(&format!("{a}, {b}")));
    lab.settle();
    let offer = |lab: &mut Lab, port: u16| {
        lab.send(LAN, &datagram(FAR, HOST, ("10.1.0.1", "10.1.0.2"), port));
        sent(lab)
    };
    assert_eq!((offer(&mut lab, 53), offer(&mut lab, 54), packets(&mut lab)), (vec![], vec![], vec![1, 1]));
    reconfigure(&mut lab, &with(&format!("{a}, {c}")));
    assert_eq!((offer(&mut lab, 53), offer(&mut lab, 54)), (vec![], vec![(WAN, 54)]));
    assert_eq!(packets(&mut lab), [2, 0]);
    reconfigure(&mut lab, &with(&format!("{b}, {a}")));
    assert_eq!((offer(&mut lab, 53), packets(&mut lab)), (vec![], vec![0, 1]), "the priority decides");
    reconfigure(&mut lab, BRIDGE);
    assert_eq!((offer(&mut lab, 53), rows(&mut lab)), (vec![(WAN, 53)], vec![]));
    // Many changes without a pause of the worker.
    for round in 0..200 {
        reconfigure(&mut lab, &with(if round % 2 == 0 { a } else { b }));
    }
    assert_eq!((offer(&mut lab, 54), offer(&mut lab, 54)), (vec![], vec![]));
    assert_eq!(packets(&mut lab), [2]);
}

/// Lets the local hosts answer ARP and ND. Returns the sent datagrams.
fn settle(lab: &mut Lab, hosts: &mut [(PortId, UnderlayHost)]) -> Vec<(PortId, u16)> {
    let mut all = Vec::new();
    for _ in 0..4 {
        for (port, bytes) in lab.settle() {
            let host = hosts.iter_mut().find(|(at, _)| *at == port);
            if let Some((_, host)) = host
                && let HostReply::Frame(reply) = host.handle(&bytes, 0).reply
            {
                lab.send(port, &reply);
            } else if let Some(found) = parse(&bytes).ok().and_then(|it| Some(it.innermost().udp(&bytes)?.dst_port())) {
                all.push((port, found));
            }
        }
    }
    all
}

#[test]
fn routed_packets_are_compared() {
    let text = "[[segment]]\nname = 'one'\nports = [{ port = 'lan' }]\naddresses = ['10.1.0.1/24']\n\
                [[segment]]\nname = 'two'\nports = [{ port = 'lan2' }]\naddresses = ['10.2.0.1/24']\n\
                [[vrf]]\nname = 'default'\nfilter = ['ingress prio 1: ipv4 dst 10.2.0.0/16 / udp dst 53 => count', \
                'ingress prio 2: ipv4 / udp => drop', 'ingress prio 3: icmp => drop']\n";
    let mut lab = lab(text);
    let host = |mac: MacAddr, prefix: &str| {
        UnderlayHost::new(Addresses { mac, addresses: vec![prefix.parse().unwrap()], gateways: vec![] })
    };
    let mut hosts = [(LAN, host(HOST, "10.1.0.10/24")), (LAN2, host(OTHER, "10.2.0.10/24"))];
    settle(&mut lab, &mut hosts);
    let pair = ("10.1.0.10", "10.2.0.10");
    // The first packet waits for its next hop, and counts once.
    for count in 1..4 {
        lab.send(LAN, &datagram(US, HOST, pair, 53));
        assert_eq!(settle(&mut lab, &mut hosts), [(LAN2, 53)], "{:?}", lab.stepped.drops());
        assert_eq!(packets(&mut lab), [count, 0, 0]);
    }
    lab.send(LAN, &datagram(US, HOST, pair, 54));
    assert_eq!((settle(&mut lab, &mut hosts), packets(&mut lab)), (vec![], vec![3, 1, 0]));
    // Also what is meant for the router.
    let echo = [8, 0, 0xf7, 0xfd, 0, 1, 0, 1];
    lab.send(LAN, &packet(US, HOST, "10.1.0.10", "10.1.0.1", 64, IpProtocol::ICMPV4, &echo));
    assert_eq!((settle(&mut lab, &mut hosts), packets(&mut lab)), (vec![], vec![3, 1, 1]));
    assert_eq!(lab.dropped(DropReason::RuleDrop), 2);
    // Frames within a segment are not routed.
    lab.send(LAN, &datagram(FAR, HOST, ("10.1.0.10", "10.1.0.11"), 54));
    settle(&mut lab, &mut hosts);
    assert_eq!(packets(&mut lab), [3, 1, 1]);
    lab.assert_balanced();
}

#[test]
fn wrong_filters_are_refused_where_they_stand() {
    let with = |rules: &str| format!("{BRIDGE}filter = [{rules}]\n");
    for (rules, message) in [
        ("'ingress prio 1: udp dst 53 => drop', 'ingress: upd => drop'", "filter[1]: "),
        ("'egress: udp => drop'", "found a rule at egress, expected one at ingress"),
        ("'ingress: udp => mirror lan'", "found the action \"mirror 1\", expected only count, drop and limit"),
        ("'ingress: port id lam => drop'", "lam"),
        ("7", "filter[0]: found 7, expected a string"),
    ] {
        let found = read(&with(rules)).unwrap_err();
        assert!(found.contains(message) && found.contains("segment[0].filter"), "{rules}: {found}");
    }
    let vrf = "[[vrf]]\nname = 'default'\nfilter = ['ingress: udp => queue 1']\n";
    assert!(read(&format!("{BRIDGE}{vrf}")).unwrap_err().contains("vrf[0].filter[0]"));
    let many: Vec<String> = (0..65).map(|_| "'ingress: udp => drop'".to_owned()).collect();
    assert!(read(&with(&many.join(", "))).unwrap_err().contains("filter[64]"), "the table's own limits");
}
