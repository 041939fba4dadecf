//! Where packets go that no rule sends anywhere: the classes of packets that a port spreads over its queues in different ways.

use std::collections::HashMap;

use wirepath_verbs::flow::FlowTarget;
use wirepath_verbs::{Error, HashFields, IndirectionTable, WorkQueue};

use super::{refused, unsupported};
use crate::drivers::direct::steering::MakePair;
use crate::flow::{Action, Bits, Direction, Fact, Field, FieldSet, Item, ItemKind, Key, Rule, What, mpls};
use crate::port::hardware::{HardwareRule, RuleRefusal};

/// A class of packets, by headers that they have: the outermost that are left when a rule is done with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Headers.
    pub(crate) headers: &'static [ItemKind],
    /// The more headers, the earlier a class is asked: 0 first.
    pub(crate) rank: u16,
}

/// Several queues of a port.
pub(crate) struct Reception {
    classes: Vec<(Class, FlowTarget)>,
    pairs: MakePair,
    queues: Vec<WorkQueue>,
    /// Queue pairs that deliver to one queue, made when a rule wants them.
    single: HashMap<u16, FlowTarget>,
    /// Priorities of the device that rules can have.
    priorities: u16,
}

impl Reception {
    /// What receives on a port. `classes` ends with the one that everything is in; `priorities`: how many the device has in front of the
    /// port's own rules.
    pub(crate) fn new(
        pairs: &MakePair,
        queues: &[WorkQueue],
        classes: Vec<(Class, FlowTarget)>,
        priorities: u16,
    ) -> Self {
        // With one queue, there is nothing to spread.
        let classes = if queues.len() == 1 { classes.into_iter().rev().take(1).collect() } else { classes };
        Self { classes, pairs: MakePair::clone(pairs), queues: queues.to_vec(), single: HashMap::new(), priorities }
    }

    pub(super) fn classes(&self) -> &[(Class, FlowTarget)] {
        &self.classes
    }

    /// Priorities of the device that a level takes.
    pub(super) fn ranks(&self) -> u16 {
        if self.classes.len() == 1 { 1 } else { Class::ANY.rank + 1 }
    }

    pub(super) fn levels(&self) -> u16 {
        self.priorities / self.ranks()
    }

    /// Some target, for rules that deliver nothing but must name one.
    pub(super) fn anywhere(&self) -> Option<FlowTarget> {
        self.classes.last().map(|(_, target)| target.clone())
    }

    /// One queue.
    pub(super) fn queue(&mut self, queue: u16) -> Result<FlowTarget, RuleRefusal> {
        if let Some(target) = self.single.get(&queue) {
            return Ok(target.clone());
        }
        let Some(work_queue) = self.queues.get(usize::from(queue)) else {
            return Err(unsupported(format!("queue {queue} of {}", self.queues.len())));
        };
        let make = || -> Result<FlowTarget, Error> {
            let table = IndirectionTable::new(std::slice::from_ref(work_queue))?;
            Ok(FlowTarget::Rss((self.pairs)(&table, HashFields::NONE)?))
        };
        let target = make().map_err(|error| refused(&error))?;
        self.single.insert(queue, target.clone());
        Ok(target)
    }
}

/// The closed list of a pattern, if there can be such packets.
fn closed(items: Vec<Item>) -> Option<FieldSet> {
    Rule::new(Direction::Egress, 0, items, vec![Action::Count]).ok().map(|rule| rule.fields())
}

/// The same headers of a stack.
fn at_level(level: u8, items: impl IntoIterator<Item = Item>) -> Option<FieldSet> {
    closed(items.into_iter().map(|item| if level > 0 { item.inside() } else { item }).collect())
}

impl Class {
    /// All packets.
    pub(crate) const ANY: Self = Self { headers: &[], rank: 2 };

