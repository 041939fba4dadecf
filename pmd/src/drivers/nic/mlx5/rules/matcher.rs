//! Encoding of comparisons as match parameters of the device.

use wirepath_nic_defs::mlx5::{MatchField, header, misc, misc2, misc3, misc5};
use wirepath_verbs::mlx5::MatchParameters;

use crate::drivers::nic::common::rules::match_fields::{self, FieldMatch, MatchTarget, MplsParent};
use wirepath_flow::{Field, FieldSet, MaskedValue};

/// Returns the device field of a comparison.
fn match_field(field_match: &FieldMatch) -> Option<MatchField> {
    let FieldMatch { level, nth, target, .. } = *field_match;
    let outer = level == 0;
    // A field that exists in each header stack.
    let each = |field: MatchField| Some(if outer { field } else { field.inner() });
    let of = |at_outer: MatchField, at_inner: MatchField| Some(if outer { at_outer } else { at_inner });
    let only_outer = |field: MatchField| outer.then_some(field);
    let tag = |first: MatchField, second_outer: MatchField, second_inner: MatchField| match nth {
        0 => each(first),
        1 => of(second_outer, second_inner),
        _ => None,
    };
    match target {
        MatchTarget::IpVersion => each(header::IP_VERSION),
        MatchTarget::Fragment => each(header::FRAGMENT),
        MatchTarget::CustomerTag => tag(header::CVLAN_TAG, misc::OUTER_SECOND_CVLAN, misc::INNER_SECOND_CVLAN),
        MatchTarget::ServiceTag => tag(header::SVLAN_TAG, misc::OUTER_SECOND_SVLAN, misc::INNER_SECOND_SVLAN),
        MatchTarget::Label(MplsParent::Link) => of(misc2::OUTER_MPLS, misc2::INNER_MPLS),
        MatchTarget::Label(MplsParent::Udp) => only_outer(misc2::MPLS_OVER_UDP),
        MatchTarget::Label(MplsParent::Gre) => only_outer(misc2::MPLS_OVER_GRE),
        MatchTarget::TunnelWord => only_outer(misc5::tunnel_header(0)),
        MatchTarget::Field(field) => match field {
            Field::MetaData => only_outer(misc2::REG_A),
            Field::EthDst => each(header::DST_MAC),
            Field::EthSrc => each(header::SRC_MAC),
            Field::EthType => each(header::ETHERTYPE),
            Field::VlanVid => tag(header::FIRST_VID, misc::OUTER_SECOND_VID, misc::INNER_SECOND_VID),
            Field::VlanPcp => tag(header::FIRST_PRIO, misc::OUTER_SECOND_PRIO, misc::INNER_SECOND_PRIO),
            Field::VlanDei => tag(header::FIRST_CFI, misc::OUTER_SECOND_CFI, misc::INNER_SECOND_CFI),
            Field::Ipv4Src => each(header::SRC_IPV4),
            Field::Ipv4Dst => each(header::DST_IPV4),
            Field::Ipv4Proto | Field::Ipv6Proto => each(header::IP_PROTOCOL),
            Field::Ipv4Dscp | Field::Ipv6Dscp => each(header::IP_DSCP),
            Field::Ipv4Ecn | Field::Ipv6Ecn => each(header::IP_ECN),
            Field::Ipv4Ttl | Field::Ipv6Hops => each(header::TTL),
            Field::Ipv4Ihl => each(header::IPV4_IHL),
            Field::Ipv6Src => each(header::SRC_IPV6),
            Field::Ipv6Dst => each(header::DST_IPV6),
            Field::Ipv6Flow => of(misc::OUTER_FLOW_LABEL, misc::INNER_FLOW_LABEL),
            Field::TcpSrc => each(header::TCP_SPORT),
            Field::TcpDst => each(header::TCP_DPORT),
            Field::TcpFlags => each(header::TCP_FLAGS),
            Field::TcpSeq => of(misc3::OUTER_TCP_SEQ, misc3::INNER_TCP_SEQ),
            Field::TcpAck => of(misc3::OUTER_TCP_ACK, misc3::INNER_TCP_ACK),
            Field::UdpSrc => each(header::UDP_SPORT),
            Field::UdpDst => each(header::UDP_DPORT),
            Field::IcmpType => only_outer(misc3::ICMP_TYPE),
            Field::IcmpCode => only_outer(misc3::ICMP_CODE),
            Field::Icmpv6Type => only_outer(misc3::ICMPV6_TYPE),
            Field::Icmpv6Code => only_outer(misc3::ICMPV6_CODE),
            Field::IcmpId | Field::IcmpSeq => only_outer(misc3::ICMP_DATA),
            Field::EspSpi => of(misc::OUTER_ESP_SPI, misc::INNER_ESP_SPI),
            Field::GreProto => only_outer(misc::GRE_PROTOCOL),
            Field::GreKey => only_outer(misc::GRE_KEY),
            Field::VxlanVni => only_outer(misc::VXLAN_VNI),
            Field::GpeFlags => only_outer(misc3::GPE_FLAGS),
            Field::GpeNext => only_outer(misc3::GPE_NEXT_PROTOCOL),
            Field::GpeVni => only_outer(misc3::GPE_VNI),
            Field::GeneveVni => only_outer(misc::GENEVE_VNI),
            Field::GeneveProto => only_outer(misc::GENEVE_PROTOCOL),
            Field::GeneveOptLen => only_outer(misc::GENEVE_OPT_LEN),
            Field::GeneveOam => only_outer(misc::GENEVE_OAM),
            _ => None,
        },
    }
}

