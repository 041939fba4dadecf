//! Random rules. Rules that [`Rule::new`] refuses are generated again.

use wirepath_flow::{
    Action, Direction, FIELDS, Field, HashFields, Item, ItemKind, Limit, MaskedValue, RateUnit, Reformat, ReformatKind,
    Rss, Rule,
};
use wirepath_packet::PortId;
use wirepath_wire::{EtherType, Tag};

use super::{encap_headers, values};
use crate::rng::Rng;

fn item(rng: &mut Rng, kind: ItemKind) -> Item {
    let mut item = Item::new(kind);
    let fields = kind.spec().fields;
    for _ in 0..rng.pick(&[0, 0, 1, 1, 1, 2, 3]) {
        let field = fields[rng.index(fields.len())];
        item = item.with(field, values::bits(rng, field));
    }
    item
}

/// First header of a stack.
#[derive(Clone, Copy, PartialEq)]
enum Begin {
    Ethernet,
    Ip(u8),
    Unknown,
}

/// Returns the items of one stack in packet order, and the payload of its tunnel if it has one.
fn stack(rng: &mut Rng, begin: Begin) -> (Vec<Item>, Option<Begin>) {
    let mut items = Vec::new();
    let ethernet = begin == Begin::Ethernet;
    if ethernet {
        items.push(item(rng, ItemKind::Eth));
        for _ in 0..rng.pick(&[0, 0, 0, 1, 1, 2]) {
            items.push(item(rng, ItemKind::Vlan));
        }
        if rng.one_in(12) {
            for _ in 0..1 + rng.below(3) {
                items.push(item(rng, ItemKind::Mpls));
            }
            if rng.one_in(3) {
                return (items, Some(Begin::Ethernet));
            }
        } else if rng.one_in(14) {
            items.push(item(rng, ItemKind::Arp));
            return (items, None);
        }
    }
    let version = match begin {
        Begin::Ip(version) => version,
        _ => rng.pick(&[4, 6]),
    };
    if !rng.one_in(6) {
        items.push(item(rng, if version == 4 { ItemKind::Ipv4 } else { ItemKind::Ipv6 }));
    }
    let message = if version == 4 { ItemKind::Icmp } else { ItemKind::Icmpv6 };
    let carried = |rng: &mut Rng| rng.pick(&[Begin::Ethernet, Begin::Ethernet, Begin::Ip(4), Begin::Ip(6)]);
    match rng.below(12) {
        0 => {}
        1 | 2 => items.push(item(rng, ItemKind::Tcp)),
        3 => items.push(item(rng, ItemKind::Udp)),
        4 => items.push(item(rng, message)),
        5 => items.push(item(rng, ItemKind::Esp)),
        6 => {
            let inner = rng.pick(&[4, 6]);
            let protocol = if inner == 4 { 4 } else { 41 };
            if let Some(ip) = items.last_mut() {
                match ip.kind {
                    ItemKind::Ipv4 => *ip = ip.clone().exact(Field::Ipv4Proto, protocol),
                    ItemKind::Ipv6 => *ip = ip.clone().exact(Field::Ipv6Proto, protocol),
                    _ => {}
                }
            }
            return (items, Some(Begin::Ip(inner)));
        }
        7 | 8 => {
            let mut gre = item(rng, ItemKind::Gre);
            if rng.one_in(5) {
                items.push(gre);
                for _ in 0..1 + rng.below(2) {
                    items.push(item(rng, ItemKind::Mpls));
                }
                return (items, Some(Begin::Unknown));
            }
            let begin = carried(rng);
            if !rng.one_in(4) {
                gre = gre.exact(Field::GreProto, ether_type(begin));
            }
            items.push(gre);
            return (items, Some(begin));
        }
        choice => {
            if rng.one_in(2) {
                items.push(item(rng, ItemKind::Udp));
            }
            let mut begin = carried(rng);
            match (choice, rng.one_in(5)) {
                (9, true) => {
                    if items.last().is_none_or(|last| last.kind != ItemKind::Udp) {
                        items.push(Item::new(ItemKind::Udp));
                    }
                    for _ in 0..1 + rng.below(2) {
                        items.push(item(rng, ItemKind::Mpls));
                    }
                    begin = Begin::Unknown;
                }
                (9, false) => {
                    items.push(item(rng, ItemKind::Vxlan));
                    begin = Begin::Ethernet;
                }
                (10, _) => {
                    let next = match begin {
                        Begin::Ip(4) => 1,
                        Begin::Ip(_) => 2,
                        _ => 3,
                    };
                    items.push(item(rng, ItemKind::VxlanGpe).exact(Field::GpeNext, next));
                }
                _ => items.push(item(rng, ItemKind::Geneve).exact(Field::GeneveProto, ether_type(begin))),
            }
            return (items, Some(begin));
        }
    }
    (items, None)
}

