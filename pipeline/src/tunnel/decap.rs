//! Decapsulation: from tunnels to local attachments.
//!
//! Like [`super::encap`], this processes plain packets in three passes. A plain packet is IPv4 without options, UDP
//! checksum or congestion mark, with the plain header of one kind of tunnels. It comes from a known remote and
//! carries an untagged inner frame to a known host. [`View::decapsulate_known`] takes packets with other outer headers
//! that the slow path has accepted since the last change of a table. [`View::decapsulate_one`], the slow path,
//! processes all other packets. It parses all headers and drops packets with a precise reason.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use wirepath_packet::driver::U64x8;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::superframe::has_plain_datagrams;
use wirepath_packet::{Batch, Packet};
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::{EtherType, HeaderOffsets, IpProtocol, L3Type, L4Type, MacAddr, checksum, ipv4, ipv6};

use super::bfd::MANAGEMENT_MAC;
use super::config::InnerVlans;
use super::encap::{SLOW_FLAGS, addresses, be64, cut};
use super::headers::{ETHERNET_LEN, checksum_of, pop_vlan_tag};
use super::kinds::Payload;
use super::mss::find_handshakes;
use super::outer::{TunnelId, TunnelPacket};
use super::report::STAGE;
use super::stage::{Flow, PuntCode, Scratch, StageState, View, all_marks, deliver_frames, unplace};
use super::tables::{Destination, Remotes, Underlay};
use crate::Context;
use crate::rules::offload::IMPLICIT_MARK;
use crate::table::Key;

/// Length of the outer headers over IPv4 without a VLAN tag.
const OUTER4: usize = 50;
/// Length of the outer headers and the inner Ethernet header.
const QUICK: usize = OUTER4 + ETHERNET_LEN;
/// Number of header bytes that are parsed. They hold outer Ethernet with a tag, IPv6 with some extension
/// headers, UDP, the longest tunnel header, inner Ethernet with tags, and inner IP.
pub(super) const HEADERS: usize = 512;

/// The gateway's addresses and the plain packets of one kind in the form that the fast path compares.
struct LocalEndpoint {
    mac: u64,
    ip: u64,
    udp_port: u64,
    /// Value and mask of the tunnel header's bits.
    tunnel: (u64, u64),
    /// Number of the kind.
    kind: u8,
}

impl LocalEndpoint {
    #[inline(always)]
    fn new(underlay: &Underlay) -> Self {
        Self {
            mac: underlay.mac.to_u64(),
            ip: underlay.v4.first().map_or(0, |ip| ip.to_bits()).into(),
            udp_port: underlay.plain.udp_port,
            tunnel: (underlay.plain.value, underlay.plain.mask),
            kind: underlay.plain.kind,
        }
    }

    /// Returns whether a packet has the IP version, the protocol and the port of plain packets.
    #[inline(always)]
    fn may_be_plain(&self, packet: &Packet) -> bool {
        packet.data().first_chunk::<QUICK>().is_some_and(|h| {
            let port = be64(h, 34) >> 32 & 0xffff;
            h[12] == 0x08 && h[23] == IpProtocol::UDP.0 && port == self.udp_port
        })
    }
}

/// Returns the sum of an IPv4 header without options behind an Ethernet header without a tag; 0xffff if it is valid.
#[inline(always)]
fn ipv4_header_sum<const N: usize>(h: &[u8; N]) -> u64 {
    // The ones' complement sum does not depend on the word size (RFC 1071 section 2).
    let (first, second, last) = (be64(h, 14), be64(h, 22), be64(h, 26));
    let low = 0xffff_ffff;
    let sum = (first >> 32) + (first & low) + (second >> 32) + (second & low) + (last & low);
    let sum = (sum >> 32) + (sum & low);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    (sum >> 16) + (sum & 0xffff)
}

