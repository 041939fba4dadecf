//! Match keys: a packet as a vector of words. Every header type and field that rules compare has a fixed
//! position in it.
//!
//! A rule becomes a mask and a value for each word, so that matching is a comparison of words. Fields of
//! headers that exclude each other share a word only if they have the same meaning (TCP and UDP ports).
//! Otherwise a mask for one header would make keys of the other one longer.

use wirepath_flow::{Field, FieldSet, HeaderType, Key, KeyKind, LEVELS, MaskedValue, mpls, network};

/// Contents of one word of the vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Five header types of eight bits, and a bit for the presence of the stack ([`PRESENT`]).
    Facts,
    /// EtherType, VLAN tags, and the common fields of IPv4 and IPv6.
    Misc,
    EthDst,
    EthSrc,
    Tags,
    Labels0,
    Labels1,
    Arp0,
    Arp1,
    Arp2,
    Ipv4,
    Ipv6Src0,
    Ipv6Src1,
    Ipv6Dst0,
    Ipv6Dst1,
    IpRest,
    Ports,
    Icmp,
    TcpSeq,
    Esp,
    Gre,
    Tunnel,
}

impl Kind {
    pub(crate) const ALL: [Self; 22] = [
        Self::Facts,
        Self::Misc,
        Self::EthDst,
        Self::EthSrc,
        Self::Tags,
        Self::Labels0,
        Self::Labels1,
        Self::Arp0,
        Self::Arp1,
        Self::Arp2,
        Self::Ipv4,
        Self::Ipv6Src0,
        Self::Ipv6Src1,
        Self::Ipv6Dst0,
        Self::Ipv6Dst1,
        Self::IpRest,
        Self::Ports,
        Self::Icmp,
        Self::TcpSeq,
        Self::Esp,
        Self::Gre,
        Self::Tunnel,
    ];
}

/// Words of one header stack.
pub(crate) const PER_LEVEL: usize = Kind::ALL.len();
/// Index of the word with port and mark.
pub(crate) const OUTSIDE: usize = PER_LEVEL * LEVELS as usize;
/// Index of the word with the application's data.
pub(crate) const DATA: usize = OUTSIDE + 1;
/// Words of a whole vector.
pub(crate) const WORDS: usize = DATA + 1;

/// Bit of [`Kind::Facts`]: the header stack is present.
pub(crate) const PRESENT: u64 = 1 << 40;

