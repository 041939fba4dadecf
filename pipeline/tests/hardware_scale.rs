//! Very many rules in an emulated ConnectX, through the hardware stage: put in, explained, changed under traffic, taken out.

#[expect(dead_code, reason = "packets are looked at by the stage here")]
mod emulated;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use emulated::RDMA;
use wirepath_nic_emulator::launch;
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::hardware::Placement;
use wirepath_pipeline::rules::{RuleControl, RuleId, RuleLimits, Ruled};
use wirepath_pipeline::{Context, ControlPlane, PortInfo, Running, Runtime, RuntimeConfig, Stepped, WorkerInfo};
use wirepath_pmd::flow::Rule;
use wirepath_pmd::packet::{Batch, Packet, Pool};
use wirepath_pmd::port::{RxQueue, StartedPort, TxQueue};
use wirepath_testlab::{CountingAllocator, held, require};
use wirepath_wire::Parser;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const NIC: &str = "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\n[[device.port]]\nlink = 'loop'\n";
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of this process for each rule: the engine's, the stage's and the driver's.
const BYTES: i64 = 3500;

/// What comes to the stage inside: bytes and mark.
type Seen = Arc<Mutex<Vec<(Vec<u8>, u32)>>>;
type Inner = Box<dyn FnMut(&mut Context<'_>, &mut Batch) + Send>;

struct Bench {
    stepped: Stepped<Ruled<Inner>>,
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
    fn new(way: &str) -> Self {
        let (domain, pool) = (Domain::new(), Pool::new("test", 4096).expect("memory"));
        let StartedPort { port, mut rx, mut tx } = emulated::start(0, &pool, "mlx50", way, 1);
        let mut info = PortInfo::on_paper(0, "dut", None, 1500, &pool);
        info.queues = 1;
        let ports = vec![info];
        let mut control =
            RuleControl::for_ports(&domain, ports.clone(), vec![vec![0]], Parser::default(), RuleLimits::default());
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![(0, 0)] };
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
        let mut stepped = Stepped::new(ports, &domain, stage).expect("a worker");
        stepped.devices(vec![port]);
        stepped.with_plane(|plane| control.use_hardware(plane, [0]));
        let (rx, tx) = (rx.remove(0), tx.remove(0));
        Self { stepped, control, rx, tx, seen, pool, since: Instant::now(), now: Duration::ZERO }
    }

    fn change(&mut self, gone: &[RuleId], new: Vec<Rule>) -> Vec<RuleId> {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| control.change(plane, gone, new).unwrap_or_else(|error| panic!("{error}")))
    }

    /// Sends frames, as far as there is room.
    fn send(&mut self, frames: impl Iterator<Item = Vec<u8>>) -> usize {
        let mut batch: Batch = frames.map_while(|frame| packet(&self.pool, &frame)).collect();
        let before = batch.len();
        self.tx.transmit(&mut batch);
        before - batch.len()
    }

    /// What has come since, as the stage has it.
    fn turn(&mut self) -> Vec<(Vec<u8>, u32)> {
        let mut batch = Batch::new();
        self.rx.receive(&mut batch);
        self.stepped.process(Some(0), &mut batch);
        let now = self.since.elapsed();
        self.stepped.advance((now - self.now).as_nanos() as u64);
        self.now = now;
        let Self { stepped, control, .. } = self;
        stepped.control(&mut Ticks(control));
        std::mem::take(&mut *self.seen.lock().expect("not poisoned"))
    }

    /// Sends one frame and waits for it.
    fn round(&mut self, frame: Vec<u8>) -> (Vec<u8>, u32) {
        assert_eq!(self.send([frame].into_iter()), 1);
        let start = Instant::now();
        loop {
            if let Some(seen) = self.turn().pop() {
                return seen;
            }
            assert!(start.elapsed() < PATIENCE, "it did not come back");
        }
    }
}

fn packet(pool: &Pool, frame: &[u8]) -> Option<Packet> {
    let mut packet = pool.take()?;
    packet.append(frame.len())?.copy_from_slice(frame);
    Some(packet)
}

/// IPv4 and UDP.
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

/// Three kinds, all of each overlapping with all of the others, and one below them all.
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

