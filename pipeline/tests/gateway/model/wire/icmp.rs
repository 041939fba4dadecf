//! ICMP errors, as the standards ask for them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_wire::MacAddr;

use super::packets::{ICMPV6, ends, fragment, header_len, ipv4, ipv6, may_be_divided, protocol, sum, sum6};
use super::{IPV4, IPV6, VLAN, destination, ethertype, ethertype_of, source, tagged, untagged};

const TTL: u8 = 64;
/// Longest errors (RFC 1812 section 4.3.2.3, RFC 4443 section 2.4 (c)).
const LONGEST4: usize = 576;
const LONGEST6: usize = 1280;

/// An error: type and code over IPv4 and over IPv6.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IcmpError {
    v4: (u8, u8),
    v6: (u8, u8),
}

const fn error(v4: (u8, u8), v6: (u8, u8)) -> IcmpError {
    IcmpError { v4, v6 }
}

// RFC 792, RFC 1812 section 5.2.7 and RFC 4443 section 3 have the types and codes.
pub(crate) const NO_ROUTE: IcmpError = error((3, 0), (1, 0));
pub(crate) const HOST_UNREACHABLE: IcmpError = error((3, 1), (1, 3));
pub(crate) const PORT_UNREACHABLE: IcmpError = error((3, 3), (1, 4));
pub(crate) const PROHIBITED: IcmpError = error((3, 13), (1, 1));
pub(crate) const TIME_EXCEEDED: IcmpError = error((11, 0), (3, 0));

const TOO_BIG: IcmpError = error((3, 4), (2, 0));

pub(super) fn message4(kind: u8, code: u8, rest: u32, quote: &[u8]) -> Vec<u8> {
    let mut message = [&[kind, code, 0, 0][..], &rest.to_be_bytes(), quote].concat();
    let checksum = !sum(&[&message]);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    message
}

pub(super) fn message6(src: Ipv6Addr, dst: Ipv6Addr, kind: u8, code: u8, rest: u32, quote: &[u8]) -> Vec<u8> {
    let mut message = [&[kind, code, 0, 0][..], &rest.to_be_bytes(), quote].concat();
    let checksum = !sum6(src, dst, ICMPV6, &message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    message
}

/// Returns the error about the packet in a frame, from an Ethernet and an IP address, with this word behind the
/// checksum. `None`: the standards forbid it (RFC 1812 section 4.3.2.7, RFC 4443 section 2.4 (e)).
pub(crate) fn icmp_error(frame: &[u8], mac: MacAddr, from: IpAddr, error: IcmpError, rest: u32) -> Option<Vec<u8>> {
    if let Some((id, inner)) = untagged(frame) {
        return icmp_error(&inner, mac, from, error, rest).map(|error| tagged(&error, id));
    }
    let packet = ip_packet(frame)?;
    if source(frame).is_multicast() || destination(frame).is_multicast() || is_error(packet) {
        return None;
    }
    let quote = |longest: usize| &packet[..packet.len().min(longest)];
    let (src, dst, _) = ends(packet);
    let answer = match (from, src) {
        (IpAddr::V4(from), IpAddr::V4(src)) => {
            let is_host = |ip: Ipv4Addr| !ip.is_unspecified() && !ip.is_multicast() && !ip.is_broadcast();
            let IpAddr::V4(dst) = dst else { return None };
            if fragment(packet).1 || !is_host(src) || !is_host(dst) {
                return None;
            }
            let (kind, code) = error.v4;
            ipv4(from, src, 1, TTL, &message4(kind, code, rest, quote(LONGEST4 - 28)))
        }
        (IpAddr::V6(from), IpAddr::V6(src)) => {
            if src.is_unspecified() || src.is_multicast() || dst.is_multicast() {
                return None;
            }
            let (kind, code) = error.v6;
            ipv6(from, src, ICMPV6, TTL, &message6(from, src, kind, code, rest, quote(LONGEST6 - 48)))
        }
        _ => return None,
    };
    Some(super::ethernet(source(frame), mac, ethertype(frame), &answer))
}

/// Returns the error about the packet in a frame that is longer than this MTU. `None`: it is forbidden, or the packet
/// can be divided.
pub(crate) fn too_big(frame: &[u8], mac: MacAddr, from: IpAddr, mtu: usize) -> Option<Vec<u8>> {
    let untagged = untagged(frame).map(|(_, inner)| inner);
    let packet = ip_packet(untagged.as_deref().unwrap_or(frame))?;
    if may_be_divided(packet) {
        return None;
    }
    icmp_error(frame, mac, from, TOO_BIG, mtu as u32)
}

/// Returns the IP packet in a frame without tag, without what follows it.
pub(crate) fn ip_packet(frame: &[u8]) -> Option<&[u8]> {
    let packet = &frame[14..];
    let len = match ethertype(frame) {
        IPV4 => usize::from(super::word(packet, 2)),
        IPV6 => 40 + usize::from(super::word(packet, 4)),
        _ => return None,
    };
    Some(&packet[..len])
}

/// Returns whether a packet has an ICMP error.
fn is_error(packet: &[u8]) -> bool {
    let (protocol, at) = protocol(packet);
    match ethertype_of(packet) {
        IPV4 => protocol == 1 && matches!(packet[at], 3 | 4 | 5 | 11 | 12),
        // Messages from 128 on are no errors (RFC 4443 section 2.1).
        _ => protocol == ICMPV6 && packet[at] < 128,
    }
}

/// Returns a frame without the fields of an ICMP error that its sender chooses, whose checksums are right. Other frames
/// stay as they are.
pub(crate) fn comparable(frame: Vec<u8>) -> Vec<u8> {
    match ethertype(&frame) {
        VLAN => {
            let (id, inner) = untagged(&frame).expect("a tag");
            tagged(&comparable(inner), id)
        }
        IPV4 | IPV6 => [&frame[..14], &comparable_packet(frame[14..].to_vec())].concat(),
        _ => frame,
    }
}

/// Does what [`comparable`] does with an IP packet.
pub(crate) fn comparable_packet(mut packet: Vec<u8>) -> Vec<u8> {
    if ethertype_of(&packet) == IPV4 {
        if packet[9] != 1 || fragment(&packet).1 || !is_error(&packet) {
            return packet;
        }
        let (at, len) = (header_len(&packet), usize::from(super::word(&packet, 2)));
        assert_eq!(sum(&[&packet[..at]]), 0xffff, "checksum of {packet:x?}");
        assert_eq!(sum(&[&packet[at..len]]), 0xffff, "checksum of {packet:x?}");
        // Type of service, identification, flags, TTL and checksums.
        for chosen in [1..2, 4..9, 10..12, at + 2..at + 4] {
            packet[chosen].fill(0);
        }
        return packet;
    }
    if packet[6] == ICMPV6 && is_error(&packet) {
        let (IpAddr::V6(src), IpAddr::V6(dst), _) = ends(&packet) else { panic!("no IPv6 packet") };
        let len = 40 + usize::from(super::word(&packet, 4));
        assert_eq!(sum6(src, dst, ICMPV6, &packet[40..len]), 0xffff, "checksum of {packet:x?}");
        // Traffic class, flow label, hop limit and checksum.
        for chosen in [0..4, 7..8, 42..44] {
            packet[chosen].fill(0);
        }
        packet[0] = 0x60;
    }
    packet
}
