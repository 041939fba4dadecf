//! Received tunnel packets of all kinds and IP versions, a batch at a time.
//!
//! [`View::decapsulate`] itself takes the plain packets of one kind over IPv4. Other packets come here. The slow path
//! reads the first packet of each tunnel. Those behind it have the same outer headers, so that only the fields are
//! checked that differ between packets: lengths, checksums and entropy. A change of the tables ends this knowledge.

use wirepath_packet::driver::U64x8;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::ChecksumStatus;
use wirepath_packet::{BATCH, Packet};
use wirepath_wire::gre::{FLAG_CHECKSUM, FLAG_SEQUENCE};
use wirepath_wire::{EtherType, HeaderOffsets, IpProtocol, L3Type, L4Type, ipv4, ipv6, udp};

use super::config::TUNNEL_PEER;
use super::decap::{CommonSum, HEADERS, Outer, check_udp};
use super::encap::{SLOW_FLAGS, be64};
use super::headers::ETHERNET_LEN;
use super::kinds::Payload;
use super::mss::find_handshakes;
use super::stage::{Scratch, StageState, Tally, View, all_marks, deliver_frames, unplace};
use super::tables::{Destination, Layout, Remotes, Underlay};
use crate::Context;
use crate::table::Key;

/// Bytes that are compared: outer headers and the first ones behind them.
const COMPARED: usize = 72;
/// Tunnels that are known at the same time.
const TUNNELS: usize = 8;
/// Packets of a batch whose headers may be read to know a tunnel. If that fails, the slow path reads them again.
const MAX_READ: u32 = 12;
/// Offset of the header behind an IP header without options or extensions.
const L4_OF_IPV4: usize = ETHERNET_LEN + ipv4::HEADER_LEN;
const L4_OF_IPV6: usize = ETHERNET_LEN + ipv6::HEADER_LEN;

/// The first [`COMPARED`] bytes of a packet.
#[derive(Debug)]
struct Headers {
    front: U64x8,
    rest: u64,
}

impl Headers {
    #[inline(always)]
    fn new(h: &[u8; COMPARED]) -> Self {
        let front = h.first_chunk().map_or(U64x8::splat(0), U64x8::from_bytes);
        Self { front, rest: h.last_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)) }
    }

    /// Returns whether all bits of `mask` are equal to those of other headers.
    #[inline(always)]
    fn equals_in(&self, other: &Self, mask: &Self) -> bool {
        self.front.equals_in(other.front, mask.front) && (self.rest ^ other.rest) & mask.rest == 0
    }
}

/// Outer headers that the slow path has accepted.
#[derive(Debug)]
pub(super) struct KnownOuter {
    headers: Headers,
    /// Bits that are equal in all packets of the tunnel.
    mask: Headers,
    /// Sum of the IPv4 header.
    sum: CommonSum,
    layers: HeaderOffsets,
    is_ipv6: bool,
    is_udp: bool,
    /// True for Ethernet frames over IPv4, which need the fewest checks.
    is_plain: bool,
    /// True if the packets may have no UDP checksum.
    accepts_zero_checksum: bool,
    /// Shortest packet.
    least: usize,
    /// Offset of the inner frame or IP packet.
    inner: usize,
    /// Version of inner IP packets; 0 for Ethernet frames.
    version: u8,
    /// True if packets of both versions have equal headers, as behind an MPLS label.
    has_both_versions: bool,
    remote: u32,
    /// The remote as a destination of its addresses, packed.
    here: u32,
    segment: u16,
}

/// Tunnels whose outer headers a worker knows, for as long as the tables stay the same.
#[derive(Debug)]
pub(super) struct KnownTunnels {
    /// Addresses of the tables from which they are known, and the worker's epoch.
    valid_for: (usize, usize, u64),
    tunnels: [Option<KnownOuter>; TUNNELS],
}

impl Default for KnownTunnels {
    fn default() -> Self {
        Self { valid_for: (0, 0, 0), tunnels: [const { None }; TUNNELS] }
    }
}

