//! Rules in the flow specs of `ibv_create_flow` ([`wirepath_verbs::flow`]) and back.
//!
//! [`to_verbs`] gives the specs that say what a rule says, or the item, field or action that specs have no words for.
//! [`from_verbs`] is the way back; `IPV4_EXT` whose protocol, TOS, TTL and flags are not compared comes back as `IPV4`, value
//! bits outside a mask as 0, and specs in the order of headers: nothing of what they mean is lost.
//! Two things a driver must know: the VXLAN spec implies no UDP port, and a VLAN in the ETH spec implies a C-VLAN tag.

use thiserror::Error;
pub use wirepath_verbs::flow::*;

use super::bits::ones;
use super::{Action, Bits, Direction, Field, Item, ItemKind, Rule, RuleError};

/// Priority of the rule that stands for `MC_DEFAULT`: behind all that `NORMAL` flows can have.
pub const MC_DEFAULT_PRIORITY: u32 = 0x1_0000;
/// Priority of the rule that stands for `ALL_DEFAULT`.
pub const ALL_DEFAULT_PRIORITY: u32 = 0x1_0001;

/// Which item a kind of spec is about, and which of our fields stand where in its own: field of the spec, field, how far left.
struct Headers {
    kind: u32,
    item: ItemKind,
    parts: &'static [(&'static str, Field, u8)],
}

const HEADERS: &[Headers] = &[
    Headers {
        kind: ETH,
        item: ItemKind::Eth,
        parts: &[
            ("dst_mac", Field::EthDst, 0),
            ("src_mac", Field::EthSrc, 0),
            ("ether_type", Field::EthType, 0),
            ("vlan_tag", Field::VlanPcp, 13),
            ("vlan_tag", Field::VlanDei, 12),
            ("vlan_tag", Field::VlanVid, 0),
        ],
    },
    Headers {
        kind: IPV4,
        item: ItemKind::Ipv4,
        parts: &[("src_ip", Field::Ipv4Src, 0), ("dst_ip", Field::Ipv4Dst, 0)],
    },
    Headers {
        kind: IPV6,
        item: ItemKind::Ipv6,
        parts: &[
            ("src_ip", Field::Ipv6Src, 0),
            ("dst_ip", Field::Ipv6Dst, 0),
            ("flow_label", Field::Ipv6Flow, 0),
            ("next_hdr", Field::Ipv6Next, 0),
            ("traffic_class", Field::Ipv6Dscp, 2),
            ("traffic_class", Field::Ipv6Ecn, 0),
            ("hop_limit", Field::Ipv6Hops, 0),
        ],
    },
    Headers {
        kind: IPV4_EXT,
        item: ItemKind::Ipv4,
        parts: &[
            ("src_ip", Field::Ipv4Src, 0),
            ("dst_ip", Field::Ipv4Dst, 0),
            ("proto", Field::Ipv4Proto, 0),
            ("tos", Field::Ipv4Dscp, 2),
            ("tos", Field::Ipv4Ecn, 0),
            ("ttl", Field::Ipv4Ttl, 0),
            ("flags", Field::Ipv4Df, 1),
            ("flags", Field::Ipv4Mf, 2),
        ],
    },
    Headers { kind: ESP, item: ItemKind::Esp, parts: &[("spi", Field::EspSpi, 0), ("seq", Field::EspSeq, 0)] },
    Headers {
        kind: TCP,
        item: ItemKind::Tcp,
        parts: &[("dst_port", Field::TcpDst, 0), ("src_port", Field::TcpSrc, 0)],
    },
    Headers {
        kind: UDP,
        item: ItemKind::Udp,
        parts: &[("dst_port", Field::UdpDst, 0), ("src_port", Field::UdpSrc, 0)],
    },
    Headers { kind: VXLAN, item: ItemKind::Vxlan, parts: &[("tunnel_id", Field::VxlanVni, 0)] },
    Headers {
        kind: GRE,
        item: ItemKind::Gre,
        parts: &[("c_ks_res0_ver", Field::GreFlags, 0), ("protocol", Field::GreProto, 0), ("key", Field::GreKey, 0)],
    },
    Headers {
        kind: MPLS,
        item: ItemKind::Mpls,
        parts: &[
            ("label", Field::MplsLabel, 12),
            ("label", Field::MplsTc, 9),
            ("label", Field::MplsBos, 8),
            ("label", Field::MplsTtl, 0),
        ],
    },
];

