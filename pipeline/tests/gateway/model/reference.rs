//! The reference model of a gateway: what each frame, change and second means, in plain collections.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;

use wirepath_packet::drops::DropReason;
use wirepath_wire::MacAddr;

use super::config::{
    Attached, Config, PORT_MTU, Place, Port, Routes, SLOTS, Segment, Slot, remote_address, remote_mac, remote_sid,
};
use super::wire::icmp::{self, comparable, comparable_packet};
use super::wire::{self, Kind, Tunnelled, US, packets};

mod control;
mod groups;
mod router;
mod storm;
mod suppression;

/// Address that stands for the other end of a tunnel with IP packets.
const TUNNEL_PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

/// A frame that leaves the gateway.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Out {
    Local(u16, Vec<u8>),
    Tunnel(Tunnelled),
}

impl Out {
    pub(crate) fn local(port: u16, frame: Vec<u8>) -> Self {
        Self::Local(port, comparable(frame))
    }

    pub(crate) fn tunnel(mut sent: Tunnelled) -> Self {
        let comparable = if sent.kind.carries_ip() { comparable_packet } else { comparable };
        sent.payload = comparable(sent.payload);
        Self::Tunnel(sent)
    }
}

/// Frames and drops that follow from a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    pub(crate) out: Vec<Out>,
    pub(crate) drops: BTreeMap<DropReason, u64>,
}

