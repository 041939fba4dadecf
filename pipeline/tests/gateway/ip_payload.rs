//! Tunnels that carry IP packets: their templates, judged by scapy and tshark, and their routing.

use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::kinds::{KINDS, Payload, TunnelKind};
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{GatewayConfig, outer_headers};
use wirepath_pmd::port::PortEvent;
use wirepath_settings::Source;
use wirepath_testlab::oracle;
use wirepath_wire::build::{EncapFields, OuterHeaders};
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::{EtherType, IpProtocol, MacAddr, checksum, parse, tcp, udp};

use crate::lab::{HOST, LAN, Lab, PEER, US, WAN, tagged};
use crate::routing::packet;

fn kind(name: &str) -> &'static TunnelKind {
    KINDS.iter().find(|kind| kind.name == name).unwrap()
}

/// Returns the template of a tunnel that carries IP packets. Options are those of the kind.
fn template(name: &str, vni: Option<u32>, options: &[u8], remote: &str) -> OuterHeaders {
    template_of(name, vni, options, remote, Payload::Ip)
}

/// Returns the template of a tunnel. Options are those of the kind.
fn template_of(name: &str, vni: Option<u32>, options: &[u8], remote: &str, payload: Payload) -> OuterHeaders {
    let text = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\nudp_checksum = 'always'\n\
                [[segment]]\nvni = 1\nkind = 'geneve'\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
    let source = Source::new("test", text.to_owned());
    let document = source.parse().unwrap();
    let mut config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
    let segment = &mut config.segments[0];
    (segment.kind, segment.vni, segment.payload) = (kind(name), vni, payload);
    segment.options = options.into();
    let local = if remote.contains('.') { "10.9.0.1" } else { "fd00:9::1" };
    let ends = (local.parse().unwrap(), remote.parse().unwrap());
    outer_headers(&config.underlay, segment, (US, PEER), ends).unwrap()
}

/// Returns a tunnel packet with this inner packet.
fn tunnelled(template: &OuterHeaders, inner: &[u8]) -> Vec<u8> {
    tunnelled_in_class(template, inner, 0xb9)
}

/// Returns a tunnel packet with this DSCP and ECN, and with this inner packet.
fn tunnelled_in_class(template: &OuterHeaders, inner: &[u8], traffic_class: u8) -> Vec<u8> {
    let fields = EncapFields {
        carries_ipv6: inner[0] >> 4 == 6,
        entropy: 0xabcd_e123,
        sequence: 5,
        inner_sum: checksum::sum(inner),
        traffic_class,
        ..template.fields(inner.len(), 50_000)
    };
    let mut bytes = vec![0; template.len()];
    template.emit(&mut bytes, &fields).unwrap();
    bytes.extend_from_slice(inner);
    bytes
}

