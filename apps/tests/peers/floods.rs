use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_testlab::{Namespace, SetOnDrop};
use wirepath_wire::{EtherType, IpProtocol, MacAddr, ethernet, icmpv4, icmpv6, ipv4, ipv6, udp};

use crate::world::{Variant, World, remote_address};

const STRANGER: MacAddr = MacAddr([2, 5, 5, 5, 5, 5]);
/// Frames of the flood in one millisecond.
const PER_MILLISECOND: usize = 20;
/// Number of pings, and their interval in seconds. Together they last longer than a neighbour entry lives
/// without a reply (30 s reachable, 5 s stale, 6 s of probes).
const PINGS: (usize, &str) = (1200, "0.04");

/// A flood of echo requests, solicitations and datagrams from random sources to the VTEP address, evenly
/// paced, for longer than a neighbour entry lives. Pings through the tunnel to the kernel's vxlan device lose
/// nothing.
pub(crate) fn lose_no_ping(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let us = MacAddr(world.gateway.mac("wan"));
    let mut random = fastrand::Rng::with_seed(7);
    let frames: Vec<Vec<u8>> = (0..10_000).map(|n| hostile(variant.vtep(), us, n % 3, random.u32(..))).collect();
    let wire = remote.frames("eth0");
    let stop = AtomicBool::new(false);
    let (outcome, sent) = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let (begin, mut sent) = (Instant::now(), 0);
            while !stop.load(Ordering::Relaxed) {
                // A thread that was not scheduled does not catch up, so the flood has no bursts.
                for frame in frames.iter().cycle().skip(sent % frames.len()).take(PER_MILLISECOND) {
                    wire.send(frame).expect("sent");
                }
                sent += PER_MILLISECOND;
                std::thread::sleep(Duration::from_millis(1));
            }
            println!("{sent} frames in {:?}", begin.elapsed());
            sent
        });
        let end = SetOnDrop(&stop);
        let (count, interval) = (PINGS.0.to_string(), PINGS.1);
        let outcome = host.run(&["ping", "-n", "-i", interval, "-W", "5", "-c", &count, &remote_address(0)]);
        drop(end);
        (outcome, flood.join().expect("the flood"))
    });
    let summary = gateway.stop();
    let answered = outcome.stdout.lines().filter(|line| line.contains(" bytes from ")).count();
    let unsent = unsent_replies(remote);
    assert_eq!(answered + unsent, PINGS.0, "{unsent} unsent, of {sent} frames: {}\n{}", summary.json, outcome.stdout);
    assert!(unsent < PINGS.0 / 10, "the remote's kernel sends too few replies: {unsent} are missing");
    assert!(sent > 100 * PINGS.0 / 10, "the flood was too slow: {sent}");
    assert!(summary.drops("rate_limited") > 1000, "{}", summary.json["drops"]);
    assert!(summary.drops("not_for_us") > 1000, "{}", summary.json["drops"]);
}

/// Returns the echo replies that a namespace's kernel made and could not send (`OutErrors` in /proc/net/snmp).
///
/// All namespaces share one ICMP socket for each processor (icmp_init in net/ipv4/icmp.c). Replies that wait for a
/// neighbour in the namespace of another test fill its send buffer.
fn unsent_replies(namespace: &Namespace) -> usize {
    let text = namespace.run(&["cat", "/proc/net/snmp"]).stdout;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Icmp: "));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { panic!("no ICMP counters: {text}") };
    let mut pairs = names.split(' ').zip(values.split(' '));
    pairs.find(|(name, _)| *name == "OutErrors").and_then(|(_, value)| value.parse().ok()).expect("OutErrors")
}

/// Returns a frame to the VTEP from a random source: an echo request, a solicitation or a datagram.
pub(crate) fn hostile(vtep: IpAddr, us: MacAddr, kind: usize, random: u32) -> Vec<u8> {
    let source = match vtep {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(0x1000_0000 | random >> 4)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(0xfd00_0009 << 96 | u128::from(random) << 8 | 0xff)),
    };
    if kind == 0 {
        let len = if vtep.is_ipv4() { 24 } else { 64 };
        let prefix = format!("{source}/{len}").parse().expect("a prefix");
        let host = Addresses { mac: STRANGER, addresses: vec![prefix], gateways: Vec::new() };
        return host.solicitation(vtep, None).expect("a solicitation");
    }
    let mut payload = vec![0; 64];
    let protocol = match (kind, source, vtep) {
        (1, IpAddr::V4(_), _) => {
            let request = icmpv4::Repr { kind: icmpv4::Type::ECHO_REQUEST, code: 0, rest: random };
            request.emit(&mut payload).expect("room");
            IpProtocol::ICMPV4
        }
        (1, IpAddr::V6(src), IpAddr::V6(dst)) => {
            let request = icmpv6::Repr { kind: icmpv6::Type::ECHO_REQUEST, code: 0 };
            request.emit(&mut payload, src, dst).expect("room");
            IpProtocol::ICMPV6
        }
        _ => {
            udp::Repr { src_port: 9, dst_port: 53, payload_len: 56 }.emit(&mut payload).expect("room");
            IpProtocol::UDP
        }
    };
    let mut out = vec![0; 14 + 40 + payload.len()];
    let at = match (source, vtep) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            ethernet::Repr { dst: us, src: STRANGER, ethertype: EtherType::IPV4 }.emit(&mut out).expect("room");
            let payload_len = payload.len() as u16;
            let ip =
                ipv4::Repr { src, dst, protocol, payload_len, ttl: 64, traffic_class: 0, ident: 1, fragment_word: 0 };
            ip.emit(&mut out[14..]).expect("room");
            34
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            ethernet::Repr { dst: us, src: STRANGER, ethertype: EtherType::IPV6 }.emit(&mut out).expect("room");
            let payload_len = payload.len() as u16;
            let ip = ipv6::Repr {
                src,
                dst,
                next_header: protocol,
                payload_len,
                hop_limit: 64,
                traffic_class: 0,
                flow_label: 0,
            };
            ip.emit(&mut out[14..]).expect("room");
            54
        }
        _ => unreachable!("both have the IP version of the VTEP"),
    };
    out[at..at + payload.len()].copy_from_slice(&payload);
    out.truncate(at + payload.len());
    out
}
