//! Translation of rules into the flow specs of `ibv_create_flow` ([`wirepath_verbs::flow`]), and back.
//!
//! [`to_verbs`] returns the specs of a rule, or the item, field or action that specs cannot express.
//! [`from_verbs`] is the inverse. It normalises: an `IPV4_EXT` spec whose protocol, TOS, TTL and flags are
//! not compared becomes `IPV4`; value bits outside a mask become 0; specs appear in the order of headers. The
//! meaning is preserved.
//!
//! Two properties matter to drivers: the VXLAN spec implies no UDP port, and a VLAN tag in the ETH spec
//! implies a C-VLAN tag.

use thiserror::Error;
pub use wirepath_verbs::flow::*;

use wirepath_flow::ones;
use wirepath_flow::{Action, Direction, Field, Item, ItemKind, MaskedValue, Rule, RuleError};

/// Priority of the rule for `MC_DEFAULT`: lower than that of any `NORMAL` flow.
pub const MC_DEFAULT_PRIORITY: u32 = 0x1_0000;
/// Priority of the rule for `ALL_DEFAULT`.
pub const ALL_DEFAULT_PRIORITY: u32 = 0x1_0001;

/// Item of a kind of spec, and its fields: name in the spec, field of the rule language, left shift.
struct SpecFields {
    kind: u32,
    item: ItemKind,
    parts: &'static [(&'static str, Field, u8)],
}

