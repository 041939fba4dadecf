//! Rule offload on modelled NICs, compared with the reference: packets, order and counters must be equal for
//! all capabilities.
//!
//! The model applies its rules level by level, with the matching and the actions of `wirepath-rule-oracle`.
//! It shares no code with the offload. Two rules of one level that match the same packet are an error of the
//! offload.
//!
//! ```text
//! RULES_SEED=17 cargo test -p wirepath-pipeline --test hardware modelled
//! RULES_SETS=10000 cargo test -p wirepath-pipeline --test hardware --release modelled      # more rule sets
//! ```

use std::collections::HashMap;

use crate::bench::{Bench, Case, CaseConfig, PORTS, number, reference};
use crate::model::{self, Arrived, Model, everything};
use wirepath_flow::{Direction, Rule};
use wirepath_packet::PortId;
use wirepath_packet::{Batch, Pool};
use wirepath_pipeline::rules::offload::Placement;
use wirepath_pmd::port::hardware::{RefusalKind, RuleCapabilities};
use wirepath_rule_oracle::{DropCause, Fault, PacketMetadata, Rng, Verdict, generate};

/// Rule sets in a normal run.
const SETS: u64 = 200;
/// Packets per rule set.
const PACKETS: usize = 150;
/// Queues per port.
const QUEUES: u16 = 16;

/// A test bench with modelled NICs.
type Modelled = Bench<model::Shared>;

fn bench(can: Vec<RuleCapabilities>) -> Modelled {
    let pool = Pool::new("test", 2048).unwrap();
    let (nics, devices) = can.into_iter().zip(0..).map(|(can, id)| Model::port(can, PortId::new(id), &pool)).unzip();
    Bench::new(nics, devices, &pool, QUEUES)
}

