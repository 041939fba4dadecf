//! Tests of the oracle: the generated packets match rules of every kind, and the comparison finds every
//! planted error.

use std::collections::{BTreeMap, BTreeSet};

use wirepath_flow::{Direction, Rule};
use wirepath_rule_oracle::{Coverage, Fault, Outcome, PacketMetadata, Reference, Rng, compare, generate, show};

type Packet = (Direction, Vec<u8>, PacketMetadata);

/// Returns a rule set and packets made for it.
fn world(seed: u64, packets: usize) -> (Vec<Rule>, Vec<Packet>) {
    let mut rng = Rng::new(seed);
    let count = rng.pick(&[4, 12, 40, 100]);
    let rules = generate::rules(&mut rng, count);
    let packets = (0..packets)
        .map(|_| {
            let aim = (!rng.one_in(10)).then(|| rng.index(rules.len()));
            let (frame, metadata) = generate::packet(&mut rng, aim.map(|aim| &rules[aim]));
            let direction = aim.map_or(Direction::Ingress, |aim| rules[aim].direction());
            (direction, frame, metadata)
        })
        .collect();
    (rules, packets)
}

/// Returns true if two outcomes differ.
fn differs(expected: &Outcome, got: &Outcome) -> bool {
    expected.rule != got.rule
        || expected.verdict != got.verdict
        || expected.mark != got.mark
        || expected.counted != got.counted
        || compare::same(&expected.frame, &got.frame.bytes).is_err()
        || expected.mirrors.len() != got.mirrors.len()
        || expected
            .mirrors
            .iter()
            .zip(&got.mirrors)
            .any(|(a, b)| a.0 != b.0 || compare::same(&a.1, &b.1.bytes).is_err())
}

#[test]
fn generated_packets_cover_everything() {
    let mut coverage = Coverage::default();
    for seed in 0..300 {
        let (rules, packets) = world(seed, 400);
        let mut reference = Reference::new(&rules);
        for (n, (direction, frame, metadata)) in packets.iter().enumerate() {
            let outcome = reference.run(*direction, frame, metadata, n as u64 * 10_000);
            let rule = outcome.rule.and_then(|id| reference.rule(id));
            coverage.note(rule, &outcome);
        }
    }
    println!("{} packets, {} % hit a rule", coverage.packets, coverage.hit_rate());
    let missing = coverage.missing(5);
    assert!(missing.is_empty(), "hit less than 5 times: {}", missing.join(", "));
    assert!(coverage.hit_rate() >= 50, "{} %", coverage.hit_rate());
}

#[test]
fn equal_seeds_give_equal_runs() {
    for seed in [0, 1, u64::MAX] {
        let (a, b) = (world(seed, 50), world(seed, 50));
        assert_eq!(a.0, b.0);
        assert_eq!(a.1, b.1);
    }
    let (rules, packets) = world(7, 1);
    let text = show::hex(&packets[0].1);
    assert_eq!(show::unhex(&text).as_deref(), Some(&packets[0].1[..]));
    assert!(rules.iter().all(|rule| rule.to_string().parse::<Rule>().as_ref() == Ok(rule)));
}

#[test]
fn every_planted_error_is_found() {
    let mut found: BTreeMap<String, u64> = BTreeMap::new();
    let mut left: BTreeSet<usize> = (0..Fault::ALL.len()).collect();
    for seed in 0..400 {
        let (rules, packets) = world(seed, 300);
        for at in left.clone() {
            let fault = Fault::ALL[at];
            let mut right = Reference::new(&rules);
            let mut wrong = Reference::new(&rules).with(fault);
            for (n, (direction, frame, metadata)) in packets.iter().enumerate() {
                let now = n as u64 * 1000;
                let (a, b) = (right.run(*direction, frame, metadata, now), wrong.run(*direction, frame, metadata, now));
                if differs(&a, &b) {
                    let times = found.entry(format!("{fault:?}")).or_default();
                    *times += 1;
                    if *times >= 3 {
                        left.remove(&at);
                        break;
                    }
                }
            }
        }
    }
    let left: Vec<Fault> = left.into_iter().map(|at| Fault::ALL[at]).collect();
    assert!(left.is_empty(), "not found three times: {left:?}; found {found:?}");
}

#[test]
fn identical_references_agree() {
    for seed in 0..20 {
        let (rules, packets) = world(seed, 200);
        let (mut a, mut b) = (Reference::new(&rules), Reference::new(&rules));
        for (direction, frame, metadata) in &packets {
            assert!(
                !differs(&a.run(*direction, frame, metadata, 0), &b.run(*direction, frame, metadata, 0)),
                "seed {seed}"
            );
        }
    }
}