/// All bytes are those that scapy writes.
#[test]
fn scapy_writes_the_same_packets() {
    let none: [&[u8]; 0] = [];
    let inner = oracle::scapy(
        &none,
        "
emit(IP(src='10.1.0.5', dst='10.1.0.6')/UDP(sport=1, dport=2)/b'abc')
emit(IPv6(src='fd00:1::5', dst='fd00:1::6')/UDP(sport=1, dport=2)/b'abcd')
",
    )
    .frames;
    let kinds: [(&str, Option<u32>, &[u8], &str); 10] = [
        ("geneve", Some(42), &[], "UDP(sport=50000, dport=6081)/GENEVE(vni=42, proto=proto)"),
        (
            "vxlan-gpe",
            Some(42),
            &[],
            "UDP(sport=50000, dport=4790)/VXLAN(vni=42, flags='Instance+NextProtocol', NextProtocol=proto)",
        ),
        ("gre", None, &[], "GRE(proto=proto)"),
        ("gre", Some(7), &[], "GRE(proto=proto, key_present=1, key=7)"),
        ("gre", None, &[0x80], "GRE(proto=proto, chksum_present=1)"),
        ("gre", Some(0), &[0x10], "GRE(proto=proto, key_present=1, key=0, seqnum_present=1, sequence_number=5)"),
        (
            "gre",
            Some(0xfedc_ba98),
            &[0x90],
            "GRE(proto=proto, chksum_present=1, key_present=1, key=0xfedcba98, seqnum_present=1, sequence_number=5)",
        ),
        ("ipip", None, &[], ""),
        ("mpls-udp", Some(0xabcde), &[], "UDP(sport=50000, dport=6635)/MPLS(label=0xabcde, s=1, ttl=64)"),
        ("mpls-gre", Some(0xabcde), &[], "GRE(proto=0x8847)/MPLS(label=0xabcde, s=1, ttl=64)"),
    ];
    let (mut ours, mut script) =
        (Vec::new(), "from scapy.contrib.geneve import GENEVE\nfrom scapy.contrib.mpls import MPLS\n".to_owned());
    script +=
        &format!("inner = [bytes.fromhex(x) for x in {:?}]\n", inner.iter().map(|it| hex(it)).collect::<Vec<_>>());
    for (name, vni, options, header) in kinds {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let template = template(name, vni, options, remote);
            assert!(template.varies());
            for (n, packet) in inner.iter().map(|inner| tunnelled(&template, inner)).enumerate() {
                ours.push(packet);
                // Without UDP ports, the flow label is entropy (RFC 6438).
                let label = if ["geneve", "vxlan-gpe", "mpls-udp"].contains(&name) { 0 } else { 0xa_bcde };
                script += &format!(
                    "proto, protocol = {}\n\
                     outer = IPv6(src='fd00:9::1', dst='fd00:9::2', hlim=64, tc=0xb9, fl={label}, nh=protocol) if {} \
                     else IP(src='10.9.0.1', dst='10.9.0.2', id=0, flags='DF', ttl=64, tos=0xb9, proto=protocol)\n\
                     emit(Ether(src='{US}', dst='{PEER}')/outer/{header}Raw(inner[{n}]))\n",
                    match (name, n) {
                        ("geneve", 0) => "0x0800, 17",
                        ("geneve", _) => "0x86dd, 17",
                        ("vxlan-gpe", 0) => "1, 17",
                        ("vxlan-gpe", _) => "2, 17",
                        ("mpls-udp", _) => "0, 17",
                        ("mpls-gre", _) => "0, 47",
                        ("gre", 0) => "0x0800, 47",
                        ("gre", _) => "0x86dd, 47",
                        (_, 0) => "0, 4",
                        _ => "0, 41",
                    },
                    if remote.contains('.') { "False" } else { "True" },
                    header = if header.is_empty() { String::new() } else { format!("{header}/") },
                );
            }
        }
    }
    let theirs = oracle::scapy(&none, &script).frames;
    assert_eq!(ours.len(), 40);
    for (n, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert_eq!(hex(ours), hex(theirs), "packet {n}");
    }
    oracle::assert_clean(&ours);
    for row in oracle::fields(&ours, &["ip.src", "ipv6.src", "udp.dstport"]) {
        assert!(row.iter().any(|field| field.contains("10.1.0.5") || field.contains("fd00:1::5")), "{row:?}");
        assert!(row[2].ends_with('2'), "{row:?}");
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Local hosts in a segment with a router, and a tunnel of `keys` with an MTU of 1400 to a remote.
fn tunnel(keys: &str, remote: &str) -> (Lab, UnderlayHost) {
    tunnel_of(keys, remote, "mtu = 1400")
}

/// Local hosts in a segment with a router, and a tunnel of `keys` and `more` of them to a remote.
pub(crate) fn tunnel_of(keys: &str, remote: &str, more: &str) -> (Lab, UnderlayHost) {
    let text = format!(
        "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
         [[segment]]\nname = 'lan'\nports = [{{ port = 'lan' }}]\naddresses = ['10.1.0.1/24', 'fd01::1/64']\n\
         [[segment]]\nname = 'tunnel'\n{keys}\nremotes = ['{remote}']\naddresses = ['10.255.0.1/30', 'fdff::1/64']\n\
         {more}\n\
         [[vrf]]\nname = 'default'\nroutes = [{{ to = '10.2.0.0/16', next_hops = [{{ segment = 'tunnel' }}] }},\n\
         {{ to = 'fd02::/64', via = ['fdff::2'] }}]\n"
    );
    let mut lab = Lab::with_ports(&text, &["wan", "lan"]).with_peer();
    let addresses = vec!["10.1.0.10/24".parse().unwrap(), "fd01::10/64".parse().unwrap()];
    let mut host = UnderlayHost::new(Addresses { mac: HOST, addresses, gateways: vec![] });
    settle(&mut lab, &mut host);
    (lab, host)
}

/// Runs the control thread; the local host answers ARP and ND. Returns all other frames.
pub(crate) fn settle(lab: &mut Lab, host: &mut UnderlayHost) -> Vec<(PortId, Vec<u8>)> {
    let mut sent = Vec::new();
    for _ in 0..4 {
        for (port, bytes) in lab.settle() {
            let reply = if port == LAN { host.handle(&bytes, 0).reply } else { HostReply::None };
            match reply {
                HostReply::Frame(reply) => lab.send(LAN, &reply),
                _ => sent.push((port, bytes)),
            }
        }
    }
    lab.assert_balanced();
    let is_message = |it: &[u8]| it[12..14] == [8, 6] || it[12..14] == [0x86, 0xdd] && it[20] == 58 && it[54] >= 133;
    sent.retain(|(_, bytes)| !is_message(bytes));
    sent
}

/// Returns an IP packet with a UDP datagram of `len` bytes.
pub(crate) fn ip_packet(src: &str, dst: &str, ttl: u8, len: usize) -> Vec<u8> {
    packet(HOST, HOST, src, dst, ttl, IpProtocol::UDP, &{
        let mut body = vec![0x5a; 8 + len];
        udp::Repr { src_port: 4000, dst_port: 33434, payload_len: len as u16 }.emit(&mut body).unwrap();
        body
    })
    .split_off(14)
}

/// Returns an IP packet as the frame of a local host, or as the router's frame for it.
pub(crate) fn framed(dst: MacAddr, src: MacAddr, packet: &[u8]) -> Vec<u8> {
    let ethertype = if packet[0] >> 4 == 4 { EtherType::IPV4 } else { EtherType::IPV6 };
    [&dst.0[..], &src.0, &ethertype.0.to_be_bytes(), packet].concat()
}

/// Kind, keys of the segment, identifier and options.
pub(crate) const TUNNELS: [(&str, &str, Option<u32>, &[u8]); 8] = [
    ("geneve", "kind = 'geneve'\nvni = 42\npayload = 'ip'", Some(42), &[]),
    ("gre", "kind = 'gre'", None, &[]),
    ("gre", "kind = 'gre'\nvni = 7", Some(7), &[]),
    ("gre", "kind = 'gre'\nvni = 7\ngre = { checksum = true, sequence = true }", Some(7), &[0x90]),
    ("ipip", "kind = 'ipip'", None, &[]),
    ("vxlan-gpe", "kind = 'vxlan-gpe'\nvni = 42\npayload = 'ip'", Some(42), &[]),
    ("mpls-udp", "kind = 'mpls-udp'\nvni = 42\npayload = 'ip'", Some(42), &[]),
    ("mpls-gre", "kind = 'mpls-gre'\nvni = 42\npayload = 'ip'", Some(42), &[]),
];

/// Returns the tunnel packet that carries an IP packet to the gateway.
fn to_gateway(kind: (&str, &str, Option<u32>, &[u8]), remote: &str, inner: &[u8]) -> Vec<u8> {
    to_gateway_in_class(kind, remote, inner, 0xb9)
}

/// Does the same with this DSCP and ECN.
pub(crate) fn to_gateway_in_class(
    (name, _, vni, options): (&str, &str, Option<u32>, &[u8]),
    remote: &str,
    inner: &[u8],
    class: u8,
) -> Vec<u8> {
    reversed(tunnelled_in_class(&template(name, vni, options, remote), inner, class), remote)
}

/// Returns the tunnel packet with this DSCP and ECN that carries an Ethernet frame to the gateway.
pub(crate) fn ethernet_to_gateway(name: &str, vni: Option<u32>, remote: &str, inner: &[u8], class: u8) -> Vec<u8> {
    reversed(tunnelled_in_class(&template_of(name, vni, &[], remote, Payload::Ethernet), inner, class), remote)
}

/// Exchanges both ends of a packet to a remote.
fn reversed(mut bytes: Vec<u8>, remote: &str) -> Vec<u8> {
    let l3 = 14;
    // The template is that of the gateway, so both ends change places. No checksum changes by that.
    let (ethernet, _) = bytes.split_at_mut(l3);
    ethernet[..6].copy_from_slice(&US.0);
    ethernet[6..12].copy_from_slice(&PEER.0);
    let (at, len) = if remote.contains('.') { (l3 + 12, 4) } else { (l3 + 8, 16) };
    bytes[at..at + 2 * len].rotate_left(len);
    bytes
}

#[test]
fn tunnels_carry_ip_packets_both_ways() {
    for kind in TUNNELS {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let (mut lab, mut host) = tunnel(kind.1, remote);
            let mut outgoing = Vec::new();
            for (here, there) in [("10.1.0.10", "10.2.0.10"), ("fd01::10", "fd02::10"), ("10.1.0.10", "10.255.0.2")] {
                // The first packet waits for the next hop.
                for len in [40, 600, 1300] {
                    lab.send(LAN, &framed(US, HOST, &ip_packet(here, there, 64, len)));
                    let sent = settle(&mut lab, &mut host);
                    let inner = ip_packet(here, there, 63, len);
                    assert_eq!(sent.len(), 1, "{kind:?} {remote} {there} {:?}", lab.stepped.drops());
                    assert_eq!(sent[0].0, WAN);
                    assert!(sent[0].1.ends_with(&inner), "{kind:?} {remote}");
                    // All but the fields of flow and sequence are those of the template.
                    let expected = tunnelled(&template(kind.0, kind.2, kind.3, remote), &inner);
                    assert_eq!(sent[0].1.len(), expected.len());
                    outgoing.push(sent[0].1.clone());
                    let back = to_gateway(kind, remote, &ip_packet(there, here, 64, len));
                    lab.send(WAN, &back);
                    let sent = settle(&mut lab, &mut host);
                    let frame = framed(HOST, US, &ip_packet(there, here, 63, len));
                    assert_eq!(sent, [(LAN, frame)], "{kind:?} {remote} {there} {:?}", lab.stepped.drops());
                }
            }
            assert!(lab.stepped.drops().is_empty(), "{:?}", lab.stepped.drops());
            oracle::assert_clean(&outgoing);
            let stats = lab.control.segment_stats(1);
            // Two packets waited until their next hop was resolved, and came to the router twice.
            assert_eq!((stats.overlay_rx.0, stats.overlay_tx.0, stats.routed_in.0), (9, 9, 11));
            // The bytes are those of the IP packets.
            let bytes = [28, 48, 28].map(|headers| 3 * headers + 40 + 600 + 1300).iter().sum::<u64>();
            assert_eq!((stats.overlay_rx.1, stats.overlay_tx.1), (bytes, bytes));
        }
    }
}