/// Returns the word and the shift of a key of at most 64 bits. Returns `None` for metadata and IPv6
/// addresses, which [`put`] places.
#[rustfmt::skip]
fn short(kind: KeyKind, nth: u8) -> Option<(Kind, u32)> {
    let n = u32::from(nth);
    Some(match kind {
        KeyKind::HeaderType(HeaderType::Link) => (Kind::Facts, 0),
        KeyKind::HeaderType(HeaderType::Mpls) => (Kind::Facts, 8),
        KeyKind::HeaderType(HeaderType::Network) => (Kind::Facts, 16),
        KeyKind::HeaderType(HeaderType::Transport) => (Kind::Facts, 24),
        KeyKind::HeaderType(HeaderType::Tunnel) => (Kind::Facts, 32),
        KeyKind::Field(field) => match field {
            Field::EthType => (Kind::Misc, 0),
            Field::EthTags => (Kind::Misc, 16),
            Field::Ipv4Proto | Field::Ipv6Proto => (Kind::Misc, 18),
            Field::Ipv4Frag | Field::Ipv6Frag => (Kind::Misc, 26),
            Field::Ipv6Ext => (Kind::Misc, 28),
            Field::Ipv4Dscp | Field::Ipv6Dscp => (Kind::Misc, 33),
            Field::Ipv4Ecn | Field::Ipv6Ecn => (Kind::Misc, 39),
            Field::Ipv4Ttl | Field::Ipv6Hops => (Kind::Misc, 41),
            Field::Ipv4Offset => (Kind::Misc, 49),
            Field::EthDst => (Kind::EthDst, 0),
            Field::EthSrc => (Kind::EthSrc, 0),
            // Positions as in the tag control information, with the TPID above.
            Field::VlanVid => (Kind::Tags, 32 * n),
            Field::VlanDei => (Kind::Tags, 32 * n + 12),
            Field::VlanPcp => (Kind::Tags, 32 * n + 13),
            Field::VlanTpid => (Kind::Tags, 32 * n + 16),
            // Positions as in the label stack entry.
            Field::MplsTtl => (label(nth), 32 * (n % 2)),
            Field::MplsBos => (label(nth), 32 * (n % 2) + 8),
            Field::MplsTc => (label(nth), 32 * (n % 2) + 9),
            Field::MplsLabel => (label(nth), 32 * (n % 2) + 12),
            Field::ArpOp => (Kind::Arp0, 48),
            Field::ArpSha => (Kind::Arp0, 0),
            Field::ArpTha => (Kind::Arp1, 0),
            Field::ArpSpa => (Kind::Arp2, 32),
            Field::ArpTpa => (Kind::Arp2, 0),
            Field::Ipv4Src => (Kind::Ipv4, 32),
            Field::Ipv4Dst => (Kind::Ipv4, 0),
            Field::Ipv4Id => (Kind::IpRest, 0),
            Field::Ipv4Ihl => (Kind::IpRest, 16),
            Field::Ipv4Df => (Kind::IpRest, 20),
            Field::Ipv4Mf => (Kind::IpRest, 21),
            Field::Ipv6Flow => (Kind::IpRest, 24),
            Field::Ipv6Next => (Kind::IpRest, 44),
            // Positions as in the first four bytes of both headers.
            Field::TcpSrc | Field::UdpSrc => (Kind::Ports, 16),
            Field::TcpDst | Field::UdpDst => (Kind::Ports, 0),
            Field::TcpFlags => (Kind::Ports, 32),
            Field::TcpWindow => (Kind::Ports, 41),
            Field::TcpSeq => (Kind::TcpSeq, 32),
            Field::TcpAck => (Kind::TcpSeq, 0),
            // Positions as in the first eight bytes of both headers.
            Field::IcmpType | Field::Icmpv6Type => (Kind::Icmp, 56),
            Field::IcmpCode | Field::Icmpv6Code => (Kind::Icmp, 48),
            Field::IcmpId | Field::Icmpv6Id => (Kind::Icmp, 16),
            Field::IcmpSeq | Field::Icmpv6Seq => (Kind::Icmp, 0),
            Field::EspSpi => (Kind::Esp, 32),
            Field::EspSeq => (Kind::Esp, 0),
            Field::GreFlags => (Kind::Gre, 48),
            Field::GreProto => (Kind::Gre, 32),
            Field::GreKey => (Kind::Gre, 0),
            Field::VxlanVni | Field::GpeVni | Field::GeneveVni => (Kind::Tunnel, 0),
            Field::VxlanFlags | Field::GpeFlags => (Kind::Tunnel, 24),
            Field::GpeNext => (Kind::Tunnel, 32),
            Field::GeneveProto => (Kind::Tunnel, 40),
            Field::GeneveOptLen => (Kind::Tunnel, 56),
            Field::GeneveOam => (Kind::Tunnel, 62),
            Field::GeneveCritical => (Kind::Tunnel, 63),
            Field::PortId | Field::MetaMark | Field::MetaData | Field::Ipv6Src | Field::Ipv6Dst => return None,
        },
    })
}

const fn label(nth: u8) -> Kind {
    if nth < 2 { Kind::Labels0 } else { Kind::Labels1 }
}

/// Adds a required key to a vector of masks and values.
fn put(words: &mut [(u64, u64); WORDS], key: Key, bits: MaskedValue) {
    let base = usize::from(key.level) * PER_LEVEL;
    let mut add = |word: usize, shift: u32, bits: MaskedValue| {
        words[word].0 |= (bits.mask as u64) << shift;
        words[word].1 |= (bits.value as u64) << shift;
    };
    if key.level > 0 {
        add(base, 0, MaskedValue { value: PRESENT.into(), mask: PRESENT.into() });
    }
    let upper = MaskedValue { value: bits.value >> 64, mask: bits.mask >> 64 };
    match key.kind {
        KeyKind::Field(Field::PortId) => add(OUTSIDE, 0, bits),
        KeyKind::Field(Field::MetaMark) => add(OUTSIDE, 16, bits),
        KeyKind::Field(Field::MetaData) => add(DATA, 0, bits),
        KeyKind::Field(Field::Ipv6Src) => {
            add(base + Kind::Ipv6Src0 as usize, 0, upper);
            add(base + Kind::Ipv6Src1 as usize, 0, bits);
        }
        KeyKind::Field(Field::Ipv6Dst) => {
            add(base + Kind::Ipv6Dst0 as usize, 0, upper);
            add(base + Kind::Ipv6Dst1 as usize, 0, bits);
        }
        what => {
            if let Some((kind, shift)) = short(what, key.nth) {
                add(base + kind as usize, shift, bits);
            }
        }
    }
}

/// Pattern of a rule: index, mask and value of each word. Words with an empty mask are left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pattern {
    pub(crate) mask: Box<[(u8, u64)]>,
    pub(crate) value: Box<[u64]>,
}

impl Pattern {
    pub(crate) fn of(set: &FieldSet) -> Self {
        Self::of_all(set.list().iter().filter(|(key, bits)| !is_implied(set, *key, *bits)))
    }

    /// Makes a pattern of exactly these keys, without leaving out implied ones.
    pub(crate) fn of_keys(list: &[(Key, MaskedValue)]) -> Self {
        Self::of_all(list.iter())
    }

