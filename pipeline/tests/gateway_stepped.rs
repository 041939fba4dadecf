//! The gateway step by step, with made-up time: timers, limits, and every packet accounted for.

use std::net::IpAddr;

use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::tunnel::neighbour::State;
use wirepath_pipeline::tunnel::underlay::{Addresses, Answer, Station};
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{PortInfo, Stepped, WorkerInfo};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::{Batch, Pool};
use wirepath_pmd::port::PortId;
use wirepath_pmd::settings::Source;
use wirepath_wire::{EtherType, MacAddr, ethernet, parse};

const US: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const HOST: MacAddr = MacAddr([2, 0, 0, 0, 1, 1]);
const FAR: MacAddr = MacAddr([2, 0, 0, 0, 2, 1]);
const SECOND: u64 = 1_000_000_000;

const WAN: PortId = 0;
const LAN: PortId = 1;

struct Lab {
    stepped: Stepped<Gateway>,
    control: GatewayControl,
    pool: Pool,
    peer: Option<Station>,
}

impl Lab {
    fn new(segment: &str) -> Self {
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
             [[segment]]\nvni = 42\nattach = [{{ port = 'lan' }}]\n{segment}\n"
        );
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
        let pool = Pool::new("stepped", 512).unwrap();
        let ports = vec![
            PortInfo::on_paper(WAN, "wan", Some(US), 1500, &pool),
            PortInfo::on_paper(LAN, "lan", None, 1500, &pool),
        ];
        let domain = Domain::new();
        let control = GatewayControl::new(&config, &ports, &domain, 1, 0);
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
        let stepped = Stepped::new(ports, &domain, control.stage(&worker)).unwrap();
        Self { stepped, control, pool, peer: None }
    }

    fn with_peer(mut self) -> Self {
        let addresses = vec!["10.9.0.2/24".parse().unwrap(), "fd00:9::2/64".parse().unwrap()];
        self.peer = Some(Station::new(Addresses { mac: MacAddr([2, 9, 9, 9, 9, 2]), addresses, gateways: vec![] }));
        self
    }

    fn send(&mut self, port: PortId, bytes: &[u8]) {
        let mut packet = self.pool.take().unwrap();
        assert!(packet.extend_from_slice(bytes, &self.pool));
        let mut batch: Batch = [packet].into_iter().collect();
        self.stepped.process(Some(port), &mut batch);
        assert!(batch.is_empty());
    }

    /// Lets the control work and everything be answered; returns what was sent besides, with its port.
    fn settle(&mut self) -> Vec<(PortId, Vec<u8>)> {
        let mut sent = Vec::new();
        for _ in 0..10 {
            self.stepped.control(&mut self.control);
            while let Some(packet) = self.stepped.sent() {
                let bytes: Vec<u8> = packet.segments().flatten().copied().collect();
                let answer = self.peer.as_mut().map(|peer| peer.handle(&mut bytes.clone(), 0).answer);
                if let (Some(Answer::Frame(answer)), WAN) = (answer, packet.out_port()) {
                    self.send(WAN, &answer);
                } else {
                    sent.push((packet.out_port(), bytes));
                }
            }
        }
        sent
    }

    fn tunnelled(&mut self) -> usize {
        let is_tunnel = |bytes: &[u8]| parse(bytes).is_ok_and(|parsed| parsed.vni().is_some());
        self.settle().iter().filter(|(port, bytes)| *port == WAN && is_tunnel(bytes)).count()
    }

    fn state(&self) -> State {
        self.control.neighbours().next().unwrap().1
    }

    fn dropped(&self, reason: DropReason) -> u64 {
        self.stepped.drops().get(&reason).copied().unwrap_or(0)
    }
}

fn frame(dst: MacAddr, src: MacAddr) -> Vec<u8> {
    let mut out = vec![0; 60];
    ethernet::Repr { dst, src, ethertype: EtherType(0x88b5) }.emit(&mut out).unwrap();
    out
}

