//! ICMP that a gateway sends of itself: "too big" to the sender of a packet that does not fit, and echo replies.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::ethernet::{self, MacAddr};
use crate::ip::IpProtocol;
use crate::parse::{L3, L4, Layers};
use crate::{checksum, icmpv4, icmpv6, ipv4, ipv6};

/// Longest error message: RFC 1812 section 4.3.2.3 (as much as fits 576 bytes).
const LONGEST_V4: usize = 576;
/// RFC 4443 section 3.2: as much as fits the minimum MTU.
const LONGEST_V6: usize = ipv6::MIN_MTU;
/// Hops that answers may travel.
const TTL: u8 = 64;

/// Why a packet is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// Not an IP packet, or of another version than the address to answer from.
    NotIp,
    /// It reports an error itself.
    IsError,
    /// Not the first fragment.
    LaterFragment,
    /// Sent to a group, or from an address that is not a single station's.
    NotUnicast,
    /// IPv4 without "don't fragment": the packet is to be fragmented instead.
    MayFragment,
    /// Not an echo request in order.
    NotEcho,
    /// The buffer is too short.
    NoRoom,
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoAnswer::NotIp => "not an IP packet of the right version",
            NoAnswer::IsError => "an ICMP error is not answered with another",
            NoAnswer::LaterFragment => "later fragments are not answered",
            NoAnswer::NotUnicast => "sent to a group or from no single station",
            NoAnswer::MayFragment => "the packet may be fragmented",
            NoAnswer::NotEcho => "not an echo request in order",
            NoAnswer::NoRoom => "the buffer is too short for the answer",
        })
    }
}

impl core::error::Error for NoAnswer {}

/// The most bytes [`too_big`] writes for a stack with these tags.
pub fn too_big_room(layers: &Layers) -> usize {
    layers.l3() - layers.l2() + if layers.l3_kind() == L3::Ipv4 { LONGEST_V4 } else { LONGEST_V6 }
}

/// Tells the sender of a packet that the path takes only `mtu` bytes of IP: ICMP "fragmentation needed" (RFC 1191 section 4)
/// or ICMPv6 "packet too big" (RFC 4443 section 3.2).
///
/// `head` is the packet (or its first buffer) with headers at `layers`; the answer carries the same VLAN tags, goes to
/// its source and comes from `mac` and `from`. Returns the answer's length in `out`.
pub fn too_big(
    out: &mut [u8],
    head: &[u8],
    layers: &Layers,
    mac: MacAddr,
    from: IpAddr,
    mtu: u16,
) -> Result<usize, NoAnswer> {
    if layers.is_later_fragment() {
        return Err(NoAnswer::LaterFragment);
    }
    // The labels of the way back are others.
    if layers.has_labels() || !layers.has_link() {
        return Err(NoAnswer::NotIp);
    }
    let l2 = head.get(layers.l2()..layers.l3()).ok_or(NoAnswer::NotIp)?;
    let ethernet = ethernet::View::new(l2).map_err(|_| NoAnswer::NotIp)?;
    let packet = head.get(layers.l3()..layers.end().min(head.len())).ok_or(NoAnswer::NotIp)?;
    if !ethernet.src().is_unicast() {
        return Err(NoAnswer::NotUnicast);
    }
    let have = out.len();
    let (link, ip) = out.split_at_mut_checked(l2.len()).ok_or(NoAnswer::NoRoom)?;
    let len = match from {
        IpAddr::V4(from) => too_big4(ip, head, packet, layers, ethernet.dst(), from, mtu)?,
        IpAddr::V6(from) => too_big6(ip, head, packet, layers, from, mtu)?,
    };
    debug_assert!(l2.len() + len <= have);
    // Tags and EtherType as they came.
    link.copy_from_slice(l2);
    let mut answer = ethernet::ViewMut::new(link).map_err(|_| NoAnswer::NoRoom)?;
    answer.set_dst(ethernet.src());
    answer.set_src(mac);
    Ok(l2.len() + len)
}

fn too_big4(
    out: &mut [u8],
    head: &[u8],
    packet: &[u8],
    layers: &Layers,
    dst_mac: MacAddr,
    from: Ipv4Addr,
    mtu: u16,
) -> Result<usize, NoAnswer> {
    let h = layers.ipv4_header(head).ok_or(NoAnswer::NotIp)?;
    let src = Ipv4Addr::from_octets(crate::field::get::<12, 4, 20>(h));
    let dst = Ipv4Addr::from_octets(crate::field::get::<16, 4, 20>(h));
    if crate::field::be16::<6, 20>(h) & ipv4::DONT_FRAGMENT == 0 {
        return Err(NoAnswer::MayFragment);
    }
    // RFC 1122 section 3.2.2: no errors about groups and broadcasts of either layer, nor to a source that is no host.
    let nobody = src.is_unspecified() || src.is_loopback() || src.is_multicast() || src.octets()[0] >= 240;
    if nobody || dst.is_multicast() || dst.is_broadcast() || dst_mac.is_group() {
        return Err(NoAnswer::NotUnicast);
    }
    if layers.l4_kind() == L4::Icmpv4 && head.get(layers.l4()).is_some_and(|t| icmpv4::Type(*t).is_error()) {
        return Err(NoAnswer::IsError);
    }
    let quoted = packet.len().min(LONGEST_V4 - ipv4::HEADER_LEN - icmpv4::HEADER_LEN);
    let total = ipv4::HEADER_LEN + icmpv4::HEADER_LEN + quoted;
    let out = out.get_mut(..total).ok_or(NoAnswer::NoRoom)?;
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
    ip.emit(out).map_err(|_| NoAnswer::NoRoom)?;
    let message = &mut out[ipv4::HEADER_LEN..];
    message[icmpv4::HEADER_LEN..].copy_from_slice(&packet[..quoted]);
    let kind = icmpv4::Type::DESTINATION_UNREACHABLE;
    let icmp = icmpv4::Repr { kind, code: icmpv4::FRAGMENTATION_NEEDED, rest: u32::from(mtu) };
    icmp.emit(message).map_err(|_| NoAnswer::NoRoom)?;
    Ok(total)
}

