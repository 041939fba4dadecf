//! The software engine compared with the reference of `wirepath-rule-oracle`: random rules, and random
//! packets of every header stack, some truncated or damaged.
//!
//! Each rule set has its own seed. One of [`ROUNDS`] packets is distinct. Each is sent [`ROUNDS`] times in
//! different orders, so that caches are both cold and warm. A failure prints the minimal rules and packets
//! that still fail, and the seed. `RULES_SEED=n` runs that rule set alone:
//!
//! ```text
//! RULES_SEED=17 cargo test -p wirepath-pipeline --test rules differential
//! RULES_SETS=5000 cargo test -p wirepath-pipeline --test rules differential       # more rule sets
//! ```

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::oracle::{Case, TestEnvironment, check, number};
use wirepath_flow::{Action, Direction, Rule};
use wirepath_packet::{BATCH, Packet};
use wirepath_pipeline::epoch::{Domain, Reader};
use wirepath_pipeline::parse_packet;
use wirepath_pipeline::rules::actions::DEFAULT_RSS_KEY;
use wirepath_pipeline::rules::{Hit, RuleId, RuleLimits, RuleLookup, RuleTable, Timeouts};
use wirepath_rule_oracle::{
    Coverage, DropCause, Fault, PacketMetadata, Reference, Rng, Verdict, generate, show, shrink,
};
use wirepath_wire::{Parsed, Parser};

/// Rule sets in a normal run.
const SETS: u64 = 500;
/// Packets per rule set.
const PACKETS: usize = 50_000;
/// Number of times that each packet is sent.
const ROUNDS: usize = 5;

fn is_stateful(rule: &Rule) -> bool {
    rule.actions().iter().any(|action| matches!(action, Action::Limit(_)))
}

/// One rule set with its packets.
struct Set {
    seed: u64,
    fault: Fault,
    rules: Vec<Rule>,
    reference: Reference,
    cases: Vec<Case>,
    /// Rules whose outcome depends on earlier packets.
    stateful: HashSet<u64>,
    coverage: Coverage,
}

/// A packet with the direction of its rules.
type Sent = (Direction, Vec<u8>, PacketMetadata);

impl Set {
    fn new(seed: u64, packets: usize, fault: Fault) -> Self {
        let mut rng = Rng::new(seed);
        let count = rng.pick(&[3, 10, 30, 100]);
        let rules = generate::rules(&mut rng, count);
        let sent = (0..packets).map(|_| {
            let aim = rng.index(rules.len());
            let aimed_rule = (!rng.one_in(10)).then_some(&rules[aim]);
            let (frame, metadata) = generate::packet(&mut rng, aimed_rule);
            (rules[aim].direction(), frame, metadata)
        });
        let sent = sent.collect();
        Self::of(seed, rules, sent, fault)
    }

    fn of(seed: u64, rules: Vec<Rule>, sent: Vec<Sent>, fault: Fault) -> Self {
        let mut reference = Reference::new(&rules).with(fault);
        reference.rss_key = DEFAULT_RSS_KEY.to_vec();
        // The original reference is kept, so that generating the cases does not affect its state.
        let initial = reference.clone();
        let mut coverage = Coverage::default();
        let cases = sent
            .into_iter()
            .map(|(direction, frame, metadata)| {
                let expected = reference.run(direction, &frame, &metadata, 0);
                let rule = expected.rule.and_then(|id| reference.rule(id));
                coverage.note(rule, &expected);
                Case::new(direction, frame, metadata, expected)
            })
            .collect();
        let stateful = initial.rules().filter(|(_, rule)| is_stateful(rule)).map(|(id, _)| id).collect();
        Self { seed, fault, rules, reference: initial, cases, stateful, coverage }
    }

    /// Returns a minimal set of packets and simplified rules that fails like this one.
    fn shrunk(&self, rounds: usize) -> Self {
        let of = |rules: &[Rule], sent: &[Sent]| Self::of(self.seed, rules.to_vec(), sent.to_vec(), self.fault);
        let fails = |rules: &[Rule], sent: &[Sent]| of(rules, sent).run(rounds).is_err();
        let sent: Vec<Sent> =
            self.cases.iter().map(|case| (case.direction, case.frame.clone(), case.metadata)).collect();
        let sent = shrink::smallest_subset(&sent, |sent| fails(&self.rules, sent));
        let rules = shrink::smallest_subset(&self.rules, |rules| fails(rules, &sent));
        let rules = shrink::simplest(&rules, |rules| fails(rules, &sent));
        of(&rules, &sent)
    }

