//! Remotes that leave and return by BFD, with scripted peers and simulated time.

use std::collections::HashSet;
use std::net::IpAddr;

use serde_json::Value;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::Control;
use wirepath_pipeline::tunnel::underlay::{Addresses, UnderlayHost};
use wirepath_pipeline::tunnel::{ExternalChanges, ExternalPlace, GatewayConfig};
use wirepath_pmd::port::{Link, LinkState, PortEvent};
use wirepath_settings::Source;
use wirepath_wire::{EtherType, IpProtocol, MacAddr, Vni, checksum, ethernet, ipv4, ipv6, parse, udp};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, US, WAN, frame, tagged, vxlan, vxlan_with};

const MS: u64 = SECOND / 1000;
/// Interval of the packets of a remote, shorter than the 300 ms that it announces.
const INTERVAL: u64 = 250 * MS;
const SINGLE_HOP: u16 = 3784;
const MULTIHOP: u16 = 4784;
/// Management VNI of sessions in tunnels, and the destination of their inner frames.
const MANAGEMENT: u32 = 4095;
const MANAGEMENT_MAC: MacAddr = MacAddr([0, 0, 0x5e, 0, 0x52, 2]);
// States on the wire (RFC 5880 section 4.1).
const ADMIN_DOWN: u8 = 0;
const DOWN: u8 = 1;
const INIT: u8 = 2;
const UP: u8 = 3;

/// A remote that sends every [`INTERVAL`], and answers each packet of the gateway at once.
#[derive(Clone, Debug)]
struct Far {
    address: IpAddr,
    state: u8,
    mine: u32,
    yours: u32,
    /// Source port of the gateway.
    source_port: u16,
    port: u16,
    ttl: u8,
    /// VNI of its packets; `None`: they are outside of tunnels.
    vni: Option<u32>,
    silent: bool,
    /// Time until its next packet.
    rest: u64,
    /// States that the gateway sent.
    seen: Vec<u8>,
    polls: usize,
}

impl Far {
    fn new(address: &str, mine: u32) -> Self {
        let address = address.parse().unwrap();
        let (port, ttl) = (SINGLE_HOP, 255);
        Self {
            address,
            state: DOWN,
            mine,
            yours: 0,
            source_port: 0,
            port,
            ttl,
            vni: None,
            silent: false,
            rest: 0,
            seen: vec![],
            polls: 0,
        }
    }

    /// Returns a control packet in its present state.
    fn packet(&self, is_final: bool) -> [u8; 24] {
        let mut out = [0; 24];
        out[..4].copy_from_slice(&[0x20, self.state << 6 | u8::from(is_final) << 4, 3, 24]);
        out[4..8].copy_from_slice(&self.mine.to_be_bytes());
        out[8..12].copy_from_slice(&self.yours.to_be_bytes());
        out[12..16].copy_from_slice(&300_000u32.to_be_bytes());
        out[16..20].copy_from_slice(&300_000u32.to_be_bytes());
        out
    }

    fn frame(&self, payload: &[u8]) -> Vec<u8> {
        if let Some(vni) = self.vni {
            return self.wrap(vni, &self.inner(MANAGEMENT_MAC, self.loopback(), payload));
        }
        let local = if self.address.is_ipv4() { "10.9.0.1" } else { "fd00:9::1" };
        datagram((PEER, US), (self.address, local.parse().unwrap()), (49_152, self.port), self.ttl, payload)
    }

    fn in_vxlan(self) -> Self {
        Self { vni: Some(MANAGEMENT), ..self }
    }

    fn loopback(&self) -> &'static str {
        if self.address.is_ipv4() { "127.0.0.1" } else { "::ffff:127.0.0.1" }
    }

    /// Returns the frame of a control packet inside the tunnel.
    fn inner(&self, mac: MacAddr, to: &str, payload: &[u8]) -> Vec<u8> {
        datagram((PEER, mac), (self.address, to.parse().unwrap()), (49_152, self.port), self.ttl, payload)
    }

    fn wrap(&self, vni: u32, inner: &[u8]) -> Vec<u8> {
        let from = Addresses { mac: PEER, addresses: addresses(&[&self.address.to_string()]), gateways: vec![] };
        vxlan_with(&from, vni, inner)
    }

    /// Takes a packet of the gateway and returns the answer.
    fn handle(&mut self, source_port: u16, packet: &[u8]) -> Option<Vec<u8>> {
        let (theirs, is_poll) = (packet[1] >> 6, packet[1] & 0x20 != 0);
        self.seen.push(theirs);
        self.polls += usize::from(is_poll);
        if self.silent {
            return None;
        }
        self.source_port = source_port;
        self.yours = u32::from_be_bytes(*packet[4..].first_chunk().unwrap());
        self.state = match (self.state, theirs) {
            (ADMIN_DOWN, _) => ADMIN_DOWN,
            (_, ADMIN_DOWN) | (UP, DOWN) => DOWN,
            (DOWN, DOWN) => INIT,
            (DOWN, INIT) | (INIT, INIT | UP) => UP,
            (state, _) => state,
        };
        Some(self.frame(&self.packet(is_poll)))
    }
}

/// Returns a UDP datagram in an Ethernet frame.
pub(crate) fn datagram(
    (src_mac, dst_mac): (MacAddr, MacAddr),
    (from, to): (IpAddr, IpAddr),
    (src_port, dst_port): (u16, u16),
    ttl: u8,
    payload: &[u8],
) -> Vec<u8> {
    let mut body = vec![0; 8 + payload.len()];
    udp::Repr { src_port, dst_port, payload_len: payload.len() as u16 }.emit(&mut body).unwrap();
    body[8..].copy_from_slice(payload);
    let mut out = vec![0; 14 + 40];
    let ethertype = if from.is_ipv4() { EtherType::IPV4 } else { EtherType::IPV6 };
    ethernet::Repr { dst: dst_mac, src: src_mac, ethertype }.emit(&mut out).unwrap();
    let (protocol, payload_len, traffic_class) = (IpProtocol::UDP, body.len() as u16, 0);
    match (from, to) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            checksum::udp4(src, dst, &mut body);
            ipv4::Repr { src, dst, protocol, payload_len, ttl, traffic_class, ident: 0, fragment_word: 0 }
                .emit(&mut out[14..])
                .unwrap();
            out.truncate(34);
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            checksum::udp6(src, dst, &mut body);
            ipv6::Repr { src, dst, next_header: protocol, payload_len, hop_limit: ttl, traffic_class, flow_label: 0 }
                .emit(&mut out[14..])
                .unwrap();
        }
        _ => panic!("two IP versions"),
    }
    out.extend_from_slice(&body);
    out
}

