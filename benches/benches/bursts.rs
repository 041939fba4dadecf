//! Micro-benchmarks of burst functions: each iteration is a burst of 64. `cargo bench -p wirepath-benches`.

// Criterion's macro makes public functions.
#![allow(missing_docs)]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use wirepath_apps::pktgen::headers::Stack;
use wirepath_packet::{BATCH, Batch, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::route::{NetworkPrefix, RouteLimits, RouteWriter};
use wirepath_pipeline::rules::ExactMatchTable;
use wirepath_wire::{checksum, parse};

/// Keys and routes of tables: more than the second-level cache holds.
const ENTRIES: u32 = 100_000;

/// Returns a group whose iterations are bursts.
fn bursts<'c>(criterion: &'c mut Criterion, name: &str) -> BenchmarkGroup<'c, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(BATCH as u64));
    group
}

/// Returns the frames of a burst, each of another flow.
fn frames(headers: &str) -> Vec<Vec<u8>> {
    let stack = Stack::parse(headers).expect("a header stack");
    let frame = |flow| {
        let mut frame = Vec::new();
        stack.emit(flow % stack.flows(), &mut frame);
        // Fills up the lengths and checksums of a payload of 18 zeros.
        frame.resize(frame.len() + 18, 0);
        stack.complete(&mut frame, checksum::sum(&[]), 18);
        frame
    };
    (0..BATCH as u64).map(frame).collect()
}

fn parser(criterion: &mut Criterion) {
    let mut group = bursts(criterion, "parse");
    for (name, headers) in [
        ("udp", "ipv4 / udp src 1024-1087"),
        ("tcp6", "ipv6 / tcp src 1024-1087"),
        ("vxlan", "ipv4 / udp src 1024-1087 / vxlan vni 5 / eth / ipv4 / udp"),
    ] {
        let frames = frames(headers);
        for frame in &frames {
            assert!(parse(frame).is_ok(), "{headers}");
        }
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for frame in &frames {
                    let _ = black_box(parse(black_box(frame)));
                }
            });
        });
    }
}

fn checksums(criterion: &mut Criterion) {
    let mut group = bursts(criterion, "checksum");
    for len in [20, 1500] {
        let data = vec![0x5a_u8; len];
        group.bench_function(format!("{len} bytes"), |bencher| {
            bencher.iter(|| (0..BATCH).for_each(|_| _ = black_box(checksum::sum(black_box(&data)).fold())));
        });
    }
}

fn pool(criterion: &mut Criterion) {
    let pool = Pool::new("bench", 4096).expect("memory");
    let template = pool.meta_template().len(64);
    bursts(criterion, "pool").bench_function("take and free", |bencher| {
        bencher.iter(|| {
            let mut batch = Batch::new();
            assert_eq!(pool.take_batch_from_template(BATCH, &mut batch, &template), BATCH);
            black_box(&mut batch).clear();
        });
    });
}

fn table(criterion: &mut Criterion) {
    let mut random = fastrand::Rng::with_seed(1);
    let keys: Vec<[u64; 2]> = (0..ENTRIES).map(|_| [random.u64(..), random.u64(..)]).collect();
    let mut table = ExactMatchTable::<2>::with_capacity(keys.len());
    for (key, value) in keys.iter().zip(0..) {
        table.insert(key, value);
    }
    let mut found = vec![None; BATCH];
    let mut next = keys.chunks_exact(BATCH).cycle();
    bursts(criterion, "table").bench_function("find_batch", |bencher| {
        bencher.iter(|| {
            table.find_batch(next.next().expect("a cycle"), &mut found);
            black_box(&mut found);
        });
    });
    assert!(found.iter().all(Option::is_some));
}

fn routes(criterion: &mut Criterion) {
    let mut random = fastrand::Rng::with_seed(1);
    let domain = Domain::new();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let mut addresses = Vec::new();
    for value in 0..ENTRIES {
        let address = random.u32(1 << 24..224 << 24);
        addresses.push(address);
        let network = NetworkPrefix::new(IpAddr::V4(Ipv4Addr::from_bits(address & !0xff)), 24).expect("a network");
        writer.insert(0, network, value % 1000).expect("room");
    }
    let (tables, reader) = (writer.tables(), domain.join());
    let view = tables.view(reader.guard());
    let (mut values, mut next) = ([0; BATCH], addresses.chunks_exact(BATCH).cycle());
    bursts(criterion, "route").bench_function("lookup4_batch", |bencher| {
        bencher.iter(|| {
            view.lookup4_batch(0, next.next().expect("a cycle"), &mut values);
            black_box(&mut values);
        });
    });
}

criterion_group!(all, parser, checksums, pool, table, routes);
criterion_main!(all);
