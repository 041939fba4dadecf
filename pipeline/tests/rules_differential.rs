//! The software engine against the naive reference of `wirepath-rulelab`: random rules, random packets of every header stack, cut off
//! and damaged ones too.
//!
//! Each rule set is one seed. Of its packets one in [`ROUNDS`] is different; every one is sent [`ROUNDS`] times, in another order each
//! time, so that caches are cold and warm. A failure prints its seed, and `RULES_SEED=n` runs that set alone:
//!
//! ```text
//! RULES_SEED=17 cargo test -p wirepath-pipeline --test rules_differential
//! RULES_SETS=5000 cargo test -p wirepath-pipeline --test rules_differential       # more of them
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_pipeline::epoch::{Domain, Reader};
use wirepath_pipeline::rules::program::DEFAULT_RSS_KEY;
use wirepath_pipeline::rules::{
    Environment, Installed, Outcome, Program, RuleId, RuleLimits, RuleLookup, RuleTable, Timeouts, Toeplitz,
};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::{Action, Direction, Rule};
use wirepath_pmd::packet::{BATCH, Packet, Pool};
use wirepath_rulelab as lab;
use wirepath_rulelab::{Cause, Coverage, Fate, Fault, Noted, Reference, Rng, compare, make, show};
use wirepath_wire::{ParseError, Parsed, Parser};

/// Rule sets in a usual run.
const SETS: u64 = 500;
/// Packets for each rule set.
const PACKETS: usize = 100_000;
/// How often each of them is sent.
const ROUNDS: usize = 10;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// A packet, and what must become of it.
struct Case {
    direction: Direction,
    frame: Vec<u8>,
    noted: Noted,
    expected: lab::Outcome,
    /// Whether that depends on what came before.
    stateful: bool,
    /// Source port of the outer header that it got: the same for every packet of a flow.
    entropy: Option<u16>,
}

/// What programs run in.
struct World {
    pool: Pool,
    now: u64,
    toeplitz: Toeplitz,
    counted: Option<u64>,
    mirrors: Vec<(u16, Packet)>,
}

impl World {
    fn new() -> Self {
        let pool = Pool::new("rules", 1024).expect("memory");
        Self { pool, now: 1, toeplitz: Toeplitz::new(&DEFAULT_RSS_KEY), counted: None, mirrors: Vec::new() }
    }

    /// A packet with these bytes, in two segments if `split` says where.
    fn packet(&self, case: &Case, split: Option<usize>) -> Packet {
        let take = |bytes: &[u8]| {
            let mut packet = self.pool.take().expect("a buffer");
            packet.append(bytes.len()).expect("room").copy_from_slice(bytes);
            packet
        };
        let (head, tail) = case.frame.split_at(split.unwrap_or(case.frame.len()));
        let mut packet = take(head);
        if !tail.is_empty() {
            packet.append_segment(take(tail)).unwrap_or_else(|_| panic!("a second segment"));
        }
        match case.direction {
            Direction::Ingress => packet.set_in_port(case.noted.port),
            Direction::Egress => packet.set_out_port(case.noted.port),
        }
        if case.noted.mark != 0 {
            packet.set_mark(case.noted.mark);
        }
        packet.set_app([case.noted.data.into(), 0]);
        packet
    }
}

impl Environment for World {
    fn now(&self) -> u64 {
        self.now
    }

    fn pool(&self) -> Option<&Pool> {
        Some(&self.pool)
    }

    fn toeplitz(&self) -> &Toeplitz {
        &self.toeplitz
    }

    fn count(&mut self, bytes: usize) {
        assert!(self.counted.replace(bytes as u64).is_none(), "counted twice");
    }

    fn mirror(&mut self, port: u16, copy: Packet) {
        self.mirrors.push((port, copy));
    }

    fn lost_copy(&mut self, reason: DropReason) {
        panic!("a copy was lost: {reason:?}");
    }
}

