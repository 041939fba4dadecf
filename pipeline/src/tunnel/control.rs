//! The slow half of a gateway, on the control thread: neighbours, learning, ageing, and what the gateway says itself.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::Packet;
use wirepath_pmd::port::{Link, LinkState, PortEvent, PortId};
use wirepath_wire::build::{VxlanConfig, VxlanEncap};
use wirepath_wire::{MacAddr, Parser, Tag, Tunnels, vlan};

use super::config::{GatewayConfig, StaticPlace, UnderlayConfig};
use super::counters::{GatewayCounters, SegmentStats};
use super::neighbour::{Action, Millis, Neighbours, State, Timing};
use super::stage::{Flow, Gateway, GatewayTables, PuntCode, wrap};
use super::tables::{Destination, ETHERNET, Layout, Reach, Remote, Remotes, TAG, inner_tag};
use super::underlay::{Addresses, Answer, Station, is_station};
use crate::epoch::{Domain, Shared};
use crate::table::{FdbLimits, FdbWriter, Key, Learned};
use crate::{Control, ControlPlane, Learn, PortInfo, Punt, WorkerInfo};

/// Most remotes that segments may learn beyond the configured ones.
const LEARNED_REMOTES: usize = 1024;
/// Neighbours that are first asked for in one tick: a long list must not overrun the queue to the workers.
const ASKED_PER_TICK: usize = 128;
/// Longest packet to the gateway itself that is looked at.
const LONGEST_TO_US: usize = 9216;
/// Milliseconds between two announcements of an address, and how many there are (RFC 5227 section 1.1).
const ANNOUNCE: (Millis, u32) = (2_000, 2);
/// Milliseconds between two logged conflicts.
const COMPLAIN: Millis = 10_000;

/// A frame that waits for its remote's next hop, and the remote.
type Held = (Packet, u32);

/// What the control thread counts for a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnStats {
    /// Addresses learned.
    pub learned: u64,
    /// Addresses that moved.
    pub moved: u64,
    /// Addresses forgotten because they were not seen.
    pub aged: u64,
    /// Addresses not learned because a limit was reached.
    pub refused: u64,
}

/// A remote beside what the workers know of it.
#[derive(Clone, Debug)]
struct Route {
    local: IpAddr,
    next_hop: Option<IpAddr>,
    /// Where the next hop is.
    mac: Option<MacAddr>,
}

/// A remote as whoever hands its tunnel to a NIC sees it.
#[derive(Clone, Copy, Debug)]
pub struct Tunnel {
    /// Index of the segment.
    pub segment: usize,
    /// Identifier in the overlay.
    pub vni: u32,
    /// Our address.
    pub local: IpAddr,
    /// The remote's.
    pub remote: IpAddr,
    /// Ethernet address of the next hop, if it is known.
    pub next_hop: Option<MacAddr>,
}

/// Everything of one gateway that is not in its workers.
pub struct GatewayControl {
    config: GatewayConfig,
    tables: GatewayTables,
    counters: GatewayCounters,
    workers: usize,
    pools: Vec<wirepath_pmd::packet::Pool>,
    station: Station,
    neighbours: Neighbours<Held>,
    fdb: FdbWriter,
    /// What was published last, and what goes out next if `dirty`.
    list: Vec<Remote>,
    routes: Vec<Route>,
    /// Remotes behind each next hop.
    behind: HashMap<IpAddr, Vec<u32>>,
    dirty: bool,
    opened_by_nic: bool,
    wanted: VecDeque<IpAddr>,
    actions: Vec<Action<Held>>,
    learns: Vec<LearnStats>,
    conflicts: u64,
    complained: Option<Millis>,
    announce_at: Millis,
    announcements_left: u32,
    neighbours_at: Millis,
    aged_at: u32,
}

impl std::fmt::Debug for GatewayControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayControl").field("remotes", &self.list.len()).finish_non_exhaustive()
    }
}

