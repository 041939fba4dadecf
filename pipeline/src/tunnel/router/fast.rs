//! Fast path of routing: the plain packets of a batch, all at a time.
//!
//! The bridge marks the frames of a batch whose destination is a router. This module takes the plain ones of them
//! through these passes, each over all packets, so that cache misses overlap:
//!
//! 1. Headers: an IPv4 packet without options or an IPv6 packet without extensions, both whole, valid and unicast.
//! 2. Routes to the destinations, once for consecutive packets to the same one, and to sources if they are checked
//!    (uRPF).
//! 3. Next hops in the forwarding database, once for consecutive destinations with the same one.
//! 4. Ethernet addresses, TTL, tunnel headers, output port.
//!
//! Passes 1 to 3 and the checks of pass 4 change nothing. A packet that they do not find plain stays marked, and
//! [`View::route`] processes it with the same result. It reports errors, resolves next hops and handles all rare forms.

use std::net::IpAddr;

use wirepath_packet::offload::ChecksumStatus;
use wirepath_packet::{BATCH, Packet};
use wirepath_wire::build::OuterHeaders;
use wirepath_wire::{IpProtocol, MacAddr, checksum, icmpv6, ipv6};

use super::config::SourceCheck;
use super::forward::{HEADERS, source_is_valid};
use super::tables::{Hop, Interface};
use crate::Context;
use crate::route::RouteView;
use crate::table::{Key, NO_DESTINATION};
use crate::tunnel::encap::{be64, encapsulate, encapsulate_in_nic, quick_flow};
use crate::tunnel::headers::{ETHERNET_LEN, VLAN_TAG_LEN};
use crate::tunnel::stage::{Flow, Scratch, StageState, View, adapt_to_attachment};
use crate::tunnel::tables::{Attachment, Destination, NextHop, Remote, Remotes};

/// Ethernet and IPv4 header, and eight bytes of the next one.
const HEADERS4: usize = 42;
/// Ethernet and IPv6 header, and eight bytes of the next one.
const HEADERS6: usize = 62;

/// Arrays that one pass fills for the next. They are reused, as those of [`crate::tunnel::stage::Scratch`].
#[derive(Debug)]
pub(in crate::tunnel) struct RouteScratch {
    v4: Plain<u32>,
    v6: Plain<u128>,
    targets: Targets,
}

/// Plain packets of one segment and IP version.
#[derive(Debug)]
struct Plain<A> {
    count: usize,
    /// Position of each packet in its batch, and its target.
    at: [u8; BATCH],
    target: [u8; BATCH],
    sources: [A; BATCH],
    /// Number of targets, which are consecutive packets to the same destination, and their destinations.
    targets: usize,
    destinations: [A; BATCH],
}

/// Effects of the routes to targets.
#[derive(Debug)]
struct Targets {
    /// Values of the routes.
    values: [u32; BATCH],
    /// Next hop of each target as the number of an entry below, or one of [`SLOW`] and [`BY_FLOW`].
    next_hop: [u8; BATCH],
    /// Next hops, without those that repeat the one before, and their destinations in the forwarding database.
    keys: [Key; BATCH],
    places: [u32; BATCH],
}

/// Number for targets of the slow path.
const SLOW: u8 = u8::MAX;
/// Number for targets whose next hop depends on the flow.
const BY_FLOW: u8 = u8::MAX - 1;

impl Default for RouteScratch {
    fn default() -> Self {
        let targets =
            Targets { values: [0; BATCH], next_hop: [0; BATCH], keys: [Key::from_u64(0); BATCH], places: [0; BATCH] };
        Self { v4: Plain::new(), v6: Plain::new(), targets }
    }
}

impl<A: Address> Plain<A> {
    fn new() -> Self {
        Self {
            count: 0,
            at: [0; BATCH],
            target: [0; BATCH],
            sources: [A::default(); BATCH],
            targets: 0,
            destinations: [A::default(); BATCH],
        }
    }

