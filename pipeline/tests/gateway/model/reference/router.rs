//! Routers of the reference: routes, errors, and hosts that do not answer.

use std::collections::VecDeque;
use std::net::IpAddr;

use wirepath_packet::drops::DropReason;
use wirepath_wire::MacAddr;

use super::super::config::{
    Member, NETWORKS, Place, SLOTS, Target, far_router, neighbour, neighbour_slot, reserved_addresses,
    router_addresses, silent_at,
};
use super::super::wire::{self, US, icmp, packets};
use super::{From, Model};

/// Milliseconds between two solicitations, and their number (RFC 4861 section 10).
const RETRANSMIT: u64 = 1000;
const ATTEMPTS: u32 = 3;
/// Packets that wait for one host, and milliseconds for which a host that does not answer stays known.
const QUEUE: usize = 8;
const FAILED_TIME: u64 = 10_000;

/// Result of a lookup of a route.
#[derive(Clone, Copy, Debug)]
enum Route {
    Local,
    /// To an Ethernet address in a segment.
    Forward(usize, MacAddr),
    /// To a host in the network of a segment.
    Connected(usize),
    Tunnel(usize),
    Discard(Target),
    /// To members of a group: VRF and number of the route, and the members.
    Group((usize, usize), u8),
    /// A network or broadcast address.
    NotUnicast,
    /// In the other VRF.
    Lookup,
}

/// A host in the network of a segment that does not answer.
#[derive(Clone, Debug)]
pub(super) struct Silent {
    solicitations: u32,
    deadline: u64,
    /// Time at which it is forgotten, as soon as it has failed.
    forget_at: Option<u64>,
    /// It is a member of a group, and never forgotten.
    pub(super) is_member: bool,
    /// Packets with the slots that they came from.
    queue: VecDeque<(usize, Vec<u8>)>,
}

impl Silent {
    fn new(now: u64, is_member: bool) -> Self {
        Self { solicitations: 1, deadline: now + RETRANSMIT, forget_at: None, is_member, queue: VecDeque::new() }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.forget_at.is_some()
    }
}

/// End of a packet that is not forwarded, with the error for its sender.
type Refusal = (DropReason, Option<Error>);

#[derive(Clone, Copy, Debug)]
enum Error {
    /// The path takes only packets of this length.
    TooBig(usize),
    Other(icmp::IcmpError),
}

impl Model {
    /// Takes a frame to the router of a slot.
    pub(super) fn route(&mut self, slot: usize, frame: &[u8]) {
        // The neighbour of a network answers.
        if let Some(address) = wire::resolution::resolved_address(frame) {
            self.resolved.insert(address);
            return;
        }
        if wire::ethertype(frame) == wire::VLAN {
            return self.drop(DropReason::InnerVlan);
        }
        let Some(packet) = icmp::ip_packet(frame) else { return self.drop(DropReason::UnknownEtherType) };
        // The router forwards the packet without the rest of its frame.
        let frame = [&frame[..14], packet].concat();
        if let Err((reason, error)) = self.try_to_route(slot, &frame) {
            self.refuse(slot, &frame, reason, error);
        }
    }

