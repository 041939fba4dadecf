//! The match parameters of a frame, which flow tables compare.

use wirepath_nic_defs::mlx5::{
    CRITERIA_INNER, CRITERIA_MISC, CRITERIA_MISC2, CRITERIA_MISC3, CRITERIA_MISC5, CRITERIA_OUTER, MatchField, header,
    misc, misc2, misc3, misc5,
};
use zerocopy::IntoBytes;

use super::headers::{self, Headers, ICMP, ICMPV6, Level, TCP, Tunnel, UDP};
use crate::frame::{self, FramePattern};

/// Size of the match parameters in bytes. The device knows seven parts; it compares nothing in the sixth.
pub(super) const BYTES: usize = 7 * 64;
pub(super) const WORDS: usize = BYTES / 8;

/// Match parameters as 64-bit words in memory order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) [u64; WORDS]);

impl Key {
    /// Match parameters without any bit.
    pub(super) const NOTHING: Self = Self([0; WORDS]);

    /// Converts the parameters of a program; returns `None` if bits behind the known parts are set.
    pub(super) fn from_parameters(bytes: &[u8]) -> Option<Self> {
        let mut key = Self([0; WORDS]);
        let known = bytes.len().min(BYTES);
        key.0.as_mut_bytes()[..known].copy_from_slice(&bytes[..known]);
        bytes[known..].iter().all(|byte| *byte == 0).then_some(key)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Returns the parts in which a bit is set, as bits of `match_criteria_enable`.
    pub(super) fn criteria(&self) -> u8 {
        self.bytes().chunks(64).rev().fold(0, |all, part| all << 1 | u8::from(part.iter().any(|byte| *byte != 0)))
    }

    /// Clears the last bit that is set, for [`SteeringBug::Mask`](crate::connectx::SteeringBug::Mask).
    pub(super) fn clear_last_bit(&mut self) {
        if let Some(byte) = self.0.as_mut_bytes().iter_mut().rev().find(|byte| **byte != 0) {
            *byte &= *byte - 1;
        }
    }

    /// Clears all bits that are not in `mask`.
    pub(super) fn mask_with(&mut self, mask: &Self) {
        self.0.iter_mut().zip(mask.0).for_each(|(word, mask)| *word &= mask);
    }

    /// Returns the offset of the first byte with a bit that `other` does not have.
    pub(super) fn first_byte_outside(&self, other: &Self) -> Option<usize> {
        self.bytes().iter().zip(other.bytes()).position(|(ours, theirs)| ours & !theirs != 0)
    }
}

/// Returns the bits that the device can compare; with `integrity` this includes the integrity bits of the
/// layers.
pub(super) fn supported(integrity: bool) -> Key {
    let mut key = Key([0; WORDS]);
    let fields = [
        header::SRC_MAC,
        header::DST_MAC,
        header::ETHERTYPE,
        header::FIRST_PRIO,
        header::FIRST_CFI,
        header::FIRST_VID,
        header::IP_PROTOCOL,
        header::IP_DSCP,
        header::IP_ECN,
        header::CVLAN_TAG,
        header::SVLAN_TAG,
        header::FRAGMENT,
        header::IP_VERSION,
        header::TCP_FLAGS,
        header::TCP_SPORT,
        header::TCP_DPORT,
        header::IPV4_IHL,
        header::TTL,
        header::UDP_SPORT,
        header::UDP_DPORT,
        header::SRC_IPV6,
        header::DST_IPV6,
    ];
    let others = [
        misc::GRE_C,
        misc::GRE_K,
        misc::GRE_S,
        misc::SOURCE_SQN,
        misc::OUTER_SECOND_PRIO,
        misc::OUTER_SECOND_CFI,
        misc::OUTER_SECOND_VID,
        misc::INNER_SECOND_PRIO,
        misc::INNER_SECOND_CFI,
        misc::INNER_SECOND_VID,
        misc::OUTER_SECOND_CVLAN,
        misc::INNER_SECOND_CVLAN,
        misc::OUTER_SECOND_SVLAN,
        misc::INNER_SECOND_SVLAN,
        misc::GRE_PROTOCOL,
        misc::GRE_KEY,
        misc::VXLAN_VNI,
        misc::GENEVE_VNI,
        misc::GENEVE_OAM,
        misc::OUTER_FLOW_LABEL,
        misc::INNER_FLOW_LABEL,
        misc::GENEVE_OPT_LEN,
        misc::GENEVE_PROTOCOL,
        misc::INNER_ESP_SPI,
        misc::OUTER_ESP_SPI,
        misc2::OUTER_MPLS,
        misc2::INNER_MPLS,
        misc2::MPLS_OVER_GRE,
        misc2::MPLS_OVER_UDP,
        misc2::REG_A,
        misc2::REG_B,
        misc3::INNER_TCP_SEQ,
        misc3::OUTER_TCP_SEQ,
        misc3::INNER_TCP_ACK,
        misc3::OUTER_TCP_ACK,
        misc3::GPE_VNI,
        misc3::GPE_NEXT_PROTOCOL,
        misc3::GPE_FLAGS,
        misc3::ICMP_DATA,
        misc3::ICMPV6_DATA,
        misc3::ICMP_TYPE,
        misc3::ICMP_CODE,
        misc3::ICMPV6_TYPE,
        misc3::ICMPV6_CODE,
    ];
    let bytes = key.0.as_mut_bytes();
    for field in fields {
        field.set(bytes, u128::MAX);
        field.inner().set(bytes, u128::MAX);
    }
    for field in ORDER.into_iter().filter(|_| integrity) {
        field.set(bytes, u128::MAX);
        field.inner().set(bytes, u128::MAX);
    }
    let words = (0..2).map(misc5::tunnel_header);
    for field in others.into_iter().chain((0..8).map(misc2::reg_c)).chain(words) {
        field.set(bytes, u128::MAX);
    }
    key
}

/// The integrity bits of the layers.
pub(super) const ORDER: [MatchField; 4] =
    [header::L3_OK, header::L4_OK, header::IPV4_CHECKSUM_OK, header::L4_CHECKSUM_OK];

/// Metadata registers and queue number: values of a packet that are in none of its headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Registers {
    /// Register A: metadata of the send descriptor, at egress.
    pub(super) a: u32,
    /// Register B: metadata of the completion, at ingress.
    pub(super) b: u32,
    pub(super) c: [u32; 8],
    /// Number of the send queue, at egress.
    pub(super) queue: u32,
}

