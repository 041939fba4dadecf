//! Test bench for rule offload, with the comparison against the reference: packets, order and counters must
//! be equal.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use wirepath_flow::{Action, Direction, HeaderEnd, ItemKind, Ports, ReformatKind, Rule};
use wirepath_packet::offload::Flags;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::offload::{Placement, predict_placements};
use wirepath_pipeline::rules::{RuleControl, RuleLimits, RuleStage, check};
use wirepath_pipeline::{Context, ControlPlane, PortInfo, Punt, SteppedRuntime, WorkerInfo};
use wirepath_pmd::port::hardware::RuleCapabilities;
use wirepath_pmd::port::{KernelPunt, Port, PortId};
use wirepath_rule_oracle::{
    DropCause, Fault, Frame, Outcome, PacketMetadata, Reference, Rng, Verdict, compare, generate, show, shrink,
};
use wirepath_wire::Parser;

pub(crate) const PORTS: u16 = 4;
/// Longest received frame in bytes.
pub(crate) const LONGEST: usize = 1800;
/// Maximum number of frames in a burst.
const BURST: usize = 30;
const _: () = assert!(BURST <= BATCH);

/// A received packet and its queue.
pub(crate) type Received = (Option<u16>, Packet);

/// The NIC of a port.
pub(crate) trait Nic {
    /// Returns the packets that arrive for these frames. `due` says for each frame whether it should arrive.
    fn receive(&mut self, frames: &[&[u8]], due: &[bool], pool: &Pool) -> Result<Vec<Received>, String>;

    /// Returns the frames that these packets become on the wire, in order.
    fn send(&mut self, packets: Vec<Packet>) -> Result<Vec<Vec<u8>>, String>;
}

/// Returns a reference configured like the engine: header checksums are not verified.
pub(crate) fn reference(rules: &[Rule]) -> Reference {
    let mut reference = Reference::new(rules);
    reference.rss_key = wirepath_pipeline::rules::actions::DEFAULT_RSS_KEY.to_vec();
    reference.ports.checksums = false;
    reference
}

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// A packet that reached the inner stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) frame: Vec<u8>,
    pub(crate) mark: u32,
    /// True if the packet matched its rule in the NIC.
    tagged: bool,
}

/// Returns the bytes of a packet as on the wire, with a stripped tag.
pub(crate) fn bytes(packet: &Packet) -> Vec<u8> {
    let mut bytes: Vec<u8> = packet.segments().flatten().copied().collect();
    if let Some(tci) = packet.vlan() {
        let tpid: u16 = if packet.flags().contains(Flags::VLAN_SERVICE) { 0x88a8 } else { 0x8100 };
        bytes.splice(12..12, tpid.to_be_bytes().into_iter().chain(tci.to_be_bytes()));
    }
    bytes
}

type Inner = Box<dyn FnMut(&mut Context<'_>, &mut Batch) + Send>;

/// A program with rules, its ports and their NICs.
pub(crate) struct Bench<N> {
    pub(crate) stepped: SteppedRuntime<RuleStage<Inner>>,
    pub(crate) control: RuleControl,
    pub(crate) nics: Vec<N>,
    pub(crate) seen: Arc<Mutex<Vec<Seen>>>,
    pub(crate) pool: Pool,
    pub(crate) ports: Vec<PortInfo>,
    /// True if packets are forwarded to the next port; otherwise the inner stage consumes them.
    forward: Arc<AtomicBool>,
    now: u64,
    /// Number of packets that arrived with the tag of a rule.
    pub(crate) tagged: usize,
}

struct Kernel<'r>(&'r mut RuleControl);

impl wirepath_pipeline::Control for Kernel<'_> {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        assert!(RuleControl::punt(punt, plane).is_none(), "only what is for the kernel is punted here");
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.0.tick(plane);
    }
}

/// A received frame. Frames of one burst arrive together.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) burst: usize,
    pub(crate) port: PortId,
    pub(crate) frame: Vec<u8>,
}

