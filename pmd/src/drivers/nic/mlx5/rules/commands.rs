//! Header modifications as device commands.

use wirepath_nic_defs::mlx5::{
    MODIFY_DSCP, MODIFY_DST_IPV4, MODIFY_DST_IPV6, MODIFY_DST_MAC_HIGH, MODIFY_DST_MAC_LOW, MODIFY_FIRST_VID,
    MODIFY_HOP_LIMIT, MODIFY_SRC_IPV4, MODIFY_SRC_IPV6, MODIFY_SRC_MAC_HIGH, MODIFY_SRC_MAC_LOW, MODIFY_TCP_DPORT,
    MODIFY_TCP_SPORT, MODIFY_TTL, MODIFY_UDP_DPORT, MODIFY_UDP_SPORT,
};
use wirepath_verbs::mlx5::Modification;

use wirepath_flow::{Action, Field, FieldSet, HeaderType, Key, network};

/// The part of a value that one command writes: field of the device, right shift of the value, number of
/// bits.
type Part = (u32, u32, u32);

/// Writable fields, and the parts that write them.
pub(super) const WRITABLE: &[(Field, &[Part])] = &[
    (Field::EthDst, &[(MODIFY_DST_MAC_HIGH, 16, 32), (MODIFY_DST_MAC_LOW, 0, 16)]),
    (Field::EthSrc, &[(MODIFY_SRC_MAC_HIGH, 16, 32), (MODIFY_SRC_MAC_LOW, 0, 16)]),
    (Field::VlanVid, &[(MODIFY_FIRST_VID, 0, 12)]),
    (Field::Ipv4Src, &[(MODIFY_SRC_IPV4, 0, 32)]),
    (Field::Ipv4Dst, &[(MODIFY_DST_IPV4, 0, 32)]),
    (Field::Ipv4Dscp, &[(MODIFY_DSCP, 0, 6)]),
    (Field::Ipv4Ttl, &[(MODIFY_TTL, 0, 8)]),
    (Field::Ipv6Src, &words(MODIFY_SRC_IPV6)),
    (Field::Ipv6Dst, &words(MODIFY_DST_IPV6)),
    (Field::Ipv6Dscp, &[(MODIFY_DSCP, 0, 6)]),
    (Field::Ipv6Hops, &[(MODIFY_HOP_LIMIT, 0, 8)]),
    (Field::TcpSrc, &[(MODIFY_TCP_SPORT, 0, 16)]),
    (Field::TcpDst, &[(MODIFY_TCP_DPORT, 0, 16)]),
    (Field::UdpSrc, &[(MODIFY_UDP_SPORT, 0, 16)]),
    (Field::UdpDst, &[(MODIFY_UDP_DPORT, 0, 16)]),
];

/// Returns the words of an IPv6 address, most significant first.
const fn words(first: u32) -> [Part; 4] {
    [(first, 96, 32), (first + 1, 64, 32), (first + 2, 32, 32), (first + 3, 0, 32)]
}

/// Adding this value decrements an 8-bit field.
const MINUS_ONE: u32 = 0xff;

/// Returns the commands that write a field.
pub(super) fn set(field: Field, value: u128) -> Option<impl Iterator<Item = Modification>> {
    let (_, parts) = WRITABLE.iter().find(|(writable, _)| *writable == field)?;
    Some(parts.iter().map(move |&(to, shift, bits)| Modification::set(to, 0, bits, (value >> shift) as u32)))
}

/// Returns the command that decrements the TTL or hop limit.
pub(super) fn hop(ipv6: bool) -> Modification {
    Modification::add(if ipv6 { MODIFY_HOP_LIMIT } else { MODIFY_TTL }, MINUS_ONE)
}

/// Returns the commands of a rule's actions, for packets that match `fields`. `level`: the header stack that
/// is outermost when the commands are executed.
pub(super) fn of(actions: &[Action], fields: &FieldSet, level: u8) -> Result<Vec<Modification>, String> {
    let mut commands = Vec::new();
    for action in actions {
        match action {
            Action::Set { field, value } => match set(*field, *value) {
                Some(set) => commands.extend(set),
                None => return Err(format!("writing {} {}", field.spec().item.spec().name, field.name())),
            },
            Action::DecTtl => {
                let version = fields.get(Key::header_type(level, HeaderType::Network)).map(|bits| bits.value as u8);
                match version {
                    Some(network::IPV4) => commands.push(hop(false)),
                    Some(network::IPV6) => commands.push(hop(true)),
                    _ => return Err("decrementing the TTL of packets that may be IPv4 or IPv6".to_owned()),
                }
            }
            Action::Reformat(_) => {}
            other => return Err(format!("the action {}", other.spec().name)),
        }
    }
    Ok(commands)
}
