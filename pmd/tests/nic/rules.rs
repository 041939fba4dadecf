//! Flow rules in an emulated ConnectX, installed by the drivers `mlx5` and `verbs`.

use std::time::{Duration, Instant};

use crate::common::bytes;
use crate::emulated::{EmulatedNic, TIMEOUT, finish, fold, packet, receive, send, statistic, sum, under};

use wirepath_flow::{Action, ItemKind, Rule};
use wirepath_packet::offload::Flags;
use wirepath_packet::{Batch, Packet, Pool, PtypeL3, PtypeL4};
use wirepath_pmd::port::hardware::{
    DestinationKind, HardwareCount, HardwareRule, HardwareRuleId, RefusalKind, RuleBackend, RuleDestination,
    RuleHardware, RuleRefusal,
};
use wirepath_pmd::port::{PortConfig, StartedPort};
use wirepath_testlab::{Requirement, require};

const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mlx5.driver");
const MLX5: EmulatedNic = EmulatedNic { driver: "mlx5", device: "mlx50", modes: &[] };

fn start(pool: &Pool, settings: &str, change: impl FnOnce(&mut PortConfig)) -> StartedPort {
    MLX5.start(pool, settings, change)
}

/// A device with DevX commands, so that rules can have counters.
const STEERING_DEVICE: &str =
    "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\nsteering = { devx = true }\n[[device.port]]\nlink = 'loop'\n";

/// Converts a rule of the rule language to a hardware rule on a level.
fn rule(level: u16, text: &str) -> HardwareRule {
    let text: Rule = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
    let (mut destination, mut tag, mut count, mut actions) = (RuleDestination::Next, None, false, Vec::new());
    for action in text.actions() {
        match action {
            Action::Mark(mark) => tag = Some(*mark),
            Action::Count => count = true,
            Action::Queue(queue) => destination = RuleDestination::Queue(*queue),
            Action::Drop => destination = RuleDestination::Drop,
            Action::Kernel => destination = RuleDestination::Kernel,
            other => actions.push(other.clone()),
        }
    }
    HardwareRule {
        direction: text.direction(),
        level,
        pattern: text.pattern().to_vec(),
        actions,
        destination,
        tag,
        count,
        require_integrity: false,
    }
}

fn hardware(port: &mut StartedPort) -> &mut dyn RuleHardware {
    port.port.rule_hardware().expect("rule hardware")
}

fn install(port: &mut StartedPort, level: u16, text: &str) -> HardwareRuleId {
    hardware(port).install(&rule(level, text)).unwrap_or_else(|refusal| panic!("{text}: {refusal}"))
}

fn refused(port: &mut StartedPort, level: u16, text: &str) -> RuleRefusal {
    hardware(port).install(&rule(level, text)).expect_err(text)
}

/// Sends packets and returns the marks of the received ones, ordered by length.
fn marks(port: &mut StartedPort, packets: impl IntoIterator<Item = Packet>, expected: usize) -> Vec<Option<u32>> {
    send(port, packets);
    let mut got: Vec<Packet> = receive(port, expected);
    got.sort_by_key(|packet| packet.len());
    got.iter().map(Packet::mark).collect()
}

/// Backends for rules, with the number of receive queues.
const BACKENDS: [(&str, RuleBackend, u16); 4] = [
    ("rules = 'dv'", RuleBackend::Dv, 1),
    ("rules = 'dv'", RuleBackend::Dv, 3),
    ("rules = 'ibv'", RuleBackend::Ibv, 1),
    ("rules = 'ibv'", RuleBackend::Ibv, 4),
];

