//! ICMP messages that a gateway originates: errors and echo replies.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::ethernet::{self, MacAddr};
use crate::ip::IpProtocol;
use crate::parse::{HeaderOffsets, L3Type, L4Type};
use crate::{checksum, icmpv4, icmpv6, ipv4, ipv6};

/// Maximum length of an ICMP error: RFC 1812 section 4.3.2.3 (as much as fits 576 bytes).
const MAX_ERROR_LEN_V4: usize = 576;
/// Maximum length of an ICMPv6 error: RFC 4443 section 3.2 (as much as fits the minimum MTU).
const MAX_ERROR_LEN_V6: usize = ipv6::MIN_MTU;
/// TTL and hop limit of originated messages.
const TTL: u8 = 64;

/// Reasons why a packet gets no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoReply {
    /// Not an IP packet, or not of the version of the source address of the reply.
    NotIp,
    /// The packet is itself an ICMP error.
    IsError,
    /// An IPv4 fragment other than the first.
    LaterFragment,
    /// Sent to a group, or from an address that does not belong to a single host.
    NotUnicast,
    /// IPv4 without "don't fragment": the packet can be fragmented instead.
    MayFragment,
    /// Not a valid echo request.
    NotEcho,
    /// The buffer is too short.
    BufferTooShort,
}

impl fmt::Display for NoReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoReply::NotIp => "not an IP packet of the right version",
            NoReply::IsError => "an ICMP error never causes another",
            NoReply::LaterFragment => "later fragments of IPv4 get no reply",
            NoReply::NotUnicast => "sent to a group, or not from a single host",
            NoReply::MayFragment => "the packet can be fragmented instead",
            NoReply::NotEcho => "not a valid echo request",
            NoReply::BufferTooShort => "the buffer is too short for the reply",
        })
    }
}

impl core::error::Error for NoReply {}

/// Errors about a packet that a router cannot forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpError {
    /// The path takes only this number of bytes of IP: ICMP "fragmentation needed" (RFC 1191 section 4) or ICMPv6
    /// "packet too big" (RFC 4443 section 3.2).
    TooBig(u16),
    /// The TTL or hop limit is exhausted (RFC 792, RFC 4443 section 3.3).
    TimeExceeded,
    /// There is no route: code 0 of both versions.
    NoRoute,
    /// The host does not answer: code 1 (RFC 1812 section 5.2.7.1) or code 3 (RFC 4443 section 3.1).
    HostUnreachable,
    /// Nothing listens on the port of a router's own address: code 3 or code 4.
    PortUnreachable,
    /// The router is configured not to forward the packet: code 13 (RFC 1812 section 5.2.7.1) or code 1.
    Prohibited,
}

impl IcmpError {
    /// Returns type, code and the four bytes after the checksum of an ICMP message.
    const fn v4(self) -> icmpv4::Repr {
        let (kind, code, rest) = match self {
            Self::TooBig(mtu) => (icmpv4::Type::DESTINATION_UNREACHABLE, icmpv4::FRAGMENTATION_NEEDED, mtu as u32),
            Self::TimeExceeded => (icmpv4::Type::TIME_EXCEEDED, 0, 0),
            Self::NoRoute => (icmpv4::Type::DESTINATION_UNREACHABLE, 0, 0),
            Self::HostUnreachable => (icmpv4::Type::DESTINATION_UNREACHABLE, 1, 0),
            Self::PortUnreachable => (icmpv4::Type::DESTINATION_UNREACHABLE, 3, 0),
            Self::Prohibited => (icmpv4::Type::DESTINATION_UNREACHABLE, 13, 0),
        };
        icmpv4::Repr { kind, code, rest }
    }