/// Flags of a GRE header that a device can compare.
const GRE_FLAGS: [(u128, MatchField); 3] = [(0x8000, misc::GRE_C), (0x2000, misc::GRE_K), (0x1000, misc::GRE_S)];

/// Returns mask and value of a complete field set.
pub(super) fn parameters(set: &FieldSet) -> Result<(MatchParameters, MatchParameters), String> {
    let (mut mask, mut value) = (MatchParameters::default(), MatchParameters::default());
    let mut agrees = true;
    let mut put = |field: MatchField, bits: MaskedValue| {
        // Two different values for the same bits: no packet matches.
        agrees &= (value.get(field) ^ bits.value) & mask.get(field) & bits.mask == 0;
        mask.set(field, mask.get(field) | bits.mask);
        value.set(field, value.get(field) | bits.value & bits.mask);
    };
    for field_match in match_fields::from_set(set)? {
        let bits = field_match.bits;
        match field_match.target {
            MatchTarget::Field(Field::GreFlags) if field_match.level == 0 && bits.mask & !0xb000 == 0 => {
                for (bit, field) in GRE_FLAGS.into_iter().filter(|(bit, _)| bits.mask & bit != 0) {
                    put(field, MaskedValue::exact(u128::from(bits.value & bit != 0), 1));
                }
            }
            // Two halves of one word.
            MatchTarget::Field(Field::IcmpId) if field_match.level == 0 => {
                put(misc3::ICMP_DATA, MaskedValue { value: bits.value << 16, mask: bits.mask << 16 });
            }
            target => {
                let field = match_field(&field_match).ok_or_else(|| match target {
                    MatchTarget::Field(field) => {
                        format!("comparing {} {}", field.spec().item.spec().name, field.name())
                    }
                    _ => "comparing headers behind the second tag or label".to_owned(),
                })?;
                put(field, bits);
            }
        }
    }
    if agrees { Ok((mask, value)) } else { Err("a pattern that no packet matches".to_owned()) }
}

/// Requires valid outer headers: lengths, and checksums where present.
///
/// The bits of layer 4 are about UDP and TCP only (NVIDIA "Steering by Integrity Check Flags", DPDK
/// `doc/guides/nics/mlx5.rst`). GRE and IP in IP have none.
pub(super) fn require_valid_headers(mask: &mut MatchParameters, value: &mut MatchParameters) {
    let ipv4 = value.get(header::IP_VERSION) == 4;
    let transport = matches!(value.get(header::IP_PROTOCOL), 6 | 17);
    let ip = [Some(header::L3_OK), ipv4.then_some(header::IPV4_CHECKSUM_OK)];
    let fields = [header::L4_OK, header::L4_CHECKSUM_OK].map(|field| transport.then_some(field));
    for field in ip.into_iter().chain(fields).flatten() {
        mask.set(field, 1);
        value.set(field, 1);
    }
}

/// Returns true if the kernel treats rules with these parameters as multicast. It puts them behind all
/// others, whatever their priority (Linux `drivers/infiniband/hw/mlx5/fs.c`, `raw_fs_is_multicast`).
pub(super) fn is_multicast(mask: &MatchParameters, value: &MatchParameters) -> bool {
    let both = |test: &dyn Fn(&MatchParameters) -> bool| test(mask) && test(value);
    both(&|parameters| parameters.get(header::DST_MAC) >> 40 & 1 != 0)
        || both(&|parameters| parameters.get(header::DST_IPV4) >> 28 == 0xe)
}
