//! A mirror of the kernel's VXLAN devices: links, forwarding databases and neighbours, and what follows from them for
//! the segments with these VNIs.
//!
//! Messages may come in any order, twice, or not at all. An entry is kept although its device is not known yet. After a
//! loss, [`Mirror::begin`] and [`Mirror::finish`] enclose a new dump of all tables; entries that are in none of its
//! messages are removed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use wirepath_pipeline::route::NetworkPrefix;
use wirepath_pipeline::tunnel::{ExternalChanges, ExternalGroup, ExternalPlace};
use wirepath_pmd::rtnetlink::{
    BridgeEntry, Fdb, Link, LinkKind, Message, Neighbour, Nexthop, NexthopTarget, NudState, Route, TunnelEntry, Vxlan,
};
use wirepath_wire::MacAddr;

use super::devices;
use super::hosts::PROTOCOL;
use super::routes::Routes;

/// Maximum number of entries of each table. Beyond it, new ones are ignored and counted.
const MAX_ENTRIES: usize = if cfg!(test) { 64 } else { 1 << 20 };

/// The devices of a VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Devices {
    /// Index of the VXLAN device.
    pub(super) vxlan: u32,
    /// Index of its bridge.
    pub(super) bridge: Option<u32>,
}

/// Entries by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// VTEPs in the flood list.
    pub(super) flood: usize,
    /// Addresses behind VTEPs.
    pub(super) macs: usize,
    /// IP addresses of the bridge's neighbours.
    pub(super) bindings: usize,
    /// Routes by the bridge to routers behind VTEPs.
    pub(super) routes: usize,
}

/// Numbers of messages since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MirrorStats {
    /// Messages that were read.
    pub(super) messages: u64,
    /// Messages without effect: a VNI other than that of the device.
    pub(super) unsupported: u64,
    /// Entries that found no room.
    pub(super) refused: u64,
}

/// Ethernet address and router flag of the host with an IP address.
pub(super) type Host = (MacAddr, bool);

/// Entry of an IP address among the neighbours of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NeighbourEntry {
    /// There is none, or none with an address.
    None,
    /// This program put it there, in this or a former run.
    Own(Host),
    /// Another program or the kernel itself put it there.
    Foreign,
}

/// A value, and the dump in which it was last seen.
#[derive(Clone, Debug)]
struct Seen<T> {
    value: T,
    dump: u32,
}

/// Destination of an entry of a VXLAN device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Vtep(IpAddr),
    /// A nexthop object: a VTEP or a group of them.
    Nexthop(u32),
}

/// State of a VNI as it was reported.
#[derive(Debug, Default)]
struct Reported {
    devices: Option<Devices>,
    flood: BTreeSet<IpAddr>,
    macs: HashMap<MacAddr, ExternalPlace>,
    bindings: HashMap<IpAddr, (MacAddr, bool)>,
    /// Routers of each destination.
    routes: HashMap<NetworkPrefix, Vec<MacAddr>>,
}

/// Place of an address in a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BridgePlace {
    /// Index of the port.
    pub(super) port: u32,
    /// True if a program outside of the bridge put it there.
    pub(super) external: bool,
}

/// The mirror. Its changes are collected in [`Self::changes`].
#[derive(Debug, Default)]
pub(super) struct Mirror {
    /// Number of the last dump.
    dump: u32,
    links: HashMap<u32, Seen<Link>>,
    /// Destinations of the addresses of VXLAN devices; those of the zero address are the flood list.
    tunnels: HashMap<u32, HashMap<MacAddr, Vec<Seen<To>>>>,
    tunnel_entries: usize,
    nexthops: HashMap<u32, Seen<NexthopTarget>>,
    /// Entries of VXLAN devices that refer to a nexthop object, by its number.
    users: HashMap<u32, HashSet<(u32, MacAddr)>>,
    /// Groups by their members.
    member_of: HashMap<u32, BTreeSet<u32>>,
    /// VTEPs of the nexthop objects, as they were reported.
    groups: HashMap<u32, ExternalGroup>,
    /// Addresses of bridges.
    bridges: HashMap<u32, HashMap<MacAddr, Seen<BridgePlace>>>,
    bridge_entries: usize,
    /// Neighbours by interface.
    neighbours: HashMap<u32, HashMap<IpAddr, Seen<Neighbour>>>,
    neighbour_entries: usize,
    routes: Routes,
    /// True if the bridge of a VNI was set up or down, or has another master. Of a bridge that the gateway made, also
    /// if it has other addresses, or IPv6 was set on or off there.
    pub(super) bridges_changed: bool,
    /// Bridges of VNIs that were set up or down or have another master since they were last taken.
    pub(super) bridges_restarted: HashSet<u32>,
    /// VNIs on whose bridge IPv6 was set on or off since they were last taken.
    pub(super) ipv6_changed: Vec<u32>,
    /// Watched VNIs.
    segments: HashMap<u32, Reported>,
    /// VNIs by the index of their VXLAN device.
    by_vxlan: HashMap<u32, u32>,
    /// VNIs by the index of their bridge.
    by_bridge: HashMap<u32, Vec<u32>>,
    /// Changes since they were last taken.
    pub(super) changes: ExternalChanges,
    /// Addresses whose entry in the bridge of a VNI was removed since they were last taken, with their former port.
    pub(super) vanished: Vec<(u32, MacAddr, u32)>,
    /// IP addresses whose own entry in the bridge of a VNI was removed or replaced since they were last taken.
    pub(super) vanished_neighbours: Vec<(u32, IpAddr)>,
    pub(super) stats: MirrorStats,
}

impl Mirror {
    /// Mirrors these VNIs, and no longer others. Reports all that is known about new ones.
    pub(super) fn watch(&mut self, vnis: &HashSet<u32>) {
        self.segments.retain(|vni, _| vnis.contains(vni));
        for vni in vnis {
            self.segments.entry(*vni).or_default();
        }
        self.find_devices();
    }

    /// Begins a dump of all tables.
    pub(super) fn begin(&mut self) {
        self.dump = self.dump.wrapping_add(1);
    }

    /// Takes note that messages were lost, of which a dump tells nothing.
    pub(super) fn lost_messages(&mut self) {
        self.bridges_changed = true;
        self.ipv6_changed.extend(self.segments.keys());
    }

