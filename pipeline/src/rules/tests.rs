//! Tests of the engine against a linear search: random rules and packets, with changes while packets pass.

use wirepath_flow::{Direction, FieldSet, Metadata, Rule, packet_value};
use wirepath_packet::PortId;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_rule_oracle::{PacketMetadata, Rng, generate};
use wirepath_wire::{Parsed, Parser};

use super::*;
use crate::epoch::{Domain, Reader};

/// Returns the metadata that the items `port` and `meta` match: input port at ingress or output port at
/// egress, mark, and the low half of the first application word.
fn metadata(packet: &Packet, direction: Direction) -> Metadata {
    let port = if direction == Direction::Ingress { packet.in_port() } else { packet.out_port() };
    Metadata {
        port: port.map_or(u16::MAX, PortId::number),
        mark: packet.mark().unwrap_or(0) & 0xff_ffff,
        data: packet.app()[0] as u32,
    }
}

/// One worker, and the same rules in a list.
struct Bench {
    domain: Domain,
    table: RuleTable,
    ingress: RuleLookup,
    egress: RuleLookup,
    reader: Reader,
    pool: Pool,
    /// Rules in the order of their addition.
    list: Vec<(RuleId, Rule, FieldSet)>,
    now: u64,
}

impl Bench {
    fn new(limits: RuleLimits) -> Self {
        let domain = Domain::new();
        let mut table = RuleTable::new(&domain, limits, 0);
        let (ingress, egress) = table.lookups();
        let reader = domain.join();
        let pool = Pool::new("rules", 256).unwrap();
        Self { domain, table, ingress, egress, reader, pool, list: Vec::new(), now: 1 }
    }

    fn add(&mut self, rule: Rule) -> RuleId {
        let id = self.table.add(rule.clone(), Timeouts::NONE).unwrap();
        let fields = rule.fields();
        self.list.push((id, rule, fields));
        id
    }

    fn remove(&mut self, index: usize) {
        let (id, ..) = self.list.remove(index);
        self.table.remove(id).unwrap();
    }

    fn next_turn(&mut self) {
        self.reader.quiescent();
        self.now += 1;
    }

    /// Looks up a batch of frames and compares the results with the list.
    fn check(&mut self, direction: Direction, frames: &[(Vec<u8>, PacketMetadata)], context: &str) -> usize {
        let parser = Parser::default();
        let (mut batch, mut parsed): (Batch, Vec<Parsed>) = (Batch::new(), Vec::new());
        for (frame, noted) in frames {
            let Ok(found) = parser.parse(frame) else { continue };
            let mut packet = self.pool.take().unwrap();
            assert!(packet.extend_from_slice(frame, &self.pool));
            packet.set_in_port(PortId::checked(noted.port));
            packet.set_out_port(PortId::checked(noted.port));
            if noted.mark != 0 {
                packet.set_mark(noted.mark);
            }
            packet.set_app([noted.data.into(), 7]);
            if batch.push(packet).is_ok() {
                parsed.push(found);
            }
        }
        let lookup = if direction == Direction::Ingress { &mut self.ingress } else { &mut self.egress };
        let mut found = [None; BATCH];
        let found = &mut found[..batch.len()];
        lookup.find(self.reader.guard(), self.now, batch.as_slice(), &parsed, found);
        for ((packet, parsed), found) in batch.iter().zip(&parsed).zip(&*found) {
            let metadata = metadata(packet, direction);
            let fits = |fields: &FieldSet| fields.matches(|key| packet_value(parsed, packet.data(), metadata, key));
            let expected = self
                .list
                .iter()
                .filter(|(_, rule, fields)| rule.direction() == direction && fits(fields))
                .min_by_key(|(_, rule, _)| rule.priority());
            assert_eq!(
                found.map(|hit| hit.id()),
                expected.map(|(id, ..)| *id),
                "{context}: expected {:?}, found {:?} for {:02x?}",
                expected.map(|(_, rule, _)| rule.to_string()),
                found.map(|hit| hit.rule().to_string()),
                packet.data(),
            );
        }
        found.iter().filter(|hit| hit.is_some()).count()
    }
}

fn rule(text: &str) -> Rule {
    text.parse().unwrap()
}

