//! Conversion of complete field sets into the comparisons that a device must make.
//!
//! A device parses packets differently from the rule language. Conditions that follow from other comparisons
//! in the device too are left out. Conditions that the device cannot evaluate are errors. Of fragments, a
//! device only knows whether a packet is one. A set that excludes only later fragments is treated as
//! excluding all, because ports put rules for fragments above all others
//! ([`crate::port::hardware::TableCapabilities::excluded_patterns`]).

use wirepath_flow::{Field, FieldSet, HeaderType, Key, KeyKind, MaskedValue, mpls, network, tunnel};

/// A value that a device can compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatchTarget {
    /// A field of the rule language.
    Field(Field),
    /// IP version: 4 or 6.
    IpVersion,
    /// Fragment flag.
    Fragment,
    /// Presence of VLAN tag `nth` with TPID 0x8100.
    CustomerTag,
    /// Presence of VLAN tag `nth` with TPID 0x88a8.
    ServiceTag,
    /// Bits of the first MPLS label stack entry behind this header.
    Label(MplsParent),
    /// Bits of the first word of a tunnel header behind UDP, or of a GRE header.
    TunnelWord,
}

/// Header in front of a label stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MplsParent {
    Link,
    Udp,
    Gre,
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FieldMatch {
    /// Header stack: 0 is the outer one, 1 the inner one.
    pub(crate) level: u8,
    /// Index of the VLAN tag.
    pub(crate) nth: u8,
    /// The compared value.
    pub(crate) target: MatchTarget,
    /// The expected bits.
    pub(crate) bits: MaskedValue,
}

const CUSTOMER: u128 = 0x8100;
const SERVICE: u128 = 0x88a8;
const MPLS_TYPES: [u128; 2] = [0x8847, 0x8848];
const BRIDGING: u128 = 0x6558;
const VXLAN_PORT: u128 = 4789;
const FLAG: u128 = 1;
/// Flags of a GRE header that devices compare one by one: checksum, key and sequence number.
const GRE_FIELDS: u128 = 0xb000;
/// First word of a VXLAN header with a VNI (RFC 7348 section 5).
const VXLAN_HAS_VNI: MaskedValue = MaskedValue { value: 0x0800_0000, mask: 0x0800_0000 };
/// First word of a GENEVE header of version 0 (RFC 8926 section 3.4).
const GENEVE_VERSION: MaskedValue = MaskedValue { value: 0, mask: 0xc000_0000 };
/// Flags of VXLAN-GPE version 0 (draft-ietf-nvo3-vxlan-gpe section 3.1).
const GPE_VERSION: MaskedValue = MaskedValue { value: 0, mask: 0x30 };
/// IP protocol number of the authentication header.
const AH: u128 = 51;

/// Read access to a complete field set.
struct Reader<'a> {
    set: &'a FieldSet,
}