/// Returns the byte offset of a field that starts on a byte boundary.
const fn at(field: MatchField) -> usize {
    field.offset as usize / 8
}

/// Parts of the match parameters that the rules of a port and direction compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyParts {
    /// Compared parts, as bits of `match_criteria_enable`.
    pub(super) parts: u8,
    /// True if integrity bits are compared, which requires a checksum of the packet.
    pub(super) checks: bool,
}

impl Key {
    /// Fills in the parameters of a frame, as far as rules compare them. Other parts keep their old content.
    #[inline]
    pub(super) fn fill(&mut self, frame: &[u8], needs: KeyParts, registers: &Registers) {
        let bytes: &mut [u8; BYTES] = self.0.as_mut_bytes().try_into().expect("all words");
        bytes[..PART].fill(0);
        if needs.parts & !CRITERIA_OUTER == 0 {
            level(frame, &headers::outer(frame), bytes, 0, needs.checks);
        } else {
            rest(frame, needs, registers, bytes);
        }
    }
}

/// Fields of the key that are copies of bytes of a [`FramePattern`]: field, frame offset and length.
const SEEN: [(MatchField, usize, usize); 9] = [
    (header::DST_MAC, 0, 6),
    (header::SRC_MAC, 6, 6),
    (header::IP_DSCP, 15, 1),
    (header::TTL, 22, 1),
    (header::SRC_IPV4, 26, 4),
    (header::DST_IPV4, 30, 4),
    (header::TCP_SPORT, 34, 4),
    (header::UDP_SPORT, 34, 4),
    (header::TCP_FLAGS, 46, 2),
];

