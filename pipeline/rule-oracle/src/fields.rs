//! Values of fields in a frame, read from the offsets that the RFCs give.

use wirepath_flow::{Field, ItemKind};

use crate::headers::{EXTENSIONS, Fragment, LabelPosition, Network, Stack, Tunnel};

/// Data about a packet in addition to its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketMetadata {
    /// Input port at ingress, output port at egress.
    pub port: u16,
    /// Mark that an earlier rule set.
    pub mark: u32,
    /// Application data.
    pub data: u32,
}

fn number(frame: &[u8], at: usize, bytes: usize) -> u128 {
    frame[at..at + bytes].iter().fold(0, |n, &byte| n << 8 | u128::from(byte))
}

/// Returns the offset of the `nth` header of this kind, if the stack has it. VLAN tags start with their TPID
/// here.
pub fn header(stack: &Stack, kind: ItemKind, nth: usize) -> Option<usize> {
    let transport = |number: u8| stack.transport.filter(|(n, _)| *n == number).map(|(_, at)| at);
    match kind {
        ItemKind::Port | ItemKind::Meta => Some(0),
        ItemKind::Eth => stack.link,
        ItemKind::Vlan => stack.tags.get(nth).copied(),
        ItemKind::Mpls => stack.entries().get(nth).copied(),
        ItemKind::Arp => match stack.network {
            Network::Arp(at) => Some(at),
            _ => None,
        },
        ItemKind::Ipv4 => match stack.network {
            Network::Ipv4(at) => Some(at),
            _ => None,
        },
        ItemKind::Ipv6 => match stack.network {
            Network::Ipv6(at) => Some(at),
            _ => None,
        },
        ItemKind::Tcp => transport(6),
        ItemKind::Udp => transport(17),
        ItemKind::Icmp => transport(1),
        ItemKind::Icmpv6 => transport(58),
        ItemKind::Esp => transport(50),
        ItemKind::Gre => transport(47),
        ItemKind::Vxlan => match stack.tunnel {
            Tunnel::Vxlan(at) => Some(at),
            _ => None,
        },
        ItemKind::VxlanGpe => match stack.tunnel {
            Tunnel::VxlanGpe(at) => Some(at),
            _ => None,
        },
        ItemKind::Geneve => match stack.tunnel {
            Tunnel::Geneve(at) => Some(at),
            _ => None,
        },
    }
}