    /// Ends a dump that was complete: removes all entries that no message since [`Self::begin`] was about.
    pub(super) fn finish(&mut self) {
        let dump = self.dump;
        let lost: Vec<u32> = stale(&self.links, dump).collect();
        lost.into_iter().for_each(|index| self.apply(&Message::LinkRemoved(index)));
        let mut lost = Vec::new();
        for (device, entries) in &self.tunnels {
            for (mac, all) in entries {
                lost.extend(all.iter().filter(|to| to.dump != dump).map(|to| {
                    let (vtep, nexthop) = match to.value {
                        To::Vtep(vtep) => (Some(vtep), None),
                        To::Nexthop(id) => (None, Some(id)),
                    };
                    TunnelEntry { removed: true, device: *device, mac: *mac, vtep, nexthop, vni: None }
                }));
            }
        }
        lost.into_iter().for_each(|entry| self.apply_tunnel(entry));
        let lost: Vec<u32> = stale(&self.nexthops, dump).collect();
        lost.into_iter().for_each(|id| self.apply_nexthop(&Nexthop { id, to: None }));
        let mut lost = Vec::new();
        for (bridge, entries) in &self.bridges {
            for (mac, place) in entries.iter().filter(|(_, place)| place.dump != dump) {
                let BridgePlace { port, external } = place.value;
                lost.push(BridgeEntry { removed: true, bridge: *bridge, port, mac: *mac, vlan: None, external });
            }
        }
        lost.into_iter().for_each(|entry| self.apply_bridge(entry));
        let old = |entries: &HashMap<IpAddr, Seen<Neighbour>>| -> Vec<Neighbour> {
            let old = entries.values().filter(|entry| entry.dump != dump);
            old.map(|entry| Neighbour { mac: None, ..entry.value }).collect()
        };
        let lost: Vec<Neighbour> = self.neighbours.values().flat_map(old).collect();
        lost.into_iter().for_each(|neighbour| self.apply_neighbour(neighbour));
        self.routes.stale(dump).iter().for_each(|route| self.apply_route(route));
    }

    /// Takes a message.
    pub(super) fn apply(&mut self, message: &Message) {
        self.stats.messages += 1;
        match message {
            Message::Link(link) => self.apply_link(link),
            Message::LinkRemoved(index) => self.remove_link(*index),
            Message::Fdb(Fdb::Tunnel(entry)) => self.apply_tunnel(*entry),
            Message::Fdb(Fdb::Bridge(entry)) => self.apply_bridge(*entry),
            Message::Neighbour(neighbour) => self.apply_neighbour(*neighbour),
            Message::Nexthop(nexthop) => self.apply_nexthop(nexthop),
            Message::Route(route) => self.apply_route(route),
            // Rules concern packets that the kernel forwards.
            Message::Routing => {}
            Message::AddressesChanged(index) => self.bridges_changed |= self.is_own_bridge(*index),
            Message::Ipv6Changed(index) => {
                self.bridges_changed |= self.is_own_bridge(*index);
                self.ipv6_changed.extend(self.by_bridge.get(index).into_iter().flatten());
            }
        }
    }

    /// Returns the devices of a VNI.
    pub(super) fn devices(&self, vni: u32) -> Option<Devices> {
        self.segments.get(&vni)?.devices
    }

    /// Returns the link with this index.
    pub(super) fn link(&self, index: u32) -> Option<&Link> {
        Some(&self.links.get(&index)?.value)
    }

