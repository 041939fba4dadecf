//! Values of all keys in a packet, computed from the parser's result.
//!
//! This module defines the semantics of the rule language, straight from the tables. The fast engines are
//! tested against it.

use wirepath_wire::{HeaderOffsets, L3Type, L4Type, Parsed, Tunnel, gre, vlan};

use super::items::{mpls, network, tunnel};
use super::masked_value::ones;
use super::{Field, HeaderType, ItemKind, Key, KeyKind};

/// Packet metadata that the items `port` and `meta` compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Port of the packet: the receiving port (ingress) or the sending port (egress).
    pub port: u16,
    /// Mark that a rule has set, 24 bits; 0 without one.
    pub mark: u32,
    /// Data that the application has set; 0 without it.
    pub data: u32,
}

/// Returns the value of a key in a packet, or `None` if the packet has no such header. For
/// [`FieldSet::matches`](super::FieldSet::matches).
///
/// `head` is the first buffer of the parsed packet.
pub fn packet_value(parsed: &Parsed, head: &[u8], metadata: Metadata, key: Key) -> Option<u128> {
    let field = match key.kind {
        KeyKind::HeaderType(which) => return header_type(parsed, key.level, which).map(u128::from),
        KeyKind::Field(field) => field,
    };
    let spec = field.spec();
    // Metadata of the packet.
    match field {
        Field::PortId => return Some(metadata.port.into()),
        Field::MetaMark => return Some(u128::from(metadata.mark) & ones(spec.bits)),
        Field::MetaData => return Some(metadata.data.into()),
        _ => {}
    }
    let layers = parsed.stack(key.level.into())?;
    let start = header(parsed, layers, head, key, spec.item)?;
    if matches!(field, Field::Icmpv6Id | Field::Icmpv6Seq) && start + 8 > layers.end() {
        return Some(0);
    }
    if let Some(offset) = spec.offset {
        return bits(head, start, offset.into(), spec.bits);
    }
    let fragment = || match (layers.is_first_fragment(), layers.is_later_fragment()) {
        (_, true) => 3,
        (true, _) => 1,
        _ => 0,
    };
    // Values that are not bit strings of their header.
    match field {
        Field::EthType => Some(layers.ethertype().0.into()),
        // One bit per tag.
        Field::EthTags => Some((1 << layers.tag_count()) - 1),
        Field::VlanTpid => layers.tag(key.nth.into()).map(|tag| tag.tpid.0.into()),
        Field::Ipv4Frag | Field::Ipv6Frag => Some(fragment()),
        Field::Ipv6Proto => Some(layers.protocol().0.into()),
        Field::Ipv6Ext => Some(layers.extensions().into()),
        Field::GreKey => {
            let flags = bits(head, start, 0, 16)?;
            bits(head, start, gre::key_offset(flags as u16)? * 8, 32)
        }
        _ => None,
    }
}

/// Returns the type of a layer of a header stack; `None` if the packet has no such stack.
pub fn header_type(parsed: &Parsed, level: u8, layer: HeaderType) -> Option<u8> {
    let level = usize::from(level);
    let layers = parsed.stack(level)?;
    Some(match layer {
        HeaderType::Link => layers.has_ethernet().into(),
        HeaderType::Network => match layers.l3_type() {
            L3Type::Arp => network::ARP,
            L3Type::Ipv4 => network::IPV4,
            L3Type::Ipv6 => network::IPV6,
            L3Type::Other => network::NONE,
        },
        HeaderType::Transport => match layers.l4_type() {
            L4Type::Tcp | L4Type::Udp | L4Type::Icmpv4 | L4Type::Icmpv6 | L4Type::Gre | L4Type::Esp => {
                layers.protocol().0
            }
            L4Type::None | L4Type::Other => 0,
        },
        HeaderType::Tunnel => match parsed.tunnel_of(level) {
            Tunnel::Vxlan => tunnel::VXLAN,
            Tunnel::VxlanGpe => tunnel::VXLAN_GPE,
            Tunnel::Geneve => tunnel::GENEVE,
            // The GRE header counts even if its payload is not parsed.
            _ if layers.l4_type() == L4Type::Gre => tunnel::GRE,
            _ => tunnel::NONE,
        },
        HeaderType::Mpls => {
            let after = match (parsed.has_tunnel_labels(level), layers.l4_type()) {
                (true, L4Type::Udp) => mpls::AFTER_UDP,
                (true, L4Type::Gre) => mpls::AFTER_GRE,
                _ => 0,
            };
            after | if layers.has_labels() { mpls::AFTER_ETHERNET } else { 0 }
        }
    })
}

