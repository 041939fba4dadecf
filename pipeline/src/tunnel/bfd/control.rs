//! The sessions of the control thread, and their effect on the tables of the workers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::ops::Bound;

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_wire::{MacAddr, Parser, Tunnels, checksum};

use super::config::{BfdConfig, PeerAdminDown, sessions};
use super::packet::{ControlPacket, Envelope, MULTIHOP_PORT, SINGLE_HOP_PORT, State, TRAFFIC_CLASS, TTL};
use super::session::{SLOW, Session};
use super::vxlan::{MANAGEMENT_MAC, inner_destination, management_tunnel};
use super::{Micros, TICK};
use crate::ControlPlane;
use crate::registry::{Column, Row, TableSpec, Unit};
use crate::tunnel::config::{GatewayConfig, SegmentConfig};
use crate::tunnel::control::GatewayControl;
use crate::tunnel::kinds::{Payload, vxlan};
use crate::tunnel::next_hops::NextHops;
use crate::tunnel::outer::{TunnelId, tunnel_headers};
use crate::tunnel::places::{Places, SegmentPlace};
use crate::tunnel::policer::KnownHosts;
use crate::tunnel::router::config::HopConfig;
use crate::tunnel::tables::{Destination, Layout, Underlay, replication_list};

/// Maximum number of packets that one tick sends.
const PACKETS_PER_TICK: usize = 256;
/// Longest frame of a control packet.
const MAX_FRAME: usize = 512;
/// First source port (RFC 5881 section 4).
const FIRST_SOURCE_PORT: u16 = 49_152;
/// Time for which a remote that carried frames before it had a session goes on until the session is up.
const GRACE: Micros = 5 * SLOW;
/// Minimum interval between two log messages about a session.
const LOG_INTERVAL: Micros = 1_000_000;

/// Local and remote address.
type Peer = (IpAddr, IpAddr);

pub(in crate::tunnel) static TABLE: TableSpec = TableSpec {
    name: "bfd",
    about: "BFD sessions with remotes",
    metric: Some("bfd"),
    columns: &[
        Column::key("remote", "IP address of the remote"),
        Column::key("local", "Own address of the session"),
        Column::attribute("mode", "single_hop, multihop or vxlan (RFC 8971)"),
        Column::attribute("state", "admin_down, down, init or up"),
        Column::attribute("remote_state", "State that the remote sent last"),
        Column::attribute("diagnostic", "Reason of the last change of the state (RFC 5880 section 4.1)"),
        Column::attribute("remote_diagnostic", "Reason that the remote sent last"),
        Column::gauge("up", Unit::None, "1 if the session is up"),
        Column::gauge("carries", Unit::None, "1 if the session allows the remote to carry frames"),
        Column::gauge("since", Unit::Seconds, "Time since the session came up or went down"),
        Column::gauge("transmit_interval", Unit::Seconds, "Longest interval between two sent packets"),
        Column::gauge("detection_time", Unit::Seconds, "Time without packets after which the session goes down"),
        Column::counter("rx_packets", Unit::Packets, "Packets received"),
        Column::counter("tx_packets", Unit::Packets, "Packets sent, and those that had no resolved next hop"),
        Column::counter("refused", Unit::Packets, "Packets of the remote's address that were refused"),
        Column::counter("ups", Unit::None, "Number of times that the session came up"),
        Column::counter("downs", Unit::None, "Number of times that the session went down"),
    ],
};

/// Form of the packets of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    SingleHop,
    Multihop,
    /// Inside VXLAN tunnels with this management VNI.
    Vxlan(u32),
}

impl Mode {
    /// Returns the name for displays.
    const fn name(self) -> &'static str {
        match self {
            Self::SingleHop => "single_hop",
            Self::Multihop => "multihop",
            Self::Vxlan(_) => "vxlan",
        }
    }

    /// Returns the UDP destination port.
    const fn port(self) -> u16 {
        match self {
            Self::SingleHop | Self::Vxlan(_) => SINGLE_HOP_PORT,
            Self::Multihop => MULTIHOP_PORT,
        }
    }
}

