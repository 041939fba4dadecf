//! The MTU of the path to a remote, lowered by ICMP errors of routers and by no forged ones.

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_settings::Source;
use wirepath_wire::build::{IcmpError, icmp_error};
use wirepath_wire::{IpProtocol, checksum, parse};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, WAN, frame, vxlan};
use crate::routing::packet;

/// Address of a router of the underlay, of the same IP version as the remote.
pub(crate) fn router(remote: &str) -> &'static str {
    if remote.contains('.') { "192.0.2.9" } else { "2001:db8::9" }
}

fn own(remote: &str) -> &'static str {
    if remote.contains('.') { "10.9.0.1" } else { "fd00:9::1" }
}

/// Bytes of outer headers from the IP header on, with the inner Ethernet header.
fn overhead(remote: &str) -> usize {
    if remote.contains('.') { 50 } else { 70 }
}

/// A gateway with a remote behind which a host is, and others with which it shares nothing.
fn lab(remote: &str) -> Lab {
    let mut lab = Lab::of(
        "source_ports = '50000-50999'",
        "remotes = ['10.9.0.2', '10.9.0.5', 'fd00:9::2', 'fd00:9::5']\n\
         [[segment]]\nvni = 43\nports = [{ port = 'lan', vlan = 43 }]\nremotes = ['10.9.0.2', '10.9.0.5']",
    )
    .with_peer();
    lab.settle();
    let address = remote.parse().unwrap();
    let prefix =
        wirepath_pipeline::tunnel::underlay::Prefix { address, len: if remote.contains('.') { 24 } else { 64 } };
    let peer = Addresses { mac: PEER, addresses: vec![prefix], gateways: vec![] };
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    // Known hosts are published with the next tick of the neighbours.
    lab.stepped.advance(SECOND);
    lab.settle();
    lab
}

/// Sends an inner IP packet of `len` bytes to the host behind the remote, and returns what the gateway sends.
fn send(lab: &mut Lab, v6: bool, len: usize) -> Vec<u8> {
    let (src, dst, header) = if v6 { ("fd01::1", "fd01::2", 48) } else { ("10.1.0.1", "10.1.0.2", 28) };
    lab.send(LAN, &packet(FAR, HOST, src, dst, 64, IpProtocol::UDP, &udp(len - header + 8)));
    let mut sent = lab.settle();
    // Without ARP and ND of the gateway itself.
    sent.retain(|(port, bytes)| *port == LAN || parse(bytes).is_ok_and(|it| it.vni().is_some()));
    assert_eq!(sent.len(), 1, "{:?}", lab.stepped.drops());
    sent.into_iter().next().unwrap().1
}

/// An error quotes as much as it has room for (RFC 4443 section 2.4 (c), RFC 1812 section 4.3.2.3). The copies of a
/// flooded frame share most of it.
#[test]
fn an_error_about_a_flooded_frame_quotes_all_that_fits() {
    let mut lab = Lab::new("remotes = ['10.9.0.2', '10.9.0.5']").with_peer();
    lab.settle();
    for (src, dst, header, quoted) in [("fd01::1", "fd01::2", 48, 1280 - 48), ("10.1.0.1", "10.1.0.2", 28, 576 - 28)] {
        let sent = packet(FAR, HOST, src, dst, 64, IpProtocol::UDP, &udp(1500 - header + 8));
        lab.send(LAN, &sent);
        let mut errors = lab.settle();
        errors.retain(|(port, _)| *port == LAN);
        assert_eq!(errors.len(), 1, "{:?}", lab.stepped.drops());
        let error = parse(&errors[0].1).unwrap();
        let layers = error.outer();
        assert_eq!(errors[0].1[layers.l4() + 8..layers.end()], sent[14..14 + quoted]);
    }
}

pub(crate) fn udp(len: usize) -> Vec<u8> {
    let mut body = vec![0x5a; len];
    wirepath_wire::udp::Repr { src_port: 4000, dst_port: 33434, payload_len: len as u16 - 8 }.emit(&mut body).unwrap();
    body
}

