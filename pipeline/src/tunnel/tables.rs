//! Tables that the workers of a gateway read: ports and segments, which a change of the configuration replaces, and
//! remotes, which change often.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use wirepath_pmd::port::{Offloads, PortId};
use wirepath_wire::MacAddr;
use wirepath_wire::build::{OuterChecksum, OuterHeaders};

use super::config::{GatewayConfig, InnerVlans, SegmentConfig, SegmentControl, UnderlayConfig, UnderlayControl};
use super::counters::SegmentCounters;
use super::filter::{Filter, FilterOwner, Filters};
use super::headers::ETHERNET_LEN;
use super::kinds::mpls::Service;
use super::kinds::srv6::Behaviour;
use super::kinds::{KINDS, Payload, TunnelKind};
use super::learning::{AttachmentRules, LearnRules};
use super::mirror::Mirror;
use super::outer::{ActiveKind, PlainPackets, TunnelId};
use super::places::{Places, SegmentPlace};
use super::router::{Interface, interfaces};
use super::storm_control::{StormControl, StormLimits};
use super::underlay::{Prefix, is_host_address};
use crate::PortInfo;
use crate::token_bucket::TokenBucket;

/// Tunnel packets of unknown VTEPs per second and segment that the control thread gets, and their burst.
const NEW_REMOTES: (u64, u128) = (100, 100);
/// Index that stands for "no attachment".
const NONE: u32 = u32::MAX;

/// Destination of a forwarding entry: index of an attachment or a remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Index in [`Layout::attachments`].
    Attachment(u32),
    /// Index in [`Remotes::list`].
    Remote(u32),
    /// Index of a group of remotes that share the flows.
    Group(u32),
    /// The router of the segment.
    Router,
}

impl Destination {
    /// Flag of an encoded group. Indices are lower.
    const GROUP: u32 = 1 << 29;
    /// Flag of an encoded remote.
    const REMOTE: u32 = 1 << 30;
    /// Encoded router.
    const ROUTER: u32 = 1 << 31;

    /// Encodes the destination for forwarding tables.
    #[inline(always)]
    pub const fn pack(self) -> u32 {
        match self {
            Self::Attachment(index) => index,
            Self::Remote(index) => index | Self::REMOTE,
            Self::Group(index) => index | Self::GROUP,
            Self::Router => Self::ROUTER,
        }
    }

    /// Returns whether a value made by [`Self::pack`] is a group.
    #[inline(always)]
    pub(super) const fn is_packed_group(value: u32) -> bool {
        value & !(Self::GROUP - 1) == Self::GROUP
    }

    /// Decodes a value made by [`Self::pack`].
    #[inline(always)]
    pub const fn unpack(value: u32) -> Self {
        if value & Self::REMOTE != 0 {
            Self::Remote(value & !Self::REMOTE)
        } else if value == Self::ROUTER {
            Self::Router
        } else if value & Self::GROUP != 0 {
            Self::Group(value & !Self::GROUP)
        } else {
            Self::Attachment(value)
        }
    }
}

/// Properties of the underlay that the workers read.
#[derive(Clone, Debug)]
pub struct Underlay {
    /// Port of the underlay.
    pub port: PortId,
    /// The gateway's Ethernet address on the underlay.
    pub mac: MacAddr,
    /// VLAN ID of the underlay.
    pub vlan: Option<u16>,
    /// The gateway's IPv4 addresses.
    pub v4: Vec<Ipv4Addr>,
    /// The gateway's IPv6 addresses.
    pub v6: Vec<Ipv6Addr>,
    /// The gateway's addresses with their networks.
    pub networks: Vec<Prefix>,
    /// The gateway's SIDs, which are destinations of tunnel packets only, with what it does there.
    pub sids: HashMap<Ipv6Addr, Behaviour>,
    /// Services by label, for segments whose kind has labels.
    pub(super) services: HashMap<TunnelId, Service>,
    /// Kinds of tunnels that the segments use. The first one is the default.
    pub kinds: Vec<ActiveKind>,
    /// Received packets of the kind that [`super::decap`] takes by itself.
    pub(super) plain: PlainPackets,
    /// First outer source port, and number of source ports.
    pub source_ports: (u16, u32),
    /// Bits of the inner traffic class that are copied to the outer one. The ECN mark is always copied; the
    /// DSCP is copied if configured, and is then zero in the template.
    pub copied_class: u8,
    /// If true, tunnel packets over IPv6 with UDP checksum 0 are accepted (RFC 6935).
    pub accept_zero_checksum6: bool,
    /// If true, fragments of tunnel packets are joined.
    pub reassembly: bool,
    /// True if the gateway is a host of the underlay. Otherwise the kernel is, which answers ARP, ND and echo requests.
    pub is_host: bool,
    /// MTU of the underlay port in bytes.
    pub mtu: u16,
}

