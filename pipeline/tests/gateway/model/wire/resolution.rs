//! Messages of ARP (RFC 826) and of neighbour discovery (RFC 4861).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_wire::MacAddr;

use super::packets::{ICMPV6, ipv6, sum6};
use super::{ARP, IPV6, address6, ethernet, ethertype, long, source, untagged, word};

/// Types of neighbour discovery (RFC 4861 section 4).
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Options with the Ethernet address of the sender or the target.
const SOURCE_OPTION: u8 = 1;
const TARGET_OPTION: u8 = 2;
/// Operations of ARP.
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// Flags of an advertisement: the sender is a router, it was asked, and it overrides what is known.
const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// Returns the type of an ICMPv6 message in a frame without extension headers.
fn icmpv6_type(frame: &[u8]) -> Option<u8> {
    (frame.len() >= 58 && ethertype(frame) == IPV6 && frame[20] == ICMPV6).then(|| frame[54])
}

/// Returns the address that an ARP reply or a neighbour advertisement is about.
pub(crate) fn resolved_address(frame: &[u8]) -> Option<IpAddr> {
    if ethertype(frame) == ARP {
        return Some(Ipv4Addr::from_bits(long(frame, 28)).into());
    }
    (icmpv6_type(frame) == Some(ADVERTISEMENT)).then(|| address6(frame, 62).into())
}

/// Returns whether a frame, with or without a tag, is a message of ARP or of neighbour discovery.
pub(crate) fn is_in(frame: &[u8]) -> bool {
    let frame = untagged(frame).map_or_else(|| frame.to_vec(), |(_, inner)| inner);
    ethertype(&frame) == ARP || matches!(icmpv6_type(&frame), Some(SOLICITATION | ADVERTISEMENT))
}

/// Returns the reply of a host to a request for its address.
pub(crate) fn reply(request: &[u8], ip: IpAddr, mac: MacAddr) -> Option<Vec<u8>> {
    match ip {
        IpAddr::V4(ip) => arp_reply(request, ip, mac),
        IpAddr::V6(ip) => nd_reply(request, ip, mac),
    }
}

/// Returns the advertisement of a host that a solicitation asks for (RFC 4861 section 7.2.4).
fn nd_reply(request: &[u8], ip: Ipv6Addr, mac: MacAddr) -> Option<Vec<u8>> {
    let asked = request.len() >= 78 && icmpv6_type(request) == Some(SOLICITATION);
    if !asked || address6(request, 62) != ip || source(request) == mac || address6(request, 22).is_unspecified() {
        return None;
    }
    let asker = (source(request), address6(request, 22));
    Some(advertisement(mac, ip, asker, SOLICITED | OVERRIDE))
}

/// Returns the reply of a host to an ARP request for its address.
fn arp_reply(request: &[u8], ip: Ipv4Addr, mac: MacAddr) -> Option<Vec<u8>> {
    let asked = request.len() >= 42 && ethertype(request) == ARP && word(request, 20) == REQUEST;
    let asked = asked && long(request, 38) == ip.to_bits() && source(request) != mac;
    let asker = MacAddr(*request[22..].first_chunk()?);
    asked.then(|| padded(arp(source(request), REPLY, (mac, ip), (asker, Ipv4Addr::from_bits(long(request, 28))))))
}

/// Returns a frame to `dst` with an ARP message of a sender about a target.
fn arp(dst: MacAddr, operation: u16, sender: (MacAddr, Ipv4Addr), target: (MacAddr, Ipv4Addr)) -> Vec<u8> {
    let mut message = [&[0, 1, 8, 0, 6, 4][..], &operation.to_be_bytes()].concat();
    for (mac, ip) in [sender, target] {
        message.extend(mac.0);
        message.extend(ip.octets());
    }
    ethernet(dst, sender.0, ARP, &message)
}

/// Returns a frame with the shortest content of Ethernet at least.
fn padded(mut frame: Vec<u8>) -> Vec<u8> {
    frame.resize(frame.len().max(60), 0);
    frame
}

