//! The control-thread part of a gateway: neighbours, learning, ageing, and the frames that the gateway itself
//! sends.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use serde_json::{Value, json};
use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_pmd::port::{Link, LinkState, PortEvent, PortId};
use wirepath_wire::build::OuterHeaders;
use wirepath_wire::{EtherType, MacAddr, Parser, Tag, Tunnels, vlan};

use super::bfd::BfdControl;
use super::bindings::{Bindings, PublishedBindings};
use super::config::{GatewayConfig, SegmentConfig, UnderlayConfig, UnderlayControl};
use super::counters::SegmentStats;
use super::encap::encapsulate;
use super::external::External;
use super::filter::Filters;
use super::groups::RemoteGroups;
use super::headers::{ETHERNET_LEN, VLAN_TAG_LEN};
use super::learned::{LearnedRemoteStats, LearnedRemotes};
use super::learning::RareLog;
use super::move_damping::MoveDamping;
use super::neighbour::{Millis, NeighbourAction, NeighbourState};
use super::next_hops::{KernelNextHop, NextHops};
use super::outer::{TunnelId, outer_headers};
use super::outer_fragments::FragmentIds;
use super::path_mtu::PathMtus;
use super::places::Places;
use super::policer::{ExpectedReplies, KnownHosts};
use super::router::RouterControl;
use super::router::config::RoutingConfig;
use super::stage::{Flow, Gateway, GatewayTables, MAX_HOST_FRAME, PuntCode};
use super::tables::{Destination, Layout, NextHop, NicNumbers, Remote, Remotes};
use super::underlay::{Addresses, HostReply};
use crate::epoch::{Domain, Shared};
use crate::observe::FollowedSegment;
use crate::registry::{Change, Changed, ObjectSpec, Page, TableSpec};
use crate::rules::offload::Placement;
use crate::table::{FdbLimits, FdbWriter, Key};
use crate::{Control, ControlPlane, Learn, PortInfo, Punt, WorkerInfo};

/// Minimum milliseconds between two log messages about address conflicts.
const CONFLICT_LOG_INTERVAL: Millis = 10_000;

/// Learning counters of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnStats {
    /// Addresses learned.
    pub learned: u64,
    /// Addresses that moved.
    pub moved: u64,
    /// Addresses removed because they were not seen.
    pub aged: u64,
    /// Addresses not learned because a limit was reached.
    pub refused: u64,
    /// Addresses that moved too often and stay where they are for a time.
    pub frozen: u64,
    /// Moves of frozen addresses, or from a sticky place, that were not followed.
    pub moves_refused: u64,
    /// IP addresses learned from ARP and ND messages.
    pub bindings_learned: u64,
    /// IP addresses that moved to another Ethernet address.
    pub bindings_moved: u64,
    /// IP addresses not learned because of a limit or another binding.
    pub bindings_refused: u64,
}

/// The part of a remote that only the control thread needs.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) local: IpAddr,
    pub(super) next_hop: Option<IpAddr>,
    /// Ethernet address of the next hop.
    pub(super) mac: Option<MacAddr>,
    /// Valid ICMP errors about packets to the remote that were too long.
    pub(super) too_big_messages: u64,
}

impl Route {
    pub(super) fn new(local: IpAddr, next_hop: Option<IpAddr>) -> Self {
        Self { local, next_hop, mac: None, too_big_messages: 0 }
    }
}

/// A tunnel to a remote, for the offload to a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Index of the remote: the number that [`GatewayControl::encapsulated_by_nic`] takes and that the marks of
    /// decapsulated packets carry.
    pub index: u32,
    /// Identifier of the segment in tunnel headers.
    pub id: TunnelId,
    /// The gateway's address.
    pub local: IpAddr,
    /// Address of the remote.
    pub remote: IpAddr,
    /// Address of the next hop, if there is a route.
    pub gateway: Option<IpAddr>,
    /// Ethernet address of the next hop, if it is known.
    pub next_hop: Option<MacAddr>,
    /// The gateway's Ethernet address.
    pub mac: MacAddr,
}

/// Where the packets of a remote get and lose their outer headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelPlacement {
    /// Place of the encapsulation.
    pub encap: Placement,
    /// Place of the decapsulation.
    pub decap: Placement,
}

