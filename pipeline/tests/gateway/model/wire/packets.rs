//! IP packets of hosts, and what a router makes of them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{IPV4, IPV6, ethertype_of, icmp, word};

/// IP protocols (IANA, "Protocol Numbers").
const HOP_BY_HOP: u8 = 0;
const ICMP: u8 = 1;
pub(super) const UDP: u8 = 17;
const FRAGMENT: u8 = 44;
pub(super) const ICMPV6: u8 = 58;

/// Flags of an IPv4 header: the packet must not be divided, and more fragments follow.
const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;

/// Form of a packet with a UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    /// A router may divide it, if it is IPv4.
    Divisible,
    /// With IPv4 options, or a Hop-by-Hop Options header.
    Options,
    FirstFragment,
    LaterFragment,
    /// An ICMP error in place of the datagram.
    Error,
}

impl Form {
    pub(crate) fn of(byte: u8) -> Self {
        match byte % 16 {
            0..8 => Self::Plain,
            8..11 => Self::Divisible,
            11 | 12 => Self::Options,
            13 => Self::FirstFragment,
            14 => Self::LaterFragment,
            _ => Self::Error,
        }
    }
}

/// Returns the sum of 16-bit words, whose complement is the checksum (RFC 1071).
pub(super) fn sum(parts: &[&[u8]]) -> u16 {
    let mut total = 0u32;
    for part in parts {
        for word in part.chunks(2) {
            total += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
        }
    }
    while total > 0xffff {
        total = (total >> 16) + (total & 0xffff);
    }
    total as u16
}

/// Returns the sum of a pseudo header (RFC 8200 section 8.1) and of the content behind it.
pub(super) fn sum6(src: Ipv6Addr, dst: Ipv6Addr, protocol: u8, content: &[u8]) -> u16 {
    let len = (content.len() as u32).to_be_bytes();
    sum(&[&src.octets(), &dst.octets(), &len, &[0, 0, 0, protocol], content])
}

/// Returns an IP packet of this form, with `len` bytes behind the header of UDP or ICMP. A fragment that others follow
/// has a multiple of 8 bytes.
pub(crate) fn packet(src: IpAddr, dst: IpAddr, ttl: u8, len: usize, form: Form) -> Vec<u8> {
    let len = if form == Form::FirstFragment { len & !7 } else { len };
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => packet4(src, dst, ttl, len, form),
        (IpAddr::V6(src), IpAddr::V6(dst)) => packet6(src, dst, ttl, len, form),
        _ => panic!("{src} and {dst} have different versions"),
    }
}

fn packet4(src: Ipv4Addr, dst: Ipv4Addr, ttl: u8, len: usize, form: Form) -> Vec<u8> {
    let (protocol, content) = match form {
        // Host unreachable (RFC 792).
        Form::Error => (ICMP, icmp::message4(3, 1, 0, &vec![0x45; len])),
        _ => (UDP, udp(len)),
    };
    let packet = ipv4(src, dst, protocol, ttl, &content);
    match form {
        Form::Divisible => with_flags(packet, 0),
        Form::FirstFragment => with_flags(packet, MORE_FRAGMENTS),
        Form::LaterFragment => with_flags(packet, 100),
        // Options "no operation" fill the fourth word of a longer header.
        Form::Options => {
            let mut packet = [&packet[..20], &[1; 4], &packet[20..]].concat();
            packet[0] = 0x46;
            with_len(with_flags(packet, 0))
        }
        Form::Plain | Form::Error => packet,
    }
}

fn packet6(src: Ipv6Addr, dst: Ipv6Addr, ttl: u8, len: usize, form: Form) -> Vec<u8> {
    if form == Form::Error {
        // Address unreachable (RFC 4443 section 3.1).
        return ipv6(src, dst, ICMPV6, ttl, &icmp::message6(src, dst, 1, 3, 0, &vec![0x60; len]));
    }
    let mut datagram = udp(len);
    let checksum = !sum6(src, dst, UDP, &datagram);
    datagram[6..8].copy_from_slice(&if checksum == 0 { 0xffff } else { checksum }.to_be_bytes());
    let header = match form {
        // Six bytes of padding (RFC 8200 section 4.2).
        Form::Options => Some((HOP_BY_HOP, [UDP, 0, 1, 4, 0, 0, 0, 0])),
        Form::FirstFragment => Some((FRAGMENT, [UDP, 0, 0, 1, 0, 0, 0x12, 0x34])),
        Form::LaterFragment => Some((FRAGMENT, [UDP, 0, 3, 0x20, 0, 0, 0x12, 0x34])),
        Form::Plain | Form::Divisible | Form::Error => None,
    };
    match header {
        Some((protocol, header)) => ipv6(src, dst, protocol, ttl, &[&header[..], &datagram].concat()),
        None => ipv6(src, dst, UDP, ttl, &datagram),
    }
}

/// Returns a UDP datagram without checksum.
fn udp(len: usize) -> Vec<u8> {
    [&[0x0f, 0xa0, 0x82, 0x9a][..], &(8 + len as u16).to_be_bytes(), &[0, 0], &vec![0x5a; len]].concat()
}