/// A BFD packet of the gateway.
struct SentPacket {
    to: IpAddr,
    /// VNI of the tunnel that carries it.
    vni: Option<u32>,
    source_port: u16,
    port: u16,
    packet: Vec<u8>,
}

fn bfd_packet(bytes: &[u8]) -> Option<SentPacket> {
    let parsed = parse(bytes).ok()?;
    let vni = parsed.vni().map(Vni::get);
    let view = parsed.innermost().udp(bytes)?;
    if ![SINGLE_HOP, MULTIHOP].contains(&view.dst_port()) {
        return None;
    }
    let (_, to) = parsed.outer().ip_addresses(bytes)?;
    let (source_port, port) = (view.src_port(), view.dst_port());
    Some(SentPacket { to, vni, source_port, port, packet: view.payload().to_vec() })
}

/// Lets time pass. Returns the sent frames that are neither BFD nor resolution.
fn run(lab: &mut Lab, fars: &mut [Far], time: u64) -> Vec<(PortId, Vec<u8>)> {
    let mut others = Vec::new();
    for _ in 0..time / (10 * MS) {
        lab.stepped.advance(10 * MS);
        for far in fars.iter_mut() {
            far.rest = far.rest.saturating_sub(10 * MS);
            if far.rest == 0 && !far.silent {
                far.rest = INTERVAL;
                lab.send(WAN, &far.frame(&far.packet(false)));
            }
        }
        for (port, bytes) in lab.settle() {
            let Some(SentPacket { to, vni, source_port, port: to_port, packet }) = bfd_packet(&bytes) else {
                others.push((port, bytes));
                continue;
            };
            let far = fars.iter_mut().find(|far| (far.address, far.port, far.vni) == (to, to_port, vni));
            // A session that was removed says so.
            let Some(far) = far else {
                assert_eq!(packet[1] >> 6, ADMIN_DOWN, "a packet to {to} port {to_port}");
                continue;
            };
            if let Some(answer) = far.handle(source_port, &packet) {
                lab.send(WAN, &answer);
            }
        }
    }
    others
}

fn addresses(list: &[&str]) -> Vec<wirepath_pipeline::tunnel::underlay::Prefix> {
    list.iter().map(|it| format!("{it}/{}", if it.contains(':') { 64 } else { 24 }).parse().unwrap()).collect()
}

/// Creates a gateway with tables behind the segment. One host has the addresses of all remotes.
fn lab(segment: &str, tables: &str) -> Lab {
    let text = format!("[[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\n{segment}\n{tables}");
    with_remotes(Lab::of_segments("", &text))
}

fn with_remotes(mut lab: Lab) -> Lab {
    let addresses = addresses(&["10.9.0.2", "10.9.0.3", "10.9.0.4", "fd00:9::2"]);
    lab.peer = Some(UnderlayHost::new(Addresses { mac: PEER, addresses, gateways: vec![] }));
    lab
}

/// Sends a frame of the local host. Returns the remotes that get it.
fn reached(lab: &mut Lab, destination: MacAddr) -> HashSet<IpAddr> {
    lab.send(LAN, &frame(destination, HOST));
    let remote = |bytes: &[u8]| {
        let parsed = parse(bytes).ok()?;
        parsed.vni().filter(|vni| vni.get() == 42)?;
        let layers = parsed.outer();
        Some(layers.ipv4(bytes).map_or_else(|| layers.ipv6(bytes).unwrap().dst().into(), |ip| ip.dst().into()))
    };
    lab.sent().iter().filter(|(port, _)| *port == WAN).filter_map(|(_, bytes)| remote(bytes)).collect()
}

fn set(list: &[&str]) -> HashSet<IpAddr> {
    list.iter().map(|it| it.parse().unwrap()).collect()
}

/// Receives a frame of the host FAR from a remote.
fn hear(lab: &mut Lab, remote: &str) {
    let from = Addresses { mac: PEER, addresses: addresses(&[remote]), gateways: vec![] };
    lab.send(WAN, &vxlan(&from, &frame(HOST, FAR)));
    lab.stepped.control(&mut lab.control);
    lab.sent();
}

/// Returns a column of the table of sessions.
fn column(lab: &mut Lab, name: &str) -> Vec<Value> {
    const COLUMNS: [&str; 17] = [
        "remote",
        "local",
        "mode",
        "state",
        "remote_state",
        "diagnostic",
        "remote_diagnostic",
        "up",
        "carries",
        "since",
        "transmit_interval",
        "detection_time",
        "rx_packets",
        "tx_packets",
        "refused",
        "ups",
        "downs",
    ];
    let at = COLUMNS.iter().position(|it| *it == name).unwrap();
    lab.rows("bfd").into_iter().map(|row| row[at].clone()).collect()
}

const GROUP: MacAddr = MacAddr([0xff; 6]);
const BFD: &str = "[bfd]\n";
const IN_VXLAN: &str = "[bfd]\nmanagement_vni = 4095\n";

