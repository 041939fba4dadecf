use std::sync::Arc;
use wirepath_packet::PortId;

use wirepath_flow::{Field, ItemKind, Rule};
use wirepath_pmd::port::hardware::{
    DestinationKind, ItemCapability, Masks, RuleBackend, RuleCapabilities, TableCapabilities,
};
use wirepath_rule_oracle::{Rng, generate};
use wirepath_wire::Tunnels;

use super::plan::{OffloadBlocker, OffloadPlan, RuleOrder};
use super::translate::CapabilityCheck;
use crate::rules::RuleId;

/// Returns capabilities to match Ethernet, IPv4 and UDP, and to tag packets.
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
            max_actions: 2,
            destinations: vec![DestinationKind::Next, DestinationKind::Drop],
            ..Default::default()
        },
        ..TableCapabilities::default()
    };
    RuleCapabilities { tag_bits: 24, ingress: Some(ingress), ..RuleCapabilities::none("test", "nic", RuleBackend::Dv) }
}

struct Rules {
    plan: OffloadPlan,
    next: u64,
}

impl Rules {
    fn new(can: RuleCapabilities) -> Self {
        Self { plan: OffloadPlan::new(CapabilityCheck::new(can, PortId::new(0), Tunnels::ALL)), next: 0 }
    }

    fn add(&mut self, rule: Rule) -> RuleId {
        let id = RuleId::of_number(self.next);
        self.next += 1;
        let order: RuleOrder = (rule.priority(), id.number());
        let set = rule.fields();
        self.plan.add(id, order, Arc::new(rule), &set, false);
        id
    }

    fn text(&mut self, text: &str) -> RuleId {
        let id = self.add(text.parse().unwrap());
        self.plan.update();
        id
    }
}

#[test]
fn installed_rules_keep_the_order_of_overlaps() {
    let mut rules = Rules::new(simple(3));
    let low = rules.text("ingress prio 9: ipv4 => mark 9");
    assert_eq!(rules.plan.target(low), Some(0));
    let dns = rules.text("ingress prio 5: udp dst 53 => drop");
    let host = rules.text("ingress prio 4: ipv4 src 10.0.0.1 => mark 1");
    let other = rules.text("ingress prio 3: ipv4 src 10.0.0.2 => mark 2");
    assert_eq!([host, other, dns, low].map(|id| rules.plan.target(id)), [Some(0), Some(0), Some(1), Some(2)]);
    rules.plan.check();
    // One more level than the device has.
    let top = rules.text("ingress prio 0: ipv4 dst 10.0.0.0/8 => mark 3");
    assert_eq!([top, host, dns, low].map(|id| rules.plan.target(id)), [Some(0), Some(1), Some(2), None]);
    assert_eq!(rules.plan.blocker(low), Some(OffloadBlocker::TooDeep(3)));
    rules.plan.check();
    // A rule that only software can run evicts the overlapping rules below it.
    let soft = rules.text("ingress prio 1: tcp => drop");
    assert_eq!([top, host, dns, low].map(|id| rules.plan.target(id)), [Some(0), None, None, None]);
    assert_eq!(rules.plan.blocker(host), Some(OffloadBlocker::Above(soft)));
    assert_eq!(rules.plan.blocker(dns), Some(OffloadBlocker::Above(other)));
    assert!(matches!(rules.plan.blocker(soft), Some(OffloadBlocker::Obstacle(_))));
    rules.plan.check();
    rules.plan.remove(soft);
    rules.plan.remove(top);
    rules.plan.update();
    assert_eq!(rules.plan.target(host), Some(0));
    assert!(rules.plan.target(low).is_some_and(|level| Some(level) > rules.plan.target(dns)));
    rules.plan.check();
}

#[test]
fn overlap_information_stays_correct_after_changes() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let mut rules = Rules::new(simple(1 + (seed % 6) as u16));
        let mut installed: Vec<RuleId> = Vec::new();
        for rule in generate::rules(&mut rng, 80) {
            installed.push(rules.add(rule));
            match rng.below(6) {
                0 => {
                    let removed = installed.swap_remove(rng.index(installed.len()));
                    rules.plan.remove(removed);
                }
                1 => {
                    let refusal = wirepath_pmd::port::hardware::RuleRefusal {
                        kind: wirepath_pmd::port::hardware::RefusalKind::Full,
                        errno: None,
                        reason: "full".to_owned(),
                    };
                    let id = installed[rng.index(installed.len())];
                    let yes = rng.one_in(2);
                    rules.plan.refuse(id, yes.then_some(refusal));
                }
                _ => {}
            }
            if rng.one_in(3) {
                rules.plan.update();
                rules.plan.check();
            }
        }
        rules.plan.update();
        rules.plan.check();
        for id in installed {
            assert_eq!(rules.plan.blocker(id).is_none(), rules.plan.target(id).is_some());
        }
    }
}