    fn try_to_route(&mut self, slot: usize, frame: &[u8]) -> Result<(), Refusal> {
        let packet = &frame[14..];
        let (src, to, ttl) = packets::ends(packet);
        let is_v6 = to.is_ipv6();
        if src.is_multicast() {
            return Err((DropReason::BadSource, None));
        }
        if to.is_multicast() && !is_v6 {
            return Err((DropReason::NotRoutable, None));
        }
        let route = self.find_route(self.segment(slot).vrf, to);
        let stays = |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let route = match route {
            Some(Route::Local) => {
                if packets::fragment(packet).0 {
                    return Err((DropReason::OuterFragment, None));
                }
                // Only datagrams find a closed port.
                return Err((
                    DropReason::NotForUs,
                    packets::is_udp(packet).then_some(Error::Other(icmp::PORT_UNREACHABLE)),
                ));
            }
            // Link-local addresses and groups (RFC 4291 section 2.5.6).
            _ if stays(src) || stays(to) || to.is_multicast() => {
                self.count("link-local address or group");
                return Err((DropReason::NotRoutable, None));
            }
            _ if src.is_unspecified() => return Err((DropReason::BadSource, None)),
            None | Some(Route::Discard(Target::Unreachable)) => {
                return Err((DropReason::NoRoute, Some(Error::Other(icmp::NO_ROUTE))));
            }
            Some(Route::Discard(Target::Prohibit)) => {
                return Err((DropReason::Prohibited, Some(Error::Other(icmp::PROHIBITED))));
            }
            Some(Route::Lookup) => unreachable!("a lookup in the other VRF is followed"),
            Some(Route::Discard(_)) => return Err((DropReason::Blackhole, None)),
            Some(Route::NotUnicast) => return Err((DropReason::NotRoutable, None)),
            Some(route) => route,
        };
        if ttl <= 1 {
            self.count(if is_v6 { "hop limit over IPv6" } else { "TTL over IPv4" });
            return Err((DropReason::HopLimit, Some(Error::Other(icmp::TIME_EXCEEDED))));
        }
        let route = match route {
            Route::Group(of, mask) => match self.member_of(of, mask, packet) {
                Member::Neighbour => to_neighbour(of.0),
                Member::Silent => {
                    let (out, host) = silent_at(of.0, is_v6);
                    return self.send_to_silent(out, host, slot, frame);
                }
                Member::Tunnel(out) => Route::Tunnel(out),
                Member::Router(remote) => Route::Forward(0, far_router(remote)),
            },
            route => route,
        };
        match route {
            Route::Connected(out) => self.send_to_silent(out, to, slot, frame),
            Route::Forward(out, mac) => {
                let neighbour = SLOTS[out].network.map(neighbour).filter(|(_, of)| *of == mac);
                let address = neighbour.map(|(addresses, _)| addresses[usize::from(is_v6)]);
                if let Some(address) = address {
                    let is_resolved = self.resolved.contains(&address);
                    if !is_resolved {
                        self.count(if is_v6 { "unresolved neighbour, IPv6" } else { "unresolved neighbour, IPv4" });
                    }
                    // A neighbour has a route of its own only as soon as a packet was for it.
                    if !is_resolved || address == to && !self.host_routes.contains(&(out, to)) {
                        self.waiting.push((address, slot, frame.to_vec()));
                        if address == to {
                            self.new_host_routes.push((out, to));
                        }
                        return Ok(());
                    }
                }
                self.count(if is_v6 { "routed, IPv6" } else { "routed, IPv4" });
                self.forward_packet(out, mac, frame, self.lookup(out, mac))
            }
            Route::Tunnel(out) => {
                self.count(if is_v6 { "routed into a tunnel, IPv6" } else { "routed into a tunnel, IPv4" });
                self.forward_packet(out, US, frame, Some(Place::Remote(self.segment(out).remotes[0])))
            }
            _ => unreachable!("the other routes are refused"),
        }
    }

    /// Lets a frame wait for a host that does not answer.
    fn send_to_silent(&mut self, out: usize, host: IpAddr, slot: usize, frame: &[u8]) -> Result<(), Refusal> {
        if self.silent.get(&(out, host)).is_some_and(Silent::has_failed) {
            self.count("packet to a host that has failed");
            return Err((DropReason::NoNeighbour, Some(Error::Other(icmp::HOST_UNREACHABLE))));
        }
        self.unresolved.push((out, host, slot, frame.to_vec()));
        Ok(())
    }

