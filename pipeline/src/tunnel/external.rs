//! Remotes, addresses, bindings and routes of segments from another control plane. It is, for example, a routing daemon
//! that writes the kernel's tables.
//!
//! The remotes of a segment are those of its flood list and those that an address is behind. They are merged into the
//! configuration, so they have next hops, BFD sessions and counters like configured remotes. An address is in the
//! forwarding database as soon as its remote is.
//!
//! An address may also be behind a group of VTEPs, which share its flows (multihoming, RFC 7432 section 8.4). A change
//! of the members changes the group, and no address behind it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use wirepath_wire::MacAddr;

use super::bindings::BindingOrigin;
use super::config::{GatewayConfig, MAX_REMOTES, RemoteConfig, SegmentConfig, SegmentControl};
use super::control::GatewayControl;
use super::groups::{Candidate, ExternalGroup, Groups, RemoteGroups};
use super::suppression::is_local_host;
use super::tables::Destination;
use super::underlay::{Prefix, is_host_address};
use crate::PortInfo;
use crate::route::NetworkPrefix;
use crate::table::Key;

/// A change of the remotes takes at most this share of the control thread's time: one part in this number.
const TIME_SHARE: u32 = 10;
/// Time after which a change of the remotes that was refused is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Where an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExternalPlace {
    /// Behind a VTEP.
    Vtep(IpAddr),
    /// Behind a group of VTEPs, by its number.
    Group(u32),
}

/// Changes of segments, by VNI, and of groups. A later change of the same item replaces an earlier one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExternalChanges {
    /// VTEPs that join (true) and leave the flood list.
    pub flood: HashMap<(u32, IpAddr), bool>,
    /// Members of groups, by number; empty: none any more.
    pub groups: HashMap<u32, ExternalGroup>,
    /// Places of addresses; `None`: behind no VTEP any more.
    pub macs: HashMap<(u32, MacAddr), Option<ExternalPlace>>,
    /// Ethernet address and router flag of IP addresses; `None`: not known any more.
    pub bindings: HashMap<(u32, IpAddr), Option<(MacAddr, bool)>>,
    /// Ethernet addresses of the routers behind VTEPs to which the routes of the segment's VRF lead; empty: there is no
    /// route any more.
    pub routes: HashMap<(u32, NetworkPrefix), Vec<MacAddr>>,
}

impl ExternalChanges {
    /// Returns whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of changes.
    pub fn len(&self) -> usize {
        self.flood.len() + self.groups.len() + self.macs.len() + self.bindings.len() + self.routes.len()
    }

    /// Adds later changes.
    pub fn merge(&mut self, later: Self) {
        self.flood.extend(later.flood);
        self.groups.extend(later.groups);
        self.macs.extend(later.macs);
        self.bindings.extend(later.bindings);
        self.routes.extend(later.routes);
    }

    /// Removes the changes of VNIs for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(u32) -> bool) {
        self.flood.retain(|(vni, _), _| keep(*vni));
        self.macs.retain(|(vni, _), _| keep(*vni));
        self.bindings.retain(|(vni, _), _| keep(*vni));
        self.routes.retain(|(vni, _), _| keep(*vni));
    }

    /// Removes and returns at most `limit` changes. Those of flood lists and of groups come first.
    pub fn take(&mut self, limit: usize) -> Self {
        if self.len() <= limit {
            return std::mem::take(self);
        }
        let mut taken = Self { flood: take(&mut self.flood, limit), ..Self::default() };
        let (gone, mut groups) = std::mem::take(&mut self.groups).into_iter().partition(|(_, it)| it.is_empty());
        taken.groups = take(&mut groups, limit - taken.len());
        self.groups = groups;
        taken.macs = take(&mut self.macs, limit - taken.len());
        // Groups go behind the addresses that leave them.
        self.groups.extend::<HashMap<u32, ExternalGroup>>(gone);
        if self.macs.is_empty() && taken.groups.is_empty() {
            taken.groups = take(&mut self.groups, limit - taken.len());
        }
        taken.bindings = take(&mut self.bindings, limit - taken.len());
        taken.routes = take(&mut self.routes, limit - taken.len());
        taken
    }
}

