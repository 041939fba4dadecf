//! Encapsulation: from local attachments into tunnels.
//!
//! A batch is processed in three passes. The first reads each frame's addresses, flow and tags. The second
//! looks up all destinations, with prefetching before the first use. The third adds the outer headers. Frames
//! other than plain unicast to a reachable remote are only marked during these passes. Afterwards
//! [`View::encapsulate_one`] processes them one by one.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::superframe::{Cutter, has_tunnel, longest_frame};
use wirepath_packet::{BATCH, Batch, Packet};
use wirepath_wire::build::{IcmpError, OuterHeaders, PLAIN_LEN, ShortFields, icmp_error, max_icmp_error_len};
use wirepath_wire::checksum::Sum;
use wirepath_wire::{EtherType, IpProtocol, MacAddr};

use super::config::InnerVlans;
use super::groups::RemoteGroups;
use super::headers::{ETHERNET_LEN, QuoteRoom, VLAN_TAG_LEN, packet_checksum, pop_vlan_tag};
use super::mss::find_handshakes;
use super::report::{STAGE, report_next_hop};
use super::stage::{
    Flow, KnownSource, PuntCode, Scratch, StageState, Tally, View, adapt_to_attachment, all_marks, are_equal, unplace,
};
use super::storm_control::FloodKind;
use super::tables::{Destination, LocalPort, NextHop, NicNumbers, Remote, Remotes, Segment, Underlay};
use crate::Context;
use crate::table::{HashTable, Key, hash_pair};

/// Number of header bytes that the fast path reads: Ethernet, IPv4 without options, and ports.
const QUICK: usize = 38;

/// Transmit offloads that a packet may still request.
pub(super) const TX_OFFLOADS: Flags = Flags::TX_L3_CHECKSUM
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM)
    .with(Flags::TX_SEGMENT);

/// Flags of packets for the slow path: a tag in the metadata, and superframes.
pub(super) const SLOW_FLAGS: Flags = Flags::VLAN.with(Flags::TX_SEGMENT);

