//! The control thread's part of routing: the routes of all VRFs, the neighbours of each segment, and the packets that
//! wait for them.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_pmd::port::PortId;
use wirepath_wire::{EtherType, MacAddr, Parser, Tunnels};

use super::config::{HopConfig, MAX_NEXT_HOPS, RouteTarget};
use super::tables::{Hop, Hops, RouterTag, Unresolved};
use crate::ControlPlane;
use crate::epoch::{Domain, Shared};
use crate::route::{GroupMember, NetworkPrefix, NextHopGroup, RouteLimits, RouteTables, RouteWriter};
use crate::tunnel::config::{GatewayConfig, TUNNEL_PEER};
use crate::tunnel::neighbour::{Millis, NeighbourAction, NeighbourState};
use crate::tunnel::next_hops::NextHops;
use crate::tunnel::places::{Indices, Places};
use crate::tunnel::policer::ExpectedReplies;
use crate::tunnel::stage::MAX_HOST_FRAME;
use crate::tunnel::underlay::{Addresses, HostReply, Prefix};

/// Maximum number of hops, including those whose index rests before it is used again.
const MAX_HOPS: usize = 1 << 21;
/// Milliseconds for which a neighbour that does not reply stays known, so that packets to it cause no solicitation.
const FAILED_TIME: Millis = 10_000;
/// Minimum milliseconds between two log messages about address conflicts.
const CONFLICT_LOG_INTERVAL: Millis = 10_000;

/// Meaning of a hop. Routes with the same meaning share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum HopSpec {
    Fixed(FixedHop),
    /// A neighbour in a segment.
    Neighbour(u16, IpAddr),
    /// Hops with their weights.
    Group(Vec<(HopSpec, u16)>),
}

/// Hops whose effect never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum FixedHop {
    Local,
    Connected(u16),
    /// The router with this Ethernet address in a segment.
    Router(u16, MacAddr),
    Vrf(u16),
    Discard(super::config::Discard),
    NotUnicast,
}

impl FixedHop {
    fn hop(self) -> Hop {
        match self {
            Self::Local => Hop::Local,
            Self::Connected(segment) => Hop::Connected(segment),
            Self::Router(segment, mac) => Hop::Neighbour(segment, mac),
            Self::Vrf(vrf) => Hop::Vrf(vrf),
            Self::Discard(discard) => Hop::Discard(discard),
            Self::NotUnicast => Hop::NotUnicast,
        }
    }
}

/// A hop in use.
#[derive(Debug)]
struct HopState {
    spec: HopSpec,
    /// Number of routes and groups that use it.
    users: usize,
    /// Members of a group; their next hops are indices of hops.
    members: Vec<GroupMember>,
}

/// The routes of a VRF to one destination from another control plane.
#[derive(Debug, Default)]
struct ExternalRoute {
    /// Segments with a route, and its meaning. The last one is used.
    by_segment: Vec<(u16, HopSpec)>,
    /// Index of the hop if a route is installed.
    hop: Option<u32>,
}

impl ExternalRoute {
    fn spec(&self) -> Option<&HopSpec> {
        self.by_segment.last().map(|(_, spec)| spec)
    }
}

/// The router of a segment.
#[derive(Debug)]
struct SegmentRouter {
    name: String,
    vrf: u16,
    /// Neighbours in the segment.
    neighbours: NextHops,
}

/// A route in the tables: number of the VRF, prefix, and index of the hop.
#[derive(Clone, Copy, Debug)]
pub(in crate::tunnel) struct RoutePosition {
    pub(in crate::tunnel) vrf: u16,
    pub(in crate::tunnel) to: NetworkPrefix,
    hop: u32,
}

/// Position and effect of a route, for listings.
#[derive(Debug)]
pub(in crate::tunnel) struct RouteRow {
    pub(in crate::tunnel) vrf: String,
    pub(in crate::tunnel) to: String,
    pub(in crate::tunnel) origin: &'static str,
    pub(in crate::tunnel) via: String,
    pub(in crate::tunnel) state: &'static str,
}

/// The control thread's state of all routers.
#[derive(Debug)]
pub(in crate::tunnel) struct RouterControl {
    writer: RouteWriter,
    shared: Arc<Shared<Hops>>,
    /// As published, or to be published next if `dirty` is true.
    hops: Hops,
    dirty: bool,
    states: Vec<Option<HopState>>,
    by_spec: HashMap<HopSpec, u32>,
    hop_indices: Indices,
    group_indices: Indices,
    /// Hops that are groups.
    groups: HashSet<u32>,
    /// Number of each VRF.
    vrfs: HashMap<String, u16>,
    vrf_indices: Indices,
    segments: BTreeMap<u16, SegmentRouter>,
    /// Names of the layer-3 tunnels, which have no neighbours.
    tunnels: HashMap<u16, String>,
    /// Routes of the configuration, with their hops.
    installed: HashMap<(u16, NetworkPrefix), (HopSpec, u32)>,
    /// Routes from another control plane. A route of the configuration takes the place of one of these, which is then
    /// not installed.
    external: HashMap<(u16, NetworkPrefix), ExternalRoute>,
    /// Host routes of resolved neighbours: VRF and address, with the segment and the hop.
    learned: HashMap<(u16, IpAddr), (u16, u32)>,
    /// Neighbours that do not reply, each with the time at which it is forgotten.
    failed: VecDeque<(Millis, u16, IpAddr)>,
    /// Neighbours whose resolution has not started.
    unresolved: VecDeque<(u16, IpAddr)>,
    /// Packets for the workers.
    outbox: Vec<(Packet, RouterTag)>,
    /// Routers behind remotes that BFD keeps out: segment and Ethernet address.
    lost_routers: HashSet<(u16, MacAddr)>,
    expected_replies: Arc<ExpectedReplies>,
    conflict_logged_at: Option<Millis>,
}