#[test]
fn lookups_agree_with_a_list_while_rules_change() {
    let mut hits = 0;
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        // A small cache, so that flows are evicted.
        let flows = if seed % 2 == 0 { 16 } else { 4096 };
        let mut bench = Bench::new(RuleLimits { masks: 4096, flows, ..RuleLimits::default() });
        let count = 1 + rng.index(30);
        for rule in generate::rules(&mut rng, count) {
            bench.add(rule);
        }
        // Few packets that repeat, so that most are in the cache when the rules change.
        let packets: Vec<_> = (0..100)
            .map(|_| {
                let of = (!bench.list.is_empty() && rng.percent(90))
                    .then(|| bench.list[rng.index(bench.list.len())].1.clone());
                generate::packet(&mut rng, of.as_ref())
            })
            .collect();
        for step in 0..150 {
            let frames: Vec<_> = (0..1 + rng.index(32)).map(|_| packets[rng.index(packets.len())].clone()).collect();
            for direction in [Direction::Ingress, Direction::Egress] {
                hits += bench.check(direction, &frames, &format!("seed {seed}, step {step}"));
            }
            let rules: Vec<Rule> = bench.list.iter().map(|(_, rule, _)| rule.clone()).collect();
            for _ in 0..rng.below(4) {
                if rng.percent(45) && !bench.list.is_empty() {
                    bench.remove(rng.index(bench.list.len()));
                } else {
                    let added = generate::rule(&mut rng, &rules);
                    bench.add(added);
                }
            }
            bench.next_turn();
            if rng.one_in(10) {
                bench.table.age(bench.now, |_| ());
            }
        }
        let stats = bench.ingress.stats();
        assert!(stats.hits > 0 && stats.misses > 0, "{stats:?}");
    }
    assert!(hits > 20_000, "{hits} packets met a rule");
}

/// Few masks and few flows, so that added rules often affect cached flows.
#[test]
fn additions_and_removals_reach_flows_in_the_cache() {
    let mut checked = 0;
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let mut bench = Bench::new(RuleLimits { flows: 64, ..RuleLimits::default() });
        let packets: Vec<(Vec<u8>, PacketMetadata)> = (0..200)
            .map(|_| {
                let of = rule(&format!(
                    "ingress prio 0: eth / ipv4 src 10.0.0.{} dst 10.0.1.{} / udp dst {} => drop",
                    rng.below(6),
                    rng.below(6),
                    rng.below(6)
                ));
                generate::packet(&mut rng, Some(&of))
            })
            .collect();
        for step in 0..400 {
            for _ in 0..1 + rng.below(3) {
                if rng.percent(50) && bench.list.len() > 3 {
                    bench.remove(rng.index(bench.list.len()));
                    continue;
                }
                let priority = rng.below(4);
                let pattern = match rng.below(4) {
                    0 => format!("eth / ipv4 dst 10.0.1.{}", rng.below(6)),
                    1 => format!("eth / ipv4 src 10.0.0.{} / udp dst {}", rng.below(6), rng.below(6)),
                    2 => format!("eth / ipv4 dst 10.0.1.{}/31", rng.below(3) * 2),
                    _ => format!("udp dst {}", rng.below(6)),
                };
                bench.add(rule(&format!("ingress prio {priority}: {pattern} => drop")));
            }
            let frames: Vec<_> = (0..1 + rng.index(64)).map(|_| packets[rng.index(packets.len())].clone()).collect();
            bench.next_turn();
            bench.check(Direction::Ingress, &frames, &format!("seed {seed}, step {step}"));
            if seed % 4 == 0 && rng.one_in(20) {
                bench.table.age(bench.now, |_| ());
            }
        }
        checked += bench.ingress.stats().checked;
    }
    assert!(checked > 1000, "{checked} entries looked at again");
}

