//! IP packets: headers, extension headers, fragments, and payloads.

use wirepath_flow::{Field, ItemKind};

use super::{Carrier, Maker, be};
use crate::rewrite::{pseudo, sum};

impl Maker<'_> {
    /// Writes an IP packet.
    pub(super) fn ip(&mut self, level: u8, version: u8, out: &mut Vec<u8>) {
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
            // No-operation options.
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
                    // RFC 4302: five more words for the smallest integrity check value.
                    51 => {
                        be(out, 4, 1);
                        out.resize(out.len() + 22, 7);
                    }
                    // One address of the route, with zero or one segments left.
                    43 => {
                        be(out, 2, 1);
                        be(out, 2, 1);
                        be(out, self.rng.below(2).into(), 1);
                        out.resize(out.len() + 20, 3);
                    }
                    // Home address option (RFC 6275), padded.
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

    /// Returns extension header numbers in a valid order that starts as the rule requires.
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
        // Repeated destination options, and more headers than a parser accepts.
        if self.rng.one_in(60) {
            let more = self.rng.pick(&[1, 2, 9]);
            numbers.extend(std::iter::repeat_n(60, more));
        }
        numbers
    }

    pub(super) fn transport(&mut self, level: u8, protocol: u8, out: &mut Vec<u8>) {
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

    /// Fills lengths and checksums. Most of them are right.
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
