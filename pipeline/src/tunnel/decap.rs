//! Out of tunnels to local stations.
//!
//! As in [`super::encap`]: three passes for plain packets (IPv4, no options, no UDP checksum, no mark, known remote, untagged inner
//! frame to a known station), and [`GatewayTables::decapsulate_one`] for all others, which parses everything and names what it
//! refuses.

use std::net::{IpAddr, Ipv4Addr};

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::offload::{Flags, Verdicts};
use wirepath_pmd::packet::{Batch, Packet};
use wirepath_wire::finish::Coverage;
use wirepath_wire::{EtherType, IpProtocol, L3, L4, MacAddr, checksum, vxlan};

use super::config::InnerVlans;
use super::encap::{addresses, be64};
use super::stage::{Flow, GatewayTables, PuntCode, Scratch, State, Tally, take_tag, to_attachment};
use super::tables::{Destination, ETHERNET, Remotes};
use crate::Context;
use crate::rules::hardware::OWN;

/// Outer headers over IPv4 without tag.
const OUTER4: usize = 50;
/// These and the inner Ethernet header.
const QUICK: usize = OUTER4 + ETHERNET;
/// Header bytes that are looked at: outer Ethernet with a tag, IPv6 with some extension headers, UDP, VXLAN, inner Ethernet with tags,
/// inner IP.
const HEADERS: usize = 256;

/// What a plain packet is addressed to, as the comparison wants it.
struct Ours {
    mac: u64,
    ip: u64,
    udp_port: u64,
}

/// What a plain packet's outer headers say: VNI and source.
#[inline(always)]
fn quick_outer(h: &[u8; QUICK], len: usize, ours: &Ours) -> Option<(u32, u32)> {
    let (link, version, fragment) = (be64(h, 0), be64(h, 12), be64(h, 20));
    let (addresses, udp, tunnel) = (be64(h, 26), be64(h, 34), be64(h, 42));
    let total = version >> 16 & 0xffff;
    let udp_len = udp >> 16 & 0xffff;
    // Each term is zero if its field is as it should be: one branch for all of them.
    let mut wrong = (link >> 16) ^ ours.mac;
    // Marks ECT(0) and Not-ECT change nothing inside; the other two do (RFC 6040).
    wrong |= (version >> 32 & 0xffff_ff01) ^ 0x0800_4500;
    wrong |= fragment >> 48 & 0x3fff;
    wrong |= (fragment >> 32 & 0xff) ^ u64::from(IpProtocol::UDP.0);
    wrong |= (addresses & 0xffff_ffff) ^ ours.ip;
    wrong |= (udp >> 32 & 0xffff) ^ ours.udp_port;
    wrong |= udp & 0xffff;
    wrong |= (!tunnel >> 56) & u64::from(vxlan::FLAG_VNI);
    wrong |= (total + ETHERNET as u64) ^ len as u64;
    wrong |= (udp_len + 20) ^ total;
    // The ones' complement sum does not mind the width of its words (RFC 1071 section 2).
    let (first, second) = (be64(h, 14), be64(h, 22));
    let low = 0xffff_ffff;
    let sum = (first >> 32) + (first & low) + (second >> 32) + (second & low) + (addresses & low);
    let sum = (sum >> 32) + (sum & low);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    wrong |= sum ^ 0xffff;
    (wrong == 0).then_some(((tunnel >> 8) as u32 & 0xff_ffff, (addresses >> 32) as u32))
}

/// What becomes of a packet that is not plain.
enum Refuse {
    Drop(DropReason),
    Punt(PuntCode),
}

impl From<DropReason> for Refuse {
    fn from(reason: DropReason) -> Self {
        Self::Drop(reason)
    }
}

