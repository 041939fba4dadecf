//! Rules that change while packets flow: what a packet becomes is what the reference says for the rules before the change, or for
//! those after it.

mod judged;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use judged::{Case, World, check, number};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::program::DEFAULT_RSS_KEY;
use wirepath_pipeline::rules::{Hit, Outcome, RuleCounters, RuleId, RuleLimits, RuleTable, Timeouts};
use wirepath_pmd::flow::{Action, Direction, Rule};
use wirepath_pmd::packet::{BATCH, Packet};
use wirepath_rulelab::{Cause, Fate, Noted, Reference, Rng, make, show};
use wirepath_wire::{Parsed, Parser};

/// One change of a rule, in the reference's names.
enum Step {
    Add(Rule),
    Remove(u64),
    Replace(u64, Rule),
}

/// Changes that belong together, possible with these rules.
fn steps(rng: &mut Rng, reference: &Reference) -> Vec<Step> {
    let mut known: Vec<(u64, Rule)> = reference.rules().map(|(id, rule)| (id, rule.clone())).collect();
    let mut steps = Vec::new();
    for _ in 0..rng.pick(&[1, 1, 1, 2, 5, 20]) {
        let rules: Vec<Rule> = known.iter().map(|(_, rule)| rule.clone()).collect();
        let at = rng.index(known.len().max(1));
        let few = known.len() < 3;
        let many = known.len() > 60;
        steps.push(match rng.below(5) {
            0 | 1 if !many => Step::Add(make::rule(rng, &rules)),
            _ if few => Step::Add(make::rule(rng, &rules)),
            2 | 3 => {
                let mut rule = make::rule(rng, &rules);
                while rule.direction() != known[at].1.direction() {
                    rule = make::rule(rng, &rules);
                }
                // The same priority sometimes, and then the same place.
                if rng.one_in(2) {
                    let priority = known[at].1.priority();
                    let (pattern, actions) = (rule.pattern().to_vec(), rule.actions().to_vec());
                    rule = Rule::new(rule.direction(), priority, pattern, actions).expect("only the priority differs");
                }
                // What is replaced is not removed or replaced once more in the same change.
                Step::Replace(known.swap_remove(at).0, rule)
            }
            _ => Step::Remove(known.swap_remove(at).0),
        });
    }
    steps
}

/// Does to the engine and to the reference the same.
fn apply(steps: Vec<Step>, table: &mut RuleTable, reference: &mut Reference, ids: &mut HashMap<u64, RuleId>) {
    let known = ids.clone();
    let added = table
        .change(|change| {
            let mut added = Vec::new();
            for step in &steps {
                match step {
                    Step::Add(rule) => added.push(change.add(rule.clone(), Timeouts::NONE)?),
                    Step::Remove(id) => change.remove(known[id])?,
                    Step::Replace(id, rule) => change.replace(known[id], rule.clone())?,
                }
            }
            Ok(added)
        })
        .expect("a possible change");
    let mut added = added.into_iter();
    for step in steps {
        match step {
            Step::Add(rule) => {
                let id = reference.add(rule);
                ids.insert(id, added.next().expect("one id for each"));
            }
            Step::Remove(id) => {
                assert!(reference.remove(id));
                ids.remove(&id);
            }
            Step::Replace(id, rule) => assert!(reference.replace(id, rule)),
        }
    }
}