    /// Returns all links.
    pub(super) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.values().map(|link| &link.value)
    }

    /// Returns the place of an address in the bridge of a VNI.
    pub(super) fn place(&self, vni: u32, mac: MacAddr) -> Option<BridgePlace> {
        let bridge = self.devices(vni)?.bridge?;
        Some(self.bridges.get(&bridge)?.get(&mac)?.value)
    }

    /// Returns the addresses behind a port of the bridge of a VNI that a program put there.
    pub(super) fn addresses_at(&self, vni: u32, port: u32) -> Vec<MacAddr> {
        let entries = self.devices(vni).and_then(|devices| self.bridges.get(&devices.bridge?));
        let here = |place: &BridgePlace| place.port == port && place.external;
        entries.into_iter().flatten().filter(|(_, place)| here(&place.value)).map(|(mac, _)| *mac).collect()
    }

    /// Returns the entry of an IP address among the neighbours of the bridge of a VNI.
    pub(super) fn neighbour(&self, vni: u32, address: IpAddr) -> NeighbourEntry {
        let neighbours = self.devices(vni).and_then(|devices| self.neighbours.get(&devices.bridge?));
        neighbours.and_then(|entries| entries.get(&address)).map_or(NeighbourEntry::None, |it| own(&it.value))
    }

    /// Returns the IP addresses that this program put among the neighbours of the bridge of a VNI.
    pub(super) fn own_neighbours(&self, vni: u32) -> Vec<IpAddr> {
        let neighbours = self.devices(vni).and_then(|devices| self.neighbours.get(&devices.bridge?));
        let is_own = |entry: &Seen<Neighbour>| matches!(own(&entry.value), NeighbourEntry::Own(_));
        neighbours.into_iter().flatten().filter(|(_, entry)| is_own(entry)).map(|(address, _)| *address).collect()
    }

    /// Returns the numbers of entries of a VNI.
    pub(super) fn counts(&self, vni: u32) -> Counts {
        let Some(it) = self.segments.get(&vni) else { return Counts::default() };
        Counts { flood: it.flood.len(), macs: it.macs.len(), bindings: it.bindings.len(), routes: it.routes.len() }
    }

    /// Returns whether a link is the bridge of a VNI, and the gateway made it.
    fn is_own_bridge(&self, index: u32) -> bool {
        self.by_bridge.contains_key(&index) && self.link(index).is_some_and(devices::is_own)
    }

    fn apply_link(&mut self, link: &Link) {
        if self.links.len() >= MAX_ENTRIES && !self.links.contains_key(&link.index) {
            self.stats.refused += 1;
            return;
        }
        let new = Seen { value: link.clone(), dump: self.dump };
        let old = self.links.insert(link.index, new);
        if !link.up {
            self.remove_routes(link.index);
        }
        if let Some(Seen { value: old, .. }) = &old {
            let (is_bridge, is_own) = (self.by_bridge.contains_key(&link.index), devices::is_own(link));
            let has_restarted = (old.up, old.master) != (link.up, link.master);
            if is_bridge && has_restarted {
                self.bridges_restarted.insert(link.index);
            }
            // A port that is set up again forwards. The bridge has its carrier from the port for local addresses.
            self.bridges_changed |= has_restarted && (is_bridge || is_own);
            self.bridges_changed |= old.mac != link.mac && is_bridge && is_own;
        }
        let key = |link: &Link| (link.kind, link.master);
        if old.is_none_or(|old| key(&old.value) != key(link)) {
            self.find_devices();
        }
    }

    /// Removes a link with its entries. The kernel may have lost the messages about them.
    fn remove_link(&mut self, index: u32) {
        // Entries of a link that is not known may have come by a dump that has not read the links yet.
        let was_known = self.links.remove(&index).is_some();
        for (mac, all) in self.tunnels.remove(&index).into_iter().flatten() {
            self.tunnel_entries -= all.len();
            all.iter().for_each(|to| unuse(&mut self.users, to.value, (index, mac)));
        }
        self.bridge_entries -= self.bridges.remove(&index).map_or(0, |entries| entries.len());
        self.neighbour_entries -= self.neighbours.remove(&index).map_or(0, |entries| entries.len());
        self.remove_routes(index);
        if was_known {
            self.find_devices();
        }
    }

    /// Removes the routes by an interface that is gone or down.
    fn remove_routes(&mut self, index: u32) {
        for to in self.routes.remove_interface(index) {
            // Routes by other bridges may count now.
            let bridges = self.routes.interfaces(to).into_iter().chain([index]);
            let vnis: Vec<u32> = bridges.filter_map(|bridge| self.by_bridge.get(&bridge)).flatten().copied().collect();
            vnis.into_iter().for_each(|vni| self.report_route(vni, to));
        }
    }

    fn apply_route(&mut self, route: &Route) {
        let Self { routes, links, dump, .. } = self;
        let may_be_bridge = |index| links.get(&index).is_none_or(|link| link.value.kind == LinkKind::Bridge);
        let Some((to, applied)) = routes.apply(route, *dump, may_be_bridge, MAX_ENTRIES) else { return };
        self.stats.refused += u64::from(applied.refused);
        for bridge in applied.interfaces {
            for vni in self.by_bridge.get(&bridge).cloned().unwrap_or_default() {
                self.report_route(vni, to);
            }
        }
    }

    fn apply_tunnel(&mut self, entry: TunnelEntry) {
        let TunnelEntry { removed, device, mac, vtep, nexthop, vni } = entry;
        let to = vtep.map(To::Vtep).or(nexthop.map(To::Nexthop));
        let Some(to) = to.filter(|_| vni.is_none() || vni == self.by_vxlan.get(&device).copied()) else {
            self.stats.unsupported += 1;
            return;
        };
        let is_flood = mac == MacAddr::ZERO;
        if !is_flood && !mac.is_unicast() {
            return;
        }
        let dump = self.dump;
        if removed {
            let Some(entries) = self.tunnels.get_mut(&device) else { return };
            let Some(all) = entries.get_mut(&mac) else { return };
            let before = all.len();
            all.retain(|known| known.value != to);
            self.tunnel_entries -= before - all.len();
            if all.is_empty() {
                entries.remove(&mac);
            }
            unuse(&mut self.users, to, (device, mac));
        } else {
            let all = self.tunnels.entry(device).or_default().entry(mac).or_default();
            if !is_flood {
                // A unicast address has one destination. The kernel does not report the removal of the former one.
                for former in all.extract_if(.., |known| known.value != to) {
                    self.tunnel_entries -= 1;
                    unuse(&mut self.users, former.value, (device, mac));
                }
            }
            match all.iter_mut().find(|known| known.value == to) {
                Some(known) => known.dump = dump,
                None if self.tunnel_entries >= MAX_ENTRIES => {
                    self.stats.refused += 1;
                    if all.is_empty() {
                        // Refused addresses take no memory.
                        self.tunnels.get_mut(&device).map(|entries| entries.remove(&mac));
                    }
                }
                None => {
                    all.push(Seen { value: to, dump });
                    self.tunnel_entries += 1;
                    if let To::Nexthop(id) = to {
                        self.users.entry(id).or_default().insert((device, mac));
                    }
                }
            }
        }
        let Some(&vni) = self.by_vxlan.get(&device) else { return };
        if is_flood { self.report_flood(vni) } else { self.report_mac(vni, mac) }
    }

    /// Takes a nexthop object. It has a VTEP or a group of them, and may belong to groups. Addresses refer to the
    /// object, so none of them changes. An object that is removed takes its entries along, without messages
    /// (`vxlan_fdb_nh_flush` in drivers/net/vxlan/vxlan_core.c).
    fn apply_nexthop(&mut self, nexthop: &Nexthop) {
        let Nexthop { id, to } = nexthop;
        let is_new = !self.nexthops.contains_key(id);
        if to.is_some() && is_new && self.nexthops.len() >= MAX_ENTRIES {
            self.stats.refused += 1;
            return;
        }
        let old = match to {
            Some(to) => self.nexthops.insert(*id, Seen { value: to.clone(), dump: self.dump }),
            None => self.nexthops.remove(id),
        };
        if to.is_none() {
            for (device, mac) in self.users.remove(id).unwrap_or_default() {
                let nexthop = Some(*id);
                self.apply_tunnel(TunnelEntry { removed: true, device, mac, vtep: None, nexthop, vni: None });
            }
        }
        let old = old.map(|old| old.value);
        if old == *to {
            return;
        }
        for (member, _) in members(&old) {
            if let Some(groups) = self.member_of.get_mut(member) {
                groups.remove(id);
                if groups.is_empty() {
                    self.member_of.remove(member);
                }
            }
        }
        for (member, _) in members(to) {
            self.member_of.entry(*member).or_default().insert(*id);
        }
        self.report_group(*id);
        let groups: Vec<u32> = self.member_of.get(id).into_iter().flatten().copied().collect();
        groups.into_iter().for_each(|group| self.report_group(group));
    }

    /// Reports the VTEPs of a nexthop object. A group in a group has none, as in the kernel.
    fn report_group(&mut self, id: u32) {
        let vtep = |id: &u32| match self.nexthops.get(id).map(|it| &it.value) {
            Some(NexthopTarget::Vtep(vtep)) => Some(*vtep),
            Some(NexthopTarget::Group(_)) | None => None,
        };
        let mut weights: BTreeMap<IpAddr, u16> = BTreeMap::new();
        match self.nexthops.get(&id).map(|it| &it.value) {
            Some(NexthopTarget::Vtep(vtep)) => _ = weights.insert(*vtep, 1),
            Some(NexthopTarget::Group(members)) => {
                for (member, weight) in members {
                    let Some(vtep) = vtep(member) else { continue };
                    let sum = weights.entry(vtep).or_default();
                    *sum = sum.saturating_add(*weight);
                }
            }
            None => {}
        }
        let now: ExternalGroup = weights.into_iter().collect();
        let before = match now.is_empty() {
            true => self.groups.remove(&id),
            false => self.groups.insert(id, now.clone()),
        };
        if before.unwrap_or_default() != now {
            self.changes.groups.insert(id, now);
        }
    }

    /// Number of nexthop objects for forwarding databases.
    pub(super) fn nexthops(&self) -> usize {
        self.nexthops.len()
    }

    fn apply_bridge(&mut self, entry: BridgeEntry) {
        let BridgeEntry { removed, bridge, port, mac, vlan, external } = entry;
        // Bridges have the entries without VLAN besides those of their port VLANs.
        if vlan.is_some_and(|vlan| vlan != 0) {
            return;
        }
        let known = self.bridges.get(&bridge).and_then(|entries| entries.get(&mac));
        if removed {
            // The message may be about a place that the address has left.
            if known.is_none_or(|known| known.value.port != port) {
                return;
            }
            self.bridges.get_mut(&bridge).map(|entries| entries.remove(&mac));
            self.bridge_entries -= 1;
        } else {
            if known.is_none() {
                if self.bridge_entries >= MAX_ENTRIES {
                    self.stats.refused += 1;
                    return;
                }
                self.bridge_entries += 1;
            }
            let place = Seen { value: BridgePlace { port, external }, dump: self.dump };
            self.bridges.entry(bridge).or_default().insert(mac, place);
        }
        for vni in self.by_bridge.get(&bridge).cloned().unwrap_or_default() {
            if removed {
                self.vanished.push((vni, mac, port));
            }
            self.report_mac(vni, mac);
        }
    }

    fn apply_neighbour(&mut self, neighbour: Neighbour) {
        let Neighbour { index, address, mac, .. } = neighbour;
        let known = self.neighbours.get(&index).and_then(|entries| entries.get(&address)).map(|it| own(&it.value));
        if mac.is_some() {
            let is_full = self.neighbour_entries >= MAX_ENTRIES;
            let entries = self.neighbours.entry(index).or_default();
            if !entries.contains_key(&address) {
                if is_full {
                    self.stats.refused += 1;
                    return;
                }
                self.neighbour_entries += 1;
            }
            entries.insert(address, Seen { value: neighbour, dump: self.dump });
        } else if let Some(entries) = self.neighbours.get_mut(&index)
            && entries.remove(&address).is_some()
        {
            self.neighbour_entries -= 1;
        }
        let routes = self.routes.users(index, address);
        let was_own = matches!(known, Some(NeighbourEntry::Own(_)));
        let vanished = was_own && (mac.is_none() || known != Some(own(&neighbour)));
        for vni in self.by_bridge.get(&index).cloned().unwrap_or_default() {
            if vanished {
                self.vanished_neighbours.push((vni, address));
            }
            self.report_binding(vni, address);
            routes.iter().for_each(|to| self.report_route(vni, *to));
        }
    }

    /// Finds the devices of all VNIs, and reports everything about those whose devices changed.
    fn find_devices(&mut self) {
        self.by_vxlan.clear();
        self.by_bridge.clear();
        let mut found: HashMap<u32, Devices> = HashMap::new();
        for link in self.links.values().map(|link| &link.value) {
            let LinkKind::Vxlan(Vxlan { vni, .. }) = link.kind else { continue };
            if !self.segments.contains_key(&vni) {
                continue;
            }
            let new = Devices { vxlan: link.index, bridge: link.master };
            // Of several devices, that in a bridge counts, and of several in bridges the first.
            let rank = |it: &Devices| (it.bridge.is_none(), it.vxlan);
            let best = found.entry(vni).or_insert(new);
            if rank(&new) < rank(best) {
                *best = new;
            }
        }
        for (vni, devices) in &found {
            self.by_vxlan.insert(devices.vxlan, *vni);
            if let Some(bridge) = devices.bridge {
                self.by_bridge.entry(bridge).or_default().push(*vni);
            }
        }
        let changed: Vec<u32> = (self.segments.iter_mut())
            .filter(|(vni, reported)| reported.devices != found.get(vni).copied())
            .map(|(vni, reported)| {
                reported.devices = found.get(vni).copied();
                *vni
            })
            .collect();
        changed.into_iter().for_each(|vni| self.report_all(vni));
    }

    fn report_all(&mut self, vni: u32) {
        self.report_flood(vni);
        let Some(reported) = self.segments.get(&vni) else { return };
        let mut macs: HashSet<MacAddr> = reported.macs.keys().copied().collect();
        let mut addresses: HashSet<IpAddr> = reported.bindings.keys().copied().collect();
        let mut routes: HashSet<NetworkPrefix> = reported.routes.keys().copied().collect();
        if let Some(Devices { vxlan, bridge }) = reported.devices {
            macs.extend(self.tunnels.get(&vxlan).into_iter().flat_map(HashMap::keys));
            let neighbours = bridge.and_then(|bridge| self.neighbours.get(&bridge));
            addresses.extend(neighbours.into_iter().flat_map(HashMap::keys));
            routes.extend(bridge.into_iter().flat_map(|bridge| self.routes.by_interface(bridge)));
        }
        macs.remove(&MacAddr::ZERO);
        macs.into_iter().for_each(|mac| self.report_mac(vni, mac));
        addresses.into_iter().for_each(|address| self.report_binding(vni, address));
        routes.into_iter().for_each(|to| self.report_route(vni, to));
    }

    fn report_flood(&mut self, vni: u32) {
        let Some(reported) = self.segments.get_mut(&vni) else { return };
        let entries = reported.devices.and_then(|devices| self.tunnels.get(&devices.vxlan)?.get(&MacAddr::ZERO));
        let vtep = |to: &Seen<To>| match to.value {
            To::Vtep(vtep) => Some(vtep),
            // The kernel takes none here (vxlan_fdb_parse in drivers/net/vxlan/vxlan_core.c).
            To::Nexthop(_) => None,
        };
        let now: BTreeSet<IpAddr> = entries.into_iter().flatten().filter_map(vtep).collect();
        for (vteps, listed) in [(reported.flood.difference(&now), false), (now.difference(&reported.flood), true)] {
            self.changes.flood.extend(vteps.map(|vtep| ((vni, *vtep), listed)));
        }
        reported.flood = now;
    }

    /// Reports the place of an address. The bridge decides first: an address behind another port than the VXLAN device
    /// is behind no VTEP, although the device may still have an entry.
    fn report_mac(&mut self, vni: u32, mac: MacAddr) {
        let Some(reported) = self.segments.get_mut(&vni) else { return };
        let place = reported.devices.and_then(|Devices { vxlan, bridge }| {
            let place = bridge.and_then(|bridge| self.bridges.get(&bridge)?.get(&mac));
            if place.is_some_and(|place| place.value.port != vxlan) {
                return None;
            }
            Some(match self.tunnels.get(&vxlan)?.get(&mac)?.last()?.value {
                To::Vtep(vtep) => ExternalPlace::Vtep(vtep),
                To::Nexthop(id) => ExternalPlace::Group(id),
            })
        });
        let before = match place {
            Some(place) => reported.macs.insert(mac, place),
            None => reported.macs.remove(&mac),
        };
        if before != place {
            self.changes.macs.insert((vni, mac), place);
        }
    }

    /// Reports the routers to which the kernel's route to a destination leads. A next hop without a neighbour entry of
    /// the daemon is left out, like a route without any other.
    fn report_route(&mut self, vni: u32, to: NetworkPrefix) {
        let Some(reported) = self.segments.get_mut(&vni) else { return };
        let bridge = reported.devices.and_then(|devices| devices.bridge);
        let neighbours = bridge.and_then(|bridge| self.neighbours.get(&bridge));
        let vteps = bridge.into_iter().flat_map(|bridge| self.routes.next_hops(bridge, to));
        let mut routers: Vec<MacAddr> = vteps.filter_map(|vtep| Some(learned(neighbours?, vtep)?.0)).collect();
        routers.sort_unstable();
        routers.dedup();
        let before = match routers.is_empty() {
            true => reported.routes.remove(&to),
            false => reported.routes.insert(to, routers.clone()),
        };
        if before.unwrap_or_default() != routers {
            self.changes.routes.insert((vni, to), routers);
        }
    }

    fn report_binding(&mut self, vni: u32, address: IpAddr) {
        let Some(reported) = self.segments.get_mut(&vni) else { return };
        let bridge = reported.devices.and_then(|devices| devices.bridge);
        let host = bridge.and_then(|bridge| learned(self.neighbours.get(&bridge)?, address));
        let before = match host {
            Some(host) => reported.bindings.insert(address, host),
            None => reported.bindings.remove(&address),
        };
        if before != host {
            self.changes.bindings.insert((vni, address), host);
        }
    }
}

