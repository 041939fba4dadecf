//! The gateway on in-memory cables: frames must be forwarded as RFC 7348 requires.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use wirepath_packet::Pool;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{Running, Runtime, RuntimeConfig, Summary};
use wirepath_pmd::drivers::r#virtual::memory::Endpoint;
use wirepath_pmd::port::PortConfig;
use wirepath_settings::Source;
use wirepath_wire::build::{OuterChecksum, OuterHeaders, VxlanConfig};
use wirepath_wire::{IpProtocol, L3Type, MacAddr, Tag, Vni, checksum, ethernet, icmpv4, ipv4, parse, udp, vlan};

const HOST: MacAddr = MacAddr([2, 0, 0, 0, 1, 1]);
const FAR: MacAddr = MacAddr([2, 0, 0, 0, 2, 1]);
const BROADCAST: MacAddr = MacAddr([0xff; 6]);

/// Maximum time for events that are immediate on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A gateway, and the test's ends of its cables.
struct Lab {
    running: Running<Gateway>,
    control: GatewayControl,
    ends: Vec<Endpoint>,
    peers: Vec<UnderlayHost>,
    us: MacAddr,
}

/// Creates a gateway with these ports. The first one is the underlay.
fn lab(ports: &[&str], rest: &str) -> Lab {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    lab_on(ports, rest, |port| format!("gateway-{number}-{port}"))
}

fn lab_on(ports: &[&str], rest: &str, device: impl Fn(&str) -> String) -> Lab {
    let mut text = String::from("[pool]\nbuffers = 2048\n");
    for port in ports {
        text += &format!("[[port]]\nname = '{port}'\ndriver = 'memory'\ndevice = '{}'\n", device(port));
    }
    text += rest;
    let source = Source::new("test", text);
    let document = source.parse().unwrap();
    let top = document.settings();
    let plans = RuntimeConfig::ports_from_settings(&top).unwrap();
    let config = GatewayConfig::read(&top, ports).unwrap();
    let runtime = Runtime::open(plans, RuntimeConfig::from_settings(&top).unwrap()).unwrap();
    let us = runtime.ports()[0].mac.unwrap();
    let pool = Pool::new("test", 1024).unwrap();
    let ends = ports
        .iter()
        .filter(|port| !device(port).starts_with('='))
        .map(|port| Endpoint::named(&device(port), &PortConfig::new(PortId::new(0), pool.clone())).unwrap())
        .collect();
    let control = GatewayControl::new(&config, runtime.ports(), runtime.domain(), 1, 0);
    let running = runtime.start(|worker| control.stage(worker)).unwrap();
    Lab { running, control, ends, peers: Vec::new(), us }
}

fn peer_mac(last: u8) -> MacAddr {
    MacAddr([2, 9, 9, 9, 9, last])
}

impl Lab {
    /// Adds a VTEP 10.9.0.N and fd00:9::N that answers ARP and neighbour discovery.
    fn peer(mut self, last: u8) -> Self {
        let addresses =
            vec![format!("10.9.0.{last}/24").parse().unwrap(), format!("fd00:9::{last}/64").parse().unwrap()];
        self.peers.push(UnderlayHost::new(Addresses { mac: peer_mac(last), addresses, gateways: vec![] }));
        self
    }