    /// Adds a packet. There is room for a batch.
    #[inline(always)]
    fn push(&mut self, at: usize, (source, destination): (A, A)) {
        let (n, last) = (self.count % BATCH, self.targets.wrapping_sub(1));
        if self.targets == 0 || self.destinations[last % BATCH] != destination {
            self.destinations[self.targets % BATCH] = destination;
            self.targets += 1;
        }
        (self.at[n], self.target[n], self.sources[n]) = (at as u8, (self.targets - 1) as u8, source);
        self.count = n + 1;
    }
}

/// An IP address, with what depends on the IP version.
trait Address: Copy + Default + PartialEq {
    /// Returns the arrays of this IP version.
    fn arrays(scratch: &mut RouteScratch) -> (&mut Plain<Self>, &mut Targets);

    fn ip(self) -> IpAddr;

    /// Looks up the routes of all addresses.
    fn lookup(routes: &RouteView<'_>, vrf: u16, addresses: &[Self], values: &mut [u32]);

    /// Writes the Ethernet addresses, and decrements the TTL of a plain packet. Returns the length of the frame without
    /// what follows the packet. Does nothing and returns `None` if that is more than `max_len`.
    fn rewrite(frame: &mut [u8], addresses: &[u8; 12], max_len: usize) -> Option<usize>;
}

impl Address for u32 {
    #[inline(always)]
    fn arrays(scratch: &mut RouteScratch) -> (&mut Plain<Self>, &mut Targets) {
        (&mut scratch.v4, &mut scratch.targets)
    }

    fn ip(self) -> IpAddr {
        IpAddr::V4(self.into())
    }

    #[inline(always)]
    fn lookup(routes: &RouteView<'_>, vrf: u16, addresses: &[Self], values: &mut [u32]) {
        routes.lookup4_batch(vrf, addresses, values);
    }

    #[inline(always)]
    fn rewrite(frame: &mut [u8], addresses: &[u8; 12], max_len: usize) -> Option<usize> {
        let h = frame.first_chunk_mut::<HEADERS4>()?;
        let len = ETHERNET_LEN + usize::from(u16::from_be_bytes([h[16], h[17]]));
        if len > max_len {
            return None;
        }
        h[..12].copy_from_slice(addresses);
        let old = u16::from_be_bytes([h[22], h[23]]);
        let sum = checksum::update(u16::from_be_bytes([h[24], h[25]]), old, old.wrapping_sub(0x100));
        h[22] = h[22].wrapping_sub(1);
        h[24..26].copy_from_slice(&sum.to_be_bytes());
        Some(len)
    }
}

impl Address for u128 {
    #[inline(always)]
    fn arrays(scratch: &mut RouteScratch) -> (&mut Plain<Self>, &mut Targets) {
        (&mut scratch.v6, &mut scratch.targets)
    }

    fn ip(self) -> IpAddr {
        IpAddr::V6(self.into())
    }

    #[inline(always)]
    fn lookup(routes: &RouteView<'_>, vrf: u16, addresses: &[Self], values: &mut [u32]) {
        routes.lookup6_batch(vrf, addresses, values);
    }

