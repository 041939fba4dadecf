//! Patterns as flat lists of keys with masked values, which engines and drivers match on.
//!
//! The lists are *closed*: they contain everything that follows from the pattern. `ipv4 / udp` names neither
//! EtherType nor protocol, but its list does. [`covers`] and [`FieldSet::and`] are therefore plain
//! comparisons, and contradictions show up.

use std::collections::BTreeMap;
use std::fmt;

use super::items::{FIELDS, ITEMS, ext, mpls, network, tunnel};
use super::masked_value::{MaskedValue, ones};
use super::{ErrorLocation, Field, HeaderType, Item, ItemKind, Layer, Reason, RuleError};

/// Number of header stacks that patterns cover: the outer one and the inner one of its tunnel.
pub const LEVELS: u8 = 2;

/// Key of a comparison: a header type or a field of a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Header stack: 0 the outer, 1 the inner.
    pub level: u8,
    /// Index among headers of the same kind in a stack. 0 is the outermost VLAN tag or label.
    pub nth: u8,
    /// Header type or field.
    pub kind: KeyKind,
}

/// Header type or field of a [`Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeyKind {
    /// The type of one layer of the stack.
    HeaderType(HeaderType),
    /// A field of a header.
    Field(Field),
}

impl Key {
    /// Creates the key of a header type.
    pub const fn header_type(level: u8, layer: HeaderType) -> Self {
        Self { level, nth: 0, kind: KeyKind::HeaderType(layer) }
    }

    /// Creates the key of a field in the first header of its kind.
    pub const fn field(level: u8, field: Field) -> Self {
        Self { level, nth: 0, kind: KeyKind::Field(field) }
    }

    /// Returns the size of the values, bits.
    pub fn bits(self) -> u8 {
        match self.kind {
            KeyKind::HeaderType(_) => 8,
            KeyKind::Field(field) => field.spec().bits,
        }
    }