impl RouterControl {
    /// Creates the routers of a configuration without segments.
    pub(in crate::tunnel) fn new(domain: &Domain, expected_replies: Arc<ExpectedReplies>) -> Self {
        Self {
            writer: RouteWriter::new(domain, RouteLimits::default()),
            shared: Arc::new(Shared::new(domain, Hops::default())),
            hops: Hops::default(),
            dirty: false,
            states: Vec::new(),
            by_spec: HashMap::new(),
            hop_indices: Indices::new(MAX_HOPS),
            group_indices: Indices::new(MAX_HOPS),
            groups: HashSet::new(),
            vrfs: HashMap::new(),
            vrf_indices: Indices::new(usize::from(u16::MAX)),
            segments: BTreeMap::new(),
            tunnels: HashMap::new(),
            installed: HashMap::new(),
            external: HashMap::new(),
            learned: HashMap::new(),
            failed: VecDeque::new(),
            unresolved: VecDeque::new(),
            outbox: Vec::new(),
            lost_routers: HashSet::new(),
            expected_replies,
            conflict_logged_at: None,
        }
    }

    /// Returns the routes that the workers read.
    pub(in crate::tunnel) fn tables(&self) -> crate::sync::Arc<RouteTables> {
        self.writer.tables()
    }

    /// Returns the hops that the workers read.
    pub(in crate::tunnel) fn hops(&self) -> Arc<Shared<Hops>> {
        Arc::clone(&self.shared)
    }

    /// Returns the number of each VRF of a configuration, in its order. A VRF keeps its number as long as it exists.
    pub(in crate::tunnel) fn number_vrfs(&mut self, config: &GatewayConfig, now: u32) -> Vec<u16> {
        let names: HashSet<&str> = config.routing.vrfs.iter().map(|vrf| vrf.name.as_str()).collect();
        let indices = &mut self.vrf_indices;
        self.vrfs.retain(|name, number| {
            let stays = names.contains(name.as_str());
            if !stays {
                indices.release((*number).into(), now);
            }
            stays
        });
        let mut number = |name: &str| {
            if let Some(number) = self.vrfs.get(name) {
                return *number;
            }
            // There are more numbers than a configuration and its predecessors of ten seconds have VRFs.
            let number = self.vrf_indices.take(now).and_then(|index| u16::try_from(index).ok()).unwrap_or(u16::MAX);
            self.vrfs.insert(name.to_owned(), number);
            number
        };
        config.routing.vrfs.iter().map(|vrf| number(&vrf.name)).collect()
    }

    /// Takes over a configuration. `vrfs` are the numbers of its VRFs, `mac` is the Ethernet address of routers without
    /// one of their own. [`Self::flush`] publishes the result.
    pub(in crate::tunnel) fn install(
        &mut self,
        config: &GatewayConfig,
        places: &Places,
        vrfs: &[u16],
        mac: MacAddr,
        now: u32,
    ) {
        self.install_segments(config, places, vrfs, mac);
        self.forget_lost_neighbours(now);
        let desired = desired_routes(config, places, vrfs);
        let gone: Vec<(u16, NetworkPrefix)> =
            self.installed.keys().filter(|key| !desired.contains_key(key)).copied().collect();
        for key in gone {
            if let Some((_, hop)) = self.installed.remove(&key) {
                self.writer.remove(key.0, key.1);
                self.release(hop, now);
                self.put_external(key, now);
            }
        }
        for (key, spec) in desired {
            if self.installed.get(&key).is_some_and(|(known, _)| *known == spec) {
                continue;
            }
            // The members that the old and the new group share keep their flows.
            let like = self.installed.get(&key).map(|(_, hop)| *hop);
            let Some(hop) = self.acquire_like(&spec, like, now) else {
                tracing::warn!("no room for the next hops of the route to {}", key.1);
                continue;
            };
            // The hops must be there before a route refers to them.
            self.publish();
            if let Err(error) = self.writer.insert(key.0, key.1, hop) {
                tracing::warn!("the route to {} is not installed: {error}", key.1);
                self.release(hop, now);
                continue;
            }
            if let Some((_, old)) = self.installed.insert(key, (spec, hop)) {
                self.release(old, now);
            }
            if let Some(hop) = self.external.get_mut(&key).and_then(|route| route.hop.take()) {
                self.release(hop, now);
            }
            self.replace_learned(key, now);
        }
        self.publish();
    }