impl Underlay {
    fn new(config: &UnderlayConfig, segments: &[SegmentConfig], mac: MacAddr, mtu: u16) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for prefix in &config.addresses {
            match prefix.address {
                IpAddr::V4(ip) => v4.push(ip),
                IpAddr::V6(ip) => v6.push(ip),
            }
        }
        let mut kinds = vec![ActiveKind::new(config.kind, config)];
        for segment in segments {
            if kinds.iter().all(|active| active.kind != segment.kind) {
                kinds.push(ActiveKind::new(segment.kind, config));
            }
        }
        // The plain packets are those of a kind that segments with tunnels use, first of the default kind.
        let is_used = |active: &&ActiveKind| {
            let mut segments = segments.iter().filter(|it| it.has_tunnels());
            !v4.is_empty() && segments.any(|it| it.kind == active.kind && it.payload == Payload::Ethernet)
        };
        let plain = PlainPackets::new(kinds.iter().filter(is_used));
        let (first, last) = config.source_ports;
        Self {
            port: PortId::new(config.port as u16),
            mac,
            vlan: config.vlan,
            v4,
            v6,
            networks: config.addresses.clone(),
            sids: segments.iter().filter_map(SegmentConfig::sids).map(|sids| (sids.local, sids.behaviour)).collect(),
            services: segments.iter().filter_map(|it| Some((it.tunnel_id(), it.service()?))).collect(),
            plain,
            kinds,
            source_ports: (first, u32::from(last - first) + 1),
            copied_class: if config.dscp.is_none() { 0xff } else { 3 },
            accept_zero_checksum6: config.checksum == OuterChecksum::Zero,
            reassembly: config.reassembly,
            is_host: config.control == UnderlayControl::Static,
            mtu,
        }
    }

    /// Returns the outer source port for a flow.
    #[inline(always)]
    pub fn source_port(&self, entropy: u32) -> u16 {
        let (first, count) = self.source_ports;
        first.wrapping_add(((u64::from(entropy) * u64::from(count)) >> 32) as u16)
    }

    /// Returns whether an address belongs to the gateway, as one of its addresses or SIDs.
    pub fn has_address(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.v4.contains(&ip),
            IpAddr::V6(ip) => self.v6.contains(&ip) || self.sids.contains_key(&ip),
        }
    }

    /// Returns the SID of the gateway with this address, and its behaviour.
    pub fn find_sid(&self, ip: IpAddr) -> Option<(Ipv6Addr, Behaviour)> {
        let IpAddr::V6(ip) = ip else { return None };
        self.sids.get(&ip).map(|behaviour| (ip, *behaviour))
    }

    /// Returns whether a VTEP can have this address: a unicast address of another host, which is neither the
    /// address nor the broadcast address of a network of the underlay.
    pub fn can_be_remote(&self, ip: IpAddr) -> bool {
        is_host_address(ip)
            && !self.has_address(ip)
            && !self.networks.iter().any(|network| network.is_reserved(ip) || network.is_router_anycast(ip))
    }
}

/// Properties of a segment that the workers read. Its index is the segment part of forwarding keys.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Kind of its tunnels.
    pub kind: &'static TunnelKind,
    /// Network identifier in tunnel headers, if they have one.
    pub vni: Option<u32>,
    /// SID of the gateway for the segment, if the kind has SIDs.
    pub sid: Option<Ipv6Addr>,
    /// Payload of its tunnels.
    pub payload: Payload,
    /// Indices of the segment's attachments.
    pub attachments: Vec<u32>,
    /// Indices of the segment's remotes that get flooded frames: the replication list.
    pub remotes: Vec<u32>,
    /// If true, addresses are learned.
    pub learning: bool,
    /// If true, addresses behind remotes are learned too.
    pub learns_remotes: bool,
    /// Handling of VLAN tags inside the tunnel.
    pub inner_vlans: InnerVlans,
    /// If true, the MSS of TCP connections through the tunnels is lowered.
    pub clamp_mss: bool,
    /// Configured MTU of the segment in bytes.
    pub(super) mtu: Option<u16>,
    /// Rules for the frames that enter the segment.
    pub(super) filter: Option<Arc<Filter>>,
    /// Router of the segment.
    pub router: Option<Interface>,
    /// If true, frames from VTEPs that are not configured are accepted.
    pub accept_unknown_remotes: bool,
    /// Counters of each worker, followed by those of the control thread.
    pub counters: Arc<[SegmentCounters]>,
    /// True if superframes are cut before the tunnel. Each frame needs a tunnel header of its own, or ports do not know
    /// the kind of the tunnel. They may also take it for another one.
    pub(super) cuts_superframes: bool,
    /// Rules for learned addresses.
    pub learn_rules: LearnRules,
    /// If true, workers answer ARP and ND requests of local hosts.
    pub neighbour_suppression: bool,
    /// If true, local hosts may take IP addresses from hosts that another control plane has announced.
    pub(super) follows_claims: bool,
    /// Gets copies of all frames.
    pub(super) mirror: Option<Mirror>,
    /// Limits the frames that local ports flood.
    pub(super) storm_control: Arc<StormControl>,
    /// Limits the tunnel packets of unknown VTEPs that the control thread gets.
    pub(super) new_remotes: Arc<TokenBucket>,
}