    /// Forwards a frame to an Ethernet address, which is at this place, in a segment. A packet that is too long is
    /// divided or refused.
    fn forward_packet(&mut self, out: usize, mac: MacAddr, frame: &[u8], to: Option<Place>) -> Result<(), Refusal> {
        let most = |mtu: Option<u16>| mtu.map_or(usize::MAX, usize::from);
        let place = to.map_or(usize::MAX, |place| self.longest_to(out, place).saturating_sub(14));
        let mtu = place.min(most(self.segment(out).mtu));
        let (ethertype, packet) = (wire::ethertype(frame), &frame[14..]);
        let packets = match packet.len() > mtu {
            true if packets::may_be_divided(packet) => packets::divided(packet, mtu),
            true => return Err((DropReason::TooBigForMtu, Some(Error::TooBig(mtu)))),
            false => vec![packet.to_vec()],
        };
        if packets.len() > 1 {
            self.count("divided by a router");
        }
        for packet in packets {
            let frame = wire::ethernet(mac, US, ethertype, &packets::forwarded(&packet));
            match to {
                None => self.flood(out, From::Router, &frame),
                Some(Place::Port(to)) => self.deliver(out, to, &frame),
                Some(Place::Remote(remote)) => _ = self.send(out, remote, &frame, None),
                Some(Place::Router) => self.drop(DropReason::NoDestination),
            }
        }
        Ok(())
    }

    /// Drops a frame to the router of a slot and sends the error to its sender.
    fn refuse(&mut self, slot: usize, frame: &[u8], reason: DropReason, error: Option<Error>) {
        self.drop(reason);
        let Some(from) = self.error_source(slot, wire::ethertype(frame) == wire::IPV6) else { return };
        let message = match error {
            Some(Error::TooBig(mtu)) => icmp::too_big(frame, US, from, mtu),
            Some(Error::Other(error)) => icmp::icmp_error(frame, US, from, error, 0),
            None => None,
        };
        let Some(message) = message else { return };
        if let Some(Error::TooBig(_)) = error {
            self.count(if from.is_ipv6() { "Packet Too Big" } else { "Fragmentation Needed" });
        }
        self.count(if from.is_ipv6() { "error of a router, IPv6" } else { "error of a router, IPv4" });
        self.forward(slot, &message);
    }

    /// Returns the source of errors from the router of a slot: its address there. A tunnel without addresses uses the
    /// first one of its VRF.
    fn error_source(&self, slot: usize, is_v6: bool) -> Option<IpAddr> {
        let vrf = self.segment(slot).vrf;
        let network = |slot: usize| SLOTS[slot].network.filter(|_| self.config.segment_in(slot, vrf).is_some());
        let network = network(slot).or_else(|| (0..SLOTS.len()).find_map(network))?;
        Some(router_addresses(network)[usize::from(is_v6)])
    }

    /// Sends a frame of the router of a slot there.
    fn forward(&mut self, slot: usize, frame: &[u8]) {
        match self.lookup(slot, wire::destination(frame)) {
            None => self.flood(slot, From::Router, frame),
            Some(Place::Port(to)) => self.deliver(slot, to, frame),
            Some(Place::Remote(remote)) => _ = self.send(slot, remote, frame, None),
            Some(Place::Router) => self.drop(DropReason::NoDestination),
        }
    }

    /// Finds the route in a VRF, and in the other one where the route says so. VRFs that refer to each other have none.
    fn find_route(&self, vrf: usize, to: IpAddr) -> Option<Route> {
        match self.find_route_in(vrf, to) {
            Some(Route::Lookup) => self.find_route_in(1 - vrf, to).filter(|route| !matches!(route, Route::Lookup)),
            found => found,
        }
    }