fn neighbour_discovery(
    (src_mac, src): (MacAddr, Ipv6Addr),
    (dst_mac, dst): (MacAddr, Ipv6Addr),
    (kind, flags): (u8, u8),
    target: Ipv6Addr,
    option: Option<(u8, MacAddr)>,
) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0, flags, 0, 0, 0][..], &target.octets()].concat();
    if let Some((kind, mac)) = option {
        message.extend([kind, 1]);
        message.extend(mac.0);
    }
    let checksum = !sum6(src, dst, ICMPV6, &message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    ethernet(dst_mac, src_mac, IPV6, &ipv6(src, dst, ICMPV6, 255, &message))
}

/// Returns the advertisement that `ip` is at `mac`, to a host.
fn advertisement(mac: MacAddr, ip: Ipv6Addr, to: (MacAddr, Ipv6Addr), flags: u8) -> Vec<u8> {
    neighbour_discovery((mac, ip), to, (ADVERTISEMENT, flags), ip, Some((TARGET_OPTION, mac)))
}

/// Kind of a message that a host sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// To all hosts, or to the solicited-node group.
    Request,
    /// A solicitation that lacks the sender's Ethernet address. Over IPv4, a request with another address of the sender
    /// in the message than in the frame.
    OtherRequest,
    /// To one host.
    UnicastRequest,
    /// By a host that has no address yet (RFC 5227, RFC 4862).
    Probe,
    /// To all hosts. The sender is the target.
    Announcement,
    /// From a router, over IPv6.
    RouterAnnouncement,
    /// To one host, with the sender's address.
    Reply,
    /// Over IPv6, it does not override other addresses.
    WeakReply,
}

/// Returns a message from a host with this Ethernet address and IP address to another one, or about it.
pub(crate) fn message(kind: Message, (mac, ip): (MacAddr, IpAddr), (to_mac, to): (MacAddr, IpAddr)) -> Vec<u8> {
    match (ip, to) {
        (IpAddr::V4(ip), IpAddr::V4(to)) => padded(arp_message(kind, (mac, ip), (to_mac, to))),
        (IpAddr::V6(ip), IpAddr::V6(to)) => nd_message(kind, (mac, ip), (to_mac, to)),
        _ => panic!("{ip} and {to} have different versions"),
    }
}

fn arp_message(kind: Message, (mac, ip): (MacAddr, Ipv4Addr), (to_mac, to): (MacAddr, Ipv4Addr)) -> Vec<u8> {
    let nobody = MacAddr([0; 6]);
    let all = MacAddr([0xff; 6]);
    match kind {
        Message::Request => arp(all, REQUEST, (mac, ip), (nobody, to)),
        Message::OtherRequest => {
            let mut frame = arp(all, REQUEST, (mac, ip), (nobody, to));
            frame[27] ^= 1;
            frame
        }
        Message::UnicastRequest => arp(to_mac, REQUEST, (mac, ip), (nobody, to)),
        Message::Probe => arp(all, REQUEST, (mac, Ipv4Addr::UNSPECIFIED), (nobody, to)),
        Message::Announcement | Message::RouterAnnouncement => arp(all, REQUEST, (mac, ip), (nobody, ip)),
        Message::Reply | Message::WeakReply => arp(to_mac, REPLY, (mac, ip), (to_mac, to)),
    }
}