/// Returns the host of an address that another program put among these neighbours.
fn learned(neighbours: &HashMap<IpAddr, Seen<Neighbour>>, address: IpAddr) -> Option<Host> {
    let Neighbour { mac, external, is_router, .. } = neighbours.get(&address)?.value;
    Some((mac.filter(|mac| external && mac.is_unicast())?, is_router))
}

/// Returns whose entry a neighbour is.
fn own(neighbour: &Neighbour) -> NeighbourEntry {
    let Neighbour { state, mac, external, is_router, protocol, .. } = *neighbour;
    match mac {
        Some(mac) if protocol == PROTOCOL && state == NudState::Fixed && !external => {
            NeighbourEntry::Own((mac, is_router))
        }
        Some(_) => NeighbourEntry::Foreign,
        None => NeighbourEntry::None,
    }
}

/// Returns the keys of the entries that were not seen in a dump.
fn stale<K: Copy, V>(entries: &HashMap<K, Seen<V>>, dump: u32) -> impl Iterator<Item = K> {
    entries.iter().filter(move |(_, entry)| entry.dump != dump).map(|(key, _)| *key)
}

/// Records that an entry refers to a nexthop object no more.
fn unuse(users: &mut HashMap<u32, HashSet<(u32, MacAddr)>>, to: To, entry: (u32, MacAddr)) {
    let To::Nexthop(id) = to else { return };
    if let Some(of_id) = users.get_mut(&id) {
        of_id.remove(&entry);
        if of_id.is_empty() {
            users.remove(&id);
        }
    }
}