/// Form and source port of the packets of a session.
#[derive(Clone, Copy, Debug)]
struct Way {
    mode: Mode,
    source_port: u16,
}

/// A session and its properties.
#[derive(Debug)]
struct Entry {
    session: Session,
    way: Way,
    /// True if the remote may carry frames.
    carries: bool,
    /// Time until which the remote carries frames although its session has not been up.
    grace: Option<Micros>,
    refused: u64,
    /// Time of the last log message, and whether it said that the session is up.
    logged: Option<(Micros, bool)>,
}

impl Entry {
    /// Takes over the state of the session. Returns true if the remote begins or ceases to carry frames. `before` is
    /// the state before the last event.
    fn observe(&mut self, peer: Peer, before: State, policy: PeerAdminDown, now: Micros) -> bool {
        let after = self.session.state();
        let carries = match (before, after) {
            (_, State::Up) => true,
            (State::Up, _) => policy == PeerAdminDown::Stay && self.session.is_remote_admin_down(),
            _ => self.carries && self.grace.is_none_or(|end| now < end),
        };
        let has_expired = self.grace.is_some() && after != State::Up && !carries;
        if after == State::Up || !carries {
            self.grace = None;
        }
        if has_expired {
            self.logged = Some((now, false));
            let (seconds, remote) = (GRACE / 1_000_000, peer.1);
            tracing::warn!("BFD session with {remote} is down: it has not come up within {seconds} s");
        }
        let is_up = after == State::Up;
        // A change soon after the last message is logged later, if it has lasted.
        if (before == State::Up) != is_up || self.logged.is_some_and(|(_, was_up)| was_up != is_up) {
            self.log(peer, now);
        }
        std::mem::replace(&mut self.carries, carries) != carries
    }

    fn log(&mut self, (_, remote): Peer, now: Micros) {
        let is_up = self.session.state() == State::Up;
        if self.logged.is_some_and(|(at, _)| now < at + LOG_INTERVAL) {
            return;
        }
        self.logged = Some((now, is_up));
        let (diagnostic, remote_diagnostic) = self.session.diagnostics();
        if is_up {
            let detection = self.session.detection_time() / 1000;
            tracing::info!("BFD session with {remote} is up; detection time {detection} ms");
        } else {
            let (why, theirs) = (diagnostic.text(), remote_diagnostic.text());
            tracing::warn!("BFD session with {remote} is down: {why}; diagnostic of the remote: {theirs}");
        }
    }
}

/// Reason why a remote carries nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tunnel) enum Out {
    /// Its session is not up.
    Down,
    /// It is a backup, and all its primary remotes carry frames.
    Standby,
}

/// All sessions.
#[derive(Debug)]
pub(in crate::tunnel) struct BfdControl {
    sessions: BTreeMap<Peer, Entry>,
    by_discriminator: HashMap<u32, Peer>,
    /// All remotes of the configuration, with those that have no session.
    peers: HashSet<Peer>,
    /// Tunnel that carries the packets; `None`: they are outside of tunnels.
    tunnel: Option<TunnelId>,
    /// Remotes that carry nothing, by index.
    out: HashMap<u32, Out>,
    /// Backup that has the static hosts of each remote.
    substitutes: HashMap<u32, u32>,
    /// Packets of sessions that were removed, with the Ethernet address of their next hop.
    farewells: Vec<(MacAddr, Peer, Way, ControlPacket)>,
    /// Time of the last tick.
    now: Micros,
    /// Session after which the next tick goes on.
    cursor: Option<Peer>,
    next_source_port: u16,
    /// True if a remote begins or ceases to carry frames.
    changed: bool,
}

