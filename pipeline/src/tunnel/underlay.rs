//! The gateway as a host on the underlay: its addresses, its replies and its requests.
//!
//! The addresses are never configured in the kernel. This module therefore does what a host's IP stack would
//! do for them: ARP and neighbour discovery in both directions, announcements, and detection of address
//! conflicts (RFC 5227, RFC 4862). Frames have no underlay VLAN tag here and lie in one buffer. The caller
//! limits their rate.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use wirepath_packet::drops::DropReason;
use wirepath_wire::build::{
    ARP_FRAME_LEN, NDP_FRAME_LEN, arp_reply, arp_request, neighbor_advertisement, neighbor_solicitation,
};
use wirepath_wire::{L3Type, L4Type, MacAddr, Parser, Tunnels, arp, ndp};

use super::neighbour::{Millis, NdEvent};

/// An address and the prefix length of its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    /// Address of the host.
    pub address: IpAddr,
    /// Prefix length in bits.
    pub len: u8,
}

impl Prefix {
    /// Returns whether `ip` is in the network.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let (a, b, width) = match (self.address, ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
            _ => return false,
        };
        let host = width - u32::from(self.len).min(width);
        (a ^ b).checked_shr(host).unwrap_or(0) == 0
    }

    /// Returns whether `ip` is the IPv4 network address or its broadcast address, which no host can have.
    /// Networks of one or two addresses have neither (RFC 3021).
    pub fn is_reserved(&self, ip: IpAddr) -> bool {
        let IpAddr::V4(v4) = ip else { return false };
        let hosts = u32::MAX.checked_shr(self.len.into()).unwrap_or(0);
        let host = v4.to_bits() & hosts;
        self.len < 31 && self.contains(ip) && (host == 0 || host == hosts)
    }

    /// Returns whether `ip` is the subnet-router anycast address of an IPv6 network, which no packet has as
    /// its source (RFC 4291 section 2.6.1). Networks of one or two addresses have none (RFC 6164).
    pub fn is_router_anycast(&self, ip: IpAddr) -> bool {
        let IpAddr::V6(v6) = ip else { return false };
        let hosts = u128::MAX.checked_shr(self.len.into()).unwrap_or(0);
        self.len < 127 && self.contains(ip) && v6.to_bits() & hosts == 0
    }
}

impl FromStr for Prefix {
    type Err = ();

    /// Parses an address with prefix length, such as `10.9.0.1/24` or `fd00:9::1/64`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, len) = text.split_once('/').ok_or(())?;
        let address: IpAddr = address.parse().map_err(drop)?;
        let len: u8 = len.parse().map_err(drop)?;
        if len > if address.is_ipv4() { 32 } else { 128 } { Err(()) } else { Ok(Self { address, len }) }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

/// Returns whether an address can belong to a single host, as that of a remote or a next hop must.
pub fn is_host_address(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            !(ip.is_unspecified()
                || ip.is_loopback()
                || ip.is_multicast()
                || ip.is_broadcast()
                || ip.octets()[0] >= 240)
        }
        IpAddr::V6(ip) => !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast()),
    }
}

/// Returns whether an address is in fe80::/10, which is on every link.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Addresses and routes of the gateway.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// Ethernet address of the underlay port.
    pub mac: MacAddr,
    /// Addresses of the VTEP with their networks.
    pub addresses: Vec<Prefix>,
    /// Next hops for destinations outside these networks, at most one per IP version.
    pub gateways: Vec<IpAddr>,
}

impl Addresses {
    /// Returns the next hop to `to`: `to` itself or a gateway; `None` if there is no route.
    pub fn next_hop(&self, to: IpAddr) -> Option<IpAddr> {
        if is_link_local(to) || self.addresses.iter().any(|prefix| prefix.contains(to)) {
            return Some(to);
        }
        self.gateways.iter().copied().find(|gateway| gateway.is_ipv4() == to.is_ipv4())
    }

