//! The gateway stage: sends frames of local ports into tunnels and decapsulates tunnel packets of the
//! underlay.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::reassembly::Reassembler;
use wirepath_packet::superframe::longest_frame;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_wire::{EtherType, Parser, Tag, Tunnels, vlan};

use super::bindings::{Claim, PublishedBindings};
use super::encap::quick_flow;
use super::groups::RemoteGroups;
use super::headers::VLAN_TAG_LEN;
use super::known_outer::KnownTunnels;
use super::outer_fragments::FragmentIds;
use super::policer::{ExpectedReplies, KnownHosts, Policer};
use super::reassembly::EXPIRY_INTERVAL;
use super::router::{Hops, RouteScratch, RouterTag};
use super::tables::{Attachment, Destination, Layout, Remotes};
use crate::epoch::{Guard, Shared};
use crate::route::RouteTables;
use crate::table::{Fdb, Key, NO_DESTINATION};
use crate::token_bucket::TokenBucket;
use crate::{Context, Stage};

/// Longest frame addressed to the gateway itself that is processed.
pub(super) const MAX_HOST_FRAME: usize = 9216;

/// Reason why a packet was passed to the control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PuntCode {
    /// The packet is an ARP or neighbour discovery message for the gateway.
    Host,
    /// A BFD packet of a known pair of addresses.
    Bfd,
    /// An ICMP error about a tunnel packet that is longer than the MTU of a router.
    TooBig,
    /// A tunnel packet from an unknown VTEP, in a segment that accepts unknown VTEPs.
    NewRemote,
    /// An ARP or ND message for the router of a segment. The packet has a tag with the segment.
    RouterHost,
    /// A packet to be routed whose next hop is not resolved yet. The packet has a tag with its segment.
    Route,
    /// A frame for this remote, whose next hop is not resolved yet.
    Unresolved(u32),
}

impl PuntCode {
    const UNRESOLVED: u32 = 1 << 31;

    /// Encodes the reason for [`Context::punt`].
    pub const fn pack(self) -> u32 {
        match self {
            Self::Host => 0,
            Self::NewRemote => 1,
            Self::RouterHost => 2,
            Self::Route => 3,
            Self::Bfd => 4,
            Self::TooBig => 5,
            Self::Unresolved(remote) => remote | Self::UNRESOLVED,
        }
    }

    /// Decodes a code made by [`Self::pack`].
    pub const fn unpack(code: u32) -> Self {
        match code {
            0 => Self::Host,
            1 => Self::NewRemote,
            2 => Self::RouterHost,
            3 => Self::Route,
            4 => Self::Bfd,
            5 => Self::TooBig,
            code => Self::Unresolved(code & !Self::UNRESOLVED),
        }
    }
}

/// Tables that all workers of a gateway read.
#[derive(Clone)]
pub struct GatewayTables {
    /// Ports and segments.
    pub layout: Arc<Shared<Arc<Layout>>>,
    /// Remotes.
    pub remotes: Arc<Shared<Remotes>>,
    /// Groups of remotes.
    pub(super) groups: Arc<Shared<RemoteGroups>>,
    /// Forwarding entries; their destinations are [`Destination`]s.
    pub fdb: Arc<Fdb>,
    /// Routes of all VRFs; their values are indices of hops.
    pub(super) routes: crate::sync::Arc<RouteTables>,
    /// Effects of the routes.
    pub(super) hops: Arc<Shared<Hops>>,
    /// IP addresses of the hosts in segments.
    pub(super) bindings: Arc<Shared<PublishedBindings>>,
    /// Claims of IP addresses for the control thread.
    pub(super) claims: Arc<ArrayQueue<Claim>>,
    /// Next hops and remotes.
    pub(super) known_hosts: Arc<Shared<KnownHosts>>,
    /// Replies to solicitations of the gateway.
    pub(super) expected_replies: Arc<ExpectedReplies>,
    /// Identifications of fragmented tunnel packets.
    pub(super) fragment_ids: Arc<FragmentIds>,
}

impl fmt::Debug for GatewayTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayTables").finish_non_exhaustive()
    }
}

impl GatewayTables {
    /// Returns the tables as they are during one call of the stage.
    #[inline(always)]
    fn view<'g>(&'g self, guard: Guard<'g>) -> View<'g> {
        View {
            layout: self.layout.read(guard),
            remotes: &self.remotes,
            groups: &self.groups,
            fdb: &self.fdb,
            routes: &self.routes,
            hops: &self.hops,
            bindings: &self.bindings,
            claims: &self.claims,
            known_hosts: &self.known_hosts,
            expected_replies: &self.expected_replies,
            fragment_ids: &self.fragment_ids,
        }
    }
}

