use std::sync::Arc;

use wirepath_pmd::flow::{Field, ItemKind, Rule};
use wirepath_pmd::port::hardware::{FateKind, ItemCapability, Masks, RuleBackend, RuleCapabilities, TableCapabilities};
use wirepath_rulelab::{Rng, make};
use wirepath_wire::Tunnels;

use super::super::RuleId;
use super::fit::Judge;
use super::plan::{Place, Plan, Why};

/// Matches Ethernet, IPv4 and UDP, and marks.
fn simple(levels: u16) -> RuleCapabilities {
    let ingress = TableCapabilities {
        levels,
        counters: 1000,
        items: vec![
            ItemCapability::new(ItemKind::Eth).with(Field::EthDst, Masks::Any),
            ItemCapability::new(ItemKind::Ipv4).with(Field::Ipv4Src, Masks::Any).with(Field::Ipv4Dst, Masks::Any),
            ItemCapability::new(ItemKind::Udp).with(Field::UdpDst, Masks::Exact),
        ],
        actions: wirepath_pmd::port::hardware::ActionCapabilities {
            most: 2,
            fates: vec![FateKind::Next, FateKind::Drop],
            ..Default::default()
        },
        ..TableCapabilities::default()
    };
    RuleCapabilities { tag_bits: 24, ingress: Some(ingress), ..RuleCapabilities::none("test", "nic", RuleBackend::Dv) }
}

struct Rules {
    plan: Plan,
    next: u64,
}

impl Rules {
    fn new(can: RuleCapabilities) -> Self {
        Self { plan: Plan::new(Judge::new(can, 0, Tunnels::ALL)), next: 0 }
    }

    fn add(&mut self, rule: Rule) -> RuleId {
        let id = RuleId::of_number(self.next);
        self.next += 1;
        let place: Place = (rule.priority(), id.number());
        let set = rule.fields();
        self.plan.add(id, place, Arc::new(rule), &set, false);
        id
    }

    fn text(&mut self, text: &str) -> RuleId {
        let id = self.add(text.parse().unwrap());
        self.plan.settle();
        id
    }
}

#[test]
fn a_rule_is_below_all_that_it_overlaps_or_in_software() {
    let mut rules = Rules::new(simple(3));
    let low = rules.text("ingress prio 9: ipv4 => mark 9");
    assert_eq!(rules.plan.target(low), Some(0));
    let dns = rules.text("ingress prio 5: udp dst 53 => drop");
    let host = rules.text("ingress prio 4: ipv4 src 10.0.0.1 => mark 1");
    let other = rules.text("ingress prio 3: ipv4 src 10.0.0.2 => mark 2");
    assert_eq!([host, other, dns, low].map(|id| rules.plan.target(id)), [Some(0), Some(0), Some(1), Some(2)]);
    rules.plan.check();
    // One level more than there is.
    let top = rules.text("ingress prio 0: ipv4 dst 10.0.0.0/8 => mark 3");
    assert_eq!([top, host, dns, low].map(|id| rules.plan.target(id)), [Some(0), Some(1), Some(2), None]);
    assert_eq!(rules.plan.why_not(low), Some(Why::TooDeep(3)));
    rules.plan.check();
    // A rule for software alone evicts what is below it.
    let soft = rules.text("ingress prio 1: tcp => drop");
    assert_eq!([top, host, dns, low].map(|id| rules.plan.target(id)), [Some(0), None, None, None]);
    assert_eq!(rules.plan.why_not(host), Some(Why::Above(soft)));
    assert_eq!(rules.plan.why_not(dns), Some(Why::Above(other)));
    assert!(matches!(rules.plan.why_not(soft), Some(Why::Obstacle(_))));
    rules.plan.check();
    rules.plan.remove(soft);
    rules.plan.remove(top);
    rules.plan.settle();
    assert_eq!(rules.plan.target(host), Some(0));
    assert!(rules.plan.target(low).is_some_and(|level| Some(level) > rules.plan.target(dns)));
    rules.plan.check();
}

#[test]
fn what_every_rule_knows_of_those_above_it_stays_true() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let mut rules = Rules::new(simple(1 + (seed % 6) as u16));
        let mut there: Vec<RuleId> = Vec::new();
        for rule in make::rules(&mut rng, 80) {
            there.push(rules.add(rule));
            match rng.below(6) {
                0 => {
                    let gone = there.swap_remove(rng.index(there.len()));
                    rules.plan.remove(gone);
                }
                1 => {
                    let refusal = wirepath_pmd::port::hardware::RuleRefusal {
                        kind: wirepath_pmd::port::hardware::RefusalKind::Full,
                        errno: None,
                        reason: "full".to_owned(),
                    };
                    let id = there[rng.index(there.len())];
                    let yes = rng.one_in(2);
                    rules.plan.refuse(id, yes.then_some(refusal));
                }
                _ => {}
            }
            if rng.one_in(3) {
                rules.plan.settle();
                rules.plan.check();
            }
        }
        rules.plan.settle();
        rules.plan.check();
        for id in there {
            assert_eq!(rules.plan.why_not(id).is_none(), rules.plan.target(id).is_some());
        }
    }
}