    /// Formats a value for messages.
    fn print(self, bits: MaskedValue) -> String {
        let named = |code: u128, names: &[(u8, &str)]| {
            let name = names.iter().find(|(known, _)| bits.mask == 0xff && u128::from(*known) == code);
            name.map_or_else(|| format!("{bits:?}"), |(_, name)| (*name).to_owned())
        };
        match self.kind {
            KeyKind::Field(field) => field.spec().format.print(field.spec().bits, bits),
            KeyKind::HeaderType(HeaderType::Network) => named(
                bits.value,
                &[(network::NONE, "none"), (network::ARP, "arp"), (network::IPV4, "ipv4"), (network::IPV6, "ipv6")],
            ),
            KeyKind::HeaderType(HeaderType::Transport) => named(
                bits.value,
                &[(0, "none"), (1, "icmp"), (6, "tcp"), (17, "udp"), (47, "gre"), (50, "esp"), (58, "icmpv6")],
            ),
            KeyKind::HeaderType(HeaderType::Tunnel) => named(
                bits.value,
                &[
                    (tunnel::NONE, "none"),
                    (tunnel::VXLAN, "vxlan"),
                    (tunnel::VXLAN_GPE, "vxlan-gpe"),
                    (tunnel::GENEVE, "geneve"),
                    (tunnel::GRE, "gre"),
                ],
            ),
            KeyKind::HeaderType(_) => if bits.value == 0 { "absent" } else { "present" }.to_owned(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.level > 0 {
            f.write_str("inner ")?;
        }
        match self.kind {
            KeyKind::HeaderType(HeaderType::Link) => f.write_str("Ethernet header"),
            KeyKind::HeaderType(HeaderType::Mpls) => f.write_str("MPLS"),
            KeyKind::HeaderType(HeaderType::Network) => f.write_str("layer 3"),
            KeyKind::HeaderType(HeaderType::Transport) => f.write_str("layer 4"),
            KeyKind::HeaderType(HeaderType::Tunnel) => f.write_str("tunnel"),
            KeyKind::Field(field) => {
                let spec = field.spec();
                write!(f, "{} {}", spec.item.spec().name, spec.name)?;
                if self.nth > 0 { write!(f, " (number {})", self.nth + 1) } else { Ok(()) }
            }
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A closed list of comparisons, sorted by key. Each key occurs at most once, and no mask is empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct FieldSet {
    list: Vec<(Key, MaskedValue)>,
}

impl FieldSet {
    /// Closes a pattern. A pattern that no packet can match is an error.
    pub(super) fn of(items: &[Item]) -> Result<Self, RuleError> {
        let mut constraints = Constraints::default();
        let mut nth = [[0u8; ITEMS.len()]; LEVELS as usize];
        for (index, item) in items.iter().enumerate() {
            let level = u8::from(item.inner);
            let count = &mut nth[usize::from(level)][item.kind as usize];
            constraints.item(index, item, level, *count)?;
            *count += 1;
        }
        constraints.require_absent_mpls(items)?;
        constraints.propagate()?;
        Ok(constraints.finish())
    }

    /// Returns the keys and their masked values, sorted by key.
    pub fn list(&self) -> &[(Key, MaskedValue)] {
        &self.list
    }

    /// Returns the masked value of a key.
    pub fn get(&self, key: Key) -> Option<MaskedValue> {
        self.list.binary_search_by_key(&key, |(k, _)| *k).ok().map(|i| self.list[i].1)
    }

    /// True if the list requires exactly this value of a key.
    pub fn is(&self, key: Key, value: u128) -> bool {
        self.get(key) == Some(MaskedValue::exact(value, key.bits()))
    }

    /// True if a packet matches. `packet` returns the packet's value of a key, or `None` if it has no such
    /// header.
    pub fn matches(&self, mut packet: impl FnMut(Key) -> Option<u128>) -> bool {
        self.list.iter().all(|&(key, bits)| packet(key).is_some_and(|value| bits.matches(value)))
    }

    /// Returns the list for packets that match both; `None` if there is no such packet.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let mut constraints = Constraints::default();
        for &(key, bits) in self.list.iter().chain(&other.list) {
            constraints.require(key, bits, ErrorLocation::Rule).ok()?;
        }
        constraints.propagate().ok()?;
        Some(constraints.finish())
    }
}

/// True if a packet may match both. `false` is always right.
///
/// `true` may be wrong if only several masked protocol numbers together exclude each other. Rules that are
/// treated as overlapping are then more than necessary, never fewer.
pub fn overlaps(a: &FieldSet, b: &FieldSet) -> bool {
    a.and(b).is_some()
}

/// True if every packet that matches `b` matches `a`. `true` is always right.
pub fn covers(a: &FieldSet, b: &FieldSet) -> bool {
    a.list.iter().all(|&(key, bits)| b.get(key).is_some_and(|other| bits.covers(other)))
}

/// A list while it is closed, with the pattern location that caused each entry.
#[derive(Default)]
struct Constraints {
    map: BTreeMap<Key, (MaskedValue, ErrorLocation)>,
    changed: bool,
}

impl Constraints {
    fn require(&mut self, key: Key, bits: MaskedValue, at: ErrorLocation) -> Result<(), RuleError> {
        if bits.mask == 0 {
            return Ok(());
        }
        let Some((have, _)) = self.map.get(&key).copied() else {
            self.map.insert(key, (bits, at));
            self.changed = true;
            return Ok(());
        };
        let Some(both) = have.and(bits) else {
            let message = format!("{key} cannot be both {} and {}", key.print(have), key.print(bits));
            return Err(RuleError::new(Reason::Contradiction, at, message));
        };
        if both != have {
            self.map.insert(key, (both, at));
            self.changed = true;
        }
        Ok(())
    }

    fn item(&mut self, index: usize, item: &Item, level: u8, nth: u8) -> Result<(), RuleError> {
        let at = ErrorLocation::Item(index);
        for &(fact, code) in item.kind.spec().header_types {
            // The outermost stack always starts with an Ethernet header.
            if fact != HeaderType::Link || level > 0 {
                self.require(Key::header_type(level, fact), MaskedValue::exact(u128::from(code), 8), at)?;
            }
        }
        match item.kind {
            ItemKind::Vlan => {
                self.require(Key::field(level, Field::EthTags), MaskedValue { value: 1 << nth, mask: 1 << nth }, at)?;
            }
            ItemKind::Mpls if nth > 0 => {
                let above = Key { level, nth: nth - 1, kind: KeyKind::Field(Field::MplsBos) };
                self.require(above, MaskedValue::exact(0, 1), at)?;
            }
            _ => {}
        }
        for &(field, bits) in item.fields() {
            self.require(Key { level, nth, kind: KeyKind::Field(field) }, bits, ErrorLocation::Field(index, field))?;
        }
        Ok(())
    }

    /// Requires that MPLS labels are absent where the pattern names the headers on both sides but no labels.
    fn require_absent_mpls(&mut self, items: &[Item]) -> Result<(), RuleError> {
        for level in 0..LEVELS {
            let mut here = items.iter().enumerate().filter(|(_, i)| u8::from(i.inner) == level).peekable();
            let inside = items.iter().position(|i| u8::from(i.inner) > level);
            let mut last = None;
            let mut labelled = 0;
            while let Some((index, item)) = here.next() {
                let spec = item.kind.spec();
                if spec.layer == Layer::Label {
                    let position = match last {
                        Some(ItemKind::Udp) => mpls::AFTER_UDP,
                        Some(ItemKind::Gre) => mpls::AFTER_GRE,
                        Some(ItemKind::Mpls) => labelled,
                        _ => mpls::AFTER_ETHERNET,
                    };
                    let bits = MaskedValue { value: position.into(), mask: position.into() };
                    self.require(Key::header_type(level, HeaderType::Mpls), bits, ErrorLocation::Item(index))?;
                    labelled |= position;
                    match position {
                        mpls::AFTER_UDP => {
                            self.require_header_type(level, HeaderType::Transport, 17, ErrorLocation::Item(index))?;
                        }
                        mpls::AFTER_GRE => self.require_header_type(
                            level,
                            HeaderType::Tunnel,
                            tunnel::GRE,
                            ErrorLocation::Item(index),
                        )?,
                        _ => {}
                    }
                } else if spec.layer > Layer::Label && labelled & mpls::AFTER_ETHERNET == 0 {
                    let bits = MaskedValue { value: 0, mask: mpls::AFTER_ETHERNET.into() };
                    self.require(Key::header_type(level, HeaderType::Mpls), bits, ErrorLocation::Item(index))?;
                }
                // The next named header directly follows this GRE or UDP header.
                let position = match item.kind {
                    ItemKind::Gre => mpls::AFTER_GRE,
                    ItemKind::Udp => mpls::AFTER_UDP,
                    _ => 0,
                };
                if let Some(inside) = inside.filter(|_| position != 0 && here.peek().is_none()) {
                    let bits = MaskedValue { value: 0, mask: position.into() };
                    self.require(Key::header_type(level, HeaderType::Mpls), bits, ErrorLocation::Item(inside))?;
                }
                last = Some(item.kind);
            }
        }
        Ok(())
    }

    fn require_header_type(
        &mut self,
        level: u8,
        fact: HeaderType,
        code: u8,
        at: ErrorLocation,
    ) -> Result<(), RuleError> {
        self.require(Key::header_type(level, fact), MaskedValue::exact(code.into(), 8), at)
    }

    fn value(&self, key: Key) -> Option<u128> {
        self.map.get(&key).filter(|(bits, _)| bits.mask == ones(key.bits())).map(|(bits, _)| bits.value)
    }

    fn bits(&self, key: Key) -> MaskedValue {
        self.map.get(&key).map_or(MaskedValue { value: 0, mask: 0 }, |(bits, _)| *bits)
    }

    fn at(&self, key: Key) -> ErrorLocation {
        self.map.get(&key).map_or(ErrorLocation::Rule, |(_, at)| *at)
    }

    /// Requires that a key has one of these values. Returns the value if only one is possible.
    fn one_of(&mut self, key: Key, values: &[u128], at: ErrorLocation) -> Result<Option<u128>, RuleError> {
        let bits = self.bits(key);
        let mut left = values.iter().copied().filter(|&value| bits.matches(value));
        match (left.next(), left.next()) {
            (None, _) => {
                let print = |&value: &u128| key.print(MaskedValue::exact(value, key.bits()));
                let expected = values.iter().map(print).collect::<Vec<_>>().join(" or ");
                let message = format!("{key} would have to be {expected}, but is {}", key.print(bits));
                Err(RuleError::new(Reason::Contradiction, at, message))
            }
            (Some(value), None) => self.require(key, MaskedValue::exact(value, key.bits()), at).map(|()| Some(value)),
            _ => Ok(None),
        }
    }

    /// Adds consequences until nothing changes any more.
    fn propagate(&mut self) -> Result<(), RuleError> {
        loop {
            self.changed = false;
            for level in 0..LEVELS {
                self.network(level)?;
                self.fragment(level, Field::Ipv4Frag)?;
                self.fragment(level, Field::Ipv6Frag)?;
                self.tunnels(level)?;
                let tags = Key::field(level, Field::EthTags);
                let (at, bits) = (self.at(tags), self.bits(tags));
                if bits.value & 2 != 0 {
                    self.require(tags, MaskedValue { value: 1, mask: 1 }, at)?;
                }
                if bits.mask & 1 != 0 && bits.value & 1 == 0 {
                    self.require(tags, MaskedValue { value: 0, mask: 2 }, at)?;
                }
            }
            if !self.changed {
                return Ok(());
            }
        }
    }

    fn network(&mut self, level: u8) -> Result<(), RuleError> {
        let fact = |fact| Key::header_type(level, fact);
        let field = |field| Key::field(level, field);
        let layer3 = self.value(fact(HeaderType::Network)).map(|v| v as u8);
        let at = self.at(fact(HeaderType::Network));
        if layer3 == Some(network::ARP) {
            let no_label = MaskedValue { value: 0, mask: mpls::AFTER_ETHERNET.into() };
            self.require(fact(HeaderType::Mpls), no_label, at)?;
        }
        let ethernet = level == 0 || self.value(fact(HeaderType::Link)) == Some(1);
        let labels = self.bits(fact(HeaderType::Mpls));
        let no_label = labels.mask & 1 != 0 && labels.value & 1 == 0;
        if ethernet && no_label {
            let ethertype = match layer3 {
                Some(network::ARP) => Some(0x0806),
                Some(network::IPV4) => Some(0x0800),
                Some(network::IPV6) => Some(0x86dd),
                _ => None,
            };
            let carried = self.at(fact(HeaderType::Transport));
            match ethertype {
                Some(ethertype) => self.require(field(Field::EthType), MaskedValue::exact(ethertype, 16), at)?,
                // Layer 4 is present, so layer 3 is IP.
                None if self.value(fact(HeaderType::Transport)).is_some_and(|v| v != 0) => {
                    if let Some(ethertype) = self.one_of(field(Field::EthType), &[0x0800, 0x86dd], carried)? {
                        let version = if ethertype == 0x0800 { network::IPV4 } else { network::IPV6 };
                        self.require(fact(HeaderType::Network), MaskedValue::exact(version.into(), 8), carried)?;
                    }
                }
                None => {}
            }
        }
        if labels.value & 1 != 0 && ethernet {
            self.one_of(field(Field::EthType), &[0x8847, 0x8848], self.at(fact(HeaderType::Mpls)))?;
        }
        if labels.value & u128::from(mpls::AFTER_UDP) != 0 {
            self.require_header_type(level, HeaderType::Tunnel, tunnel::NONE, self.at(fact(HeaderType::Mpls)))?;
        }
        let l4 = fact(HeaderType::Transport);
        let protocol = match layer3 {
            Some(network::IPV4) => Some(Field::Ipv4Proto),
            Some(network::IPV6) => Some(Field::Ipv6Proto),
            _ => None,
        };
        if let Some(layer4) = self.value(l4).filter(|&v| v != 0) {
            let at = self.at(l4);
            match (layer3, protocol) {
                (Some(network::IPV4), Some(protocol)) => {
                    self.require(field(protocol), MaskedValue::exact(layer4, 8), at)?;
                    self.require(field(Field::Ipv4Frag), MaskedValue { value: 0, mask: 2 }, at)?;
                }
                (_, Some(protocol)) => {
                    self.require(field(protocol), MaskedValue::exact(layer4, 8), at)?;
                    self.require(field(Field::Ipv6Frag), MaskedValue { value: 0, mask: 2 }, at)?;
                }
                (Some(other), None) => {
                    let message = format!(
                        "layer 3 is {}, which carries no layer 4",
                        fact(HeaderType::Network).print(MaskedValue::exact(other.into(), 8))
                    );
                    return Err(RuleError::new(Reason::Contradiction, at, message));
                }
                (None, _) => {}
            }
        }
        self.extensions(level)
    }

    /// Adds the consequences of one step in the chain of IPv6 headers.
    fn extensions(&mut self, level: u8) -> Result<(), RuleError> {
        let field = |field| Key::field(level, field);
        let next = field(Field::Ipv6Next);
        let present = field(Field::Ipv6Ext);
        let at = self.at(next);
        const NUMBERS: [(u128, u128); 5] =
            [(0, ext::HOP_BY_HOP), (43, ext::ROUTING), (44, ext::FRAGMENT), (51, ext::AH), (60, ext::DESTINATION)];
        let proto = field(Field::Ipv6Proto);
        if self.value(proto).is_some_and(|value| NUMBERS.iter().any(|(number, _)| *number == value)) {
            // The chain ends early only in a later fragment.
            self.require(field(Field::Ipv6Frag), MaskedValue { value: 3, mask: 3 }, self.at(proto))?;
        }
        if self.bits(next).mask != 0 {
            let extensions = self.bits(present);
            let possible = |&&(_, bit): &&(u128, u128)| extensions.mask & bit == 0 || extensions.value & bit != 0;
            let mut first: Vec<u128> = NUMBERS.iter().filter(possible).map(|(number, _)| *number).collect();
            let proto = self.value(field(Field::Ipv6Proto));
            if extensions.value == 0 {
                first.extend(proto);
            }
            // Without extension headers, the first header is the protocol, which may have any value.
            if extensions.value != 0 || proto.is_some() {
                let at = if proto.is_some() { self.at(field(Field::Ipv6Proto)) } else { at };
                self.one_of(next, &first, at)?;
            }
        }
        if let Some(value) = self.value(next) {
            match NUMBERS.iter().find(|(number, _)| *number == value) {
                Some(&(_, bit)) => self.require(present, MaskedValue { value: bit, mask: bit }, at)?,
                None => {
                    self.require(present, MaskedValue::exact(0, 5), at)?;
                    self.require(field(Field::Ipv6Proto), MaskedValue::exact(value, 8), at)?;
                }
            }
        }
        if self.value(present) == Some(0) {
            let at = self.at(present);
            if let Some(proto) = self.value(field(Field::Ipv6Proto)) {
                self.require(next, MaskedValue::exact(proto, 8), at)?;
            }
        }
        let bits = self.bits(present);
        if bits.mask & ext::FRAGMENT != 0 && bits.value & ext::FRAGMENT == 0 {
            self.require(field(Field::Ipv6Frag), MaskedValue { value: 0, mask: 3 }, self.at(present))?;
        }
        let frag = self.bits(field(Field::Ipv6Frag));
        if frag.value != 0 {
            let bits = MaskedValue { value: ext::FRAGMENT, mask: ext::FRAGMENT };
            self.require(present, bits, self.at(field(Field::Ipv6Frag)))?;
        }
        Ok(())
    }

    /// Fragment bits: bit 0 is a fragment, bit 1 is not the first one. Bit 1 implies bit 0.
    fn fragment(&mut self, level: u8, which: Field) -> Result<(), RuleError> {
        let frag = Key::field(level, which);
        let later = MaskedValue { value: 2, mask: 2 };
        if which == Field::Ipv4Frag {
            let (offset, more) = (Key::field(level, Field::Ipv4Offset), Key::field(level, Field::Ipv4Mf));
            let (at_offset, at_more) = (self.at(offset), self.at(more));
            if self.bits(offset).value != 0 {
                self.require(frag, later, at_offset)?;
            }
            match self.value(more) {
                Some(1) => self.require(frag, MaskedValue { value: 1, mask: 1 }, at_more)?,
                Some(0) if self.value(offset) == Some(0) => {
                    self.require(frag, MaskedValue { value: 0, mask: 3 }, at_more)?;
                }
                _ => {}
            }
            if self.value(offset) == Some(0) {
                self.require(frag, MaskedValue { value: 0, mask: 2 }, at_offset)?;
            }
            let (bits, at) = (self.bits(frag), self.at(frag));
            if bits.mask & 2 != 0 && bits.value & 2 == 0 {
                self.require(offset, MaskedValue::exact(0, 13), at)?;
                // A first fragment has the "more fragments" flag, else it would be a whole packet.
                if bits.mask & 1 != 0 {
                    self.require(more, MaskedValue::exact(bits.value & 1, 1), at)?;
                }
            }
        }
        let (bits, at) = (self.bits(frag), self.at(frag));
        if bits.value & 2 != 0 {
            self.require(frag, MaskedValue { value: 1, mask: 1 }, at)?;
            self.require_header_type(level, HeaderType::Transport, 0, at)?;
        }
        if bits.mask & 1 != 0 && bits.value & 1 == 0 {
            self.require(frag, MaskedValue { value: 0, mask: 2 }, at)?;
        }
        Ok(())
    }

    /// Adds the consequences between a tunnel header and its inner stack, in both directions.
    fn tunnels(&mut self, level: u8) -> Result<(), RuleError> {
        let kind = Key::header_type(level, HeaderType::Tunnel);
        let key = Key::field(level, Field::GreKey);
        if self.bits(key).mask != 0 {
            let has = MaskedValue { value: 0x2000, mask: 0x2000 };
            self.require(Key::field(level, Field::GreFlags), has, self.at(key))?;
        }
        let labels = Key::header_type(level, HeaderType::Mpls);
        if self.bits(labels).value & u128::from(mpls::AFTER_GRE) != 0 {
            self.one_of(Key::field(level, Field::GreProto), &[0x8847, 0x8848], self.at(labels))?;
        }
        if self.value(kind) == Some(tunnel::GRE.into()) {
            let (key, proto) = (Key::field(level, Field::GreProto), self.bits(Key::field(level, Field::GreProto)));
            if !proto.matches(0x8847) && !proto.matches(0x8848) {
                let none = MaskedValue { value: 0, mask: mpls::AFTER_GRE.into() };
                self.require(labels, none, self.at(key))?;
            }
        }
        if level > 0 && self.bits(labels).value & u128::from(mpls::AFTER_ETHERNET) != 0 {
            self.require(Key::header_type(level, HeaderType::Link), MaskedValue::exact(1, 8), self.at(labels))?;
        }
        let inside = level + 1;
        if inside == LEVELS {
            return Ok(());
        }
        let link = Key::header_type(inside, HeaderType::Link);
        let layer3 = Key::header_type(inside, HeaderType::Network);
        let anything = self.map.range(Key::header_type(inside, HeaderType::Link)..).next().map(|(_, (_, at))| *at);
        if let Some(at) = anything {
            self.outer_carries_stack(at)?;
        }
        let (protocol, codes, carries_known) = match self.value(kind).map(|v| v as u8) {
            Some(tunnel::VXLAN) => {
                if let Some(at) = anything {
                    self.require(link, MaskedValue::exact(1, 8), at)?;
                }
                return Ok(());
            }
            Some(tunnel::VXLAN_GPE) => (Field::GpeNext, [3, 1, 2], true),
            Some(tunnel::GENEVE) => (Field::GeneveProto, [0x6558, 0x0800, 0x86dd], true),
            Some(tunnel::GRE) => {
                let labels = self.bits(Key::header_type(level, HeaderType::Mpls));
                let none =
                    labels.mask & u128::from(mpls::AFTER_GRE) != 0 && labels.value & u128::from(mpls::AFTER_GRE) == 0;
                (Field::GreProto, [0x6558, 0x0800, 0x86dd], none)
            }
            _ => return Ok(()),
        };
        let [ethernet, ipv4, ipv6] = codes;
        let protocol = Key::field(level, protocol);
        if let Some(at) = anything.filter(|_| carries_known) {
            let (has_ethernet, version) = (self.value(link), self.value(layer3));
            let fits = |&code: &u128| match (code, has_ethernet, version.map(|v| v as u8)) {
                (code, Some(1), _) => code == ethernet,
                (code, None, Some(network::IPV4)) => code != ipv6,
                (code, None, Some(network::IPV6)) => code != ipv4,
                (code, _, Some(network::IPV4)) => code == ipv4,
                (code, _, Some(network::IPV6)) => code == ipv6,
                (_, None, _) => true,
                (code, ..) => code != ethernet,
            };
            let codes: Vec<u128> = codes.into_iter().filter(fits).collect();
            match self.one_of(protocol, &codes, at)? {
                Some(code) if code == ethernet => self.require(link, MaskedValue::exact(1, 8), at)?,
                Some(code) => {
                    self.require(link, MaskedValue::exact(0, 8), at)?;
                    let version = if code == ipv4 { network::IPV4 } else { network::IPV6 };
                    self.require(layer3, MaskedValue::exact(version.into(), 8), at)?;
                }
                None => {}
            }
        }
        if self.value(link) == Some(0) {
            let none = MaskedValue { value: 0, mask: mpls::AFTER_ETHERNET.into() };
            self.require(Key::header_type(inside, HeaderType::Mpls), none, self.at(link))?;
        }
        Ok(())
    }

    /// Requires that the outer stack carries the inner one, in a tunnel or as IP in IP.
    fn outer_carries_stack(&mut self, at: ErrorLocation) -> Result<(), RuleError> {
        let (protocol, frag) = match self.value(Key::header_type(0, HeaderType::Network)).map(|v| v as u8) {
            Some(network::IPV4) => (Field::Ipv4Proto, Field::Ipv4Frag),
            Some(network::IPV6) => (Field::Ipv6Proto, Field::Ipv6Frag),
            Some(network::ARP) => {
                return Err(RuleError::new(Reason::Contradiction, at, "arp carries no further headers"));
            }
            _ => return self.unknown_outer_carries_stack(at),
        };
        self.require(Key::field(0, frag), MaskedValue { value: 0, mask: 2 }, at)?;
        let (link, layer3) = (Key::header_type(1, HeaderType::Link), Key::header_type(1, HeaderType::Network));
        let mut codes = vec![17, 47];
        if self.value(Key::header_type(0, HeaderType::Transport)).is_none_or(|v| v == 0) {
            match self.value(layer3).map(|v| v as u8) {
                _ if self.value(link) == Some(1) => {}
                Some(network::IPV4) => codes.push(4),
                Some(network::IPV6) => codes.push(41),
                None => codes.extend([4, 41]),
                _ => {}
            }
            // Ethernet in IP (RFC 8986 section 10.1).
            if self.value(link) != Some(0) {
                codes.push(143);
            }
        }
        match self.one_of(Key::field(0, protocol), &codes, at)? {
            Some(code @ (4 | 41)) => {
                self.require(link, MaskedValue::exact(0, 8), at)?;
                let version = if code == 4 { network::IPV4 } else { network::IPV6 };
                self.require(layer3, MaskedValue::exact(version.into(), 8), at)
            }
            Some(143) => self.require(link, MaskedValue::exact(1, 8), at),
            _ => Ok(()),
        }
    }

    /// Requires the same if the type of the outer layer 3 is unknown.
    fn unknown_outer_carries_stack(&mut self, at: ErrorLocation) -> Result<(), RuleError> {
        let layer4 = Key::header_type(0, HeaderType::Transport);
        if self.bits(layer4).mask != 0 {
            self.one_of(layer4, &[0, 17, 47], at)?;
        }
        let labels = self.bits(Key::header_type(0, HeaderType::Mpls));
        let ethertypes: &[u128] = match (labels.mask & 1, labels.value & 1) {
            (0, _) => &[0x0800, 0x86dd, 0x8847, 0x8848],
            (_, 0) => &[0x0800, 0x86dd],
            _ => &[0x8847, 0x8848],
        };
        let ethertype = self.one_of(Key::field(0, Field::EthType), ethertypes, at)?;
        let link = u128::from(mpls::AFTER_ETHERNET);
        match ethertype {
            Some(ethertype @ (0x0800 | 0x86dd)) => {
                let version = if ethertype == 0x0800 { network::IPV4 } else { network::IPV6 };
                self.require_header_type(0, HeaderType::Network, version, at)?;
                self.require(Key::header_type(0, HeaderType::Mpls), MaskedValue { value: 0, mask: link }, at)
            }
            Some(_) => self.require(Key::header_type(0, HeaderType::Mpls), MaskedValue { value: link, mask: link }, at),
            None => Ok(()),
        }
    }

    fn finish(self) -> FieldSet {
        FieldSet { list: self.map.into_iter().map(|(key, (bits, _))| (key, bits)).collect() }
    }
}

const _: () = assert!(FIELDS.len() < 256 && LEVELS == 2);