    #[inline(always)]
    fn rewrite(frame: &mut [u8], addresses: &[u8; 12], max_len: usize) -> Option<usize> {
        let h = frame.first_chunk_mut::<HEADERS6>()?;
        let len = ETHERNET_LEN + ipv6::HEADER_LEN + usize::from(u16::from_be_bytes([h[18], h[19]]));
        if len > max_len {
            return None;
        }
        h[..12].copy_from_slice(addresses);
        h[21] = h[21].wrapping_sub(1);
        Some(len)
    }
}

/// Returns whether the parser finds no error in the header after the IP header. `at` is its offset in the frame, and
/// `len` is the length of the packet from there. The first eight bytes are there.
#[inline(always)]
fn transport_is_valid(frame: &[u8], at: usize, len: usize, protocol: u8) -> bool {
    match IpProtocol(protocol) {
        IpProtocol::TCP => {
            let header = frame.get(at + 12).map_or(0, |byte| usize::from(byte >> 4) * 4);
            (20..=len).contains(&header)
        }
        IpProtocol::UDP => {
            let bytes = frame.get(at + 4..).and_then(|bytes| bytes.first_chunk());
            let datagram = bytes.map_or(0, |bytes| usize::from(u16::from_be_bytes(*bytes)));
            (8..=len).contains(&datagram)
        }
        // The headers of ICMP and ESP have eight bytes. Other protocols are not examined.
        _ => len >= 8,
    }
}

/// True for the first byte of IPv4 addresses that are routed. Networks 0 and 127, groups and reserved addresses are not
/// (RFC 1812 section 5.3.7).
pub(super) const UNICAST: [bool; 256] = {
    let mut unicast = [false; 256];
    let mut first = 1;
    while first < 224 {
        unicast[first] = first != 127;
        first += 1;
    }
    unicast
};

/// Returns source and destination of a plain IPv4 packet in a frame of `len` bytes. `None`: the packet may be valid,
/// but it is not plain.
#[inline(always)]
fn plain4(frame: &[u8], len: usize) -> Option<(u32, u32)> {
    let h = frame.first_chunk::<HEADERS4>()?;
    let (version, fragment, addresses) = (be64(h, 12), be64(h, 20), be64(h, 26));
    // Each term is zero if its field has the expected value: version 4, five words of header, no fragment.
    let mut wrong = (version >> 40) ^ 0x08_0045;
    wrong |= fragment >> 48 & 0x3fff;
    // The ones' complement sum does not depend on the word size (RFC 1071 section 2).
    let low = 0xffff_ffff;
    let (first, second) = (be64(h, 14), be64(h, 22));
    let sum = (first >> 32) + (first & low) + (second >> 32) + (second & low) + (addresses & low);
    let sum = (sum >> 32) + (sum & low);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    wrong |= ((sum >> 16) + (sum & 0xffff)) ^ 0xffff;
    let (total, ttl) = ((version >> 16 & 0xffff) as usize, fragment >> 40 & 0xff);
    let (source, destination) = ((addresses >> 32) as u32, addresses as u32);
    let is_unicast = UNICAST[(source >> 24) as usize] & UNICAST[(destination >> 24) as usize];
    wrong |= u64::from(!is_unicast);
    let is_plain = wrong == 0
        && ttl > 1
        && total >= 28
        && total + ETHERNET_LEN <= len
        && transport_is_valid(frame, 34, total.wrapping_sub(20), h[23]);
    is_plain.then_some((source, destination))
}

/// Returns source and destination of a plain IPv6 packet, like [`plain4`].
#[inline(always)]
fn plain6(frame: &[u8], len: usize) -> Option<(u128, u128)> {
    let h = frame.first_chunk::<HEADERS6>()?;
    let address = |at: usize| u128::from(be64(h, at)) << 64 | u128::from(be64(h, at + 8));
    let (source, destination) = (address(22), address(38));
    let payload = usize::from(u16::from_be_bytes([h[18], h[19]]));
    // Global and unique local addresses (RFC 4291 section 2.4, RFC 4193).
    let is_unicast = |address: u128| address >> 125 == 1 || address >> 121 == 0xfc >> 1;
    let is_message = |kind: u8| {
        let kind = icmpv6::Type(kind);
        kind != icmpv6::Type::NEIGHBOR_SOLICITATION && kind != icmpv6::Type::NEIGHBOR_ADVERTISEMENT
    };
    let next = IpProtocol(h[20]);
    let is_plain = be64(h, 12) >> 44 == 0x8_6dd6
        && h[21] > 1
        && payload + ETHERNET_LEN + ipv6::HEADER_LEN <= len
        && is_unicast(source)
        && is_unicast(destination)
        && !ipv6::is_extension(next)
        && (next != IpProtocol::ICMPV6 || is_message(h[54]))
        && transport_is_valid(frame, 54, payload, next.0);
    is_plain.then_some((source, destination))
}

/// Way to a next hop.
struct Leg<'v> {
    segment: u16,
    /// Ethernet destination and source.
    addresses: [u8; 12],
    /// Length of the longest frame.
    max_frame: usize,
    /// Bytes that the exit may add in front of the frame.
    room: usize,
    exit: Exit<'v>,
}

