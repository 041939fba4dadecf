//! What an emulated ConnectX matches against what the rule language means, as the naive reference of `wirepath-rulelab` has it: random
//! patterns within what the port says that it can do, random packets, cut off and damaged ones too. A rule marks its packets; a packet
//! comes back marked if, and only if, it fits.
//!
//! ```text
//! RULES_SEED=17 cargo test -p wirepath-pipeline --test rules_nic
//! RULES_SETS=10000 cargo test -p wirepath-pipeline --test rules_nic       # more of them
//! ```

mod emulated;

use emulated::{RDMA, is_sound};
use wirepath_nic_emulator::launch;
use wirepath_pmd::flow::{Action, Direction, Rule, covers};
use wirepath_pmd::packet::{Batch, Pool};
use wirepath_pmd::port::StartedPort;
use wirepath_pmd::port::hardware::{HardwareRule, PatternText, RuleFate, TableCapabilities};
use wirepath_rulelab::{Noted, Reference, Rng, make, show};
use wirepath_testlab::require;

/// Patterns in a usual run.
const SETS: u64 = 300;
/// Packets for each.
const PACKETS: usize = 48;
const MARK: u32 = 0x00a5_5a01;
const NIC: &str = "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\n[[device.port]]\nlink = 'loop'\n";

/// A rule that does nothing but match.
fn plain(rule: &Rule) -> Rule {
    Rule::new(Direction::Ingress, 0, rule.pattern().to_vec(), vec![Action::Count]).expect("the same pattern")
}

/// Whether the table offers all that a pattern asks for.
fn is_offered(table: &TableCapabilities, rule: &Rule) -> bool {
    let set = rule.fields();
    rule.pattern().iter().all(|item| {
        let same = |other: &&wirepath_pmd::flow::Item| other.kind == item.kind && other.inner == item.inner;
        let Some(can) = table.item(item.kind, item.inner) else { return false };
        let fields = item
            .fields()
            .iter()
            .all(|(field, bits)| can.field(*field).is_some_and(|masks| masks.allow(bits.mask, field.spec().bits)));
        let implied = can.implies.is_empty() || covers(&asks(&can.implies).fields(), &set);
        fields && implied && rule.pattern().iter().filter(same).count() <= usize::from(can.most)
    })
}

fn asks(pattern: &PatternText) -> Rule {
    Rule::new(Direction::Ingress, 0, pattern.items().to_vec(), vec![Action::Count]).expect("a pattern")
}

/// Sends frames through the loop and says which came back marked.
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
        let received = emulated::receive(&mut port.rx, 1);
        assert!(!received.is_empty(), "{} of {} came back", got.len(), frames.len());
        got.extend(received);
    }
    got.iter().map(|(_, packet)| packet.mark() == Some(MARK)).collect()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn differential(name: &str, way: &str, least: u64) {
    launch::under(name, NIC, || {
        let pool = Pool::new("nic", 4096).expect("memory");
        let mut port = emulated::start(0, &pool, "mlx50", way, 1);
        let can = port.port.rule_hardware().expect("rule hardware").capabilities();
        let table = can.ingress.expect("rules for what comes in");
        let aside: Vec<Rule> = table.aside.iter().map(asks).collect();
        let aside = Reference::new(&aside);
        let seeds = number("RULES_SEED").map_or(0..number("RULES_SETS").unwrap_or(SETS), |seed| seed..seed + 1);
        let (mut installed, mut hits, mut asked) = (0, 0, 0u64);
        for seed in seeds {
            let mut rng = Rng::new(seed);
            // Until one is within what the device offers.
            let Some(rule) = (0..200).map(|_| plain(&make::rule(&mut rng, &[]))).find(|rule| is_offered(&table, rule))
            else {
                continue;
            };
            asked += 1;
            let hardware = HardwareRule {
                direction: Direction::Ingress,
                level: (seed % u64::from(table.levels)) as u16,
                pattern: rule.pattern().to_vec(),
                actions: Vec::new(),
                fate: RuleFate::Next,
                tag: Some(MARK),
                count: false,
                in_order: false,
            };
            let Ok(id) = port.port.rule_hardware().expect("rule hardware").install(&hardware) else { continue };
            installed += 1;
            let reference = Reference::new(std::slice::from_ref(&rule));
            let mut frames = Vec::new();
            while frames.len() < PACKETS {
                let wish = (!rng.one_in(5)).then_some(&rule);
                let (frame, _) = make::packet(&mut rng, wish);
                let goes_aside = aside.classify(Direction::Ingress, &frame, &Noted::default()).is_some();
                // What is broken meets no rule, in software nor behind a device.
                let sound = is_sound(&frame);
                if (14..=9000).contains(&frame.len()) && sound && !goes_aside {
                    frames.push(frame);
                }
            }
            for (frame, marked) in frames.iter().zip(marked(&mut port, &pool, &frames)) {
                let fits = reference.classify(Direction::Ingress, frame, &Noted::default()).is_some();
                hits += u64::from(fits);
                assert_eq!(marked, fits, "seed {seed}: {rule}\n{}", show::hex(frame));
            }
            port.port.rule_hardware().expect("rule hardware").remove(id).expect("a rule is taken out");
        }
        println!("{way}: {installed} of {asked} patterns installed, {hits} packets fitted");
        if number("RULES_SEED").is_none() {
            assert!(installed >= least && hits >= least, "{installed} patterns, {hits} hits");
        }
        drop(port.port.stop(port.rx, port.tx));
    });
}

#[test]
fn matchers_fit_what_the_language_says() {
    require!(RDMA);
    differential("matchers_fit_what_the_language_says", "dv", 100);
}

#[test]
fn flows_of_plain_verbs_fit_what_the_language_says() {
    require!(RDMA);
    differential("flows_of_plain_verbs_fit_what_the_language_says", "ibv", 50);
}