#[test]
fn a_failed_change_has_no_effect() {
    let mut bench = Bench::new(RuleLimits { rules: 3, masks: 2, duplicates: 2, ..RuleLimits::default() });
    let first = bench.add(rule("ingress prio 5: udp dst 53 => mark 1"));
    let fails = bench.table.change(|change| {
        change.add(rule("ingress prio 1: udp dst 53 => drop"), Timeouts::NONE)?;
        change.remove(first)?;
        change.replace(first, rule("ingress prio 1: tcp => drop"))
    });
    assert_eq!(fails, Err(RuleTableError::NoSuchRule(first)));
    let fails = bench.table.change(|change| {
        change.replace(first, rule("ingress prio 1: udp dst 54 => drop"))?;
        change.replace(first, rule("egress prio 1: udp dst 54 => drop"))
    });
    assert_eq!(fails, Err(RuleTableError::OtherDirection { from: Direction::Ingress, to: Direction::Egress }));
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        bench.table.change(|change| -> Result<(), RuleTableError> {
            change.add(rule("ingress prio 1: udp dst 53 => drop"), Timeouts { idle: 1, hard: 1 })?;
            change.replace(first, rule("ingress prio 1: udp dst 54 => drop"))?;
            change.remove(first)?;
            panic!("in the middle of a change");
        })
    }));
    assert!(panics.is_err());
    assert_eq!(bench.table.get(first).unwrap().to_string(), "ingress prio 5: udp dst 53 => mark 1");
    assert_eq!(bench.table.len(), 1);
    let of = rule("ingress prio 5: eth / ipv4 / udp dst 53 => drop");
    let mut rng = Rng::new(1);
    let packets: Vec<_> = (0..50).map(|_| generate::packet(&mut rng, Some(&of))).collect();
    bench.next_turn();
    assert!(bench.check(Direction::Ingress, &packets, "after failures") > 10);

    bench.add(rule("ingress prio 5: tcp flags syn+!ack => drop"));
    let limit = bench.table.add(rule("ingress prio 5: eth dst 02:00:00:00:00:01 => drop"), Timeouts::NONE);
    assert_eq!(limit, Err(RuleTableError::TooManyMasks { limit: 2 }));
    bench.add(rule("ingress prio 4: tcp flags syn+!ack => drop"));
    let limit = bench.table.add(rule("ingress prio 3: udp dst 2 => drop"), Timeouts::NONE);
    assert_eq!(limit, Err(RuleTableError::TooManyRules { limit: 3 }));
    bench.remove(0);
    let limit = bench.table.add(rule("ingress prio 3: tcp flags syn+!ack => drop"), Timeouts::NONE);
    assert_eq!(limit, Err(RuleTableError::TooManyDuplicates { limit: 2 }));
    bench.next_turn();
    assert!(bench.check(Direction::Ingress, &packets, "after limits") <= packets.len());
}

/// Returns a UDP packet from 10.0.0.1 to 10.0.0.2.
fn udp_to(port: u8) -> [u8; 60] {
    let mut frame = [0u8; 60];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00]);
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0x66, 0xbd, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame[34..42].copy_from_slice(&[0, 9, 0, port, 0, 26, 0, 0]);
    frame
}

#[test]
fn a_stripped_vlan_tag_is_matched() {
    let mut bench = Bench::new(RuleLimits::default());
    let id = bench.add(rule("ingress: any => drop"));
    let mut packet = bench.pool.take().unwrap();
    assert!(packet.extend_from_slice(&udp_to(1), &bench.pool));
    packet.set_vlan(7);
    let (parsed, mut found) = (Parser::default().parse(&udp_to(1)).unwrap(), [None]);
    bench.ingress.find(bench.reader.guard(), 1, &[packet], &[parsed], &mut found);
    assert_eq!(bench.table.counters(id), Some(RuleCounters { packets: 1, bytes: 64, last_hit: 1 }));
}

#[test]
fn a_stalled_worker_stops_changes_and_memory_growth() {
    let mut bench = Bench::new(RuleLimits { pending_removals: 200, ..RuleLimits::default() });
    let of = |i: u32| rule(&format!("ingress prio 1: udp dst {} => drop", i % 60_000 + 1));
    let (mut changes, mut refused) = (0, 0);
    let mut add = |bench: &mut Bench, i| match bench.table.add(of(i), Timeouts { idle: 0, hard: 1 }) {
        Ok(id) => {
            changes += 1;
            let limit = bench.table.remove(id);
            assert!(matches!(limit, Ok(()) | Err(RuleTableError::TooManyPendingRemovals { limit: 200 })), "{limit:?}");
        }
        Err(error) => {
            assert_eq!(error, RuleTableError::TooManyPendingRemovals { limit: 200 });
            refused += 1;
        }
    };
    (0..5000).for_each(|i| add(&mut bench, i));
    assert_eq!(bench.table.records(), 1024);
    let mut removed = 0;
    bench.table.age(5_000_000_000, |_| removed += 1);
    // All removals complete when the worker makes progress, including rules that could not expire before.
    for _ in 0..3 {
        bench.next_turn();
        bench.table.age(5_000_000_000, |_| removed += 1);
    }
    (0..50).for_each(|i| add(&mut bench, i));
    assert!((100..300).contains(&changes) && refused > 4700, "{changes} changes, {refused} refused");
    for _ in 0..3 {
        bench.next_turn();
        bench.table.age(9_000_000_000, |_| removed += 1);
    }
    assert_eq!((bench.table.len(), removed), (0, changes));
}