/// [`GatewayTables`] during one call of the stage, which sees one version of the ports and segments.
#[derive(Clone, Copy)]
pub(super) struct View<'g> {
    pub(super) layout: &'g Layout,
    pub(super) remotes: &'g Shared<Remotes>,
    pub(super) groups: &'g Shared<RemoteGroups>,
    pub(super) fdb: &'g Fdb,
    pub(super) routes: &'g RouteTables,
    pub(super) hops: &'g Shared<Hops>,
    pub(super) bindings: &'g Shared<PublishedBindings>,
    pub(super) claims: &'g ArrayQueue<Claim>,
    pub(super) known_hosts: &'g Shared<KnownHosts>,
    pub(super) expected_replies: &'g ExpectedReplies,
    pub(super) fragment_ids: &'g FragmentIds,
}

impl View<'_> {
    /// Returns the member of a group for a flow. Other destinations, and groups without members, stay as they are.
    #[inline(always)]
    pub(super) fn choose(&self, context: &Context<'_>, destination: Destination, entropy: u32) -> Destination {
        match destination {
            Destination::Group(_) => self.groups.read(context.guard()).choose(destination, entropy),
            other => other,
        }
    }
}

/// The gateway stage of one worker.
#[derive(Debug)]
pub struct Gateway {
    tables: GatewayTables,
    state: StageState,
}

/// State of one worker's stage.
#[derive(Debug)]
pub(super) struct StageState {
    /// Index of the worker.
    pub(super) worker: usize,
    /// Buffers for copies and for frames that the gateway itself sends.
    pub(super) pool: Pool,
    pub(super) parser: Parser,
    /// Limits ICMP messages about packets that are too big.
    pub(super) icmp_limiter: TokenBucket,
    pub(super) policer: Policer,
    /// Limits of messages to the routers of segments, so that their hosts take nothing from the underlay's.
    pub(super) router_policer: Policer,
    /// Limits the claims of IP addresses.
    pub(super) claim_limiter: TokenBucket,
    /// A packet of several buffers, while the worker turns it into its reply.
    pub(super) reply_buffer: Box<[u8; MAX_HOST_FRAME]>,
    pub(super) source: KnownSource,
    pub(super) scratch: Box<Scratch>,
    pub(super) known_tunnels: Option<Box<KnownTunnels>>,
    /// Fragments of tunnel packets that wait for others.
    pub(super) reassembler: Box<Reassembler>,
}

/// Arrays that one pass over a batch fills for the next. They are reused, because clearing them for each
/// batch would cost as much as a header.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Keys of the destinations, with what [`crate::table::HashTable::prepare`] returned for them.
    pub(super) keys: [Key; BATCH],
    pub(super) hashes: [u32; BATCH],
    /// Destinations found for the keys, packed.
    pub(super) places: [u32; BATCH],
    pub(super) flows: [Flow; BATCH],
    /// Keys of the sources that differ from the previous one; `source_at` has their attachments or remotes.
    pub(super) sources: [Key; BATCH],
    pub(super) source_at: [u32; BATCH],
    /// Attachment of each packet on ports with VLANs.
    pub(super) attachments: [u32; BATCH],
    /// Remote of each packet whose outer headers are removed.
    pub(super) remotes: [u32; BATCH],
    pub(super) router: RouteScratch,
}

impl StageState {
    /// Passes a frame for an unresolved next hop to the control thread, within the rate limit.
    pub(super) fn punt_unresolved(&self, context: &mut Context<'_>, packet: Packet, remote: u32) {
        if self.policer.admits_unresolved(context.now()) {
            context.punt(packet, PuntCode::Unresolved(remote).pack());
        } else {
            context.drop(packet, DropReason::NoNeighbour);
        }
    }
}

/// The last confirmed source. Most packets have the same source as the packet before.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownSource {
    pub(super) key: Key,
    pub(super) destination: u32,
    generation: u32,
    second: u32,
}

impl KnownSource {
    const NONE: Self = Self { key: Key::from_u64(0), destination: NO_DESTINATION, generation: 0, second: 0 };

    /// Returns the source and the EtherType as they are in its IPv4 frames, and the packed destination. The fast paths
    /// compare each frame with those of the last one whose source is known.
    #[inline(always)]
    pub(super) fn in_ipv4_frames(&self) -> (u64, u32) {
        (self.key.to_u64() << 16 | u64::from(EtherType::IPV4.0), self.destination)
    }

    /// Invalidates the source if the table has changed or a new second has begun, in which it must be
    /// refreshed.
    #[inline(always)]
    pub(super) fn renew(&mut self, generation: u32, second: u32) {
        if self.generation != generation || self.second != second {
            *self = Self { generation, second, ..Self::NONE };
        }
    }
}