/// The control-thread state of one gateway.
pub struct GatewayControl {
    pub(super) config: GatewayConfig,
    pub(super) places: Places,
    /// As published.
    pub(super) layout: Arc<Layout>,
    pub(super) tables: GatewayTables,
    pub(super) workers: usize,
    pools: Vec<wirepath_packet::Pool>,
    /// Next hops of the underlay.
    pub(super) next_hops: NextHops,
    pub(super) fdb: FdbWriter,
    /// The remotes as published, or to be published next if `dirty` is true.
    pub(super) list: Vec<Remote>,
    pub(super) routes: Vec<Route>,
    pub(super) learned: LearnedRemotes,
    /// Remotes and addresses from another control plane.
    pub(super) external: External,
    /// Routers of the segments.
    pub(super) router: RouterControl,
    /// BFD sessions with the remotes.
    pub(super) bfd: BfdControl,
    /// Rules of segments and VRFs.
    pub(super) filters: Filters,
    /// True if [`KnownHosts`] must be published again.
    pub(super) known_hosts_changed: bool,
    pub(super) dirty: bool,
    /// MTU of the underlay in bytes: that of the configuration, or a lower one of the interface.
    pub(super) underlay_mtu: u16,
    /// MTUs of the paths to remotes that are lower.
    pub(super) path_mtus: PathMtus,
    decapsulated_by_nic: bool,
    /// Places of the configured tunnels, by the index of the remote; `None`: no NIC has tunnels.
    pub(super) nic_placements: Option<HashMap<u32, TunnelPlacement>>,
    /// Number of changes of the underlay's settings, which all tunnels have in common.
    pub(super) underlay_version: u64,
    pub(super) learns: Vec<LearnStats>,
    pub(super) move_damping: MoveDamping,
    pub(super) bindings: Bindings,
    /// Segments that captures follow, with their names.
    pub(super) followed_segments: Vec<(String, FollowedSegment)>,
    pub(super) refusal_log: RareLog,
    pub(super) frozen_log: RareLog,
    pub(super) path_mtu_log: RareLog,
    conflicts: u64,
    conflict_logged_at: Option<Millis>,
    pub(super) aged_at: u32,
}

impl std::fmt::Debug for GatewayControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayControl").field("remotes", &self.list.len()).finish_non_exhaustive()
    }
}

impl GatewayControl {
    /// Creates the gateway of a checked configuration. `ports` are the configured ports in order. `seconds`
    /// is the current second (see [`ControlPlane::seconds`]).
    pub fn new(config: &GatewayConfig, ports: &[PortInfo], domain: &Domain, workers: usize, seconds: u32) -> Self {
        let layout = Arc::new(Layout::new(&config.underlay, ports));
        let fdb = FdbWriter::new(domain, FdbLimits::default(), seconds);
        let expected_replies = Arc::new(ExpectedReplies::new());
        let router = RouterControl::new(domain, Arc::clone(&expected_replies));
        let tables = GatewayTables {
            layout: Arc::new(Shared::new(domain, Arc::clone(&layout))),
            remotes: Arc::new(Shared::new(domain, Remotes::default())),
            groups: Arc::new(Shared::new(domain, RemoteGroups::default())),
            fdb: fdb.fdb(),
            bindings: Arc::new(Shared::new(domain, PublishedBindings::default())),
            claims: Arc::new(ArrayQueue::new(super::suppression::CLAIMS)),
            known_hosts: Arc::new(Shared::new(domain, KnownHosts::default())),
            routes: router.tables(),
            hops: router.hops(),
            expected_replies,
            fragment_ids: Arc::new(FragmentIds::new()),
        };
        let underlay = &config.underlay;
        let mut control = Self {
            config: GatewayConfig {
                underlay: underlay.clone(),
                segments: Vec::new(),
                routing: RoutingConfig::none(),
                bfd: None,
            },
            places: Places::new(),
            underlay_mtu: layout.underlay.mtu,
            path_mtus: PathMtus::default(),
            next_hops: NextHops::new(
                Addresses {
                    mac: layout.underlay.mac,
                    addresses: underlay.addresses.clone(),
                    gateways: underlay.gateways.clone(),
                },
                underlay.control == UnderlayControl::Kernel,
            ),
            layout,
            tables,
            workers,
            pools: ports.iter().map(|port| port.pool.clone()).collect(),
            fdb,
            list: Vec::new(),
            routes: Vec::new(),
            learned: LearnedRemotes::default(),
            external: External::default(),
            router,
            bfd: BfdControl::new(),
            filters: Filters::new(domain, workers),
            known_hosts_changed: false,
            dirty: false,
            decapsulated_by_nic: false,
            nic_placements: None,
            underlay_version: 0,
            learns: Vec::new(),
            move_damping: MoveDamping::default(),
            bindings: Bindings::default(),
            followed_segments: Vec::new(),
            refusal_log: RareLog::default(),
            frozen_log: RareLog::default(),
            path_mtu_log: RareLog::default(),
            conflicts: 0,
            conflict_logged_at: None,
            aged_at: seconds,
        };
        // All indices are free.
        if let Ok(places) = control.places.after(&control.config, config, |_, _| None, seconds) {
            control.install(config.clone(), places, ports, seconds);
        }
        control
    }

    /// Creates the stage of a worker.
    pub fn stage(&self, worker: &WorkerInfo) -> Gateway {
        let pool = self.pools[self.config.underlay.port].clone();
        Gateway::new(self.tables.clone(), worker.index, pool)
    }

    /// Iterates over the tunnels to configured remotes.
    ///
    /// Tunnels to learned remotes come and go, and anybody who reaches the underlay can add one. NICs
    /// therefore do not get them.
    pub fn tunnels(&self) -> impl Iterator<Item = Tunnel> {
        self.places.remotes().filter_map(|index| {
            let (to, route) = (self.list.get(index as usize)?, self.routes.get(index as usize)?);
            Some(Tunnel {
                index,
                id: tunnel_id(&self.layout, to.segment),
                local: route.local,
                remote: to.address,
                gateway: route.next_hop,
                // A remote that carries nothing needs no headers in the NIC.
                next_hop: route.mac.filter(|_| self.bfd.out(index).is_none()),
                mac: self.layout.underlay.mac,
            })
        })
    }