/// Returns an IP packet with a TCP segment of `len` bytes. Its checksum has only the sum of the pseudo header.
fn tcp_packet(src: &str, dst: &str, ttl: u8, len: usize) -> Vec<u8> {
    let mut body: Vec<u8> = (0..tcp::HEADER_LEN + len).map(|at| (at / 7) as u8).collect();
    tcp::Repr { src_port: 4000, dst_port: 80, seq: 5, ack: 6, flags: tcp::flags::ACK, window: 7, urgent: 0 }
        .emit(&mut body)
        .unwrap();
    let mut frame = packet(HOST, HOST, src, dst, ttl, IpProtocol::TCP, &body);
    let span = ChecksumSpan::of(&frame, parse(&frame).unwrap().outer()).unwrap();
    span.transport.set_field(&mut frame[span.start..], span.pseudo.fold());
    frame.split_off(14)
}

/// Returns an IP packet with a UDP datagram of `len` bytes of payload. Its checksum has only the sum of the pseudo
/// header.
fn udp_packet(src: &str, dst: &str, ttl: u8, len: usize) -> Vec<u8> {
    let mut body: Vec<u8> = (0..udp::HEADER_LEN + len).map(|at| (at / 7) as u8).collect();
    udp::Repr { src_port: 4000, dst_port: 80, payload_len: len as u16 }.emit(&mut body).unwrap();
    let mut frame = packet(HOST, HOST, src, dst, ttl, IpProtocol::UDP, &body);
    let span = ChecksumSpan::of(&frame, parse(&frame).unwrap().outer()).unwrap();
    span.transport.set_field(&mut frame[span.start..], span.pseudo.fold());
    frame.split_off(14)
}

