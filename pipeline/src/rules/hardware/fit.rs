//! What a device could take over of one rule, and if it cannot take all of it, what stands in the way.

use std::fmt;

use wirepath_pmd::flow::{
    Action, Bits, Direction, Field, FieldSet, HeaderEnd, Item, ItemKind, Key, LEVELS, Reformat, Rule, What,
};
use wirepath_pmd::port::PortId;
use wirepath_pmd::port::hardware::{
    CountingCapabilities, FateKind, ItemCapability, PatternText, RESERVED_TAGS, ReformatCapability, RuleCapabilities,
    RuleFate, TableCapabilities, TunnelName,
};
use wirepath_wire::{Tunnel, Tunnels};

/// What of a rule stands in the way of the NIC, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// Item, field or action as it is written, or what else it is about.
    pub what: String,
    /// Why it stands in the way.
    pub why: String,
}

impl Obstacle {
    pub(super) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

/// What workers still do with the packets of a rule that is in the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// Nothing: they do not come.
    Gone,
    /// These actions, which look at no header.
    Only(Vec<Action>),
    /// All of the rule's actions: the device has done nothing but match.
    Whole,
}

/// What a device would be given for a rule.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    /// Patterns of packets that the rule fits but must be left to software: they stand one level above it.
    pub(super) guards: Vec<Vec<Item>>,
    pub(super) pattern: Vec<Item>,
    /// What the pattern demands beyond the rule: packets without it are left to software.
    pub(super) extra: Vec<(Key, Bits)>,
    pub(super) actions: Vec<Action>,
    pub(super) fate: RuleFate,
    pub(super) rest: Rest,
    /// Whether the device counts; else the workers do, as its packets come.
    pub(super) counted: bool,
    /// Only packets whose outer headers are in order, as the program would take them: others are left to software.
    pub(super) in_order: bool,
    /// Why not all of the rule is in the device.
    pub(super) split: Option<Obstacle>,
}

impl Fit {
    /// Which of the rule's packets the device leaves to software, in words.
    pub(super) fn left(&self) -> Option<String> {
        let text = |item: Item| PatternText::from(vec![item]);
        let mut left = Vec::new();
        for guard in &self.guards {
            let more = guard.iter().filter(|item| !self.pattern.contains(item));
            left.extend(more.map(|item| format!("with \"{}\"", text(item.clone()))));
        }
        for (key, bits) in &self.extra {
            if let What::Field(field) = key.what {
                left.push(format!("without \"{}\"", text(Item::new(field.spec().item).with(field, *bits))));
            }
        }
        if self.in_order {
            left.push("with outer lengths or checksums that are wrong".to_owned());
        }
        (!left.is_empty()).then(|| left.join(", or "))
    }

    /// Levels that it takes.
    pub(super) fn span(&self) -> u8 {
        1 + u8::from(!self.guards.is_empty())
    }
}

/// The rule hardware of one port, made ready for questions.
#[derive(Debug)]
pub(super) struct Judge {
    pub(super) can: RuleCapabilities,
    pub(super) port: PortId,
    tunnels: Tunnels,
    /// What the items of both tables imply beyond their own.
    implied: [Vec<FieldSet>; 2],
    /// The same of those of rules at ingress that count.
    implied_counting: Vec<FieldSet>,
}

/// The closed list of what a pattern demands.
pub(super) fn demands(pattern: &[Item]) -> FieldSet {
    let rule = Rule::new(Direction::Egress, 0, pattern.to_vec(), vec![Action::Count]);
    rule.map(|rule| rule.fields()).unwrap_or_default()
}

impl Judge {
    pub(super) fn new(can: RuleCapabilities, port: PortId, tunnels: Tunnels) -> Self {
        let implied = |items: &[ItemCapability]| items.iter().map(|it| demands(it.implies.items())).collect();
        let of = |table: Option<&TableCapabilities>| table.map_or_else(Vec::new, |table| implied(&table.items));
        let counting = can.ingress.as_ref().and_then(|table| table.counting.as_ref());
        let implied_counting = counting.map_or_else(Vec::new, |counting| implied(&counting.items));
        let implied = [of(can.ingress.as_ref()), of(can.egress.as_ref())];
        Self { can, port, tunnels, implied, implied_counting }
    }

