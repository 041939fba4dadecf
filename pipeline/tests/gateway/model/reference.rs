//! The reference model of a gateway: what each frame, change and second means, in plain collections.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;

use wirepath_packet::drops::DropReason;
use wirepath_wire::MacAddr;

use super::config::{
    Attached, Config, FREEZE_TIME, MOVE_WINDOW, NETWORKS, Place, Port, Routes, SLOTS, Segment, Target, far_router,
    neighbour, neighbour_slot, remote_address, remote_mac, remote_sid, router_addresses,
};
use super::wire::{self, Kind, Tunnelled, US};

/// Seconds after which a learned remote without addresses is removed, and one that never got a frame.
const IDLE_TIME: u32 = 60;
const PROVISIONAL_TIME: u32 = 300;
/// Address that stands for the other end of a tunnel with IP packets.
const TUNNEL_PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

/// A frame that leaves the gateway.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Out {
    Local(u16, Vec<u8>),
    Tunnel(Tunnelled),
}

/// Frames and drops that follow from a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    pub(crate) out: Vec<Out>,
    pub(crate) drops: BTreeMap<DropReason, u64>,
}

/// Entry of the forwarding database. A static one has no second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    place: Place,
    seen: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct LearnedRemote {
    since: u32,
    idle_since: u32,
    contacted: bool,
}

#[derive(Clone, Copy, Debug)]
struct Moves {
    count: u32,
    until: u32,
    frozen: bool,
}

/// Addresses learned, moved and aged of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) learned: u64,
    pub(crate) moved: u64,
    pub(crate) aged: u64,
}

type Key = (usize, MacAddr);

/// Result of a lookup of a route.
#[derive(Clone, Copy, Debug)]
enum Route {
    Local,
    /// To an Ethernet address in a segment.
    Forward(usize, MacAddr),
    Tunnel(usize),
    Discard(Target),
    /// In the other VRF.
    Lookup,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) config: Config,
    pub(crate) second: u32,
    aged_at: u32,
    fdb: HashMap<Key, Entry>,
    learned: HashMap<(usize, u8), LearnedRemote>,
    moves: HashMap<Key, Moves>,
    pub(crate) stats: [Stats; SLOTS.len()],
    /// Sources that the workers reported, for the control thread.
    reports: Vec<(Key, Place)>,
    /// Frames of remotes that the control thread has just learned, for the workers.
    returned: Vec<(usize, u8, Vec<u8>)>,
    /// Addresses of neighbours that have answered. The caller says so before each step.
    pub(crate) resolved: HashSet<IpAddr>,
    /// Frames of routers that wait for a neighbour: its address, its segment and the frame.
    waiting: Vec<(IpAddr, usize, Vec<u8>)>,
    /// True if a step has an effect that the model does not know.
    pub(crate) is_unknown: bool,
    effects: Effects,
}

/// Origin of a frame that is flooded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum From {
    Port(Attached),
    Remote,
    Router,
}

impl Model {
    pub(crate) fn new(config: Config) -> Self {
        let nothing = Config { segments: Default::default(), routes: Routes::default() };
        let mut model = Self {
            config: nothing,
            second: 0,
            aged_at: 0,
            fdb: HashMap::new(),
            learned: HashMap::new(),
            moves: HashMap::new(),
            stats: Default::default(),
            reports: Vec::new(),
            returned: Vec::new(),
            resolved: HashSet::new(),
            waiting: Vec::new(),
            is_unknown: false,
            effects: Effects::default(),
        };
        model.reload(config);
        model
    }

    pub(crate) fn take_effects(&mut self) -> Effects {
        self.effects.out.sort();
        std::mem::take(&mut self.effects)
    }