/// A superframe passes whole, unless a field of the tunnel header differs between its frames, or the header has labels.
#[test]
fn superframes_pass_both_ways() {
    both_ways(tcp_packet);
}

#[test]
fn superframes_of_udp_pass_both_ways() {
    both_ways(udp_packet);
}

/// `superframe` makes a packet of these addresses, with this TTL and length.
fn both_ways(superframe: fn(&str, &str, u8, usize) -> Vec<u8>) {
    for kind in TUNNELS {
        let frames = if kind.3.is_empty() && !kind.0.starts_with("mpls") { 1 } else { 4 };
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let (mut lab, mut host) = tunnel(kind.1, remote);
            for (here, there) in [("10.1.0.10", "10.2.0.10"), ("fd01::10", "fd02::10")] {
                // The first packet waits for the next hop.
                lab.send(LAN, &framed(US, HOST, &ip_packet(here, there, 64, 40)));
                settle(&mut lab, &mut host);
                lab.send_superframe(LAN, &framed(US, HOST, &superframe(here, there, 64, 4000)), 1000);
                let sent = settle(&mut lab, &mut host);
                assert_eq!(sent.len(), frames, "{kind:?} {remote} {there} {:?}", lab.stepped.drops());
                if frames == 1 {
                    assert!(sent[0].1.ends_with(&superframe(here, there, 63, 4000)), "{kind:?} {remote}");
                } else {
                    let sent: Vec<_> = sent.iter().map(|(_, bytes)| bytes).collect();
                    oracle::assert_clean(&sent);
                }
                let back = to_gateway(kind, remote, &superframe(there, here, 64, 4000));
                lab.send_superframe(WAN, &back, 1000);
                let frame = framed(HOST, US, &superframe(there, here, 63, 4000));
                assert_eq!(settle(&mut lab, &mut host), [(LAN, frame)], "{kind:?} {remote} {:?}", lab.stepped.drops());
            }
        }
    }
}