/// Returns the message of a router that a packet of the gateway is too long.
pub(crate) fn too_big(from: &str, sent: &[u8], mtu: u16) -> Vec<u8> {
    let mut out = vec![0; 2000];
    let layers = *parse(sent).unwrap().outer();
    let len = icmp_error(&mut out, sent, &layers, PEER, from.parse().unwrap(), IcmpError::TooBig(mtu)).unwrap();
    out.truncate(len);
    out
}

/// Returns the ICMP type and the MTU of an error that the gateway sends to a local host.
pub(crate) fn reported(frame: &[u8]) -> (u8, usize) {
    let l4 = parse(frame).unwrap().outer().l4();
    (frame[l4], u32::from_be_bytes(*frame[l4 + 4..].first_chunk().unwrap()) as usize)
}

/// Returns address, largest frame, path MTU and number of messages of each remote of the first segment.
fn remotes(lab: &mut Lab) -> Vec<(String, usize, usize, u64)> {
    let rows = lab.rows("remotes").into_iter().filter(|row| row[0] == "vni42");
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    let row = |row: Vec<serde_json::Value>| {
        (row[1].as_str().unwrap().to_owned(), number(&row[7]) as usize, number(&row[8]) as usize, number(&row[9]))
    };
    rows.map(row).collect()
}

#[test]
fn a_router_lowers_the_mtu_of_one_path() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let mut lab = lab(remote);
        let before = remotes(&mut lab);
        let taken = overhead(remote);
        for (mtu, inner_v6) in [(1400, false), (1350, true)] {
            let sent = send(&mut lab, inner_v6, if mtu == 1400 { 1500 } else { 1400 } - taken);
            lab.send(WAN, &too_big(router(remote), &sent, mtu));
            assert_eq!(lab.settle(), []);
            let mtu = usize::from(mtu);
            let expected: Vec<_> = before
                .iter()
                .map(|(address, max, path, _)| match address == remote {
                    true => (address.clone(), mtu - taken + 14, mtu, if mtu == 1400 { 1 } else { 2 }),
                    false => (address.clone(), *max, *path, 0),
                })
                .collect();
            assert_eq!(remotes(&mut lab), expected);
            // What fits passes; the sender of what does not learns the MTU inside the tunnel.
            for v6 in [false, true] {
                let sent = send(&mut lab, v6, mtu - taken);
                assert_eq!(sent.len(), 14 + mtu, "{:?}", lab.stepped.drops());
                let answer = send(&mut lab, v6, mtu - taken + 1);
                assert_eq!(reported(&answer), (if v6 { 2 } else { 3 }, mtu - taken), "{remote}");
                lab.stepped.advance(SECOND);
            }
        }
        // The other segment shares the path over IPv4.
        let other = lab.rows("remotes").into_iter().filter(|row| row[0] == "vni43");
        let other: Vec<_> = other.map(|row| (row[1].clone(), row[8].as_u64())).collect();
        let shared = if remote == "10.9.0.2" { 1350 } else { 1500 };
        assert_eq!(other, [("10.9.0.2".into(), Some(shared)), ("10.9.0.5".into(), Some(1500))]);
        let stats = lab.control.path_mtu_stats();
        assert_eq!((stats.messages, stats.lowered, stats.expired), (2, 2, 0));
        assert_eq!(lab.dropped(DropReason::BadIcmpQuote), 0);
    }
}

/// Writes the checksum of an ICMP message anew.
fn sign(message: &mut [u8]) {
    if message[12..14] == [8, 0] {
        message[36..38].fill(0);
        let sum = checksum::sum(&message[34..]).checksum();
        message[36..38].copy_from_slice(&sum.to_be_bytes());
    } else {
        let address = |at: usize| std::net::Ipv6Addr::from(*message[at..].first_chunk::<16>().unwrap());
        let (src, dst) = (address(22), address(38));
        checksum::icmpv6(src, dst, &mut message[54..]);
    }
}

