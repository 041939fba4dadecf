//! Rules in a NIC: the same packets, order and counters as the naive reference says, whatever the NIC can do.
//!
//! The NIC is a model of its own: it applies what it was given with the matcher and the rewriting of `wirepath-rulelab`, level by
//! level, and knows nothing of the stage. Two rules on one level that a packet fits both are an error of the stage.
//!
//! ```text
//! RULES_SEED=17 cargo test -p wirepath-pipeline --test hardware
//! RULES_SETS=10000 cargo test -p wirepath-pipeline --test hardware --release      # more of them
//! ```

mod model;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use model::{Arrived, Model, everything};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::hardware::Placement;
use wirepath_pipeline::rules::{RuleControl, RuleLimits, Ruled, check};
use wirepath_pipeline::{Context, ControlPlane, PortInfo, Punt, Stepped, WorkerInfo};
use wirepath_pmd::flow::{Action, Direction, Rule};
use wirepath_pmd::packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::hardware::{RefusalKind, RuleCapabilities};
use wirepath_pmd::port::{PortId, ToKernel};
use wirepath_rulelab::{Cause, Fate, Fault, Noted, Rng, compare, make, show};
use wirepath_wire::Parser;

/// Rule sets in a usual run.
const SETS: u64 = 200;
/// Packets for each.
const PACKETS: usize = 300;
const PORTS: u16 = 3;

/// What came to the stage inside.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    frame: Vec<u8>,
    mark: u32,
}

fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().flatten().copied().collect()
}

type Inner = Box<dyn FnMut(&mut Context<'_>, &mut Batch) + Send>;

struct Bench {
    stepped: Stepped<Ruled<Inner>>,
    control: RuleControl,
    nics: Vec<Arc<Mutex<Model>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    pool: Pool,
    ports: Vec<PortInfo>,
}

struct Kernel<'r>(&'r mut RuleControl);

impl wirepath_pipeline::Control for Kernel<'_> {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        assert!(self.0.punt(punt, plane).is_none(), "only what is for the kernel is punted here");
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.0.tick(plane);
    }
}

impl Bench {
    /// Packets that came in end in the stage; or, for rules at egress, go out by the next port.
    fn new(can: Vec<RuleCapabilities>, forward: bool) -> Self {
        let (domain, pool) = (Domain::new(), Pool::new("test", 2048).unwrap());
        let ports: Vec<PortInfo> = (0..PORTS)
            .map(|id| {
                let mut port = PortInfo::on_paper(id, &format!("p{id}"), None, 9000, &pool);
                port.capabilities.to_kernel = ToKernel::Beside;
                port.queues = 16;
                port
            })
            .collect();
        let workers = vec![vec![0; 16]; PORTS.into()];
        let mut control =
            RuleControl::for_ports(&domain, ports.clone(), workers, Parser::default(), RuleLimits::default());
        let info =
            WorkerInfo { index: 0, workers: 1, core: None, rx_queues: (0..PORTS).map(|port| (port, 0)).collect() };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let inside = {
            let seen = Arc::clone(&seen);
            move |context: &mut Context<'_>, batch: &mut Batch| {
                if forward {
                    let port = context.in_port().map_or(0, |port| (port + 1) % PORTS);
                    context.send_batch(port, batch);
                } else {
                    let mut seen = seen.lock().unwrap();
                    batch.filter_map(|packet| {
                        seen.push(Seen { frame: bytes(&packet), mark: packet.mark().unwrap_or(0) });
                        None
                    });
                }
            }
        };
        let stage = control.stage(&info, Box::new(inside) as Inner);
        let mut stepped = Stepped::new(ports.clone(), &domain, stage).unwrap();
        let (nics, devices) = can.into_iter().zip(0..).map(|(can, id)| Model::port(can, id, &pool)).unzip();
        stepped.devices(devices);
        Self { stepped, control, nics, seen, pool, ports }
    }

    fn set(&mut self, rules: &[Rule]) {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| control.replace(plane, rules).unwrap());
    }

    fn use_hardware(&mut self) {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| control.use_hardware(plane, 0..PORTS));
    }

    fn packet(&self, frame: &[u8], tag: Option<u32>) -> Packet {
        let mut packet = self.pool.take().expect("a buffer");
        packet.append(frame.len()).expect("room").copy_from_slice(frame);
        if let Some(tag) = tag {
            packet.set_mark(tag);
        }
        packet
    }

    fn tick(&mut self, nanoseconds: u64) {
        self.stepped.advance(nanoseconds);
        let Self { stepped, control, .. } = self;
        stepped.control(&mut Kernel(control));
    }

    /// Packets and bytes of each rule.
    fn counters(&mut self) -> Vec<(u64, u64)> {
        let Self { stepped, control, .. } = self;
        let standing = stepped.with_plane(|plane| control.standing(Some(plane)));
        standing.iter().map(|it| (it.counters.packets, it.counters.bytes)).collect()
    }

    /// What has been sent, by port.
    fn sent(&mut self) -> Vec<(PortId, Vec<u8>)> {
        let mut out = Vec::new();
        while let Some(packet) = self.stepped.sent() {
            let port = packet.out_port();
            let frame = self.nics.get(usize::from(port)).map(|nic| nic.lock().unwrap().send(&packet));
            match frame {
                Some(Some(frame)) => out.push((port, frame)),
                Some(None) => {}
                None => out.push((port, bytes(&packet))),
            }
        }
        out
    }
}

