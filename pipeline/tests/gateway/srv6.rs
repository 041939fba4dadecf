//! SRv6: its packets, judged by scapy and tshark, in both directions, and packets that are dropped by reason.

use std::net::Ipv6Addr;

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::PortInfo;
use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_settings::Source;
use wirepath_testlab::oracle;
use wirepath_wire::build::{OuterConfig, OuterHeaders, Transport, VariableFields};
use wirepath_wire::{IpProtocol, MacAddr, srh};

use crate::ip_payload::{framed, hex, ip_packet, settle};
use crate::lab::{FAR, HOST, LAN, Lab, PEER, US, WAN, frame};

/// SID of the gateway.
const SID: &str = "fc00:1::100";
/// Address of the remote.
const REMOTE: &str = "fd00:9::2";
const UNDERLAY: &str =
    "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\ngateways = ['fd00:9::2']\n";

/// Returns the table `srv6` with these SIDs of the path and further keys.
fn table(segs: &[&str], keys: &str) -> String {
    format!("srv6 = {{ local_sid = '{SID}', segs = {segs:?}{keys} }}\n")
}

/// Returns a gateway with a segment of Ethernet frames.
fn ethernet(srv6: &str, keys: &str) -> Lab {
    let mut lab = unresolved(srv6, keys);
    lab.settle();
    lab
}

/// Does the same without resolving the next hop.
fn unresolved(srv6: &str, keys: &str) -> Lab {
    let text = format!(
        "{UNDERLAY}[[segment]]\nname = 'blue'\nkind = 'srv6'\nports = [{{ port = 'lan' }}]\nlocal = 'fd00:9::1'\n\
         {srv6}{keys}\n"
    );
    Lab::with_ports(&text, &["wan", "lan"]).with_peer()
}

/// Returns a gateway with a tunnel of IP packets and further segments, and its local host.
fn routed(srv6: &str, segments: &str) -> (Lab, UnderlayHost) {
    let text = format!(
        "{UNDERLAY}[[segment]]\nname = 'lan'\nports = [{{ port = 'lan' }}]\naddresses = ['10.1.0.1/24', 'fd01::1/64']\n\
         [[segment]]\nname = 'tunnel'\nkind = 'srv6'\npayload = 'ip'\nremotes = ['{REMOTE}']\nvrf = 'default'\n\
         {srv6}{segments}\n\
         [[vrf]]\nname = 'default'\nroutes = [{{ to = '10.2.0.0/16', next_hops = [{{ segment = 'tunnel' }}] }},\n\
         {{ to = 'fd02::/64', next_hops = [{{ segment = 'tunnel' }}] }}]\n"
    );
    let mut lab = Lab::with_ports(&text, &["wan", "lan"]).with_peer();
    let addresses = vec!["10.1.0.10/24".parse().unwrap(), "fd01::10/64".parse().unwrap()];
    let mut host = UnderlayHost::new(Addresses { mac: HOST, addresses, gateways: vec![] });
    settle(&mut lab, &mut host);
    (lab, host)
}

/// Returns an IPv6 packet to the gateway. `headers` are its extension headers, the first one of this type.
fn outer(from: &str, to: &str, protocol: u8, headers: &[u8], inner: &[u8]) -> Vec<u8> {
    let outer = OuterHeaders::new(&OuterConfig {
        src_mac: PEER,
        dst_mac: US,
        tags: &[],
        src: from.parse().unwrap(),
        dst: to.parse().unwrap(),
        ttl: 64,
        traffic_class: 0,
        flow_label: 0,
        transport: Transport::Protocol(IpProtocol::NO_NEXT_HEADER),
        tunnel_header: &[],
        variable: VariableFields::default(),
    })
    .unwrap();
    let mut out = vec![0; outer.len()];
    outer.emit(&mut out, &outer.fields(headers.len() + inner.len(), 0)).unwrap();
    out[14 + 6] = protocol;
    [&out, headers, inner].concat()
}