impl BfdControl {
    pub(in crate::tunnel) fn new() -> Self {
        Self {
            sessions: BTreeMap::new(),
            by_discriminator: HashMap::new(),
            peers: HashSet::new(),
            tunnel: None,
            out: HashMap::new(),
            substitutes: HashMap::new(),
            farewells: Vec::new(),
            now: 0,
            cursor: None,
            next_source_port: FIRST_SOURCE_PORT,
            changed: false,
        }
    }

    /// Returns why a remote carries nothing.
    pub(in crate::tunnel) fn out(&self, remote: u32) -> Option<Out> {
        self.out.get(&remote).copied()
    }

    /// Returns the place of a static host, which may be behind the backup of its remote.
    pub(in crate::tunnel) fn place(&self, configured: u32) -> u32 {
        match Destination::unpack(configured) {
            Destination::Remote(index) => {
                let index = self.substitutes.get(&index).copied().unwrap_or(index);
                Destination::Remote(index).pack()
            }
            Destination::Attachment(_) | Destination::Group(_) | Destination::Router => configured,
        }
    }

    /// Number of sessions, and of those that are up.
    pub(in crate::tunnel) fn counts(&self) -> (usize, usize) {
        let up = self.sessions.values().filter(|entry| entry.session.state() == State::Up).count();
        (self.sessions.len(), up)
    }

    /// Adds the sessions to what the workers know.
    pub(in crate::tunnel) fn publish(&self, hosts: &mut KnownHosts) {
        hosts.bfd_sessions = self.by_discriminator.clone();
        hosts.bfd_peers = self.sessions.keys().copied().collect();
        hosts.bfd_tunnel = self.tunnel;
    }

    /// Takes over a configuration and the indices of its parts. Returns the remotes that carry nothing any more, and
    /// those that do again.
    pub(in crate::tunnel) fn install(
        &mut self,
        config: &GatewayConfig,
        places: &Places,
        next_hops: &NextHops,
    ) -> (HashSet<u32>, HashSet<u32>) {
        let mut wanted: HashMap<Peer, Mode> = HashMap::new();
        if let Some(bfd) = &config.bfd {
            for peer in sessions(&config.segments).filter(|(_, remote)| bfd.watches(*remote)) {
                let is_far = next_hops.next_hop(peer.1).is_some_and(|next_hop| next_hop != peer.1);
                let mode = match bfd.management_vni {
                    Some(vni) => Mode::Vxlan(vni),
                    None if bfd.multihop || is_far => Mode::Multihop,
                    None => Mode::SingleHop,
                };
                wanted.insert(peer, mode);
            }
        }
        self.tunnel = config.bfd.as_ref().and_then(|bfd| bfd.management_vni).map(management_tunnel);
        let now = self.now;
        let old_peers = std::mem::replace(&mut self.peers, sessions(&config.segments).collect());
        let mut failed: HashSet<Peer> = HashSet::new();
        let lost = |(peer, entry): (&Peer, &Entry)| (wanted.get(peer) != Some(&entry.way.mode)).then_some(*peer);
        for peer in self.sessions.iter().filter_map(lost).collect::<Vec<_>>() {
            let Some(mut entry) = self.sessions.remove(&peer) else { continue };
            failed.extend((!entry.carries).then_some(peer));
            self.by_discriminator.remove(&entry.session.discriminators().0);
            let farewell = entry.session.shut_down(now);
            // The next hop is forgotten with its last remote.
            if let Some(mac) = next_hops.next_hop(peer.1).and_then(|next_hop| next_hops.mac(next_hop)) {
                self.farewells.push((mac, peer, entry.way, farewell));
            }
        }
        let Some(bfd) = &config.bfd else { return self.judge(config, places) };
        for (peer, mode) in wanted {
            if let Some(known) = self.sessions.get_mut(&peer) {
                known.session.set_timers(bfd.timers, now);
                if bfd.peer_admin_down == PeerAdminDown::Leave
                    && known.session.state() != State::Up
                    && known.grace.is_none()
                {
                    // It carries frames at most because of the setting before.
                    known.carries = false;
                }
                continue;
            }
            let discriminator = std::iter::repeat_with(|| fastrand::u32(1..))
                .find(|discriminator| !self.by_discriminator.contains_key(discriminator));
            let Some(discriminator) = discriminator else { continue };
            self.by_discriminator.insert(discriminator, peer);
            let source_port = self.next_source_port;
            self.next_source_port = source_port.checked_add(1).unwrap_or(FIRST_SOURCE_PORT);
            let session = Session::new(bfd.timers, discriminator, TICK, fastrand::u64(..), now);
            // The other end may begin its session a little later. A remote that is new has nothing to lose.
            let carries = old_peers.contains(&peer) && !failed.contains(&peer);
            let grace = carries.then_some(now + GRACE);
            let way = Way { mode, source_port };
            let entry = Entry { session, way, carries, grace, refused: 0, logged: None };
            self.sessions.insert(peer, entry);
        }
        self.judge(config, places)
    }