#[test]
fn between_batches() {
    let sets = number("RULES_SETS").unwrap_or(30);
    let seeds = number("RULES_SEED").map_or(0..sets, |seed| seed..seed + 1);
    let mut checked = 0u64;
    for seed in seeds {
        let mut rng = Rng::new(seed ^ 0xc4a6e);
        let domain = Domain::new();
        let mut reader = domain.join();
        let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
        let (mut ingress, mut egress) = table.lookups();
        let mut reference = Reference::default();
        reference.rss_key = DEFAULT_RSS_KEY.to_vec();
        let mut ids = HashMap::new();
        let first = make::rules(&mut rng, 20).into_iter().map(Step::Add).collect();
        apply(first, &mut table, &mut reference, &mut ids);
        let mut world = World::new();
        // What every rule met or counted since it was added.
        let mut sums: HashMap<RuleId, (u64, u64)> = HashMap::new();
        let mut ended: HashMap<RuleId, RuleCounters> = HashMap::new();
        for turn in 0..150 {
            let steps = steps(&mut rng, &reference);
            if rng.one_in(10) {
                // A change that fails in its last step has not happened.
                let gone = table.add("ingress: any => drop".parse().unwrap(), Timeouts::NONE).unwrap();
                table.remove(gone).unwrap();
                let some = ids.values().next().copied();
                let failed = table.change(|change| {
                    change.add("ingress: any => drop".parse().unwrap(), Timeouts::NONE)?;
                    some.map_or(Ok(()), |some| change.remove(some))?;
                    change.remove(gone)
                });
                assert!(failed.is_err());
            }
            apply(steps, &mut table, &mut reference, &mut ids);
            assert_eq!(table.len(), ids.len());
            let names: HashMap<RuleId, u64> = ids.iter().map(|(name, id)| (*id, *name)).collect();
            let rules: Vec<Rule> = reference.rules().map(|(_, rule)| rule.clone()).collect();
            for direction in [Direction::Ingress, Direction::Egress] {
                reader.quiescent();
                world.now += 1000;
                let lookup = if direction == Direction::Ingress { &mut ingress } else { &mut egress };
                let (mut packets, mut parsed, mut cases): (Vec<Packet>, Vec<Parsed>, Vec<Case>) = Default::default();
                while packets.len() < BATCH {
                    let aim = rng.index(rules.len());
                    let (frame, noted) = make::packet(&mut rng, Some(&rules[aim]));
                    // Sums and buckets go on in the order of the packets.
                    let expected = reference.run(direction, &frame, &noted, world.now);
                    let case = Case::new(direction, frame, noted, expected);
                    let packet = world.packet(&case, None);
                    match Parser::default().parse(packet.data()) {
                        Ok(headers) => {
                            parsed.push(headers);
                            packets.push(packet);
                            cases.push(case);
                        }
                        Err(_) => assert_eq!(case.expected.fate, Fate::Dropped(Cause::Malformed)),
                    }
                }
                let mut found: Vec<Option<Hit<'_>>> = vec![None; BATCH];
                lookup.find(reader.guard(), world.now, &packets, &parsed, &mut found);
                for (n, mut packet) in packets.into_iter().enumerate() {
                    let case = &mut cases[n];
                    let got = found[n].map(|hit| names.get(&hit.id()).copied());
                    let right = got == case.expected.rule.map(Some);
                    let what = match found[n] {
                        _ if !right => Err(format!("it met rule {got:?}")),
                        None => Ok(()),
                        Some(hit) => {
                            let length = packet.len() as u64;
                            let outcome = hit.program().run(&mut packet, &parsed[n], &mut world);
                            if let Some(bytes) = world.counted {
                                hit.count(bytes as usize);
                            }
                            let counts = hit.rule().actions().contains(&Action::Count);
                            if let Some(bytes) = if counts { world.counted } else { Some(length) } {
                                let sum = sums.entry(hit.id()).or_default();
                                *sum = (sum.0 + 1, sum.1 + bytes);
                            }
                            check(case, outcome, &packet, &mut world)
                        }
                    };
                    if let Err(what) = what {
                        panic!(
                            "RULES_SEED={seed}, turn {turn}: {what}\n  expected {}{}{}",
                            show::outcome(&case.expected),
                            show::packet(&case.frame, &case.noted),
                            show::rules(reference.rules())
                        );
                    }
                    checked += 1;
                }
            }
            if rng.one_in(20) {
                table.age(world.now, |gone| assert!(ended.insert(gone.id, gone.counters).is_none()));
            }
        }
        // Nothing is lost of what a rule counted, whether it is there or gone.
        for _ in 0..3 {
            reader.quiescent();
            table.age(world.now, |gone| assert!(ended.insert(gone.id, gone.counters).is_none()));
        }
        for (id, (packets, bytes)) in sums {
            let counters = table.counters(id).or_else(|| ended.get(&id).copied()).expect("a rule, or its end");
            assert_eq!((counters.packets, counters.bytes), (packets, bytes), "RULES_SEED={seed}: {id:?}");
        }
        assert!(ended.len() > 50 && ended.keys().all(|id| table.counters(*id).is_none()));
    }
    println!("{checked} packets checked");
    assert!(checked > 10_000);
}

/// The rules of one moment: each marks its packets with a number of its own.
struct Moment {
    reference: Reference,
}