impl GatewayControl {
    /// Of a checked configuration; `ports` are those that it names, in its order, and `seconds` is the present second (see
    /// [`ControlPlane::seconds`]).
    pub fn new(config: &GatewayConfig, ports: &[PortInfo], domain: &Domain, workers: usize, seconds: u32) -> Self {
        let layout = Arc::new(Layout::new(config, ports));
        let addresses = Addresses {
            mac: layout.underlay.mac,
            addresses: config.underlay.addresses.clone(),
            gateways: config.underlay.gateways.clone(),
        };
        let (mut list, mut routes) = (Vec::new(), Vec::new());
        let mut fdb = FdbWriter::new(domain, FdbLimits::default(), seconds);
        for (index, segment) in config.segments.iter().enumerate() {
            let members = layout.segments.get(index).map(|s| (s.remotes.clone(), s.attachments.clone()));
            let (remotes, attachments) = members.unwrap_or_default();
            fdb.set_ageing(index as u16, segment.ageing);
            for (mac, place) in &segment.statics {
                let destination = match place {
                    StaticPlace::Remote(i) => remotes.get(*i).map(|index| Destination::Remote(*index)),
                    StaticPlace::Attachment(i) => attachments.get(*i).map(|index| Destination::Attachment(*index)),
                };
                if let Some(destination) = destination {
                    fdb.insert_static(Key::new(index as u16, mac.0), destination.pack());
                }
            }
            for remote in &segment.remotes {
                list.push(Remote {
                    address: remote.address,
                    segment: index as u16,
                    max_frame: max_frame(config, &layout, index, remote.address),
                    reach: Reach::Resolving,
                });
                routes.push(Route { local: remote.local, next_hop: addresses.next_hop(remote.address), mac: None });
            }
        }
        let mut behind: HashMap<IpAddr, Vec<u32>> = HashMap::new();
        let mut wanted = VecDeque::new();
        for (index, route) in routes.iter().enumerate() {
            let Some(next_hop) = route.next_hop else { continue };
            let remotes = behind.entry(next_hop).or_default();
            if remotes.is_empty() {
                wanted.push_back(next_hop);
            }
            remotes.push(index as u32);
        }
        let capacity = wanted.len() + LEARNED_REMOTES;
        let segments = config.segments.len();
        let first = Remotes::new(list.clone(), |segment| vni(&layout, segment));
        let tables = GatewayTables { layout, remotes: Arc::new(Shared::new(domain, first)), fdb: fdb.fdb() };
        Self {
            config: config.clone(),
            tables,
            // One more for what this thread sends itself.
            counters: GatewayCounters::new(workers + 1, segments),
            workers,
            pools: ports.iter().map(|port| port.pool.clone()).collect(),
            station: Station::new(addresses),
            neighbours: Neighbours::new(Timing { capacity, ..Timing::default() }),
            fdb,
            list,
            routes,
            behind,
            dirty: false,
            opened_by_nic: false,
            wanted,
            actions: Vec::new(),
            learns: vec![LearnStats::default(); segments],
            conflicts: 0,
            complained: None,
            announce_at: 0,
            announcements_left: ANNOUNCE.1,
            neighbours_at: 0,
            aged_at: seconds,
        }
    }

    /// The stage of a worker.
    pub fn stage(&self, worker: &WorkerInfo) -> Gateway {
        let counters = self.counters.worker(worker.index).unwrap_or_else(|| {
            // Not counted anywhere, but carried.
            (0..self.tables.layout.segments.len()).map(|_| super::counters::SegmentCounters::default()).collect()
        });
        let pool = self.pools[self.config.underlay.port].clone();
        Gateway::new(self.tables.clone(), counters, pool)
    }

    /// The remotes, by the numbers that [`Self::encapsulated_by_nic`] takes and that marks of opened packets have.
    pub fn tunnels(&self) -> impl Iterator<Item = Tunnel> {
        let tunnel = |(to, route): (&Remote, &Route)| Tunnel {
            segment: usize::from(to.segment),
            vni: vni(&self.tables.layout, to.segment),
            local: route.local,
            remote: to.address,
            next_hop: route.mac,
        };
        self.list.iter().zip(&self.routes).map(tunnel)
    }

    /// Our Ethernet address on the underlay.
    pub fn mac(&self) -> MacAddr {
        self.tables.layout.underlay.mac
    }