    /// Number of changes of the settings that all tunnels have in common: VLAN, TTL, DSCP, checksum and source ports.
    pub fn underlay_version(&self) -> u64 {
        self.underlay_version
    }

    /// The gateway's Ethernet address on the underlay. Routers without one of their own have it too.
    pub fn mac(&self) -> MacAddr {
        self.layout.underlay.mac
    }

    /// Enables packets that the NIC has decapsulated. Their mark consists of
    /// [`IMPLICIT_MARK`](crate::rules::offload::IMPLICIT_MARK) and the index of the remote.
    pub fn decapsulated_by_nic(&mut self) {
        if !std::mem::replace(&mut self.decapsulated_by_nic, true) {
            self.dirty = true;
            self.publish();
        }
    }

    /// Sets the transmit metadata for which the NIC adds the outer headers of this remote; `None`: the
    /// workers add them. The workers also add them after the next hop has changed. They see the change after
    /// [`Self::publish_nic_tunnels`].
    pub fn encapsulated_by_nic(&mut self, remote: usize, numbers: Option<NicNumbers>) {
        let Some(next_hop) = self.list.get_mut(remote).map(|remote| &mut remote.next_hop) else { return };
        *next_hop = match *next_hop {
            NextHop::Ready(template) | NextHop::InNic(template, _) => NextHop::resolved(template, numbers),
            NextHop::Held(template, _) => NextHop::Held(template, numbers),
            NextHop::Resolving | NextHop::Unreachable | NextHop::Out => return,
        };
        self.dirty = true;
    }

    /// Repeats [`Self::encapsulated_by_nic`] for a remote whose next hop was lost and has returned unchanged meanwhile.
    pub fn restore_nic_numbers(&mut self, remote: usize, numbers: NicNumbers) {
        if matches!(self.list.get(remote).map(|remote| &remote.next_hop), Some(NextHop::Ready(_))) {
            self.encapsulated_by_nic(remote, Some(numbers));
        }
    }

    /// Takes the places of the configured tunnels for operators, by the index of the remote; `None`: no NIC has any.
    pub fn set_nic_placements(&mut self, placements: Option<HashMap<u32, TunnelPlacement>>) {
        self.nic_placements = placements;
    }

    /// Makes the workers see the changes of [`Self::encapsulated_by_nic`].
    pub fn publish_nic_tunnels(&mut self) {
        self.publish();
    }

    /// Returns the tables that the workers read.
    pub fn worker_tables(&self) -> &GatewayTables {
        &self.tables
    }

    /// Returns the forwarding table, for entries inserted by the caller. The segments of the first configuration are
    /// numbered from 0 in its order.
    pub fn fdb(&mut self) -> &mut FdbWriter {
        &mut self.fdb
    }

    /// Sets the Ethernet address of a next hop without resolving it, for benchmarks.
    pub fn set_next_hop(&mut self, next_hop: IpAddr, mac: MacAddr) {
        self.set_next_hop_state(next_hop, Some(mac), NeighbourState::Reachable);
        self.publish();
    }

    /// Sets the Ethernet address of a neighbour in the segment with this position, to which a route leads, without
    /// resolving it, for benchmarks.
    pub fn set_neighbour(&mut self, position: usize, address: IpAddr, mac: MacAddr) {
        if let Some(place) = self.places.segments.get(position) {
            self.router.set_address(place.index, address, mac);
        }
    }

    /// Returns the counters of a segment by its position in the configuration, summed over the workers.
    pub fn segment_stats(&self, position: usize) -> SegmentStats {
        let index = self.places.segments.get(position).map(|place| usize::from(place.index));
        let segment = index.and_then(|index| self.layout.segments.get(index));
        segment.map(|segment| SegmentStats::of(&segment.counters)).unwrap_or_default()
    }

    /// Returns the learning counters of a segment by its position in the configuration.
    pub fn learn_stats(&self, position: usize) -> LearnStats {
        let index = self.places.segments.get(position).map(|place| usize::from(place.index));
        index.and_then(|index| self.learns.get(index)).copied().unwrap_or_default()
    }

    /// Returns the configuration of the segment with this index.
    pub(super) fn segment_config(&self, index: u16) -> Option<&SegmentConfig> {
        self.config.segments.get(self.places.position(index)?)
    }

    /// Returns whether a remote is configured or was learned and not removed.
    pub(super) fn is_live(&self, remote: u32) -> bool {
        self.list.get(remote as usize).is_some_and(|remote| !remote.address.is_unspecified())
    }

    /// Returns whether a segment has an attachment.
    pub(super) fn has_attachment(&self, segment: u16, attachment: u32) -> bool {
        let attachments = self.layout.segments.get(usize::from(segment)).map(|segment| &segment.attachments);
        attachments.is_some_and(|attachments| attachments.contains(&attachment))
    }

    /// Returns the ports and segments as the workers see them.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the configuration.
    pub fn config(&self) -> &GatewayConfig {
        &self.config
    }

    /// Iterates over all neighbours: address, state and Ethernet address.
    pub fn neighbours(&self) -> impl Iterator<Item = (IpAddr, NeighbourState, Option<MacAddr>)> {
        self.next_hops.list().into_iter()
    }

