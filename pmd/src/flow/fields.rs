//! Patterns as flat lists of keys with values and masks: what engines and drivers match on.
//!
//! The list is *closed*: what follows from a pattern is in it. `ipv4 / udp` says nothing of EtherType and protocol, its list does.
//! That makes [`FieldSet::covers`] and [`FieldSet::and`] plain comparisons, and contradictions visible.

use std::collections::BTreeMap;
use std::fmt;

use super::bits::{Bits, ones};
use super::items::{FIELDS, ITEMS, ext, mpls, network, tunnel};
use super::{At, Fact, Field, Item, ItemKind, Layer, Reason, RuleError};

/// How many header stacks patterns look at: the outer one and the one inside its tunnel.
pub const LEVELS: u8 = 2;

/// What is compared: a fact or a field of one header of a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Header stack: 0 the outer, 1 the inner.
    pub level: u8,
    /// Which, for headers of which a stack has several: 0 the outermost VLAN tag or label.
    pub nth: u8,
    /// What of it.
    pub what: What,
}

/// Fact or field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// A fact about the stack.
    Fact(Fact),
    /// A field of a header.
    Field(Field),
}

impl Key {
    /// A fact about a stack.
    pub const fn fact(level: u8, fact: Fact) -> Self {
        Self { level, nth: 0, what: What::Fact(fact) }
    }

    /// A field of the first header of its kind in a stack.
    pub const fn field(level: u8, field: Field) -> Self {
        Self { level, nth: 0, what: What::Field(field) }
    }

    /// Bits of its values.
    pub fn bits(self) -> u8 {
        match self.what {
            What::Fact(_) => 8,
            What::Field(field) => field.spec().bits,
        }
    }