    /// Rows of the forwarding database as operators see them: segment, address, place, kind, age.
    pub(crate) fn rows(&self) -> Vec<(String, String, String, String, Option<u32>)> {
        let row = |(key, entry): (&Key, &Entry)| {
            let (slot, mac) = *key;
            let kind = match entry.seen {
                None => "static",
                Some(_) if self.is_frozen(*key) => "frozen",
                Some(_) if self.is_sticky(slot, entry.place) => "sticky",
                Some(_) => "learned",
            };
            let place = match entry.place {
                Place::Router => "router".to_owned(),
                Place::Remote(remote) => remote_address(remote).to_string(),
                Place::Port((port, None)) => super::config::PORTS[usize::from(port)].to_owned(),
                Place::Port((port, Some(vlan))) => format!("{}.{vlan}", super::config::PORTS[usize::from(port)]),
            };
            let age = entry.seen.map(|seen| self.second - seen);
            (SLOTS[slot].name.to_owned(), mac.to_string(), place, kind.to_owned(), age)
        };
        let mut rows: Vec<_> = self.fdb.iter().map(row).collect();
        rows.sort();
        rows
    }

    pub(crate) fn learned_remotes(&self) -> usize {
        self.learned.len()
    }

    fn segment(&self, slot: usize) -> &Segment {
        self.config.segments[slot].as_ref().expect("the slot is in use")
    }

    fn port(&self, slot: usize, at: Attached) -> &Port {
        self.segment(slot).port(at).expect("an attachment of the slot")
    }

    fn drop(&mut self, reason: DropReason) {
        *self.effects.drops.entry(reason).or_default() += 1;
    }

    fn is_frozen(&self, key: Key) -> bool {
        self.segment(key.0).moves > 0 && self.moves.get(&key).is_some_and(|it| it.frozen && self.second < it.until)
    }

    fn is_sticky(&self, slot: usize, place: Place) -> bool {
        matches!(place, Place::Port(at) if self.port(slot, at).sticky)
    }

    // Workers.

    /// Takes a frame of a local port.
    pub(crate) fn local(&mut self, port: u16, frame: &[u8]) {
        let tag = wire::untagged(frame);
        let of_port = |slot: usize| self.config.segments[slot].iter().flat_map(|it| &it.ports).map(|port| port.at);
        let all: Vec<(usize, Attached)> = (0..SLOTS.len())
            .flat_map(|slot| of_port(slot).map(move |at| (slot, at)))
            .filter(|(_, at)| at.0 == port)
            .collect();
        let has_vlans = all.iter().any(|(_, at)| at.1.is_some());
        let vlan = tag.as_ref().map(|(vlan, _)| *vlan).filter(|_| has_vlans);
        let Some((slot, at)) = all.into_iter().find(|(_, at)| at.1 == vlan) else {
            return self.drop(DropReason::NoSegment);
        };
        let frame = match tag {
            Some((_, inner)) if has_vlans => inner,
            _ => frame.to_vec(),
        };
        if wire::ethertype(&frame) == wire::VLAN && !self.segment(slot).carries_tags {
            return self.drop(DropReason::NoSegment);
        }
        let (dst, src) = (wire::destination(&frame), wire::source(&frame));
        if src.is_multicast() {
            return self.drop(DropReason::BadSource);
        }
        self.saw((slot, src), Place::Port(at));
        if is_link_local(dst) {
            return self.drop(DropReason::LinkLocalMulticast);
        }
        match self.lookup(slot, dst) {
            None => self.flood(slot, From::Port(at), &frame),
            Some(Place::Port(to)) if to == at => self.drop(DropReason::SamePort),
            Some(Place::Port(to)) if self.are_isolated(slot, at, to) => self.drop(DropReason::IsolatedPort),
            Some(Place::Port(to)) => self.deliver(to, &frame),
            Some(Place::Remote(remote)) => self.send(slot, remote, &frame),
            Some(Place::Router) => self.route(slot, &frame),
        }
    }

    /// Takes the content of a tunnel packet.
    pub(crate) fn tunnel(&mut self, kind: Kind, id: Option<u32>, remote: u8, payload: &[u8]) {
        let found = (0..SLOTS.len())
            .find(|slot| self.config.segments[*slot].is_some() && (SLOTS[*slot].kind, SLOTS[*slot].id) == (kind, id));
        let Some(slot) = found else {
            let is_known = (0..SLOTS.len()).any(|it| self.config.segments[it].is_some() && SLOTS[it].kind == kind);
            return self.drop(if is_known { DropReason::UnknownVni } else { DropReason::NotForUs });
        };
        if self.segment(slot).remotes.contains(&remote) || self.learned.contains_key(&(slot, remote)) {
            return self.inner(slot, remote, payload);
        }
        if !self.segment(slot).accept_unknown {
            return self.drop(DropReason::UnknownRemote);
        }
        self.returned.push((slot, remote, payload.to_vec()));
    }