/// Rules that a program with these ports can have.
fn rules_for(rng: &mut Rng, ports: &[PortInfo], count: usize, direction: Direction) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    while rules.len() < count {
        let rule = match rng.below(6) {
            0 => tunnel(rng, direction),
            _ => make::rule(rng, &rules),
        };
        let right = rule.direction() == direction && check(&rule, ports).is_none();
        // The kernel has every frame beside; changed ones it cannot have.
        let kernel = rule.actions().last() == Some(&Action::Kernel);
        if right && !kernel {
            rules.push(rule);
        }
    }
    rules
}

/// A rule that a NIC may take a tunnel off or put one on for: what random ones seldom are.
fn tunnel(rng: &mut Rng, direction: Direction) -> Rule {
    let (prio, vni, host) = (rng.below(6), rng.below(3), 1 + rng.below(3));
    let text = match direction {
        Direction::Ingress => {
            let more = rng.pick(&["", ", set ipv4 dscp 3", ", set ipv4 dst 10.9.9.9, dec-ttl", ", dec-ttl, count"]);
            let inner = if more.is_empty() { "" } else { " / ipv4" };
            let outer = rng.pick(&["ipv4 src 10.0.0.HOST", "ipv4 src 10.0.0.HOST ecn 0", "ipv6 src fd00::HOST"]);
            let outer = outer.replace("HOST", &host.to_string());
            format!("ingress prio {prio}: eth / {outer} / udp / vxlan vni {vni} / eth{inner} => decap l2{more}, mark 5")
        }
        Direction::Egress => {
            // Ethernet, IPv4, UDP from a port that is chosen by flow, VXLAN.
            let mut header = "02000000000a02000000000b080045000000000040004011".to_owned() + "0000";
            header += &format!(
                "0a00000{host}0a0000fe{:04x}12b50000{:04x}08000000{vni:06x}00",
                rng.pick(&[0, 5]),
                rng.pick(&[0, 0, 1])
            );
            let before = rng.pick(&["", "count, "]);
            let pattern = rng.pick(&["ipv4", "udp", "eth", "ipv6 / tcp"]);
            format!("egress prio {prio}: port id {} / {pattern} => {before}encap l2 {header}", rng.below(3))
        }
    };
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// One random rule set on random NICs. `fault` is an error of the NIC.
fn run(seed: u64, fault: Fault) -> Result<HashMap<&'static str, usize>, String> {
    let mut rng = Rng::new(seed);
    let egress = seed % 4 == 3;
    let direction = if egress { Direction::Egress } else { Direction::Ingress };
    let can: Vec<RuleCapabilities> = (0..PORTS).map(|_| model::some(&mut rng)).collect();
    let mut bench = Bench::new(can, egress);
    for nic in &bench.nics {
        nic.lock().unwrap().fault = fault;
    }
    let count = rng.pick(&[3, 10, 30]);
    let ports = bench.ports.clone();
    let rules = rules_for(&mut rng, &ports, count, direction);
    // Half of them come and go once before.
    let early = rules_for(&mut rng, &ports, 3, direction);
    bench.set(&early);
    bench.use_hardware();
    bench.set(&rules);
    let mut words: HashMap<&'static str, usize> = HashMap::new();
    for placements in bench.control.placements() {
        for (_, placement) in placements {
            *words.entry(placement.word()).or_default() += 1;
        }
    }
    let mut reference = model::reference(&rules);
    let mut expected_counts = vec![(0, 0); rules.len()];
    let fail = |what: String, frame: &[u8], noted: &Noted, expected: &wirepath_rulelab::Outcome| {
        let rule = expected.rule.map(|id| rules[id as usize].to_string());
        Err(format!(
            "RULES_SEED={seed}: {what}\n  expected {} of rule {rule:?}\n{}",
            show::outcome(expected),
            show::packet(frame, noted)
        ))
    };
    for _ in 0..PACKETS / 30 {
        let port = rng.below(PORTS.into()) as PortId;
        let mut batch = Batch::new();
        let mut expected = Vec::new();
        for _ in 0..1 + rng.index(30) {
            let aim = rng.index(rules.len());
            let wish = (!rng.one_in(10)).then_some(&rules[aim]);
            let (frame, _) = make::packet(&mut rng, wish);
            if frame.len() > 1800 {
                continue;
            }
            let here = if egress { (port + 1) % PORTS } else { port };
            let noted = Noted { port: here, ..Noted::default() };
            let outcome = reference.run(direction, &frame, &noted, 0);
            if let Some(id) = outcome.rule {
                let own = rules[id as usize].actions().contains(&Action::Count);
                if let Some(bytes) = if own { outcome.counted } else { Some(frame.len() as u64) } {
                    let count: &mut (u64, u64) = &mut expected_counts[id as usize];
                    *count = (count.0 + 1, count.1 + bytes);
                }
            }
            if egress {
                let _ = batch.push(bench.packet(&frame, None));
                expected.push((frame, noted, outcome));
                continue;
            }
            let arrived = bench.nics[usize::from(port)].lock().unwrap().receive(&frame)?;
            match arrived {
                Arrived::Packet { frame: arrived, tag, queue } => {
                    if let Some(queue) = queue
                        && outcome.fate != Fate::Queue(queue)
                    {
                        return fail(format!("the NIC gave it to queue {queue}"), &frame, &noted, &outcome);
                    }
                    let _ = batch.push(bench.packet(&arrived, tag));
                    expected.push((frame, noted, outcome));
                }
                Arrived::Dropped => {
                    if outcome.fate != Fate::Dropped(Cause::Ruled) || !outcome.mirrors.is_empty() {
                        return fail("the NIC dropped it".to_owned(), &frame, &noted, &outcome);
                    }
                }
            }
        }
        bench.stepped.process(Some(port), &mut batch);
        let seen = std::mem::take(&mut *bench.seen.lock().unwrap());
        let mut seen = seen.into_iter();
        let mut sent: BTreeMap<PortId, Vec<Vec<u8>>> = BTreeMap::new();
        for (port, frame) in bench.sent() {
            sent.entry(port).or_default().push(frame);
        }
        let mut take = |port: PortId, frame: &wirepath_rulelab::Frame| {
            // Copies and redirected packets of one port need not keep their order among each other.
            let list = sent.entry(port).or_default();
            match list.iter().position(|sent| compare::same(frame, sent).is_ok()) {
                Some(at) => {
                    list.remove(at);
                    Ok(())
                }
                None => Err(format!("port {port} did not send it; it sent {} others", list.len())),
            }
        };
        for (frame, noted, outcome) in &expected {
            for (port, copy) in &outcome.mirrors {
                if let Err(what) = take(*port, copy) {
                    return fail(format!("a copy: {what}"), frame, noted, outcome);
                }
            }
            let there = match &outcome.fate {
                Fate::On | Fate::Queue(_) if egress => take(noted.port, &outcome.frame),
                Fate::On | Fate::Queue(_) => match seen.next() {
                    None => Err("it did not come".to_owned()),
                    Some(seen) if seen.mark != outcome.mark => {
                        Err(format!("mark {}, expected {}", seen.mark, outcome.mark))
                    }
                    Some(seen) => compare::same(&outcome.frame, &seen.frame)
                        .map_err(|e| format!("{e}\n  is    {}", show::hex(&seen.frame))),
                },
                Fate::Redirect(port) => take(*port, &outcome.frame),
                Fate::Dropped(_) | Fate::Kernel => Ok(()),
            };
            if let Err(what) = there {
                return fail(what, frame, noted, outcome);
            }
        }
        if seen.next().is_some() || sent.values().any(|list| !list.is_empty()) {
            return Err(format!("RULES_SEED={seed}: more came than was expected"));
        }
    }
    let counters = bench.counters();
    for ((rule, is), expected) in rules.iter().zip(counters).zip(expected_counts) {
        if is != expected {
            return Err(format!("RULES_SEED={seed}: counted {is:?}, expected {expected:?}: {rule}"));
        }
    }
    Ok(words)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

#[test]
fn random_rules_on_random_nics() {
    if let Some(seed) = number("RULES_SEED") {
        return run(seed, Fault::None).map(|_| ()).unwrap_or_else(|failure| panic!("{failure}"));
    }
    let mut words: HashMap<&str, usize> = HashMap::new();
    let failures: Vec<String> = (0..number("RULES_SETS").unwrap_or(SETS))
        .filter_map(|seed| match run(seed, Fault::None) {
            Ok(seen) => {
                seen.into_iter().for_each(|(word, n)| *words.entry(word).or_default() += n);
                None
            }
            Err(failure) => Some(failure),
        })
        .collect();
    assert!(failures.is_empty(), "{} failures, the first:\n{}", failures.len(), failures[0]);
    for word in ["hardware", "split", "software"] {
        assert!(words.get(word).is_some_and(|n| *n > 50), "{word} is not tested: {words:?}");
    }
}

#[test]
fn a_wrong_bit_in_the_nic_is_found() {
    let faults = [
        Fault::MaskBit,
        Fault::LastAddedFirst,
        Fault::DscpTakesEcn,
        Fault::Layer4ChecksumForgotten,
        Fault::OuterLength,
    ];
    for fault in faults {
        let found = (0..400).find(|seed| run(*seed, fault).is_err());
        assert!(found.is_some(), "{fault:?} was not found");
    }
}

fn list(texts: &[&str]) -> Vec<Rule> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn words(bench: &mut Bench) -> Vec<String> {
    let placements = bench.control.placements();
    let one =
        |list: &Vec<(PortId, Placement)>| list.iter().find(|(port, _)| *port == 0).map_or("none", |(_, p)| p.word());
    placements.iter().map(|list| one(list).to_owned()).collect()
}

#[test]
fn refused_rules_and_those_below_stay_in_software_until_the_nic_takes_them() {
    let mut bench = Bench::new(vec![everything(); PORTS.into()], false);
    bench.use_hardware();
    bench.nics[0].lock().unwrap().refuse = Some(RefusalKind::Full);
    let rules = list(&[
        "ingress prio 1: ipv4 src 10.0.0.1 => mark 1",
        "ingress prio 2: ipv4 => mark 2",
        "ingress: tcp dst 1 => drop",
    ]);
    bench.set(&rules);
    assert_eq!(words(&mut bench), ["software"; 3]);
    let why = bench.control.placements();
    assert!(format!("{:?}", why[2][0]).contains("the model refuses"), "{:?}", why[2]);
    assert!(format!("{:?}", why[0][0]).contains("tcp dst 1"), "{:?}", why[0]);
    assert_eq!(bench.nics[0].lock().unwrap().rules(), 0);
    bench.nics[0].lock().unwrap().refuse = None;
    bench.tick(2_000_000_000);
    assert_eq!(words(&mut bench), ["hardware"; 3]);
    // A device that was mended has lost its rules and gets them again.
    bench.nics[0].lock().unwrap().lose();
    bench.tick(10_000_000);
    let installed = bench.nics[0].lock().unwrap().rules();
    assert!(installed >= 3, "{installed}");
}

#[test]
fn tags_come_back_when_the_rings_are_drained() {
    let mut bench = Bench::new(vec![everything(); PORTS.into()], false);
    bench.use_hardware();
    let [a, b] = [list(&["ingress: port id 0 / ipv4 => mark 1"]), list(&["ingress: port id 0 / ipv4 => mark 2"])];
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 20, 0, 1, 0, 0, 64, 253, 0, 0];
    frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    bench.set(&a);
    let Ok(Arrived::Packet { tag: Some(first), .. }) = bench.nics[0].lock().unwrap().receive(&frame) else {
        panic!("no tag")
    };
    bench.set(&b);
    // In the ring since before the change: under the rules of then.
    let mut batch: Batch = [bench.packet(&frame, Some(first))].into_iter().collect();
    bench.stepped.process(Some(0), &mut batch);
    assert_eq!(bench.seen.lock().unwrap().pop().map(|seen| seen.mark), Some(1));
    let Ok(Arrived::Packet { tag: Some(second), .. }) = bench.nics[0].lock().unwrap().receive(&frame) else {
        panic!("no tag")
    };
    assert_ne!(first, second, "not while packets may carry it");
    for _ in 0..4 {
        bench.tick(2_000_000_000);
        bench.stepped.process(Some(0), &mut Batch::new());
    }
    assert_eq!(bench.control.hardware().draining(), 0);
    // What nobody has given, or nobody has any more, is no tag.
    let mut batch: Batch =
        [bench.packet(&frame, Some(first)), bench.packet(&frame, Some(77_777))].into_iter().collect();
    bench.stepped.process(Some(0), &mut batch);
    let seen: Vec<u32> = bench.seen.lock().unwrap().drain(..).map(|seen| seen.mark).collect();
    assert_eq!(seen, [2, 2], "software finds the rule");
    assert_eq!(bench.counters(), [(2, 68)]);
    bench.set(&a);
    let Ok(Arrived::Packet { tag: Some(third), .. }) = bench.nics[0].lock().unwrap().receive(&frame) else {
        panic!("no tag")
    };
    assert_eq!(third, first, "it is used again");
}

