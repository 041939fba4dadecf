//! What a device has to compare so that exactly the packets of a closed list fit.
//!
//! A device does not take packets apart as the rule language says it is done. What of a list follows from the rest in the device too is
//! left out here; what the device cannot tell is an error. Fragments are looked at only as far as "it is one": lists that exclude later
//! fragments alone are taken to exclude all, as ports put rules for fragments on top of all others
//! ([`crate::port::hardware::TableCapabilities::aside`]).

use crate::flow::{Bits, Fact, Field, FieldSet, Key, What, mpls, network, tunnel};

/// Something that a device can compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// A field of the language.
    Field(Field),
    /// 4 or 6.
    IpVersion,
    /// Whether it is a fragment.
    Fragment,
    /// Whether there is a tag with this number that is announced by 0x8100.
    CustomerTag,
    /// By 0x88a8.
    ServiceTag,
    /// Bits of the first label stack entry, which lies there.
    Label(Behind),
    /// Bits of the first word of a tunnel header behind UDP.
    TunnelWord,
}

/// Where labels lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    Link,
    Udp,
    Gre,
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Header stack: 0 the outer, 1 the inner.
    pub(crate) level: u8,
    /// Which, of tags.
    pub(crate) nth: u8,
    /// What.
    pub(crate) want: Want,
    /// With what.
    pub(crate) bits: Bits,
}

const CUSTOMER: u128 = 0x8100;
const SERVICE: u128 = 0x88a8;
const MPLS_TYPES: [u128; 2] = [0x8847, 0x8848];
const BRIDGING: u128 = 0x6558;
const VXLAN_PORT: u128 = 4789;
const FLAG: u128 = 1;
/// In the first word of a VXLAN header: there is a VNI (RFC 7348 section 5).
const VXLAN_HAS_VNI: Bits = Bits { value: 0x0800_0000, mask: 0x0800_0000 };
/// In the first word of a GENEVE header: version 0 (RFC 8926 section 3.4).
const GENEVE_VERSION: Bits = Bits { value: 0, mask: 0xc000_0000 };
/// Among the flags of VXLAN-GPE: version 0 (draft-ietf-nvo3-vxlan-gpe section 3.1).
const GPE_VERSION: Bits = Bits { value: 0, mask: 0x30 };
/// Protocol of the authentication header.
const AH: u128 = 51;

/// A list being read.
struct Reader<'a> {
    set: &'a FieldSet,
}

