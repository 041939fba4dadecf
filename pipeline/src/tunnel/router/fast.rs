//! Fast path of routing: the plain packets of a batch, all at a time.
//!
//! The bridge marks the frames of a batch whose destination is a router. This module takes the plain ones of them
//! through these passes, each over all packets, so that cache misses overlap:
//!
//! 1. Headers: an IPv4 packet without options or an IPv6 packet without extensions, both whole, valid and unicast.
//! 2. Routes to the destinations, and to the sources if they are checked (uRPF).
//! 3. Next hops in the forwarding database, once for each run of packets with the same next hop.
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
use super::tables::{Hop, Hops};
use crate::Context;
use crate::route::RouteView;
use crate::table::{Key, NO_DESTINATION};
use crate::tunnel::encap::{be64, encapsulate, encapsulate_in_nic};
use crate::tunnel::headers::{ETHERNET_LEN, VLAN_TAG_LEN};
use crate::tunnel::stage::{Flow, StageState, Tally, View, adapt_to_attachment};
use crate::tunnel::tables::{Attachment, Destination, NextHop, Remote, Remotes};

/// Ethernet and IPv4 header, and eight bytes of the next one.
const HEADERS4: usize = 42;
/// Ethernet and IPv6 header, and eight bytes of the next one.
const HEADERS6: usize = 62;

/// Arrays that one pass fills for the next. They are reused, as those of [`crate::tunnel::stage::Scratch`].
#[derive(Debug)]
pub(in crate::tunnel) struct RouteScratch {
    v4: Candidates<u32>,
    v6: Candidates<u128>,
    /// Values of the routes.
    values: [u32; BATCH],
    runs: Runs,
}

/// Plain packets of one IP version.
#[derive(Debug)]
struct Candidates<A> {
    count: usize,
    /// Position of each packet in its batch.
    at: [u8; BATCH],
    /// Segment and VRF of each packet.
    segments: [u16; BATCH],
    vrfs: [u16; BATCH],
    sources: [A; BATCH],
    destinations: [A; BATCH],
    /// True if sources are checked.
    has_checks: bool,
}

/// Consecutive packets to the same Ethernet address.
#[derive(Debug)]
struct Runs {
    count: usize,
    keys: [Key; BATCH],
    destinations: [u32; BATCH],
    /// Number of packets with a next hop, the candidate that each one is, and its run.
    packets: usize,
    candidates: [u8; BATCH],
    of: [u8; BATCH],
}

impl Default for RouteScratch {
    fn default() -> Self {
        let runs = Runs {
            count: 0,
            keys: [Key::from_u64(0); BATCH],
            destinations: [0; BATCH],
            packets: 0,
            candidates: [0; BATCH],
            of: [0; BATCH],
        };
        Self { v4: Candidates::new(), v6: Candidates::new(), values: [0; BATCH], runs }
    }
}

impl<A: Address> Candidates<A> {
    fn new() -> Self {
        Self {
            count: 0,
            at: [0; BATCH],
            segments: [0; BATCH],
            vrfs: [0; BATCH],
            sources: [A::default(); BATCH],
            destinations: [A::default(); BATCH],
            has_checks: false,
        }
    }

    #[inline(always)]
    fn push(&mut self, at: usize, segment: u16, vrf: u16, (source, destination): (A, A)) {
        let n = self.count % BATCH;
        self.at[n] = at as u8;
        (self.segments[n], self.vrfs[n]) = (segment, vrf);
        (self.sources[n], self.destinations[n]) = (source, destination);
        self.count = n + 1;
    }
}

impl Runs {
    /// Adds a packet to the last run, or to a new one if its next hop is another.
    #[inline(always)]
    fn push(&mut self, candidate: usize, key: Key) {
        if self.count == 0 || self.keys[(self.count - 1) % BATCH] != key {
            self.keys[self.count % BATCH] = key;
            self.count += 1;
        }
        let n = self.packets % BATCH;
        (self.candidates[n], self.of[n]) = (candidate as u8, (self.count - 1) as u8);
        self.packets = n + 1;
    }
}

/// An IP address, with what depends on the IP version.
trait Address: Copy + Default {
    /// Returns the arrays of this IP version: packets, runs and values of routes.
    fn arrays(scratch: &mut RouteScratch) -> (&mut Candidates<Self>, &mut Runs, &mut [u32; BATCH]);

