//! A gateway beside a reference model: sequences of frames, changes of the configuration, and time.
//!
//! A sequence of bytes chooses the steps, so all sequences are valid. After each step the gateway has sent and dropped
//! the frames that the model says. Its forwarding database is that of the model, and no packet is lost. A test runs
//! random sequences, and the fuzz target `gateway_state`, which includes this file by its path, searches for others.

mod config;
mod reference;
mod wire;

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::Value;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool, PortId};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::registry::Registry;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{Control, PortInfo, SteppedRuntime, WorkerInfo};
use wirepath_pmd::port::{Link, PortEvent};
use wirepath_settings::Source;
use wirepath_wire::MacAddr;

use config::{
    Config, NETWORKS, NVGRE, PORTS, REMOTES, SLOTS, addresses, attached, host, neighbour, remote_address, remote_mac,
    router_addresses,
};
use reference::{Effects, Model, Out};
use wire::{Kind, US};

const SECOND: u64 = 1_000_000_000;
/// Time of each step. Workers report a source again after 250 ms.
const STEP: u64 = 300_000_000;
/// Steps of a sequence.
const STEPS: usize = 64;
/// Turns of the control thread in which all neighbours answer.
const TURNS: usize = 12;
const WAN: PortId = PortId::new(0);

/// Bytes that choose the steps. Behind their end, all are zero.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }
}

/// Buffers of all sequences, which have all returned at the end of each.
pub(crate) fn pool() -> Pool {
    Pool::new("model", 512).expect("memory")
}

/// Runs the steps that these bytes choose.
pub(crate) fn run(data: &[u8], pool: &Pool) {
    let mut input = Input(data);
    let config = Config::read(&mut input);
    let mut lab = Lab::new(config, pool);
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        lab.step(&mut input);
    }
    drop(lab);
    assert_eq!(pool.outstanding(), 0, "buffers that did not return");
}

struct Lab {
    stepped: SteppedRuntime<Gateway>,
    control: GatewayControl,
    model: Model,
    pool: Pool,
    ports: Vec<PortInfo>,
    remotes: Vec<UnderlayHost>,
    drops: BTreeMap<DropReason, u64>,
    now: u64,
    /// Steps so far, for the message of a failure.
    steps: Vec<String>,
}

impl Lab {
    fn new(config: Config, pool: &Pool) -> Self {
        let ports: Vec<PortInfo> = (0..)
            .zip(PORTS)
            .map(|(number, name)| {
                PortInfo::simulated(PortId::new(number), name, (number == 0).then_some(US), 1500, pool)
            })
            .collect();
        let domain = Domain::new();
        let control = GatewayControl::new(&read(&config), &ports, &domain, 1, 0);
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
        let stepped = SteppedRuntime::new(ports.clone(), &domain, control.stage(&worker)).expect("eventfds");
        let remotes = REMOTES.map(|remote| {
            let addresses = [format!("10.9.0.{remote}/24"), format!("fd00:9::{remote}/64")];
            let addresses = addresses.map(|text| text.parse().expect("an address")).to_vec();
            UnderlayHost::new(Addresses { mac: remote_mac(remote), addresses, gateways: vec![] })
        });
        let mut lab = Self {
            stepped,
            control,
            model: Model::new(config),
            pool: pool.clone(),
            ports,
            remotes: remotes.into(),
            drops: BTreeMap::new(),
            now: 0,
            steps: vec!["start".to_owned()],
        };
        lab.finish(true);
        lab
    }