    /// The same port, with other capabilities.
    pub(super) fn with(&self, can: RuleCapabilities) -> Self {
        Self::new(can, self.port, self.tunnels)
    }

    /// First level of a direction that rules can have: patterns that are set aside lie above all rules.
    pub(super) fn first_level(&self, direction: Direction) -> u16 {
        self.can.table(direction).map_or(0, |table| u16::from(!table.aside.is_empty()))
    }

    /// What the device leaves to software before any rule is asked.
    pub(super) fn aside(&self, direction: Direction) -> &[PatternText] {
        self.can.table(direction).map_or(&[], |table| &table.aside)
    }

    /// What the device could take over of a rule. `set` is what the rule demands; `own`: it is one of the program's own, all of which the
    /// device does or nothing, and which nobody counts.
    pub(super) fn fit(&self, rule: &Rule, set: &FieldSet, own: bool) -> Result<Fit, Obstacle> {
        let direction = rule.direction();
        let Some(table) = self.can.table(direction) else {
            let device = &self.can.device;
            return Err(Obstacle::new(direction.name(), format!("{device} has no table for rules of this direction")));
        };
        if let Some((index, bar)) = rule.nic_bar() {
            return Err(Obstacle::new(rule.actions()[index].to_string(), bar.text()));
        }
        match direction {
            Direction::Ingress => {
                let pattern = self.pattern(rule, set, &table.items, &self.implied[0])?;
                match self.ingress(rule, set, &pattern, table, own) {
                    Ok(fit) => Ok(fit),
                    Err(obstacle) if own => Err(obstacle),
                    Err(obstacle) => self.split(pattern, obstacle, table),
                }
            }
            Direction::Egress => self.egress(rule, table),
        }
    }

    /// Matched and marked in the device, all else in software.
    fn split(&self, pattern: Vec<Item>, obstacle: Obstacle, table: &TableCapabilities) -> Result<Fit, Obstacle> {
        if !table.actions.fates.contains(&FateKind::Next) {
            return Err(obstacle);
        }
        self.tags(&obstacle)?;
        Ok(Fit {
            guards: Vec::new(),
            pattern,
            extra: Vec::new(),
            actions: Vec::new(),
            fate: RuleFate::Next,
            rest: Rest::Whole,
            counted: false,
            in_order: false,
            split: Some(obstacle),
        })
    }

    /// Whether packets can be told apart when they come; `Err` is what was wrong before, or that.
    fn tags(&self, before: &Obstacle) -> Result<(), Obstacle> {
        if self.can.max_tag() > RESERVED_TAGS[0] { Ok(()) } else { Err(before.clone()) }
    }