/// Routed packets of both IP versions leave in the order of their sequence numbers.
#[test]
fn sequence_numbers_are_in_order() {
    let (mut lab, mut host) = tunnel("kind = 'gre'\ngre = { sequence = true }", "10.9.0.2");
    let packets = [("10.1.0.10", "10.2.0.10"), ("fd01::10", "fd02::10"), ("10.1.0.10", "10.2.0.10")]
        .map(|(here, there)| framed(US, HOST, &ip_packet(here, there, 64, 40)));
    for packet in &packets {
        lab.send(LAN, packet);
        settle(&mut lab, &mut host);
    }
    lab.send_all(LAN, packets.iter().map(Vec::as_slice));
    let numbers: Vec<_> = lab.sent().iter().map(|(_, bytes)| bytes[38..42].to_vec()).collect();
    assert_eq!(numbers, [[0, 0, 0, 3], [0, 0, 0, 4], [0, 0, 0, 5]]);
}

/// Ports would read tunnel headers of VXLAN on its port, so superframes for tunnels of other kinds are cut before.
#[test]
fn superframes_for_the_port_of_another_kind_are_cut() {
    for (keys, frames) in [("", 1), ("udp_port = 4789", 4), ("udp_port = 5000", 1)] {
        let underlay = format!("kind = 'vxlan-gpe'\n{keys}");
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n{underlay}\n\
             [[segment]]\nname = 'lan'\nports = [{{ port = 'lan' }}]\naddresses = ['10.1.0.1/24']\nvni = 1\n\
             [[segment]]\nname = 'tunnel'\nvni = 42\npayload = 'ip'\nremotes = ['10.9.0.2']\nvrf = 'default'\n\
             [[vrf]]\nname = 'default'\nroutes = [{{ to = '10.2.0.0/16', next_hops = [{{ segment = 'tunnel' }}] }}]\n"
        );
        let mut lab = Lab::with_ports(&text, &["wan", "lan"]).with_peer();
        lab.settle();
        lab.send(LAN, &framed(US, HOST, &ip_packet("10.1.0.10", "10.2.0.10", 64, 40)));
        lab.settle();
        lab.send_superframe(LAN, &framed(US, HOST, &tcp_packet("10.1.0.10", "10.2.0.10", 64, 4000)), 1000);
        let sent = lab.settle().iter().filter(|(port, _)| *port == WAN).count();
        assert_eq!(sent, frames, "{keys} {:?}", lab.stepped.drops());
    }
}