    fn of_all<'a>(list: impl Iterator<Item = &'a (Key, MaskedValue)>) -> Self {
        let mut words = [(0, 0); WORDS];
        list.for_each(|&(key, bits)| put(&mut words, key, bits));
        if words.iter().all(|(mask, _)| *mask == 0) {
            // A pattern that every packet matches, because the outer stack is always present.
            words[Kind::Facts as usize] = (PRESENT, PRESENT);
        }
        let used = || words.iter().enumerate().filter(|(_, (mask, _))| *mask != 0);
        Self {
            mask: used().map(|(word, (mask, _))| (word as u8, *mask)).collect(),
            value: used().map(|(_, (_, value))| *value).collect(),
        }
    }
}

/// Returns true if the header types of the same pattern imply this key, given how packets are parsed. Leaving
/// implied keys out makes patterns shorter: a plain 5-tuple takes three words instead of four.
fn is_implied(set: &FieldSet, key: Key, bits: MaskedValue) -> bool {
    let KeyKind::Field(field) = key.kind else { return false };
    let fact = |fact| set.get(Key::header_type(key.level, fact));
    let exactly = |which| fact(which).filter(|bits| bits.mask == 0xff).map(|bits| bits.value);
    let exact = bits == MaskedValue::exact(bits.value, field.spec().bits);
    // The transport header type is the protocol of a header that was found, which is never in a later
    // fragment.
    let transport = exactly(HeaderType::Transport).filter(|protocol| *protocol != 0);
    match field {
        Field::Ipv4Proto | Field::Ipv6Proto => exact && transport == Some(bits.value),
        Field::Ipv4Frag | Field::Ipv6Frag => transport.is_some() && bits == MaskedValue { value: 0, mask: 2 },
        Field::Ipv4Offset => transport.is_some() && exact && bits.value == 0,
        Field::EthType => {
            let unlabelled = fact(HeaderType::Mpls)
                .is_some_and(|labels| labels.mask & !labels.value & u128::from(mpls::AFTER_ETHERNET) != 0);
            let has_ethernet = key.level == 0 || exactly(HeaderType::Link) == Some(1);
            let expected = match exactly(HeaderType::Network).map(|version| version as u8) {
                Some(network::ARP) => Some(0x0806),
                Some(network::IPV4) => Some(0x0800),
                Some(network::IPV6) => Some(0x86dd),
                _ => None,
            };
            exact && has_ethernet && unlabelled && expected == Some(bits.value)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use wirepath_flow::{FIELDS, ITEMS};

    use super::*;

    #[test]
    fn match_keys_overlap_only_if_they_are_alternatives() {
        let mut owners: HashMap<(usize, u32), Vec<Key>> = HashMap::new();
        for level in 0..LEVELS {
            for spec in FIELDS {
                let outside = matches!(spec.field, Field::PortId | Field::MetaMark | Field::MetaData);
                for nth in 0..ITEMS[spec.item as usize].max_count {
                    let key = Key { level, nth, kind: KeyKind::Field(spec.field) };
                    if outside && level > 0 {
                        continue;
                    }
                    let mut words = [(0, 0); WORDS];
                    put(&mut words, key, MaskedValue::exact(0, spec.bits));
                    words[PER_LEVEL].0 &= !PRESENT;
                    assert_eq!(
                        words.iter().map(|(mask, _)| mask.count_ones()).sum::<u32>(),
                        u32::from(spec.bits),
                        "{key}"
                    );
                    for (word, (mask, _)) in words.iter().enumerate() {
                        for bit in (0..64).filter(|bit| mask >> bit & 1 != 0) {
                            owners.entry((word, bit)).or_default().push(key);
                        }
                    }
                }
            }
        }
        // Fields that share a bit have the same name: source port, TTL ("ttl", "hops"), VNI.
        for keys in owners.values().filter(|keys| keys.len() > 1) {
            let names: Vec<&str> = keys
                .iter()
                .map(|key| match key.kind {
                    KeyKind::Field(field) => field.name(),
                    KeyKind::HeaderType(_) => "",
                })
                .map(|name| if name == "hops" { "ttl" } else { name })
                .collect();
            assert!(names.windows(2).all(|pair| pair[0] == pair[1]), "{keys:?}");
        }
    }

    #[test]
    fn a_five_tuple_key_has_three_words() {
        let rule: wirepath_flow::Rule =
            "ingress prio 1: eth / ipv4 src 10.0.0.1 dst 10.0.0.2 / udp src 1 dst 2 => drop".parse().unwrap();
        let words: Vec<u8> = Pattern::of(&rule.fields()).mask.iter().map(|(word, _)| *word).collect();
        assert_eq!(words, [Kind::Facts as u8, Kind::Ipv4 as u8, Kind::Ports as u8]);
    }
}