#[test]
fn rules_mark_drop_count_and_honour_levels() {
    require!(RDMA);
    under("rules::rules_mark_drop_count_and_honour_levels", STEERING_DEVICE, |nics| {
        for (settings, backend, queues) in BACKENDS {
            let pool = Pool::new("rules", 4096).expect("memory");
            let mut port = start(&pool, settings, |config| config.rx_queues = queues);
            let can = hardware(&mut port).capabilities();
            assert_eq!((can.backend, can.tag_bits), (backend, 24), "{can:?}");
            let table = can.ingress.as_ref().expect("rules for what comes in");
            assert_eq!(table.levels, if queues == 1 { 13 } else { 4 });
            let json = serde_json::to_string(&can).expect("capabilities are data");
            let read: wirepath_pmd::port::hardware::RuleCapabilities =
                serde_json::from_str(&json).expect("what was written");
            assert!(read == can, "{json}");

            // Fragments are excluded from the rules.
            for aside in &table.excluded_patterns {
                let id = install(&mut port, 0, &format!("ingress: {aside} => mark 3"));
                hardware(&mut port).remove(id).expect("a rule is taken out");
            }
            let four = install(&mut port, 0, "ingress: ipv4 dst 198.18.0.2 frag no / udp dst 9 => count, mark 4");
            let six = install(&mut port, 1, "ingress: ipv6 dst fd00::/16 => count, mark 6");
            let rest = install(&mut port, 3, "ingress: eth type 0x0800 => mark 0xfffffe");
            let send = |port: &mut StartedPort| {
                // The packets are distinguished by their lengths.
                let packets = [
                    packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 20),
                    packet(&pool, PtypeL3::Ipv4, PtypeL4::Tcp, 20),
                    packet(&pool, PtypeL3::Ipv6, PtypeL4::Udp, 60),
                    packet(&pool, PtypeL3::Ipv6, PtypeL4::Tcp, 80),
                ];
                marks(port, packets, 4)
            };
            assert_eq!(send(&mut port), [Some(4), Some(0xff_fffe), Some(6), Some(6)], "{settings} {queues}");
            let count = |port: &mut StartedPort, id| hardware(port).count(id);
            let bytes = 14 + 20 + 8 + 20;
            assert_eq!(count(&mut port, four), Some(HardwareCount { packets: 1, bytes }));
            assert_eq!(count(&mut port, six).map(|count| count.packets), Some(2));
            assert_eq!(count(&mut port, rest), None, "no counter was requested");
            // A rule on a higher level takes precedence.
            let above = install(&mut port, 0, "ingress: ipv6 => mark 66");
            assert_eq!(send(&mut port), [Some(4), Some(0xff_fffe), Some(66), Some(66)]);
            let dropping = install(&mut port, 2, "ingress: eth type 0x0800 => count, drop");
            self::send(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Tcp, 20)]);
            assert_eq!(marks(&mut port, [packet(&pool, PtypeL3::Ipv6, PtypeL4::Tcp, 20)], 1), [Some(66)]);
            let last = hardware(&mut port).remove(dropping).expect("a rule is taken out");
            assert_eq!(last, HardwareCount { packets: 1, bytes: 14 + 20 + 20 + 20 });
            // A rule with the same match and other actions is refused.
            let beside = refused(&mut port, 0, "ingress: ipv6 => mark 67");
            assert_eq!((beside.kind, beside.errno), (RefusalKind::Refused, Some(libc::EEXIST)), "{beside}");
            assert_eq!(hardware(&mut port).remove(above), Ok(HardwareCount::default()));
            let next = install(&mut port, 0, "ingress: ipv6 => mark 67");
            assert_eq!(send(&mut port), [Some(4), Some(0xff_fffe), Some(67), Some(67)]);
            for id in [four, six, rest, next] {
                hardware(&mut port).remove(id).expect("a rule is taken out");
            }
            assert_eq!(send(&mut port), [None; 4]);
            let refused = nics.violations();
            let ordered = |line: &String| line.contains("a rule with this match") || line.contains("File exists");
            assert!(refused.iter().all(ordered), "{refused:?}");
            finish(port, &pool);
        }
    });
}

#[test]
fn rules_direct_packets_to_queues() {
    require!(RDMA);
    under("rules::rules_direct_packets_to_queues", STEERING_DEVICE, |nics| {
        for settings in ["rules = 'dv'", "rules = 'ibv'"] {
            let pool = Pool::new("queues", 8192).expect("memory");
            let mut port = start(&pool, settings, |config| config.rx_queues = 4);
            let flows = |port: &mut StartedPort| {
                send(port, (0..64).map(|i| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30 + i)));
                let mut got: Vec<(usize, Option<u32>)> = Vec::new();
                let mut all = 0;
                for (queue, rx) in port.rx.iter_mut().enumerate() {
                    let start = Instant::now();
                    while all < 64 && start.elapsed() < Duration::from_millis(200) {
                        let mut batch = Batch::new();
                        rx.receive(&mut batch);
                        batch.drain_front(usize::MAX, |packet| got.push((queue, packet.mark())));
                        all = got.len();
                    }
                }
                assert_eq!(got.len(), 64);
                got
            };
            let before: Vec<usize> = flows(&mut port).iter().map(|(queue, _)| *queue).collect();
            let marked = install(&mut port, 1, "ingress: eth type 0x0800 => mark 5");
            let marked_flows = flows(&mut port);
            assert!(marked_flows.iter().all(|(_, mark)| *mark == Some(5)));
            // All packets are of one flow, so they keep their queue.
            assert_eq!(marked_flows.iter().map(|(queue, _)| *queue).collect::<Vec<_>>(), before);
            let other = (before[0] + 1) % 4;
            let text = format!("ingress: ipv4 frag no / udp dst 9 => mark 6, queue {other}");
            install(&mut port, 0, &text);
            assert_eq!(flows(&mut port), [(other, Some(6)); 64]);
            let refusal = refused(&mut port, 0, "ingress: ipv6 => queue 4");
            assert_eq!(refusal.kind, RefusalKind::Unsupported, "{refusal}");
            hardware(&mut port).remove(marked).expect("a rule is taken out");
            assert_eq!(nics.violations(), [""; 0]);
            finish(port, &pool);
        }
    });
}

