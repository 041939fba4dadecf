//! What is compared, in the device's match parameters.

use wirepath_nic_defs::mlx5::{MatchField, header, misc, misc2, misc3, misc5};
use wirepath_verbs::mlx5::MatchParameters;

use crate::drivers::direct::rules::demand::{self, Behind, Demand, Want};
use crate::flow::{Bits, Field, FieldSet};

/// Where a demand's bits lie.
fn place(demand: &Demand) -> Option<MatchField> {
    let Demand { level, nth, want, .. } = *demand;
    let outer = level == 0;
    // A field that each level has.
    let each = |field: MatchField| Some(if outer { field } else { field.inner() });
    let of = |at_outer: MatchField, at_inner: MatchField| Some(if outer { at_outer } else { at_inner });
    let only_outer = |field: MatchField| outer.then_some(field);
    let tag = |first: MatchField, second_outer: MatchField, second_inner: MatchField| match nth {
        0 => each(first),
        1 => of(second_outer, second_inner),
        _ => None,
    };
    match want {
        Want::IpVersion => each(header::IP_VERSION),
        Want::Fragment => each(header::FRAGMENT),
        Want::CustomerTag => tag(header::CVLAN_TAG, misc::OUTER_SECOND_CVLAN, misc::INNER_SECOND_CVLAN),
        Want::ServiceTag => tag(header::SVLAN_TAG, misc::OUTER_SECOND_SVLAN, misc::INNER_SECOND_SVLAN),
        Want::Label(Behind::Link) => of(misc2::OUTER_MPLS, misc2::INNER_MPLS),
        Want::Label(Behind::Udp) => only_outer(misc2::MPLS_OVER_UDP),
        Want::Label(Behind::Gre) => only_outer(misc2::MPLS_OVER_GRE),
        Want::TunnelWord => only_outer(misc5::tunnel_header(0)),
        Want::Field(field) => match field {
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

/// Mask and values of a closed list.
pub(super) fn parameters(set: &FieldSet) -> Result<(MatchParameters, MatchParameters), String> {
    let (mut mask, mut value) = (MatchParameters::default(), MatchParameters::default());
    let mut agrees = true;
    let mut put = |field: MatchField, bits: Bits| {
        // A header with these flags is none of its tunnel.
        agrees &= (value.get(field) ^ bits.value) & mask.get(field) & bits.mask == 0;
        mask.set(field, mask.get(field) | bits.mask);
        value.set(field, value.get(field) | bits.value & bits.mask);
    };
    for demand in demand::of(set)? {
        let bits = demand.bits;
        match demand.want {
            Want::Field(Field::GreFlags) if demand.level == 0 && bits.mask & !0xb000 == 0 => {
                for (bit, field) in GRE_FLAGS.into_iter().filter(|(bit, _)| bits.mask & bit != 0) {
                    put(field, Bits::exact(u128::from(bits.value & bit != 0), 1));
                }
            }
            // Two halves of one word.
            Want::Field(Field::IcmpId) if demand.level == 0 => {
                put(misc3::ICMP_DATA, Bits { value: bits.value << 16, mask: bits.mask << 16 });
            }
            want => {
                let field = place(&demand).ok_or_else(|| match want {
                    Want::Field(field) => format!("comparing {} {}", field.spec().item.spec().name, field.name()),
                    _ => "comparing what is behind the second tag or label".to_owned(),
                })?;
                put(field, bits);
            }
        }
    }
    if agrees { Ok((mask, value)) } else { Err("finding what no packet has".to_owned()) }
}

/// Adds that the outer headers are in order: lengths, and checksums as far as there are any.
pub(super) fn demand_order(mask: &mut MatchParameters, value: &mut MatchParameters) {
    let ipv4 = value.get(header::IP_VERSION) == 4;
    let bits = [header::L3_OK, header::L4_OK, header::L4_CHECKSUM_OK];
    for field in bits.into_iter().chain(ipv4.then_some(header::IPV4_CHECKSUM_OK)) {
        mask.set(field, 1);
        value.set(field, 1);
    }
}

/// Whether the kernel takes rules of these parameters for rules of groups, which it puts behind all others whatever their priority
/// (Linux `drivers/infiniband/hw/mlx5/fs.c`, `raw_fs_is_multicast`).
pub(super) fn is_of_groups(mask: &MatchParameters, value: &MatchParameters) -> bool {
    let both = |test: &dyn Fn(&MatchParameters) -> bool| test(mask) && test(value);
    both(&|parameters| parameters.get(header::DST_MAC) >> 40 & 1 != 0)
        || both(&|parameters| parameters.get(header::DST_IPV4) >> 28 == 0xe)
}