    /// Returns type and code, and the four bytes after the checksum of an ICMPv6 message.
    const fn v6(self) -> (icmpv6::Repr, u32) {
        let (kind, code, rest) = match self {
            Self::TooBig(mtu) => (icmpv6::Type::PACKET_TOO_BIG, 0, mtu as u32),
            Self::TimeExceeded => (icmpv6::Type::TIME_EXCEEDED, 0, 0),
            Self::NoRoute => (icmpv6::Type::DESTINATION_UNREACHABLE, 0, 0),
            Self::Prohibited => (icmpv6::Type::DESTINATION_UNREACHABLE, 1, 0),
            Self::HostUnreachable => (icmpv6::Type::DESTINATION_UNREACHABLE, 3, 0),
            Self::PortUnreachable => (icmpv6::Type::DESTINATION_UNREACHABLE, 4, 0),
        };
        (icmpv6::Repr { kind, code }, rest)
    }
}

/// Returns the maximum number of bytes that [`icmp_error`] writes for this stack.
pub fn max_icmp_error_len(layers: &HeaderOffsets) -> usize {
    layers.l3() - layers.l2() + if layers.l3_type() == L3Type::Ipv4 { MAX_ERROR_LEN_V4 } else { MAX_ERROR_LEN_V6 }
}

/// Writes the error to the sender of a packet.
///
/// `head` is the packet (or its first buffer), with headers at `layers`. The reply has the same VLAN tags,
/// goes to the packet's source, and has the source addresses `mac` and `from`. Returns the length of the
/// reply in `out`.
///
/// # Errors
/// If the standards forbid an error about the packet (RFC 1122 section 3.2.2, RFC 4443 section 2.4 (e)), or `out` is
/// too short.
pub fn icmp_error(
    out: &mut [u8],
    head: &[u8],
    layers: &HeaderOffsets,
    mac: MacAddr,
    from: IpAddr,
    error: IcmpError,
) -> Result<usize, NoReply> {
    // The labels of the reverse path are unknown.
    if layers.has_labels() || !layers.has_ethernet() {
        return Err(NoReply::NotIp);
    }
    let l2 = head.get(layers.l2()..layers.l3()).ok_or(NoReply::NotIp)?;
    let ethernet = ethernet::View::new(l2).map_err(|_| NoReply::NotIp)?;
    let packet = head.get(layers.l3()..layers.end().min(head.len())).ok_or(NoReply::NotIp)?;
    if !ethernet.src().is_unicast() {
        return Err(NoReply::NotUnicast);
    }
    let have = out.len();
    let (link, ip) = out.split_at_mut_checked(l2.len()).ok_or(NoReply::BufferTooShort)?;
    let len = match from {
        IpAddr::V4(from) => error4(ip, head, packet, layers, ethernet.dst(), from, error)?,
        IpAddr::V6(from) => error6(ip, head, packet, layers, ethernet.dst(), from, error)?,
    };
    debug_assert!(l2.len() + len <= have);
    // Tags and EtherType are those of the packet.
    link.copy_from_slice(l2);
    let mut answer = ethernet::ViewMut::new(link).map_err(|_| NoReply::BufferTooShort)?;
    answer.set_dst(ethernet.src());
    answer.set_src(mac);
    Ok(l2.len() + len)
}