#[test]
fn forged_messages_change_nothing() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let v4 = remote.contains('.');
        let mut lab = lab(remote);
        let before = remotes(&mut lab);
        let sent = send(&mut lab, false, 1500 - overhead(remote));
        let good = too_big(router(remote), &sent, 1400);
        // Offsets of the quoted IP, UDP and VXLAN headers, and of the last byte of an address.
        let ip = if v4 { 42 } else { 62 };
        let (src, dst, len) = if v4 { (ip + 15, ip + 19, ip + 2) } else { (ip + 23, ip + 39, ip + 4) };
        let l4 = ip + if v4 { 20 } else { 40 };
        let mtu = ip - 2;
        type Forge = Box<dyn Fn(&mut Vec<u8>)>;
        let set = |at: usize, value: u8| -> Forge { Box::new(move |it| it[at] = value) };
        let set16 = |at: usize, value: u16| -> Forge {
            Box::new(move |it| it[at..at + 2].copy_from_slice(&value.to_be_bytes()))
        };
        // A quoted packet of another length, whose length fields agree.
        let of_len = |total: u16| -> Forge {
            Box::new(move |it| {
                let udp = total - if v4 { 20 } else { 40 };
                it[len..len + 2].copy_from_slice(&if v4 { total } else { udp }.to_be_bytes());
                it[l4 + 4..l4 + 6].copy_from_slice(&udp.to_be_bytes());
            })
        };
        let mut forged: Vec<(&str, Forge)> = vec![
            ("another source", set(src, 77)),
            ("no remote", set(dst, 77)),
            ("another protocol", set(if v4 { ip + 9 } else { ip + 6 }, 6)),
            ("another version", set(ip, if v4 { 0x65 } else { 0x45 })),
            ("another UDP port", set16(l4 + 2, 4790)),
            ("a source port below the range", set16(l4, 49_999)),
            ("a source port above the range", set16(l4, 51_000)),
            ("a length that contradicts UDP", set16(l4 + 4, 1000)),
            ("a packet that fits", of_len(1400)),
            ("an MTU that the packet has", set16(mtu, 1500)),
            ("a larger MTU", set16(mtu, 9000)),
            ("no valid VXLAN header", set(l4 + 8, 0)),
            ("another VNI", set(l4 + 8 + 6, 44)),
            (
                "a quote without ports",
                Box::new(move |it| {
                    it.truncate(l4 + 7);
                    let short = (it.len() - 14) as u16;
                    let (at, short) = if v4 { (16, short) } else { (18, short - 40) };
                    it[at..at + 2].copy_from_slice(&short.to_be_bytes());
                    if v4 {
                        it[24..26].fill(0);
                        let sum = checksum::sum(&it[14..34]).checksum();
                        it[24..26].copy_from_slice(&sum.to_be_bytes());
                    }
                }),
            ),
        ];
        if v4 {
            forged.push(("options", set(ip, 0x46)));
            forged.push(("no DF", set16(ip + 6, 0)));
            forged.push(("a fragment", set16(ip + 6, 0x2000)));
        } else {
            forged.push(("the VNI of a segment without this remote", set(l4 + 8 + 6, 43)));
            forged.push(("less than IPv6 takes", set16(mtu, 1279)));
            forged.push(("none", set16(mtu, 0)));
            forged.push((
                "a later fragment",
                Box::new(move |it| {
                    it[ip + 6] = 44;
                    it[l4..l4 + 8].copy_from_slice(&[17, 0, 0, 8, 0, 0, 0, 1]);
                }),
            ));
        }
        for (count, (what, forge)) in (1..).zip(&forged) {
            let mut message = good.clone();
            forge(&mut message);
            sign(&mut message);
            lab.send(WAN, &message);
            assert_eq!(lab.settle(), [], "{what}");
            assert_eq!(lab.dropped(DropReason::BadIcmpQuote), count, "{remote} {what} {:?}", lab.stepped.drops());
        }
        let mut unsigned = good.clone();
        *unsigned.last_mut().unwrap() ^= 1;
        lab.send(WAN, &unsigned);
        let own = too_big(own(remote), &sent, 1400);
        lab.send(WAN, &own);
        lab.settle();
        assert_eq!((lab.dropped(DropReason::BadL4Checksum), lab.dropped(DropReason::BadSource)), (1, 1));
        // Other errors are none of these messages.
        let mut other = good.clone();
        other[if v4 { 35 } else { 54 }] = 1;
        sign(&mut other);
        lab.send(WAN, &other);
        lab.settle();
        assert_eq!(lab.dropped(DropReason::NotForUs), 1);
        assert_eq!(remotes(&mut lab), before);
        assert_eq!(lab.control.path_mtu_stats().messages, 0);
        // The message itself is valid. Over IPv4, eight bytes behind the quoted IP header suffice (RFC 792). ICMPv6
        // quotes more, with the identifier.
        let mut short = good.clone();
        short.truncate(l4 + 8);
        let total = (short.len() - 14) as u16;
        let (at, total) = if v4 { (16, total) } else { (18, total - 40) };
        short[at..at + 2].copy_from_slice(&total.to_be_bytes());
        if v4 {
            short[24..26].fill(0);
            let sum = checksum::sum(&short[14..34]).checksum();
            short[24..26].copy_from_slice(&sum.to_be_bytes());
        }
        sign(&mut short);
        lab.send(WAN, &short);
        lab.send(WAN, &good);
        lab.settle();
        let stats = lab.control.path_mtu_stats();
        assert_eq!((stats.messages, stats.lowered), (1 + u64::from(v4), 1), "{:?}", lab.stepped.drops());
        assert_eq!(lab.dropped(DropReason::BadIcmpQuote), forged.len() as u64 + u64::from(!v4));
    }
}