/// Removes and returns at most `limit` entries of a map.
fn take<K: Copy + Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>, limit: usize) -> HashMap<K, V> {
    if map.len() <= limit {
        return std::mem::take(map);
    }
    let keys: Vec<K> = map.keys().take(limit).copied().collect();
    keys.into_iter().filter_map(|key| map.remove_entry(&key)).collect()
}

/// A host address of a local port that appeared or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAddress {
    /// VNI of the segment.
    pub vni: u32,
    /// Ethernet address.
    pub mac: MacAddr,
    /// True if the address is behind a local port.
    pub present: bool,
}

/// An IP address of a host in a segment that appeared, moved to another Ethernet address, or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalBinding {
    /// VNI of the segment.
    pub vni: u32,
    /// IP address.
    pub ip: IpAddr,
    /// Ethernet address and router flag; `None`: not known any more, or known from the other control plane.
    pub host: Option<(MacAddr, bool)>,
}

/// Figures of the entries from another control plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExternalStats {
    /// VTEPs of all segments.
    pub remotes: usize,
    /// Addresses behind VTEPs.
    pub macs: usize,
    /// Groups of VTEPs in all segments with an address behind them.
    pub groups: usize,
    /// IP addresses.
    pub bindings: usize,
    /// Routes to routers behind VTEPs.
    pub routes: usize,
    /// Groups that found no room. Packets to their addresses are flooded.
    pub refused_groups: usize,
    /// Addresses that found no room, or have a static entry.
    pub refused_macs: u64,
    /// Routes that found no room.
    pub refused_routes: u64,
    /// Times that a change of the remotes was refused and tried again later.
    pub refused_changes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct ExternalRemote {
    flood: bool,
    /// Number of addresses behind it, and of groups with addresses that it belongs to.
    users: u32,
}

#[derive(Debug, Default)]
struct ExternalSegment {
    remotes: BTreeMap<IpAddr, ExternalRemote>,
    macs: HashMap<MacAddr, ExternalPlace>,
    /// Number of addresses behind each group.
    groups: HashMap<u32, usize>,
    bindings: HashMap<IpAddr, (MacAddr, bool)>,
    routes: HashMap<NetworkPrefix, Vec<MacAddr>>,
}

impl ExternalSegment {
    /// Sets whether a VTEP is in the flood list. Returns whether the remotes change.
    fn set_flood(&mut self, vtep: IpAddr, flood: bool) -> bool {
        if !flood && !self.remotes.contains_key(&vtep) {
            return false;
        }
        let remote = self.remotes.entry(vtep).or_default();
        let changed = remote.flood != flood;
        remote.flood = flood;
        self.remove_unused(vtep);
        changed
    }

    /// Sets the place of an address in the segment with this VNI. Returns whether the remotes change.
    fn set_mac(&mut self, vni: u32, mac: MacAddr, place: Option<ExternalPlace>, groups: &mut Groups) -> bool {
        let old = match place {
            Some(place) => self.macs.insert(mac, place),
            None => self.macs.remove(&mac),
        };
        if old == place {
            return false;
        }
        let mut changed = false;
        match place {
            Some(ExternalPlace::Vtep(vtep)) => changed |= self.set_users(&[], &[(vtep, 1)]),
            Some(ExternalPlace::Group(id)) => {
                let addresses = self.groups.entry(id).or_default();
                *addresses += 1;
                if *addresses == 1 {
                    changed |= self.set_users(&[], groups.members(id));
                    groups.mark(vni, id);
                }
            }
            None => {}
        }
        match old {
            Some(ExternalPlace::Vtep(vtep)) => changed |= self.set_users(&[(vtep, 1)], &[]),
            Some(ExternalPlace::Group(id)) => {
                let left = self.groups.get_mut(&id).map_or(0, |addresses| {
                    *addresses -= 1;
                    *addresses
                });
                if left == 0 && self.groups.remove(&id).is_some() {
                    changed |= self.set_users(groups.members(id), &[]);
                    groups.mark(vni, id);
                }
            }
            None => {}
        }
        changed
    }