/// Reads eight bytes in network order at `at`. The compiler emits one load; combining single bytes would take
/// eight.
#[inline(always)]
pub(super) fn be64<const N: usize>(header: &[u8; N], at: usize) -> u64 {
    header[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// Returns the keys of the Ethernet destination and source, and the EtherType.
#[inline(always)]
pub(super) fn addresses(header: &[u8; ETHERNET_LEN], segment: u16) -> (Key, Key, u16) {
    let segment = u64::from(segment) << 48;
    let tail = be64(header, 6);
    (Key::from_u64(segment | be64(header, 0) >> 16), Key::from_u64(segment | tail >> 16), tail as u16)
}

/// Returns the flow of a frame with a plain packet: IPv4 without options that is not a fragment, or TCP or UDP directly
/// after IPv6.
#[inline(always)]
pub(super) fn quick_flow(frame: &[u8]) -> Option<Flow> {
    let (header, packet) = frame.split_first_chunk::<ETHERNET_LEN>()?;
    match EtherType(be64(header, 6) as u16) {
        EtherType::IPV4 => quick_flow4(packet.first_chunk()?, true),
        EtherType::IPV6 => quick_flow6(packet.first_chunk()?),
        _ => None,
    }
}

/// Returns the flow of an IPv4 packet without options that is not a fragment; `None` for other packets.
#[inline(always)]
fn quick_flow4(h: &[u8; QUICK - ETHERNET_LEN], is_ipv4: bool) -> Option<Flow> {
    // Version 4, header length of five words, fragment offset zero and MF clear. DF is ignored.
    if !is_ipv4 || be64(h, 0) & 0xff00_0000_0000_3fff != 0x4500_0000_0000_0000 {
        return None;
    }
    let addresses = be64(h, 12);
    let protocol = h[9];
    // Other protocols have no ports there; those bytes differ between packets of a flow.
    let mask = if protocol == 6 || protocol == 17 { u32::MAX } else { 0 };
    let ports = be64(h, 16) as u32 & mask;
    let entropy = hash_pair(addresses, u64::from(ports) | u64::from(protocol) << 32);
    Some(Flow { entropy, class: h[1] })
}

/// Returns the flow of TCP or UDP directly after an IPv6 header; `None` for other packets.
#[inline(always)]
fn quick_flow6(h: &[u8; 44]) -> Option<Flow> {
    let protocol = h[6];
    if h[0] >> 4 != 6 || !matches!(IpProtocol(protocol), IpProtocol::TCP | IpProtocol::UDP) {
        return None;
    }
    let [a, b, c, d] = [8, 16, 24, 32].map(|at| be64(h, at));
    let ports = u64::from(be64(h, 36) as u32);
    let halves = [hash_pair(a, b), hash_pair(c, d)].map(u64::from);
    let entropy = hash_pair(halves[0] | halves[1] << 32, ports | u64::from(protocol) << 32);
    Some(Flow { entropy, class: h[0] << 4 | h[1] >> 4 })
}

impl View<'_> {
    /// Processes a batch received by a local port.
    #[inline(always)]
    pub(super) fn encapsulate(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        batch: &mut Batch,
        port: PortId,
    ) {
        let Some(local) = self.layout.local_port(port) else { return context.drop_batch(batch, DropReason::NoSegment) };
        if local.has_vlans() {
            sort_by_tag(local, context, batch, &mut state.scratch.attachments);
            self.encapsulate_sorted(state, context, batch);
        } else {
            match local.untagged() {
                Some(index) if self.route_frames(state, context, batch, index) => {}
                Some(index) => self.encapsulate_from::<false>(state, context, batch, index),
                None => context.drop_batch(batch, DropReason::NoSegment),
            }
        }
    }

    #[inline(never)]
    fn encapsulate_sorted(&self, state: &mut StageState, context: &mut Context<'_>, batch: &mut Batch) {
        self.encapsulate_from::<true>(state, context, batch, 0);
    }

    /// Processes a batch from attachment `from`. If `SORTED` is true, the attachment of each packet is in the
    /// scratch space instead.
    #[inline(always)]
    fn encapsulate_from<const SORTED: bool>(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        batch: &mut Batch,
        from: u32,
    ) {
        let guard = context.guard();
        let (fdb, remotes) = (self.fdb.table(guard), self.remotes.read(guard));
        let second = context.seconds();
        state.source.renew(self.fdb.generation(), second);
        let Some(first) = self.layout.attachments.get(from as usize) else { return };

        let Scratch { keys, hashes, places, flows, sources, source_at, attachments, .. } = &mut *state.scratch;
        let (mut new_sources, mut slow) = (0, 0u64);
        let (layout, worker) = (self.layout, state.worker);
        let count_rx = |segment: u16, packets, bytes| {
            if let Some(c) = layout.counters(segment, worker) {
                c.local_rx.add(packets, bytes);
            }
        };
        let mut tally = Tally::new(first.segment);
        let mut last = (state.source.key, state.source.destination);
        let mut known = state.source.in_ipv4_frames();
        let prepared = keys.iter_mut().zip(hashes.iter_mut()).zip(flows.iter_mut());
        for ((i, packet), ((key, hash), flow)) in batch.as_slice().iter().enumerate().zip(prepared) {
            let here = if SORTED { attachments[i] } else { from };
            let segment = if SORTED {
                self.layout.attachments.get(here as usize).map_or(first.segment, |attachment| attachment.segment)
            } else {
                first.segment
            };
            let data = packet.data();
            tally.add(segment, packet.len(), count_rx);
            let Some(quick) = data.first_chunk::<QUICK>() else {
                slow |= 1 << i;
                continue;
            };
            // No table contains a group address, so the lookup of such a destination fails without an extra
            // check.
            *key = Key::from_u64(u64::from(segment) << 48 | be64(quick, 0) >> 16);
            *hash = fdb.prepare(*key);
            if packet.flags().intersects(SLOW_FLAGS) {
                slow |= 1 << i;
            }
            let (tail, header) = (be64(quick, 6), quick.last_chunk().unwrap_or(&[0; QUICK - ETHERNET_LEN]));
            if (tail, here) == known
                && let Some(quick) = quick_flow4(header, true)
            {
                *flow = quick;
                continue;
            }
            let ethertype = tail as u16;
            *flow = match quick_flow4(header, ethertype == EtherType::IPV4.0) {
                Some(flow) => flow,
                None => {
                    let special = EtherType(ethertype).is_vlan() || self.is_watched(ethertype, data);
                    slow |= u64::from(special) << i;
                    Flow::from_frame(data, packet.len(), &state.parser)
                }
            };
            let src = Key::from_u64(u64::from(segment) << 48 | tail >> 16);
            if (src, here) != last {
                // The slow path drops some tagged frames, and learns the sources of the others.
                if !src.is_unicast() || EtherType(ethertype).is_vlan() || packet.flags().contains(Flags::VLAN) {
                    slow |= 1 << i;
                    continue;
                }
                last = (src, here);
                sources[new_sources] = src;
                source_at[new_sources] = here;
                new_sources += 1;
            }
            if ethertype == EtherType::IPV4.0 {
                known = (tail, here);
            }
        }
        tally.end(count_rx);
        let inspected =
            |segment: u16| self.layout.segments.get(usize::from(segment)).is_some_and(|segment| segment.is_inspected());
        let inspects = self.layout.inspects && (SORTED || inspected(first.segment));
        if !inspects {
            // Else the slow path learns, behind the filters.
            let here = |j: usize| Destination::Attachment(source_at[j]);
            self.learn_sources(context, fdb, &sources[..new_sources], here, second, &mut state.source);
        }
        if self.layout.clamps_mss {
            slow |= find_handshakes(batch.as_slice(), 0);
        }
        if context.is_watched() || inspects {
            // The slow path gives the same result and reports what it does.
            slow = u64::MAX;
        }

        let packets = batch.as_mut_slice();
        let special = slow;
        let all = all_marks(packets.len());
        fdb.lookup_all_prepared(&keys[..packets.len()], hashes, places);
        unplace(places, slow);
        if remotes.are_many() {
            places[..packets.len()].iter().for_each(|place| remotes.prefetch(*place));
        }
        let mut done = 0;
        if are_equal(&places[..packets.len()])
            && let Some(remote) = remotes.of_destination(places[0])
        {
            done = self.send_to_one(packets, flows, remote, worker);
        }
        if done != all & !slow {
            let tables = (remotes, self.groups.read(guard));
            done |= self.send_others(packets, flows, places, tables, worker, all & !done);
        }
        slow = all & !done;
        if slow != 0 {
            let routed = self.route_batch::<0>(state, context, remotes, packets, slow & !special);
            slow &= !routed;
            if slow == 0 {
                return;
            }
            let mut i = 0;
            batch.filter_map(|packet| {
                let at = i;
                i += 1;
                if slow & 1 << at == 0 {
                    // Packets stay in order with those of their flows on the slow path.
                    context.send_by_out_port(packet);
                    return None;
                }
                let from = if SORTED { state.scratch.attachments[at % BATCH] } else { from };
                self.encapsulate_one(state, context, remotes, packet, from);
                None
            });
        }
    }

    /// Adds outer headers of the usual forms to the first frames of a batch, all for one remote, until one needs
    /// something else. Returns the marks of these frames.
    #[inline(always)]
    fn send_to_one(&self, packets: &mut [Packet], flows: &[Flow; BATCH], remote: &Remote, worker: usize) -> u64 {
        let NextHop::Ready(template) = &remote.next_hop else { return 0 };
        let underlay = &self.layout.underlay;
        // Packets get sequence numbers in the order in which they leave, which only the slow path knows.
        let (sent, bytes) = if template.is_plain_with(0) {
            encapsulate_run::<true>(packets, flows, template, remote.max_frame, underlay)
        } else if template.is_short_with(0) && remote.sequence.is_none() && !template.carries_packets() {
            encapsulate_run::<false>(packets, flows, template, remote.max_frame, underlay)
        } else {
            return 0;
        };
        // Keys contain the segment, so the remote and its frames belong to the same segment.
        if let Some(c) = self.layout.counters(remote.segment, worker) {
            c.overlay_tx.add(sent, bytes);
        }
        all_marks(sent)
    }

    /// Sends the wanted frames whose places are remotes without sequence numbers: by the NIC, or with outer headers of
    /// any form. Returns their marks.
    #[inline(never)]
    fn send_others(
        &self,
        packets: &mut [Packet],
        flows: &[Flow; BATCH],
        places: &[u32; BATCH],
        (remotes, groups): (&Remotes, &RemoteGroups),
        worker: usize,
        mut wanted: u64,
    ) -> u64 {
        let underlay = &self.layout.underlay;
        let mut done = 0;
        while wanted != 0 {
            let i = wanted.trailing_zeros() as usize % BATCH;
            wanted &= wanted - 1;
            // Packets get sequence numbers in the order in which they leave, which only the slow path knows.
            let place = groups.choose_packed(places[i], flows[i].entropy);
            let remote = remotes.of_destination(place).filter(|remote| remote.sequence.is_none());
            let (Some(remote), Some(packet)) = (remote, packets.get_mut(i)) else { continue };
            let len = packet.len();
            if len > remote.max_frame {
                continue;
            }
            let Some(counters) = self.layout.counters(remote.segment, worker) else { continue };
            match &remote.next_hop {
                NextHop::Ready(template) if encapsulate(packet, template, underlay, flows[i], &None).is_ok() => {}
                NextHop::InNic(_, numbers) if encapsulate_in_nic(packet, *numbers, underlay, flows[i]) => {
                    counters.nic_encapsulated.add(1);
                }
                _ => continue,
            }
            counters.overlay_tx.add(1, len);
            done |= 1 << i;
        }
        done
    }

    /// Calls [`Self::learn_source`] for the sources of a batch. Remembers the last one if its destination is
    /// unchanged.
    #[inline(always)]
    pub(super) fn learn_sources(
        &self,
        context: &mut Context<'_>,
        fdb: &HashTable,
        sources: &[Key],
        here: impl Fn(usize) -> Destination,
        second: u32,
        remembered: &mut KnownSource,
    ) {
        if sources.is_empty() {
            return;
        }
        let mut known = None;
        fdb.find_batch(sources, |j, entry| known = self.learn_source(context, sources[j], here(j), entry, second));
        if let Some((key, destination)) = known {
            remembered.key = key;
            remembered.destination = destination;
        }
    }

    /// Compares the destination of a source with the table and reports differences to the control thread.
    /// Returns `Some` if they are equal.
    #[inline(always)]
    pub(super) fn learn_source(
        &self,
        context: &mut Context<'_>,
        source: Key,
        here: Destination,
        entry: Option<&crate::table::Entry>,
        second: u32,
    ) -> Option<(Key, u32)> {
        let is_remote = matches!(here, Destination::Remote(_));
        let here = here.pack();
        let may_learn = |it: &Segment| if is_remote { it.learns_remotes } else { it.learning };
        let learns = || self.layout.segments.get(usize::from(source.segment())).is_some_and(may_learn);
        match entry {
            Some(entry) if entry.destination() == here => {
                entry.touch(second);
                return Some((source, here));
            }
            // A static entry never changes.
            Some(entry) if entry.seen() == u32::MAX => {}
            _ if learns() && source.is_unicast() => context.learn(source, here),
            _ => {}
        }
        None
    }

    /// Processes one frame on the slow path.
    #[cold]
    #[inline(never)]
    pub(super) fn encapsulate_one(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
        from: u32,
    ) {
        let Some(attachment) = self.layout.attachments.get(from as usize) else {
            return context.drop(packet, DropReason::NoSegment);
        };
        let Some(segment) = self.layout.segments.get(usize::from(attachment.segment)) else {
            return context.drop(packet, DropReason::NoSegment);
        };
        // The first segment of a longer packet may be short too.
        let is_short = packet.data().len() < QUICK;
        packet.pull_up(packet.len().min(128));
        let Some(header) = packet.data().first_chunk::<ETHERNET_LEN>() else {
            return context.drop(packet, DropReason::TooShort);
        };
        let (dst, src, ethertype) = addresses(header, attachment.segment);
        if context.is_tracing() {
            self.report_origin(context, remotes, Some(Destination::Attachment(from)), attachment.segment);
        }
        let is_tagged = EtherType(ethertype).is_vlan() || packet.vlan().is_some();
        if is_tagged {
            if segment.inner_vlans == InnerVlans::Discard {
                return context.drop(packet, DropReason::NoSegment);
            }
            if let Some(tci) = packet.vlan() {
                // A tunnel has no metadata for the tag, so the tag moves into the frame.
                packet.clear_vlan();
                if packet.prepend_slice(VLAN_TAG_LEN).is_none() {
                    return context.drop(packet, DropReason::NoHeadroom);
                }
                wirepath_wire::vlan::push(packet.data_mut(), wirepath_wire::Tag { tpid: EtherType::VLAN, tci });
            }
        }
        let Some(mut packet) = self.inspect(state, context, packet, attachment.segment) else { return };
        if !src.is_unicast() {
            return context.drop(packet, DropReason::BadSource);
        }
        let guard = context.guard();
        let fdb = self.fdb.table(guard);
        if is_short || is_tagged || self.layout.inspects {
            // The fast path did not learn the source of this frame.
            self.learn_source(context, src, Destination::Attachment(from), fdb.find(src), context.seconds());
        }
        if dst.mac().is_link_local() {
            return context.drop(packet, DropReason::LinkLocalMulticast);
        }
        // As on the fast path, so that all packets of a flow have one outer source port.
        let flow = Flow::from_frame(packet.data(), packet.len(), &state.parser);
        let known = dst.is_unicast().then(|| fdb.lookup(dst)).filter(|d| *d != crate::table::NO_DESTINATION);
        let known = known.map(Destination::unpack);
        if context.is_tracing() {
            self.report_lookup(context, remotes, dst, known);
        }
        if segment.router.is_some() && !dst.is_unicast() {
            match self.offer_to_router(state, context, packet, attachment.segment) {
                Some(returned) => packet = returned,
                None => return,
            }
        }
        if self.is_watched(ethertype, packet.data()) {
            let from = Destination::Attachment(from);
            match self.watch_neighbours(state, context, packet, attachment.segment, from) {
                Some(unanswered) => packet = unanswered,
                None => return,
            }
        }
        match known.map(|to| self.choose(context, to, flow.entropy)) {
            None => {
                let kind = FloodKind::of(dst.mac());
                if !segment.storm_control.admits(kind, context.now()) {
                    if let Some(c) = self.layout.counters(attachment.segment, state.worker) {
                        c.storm_drops[kind as usize].add(1);
                    }
                    return context.drop(packet, DropReason::StormControl);
                }
                if let Some(c) = self.layout.counters(attachment.segment, state.worker) {
                    c.unknown_unicast.add(u64::from(dst.is_unicast()));
                }
                self.flood(state, context, remotes, packet, Destination::Attachment(from), attachment.segment, flow);
            }
            Some(Destination::Attachment(to)) if to == from => context.drop(packet, DropReason::SamePort),
            Some(Destination::Attachment(to)) if self.layout.are_isolated(from, to) => {
                context.drop(packet, DropReason::IsolatedPort);
            }
            Some(Destination::Attachment(to)) => self.deliver(state, context, packet, to),
            Some(Destination::Remote(to)) => self.send_to(state, context, remotes, packet, to, flow, Some(from)),
            Some(Destination::Group(_)) => context.drop(packet, DropReason::RemoteDown),
            Some(Destination::Router) => self.route(state, context, remotes, packet, attachment.segment),
        }
    }

    /// Sends a frame to a local attachment.
    pub(super) fn deliver(&self, state: &mut StageState, context: &mut Context<'_>, mut packet: Packet, to: u32) {
        let Some(attachment) = self.layout.attachments.get(to as usize) else {
            return context.drop(packet, DropReason::NoSegment);
        };
        let len = packet.len();
        match adapt_to_attachment(&mut packet, attachment) {
            Ok(()) => {
                if let Some(c) = self.layout.counters(attachment.segment, state.worker) {
                    c.local_tx.add(1, len);
                }
                context.send(attachment.port, packet);
            }
            Err(reason) => context.drop(packet, reason),
        }
    }

    /// Sends a frame to a remote. If the frame is too long, its sender at attachment `sender` gets an ICMP
    /// message.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn send_to(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
        to: u32,
        flow: Flow,
        sender: Option<u32>,
    ) {
        let Some(remote) = remotes.list.get(to as usize) else {
            return context.drop(packet, DropReason::UnknownRemote);
        };
        if context.is_tracing() {
            report_next_hop(context, remote);
        }
        let len = packet.len();
        let is_long = len > remote.max_frame && longest_frame(&packet) > remote.max_frame;
        if is_long && longest_frame(&packet) > remote.longest_frame() {
            return self.drop_too_big(state, context, packet, remote.longest_frame(), sender);
        }
        let segment = self.layout.segments.get(usize::from(remote.segment));
        self.limit_mss(state, context, &mut packet, remote);
        let is_cut = is_long || segment.is_some_and(|segment| segment.cuts_superframes);
        if packet.flags().contains(Flags::TX_SEGMENT) && (is_cut || has_tunnel(&packet)) {
            return self.send_cut(state, context, remotes, packet, to, flow);
        }
        match &remote.next_hop {
            NextHop::InNic(_, numbers)
                if !is_long && encapsulate_in_nic(&mut packet, *numbers, &self.layout.underlay, flow) =>
            {
                self.layout.count_overlay_tx(remote.segment, state.worker, 1, len);
                if let Some(c) = self.layout.counters(remote.segment, state.worker) {
                    c.nic_encapsulated.add(1);
                }
                context.send(self.layout.underlay.port, packet);
            }
            NextHop::Held(..) if state.policer.admits_unresolved(context.now()) => {
                context.punt(packet, PuntCode::Unresolved(to).pack());
            }
            NextHop::Ready(template) | NextHop::InNic(template, _) | NextHop::Held(template, _) => {
                match encapsulate(&mut packet, template, &self.layout.underlay, flow, &remote.sequence) {
                    Ok(()) => {
                        self.layout.count_overlay_tx(remote.segment, state.worker, 1, len);
                        if is_long {
                            return self.send_outer_fragments(state, context, packet, template, remote);
                        }
                        context.send(self.layout.underlay.port, packet);
                    }
                    Err(reason) => context.drop(packet, reason),
                }
            }
            NextHop::Resolving => state.punt_unresolved(context, packet, to),
            NextHop::Unreachable => context.drop(packet, DropReason::NoNeighbour),
            NextHop::Out => context.drop(packet, DropReason::RemoteDown),
        }
    }

    /// Cuts a superframe before its tunnel, and sends the frames to a remote.
    #[cold]
    fn send_cut(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        to: u32,
        flow: Flow,
    ) {
        cut(state, context, packet, |state, context, frame| {
            self.send_to(state, context, remotes, frame, to, flow, None);
        });
    }

    fn drop_too_big(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        packet: Packet,
        max_frame: usize,
        sender: Option<u32>,
    ) {
        if let Some(sender) = sender
            && let Some(attachment) = self.layout.attachments.get(sender as usize)
        {
            let message = self.too_big_message(state, context, &packet, max_frame);
            if let Some(c) = self.layout.counters(attachment.segment, state.worker) {
                c.too_big.add(1);
                c.icmp_too_big.add(u64::from(message.is_some()));
            }
            if let Some(message) = message {
                context.trace(STAGE, |text| text.write_str("the sender gets an ICMP message"));
                context.count_generated();
                self.deliver(state, context, message, sender);
            }
        }
        context.drop(packet, DropReason::TooBigForMtu);
    }

    /// Builds the ICMP message "packet too big". Its source is the packet's destination, because a bridge has
    /// no address of its own.
    fn too_big_message(
        &self,
        state: &mut StageState,
        context: &Context<'_>,
        packet: &Packet,
        max_frame: usize,
    ) -> Option<Packet> {
        // Copies of a long frame share all but its first bytes.
        let mut room = QuoteRoom::new();
        let frame = room.quote(packet);
        let layers = state.parser.parse_stack(frame, 0, packet.len()).ok()?;
        let (_, from) = layers.ip_addresses(frame)?;
        let mac = MacAddr(*frame.first_chunk()?);
        let mtu = u16::try_from(max_frame.checked_sub(layers.l3() - layers.l2())?).unwrap_or(u16::MAX);
        if mac.is_multicast() || !state.icmp_limiter.take(1, context.now()) {
            return None;
        }
        let mut message = state.pool.take()?;
        let out = message.append(max_icmp_error_len(&layers).min(message.tailroom()))?;
        let len = icmp_error(out, frame, &layers, mac, from, IcmpError::TooBig(mtu)).ok()?;
        message.truncate(len);
        message.set_in_port(packet.in_port());
        Some(message)
    }
}