/// VXLAN encapsulation header with VNI 42.
const TUNNEL: &str = "0200000000aa0200000000bb0800\
    4500000000004000401100000a0000010a000002\
    c00012b500000000\
    0800000000002a00";

#[test]
fn tunnels_are_put_on_and_taken_off_by_the_device() {
    require!(RDMA);
    under("rules::tunnels_are_put_on_and_taken_off_by_the_device", STEERING_DEVICE, |nics| {
        for queues in [1, 2] {
            let pool = Pool::new("tunnels", 4096).expect("memory");
            let mut port = start(&pool, "", |config| config.rx_queues = queues);
            let can = hardware(&mut port).capabilities();
            let (ingress, egress) = (can.ingress.as_ref().unwrap(), can.egress.as_ref().unwrap());
            assert_eq!((ingress.actions.reformats.len(), egress.actions.reformats.len()), (2, 2), "{can:?}");
            assert_eq!((egress.levels, egress.actions.reformats[0].max_header), (16, 128));
            assert!(ingress.item(ItemKind::Vxlan, false).is_some() && ingress.actions.dec_ttl);
            assert!(
                egress.actions.destinations.contains(&DestinationKind::Next)
                    && ingress.actions.destinations.contains(&DestinationKind::Kernel)
            );

            let encap = install(&mut port, 0, &format!("egress: meta data 5 => count, encap l2 {TUNNEL}"));
            let sent = || {
                let mut packet = packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 33);
                let flags = packet.flags();
                packet.set_flags(flags.with(Flags::TX_METADATA));
                packet.set_mark(5);
                packet
            };
            // The frame returns with the encapsulation.
            send(&mut port, [sent(), packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 33)]);
            let mut got = receive(&mut port, 2);
            got.sort_by_key(|packet| packet.len());
            let (plain, outer) = (bytes(&got[0]), bytes(&got[1]));
            assert_eq!(outer.len(), plain.len() + 50);
            assert_eq!(
                (&outer[..12], &outer[26..34]),
                (&[2, 0, 0, 0, 0, 0xaa, 2, 0, 0, 0, 0, 0xbb][..], &[10, 0, 0, 1, 10, 0, 0, 2][..])
            );
            assert_eq!(outer[50..], plain, "the frame inside");
            assert_eq!(fold(sum(&outer[14..34])), 0xffff, "the checksum of the outer header");
            drop(got);
            let decap = install(
                &mut port,
                0,
                "ingress: ipv4 src 10.0.0.1 ecn 0 / udp dst 4789 / vxlan vni 42 / ipv4 => count, mark 42, decap \
                 l2, dec-ttl",
            );
            send(&mut port, [sent()]);
            let got = receive(&mut port, 1).remove(0);
            let mut expected = plain.clone();
            // The TTL is decremented and the checksum updated.
            expected[22] -= 1;
            expected[24..26].fill(0);
            let checksum = !fold(sum(&expected[14..34]));
            expected[24..26].copy_from_slice(&checksum.to_be_bytes());
            assert_eq!((bytes(&got), got.mark()), (expected, Some(42)));
            drop(got);
            let count = |port: &mut StartedPort, id| hardware(port).count(id).map(|count| (count.packets, count.bytes));
            assert_eq!(count(&mut port, encap), Some((2, 2 * plain.len() as u64)));
            assert_eq!(count(&mut port, decap), Some((1, outer.len() as u64)));
            assert_eq!(nics.violations(), [""; 0]);
            finish(port, &pool);
        }
    });
}