fn headers(spec: &Spec) -> Option<&'static Headers> {
    HEADERS.iter().find(|headers| headers.kind == spec.kind() & !INNER)
}

/// Adds what is compared of one of our fields; false if the spec has no such field.
pub(crate) fn add(spec: &mut Spec, field: Field, bits: Bits) -> bool {
    let parts = headers(spec).map_or(&[][..], |headers| headers.parts);
    let part = parts.iter().find(|(_, part, _)| *part == field);
    part.is_some_and(|(name, _, shift)| spec.compare(name, bits.value << shift, bits.mask << shift))
}

/// What only the long IPv4 spec compares.
const IPV4_EXT_ONLY: &[Field] =
    &[Field::Ipv4Proto, Field::Ipv4Dscp, Field::Ipv4Ecn, Field::Ipv4Ttl, Field::Ipv4Df, Field::Ipv4Mf];

/// Why a rule has no words in flow specs, or a flow none in rules.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Untranslatable {
    /// No spec is about this item (in this stack).
    #[error("item {}: no flow spec is about {what}", .index + 1)]
    Item {
        /// Place in the pattern.
        index: usize,
        /// The item, as it is written.
        what: String,
    },
    /// The item's spec does not have this field.
    #[error("item {}: the flow spec has no field for {what}", .index + 1)]
    Field {
        /// Place in the pattern.
        index: usize,
        /// Item and field, as they are written.
        what: String,
    },
    /// A VLAN item without fields: in the ETH spec a mask of 0 demands no tag.
    #[error("item {}: a flow spec demands a VLAN tag only by a mask on it", .index + 1)]
    BareVlan {
        /// Place in the pattern.
        index: usize,
    },
    /// No spec does this.
    #[error("action {}: no flow spec does {what}", .index + 1)]
    Action {
        /// Place among the actions.
        index: usize,
        /// The action's name.
        what: &'static str,
    },
    /// Priorities of flows have 16 bits.
    #[error("priority {0} is above 65535")]
    Priority(u32),
    /// More specs than the kernel takes.
    #[error("{0} specs; there are at most {MAX_SPECS}")]
    TooMany(usize),
    /// Copies of all traffic.
    #[error("flow type {0} has no rule: it does not say which packets go where")]
    FlowType(u32),
    /// A flag without a meaning in rules.
    #[error("flow flags {0:#x}: a rule that matches is the last to run, there is no DONT_TRAP")]
    Flags(u32),
    /// A mask on bits that mean nothing.
    #[error("the mask of {field} in spec {} has bits {bits:#x} that no field of rules has", .index + 1)]
    MaskBits {
        /// Place among the specs.
        index: usize,
        /// Field of the spec.
        field: &'static str,
        /// The bits.
        bits: u128,
    },
    /// A flow action whose meaning the caller does not know.
    #[error("spec {}: the meaning of this flow action is not in the spec", .index + 1)]
    UnknownHandle {
        /// Place among the specs.
        index: usize,
    },
    /// The specs contradict each other or stand for no stack of headers.
    #[error("the specs make no rule: {0}")]
    Rule(#[from] RuleError),
}

/// A rule in flow specs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The flow.
    pub attr: FlowAttr,
    /// Its specs. Where an object is needed first, [`Spec::Handle`] and [`Spec::Count`] hold 0.
    pub specs: Vec<Spec>,
    /// What objects to make, and in which specs to put their addresses.
    pub objects: Vec<(usize, Action)>,
    /// Where packets go: the queue pair is not part of the specs. `None` with `drop`, and where the rule has no fate.
    pub destination: Option<Action>,
}