/// Returns the VNI and the source of a plain packet's outer headers.
#[inline(always)]
fn quick_outer(h: &[u8; QUICK], len: usize, ours: &LocalEndpoint) -> Option<(u32, u32)> {
    let (link, version, fragment) = (be64(h, 0), be64(h, 12), be64(h, 20));
    let (addresses, udp, tunnel) = (be64(h, 26), be64(h, 34), be64(h, 42));
    let total = version >> 16 & 0xffff;
    let udp_len = udp >> 16 & 0xffff;
    // Each term is zero if its field has the expected value, so that one branch checks all of them.
    let mut wrong = (link >> 16) ^ ours.mac;
    // The marks ECT(0) and Not-ECT leave the inner mark unchanged; the other two may change it (RFC 6040).
    wrong |= (version >> 32 & 0xffff_ff01) ^ 0x0800_4500;
    wrong |= fragment >> 48 & 0x3fff;
    wrong |= (fragment >> 32 & 0xff) ^ u64::from(IpProtocol::UDP.0);
    wrong |= (addresses & 0xffff_ffff) ^ ours.ip;
    wrong |= (udp >> 32 & 0xffff) ^ ours.udp_port;
    wrong |= udp & 0xffff;
    wrong |= (tunnel ^ ours.tunnel.0) & ours.tunnel.1;
    wrong |= (total + ETHERNET_LEN as u64) ^ len as u64;
    wrong |= (udp_len + 20) ^ total;
    wrong |= ipv4_header_sum(h) ^ 0xffff;
    (wrong == 0).then_some(((tunnel >> 8) as u32 & 0xff_ffff, (addresses >> 32) as u32))
}

/// Bits of the outer headers that packets of one tunnel have in common. Those of the total length, identification and
/// checksum of IPv4, of source port and length of UDP, and of the inner frame are zero.
const SAME: [u8; QUICK] = {
    let mut mask = [0; QUICK];
    let mut at = 0;
    while at < OUTER4 {
        let differs = matches!(at, 16..20 | 24..26 | 34..36 | 38..40);
        mask[at] = if differs { 0 } else { 0xff };
        at += 1;
    }
    mask
};

/// Reads two bytes in the order of the processor.
#[inline(always)]
fn ne16<const N: usize>(h: &[u8; N], at: usize) -> u16 {
    h[at..].first_chunk().map_or(0, |bytes| u16::from_ne_bytes(*bytes))
}

/// Sum of the words of an IPv4 header that packets of one tunnel have in common, at most 0xffff.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommonSum(u64);

impl CommonSum {
    /// With this sum, no checksum is valid.
    const INVALID: Self = Self(1 << 40);

    /// Adds up the words of a header without options behind an Ethernet header without a tag.
    pub(super) fn new<const N: usize>(h: &[u8; N]) -> Self {
        // The ones' complement sum does not depend on the order of bytes (RFC 1071 section 2).
        let sum = [14, 20, 22, 26, 28, 30, 32].iter().map(|at| u64::from(ne16(h, *at))).sum::<u64>();
        let sum = (sum >> 16) + (sum & 0xffff);
        Self((sum >> 16) + (sum & 0xffff))
    }

    /// Returns whether the checksum of a header with these words is valid. Its total length, identification and
    /// checksum are added.
    #[inline(always)]
    pub(super) fn is_valid_with<const N: usize>(self, h: &[u8; N]) -> bool {
        let sum = self.0 + [16, 18, 24].iter().map(|at| u64::from(ne16(h, *at))).sum::<u64>();
        // The sum of four words is a multiple of 0xffff if and only if this is 0xffff.
        (sum >> 16) + (sum & 0xffff) == 0xffff
    }
}

/// Outer headers that [`quick_outer`] has accepted. Packets of the same tunnel need only the checks of what differs.
#[derive(Clone, Copy)]
struct LastOuter {
    header: U64x8,
    sum: CommonSum,
}

impl LastOuter {
    /// No packet is equal, because no checksum is valid.
    #[inline(always)]
    fn none() -> Self {
        Self { header: U64x8::splat(0), sum: CommonSum::INVALID }
    }

    #[inline(always)]
    fn new(h: &[u8; QUICK]) -> Self {
        Self { header: U64x8::from_bytes(h), sum: CommonSum::new(h) }
    }

    /// Returns whether [`quick_outer`] accepts a packet and finds the same tunnel.
    #[inline(always)]
    fn has_same(&self, same: U64x8, h: &[u8; QUICK], len: usize) -> bool {
        let total = usize::from(u16::from_be(ne16(h, 16)));
        total + ETHERNET_LEN == len
            && usize::from(u16::from_be(ne16(h, 38))) + 20 == total
            && self.sum.is_valid_with(h)
            && self.header.equals_in(U64x8::from_bytes(h), same)
    }
}

/// Origin of a packet whose outer headers are removed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripped {
    /// Index of the remote, if it is known.
    pub(super) remote: Option<u32>,
    pub(super) segment: u16,
    /// Form of the packet now.
    pub(super) payload: Payload,
}