const SPEC_FIELDS: &[SpecFields] = &[
    SpecFields {
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
    SpecFields {
        kind: IPV4,
        item: ItemKind::Ipv4,
        parts: &[("src_ip", Field::Ipv4Src, 0), ("dst_ip", Field::Ipv4Dst, 0)],
    },
    SpecFields {
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
    SpecFields {
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
    SpecFields { kind: ESP, item: ItemKind::Esp, parts: &[("spi", Field::EspSpi, 0), ("seq", Field::EspSeq, 0)] },
    SpecFields {
        kind: TCP,
        item: ItemKind::Tcp,
        parts: &[("dst_port", Field::TcpDst, 0), ("src_port", Field::TcpSrc, 0)],
    },
    SpecFields {
        kind: UDP,
        item: ItemKind::Udp,
        parts: &[("dst_port", Field::UdpDst, 0), ("src_port", Field::UdpSrc, 0)],
    },
    SpecFields { kind: VXLAN, item: ItemKind::Vxlan, parts: &[("tunnel_id", Field::VxlanVni, 0)] },
    SpecFields {
        kind: GRE,
        item: ItemKind::Gre,
        parts: &[("c_ks_res0_ver", Field::GreFlags, 0), ("protocol", Field::GreProto, 0), ("key", Field::GreKey, 0)],
    },
    SpecFields {
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

fn spec_fields(spec: &Spec) -> Option<&'static SpecFields> {
    SPEC_FIELDS.iter().find(|known| known.kind == spec.kind() & !INNER)
}

/// Adds the comparison of a field. Returns false if the spec has no such field.
pub(crate) fn add(spec: &mut Spec, field: Field, bits: MaskedValue) -> bool {
    let parts = spec_fields(spec).map_or(&[][..], |known| known.parts);
    let part = parts.iter().find(|(_, part, _)| *part == field);
    part.is_some_and(|(name, _, shift)| spec.add_match(name, bits.value << shift, bits.mask << shift))
}

/// Fields that only the long IPv4 spec can compare.
const IPV4_EXT_ONLY: &[Field] =
    &[Field::Ipv4Proto, Field::Ipv4Dscp, Field::Ipv4Ecn, Field::Ipv4Ttl, Field::Ipv4Df, Field::Ipv4Mf];

/// The reason why a rule cannot be expressed in flow specs, or a flow not as a rule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TranslateError {
    /// No spec matches this item (in this stack).
    #[error("item {}: no flow spec matches {what}", .index + 1)]
    Item {
        /// Position in the pattern.
        index: usize,
        /// The item, as written.
        what: String,
    },
    /// The item's spec does not have this field.
    #[error("item {}: the flow spec has no field for {what}", .index + 1)]
    Field {
        /// Position in the pattern.
        index: usize,
        /// Item and field, as written.
        what: String,
    },
    /// A VLAN item without fields: in the ETH spec a mask of 0 requires no tag.
    #[error("item {}: a flow spec can require a VLAN tag only by a mask on its fields", .index + 1)]
    BareVlan {
        /// Position in the pattern.
        index: usize,
    },
    /// No spec has this action.
    #[error("action {}: no flow spec has the action {what}", .index + 1)]
    Action {
        /// Position among the actions.
        index: usize,
        /// Name of the action.
        what: &'static str,
    },
    /// The priority exceeds 16 bits.
    #[error("priority {0} is above 65535")]
    Priority(u32),
    /// There are more specs than the kernel accepts.
    #[error("{0} specs; the kernel accepts at most {MAX_SPECS}")]
    TooMany(usize),
    /// The flow type copies all traffic.
    #[error("flow type {0} cannot be a rule: it copies all traffic")]
    FlowType(u32),
    /// The flag has no meaning in rules.
    #[error("flow flags {0:#x}: the first matching rule ends the lookup, so that DONT_TRAP does not exist")]
    Flags(u32),
    /// The mask covers bits without a meaning.
    #[error("the mask of {field} in spec {} has bits {bits:#x} outside the fields of rules", .index + 1)]
    MaskBits {
        /// Position among the specs.
        index: usize,
        /// Field of the spec.
        field: &'static str,
        /// The bits without a meaning.
        bits: u128,
    },
    /// The caller does not know this flow action.
    #[error("spec {}: the meaning of this flow action is unknown", .index + 1)]
    UnknownHandle {
        /// Position among the specs.
        index: usize,
    },
    /// The specs contradict each other, or match no stack of headers.
    #[error("the specs do not form a rule: {0}")]
    Rule(#[from] RuleError),
}

/// A rule in flow specs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Attributes of the flow.
    pub attr: FlowAttr,
    /// Its specs. [`Spec::Handle`] and [`Spec::Count`] contain 0 where an object must be created first.
    pub specs: Vec<Spec>,
    /// Objects to create, each with the index of the spec that takes its address.
    pub objects: Vec<(usize, Action)>,
    /// Destination of the packets, because specs do not name the queue pair. `None` if the flow drops, or the
    /// rule has no destination.
    pub destination: Option<Action>,
}

/// Returns a pattern for all multicast frames.
fn multicast() -> Vec<Item> {
    let group = 1 << 40;
    vec![Item::new(ItemKind::Eth).with(Field::EthDst, MaskedValue { value: group, mask: group })]
}

/// Returns the specs of a rule on a port of a device.
pub fn to_verbs(rule: &Rule, port: u8) -> Result<Translation, TranslateError> {
    let pattern = rule.pattern();
    let (flow_type, priority, pattern) = match (rule.priority(), rule.direction()) {
        (MC_DEFAULT_PRIORITY, Direction::Ingress) if pattern == multicast() => (FlowType::MC_DEFAULT, 0, &[][..]),
        (ALL_DEFAULT_PRIORITY, Direction::Ingress) if pattern.is_empty() => (FlowType::ALL_DEFAULT, 0, &[][..]),
        (priority, _) => {
            let priority = u16::try_from(priority).map_err(|_| TranslateError::Priority(priority))?;
            (FlowType::NORMAL, priority, pattern)
        }
    };
    let mut specs: Vec<Spec> = Vec::new();
    for (index, item) in pattern.iter().enumerate() {
        let before = index.checked_sub(1).and_then(|i| pattern.get(i)).filter(|b| b.inner == item.inner);
        let again = before.is_some_and(|before| before.kind == item.kind);
        let kind = match item.kind {
            ItemKind::Eth => ETH,
            ItemKind::Vlan if !again && item.fields().is_empty() => return Err(TranslateError::BareVlan { index }),
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
        // A VLAN tag belongs to the preceding Ethernet spec.
        let tag = item.kind == ItemKind::Vlan && before.is_some_and(|before| before.kind == ItemKind::Eth);
        let spec = if tag { specs.pop() } else { Spec::empty(kind, item.inner) };
        let Some(mut spec) = spec else {
            let inner = if item.inner { "inner " } else { "" };
            let second = if again { "a second " } else { "" };
            return Err(TranslateError::Item { index, what: format!("{second}{inner}{}", item.kind.spec().name) });
        };
        for &(field, bits) in item.fields() {
            if !add(&mut spec, field, bits) {
                let what = format!("{} {}", item.kind.spec().name, field.name());
                return Err(TranslateError::Field { index, what });
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
            other => return Err(TranslateError::Action { index, what: other.spec().name }),
        }
    }
    if specs.len() > MAX_SPECS {
        return Err(TranslateError::TooMany(specs.len()));
    }
    let flags = if rule.direction() == Direction::Egress { EGRESS } else { 0 };
    Ok(Translation { attr: FlowAttr { flow_type, priority, port, flags }, specs, objects, destination })
}

/// Returns the rule of a flow. `object` returns the meaning of the flow action in the [`Spec::Handle`] with
/// this index. `destination` is the destination of the flow's queue pair, unless the specs drop.
pub fn from_verbs(
    attr: &FlowAttr,
    specs: &[Spec],
    destination: Option<Action>,
    mut object: impl FnMut(usize) -> Option<Action>,
) -> Result<Rule, TranslateError> {
    if attr.flags & !EGRESS != 0 {
        return Err(TranslateError::Flags(attr.flags & !EGRESS));
    }
    let direction = if attr.flags & EGRESS != 0 { Direction::Egress } else { Direction::Ingress };
    let mut headers: Vec<(u8, Item)> = Vec::new();
    let (priority, defaults) = match attr.flow_type {
        FlowType::NORMAL => (attr.priority.into(), Vec::new()),
        FlowType::MC_DEFAULT => (MC_DEFAULT_PRIORITY, multicast()),
        FlowType::ALL_DEFAULT => (ALL_DEFAULT_PRIORITY, Vec::new()),
        FlowType(other) => return Err(TranslateError::FlowType(other)),
    };
    headers.extend(defaults.into_iter().map(|item| (1, item)));
    let mut actions = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        match spec {
            Spec::Tag(tag) => actions.push(Action::Mark(*tag)),
            Spec::Drop => actions.push(Action::Drop),
            Spec::Count(_) => actions.push(Action::Count),
            Spec::Handle(_) => actions.push(object(index).ok_or(TranslateError::UnknownHandle { index })?),
            spec => {
                // The position of an MPLS spec is behind its predecessor; all others may stand in any order.
                let before = index.checked_sub(1).map(|i| &specs[i]);
                headers_of(index, spec, before, &mut headers)?;
            }
        }
    }
    headers.sort_by_key(|(order, item)| (item.inner, *order));
    // A flow drops or delivers; its other actions come before.
    if let Some(at) = actions.iter().position(|action| *action == Action::Drop) {
        let drop = actions.remove(at);
        actions.push(drop);
    } else {
        actions.extend(destination);
    }
    let pattern = headers.into_iter().map(|(_, item)| item).collect();
    Ok(Rule::new(direction, priority, pattern, actions)?)
}

/// Returns the items of a spec: one, or Ethernet and a VLAN tag.
fn headers_of(
    index: usize,
    spec: &Spec,
    before: Option<&Spec>,
    headers: &mut Vec<(u8, Item)>,
) -> Result<(), TranslateError> {
    let Some(&SpecFields { item: kind, parts, .. }) = self::spec_fields(spec) else { return Ok(()) };
    let order = match (kind, before) {
        (ItemKind::Mpls, Some(Spec::Udp { inner, .. } | Spec::Gre { inner, .. })) if *inner == spec.is_inner() => 6,
        (ItemKind::Mpls, _) => 3,
        _ => kind.spec().layer as u8,
    };
    let make = |kind| if spec.is_inner() { Item::new(kind).as_inner() } else { Item::new(kind) };
    let mut item = make(kind);
    let mut tag: Option<Item> = None;
    for all in spec.fields() {
        let parts = || parts.iter().filter(|(name, ..)| *name == all.name).map(|&(_, field, shift)| (field, shift));
        let known = parts().fold(0, |known, (field, shift)| known | ones(field.spec().bits) << shift);
        let strange = all.mask & ones(all.bits) & !known;
        if strange != 0 {
            return Err(TranslateError::MaskBits { index, field: all.name, bits: strange });
        }
        for (field, shift) in parts() {
            let mask = all.mask >> shift & ones(field.spec().bits);
            if mask == 0 {
                continue;
            }
            let part = MaskedValue { value: all.value >> shift & mask, mask };
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