impl GatewayTables {
    /// Takes a batch that came in by the underlay port.
    #[inline(always)]
    pub(super) fn decapsulate(&self, state: &mut State, context: &mut Context<'_>, batch: &mut Batch) {
        let underlay = &self.layout.underlay;
        if self.remotes.read(context.guard()).opened_by_nic && batch.iter().any(|packet| opened(packet).is_some()) {
            return self.take_opened(state, context, batch);
        }
        if let Some(vlan) = underlay.vlan {
            strip_underlay_tag(context, batch, vlan);
        }
        let guard = context.guard();
        let (fdb, remotes) = (self.fdb.table(guard), self.remotes.read(guard));
        let second = context.seconds();
        state.source.renew(self.fdb.generation(), second);
        let ours = Ours {
            mac: underlay.mac.to_u64(),
            ip: underlay.v4.first().map_or(0, |ip| ip.to_bits()).into(),
            udp_port: underlay.udp_port.into(),
        };

        let Scratch { keys, sources, source_at: source_remote, .. } = &mut *state.scratch;
        let (mut new_sources, mut slow) = (0, 0u64);
        let mut last = (state.source.key, state.source.destination);
        // VNI and source of the packet before, and what came of them.
        let mut tunnel = (u32::MAX, 0u32, 0u32, 0u16);
        for (i, packet) in batch.as_slice().iter().enumerate() {
            slow |= 1 << i;
            let Some(quick) = packet.data().first_chunk::<QUICK>() else { continue };
            let Some((vni, source)) = quick_outer(quick, packet.len(), &ours) else { continue };
            if (vni, source) != (tunnel.0, tunnel.1) {
                let Some(remote) = remotes.source(vni, IpAddr::V4(Ipv4Addr::from_bits(source))) else { continue };
                let Some(segment) = remotes.list.get(remote as usize).map(|r| r.segment) else { continue };
                tunnel = (vni, source, remote, segment);
            }
            let (_, _, remote, segment) = tunnel;
            let Some(inner) = quick.last_chunk::<ETHERNET>() else { continue };
            let (dst, src, ethertype) = addresses(inner, segment);
            if EtherType(ethertype).is_vlan() || packet.vlan().is_some() {
                continue;
            }
            // Whether the destination is a station is not looked at: no table has another address, so the lookup fails.
            keys[i] = dst;
            let here = Destination::Remote(remote).pack();
            if (src, here) != last {
                if !src.is_station() {
                    continue;
                }
                last = (src, here);
                sources[new_sources] = src;
                source_remote[new_sources] = remote;
                new_sources += 1;
            }
            slow &= !(1 << i);
        }
        let here = |j: usize| Destination::Remote(source_remote[j]);
        self.seen_all(context, fdb, &sources[..new_sources], here, second, &mut state.source);

        let packets = batch.as_mut_slice();
        let segment = remotes.list.get(tunnel.2 as usize).map_or(0, |remote| remote.segment);
        // What comes out of a tunnel plainly goes to a station of the same segment: one tally for both counters.
        let mut tally = Tally::new(segment);
        let counters = &state.counters;
        let count = |segment: u16, packets, bytes| {
            if let Some(c) = counters.get(usize::from(segment)) {
                c.overlay_rx.add(packets, bytes);
                c.local_tx.add(packets, bytes);
            }
        };
        let n = packets.len();
        fdb.find_batch(&keys[..n], |i, entry| {
            if slow & 1 << i != 0 {
                return;
            }
            slow |= 1 << i;
            let Some(entry) = entry else { return };
            let Destination::Attachment(to) = Destination::unpack(entry.destination()) else { return };
            let Some(attachment) = self.layout.attachments.get(to as usize) else { return };
            let packet = &mut packets[i];
            let len = packet.len() - OUTER4;
            if len > attachment.max_frame || !packet.trim_front(OUTER4) {
                return;
            }
            packet.set_verdicts(Verdicts::NONE);
            // With the room that the outer headers left there is always room for a tag.
            if to_attachment(packet, attachment).is_ok() {
                slow &= !(1 << i);
                tally.add(attachment.segment, len, count);
            }
        });
        tally.end(count);
        if slow != 0 {
            let mut i = 0;
            batch.filter_map(|packet| {
                let at = i;
                i += 1;
                if slow & 1 << at == 0 {
                    return Some(packet);
                }
                self.decapsulate_one(state, context, remotes, packet);
                None
            });
        }
    }

    /// Takes a batch of which the NIC has opened some packets. All keep their order.
    #[cold]
    #[inline(never)]
    fn take_opened(&self, state: &mut State, context: &mut Context<'_>, batch: &mut Batch) {
        let remotes = self.remotes.read(context.guard());
        batch.filter_map(|mut packet| {
            let Some(remote) = opened(&packet) else {
                if let Some(vlan) = self.layout.underlay.vlan {
                    packet.pull_up(packet.len().min(QUICK));
                    if take_tag(&mut packet) != Some(vlan) {
                        context.drop(packet, DropReason::NotForUs);
                        return None;
                    }
                }
                self.decapsulate_one(state, context, remotes, packet);
                return None;
            };
            let Some(segment) = remotes.list.get(remote as usize).map(|remote| remote.segment) else {
                context.drop(packet, DropReason::UnknownRemote);
                return None;
            };
            if let Some(c) = state.counters.get(usize::from(segment)) {
                c.nic_decapsulated.add(1);
            }
            packet.set_flags(packet.flags().without(Flags::MARK));
            packet.set_verdicts(Verdicts::NONE);
            packet.pull_up(packet.len().min(HEADERS));
            self.inside(state, context, remotes, packet, Some(remote), segment);
            None
        });
    }

