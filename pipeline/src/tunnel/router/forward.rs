//! The workers' part of routing.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_packet::fragment::Fragmenter;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::longest_frame;
use wirepath_wire::build::{IcmpError, icmp_error, max_icmp_error_len};
use wirepath_wire::{HeaderOffsets, L3Type, MacAddr, checksum, ipv4};

use super::config::{Discard, SourceCheck};
use super::fast::UNICAST;
use super::tables::{Hop, Interface, MAX_LOOKUPS, RouterTag, Unresolved};
use crate::Context;
use crate::table::{Key, NO_DESTINATION};
use crate::tunnel::encap::cut;
use crate::tunnel::headers::{ETHERNET_LEN, QuoteRoom};
use crate::tunnel::report::STAGE;
use crate::tunnel::stage::{Flow, PuntCode, StageState, View};
use crate::tunnel::tables::{Destination, Remote, Remotes};

/// Number of header bytes that are parsed: Ethernet, IPv6 with some extension headers, and ICMP.
pub(super) const HEADERS: usize = 256;

/// A packet to be routed: its headers and the segment that it came from.
#[derive(Clone, Copy)]
pub(super) struct Routed<'v> {
    pub(super) layers: HeaderOffsets,
    /// Index of the segment.
    pub(super) segment: u16,
    /// Router of that segment.
    pub(super) interface: &'v Interface,
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
}

/// End of a packet that is not forwarded.
struct Refusal {
    reason: DropReason,
    /// Error for the sender.
    error: Option<IcmpError>,
}

impl From<DropReason> for Refusal {
    fn from(reason: DropReason) -> Self {
        Self { reason, error: None }
    }
}

impl Refusal {
    const fn with(reason: DropReason, error: IcmpError) -> Self {
        Self { reason, error: Some(error) }
    }
}

/// Result of the lookup for a packet.
enum Decision {
    /// The packet is for the router itself.
    Local,
    /// The packet goes to this address in this segment.
    Forward(u16, MacAddr),
    /// The control thread has to resolve the next hop.
    Resolve(Unresolved),
}