impl KnownTunnels {
    /// Forgets all tunnels if a table was replaced.
    #[inline(always)]
    fn renew(&mut self, layout: &Layout, remotes: &Remotes, epoch: u64) {
        let current = (std::ptr::from_ref(layout).addr(), std::ptr::from_ref(remotes).addr(), epoch);
        if self.valid_for != current {
            *self = Self { valid_for: current, ..Self::default() };
        }
    }
}

/// Reads two bytes in network order.
#[inline(always)]
fn be16(h: &[u8; COMPARED], at: usize) -> usize {
    usize::from(h[at]) << 8 | usize::from(h[at + 1])
}

/// Returns whether outer headers can be known: IP without options or extensions, no fragment, and a tunnel whose
/// packets do not need a check of their own. No padding follows the packet of `len` bytes. Its congestion mark is
/// ECT(0) or none. These leave the inner mark unchanged; the others may change it (RFC 6040).
fn can_be_known(h: &[u8; COMPARED], len: usize, underlay: &Underlay) -> bool {
    let is_ipv6 = match EtherType(be16(h, 12) as u16) {
        EtherType::IPV4 if h[14] == 0x45 && be16(h, 20) & 0x3fff == 0 => false,
        EtherType::IPV6 => true,
        _ => return false,
    };
    let (end, mark) =
        if is_ipv6 { (be16(h, 18) + L4_OF_IPV6, h[15] >> 4) } else { (be16(h, 16) + ETHERNET_LEN, h[15]) };
    if end != len || mark & 1 != 0 {
        return false;
    }
    let (protocol, l4) = if is_ipv6 { (h[20], L4_OF_IPV6) } else { (h[23], L4_OF_IPV4) };
    match IpProtocol(protocol) {
        IpProtocol::UDP => underlay.kinds.iter().any(|kind| kind.udp_port == Some(be16(h, l4 + 2) as u16)),
        IpProtocol::GRE => be16(h, l4) & usize::from(FLAG_CHECKSUM | FLAG_SEQUENCE) == 0,
        IpProtocol::IPV4 | IpProtocol::IPV6 | IpProtocol::ETHERNET => true,
        _ => false,
    }
}

/// Returns the place of a tunnel among the known ones: by the last bytes of the source address and of the identifier
/// over UDP. `label_port` is the UDP port of MPLS; a number above all ports without it.
#[inline(always)]
fn slot(h: &[u8; COMPARED], label_port: usize) -> usize {
    let (source, protocol, l4) = if h[12] == 0x86 { (h[37], h[20], L4_OF_IPV6) } else { (h[29], h[23], L4_OF_IPV4) };
    if protocol != IpProtocol::UDP.0 {
        return usize::from(source) % TUNNELS;
    }
    let header = l4 + udp::HEADER_LEN;
    let id = if be16(h, l4 + 2) == label_port { h[header + 1] << 4 | h[header + 2] >> 4 } else { h[header + 6] };
    usize::from(source ^ id) % TUNNELS
}