    /// Replaces VTEPs that an address or a group uses. Returns whether the remotes change.
    fn set_users(&mut self, old: &[(IpAddr, u16)], new: &[(IpAddr, u16)]) -> bool {
        let before = self.remotes.len();
        for (vtep, _) in new {
            self.remotes.entry(*vtep).or_default().users += 1;
        }
        let mut changed = self.remotes.len() != before;
        for (vtep, _) in old {
            if let Some(remote) = self.remotes.get_mut(vtep) {
                remote.users = remote.users.saturating_sub(1);
            }
            changed |= self.remove_unused(*vtep);
        }
        changed
    }

    fn remove_unused(&mut self, vtep: IpAddr) -> bool {
        let unused = self.remotes.get(&vtep).is_some_and(|remote| !remote.flood && remote.users == 0);
        unused && self.remotes.remove(&vtep).is_some()
    }
}

/// State of all segments whose remotes come from another control plane.
#[derive(Debug, Default)]
pub(super) struct External {
    segments: HashMap<u32, ExternalSegment>,
    /// VNIs whose remotes changed and are not in force yet.
    changed: HashSet<u32>,
    /// Time from which on the remotes may change.
    next_change: Option<Instant>,
    /// Index of each remote.
    indices: HashMap<(u32, IpAddr), u32>,
    groups: Groups,
    refused_macs: u64,
    refused_routes: u64,
    refused_changes: u64,
}

impl External {
    /// Returns the groups of remotes for the workers.
    pub(super) fn groups(&self) -> &RemoteGroups {
        self.groups.published()
    }

    /// Sets the members of a group.
    fn set_group(&mut self, id: u32, members: ExternalGroup) {
        let Self { groups, segments, changed, .. } = self;
        let old = groups.set_members(id, members);
        for (vni, segment) in segments.iter_mut().filter(|(_, segment)| segment.groups.contains_key(&id)) {
            groups.mark(*vni, id);
            if segment.set_users(&old, groups.members(id)) {
                changed.insert(*vni);
            }
        }
    }

    /// Returns the remotes of a segment. `networks` are the gateway's addresses with their networks.
    fn remotes(&self, networks: &[Prefix], segment: &SegmentConfig) -> Vec<RemoteConfig> {
        let Some(external) = segment.vni.and_then(|vni| self.segments.get(&vni)) else { return Vec::new() };
        let of = |(address, remote): (&IpAddr, &ExternalRemote)| {
            let local = segment.locals.iter().copied().find(|local| local.is_ipv4() == address.is_ipv4())?;
            let possible = is_host_address(*address)
                && !networks.iter().any(|network| network.address == *address || network.is_reserved(*address));
            possible.then_some(RemoteConfig { address: *address, local, flood: remote.flood })
        };
        external.remotes.iter().filter_map(of).collect()
    }