/// Every change of a single byte, and every truncation, is survived; what is accepted lowers no other path.
#[test]
fn damaged_messages_lower_no_other_path() {
    for remote in ["10.9.0.2", "fd00:9::2"] {
        let mut lab = lab(remote);
        let sent = send(&mut lab, false, 1500 - overhead(remote));
        let good = too_big(router(remote), &sent, 1400);
        let l3_end = if remote.contains('.') { 34 } else { 54 };
        for at in l3_end..good.len().min(l3_end + 100) {
            for bits in [1, 0x80, 0xff] {
                let mut message = good.clone();
                message[at] ^= bits;
                sign(&mut message);
                lab.send(WAN, &message);
                lab.send(WAN, &good[..at]);
                lab.settle();
            }
        }
        let lowered: Vec<String> = remotes(&mut lab).into_iter().filter(|row| row.2 < 1500).map(|row| row.0).collect();
        assert!(lowered.is_empty() || lowered == [remote], "{lowered:?}");
        for (address, _, path, _) in remotes(&mut lab) {
            let least = if address.contains('.') { 576 } else { 1280 };
            assert!(path >= least, "{address} {path}");
        }
    }
}

#[test]
fn small_mtus_are_bounded() {
    let mut lab = lab("10.9.0.2");
    let sent = send(&mut lab, false, 1450);
    // Routers without RFC 1191 report 0.
    lab.send(WAN, &too_big("192.0.2.9", &sent, 0));
    lab.settle();
    assert_eq!(remotes(&mut lab)[0], ("10.9.0.2".to_owned(), 576 - 50 + 14, 576, 1));
    // Nothing lowers it further: no packet of the gateway is longer now, but those in flight are quoted.
    lab.send(WAN, &too_big("192.0.2.9", &sent, 68));
    lab.settle();
    assert_eq!(remotes(&mut lab)[0].2, 576);
}