impl KnownOuter {
    /// Remembers the headers of a packet that [`View::read_outer`] has accepted. Returns `None` if packets of the
    /// tunnel need more checks than those of [`Self::accepts`].
    fn new(h: &[u8; COMPARED], underlay: &Underlay, outer: &Outer) -> Option<Self> {
        let layers = outer.layers;
        let (is_ipv6, is_udp) = (layers.l3_type() == L3Type::Ipv6, layers.l4_type() == L4Type::Udp);
        let l4 = layers.l4();
        if outer.inner >= COMPARED || outer.has_checksum {
            return None;
        }
        let mut mask = [0; COMPARED];
        mask[..outer.inner].fill(0xff);
        if is_ipv6 {
            // Flow label and length.
            mask[15] = 0xf0;
            mask[16..20].fill(0);
        } else {
            // Length and identification, and the checksum.
            mask[16..20].fill(0);
            mask[24..26].fill(0);
        }
        if is_udp {
            mask[l4..l4 + 2].fill(0);
            mask[l4 + 4..l4 + 8].fill(0);
        }
        let header = l4 + if is_udp { udp::HEADER_LEN } else { 0 };
        let kind = underlay.kinds.iter().find(|kind| kind.number == outer.id.kind)?;
        let remote = outer.remote?;
        if let Some(at) = kind.flow_id {
            mask[header + usize::from(at)] = 0;
        }
        let (version, least) = match outer.payload {
            Payload::Ethernet => (0, ETHERNET_LEN),
            Payload::Ip if h[outer.inner] >> 4 == 4 => (4, ipv4::HEADER_LEN),
            Payload::Ip => (6, ipv6::HEADER_LEN),
        };
        Some(Self {
            headers: Headers::new(h),
            mask: Headers::new(&mask),
            sum: CommonSum::new(h),
            layers,
            is_ipv6,
            is_udp,
            // Shorter packets than the compared bytes do not come here, so these need no check of the least length.
            is_plain: !is_ipv6 && version == 0 && outer.inner + least <= COMPARED,
            accepts_zero_checksum: !is_ipv6 || underlay.accept_zero_checksum6,
            least: outer.inner + least,
            inner: outer.inner,
            version,
            has_both_versions: version != 0 && kind.kind.has_labels(),
            remote,
            here: Destination::Remote(remote).pack(),
            segment: outer.segment,
        })
    }

    /// Returns whether headers are equal to those of the tunnel.
    #[inline(always)]
    fn has_same(&self, h: &[u8; COMPARED]) -> bool {
        self.headers.equals_in(&Headers::new(h), &self.mask)
    }

    /// Returns whether an inner packet has the other version, which the tunnel may carry too.
    #[cold]
    fn is_other_version(&self, h: &[u8; COMPARED], len: usize) -> bool {
        let least = match h[self.inner] >> 4 {
            4 => ipv4::HEADER_LEN,
            6 => ipv6::HEADER_LEN,
            _ => return false,
        };
        self.has_both_versions && len >= self.inner + least
    }

    /// Returns whether the slow path would accept a packet whose headers are equal.
    #[inline(always)]
    fn accepts(&self, h: &[u8; COMPARED], packet: &Packet) -> bool {
        let len = packet.len();
        if self.is_plain {
            let is_valid = self.sum.is_valid_with(h) && be16(h, 16) + ETHERNET_LEN == len;
            if !self.is_udp || !is_valid {
                return is_valid;
            }
            let has_no_checksum = be16(h, L4_OF_IPV4 + 6) == 0;
            let is_right = has_no_checksum || check_udp(packet, &self.layers).is_ok();
            return be16(h, L4_OF_IPV4 + 4) + L4_OF_IPV4 == len && is_right;
        }
        let (l4, is_valid) = if self.is_ipv6 {
            (L4_OF_IPV6, be16(h, 18) + L4_OF_IPV6 == len)
        } else {
            (L4_OF_IPV4, self.sum.is_valid_with(h) && be16(h, 16) + ETHERNET_LEN == len)
        };
        let is_right = self.version == 0 || h[self.inner] >> 4 == self.version || self.is_other_version(h, len);
        let is_valid = is_valid && len >= self.least && is_right;
        if !self.is_udp || !is_valid {
            return is_valid;
        }
        be16(h, l4 + 4) + l4 == len
            && match be16(h, l4 + 6) {
                0 => self.accepts_zero_checksum,
                _ => check_udp(packet, &self.layers).is_ok(),
            }
    }
}

/// Marks of packets of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Marks {
    /// Packets that are done: they have their output port, and are counted.
    pub(super) done: u64,
    /// Packets without their outer headers, for [`View::process_stripped`].
    pub(super) stripped: u64,
}