fn bytes(packet: &Packet) -> Vec<u8> {
    let mut bytes = vec![0; packet.len()];
    packet.copy_to(&mut bytes);
    bytes
}

/// Whether a packet dropped for this cause is rightly counted under this reason.
fn is_reason(reason: DropReason, cause: Cause) -> bool {
    match cause {
        Cause::Ruled => reason == DropReason::Ruled,
        Cause::NoHopsLeft => reason == DropReason::HopLimit,
        Cause::RateLimited => reason == DropReason::OverRate,
        Cause::Congestion => reason == DropReason::BadEcn,
        // What the parser found wrong in the tunnel is told, if that is what is wrong.
        Cause::NothingInside => {
            reason == DropReason::RuleMismatch || ParseError::ALL.iter().any(|&error| DropReason::from(error) == reason)
        }
        Cause::OuterFragment => reason == DropReason::OuterFragment,
        Cause::ThirdTag => reason == DropReason::TooManyHeaders,
        Cause::Malformed => false,
    }
}

/// What differs, if something does.
fn check(case: &mut Case, outcome: Outcome, packet: &Packet, world: &mut World) -> Result<(), String> {
    let expected = &case.expected;
    let right = match (&expected.fate, outcome) {
        (Fate::On, Outcome::Next) | (Fate::Kernel, Outcome::Kernel) => true,
        (Fate::Queue(a), Outcome::Queue(b)) | (Fate::Redirect(a), Outcome::Redirect(b)) => *a == b,
        (Fate::Dropped(cause), Outcome::Drop(reason)) => is_reason(reason, *cause),
        _ => false,
    };
    if !right {
        return Err(format!("it became {outcome:?}, not {:?}", expected.fate));
    }
    let counted = world.counted.take();
    if counted != expected.counted {
        return Err(format!("counted {counted:?}, not {:?}", expected.counted));
    }
    let mirrors = std::mem::take(&mut world.mirrors);
    if mirrors.len() != expected.mirrors.len() {
        return Err(format!("{} copies, not {}", mirrors.len(), expected.mirrors.len()));
    }
    for (n, ((port, copy), (want_port, want))) in mirrors.iter().zip(&expected.mirrors).enumerate() {
        if port != want_port {
            return Err(format!("copy {n} went to {port}, not to {want_port}"));
        }
        let copy = bytes(copy);
        compare::same(want, &copy).map_err(|e| format!("copy {n}: {e}\n  is    {}", show::hex(&copy)))?;
    }
    if matches!(expected.fate, Fate::Dropped(_)) {
        return Ok(());
    }
    let mark = packet.mark().unwrap_or(0);
    if mark != expected.mark {
        return Err(format!("marked {mark}, not {}", expected.mark));
    }
    let frame = bytes(packet);
    compare::same(&expected.frame, &frame).map_err(|e| format!("{e}\n  is    {}", show::hex(&frame)))?;
    if let Some(udp) = expected.frame.put_on.filter(|put_on| put_on.any_port).and_then(|put_on| put_on.udp) {
        let port = u16::from_be_bytes([frame[udp], frame[udp + 1]]);
        if *case.entropy.get_or_insert(port) != port {
            return Err(format!("source port {port}, but {:?} before", case.entropy));
        }
    }
    Ok(())
}

fn is_stateful(rule: &Rule) -> bool {
    rule.actions().iter().any(|action| matches!(action, Action::Limit(_)))
}

/// One rule set with its packets. Returns what was seen.
struct Set {
    seed: u64,
    rules: Vec<Rule>,
    reference: Reference,
    cases: Vec<Case>,
    coverage: Coverage,
}