    /// Runs the set. A failure is reported with the minimal failing set.
    fn run_and_shrink(&mut self, rounds: usize) -> Result<(), String> {
        let Err(what) = self.run(rounds) else { return Ok(()) };
        let mut small = self.shrunk(rounds);
        let (rules, packets) = (small.rules.len(), small.cases.len());
        let list = show::rules((0..).zip(&small.rules));
        let sent: String = small.cases.iter().map(|case| show::packet(&case.frame, &case.metadata)).collect();
        let what_there = small.run(rounds).err().unwrap_or_default();
        Err(format!("{what}\nshrunk to {rules} rules and {packets} packets:\n{list}{sent}{what_there}"))
    }

    fn failure(&self, at: usize, what: &str) -> String {
        let case = &self.cases[at];
        let rule = case.expected.rule.and_then(|id| self.reference.rule(id));
        format!(
            "RULES_SEED={}, packet {at}, {:?}: {what}\n  expected {}  of rule {}\n{}",
            self.seed,
            case.direction,
            show::outcome(&case.expected),
            rule.map_or("none".to_owned(), Rule::to_string),
            show::packet(&case.frame, &case.metadata),
        )
    }

    /// Sends all packets through the engine.
    fn run(&mut self, rounds: usize) -> Result<(), String> {
        let mut engine = Engine::new(&self.rules);
        let mut rng = Rng::new(self.seed ^ 0x5eed);
        let mut sums: HashMap<u64, (u64, u64)> = HashMap::new();
        let of = |direction| move |(_, case): &(usize, &Case)| case.direction == direction;
        let mut orders: Vec<Vec<usize>> = [Direction::Ingress, Direction::Egress]
            .map(|direction| self.cases.iter().enumerate().filter(of(direction)).map(|(at, _)| at).collect())
            .into();
        for _ in 0..rounds {
            for order in &mut orders {
                rng.shuffle(order);
                for chunk in order.chunks(BATCH) {
                    self.batch(&mut engine, chunk, &mut sums)?;
                }
            }
        }
        for (nth, id) in engine.ids.iter().enumerate() {
            let counters = engine.table.counters(*id).ok_or("a rule is gone")?;
            let (packets, bytes) = sums.get(&(nth as u64)).copied().unwrap_or_default();
            if (counters.packets, counters.bytes) != (packets, bytes) {
                return Err(format!(
                    "RULES_SEED={}: rule {nth} counted {counters:?}, not {packets} packets of {bytes} bytes: {}",
                    self.seed, self.rules[nth]
                ));
            }
        }
        Ok(())
    }