impl Effects {
    /// Returns what others lack. Of two effects that differ, one has something that the other lacks.
    pub(crate) fn without(&self, other: &Self) -> Self {
        let (mut out, mut drops) = (self.out.clone(), self.drops.clone());
        for frame in &other.out {
            out.iter().position(|it| it == frame).map(|at| out.remove(at));
        }
        drops.retain(|reason, count| {
            *count = count.saturating_sub(other.drops.get(reason).copied().unwrap_or(0));
            *count > 0
        });
        Self { out, drops }
    }
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

/// Numbers of effects by their names.
pub(crate) type Tally = BTreeMap<&'static str, u64>;

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) config: Config,
    /// Nanoseconds since the start.
    now: u64,
    second: u32,
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
    /// Frames to routers that wait for a neighbour: its address, the slot that they came from, and the frame.
    waiting: Vec<(IpAddr, usize, Vec<u8>)>,
    /// Neighbours with a route of their own, by the slot of their network, and those that the control thread adds.
    host_routes: HashSet<(usize, IpAddr)>,
    new_host_routes: Vec<(usize, IpAddr)>,
    /// Hosts that do not answer.
    silent: HashMap<(usize, IpAddr), router::Silent>,
    /// Packets for the control thread to hosts that have not answered: slot and address of the host, the slot that they
    /// came from, and the frame.
    unresolved: Vec<(usize, IpAddr, usize, Vec<u8>)>,
    /// Buckets of storm control by slot and kind of frame, as soon as one was used.
    buckets: HashMap<(usize, usize), storm::Bucket>,
    /// IP addresses of hosts in segments with suppression, and claims that the control thread learns.
    bindings: HashMap<(usize, IpAddr), suppression::Binding>,
    claims: Vec<suppression::Claim>,
    /// Members of the flows of groups.
    flows: groups::Flows,
    /// Number of the member that a new flow gets, the largest number of members that one had, and the flow.
    pub(crate) pick: usize,
    pub(crate) choices: usize,
    chosen: Option<groups::Flow>,
    effects: Effects,
    /// Numbers of effects so far.
    pub(crate) tally: Tally,
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
            now: 0,
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
            host_routes: HashSet::new(),
            new_host_routes: Vec::new(),
            silent: HashMap::new(),
            unresolved: Vec::new(),
            buckets: HashMap::new(),
            bindings: HashMap::new(),
            claims: Vec::new(),
            flows: HashMap::new(),
            pick: 0,
            choices: 0,
            chosen: None,
            effects: Effects::default(),
            tally: Tally::new(),
        };
        model.reload(config);
        model
    }

    /// Returns whether the gateway did what the model did.
    pub(crate) fn agrees(&mut self, found: &Effects) -> bool {
        self.effects.out.sort();
        self.effects == *found
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

    fn count(&mut self, effect: &'static str) {
        *self.tally.entry(effect).or_default() += 1;
    }

    /// Takes the time in nanoseconds since the start.
    pub(crate) fn advance_to(&mut self, now: u64) {
        (self.now, self.second) = (now, (now / 1_000_000_000) as u32);
    }

    fn milliseconds(&self) -> u64 {
        self.now / 1_000_000
    }

    fn is_frozen(&self, key: Key) -> bool {
        self.segment(key.0).moves > 0 && self.moves.get(&key).is_some_and(|it| it.frozen && self.second < it.until)
    }

    fn is_sticky(&self, slot: usize, place: Place) -> bool {
        matches!(place, Place::Port(at) if self.port(slot, at).sticky)
    }

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
        if self.watch(slot, Some(at), &frame) {
            return;
        }
        let place = self.lookup(slot, dst);
        if wire::ethertype(&frame) == wire::IPV6 && place != Some(Place::Router) {
            self.count("bridged from a port, IPv6");
        }
        match place {
            None if !self.may_flood(slot, dst) => self.drop(DropReason::StormControl),
            None => self.flood(slot, From::Port(at), &frame),
            Some(Place::Port(to)) if to == at => self.drop(DropReason::SamePort),
            Some(Place::Port(to)) if self.are_isolated(slot, at, to) => self.drop(DropReason::IsolatedPort),
            Some(Place::Port(to)) => self.deliver(slot, to, &frame),
            Some(Place::Remote(remote)) => _ = self.send(slot, remote, &frame, Some(at)),
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
            return self.route(slot, &wire::ethernet(US, TUNNEL_PEER, wire::ethertype_of(frame), frame));
        }
        if wire::ethertype(frame) == wire::VLAN && !self.segment(slot).carries_tags {
            return self.drop(DropReason::InnerVlan);
        }
        let (dst, src) = (wire::destination(frame), wire::source(frame));
        if src.is_multicast() {
            return self.drop(DropReason::BadSource);
        }
        self.saw((slot, src), Place::Remote(remote));
        self.watch(slot, None, frame);
        if is_link_local(dst) {
            return self.drop(DropReason::LinkLocalMulticast);
        }
        let place = self.lookup(slot, dst);
        if wire::ethertype(frame) == wire::IPV6 && place != Some(Place::Router) {
            self.count("bridged from a tunnel, IPv6");
        }
        match place {
            None => self.flood(slot, From::Remote, frame),
            Some(Place::Port(to)) => self.deliver(slot, to, frame),
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
        ports.into_iter().for_each(|to| self.deliver(slot, to, frame));
        // The first remote that cannot take the frame causes an error.
        let mut sender = if let From::Port(at) = from { Some(at) } else { None };
        for remote in remotes {
            if !self.send(slot, remote, frame, sender) {
                sender = None;
            }
        }
    }

    fn deliver(&mut self, slot: usize, (port, vlan): Attached, frame: &[u8]) {
        if frame.len() > self.longest_to(slot, Place::Port((port, vlan))) {
            self.count("too long for a port");
            return self.drop(DropReason::TooBigForMtu);
        }
        let frame = vlan.map_or_else(|| frame.to_vec(), |vlan| wire::tagged(frame, vlan));
        self.effects.out.push(Out::local(port, frame));
    }

    /// Returns the length of the longest frame that a place in a segment takes. Frames for a tunnel with IP packets
    /// have an Ethernet header.
    fn longest_to(&self, slot: usize, place: Place) -> usize {
        let (segment, Slot { kind, id, .. }) = (self.segment(slot), SLOTS[slot]);
        match place {
            Place::Port((port, _)) => usize::from(PORT_MTU[usize::from(port)]) + segment.link_len(),
            Place::Remote(remote) => {
                let (link, removed) = if kind.carries_ip() { (0, 14) } else { (segment.link_len(), 0) };
                let left = usize::from(PORT_MTU[0]) - kind.overhead(id, remote_address(remote));
                removed + segment.mtu.map_or(left, |mtu| left.min(usize::from(mtu) + link))
            }
            Place::Router => usize::MAX,
        }
    }

    /// Sends a frame to a remote. If it is too long, its sender at a port gets an error. Returns false then.
    fn send(&mut self, slot: usize, remote: u8, frame: &[u8], sender: Option<Attached>) -> bool {
        let kind = SLOTS[slot].kind;
        let longest = self.longest_to(slot, Place::Remote(remote));
        if frame.len() > longest {
            self.count("too long for a remote");
            self.drop(DropReason::TooBigForMtu);
            if let Some((sender, error)) = sender.and_then(|it| Some((it, too_big(frame, longest)?))) {
                self.count(if wire::ethertype(frame) == wire::IPV4 {
                    "error of a bridge, IPv4"
                } else {
                    "error of a bridge, IPv6"
                });
                self.deliver(slot, sender, &error);
            }
            return false;
        }
        if let Some(learned) = self.learned.get_mut(&(slot, remote)) {
            learned.contacted = true;
        }
        let (to, payload) = match kind {
            Kind::Srv6 => (IpAddr::V6(remote_sid()), frame),
            _ if kind.carries_ip() => (remote_address(remote), &frame[14..]),
            _ => (remote_address(remote), frame),
        };
        let (id, mac, payload) = (SLOTS[slot].id, remote_mac(remote), payload.to_vec());
        self.effects.out.push(Out::tunnel(Tunnelled { kind, id, to, mac, payload }));
        true
    }
}

/// Returns the error of a bridge about a frame that is too long. A bridge has no address, so the error comes from the
/// frame's destination.
fn too_big(frame: &[u8], longest: usize) -> Option<Vec<u8>> {
    let (link, inner) = wire::untagged(frame).map_or_else(|| (14, frame.to_vec()), |(_, inner)| (18, inner));
    let (_, from, _) = packets::ends(icmp::ip_packet(&inner)?);
    icmp::too_big(frame, wire::destination(frame), from, longest - link)
}

/// Returns whether bridges keep frames to this address (IEEE 802.1Q table 8-1).
fn is_link_local(mac: MacAddr) -> bool {
    mac.0[..5] == [1, 0x80, 0xc2, 0, 0] && mac.0[5] < 16
}