    /// Waits for a frame at an end that `wanted` accepts. ARP and neighbour discovery are answered meanwhile.
    fn expect<T>(&mut self, end: usize, mut wanted: impl FnMut(&[u8]) -> Option<T>) -> T {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(frame) = self.poll(end)
                && let Some(found) = wanted(&frame)
            {
                return found;
            }
            let drops: Vec<_> = self.running.plane().drops().nonzero().collect();
            assert!(Instant::now() < deadline, "nothing came; {drops:?} {}", self.control.to_json());
        }
    }

    fn poll(&mut self, end: usize) -> Option<Vec<u8>> {
        self.running.tick(&mut self.control);
        let Some(frame) = self.ends[end].receive_bytes() else {
            std::thread::sleep(Duration::from_micros(200));
            return None;
        };
        if end == 0 {
            for peer in &mut self.peers {
                if let HostReply::Frame(reply) = peer.handle(&frame, 0).reply {
                    assert!(self.ends[0].send_bytes(&reply));
                }
            }
        }
        Some(frame)
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut GatewayControl) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !done(&mut self.control) {
            let _ = self.poll(0);
            assert!(Instant::now() < deadline, "{what} did not happen");
        }
    }

    /// Waits until this number of next hops is resolved.
    fn resolve(&mut self, count: usize) {
        self.until("resolution", |control| control.neighbours().filter(|(.., mac)| mac.is_some()).count() == count);
    }

    fn send(&mut self, end: usize, frame: &[u8]) {
        assert!(self.ends[end].send_bytes(frame));
    }

    fn stop(mut self) -> Summary {
        self.ends.clear();
        let summary = self.running.stop(&mut self.control);
        assert_eq!((summary.leaked_buffers, &summary.failures), (0, &Vec::new()));
        assert_eq!(summary.balance().in_flight(), 0, "{:?}", summary.balance());
        summary
    }
}

/// Contents and destination of a tunnel packet.
#[derive(Debug, PartialEq)]
struct TunnelPacket {
    to: IpAddr,
    dst_mac: MacAddr,
    vni: u32,
    source_port: u16,
    class: u8,
    inner: Vec<u8>,
}

/// Parses a tunnel packet and verifies every checksum.
fn parse_tunnel(frame: &[u8]) -> Option<TunnelPacket> {
    let parsed = parse(frame).ok()?;
    let outer = parsed.outer();
    let vni = parsed.vni()?.get();
    let cover = wirepath_wire::checksum_offload::ChecksumSpan::of(frame, outer)?;
    let datagram = outer.udp(frame)?;
    let (to, class) = match outer.l3_type() {
        L3Type::Ipv4 => {
            let ip = outer.ipv4(frame)?;
            assert!(ip.checksum_is_valid() && ip.dont_fragment());
            assert_eq!(datagram.checksum(), 0, "RFC 7348 section 4.1");
            (IpAddr::V4(ip.dst()), ip.traffic_class())
        }
        _ => {
            let ip = outer.ipv6(frame)?;
            let sum = cover.pseudo.and(checksum::sum(&frame[cover.start..cover.end]));
            assert!(datagram.checksum() != 0 && sum.is_valid(), "RFC 8200 section 8.1");
            (IpAddr::V6(ip.dst()), ip.traffic_class())
        }
    };
    let inner = frame[parsed.tunnel_header()? + 8..outer.end()].to_vec();
    let dst_mac = outer.ethernet(frame)?.dst();
    Some(TunnelPacket { to, dst_mac, vni, source_port: datagram.src_port(), class, inner })
}

/// Returns an Ethernet frame of `len` bytes with a UDP datagram in IPv4.
fn frame(dst: MacAddr, src: MacAddr, len: usize, class: u8, port: u16) -> Vec<u8> {
    let mut out = vec![0x5a; len];
    let at = ethernet::Repr { dst, src, ethertype: wirepath_wire::EtherType::IPV4 }.emit(&mut out).unwrap();
    let ip = ipv4::Repr {
        src: [192, 168, 7, 1].into(),
        dst: [192, 168, 7, 2].into(),
        protocol: IpProtocol::UDP,
        payload_len: (len - 34) as u16,
        ttl: 64,
        traffic_class: class,
        ident: 7,
        fragment_word: 0x4000,
    };
    ip.emit(&mut out[at..]).unwrap();
    udp::Repr { src_port: port, dst_port: 9, payload_len: (len - 42) as u16 }.emit(&mut out[34..]).unwrap();
    out
}

