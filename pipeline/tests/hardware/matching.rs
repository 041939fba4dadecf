//! Matching of an emulated ConnectX, compared with the reference of `wirepath-rule-oracle`. Patterns are
//! random within the capabilities of the port. Packets are random, some truncated or damaged. Each rule marks
//! its packets, and a packet must come back marked if and only if it matches.
//!
//! ```text
//! RULES_SEED=17 cargo test -p wirepath-pipeline --test hardware matching
//! RULES_SETS=10000 cargo test -p wirepath-pipeline --test hardware matching       # more patterns
//! ```

use crate::bench::number;
use crate::emulated_ports::{self, RDMA, is_sound};
use wirepath_flow::{Action, Direction, Rule, covers};
use wirepath_nic_emulator::launch;
use wirepath_packet::PortId;
use wirepath_packet::{Batch, Pool};
use wirepath_pmd::port::StartedPort;
use wirepath_pmd::port::hardware::{HardwareRule, PatternText, RuleDestination, TableCapabilities};
use wirepath_rule_oracle::{PacketMetadata, Reference, Rng, generate, show};
use wirepath_testlab::require;

/// Patterns in a normal run.
const SETS: u64 = 300;
/// Packets per pattern.
const PACKETS: usize = 48;
const MARK: u32 = 0x00a5_5a01;
const NIC: &str = "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\n[[device.port]]\nlink = 'loop'\n";

/// Returns a rule with the same pattern that only counts.
fn plain(rule: &Rule) -> Rule {
    Rule::new(Direction::Ingress, 0, rule.pattern().to_vec(), vec![Action::Count]).expect("the same pattern")
}

/// Returns true if the table supports everything that a pattern requires.
fn is_offered(table: &TableCapabilities, rule: &Rule) -> bool {
    let set = rule.fields();
    rule.pattern().iter().all(|item| {
        let same = |other: &&wirepath_flow::Item| other.kind == item.kind && other.inner == item.inner;
        let Some(can) = table.item(item.kind, item.inner) else { return false };
        let fields = item
            .fields()
            .iter()
            .all(|(field, bits)| can.field(*field).is_some_and(|masks| masks.allow(bits.mask, field.spec().bits)));
        let implied = can.implies.is_empty() || covers(&asks(&can.implies).fields(), &set);
        fields && implied && rule.pattern().iter().filter(same).count() <= usize::from(can.max_count)
    })
}

fn asks(pattern: &PatternText) -> Rule {
    Rule::new(Direction::Ingress, 0, pattern.items().to_vec(), vec![Action::Count]).expect("a pattern")
}

/// Sends frames through the loop. Returns for each frame whether it came back marked.
fn marked(port: &mut StartedPort, pool: &Pool, frames: &[Vec<u8>]) -> Vec<bool> {
    let packet = |frame: &Vec<u8>| {
        let mut packet = pool.take().expect("a buffer");
        assert!(packet.extend_from_slice(frame, pool));
        packet
    };
    let mut batch: Batch = frames.iter().map(packet).collect();
    let mut got = Vec::new();
    while got.len() < frames.len() {
        port.tx[0].transmit(&mut batch);
        let received = emulated_ports::receive(&mut port.rx, 1);
        assert!(!received.is_empty(), "{} of {} came back", got.len(), frames.len());
        got.extend(received);
    }
    got.iter().map(|(_, packet)| packet.mark() == Some(MARK)).collect()
}

fn differential(name: &str, backend: &str, least: u64) {
    launch::run_test(name, NIC, || {
        let pool = Pool::new("nic", 4096).expect("memory");
        let mut port = emulated_ports::start(PortId::new(0), &pool, "mlx50", backend, 1);
        let can = port.port.rule_hardware().expect("rule hardware").capabilities();
        let table = can.ingress.expect("rules for what comes in");
        let aside: Vec<Rule> = table.excluded_patterns.iter().map(asks).collect();
        let aside = Reference::new(&aside);
        let seeds = number("RULES_SEED").map_or(0..number("RULES_SETS").unwrap_or(SETS), |seed| seed..seed + 1);
        let (mut installed, mut hits, mut tried) = (0, 0, 0u64);
        for seed in seeds {
            let mut rng = Rng::new(seed);
            // Search for a pattern that the device supports.
            let Some(rule) =
                (0..200).map(|_| plain(&generate::rule(&mut rng, &[]))).find(|rule| is_offered(&table, rule))
            else {
                continue;
            };
            tried += 1;
            let hardware = HardwareRule {
                direction: Direction::Ingress,
                level: (seed % u64::from(table.levels)) as u16,
                pattern: rule.pattern().to_vec(),
                actions: Vec::new(),
                destination: RuleDestination::Next,
                tag: Some(MARK),
                count: false,
                require_integrity: false,
            };
            let Ok(id) = port.port.rule_hardware().expect("rule hardware").install(&hardware) else { continue };
            installed += 1;
            let reference = Reference::new(std::slice::from_ref(&rule));
            let mut frames = Vec::new();
            while frames.len() < PACKETS {
                let aimed_rule = (!rng.one_in(5)).then_some(&rule);
                let (frame, _) = generate::packet(&mut rng, aimed_rule);
                let goes_aside = aside.classify(Direction::Ingress, &frame, &PacketMetadata::default()).is_some();
                // Malformed packets match no rule, neither in software nor in a device.
                let sound = is_sound(&frame);
                if (14..=9000).contains(&frame.len()) && sound && !goes_aside {
                    frames.push(frame);
                }
            }
            for (frame, marked) in frames.iter().zip(marked(&mut port, &pool, &frames)) {
                let fits = reference.classify(Direction::Ingress, frame, &PacketMetadata::default()).is_some();
                hits += u64::from(fits);
                assert_eq!(marked, fits, "seed {seed}: {rule}\n{}", show::hex(frame));
            }
            port.port.rule_hardware().expect("rule hardware").remove(id).expect("a rule is taken out");
        }
        println!("{backend}: {installed} of {tried} patterns installed, {hits} packets matched");
        if number("RULES_SEED").is_none() {
            assert!(installed >= least && hits >= least, "{installed} patterns, {hits} hits");
        }
        drop(port.port.stop(port.rx, port.tx));
    });
}

#[test]
fn devx_matchers_match_like_the_rule_language() {
    require!(RDMA);
    differential("matching::devx_matchers_match_like_the_rule_language", "dv", 100);
}

#[test]
fn verbs_flows_match_like_the_rule_language() {
    require!(RDMA);
    differential("matching::verbs_flows_match_like_the_rule_language", "ibv", 50);
}