/// Returns the pattern of all frames that have the same values in the compared bits; `bits` is the union of
/// all masks. Returns `None` if the frame has no pattern, or if masks compare other parts.
pub(super) fn pattern(frame: &[u8], needs: KeyParts, bits: &Key) -> Option<FramePattern> {
    if needs.parts & !CRITERIA_OUTER != 0 || needs.checks {
        return None;
    }
    let mut mask = [0; FramePattern::BYTES];
    for (field, to, count) in SEEN {
        let from = &bits.bytes()[at(field)..at(field) + count];
        mask[to..to + count].iter_mut().zip(from).for_each(|(mask, bits)| *mask |= bits);
    }
    // The other bits of this byte belong to other fields of the key.
    mask[46] &= 1;
    FramePattern::from_frame(frame, mask)
}

/// Size of a part in bytes.
const PART: usize = 64;

/// Fills in all needed parts.
#[inline(never)]
fn rest(frame: &[u8], needs: KeyParts, registers: &Registers, bytes: &mut [u8; BYTES]) {
    let headers = &headers::parse(frame);
    bytes[PART..].fill(0);
    level(frame, &headers.outer, bytes, 0, needs.checks);
    if needs.parts & CRITERIA_INNER != 0
        && let Some(inner) = &headers.inner
    {
        level(frame, inner, bytes, at(header::SRC_MAC.inner()), needs.checks);
    }
    if needs.parts & CRITERIA_MISC != 0 {
        fill_misc(frame, headers, registers, bytes);
    }
    if needs.parts & CRITERIA_MISC2 != 0 {
        fill_misc2(frame, headers, registers, bytes);
    }
    if needs.parts & CRITERIA_MISC3 != 0 {
        fill_misc3(frame, headers, bytes);
    }
    if needs.parts & CRITERIA_MISC5 != 0 {
        match headers.tunnel {
            Tunnel::Vxlan(header) | Tunnel::Gpe(header) | Tunnel::Geneve(header) => {
                copy(bytes, at(misc5::tunnel_header(0)), frame, header, 8);
            }
            // DPDK drivers/net/mlx5/hws/mlx5dr_definer.c, `mlx5dr_definer_conv_item_gre`.
            Tunnel::Gre(header) | Tunnel::MplsOverGre(header, _) => {
                copy(bytes, at(misc5::tunnel_header(0)), frame, header, 4);
            }
            _ => {}
        }
    }
}

#[inline]
fn copy(bytes: &mut [u8; BYTES], to: usize, frame: &[u8], from: usize, count: usize) {
    if let Some(source) = frame.get(from..from + count) {
        bytes[to..to + count].copy_from_slice(source);
    }
}