#[test]
fn a_thousand_changes_lose_no_packet() {
    let mut bench = Bench::new(vec![everything(); PORTS.into()], false);
    bench.use_hardware();
    let mut rng = Rng::new(1);
    // Most of them for the NIC, and overlapping.
    let some = |rng: &mut Rng| {
        let pattern = rng.pick(&[
            "ipv4 src 10.0.0.1",
            "ipv4 dst 10.0.0.0/8",
            "udp",
            "udp dst 53",
            "tcp",
            "ipv6",
            "eth type 0x0800",
        ]);
        let actions = rng.pick(&["mark 1", "mark 2", "count, mark 3", "queue 1", "mark 4, limit 1G pps"]);
        let text = format!("ingress prio {}: {pattern} => {actions}", rng.below(9));
        text.parse::<Rule>().unwrap_or_else(|error| panic!("{text}: {error}"))
    };
    let (mut most, mut before) = (0, Vec::new());
    let mut before_reference = model::reference(&before);
    for step in 0..1000 {
        let mut after = before.clone();
        if after.len() > 20 || (after.len() > 3 && rng.one_in(2)) {
            after.remove(rng.index(after.len()));
        } else {
            after.push(some(&mut rng));
        }
        // Packets that came in before the change and are looked at after it.
        let mut batch = Batch::new();
        let mut ring = Vec::new();
        for _ in 0..8 {
            let aim = rng.below(before.len().max(1) as u64) as usize;
            let (frame, _) = make::packet(&mut rng, before.get(aim));
            if frame.len() > 1800 {
                continue;
            }
            match bench.nics[0].lock().unwrap().receive(&frame).unwrap() {
                Arrived::Packet { frame: arrived, tag, .. } => {
                    let _ = batch.push(bench.packet(&arrived, tag));
                    ring.push(frame);
                }
                Arrived::Dropped => panic!("no rule drops"),
            }
        }
        bench.set(&after);
        let mut after_reference = model::reference(&after);
        bench.stepped.process(Some(0), &mut batch);
        let mut seen = std::mem::take(&mut *bench.seen.lock().unwrap()).into_iter();
        for frame in ring {
            let noted = Noted::default();
            let [old, new] = [&mut before_reference, &mut after_reference]
                .map(|reference| reference.run(Direction::Ingress, &frame, &noted, 0));
            if old.fate == Fate::Dropped(Cause::Malformed) {
                // Without rules nobody looks.
                if before.is_empty() || after.is_empty() {
                    seen.next();
                }
                continue;
            }
            let seen = seen.next().unwrap_or_else(|| panic!("step {step}: a packet is lost"));
            assert_eq!(seen.frame, frame, "step {step}");
            assert!(
                [old.mark, new.mark].contains(&seen.mark),
                "step {step}: {} is neither {} nor {}",
                seen.mark,
                old.mark,
                new.mark
            );
        }
        assert!(seen.next().is_none());
        if step % 10 == 0 {
            bench.tick(100_000_000);
        }
        most = most.max(bench.control.hardware().installed().map(|(_, n)| n).max().unwrap_or(0));
        before = after;
        before_reference = model::reference(&before);
    }
    assert!(most > 5, "the NIC had {most} rules at most");
}

const _: () = assert!(BATCH >= 30);