    /// Removes and returns at most `limit` destinations whose next hop the gateway needs from the kernel (true), or no
    /// longer needs. Empty if the gateway resolves next hops itself.
    pub fn take_next_hop_requests(&mut self, limit: usize) -> Vec<(IpAddr, bool)> {
        self.next_hops.take_requests(limit)
    }

    /// Takes the kernel's next hops to destinations; `None`: the kernel has none.
    pub fn set_kernel_next_hops(
        &mut self,
        next_hops: impl IntoIterator<Item = (IpAddr, Option<KernelNextHop>)>,
        plane: &mut ControlPlane,
    ) {
        for (to, next_hop) in next_hops {
            self.next_hops.set_kernel(to, next_hop);
        }
        self.run_actions(plane);
    }

    /// Returns the numbers of remotes learned and removed since the start.
    pub fn learned_remote_stats(&self) -> LearnedRemoteStats {
        self.learned.stats
    }

    /// Number of learned remotes.
    pub fn learned_remotes(&self) -> usize {
        self.learned.len()
    }

    /// Number of frames that wait for their next hop.
    pub fn waiting_frames(&self) -> usize {
        self.next_hops.waiting() + self.router.waiting()
    }

    /// Returns whether nothing needs the timers within the next tens of milliseconds: no packet waits, no BFD session
    /// sends, and no change is due.
    pub fn is_at_rest(&self) -> bool {
        self.waiting_frames() == 0 && self.bfd.is_empty() && !self.external.has_changes() && !self.dirty
    }

    /// Number of routes of all VRFs, with those of neighbours.
    pub fn routes(&self) -> usize {
        self.router.len()
    }

    /// Number of forwarding entries.
    pub fn fdb_entries(&self) -> usize {
        self.fdb.len()
    }

    /// Number of times that another host used one of the gateway's addresses.
    pub fn conflicts(&self) -> u64 {
        self.conflicts
    }

    fn template(&self, remote: usize, mac: MacAddr) -> Option<OuterHeaders> {
        let (to, route) = (self.list.get(remote)?, self.routes.get(remote)?);
        let segment = self.segment_config(to.segment)?;
        let macs = (self.layout.underlay.mac, mac);
        outer_headers(&self.config.underlay, segment, macs, (route.local, to.address)).ok()
    }

    /// Updates the state of a next hop. [`Self::publish`] makes it visible to the workers.
    pub(super) fn set_next_hop_state(&mut self, next_hop: IpAddr, mac: Option<MacAddr>, state: NeighbourState) {
        for remote in self.next_hops.users(next_hop).to_vec() {
            self.set_remote_state(remote, mac, Some(state));
        }
    }

    /// Updates the state of the next hop of one remote.
    pub(super) fn set_remote_state(&mut self, remote: u32, mac: Option<MacAddr>, state: Option<NeighbourState>) {
        if let Some(route) = self.routes.get_mut(remote as usize) {
            route.mac = mac;
        }
        self.known_hosts_changed = true;
        let next_hop = match mac.and_then(|mac| self.template(remote as usize, mac)) {
            _ if self.bfd.out(remote).is_some() => NextHop::Out,
            Some(template) => NextHop::Ready(template),
            None if state == Some(NeighbourState::Failed) => NextHop::Unreachable,
            None => NextHop::Resolving,
        };
        if let Some(remote) = self.list.get_mut(remote as usize) {
            remote.next_hop = next_hop;
            self.dirty = true;
        }
    }

    /// Makes the workers hold the frames for a resolved next hop, or send them again.
    fn hold_next_hop(&mut self, next_hop: IpAddr, held: bool) {
        for remote in self.next_hops.users(next_hop) {
            let Some(Remote { next_hop, .. }) = self.list.get_mut(*remote as usize) else { continue };
            *next_hop = match *next_hop {
                NextHop::Ready(template) if held => NextHop::Held(template, None),
                NextHop::InNic(template, numbers) if held => NextHop::Held(template, Some(numbers)),
                NextHop::Held(template, numbers) if !held => NextHop::resolved(template, numbers),
                other => other,
            };
        }
        self.dirty = true;
    }

    /// Takes a new Ethernet address of the underlay port, and announces it.
    fn change_mac(&mut self, mac: MacAddr) {
        let mut layout = Layout::clone(&self.layout);
        let old = std::mem::replace(&mut layout.underlay.mac, mac);
        for (segment, place) in self.config.segments.iter().zip(&self.places.segments) {
            // The router has the address of the underlay port.
            if segment.router.as_ref().is_some_and(|router| router.mac.is_none())
                && let Some(published) = layout.segments.get_mut(usize::from(place.index))
                && let Some(router) = &mut published.router
            {
                router.mac = mac;
                // No frame of a layer-3 tunnel is addressed to its router.
                if !segment.is_routed_tunnel() {
                    self.fdb.remove(Key::new(place.index, old));
                    self.fdb.insert_static(Key::new(place.index, mac), Destination::Router.pack());
                }
                self.router.set_mac(place.index, mac);
            }
        }
        self.publish_layout(layout);
        self.next_hops.set_mac(mac);
        let known = |ip: IpAddr| Some((ip, self.next_hops.mac(ip)?));
        let reached: Vec<_> = self.next_hops.used().filter_map(known).collect();
        for (next_hop, mac) in reached {
            self.set_next_hop_state(next_hop, Some(mac), NeighbourState::Reachable);
        }
        self.publish();
    }