impl Segment {
    /// Returns the limits of the frames that local ports flood.
    pub fn storm_limits(&self) -> StormLimits {
        self.storm_control.limits()
    }

    /// Returns whether frames that enter the segment take the slow path, which mirrors and filters them.
    #[inline]
    pub(super) fn is_inspected(&self) -> bool {
        self.mirror.is_some() || self.filter.is_some()
    }

    /// Returns whether the segment is a layer-3 tunnel.
    pub fn is_routed_tunnel(&self) -> bool {
        self.payload == Payload::Ip
    }

    /// Returns the segment's identifier in tunnel headers.
    pub fn tunnel_id(&self) -> TunnelId {
        TunnelId { kind: self.kind.number(), id: self.vni, sid: self.sid }
    }
}

/// An attachment of a segment to a port.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// The port.
    pub port: PortId,
    /// VLAN ID of the attachment's frames.
    pub vlan: Option<u16>,
    /// Index of the segment.
    pub segment: u16,
    /// Rules for its hosts.
    pub rules: AttachmentRules,
    /// If true, the port inserts VLAN tags itself.
    pub inserts_vlan: bool,
    /// Maximum length of a frame without tag, in bytes.
    pub max_frame: usize,
}

/// Role of a port.
#[derive(Clone, Debug)]
enum Role {
    None,
    Underlay,
    Local(LocalPort),
}

impl Role {
    /// Adds an attachment.
    fn attach(&mut self, vlan: Option<u16>, index: u32) {
        if let Self::None = self {
            *self = Self::Local(LocalPort { untagged: NONE, tagged: Vec::new() });
        }
        let Self::Local(local) = self else { return };
        match vlan {
            None => local.untagged = index,
            Some(vlan) => {
                local.tagged.resize(4096, NONE);
                if let Some(slot) = local.tagged.get_mut(usize::from(vlan)) {
                    *slot = index;
                }
            }
        }
    }
}

/// Attachments of a port.
#[derive(Clone, Debug)]
pub struct LocalPort {
    untagged: u32,
    /// Attachments by VLAN ID; empty if the port has none.
    tagged: Vec<u32>,
}

impl LocalPort {
    /// Returns the attachment of frames without a tag or with a priority tag.
    #[inline(always)]
    pub fn untagged(&self) -> Option<u32> {
        (self.untagged != NONE).then_some(self.untagged)
    }

    /// Returns the attachment of frames with this VLAN ID.
    #[inline(always)]
    pub fn vlan(&self, id: u16) -> Option<u32> {
        self.tagged.get(usize::from(id)).copied().filter(|index| *index != NONE)
    }

    /// Returns whether the port has attachments with a VLAN.
    #[inline(always)]
    pub fn has_vlans(&self) -> bool {
        !self.tagged.is_empty()
    }
}

/// Ports and segments of a gateway.
///
/// Segments and attachments that a change of the configuration removes stay in their lists until their index is used
/// again, but nothing refers to them.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The underlay.
    pub underlay: Underlay,
    /// Segments by index.
    pub segments: Vec<Segment>,
    /// Attachments by index.
    pub attachments: Vec<Attachment>,
    /// True if a segment watches ARP and ND messages.
    pub(super) watches_neighbours: bool,
    /// True if a segment has a mirror or a filter.
    pub(super) inspects: bool,
    /// True if a segment lowers the MSS of TCP connections.
    pub(super) clamps_mss: bool,
    /// Counters of each segment, in one place, because those of many segments are read in turn.
    counters: Vec<Arc<[SegmentCounters]>>,
    /// Number of workers.
    workers: usize,
    /// Role of each port.
    roles: Vec<Role>,
    /// Segment index of each identifier in tunnel headers. Of segments without identifier, the one that accepts unknown
    /// remotes has precedence.
    vnis: HashMap<TunnelId, u16>,
    /// Indices of the configured segments.
    in_use: HashSet<u16>,
}