/// Returns the members of a nexthop object.
fn members(to: &Option<NexthopTarget>) -> &[(u32, u16)] {
    match to {
        Some(NexthopTarget::Group(members)) => members,
        Some(NexthopTarget::Vtep(_)) | None => &[],
    }
}

#[cfg(test)]
mod tests {
    use wirepath_pmd::rtnetlink::{NudState, RouteHop};

    use super::*;

    const VNI: u32 = 42;
    const BRIDGE: u32 = 8;
    const VXLAN: u32 = 9;
    const ACCESS: u32 = 10;
    /// `RTPROT_ZEBRA`.
    const ZEBRA: u8 = 11;

    fn vtep(n: u8) -> IpAddr {
        [10, 9, 0, n].into()
    }

    fn mac(n: u8) -> MacAddr {
        MacAddr::new(2, 0, 0, 0, 0, n)
    }

    fn link(index: u32, kind: LinkKind, master: Option<u32>) -> Message {
        Message::Link(Link { index, name: format!("link{index}"), alias: None, mac: None, master, up: true, kind })
    }

    fn vxlan_link(index: u32, vni: u32, master: Option<u32>) -> Message {
        let kind = LinkKind::Vxlan(Vxlan { vni, local: None, port: 4789, learning: false });
        link(index, kind, master)
    }

    fn tunnel(mac: MacAddr, n: u8, removed: bool) -> Message {
        let entry = TunnelEntry { removed, device: VXLAN, mac, vtep: Some(vtep(n)), nexthop: None, vni: None };
        Message::Fdb(Fdb::Tunnel(entry))
    }

    fn at(port: u32, mac: MacAddr, removed: bool) -> Message {
        Message::Fdb(Fdb::Bridge(BridgeEntry { removed, bridge: BRIDGE, port, mac, vlan: None, external: true }))
    }

    fn neighbour(n: u8, mac: Option<MacAddr>) -> Message {
        entry_of([192, 0, 2, n].into(), mac)
    }

    /// Returns the neighbour entry of the daemon for an address.
    fn entry_of(address: IpAddr, mac: Option<MacAddr>) -> Message {
        Message::Neighbour(Neighbour {
            index: BRIDGE,
            address,
            state: NudState::Fixed,
            mac,
            external: true,
            is_router: false,
            protocol: ZEBRA,
        })
    }