    /// Takes the MTU of the underlay's interface. Senders of packets that no longer fit get ICMP messages, as those of
    /// Linux' VXLAN devices do (linux: net/ipv4/ip_tunnel_core.c, `skb_tunnel_check_pmtu`).
    fn change_mtu(&mut self, mtu: u32) {
        self.underlay_mtu = u16::try_from(mtu).unwrap_or(u16::MAX).min(self.layout.underlay.mtu);
        self.update_max_frames(|_| true);
        self.publish();
    }

    /// Publishes ports and segments to the workers.
    pub(super) fn publish_layout(&mut self, layout: Layout) {
        self.layout = Arc::new(layout);
        self.tables.layout.replace(Arc::clone(&self.layout));
    }

    /// Publishes changed remotes to the workers.
    pub(super) fn publish(&mut self) {
        if std::mem::take(&mut self.dirty) {
            let layout = &self.layout;
            let mut remotes = Remotes::new(self.list.clone(), |segment| tunnel_id(layout, segment));
            remotes.decapsulated_by_nic = self.decapsulated_by_nic;
            self.tables.remotes.replace(remotes);
        }
    }

    /// Publishes the next hops and remotes to the workers.
    pub(super) fn publish_known_hosts(&self) {
        let indices = self.places.remotes().chain(self.learned.contacted());
        let at = |index: u32| Some((self.list.get(index as usize)?, self.routes.get(index as usize)?));
        let remotes: Vec<_> = indices.filter_map(at).collect();
        let path = |(remote, route): &(&Remote, &Route)| {
            (tunnel_id(&self.layout, remote.segment).kind, route.local, remote.address)
        };
        let mut hosts = KnownHosts {
            addresses: remotes.iter().map(|(remote, _)| remote.address).chain(self.next_hops.used()).collect(),
            // Nothing was sent to a remote whose next hop never answered.
            paths: remotes.iter().filter(|(_, route)| route.mac.is_some()).map(path).collect(),
            macs: self.routes.iter().filter_map(|route| route.mac).collect(),
            ..KnownHosts::default()
        };
        self.bfd.publish(&mut hosts);
        self.tables.known_hosts.replace(hosts);
    }

    /// Sends a frame of the gateway itself to the underlay.
    pub(super) fn send_frame(&self, plane: &mut ControlPlane, frame: &[u8]) {
        plane.count_generated();
        let port = self.layout.underlay.port;
        let packet = plane.pool(port).and_then(|pool| {
            let mut packet = pool.take()?;
            packet.extend_from_slice(frame, pool).then_some(packet)
        });
        let Some(mut packet) = packet else {
            plane.count_drops(DropReason::NoBuffer, 1);
            return;
        };
        if let Some(id) = self.config.underlay.vlan
            && packet.prepend_slice(VLAN_TAG_LEN).is_some()
        {
            vlan::push(packet.data_mut(), Tag::new(id));
        }
        plane.send(port, packet);
    }

    /// Executes the actions of the neighbour state machine.
    fn run_actions(&mut self, plane: &mut ControlPlane) {
        for action in self.next_hops.take_actions() {
            match action {
                NeighbourAction::Solicit(ip, to) => {
                    if let Some(frame) = self.next_hops.addresses().solicitation(ip, to) {
                        self.tables.expected_replies.expect(ip);
                        self.send_frame(plane, &frame);
                    }
                }
                NeighbourAction::Resolved(ip, mac) => {
                    match self.next_hops.via(ip) {
                        Some(via) if via != ip => tracing::info!("next hop {via} to {ip} is at {mac}"),
                        _ => tracing::info!("next hop {ip} is at {mac}"),
                    }
                    self.set_next_hop_state(ip, Some(mac), NeighbourState::Reachable);
                }
                NeighbourAction::Unreachable(ip) => {
                    let state = self.next_hops.state(ip).unwrap_or(NeighbourState::Failed);
                    if state == NeighbourState::Failed {
                        let what = if self.next_hops.are_kernels() {
                            "the kernel has no next hop to"
                        } else {
                            "no answer from next hop"
                        };
                        tracing::warn!("{what} {ip}; packets for it are dropped as no_neighbour");
                    }
                    self.set_next_hop_state(ip, None, state);
                }
                NeighbourAction::Hold(ip) => self.hold_next_hop(ip, true),
                NeighbourAction::Release(ip) => self.hold_next_hop(ip, false),
                NeighbourAction::Send(_, (packet, remote)) => self.send_queued(plane, packet, remote),
                NeighbourAction::Drop((packet, _)) => plane.drop(packet, DropReason::NoNeighbour),
            }
        }
        self.publish();
    }

    /// Sends a frame that waited for its next hop.
    fn send_queued(&mut self, plane: &mut ControlPlane, mut packet: Packet, remote: u32) {
        let underlay = &self.layout.underlay;
        let len = packet.len();
        let Some(to) = self.list.get(remote as usize) else {
            return plane.drop(packet, DropReason::NoNeighbour);
        };
        let Remote { next_hop, segment, sequence, .. } = to;
        let (NextHop::Ready(template) | NextHop::InNic(template, _) | NextHop::Held(template, _)) = next_hop else {
            return plane.drop(packet, DropReason::NoNeighbour);
        };
        let flow =
            Flow::from_frame(packet.data(), packet.len(), &Parser { tunnels: Tunnels::NONE, ..Parser::default() });
        match encapsulate(&mut packet, template, underlay, flow, sequence) {
            Ok(()) => {
                self.layout.count_overlay_tx(*segment, self.workers, 1, len);
                if len > to.max_frame && to.max_fragmented > 0 && !packet.flags().contains(Flags::TX_SEGMENT) {
                    return self.send_fragments(plane, packet, template, to);
                }
                plane.send(underlay.port, packet);
            }
            Err(reason) => plane.drop(packet, reason),
        }
    }

