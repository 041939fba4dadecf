//! Translation of a rule for a device: the part that the device can run, and the obstacle if it cannot run
//! everything.

use std::fmt;

use wirepath_flow::{
    Action, Direction, Field, FieldSet, HeaderEnd, Item, ItemKind, Key, KeyKind, LEVELS, MaskedValue, Reformat, Rule,
};
use wirepath_packet::PortId;
use wirepath_pmd::port::hardware::{
    CountingCapabilities, DestinationKind, ItemCapability, PatternText, RESERVED_TAGS, ReformatCapability,
    RuleCapabilities, RuleDestination, TableCapabilities, TunnelName,
};
use wirepath_wire::{IpProtocol, Tunnel, Tunnels, gre};

/// The part of a rule that prevents offload, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// Item, field or action as it is written, or another subject.
    pub what: String,
    /// Reason that prevents offload.
    pub why: String,
}

impl Obstacle {
    pub(super) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

/// An encapsulation that a program leaves to a NIC by [`super::super::RuleControl::add_implicit_encap`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImplicitEncap {
    /// The outer headers.
    pub header: Reformat,
    /// True if the low byte of the GRE key may have any value, as the FlowID of NVGRE (RFC 7637 section 3.2).
    pub has_flow_id: bool,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

/// Returns the text of an action in a reason. The rule beside the reason names the port of an action.
fn action_text(action: &Action) -> String {
    match action {
        Action::Redirect(_) | Action::Mirror(_) => action.spec().name.to_owned(),
        other => other.to_string(),
    }
}

/// Actions that workers run on the packets of a rule that is in the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RemainingActions {
    /// None: the packets do not arrive at the workers.
    None,
    /// Only these actions, which use no headers.
    Only(Vec<Action>),
    /// All actions: the device only matched the packet.
    All,
}

/// Translation of a rule for a device.
#[derive(Clone, Debug)]
pub(super) struct OffloadRule {
    /// Patterns of packets that match the rule but must be left to software. They are installed one level
    /// above it.
    pub(super) guards: Vec<Vec<Item>>,
    pub(super) pattern: Vec<Item>,
    /// Keys that the device pattern requires beyond the rule. Packets without them are left to software.
    pub(super) extra: Vec<(Key, MaskedValue)>,
    pub(super) actions: Vec<Action>,
    pub(super) destination: RuleDestination,
    pub(super) rest: RemainingActions,
    /// True if the device counts. Otherwise the workers count the packets on arrival.
    pub(super) counted: bool,
    /// True if the outer headers must be valid (lengths and checksums). Other packets are left to software.
    pub(super) require_integrity: bool,
    /// Reason why not all of the rule is in the device.
    pub(super) split: Option<Obstacle>,
}

impl OffloadRule {
    /// Describes the packets of the rule that the device leaves to software.
    pub(super) fn left(&self) -> Option<String> {
        let text = |item: Item| PatternText::from(vec![item]);
        let mut left = Vec::new();
        for guard in &self.guards {
            let more = guard.iter().filter(|item| !self.pattern.contains(item));
            left.extend(more.map(|item| format!("with \"{}\"", text(item.clone()))));
        }
        for (key, bits) in &self.extra {
            if let KeyKind::Field(field) = key.kind {
                left.push(format!("without \"{}\"", text(Item::new(field.spec().item).with(field, *bits))));
            }
        }
        if self.require_integrity {
            left.push("with wrong outer lengths or checksums".to_owned());
        }
        (!left.is_empty()).then(|| left.join(", or "))
    }

    /// Returns the number of levels that the rule takes.
    pub(super) fn span(&self) -> u8 {
        1 + u8::from(!self.guards.is_empty())
    }
}

/// The capabilities of a port's rule hardware, prepared for checks.
#[derive(Debug)]
pub(super) struct CapabilityCheck {
    pub(super) can: RuleCapabilities,
    pub(super) port: PortId,
    tunnels: Tunnels,
    /// Keys that the items of the ingress and egress tables imply.
    implied: [Vec<FieldSet>; 2],
    /// Keys that the items for counting ingress rules imply.
    implied_counting: Vec<FieldSet>,
}

/// Returns all keys that a pattern requires, including implied ones.
pub(super) fn required_fields(pattern: &[Item]) -> FieldSet {
    let rule = Rule::new(Direction::Egress, 0, pattern.to_vec(), vec![Action::Count]);
    rule.map(|rule| rule.fields()).unwrap_or_default()
}

