//! A checked rule: direction, priority, pattern and actions.

use std::fmt;

use super::bits::ones;
use super::items::{mpls, network, tunnel};
use super::reformat::{HeaderEnd, ReformatKind, TEB};
use super::{
    Action, At, Fact, Field, FieldSet, HashFields, Item, ItemKind, Key, Layer, MAX_RSS_QUEUES, Reason, RuleError,
};

/// When a rule is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// As packets come in.
    Ingress,
    /// As packets go out.
    Egress,
}

impl Direction {
    /// How it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// A rule. It is complete and means something: [`Rule::new`] refuses everything else.
///
/// Of the rules of its direction that a packet fits, the one with the lowest priority number runs, and no other; among equal
/// numbers the one that was added first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    direction: Direction,
    priority: u32,
    pattern: Vec<Item>,
    actions: Vec<Action>,
}

/// Why no NIC can run a rule, whatever its capabilities: software gives the rule its meaning all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NicBar {
    /// NICs put headers on as packets go out.
    EncapAtIngress,
    /// NICs take headers off as packets come in.
    DecapAtEgress,
}

impl NicBar {
    /// One line for people.
    pub const fn text(self) -> &'static str {
        match self {
            Self::EncapAtIngress => "encapsulation at ingress: NICs put headers on only as packets go out",
            Self::DecapAtEgress => "decapsulation at egress: NICs take headers off only as packets come in",
        }
    }
}

impl Rule {
    /// Checks everything that is wrong whoever runs the rule.
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

    /// When it is asked.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Lower numbers win.
    pub fn priority(&self) -> u32 {
        self.priority
    }

    /// Headers that a packet must have, the outermost first. An empty pattern fits every packet.
    pub fn pattern(&self) -> &[Item] {
        &self.pattern
    }

    /// What is done, in order.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// The pattern as a closed flat list.
    pub fn fields(&self) -> FieldSet {
        // The same was checked when the rule was made.
        FieldSet::of(&self.pattern).unwrap_or_default()
    }

    /// What keeps the rule out of every NIC, and the action at fault.
    pub fn nic_bar(&self) -> Option<(usize, NicBar)> {
        self.actions.iter().enumerate().find_map(|(i, action)| match (action, self.direction) {
            (Action::Reformat(r), Direction::Ingress) if !r.kind().is_decap() => Some((i, NicBar::EncapAtIngress)),
            (Action::Reformat(r), Direction::Egress) if r.kind().is_decap() => Some((i, NicBar::DecapAtEgress)),
            _ => None,
        })
    }
}

impl fmt::Display for Rule {
    /// The canonical text: [`str::parse`] gives the same rule again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} prio {}: ", self.direction.name(), self.priority)?;
        if self.pattern.is_empty() {
            f.write_str("any")?;
        }
        for (i, item) in self.pattern.iter().enumerate() {
            if i > 0 {
                f.write_str(" / ")?;
            }
            if item.inner && !goes_inside(&self.pattern[..i], item.kind) {
                f.write_str("inner ")?;
            }
            f.write_str(item.kind.spec().name)?;
            for (field, bits) in item.fields() {
                let spec = field.spec();
                write!(f, " {} {}", spec.name, spec.format.print(spec.bits, *bits))?;
            }
        }
        for (i, action) in self.actions.iter().enumerate() {
            write!(f, "{}{action}", if i == 0 { " => " } else { ", " })?;
        }
        Ok(())
    }
}

