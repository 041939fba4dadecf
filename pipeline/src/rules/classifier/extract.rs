//! Extraction of match keys: only the words of a packet that the rules of one direction compare.

use wirepath_flow::{Direction, mpls, network, tunnel as code};
use wirepath_packet::{Packet, PortId};
use wirepath_wire::{HeaderOffsets, L3Type, L4Type, Parsed, Tunnel, gre};

use super::match_key::{DATA, Kind, OUTSIDE, PER_LEVEL, PRESENT};

/// Words of the packet vector that the rules of one direction compare, with their masks.
#[derive(Debug, Default)]
pub(crate) struct KeyLayout {
    /// Id that changes whenever `words` changes.
    pub(crate) id: u64,
    /// Index and mask of each compared word, in order.
    pub(crate) words: Box<[(u8, u64)]>,
}

impl KeyLayout {
    /// Fills `rows` with one row of `words.len()` masked words for each packet.
    #[inline]
    pub(crate) fn extract(&self, direction: Direction, packets: &[Packet], parsed: &[Parsed], rows: &mut [u64]) {
        let width = self.words.len();
        for (column, &(word, mask)) in self.words.iter().enumerate() {
            let mut fill = ColumnWriter { packets, parsed, rows, width, column, mask };
            match usize::from(word) {
                OUTSIDE if direction == Direction::Ingress => fill.outside(|packet| {
                    u64::from(port_field(packet.in_port())) | u64::from(packet.mark().unwrap_or(0) & 0xff_ffff) << 16
                }),
                OUTSIDE => fill.outside(|packet| {
                    u64::from(port_field(packet.out_port())) | u64::from(packet.mark().unwrap_or(0) & 0xff_ffff) << 16
                }),
                DATA => fill.outside(|packet| packet.app()[0] & 0xffff_ffff),
                word => fill.header(word / PER_LEVEL, Kind::ALL[word % PER_LEVEL]),
            }
        }
    }
}

/// Writer of one column of all rows.
struct ColumnWriter<'a> {
    packets: &'a [Packet],
    parsed: &'a [Parsed],
    rows: &'a mut [u64],
    width: usize,
    column: usize,
    mask: u64,
}