    /// A value as people write it.
    fn print(self, bits: Bits) -> String {
        let named = |code: u128, names: &[(u8, &str)]| {
            let name = names.iter().find(|(known, _)| bits.mask == 0xff && u128::from(*known) == code);
            name.map_or_else(|| format!("{bits:?}"), |(_, name)| (*name).to_owned())
        };
        match self.what {
            What::Field(field) => field.spec().format.print(field.spec().bits, bits),
            What::Fact(Fact::Network) => named(
                bits.value,
                &[(network::NONE, "none"), (network::ARP, "arp"), (network::IPV4, "ipv4"), (network::IPV6, "ipv6")],
            ),
            What::Fact(Fact::Transport) => named(
                bits.value,
                &[(0, "none"), (1, "icmp"), (6, "tcp"), (17, "udp"), (47, "gre"), (50, "esp"), (58, "icmpv6")],
            ),
            What::Fact(Fact::Tunnel) => named(
                bits.value,
                &[
                    (tunnel::NONE, "none"),
                    (tunnel::VXLAN, "vxlan"),
                    (tunnel::VXLAN_GPE, "vxlan-gpe"),
                    (tunnel::GENEVE, "geneve"),
                    (tunnel::GRE, "gre"),
                ],
            ),
            What::Fact(_) => if bits.value == 0 { "absent" } else { "present" }.to_owned(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.level > 0 {
            f.write_str("inner ")?;
        }
        match self.what {
            What::Fact(Fact::Link) => f.write_str("Ethernet header"),
            What::Fact(Fact::Mpls) => f.write_str("MPLS"),
            What::Fact(Fact::Network) => f.write_str("layer 3"),
            What::Fact(Fact::Transport) => f.write_str("layer 4"),
            What::Fact(Fact::Tunnel) => f.write_str("tunnel"),
            What::Field(field) => {
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

/// A closed list of what a packet must be, sorted by key; each key at most once, no empty masks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct FieldSet {
    list: Vec<(Key, Bits)>,
}

impl FieldSet {
    /// What a pattern demands. Checks that it is possible.
    pub(super) fn of(items: &[Item]) -> Result<Self, RuleError> {
        let mut known = Known::default();
        let mut nth = [[0u8; ITEMS.len()]; LEVELS as usize];
        for (index, item) in items.iter().enumerate() {
            let level = u8::from(item.inner);
            let count = &mut nth[usize::from(level)][item.kind as usize];
            known.item(index, item, level, *count)?;
            *count += 1;
        }
        known.skip_no_mpls(items)?;
        known.close()?;
        Ok(known.finish())
    }

    /// Keys with what they are compared with, sorted.
    pub fn list(&self) -> &[(Key, Bits)] {
        &self.list
    }

    /// What a key is compared with.
    pub fn get(&self, key: Key) -> Option<Bits> {
        self.list.binary_search_by_key(&key, |(k, _)| *k).ok().map(|i| self.list[i].1)
    }

    /// Whether a key is known to be exactly this.
    pub fn is(&self, key: Key, value: u128) -> bool {
        self.get(key) == Some(Bits::exact(value, key.bits()))
    }

    /// Whether a packet fits; `packet` gives the value of a key, or `None` if the packet has no such header.
    pub fn matches(&self, mut packet: impl FnMut(Key) -> Option<u128>) -> bool {
        self.list.iter().all(|&(key, bits)| packet(key).is_some_and(|value| bits.matches(value)))
    }

    /// What a packet that fits both fits; `None` if there is no such packet.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let mut known = Known::default();
        for &(key, bits) in self.list.iter().chain(&other.list) {
            known.require(key, bits, At::Rule).ok()?;
        }
        known.close().ok()?;
        Some(known.finish())
    }
}

/// Whether some packet fits both. `false` is certain; `true` may be said of patterns that exclude each other only through
/// several masked protocol numbers at once, so that rules kept apart for overlapping are at most too many.
pub fn overlaps(a: &FieldSet, b: &FieldSet) -> bool {
    a.and(b).is_some()
}

/// Whether every packet that fits `b` fits `a`. `true` is certain.
pub fn covers(a: &FieldSet, b: &FieldSet) -> bool {
    a.list.iter().all(|&(key, bits)| b.get(key).is_some_and(|other| bits.covers(other)))
}

/// A list being closed.
#[derive(Default)]
struct Known {
    map: BTreeMap<Key, (Bits, At)>,
    changed: bool,
}

impl Known {
    fn require(&mut self, key: Key, bits: Bits, at: At) -> Result<(), RuleError> {
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
        let at = At::Item(index);
        for &(fact, code) in item.kind.spec().facts {
            // The outermost stack always begins with an Ethernet header.
            if fact != Fact::Link || level > 0 {
                self.require(Key::fact(level, fact), Bits::exact(u128::from(code), 8), at)?;
            }
        }
        match item.kind {
            ItemKind::Vlan => {
                self.require(Key::field(level, Field::EthTags), Bits { value: 1 << nth, mask: 1 << nth }, at)?;
            }
            ItemKind::Mpls if nth > 0 => {
                let above = Key { level, nth: nth - 1, what: What::Field(Field::MplsBos) };
                self.require(above, Bits::exact(0, 1), at)?;
            }
            _ => {}
        }
        for &(field, bits) in item.fields() {
            self.require(Key { level, nth, what: What::Field(field) }, bits, At::Field(index, field))?;
        }
        Ok(())
    }

    /// MPLS is never skipped: where a pattern names headers on both sides of its place without naming it, it is not there.
    fn skip_no_mpls(&mut self, items: &[Item]) -> Result<(), RuleError> {
        for level in 0..LEVELS {
            let mut here = items.iter().enumerate().filter(|(_, i)| u8::from(i.inner) == level).peekable();
            let inside = items.iter().position(|i| u8::from(i.inner) > level);
            let mut last = None;
            let mut labelled = 0;
            while let Some((index, item)) = here.next() {
                let spec = item.kind.spec();
                if spec.layer == Layer::Label {
                    let place = match last {
                        Some(ItemKind::Udp) => mpls::BEHIND_UDP,
                        Some(ItemKind::Gre) => mpls::BEHIND_GRE,
                        Some(ItemKind::Mpls) => labelled,
                        _ => mpls::BEHIND_LINK,
                    };
                    let bits = Bits { value: place.into(), mask: place.into() };
                    self.require(Key::fact(level, Fact::Mpls), bits, At::Item(index))?;
                    labelled |= place;
                    match place {
                        mpls::BEHIND_UDP => self.require_fact(level, Fact::Transport, 17, At::Item(index))?,
                        mpls::BEHIND_GRE => self.require_fact(level, Fact::Tunnel, tunnel::GRE, At::Item(index))?,
                        _ => {}
                    }
                } else if spec.layer > Layer::Label && labelled & mpls::BEHIND_LINK == 0 {
                    let bits = Bits { value: 0, mask: mpls::BEHIND_LINK.into() };
                    self.require(Key::fact(level, Fact::Mpls), bits, At::Item(index))?;
                }
                // A GRE or UDP header that carries what comes next, if that is named.
                let place = match item.kind {
                    ItemKind::Gre => mpls::BEHIND_GRE,
                    ItemKind::Udp => mpls::BEHIND_UDP,
                    _ => 0,
                };
                if let Some(inside) = inside.filter(|_| place != 0 && here.peek().is_none()) {
                    let bits = Bits { value: 0, mask: place.into() };
                    self.require(Key::fact(level, Fact::Mpls), bits, At::Item(inside))?;
                }
                last = Some(item.kind);
            }
        }
        Ok(())
    }

    fn require_fact(&mut self, level: u8, fact: Fact, code: u8, at: At) -> Result<(), RuleError> {
        self.require(Key::fact(level, fact), Bits::exact(code.into(), 8), at)
    }

    fn value(&self, key: Key) -> Option<u128> {
        self.map.get(&key).filter(|(bits, _)| bits.mask == ones(key.bits())).map(|(bits, _)| bits.value)
    }

    fn bits(&self, key: Key) -> Bits {
        self.map.get(&key).map_or(Bits { value: 0, mask: 0 }, |(bits, _)| *bits)
    }

    fn at(&self, key: Key) -> At {
        self.map.get(&key).map_or(At::Rule, |(_, at)| *at)
    }

    /// A key that must have one of these values: `Some` if only one is left.
    fn one_of(&mut self, key: Key, values: &[u128], at: At) -> Result<Option<u128>, RuleError> {
        let bits = self.bits(key);
        let mut left = values.iter().copied().filter(|&value| bits.matches(value));
        match (left.next(), left.next()) {
            (None, _) => {
                let print = |&value: &u128| key.print(Bits::exact(value, key.bits()));
                let expected = values.iter().map(print).collect::<Vec<_>>().join(" or ");
                let message = format!("{key} would have to be {expected}, but is {}", key.print(bits));
                Err(RuleError::new(Reason::Contradiction, at, message))
            }
            (Some(value), None) => self.require(key, Bits::exact(value, key.bits()), at).map(|()| Some(value)),
            _ => Ok(None),
        }
    }

    /// Adds what follows until nothing new does.
    fn close(&mut self) -> Result<(), RuleError> {
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
                    self.require(tags, Bits { value: 1, mask: 1 }, at)?;
                }
                if bits.mask & 1 != 0 && bits.value & 1 == 0 {
                    self.require(tags, Bits { value: 0, mask: 2 }, at)?;
                }
            }
            if !self.changed {
                return Ok(());
            }
        }
    }

    fn network(&mut self, level: u8) -> Result<(), RuleError> {
        let fact = |fact| Key::fact(level, fact);
        let field = |field| Key::field(level, field);
        let layer3 = self.value(fact(Fact::Network)).map(|v| v as u8);
        let at = self.at(fact(Fact::Network));
        if layer3 == Some(network::ARP) {
            let no_label = Bits { value: 0, mask: mpls::BEHIND_LINK.into() };
            self.require(fact(Fact::Mpls), no_label, at)?;
        }
        let ethernet = level == 0 || self.value(fact(Fact::Link)) == Some(1);
        let labels = self.bits(fact(Fact::Mpls));
        let no_label = labels.mask & 1 != 0 && labels.value & 1 == 0;
        if ethernet && no_label {
            let ethertype = match layer3 {
                Some(network::ARP) => Some(0x0806),
                Some(network::IPV4) => Some(0x0800),
                Some(network::IPV6) => Some(0x86dd),
                _ => None,
            };
            let carried = self.at(fact(Fact::Transport));
            match ethertype {
                Some(ethertype) => self.require(field(Field::EthType), Bits::exact(ethertype, 16), at)?,
                // Layer 4 is there, so layer 3 is IP.
                None if self.value(fact(Fact::Transport)).is_some_and(|v| v != 0) => {
                    if let Some(ethertype) = self.one_of(field(Field::EthType), &[0x0800, 0x86dd], carried)? {
                        let version = if ethertype == 0x0800 { network::IPV4 } else { network::IPV6 };
                        self.require(fact(Fact::Network), Bits::exact(version.into(), 8), carried)?;
                    }
                }
                None => {}
            }
        }
        if labels.value & 1 != 0 && ethernet {
            self.one_of(field(Field::EthType), &[0x8847, 0x8848], self.at(fact(Fact::Mpls)))?;
        }
        if labels.value & u128::from(mpls::BEHIND_UDP) != 0 {
            self.require_fact(level, Fact::Tunnel, tunnel::NONE, self.at(fact(Fact::Mpls)))?;
        }
        let l4 = fact(Fact::Transport);
        let protocol = match layer3 {
            Some(network::IPV4) => Some(Field::Ipv4Proto),
            Some(network::IPV6) => Some(Field::Ipv6Proto),
            _ => None,
        };
        if let Some(layer4) = self.value(l4).filter(|&v| v != 0) {
            let at = self.at(l4);
            match (layer3, protocol) {
                (Some(network::IPV4), Some(protocol)) => {
                    self.require(field(protocol), Bits::exact(layer4, 8), at)?;
                    self.require(field(Field::Ipv4Frag), Bits { value: 0, mask: 2 }, at)?;
                }
                (_, Some(protocol)) => {
                    self.require(field(protocol), Bits::exact(layer4, 8), at)?;
                    self.require(field(Field::Ipv6Frag), Bits { value: 0, mask: 2 }, at)?;
                }
                (Some(other), None) => {
                    let message = format!(
                        "layer 3 is {}, which carries no layer 4",
                        fact(Fact::Network).print(Bits::exact(other.into(), 8))
                    );
                    return Err(RuleError::new(Reason::Contradiction, at, message));
                }
                (None, _) => {}
            }
        }
        self.extensions(level)
    }

    /// The chain of IPv6 headers, as far as one step.
    fn extensions(&mut self, level: u8) -> Result<(), RuleError> {
        let field = |field| Key::field(level, field);
        let next = field(Field::Ipv6Next);
        let present = field(Field::Ipv6Ext);
        let at = self.at(next);
        const NUMBERS: [(u128, u128); 5] =
            [(0, ext::HOP_BY_HOP), (43, ext::ROUTING), (44, ext::FRAGMENT), (51, ext::AH), (60, ext::DESTINATION)];
        let proto = field(Field::Ipv6Proto);
        if self.value(proto).is_some_and(|value| NUMBERS.iter().any(|(number, _)| *number == value)) {
            // Only where the chain cannot be followed: in what a later fragment holds.
            self.require(field(Field::Ipv6Frag), Bits { value: 3, mask: 3 }, self.at(proto))?;
        }
        if self.bits(next).mask != 0 {
            let extensions = self.bits(present);
            let possible = |&&(_, bit): &&(u128, u128)| extensions.mask & bit == 0 || extensions.value & bit != 0;
            let mut first: Vec<u128> = NUMBERS.iter().filter(possible).map(|(number, _)| *number).collect();
            let proto = self.value(field(Field::Ipv6Proto));
            if extensions.value == 0 {
                first.extend(proto);
            }
            // Without extension headers the protocol comes first, and that may be anything.
            if extensions.value != 0 || proto.is_some() {
                let at = if proto.is_some() { self.at(field(Field::Ipv6Proto)) } else { at };
                self.one_of(next, &first, at)?;
            }
        }
        if let Some(value) = self.value(next) {
            match NUMBERS.iter().find(|(number, _)| *number == value) {
                Some(&(_, bit)) => self.require(present, Bits { value: bit, mask: bit }, at)?,
                None => {
                    self.require(present, Bits::exact(0, 5), at)?;
                    self.require(field(Field::Ipv6Proto), Bits::exact(value, 8), at)?;
                }
            }
        }
        if self.value(present) == Some(0) {
            let at = self.at(present);
            if let Some(proto) = self.value(field(Field::Ipv6Proto)) {
                self.require(next, Bits::exact(proto, 8), at)?;
            }
        }
        let bits = self.bits(present);
        if bits.mask & ext::FRAGMENT != 0 && bits.value & ext::FRAGMENT == 0 {
            self.require(field(Field::Ipv6Frag), Bits { value: 0, mask: 3 }, self.at(present))?;
        }
        let frag = self.bits(field(Field::Ipv6Frag));
        if frag.value != 0 {
            let bits = Bits { value: ext::FRAGMENT, mask: ext::FRAGMENT };
            self.require(present, bits, self.at(field(Field::Ipv6Frag)))?;
        }
        Ok(())
    }

    /// Bit 0: a fragment; bit 1: not the first. A packet is "not first" only if it is a fragment.
    fn fragment(&mut self, level: u8, which: Field) -> Result<(), RuleError> {
        let frag = Key::field(level, which);
        let later = Bits { value: 2, mask: 2 };
        if which == Field::Ipv4Frag {
            let (offset, more) = (Key::field(level, Field::Ipv4Offset), Key::field(level, Field::Ipv4Mf));
            let (at_offset, at_more) = (self.at(offset), self.at(more));
            if self.bits(offset).value != 0 {
                self.require(frag, later, at_offset)?;
            }
            match self.value(more) {
                Some(1) => self.require(frag, Bits { value: 1, mask: 1 }, at_more)?,
                Some(0) if self.value(offset) == Some(0) => self.require(frag, Bits { value: 0, mask: 3 }, at_more)?,
                _ => {}
            }
            if self.value(offset) == Some(0) {
                self.require(frag, Bits { value: 0, mask: 2 }, at_offset)?;
            }
            let (bits, at) = (self.bits(frag), self.at(frag));
            if bits.mask & 2 != 0 && bits.value & 2 == 0 {
                self.require(offset, Bits::exact(0, 13), at)?;
                // A first fragment has more to follow, or it would be the packet.
                if bits.mask & 1 != 0 {
                    self.require(more, Bits::exact(bits.value & 1, 1), at)?;
                }
            }
        }
        let (bits, at) = (self.bits(frag), self.at(frag));
        if bits.value & 2 != 0 {
            self.require(frag, Bits { value: 1, mask: 1 }, at)?;
            self.require_fact(level, Fact::Transport, 0, at)?;
        }
        if bits.mask & 1 != 0 && bits.value & 1 == 0 {
            self.require(frag, Bits { value: 0, mask: 2 }, at)?;
        }
        Ok(())
    }

    /// What tunnel headers say of the stack inside, and the other way round.
    fn tunnels(&mut self, level: u8) -> Result<(), RuleError> {
        let kind = Key::fact(level, Fact::Tunnel);
        let key = Key::field(level, Field::GreKey);
        if self.bits(key).mask != 0 {
            let has = Bits { value: 0x2000, mask: 0x2000 };
            self.require(Key::field(level, Field::GreFlags), has, self.at(key))?;
        }
        let labels = Key::fact(level, Fact::Mpls);
        if self.bits(labels).value & u128::from(mpls::BEHIND_GRE) != 0 {
            self.one_of(Key::field(level, Field::GreProto), &[0x8847, 0x8848], self.at(labels))?;
        }
        if self.value(kind) == Some(tunnel::GRE.into()) {
            let (key, proto) = (Key::field(level, Field::GreProto), self.bits(Key::field(level, Field::GreProto)));
            if !proto.matches(0x8847) && !proto.matches(0x8848) {
                let none = Bits { value: 0, mask: mpls::BEHIND_GRE.into() };
                self.require(labels, none, self.at(key))?;
            }
        }
        if level > 0 && self.bits(labels).value & u128::from(mpls::BEHIND_LINK) != 0 {
            self.require(Key::fact(level, Fact::Link), Bits::exact(1, 8), self.at(labels))?;
        }
        let inside = level + 1;
        if inside == LEVELS {
            return Ok(());
        }
        let link = Key::fact(inside, Fact::Link);
        let layer3 = Key::fact(inside, Fact::Network);
        let anything = self.map.range(Key::fact(inside, Fact::Link)..).next().map(|(_, (_, at))| *at);
        if let Some(at) = anything {
            self.carries(at)?;
        }
        let (protocol, codes, carries_known) = match self.value(kind).map(|v| v as u8) {
            Some(tunnel::VXLAN) => {
                if let Some(at) = anything {
                    self.require(link, Bits::exact(1, 8), at)?;
                }
                return Ok(());
            }
            Some(tunnel::VXLAN_GPE) => (Field::GpeNext, [3, 1, 2], true),
            Some(tunnel::GENEVE) => (Field::GeneveProto, [0x6558, 0x0800, 0x86dd], true),
            Some(tunnel::GRE) => {
                let labels = self.bits(Key::fact(level, Fact::Mpls));
                let none =
                    labels.mask & u128::from(mpls::BEHIND_GRE) != 0 && labels.value & u128::from(mpls::BEHIND_GRE) == 0;
                (Field::GreProto, [0x6558, 0x0800, 0x86dd], none)
            }
            _ => return Ok(()),
        };
        let [ethernet, ipv4, ipv6] = codes;
        let protocol = Key::field(level, protocol);
        if let Some(at) = anything.filter(|_| carries_known) {
            let (has_link, version) = (self.value(link), self.value(layer3));
            let fits = |&code: &u128| match (code, has_link, version.map(|v| v as u8)) {
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
                Some(code) if code == ethernet => self.require(link, Bits::exact(1, 8), at)?,
                Some(code) => {
                    self.require(link, Bits::exact(0, 8), at)?;
                    let version = if code == ipv4 { network::IPV4 } else { network::IPV6 };
                    self.require(layer3, Bits::exact(version.into(), 8), at)?;
                }
                None => {}
            }
        }
        if self.value(link) == Some(0) {
            let none = Bits { value: 0, mask: mpls::BEHIND_LINK.into() };
            self.require(Key::fact(inside, Fact::Mpls), none, self.at(link))?;
        }
        Ok(())
    }

    /// There is an inner stack, so the outer one carries it: in a tunnel, or as IP in IP.
    fn carries(&mut self, at: At) -> Result<(), RuleError> {
        let (protocol, frag) = match self.value(Key::fact(0, Fact::Network)).map(|v| v as u8) {
            Some(network::IPV4) => (Field::Ipv4Proto, Field::Ipv4Frag),
            Some(network::IPV6) => (Field::Ipv6Proto, Field::Ipv6Frag),
            Some(network::ARP) => {
                return Err(RuleError::new(Reason::Contradiction, at, "arp carries no headers that are looked into"));
            }
            _ => return self.carrier(at),
        };
        self.require(Key::field(0, frag), Bits { value: 0, mask: 2 }, at)?;
        let (link, layer3) = (Key::fact(1, Fact::Link), Key::fact(1, Fact::Network));
        let mut codes = vec![17, 47];
        if self.value(link) != Some(1) && self.value(Key::fact(0, Fact::Transport)).is_none_or(|v| v == 0) {
            match self.value(layer3).map(|v| v as u8) {
                Some(network::IPV4) => codes.push(4),
                Some(network::IPV6) => codes.push(41),
                None => codes.extend([4, 41]),
                _ => {}
            }
        }
        if let Some(code @ (4 | 41)) = self.one_of(Key::field(0, protocol), &codes, at)? {
            self.require(link, Bits::exact(0, 8), at)?;
            let version = if code == 4 { network::IPV4 } else { network::IPV6 };
            self.require(layer3, Bits::exact(version.into(), 8), at)?;
        }
        Ok(())
    }

    /// The same where the outer layer 3 is not known.
    fn carrier(&mut self, at: At) -> Result<(), RuleError> {
        let layer4 = Key::fact(0, Fact::Transport);
        if self.bits(layer4).mask != 0 {
            self.one_of(layer4, &[0, 17, 47], at)?;
        }
        let labels = self.bits(Key::fact(0, Fact::Mpls));
        let ethertypes: &[u128] = match (labels.mask & 1, labels.value & 1) {
            (0, _) => &[0x0800, 0x86dd, 0x8847, 0x8848],
            (_, 0) => &[0x0800, 0x86dd],
            _ => &[0x8847, 0x8848],
        };
        let ethertype = self.one_of(Key::field(0, Field::EthType), ethertypes, at)?;
        let link = u128::from(mpls::BEHIND_LINK);
        match ethertype {
            Some(ethertype @ (0x0800 | 0x86dd)) => {
                let version = if ethertype == 0x0800 { network::IPV4 } else { network::IPV6 };
                self.require_fact(0, Fact::Network, version, at)?;
                self.require(Key::fact(0, Fact::Mpls), Bits { value: 0, mask: link }, at)
            }
            Some(_) => self.require(Key::fact(0, Fact::Mpls), Bits { value: link, mask: link }, at),
            None => Ok(()),
        }
    }

    fn finish(self) -> FieldSet {
        FieldSet { list: self.map.into_iter().map(|(key, (bits, _))| (key, bits)).collect() }
    }
}

const _: () = assert!(FIELDS.len() < 256 && LEVELS == 2);