#[test]
fn rules_come_back_with_the_device() {
    require!(RDMA);
    under("rules::rules_come_back_with_the_device", STEERING_DEVICE, |nics| {
        let pool = Pool::new("reset", 4096).expect("memory");
        let mut port = start(&pool, "", |config| config.rx_queues = 2);
        let id = install(&mut port, 0, "ingress: ipv4 => count, mark 9");
        install(&mut port, 1, &format!("egress: meta data 5 => encap l2 {TUNNEL}"));
        assert_eq!(marks(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 20)], 1), [Some(9)]);
        assert_eq!(hardware(&mut port).count(id).map(|count| count.packets), Some(1));
        nics.inject("kind = 'device-fatal'");
        let start = Instant::now();
        let mut away = false;
        while statistic(&mut port, "device_resets") == 0 {
            port.port.events();
            // Workers continue to poll.
            let mut batch: Batch = [packet(&pool, PtypeL3::Ipv6, PtypeL4::Udp, 30)].into_iter().collect();
            for queue in &mut port.tx {
                queue.transmit(&mut batch);
                queue.reclaim();
            }
            batch.clear();
            for queue in &mut port.rx {
                queue.receive(&mut batch);
            }
            match hardware(&mut port).install(&rule(2, "ingress: ipv6 hops 1 => drop")) {
                Ok(id) => drop(hardware(&mut port).remove(id)),
                Err(refusal) => {
                    assert_eq!(refusal.kind, RefusalKind::DeviceLost, "{refusal}");
                    away = true;
                }
            }
            assert!(start.elapsed() < TIMEOUT, "the device is not back");
        }
        assert!(away, "there was a moment without the device");
        let tunnelled = {
            let mut packet = packet(&pool, PtypeL3::Ipv6, PtypeL4::Udp, 20);
            packet.set_flags(Flags::TX_METADATA);
            packet.set_mark(5);
            packet
        };
        // Both rules are installed: the encapsulated frame is IPv4, so it is marked.
        assert_eq!(marks(&mut port, [tunnelled], 1), [Some(9)]);
        assert_eq!(hardware(&mut port).count(id).map(|count| count.packets), Some(2), "what was counted before counts");
        assert_eq!(hardware(&mut port).epoch(), 0, "the rules need no reinstallation");
        finish(port, &pool);
    });
}

#[test]
fn refusals_say_what_kind_they_are() {
    require!(RDMA);
    under("rules::refusals_say_what_kind_they_are", STEERING_DEVICE, |nics| {
        let pool = Pool::new("refusals", 4096).expect("memory");
        let mut port = start(&pool, "", |_| ());
        for (errno, kind, meaning) in [
            ("ENOSPC", RefusalKind::Full, "the table or the counters are full"),
            ("ENOMEM", RefusalKind::Full, "out of memory, or the kernel does not support this priority"),
            ("EINVAL", RefusalKind::Unsupported, "does not support this combination"),
            ("EOPNOTSUPP", RefusalKind::Unsupported, "does not support this match or action"),
            ("EPERM", RefusalKind::Refused, "CAP_NET_RAW"),
            ("EBUSY", RefusalKind::Refused, "temporarily busy"),
        ] {
            nics.inject(&format!("kind = 'refuse'\ncommand = 'create_flow'\nerrno = '{errno}'"));
            let refusal = refused(&mut port, 0, "ingress: ipv4 => mark 3");
            assert!(refusal.errno.is_some() && refusal.kind == kind, "{errno}: {refusal:?}");
            assert!(refusal.reason.contains(errno) && refusal.reason.contains(meaning), "{refusal}");
        }
        for (text, why) in [
            ("ingress: eth dst ff:ff:ff:ff:ff:ff => drop", "behind all others"),
            ("ingress: ipv4 id 7 => drop", "ipv4 id"),
            ("ingress: gre / inner ipv4 => drop", "whether"),
            ("ingress: ipv4 => set ipv4 ttl 5, rss queues 0", "RSS with other queues"),
            ("ingress: eth => push-vlan vid 5", "push-vlan"),
            ("egress: ipv4 => drop", "Queue at egress"),
        ] {
            let mut asked = rule(0, text.split(", rss").next().unwrap());
            if let Some(Action::Rss(rss)) = text.parse::<Rule>().unwrap().actions().last() {
                (asked.destination, asked.actions) = (RuleDestination::Rss(rss.clone()), Vec::new());
            }
            if text.starts_with("egress") {
                asked.destination = RuleDestination::Queue(0);
            }
            let refusal = hardware(&mut port).install(&asked).expect_err(text);
            assert_eq!((refusal.kind, refusal.errno), (RefusalKind::Unsupported, None), "{text}: {refusal}");
            assert!(refusal.reason.contains(why), "{text}: {refusal}");
        }
        // Installation is atomic: the third of seven entries is refused, and none of them stays.
        assert_eq!(refused(&mut port, 13, "ingress: ipv4 => drop").kind, RefusalKind::Unsupported);
        assert_eq!(marks(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 20)], 1), [None]);
        finish(port, &pool);
        let pool = Pool::new("half", 4096).expect("memory");
        let mut port = start(&pool, "", |config| config.rx_queues = 2);
        nics.inject("kind = 'refuse'\ncommand = 'create_flow'\nerrno = 'ENOSPC'\nafter = 2");
        assert_eq!(refused(&mut port, 0, "ingress: eth => mark 3").kind, RefusalKind::Full);
        assert_eq!(marks(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 20)], 1), [None]);
        install(&mut port, 0, "ingress: eth => mark 3");
        assert_eq!(marks(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 20)], 1), [Some(3)]);
        finish(port, &pool);
    });
}

