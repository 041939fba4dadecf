//! Many rules in an emulated ConnectX: they are installed, queried, changed under traffic and removed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use crate::emulated_ports::{self, RDMA};
use wirepath_flow::Rule;
use wirepath_nic_emulator::launch;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::offload::Placement;
use wirepath_pipeline::rules::{RuleControl, RuleId, RuleLimits, RuleStage};
use wirepath_pipeline::{Context, ControlPlane, PortInfo, Running, Runtime, RuntimeConfig, SteppedRuntime, WorkerInfo};
use wirepath_pmd::port::{RxQueue, StartedPort, TxQueue};
use wirepath_testlab::{CountingAllocator, require, retained_bytes};
use wirepath_wire::Parser;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const NIC: &str = "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\n[[device.port]]\nlink = 'loop'\n";
const TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum memory per rule in bytes: engine, offload and driver.
const BYTES: i64 = 3500;

/// Packets that reached the inner stage: bytes and mark.
type Seen = Arc<Mutex<Vec<(Vec<u8>, u32)>>>;
type Inner = Box<dyn FnMut(&mut Context<'_>, &mut Batch) + Send>;

struct Bench {
    stepped: SteppedRuntime<RuleStage<Inner>>,
    control: RuleControl,
    rx: RxQueue,
    tx: TxQueue,
    seen: Seen,
    pool: Pool,
    since: Instant,
    now: Duration,
}

struct Ticks<'r>(&'r mut RuleControl);

impl wirepath_pipeline::Control for Ticks<'_> {
    fn tick(&mut self, plane: &mut ControlPlane) {
        self.0.tick(plane);
    }
}

impl Bench {
    fn new(backend: &str) -> Self {
        let (domain, pool) = (Domain::new(), Pool::new("test", 4096).expect("memory"));
        let StartedPort { port, mut rx, mut tx } = emulated_ports::start(PortId::new(0), &pool, "mlx50", backend, 1);
        let mut info = PortInfo::simulated(PortId::new(0), "dut", None, 1500, &pool);
        info.queues = 1;
        let ports = vec![info];
        let mut control =
            RuleControl::for_ports(&domain, ports.clone(), vec![vec![0]], Parser::default(), RuleLimits::default());
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![(PortId::new(0), 0)] };
        let seen = Seen::default();
        let inside = {
            let seen = Arc::clone(&seen);
            move |_: &mut Context<'_>, batch: &mut Batch| {
                let note = |packet: Packet| {
                    let bytes = packet.segments().flatten().copied().collect();
                    seen.lock().expect("not poisoned").push((bytes, packet.mark().unwrap_or(0)));
                    None
                };
                batch.filter_map(note);
            }
        };
        let stage = control.stage(&worker, Box::new(inside) as Inner);
        let mut stepped = SteppedRuntime::new(ports, &domain, stage).expect("a worker");
        stepped.set_devices(vec![port]);
        stepped.with_plane(|plane| control.enable_hardware(plane, [PortId::new(0)]));
        let (rx, tx) = (rx.remove(0), tx.remove(0));
        Self { stepped, control, rx, tx, seen, pool, since: Instant::now(), now: Duration::ZERO }
    }

    fn change(&mut self, gone: &[RuleId], new: Vec<Rule>) -> Vec<RuleId> {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| control.change(plane, gone, new).unwrap_or_else(|error| panic!("{error}")))
    }

    /// Sends frames while there is room. Returns their number.
    fn send(&mut self, frames: impl Iterator<Item = Vec<u8>>) -> usize {
        let mut batch: Batch = frames.map_while(|frame| packet(&self.pool, &frame)).collect();
        let before = batch.len();
        self.tx.transmit(&mut batch);
        before - batch.len()
    }

    /// Processes received packets. Returns those that reached the inner stage.
    fn turn(&mut self) -> Vec<(Vec<u8>, u32)> {
        let mut batch = Batch::new();
        self.rx.receive(&mut batch);
        self.stepped.process(Some(PortId::new(0)), &mut batch);
        let now = self.since.elapsed();
        self.stepped.advance((now - self.now).as_nanos() as u64);
        self.now = now;
        let Self { stepped, control, .. } = self;
        stepped.control(&mut Ticks(control));
        std::mem::take(&mut *self.seen.lock().expect("not poisoned"))
    }

    /// Sends one frame and waits until it comes back.
    fn round(&mut self, frame: Vec<u8>) -> (Vec<u8>, u32) {
        assert_eq!(self.send([frame].into_iter()), 1);
        let start = Instant::now();
        loop {
            if let Some(seen) = self.turn().pop() {
                return seen;
            }
            assert!(start.elapsed() < TIMEOUT, "it did not come back");
        }
    }
}