    /// Does the next step and compares.
    fn step(&mut self, input: &mut Input<'_>) {
        self.advance(STEP);
        self.model.resolved = self.resolved();
        let kind = input.byte();
        // Frames may come before the control thread notices the time. Packets to a router do not: those that need the
        // control thread are sent after it.
        if kind < 128 || (16..21).contains(&(kind % 32)) {
            self.turn();
        }
        let mut is_reload = false;
        match kind % 32 {
            0..10 => self.local_frames(input),
            10..16 => self.tunnel_frame(input),
            16..19 => self.routed_frame(input),
            19..21 => self.routed_tunnel_frame(input),
            21..26 => {
                let seconds = [1, 2, 5, 9, 10, 11, 21, 31, 61, 200, 301][usize::from(input.byte()) % 11];
                self.note(|| format!("{seconds} seconds"));
                self.advance(seconds * SECOND);
            }
            26..29 => {
                is_reload = true;
                let mut config = self.model.config.clone();
                match input.byte() % 8 {
                    0 => config = Config::read(input),
                    1..4 => config.change_route(input),
                    _ => config.change(input),
                }
                self.reload(config);
            }
            29 => {
                let port = 1 + u16::from(input.byte()) % 3;
                self.note(|| format!("link down at {}", PORTS[usize::from(port)]));
                let event = PortEvent::Link(Link::DOWN);
                let Self { stepped, control, .. } = self;
                stepped.with_plane(|plane| control.port_event(PortId::new(port), &event, plane));
                self.model.link_down(port);
            }
            _ => self.local_frames(input),
        }
        self.finish(is_reload);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        let text = text();
        self.steps.push(format!("{:.1} s: {text}", self.now as f64 / SECOND as f64));
    }

    fn advance(&mut self, time: u64) {
        self.now += time;
        self.stepped.advance(time);
        self.model.second = (self.now / SECOND) as u32;
    }

    /// One turn of the control thread.
    fn turn(&mut self) {
        self.stepped.control(&mut self.control);
        self.model.control();
    }

    fn reload(&mut self, config: Config) {
        self.note(|| format!("reload\n{}", config.text()));
        let seconds = self.stepped.with_plane(|plane| plane.seconds());
        let change = self.control.prepare(read(&config), seconds).expect("a change with few parts");
        self.control.reconfigure(change, &self.ports, seconds);
        self.model.reload(config);
    }

    fn send(&mut self, port: PortId, frames: &[Vec<u8>]) {
        self.send_with(port, frames, false);
    }

    /// Sends frames in one batch. Their tags may be in the metadata, as those of ports that remove them.
    fn send_with(&mut self, port: PortId, frames: &[Vec<u8>], in_metadata: bool) {
        let packet = |bytes: &Vec<u8>| -> Packet {
            let mut packet = self.pool.take().expect("a buffer");
            let (tag, bytes) = match wire::untagged(bytes).filter(|_| in_metadata) {
                Some((tag, inner)) => (Some(tag), inner),
                None => (None, bytes.clone()),
            };
            assert!(packet.extend_from_slice(&bytes, &self.pool));
            tag.into_iter().for_each(|tag| packet.set_vlan(tag));
            packet
        };
        let mut batch: Batch = frames.iter().map(packet).collect();
        self.stepped.process(Some(port), &mut batch);
        assert!(batch.is_empty());
    }

    /// Sends frames of local hosts in one batch.
    fn local_frames(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let (slot, number) = (usize::from(how) % SLOTS.len(), usize::from(how / 12) % 3);
        let (port, vlan) = attached(slot, number);
        let mut frames = Vec::new();
        let kinds = [1, 1, 1, 2, 3][usize::from(how) % 5];
        for _ in 0..kinds {
            let (mut frame, count) = inner_frame(input, SLOTS[slot].network, kinds == 1);
            // Some frames have the tag of another segment, or one that no segment has.
            let tag = match input.byte() {
                // The sources of tagged frames are reported behind others where they are bridged with their tag.
                _ if kinds > 1 && vlan.is_none() => vlan,
                0..224 => vlan,
                224..240 => Some(99),
                _ => attached(1 + slot % 8, 1).1,
            };
            if let Some(id) = tag {
                frame = wire::tagged(&frame, id);
            }
            frames.extend(std::iter::repeat_n(frame, count));
        }
        let in_metadata = how >= 200;
        self.note(|| format!("frames at {}: {}", PORTS[usize::from(port)], describe(&frames)));
        frames.iter().for_each(|frame| self.model.local(port, frame));
        self.send_with(PortId::new(port), &frames, in_metadata);
    }