    /// Sends a tunnel packet that is longer than the path takes.
    fn send_fragments(&self, plane: &mut ControlPlane, packet: Packet, template: &OuterHeaders, to: &Remote) {
        let port = self.layout.underlay.port;
        let Some(pool) = plane.pool(port).cloned() else { return plane.drop(packet, DropReason::NoBuffer) };
        let mut fragments = match self.tables.fragment_ids.divide(packet, template, to) {
            Ok(fragments) => fragments,
            Err((packet, reason)) => return plane.drop(packet, reason),
        };
        // One of the fragments stands for the packet.
        (1..fragments.remaining()).for_each(|_| plane.count_generated());
        while let Some(fragment) = fragments.next_fragment(&pool) {
            match fragment {
                Ok(fragment) => {
                    if let Some(counters) = self.layout.counters(to.segment, self.workers) {
                        counters.outer_fragments.add(1);
                    }
                    plane.send(port, fragment);
                }
                Err(reason) => plane.count_drops(reason, 1),
            }
        }
    }

    /// Processes an ARP or ND message.
    fn handle_host_frame(&mut self, plane: &mut ControlPlane, packet: Packet) {
        if packet.len() > MAX_HOST_FRAME {
            return plane.drop(packet, DropReason::TooLong);
        }
        let mut frame = vec![0; packet.len()];
        packet.copy_to(&mut frame);
        let kind = if frame.get(12..14) == Some(&EtherType::ARP.0.to_be_bytes()) { "arp" } else { "nd" };
        let now = plane.now() / 1_000_000;
        let outcome = self.next_hops.handle(&frame, now);
        self.run_actions(plane);
        if let Some((address, mac)) = outcome.conflict {
            self.conflicts += 1;
            if self.conflict_logged_at.is_none_or(|at| now >= at + CONFLICT_LOG_INTERVAL) {
                self.conflict_logged_at = Some(now);
                tracing::warn!(
                    "{mac} uses {address} too, which is an address of this gateway; one of the two must change"
                );
            }
        }
        match outcome.reply {
            HostReply::None => plane.consume(packet, kind),
            HostReply::Drop(reason) => plane.drop(packet, reason),
            HostReply::Frame(frame) => {
                plane.consume(packet, kind);
                self.send_frame(plane, &frame);
            }
        }
    }

    /// Processes a tunnel packet from an unknown VTEP in a segment that accepts such packets. Adds the remote
    /// and returns the packet to the worker.
    fn learn_remote(&mut self, plane: &mut ControlPlane, mut packet: Packet, worker: usize) {
        let frame = packet.data();
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        let found = parser.parse_stack(frame, 0, packet.len()).ok().and_then(|outer| {
            let (source, dst) = outer.ip_addresses(frame)?;
            let found = self.layout.underlay.find_tunnel(frame, &outer, dst)?.read(frame).ok()?;
            Some((found.id, source))
        });
        let Some((id, source)) = found else { return plane.drop(packet, DropReason::BadTunnelHeader) };
        let Some(segment) = self.layout.segment_of(id) else {
            return plane.drop(packet, DropReason::UnknownVni);
        };
        let known = self.list.iter().any(|r| r.address == source && tunnel_id(&self.layout, r.segment) == id);
        if !known {
            if let Err(reason) = self.add_learned_remote(segment, source, plane.seconds()) {
                return plane.drop(packet, reason);
            }
            tracing::debug!("remote {source} joins the segment of {id}");
            self.run_actions(plane);
        }
        if let Some(id) = self.config.underlay.vlan {
            // The worker removed the tag before and expects it again.
            packet.set_vlan(id);
        }
        plane.enqueue_to_worker(worker, packet);
    }

    /// Returns the index for a new learned remote. Evicts another one if there are too many.
    pub(super) fn place_for_remote(&mut self, segment: u16, now: u32) -> Option<u32> {
        if self.learned.is_full(segment) {
            let answers = |index: u32| self.routes.get(index as usize).is_some_and(|route| route.mac.is_some());
            let victim = self.learned.victim(segment, answers)?;
            self.remove_remote(victim, now);
            self.learned.stats.evicted += 1;
        }
        if self.learned.is_exhausted(now) {
            return None;
        }
        let index = self.places.remote_indices.take(now)?;
        self.learned.add(index, segment, now);
        Some(index)
    }