impl CapabilityCheck {
    pub(super) fn new(can: RuleCapabilities, port: PortId, tunnels: Tunnels) -> Self {
        let implied = |items: &[ItemCapability]| items.iter().map(|it| required_fields(it.implies.items())).collect();
        let of = |table: Option<&TableCapabilities>| table.map_or_else(Vec::new, |table| implied(&table.items));
        let counting = can.ingress.as_ref().and_then(|table| table.counting.as_ref());
        let implied_counting = counting.map_or_else(Vec::new, |counting| implied(&counting.items));
        let implied = [of(can.ingress.as_ref()), of(can.egress.as_ref())];
        Self { can, port, tunnels, implied, implied_counting }
    }

    /// Makes a check for the same port with other capabilities.
    pub(super) fn with(&self, can: RuleCapabilities) -> Self {
        Self::new(can, self.port, self.tunnels)
    }

    /// Returns the first level for rules of a direction. Excluded patterns are above all rules.
    pub(super) fn first_level(&self, direction: Direction) -> u16 {
        self.can.table(direction).map_or(0, |table| u16::from(!table.excluded_patterns.is_empty()))
    }

    /// Returns the patterns that the device leaves to software before any rule is matched.
    pub(super) fn excluded_patterns(&self, direction: Direction) -> &[PatternText] {
        self.can.table(direction).map_or(&[], |table| &table.excluded_patterns)
    }

    /// Translates a rule for the device. `set` is what the rule requires. `implicit` marks an implicit rule, which
    /// is fully offloaded or not installed, and has no counters.
    pub(super) fn fit(&self, rule: &Rule, set: &FieldSet, implicit: bool) -> Result<OffloadRule, Obstacle> {
        let direction = rule.direction();
        let Some(table) = self.can.table(direction) else {
            let device = &self.can.device;
            return Err(Obstacle::new(direction.name(), format!("{device} has no table for rules of this direction")));
        };
        if let Some((index, bar)) = rule.software_only() {
            return Err(Obstacle::new(action_text(&rule.actions()[index]), bar.text()));
        }
        match direction {
            Direction::Ingress => {
                let pattern = self.pattern(rule, set, &table.items, &self.implied[0])?;
                match self.ingress(rule, set, &pattern, table, implicit) {
                    Ok(fit) => Ok(fit),
                    Err(obstacle) if implicit => Err(obstacle),
                    Err(obstacle) => self.split(pattern, obstacle, table),
                }
            }
            Direction::Egress => self.egress(rule, table),
        }
    }

    /// Translates a rule that the device matches and tags, with all actions in software.
    fn split(
        &self,
        pattern: Vec<Item>,
        obstacle: Obstacle,
        table: &TableCapabilities,
    ) -> Result<OffloadRule, Obstacle> {
        if !table.actions.destinations.contains(&DestinationKind::Next) {
            return Err(obstacle);
        }
        self.tags(&obstacle)?;
        Ok(OffloadRule {
            guards: Vec::new(),
            pattern,
            extra: Vec::new(),
            actions: Vec::new(),
            destination: RuleDestination::Next,
            rest: RemainingActions::All,
            counted: false,
            require_integrity: false,
            split: Some(obstacle),
        })
    }

    /// Checks that the device can tag packets. The error is `before`.
    fn tags(&self, before: &Obstacle) -> Result<(), Obstacle> {
        if self.can.max_tag() > RESERVED_TAGS[0] { Ok(()) } else { Err(before.clone()) }
    }

