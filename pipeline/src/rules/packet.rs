use wirepath_pmd::flow::{Direction, Fact, Field, ItemKind, Key, What, network};
use wirepath_pmd::packet::Packet;
use wirepath_wire::{L3, L4, Parsed};

/// What a packet has for a key: exact, and slow. `None` if it has no such header (or no mark).
pub fn value(packet: &Packet, parsed: &Parsed, direction: Direction, key: Key) -> Option<u128> {
    let layers = if key.level == 0 { Some(parsed.outer()) } else { parsed.inner() };
    match key.what {
        What::Field(Field::PortId) => {
            let port = if direction == Direction::Ingress { packet.in_port() } else { packet.out_port() };
            Some(port.into())
        }
        What::Field(Field::MetaMark) => packet.mark().map(u128::from),
        // The application's first four bytes.
        What::Field(Field::MetaData) => Some(u128::from(packet.app()[0] as u32)),
        What::Fact(fact) => Some(u128::from(layers.map_or(0, |layers| match fact {
            Fact::Link => 1,
            Fact::Mpls => 0,
            Fact::Network => match layers.l3_kind() {
                L3::Arp => network::ARP,
                L3::Ipv4 => network::IPV4,
                L3::Ipv6 => network::IPV6,
                L3::Other => network::NONE,
            },
            Fact::Transport => match layers.l4_kind() {
                L4::Tcp => 6,
                L4::Udp => 17,
                L4::Icmpv4 => 1,
                L4::Icmpv6 => 58,
                _ => 0,
            },
            Fact::Tunnel => u8::from(key.level == 0 && parsed.vni().is_some()),
        }))),
        What::Field(field) => {
            let (layers, bytes) = (layers?, packet.data());
            let start = match field.spec().item {
                ItemKind::Eth => layers.l2(),
                ItemKind::Ipv4 if layers.l3_kind() == L3::Ipv4 => layers.l3(),
                ItemKind::Ipv6 if layers.l3_kind() == L3::Ipv6 => layers.l3(),
                ItemKind::Arp if layers.l3_kind() == L3::Arp => layers.l3(),
                ItemKind::Tcp if layers.l4_kind() == L4::Tcp => layers.l4(),
                ItemKind::Udp if layers.l4_kind() == L4::Udp => layers.l4(),
                ItemKind::Icmp if layers.l4_kind() == L4::Icmpv4 => layers.l4(),
                ItemKind::Icmpv6 if layers.l4_kind() == L4::Icmpv6 => layers.l4(),
                ItemKind::Vxlan => parsed.tunnel_header().filter(|_| parsed.vni().is_some() && key.level == 0)?,
                _ => return None,
            };
            match field {
                Field::EthType => Some(layers.ethertype().0.into()),
                Field::Ipv6Proto => Some(layers.protocol().0.into()),
                Field::EthTags => Some((1 << layers.tag_count()) - 1),
                Field::Ipv4Frag | Field::Ipv6Frag => {
                    Some(u128::from(layers.is_fragment()) | u128::from(layers.is_later_fragment()) << 1)
                }
                _ => {
                    let (at, bits) = (usize::from(field.spec().offset?), usize::from(field.spec().bits));
                    (at..at + bits).try_fold(0, |value, bit| {
                        let byte = *bytes.get(start + bit / 8)?;
                        Some(value << 1 | u128::from(byte >> (7 - bit % 8) & 1))
                    })
                }
            }
        }
    }
}
