//! Rule offload on emulated ConnectX devices, compared with the reference: packets, order and counters must
//! be equal.
//!
//! There are four ports. On the first, mlx5dv installs the rules. On the second, without DevX,
//! `ibv_create_flow` installs the counting rules. On the third, `ibv_create_flow` installs all rules. On the
//! fourth, all rules run in software.
//!
//! ```text
//! RULES_SEED=17 cargo test -p wirepath-pipeline --test hardware emulated
//! RULES_SETS=10000 cargo test -p wirepath-pipeline --test hardware emulated       # more rule sets
//! RULES_SEED=5000 RULES_SETS=1000 ...                                             # rule sets from 5000 on
//! ```

use std::collections::HashMap;

use crate::bench::{self, Bench, Case, CaseConfig, Nic, PORTS, Received, Sent, number};
use crate::emulated_ports::{self, RDMA, is_sound};
use wirepath_flow::{Action, Direction, Rule};
use wirepath_nic_emulator::launch;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pipeline::rules::offload::Placement;
use wirepath_pmd::port::hardware::{PatternText, RuleCapabilities};
use wirepath_pmd::port::{PortId, RxQueue, StartedPort, TxQueue};
use wirepath_rule_oracle::{Fault, PacketMetadata, Rng, Verdict, generate};
use wirepath_testlab::require;
use wirepath_wire::{HeaderOffsets, L3Type, Parser};

/// Rule sets in a normal run.
const SETS: u64 = 200;
/// Frames per rule set, over all ports.
const PACKETS: usize = 120;
/// Rule sets in which a planted error is searched.
const SEARCHED: u64 = 150;
/// Queues per port.
const QUEUES: u16 = 4;
/// Number of frames of any length that fit into a queue that is not polled.
const HELD: usize = 32;
/// Name, rule backend, and use of DevX for each port with rule hardware.
const VARIANTS: [(&str, &str, bool); 3] = [("devx", "dv", true), ("bare", "dv", false), ("verbs", "ibv", true)];
/// The port where counting rules use `ibv_create_flow`.
const BARE: PortId = PortId::new(1);
/// Name of the count of rules that do so.
const COUNTED: &str = "counted without DevX";
/// Tunnel actions that must be tested in a NIC, as [`bench::tunnel_word`] names them.
const TUNNELS: [&str; 11] = [
    "decap vxlan",
    "decap geneve l2",
    "decap geneve l3",
    "decap gre l2",
    "decap gre l3",
    "decap ip",
    "encap vxlan",
    "encap geneve l3",
    "encap gre l2",
    "encap gre l3",
    "encap ip",
];
/// Environment variable with the planted error of the device.
const WRONG: &str = "WIREPATH_TEST_WRONG";

/// Returns a topology of device pairs with joined ports. One device of each pair is tested, and the other one
/// sends and receives.
fn topology(wrong: Option<&str>) -> String {
    let device = |end: &str, name: &str, more: &str| {
        format!("[[device]]\nkind = 'mlx5'\nname = '{end}{name}'\n{more}\n[[device.port]]\nlink = 'cable:{name}'\n")
    };
    let wrong = wrong.map(|wrong| format!(", wrong = '{wrong}'")).unwrap_or_default();
    let steering = |devx: bool| format!("steering = {{ devx = {devx}{wrong} }}");
    VARIANTS.iter().map(|(name, _, devx)| device("near", name, &steering(*devx)) + &device("far", name, "")).collect()
}

/// Queues of a port, and the port at the other end of its link.
struct Emulated {
    rx: Vec<RxQueue>,
    tx: Vec<TxQueue>,
    far: StartedPort,
}

fn transmit(queue: &mut TxQueue, packets: impl IntoIterator<Item = Packet>) -> Result<(), String> {
    let mut packets = packets.into_iter().peekable();
    while packets.peek().is_some() {
        let mut batch: Batch = packets.by_ref().take(wirepath_packet::BATCH).collect();
        for _ in 0..1000 {
            queue.transmit(&mut batch);
        }
        if !batch.is_empty() {
            return Err("a port does not send".to_owned());
        }
    }
    queue.reclaim();
    Ok(())
}

