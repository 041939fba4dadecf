//! The gateway as a station of the underlay: which addresses it has, what it answers and what it asks.
//!
//! The addresses are never configured in the kernel, so everything that a host's IP stack would do for them is done here: ARP and
//! neighbour discovery in both directions, announcements, a look-out for others that use the same address (RFC 5227, RFC 4862), and
//! echo. Frames come and go without the underlay's VLAN tag, in one buffer.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use wirepath_pmd::drops::DropReason;
use wirepath_wire::build::{
    ARP_FRAME_LEN, NDP_FRAME_LEN, arp_reply, arp_request, echo_reply, neighbor_advertisement, neighbor_solicitation,
};
use wirepath_wire::{L3, L4, Layers, MacAddr, Parser, Tunnels, arp, ndp};

use super::neighbour::{Heard, Millis};
use super::rate::TokenBucket;

/// An address and the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Address of the station.
    pub address: IpAddr,
    /// Bits of the network.
    pub len: u8,
}

impl Prefix {
    /// Whether `ip` is in the network.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let (a, b, width) = match (self.address, ip) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
            _ => return false,
        };
        let host = width - u32::from(self.len).min(width);
        (a ^ b).checked_shr(host).unwrap_or(0) == 0
    }

    /// Whether `ip` names the IPv4 network itself or is its broadcast address, so that no station can have it. Networks of one or two
    /// addresses have neither (RFC 3021).
    pub fn is_reserved(&self, ip: IpAddr) -> bool {
        let IpAddr::V4(v4) = ip else { return false };
        let hosts = u32::MAX.checked_shr(self.len.into()).unwrap_or(0);
        let host = v4.to_bits() & hosts;
        self.len < 31 && self.contains(ip) && (host == 0 || host == hosts)
    }
}

impl FromStr for Prefix {
    type Err = ();

    /// `10.9.0.1/24`, `fd00:9::1/64`.
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

/// Whether an address is that of one station: what a remote or a next hop can be.
pub fn is_station(ip: IpAddr) -> bool {
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

/// Whether an address is fe80::/10, which is on every link.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Addresses of the gateway and its routes.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// Ethernet address of the underlay port.
    pub mac: MacAddr,
    /// The VTEP's addresses with their networks.
    pub addresses: Vec<Prefix>,
    /// Next hops for what is in none of the networks, at most one of each IP version.
    pub gateways: Vec<IpAddr>,
}

impl Addresses {
    /// The next hop to `to`: itself, or a gateway; `None` if there is no route.
    pub fn next_hop(&self, to: IpAddr) -> Option<IpAddr> {
        if is_link_local(to) || self.addresses.iter().any(|prefix| prefix.contains(to)) {
            return Some(to);
        }
        self.gateways.iter().copied().find(|gateway| gateway.is_ipv4() == to.is_ipv4())
    }

    /// Whether the address is one of ours.
    pub fn has(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|prefix| prefix.address == ip)
    }

    /// The address to ask for `target` from: one of the same network if there is one.
    fn asker(&self, target: IpAddr) -> Option<IpAddr> {
        let same = self.addresses.iter().find(|prefix| prefix.contains(target));
        same.or_else(|| self.addresses.iter().find(|p| p.address.is_ipv4() == target.is_ipv4())).map(|p| p.address)
    }