impl<'v> View<'v> {
    /// Returns the router of a segment.
    #[inline]
    pub(super) fn interface(&self, segment: u16) -> Option<&'v Interface> {
        self.layout.segments.get(usize::from(segment))?.router.as_ref()
    }

    /// Processes a packet that the control thread returned.
    #[cold]
    pub(in crate::tunnel) fn process_returned(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        mut packet: Packet,
    ) {
        let remotes = self.remotes.read(context.guard());
        let tag = RouterTag::unpack(packet.app());
        packet.set_app([0; 2]);
        match tag {
            Some(RouterTag::Route(segment)) => self.route_admitted(state, context, remotes, packet, segment, true),
            Some(RouterTag::Unreachable(segment)) => {
                let refusal = Refusal::with(DropReason::NoNeighbour, IcmpError::HostUnreachable);
                match self.examine(state, &mut packet, segment) {
                    Ok(routed) => self.refuse(state, context, remotes, packet, &routed, &refusal),
                    Err(reason) => context.drop(packet, reason),
                }
            }
            Some(RouterTag::Send(segment)) => self.send_from_router(state, context, remotes, packet, segment),
            None => context.drop(packet, DropReason::NoSegment),
        }
    }

    /// Routes a frame that was sent to the router of a segment.
    #[cold]
    #[inline(never)]
    pub(in crate::tunnel) fn route(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        segment: u16,
    ) {
        self.route_admitted(state, context, remotes, packet, segment, false);
    }

    /// Does what [`Self::route`] does. A packet that waited for its next hop has passed the filter before.
    fn route_admitted(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
        segment: u16,
        is_admitted: bool,
    ) {
        let routed = match self.examine(state, &mut packet, segment) {
            Ok(routed) => routed,
            Err(DropReason::UnknownEtherType) => return self.process_arp(state, context, packet, segment),
            Err(reason) => return context.drop(packet, reason),
        };
        if self.is_neighbour_discovery(&packet, &routed) {
            return self.process_nd(state, context, packet, &routed);
        }
        if let Some(filter) = routed.interface.filter.as_deref().filter(|_| !is_admitted)
            && let Err(reason) = filter.admit(state.worker, context, &mut packet)
        {
            return context.drop(packet, reason);
        }
        let len = packet.len();
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.routed_in.add(1, len);
        }
        let flow = Flow::from_frame(packet.data(), len, &state.parser);
        match self.decide(context, &packet, &routed, flow) {
            Ok(Decision::Local) => self.process_local(state, context, remotes, packet, &routed),
            Ok(Decision::Forward(to, mac)) => {
                self.forward(state, context, remotes, packet, &routed, (to, mac), flow);
            }
            Ok(Decision::Resolve(next)) if state.policer.admits_unresolved(context.now()) => {
                packet.set_app([RouterTag::Route(segment).pack()[0], next.pack()]);
                context.punt(packet, PuntCode::Route.pack());
            }
            Ok(Decision::Resolve(_)) => context.drop(packet, DropReason::NoNeighbour),
            Err(refusal) => self.refuse(state, context, remotes, packet, &routed, &refusal),
        }
    }

    /// Checks the headers of a packet to be routed (RFC 1812 section 5.2.2, RFC 8200). Removes what follows the packet
    /// in its frame.
    fn examine(&self, state: &StageState, packet: &mut Packet, segment: u16) -> Result<Routed<'v>, DropReason> {
        let interface = self.interface(segment).ok_or(DropReason::NoSegment)?;
        packet.pull_up(packet.len().min(HEADERS));
        let frame = packet.data();
        let layers = state.parser.parse_stack(frame, 0, packet.len()).map_err(DropReason::from)?;
        if layers.tag_count() > 0 || layers.has_labels() || packet.vlan().is_some() {
            return Err(DropReason::InnerVlan);
        }
        let (src, dst) = match layers.l3_type() {
            L3Type::Ipv4 => {
                let h = layers.ipv4_header(frame).ok_or(DropReason::Truncated)?;
                let address = |at: usize| Ipv4Addr::new(h[at], h[at + 1], h[at + 2], h[at + 3]);
                let (src, dst) = (address(12), address(16));
                if !is_unicast4(src) {
                    return Err(DropReason::BadSource);
                }
                if !is_unicast4(dst) {
                    return Err(DropReason::NotRoutable);
                }
                (IpAddr::V4(src), IpAddr::V4(dst))
            }
            L3Type::Ipv6 => {
                let h = layers.ipv6_header(frame).ok_or(DropReason::Truncated)?;
                let address = |at: usize| h.get(at..).and_then(|b| b.first_chunk::<16>()).map(|b| Ipv6Addr::from(*b));
                let (src, dst) = (address(8).ok_or(DropReason::Truncated)?, address(24).ok_or(DropReason::Truncated)?);
                // Duplicate address detection has the unspecified source (RFC 4862 section 5.4.2).
                if src.is_multicast() || src.is_loopback() {
                    return Err(DropReason::BadSource);
                }
                if dst.is_unspecified() || dst.is_loopback() {
                    return Err(DropReason::NotRoutable);
                }
                (IpAddr::V6(src), IpAddr::V6(dst))
            }
            L3Type::Arp | L3Type::Other => return Err(DropReason::UnknownEtherType),
        };
        if layers.end() < packet.len() {
            let _ = packet.truncate(layers.end());
        }
        Ok(Routed { layers, segment, interface, src, dst })
    }

    /// Looks up the routes to destination and source, and checks the TTL.
    fn decide(
        &self,
        context: &mut Context<'_>,
        packet: &Packet,
        routed: &Routed<'_>,
        flow: Flow,
    ) -> Result<Decision, Refusal> {
        let link_local = |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let vrf = routed.interface.vrf;
        let hop = self.find_route(context, vrf, routed.dst, flow.entropy);
        if context.is_tracing() {
            let (src, dst) = (routed.src, routed.dst);
            context.trace(STAGE, |text| write!(text, "route {src} to {dst} in VRF {vrf}: {hop:?}"));
        }
        let hop = match hop {
            Some(Hop::Local) => return Ok(Decision::Local),
            // Packets with such addresses stay on their link (RFC 4291 section 2.5.6). Groups are not routed.
            _ if link_local(routed.src) || link_local(routed.dst) || routed.dst.is_multicast() => {
                return Err(DropReason::NotRoutable.into());
            }
            _ if routed.src.is_unspecified() => return Err(DropReason::BadSource.into()),
            None | Some(Hop::Discard(Discard::Unreachable)) => {
                return Err(Refusal::with(DropReason::NoRoute, IcmpError::NoRoute));
            }
            Some(Hop::Discard(Discard::Blackhole)) => return Err(DropReason::Blackhole.into()),
            Some(Hop::Discard(Discard::Prohibit)) => {
                return Err(Refusal::with(DropReason::Prohibited, IcmpError::Prohibited));
            }
            Some(Hop::NotUnicast) => return Err(DropReason::NotRoutable.into()),
            Some(hop) => hop,
        };
        self.check_source(context, routed, flow)?;
        if routed.layers.hop_limit(packet.data()).unwrap_or(0) <= 1 {
            return Err(Refusal::with(DropReason::HopLimit, IcmpError::TimeExceeded));
        }
        match hop {
            Hop::Neighbour(segment, mac) => Ok(Decision::Forward(segment, mac)),
            Hop::Connected(segment) => Ok(Decision::Resolve(Unresolved::Destination(segment))),
            Hop::Resolving(_, index) => Ok(Decision::Resolve(Unresolved::Hop(index))),
            Hop::Unreachable(_) => Err(Refusal::with(DropReason::NoNeighbour, IcmpError::HostUnreachable)),
            // The lookup ends with none of these.
            Hop::Local | Hop::Group(_) | Hop::Vrf(_) | Hop::Discard(_) | Hop::NotUnicast => {
                Err(DropReason::NoRoute.into())
            }
        }
    }

    /// Finds the hop of an address, through other VRFs too. `None`: there is no route, or the VRFs form a loop.
    pub(super) fn find_route(&self, context: &Context<'_>, mut vrf: u16, ip: IpAddr, hash: u32) -> Option<Hop> {
        let routes = self.routes.view(context.guard());
        let hops = self.hops.read(context.guard());
        for _ in 0..MAX_LOOKUPS {
            let index = match ip {
                IpAddr::V4(ip) => routes.lookup4(vrf, ip.to_bits()),
                IpAddr::V6(ip) => routes.lookup6(vrf, ip.to_bits()),
            };
            match hops.find(index, hash)? {
                Hop::Vrf(other) => vrf = other,
                hop => return Some(hop),
            }
        }
        None
    }

    /// Checks the source of a packet (RFC 3704 sections 2.2 and 2.4).
    fn check_source(&self, context: &Context<'_>, routed: &Routed<'_>, flow: Flow) -> Result<(), DropReason> {
        let check = routed.interface.source_check;
        if check == SourceCheck::Off {
            return Ok(());
        }
        let hop = self.find_route(context, routed.interface.vrf, routed.src, flow.entropy);
        if source_is_valid(hop, check, routed.segment) { Ok(()) } else { Err(DropReason::SourceCheck) }
    }

    /// Rewrites a packet and sends it to a neighbour.
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
        routed: &Routed<'_>,
        (segment, mac): (u16, MacAddr),
        flow: Flow,
    ) {
        let Some(out) = self.interface(segment) else { return context.drop(packet, DropReason::NoSegment) };
        let key = Key::new(segment, mac);
        let to = Some(self.fdb.table(context.guard()).lookup(key)).filter(|to| *to != NO_DESTINATION);
        let to = to.map(|to| self.choose(context, Destination::unpack(to), flow.entropy));
        let most = self.longest_frame_to(remotes, to).min(out.mtu + ETHERNET_LEN);
        if packet.len() > most && longest_frame(&packet) > most {
            if may_be_fragmented(&packet, &routed.layers) {
                rewrite(packet.data_mut(), &routed.layers, mac, out.mac);
                return self.send_fragments(state, context, remotes, packet, (segment, to, most), flow);
            }
            let mtu = u16::try_from(most.saturating_sub(ETHERNET_LEN)).unwrap_or(u16::MAX);
            let refusal = Refusal::with(DropReason::TooBigForMtu, IcmpError::TooBig(mtu));
            return self.refuse(state, context, remotes, packet, routed, &refusal);
        }
        rewrite(packet.data_mut(), &routed.layers, mac, out.mac);
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.routed_out.add(1, packet.len());
        }
        if context.is_tracing() {
            self.report_lookup(context, remotes, key, to);
        }
        self.send_in_segment(state, context, remotes, packet, segment, to, flow);
    }

    /// Divides a rewritten IPv4 packet without DF into fragments, and sends them (RFC 1812 section 5.2.6). `to` is the
    /// segment, the destination and its longest frame.
    #[cold]
    fn send_fragments(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        to: (u16, Option<Destination>, usize),
        flow: Flow,
    ) {
        if !packet.flags().contains(Flags::TX_SEGMENT) {
            return self.send_fragments_of(state, context, remotes, packet, to, flow);
        }
        cut(state, context, packet, |state, context, frame| {
            self.send_fragments_of(state, context, remotes, frame, to, flow);
        });
    }

    fn send_fragments_of(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        (segment, to, most): (u16, Option<Destination>, usize),
        flow: Flow,
    ) {
        let Ok(layers) = state.parser.parse_stack(packet.data(), 0, packet.len()) else {
            return context.drop(packet, DropReason::Truncated);
        };
        let mut fragments = match Fragmenter::new(packet, &layers, most.saturating_sub(ETHERNET_LEN)) {
            Ok(fragments) => fragments,
            Err((packet, reason)) => return context.drop(packet, reason),
        };
        // One of the fragments stands for the packet.
        context.count_copies(fragments.remaining().saturating_sub(1));
        while let Some(fragment) = fragments.next_fragment(&state.pool) {
            match fragment {
                Ok(fragment) => {
                    if let Some(c) = self.layout.counters(segment, state.worker) {
                        c.routed_out.add(1, fragment.len());
                    }
                    self.send_in_segment(state, context, remotes, fragment, segment, to, flow);
                }
                Err(reason) => context.count_drops(reason, 1),
            }
        }
    }

    /// Returns the length of the longest frame that a destination takes.
    pub(super) fn longest_frame_to(&self, remotes: &Remotes, to: Option<Destination>) -> usize {
        match to {
            Some(Destination::Attachment(index)) => {
                self.layout.attachments.get(index as usize).map_or(0, |attachment| attachment.max_frame)
            }
            Some(Destination::Remote(index)) => remotes.list.get(index as usize).map_or(0, Remote::longest_frame),
            Some(Destination::Group(_) | Destination::Router) | None => usize::MAX,
        }
    }

    /// Sends a frame of the router itself in a segment.
    pub(super) fn send_from_router(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        segment: u16,
    ) {
        let Some(dst) = packet.data().first_chunk().map(|mac| MacAddr(*mac)) else {
            return context.drop(packet, DropReason::TooShort);
        };
        let found = self.fdb.table(context.guard()).lookup(Key::new(segment, dst));
        let flow = Flow::from_frame(packet.data(), packet.len(), &state.parser);
        let is_known = dst.is_unicast() && found != NO_DESTINATION;
        let to = is_known.then(|| self.choose(context, Destination::unpack(found), flow.entropy));
        self.send_in_segment(state, context, remotes, packet, segment, to, flow);
    }

    /// Bridges a frame from the router of a segment to its destination there.
    #[allow(clippy::too_many_arguments)]
    fn send_in_segment(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        segment: u16,
        to: Option<Destination>,
        flow: Flow,
    ) {
        match to {
            Some(Destination::Attachment(to)) => self.deliver(state, context, packet, to),
            Some(Destination::Remote(to)) => self.send_to(state, context, remotes, packet, to, flow, None),
            Some(Destination::Group(_)) => context.drop(packet, DropReason::RemoteDown),
            // A route that leads back to the router itself.
            Some(Destination::Router) => context.drop(packet, DropReason::NoDestination),
            None => self.flood(state, context, remotes, packet, Destination::Router, segment, flow),
        }
    }

    /// Drops a packet and sends the error to its sender, within the rate limit.
    fn refuse(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        routed: &Routed<'_>,
        refusal: &Refusal,
    ) {
        if let Some(error) = refusal.error
            && let Some(message) = self.error_message(state, context, &packet, routed, error)
        {
            context.trace(STAGE, |text| write!(text, "the sender gets the ICMP error {error:?}"));
            context.count_generated();
            if let Some(c) = self.layout.counters(routed.segment, state.worker) {
                c.icmp_errors.add(1);
            }
            self.send_from_router(state, context, remotes, message, routed.segment);
        }
        context.drop(packet, refusal.reason);
    }

    /// Builds an ICMP error. It goes back to the Ethernet address that the packet came from, which is the sender or the
    /// router towards it.
    pub(super) fn error_message(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        packet: &Packet,
        routed: &Routed<'_>,
        error: IcmpError,
    ) -> Option<Packet> {
        let from = match routed.layers.l3_type() {
            L3Type::Ipv4 => IpAddr::V4(routed.interface.error_source4?),
            _ => IpAddr::V6(routed.interface.error_source6?),
        };
        let layers = &routed.layers;
        if !state.icmp_limiter.take(1, context.now()) {
            return None;
        }
        let mut message = state.pool.take()?;
        let mut room = QuoteRoom::new();
        let out = message.append(max_icmp_error_len(layers).min(message.tailroom()))?;
        let len = icmp_error(out, room.quote(packet), layers, routed.interface.mac, from, error).ok()?;
        message.truncate(len);
        message.set_in_port(packet.in_port());
        Some(message)
    }
}