enum Exit<'v> {
    Attachment(&'v Attachment),
    Remote(&'v Remote, &'v OuterHeaders),
}

/// Number of packets, and their bytes.
#[derive(Clone, Copy, Default)]
struct Sum {
    packets: usize,
    bytes: usize,
}

impl Sum {
    #[inline(always)]
    fn add(&mut self, bytes: usize) {
        self.packets += 1;
        self.bytes += bytes;
    }
}

impl<'v> View<'v> {
    /// Routes the plain packets for routers among those of a batch that `marked` marks. Returns the marks of those that
    /// have been routed: they have their output port, and are counted. The others are unchanged.
    ///
    /// The scratch space has the keys of these packets. The frame of each one begins `AT` bytes behind the packet's
    /// start, after the headers of a tunnel.
    #[inline(never)]
    pub(in crate::tunnel) fn route_batch<const AT: usize>(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packets: &mut [Packet],
        marked: u64,
    ) -> u64 {
        let fdb = self.fdb.table(context.guard());
        let mut left = 0;
        let mut rest = marked;
        while rest != 0 {
            // The bridge has just looked the same keys up. To keep the result there would slow its loop down.
            let key = state.scratch.keys[rest.trailing_zeros() as usize % BATCH];
            let is_router = fdb.lookup(key) == Destination::Router.pack();
            left |= if is_router { rest & rest.wrapping_neg() } else { 0 };
            rest &= rest - 1;
        }
        if left == 0 { 0 } else { self.route_marked::<AT>(state, context, remotes, packets, left) }
    }

    /// Routes the plain packets of a batch that `marked` marks. All of them are for routers. Else it is like
    /// [`Self::route_batch`]; only the segments of the keys matter.
    #[inline(never)]
    pub(in crate::tunnel) fn route_marked<const AT: usize>(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packets: &mut [Packet],
        marked: u64,
    ) -> u64 {
        let (mut left, mut done) = (marked, 0);
        while left != 0 {
            // Nearly all batches have packets of one segment only.
            let Scratch { keys, router, .. } = &mut *state.scratch;
            let segment = keys[left.trailing_zeros() as usize % BATCH].segment();
            let RouteScratch { v4, v6, .. } = router;
            (v4.count, v4.targets, v6.count, v6.targets) = (0, 0, 0, 0);
            let (mut rest, mut others) = (left, 0);
            while rest != 0 {
                let i = rest.trailing_zeros() as usize % BATCH;
                rest &= rest - 1;
                if keys[i].segment() != segment {
                    others |= 1 << i;
                    continue;
                }
                let Some(packet) = packets.get(i) else { continue };
                let Some(frame) = packet.data().get(AT..) else { continue };
                let len = packet.len() - AT;
                // The slow path first moves so many bytes of a longer packet to its first buffer.
                if frame.len() != len && frame.len() < HEADERS {
                    continue;
                }
                if let Some(pair) = plain4(frame, len) {
                    v4.push(i, pair);
                } else if let Some(pair) = plain6(frame, len) {
                    v6.push(i, pair);
                }
            }
            left = others;
            let Some(interface) = self.interface(segment).filter(|interface| interface.filter.is_none()) else {
                continue;
            };
            if v4.count > 0 {
                done |= self.route_plain::<u32, AT>(state, context, remotes, packets, (segment, interface));
            }
            if state.scratch.router.v6.count > 0 {
                done |= self.route_plain::<u128, AT>(state, context, remotes, packets, (segment, interface));
            }
        }
        done
    }