/// Returns a tunnel packet from 10.9.0.N or fd00:9::N to the gateway.
fn tunnelled(us: MacAddr, from: &str, to: &str, vni: u32, class: u8, inner: &[u8]) -> Vec<u8> {
    let encap = OuterHeaders::vxlan(&VxlanConfig {
        src_mac: peer_mac(2),
        dst_mac: us,
        tags: &[],
        src: from.parse().unwrap(),
        dst: to.parse().unwrap(),
        dst_port: 4789,
        vni: Vni::new(vni).unwrap(),
        ttl: 64,
        traffic_class: class,
        flow_label: 0,
        checksum: OuterChecksum::Standard,
    })
    .unwrap();
    let mut out = vec![0; encap.len()];
    let mut patch = encap.fields(inner.len(), 50_000);
    patch.inner_sum = checksum::sum(inner);
    encap.emit(&mut out, &patch).unwrap();
    out.extend_from_slice(inner);
    out
}

fn drops(summary: &Summary, reason: DropReason) -> u64 {
    summary.drops().get(&reason).copied().unwrap_or(0)
}

const ONE: &str = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
    [[segment]]\nname = 'blue'\nvni = 42\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";

#[test]
fn resolves_learns_and_forwards_in_both_directions() {
    let mut lab = lab(&["wan", "lan"], ONE).peer(2);
    // The first frame waits until its next hop is resolved, and is flooded there because FAR is unknown.
    let request = frame(FAR, HOST, 98, 2, 1000);
    lab.send(1, &request);
    let first = lab.expect(0, parse_tunnel);
    assert_eq!((first.to, first.dst_mac, first.vni), ("10.9.0.2".parse().unwrap(), peer_mac(2), 42));
    assert_eq!((first.inner == request, first.class), (true, 2), "the mark is copied (RFC 6040 section 4.1)");
    assert!(first.source_port >= 49152);
    let back = frame(HOST, FAR, 98, 0, 9);
    let us = lab.us;
    lab.send(0, &tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &back));
    assert_eq!(lab.expect(1, |f| Some(f.to_vec())), back);
    lab.until("learning", |control| control.learn_stats(0).learned == 2);
    // On the fast path, packets of one flow have one source port, and another flow has another one.
    let mut ports = Vec::new();
    for port in [1000, 1000, 1001] {
        let frame = frame(FAR, HOST, 98, 0, port);
        lab.send(1, &frame);
        let packet = lab.expect(0, |f| parse_tunnel(f).filter(|o| o.inner == frame));
        ports.push(packet.source_port);
    }
    assert!(ports[0] == ports[1] && ports[1] != ports[2], "{ports:?}");
    lab.send(0, &tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &back));
    assert_eq!(lab.expect(1, |f| Some(f.to_vec())), back);
    let stats = lab.control.segment_stats(0);
    assert_eq!((stats.local_rx.0, stats.overlay_rx, stats.local_tx.0, stats.flooded), (4, (2, 196), 2, 1));
    lab.stop();
}

#[test]
fn tunnels_over_ipv6_with_udp_checksum() {
    let text = ONE.replace("remotes = ['10.9.0.2']", "remotes = ['fd00:9::2']");
    let mut lab = lab(&["wan", "lan"], &text).peer(2);
    let request = frame(FAR, HOST, 61, 0, 1000);
    lab.send(1, &request);
    let packet = lab.expect(0, parse_tunnel);
    assert_eq!((packet.to, packet.inner), ("fd00:9::2".parse().unwrap(), request));
    let back = frame(HOST, FAR, 61, 0, 9);
    let packet = tunnelled(lab.us, "fd00:9::2", "fd00:9::1", 42, 0, &back);
    lab.send(0, &packet);
    assert_eq!(lab.expect(1, |f| Some(f.to_vec())), back);
    // Packets with a wrong checksum or none are refused.
    let mut wrong = packet.clone();
    *wrong.last_mut().unwrap() ^= 1;
    lab.send(0, &wrong);
    let mut none = packet.clone();
    none[60..62].fill(0);
    lab.send(0, &none);
    lab.send(0, &packet);
    assert_eq!(lab.expect(1, |f| Some(f.to_vec())), back);
    assert_eq!(drops(&lab.stop(), DropReason::BadL4Checksum), 2);
}

