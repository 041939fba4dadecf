//! A packet as a vector of words: every fact and field that rules compare has a fixed place in it.
//!
//! Rules become a mask and a value for each word, so that fitting a rule is a comparison of words. Fields of headers that exclude each
//! other share a word only where they mean the same (TCP and UDP ports): a mask for one header must not make keys of the other longer.

use wirepath_pmd::flow::{Bits, Fact, Field, FieldSet, Key, LEVELS, What, mpls, network};

/// What one word holds; the layout of each is in [`place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Kind {
    /// Five facts of eight bits, and whether there is such a stack ([`PRESENT`]).
    Facts,
    /// EtherType, tags, and what IPv4 and IPv6 have in common.
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
    pub(super) const ALL: [Self; 22] = [
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
pub(super) const PER_LEVEL: usize = Kind::ALL.len();
/// Port and mark.
pub(super) const OUTSIDE: usize = PER_LEVEL * LEVELS as usize;
/// The application's data.
pub(super) const DATA: usize = OUTSIDE + 1;
/// Words of a whole vector.
pub(super) const WORDS: usize = DATA + 1;

/// Of [`Kind::Facts`]: there is such a stack.
pub(super) const PRESENT: u64 = 1 << 40;

/// Where a key of at most 64 bits lies: kind of word and shift. `None`: IPv6 addresses, see [`place`].
#[rustfmt::skip]
fn short(what: What, nth: u8) -> Option<(Kind, u32)> {
    let n = u32::from(nth);
    Some(match what {
        What::Fact(Fact::Link) => (Kind::Facts, 0),
        What::Fact(Fact::Mpls) => (Kind::Facts, 8),
        What::Fact(Fact::Network) => (Kind::Facts, 16),
        What::Fact(Fact::Transport) => (Kind::Facts, 24),
        What::Fact(Fact::Tunnel) => (Kind::Facts, 32),
        What::Field(field) => match field {
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
            // As the tag control information has them, and the TPID above.
            Field::VlanVid => (Kind::Tags, 32 * n),
            Field::VlanDei => (Kind::Tags, 32 * n + 12),
            Field::VlanPcp => (Kind::Tags, 32 * n + 13),
            Field::VlanTpid => (Kind::Tags, 32 * n + 16),
            // As the label stack entry has them.
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
            // As the first four bytes of both headers have them.
            Field::TcpSrc | Field::UdpSrc => (Kind::Ports, 16),
            Field::TcpDst | Field::UdpDst => (Kind::Ports, 0),
            Field::TcpFlags => (Kind::Ports, 32),
            Field::TcpWindow => (Kind::Ports, 41),
            Field::TcpSeq => (Kind::TcpSeq, 32),
            Field::TcpAck => (Kind::TcpSeq, 0),
            // As the first eight bytes of both headers have them.
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

/// Adds what a key demands to a vector of masks and values.
fn put(words: &mut [(u64, u64); WORDS], key: Key, bits: Bits) {
    let base = usize::from(key.level) * PER_LEVEL;
    let mut add = |word: usize, shift: u32, bits: Bits| {
        words[word].0 |= (bits.mask as u64) << shift;
        words[word].1 |= (bits.value as u64) << shift;
    };
    if key.level > 0 {
        add(base, 0, Bits { value: PRESENT.into(), mask: PRESENT.into() });
    }
    let upper = Bits { value: bits.value >> 64, mask: bits.mask >> 64 };
    match key.what {
        What::Field(Field::PortId) => add(OUTSIDE, 0, bits),
        What::Field(Field::MetaMark) => add(OUTSIDE, 16, bits),
        What::Field(Field::MetaData) => add(DATA, 0, bits),
        What::Field(Field::Ipv6Src) => {
            add(base + Kind::Ipv6Src0 as usize, 0, upper);
            add(base + Kind::Ipv6Src1 as usize, 0, bits);
        }
        What::Field(Field::Ipv6Dst) => {
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

/// What a rule compares: index of the word, mask, value; words without mask left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pattern {
    pub(super) mask: Box<[(u8, u64)]>,
    pub(super) value: Box<[u64]>,
}

impl Pattern {
    pub(super) fn of(set: &FieldSet) -> Self {
        Self::of_all(set.list().iter().filter(|(key, bits)| !is_implied(set, *key, *bits)))
    }

    /// Of these alone, whatever they follow from.
    pub(super) fn of_keys(list: &[(Key, Bits)]) -> Self {
        Self::of_all(list.iter())
    }

    fn of_all<'a>(list: impl Iterator<Item = &'a (Key, Bits)>) -> Self {
        let mut words = [(0, 0); WORDS];
        list.for_each(|&(key, bits)| put(&mut words, key, bits));
        if words.iter().all(|(mask, _)| *mask == 0) {
            // Fits everything: there is always an outer stack.
            words[Kind::Facts as usize] = (PRESENT, PRESENT);
        }
        let used = || words.iter().enumerate().filter(|(_, (mask, _))| *mask != 0);
        Self {
            mask: used().map(|(word, (mask, _))| (word as u8, *mask)).collect(),
            value: used().map(|(_, (_, value))| *value).collect(),
        }
    }
}

/// Whether what a key demands follows from the facts that the list demands too, by the way packets are parsed. Leaving that out makes
/// keys shorter: of a plain 5-tuple three words are left of four.
fn is_implied(set: &FieldSet, key: Key, bits: Bits) -> bool {
    let What::Field(field) = key.what else { return false };
    let fact = |fact| set.get(Key::fact(key.level, fact));
    let exactly = |which| fact(which).filter(|bits| bits.mask == 0xff).map(|bits| bits.value);
    let exact = bits == Bits::exact(bits.value, field.spec().bits);
    // The fact is the protocol of a header that was found, which is never in a later fragment.
    let transport = exactly(Fact::Transport).filter(|protocol| *protocol != 0);
    match field {
        Field::Ipv4Proto | Field::Ipv6Proto => exact && transport == Some(bits.value),
        Field::Ipv4Frag | Field::Ipv6Frag => transport.is_some() && bits == Bits { value: 0, mask: 2 },
        Field::Ipv4Offset => transport.is_some() && exact && bits.value == 0,
        Field::EthType => {
            let unlabelled =
                fact(Fact::Mpls).is_some_and(|labels| labels.mask & !labels.value & u128::from(mpls::BEHIND_LINK) != 0);
            let has_link = key.level == 0 || exactly(Fact::Link) == Some(1);
            let expected = match exactly(Fact::Network).map(|version| version as u8) {
                Some(network::ARP) => Some(0x0806),
                Some(network::IPV4) => Some(0x0800),
                Some(network::IPV6) => Some(0x86dd),
                _ => None,
            };
            exact && has_link && unlabelled && expected == Some(bits.value)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use wirepath_pmd::flow::{FIELDS, ITEMS};

    use super::*;

    #[test]
    fn every_key_has_bits_of_its_own_or_those_of_its_like() {
        let mut owners: HashMap<(usize, u32), Vec<Key>> = HashMap::new();
        for level in 0..LEVELS {
            for spec in FIELDS {
                let outside = matches!(spec.field, Field::PortId | Field::MetaMark | Field::MetaData);
                for nth in 0..ITEMS[spec.item as usize].most {
                    let key = Key { level, nth, what: What::Field(spec.field) };
                    if outside && level > 0 {
                        continue;
                    }
                    let mut words = [(0, 0); WORDS];
                    put(&mut words, key, Bits::exact(0, spec.bits));
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
        // Who shares a bit has the same name: source port, TTL ("ttl", "hops"), VNI.
        for keys in owners.values().filter(|keys| keys.len() > 1) {
            let names: Vec<&str> = keys
                .iter()
                .map(|key| match key.what {
                    What::Field(field) => field.name(),
                    What::Fact(_) => "",
                })
                .map(|name| if name == "hops" { "ttl" } else { name })
                .collect();
            assert!(names.windows(2).all(|pair| pair[0] == pair[1]), "{keys:?}");
        }
    }

    #[test]
    fn a_plain_five_tuple_takes_three_words() {
        let rule: wirepath_pmd::flow::Rule =
            "ingress prio 1: eth / ipv4 src 10.0.0.1 dst 10.0.0.2 / udp src 1 dst 2 => drop".parse().unwrap();
        let words: Vec<u8> = Pattern::of(&rule.fields()).mask.iter().map(|(word, _)| *word).collect();
        assert_eq!(words, [Kind::Facts as u8, Kind::Ipv4 as u8, Kind::Ports as u8]);
    }
}