impl Gateway {
    /// Creates the stage of the worker with this index. Copies use buffers of `pool`.
    pub fn new(tables: GatewayTables, worker: usize, pool: Pool) -> Self {
        let state = StageState {
            worker,
            pool,
            parser: Parser { tunnels: Tunnels::NONE, ..Parser::default() },
            icmp_limiter: TokenBucket::new(100, 20),
            policer: Policer::new(),
            router_policer: Policer::new(),
            claim_limiter: super::suppression::claim_limiter(),
            reply_buffer: Box::new([0; MAX_HOST_FRAME]),
            source: KnownSource::NONE,
            scratch: Box::new(Scratch {
                keys: [Key::from_u64(0); BATCH],
                hashes: [0; BATCH],
                places: [NO_DESTINATION; BATCH],
                flows: [Flow::default(); BATCH],
                sources: [Key::from_u64(0); BATCH],
                source_at: [0; BATCH],
                attachments: [0; BATCH],
                remotes: [0; BATCH],
                router: RouteScratch::default(),
            }),
            known_tunnels: Some(Box::default()),
            reassembler: Box::default(),
        };
        Self { tables, state }
    }

    /// Processes a batch that another worker handed over, grouped by each packet's own input port.
    #[cold]
    fn process_mixed(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let mut rest = std::mem::take(batch);
        // A received packet has an input port.
        let returned = |packet: &Packet| packet.in_port().is_none() && RouterTag::unpack(packet.app()).is_some();
        while let Some((port, is_returned)) = rest.as_slice().first().map(|it| (it.in_port(), returned(it))) {
            let mut same = Batch::new();
            let belongs = |packet: &Packet| packet.in_port() == port && returned(packet) == is_returned;
            rest.filter_map(|packet| if belongs(&packet) { same.push(packet).err() } else { Some(packet) });
            if is_returned {
                let view = self.tables.view(context.guard());
                same.filter_map(|packet| {
                    view.process_returned(&mut self.state, context, packet);
                    None
                });
                continue;
            }
            self.process_from(context, &mut same, port.unwrap_or(PortId::new(0)));
            context.forward(&mut same);
        }
    }

    #[inline(always)]
    fn process_from(&mut self, context: &mut Context<'_>, batch: &mut Batch, port: PortId) {
        let Self { tables, state } = self;
        batch.prefetch_data();
        let view = tables.view(context.guard());
        if view.layout.is_underlay(port) {
            view.decapsulate(state, context, batch);
        } else {
            view.encapsulate(state, context, batch, port);
        }
    }
}

impl Stage for Gateway {
    #[inline]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        match context.in_port() {
            Some(port) => self.process_from(context, batch, port),
            None => self.process_mixed(context, batch),
        }
    }

    fn timer_interval(&self) -> Option<Duration> {
        Some(EXPIRY_INTERVAL)
    }

    fn timer(&mut self, context: &mut Context<'_>) {
        let Self { tables, state } = self;
        if !state.reassembler.is_empty() {
            tables.view(context.guard()).expire_fragments(state, context);
        }
    }
}

/// Properties of the inner frame that the outer headers depend on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flow {
    pub(super) entropy: u32,
    pub(super) class: u8,
}

impl Flow {
    /// Computes the flow of any frame.
    #[cold]
    #[inline(never)]
    pub(super) fn from_frame(frame: &[u8], len: usize, parser: &Parser) -> Self {
        quick_flow(frame).unwrap_or_else(|| Self::from_parsed(frame, len, parser))
    }

    /// Computes the flow of a frame that is not plain; see [`wirepath_wire::tuple::entropy`].
    #[cold]
    #[inline(never)]
    pub(super) fn from_parsed(frame: &[u8], len: usize, parser: &Parser) -> Self {
        // A frame with invalid headers is still forwarded, as a bridge does. Its entropy comes from its
        // Ethernet addresses.
        let layers = parser.parse_stack(frame, 0, len).unwrap_or_default();
        Self {
            entropy: wirepath_wire::tuple::entropy(frame, &layers),
            class: super::ecn::traffic_class(frame).unwrap_or(0),
        }
    }
}

/// Checks the length of a frame for its attachment, adds the VLAN tag and sets the output port.
#[inline(always)]
pub(super) fn adapt_to_attachment(packet: &mut Packet, attachment: &Attachment) -> Result<(), DropReason> {
    if packet.len() > attachment.max_frame && longest_frame(packet) > attachment.max_frame {
        return Err(DropReason::TooBigForMtu);
    }
    if let Some(id) = attachment.vlan {
        if attachment.inserts_vlan {
            packet.set_vlan(id);
        } else {
            packet.prepend_slice(VLAN_TAG_LEN).ok_or(DropReason::NoHeadroom)?;
            vlan::push(packet.data_mut(), Tag::new(id));
        }
    }
    packet.set_out_port(attachment.port);
    Ok(())
}