    /// From here on, marks of packets from the underlay may say that the NIC has taken their outer headers off:
    /// [`OWN`](crate::rules::hardware::OWN) and the number of the remote.
    pub fn opened_by_nic(&mut self) {
        (self.opened_by_nic, self.dirty) = (true, true);
        self.publish();
    }

    /// The NIC puts the headers of this remote on packets with this transmit metadata; `None`: the workers do it again. When the next hop
    /// moves they do, too.
    pub fn encapsulated_by_nic(&mut self, remote: usize, number: Option<u32>) {
        let Some(reach) = self.list.get_mut(remote).map(|remote| &mut remote.reach) else { return };
        if let Reach::Ready(template) | Reach::InNic(template, _) = *reach {
            *reach = number.map_or(Reach::Ready(template), |number| Reach::InNic(template, number));
            self.dirty = true;
            self.publish();
        }
    }

    /// What the workers read.
    pub fn tables(&self) -> &GatewayTables {
        &self.tables
    }

    /// The forwarding table, to put entries in by hand. Segments count from 0 in the order of the configuration.
    pub fn fdb(&mut self) -> &mut FdbWriter {
        &mut self.fdb
    }

    /// Says where a next hop is without asking for it: for measurements.
    pub fn bind(&mut self, next_hop: IpAddr, mac: MacAddr) {
        self.reach(next_hop, Some(mac), State::Reachable);
        self.publish();
    }

    /// Sum over the workers for a segment.
    pub fn segment_stats(&self, segment: usize) -> SegmentStats {
        self.counters.segment(segment)
    }

    /// What was learned in a segment.
    pub fn learn_stats(&self, segment: usize) -> LearnStats {
        self.learns.get(segment).copied().unwrap_or_default()
    }

    /// The configuration.
    pub fn config(&self) -> &GatewayConfig {
        &self.config
    }

    /// All neighbours: address, state, Ethernet address.
    pub fn neighbours(&self) -> impl Iterator<Item = (IpAddr, State, Option<MacAddr>)> {
        self.neighbours.iter()
    }

    /// Number of forwarding entries.
    pub fn fdb_entries(&self) -> usize {
        self.fdb.len()
    }

    /// Times that another station was seen with an address of ours.
    pub fn conflicts(&self) -> u64 {
        self.conflicts
    }

    fn template(&self, remote: usize, mac: MacAddr) -> Option<VxlanEncap> {
        let (to, route) = (self.list.get(remote)?, self.routes.get(remote)?);
        let (u, layout): (&UnderlayConfig, _) = (&self.config.underlay, &self.tables.layout);
        let tag = u.vlan.map(Tag::new);
        let config = VxlanConfig {
            src_mac: layout.underlay.mac,
            dst_mac: mac,
            tags: tag.as_slice(),
            src: route.local,
            dst: to.address,
            dst_port: u.udp_port,
            vni: wirepath_wire::Vni::from_low_bits(vni(layout, to.segment)),
            ttl: u.ttl,
            traffic_class: u.dscp.unwrap_or(0) << 2,
            flow_label: 0,
            checksum: u.checksum,
        };
        VxlanEncap::new(&config).ok()
    }

    /// Notes how a next hop can be reached; [`Self::publish`] makes it known.
    fn reach(&mut self, next_hop: IpAddr, mac: Option<MacAddr>, state: State) {
        let remotes = self.behind.get(&next_hop).cloned().unwrap_or_default();
        for remote in remotes {
            if let Some(route) = self.routes.get_mut(remote as usize) {
                route.mac = mac;
            }
            let reach = match mac.and_then(|mac| self.template(remote as usize, mac)) {
                Some(template) => Reach::Ready(template),
                None if state == State::Failed => Reach::Unreachable,
                None => Reach::Resolving,
            };
            if let Some(remote) = self.list.get_mut(remote as usize) {
                remote.reach = reach;
                self.dirty = true;
            }
        }
    }

    /// Makes the present remotes known to the workers.
    fn publish(&mut self) {
        if std::mem::take(&mut self.dirty) {
            let layout = &self.tables.layout;
            let mut remotes = Remotes::new(self.list.clone(), |segment| vni(layout, segment));
            remotes.opened_by_nic = self.opened_by_nic;
            self.tables.remotes.replace(remotes);
        }
    }