impl View<'_> {
    /// Decapsulates the packets among those with these marks whose outer headers are known. The others are unchanged.
    #[inline(never)]
    pub(super) fn decapsulate_known(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packets: &mut [Packet],
        wanted: u64,
    ) -> Marks {
        let (fdb, second) = (self.fdb.table(context.guard()), context.seconds());
        // The state keeps them between batches. It is lent to functions below, so they are taken out meanwhile.
        let mut known_tunnels = state.known_tunnels.take().unwrap_or_default();
        known_tunnels.renew(self.layout, remotes, context.guard().epoch());
        let tunnels = &mut known_tunnels.tunnels;
        let (mut frames, mut routed, mut plain) = (0u64, 0u64, 0u64);
        let (mut read, mut new_sources, mut at) = (0, 0, 0);
        let mut ports = self.layout.underlay.kinds.iter().filter(|it| it.kind.has_labels());
        let label_port = ports.find_map(|it| it.udp_port).map_or(usize::MAX, usize::from);
        let mut last = (state.source.key, state.source.destination);
        let mut known_source = state.source.in_ipv4_frames();
        let (layout, worker) = (self.layout, state.worker);
        let mut next = 0;
        loop {
            let Scratch { keys, hashes, remotes: from, sources, source_at, .. } = &mut *state.scratch;
            let (mut end, mut unknown) = (next, None);
            for packet in &mut packets[next..] {
                // A batch has no more packets, which the compiler does not know.
                let i = end % BATCH;
                end += 1;
                let mark = 1 << i;
                if wanted & mark == 0 || packet.flags().intersects(SLOW_FLAGS) {
                    continue;
                }
                let Some(h) = packet.data().first_chunk::<COMPARED>() else { continue };
                if packet.data().len() < packet.len().min(HEADERS) {
                    continue;
                }
                // Packets in a row often have one tunnel.
                if !tunnels[at].as_ref().is_some_and(|known| known.has_same(h)) {
                    at = slot(h, label_port);
                    if !tunnels[at].as_ref().is_some_and(|known| known.has_same(h)) {
                        unknown = Some(i);
                        break;
                    }
                }
                let Some(known) = tunnels[at].as_ref().filter(|known| known.accepts(h, packet)) else { continue };
                let inner = known.inner;
                from[i] = known.remote;
                let key_base = u64::from(known.segment) << 48;
                if known.version != 0 {
                    let ethertype = if h[inner] >> 4 == 4 { EtherType::IPV4 } else { EtherType::IPV6 };
                    // The router takes Ethernet frames. The outer headers leave enough room for the header.
                    let _ = packet.trim_front(inner - ETHERNET_LEN);
                    self.write_ethernet_header(packet, ethertype);
                    keys[i] = Key::from_u64(key_base);
                    routed |= mark;
                    continue;
                }
                let _ = packet.trim_front(inner);
                frames |= mark;
                let Some(header) = packet.data().first_chunk::<ETHERNET_LEN>() else { continue };
                let tail = be64(header, 6);
                // No table contains a group address, so the lookup of such a destination fails without an extra check.
                keys[i] = Key::from_u64(key_base | be64(header, 0) >> 16);
                hashes[i] = fdb.prepare(keys[i]);
                if (tail, known.here) == known_source {
                    plain |= mark;
                    continue;
                }
                let ethertype = tail as u16;
                if ethertype != EtherType::IPV4.0
                    && (EtherType(ethertype).is_vlan() || self.is_watched(ethertype, packet.data()))
                {
                    continue;
                }
                let source = Key::from_u64(key_base | tail >> 16);
                if (source, known.here) != last {
                    if !source.is_unicast() {
                        continue;
                    }
                    last = (source, known.here);
                    sources[new_sources] = source;
                    source_at[new_sources] = known.remote;
                    new_sources += 1;
                }
                if ethertype == EtherType::IPV4.0 {
                    known_source = (tail, known.here);
                }
                plain |= mark;
            }
            let Some(i) = unknown else { break };
            next = i;
            match self.read_tunnel(state, context, remotes, &packets[i], &mut read) {
                Some(new) => tunnels[at] = Some(new),
                None => next += 1,
            }
        }
        state.known_tunnels = Some(known_tunnels);
        let stripped = frames | routed;
        if stripped == 0 {
            return Marks::default();
        }
        let scratch = &*state.scratch;
        let here = |j: usize| Destination::Remote(scratch.source_at[j]);
        self.learn_sources(context, fdb, &scratch.sources[..new_sources], here, second, &mut state.source);
        if layout.clamps_mss {
            let handshakes = find_handshakes(packets, 0);
            plain &= !handshakes;
            routed &= !handshakes;
        }

        let Scratch { keys, hashes, places, .. } = &mut *state.scratch;
        fdb.lookup_all_prepared(&keys[..packets.len()], hashes, places);
        unplace(places, !plain & all_marks(packets.len()));
        let mut done = deliver_frames::<0>(layout, packets, places, |segment, packets, bytes| {
            if let Some(c) = layout.counters(segment, worker) {
                // Frames decapsulated here go to an attachment of the same segment.
                c.overlay_rx.add(packets, bytes);
                c.local_tx.add(packets, bytes);
            }
        });
        self.count_stripped(state, packets, stripped & !done, frames);
        if plain & !done != 0 {
            done |= self.route_batch::<0>(state, context, remotes, packets, plain & !done);
        }
        if routed != 0 {
            done |= self.route_marked::<0>(state, context, remotes, packets, routed);
        }
        Marks { done, stripped: stripped & !done }
    }

    /// Reads the outer headers of a packet by the slow path, unless that was done for many packets of the batch.
    /// Returns `None` if its tunnel cannot be known.
    #[inline(never)]
    fn read_tunnel(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: &Packet,
        read: &mut u32,
    ) -> Option<KnownOuter> {
        let h = packet.data().first_chunk::<COMPARED>()?;
        if *read == MAX_READ || !can_be_known(h, packet.len(), &self.layout.underlay) {
            return None;
        }
        *read += 1;
        let outer = self.read_outer(state, context, remotes, packet).ok().filter(|outer| outer.end == packet.len())?;
        KnownOuter::new(h, &self.layout.underlay, &outer)
    }

    /// Counts those of the packets with these marks that are not delivered yet, and forgets what the NIC has said about
    /// their checksums. Packets that are not among `frames` have an Ethernet header that no remote has sent.
    fn count_stripped(&self, state: &StageState, packets: &mut [Packet], mut marks: u64, frames: u64) {
        let count = |segment: u16, packets, bytes| {
            if let Some(c) = self.layout.counters(segment, state.worker) {
                c.overlay_rx.add(packets, bytes);
            }
        };
        let mut received = Tally::new(0);
        while marks != 0 {
            let i = marks.trailing_zeros() as usize % BATCH;
            marks &= marks - 1;
            let Some(packet) = packets.get_mut(i) else { break };
            packet.set_checksum_status(ChecksumStatus::NONE);
            let added = if frames & 1 << i == 0 { ETHERNET_LEN } else { 0 };
            received.add(state.scratch.keys[i].segment(), packet.len() - added, count);
        }
        received.end(count);
    }

    /// Processes a packet without its outer headers that is not done.
    #[cold]
    #[inline(never)]
    pub(super) fn process_stripped(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
        remote: u32,
    ) {
        packet.pull_up(packet.len().min(HEADERS));
        let Some(segment) = remotes.list.get(remote as usize).map(|remote| remote.segment) else {
            return context.drop(packet, DropReason::UnknownRemote);
        };
        match self.layout.segments.get(usize::from(segment)).map(|segment| segment.payload) {
            Some(Payload::Ip) => self.route_inner(state, context, remotes, packet, Some(remote), segment),
            _ => self.bridge_inner(state, context, remotes, packet, Some(remote), segment),
        }
    }

    /// Writes the Ethernet header with which the router takes a packet of a tunnel, over the packet's first bytes.
    pub(super) fn write_ethernet_header(&self, packet: &mut Packet, ethertype: EtherType) {
        if let Some(header) = packet.data_mut().first_chunk_mut::<ETHERNET_LEN>() {
            header[..6].copy_from_slice(&self.layout.underlay.mac.0);
            header[6..12].copy_from_slice(&TUNNEL_PEER.0);
            header[12..].copy_from_slice(&ethertype.0.to_be_bytes());
        }
    }
}