    /// Returns whether an address belongs to the gateway.
    pub fn has(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|prefix| prefix.address == ip)
    }

    /// Returns the source address for soliciting `target`, from the same network if possible.
    fn source_for(&self, target: IpAddr) -> Option<IpAddr> {
        let same = self.addresses.iter().find(|prefix| prefix.contains(target));
        same.or_else(|| self.addresses.iter().find(|p| p.address.is_ipv4() == target.is_ipv4())).map(|p| p.address)
    }

    /// Builds the frame that solicits `target`, by multicast or to `to` alone. Returns `None` if the gateway
    /// has no address of that IP version.
    pub fn solicitation(&self, target: IpAddr, to: Option<MacAddr>) -> Option<Vec<u8>> {
        let (mut arp, mut ndp) = ([0; ARP_FRAME_LEN], [0; NDP_FRAME_LEN]);
        match (self.source_for(target)?, target) {
            (IpAddr::V4(src), IpAddr::V4(target)) => {
                arp_request(&mut arp, self.mac, src, target).ok()?;
                if let Some(to) = to {
                    // RFC 1122 section 2.3.2.1: a unicast poll of the host that had the address.
                    arp[..6].copy_from_slice(&to.0);
                }
                Some(arp.to_vec())
            }
            (IpAddr::V6(src), IpAddr::V6(target)) => {
                let len = neighbor_solicitation(&mut ndp, self.mac, src, target, to).ok()?;
                Some(ndp[..len].to_vec())
            }
            _ => None,
        }
    }

    /// Builds the announcement of `address`: a gratuitous ARP request (RFC 5227 section 3), or an unsolicited
    /// neighbour advertisement (RFC 4861 section 7.2.6).
    pub fn announcement(&self, address: IpAddr) -> Vec<u8> {
        let mut out = vec![0; NDP_FRAME_LEN];
        let len = match address {
            IpAddr::V4(ip) => arp_request(&mut out, self.mac, ip, ip),
            IpAddr::V6(ip) => neighbor_advertisement(&mut out, self.mac, ip, None, ndp::FLAG_OVERRIDE),
        };
        out.truncate(len.unwrap_or(0));
        out
    }

    /// Builds the frame that probes for another host with `address`: an ARP probe (RFC 5227 section 2.1.1),
    /// or a neighbour solicitation from the unspecified address (RFC 4862 section 5.4.2).
    pub fn conflict_probe(&self, address: IpAddr) -> Vec<u8> {
        let mut out = vec![0; NDP_FRAME_LEN];
        let len = match address {
            IpAddr::V4(ip) => arp_request(&mut out, self.mac, Ipv4Addr::UNSPECIFIED, ip),
            IpAddr::V6(ip) => neighbor_solicitation(&mut out, self.mac, Ipv6Addr::UNSPECIFIED, ip, None),
        };
        out.truncate(len.unwrap_or(0));
        out
    }
}

/// Result of a frame addressed to the gateway.
#[derive(Debug, PartialEq, Eq)]
pub struct HostOutcome {
    /// Reply to send.
    pub reply: HostReply,
    /// Information about a neighbour: its IP address, Ethernet address and the kind of message.
    pub nd_event: Option<(IpAddr, Option<MacAddr>, NdEvent)>,
    /// Address of the gateway that another host uses, and that host's Ethernet address.
    pub conflict: Option<(IpAddr, MacAddr)>,
}

/// Reply to a frame addressed to the gateway.
#[derive(Debug, PartialEq, Eq)]
pub enum HostReply {
    /// No reply; the frame was processed.
    None,
    /// No reply; the frame is dropped for this reason.
    Drop(DropReason),
    /// A new frame.
    Frame(Vec<u8>),
}

impl HostOutcome {
    const NOTHING: Self = Self { reply: HostReply::None, nd_event: None, conflict: None };

    const fn refused(reason: DropReason) -> Self {
        Self { reply: HostReply::Drop(reason), ..Self::NOTHING }
    }
}

/// The ARP and neighbour discovery responder of the gateway.
#[derive(Debug)]
pub struct UnderlayHost {
    addresses: Addresses,
    /// SIDs of the gateway. It answers solicitations for them, and does not announce them: usually a route leads to
    /// them.
    sids: HashSet<Ipv6Addr>,
    parser: Parser,
    /// Time of the last defence of an address.
    last_defence: Option<Millis>,
}

/// Minimum interval between two defences of an address (RFC 5227 section 1.1, DEFEND_INTERVAL).
const DEFEND_INTERVAL: Millis = 10_000;

impl UnderlayHost {
    /// Creates a host with these addresses.
    pub fn new(addresses: Addresses) -> Self {
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        Self { addresses, sids: HashSet::new(), parser, last_defence: None }
    }

    /// Returns the host's addresses.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Changes the host's IP addresses and next hops.
    pub fn set_addresses(&mut self, addresses: Vec<Prefix>, gateways: Vec<IpAddr>) {
        (self.addresses.addresses, self.addresses.gateways) = (addresses, gateways);
    }

    /// Changes the host's SIDs.
    pub fn set_sids(&mut self, sids: impl Iterator<Item = Ipv6Addr>) {
        self.sids = sids.collect();
    }

    /// Returns whether an address belongs to the host, as one of its addresses or SIDs.
    fn has(&self, ip: IpAddr) -> bool {
        self.addresses.has(ip) || matches!(ip, IpAddr::V6(ip) if self.sids.contains(&ip))
    }