    /// Finds which remotes carry frames. Returns those that cease to, and those that begin again.
    fn judge(&mut self, config: &GatewayConfig, places: &Places) -> (HashSet<u32>, HashSet<u32>) {
        self.changed = false;
        let mut out = HashMap::new();
        self.substitutes.clear();
        for (segment, place) in config.segments.iter().zip(&places.segments) {
            judge_segment(&self.sessions, segment, place, &mut out, &mut self.substitutes);
        }
        let gone = out.keys().filter(|index| !self.out.contains_key(index)).copied().collect();
        let back = self.out.keys().filter(|index| !out.contains_key(index)).copied().collect();
        self.out = out;
        (gone, back)
    }

    /// Removes remotes that are out from the replication lists.
    pub(in crate::tunnel) fn trim(&self, layout: &mut Layout, config: &GatewayConfig, places: &Places) {
        for (settings, place) in config.segments.iter().zip(&places.segments) {
            if let Some(segment) = layout.segments.get_mut(usize::from(place.index)) {
                segment.remotes = replication_list(settings, place);
                segment.remotes.retain(|index| !self.out.contains_key(index));
            }
        }
    }

    /// Returns whether a remote is out and has no substitute.
    pub(in crate::tunnel) fn is_lost(&self, remote: u32) -> bool {
        self.out.contains_key(&remote) && !self.substitutes.contains_key(&remote)
    }

    /// Returns the routers behind remotes that are out: segment and Ethernet address.
    pub(in crate::tunnel) fn lost_routers(&self, config: &GatewayConfig, places: &Places) -> HashSet<(u16, MacAddr)> {
        if self.out.is_empty() {
            return HashSet::new();
        }
        let lost = |hop: &HopConfig| match *hop {
            HopConfig::Router { segment, remote, mac } => {
                let place = places.segments.get(segment)?;
                let index = place.remotes.get(remote)?;
                self.is_lost(*index).then_some((place.index, mac))
            }
            HopConfig::Neighbour { .. } => None,
        };
        config.routing.next_hops().filter_map(lost).collect()
    }

    /// Returns whether there are no sessions.
    pub(in crate::tunnel) fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Returns the row of each session.
    pub(in crate::tunnel) fn rows(&self) -> impl Iterator<Item = Row> {
        let seconds = |micros: Micros| micros as f64 / 1e6;
        self.sessions.iter().map(move |((local, remote), entry)| {
            let session = &entry.session;
            let (diagnostic, remote_diagnostic) = session.diagnostics();
            let stats = session.stats;
            vec![
                remote.to_string().into(),
                local.to_string().into(),
                entry.way.mode.name().into(),
                session.state().name().into(),
                session.remote_state().name().into(),
                diagnostic.text().into(),
                remote_diagnostic.text().into(),
                u8::from(session.state() == State::Up).into(),
                u8::from(entry.carries).into(),
                (self.now.saturating_sub(session.changed_at()) / 1_000_000).into(),
                seconds(session.transmit_interval()).into(),
                seconds(session.detection_time()).into(),
                stats.received.into(),
                stats.sent.into(),
                entry.refused.into(),
                stats.ups.into(),
                stats.downs.into(),
            ]
        })
    }

