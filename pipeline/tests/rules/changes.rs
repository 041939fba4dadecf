//! Rules that change while packets flow. The outcome of a packet must be that of the reference with the rules
//! before a change or after it. A failure prints the minimal changes, packets and rule items that still fail,
//! and the seed. `RULES_SEED=n` replays it.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::oracle::{Case, TestEnvironment, check, number};
use crate::script::{Name, Named, Planted, Rules, Step, change, marking, simplest};
use wirepath_flow::{Action, Direction, Rule};
use wirepath_packet::{BATCH, Packet};
use wirepath_pipeline::epoch::{Domain, Reader};
use wirepath_pipeline::rules::actions::DEFAULT_RSS_KEY;
use wirepath_pipeline::rules::{Hit, Outcome, RuleCounters, RuleId, RuleLimits, RuleLookup, RuleTable, Timeouts};
use wirepath_rule_oracle::{DropCause, PacketMetadata, Reference, Rng, Verdict, generate, show, shrink};
use wirepath_testlab::SetOnDrop;
use wirepath_wire::{Parsed, Parser};

/// One event of a script.
#[derive(Clone)]
enum Event {
    /// A step of the next change.
    Step(Step),
    /// The change takes effect.
    Change,
    /// A change that fails in its last step.
    Failed,
    /// The control thread ages its table.
    Age,
    Packet(Direction, Vec<u8>, PacketMetadata),
}

impl Event {
    fn rule(&self) -> Option<&Rule> {
        if let Self::Step(step) = self { step.rule() } else { None }
    }

    fn with_rule(&self, rule: &Rule) -> Self {
        if let Self::Step(step) = self { Self::Step(step.with_rule(rule)) } else { self.clone() }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step(step) => writeln!(f, "{step}"),
            Self::Change => writeln!(f, "these changes take effect"),
            Self::Failed => writeln!(f, "a change fails"),
            Self::Age => writeln!(f, "age"),
            Self::Packet(direction, frame, metadata) => write!(f, "{direction:?} {}", show::packet(frame, metadata)),
        }
    }
}

/// Returns the steps of one change that are possible with these rules.
fn steps(rng: &mut Rng, rules: &mut Rules) -> Vec<Step> {
    let mut left = rules.known.clone();
    let mut steps = Vec::new();
    for _ in 0..rng.pick(&[1, 1, 1, 2, 5, 20]) {
        let known: Vec<Rule> = left.iter().map(|(_, rule)| rule.clone()).collect();
        let at = rng.index(left.len().max(1));
        let (few, many) = (left.len() < 3, left.len() > 60);
        steps.push(match rng.below(5) {
            0 | 1 if !many => rules.add(generate::rule(rng, &known)),
            _ if few => rules.add(generate::rule(rng, &known)),
            2 | 3 => {
                // A replaced rule is not touched again in the same change.
                let (name, old) = left.swap_remove(at);
                let mut rule = rules.another(rng, &old, generate::rule);
                // Sometimes the priority is equal, and then the place in the order is kept.
                if rng.one_in(2) {
                    let (pattern, actions) = (rule.pattern().to_vec(), rule.actions().to_vec());
                    rule = Rule::new(rule.direction(), old.priority(), pattern, actions)
                        .expect("only the priority differs");
                }
                Step::Replace(name, rule)
            }
            _ => Step::Remove(left.swap_remove(at).0),
        });
    }
    rules.done(&steps);
    steps
}

/// Returns a script of `turns` changes. The packets between them are made for the rules of that time.
fn script(seed: u64, turns: usize) -> Vec<Event> {
    let mut rng = Rng::new(seed ^ 0xc4a6e);
    let (mut rules, mut events) = (Rules::default(), Vec::new());
    let first: Vec<Step> = generate::rules(&mut rng, 20).into_iter().map(|rule| rules.add(rule)).collect();
    rules.done(&first);
    events.extend(first.into_iter().map(Event::Step));
    for _ in 0..turns {
        if rng.one_in(10) {
            events.push(Event::Failed);
        }
        events.extend(steps(&mut rng, &mut rules).into_iter().map(Event::Step));
        events.push(Event::Change);
        let known = rules.list();
        for direction in [Direction::Ingress, Direction::Egress] {
            for _ in 0..BATCH {
                let aim = rng.index(known.len().max(1));
                let (frame, metadata) = generate::packet(&mut rng, known.get(aim));
                events.push(Event::Packet(direction, frame, metadata));
            }
        }
        if rng.one_in(20) {
            events.push(Event::Age);
        }
    }
    events
}