    /// Removes the host route of a neighbour of which another route takes the place.
    fn replace_learned(&mut self, (vrf, to): (u16, NetworkPrefix), now: u32) {
        if host_prefix(to.address()) != Some(to) {
            return;
        }
        if let Some(learned) = self.learned.remove(&(vrf, to.address())) {
            self.release_neighbour(to.address(), learned, now);
        }
    }

    /// Gives back the hop of a neighbour in a segment, and forgets the neighbour if no route uses it.
    fn release_neighbour(&mut self, ip: IpAddr, (segment, hop): (u16, u32), now: u32) {
        self.release(hop, now);
        if !self.by_spec.contains_key(&HopSpec::Neighbour(segment, ip))
            && let Some(router) = self.segments.get_mut(&segment)
        {
            router.neighbours.forget(ip);
        }
    }

    /// Sets the routes from another control plane that lead to routers in a segment: destinations with the Ethernet
    /// addresses of the routers, which are none for a route that went. Returns how many found no room.
    pub(in crate::tunnel) fn set_external(
        &mut self,
        segment: u16,
        routes: impl IntoIterator<Item = (NetworkPrefix, Vec<MacAddr>)>,
        now: u32,
    ) -> u64 {
        let Some(vrf) = self.segments.get(&segment).map(|router| router.vrf) else { return 0 };
        let mut refused = 0;
        for (to, routers) in routes {
            let spec = routers_spec(segment, &routers);
            refused += u64::from(!self.change_external((vrf, to), now, |by_segment| {
                by_segment.retain(|(of, _)| *of != segment);
                by_segment.extend(spec.map(|spec| (segment, spec)));
            }));
        }
        self.publish();
        refused
    }

    /// Removes the routes from another control plane whose VRF or segment is not one of these any more.
    pub(in crate::tunnel) fn retain_external(&mut self, is_valid: impl Fn(u16) -> bool, now: u32) {
        let vrfs: HashMap<u16, u16> = self.segments.iter().map(|(segment, router)| (*segment, router.vrf)).collect();
        let stays = |vrf: u16, segment: u16| is_valid(segment) && vrfs.get(&segment) == Some(&vrf);
        let is_lost = |(key, route): &(&(u16, NetworkPrefix), &ExternalRoute)| {
            route.by_segment.iter().any(|(segment, _)| !stays(key.0, *segment))
        };
        let lost: Vec<_> = self.external.iter().filter(is_lost).map(|(key, _)| *key).collect();
        for key in lost {
            self.change_external(key, now, |by_segment| by_segment.retain(|(segment, _)| stays(key.0, *segment)));
        }
        self.publish();
    }

    /// Changes the routes to a destination, and what is installed of them. Returns false without room.
    fn change_external(
        &mut self,
        key: (u16, NetworkPrefix),
        now: u32,
        change: impl FnOnce(&mut Vec<(u16, HopSpec)>),
    ) -> bool {
        let route = self.external.entry(key).or_default();
        let before = route.spec().cloned();
        change(&mut route.by_segment);
        if route.by_segment.is_empty() {
            if let Some(hop) = self.external.remove(&key).and_then(|route| route.hop) {
                self.writer.remove(key.0, key.1);
                self.release(hop, now);
            }
            return true;
        }
        let is_same = route.hop.is_some() && route.spec() == before.as_ref();
        is_same || self.put_external(key, now)
    }

    /// Installs a route from another control plane, unless the configuration has one. Returns false without room.
    fn put_external(&mut self, key: (u16, NetworkPrefix), now: u32) -> bool {
        let Some(route) = self.external.get(&key).filter(|_| !self.installed.contains_key(&key)) else { return true };
        let (Some(spec), old) = (route.spec().cloned(), route.hop) else { return true };
        // The members that the old and the new group share keep their flows.
        let mut new = self.acquire_like(&spec, old, now);
        // The hops must be there before a route refers to them.
        self.publish();
        if let Some(hop) = new
            && self.writer.insert(key.0, key.1, hop).is_err()
        {
            self.release(hop, now);
            new = None;
        }
        if let Some(route) = self.external.get_mut(&key) {
            route.hop = new;
        }
        if let Some(old) = old {
            if new.is_none() {
                // The former routers must not get the packets any more.
                self.writer.remove(key.0, key.1);
            }
            self.release(old, now);
        }
        if new.is_some() {
            self.replace_learned(key, now);
        }
        new.is_some()
    }

    /// Brings the routers of the segments up to date.
    fn install_segments(&mut self, config: &GatewayConfig, places: &Places, vrfs: &[u16], mac: MacAddr) {
        let mut left: HashSet<u16> = self.segments.keys().copied().collect();
        self.tunnels.clear();
        for (segment, place) in config.segments.iter().zip(&places.segments) {
            let Some(router) = &segment.router else { continue };
            if segment.is_routed_tunnel() {
                self.tunnels.insert(place.index, segment.name.clone());
                continue;
            }
            left.remove(&place.index);
            let vrf = vrfs.get(router.vrf).copied().unwrap_or_default();
            let mac = router.mac.unwrap_or(mac);
            let known = self.segments.entry(place.index).or_insert_with(|| SegmentRouter {
                name: segment.name.clone(),
                vrf,
                neighbours: NextHops::new(
                    Addresses { mac, addresses: router.addresses.clone(), gateways: Vec::new() },
                    false,
                ),
            });
            known.vrf = vrf;
            known.name.clone_from(&segment.name);
            if known.neighbours.addresses().mac != mac {
                known.neighbours.set_mac(mac);
            }
            if known.neighbours.addresses().addresses != router.addresses {
                known.neighbours.set_addresses(router.addresses.clone(), Vec::new());
            }
        }
        for segment in left {
            if let Some(mut router) = self.segments.remove(&segment) {
                self.outbox.extend(
                    router
                        .neighbours
                        .drain_queues()
                        .map(|(packet, from)| (packet, RouterTag::Unreachable(from as u16))),
                );
            }
        }
    }

