//! Random frames of every header stack, most of them made to match a rule.

mod ip;
mod tunnels;

use wirepath_flow::{Field, Item, ItemKind, MaskedValue, Rule};

use super::values;
use crate::fields::PacketMetadata;
use crate::rng::Rng;

/// Returns a random frame with its metadata. It is made to match the rule, if one is given. Some frames are
/// truncated or damaged.
pub fn packet(rng: &mut Rng, rule: Option<&Rule>) -> (Vec<u8>, PacketMetadata) {
    let pattern = rule.map_or(&[][..], Rule::pattern);
    let mut maker = Maker { rng, pattern };
    let metadata = PacketMetadata {
        port: maker.field(0, 0, Field::PortId) as u16,
        mark: maker.field(0, 0, Field::MetaMark) as u32,
        data: maker.field(0, 0, Field::MetaData) as u32,
    };
    let mut frame = maker.stack(0, Carrier::Ethernet);
    let rng = maker.rng;
    if frame.len() < 60 && rng.one_in(2) {
        let padding = rng.next() as u8;
        frame.resize(60, padding);
    }
    match rng.below(24) {
        0 => frame.truncate(rng.index(frame.len()) + 1),
        1 => {
            for _ in 0..=rng.below(2) {
                let at = rng.index(frame.len().min(120));
                frame[at] = rng.next() as u8;
            }
        }
        2 => {
            let at = rng.index(frame.len().min(120));
            frame[at] ^= 1 << rng.below(8);
        }
        _ => {}
    }
    // Ports do not deliver shorter frames.
    if frame.len() < 14 {
        frame.resize(14, 0);
    }
    (frame, metadata)
}

/// Header that carries a stack.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Carrier {
    Ethernet,
    Ip(u8),
}

struct Maker<'a> {
    rng: &'a mut Rng,
    pattern: &'a [Item],
}

const TUNNELS: [ItemKind; 3] = [ItemKind::Vxlan, ItemKind::VxlanGpe, ItemKind::Geneve];

fn be(out: &mut Vec<u8>, value: u128, bytes: usize) {
    out.extend(&value.to_be_bytes()[16 - bytes..]);
}