    /// All facts about two remote hosts, one of them with its IP address, and one local host.
    fn facts() -> Vec<Message> {
        vec![
            link(BRIDGE, LinkKind::Bridge, None),
            vxlan_link(VXLAN, VNI, Some(BRIDGE)),
            link(ACCESS, LinkKind::Other, Some(BRIDGE)),
            tunnel(MacAddr::ZERO, 2, false),
            tunnel(MacAddr::ZERO, 3, false),
            tunnel(mac(1), 2, false),
            at(VXLAN, mac(1), false),
            tunnel(mac(2), 3, false),
            at(VXLAN, mac(2), false),
            tunnel(mac(7), 2, false),
            at(ACCESS, mac(7), false),
            neighbour(1, Some(mac(1))),
            router(2, Some(mac(1))),
            router(3, Some(mac(2))),
            route(1, &[2, 3], false),
            route(2, &[3], false),
        ]
    }

    /// A device is removed while a dump has read its entries and not yet the links.
    #[test]
    fn entries_go_with_a_link_that_is_not_known_yet() {
        let mut mirror = watching();
        mirror.begin();
        mirror.apply(&tunnel(mac(1), 2, false));
        mirror.apply(&Message::LinkRemoved(VXLAN));
        mirror.finish();
        mirror.apply(&vxlan_link(VXLAN, VNI, None));
        assert_eq!((mirror.counts(VNI).macs, mirror.tunnel_entries), (0, 0));
    }

    /// Returns the neighbour entry of a VTEP, with the Ethernet address of its router.
    fn router(n: u8, mac: Option<MacAddr>) -> Message {
        entry_of(vtep(n), mac)
    }

    fn network(n: u8) -> NetworkPrefix {
        NetworkPrefix::new([10, n, 0, 0].into(), 16).unwrap()
    }

    /// Returns a route to a network by these VTEPs.
    fn route(n: u8, vteps: &[u8], removed: bool) -> Message {
        let hops = vteps.iter().map(|n| RouteHop { index: BRIDGE, via: Some(vtep(*n)) }).collect();
        let to = network(n);
        Message::Route(Route { removed, to: to.address(), len: to.len(), table: 254, metric: 20, hops })
    }

    fn watching() -> Mirror {
        let mut mirror = Mirror::default();
        mirror.watch(&[VNI].into());
        mirror
    }