fn ether_type(begin: Begin) -> u128 {
    match begin {
        Begin::Ip(4) => 0x0800,
        Begin::Ip(_) => 0x86dd,
        _ => 0x6558,
    }
}

fn pattern(rng: &mut Rng) -> Vec<Item> {
    if rng.one_in(40) {
        return Vec::new();
    }
    let (mut items, carried) = stack(rng, Begin::Ethernet);
    if let Some(begin) = carried.filter(|_| !rng.one_in(3)) {
        let begin = match begin {
            Begin::Unknown => rng.pick(&[Begin::Ethernet, Begin::Ip(4), Begin::Ip(6)]),
            begin => begin,
        };
        items.extend(stack(rng, begin).0.into_iter().map(Item::as_inner));
    }
    // Items that are left out are not compared.
    let keep = rng.pick(&[40, 70, 100]);
    let mut items: Vec<Item> = items.into_iter().filter(|_| rng.percent(keep)).collect();
    if rng.one_in(10) {
        items.insert(0, item(rng, ItemKind::Port));
    }
    if rng.one_in(10) {
        items.insert(0, item(rng, ItemKind::Meta));
    }
    items
}

/// Returns a variant of a pattern: wider, narrower, or with other values.
fn relative(rng: &mut Rng, of: &[Item]) -> Vec<Item> {
    let mut items = of.to_vec();
    if items.len() > 1 && rng.one_in(3) {
        items.remove(rng.index(items.len()));
    }
    for item in &mut items {
        for &(field, bits) in item.clone().fields() {
            let new = match rng.below(6) {
                0 => MaskedValue { value: 0, mask: 0 },
                1 => values::bits(rng, field),
                2 => {
                    let mask = bits.mask & rng.wide();
                    MaskedValue { value: bits.value & mask, mask }
                }
                _ => bits,
            };
            *item = item.clone().with(field, new);
        }
        if rng.one_in(4) {
            let fields = item.kind.spec().fields;
            let field = fields[rng.index(fields.len())];
            *item = item.clone().with(field, values::bits(rng, field));
        }
    }
    items
}

fn action(rng: &mut Rng) -> Option<Action> {
    Some(match rng.below(16) {
        0 => Action::Mirror(PortId::new(rng.below(4) as u16)),
        1 | 2 => Action::Count,
        3 => Action::Mark(rng.pick(&[0, 1, 2, 3, 0xff_ffff])),
        4 => Action::Limit(match rng.pick(&[RateUnit::Packets, RateUnit::Bits]) {
            RateUnit::Packets => Limit { rate: 1 + rng.below(2000), unit: RateUnit::Packets, burst: 1 + rng.below(40) },
            unit => Limit { rate: 8 + rng.below(1_000_000), unit, burst: 50 + rng.below(4000) },
        }),
        5 => Action::DecTtl,
        6 | 7 => Action::PushVlan(Tag {
            tpid: rng.pick(&[EtherType::VLAN, EtherType::QINQ]),
            tci: (rng.below(16) << 12 | rng.below(4095)) as u16,
        }),
        8 => Action::PopVlan,
        9..=11 => {
            let settable: Vec<Field> = FIELDS.iter().filter(|spec| spec.settable).map(|spec| spec.field).collect();
            let field = rng.pick(&settable);
            Action::Set { field, value: values::value(rng, field) }
        }
        12 | 13 => Action::Reformat(match rng.below(2) {
            0 => Reformat::new(ReformatKind::L2TunnelToL2, &[]).ok()?,
            _ => {
                let version = rng.pick(&[4, 6]);
                encap_headers::link(rng, version)?
            }
        }),
        _ => {
            let version = rng.pick(&[None, Some(4), Some(6)]);
            Action::Reformat(encap_headers::encap(rng, version)?)
        }
    })
}