    /// Translates the pattern of the rule into items of the device.
    fn pattern(
        &self,
        rule: &Rule,
        set: &FieldSet,
        items: &[ItemCapability],
        implied: &[FieldSet],
    ) -> Result<Vec<Item>, Obstacle> {
        let (pattern, added) = self.with_tunnel_ports(rule.pattern())?;
        let closed;
        let set = if added {
            closed = required_fields(&pattern);
            &closed
        } else {
            set
        };
        let mut out = Vec::with_capacity(pattern.len());
        let mut counts = [[0u8; 32]; LEVELS as usize];
        for (index, item) in pattern.iter().enumerate() {
            let name = Self::name(item);
            if item.kind == ItemKind::Port {
                // The rule is installed only on this port, so the device need not compare it.
                continue;
            }
            let found = items.iter().position(|it| it.kind == item.kind && it.inner == item.inner);
            let Some(at) = found else {
                return Err(Obstacle::new(name, format!("{} cannot match it", self.device())));
            };
            let (can, implied) = (&items[at], &implied[at]);
            let nth = &mut counts[usize::from(item.inner)][item.kind as usize % 32];
            if *nth >= can.max_count {
                return Err(Obstacle::new(
                    name,
                    format!("{} matches at most {} of them", self.device(), can.max_count),
                ));
            }
            if !wirepath_flow::covers(implied, set) {
                let is_excluded =
                    |&(key, bits): &(Key, MaskedValue)| set.get(key).is_some_and(|it| it.and(bits).is_none());
                let port = udp_tunnel(item.kind).and_then(|tunnel| self.tunnels.port_of(tunnel));
                let why = match port {
                    _ if !implied.list().iter().any(is_excluded) => "which the rule must name".to_owned(),
                    Some(port) => format!("but here the tunnel has UDP port {port}"),
                    None => "which the rule excludes".to_owned(),
                };
                let why = format!("{} matches it only in packets with \"{}\", {why}", self.device(), can.implies);
                return Err(Obstacle::new(name, why));
            }
            let before = |kind: &ItemKind| pattern[..index].iter().any(|it| it.kind == *kind && it.inner == item.inner);
            if !can.behind.is_empty() && !can.behind.iter().any(before) {
                let names: Vec<&str> = can.behind.iter().map(|kind| kind.spec().name).collect();
                let why =
                    format!("{} matches it only behind {}; the rule must name it", self.device(), names.join(" or "));
                return Err(Obstacle::new(name, why));
            }
            out.push(self.fields(item, *nth, can, implied)?);
            *nth += 1;
        }
        Ok(out)
    }

    /// Returns the item with the fields that the device must compare.
    fn fields(&self, item: &Item, nth: u8, can: &ItemCapability, implied: &FieldSet) -> Result<Item, Obstacle> {
        let mut out = if item.inner { Item::new(item.kind).as_inner() } else { Item::new(item.kind) };
        for &(field, mut bits) in item.fields() {
            let width = field.spec().bits;
            let allows = |mask| can.field(field).is_some_and(|masks| masks.allow(mask, width));
            // A packet that is not a fragment is not a later fragment either, so the first bit is enough.
            let whole = matches!(field, Field::Ipv4Frag | Field::Ipv6Frag) && bits == MaskedValue::exact(0, 2);
            if whole && !allows(bits.mask) {
                bits = MaskedValue { value: 0, mask: 1 };
            }
            let allowed = allows(bits.mask);
            if allowed {
                out = out.with(field, bits);
                continue;
            }
            let key = Key { level: u8::from(item.inner), nth, kind: KeyKind::Field(field) };
            // The device implies this value.
            if implied.get(key).is_some_and(|other| bits.covers(other)) {
                continue;
            }
            let text = field.spec().format.print(width, bits);
            let what = format!("{} {} {text}", Self::name(item), field.name());
            let why = match can.field(field) {
                None => format!("{} cannot compare this field", self.device()),
                Some(_) => format!("{} cannot compare this field under such a mask", self.device()),
            };
            return Err(Obstacle::new(what, why));
        }
        Ok(out)
    }

    fn name(item: &Item) -> String {
        let inner = if item.inner { "inner " } else { "" };
        format!("{inner}{}", item.kind.spec().name)
    }

    fn device(&self) -> String {
        format!("{} ({})", self.can.device, self.can.backend.name())
    }