const THREE: &str = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n\
    [[segment]]\nvni = 42\nremotes = ['10.9.0.2', '10.9.0.3', '10.9.0.4']\n\
    ports = [{ port = 'a' }, { port = 'b' }, { port = 'b', vlan = 7 }]\n\
    static = [{ mac = '02:00:00:00:09:09', remote = '10.9.0.3' }]\n\
    [[segment]]\nvni = 43\nremotes = ['10.9.0.2']\nports = [{ port = 'a', vlan = 8 }]\n";

#[test]
fn floods_to_all_except_the_source() {
    for len in [60, 511, 1400] {
        let mut lab = lab(&["wan", "a", "b"], THREE).peer(2).peer(3).peer(4);
        lab.resolve(3);
        let all = frame(BROADCAST, HOST, len, 0, 1);
        lab.send(1, &all);
        let mut to = Vec::new();
        while to.len() < 3 {
            let packet = lab.expect(0, parse_tunnel);
            assert!(packet.inner == all && packet.vni == 42);
            to.push(packet.to.to_string());
        }
        assert_eq!(to, ["10.9.0.2", "10.9.0.3", "10.9.0.4"]);
        assert_eq!(lab.expect(2, |f| Some(f.to_vec())), all);
        // The attachment with a VLAN gets its tag.
        let mut tagged = vec![0; 4];
        tagged.extend_from_slice(&all);
        assert!(vlan::push(&mut tagged, Tag::new(7)));
        assert_eq!(lab.expect(2, |f| Some(f.to_vec())), tagged);
        // Split horizon: frames from a tunnel are not sent into a tunnel.
        let from_far = frame(BROADCAST, FAR, len, 0, 1);
        let packet = tunnelled(lab.us, "10.9.0.2", "10.9.0.1", 42, 0, &from_far);
        lab.send(0, &packet);
        for end in [1, 2, 2] {
            lab.expect(end, |f| f.ends_with(&from_far[12..]).then_some(()));
        }
        // A unicast frame from a tunnel for a host behind another VTEP.
        let across =
            tunnelled(lab.us, "10.9.0.2", "10.9.0.1", 42, 0, &frame(MacAddr([2, 0, 0, 0, 9, 9]), FAR, len, 0, 1));
        lab.send(0, &across);
        lab.until("the frame across", |control| control.segment_stats(0).overlay_rx.0 == 2);
        assert_eq!(lab.control.segment_stats(0).overlay_tx.0, 3);
        assert_eq!(drops(&lab.stop(), DropReason::SplitHorizon), 1);
    }
}

#[test]
fn vlans_belong_to_their_segments() {
    let mut lab = lab(&["wan", "a", "b"], THREE).peer(2).peer(3).peer(4);
    lab.resolve(3);
    let plain = frame(FAR, HOST, 98, 0, 1);
    let tagged = |id: u16| {
        let mut out = vec![0; 4];
        out.extend_from_slice(&plain);
        vlan::push(&mut out, Tag::new(id));
        out
    };
    lab.send(1, &tagged(8));
    let packet = lab.expect(0, parse_tunnel);
    assert_eq!((packet.vni, &packet.inner), (43, &plain), "the tag stays outside (RFC 7348 section 6.1)");
    lab.send(1, &tagged(9));
    // A priority tag counts as no tag.
    lab.send(1, &tagged(0));
    assert_eq!(lab.expect(0, parse_tunnel).vni, 42);
    // A frame from the tunnel gets the tag of its attachment.
    let back = frame(HOST, FAR, 98, 0, 1);
    let packet = tunnelled(lab.us, "10.9.0.2", "10.9.0.1", 43, 0, &back);
    lab.send(0, &packet);
    let got = lab.expect(1, |f| f.ends_with(&back[12..]).then(|| f.to_vec()));
    assert_eq!(got[12..16], [0x81, 0, 0, 8]);
    // Inner tags are refused unless the segment carries them.
    let packet = tunnelled(lab.us, "10.9.0.2", "10.9.0.1", 43, 0, &tagged(8));
    lab.send(0, &packet);
    lab.until("the tagged frame", |control| control.segment_stats(1).overlay_rx.0 == 2);
    let summary = lab.stop();
    assert_eq!((drops(&summary, DropReason::InnerVlan), drops(&summary, DropReason::NoSegment)), (1, 1));
}