#[test]
fn missing_rule_features_are_not_offered() {
    require!(RDMA);
    let little = "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\nsteering = { devx = false, priorities = 8, \
         match_parts = ['outer'], encap_bytes = 64, modify_actions = 2, reformats = ['l2-to-l2-tunnel'] }\n\
         [[device.port]]\nlink = 'loop'\n";
    under("rules::missing_rule_features_are_not_offered", little, |_| {
        let pool = Pool::new("little", 4096).expect("memory");
        let mut port = start(&pool, "", |config| config.rx_queues = 2);
        let can = hardware(&mut port).capabilities();
        let (ingress, egress) = (can.ingress.as_ref().unwrap(), can.egress.as_ref().unwrap());
        assert_eq!((ingress.levels, egress.levels, ingress.counters), (1, 8, 0));
        assert!(can.notes.iter().any(|note| note.contains("DevX")), "{:?}", can.notes);
        let has = |kind| ingress.item(kind, false).is_some();
        assert!(has(ItemKind::Ipv4) && !has(ItemKind::Vxlan) && !has(ItemKind::Mpls) && !has(ItemKind::Icmp));
        assert!(ingress.item(ItemKind::Ipv4, true).is_none() && egress.item(ItemKind::Meta, false).is_none());
        assert_eq!((ingress.actions.commands, ingress.actions.reformats.len()), (2, 0));
        let [encap] = &egress.actions.reformats[..] else { panic!("{egress:?}") };
        assert_eq!(encap.max_header, 64);
        finish(port, &pool);
        // Without rules, and with frames to this host only.
        let mut port = start(&pool, "rules = 'off'", |_| ());
        assert!(port.port.rule_hardware().is_none());
        finish(port, &pool);
        let mut port = start(&pool, "", |config| config.promiscuous = false);
        let can = hardware(&mut port).capabilities();
        assert!(can.ingress.is_none() && can.egress.is_some(), "{can:?}");
        let refusal = refused(&mut port, 0, "ingress: ipv4 => drop");
        assert_eq!(refusal.kind, RefusalKind::Unsupported);
        finish(port, &pool);
    });
}

#[test]
fn verbs_rules_drop_count_and_choose_queues() {
    require!(RDMA);
    under("rules::verbs_rules_drop_count_and_choose_queues", STEERING_DEVICE, |nics| {
        let pool = Pool::new("plain", 4096).expect("memory");
        let verbs = EmulatedNic { driver: "verbs", ..MLX5 };
        let mut port = verbs.start(&pool, "", |config| config.rx_queues = 2);
        let can = hardware(&mut port).capabilities();
        assert_eq!((can.backend, can.tag_bits, can.egress), (RuleBackend::Ibv, 0, None));
        let id = install(&mut port, 0, "ingress: ipv6 => count, drop");
        install(&mut port, 0, "ingress: ipv4 frag no / tcp dst 9 => queue 1");
        let packets = [packet(&pool, PtypeL3::Ipv6, PtypeL4::Udp, 20), packet(&pool, PtypeL3::Ipv4, PtypeL4::Tcp, 20)];
        assert_eq!(marks(&mut port, packets, 1), [None]);
        assert_eq!(hardware(&mut port).count(id).map(|count| count.packets), Some(1));
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}
