//! From local stations into tunnels.
//!
//! A batch goes through in three passes: what each frame says (addresses, flow, mark), the lookups with all lines asked for before
//! the first is needed, and the headers. What is not plain unicast to a reachable remote is only marked meanwhile and goes one by one
//! through [`GatewayTables::encapsulate_one`] afterwards.

use std::net::IpAddr;
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::{BATCH, Batch, Packet};
use wirepath_pmd::port::PortId;
use wirepath_wire::build::{too_big, too_big_room};
use wirepath_wire::{EtherType, MacAddr};

use super::config::InnerVlans;
use super::stage::{
    Flow, GatewayTables, KnownSource, PuntCode, Scratch, State, Tally, in_nic, take_tag, to_attachment, wrap,
};
use super::tables::{Destination, ETHERNET, LocalPort, Reach, Remotes};
use crate::Context;
use crate::table::{HashTable, Key};

/// Bytes that the quick look at a frame needs: Ethernet, IPv4 without options, ports.
const QUICK: usize = 38;

/// The number in network order at `at`. The compiler makes one load of it; put together from single bytes it would be eight.
#[inline(always)]
pub(super) fn be64<const N: usize>(header: &[u8; N], at: usize) -> u64 {
    header[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// The key of the Ethernet destination and of the source, and the EtherType.
#[inline(always)]
pub(super) fn addresses(header: &[u8; ETHERNET], segment: u16) -> (Key, Key, u16) {
    let segment = u64::from(segment) << 48;
    let tail = be64(header, 6);
    (Key::from_u64(segment | be64(header, 0) >> 16), Key::from_u64(segment | tail >> 16), tail as u16)
}

/// One word of a hash.
#[inline(always)]
fn mix(state: u64, word: u64) -> u64 {
    let product = u128::from(state ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
    product as u64 ^ (product >> 64) as u64
}

/// Flow of an IPv4 packet without options that is not a fragment; `None` for whatever else.
#[inline(always)]
fn quick_flow(h: &[u8; QUICK], ethertype: u16) -> Option<Flow> {
    let version = be64(h, 14);
    // Version 4, five words; no offset and no more fragments, whatever "don't fragment" says.
    if ethertype != EtherType::IPV4.0 || version & 0xff00_0000_0000_3fff != 0x4500_0000_0000_0000 {
        return None;
    }
    let addresses = be64(h, 26);
    let protocol = h[23];
    // Other protocols have something else in place of ports, which differs between packets of a flow.
    let mask = if protocol == 6 || protocol == 17 { u32::MAX } else { 0 };
    let ports = be64(h, 30) as u32 & mask;
    let hash = mix(addresses, u64::from(ports) | u64::from(protocol) << 32);
    Some(Flow { entropy: (hash ^ hash >> 32) as u32, class: h[15] })
}

impl GatewayTables {
    /// Takes a batch that came in by a local port.
    #[inline(always)]
    pub(super) fn encapsulate(&self, state: &mut State, context: &mut Context<'_>, batch: &mut Batch, port: PortId) {
        let Some(local) = self.layout.local(port) else { return context.drop_batch(batch, DropReason::NoSegment) };
        if local.has_vlans() {
            sort_by_tag(local, context, batch, &mut state.scratch.attachments);
            self.encapsulate_sorted(state, context, batch);
        } else {
            match local.untagged() {
                Some(index) => self.encapsulate_from::<false>(state, context, batch, index),
                None => context.drop_batch(batch, DropReason::NoSegment),
            }
        }
    }

    #[inline(never)]
    fn encapsulate_sorted(&self, state: &mut State, context: &mut Context<'_>, batch: &mut Batch) {
        self.encapsulate_from::<true>(state, context, batch, 0);
    }

    /// Takes a batch whose packets come from attachment `from`, or, if `SORTED`, each from its own as noted in the scratch space.
    #[inline(always)]
    fn encapsulate_from<const SORTED: bool>(
        &self,
        state: &mut State,
        context: &mut Context<'_>,
        batch: &mut Batch,
        from: u32,
    ) {
        let guard = context.guard();
        let (fdb, remotes) = (self.fdb.table(guard), self.remotes.read(guard));
        let second = context.seconds();
        state.source.renew(self.fdb.generation(), second);
        let Some(first) = self.layout.attachments.get(from as usize) else { return };

        let Scratch { keys, flows, sources, source_at, attachments } = &mut *state.scratch;
        let (mut new_sources, mut slow) = (0, 0u64);
        let counters = &state.counters;
        let count_rx = |segment: u16, packets, bytes| {
            if let Some(c) = counters.get(usize::from(segment)) {
                c.local_rx.add(packets, bytes);
            }
        };
        let mut tally = Tally::new(first.segment);
        let mut last = (state.source.key, state.source.destination);
        for (i, packet) in batch.as_slice().iter().enumerate() {
            let here = if SORTED { attachments[i] } else { from };
            let segment = if SORTED {
                self.layout.attachments.get(here as usize).map_or(first.segment, |attachment| attachment.segment)
            } else {
                first.segment
            };
            let data = packet.data();
            tally.add(segment, packet.len(), count_rx);
            let quick = data.first_chunk::<QUICK>();
            let (Some(quick), Some(ethernet)) = (quick, data.first_chunk()) else {
                slow |= 1 << i;
                continue;
            };
            // Whether the destination is a station is not looked at: no table has another address, so the lookup fails.
            let (dst, src, ethertype) = addresses(ethernet, segment);
            keys[i] = dst;
            flows[i] = match quick_flow(quick, ethertype) {
                Some(flow) => flow,
                None => {
                    slow |= u64::from(EtherType(ethertype).is_vlan()) << i;
                    Flow::of(data, packet.len(), &state.parser)
                }
            };
            slow |= u64::from(packet.vlan().is_some()) << i;
            if (src, here) != last {
                if !src.is_station() {
                    slow |= 1 << i;
                    continue;
                }
                last = (src, here);
                sources[new_sources] = src;
                source_at[new_sources] = here;
                new_sources += 1;
            }
        }
        tally.end(count_rx);
        let here = |j: usize| Destination::Attachment(source_at[j]);
        self.seen_all(context, fdb, &sources[..new_sources], here, second, &mut state.source);

        let packets = batch.as_mut_slice();
        let underlay = &self.layout.underlay;
        let mut tally = Tally::new(first.segment);
        let count_tx = |segment: u16, packets, bytes| {
            if let Some(c) = counters.get(usize::from(segment)) {
                c.overlay_tx.add(packets, bytes);
            }
        };
        let n = packets.len();
        fdb.find_batch(&keys[..n], |i, entry| {
            let packet = &mut packets[i];
            if let Some(entry) = entry
                && let Destination::Remote(remote) = Destination::unpack(entry.destination())
                && let Some(remote) = remotes.list.get(remote as usize)
                && slow & 1 << i == 0
            {
                let len = packet.len();
                let done = match &remote.reach {
                    Reach::Ready(template) => {
                        len <= remote.max_frame && wrap(packet, template, underlay, flows[i]).is_ok()
                    }
                    Reach::InNic(_, number)
                        if len <= remote.max_frame && in_nic(packet, *number, underlay, flows[i]) =>
                    {
                        if let Some(c) = counters.get(usize::from(remote.segment)) {
                            c.nic_encapsulated.add(1);
                        }
                        true
                    }
                    _ => false,
                };
                if done {
                    // Keys carry the segment, so the remote's is the one that the frame came from.
                    tally.add(if SORTED { remote.segment } else { first.segment }, len, count_tx);
                    return;
                }
            }
            slow |= 1 << i;
        });
        tally.end(count_tx);
        if slow != 0 {
            let mut i = 0;
            batch.filter_map(|packet| {
                let at = i;
                i += 1;
                if slow & 1 << at == 0 {
                    return Some(packet);
                }
                let from = if SORTED { state.scratch.attachments[at % BATCH] } else { from };
                self.encapsulate_one(state, context, remotes, packet, from);
                None
            });
        }
    }

    /// [`Self::seen`] for the sources of a batch; the last one is remembered if it is where it was known to be.
    #[inline(always)]
    pub(super) fn seen_all(
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
        fdb.find_batch(sources, |j, entry| known = self.seen(context, sources[j], here(j), entry, second));
        if let Some((key, destination)) = known {
            remembered.key = key;
            remembered.destination = destination;
        }
    }

    /// Compares where a source is with where it was known to be. `Some` if that was the same.
    #[inline(always)]
    pub(super) fn seen(
        &self,
        context: &mut Context<'_>,
        source: Key,
        here: Destination,
        entry: Option<&crate::table::Entry>,
        second: u32,
    ) -> Option<(Key, u32)> {
        let here = here.pack();
        let learns = self.layout.segments.get(usize::from(source.segment())).is_some_and(|s| s.learning);
        match entry {
            Some(entry) if entry.destination() == here => {
                entry.touch(second);
                return Some((source, here));
            }
            // A static entry holds, whatever is seen.
            Some(entry) if entry.seen() == u32::MAX => {}
            _ if learns && source.is_station() => context.learn(source, here),
            _ => {}
        }
        None
    }

    /// Takes one frame that is not as plain as most.
    #[cold]
    #[inline(never)]
    fn encapsulate_one(
        &self,
        state: &mut State,
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
        packet.pull_up(packet.len().min(128));
        let Some(header) = packet.data().first_chunk::<ETHERNET>() else {
            return context.drop(packet, DropReason::TooShort);
        };
        let (dst, src, ethertype) = addresses(header, attachment.segment);
        if EtherType(ethertype).is_vlan() || packet.vlan().is_some() {
            if segment.inner_vlans == InnerVlans::Discard {
                return context.drop(packet, DropReason::NoSegment);
            }
            if let Some(tci) = packet.vlan() {
                // Inside a tunnel there is no place beside the frame.
                packet.clear_vlan();
                if packet.prepend_slice(super::tables::TAG).is_none() {
                    return context.drop(packet, DropReason::NoHeadroom);
                }
                wirepath_wire::vlan::push(packet.data_mut(), wirepath_wire::Tag { tpid: EtherType::VLAN, tci });
            }
        }
        if !src.is_station() {
            return context.drop(packet, DropReason::BadSource);
        }
        let guard = context.guard();
        let fdb = self.fdb.table(guard);
        if packet.data().len() < QUICK || EtherType(ethertype).is_vlan() {
            // The quick look did not come to this.
            self.seen(context, src, Destination::Attachment(from), fdb.find(src), context.seconds());
        }
        if MacAddr(dst.mac()).is_link_local() {
            return context.drop(packet, DropReason::Reserved);
        }
        let flow = Flow::of(packet.data(), packet.len(), &state.parser);
        let known = dst.is_station().then(|| fdb.lookup(dst)).filter(|d| *d != crate::table::NO_DESTINATION);
        match known.map(Destination::unpack) {
            None => {
                if let Some(c) = state.counters.get(usize::from(attachment.segment)) {
                    c.unknown_unicast.add(u64::from(dst.is_station()));
                }
                self.flood(state, context, remotes, packet, Destination::Attachment(from), attachment.segment, flow);
            }
            Some(Destination::Attachment(to)) if to == from => context.drop(packet, DropReason::SamePort),
            Some(Destination::Attachment(to)) => self.deliver(state, context, packet, to),
            Some(Destination::Remote(to)) => self.send_to(state, context, remotes, packet, to, flow, Some(from)),
        }
    }

    /// Sends a frame to a local attachment.
    pub(super) fn deliver(&self, state: &mut State, context: &mut Context<'_>, mut packet: Packet, to: u32) {
        let Some(attachment) = self.layout.attachments.get(to as usize) else {
            return context.drop(packet, DropReason::NoSegment);
        };
        let len = packet.len();
        match to_attachment(&mut packet, attachment) {
            Ok(()) => {
                if let Some(c) = state.counters.get(usize::from(attachment.segment)) {
                    c.local_tx.add(1, len);
                }
                context.send(attachment.port, packet);
            }
            Err(reason) => context.drop(packet, reason),
        }
    }

    /// Sends a frame to a remote. If it is too long, its sender is told, who is behind attachment `sender`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn send_to(
        &self,
        state: &mut State,
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
        let len = packet.len();
        if len > remote.max_frame {
            return self.refuse_too_big(state, context, packet, remote.max_frame, sender);
        }
        match &remote.reach {
            Reach::InNic(_, number) if in_nic(&mut packet, *number, &self.layout.underlay, flow) => {
                if let Some(c) = state.counters.get(usize::from(remote.segment)) {
                    c.overlay_tx.add(1, len);
                    c.nic_encapsulated.add(1);
                }
                context.send(self.layout.underlay.port, packet);
            }
            Reach::Ready(template) | Reach::InNic(template, _) => {
                match wrap(&mut packet, template, &self.layout.underlay, flow) {
                    Ok(()) => {
                        if let Some(c) = state.counters.get(usize::from(remote.segment)) {
                            c.overlay_tx.add(1, len);
                        }
                        context.send(self.layout.underlay.port, packet);
                    }
                    Err(reason) => context.drop(packet, reason),
                }
            }
            Reach::Resolving => state.punt(context, packet, PuntCode::Unresolved(to)),
            Reach::Unreachable => context.drop(packet, DropReason::NoNeighbour),
        }
    }

    fn refuse_too_big(
        &self,
        state: &mut State,
        context: &mut Context<'_>,
        packet: Packet,
        max_frame: usize,
        sender: Option<u32>,
    ) {
        if let Some(sender) = sender
            && let Some(attachment) = self.layout.attachments.get(sender as usize)
        {
            let told = self.tell_too_big(state, context, &packet, max_frame);
            if let Some(c) = state.counters.get(usize::from(attachment.segment)) {
                c.too_big.add(1);
                c.told_too_big.add(u64::from(told.is_some()));
            }
            if let Some(message) = told {
                self.deliver(state, context, message, sender);
            }
        }
        context.drop(packet, DropReason::TooBigForMtu);
    }

    /// The ICMP message that a packet is too big, in the name of its destination: a bridge has no address of its own there.
    fn tell_too_big(
        &self,
        state: &mut State,
        context: &Context<'_>,
        packet: &Packet,
        max_frame: usize,
    ) -> Option<Packet> {
        let frame = packet.data();
        let layers = state.parser.layers(frame, 0, packet.len()).ok()?;
        let from = match (layers.ipv4_header(frame), layers.ipv6_header(frame)) {
            (Some(h), _) => IpAddr::from([h[16], h[17], h[18], h[19]]),
            (_, Some(h)) => IpAddr::from(*h[24..].first_chunk::<16>()?),
            _ => return None,
        };
        let mac = MacAddr(*frame.first_chunk()?);
        let mtu = u16::try_from(max_frame.checked_sub(layers.l3() - layers.l2())?).unwrap_or(u16::MAX);
        if mac.is_group() || !state.told.take(context.now() / 1_000_000) {
            return None;
        }
        let mut message = state.pool.take()?;
        let room = message.append(too_big_room(&layers).min(message.tailroom()))?;
        let len = too_big(room, frame, &layers, mac, from, mtu).ok()?;
        message.truncate(len);
        message.set_in_port(packet.in_port());
        Some(message)
    }
}

/// Finds each frame's attachment by its tag, takes the tag off, and drops frames that belong to no segment.
#[inline(never)]
fn sort_by_tag(local: &LocalPort, context: &mut Context<'_>, batch: &mut Batch, attachments: &mut [u32; BATCH]) {
    let mut kept = 0;
    batch.filter_map(|mut packet| {
        packet.pull_up(packet.len().min(QUICK));
        let before = packet.data().get(12..14).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        // A service tag is none of the VLANs that attachments name.
        let other = packet.vlan().is_none() && before == Some(EtherType::QINQ.0);
        let attachment = match take_tag(&mut packet) {
            _ if other => None,
            // Tag 0 gives a priority only.
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
