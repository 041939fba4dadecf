//! The fast path of routing beside the slow one: the same frames, counters and drops.

use std::collections::HashMap;

use fastrand::Rng;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_wire::{MacAddr, checksum, parse};

use crate::lab::{LAN, Lab, SECOND, US, WAN, tagged};
use crate::routing::{datagram, tunnelled};

const LAN2: PortId = PortId::new(2);
const VLAN: u16 = 7;
const FAR_ROUTER: MacAddr = MacAddr([2, 0, 0, 0, 9, 9]);

fn mac(n: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 1, n])
}

/// Returns a gateway with two VRFs. Without `fast` it has a mirror, so that all packets take the slow path. The segment
/// with the mirror has no packets.
fn lab(fast: bool, source_check: &str) -> Lab {
    let mirror = if fast { "" } else { "mirror = 'spare'\n" };
    let text = format!(
        "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n\
         [[segment]]\nname = 'one'\nvni = 1\nports = [{{ port = 'lan' }}]\nremotes = ['10.9.0.2']\n\
         addresses = ['10.1.0.1/24', 'fd01::1/64']\n\
         [[segment]]\nname = 'two'\nvni = 2\nmtu = 1300\nports = [{{ port = 'lan2', vlan = {VLAN} }}]\n\
         addresses = ['10.2.0.1/24', 'fd02::1/64']\n\
         [[segment]]\nname = 'three'\nvni = 3\nports = [{{ port = 'lan2' }}]\nvrf = 'other'\n\
         addresses = ['10.3.0.1/24', 'fd03::1/64']\n\
         [[segment]]\nname = 'transit'\nvni = 900\nvrf = 'default'\nremotes = ['10.9.0.2']\n\
         [[segment]]\nname = 'unused'\nvni = 77\nports = [{{ port = 'lan2', vlan = 99 }}]\n\
         remotes = ['10.9.0.2']\n{mirror}\
         [[vrf]]\nname = 'default'\nsource_check = '{source_check}'\nroutes = [\n\
         {{ to = '10.3.0.0/16', lookup = 'other' }}, {{ to = 'fd03::/16', lookup = 'other' }},\n\
         {{ to = '10.4.0.0/16', next_hops = [{{ segment = 'transit', remote = '10.9.0.2', \
         mac = '{FAR_ROUTER}' }}] }},\n\
         {{ to = 'fd04::/16', next_hops = [{{ segment = 'transit', remote = '10.9.0.2', mac = '{FAR_ROUTER}' }}] }},\n\
         {{ to = '10.5.0.0/16', next_hops = [{{ via = '10.2.0.10' }}, {{ via = '10.2.0.11', weight = 3 }}, \
         {{ segment = 'transit', remote = '10.9.0.2', mac = '{FAR_ROUTER}' }}] }},\n\
         {{ to = 'fd05::/16', next_hops = [{{ via = 'fd02::10' }}, {{ via = 'fd01::10' }}] }},\n\
         {{ to = '10.6.0.0/16', discard = 'blackhole' }}, {{ to = 'fd06::/16', discard = 'prohibit' }},\n\
         {{ to = '10.1.0.0/16', via = ['10.1.0.10'] }}]\n\
         [[vrf]]\nname = 'other'\nroutes = [{{ to = '0.0.0.0/0', lookup = 'default' }}, \
         {{ to = '::/0', lookup = 'default' }}]\n"
    );
    let mut lab = Lab::with_ports(&text, &["wan", "lan", "lan2", "spare"]).with_peer();
    // The hosts with the addresses 10 and 11 of each segment answer.
    let hosts = [(LAN, None, 1, 10), (LAN2, Some(VLAN), 2, 10), (LAN2, Some(VLAN), 2, 11), (LAN2, None, 3, 10)];
    for (_, _, net, n) in hosts {
        for dst in [format!("10.{net}.0.{n}"), format!("fd0{net}::{n}")] {
            let src = if dst.contains(':') { "fd01::10" } else { "10.1.0.10" };
            lab.send(LAN, &datagram(US, mac(10), src, &dst, 64, 10));
        }
    }
    for _ in 0..20 {
        lab.stepped.advance(SECOND / 10);
        for (port, bytes) in lab.settle() {
            for (at, vlan, net, n) in hosts.iter().filter(|host| host.0 == port) {
                let addresses = [format!("10.{net}.0.{n}/24"), format!("fd0{net}::{n}/64")];
                let addresses = addresses.map(|text| text.parse().unwrap()).to_vec();
                let mac = if *net == 1 { mac(*n) } else { MacAddr([2, 0, 0, 0, *net, *n]) };
                let mut host = UnderlayHost::new(Addresses { mac, addresses, gateways: vec![] });
                let is_tagged = bytes[12..14] == [0x81, 0];
                if is_tagged != vlan.is_some() {
                    continue;
                }
                let untagged = [&bytes[..12], &bytes[if is_tagged { 16 } else { 12 }..]].concat();
                if let HostReply::Frame(reply) = host.handle(&untagged, 0).reply {
                    lab.send(*at, &vlan.map_or_else(|| reply.clone(), |id| tagged(&reply, id)));
                }
            }
        }
    }
    lab
}