    /// Sends frames of a remote in one batch.
    fn tunnel_frame(&mut self, input: &mut Input<'_>) {
        let (how, which) = (input.byte(), input.byte());
        let slot = usize::from(how) % SLOTS.len();
        let mut remote = REMOTES[usize::from(how / 12) % 4];
        let (kind, mut id) = (SLOTS[slot].kind, SLOTS[slot].id);
        if kind.carries_ip() || self.model.config.segments[slot].is_none() && !has_numbers(kind) {
            return;
        }
        if kind == Kind::Srv6 {
            remote = REMOTES[2];
        }
        if which > 240 && has_numbers(kind) {
            id = Some(1000);
        }
        let mut frames = Vec::new();
        let kinds = [1, 1, 1, 2, 3][usize::from(which) % 5];
        for _ in 0..kinds {
            let (mut frame, count) = inner_frame(input, SLOTS[slot].network, kinds == 1);
            if which.is_multiple_of(16) {
                frame = wire::tagged(&frame, 5);
            }
            frames.extend(std::iter::repeat_n(frame, count));
        }
        self.note(|| format!("{} {id:?} from {}: {}", kind.name(), remote_address(remote), describe(&frames)));
        frames.iter().for_each(|frame| self.model.tunnel(kind, id, remote, frame));
        self.send_tunnelled(kind, id, remote, &frames);
    }

    fn send_tunnelled(&mut self, kind: Kind, id: Option<u32>, remote: u8, payloads: &[Vec<u8>]) {
        let packet = |it: &Vec<u8>| wire::to_gateway(kind, id, remote_address(remote), remote_mac(remote), it);
        let packets: Vec<_> = payloads.iter().map(packet).collect();
        self.send(WAN, &packets);
    }

    /// Sends packets to the router of a segment, from a local port.
    fn routed_frame(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let slot = usize::from(how) % 3;
        let (port, vlan) = attached(slot, usize::from(how >> 2) % 3);
        let packet = routed_packet(input, SLOTS[slot].network.unwrap_or(1));
        let mut frame = wire::ethernet(US, host(how >> 3), wire::ethertype_of(&packet), &packet);
        if how == 255 {
            frame = wire::ethernet(US, host(0), 0x88b5, &packet);
        }
        if let Some(id) = vlan {
            frame = wire::tagged(&frame, id);
        }
        let frames = vec![frame; 1 + usize::from(how >> 6)];
        self.note(|| format!("routed frames at {}: {}", PORTS[usize::from(port)], describe(&frames)));
        frames.iter().for_each(|frame| self.model.local(port, frame));
        self.send(PortId::new(port), &frames);
    }

    /// Sends packets to a router, from a tunnel with IP packets.
    fn routed_tunnel_frame(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let slot = 10 + usize::from(how) % 2;
        let Some(remote) = self.model.config.segments[slot].as_ref().map(|it| it.remotes[0]) else { return };
        let packet = routed_packet(input, 77);
        let (kind, id) = (SLOTS[slot].kind, SLOTS[slot].id);
        let packets = vec![packet; 1 + usize::from(how >> 6)];
        let mut trial = self.model.clone();
        packets.iter().for_each(|packet| trial.tunnel(kind, id, remote, packet));
        if trial.is_unknown {
            return;
        }
        self.model = trial;
        self.note(|| format!("{} from {}: {packets:x?}", kind.name(), remote_address(remote)));
        self.send_tunnelled(kind, id, remote, &packets);
    }

    /// Runs the control thread and answers ARP and ND until nothing happens, and compares.
    fn finish(&mut self, is_reload: bool) {
        let mut found = Vec::new();
        for turn in 0.. {
            self.turn();
            let before = found.len();
            let mut answered = false;
            while let Some(packet) = self.stepped.next_sent() {
                let port = packet.out_port().expect("an output port");
                let bytes: Vec<u8> = packet.segments().flatten().copied().collect();
                drop(packet);
                answered |=
                    if port == WAN { self.underlay(bytes, &mut found) } else { self.lan(port, bytes, &mut found) };
            }
            assert!(turn < TURNS, "no end");
            // Resolution and its queues take several turns.
            if turn >= 2 && !answered && before == found.len() && self.control.waiting_frames() == 0 {
                break;
            }
        }
        found.sort();
        self.compare(found, is_reload);
    }