    /// Takes one packet that is not as plain as most.
    #[cold]
    #[inline(never)]
    fn decapsulate_one(&self, state: &mut State, context: &mut Context<'_>, remotes: &Remotes, mut packet: Packet) {
        match self.open(state, remotes, &mut packet) {
            Ok((remote, segment)) => self.inside(state, context, remotes, packet, remote, segment),
            Err(Refuse::Drop(reason)) => context.drop(packet, reason),
            Err(Refuse::Punt(code)) => state.punt(context, packet, code),
        }
    }

    /// Checks everything outside the inner frame and takes it off. Returns the remote, if it is one that is known, and the segment.
    fn open(&self, state: &State, remotes: &Remotes, packet: &mut Packet) -> Result<(Option<u32>, u16), Refuse> {
        let underlay = &self.layout.underlay;
        if packet.vlan().is_some() {
            return Err(DropReason::NotForUs.into());
        }
        packet.pull_up(packet.len().min(HEADERS));
        let frame = packet.data();
        let dst_mac = MacAddr(*frame.first_chunk().ok_or(DropReason::TooShort)?);
        if dst_mac != underlay.mac && !dst_mac.is_group() {
            return Err(DropReason::NotForUs.into());
        }
        let outer = state.parser.layers(frame, 0, packet.len()).map_err(DropReason::from)?;
        if outer.tag_count() > 0 || outer.has_labels() {
            return Err(DropReason::NotForUs.into());
        }
        let (src, dst) = match outer.l3_kind() {
            L3::Arp => return Err(Refuse::Punt(PuntCode::Host)),
            L3::Ipv4 => {
                let h = outer.ipv4_header(frame).ok_or(DropReason::Truncated)?;
                (IpAddr::from([h[12], h[13], h[14], h[15]]), IpAddr::from([h[16], h[17], h[18], h[19]]))
            }
            L3::Ipv6 => {
                let h = outer.ipv6_header(frame).ok_or(DropReason::Truncated)?;
                let address = |at: usize| h.get(at..).and_then(|b| b.first_chunk::<16>()).map(|b| IpAddr::from(*b));
                (address(8).ok_or(DropReason::Truncated)?, address(24).ok_or(DropReason::Truncated)?)
            }
            L3::Other => return Err(DropReason::NotForUs.into()),
        };
        if outer.l4_kind() == L4::Icmpv6 && !outer.is_fragment() {
            // Neighbour discovery goes to groups; the control thread looks closer.
            return Err(Refuse::Punt(PuntCode::Host));
        }
        if dst_mac != underlay.mac || !underlay.has(dst) {
            return Err(DropReason::NotForUs.into());
        }
        if outer.is_fragment() {
            return Err(DropReason::OuterFragment.into());
        }
        match outer.l4_kind() {
            L4::Icmpv4 => return Err(Refuse::Punt(PuntCode::Host)),
            L4::Udp => {}
            _ => return Err(DropReason::NotForUs.into()),
        }
        let udp: &[u8; 8] = frame.get(outer.l4()..).and_then(|b| b.first_chunk()).ok_or(DropReason::Truncated)?;
        if u16::from_be_bytes([udp[2], udp[3]]) != underlay.udp_port {
            return Err(DropReason::NotForUs.into());
        }
        let udp_len = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
        match u16::from_be_bytes([udp[6], udp[7]]) {
            // RFC 8200 section 8.1; RFC 6935 section 5 allows it where it is configured.
            0 if outer.l3_kind() == L3::Ipv6 && !underlay.zero_checksum6 => {
                return Err(DropReason::BadL4Checksum.into());
            }
            0 => {}
            _ => check_udp(packet, &outer)?,
        }
        let tunnel = outer.l4() + 8;
        let header: &[u8; 8] = frame.get(tunnel..).and_then(|b| b.first_chunk()).ok_or(DropReason::BadTunnelHeader)?;
        let end = outer.l4() + udp_len;
        let inner = tunnel + vxlan::HEADER_LEN;
        if end < inner || header[0] & vxlan::FLAG_VNI == 0 {
            return Err(DropReason::BadTunnelHeader.into());
        }
        if end < inner + ETHERNET {
            return Err(DropReason::TooShort.into());
        }
        let vni = u32::from_be_bytes([0, header[4], header[5], header[6]]);
        let segment = self.layout.segment_of(vni).ok_or(DropReason::UnknownVni)?;
        let remote = remotes.source(vni, src);
        if remote.is_none() {
            let takes = self.layout.segments.get(usize::from(segment)).is_some_and(|s| s.accept_unknown_remotes);
            let code = Refuse::Punt(PuntCode::NewRemote);
            return Err(if takes { code } else { DropReason::UnknownRemote.into() });
        }
        let class = super::ecn::traffic_class(frame).unwrap_or(0);
        // Behind the datagram there may be padding.
        if !packet.truncate(end) || !packet.trim_front(inner) {
            return Err(DropReason::Truncated.into());
        }
        packet.set_verdicts(Verdicts::NONE);
        packet.pull_up(packet.len().min(HEADERS));
        if !super::ecn::apply(class, packet.data_mut()) {
            return Err(DropReason::BadEcn.into());
        }
        Ok((remote, segment))
    }