impl Nic for Emulated {
    fn receive(&mut self, frames: &[&[u8]], due: &[bool], pool: &Pool) -> Result<Vec<Received>, String> {
        transmit(&mut self.far.tx[0], frames.iter().map(|frame| bench::packet(pool, frame, None)))?;
        let due = due.iter().filter(|due| **due).count();
        let received = emulated_ports::receive(&mut self.rx, due);
        Ok(received.into_iter().map(|(queue, packet)| (Some(queue), packet)).collect())
    }

    fn send(&mut self, packets: Vec<Packet>) -> Result<Vec<Vec<u8>>, String> {
        let mut frames = Vec::new();
        let mut packets = packets.into_iter().peekable();
        while packets.peek().is_some() {
            // The ring at the other end limits the number of frames, because mirror copies can exceed a burst
            // and frames may take several buffers.
            let some: Vec<Packet> = packets.by_ref().take(HELD).collect();
            let count = some.len();
            transmit(&mut self.tx[0], some)?;
            frames.extend(
                emulated_ports::receive(&mut self.far.rx, count).iter().map(|(_, packet)| bench::bytes(packet)),
            );
        }
        Ok(frames)
    }
}

fn lab() -> Lab {
    let pool = Pool::new("nics", 1 << 13).expect("memory");
    let (mut nics, mut ports) = (Vec::new(), Vec::new());
    for (id, (name, backend, _)) in (0..).zip(VARIANTS) {
        let near = emulated_ports::start(PortId::new(id), &pool, &format!("near{name}"), backend, QUEUES);
        let far = emulated_ports::start(PortId::new(id), &pool, &format!("far{name}"), "off", 1);
        nics.push(Emulated { rx: near.rx, tx: near.tx, far });
        ports.push(near.port);
    }
    let mut counters = ports.iter_mut().map(|port| {
        let can = port.rule_hardware().expect("rule hardware").capabilities();
        can.ingress.map(|table| (table.counters > 0, table.counting.is_some()))
    });
    assert!(counters.by_ref().eq([Some((true, false)), Some((false, true)), Some((true, false))]), "ways to count");
    let can = ports[0].rule_hardware().expect("rule hardware").capabilities();
    let mut bench = Bench::new(nics, ports, &pool, QUEUES);
    bench.enable_hardware();
    Lab { bench, can }
}

/// The emulated devices and the program that uses them.
struct Lab {
    bench: Bench<Emulated>,
    /// Capabilities of the first device.
    can: RuleCapabilities,
}

/// Runs one random rule set. `fault` is planted in the reference.
fn run(Lab { bench, can }: &mut Lab, seed: u64, fault: Fault) -> Result<HashMap<&'static str, usize>, String> {
    let mut rng = Rng::new(seed);
    let direction = if seed % 4 == 3 { Direction::Egress } else { Direction::Ingress };
    // Malformed packets match no rule, neither in software nor in a device.
    let may = |frame: &[u8]| frame.len() >= 14 && is_sound(frame);
    let config = CaseConfig { packets: PACKETS, everywhere: true, can: Some(can), may: &may };
    let case = Case::new(&mut rng, &bench.ports, direction, &config);
    let run_case = |bench: &mut Bench<Emulated>, case: &Case| {
        // Drain the packets that an earlier failure left in the queues.
        for nic in &mut bench.nics {
            emulated_ports::receive(&mut nic.rx, 0);
            emulated_ports::receive(&mut nic.far.rx, 0);
        }
        bench.set(&[]);
        bench.tick(3_000_000_000);
        bench.set(&case.early);
        bench.check(case, fault)
    };
    if let Err(what) = run_case(bench, &case) {
        // A planted error is not minimised.
        let planted = fault != Fault::None || std::env::var_os(WRONG).is_some();
        let small = if planted { String::new() } else { case.shrunk(|case| run_case(bench, case).is_err()).show() };
        return Err(format!("RULES_SEED={seed}: {what}\n{small}"));
    }
    let mut words = bench.words();
    for (rule, list) in case.rules.iter().zip(&bench.control.placements()) {
        // At egress workers always match, so that the rest of the rule is in the NIC.
        let in_nic = |placement: &Placement| match direction {
            Direction::Ingress => matches!(placement, Placement::Hardware(_)),
            Direction::Egress => matches!(placement, Placement::Split(_)),
        };
        if let Some(word) = bench::tunnel_word(rule).filter(|_| list.iter().any(|(_, placement)| in_nic(placement))) {
            *words.entry(word).or_default() += 1;
        }
    }
    if direction == Direction::Ingress {
        let placements = bench.control.placements();
        let drops = case.rules.iter().zip(&placements).filter(|(rule, _)| rule.actions().last() == Some(&Action::Drop));
        words.insert(
            COUNTED,
            drops
                .filter(|(_, list)| list.iter().any(|(port, it)| *port == BARE && matches!(it, Placement::Hardware(_))))
                .count(),
        );
    }
    Ok(words)
}

