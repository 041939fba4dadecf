//! Field values from small sets, so that rules overlap and packets match.

use wirepath_flow::{Field, MaskedValue};

use crate::rng::Rng;

/// Returns a mask of all bits of a field.
pub(super) fn ones(field: Field) -> u128 {
    match field.spec().bits {
        128 => u128::MAX,
        bits => (1 << bits) - 1,
    }
}

/// Returns a random value of a field.
pub(super) fn value(rng: &mut Rng, field: Field) -> u128 {
    if rng.one_in(12) {
        return rng.wide() & ones(field);
    }
    let few = u128::from(rng.below(3));
    match field {
        Field::PortId => rng.below(4).into(),
        Field::MetaMark | Field::MetaData => rng.below(4).into(),
        Field::EthDst | Field::EthSrc | Field::ArpSha | Field::ArpTha => match rng.below(8) {
            0 => 0xffff_ffff_ffff,
            1 => 0x0100_5e00_0001 + few,
            _ => 0x0200_0000_0000 + few,
        },
        Field::EthType => rng.pick(&[0x0800, 0x86dd, 0x0806, 0x8847, 0x8848, 0x88cc, 0x0600]),
        Field::EthTags => rng.pick(&[0, 1, 3]),
        Field::VlanVid => 1 + few,
        Field::VlanTpid => rng.pick(&[0x8100, 0x8100, 0x88a8]),
        Field::MplsLabel => 16 + few,
        Field::Ipv4Src | Field::Ipv4Dst | Field::ArpSpa | Field::ArpTpa => {
            0x0a00_0000 + u128::from(rng.below(2) << 16 | rng.below(2) << 8) + few
        }
        Field::Ipv6Src | Field::Ipv6Dst => (0xfd00 << 112) + u128::from(rng.below(2)) * (1 << 64) + few,
        Field::Ipv4Proto | Field::Ipv6Proto => rng.pick(&[1, 4, 6, 17, 41, 47, 50, 58, 99]),
        Field::Ipv6Next => rng.pick(&[0, 6, 17, 41, 43, 44, 47, 50, 51, 58, 60]),
        Field::Ipv4Dscp | Field::Ipv6Dscp => rng.pick(&[0, 10, 46, 63]),
        Field::Ipv4Ecn | Field::Ipv6Ecn => rng.below(4).into(),
        Field::Ipv4Ttl | Field::Ipv6Hops | Field::MplsTtl => rng.pick(&[0, 1, 2, 64, 64, 255]),
        Field::Ipv4Ihl => rng.pick(&[5, 5, 6, 8, 15]),
        Field::Ipv4Frag | Field::Ipv6Frag => rng.pick(&[0, 0, 0, 1, 3]),
        Field::Ipv4Offset => rng.pick(&[0, 1, 185, 370]),
        Field::Ipv6Flow => rng.pick(&[0, 1, 0xf_ffff]),
        Field::Ipv6Ext => rng.below(32).into(),
        Field::TcpSrc | Field::UdpSrc => rng.pick(&[53, 1024, 1025, 65535]),
        Field::TcpDst | Field::UdpDst => rng.pick(&[53, 80, 443, 4789, 4790, 6081, 6635]),
        Field::TcpFlags => rng.pick(&[2, 16, 18, 1, 4, 0x1ff]),
        Field::IcmpType | Field::Icmpv6Type => rng.pick(&[0, 8, 128, 135]),
        Field::GreFlags => rng.pick(&[0, 0x2000, 0x8000, 0x1000, 0xb000]),
        Field::GreProto | Field::GeneveProto => rng.pick(&[0x6558, 0x0800, 0x86dd, 0x8847, 0x8848, 0x88cc]),
        Field::GreKey => 0x0700 + few,
        Field::VxlanFlags => rng.pick(&[8, 8, 8, 0xff]),
        Field::GpeFlags => rng.pick(&[0x0c, 0x0c, 0x0d]),
        Field::GpeNext => rng.pick(&[1, 2, 3, 4]),
        Field::VxlanVni | Field::GpeVni | Field::GeneveVni => 42 + few,
        Field::GeneveOptLen => rng.pick(&[0, 0, 1, 2, 5]),
        _ => match rng.below(6) {
            0 => ones(field),
            _ => few & ones(field),
        },
    }
}

/// Returns a random masked value for a rule to compare with.
pub(super) fn bits(rng: &mut Rng, field: Field) -> MaskedValue {
    let all = ones(field);
    let mask = match rng.below(10) {
        0 | 1 => MaskedValue::prefix(0, rng.below(u64::from(field.spec().bits)) as u8 + 1, field.spec().bits).mask,
        2 => (rng.wide() & all).max(1),
        3 => 1 << rng.below(field.spec().bits.into()),
        _ => all,
    };
    MaskedValue { value: value(rng, field) & mask, mask }
}