/// A failed change can leave a larger table behind. Workers must switch to it, because chains in the smaller
/// table are not updated any more.
#[test]
fn a_failed_change_after_a_resize_keeps_chains_right() {
    let mut bench = Bench::new(RuleLimits::default());
    let other = |i: u32| rule(&format!("ingress prio 1: eth / ipv4 dst 10.0.1.{i} / udp dst 1 => drop"));
    let first = bench.add(rule("ingress prio 1: eth / ipv4 dst 10.0.0.2 / udp dst 1 => drop"));
    let second = bench.add(rule("ingress prio 2: eth / ipv4 dst 10.0.0.2 / udp dst 1 => mark 2"));
    bench.next_turn();
    bench.remove(0);
    bench.next_turn();
    let Bench { table, ingress, reader, pool, now, .. } = &mut bench;
    let no_such_rule = RuleTableError::NoSuchRule(first);
    // Enough changes in sequence to free the record of the first rule.
    for _ in 0..5 {
        let fails = table.change(|change| {
            (0..50).try_for_each(|i| change.add(other(i), Timeouts::NONE).map(drop))?;
            change.remove(first)
        });
        assert_eq!(fails, Err(no_such_rule.clone()));
        reader.quiescent();
    }
    let changed = table.change(|change| {
        (0..200).try_for_each(|i| change.add(other(i), Timeouts::NONE).map(drop))?;
        let (frame, mut packet, mut found) = (udp_to(1), pool.take().unwrap(), [None]);
        assert!(packet.extend_from_slice(&frame, pool));
        let parsed = Parser::default().parse(&frame).unwrap();
        ingress.find(reader.guard(), *now, &[packet], &[parsed], &mut found);
        assert_eq!(found[0].map(|hit| hit.id()), Some(second), "whatever its record is used for now");
        Ok(())
    });
    assert_eq!(changed, Ok(()));
}

/// Removed rules do not count against the limit of duplicates, however long a worker stalls.
#[test]
fn a_rule_can_be_replaced_many_times_in_one_round() {
    let mut bench = Bench::new(RuleLimits { duplicates: 2, ..RuleLimits::default() });
    let marks = |n: u32| rule(&format!("ingress prio 1: udp dst 53 => mark {n}"));
    let id = bench.table.add(marks(0), Timeouts::NONE).unwrap();
    (1..200).for_each(|n| bench.table.replace(id, marks(n)).unwrap());
    bench.table.add(marks(1000), Timeouts::NONE).unwrap();
    assert_eq!(bench.table.add(marks(1001), Timeouts::NONE), Err(RuleTableError::TooManyDuplicates { limit: 2 }));
    bench.next_turn();
    let frame = (udp_to(53).to_vec(), generate::packet(&mut Rng::new(1), None).1);
    assert_eq!(bench.ingress_rules(&[frame]), "ingress prio 1: udp dst 53 => mark 199");
}