#[test]
fn a_path_is_probed_again_after_ten_minutes() {
    let mut lab = lab("10.9.0.2");
    let sent = send(&mut lab, false, 1450);
    lab.send(WAN, &too_big("192.0.2.9", &sent, 1300));
    lab.settle();
    let since = lab.stepped.with_plane(|plane| plane.seconds());
    let live = |lab: &mut Lab| {
        lab.stepped.advance(SECOND);
        // The host stays known.
        lab.send(LAN, &frame(FAR, HOST));
        let peer = lab.peer.as_ref().unwrap().addresses().clone();
        lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
        lab.settle();
        lab.stepped.with_plane(|plane| plane.seconds())
    };
    while live(&mut lab) < since + 599 {}
    assert_eq!(remotes(&mut lab)[0].2, 1300);
    assert_eq!(reported(&send(&mut lab, false, 1450)), (3, 1250));
    live(&mut lab);
    assert_eq!((remotes(&mut lab)[0].2, lab.control.path_mtu_stats().expired), (1500, 1));
    // The next packet probes the path, and the router answers again.
    let sent = send(&mut lab, false, 1450);
    assert_eq!(sent.len(), 1514);
    lab.send(WAN, &too_big("192.0.2.9", &sent, 1300));
    lab.settle();
    assert_eq!((remotes(&mut lab)[0].2, lab.control.path_mtu_stats().lowered), (1300, 2));
}

#[test]
fn messages_are_limited() {
    let mut lab = lab("10.9.0.2");
    let sent = send(&mut lab, false, 1450);
    for step in 0..100 {
        lab.send(WAN, &too_big("192.0.2.9", &sent, 1499 - step));
        lab.settle();
    }
    let stats = lab.control.path_mtu_stats();
    assert_eq!((stats.messages, lab.dropped(DropReason::RateLimited)), (10, 90));
    assert_eq!(remotes(&mut lab)[0].2, 1490);
}

fn change(lab: &mut Lab, text: &str) {
    let source = Source::new("test", text);
    let document = source.parse().unwrap();
    let config = wirepath_pipeline::tunnel::GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
    let seconds = lab.stepped.with_plane(|plane| plane.seconds());
    let change = lab.control.prepare(config, seconds).unwrap();
    let pool = lab.pool.clone();
    let port = |id, name: &str, mac| wirepath_pipeline::PortInfo::simulated(id, name, mac, 1500, &pool);
    let ports = [port(WAN, "wan", Some(crate::lab::US)), port(LAN, "lan", None)];
    lab.control.reconfigure(change, &ports, seconds);
    lab.settle();
}

#[test]
fn a_path_lasts_as_long_as_its_remote() {
    let text = |ttl: u8, remotes: &str| {
        format!(
            "[underlay]\nport = 'wan'\nttl = {ttl}\nsource_ports = '50000-50999'\n\
             addresses = ['10.9.0.1/24', 'fd00:9::1/64']\n[[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\n\
             remotes = [{remotes}]\n"
        )
    };
    let mut lab = lab("10.9.0.2");
    let sent = send(&mut lab, false, 1450);
    lab.send(WAN, &too_big("192.0.2.9", &sent, 1300));
    lab.settle();
    // Other settings change the templates, not the paths.
    change(&mut lab, &text(9, "'10.9.0.5', '10.9.0.2'"));
    let found: Vec<_> = remotes(&mut lab).into_iter().map(|row| (row.0, row.1, row.2)).collect();
    assert!(found.contains(&("10.9.0.2".to_owned(), 1264, 1300)), "{found:?}");
    assert_eq!(reported(&send(&mut lab, false, 1450)), (3, 1250));
    change(&mut lab, &text(9, "'10.9.0.5'"));
    change(&mut lab, &text(9, "'10.9.0.5', '10.9.0.2'"));
    assert!(remotes(&mut lab).iter().all(|row| row.2 == 1500));
}