/// Replay of a script on the engine and on the reference.
struct Play {
    reader: Reader,
    table: RuleTable,
    ingress: RuleLookup,
    egress: RuleLookup,
    ids: HashMap<Name, RuleId>,
    named: Named,
    world: TestEnvironment,
    pending: Vec<Step>,
    /// Packets of one direction that are looked up together.
    direction: Direction,
    batch: Vec<(Vec<u8>, PacketMetadata)>,
    /// Packets and bytes that every rule matched or counted since its addition.
    sums: HashMap<RuleId, (u64, u64)>,
    ended: HashMap<RuleId, RuleCounters>,
    checked: u64,
}

impl Play {
    fn new(planted: Planted) -> Self {
        let domain = Domain::new();
        let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
        let (ingress, egress) = table.lookups();
        let mut reference = Reference::default();
        reference.rss_key = DEFAULT_RSS_KEY.to_vec();
        Self {
            reader: domain.join(),
            table,
            ingress,
            egress,
            ids: HashMap::new(),
            named: Named::new(reference, planted),
            world: TestEnvironment::new(),
            pending: Vec::new(),
            direction: Direction::Ingress,
            batch: Vec::new(),
            sums: HashMap::new(),
            ended: HashMap::new(),
            checked: 0,
        }
    }

    fn event(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::Step(step) => self.pending.push(step.clone()),
            Event::Change => {
                self.flush()?;
                let steps = std::mem::take(&mut self.pending);
                change(&mut self.table, &mut self.ids, &steps);
                self.named.change(&steps);
                if self.table.len() != self.ids.len() {
                    return Err(format!("{} rules, not {}", self.table.len(), self.ids.len()));
                }
            }
            Event::Failed => {
                self.flush()?;
                self.fail()?;
            }
            Event::Age => {
                self.flush()?;
                self.age()?;
            }
            Event::Packet(direction, frame, metadata) => {
                if self.batch.len() == BATCH || self.direction != *direction {
                    self.flush()?;
                }
                self.direction = *direction;
                self.batch.push((frame.clone(), *metadata));
            }
        }
        Ok(())
    }

    /// A change that fails in its last step has no effect.
    fn fail(&mut self) -> Result<(), String> {
        let all = || "ingress: any => drop".parse().expect("a rule");
        let gone = self.table.add(all(), Timeouts::NONE).map_err(|error| error.to_string())?;
        self.table.remove(gone).map_err(|error| error.to_string())?;
        let some = self.ids.values().next().copied();
        let failed = self.table.change(|change| {
            change.add(all(), Timeouts::NONE)?;
            some.map_or(Ok(()), |some| change.remove(some))?;
            change.remove(gone)
        });
        if failed.is_ok() { Err("a rule that is gone was removed".to_owned()) } else { Ok(()) }
    }

    fn age(&mut self) -> Result<(), String> {
        let mut twice = None;
        self.table.age(self.world.now, |gone| {
            if self.ended.insert(gone.id, gone.counters).is_some() {
                twice = Some(gone.id);
            }
        });
        twice.map_or(Ok(()), |id| Err(format!("{id:?} went twice")))
    }

    /// Sends the pending packets.
    fn flush(&mut self) -> Result<(), String> {
        let Self { reader, world, named, ids, ingress, egress, sums, direction, .. } = self;
        if self.batch.is_empty() {
            return Ok(());
        }
        reader.quiescent();
        world.now += 1000;
        let (mut packets, mut parsed, mut cases): (Vec<Packet>, Vec<Parsed>, Vec<Case>) = Default::default();
        for (frame, metadata) in self.batch.drain(..) {
            // Counters and token buckets continue in packet order.
            let expected = named.reference.run(*direction, &frame, &metadata, world.now);
            let case = Case::new(*direction, frame, metadata, expected);
            let packet = world.packet(&case, None);
            match Parser::default().parse(packet.data()) {
                Ok(headers) => {
                    parsed.push(headers);
                    packets.push(packet);
                    cases.push(case);
                }
                Err(_) if case.expected.verdict == Verdict::Dropped(DropCause::Malformed) => {}
                Err(error) => return Err(format!("refused: {error}\n{}", show::packet(&case.frame, &case.metadata))),
            }
        }
        let mut found: Vec<Option<Hit<'_>>> = vec![None; packets.len()];
        let lookup = if *direction == Direction::Ingress { ingress } else { egress };
        lookup.find(reader.guard(), world.now, &packets, &parsed, &mut found);
        for (n, mut packet) in packets.into_iter().enumerate() {
            let case = &mut cases[n];
            let got = found[n].map(|hit| ids.iter().find(|(_, id)| **id == hit.id()).map(|(name, _)| *name));
            let what = match found[n] {
                _ if got != case.expected.rule.map(|number| Some(named.name(number))) => {
                    Err(format!("it met rule {got:?}"))
                }
                None => Ok(()),
                Some(hit) => {
                    let length = packet.len() as u64;
                    let outcome = hit.program().run(&mut packet, &parsed[n], world);
                    if let Some(bytes) = world.counted {
                        hit.count(bytes as usize);
                    }
                    let counts = hit.rule().actions().contains(&Action::Count);
                    if let Some(bytes) = if counts { world.counted } else { Some(length) } {
                        let sum = sums.entry(hit.id()).or_default();
                        *sum = (sum.0 + 1, sum.1 + bytes);
                    }
                    check(case, outcome, &packet, world)
                }
            };
            if let Err(what) = what {
                let name = case.expected.rule.map(|number| named.name(number));
                let (outcome, packet) = (show::outcome(&case.expected), show::packet(&case.frame, &case.metadata));
                return Err(format!("{what}\n  expected {name:?}: {outcome}{packet}"));
            }
            self.checked += 1;
        }
        Ok(())
    }

    /// Checks that no count is lost, for present and for removed rules.
    fn end(&mut self) -> Result<(), String> {
        self.flush()?;
        for _ in 0..3 {
            self.reader.quiescent();
            self.age()?;
        }
        for (id, (packets, bytes)) in &self.sums {
            let counters = self.table.counters(*id).or_else(|| self.ended.get(id).copied());
            let counters = counters.ok_or(format!("{id:?} is gone without an end"))?;
            if (counters.packets, counters.bytes) != (*packets, *bytes) {
                return Err(format!("{id:?} counted {counters:?}, not {packets} packets of {bytes} bytes"));
            }
        }
        match self.ended.keys().find(|id| self.table.counters(**id).is_some()) {
            Some(id) => Err(format!("{id:?} has ended and is there")),
            None => Ok(()),
        }
    }
}