    fn inner(&mut self, slot: usize, remote: u8, frame: &[u8]) {
        if SLOTS[slot].kind.carries_ip() {
            return self.route(slot, &wire::ethernet(US, US, wire::ethertype_of(frame), frame));
        }
        if wire::ethertype(frame) == wire::VLAN && !self.segment(slot).carries_tags {
            return self.drop(DropReason::InnerVlan);
        }
        let (dst, src) = (wire::destination(frame), wire::source(frame));
        if src.is_multicast() {
            return self.drop(DropReason::BadSource);
        }
        self.saw((slot, src), Place::Remote(remote));
        if is_link_local(dst) {
            return self.drop(DropReason::LinkLocalMulticast);
        }
        match self.lookup(slot, dst) {
            None => self.flood(slot, From::Remote, frame),
            Some(Place::Port(to)) => self.deliver(to, frame),
            Some(Place::Remote(_)) => self.drop(DropReason::SplitHorizon),
            Some(Place::Router) => self.route(slot, frame),
        }
    }

    fn lookup(&self, slot: usize, mac: MacAddr) -> Option<Place> {
        self.fdb.get(&(slot, mac)).map(|entry| entry.place)
    }

    fn saw(&mut self, key: Key, place: Place) {
        match self.fdb.get(&key) {
            Some(Entry { seen: None, .. }) => {}
            Some(entry) if entry.place == place => {
                self.fdb.insert(key, Entry { place, seen: Some(self.second) });
            }
            _ if self.segment(key.0).learning => self.reports.push((key, place)),
            _ => {}
        }
    }

    fn are_isolated(&self, slot: usize, a: Attached, b: Attached) -> bool {
        self.port(slot, a).isolated && self.port(slot, b).isolated
    }

    fn flood(&mut self, slot: usize, from: From, frame: &[u8]) {
        let segment = self.segment(slot).clone();
        let reaches = |port: &&Port| match from {
            From::Port(at) => at != port.at && !self.are_isolated(slot, at, port.at),
            From::Remote | From::Router => true,
        };
        let ports: Vec<Attached> = segment.ports.iter().filter(reaches).map(|port| port.at).collect();
        let remotes = if from == From::Remote { Vec::new() } else { segment.remotes };
        if ports.is_empty() && remotes.is_empty() {
            return self.drop(DropReason::NoDestination);
        }
        ports.into_iter().for_each(|to| self.deliver(to, frame));
        remotes.into_iter().for_each(|remote| self.send(slot, remote, frame));
    }

    fn deliver(&mut self, (port, vlan): Attached, frame: &[u8]) {
        let frame = vlan.map_or_else(|| frame.to_vec(), |vlan| wire::tagged(frame, vlan));
        self.effects.out.push(Out::Local(port, frame));
    }

    fn send(&mut self, slot: usize, remote: u8, frame: &[u8]) {
        let kind = SLOTS[slot].kind;
        if let Some(learned) = self.learned.get_mut(&(slot, remote)) {
            learned.contacted = true;
        }
        let (to, payload) = match kind {
            Kind::Srv6 => (IpAddr::V6(remote_sid()), frame),
            _ if kind.carries_ip() => (remote_address(remote), &frame[14..]),
            _ => (remote_address(remote), frame),
        };
        let (id, mac, payload) = (SLOTS[slot].id, remote_mac(remote), payload.to_vec());
        self.effects.out.push(Out::Tunnel(Tunnelled { kind, id, to, mac, payload }));
    }

    // Routers.