/// Returns whether tunnels of a kind have the default UDP port of another one. Ports read superframes without the
/// configuration, so they would take them for those of the other kind.
fn has_port_of_another(kind: &'static TunnelKind, config: &UnderlayConfig) -> bool {
    let port = config.port_of(kind);
    port.is_some() && KINDS.iter().any(|other| *other != kind && other.default_port() == port)
}

impl Layout {
    /// Creates a layout without segments. `ports` are the configured ports in order.
    pub(super) fn new(config: &UnderlayConfig, ports: &[PortInfo]) -> Self {
        let port = ports.get(config.port);
        let first = config.addresses.first().map(|prefix| prefix.address);
        let mac = port.and_then(|port| port.mac).unwrap_or_else(|| generated_mac(first));
        Self {
            underlay: Underlay::new(config, &[], mac, port.map_or(1500, |port| port.mtu)),
            segments: Vec::new(),
            attachments: Vec::new(),
            watches_neighbours: false,
            inspects: false,
            clamps_mss: false,
            counters: Vec::new(),
            workers: 1,
            roles: Vec::new(),
            vnis: HashMap::new(),
            in_use: HashSet::new(),
        }
    }

    /// Takes over a checked configuration. `places` are the indices of its parts. `workers` is the number of workers.
    /// `vrfs` has the number of each VRF.
    pub(super) fn update(
        &mut self,
        config: &GatewayConfig,
        places: &Places,
        vrfs: &[u16],
        filters: &Filters,
        ports: &[PortInfo],
        workers: usize,
    ) {
        self.workers = workers;
        let Self {
            underlay, segments, attachments, watches_neighbours, inspects, clamps_mss, roles, vnis, in_use, ..
        } = self;
        *clamps_mss = config.segments.iter().any(|segment| segment.clamp_mss);
        *inspects = config.segments.iter().any(|segment| segment.mirror.is_some() || !segment.filter.is_empty());
        *watches_neighbours = config.segments.iter().any(|segment| segment.suppression.enabled);
        *underlay = Underlay::new(&config.underlay, &config.segments, underlay.mac, underlay.mtu);
        *roles = ports.iter().map(|_| Role::None).collect();
        if let Some(role) = roles.get_mut(config.underlay.port) {
            *role = Role::Underlay;
        }
        let mut removed = std::mem::take(in_use);
        vnis.clear();
        let routers = interfaces(config, vrfs, underlay.mac);
        for ((segment, place), mut router) in config.segments.iter().zip(&places.segments).zip(routers) {
            if let Some(router) = &mut router {
                router.filter = filters.get(FilterOwner::Vrf(router.vrf));
            }
            let id = segment.tunnel_id();
            for (attachment, index) in segment.attachments.iter().zip(&place.attachments) {
                let Some(port) = ports.get(attachment.port) else { continue };
                if let Some(role) = roles.get_mut(attachment.port) {
                    role.attach(attachment.vlan, *index);
                }
                let new = Attachment {
                    port: port.id,
                    vlan: attachment.vlan,
                    segment: place.index,
                    rules: attachment.rules,
                    inserts_vlan: port.capabilities.offloads.contains(Offloads::TX_VLAN_INSERT),
                    max_frame: usize::from(port.mtu) + ETHERNET_LEN + segment.inner_vlans.tag_len(),
                };
                put(attachments, *index as usize, new);
            }
            let known = segments.get(usize::from(place.index)).filter(|_| removed.remove(&place.index));
            let counters = || (0..=workers).map(|_| SegmentCounters::default()).collect();
            let new = Segment {
                kind: segment.kind,
                vni: id.id,
                sid: id.sid,
                payload: segment.payload,
                attachments: place.attachments.clone(),
                remotes: replication_list(segment, place),
                learning: segment.learning,
                learns_remotes: segment.learning && segment.control == SegmentControl::Static,
                inner_vlans: segment.inner_vlans,
                clamp_mss: segment.clamp_mss,
                mtu: segment.mtu,
                filter: filters.get(FilterOwner::Segment(place.index)),
                router,
                accept_unknown_remotes: segment.accept_unknown_remotes,
                cuts_superframes: segment.header().variable.differ_in_superframes()
                    || segment.kind.has_labels()
                    || has_port_of_another(segment.kind, &config.underlay),
                counters: known.map_or_else(counters, |known| Arc::clone(&known.counters)),
                learn_rules: segment.learn_rules,
                neighbour_suppression: segment.suppression.enabled,
                follows_claims: segment.control == SegmentControl::Kernel,
                mirror: segment.mirror.and_then(|index| ports.get(index)).map(Mirror::new),
                storm_control: StormControl::new(segment.storm_limits, known.map(|known| &known.storm_control)),
                new_remotes: known.map_or_else(
                    || Arc::new(TokenBucket::new(NEW_REMOTES.0, NEW_REMOTES.1)),
                    |known| Arc::clone(&known.new_remotes),
                ),
            };
            put(segments, place.index.into(), new);
            in_use.insert(place.index);
            if segment.accept_unknown_remotes || !vnis.contains_key(&id) {
                vnis.insert(id, place.index);
            }
        }
        self.counters = segments.iter().map(|segment| Arc::clone(&segment.counters)).collect();
        for removed in removed {
            if let Some(segment) = segments.get_mut(usize::from(removed)) {
                (segment.attachments, segment.remotes) = (Vec::new(), Vec::new());
                (segment.learning, segment.accept_unknown_remotes, segment.router) = (false, false, None);
                (segment.neighbour_suppression, segment.mirror, segment.filter) = (false, None, None);
            }
        }
    }