    /// Returns whether changes of remotes wait.
    pub(super) fn has_changes(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Adds the remotes to a configuration.
    pub(super) fn complete(&self, config: &mut GatewayConfig) {
        let is_of_kernel = |segment: &SegmentConfig| segment.control == SegmentControl::Kernel;
        let configured = config.segments.iter().filter(|segment| !is_of_kernel(segment));
        let mut room = MAX_REMOTES.saturating_sub(configured.map(|segment| segment.remotes.len()).sum());
        let GatewayConfig { underlay, segments, .. } = config;
        for segment in segments.iter_mut().filter(|segment| is_of_kernel(segment)) {
            segment.remotes = self.remotes(&underlay.addresses, segment);
            segment.remotes.truncate(room);
            room -= segment.remotes.len();
        }
    }
}

impl GatewayControl {
    /// Takes changes from another control plane. Those of segments without `control = "kernel"` are ignored.
    pub fn apply_external(&mut self, changes: ExternalChanges, ports: &[PortInfo], seconds: u32) {
        for ((vni, vtep), flood) in changes.flood {
            let Some(segment) = self.external.segments.get_mut(&vni) else { continue };
            if segment.set_flood(vtep, flood) {
                self.external.changed.insert(vni);
            }
        }
        let (gone, groups): (Vec<_>, Vec<_>) = changes.groups.into_iter().partition(|(_, it)| it.is_empty());
        for (id, members) in groups {
            self.external.set_group(id, members);
        }
        let mut macs = Vec::with_capacity(changes.macs.len());
        for ((vni, mac), place) in changes.macs {
            let External { segments, groups, changed, .. } = &mut self.external;
            let Some(segment) = segments.get_mut(&vni) else { continue };
            if segment.set_mac(vni, mac, place, groups) {
                changed.insert(vni);
            }
            macs.push((vni, mac));
        }
        for ((vni, ip), host) in changes.bindings {
            let Some(segment) = self.external.segments.get_mut(&vni) else { continue };
            match host {
                Some(host) => _ = segment.bindings.insert(ip, host),
                None => _ = segment.bindings.remove(&ip),
            }
            self.place_binding(vni, ip, host);
        }
        // The next tick may be some time away, and requests for known addresses would be flooded until then.
        self.publish_bindings();
        // Flows leave a VTEP before it is no remote any more.
        self.update_external_groups();
        self.update_external_remotes(ports, seconds);
        self.update_external_groups();
        for (vni, mac) in macs {
            self.place_external(vni, mac, seconds);
        }
        // Addresses leave a group before it goes.
        if !gone.is_empty() {
            gone.into_iter().for_each(|(id, members)| self.external.set_group(id, members));
            self.update_external_groups();
            self.update_external_remotes(ports, seconds);
        }
        for ((vni, to), routers) in changes.routes {
            let Some(segment) = self.external.segments.get_mut(&vni) else { continue };
            match routers.is_empty() {
                true => _ = segment.routes.remove(&to),
                false => _ = segment.routes.insert(to, routers.clone()),
            }
            self.place_routes(vni, [(to, routers)], seconds);
        }
        // Routes may lead to routers behind remotes that BFD keeps out.
        self.update_lost_routers();
    }

    /// Puts changed remotes in force, unless the last change was too short ago. Call this in each tick.
    pub fn update_external_remotes(&mut self, ports: &[PortInfo], seconds: u32) {
        if self.external.groups.refused() > 0 {
            // Other groups may have gone.
            self.update_external_groups();
        }
        if self.external.changed.is_empty() || self.external.next_change.is_some_and(|next| Instant::now() < next) {
            return;
        }
        let begin = Instant::now();
        let change = match self.prepare(self.config.clone(), seconds) {
            Ok(change) => change,
            Err(why) => {
                self.external.refused_changes += 1;
                self.external.next_change = Some(begin + RETRY);
                tracing::warn!("remotes of the kernel's tables cannot change yet: {why}");
                return;
            }
        };
        let changed = std::mem::take(&mut self.external.changed);
        self.install_change(change, ports, seconds);
        self.update_external_groups();
        for vni in changed {
            self.place_segment(vni, seconds);
        }
        // Groups with a router behind them may have members now.
        self.update_lost_routers();
        self.external.next_change = Some(Instant::now() + begin.elapsed() * TIME_SHARE);
    }

    /// Brings all groups of remotes up to date, after a change of the remotes that take frames.
    pub(super) fn refresh_external_groups(&mut self) {
        self.external.groups.mark_all();
        self.update_external_groups();
    }

