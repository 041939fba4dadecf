//! The gateway as a stage: frames of local ports into tunnels, tunnel packets of the underlay out of them.

use std::fmt;
use std::sync::Arc;

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::offload::{Flags, Verdicts};
use wirepath_pmd::packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::PortId;
use wirepath_wire::build::{PLAIN_LEN, VxlanEncap};
use wirepath_wire::{EtherType, Parser, Tag, Tunnels, vlan};

use super::counters::SegmentCounters;
use super::rate::TokenBucket;
use super::tables::{Attachment, Layout, Remotes, TAG, Underlay, packet_sum};
use crate::epoch::Shared;
use crate::table::{Fdb, Key};
use crate::{Context, Stage};

/// Why a packet was given to the control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PuntCode {
    /// It is for the gateway itself: ARP, neighbour discovery, echo.
    Host,
    /// A tunnel packet of a VTEP that is not known yet, in a segment that takes such.
    NewRemote,
    /// A frame for this remote, whose next hop is not known yet.
    Unresolved(u32),
}

impl PuntCode {
    const UNRESOLVED: u32 = 1 << 31;

    /// As [`Context::punt`] takes it.
    pub const fn pack(self) -> u32 {
        match self {
            Self::Host => 0,
            Self::NewRemote => 1,
            Self::Unresolved(remote) => remote | Self::UNRESOLVED,
        }
    }

    /// Back from [`Self::pack`].
    pub const fn unpack(code: u32) -> Self {
        match code {
            0 => Self::Host,
            1 => Self::NewRemote,
            code => Self::Unresolved(code & !Self::UNRESOLVED),
        }
    }
}

/// What all workers of a gateway read.
#[derive(Clone)]
pub struct GatewayTables {
    /// Ports and segments.
    pub layout: Arc<Layout>,
    /// Remotes.
    pub remotes: Arc<Shared<Remotes>>,
    /// Forwarding entries; the destinations are [`super::tables::Destination`]s.
    pub fdb: Arc<Fdb>,
}

impl fmt::Debug for GatewayTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayTables").field("layout", &self.layout).finish_non_exhaustive()
    }
}

/// The stage of one worker.
#[derive(Debug)]
pub struct Gateway {
    tables: GatewayTables,
    state: State,
}

/// What one worker's stage owns.
#[derive(Debug)]
pub(super) struct State {
    pub(super) counters: Arc<[SegmentCounters]>,
    /// Buffers for copies and for what the gateway says itself.
    pub(super) pool: Pool,
    pub(super) parser: Parser,
    /// ICMP messages about packets that are too big.
    pub(super) told: TokenBucket,
    punts: Punts,
    pub(super) source: KnownSource,
    pub(super) scratch: Box<Scratch>,
}

/// What a pass over a batch leaves to the next one. Kept, because clearing it for each batch would cost as much as a header.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Destinations.
    pub(super) keys: [Key; BATCH],
    pub(super) flows: [Flow; BATCH],
    /// Sources that differ from the one before them, and where they are.
    pub(super) sources: [Key; BATCH],
    pub(super) source_at: [u32; BATCH],
    /// Attachment of each packet, on ports with VLANs.
    pub(super) attachments: [u32; BATCH],
}

/// How much a worker gives to the control thread. Each kind has its own share of the queue, so that frames for a next hop that is being
/// asked for, or a VTEP that nobody knows, cannot keep out the answer that all wait for.
#[derive(Debug)]
struct Punts {
    host: TokenBucket,
    new_remotes: TokenBucket,
    unresolved: TokenBucket,
}