    /// Adds the UDP port of the tunnel to the pattern. The rule language takes it from the parser's
    /// configuration, which a device does not have.
    fn with_tunnel_ports(&self, pattern: &[Item]) -> Result<(Vec<Item>, bool), Obstacle> {
        let mut pattern = pattern.to_vec();
        let of_item = |(at, item): (usize, &Item)| Some((at, udp_tunnel(item.kind).filter(|_| !item.inner)?));
        let tunnel = pattern.iter().enumerate().find_map(of_item);
        if tunnel.is_none() && pattern.iter().any(|item| item.inner) {
            let named = |item: &Item| match item.kind {
                ItemKind::Gre => true,
                ItemKind::Ipv4 => is_ip_in_ip(item.get(Field::Ipv4Proto)),
                ItemKind::Ipv6 => is_ip_in_ip(item.get(Field::Ipv6Proto)),
                _ => false,
            };
            if !pattern.iter().any(|item| !item.inner && named(item)) {
                let first = pattern.iter().find(|item| item.inner).map(Self::name).unwrap_or_default();
                return Err(Obstacle::new(first, "the rule does not name the tunnel around it"));
            }
        }
        let Some((at, kind)) = tunnel else { return Ok((pattern, false)) };
        let name = Self::name(&pattern[at]);
        let Some(port) = self.tunnels.port_of(kind) else {
            return Err(Obstacle::new(name, "no UDP port is configured for this tunnel"));
        };
        let port = MaskedValue::exact(port.into(), 16);
        match at.checked_sub(1).filter(|before| pattern[*before].kind == ItemKind::Udp) {
            Some(udp) => {
                let said = pattern[udp].get(Field::UdpDst);
                if said == Some(port) {
                    return Ok((pattern, false));
                }
                let both = said.map_or(Some(port), |said| said.and(port));
                let Some(both) = both else {
                    let why = format!("here the tunnel has UDP port {}, which the rule excludes", port.value);
                    return Err(Obstacle::new(name, why));
                };
                pattern[udp] = pattern[udp].clone().with(Field::UdpDst, both);
            }
            None => pattern.insert(at, Item::new(ItemKind::Udp).with(Field::UdpDst, port)),
        }
        Ok((pattern, true))
    }

    /// Translates a rule whose actions all run in the device, except for metadata of the packets.
    fn ingress(
        &self,
        rule: &Rule,
        set: &FieldSet,
        pattern: &[Item],
        table: &TableCapabilities,
        implicit: bool,
    ) -> Result<OffloadRule, Obstacle> {
        let can = &table.actions;
        let mut fit = OffloadRule {
            guards: Vec::new(),
            pattern: pattern.to_vec(),
            extra: Vec::new(),
            actions: Vec::new(),
            destination: RuleDestination::Next,
            rest: RemainingActions::None,
            counted: false,
            require_integrity: false,
            split: None,
        };
        let mut rest = Vec::new();
        let mut work = ActionBudget::default();
        // `before`: bytes are counted before any change of length. `behind`: they are counted after the last
        // change.
        let (mut before, mut behind) = (true, true);
        let counts_itself = rule.actions().contains(&Action::Count);
        let mut counted_yet = !counts_itself;
        for action in rule.actions() {
            let stop = |why: &str| Err(Obstacle::new(action_text(action), why));
            match action {
                Action::Count => {
                    counted_yet = true;
                    before &= work.same_length;
                    rest.push(action.clone());
                }
                Action::Mark(_) => rest.push(action.clone()),
                Action::Limit(_) => return stop("NICs do not meter rules"),
                Action::Mirror(_) => return stop("NICs do not mirror to another port"),
                Action::Redirect(_) => return stop("a NIC cannot redirect to another port"),
                Action::Queue(queue) => fit.destination = RuleDestination::Queue(*queue),
                Action::Rss(rss) => fit.destination = RuleDestination::Rss(rss.clone()),
                Action::Drop => fit.destination = RuleDestination::Drop,
                Action::Kernel => fit.destination = RuleDestination::Kernel,
                change => {
                    self.change(change, rule, table, &mut work, &mut fit)?;
                    behind &= !counted_yet || work.same_length;
                }
            }
        }
        if !can.destinations.contains(&fit.destination.kind()) {
            let last = rule.actions().last().map(ToString::to_string).unwrap_or_default();
            return Err(Obstacle::new(last, format!("{} does not support this destination", self.device())));
        }
        if work.used() > can.max_actions {
            let why = format!("{} runs at most {} actions for one rule", self.device(), can.max_actions);
            return Err(Obstacle::new("actions", why));
        }
        let comes = !matches!(fit.destination, RuleDestination::Drop | RuleDestination::Kernel);
        // Workers count packets on arrival. Only the device can count packets that do not arrive or that were
        // longer before.
        fit.counted = !(implicit || comes && behind);
        if fit.counted {
            match &table.counting {
                Some(counting) => fit.pattern = self.counting(rule, set, &fit, counting)?,
                None if table.counters == 0 => {
                    return Err(Obstacle::new("counters", format!("{} does not count for rules", self.device())));
                }
                None => {}
            }
            if !before {
                return Err(Obstacle::new("count", "the packet length changes both before and after it"));
            }
            rest.retain(|action| *action != Action::Count);
        }
        // If a UDP datagram ends before its IP packet does, a NIC keeps the bytes behind it and software
        // removes them. Implicit tunnels also require valid checksums, and a NIC does not report those after
        // decapsulation.
        if work.decapsulated && (implicit || is_in_udp(rule)) {
            if !table.can_match_integrity {
                let why = format!("{} cannot match on valid outer headers", self.device());
                return Err(Obstacle::new("decap", why));
            }
            fit.require_integrity = true;
        }
        if comes {
            self.tags(&Obstacle::new("tag", format!("{} cannot mark packets", self.device())))?;
            fit.rest = RemainingActions::Only(rest);
        }
        Ok(fit)
    }