fn scale(name: &str, way: &str, count: u32) {
    launch::under(name, NIC, || {
        let mut bench = Bench::new(way);
        let rules = many(count);
        let (ids, bytes) = held(|| {
            let start = Instant::now();
            let ids = bench.change(&[], rules);
            eprintln!("{way}: {count} rules in {:?}", start.elapsed());
            ids
        });
        let each = bytes / i64::from(count);
        eprintln!("{way}: {each} bytes for each rule");
        assert!(each < BYTES, "{each} bytes for each rule");
        // Own table, those of the other kinds.
        assert!(bench.control.hardware().entries() <= 3 * count as usize, "{}", bench.control.hardware().entries());
        let start = Instant::now();
        for &id in ids.iter().rev() {
            let placement = bench.control.placement(id);
            assert!(matches!(placement[..], [(0, Placement::Hardware(None))]), "{placement:?} of {id}");
        }
        eprintln!("{way}: explained in {:?}", start.elapsed());
        assert_eq!(bench.control.hardware().installed().next(), Some((0, count as usize)));
        // Each kind does what it says, and below them the last.
        let n = count - 1;
        for n in (n - 9..=n).filter(|n| n % 10 > 4).chain([5]) {
            assert_eq!(bench.round(frame(address(n), 1 + (n % 50_000) as u16, 0)).1, 1, "rule {n}");
        }
        assert_eq!(bench.round(frame(address(5), 9, 0)).1, 99);
        // One rule comes and goes: nobody else moves.
        let start = Instant::now();
        let more = rule("ingress prio 1: ipv4 src 10.0.0.5 frag no / udp dst 9 => mark 77, queue 0");
        for _ in 0..100 {
            let new = bench.change(&[], vec![more.clone()]);
            assert_eq!(bench.control.placement(new[0]), [(0, Placement::Hardware(None))]);
            assert_eq!(bench.round(frame(address(5), 9, 0)).1, 77);
            bench.change(&new, Vec::new());
            assert_eq!(bench.control.hardware().installed().next(), Some((0, count as usize)));
        }
        eprintln!("{way}: one hundred times one more and one less, with a frame each: {:?}", start.elapsed());
        let start = Instant::now();
        bench.change(&ids, Vec::new());
        eprintln!("{way}: taken out in {:?}", start.elapsed());
        assert_eq!(bench.control.hardware().installed().next(), Some((0, 0)));
        assert_eq!(bench.control.hardware().entries(), 0);
        let start = Instant::now();
        while bench.control.hardware().draining() > 0 {
            bench.turn();
            assert!(start.elapsed() < PATIENCE, "{} tags do not come back", bench.control.hardware().draining());
        }
        assert_eq!(bench.round(frame(address(5), 6, 0)).1, 0);
    });
}

#[test]
fn a_hundred_thousand_rules_by_matchers() {
    require!(RDMA);
    scale("a_hundred_thousand_rules_by_matchers", "dv", 100_000);
}

#[test]
fn ten_thousand_rules_of_plain_verbs() {
    require!(RDMA);
    scale("ten_thousand_rules_of_plain_verbs", "ibv", 10_000);
}

/// Flows whose rules change all the time.
const FLOWS: usize = 16;
/// Packets on their way round the loop.
const IN_FLIGHT: u64 = 48;
/// Changes in a usual run.
const CHANGES: usize = 1000;

/// What the worker and the control thread tell each other.
#[derive(Default)]
struct Told {
    /// Of each flow: the last version that a change was to bring, and the last that one has brought.
    begun: [AtomicU32; FLOWS],
    done: [AtomicU32; FLOWS],
    sent: AtomicU64,
    seen: AtomicU64,
    /// No packet is sent any more.
    end: AtomicBool,
}

impl Told {
    /// The next packet: the source says the flow, the payload its number and the version when it was sent.
    fn write(&self, packet: &mut Packet) {
        let number = self.sent.fetch_add(1, Ordering::Release);
        let flow = number as usize % FLOWS;
        let mut frame = frame(address(0x80_0000 | flow as u32), 7, number);
        frame[50..54].copy_from_slice(&self.done[flow].load(Ordering::Acquire).to_be_bytes());
        packet.data_mut().copy_from_slice(&frame);
    }

    /// Both of what a rule does say which version it was.
    fn judge(&self, packet: &Packet) {
        let word = |at: usize| u32::from_be_bytes(packet.data()[at..at + 4].try_into().expect("four bytes"));
        let number = u64::from(word(42)) << 32 | u64::from(word(46));
        assert_eq!(number, self.seen.fetch_add(1, Ordering::Release), "in their order, none lost");
        let (version, then, flow) = (word(8), word(50), number as usize % FLOWS);
        assert_eq!(packet.mark(), Some(version + 1000), "by one rule, not by two");
        let last = self.begun[flow].load(Ordering::Acquire);
        assert!((then..=last).contains(&version), "version {version}, {then} when it was sent, {last} now");
    }