    /// Takes the Ethernet address of a segment's router, and announces it.
    pub(in crate::tunnel) fn set_mac(&mut self, segment: u16, mac: MacAddr) {
        if let Some(router) = self.segments.get_mut(&segment) {
            router.neighbours.set_mac(mac);
        }
    }

    /// Removes host routes of neighbours that are in no network of their segment any more.
    fn forget_lost_neighbours(&mut self, now: u32) {
        let segments = &self.segments;
        let is_lost = |&(vrf, ip): &(u16, IpAddr), &(segment, _): &(u16, u32)| {
            segments.get(&segment).is_none_or(|router| router.vrf != vrf || !is_neighbour(router, ip))
        };
        let lost: Vec<(u16, IpAddr)> =
            self.learned.iter().filter(|(key, value)| is_lost(key, value)).map(|(key, _)| *key).collect();
        for (vrf, ip) in lost {
            self.forget(vrf, ip, now);
        }
    }

    /// Removes the host route of a neighbour, and the neighbour if no route uses it.
    fn forget(&mut self, vrf: u16, ip: IpAddr, now: u32) {
        let Some(learned) = self.learned.remove(&(vrf, ip)) else { return };
        if let Some(prefix) = host_prefix(ip)
            && !self.installed.contains_key(&(vrf, prefix))
        {
            self.writer.remove(vrf, prefix);
        }
        self.release_neighbour(ip, learned, now);
    }

    /// Returns the hop of this meaning for one user more.
    fn acquire(&mut self, spec: &HopSpec, now: u32) -> Option<u32> {
        self.acquire_like(spec, None, now)
    }

    /// Returns the hop of this meaning for one user more. A new group begins with the buckets of the group `like`.
    fn acquire_like(&mut self, spec: &HopSpec, like: Option<u32>, now: u32) -> Option<u32> {
        if let Some(&index) = self.by_spec.get(spec) {
            if let Some(Some(state)) = self.states.get_mut(index as usize) {
                state.users += 1;
            }
            return Some(index);
        }
        let mut members = Vec::new();
        if let HopSpec::Group(specs) = spec {
            for (spec, weight) in specs {
                members.push(GroupMember { next_hop: self.acquire(spec, now)?, weight: *weight });
            }
        }
        let index = self.hop_indices.take(now)?;
        let hop = match spec {
            HopSpec::Fixed(fixed) => fixed.hop(),
            HopSpec::Neighbour(segment, ip) => {
                let known = self.segments.get(segment).and_then(|router| router.neighbours.mac(*ip));
                if known.is_none() {
                    self.unresolved.push_back((*segment, *ip));
                }
                known.map_or(Hop::Resolving(*segment, index), |mac| Hop::Neighbour(*segment, mac))
            }
            HopSpec::Group(_) => {
                let group = self.group_indices.take(now)?;
                let like = like.and_then(|like| self.group(like)).cloned();
                let new = || Arc::new(NextHopGroup::new(NextHopGroup::buckets_for(&members), &[]));
                put(&mut self.hops.groups, group as usize, like.unwrap_or_else(new));
                self.groups.insert(index);
                Hop::Group(group)
            }
        };
        if self.hops.list.len() <= index as usize {
            self.hops.list.resize(index as usize + 1, Hop::NotUnicast);
            self.states.resize_with(index as usize + 1, || None);
        }
        if let Some(place) = self.hops.list.get_mut(index as usize) {
            *place = hop;
        }
        if let Some(place) = self.states.get_mut(index as usize) {
            *place = Some(HopState { spec: spec.clone(), users: 1, members });
        }
        self.by_spec.insert(spec.clone(), index);
        self.dirty = true;
        self.update_group(index);
        Some(index)
    }

    /// Gives back a hop for one user.
    fn release(&mut self, index: u32, now: u32) {
        let Some(place) = self.states.get_mut(index as usize) else { return };
        let Some(state) = place else { return };
        state.users -= 1;
        if state.users > 0 {
            return;
        }
        let Some(state) = place.take() else { return };
        self.by_spec.remove(&state.spec);
        self.hop_indices.release(index, now);
        if let Some(Hop::Group(group)) = self.hops.list.get(index as usize) {
            self.group_indices.release(*group, now);
            self.groups.remove(&index);
        }
        for member in state.members {
            self.release(member.next_hop, now);
        }
        if let HopSpec::Neighbour(segment, ip) = state.spec {
            // Without a route, nothing needs its address.
            if let Some(router) = self.segments.get_mut(&segment) {
                router.neighbours.forget(ip);
            }
        }
    }