/// Runs one random rule set on random NICs. `fault` is planted in the NICs.
fn run(seed: u64, fault: Fault) -> Result<HashMap<&'static str, usize>, String> {
    let mut rng = Rng::new(seed);
    let direction = if seed % 4 == 3 { Direction::Egress } else { Direction::Ingress };
    let can: Vec<RuleCapabilities> = (0..PORTS).map(|_| model::some(&mut rng)).collect();
    let config = CaseConfig { packets: PACKETS, everywhere: false, can: None, may: &|_| true };
    let case = Case::new(&mut rng, &bench(can.clone()).ports, direction, &config);
    let run_case = |case: &Case| {
        let mut bench = bench(can.clone());
        for nic in &bench.nics {
            nic.lock().unwrap().fault = fault;
        }
        // Some rules are installed and replaced before the test.
        bench.set(&case.early);
        bench.enable_hardware();
        let result = bench.check(case, Fault::None);
        result.map(|()| bench.words())
    };
    run_case(&case).map_err(|what| {
        // A planted error is not minimised.
        let small =
            if fault == Fault::None { case.shrunk(|case| run_case(case).is_err()).show() } else { String::new() };
        format!("RULES_SEED={seed}: {what}\n{small}")
    })
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
fn a_planted_error_in_a_modelled_nic_is_found() {
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

fn words(bench: &mut Modelled) -> Vec<String> {
    let placements = bench.control.placements();
    let one = |list: &Vec<(PortId, Placement)>| {
        list.iter().find(|(port, _)| *port == PortId::new(0)).map_or("none", |(_, p)| p.name())
    };
    placements.iter().map(|list| one(list).to_owned()).collect()
}

#[test]
fn refused_rules_stay_in_software_until_accepted() {
    let mut bench = bench(vec![everything(); PORTS.into()]);
    bench.enable_hardware();
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
    // A recovered device has lost its rules, and they are installed again.
    bench.nics[0].lock().unwrap().lose();
    bench.tick(10_000_000);
    let installed = bench.nics[0].lock().unwrap().rules();
    assert!(installed >= 3, "{installed}");
}

#[test]
fn a_refusing_nic_keeps_order_and_counters() {
    let mut moves = 0;
    for seed in 0..number("RULES_SETS").unwrap_or(SETS) / 4 {
        let mut rng = Rng::new(seed);
        let can: Vec<RuleCapabilities> = (0..PORTS).map(|_| model::some(&mut rng)).collect();
        let mut bench = bench(can);
        bench.enable_hardware();
        let config = CaseConfig { packets: PACKETS, everywhere: false, can: None, may: &|_| true };
        let direction = if seed % 4 == 3 { Direction::Egress } else { Direction::Ingress };
        let case = Case::new(&mut rng, &bench.ports, direction, &config);
        bench.set(&case.rules);
        let (mut reference, mut counts) = (reference(&case.rules), vec![(0, 0); case.rules.len()]);
        let mut before = bench.control.placements();
        for round in 0..8 {
            for nic in &bench.nics {
                // The model refuses random rules; in some rounds it accepts all.
                let mut rng = Rng::new(rng.next());
                let mut nic = nic.lock().unwrap();
                nic.random_refusals = (round % 4 != 3).then_some(rng.clone());
                // The device recovers, which the next change or tick notices.
                if rng.one_in(4) {
                    nic.lose();
                }
            }
            // A rule above all others is added and removed. Overlapping rules leave the NIC and are installed
            // again.
            if rng.one_in(2) {
                let more = rng.pick(&["DIRECTION: tcp dst 1 => drop", "DIRECTION: any => count"]);
                let more: Rule = more.replace("DIRECTION", direction.name()).parse().unwrap();
                let first = [vec![more], case.rules.clone()].concat();
                bench.set(&first);
                bench.set(&case.rules);
            }
            bench.tick(2_000_000_000);
            let placements = bench.control.placements();
            moves += before.iter().zip(&placements).filter(|(before, now)| before != now).count();
            before = placements;
            if let Err(failure) = bench.pass(&case, &mut reference, &mut counts) {
                panic!("seed {seed}, round {round}: {failure}");
            }
        }
    }
    println!("{moves} moves");
    assert!(moves > 100, "{moves}");
}

#[test]
fn tags_are_released_after_the_rings_are_drained() {
    let mut bench = bench(vec![everything(); PORTS.into()]);
    bench.enable_hardware();
    let [a, b] = [list(&["ingress: port id 0 / ipv4 => mark 1"]), list(&["ingress: port id 0 / ipv4 => mark 2"])];
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 20, 0, 1, 0, 0, 64, 253, 0, 0];
    frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    bench.set(&a);
    let Ok(Arrived::Packet { tag: Some(first), .. }) = bench.nics[0].lock().unwrap().receive(&frame) else {
        panic!("no tag")
    };
    bench.set(&b);
    // This packet was in the ring before the change, so the earlier rules apply.
    let mut batch: Batch = [bench.packet(&frame, Some(first))].into_iter().collect();
    bench.stepped.process(Some(PortId::new(0)), &mut batch);
    assert_eq!(bench.seen.lock().unwrap().pop().map(|seen| seen.mark), Some(1));
    let Ok(Arrived::Packet { tag: Some(second), .. }) = bench.nics[0].lock().unwrap().receive(&frame) else {
        panic!("no tag")
    };
    assert_ne!(first, second, "not while packets may carry it");
    for _ in 0..4 {
        bench.tick(2_000_000_000);
        bench.stepped.process(Some(PortId::new(0)), &mut Batch::new());
    }
    assert_eq!(bench.control.hardware().draining(), 0);
    // Tags that are not allocated, or no longer, are ignored.
    let mut batch: Batch =
        [bench.packet(&frame, Some(first)), bench.packet(&frame, Some(77_777))].into_iter().collect();
    bench.stepped.process(Some(PortId::new(0)), &mut batch);
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
    let mut bench = bench(vec![everything(); PORTS.into()]);
    bench.enable_hardware();
    let mut rng = Rng::new(1);
    // Most of these rules can be offloaded, and they overlap.
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
    let (mut max_installed, mut before) = (0, Vec::new());
    let mut before_reference = reference(&before);
    for step in 0..1000 {
        let mut after = before.clone();
        if after.len() > 20 || (after.len() > 3 && rng.one_in(2)) {
            after.remove(rng.index(after.len()));
        } else {
            after.push(some(&mut rng));
        }
        // Packets that arrive before the change and are processed after it.
        let mut batch = Batch::new();
        let mut ring = Vec::new();
        for _ in 0..8 {
            let aim = rng.below(before.len().max(1) as u64) as usize;
            let (frame, _) = generate::packet(&mut rng, before.get(aim));
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
        let mut after_reference = reference(&after);
        bench.stepped.process(Some(PortId::new(0)), &mut batch);
        let mut seen = std::mem::take(&mut *bench.seen.lock().unwrap()).into_iter();
        for frame in ring {
            let metadata = PacketMetadata::default();
            let [old, new] = [&mut before_reference, &mut after_reference]
                .map(|reference| reference.run(Direction::Ingress, &frame, &metadata, 0));
            if old.verdict == Verdict::Dropped(DropCause::Malformed) {
                // Without rules, headers are not checked.
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
        max_installed = max_installed.max(bench.control.hardware().installed().map(|(_, n)| n).max().unwrap_or(0));
        before = after;
        before_reference = reference(&before);
    }
    assert!(max_installed > 5, "the NIC had {max_installed} rules at most");
}
