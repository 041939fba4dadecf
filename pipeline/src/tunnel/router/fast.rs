//! Fast path of routing: the plain packets of a batch, all at a time.
//!
//! The bridge marks the frames of a batch whose destination is a router. If a local port received only such frames,
//! they do not pass the bridge at all ([`View::route_frames`]). This module takes the plain ones of them through these
//! passes, each over all packets, so that cache misses overlap:
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
use wirepath_packet::{BATCH, Batch, Packet};
use wirepath_wire::build::OuterHeaders;
use wirepath_wire::{EtherType, IpProtocol, MacAddr, Parser, checksum, icmpv6, ipv6};

use super::config::SourceCheck;
use super::forward::{HEADERS, source_is_valid};
use super::tables::{Hop, Interface};
use crate::Context;
use crate::route::RouteView;
use crate::table::{Key, NO_DESTINATION};
use crate::tunnel::encap::{SLOW_FLAGS, be64, encapsulate, encapsulate_in_nic, quick_flow};
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

/// Plain packets of one segment and IP version. [`PlainCount`] says how many entries are in use.
#[derive(Debug)]
struct Plain<A> {
    /// Position of each packet in its batch.
    at: [u8; BATCH],
    sources: [A; BATCH],
    /// Targets, which are consecutive packets to the same destination: the destination and the first packet of each.
    destinations: [A; BATCH],
    firsts: [u8; BATCH],
}

/// Number of plain packets of one IP version. The loops over headers keep it in registers.
#[derive(Clone, Copy, Default)]
struct PlainCount<A> {
    packets: usize,
    targets: usize,
    /// Destination of the last packet. The first one differs from the default, which is no unicast address.
    destination: A,
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

impl RouteScratch {
    /// Notes the plain packets among those that `marked` marks. The frames begin `AT` bytes behind the packet's start.
    #[inline(never)]
    fn note<const AT: usize>(
        &mut self,
        packets: &[Packet],
        marked: u64,
        mut v4: PlainCount<u32>,
    ) -> (PlainCount<u32>, PlainCount<u128>) {
        let (mut v6, mut rest) = (PlainCount::default(), marked);
        while rest != 0 {
            let i = rest.trailing_zeros() as usize % BATCH;
            rest &= rest - 1;
            let Some(packet) = packets.get(i) else { continue };
            let Some(frame) = packet.data().get(AT..) else { continue };
            let len = packet.len() - AT;
            // The slow path first moves so many bytes of a longer packet to its first buffer.
            if frame.len() != len && frame.len() < HEADERS {
                continue;
            }
            if let Some(pair) = frame.first_chunk().and_then(|h| plain4(h, frame, len)) {
                self.v4.push(&mut v4, i, pair);
            } else if let Some(pair) = plain6(frame, len) {
                self.v6.push(&mut v6, i, pair);
            }
        }
        (v4, v6)
    }
}

impl<A: Address> Plain<A> {
    fn new() -> Self {
        Self { at: [0; BATCH], sources: [A::default(); BATCH], destinations: [A::default(); BATCH], firsts: [0; BATCH] }
    }

    /// Adds a packet. There is room for a batch.
    #[inline(always)]
    fn push(&mut self, counts: &mut PlainCount<A>, at: usize, (source, destination): (A, A)) {
        let n = counts.packets % BATCH;
        if counts.destination != destination {
            counts.destination = destination;
            self.destinations[counts.targets % BATCH] = destination;
            self.firsts[counts.targets % BATCH] = n as u8;
            counts.targets += 1;
        }
        (self.at[n], self.sources[n]) = (at as u8, source);
        counts.packets += 1;
    }
}

/// An IP address, with what depends on the IP version.
trait Address: Copy + Default + PartialEq {
    /// Returns the arrays of this IP version.
    fn arrays(scratch: &mut RouteScratch) -> (&mut Plain<Self>, &mut Targets);

    fn ip(self) -> IpAddr;

    /// Looks up the routes of all addresses.
    fn lookup(routes: &RouteView<'_>, vrf: u16, addresses: &[Self], values: &mut [u32]);

    /// Writes the Ethernet addresses as in [`Leg::addresses`], and decrements the TTL of a plain packet. Returns the
    /// length of the frame without what follows the packet. Does nothing and returns `None` if that is more than
    /// `max_len`.
    fn rewrite(frame: &mut [u8], addresses: (u64, u32), max_len: usize) -> Option<usize>;
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
        match (addresses, &mut *values) {
            ([address], [value]) => *value = routes.lookup4(vrf, *address),
            _ => routes.lookup4_batch(vrf, addresses, values),
        }
    }