/// Outer headers of a packet that can be decapsulated.
pub(super) struct Outer {
    /// Offsets of the headers in front of the tunnel header.
    pub(super) layers: HeaderOffsets,
    pub(super) id: TunnelId,
    pub(super) payload: Payload,
    /// Index of the remote, if it is known.
    pub(super) remote: Option<u32>,
    pub(super) segment: u16,
    /// Offset of the inner frame or IP packet, and its end. Padding may follow.
    pub(super) inner: usize,
    pub(super) end: usize,
    /// DSCP and ECN of the outer IP header.
    class: u8,
    /// True if the tunnel header has a checksum.
    pub(super) has_checksum: bool,
}

/// Result of [`View::read_outer`] for a packet that cannot be decapsulated.
pub(super) enum Unread {
    Rejected(Rejection),
    /// A tunnel packet of no segment: its identifier with start and end of the inner packet, and its source and
    /// destination.
    NoSegment((TunnelId, (usize, usize)), (IpAddr, IpAddr)),
}

impl<R: Into<Rejection>> From<R> for Unread {
    fn from(rejection: R) -> Self {
        Self::Rejected(rejection.into())
    }
}

/// Result for a packet that cannot be decapsulated.
pub(super) enum Rejection {
    Drop(DropReason),
    /// An ARP or ND message for the control thread.
    Host,
    /// A BFD packet for the control thread.
    Bfd,
    /// An ICMP error about a packet that was too long, for the control thread.
    TooBig,
    /// A fragment from a remote, with its source and destination.
    Fragment(HeaderOffsets, (IpAddr, IpAddr)),
    /// An echo request to the gateway.
    Echo(HeaderOffsets, IpAddr),
    /// A tunnel packet of an unknown VTEP in this segment, which accepts such packets.
    NewRemote(u16),
}

impl Rejection {
    /// Describes the result, for traces.
    fn text(&self) -> &'static str {
        match self {
            Self::Drop(_) => "the packet is not decapsulated",
            Self::Host => "an ARP or ND message for the control thread",
            Self::Bfd => "a BFD packet for the control thread",
            Self::TooBig => "an ICMP error about a tunnel packet, for the control thread",
            Self::Fragment(..) => "a fragment of a tunnel packet",
            Self::Echo(..) => "an echo request to the gateway",
            Self::NewRemote(_) => "a tunnel packet of an unknown VTEP, for the control thread",
        }
    }
}

impl From<DropReason> for Rejection {
    fn from(reason: DropReason) -> Self {
        Self::Drop(reason)
    }
}

/// Prefetches the places of the remotes from which plain packets over IPv4 come.
#[inline(never)]
fn prefetch_sources(remotes: &Remotes, packets: &[Packet], kind: u8) {
    for packet in packets {
        let Some(quick) = packet.data().first_chunk::<QUICK>() else { continue };
        let (addresses, tunnel) = (be64(quick, 26), be64(quick, 42));
        let (vni, source) = (tunnel as u32 >> 8, Ipv4Addr::from_bits((addresses >> 32) as u32));
        remotes.prefetch_source(TunnelId { kind, id: Some(vni), sid: None }, source.into());
    }
}