#[test]
fn counters_follow_a_rule_through_replacements_to_its_end() {
    let mut bench = Bench::new(RuleLimits::default());
    let of = rule("ingress prio 5: eth / ipv4 / udp dst 53 => drop");
    let id = bench.table.add(of.clone(), Timeouts { idle: 0, hard: 10 }).unwrap();
    bench.list.push((id, of.clone(), of.fields()));
    let mut rng = Rng::new(3);
    let packets: Vec<_> = (0..40).map(|_| generate::packet(&mut rng, Some(&of))).collect();
    let first = bench.check(Direction::Ingress, &packets, "first") as u64;
    let counted = bench.table.counters(id).unwrap();
    assert_eq!((counted.packets, counted.last_hit), (first, bench.now));
    assert!(first > 10 && counted.bytes >= first * 42);
    let replacement = rule("ingress prio 5: udp dst 53 => mark 3");
    bench.table.replace(id, replacement.clone()).unwrap();
    bench.list[0] = (id, replacement.clone(), replacement.fields());
    assert_eq!(bench.table.counters(id), Some(counted), "the worker has not moved on");
    // The worker's iteration is not over, so it still uses the old rule.
    assert_eq!(bench.ingress_rules(&packets), "ingress prio 5: eth / ipv4 / udp dst 53 => drop");
    bench.next_turn();
    assert_eq!(bench.ingress_rules(&packets), "ingress prio 5: udp dst 53 => mark 3");
    let mut removed = Vec::new();
    for now in [1, 9, 10, 11, 12] {
        bench.next_turn();
        bench.table.age(now * 1_000_000_000, |what| removed.push(what));
        assert_eq!(bench.table.len(), usize::from(now < 10), "at {now}");
    }
    let [removed] = &removed[..] else { panic!("{removed:?}") };
    assert_eq!((removed.id, removed.reason, removed.counters.packets), (id, RemovalReason::Hard, 3 * first));
    assert_eq!(bench.table.masks(), [0, 0]);
    assert_eq!(bench.table.counters(id), None);
}

impl Bench {
    /// Returns the rules that these packets match.
    fn ingress_rules(&mut self, frames: &[(Vec<u8>, PacketMetadata)]) -> String {
        let parser = Parser::default();
        let mut rules = std::collections::BTreeSet::new();
        for (frame, _) in frames {
            let Ok(parsed) = parser.parse(frame) else { continue };
            let mut packet = self.pool.take().unwrap();
            assert!(packet.extend_from_slice(frame, &self.pool));
            let mut found = [None];
            self.ingress.find(self.reader.guard(), self.now, &[packet], &[parsed], &mut found);
            rules.extend(found[0].map(|hit| hit.rule().to_string()));
        }
        rules.into_iter().collect::<Vec<_>>().join("; ")
    }
}

#[test]
fn unused_rules_expire() {
    let mut bench = Bench::new(RuleLimits::default());
    let idle = Timeouts { idle: 5, hard: 0 };
    let of = rule("ingress prio 5: eth / ipv4 / udp dst 53 => drop");
    let used = bench.table.add(of.clone(), idle).unwrap();
    let unused = bench.table.add(rule("ingress prio 5: tcp => drop"), idle).unwrap();
    let mut rng = Rng::new(3);
    let packet = generate::packet(&mut rng, Some(&of));
    let mut removed = Vec::new();
    for second in 1..=30u64 {
        bench.now = second * 1_000_000_000;
        bench.next_turn();
        if second <= 10 {
            bench.list = vec![(used, of.clone(), of.fields())];
            assert_eq!(bench.check(Direction::Ingress, std::slice::from_ref(&packet), "used"), 1);
        }
        bench.table.age(bench.now, |what| removed.push((second, what.id, what.reason)));
    }
    assert_eq!(removed.len(), 2, "{removed:?}");
    assert!(
        removed[0].1 == unused && (5..=7).contains(&removed[0].0) && removed[0].2 == RemovalReason::Idle,
        "{removed:?}"
    );
    assert!(removed[1].1 == used && (15..=18).contains(&removed[1].0), "{removed:?}");
}

#[test]
fn many_rules_come_and_go_in_bounded_memory() {
    let mut bench = Bench::new(RuleLimits::default());
    let of = |i: u32| {
        rule(&format!("ingress prio 1: eth / ipv4 dst 10.{}.{}.{} / udp dst 1 => drop", i >> 16, i >> 8 & 255, i & 255))
    };
    let mut ids = std::collections::VecDeque::new();
    for i in 0..30_000 {
        ids.push_back(bench.table.add(of(i), Timeouts::NONE).unwrap());
        if ids.len() > 500 {
            bench.table.remove(ids.pop_front().unwrap()).unwrap();
        }
        if i % 50 == 0 {
            bench.next_turn();
        }
    }
    assert!(bench.table.records() <= 2048, "{} records", bench.table.records());
    let mut removed = 0;
    for _ in 0..3 {
        bench.next_turn();
        bench.table.age(1, |_| removed += 1);
    }
    bench.next_turn();
    bench.domain.collect();
    assert_eq!((removed, bench.table.len(), bench.domain.pending_reclaims()), (29_500, 500, 0));
    bench.list = ids.iter().zip(29_500..).map(|(id, i)| (*id, of(i), of(i).fields())).collect();
    let mut rng = Rng::new(5);
    let packets: Vec<_> = (29_400..29_600).map(|i| generate::packet(&mut rng, Some(&of(i)))).collect();
    for packets in packets.chunks(50) {
        bench.next_turn();
        bench.check(Direction::Ingress, packets, "at the end");
    }
}