    /// Sends a frame of the gateway's own into the underlay.
    fn send_frame(&self, plane: &mut ControlPlane, frame: &[u8]) {
        let port = self.tables.layout.underlay.port;
        let packet = plane.pool(port).and_then(|pool| {
            let mut packet = pool.take()?;
            packet.extend_from_slice(frame, pool).then_some(packet)
        });
        let Some(mut packet) = packet else {
            plane.count_drops(DropReason::NoBuffer, 1);
            return;
        };
        if let Some(id) = self.config.underlay.vlan
            && packet.prepend_slice(TAG).is_some()
        {
            vlan::push(packet.data_mut(), Tag::new(id));
        }
        plane.send(port, packet);
    }

    /// Does what the neighbours' state machine asks for.
    fn perform(&mut self, plane: &mut ControlPlane) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Ask(ip, to) => {
                    if let Some(frame) = self.station.addresses().question(ip, to) {
                        self.send_frame(plane, &frame);
                    }
                }
                Action::Bound(ip, mac) => {
                    tracing::info!("next hop {ip} is at {mac}");
                    self.reach(ip, Some(mac), State::Reachable);
                }
                Action::Lost(ip) => {
                    let state = self.neighbours.iter().find(|(other, ..)| *other == ip).map(|(_, state, _)| state);
                    let state = state.unwrap_or(State::Failed);
                    if state == State::Failed {
                        tracing::warn!("next hop {ip} does not answer; packets for it are dropped as no_neighbour");
                    }
                    self.reach(ip, None, state);
                }
                Action::Release(_, (packet, remote)) => self.release(plane, packet, remote),
                Action::Refuse((packet, _)) => plane.drop(packet, DropReason::NoNeighbour),
            }
        }
        self.publish();
    }

    /// Sends a frame that has waited for its next hop.
    fn release(&mut self, plane: &mut ControlPlane, mut packet: Packet, remote: u32) {
        let underlay = &self.tables.layout.underlay;
        let len = packet.len();
        let Some(Remote { reach: Reach::Ready(template) | Reach::InNic(template, _), segment, .. }) =
            self.list.get(remote as usize)
        else {
            return plane.drop(packet, DropReason::NoNeighbour);
        };
        let flow = Flow::of(packet.data(), packet.len(), &Parser { tunnels: Tunnels::NONE, ..Parser::default() });
        match wrap(&mut packet, template, underlay, flow) {
            Ok(()) => {
                let own = self.counters.worker(self.workers);
                if let Some(counters) = own.as_ref().and_then(|own| own.get(usize::from(*segment))) {
                    counters.overlay_tx.add(1, len);
                }
                plane.send(underlay.port, packet);
            }
            Err(reason) => plane.drop(packet, reason),
        }
    }

    /// A frame to the gateway itself.
    fn host(&mut self, plane: &mut ControlPlane, packet: Packet) {
        if packet.len() > LONGEST_TO_US {
            return plane.drop(packet, DropReason::TooLong);
        }
        let mut frame = vec![0; packet.len()];
        packet.copy_to(&mut frame);
        let now = plane.now() / 1_000_000;
        let outcome = self.station.handle(&mut frame, now);
        if let Some((ip, mac, how)) = outcome.heard {
            self.neighbours.heard(ip, mac, how, now, &mut self.actions);
            self.perform(plane);
        }
        if let Some((address, mac)) = outcome.conflict {
            self.conflicts += 1;
            if self.complained.is_none_or(|at| now >= at + COMPLAIN) {
                self.complained = Some(now);
                tracing::warn!(
                    "{mac} uses {address} too, which is an address of this gateway; one of the two must change"
                );
            }
        }
        match outcome.answer {
            Answer::None => drop(packet),
            Answer::Refused(reason) => plane.drop(packet, reason),
            Answer::InPlace => self.send_frame(plane, &frame),
            Answer::Frame(frame) => self.send_frame(plane, &frame),
        }
    }

    /// A tunnel packet of a VTEP that is not known, in a segment that takes such: notes it, and lets the packet through again.
    fn new_remote(&mut self, plane: &mut ControlPlane, mut packet: Packet, worker: usize) {
        let parsed =
            Parser { tunnels: Tunnels::NONE.with_vxlan(Some(self.config.underlay.udp_port)), ..Parser::default() }
                .parse_chain(packet.data(), packet.len());
        let found = parsed.ok().and_then(|parsed| {
            let outer = parsed.outer();
            let source = match (outer.ipv4_header(packet.data()), outer.ipv6_header(packet.data())) {
                (Some(h), _) => IpAddr::from([h[12], h[13], h[14], h[15]]),
                (_, Some(h)) => IpAddr::from(*h[8..].first_chunk::<16>()?),
                _ => return None,
            };
            Some((parsed.vni()?.get(), source))
        });
        let Some((vni, source)) = found else { return plane.drop(packet, DropReason::BadTunnelHeader) };
        let Some(segment) = self.tables.layout.segment_of(vni) else {
            return plane.drop(packet, DropReason::UnknownVni);
        };
        let known = self.list.iter().any(|r| r.address == source && r.segment == segment);
        if !known {
            let configured: usize = self.config.segments.iter().map(|s| s.remotes.len()).sum();
            let locals =
                self.config.segments.get(usize::from(segment)).map(|s| s.locals.as_slice()).unwrap_or_default();
            let local = locals.iter().copied().find(|ip| ip.is_ipv4() == source.is_ipv4());
            let next_hop = self.station.addresses().next_hop(source);
            let (Some(local), Some(next_hop)) = (local, next_hop) else {
                return plane.drop(packet, DropReason::NoRoute);
            };
            if !is_station(source) {
                return plane.drop(packet, DropReason::BadSource);
            }
            let now = plane.now() / 1_000_000;
            if self.list.len() >= configured + LEARNED_REMOTES
                || !self.neighbours.want(next_hop, now, &mut self.actions)
            {
                return plane.drop(packet, DropReason::UnknownRemote);
            }
            tracing::info!("remote {source} joins segment {vni}");
            let index = self.list.len();
            let max_frame = max_frame(&self.config, &self.tables.layout, usize::from(segment), source);
            self.list.push(Remote { address: source, segment, max_frame, reach: Reach::Resolving });
            let mac = self.neighbours.mac(next_hop);
            self.routes.push(Route { local, next_hop: Some(next_hop), mac });
            self.behind.entry(next_hop).or_default().push(index as u32);
            if let Some(template) = mac.and_then(|mac| self.template(index, mac)) {
                self.list[index].reach = Reach::Ready(template);
            }
            self.dirty = true;
            self.perform(plane);
        }
        if let Some(id) = self.config.underlay.vlan {
            // The worker took it off before and looks for it again.
            packet.set_vlan(id);
        }
        plane.hand_over(worker, packet);
    }

    fn announce(&self, plane: &mut ControlPlane, probe: bool) {
        for prefix in &self.config.underlay.addresses {
            let addresses = self.station.addresses();
            if probe {
                self.send_frame(plane, &addresses.conflict_probe(prefix.address));
            }
            self.send_frame(plane, &addresses.announcement(prefix.address));
        }
    }

    /// Everything as one JSON object.
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
                    "vni": segment.vni.get(),
                    "local_rx": traffic(s.local_rx),
                    "local_tx": traffic(s.local_tx),
                    "overlay_rx": traffic(s.overlay_rx),
                    "overlay_tx": traffic(s.overlay_tx),
                    "flooded": s.flooded,
                    "unknown_unicast": s.unknown_unicast,
                    "too_big": s.too_big,
                    "told_too_big": s.told_too_big,
                    "learned": l.learned,
                    "moved": l.moved,
                    "aged": l.aged,
                    "not_learned": l.refused,
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
            "remotes": self.list.len(),
            "address_conflicts": self.conflicts,
        })
    }
}