/// Returns a segment routing header whose path ends at the gateway's SID.
fn routing(next: u8, segments_left: u8, path: &[&str]) -> Vec<u8> {
    let path: Vec<Ipv6Addr> = path.iter().chain(&[SID]).map(|sid| sid.parse().unwrap()).collect();
    let header = srh::Repr { next_header: IpProtocol(next), segments_left, tag: 0, path: &path };
    let mut bytes = vec![0; header.header_len()];
    header.emit(&mut bytes).unwrap();
    bytes
}

/// Type of the first extension header, and all of them.
type Headers = (u8, Vec<u8>);

/// Returns the extension headers of valid packets: none, one with the path or a reduced one, one with TLVs, one behind
/// options, and one behind a routing header of another type.
fn valid_headers(next: u8) -> [Headers; 6] {
    let mut hmac = routing(next, 0, &["fc00:5::1"]);
    hmac[1] += 6;
    hmac.extend([0, 4, 5, 0, 0, 0, 0, 0, 5, 38]);
    hmac.extend([0xcc; 38]);
    [
        (next, vec![]),
        (43, routing(next, 0, &[])),
        (43, routing(next, 0, &["fc00:5::1", "fc00:6::1"])),
        (43, hmac),
        (60, [&[43, 0, 1, 4, 0, 0, 0, 0][..], &routing(next, 0, &[])].concat()),
        (43, [&[43, 0, 253, 0, 0, 0, 0, 0][..], &routing(next, 0, &[])].concat()),
    ]
}

/// The policies of the tests: SIDs, mode, and the code of scapy for their headers. `nh` is the type of the payload.
const POLICIES: [(&[&str], &str, &str); 5] = [
    (&["fc00:2::100"], "encaps", "SRH(['fc00:2::100'], 0)"),
    (&["fc00:2::100"], "encaps_red", "None"),
    (&["fc00:5::1", "fc00:2::100"], "encaps", "SRH(['fc00:2::100', 'fc00:5::1'], 1)"),
    (&["fc00:5::1", "fc00:2::100"], "encaps_red", "SRH(['fc00:2::100'], 1)"),
    (&["fc00:5::1", "fc00:6::1", "fc00:2::100"], "encaps_red", "SRH(['fc00:2::100', 'fc00:6::1'], 2)"),
];

/// Returns the frames that scapy writes for a list of policies, types of the payload, flow labels and payloads.
fn scapy(wanted: &[(usize, u8, u32, Vec<u8>)]) -> Vec<Vec<u8>> {
    let mut script = "
from scapy.layers.inet6 import IPv6ExtHdrSegmentRouting
def SRH(addresses, left):
    return lambda nh: IPv6ExtHdrSegmentRouting(nh=nh, addresses=addresses, segleft=left, lastentry=len(addresses) - 1)
def packet(first, header, nh, label, payload):
    ip = IPv6(src='fd00:9::1', dst=first, hlim=64, fl=label, nh=43 if header else nh)
    ip = ip/header(nh) if header else ip
    emit(Ether(src='02:00:00:00:00:01', dst='02:09:09:09:09:02')/ip/Raw(bytes.fromhex(payload)))
"
    .to_owned();
    for (policy, next, label, payload) in wanted {
        let (segs, _, header) = POLICIES[*policy];
        script += &format!("packet('{}', {header}, {next}, {label}, '{}')\n", segs[0], hex(payload));
    }
    let none: [&[u8]; 0] = [];
    oracle::scapy(&none, &script).frames
}

/// Returns the flow label of an IPv6 packet.
fn label(frame: &[u8]) -> u32 {
    u32::from_be_bytes(*frame[14..].first_chunk().unwrap()) & 0xf_ffff
}