#[test]
fn every_backend_gives_the_results_of_the_reference() {
    require!(RDMA);
    launch::run_test("emulated::every_backend_gives_the_results_of_the_reference", &topology(None), || {
        let mut lab = lab();
        let first = number("RULES_SEED");
        let sets = number("RULES_SETS").unwrap_or(if first.is_some() { 1 } else { SETS });
        let seeds = first.unwrap_or(0)..first.unwrap_or(0) + sets;
        let one = sets == 1;
        let mut words: HashMap<&str, usize> = HashMap::new();
        let mut failures = Vec::new();
        for seed in seeds {
            match run(&mut lab, seed, Fault::None) {
                Ok(seen) => seen.into_iter().for_each(|(word, n)| *words.entry(word).or_default() += n),
                Err(failure) => failures.push(failure),
            }
            if failures.len() >= 5 {
                break;
            }
        }
        println!("{words:?}");
        assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
        for (word, least) in [("hardware", 50), ("split", 50), ("software", 50), (COUNTED, 1)] {
            assert!(one || words.get(word).is_some_and(|n| *n >= least), "{word} is not tested: {words:?}");
        }
        for word in TUNNELS {
            assert!(one || words.contains_key(word), "{word} is not tested in a NIC: {words:?}");
        }
        // A planted error in the reference must be found.
        if !one {
            for fault in [Fault::MaskBit, Fault::LastAddedFirst, Fault::MarkLost, Fault::CountsWhatArrived] {
                let found = (0..SEARCHED).any(|seed| run(&mut lab, seed, fault).is_err());
                assert!(found, "{fault:?} was not found");
            }
        }
    });
}

/// Writes total length and checksum of an outer IPv4 header without options.
fn finish_ipv4(frame: &mut [u8]) {
    let length = (frame.len() - 14) as u16;
    frame[16..18].copy_from_slice(&length.to_be_bytes());
    let sum = !wirepath_nic_emulator::frame::fold(wirepath_nic_emulator::frame::sum(&frame[14..34]));
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// Returns a VXLAN packet with this number of bytes behind the UDP datagram.
fn vxlan(behind: usize, checksum: u16) -> Vec<u8> {
    let inner: Vec<u8> = [&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5][..], &[7; 46]].concat();
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0];
    frame.extend([10, 0, 0, 1, 10, 0, 0, 2, 0xc0, 0, 0x12, 0xb5]);
    frame.extend((16 + inner.len() as u16).to_be_bytes());
    frame.extend(checksum.to_be_bytes());
    frame.extend([8, 0, 0, 0, 0, 0, 7, 0]);
    frame.extend(inner);
    frame.extend(vec![0xee; behind]);
    finish_ipv4(&mut frame);
    frame
}