impl ColumnWriter<'_> {
    #[inline(always)]
    fn outside(&mut self, value: impl Fn(&Packet) -> u64) {
        let cells = self.rows.iter_mut().skip(self.column).step_by(self.width);
        for (cell, packet) in cells.zip(self.packets) {
            *cell = value(packet) & self.mask;
        }
    }

    /// Fills a column from one header stack. The word is 0 for packets without the stack.
    #[inline(always)]
    fn each(&mut self, level: usize, value: impl Fn(&[u8], &Parsed, &HeaderOffsets) -> u64) {
        let cells = self.rows.iter_mut().skip(self.column).step_by(self.width);
        let packets = self.packets.iter().zip(self.parsed);
        if level == 0 {
            for (cell, (packet, parsed)) in cells.zip(packets) {
                *cell = value(packet.data(), parsed, parsed.outer()) & self.mask;
            }
        } else {
            for (cell, (packet, parsed)) in cells.zip(packets) {
                *cell = parsed.stack(level).map_or(0, |layers| value(packet.data(), parsed, layers)) & self.mask;
            }
        }
    }

    /// Fills a column from a layer 3 header. The word is 0 for packets of another layer 3.
    #[inline(always)]
    fn network(&mut self, level: usize, kind: L3Type, value: impl Fn(&[u8], usize) -> u64) {
        self.each(level, |data, _, layers| if layers.l3_type() == kind { value(data, layers.l3()) } else { 0 });
    }

    #[inline(always)]
    fn transport(&mut self, level: usize, is: impl Fn(L4Type) -> bool, value: impl Fn(&[u8], usize) -> u64) {
        self.each(level, |data, _, layers| if is(layers.l4_type()) { value(data, layers.l4()) } else { 0 });
    }

    fn header(&mut self, level: usize, kind: Kind) {
        let mask = self.mask;
        match kind {
            Kind::Facts => self.each(level, |_, parsed, layers| facts(level, parsed, layers, mask)),
            Kind::Misc => self.each(level, |data, _, layers| misc(data, layers)),
            Kind::EthDst => {
                self.each(level, |data, _, l| if l.has_ethernet() { be64(data, l.l2()) >> 16 } else { 0 });
            }
            Kind::EthSrc => {
                self.each(level, |data, _, l| if l.has_ethernet() { be64(data, l.l2() + 4) & MAC } else { 0 });
            }
            Kind::Tags => self.each(level, |_, _, layers| {
                let tag = |i| layers.tag(i).map_or(0, |tag| u64::from(tag.tpid.0) << 16 | u64::from(tag.tci));
                tag(0) | tag(1) << 32
            }),
            Kind::Labels0 => self.each(level, |data, parsed, layers| labels(level, data, parsed, layers, 0)),
            Kind::Labels1 => self.each(level, |data, parsed, layers| labels(level, data, parsed, layers, 2)),
            Kind::Arp0 => self.network(level, L3Type::Arp, |data, at| be64(data, at + 6)),
            Kind::Arp1 => self.network(level, L3Type::Arp, |data, at| be64(data, at + 16) & MAC),
            Kind::Arp2 => {
                self.network(level, L3Type::Arp, |data, at| be32(data, at + 14) << 32 | be32(data, at + 24));
            }
            Kind::Ipv4 => self.network(level, L3Type::Ipv4, |data, at| be64(data, at + 12)),
            Kind::Ipv6Src0 => self.network(level, L3Type::Ipv6, |data, at| be64(data, at + 8)),
            Kind::Ipv6Src1 => self.network(level, L3Type::Ipv6, |data, at| be64(data, at + 16)),
            Kind::Ipv6Dst0 => self.network(level, L3Type::Ipv6, |data, at| be64(data, at + 24)),
            Kind::Ipv6Dst1 => self.network(level, L3Type::Ipv6, |data, at| be64(data, at + 32)),
            Kind::IpRest => self.each(level, |data, _, layers| ip_rest(data, layers)),
            Kind::Ports if mask >> 32 == 0 => {
                self.transport(level, |kind| matches!(kind, L4Type::Tcp | L4Type::Udp), be32);
            }
            Kind::Ports => self.each(level, |data, _, layers| match layers.l4_type() {
                L4Type::Udp => be32(data, layers.l4()),
                L4Type::Tcp => {
                    let rest = be32(data, layers.l4() + 12);
                    be32(data, layers.l4()) | (rest >> 16 & 0x1ff) << 32 | (rest & 0xffff) << 41
                }
                _ => 0,
            }),
            Kind::Icmp => self.each(level, |data, _, layers| match layers.l4_type() {
                L4Type::Icmpv4 | L4Type::Icmpv6 => icmp(data, layers),
                _ => 0,
            }),
            Kind::TcpSeq => self.transport(level, |kind| kind == L4Type::Tcp, |data, at| be64(data, at + 4)),
            Kind::Esp => self.transport(level, |kind| kind == L4Type::Esp, be64),
            Kind::Gre => self.transport(
                level,
                |kind| kind == L4Type::Gre,
                |data, at| {
                    let start = be32(data, at);
                    let key = gre::key_offset((start >> 16) as u16).map_or(0, |offset| be32(data, at + offset));
                    start << 32 | key
                },
            ),
            Kind::Tunnel => self.each(level, |data, parsed, layers| tunnel(level, data, parsed, layers)),
        }
    }
}

const MAC: u64 = 0xffff_ffff_ffff;

/// Returns the value of the field `port id`: all ones, which is no port's number, for a packet without a port.
#[inline]
fn port_field(port: Option<PortId>) -> u16 {
    port.map_or(u16::MAX, PortId::number)
}

/// Reads eight bytes. Returns 0 if they are not in the buffer, which the parser has excluded.
#[inline(always)]
fn be64(data: &[u8], at: usize) -> u64 {
    data.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

#[inline(always)]
fn be32(data: &[u8], at: usize) -> u64 {
    data.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u32::from_be_bytes(*bytes).into())
}

/// Returns type, code, checksum, identifier and sequence number. An ICMPv6 message may end before the last
/// two, and bytes behind the packet do not count.
#[inline]
fn icmp(data: &[u8], layers: &HeaderOffsets) -> u64 {
    let at = layers.l4();
    if at + 8 <= layers.end().min(data.len()) { be64(data, at) } else { be32(data, at) << 32 }
}