/// Replays a script. Returns the number of compared packets and of removed rules, or the failing event with
/// its error.
fn play(events: &[Event], planted: Planted) -> Result<(u64, usize), (usize, String)> {
    let mut at = 0;
    let result: Result<Result<_, String>, _> = catch_unwind(AssertUnwindSafe(|| {
        let mut play = Play::new(planted);
        for event in events {
            play.event(event)?;
            at += 1;
        }
        play.end()?;
        Ok((play.checked, play.ended.len()))
    }));
    result.unwrap_or_else(|_| Err("a panic, see above".to_owned())).map_err(|what| (at, what))
}

/// Returns a minimal script with simplified rules that still fails.
fn shrunk(events: &[Event], planted: Planted) -> Vec<Event> {
    let fails = |events: &[Event]| play(events, planted).is_err();
    let Err((at, _)) = play(events, planted) else { return events.to_vec() };
    let events = shrink::smallest_subset(&events[..(at + 1).min(events.len())], fails);
    simplest(&events, Event::rule, Event::with_rule, fails)
}

/// Replays a script. A failure is reported with the minimal failing script.
fn play_and_shrink(events: &[Event]) -> Result<(u64, usize), String> {
    play(events, Planted::Nothing).map_err(|(at, what)| {
        let small = shrunk(events, Planted::Nothing);
        let what_there = play(&small, Planted::Nothing).err().map(|(_, what)| what).unwrap_or_default();
        let list: String = small.iter().map(Event::to_string).collect();
        format!("event {at}: {what}\nshrunk to {} events:\n{list}{what_there}", small.len())
    })
}

#[test]
fn between_batches() {
    let sets = number("RULES_SETS").unwrap_or(30);
    let seeds = number("RULES_SEED").map_or(0..sets, |seed| seed..seed + 1);
    let mut all = 0;
    for seed in seeds {
        let (checked, ended) =
            play_and_shrink(&script(seed, 150)).unwrap_or_else(|what| panic!("RULES_SEED={seed}, {what}"));
        assert!(ended > 50, "{ended} rules went");
        all += checked;
    }
    println!("{all} packets checked");
    assert!(all > 10_000);
}