fn packet(pool: &Pool, frame: &[u8]) -> Option<Packet> {
    let mut packet = pool.take()?;
    packet.append(frame.len())?.copy_from_slice(frame);
    Some(packet)
}

/// Returns an IPv4 and UDP frame.
fn frame(source: u32, port: u16, payload: u64) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0];
    frame.extend(source.to_be_bytes());
    frame.extend([192, 0, 2, 1]);
    let sum: u32 = frame[14..34].chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1])).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    frame[24..26].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    frame.extend([4, 0]);
    frame.extend(port.to_be_bytes());
    frame.extend([0, 26, 0, 0]);
    frame.extend(payload.to_be_bytes());
    frame.resize(60, 0);
    frame
}

fn address(n: u32) -> u32 {
    0x0a00_0000 | n
}

fn rule(text: &str) -> Rule {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Returns rules of three kinds, each overlapping all rules of the others, and one rule below all of them.
fn many(count: u32) -> Vec<Rule> {
    let mut rules = vec![rule("ingress prio 9: eth => mark 99, queue 0")];
    for n in 1..count {
        let [_, a, b, c] = address(n).to_be_bytes();
        rules.push(rule(&match n % 10 {
            0 => format!("ingress prio 3: eth src 02:01:00:{a:02x}:{b:02x}:{c:02x} => mark 3, queue 0"),
            1..=4 => format!("ingress prio 2: ipv4 dst 172.{a}.{b}.{c} => mark 2, queue 0"),
            _ => format!(
                "ingress prio 1: ipv4 src 10.{a}.{b}.{c} frag no / udp dst {} => mark 1, queue 0",
                1 + n % 50_000
            ),
        }));
    }
    rules
}

fn scale(name: &str, backend: &str, count: u32) {
    launch::run_test(name, NIC, || {
        let mut bench = Bench::new(backend);
        let rules = many(count);
        let (ids, bytes) = retained_bytes(|| {
            let start = Instant::now();
            let ids = bench.change(&[], rules);
            eprintln!("{backend}: {count} rules in {:?}", start.elapsed());
            ids
        });
        let each = bytes / i64::from(count);
        eprintln!("{backend}: {each} bytes for each rule");
        assert!(each < BYTES, "{each} bytes for each rule");
        // One entry in the table of the own kind, and one for each of the other kinds.
        assert!(bench.control.hardware().entries() <= 3 * count as usize, "{}", bench.control.hardware().entries());
        let start = Instant::now();
        for &id in ids.iter().rev() {
            let placement = bench.control.placement(id);
            assert!(
                matches!(placement[..], [(port, Placement::Hardware(None))] if port == PortId::new(0)),
                "{placement:?} of {id}"
            );
        }
        eprintln!("{backend}: explained in {:?}", start.elapsed());
        assert_eq!(bench.control.hardware().installed().next(), Some((PortId::new(0), count as usize)));
        // Rules of each kind match, and the lowest rule matches everything else.
        let n = count - 1;
        for n in (n - 9..=n).filter(|n| n % 10 > 4).chain([5]) {
            assert_eq!(bench.round(frame(address(n), 1 + (n % 50_000) as u16, 0)).1, 1, "rule {n}");
        }
        assert_eq!(bench.round(frame(address(5), 9, 0)).1, 99);
        // Adding and removing one rule does not affect the others.
        let start = Instant::now();
        let more = rule("ingress prio 1: ipv4 src 10.0.0.5 frag no / udp dst 9 => mark 77, queue 0");
        for _ in 0..100 {
            let new = bench.change(&[], vec![more.clone()]);
            assert_eq!(bench.control.placement(new[0]), [(PortId::new(0), Placement::Hardware(None))]);
            assert_eq!(bench.round(frame(address(5), 9, 0)).1, 77);
            bench.change(&new, Vec::new());
            assert_eq!(bench.control.hardware().installed().next(), Some((PortId::new(0), count as usize)));
        }
        eprintln!("{backend}: 100 times: one rule added, one removed, one frame: {:?}", start.elapsed());
        let start = Instant::now();
        bench.change(&ids, Vec::new());
        eprintln!("{backend}: removed in {:?}", start.elapsed());
        assert_eq!(bench.control.hardware().installed().next(), Some((PortId::new(0), 0)));
        assert_eq!(bench.control.hardware().entries(), 0);
        let start = Instant::now();
        while bench.control.hardware().draining() > 0 {
            bench.turn();
            assert!(start.elapsed() < TIMEOUT, "{} tags do not come back", bench.control.hardware().draining());
        }
        assert_eq!(bench.round(frame(address(5), 6, 0)).1, 0);
    });
}

#[test]
fn installs_100_000_rules_with_devx() {
    require!(RDMA);
    scale("scale::installs_100_000_rules_with_devx", "dv", 100_000);
}

#[test]
fn installs_10_000_rules_with_verbs() {
    require!(RDMA);
    scale("scale::installs_10_000_rules_with_verbs", "ibv", 10_000);
}

/// Flows whose rules change all the time.
const FLOWS: usize = 16;
/// Packets in flight in the loop.
const IN_FLIGHT: u64 = 48;
/// Changes in a normal run.
const CHANGES: usize = 1000;

/// State shared by the worker and the control thread.
#[derive(Default)]
struct Progress {
    /// For each flow, the last version that a change started to install, and the last installed version.
    begun: [AtomicU32; FLOWS],
    done: [AtomicU32; FLOWS],
    sent: AtomicU64,
    seen: AtomicU64,
    /// True when no more packets are sent.
    end: AtomicBool,
}

impl Progress {
    /// Writes the next packet. The source address identifies the flow. The payload holds its number and the
    /// version at the time of sending.
    fn write(&self, packet: &mut Packet) {
        let number = self.sent.fetch_add(1, Ordering::Release);
        let flow = number as usize % FLOWS;
        let mut frame = frame(address(0x80_0000 | flow as u32), 7, number);
        frame[50..54].copy_from_slice(&self.done[flow].load(Ordering::Acquire).to_be_bytes());
        packet.data_mut().copy_from_slice(&frame);
    }

    /// Checks the version of a received packet, which both actions of its rule give.
    fn check(&self, packet: &Packet) {
        let word = |at: usize| u32::from_be_bytes(packet.data()[at..at + 4].try_into().expect("four bytes"));
        let number = u64::from(word(42)) << 32 | u64::from(word(46));
        assert_eq!(number, self.seen.fetch_add(1, Ordering::Release), "in their order, none lost");
        let (version, then, flow) = (word(8), word(50), number as usize % FLOWS);
        assert_eq!(packet.mark(), Some(version + 1000), "by one rule, not by two");
        let last = self.begun[flow].load(Ordering::Acquire);
        assert!((then..=last).contains(&version), "version {version}, {then} when it was sent, {last} now");
    }

    /// Checks received packets and sends them again. The first packet only starts the traffic.
    fn traffic(self: Arc<Self>, pool: Pool) -> Inner {
        let mut begun = false;
        Box::new(move |context: &mut Context<'_>, batch: &mut Batch| {
            batch.filter_map(|mut packet| {
                if begun {
                    self.check(&packet);
                }
                let goes_on = begun && !self.end.load(Ordering::Acquire);
                goes_on.then(|| self.write(&mut packet))?;
                Some(packet)
            });
            for _ in 0..if begun { 0 } else { IN_FLIGHT } {
                let mut packet = packet(&pool, &[0; 60]).expect("a buffer");
                self.write(&mut packet);
                assert!(batch.push(packet).is_ok());
            }
            begun = true;
            context.send_batch(PortId::new(0), batch);
        })
    }
}