impl Set {
    fn new(seed: u64, packets: usize, fault: Fault) -> Self {
        let mut rng = Rng::new(seed);
        let count = rng.pick(&[3, 10, 30, 100]);
        let rules = make::rules(&mut rng, count);
        let mut reference = Reference::new(&rules).with(fault);
        reference.rss_key = DEFAULT_RSS_KEY.to_vec();
        let mut coverage = Coverage::default();
        let cases = (0..packets)
            .map(|_| {
                let aim = rng.index(rules.len());
                let wish = (!rng.one_in(10)).then_some(&rules[aim]);
                let (frame, noted) = make::packet(&mut rng, wish);
                let direction = rules[aim].direction();
                let expected = reference.run(direction, &frame, &noted, 0);
                let rule = expected.rule.and_then(|id| reference.rule(id));
                coverage.note(rule, &expected);
                let stateful = rule.is_some_and(is_stateful);
                Case { direction, frame, noted, expected, stateful, entropy: None }
            })
            .collect();
        // What was only asked for the memory of the test is forgotten.
        let mut fresh = Reference::new(&rules).with(fault);
        fresh.rss_key = DEFAULT_RSS_KEY.to_vec();
        Self { seed, rules, reference: fresh, cases, coverage }
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
            show::packet(&case.frame, &case.noted),
        )
    }

    /// Sends everything through the engine.
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
        if number("RULES_PROGRAMS").is_some() {
            return Ok(());
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
            // The tail of long packets lies in a buffer of its own, sometimes.
            let split = (case.frame.len() > 700 && at % 2 == 1).then_some(512);
            let packet = engine.world.packet(case, split);
            let refused = case.expected.fate == Fate::Dropped(Cause::Malformed);
            match parser.parse_chain(packet.data(), packet.len()) {
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
        let mut found: [Option<&Installed>; BATCH] = [None; BATCH];
        let found = &mut found[..packets.len()];
        let lookup = match self.cases[chunk[0]].direction {
            Direction::Ingress => &mut engine.ingress,
            Direction::Egress => &mut engine.egress,
        };
        lookup.find(engine.reader.guard(), engine.world.now, &packets, &parsed, found);
        for (n, mut packet) in packets.into_iter().enumerate() {
            let at = places[n];
            if self.cases[at].stateful {
                let Case { direction, frame, noted, .. } = &self.cases[at];
                self.cases[at].expected = self.reference.run(*direction, frame, noted, engine.world.now);
            }
            if number("RULES_PROGRAMS").is_some() {
                let Some(rule) = self.cases[at].expected.rule else { continue };
                let program = &engine.programs[&engine.ids[rule as usize]];
                let outcome = program.run(&mut packet, &parsed[n], &mut engine.world);
                if let Err(what) = check(&mut self.cases[at], outcome, &packet, &mut engine.world) {
                    return Err(self.failure(at, &what));
                }
                continue;
            }
            let got = found[n].map(|installed| engine.nth[&installed.id()]);
            let expected = self.cases[at].expected.rule;
            if got != expected {
                let rule = found[n].map_or("none".to_owned(), |installed| installed.rule().to_string());
                return Err(self.failure(at, &format!("it met rule {got:?}: {rule}")));
            }
            let Some(installed) = found[n] else { continue };
            let sum = sums.entry(engine.nth[&installed.id()]).or_default();
            *sum = (sum.0 + 1, sum.1 + packet.len() as u64);
            let program = &engine.programs[&installed.id()];
            let outcome = program.run(&mut packet, &parsed[n], &mut engine.world);
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
    world: World,
    programs: HashMap<RuleId, Program>,
    ids: Vec<RuleId>,
    /// What the reference calls a rule.
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
            world: World::new(),
            programs: ids.iter().zip(rules).map(|(id, rule)| (*id, Program::compile(rule))).collect(),
            nth: ids.iter().enumerate().map(|(nth, id)| (*id, nth as u64)).collect(),
            ids,
        }
    }
}

/// Runs the sets of these seeds on both cores; every failure, and what was seen.
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
            failures.extend(set.run(rounds).err());
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
fn every_packet_becomes_what_the_reference_says() {
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
    assert!(missing.is_empty(), "hit less than 100 times: {}", missing.join(", "));
}