/// A superframe in a tunnel of its own is cut before the gateway's tunnel, because ports segment inside one tunnel.
#[test]
fn superframes_in_tunnels_are_cut() {
    let inner = framed(HOST, US, &tcp_packet("192.0.2.1", "192.0.2.2", 64, 4000));
    let mut body = vec![0; 16];
    body.extend(inner);
    udp::Repr { src_port: 4000, dst_port: 4789, payload_len: body.len() as u16 - 8 }.emit(&mut body).unwrap();
    body[8] = 8;
    let superframe = packet(US, HOST, "10.1.0.10", "10.2.0.10", 64, IpProtocol::UDP, &body);
    let (mut lab, mut host) = tunnel("kind = 'gre'", "10.9.0.2");
    lab.send(LAN, &framed(US, HOST, &ip_packet("10.1.0.10", "10.2.0.10", 64, 40)));
    settle(&mut lab, &mut host);
    lab.send_superframe(LAN, &superframe, 1000);
    let sent: Vec<_> = settle(&mut lab, &mut host).into_iter().map(|(_, bytes)| bytes).collect();
    assert_eq!(sent.len(), 4, "{:?}", lab.stepped.drops());
    oracle::assert_clean(&sent);
    let segments = oracle::fields(&sent, &["tcp.len", "tcp.seq_raw"]);
    assert_eq!(segments, [["1000", "5"], ["1000", "1005"], ["1000", "2005"], ["1000", "3005"]]);
}

#[test]
fn errors_return_through_the_tunnel() {
    for kind in TUNNELS {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let (mut lab, mut host) = tunnel(kind.1, remote);
            let mut errors = Vec::new();
            for (here, there, ours) in [("10.1.0.10", "10.2.0.10", "10.255.0.1"), ("fd01::10", "fd02::10", "fdff::1")] {
                let v6 = here.contains(':');
                // Type and code of "time exceeded", of "port unreachable", and of "too big".
                let (exceeded, port, too_big) = if v6 { ([3, 0], [1, 4], [2, 0]) } else { ([11, 0], [3, 3], [3, 4]) };
                for (inner, expected) in
                    [(ip_packet(there, here, 1, 40), exceeded), (ip_packet(there, ours, 64, 40), port)]
                {
                    lab.send(WAN, &to_gateway(kind, remote, &inner));
                    let sent = settle(&mut lab, &mut host);
                    assert_eq!(sent.len(), 1, "{kind:?} {remote} {:?}", lab.stepped.drops());
                    let bytes = &sent[0].1;
                    errors.push(bytes.clone());
                    // The message quotes the packet.
                    let quoted = bytes.windows(inner.len()).position(|it| it == inner).expect("a quotation");
                    assert_eq!((sent[0].0, &bytes[quoted - 8..quoted - 6]), (WAN, &expected[..]));
                }
                // A local host that sends too much learns the MTU of the tunnel.
                lab.send(LAN, &framed(US, HOST, &ip_packet(here, there, 64, 1400)));
                let sent = settle(&mut lab, &mut host);
                assert_eq!((sent.len(), sent[0].0), (1, LAN), "{kind:?}");
                let at = if v6 { 54 } else { 34 };
                assert_eq!(sent[0].1[at..at + 2], too_big);
                assert_eq!(sent[0].1[at + 6..at + 8], 1400u16.to_be_bytes());
            }
            oracle::assert_clean(&errors);
        }
    }
}