    /// Returns the group that is the hop with this index.
    fn group(&self, index: u32) -> Option<&Arc<NextHopGroup>> {
        let Some(Hop::Group(group)) = self.hops.list.get(index as usize) else { return None };
        self.hops.groups.get(*group as usize)
    }

    /// Gives a group its members that can be reached, or all if none can. The others keep their flows.
    fn update_group(&mut self, index: u32) {
        let Some(Hop::Group(group)) = self.hops.list.get(index as usize).copied() else { return };
        let Some(Some(state)) = self.states.get(index as usize) else { return };
        let is_usable = |member: &GroupMember| match self.hops.list.get(member.next_hop as usize) {
            Some(Hop::Unreachable(_)) => false,
            Some(Hop::Neighbour(segment, mac)) => !self.lost_routers.contains(&(*segment, *mac)),
            _ => true,
        };
        let mut members: Vec<GroupMember> = state.members.iter().copied().filter(is_usable).collect();
        if members.is_empty() {
            members.clone_from(&state.members);
        }
        if let Some(group) = self.hops.groups.get_mut(group as usize) {
            // The workers read the old one.
            let group = Arc::make_mut(group);
            group.refine(NextHopGroup::buckets_for(&state.members));
            group.set_members(&members);
        }
        self.dirty = true;
    }

    /// Sets the routers behind remotes that carry nothing: segment and Ethernet address. Groups do not use them.
    pub(in crate::tunnel) fn set_lost_routers(&mut self, lost: HashSet<(u16, MacAddr)>) {
        if std::mem::replace(&mut self.lost_routers, lost) != self.lost_routers {
            self.groups.clone().into_iter().for_each(|group| self.update_group(group));
            self.publish();
        }
    }

    /// Changes the effect of a neighbour's hop.
    fn set_neighbour(&mut self, segment: u16, ip: IpAddr, hop: impl Fn(u32) -> Hop) {
        let Some(&index) = self.by_spec.get(&HopSpec::Neighbour(segment, ip)) else { return };
        if let Some(place) = self.hops.list.get_mut(index as usize) {
            *place = hop(index);
            self.dirty = true;
        }
        let has_member = |state: &HopState| state.members.iter().any(|member| member.next_hop == index);
        let state = |group: u32| self.states.get(group as usize)?.as_ref();
        let groups: Vec<u32> = self.groups.iter().copied().filter(|it| state(*it).is_some_and(has_member)).collect();
        groups.into_iter().for_each(|group| self.update_group(group));
    }

    /// Sets the Ethernet address of a neighbour to which a route leads, without resolving it.
    pub(in crate::tunnel) fn set_address(&mut self, segment: u16, ip: IpAddr, mac: MacAddr) {
        self.set_neighbour(segment, ip, |_| Hop::Neighbour(segment, mac));
        self.publish();
    }

    /// Makes the workers see changed hops.
    fn publish(&mut self) {
        if std::mem::take(&mut self.dirty) {
            self.shared.replace(self.hops.clone());
        }
    }

    /// Processes a packet whose next hop is not resolved.
    pub(in crate::tunnel) fn resolve(&mut self, plane: &mut ControlPlane, mut packet: Packet) {
        let app = packet.app();
        packet.set_app([0; 2]);
        let Some(RouterTag::Route(from)) = RouterTag::unpack(app) else {
            return plane.drop(packet, DropReason::NoSegment);
        };
        let next = match Unresolved::unpack(app[1]) {
            Unresolved::Destination(segment) => destination(&packet).map(|ip| (segment, ip)),
            Unresolved::Hop(index) => match self.states.get(index as usize) {
                Some(Some(HopState { spec: HopSpec::Neighbour(segment, ip), .. })) => Some((*segment, *ip)),
                _ => None,
            },
        };
        let now = plane.now() / 1_000_000;
        let resolved = next.filter(|(segment, ip)| self.start(*segment, *ip, now, plane.seconds()));
        let Some((segment, ip)) = resolved else { return plane.drop(packet, DropReason::NoNeighbour) };
        if let Some(router) = self.segments.get_mut(&segment) {
            router.neighbours.enqueue(ip, (packet, from.into()));
        } else {
            return plane.drop(packet, DropReason::NoNeighbour);
        }
        self.run_actions(plane, segment);
        self.flush(plane);
    }

    /// Starts to resolve a neighbour and gives it a host route. Returns `false` if it is in no network of the segment,
    /// or there is no room.
    fn start(&mut self, segment: u16, ip: IpAddr, now: Millis, seconds: u32) -> bool {
        let Some(router) = self.segments.get_mut(&segment) else { return false };
        let vrf = router.vrf;
        let Some(prefix) = host_prefix(ip).filter(|_| is_neighbour(router, ip)) else { return false };
        let is_external = self.external.get(&(vrf, prefix)).is_some_and(|route| route.hop.is_some());
        if is_external && !self.by_spec.contains_key(&HopSpec::Neighbour(segment, ip)) {
            // A route to the host came from another control plane after the worker had looked.
            return false;
        }
        router.neighbours.resolve(ip, now);
        if router.neighbours.state(ip).is_none() {
            return false;
        }
        if is_external || self.learned.contains_key(&(vrf, ip)) || self.installed.contains_key(&(vrf, prefix)) {
            return true;
        }
        let spec = HopSpec::Neighbour(segment, ip);
        let Some(hop) = self.acquire(&spec, seconds) else { return false };
        self.publish();
        if self.writer.insert(vrf, prefix, hop).is_err() {
            self.release(hop, seconds);
            return false;
        }
        self.learned.insert((vrf, ip), (segment, hop));
        true
    }