/// Returns the marks of the first packets of a batch.
#[inline(always)]
pub(super) fn all_marks(count: usize) -> u64 {
    u64::MAX.checked_shr(u64::BITS - count.min(BATCH) as u32).unwrap_or(0)
}

/// Takes the places of marked packets away.
#[inline(always)]
pub(super) fn unplace(places: &mut [u32; BATCH], mut marked: u64) {
    while marked != 0 {
        places[marked.trailing_zeros() as usize % BATCH] = NO_DESTINATION;
        marked &= marked - 1;
    }
}

/// Returns whether all places are the same.
#[inline(always)]
pub(super) fn are_equal(places: &[u32]) -> bool {
    // An early exit would need a branch for each place.
    let first = places.first().copied().unwrap_or(NO_DESTINATION);
    places.iter().fold(0, |differ, place| differ | (place ^ first)) == 0
}

/// Removes `TRIM` bytes from the front of frames and gives them the output port of their place, which is an attachment.
/// Frames with another place, and those that do not fit, stay as they are. Returns the marks of the others.
#[inline(always)]
pub(super) fn deliver_frames<const TRIM: usize>(
    layout: &Layout,
    packets: &mut [Packet],
    places: &[u32; BATCH],
    mut count: impl FnMut(u16, usize, usize),
) -> u64 {
    let mut done = 0;
    if are_equal(&places[..packets.len()])
        && let Some(attachment) = layout.attachment_of_destination(places[0])
        && attachment.vlan.is_none()
    {
        let (sent, bytes) = deliver_run::<TRIM>(packets, attachment);
        count(attachment.segment, sent, bytes);
        done = all_marks(sent);
        if sent == packets.len() {
            return done;
        }
    }
    done | deliver_others::<TRIM>(layout, packets, places, all_marks(packets.len()) & !done, count)
}

/// Does the work of [`deliver_frames`] for frames to one attachment without a VLAN tag, until one does not fit. Returns
/// their number and bytes. The function has few values, so they stay in registers.
#[inline(never)]
fn deliver_run<const TRIM: usize>(packets: &mut [Packet], attachment: &Attachment) -> (usize, usize) {
    let Attachment { port, max_frame, .. } = *attachment;
    let (mut sent, mut bytes) = (0, 0);
    for packet in packets {
        let len = packet.len() - TRIM;
        if len > max_frame || !packet.trim_front_for(TRIM, port) {
            break;
        }
        sent += 1;
        bytes += len;
    }
    (sent, bytes)
}

/// Does the work of [`deliver_frames`] for the wanted frames one by one.
#[inline(never)]
fn deliver_others<const TRIM: usize>(
    layout: &Layout,
    packets: &mut [Packet],
    places: &[u32; BATCH],
    mut wanted: u64,
    mut count: impl FnMut(u16, usize, usize),
) -> u64 {
    let mut done = 0;
    // Frames in a row often go to one port.
    let mut last = (NO_DESTINATION, None);
    let mut tally = Tally::new(0);
    while wanted != 0 {
        let i = wanted.trailing_zeros() as usize % BATCH;
        wanted &= wanted - 1;
        if places[i] != last.0 {
            last = (places[i], layout.attachment_of_destination(places[i]));
        }
        let (Some(attachment), Some(packet)) = (last.1, packets.get_mut(i)) else { continue };
        let len = packet.len() - TRIM;
        if len > attachment.max_frame || !packet.trim_front_for(TRIM, attachment.port) {
            continue;
        }
        // The removed outer headers leave enough headroom for a tag.
        if attachment.vlan.is_some() && adapt_to_attachment(packet, attachment).is_err() {
            continue;
        }
        tally.add(attachment.segment, len, &mut count);
        done |= 1 << i;
    }
    tally.end(count);
    done
}

/// Sums consecutive packets of one segment, so that the segment's counters are updated once per run.
#[derive(Debug)]
pub(super) struct Tally {
    segment: u16,
    packets: usize,
    bytes: usize,
}

impl Tally {
    /// Creates a tally that starts with the segment of most packets.
    pub(super) const fn new(segment: u16) -> Self {
        Self { segment, packets: 0, bytes: 0 }
    }

    #[inline(always)]
    pub(super) fn add(&mut self, segment: u16, bytes: usize, mut flush: impl FnMut(u16, usize, usize)) {
        if segment != self.segment {
            if self.packets > 0 {
                flush(self.segment, self.packets, self.bytes);
            }
            *self = Self { segment, packets: 0, bytes: 0 };
        }
        self.packets += 1;
        self.bytes += bytes;
    }

    #[inline(always)]
    pub(super) fn end(self, mut flush: impl FnMut(u16, usize, usize)) {
        if self.packets > 0 {
            flush(self.segment, self.packets, self.bytes);
        }
    }
}

const _: () = assert!(BATCH <= 64, "packets of a batch are marked in 64 bits");
