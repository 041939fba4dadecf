//! ARP and neighbour discovery: requests and replies.

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::arp::{self, Operation};
use crate::error::BufferTooShort;
use crate::ethernet::{self, EtherType, MacAddr};
use crate::ip::IpProtocol;
use crate::{ipv6, ndp};

/// Length of an ARP frame without padding, bytes.
pub const ARP_FRAME_LEN: usize = ethernet::HEADER_LEN + arp::HEADER_LEN;
/// Length of a neighbour discovery frame with one link-layer address, bytes.
pub const NDP_FRAME_LEN: usize = ethernet::HEADER_LEN + ipv6::HEADER_LEN + 32;

fn arp_frame(out: &mut [u8], dst: MacAddr, packet: &arp::Repr) -> Result<usize, BufferTooShort> {
    let have = out.len();
    let frame = out.get_mut(..ARP_FRAME_LEN).ok_or(BufferTooShort { need: ARP_FRAME_LEN, have })?;
    let at = ethernet::Repr { dst, src: packet.sender_mac, ethertype: EtherType::ARP }.emit(frame)?;
    packet.emit(&mut frame[at..])?;
    Ok(ARP_FRAME_LEN)
}

/// Writes a broadcast ARP request for `target` and returns its length. With `src` 0.0.0.0 it is a probe (RFC
/// 5227 section 1.1), with `src == target` an announcement.
pub fn arp_request(out: &mut [u8], mac: MacAddr, src: Ipv4Addr, target: Ipv4Addr) -> Result<usize, BufferTooShort> {
    let packet = arp::Repr {
        operation: Operation::REQUEST,
        sender_mac: mac,
        sender_ip: src,
        target_mac: MacAddr::ZERO,
        target_ip: target,
    };
    arp_frame(out, MacAddr::BROADCAST, &packet)
}

/// Writes the ARP reply to a request, with `mac` as the address of the requested target. Returns its length.
pub fn arp_reply(out: &mut [u8], request: &arp::Repr, mac: MacAddr) -> Result<usize, BufferTooShort> {
    let packet = arp::Repr {
        operation: Operation::REPLY,
        sender_mac: mac,
        sender_ip: request.target_ip,
        target_mac: request.sender_mac,
        target_ip: request.sender_ip,
    };
    arp_frame(out, request.sender_mac, &packet)
}

fn ndp_frame(
    out: &mut [u8],
    (src_mac, src): (MacAddr, Ipv6Addr),
    (dst_mac, dst): (MacAddr, Ipv6Addr),
    message: &ndp::Repr,
) -> Result<usize, BufferTooShort> {
    let have = out.len();
    let len = message.message_len();
    let need = ethernet::HEADER_LEN + ipv6::HEADER_LEN + len;
    let frame = out.get_mut(..need).ok_or(BufferTooShort { need, have })?;
    let mut at = ethernet::Repr { dst: dst_mac, src: src_mac, ethertype: EtherType::IPV6 }.emit(frame)?;
    let ip = ipv6::Repr {
        src,
        dst,
        next_header: IpProtocol::ICMPV6,
        payload_len: len as u16,
        hop_limit: ndp::HOP_LIMIT,
        traffic_class: 0,
        flow_label: 0,
    };
    at += ip.emit(&mut frame[at..])?;
    message.emit(&mut frame[at..], src, dst)?;
    Ok(need)
}

/// Writes a neighbour solicitation for `target` and returns its length.
///
/// It goes to the solicited-node group, or to `to` alone to verify that the neighbour is reachable (RFC 4861
/// section 7.3.3). With an unspecified `src` it is duplicate address detection.
pub fn neighbor_solicitation(
    out: &mut [u8],
    mac: MacAddr,
    src: Ipv6Addr,
    target: Ipv6Addr,
    to: Option<MacAddr>,
) -> Result<usize, BufferTooShort> {
    let (dst_mac, dst) = match to {
        Some(mac) => (mac, target),
        None => {
            let group = ipv6::solicited_node(target);
            (MacAddr::multicast_v6(group), group)
        }
    };
    // RFC 4861 section 4.3: MUST NOT be included when the source is the unspecified address.
    let source = (!src.is_unspecified()).then_some(mac);
    ndp_frame(out, (mac, src), (dst_mac, dst), &ndp::Repr::Solicitation { target, source })
}

/// Writes a neighbour advertisement that `target` is at `mac`, and returns its length. It goes to `asker`. It
/// goes to all nodes if there is no asker, or if it solicited from the unspecified address.
///
/// `flags` are [`ndp::FLAG_ROUTER`] and [`ndp::FLAG_OVERRIDE`]; [`ndp::FLAG_SOLICITED`] is set as RFC 4861
/// section 7.2.4 requires.
pub fn neighbor_advertisement(
    out: &mut [u8],
    mac: MacAddr,
    target: Ipv6Addr,
    asker: Option<(MacAddr, Ipv6Addr)>,
    flags: u8,
) -> Result<usize, BufferTooShort> {
    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let flags = flags & !ndp::FLAG_SOLICITED;
    let (to, flags) = match asker {
        Some((asker, ip)) if !ip.is_unspecified() => ((asker, ip), flags | ndp::FLAG_SOLICITED),
        _ => ((MacAddr::multicast_v6(ALL_NODES), ALL_NODES), flags),
    };
    ndp_frame(out, (mac, target), to, &ndp::Repr::Advertisement { target, flags, address: Some(mac) })
}