    /// What the packets of a rule are that are in this class, in as many lists as a device needs: in each, the network layer is known
    /// where something above is looked at, and so is what announces a tag or a label. None, if there are no such packets.
    pub(super) fn of(self, rule: &HardwareRule) -> Result<Vec<FieldSet>, String> {
        let whole = Rule::new(Direction::Egress, 0, rule.pattern.clone(), vec![Action::Count]);
        let whole = whole.map_err(|error| format!("a pattern that means nothing: {error}"))?.fields();
        // What it is when the rule is done with it.
        let decapsulates = |action: &Action| matches!(action, Action::Reformat(reformat) if reformat.kind().is_decap());
        let level = u8::from(rule.actions.iter().any(decapsulates));
        let mut lists = vec![whole];
        if !self.headers.is_empty() {
            let class = at_level(level, self.headers.iter().map(|kind| Item::new(*kind)));
            let class = class.ok_or_else(|| "a class without packets".to_owned())?;
            lists = lists.iter().filter_map(|list| list.and(&class)).collect();
        }
        let counts_hops = rule.actions.contains(&Action::DecTtl);
        for at in 0..2 {
            let networks = [ItemKind::Ipv4, ItemKind::Ipv6];
            split(
                &mut lists,
                networks,
                |kind| at_level(at, [Item::new(kind)]),
                |list| {
                    let transport = list.get(Key::fact(at, Fact::Transport)).is_some_and(|bits| bits.value != 0);
                    let wanted = transport || counts_hops && at == level;
                    wanted && list.get(Key::fact(at, Fact::Network)).is_none_or(|bits| bits.mask != 0xff)
                },
            );
            for nth in 0..2u8 {
                let announced = |tpid| {
                    let outer = (0..nth).map(|_| Item::new(ItemKind::Vlan));
                    at_level(at, outer.chain([Item::new(ItemKind::Vlan).exact(Field::VlanTpid, tpid)]))
                };
                split(&mut lists, [0x8100, 0x88a8], announced, |list| {
                    let tags = list.get(Key::field(at, Field::EthTags)).unwrap_or(Bits { value: 0, mask: 0 });
                    let tpid = Key { level: at, nth, what: What::Field(Field::VlanTpid) };
                    tags.value >> nth & 1 != 0 && list.get(tpid).is_none_or(|bits| bits.mask != 0xffff)
                });
            }
            let typed = |ethertype| at_level(at, [Item::new(ItemKind::Eth).exact(Field::EthType, ethertype)]);
            split(&mut lists, [0x8847, 0x8848], typed, |list| {
                let labels = list.get(Key::fact(at, Fact::Mpls)).unwrap_or(Bits { value: 0, mask: 0 });
                let ethertype = list.get(Key::field(at, Field::EthType));
                labels.value & u128::from(mpls::BEHIND_LINK) != 0 && ethertype.is_none_or(|bits| bits.mask != 0xffff)
            });
        }
        Ok(lists)
    }
}

/// Splits the lists that need it into those that are one and those that are the other of two; `list` makes what those are.
fn split<T: Copy>(
    lists: &mut Vec<FieldSet>,
    ways: [T; 2],
    list: impl Fn(T) -> Option<FieldSet>,
    needed: impl Fn(&FieldSet) -> bool,
) {
    // Seldom any does.
    if !lists.iter().any(&needed) {
        return;
    }
    let ways: Vec<FieldSet> = ways.into_iter().filter_map(list).collect();
    *lists = std::mem::take(lists)
        .into_iter()
        .flat_map(|list| if needed(&list) { ways.iter().filter_map(|way| list.and(way)).collect() } else { vec![list] })
        .collect();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::hardware::RuleFate;

    fn lists(class: Class, text: &str) -> Vec<String> {
        let rule: Rule = text.parse().unwrap();
        let rule = HardwareRule {
            direction: rule.direction(),
            level: 0,
            pattern: rule.pattern().to_vec(),
            actions: rule.actions().to_vec(),
            fate: RuleFate::Next,
            tag: None,
            count: false,
            in_order: false,
        };
        class.of(&rule).unwrap().iter().map(|list| format!("{:?}", list.list())).collect()
    }

    const V4_TCP: Class = Class { headers: &[ItemKind::Ipv4, ItemKind::Tcp], rank: 0 };

    #[test]
    fn lists_are_split_where_a_device_must_know() {
        let count = |class, text: &str| lists(class, text).len();
        assert_eq!(count(Class::ANY, "ingress: eth type 0x0806 => count"), 1);
        // By version.
        assert_eq!(count(Class::ANY, "ingress: udp dst 53 => count"), 2);
        assert_eq!(count(Class::ANY, "ingress: ipv6 / udp dst 53 => count"), 1);
        // By what announces a tag: each of two.
        assert_eq!(count(Class::ANY, "ingress: vlan vid 5 => count"), 2);
        assert_eq!(count(Class::ANY, "ingress: vlan vid 5 tpid 0x8100 => count"), 1);
        assert_eq!(count(Class::ANY, "ingress: vlan vid 5 / vlan vid 6 => count"), 4);
        assert_eq!(count(Class::ANY, "ingress: mpls label 5 => count"), 2);
        // A class takes what can be in it.
        assert_eq!(count(V4_TCP, "ingress: udp dst 53 => count"), 0);
        assert_eq!(count(V4_TCP, "ingress: eth type 0x0806 => count"), 0);
        assert_eq!(count(V4_TCP, "ingress: eth => count"), 1);
        assert_eq!(lists(V4_TCP, "ingress: tcp dst 80 => count"), lists(V4_TCP, "ingress: ipv4 / tcp dst 80 => count"));
    }

    #[test]
    fn classes_are_those_of_the_packet_that_is_left() {
        let plain = "ingress: ipv4 / udp dst 4789 / vxlan vni 1 => count";
        assert!(lists(V4_TCP, plain).is_empty(), "the outer headers are UDP");
        let inside = lists(V4_TCP, "ingress: ipv4 / udp dst 4789 / vxlan vni 1 => decap l2");
        assert_eq!(inside, lists(Class::ANY, "ingress: ipv4 / udp dst 4789 / vxlan vni 1 / ipv4 / tcp => decap l2"));
    }
}
