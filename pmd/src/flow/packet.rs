//! What a packet says to a rule: the value of every fact and field, out of what the parser found.
//!
//! This is the meaning of the language in one place, read off the tables; engines that match quickly are tested against it.

use wirepath_wire::{L3, L4, Layers, Parsed, Tunnel, gre, vlan};

use super::bits::ones;
use super::items::{mpls, network, tunnel};
use super::{Fact, Field, ItemKind, Key, What};
use crate::port::PortId;

/// What the items `port` and `meta` ask: about the packet, not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// The port: where the packet came in (ingress) or goes out (egress).
    pub port: PortId,
    /// The mark that a rule has set, 24 bits; 0 without one.
    pub mark: u32,
    /// Data that the application has set; 0 without.
    pub data: u32,
}

/// The value of a key in a packet, or `None` if the packet has no such header. For [`FieldSet::matches`](super::FieldSet::matches).
///
/// `head` is the first buffer of the packet that was parsed.
pub fn value(parsed: &Parsed, head: &[u8], outside: Outside, key: Key) -> Option<u128> {
    let field = match key.what {
        What::Fact(which) => return fact(parsed, key.level, which).map(u128::from),
        What::Field(field) => field,
    };
    let spec = field.spec();
    // About the packet.
    match field {
        Field::PortId => return Some(outside.port.into()),
        Field::MetaMark => return Some(u128::from(outside.mark) & ones(spec.bits)),
        Field::MetaData => return Some(outside.data.into()),
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
    // What is no bit string of its header.
    match field {
        Field::EthType => Some(layers.ethertype().0.into()),
        // A bit for each tag.
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

/// A fact about a header stack; `None` if the packet has no such stack.
pub fn fact(parsed: &Parsed, level: u8, fact: Fact) -> Option<u8> {
    let level = usize::from(level);
    let layers = parsed.stack(level)?;
    Some(match fact {
        Fact::Link => layers.has_link().into(),
        Fact::Network => match layers.l3_kind() {
            L3::Arp => network::ARP,
            L3::Ipv4 => network::IPV4,
            L3::Ipv6 => network::IPV6,
            L3::Other => network::NONE,
        },
        Fact::Transport => match layers.l4_kind() {
            L4::Tcp | L4::Udp | L4::Icmpv4 | L4::Icmpv6 | L4::Gre | L4::Esp => layers.protocol().0,
            L4::None | L4::Other => 0,
        },
        Fact::Tunnel => match parsed.tunnel_of(level) {
            Tunnel::Vxlan => tunnel::VXLAN,
            Tunnel::VxlanGpe => tunnel::VXLAN_GPE,
            Tunnel::Geneve => tunnel::GENEVE,
            // The header is layer 4, there whether or not it is looked into.
            _ if layers.l4_kind() == L4::Gre => tunnel::GRE,
            _ => tunnel::NONE,
        },
        Fact::Mpls => {
            let behind = match (parsed.has_tunnel_labels(level), layers.l4_kind()) {
                (true, L4::Udp) => mpls::BEHIND_UDP,
                (true, L4::Gre) => mpls::BEHIND_GRE,
                _ => 0,
            };
            behind | if layers.has_labels() { mpls::BEHIND_LINK } else { 0 }
        }
    })
}

/// Start of the header that has the key's field, if it is there.
fn header(parsed: &Parsed, layers: &Layers, head: &[u8], key: Key, item: ItemKind) -> Option<usize> {
    let nth = usize::from(key.nth);
    let is = |wanted: bool, at: usize| wanted.then_some(at);
    let l4 = |wanted: L4| is(layers.l4_kind() == wanted, layers.l4());
    let tunnel = |wanted: Tunnel| is(parsed.tunnel_of(key.level.into()) == wanted, layers.payload());
    const ETHERNET: usize = 14;
    match item {
        ItemKind::Port | ItemKind::Meta => None,
        ItemKind::Eth => is(layers.has_link(), layers.l2()),
        // Behind the EtherType that announces it.
        ItemKind::Vlan => is(nth < layers.tag_count(), layers.l2() + ETHERNET + nth * vlan::TAG_LEN),
        ItemKind::Mpls => label(parsed, layers, head, key.level.into(), nth),
        ItemKind::Arp => is(layers.l3_kind() == L3::Arp, layers.l3()),
        ItemKind::Ipv4 => is(layers.l3_kind() == L3::Ipv4, layers.l3()),
        ItemKind::Ipv6 => is(layers.l3_kind() == L3::Ipv6, layers.l3()),
        ItemKind::Tcp => l4(L4::Tcp),
        ItemKind::Udp => l4(L4::Udp),
        ItemKind::Icmp => l4(L4::Icmpv4),
        ItemKind::Icmpv6 => l4(L4::Icmpv6),
        ItemKind::Esp => l4(L4::Esp),
        ItemKind::Gre => l4(L4::Gre),
        ItemKind::Vxlan => tunnel(Tunnel::Vxlan),
        ItemKind::VxlanGpe => tunnel(Tunnel::VxlanGpe),
        ItemKind::Geneve => tunnel(Tunnel::Geneve),
    }
}

/// Start of the `nth` entry of the stack's first label stack.
fn label(parsed: &Parsed, layers: &Layers, head: &[u8], level: usize, nth: usize) -> Option<usize> {
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

/// `count` bits, `offset` bits behind the byte at `start`, the first one most significant.
fn bits(head: &[u8], start: usize, offset: usize, count: u8) -> Option<u128> {
    let bytes = head.get(start..)?.get(offset / 8..(offset + usize::from(count)).div_ceil(8))?;
    let all = bytes.iter().fold(0u128, |all, byte| all << 8 | u128::from(*byte));
    let behind = bytes.len() * 8 - offset % 8 - usize::from(count);
    Some(all >> behind & ones(count))
}