    /// Processes an ARP or ND message for the router of a segment.
    pub(in crate::tunnel) fn handle_message(&mut self, plane: &mut ControlPlane, packet: Packet) {
        let Some(RouterTag::Route(segment)) = RouterTag::unpack(packet.app()) else {
            return plane.drop(packet, DropReason::NoSegment);
        };
        let Some(router) = self.segments.get_mut(&segment) else { return plane.drop(packet, DropReason::NoSegment) };
        if packet.len() > MAX_HOST_FRAME {
            return plane.drop(packet, DropReason::TooLong);
        }
        let mut frame = vec![0; packet.len()];
        packet.copy_to(&mut frame);
        let kind = if frame.get(12..14) == Some(&EtherType::ARP.0.to_be_bytes()) { "arp" } else { "nd" };
        let now = plane.now() / 1_000_000;
        let outcome = router.neighbours.handle(&frame, now);
        if let Some((address, mac)) = outcome.conflict
            && self.conflict_logged_at.is_none_or(|at| now >= at + CONFLICT_LOG_INTERVAL)
        {
            self.conflict_logged_at = Some(now);
            tracing::warn!(
                "{mac} uses {address} in segment {} too, which is an address of the router there; one of the two must \
                 change",
                router.name
            );
        }
        self.run_actions(plane, segment);
        match outcome.reply {
            HostReply::None => plane.consume(packet, kind),
            HostReply::Drop(reason) => plane.drop(packet, reason),
            HostReply::Frame(reply) => {
                plane.consume(packet, kind);
                self.send_frame(plane, segment, &reply);
            }
        }
        self.flush(plane);
    }

    /// Queues a frame of a router for its segment.
    fn send_frame(&mut self, plane: &mut ControlPlane, segment: u16, frame: &[u8]) {
        plane.count_generated();
        let packet = plane.pool(PortId::new(0)).and_then(|pool| {
            let mut packet = pool.take()?;
            packet.extend_from_slice(frame, pool).then_some(packet)
        });
        match packet {
            Some(packet) => self.outbox.push((packet, RouterTag::Send(segment))),
            None => plane.count_drops(DropReason::NoBuffer, 1),
        }
    }

    /// Carries out the actions of a segment's neighbours.
    fn run_actions(&mut self, plane: &mut ControlPlane, segment: u16) {
        let Some(router) = self.segments.get_mut(&segment) else { return };
        let now = plane.now() / 1_000_000;
        for action in router.neighbours.take_actions() {
            match action {
                NeighbourAction::Solicit(ip, to) => {
                    let frame =
                        self.segments.get(&segment).and_then(|it| it.neighbours.addresses().solicitation(ip, to));
                    if let Some(frame) = frame {
                        self.expected_replies.expect(ip);
                        self.send_frame(plane, segment, &frame);
                    }
                }
                NeighbourAction::Resolved(ip, mac) => self.set_neighbour(segment, ip, |_| Hop::Neighbour(segment, mac)),
                NeighbourAction::Unreachable(ip) => {
                    self.set_neighbour(segment, ip, |_| Hop::Unreachable(segment));
                    self.failed.push_back((now + FAILED_TIME, segment, ip));
                }
                // The links of a segment's members do not matter here: other members may lead to the neighbour.
                NeighbourAction::Hold(_) | NeighbourAction::Release(_) => {}
                NeighbourAction::Send(_, (packet, from)) => self.outbox.push((packet, RouterTag::Route(from as u16))),
                NeighbourAction::Drop((packet, from)) => {
                    self.outbox.push((packet, RouterTag::Unreachable(from as u16)));
                }
            }
        }
    }

    /// Publishes changed hops and hands the queued packets to workers.
    fn flush(&mut self, plane: &mut ControlPlane) {
        self.publish();
        let workers = plane.worker_infos().count().max(1);
        for (mut packet, tag) in self.outbox.drain(..) {
            let segment = match tag {
                RouterTag::Route(segment) | RouterTag::Unreachable(segment) | RouterTag::Send(segment) => segment,
            };
            packet.set_in_port(None);
            packet.set_app(tag.pack());
            plane.enqueue_to_worker(usize::from(segment) % workers, packet);
        }
    }