    /// Translates the pattern of a counting rule, on devices where only some rules can count.
    fn counting(
        &self,
        rule: &Rule,
        set: &FieldSet,
        fit: &OffloadRule,
        can: &CountingCapabilities,
    ) -> Result<Vec<Item>, Obstacle> {
        let stop =
            |why: &str| Obstacle::new("counters", format!("{} counts for some rules only: {why}", self.device()));
        if can.counters == 0 || !fit.actions.is_empty() || !can.destinations.contains(&fit.destination.kind()) {
            return Err(stop("not for rules with these actions"));
        }
        self.pattern(rule, set, &can.items, &self.implied_counting)
            .map_err(|it| stop(&format!("{}, {}", it.what, it.why)))
    }

    /// Translates one action that changes packets.
    fn change(
        &self,
        action: &Action,
        rule: &Rule,
        table: &TableCapabilities,
        work: &mut ActionBudget,
        fit: &mut OffloadRule,
    ) -> Result<(), Obstacle> {
        let can = &table.actions;
        let stop = |why: String| Err(Obstacle::new(action.to_string(), why));
        let unable = || stop(format!("{} cannot do this", self.device()));
        match action {
            Action::Set { field, .. } => {
                if !can.set.contains(*field) {
                    return unable();
                }
                work.commands += u16::from(field.spec().bits.div_ceil(32));
                if matches!(field, Field::Ipv4Src | Field::Ipv4Dst | Field::Ipv6Src | Field::Ipv6Dst) {
                    let kind = field.spec().item;
                    let left =
                        can.stale_checksums.iter().filter_map(|left| left.items().first()).filter(|it| it.kind == kind);
                    for (field, bits) in left.flat_map(|item| item.fields()) {
                        let guard = guard(&fit.pattern, work.decapsulated, table, &[*field], *bits);
                        let why = "the NIC cannot leave packets to software whose checksums it does not update";
                        match guard {
                            Ok(guard) if guard.as_ref().is_none_or(|guard| !fit.guards.contains(guard)) => {
                                fit.guards.extend(guard);
                            }
                            Ok(_) => {}
                            Err(Unguarded) => return stop(why.to_owned()),
                        }
                    }
                }
            }
            Action::DecTtl => {
                if !can.dec_ttl {
                    return unable();
                }
                if work.hops {
                    return stop("the NIC can decrement the TTL only once".to_owned());
                }
                let last = |action: &Action| {
                    let Action::Set { field: Field::Ipv4Ttl | Field::Ipv6Hops, value } = action else { return false };
                    *value < 2
                };
                if fit.actions.iter().any(last) {
                    return stop("the TTL that the rule writes leaves no hop".to_owned());
                }
                work.hops = true;
                work.commands += 1;
                // Packets without a hop left are left to software, which drops and counts them.
                let (hops, last) = ([Field::Ipv4Ttl, Field::Ipv6Hops], MaskedValue { value: 0, mask: 0xfe });
                match guard(&fit.pattern, work.decapsulated, table, &hops, last) {
                    Ok(guard) => fit.guards.extend(guard),
                    Err(Unguarded) => {
                        return stop("the NIC cannot leave packets with a TTL of 0 or 1 to software".to_owned());
                    }
                }
            }
            Action::PushVlan(_) if can.push_vlan => {
                work.tags += 1;
                work.same_length = false;
            }
            Action::PopVlan if can.pop_vlan => {
                work.tags += 1;
                work.same_length = false;
            }
            Action::PushVlan(_) | Action::PopVlan => return unable(),
            Action::Reformat(reformat) => {
                if work.commands > 0 || work.tags > 0 {
                    return stop("a NIC decapsulates before all other actions".to_owned());
                }
                let Some(can) = table.reformat(reformat.kind()) else { return unable() };
                self.decap(reformat, can, rule, fit).or_else(stop)?;
                work.reformats += 1;
                work.decapsulated = true;
                work.same_length = false;
            }
            _ => return unable(),
        }
        if work.commands > can.commands {
            return stop(format!("{} writes headers with at most {} commands", self.device(), can.commands));
        }
        fit.actions.push(action.clone());
        Ok(())
    }