impl Maker<'_> {
    fn named(&self, level: u8, kind: ItemKind) -> usize {
        self.pattern.iter().filter(|item| u8::from(item.inner) == level && item.kind == kind).count()
    }

    fn any(&self, level: u8, kinds: &[ItemKind]) -> Option<ItemKind> {
        kinds.iter().copied().find(|&kind| self.named(level, kind) > 0)
    }

    fn wanted(&self, level: u8, nth: usize, field: Field) -> Option<MaskedValue> {
        let kind = field.spec().item;
        self.pattern.iter().filter(|item| u8::from(item.inner) == level && item.kind == kind).nth(nth)?.get(field)
    }

    /// Returns a field value that matches the rule and is otherwise random. Some values miss by one bit.
    fn field(&mut self, level: u8, nth: usize, field: Field) -> u128 {
        let value = values::value(self.rng, field);
        match self.wanted(level, nth, field) {
            Some(bits) if self.rng.one_in(40) => {
                (value & !bits.mask | bits.value) ^ 1 << self.rng.below(field.spec().bits.into())
            }
            Some(bits) => value & !bits.mask | bits.value,
            None => value,
        }
    }

    /// Returns one of these values that the rule accepts, or another value that it accepts, or any of these.
    fn choose(&mut self, level: u8, field: Field, from: &[u128]) -> u128 {
        let Some(bits) = self.wanted(level, 0, field) else { return self.rng.pick(from) };
        let fitting: Vec<u128> = from.iter().copied().filter(|&value| bits.matches(value)).collect();
        match fitting.is_empty() {
            true => self.rng.pick(from) & !bits.mask & values::ones(field) | bits.value,
            false => self.rng.pick(&fitting),
        }
    }

    fn inner_items(&self) -> bool {
        self.pattern.iter().any(|item| item.inner)
    }

    /// Returns the header that precedes the labels in the pattern: Ethernet, UDP or GRE.
    fn labels_behind(&self, level: u8) -> Option<ItemKind> {
        let here: Vec<ItemKind> =
            self.pattern.iter().filter(|item| u8::from(item.inner) == level).map(|item| item.kind).collect();
        let at = here.iter().position(|kind| *kind == ItemKind::Mpls)?;
        Some(match at.checked_sub(1).map(|before| here[before]) {
            Some(kind @ (ItemKind::Udp | ItemKind::Gre)) => kind,
            _ => ItemKind::Eth,
        })
    }

    /// Returns the first header of the inner stack that the pattern requires.
    fn inner_carrier(&mut self) -> Carrier {
        if self.any(1, &[ItemKind::Eth, ItemKind::Vlan, ItemKind::Arp, ItemKind::Mpls]).is_some() {
            return Carrier::Ethernet;
        }
        match self.version(1) {
            Some(version) if self.rng.one_in(2) => Carrier::Ip(version),
            None if self.rng.one_in(3) => Carrier::Ip(self.rng.pick(&[4, 6])),
            _ => Carrier::Ethernet,
        }
    }

    fn version(&self, level: u8) -> Option<u8> {
        if self.any(level, &[ItemKind::Ipv4, ItemKind::Icmp]).is_some() {
            return Some(4);
        }
        self.any(level, &[ItemKind::Ipv6, ItemKind::Icmpv6]).map(|_| 6)
    }

    fn payload(&mut self) -> Vec<u8> {
        let length = match self.rng.below(200) {
            0 => 1400,
            1..30 => self.rng.index(100),
            _ => self.rng.index(12),
        };
        let byte = self.rng.next() as u8;
        (0..length).map(|n| byte.wrapping_add(n as u8)).collect()
    }

    fn stack(&mut self, level: u8, carrier: Carrier) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        let Carrier::Ethernet = carrier else {
            let Carrier::Ip(version) = carrier else { return out };
            self.ip(level, version, &mut out);
            return out;
        };
        if level > 1 {
            // No parser looks that deep.
            return (0..self.rng.below(70)).map(|_| self.rng.next() as u8).collect();
        }
        be(&mut out, self.field(level, 0, Field::EthDst), 6);
        be(&mut out, self.field(level, 0, Field::EthSrc), 6);
        let named = self.named(level, ItemKind::Vlan) as u128;
        let all: &[u128] = match (named, self.rng.below(4)) {
            (0, 0) => &[0, 1, 3],
            (0, _) => &[0],
            (1, 0) => &[1, 3],
            (1, _) => &[1],
            _ => &[3],
        };
        let tags = self.choose(level, Field::EthTags, all).count_ones() as usize;
        for nth in 0..tags {
            be(&mut out, self.field(level, nth, Field::VlanTpid), 2);
            let pcp = self.field(level, nth, Field::VlanPcp);
            let dei = self.field(level, nth, Field::VlanDei);
            be(&mut out, pcp << 13 | dei << 12 | self.field(level, nth, Field::VlanVid), 2);
        }
        if tags == 2 && self.rng.one_in(30) {
            be(&mut out, 0x8100_0005, 4);
        }
        let labelled = match self.labels_behind(level) {
            Some(kind) => kind == ItemKind::Eth,
            None => self.pattern.is_empty() && self.rng.one_in(12),
        };
        let transport = [ItemKind::Tcp, ItemKind::Udp, ItemKind::Gre, ItemKind::Esp, ItemKind::Vxlan];
        let ip_wanted = self.any(level, &transport).or(self.any(level, &TUNNELS)).is_some();
        if labelled {
            let ether_type = self.choose(level, Field::EthType, &[0x8847, 0x8848]);
            be(&mut out, ether_type, 2);
            self.labels(level, &mut out);
            match self.version(level) {
                Some(version) => self.ip(level, version, &mut out),
                None if !ip_wanted && self.rng.one_in(2) => out.extend(self.stack(level + 1, Carrier::Ethernet)),
                None => {
                    let version = self.rng.pick(&[4, 6]);
                    self.ip(level, version, &mut out);
                }
            }
            return out;
        }
        let inner = level == 0 && self.inner_items();
        let version = self.version(level);
        let ether_type = match version {
            Some(4) => 0x0800,
            Some(_) => 0x86dd,
            None if self.named(level, ItemKind::Arp) > 0 => 0x0806,
            None if ip_wanted || inner => self.choose(level, Field::EthType, &[0x0800, 0x86dd]),
            None => {
                let types = [0x0800, 0x0800, 0x0800, 0x86dd, 0x86dd, 0x86dd, 0x0806, 0x88cc];
                self.choose(level, Field::EthType, &types)
            }
        };
        be(&mut out, ether_type, 2);
        match ether_type {
            0x0800 => self.ip(level, 4, &mut out),
            0x86dd => self.ip(level, 6, &mut out),
            0x0806 => {
                be(&mut out, 0x0001_0800_0604, 6);
                be(&mut out, self.field(level, 0, Field::ArpOp), 2);
                be(&mut out, self.field(level, 0, Field::ArpSha), 6);
                be(&mut out, self.field(level, 0, Field::ArpSpa), 4);
                be(&mut out, self.field(level, 0, Field::ArpTha), 6);
                be(&mut out, self.field(level, 0, Field::ArpTpa), 4);
            }
            _ => out.extend(self.payload()),
        }
        out
    }

    fn labels(&mut self, level: u8, out: &mut Vec<u8>) {
        let named = self.named(level, ItemKind::Mpls).max(1);
        let more = if self.rng.one_in(4) { self.rng.index(4) } else { 0 };
        let bottom = self.wanted(level, named - 1, Field::MplsBos).map(|bits| bits.matches(1));
        let count = match bottom {
            Some(true) => named,
            Some(false) => named + more.max(1),
            None => named + more,
        };
        for nth in 0..count {
            let label = self.field(level, nth, Field::MplsLabel);
            let tc = self.field(level, nth, Field::MplsTc);
            let ttl = self.field(level, nth, Field::MplsTtl);
            be(out, label << 12 | tc << 9 | u128::from(nth + 1 == count) << 8 | ttl, 4);
        }
    }
}

fn ether_type(carrier: Carrier) -> u128 {
    match carrier {
        Carrier::Ip(4) => 0x0800,
        Carrier::Ip(_) => 0x86dd,
        Carrier::Ethernet => 0x6558,
    }
}

fn carrier_of(ether_type: u128) -> Carrier {
    match ether_type {
        0x0800 => Carrier::Ip(4),
        0x86dd => Carrier::Ip(6),
        _ => Carrier::Ethernet,
    }
}