/// A test case: rules, earlier rules, and frames.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) direction: Direction,
    pub(crate) early: Vec<Rule>,
    pub(crate) rules: Vec<Rule>,
    pub(crate) sent: Vec<Sent>,
}

/// Parameters of a test case.
pub(crate) struct CaseConfig<'a> {
    /// Total number of frames.
    pub(crate) packets: usize,
    /// True if every frame arrives on all ports; otherwise each burst arrives on one port.
    pub(crate) everywhere: bool,
    /// Capabilities that most rules are made for.
    pub(crate) can: Option<&'a RuleCapabilities>,
    /// Filter of allowed frames.
    pub(crate) may: &'a dyn Fn(&[u8]) -> bool,
}

/// Returns true if a NIC could run at least a part of a rule on its own.
fn fits(can: &RuleCapabilities, rule: &Rule) -> bool {
    let placed = predict_placements(
        can,
        PortId::new(0),
        Parser::default().tunnels,
        (std::slice::from_ref(rule), 0),
        Ports::default(),
    );
    placed[0].as_ref().is_some_and(|placement| placement.name() != "software")
}

/// Returns random rules that a program with these ports can run. With `can`, most of them suit such a NIC.
fn rules_for(
    rng: &mut Rng,
    ports: &[PortInfo],
    count: usize,
    direction: Direction,
    can: Option<&RuleCapabilities>,
) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    while rules.len() < count {
        let rule = match rng.below(8) {
            0 => tunnel(rng, direction),
            1 if can.is_some() && direction == Direction::Ingress => filter(rng),
            _ => generate::rule(rng, &rules),
        };
        let right = rule.direction() == direction && check(&rule, ports).is_none();
        // The kernel of these ports gets a copy of every original frame, so it cannot get changed ones.
        let kernel = rule.actions().last() == Some(&Action::Kernel);
        if right && !kernel && can.is_none_or(|can| rng.one_in(10) || fits(can, &rule)) {
            rules.push(rule);
        }
    }
    rules
}

/// Tunnels of rules that decapsulate: what stands behind the outer IP item. `proto 4` belongs to that item.
pub(crate) const DECAPS: [&str; 8] = [
    "udp / vxlan vni VNI",
    "udp / geneve vni VNI optlen 0 oam 0 proto 0x6558",
    "gre flags 0 proto 0x6558",
    "gre flags 0x2000 key VNI proto 0x6558",
    "gre flags 0x2000 key 0x100 mask 0xffffff00 proto 0x6558",
    "gre flags 0 proto 0x0800",
    "udp / geneve vni VNI optlen 0 oam 0 proto 0x0800",
    "proto 4",
];

/// Returns the tunnel of a rule that decapsulates or encapsulates, as a word.
pub(crate) fn tunnel_word(rule: &Rule) -> Option<&'static str> {
    let has = |kind| rule.pattern().iter().any(|item| item.kind == kind && !item.inner);
    rule.actions().iter().find_map(|action| {
        let Action::Reformat(reformat) = action else { return None };
        let end = reformat.layout().map(|layout| layout.end);
        let word = |frames, packets| match reformat.kind() {
            ReformatKind::L2TunnelToL2 | ReformatKind::L2ToL2Tunnel => frames,
            ReformatKind::L3TunnelToL2 | ReformatKind::L2ToL3Tunnel => packets,
        };
        Some(match (rule.direction(), end) {
            (Direction::Ingress, _) if has(ItemKind::Vxlan) => "decap vxlan",
            (Direction::Ingress, _) if has(ItemKind::Geneve) => word("decap geneve l2", "decap geneve l3"),
            (Direction::Ingress, _) if has(ItemKind::Gre) => word("decap gre l2", "decap gre l3"),
            (Direction::Ingress, _) => "decap ip",
            (Direction::Egress, Some(HeaderEnd::Vxlan)) => "encap vxlan",
            (Direction::Egress, Some(HeaderEnd::Geneve)) => word("encap geneve l2", "encap geneve l3"),
            (Direction::Egress, Some(HeaderEnd::Gre)) => word("encap gre l2", "encap gre l3"),
            (Direction::Egress, _) => "encap ip",
        })
    })
}