#[test]
fn failures_between_batches_are_minimised() {
    for planted in [Planted::Removal, Planted::Replacement] {
        let failing = (0..20).map(|seed| script(seed, 40)).find(|events| play(events, planted).is_err());
        let small = shrunk(&failing.expect("found in one of 20 scripts"), planted);
        let list: String = small.iter().map(Event::to_string).collect();
        assert!(play(&small, planted).is_err(), "what is left does not fail:\n{list}");
        // One rule, its changes with their commits, and a packet.
        assert!(small.len() <= 6, "{planted:?} is shrunk to {} events:\n{list}", small.len());
        let items: usize = small.iter().filter_map(Event::rule).map(|rule| rule.pattern().len()).sum();
        assert!(items <= 4, "{planted:?}: {items} items are left:\n{list}");
    }
}

fn mark_of(rule: &Rule) -> Option<u32> {
    match rule.actions() {
        [Action::Mark(mark)] => Some(*mark),
        _ => None,
    }
}

/// Returns a script of changes in which every rule has its own mark.
fn marks(rng: &mut Rng, changes: usize) -> Vec<Vec<Step>> {
    let (mut rules, mut script, mut mark) = (Rules::default(), Vec::new(), 0);
    let mut next = |rng: &mut Rng, known: &[Rule]| {
        mark += 1;
        marking(rng, known, mark)
    };
    for n in 0..changes {
        let (known, list) = (rules.known.clone(), rules.list());
        let mut done = Vec::new();
        let all_new = n == 0 || known.len() < 5;
        if all_new || rng.one_in(4) {
            // All rules are replaced at once.
            done.extend(known.iter().filter(|_| !all_new).map(|(name, _)| Step::Remove(*name)));
            done.extend((0..20).map(|_| rules.add(next(rng, &list))));
        } else {
            // One rule is removed, one is added, and one is replaced.
            let at = rng.index(known.len());
            let (other, old) = &known[(at + 1) % known.len()];
            done.push(Step::Remove(known[at].0));
            done.push(rules.add(next(rng, &list)));
            done.push(Step::Replace(*other, rules.another(rng, old, &mut next)));
        }
        rules.done(&done);
        script.push(done);
    }
    script
}

type Frame = (Vec<u8>, PacketMetadata);

/// Returns the reference before and after each change.
fn moments(script: &[Vec<Step>], planted: Planted) -> Vec<Reference> {
    let mut named = Named::new(Reference::default(), planted);
    let mut moments = vec![named.reference.clone()];
    for steps in script {
        named.change(steps);
        moments.push(named.reference.clone());
    }
    moments
}