/// All bytes are those that scapy writes, and tshark finds the path.
#[test]
fn packets_of_all_policies() {
    let (mut ours, mut wanted) = (Vec::new(), Vec::new());
    for (number, (segs, mode, _)) in POLICIES.iter().enumerate() {
        let table = table(segs, &format!(", mode = '{mode}'"));
        let (mut lab, mut host) = routed(&table, "");
        for (here, there, next) in [("10.1.0.10", "10.2.0.10", 4), ("fd01::10", "fd02::10", 41)] {
            for len in [40, 600, 1200] {
                lab.send(LAN, &framed(US, HOST, &ip_packet(here, there, 64, len)));
                let sent = settle(&mut lab, &mut host);
                assert_eq!((sent.len(), sent[0].0), (1, WAN), "{segs:?} {:?}", lab.stepped.drops());
                wanted.push((number, next, label(&sent[0].1), ip_packet(here, there, 63, len)));
                ours.extend(sent.into_iter().map(|(_, bytes)| bytes));
            }
        }
        let mut lab = ethernet(&table, &format!("remotes = ['{REMOTE}']"));
        for kind in 0..3 {
            let mut inner = frame(FAR, HOST);
            inner[13] = kind;
            lab.send(LAN, &inner);
            let sent: Vec<_> = lab.settle().into_iter().filter(|(port, _)| *port == WAN).collect();
            assert_eq!(sent.len(), 1, "{:?}", lab.stepped.drops());
            wanted.push((number, 143, label(&sent[0].1), inner));
            ours.extend(sent.into_iter().map(|(_, bytes)| bytes));
        }
        assert!(lab.stepped.drops().is_empty());
    }
    let labels: std::collections::BTreeSet<_> = wanted.iter().map(|it| it.2).collect();
    assert!(labels.len() >= 5 && !labels.contains(&0), "the label is entropy of the flow: {labels:?}");
    for (n, (ours, theirs)) in ours.iter().zip(scapy(&wanted)).enumerate() {
        assert_eq!(hex(ours), hex(&theirs), "packet {n}");
    }
    assert_eq!(ours.len(), POLICIES.len() * 9);
    oracle::assert_clean(&ours);
    let fields = ["ipv6.dst", "ipv6.routing.segleft", "ipv6.routing.srh.addr"];
    for (row, (policy, ..)) in oracle::fields(&ours, &fields).iter().zip(&wanted) {
        let (segs, mode, _) = POLICIES[*policy];
        let listed = segs.iter().skip(usize::from(mode == "encaps_red"));
        assert!(row[0].split(',').next() == Some(segs[0]), "{row:?}");
        assert_eq!(row[2], listed.clone().rev().copied().collect::<Vec<_>>().join(","), "{row:?}");
        let left = (segs.len() - 1).to_string();
        assert_eq!(row[1], if listed.len() == 0 { "" } else { &left });
    }
}

#[test]
fn packets_to_the_sid_are_routed() {
    for behaviour in ["", ", behaviour = 'end.dt46'", ", behaviour = 'end.dt4'", ", behaviour = 'end.dt6'"] {
        let (mut lab, mut host) = routed(&table(&["fc00:2::100"], behaviour), "");
        for (here, there, next) in [("10.1.0.10", "10.2.0.10", 4), ("fd01::10", "fd02::10", 41)] {
            let taken = !behaviour.contains(if next == 4 { "dt6" } else { "dt4'" });
            for (protocol, headers) in valid_headers(next) {
                let before = lab.dropped(DropReason::SidUpperLayer);
                lab.send(WAN, &outer(REMOTE, SID, protocol, &headers, &ip_packet(there, here, 64, 500)));
                let sent = settle(&mut lab, &mut host);
                let frame = (LAN, framed(HOST, US, &ip_packet(there, here, 63, 500)));
                assert_eq!(sent, if taken { vec![frame] } else { vec![] }, "{behaviour} {:?}", lab.stepped.drops());
                assert_eq!(lab.dropped(DropReason::SidUpperLayer), before + u64::from(!taken));
            }
        }
        let stats = lab.control.segment_stats(1);
        assert_eq!(stats.overlay_rx.0, if behaviour.is_empty() || behaviour.contains("46") { 12 } else { 6 });
    }
}