/// Returns a random frame, most of them to be routed, and its port.
fn random_frame(random: &mut Rng) -> (PortId, Vec<u8>) {
    let v6 = random.bool();
    let pick = |random: &mut Rng, all: &[&str]| all[random.usize(..all.len())].to_owned();
    let (src, dst) = if v6 {
        let src = pick(random, &["fd01::10", "fd01::10", "fd02::10", "fd77::1", "::1", "fe80::5", "ff02::1"]);
        let dst = match random.u8(..12) {
            0..2 => "fd02::10".to_owned(),
            2..4 => format!("fd05::{:x}", random.u16(1..)),
            4 => format!("fd04::{:x}", random.u16(1..)),
            5 => "fd03::10".to_owned(),
            6 => "fd01::10".to_owned(),
            _ => pick(random, &["fd02::77", "fd02::1", "fd06::1", "fd99::1", "fe80::1", "ff0e::1", "::"]),
        };
        (src, dst)
    } else {
        let src =
            pick(random, &["10.1.0.10", "10.1.0.10", "10.2.0.10", "10.77.0.1", "127.0.0.1", "224.0.0.1", "0.1.0.1"]);
        let dst = match random.u8(..12) {
            0..2 => "10.2.0.10".to_owned(),
            2..4 => format!("10.5.{}.{}", random.u8(..), random.u8(..)),
            4 => format!("10.4.{}.{}", random.u8(..), random.u8(..)),
            5 => "10.3.0.10".to_owned(),
            6 => "10.1.0.10".to_owned(),
            _ => {
                pick(random, &["10.2.0.77", "10.2.0.1", "10.2.0.255", "10.6.0.1", "99.0.0.1", "224.0.0.9", "240.0.0.1"])
            }
        };
        (src, dst)
    };
    // All packets of a flow have the same source; a few are changed afterwards.
    let src = if random.u8(..8) > 0 { if v6 { "fd01::10".to_owned() } else { "10.1.0.10".to_owned() } } else { src };
    let ttl = [0, 1, 2, 64, 64, 64, 64, 255][random.usize(..8)];
    let len = [0, 4, 18, 100, 1200, 1243, 1244, 1245, 1264, 1272, 1273, 1350, 1400][random.usize(..13)];
    let mut bytes = datagram(US, mac(10), &src, &dst, ttl, len);
    let l3 = 14;
    let fix = |bytes: &mut [u8]| {
        if !v6 {
            bytes[24..26].fill(0);
            let words = usize::from(bytes[14] & 15).clamp(5, 7);
            let sum = checksum::ipv4_header(&bytes[14..14 + 4 * words]);
            bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        }
    };
    match random.u8(..24) {
        0 => bytes[l3 + if v6 { 6 } else { 9 }] = random.u8(..),
        1 => bytes[l3 + if v6 { 6 } else { 9 }] = [6, 1, 58, 50, 47, 0, 43, 44, 51, 60][random.usize(..10)],
        2 => bytes[14] = [0x44, 0x46, 0x4f, 0x65, 0x05, 0x60][random.usize(..6)],
        3 => bytes[l3 + 6] = random.u8(..),
        4 => bytes[15] = random.u8(..),
        5 => {
            let at = l3 + if v6 { 4 } else { 2 };
            bytes[at..at + 2].copy_from_slice(&random.u16(..).to_be_bytes());
        }
        6 => {
            let at = random.usize(l3..bytes.len());
            bytes[at] = random.u8(..);
        }
        7 => bytes.truncate(random.usize(14..bytes.len())),
        8 => bytes[..6].copy_from_slice(&mac(random.u8(..)).0),
        9 => bytes[0] |= 1,
        10 => {
            let at = l3 + if v6 { 44 } else { 24 };
            bytes[at..at + 2].copy_from_slice(&random.u16(..60).to_be_bytes());
        }
        11 => {
            let at = l3 + if v6 { 4 } else { 2 };
            bytes[at..at + 2].copy_from_slice(&random.u16(..60).to_be_bytes());
        }
        12 => bytes[6] |= 1,
        13 => {
            let host = Addresses { mac: mac(10), addresses: vec!["10.1.0.10/24".parse().unwrap()], gateways: vec![] };
            bytes = host.solicitation("10.1.0.1".parse().unwrap(), None).unwrap();
            bytes[..6].copy_from_slice(&US.0);
            return (LAN, bytes);
        }
        _ => {}
    }
    if bytes.len() > 42 && random.u8(..10) > 0 {
        fix(&mut bytes);
    }
    // Padding, as Ethernet demands, or more.
    let len =
        bytes.len().max(if random.bool() { 60 } else { 0 }) + if random.u8(..8) == 0 { random.usize(..9) } else { 0 };
    bytes.resize(len, random.u8(..));
    match random.u8(..8) {
        0 => (LAN2, tagged(&bytes, VLAN)),
        1 => (LAN2, bytes),
        2 => {
            bytes[6..12].copy_from_slice(&FAR_ROUTER.0);
            let vni = [1, 900, 900, 900, 2, 5][random.usize(..6)];
            let mut outer = tunnelled(vni, &bytes);
            if random.u8(..6) == 0 {
                outer[15] = random.u8(..4);
                outer[24..26].fill(0);
                let sum = checksum::ipv4_header(&outer[14..34]);
                outer[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            (WAN, outer)
        }
        3 => (LAN, tagged(&bytes, VLAN)),
        _ => (LAN, bytes),
    }
}

/// Frames by port and flow: addresses of the innermost IP packet. Each flow is in order.
fn by_flow(sent: Vec<(PortId, Vec<u8>)>) -> HashMap<(PortId, Vec<u8>), Vec<Vec<u8>>> {
    let mut flows: HashMap<_, Vec<_>> = HashMap::new();
    for (port, bytes) in sent {
        let flow = parse(&bytes).map_or_else(
            |_| bytes.clone(),
            |parsed| {
                let layers = parsed.innermost();
                let (v4, v6) = (layers.ipv4_header(&bytes), layers.ipv6_header(&bytes));
                v4.map(|h| h[12..20].to_vec()).or(v6.map(|h| h[8..40].to_vec())).unwrap_or_else(|| bytes.clone())
            },
        );
        flows.entry((port, flow)).or_default().push(bytes);
    }
    flows
}

/// Sends random packets through the fast and the slow path of two gateways.
fn compare(source_check: &str, seed: u64) -> u64 {
    println!("source check {source_check}, seed {seed}");
    let mut random = Rng::with_seed(seed);
    let (mut fast, mut slow) = (lab(true, source_check), lab(false, source_check));
    for step in 0..400 {
        let frames: Vec<_> = (0..random.usize(1..100)).map(|_| random_frame(&mut random)).collect();
        // A batch that is all for the router skips the bridge.
        let (only_plain, only_routed) = (random.u8(..4) == 0, random.bool());
        for port in [LAN, LAN2, WAN] {
            let of_port = || {
                let all = frames.iter().filter(|frame| frame.0 == port).map(|frame| frame.1.as_slice());
                all.filter(|bytes| !only_plain || bytes.len() > 60 && bytes[22..24] == [64, 17])
                    .filter(|bytes| !only_routed || bytes[..6] == US.0 && bytes[12..14] != [0x81, 0])
            };
            fast.send_all(port, of_port());
            slow.send_all(port, of_port());
        }
        let (mut found, mut expected) = (by_flow(fast.sent()), by_flow(slow.sent()));
        for lab in [(&mut fast, &mut found), (&mut slow, &mut expected)] {
            lab.0.stepped.advance(SECOND / 50);
            for (flow, frames) in by_flow(lab.0.settle()) {
                lab.1.entry(flow).or_default().extend(frames);
            }
        }
        for (key, frames) in &expected {
            let got = found.remove(key).unwrap_or_default();
            assert_eq!(got, *frames, "step {step}: frames of {key:?}");
        }
        found.retain(|_, frames| !frames.is_empty());
        assert_eq!(found, HashMap::new(), "step {step}");
        assert_eq!(fast.stepped.drops(), slow.stepped.drops(), "step {step}");
        assert_eq!(format!("{:?}", fast.stepped.balance()), format!("{:?}", slow.stepped.balance()), "step {step}");
        for segment in 0..4 {
            let of = |lab: &Lab| lab.control.segment_stats(segment);
            assert_eq!(of(&fast), of(&slow), "step {step}, segment {segment}");
        }
    }
    for reason in [DropReason::HopLimit, DropReason::NoRoute, DropReason::NotRoutable, DropReason::TooBigForMtu] {
        assert!(fast.dropped(reason) > 0, "{reason:?}");
    }
    let routed: u64 = (0..4).map(|segment| fast.control.segment_stats(segment).routed_out.0).sum();
    assert!(routed > 2000, "{routed}");
    fast.dropped(DropReason::SourceCheck)
}

#[test]
fn the_fast_path_does_the_same_as_the_slow_one() {
    for (source_check, drops) in [("off", false), ("loose", true), ("strict", true)] {
        let seed = fastrand::u64(..);
        assert_eq!(compare(source_check, seed) > 0, drops);
    }
}

#[test]
fn packets_of_a_flow_keep_their_order() {
    let mut lab = lab(true, "off");
    // Packets with options take the slow path, and all others of the burst the fast one.
    let with_options = |ident: u16| {
        let mut bytes = datagram(US, mac(10), "10.1.0.10", "10.2.0.10", 64, 40);
        bytes.splice(34..34, [1, 1, 1, 0]);
        bytes[14] = 0x46;
        bytes[16..18].copy_from_slice(&72u16.to_be_bytes());
        (bytes, ident, 24)
    };
    let plain = |ident: u16| (datagram(US, mac(10), "10.1.0.10", "10.2.0.10", 64, 40), ident, 20);
    let mut random = Rng::with_seed(5);
    let frames: Vec<Vec<u8>> = (0..1000)
        .map(|n| {
            let (mut bytes, ident, header) = if random.u8(..10) == 0 { with_options(n) } else { plain(n) };
            bytes[18..20].copy_from_slice(&ident.to_be_bytes());
            bytes[24..26].fill(0);
            let sum = checksum::ipv4_header(&bytes[14..14 + header]);
            bytes[24..26].copy_from_slice(&sum.to_be_bytes());
            bytes
        })
        .collect();
    lab.sent();
    let mut order = Vec::new();
    for burst in frames.chunks(50) {
        lab.send_all(LAN, burst.iter().map(Vec::as_slice));
        // The frames have a VLAN tag.
        order.extend(lab.sent().iter().map(|(_, bytes)| u16::from_be_bytes([bytes[22], bytes[23]])));
    }
    assert_eq!(order, (0..1000).collect::<Vec<u16>>());
}