    /// Brings the groups of remotes up to date for the workers. Members without a remote, or whose remote BFD keeps
    /// out, have no share.
    pub(super) fn update_external_groups(&mut self) {
        let Self { external: External { segments, indices, groups, changed, .. }, bfd, aged_at: seconds, .. } = self;
        let seconds = *seconds;
        let is_used = |vni, id: u32| segments.get(&vni).is_some_and(|segment| segment.groups.contains_key(&id));
        let remote = |vni, vtep| {
            let index = indices.get(&(vni, vtep)).copied()?;
            Some(Candidate { index, is_lost: bfd.is_lost(index) })
        };
        let updated = groups.update(seconds, is_used, |vni| changed.contains(&vni), remote);
        if updated.shares {
            self.tables.groups.replace(groups.published().clone());
        }
        for vni in updated.found_room {
            self.place_segment(vni, seconds);
        }
    }

    /// Adapts the state to the segments of a new configuration.
    pub(super) fn install_external(&mut self) {
        let Self { external, config, places, .. } = self;
        let kernel = || {
            let all = config.segments.iter().zip(&places.segments);
            all.filter(|(segment, _)| segment.control == SegmentControl::Kernel)
        };
        let vnis: HashSet<u32> = kernel().filter_map(|(segment, _)| segment.vni).collect();
        let before = external.segments.len();
        external.segments.retain(|vni, _| vnis.contains(vni));
        external.changed.retain(|vni| vnis.contains(vni));
        let lost_some = external.segments.len() != before;
        for vni in &vnis {
            external.segments.entry(*vni).or_default();
        }
        external.indices = kernel()
            .filter_map(|(segment, place)| Some((segment.vni?, segment, place)))
            .flat_map(|(vni, segment, place)| {
                let remotes = segment.remotes.iter().zip(&place.remotes);
                remotes.map(move |(remote, index)| ((vni, remote.address), *index))
            })
            .collect();
        external.groups.mark_all();
        let watched: HashSet<u16> = kernel().map(|(_, place)| place.index).collect();
        if lost_some {
            self.fdb.remove_all(|entry| entry.external && !watched.contains(&entry.key.segment()));
        }
        self.bindings.watch(watched.clone());
        self.fdb.watch(watched);
    }

    /// Puts the addresses and bindings of all segments in force again, after a change by an operator.
    pub(super) fn place_all_external(&mut self, seconds: u32) {
        let vnis: Vec<u32> = self.external.segments.keys().copied().collect();
        let valid: HashSet<u16> = vnis.iter().filter_map(|vni| self.index_of_vni(*vni)).collect();
        self.router.retain_external(|segment| valid.contains(&segment), seconds);
        self.update_external_groups();
        for vni in vnis {
            self.place_segment(vni, seconds);
            let routes = self.external.segments.get(&vni).map(|segment| segment.routes.clone());
            self.place_routes(vni, routes.into_iter().flatten(), seconds);
            let bindings = self.external.segments.get(&vni).map(|segment| segment.bindings.clone());
            for (ip, host) in bindings.into_iter().flatten() {
                self.place_binding(vni, ip, Some(host));
            }
        }
    }

    fn place_segment(&mut self, vni: u32, seconds: u32) {
        let macs = self.external.segments.get(&vni).map(|segment| segment.macs.keys().copied().collect::<Vec<_>>());
        for mac in macs.into_iter().flatten() {
            self.place_external(vni, mac, seconds);
        }
    }