fn final_action(rng: &mut Rng) -> Action {
    match rng.below(6) {
        0 => Action::Drop,
        1 => Action::Queue(rng.below(8) as u16),
        2 => Action::Kernel,
        3 | 4 => Action::Redirect(PortId::new(rng.below(4) as u16)),
        _ => Action::Rss(Rss {
            queues: (0..=rng.below(5)).map(|_| rng.below(6) as u16).collect(),
            on: HashFields(rng.below(63) as u8 | 1),
            key: rng.one_in(2).then(|| std::array::from_fn(|_| rng.next() as u8)),
        }),
    }
}

/// Returns a `set` action for a field of a header that the pattern names.
fn set(rng: &mut Rng, pattern: &[Item]) -> Option<Action> {
    let fields: Vec<Field> = pattern
        .iter()
        .flat_map(|item| item.kind.spec().fields.iter().copied())
        .filter(|field| field.spec().settable)
        .collect();
    let field = *fields.get(rng.index(fields.len().max(1)))?;
    Some(Action::Set { field, value: values::value(rng, field) })
}

/// Returns actions that the pattern allows.
fn actions(rng: &mut Rng, direction: Direction, pattern: &[Item]) -> Vec<Action> {
    let mut actions = Vec::new();
    for _ in 0..rng.pick(&[1, 3, 5, 8]) {
        let made = if rng.one_in(3) { set(rng, pattern) } else { action(rng) };
        let Some(made) = made else { continue };
        actions.push(made);
        if Rule::new(direction, 0, pattern.to_vec(), actions.clone()).is_err() {
            actions.pop();
        }
    }
    if direction == Direction::Egress {
        if rng.one_in(6) {
            actions.push(Action::Drop);
        }
    } else if rng.percent(70) {
        actions.push(final_action(rng));
    }
    actions
}

/// Returns a rule, sometimes a variant of a known one.
pub fn rule(rng: &mut Rng, known: &[Rule]) -> Rule {
    loop {
        let direction = if rng.percent(80) { Direction::Ingress } else { Direction::Egress };
        let pattern = match known {
            [] => pattern(rng),
            _ if rng.percent(60) => pattern(rng),
            known => {
                let of = rng.index(known.len());
                relative(rng, known[of].pattern())
            }
        };
        // Patterns that the language refuses are skipped.
        if Rule::new(direction, 0, pattern.clone(), vec![Action::Count]).is_err() {
            continue;
        }
        let actions = actions(rng, direction, &pattern);
        let priority = match rng.below(8) {
            _ if pattern.is_empty() => 100,
            0 => rng.next() as u32,
            _ => rng.below(6) as u32,
        };
        if let Ok(rule) = Rule::new(direction, priority, pattern, actions) {
            return rule;
        }
    }
}

/// Returns a set of rules.
pub fn rules(rng: &mut Rng, count: usize) -> Vec<Rule> {
    let mut rules = Vec::with_capacity(count);
    while rules.len() < count {
        let rule = rule(rng, &rules);
        rules.push(rule);
    }
    rules
}

/// A change of a rule set.
#[derive(Clone, Debug)]
pub enum Change {
    /// Adds a rule after the others.
    Add(Rule),
    /// Removes the rule with this index.
    Remove(usize),
}

/// Returns a possible change of these rules.
pub fn change(rng: &mut Rng, rules: &[Rule]) -> Change {
    if rules.is_empty() || rng.one_in(2) {
        Change::Add(rule(rng, rules))
    } else {
        Change::Remove(rng.index(rules.len()))
    }
}