    /// Takes a frame that was sent to the underlay. Returns true if it was answered.
    fn underlay(&mut self, bytes: Vec<u8>, found: &mut Vec<Out>) -> bool {
        let nvgre = self.model.config.segments[NVGRE].is_some();
        if let Some(tunnelled) = wire::from_gateway(&bytes, nvgre) {
            // ARP and ND of a router, which the remotes do not answer.
            if tunnelled.kind.carries_ip() || !wire::is_resolution(&tunnelled.payload) {
                found.push(Out::Tunnel(tunnelled));
            }
            return false;
        }
        let replies: Vec<Vec<u8>> = (self.remotes.iter_mut())
            .filter_map(|host| match host.handle(&bytes, 0).reply {
                HostReply::Frame(reply) => Some(reply),
                _ => None,
            })
            .collect();
        replies.iter().for_each(|reply| self.send(WAN, std::slice::from_ref(reply)));
        !replies.is_empty()
    }

    /// Takes a frame that was sent to a local port. Returns true if it was answered.
    fn lan(&mut self, port: PortId, bytes: Vec<u8>, found: &mut Vec<Out>) -> bool {
        if !wire::is_resolution(&bytes) {
            found.push(Out::Local(port.index() as u16, wire::comparable(bytes)));
            return false;
        }
        let (vlan, request) = wire::untagged(&bytes).map_or((None, bytes), |(vlan, inner)| (Some(vlan), inner));
        let here = (port.index() as u16, vlan);
        let of_slot = |slot: usize| SLOTS[slot].network.filter(|_| attached(slot, 0) == here);
        let Some(network) = (0..SLOTS.len()).find_map(of_slot) else { return false };
        let (addresses, mac) = neighbour(network);
        let reply = addresses.into_iter().find_map(|ip| wire::resolution_reply(&request, ip, mac));
        let Some(reply) = reply else { return false };
        let reply = vlan.map_or_else(|| reply.clone(), |vlan| wire::tagged(&reply, vlan));
        self.model.local(here.0, &reply);
        self.send(port, &[reply]);
        true
    }

    fn compare(&mut self, found: Vec<Out>, is_reload: bool) {
        let after = self.stepped.drops();
        let mut drops: BTreeMap<DropReason, u64> = BTreeMap::new();
        for (reason, count) in &after {
            let new = count - self.drops.get(reason).copied().unwrap_or(0);
            // Messages of new routers may find no next hop of a new remote yet.
            if new > 0 && !(is_reload && *reason == DropReason::NoNeighbour) {
                drops.insert(*reason, new);
            }
        }
        self.drops = after;
        let found = Effects { out: found, drops };
        let expected = self.model.take_effects();
        self.check("frames and drops", &found, &expected);
        let rows = self.fdb_rows();
        let expected = self.model.rows();
        self.check("forwarding database", &rows, &expected);
        self.check("learned remotes", &self.control.learned_remotes(), &self.model.learned_remotes());
        let in_use = (0..SLOTS.len()).filter(|slot| self.model.config.segments[*slot].is_some());
        let stats: Vec<_> = in_use
            .clone()
            .enumerate()
            .map(|(position, _)| self.control.learn_stats(position))
            .map(|it| reference::Stats { learned: it.learned, moved: it.moved, aged: it.aged })
            .collect();
        let expected: Vec<_> = in_use.map(|slot| self.model.stats[slot]).collect();
        self.check("addresses learned, moved and aged", &stats, &expected);
        let balance = self.stepped.balance();
        self.check("packets in flight", &balance.in_flight(), &0);
    }

    fn rows(&mut self, table: &str) -> Vec<Vec<Value>> {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| {
            let mut registry = Registry { control, plane };
            let table = registry.table(table).expect("the table");
            registry.rows(table)
        })
    }

    /// Returns the addresses of neighbours that the gateway knows. A packet to another one waits.
    fn resolved(&mut self) -> HashSet<IpAddr> {
        let rows = self.rows("neighbours");
        let is_known = |address: &IpAddr| {
            let address = address.to_string();
            rows.iter().any(|row| row[1] == address.as_str() && row[3].as_str().is_some_and(|mac| !mac.is_empty()))
        };
        let networks = SLOTS.iter().filter_map(|slot| slot.network);
        networks.flat_map(|network| neighbour(network).0).filter(is_known).collect()
    }

    fn fdb_rows(&mut self) -> Vec<(String, String, String, String, Option<u32>)> {
        let rows = self.rows("fdb");
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let mut rows: Vec<_> = (rows.iter())
            .map(|row| {
                (text(&row[0]), text(&row[1]), text(&row[2]), text(&row[3]), row[4].as_u64().map(|age| age as u32))
            })
            .collect();
        rows.sort();
        rows
    }

    #[track_caller]
    fn check<T: PartialEq + std::fmt::Debug>(&self, what: &str, found: &T, expected: &T) {
        if found != expected {
            let steps = self.steps.join("\n");
            let config = self.model.config.text();
            panic!("{steps}\n\nconfiguration:\n{config}\n{what}\n   found {found:x?}\nexpected {expected:x?}");
        }
    }
}