pub(super) fn ipv4(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, ttl: u8, content: &[u8]) -> Vec<u8> {
    let mut header = [0u8; 20];
    header[0] = 0x45;
    header[2..4].copy_from_slice(&(20 + content.len() as u16).to_be_bytes());
    header[6] = 0x40;
    (header[8], header[9]) = (ttl, protocol);
    header[12..16].copy_from_slice(&src.octets());
    header[16..20].copy_from_slice(&dst.octets());
    with_checksum([&header, content].concat())
}

pub(super) fn ipv6(src: Ipv6Addr, dst: Ipv6Addr, protocol: u8, hop_limit: u8, content: &[u8]) -> Vec<u8> {
    let len = content.len() as u16;
    [&[0x60, 0, 0, 0][..], &len.to_be_bytes(), &[protocol, hop_limit], &src.octets(), &dst.octets(), content].concat()
}

/// Returns an IPv4 packet with this word of flags and fragment offset, and an identification.
fn with_flags(mut packet: Vec<u8>, word: u16) -> Vec<u8> {
    packet[4..6].copy_from_slice(&[0x12, 0x34]);
    packet[6..8].copy_from_slice(&word.to_be_bytes());
    with_checksum(packet)
}

/// Returns an IPv4 packet with the checksum of its header.
fn with_checksum(mut packet: Vec<u8>) -> Vec<u8> {
    let len = header_len(&packet);
    packet[10..12].fill(0);
    let checksum = !sum(&[&packet[..len]]);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet
}

/// Returns the length of an IPv4 header.
pub(super) fn header_len(packet: &[u8]) -> usize {
    usize::from(packet[0] & 15) * 4
}

/// Returns an IP packet as a router forwards it.
pub(crate) fn forwarded(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if ethertype_of(&packet) == IPV6 {
        packet[7] -= 1;
        return packet;
    }
    packet[8] -= 1;
    with_checksum(packet)
}

/// Returns whether a router may divide an IP packet (RFC 791 section 3.2, RFC 8200 section 4.5).
pub(crate) fn may_be_divided(packet: &[u8]) -> bool {
    ethertype_of(packet) == IPV4 && word(packet, 6) & DONT_FRAGMENT == 0
}

/// Divides an IPv4 packet into fragments, as the procedure of RFC 791 section 3.2 does.
pub(crate) fn divided(packet: &[u8], mtu: usize) -> Vec<Vec<u8>> {
    let mut fragments = Vec::new();
    let (mut rest, whole) = (packet.to_vec(), word(packet, 6));
    loop {
        let header = header_len(&rest);
        if rest.len() <= mtu {
            fragments.push(rest);
            return fragments;
        }
        let at = header + (mtu - header) / 8 * 8;
        let flags = word(&rest, 6);
        fragments.push(with_len(with_flags(rest[..at].to_vec(), flags | MORE_FRAGMENTS)));
        // The options that packets have here are not copied into the other fragments.
        let offset = (flags & 0x1fff) + ((at - header) / 8) as u16;
        let mut next = [&rest[..20], &rest[at..]].concat();
        next[0] = 0x45;
        rest = with_len(with_flags(next, offset | whole & MORE_FRAGMENTS));
    }
}

/// Returns an IPv4 packet with its length in the header.
fn with_len(mut packet: Vec<u8>) -> Vec<u8> {
    let len = packet.len() as u16;
    packet[2..4].copy_from_slice(&len.to_be_bytes());
    with_checksum(packet)
}

/// Returns source, destination and TTL of an IP packet.
pub(crate) fn ends(packet: &[u8]) -> (IpAddr, IpAddr, u8) {
    let address = |at: usize| -> IpAddr { Ipv6Addr::from_octets(*packet[at..].first_chunk().unwrap()).into() };
    let address4 = |at: usize| -> IpAddr { Ipv4Addr::from_octets(*packet[at..].first_chunk().unwrap()).into() };
    match ethertype_of(packet) {
        IPV4 => (address4(12), address4(16), packet[8]),
        _ => (address(8), address(24), packet[7]),
    }
}

/// Returns whether an IP packet is a fragment, and whether it is another one than the first.
pub(crate) fn fragment(packet: &[u8]) -> (bool, bool) {
    if ethertype_of(packet) == IPV4 {
        let word = word(packet, 6);
        return (word & !DONT_FRAGMENT != 0, word & 0x1fff != 0);
    }
    let is_fragment = packet[6] == FRAGMENT;
    (is_fragment, is_fragment && word(packet, 42) >> 3 != 0)
}

/// Returns the upper-layer protocol of an IP packet, and its offset.
pub(super) fn protocol(packet: &[u8]) -> (u8, usize) {
    match packet[6] {
        _ if ethertype_of(packet) == IPV4 => (packet[9], header_len(packet)),
        HOP_BY_HOP | FRAGMENT => (packet[40], 48),
        other => (other, 40),
    }
}

/// Returns whether a packet has a UDP datagram.
pub(crate) fn is_udp(packet: &[u8]) -> bool {
    protocol(packet).0 == UDP
}

/// Returns the fields that the packets of a flow have in common: addresses, protocol and ports. Packets without ports,
/// and those with options, are flows of their own.
pub(crate) fn flow(packet: &[u8]) -> Vec<u8> {
    let (src, dst, _) = ends(packet);
    let (number, at) = protocol(packet);
    let ports = if number == UDP && !fragment(packet).1 { &packet[at..at + 4] } else { &[] };
    format!("{src} {dst} {number} {at} {:?} {ports:?}", fragment(packet)).into_bytes()
}