fn error4(
    out: &mut [u8],
    head: &[u8],
    packet: &[u8],
    layers: &HeaderOffsets,
    dst_mac: MacAddr,
    from: Ipv4Addr,
    error: IcmpError,
) -> Result<usize, NoReply> {
    // RFC 4443 section 2.4 (e) has no such rule.
    if layers.is_later_fragment() {
        return Err(NoReply::LaterFragment);
    }
    let h = layers.ipv4_header(head).ok_or(NoReply::NotIp)?;
    let src = Ipv4Addr::from_octets(crate::field::get::<12, 4, 20>(h));
    let dst = Ipv4Addr::from_octets(crate::field::get::<16, 4, 20>(h));
    if matches!(error, IcmpError::TooBig(_)) && crate::field::be16::<6, 20>(h) & ipv4::DONT_FRAGMENT == 0 {
        return Err(NoReply::MayFragment);
    }
    // RFC 1122 section 3.2.2: no errors for packets to a group or broadcast address of either layer, or from
    // a source that is no single host.
    let no_host = src.is_unspecified() || src.is_loopback() || src.is_multicast() || src.octets()[0] >= 240;
    if no_host || dst.is_multicast() || dst.is_broadcast() || dst_mac.is_multicast() {
        return Err(NoReply::NotUnicast);
    }
    if layers.l4_type() == L4Type::Icmpv4 && head.get(layers.l4()).is_some_and(|t| icmpv4::Type(*t).is_error()) {
        return Err(NoReply::IsError);
    }
    let quoted = packet.len().min(MAX_ERROR_LEN_V4 - ipv4::HEADER_LEN - icmpv4::HEADER_LEN);
    let total = ipv4::HEADER_LEN + icmpv4::HEADER_LEN + quoted;
    let out = out.get_mut(..total).ok_or(NoReply::BufferTooShort)?;
    let ip = ipv4::Repr {
        src: from,
        dst: src,
        protocol: IpProtocol::ICMPV4,
        payload_len: (total - ipv4::HEADER_LEN) as u16,
        ttl: TTL,
        // RFC 1812 section 4.3.2.5: precedence 6, "internetwork control".
        traffic_class: 0xc0,
        ident: 0,
        fragment_word: ipv4::DONT_FRAGMENT,
    };
    ip.emit(out).map_err(|_| NoReply::BufferTooShort)?;
    let message = &mut out[ipv4::HEADER_LEN..];
    message[icmpv4::HEADER_LEN..].copy_from_slice(&packet[..quoted]);
    error.v4().emit(message).map_err(|_| NoReply::BufferTooShort)?;
    Ok(total)
}

fn error6(
    out: &mut [u8],
    head: &[u8],
    packet: &[u8],
    layers: &HeaderOffsets,
    dst_mac: MacAddr,
    from: Ipv6Addr,
    error: IcmpError,
) -> Result<usize, NoReply> {
    let h = layers.ipv6_header(head).ok_or(NoReply::NotIp)?;
    let src = Ipv6Addr::from_octets(crate::field::get::<8, 16, 40>(h));
    let dst = Ipv6Addr::from_octets(crate::field::get::<24, 16, 40>(h));
    // RFC 4443 section 2.4 (e.6). Packets to groups get only "too big", for path MTU discovery (e.3, e.4).
    let to_group = dst.is_multicast() || dst_mac.is_multicast();
    let no_host = src.is_unspecified() || src.is_multicast() || src.is_loopback();
    if no_host || to_group && !matches!(error, IcmpError::TooBig(_)) {
        return Err(NoReply::NotUnicast);
    }
    if layers.l4_type() == L4Type::Icmpv6 && head.get(layers.l4()).is_some_and(|t| icmpv6::Type(*t).is_error()) {
        return Err(NoReply::IsError);
    }
    const FIXED: usize = ipv6::HEADER_LEN + 8;
    let quoted = packet.len().min(MAX_ERROR_LEN_V6 - FIXED);
    let total = FIXED + quoted;
    let out = out.get_mut(..total).ok_or(NoReply::BufferTooShort)?;
    let ip = ipv6::Repr {
        src: from,
        dst: src,
        next_header: IpProtocol::ICMPV6,
        payload_len: (total - ipv6::HEADER_LEN) as u16,
        hop_limit: TTL,
        traffic_class: 0,
        flow_label: 0,
    };
    ip.emit(out).map_err(|_| NoReply::BufferTooShort)?;
    let message = &mut out[ipv6::HEADER_LEN..];
    let (icmp, rest) = error.v6();
    message[4..8].copy_from_slice(&rest.to_be_bytes());
    message[8..].copy_from_slice(&packet[..quoted]);
    icmp.emit(message, from, src).map_err(|_| NoReply::BufferTooShort)?;
    Ok(total)
}

