//! A frame as match parameters: what the tables compare.

use wirepath_nic_defs::mlx5::{
    CRITERIA_INNER, CRITERIA_MISC, CRITERIA_MISC2, CRITERIA_MISC3, CRITERIA_MISC5, CRITERIA_OUTER, MatchField, header,
    misc, misc2, misc3, misc5,
};
use zerocopy::IntoBytes;

use super::headers::{self, Headers, ICMP, ICMPV6, Level, TCP, Tunnel, UDP};
use crate::frame::{self, Shape};

/// Bytes of match parameters that the device knows: seven parts, of which it compares nothing in the sixth.
pub(super) const BYTES: usize = 7 * 64;
pub(super) const WORDS: usize = BYTES / 8;

/// Match parameters by words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) [u64; WORDS]);

impl Key {
    /// No bit.
    pub(super) const NOTHING: Self = Self([0; WORDS]);

    /// Parameters as a program gives them; `None` if something stands behind what the device knows.
    pub(super) fn from_parameters(bytes: &[u8]) -> Option<Self> {
        let mut key = Self([0; WORDS]);
        let known = bytes.len().min(BYTES);
        key.0.as_mut_bytes()[..known].copy_from_slice(&bytes[..known]);
        bytes[known..].iter().all(|byte| *byte == 0).then_some(key)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Parts in which a bit is set, as `match_criteria_enable` names them.
    pub(super) fn criteria(&self) -> u8 {
        self.bytes().chunks(64).rev().fold(0, |all, part| all << 1 | u8::from(part.iter().any(|byte| *byte != 0)))
    }

    /// Without the last of its bits, for errors on order.
    pub(super) fn forget_a_bit(&mut self) {
        if let Some(byte) = self.0.as_mut_bytes().iter_mut().rev().find(|byte| **byte != 0) {
            *byte &= *byte - 1;
        }
    }

    /// Only what `mask` has.
    pub(super) fn keep(&mut self, mask: &Self) {
        self.0.iter_mut().zip(mask.0).for_each(|(word, mask)| *word &= mask);
    }

    /// Bits of this key that `other` does not have.
    pub(super) fn beyond(&self, other: &Self) -> Option<usize> {
        self.bytes().iter().zip(other.bytes()).position(|(ours, theirs)| ours & !theirs != 0)
    }
}

/// Every bit that the device can compare; `integrity`: also those that say which layers are in order.
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

/// Which layers are in order.
pub(super) const ORDER: [MatchField; 4] =
    [header::L3_OK, header::L4_OK, header::IPV4_CHECKSUM_OK, header::L4_CHECKSUM_OK];

/// Values that come with a packet and are in none of its headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Registers {
    /// At egress, what the descriptor brought.
    pub(super) a: u32,
    /// At ingress, what the completion tells.
    pub(super) b: u32,
    pub(super) c: [u32; 8],
    /// At egress, the queue that sends.
    pub(super) queue: u32,
}

/// Where a field begins: of fields that begin on a byte.
const fn at(field: MatchField) -> usize {
    field.offset as usize / 8
}

/// What the rules of a port and direction look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// Parts of the parameters.
    pub(super) parts: u8,
    /// The four bits that say which layers are in order, which cost a sum over the packet.
    pub(super) checks: bool,
}

impl Key {
    /// Becomes the key of a frame, as far as rules look at it; other parts stay as they are.
    #[inline]
    pub(super) fn fill(&mut self, frame: &[u8], needs: Needs, registers: &Registers) {
        let bytes: &mut [u8; BYTES] = self.0.as_mut_bytes().try_into().expect("all words");
        bytes[..PART].fill(0);
        if needs.parts & !CRITERIA_OUTER == 0 {
            level(frame, &headers::outer(frame), bytes, 0, needs.checks);
        } else {
            rest(frame, needs, registers, bytes);
        }
    }
}

/// Bytes of a key that are bytes of frames of a [`Shape`]: where, and how many.
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

/// What a frame has in common with all frames of the same key, as far as masks look at it; `bits`: those of all masks. `None` for frames
/// without a shape, and masks that look further.
pub(super) fn likeness(frame: &[u8], needs: Needs, bits: &Key) -> Option<Shape> {
    if needs.parts & !CRITERIA_OUTER != 0 || needs.checks {
        return None;
    }
    let mut mask = [0; Shape::BYTES];
    for (field, to, count) in SEEN {
        let from = &bits.bytes()[at(field)..at(field) + count];
        mask[to..to + count].iter_mut().zip(from).for_each(|(mask, bits)| *mask |= bits);
    }
    // Of this byte of the key the other bits are of other fields.
    mask[46] &= 1;
    Shape::of(frame, mask)
}

/// Bytes of a part.
const PART: usize = 64;

/// All parts that are needed.
#[inline(never)]
fn rest(frame: &[u8], needs: Needs, registers: &Registers, bytes: &mut [u8; BYTES]) {
    let headers = &headers::parse(frame);
    bytes[PART..].fill(0);
    level(frame, &headers.outer, bytes, 0, needs.checks);
    if needs.parts & CRITERIA_INNER != 0
        && let Some(inner) = &headers.inner
    {
        level(frame, inner, bytes, at(header::SRC_MAC.inner()), needs.checks);
    }
    if needs.parts & CRITERIA_MISC != 0 {
        once(frame, headers, registers, bytes);
    }
    if needs.parts & CRITERIA_MISC2 != 0 {
        labels(frame, headers, registers, bytes);
    }
    if needs.parts & CRITERIA_MISC3 != 0 {
        numbers(frame, headers, bytes);
    }
    if needs.parts & CRITERIA_MISC5 != 0
        && let Tunnel::Vxlan(header) | Tunnel::Gpe(header) | Tunnel::Geneve(header) = headers.tunnel
    {
        copy(bytes, at(misc5::tunnel_header(0)), frame, header, 8);
    }
}

#[inline]
fn copy(bytes: &mut [u8; BYTES], to: usize, frame: &[u8], from: usize, count: usize) {
    if let Some(source) = frame.get(from..from + count) {
        bytes[to..to + count].copy_from_slice(source);
    }
}

/// The headers of a level.
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
        bytes[to(header::L3_OK)] |= in_order(frame, level);
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

/// Layer 3 in order, layer 4 in order, IPv4 checksum good, layer-4 checksum good: bits 3 to 0. A datagram is in order if its length is that
/// of what the IP header leaves it; one without checksum has a good one. Names: DPDK `doc/guides/prog_guide/rte_flow.rst`, item
/// "integrity".
fn in_order(frame: &[u8], level: &Level) -> u8 {
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

/// Tunnel headers, second tags, flow labels.
fn once(frame: &[u8], headers: &Headers, registers: &Registers, bytes: &mut [u8; BYTES]) {
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
            // Customer tags: bits 7 and 6 for outer and inner; service tags: the next two.
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

/// Label stack entries and registers.
fn labels(frame: &[u8], headers: &Headers, registers: &Registers, bytes: &mut [u8; BYTES]) {
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

/// TCP numbers, ICMP, VXLAN-GPE.
fn numbers(frame: &[u8], headers: &Headers, bytes: &mut [u8; BYTES]) {
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