#[test]
fn frames_to_the_sid_are_bridged() {
    for source in [format!("remotes = ['{REMOTE}']"), "accept_unknown_remotes = true".to_owned()] {
        let mut lab = ethernet(&table(&["fc00:5::1", "fc00:2::100"], ""), &source);
        for (protocol, headers) in valid_headers(143) {
            let inner = frame(HOST, FAR);
            lab.send(WAN, &outer(REMOTE, SID, protocol, &headers, &inner));
            assert_eq!(lab.settle(), [(LAN, inner)], "{:?}", lab.stepped.drops());
        }
        // The frame to the learned host follows the path of the policy.
        let inner = frame(FAR, HOST);
        lab.send(LAN, &inner);
        let sent = lab.settle();
        assert_eq!((sent.len(), sent[0].0), (1, WAN), "{source} {:?}", lab.stepped.drops());
        let expected = scapy(&[(2, 143, label(&sent[0].1), inner)]);
        assert_eq!(hex(&sent[0].1), hex(&expected[0]));
        assert!(lab.stepped.drops().is_empty(), "{:?}", lab.stepped.drops());
    }
}

/// The headers and the longest packet fill the underlay's MTU, with the most SIDs too.
#[test]
fn the_mtu_counts_the_segment_routing_header() {
    let sids: Vec<String> = (1..=8).map(|n| format!("fc00:{n}::1")).collect();
    let sids: Vec<&str> = sids.iter().map(String::as_str).collect();
    for (segs, mode, header) in [
        (&sids[..1], "encaps", 24),
        (&sids[..1], "encaps_red", 0),
        (&sids[..7], "encaps", 8 + 7 * 16),
        (&sids[..8], "encaps_red", 8 + 7 * 16),
    ] {
        let mut lab = ethernet(&table(segs, &format!(", mode = '{mode}'")), &format!("remotes = ['{REMOTE}']"));
        let most = 1500 - 40 - header;
        lab.assert_longest_frame(most);
    }
}

