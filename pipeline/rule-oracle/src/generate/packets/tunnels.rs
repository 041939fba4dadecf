//! UDP and GRE, and the tunnels over them.

use wirepath_flow::{Field, ItemKind};

use super::{Carrier, Maker, TUNNELS, be, carrier_of, ether_type};
use crate::generate::values;

impl Maker<'_> {
    pub(super) fn udp(&mut self, level: u8, out: &mut Vec<u8>) {
        let inner = level == 0 && self.inner_items();
        let behind = self.labels_behind(level) == Some(ItemKind::Udp);
        let tunnel = match self.any(level, &TUNNELS) {
            Some(kind) => Some(kind),
            None if behind => Some(ItemKind::Mpls),
            // A tunnel that the rule does not name, on the UDP port that it requires.
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

    /// Returns the payload type of a tunnel header: as the rule requires, or as it is.
    fn carried(&mut self, level: u8, field: Field, there: u128) -> u128 {
        match self.wanted(level, 0, field) {
            Some(bits) => there & !bits.mask | bits.value,
            None if self.rng.one_in(30) => values::value(self.rng, field),
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

    pub(super) fn gre(&mut self, level: u8, out: &mut Vec<u8>) {
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
}