    /// The frame that asks who has `target`: everybody, or only `to`. `None` without an address of that IP version.
    pub fn question(&self, target: IpAddr, to: Option<MacAddr>) -> Option<Vec<u8>> {
        let (mut arp, mut ndp) = ([0; ARP_FRAME_LEN], [0; NDP_FRAME_LEN]);
        match (self.asker(target)?, target) {
            (IpAddr::V4(src), IpAddr::V4(target)) => {
                arp_request(&mut arp, self.mac, src, target).ok()?;
                if let Some(to) = to {
                    // RFC 1122 section 2.3.2.1: a unicast poll of the station that had it.
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

    /// Frames that tell everybody where `address` is: a gratuitous ARP request (RFC 5227 section 3), or an unsolicited advertisement
    /// (RFC 4861 section 7.2.6).
    pub fn announcement(&self, address: IpAddr) -> Vec<u8> {
        let mut out = vec![0; NDP_FRAME_LEN];
        let len = match address {
            IpAddr::V4(ip) => arp_request(&mut out, self.mac, ip, ip),
            IpAddr::V6(ip) => neighbor_advertisement(&mut out, self.mac, ip, None, ndp::FLAG_OVERRIDE),
        };
        out.truncate(len.unwrap_or(0));
        out
    }

    /// Frames that ask whether somebody else has `address`: an ARP probe (RFC 5227 section 2.1.1), or a solicitation from nowhere
    /// (RFC 4862 section 5.4.2).
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

/// What a frame to the gateway itself leads to.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What to send back.
    pub answer: Answer,
    /// What it says about a neighbour.
    pub heard: Option<(IpAddr, Option<MacAddr>, Heard)>,
    /// Another station uses this address of ours.
    pub conflict: Option<(IpAddr, MacAddr)>,
}

/// What to send back.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing: the frame had its effect.
    None,
    /// Nothing: the frame is refused for this reason.
    Refused(DropReason),
    /// The frame itself, which was turned into the answer.
    InPlace,
    /// Another frame.
    Frame(Vec<u8>),
}

impl Outcome {
    const NOTHING: Self = Self { answer: Answer::None, heard: None, conflict: None };

    const fn refused(reason: DropReason) -> Self {
        Self { answer: Answer::Refused(reason), ..Self::NOTHING }
    }
}

/// Answers what others ask the gateway.
#[derive(Debug)]
pub struct Station {
    addresses: Addresses,
    parser: Parser,
    echoes: TokenBucket,
    neighbours: TokenBucket,
    /// When an address was last defended.
    defended: Option<Millis>,
}

/// Pause between two defences of an address (RFC 5227 section 1.1, DEFEND_INTERVAL).
const DEFEND_INTERVAL: Millis = 10_000;

impl Station {
    /// A station with these addresses.
    pub fn new(addresses: Addresses) -> Self {
        Self {
            addresses,
            parser: Parser { tunnels: Tunnels::NONE, ..Parser::default() },
            echoes: TokenBucket::new(1_000, 100),
            neighbours: TokenBucket::new(2_000, 500),
            defended: None,
        }
    }

    /// Its addresses.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Takes a frame that was sent to the gateway or to a group.
    pub fn handle(&mut self, frame: &mut [u8], now: Millis) -> Outcome {
        let layers = match self.parser.parse(frame) {
            Ok(parsed) => *parsed.outer(),
            Err(error) => return Outcome::refused(error.into()),
        };
        if layers.tag_count() > 0 || layers.has_labels() {
            return Outcome::refused(DropReason::NotForUs);
        }
        match (layers.l3_kind(), layers.l4_kind()) {
            (L3::Arp, _) => match layers.arp(frame) {
                Some(arp) => self.arp(&arp::Repr::parse(&arp), now),
                None => Outcome::refused(DropReason::Truncated),
            },
            (L3::Ipv4, L4::Icmpv4) => self.echo(frame, &layers, now),
            (L3::Ipv6, L4::Icmpv6) => match layers.ipv6(frame).map(|ip| (ip.src(), ip.dst(), ndp::Repr::parse(&ip))) {
                Some((src, dst, Ok(Some(message)))) => self.ndp(frame, src, dst, &message, now),
                Some((_, _, Ok(None))) => self.echo(frame, &layers, now),
                Some((_, _, Err(error))) => Outcome::refused(error.into()),
                None => Outcome::refused(DropReason::Truncated),
            },
            _ => Outcome::refused(DropReason::NotForUs),
        }
    }

    fn arp(&mut self, packet: &arp::Repr, now: Millis) -> Outcome {
        let sender = IpAddr::V4(packet.sender_ip);
        if !packet.sender_mac.is_unicast() || !(packet.sender_ip.is_unspecified() || is_station(sender)) {
            return Outcome::refused(DropReason::BadSource);
        }
        if packet.sender_mac == self.addresses.mac {
            // Our own, come back.
            return Outcome::refused(DropReason::NotForUs);
        }
        if self.addresses.has(sender) {
            return self.conflict(sender, packet.sender_mac, now);
        }
        let gratuitous = packet.sender_ip == packet.target_ip;
        let for_us = self.addresses.has(IpAddr::V4(packet.target_ip));
        let how = if packet.operation == arp::Operation::REPLY {
            // Replies to us have our address as target; what is said to everybody is no answer.
            Heard::Answer { solicited: for_us && packet.target_mac == self.addresses.mac, overrides: true }
        } else if gratuitous {
            Heard::Answer { solicited: false, overrides: true }
        } else {
            Heard::Question
        };
        // RFC 826: who asks also tells where it is itself; what others say to others does not concern us.
        let concerns = for_us || gratuitous;
        let heard = (concerns && !packet.sender_ip.is_unspecified()).then_some((sender, Some(packet.sender_mac), how));
        if packet.operation != arp::Operation::REQUEST || !for_us {
            let answer = if heard.is_some() { Answer::None } else { Answer::Refused(DropReason::NotForUs) };
            return Outcome { answer, heard, conflict: None };
        }
        if !self.neighbours.take(now) {
            return Outcome { answer: Answer::Refused(DropReason::RateLimited), heard, conflict: None };
        }
        let mut reply = vec![0; ARP_FRAME_LEN];
        match arp_reply(&mut reply, packet, self.addresses.mac) {
            Ok(_) => Outcome { answer: Answer::Frame(reply), heard, conflict: None },
            Err(_) => Outcome::refused(DropReason::Truncated),
        }
    }

    fn ndp(&mut self, frame: &[u8], src: Ipv6Addr, dst: Ipv6Addr, message: &ndp::Repr, now: Millis) -> Outcome {
        let Some(from) = frame.get(6..12).and_then(|b| b.first_chunk()).map(|b| MacAddr(*b)) else {
            return Outcome::refused(DropReason::Truncated);
        };
        if from == self.addresses.mac {
            return Outcome::refused(DropReason::NotForUs);
        }
        if !from.is_unicast() || src.is_multicast() {
            return Outcome::refused(DropReason::BadSource);
        }
        match *message {
            ndp::Repr::Solicitation { target, source } => {
                let ours = self.addresses.has(IpAddr::V6(target));
                if !ours || (dst != target && dst != wirepath_wire::ipv6::solicited_node(target)) {
                    return Outcome::refused(DropReason::NotForUs);
                }
                let mut outcome = Outcome::NOTHING;
                if src.is_unspecified() {
                    // Somebody is about to use our address (RFC 4862 section 5.4.3); the answer to all nodes stops it.
                    outcome.conflict = Some((IpAddr::V6(target), from));
                } else if self.addresses.has(IpAddr::V6(src)) {
                    return self.conflict(IpAddr::V6(src), from, now);
                } else if source.is_some() {
                    outcome.heard = Some((IpAddr::V6(src), source, Heard::Question));
                }
                if !self.neighbours.take(now) {
                    outcome.answer = Answer::Refused(DropReason::RateLimited);
                    return outcome;
                }
                let mut reply = vec![0; NDP_FRAME_LEN];
                let asker = Some((source.unwrap_or(from), src));
                let mac = self.addresses.mac;
                if let Ok(len) = neighbor_advertisement(&mut reply, mac, target, asker, ndp::FLAG_OVERRIDE) {
                    reply.truncate(len);
                    outcome.answer = Answer::Frame(reply);
                }
                outcome
            }
            ndp::Repr::Advertisement { target, flags, address } => {
                if self.addresses.has(IpAddr::V6(target)) {
                    return self.conflict(IpAddr::V6(target), address.unwrap_or(from), now);
                }
                let how = Heard::Answer {
                    solicited: flags & ndp::FLAG_SOLICITED != 0,
                    overrides: flags & ndp::FLAG_OVERRIDE != 0,
                };
                Outcome { heard: Some((IpAddr::V6(target), address, how)), ..Outcome::NOTHING }
            }
        }
    }

    fn conflict(&mut self, address: IpAddr, mac: MacAddr, now: Millis) -> Outcome {
        if mac == self.addresses.mac {
            return Outcome::refused(DropReason::NotForUs);
        }
        let rested = self.defended.is_none_or(|at| now >= at + DEFEND_INTERVAL);
        let answer = if rested {
            self.defended = Some(now);
            Answer::Frame(self.addresses.announcement(address))
        } else {
            Answer::None
        };
        Outcome { answer, heard: None, conflict: Some((address, mac)) }
    }

    fn echo(&mut self, frame: &mut [u8], layers: &Layers, now: Millis) -> Outcome {
        let dst = match layers.l3_kind() {
            L3::Ipv4 => layers.ipv4_header(frame).map(|h| IpAddr::from([h[16], h[17], h[18], h[19]])),
            _ => layers.ipv6_header(frame).and_then(|h| h[24..].first_chunk::<16>()).map(|b| IpAddr::from(*b)),
        };
        let to_us = frame.starts_with(&self.addresses.mac.0) && dst.is_some_and(|dst| self.addresses.has(dst));
        if !to_us {
            return Outcome::refused(DropReason::NotForUs);
        }
        if !self.echoes.take(now) {
            return Outcome::refused(DropReason::RateLimited);
        }
        match echo_reply(frame, layers) {
            Ok(()) => Outcome { answer: Answer::InPlace, ..Outcome::NOTHING },
            Err(_) => Outcome::refused(DropReason::NotForUs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 1);
    const PEER: MacAddr = MacAddr::new(2, 0, 0, 0, 0, 2);
    const ASKED: Heard = Heard::Answer { solicited: true, overrides: true };

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

    fn us() -> Station {
        Station::new(addresses(US, "1"))
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
    fn two_stations_find_each_other() {
        for target in ["10.9.0.2", "fd00:9::2"] {
            let (mut us, mut peer) = (us(), Station::new(addresses(PEER, "2")));
            let mut question = us.addresses().question(ip(target), None).unwrap();
            let outcome = peer.handle(&mut question, 0);
            let asker = if target.contains(':') { ip("fd00:9::1") } else { ip("10.9.0.1") };
            assert_eq!(outcome.heard, Some((asker, Some(US), Heard::Question)));
            let Answer::Frame(mut reply) = outcome.answer else { panic!("{:?}", outcome.answer) };
            assert_eq!(reply[..6], US.0);
            let outcome = us.handle(&mut reply, 0);
            assert_eq!(outcome, Outcome { heard: Some((ip(target), Some(PEER), ASKED)), ..Outcome::NOTHING });
            // Asked alone, it answers as well.
            let mut poll = us.addresses().question(ip(target), Some(PEER)).unwrap();
            assert_eq!(poll[..6], PEER.0);
            assert!(matches!(peer.handle(&mut poll, 0).answer, Answer::Frame(_)));
        }
    }

    #[test]
    fn announcements_are_heard_but_are_no_answers() {
        for address in ["10.9.0.2", "fd00:9::2"] {
            let mut frame = addresses(PEER, "2").announcement(ip(address));
            let outcome = us().handle(&mut frame, 0);
            let unasked = Heard::Answer { solicited: false, overrides: true };
            assert_eq!(outcome, Outcome { heard: Some((ip(address), Some(PEER), unasked)), ..Outcome::NOTHING });
        }
    }

    #[test]
    fn another_station_with_our_address_is_noticed_and_answered_at_most_every_ten_seconds() {
        for address in ["10.9.0.1", "fd00:9::1"] {
            let mut us = us();
            let announce = addresses(PEER, "1").announcement(ip(address));
            for (now, defends) in [(0, true), (9_999, false), (10_000, true)] {
                let outcome = us.handle(&mut announce.clone(), now);
                assert_eq!(outcome.conflict, Some((ip(address), PEER)));
                assert_eq!(matches!(outcome.answer, Answer::Frame(_)), defends, "{address} at {now}");
            }
            // Who only asks whether the address is free is told that it is not.
            let mut probe = addresses(PEER, "1").conflict_probe(ip(address));
            assert!(matches!(us.handle(&mut probe, 0).answer, Answer::Frame(_)));
            // What we said ourselves is no conflict.
            let mut own = us.addresses().announcement(ip(address));
            assert_eq!(us.handle(&mut own, 0), Outcome::refused(DropReason::NotForUs));
        }
    }

    #[test]
    fn hostile_and_foreign_messages_change_nothing() {
        let mut us = us();
        let request = addresses(PEER, "2").question(ip("10.9.0.3"), None).unwrap();
        assert_eq!(us.handle(&mut request.clone(), 0), Outcome::refused(DropReason::NotForUs));
        let mut group = addresses(PEER, "2").question(ip("10.9.0.1"), None).unwrap();
        group[22..28].copy_from_slice(&[0xff; 6]);
        assert_eq!(us.handle(&mut group, 0), Outcome::refused(DropReason::BadSource));
        let mut group = addresses(PEER, "2").question(ip("10.9.0.1"), None).unwrap();
        group[28..32].copy_from_slice(&[224, 0, 0, 1]);
        assert_eq!(us.handle(&mut group, 0), Outcome::refused(DropReason::BadSource));
        // A reply to somebody else.
        let mut reply = request.clone();
        reply[21] = 2;
        assert_eq!(us.handle(&mut reply, 0), Outcome::refused(DropReason::NotForUs));
        // Neighbour discovery that came through a router (RFC 4861 section 7.1.1).
        let mut routed = addresses(PEER, "2").question(ip("fd00:9::1"), None).unwrap();
        routed[14 + 7] = 254;
        assert!(matches!(us.handle(&mut routed, 0).answer, Answer::Refused(_)));
    }

    #[test]
    fn every_truncation_is_refused() {
        let a = addresses(PEER, "2");
        let whole = [
            a.question(ip("10.9.0.1"), None).unwrap(),
            a.question(ip("fd00:9::1"), None).unwrap(),
            a.announcement(ip("fd00:9::2")),
        ];
        for frame in whole {
            for len in 0..frame.len() {
                let outcome = us().handle(&mut frame[..len].to_vec(), 0);
                assert!(matches!(outcome.answer, Answer::Refused(_)), "{len}: {outcome:?}");
                assert_eq!((outcome.heard, outcome.conflict), (None, None));
            }
        }
    }

    #[test]
    fn answers_are_rate_limited() {
        let mut us = us();
        let question = addresses(PEER, "2").question(ip("10.9.0.1"), None).unwrap();
        let answered = (0..10_000)
            .filter(|_| us.handle(&mut question.clone(), 7).answer != Answer::Refused(DropReason::RateLimited));
        assert_eq!(answered.count(), 500);
    }
}