    /// Takes a frame to the router of a slot.
    fn route(&mut self, slot: usize, frame: &[u8]) {
        // The neighbour of a network answers.
        if let Some(address) = wire::resolved_address(frame) {
            self.resolved.insert(address);
            return;
        }
        if wire::ethertype(frame) == wire::VLAN {
            return self.drop(DropReason::InnerVlan);
        }
        let Some((to, ttl)) = wire::destination_and_ttl(frame) else { return self.drop(DropReason::UnknownEtherType) };
        let (ethertype, is_v6) = (wire::ethertype(frame), to.is_ipv6());
        // Types and codes of both versions (RFC 792, RFC 1812 section 5.2.7, RFC 4443 section 3).
        let error = |v4: (u8, u8), v6: (u8, u8)| Some(if is_v6 { v6 } else { v4 });
        let refused = match self.find_route(self.segment(slot).vrf, to) {
            Some(Route::Local) => (DropReason::NotForUs, error((3, 3), (1, 4))),
            None | Some(Route::Discard(Target::Unreachable)) => (DropReason::NoRoute, error((3, 0), (1, 0))),
            Some(Route::Discard(Target::Prohibit)) => (DropReason::Prohibited, error((3, 13), (1, 1))),
            Some(Route::Lookup) => unreachable!("a lookup in the other VRF is followed"),
            Some(Route::Discard(_)) => (DropReason::Blackhole, None),
            _ if ttl <= 1 => (DropReason::HopLimit, error((11, 0), (3, 0))),
            Some(Route::Forward(out, mac)) => {
                let frame = wire::ethernet(mac, US, ethertype, &wire::forwarded(&frame[14..]));
                let neighbour = SLOTS[out].network.map(neighbour).filter(|(_, of)| *of == mac);
                let address = neighbour.map(|(addresses, _)| addresses[usize::from(is_v6)]);
                return match address.filter(|it| !self.resolved.contains(it)) {
                    Some(address) => self.waiting.push((address, out, frame)),
                    None => self.forward(out, &frame),
                };
            }
            Some(Route::Tunnel(out)) => {
                let remote = self.segment(out).remotes[0];
                return self.send(out, remote, &wire::ethernet(US, US, ethertype, &wire::forwarded(&frame[14..])));
            }
        };
        self.drop(refused.0);
        if let Some((kind, code)) = refused.1 {
            // The source of the error depends on the order of the segments if its own has no address.
            self.is_unknown |= SLOTS[slot].kind.carries_ip();
            if !self.is_unknown {
                self.forward(slot, &wire::icmp(wire::source(frame), US, kind, code));
            }
        }
    }

    fn forward(&mut self, slot: usize, frame: &[u8]) {
        match self.lookup(slot, wire::destination(frame)) {
            None => self.flood(slot, From::Router, frame),
            Some(Place::Port(to)) => self.deliver(to, frame),
            Some(Place::Remote(remote)) => self.send(slot, remote, frame),
            Some(Place::Router) => self.drop(DropReason::NoDestination),
        }
    }

    /// Finds the route in a VRF, and in the other one where the route says so. VRFs that refer to each other have none.
    fn find_route(&self, vrf: usize, to: IpAddr) -> Option<Route> {
        match self.find_route_in(vrf, to) {
            Some(Route::Lookup) => self.find_route_in(1 - vrf, to).filter(|route| !matches!(route, Route::Lookup)),
            found => found,
        }
    }

    fn find_route_in(&self, vrf: usize, to: IpAddr) -> Option<Route> {
        let mut best: Option<(u8, Route)> = None;
        let mut offer = |network: IpAddr, len: u8, route: Route| {
            if contains(network, len, to) && best.is_none_or(|(known, _)| known < len) {
                best = Some((len, route));
            }
        };
        for (slot, network) in SLOTS.iter().enumerate().filter_map(|(slot, it)| Some((slot, it.network?))) {
            if self.config.segment_in(slot, vrf).is_none() {
                continue;
            }
            let (hosts, mac) = neighbour(network);
            for (router, host) in router_addresses(network).into_iter().zip(hosts) {
                let len = if host.is_ipv6() { 128 } else { 32 };
                offer(router, len, Route::Local);
                offer(host, len, Route::Forward(slot, mac));
            }
        }
        for (number, (network, len)) in NETWORKS.into_iter().enumerate() {
            let Some(target) = self.config.route(vrf, number) else { continue };
            let route = match target {
                Target::Tunnel(slot) => Route::Tunnel(slot),
                Target::Router(remote) => Route::Forward(0, far_router(remote)),
                Target::Neighbour => {
                    let slot = neighbour_slot(vrf);
                    Route::Forward(slot, neighbour(SLOTS[slot].network.expect("a router")).1)
                }
                Target::Lookup => Route::Lookup,
                discard => Route::Discard(discard),
            };
            offer(network, len, route);
        }
        best.map(|(_, route)| route)
    }

