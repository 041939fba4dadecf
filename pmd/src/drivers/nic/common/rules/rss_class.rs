//! Default destination of received packets: classes of packets with their RSS queue pairs.

use std::collections::HashMap;
use std::sync::Arc;

use wirepath_verbs::flow::FlowTarget;
use wirepath_verbs::{Error, HashFields, IndirectionTable, RssQp, WorkQueue};

use super::{refused, unsupported};
use crate::port::hardware::{HardwareRule, RuleRefusal};
use wirepath_flow::{
    Action, Direction, Field, FieldSet, HeaderType, Item, ItemKind, Key, KeyKind, MaskedValue, Rule, mpls,
};

/// Creates a queue pair that hashes these fields over a table, with [`crate::drivers::nic::common::RSS_KEY`].
pub(crate) type CreateRssQp = Arc<dyn Fn(&IndirectionTable, HashFields) -> wirepath_verbs::Result<RssQp> + Send + Sync>;

/// A class of packets, defined by the outermost headers that remain after the actions of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RssClass {
    /// Headers that the packets have.
    pub(crate) headers: &'static [ItemKind],
    /// Rank among the classes: 0 is matched first; more headers mean a lower rank.
    pub(crate) rank: u16,
}

/// Default RSS over the queues of a port.
pub(crate) struct DefaultRss {
    classes: Vec<(RssClass, FlowTarget)>,
    create_qp: CreateRssQp,
    queues: Vec<WorkQueue>,
    /// Queue pairs that deliver to a single queue, created on demand.
    single: HashMap<u16, FlowTarget>,
    /// Device priorities available to rules.
    priorities: u16,
}

impl DefaultRss {
    /// Creates the default RSS of a port. `classes` ends with the class of all packets. `priorities` is the
    /// number of device priorities above the port's own rules.
    pub(crate) fn new(
        create_qp: &CreateRssQp,
        queues: &[WorkQueue],
        classes: Vec<(RssClass, FlowTarget)>,
        priorities: u16,
    ) -> Self {
        // A single queue needs no RSS.
        let classes = if queues.len() == 1 { classes.into_iter().rev().take(1).collect() } else { classes };
        Self {
            classes,
            create_qp: CreateRssQp::clone(create_qp),
            queues: queues.to_vec(),
            single: HashMap::new(),
            priorities,
        }
    }

    pub(super) fn classes(&self) -> &[(RssClass, FlowTarget)] {
        &self.classes
    }

    /// Returns the number of device priorities that a level uses.
    pub(super) fn ranks(&self) -> u16 {
        if self.classes.len() == 1 { 1 } else { RssClass::ANY.rank + 1 }
    }

    pub(super) fn levels(&self) -> u16 {
        self.priorities / self.ranks()
    }

    /// Returns a target for rules that deliver nothing but must name one.
    pub(super) fn any_target(&self) -> Option<FlowTarget> {
        self.classes.last().map(|(_, target)| target.clone())
    }

    /// Returns the target of a single queue.
    pub(super) fn queue(&mut self, queue: u16) -> Result<FlowTarget, RuleRefusal> {
        if let Some(target) = self.single.get(&queue) {
            return Ok(target.clone());
        }
        let Some(work_queue) = self.queues.get(usize::from(queue)) else {
            return Err(unsupported(format!("queue {queue} of {}", self.queues.len())));
        };
        let make = || -> Result<FlowTarget, Error> {
            let table = IndirectionTable::new(std::slice::from_ref(work_queue))?;
            Ok(FlowTarget::Rss((self.create_qp)(&table, HashFields::NONE)?))
        };
        let target = make().map_err(|error| refused(&error))?;
        self.single.insert(queue, target.clone());
        Ok(target)
    }
}

/// Returns the complete field set of a pattern. `None` if no packet can match it.
fn closed(items: Vec<Item>) -> Option<FieldSet> {
    Rule::new(Direction::Egress, 0, items, vec![Action::Count]).ok().map(|rule| rule.fields())
}

/// Returns the complete field set of headers in a stack.
fn at_level(level: u8, items: impl IntoIterator<Item = Item>) -> Option<FieldSet> {
    closed(items.into_iter().map(|item| if level > 0 { item.as_inner() } else { item }).collect())
}

impl RssClass {
    /// The class of all packets.
    pub(crate) const ANY: Self = Self { headers: &[], rank: 2 };