fn read(config: &Config) -> GatewayConfig {
    let text = config.text();
    let source = Source::new("model", text.clone());
    let document = source.parse().expect("TOML");
    GatewayConfig::read(&document.settings(), &PORTS).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Returns whether segments of this kind have identifiers, and an unknown one is dropped as such.
fn has_numbers(kind: Kind) -> bool {
    matches!(kind, Kind::Vxlan | Kind::Geneve | Kind::VxlanGpe)
}

/// Returns a frame between hosts, and how often it is sent. Short frames are alone in their batch: the sources of
/// others are reported before theirs, which matters if only one can be learned.
fn inner_frame(input: &mut Input<'_>, network: Option<u8>, is_alone: bool) -> (Vec<u8>, usize) {
    let (ends, how) = (input.byte(), input.byte());
    let src = if how >= 250 { MacAddr([3, 0, 0, 0, 0, 9]) } else { host(ends) };
    let dst = match how % 16 {
        0..9 => host(ends >> 3),
        9..12 => MacAddr([0xff; 6]),
        12 => MacAddr([1, 0, 0x5e, 0, 0, 5]),
        13 => MacAddr([1, 0x80, 0xc2, 0, 0, how >> 4]),
        _ => neighbour(network.unwrap_or(1)).1,
    };
    let count = [1, 1, 2, 4][usize::from(ends >> 6)];
    let ip = |mac: MacAddr| addresses(1, 100 + mac.0[5] % 100)[0];
    let frame = match how >> 4 & 3 {
        0 => wire::ethernet(dst, src, 0x88b5, &[0x5a; 46]),
        1 if is_alone => wire::ethernet(dst, src, 0x88b5, &[]),
        1 | 2 => wire::ethernet(dst, src, wire::IPV4, &wire::datagram(ip(src), ip(dst), 64, 20)),
        _ => wire::ethernet(dst, src, wire::IPV4, &wire::datagram(ip(src), ip(dst), 64, 700)),
    };
    (frame, count)
}

/// Returns an IP packet that a router has to forward or to refuse.
fn routed_packet(input: &mut Input<'_>, network: u8) -> Vec<u8> {
    let (how, to) = (input.byte(), usize::from(input.byte()));
    let version = to >> 4 & 1;
    let dst = match to % 10 {
        number @ 0..3 => neighbour(1 + number as u8).0[version],
        3 => router_addresses(1)[version],
        4 => addresses(99, 1)[version],
        _ => match NETWORKS[to % NETWORKS.len()].0 {
            IpAddr::V4(network) => Ipv4Addr::from_bits(network.to_bits() | 0x0101).into(),
            IpAddr::V6(network) => Ipv6Addr::from_bits(network.to_bits() | 1 << 64 | 1).into(),
        },
    };
    let src = addresses(network, 20)[usize::from(dst.is_ipv6())];
    let ttl = if how >= 240 { 1 } else { 64 };
    wire::datagram(src, dst, ttl, 20 + usize::from(how >> 5) * 20)
}

/// Describes frames by their addresses.
fn describe(frames: &[Vec<u8>]) -> String {
    let one = |frame: &Vec<u8>| {
        let ends = (wire::source(frame), wire::destination(frame), wire::ethertype(frame), frame.len());
        let tag = wire::untagged(frame).map(|(tag, _)| tag);
        format!("{} to {} type {:04x} of {} bytes, tag {tag:?}", ends.0, ends.1, ends.2, ends.3)
    };
    frames.iter().map(one).collect::<Vec<_>>().join("; ")
}