    /// Checks that a decapsulation has the same result in the device as in software.
    fn decap(
        &self,
        reformat: &Reformat,
        can: &ReformatCapability,
        rule: &Rule,
        fit: &mut OffloadRule,
    ) -> Result<(), String> {
        if reformat.bytes().len() > usize::from(can.max_header) {
            return Err(format!("{} writes at most {} bytes of header", self.device(), can.max_header));
        }
        let exact = |kind: ItemKind, field: Field| {
            let item = rule.pattern().iter().find(|item| item.kind == kind && !item.inner);
            let bits = item.and_then(|item| item.get(field));
            bits.is_some_and(|bits| bits == MaskedValue::exact(bits.value, field.spec().bits))
        };
        let (tunnel, number) = match rule.pattern().iter().find(|item| !item.inner && tunnel_of(item.kind).is_some()) {
            Some(item) => (
                tunnel_of(item.kind).unwrap_or(TunnelName::Ip),
                match item.kind {
                    ItemKind::Vxlan => exact(item.kind, Field::VxlanVni),
                    ItemKind::VxlanGpe => exact(item.kind, Field::GpeVni),
                    ItemKind::Geneve => exact(item.kind, Field::GeneveVni),
                    _ => exact(item.kind, Field::GreKey) || item.get(Field::GreFlags).is_some(),
                },
            ),
            None => (TunnelName::Ip, true),
        };
        if !can.tunnels.contains(&tunnel) {
            return Err(format!("{} cannot decapsulate this tunnel", self.device()));
        }
        let remote = exact(ItemKind::Ipv4, Field::Ipv4Src) || exact(ItemKind::Ipv6, Field::Ipv6Src);
        if !number || !remote {
            return Err(
                "the NIC decapsulates only one network identifier from one remote, which the rule must name".to_owned()
            );
        }
        if tunnel == TunnelName::Gre {
            // RFC 2784 section 2.3: packets with these bits are no GRE packets for software. The length of their header
            // is unknown.
            let zero = MaskedValue { value: 0, mask: gre::MUST_BE_ZERO.into() };
            let at = fit.pattern.iter().position(|it| !it.inner && it.kind == ItemKind::Gre);
            self.require(fit, at, Field::GreFlags, zero)?;
        }
        if !can.merges_ecn {
            // RFC 6040 section 4.2 needs the outer ECN field, which is gone when the packet arrives.
            let ip = fit.pattern.iter().position(|it| !it.inner && matches!(it.kind, ItemKind::Ipv4 | ItemKind::Ipv6));
            let Some(at) = ip else { return Err("the rule does not name the outer IP header".to_owned()) };
            let field = if fit.pattern[at].kind == ItemKind::Ipv4 { Field::Ipv4Ecn } else { Field::Ipv6Ecn };
            self.require(fit, Some(at), field, MaskedValue::exact(0, 2))?;
        }
        Ok(())
    }

    /// Makes the device compare bits that software compares when it decapsulates. `at` is the place of their item in
    /// the pattern.
    fn require(&self, fit: &mut OffloadRule, at: Option<usize>, field: Field, bits: MaskedValue) -> Result<(), String> {
        let spec = field.spec();
        let name = format!("outer {} {}", spec.item.spec().name, field.name());
        let Some(item) = at.and_then(|at| fit.pattern.get_mut(at)) else {
            return Err(format!("the rule does not name the {name}"));
        };
        let said = item.get(field);
        let Some(both) = said.map_or(Some(bits), |said| said.and(bits)) else {
            return Err(format!(
                "the NIC decapsulates only packets with {name} {}",
                spec.format.print(spec.bits, bits)
            ));
        };
        let table = self.can.ingress.as_ref().and_then(|table| table.item(spec.item, false));
        if !table.and_then(|item| item.field(field)).is_some_and(|masks| masks.allow(both.mask, spec.bits)) {
            let bits = spec.format.print(spec.bits, bits);
            return Err(format!("{} cannot compare the {name}, which must be {bits}", self.device()));
        }
        if said != Some(both) {
            *item = item.clone().with(field, both);
            fit.extra.push((Key::field(0, field), bits));
        }
        Ok(())
    }