/// Returns a rule with a tunnel action that a NIC may run. Random rules rarely have one.
fn tunnel(rng: &mut Rng, direction: Direction) -> Rule {
    let (prio, vni, host) = (rng.below(6), rng.below(3), 1 + rng.below(3));
    let text = match direction {
        Direction::Ingress => {
            let more = rng.pick(&["", ", set ipv4 dscp 3", ", set ipv4 dst 10.9.9.9, dec-ttl", ", dec-ttl, count"]);
            let inner = if more.is_empty() { "" } else { " / ipv4" };
            let outer = rng.pick(&["ipv4 src 10.0.0.HOST", "ipv4 src 10.0.0.HOST ecn 0", "ipv6 src fd00::HOST"]);
            let outer = outer.replace("HOST", &host.to_string());
            let kind = rng.pick(&DECAPS);
            let (outer, kind) = match kind.strip_prefix("proto 4") {
                Some(rest) => (outer + " proto 4", rest.to_owned()),
                None => (outer, format!(" / {}", kind.replace("VNI", &vni.to_string()))),
            };
            // Frames stay as they are, and IP packets get an Ethernet header.
            if kind.ends_with("0x6558") || kind.contains("vxlan") {
                format!("ingress prio {prio}: eth / {outer}{kind} / eth{inner} => decap l2{more}, mark 5")
            } else {
                let link = "0200000000090200000000080800";
                format!("ingress prio {prio}: eth / {outer}{kind} / inner ipv4 => decap l3 {link}{more}, mark 5")
            }
        }
        Direction::Egress => {
            let before = rng.pick(&["", "count, "]);
            let (port, sum) = (rng.pick(&[0, 5]), rng.pick(&[0, 0, 1]));
            // Headers behind Ethernet and IPv4: UDP with source port 0 or 5 and VXLAN or GENEVE, GRE, or nothing.
            let (kind, protocol, tunnel) = match rng.below(6) {
                0 | 1 => ("l2", 17, format!("{port:04x}12b50000{sum:04x}08000000{vni:06x}00")),
                2 => ("l2", 47, "00006558".to_owned()),
                3 => ("l3", 17, format!("{port:04x}17c10000{sum:04x}00000800{vni:06x}00")),
                4 => ("l3", 47, "00000800".to_owned()),
                _ => ("l3", 4, String::new()),
            };
            let ip = format!("4500000000004000{:02x}{protocol:02x}00000a00000{host}0a0000fe", 64);
            let header = format!("02000000000a02000000000b0800{ip}{tunnel}");
            let pattern = match kind {
                "l2" => rng.pick(&["ipv4", "udp", "eth", "ipv6 / tcp"]),
                _ => "ipv4",
            };
            format!("egress prio {prio}: port id {} / {pattern} => {before}encap {kind} {header}", rng.below(3))
        }
    };
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Returns a rule that drops, which any NIC may count.
fn filter(rng: &mut Rng) -> Rule {
    let (prio, host) = (rng.below(6), 1 + rng.below(3));
    let pattern = rng.pick(&[
        "ipv4 src 10.0.0.HOST",
        "ipv4 dst 10.0.0.HOST / tcp dst 22",
        "ipv4 src 10.0.0.0/24 / udp src 4000",
        "ipv6 src fd00::HOST / udp dst 53",
        "eth dst 02:00:00:00:00:0HOST",
    ]);
    let drop = rng.pick(&["drop", "count, drop"]);
    let text = format!("ingress prio {prio}: {} => {drop}", pattern.replace("HOST", &host.to_string()));
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Returns true if the outcome of the rule depends on earlier packets.
fn is_stateful(rule: &Rule) -> bool {
    rule.actions().iter().any(|action| matches!(action, Action::Limit(_)))
}

impl Case {
    pub(crate) fn new(rng: &mut Rng, ports: &[PortInfo], direction: Direction, config: &CaseConfig<'_>) -> Self {
        let count = rng.pick(&[3, 10, 30]);
        let can = config.can.filter(|_| !rng.one_in(3));
        let rules = rules_for(rng, ports, count, direction, can);
        let early = rules_for(rng, ports, 3, direction, can);
        let oracle = reference(&rules);
        let mut sent = Vec::new();
        let (mut burst, mut left, mut port) = (0, 0, PortId::new(0));
        while sent.len() < config.packets {
            let aim = rng.index(rules.len());
            let wanted = (!rng.one_in(10)).then_some(&rules[aim]);
            let (frame, _) = generate::packet(rng, wanted);
            if frame.len() > LONGEST || !(config.may)(&frame) {
                continue;
            }
            let by: Vec<PortId> = if config.everywhere { (0..PORTS).map(PortId::new).collect() } else { vec![port] };
            // Packets of a stateful rule are sent alone, because queues are drained one after the other.
            let alone = (0..PORTS).any(|port| {
                let rule = oracle.classify(direction, &frame, &PacketMetadata { port, ..PacketMetadata::default() });
                rule.and_then(|id| oracle.rule(id)).is_some_and(is_stateful)
            });
            if left == 0 || alone {
                (burst, left) = (burst + 1, 1 + rng.index(BURST));
                port = PortId::new(rng.below(PORTS.into()) as u16);
            }
            sent.extend(by.into_iter().map(|port| Sent { burst, port, frame: frame.clone() }));
            left = if alone { 0 } else { left - 1 };
        }
        Self { direction, early, rules, sent }
    }

    /// Returns the frames of each burst, by port.
    fn bursts(&self) -> Vec<(PortId, Vec<&[u8]>)> {
        let mut bursts: BTreeMap<(usize, PortId), Vec<&[u8]>> = BTreeMap::new();
        for sent in &self.sent {
            bursts.entry((sent.burst, sent.port)).or_default().push(&sent.frame);
        }
        bursts.into_iter().map(|((_, port), frames)| (port, frames)).collect()
    }

    /// Returns a minimal case with simplified rules that fails like this one.
    pub(crate) fn shrunk(&self, mut fails: impl FnMut(&Self) -> bool) -> Self {
        let mut small = self.clone();
        let without = Self { early: Vec::new(), ..small.clone() };
        if fails(&without) {
            small = without;
        }
        small.sent = shrink::smallest_subset(&small.sent, |sent| fails(&Self { sent: sent.to_vec(), ..small.clone() }));
        small.rules =
            shrink::smallest_subset(&small.rules, |rules| fails(&Self { rules: rules.to_vec(), ..small.clone() }));
        small.rules = shrink::simplest(&small.rules, |rules| fails(&Self { rules: rules.to_vec(), ..small.clone() }));
        small
    }

    /// Formats the case.
    pub(crate) fn show(&self) -> String {
        let early = show::rules((0..).zip(&self.early));
        let rules = show::rules((0..).zip(&self.rules));
        let frame = |sent: &Sent| format!("port {} {}\n", sent.port, show::hex(&sent.frame));
        let sent: String = self.sent.iter().map(frame).collect();
        let (n, packets) = (self.rules.len(), self.sent.len());
        format!("shrunk to {n} rules and {packets} packets:\n{rules}{sent}before them:\n{early}")
    }
}

/// An expected packet.
struct Expected<'a> {
    frame: &'a [u8],
    metadata: PacketMetadata,
    outcome: Outcome,
    /// Queue that the NIC must choose.
    queue: Option<u16>,
}

impl<N: Nic> Bench<N> {
    /// Creates a bench with these NICs and their ports. Other ports are simulated.
    pub(crate) fn new(nics: Vec<N>, devices: Vec<Port>, pool: &Pool, queues: u16) -> Self {
        let domain = Domain::new();
        let ports: Vec<PortInfo> = (0..PORTS)
            .map(|id| {
                let mut port = PortInfo::simulated(PortId::new(id), &format!("p{id}"), None, 9000, pool);
                port.capabilities.kernel_punt = KernelPunt::Copy;
                port.queues = queues;
                port
            })
            .collect();
        let workers = vec![vec![0; queues.into()]; PORTS.into()];
        let mut control =
            RuleControl::for_ports(&domain, ports.clone(), workers, Parser::default(), RuleLimits::default());
        let info = WorkerInfo {
            index: 0,
            workers: 1,
            core: None,
            rx_queues: (0..PORTS).map(|port| (PortId::new(port), 0)).collect(),
        };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let forward = Arc::new(AtomicBool::new(false));
        let inside = {
            let (seen, forward) = (Arc::clone(&seen), Arc::clone(&forward));
            move |context: &mut Context<'_>, batch: &mut Batch| {
                if forward.load(Ordering::Relaxed) {
                    let port = PortId::new(context.in_port().map_or(0, |port| (port.number() + 1) % PORTS));
                    context.send_batch(port, batch);
                } else {
                    let mut seen = seen.lock().unwrap();
                    batch.filter_map(|packet| {
                        let tagged = packet.app()[1] != 0;
                        seen.push(Seen { frame: bytes(&packet), mark: packet.mark().unwrap_or(0), tagged });
                        None
                    });
                }
            }
        };
        let stage = control.stage(&info, Box::new(inside) as Inner);
        let mut stepped = SteppedRuntime::new(ports.clone(), &domain, stage).unwrap();
        stepped.set_devices(devices);
        Self { stepped, control, nics, seen, pool: pool.clone(), ports, forward, now: 0, tagged: 0 }
    }

    pub(crate) fn set(&mut self, rules: &[Rule]) {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| control.replace(plane, rules).unwrap());
    }

    /// Enables the rule hardware, for present and future rules.
    pub(crate) fn enable_hardware(&mut self) {
        let Self { stepped, control, nics, .. } = self;
        stepped.with_plane(|plane| control.enable_hardware(plane, (0..nics.len() as u16).map(PortId::new)));
    }

    pub(crate) fn packet(&self, frame: &[u8], tag: Option<u32>) -> Packet {
        packet(&self.pool, frame, tag)
    }

    pub(crate) fn tick(&mut self, nanoseconds: u64) {
        self.now += nanoseconds;
        self.stepped.advance(nanoseconds);
        let Self { stepped, control, .. } = self;
        stepped.control(&mut Kernel(control));
    }

    /// Returns packets and bytes of each rule.
    pub(crate) fn counters(&mut self) -> Vec<(u64, u64)> {
        let Self { stepped, control, .. } = self;
        let standing = stepped.with_plane(|plane| control.active_rules(Some(plane)));
        standing.iter().map(|it| (it.counters.packets, it.counters.bytes)).collect()
    }

    /// Returns the frames on the wire of each port.
    fn sent(&mut self) -> Result<BTreeMap<PortId, Vec<Vec<u8>>>, String> {
        let mut packets: BTreeMap<PortId, Vec<Packet>> = BTreeMap::new();
        while let Some(packet) = self.stepped.next_sent() {
            packets.entry(packet.out_port().unwrap()).or_default().push(packet);
        }
        let mut out = BTreeMap::new();
        for (port, packets) in packets {
            let frames = match self.nics.get_mut(port.index()) {
                Some(nic) => nic.send(packets)?,
                None => packets.iter().map(bytes).collect(),
            };
            out.insert(port, frames);
        }
        Ok(out)
    }

    /// Returns the number of rules per kind of placement.
    pub(crate) fn words(&mut self) -> HashMap<&'static str, usize> {
        let mut words: HashMap<&'static str, usize> = HashMap::new();
        for (_, placement) in self.control.placements().iter().flatten() {
            *words.entry(placement.name()).or_default() += 1;
        }
        words
    }

    /// Sets the rules of a case, sends its frames, and compares with a reference with this fault.
    pub(crate) fn check(&mut self, case: &Case, fault: Fault) -> Result<(), String> {
        self.set(&case.rules);
        self.pass(case, &mut reference(&case.rules).with(fault), &mut vec![(0, 0); case.rules.len()])
    }

    /// Sends the frames of a case to its rules, which are already set and have these counts, and compares
    /// with the reference.
    pub(crate) fn pass(
        &mut self,
        case: &Case,
        reference: &mut Reference,
        counts: &mut [(u64, u64)],
    ) -> Result<(), String> {
        let Case { direction, rules, .. } = case;
        self.forward.store(*direction == Direction::Egress, Ordering::Relaxed);
        let placements = self.control.placements();
        let in_hardware = |rule: u64, port: PortId| {
            let of = |(at, placement): &(PortId, Placement)| *at == port && matches!(placement, Placement::Hardware(_));
            *direction == Direction::Ingress && placements[rule as usize].iter().any(of)
        };
        for (port, frames) in case.bursts() {
            let here = if *direction == Direction::Egress { PortId::new((port.number() + 1) % PORTS) } else { port };
            let metadata = PacketMetadata { port: here.number(), ..PacketMetadata::default() };
            let expected: Vec<Expected<'_>> = frames
                .iter()
                .map(|frame| {
                    let outcome = reference.run(*direction, frame, &metadata, self.now);
                    let queue = match (&outcome.verdict, outcome.rule) {
                        (Verdict::Queue(queue), Some(rule)) if in_hardware(rule, port) => Some(*queue),
                        _ => None,
                    };
                    Expected { frame, metadata, outcome, queue }
                })
                .collect();
            for Expected { frame, outcome, .. } in &expected {
                let Some(id) = outcome.rule.map(|id| id as usize) else { continue };
                let own = rules[id].actions().contains(&Action::Count);
                if let Some(bytes) = if own { outcome.counted } else { Some(frame.len() as u64) } {
                    let count: &mut (u64, u64) = &mut counts[id];
                    *count = (count.0 + 1, count.1 + bytes);
                }
            }
            let gone = |it: &Expected<'_>| {
                let dropped = it.outcome.verdict == Verdict::Dropped(DropCause::RuleDrop);
                dropped && it.outcome.rule.is_some_and(|rule| in_hardware(rule, port))
            };
            let due: Vec<bool> = expected.iter().map(|it| !gone(it)).collect();
            let received = match self.nics.get_mut(port.index()) {
                Some(nic) if *direction == Direction::Ingress => nic.receive(&frames, &due, &self.pool)?,
                _ => frames.iter().map(|frame| (None, self.packet(frame, None))).collect(),
            };
            let seen = self.process(port, received);
            self.compare(case, &expected, &seen)?;
        }
        for ((rule, is), expected) in rules.iter().zip(self.counters()).zip(counts) {
            if is != *expected {
                return Err(format!("counted {is:?}, expected {expected:?}: {rule}"));
            }
        }
        Ok(())
    }

    /// Runs packets through the stage, one queue after the other.
    fn process(&mut self, port: PortId, received: Vec<Received>) -> BTreeMap<Option<u16>, Vec<Seen>> {
        let mut queues: BTreeMap<Option<u16>, Batch> = BTreeMap::new();
        for (queue, mut packet) in received {
            self.tagged += usize::from(packet.mark().is_some());
            packet.set_app([0, packet.mark().is_some().into()]);
            let left = queues.entry(queue).or_default().push(packet);
            assert!(left.is_ok(), "more than were sent");
        }
        let mut seen = BTreeMap::new();
        for (queue, mut batch) in queues {
            self.stepped.process(Some(port), &mut batch);
            seen.insert(queue, std::mem::take(&mut *self.seen.lock().unwrap()));
        }
        seen
    }

    /// Compares the result of a burst with the expected one.
    fn compare(
        &mut self,
        case: &Case,
        expected: &[Expected<'_>],
        seen: &BTreeMap<Option<u16>, Vec<Seen>>,
    ) -> Result<(), String> {
        let fail = |what: &str, it: &Expected<'_>| {
            let rule = it.outcome.rule.map(|id| case.rules[id as usize].to_string());
            let packet = show::packet(it.frame, &it.metadata);
            format!("{what}\n  expected {} of rule {rule:?}\n{packet}", show::outcome(&it.outcome))
        };
        let mut sent = self.sent()?;
        let mut take = |port: PortId, frame: &Frame| {
            // Mirror copies and redirected packets of one port may be reordered.
            let list = sent.entry(port).or_default();
            match list.iter().position(|sent| compare::same(frame, sent).is_ok()) {
                Some(at) => {
                    list.remove(at);
                    Ok(())
                }
                None => Err(format!("port {port} did not send it; it sent {} others", list.len())),
            }
        };
        let mut inside = Vec::new();
        for it in expected {
            let outcome = &it.outcome;
            let sent_on = match &outcome.verdict {
                Verdict::Pass | Verdict::Queue(_) if case.direction == Direction::Egress => Some(it.metadata.port),
                Verdict::Pass | Verdict::Queue(_) => {
                    inside.push(it);
                    None
                }
                Verdict::Redirect(port) => Some(*port),
                Verdict::Dropped(_) | Verdict::Kernel => None,
            };
            let copies = outcome.mirrors.iter().map(|(port, copy)| (*port, copy));
            for (port, frame) in copies.chain(sent_on.map(|port| (port, &outcome.frame))) {
                take(PortId::new(port), frame).map_err(|what| fail(&what, it))?;
            }
        }
        if let Some((port, list)) = sent.iter().find(|(_, list)| !list.is_empty()) {
            let first = show::hex(&list[0]);
            return Err(format!("port {port} sent {} more than was expected, the first:\n{first}", list.len()));
        }
        let queues: Vec<(Option<u16>, &[Seen])> = seen.iter().map(|(queue, list)| (*queue, &list[..])).collect();
        merged(&inside, &queues).map_err(|(at, what)| match inside.get(at) {
            Some(it) => fail(&what, it),
            None => what,
        })
    }
}

