//! The rule engine's hash table by itself: exact keys, random hits over all of them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use wirepath_apps::cli::{self, Failure};
use wirepath_pipeline::clock;
use wirepath_pipeline::rules::ExactTable;

use crate::measure::{cpu_time, pin, positive};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Keys in the table
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=64_000_000))]
    flows: u32,

    /// What the keys are
    #[arg(long, value_enum, default_value_t = Key::Ipv4)]
    key: Key,

    /// Core to run on
    #[arg(long, value_name = "N")]
    core: Option<usize>,

    /// Length of the measurement of lookups
    #[arg(long, value_name = "N", default_value_t = 2.0, value_parser = positive)]
    seconds: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Key {
    /// Addresses, ports, protocol: 16 bytes
    Ipv4,
    /// The same of IPv6: 40 bytes
    Ipv6,
}

/// Figures, cycles of the time-stamp counter for one key. Hashing is included.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// Lookup of a random key that is there, 64 at a time.
    lookup_cycles: f64,
    /// Insertion of a new key into a table that was made for so many.
    insert_cycles: f64,
    /// The longest single insertion, reading the counter included. Those in which others had the core do not count.
    worst_insert_cycles: u64,
    /// The same into a table that begins small and grows.
    growing_insert_cycles: f64,
    growing_worst_insert_cycles: u64,
    /// Bytes of memory for each key.
    bytes_per_key: f64,
    flows: u32,
    /// Part of the time that the program really had a processor; below 1 the figures are too high.
    cpu_share: f64,
}

impl Figures {
    pub(crate) fn print(&self, json: bool) -> Result<(), Failure> {
        if json {
            return cli::print_json(self);
        }
        cli::print(format_args!(
            "{:.1} cycles/lookup, {:.1} cycles/insert (worst {}), growing {:.1} cycles/insert (worst {}), {:.0} bytes/key",
            self.lookup_cycles,
            self.insert_cycles,
            self.worst_insert_cycles,
            self.growing_insert_cycles,
            self.growing_worst_insert_cycles,
            self.bytes_per_key
        ))
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<Figures, Failure> {
    pin(arguments.core)?;
    match arguments.key {
        // Two addresses, two ports and the protocol.
        Key::Ipv4 => measure(arguments, |a, b| [a, b & 0xffff_ffff | 17 << 32]),
        Key::Ipv6 => measure(arguments, |a, b| {
            [0xfd00 << 48, a, 0xfd00 << 48 | 1, b, a.rotate_left(32) & 0xffff_ffff | 17 << 32]
        }),
    }
}

/// How often this thread has lost its core to another (proc(5), status).
fn switches() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

fn next(x: &mut u64) -> u64 {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    *x
}

/// Lookups in a row between two looks at the clock; their keys lie ready, one behind the other.
const ROUND: usize = 1 << 20;

fn measure<const N: usize>(arguments: &Arguments, key: impl Fn(u64, u64) -> [u64; N]) -> Result<Figures, Failure> {
    let count = arguments.flows as usize;
    let mut x = 88_172_645_463_325_252u64;
    let keys: Vec<[u64; N]> = (0..count).map(|_| key(next(&mut x), next(&mut x))).collect();
    let started = (Instant::now(), cpu_time());

    // Twice: the mean without a look at the counter at every key, the longest with.
    let fill = |capacity: usize| {
        let mut table = ExactTable::<N>::with_capacity(capacity);
        let from = clock::ticks();
        for (key, value) in keys.iter().zip(0..) {
            table.insert(key, value);
        }
        (table, (clock::ticks() - from) as f64 / count as f64)
    };
    let worst = |capacity: usize| {
        let mut table = ExactTable::<N>::with_capacity(capacity);
        let (mut worst, mut switches) = (0, switches());
        for (i, (key, value)) in keys.iter().zip(0..).enumerate() {
            /// Insertions between two looks at the number of switches.
            const LOOK: usize = 4096;
            let from = clock::ticks();
            table.insert(key, value);
            let ticks = clock::ticks() - from;
            if ticks > worst || i % LOOK == 0 {
                let now = self::switches();
                if now == switches {
                    worst = worst.max(ticks);
                }
                switches = now;
            }
        }
        worst
    };
    // The first pass over fresh memory is that of the page faults; it counts for whoever fills a table, and so it counts here.
    let (table, insert_cycles) = fill(count);
    let (_, growing_insert_cycles) = fill(0);
    let (worst_insert_cycles, growing_worst_insert_cycles) = (worst(count), worst(0));

    let sequence: Vec<[u64; N]> = (0..ROUND).map(|_| keys[next(&mut x) as usize % count]).collect();
    let mut found = vec![None; 64];
    let (mut ticks, mut lookups, mut hits) = (0, 0, 0);
    let until = Instant::now() + Duration::from_secs_f64(arguments.seconds);
    while Instant::now() < until {
        let from = clock::ticks();
        for keys in sequence.chunks_exact(64) {
            table.find_batch(keys, &mut found);
            hits += found.iter().filter(|found| found.is_some()).count();
            black_box(&mut found);
        }
        ticks += clock::ticks() - from;
        lookups += sequence.len();
    }
    if hits != lookups {
        return Err(Failure::failed(format!("{} of {lookups} keys were not found", lookups - hits)));
    }
    let cpu_share = (cpu_time() - started.1) / started.0.elapsed().as_secs_f64();
    Ok(Figures {
        lookup_cycles: ticks as f64 / lookups as f64,
        insert_cycles,
        worst_insert_cycles,
        growing_insert_cycles,
        growing_worst_insert_cycles,
        bytes_per_key: table.bytes() as f64 / count as f64,
        flows: arguments.flows,
        cpu_share: cpu_share.min(1.0),
    })
}