#[test]
fn a_remote_leaves_and_returns() {
    for (watched, other) in [("10.9.0.2", "10.9.0.3"), ("fd00:9::2", "10.9.0.3")] {
        let mut lab = lab(
            &format!(
                "remotes = ['{watched}', '{other}']\nstatic = [{{ mac = '02:00:00:00:00:77', remote = '{watched}' }}]"
            ),
            &format!("{BFD}except = ['{other}']\n"),
        );
        let fixed = MacAddr([2, 0, 0, 0, 0, 0x77]);
        let mut fars = [Far::new(watched, 9)];
        fars[0].silent = true;
        run(&mut lab, &mut fars, 100 * MS);
        // Before the session is up, the remote carries nothing.
        assert_eq!(reached(&mut lab, GROUP), set(&[other]));
        assert_eq!((reached(&mut lab, fixed), lab.dropped(DropReason::RemoteDown)), (set(&[]), 1));
        fars[0].silent = false;
        run(&mut lab, &mut fars, 3 * SECOND);
        assert_eq!(column(&mut lab, "state"), ["up"], "{:?}", lab.stepped.drops());
        assert_eq!(reached(&mut lab, GROUP), set(&[watched, other]));
        assert_eq!(reached(&mut lab, fixed), set(&[watched]));
        assert_eq!(column(&mut lab, "transmit_interval"), [0.3]);
        assert_eq!(column(&mut lab, "detection_time"), [0.9]);
        assert!(fars[0].source_port >= 49_152 && fars[0].polls >= 1, "{:?}", fars[0]);
        // Learned addresses leave with the remote.
        hear(&mut lab, watched);
        assert_eq!((reached(&mut lab, FAR), lab.control.fdb_entries()), (set(&[watched]), 3));
        fars[0].silent = true;
        run(&mut lab, &mut fars, 500 * MS);
        assert_eq!(reached(&mut lab, FAR), set(&[watched]), "the detection time has not passed");
        run(&mut lab, &mut fars, 420 * MS);
        assert_eq!(column(&mut lab, "diagnostic"), ["control detection time expired"]);
        assert_eq!((reached(&mut lab, FAR), lab.control.fdb_entries()), (set(&[other]), 2));
        // Nothing is learned from it, so that its hosts stay with the others.
        hear(&mut lab, watched);
        assert_eq!(reached(&mut lab, FAR), set(&[other]));
        let states: Vec<Value> = lab.rows("remotes").into_iter().map(|row| row[6].clone()).collect();
        assert!(states.contains(&"down".into()) && states.contains(&"ready".into()), "{states:?}");
        (fars[0].silent, fars[0].state, fars[0].yours, fars[0].mine) = (false, DOWN, 0, 10);
        run(&mut lab, &mut fars, 3 * SECOND);
        assert_eq!(reached(&mut lab, GROUP), set(&[watched, other]));
        hear(&mut lab, watched);
        assert_eq!((reached(&mut lab, FAR), reached(&mut lab, fixed)), (set(&[watched]), set(&[watched])));
        assert_eq!((column(&mut lab, "ups"), column(&mut lab, "downs")), (vec![2.into()], vec![1.into()]));
        lab.settle();
        assert_eq!(lab.dropped(DropReason::NotForUs), 0);
    }
}

#[test]
fn a_backup_carries_only_while_its_primary_is_down() {
    let mut lab = lab(
        "remotes = ['10.9.0.2', '10.9.0.3', '10.9.0.4']\nbackups = [{ primary = '10.9.0.2', backup = '10.9.0.3' }]\n\
         static = [{ mac = '02:00:00:00:00:77', remote = '10.9.0.2' }]",
        "[bfd]\nexcept = ['10.9.0.4']\n",
    );
    let fixed = MacAddr([2, 0, 0, 0, 0, 0x77]);
    let mut fars = [Far::new("10.9.0.2", 2), Far::new("10.9.0.3", 3)];
    run(&mut lab, &mut fars, 4 * SECOND);
    assert_eq!(column(&mut lab, "state"), ["up", "up"]);
    let third = "10.9.0.4";
    assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.2", third]));
    hear(&mut lab, "10.9.0.3");
    assert_eq!(reached(&mut lab, FAR), set(&["10.9.0.2", third]), "nothing is learned behind a backup that waits");
    let states: Vec<Value> = lab.rows("remotes").into_iter().map(|row| row[6].clone()).collect();
    assert_eq!(states, ["ready", "standby", "ready"]);
    hear(&mut lab, "10.9.0.2");
    assert_eq!((reached(&mut lab, FAR), reached(&mut lab, fixed)), (set(&["10.9.0.2"]), set(&["10.9.0.2"])));
    fars[0].silent = true;
    run(&mut lab, &mut fars, SECOND);
    assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.3", third]));
    assert_eq!((reached(&mut lab, FAR), reached(&mut lab, fixed)), (set(&["10.9.0.3", third]), set(&["10.9.0.3"])));
    hear(&mut lab, "10.9.0.3");
    assert_eq!(reached(&mut lab, FAR), set(&["10.9.0.3"]));
    // Both are down.
    fars[1].silent = true;
    run(&mut lab, &mut fars, SECOND);
    assert_eq!((reached(&mut lab, GROUP), reached(&mut lab, fixed)), (set(&[third]), set(&[])));
    // The primary returns, then the backup.
    (fars[0].silent, fars[1].silent, fars[0].state, fars[1].state) = (false, false, DOWN, DOWN);
    run(&mut lab, &mut fars, 4 * SECOND);
    assert_eq!(column(&mut lab, "state"), ["up", "up"]);
    assert_eq!((reached(&mut lab, GROUP), reached(&mut lab, fixed)), (set(&["10.9.0.2", third]), set(&["10.9.0.2"])));
    assert_eq!(reached(&mut lab, FAR), set(&["10.9.0.2", third]), "addresses learned behind the backup are gone");
}

/// Sends a packet that is dropped for this reason. Returns the frames that the gateway sends meanwhile.
#[track_caller]
fn refused(lab: &mut Lab, reason: DropReason, bytes: &[u8]) -> Vec<(PortId, Vec<u8>)> {
    let before = lab.dropped(reason);
    lab.send(WAN, bytes);
    let sent = lab.settle();
    assert_eq!(lab.dropped(reason), before + 1, "{reason:?}: {:?}", lab.stepped.drops());
    sent
}