/// All multicast.
fn multicast() -> Vec<Item> {
    let group = 1 << 40;
    vec![Item::new(ItemKind::Eth).with(Field::EthDst, Bits { value: group, mask: group })]
}

/// The specs that say what a rule says, on a port of a device.
pub fn to_verbs(rule: &Rule, port: u8) -> Result<Translation, Untranslatable> {
    let pattern = rule.pattern();
    let (flow_type, priority, pattern) = match (rule.priority(), rule.direction()) {
        (MC_DEFAULT_PRIORITY, Direction::Ingress) if pattern == multicast() => (FlowType::MC_DEFAULT, 0, &[][..]),
        (ALL_DEFAULT_PRIORITY, Direction::Ingress) if pattern.is_empty() => (FlowType::ALL_DEFAULT, 0, &[][..]),
        (priority, _) => {
            let priority = u16::try_from(priority).map_err(|_| Untranslatable::Priority(priority))?;
            (FlowType::NORMAL, priority, pattern)
        }
    };
    let mut specs: Vec<Spec> = Vec::new();
    for (index, item) in pattern.iter().enumerate() {
        let before = index.checked_sub(1).and_then(|i| pattern.get(i)).filter(|b| b.inner == item.inner);
        let again = before.is_some_and(|before| before.kind == item.kind);
        let kind = match item.kind {
            ItemKind::Eth => ETH,
            ItemKind::Vlan if !again && item.fields().is_empty() => return Err(Untranslatable::BareVlan { index }),
            ItemKind::Vlan if !again => ETH,
            ItemKind::Ipv4 if item.fields().iter().any(|(field, _)| IPV4_EXT_ONLY.contains(field)) => IPV4_EXT,
            ItemKind::Ipv4 => IPV4,
            ItemKind::Ipv6 => IPV6,
            ItemKind::Esp => ESP,
            ItemKind::Tcp => TCP,
            ItemKind::Udp => UDP,
            ItemKind::Mpls if !again => MPLS,
            ItemKind::Vxlan if !item.inner => VXLAN,
            ItemKind::Gre if !item.inner => GRE,
            _ => 0,
        };
        // A VLAN tag belongs to the Ethernet spec that is there.
        let tag = item.kind == ItemKind::Vlan && before.is_some_and(|before| before.kind == ItemKind::Eth);
        let spec = if tag { specs.pop() } else { Spec::empty(kind, item.inner) };
        let Some(mut spec) = spec else {
            let inner = if item.inner { "inner " } else { "" };
            let second = if again { "a second " } else { "" };
            return Err(Untranslatable::Item { index, what: format!("{second}{inner}{}", item.kind.spec().name) });
        };
        for &(field, bits) in item.fields() {
            if !add(&mut spec, field, bits) {
                let what = format!("{} {}", item.kind.spec().name, field.name());
                return Err(Untranslatable::Field { index, what });
            }
        }
        specs.push(spec);
    }
    let (mut objects, mut destination) = (Vec::new(), None);
    for (index, action) in rule.actions().iter().enumerate() {
        match action {
            Action::Queue(_) | Action::Rss(_) => destination = Some(action.clone()),
            Action::Drop => specs.push(Spec::Drop),
            Action::Mark(mark) => specs.push(Spec::Tag(*mark)),
            Action::Count => {
                objects.push((specs.len(), action.clone()));
                specs.push(Spec::Count(0));
            }
            Action::Set { .. } | Action::DecTtl | Action::PushVlan(_) | Action::PopVlan | Action::Reformat(_) => {
                objects.push((specs.len(), action.clone()));
                specs.push(Spec::Handle(0));
            }
            other => return Err(Untranslatable::Action { index, what: other.spec().name }),
        }
    }
    if specs.len() > MAX_SPECS {
        return Err(Untranslatable::TooMany(specs.len()));
    }
    let flags = if rule.direction() == Direction::Egress { EGRESS } else { 0 };
    Ok(Translation { attr: FlowAttr { flow_type, priority, port, flags }, specs, objects, destination })
}