    // The control thread.

    /// Processes what the workers have reported, and the passed time.
    pub(crate) fn control(&mut self) {
        let returned = std::mem::take(&mut self.returned);
        for (slot, remote, _) in &returned {
            let second = self.second;
            let new = LearnedRemote { since: second, idle_since: second, contacted: false };
            self.learned.entry((*slot, *remote)).or_insert(new);
        }
        self.learn_reported();
        self.tick();
        for (slot, remote, payload) in returned {
            self.inner(slot, remote, &payload);
        }
        let resolved = &self.resolved;
        let sent: Vec<_> = self.waiting.extract_if(.., |(address, ..)| resolved.contains(address)).collect();
        sent.into_iter().for_each(|(_, slot, frame)| self.forward(slot, &frame));
        self.learn_reported();
    }

    fn learn_reported(&mut self) {
        for (key, place) in std::mem::take(&mut self.reports) {
            self.learn(key, place);
        }
    }

    fn learned_in(&self, slot: usize, select: impl Fn(&Entry) -> bool) -> usize {
        self.fdb.iter().filter(|((of, _), entry)| *of == slot && entry.seen.is_some() && select(entry)).count()
    }

    fn learn(&mut self, key: Key, place: Place) {
        let (slot, second) = (key.0, self.second);
        let segment = self.segment(slot);
        let limit = match place {
            Place::Port(at) => self.port(slot, at).limit,
            _ => segment.remote_limit,
        };
        let is_full = limit.is_some_and(|limit| self.learned_in(slot, |entry| entry.place == place) >= limit);
        let segment_is_full = segment.limit.is_some_and(|limit| self.learned_in(slot, |_| true) >= limit);
        let limit_of_moves = segment.moves;
        match self.fdb.get(&key).copied() {
            Some(Entry { seen: None, .. }) => {}
            Some(entry) if entry.place == place => {
                self.fdb.insert(key, Entry { place, seen: Some(second) });
            }
            Some(entry) => {
                if self.is_sticky(slot, entry.place) || self.is_frozen(key) || is_full {
                    return;
                }
                self.fdb.insert(key, Entry { place, seen: Some(second) });
                self.stats[slot].moved += 1;
                self.left(slot, entry.place);
                if limit_of_moves > 0 {
                    self.count_move(key, limit_of_moves);
                }
            }
            None if is_full || segment_is_full => {}
            None => {
                self.fdb.insert(key, Entry { place, seen: Some(second) });
                self.stats[slot].learned += 1;
            }
        }
    }

    /// Notes that an address left a remote, which may be a learned one.
    fn left(&mut self, slot: usize, place: Place) {
        let second = self.second;
        if let Place::Remote(remote) = place
            && let Some(learned) = self.learned.get_mut(&(slot, remote))
        {
            learned.idle_since = second;
        }
    }

    fn count_move(&mut self, key: Key, limit: u32) {
        let new = Moves { count: 0, until: self.second + MOVE_WINDOW, frozen: false };
        let moves = self.moves.entry(key).or_insert(new);
        if moves.frozen || self.second >= moves.until {
            *moves = new;
        }
        moves.count += 1;
        if moves.count >= limit {
            (moves.frozen, moves.until) = (true, self.second + FREEZE_TIME);
        }
    }

    fn tick(&mut self) {
        let second = self.second;
        if std::mem::replace(&mut self.aged_at, second) == second {
            return;
        }
        let is_old = |key: &Key, entry: &Entry| {
            let ageing = self.segment(key.0).ageing;
            ageing > 0 && entry.seen.is_some_and(|seen| second >= seen + ageing)
        };
        let old: Vec<(Key, Entry)> =
            self.fdb.iter().filter(|(key, entry)| is_old(key, entry)).map(|(key, it)| (*key, *it)).collect();
        for (key, entry) in old {
            self.fdb.remove(&key);
            self.stats[key.0].aged += 1;
            self.left(key.0, entry.place);
        }
        self.moves.retain(|_, moves| second < moves.until);
        let is_unused = |(slot, remote): (usize, u8), it: &LearnedRemote| {
            let is_idle = self.learned_in(slot, |entry| entry.place == Place::Remote(remote)) == 0;
            is_idle && second - it.idle_since >= IDLE_TIME || !it.contacted && second - it.since >= PROVISIONAL_TIME
        };
        let unused: Vec<(usize, u8)> =
            self.learned.iter().filter(|(at, it)| is_unused(**at, it)).map(|(at, _)| *at).collect();
        unused.into_iter().for_each(|(slot, remote)| self.remove_learned(slot, remote));
    }