impl Reader<'_> {
    /// Returns a value of which all bits are known.
    fn exact_value(&self, key: Key) -> Option<u128> {
        let bits = self.set.get(key)?;
        (bits == MaskedValue::exact(bits.value, key.bits())).then_some(bits.value)
    }

    fn field(&self, level: u8, field: Field) -> Option<u128> {
        self.exact_value(Key::field(level, field))
    }

    fn fact(&self, level: u8, fact: HeaderType) -> Option<u128> {
        self.exact_value(Key::header_type(level, fact))
    }

    fn mask(&self, level: u8, field: Field) -> u128 {
        self.set.get(Key::field(level, field)).map_or(0, |bits| bits.mask)
    }

    /// Returns the IP protocol.
    fn protocol(&self, level: u8) -> Option<u128> {
        self.field(level, Field::Ipv4Proto).or_else(|| self.field(level, Field::Ipv6Proto))
    }

    /// Returns whether the inner stack begins with Ethernet, if the outer one determines that.
    fn inner_link(&self) -> Option<bool> {
        let by_type = |value| match value {
            BRIDGING => Some(true),
            0x0800 | 0x86dd => Some(false),
            _ => None,
        };
        match self.fact(0, HeaderType::Tunnel).map(|kind| kind as u8) {
            Some(tunnel::VXLAN) => Some(true),
            Some(tunnel::VXLAN_GPE) => match self.field(0, Field::GpeNext)? {
                3 => Some(true),
                1 | 2 => Some(false),
                _ => None,
            },
            Some(tunnel::GENEVE) => self.field(0, Field::GeneveProto).and_then(by_type),
            Some(tunnel::GRE) => self.field(0, Field::GreProto).and_then(by_type),
            _ => matches!(self.protocol(0)?, 4 | 41).then_some(false),
        }
    }

    /// Converts a header type. It must follow from compared fields, or the device cannot evaluate it.
    fn header_type_target(
        &self,
        level: u8,
        fact: HeaderType,
        bits: MaskedValue,
    ) -> Result<Option<MatchTarget>, String> {
        let unknown = |what: &str| Err(format!("finding out {what} from this pattern; it needs further fields"));
        let udp = self.field(level, Field::UdpDst);
        match fact {
            HeaderType::Link => match self.inner_link() {
                Some(link) if bits.matches(link.into()) => Ok(None),
                _ => unknown("whether an Ethernet frame is in the tunnel"),
            },
            HeaderType::Network => match bits.value as u8 {
                network::IPV4 | network::IPV6 => Ok(Some(MatchTarget::IpVersion)),
                network::ARP if self.field(level, Field::EthType) == Some(0x0806) => Ok(None),
                _ => unknown("the type of the network layer"),
            },
            HeaderType::Transport => match self.protocol(level) {
                Some(protocol) if protocol != 0 && bits.matches(protocol) => Ok(None),
                _ => unknown("the type of the transport layer"),
            },
            HeaderType::Tunnel => {
                let is = match bits.value as u8 {
                    tunnel::VXLAN => udp == Some(VXLAN_PORT),
                    tunnel::VXLAN_GPE => udp == Some(wirepath_flow::GPE_PORT.into()),
                    tunnel::GENEVE => udp == Some(wirepath_flow::GENEVE_PORT.into()),
                    tunnel::GRE => self.protocol(level) == Some(47),
                    _ => udp == Some(wirepath_flow::MPLS_PORT.into()),
                };
                if is { Ok(None) } else { unknown("the type of the tunnel") }
            }
            HeaderType::Mpls => {
                let is = |bit: u8| bits.value & u128::from(bit) != 0;
                let asked = |bit: u8| bits.mask & u128::from(bit) != 0;
                let labelled = |ethertype: Option<u128>| ethertype.map(|value| MPLS_TYPES.contains(&value));
                let no_link = level > 0 && self.inner_link() == Some(false);
                let link = if no_link { Some(false) } else { labelled(self.field(level, Field::EthType)) };
                if asked(mpls::AFTER_ETHERNET) && link != Some(is(mpls::AFTER_ETHERNET)) {
                    return unknown("whether there are labels");
                }
                let gre = labelled(self.field(level, Field::GreProto));
                if asked(mpls::AFTER_GRE) && gre != Some(is(mpls::AFTER_GRE)) {
                    return unknown("whether there are labels behind GRE");
                }
                let port = udp.map(|port| port == u128::from(wirepath_flow::MPLS_PORT));
                if asked(mpls::AFTER_UDP) && port != Some(is(mpls::AFTER_UDP)) {
                    return unknown("whether there are labels behind UDP");
                }
                Ok(None)
            }
        }
    }

    /// Returns the comparison that verifies a tunnel header on its UDP port. The rule language ignores
    /// headers that fail it.
    fn tunnel_target(fact: HeaderType, bits: MaskedValue) -> Option<(MatchTarget, MaskedValue)> {
        match bits.value as u8 {
            _ if fact != HeaderType::Tunnel => None,
            tunnel::VXLAN => Some((MatchTarget::TunnelWord, VXLAN_HAS_VNI)),
            tunnel::VXLAN_GPE => Some((MatchTarget::Field(Field::GpeFlags), GPE_VERSION)),
            tunnel::GENEVE => Some((MatchTarget::TunnelWord, GENEVE_VERSION)),
            _ => None,
        }
    }

    /// Converts a field, unless its value follows from others.
    fn field_targets(
        &self,
        key: Key,
        field: Field,
        bits: MaskedValue,
    ) -> Result<Vec<(u8, MatchTarget, MaskedValue)>, String> {
        let Key { level, nth, .. } = key;
        let flag = |nth, target, value: bool| (nth, target, MaskedValue { value: value.into(), mask: FLAG });
        let no = || Err(format!("comparing {} {}", field.spec().item.spec().name, field.name()));
        let one = |target, bits| Ok(vec![(nth, target, bits)]);
        let fragments = |which| self.mask(level, which);
        let labels = self.set.get(Key::header_type(level, HeaderType::Mpls)).map_or(0, |bits| bits.value as u8);
        match field {
            // Fragments behind labels are not covered by the excluded patterns.
            Field::Ipv4Frag | Field::Ipv6Frag | Field::Ipv6Ext | Field::Ipv6Proto
                if labels & mpls::AFTER_ETHERNET != 0 =>
            {
                no()
            }
            Field::EthTags => {
                let mut targets = Vec::new();
                for nth in (0..2).filter(|nth| bits.mask >> nth & 1 != 0) {
                    if bits.value >> nth & 1 == 0 {
                        targets.extend([
                            flag(nth, MatchTarget::CustomerTag, false),
                            flag(nth, MatchTarget::ServiceTag, false),
                        ]);
                    }
                }
                Ok(targets)
            }
            Field::VlanTpid => match self.exact_value(key) {
                Some(CUSTOMER) => Ok(vec![flag(nth, MatchTarget::CustomerTag, true)]),
                Some(SERVICE) => Ok(vec![flag(nth, MatchTarget::ServiceTag, true)]),
                _ => no(),
            },
            Field::Ipv4Frag | Field::Ipv6Frag => match (bits.mask, bits.value) {
                // A device cannot separate later fragments from first ones.
                (2 | 3, 0) | (1, 0) => Ok(vec![flag(0, MatchTarget::Fragment, false)]),
                (1, 1) => Ok(vec![flag(0, MatchTarget::Fragment, true)]),
                _ => no(),
            },
            // Implied by the fragment flags.
            Field::Ipv4Offset if bits.value == 0 && fragments(Field::Ipv4Frag) & 2 != 0 => Ok(Vec::new()),
            Field::Ipv4Mf if fragments(Field::Ipv4Frag) & 3 == 3 => Ok(Vec::new()),
            // A device treats every packet with a fragment header as a fragment, even the only one of its
            // packet.
            Field::Ipv6Ext if bits.mask == wirepath_flow::ext::FRAGMENT => {
                Ok(vec![flag(0, MatchTarget::Fragment, bits.value != 0)])
            }
            // A device stops at this header and reports it as the protocol.
            Field::Ipv6Ext if bits.mask == wirepath_flow::ext::AH && bits.value != 0 => {
                one(MatchTarget::Field(Field::Ipv6Proto), MaskedValue::exact(AH, 8))
            }
            Field::MplsLabel | Field::MplsTc | Field::MplsBos | Field::MplsTtl if nth == 0 => {
                let parent = match labels {
                    mpls::AFTER_ETHERNET => MplsParent::Link,
                    mpls::AFTER_UDP => MplsParent::Udp,
                    mpls::AFTER_GRE => MplsParent::Gre,
                    _ => return no(),
                };
                let shift = match field {
                    Field::MplsLabel => 12,
                    Field::MplsTc => 9,
                    Field::MplsBos => 8,
                    _ => 0,
                };
                one(MatchTarget::Label(parent), MaskedValue { value: bits.value << shift, mask: bits.mask << shift })
            }
            Field::VxlanFlags => {
                one(MatchTarget::TunnelWord, MaskedValue { value: bits.value << 24, mask: bits.mask << 24 })
            }
            // The other flags and the version are only in the first word. The protocol is compared with them, so that
            // a device that has no such word for GRE matches no packet. For such a device the word is 0.
            Field::GreFlags if bits.mask & !GRE_FIELDS != 0 => {
                let proto = Key { kind: KeyKind::Field(Field::GreProto), ..key };
                let proto = self.set.get(proto).unwrap_or(MaskedValue { value: 0, mask: 0 });
                let word = MaskedValue { value: bits.value << 16 | proto.value, mask: bits.mask << 16 | proto.mask };
                match word.value {
                    0 => Err("comparing gre flags of 0 without a nonzero proto".to_owned()),
                    _ => one(MatchTarget::TunnelWord, word),
                }
            }
            _ => one(MatchTarget::Field(field), bits),
        }
    }
}

/// Converts a complete field set. An error names the comparison that the device does not support.
pub(crate) fn from_set(set: &FieldSet) -> Result<Vec<FieldMatch>, String> {
    let reader = Reader { set };
    let mut matches = Vec::new();
    for &(key, bits) in set.list() {
        let Key { level, nth, kind } = key;
        match kind {
            KeyKind::HeaderType(fact) => {
                let target = reader.header_type_target(level, fact, bits)?;
                matches.extend(target.map(|target| FieldMatch {
                    level,
                    nth,
                    target,
                    bits: MaskedValue { mask: 0xf, ..bits },
                }));
                matches.extend(Reader::tunnel_target(fact, bits).map(|(target, bits)| FieldMatch {
                    level,
                    nth,
                    target,
                    bits,
                }));
            }
            KeyKind::Field(field) => {
                let targets = reader.field_targets(key, field, bits)?;
                matches.extend(targets.into_iter().map(|(nth, target, bits)| FieldMatch { level, nth, target, bits }));
            }
        }
    }
    Ok(matches)
}