    fn find_route_in(&self, vrf: usize, to: IpAddr) -> Option<Route> {
        let mut best: Option<(u8, Route)> = None;
        let mut offer = |network: IpAddr, len: u8, route: Route| {
            if contains(network, len, to) && best.is_none_or(|(known, _)| known < len) {
                best = Some((len, route));
            }
        };
        for (slot, network) in SLOTS.iter().enumerate().filter_map(|(slot, it)| Some((slot, it.network?))) {
            if self.config.segment_in(slot, vrf).is_none() {
                continue;
            }
            let (hosts, mac) = neighbour(network);
            for (router, host) in router_addresses(network).into_iter().zip(hosts) {
                let (len, of_network) = if host.is_ipv6() { (128, 64) } else { (32, 24) };
                offer(router, of_network, Route::Connected(slot));
                offer(router, len, Route::Local);
                offer(host, len, Route::Forward(slot, mac));
            }
            reserved_addresses(network).into_iter().for_each(|it| offer(it, 32, Route::NotUnicast));
        }
        for (number, (network, len)) in NETWORKS.into_iter().enumerate() {
            let Some(target) = self.config.route(vrf, number) else { continue };
            let route = match target {
                Target::Tunnel(slot) => Route::Tunnel(slot),
                Target::Router(remote) => Route::Forward(0, far_router(remote)),
                Target::Neighbour => to_neighbour(vrf),
                Target::Lookup => Route::Lookup,
                Target::Group(mask) => Route::Group((vrf, number), mask),
                discard => Route::Discard(discard),
            };
            offer(network, len, route);
        }
        best.map(|(_, route)| route)
    }

    /// Number of packets that wait for hosts that do not answer.
    pub(crate) fn waiting_packets(&self) -> usize {
        self.silent.values().map(|it| it.queue.len()).sum()
    }

    /// Lets packets wait that a worker could not send. They are refused later.
    pub(super) fn take_unresolved(&mut self) -> Vec<(usize, Vec<u8>)> {
        let (mut refused, now) = (Vec::new(), self.milliseconds());
        for (out, to, slot, frame) in std::mem::take(&mut self.unresolved) {
            self.count(if to.is_ipv6() { "silent host, IPv6" } else { "silent host, IPv4" });
            let host = self.silent.entry((out, to)).or_insert_with(|| Silent::new(now, false));
            // A new packet takes the place of the oldest one (RFC 4861 section 7.2.2).
            if host.queue.len() >= QUEUE {
                refused.extend(host.queue.pop_front());
            }
            host.queue.push_back((slot, frame));
        }
        refused
    }

    /// Asks hosts again that have not answered, or gives up. Returns packets to be refused.
    pub(super) fn solicit(&mut self) -> Vec<(usize, Vec<u8>)> {
        let (mut refused, now) = (Vec::new(), self.milliseconds());
        for host in self.config.silent_members().into_keys() {
            self.silent.entry(host).or_insert_with(|| Silent::new(now, true));
        }
        for host in self.silent.values_mut().filter(|it| it.forget_at.is_none() && now >= it.deadline) {
            if host.solicitations < ATTEMPTS {
                host.solicitations += 1;
                host.deadline = now + RETRANSMIT;
            } else {
                host.forget_at = Some(now + FAILED_TIME);
                refused.extend(host.queue.drain(..));
            }
        }
        self.silent.retain(|_, host| host.is_member || host.forget_at.is_none_or(|at| now < at));
        refused
    }

    /// Refuses packets whose host has not answered.
    pub(super) fn refuse_unanswered(&mut self, refused: Vec<(usize, Vec<u8>)>) {
        for (slot, frame) in refused {
            self.count("waiting packet that was refused");
            self.refuse(slot, &frame, DropReason::NoNeighbour, Some(Error::Other(icmp::HOST_UNREACHABLE)));
        }
    }
}

/// Returns the route to the neighbour that is a next hop in a VRF.
fn to_neighbour(vrf: usize) -> Route {
    let slot = neighbour_slot(vrf);
    Route::Forward(slot, neighbour(SLOTS[slot].network.expect("a router")).1)
}

/// Returns whether an address is in a network with this number of bits.
fn contains(network: IpAddr, len: u8, address: IpAddr) -> bool {
    match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => (network.to_bits() ^ address.to_bits()) >> (32 - len) == 0,
        (IpAddr::V6(network), IpAddr::V6(address)) => (network.to_bits() ^ address.to_bits()) >> (128 - len) == 0,
        _ => false,
    }
}