    /// Takes the frame that was in a tunnel.
    fn inside(
        &self,
        state: &mut State,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        remote: Option<u32>,
        segment: u16,
    ) {
        if let Some(c) = state.counters.get(usize::from(segment)) {
            c.overlay_rx.add(1, packet.len());
        }
        let Some(header) = packet.data().first_chunk::<ETHERNET>() else {
            return context.drop(packet, DropReason::TooShort);
        };
        let (dst, src, ethertype) = addresses(header, segment);
        let policy = self.layout.segments.get(usize::from(segment)).map(|s| s.inner_vlans);
        if EtherType(ethertype).is_vlan() && policy != Some(InnerVlans::Carry) {
            return context.drop(packet, DropReason::InnerVlan);
        }
        if !src.is_station() {
            return context.drop(packet, DropReason::BadSource);
        }
        let guard = context.guard();
        let fdb = self.fdb.table(guard);
        let from = Destination::Remote(remote.unwrap_or(0));
        if remote.is_some() {
            self.seen(context, src, from, fdb.find(src), context.seconds());
        }
        if MacAddr(dst.mac()).is_link_local() {
            return context.drop(packet, DropReason::Reserved);
        }
        let known = dst.is_station().then(|| fdb.lookup(dst)).filter(|d| *d != crate::table::NO_DESTINATION);
        match known.map(Destination::unpack) {
            None => {
                if let Some(c) = state.counters.get(usize::from(segment)) {
                    c.unknown_unicast.add(u64::from(dst.is_station()));
                }
                self.flood(state, context, remotes, packet, from, segment, Flow::default());
            }
            Some(Destination::Attachment(to)) => self.deliver(state, context, packet, to),
            Some(Destination::Remote(_)) => context.drop(packet, DropReason::SplitHorizon),
        }
    }
}

/// The remote of a packet whose outer headers the NIC has taken off.
#[inline]
fn opened(packet: &Packet) -> Option<u32> {
    packet.mark().filter(|mark| mark & OWN != 0).map(|mark| mark & !OWN)
}

/// Verifies the outer UDP checksum, over all segments, unless the device did.
fn check_udp(packet: &Packet, outer: &wirepath_wire::Layers) -> Result<(), Refuse> {
    if packet.verdicts().contains(Verdicts::OUTER_L4_GOOD) {
        return Ok(());
    }
    let bad = || Refuse::Drop(DropReason::BadL4Checksum);
    let cover = Coverage::of(packet.data(), outer).ok_or_else(bad)?;
    let (mut skip, mut left, mut at) = (cover.start, cover.end.saturating_sub(cover.start), 0);
    let mut sum = cover.pseudo;
    for segment in packet.segments() {
        let here = segment.get(skip.min(segment.len())..).unwrap_or(&[]);
        skip = skip.saturating_sub(segment.len());
        let here = here.get(..left.min(here.len())).unwrap_or(&[]);
        sum = sum.and_at(at, checksum::sum(here));
        at += here.len();
        left -= here.len();
    }
    if left == 0 && sum.is_valid() { Ok(()) } else { Err(bad()) }
}

/// Takes the underlay's tag off; frames without it are not for us.
#[inline(never)]
fn strip_underlay_tag(context: &mut Context<'_>, batch: &mut Batch, vlan: u16) {
    batch.filter_map(|mut packet| {
        packet.pull_up(packet.len().min(QUICK));
        if take_tag(&mut packet) == Some(vlan) {
            return Some(packet);
        }
        context.drop(packet, DropReason::NotForUs);
        None
    });
}