impl State {
    /// Gives a packet to the control thread, within limits.
    pub(super) fn punt(&mut self, context: &mut Context<'_>, packet: Packet, code: PuntCode) {
        let (bucket, reason) = match code {
            PuntCode::Host => (&mut self.punts.host, DropReason::RateLimited),
            PuntCode::NewRemote => (&mut self.punts.new_remotes, DropReason::UnknownRemote),
            PuntCode::Unresolved(_) => (&mut self.punts.unresolved, DropReason::NoNeighbour),
        };
        if bucket.take(context.now() / 1_000_000) {
            context.punt(packet, code.pack());
        } else {
            context.drop(packet, reason);
        }
    }
}

/// The source that was confirmed last: most packets come from the same one as the packet before.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownSource {
    pub(super) key: Key,
    pub(super) destination: u32,
    generation: u32,
    second: u32,
}

impl KnownSource {
    const NONE: Self = Self { key: Key::from_u64(0), destination: 0, generation: 0, second: 0 };

    /// Forgets the source if the table has changed, or a second has passed in which it was not noted as seen.
    #[inline(always)]
    pub(super) fn renew(&mut self, generation: u32, second: u32) {
        if self.generation != generation || self.second != second {
            *self = Self { generation, second, ..Self::NONE };
        }
    }
}

impl Gateway {
    /// A worker's stage. `counters` has one entry for each segment; copies are made in buffers of `pool`.
    pub fn new(tables: GatewayTables, counters: Arc<[SegmentCounters]>, pool: Pool) -> Self {
        let state = State {
            counters,
            pool,
            parser: Parser { tunnels: Tunnels::NONE, ..Parser::default() },
            told: TokenBucket::new(100, 20),
            punts: Punts {
                host: TokenBucket::new(4_000, 400),
                new_remotes: TokenBucket::new(200, 50),
                unresolved: TokenBucket::new(1_000, 100),
            },
            source: KnownSource::NONE,
            scratch: Box::new(Scratch {
                keys: [Key::from_u64(0); BATCH],
                flows: [Flow::default(); BATCH],
                sources: [Key::from_u64(0); BATCH],
                source_at: [0; BATCH],
                attachments: [0; BATCH],
            }),
        };
        Self { tables, state }
    }

    /// Packets that were handed over come without their port: takes them apart by the one they carry.
    #[cold]
    fn process_mixed(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let mut rest = std::mem::take(batch);
        while let Some(port) = rest.as_slice().first().map(Packet::in_port) {
            let mut same = Batch::new();
            rest.filter_map(|packet| if packet.in_port() == port { same.push(packet).err() } else { Some(packet) });
            self.process_from(context, &mut same, port);
            context.forward(&mut same);
        }
    }

    #[inline(always)]
    fn process_from(&mut self, context: &mut Context<'_>, batch: &mut Batch, port: PortId) {
        let Self { tables, state } = self;
        batch.prefetch_data();
        if tables.layout.is_underlay(port) {
            tables.decapsulate(state, context, batch);
        } else {
            tables.encapsulate(state, context, batch, port);
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
}

/// What the outer headers take from the inner frame.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flow {
    pub(super) entropy: u32,
    pub(super) class: u8,
}

impl Flow {
    /// Of any frame; see [`wirepath_wire::tuple::entropy`].
    #[cold]
    #[inline(never)]
    pub(super) fn of(frame: &[u8], len: usize, parser: &Parser) -> Self {
        // A frame whose headers are not in order is carried all the same: what bridges do. It has the entropy of its addresses.
        let layers = parser.layers(frame, 0, len).unwrap_or_default();
        Self {
            entropy: wirepath_wire::tuple::entropy(frame, &layers),
            class: super::ecn::traffic_class(frame).unwrap_or(0),
        }
    }
}

/// Puts the outer headers in front of an inner frame.
#[inline(always)]
pub(super) fn wrap(
    packet: &mut Packet,
    template: &VxlanEncap,
    underlay: &Underlay,
    flow: Flow,
) -> Result<(), DropReason> {
    let (len, source_port) = (packet.len(), underlay.source_port(flow.entropy));
    let class = flow.class & underlay.copied_class;
    if template.is_plain() && class == 0 && len <= PLAIN_MOST {
        let Some(room) = packet.prepend::<PLAIN_LEN>() else { return Err(DropReason::NoHeadroom) };
        template.emit_plain(room, len as u16, source_port);
        packet.set_out_port(underlay.port);
        packet.set_verdicts(Verdicts::NONE);
        return Ok(());
    }
    wrap_other(packet, template, underlay, class, source_port)
}

/// Leaves the outer headers to the NIC, if it would put the same ones on: a mark or DSCP to be copied it cannot, nor finish what a sender
/// has left to be done.
#[inline]
pub(super) fn in_nic(packet: &mut Packet, number: u32, underlay: &Underlay, flow: Flow) -> bool {
    let flags = packet.flags();
    if flow.class & underlay.copied_class != 0 || flags.intersects(UNFINISHED) || packet.vlan().is_some() {
        return false;
    }
    packet.set_mark(number);
    packet.set_flags(packet.flags().with(Flags::TX_METADATA));
    packet.set_out_port(underlay.port);
    packet.set_verdicts(Verdicts::NONE);
    true
}

/// What a sender has left to be done behind the gateway.
const UNFINISHED: Flags = Flags::TX_L3_CHECKSUM
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM)
    .with(Flags::TX_SEGMENT);

