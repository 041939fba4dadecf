//! The hardware stage on NICs, and its judge: the same packets, order and counters as the naive reference says.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::hardware::{Placement, on_paper};
use wirepath_pipeline::rules::{RuleControl, RuleLimits, Ruled, check};
use wirepath_pipeline::{Context, ControlPlane, PortInfo, Punt, Stepped, WorkerInfo};
use wirepath_pmd::flow::{Action, Direction, Rule};
use wirepath_pmd::packet::offload::Flags;
use wirepath_pmd::packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::port::hardware::RuleCapabilities;
use wirepath_pmd::port::{Port, PortId, ToKernel};
use wirepath_rulelab::{Cause, Fate, Fault, Frame, Noted, Outcome, Reference, Rng, compare, make, show, shrink};
use wirepath_wire::Parser;

pub(crate) const PORTS: u16 = 4;
/// Longest frame that comes in.
pub(crate) const LONGEST: usize = 1800;
/// Frames that come at once.
const BURST: usize = 30;
const _: () = assert!(BURST <= BATCH);

/// A packet as a program receives it, and the queue that it came by.
pub(crate) type Received = (Option<u16>, Packet);

/// The NIC of a port.
pub(crate) trait Nic {
    /// What comes of these frames. `due` says of each whether it should come.
    fn receive(&mut self, frames: &[&[u8]], due: &[bool], pool: &Pool) -> Result<Vec<Received>, String>;

    /// What of these packets is on the wire, in their order.
    fn send(&mut self, packets: Vec<Packet>) -> Result<Vec<Vec<u8>>, String>;
}

/// As a program looks at packets: header checksums are for whoever they are addressed to.
pub(crate) fn reference(rules: &[Rule]) -> Reference {
    let mut reference = Reference::new(rules);
    reference.rss_key = wirepath_pipeline::rules::program::DEFAULT_RSS_KEY.to_vec();
    reference.ports.checksums = false;
    reference
}

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// What came to the stage inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) frame: Vec<u8>,
    pub(crate) mark: u32,
    /// It has met its rule in the NIC.
    tagged: bool,
}

/// A packet as it would be on a wire: with the tag that a device left beside it.
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
    pub(crate) stepped: Stepped<Ruled<Inner>>,
    pub(crate) control: RuleControl,
    pub(crate) nics: Vec<N>,
    pub(crate) seen: Arc<Mutex<Vec<Seen>>>,
    pub(crate) pool: Pool,
    pub(crate) ports: Vec<PortInfo>,
    /// What comes in goes out by the next port; else it ends in the stage.
    forward: Arc<AtomicBool>,
    now: u64,
}

struct Kernel<'r>(&'r mut RuleControl);

impl wirepath_pipeline::Control for Kernel<'_> {
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        assert!(self.0.punt(punt, plane).is_none(), "only what is for the kernel is punted here");
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        self.0.tick(plane);
    }
}

/// A frame that comes in; those of one burst come at once.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) burst: usize,
    pub(crate) port: PortId,
    pub(crate) frame: Vec<u8>,
}

/// Rules, those that were there before them, and what is sent.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) direction: Direction,
    pub(crate) early: Vec<Rule>,
    pub(crate) rules: Vec<Rule>,
    pub(crate) sent: Vec<Sent>,
}

/// How a case is made.
pub(crate) struct Wish<'a> {
    /// Frames in all.
    pub(crate) packets: usize,
    /// Every frame comes by all ports; else each burst by one of them.
    pub(crate) everywhere: bool,
    /// A NIC that most rules are for, in most cases.
    pub(crate) can: Option<&'a RuleCapabilities>,
    /// Whether a frame may be among them.
    pub(crate) may: &'a dyn Fn(&[u8]) -> bool,
}

/// Whether a NIC could have something of a rule if there were no others.
fn fits(can: &RuleCapabilities, rule: &Rule) -> bool {
    let placed = on_paper(can, 0, Parser::default().tunnels, std::slice::from_ref(rule));
    placed[0].as_ref().is_some_and(|placement| placement.word() != "software")
}

/// Rules that a program with these ports can have; with `can`, most of them are for such a NIC.
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
            _ => make::rule(rng, &rules),
        };
        let right = rule.direction() == direction && check(&rule, ports).is_none();
        // The kernel has every frame beside; changed ones it cannot have.
        let kernel = rule.actions().last() == Some(&Action::Kernel);
        if right && !kernel && can.is_none_or(|can| rng.one_in(10) || fits(can, &rule)) {
            rules.push(rule);
        }
    }
    rules
}