fn too_big6(
    out: &mut [u8],
    head: &[u8],
    packet: &[u8],
    layers: &Layers,
    from: Ipv6Addr,
    mtu: u16,
) -> Result<usize, NoAnswer> {
    let h = layers.ipv6_header(head).ok_or(NoAnswer::NotIp)?;
    let src = Ipv6Addr::from_octets(crate::field::get::<8, 16, 40>(h));
    // RFC 4443 section 2.4 (e.6); packets to groups are answered, for path MTU discovery (e.3).
    if src.is_unspecified() || src.is_multicast() || src.is_loopback() {
        return Err(NoAnswer::NotUnicast);
    }
    if layers.l4_kind() == L4::Icmpv6 && head.get(layers.l4()).is_some_and(|t| icmpv6::Type(*t).is_error()) {
        return Err(NoAnswer::IsError);
    }
    const FIXED: usize = ipv6::HEADER_LEN + 8;
    let quoted = packet.len().min(LONGEST_V6 - FIXED);
    let total = FIXED + quoted;
    let out = out.get_mut(..total).ok_or(NoAnswer::NoRoom)?;
    let ip = ipv6::Repr {
        src: from,
        dst: src,
        next_header: IpProtocol::ICMPV6,
        payload_len: (total - ipv6::HEADER_LEN) as u16,
        hop_limit: TTL,
        traffic_class: 0,
        flow_label: 0,
    };
    ip.emit(out).map_err(|_| NoAnswer::NoRoom)?;
    let message = &mut out[ipv6::HEADER_LEN..];
    message[4..8].copy_from_slice(&u32::from(mtu).to_be_bytes());
    message[8..].copy_from_slice(&packet[..quoted]);
    let icmp = icmpv6::Repr { kind: icmpv6::Type::PACKET_TOO_BIG, code: 0 };
    icmp.emit(message, from, src).map_err(|_| NoAnswer::NoRoom)?;
    Ok(total)
}

/// Turns an echo request into its reply in place: addresses exchanged, type changed, checksums kept right.
///
/// The request must lie in one buffer, unfragmented, without IP options, sent to a single station. Whether it was sent to
/// one of ours is for the caller to know.
pub fn echo_reply(frame: &mut [u8], layers: &Layers) -> Result<(), NoAnswer> {
    if layers.is_fragment() || layers.has_ip_options() || layers.has_labels() || !layers.has_link() {
        return Err(NoAnswer::NotEcho);
    }
    match layers.l4_kind() {
        L4::Icmpv4 => echo_reply4(frame, layers)?,
        L4::Icmpv6 => echo_reply6(frame, layers)?,
        _ => return Err(NoAnswer::NotEcho),
    }
    let link = frame.get_mut(layers.l2()..).ok_or(NoAnswer::NotEcho)?;
    ethernet::ViewMut::new(link).map_err(|_| NoAnswer::NotEcho)?.swap_addresses();
    Ok(())
}

fn echo_reply4(frame: &mut [u8], layers: &Layers) -> Result<(), NoAnswer> {
    let bytes = frame.get_mut(layers.l3()..).ok_or(NoAnswer::NotEcho)?;
    let mut ip = ipv4::ViewMut::new(bytes).map_err(|_| NoAnswer::NotEcho)?;
    let (src, dst) = (ip.view().src(), ip.view().dst());
    if dst.is_multicast() || dst.is_broadcast() || src.is_multicast() || src.is_unspecified() || src.is_broadcast() {
        return Err(NoAnswer::NotUnicast);
    }
    let mut icmp = icmpv4::ViewMut::new(ip.payload_mut()).map_err(|_| NoAnswer::NotEcho)?;
    let view = icmp.view();
    if view.kind() != icmpv4::Type::ECHO_REQUEST || view.code() != 0 || !view.checksum_is_valid() {
        return Err(NoAnswer::NotEcho);
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

fn echo_reply6(frame: &mut [u8], layers: &Layers) -> Result<(), NoAnswer> {
    let bytes = frame.get_mut(layers.l3()..).ok_or(NoAnswer::NotEcho)?;
    let mut ip = ipv6::ViewMut::new(bytes).map_err(|_| NoAnswer::NotEcho)?;
    let (src, dst) = (ip.view().src(), ip.view().dst());
    if dst.is_multicast() || src.is_multicast() || src.is_unspecified() {
        return Err(NoAnswer::NotUnicast);
    }
    let mut icmp = icmpv6::ViewMut::new(ip.payload_mut()).map_err(|_| NoAnswer::NotEcho)?;
    let view = icmp.view();
    if view.kind() != icmpv6::Type::ECHO_REQUEST || view.code() != 0 || !view.checksum_is_valid(src, dst) {
        return Err(NoAnswer::NotEcho);
    }
    // The pseudo header's sum does not change when the addresses change places.
    let (old, new) = (icmpv6::Type::ECHO_REQUEST.0, icmpv6::Type::ECHO_REPLY.0);
    let checksum = checksum::update(view.checksum(), u16::from(old) << 8, u16::from(new) << 8);
    icmp.set_kind(icmpv6::Type::ECHO_REPLY);
    icmp.set_checksum(checksum);
    ip.set_src(dst);
    ip.set_dst(src);
    ip.set_hop_limit(TTL);
    Ok(())
}