#[test]
fn packets_are_dropped_by_reason() {
    let inner = ip_packet("10.2.0.10", "10.1.0.10", 64, 40);
    let with = |at: usize, value: u8| {
        let mut header = routing(4, 0, &["fc00:5::1"]);
        header[at] = value;
        (43, header)
    };
    let tlv = |tlv: [u8; 8]| {
        let mut header = routing(4, 0, &[]);
        header[1] += 1;
        (43, [&header[..], &tlv].concat())
    };
    let udp = [&[0x9c, 0x40, 0x12, 0xb5, 0, 48, 0, 0][..], &[0; 40]].concat();
    let echo = [128, 0, 0, 0, 0, 1, 0, 1];
    let cases: Vec<(Headers, &[u8], DropReason)> = vec![
        (with(3, 1), &inner, DropReason::SegmentsLeft),
        (with(3, 2), &inner, DropReason::SegmentsLeft),
        (with(3, 3), &inner, DropReason::BadTunnelHeader),
        (with(4, 2), &inner, DropReason::BadTunnelHeader),
        (with(4, 255), &inner, DropReason::BadTunnelHeader),
        (with(1, 2), &inner, DropReason::BadTunnelHeader),
        (with(1, 255), &inner, DropReason::Truncated),
        (tlv([5, 6, 0, 0, 0, 0, 0, 0]), &[], DropReason::Truncated),
        (tlv([5, 7, 0, 0, 0, 0, 0, 0]), &inner, DropReason::BadTunnelHeader),
        (tlv([4, 5, 0, 0, 0, 0, 0, 9]), &inner, DropReason::BadTunnelHeader),
        (
            (43, vec![4, 2, 0, 1, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8]),
            &inner,
            DropReason::RoutingType,
        ),
        ((43, vec![4, 0, 253, 7, 0, 0, 0, 0]), &inner, DropReason::RoutingType),
        ((47, vec![]), &[0; 40], DropReason::SidUpperLayer),
        ((59, vec![]), &[], DropReason::SidUpperLayer),
        ((17, vec![]), &udp, DropReason::SidUpperLayer),
        ((58, vec![]), &echo, DropReason::SidUpperLayer),
        ((43, routing(58, 0, &[])), &echo, DropReason::SidUpperLayer),
        ((143, vec![]), &[2; 60], DropReason::SidUpperLayer),
        ((41, vec![]), &inner, DropReason::BadVersion),
        ((43, routing(41, 0, &[])), &inner, DropReason::BadVersion),
        ((4, vec![]), &inner[..19], DropReason::Truncated),
        ((43, routing(4, 0, &[])), &inner[..19], DropReason::Truncated),
        ((44, vec![4, 0, 0, 1, 0, 0, 0, 1]), &inner, DropReason::BadFragment),
    ];
    let (mut lab, mut host) = routed(&table(&["fc00:2::100"], ""), "");
    let mut refuse = |bytes: &[u8], reason: DropReason| {
        let before = lab.dropped(reason);
        lab.send(WAN, bytes);
        assert_eq!(settle(&mut lab, &mut host), [], "{reason:?} {bytes:02x?}");
        assert_eq!(lab.dropped(reason), before + 1, "{reason:?} {:?} {bytes:02x?}", lab.stepped.drops());
    };
    for ((protocol, headers), inner, reason) in &cases {
        refuse(&outer(REMOTE, SID, *protocol, headers, inner), *reason);
    }
    let from = |source: &str, to: &str| outer(source, to, 43, &routing(4, 0, &[]), &inner);
    refuse(&from("fd00:9::3", SID), DropReason::UnknownRemote);
    // The payload of a tunnel of another kind to the address of the gateway, and a SID that is not the gateway's.
    refuse(&from(REMOTE, "fd00:9::1"), DropReason::NotForUs);
    refuse(&from(REMOTE, "fc00:1::101"), DropReason::NotForUs);
    let good = from(REMOTE, SID);
    for at in 0..good.len() {
        for bits in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= bits;
            lab.send(WAN, &bytes);
            assert!(settle(&mut lab, &mut host).len() <= 1, "{at}");
        }
    }
    lab.send(WAN, &good);
    assert_eq!(settle(&mut lab, &mut host).len(), 1);
    // Fragments for a SID are joined as others are.
    let long = ip_packet("10.2.0.10", "10.1.0.10", 64, 800);
    let (first, second) = long.split_at(512);
    lab.send(WAN, &outer(REMOTE, SID, 44, &[4, 0, 0, 1, 0, 0, 0, 9], first));
    assert_eq!(settle(&mut lab, &mut host), []);
    lab.send(WAN, &outer(REMOTE, SID, 44, &[4, 0, 2, 0, 0, 0, 0, 9], second));
    assert_eq!(settle(&mut lab, &mut host).len(), 1, "{:?}", lab.stepped.drops());

    // An Ethernet segment takes no IP packets, and a frame has a header.
    let mut lab = ethernet(&table(&["fc00:2::100"], ""), &format!("remotes = ['{REMOTE}']"));
    for (protocol, bytes, reason) in [
        (4, &inner[..], DropReason::SidUpperLayer),
        (143, &inner[..13], DropReason::TooShort),
        (143, &[], DropReason::TooShort),
    ] {
        for headers in [(protocol, vec![]), (43, routing(protocol, 0, &[]))] {
            let before = lab.dropped(reason);
            lab.send(WAN, &outer(REMOTE, SID, headers.0, &headers.1, bytes));
            assert_eq!((lab.settle(), lab.dropped(reason)), (vec![], before + 1), "{:?}", lab.stepped.drops());
        }
    }
}