    /// Removes a learned remote, its forwarding entries, and its next hop if no other remote uses it.
    pub(super) fn remove_remote(&mut self, index: u32, now: u32) {
        let Some((keys, contacted)) = self.learned.remove(index, now) else { return };
        self.places.remote_indices.release(index, now);
        let destination = Destination::Remote(index).pack();
        for key in keys {
            // Meanwhile the address may have become static, or have moved.
            if self.fdb.get(key).is_some_and(|entry| entry.seen.is_some() && entry.destination == destination) {
                self.fdb.remove(key);
            }
        }
        let next_hop = self.routes.get_mut(index as usize).and_then(|route| {
            route.mac = None;
            route.next_hop.take()
        });
        self.forget_path_of(index);
        if let Some(remote) = self.list.get_mut(index as usize) {
            (remote.address, remote.next_hop) = (Ipv4Addr::UNSPECIFIED.into(), NextHop::Unreachable);
        }
        if let Some(next_hop) = next_hop {
            self.next_hops.discard(next_hop, index);
        }
        if let Some(next_hop) = next_hop.filter(|_| contacted) {
            self.next_hops.remove_user(next_hop, index);
        }
        (self.dirty, self.known_hosts_changed) = (true, true);
    }

    /// Resolves the next hop of a remote for which a frame waits.
    fn send_when_resolved(&mut self, plane: &mut ControlPlane, packet: Packet, remote: u32) {
        let Some(next_hop) = self.routes.get(remote as usize).and_then(|route| route.next_hop) else {
            return plane.drop(packet, DropReason::NoRoute);
        };
        // The next hop of a configured remote may not be resolved yet, because resolution of a long list of
        // remotes starts in several ticks.
        self.next_hops.resolve(next_hop, plane.now() / 1_000_000);
        if self.learned.contact(remote) {
            self.next_hops.add_user(next_hop, remote);
            self.known_hosts_changed = true;
            let mac = self.next_hops.mac(next_hop);
            self.set_remote_state(remote, mac, self.next_hops.state(next_hop));
        }
        self.publish();
        self.next_hops.enqueue(next_hop, (packet, remote));
        self.run_actions(plane);
    }

    /// Returns all counters as one JSON object.
    pub fn to_json(&self) -> Value {
        let traffic = |(packets, bytes): (u64, u64)| json!({ "packets": packets, "bytes": bytes });
        let segments: Vec<Value> = self
            .config
            .segments
            .iter()
            .enumerate()
            .map(|(i, segment)| {
                let (s, l) = (self.segment_stats(i), self.learn_stats(i));
                json!({
                    "name": segment.name,
                    "vni": segment.vni,
                    "kind": segment.kind.name,
                    "local_rx": traffic(s.local_rx),
                    "local_tx": traffic(s.local_tx),
                    "overlay_rx": traffic(s.overlay_rx),
                    "overlay_tx": traffic(s.overlay_tx),
                    "flooded": s.flooded,
                    "unknown_unicast": s.unknown_unicast,
                    "storm_drops": {
                        "broadcast": s.storm_drops[0],
                        "multicast": s.storm_drops[1],
                        "unknown_unicast": s.storm_drops[2],
                    },
                    "neighbour_replies": s.neighbour_replies,
                    "mirrored": s.mirrored,
                    "too_big": s.too_big,
                    "told_too_big": s.icmp_too_big,
                    "outer_fragments": s.outer_fragments,
                    "learned": l.learned,
                    "moved": l.moved,
                    "aged": l.aged,
                    "not_learned": l.refused,
                    "routed_in": traffic(s.routed_in),
                    "routed_out": traffic(s.routed_out),
                    "icmp_errors": s.icmp_errors,
                    "mss_clamped": s.mss_clamped,
                    "frozen": l.frozen,
                    "moves_refused": l.moves_refused,
                    "nic_encapsulated": s.nic_encapsulated,
                    "nic_decapsulated": s.nic_decapsulated,
                })
            })
            .collect();
        let neighbours: Vec<Value> = self
            .neighbours()
            .map(|(ip, state, mac)| {
                json!({ "address": ip.to_string(), "state": state.name(), "mac": mac.map(|mac| mac.to_string()) })
            })
            .collect();
        json!({
            "segments": segments,
            "neighbours": neighbours,
            "fdb_entries": self.fdb_entries(),
            "routes": self.routes(),
            "remotes": self.places.remotes().count() + self.learned.len(),
            "learned_remotes": {
                "now": self.learned.len(),
                "learned": self.learned.stats.learned,
                "aged": self.learned.stats.aged,
                "evicted": self.learned.stats.evicted,
            },
            "bfd_sessions": { "configured": self.bfd.counts().0, "up": self.bfd.counts().1 },
            "path_mtus": {
                "now": self.path_mtus.len(),
                "messages": self.path_mtus.stats.messages,
                "lowered": self.path_mtus.stats.lowered,
                "expired": self.path_mtus.stats.expired,
            },
            "address_conflicts": self.conflicts,
        })
    }
}

pub(super) fn tunnel_id(layout: &Layout, segment: u16) -> TunnelId {
    layout.segments.get(usize::from(segment)).map_or(TunnelId { kind: 0, id: None, sid: None }, |it| it.tunnel_id())
}