#[test]
fn stations_move_and_static_entries_stay() {
    let mut lab = lab(&["wan", "a", "b"], THREE).peer(2).peer(3).peer(4);
    lab.resolve(3);
    let fixed = MacAddr([2, 0, 0, 0, 9, 9]);
    lab.send(1, &frame(BROADCAST, HOST, 60, 0, 1));
    lab.until("learning", |control| control.learn_stats(0).learned == 1);
    lab.send(2, &frame(BROADCAST, HOST, 60, 0, 1));
    lab.until("the move", |control| control.learn_stats(0).moved == 1);
    let packet = tunnelled(lab.us, "10.9.0.4", "10.9.0.1", 42, 0, &frame(BROADCAST, HOST, 60, 0, 1));
    lab.send(0, &packet);
    lab.until("the move into the overlay", |control| control.learn_stats(0).moved == 2);
    while lab.poll(0).is_some() {}
    lab.send(1, &frame(HOST, FAR, 60, 0, 77));
    let packet = lab.expect(0, |f| parse_tunnel(f).filter(|o| o.inner.starts_with(&HOST.0)));
    assert_eq!(packet.to.to_string(), "10.9.0.4");
    // Another port claims the static address.
    lab.send(2, &frame(BROADCAST, fixed, 60, 0, 1));
    lab.send(2, &frame(fixed, HOST, 60, 0, 78));
    let packet = lab.expect(0, |f| parse_tunnel(f).filter(|o| o.inner.starts_with(&fixed.0)));
    assert_eq!(packet.to.to_string(), "10.9.0.3");
    lab.stop();
}

#[test]
fn senders_of_oversized_packets_get_an_icmp_error() {
    let mut lab = lab(&["wan", "lan"], &(ONE.to_owned() + "mtu = 1000\n")).peer(2);
    lab.resolve(1);
    lab.send(1, &frame(FAR, HOST, 1014, 0, 1));
    assert_eq!(lab.expect(0, parse_tunnel).inner.len(), 1014);
    lab.send(1, &frame(FAR, HOST, 1015, 0, 1));
    let error_frame = lab.expect(1, |f| Some(f.to_vec()));
    let parsed = parse(&error_frame).unwrap();
    let icmp = parsed.outer().icmpv4(&error_frame).unwrap();
    assert_eq!((icmp.kind(), icmp.code(), icmp.next_hop_mtu()), (icmpv4::Type::DESTINATION_UNREACHABLE, 4, 1000));
    assert!(icmp.checksum_is_valid());
    let ip = parsed.outer().ipv4(&error_frame).unwrap();
    assert_eq!((ip.src().to_string(), ip.dst().to_string()), ("192.168.7.2".into(), "192.168.7.1".into()));
    assert_eq!((error_frame[..6].to_vec(), error_frame[6..12].to_vec()), (HOST.0.to_vec(), FAR.0.to_vec()));
    let stats = lab.control.segment_stats(0);
    assert_eq!((stats.too_big, stats.icmp_too_big), (1, 1));
    assert_eq!(drops(&lab.stop(), DropReason::TooBigForMtu), 1);
}