/// A SID takes nothing but its tunnel. Other kinds with the same remote keep their packets, and hosts of the link find
/// the SID by neighbour discovery.
#[test]
fn sids_and_addresses_side_by_side() {
    let ipip =
        format!("[[segment]]\nname = 'ipip'\nkind = 'ipip'\nremotes = ['{REMOTE}']\naddresses = ['10.3.0.1/24']\n");
    let second = format!(
        "[[segment]]\nname = 'second'\nkind = 'srv6'\npayload = 'ip'\nremotes = ['{REMOTE}']\nvrf = 'red'\n\
         srv6 = {{ local_sid = 'fd00:9::100', segs = ['fc00:2::200'] }}\n[[vrf]]\nname = 'red'\n"
    );
    let (mut lab, mut host) = routed(&table(&["fc00:2::100"], ""), &(ipip + &second));
    let inner = ip_packet("10.2.0.10", "10.1.0.10", 64, 40);
    let segments = |lab: &Lab| [1, 2, 3].map(|n| lab.control.segment_stats(n).overlay_rx.0);
    for (n, to) in [SID, "fd00:9::1", "fd00:9::100"].into_iter().enumerate() {
        let mut expected = segments(&lab);
        expected[n] += 1;
        lab.send(WAN, &outer(REMOTE, to, 4, &[], &inner));
        // The VRF of the third segment has no route to the host.
        assert_eq!(settle(&mut lab, &mut host).len(), usize::from(n < 2), "{to} {:?}", lab.stepped.drops());
        assert_eq!(segments(&lab), expected);
    }
    let rows: Vec<String> = lab.rows("remotes").iter().map(|row| format!("{} {}", row[0], row[4])).collect();
    assert!(rows.iter().all(|row| row.ends_with("\"fd00:9::2\"")), "{rows:?}");

    let peer = Addresses { mac: PEER, addresses: vec!["fd00:9::2/64".parse().unwrap()], gateways: vec![] };
    for (sid, replies) in [("fd00:9::100", 1), (SID, 1), ("fd00:9::101", 0)] {
        lab.send(WAN, &peer.solicitation(sid.parse().unwrap(), None).unwrap());
        let mut twin = UnderlayHost::new(peer.clone());
        let answers = lab.settle().into_iter().filter_map(|(_, bytes)| twin.handle(&bytes, 0).nd_event);
        assert_eq!(
            answers.filter(|(ip, mac, _)| *ip == sid.parse::<std::net::IpAddr>().unwrap() && *mac == Some(US)).count(),
            replies,
            "{sid}"
        );
    }
}

/// A path whose first SID lies in the link's network: its node is the next hop.
#[test]
fn the_next_hop_is_that_of_the_first_sid() {
    let mut lab = unresolved(&table(&["fd00:9::50", "fc00:2::100"], ""), &format!("remotes = ['{REMOTE}']"));
    let node = MacAddr([2, 5, 5, 5, 5, 5]);
    let addresses = vec!["fd00:9::50/64".parse().unwrap()];
    lab.peer = Some(UnderlayHost::new(Addresses { mac: node, addresses, gateways: vec![] }));
    let inner = frame(FAR, HOST);
    lab.send(LAN, &inner);
    let sent: Vec<_> = lab.settle().into_iter().filter(|(_, bytes)| bytes.ends_with(&inner)).collect();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].1[..6], node.0);
    let row = &lab.rows("remotes")[0];
    assert_eq!((&row[1], &row[4]), (&REMOTE.into(), &"fd00:9::50".into()));
}