/// Returns the value of a field, or `None` if the packet does not have it.
pub fn value(frame: &[u8], stack: &Stack, metadata: &PacketMetadata, nth: usize, field: Field) -> Option<u128> {
    let at = header(stack, field.spec().item, nth)?;
    let n = |offset: usize, bytes: usize| number(frame, at + offset, bytes);
    let fragment = match stack.fragment {
        Fragment::No => 0,
        Fragment::First => 1,
        Fragment::Later => 3,
    };
    Some(match field {
        Field::PortId => metadata.port.into(),
        Field::MetaMark => metadata.mark.into(),
        Field::MetaData => metadata.data.into(),
        Field::EthDst => n(0, 6),
        Field::EthSrc => n(6, 6),
        Field::EthType => stack.ether_type?.into(),
        Field::EthTags => [0, 1, 3][stack.tags.len()],
        Field::VlanTpid => n(0, 2),
        Field::VlanPcp => n(2, 1) >> 5,
        Field::VlanDei => n(2, 1) >> 4 & 1,
        Field::VlanVid => n(2, 2) & 0xfff,
        Field::MplsLabel => n(0, 3) >> 4,
        Field::MplsTc => n(2, 1) >> 1 & 7,
        Field::MplsBos => n(2, 1) & 1,
        Field::MplsTtl => n(3, 1),
        Field::ArpOp => n(6, 2),
        Field::ArpSha => n(8, 6),
        Field::ArpSpa => n(14, 4),
        Field::ArpTha => n(18, 6),
        Field::ArpTpa => n(24, 4),
        Field::Ipv4Ihl => n(0, 1) & 15,
        Field::Ipv4Dscp => n(1, 1) >> 2,
        Field::Ipv4Ecn => n(1, 1) & 3,
        Field::Ipv4Id => n(4, 2),
        Field::Ipv4Df => n(6, 1) >> 6 & 1,
        Field::Ipv4Mf => n(6, 1) >> 5 & 1,
        Field::Ipv4Offset => n(6, 2) & 0x1fff,
        Field::Ipv4Ttl => n(8, 1),
        Field::Ipv4Proto => n(9, 1),
        Field::Ipv4Src => n(12, 4),
        Field::Ipv4Dst => n(16, 4),
        Field::Ipv4Frag | Field::Ipv6Frag => fragment,
        Field::Ipv6Dscp => n(0, 2) >> 6 & 0x3f,
        Field::Ipv6Ecn => n(1, 1) >> 4 & 3,
        Field::Ipv6Flow => n(1, 3) & 0xf_ffff,
        Field::Ipv6Next => n(6, 1),
        Field::Ipv6Hops => n(7, 1),
        Field::Ipv6Src => n(8, 16),
        Field::Ipv6Dst => n(24, 16),
        Field::Ipv6Proto => stack.protocol.into(),
        Field::Ipv6Ext => {
            // Bits in the order hop-by-hop, routing, fragment, destination options, AH.
            let bit = |number: u8, bit: u128| if stack.extensions.contains(&number) { bit } else { 0 };
            let [hop_by_hop, routing, fragment, ah, destination] = EXTENSIONS;
            bit(hop_by_hop, 1) | bit(routing, 2) | bit(fragment, 4) | bit(destination, 8) | bit(ah, 16)
        }
        Field::TcpSrc | Field::UdpSrc => n(0, 2),
        Field::TcpDst | Field::UdpDst => n(2, 2),
        Field::TcpSeq => n(4, 4),
        Field::TcpAck => n(8, 4),
        Field::TcpFlags => n(12, 2) & 0x1ff,
        Field::TcpWindow => n(14, 2),
        Field::IcmpType | Field::Icmpv6Type => n(0, 1),
        Field::IcmpCode | Field::Icmpv6Code => n(1, 1),
        // RFC 4443 section 2.1: only type, code and checksum are in every message.
        Field::Icmpv6Id | Field::Icmpv6Seq if at + 8 > stack.end => 0,
        Field::IcmpId | Field::Icmpv6Id => n(4, 2),
        Field::IcmpSeq | Field::Icmpv6Seq => n(6, 2),
        Field::EspSpi => n(0, 4),
        Field::EspSeq => n(4, 4),
        Field::GreFlags => n(0, 2),
        Field::GreProto => n(2, 2),
        Field::GreKey => {
            let flags = n(0, 2);
            if flags & 0x2000 == 0 {
                return None;
            }
            // RFC 1701: checksum and offset are present with either of the flags C and R.
            n(if flags & 0xc000 != 0 { 8 } else { 4 }, 4)
        }
        Field::VxlanFlags | Field::GpeFlags => n(0, 1),
        Field::GpeNext => n(3, 1),
        Field::VxlanVni | Field::GpeVni | Field::GeneveVni => n(4, 3),
        Field::GeneveOptLen => n(0, 1) & 0x3f,
        Field::GeneveOam => n(1, 1) >> 7,
        Field::GeneveCritical => n(1, 1) >> 6 & 1,
        Field::GeneveProto => n(2, 2),
    })
}

/// Returns the position of a label stack in a pattern, given the item before it.
pub fn label_position_after(before: Option<ItemKind>) -> LabelPosition {
    match before {
        Some(ItemKind::Udp) => LabelPosition::Udp,
        Some(ItemKind::Gre) => LabelPosition::Gre,
        _ => LabelPosition::Link,
    }
}