fn marked(rng: &mut Rng, known: &[Rule], mark: u32) -> Rule {
    let rule = make::rule(rng, known);
    Rule::new(rule.direction(), rule.priority(), rule.pattern().to_vec(), vec![Action::Mark(mark)]).expect("a rule")
}

fn mark_of(rule: &Rule) -> u32 {
    match rule.actions() {
        [Action::Mark(mark)] => *mark,
        other => panic!("{other:?}"),
    }
}

/// What happens at one change, in the reference's names.
fn script(rng: &mut Rng, changes: usize) -> (Vec<Moment>, Vec<Vec<Step>>) {
    let (mut reference, mut mark) = (Reference::default(), 0);
    let mut next = |rng: &mut Rng, known: &[Rule]| {
        mark += 1;
        marked(rng, known, mark)
    };
    let (mut moments, mut script) = (vec![Moment { reference: reference.clone() }], Vec::new());
    for n in 0..changes {
        let mut done = Vec::new();
        let known: Vec<(u64, Rule)> = reference.rules().map(|(id, rule)| (id, rule.clone())).collect();
        let rules: Vec<Rule> = known.iter().map(|(_, rule)| rule.clone()).collect();
        if n == 0 || known.len() < 5 {
            done.extend((0..20).map(|_| Step::Add(next(rng, &rules))));
        } else if rng.one_in(4) {
            // All at once: everything out, others in.
            done.extend(known.iter().map(|(id, _)| Step::Remove(*id)));
            done.extend((0..20).map(|_| Step::Add(next(rng, &rules))));
        } else {
            // The rules of one direction wander: one out, one in, one in another's place.
            let at = rng.index(known.len());
            let other = (at + 1) % known.len();
            done.push(Step::Remove(known[at].0));
            done.push(Step::Add(next(rng, &rules)));
            let mut rule = next(rng, &rules);
            while rule.direction() != known[other].1.direction() {
                rule = next(rng, &rules);
            }
            done.push(Step::Replace(known[other].0, rule));
        }
        for step in &done {
            match step {
                Step::Add(rule) => drop(reference.add(rule.clone())),
                Step::Remove(id) => assert!(reference.remove(*id)),
                Step::Replace(id, rule) => assert!(reference.replace(*id, rule.clone())),
            }
        }
        moments.push(Moment { reference: reference.clone() });
        script.push(done);
    }
    (moments, script)
}