#[test]
fn hostile_tunnel_packets_are_dropped_by_reason() {
    for kind in TUNNELS {
        let (mut lab, mut host) = tunnel(kind.1, "10.9.0.2");
        let good = to_gateway(kind, "10.9.0.2", &ip_packet("10.2.0.10", "10.1.0.10", 64, 40));
        let refuse = |lab: &mut Lab, host: &mut UnderlayHost, bytes: &[u8], reason| {
            let before = lab.dropped(reason);
            lab.send(WAN, bytes);
            assert_eq!(settle(lab, host), [], "{kind:?} {reason:?}");
            assert_eq!(lab.dropped(reason), before + 1, "{kind:?} {reason:?} {:?}", lab.stepped.drops());
        };
        // Another VTEP, which changes only the source address and the header checksum.
        let mut stranger = good.clone();
        stranger[29] ^= 7;
        let sum = checksum::update(
            u16::from_be_bytes([stranger[24], stranger[25]]),
            u16::from_be_bytes([good[28], good[29]]),
            u16::from_be_bytes([stranger[28], stranger[29]]),
        );
        stranger[24..26].copy_from_slice(&sum.to_be_bytes());
        let reason = if ["geneve", "vxlan-gpe", "mpls-udp"].contains(&kind.0) {
            DropReason::BadL4Checksum
        } else {
            DropReason::UnknownRemote
        };
        refuse(&mut lab, &mut host, &stranger, reason);
        // An inner packet that is cut off.
        let at = good.len() - 68;
        for cut in [1, 19, 40] {
            let mut bytes = to_gateway(kind, "10.9.0.2", &good[at..at + cut]);
            if bytes[14 + 9] == 41 {
                bytes[14 + 9] = 4;
            }
            lab.send(WAN, &bytes);
            assert_eq!(settle(&mut lab, &mut host), [], "{kind:?} {cut}");
        }
        // All single bytes of the headers.
        for at in 0..good.len() {
            for bits in [0x01, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] ^= bits;
                lab.send(WAN, &bytes);
                let sent = settle(&mut lab, &mut host);
                assert!(sent.len() <= 1, "{kind:?} {at}");
            }
        }
        lab.send(WAN, &good);
        assert_eq!(settle(&mut lab, &mut host).len(), 1);
    }
}

#[test]
fn keys_of_networks_are_refused_for_tunnels() {
    let read = |segment: &str| {
        let text =
            format!("[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n[[segment]]\nname = 't'\n{segment}\n");
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        document.read(|root| GatewayConfig::read(root, &["wan", "lan"])).map_err(|error| error.to_string())
    };
    let good = "kind = 'gre'\nremotes = ['10.9.0.2']\naddresses = ['10.255.0.1/30']\n";
    let config = read(good).unwrap();
    assert!(config.segments[0].is_routed_tunnel());
    for (segment, message) in [
        (format!("{good}ports = [{{ port = 'lan' }}]"), "ports: found in a tunnel with IP packets"),
        (format!("{good}learning = true"), "learning: found in a tunnel with IP packets"),
        (format!("{good}accept_unknown_remotes = true"), "accept_unknown_remotes: found in a tunnel"),
        (format!("{good}mac_limit = 3"), "mac_limit: found in a tunnel"),
        (
            format!("{good}payload = 'ethernet'"),
            "payload: found \"ethernet\", but tunnels of kind \"gre\" carry IP packets",
        ),
        (good.replace("'gre'", "'vxlan'\nvni = 1\npayload = 'ip'"), "tunnels of kind \"vxlan\" carry Ethernet frames"),
        (good.replace("'gre'", "'gretap'\npayload = 'ip'"), "kind = \"gre\" carries IP packets"),
        (good.replace("'10.9.0.2'", "'10.9.0.2', '10.9.0.3'"), "found 2 remotes, expected one"),
        (good.replace("addresses", "#"), "a tunnel with IP packets needs a router"),
        (
            good.replace("'gre'", "'ipip'\nvni = 0"),
            "vni: found in a segment of kind \"ipip\", whose packets have no identifier",
        ),
        (
            format!(
                "{good}[[vrf]]\nname = 'default'\nroutes = [{{ to = '::/0', next_hops = [{{ segment = 't', mac = \
                     '02:00:00:00:00:07', remote = '10.9.0.2' }}] }}]"
            ),
            "found in a layer-3 tunnel, which has one remote and no Ethernet addresses",
        ),
    ] {
        let found = read(&segment).unwrap_err();
        assert!(found.contains(message), "{segment}\n  gave {found}\n  not  {message}");
    }
}

