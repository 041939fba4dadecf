//! Random frames of every header stack, most of them made for a rule.

use wirepath_pmd::flow::{Bits, Field, Item, ItemKind, Rule};

use super::pool;
use crate::fields::Noted;
use crate::rewrite::{pseudo, sum};
use crate::rng::Rng;

/// A frame and what is noted about it. Made so that it could fit the rule, if there is one; cut off or damaged now and then.
pub fn packet(rng: &mut Rng, rule: Option<&Rule>) -> (Vec<u8>, Noted) {
    let pattern = rule.map_or(&[][..], Rule::pattern);
    let mut maker = Maker { rng, pattern };
    let noted = Noted {
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
    // Shorter frames do not come out of ports.
    if frame.len() < 14 {
        frame.resize(14, 0);
    }
    (frame, noted)
}

/// What a stack lies in.
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

    fn wanted(&self, level: u8, nth: usize, field: Field) -> Option<Bits> {
        let kind = field.spec().item;
        self.pattern.iter().filter(|item| u8::from(item.inner) == level && item.kind == kind).nth(nth)?.get(field)
    }

    /// A value: what the rule wants, the rest at random. A near miss now and then.
    fn field(&mut self, level: u8, nth: usize, field: Field) -> u128 {
        let value = pool::value(self.rng, field);
        match self.wanted(level, nth, field) {
            Some(bits) if self.rng.one_in(40) => {
                (value & !bits.mask | bits.value) ^ 1 << self.rng.below(field.spec().bits.into())
            }
            Some(bits) => value & !bits.mask | bits.value,
            None => value,
        }
    }

    /// One of these that the rule wants, or something else that it wants, or one of these.
    fn choose(&mut self, level: u8, field: Field, from: &[u128]) -> u128 {
        let Some(bits) = self.wanted(level, 0, field) else { return self.rng.pick(from) };
        let fitting: Vec<u128> = from.iter().copied().filter(|&value| bits.matches(value)).collect();
        match fitting.is_empty() {
            true => self.rng.pick(from) & !bits.mask & pool::ones(field) | bits.value,
            false => self.rng.pick(&fitting),
        }
    }

    fn inner_items(&self) -> bool {
        self.pattern.iter().any(|item| item.inner)
    }

    /// Where the pattern has its labels: behind Ethernet, UDP or GRE.
    fn labels_behind(&self, level: u8) -> Option<ItemKind> {
        let here: Vec<ItemKind> =
            self.pattern.iter().filter(|item| u8::from(item.inner) == level).map(|item| item.kind).collect();
        let at = here.iter().position(|kind| *kind == ItemKind::Mpls)?;
        Some(match at.checked_sub(1).map(|before| here[before]) {
            Some(kind @ (ItemKind::Udp | ItemKind::Gre)) => kind,
            _ => ItemKind::Eth,
        })
    }

    /// What the inner stack that the pattern wants begins with.
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
            // Nothing is looked at there.
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
            Some(place) => place == ItemKind::Eth,
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

    /// An IP packet.
    fn ip(&mut self, level: u8, version: u8, out: &mut Vec<u8>) {
        let proto_field = if version == 4 { Field::Ipv4Proto } else { Field::Ipv6Proto };
        let message = if version == 4 { (ItemKind::Icmp, 1) } else { (ItemKind::Icmpv6, 58) };
        let behind = self.labels_behind(level);
        let inner = level == 0 && self.inner_items();
        let named = [
            (ItemKind::Tcp, 6),
            (ItemKind::Udp, 17),
            message,
            (ItemKind::Gre, 47),
            (ItemKind::Esp, 50),
            (ItemKind::Vxlan, 17),
            (ItemKind::VxlanGpe, 17),
            (ItemKind::Geneve, 17),
        ];
        let protocol = match named.iter().find(|(kind, _)| self.named(level, *kind) > 0) {
            Some((_, number)) => *number,
            None if behind == Some(ItemKind::Udp) => 17,
            None if behind == Some(ItemKind::Gre) => 47,
            None if inner => match self.inner_carrier() {
                Carrier::Ip(4) => self.choose(level, proto_field, &[4, 4, 17, 47]),
                Carrier::Ip(_) => self.choose(level, proto_field, &[41, 41, 17, 47]),
                Carrier::Ethernet => self.choose(level, proto_field, &[17, 47]),
            },
            None => {
                let some = [6, 6, 17, 17, 17, message.1, message.1, 47, 50, 4, 41, 99, 59, 33, 136];
                self.choose(level, proto_field, &some)
            }
        };
        let frag_field = if version == 4 { Field::Ipv4Frag } else { Field::Ipv6Frag };
        let whole = named.iter().any(|(kind, _)| self.named(level, *kind) > 0) || inner;
        let mut fragment = if self.wanted(level, 0, frag_field).is_some() {
            self.choose(level, frag_field, &[0, 1, 3])
        } else if self.rng.one_in(if whole { 60 } else { 14 }) {
            self.rng.pick(&[1, 3])
        } else {
            0
        };
        let (mut offset, mut more) = (0, 0);
        if version == 4 {
            if let Some(bits) = self.wanted(level, 0, Field::Ipv4Offset)
                && !bits.matches(0)
            {
                fragment = 3;
            }
            if let Some(bits) = self.wanted(level, 0, Field::Ipv4Mf)
                && bits.value == 1
                && fragment == 0
            {
                fragment = 1;
            }
        }
        if fragment == 3 {
            offset =
                if version == 4 { self.field(level, 0, Field::Ipv4Offset) } else { u128::from(1 + self.rng.below(99)) };
            offset = offset.max(1);
            more = if version == 4 { self.field(level, 0, Field::Ipv4Mf) } else { self.rng.below(2).into() };
        } else if fragment == 1 {
            more = 1;
        }
        let start = out.len();
        if version == 4 {
            let ihl = if self.wanted(level, 0, Field::Ipv4Ihl).is_some() {
                self.field(level, 0, Field::Ipv4Ihl).max(5)
            } else {
                self.rng.pick(&[5, 5, 5, 5, 5, 5, 5, 6, 15])
            };
            be(out, 4 << 4 | ihl, 1);
            let dscp = self.field(level, 0, Field::Ipv4Dscp);
            be(out, dscp << 2 | self.field(level, 0, Field::Ipv4Ecn), 1);
            be(out, 0, 2);
            be(out, self.field(level, 0, Field::Ipv4Id), 2);
            let df = self.field(level, 0, Field::Ipv4Df);
            be(out, df << 14 | more << 13 | offset, 2);
            be(out, self.field(level, 0, Field::Ipv4Ttl), 1);
            be(out, protocol, 1);
            be(out, 0, 2);
            be(out, self.field(level, 0, Field::Ipv4Src), 4);
            be(out, self.field(level, 0, Field::Ipv4Dst), 4);
            // No operation, and the end of the list.
            out.resize(start + ihl as usize * 4, 1);
        } else {
            let dscp = self.field(level, 0, Field::Ipv6Dscp);
            let class = dscp << 2 | self.field(level, 0, Field::Ipv6Ecn);
            be(out, 6 << 28 | class << 20 | self.field(level, 0, Field::Ipv6Flow), 4);
            be(out, 0, 2);
            let numbers = self.extensions(level, fragment != 0);
            be(out, numbers.first().map_or(protocol, |n| u128::from(*n)), 1);
            be(out, self.field(level, 0, Field::Ipv6Hops), 1);
            be(out, self.field(level, 0, Field::Ipv6Src), 16);
            be(out, self.field(level, 0, Field::Ipv6Dst), 16);
            for (nth, number) in numbers.iter().enumerate() {
                let next = numbers.get(nth + 1).map_or(protocol, |n| u128::from(*n));
                be(out, next, 1);
                match number {
                    44 => {
                        be(out, 0, 1);
                        be(out, offset << 3 | more, 2);
                        be(out, self.rng.below(1 << 32).into(), 4);
                    }
                    // RFC 4302: five more words for the smallest integrity value.
                    51 => {
                        be(out, 4, 1);
                        out.resize(out.len() + 22, 7);
                    }
                    // One address of the way; segments left: none, or one.
                    43 => {
                        be(out, 2, 1);
                        be(out, 2, 1);
                        be(out, self.rng.below(2).into(), 1);
                        out.resize(out.len() + 20, 3);
                    }
                    // Home address (RFC 6275), padded.
                    60 if self.rng.one_in(4) => {
                        be(out, 0x02_0102_0000_c910, 7);
                        out.resize(out.len() + 16, 9);
                    }
                    _ => {
                        // PadN over the rest.
                        let words = self.rng.below(2);
                        be(out, words.into(), 1);
                        be(out, 1, 1);
                        be(out, (4 + words * 8).into(), 1);
                        out.resize(out.len() + 4 + words as usize * 8, 0);
                    }
                }
            }
        }
        let behind_ip = out.len();
        if fragment == 3 {
            out.extend(self.payload());
        } else {
            self.transport(level, protocol as u8, out);
        }
        if more == 1 && !self.rng.one_in(10) {
            let piece = (out.len() - behind_ip).next_multiple_of(8);
            out.resize(behind_ip + piece, 0x5a);
        }
        self.finish_ip(version, start, behind_ip, protocol as u8, fragment != 0, out);
    }

    /// Numbers of extension headers in a sensible order that begins as the rule wants.
    fn extensions(&mut self, level: u8, fragment: bool) -> Vec<u8> {
        let wanted = self.wanted(level, 0, Field::Ipv6Ext);
        let mut numbers = Vec::new();
        for (number, bit) in [(0, 1), (60, 8), (43, 2), (44, 4), (51, 16)] {
            let there = match wanted {
                Some(bits) if bits.mask & bit != 0 => bits.value & bit != 0,
                _ => self.rng.one_in(14),
            };
            if there || number == 44 && fragment {
                numbers.push(number);
            }
        }
        if let Some(bits) = self.wanted(level, 0, Field::Ipv6Next) {
            let first = numbers.iter().position(|&number| bits.matches(number.into()));
            match first {
                Some(at) => numbers[..=at].rotate_right(1),
                None => {
                    let new: Vec<u8> = [0, 60, 43, 44, 51].into_iter().filter(|n| bits.matches((*n).into())).collect();
                    if bits.mask.count_ones() > 6 && !new.is_empty() {
                        numbers.insert(0, new[0]);
                    } else if !fragment {
                        numbers.clear();
                    }
                }
            }
        }
        // Twice destination options, and more headers than anybody needs.
        if self.rng.one_in(60) {
            let more = self.rng.pick(&[1, 2, 9]);
            numbers.extend(std::iter::repeat_n(60, more));
        }
        numbers
    }

    fn transport(&mut self, level: u8, protocol: u8, out: &mut Vec<u8>) {
        match protocol {
            6 => {
                be(out, self.field(level, 0, Field::TcpSrc), 2);
                be(out, self.field(level, 0, Field::TcpDst), 2);
                be(out, self.field(level, 0, Field::TcpSeq), 4);
                be(out, self.field(level, 0, Field::TcpAck), 4);
                let words = self.rng.pick(&[5, 5, 5, 6, 8]);
                be(out, words << 12 | self.field(level, 0, Field::TcpFlags), 2);
                be(out, self.field(level, 0, Field::TcpWindow), 2);
                out.resize(out.len() + 4 + (words as usize - 5) * 4, 0);
                out.extend(self.payload());
            }
            17 => self.udp(level, out),
            1 | 58 => {
                let v4 = protocol == 1;
                let field = |a, b| if v4 { a } else { b };
                be(out, self.field(level, 0, field(Field::IcmpType, Field::Icmpv6Type)), 1);
                be(out, self.field(level, 0, field(Field::IcmpCode, Field::Icmpv6Code)), 1);
                be(out, 0, 2);
                be(out, self.field(level, 0, field(Field::IcmpId, Field::Icmpv6Id)), 2);
                be(out, self.field(level, 0, field(Field::IcmpSeq, Field::Icmpv6Seq)), 2);
                if !v4 && self.rng.one_in(30) {
                    // The shortest message has four bytes.
                    out.truncate(out.len() - 1 - self.rng.index(4));
                } else {
                    out.extend(self.payload());
                }
            }
            50 => {
                be(out, self.field(level, 0, Field::EspSpi), 4);
                be(out, self.field(level, 0, Field::EspSeq), 4);
                out.extend(self.payload());
            }
            47 => self.gre(level, out),
            4 | 41 => {
                let version = if protocol == 4 { 4 } else { 6 };
                if level == 0 {
                    self.ip(1, version, out);
                } else {
                    be(out, u128::from(version) << 4, 1);
                    out.extend(self.payload());
                }
            }
            33 | 136 => {
                out.resize(out.len() + 8, 0x35);
                out.extend(self.payload());
            }
            _ => out.extend(self.payload()),
        }
    }

    fn udp(&mut self, level: u8, out: &mut Vec<u8>) {
        let inner = level == 0 && self.inner_items();
        let behind = self.labels_behind(level) == Some(ItemKind::Udp);
        let tunnel = match self.any(level, &TUNNELS) {
            Some(kind) => Some(kind),
            None if behind => Some(ItemKind::Mpls),
            // A tunnel that the rule does not name, on the port that it wants.
            None => {
                let ports = [(ItemKind::Vxlan, 4789), (ItemKind::VxlanGpe, 4790), (ItemKind::Geneve, 6081)];
                let wanted = self.wanted(level, 0, Field::UdpDst);
                let fits = |port: u128| wanted.is_none_or(|bits| bits.matches(port));
                let possible: Vec<ItemKind> =
                    ports.iter().filter(|(_, port)| fits(*port)).map(|(kind, _)| *kind).collect();
                let often = if inner { 100 } else { 25 };
                let exact = wanted.is_some_and(|bits| bits.mask == 0xffff);
                if possible.is_empty() || !(exact || self.rng.percent(often)) {
                    None
                } else if self.rng.one_in(8) && fits(6635) && !inner {
                    Some(ItemKind::Mpls)
                } else {
                    Some(self.rng.pick(&possible))
                }
            }
        };
        let start = out.len();
        be(out, self.field(level, 0, Field::UdpSrc), 2);
        let port = match tunnel {
            Some(ItemKind::Vxlan) => 4789,
            Some(ItemKind::VxlanGpe) => 4790,
            Some(ItemKind::Geneve) => 6081,
            Some(ItemKind::Mpls) => 6635,
            _ => self.field(level, 0, Field::UdpDst),
        };
        be(out, port, 2);
        be(out, 0, 4);
        let mut carrier = self.inner_carrier();
        if self.any(level, &TUNNELS).is_none() && self.rng.one_in(4) {
            carrier = self.rng.pick(&[Carrier::Ethernet, Carrier::Ip(4), Carrier::Ip(6)]);
        }
        match tunnel {
            Some(ItemKind::Vxlan) => {
                be(out, self.tunnel_flags(level, Field::VxlanFlags, 8), 1);
                be(out, 0, 3);
                be(out, self.field(level, 0, Field::VxlanVni), 3);
                be(out, 0, 1);
                carrier = Carrier::Ethernet;
            }
            Some(ItemKind::VxlanGpe) => {
                be(out, self.tunnel_flags(level, Field::GpeFlags, 0x0c), 1);
                be(out, 0, 2);
                let next = match carrier {
                    Carrier::Ip(4) => 1,
                    Carrier::Ip(_) => 2,
                    Carrier::Ethernet => 3,
                };
                let next = self.carried(level, Field::GpeNext, next);
                carrier = match next {
                    1 => Carrier::Ip(4),
                    2 => Carrier::Ip(6),
                    _ => Carrier::Ethernet,
                };
                be(out, next, 1);
                be(out, self.field(level, 0, Field::GpeVni), 3);
                be(out, 0, 1);
            }
            Some(ItemKind::Geneve) => {
                let options = match self.wanted(level, 0, Field::GeneveOptLen) {
                    Some(_) => self.field(level, 0, Field::GeneveOptLen),
                    None => self.rng.pick(&[0, 0, 0, 1, 2, 5]),
                };
                be(out, options, 1);
                let oam = self.field(level, 0, Field::GeneveOam);
                be(out, oam << 7 | self.field(level, 0, Field::GeneveCritical) << 6, 1);
                let protocol = self.carried(level, Field::GeneveProto, ether_type(carrier));
                carrier = carrier_of(protocol);
                be(out, protocol, 2);
                be(out, self.field(level, 0, Field::GeneveVni), 3);
                be(out, 0, 1);
                // Options without data, one word each.
                for _ in 0..options {
                    be(out, 0x0102_0300, 4);
                }
            }
            Some(_) => self.labels(level, out),
            None => {
                out.extend(self.payload());
                self.udp_length(start, out);
                return;
            }
        }
        self.carry(level, carrier, out);
        self.udp_length(start, out);
    }

    fn udp_length(&mut self, start: usize, out: &mut [u8]) {
        let length = (out.len() - start) as u16;
        out[start + 4..start + 6].copy_from_slice(&length.to_be_bytes());
    }

    fn tunnel_flags(&mut self, level: u8, field: Field, usual: u128) -> u128 {
        match self.wanted(level, 0, field) {
            Some(_) => self.field(level, 0, field),
            None if self.rng.one_in(40) => self.rng.below(256).into(),
            None => usual,
        }
    }

    /// What a tunnel says that it carries: as the rule wants, or what there is.
    fn carried(&mut self, level: u8, field: Field, there: u128) -> u128 {
        match self.wanted(level, 0, field) {
            Some(bits) => there & !bits.mask | bits.value,
            None if self.rng.one_in(30) => pool::value(self.rng, field),
            None => there,
        }
    }

    fn carry(&mut self, level: u8, carrier: Carrier, out: &mut Vec<u8>) {
        if level > 0 || self.rng.one_in(60) {
            out.extend(self.payload());
        } else {
            out.extend(self.stack(level + 1, carrier));
        }
    }

    fn gre(&mut self, level: u8, out: &mut Vec<u8>) {
        let behind = self.labels_behind(level) == Some(ItemKind::Gre);
        let mut flags = match self.wanted(level, 0, Field::GreFlags) {
            Some(bits) => self.rng.pick(&[0u128, 0x2000, 0xb000]) & !bits.mask | bits.value,
            None => self.rng.pick(&[0, 0x2000, 0x2000, 0x8000, 0x1000, 0xa000, 0x3000, 0xb000]),
        };
        if self.wanted(level, 0, Field::GreKey).is_some() {
            flags |= 0x2000;
        }
        if self.rng.one_in(50) {
            flags ^= 1 << self.rng.below(16);
        }
        be(out, flags, 2);
        let mut carrier = self.inner_carrier();
        let protocol = if behind || self.pattern.is_empty() && self.rng.one_in(10) {
            self.choose(level, Field::GreProto, &[0x8847, 0x8848])
        } else {
            self.carried(level, Field::GreProto, ether_type(carrier))
        };
        be(out, protocol, 2);
        if flags & 0x8000 != 0 {
            be(out, (self.rng.below(1 << 16) << 16).into(), 4);
        }
        if flags & 0x2000 != 0 {
            be(out, self.field(level, 0, Field::GreKey), 4);
        }
        if flags & 0x1000 != 0 {
            be(out, self.rng.below(1 << 32).into(), 4);
        }
        if [0x8847, 0x8848].contains(&protocol) {
            self.labels(level, out);
        } else {
            carrier = carrier_of(protocol);
        }
        self.carry(level, carrier, out);
    }

    /// Lengths, and checksums over what was written: right mostly.
    fn finish_ip(&mut self, version: u8, ip: usize, behind: usize, protocol: u8, fragment: bool, out: &mut [u8]) {
        let all = out.len();
        if version == 4 {
            out[ip + 2..ip + 4].copy_from_slice(&((all - ip) as u16).to_be_bytes());
            let header = usize::from(out[ip] & 15) * 4;
            let checksum = !sum(&[&out[ip..ip + header]]);
            out[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            out[ip + 4..ip + 6].copy_from_slice(&((all - ip - 40) as u16).to_be_bytes());
        }
        let (at, pseudo_header) = match (protocol, version) {
            (6, _) => (behind + 16, true),
            (17, _) => (behind + 6, true),
            (1, 4) => (behind + 2, false),
            (58, 6) => (behind + 2, true),
            _ => return,
        };
        if at + 2 > all || fragment && !self.rng.one_in(2) {
            return;
        }
        let pseudo = if pseudo_header { pseudo(out, version, ip, protocol, all - behind) } else { Vec::new() };
        let mut checksum = !sum(&[&pseudo, &out[behind..]]);
        if protocol == 17 && checksum == 0 {
            checksum = 0xffff;
        }
        if protocol == 17 && self.rng.one_in(5) {
            checksum = 0;
        } else if self.rng.one_in(20) {
            checksum = self.rng.pick(&[0, 1, 0xffff, 0xfffe]);
        }
        out[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
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