    /// Changes the host's Ethernet address.
    pub fn set_mac(&mut self, mac: MacAddr) {
        self.addresses.mac = mac;
    }

    /// Processes a frame that was sent to the gateway or to a group address.
    pub fn handle(&mut self, frame: &[u8], now: Millis) -> HostOutcome {
        let layers = match self.parser.parse(frame) {
            Ok(parsed) => *parsed.outer(),
            Err(error) => return HostOutcome::refused(error.into()),
        };
        if layers.tag_count() > 0 || layers.has_labels() {
            return HostOutcome::refused(DropReason::NotForUs);
        }
        match (layers.l3_type(), layers.l4_type()) {
            (L3Type::Arp, _) => match layers.arp(frame) {
                Some(arp) => self.arp(&arp::Repr::parse(&arp), now),
                None => HostOutcome::refused(DropReason::Truncated),
            },
            (L3Type::Ipv6, L4Type::Icmpv6) => {
                match layers.ipv6(frame).map(|ip| (ip.src(), ip.dst(), ndp::Repr::parse(&ip))) {
                    Some((src, dst, Ok(Some(message)))) => self.ndp(frame, src, dst, &message, now),
                    Some((_, _, Ok(None))) => HostOutcome::refused(DropReason::NotForUs),
                    Some((_, _, Err(error))) => HostOutcome::refused(error.into()),
                    None => HostOutcome::refused(DropReason::Truncated),
                }
            }
            _ => HostOutcome::refused(DropReason::NotForUs),
        }
    }

    fn arp(&mut self, packet: &arp::Repr, now: Millis) -> HostOutcome {
        let sender = IpAddr::V4(packet.sender_ip);
        if !packet.sender_mac.is_unicast() || !(packet.sender_ip.is_unspecified() || is_host_address(sender)) {
            return HostOutcome::refused(DropReason::BadSource);
        }
        if packet.sender_mac == self.addresses.mac {
            // The gateway's own frame came back.
            return HostOutcome::refused(DropReason::NotForUs);
        }
        if self.has(sender) {
            return self.conflict(sender, packet.sender_mac, now);
        }
        let gratuitous = packet.sender_ip == packet.target_ip;
        let for_us = self.has(IpAddr::V4(packet.target_ip));
        let how = if gratuitous {
            NdEvent::Announcement
        } else if packet.operation == arp::Operation::REPLY && packet.target_mac == self.addresses.mac {
            NdEvent::Reply { solicited: for_us, overrides: true }
        } else {
            // A reply to all hosts confirms nothing, like a request.
            NdEvent::Request
        };
        // RFC 826: a request also contains its sender's addresses. Messages between other hosts are ignored.
        let concerns = for_us || gratuitous;
        let nd_event =
            (concerns && !packet.sender_ip.is_unspecified()).then_some((sender, Some(packet.sender_mac), how));
        if packet.operation != arp::Operation::REQUEST || !for_us {
            let answer = if nd_event.is_some() { HostReply::None } else { HostReply::Drop(DropReason::NotForUs) };
            return HostOutcome { reply: answer, nd_event, conflict: None };
        }
        let mut reply = vec![0; ARP_FRAME_LEN];
        match arp_reply(&mut reply, packet, self.addresses.mac) {
            Ok(_) => HostOutcome { reply: HostReply::Frame(reply), nd_event, conflict: None },
            Err(_) => HostOutcome::refused(DropReason::Truncated),
        }
    }