/// Turns an echo request into its reply in place: it swaps the addresses, changes the type and updates the
/// checksums.
///
/// The request must lie in one buffer, unfragmented, without IP options, and be sent to a unicast address.
/// The caller has checked that the address is local.
pub fn echo_reply(frame: &mut [u8], layers: &HeaderOffsets) -> Result<(), NoReply> {
    if layers.is_fragment() || layers.has_ip_options() || layers.has_labels() || !layers.has_ethernet() {
        return Err(NoReply::NotEcho);
    }
    match layers.l4_type() {
        L4Type::Icmpv4 => echo_reply4(frame, layers)?,
        L4Type::Icmpv6 => echo_reply6(frame, layers)?,
        _ => return Err(NoReply::NotEcho),
    }
    let link = frame.get_mut(layers.l2()..).ok_or(NoReply::NotEcho)?;
    ethernet::ViewMut::new(link).map_err(|_| NoReply::NotEcho)?.swap_addresses();
    Ok(())
}

fn echo_reply4(frame: &mut [u8], layers: &HeaderOffsets) -> Result<(), NoReply> {
    let bytes = frame.get_mut(layers.l3()..).ok_or(NoReply::NotEcho)?;
    let mut ip = ipv4::ViewMut::new(bytes).map_err(|_| NoReply::NotEcho)?;
    let (src, dst) = (ip.view().src(), ip.view().dst());
    if dst.is_multicast() || dst.is_broadcast() || src.is_multicast() || src.is_unspecified() || src.is_broadcast() {
        return Err(NoReply::NotUnicast);
    }
    let mut icmp = icmpv4::ViewMut::new(ip.payload_mut()).map_err(|_| NoReply::NotEcho)?;
    let view = icmp.view();
    if view.kind() != icmpv4::Type::ECHO_REQUEST || view.code() != 0 || !view.checksum_is_valid() {
        return Err(NoReply::NotEcho);
    }
    let checksum = checksum::update(view.checksum(), u16::from(icmpv4::Type::ECHO_REQUEST.0) << 8, 0);
    icmp.set_kind(icmpv4::Type::ECHO_REPLY);
    icmp.set_checksum(checksum);
    ip.set_src(dst);
    ip.set_dst(src);
    ip.set_ttl(TTL);
    ip.fill_checksum();
    Ok(())
}

fn echo_reply6(frame: &mut [u8], layers: &HeaderOffsets) -> Result<(), NoReply> {
    let bytes = frame.get_mut(layers.l3()..).ok_or(NoReply::NotEcho)?;
    let mut ip = ipv6::ViewMut::new(bytes).map_err(|_| NoReply::NotEcho)?;
    let (src, dst) = (ip.view().src(), ip.view().dst());
    if dst.is_multicast() || src.is_multicast() || src.is_unspecified() {
        return Err(NoReply::NotUnicast);
    }
    let mut icmp = icmpv6::ViewMut::new(ip.payload_mut()).map_err(|_| NoReply::NotEcho)?;
    let view = icmp.view();
    if view.kind() != icmpv6::Type::ECHO_REQUEST || view.code() != 0 || !view.checksum_is_valid(src, dst) {
        return Err(NoReply::NotEcho);
    }
    // Swapping the addresses does not change the sum of the pseudo header.
    let (old, new) = (icmpv6::Type::ECHO_REQUEST.0, icmpv6::Type::ECHO_REPLY.0);
    let checksum = checksum::update(view.checksum(), u16::from(old) << 8, u16::from(new) << 8);
    icmp.set_kind(icmpv6::Type::ECHO_REPLY);
    icmp.set_checksum(checksum);
    ip.set_src(dst);
    ip.set_dst(src);
    ip.set_hop_limit(TTL);
    Ok(())
}