    /// Brings the forwarding entry of an address up to date.
    fn place_external(&mut self, vni: u32, mac: MacAddr, seconds: u32) {
        let Some(index) = self.index_of_vni(vni) else { return };
        let key = Key::new(index, mac);
        let External { segments, indices, groups, changed, .. } = &self.external;
        let place = segments.get(&vni).and_then(|segment| segment.macs.get(&mac));
        let destination = place.and_then(|place| match place {
            ExternalPlace::Vtep(vtep) => indices.get(&(vni, *vtep)).map(|index| Destination::Remote(*index)),
            ExternalPlace::Group(id) => {
                // Like an address behind a VTEP, one behind a group has to wait for a remote.
                let members = groups.members(*id);
                let has_remote = members.iter().any(|(vtep, _)| indices.contains_key(&(vni, *vtep)));
                let has_to_wait = !has_remote && !members.is_empty() && changed.contains(&vni);
                let index = groups.index(vni, *id).filter(|_| !has_to_wait);
                index.map(Destination::Group)
            }
        });
        let Some(destination) = destination else {
            // An address that moved to a local port has an entry that is not external.
            if self.fdb.get(key).is_some_and(|entry| entry.external) {
                self.fdb.remove(key);
            }
            return;
        };
        if !self.fdb.insert_external(key, destination.pack(), seconds) {
            self.external.refused_macs += 1;
        }
    }

    /// Brings routes to routers of a segment up to date.
    fn place_routes(
        &mut self,
        vni: u32,
        routes: impl IntoIterator<Item = (NetworkPrefix, Vec<MacAddr>)>,
        seconds: u32,
    ) {
        if let Some(index) = self.index_of_vni(vni) {
            self.external.refused_routes += self.router.set_external(index, routes, seconds);
        }
    }

    fn place_binding(&mut self, vni: u32, ip: IpAddr, host: Option<(MacAddr, bool)>) {
        let Some(index) = self.index_of_vni(vni) else { return };
        let suppresses = self.segment_config(index).is_some_and(|segment| segment.suppression.enabled);
        match host {
            Some((mac, is_router)) if suppresses => {
                self.bindings.set(index, ip, mac, is_router, BindingOrigin::External);
            }
            Some(_) => {}
            None => self.bindings.remove(index, ip, BindingOrigin::External),
        }
    }

    /// Returns the addresses behind remotes that BFD keeps out, in segments with routes to routers.
    pub(super) fn lost_external_routers(&self) -> Vec<(u16, MacAddr)> {
        let Self { external, bfd, .. } = self;
        let is_lost = |vni: u32, place: &ExternalPlace| match place {
            ExternalPlace::Vtep(vtep) => external.indices.get(&(vni, *vtep)).is_some_and(|it| bfd.is_lost(*it)),
            ExternalPlace::Group(id) => {
                let index = external.groups.index(vni, *id);
                index.is_some_and(|index| external.groups().members(index).is_empty())
            }
        };
        let mut lost = Vec::new();
        for (vni, segment) in external.segments.iter().filter(|(_, segment)| !segment.routes.is_empty()) {
            let Some(index) = self.index_of_vni(*vni) else { continue };
            lost.extend(segment.macs.iter().filter(|(_, place)| is_lost(*vni, place)).map(|(mac, _)| (index, *mac)));
        }
        lost
    }

    /// Returns the index of the segment with this VNI whose remotes come from the kernel.
    fn index_of_vni(&self, vni: u32) -> Option<u16> {
        let id = super::outer::TunnelId { kind: super::kinds::vxlan::KIND.number(), id: Some(vni), sid: None };
        let index = self.layout.segment_of(id)?;
        self.segment_config(index).is_some_and(|it| it.control == SegmentControl::Kernel).then_some(index)
    }

    /// Returns at most `limit` addresses of segments with `control = "kernel"` that appeared at a local port, or went
    /// from there, since the last call. An address may be as it was.
    pub fn take_local_changes(&mut self, limit: usize) -> Vec<LocalAddress> {
        let changed = self.fdb.take_changed(limit);
        let change = |key: Key| {
            let vni = self.segment_config(key.segment())?.vni?;
            Some(LocalAddress { vni, mac: key.mac(), present: is_local_host(&mut self.fdb, key) })
        };
        changed.into_iter().filter_map(change).collect()
    }