/// Both directions of a rule stage.
#[test]
fn a_worker_applies_rules() {
    use std::sync::Arc;

    use crate::{Context, PortInfo, SteppedRuntime};
    use wirepath_packet::drops::DropReason;
    use wirepath_pmd::port::KernelPunt;

    let (domain, pool) = (Domain::new(), Pool::new("rules", 64).unwrap());
    let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
    let ports: Vec<PortInfo> = (0..3)
        .map(|id| {
            let mut port = PortInfo::simulated(PortId::new(id), "p", None, 1500, &pool);
            port.capabilities.kernel_punt = KernelPunt::XdpPass;
            port
        })
        .collect();
    let stage = |_: &mut Context<'_>, batch: &mut Batch| {
        batch.iter_mut().for_each(|packet| packet.set_out_port(PortId::new(1)));
    };
    let around = RulePorts::new(&domain, &ports, vec![vec![0, 5]], Parser::default());
    let stage = RuleStage::new(stage, &mut table, Arc::new(around), 0);
    let mut stepped = SteppedRuntime::new(ports, &domain, stage).unwrap();
    for text in [
        "ingress prio 1: udp dst 1 => drop",
        "ingress prio 1: udp dst 2 => mirror 2, redirect 0",
        "ingress prio 1: udp dst 3 => kernel",
        "ingress prio 1: udp dst 4 => count, mark 4, queue 0",
        "egress prio 1: meta mark 4 / port id 1 => set eth dst 02:00:00:00:00:44",
        "egress prio 1: udp dst 5 => drop",
        "ingress prio 0: vlan vid 7 => set vlan vid 8",
        "egress prio 0: vlan vid 9 => pop-vlan",
    ] {
        table.add(rule(text), Timeouts::NONE).unwrap();
    }
    let mut batch = Batch::new();
    for port in 1..=6u8 {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(&udp_to(port), &pool));
        batch.push(packet).unwrap();
    }
    stepped.process(Some(PortId::new(0)), &mut batch);
    let mut sent = Vec::new();
    while let Some(packet) = stepped.next_sent() {
        sent.push((packet.out_port().unwrap().number(), packet.data()[37], packet.data()[5]));
    }
    sent.sort_unstable();
    assert_eq!(sent, [(0, 2, 1), (1, 4, 0x44), (1, 6, 1), (2, 2, 1)]);
    assert_eq!(stepped.drops().get(&DropReason::RuleDrop), Some(&2));
    assert_eq!(stepped.punted(), 1);
    let counted: Vec<u64> = (0..6)
        .map(|i| {
            table
                .iter()
                .find(|(id, _)| id.to_string() == i.to_string())
                .map(|(id, _)| table.counters(id).unwrap().packets)
                .unwrap()
        })
        .collect();
    assert_eq!(counted, [1; 6]);
    // A stripped tag of a received packet, and one that the inner stage sets.
    for tci in [7, 9] {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xcc, 1, 2, 3, 4], &pool));
        packet.set_vlan(tci);
        batch.push(packet).unwrap();
    }
    stepped.process(Some(PortId::new(0)), &mut batch);
    let frames: Vec<Vec<u8>> =
        std::iter::from_fn(|| stepped.next_sent()).map(|packet| [&packet.data()[12..], &[]].concat()).collect();
    assert_eq!(frames, [vec![0x81, 0, 0, 8, 0x88, 0xcc, 1, 2, 3, 4], vec![0x88, 0xcc, 1, 2, 3, 4]]);
}