fn nd_message(kind: Message, (mac, ip): (MacAddr, Ipv6Addr), (to_mac, to): (MacAddr, Ipv6Addr)) -> Vec<u8> {
    let own = Some((SOURCE_OPTION, mac));
    let [.., a, b, c] = to.octets();
    // The solicited-node group (RFC 4291 section 2.7.1) and all nodes, with their Ethernet addresses.
    let group = (
        MacAddr([0x33, 0x33, 0xff, a, b, c]),
        Ipv6Addr::from_bits(0xff02_0000_0000_0000_0000_0001_ff00_0000 | to.to_bits() & 0xff_ffff),
    );
    let all = (MacAddr([0x33, 0x33, 0, 0, 0, 1]), Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
    let solicitation = |from, dst, option| neighbour_discovery(from, dst, (SOLICITATION, 0), to, option);
    match kind {
        Message::Request => solicitation((mac, ip), group, own),
        Message::OtherRequest => solicitation((mac, ip), group, None),
        Message::UnicastRequest => solicitation((mac, ip), (to_mac, to), own),
        Message::Probe => solicitation((mac, Ipv6Addr::UNSPECIFIED), group, None),
        Message::Announcement => advertisement(mac, ip, all, OVERRIDE),
        Message::RouterAnnouncement => advertisement(mac, ip, all, OVERRIDE | ROUTER),
        Message::Reply => advertisement(mac, ip, (to_mac, to), OVERRIDE | SOLICITED),
        Message::WeakReply => advertisement(mac, ip, (to_mac, to), SOLICITED),
    }
}

/// Content of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content {
    /// IP and Ethernet address that it says to belong together, and whether it is a router's, if the message says so.
    pub(crate) claim: Option<(IpAddr, MacAddr, Option<bool>)>,
    /// Address that it asks all hosts for, with those of the sender: IP and Ethernet address.
    pub(crate) asks: Option<(IpAddr, IpAddr, MacAddr)>,
}

/// Reads a message of ARP or neighbour discovery in a frame without tag.
pub(crate) fn read(frame: &[u8]) -> Option<Content> {
    let mac_at = |at: usize| MacAddr(*frame[at..].first_chunk().unwrap());
    let to_all = super::destination(frame).is_multicast();
    if ethertype(frame) == ARP {
        let ip_at = |at: usize| Ipv4Addr::from_bits(long(frame, at));
        let (sender, mac, target) = (ip_at(28), mac_at(22), ip_at(38));
        // A probe has no sender, and an announcement asks for its sender (RFC 5227).
        let is_request = word(frame, 20) == REQUEST && !sender.is_unspecified() && sender != target;
        return Some(Content {
            claim: (!sender.is_unspecified()).then_some((sender.into(), mac, None)),
            asks: (to_all && is_request).then_some((target.into(), sender.into(), mac)),
        });
    }
    let option = || (frame.len() >= 86).then(|| mac_at(80));
    let (from, target) = (|| address6(frame, 22), || IpAddr::from(address6(frame, 62)));
    match icmpv6_type(frame)? {
        SOLICITATION => {
            let is_probe = from().is_unspecified();
            let asker = option().unwrap_or(source(frame));
            Some(Content {
                claim: option().filter(|_| !is_probe).map(|mac| (from().into(), mac, None)),
                asks: (to_all && !is_probe).then_some((target(), from().into(), asker)),
            })
        }
        // Without the flag, several hosts may have the address (RFC 4861 section 7.2.7).
        ADVERTISEMENT if frame[58] & OVERRIDE == 0 => Some(Content { claim: None, asks: None }),
        ADVERTISEMENT => {
            let is_router = Some(frame[58] & ROUTER != 0);
            Some(Content { claim: option().map(|mac| (target(), mac, is_router)), asks: None })
        }
        _ => None,
    }
}

/// Returns the answer that a gateway gives for another host at `mac`: to the asker with these addresses.
pub(crate) fn answer(target: IpAddr, mac: MacAddr, is_router: bool, (ip, asker): (IpAddr, MacAddr)) -> Vec<u8> {
    match (target, ip) {
        (IpAddr::V4(target), IpAddr::V4(ip)) => arp(asker, REPLY, (mac, target), (asker, ip)),
        (IpAddr::V6(target), IpAddr::V6(ip)) => {
            let flags = SOLICITED | OVERRIDE | if is_router { ROUTER } else { 0 };
            advertisement(mac, target, (asker, ip), flags)
        }
        _ => panic!("{target} and {ip} have different versions"),
    }
}