#[test]
fn hostile_packets_are_counted_and_change_nothing() {
    let mut lab = lab("remotes = ['10.9.0.2', 'fd00:9::2']", BFD);
    let mut fars = [Far::new("10.9.0.2", 2), Far::new("fd00:9::2", 3)];
    run(&mut lab, &mut fars, 4 * SECOND);
    assert_eq!(column(&mut lab, "state"), ["up", "up"]);
    for at in 0..2 {
        let good = fars[at].clone();
        let down = Far { state: DOWN, ..good.clone() };
        let mut check = |reason: DropReason, bytes: &[u8]| _ = refused(&mut lab, reason, bytes);
        check(DropReason::BfdTtl, &Far { ttl: 254, ..down.clone() }.frame(&down.packet(false)));
        check(DropReason::BfdNoSession, &Far { port: MULTIHOP, ..down.clone() }.frame(&down.packet(false)));
        check(DropReason::BfdNoSession, &down.frame(&Far { yours: good.yours ^ 1, ..down.clone() }.packet(false)));
        let twin: IpAddr = if at == 0 { "10.9.0.3" } else { "fd00:9::3" }.parse().unwrap();
        check(DropReason::BfdNoSession, &Far { address: twin, ..down.clone() }.frame(&down.packet(false)));
        // The discriminator of one session with the addresses of another one.
        let other = fars[1 - at].yours;
        check(DropReason::BfdNoSession, &down.frame(&Far { yours: other, ..down.clone() }.packet(false)));
        check(DropReason::BfdInvalid, &down.frame(&down.packet(false)[..11]));
        check(DropReason::BfdInvalid, &down.frame(&down.packet(false)[..23]));
        check(DropReason::BfdInvalid, &down.frame(&Far { mine: 0, ..down.clone() }.packet(false)));
        let mut version = down.packet(false);
        version[0] = 0x40;
        check(DropReason::BfdInvalid, &down.frame(&version));
        let mut authenticated = [&down.packet(false)[..], &[1, 4, 1, 0]].concat();
        (authenticated[1], authenticated[3]) = (authenticated[1] | 4, 28);
        check(DropReason::BfdAuthentication, &down.frame(&authenticated));
        let mut broken = down.frame(&down.packet(false));
        *broken.last_mut().unwrap() ^= 1;
        check(DropReason::BadL4Checksum, &broken);
        let mut other_port = down.frame(&down.packet(false));
        let at = other_port.len() - 24 - 6;
        other_port[at..at + 2].copy_from_slice(&3785u16.to_be_bytes());
        check(DropReason::NotForUs, &other_port);
    }
    run(&mut lab, &mut fars, SECOND);
    assert_eq!(column(&mut lab, "downs"), [0, 0]);
    // The control thread refused some of them, for the session of their address.
    assert!(column(&mut lab, "refused").iter().all(|it| it.as_u64().unwrap() >= 3));
    // A flood of forged packets without the discriminator takes none of the session's own limit.
    let flood = fars[0].frame(&Far { yours: 0, state: ADMIN_DOWN, ..fars[0].clone() }.packet(false)[..24]);
    let forged: Vec<Vec<u8>> = (0..20_000).map(|_| flood.clone()).collect();
    let punted = lab.stepped.punted();
    lab.send_all(WAN, forged.iter().map(Vec::as_slice));
    assert!(lab.stepped.punted() - punted <= 20, "{}", lab.stepped.punted() - punted);
    assert!(lab.dropped(DropReason::RateLimited) > 19_000);
    run(&mut lab, &mut fars, 4 * SECOND);
    assert_eq!(column(&mut lab, "state"), ["up", "up"]);
}

#[test]
fn every_change_of_one_byte_is_survived() {
    for (tables, far) in [(BFD, Far::new("10.9.0.2", 2)), (IN_VXLAN, Far::new("10.9.0.2", 2).in_vxlan())] {
        let mut lab = lab("remotes = ['10.9.0.2']", tables);
        let headers = if far.vni.is_some() { vec![0, 50] } else { vec![0] };
        let mut fars = [far];
        run(&mut lab, &mut fars, 3 * SECOND);
        let good = fars[0].frame(&fars[0].packet(false));
        for at in 0..good.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff, good[at] ^ 0x20] {
                let mut bytes = good.clone();
                bytes[at] = value;
                // As a hostile sender would write it.
                for start in &headers {
                    let ip = &mut bytes[start + 14..];
                    ip[26..28].fill(0);
                    ip[10..12].fill(0);
                    let sum = checksum::ipv4_header(&ip[..20]);
                    ip[10..12].copy_from_slice(&sum.to_be_bytes());
                }
                lab.send(WAN, &bytes);
                lab.send(WAN, &bytes[..at]);
                lab.stepped.advance(MS);
                lab.settle();
            }
        }
        (fars[0].state, fars[0].yours) = (DOWN, 0);
        run(&mut lab, &mut fars, 5 * SECOND);
        assert_eq!(column(&mut lab, "state"), ["up"], "{:?}", lab.stepped.drops());
    }
}

/// The session of a remote in VXLAN tunnels takes it out and back. The packets have the form of RFC 8971 section 5.
#[test]
fn a_remote_leaves_and_returns_by_packets_in_vxlan() {
    for (watched, other) in [("10.9.0.2", "10.9.0.3"), ("fd00:9::2", "10.9.0.3")] {
        let mut lab = lab(&format!("remotes = ['{watched}', '{other}']"), &format!("{IN_VXLAN}except = ['{other}']\n"));
        let mut fars = [Far::new(watched, 9).in_vxlan()];
        fars[0].silent = true;
        run(&mut lab, &mut fars, 100 * MS);
        assert_eq!(reached(&mut lab, GROUP), set(&[other]));
        lab.stepped.advance(SECOND);
        lab.stepped.control(&mut lab.control);
        let sent = lab.sent().into_iter().find_map(|(_, bytes)| bfd_packet(&bytes).map(|_| bytes)).unwrap();
        let parsed = parse(&sent).unwrap();
        let inner = *parsed.inner().unwrap();
        let (from, to) = inner.ip_addresses(&sent).unwrap();
        let (local, _) = parsed.outer().ip_addresses(&sent).unwrap();
        let macs = inner.ethernet(&sent).map(|ethernet| (ethernet.src(), ethernet.dst()));
        assert_eq!((macs, parsed.vni().map(Vni::get)), (Some((US, MANAGEMENT_MAC)), Some(MANAGEMENT)));
        assert_eq!((from, to), (local, fars[0].loopback().parse().unwrap()));
        assert_eq!((inner.hop_limit(&sent), inner.udp(&sent).unwrap().dst_port()), (Some(255), SINGLE_HOP));
        fars[0].silent = false;
        run(&mut lab, &mut fars, 3 * SECOND);
        assert_eq!(column(&mut lab, "state"), ["up"], "{:?}", lab.stepped.drops());
        assert_eq!(column(&mut lab, "mode"), ["vxlan"]);
        assert_eq!(reached(&mut lab, GROUP), set(&[watched, other]));
        assert!(fars[0].source_port >= 49_152 && fars[0].polls >= 1, "{:?}", fars[0]);
        fars[0].silent = true;
        run(&mut lab, &mut fars, 500 * MS);
        assert_eq!(reached(&mut lab, GROUP), set(&[watched, other]), "the detection time has not passed");
        run(&mut lab, &mut fars, 420 * MS);
        assert_eq!(column(&mut lab, "diagnostic"), ["control detection time expired"]);
        assert_eq!(reached(&mut lab, GROUP), set(&[other]));
        (fars[0].silent, fars[0].state, fars[0].yours, fars[0].mine) = (false, DOWN, 0, 10);
        run(&mut lab, &mut fars, 3 * SECOND);
        assert_eq!(reached(&mut lab, GROUP), set(&[watched, other]));
        assert_eq!((column(&mut lab, "ups"), column(&mut lab, "downs")), (vec![2.into()], vec![1.into()]));
        for reason in [DropReason::NotForUs, DropReason::UnknownVni, DropReason::BfdInvalid] {
            assert_eq!(lab.dropped(reason), 0);
        }
    }
}