    /// State of a reader that applies all changes.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    struct Reader {
        flood: BTreeSet<IpAddr>,
        groups: HashMap<u32, ExternalGroup>,
        macs: HashMap<MacAddr, ExternalPlace>,
        bindings: HashMap<IpAddr, MacAddr>,
        routes: HashMap<NetworkPrefix, Vec<MacAddr>>,
    }

    impl Reader {
        fn take(&mut self, mirror: &mut Mirror) {
            let changes = std::mem::take(&mut mirror.changes);
            for ((_, vtep), listed) in changes.flood {
                // A VTEP that came and went meanwhile is reported as gone.
                _ = if listed { self.flood.insert(vtep) } else { self.flood.remove(&vtep) };
            }
            for (id, members) in changes.groups {
                match members.is_empty() {
                    true => _ = self.groups.remove(&id),
                    false => _ = self.groups.insert(id, members),
                }
            }
            for ((_, mac), place) in changes.macs {
                match place {
                    Some(place) => _ = self.macs.insert(mac, place),
                    None => _ = self.macs.remove(&mac),
                }
            }
            for ((_, ip), host) in changes.bindings {
                match host {
                    Some((mac, _)) => _ = self.bindings.insert(ip, mac),
                    None => _ = self.bindings.remove(&ip),
                }
            }
            for ((_, to), routers) in changes.routes {
                match routers.is_empty() {
                    true => _ = self.routes.remove(&to),
                    false => _ = self.routes.insert(to, routers),
                }
            }
        }
    }

    fn behind(n: u8) -> ExternalPlace {
        ExternalPlace::Vtep(vtep(n))
    }

    fn expected() -> Reader {
        Reader {
            flood: [vtep(2), vtep(3)].into(),
            groups: HashMap::new(),
            macs: [(mac(1), behind(2)), (mac(2), behind(3))].into(),
            bindings: [([192, 0, 2, 1].into(), mac(1)), (vtep(2), mac(1)), (vtep(3), mac(2))].into(),
            routes: [(network(1), vec![mac(1), mac(2)]), (network(2), vec![mac(2)])].into(),
        }
    }

    #[test]
    fn any_order_and_repetition_give_the_same_state() {
        let seed = 7;
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..500 {
            let (mut mirror, mut reader) = (watching(), Reader::default());
            let mut messages = facts();
            messages.extend(facts());
            random.shuffle(&mut messages);
            for message in &messages {
                mirror.apply(message);
                if random.u8(..4) == 0 {
                    reader.take(&mut mirror);
                }
            }
            reader.take(&mut mirror);
            assert_eq!(reader, expected(), "{messages:?}");
            assert_eq!(mirror.counts(VNI), Counts { flood: 2, macs: 2, bindings: 3, routes: 2 });
            assert_eq!((mirror.tunnel_entries, mirror.bridge_entries, mirror.neighbour_entries), (5, 3, 3));
        }
    }

    #[test]
    fn a_dump_after_losses_leads_to_the_state_of_the_kernel() {
        let seed = 11;
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for round in 0..500 {
            let (mut mirror, mut reader) = (watching(), Reader::default());
            // Messages of a former state, of which a part was lost.
            let mut former = facts();
            former.extend([tunnel(mac(1), 4, false), tunnel(mac(3), 4, false), tunnel(MacAddr::ZERO, 4, false)]);
            former.extend([at(ACCESS, mac(1), false), at(VXLAN, mac(3), false), neighbour(9, Some(mac(3)))]);
            former.extend([route(1, &[4], false), route(3, &[2], false), router(3, Some(mac(9)))]);
            former.extend([vxlan_link(77, VNI, None), tunnel(mac(2), 3, true), at(VXLAN, mac(2), true)]);
            random.shuffle(&mut former);
            former.retain(|_| random.bool());
            former.iter().for_each(|message| mirror.apply(message));
            reader.take(&mut mirror);
            mirror.begin();
            let mut dump = facts();
            random.shuffle(&mut dump);
            dump.iter().for_each(|message| mirror.apply(message));
            mirror.finish();
            reader.take(&mut mirror);
            assert_eq!(reader, expected(), "round {round}: {former:?}");
            assert_eq!((mirror.tunnel_entries, mirror.bridge_entries, mirror.neighbour_entries), (5, 3, 3));
            mirror.begin();
            facts().iter().for_each(|message| mirror.apply(message));
            mirror.finish();
            assert!(mirror.changes.is_empty(), "the same dump again changes nothing");
        }
    }

    #[test]
    fn routes_follow_their_routers_and_the_bridge() {
        let (mut mirror, mut reader) = (watching(), Reader::default());
        facts().iter().for_each(|message| mirror.apply(message));
        reader.take(&mut mirror);
        let mut after = |messages: &[Message]| {
            messages.iter().for_each(|message| mirror.apply(message));
            reader.take(&mut mirror);
            [1, 2].map(|n| reader.routes.get(&network(n)).cloned().unwrap_or_default())
        };
        assert_eq!(after(&[router(3, Some(mac(3)))]), [vec![mac(1), mac(3)], vec![mac(3)]], "another address");
        assert_eq!(after(&[router(3, None)]), [vec![mac(1)], vec![]], "a VTEP without router");
        assert_eq!(after(&[router(3, Some(mac(1)))]), [vec![mac(1)], vec![mac(1)]], "two VTEPs with one router");
        assert_eq!(after(&[route(1, &[], true)])[0], []);
        let down = |up| {
            Message::Link(Link {
                index: BRIDGE,
                name: "br".into(),
                alias: None,
                mac: None,
                master: None,
                up,
                kind: LinkKind::Bridge,
            })
        };
        assert_eq!(after(&[down(false)]), [vec![], vec![]], "the kernel removes them without a message");
        assert_eq!(after(&[down(true), route(2, &[2], false)]), [vec![], vec![mac(1)]]);
        assert_eq!(after(&[Message::LinkRemoved(VXLAN)]), [vec![], vec![]], "the bridge belongs to no VNI any more");
        assert_eq!(after(&[vxlan_link(VXLAN, VNI, Some(BRIDGE))]), [vec![], vec![mac(1)]]);
        assert_eq!(after(&[Message::LinkRemoved(BRIDGE)]), [vec![], vec![]]);
        assert_eq!(mirror.routes.len(), 0);
    }

    #[test]
    fn changes_of_own_bridges_are_noticed() {
        let mut mirror = watching();
        facts().iter().for_each(|message| mirror.apply(message));
        let bridge = |alias: Option<&str>, mac: MacAddr, up: bool| {
            let (alias, mac, name) = (alias.map(str::to_owned), Some(mac), "br".to_owned());
            let kind = LinkKind::Bridge;
            Message::Link(Link { index: BRIDGE, name, alias, mac, master: None, up, kind })
        };
        let own = Some(devices::DEVICE_ALIAS);
        let mut after = |message: &Message| {
            mirror.apply(message);
            std::mem::take(&mut mirror.bridges_changed)
        };
        after(&bridge(None, mac(1), true));
        assert!(!after(&Message::AddressesChanged(BRIDGE)) && !after(&Message::Ipv6Changed(BRIDGE)));
        assert!(!after(&bridge(None, mac(2), true)), "the address of another's bridge");
        assert!(after(&bridge(None, mac(2), false)));
        after(&bridge(own, mac(2), true));
        assert!(!after(&bridge(own, mac(2), true)));
        assert!(after(&bridge(own, mac(3), true)) && after(&bridge(own, mac(3), false)));
        assert!(after(&Message::AddressesChanged(BRIDGE)) && after(&Message::Ipv6Changed(BRIDGE)));
        assert!(!after(&Message::AddressesChanged(VXLAN)) && !after(&Message::AddressesChanged(ACCESS)));
        assert_eq!(mirror.ipv6_changed, [VNI, VNI]);
    }

    #[test]
    fn an_address_moves_between_vteps_and_the_local_port() {
        let (mut mirror, mut reader) = (watching(), Reader::default());
        facts().iter().for_each(|message| mirror.apply(message));
        reader.take(&mut mirror);
        let mut after = |messages: &[Message]| {
            messages.iter().for_each(|message| mirror.apply(message));
            reader.take(&mut mirror);
            (reader.macs.get(&mac(1)).copied(), mirror.place(VNI, mac(1)).map(|place| place.port))
        };
        assert_eq!(after(&[tunnel(mac(1), 3, false)]), (Some(behind(3)), Some(VXLAN)));
        assert_eq!(after(&[tunnel(mac(1), 2, true)]).0, Some(behind(3)), "the removal of the former VTEP is late");
        assert_eq!(after(&[at(ACCESS, mac(1), false)]), (None, Some(ACCESS)), "the device still has its entry");
        assert_eq!(after(&[at(VXLAN, mac(1), true)]), (None, Some(ACCESS)), "the removal of the former port is late");
        assert_eq!(after(&[tunnel(mac(1), 2, false), at(VXLAN, mac(1), false)]), (Some(behind(2)), Some(VXLAN)));
        assert_eq!(after(&[at(VXLAN, mac(1), true)]), (Some(behind(2)), None));
        assert_eq!(after(&[tunnel(mac(1), 2, true)]), (None, None));
        assert_eq!(mirror.vanished, [(VNI, mac(1), VXLAN)]);
    }

    #[test]
    fn a_device_that_goes_takes_its_entries_along() {
        let (mut mirror, mut reader) = (watching(), Reader::default());
        facts().iter().for_each(|message| mirror.apply(message));
        reader.take(&mut mirror);
        mirror.apply(&Message::LinkRemoved(VXLAN));
        reader.take(&mut mirror);
        assert_eq!(reader, Reader::default());
        assert_eq!((mirror.devices(VNI), mirror.tunnel_entries), (None, 0));
        // The device is made again with another index, and its entries come first.
        for (n, vtep) in [(1, vtep(5)), (0, vtep(6))] {
            let mac = if n == 0 { MacAddr::ZERO } else { mac(n) };
            let entry = TunnelEntry { removed: false, device: 20, mac, vtep: Some(vtep), nexthop: None, vni: None };
            mirror.apply(&Message::Fdb(Fdb::Tunnel(entry)));
        }
        mirror.apply(&vxlan_link(20, VNI, None));
        reader.take(&mut mirror);
        let now = Reader { flood: [vtep(6)].into(), macs: [(mac(1), behind(5))].into(), ..Reader::default() };
        assert_eq!(reader, now);
        mirror.watch(&HashSet::new());
        mirror.watch(&[VNI].into());
        let mut again = Reader::default();
        again.take(&mut mirror);
        assert_eq!(again, now, "a VNI that is watched again is reported whole");
    }

    #[test]
    fn what_is_not_supported_is_counted() {
        let mut mirror = watching();
        facts().iter().for_each(|message| mirror.apply(message));
        mirror.changes = ExternalChanges::default();
        let entry = TunnelEntry { removed: false, device: VXLAN, mac: mac(9), vtep: None, nexthop: None, vni: None };
        mirror.apply(&Message::Fdb(Fdb::Tunnel(entry)));
        mirror.apply(&Message::Fdb(Fdb::Tunnel(TunnelEntry { vtep: Some(vtep(2)), vni: Some(7), ..entry })));
        assert_eq!((mirror.stats.unsupported, mirror.changes.is_empty()), (2, true));
        let of_vlan =
            BridgeEntry { removed: false, bridge: BRIDGE, port: ACCESS, mac: mac(1), vlan: Some(1), external: false };
        mirror.apply(&Message::Fdb(Fdb::Bridge(of_vlan)));
        assert!(mirror.changes.is_empty(), "an entry of a VLAN decides nothing");
        mirror.apply(&neighbour(5, Some(MacAddr::new(1, 0, 0, 0, 0, 1))));
        assert!(mirror.changes.is_empty(), "a group address is no host");
    }

    #[test]
    fn a_change_of_members_changes_the_group_and_no_address() {
        let (mut mirror, mut reader) = (watching(), Reader::default());
        let nexthop = |id, to| Message::Nexthop(Nexthop { id, to });
        let member = |n: u8| nexthop(n.into(), Some(NexthopTarget::Vtep(vtep(n))));
        let group = |all: &[(u32, u16)]| nexthop(10, Some(NexthopTarget::Group(all.to_vec())));
        let entry = |n: u8, removed| {
            let to = TunnelEntry { removed, device: VXLAN, mac: mac(n), vtep: None, nexthop: Some(10), vni: None };
            Message::Fdb(Fdb::Tunnel(to))
        };
        // Entries before their group, and the group before its members: any order is possible.
        let hosts = 10..50_u8;
        let of_three = group(&[(1, 1), (2, 3), (3, 1)]);
        let mut facts = vec![vxlan_link(VXLAN, VNI, Some(BRIDGE)), of_three.clone(), member(1), member(2), member(3)];
        facts.splice(1..1, hosts.clone().map(|n| entry(n, false)));
        facts.iter().for_each(|message| mirror.apply(message));
        reader.take(&mut mirror);
        let before = reader.clone();
        assert_eq!(before.macs.len(), hosts.len());
        assert!(before.macs.values().all(|place| *place == ExternalPlace::Group(10)));
        let members = |all: &[(u8, u16)]| -> ExternalGroup { all.iter().map(|(n, it)| (vtep(*n), *it)).collect() };
        assert_eq!(before.groups[&10], members(&[(1, 1), (2, 3), (3, 1)]));
        assert_eq!(before.groups[&2], members(&[(2, 1)]), "an object with one VTEP is a group too");
        let mut shuffled = facts.clone();
        fastrand::Rng::with_seed(3).shuffle(&mut shuffled);
        let (mut other, mut its_reader) = (watching(), Reader::default());
        shuffled.iter().for_each(|message| other.apply(message));
        its_reader.take(&mut other);
        assert_eq!(its_reader, before);

        // The second one leaves the group, and returns.
        let mut after = |message: &Message| {
            mirror.apply(message);
            let changes = mirror.changes.clone();
            assert!(changes.macs.is_empty(), "{changes:?}");
            reader.take(&mut mirror);
            reader.groups.get(&10).cloned().unwrap_or_default()
        };
        assert_eq!(after(&group(&[(1, 1), (3, 1)])), members(&[(1, 1), (3, 1)]));
        assert_eq!(after(&of_three), before.groups[&10]);
        // A member is removed, gets another VTEP, and that of another member, without a change of the group.
        assert_eq!(after(&nexthop(1, None)), members(&[(2, 3), (3, 1)]));
        assert_eq!(after(&nexthop(1, Some(NexthopTarget::Vtep(vtep(7))))), members(&[(2, 3), (3, 1), (7, 1)]));
        assert_eq!(after(&nexthop(1, Some(NexthopTarget::Vtep(vtep(2))))), members(&[(2, 4), (3, 1)]));
        // A group of groups has no address. Neither has one that has itself as a member.
        assert_eq!(after(&nexthop(1, Some(NexthopTarget::Group(vec![(10, 1), (1, 1)])))), members(&[(2, 3), (3, 1)]));
        assert_eq!(after(&group(&[(1, 1), (10, 1)])), members(&[]));
        // A dump without the group and its entries.
        mirror.begin();
        mirror.apply(&vxlan_link(VXLAN, VNI, Some(BRIDGE)));
        mirror.finish();
        reader.take(&mut mirror);
        assert_eq!(reader, Reader::default());
        let left = |mirror: &Mirror| {
            let of_groups = (mirror.nexthops(), mirror.member_of.len(), mirror.groups.len());
            (of_groups, mirror.users.len(), mirror.tunnel_entries)
        };
        assert_eq!(left(&mirror), ((0, 0, 0), 0, 0));
        // Entries of an object that no message was about, as after a loss.
        facts[..5].iter().for_each(|message| mirror.apply(message));
        mirror.apply(&nexthop(10, None));
        assert_eq!((mirror.users.len(), mirror.tunnel_entries), (0, 0));
        // The group is removed with its entries.
        facts.iter().for_each(|message| mirror.apply(message));
        mirror.apply(&nexthop(10, None));
        reader.take(&mut mirror);
        assert_eq!((reader.macs.len(), reader.groups.len()), (0, 3));
        assert_eq!(left(&mirror), ((3, 0, 3), 0, 0));
    }

    #[test]
    fn a_full_table_refuses_more_and_takes_no_memory_for_them() {
        let mut mirror = watching();
        mirror.apply(&vxlan_link(VXLAN, VNI, Some(BRIDGE)));
        let host = |n: usize| MacAddr::new(2, 1, 0, 0, (n >> 8) as u8, n as u8);
        (0..1000).for_each(|n| mirror.apply(&tunnel(host(n), 1, false)));
        assert_eq!((mirror.tunnel_entries, mirror.stats.refused), (MAX_ENTRIES, 1000 - MAX_ENTRIES as u64));
        assert_eq!(mirror.tunnels[&VXLAN].len(), MAX_ENTRIES);
        assert_eq!(mirror.counts(VNI).macs, MAX_ENTRIES);
        // A place that becomes free is taken.
        mirror.apply(&tunnel(host(0), 1, true));
        mirror.apply(&tunnel(host(999), 1, false));
        assert_eq!((mirror.tunnel_entries, mirror.counts(VNI).macs), (MAX_ENTRIES, MAX_ENTRIES));
    }
}