    /// Takes a received packet. Returns the session that it belongs to.
    fn receive(&mut self, config: &BfdConfig, underlay: &Underlay, frame: &[u8]) -> Result<Peer, DropReason> {
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        let outer = parser.parse_stack(frame, 0, frame.len()).map_err(DropReason::from)?;
        let (from, to) = outer.ip_addresses(frame).ok_or(DropReason::Truncated)?;
        let peer = (to, from);
        let layers = match self.tunnel {
            Some(tunnel) => underlay.find_bfd(tunnel, frame, &outer, to)?,
            None => outer,
        };
        let ttl = layers.hop_limit(frame).ok_or(DropReason::Truncated)?;
        let datagram = layers.udp(frame).ok_or(DropReason::Truncated)?;
        let entry = self.sessions.get_mut(&peer).ok_or(DropReason::BfdNoSession)?;
        let packet = ControlPacket::parse(datagram.payload()).and_then(|packet| {
            let smallest = if entry.way.mode == Mode::Multihop { config.minimum_ttl } else { TTL };
            if ttl < smallest {
                return Err(DropReason::BfdTtl);
            }
            if datagram.dst_port() != entry.way.mode.port() {
                return Err(DropReason::BfdNoSession);
            }
            Ok(packet)
        });
        let before = entry.session.state();
        let received = packet.and_then(|packet| entry.session.receive(&packet, self.now));
        if let Err(reason) = received {
            entry.refused += 1;
            return Err(reason);
        }
        self.changed |= entry.observe(peer, before, config.peer_admin_down, self.now);
        Ok(peer)
    }

    /// Runs the timers of all sessions. Returns the packets that are due.
    fn due(&mut self, config: Option<&BfdConfig>) -> Vec<(Peer, Way, ControlPacket)> {
        let mut due = Vec::new();
        let Some(config) = config else { return due };
        let (now, cursor) = (self.now, self.cursor.take());
        let mut left = PACKETS_PER_TICK;
        let after = cursor.map_or(Bound::Unbounded, Bound::Excluded);
        let first = (after, Bound::Unbounded);
        let second = cursor.map(|cursor| (Bound::Unbounded, Bound::Included(cursor)));
        for range in [first].into_iter().chain(second) {
            for (peer, entry) in self.sessions.range_mut(range) {
                let before = entry.session.state();
                if left == 0 {
                    // The packet has to wait, but the detection time has not.
                    entry.session.expire(now);
                } else {
                    let way = entry.way;
                    while let Some(packet) = entry.session.next_packet(now) {
                        due.push((*peer, way, packet));
                        left = left.saturating_sub(1);
                        self.cursor = Some(*peer);
                    }
                }
                self.changed |= entry.observe(*peer, before, config.peer_admin_down, now);
            }
        }
        if left > 0 {
            self.cursor = None;
        }
        due
    }
}

/// Adds the remotes of a segment that carry nothing to `out`, and the backups in use to `substitutes`.
fn judge_segment(
    sessions: &BTreeMap<Peer, Entry>,
    segment: &SegmentConfig,
    place: &SegmentPlace,
    out: &mut HashMap<u32, Out>,
    substitutes: &mut HashMap<u32, u32>,
) {
    let carries = |position: usize| {
        let peer = segment.remotes.get(position).map(|remote| (remote.local, remote.address));
        peer.and_then(|peer| sessions.get(&peer)).is_none_or(|entry| entry.carries)
    };
    let down = place.remotes.iter().enumerate().filter(|(position, _)| !carries(*position));
    out.extend(down.map(|(_, index)| (*index, Out::Down)));
    for pair in &segment.backups {
        let (Some(&primary), Some(&backup)) = (place.remotes.get(pair.primary), place.remotes.get(pair.backup)) else {
            continue;
        };
        let mut primaries = segment.backups.iter().filter(|it| it.backup == pair.backup).map(|it| it.primary);
        if primaries.all(carries) {
            out.entry(backup).or_insert(Out::Standby);
        } else if !carries(pair.primary) && carries(pair.backup) {
            substitutes.insert(primary, backup);
        }
    }
}