/// Longest inner frame that IPv4 can carry in a tunnel.
const PLAIN_MOST: usize = 65_535 - 36;

/// [`wrap`] for marked packets, underlays with a tag, and those over IPv6.
#[inline(never)]
fn wrap_other(
    packet: &mut Packet,
    template: &VxlanEncap,
    underlay: &Underlay,
    class: u8,
    source_port: u16,
) -> Result<(), DropReason> {
    let mut patch = template.patch(packet.len(), source_port);
    // RFC 6040 section 4.1: the mark is copied; RFC 2983: the DSCP is, if so configured.
    patch.traffic_class |= class;
    if template.needs_sum() {
        patch.inner_sum = packet_sum(packet);
    }
    let Some(room) = packet.prepend_slice(template.len()) else { return Err(DropReason::NoHeadroom) };
    template.emit(room, &patch).map_err(|_| DropReason::TooLong)?;
    packet.set_out_port(underlay.port);
    packet.set_verdicts(Verdicts::NONE);
    Ok(())
}

/// Makes a frame fit its attachment: length and tag. The output port is set.
#[inline(always)]
pub(super) fn to_attachment(packet: &mut Packet, attachment: &Attachment) -> Result<(), DropReason> {
    if packet.len() > attachment.max_frame {
        return Err(DropReason::TooBigForMtu);
    }
    if let Some(id) = attachment.vlan {
        if attachment.inserts_vlan {
            packet.set_vlan(id);
        } else {
            packet.prepend_slice(TAG).ok_or(DropReason::NoHeadroom)?;
            vlan::push(packet.data_mut(), Tag::new(id));
        }
    }
    packet.set_out_port(attachment.port);
    Ok(())
}

/// Takes the outermost VLAN tag off, beside the frame or in it. `None`: there is none (and so it is for other tags than 802.1Q).
#[inline]
pub(super) fn take_tag(packet: &mut Packet) -> Option<u16> {
    if let Some(tci) = packet.vlan() {
        packet.clear_vlan();
        return Some(tci & 0xfff);
    }
    let tagged = packet.data().get(12..14).is_some_and(|bytes| *bytes == EtherType::VLAN.0.to_be_bytes());
    if !tagged {
        return None;
    }
    let tag = vlan::pop(packet.data_mut())?;
    let _ = packet.trim_front(TAG);
    Some(tag.id())
}

/// Adds up packets of one segment after the other, so that its counters are touched once per run.
#[derive(Debug)]
pub(super) struct Tally {
    segment: u16,
    packets: usize,
    bytes: usize,
}

impl Tally {
    /// Beginning with the segment that most packets belong to.
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
