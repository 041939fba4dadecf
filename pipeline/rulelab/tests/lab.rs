//! The lab judged: what it makes hits rules of every kind, and its comparison finds every error that can be planted.

use std::collections::{BTreeMap, BTreeSet};

use wirepath_pmd::flow::{Direction, Rule};
use wirepath_rulelab::{Coverage, Fault, Noted, Outcome, Reference, Rng, compare, make, show};

type Packet = (Direction, Vec<u8>, Noted);

/// A set of rules and packets made for it.
fn world(seed: u64, packets: usize) -> (Vec<Rule>, Vec<Packet>) {
    let mut rng = Rng::new(seed);
    let count = rng.pick(&[4, 12, 40, 100]);
    let rules = make::rules(&mut rng, count);
    let packets = (0..packets)
        .map(|_| {
            let aim = (!rng.one_in(10)).then(|| rng.index(rules.len()));
            let (frame, noted) = make::packet(&mut rng, aim.map(|aim| &rules[aim]));
            let direction = aim.map_or(Direction::Ingress, |aim| rules[aim].direction());
            (direction, frame, noted)
        })
        .collect();
    (rules, packets)
}

/// What differs between two outcomes.
fn differs(expected: &Outcome, got: &Outcome) -> bool {
    expected.rule != got.rule
        || expected.fate != got.fate
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
fn everything_is_hit() {
    let mut coverage = Coverage::default();
    for seed in 0..300 {
        let (rules, packets) = world(seed, 400);
        let mut reference = Reference::new(&rules);
        for (n, (direction, frame, noted)) in packets.iter().enumerate() {
            let outcome = reference.run(*direction, frame, noted, n as u64 * 10_000);
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
fn a_seed_is_replayed_alike() {
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
    for seed in 0..300 {
        let (rules, packets) = world(seed, 300);
        for at in left.clone() {
            let fault = Fault::ALL[at];
            let mut right = Reference::new(&rules);
            let mut wrong = Reference::new(&rules).with(fault);
            for (n, (direction, frame, noted)) in packets.iter().enumerate() {
                let now = n as u64 * 1000;
                let (a, b) = (right.run(*direction, frame, noted, now), wrong.run(*direction, frame, noted, now));
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
fn no_error_is_found_where_there_is_none() {
    for seed in 0..20 {
        let (rules, packets) = world(seed, 200);
        let (mut a, mut b) = (Reference::new(&rules), Reference::new(&rules));
        for (direction, frame, noted) in &packets {
            assert!(!differs(&a.run(*direction, frame, noted, 0), &b.run(*direction, frame, noted, 0)), "seed {seed}");
        }
    }
}