    /// Number of workers.
    pub(super) fn workers(&self) -> usize {
        self.workers
    }

    /// Returns the counters of a segment that the thread with this index writes.
    #[inline(always)]
    pub fn counters(&self, segment: u16, thread: usize) -> Option<&SegmentCounters> {
        self.counters.get(usize::from(segment))?.get(thread)
    }

    /// Counts packets that a thread sends into the tunnels of a segment. `bytes` includes the Ethernet headers of the
    /// router's packets, which layer-3 tunnels do not carry.
    #[inline(always)]
    pub(super) fn count_overlay_tx(&self, segment: u16, thread: usize, packets: usize, bytes: usize) {
        let is_routed = self.segments.get(usize::from(segment)).is_some_and(Segment::is_routed_tunnel);
        let removed = if is_routed { packets * ETHERNET_LEN } else { 0 };
        if let Some(counters) = self.counters(segment, thread) {
            counters.overlay_tx.add(packets, bytes.saturating_sub(removed));
        }
    }

    /// Returns the attachment of a packed [`Destination`]; `None` if it is another place.
    #[inline(always)]
    pub(super) fn attachment_of_destination(&self, destination: u32) -> Option<&Attachment> {
        match Destination::unpack(destination) {
            Destination::Attachment(index) => self.attachments.get(index as usize),
            Destination::Remote(_) | Destination::Group(_) | Destination::Router => None,
        }
    }

    /// Returns whether addresses that are learned at this place do not move.
    pub(super) fn is_sticky(&self, place: Destination) -> bool {
        let Destination::Attachment(index) = place else { return false };
        self.attachments.get(index as usize).is_some_and(|attachment| attachment.rules.sticky)
    }

    /// Returns whether both attachments are isolated, so that no frame passes between them.
    pub(super) fn are_isolated(&self, a: u32, b: u32) -> bool {
        [a, b].iter().all(|index| self.attachments.get(*index as usize).is_some_and(|it| it.rules.isolated))
    }

    /// Returns whether the port is the underlay port.
    #[inline(always)]
    pub fn is_underlay(&self, port: PortId) -> bool {
        matches!(self.roles.get(port.index()), Some(Role::Underlay))
    }

    /// Returns the port's attachments, if it has any.
    #[inline(always)]
    pub fn local_port(&self, port: PortId) -> Option<&LocalPort> {
        match self.roles.get(port.index()) {
            Some(Role::Local(local)) => Some(local),
            _ => None,
        }
    }

    /// Returns the index of the segment with this identifier in tunnel headers, for packets of unknown remotes.
    pub fn segment_of(&self, id: TunnelId) -> Option<u16> {
        self.vnis.get(&id).copied()
    }
}

/// Returns the indices of the remotes of a segment that get flooded frames.
pub(super) fn replication_list(segment: &SegmentConfig, place: &SegmentPlace) -> Vec<u32> {
    let flooded = segment.remotes.iter().zip(&place.remotes).filter(|(remote, _)| remote.flood);
    flooded.map(|(_, index)| *index).collect()
}

/// Stores a value at an index, which may be one behind the last.
pub(super) fn put<T: Clone>(list: &mut Vec<T>, index: usize, value: T) {
    match list.get_mut(index) {
        Some(old) => *old = value,
        None => list.resize(index + 1, value),
    }
}

