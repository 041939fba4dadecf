//! A checked rule: direction, priority, pattern and actions.

use std::fmt;

use wirepath_packet::PortId;

use super::items::{mpls, network, tunnel};
use super::masked_value::{Format, MaskedValue, Ports, ones};
use super::reformat::{HeaderEnd, ReformatKind, TEB};
use super::{
    Action, ErrorLocation, Field, FieldSet, HashFields, HeaderType, Item, ItemKind, Key, Layer, MAX_RSS_QUEUES, Reason,
    RuleError,
};

/// Direction of the packets that a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Received packets.
    Ingress,
    /// Packets to be sent.
    Egress,
}

impl Direction {
    /// Returns the written name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// A complete and valid rule: [`Rule::new`] refuses all others.
///
/// A packet runs only one of the rules of its direction that it matches: the one with the lowest priority number. If
/// two have the same number, the one that was added first runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    direction: Direction,
    priority: u32,
    pattern: Vec<Item>,
    actions: Vec<Action>,
}

/// Reasons why a rule runs only in software, whatever a NIC can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SoftwareOnly {
    /// NICs encapsulate only packets that they send.
    EncapAtIngress,
    /// NICs decapsulate only packets that they receive.
    DecapAtEgress,
}

impl SoftwareOnly {
    /// Returns a one-line description.
    pub const fn text(self) -> &'static str {
        match self {
            Self::EncapAtIngress => "encapsulation at ingress: NICs encapsulate only packets that they send",
            Self::DecapAtEgress => "decapsulation at egress: NICs decapsulate only packets that they receive",
        }
    }
}

impl Rule {
    /// Checks and creates a rule. Only errors that hold for every engine are refused.
    pub fn new(
        direction: Direction,
        priority: u32,
        pattern: Vec<Item>,
        actions: Vec<Action>,
    ) -> Result<Self, RuleError> {
        for (index, item) in pattern.iter().enumerate() {
            check_fields(index, item)?;
        }
        check_stack(&pattern)?;
        let set = FieldSet::of(&pattern)?;
        check_actions(direction, &set, &actions)?;
        Ok(Self { direction, priority, pattern, actions })
    }

    /// Returns the direction.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns the priority. Lower numbers take precedence.
    pub fn priority(&self) -> u32 {
        self.priority
    }

    /// Returns the required headers, outermost first. An empty pattern matches every packet.
    pub fn pattern(&self) -> &[Item] {
        &self.pattern
    }

    /// Returns the actions, in the order in which they run.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Returns the pattern as a closed flat list.
    pub fn fields(&self) -> FieldSet {
        // `Rule::new` has checked the pattern, so this cannot fail.
        FieldSet::of(&self.pattern).unwrap_or_default()
    }

    /// Returns why the rule runs only in software, and the index of the action that causes it.
    pub fn software_only(&self) -> Option<(usize, SoftwareOnly)> {
        self.actions.iter().enumerate().find_map(|(i, action)| match (action, self.direction) {
            (Action::Reformat(r), Direction::Ingress) if !r.kind().is_decap() => {
                Some((i, SoftwareOnly::EncapAtIngress))
            }
            (Action::Reformat(r), Direction::Egress) if r.kind().is_decap() => Some((i, SoftwareOnly::DecapAtEgress)),
            _ => None,
        })
    }
}

/// Text of a rule with the names of ports instead of their numbers. [`Rule::parse`] with the same names reads back the
/// same rule.
#[derive(Clone, Copy, Debug)]
pub struct NamedRule<'a> {
    rule: &'a Rule,
    ports: Ports<'a>,
}

impl fmt::Display for NamedRule<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rule.write(f, self.ports)
    }
}

impl fmt::Display for Rule {
    /// Writes the canonical text. [`str::parse`] reads back the same rule.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, Ports::default())
    }
}

