//! Tunnel packets whose outer headers are known from the packets in front of them. Traced packets take the slow path,
//! so a gateway that traces judges one that does not.

use wirepath_packet::PortId;
use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_settings::Source;
use wirepath_wire::MacAddr;

use crate::ip_payload::{TUNNELS, ethernet_to_gateway, framed, ip_packet, settle, to_gateway_in_class, tunnel_of};
use crate::lab::{FAR, HOST, LAN, Lab, SPARE, WAN, frame};
use crate::traces::{sorted, start};

/// Rounds of batches for each tunnel.
const ROUNDS: usize = 60;

/// Returns the DSCP and ECN of most packets of a tunnel, or others.
fn class(random: &mut fastrand::Rng) -> u8 {
    if random.u8(..8) == 0 { *random.choice(&[1, 2, 3, 0xb8]).unwrap() } else { 0 }
}

/// Changes some packets of a batch.
fn mutate(random: &mut fastrand::Rng, mut bytes: Vec<u8>) -> Vec<u8> {
    let head = bytes.len().min(90);
    match random.u8(..20) {
        0 => bytes.truncate(random.usize(1..=bytes.len())),
        1 => bytes.resize(bytes.len() + random.usize(1..20), 0),
        // One bit of the outer headers, of the tunnel header or of the first inner ones.
        2 | 3 => bytes[random.usize(..head)] ^= 1 << random.u8(..8),
        // One byte of these.
        4 => bytes[random.usize(..head)] = random.u8(..),
        _ => {}
    }
    bytes
}