    /// Judges what comes, and sends it round again. The first packet of all only sets the others off.
    fn traffic(self: Arc<Self>, pool: Pool) -> Inner {
        let mut begun = false;
        Box::new(move |context: &mut Context<'_>, batch: &mut Batch| {
            batch.filter_map(|mut packet| {
                if begun {
                    self.judge(&packet);
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
            context.send_batch(0, batch);
        })
    }
}

fn versioned(flow: usize, version: u32, priority: u32) -> Rule {
    let source = std::net::Ipv4Addr::from(address(0x80_0000 | flow as u32));
    let [a, b, c, d] = version.to_be_bytes();
    rule(&format!(
        "ingress prio {priority}: ipv4 src {source} / udp dst 7 => set eth src 02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}, mark {}, queue 0",
        version + 1000
    ))
}

/// The control thread goes on until something has happened.
fn until(running: &mut Running<Ruled<Inner>>, control: &mut RuleControl, happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(!running.failed(), "the worker has ended");
        assert!(start.elapsed() < PATIENCE, "packets do not come");
        running.tick(&mut Ticks(control));
        std::thread::yield_now();
    }
}

#[test]
fn changes_beside_a_worker_lose_nothing_and_mix_nothing() {
    require!(RDMA);
    launch::under("changes_beside_a_worker_lose_nothing_and_mix_nothing", NIC, || {
        let settings = emulated::settings("mlx50", "dv");
        let runtime = Runtime::open(vec![settings], RuntimeConfig::default()).unwrap_or_else(|error| panic!("{error}"));
        let (told, pool) = (Arc::new(Told::default()), runtime.pools()[0].clone());
        let mut control = RuleControl::new(&runtime, Parser::default(), RuleLimits::default());
        let started = runtime.start(|worker| control.stage(worker, Arc::clone(&told).traffic(pool.clone())));
        let mut running = started.unwrap_or_else(|error| panic!("{error}"));
        control.use_hardware(running.plane(), [0]);
        let change = |running: &mut Running<_>, control: &mut RuleControl, gone: &[RuleId], new: Vec<Rule>| {
            control.change(running.plane(), gone, new).unwrap_or_else(|error| panic!("{error}"))
        };
        change(&mut running, &mut control, &[], many(30));
        let first = (0..FLOWS).map(|flow| versioned(flow, 0, 1)).collect();
        let first = change(&mut running, &mut control, &[], first);
        let mut flows: Vec<Vec<RuleId>> = first.into_iter().map(|id| vec![id]).collect();
        running.plane().send(0, packet(&pool, &frame(address(5), 9, 0)).expect("a buffer"));
        let (start, mut spent) = (Instant::now(), [Duration::ZERO; 3]);
        for n in 0..CHANGES {
            let (flow, seen) = (n % FLOWS, told.seen.load(Ordering::Acquire));
            let version = told.done[flow].load(Ordering::Acquire) + 1;
            // Another in the place of one, one more above it, one less below that.
            let (gone, new) = match n / FLOWS % 3 {
                0 => (std::mem::take(&mut flows[flow]), Some(2)),
                1 => (Vec::new(), Some(1)),
                _ => (vec![flows[flow].remove(0)], None),
            };
            let version = if new.is_some() { version } else { version - 1 };
            told.begun[flow].store(version, Ordering::Release);
            let new = new.map(|priority| versioned(flow, version, priority)).into_iter().collect();
            let begun = Instant::now();
            flows[flow].extend(change(&mut running, &mut control, &gone, new));
            spent[n / FLOWS % 3] += begun.elapsed();
            told.done[flow].store(version, Ordering::Release);
            // Packets between changes, also where the worker seldom has a processor.
            if n % 10 == 0 {
                until(&mut running, &mut control, || told.seen.load(Ordering::Acquire) > seen);
            }
        }
        let taken = start.elapsed();
        told.end.store(true, Ordering::Release);
        until(&mut running, &mut control, || told.seen.load(Ordering::Acquire) == told.sent.load(Ordering::Acquire));
        let packets = told.seen.load(Ordering::Acquire);
        eprintln!("{CHANGES} changes in {taken:?} (others, more, less: {spent:?}), {packets} packets");
        for id in flows.into_iter().flatten() {
            let placement = control.placement(id);
            assert_eq!(placement.len(), 1, "{placement:?}");
            assert_ne!(placement[0].1.word(), "software", "{placement:?}");
        }
        let summary = running.stop(&mut Ticks(&mut control));
        assert!(summary.failures.is_empty(), "{:?}", summary.failures);
        assert!(summary.drops().is_empty(), "{:?}", summary.drops());
    });
}