impl View<'_> {
    /// Processes a batch received by the underlay port.
    #[inline(always)]
    pub(super) fn decapsulate(&self, state: &mut StageState, context: &mut Context<'_>, batch: &mut Batch) {
        let underlay = &self.layout.underlay;
        if self.remotes.read(context.guard()).decapsulated_by_nic
            && batch.iter().any(|packet| nic_decapsulated(packet).is_some())
        {
            return self.process_nic_decapsulated(state, context, batch);
        }
        if let Some(vlan) = underlay.vlan {
            strip_underlay_tag(context, batch, vlan);
        }
        let guard = context.guard();
        let (fdb, remotes) = (self.fdb.table(guard), self.remotes.read(guard));
        let second = context.seconds();
        state.source.renew(self.fdb.generation(), second);
        let ours = LocalEndpoint::new(underlay);
        // Packets in a row are often of one kind, so the first one decides. Both ways give the same result.
        if underlay.plain.is_none() || !batch.iter().next().is_some_and(|first| ours.may_be_plain(first)) {
            let all = all_marks(batch.len());
            return self.decapsulate_others(state, context, batch, all, all);
        }
        if remotes.are_many() {
            prefetch_sources(remotes, batch.as_slice(), ours.kind);
        }

        let Scratch { keys, hashes, places, sources, source_at: source_remote, .. } = &mut *state.scratch;
        let (mut new_sources, mut slow, mut other) = (0, 0u64, 0u64);
        let mut last = (state.source.key, state.source.destination);
        let mut known = state.source.in_ipv4_frames();
        let mut outer = LastOuter::none();
        let same = U64x8::from_bytes(&SAME);
        // VNI and source of the previous tunnel.
        let mut tunnel = (u32::MAX, 0u32);
        // The remote and segment found for them, as a destination and as the upper bits of keys.
        let (mut remote, mut here, mut key_base) = (0, Destination::Remote(0).pack(), 0);
        let prepared = keys.iter_mut().zip(hashes.iter_mut());
        for ((i, packet), (key, hash)) in batch.as_slice().iter().enumerate().zip(prepared) {
            let is_fast = 'fast: {
                let Some(quick) = packet.data().first_chunk::<QUICK>() else {
                    other |= 1 << i;
                    break 'fast false;
                };
                if !outer.has_same(same, quick, packet.len()) {
                    let Some((vni, source)) = quick_outer(quick, packet.len(), &ours) else {
                        other |= 1 << i;
                        break 'fast false;
                    };
                    if (vni, source) != tunnel {
                        let id = TunnelId { kind: ours.kind, id: Some(vni), sid: None };
                        let found = remotes.find_source(id, IpAddr::V4(Ipv4Addr::from_bits(source)));
                        let Some(found) = found else { break 'fast false };
                        tunnel = (vni, source);
                        remote = found.remote;
                        here = Destination::Remote(remote).pack();
                        key_base = u64::from(found.segment) << 48;
                    }
                    outer = LastOuter::new(quick);
                }
                let tail = be64(quick, OUTER4 + 6);
                // No table contains a group address, so the lookup of such a destination fails without an extra
                // check.
                *key = Key::from_u64(key_base | be64(quick, OUTER4 - 2) & u64::MAX >> 16);
                *hash = fdb.prepare(*key);
                if packet.flags().intersects(SLOW_FLAGS) {
                    break 'fast false;
                }
                if (tail, here) == known {
                    break 'fast true;
                }
                let ethertype = tail as u16;
                let special = ethertype != EtherType::IPV4.0
                    && (EtherType(ethertype).is_vlan()
                        || self.is_watched(ethertype, packet.data().get(OUTER4..).unwrap_or_default()));
                if special {
                    break 'fast false;
                }
                let src = Key::from_u64(key_base | tail >> 16);
                if (src, here) != last {
                    if !src.is_unicast() {
                        break 'fast false;
                    }
                    last = (src, here);
                    sources[new_sources] = src;
                    source_remote[new_sources] = remote;
                    new_sources += 1;
                }
                if ethertype == EtherType::IPV4.0 {
                    known = (tail, here);
                }
                true
            };
            if !is_fast {
                slow |= 1 << i;
            }
        }
        if !self.layout.inspects {
            // Else the slow path learns, behind the filters.
            let here = |j: usize| Destination::Remote(source_remote[j]);
            self.learn_sources(context, fdb, &sources[..new_sources], here, second, &mut state.source);
        }
        if self.layout.clamps_mss {
            slow |= find_handshakes(batch.as_slice(), OUTER4);
        }
        if context.is_watched() || self.layout.inspects {
            // The slow path gives the same result and reports what it does.
            slow = u64::MAX;
        }

        let packets = batch.as_mut_slice();
        let (layout, worker) = (self.layout, state.worker);
        let special = slow;
        fdb.lookup_all_prepared(&keys[..packets.len()], hashes, places);
        unplace(places, slow);
        // Frames decapsulated here go to an attachment of the same segment.
        let done = deliver_frames::<OUTER4>(layout, packets, places, |segment, packets, bytes| {
            if let Some(c) = layout.counters(segment, worker) {
                c.overlay_rx.add(packets, bytes);
                c.local_tx.add(packets, bytes);
            }
        });
        slow = all_marks(packets.len()) & !done;
        if slow != 0 {
            let routed = self.route_batch::<OUTER4>(state, context, remotes, packets, slow & !special);
            slow &= !routed;
            if slow != 0 {
                self.decapsulate_others(state, context, batch, slow, other);
            }
        }
    }

    /// Processes the packets of a batch that `slow` marks. Those that `other` marks too may have outer headers of any
    /// kind of tunnel. All packets keep their order.
    #[inline(never)]
    fn decapsulate_others(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        batch: &mut Batch,
        mut slow: u64,
        other: u64,
    ) {
        let remotes = self.remotes.read(context.guard());
        let mut stripped = 0;
        if other != 0 && !context.is_watched() && !self.layout.inspects {
            let marks = self.decapsulate_known(state, context, remotes, batch.as_mut_slice(), other);
            slow &= !marks.done;
            stripped = marks.stripped;
        }
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
            } else if stripped & 1 << at == 0 {
                self.decapsulate_one(state, context, remotes, packet);
            } else {
                let remote = state.scratch.remotes[at];
                self.process_stripped(state, context, remotes, packet, remote);
            }
            None
        });
    }

    /// Processes a batch in which the NIC has decapsulated some packets. All packets keep their order.
    #[cold]
    #[inline(never)]
    fn process_nic_decapsulated(&self, state: &mut StageState, context: &mut Context<'_>, batch: &mut Batch) {
        let remotes = self.remotes.read(context.guard());
        batch.filter_map(|mut packet| {
            let Some(remote) = nic_decapsulated(&packet) else {
                if let Some(vlan) = self.layout.underlay.vlan {
                    packet.pull_up(packet.len().min(QUICK));
                    if pop_vlan_tag(&mut packet) != Some(vlan) {
                        context.drop(packet, DropReason::NotForUs);
                        return None;
                    }
                }
                self.decapsulate_one(state, context, remotes, packet);
                return None;
            };
            // A NIC decapsulates packets of a remote that was removed until its rule is removed too.
            let known = remotes.list.get(remote as usize).filter(|remote| !remote.address.is_unspecified());
            let Some(segment) = known.map(|remote| remote.segment) else {
                context.drop(packet, DropReason::UnknownRemote);
                return None;
            };
            if let Some(c) = self.layout.counters(segment, state.worker) {
                c.nic_decapsulated.add(1);
            }
            packet.set_flags(packet.flags().without(Flags::MARK));
            packet.set_checksum_status(ChecksumStatus::NONE);
            packet.pull_up(packet.len().min(HEADERS));
            match self.layout.segments.get(usize::from(segment)).map(|segment| segment.payload) {
                // The NIC has added an Ethernet header. The router's header takes its place.
                Some(Payload::Ip) => {
                    // The EtherType is that of the rule which the packet matched.
                    let (version, least) = match packet.data().get(12..ETHERNET_LEN) {
                        Some([0x08, 0x00]) => (4, ipv4::HEADER_LEN),
                        _ => (6, ipv6::HEADER_LEN),
                    };
                    let first = packet.data().get(ETHERNET_LEN).map(|byte| byte >> 4);
                    if packet.len() < ETHERNET_LEN + least || !packet.trim_front(ETHERNET_LEN) {
                        context.drop(packet, DropReason::Truncated);
                    } else if first != Some(version) {
                        context.drop(packet, DropReason::BadVersion);
                    } else {
                        self.process_inner_packet(state, context, remotes, packet, Some(remote), segment);
                    }
                }
                _ => self.process_inner(state, context, remotes, packet, Some(remote), segment),
            }
            None
        });
    }

    /// Processes one packet on the slow path.
    #[cold]
    #[inline(never)]
    pub(super) fn decapsulate_one(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
    ) {
        if packet.flags().contains(Flags::TX_SEGMENT) && has_plain_datagrams(&packet) {
            // Each datagram may be a tunnel packet on a port that only the gateway knows.
            return cut(state, context, packet, |state, context, frame| {
                self.decapsulate_one(state, context, remotes, frame);
            });
        }
        let stripped = self.strip_outer(state, context, remotes, &mut packet);
        if context.is_tracing()
            && let Err(rejection) = &stripped
        {
            context.trace(STAGE, |text| text.write_str(rejection.text()));
        }
        match stripped {
            Ok(Stripped { payload: Payload::Ip, remote, segment }) => {
                self.process_inner_packet(state, context, remotes, packet, remote, segment);
            }
            Ok(Stripped { remote, segment, .. }) => {
                self.process_inner(state, context, remotes, packet, remote, segment);
            }
            Err(Rejection::Drop(reason)) => context.drop(packet, reason),
            Err(Rejection::Host) => context.punt_first(packet, PuntCode::Host.pack()),
            Err(Rejection::Bfd) => context.punt_first(packet, PuntCode::Bfd.pack()),
            Err(Rejection::TooBig) => context.punt_first(packet, PuntCode::TooBig.pack()),
            Err(Rejection::Fragment(layers, ends)) => {
                self.reassemble(state, context, remotes, packet, &layers, ends);
            }
            Err(Rejection::Echo(layers, source)) => self.reply_to_echo(state, context, packet, &layers, source),
            Err(Rejection::NewRemote(segment)) if self.admits_new_remote(segment, context.now()) => {
                context.punt(packet, PuntCode::NewRemote.pack());
            }
            Err(Rejection::NewRemote(_)) => context.drop(packet, DropReason::RateLimited),
        }
    }

    /// Returns whether a packet of an unknown VTEP is within the limit of its segment.
    fn admits_new_remote(&self, segment: u16, now: u64) -> bool {
        self.layout.segments.get(usize::from(segment)).is_some_and(|segment| segment.new_remotes.take(1, now))
    }

    /// Checks and removes the outer headers. Afterwards the packet begins with the inner Ethernet or IP header.
    fn strip_outer(
        &self,
        state: &StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packet: &mut Packet,
    ) -> Result<Stripped, Rejection> {
        packet.pull_up(packet.len().min(HEADERS));
        let Outer { payload, remote, segment, inner, end, class, .. } =
            match self.read_outer(state, context, remotes, packet) {
                Ok(outer) => outer,
                Err(Unread::Rejected(rejection)) => return Err(rejection),
                Err(Unread::NoSegment(tunnel, ends)) => {
                    return Err(self.classify_bfd_in_tunnel(state, context, packet, tunnel, ends));
                }
            };
        // Padding may follow the datagram.
        if !packet.truncate(end) || !packet.trim_front(inner) {
            return Err(DropReason::Truncated.into());
        }
        packet.set_checksum_status(ChecksumStatus::NONE);
        packet.pull_up(packet.len().min(HEADERS));
        let inner = packet.data_mut();
        let is_valid = match payload {
            Payload::Ethernet => super::ecn::apply(class, inner),
            Payload::Ip => super::ecn::apply_to_packet(class, inner),
        };
        if !is_valid {
            return Err(DropReason::BadEcn.into());
        }
        Ok(Stripped { remote, segment, payload })
    }

    /// Reads and checks the outer headers. The first buffer of the packet has [`HEADERS`] bytes of a longer one. Tunnel
    /// packets take nothing from a limit here, as some are read twice.
    pub(super) fn read_outer(
        &self,
        state: &StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packet: &Packet,
    ) -> Result<Outer, Unread> {
        let underlay = &self.layout.underlay;
        if packet.vlan().is_some() {
            return Err(DropReason::NotForUs.into());
        }
        let frame = packet.data();
        let dst_mac = MacAddr(*frame.first_chunk().ok_or(DropReason::TooShort)?);
        if dst_mac != underlay.mac && !dst_mac.is_multicast() {
            return Err(DropReason::NotForUs.into());
        }
        let outer = state.parser.parse_stack(frame, 0, packet.len()).map_err(DropReason::from)?;
        if outer.tag_count() > 0 || outer.has_labels() {
            return Err(DropReason::NotForUs.into());
        }
        match outer.l3_type() {
            L3Type::Arp if underlay.is_host => return Err(self.classify_arp(state, context, frame, &outer).into()),
            L3Type::Ipv4 | L3Type::Ipv6 => {}
            L3Type::Arp | L3Type::Other => return Err(DropReason::NotForUs.into()),
        }
        if !underlay.is_host && matches!(outer.l4_type(), L4Type::Icmpv4 | L4Type::Icmpv6) {
            return Err(DropReason::NotForUs.into());
        }
        let (src, dst) = outer.ip_addresses(frame).ok_or(DropReason::Truncated)?;
        if outer.l4_type() == L4Type::Icmpv6
            && !outer.is_fragment()
            && let Some(found) = self.classify_nd(state, context, frame, &outer)
        {
            return Err(found.into());
        }
        if dst_mac != underlay.mac || !underlay.has_address(dst) {
            return Err(DropReason::NotForUs.into());
        }
        if outer.is_fragment() {
            let refused = self.refuse_fragment(context, src);
            return Err(refused.map_or(Rejection::Fragment(outer, (src, dst)), Rejection::Drop).into());
        }
        match outer.l4_type() {
            // A SID takes its payload only.
            L4Type::Icmpv4 | L4Type::Icmpv6 if underlay.find_sid(dst).is_none() => {
                let too_big = self.classify_too_big(state, context, remotes, packet, &outer, (src, dst));
                return Err(too_big.unwrap_or_else(|| super::host::classify_echo(frame, &outer, src)).into());
            }
            _ => {}
        }
        let Some(found) = underlay.find_tunnel(frame, &outer, dst) else {
            return Err(self.classify_bfd(state, context, packet, &outer, (src, dst)).into());
        };
        if found.udp_port.is_some() {
            match frame.get(outer.l4() + 6..).and_then(|b| b.first_chunk()).map(|b| u16::from_be_bytes(*b)) {
                // RFC 8200 section 8.1 forbids a zero checksum. RFC 6935 section 5 allows it if configured.
                Some(0) if outer.l3_type() == L3Type::Ipv6 && !underlay.accept_zero_checksum6 => {
                    return Err(DropReason::BadL4Checksum.into());
                }
                Some(0) => {}
                // The kernel leaves out the checksum of a superframe, which never was on a wire.
                _ if packet.flags().contains(Flags::TX_SEGMENT) => {}
                _ => check_udp(packet, &outer)?,
            }
        }
        let tunnel = found.read(frame)?;
        let TunnelPacket { header, id, payload, inner } = tunnel;
        let end = found.end;
        if payload == Payload::Ethernet && end < inner + ETHERNET_LEN {
            return Err(DropReason::TooShort.into());
        }
        // The kernel leaves out the checksum of a superframe, as above.
        if header.has_checksum && !packet.flags().contains(Flags::TX_SEGMENT) {
            check_sum(packet, found.start, end, checksum::Sum::ZERO)?;
        }
        // Segments without identifier are distinguished by their remotes, those with SIDs by the destination.
        let source = remotes.find_source(id, src);
        let remote = source.map(|source| source.remote);
        let Some(segment) = source.map(|source| source.segment).or_else(|| self.layout.segment_of(id)) else {
            return Err(Unread::NoSegment((id, (inner, end)), (src, dst)));
        };
        let carried = self.layout.segments.get(usize::from(segment)).map(|segment| segment.payload);
        if carried != Some(payload) {
            return Err(DropReason::TunnelPayload.into());
        }
        if payload == Payload::Ip {
            found.check_packet(&tunnel, frame)?;
        }
        if remote.is_none() {
            let takes = self.layout.segments.get(usize::from(segment)).is_some_and(|s| s.accept_unknown_remotes);
            if takes && !underlay.can_be_remote(src) {
                return Err(DropReason::BadSource.into());
            }
            let found = if takes { Rejection::NewRemote(segment) } else { DropReason::UnknownRemote.into() };
            return Err(found.into());
        }
        let class = super::ecn::traffic_class(frame).unwrap_or(0);
        Ok(Outer { layers: outer, id, payload, remote, segment, inner, end, class, has_checksum: header.has_checksum })
    }

    /// Routes an IP packet of a layer-3 tunnel. The router takes Ethernet frames, so the packet gets an Ethernet
    /// header.
    fn process_inner_packet(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
        remote: Option<u32>,
        segment: u16,
    ) {
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.overlay_rx.add(1, packet.len());
        }
        let ethertype = match packet.data().first().map(|byte| byte >> 4) {
            Some(4) => EtherType::IPV4,
            _ => EtherType::IPV6,
        };
        // The outer headers that were removed leave enough headroom.
        if packet.prepend_slice(ETHERNET_LEN).is_none() {
            return context.drop(packet, DropReason::NoHeadroom);
        }
        self.write_ethernet_header(&mut packet, ethertype);
        self.route_inner(state, context, remotes, packet, remote, segment);
    }

    /// Routes an IP packet of a layer-3 tunnel, with the Ethernet header of the router.
    pub(super) fn route_inner(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        remote: Option<u32>,
        segment: u16,
    ) {
        let Some(mut packet) = self.inspect(state, context, packet, segment) else { return };
        if let Some(remote) = remote.and_then(|remote| remotes.list.get(remote as usize)) {
            self.limit_mss(state, context, &mut packet, remote);
        }
        self.route(state, context, remotes, packet, segment);
    }

    /// Processes an inner frame.
    fn process_inner(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        remote: Option<u32>,
        segment: u16,
    ) {
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.overlay_rx.add(1, packet.len());
        }
        self.bridge_inner(state, context, remotes, packet, remote, segment);
    }

    /// Forwards an inner frame, which is counted.
    pub(super) fn bridge_inner(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        remote: Option<u32>,
        segment: u16,
    ) {
        let Some(header) = packet.data().first_chunk::<ETHERNET_LEN>() else {
            return context.drop(packet, DropReason::TooShort);
        };
        let (dst, src, ethertype) = addresses(header, segment);
        let Some(mut packet) = self.inspect(state, context, packet, segment) else { return };
        let policy = self.layout.segments.get(usize::from(segment)).map(|s| s.inner_vlans);
        if EtherType(ethertype).is_vlan() && policy != Some(InnerVlans::Carry) {
            return context.drop(packet, DropReason::InnerVlan);
        }
        if !src.is_unicast() {
            return context.drop(packet, DropReason::BadSource);
        }
        if let Some(remote) = remote.and_then(|remote| remotes.list.get(remote as usize)) {
            self.limit_mss(state, context, &mut packet, remote);
        }
        let guard = context.guard();
        let fdb = self.fdb.table(guard);
        let from = Destination::Remote(remote.unwrap_or(0));
        if context.is_tracing() {
            self.report_origin(context, remotes, remote.map(Destination::Remote), segment);
        }
        if remote.is_some() {
            self.learn_source(context, src, from, fdb.find(src), context.seconds());
            if self.is_watched(ethertype, packet.data()) {
                match self.watch_neighbours(state, context, packet, segment, from) {
                    Some(unanswered) => packet = unanswered,
                    None => return,
                }
            }
        }
        if dst.mac().is_link_local() {
            return context.drop(packet, DropReason::LinkLocalMulticast);
        }
        let known = dst.is_unicast().then(|| fdb.lookup(dst)).filter(|d| *d != crate::table::NO_DESTINATION);
        let known = known.map(Destination::unpack);
        if context.is_tracing() {
            self.report_lookup(context, remotes, dst, known);
        }
        if !dst.is_unicast() && self.layout.segments.get(usize::from(segment)).is_some_and(|it| it.router.is_some()) {
            match self.offer_to_router(state, context, packet, segment) {
                Some(returned) => packet = returned,
                None => return,
            }
        }
        match known {
            // A remote whose management VNI is that of a segment.
            None if dst.mac() == MANAGEMENT_MAC => context.drop(packet, DropReason::BfdNoSession),
            None => {
                if let Some(c) = self.layout.counters(segment, state.worker) {
                    c.unknown_unicast.add(u64::from(dst.is_unicast()));
                }
                self.flood(state, context, remotes, packet, from, segment, Flow::default());
            }
            Some(Destination::Attachment(to)) => self.deliver(state, context, packet, to),
            Some(Destination::Router) => self.route(state, context, remotes, packet, segment),
            Some(Destination::Remote(_) | Destination::Group(_)) => {
                context.drop(packet, DropReason::SplitHorizon);
            }
        }
    }
}