    #[inline(always)]
    fn rewrite(frame: &mut [u8], addresses: (u64, u32), max_len: usize) -> Option<usize> {
        let h = frame.first_chunk_mut::<HEADERS4>()?;
        let len = ETHERNET_LEN + usize::from(u16::from_be_bytes([h[16], h[17]]));
        if len > max_len {
            return None;
        }
        h[..8].copy_from_slice(&addresses.0.to_ne_bytes());
        h[8..12].copy_from_slice(&addresses.1.to_ne_bytes());
        // TTL, protocol and checksum are one word. The TTL is at least 2.
        let word = u32::from_be_bytes([h[22], h[23], h[24], h[25]]);
        let sum = checksum::after_ttl_decrement(word as u16);
        let word = (word & 0xffff_0000).wrapping_sub(1 << 24) | u32::from(sum);
        h[22..26].copy_from_slice(&word.to_be_bytes());
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
        match (addresses, &mut *values) {
            ([address], [value]) => *value = routes.lookup6(vrf, *address),
            _ => routes.lookup6_batch(vrf, addresses, values),
        }
    }

    #[inline(always)]
    fn rewrite(frame: &mut [u8], addresses: (u64, u32), max_len: usize) -> Option<usize> {
        let h = frame.first_chunk_mut::<HEADERS6>()?;
        let len = ETHERNET_LEN + ipv6::HEADER_LEN + usize::from(u16::from_be_bytes([h[18], h[19]]));
        if len > max_len {
            return None;
        }
        h[..8].copy_from_slice(&addresses.0.to_ne_bytes());
        h[8..12].copy_from_slice(&addresses.1.to_ne_bytes());
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

/// Returns source and destination of a plain IPv4 packet in a frame of `len` bytes, which begins with `h`. `None`: the
/// packet may be valid, but it is not plain.
#[inline(always)]
fn plain4(h: &[u8; HEADERS4], frame: &[u8], len: usize) -> Option<(u32, u32)> {
    let (version, fragment, addresses) = (be64(h, 12), be64(h, 20), be64(h, 26));
    // Each term is zero if its field has the expected value: version 4, five words of header, no fragment.
    let mut wrong = (version >> 40) ^ 0x08_0045;
    wrong |= fragment & 0x3fff << 48;
    // A ones' complement sum of 16-bit words is one modulo 2^16 - 1 of the words in any grouping (RFC 1071 section 2).
    // A valid header has the sum 0; that of its words is not zero, because it has a version.
    let sum = (version << 16 >> 16) + (fragment >> 32) + (fragment & 0xffff_ffff) + (addresses << 16 >> 16);
    wrong |= u64::from(!sum.is_multiple_of(0xffff));
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
    /// Ethernet destination and source, in the byte order of the packet: the first eight bytes and the last four.
    addresses: (u64, u32),
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

/// Packets that have been routed.
#[derive(Clone, Copy, Default)]
struct Sent {
    /// Their marks in the batch.
    done: u64,
    packets: usize,
    /// Bytes of their frames.
    bytes: usize,
    /// Bytes of their frames as they were received, with what followed the packets.
    received: usize,
}

impl Sent {
    fn add(&mut self, other: Self) {
        self.done |= other.done;
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.received += other.received;
    }

    /// Rewrites the headers of a packet. Returns the length of its frame, or `None` if it is too long.
    #[inline(always)]
    fn rewrite<A: Address, const AT: usize>(&mut self, packet: &mut Packet, at: u8, leg: &Leg<'_>) -> Option<usize> {
        let len = A::rewrite(packet.data_mut().get_mut(AT..)?, leg.addresses, leg.max_frame)?;
        // From here on the packet is routed.
        self.done |= 1 << (at % 64);
        if AT > 0 {
            self.received += packet.len() - AT;
            let _ = packet.trim_front(AT);
            packet.set_checksum_status(ChecksumStatus::NONE);
        }
        if len < packet.len() {
            let _ = packet.truncate(len);
        }
        self.packets += 1;
        self.bytes += len;
        Some(len)
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
            let (mut rest, mut others) = (left, 0);
            while rest != 0 {
                let i = rest.trailing_zeros() as usize % BATCH;
                rest &= rest - 1;
                others |= u64::from(keys[i].segment() != segment) << i;
            }
            let counts = router.note::<AT>(packets, left & !others, PlainCount::default());
            left = others;
            let Some(interface) = self.interface(segment).filter(|interface| interface.filter.is_none()) else {
                continue;
            };
            done |= self.route_both::<AT>(state, context, remotes, packets, (segment, interface), counts);
        }
        done
    }

    /// Routes a batch that a local port received untagged, if all of its frames are for the router of the segment. They
    /// then skip the bridge. Returns false, and does nothing, if there is another frame, or one that the bridge may
    /// treat in a special way.
    #[inline(always)]
    pub(in crate::tunnel) fn route_frames(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        batch: &mut Batch,
        from: u32,
    ) -> bool {
        let Some(segment) = self.layout.attachments.get(from as usize).map(|attachment| attachment.segment) else {
            return false;
        };
        let Some(interface) = self.interface(segment) else { return false };
        let first = batch.as_slice().first().and_then(|packet| packet.data().first_chunk());
        first == Some(&interface.mac.0) && self.route_all(state, context, batch, from, (segment, interface))
    }

    #[inline(never)]
    fn route_all(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        batch: &mut Batch,
        from: u32,
        (segment, interface): (u16, &Interface),
    ) -> bool {
        if context.is_watched() || self.layout.inspects || self.layout.clamps_mss || interface.filter.is_some() {
            return false;
        }
        let (fdb, remotes) = (self.fdb.table(context.guard()), self.remotes.read(context.guard()));
        let (mac, second) = (Key::new(segment, interface.mac), context.seconds());
        if fdb.lookup(mac) != Destination::Router.pack() {
            return false;
        }
        state.source.renew(self.fdb.generation(), second);
        let (mut known, place) = state.source.in_ipv4_frames();
        let mut last = state.source.key;
        if place != from {
            // No IPv4 frame has this EtherType, and no source this address.
            (known, last) = (u64::MAX, Key::from_u64(u64::MAX));
        }
        let Scratch { sources, router, .. } = &mut *state.scratch;
        let (mut new_sources, mut bytes, mut others) = (0, 0, 0u64);
        let (mut v4, destination) = (PlainCount::default(), mac.to_u64() << 16);
        for (i, packet) in batch.as_slice().iter().enumerate() {
            let (frame, len) = (packet.data(), packet.len());
            let Some(h) = frame.first_chunk::<HEADERS4>() else { return false };
            let tail = be64(h, 6);
            if be64(h, 0) >> 16 << 16 != destination || packet.flags().intersects(SLOW_FLAGS) {
                return false;
            }
            bytes += len;
            if tail != known {
                let (source, ethertype) =
                    (Key::from_u64(u64::from(segment) << 48 | tail >> 16), EtherType(tail as u16));
                if ethertype.is_vlan() {
                    return false;
                }
                if source != last {
                    if !source.is_unicast() {
                        continue;
                    }
                    last = source;
                    sources[new_sources % BATCH] = source;
                    new_sources += 1;
                }
                if ethertype != EtherType::IPV4 {
                    others |= 1 << i;
                    continue;
                }
                known = tail;
            }
            match plain4(h, frame, len) {
                Some(pair) if frame.len() == len => router.v4.push(&mut v4, i, pair),
                _ => others |= 1 << i,
            }
        }
        let counts =
            if others == 0 { (v4, PlainCount::default()) } else { router.note::<0>(batch.as_slice(), others, v4) };
        let here = |_| Destination::Attachment(from);
        self.learn_sources(context, fdb, &sources[..new_sources], here, second, &mut state.source);
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.local_rx.add(batch.len(), bytes);
        }
        let packets = batch.as_mut_slice();
        let all = u64::MAX >> (BATCH - packets.len().clamp(1, BATCH));
        let done = self.route_both::<0>(state, context, remotes, packets, (segment, interface), counts);
        if done != all {
            self.route_others(state, context, remotes, batch, from, done);
        }
        true
    }

    /// Processes the frames of a local port one by one, except those that `done` marks.
    #[cold]
    fn route_others(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        batch: &mut Batch,
        from: u32,
        done: u64,
    ) {
        let mut i = 0;
        batch.filter_map(|packet| {
            if done >> i & 1 != 0 {
                // Packets stay in order with those of their flows on the slow path.
                context.send_by_out_port(packet);
            } else {
                self.encapsulate_one(state, context, remotes, packet, from);
            }
            i += 1;
            None
        });
    }

    /// Routes the plain packets of one segment that the scratch space has. Returns their marks.
    #[inline(always)]
    fn route_both<const AT: usize>(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packets: &mut [Packet],
        from: (u16, &Interface),
        (v4, v6): (PlainCount<u32>, PlainCount<u128>),
    ) -> u64 {
        let mut done = 0;
        if v4.packets > 0 {
            done |= self.route_plain::<u32, AT>(state, context, remotes, packets, from, v4);
        }
        if v6.packets > 0 {
            done |= self.route_plain::<u128, AT>(state, context, remotes, packets, from, v6);
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
        counts: PlainCount<A>,
    ) -> u64 {
        let guard = context.guard();
        let (routes, hops, fdb) = (self.routes.view(guard), self.hops.read(guard), self.fdb.table(guard));
        let StageState { worker, parser, scratch, .. } = state;
        let (plain, targets) = A::arrays(&mut scratch.router);
        let (count, n) = (counts.packets.min(BATCH), counts.targets.min(BATCH));

        // Next hops of all targets.
        A::lookup(&routes, interface.vrf, &plain.destinations[..n], &mut targets.values[..n]);
        let (mut next_hops, mut last_key) = (0, None);
        for (value, next_hop) in targets.values[..n].iter().zip(&mut targets.next_hop) {
            *next_hop = match hops.get(*value) {
                Some(Hop::Neighbour(segment, mac)) => {
                    let key = Key::new(segment, mac);
                    if last_key != Some(key) {
                        last_key = Some(key);
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
        // Members of a group of remotes take flows, not targets.
        if targets.places[..next_hops].iter().any(|place| Destination::is_packed_group(*place)) {
            let places = &targets.places;
            let is_group = |at: u8| places.get(usize::from(at)).is_some_and(|it| Destination::is_packed_group(*it));
            targets.next_hop[..n].iter_mut().filter(|at| is_group(**at)).for_each(|at| *at = BY_FLOW);
        }
        let groups = self.groups.read(guard);

        let worker = *worker;
        let flow_of = |packet: &Packet| {
            let (frame, len) = (packet.data().get(AT..).unwrap_or_default(), packet.len() - AT);
            quick_flow(frame).unwrap_or_else(|| Flow::from_parsed(frame, len, parser))
        };
        let entropy = |packets: &[Packet], at: u8| packets.get(usize::from(at)).map_or(0, |it| flow_of(it).entropy);
        let mut valid = u64::MAX;
        if interface.source_check != SourceCheck::Off {
            valid = self.check_sources(context, plain, count, (segment, interface), |at| entropy(packets, at));
        }
        let mut all = Sent::default();
        let mut from = 0;
        while from < n {
            // Targets in a row often have one next hop.
            let next_hop = targets.next_hop[from];
            let same = targets.next_hop[from..n].iter().take_while(|it| **it == next_hop && next_hop != BY_FLOW);
            let end = from + same.count().max(1);
            let first = usize::from(plain.firsts[from]);
            let last = if end < n { usize::from(plain.firsts[end]) } else { count };
            match next_hop {
                SLOW => {}
                BY_FLOW => {
                    for j in first..last {
                        let at = plain.at[j % BATCH];
                        let (address, entropy) = (plain.destinations[from].ip(), entropy(packets, at));
                        if let Some(Hop::Neighbour(segment, mac)) =
                            self.find_route(context, interface.vrf, address, entropy)
                            && let key = Key::new(segment, mac)
                            && let place = groups.choose_packed(fdb.lookup(key), entropy)
                            && let Some(leg) = self.leg(remotes, key, place)
                        {
                            all.add(self.send_run::<A, AT>(worker, parser, packets, &[at], valid >> j, &leg));
                        }
                    }
                }
                at => {
                    let at = usize::from(at) % BATCH;
                    if let Some(leg) = self.leg(remotes, targets.keys[at], targets.places[at]) {
                        let run = plain.at.get(first..last).unwrap_or_default();
                        all.add(self.send_run::<A, AT>(worker, parser, packets, run, valid >> first, &leg));
                    }
                }
            }
            from = end;
        }
        if let Some(c) = self.layout.counters(segment, worker)
            && all.packets > 0
        {
            c.routed_in.add(all.packets, all.bytes);
            if AT > 0 {
                c.overlay_rx.add(all.packets, all.received);
            }
        }
        all.done
    }

    /// Routes the packets at the positions `run` to one next hop. Bit 0 of `valid` is that of the first packet, and so
    /// on. A packet that this function finds not plain is unchanged.
    #[inline(never)]
    fn send_run<A: Address, const AT: usize>(
        &self,
        worker: usize,
        parser: &Parser,
        packets: &mut [Packet],
        run: &[u8],
        mut valid: u64,
        leg: &Leg<'_>,
    ) -> Sent {
        let mut all = Sent::default();
        let mut counted = 0;
        match &leg.exit {
            Exit::Attachment(attachment) if attachment.vlan.is_none() => {
                for at in run {
                    let is_valid = valid & 1 != 0;
                    valid >>= 1;
                    let Some(packet) = packets.get_mut(usize::from(*at)).filter(|_| is_valid) else { continue };
                    if all.rewrite::<A, AT>(packet, *at, leg).is_some() {
                        packet.set_out_port(attachment.port);
                    }
                }
            }
            exit => {
                for at in run {
                    let is_valid = valid & 1 != 0;
                    valid >>= 1;
                    let Some(packet) = packets.get_mut(usize::from(*at)).filter(|_| is_valid) else { continue };
                    if leg.room > packet.headroom() + AT {
                        continue;
                    }
                    let Some(len) = all.rewrite::<A, AT>(packet, *at, leg) else { continue };
                    // Neither fails, as room and length were compared. A packet without output port would be dropped.
                    match exit {
                        Exit::Attachment(attachment) => _ = adapt_to_attachment(packet, attachment),
                        Exit::Remote(remote, template) => {
                            let underlay = &self.layout.underlay;
                            let flow = quick_flow(packet.data());
                            let flow = flow.unwrap_or_else(|| Flow::from_parsed(packet.data(), len, parser));
                            match remote.next_hop {
                                NextHop::InNic(_, numbers) if encapsulate_in_nic(packet, numbers, underlay, flow) => {
                                    counted += 1;
                                }
                                _ => _ = encapsulate(packet, template, underlay, flow, &remote.sequence),
                            }
                        }
                    }
                }
            }
        }
        if let Some(c) = self.layout.counters(leg.segment, worker)
            && all.packets > 0
        {
            c.routed_out.add(all.packets, all.bytes);
            match leg.exit {
                Exit::Attachment(_) => c.local_tx.add(all.packets, all.bytes),
                Exit::Remote(..) => self.layout.count_overlay_tx(leg.segment, worker, all.packets, all.bytes),
            }
            if counted > 0 {
                c.nic_encapsulated.add(counted);
            }
        }
        all
    }

    /// Returns the marks of the packets whose source is valid.
    #[inline(never)]
    fn check_sources<A: Address>(
        &self,
        context: &Context<'_>,
        plain: &Plain<A>,
        count: usize,
        (segment, interface): (u16, &Interface),
        entropy: impl Fn(u8) -> u32,
    ) -> u64 {
        let guard = context.guard();
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
            Destination::Group(_) | Destination::Router => return None,
        };
        let (MacAddr(to), MacAddr(from)) = (key.mac(), out.mac);
        let first = [to[0], to[1], to[2], to[3], to[4], to[5], from[0], from[1]];
        let addresses = (u64::from_ne_bytes(first), u32::from_ne_bytes([from[2], from[3], from[4], from[5]]));
        // Tunnel packets that are sent as fragments take the slow path.
        let longest = match &exit {
            Exit::Attachment(attachment) => attachment.max_frame,
            Exit::Remote(remote, _) => remote.max_frame,
        };
        let max_frame = longest.min(out.mtu + ETHERNET_LEN);
        Some(Leg { segment, addresses, max_frame, room, exit })
    }
}