/// Whether an item behind these belongs to the inner stack without the word `inner`.
pub(super) fn goes_inside(before: &[Item], kind: ItemKind) -> bool {
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
        let refuse = |reason, message: String| Err(RuleError::new(reason, At::Field(index, field), message));
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
        let refuse = |reason, message| Err(RuleError::new(reason, At::Item(index), message));
        if spec.layer == Layer::Outside && item.inner {
            return refuse(Reason::ImpossibleStack, format!("\"{}\" is not inside a tunnel", spec.name));
        }
        let order = match (spec.layer, last) {
            (Layer::Outside, _) => 0,
            (Layer::Link, _) => 1,
            (Layer::Tag, _) => 2,
            (Layer::Label, Some((before, order))) if before.inner == item.inner => match before.kind.spec().layer {
                Layer::Label => order,
                _ if matches!(before.kind, ItemKind::Udp | ItemKind::Gre) => 6,
                Layer::Outside | Layer::Link | Layer::Tag => 3,
                _ => {
                    return refuse(
                        Reason::ImpossibleStack,
                        format!("\"mpls\" stands behind eth, udp or gre, not behind \"{}\"", before.kind.spec().name),
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
            return refuse(Reason::TooMany, "a second label stack among the same headers is not looked at".to_owned());
        }
        let Some((before, behind)) = last.replace((item, order)) else {
            count = 1;
            continue;
        };
        let name = before.kind.spec().name;
        if before.inner != item.inner {
            if before.inner {
                return refuse(
                    Reason::ImpossibleStack,
                    "headers of the outer stack stand before those of the inner one".to_owned(),
                );
            }
            let closed = [ItemKind::Arp, ItemKind::Tcp, ItemKind::Icmp, ItemKind::Icmpv6, ItemKind::Esp];
            if closed.contains(&before.kind) {
                return refuse(Reason::ImpossibleStack, format!("\"{name}\" carries no headers that are looked into"));
            }
            count = 1;
            continue;
        }
        if before.kind == item.kind {
            count += 1;
            if count > spec.most {
                let message = match spec.most {
                    1 => format!("\"{0}\" behind \"{0}\"; for a header inside a tunnel write \"inner {0}\"", spec.name),
                    most => format!("at most {most} times \"{}\" in one stack", spec.name),
                };
                return refuse(Reason::TooMany, message);
            }
            continue;
        }
        count = 1;
        let repeated = spec.layer == Layer::Outside && pattern[..index].iter().any(|i| i.kind == item.kind);
        if order > behind || (spec.layer == Layer::Outside && behind == 0 && !repeated) {
            continue;
        }
        if item.inner && goes_inside(&[Item::new(before.kind)], item.kind) {
            return refuse(
                Reason::TooDeep,
                format!("\"{name}\" is inside a tunnel already; what it carries is not looked into"),
            );
        }
        if spec.layer == Layer::Outside {
            return refuse(Reason::ImpossibleStack, format!("\"{}\" is written once, before the headers", spec.name));
        }
        let hint = if item.inner {
            String::new()
        } else {
            format!("; for a header inside a tunnel write \"inner {}\"", spec.name)
        };
        return refuse(Reason::ImpossibleStack, format!("\"{}\" cannot stand behind \"{name}\"{hint}", spec.name));
    }
    Ok(())
}

/// What is known of the packet while the actions run.
struct Walk<'a> {
    set: &'a FieldSet,
    level: u8,
    tags: u32,
    link: bool,
    reformatted: bool,
}

impl Walk<'_> {
    fn fact(&self, level: u8, fact: Fact) -> Option<u8> {
        let bits = self.set.get(Key::fact(level, fact))?;
        (bits.mask == 0xff).then_some(bits.value as u8)
    }

    fn field(&self, level: u8, field: Field) -> Option<u128> {
        let bits = self.set.get(Key::field(level, field))?;
        (bits.mask == ones(field.spec().bits)).then_some(bits.value)
    }

    fn known_tags(&self, level: u8) -> u32 {
        self.set.get(Key::field(level, Field::EthTags)).map_or(0, |bits| (bits.value as u32).count_ones())
    }

    /// Whether the packet has this header, as far as the pattern tells.
    fn has(&self, kind: ItemKind) -> bool {
        match kind {
            ItemKind::Eth => self.link,
            ItemKind::Vlan => self.tags > 0,
            kind => kind.spec().facts.iter().all(|&(fact, code)| self.fact(self.level, fact) == Some(code)),
        }
    }

    fn ip_version(&self, level: u8) -> Option<u8> {
        self.fact(level, Fact::Network).filter(|v| [network::IPV4, network::IPV6].contains(v))
    }

    /// What the outer tunnel carries: Ethernet, or IP and which version.
    fn carried(&self) -> Option<Carried> {
        let by_type = |ethertype: u128| match ethertype {
            0x0800 => Some(Carried::Ip(4)),
            0x86dd => Some(Carried::Ip(6)),
            t if t == u128::from(TEB) => Some(Carried::Ethernet),
            _ => None,
        };
        let labels =
            self.set.get(Key::fact(0, Fact::Mpls)).is_some_and(|b| b.value & !u128::from(mpls::BEHIND_LINK) != 0);
        let named = match self.fact(0, Fact::Tunnel) {
            Some(tunnel::VXLAN) => Some(Carried::Ethernet),
            Some(tunnel::GENEVE) => self.field(0, Field::GeneveProto).and_then(by_type),
            Some(tunnel::GRE) if !labels => self.field(0, Field::GreProto).and_then(by_type),
            Some(tunnel::VXLAN_GPE) => match self.field(0, Field::GpeNext) {
                Some(1) => Some(Carried::Ip(4)),
                Some(2) => Some(Carried::Ip(6)),
                Some(3) => Some(Carried::Ethernet),
                _ => None,
            },
            _ => match self.field(0, Field::Ipv4Proto).or_else(|| self.field(0, Field::Ipv6Proto)) {
                Some(4) => Some(Carried::Ip(4)),
                Some(41) => Some(Carried::Ip(6)),
                _ => None,
            },
        };
        match (named, self.fact(1, Fact::Link)) {
            (Some(carried), _) => Some(carried),
            (None, Some(1)) => Some(Carried::Ethernet),
            // Labels do not tell what they carry.
            (None, None) if labels => self.ip_version(1).map(Carried::Ip),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Carried {
    Ethernet,
    Ip(u8),
}

fn check_actions(direction: Direction, set: &FieldSet, actions: &[Action]) -> Result<(), RuleError> {
    if actions.is_empty() {
        return Err(RuleError::new(
            Reason::NoAction,
            At::Rule,
            "a rule needs at least one action; \"count\" changes nothing",
        ));
    }
    let mut walk = Walk { set, level: 0, tags: 0, link: true, reformatted: false };
    walk.tags = walk.known_tags(0);
    let mut fate: Option<&Action> = None;
    for (index, action) in actions.iter().enumerate() {
        let refuse = |reason, message: String| Err(RuleError::new(reason, At::Action(index), message));
        let name = action.spec().name;
        if let Some(fate) = fate {
            let fate = fate.spec().name;
            return if action.is_fate() {
                refuse(Reason::SecondFate, format!("\"{fate}\" has decided already where the packet goes"))
            } else {
                refuse(Reason::AfterFate, format!("\"{name}\" behind \"{fate}\" never runs; write it before"))
            };
        }
        if action.is_fate() {
            fate = Some(action);
            if direction == Direction::Egress && !matches!(action, Action::Drop) {
                return refuse(
                    Reason::WrongDirection,
                    format!("\"{name}\" exists only at ingress: at egress the way out is decided"),
                );
            }
        }
        let once = matches!(action, Action::Count | Action::Mark(_) | Action::Limit(_));
        if once && actions[..index].iter().any(|other| other.spec().name == name) {
            return refuse(Reason::Twice, format!("\"{name}\" stands here twice"));
        }
        check_values(index, action)?;
        check_change(index, action, &mut walk)?;
    }
    Ok(())
}

/// Values that the types allow but the language does not.
fn check_values(index: usize, action: &Action) -> Result<(), RuleError> {
    let refuse = |reason, message: &str| Err(RuleError::new(reason, At::Action(index), message));
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
            let settable = super::bits::join(settable);
            let item = field.spec().item.spec().name;
            let known = if settable.is_empty() { "nothing".to_owned() } else { settable };
            refuse(Reason::NotSettable, &format!("{item} {} cannot be set; of {item} there can: {known}", field.name()))
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

/// Actions that change headers: the packet must have what they change.
fn check_change(index: usize, action: &Action, walk: &mut Walk<'_>) -> Result<(), RuleError> {
    let refuse = |reason, message: String| Err(RuleError::new(reason, At::Action(index), message));
    let changes = matches!(
        action,
        Action::Set { .. } | Action::DecTtl | Action::PushVlan(_) | Action::PopVlan | Action::Reformat(_)
    );
    let name = action.spec().name;
    if changes && walk.reformatted {
        return refuse(Reason::Order, format!("\"{name}\" behind \"encap\": write it before, or into the header"));
    }
    match action {
        Action::Set { field, .. } => {
            let kind = field.spec().item;
            if !walk.has(kind) {
                let item = kind.spec().name;
                return refuse(
                    Reason::NoSuchHeader,
                    format!("the pattern does not say that there is {item} here; name \"{item}\" in it"),
                );
            }
        }
        Action::DecTtl if walk.ip_version(walk.level).is_none() => {
            return refuse(
                Reason::NoSuchHeader,
                "the pattern does not say that there is IP here; name \"ipv4\" or \"ipv6\" in it".to_owned(),
            );
        }
        Action::PushVlan(_) => walk.tags += 1,
        Action::PopVlan => {
            let Some(tags) = walk.tags.checked_sub(1) else {
                return refuse(
                    Reason::NoSuchHeader,
                    "the pattern does not say that there is a VLAN tag here; name \"vlan\" in it".to_owned(),
                );
            };
            walk.tags = tags;
        }
        Action::Reformat(reformat) => {
            let version = reformat.layout().and_then(|_| reformat.carried_version());
            let mismatch = |known: Option<u8>| known.zip(version).filter(|(known, version)| known != version);
            if reformat.kind().is_decap() {
                if walk.level > 0 {
                    return refuse(Reason::TooDeep, "only one tunnel can be taken off".to_owned());
                }
                let carried = walk.carried();
                let (fits, inside) = match reformat.kind() {
                    ReformatKind::L2TunnelToL2 => (
                        carried == Some(Carried::Ethernet),
                        "an Ethernet frame: name the tunnel (vxlan), and \"eth\" behind it if it can carry other things",
                    ),
                    _ => (
                        matches!(carried, Some(Carried::Ip(_))),
                        "an IP packet: name the tunnel and its proto (gre proto 0x0800, geneve proto 0x86dd, vxlan-gpe next 1, ipv4 proto 4)",
                    ),
                };
                if !fits {
                    return refuse(
                        Reason::NoSuchHeader,
                        format!("the pattern does not say that there is a tunnel with {inside}"),
                    );
                }
                let inner = match carried {
                    Some(Carried::Ip(inner)) => Some(inner),
                    _ => None,
                };
                if let Some((inner, version)) = mismatch(inner) {
                    return refuse(
                        Reason::Contradiction,
                        format!("the packet inside is IPv{inner}, the new header's EtherType says IPv{version}"),
                    );
                }
                walk.level = 1;
                walk.tags = match reformat.layout() {
                    Some(layout) => u32::from(layout.tags),
                    None => walk.known_tags(1),
                };
            } else {
                let inner = walk.ip_version(walk.level);
                if reformat.kind() == ReformatKind::L2ToL3Tunnel {
                    if inner.is_none() {
                        return refuse(
                            Reason::NoSuchHeader,
                            "encap l3 takes IP packets; name \"ipv4\" or \"ipv6\" in the pattern".to_owned(),
                        );
                    }
                    if let Some((inner, version)) = mismatch(inner) {
                        return refuse(
                            Reason::Contradiction,
                            format!("the packet is IPv{inner}, the tunnel header says IPv{version}"),
                        );
                    }
                }
                walk.reformatted = true;
            }
        }
        _ => {}
    }
    Ok(())
}

impl super::Reformat {
    /// The IP version that the header says it carries, if it says one.
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
