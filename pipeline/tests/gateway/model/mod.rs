//! A gateway beside a reference model: sequences of frames, changes of the configuration, and time.
//!
//! A sequence of bytes chooses the steps, so all sequences are valid. After each step the gateway has sent and dropped
//! the frames that the model says. Its forwarding database is that of the model, and no packet is lost. A test runs
//! random sequences, and the fuzz target `gateway_state`, which includes this file by its path, searches for others.

mod config;
mod reference;
mod steps;
mod wire;

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

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

use config::{Config, NVGRE, PORT_MTU, PORTS, REMOTES, SLOTS, attached, neighbour, remote_mac};
pub(crate) use reference::Tally;
use reference::{Effects, Model, Out};
use wire::US;

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

/// Runs the steps that these bytes choose. Returns the numbers of their effects.
pub(crate) fn run(data: &[u8], pool: &Pool) -> Tally {
    let mut input = Input(data);
    let config = Config::read(&mut input);
    let mut lab = Lab::new(config, pool);
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        lab.step(&mut input);
    }
    let tally = std::mem::take(&mut lab.model.tally);
    drop(lab);
    assert_eq!(pool.outstanding(), 0, "buffers that did not return");
    tally
}

struct Lab {
    stepped: SteppedRuntime<Gateway>,
    control: GatewayControl,
    model: Model,
    /// Models in which the flows of this step have other members of groups.
    others: Vec<Model>,
    pool: Pool,
    ports: Vec<PortInfo>,
    remotes: Vec<UnderlayHost>,
    drops: BTreeMap<DropReason, u64>,
    now: u64,
    /// Port and frames of the last packets to a router.
    routed: Option<(PortId, Vec<Vec<u8>>)>,
    /// Steps so far, for the message of a failure.
    steps: Vec<String>,
}

impl Lab {
    fn new(config: Config, pool: &Pool) -> Self {
        let port = |(number, (name, mtu))| {
            PortInfo::simulated(PortId::new(number), name, (number == 0).then_some(US), mtu, pool)
        };
        let ports: Vec<PortInfo> = (0..).zip(PORTS.into_iter().zip(PORT_MTU)).map(port).collect();
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
            others: Vec::new(),
            pool: pool.clone(),
            ports,
            remotes: remotes.into(),
            drops: BTreeMap::new(),
            now: 0,
            routed: None,
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
        if kind < 128 || (16..23).contains(&(kind % 32)) {
            self.turn();
        }
        let mut is_reload = false;
        match kind % 32 {
            0..8 => self.local_frames(input),
            8 | 9 => self.resolution(input),
            10..16 => self.tunnel_frame(input),
            16..19 => self.routed_frame(input),
            19..21 => self.routed_tunnel_frame(input),
            21 | 22 => self.routed_again(input),
            23..26 => {
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
                config.avoid_exchanged_members(&self.model.config);
                self.settle();
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
            30 => self.storm(input),
            _ => self.resolution(input),
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
        self.model.advance_to(self.now);
    }

    /// Applies a change to all models that may be right.
    fn each_model(&mut self, change: impl FnMut(&mut Model)) {
        std::iter::once(&mut self.model).chain(&mut self.others).for_each(change);
    }

    /// Takes packets to a router. Flows of groups may have any of the members.
    fn route(&mut self, packets: impl Fn(&mut Model)) {
        let mut before = self.model.clone();
        (before.pick, before.choices, self.model.pick, self.model.choices) = (0, 0, 0, 0);
        packets(&mut self.model);
        for pick in 1..self.model.choices {
            let mut other = before.clone();
            other.pick = pick;
            packets(&mut other);
            self.others.push(other);
        }
    }

    /// One turn of the control thread.
    fn turn(&mut self) {
        self.stepped.control(&mut self.control);
        self.each_model(Model::control);
    }

    /// Waits until no packet waits for a host that does not answer.
    fn settle(&mut self) {
        self.finish(false);
        while self.model.waiting_packets() > 0 {
            self.advance(SECOND);
            self.finish(false);
        }
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
            if turn >= TURNS {
                let waiting = (self.control.waiting_frames(), self.model.waiting_packets());
                self.check("packets that wait", &waiting.0, &waiting.1);
                panic!("no end");
            }
            // Resolution and its queues take several turns.
            let waiting = self.control.waiting_frames();
            let is_at_rest = [&self.model].into_iter().chain(&self.others).any(|it| it.waiting_packets() == waiting);
            if turn >= 2 && !answered && before == found.len() && is_at_rest {
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
            // The remotes do not answer ARP and ND of a router.
            if tunnelled.kind.carries_ip() || !is_of_router(&tunnelled.payload) {
                found.push(Out::tunnel(tunnelled));
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
        if !is_of_router(&bytes) {
            found.push(Out::local(port.index() as u16, bytes));
            return false;
        }
        let (vlan, request) = wire::untagged(&bytes).map_or((None, bytes), |(vlan, inner)| (Some(vlan), inner));
        let here = (port.index() as u16, vlan);
        let of_slot = |slot: usize| SLOTS[slot].network.filter(|_| attached(slot, 0) == here);
        let Some(network) = (0..SLOTS.len()).find_map(of_slot) else { return false };
        let (addresses, mac) = neighbour(network);
        let reply = addresses.into_iter().find_map(|ip| wire::resolution::reply(&request, ip, mac));
        let Some(reply) = reply else { return false };
        let reply = vlan.map_or_else(|| reply.clone(), |vlan| wire::tagged(&reply, vlan));
        self.each_model(|model| model.local(here.0, &reply));
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
        self.choose_model(&found);
        let expected = self.model.take_effects();
        self.check("frames and drops", &found.without(&expected), &expected.without(&found));
        let rows = self.fdb_rows();
        let expected = self.model.rows();
        self.check("forwarding database", &rows, &expected);
        let rows = self.binding_rows();
        let expected = self.model.binding_rows();
        self.check("bindings", &rows, &expected);
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
        let waiting = self.model.waiting_packets().try_into().expect("a small number");
        self.check("packets in flight", &balance.in_flight(), &waiting);
    }

    /// Keeps the model that agrees with the gateway. If several do, the members of the flow stay unknown.
    fn choose_model(&mut self, found: &Effects) {
        let mut agreeing: Vec<Model> = std::mem::take(&mut self.others);
        agreeing.retain_mut(|it| it.agrees(found));
        let is_known = agreeing.len() + usize::from(self.model.agrees(found)) == 1;
        if !self.model.agrees(found)
            && let Some(other) = agreeing.pop()
        {
            self.model = other;
        }
        if !is_known {
            self.model.forget_chosen();
        }
        self.model.end_choice();
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

    fn binding_rows(&mut self) -> Vec<[String; 6]> {
        let text = |value: &Value| match value {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let row = |row: &Vec<Value>| [0, 1, 2, 3, 4, 5].map(|at| row.get(at).map_or_else(String::new, text));
        let mut rows: Vec<_> = self.rows("bindings").iter().map(row).collect();
        rows.sort();
        rows
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

/// Returns whether a router sent a frame, with or without a tag, to resolve an address.
fn is_of_router(frame: &[u8]) -> bool {
    wire::source(frame) == US && wire::resolution::is_in(frame)
}

fn read(config: &Config) -> GatewayConfig {
    let text = config.text();
    let source = Source::new("model", text.clone());
    let document = source.parse().expect("TOML");
    GatewayConfig::read(&document.settings(), &PORTS).unwrap_or_else(|error| panic!("{error}\n{text}"))
}