impl Reader<'_> {
    /// A value that is known whole.
    fn known(&self, key: Key) -> Option<u128> {
        let bits = self.set.get(key)?;
        (bits == Bits::exact(bits.value, key.bits())).then_some(bits.value)
    }

    fn field(&self, level: u8, field: Field) -> Option<u128> {
        self.known(Key::field(level, field))
    }

    fn fact(&self, level: u8, fact: Fact) -> Option<u128> {
        self.known(Key::fact(level, fact))
    }

    fn mask(&self, level: u8, field: Field) -> u128 {
        self.set.get(Key::field(level, field)).map_or(0, |bits| bits.mask)
    }

    /// Protocol behind IP.
    fn protocol(&self, level: u8) -> Option<u128> {
        self.field(level, Field::Ipv4Proto).or_else(|| self.field(level, Field::Ipv6Proto))
    }

    /// Whether the inner stack begins with Ethernet, where what is compared of the outer one tells.
    fn inner_link(&self) -> Option<bool> {
        let by_type = |value| match value {
            BRIDGING => Some(true),
            0x0800 | 0x86dd => Some(false),
            _ => None,
        };
        match self.fact(0, Fact::Tunnel).map(|kind| kind as u8) {
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

    /// Facts follow from fields that are compared, or cannot be told.
    fn check(&self, level: u8, fact: Fact, bits: Bits) -> Result<Option<Want>, String> {
        let unknown = |what: &str| Err(format!("telling {what} without more in the pattern"));
        let udp = self.field(level, Field::UdpDst);
        match fact {
            Fact::Link => match self.inner_link() {
                Some(link) if bits.matches(link.into()) => Ok(None),
                _ => unknown("whether an Ethernet frame is in the tunnel"),
            },
            Fact::Network => match bits.value as u8 {
                network::IPV4 | network::IPV6 => Ok(Some(Want::IpVersion)),
                network::ARP if self.field(level, Field::EthType) == Some(0x0806) => Ok(None),
                _ => unknown("the network layer"),
            },
            Fact::Transport => match self.protocol(level) {
                Some(protocol) if protocol != 0 && bits.matches(protocol) => Ok(None),
                _ => unknown("the transport layer"),
            },
            Fact::Tunnel => {
                let is = match bits.value as u8 {
                    tunnel::VXLAN => udp == Some(VXLAN_PORT),
                    tunnel::VXLAN_GPE => udp == Some(crate::flow::GPE_PORT.into()),
                    tunnel::GENEVE => udp == Some(crate::flow::GENEVE_PORT.into()),
                    tunnel::GRE => self.protocol(level) == Some(47),
                    _ => udp == Some(crate::flow::MPLS_PORT.into()),
                };
                if is { Ok(None) } else { unknown("which tunnel it is") }
            }
            Fact::Mpls => {
                let is = |place: u8| bits.value & u128::from(place) != 0;
                let asked = |place: u8| bits.mask & u128::from(place) != 0;
                let labelled = |ethertype: Option<u128>| ethertype.map(|value| MPLS_TYPES.contains(&value));
                let bare = level > 0 && self.inner_link() == Some(false);
                let link = if bare { Some(false) } else { labelled(self.field(level, Field::EthType)) };
                if asked(mpls::BEHIND_LINK) && link != Some(is(mpls::BEHIND_LINK)) {
                    return unknown("whether there are labels");
                }
                let gre = labelled(self.field(level, Field::GreProto));
                if asked(mpls::BEHIND_GRE) && gre != Some(is(mpls::BEHIND_GRE)) {
                    return unknown("whether there are labels behind GRE");
                }
                let port = udp.map(|port| port == u128::from(crate::flow::MPLS_PORT));
                if asked(mpls::BEHIND_UDP) && port != Some(is(mpls::BEHIND_UDP)) {
                    return unknown("whether there are labels behind UDP");
                }
                Ok(None)
            }
        }
    }

    /// What makes a header that stands on a tunnel's UDP port one of that tunnel: another is not there for the language.
    fn header(fact: Fact, bits: Bits) -> Option<(Want, Bits)> {
        match bits.value as u8 {
            _ if fact != Fact::Tunnel => None,
            tunnel::VXLAN => Some((Want::TunnelWord, VXLAN_HAS_VNI)),
            tunnel::VXLAN_GPE => Some((Want::Field(Field::GpeFlags), GPE_VERSION)),
            tunnel::GENEVE => Some((Want::TunnelWord, GENEVE_VERSION)),
            _ => None,
        }
    }

    /// What of a field is compared, if it does not follow.
    fn look(&self, key: Key, field: Field, bits: Bits) -> Result<Vec<(u8, Want, Bits)>, String> {
        let Key { level, nth, .. } = key;
        let flag = |nth, want, value: bool| (nth, want, Bits { value: value.into(), mask: FLAG });
        let no = || Err(format!("comparing {} {}", field.spec().item.spec().name, field.name()));
        let one = |want, bits| Ok(vec![(nth, want, bits)]);
        let fragments = |which| self.mask(level, which);
        let labels = self.set.get(Key::fact(level, Fact::Mpls)).map_or(0, |bits| bits.value as u8);
        match field {
            // Packets behind labels are not put aside.
            Field::Ipv4Frag | Field::Ipv6Frag | Field::Ipv6Ext | Field::Ipv6Proto
                if labels & mpls::BEHIND_LINK != 0 =>
            {
                no()
            }
            Field::EthTags => {
                let mut wants = Vec::new();
                for nth in (0..2).filter(|nth| bits.mask >> nth & 1 != 0) {
                    if bits.value >> nth & 1 == 0 {
                        wants.extend([flag(nth, Want::CustomerTag, false), flag(nth, Want::ServiceTag, false)]);
                    }
                }
                Ok(wants)
            }
            Field::VlanTpid => match self.known(key) {
                Some(CUSTOMER) => Ok(vec![flag(nth, Want::CustomerTag, true)]),
                Some(SERVICE) => Ok(vec![flag(nth, Want::ServiceTag, true)]),
                _ => no(),
            },
            Field::Ipv4Frag | Field::Ipv6Frag => match (bits.mask, bits.value) {
                // Later fragments alone have no first one beside them in a device.
                (2 | 3, 0) | (1, 0) => Ok(vec![flag(0, Want::Fragment, false)]),
                (1, 1) => Ok(vec![flag(0, Want::Fragment, true)]),
                _ => no(),
            },
            // Follow from the fragment flags.
            Field::Ipv4Offset if bits.value == 0 && fragments(Field::Ipv4Frag) & 2 != 0 => Ok(Vec::new()),
            Field::Ipv4Mf if fragments(Field::Ipv4Frag) & 3 == 3 => Ok(Vec::new()),
            // A header for fragments makes one for a device, be it the only one.
            Field::Ipv6Ext if bits.mask == crate::flow::ext::FRAGMENT => {
                Ok(vec![flag(0, Want::Fragment, bits.value != 0)])
            }
            // A device goes no further, and takes the header for what is carried.
            Field::Ipv6Ext if bits.mask == crate::flow::ext::AH && bits.value != 0 => {
                one(Want::Field(Field::Ipv6Proto), Bits::exact(AH, 8))
            }
            Field::MplsLabel | Field::MplsTc | Field::MplsBos | Field::MplsTtl if nth == 0 => {
                let behind = match labels {
                    mpls::BEHIND_LINK => Behind::Link,
                    mpls::BEHIND_UDP => Behind::Udp,
                    mpls::BEHIND_GRE => Behind::Gre,
                    _ => return no(),
                };
                let shift = match field {
                    Field::MplsLabel => 12,
                    Field::MplsTc => 9,
                    Field::MplsBos => 8,
                    _ => 0,
                };
                one(Want::Label(behind), Bits { value: bits.value << shift, mask: bits.mask << shift })
            }
            Field::VxlanFlags => one(Want::TunnelWord, Bits { value: bits.value << 24, mask: bits.mask << 24 }),
            _ => one(Want::Field(field), bits),
        }
    }
}

/// What is to be compared; an error says what the device would have to do.
pub(crate) fn of(set: &FieldSet) -> Result<Vec<Demand>, String> {
    let reader = Reader { set };
    let mut demands = Vec::new();
    for &(key, bits) in set.list() {
        let Key { level, nth, what } = key;
        match what {
            What::Fact(fact) => {
                let want = reader.check(level, fact, bits)?;
                demands.extend(want.map(|want| Demand { level, nth, want, bits: Bits { mask: 0xf, ..bits } }));
                demands.extend(Reader::header(fact, bits).map(|(want, bits)| Demand { level, nth, want, bits }));
            }
            What::Field(field) => {
                let wants = reader.look(key, field, bits)?;
                demands.extend(wants.into_iter().map(|(nth, want, bits)| Demand { level, nth, want, bits }));
            }
        }
    }
    Ok(demands)
}