fn versioned(flow: usize, version: u32, priority: u32) -> Rule {
    let source = std::net::Ipv4Addr::from(address(0x80_0000 | flow as u32));
    let [a, b, c, d] = version.to_be_bytes();
    rule(&format!(
        "ingress prio {priority}: ipv4 src {source} / udp dst 7 => \
         set eth src 02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}, mark {}, queue 0",
        version + 1000
    ))
}

/// Runs the control thread until a condition holds.
fn until(running: &mut Running<RuleStage<Inner>>, control: &mut RuleControl, happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(!running.failed(), "the worker has ended");
        assert!(start.elapsed() < TIMEOUT, "packets do not come");
        running.tick(&mut Ticks(control));
        std::thread::yield_now();
    }
}

#[test]
fn changes_under_traffic_lose_and_mix_no_packets() {
    require!(RDMA);
    launch::run_test("scale::changes_under_traffic_lose_and_mix_no_packets", NIC, || {
        let settings = emulated_ports::settings("mlx50", "dv");
        let runtime = Runtime::open(vec![settings], RuntimeConfig::default()).unwrap_or_else(|error| panic!("{error}"));
        let (progress, pool) = (Arc::new(Progress::default()), runtime.pools()[0].clone());
        let mut control = RuleControl::new(&runtime, Parser::default(), RuleLimits::default());
        let started = runtime.start(|worker| control.stage(worker, Arc::clone(&progress).traffic(pool.clone())));
        let mut running = started.unwrap_or_else(|error| panic!("{error}"));
        control.enable_hardware(running.plane(), [PortId::new(0)]);
        let change = |running: &mut Running<_>, control: &mut RuleControl, gone: &[RuleId], new: Vec<Rule>| {
            control.change(running.plane(), gone, new).unwrap_or_else(|error| panic!("{error}"))
        };
        change(&mut running, &mut control, &[], many(30));
        let first = (0..FLOWS).map(|flow| versioned(flow, 0, 1)).collect();
        let first = change(&mut running, &mut control, &[], first);
        let mut flows: Vec<Vec<RuleId>> = first.into_iter().map(|id| vec![id]).collect();
        running.plane().send(PortId::new(0), packet(&pool, &frame(address(5), 9, 0)).expect("a buffer"));
        let (start, mut spent) = (Instant::now(), [Duration::ZERO; 3]);
        for n in 0..CHANGES {
            let (flow, seen) = (n % FLOWS, progress.seen.load(Ordering::Acquire));
            let version = progress.done[flow].load(Ordering::Acquire) + 1;
            // Replace a rule, add one above it, or remove the one below that.
            let (gone, new) = match n / FLOWS % 3 {
                0 => (std::mem::take(&mut flows[flow]), Some(2)),
                1 => (Vec::new(), Some(1)),
                _ => (vec![flows[flow].remove(0)], None),
            };
            let version = if new.is_some() { version } else { version - 1 };
            progress.begun[flow].store(version, Ordering::Release);
            let new = new.map(|priority| versioned(flow, version, priority)).into_iter().collect();
            let begun = Instant::now();
            flows[flow].extend(change(&mut running, &mut control, &gone, new));
            spent[n / FLOWS % 3] += begun.elapsed();
            progress.done[flow].store(version, Ordering::Release);
            // Wait for packets between changes, even if the worker rarely gets a CPU.
            if n % 10 == 0 {
                until(&mut running, &mut control, || progress.seen.load(Ordering::Acquire) > seen);
            }
        }
        let taken = start.elapsed();
        progress.end.store(true, Ordering::Release);
        until(&mut running, &mut control, || {
            progress.seen.load(Ordering::Acquire) == progress.sent.load(Ordering::Acquire)
        });
        let packets = progress.seen.load(Ordering::Acquire);
        eprintln!("{CHANGES} changes in {taken:?} (others, more, less: {spent:?}), {packets} packets");
        for id in flows.into_iter().flatten() {
            let placement = control.placement(id);
            assert_eq!(placement.len(), 1, "{placement:?}");
            assert_ne!(placement[0].1.name(), "software", "{placement:?}");
        }
        let summary = running.stop(&mut Ticks(&mut control));
        assert!(summary.failures.is_empty(), "{:?}", summary.failures);
        assert!(summary.drops().is_empty(), "{:?}", summary.drops());
    });
}