/// Returns the start of the header with the key's field, if the packet has it.
fn header(parsed: &Parsed, layers: &HeaderOffsets, head: &[u8], key: Key, item: ItemKind) -> Option<usize> {
    let nth = usize::from(key.nth);
    let is = |wanted: bool, at: usize| wanted.then_some(at);
    let l4 = |wanted: L4Type| is(layers.l4_type() == wanted, layers.l4());
    let tunnel = |wanted: Tunnel| is(parsed.tunnel_of(key.level.into()) == wanted, layers.payload());
    const ETHERNET: usize = 14;
    match item {
        ItemKind::Port | ItemKind::Meta => None,
        ItemKind::Eth => is(layers.has_ethernet(), layers.l2()),
        // The tag starts after the EtherType that announces it.
        ItemKind::Vlan => is(nth < layers.tag_count(), layers.l2() + ETHERNET + nth * vlan::TAG_LEN),
        ItemKind::Mpls => label(parsed, layers, head, key.level.into(), nth),
        ItemKind::Arp => is(layers.l3_type() == L3Type::Arp, layers.l3()),
        ItemKind::Ipv4 => is(layers.l3_type() == L3Type::Ipv4, layers.l3()),
        ItemKind::Ipv6 => is(layers.l3_type() == L3Type::Ipv6, layers.l3()),
        ItemKind::Tcp => l4(L4Type::Tcp),
        ItemKind::Udp => l4(L4Type::Udp),
        ItemKind::Icmp => l4(L4Type::Icmpv4),
        ItemKind::Icmpv6 => l4(L4Type::Icmpv6),
        ItemKind::Esp => l4(L4Type::Esp),
        ItemKind::Gre => l4(L4Type::Gre),
        ItemKind::Vxlan => tunnel(Tunnel::Vxlan),
        ItemKind::VxlanGpe => tunnel(Tunnel::VxlanGpe),
        ItemKind::Geneve => tunnel(Tunnel::Geneve),
    }
}

/// Returns the start of the `nth` entry of the stack's first label stack.
fn label(parsed: &Parsed, layers: &HeaderOffsets, head: &[u8], level: usize, nth: usize) -> Option<usize> {
    const ENTRY: usize = wirepath_wire::mpls::HEADER_LEN;
    let start = if layers.has_labels() {
        layers.labels().start
    } else if parsed.has_tunnel_labels(level) {
        layers.payload()
    } else {
        return None;
    };
    let is_bottom = |nth: usize| bits(head, start + nth * ENTRY, 23, 1) != Some(0);
    (!(0..nth).any(is_bottom)).then_some(start + nth * ENTRY)
}

/// Reads `count` bits at bit `offset` from the byte at `start`, most significant bit first.
fn bits(head: &[u8], start: usize, offset: usize, count: u8) -> Option<u128> {
    let bytes = head.get(start..)?.get(offset / 8..(offset + usize::from(count)).div_ceil(8))?;
    let all = bytes.iter().fold(0u128, |all, byte| all << 8 | u128::from(*byte));
    let rest = bytes.len() * 8 - offset % 8 - usize::from(count);
    Some(all >> rest & ones(count))
}