#[test]
fn packets_for_others_are_dropped_with_a_reason() {
    let text = ONE.replace("[underlay]\n", "[underlay]\nreassembly = false\n");
    let mut lab = lab(&["wan", "lan"], &text).peer(2);
    lab.resolve(1);
    let us = lab.us;
    let inner = frame(HOST, FAR, 96, 0, 1);
    let good = tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &inner);
    let edit = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut packet = good.clone();
        change(&mut packet);
        // The IPv4 header checksum is made right after the change.
        packet[24..26].fill(0);
        let sum = checksum::ipv4_header(&packet[14..34]);
        packet[24..26].copy_from_slice(&sum.to_be_bytes());
        packet
    };
    let mut bad_sum = good.clone();
    bad_sum[24] ^= 1;
    let cases: Vec<(DropReason, Vec<u8>)> = vec![
        (DropReason::UnknownVni, tunnelled(us, "10.9.0.2", "10.9.0.1", 41, 0, &inner)),
        (DropReason::UnknownRemote, tunnelled(us, "10.9.0.7", "10.9.0.1", 42, 0, &inner)),
        (DropReason::NotForUs, tunnelled(us, "10.9.0.2", "10.9.0.9", 42, 0, &inner)),
        (DropReason::NotForUs, tunnelled(peer_mac(3), "10.9.0.2", "10.9.0.1", 42, 0, &inner)),
        (DropReason::NotForUs, edit(&|p| p[37] ^= 1)),
        (DropReason::BadTunnelHeader, edit(&|p| p[42] = 0)),
        (DropReason::OuterFragment, edit(&|p| p[20] = 0x20)),
        (DropReason::OuterFragment, edit(&|p| p[21] = 2)),
        (DropReason::BadL4Checksum, edit(&|p| p[40] = 1)),
        (DropReason::BadChecksum, bad_sum),
        (DropReason::BadTotalLength, edit(&|p| p[16] = 1)),
        (DropReason::BadHeaderLength, edit(&|p| p[17] = 19)),
        (DropReason::BadEcn, tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 3, &inner)),
        (DropReason::BadSource, tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &frame(HOST, BROADCAST, 98, 0, 1))),
        (DropReason::BadSource, tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &frame(HOST, MacAddr::ZERO, 98, 0, 1))),
        (DropReason::TooShort, tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &inner[..13])),
        (DropReason::LinkLocalMulticast, {
            tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &frame(MacAddr([1, 0x80, 0xc2, 0, 0, 0]), FAR, 98, 0, 1))
        }),
    ];
    let mut expected = std::collections::BTreeMap::new();
    for (reason, packet) in &cases {
        *expected.entry(*reason).or_insert(0) += 1;
        lab.send(0, packet);
    }
    // A congestion mark of the underlay reaches a receiver that supports ECN.
    let marked = frame(HOST, FAR, 98, 2, 1);
    lab.send(0, &tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 3, &marked));
    let got = lab.expect(1, |f| Some(f.to_vec()));
    assert_eq!((got[15], ipv4::View::new(&got[14..]).unwrap().checksum_is_valid()), (3, true));
    // Padding behind the datagram is removed.
    let mut padded = good.clone();
    padded.extend_from_slice(&[0; 10]);
    lab.send(0, &padded);
    assert_eq!(lab.expect(1, |f| Some(f.to_vec())), inner);
    let summary = lab.stop();
    for (reason, n) in expected {
        assert_eq!(drops(&summary, reason), n, "{reason:?}: {:?}", summary.drops());
    }
}

#[test]
fn an_unknown_vtep_is_accepted_where_that_is_configured() {
    let text = ONE.replace("remotes = ['10.9.0.2']", "accept_unknown_remotes = true");
    let mut lab = lab(&["wan", "lan"], &text).peer(2);
    let back = frame(HOST, FAR, 98, 0, 9);
    let packet = tunnelled(lab.us, "10.9.0.2", "10.9.0.1", 42, 0, &back);
    lab.send(0, &packet);
    assert_eq!(lab.expect(1, |f| Some(f.to_vec())), back);
    lab.until("learning", |control| control.learn_stats(0).learned == 1);
    // The first frame to the VTEP resolves its next hop.
    assert_eq!(lab.control.neighbours().count(), 0);
    let request = frame(FAR, HOST, 98, 0, 1);
    lab.send(1, &request);
    assert_eq!(lab.expect(0, parse_tunnel).inner, request);
    lab.stop();
}