/// Returns whether a router may divide a packet into fragments: it is IPv4 without the flag DF.
fn may_be_fragmented(packet: &Packet, layers: &HeaderOffsets) -> bool {
    let word = layers.ipv4_header(packet.data()).map(|h| u16::from_be_bytes([h[6], h[7]]));
    word.is_some_and(|word| word & ipv4::DONT_FRAGMENT == 0)
}

/// Returns whether a packet from a segment may have a source to which this hop leads.
pub(super) fn source_is_valid(hop: Option<Hop>, check: SourceCheck, segment: u16) -> bool {
    let to = match hop {
        Some(Hop::Neighbour(to, _) | Hop::Connected(to)) => to,
        Some(Hop::Resolving(to, _) | Hop::Unreachable(to)) => to,
        // An own address is no source of a received packet.
        Some(Hop::Local | Hop::Discard(_) | Hop::NotUnicast | Hop::Group(_) | Hop::Vrf(_)) | None => {
            return check == SourceCheck::Off;
        }
    };
    check != SourceCheck::Strict || to == segment
}

/// Writes the Ethernet addresses of a routed frame and decrements its TTL or hop limit, which is greater than 1.
#[inline]
fn rewrite(frame: &mut [u8], layers: &HeaderOffsets, dst: MacAddr, src: MacAddr) {
    if let Some(ethernet) = frame.first_chunk_mut::<12>() {
        ethernet[..6].copy_from_slice(&dst.0);
        ethernet[6..].copy_from_slice(&src.0);
    }
    let l3 = layers.l3();
    let Some(ip) = frame.get_mut(l3..) else { return };
    if layers.l3_type() == L3Type::Ipv4 {
        if let Some(h) = ip.first_chunk_mut::<20>() {
            let sum = checksum::after_ttl_decrement(u16::from_be_bytes([h[10], h[11]]));
            h[8] = h[8].wrapping_sub(1);
            h[10..12].copy_from_slice(&sum.to_be_bytes());
        }
    } else if let Some(hop_limit) = ip.get_mut(7) {
        *hop_limit = hop_limit.wrapping_sub(1);
    }
}

/// Returns whether packets with this source or destination may be routed: networks 0 and 127, groups and reserved
/// addresses are not (RFC 1812 sections 4.2.2.11 and 5.3.7).
fn is_unicast4(ip: Ipv4Addr) -> bool {
    UNICAST[usize::from(ip.octets()[0])]
}
