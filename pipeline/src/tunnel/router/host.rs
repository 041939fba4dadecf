//! Packets for the router itself: ARP, neighbour discovery, echo, and packets to closed ports.

use std::net::IpAddr;

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_wire::build::IcmpError;
use wirepath_wire::{EtherType, L4Type, MacAddr, Parser, arp, icmpv4, icmpv6, ndp};

use super::forward::Routed;
use super::tables::{Hop, Interface, RouterTag};
use crate::Context;
use crate::tunnel::headers::ETHERNET_LEN;
use crate::tunnel::policer::{MessageSource, Protocol};
use crate::tunnel::stage::{PuntCode, StageState, View};
use crate::tunnel::tables::Remotes;

/// Content of an ARP or ND message: the address whose owner sent it or that it advertises, the sender's Ethernet
/// address, and the address that it asks for or advertises.
type Message = (IpAddr, MacAddr, IpAddr);

/// Returns the ARP or ND message in a frame.
fn neighbour_message(parser: &Parser, frame: &[u8], len: usize) -> Option<Message> {
    let ethertype = frame.get(12..14).map(|bytes| EtherType(u16::from_be_bytes([bytes[0], bytes[1]])))?;
    if ethertype == EtherType::ARP {
        let arp = arp::Repr::parse(&arp::View::new(frame.get(ETHERNET_LEN..)?).ok()?);
        return Some((arp.sender_ip.into(), arp.sender_mac, arp.target_ip.into()));
    }
    if ethertype != EtherType::IPV6 {
        return None;
    }
    let layers = parser.parse_stack(frame, 0, len).ok()?;
    let ip = layers.ipv6(frame)?;
    let mac = MacAddr(*frame.get(6..12)?.first_chunk()?);
    match ndp::Repr::parse(&ip).ok()?? {
        ndp::Repr::Solicitation { target, .. } => Some((ip.src().into(), mac, target.into())),
        ndp::Repr::Advertisement { target, .. } => Some((target.into(), mac, target.into())),
    }
}