#[test]
fn frames_for_a_silent_next_hop_wait_are_dropped_and_named() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    lab.settle();
    for _ in 0..10 {
        lab.send(LAN, &frame(FAR, HOST));
    }
    assert_eq!(lab.tunnelled(), 0);
    assert_eq!((lab.state(), lab.dropped(DropReason::NoNeighbour)), (State::Incomplete, 2), "eight wait");
    for _ in 0..35 {
        lab.stepped.advance(SECOND / 10);
        lab.settle();
    }
    assert_eq!((lab.state(), lab.dropped(DropReason::NoNeighbour)), (State::Failed, 10));
    // While it has failed nothing is kept, and nothing bothers the control thread.
    let punted = lab.stepped.punted();
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!((lab.dropped(DropReason::NoNeighbour), lab.stepped.punted()), (11, punted));
    // It comes back.
    let mut lab = lab.with_peer();
    lab.stepped.advance(31 * SECOND);
    lab.settle();
    lab.stepped.advance(SECOND);
    lab.settle();
    assert_eq!(lab.state(), State::Reachable);
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(lab.tunnelled(), 1);
}

#[test]
fn a_flood_towards_a_silent_next_hop_does_not_keep_out_the_answer() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    for _ in 0..5000 {
        lab.send(LAN, &frame(FAR, HOST));
    }
    let mut lab = lab.with_peer();
    assert!(lab.tunnelled() <= 8);
    assert_eq!(lab.state(), State::Reachable);
    assert_eq!(lab.dropped(DropReason::QueueFull), 0);
}

#[test]
fn addresses_are_forgotten_when_they_are_not_seen() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']\nageing = 10").with_peer();
    lab.settle();
    lab.send(LAN, &frame(FAR, HOST));
    lab.settle();
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).learned), (1, 1));
    for _ in 0..30 {
        // Seen every second: it stays.
        lab.stepped.advance(SECOND);
        lab.send(LAN, &frame(FAR, HOST));
        lab.settle();
    }
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).aged), (1, 0));
    for _ in 0..11 {
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).aged), (0, 1));
}

#[test]
fn the_gateway_says_where_it_is_when_it_starts() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    let announced = |sent: &[(PortId, Vec<u8>)]| {
        let of_us = |bytes: &[u8]| bytes[28..32] == [10, 9, 0, 1] && bytes[38..42] == [10, 9, 0, 1];
        sent.iter().filter(|(port, bytes)| *port == WAN && bytes[12..14] == [8, 6] && of_us(bytes)).count()
    };
    assert_eq!(announced(&lab.settle()), 1);
    lab.stepped.advance(2 * SECOND);
    assert_eq!(announced(&lab.settle()), 1, "and once more");
    lab.stepped.advance(2 * SECOND);
    assert_eq!(announced(&lab.settle()), 0);
}

#[test]
fn another_vtep_with_our_address_is_noticed() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    lab.settle();
    let twin = Addresses { mac: HOST, addresses: vec!["10.9.0.1/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &twin.announcement("10.9.0.1".parse::<IpAddr>().unwrap()));
    let defended = lab.settle();
    assert_eq!(lab.control.conflicts(), 1);
    assert!(defended.iter().any(|(port, bytes)| *port == WAN && bytes[6..12] == US.0 && bytes[12..14] == [8, 6]));
}

#[test]
fn every_buffer_comes_back() {
    let mut lab = Lab::new("remotes = ['10.9.0.2', 'fd00:9::2']").with_peer();
    for i in 0..200u8 {
        lab.send(LAN, &frame(MacAddr([0xff; 6]), MacAddr([2, 0, 0, 0, 3, i])));
        lab.send(LAN, &frame(FAR, HOST)[..14 + usize::from(i % 40)]);
        lab.settle();
    }
    let pool = lab.pool.clone();
    drop(lab);
    assert_eq!(pool.outstanding(), 0);
}