impl GatewayControl {
    /// Processes a BFD packet, and answers it if it asks for a reply.
    pub(in crate::tunnel) fn handle_bfd(&mut self, plane: &mut ControlPlane, packet: Packet) {
        self.bfd.now = plane.now() / 1000;
        self.send_farewells(plane);
        let Some(config) = &self.config.bfd else { return plane.drop(packet, DropReason::BfdNoSession) };
        if packet.len() > MAX_FRAME {
            return plane.drop(packet, DropReason::BfdInvalid);
        }
        let mut frame = vec![0; packet.len()];
        packet.copy_to(&mut frame);
        match self.bfd.receive(config, &self.layout.underlay, &frame) {
            Ok(peer) => {
                plane.consume(packet, "bfd");
                let now = self.bfd.now;
                let Some(entry) = self.bfd.sessions.get_mut(&peer) else { return };
                let way = entry.way;
                if let Some(reply) = entry.session.next_packet(now) {
                    self.send_bfd(plane, peer, way, &reply);
                }
            }
            Err(reason) => plane.drop(packet, reason),
        }
    }

    /// Runs the timers of the sessions, and brings the tables up to date.
    pub(in crate::tunnel) fn tick_bfd(&mut self, plane: &mut ControlPlane) {
        self.bfd.now = plane.now() / 1000;
        self.send_farewells(plane);
        for (peer, way, packet) in self.bfd.due(self.config.bfd.as_ref()) {
            self.send_bfd(plane, peer, way, &packet);
        }
        if self.bfd.changed {
            self.apply_bfd(plane.seconds());
        }
    }

    /// Sends the last packets of removed sessions, before those of new sessions with the same remotes.
    fn send_farewells(&mut self, plane: &mut ControlPlane) {
        for (mac, peer, way, packet) in std::mem::take(&mut self.bfd.farewells) {
            self.send_bfd_to(plane, mac, peer, way, &packet);
        }
    }

    /// Tells all remotes that the gateway stops.
    pub(in crate::tunnel) fn stop_bfd(&mut self, plane: &mut ControlPlane) {
        let now = self.bfd.now;
        let end = |(peer, entry): (&Peer, &mut Entry)| (*peer, entry.way, entry.session.shut_down(now));
        let packets: Vec<_> = self.bfd.sessions.iter_mut().map(end).collect();
        for (peer, way, packet) in packets {
            self.send_bfd(plane, peer, way, &packet);
        }
    }

    /// Sends a packet, if its next hop is resolved.
    fn send_bfd(&self, plane: &mut ControlPlane, peer: Peer, way: Way, packet: &ControlPacket) {
        if let Some(mac) = self.next_hops.next_hop(peer.1).and_then(|next_hop| self.next_hops.mac(next_hop)) {
            self.send_bfd_to(plane, mac, peer, way, packet);
        }
    }

    fn send_bfd_to(
        &self,
        plane: &mut ControlPlane,
        mac: MacAddr,
        (local, remote): Peer,
        way: Way,
        packet: &ControlPacket,
    ) {
        let (own, ports) = (self.layout.underlay.mac, (way.source_port, way.mode.port()));
        let frame = match way.mode {
            Mode::SingleHop | Mode::Multihop => Envelope { macs: (own, mac), local, remote, ports }.frame(packet),
            Mode::Vxlan(vni) => {
                let remote_inside = inner_destination(local);
                let envelope = Envelope { macs: (own, MANAGEMENT_MAC), local, remote: remote_inside, ports };
                let inner = envelope.frame(packet);
                inner
                    .and_then(|inner| self.in_tunnel(vni, (own, mac), (local, remote), packet.my_discriminator, &inner))
            }
        };
        if let Some(frame) = frame {
            self.send_frame(plane, &frame);
        }
    }