    fn ip(self) -> IpAddr;

    /// Looks up the routes of all pairs of VRF and address.
    fn lookup(routes: &RouteView<'_>, vrfs: &[u16], addresses: &[Self], values: &mut [u32]);

    /// Returns the length of the frame of a plain packet without what follows the packet.
    fn frame_len(frame: &[u8]) -> usize;

    /// Writes the Ethernet addresses, and decrements the TTL of a plain packet.
    fn rewrite(frame: &mut [u8], addresses: &[u8; 12]);
}

impl Address for u32 {
    #[inline(always)]
    fn arrays(scratch: &mut RouteScratch) -> (&mut Candidates<Self>, &mut Runs, &mut [u32; BATCH]) {
        (&mut scratch.v4, &mut scratch.runs, &mut scratch.values)
    }

    fn ip(self) -> IpAddr {
        IpAddr::V4(self.into())
    }

    #[inline(always)]
    fn lookup(routes: &RouteView<'_>, vrfs: &[u16], addresses: &[Self], values: &mut [u32]) {
        routes.lookup4_vrfs(vrfs, addresses, values);
    }

    #[inline(always)]
    fn frame_len(frame: &[u8]) -> usize {
        frame.first_chunk::<HEADERS4>().map_or(0, |h| ETHERNET_LEN + usize::from(u16::from_be_bytes([h[16], h[17]])))
    }

    #[inline(always)]
    fn rewrite(frame: &mut [u8], addresses: &[u8; 12]) {
        let Some(h) = frame.first_chunk_mut::<HEADERS4>() else { return };
        h[..12].copy_from_slice(addresses);
        let old = u16::from_be_bytes([h[22], h[23]]);
        let sum = checksum::update(u16::from_be_bytes([h[24], h[25]]), old, old.wrapping_sub(0x100));
        h[22] = h[22].wrapping_sub(1);
        h[24..26].copy_from_slice(&sum.to_be_bytes());
    }
}

impl Address for u128 {
    #[inline(always)]
    fn arrays(scratch: &mut RouteScratch) -> (&mut Candidates<Self>, &mut Runs, &mut [u32; BATCH]) {
        (&mut scratch.v6, &mut scratch.runs, &mut scratch.values)
    }

    fn ip(self) -> IpAddr {
        IpAddr::V6(self.into())
    }

    #[inline(always)]
    fn lookup(routes: &RouteView<'_>, vrfs: &[u16], addresses: &[Self], values: &mut [u32]) {
        routes.lookup6_vrfs(vrfs, addresses, values);
    }

    #[inline(always)]
    fn frame_len(frame: &[u8]) -> usize {
        let header = ETHERNET_LEN + ipv6::HEADER_LEN;
        frame.first_chunk::<HEADERS6>().map_or(0, |h| header + usize::from(u16::from_be_bytes([h[18], h[19]])))
    }