    fn ndp(&mut self, frame: &[u8], src: Ipv6Addr, dst: Ipv6Addr, message: &ndp::Repr, now: Millis) -> HostOutcome {
        let Some(from) = frame.get(6..12).and_then(|b| b.first_chunk()).map(|b| MacAddr(*b)) else {
            return HostOutcome::refused(DropReason::Truncated);
        };
        if from == self.addresses.mac {
            return HostOutcome::refused(DropReason::NotForUs);
        }
        if !from.is_unicast() || src.is_multicast() {
            return HostOutcome::refused(DropReason::BadSource);
        }
        match *message {
            ndp::Repr::Solicitation { target, source } => {
                let ours = self.has(IpAddr::V6(target));
                if !ours || (dst != target && dst != wirepath_wire::ipv6::solicited_node(target)) {
                    return HostOutcome::refused(DropReason::NotForUs);
                }
                let mut outcome = HostOutcome::NOTHING;
                if src.is_unspecified() {
                    // A host is about to use the gateway's address (RFC 4862 section 5.4.3). The
                    // advertisement to all nodes prevents this.
                    outcome.conflict = Some((IpAddr::V6(target), from));
                } else if self.has(IpAddr::V6(src)) {
                    return self.conflict(IpAddr::V6(src), from, now);
                } else if source.is_some() {
                    outcome.nd_event = Some((IpAddr::V6(src), source, NdEvent::Request));
                }
                let mut reply = vec![0; NDP_FRAME_LEN];
                let asker = Some((source.unwrap_or(from), src));
                let mac = self.addresses.mac;
                if let Ok(len) = neighbor_advertisement(&mut reply, mac, target, asker, ndp::FLAG_OVERRIDE) {
                    reply.truncate(len);
                    outcome.reply = HostReply::Frame(reply);
                }
                outcome
            }
            ndp::Repr::Advertisement { target, flags, address } => {
                if self.has(IpAddr::V6(target)) {
                    return self.conflict(IpAddr::V6(target), address.unwrap_or(from), now);
                }
                let (solicited, overrides) = (flags & ndp::FLAG_SOLICITED != 0, flags & ndp::FLAG_OVERRIDE != 0);
                let how = match (solicited, overrides) {
                    (false, true) => NdEvent::Announcement,
                    _ => NdEvent::Reply { solicited, overrides },
                };
                HostOutcome { nd_event: Some((IpAddr::V6(target), address, how)), ..HostOutcome::NOTHING }
            }
        }
    }