    /// Advances all timers.
    pub(in crate::tunnel) fn tick(&mut self, plane: &mut ControlPlane) {
        let (now, seconds) = (plane.now() / 1_000_000, plane.seconds());
        for _ in 0..128 {
            let Some((segment, ip)) = self.unresolved.pop_front() else { break };
            if self.by_spec.contains_key(&HopSpec::Neighbour(segment, ip))
                && let Some(router) = self.segments.get_mut(&segment)
            {
                router.neighbours.resolve(ip, now);
            }
        }
        let segments: Vec<u16> = self.segments.keys().copied().collect();
        for segment in segments {
            let Some(router) = self.segments.get_mut(&segment) else { continue };
            router.neighbours.tick(now);
            let frames = router.neighbours.announcements(now);
            self.run_actions(plane, segment);
            for frame in frames {
                self.send_frame(plane, segment, &frame);
            }
        }
        while let Some((_, segment, ip)) = self.failed.pop_front_if(|(until, ..)| *until <= now) {
            let Some(router) = self.segments.get(&segment) else { continue };
            // It may have been forgotten and be asked anew, with its whole time to answer.
            if router.neighbours.has_failed(ip) {
                let vrf = router.vrf;
                self.forget(vrf, ip, seconds);
                self.run_actions(plane, segment);
            }
        }
        self.flush(plane);
    }

    /// Number of packets that wait for a neighbour.
    pub(in crate::tunnel) fn waiting(&self) -> usize {
        self.segments.values().map(|router| router.neighbours.waiting()).sum()
    }

    /// Removes and returns all packets that wait.
    pub(in crate::tunnel) fn drain_queues(&mut self) -> Vec<Packet> {
        self.segments
            .values_mut()
            .flat_map(|router| router.neighbours.drain_queues())
            .map(|(packet, _)| packet)
            .collect()
    }

    /// Returns the neighbours of all segments: name of the segment, address, state and Ethernet address.
    pub(in crate::tunnel) fn neighbours(&self) -> Vec<(String, IpAddr, NeighbourState, Option<MacAddr>)> {
        let of = |router: &SegmentRouter| -> Vec<_> {
            router.neighbours.list().into_iter().map(|(ip, state, mac)| (router.name.clone(), ip, state, mac)).collect()
        };
        self.segments.values().flat_map(of).collect()
    }

    /// Number of routes.
    pub(in crate::tunnel) fn len(&self) -> usize {
        let count = |vrf| {
            let (v4, v6) = self.writer.route_count(vrf);
            v4 + v6
        };
        self.writer.vrfs().map(count).sum()
    }

    /// Returns the name of each VRF by its number.
    pub(in crate::tunnel) fn vrf_names(&self) -> HashMap<u16, &str> {
        self.vrfs.iter().map(|(name, number)| (*number, name.as_str())).collect()
    }

    /// Iterates over the routes after a position, or over all, by name of the VRF and prefix.
    pub(in crate::tunnel) fn positions_after(
        &self,
        after: Option<(String, NetworkPrefix)>,
    ) -> impl Iterator<Item = RoutePosition> {
        let from = after.as_ref().map(|(vrf, _)| vrf.as_str()).unwrap_or_default();
        let mut vrfs: Vec<(&str, u16)> = self.vrfs.iter().map(|(name, number)| (name.as_str(), *number)).collect();
        vrfs.retain(|(name, _)| *name >= from);
        vrfs.sort_unstable();
        vrfs.into_iter().flat_map(move |(name, vrf)| {
            let after = after.as_ref().filter(|(of, _)| of == name).map(|(_, prefix)| *prefix);
            self.writer.iter_after(vrf, after).map(move |(to, hop)| RoutePosition { vrf, to, hop })
        })
    }

    /// Describes a route. `names` are those of [`Self::vrf_names`].
    pub(in crate::tunnel) fn row(&self, position: RoutePosition, names: &HashMap<u16, &str>) -> RouteRow {
        let RoutePosition { vrf, to, hop } = position;
        let state = match self.hops.list.get(hop as usize) {
            Some(Hop::Resolving(..)) => "resolving",
            Some(Hop::Unreachable(_)) => "unreachable",
            Some(_) => "ready",
            None => "missing",
        };
        let spec = self.states.get(hop as usize).and_then(|it| it.as_ref()).map(|it| &it.spec);
        let origin = match spec {
            Some(HopSpec::Fixed(FixedHop::Connected(_) | FixedHop::NotUnicast)) => "connected",
            Some(HopSpec::Fixed(FixedHop::Local)) => "local",
            _ if self.installed.contains_key(&(vrf, to)) => "configured",
            _ if self.external.contains_key(&(vrf, to)) => "kernel",
            _ => "neighbour",
        };
        RouteRow {
            vrf: names.get(&vrf).map(|name| (*name).to_owned()).unwrap_or_default(),
            to: to.to_string(),
            origin,
            via: spec.map_or(String::new(), |spec| self.describe(spec, names)),
            state,
        }
    }

    /// Describes a hop for listings.
    fn describe(&self, spec: &HopSpec, vrfs: &HashMap<u16, &str>) -> String {
        let segment = |segment: &u16| self.segments.get(segment).map_or("?", |router| router.name.as_str()).to_owned();
        match spec {
            HopSpec::Fixed(FixedHop::Router(at, _)) if self.tunnels.contains_key(at) => {
                format!("tunnel {}", self.tunnels.get(at).map_or("?", String::as_str))
            }
            HopSpec::Fixed(FixedHop::Local) => "local".to_owned(),
            HopSpec::Fixed(FixedHop::Connected(at)) => format!("segment {}", segment(at)),
            HopSpec::Fixed(FixedHop::Router(at, mac)) => format!("{mac} in segment {}", segment(at)),
            HopSpec::Fixed(FixedHop::Vrf(vrf)) => format!("vrf {}", vrfs.get(vrf).copied().unwrap_or("?")),
            HopSpec::Fixed(FixedHop::Discard(discard)) => format!("{discard:?}").to_lowercase(),
            HopSpec::Fixed(FixedHop::NotUnicast) => "not routed".to_owned(),
            HopSpec::Neighbour(at, ip) => format!("{ip} in segment {}", segment(at)),
            HopSpec::Group(members) => {
                let member = |(spec, weight): &(HopSpec, u16)| format!("{} weight {weight}", self.describe(spec, vrfs));
                members.iter().map(member).collect::<Vec<_>>().join(", ")
            }
        }
    }
}