/// The rule that says what a flow says. `object` tells what the flow action of the
/// [`Spec::Handle`] with this place does; `destination` is
/// where the flow's queue pair delivers to, unless the specs drop.
pub fn from_verbs(
    attr: &FlowAttr,
    specs: &[Spec],
    destination: Option<Action>,
    mut object: impl FnMut(usize) -> Option<Action>,
) -> Result<Rule, Untranslatable> {
    if attr.flags & !EGRESS != 0 {
        return Err(Untranslatable::Flags(attr.flags & !EGRESS));
    }
    let direction = if attr.flags & EGRESS != 0 { Direction::Egress } else { Direction::Ingress };
    let mut headers: Vec<(u8, Item)> = Vec::new();
    let (priority, defaults) = match attr.flow_type {
        FlowType::NORMAL => (attr.priority.into(), Vec::new()),
        FlowType::MC_DEFAULT => (MC_DEFAULT_PRIORITY, multicast()),
        FlowType::ALL_DEFAULT => (ALL_DEFAULT_PRIORITY, Vec::new()),
        FlowType(other) => return Err(Untranslatable::FlowType(other)),
    };
    headers.extend(defaults.into_iter().map(|item| (1, item)));
    let mut actions = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        match spec {
            Spec::Tag(tag) => actions.push(Action::Mark(*tag)),
            Spec::Drop => actions.push(Action::Drop),
            Spec::Count(_) => actions.push(Action::Count),
            Spec::Handle(_) => actions.push(object(index).ok_or(Untranslatable::UnknownHandle { index })?),
            spec => {
                // The place of MPLS is that behind the spec before it; all others may stand in any order.
                let before = index.checked_sub(1).map(|i| &specs[i]);
                headers_of(index, spec, before, &mut headers)?;
            }
        }
    }
    headers.sort_by_key(|(order, item)| (item.inner, *order));
    // A flow drops or delivers; what else it does comes before.
    if let Some(at) = actions.iter().position(|action| *action == Action::Drop) {
        let drop = actions.remove(at);
        actions.push(drop);
    } else {
        actions.extend(destination);
    }
    let pattern = headers.into_iter().map(|(_, item)| item).collect();
    Ok(Rule::new(direction, priority, pattern, actions)?)
}

/// The items that a spec is about: one, or Ethernet and a VLAN tag.
fn headers_of(
    index: usize,
    spec: &Spec,
    before: Option<&Spec>,
    headers: &mut Vec<(u8, Item)>,
) -> Result<(), Untranslatable> {
    let Some(&Headers { item: kind, parts, .. }) = self::headers(spec) else { return Ok(()) };
    let order = match (kind, before) {
        (ItemKind::Mpls, Some(Spec::Udp { inner, .. } | Spec::Gre { inner, .. })) if *inner == spec.is_inner() => 6,
        (ItemKind::Mpls, _) => 3,
        _ => kind.spec().layer as u8,
    };
    let make = |kind| if spec.is_inner() { Item::new(kind).inside() } else { Item::new(kind) };
    let mut item = make(kind);
    let mut tag: Option<Item> = None;
    for all in spec.fields() {
        let parts = || parts.iter().filter(|(name, ..)| *name == all.name).map(|&(_, field, shift)| (field, shift));
        let known = parts().fold(0, |known, (field, shift)| known | ones(field.spec().bits) << shift);
        let strange = all.mask & ones(all.bits) & !known;
        if strange != 0 {
            return Err(Untranslatable::MaskBits { index, field: all.name, bits: strange });
        }
        for (field, shift) in parts() {
            let mask = all.mask >> shift & ones(field.spec().bits);
            if mask == 0 {
                continue;
            }
            let part = Bits { value: all.value >> shift & mask, mask };
            if field.spec().item == kind {
                item = item.with(field, part);
            } else {
                tag = Some(tag.unwrap_or_else(|| make(field.spec().item)).with(field, part));
            }
        }
    }
    headers.push((order, item));
    headers.extend(tag.map(|tag| (2, tag)));
    Ok(())
}

#[cfg(test)]
mod tests;