impl View<'_> {
    /// Offers a frame to a group address to the router of its segment. Returns the frame if the segment's other members
    /// get it too.
    #[cold]
    pub(in crate::tunnel) fn offer_to_router(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        packet: Packet,
        segment: u16,
    ) -> Option<Packet> {
        let Some(interface) = self.interface(segment) else { return Some(packet) };
        let message = neighbour_message(&state.parser, packet.data(), packet.len());
        let Some((sender, mac, target)) = message else { return Some(packet) };
        if mac == interface.mac {
            return Some(packet);
        }
        if interface.has_address(target) || interface.has_address(sender) {
            self.punt_message(state, context, packet, segment, sender);
            return None;
        }
        // A neighbour that packets are sent to announces another Ethernet address.
        let known = self.neighbour_mac(context, interface, segment, sender);
        if known.is_some_and(|known| known != mac)
            && let Some(copy) = packet.duplicate(&state.pool)
        {
            context.count_copies(1);
            self.punt_message(state, context, copy, segment, sender);
        }
        Some(packet)
    }

    /// Returns the Ethernet address that packets to a neighbour in this segment get.
    fn neighbour_mac(&self, context: &Context<'_>, interface: &Interface, segment: u16, ip: IpAddr) -> Option<MacAddr> {
        match self.find_route(context, interface.vrf, ip, 0)? {
            Hop::Neighbour(at, mac) if at == segment => Some(mac),
            _ => None,
        }
    }

    /// Passes an ARP or ND message to the control thread, within the limits.
    fn punt_message(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        mut packet: Packet,
        segment: u16,
        sender: IpAddr,
    ) {
        let protocol = if sender.is_ipv4() { Protocol::Arp } else { Protocol::Nd };
        let expected = self.expected_replies.take(sender);
        if !expected && !state.router_policer.admits(protocol, MessageSource::Stranger(sender), context.now()) {
            return context.drop(packet, DropReason::RateLimited);
        }
        packet.set_app(RouterTag::Route(segment).pack());
        context.punt_first(packet, PuntCode::RouterHost.pack());
    }

    /// Processes a frame to the router's Ethernet address that is no IP packet.
    pub(super) fn process_arp(&self, state: &mut StageState, context: &mut Context<'_>, packet: Packet, segment: u16) {
        let Some(interface) = self.interface(segment) else { return context.drop(packet, DropReason::NoSegment) };
        let frame = packet.data();
        if frame.get(12..14).is_none_or(|bytes| *bytes != EtherType::ARP.0.to_be_bytes()) {
            return context.drop(packet, DropReason::UnknownEtherType);
        }
        let Some(view) = frame.get(ETHERNET_LEN..).and_then(|bytes| arp::View::new(bytes).ok()) else {
            return context.drop(packet, DropReason::Truncated);
        };
        let message = arp::Repr::parse(&view);
        // The router itself is the target of replies and of unicast requests.
        if !interface.has_address(message.target_ip.into()) || message.sender_mac == interface.mac {
            return context.drop(packet, DropReason::NotForUs);
        }
        self.punt_message(state, context, packet, segment, message.sender_ip.into());
    }

    /// Returns whether a packet belongs to neighbour discovery.
    pub(super) fn is_neighbour_discovery(&self, packet: &Packet, routed: &Routed<'_>) -> bool {
        let layers = &routed.layers;
        let kind = || packet.data().get(layers.l4()).map(|kind| icmpv6::Type(*kind));
        // Layer-3 tunnels have no Ethernet addresses to ask for.
        let segment = self.layout.segments.get(usize::from(routed.segment));
        segment.is_some_and(|segment| !segment.is_routed_tunnel())
            && layers.l4_type() == L4Type::Icmpv6
            && !layers.is_fragment()
            && matches!(kind(), Some(icmpv6::Type::NEIGHBOR_SOLICITATION | icmpv6::Type::NEIGHBOR_ADVERTISEMENT))
    }

    /// Processes a message of neighbour discovery to the router's Ethernet address.
    pub(super) fn process_nd(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        packet: Packet,
        routed: &Routed<'_>,
    ) {
        let message = routed.layers.ipv6(packet.data()).map(|ip| ndp::Repr::parse(&ip));
        let interface = routed.interface;
        let sender = match message {
            Some(Ok(Some(ndp::Repr::Solicitation { target, .. }))) if interface.has_address(target.into()) => {
                routed.src
            }
            Some(Ok(Some(ndp::Repr::Advertisement { target, .. }))) if interface.has_address(routed.dst) => {
                target.into()
            }
            Some(Err(error)) => return context.drop(packet, error.into()),
            _ => return context.drop(packet, DropReason::NotForUs),
        };
        self.punt_message(state, context, packet, routed.segment, sender);
    }

    /// Processes a packet to an address of the router. It answers echo requests, and datagrams by the error "port
    /// unreachable", which traceroute expects.
    pub(super) fn process_local(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        routed: &Routed<'_>,
    ) {
        let layers = &routed.layers;
        if layers.is_fragment() {
            return context.drop(packet, DropReason::OuterFragment);
        }
        let kind = packet.data().get(layers.l4()).copied();
        let is_echo = match layers.l4_type() {
            L4Type::Icmpv4 => kind == Some(icmpv4::Type::ECHO_REQUEST.0),
            L4Type::Icmpv6 => kind == Some(icmpv6::Type::ECHO_REQUEST.0),
            _ => false,
        };
        if is_echo {
            let source = MessageSource::Stranger(routed.src);
            if !state.router_policer.admits(Protocol::Echo, source, context.now()) {
                return context.drop(packet, DropReason::RateLimited);
            }
            return match state.make_echo_reply(packet, layers) {
                Ok(reply) => self.send_from_router(state, context, remotes, reply, routed.segment),
                Err((packet, reason)) => context.drop(packet, reason),
            };
        }
        if layers.l4_type() == L4Type::Udp
            && let Some(message) = self.error_message(state, context, &packet, routed, IcmpError::PortUnreachable)
        {
            context.count_generated();
            if let Some(c) = self.layout.counters(routed.segment, state.worker) {
                c.icmp_errors.add(1);
            }
            self.send_from_router(state, context, remotes, message, routed.segment);
        }
        context.drop(packet, DropReason::NotForUs);
    }
}