/// Returns the index of the remote of a packet that the NIC has decapsulated.
#[inline]
fn nic_decapsulated(packet: &Packet) -> Option<u32> {
    packet.mark().filter(|mark| mark & IMPLICIT_MARK != 0).map(|mark| mark & !IMPLICIT_MARK)
}

/// Verifies the outer UDP checksum over all segments, unless the device verified it.
pub(super) fn check_udp(packet: &Packet, outer: &HeaderOffsets) -> Result<(), Rejection> {
    if packet.checksum_status().contains(ChecksumStatus::OUTER_L4_GOOD) {
        return Ok(());
    }
    check_datagram(packet, outer)
}

/// Verifies the checksum of a UDP datagram over all segments.
pub(super) fn check_datagram(packet: &Packet, layers: &HeaderOffsets) -> Result<(), Rejection> {
    let cover = ChecksumSpan::of(packet.data(), layers).ok_or(DropReason::BadL4Checksum)?;
    check_sum(packet, cover.start, cover.end, cover.pseudo)
}

/// Verifies that the bytes from `start` to `end` over all segments and the sum `pseudo` have a valid checksum.
pub(super) fn check_sum(packet: &Packet, start: usize, end: usize, pseudo: checksum::Sum) -> Result<(), Rejection> {
    let is_valid = checksum_of(packet, start, end).is_some_and(|sum| pseudo.and(sum).is_valid());
    if is_valid { Ok(()) } else { Err(DropReason::BadL4Checksum.into()) }
}

/// Removes the underlay's VLAN tag. Frames without it are dropped.
#[inline(never)]
fn strip_underlay_tag(context: &mut Context<'_>, batch: &mut Batch, vlan: u16) {
    batch.filter_map(|mut packet| {
        packet.pull_up(packet.len().min(QUICK));
        if pop_vlan_tag(&mut packet) == Some(vlan) {
            return Some(packet);
        }
        context.drop(packet, DropReason::NotForUs);
        None
    });
}