    /// Returns at most `limit` IP addresses of segments with `control = "kernel"` whose host changed since the last
    /// call. A binding may be as it was, and its host may be behind a remote.
    pub fn take_local_bindings(&mut self, limit: usize) -> Vec<LocalBinding> {
        let mut changes = Vec::new();
        for (index, ip) in self.bindings.take_watched(limit) {
            let Some(vni) = self.segment_config(index).and_then(|segment| segment.vni) else { continue };
            let host = match self.bindings.get(index, ip) {
                Some(known) if known.origin == BindingOrigin::External => None,
                Some(known) => Some((known.mac, known.is_router == Some(true))),
                None => {
                    // A local host had taken the address and left it again.
                    let external = self.external.segments.get(&vni).and_then(|it| it.bindings.get(&ip)).copied();
                    if external.is_some() {
                        self.place_binding(vni, ip, external);
                    }
                    None
                }
            };
            changes.push(LocalBinding { vni, ip, host });
        }
        changes
    }

    /// Returns the figures of the entries from another control plane.
    pub fn external_stats(&self) -> ExternalStats {
        let External { segments, groups, refused_macs, refused_routes, refused_changes, .. } = &self.external;
        ExternalStats {
            remotes: segments.values().map(|segment| segment.remotes.len()).sum(),
            macs: self.fdb.externals(),
            groups: segments.values().map(|segment| segment.groups.len()).sum(),
            bindings: segments.values().map(|segment| segment.bindings.len()).sum(),
            routes: segments.values().map(|segment| segment.routes.len()).sum(),
            refused_macs: *refused_macs,
            refused_groups: groups.refused(),
            refused_routes: *refused_routes,
            refused_changes: *refused_changes,
        }
    }

