//! The gateway's tunnels expressed as rules produce the same packets as the gateway.

use std::net::IpAddr;

use wirepath_apps::rules::{GatewayRule, gateway_rules};
use wirepath_flow::Direction;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::{Environment, Outcome, RuleLimits, RuleTable, Timeouts, Toeplitz};
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{PortInfo, SteppedRuntime, WorkerInfo};
use wirepath_settings::Source;
use wirepath_wire::{MacAddr, Parser, Vni};

const US: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const PEER: MacAddr = MacAddr([2, 9, 9, 9, 9, 2]);
const WAN: PortId = PortId::new(0);
const LAN: PortId = PortId::new(1);

/// A simulated gateway with one remote.
struct Lab {
    stepped: SteppedRuntime<Gateway>,
    control: GatewayControl,
    config: GatewayConfig,
    pool: Pool,
    peer: UnderlayHost,
    _domain: Domain,
}

impl Lab {
    fn new(underlay: &str, segment: &str) -> Self {
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n{underlay}\n\
             [[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\n{segment}\n"
        );
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
        let pool = Pool::new("stepped", 512).unwrap();
        let ports = vec![
            PortInfo::simulated(WAN, "wan", Some(US), 1500, &pool),
            PortInfo::simulated(LAN, "lan", None, 1500, &pool),
        ];
        let domain = Domain::new();
        let control = GatewayControl::new(&config, &ports, &domain, 1, 0);
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
        let stepped = SteppedRuntime::new(ports, &domain, control.stage(&worker)).unwrap();
        let addresses = vec!["10.9.0.2/24".parse().unwrap(), "fd00:9::2/64".parse().unwrap()];
        let peer = UnderlayHost::new(Addresses { mac: PEER, addresses, gateways: vec![] });
        Self { stepped, control, config, pool, peer, _domain: domain }
    }

    fn send(&mut self, port: PortId, bytes: &[u8]) {
        let mut batch: Batch = [packet(&self.pool, bytes)].into_iter().collect();
        self.stepped.process(Some(port), &mut batch);
    }

    /// Returns the sent packets, without neighbour discovery, which the peer answers.
    fn settle(&mut self) -> Vec<(PortId, Vec<u8>)> {
        let mut sent = Vec::new();
        for _ in 0..10 {
            self.stepped.control(&mut self.control);
            while let Some(packet) = self.stepped.next_sent() {
                let bytes = bytes(&packet);
                let answer = (packet.out_port() == Some(WAN)).then(|| self.peer.handle(&bytes, 0).reply);
                if let Some(HostReply::Frame(answer)) = answer {
                    self.send(WAN, &answer);
                } else {
                    sent.push((packet.out_port().unwrap(), bytes));
                }
            }
        }
        sent
    }

    fn rules(&self) -> Vec<GatewayRule> {
        gateway_rules(&self.config, &|_: IpAddr| (US, PEER)).unwrap()
    }
}

fn packet(pool: &Pool, bytes: &[u8]) -> Packet {
    let mut packet = pool.take().unwrap();
    assert!(packet.extend_from_slice(bytes, pool));
    packet
}

fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().flatten().copied().collect()
}

struct Nothing(Toeplitz);

impl Environment for Nothing {
    fn now(&self) -> u64 {
        0
    }
    fn pool(&self) -> Option<&Pool> {
        None
    }
    fn toeplitz(&self) -> &Toeplitz {
        &self.0
    }
    fn count(&mut self, _: usize) {}
    fn mirror(&mut self, _: PortId, _: Packet) {}
    fn mirror_failed(&mut self, _: DropReason) {}
}

/// Applies the rules and returns the packet, if one of them matches.
fn by_rules(rules: &[GatewayRule], direction: Direction, mut packet: Packet) -> Option<Packet> {
    let domain = Domain::new();
    let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
    for it in rules {
        table.add(it.rule.clone(), Timeouts::NONE).unwrap();
    }
    let (mut ingress, mut egress) = table.lookups();
    let reader = domain.join();
    let lookup = if direction == Direction::Ingress { &mut ingress } else { &mut egress };
    let parsed = Parser::default().parse_chain(packet.data(), packet.len()).unwrap();
    let mut found = [None];
    lookup.find(reader.guard(), 0, std::slice::from_ref(&packet), &[parsed], &mut found);
    let outcome = found[0]?.program().run(&mut packet, &parsed, &mut Nothing(Toeplitz::default()));
    assert_eq!(outcome, Outcome::Next);
    Some(packet)
}

/// Returns a broadcast frame of a host, which the gateway sends to every remote.
fn from_host() -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 1, 1, 0x88, 0xb5]);
    frame.extend([0x5a; 60]);
    frame
}