    fn conflict(&mut self, address: IpAddr, mac: MacAddr, now: Millis) -> HostOutcome {
        if mac == self.addresses.mac {
            return HostOutcome::refused(DropReason::NotForUs);
        }
        let rested = self.last_defence.is_none_or(|at| now >= at + DEFEND_INTERVAL);
        let answer = if rested {
            self.last_defence = Some(now);
            HostReply::Frame(self.addresses.announcement(address))
        } else {
            HostReply::None
        };
        HostOutcome { reply: answer, nd_event: None, conflict: Some((address, mac)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 1);
    const PEER: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 2);
    const ASKED: NdEvent = NdEvent::Reply { solicited: true, overrides: true };

    fn addresses(mac: MacAddr, last: &str) -> Addresses {
        Addresses {
            mac,
            addresses: vec![
                format!("10.9.0.{last}/24").parse().unwrap(),
                format!("fd00:9::{last}/64").parse().unwrap(),
            ],
            gateways: vec!["10.9.0.254".parse().unwrap()],
        }
    }

    fn us() -> UnderlayHost {
        UnderlayHost::new(addresses(US, "1"))
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn routes() {
        let a = addresses(US, "1");
        assert_eq!(a.next_hop(ip("10.9.0.77")), Some(ip("10.9.0.77")));
        assert_eq!(a.next_hop(ip("192.0.2.1")), Some(ip("10.9.0.254")));
        assert_eq!(a.next_hop(ip("fd00:9::5")), Some(ip("fd00:9::5")));
        assert_eq!(a.next_hop(ip("fd00:8::5")), None);
        assert_eq!(a.next_hop(ip("fe80::5")), Some(ip("fe80::5")));
        assert!("10.9.0.1/33".parse::<Prefix>().is_err() && "10.9.0.1".parse::<Prefix>().is_err());
        let all: Prefix = "10.9.0.1/0".parse().unwrap();
        assert!(all.contains(ip("1.2.3.4")) && !all.contains(ip("::1")));
        assert!("::1/0".parse::<Prefix>().unwrap().contains(ip("fd00::1")));
    }

    #[test]
    fn two_hosts_resolve_each_other() {
        for target in ["10.9.0.2", "fd00:9::2"] {
            let (mut us, mut peer) = (us(), UnderlayHost::new(addresses(PEER, "2")));
            let solicitation = us.addresses().solicitation(ip(target), None).unwrap();
            let outcome = peer.handle(&solicitation, 0);
            let asker = if target.contains(':') { ip("fd00:9::1") } else { ip("10.9.0.1") };
            assert_eq!(outcome.nd_event, Some((asker, Some(US), NdEvent::Request)));
            let HostReply::Frame(reply) = outcome.reply else { panic!("{:?}", outcome.reply) };
            assert_eq!(reply[..6], US.0);
            let outcome = us.handle(&reply, 0);
            assert_eq!(
                outcome,
                HostOutcome { nd_event: Some((ip(target), Some(PEER), ASKED)), ..HostOutcome::NOTHING }
            );
            // A unicast solicitation is answered as well.
            let poll = us.addresses().solicitation(ip(target), Some(PEER)).unwrap();
            assert_eq!(poll[..6], PEER.0);
            assert!(matches!(peer.handle(&poll, 0).reply, HostReply::Frame(_)));
        }
    }

    /// A host solicits a SID if a prefix of the link has it.
    #[test]
    fn solicitations_for_sids_are_answered() {
        let mut us = us();
        for sid in ["fd00:9::100", "fc00::100"] {
            let solicitation = addresses(PEER, "2").solicitation(ip(sid), None).unwrap();
            us.set_sids([].into_iter());
            assert_eq!(us.handle(&solicitation, 0), HostOutcome::refused(DropReason::NotForUs));
            us.set_sids([sid.parse().unwrap()].into_iter());
            let HostReply::Frame(reply) = us.handle(&solicitation, 0).reply else { panic!() };
            let mut peer = UnderlayHost::new(addresses(PEER, "2"));
            assert_eq!(peer.handle(&reply, 0).nd_event, Some((ip(sid), Some(US), ASKED)));
            // Another host that uses the SID.
            let twin = addresses(PEER, "2").announcement(ip(sid));
            assert_eq!(us.handle(&twin, 0).conflict, Some((ip(sid), PEER)));
        }
        // The SIDs are not announced.
        assert_eq!(us.addresses().addresses.len(), 2);
    }

    #[test]
    fn announcements_do_not_confirm_neighbours() {
        for address in ["10.9.0.2", "fd00:9::2"] {
            let frame = addresses(PEER, "2").announcement(ip(address));
            let outcome = us().handle(&frame, 0);
            assert_eq!(
                outcome,
                HostOutcome {
                    nd_event: Some((ip(address), Some(PEER), NdEvent::Announcement)),
                    ..HostOutcome::NOTHING
                }
            );
        }
    }

    #[test]
    fn address_conflicts_are_defended_every_ten_seconds() {
        for address in ["10.9.0.1", "fd00:9::1"] {
            let mut us = us();
            let announce = addresses(PEER, "1").announcement(ip(address));
            for (now, defends) in [(0, true), (9_999, false), (10_000, true)] {
                let outcome = us.handle(&announce, now);
                assert_eq!(outcome.conflict, Some((ip(address), PEER)));
                assert_eq!(matches!(outcome.reply, HostReply::Frame(_)), defends, "{address} at {now}");
            }
            // A probe for the address is answered.
            let probe = addresses(PEER, "1").conflict_probe(ip(address));
            assert!(matches!(us.handle(&probe, 0).reply, HostReply::Frame(_)));
            // The gateway's own announcement is not a conflict.
            let own = us.addresses().announcement(ip(address));
            assert_eq!(us.handle(&own, 0), HostOutcome::refused(DropReason::NotForUs));
        }
    }

    #[test]
    fn invalid_and_foreign_messages_change_nothing() {
        let mut us = us();
        let request = addresses(PEER, "2").solicitation(ip("10.9.0.3"), None).unwrap();
        assert_eq!(us.handle(&request, 0), HostOutcome::refused(DropReason::NotForUs));
        let mut group = addresses(PEER, "2").solicitation(ip("10.9.0.1"), None).unwrap();
        group[22..28].copy_from_slice(&[0xff; 6]);
        assert_eq!(us.handle(&group, 0), HostOutcome::refused(DropReason::BadSource));
        let mut group = addresses(PEER, "2").solicitation(ip("10.9.0.1"), None).unwrap();
        group[28..32].copy_from_slice(&[224, 0, 0, 1]);
        assert_eq!(us.handle(&group, 0), HostOutcome::refused(DropReason::BadSource));
        // A reply to another host.
        let mut reply = request.clone();
        reply[21] = 2;
        assert_eq!(us.handle(&reply, 0), HostOutcome::refused(DropReason::NotForUs));
        // Neighbour discovery that passed a router (RFC 4861 section 7.1.1).
        let mut routed = addresses(PEER, "2").solicitation(ip("fd00:9::1"), None).unwrap();
        routed[14 + 7] = 254;
        assert!(matches!(us.handle(&routed, 0).reply, HostReply::Drop(_)));
    }

    #[test]
    fn every_truncation_is_refused() {
        let a = addresses(PEER, "2");
        let whole = [
            a.solicitation(ip("10.9.0.1"), None).unwrap(),
            a.solicitation(ip("fd00:9::1"), None).unwrap(),
            a.announcement(ip("fd00:9::2")),
        ];
        for frame in whole {
            for len in 0..frame.len() {
                let outcome = us().handle(&frame[..len], 0);
                assert!(matches!(outcome.reply, HostReply::Drop(_)), "{len}: {outcome:?}");
                assert_eq!((outcome.nd_event, outcome.conflict), (None, None));
            }
        }
    }
}