/// Returns a locally administered address for a port without one. It depends only on the VTEP address.
fn generated_mac(ip: Option<IpAddr>) -> MacAddr {
    let bits = match ip {
        Some(IpAddr::V4(ip)) => u64::from(ip.to_bits()),
        Some(IpAddr::V6(ip)) => {
            let bits = ip.to_bits();
            (bits ^ bits >> 40 ^ bits >> 80) as u64 & 0xff_ffff_ffff
        }
        None => 1,
    };
    MacAddr::from_u64(0x0200_0000_0000 | bits & 0xff_ffff_ffff)
}

/// State of the next hop of a remote.
#[derive(Clone, Copy, Debug)]
pub enum NextHop {
    /// Resolved: the worker adds these outer headers.
    Ready(OuterHeaders),
    /// Resolved: the NIC adds the headers to packets with these numbers. The worker adds the outer headers to
    /// packets that the NIC cannot encapsulate.
    InNic(OuterHeaders, NicNumbers),
    /// The link was lost, so the control thread queues a few packets until the next hop replies. The worker adds
    /// these outer headers to the others. The numbers are those of [`Self::InNic`], which apply afterwards.
    Held(OuterHeaders, Option<NicNumbers>),
    /// Being resolved. The control thread queues a few packets.
    Resolving,
    /// The next hop did not reply to ARP or ND.
    Unreachable,
    /// The remote carries nothing: its BFD session is not up, or it is a backup of remotes that are up.
    Out,
}

impl NextHop {
    /// Returns the state with these outer headers, which the NIC adds if it has numbers for them.
    pub(super) fn resolved(template: OuterHeaders, numbers: Option<NicNumbers>) -> Self {
        numbers.map_or(Self::Ready(template), |numbers| Self::InNic(template, numbers))
    }
}

/// Transmit metadata of packets to which the NIC adds the outer headers of a remote.
///
/// The headers of a layer-3 tunnel name the version of the inner packet, so each version has a number. Tunnels of
/// Ethernet frames have one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicNumbers {
    /// Number of all packets except those with an inner IPv6 packet.
    pub ipv4: u32,
    /// Number of inner IPv6 packets; equal to `ipv4` for Ethernet frames.
    pub ipv6: u32,
}

impl NicNumbers {
    /// Returns the number of a frame.
    #[inline(always)]
    pub(super) fn of(self, frame: &[u8]) -> u32 {
        // Frames to a layer-3 tunnel are untagged. For other frames the two numbers are equal.
        if frame.get(ETHERNET_LEN).is_some_and(|byte| byte >> 4 == 6) { self.ipv6 } else { self.ipv4 }
    }

    /// Returns the different numbers.
    pub fn all(self) -> impl Iterator<Item = u32> {
        [Some(self.ipv4), (self.ipv6 != self.ipv4).then_some(self.ipv6)].into_iter().flatten()
    }
}

/// A remote VTEP of a segment.
///
/// The fields that a worker reads for each frame come first, so that they lie in few cache lines.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct Remote {
    /// Maximum length of an inner frame in bytes, whose tunnel packet the path takes.
    pub max_frame: usize,
    /// Next sequence number in tunnel headers, if they have one. All workers take their numbers from it.
    pub sequence: Option<Arc<AtomicU32>>,
    /// Index of the segment.
    pub segment: u16,
    /// State of the next hop.
    pub next_hop: NextHop,
    /// Maximum length of an inner frame whose tunnel packet is sent as fragments; 0 if the segment sends none.
    pub max_fragmented: usize,
    /// Address of the remote; the unspecified address if the index is free.
    pub address: IpAddr,
}

/// Part of a [`Remote`] that a worker reads for a frame with usual outer headers, bytes.
const REMOTE_HEAD: usize = 160;
/// A gateway with more remotes prefetches those of a batch, because they do not stay in the first caches.
const MANY_REMOTES: usize = 128;

impl Remote {
    /// Creates a remote whose next hop is not resolved. `config` has the settings of its segment.
    pub(super) fn new(address: IpAddr, segment: u16, max_frame: usize, config: Option<&SegmentConfig>) -> Self {
        let sequence = config.and_then(SegmentConfig::new_sequence);
        let max_fragmented = config.map_or(0, SegmentConfig::longest_fragmented);
        Self { address, segment, max_frame, max_fragmented, next_hop: NextHop::Resolving, sequence }
    }

    /// Maximum length of an inner frame in bytes.
    pub fn longest_frame(&self) -> usize {
        self.max_frame.max(self.max_fragmented)
    }
}