/// Maximum length of an inner frame to a remote, from the underlay's MTU and the segment's setting.
pub(super) fn max_frame(
    underlay: &UnderlayConfig,
    underlay_mtu: u16,
    segment: Option<&SegmentConfig>,
    remote: IpAddr,
) -> usize {
    let left = usize::from(underlay_mtu).saturating_sub(match segment {
        Some(segment) => segment.overhead(remote),
        None => underlay.kind.overhead(underlay.kind.header_len, remote),
    });
    let of_mtu = |segment: &SegmentConfig| Some(usize::from(segment.mtu?) + segment.link_len());
    let most = segment.and_then(of_mtu).map_or(left, |most| left.min(most));
    // The router's frames have an Ethernet header, which layer-3 tunnels do not carry.
    if segment.is_some_and(SegmentConfig::is_routed_tunnel) { most + ETHERNET_LEN } else { most }
}

impl Control for GatewayControl {
    fn tables(&mut self) -> Vec<&'static TableSpec> {
        super::listing::TABLES.to_vec()
    }

    fn list(&mut self, table: &'static TableSpec, page: &mut Page<'_>, plane: &mut ControlPlane) {
        self.list_table(table, page, plane);
    }

    fn follow_segment(&mut self, name: &str) -> Result<FollowedSegment, String> {
        let segment = FollowedSegment::new(self.segment_index(name)?);
        self.followed_segments.retain(|(_, segment)| segment.is_shared());
        self.followed_segments.push((name.to_owned(), segment.clone()));
        Ok(segment)
    }

    fn objects(&mut self) -> Vec<&'static ObjectSpec> {
        super::change::OBJECTS.to_vec()
    }

    fn change(&mut self, change: &Change<'_>, plane: &mut ControlPlane) -> Result<Changed, String> {
        self.change_object(change, plane.seconds()).map(Changed::Done)
    }

    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        match PuntCode::unpack(punt.code) {
            PuntCode::Host => self.handle_host_frame(plane, punt.packet),
            PuntCode::Bfd => self.handle_bfd(plane, punt.packet),
            PuntCode::TooBig => self.handle_too_big(plane, punt.packet),
            PuntCode::NewRemote => self.learn_remote(plane, punt.packet, punt.worker),
            PuntCode::RouterHost => self.router.handle_message(plane, punt.packet),
            PuntCode::Route => self.router.resolve(plane, punt.packet),
            PuntCode::Unresolved(remote) => self.send_when_resolved(plane, punt.packet, remote),
        }
    }

    fn learn(&mut self, learn: Learn, plane: &mut ControlPlane) {
        self.learn_address(learn, plane);
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        let now = plane.now() / 1_000_000;
        if self.next_hops.tick(now) && std::mem::take(&mut self.known_hosts_changed) {
            self.publish_known_hosts();
        }
        self.run_actions(plane);
        for frame in self.next_hops.announcements(now) {
            self.send_frame(plane, &frame);
        }
        self.router.tick(plane);
        self.tick_bfd(plane);
        let seconds = plane.seconds();
        self.update_bindings(seconds);
        if seconds != self.aged_at {
            self.aged_at = seconds;
            let (learns, learned) = (&mut self.learns, &mut self.learned);
            self.fdb.age(seconds, |entry| {
                if let Some(stats) = learns.get_mut(usize::from(entry.key.segment())) {
                    stats.aged += 1;
                }
                if let Destination::Remote(index) = Destination::unpack(entry.destination) {
                    learned.remove_key(index, entry.key, seconds);
                }
            });
            self.age_bindings(seconds);
            self.filters.collect(seconds);
            self.expire_path_mtus(seconds);
            let fdb = &mut self.fdb;
            self.move_damping.expire(seconds, |key| fdb.get(key).is_some());
            for index in self.learned.unused(seconds) {
                self.remove_remote(index, seconds);
                self.learned.stats.aged += 1;
            }
            self.run_actions(plane);
        }
    }

    fn port_event(&mut self, port: PortId, event: &PortEvent, plane: &mut ControlPlane) {
        match event {
            PortEvent::Link(Link { state: LinkState::Up, .. }) if self.layout.is_underlay(port) => {
                self.next_hops.link_returned();
            }
            PortEvent::Link(Link { state: LinkState::Down, .. }) | PortEvent::Lost(_) => {
                if matches!(event, PortEvent::Link(_)) && self.layout.is_underlay(port) {
                    self.next_hops.link_lost();
                    self.run_actions(plane);
                }
                let attachments = &self.layout.attachments;
                let is_there = |index: u32| attachments.get(index as usize).is_some_and(|a| a.port == port);
                self.fdb.flush(|entry| match Destination::unpack(entry.destination) {
                    Destination::Attachment(index) => is_there(index),
                    Destination::Remote(_) | Destination::Group(_) | Destination::Router => false,
                });
            }
            PortEvent::Address(mac) if self.layout.is_underlay(port) => self.change_mac(*mac),
            PortEvent::Mtu(mtu) if self.layout.is_underlay(port) => self.change_mtu(*mtu),
            PortEvent::Link(_)
            | PortEvent::Returned
            | PortEvent::Address(_)
            | PortEvent::Mtu(_)
            | PortEvent::Finished => {}
        }
    }

    fn before_stop(&mut self, plane: &mut ControlPlane) {
        self.stop_bfd(plane);
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        for (packet, _) in self.next_hops.drain_queues() {
            plane.drop(packet, DropReason::Stopping);
        }
        for packet in self.router.drain_queues() {
            plane.drop(packet, DropReason::Stopping);
        }
    }

    fn summary(&mut self) -> Option<Value> {
        Some(self.to_json())
    }
}