/// The router of a layer-3 tunnel sees the lower MTU.
#[test]
fn layer_3_tunnels() {
    for (keys, header) in [
        ("kind = 'ipip'", 0),
        ("kind = 'gre'\nvni = 7", 8),
        ("kind = 'geneve'\nvni = 42\npayload = 'ip'", 16),
        ("kind = 'mpls-udp'\nvni = 42\npayload = 'ip'", 12),
        ("kind = 'mpls-gre'\nvni = 42\npayload = 'ip'", 8),
    ] {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let (mut lab, mut host) = crate::ip_payload::tunnel_of(keys, remote, "");
            // Known hosts are published with the next tick of the neighbours.
            lab.stepped.advance(SECOND);
            crate::ip_payload::settle(&mut lab, &mut host);
            let taken = header + if remote.contains('.') { 20 } else { 40 };
            let mut expected = 1500;
            for (mtu, v6) in [(1420, false), (1360, true)] {
                let long = |len: usize, v6: bool| {
                    let (src, dst) = if v6 { ("fd01::10", "fd02::10") } else { ("10.1.0.10", "10.2.0.10") };
                    let body = udp(len - if v6 { 40 } else { 20 });
                    packet(crate::lab::US, HOST, src, dst, 64, IpProtocol::UDP, &body)
                };
                lab.send(LAN, &long(expected - taken, v6));
                let sent = crate::ip_payload::settle(&mut lab, &mut host);
                assert_eq!((sent.len(), sent[0].0, sent[0].1.len()), (1, WAN, 14 + expected), "{keys} {remote}");
                lab.send(WAN, &too_big(router(remote), &sent[0].1, mtu));
                crate::ip_payload::settle(&mut lab, &mut host);
                expected = usize::from(mtu);
                for v6 in [false, true] {
                    lab.send(LAN, &long(expected - taken, v6));
                    let sent = crate::ip_payload::settle(&mut lab, &mut host);
                    assert_eq!((sent.len(), sent[0].0, sent[0].1.len()), (1, WAN, 14 + expected), "{keys} {remote}");
                    lab.send(LAN, &long(expected - taken + 1, v6));
                    let sent = crate::ip_payload::settle(&mut lab, &mut host);
                    assert_eq!((sent.len(), sent[0].0), (1, LAN), "{keys} {remote} {:?}", lab.stepped.drops());
                    assert_eq!(reported(&sent[0].1), (if v6 { 2 } else { 3 }, expected - taken), "{keys} {remote}");
                }
            }
            assert_eq!(lab.dropped(DropReason::BadIcmpQuote), 0);
            // The other key is no tunnel of the gateway.
            if keys.contains("'gre'") {
                let body = udp(expected - taken - 20);
                lab.send(LAN, &packet(crate::lab::US, HOST, "10.1.0.10", "10.2.0.10", 64, IpProtocol::UDP, &body));
                let sent = crate::ip_payload::settle(&mut lab, &mut host);
                let mut forged = too_big(router(remote), &sent[0].1, 1300);
                let key = if remote.contains('.') { 42 + 20 + 7 } else { 62 + 40 + 7 };
                assert_eq!(forged[key], 7);
                forged[key] = 8;
                sign(&mut forged);
                lab.send(WAN, &forged);
                assert_eq!(crate::ip_payload::settle(&mut lab, &mut host), []);
                assert_eq!(lab.dropped(DropReason::BadIcmpQuote), 1);
            }
        }
    }
}

/// A remote that was learned has a path as soon as a frame had to be sent to it.
#[test]
fn learned_remotes() {
    let mut lab = Lab::new("accept_unknown_remotes = true").with_peer();
    lab.settle();
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    let sent = send_once(&mut lab);
    lab.stepped.advance(SECOND);
    lab.settle();
    lab.send(WAN, &too_big("192.0.2.9", &sent, 1300));
    lab.settle();
    assert_eq!(remotes(&mut lab), [("10.9.0.2".to_owned(), 1264, 1300, 1)], "{:?}", lab.stepped.drops());
}

/// Sends the first long packet to a learned remote, which waits for its next hop.
fn send_once(lab: &mut Lab) -> Vec<u8> {
    lab.send(LAN, &packet(FAR, HOST, "10.1.0.1", "10.1.0.2", 64, IpProtocol::UDP, &udp(1450 - 20)));
    let sent = lab.settle();
    sent.into_iter().map(|(_, bytes)| bytes).find(|bytes| parse(bytes).is_ok_and(|it| it.vni().is_some())).unwrap()
}