/// Cuts a superframe and passes its frames to `send`.
#[cold]
pub(super) fn cut(
    state: &mut StageState,
    context: &mut Context<'_>,
    packet: Packet,
    mut send: impl FnMut(&mut StageState, &mut Context<'_>, Packet),
) {
    let mut cutter = match Cutter::new(packet, None) {
        Ok(cutter) => cutter,
        Err((packet, reason)) => return context.drop(packet, reason),
    };
    // One of the frames stands for the superframe.
    context.count_copies(cutter.remaining().saturating_sub(1));
    while let Some(frame) = cutter.next_frame(&state.pool) {
        match frame {
            Ok(frame) => send(state, context, frame),
            Err(reason) => context.count_drops(reason, 1),
        }
    }
}

/// Determines each frame's attachment from its VLAN tag and removes the tag. Drops frames that belong to no
/// segment.
#[inline(never)]
fn sort_by_tag(local: &LocalPort, context: &mut Context<'_>, batch: &mut Batch, attachments: &mut [u32; BATCH]) {
    let mut kept = 0;
    batch.filter_map(|mut packet| {
        packet.pull_up(packet.len().min(QUICK));
        let before = packet.data().get(12..14).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        // Attachments match only 802.1Q tags, not service tags.
        let other = packet.vlan().is_none() && before == Some(EtherType::QINQ.0);
        let attachment = match pop_vlan_tag(&mut packet) {
            _ if other => None,
            // VLAN ID 0 carries only a priority.
            None | Some(0) => local.untagged(),
            Some(id) => local.vlan(id),
        };
        match attachment {
            Some(index) => {
                attachments[kept % BATCH] = index;
                kept += 1;
                Some(packet)
            }
            None => {
                context.drop(packet, DropReason::NoSegment);
                None
            }
        }
    });
}

/// Adds the outer headers to an inner frame. If the template is of a tunnel that carries IP packets, the Ethernet
/// header of the frame is removed before. The length is at most [`super::tables::Remote::max_frame`], so the packet is
/// not longer than IP allows. `sequence` is that of the remote.
#[inline(always)]
pub(super) fn encapsulate(
    packet: &mut Packet,
    template: &OuterHeaders,
    underlay: &Underlay,
    flow: Flow,
    sequence: &Option<Arc<AtomicU32>>,
) -> Result<(), DropReason> {
    let (len, source_port) = (packet.len(), underlay.source_port(flow.entropy));
    let class = flow.class & underlay.copied_class;
    if template.is_plain_with(class) {
        let Some(room) = packet.prepend_for::<PLAIN_LEN>(underlay.port) else { return Err(DropReason::NoHeadroom) };
        template.emit_plain(room, len as u16, source_port);
        return Ok(());
    }
    encapsulate_other(packet, template, underlay, Flow { class, ..flow }, source_port, sequence)
}

/// Adds outer headers to frames for one remote, until one is too long or has a class that is copied. Returns their
/// number and bytes. The template is plain, or else short and for Ethernet frames.
///
/// The function has few values, so they stay in registers.
#[inline(never)]
fn encapsulate_run<const PLAIN: bool>(
    packets: &mut [Packet],
    flows: &[Flow],
    template: &OuterHeaders,
    max_frame: usize,
    underlay: &Underlay,
) -> (usize, usize) {
    let (mut sent, mut bytes) = (0, 0);
    for (packet, flow) in packets.iter_mut().zip(flows) {
        let len = packet.len();
        if len > max_frame || flow.class & underlay.copied_class != 0 {
            break;
        }
        let (source_port, entropy) = (underlay.source_port(flow.entropy), flow.entropy);
        if PLAIN {
            let Some(room) = packet.prepend_for::<PLAIN_LEN>(underlay.port) else { break };
            template.emit_plain(room, len as u16, source_port);
        } else {
            let inner_sum = if template.needs_sum() { packet_checksum(packet) } else { Sum::ZERO };
            let Some(room) = packet.prepend_slice(template.len()) else { break };
            let fields = ShortFields { inner_len: len as u16, source_port, entropy, carries_ipv6: false, inner_sum };
            // The room has the length of the template.
            let _ = template.emit_short(room, &fields);
            packet.set_out_port(underlay.port);
            packet.set_checksum_status(ChecksumStatus::NONE);
        }
        sent += 1;
        bytes += len;
    }
    (sent, bytes)
}

/// Leaves the outer headers to the NIC if it would write the same ones. It cannot copy a mark or DSCP, and it
/// cannot finish transmit offloads that the packet still requests.
#[inline]
pub(super) fn encapsulate_in_nic(packet: &mut Packet, numbers: NicNumbers, underlay: &Underlay, flow: Flow) -> bool {
    let flags = packet.flags();
    if flow.class & underlay.copied_class != 0 || flags.intersects(TX_OFFLOADS) || packet.vlan().is_some() {
        return false;
    }
    packet.set_mark(numbers.of(packet.data()));
    packet.set_flags(packet.flags().with(Flags::TX_METADATA));
    packet.set_out_port(underlay.port);
    packet.set_checksum_status(ChecksumStatus::NONE);
    true
}

/// Adds outer headers that are not plain. The class of `flow` has only the bits that are copied.
#[inline(never)]
fn encapsulate_other(
    packet: &mut Packet,
    template: &OuterHeaders,
    underlay: &Underlay,
    flow: Flow,
    source_port: u16,
    sequence: &Option<Arc<AtomicU32>>,
) -> Result<(), DropReason> {
    let mut carries_ipv6 = false;
    if template.carries_packets() {
        if !packet.trim_front(ETHERNET_LEN) {
            return Err(DropReason::TooShort);
        }
        carries_ipv6 = packet.data().first().is_some_and(|byte| byte >> 4 == 6);
    }
    if !template.is_short_with(flow.class) || packet.flags().contains(Flags::TX_SEGMENT) {
        return encapsulate_slow(packet, template, underlay, flow, source_port, carries_ipv6, sequence);
    }
    let inner_sum = if template.needs_sum() { packet_checksum(packet) } else { Sum::ZERO };
    let inner_len = packet.len() as u16;
    let Some(room) = packet.prepend_slice(template.len()) else { return Err(DropReason::NoHeadroom) };
    let fields = ShortFields { inner_len, source_port, entropy: flow.entropy, carries_ipv6, inner_sum };
    template.emit_short(room, &fields).ok_or(DropReason::TooLong)?;
    packet.set_out_port(underlay.port);
    packet.set_checksum_status(ChecksumStatus::NONE);
    Ok(())
}

/// Adds the outer headers of all forms, such as those with a congestion mark or a VLAN tag.
#[inline(never)]
fn encapsulate_slow(
    packet: &mut Packet,
    template: &OuterHeaders,
    underlay: &Underlay,
    flow: Flow,
    source_port: u16,
    carries_ipv6: bool,
    sequence: &Option<Arc<AtomicU32>>,
) -> Result<(), DropReason> {
    let mut patch = template.fields(packet.len(), source_port);
    // RFC 6040 section 4.1: the mark is copied. RFC 2983: the DSCP is copied if configured.
    patch.traffic_class |= flow.class;
    patch.entropy = flow.entropy;
    patch.carries_ipv6 = carries_ipv6;
    if let Some(sequence) = sequence {
        // Each number is used once. Packets of one worker leave in the order of their numbers.
        patch.sequence = sequence.fetch_add(1, Ordering::Relaxed);
    }
    // The port or the kernel computes the sums of the packets that it makes of a superframe.
    if template.needs_sum() && !packet.flags().contains(Flags::TX_SEGMENT) {
        patch.inner_sum = packet_checksum(packet);
    }
    let Some(room) = packet.prepend_slice(template.len()) else { return Err(DropReason::NoHeadroom) };
    template.emit(room, &patch).map_err(|_| DropReason::TooLong)?;
    packet.set_out_port(underlay.port);
    packet.set_checksum_status(ChecksumStatus::NONE);
    Ok(())
}