#[test]
fn hostile_packets_in_vxlan_are_counted_and_change_nothing() {
    let mut lab = lab("remotes = ['10.9.0.2', 'fd00:9::2']", IN_VXLAN);
    let mut fars = [Far::new("10.9.0.2", 2).in_vxlan(), Far::new("fd00:9::2", 3).in_vxlan()];
    run(&mut lab, &mut fars, 4 * SECOND);
    assert_eq!(column(&mut lab, "state"), ["up", "up"]);
    for at in 0..2 {
        let good = fars[at].clone();
        let down = Far { state: DOWN, ..good.clone() };
        let mut check = |reason: DropReason, bytes: &[u8]| {
            let sent = refused(&mut lab, reason, bytes);
            assert!(sent.iter().all(|(port, _)| *port == WAN), "no tenant gets it");
        };
        let packet = down.packet(false);
        let inner = down.inner(MANAGEMENT_MAC, good.loopback(), &packet);
        let other = fars[1 - at].yours;
        let twin: IpAddr = if at == 0 { "10.9.0.3" } else { "fd00:9::3" }.parse().unwrap();
        check(DropReason::BfdTtl, &Far { ttl: 254, ..down.clone() }.frame(&packet));
        check(DropReason::UnknownVni, &Far { vni: Some(MANAGEMENT + 1), ..down.clone() }.frame(&packet));
        // The VNI of a segment is no management VNI, and its hosts do not get the packet.
        check(DropReason::BfdNoSession, &Far { vni: Some(42), ..down.clone() }.frame(&packet));
        check(DropReason::BfdNoSession, &Far { vni: None, ..down.clone() }.frame(&packet));
        check(DropReason::BfdNoSession, &Far { address: twin, ..down.clone() }.frame(&packet));
        for yours in [good.yours ^ 1, other] {
            check(DropReason::BfdNoSession, &down.frame(&Far { yours, ..down.clone() }.packet(false)));
        }
        check(DropReason::BfdInvalid, &Far { port: MULTIHOP, ..down.clone() }.frame(&packet));
        let tenant = if at == 0 { "10.1.0.9" } else { "fd00:1::9" };
        check(DropReason::BfdInvalid, &down.wrap(MANAGEMENT, &down.inner(MANAGEMENT_MAC, tenant, &packet)));
        check(DropReason::BfdInvalid, &down.wrap(MANAGEMENT, &tagged(&inner, 7)));
        check(DropReason::BfdInvalid, &down.wrap(MANAGEMENT, &frame(MANAGEMENT_MAC, PEER)));
        check(DropReason::TooShort, &down.wrap(MANAGEMENT, &inner[..13]));
        check(DropReason::BfdInvalid, &down.frame(&packet[..11]));
        check(DropReason::BfdInvalid, &down.frame(&packet[..23]));
        check(DropReason::BfdInvalid, &down.frame(&Far { mine: 0, ..down.clone() }.packet(false)));
        let mut broken = inner.clone();
        *broken.last_mut().unwrap() ^= 1;
        check(DropReason::BadL4Checksum, &down.wrap(MANAGEMENT, &broken));
    }
    run(&mut lab, &mut fars, SECOND);
    assert_eq!(column(&mut lab, "downs"), [0, 0]);
    // RFC 8971 section 5 recommends the inner addresses without requiring them.
    for (at, own) in ["10.9.0.1", "fd00:9::1"].into_iter().enumerate() {
        let down = Far { state: DOWN, ..fars[at].clone() };
        let inner = down.inner(MacAddr([0, 0x52, 2, 0, 0, 0]), own, &down.packet(false));
        lab.send(WAN, &down.wrap(MANAGEMENT, &inner));
        lab.settle();
        assert_eq!(column(&mut lab, "downs").iter().filter(|it| **it == 1).count(), at + 1);
    }
}

#[test]
fn a_remote_that_stops_leaves_or_stays() {
    for (policy, stays) in [("leave", false), ("stay", true)] {
        let mut lab = lab("remotes = ['10.9.0.2']", &format!("[bfd]\npeer_admin_down = '{policy}'\n"));
        let mut fars = [Far::new("10.9.0.2", 2)];
        run(&mut lab, &mut fars, 3 * SECOND);
        fars[0].state = ADMIN_DOWN;
        run(&mut lab, &mut fars, SECOND);
        assert_eq!(
            (column(&mut lab, "state"), column(&mut lab, "remote_state")),
            (vec!["down".into()], vec!["admin_down".into()])
        );
        assert_eq!(column(&mut lab, "diagnostic"), ["neighbour signaled session down"]);
        fars[0].silent = true;
        run(&mut lab, &mut fars, 5 * SECOND);
        let expected = if stays { set(&["10.9.0.2"]) } else { set(&[]) };
        assert_eq!(reached(&mut lab, GROUP), expected, "{policy}");
        if stays {
            // Another policy takes effect at once.
            reconfigure(&mut lab, "remotes = ['10.9.0.2']", BFD);
            assert_eq!(reached(&mut lab, GROUP), set(&[]));
            reconfigure(&mut lab, "remotes = ['10.9.0.2']", "[bfd]\npeer_admin_down = 'stay'\n");
        }
        // A failure after its return is one in any case.
        (fars[0].silent, fars[0].state) = (false, DOWN);
        run(&mut lab, &mut fars, 3 * SECOND);
        assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.2"]));
        fars[0].silent = true;
        run(&mut lab, &mut fars, SECOND);
        assert_eq!(reached(&mut lab, GROUP), set(&[]));
    }
}