/// Runs workers that forward while the control thread applies the script. Returns statistics, or a batch that
/// no version of the rules explains.
fn forward(script: &[Vec<Step>], frames: &[Frame], planted: Planted) -> Result<String, String> {
    const WORKERS: usize = 2;
    let moments = &moments(script, planted)[..];
    let batches: Vec<&[Frame]> = frames.chunks(BATCH).collect();
    let batches = &batches[..];
    let domain = Domain::new();
    // A mask is in use until no worker can see its rules. The changes do not wait for workers, so the limit
    // is high.
    let mut table = RuleTable::new(&domain, RuleLimits { masks: 4096, ..RuleLimits::default() }, 0);
    let lookups: Vec<_> = (0..WORKERS).map(|_| table.lookups()).collect();
    // The last change that may have started, and the last that is complete.
    let (begun, over) = (&AtomicUsize::new(0), &AtomicUsize::new(0));
    let done: &[AtomicU64] = &std::array::from_fn::<_, WORKERS, _>(|_| AtomicU64::new(0));
    let stop = &AtomicBool::new(false);
    let forward = |worker: usize, (mut ingress, mut egress): (RuleLookup, RuleLookup), mut reader: Reader| {
        let (mut world, mut rng) = (TestEnvironment::new(), Rng::new(worker as u64));
        let mut sums: HashMap<RuleId, u64> = HashMap::new();
        // Cached marks from the reference, by version, batch and packet.
        let mut memory: HashMap<(usize, usize, usize), Option<u32>> = HashMap::new();
        let mut between = 0u64;
        while !stop.load(Ordering::Acquire) {
            reader.quiescent();
            let first = over.load(Ordering::Acquire);
            let at = rng.index(batches.len());
            let mut marks = Vec::new();
            for direction in [Direction::Ingress, Direction::Egress] {
                let (mut packets, mut parsed): (Vec<Packet>, Vec<Parsed>) = Default::default();
                for (frame, metadata) in batches[at] {
                    let expected = Reference::default().run(direction, frame, metadata, 0);
                    let packet = world.packet(&Case::new(direction, frame.clone(), *metadata, expected), None);
                    parsed.push(Parser::default().parse(packet.data()).expect("it was parsed before"));
                    packets.push(packet);
                }
                let mut found: Vec<Option<Hit<'_>>> = vec![None; packets.len()];
                let lookup = if direction == Direction::Ingress { &mut ingress } else { &mut egress };
                lookup.find(reader.guard(), 1, &packets, &parsed, &mut found);
                for (n, hit) in found.iter().enumerate() {
                    let Some(hit) = hit else {
                        marks.push(None);
                        continue;
                    };
                    *sums.entry(hit.id()).or_default() += 1;
                    // The rule and its program must belong together.
                    let outcome = hit.program().run(&mut packets[n], &parsed[n], &mut world);
                    if outcome != Outcome::Next || packets[n].mark() != mark_of(hit.rule()) {
                        return Err(format!("{outcome:?} with mark {:?}: {}", packets[n].mark(), hit.rule()));
                    }
                    marks.push(packets[n].mark());
                }
            }
            let last = begun.load(Ordering::Acquire);
            let mut right = |moment: usize| {
                let (reference, count) = (&moments[moment], batches[at].len());
                marks.iter().enumerate().all(|(n, mark)| {
                    let expected = memory.entry((moment, at, n)).or_insert_with(|| {
                        let direction = if n >= count { Direction::Egress } else { Direction::Ingress };
                        let (frame, metadata) = &batches[at][n % count];
                        reference.rule(reference.classify(direction, frame, metadata)?).and_then(mark_of)
                    });
                    *expected == *mark
                })
            };
            if !(first..=last).any(&mut right) {
                return Err(format!("a batch that no moment from {first} to {last} explains: {marks:?}"));
            }
            between += u64::from(last > first);
            done[worker].fetch_add(1, Ordering::Release);
        }
        Ok((sums, between))
    };
    let (seen, ids) = std::thread::scope(|scope| {
        let start = |(worker, lookups)| {
            let reader = domain.join();
            scope.spawn(move || forward(worker, lookups, reader))
        };
        let workers: Vec<_> = lookups.into_iter().enumerate().map(start).collect();
        // Stops the workers even if this thread panics.
        let stopper = SetOnDrop(stop);
        let (mut ids, mut rng) = (HashMap::new(), Rng::new(9));
        // Waits until each worker has processed this many more batches, or one has ended.
        let wait = |more: u64| {
            let now: Vec<u64> = done.iter().map(|done| done.load(Ordering::Acquire)).collect();
            while done.iter().zip(&now).any(|(done, now)| done.load(Ordering::Acquire) < now + more)
                && !workers.iter().any(|worker| worker.is_finished())
            {
                std::thread::yield_now();
            }
        };
        for (n, steps) in script.iter().enumerate() {
            // Some changes follow at once and some after a batch or two, so that they occur at any time
            // within a batch.
            wait(rng.below(3));
            begun.store(n + 1, Ordering::Release);
            change(&mut table, &mut ids, steps);
            over.store(n + 1, Ordering::Release);
            if n % 100 == 99 {
                table.age(1, |_| {});
            }
        }
        wait(2 * batches.len() as u64);
        drop(stopper);
        let join = |worker: std::thread::ScopedJoinHandle<'_, _>| worker.join().expect("no worker panics");
        let seen: Result<Vec<_>, String> = workers.into_iter().map(join).collect();
        (seen, ids)
    });
    let seen: Vec<(HashMap<RuleId, u64>, u64)> = seen?;
    // No count of any worker is lost.
    for id in ids.values() {
        let sum: u64 = seen.iter().filter_map(|(sums, _)| sums.get(id)).sum();
        let counted = table.counters(*id).map(|counters| counters.packets);
        if counted != Some(sum) {
            return Err(format!("{id:?} counted {counted:?}, not {sum}"));
        }
    }
    let met: u64 = seen.iter().flat_map(|(sums, _)| sums.values()).sum();
    let between: u64 = seen.iter().map(|(_, between)| between).sum();
    let batches: u64 = done.iter().map(|done| done.load(Ordering::Relaxed)).sum();
    Ok(format!(
        "{batches} batches, {between} of them during a change, {met} packets met a rule, {} rules left",
        ids.len()
    ))
}