    /// Checks that the device can run an implicit encapsulation.
    pub(super) fn check_encap(&self, encap: &ImplicitEncap) -> Result<(), Obstacle> {
        let stop = |why: String| Obstacle::new("encap", why);
        let table = self.can.egress.as_ref().ok_or_else(|| stop(format!("{} has no table for it", self.device())))?;
        self.check_tx_metadata(table)?;
        let can = table.reformat(encap.header.kind());
        let can = can.ok_or_else(|| stop(format!("{} cannot do this", self.device())))?;
        self.encap(&encap.header, can, encap.has_flow_id).map_err(stop)
    }

    /// Checks that the device can match transmit metadata at egress.
    fn check_tx_metadata(&self, table: &TableCapabilities) -> Result<(), Obstacle> {
        let data = table.item(ItemKind::Meta, false).and_then(|item| item.field(Field::MetaData));
        if data.is_some_and(|masks| masks.allow(u32::MAX.into(), 32)) {
            return Ok(());
        }
        Err(Obstacle::new("egress", format!("{} cannot match transmit metadata", self.device())))
    }

    /// Translates an egress rule: software matches it, and the device changes the packet.
    fn egress(&self, rule: &Rule, table: &TableCapabilities) -> Result<OffloadRule, Obstacle> {
        self.check_tx_metadata(table)?;
        let named = rule.fields().get(Key::field(0, Field::PortId)).is_some_and(|bits| bits.mask == 0xffff);
        if !named {
            return Err(Obstacle::new("port", "an egress rule is offloaded to one port, which it must name"));
        }
        let mut fit = OffloadRule {
            guards: Vec::new(),
            pattern: Vec::new(),
            extra: Vec::new(),
            actions: Vec::new(),
            destination: RuleDestination::Next,
            rest: RemainingActions::All,
            counted: false,
            require_integrity: false,
            split: Some(Obstacle::new("pattern", "the workers match at egress; the NIC does the rest")),
        };
        for action in rule.actions() {
            match action {
                Action::Count if fit.actions.is_empty() => {}
                Action::Reformat(reformat) if fit.actions.is_empty() => {
                    let stop = |why: String| Obstacle::new(action.to_string(), why);
                    let Some(can) = table.reformat(reformat.kind()) else {
                        return Err(stop(format!("{} cannot do this", self.device())));
                    };
                    self.encap(reformat, can, false).map_err(stop)?;
                    fit.actions.push(action.clone());
                }
                other => {
                    return Err(Obstacle::new(action_text(other), "at egress only encapsulation is left to the NIC"));
                }
            }
        }
        if fit.actions.is_empty() {
            return Err(Obstacle::new("actions", "at egress only encapsulation is left to the NIC"));
        }
        Ok(fit)
    }

    /// Checks that an encapsulation has the same result in the device as in software. `has_flow_id` is that of
    /// [`ImplicitEncap`].
    fn encap(&self, reformat: &Reformat, can: &ReformatCapability, has_flow_id: bool) -> Result<(), String> {
        let bytes = reformat.bytes();
        let Some(layout) = reformat.layout() else { return Err("it has no header".to_owned()) };
        if bytes.len() > usize::from(can.max_header) {
            return Err(format!("{} adds at most {} bytes of header", self.device(), can.max_header));
        }
        let tunnel = match layout.end {
            HeaderEnd::Vxlan => TunnelName::Vxlan,
            HeaderEnd::VxlanGpe => TunnelName::VxlanGpe,
            HeaderEnd::Geneve => TunnelName::Geneve,
            HeaderEnd::Gre => TunnelName::Gre,
            HeaderEnd::Mpls => TunnelName::Mpls,
            HeaderEnd::Ip | HeaderEnd::Link => TunnelName::Ip,
        };
        if !can.tunnels.contains(&tunnel) {
            return Err(format!("{} cannot encapsulate in this tunnel", self.device()));
        }
        let l4 = usize::from(layout.l4);
        let number = |at: usize| bytes.get(at..at + 2).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
        if matches!(tunnel, TunnelName::Vxlan | TunnelName::VxlanGpe | TunnelName::Geneve) {
            if number(l4 + 6) != 0 && !can.udp_checksum {
                return Err("the NIC does not compute the outer UDP checksum, which the header requests".to_owned());
            }
            match (number(l4), can.fills_source_port.contains(&tunnel)) {
                (0, false) => {
                    return Err("the NIC does not replace a source port of 0 by entropy".to_owned());
                }
                (1.., true) => return Err("the NIC chooses the source port, but the header gives one".to_owned()),
                _ => {}
            }
        }
        let keyed = tunnel == TunnelName::Gre && number(l4) & 0x2000 != 0;
        // By default a ConnectX writes entropy into the low byte of every GRE key (Linux commit 97417f6182f8,
        // "net/mlx5e: Fix GRE key by controlling port tunnel entropy calculation").
        if keyed && !can.keeps_gre_key && !has_flow_id {
            return Err("the NIC may write entropy into the key".to_owned());
        }
        Ok(())
    }
}