    /// Returns the packets of a rule that belong to this class, as field sets that a device can match. In
    /// each set the network layer is known if a higher layer is compared. So are the TPID of a tag and the
    /// EtherType of a label. Empty if no packet qualifies.
    pub(super) fn of(self, rule: &HardwareRule) -> Result<Vec<FieldSet>, String> {
        let whole = Rule::new(Direction::Egress, 0, rule.pattern.clone(), vec![Action::Count]);
        let whole = whole.map_err(|error| format!("an invalid pattern: {error}"))?.fields();
        // Header stack that is the outermost after the actions of the rule.
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
                    let transport =
                        list.get(Key::header_type(at, HeaderType::Transport)).is_some_and(|bits| bits.value != 0);
                    let wanted = transport || counts_hops && at == level;
                    wanted && list.get(Key::header_type(at, HeaderType::Network)).is_none_or(|bits| bits.mask != 0xff)
                },
            );
            for nth in 0..2u8 {
                let announced = |tpid| {
                    let outer = (0..nth).map(|_| Item::new(ItemKind::Vlan));
                    at_level(at, outer.chain([Item::new(ItemKind::Vlan).exact(Field::VlanTpid, tpid)]))
                };
                split(&mut lists, [0x8100, 0x88a8], announced, |list| {
                    let tags = list.get(Key::field(at, Field::EthTags)).unwrap_or(MaskedValue { value: 0, mask: 0 });
                    let tpid = Key { level: at, nth, kind: KeyKind::Field(Field::VlanTpid) };
                    tags.value >> nth & 1 != 0 && list.get(tpid).is_none_or(|bits| bits.mask != 0xffff)
                });
            }
            let typed = |ethertype| at_level(at, [Item::new(ItemKind::Eth).exact(Field::EthType, ethertype)]);
            split(&mut lists, [0x8847, 0x8848], typed, |list| {
                let labels =
                    list.get(Key::header_type(at, HeaderType::Mpls)).unwrap_or(MaskedValue { value: 0, mask: 0 });
                let ethertype = list.get(Key::field(at, Field::EthType));
                labels.value & u128::from(mpls::AFTER_ETHERNET) != 0 && ethertype.is_none_or(|bits| bits.mask != 0xffff)
            });
        }
        Ok(lists)
    }
}

/// Splits each set that needs it into two by two alternatives; `list` returns the set of an alternative.
fn split<T: Copy>(
    lists: &mut Vec<FieldSet>,
    alternatives: [T; 2],
    list: impl Fn(T) -> Option<FieldSet>,
    needed: impl Fn(&FieldSet) -> bool,
) {
    // Few sets need it.
    if !lists.iter().any(&needed) {
        return;
    }
    let alternatives: Vec<FieldSet> = alternatives.into_iter().filter_map(list).collect();
    *lists = std::mem::take(lists)
        .into_iter()
        .flat_map(|list| {
            if needed(&list) {
                alternatives.iter().filter_map(|alternative| list.and(alternative)).collect()
            } else {
                vec![list]
            }
        })
        .collect();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::hardware::RuleDestination;

    fn lists(class: RssClass, text: &str) -> Vec<String> {
        let rule: Rule = text.parse().unwrap();
        let rule = HardwareRule {
            direction: rule.direction(),
            level: 0,
            pattern: rule.pattern().to_vec(),
            actions: rule.actions().to_vec(),
            destination: RuleDestination::Next,
            tag: None,
            count: false,
            require_integrity: false,
        };
        class.of(&rule).unwrap().iter().map(|list| format!("{:?}", list.list())).collect()
    }

    const V4_TCP: RssClass = RssClass { headers: &[ItemKind::Ipv4, ItemKind::Tcp], rank: 0 };

    #[test]
    fn sets_are_split_by_version_tpid_and_label_type() {
        let count = |class, text: &str| lists(class, text).len();
        assert_eq!(count(RssClass::ANY, "ingress: eth type 0x0806 => count"), 1);
        // Split by IP version.
        assert_eq!(count(RssClass::ANY, "ingress: udp dst 53 => count"), 2);
        assert_eq!(count(RssClass::ANY, "ingress: ipv6 / udp dst 53 => count"), 1);
        // Split by TPID, for each tag.
        assert_eq!(count(RssClass::ANY, "ingress: vlan vid 5 => count"), 2);
        assert_eq!(count(RssClass::ANY, "ingress: vlan vid 5 tpid 0x8100 => count"), 1);
        assert_eq!(count(RssClass::ANY, "ingress: vlan vid 5 / vlan vid 6 => count"), 4);
        assert_eq!(count(RssClass::ANY, "ingress: mpls label 5 => count"), 2);
        // A set is limited to what the class can contain.
        assert_eq!(count(V4_TCP, "ingress: udp dst 53 => count"), 0);
        assert_eq!(count(V4_TCP, "ingress: eth type 0x0806 => count"), 0);
        assert_eq!(count(V4_TCP, "ingress: eth => count"), 1);
        assert_eq!(lists(V4_TCP, "ingress: tcp dst 80 => count"), lists(V4_TCP, "ingress: ipv4 / tcp dst 80 => count"));
    }

    #[test]
    fn classes_use_the_headers_after_decapsulation() {
        let plain = "ingress: ipv4 / udp dst 4789 / vxlan vni 1 => count";
        assert!(lists(V4_TCP, plain).is_empty(), "the outer headers are UDP");
        let inside = lists(V4_TCP, "ingress: ipv4 / udp dst 4789 / vxlan vni 1 => decap l2");
        assert_eq!(inside, lists(RssClass::ANY, "ingress: ipv4 / udp dst 4789 / vxlan vni 1 / ipv4 / tcp => decap l2"));
    }
}