/// All remotes. A change replaces the whole list, in which each remote keeps its index.
#[derive(Clone, Debug, Default)]
pub struct Remotes {
    /// Remotes in configuration order, followed by the learned ones.
    pub list: Vec<Remote>,
    /// True if the NIC may have decapsulated packets. Such packets carry a mark.
    pub decapsulated_by_nic: bool,
    /// Remotes by identifier of the segment and address.
    sources: RemoteMap,
    /// Remotes of the segments with SIDs, by SID and address.
    sources_by_sid: HashMap<(Ipv6Addr, IpAddr), Source>,
}

impl Remotes {
    /// Returns the remote of a packed [`Destination`]; `None` if it is another place.
    #[inline(always)]
    pub(super) fn of_destination(&self, destination: u32) -> Option<&Remote> {
        match Destination::unpack(destination) {
            Destination::Remote(index) if destination != crate::table::NO_DESTINATION => self.list.get(index as usize),
            _ => None,
        }
    }

    /// Returns whether there are so many remotes that it pays to prefetch them.
    #[inline(always)]
    pub(super) fn are_many(&self) -> bool {
        self.list.len() > MANY_REMOTES
    }

    /// Prefetches what a worker reads of the remote of a packed [`Destination`].
    #[inline(always)]
    pub(super) fn prefetch(&self, destination: u32) {
        let Some(remote) = self.of_destination(destination) else { return };
        let start = std::ptr::from_ref(remote).cast::<u8>();
        for at in (0..REMOTE_HEAD).step_by(64) {
            crate::table::prefetch_at(start.wrapping_add(at));
        }
    }

    /// Prefetches what [`Self::find_source`] reads, for a segment without SID.
    #[inline(always)]
    pub(super) fn prefetch_source(&self, id: TunnelId, address: IpAddr) {
        let (key, bits) = RemoteMap::key(id, address);
        let slots = &self.sources.slots;
        crate::table::prefetch_at(slots.as_ptr().wrapping_add(RemoteMap::hash(key, bits) & (slots.len().max(1) - 1)));
    }

    /// Creates the remotes from a list. `id` returns the identifier of a segment in tunnel headers.
    pub fn new(list: Vec<Remote>, id: impl Fn(u16) -> TunnelId) -> Self {
        let sources = RemoteMap::new(list.iter().map(|remote| (id(remote.segment), remote.address, remote.segment)));
        let used = (0..).zip(&list).filter(|(_, remote)| !remote.address.is_unspecified());
        let by_sid = |(index, remote): (u32, &Remote)| {
            let found = Source { remote: index, segment: remote.segment };
            Some(((id(remote.segment).sid?, remote.address), found))
        };
        let sources_by_sid = used.filter_map(by_sid).collect();
        Self { list, decapsulated_by_nic: false, sources, sources_by_sid }
    }

    /// Returns the remote with this segment and outer source address.
    #[inline(always)]
    pub(super) fn find_source(&self, id: TunnelId, address: IpAddr) -> Option<Source> {
        match id.sid {
            None => self.sources.find(id, address),
            Some(sid) => self.sources_by_sid.get(&(sid, address)).copied(),
        }
    }
}

/// Maps the identifier of a segment and an address to a remote, with open addressing and at most half full.
#[derive(Clone, Debug, Default)]
struct RemoteMap {
    /// Identifier with kind and address family, address, and the remote. The first is `u64::MAX` in a free slot.
    slots: Vec<(u64, u128, Source)>,
}

/// Remote and segment of a tunnel packet, by its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    /// Index of the remote.
    pub(super) remote: u32,
    /// Index of its segment.
    pub(super) segment: u16,
}

impl RemoteMap {
    fn new(remotes: impl ExactSizeIterator<Item = (TunnelId, IpAddr, u16)>) -> Self {
        let mut slots =
            vec![(u64::MAX, 0, Source { remote: 0, segment: 0 }); (remotes.len() * 2).next_power_of_two().max(2)];
        let mask = slots.len() - 1;
        for (index, (id, address, segment)) in remotes.enumerate() {
            // Those of segments with SIDs have a map of their own.
            if address.is_unspecified() || id.sid.is_some() {
                continue;
            }
            let (key, bits) = Self::key(id, address);
            let mut at = Self::hash(key, bits) & mask;
            while slots[at].0 != u64::MAX {
                at = (at + 1) & mask;
            }
            slots[at] = (key, bits, Source { remote: index as u32, segment });
        }
        Self { slots }
    }