    fn remove_learned(&mut self, slot: usize, remote: u8) {
        self.learned.remove(&(slot, remote));
        self.forget(|of, place| of == slot && place == Place::Remote(remote));
    }

    /// Removes learned entries.
    fn forget(&mut self, select: impl Fn(usize, Place) -> bool) {
        self.fdb.retain(|(slot, _), entry| entry.seen.is_none() || !select(*slot, entry.place));
    }

    /// Removes what was learned at a port whose link is lost.
    pub(crate) fn link_down(&mut self, port: u16) {
        self.forget(|_, place| matches!(place, Place::Port((at, _)) if at == port));
    }

    fn statics(&self) -> HashMap<Key, Place> {
        let mut statics = HashMap::new();
        for (slot, segment) in self.config.segments.iter().enumerate() {
            let Some(segment) = segment else { continue };
            statics.extend(segment.statics.iter().map(|(host, place)| ((slot, super::config::host(*host)), *place)));
            if SLOTS[slot].network.is_some() {
                statics.insert((slot, US), Place::Router);
            }
            if SLOTS[slot].kind.carries_ip() {
                statics.insert((slot, TUNNEL_PEER), Place::Remote(segment.remotes[0]));
            }
        }
        for target in (0..NETWORKS.len()).filter_map(|number| self.config.route(0, number)) {
            if let Target::Router(remote) = target {
                statics.insert((0, far_router(remote)), Place::Remote(remote));
            }
        }
        statics
    }

    /// Takes another configuration.
    pub(crate) fn reload(&mut self, config: Config) {
        let (old_statics, old) = (self.statics(), std::mem::replace(&mut self.config, config));
        for slot in 0..SLOTS.len() {
            let Some(segment) = self.config.segments[slot].clone() else {
                self.fdb.retain(|(of, _), _| *of != slot);
                self.moves.retain(|(of, _), _| *of != slot);
                self.learned.retain(|(of, _), _| *of != slot);
                continue;
            };
            let Some(before) = &old.segments[slot] else {
                self.stats[slot] = Stats::default();
                continue;
            };
            let is_gone = |place: Place| before.has(place) && !segment.has(place);
            self.forget(|of, place| of == slot && is_gone(place));
            let learned: Vec<u8> = self.learned.keys().filter(|(of, _)| *of == slot).map(|(_, it)| *it).collect();
            for remote in learned {
                if segment.remotes.contains(&remote) {
                    self.learned.remove(&(slot, remote));
                } else if !segment.accept_unknown {
                    self.remove_learned(slot, remote);
                }
            }
        }
        let statics = self.statics();
        for key in old_statics.keys().filter(|key| !statics.contains_key(key)) {
            self.fdb.remove(key);
        }
        for (key, place) in statics {
            if old_statics.get(&key) == Some(&place) {
                continue;
            }
            if let Some(Entry { seen: Some(_), place }) = self.fdb.insert(key, Entry { place, seen: None }) {
                self.left(key.0, place);
            }
        }
    }
}

/// Returns whether an address is in a network with this number of bits.
fn contains(network: IpAddr, len: u8, address: IpAddr) -> bool {
    match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => (network.to_bits() ^ address.to_bits()) >> (32 - len) == 0,
        (IpAddr::V6(network), IpAddr::V6(address)) => (network.to_bits() ^ address.to_bits()) >> (128 - len) == 0,
        _ => false,
    }
}

/// Returns whether bridges keep frames to this address (IEEE 802.1Q table 8-1).
fn is_link_local(mac: MacAddr) -> bool {
    mac.0[..5] == [1, 0x80, 0xc2, 0, 0] && mac.0[5] < 16
}