fn vni(layout: &Layout, segment: u16) -> u32 {
    layout.segments.get(usize::from(segment)).map_or(0, |segment| segment.vni)
}

/// Longest inner frame to a remote: what the underlay leaves, and the segment allows.
fn max_frame(config: &GatewayConfig, layout: &Layout, segment: usize, remote: IpAddr) -> usize {
    let left = usize::from(layout.underlay.mtu).saturating_sub(overhead(remote));
    match config.segments.get(segment) {
        Some(segment) => match segment.mtu {
            Some(mtu) => left.min(usize::from(mtu) + ETHERNET + inner_tag(segment.inner_vlans)),
            None => left,
        },
        None => left,
    }
}

/// Bytes of the underlay's MTU that IP, UDP and VXLAN headers take.
pub(super) fn overhead(remote: IpAddr) -> usize {
    if remote.is_ipv4() { 36 } else { 56 }
}

impl Control for GatewayControl {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        match PuntCode::unpack(punt.code) {
            PuntCode::Host => self.host(plane, punt.packet),
            PuntCode::NewRemote => self.new_remote(plane, punt.packet, punt.worker),
            PuntCode::Unresolved(remote) => match self.routes.get(remote as usize).and_then(|route| route.next_hop) {
                Some(next_hop) => {
                    // It may be early: long lists of remotes are asked for bit by bit.
                    self.neighbours.want(next_hop, plane.now() / 1_000_000, &mut self.actions);
                    self.neighbours.hold(next_hop, (punt.packet, remote), &mut self.actions);
                    self.perform(plane);
                }
                None => plane.drop(punt.packet, DropReason::NoRoute),
            },
        }
    }

    fn learn(&mut self, learn: Learn, plane: &mut ControlPlane) {
        let Learn { key, destination } = learn;
        let Some(stats) = self.learns.get_mut(usize::from(key.segment())) else { return };
        match self.fdb.learn(key, destination, plane.seconds()) {
            Learned::New => stats.learned += 1,
            Learned::Moved { from } => {
                stats.moved += 1;
                tracing::debug!(
                    "{} moved from {:?} to {:?}",
                    MacAddr(key.mac()),
                    Destination::unpack(from),
                    Destination::unpack(destination)
                );
            }
            Learned::Full => stats.refused += 1,
            Learned::Known | Learned::Static | Learned::NotAStation => {}
        }
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        let now = plane.now() / 1_000_000;
        for _ in 0..ASKED_PER_TICK {
            let Some(ip) = self.wanted.pop_front() else { break };
            self.neighbours.want(ip, now, &mut self.actions);
        }
        if now >= self.neighbours_at {
            self.neighbours_at = now + 100;
            self.neighbours.tick(now, &mut self.actions);
        }
        self.perform(plane);
        if self.announcements_left > 0 && now >= self.announce_at {
            self.announce(plane, self.announcements_left == ANNOUNCE.1);
            self.announcements_left -= 1;
            self.announce_at = now + ANNOUNCE.0;
        }
        let seconds = plane.seconds();
        if seconds != self.aged_at {
            self.aged_at = seconds;
            let learns = &mut self.learns;
            self.fdb.age(seconds, |entry| {
                if let Some(stats) = learns.get_mut(usize::from(entry.key.segment())) {
                    stats.aged += 1;
                }
            });
        }
    }

    fn port_event(&mut self, port: PortId, event: &PortEvent, _: &mut ControlPlane) {
        match event {
            PortEvent::Link(Link { state: LinkState::Up, .. }) if self.tables.layout.is_underlay(port) => {
                // Switches on the way may have forgotten us meanwhile.
                self.announcements_left = ANNOUNCE.1;
                self.announce_at = 0;
            }
            PortEvent::Link(Link { state: LinkState::Down, .. }) | PortEvent::Lost(_) => {
                let attachments = &self.tables.layout.attachments;
                let is_there = |index: u32| attachments.get(index as usize).is_some_and(|a| a.port == port);
                self.fdb.flush(|entry| match Destination::unpack(entry.destination) {
                    Destination::Attachment(index) => is_there(index),
                    Destination::Remote(_) => false,
                });
            }
            PortEvent::Link(_) | PortEvent::Finished => {}
        }
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        for (packet, _) in self.neighbours.release_all() {
            plane.drop(packet, DropReason::Stopping);
        }
    }

    fn summary(&mut self) -> Option<Value> {
        Some(self.to_json())
    }
}
