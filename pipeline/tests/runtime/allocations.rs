// UNSAFETY: a counting allocator must implement the unsafe trait `GlobalAlloc`.
#![allow(unsafe_code)]

//! The packet path allocates nothing: a counting allocator watches a worker while it does everything that it
//! can do.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Pool, PortId};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::table::{FdbLimits, FdbWriter, Key};
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl};
use wirepath_pipeline::{Context, ParsedBatch, PortInfo, RunOptions, Runtime, RuntimeConfig};
use wirepath_settings::Source;
use wirepath_wire::{L4Type, MacAddr, Parser};

use crate::programs::{open, stop, wait_until};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Bytes that are allocated and not freed.
static BYTES: AtomicI64 = AtomicI64::new(0);
/// Held by a test that counts.
static COUNTS: Mutex<()> = Mutex::new(());

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: every call is passed to the system allocator with unchanged arguments, so the contract of
// `GlobalAlloc` holds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if WATCHED.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
            BYTES.fetch_add(layout.size() as i64, Ordering::Relaxed);
        }
        // SAFETY: the caller guarantees that `layout` has a non-zero size, as `GlobalAlloc::alloc` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if WATCHED.get() {
            BYTES.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        }
        // SAFETY: the caller guarantees that `pointer` was allocated by this allocator, and so by `System`,
        // with this `layout`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Checks that the allocator counts, and begins at zero.
fn reset() {
    WATCHED.set(true);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(Box::new(1)));
    WATCHED.set(false);
    assert_ne!(ALLOCATIONS.load(Ordering::Relaxed), before);
    ALLOCATIONS.store(0, Ordering::Relaxed);
    BYTES.store(0, Ordering::Relaxed);
}

#[test]
fn a_busy_worker_allocates_nothing() {
    let _counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    reset();
    let text = "[[port]]\nname = 'a'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 5000\n\
                [[port]]\nname = 'b'\ndriver = 'null'\n[pool]\nbuffers = 4096\n";
    let source = Source::new("test", text);
    let document = source.parse().unwrap();
    let top = document.settings();
    let ports = RuntimeConfig::ports_from_settings(&top).unwrap();
    let runtime = Runtime::open(ports, RuntimeConfig::from_settings(&top).unwrap()).unwrap();

    let mut writer = FdbWriter::new(runtime.domain(), FdbLimits::default(), 0);
    writer.learn(Key::new(1, MacAddr::new(2, 0, 0, 0, 0, 1)), 1, 0);
    let (fdb, done) = (writer.fdb(), Arc::new(AtomicBool::new(false)));
    let options = RunOptions { stop: Some(Arc::clone(&done)), ..RunOptions::default() };
    let mut batches = 0;
    let mut parsed = ParsedBatch::new();
    let stage = move |context: &mut Context<'_>, batch: &mut Batch| {
        batches += 1;
        // First uses, of pool caches for example, are over by now.
        if batches == 100 {
            WATCHED.set(true);
        }
        parsed.parse(&Parser::default(), context, batch);
        let table = fdb.table(context.guard());
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let source = MacAddr(packet.data()[6..12].try_into().expect("parsed"));
            let key = Key::new(1, source);
            context.learn(key, table.lookup(key));
            at += 1;
            match at % 8 {
                0 => {
                    context.drop(packet, DropReason::RuleDrop);
                    None
                }
                1 if context.in_port().is_some() => {
                    context.enqueue_to_worker(0, packet);
                    None
                }
                2 => {
                    context.punt(packet, 0);
                    None
                }
                3 => {
                    context.send(PortId::new(1), packet);
                    None
                }
                n => {
                    packet.set_out_port(PortId::new(n as u16 % 2));
                    Some(packet)
                }
            }
        });
        if batches == 20_000 {
            WATCHED.set(false);
            done.store(true, Ordering::Relaxed);
        }
    };
    let mut stage = Some(stage);
    let summary = runtime.run(|_| stage.take().expect("one worker"), &mut (), &options).unwrap();
    assert!(summary.failures.is_empty(), "{summary}");
    assert!(summary.rx().packets > 20_000 && summary.tx().packets > 10_000, "{summary}");
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0);
}

/// A stage as a plain function without state of its own: it parses, counts, drops and sends.
fn parse(context: &mut Context<'_>, batch: &mut Batch) {
    let batches = BATCHES.fetch_add(1, Ordering::Relaxed);
    // First uses are over by now.
    if batches == 100 {
        WATCHED.set(true);
    }
    context.parse_each(batch, |context, mut packet, headers| {
        let udp = headers.outer().udp(packet.data()).map(|udp| udp.src_port());
        if headers.outer().l4_type() != L4Type::Udp || udp.is_none_or(|port| port % 4 == 0) {
            context.drop(packet, DropReason::RuleDrop);
            return None;
        }
        packet.set_out_port(packet.in_port());
        Some(packet)
    });
    if batches == 20_000 {
        WATCHED.set(false);
    }
}

static BATCHES: AtomicU64 = AtomicU64::new(0);

#[test]
fn a_function_that_parses_allocates_nothing() {
    let _counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    reset();
    let runtime = open("[[port]]\nname = 'a'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 100\n").unwrap();
    let mut running = runtime.start(|_| parse).unwrap();
    wait_until(|| {
        running.tick(&mut ());
        BATCHES.load(Ordering::Relaxed) > 20_000
    });
    let summary = stop(running);
    assert!(summary.drops()[&DropReason::RuleDrop] > 20_000 && summary.tx().packets > 60_000, "{summary}");
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0);
}

/// Memory of a gateway with many filters is bounded by their rules, not by their limits.
#[test]
fn a_filter_of_few_rules_takes_tens_of_kilobytes() {
    const SEGMENTS: i64 = 32;
    let _counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = Pool::new("filters", 64).unwrap();
    let ports: Vec<PortInfo> = (0..)
        .zip(["wan", "lan"])
        .map(|(number, name)| {
            PortInfo::simulated(PortId::new(number), name, Some(MacAddr::new(2, 0, 0, 0, 0, 1)), 1500, &pool)
        })
        .collect();
    let bytes = |rules: &str, workers: usize| {
        let mut text = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n".to_owned();
        for id in 1..=SEGMENTS {
            text += &format!(
                "[[segment]]\nvni = {id}\nports = [{{ port = 'lan', vlan = {id} }}]\nremotes = ['10.9.0.2']\n\
                 filter = [{rules}]\n"
            );
        }
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
        let domain = Domain::new();
        reset();
        WATCHED.set(true);
        let control = GatewayControl::new(&config, &ports, &domain, workers, 0);
        WATCHED.set(false);
        let bytes = BYTES.load(Ordering::Relaxed);
        drop(control);
        bytes
    };
    let rules = "'ingress: tcp dst 23 => drop', 'ingress: ipv4 src 10.0.0.0/8 / udp => count', 'ingress: icmp => drop'";
    for (workers, most) in [(1, 40_000), (8, 100_000)] {
        let each = (bytes(rules, workers) - bytes("", workers)) / SEGMENTS;
        println!("{workers} workers: {each} bytes");
        assert!((1_000..most).contains(&each), "{workers} workers: {each} bytes");
    }
}