/// Fills in the headers of one level.
#[inline]
fn level(frame: &[u8], level: &Level, bytes: &mut [u8; BYTES], base: usize, checks: bool) {
    let to = |field| base + at(field);
    if let Some(l2) = level.l2 {
        copy(bytes, to(header::SRC_MAC), frame, l2 + 6, 6);
        copy(bytes, to(header::DST_MAC), frame, l2, 6);
        if let Some(ethertype) = level.ethertype {
            copy(bytes, to(header::ETHERTYPE), frame, ethertype, 2);
        }
        if let Some((kind, tag)) = level.tag(frame, 0) {
            bytes[to(header::FIRST_PRIO)..to(header::FIRST_PRIO) + 2].copy_from_slice(&tag.to_be_bytes());
            bytes[to(header::CVLAN_TAG)] |= if Level::is_customer(kind) { 0x80 } else { 0x40 };
        }
    }
    let l3 = level.l3;
    match level.version {
        4 => {
            bytes[to(header::IP_DSCP)] = frame[l3 + 1];
            bytes[to(header::TTL)] = frame[l3 + 8];
            bytes[to(header::IPV4_IHL)] |= frame[l3] << 4;
            copy(bytes, to(header::SRC_IPV4), frame, l3 + 12, 4);
            copy(bytes, to(header::DST_IPV4), frame, l3 + 16, 4);
        }
        6 => {
            bytes[to(header::IP_DSCP)] = frame[l3] << 4 | frame[l3 + 1] >> 4;
            bytes[to(header::TTL)] = frame[l3 + 7];
            copy(bytes, to(header::SRC_IPV6), frame, l3 + 8, 16);
            copy(bytes, to(header::DST_IPV6), frame, l3 + 24, 16);
        }
        _ => return,
    }
    bytes[to(header::IP_PROTOCOL)] = level.protocol;
    bytes[to(header::IP_VERSION)] |= level.version << 1 | u8::from(level.fragment) << 5;
    if checks {
        bytes[to(header::L3_OK)] |= integrity_bits(frame, level);
    }
    if !level.transport {
        return;
    }
    match level.protocol {
        TCP => {
            copy(bytes, to(header::TCP_SPORT), frame, level.l4, 4);
            bytes[to(header::TCP_FLAGS)] |= frame[level.l4 + 12] & 1;
            bytes[to(header::TCP_FLAGS) + 1] = frame[level.l4 + 13];
        }
        UDP => copy(bytes, to(header::UDP_SPORT), frame, level.l4, 4),
        _ => {}
    }
}

/// Returns the integrity bits: L3 valid, L4 valid, IPv4 checksum valid, L4 checksum valid (bits 3 to 0).
///
/// A UDP datagram is valid if its length equals the payload length of the IP packet. A datagram without
/// checksum counts as valid. The names are those of the item "integrity" in DPDK
/// `doc/guides/prog_guide/rte_flow.rst`.
fn integrity_bits(frame: &[u8], level: &Level) -> u8 {
    let start = level.l2.unwrap_or(0);
    let layers = frame::parse(&frame[start..]);
    let l3 = layers.ip_checksum_ok(&frame[start..]);
    let known = matches!(layers.protocol, TCP | UDP);
    let good = known && layers.transport_checksum_ok(&frame[start..]) != Some(false);
    let length = headers::half(&frame[start..], layers.l4 + 4).map(usize::from);
    let whole = known && (layers.protocol != UDP || length == Some(layers.end - layers.l4));
    let bit = |yes: bool, bit: u8| u8::from(yes) << bit;
    bit(l3 != Some(false), 3) | bit(whole, 2) | bit(l3 == Some(true), 1) | bit(good, 0)
}

/// Fills in tunnel headers, second VLAN tags and flow labels.
fn fill_misc(frame: &[u8], headers: &Headers, registers: &Registers, bytes: &mut [u8; BYTES]) {
    bytes[at(misc::SOURCE_SQN)..][..3].copy_from_slice(&registers.queue.to_be_bytes()[1..]);
    match headers.tunnel {
        Tunnel::Vxlan(header) => copy(bytes, at(misc::VXLAN_VNI), frame, header + 4, 3),
        Tunnel::Geneve(header) => {
            copy(bytes, at(misc::GENEVE_VNI), frame, header + 4, 3);
            bytes[at(misc::GENEVE_OAM)] |= frame[header + 1] >> 7;
            bytes[at(misc::GENEVE_OPT_LEN)] |= frame[header] & 0x3f;
            copy(bytes, at(misc::GENEVE_PROTOCOL), frame, header + 2, 2);
        }
        Tunnel::Gre(header) | Tunnel::MplsOverGre(header, _) => {
            let flags = frame[header];
            bytes[at(misc::GRE_C)] |= flags & 0xb0;
            copy(bytes, at(misc::GRE_PROTOCOL), frame, header + 2, 2);
            if flags & 0x20 != 0 {
                copy(bytes, at(misc::GRE_KEY), frame, header + 4 + usize::from(flags >> 7) * 4, 4);
            }
        }
        Tunnel::Gpe(_) | Tunnel::MplsOverUdp(_) | Tunnel::IpInIp | Tunnel::None => {}
    }
    let fields = [
        (&Some(headers.outer), misc::OUTER_SECOND_PRIO, 0, misc::OUTER_FLOW_LABEL, misc::OUTER_ESP_SPI),
        (&headers.inner, misc::INNER_SECOND_PRIO, 1, misc::INNER_FLOW_LABEL, misc::INNER_ESP_SPI),
    ];
    for (level, second, bit, label, spi) in fields {
        let Some(level) = level else { continue };
        if let Some((kind, tag)) = level.tag(frame, 1) {
            bytes[at(second)..at(second) + 2].copy_from_slice(&tag.to_be_bytes());
            // Customer tags are bits 7 (outer) and 6 (inner); service tags are the next two bits.
            bytes[at(misc::OUTER_SECOND_CVLAN)] |= if Level::is_customer(kind) { 0x80 } else { 0x20 } >> bit;
        }
        if level.version == 6 {
            bytes[at(label)] |= frame[level.l3 + 1] & 15;
            copy(bytes, at(label) + 1, frame, level.l3 + 2, 2);
        }
        if level.transport && level.protocol == headers::ESP {
            copy(bytes, at(spi), frame, level.l4, 4);
        }
    }
}