impl Rule {
    /// Returns the text of the rule with the names of ports.
    pub fn named<'a>(&'a self, ports: Ports<'a>) -> NamedRule<'a> {
        NamedRule { rule: self, ports }
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, ports: Ports<'_>) -> fmt::Result {
        write!(f, "{} prio {}: ", self.direction.name(), self.priority)?;
        if self.pattern.is_empty() {
            f.write_str("any")?;
        }
        for (i, item) in self.pattern.iter().enumerate() {
            if i > 0 {
                f.write_str(" / ")?;
            }
            if item.inner && !is_implicitly_inner(&self.pattern[..i], item.kind) {
                f.write_str("inner ")?;
            }
            f.write_str(item.kind.spec().name)?;
            for (field, bits) in item.fields() {
                let spec = field.spec();
                let name = u16::try_from(bits.value).ok().and_then(PortId::checked).and_then(|id| ports.name(id));
                match name.filter(|_| *bits == MaskedValue::exact(bits.value, spec.bits)) {
                    Some(name) if spec.format == Format::Port => write!(f, " {} {name}", spec.name)?,
                    _ => write!(f, " {} {}", spec.name, spec.format.print(spec.bits, *bits))?,
                }
            }
        }
        for (i, action) in self.actions.iter().enumerate() {
            f.write_str(if i == 0 { " => " } else { ", " })?;
            match action {
                Action::Redirect(port) | Action::Mirror(port) if ports.name(*port).is_some() => {
                    write!(f, "{} {}", action.spec().name, ports.name(*port).unwrap_or_default())?;
                }
                action => write!(f, "{action}")?,
            }
        }
        Ok(())
    }
}

/// True if an item after `before` belongs to the inner stack without the word `inner`.
pub(super) fn is_implicitly_inner(before: &[Item], kind: ItemKind) -> bool {
    let Some(last) = before.last() else { return false };
    last.inner
        || match last.kind {
            ItemKind::Vxlan | ItemKind::VxlanGpe | ItemKind::Geneve => true,
            ItemKind::Gre => kind != ItemKind::Mpls,
            ItemKind::Mpls => {
                match before.iter().rev().find(|item| item.kind != ItemKind::Mpls).map(|item| item.kind) {
                    Some(ItemKind::Udp | ItemKind::Gre) => kind != ItemKind::Mpls,
                    // An Ethernet pseudowire.
                    _ => kind == ItemKind::Eth,
                }
            }
            _ => false,
        }
}

fn check_fields(index: usize, item: &Item) -> Result<(), RuleError> {
    for &(field, bits) in item.fields() {
        let spec = field.spec();
        let refuse = |reason, message: String| Err(RuleError::new(reason, ErrorLocation::Field(index, field), message));
        if spec.item != item.kind {
            let message =
                format!("{} is a field of {}, not of {}", spec.name, spec.item.spec().name, item.kind.spec().name);
            return refuse(Reason::WrongField, message);
        }
        if bits.mask & !ones(spec.bits) != 0 {
            return refuse(
                Reason::MaskOutsideField,
                format!("mask {:#x} has bits outside the field of {} bits", bits.mask, spec.bits),
            );
        }
        if bits.value & !bits.mask != 0 {
            return refuse(
                Reason::ValueOutsideMask,
                format!("value {:#x} has bits outside its mask {:#x}", bits.value, bits.mask),
            );
        }
    }
    Ok(())
}