    /// Returns the numbers of VTEPs, addresses behind them and IP addresses of a segment.
    pub fn external_counts(&self, vni: u32) -> (usize, usize, usize) {
        let segment = self.external.segments.get(&vni);
        segment.map_or((0, 0, 0), |it| (it.remotes.len(), it.macs.len(), it.bindings.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vtep(n: u8) -> IpAddr {
        [10, 9, 0, n].into()
    }

    fn mac(n: u8) -> MacAddr {
        MacAddr::new(2, 0, 0, 0, 0, n)
    }

    fn all(segment: &ExternalSegment) -> Vec<(IpAddr, bool, u32)> {
        segment.remotes.iter().map(|(ip, it)| (*ip, it.flood, it.users)).collect()
    }

    #[test]
    fn a_vtep_is_a_remote_while_something_refers_to_it() {
        let (mut segment, mut groups) = (ExternalSegment::default(), Groups::default());
        let mut set_mac = |segment: &mut ExternalSegment, n, vtep: Option<IpAddr>| {
            segment.set_mac(5, mac(n), vtep.map(ExternalPlace::Vtep), &mut groups)
        };
        assert!(!segment.set_flood(vtep(2), false));
        assert!(segment.set_flood(vtep(2), true) && !segment.set_flood(vtep(2), true));
        assert!(!set_mac(&mut segment, 1, Some(vtep(2))), "a remote already");
        assert!(set_mac(&mut segment, 2, Some(vtep(3))));
        assert_eq!(all(&segment), [(vtep(2), true, 1), (vtep(3), false, 1)]);
        assert!(segment.set_flood(vtep(2), false), "the list changes");
        assert_eq!(all(&segment), [(vtep(2), false, 1), (vtep(3), false, 1)]);
        assert!(set_mac(&mut segment, 1, Some(vtep(3))), "the last address leaves 10.9.0.2");
        assert_eq!(all(&segment), [(vtep(3), false, 2)]);
        assert!(!set_mac(&mut segment, 1, None) && !set_mac(&mut segment, 1, None));
        assert!(set_mac(&mut segment, 2, None));
        assert!(segment.remotes.is_empty() && segment.macs.is_empty());
    }

    #[test]
    fn members_are_remotes_while_an_address_uses_their_group() {
        let mut external = External::default();
        external.segments.insert(5, ExternalSegment::default());
        let members = |all: &[u8]| -> ExternalGroup { all.iter().map(|n| (vtep(*n), 1)).collect() };
        external.set_group(10, members(&[2, 3]));
        assert!(external.segments[&5].remotes.is_empty(), "nothing refers to the group");
        let set_mac = |external: &mut External, n, place| {
            let External { segments, groups, .. } = external;
            segments.get_mut(&5).unwrap().set_mac(5, mac(n), place, groups)
        };
        let (ten, eleven) = (Some(ExternalPlace::Group(10)), Some(ExternalPlace::Group(11)));
        assert!(set_mac(&mut external, 1, ten));
        assert!(!set_mac(&mut external, 2, ten), "the second address");
        assert!(!set_mac(&mut external, 3, Some(ExternalPlace::Vtep(vtep(3)))));
        assert_eq!(all(&external.segments[&5]), [(vtep(2), false, 1), (vtep(3), false, 2)]);
        external.set_group(10, members(&[3, 4]));
        assert_eq!(all(&external.segments[&5]), [(vtep(3), false, 2), (vtep(4), false, 1)]);
        assert_eq!(std::mem::take(&mut external.changed), HashSet::from([5]));
        // A group that is not known yet.
        assert!(!set_mac(&mut external, 1, eleven));
        assert!(set_mac(&mut external, 2, None), "nothing uses the first group");
        assert_eq!(all(&external.segments[&5]), [(vtep(3), false, 1)]);
        external.set_group(11, members(&[2]));
        assert_eq!(all(&external.segments[&5]), [(vtep(2), false, 1), (vtep(3), false, 1)]);
        external.set_group(11, Vec::new());
        assert_eq!(all(&external.segments[&5]), [(vtep(3), false, 1)]);
        assert!(!set_mac(&mut external, 1, None));
        assert_eq!(external.segments[&5].groups.len(), 0);
    }

    #[test]
    fn changes_are_taken_in_parts() {
        let mut changes = ExternalChanges::default();
        changes.macs.insert((1, mac(1)), Some(ExternalPlace::Vtep(vtep(2))));
        let mut later = ExternalChanges::default();
        later.flood.insert((1, vtep(2)), true);
        later.macs.extend((1..9).map(|n| ((1, mac(n)), None)));
        later.groups.insert(10, vec![(vtep(2), 1)]);
        later.bindings.insert((1, vtep(9)), None);
        later.routes.insert((1, NetworkPrefix::new(vtep(0), 24).unwrap()), vec![mac(1)]);
        changes.merge(later);
        assert_eq!(changes.len(), 12);
        let mut all = changes.take(4);
        assert_eq!((all.flood.len(), all.groups.len(), all.macs.len(), all.bindings.len()), (1, 1, 2, 0));
        for expected in [4, 4, 0] {
            let part = changes.take(4);
            assert_eq!(part.len(), expected);
            all.merge(part);
        }
        assert!(changes.is_empty() && all.len() == 12 && all.routes.len() == 1);
        assert_eq!(all.macs[&(1, mac(1))], None, "the later change");
        all.macs.insert((2, mac(1)), None);
        all.retain(|vni| vni == 2);
        assert_eq!((all.len(), all.macs.len(), all.groups.len()), (2, 1, 1), "a group belongs to no VNI");

        // A group goes behind the addresses that leave it, and others come before their addresses.
        let mut changes = ExternalChanges::default();
        changes.groups.extend([(10, Vec::new()), (11, vec![(vtep(3), 1)])]);
        changes.macs.extend((1..5).map(|n| ((1, mac(n)), Some(ExternalPlace::Group(11)))));
        let parts: Vec<(Vec<u32>, usize)> = std::iter::from_fn(|| {
            let part = changes.take(2);
            (!part.is_empty()).then(|| (part.groups.keys().copied().collect(), part.macs.len()))
        })
        .collect();
        assert_eq!(parts, [(vec![11], 1), (vec![], 2), (vec![10], 1)]);
    }
}