/// Returns the five header types of a stack. Those that need more than the header offsets are computed only
/// if the mask asks for them.
#[inline(always)]
fn facts(level: usize, parsed: &Parsed, layers: &HeaderOffsets, mask: u64) -> u64 {
    let version = match layers.l3_type() {
        L3Type::Arp => network::ARP,
        L3Type::Ipv4 => network::IPV4,
        L3Type::Ipv6 => network::IPV6,
        L3Type::Other => network::NONE,
    };
    let found = matches!(
        layers.l4_type(),
        L4Type::Tcp | L4Type::Udp | L4Type::Icmpv4 | L4Type::Icmpv6 | L4Type::Gre | L4Type::Esp
    );
    let transport = if found { layers.protocol().0 } else { 0 };
    let labelled = if layers.has_labels() { mpls::AFTER_ETHERNET } else { 0 };
    let mut all = PRESENT
        | u64::from(layers.has_ethernet())
        | u64::from(labelled) << 8
        | u64::from(version) << 16
        | u64::from(transport) << 24;
    if mask & u64::from(mpls::AFTER_UDP | mpls::AFTER_GRE) << 8 != 0 && parsed.has_tunnel_labels(level) {
        all |= match layers.l4_type() {
            L4Type::Udp => u64::from(mpls::AFTER_UDP) << 8,
            L4Type::Gre => u64::from(mpls::AFTER_GRE) << 8,
            _ => 0,
        };
    }
    if mask & 0xff << 32 != 0 {
        let tunnel = match parsed.tunnel_of(level) {
            Tunnel::Vxlan => code::VXLAN,
            Tunnel::VxlanGpe => code::VXLAN_GPE,
            Tunnel::Geneve => code::GENEVE,
            _ if layers.l4_type() == L4Type::Gre => code::GRE,
            _ => code::NONE,
        };
        all |= u64::from(tunnel) << 32;
    }
    all
}

#[inline(always)]
fn misc(data: &[u8], layers: &HeaderOffsets) -> u64 {
    let link =
        if layers.has_ethernet() { u64::from(layers.ethertype().0) | ((1 << layers.tag_count()) - 1) << 16 } else { 0 };
    let fragment = match (layers.is_first_fragment(), layers.is_later_fragment()) {
        (_, true) => 3,
        (true, _) => 1,
        _ => 0,
    };
    let ip = u64::from(layers.protocol().0) << 18 | fragment << 26;
    let (class, hops, rest) = match layers.l3_type() {
        L3Type::Ipv4 => {
            let (start, middle) = (be64(data, layers.l3()), be32(data, layers.l3() + 8));
            (start >> 48, middle >> 24, (start & 0x1fff) << 49)
        }
        L3Type::Ipv6 => {
            let start = be64(data, layers.l3());
            (start >> 52, start, u64::from(layers.extensions()) << 28)
        }
        _ => return link,
    };
    link | ip | rest | (class >> 2 & 0x3f) << 33 | (class & 3) << 39 | (hops & 0xff) << 41
}

#[inline(always)]
fn ip_rest(data: &[u8], layers: &HeaderOffsets) -> u64 {
    let start = be64(data, layers.l3());
    match layers.l3_type() {
        L3Type::Ipv4 => {
            start >> 16 & 0xffff | (start >> 56 & 0xf) << 16 | (start >> 14 & 1) << 20 | (start >> 13 & 1) << 21
        }
        L3Type::Ipv6 => (start >> 32 & 0xf_ffff) << 24 | (start >> 8 & 0xff) << 44,
        _ => 0,
    }
}

/// Returns two label stack entries, starting with entry `first`; 0 behind the bottom of the stack.
fn labels(level: usize, data: &[u8], parsed: &Parsed, layers: &HeaderOffsets, first: usize) -> u64 {
    let start = if layers.has_labels() {
        layers.labels().start
    } else if parsed.has_tunnel_labels(level) {
        layers.payload()
    } else {
        return 0;
    };
    let mut both = 0;
    for nth in 0..first + 2 {
        let entry = be32(data, start + 4 * nth);
        if nth >= first {
            both |= entry << (32 * (nth - first));
        }
        if entry & 0x100 != 0 {
            break;
        }
    }
    both
}

#[inline(always)]
fn tunnel(level: usize, data: &[u8], parsed: &Parsed, layers: &HeaderOffsets) -> u64 {
    let kind = parsed.tunnel_of(level);
    if !matches!(kind, Tunnel::Vxlan | Tunnel::VxlanGpe | Tunnel::Geneve) {
        return 0;
    }
    let header = be64(data, layers.payload());
    let vni = header >> 8 & 0xff_ffff;
    match kind {
        Tunnel::Vxlan => vni | (header >> 56) << 24,
        Tunnel::VxlanGpe => vni | (header >> 56) << 24 | (header >> 32 & 0xff) << 32,
        _ => {
            vni | (header >> 32 & 0xffff) << 40
                | (header >> 56 & 0x3f) << 56
                | (header >> 55 & 1) << 62
                | (header >> 54 & 1) << 63
        }
    }
}