/// Fills in MPLS label stack entries and metadata registers.
fn fill_misc2(frame: &[u8], headers: &Headers, registers: &Registers, bytes: &mut [u8; BYTES]) {
    if let Some(label) = headers.outer.mpls {
        copy(bytes, at(misc2::OUTER_MPLS), frame, label, 4);
    }
    if let Some(label) = headers.inner.and_then(|inner| inner.mpls) {
        copy(bytes, at(misc2::INNER_MPLS), frame, label, 4);
    }
    match headers.tunnel {
        Tunnel::MplsOverUdp(label) => copy(bytes, at(misc2::MPLS_OVER_UDP), frame, label, 4),
        Tunnel::MplsOverGre(_, label) => copy(bytes, at(misc2::MPLS_OVER_GRE), frame, label, 4),
        _ => {}
    }
    let mut put = |field: MatchField, value: u32| bytes[at(field)..at(field) + 4].copy_from_slice(&value.to_be_bytes());
    put(misc2::REG_A, registers.a);
    put(misc2::REG_B, registers.b);
    for (number, value) in (0..).zip(registers.c) {
        put(misc2::reg_c(number), value);
    }
}

/// Fills in TCP sequence numbers, ICMP and VXLAN-GPE.
fn fill_misc3(frame: &[u8], headers: &Headers, bytes: &mut [u8; BYTES]) {
    if let Tunnel::Gpe(header) = headers.tunnel {
        copy(bytes, at(misc3::GPE_VNI), frame, header + 4, 3);
        copy(bytes, at(misc3::GPE_NEXT_PROTOCOL), frame, header + 3, 1);
        copy(bytes, at(misc3::GPE_FLAGS), frame, header, 1);
    }
    let fields = [
        (&Some(headers.outer), misc3::OUTER_TCP_SEQ, misc3::OUTER_TCP_ACK),
        (&headers.inner, misc3::INNER_TCP_SEQ, misc3::INNER_TCP_ACK),
    ];
    for (level, sequence, acknowledged) in fields {
        if let Some(level) = level.filter(|level| level.transport && level.protocol == TCP) {
            copy(bytes, at(sequence), frame, level.l4 + 4, 4);
            copy(bytes, at(acknowledged), frame, level.l4 + 8, 4);
        }
    }
    let outer = &headers.outer;
    if outer.transport {
        let fields = match outer.protocol {
            ICMP => (misc3::ICMP_TYPE, misc3::ICMP_DATA),
            ICMPV6 => (misc3::ICMPV6_TYPE, misc3::ICMPV6_DATA),
            _ => return,
        };
        copy(bytes, at(fields.0), frame, outer.l4, 2);
        copy(bytes, at(fields.1), frame, outer.l4 + 4, 4);
    }
}