/// Clears the fields that may differ: the IPv4 identification and header checksum, the UDP source port, and a
/// checksum.
fn comparable(mut frame: Vec<u8>, checksummed: bool) -> Vec<u8> {
    let l3 = if frame[12..14] == [0x81, 0] { 18 } else { 14 };
    let udp = if frame[l3] >> 4 == 4 {
        frame[l3 + 4..l3 + 6].fill(0);
        frame[l3 + 10..l3 + 12].fill(0);
        l3 + 20
    } else {
        l3 + 40
    };
    assert_ne!(frame[udp..udp + 2], [0, 0], "an entropy port");
    frame[udp..udp + 2].fill(0);
    if checksummed {
        assert_ne!(frame[udp + 6..udp + 8], [0, 0], "a checksum");
        frame[udp + 6..udp + 8].fill(0);
    }
    frame
}

const CASES: [(&str, &str, bool); 6] = [
    ("", "remotes = ['10.9.0.2']", false),
    ("", "remotes = ['fd00:9::2']", true),
    ("vlan = 7\nttl = 9\ndscp = 12\nudp_port = 8472", "remotes = ['10.9.0.2']", false),
    ("udp_checksum = 'always'", "remotes = ['10.9.0.2']", true),
    ("udp_checksum = 'zero'\ndscp = 46", "remotes = ['fd00:9::2']", false),
    ("vlan = 4094", "remotes = ['fd00:9::2']", true),
];

#[test]
fn encapsulated_as_the_gateway_does() {
    for (underlay, segment, checksummed) in CASES {
        let mut lab = Lab::new(underlay, segment);
        if underlay.contains("vlan") {
            // The peer does not support VLANs. These cases are covered by the decapsulation test below.
            continue;
        }
        // The first frame triggers the resolution of the next hop.
        let mut by_gateway = None;
        for _ in 0..2 {
            lab.send(LAN, &from_host());
            let tunnelled = |(port, frame): &(PortId, Vec<u8>)| *port == WAN && frame.len() > from_host().len();
            by_gateway = lab.settle().into_iter().find(tunnelled).map(|(_, frame)| frame).or(by_gateway);
        }
        let by_gateway = by_gateway.expect("encapsulated");
        let rules = lab.rules();
        let mut packet = packet(&lab.pool, &from_host());
        packet.set_out_port(WAN);
        packet.set_app([1, 0]);
        let by_rule_stage = bytes(&by_rules(&rules, Direction::Egress, packet).expect("fits"));
        assert_eq!(comparable(by_rule_stage, checksummed), comparable(by_gateway, checksummed), "{underlay} {segment}");
    }
}

#[test]
fn nic_decapsulates_only_the_gateways_tunnels() {
    for (underlay, segment, _) in CASES {
        // The packets come from the rules of the other end.
        let lab = Lab::new(underlay, segment);
        let mut turned = lab.config.clone();
        let remote = turned.segments[0].remotes[0];
        (turned.segments[0].remotes[0].address, turned.segments[0].remotes[0].local) = (remote.local, remote.address);
        let theirs = gateway_rules(&turned, &|_: IpAddr| (PEER, US)).unwrap();
        let mut inner = packet(&lab.pool, &from_host());
        inner.set_out_port(WAN);
        inner.set_app([1, 0]);
        let tunnelled = bytes(&by_rules(&theirs, Direction::Egress, inner).expect("fits"));

        let mut lab = lab;
        lab.send(WAN, &tunnelled);
        let delivered: Vec<Vec<u8>> =
            lab.settle().into_iter().filter(|(port, _)| *port == LAN).map(|(_, frame)| frame).collect();
        assert_eq!(delivered, [from_host()], "{underlay} {segment}: the gateway takes it");

        // The rules recognise VXLAN on the gateway's UDP port.
        let rules = lab.rules();
        let port = lab.config.underlay.udp_port;
        let fits = |rules: &[GatewayRule], frame: &[u8]| {
            let mut packet = packet(&lab.pool, frame);
            packet.set_in_port(WAN);
            if port != 4789 {
                // The test's parser knows only the standard port.
                return None;
            }
            by_rules(rules, Direction::Ingress, packet)
        };
        let Some(out) = fits(&rules, &tunnelled) else {
            assert_ne!(port, 4789);
            continue;
        };
        assert_eq!((bytes(&out), out.mark()), (from_host(), Some(1)));
        let mut other = lab.config.clone();
        other.segments[0].vni = Vni::new(43).unwrap();
        assert!(fits(&gateway_rules(&other, &|_: IpAddr| (US, PEER)).unwrap(), &tunnelled).is_none(), "another VNI");
        let other_address = gateway_rules(&lab.config, &|_: IpAddr| (PEER, US)).unwrap();
        assert!(fits(&other_address, &tunnelled).is_none(), "to another host");
    }
}

#[test]
fn two_rules_for_each_remote() {
    let lab = Lab::new("", "remotes = ['10.9.0.2', '10.9.0.3']");
    let rules = lab.rules();
    let tags: Vec<u32> = rules.iter().map(|it| it.tag).collect();
    assert_eq!(tags, [1, 1, 2, 2]);
    assert!(rules.iter().all(|it| it.rule.software_only().is_none()), "nothing that no NIC could take");
    // A copied DSCP cannot be part of a constant header.
    assert_eq!(Lab::new("dscp = 'copy'", "remotes = ['10.9.0.2']").rules().len(), 1);
}