/// A rule that a NIC may take a tunnel off or put one on for: what random ones seldom are.
fn tunnel(rng: &mut Rng, direction: Direction) -> Rule {
    let (prio, vni, host) = (rng.below(6), rng.below(3), 1 + rng.below(3));
    let text = match direction {
        Direction::Ingress => {
            let more = rng.pick(&["", ", set ipv4 dscp 3", ", set ipv4 dst 10.9.9.9, dec-ttl", ", dec-ttl, count"]);
            let inner = if more.is_empty() { "" } else { " / ipv4" };
            let outer = rng.pick(&["ipv4 src 10.0.0.HOST", "ipv4 src 10.0.0.HOST ecn 0", "ipv6 src fd00::HOST"]);
            let outer = outer.replace("HOST", &host.to_string());
            format!("ingress prio {prio}: eth / {outer} / udp / vxlan vni {vni} / eth{inner} => decap l2{more}, mark 5")
        }
        Direction::Egress => {
            // Ethernet, IPv4, UDP from a port that is chosen by flow, VXLAN.
            let mut header = "02000000000a02000000000b080045000000000040004011".to_owned() + "0000";
            header += &format!(
                "0a00000{host}0a0000fe{:04x}12b50000{:04x}08000000{vni:06x}00",
                rng.pick(&[0, 5]),
                rng.pick(&[0, 0, 1])
            );
            let before = rng.pick(&["", "count, "]);
            let pattern = rng.pick(&["ipv4", "udp", "eth", "ipv6 / tcp"]);
            format!("egress prio {prio}: port id {} / {pattern} => {before}encap l2 {header}", rng.below(3))
        }
    };
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A rule that drops, which any NIC may count.
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

/// What becomes of a packet with such a rule depends on those before it.
fn is_stateful(rule: &Rule) -> bool {
    rule.actions().iter().any(|action| matches!(action, Action::Limit(_)))
}

impl Case {
    pub(crate) fn new(rng: &mut Rng, ports: &[PortInfo], direction: Direction, wish: &Wish<'_>) -> Self {
        let count = rng.pick(&[3, 10, 30]);
        let can = wish.can.filter(|_| !rng.one_in(3));
        let rules = rules_for(rng, ports, count, direction, can);
        let early = rules_for(rng, ports, 3, direction, can);
        let judge = reference(&rules);
        let mut sent = Vec::new();
        let (mut burst, mut left, mut port) = (0, 0, 0);
        while sent.len() < wish.packets {
            let aim = rng.index(rules.len());
            let wanted = (!rng.one_in(10)).then_some(&rules[aim]);
            let (frame, _) = make::packet(rng, wanted);
            if frame.len() > LONGEST || !(wish.may)(&frame) {
                continue;
            }
            let by: Vec<PortId> = if wish.everywhere { (0..PORTS).collect() } else { vec![port] };
            // Whoever must come in its turn comes alone: queues are emptied one after the other.
            let alone = (0..PORTS).any(|port| {
                let rule = judge.classify(direction, &frame, &Noted { port, ..Noted::default() });
                rule.and_then(|id| judge.rule(id)).is_some_and(is_stateful)
            });
            if left == 0 || alone {
                (burst, left) = (burst + 1, 1 + rng.index(BURST));
                port = rng.below(PORTS.into()) as PortId;
            }
            sent.extend(by.into_iter().map(|port| Sent { burst, port, frame: frame.clone() }));
            left = if alone { 0 } else { left - 1 };
        }
        Self { direction, early, rules, sent }
    }

    /// The frames that come at once by one port.
    fn bursts(&self) -> Vec<(PortId, Vec<&[u8]>)> {
        let mut bursts: BTreeMap<(usize, PortId), Vec<&[u8]>> = BTreeMap::new();
        for sent in &self.sent {
            bursts.entry((sent.burst, sent.port)).or_default().push(&sent.frame);
        }
        bursts.into_iter().map(|((_, port), frames)| (port, frames)).collect()
    }

    /// The fewest and simplest rules and frames that fail as this does.
    pub(crate) fn shrunk(&self, mut fails: impl FnMut(&Self) -> bool) -> Self {
        let mut small = self.clone();
        let without = Self { early: Vec::new(), ..small.clone() };
        if fails(&without) {
            small = without;
        }
        small.sent = shrink::fewest(&small.sent, |sent| fails(&Self { sent: sent.to_vec(), ..small.clone() }));
        small.rules = shrink::fewest(&small.rules, |rules| fails(&Self { rules: rules.to_vec(), ..small.clone() }));
        small.rules = shrink::simplest(&small.rules, |rules| fails(&Self { rules: rules.to_vec(), ..small.clone() }));
        small
    }

    /// For people.
    pub(crate) fn show(&self) -> String {
        let early = show::rules((0..).zip(&self.early));
        let rules = show::rules((0..).zip(&self.rules));
        let frame = |sent: &Sent| format!("port {} {}\n", sent.port, show::hex(&sent.frame));
        let sent: String = self.sent.iter().map(frame).collect();
        let (n, packets) = (self.rules.len(), self.sent.len());
        format!("shrunk to {n} rules and {packets} packets:\n{rules}{sent}before them:\n{early}")
    }
}

/// A packet that was expected.
struct Expected<'a> {
    frame: &'a [u8],
    noted: Noted,
    outcome: Outcome,
    /// Queue to which the NIC has to give it.
    queue: Option<u16>,
}