/// Returns a script and packets for its rules.
fn script_and_frames(seed: u64, changes: usize) -> (Vec<Vec<Step>>, Vec<Frame>) {
    let mut rng = Rng::new(seed ^ 0xc0_ffee);
    let script = marks(&mut rng, changes);
    let rules: Vec<&Rule> = script.iter().flatten().filter_map(Step::rule).collect();
    let mut frames = Vec::new();
    while frames.len() < 8 * BATCH {
        let aim = rng.index(rules.len());
        let (frame, metadata) = generate::packet(&mut rng, Some(rules[aim]));
        if Parser::default().parse(&frame).is_ok() {
            frames.push((frame, metadata));
        }
    }
    (script, frames)
}

/// Returns a minimal script and minimal packets that still fail. Each attempt is repeated, because the
/// failure may depend on timing.
fn shrunk_under_traffic(script: &[Vec<Step>], frames: &[Frame], planted: Planted) -> (Vec<Vec<Step>>, Vec<Frame>) {
    const TRIES: usize = 5;
    let fails = |script: &[Vec<Step>], frames: &[Frame]| {
        !frames.is_empty() && (0..TRIES).any(|_| forward(script, frames, planted).is_err())
    };
    let script = shrink::smallest_subset(script, |script| fails(script, frames));
    let frames = shrink::smallest_subset(frames, |frames| fails(&script, frames));
    // Single steps, with the index of their change.
    let steps: Vec<(usize, Step)> =
        script.iter().enumerate().flat_map(|(n, steps)| steps.iter().map(move |step| (n, step.clone()))).collect();
    let whole = |steps: &[(usize, Step)]| -> Vec<Vec<Step>> {
        let of = |n| steps.iter().filter(|step| step.0 == n).map(|step| step.1.clone()).collect();
        (0..script.len()).map(of).collect()
    };
    let steps = shrink::smallest_subset(&steps, |steps| fails(&whole(steps), &frames));
    let fails_with_marks = |steps: &[(usize, Step)]| {
        steps.iter().filter_map(|step| step.1.rule()).all(|rule| mark_of(rule).is_some())
            && fails(&whole(steps), &frames)
    };
    let with = |step: &(usize, Step), rule: &Rule| (step.0, step.1.with_rule(rule));
    let steps = simplest(&steps, |step| step.1.rule(), with, fails_with_marks);
    (whole(&steps), frames)
}

fn show_script(script: &[Vec<Step>], frames: &[Frame]) -> String {
    let changes = script.iter().enumerate();
    let steps: String = changes.flat_map(|(n, steps)| steps.iter().map(move |step| format!("{n}: {step}\n"))).collect();
    steps + &frames.iter().map(|(frame, metadata)| show::packet(frame, metadata)).collect::<String>()
}

#[test]
fn while_workers_forward() {
    let changes = number("RULES_CHANGES").unwrap_or(1500) as usize;
    let seed = number("RULES_SEED").unwrap_or(1);
    let (script, frames) = script_and_frames(seed, changes);
    match forward(&script, &frames, Planted::Nothing) {
        Ok(what) => println!("{changes} changes, {what}"),
        Err(what) => {
            let (script, frames) = shrunk_under_traffic(&script, &frames, Planted::Nothing);
            panic!("RULES_SEED={seed}: {what}\nshrunk to:\n{}", show_script(&script, &frames));
        }
    }
}

#[test]
fn failures_under_traffic_are_minimised() {
    let planted = Planted::Removal;
    let scripts = (0..20).map(|seed| script_and_frames(seed, 12));
    let failing = scripts.into_iter().find(|(script, frames)| forward(script, frames, planted).is_err());
    let (script, frames) = failing.expect("found in one of 20 scripts");
    let (small, frames) = shrunk_under_traffic(&script, &frames, planted);
    let list = show_script(&small, &frames);
    let steps: usize = small.iter().map(Vec::len).sum();
    // A rule, its removal, and a packet.
    assert!(steps <= 3 && frames.len() <= 2, "shrunk to {steps} steps and {} packets:\n{list}", frames.len());
}