/// Rules are replaced in pairs while others are added and removed. A worker must always see both rules of a
/// pair in the same generation, and every generation that was published before its iteration.
#[test]
fn a_worker_never_sees_a_partial_change() {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    let domain = Domain::new();
    let mut table = RuleTable::new(&domain, RuleLimits { flows: 256, ..RuleLimits::default() }, 0);
    let (mut ingress, mut egress) = table.lookups();
    let of = |direction: &str, port: u32, generation: u32| {
        rule(&format!("{direction} prio 5: eth / ipv4 / udp dst {port} => mark {generation}"))
    };
    let pairs: Vec<(RuleId, RuleId)> = (1..=8)
        .map(|port| {
            let add = |table: &mut RuleTable, rule| table.add(rule, Timeouts::NONE).unwrap();
            (add(&mut table, of("ingress", port, 1)), add(&mut table, of("egress", port, 1)))
        })
        .collect();
    // Last published generation, and the latest that may be published.
    let (done, begun, stop) = (AtomicU32::new(1), AtomicU32::new(1), AtomicBool::new(false));
    /// Stops the worker, also if the test fails here.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    std::thread::scope(|scope| {
        let stopping = Stop(&stop);
        let mut reader = domain.join();
        let (done, begun, stop) = (&done, &begun, &stop);
        let worker = scope.spawn(move || {
            let (pool, parser) = (Pool::new("rules", 64).unwrap(), Parser::default());
            let mut rng = Rng::new(9);
            let (mut batch, mut parsed) = (Batch::new(), Vec::new());
            for port in (1..=8u8).cycle().take(32) {
                let mut frame = [0u8; 60];
                frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00]);
                frame[14..34]
                    .copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0x66, 0xbd, 10, 0, 0, 1, 10, 0, 0, 2]);
                frame[34..42].copy_from_slice(&[rng.next() as u8, 9, 0, port, 0, 26, 0, 0]);
                let mut packet = pool.take().unwrap();
                assert!(packet.extend_from_slice(&frame, &pool));
                parsed.push(parser.parse(&frame).unwrap());
                batch.push(packet).unwrap();
            }
            let generation = |hit: &Option<Hit<'_>>| match hit.expect("there is always one").rule().actions() {
                [wirepath_flow::Action::Mark(generation)] => *generation,
                other => panic!("{other:?}"),
            };
            let (mut turns, mut seen) = (0u32, std::collections::BTreeSet::new());
            while !stop.load(Ordering::Acquire) || turns < 1000 {
                reader.quiescent();
                let least = done.load(Ordering::Acquire);
                let (mut first, mut second) = ([None; 32], [None; 32]);
                ingress.find(reader.guard(), 1, batch.as_slice(), &parsed, &mut first);
                egress.find(reader.guard(), 1, batch.as_slice(), &parsed, &mut second);
                let newest = begun.load(Ordering::Acquire);
                let now = generation(&first[0]);
                assert!((least..=newest).contains(&now), "generation {now} of {least} to {newest}");
                assert!(first.iter().chain(&second).all(|hit| generation(hit) == now), "two moments at a time");
                seen.insert(now);
                turns += 1;
            }
            seen.len()
        });
        let mut extra = std::collections::VecDeque::new();
        for generation in 2..600 {
            begun.store(generation, Ordering::Release);
            table
                .change(|change| {
                    for (port, (a, b)) in (1..).zip(&pairs) {
                        change.replace(*a, of("ingress", port, generation))?;
                        change.replace(*b, of("egress", port, generation))?;
                    }
                    Ok(())
                })
                .unwrap();
            done.store(generation, Ordering::Release);
            // Other rules: with the same mask, with patterns of the pairs but a lower priority, and with new
            // masks.
            for i in 0..4 {
                let text = match i {
                    0 => format!("ingress prio 9: eth / ipv4 / udp dst {} => drop", generation % 8 + 1),
                    1 => format!("egress prio 5: eth / ipv4 / udp dst {} => drop", 1000 + generation),
                    2 => format!("ingress prio 6: ipv4 dst 10.0.0.0/{} => drop", 8 + generation % 24),
                    _ => {
                        format!("egress prio 7: eth / ipv4 src 10.1.{}.{} => drop", generation / 256, generation % 256)
                    }
                };
                // Patterns with too many duplicates are refused.
                extra.extend(table.add(rule(&text), Timeouts::NONE));
            }
            while extra.len() > if generation < 400 { 3000 } else { 50 } {
                table.remove(extra.pop_front().unwrap()).unwrap();
            }
            if generation % 100 == 0 {
                table.age(1, |_| ());
            }
        }
        drop(stopping);
        assert!(worker.join().unwrap() > 1);
    });
}