impl<N: Nic> Bench<N> {
    /// With these NICs and the ports that they belong to; other ports are on paper.
    pub(crate) fn new(nics: Vec<N>, devices: Vec<Port>, pool: &Pool, queues: u16) -> Self {
        let domain = Domain::new();
        let ports: Vec<PortInfo> = (0..PORTS)
            .map(|id| {
                let mut port = PortInfo::on_paper(id, &format!("p{id}"), None, 9000, pool);
                port.capabilities.to_kernel = ToKernel::Beside;
                port.queues = queues;
                port
            })
            .collect();
        let workers = vec![vec![0; queues.into()]; PORTS.into()];
        let mut control =
            RuleControl::for_ports(&domain, ports.clone(), workers, Parser::default(), RuleLimits::default());
        let info =
            WorkerInfo { index: 0, workers: 1, core: None, rx_queues: (0..PORTS).map(|port| (port, 0)).collect() };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let forward = Arc::new(AtomicBool::new(false));
        let inside = {
            let (seen, forward) = (Arc::clone(&seen), Arc::clone(&forward));
            move |context: &mut Context<'_>, batch: &mut Batch| {
                if forward.load(Ordering::Relaxed) {
                    let port = context.in_port().map_or(0, |port| (port + 1) % PORTS);
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
        let mut stepped = Stepped::new(ports.clone(), &domain, stage).unwrap();
        stepped.devices(devices);
        Self { stepped, control, nics, seen, pool: pool.clone(), ports, forward, now: 0 }
    }

    pub(crate) fn set(&mut self, rules: &[Rule]) {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| control.replace(plane, rules).unwrap());
    }

    /// From the next change on, those that are there now included.
    pub(crate) fn use_hardware(&mut self) {
        let Self { stepped, control, nics, .. } = self;
        stepped.with_plane(|plane| control.use_hardware(plane, 0..nics.len() as PortId));
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

    /// Packets and bytes of each rule.
    pub(crate) fn counters(&mut self) -> Vec<(u64, u64)> {
        let Self { stepped, control, .. } = self;
        let standing = stepped.with_plane(|plane| control.standing(Some(plane)));
        standing.iter().map(|it| (it.counters.packets, it.counters.bytes)).collect()
    }

    /// What is on the wire of each port.
    fn sent(&mut self) -> Result<BTreeMap<PortId, Vec<Vec<u8>>>, String> {
        let mut packets: BTreeMap<PortId, Vec<Packet>> = BTreeMap::new();
        while let Some(packet) = self.stepped.sent() {
            packets.entry(packet.out_port()).or_default().push(packet);
        }
        let mut out = BTreeMap::new();
        for (port, packets) in packets {
            let frames = match self.nics.get_mut(usize::from(port)) {
                Some(nic) => nic.send(packets)?,
                None => packets.iter().map(bytes).collect(),
            };
            out.insert(port, frames);
        }
        Ok(out)
    }

    /// How many rules run where, by its word.
    pub(crate) fn words(&mut self) -> HashMap<&'static str, usize> {
        let mut words: HashMap<&'static str, usize> = HashMap::new();
        for (_, placement) in self.control.placements().iter().flatten() {
            *words.entry(placement.word()).or_default() += 1;
        }
        words
    }

    /// Sets the rules of a case, sends what it sends, and compares with the reference, which has this error.
    pub(crate) fn judge(&mut self, case: &Case, fault: Fault) -> Result<(), String> {
        self.set(&case.rules);
        self.pass(case, &mut reference(&case.rules).with(fault), &mut vec![(0, 0); case.rules.len()])
    }

    /// Sends what a case sends to its rules, which are there and have counted this, and compares with the reference.
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
            let here = if *direction == Direction::Egress { (port + 1) % PORTS } else { port };
            let noted = Noted { port: here, ..Noted::default() };
            let expected: Vec<Expected<'_>> = frames
                .iter()
                .map(|frame| {
                    let outcome = reference.run(*direction, frame, &noted, self.now);
                    let queue = match (&outcome.fate, outcome.rule) {
                        (Fate::Queue(queue), Some(rule)) if in_hardware(rule, port) => Some(*queue),
                        _ => None,
                    };
                    Expected { frame, noted, outcome, queue }
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
                let dropped = it.outcome.fate == Fate::Dropped(Cause::Ruled);
                dropped && it.outcome.rule.is_some_and(|rule| in_hardware(rule, port))
            };
            let due: Vec<bool> = expected.iter().map(|it| !gone(it)).collect();
            let received = match self.nics.get_mut(usize::from(port)) {
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

    /// Takes packets through the stage, those of one queue after those of another.
    fn process(&mut self, port: PortId, received: Vec<Received>) -> BTreeMap<Option<u16>, Vec<Seen>> {
        let mut queues: BTreeMap<Option<u16>, Batch> = BTreeMap::new();
        for (queue, mut packet) in received {
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

    /// Compares what came of a burst with what was expected.
    fn compare(
        &mut self,
        case: &Case,
        expected: &[Expected<'_>],
        seen: &BTreeMap<Option<u16>, Vec<Seen>>,
    ) -> Result<(), String> {
        let fail = |what: &str, it: &Expected<'_>| {
            let rule = it.outcome.rule.map(|id| case.rules[id as usize].to_string());
            let packet = show::packet(it.frame, &it.noted);
            format!("{what}\n  expected {} of rule {rule:?}\n{packet}", show::outcome(&it.outcome))
        };
        let mut sent = self.sent()?;
        let mut take = |port: PortId, frame: &Frame| {
            // Copies and redirected packets of one port need not keep their order among each other.
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
            let sent_on = match &outcome.fate {
                Fate::On | Fate::Queue(_) if case.direction == Direction::Egress => Some(it.noted.port),
                Fate::On | Fate::Queue(_) => {
                    inside.push(it);
                    None
                }
                Fate::Redirect(port) => Some(*port),
                Fate::Dropped(_) | Fate::Kernel => None,
            };
            let copies = outcome.mirrors.iter().map(|(port, copy)| (*port, copy));
            for (port, frame) in copies.chain(sent_on.map(|port| (port, &outcome.frame))) {
                take(port, frame).map_err(|what| fail(&what, it))?;
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

/// How a packet differs from what was expected.
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

/// Whether what came by several queues is what was expected: each queue keeps the order. The error says how far it goes.
fn merged(expected: &[&Expected<'_>], queues: &[(Option<u16>, &[Seen])]) -> Result<(), (usize, String)> {
    // Ways to give what was expected so far to the queues: how much of each is used up.
    let mut ways: HashSet<Vec<usize>> = HashSet::from([vec![0; queues.len()]]);
    for (at, it) in expected.iter().enumerate() {
        let mut next = HashSet::new();
        let mut why = None;
        for way in &ways {
            for (nth, (queue, list)) in queues.iter().enumerate() {
                let Some(seen) = list.get(way[nth]) else { continue };
                match differs(it, *queue, seen) {
                    None => {
                        let mut way = way.clone();
                        way[nth] += 1;
                        next.insert(way);
                    }
                    Some(what) => why = why.or(Some(what)),
                }
            }
        }
        if next.is_empty() {
            return Err((at, why.unwrap_or_else(|| "it did not come".to_owned())));
        }
        ways = next;
    }
    let came: usize = queues.iter().map(|(_, list)| list.len()).sum();
    match came - expected.len() {
        0 => Ok(()),
        more => Err((expected.len(), format!("{more} more came than were expected"))),
    }
}