/// Sends the same random packets to two gateways, of which one traces, and expects the same of them.
fn compare(name: &str, mut make: impl FnMut() -> Lab, mut any: impl FnMut(&mut fastrand::Rng) -> Vec<u8>) {
    let seed = fastrand::u64(..);
    println!("{name}: seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut quick, mut slow) = (make(), make());
    let mut reader = start(&mut slow);
    let mut delivered = 0;
    for _ in 0..ROUNDS {
        let frames: Vec<_> = (0..random.usize(1..=40)).map(|_| any(&mut random)).collect();
        let mut outcomes = [&mut quick, &mut slow].map(|lab| {
            lab.stepped.advance(1_000_000);
            lab.send_all(WAN, frames.iter().map(Vec::as_slice));
            let sent = lab.sent();
            (sorted(&sent), lab.stepped.drops(), sorted(&lab.settle()), lab.stepped.punted())
        });
        assert_eq!(std::iter::from_fn(|| reader.next_trace()).count(), frames.len(), "all are traced");
        delivered += outcomes[0].0.len();
        let [quick, slow] = &mut outcomes;
        assert_eq!(quick, slow, "{name}");
    }
    for segment in 0..2 {
        assert_eq!(quick.control.segment_stats(segment), slow.control.segment_stats(segment), "{name}");
    }
    quick.assert_balanced();
    assert!(delivered > ROUNDS * 5, "{name}: {delivered} packets are delivered");
}

/// Frames to a known host, to an unknown one and to all, with and without tag, and of several sources.
#[test]
fn frames_are_those_of_the_slow_path() {
    let kinds = [
        ("vxlan", Some(42)),
        ("geneve", Some(42)),
        ("vxlan-gpe", Some(42)),
        ("gretap", None),
        ("gretap", Some(42)),
        ("nvgre", Some(42)),
        ("mpls-udp", Some(42)),
        ("mpls-gre", Some(42)),
    ];
    for (name, vni) in kinds {
        for remotes in ["'10.9.0.2'", "'fd00:9::2'", "'10.9.0.2', 'fd00:9::2'"] {
            for keys in ["", "clamp_mss = true"] {
                let make = || {
                    let id = vni.map(|vni| format!("vni = {vni}\n")).unwrap_or_default();
                    let mut lab = Lab::of_segments(
                        "",
                        &format!(
                            "[[segment]]\nkind = '{name}'\n{id}ports = [{{ port = 'lan' }}]\nremotes = [{remotes}]\n\
                             {keys}\n"
                        ),
                    )
                    .with_peer();
                    lab.settle();
                    lab.send(crate::lab::LAN, &frame(FAR, HOST));
                    lab.settle();
                    lab
                };
                let remotes: Vec<_> = remotes.split(", ").map(|remote| remote.trim_matches('\'')).collect();
                compare(&format!("{name} {remotes:?}"), make, |random| {
                    let unknown = MacAddr([2, 0, 0, 0, 7, 7]);
                    let to = *random.choice(&[HOST, HOST, HOST, unknown, MacAddr([0xff; 6]), FAR]).unwrap();
                    let from = *random.choice(&[FAR, FAR, MacAddr([2, 0, 0, 0, 8, 8])]).unwrap();
                    let versions = [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")];
                    let (src, dst) = *random.choice(&versions).unwrap();
                    let mut inner = framed(to, from, &ip_packet(src, dst, 64, random.usize(10..200)));
                    if random.u8(..10) == 0 {
                        inner.splice(12..12, [0x81, 0, 0, 5]);
                    }
                    let remote = random.choice(&remotes).unwrap();
                    let packet = ethernet_to_gateway(name, vni, remote, &inner, class(random));
                    mutate(random, packet)
                });
            }
        }
    }
}

/// Packets to a local host, to an unknown one, and with a TTL that ends at the gateway.
#[test]
fn ip_packets_are_those_of_the_slow_path() {
    for kind in TUNNELS {
        for remote in ["10.9.0.2", "fd00:9::2"] {
            let make = || {
                let (mut lab, mut host) = tunnel_of(kind.1, remote, "");
                // The host is resolved by the first packets.
                for (src, dst) in [("10.2.0.1", "10.1.0.10"), ("fd02::1", "fd01::10")] {
                    lab.send(WAN, &to_gateway_in_class(kind, remote, &ip_packet(src, dst, 64, 20), 0));
                }
                assert_eq!(settle(&mut lab, &mut host).len(), 2);
                lab
            };
            compare(&format!("{} {remote}", kind.1), make, |random| {
                let known = [("10.2.0.1", "10.1.0.10"), ("fd02::1", "fd01::10")];
                let (src, dst) = known[usize::from(random.u8(..4) == 0)];
                let ttl = if random.u8(..10) == 0 { 1 } else { 64 };
                let inner = ip_packet(src, dst, ttl, random.usize(..200));
                let packet = to_gateway_in_class(kind, remote, &inner, class(random));
                mutate(random, packet)
            });
        }
    }
}

/// A worker forgets the headers of a tunnel when its remote moves to another segment or goes.
#[test]
fn changes_end_what_is_known() {
    let text = |remotes: [&str; 2]| {
        let segment = |name: &str, port: &str, remotes: &str| {
            format!(
                "[[segment]]\nname = '{name}'\nkind = 'gretap'\nports = [{{ port = '{port}' }}]\n\
                 remotes = [{remotes}]\n"
            )
        };
        let [a, b] = remotes;
        let underlay = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n";
        format!("{underlay}{}{}", segment("a", "lan", a), segment("b", "lan2", b))
    };
    let names = ["wan", "lan", "lan2"];
    let mut lab = Lab::with_ports(&text(["'10.9.0.2'", "'10.9.0.3'"]), &names).with_peer();
    let from_two = ethernet_to_gateway("gretap", None, "10.9.0.2", &frame(HOST, FAR), 0);
    let steps: [([&str; 2], Option<PortId>); 5] = [
        (["'10.9.0.2'", "'10.9.0.3'"], Some(LAN)),
        (["'10.9.0.3'", "'10.9.0.2'"], Some(SPARE)),
        (["'10.9.0.3'", "'10.9.0.4'"], None),
        (["'10.9.0.4'", "'10.9.0.2'"], Some(SPARE)),
        (["'10.9.0.2'", "'10.9.0.4'"], Some(LAN)),
    ];
    for (remotes, expected) in steps {
        let source = Source::new("test", text(remotes));
        let config = GatewayConfig::read(&source.parse().unwrap().settings(), &names).unwrap();
        let Lab { stepped, control, .. } = &mut lab;
        stepped.with_plane(|plane| {
            let change = control.prepare(config, plane.seconds()).unwrap();
            control.reconfigure(change, plane.ports(), plane.seconds());
        });
        lab.settle();
        for _ in 0..2 {
            lab.send_all(WAN, [from_two.as_slice(); 3].into_iter());
            let ports: Vec<_> = lab.sent().into_iter().map(|(port, _)| port).collect();
            assert_eq!(ports, vec![expected; 3].into_iter().flatten().collect::<Vec<_>>(), "{remotes:?}");
        }
    }
    lab.assert_balanced();
}