pub(crate) fn packet(pool: &Pool, frame: &[u8], tag: Option<u32>) -> Packet {
    let mut packet = pool.take().expect("a buffer");
    packet.append(frame.len()).expect("room").copy_from_slice(frame);
    if let Some(tag) = tag {
        packet.set_mark(tag);
    }
    packet
}

/// Returns the difference between a packet and the expected one.
fn differs(expected: &Expected<'_>, queue: Option<u16>, seen: &Seen) -> Option<String> {
    let outcome = &expected.outcome;
    if let Some(right) = expected.queue.filter(|_| seen.tagged)
        && queue.is_some_and(|queue| queue != right)
    {
        return Some(format!("the NIC gave it to queue {queue:?}, not to {right}"));
    }
    if seen.mark != outcome.mark {
        return Some(format!("mark {}, expected {}", seen.mark, outcome.mark));
    }
    let wrong = compare::same(&outcome.frame, &seen.frame).err()?;
    Some(format!("{wrong}\n  is    {}", show::hex(&seen.frame)))
}

/// Checks that the packets of several queues are the expected ones, with the order kept in each queue. The
/// error contains the index of the first unexplained packet.
fn merged(expected: &[&Expected<'_>], queues: &[(Option<u16>, &[Seen])]) -> Result<(), (usize, String)> {
    // All assignments of the expected packets so far to the queues, as the number used from each queue.
    let mut assignments: HashSet<Vec<usize>> = HashSet::from([vec![0; queues.len()]]);
    for (at, it) in expected.iter().enumerate() {
        let mut next = HashSet::new();
        let mut why = None;
        for assignment in &assignments {
            for (nth, (queue, list)) in queues.iter().enumerate() {
                let Some(seen) = list.get(assignment[nth]) else { continue };
                match differs(it, *queue, seen) {
                    None => {
                        let mut assignment = assignment.clone();
                        assignment[nth] += 1;
                        next.insert(assignment);
                    }
                    Some(what) => why = why.or(Some(what)),
                }
            }
        }
        if next.is_empty() {
            return Err((at, why.unwrap_or_else(|| "it did not come".to_owned())));
        }
        assignments = next;
    }
    let came: usize = queues.iter().map(|(_, list)| list.len()).sum();
    match came - expected.len() {
        0 => Ok(()),
        more => Err((expected.len(), format!("{more} more came than were expected"))),
    }
}