    /// Routes plain packets of one segment and IP version.
    #[inline(always)]
    fn route_plain<A: Address, const AT: usize>(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packets: &mut [Packet],
        (segment, interface): (u16, &Interface),
    ) -> u64 {
        let guard = context.guard();
        let (routes, hops, fdb) = (self.routes.view(guard), self.hops.read(guard), self.fdb.table(guard));
        let StageState { worker, parser, scratch, .. } = state;
        let (plain, targets) = A::arrays(&mut scratch.router);
        let (count, n) = (plain.count.min(BATCH), plain.targets.min(BATCH));

        // Next hops of all targets.
        A::lookup(&routes, interface.vrf, &plain.destinations[..n], &mut targets.values[..n]);
        let mut next_hops = 0;
        for j in 0..n {
            targets.next_hop[j] = match hops.get(targets.values[j]) {
                Some(Hop::Neighbour(segment, mac)) => {
                    let key = Key::new(segment, mac);
                    if next_hops == 0 || targets.keys[(next_hops - 1) % BATCH] != key {
                        targets.keys[next_hops % BATCH] = key;
                        next_hops += 1;
                    }
                    (next_hops - 1) as u8
                }
                Some(Hop::Group(_) | Hop::Vrf(_)) => BY_FLOW,
                _ => SLOW,
            };
        }
        fdb.lookup_batch(&targets.keys[..next_hops], &mut targets.places[..next_hops]);

        let (layout, worker) = (self.layout, *worker);
        let flow_of =
            |packet: &Packet| Flow::from_frame(packet.data().get(AT..).unwrap_or_default(), packet.len() - AT, parser);
        let mut valid = u64::MAX;
        if interface.source_check != SourceCheck::Off {
            let entropy = |at: u8| packets.get(usize::from(at)).map_or(0, |packet| flow_of(packet).entropy);
            valid = self.check_sources(context, plain, (segment, interface), entropy);
        }
        let count_sent = |leg: &Leg<'_>, sum: Sum| {
            if let Some(c) = layout.counters(leg.segment, worker)
                && sum.packets > 0
            {
                c.routed_out.add(sum.packets, sum.bytes);
                match leg.exit {
                    Exit::Attachment(_) => c.local_tx.add(sum.packets, sum.bytes),
                    Exit::Remote(..) => layout.count_overlay_tx(leg.segment, worker, sum.packets, sum.bytes),
                }
            }
        };
        let (mut received, mut taken, mut sent) = (Sum::default(), Sum::default(), Sum::default());
        let (mut done, mut last, mut leg): (u64, u8, Option<Leg<'_>>) = (0, SLOW, None);
        for j in 0..count {
            let (i, target) = (usize::from(plain.at[j]), usize::from(plain.target[j]) % BATCH);
            let Some(packet) = packets.get_mut(i) else { continue };
            let next_hop = targets.next_hop[target];
            if next_hop != last || next_hop == BY_FLOW {
                if let Some(leg) = &leg {
                    count_sent(leg, std::mem::take(&mut sent));
                }
                last = next_hop;
                leg = match next_hop {
                    SLOW => None,
                    BY_FLOW => {
                        let (address, entropy) = (plain.destinations[target].ip(), flow_of(packet).entropy);
                        match self.find_route(context, interface.vrf, address, entropy) {
                            Some(Hop::Neighbour(segment, mac)) => {
                                let key = Key::new(segment, mac);
                                self.leg(remotes, key, fdb.lookup(key))
                            }
                            _ => None,
                        }
                    }
                    at => {
                        let at = usize::from(at) % BATCH;
                        self.leg(remotes, targets.keys[at], targets.places[at])
                    }
                };
            }
            let Some(leg) = &leg else { continue };
            if valid & 1 << j == 0 || (leg.room > 0 && leg.room > packet.headroom() + AT) {
                continue;
            }
            let frame = packet.data_mut().get_mut(AT..);
            let Some(len) = frame.and_then(|frame| A::rewrite(frame, &leg.addresses, leg.max_frame)) else { continue };
            // From here on the packet is routed.
            done |= 1 << i;
            if AT > 0 {
                received.add(packet.len() - AT);
                let _ = packet.trim_front(AT);
                packet.set_checksum_status(ChecksumStatus::NONE);
            }
            if len < packet.len() {
                let _ = packet.truncate(len);
            }
            taken.add(len);
            sent.add(len);
            // Neither fails, as room and length were compared. A packet without output port would be dropped.
            match &leg.exit {
                Exit::Attachment(attachment) if attachment.vlan.is_none() => packet.set_out_port(attachment.port),
                Exit::Attachment(attachment) => _ = adapt_to_attachment(packet, attachment),
                Exit::Remote(remote, template) => {
                    let flow = quick_flow(packet.data());
                    let flow = flow.unwrap_or_else(|| Flow::from_frame(packet.data(), len, parser));
                    match remote.next_hop {
                        NextHop::InNic(_, numbers) if encapsulate_in_nic(packet, numbers, &layout.underlay, flow) => {
                            if let Some(c) = layout.counters(leg.segment, worker) {
                                c.nic_encapsulated.add(1);
                            }
                        }
                        _ => _ = encapsulate(packet, template, &layout.underlay, flow, &remote.sequence),
                    }
                }
            }
        }
        if let Some(leg) = &leg {
            count_sent(leg, sent);
        }
        if let Some(c) = layout.counters(segment, worker)
            && taken.packets > 0
        {
            c.routed_in.add(taken.packets, taken.bytes);
            if AT > 0 {
                c.overlay_rx.add(received.packets, received.bytes);
            }
        }
        done
    }