/// Returns whether an IP protocol is that of an IP packet.
fn is_ip_in_ip(protocol: Option<MaskedValue>) -> bool {
    let is = |number: IpProtocol| protocol == Some(MaskedValue::exact(number.0.into(), 8));
    is(IpProtocol::IPV4) || is(IpProtocol::IPV6)
}

/// Returns the tunnel of an item that a UDP port announces.
fn udp_tunnel(kind: ItemKind) -> Option<Tunnel> {
    match kind {
        ItemKind::Vxlan => Some(Tunnel::Vxlan),
        ItemKind::VxlanGpe => Some(Tunnel::VxlanGpe),
        ItemKind::Geneve => Some(Tunnel::Geneve),
        _ => None,
    }
}

fn tunnel_of(kind: ItemKind) -> Option<TunnelName> {
    Some(match kind {
        ItemKind::Vxlan => TunnelName::Vxlan,
        ItemKind::VxlanGpe => TunnelName::VxlanGpe,
        ItemKind::Geneve => TunnelName::Geneve,
        ItemKind::Gre => TunnelName::Gre,
        _ => return None,
    })
}

/// Returns true if the packets of the rule are carried in UDP.
fn is_in_udp(rule: &Rule) -> bool {
    use ItemKind::{Geneve, Udp, Vxlan, VxlanGpe};
    rule.pattern().iter().any(|item| !item.inner && matches!(item.kind, Udp | Vxlan | VxlanGpe | Geneve))
}

/// Resources of the device that a rule has used.
#[derive(Debug)]
struct ActionBudget {
    commands: u16,
    tags: u8,
    reformats: u8,
    hops: bool,
    decapsulated: bool,
    same_length: bool,
}

impl Default for ActionBudget {
    fn default() -> Self {
        Self { commands: 0, tags: 0, reformats: 0, hops: false, decapsulated: false, same_length: true }
    }
}

impl ActionBudget {
    /// Returns the number of device actions used.
    fn used(&self) -> u8 {
        u8::from(self.commands > 0) + self.tags + self.reformats
    }
}

/// The device cannot separate the packets of a rule that must be left to software from the others.
struct Unguarded;

/// Returns the pattern of the rule's packets that have this value in one of these IP fields, or `None` if
/// there are no such packets.
fn guard(
    pattern: &[Item],
    inner: bool,
    table: &TableCapabilities,
    fields: &[Field],
    bits: MaskedValue,
) -> Result<Option<Vec<Item>>, Unguarded> {
    let of = |item: &Item| fields.iter().copied().find(|field| item.inner == inner && item.kind == field.spec().item);
    let found = pattern.iter().enumerate().find_map(|(at, item)| Some((at, of(item)?)));
    let Some((at, field)) = found else { return Err(Unguarded) };
    let compared = table.item(pattern[at].kind, inner).and_then(|item| item.field(field));
    if !compared.is_some_and(|masks| masks.allow(bits.mask, field.spec().bits)) {
        return Err(Unguarded);
    }
    let both = pattern[at].get(field).map_or(Some(bits), |said| said.and(bits));
    Ok(both.map(|both| {
        let mut guard = pattern.to_vec();
        guard[at] = guard[at].clone().with(field, both);
        guard
    }))
}