/// Returns whether an address can be that of a neighbour: another host of a network of the segment.
fn is_neighbour(router: &SegmentRouter, ip: IpAddr) -> bool {
    let addresses = &router.neighbours.addresses().addresses;
    let has = |prefix: &Prefix| prefix.contains(ip) && prefix.address != ip && !prefix.is_reserved(ip);
    addresses.iter().any(has) && addresses.iter().all(|prefix| prefix.address != ip)
}

/// Returns the meaning of routes to these routers in a segment; `None` without routers.
fn routers_spec(segment: u16, routers: &[MacAddr]) -> Option<HopSpec> {
    let router = |mac: &MacAddr| HopSpec::Fixed(FixedHop::Router(segment, *mac));
    match routers {
        [] => None,
        [only] => Some(router(only)),
        many => Some(HopSpec::Group(many.iter().take(MAX_NEXT_HOPS).map(|mac| (router(mac), 1)).collect())),
    }
}

/// Returns the prefix of a single address.
fn host_prefix(ip: IpAddr) -> Option<NetworkPrefix> {
    NetworkPrefix::new(ip, if ip.is_ipv4() { 32 } else { 128 })
}

/// Returns the destination of an IP packet in an Ethernet frame.
fn destination(packet: &Packet) -> Option<IpAddr> {
    let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
    let frame = packet.data();
    let layers = parser.parse_stack(frame, 0, packet.len()).ok()?;
    layers.ip_addresses(frame).map(|(_, destination)| destination)
}

/// Returns the routes of a configuration.
fn desired_routes(config: &GatewayConfig, places: &Places, vrfs: &[u16]) -> HashMap<(u16, NetworkPrefix), HopSpec> {
    let mut routes = HashMap::new();
    let number = |vrf: usize| vrfs.get(vrf).copied().unwrap_or_default();
    let routers = config.segments.iter().zip(&places.segments);
    let routers = routers.filter_map(|(it, place)| Some((it.router.as_ref()?, place.index, it.is_routed_tunnel())));
    for (router, segment, is_tunnel) in routers {
        let vrf = number(router.vrf);
        // All other hosts of the network are behind the tunnel.
        let hosts = if is_tunnel { FixedHop::Router(segment, TUNNEL_PEER) } else { FixedHop::Connected(segment) };
        for prefix in &router.addresses {
            if let Some(host) = host_prefix(prefix.address) {
                routes.insert((vrf, host), HopSpec::Fixed(FixedHop::Local));
            }
            let Some(network) = NetworkPrefix::new(prefix.address, prefix.len) else { continue };
            routes.entry((vrf, network)).or_insert(HopSpec::Fixed(hosts));
            if let (IpAddr::V4(ip), true) = (network.address(), prefix.len < 31) {
                let broadcast = ip.to_bits() | u32::MAX.checked_shr(prefix.len.into()).unwrap_or(0);
                for reserved in [ip, broadcast.into()] {
                    if let Some(host) = host_prefix(reserved.into()) {
                        routes.entry((vrf, host)).or_insert(HopSpec::Fixed(FixedHop::NotUnicast));
                    }
                }
            }
        }
    }
    for route in &config.routing.routes {
        let hop = |hop: &HopConfig| match *hop {
            HopConfig::Neighbour { segment, address } => {
                places.segments.get(segment).map(|place| HopSpec::Neighbour(place.index, address))
            }
            HopConfig::Router { segment, mac, .. } => {
                places.segments.get(segment).map(|place| HopSpec::Fixed(FixedHop::Router(place.index, mac)))
            }
        };
        let spec = match &route.target {
            RouteTarget::NextHops(hops) => match hops.as_slice() {
                [(only, _)] => hop(only),
                many => {
                    Some(HopSpec::Group(many.iter().filter_map(|(it, weight)| Some((hop(it)?, *weight))).collect()))
                }
            },
            RouteTarget::Lookup(vrf) => Some(HopSpec::Fixed(FixedHop::Vrf(number(*vrf)))),
            RouteTarget::Discard(discard) => Some(HopSpec::Fixed(FixedHop::Discard(*discard))),
        };
        if let Some(spec) = spec {
            routes.entry((number(route.vrf), route.to)).or_insert(spec);
        }
    }
    routes
}

/// Stores a group at an index, which may be one behind the last.
fn put(groups: &mut Vec<Arc<NextHopGroup>>, index: usize, group: Arc<NextHopGroup>) {
    match groups.get_mut(index) {
        Some(old) => *old = group,
        None => groups.resize(index + 1, group),
    }
}