fn check_stack(pattern: &[Item]) -> Result<(), RuleError> {
    let mut last: Option<(&Item, u8)> = None;
    let mut count = 0;
    for (index, item) in pattern.iter().enumerate() {
        let spec = item.kind.spec();
        let refuse = |reason, message| Err(RuleError::new(reason, ErrorLocation::Item(index), message));
        if spec.layer == Layer::Metadata && item.inner {
            return refuse(Reason::ImpossibleStack, format!("\"{}\" is not inside a tunnel", spec.name));
        }
        let order = match (spec.layer, last) {
            (Layer::Metadata, _) => 0,
            (Layer::Link, _) => 1,
            (Layer::Tag, _) => 2,
            (Layer::Label, Some((before, order))) if before.inner == item.inner => match before.kind.spec().layer {
                Layer::Label => order,
                _ if matches!(before.kind, ItemKind::Udp | ItemKind::Gre) => 6,
                Layer::Metadata | Layer::Link | Layer::Tag => 3,
                _ => {
                    return refuse(
                        Reason::ImpossibleStack,
                        format!("\"mpls\" must follow eth, udp or gre, not \"{}\"", before.kind.spec().name),
                    );
                }
            },
            (Layer::Label, _) => 3,
            (Layer::Network, _) => 4,
            (Layer::Transport, _) => 5,
            (Layer::Tunnel, _) => 6,
        };
        let labelled = |other: &Item| other.kind == ItemKind::Mpls && other.inner == item.inner;
        let another = order == 6 && spec.layer == Layer::Label && last.is_some_and(|(b, _)| b.kind != ItemKind::Mpls);
        if another && pattern[..index].iter().any(labelled) {
            return refuse(Reason::TooMany, "a second label stack in the same header stack is not parsed".to_owned());
        }
        let Some((before, last_order)) = last.replace((item, order)) else {
            count = 1;
            continue;
        };
        let name = before.kind.spec().name;
        if before.inner != item.inner {
            if before.inner {
                return refuse(
                    Reason::ImpossibleStack,
                    "headers of the outer stack must precede those of the inner stack".to_owned(),
                );
            }
            let closed = [ItemKind::Arp, ItemKind::Tcp, ItemKind::Icmp, ItemKind::Icmpv6, ItemKind::Esp];
            if closed.contains(&before.kind) {
                return refuse(Reason::ImpossibleStack, format!("\"{name}\" carries no headers that are parsed"));
            }
            count = 1;
            continue;
        }
        if before.kind == item.kind {
            count += 1;
            if count > spec.max_count {
                let message = match spec.max_count {
                    1 => {
                        format!("\"{0}\" follows \"{0}\"; for a header inside a tunnel write \"inner {0}\"", spec.name)
                    }
                    most => format!("at most {most} \"{}\" items in one stack", spec.name),
                };
                return refuse(Reason::TooMany, message);
            }
            continue;
        }
        count = 1;
        let repeated = spec.layer == Layer::Metadata && pattern[..index].iter().any(|i| i.kind == item.kind);
        if order > last_order || (spec.layer == Layer::Metadata && last_order == 0 && !repeated) {
            continue;
        }
        if item.inner && is_implicitly_inner(&[Item::new(before.kind)], item.kind) {
            return refuse(
                Reason::TooDeep,
                format!("\"{name}\" is inside a tunnel already; the headers that it carries are not parsed"),
            );
        }
        if spec.layer == Layer::Metadata {
            return refuse(Reason::ImpossibleStack, format!("\"{}\" is written once, before the headers", spec.name));
        }
        let hint = if item.inner {
            String::new()
        } else {
            format!("; for a header inside a tunnel write \"inner {}\"", spec.name)
        };
        return refuse(Reason::ImpossibleStack, format!("\"{}\" cannot follow \"{name}\"{hint}", spec.name));
    }
    Ok(())
}

/// Headers that the packet has while the actions run.
struct PacketState<'a> {
    set: &'a FieldSet,
    level: u8,
    tags: u32,
    link: bool,
    reformatted: bool,
}