/// The policy and the SID change while packets pass.
#[test]
fn policies_change_while_the_gateway_runs() {
    let text = |srv6: &str| {
        format!(
            "{UNDERLAY}[[segment]]\nname = 'blue'\nkind = 'srv6'\nports = [{{ port = 'lan' }}]\nlocal = 'fd00:9::1'\n\
             remotes = ['{REMOTE}']\n{srv6}\n"
        )
    };
    let first = table(&["fc00:2::100"], "");
    let mut lab = ethernet(&first, &format!("remotes = ['{REMOTE}']"));
    let change = |lab: &mut Lab, srv6: &str| {
        let source = Source::new("test", text(srv6));
        let document = source.parse().unwrap();
        let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
        let ports = [
            PortInfo::simulated(WAN, "wan", Some(US), 1500, &lab.pool),
            PortInfo::simulated(LAN, "lan", None, 1500, &lab.pool),
        ];
        let change = lab.control.prepare(config, 0).unwrap();
        lab.control.reconfigure(change, &ports, 0);
    };
    let inner = frame(FAR, HOST);
    let first_sid = |lab: &mut Lab| {
        lab.send(LAN, &inner);
        let sent = lab.settle().into_iter().find(|(port, bytes)| *port == WAN && bytes.ends_with(&inner)).unwrap();
        (Ipv6Addr::from_octets(*sent.1[38..].first_chunk().unwrap()).to_string(), sent.1[20], sent.1.len())
    };
    assert_eq!(first_sid(&mut lab), ("fc00:2::100".to_owned(), 43, 54 + 24 + 60));
    change(&mut lab, &table(&["fc00:5::1", "fc00:2::100"], ""));
    assert_eq!(first_sid(&mut lab), ("fc00:5::1".to_owned(), 43, 54 + 40 + 60));
    change(&mut lab, &table(&["fc00:2::100"], ", mode = 'encaps_red'"));
    assert_eq!(first_sid(&mut lab), ("fc00:2::100".to_owned(), 143, 54 + 60));
    change(&mut lab, &first.replace(SID, "fc00:1::200"));
    for (to, arrives) in [(SID, false), ("fc00:1::200", true)] {
        let inner = frame(HOST, FAR);
        lab.send(WAN, &outer(REMOTE, to, 143, &[], &inner));
        let expected = if arrives { vec![(LAN, inner)] } else { vec![] };
        assert_eq!(lab.settle(), expected, "{to} {:?}", lab.stepped.drops());
    }
    let peer = Addresses { mac: PEER, addresses: vec!["fd00:9::2/64".parse().unwrap()], gateways: vec![] };
    let mut host = UnderlayHost::new(peer.clone());
    for (sid, replies) in [(SID, 0), ("fc00:1::200", 1)] {
        lab.send(WAN, &peer.solicitation(sid.parse().unwrap(), None).unwrap());
        let events = lab.settle().into_iter().filter(|(_, bytes)| {
            let outcome = host.handle(bytes, 0);
            matches!(outcome.reply, HostReply::None) && outcome.nd_event.is_some()
        });
        assert_eq!(events.count(), replies, "{sid}");
    }
}