#[test]
fn incorrect_nic_decapsulation_is_not_used() {
    require!(RDMA);
    launch::run_test("emulated::incorrect_nic_decapsulation_is_not_used", &topology(None), || {
        let Lab { mut bench, .. } = lab();
        let rules = [
            "ingress prio 1: ipv4 src 10.0.0.1 ecn 0 / udp / vxlan vni 7 => decap l2, mark 5",
            // Packets that the NIC leaves to software by the rule above must not match this rule in the NIC.
            "ingress prio 2: ipv4 src 10.0.0.1 ecn 0 / udp => mark 6",
        ];
        let rules = rules.map(|text| text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))).to_vec();
        let frames = [vxlan(0, 0), vxlan(4, 0), vxlan(0, 0x1234), vxlan(4, 0x1234)];
        let by = |(port, frame): (PortId, &Vec<u8>)| Sent { burst: 0, port, frame: frame.clone() };
        let sent = frames.iter().flat_map(|frame| (0..PORTS).map(move |port| by((PortId::new(port), frame)))).collect();
        let case = Case { direction: Direction::Ingress, early: Vec::new(), rules, sent };
        bench.check(&case, Fault::None).unwrap_or_else(|failure| panic!("{failure}"));
        let placements = bench.control.placements();
        let on_first = |rule: usize| (placements[rule][0].1.name(), placements[rule][0].1.why().unwrap_or_default());
        let (upper, lower) = (on_first(0), on_first(1));
        assert!(upper.0 == "hardware" && upper.1.contains("outer lengths"), "{upper:?}");
        assert!(lower.0 == "software" && lower.1.contains("decap l2"), "{lower:?}");
    });
}

/// Returns a GRE packet with these flags. An optional field of 4 bytes follows the header if `optional` is true.
fn gre(flags: u16, optional: bool) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 47, 0, 0];
    frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend(flags.to_be_bytes());
    frame.extend([0x65, 0x58]);
    frame.extend(&[0u8; 4][..if optional { 4 } else { 0 }]);
    frame.extend([2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5]);
    frame.extend([7; 46]);
    finish_ipv4(&mut frame);
    frame
}

/// A device knows the length of GRE headers with checksum, key and sequence number. Other flags change the length, so
/// the workers get these packets.
#[test]
fn gre_with_unknown_flags_is_not_decapsulated() {
    require!(RDMA);
    launch::run_test("emulated::gre_with_unknown_flags_is_not_decapsulated", &topology(None), || {
        let Lab { mut bench, .. } = lab();
        let text = "ingress: ipv4 src 10.0.0.1 ecn 0 / gre flags 0 mask 0x1000 proto 0x6558 / eth => decap l2, mark 5";
        let rule: Rule = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        // Without optional fields and with a reserved bit that is ignored, with a key, and with a checksum.
        let known = [gre(0, false), gre(0x0040, false), gre(0x2000, true), gre(0x8000, true)];
        // Routing (RFC 1701), strict source route, bit 5, version 1.
        let unknown = [gre(0x4000, true), gre(0x0800, false), gre(0x0400, false), gre(1, false)];
        let frames = known.iter().chain(&unknown);
        let by = |frame: &Vec<u8>| Sent { burst: 0, port: PortId::new(0), frame: frame.clone() };
        let case = Case {
            direction: Direction::Ingress,
            early: Vec::new(),
            rules: vec![rule],
            sent: frames.map(by).collect(),
        };
        bench.tagged = 0;
        bench.check(&case, Fault::None).unwrap_or_else(|failure| panic!("{failure}"));
        let placement = bench.control.placements()[0][0].1.clone();
        assert!(placement.why().is_some_and(|why| why.contains("gre flags")), "{placement:?}");
        assert_eq!(bench.tagged, known.len(), "frames that matched in the NIC");
    });
}

/// Frames of each rule in the bulk test.
const BULK: usize = 1000;

/// Rules with all that a NIC does: each tunnel of [`bench::DECAPS`], MAC addresses, TTL and counters.
fn bulk_rules() -> Vec<String> {
    let mut rules = vec![
        "ingress: ipv4 dst 10.0.0.2 => count, set eth dst 02:00:00:00:00:07, set eth src 02:00:00:00:00:08, dec-ttl"
            .to_owned(),
        "ingress: ipv6 dst fd00::2 => count, set eth dst 02:00:00:00:00:07, dec-ttl".to_owned(),
    ];
    for (ip, outer) in [(4, "ipv4 src 10.0.0.1"), (6, "ipv6 src fd00::1")] {
        for kind in bench::DECAPS {
            let (outer, kind) = match kind.strip_prefix("proto 4") {
                Some(rest) => (format!("{outer} proto 4"), rest.to_owned()),
                None => (outer.to_owned(), format!(" / {}", kind.replace("VNI", "2"))),
            };
            let (inner, decap) = match kind.ends_with("0x6558") || kind.contains("vxlan") {
                true => ("eth / inner ipv4", "decap l2"),
                false => ("inner ipv4", "decap l3 0200000000090200000000080800"),
            };
            // An outer congestion mark is left to software.
            rules.push(format!(
                "ingress: {outer} ecn 0{kind} / {inner} => count, {decap}, set eth dst 02:00:00:00:00:07, dec-ttl, \
                 mark {ip}"
            ));
        }
    }
    rules
}