    fn batch(
        &mut self,
        engine: &mut Engine,
        chunk: &[usize],
        sums: &mut HashMap<u64, (u64, u64)>,
    ) -> Result<(), String> {
        let parser = Parser::default();
        let (mut packets, mut parsed, mut places): (Vec<Packet>, Vec<Parsed>, Vec<usize>) = Default::default();
        engine.world.now += 777;
        for &at in chunk {
            let case = &self.cases[at];
            // Some long packets have their tail in a second buffer.
            let split = (case.frame.len() > 700 && at % 2 == 1).then_some(512);
            let mut packet = engine.world.packet(case, split);
            let refused = case.expected.verdict == Verdict::Dropped(DropCause::Malformed);
            match parse_packet(&parser, &mut packet) {
                Ok(_) if refused => return Err(self.failure(at, "it was not refused")),
                Err(_) if refused => {}
                Err(error) => return Err(self.failure(at, &format!("refused: {error}"))),
                Ok(headers) => {
                    packets.push(packet);
                    parsed.push(headers);
                    places.push(at);
                }
            }
        }
        let mut found: [Option<Hit<'_>>; BATCH] = [None; BATCH];
        let found = &mut found[..packets.len()];
        let lookup = match self.cases[chunk[0]].direction {
            Direction::Ingress => &mut engine.ingress,
            Direction::Egress => &mut engine.egress,
        };
        lookup.find(engine.reader.guard(), engine.world.now, &packets, &parsed, found);
        for (n, mut packet) in packets.into_iter().enumerate() {
            let at = places[n];
            if self.cases[at].expected.rule.is_some_and(|id| self.stateful.contains(&id)) {
                let Case { direction, frame, metadata, .. } = &self.cases[at];
                self.cases[at].expected = self.reference.run(*direction, frame, metadata, engine.world.now);
            }
            let got = found[n].map(|hit| engine.nth[&hit.id()]);
            let expected = self.cases[at].expected.rule;
            if got != expected {
                let rule = found[n].map_or("none".to_owned(), |hit| hit.rule().to_string());
                return Err(self.failure(at, &format!("it met rule {got:?}: {rule}")));
            }
            let Some(hit) = found[n] else { continue };
            let length = packet.len() as u64;
            let outcome = hit.program().run(&mut packet, &parsed[n], &mut engine.world);
            // A rule with `count` counts the packets that reach the action. Other rules count all matching
            // packets.
            if let Some(bytes) = engine.world.counted {
                hit.count(bytes as usize);
            }
            let counts = hit.rule().actions().contains(&Action::Count);
            if let Some(bytes) = if counts { self.cases[at].expected.counted } else { Some(length) } {
                let sum = sums.entry(engine.nth[&hit.id()]).or_default();
                *sum = (sum.0 + 1, sum.1 + bytes);
            }
            if let Err(what) = check(&mut self.cases[at], outcome, &packet, &mut engine.world) {
                return Err(self.failure(at, &what));
            }
        }
        Ok(())
    }
}

/// The engine under test.
struct Engine {
    table: RuleTable,
    ingress: RuleLookup,
    egress: RuleLookup,
    reader: Reader,
    world: TestEnvironment,
    ids: Vec<RuleId>,
    /// Number of each rule in the reference.
    nth: HashMap<RuleId, u64>,
}

impl Engine {
    fn new(rules: &[Rule]) -> Self {
        let domain = Domain::new();
        let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
        let (ingress, egress) = table.lookups();
        let ids: Vec<RuleId> =
            rules.iter().map(|rule| table.add(rule.clone(), Timeouts::NONE).expect("the rule is taken")).collect();
        Self {
            table,
            ingress,
            egress,
            reader: domain.join(),
            world: TestEnvironment::new(),
            nth: ids.iter().enumerate().map(|(nth, id)| (*id, nth as u64)).collect(),
            ids,
        }
    }
}

/// Runs the sets of these seeds in two threads. Returns the failures and the coverage.
fn run_sets(seeds: std::ops::Range<u64>, packets: usize, rounds: usize) -> (Vec<String>, Coverage) {
    let next = AtomicU64::new(seeds.start);
    let work = || {
        let (mut failures, mut coverage) = (Vec::new(), Coverage::default());
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || failures.len() > number("RULES_FAILURES").unwrap_or(3) as usize {
                return (failures, coverage);
            }
            let mut set = Set::new(seed, packets / rounds, Fault::None);
            coverage.add(&set.coverage);
            failures.extend(set.run_and_shrink(rounds).err());
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(work);
        let (mut failures, mut coverage) = work();
        let (more, seen) = other.join().expect("no panic");
        failures.extend(more);
        coverage.add(&seen);
        (failures, coverage)
    })
}

#[test]
fn every_result_equals_the_reference() {
    let packets = number("RULES_PACKETS").map_or(PACKETS, |n| n as usize);
    if let Some(seed) = number("RULES_SEED") {
        let (failures, _) = run_sets(seed..seed + 1, packets, ROUNDS);
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        return;
    }
    let sets = number("RULES_SETS").unwrap_or(SETS);
    let (failures, coverage) = run_sets(0..sets, packets, ROUNDS);
    println!(
        "{sets} rule sets, {} packets, {} of them different, {} % hit a rule",
        coverage.packets * ROUNDS as u64,
        coverage.packets,
        coverage.hit_rate()
    );
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(coverage.hit_rate() >= 50, "{} % of the packets hit a rule", coverage.hit_rate());
    let missing = coverage.missing(100);
    if sets < SETS || packets < PACKETS {
        println!("hit less than 100 times: {}", missing.join(", "));
        return;
    }
    assert!(missing.is_empty(), "hit less than 100 times: {}", missing.join(", "));
}

#[test]
fn every_planted_error_is_found() {
    // An error in the reference gives the same differences as the same error in the engine.
    let (mut left, mut large) = (Vec::new(), Vec::new());
    for fault in Fault::ALL {
        let failing = |seed: u64| {
            let mut set = Set::new(seed, 400, fault);
            set.run(2).is_err().then_some(set)
        };
        let found: Vec<Set> = (0..120).filter_map(failing).take(2).collect();
        if found.len() < 2 {
            left.push(format!("{fault:?}: {}", found.len()));
            continue;
        }
        let mut small = found[0].shrunk(2);
        assert!(small.run(2).is_err(), "{fault:?}: what is left does not fail");
        if small.rules.len() > 2 || small.cases.len() > 20 {
            large.push(format!("{fault:?}: {} rules, {} packets", small.rules.len(), small.cases.len()));
        }
    }
    assert!(large.is_empty(), "not shrunk: {}", large.join(", "));
    assert!(left.is_empty(), "planted, and not found twice in 120 rule sets: {}", left.join(", "));
}