    /// Returns a frame in a VXLAN tunnel with the outer headers that tenant frames get. Sessions differ in `entropy`.
    fn in_tunnel(
        &self,
        vni: u32,
        macs: (MacAddr, MacAddr),
        ends: (IpAddr, IpAddr),
        entropy: u32,
        inner: &[u8],
    ) -> Option<Vec<u8>> {
        let (kind, payload, underlay) = (&vxlan::KIND, Payload::Ethernet, &self.layout.underlay);
        let header = (kind.write)(Some(vni), payload, &[]);
        let template = tunnel_headers(&self.config.underlay, kind, payload, header, None, macs, ends).ok()?;
        let mut fields = template.fields(inner.len(), underlay.source_port(entropy));
        fields.traffic_class |= TRAFFIC_CLASS & underlay.copied_class;
        fields.inner_sum = checksum::sum(inner);
        let mut frame = vec![0; template.len()];
        template.emit(&mut frame, &fields).ok()?;
        frame.extend_from_slice(inner);
        Some(frame)
    }

    /// Changes the tables of the workers after remotes began or ceased to carry frames.
    fn apply_bfd(&mut self, seconds: u32) {
        let statics = self.statics();
        let before = self.bfd.substitutes.clone();
        let (gone, back) = self.bfd.judge(&self.config, &self.places);
        self.log_substitutes(&before);
        let mut layout = Layout::clone(&self.layout);
        self.bfd.trim(&mut layout, &self.config, &self.places);
        self.publish_layout(layout);
        self.finish_bfd(&gone, &back);
        self.update_statics(&statics, seconds);
        self.publish();
    }

    /// Logs which backups begin and cease to carry frames. `before` are those that did so far.
    fn log_substitutes(&self, before: &HashMap<u32, u32>) {
        let address = |index: &u32| self.list.get(*index as usize).map(|remote| remote.address);
        let after = &self.bfd.substitutes;
        for (primary, backup) in after.iter().filter(|(primary, _)| !before.contains_key(primary)) {
            if let (Some(primary), Some(backup)) = (address(primary), address(backup)) {
                tracing::info!("remote {backup} carries the frames of {primary}");
            }
        }
        for (primary, backup) in before.iter().filter(|(primary, _)| !after.contains_key(primary)) {
            if let (Some(primary), Some(backup)) = (address(primary), address(backup)) {
                tracing::info!("remote {backup} no longer carries the frames of {primary}");
            }
        }
    }

    /// Carries out all that follows from [`BfdControl::install`] but the replication lists and static hosts.
    pub(in crate::tunnel) fn finish_bfd(&mut self, gone: &HashSet<u32>, back: &HashSet<u32>) {
        for index in gone.iter().chain(back) {
            if self.is_live(*index) {
                self.refresh_remote(*index);
            }
        }
        if !gone.is_empty() {
            let damping = &mut self.move_damping;
            self.fdb.flush(|entry| match Destination::unpack(entry.destination) {
                Destination::Remote(index) if gone.contains(&index) => {
                    damping.forget(entry.key);
                    true
                }
                _ => false,
            });
        }
        self.refresh_external_groups();
        self.update_lost_routers();
    }

    /// Takes routers behind remotes that are out from groups of next hops, and puts others back.
    pub(in crate::tunnel) fn update_lost_routers(&mut self) {
        let mut lost = self.bfd.lost_routers(&self.config, &self.places);
        if !self.bfd.out.is_empty() {
            lost.extend(self.lost_external_routers());
        }
        self.router.set_lost_routers(lost);
    }
}