#[test]
fn truncated_and_malformed_packets_are_counted() {
    let mut lab = lab(&["wan", "lan"], ONE).peer(2);
    lab.resolve(1);
    let us = lab.us;
    let inner = frame(HOST, FAR, 98, 0, 1);
    let good = [
        tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &inner),
        tunnelled(us, "fd00:9::2", "fd00:9::1", 42, 0, &inner),
        UnderlayHost::new(Addresses {
            mac: peer_mac(2),
            addresses: vec!["10.9.0.2/24".parse().unwrap(), "fd00:9::2/64".parse().unwrap()],
            gateways: vec![],
        })
        .addresses()
        .solicitation("fd00:9::1".parse().unwrap(), None)
        .unwrap(),
    ];
    let mut sent = 0u64;
    let mut rng = fastrand::Rng::with_seed(1);
    let mut packets: Vec<(usize, Vec<u8>)> = Vec::new();
    for packet in &good {
        packets.extend((14..packet.len()).map(|len| (0, packet[..len].to_vec())));
        for _ in 0..600 {
            let mut mangled = packet.clone();
            for _ in 0..1 + rng.usize(..3) {
                let at = rng.usize(..mangled.len());
                mangled[at] = rng.u8(..);
            }
            packets.push((0, mangled));
        }
    }
    packets.extend((14..inner.len()).map(|len| (1, inner[..len].to_vec())));
    for (end, packet) in &packets {
        while !lab.ends[*end].send_bytes(packet) {
            lab.poll(0);
            lab.poll(1);
        }
        sent += 1;
        lab.poll(0);
        lab.poll(1);
    }
    lab.running.tick(&mut lab.control);
    // The gateway still works.
    let probe = frame(HOST, FAR, 99, 0, 4321);
    lab.send(0, &tunnelled(us, "10.9.0.2", "10.9.0.1", 42, 0, &probe));
    lab.expect(1, |f| (f == probe).then_some(()));
    let summary = lab.stop();
    let received = summary.rx().packets;
    let dropped: u64 = summary.drops().values().sum();
    assert!(received >= sent, "{received} of {sent}");
    // Packets that were neither dropped nor forwarded were neighbour discovery of the peer.
    assert!(dropped > sent / 2, "{:?}", summary.drops());
}

#[test]
fn two_gateways_back_to_back() {
    let wan = format!("gateway-pair-{}", std::process::id());
    let side = |number: u8, other: u8| {
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.{number}/24']\n\
             [[segment]]\nvni = 42\nremotes = ['10.9.0.{other}']\nports = [{{ port = 'lan' }}]\n"
        );
        let ports = ["wan", "lan"];
        let mut all = String::from("[pool]\nbuffers = 2048\n");
        all += &format!("[[port]]\nname = 'wan'\ndriver = 'memory'\ndevice = '{wan}'\n");
        all += &format!("[[port]]\nname = 'lan'\ndriver = 'memory'\ndevice = '{wan}-{number}'\n");
        all += &text;
        let source = Source::new("test", all);
        let document = source.parse().unwrap();
        let top = document.settings();
        let plans = RuntimeConfig::ports_from_settings(&top).unwrap();
        let config = GatewayConfig::read(&top, &ports).unwrap();
        let runtime = Runtime::open(plans, RuntimeConfig::from_settings(&top).unwrap()).unwrap();
        let pool = Pool::new("test", 1024).unwrap();
        let end = Endpoint::named(&format!("{wan}-{number}"), &PortConfig::new(PortId::new(0), pool)).unwrap();
        let control = GatewayControl::new(&config, runtime.ports(), runtime.domain(), 1, 0);
        let running = runtime.start(|worker| control.stage(worker)).unwrap();
        (running, control, end)
    };
    let (mut a, mut b) = (side(1, 2), side(2, 1));
    let deadline = Instant::now() + TIMEOUT;
    let mut carried = 0;
    let (request, back) = (frame(FAR, HOST, 1400, 0, 1), frame(HOST, FAR, 60, 0, 1));
    while carried < 200 {
        assert!(Instant::now() < deadline, "only {carried} frames");
        let _ = a.2.send_bytes(&request);
        for (running, control, _) in [&mut a, &mut b] {
            running.tick(control);
        }
        if let Some(got) = b.2.receive_bytes() {
            assert_eq!(got, request);
            let _ = b.2.send_bytes(&back);
        }
        if let Some(got) = a.2.receive_bytes() {
            assert_eq!(got, back);
            carried += 1;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    for (running, mut control, end) in [a, b] {
        drop(end);
        assert_eq!(control.learn_stats(0).learned, 2);
        let summary = running.stop(&mut control);
        assert!(summary.failures.is_empty());
    }
}