    /// Returns the marks of the packets whose source is valid.
    #[inline(never)]
    fn check_sources<A: Address>(
        &self,
        context: &Context<'_>,
        plain: &Plain<A>,
        (segment, interface): (u16, &Interface),
        entropy: impl Fn(u8) -> u32,
    ) -> u64 {
        let (count, guard) = (plain.count.min(BATCH), context.guard());
        let (routes, hops) = (self.routes.view(guard), self.hops.read(guard));
        let mut values = [0; BATCH];
        A::lookup(&routes, interface.vrf, &plain.sources[..count], &mut values[..count]);
        let mut valid = 0;
        for (j, value) in values[..count].iter().enumerate() {
            let hop = match hops.get(*value) {
                Some(Hop::Group(_) | Hop::Vrf(_)) => {
                    self.find_route(context, interface.vrf, plain.sources[j].ip(), entropy(plain.at[j]))
                }
                hop => hop,
            };
            valid |= u64::from(source_is_valid(hop, interface.source_check, segment)) << j;
        }
        valid
    }

    /// Returns the way to a next hop in its segment; `None` if it is not plain.
    #[inline(always)]
    fn leg<'l>(&'l self, remotes: &'l Remotes, key: Key, destination: u32) -> Option<Leg<'l>> {
        if destination == NO_DESTINATION {
            return None;
        }
        let (segment, out) = (key.segment(), self.interface(key.segment())?);
        let to = Destination::unpack(destination);
        let (exit, room) = match to {
            Destination::Attachment(index) => {
                let attachment = self.layout.attachments.get(index as usize)?;
                (Exit::Attachment(attachment), if attachment.vlan.is_some() { VLAN_TAG_LEN } else { 0 })
            }
            Destination::Remote(index) => {
                // Packets get sequence numbers in the order in which they leave, which only the slow path knows.
                let remote = remotes.list.get(index as usize).filter(|remote| remote.sequence.is_none())?;
                match &remote.next_hop {
                    NextHop::Ready(template) | NextHop::InNic(template, _) => {
                        (Exit::Remote(remote, template), template.len())
                    }
                    NextHop::Held(..) | NextHop::Resolving | NextHop::Unreachable | NextHop::Out => return None,
                }
            }
            Destination::Router => return None,
        };
        let mut addresses = [0; 12];
        let MacAddr(destination) = key.mac();
        addresses[..6].copy_from_slice(&destination);
        addresses[6..].copy_from_slice(&out.mac.0);
        // Tunnel packets that are sent as fragments take the slow path.
        let longest = match &exit {
            Exit::Attachment(attachment) => attachment.max_frame,
            Exit::Remote(remote, _) => remote.max_frame,
        };
        let max_frame = longest.min(out.mtu + ETHERNET_LEN);
        Some(Leg { segment, addresses, max_frame, room, exit })
    }
}