    /// The rule's pattern in items of the device.
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
            closed = demands(&pattern);
            &closed
        } else {
            set
        };
        let mut out = Vec::with_capacity(pattern.len());
        let mut counts = [[0u8; 32]; LEVELS as usize];
        for (index, item) in pattern.iter().enumerate() {
            let name = Self::name(item);
            if item.kind == ItemKind::Port {
                // Told to this port alone.
                continue;
            }
            let found = items.iter().position(|it| it.kind == item.kind && it.inner == item.inner);
            let Some(at) = found else {
                return Err(Obstacle::new(name, format!("{} cannot match it", self.device())));
            };
            let (can, implied) = (&items[at], &implied[at]);
            let nth = &mut counts[usize::from(item.inner)][item.kind as usize % 32];
            if *nth >= can.most {
                return Err(Obstacle::new(name, format!("{} looks at {} of them at most", self.device(), can.most)));
            }
            if !wirepath_pmd::flow::covers(implied, set) {
                let why = format!(
                    "{} finds it only in packets with \"{}\"; the rule must say so",
                    self.device(),
                    can.implies
                );
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

    /// The item with the fields that the device compares.
    fn fields(&self, item: &Item, nth: u8, can: &ItemCapability, implied: &FieldSet) -> Result<Item, Obstacle> {
        let mut out = if item.inner { Item::new(item.kind).inside() } else { Item::new(item.kind) };
        for &(field, mut bits) in item.fields() {
            let width = field.spec().bits;
            let allows = |mask| can.field(field).is_some_and(|masks| masks.allow(mask, width));
            // What is no fragment is no later one: the first bit says it all.
            let whole = matches!(field, Field::Ipv4Frag | Field::Ipv6Frag) && bits == Bits::exact(0, 2);
            if whole && !allows(bits.mask) {
                bits = Bits { value: 0, mask: 1 };
            }
            let allowed = allows(bits.mask);
            if allowed {
                out = out.with(field, bits);
                continue;
            }
            let key = Key { level: u8::from(item.inner), nth, what: What::Field(field) };
            // The device sees to it by itself.
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

    /// The pattern with the UDP port of the tunnel that it names: the language knows it from the port's parser, a device does not.
    fn with_tunnel_ports(&self, pattern: &[Item]) -> Result<(Vec<Item>, bool), Obstacle> {
        let mut pattern = pattern.to_vec();
        let tunnel = pattern.iter().position(|item| {
            !item.inner && matches!(item.kind, ItemKind::Vxlan | ItemKind::VxlanGpe | ItemKind::Geneve)
        });
        if tunnel.is_none() && pattern.iter().any(|item| item.inner) {
            let named = pattern.iter().any(|item| !item.inner && item.kind == ItemKind::Gre);
            if !named {
                let first = pattern.iter().find(|item| item.inner).map(Self::name).unwrap_or_default();
                return Err(Obstacle::new(first, "the rule does not name the tunnel around it"));
            }
        }
        let Some(at) = tunnel else { return Ok((pattern, false)) };
        let kind = match pattern[at].kind {
            ItemKind::Vxlan => Tunnel::Vxlan,
            ItemKind::VxlanGpe => Tunnel::VxlanGpe,
            _ => Tunnel::Geneve,
        };
        let name = Self::name(&pattern[at]);
        let Some(port) = self.tunnels.port_of(kind) else {
            return Err(Obstacle::new(name, "the program does not look for it on any UDP port"));
        };
        let port = Bits::exact(port.into(), 16);
        match at.checked_sub(1).filter(|before| pattern[*before].kind == ItemKind::Udp) {
            Some(udp) => {
                let said = pattern[udp].get(Field::UdpDst);
                if said == Some(port) {
                    return Ok((pattern, false));
                }
                let both = said.map_or(Some(port), |said| said.and(port));
                let Some(both) = both else {
                    return Err(Obstacle::new(name, "the program looks for it on another UDP port"));
                };
                pattern[udp] = pattern[udp].clone().with(Field::UdpDst, both);
            }
            None => pattern.insert(at, Item::new(ItemKind::Udp).with(Field::UdpDst, port)),
        }
        Ok((pattern, true))
    }

    /// All of a rule's actions in the device, but for what is noted about the packets that come.
    fn ingress(
        &self,
        rule: &Rule,
        set: &FieldSet,
        pattern: &[Item],
        table: &TableCapabilities,
        own: bool,
    ) -> Result<Fit, Obstacle> {
        let can = &table.actions;
        let mut fit = Fit {
            guards: Vec::new(),
            pattern: pattern.to_vec(),
            extra: Vec::new(),
            actions: Vec::new(),
            fate: RuleFate::Next,
            rest: Rest::Gone,
            counted: false,
            in_order: false,
            split: None,
        };
        let mut rest = Vec::new();
        let mut work = Work::default();
        // Whether bytes are counted before they become others, or only behind the last change.
        let (mut before, mut behind) = (true, true);
        let counts_itself = rule.actions().contains(&Action::Count);
        let mut counted_yet = !counts_itself;
        for action in rule.actions() {
            let stop = |why: &str| Err(Obstacle::new(action.to_string(), why));
            match action {
                Action::Count => {
                    counted_yet = true;
                    before &= work.same_length;
                    rest.push(action.clone());
                }
                Action::Mark(_) => rest.push(action.clone()),
                Action::Limit(_) => return stop("no NIC keeps the rate of a rule"),
                Action::Mirror(_) => return stop("no NIC makes copies for another port"),
                Action::Redirect(_) => return stop("another port is out of the NIC's reach"),
                Action::Queue(queue) => fit.fate = RuleFate::Queue(*queue),
                Action::Rss(rss) => fit.fate = RuleFate::Rss(rss.clone()),
                Action::Drop => fit.fate = RuleFate::Drop,
                Action::Kernel => fit.fate = RuleFate::Kernel,
                change => {
                    self.change(change, rule, table, &mut work, &mut fit)?;
                    behind &= !counted_yet || work.same_length;
                }
            }
        }
        if !can.fates.contains(&fit.fate.kind()) {
            let last = rule.actions().last().map(ToString::to_string).unwrap_or_default();
            return Err(Obstacle::new(last, format!("{} cannot send packets there", self.device())));
        }
        if work.used() > can.most {
            let why = format!("{} does at most {} of these for one rule", self.device(), can.most);
            return Err(Obstacle::new("actions", why));
        }
        let comes = !matches!(fit.fate, RuleFate::Drop | RuleFate::Kernel);
        // Workers count what comes as it comes; what does not, or was longer before, only the device can count.
        fit.counted = !(own || comes && behind);
        if fit.counted {
            match &table.counting {
                Some(counting) => fit.pattern = self.counting(rule, set, &fit, counting)?,
                None if table.counters == 0 => {
                    return Err(Obstacle::new("counters", format!("{} does not count for rules", self.device())));
                }
                None => {}
            }
            if !before {
                return Err(Obstacle::new("count", "it stands between changes of the packet's length"));
            }
            rest.retain(|action| *action != Action::Count);
        }
        // Of a datagram that ends before its IP packet does, a NIC leaves what is behind it with what it takes out; software does not. The
        // program's own tunnels end at checksums besides, of which a NIC says nothing afterwards.
        if work.decapsulated && (own || is_in_udp(rule)) {
            if !table.tells_order {
                let why = format!("{} does not tell outer headers that are in order from others", self.device());
                return Err(Obstacle::new("decap", why));
            }
            fit.in_order = true;
        }
        if comes {
            self.tags(&Obstacle::new("tag", format!("{} cannot mark packets", self.device())))?;
            fit.rest = Rest::Only(rest);
        }
        Ok(fit)
    }

    /// The pattern of a rule that counts, where only some can.
    fn counting(
        &self,
        rule: &Rule,
        set: &FieldSet,
        fit: &Fit,
        can: &CountingCapabilities,
    ) -> Result<Vec<Item>, Obstacle> {
        let stop =
            |why: &str| Obstacle::new("counters", format!("{} counts for some rules only: {why}", self.device()));
        if can.counters == 0 || !fit.actions.is_empty() || !can.fates.contains(&fit.fate.kind()) {
            return Err(stop("not for such that do this"));
        }
        self.pattern(rule, set, &can.items, &self.implied_counting)
            .map_err(|it| stop(&format!("{}, {}", it.what, it.why)))
    }

    /// One action that changes packets.
    fn change(
        &self,
        action: &Action,
        rule: &Rule,
        table: &TableCapabilities,
        work: &mut Work,
        fit: &mut Fit,
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
                    let left = can.unmended.iter().filter_map(|left| left.items().first()).filter(|it| it.kind == kind);
                    for (field, bits) in left.flat_map(|item| item.fields()) {
                        let guard = guard(&fit.pattern, work.decapsulated, table, &[*field], *bits);
                        let why = "the NIC cannot leave packets to software whose checksums it does not mend";
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
                    return stop("only one hop can be taken away in the NIC".to_owned());
                }
                let last = |action: &Action| {
                    let Action::Set { field: Field::Ipv4Ttl | Field::Ipv6Hops, value } = action else { return false };
                    *value < 2
                };
                if fit.actions.iter().any(last) {
                    return stop("of the TTL that the rule writes no hop is left".to_owned());
                }
                work.hops = true;
                work.commands += 1;
                // Packets that have no hop to lose: software drops and counts them.
                let (hops, last) = ([Field::Ipv4Ttl, Field::Ipv6Hops], Bits { value: 0, mask: 0xfe });
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
                    return stop("a NIC takes headers off before all else".to_owned());
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

    /// Whether a decapsulation means in the device what it means in software.
    fn decap(&self, reformat: &Reformat, can: &ReformatCapability, rule: &Rule, fit: &mut Fit) -> Result<(), String> {
        if reformat.bytes().len() > usize::from(can.max_header) {
            return Err(format!("{} writes at most {} bytes of header", self.device(), can.max_header));
        }
        let exact = |kind: ItemKind, field: Field| {
            let item = rule.pattern().iter().find(|item| item.kind == kind && !item.inner);
            let bits = item.and_then(|item| item.get(field));
            bits.is_some_and(|bits| bits == Bits::exact(bits.value, field.spec().bits))
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
            return Err(format!("{} cannot take this tunnel off", self.device()));
        }
        let remote = exact(ItemKind::Ipv4, Field::Ipv4Src) || exact(ItemKind::Ipv6, Field::Ipv6Src);
        if !number || !remote {
            return Err(
                "in the NIC only for one network identifier and one remote, which the rule must name".to_owned()
            );
        }
        if !can.merges_ecn {
            // RFC 6040 section 4.2 wants the outer field, which is gone when the packet comes.
            let ip = fit.pattern.iter().position(|it| !it.inner && matches!(it.kind, ItemKind::Ipv4 | ItemKind::Ipv6));
            let Some(at) = ip else { return Err("the rule does not name the outer IP header".to_owned()) };
            let field = if fit.pattern[at].kind == ItemKind::Ipv4 { Field::Ipv4Ecn } else { Field::Ipv6Ecn };
            let compares = self.can.ingress.as_ref().and_then(|table| table.item(fit.pattern[at].kind, false));
            if !compares.and_then(|item| item.field(field)).is_some_and(|masks| masks.allow(3, 2)) {
                return Err(format!("{} cannot compare the outer ECN field, which must be 0", self.device()));
            }
            let none = Bits::exact(0, 2);
            let said = fit.pattern[at].get(field);
            if said.is_some_and(|said| said.and(none).is_none()) {
                return Err("only packets with outer ECN 0 are taken apart in the NIC".to_owned());
            }
            if said != Some(none) {
                fit.pattern[at] = fit.pattern[at].clone().with(field, none);
                fit.extra.push((Key::field(0, field), none));
            }
        }
        Ok(())
    }

    /// Whether an encapsulation of the program's own can be left to the device.
    pub(super) fn own_encap(&self, reformat: &Reformat) -> Result<(), Obstacle> {
        let stop = |why: String| Obstacle::new("encap", why);
        let table = self.can.egress.as_ref().ok_or_else(|| stop(format!("{} has no table for it", self.device())))?;
        self.told(table)?;
        let can = table.reformat(reformat.kind());
        let can = can.ok_or_else(|| stop(format!("{} cannot do this", self.device())))?;
        self.encap(reformat, can).map_err(stop)
    }

    /// Whether packets can say at egress which rule they met.
    fn told(&self, table: &TableCapabilities) -> Result<(), Obstacle> {
        let data = table.item(ItemKind::Meta, false).and_then(|item| item.field(Field::MetaData));
        if data.is_some_and(|masks| masks.allow(u32::MAX.into(), 32)) {
            return Ok(());
        }
        Err(Obstacle::new("egress", format!("{} cannot be told which rule a packet met", self.device())))
    }

    /// What a rule at egress leaves to the device: software finds the rule, the device changes the packet.
    fn egress(&self, rule: &Rule, table: &TableCapabilities) -> Result<Fit, Obstacle> {
        self.told(table)?;
        let named = rule.fields().get(Key::field(0, Field::PortId)).is_some_and(|bits| bits.mask == 0xffff);
        if !named {
            return Err(Obstacle::new("port", "a rule at egress is given to the NIC of one port, which it must name"));
        }
        let mut fit = Fit {
            guards: Vec::new(),
            pattern: Vec::new(),
            extra: Vec::new(),
            actions: Vec::new(),
            fate: RuleFate::Next,
            rest: Rest::Whole,
            counted: false,
            in_order: false,
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
                    self.encap(reformat, can).map_err(stop)?;
                    fit.actions.push(action.clone());
                }
                other => {
                    return Err(Obstacle::new(other.to_string(), "at egress only encapsulation is left to the NIC"));
                }
            }
        }
        if fit.actions.is_empty() {
            return Err(Obstacle::new("actions", "at egress only encapsulation is left to the NIC"));
        }
        Ok(fit)
    }

    /// Whether an encapsulation gives the same packets in the device.
    pub(super) fn encap(&self, reformat: &Reformat, can: &ReformatCapability) -> Result<(), String> {
        let bytes = reformat.bytes();
        let Some(layout) = reformat.layout() else { return Err("it has no header".to_owned()) };
        if bytes.len() > usize::from(can.max_header) {
            return Err(format!("{} puts at most {} bytes of header on", self.device(), can.max_header));
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
            return Err(format!("{} cannot put this tunnel on", self.device()));
        }
        let l4 = usize::from(layout.l4);
        let number = |at: usize| bytes.get(at..at + 2).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
        if matches!(tunnel, TunnelName::Vxlan | TunnelName::VxlanGpe | TunnelName::Geneve) {
            if number(l4 + 6) != 0 && !can.udp_checksum {
                return Err("the NIC does not compute the outer UDP checksum, which the header asks for".to_owned());
            }
            match (number(l4), can.fills_source_port.contains(&tunnel)) {
                (0, false) => {
                    return Err("the NIC sends the source port as it is written, and 0 asks for entropy".to_owned());
                }
                (1.., true) => return Err("the NIC writes the source port itself, and the header names one".to_owned()),
                _ => {}
            }
        }
        let keyed = tunnel == TunnelName::Gre && number(l4) & 0x2000 != 0;
        if keyed && !can.keeps_gre_key {
            return Err("the NIC may write entropy into the key".to_owned());
        }
        Ok(())
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

/// Whether UDP is what its packets come in.
fn is_in_udp(rule: &Rule) -> bool {
    use ItemKind::{Geneve, Udp, Vxlan, VxlanGpe};
    rule.pattern().iter().any(|item| !item.inner && matches!(item.kind, Udp | Vxlan | VxlanGpe | Geneve))
}

/// Flow actions that a rule has used up.
#[derive(Debug)]
struct Work {
    commands: u16,
    tags: u8,
    reformats: u8,
    hops: bool,
    decapsulated: bool,
    same_length: bool,
}

impl Default for Work {
    fn default() -> Self {
        Self { commands: 0, tags: 0, reformats: 0, hops: false, decapsulated: false, same_length: true }
    }
}

impl Work {
    /// How many flow actions that makes.
    fn used(&self) -> u8 {
        u8::from(self.commands > 0) + self.tags + self.reformats
    }
}

/// The device cannot tell some packets of a rule, which must be left to software, from the others.
struct Unguarded;

/// The pattern of those packets of a rule that have this in one of these fields of IP headers; `None`: it has no such packets.
fn guard(
    pattern: &[Item],
    inner: bool,
    table: &TableCapabilities,
    fields: &[Field],
    bits: Bits,
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