impl PacketState<'_> {
    fn header_type(&self, level: u8, fact: HeaderType) -> Option<u8> {
        let bits = self.set.get(Key::header_type(level, fact))?;
        (bits.mask == 0xff).then_some(bits.value as u8)
    }

    fn field(&self, level: u8, field: Field) -> Option<u128> {
        let bits = self.set.get(Key::field(level, field))?;
        (bits.mask == ones(field.spec().bits)).then_some(bits.value)
    }

    fn known_tags(&self, level: u8) -> u32 {
        self.set.get(Key::field(level, Field::EthTags)).map_or(0, |bits| (bits.value as u32).count_ones())
    }

    /// True if the pattern guarantees that the packet has this header.
    fn has(&self, kind: ItemKind) -> bool {
        match kind {
            ItemKind::Eth => self.link,
            ItemKind::Vlan => self.tags > 0,
            kind => {
                kind.spec().header_types.iter().all(|&(fact, code)| self.header_type(self.level, fact) == Some(code))
            }
        }
    }

    fn ip_version(&self, level: u8) -> Option<u8> {
        self.header_type(level, HeaderType::Network).filter(|v| [network::IPV4, network::IPV6].contains(v))
    }

    /// Returns the payload of the outer tunnel, if it is known.
    fn carried(&self) -> Option<TunnelPayload> {
        let by_type = |ethertype: u128| match ethertype {
            0x0800 => Some(TunnelPayload::Ip(4)),
            0x86dd => Some(TunnelPayload::Ip(6)),
            t if t == u128::from(TEB) => Some(TunnelPayload::Ethernet),
            _ => None,
        };
        let labels = self
            .set
            .get(Key::header_type(0, HeaderType::Mpls))
            .is_some_and(|b| b.value & !u128::from(mpls::AFTER_ETHERNET) != 0);
        let named = match self.header_type(0, HeaderType::Tunnel) {
            Some(tunnel::VXLAN) => Some(TunnelPayload::Ethernet),
            Some(tunnel::GENEVE) => self.field(0, Field::GeneveProto).and_then(by_type),
            Some(tunnel::GRE) if !labels => self.field(0, Field::GreProto).and_then(by_type),
            Some(tunnel::VXLAN_GPE) => match self.field(0, Field::GpeNext) {
                Some(1) => Some(TunnelPayload::Ip(4)),
                Some(2) => Some(TunnelPayload::Ip(6)),
                Some(3) => Some(TunnelPayload::Ethernet),
                _ => None,
            },
            _ => match self.field(0, Field::Ipv4Proto).or_else(|| self.field(0, Field::Ipv6Proto)) {
                Some(4) => Some(TunnelPayload::Ip(4)),
                Some(41) => Some(TunnelPayload::Ip(6)),
                _ => None,
            },
        };
        match (named, self.header_type(1, HeaderType::Link)) {
            (Some(carried), _) => Some(carried),
            (None, Some(1)) => Some(TunnelPayload::Ethernet),
            // Labels do not tell their payload.
            (None, None) if labels => self.ip_version(1).map(TunnelPayload::Ip),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TunnelPayload {
    Ethernet,
    Ip(u8),
}

fn check_actions(direction: Direction, set: &FieldSet, actions: &[Action]) -> Result<(), RuleError> {
    if actions.is_empty() {
        return Err(RuleError::new(
            Reason::NoAction,
            ErrorLocation::Rule,
            "a rule needs at least one action, such as \"count\"",
        ));
    }
    let mut state = PacketState { set, level: 0, tags: 0, link: true, reformatted: false };
    state.tags = state.known_tags(0);
    let mut terminating: Option<&Action> = None;
    for (index, action) in actions.iter().enumerate() {
        let refuse = |reason, message: String| Err(RuleError::new(reason, ErrorLocation::Action(index), message));
        let name = action.spec().name;
        if let Some(first) = terminating {
            let first = first.spec().name;
            return if action.is_terminating() {
                refuse(Reason::SecondTerminating, format!("\"{first}\" already decides the destination of the packet"))
            } else {
                refuse(
                    Reason::AfterTerminating,
                    format!("\"{name}\" after \"{first}\" never runs; write it before \"{first}\""),
                )
            };
        }
        if action.is_terminating() {
            terminating = Some(action);
            if direction == Direction::Egress && !matches!(action, Action::Drop) {
                return refuse(
                    Reason::WrongDirection,
                    format!("\"{name}\" exists only at ingress: at egress the output port is decided already"),
                );
            }
        }
        let once = matches!(action, Action::Count | Action::Mark(_) | Action::Limit(_));
        if once && actions[..index].iter().any(|other| other.spec().name == name) {
            return refuse(Reason::Twice, format!("\"{name}\" is given twice"));
        }
        check_values(index, action)?;
        check_change(index, action, &mut state)?;
    }
    Ok(())
}

/// Checks values that the types allow but the language does not.
fn check_values(index: usize, action: &Action) -> Result<(), RuleError> {
    let refuse = |reason, message: &str| Err(RuleError::new(reason, ErrorLocation::Action(index), message));
    match action {
        Action::Rss(rss) if rss.queues.is_empty() || rss.queues.len() > MAX_RSS_QUEUES => {
            refuse(Reason::OutOfRange, "rss needs 1 to 512 queues")
        }
        Action::Rss(rss) if rss.on.0 & !HashFields::INNER == 0 || rss.on.0 > 63 => {
            refuse(Reason::Missing, "rss needs something to hash: src, dst, sport, dport or spi")
        }
        Action::Mark(mark) if *mark > 0xff_ffff => refuse(Reason::OutOfRange, "a mark has 24 bits: 0 to 16777215"),
        Action::Set { field, value } if value & !ones(field.spec().bits) != 0 => {
            refuse(Reason::OutOfRange, "the value does not fit the field")
        }
        Action::Set { field, .. } if !field.spec().settable => {
            let settable = super::FIELDS.iter().filter(|s| s.item == field.spec().item && s.settable).map(|s| s.name);
            let settable = super::masked_value::join(settable);
            let item = field.spec().item.spec().name;
            let known = if settable.is_empty() { "none".to_owned() } else { settable };
            refuse(
                Reason::NotSettable,
                &format!("{item} {} cannot be set; settable fields of {item}: {known}", field.name()),
            )
        }
        Action::PushVlan(tag) if tag.id() > wirepath_wire::vlan::MAX_ID => {
            refuse(Reason::OutOfRange, "VLAN id 4095 is reserved")
        }
        Action::PushVlan(tag) if !tag.tpid.is_vlan() => {
            refuse(Reason::OutOfRange, "tpid is 0x8100 (802.1Q) or 0x88a8 (802.1ad)")
        }
        Action::Limit(limit) if limit.rate == 0 || limit.burst == 0 => {
            refuse(Reason::OutOfRange, "rate and burst must be above 0; to let nothing through write \"drop\"")
        }
        _ => Ok(()),
    }
}

/// Checks that the packet has the headers that an action changes.
fn check_change(index: usize, action: &Action, state: &mut PacketState<'_>) -> Result<(), RuleError> {
    let refuse = |reason, message: String| Err(RuleError::new(reason, ErrorLocation::Action(index), message));
    let changes = matches!(
        action,
        Action::Set { .. } | Action::DecTtl | Action::PushVlan(_) | Action::PopVlan | Action::Reformat(_)
    );
    let name = action.spec().name;
    if changes && state.reformatted {
        return refuse(
            Reason::Order,
            format!("\"{name}\" after \"encap\": write it before \"encap\", or change the header bytes"),
        );
    }
    match action {
        Action::Set { field, .. } => {
            let kind = field.spec().item;
            if !state.has(kind) {
                let item = kind.spec().name;
                return refuse(
                    Reason::NoSuchHeader,
                    format!("the pattern does not require {item} here; add \"{item}\" to it"),
                );
            }
        }
        Action::DecTtl if state.ip_version(state.level).is_none() => {
            return refuse(
                Reason::NoSuchHeader,
                "the pattern does not require IP here; add \"ipv4\" or \"ipv6\" to it".to_owned(),
            );
        }
        Action::PushVlan(_) => state.tags += 1,
        Action::PopVlan => {
            let Some(tags) = state.tags.checked_sub(1) else {
                return refuse(
                    Reason::NoSuchHeader,
                    "the pattern does not require a VLAN tag here; add \"vlan\" to it".to_owned(),
                );
            };
            state.tags = tags;
        }
        Action::Reformat(reformat) => {
            let version = reformat.layout().and_then(|_| reformat.carried_version());
            let mismatch = |known: Option<u8>| known.zip(version).filter(|(known, version)| known != version);
            if reformat.kind().is_decap() {
                if state.level > 0 {
                    return refuse(Reason::TooDeep, "only one tunnel can be decapsulated".to_owned());
                }
                let carried = state.carried();
                let (fits, inside) = match reformat.kind() {
                    ReformatKind::L2TunnelToL2 => (
                        carried == Some(TunnelPayload::Ethernet),
                        "an Ethernet frame: add the tunnel (vxlan), and \"eth\" after it if its payload type is open",
                    ),
                    _ => (
                        matches!(carried, Some(TunnelPayload::Ip(_))),
                        "an IP packet: add the tunnel and its payload type (gre proto 0x0800, geneve proto 0x86dd, \
                         vxlan-gpe next 1, ipv4 proto 4)",
                    ),
                };
                if !fits {
                    return refuse(
                        Reason::NoSuchHeader,
                        format!("the pattern does not require a tunnel with {inside}"),
                    );
                }
                let inner = match carried {
                    Some(TunnelPayload::Ip(inner)) => Some(inner),
                    _ => None,
                };
                if let Some((inner, version)) = mismatch(inner) {
                    return refuse(
                        Reason::Contradiction,
                        format!(
                            "the inner packet is IPv{inner}, but the new header's EtherType is that of IPv{version}"
                        ),
                    );
                }
                state.level = 1;
                state.tags = match reformat.layout() {
                    Some(layout) => u32::from(layout.tags),
                    None => state.known_tags(1),
                };
            } else {
                let inner = state.ip_version(state.level);
                if reformat.kind() == ReformatKind::L2ToL3Tunnel {
                    if inner.is_none() {
                        return refuse(
                            Reason::NoSuchHeader,
                            "encap l3 needs an IP packet; add \"ipv4\" or \"ipv6\" to the pattern".to_owned(),
                        );
                    }
                    if let Some((inner, version)) = mismatch(inner) {
                        return refuse(
                            Reason::Contradiction,
                            format!("the packet is IPv{inner}, but the tunnel header announces IPv{version}"),
                        );
                    }
                }
                state.reformatted = true;
            }
        }
        _ => {}
    }
    Ok(())
}

impl super::Reformat {
    /// Returns the IP version of the payload, if the header announces one.
    pub fn carried_version(&self) -> Option<u8> {
        let layout = self.layout()?;
        let at = |offset: u8, n: usize| self.bytes().get(usize::from(offset) + n).copied();
        let by_type = |high: Option<u8>, low: Option<u8>| match (high?, low?) {
            (0x08, 0x00) => Some(4),
            (0x86, 0xdd) => Some(6),
            _ => None,
        };
        match layout.end {
            HeaderEnd::Link => by_type(at(layout.l3 - 2, 0), at(layout.l3 - 1, 0)),
            HeaderEnd::Gre | HeaderEnd::Geneve => by_type(at(layout.tunnel, 2), at(layout.tunnel, 3)),
            HeaderEnd::VxlanGpe => match at(layout.tunnel, 3) {
                Some(1) => Some(4),
                Some(2) => Some(6),
                _ => None,
            },
            HeaderEnd::Ip => match at(layout.l3, if layout.ip_version == 4 { 9 } else { 6 }) {
                Some(4) => Some(4),
                Some(41) => Some(6),
                _ => None,
            },
            HeaderEnd::Vxlan | HeaderEnd::Mpls => None,
        }
    }
}