/// Lets the workers end.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn while_workers_forward() {
    const WORKERS: usize = 2;
    let changes = number("RULES_CHANGES").unwrap_or(1500) as usize;
    let mut rng = Rng::new(number("RULES_SEED").unwrap_or(1) ^ 0xc0_ffee);
    let (moments, script) = script(&mut rng, changes);
    let mut frames: Vec<(Vec<u8>, Noted)> = Vec::new();
    while frames.len() < 8 * BATCH {
        let moment = &moments[rng.index(moments.len())].reference;
        let rules: Vec<&Rule> = moment.rules().map(|(_, rule)| rule).collect();
        let aim = rng.index(rules.len().max(1));
        let (frame, noted) = make::packet(&mut rng, rules.get(aim).copied());
        if Parser::default().parse(&frame).is_ok() {
            frames.push((frame, noted));
        }
    }
    let domain = Domain::new();
    // Masks count until no worker can see their rules any more, and these changes do not wait for workers.
    let mut table = RuleTable::new(&domain, RuleLimits { masks: 4096, ..RuleLimits::default() }, 0);
    let lookups: Vec<_> = (0..WORKERS).map(|_| table.lookups()).collect();
    // The change that may have begun, and that which is surely over.
    let (begun, over) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (batches, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (moments, frames) = (&moments[..], &frames[..]);
    let (seen, ids) = std::thread::scope(|scope| {
        let workers: Vec<_> = lookups
            .into_iter()
            .enumerate()
            .map(|(worker, (mut ingress, mut egress))| {
                let mut reader = domain.join();
                let (begun, over, batches, stop) = (&begun, &over, &batches, &stop);
                scope.spawn(move || {
                    let mut world = World::new();
                    let mut rng = Rng::new(worker as u64);
                    let mut sums: HashMap<RuleId, u64> = HashMap::new();
                    // The mark that a packet gets at a moment, by direction: asked of the reference once.
                    let mut memory: HashMap<(usize, usize, bool), Option<u32>> = HashMap::new();
                    let mut between = 0u64;
                    while !stop.load(Ordering::Acquire) {
                        reader.quiescent();
                        let first = over.load(Ordering::Acquire);
                        let start = rng.index(frames.len() / BATCH) * BATCH;
                        let mut marks = Vec::new();
                        for direction in [Direction::Ingress, Direction::Egress] {
                            let (mut packets, mut parsed): (Vec<Packet>, Vec<Parsed>) = Default::default();
                            for (frame, noted) in &frames[start..start + BATCH] {
                                let expected = Reference::default().run(direction, frame, noted, 0);
                                let packet = world.packet(&Case::new(direction, frame.clone(), *noted, expected), None);
                                parsed.push(Parser::default().parse(packet.data()).expect("it was parsed before"));
                                packets.push(packet);
                            }
                            let mut found: Vec<Option<Hit<'_>>> = vec![None; BATCH];
                            let lookup = if direction == Direction::Ingress { &mut ingress } else { &mut egress };
                            lookup.find(reader.guard(), 1, &packets, &parsed, &mut found);
                            for (n, hit) in found.iter().enumerate() {
                                let Some(hit) = hit else {
                                    marks.push(None);
                                    continue;
                                };
                                *sums.entry(hit.id()).or_default() += 1;
                                // Rule and program are of one piece.
                                let outcome = hit.program().run(&mut packets[n], &parsed[n], &mut world);
                                assert_eq!(outcome, Outcome::Next);
                                assert_eq!(packets[n].mark(), Some(mark_of(hit.rule())));
                                marks.push(packets[n].mark());
                            }
                        }
                        let last = begun.load(Ordering::Acquire);
                        let mut right = |at: usize| {
                            marks.iter().enumerate().all(|(n, mark)| {
                                let (nth, out) = (start + n % BATCH, n >= BATCH);
                                let expected = memory.entry((at, nth, out)).or_insert_with(|| {
                                    let direction = if out { Direction::Egress } else { Direction::Ingress };
                                    let reference = &moments[at].reference;
                                    let id = reference.classify(direction, &frames[nth].0, &frames[nth].1)?;
                                    reference.rule(id).map(mark_of)
                                });
                                *expected == *mark
                            })
                        };
                        let which = (first..=last).find(|at| right(*at));
                        assert!(
                            which.is_some(),
                            "worker {worker}: a batch that no moment from {first} to {last} explains: {marks:?}"
                        );
                        between += u64::from(last > first);
                        batches.fetch_add(1, Ordering::Release);
                    }
                    (sums, between)
                })
            })
            .collect();
        // Also if this thread fails.
        let stopper = Stop(&stop);
        let mut ids: HashMap<u64, RuleId> = HashMap::new();
        let mut reference = Reference::default();
        let mut finished = workers.iter().any(|worker| worker.is_finished());
        for (n, steps) in script.into_iter().enumerate() {
            // Some changes follow at once, some after a batch or two, so that they come at any moment of one.
            let wait = batches.load(Ordering::Acquire) + rng.below(3);
            while batches.load(Ordering::Acquire) < wait && !finished {
                finished = workers.iter().any(|worker| worker.is_finished());
                std::thread::yield_now();
            }
            begun.store(n + 1, Ordering::Release);
            apply(steps, &mut table, &mut reference, &mut ids);
            over.store(n + 1, Ordering::Release);
            if n % 100 == 99 {
                table.age(1, |_| {});
            }
        }
        drop(stopper);
        let seen: Vec<_> = workers.into_iter().map(|worker| worker.join().expect("no worker failed")).collect();
        (seen, ids)
    });
    // Nothing that was counted is lost, by whichever worker.
    let mut left = 0;
    for id in ids.values() {
        let sum: u64 = seen.iter().filter_map(|(sums, _)| sums.get(id)).sum();
        assert_eq!(table.counters(*id).expect("a rule that is there").packets, sum);
        left += 1;
    }
    let met: u64 = seen.iter().flat_map(|(sums, _)| sums.values()).sum();
    let between: u64 = seen.iter().map(|(_, between)| between).sum();
    println!(
        "{changes} changes, {} batches, {between} of them during a change, {met} packets met a rule, {left} rules left",
        batches.load(Ordering::Relaxed)
    );
    assert!(met > 0);
}