    #[inline(always)]
    fn rewrite(frame: &mut [u8], addresses: &[u8; 12]) {
        let Some(h) = frame.first_chunk_mut::<HEADERS6>() else { return };
        h[..12].copy_from_slice(addresses);
        h[21] = h[21].wrapping_sub(1);
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
    // RFC 1812 section 5.3.7: networks 0 and 127, groups and reserved addresses are not routed.
    let is_unicast = |address: u32| (address >> 24).wrapping_sub(1) < 223 && address >> 24 != 127;
    let is_plain = wrong == 0
        && ttl > 1
        && (28..=len - ETHERNET_LEN).contains(&total)
        && is_unicast(source)
        && is_unicast(destination)
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

/// Way to the next hop of a run of packets.
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

impl<'v> View<'v> {
    /// Routes the plain ones of the packets of a batch that `marked` marks. Returns the marks of those that have been
    /// routed: they have their output port, and are counted. The others are unchanged.
    ///
    /// The frame of each packet begins `AT` bytes behind the packet's start, after the headers of a tunnel. The
    /// segments are those of the keys in the scratch space.
    #[inline(never)]
    pub(in crate::tunnel) fn route_batch<const AT: usize>(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packets: &mut [Packet],
        marked: u64,
    ) -> u64 {
        let scratch = &mut *state.scratch;
        let RouteScratch { v4, v6, .. } = &mut scratch.router;
        (v4.count, v4.has_checks, v6.count, v6.has_checks) = (0, false, 0, false);
        let mut left = marked;
        let mut last = (u16::MAX, self.interface(u16::MAX));
        while left != 0 {
            let i = left.trailing_zeros() as usize % BATCH;
            left &= left - 1;
            let segment = scratch.keys[i].segment();
            if last.0 != segment {
                last = (segment, self.interface(segment));
            }
            let (Some(packet), Some(interface)) = (packets.get(i), last.1) else { continue };
            let Some(frame) = packet.data().get(AT..) else { continue };
            let len = packet.len() - AT;
            // The slow path first moves so many bytes of a longer packet to its first buffer.
            if frame.len() != len && frame.len() < HEADERS {
                continue;
            }
            let is_checked = interface.source_check != SourceCheck::Off;
            if let Some(pair) = plain4(frame, len) {
                v4.push(i, segment, interface.vrf, pair);
                v4.has_checks |= is_checked;
            } else if let Some(pair) = plain6(frame, len) {
                v6.push(i, segment, interface.vrf, pair);
                v6.has_checks |= is_checked;
            }
        }
        let mut done = 0;
        if scratch.router.v4.count > 0 {
            done |= self.route_plain::<u32, AT>(state, context, remotes, packets);
        }
        if state.scratch.router.v6.count > 0 {
            done |= self.route_plain::<u128, AT>(state, context, remotes, packets);
        }
        done
    }

    /// Routes plain packets of one IP version.
    #[inline(always)]
    fn route_plain<A: Address, const AT: usize>(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packets: &mut [Packet],
    ) -> u64 {
        self.find_next_hops::<A, AT>(state, context, packets);
        let guard = context.guard();
        let StageState { worker, parser, scratch, .. } = state;
        let (candidates, runs, _) = A::arrays(&mut scratch.router);
        self.fdb.table(guard).lookup_batch(&runs.keys[..runs.count], &mut runs.destinations[..runs.count]);

        let (layout, worker) = (self.layout, *worker);
        let add = |segment: u16, count: &dyn Fn(&crate::tunnel::counters::SegmentCounters)| {
            if let Some(counters) = layout.counters(segment, worker) {
                count(counters);
            }
        };
        let received = |segment, packets, bytes| add(segment, &|c| c.overlay_rx.add(packets, bytes));
        let taken = |segment, packets, bytes| add(segment, &|c| c.routed_in.add(packets, bytes));
        let local = |segment, packets, bytes| {
            add(segment, &|c| {
                c.routed_out.add(packets, bytes);
                c.local_tx.add(packets, bytes);
            });
        };
        let overlay = |segment, packets, bytes| {
            add(segment, &|c| {
                c.routed_out.add(packets, bytes);
                c.overlay_tx.add(packets, bytes);
            });
        };
        let (mut received_sum, mut taken_sum) = (Tally::new(0), Tally::new(0));
        let (mut local_sum, mut overlay_sum) = (Tally::new(0), Tally::new(0));
        let (mut done, mut run, mut leg) = (0, usize::MAX, None);
        for n in 0..runs.packets.min(BATCH) {
            if run != usize::from(runs.of[n]) {
                run = usize::from(runs.of[n]) % BATCH;
                leg = self.leg(remotes, runs.keys[run], runs.destinations[run]);
            }
            let Some(leg) = &leg else { continue };
            let candidate = usize::from(runs.candidates[n]) % BATCH;
            let (i, segment) = (usize::from(candidates.at[candidate]), candidates.segments[candidate]);
            let Some(packet) = packets.get_mut(i) else { continue };
            let len = A::frame_len(packet.data().get(AT..).unwrap_or_default());
            if len > leg.max_frame || leg.room > packet.headroom() + AT {
                continue;
            }
            // From here on the packet is routed.
            done |= 1 << i;
            if AT > 0 {
                received_sum.add(segment, packet.len() - AT, received);
                let _ = packet.trim_front(AT);
                packet.set_checksum_status(ChecksumStatus::NONE);
            }
            if len < packet.len() {
                let _ = packet.truncate(len);
            }
            taken_sum.add(segment, len, taken);
            A::rewrite(packet.data_mut(), &leg.addresses);
            // Neither fails, as room and length were compared. A packet without output port would be dropped.
            match &leg.exit {
                Exit::Attachment(attachment) => {
                    local_sum.add(leg.segment, len, local);
                    let _ = adapt_to_attachment(packet, attachment);
                }
                Exit::Remote(remote, template) => {
                    overlay_sum.add(leg.segment, len, overlay);
                    let flow = Flow::from_frame(packet.data(), len, parser);
                    match remote.next_hop {
                        NextHop::InNic(_, number) if encapsulate_in_nic(packet, number, &layout.underlay, flow) => {
                            add(leg.segment, &|c| c.nic_encapsulated.add(1));
                        }
                        _ => _ = encapsulate(packet, template, &layout.underlay, flow, &remote.sequence),
                    }
                }
            }
        }
        received_sum.end(received);
        taken_sum.end(taken);
        local_sum.end(local);
        overlay_sum.end(overlay);
        done
    }

    /// Finds the next hops of plain packets, and puts them into runs.
    #[inline(always)]
    fn find_next_hops<A: Address, const AT: usize>(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        packets: &[Packet],
    ) {
        let guard = context.guard();
        let (routes, hops) = (self.routes.view(guard), self.hops.read(guard));
        let StageState { parser, scratch, .. } = state;
        let (candidates, runs, values) = A::arrays(&mut scratch.router);
        // Only groups and other VRFs need the flow.
        let find = |j: usize, address: A| {
            let packet = packets.get(usize::from(candidates.at[j]));
            let flow = packet.map_or_else(Flow::default, |packet| {
                Flow::from_frame(packet.data().get(AT..).unwrap_or_default(), packet.len() - AT, parser)
            });
            self.find_route(context, candidates.vrfs[j], address.ip(), flow.entropy)
        };
        let mut valid = u64::MAX;
        if candidates.has_checks {
            valid = self.check_sources(context, hops, candidates, &find);
        }
        let n = candidates.count.min(BATCH);
        A::lookup(&routes, &candidates.vrfs[..n], &candidates.destinations[..n], &mut values[..n]);
        (runs.count, runs.packets) = (0, 0);
        for (j, value) in values[..n].iter().enumerate() {
            let hop = match hops.get(*value) {
                Some(Hop::Group(_) | Hop::Vrf(_)) => find(j, candidates.destinations[j]),
                hop => hop,
            };
            if let Some(Hop::Neighbour(segment, mac)) = hop
                && valid & 1 << j != 0
            {
                runs.push(j, Key::new(segment, mac));
            }
        }
    }

    /// Returns the marks of the candidates whose source is valid.
    #[inline(never)]
    fn check_sources<A: Address>(
        &self,
        context: &Context<'_>,
        hops: &Hops,
        candidates: &Candidates<A>,
        find: impl Fn(usize, A) -> Option<Hop>,
    ) -> u64 {
        let n = candidates.count.min(BATCH);
        let mut values = [0; BATCH];
        let routes = self.routes.view(context.guard());
        A::lookup(&routes, &candidates.vrfs[..n], &candidates.sources[..n], &mut values[..n]);
        let mut valid = 0;
        for (j, value) in values[..n].iter().enumerate() {
            let segment = candidates.segments[j];
            let hop = match hops.get(*value) {
                Some(Hop::Group(_) | Hop::Vrf(_)) => find(j, candidates.sources[j]),
                hop => hop,
            };
            let check = self.interface(segment).map_or(SourceCheck::Strict, |it| it.source_check);
            valid |= u64::from(source_is_valid(hop, check, segment)) << j;
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
                (Exit::Attachment(attachment), VLAN_TAG_LEN)
            }
            Destination::Remote(index) => {
                let remote = remotes.list.get(index as usize)?;
                match &remote.next_hop {
                    NextHop::Ready(template) | NextHop::InNic(template, _) => {
                        (Exit::Remote(remote, template), template.len())
                    }
                    NextHop::Held(..) | NextHop::Resolving | NextHop::Unreachable => return None,
                }
            }
            Destination::Router => return None,
        };
        let mut addresses = [0; 12];
        let MacAddr(destination) = key.mac();
        addresses[..6].copy_from_slice(&destination);
        addresses[6..].copy_from_slice(&out.mac.0);
        let max_frame = self.longest_frame_to(remotes, Some(to)).min(out.mtu + ETHERNET_LEN);
        Some(Leg { segment, addresses, max_frame, room, exit })
    }
}