#[test]
fn contradictions_are_refused() {
    let read = |keys: &str| {
        let text = format!("{UNDERLAY}[[segment]]\nname = 't'\n{keys}\n");
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        document.read(|root| GatewayConfig::read(root, &["wan", "lan"])).map_err(|error| error.to_string())
    };
    let good = format!(
        "kind = 'srv6'\npayload = 'ip'\nremotes = ['{REMOTE}']\nvrf = 'default'\n\
         srv6 = {{ local_sid = '{SID}', segs = ['fc00:2::100'] }}\n[[vrf]]\nname = 'default'"
    );
    let config = read(&good).unwrap();
    assert_eq!(config.segments[0].tunnel_id().to_string(), format!("SID {SID}"));
    assert_eq!(config.segments[0].destination(REMOTE.parse().unwrap()).to_string(), "fc00:2::100");
    let sids = |n: usize| (1..=n).map(|n| format!("'fc00:{n}::1'")).collect::<Vec<_>>().join(", ");
    let segs = |list: &str| good.replace("'fc00:2::100'", list);
    assert!(read(&segs(&sids(7))).is_ok());
    assert!(read(&segs(&format!("{}], mode = 'encaps_red', behaviour = 'end.dt4' }} #", sids(8)))).is_ok());
    let table = format!("srv6 = {{ local_sid = '{SID}', segs = ['fc00:2::100'] }}\n");
    for (keys, message) in [
        (segs(&sids(8)), "srv6.segs: found 8 SIDs, expected at most 7 with this mode"),
        (segs(&format!("{}], mode = 'encaps_red' }} #", sids(9))), "found 9 SIDs, expected at most 8"),
        (segs(""), "srv6.segs: missing, expected at least the SID of the remote"),
        (segs("'ff02::1'"), "srv6.segs[0]: found ff02::1, expected a unicast address that is not link-local"),
        (segs("'::'"), "found ::, expected a unicast address"),
        (segs("'10.9.0.2'"), "srv6.segs[0]: found '10.9.0.2', expected an IPv6 address"),
        (segs("'fc00:2::1', 'fe80::1'"), "srv6.segs[1]: found fe80::1"),
        (segs(&format!("'{SID}'")), "fc00:1::100 is the local SID, expected SIDs of other nodes"),
        (segs("'fd00:9::1'"), "fd00:9::1 is an address of this gateway"),
        (good.replace(SID, "ff05::1"), "srv6.local_sid: found ff05::1, expected a unicast address"),
        (good.replace(SID, "fd00:9::1"), "local_sid fd00:9::1 is an address of the underlay"),
        (good.replace(SID, REMOTE), "fd00:9::2 is the local SID, expected the address of a remote"),
        (good.replace(&format!("local_sid = '{SID}', "), ""), "srv6.local_sid: missing"),
        (good.replace(&table, ""), "srv6: missing, expected a table with \"local_sid\" and \"segs\""),
        (good.replace(REMOTE, "10.9.0.2"), "found 10.9.0.2, expected an IPv6 address: SIDs are IPv6 addresses"),
        (
            good.replace("payload", "vni = 0\npayload"),
            "vni: found in a segment of kind \"srv6\", whose packets have no identifier",
        ),
        (
            segs("'fc00:2::100'], mode = 'inline' } #"),
            "mode: found 'inline', expected one of \"encaps\", \"encaps_red\"",
        ),
        (good.replace("'srv6'", "'gre'"), "srv6: found in a segment of kind \"gre\", expected only for \"srv6\""),
        (
            format!("kind = 'srv6'\nremotes = ['{REMOTE}', 'fd00:9::3']\nports = [{{ port = 'lan' }}]\n{table}"),
            "found 2 remotes, expected one: \"segs\" is the path to one remote",
        ),
        (
            format!(
                "kind = 'srv6'\nremotes = ['{REMOTE}']\nports = [{{ port = 'lan' }}]\n{}",
                table.replace("segs", "behaviour = 'end.dt4', segs")
            ),
            "srv6.behaviour: found in a segment with Ethernet frames, which has the behaviour End.DX2",
        ),
        (
            good.replace(
                "[[vrf]]",
                &format!(
                    "[[segment]]\nname = 'u'\nkind = 'srv6'\npayload = 'ip'\nremotes = ['fd00:9::3']\nvrf = 'default'\n\
                     {table}[[vrf]]"
                ),
            ),
            "segment[1].srv6: local_sid fc00:1::100 is that of segment \"t\" already",
        ),
    ] {
        let found = read(&keys).map(|_| ()).unwrap_err();
        assert!(found.contains(message), "{keys}\n  gave {found}\n  not  {message}");
    }
    // The first SID needs a route.
    let text = UNDERLAY.replace("gateways", "#") + "[[segment]]\nname = 't'\n" + &good;
    let source = Source::new("test", text);
    let error =
        source.parse().unwrap().read(|root| GatewayConfig::read(root, &["wan", "lan"])).unwrap_err().to_string();
    assert!(error.contains("srv6: segs: fc00:2::100 is in no network of underlay.addresses"), "{error}");
}