#[test]
fn a_changed_address_adds_no_entry_for_a_tunnel() {
    let (mut lab, _) = tunnel(TUNNELS[1].1, "10.9.0.2");
    let before = lab.control.fdb_entries();
    lab.port_event(WAN, &PortEvent::Address(MacAddr([2, 0, 0, 0, 0, 5])));
    assert_eq!(lab.control.fdb_entries(), before);
}

/// A frame with the first segment of a TCP connection leaves with an MSS that the tunnel takes, in both directions.
#[test]
fn the_mss_of_connections_is_lowered() {
    let segment = |src: &str, dst: &str, mss: u16| {
        let mut bytes = [0x12, 0x34, 0, 80, 1, 2, 3, 4, 0, 0, 0, 0, 0x60, 2, 0xff, 0xff, 0, 0, 0, 0, 2, 4, 0, 0];
        bytes[22..].copy_from_slice(&mss.to_be_bytes());
        let mut framed = packet(HOST, HOST, src, dst, 64, IpProtocol::TCP, &bytes);
        let layers = *wirepath_wire::parse(&framed).unwrap().outer();
        let span = ChecksumSpan::of(&framed, &layers).unwrap();
        let sum = span.pseudo.and(checksum::sum(&framed[span.start..])).checksum();
        framed[span.start + 16..span.start + 18].copy_from_slice(&sum.to_be_bytes());
        framed.split_off(14)
    };
    // A tag that the tunnel carries takes nothing from an untagged connection.
    let segment_keys = "remotes = ['10.9.0.2']\ninner_vlans = 'carry'\nmtu = 1300\nclamp_mss = true\n\
                        static = [{ mac = '02:00:00:00:00:07', remote = '10.9.0.2' }]";
    let mut lab = Lab::new(segment_keys).with_peer();
    lab.settle();
    for tag in [None, Some(5)] {
        let frame = framed(MacAddr([2, 0, 0, 0, 0, 7]), HOST, &segment("10.1.0.1", "10.1.0.2", 1460));
        lab.send(LAN, &tag.map_or(frame.clone(), |id| tagged(&frame, id)));
        let sent = lab.settle();
        assert_eq!(sent.len(), 1, "{:?}", lab.stepped.drops());
        let lowered = segment("10.1.0.1", "10.1.0.2", 1260);
        assert!(sent[0].1.ends_with(&lowered), "{tag:?}: {:02x?}", sent[0].1);
    }
    for (clamp, kind) in [(true, TUNNELS[1]), (true, TUNNELS[4]), (false, TUNNELS[1])] {
        let (mut lab, mut host) = tunnel(&format!("{}\nclamp_mss = {clamp}", kind.1), "10.9.0.2");
        let mut segments = Vec::new();
        for (here, there, headers) in [("10.1.0.10", "10.2.0.10", 40), ("fd01::10", "fd02::10", 60)] {
            for mss in [536, 1460] {
                let expected = if clamp { mss.min(1400 - headers) } else { mss };
                for (from, to) in [(here, there), (there, here)] {
                    let bytes = segment(from, to, mss);
                    match from == here {
                        true => lab.send(LAN, &framed(US, HOST, &bytes)),
                        false => lab.send(WAN, &to_gateway(kind, "10.9.0.2", &bytes)),
                    }
                    let sent = settle(&mut lab, &mut host);
                    assert_eq!(sent.len(), 1, "{:?}", lab.stepped.drops());
                    // With a TTL of 63, it is the segment of a host that announces the lower value.
                    let lowered = segment(from, to, expected);
                    let tail = lowered.len() - 24;
                    assert!(sent[0].1.ends_with(&lowered[tail..]), "{from} {mss}: {:02x?}", sent[0].1);
                    segments.push(sent[0].1.clone());
                }
            }
        }
        oracle::assert_clean(&segments);
        assert_eq!(lab.control.segment_stats(1).mss_clamped, if clamp { 4 } else { 0 });
    }
}