/// Frames of each kind pass the NIC, which does everything but the mark. The counters and frames are those of the
/// reference.
#[test]
fn each_tunnel_in_bulk() {
    require!(RDMA);
    launch::run_test("emulated::each_tunnel_in_bulk", &topology(None), || {
        let Lab { mut bench, can } = lab();
        let aside: Vec<Rule> = can.ingress.iter().flat_map(|table| &table.excluded_patterns).map(counting).collect();
        let aside = bench::reference(&aside);
        let mut rng = Rng::new(11);
        for text in bulk_rules() {
            let rule: Rule = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            let mut oracle = bench::reference(std::slice::from_ref(&rule));
            let mut sent = Vec::new();
            while sent.len() < BULK {
                let (frame, _) = generate::packet(&mut rng, Some(&rule));
                let metadata = PacketMetadata::default();
                let outcome = oracle.run(Direction::Ingress, &frame, &metadata, 0);
                let passes = outcome.rule.is_some() && outcome.verdict == Verdict::Pass;
                let passes = passes && aside.classify(Direction::Ingress, &frame, &metadata).is_none();
                if passes && frame.len() <= bench::LONGEST && is_sound(&frame) && in_nic(&frame) {
                    sent.push(Sent { burst: sent.len() / 30, port: PortId::new(0), frame });
                }
            }
            let case = Case { direction: Direction::Ingress, early: Vec::new(), rules: vec![rule], sent };
            bench.tagged = 0;
            bench.check(&case, Fault::None).unwrap_or_else(|failure| panic!("{text}: {failure}"));
            let placement = bench.control.placements()[0][0].1.clone();
            assert!(matches!(placement, Placement::Hardware(_)), "{text}: {placement:?}");
            assert_eq!(bench.tagged, BULK, "{text}: frames that matched in the NIC");
        }
    });
}

/// Returns a rule with this pattern.
fn counting(pattern: &PatternText) -> Rule {
    Rule::new(Direction::Ingress, 0, pattern.items().to_vec(), vec![Action::Count]).expect("a pattern")
}

/// Returns whether a NIC takes a frame that matches: neither IP packet is a fragment or without hops, the outer GRE
/// flags and UDP lengths are right, and checksums too.
fn in_nic(frame: &[u8]) -> bool {
    let Ok(parsed) = Parser::default().parse(frame) else { return false };
    let stacks = [parsed.stack(0), parsed.stack(1)];
    let hops = |stack: &&HeaderOffsets| {
        let ttl = stack.l3() + if stack.l3_type() == L3Type::Ipv4 { 8 } else { 7 };
        !stack.is_fragment() && frame.get(ttl).is_some_and(|ttl| *ttl > 1)
    };
    let outer = wirepath_nic_emulator::frame::parse(frame);
    let valid = outer.ip_checksum_ok(frame) != Some(false) && outer.transport_checksum_ok(frame) != Some(false);
    let length = stacks[0].as_ref().and_then(|stack| Some((stack.udp_end(frame)?, stack.end())));
    valid && length.is_none_or(|(udp, ip)| udp == ip) && stacks.iter().flatten().all(hops)
}

#[test]
fn a_planted_error_in_an_emulated_nic_is_found() {
    require!(RDMA);
    let wrongs = ["mask", "order", "tag", "checksum", "length"];
    for wrong in wrongs.iter().filter(|wrong| std::env::var(WRONG).map_or(true, |here| here == **wrong)) {
        launch::run_test_with_env(
            "emulated::a_planted_error_in_an_emulated_nic_is_found",
            &topology(Some(wrong)),
            &[(WRONG, wrong)],
            || {
                let mut lab = lab();
                let found = (0..SEARCHED).any(|seed| run(&mut lab, seed, Fault::None).is_err());
                assert!(found, "\"{wrong}\" was not found");
            },
        );
    }
}