#[test]
fn a_gateway_that_stops_says_so() {
    let mut lab = lab("remotes = ['10.9.0.2', 'fd00:9::2']", BFD);
    let mut fars = [Far::new("10.9.0.2", 2), Far::new("fd00:9::2", 3)];
    run(&mut lab, &mut fars, 3 * SECOND);
    let Lab { stepped, control, .. } = &mut lab;
    stepped.with_plane(|plane| control.before_stop(plane));
    let sent: Vec<_> = lab.sent().iter().filter_map(|(_, bytes)| bfd_packet(bytes)).collect();
    assert_eq!(sent.len(), 2);
    for SentPacket { packet, .. } in sent {
        assert_eq!((packet[1] >> 6, packet[0] & 0x1f), (ADMIN_DOWN, 7));
    }
}

/// Reads another configuration and carries it out.
fn reconfigure(lab: &mut Lab, segment: &str, tables: &str) {
    let text = format!(
        "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
         [[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\n{segment}\n{tables}"
    );
    let source = Source::new("test", &text);
    let document = source.parse().unwrap();
    let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap_or_else(|error| panic!("{error}"));
    let Lab { stepped, control, .. } = lab;
    stepped.with_plane(|plane| {
        let change = control.prepare(config, plane.seconds()).unwrap();
        control.reconfigure(change, plane.ports(), plane.seconds());
    });
}

#[test]
fn sessions_follow_the_configuration() {
    let remotes = "remotes = ['10.9.0.2', '10.9.0.3']";
    let mut lab = lab(remotes, "");
    let mut fars = [Far::new("10.9.0.2", 2), Far::new("10.9.0.3", 3)];
    run(&mut lab, &mut fars, SECOND);
    let both = set(&["10.9.0.2", "10.9.0.3"]);
    assert_eq!((reached(&mut lab, GROUP), column(&mut lab, "state").len()), (both.clone(), 0));
    // A remote that carries frames goes on until its session is up, but not for ever.
    reconfigure(&mut lab, remotes, "[bfd]\nexcept = ['10.9.0.3']\n");
    fars[0].silent = true;
    run(&mut lab, &mut fars, 4900 * MS);
    assert_eq!(reached(&mut lab, GROUP), both);
    run(&mut lab, &mut fars, 200 * MS);
    assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.3"]));
    // A session of another kind does not forget that.
    reconfigure(&mut lab, remotes, "[bfd]\nmultihop = true\nexcept = ['10.9.0.3']\n");
    assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.3"]));
    reconfigure(&mut lab, remotes, "[bfd]\nexcept = ['10.9.0.3']\n");
    fars[0].silent = false;
    run(&mut lab, &mut fars, 3 * SECOND);
    assert_eq!(reached(&mut lab, GROUP), both);
    // Other intervals keep the session.
    let polls = fars[0].polls;
    reconfigure(&mut lab, remotes, "[bfd]\ntransmit_interval = 1000\nmultiplier = 5\nexcept = ['10.9.0.3']\n");
    assert_eq!(reached(&mut lab, GROUP), both);
    run(&mut lab, &mut fars, 3 * SECOND);
    assert_eq!((column(&mut lab, "transmit_interval"), column(&mut lab, "downs")), (vec![1.0.into()], vec![0.into()]));
    assert!(fars[0].polls > polls);
    // The second remote is watched too, then the first one is no longer.
    reconfigure(&mut lab, remotes, BFD);
    for _ in 0..40 {
        run(&mut lab, &mut fars, 100 * MS);
        assert_eq!(reached(&mut lab, GROUP), both);
    }
    assert_eq!((reached(&mut lab, GROUP), column(&mut lab, "state")), (both.clone(), vec!["up".into(); 2]));
    fars[0].silent = true;
    run(&mut lab, &mut fars, 4 * SECOND);
    assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.3"]));
    fars[0].seen.clear();
    reconfigure(&mut lab, remotes, "[bfd]\nexcept = ['10.9.0.2']\n");
    assert_eq!(reached(&mut lab, GROUP), both);
    run(&mut lab, &mut fars, SECOND);
    assert_eq!(fars[0].seen, [ADMIN_DOWN], "the end of its session");
    // The remote leaves the segment, and gets the end of its session although its next hop is used no more.
    fars[1].seen.clear();
    reconfigure(&mut lab, "remotes = ['10.9.0.2']", "");
    assert_eq!((reached(&mut lab, GROUP), column(&mut lab, "state").len()), (set(&["10.9.0.2"]), 0));
    run(&mut lab, &mut fars, SECOND);
    assert_eq!(fars[1].seen, [ADMIN_DOWN]);
}

/// A session that moves into tunnels begins anew. The remote carries frames meanwhile.
#[test]
fn sessions_move_into_tunnels_and_out() {
    let remotes = "remotes = ['10.9.0.2']";
    let mut lab = lab(remotes, BFD);
    let mut fars = [Far::new("10.9.0.2", 2), Far::new("10.9.0.2", 3).in_vxlan()];
    (fars[0].silent, fars[1].silent) = (false, true);
    run(&mut lab, &mut fars, 3 * SECOND);
    for (tables, now, mode) in [(IN_VXLAN, 1, "vxlan"), (BFD, 0, "single_hop")] {
        let old = 1 - now;
        fars[old].silent = true;
        fars[old].seen.clear();
        (fars[now].silent, fars[now].state, fars[now].yours) = (false, DOWN, 0);
        reconfigure(&mut lab, remotes, tables);
        for _ in 0..30 {
            run(&mut lab, &mut fars, 100 * MS);
            assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.2"]));
        }
        assert_eq!((column(&mut lab, "mode"), column(&mut lab, "state")), (vec![mode.into()], vec!["up".into()]));
        assert_eq!(fars[old].seen, [ADMIN_DOWN], "the end of the other session");
    }
}

#[test]
fn remotes_behind_a_gateway_have_multihop_sessions() {
    let text = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\ngateways = ['10.9.0.4']\n\
         [[segment]]\nvni = 42\nports = [{ port = 'lan' }]\nremotes = ['10.8.0.2', '10.9.0.2']\n\
         [bfd]\nminimum_ttl = 253\n";
    let mut lab = with_remotes(Lab::with_ports(text, &["wan", "lan"]));
    let far = Far { port: MULTIHOP, ttl: 252, ..Far::new("10.8.0.2", 2) };
    let mut fars = [far, Far::new("10.9.0.2", 3)];
    run(&mut lab, &mut fars, 3 * SECOND);
    assert_eq!(column(&mut lab, "mode"), ["multihop", "single_hop"]);
    assert_eq!(column(&mut lab, "state"), ["down", "up"]);
    assert!(lab.dropped(DropReason::BfdTtl) >= 2);
    fars[0].ttl = 253;
    run(&mut lab, &mut fars, 3 * SECOND);
    assert_eq!(column(&mut lab, "state"), ["up", "up"]);
    assert_eq!(reached(&mut lab, GROUP), set(&["10.8.0.2", "10.9.0.2"]));
}

#[test]
fn groups_leave_out_routers_behind_lost_remotes() {
    let mac = |n: u8| MacAddr([2, 0, 0, 0, 9, n]);
    let hop = |n: u8| format!("{{ segment = 'transit', remote = '10.9.0.{n}', mac = '{}' }}", mac(n));
    let text = format!(
        "[[segment]]\nname = 'one'\naddresses = ['10.1.0.1/24']\nports = [{{ port = 'lan' }}]\n\
         [[segment]]\nname = 'transit'\nvni = 900\nvrf = 'default'\nremotes = ['10.9.0.2', '10.9.0.3']\n\
         [[vrf]]\nname = 'default'\nroutes = [{{ to = '10.3.0.0/16', next_hops = [{}, {}] }}]\n{BFD}",
        hop(2),
        hop(3)
    );
    let mut lab = with_remotes(Lab::of_segments("", &text));
    let mut fars = [Far::new("10.9.0.2", 2), Far::new("10.9.0.3", 3)];
    let shares = |lab: &mut Lab| {
        let mut shares = [0; 2];
        for n in 0..200u8 {
            let to = IpAddr::from([10, 3, 0, n]);
            let bytes = datagram((HOST, US), (IpAddr::from([10, 1, 0, 9]), to), (1000, 2000), 64, &[n; 20]);
            lab.send(LAN, &bytes);
            for (port, bytes) in lab.sent() {
                assert_eq!(port, WAN);
                let inner = MacAddr(*bytes[50..].first_chunk().unwrap());
                assert_eq!((inner, bytes[33]), (mac(bytes[33]), bytes[33]), "router and remote belong together");
                shares[usize::from(bytes[33]) - 2] += 1;
            }
        }
        shares
    };
    run(&mut lab, &mut fars, 4 * SECOND);
    assert!(shares(&mut lab).iter().all(|count| *count > 60));
    fars[1].silent = true;
    run(&mut lab, &mut fars, SECOND);
    assert_eq!(shares(&mut lab), [200, 0]);
    (fars[1].silent, fars[1].state) = (false, DOWN);
    run(&mut lab, &mut fars, 3 * SECOND);
    assert!(shares(&mut lab).iter().all(|count| *count > 60));
    // Of a group without any usable router, all stay: the packets have a reason of their own.
    (fars[0].silent, fars[1].silent) = (true, true);
    run(&mut lab, &mut fars, SECOND);
    assert_eq!((shares(&mut lab), lab.dropped(DropReason::RemoteDown)), ([0, 0], 200));
}

#[test]
fn a_group_of_vteps_leaves_out_those_that_are_down() {
    let mut lab = with_remotes(Lab::of_segments(
        "",
        &format!("[[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\ncontrol = 'kernel'\n{BFD}"),
    ));
    let vtep = |n: u8| IpAddr::from([10, 9, 0, n]);
    let mut changes = ExternalChanges::default();
    changes.groups.insert(10, vec![(vtep(2), 1), (vtep(3), 1)]);
    changes.macs.insert((42, FAR), Some(ExternalPlace::Group(10)));
    let Lab { stepped, control, .. } = &mut lab;
    stepped.with_plane(|plane| control.apply_external(changes, plane.ports(), plane.seconds()));
    let mut fars = [Far::new("10.9.0.2", 2), Far::new("10.9.0.3", 3)];
    let shares = |lab: &mut Lab| {
        let mut shares = [0; 2];
        for n in 0..200u16 {
            let (from, to) = (IpAddr::from([10, 1, 0, 9]), IpAddr::from([10, 1, 0, 8]));
            lab.send(LAN, &datagram((HOST, FAR), (from, to), (1000 + n, 2000), 64, &[0; 20]));
            for (port, bytes) in lab.sent() {
                assert_eq!(port, WAN);
                shares[usize::from(bytes[33]) - 2] += 1;
            }
        }
        shares
    };
    run(&mut lab, &mut fars, 4 * SECOND);
    let before = shares(&mut lab);
    assert!(before.iter().all(|count| *count > 60), "{before:?}");
    fars[1].silent = true;
    run(&mut lab, &mut fars, SECOND);
    assert_eq!(shares(&mut lab), [200, 0]);
    (fars[1].silent, fars[1].state) = (false, DOWN);
    run(&mut lab, &mut fars, 3 * SECOND);
    let after = shares(&mut lab);
    assert!(after.iter().all(|count| *count > 60), "{after:?}");
    (fars[0].silent, fars[1].silent) = (true, true);
    run(&mut lab, &mut fars, SECOND);
    assert_eq!((shares(&mut lab), lab.dropped(DropReason::RemoteDown)), ([0, 0], 200));
}

#[test]
fn a_returning_link_leaves_a_lost_remote_out() {
    let mut lab = lab("remotes = ['10.9.0.2', '10.9.0.3']", "[bfd]\nexcept = ['10.9.0.3']\n");
    let mut fars = [Far::new("10.9.0.2", 2)];
    run(&mut lab, &mut fars, 3 * SECOND);
    fars[0].silent = true;
    run(&mut lab, &mut fars, SECOND);
    for state in [LinkState::Down, LinkState::Up] {
        lab.port_event(WAN, &PortEvent::Link(Link { state, speed: None }));
        run(&mut lab, &mut fars, 200 * MS);
    }
    lab.port_event(WAN, &PortEvent::Address(MacAddr([2, 0, 0, 0, 0, 5])));
    lab.port_event(WAN, &PortEvent::Mtu(1400));
    run(&mut lab, &mut fars, 200 * MS);
    assert_eq!(reached(&mut lab, GROUP), set(&["10.9.0.3"]));
    assert_eq!(lab.dropped(DropReason::RemoteDown), 0);
}

#[test]
fn a_tick_sends_a_bounded_number_of_packets() {
    const REMOTES: usize = 600;
    let of: Vec<String> = (0..REMOTES).map(|n| format!("10.9.{}.{}", 1 + n / 200, 1 + n % 200)).collect();
    let text = format!(
        "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/16']\n\
         [[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\nremotes = ['{}']\n{BFD}",
        of.join("', '")
    );
    let mut lab = Lab::with_ports(&text, &["wan", "lan"]);
    let own = of.iter().map(|address| format!("{address}/16").parse().unwrap()).collect();
    lab.peer = Some(UnderlayHost::new(Addresses { mac: PEER, addresses: own, gateways: vec![] }));
    for _ in 0..20 {
        lab.stepped.advance(10 * MS);
        lab.settle();
    }
    // All sessions are due at once.
    lab.stepped.advance(2 * SECOND);
    let mut seen = HashSet::new();
    let mut counts = Vec::new();
    for _ in 0..4 {
        lab.stepped.control(&mut lab.control);
        let sent: Vec<IpAddr> = lab.sent().iter().filter_map(|(_, bytes)| Some(bfd_packet(bytes)?.to)).collect();
        counts.push(sent.len());
        seen.extend(sent);
    }
    assert_eq!((counts, seen.len()), (vec![256, 256, REMOTES - 512, 0], REMOTES));
}

fn errors(segment: &str, tables: &str) -> String {
    let text = format!(
        "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n\
         [[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\n{segment}\n{tables}"
    )
    .replacen("10.9.0.1/24", "10.9.0.1/16", 1);
    let source = Source::new("test", &text);
    let document = source.parse().unwrap();
    GatewayConfig::read(&document.settings(), &["wan", "lan"]).map_or_else(|error| error.to_string(), |_| String::new())
}

#[test]
fn wrong_settings_are_refused() {
    let remotes = "remotes = ['10.9.0.2', '10.9.0.3']";
    let pair = |a: &str, b: &str| format!("{remotes}\nbackups = [{{ primary = '{a}', backup = '{b}' }}]");
    assert_eq!(errors(&pair("10.9.0.2", "10.9.0.3"), BFD), "");
    let many = |count: usize| {
        let list: Vec<String> = (0..count).map(|i| format!("'10.9.{}.{}'", i / 200 + 1, i % 200 + 1)).collect();
        format!("remotes = [{}]", list.join(", "))
    };
    let fast = "[bfd]\nreceive_interval = 50\n";
    assert_eq!(errors(&many(750), fast), "");
    assert_eq!(errors(&many(751), "[bfd]\nreceive_interval = 51\n"), "");
    for (segment, tables, part) in [
        (pair("10.9.0.2", "10.9.0.3"), "", "has a backup of 10.9.0.2, which has no session"),
        (pair("10.9.0.2", "10.9.0.3"), "[bfd]\nexcept = ['10.9.0.2']\n", "which has no session"),
        (pair("10.9.0.2", "10.9.0.4"), BFD, "found 10.9.0.4, expected one of \"remotes\""),
        (pair("10.9.0.2", "10.9.0.2"), BFD, "expected a backup that has none itself"),
        (remotes.to_owned(), "[bfd]\nexcept = ['10.9.0.9']\n", "10.9.0.9 is not a remote of a segment"),
        (remotes.to_owned(), "[bfd]\ntransmit_interval = 49\n", "expected an integer from 50 to 60000"),
        (
            many(751),
            fast,
            "751 remotes would have sessions with up to 20026 packets per second, expected at most 20000",
        ),
        (many(751), fast, "at least 51 ms"),
        (remotes.to_owned(), "[bfd]\nmanagement_vni = 42\n", "42 is the VNI of segment \"vni42\", expected one"),
        (
            remotes.to_owned(),
            "[bfd]\nmanagement_vni = 1\nmultihop = true\n",
            "found true beside \"management_vni\"; sessions in tunnels are single-hop",
        ),
        (
            format!("kind = 'geneve'\n{remotes}"),
            "[bfd]\nmanagement_vni = 1\nexcept = ['10.9.0.2']\n",
            "of kind \"geneve\" has the watched remote 10.9.0.3, but RFC 8971 is about VXLAN only",
        ),
    ] {
        let error = errors(&segment, tables);
        assert!(error.contains(part), "{error}\nlacks {part}");
    }
}

/// A path of SIDs has no session, with the key or without it.
#[test]
fn remotes_behind_sids_may_be_named() {
    for except in ["", "except = ['fd00:9::2']"] {
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['fd00:9::1/64']\n[[segment]]\nname = 'sid'\nkind = 'srv6'\n\
             ports = [{{ port = 'lan' }}]\nremotes = ['fd00:9::2']\n\
             srv6 = {{ local_sid = 'fd00:1::1', segs = ['fd00:9::2'] }}\n[bfd]\n{except}\n"
        );
        let source = Source::new("test", &text);
        let document = source.parse().unwrap();
        let read = GatewayConfig::read(&document.settings(), &["wan", "lan"]);
        assert!(read.is_ok(), "{except}: {:?}", read.err().map(|error| error.to_string()));
    }
}

/// An error elsewhere does not make `[bfd]` an unknown table.
#[test]
fn errors_elsewhere_leave_the_table_known() {
    let text = format!(
        "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n\
         [[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\nremotes = ['10.9.0.2', '10.9.0.2']\n{BFD}"
    );
    let source = Source::new("test", &text);
    let document = source.parse().unwrap();
    let settings = document.settings();
    assert!(GatewayConfig::read(&settings, &["wan", "lan"]).is_err());
    let all = settings.check_keys().unwrap_err().to_string();
    assert!(all.contains("listed twice") && !all.contains("unknown key"), "{all}");
}