    #[inline(always)]
    fn key(id: TunnelId, address: IpAddr) -> (u64, u128) {
        let number = id.id.map_or(1 << 33, u64::from);
        let id = number | u64::from(id.kind) << 40;
        match address {
            IpAddr::V4(ip) => (id, u128::from(ip.to_bits())),
            IpAddr::V6(ip) => (id | 1 << 32, ip.to_bits()),
        }
    }

    #[inline(always)]
    fn hash(key: u64, bits: u128) -> usize {
        // The product mixes both. Consecutive identifiers and addresses would have few different exclusive ors.
        let address = bits as u64 ^ ((bits >> 64) as u64).rotate_left(23);
        let product = u128::from(key ^ 0x9e37_79b9_7f4a_7c15) * u128::from(address ^ 0xa076_1d64_78bd_642f);
        (product as u64 ^ (product >> 64) as u64) as usize
    }

    #[inline(always)]
    fn find(&self, id: TunnelId, address: IpAddr) -> Option<Source> {
        let (key, bits) = Self::key(id, address);
        let mask = self.slots.len().checked_sub(1)?;
        let mut at = Self::hash(key, bits) & mask;
        loop {
            let slot = self.slots.get(at)?;
            if slot.0 == key && slot.1 == bits {
                return Some(slot.2);
            }
            if slot.0 == u64::MAX {
                return None;
            }
            at = (at + 1) & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_survive_packing() {
        for destination in [
            Destination::Attachment(0),
            Destination::Attachment(77),
            Destination::Remote(9),
            Destination::Group(0),
            Destination::Group(8),
            Destination::Router,
        ] {
            assert_eq!(Destination::unpack(destination.pack()), destination);
            assert_ne!(destination.pack(), crate::table::NO_DESTINATION);
        }
    }

    #[test]
    fn remotes_are_found_by_identifier_and_address() {
        let remote = |segment, address: &str| Remote {
            address: address.parse().unwrap(),
            segment,
            max_frame: 1500,
            max_fragmented: 0,
            next_hop: NextHop::Resolving,
            sequence: None,
        };
        let mut list = vec![remote(0, "10.0.0.1"), remote(1, "10.0.0.1"), remote(0, "fd00::1"), remote(0, "::a00:1")];
        for i in 0..1000u32 {
            list.push(remote(2, &Ipv4Addr::from(0x0b00_0000 + i).to_string()));
        }
        let sid = |segment| (segment >= 3).then(|| Ipv6Addr::from_bits(0xfc00 << 112 | u128::from(segment)));
        let id = |segment: u16| TunnelId {
            kind: 0,
            id: (segment != 1 && segment < 3).then(|| u32::from(segment) + 100),
            sid: sid(segment),
        };
        // Segments with SIDs may have the same remotes.
        list.extend([remote(3, "fd00::1"), remote(4, "fd00::1"), remote(4, "fd00::2")]);
        let remotes = Remotes::new(list.clone(), id);
        for (i, r) in list.iter().enumerate() {
            let expected = Source { remote: i as u32, segment: r.segment };
            assert_eq!(remotes.find_source(id(r.segment), r.address), Some(expected));
            assert_eq!(remotes.find_source(TunnelId { kind: 0, id: Some(99), sid: None }, r.address), None);
            assert_eq!(remotes.find_source(TunnelId { kind: 0, id: Some(0), sid: None }, r.address), None);
            assert_eq!(remotes.find_source(TunnelId { kind: 0, id: None, sid: sid(9) }, r.address), None);
            if r.segment < 3 {
                assert_eq!(remotes.find_source(TunnelId { kind: 1, ..id(r.segment) }, r.address), None);
            }
        }
        assert_eq!(Remotes::new(Vec::new(), id).find_source(id(0), list[0].address), None);
    }

    #[test]
    fn source_ports_stay_in_their_range() {
        let mut underlay = Underlay {
            port: PortId::new(0),
            mac: MacAddr::ZERO,
            vlan: None,
            v4: Vec::new(),
            v6: Vec::new(),
            networks: Vec::new(),
            sids: HashMap::new(),
            services: HashMap::new(),
            kinds: Vec::new(),
            plain: PlainPackets::new(&[]),
            source_ports: (49152, 16384),
            copied_class: 3,
            accept_zero_checksum6: false,
            reassembly: true,
            is_host: true,
            mtu: 1500,
        };
        assert_eq!((underlay.source_port(0), underlay.source_port(u32::MAX)), (49152, 65535));
        underlay.source_ports = (7, 1);
        assert_eq!((underlay.source_port(0), underlay.source_port(u32::MAX)), (7, 7));
    }
}
