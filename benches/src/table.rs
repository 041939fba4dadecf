//! The rule engine's hash table alone: exact keys, with random hits over all of them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use wirepath::cli::Failure;
use wirepath_pipeline::clock;
use wirepath_pipeline::rules::ExactMatchTable;

use crate::measure::{Results, Spread, Timing, count, cpu_time, pin};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of keys in the table
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = count(1..=64_000_000))]
    flows: u32,

    /// Kind of keys
    #[arg(long, value_enum, default_value_t = Key::Ipv4)]
    key: Key,

    #[command(flatten)]
    timing: Timing,
}

#[derive(Clone, Copy, ValueEnum)]
enum Key {
    /// Addresses, ports and protocol: 16 bytes
    Ipv4,
    /// The same for IPv6: 40 bytes
    Ipv6,
}

/// Figures in cycles of the time-stamp counter per key. Hashing is included.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// Lookup of a random existing key, 64 at a time: the median of the rounds.
    lookup_cycles: f64,
    /// The same by round.
    lookup: Spread,
    /// Insertion of a new key into a table created with the final capacity.
    insert_cycles: f64,
    /// Longest single insertion, including the read of the counter. Insertions during which the thread lost
    /// its core do not count.
    worst_insert_cycles: u64,
    /// Insertion into a table that starts small and grows.
    growing_insert_cycles: f64,
    growing_worst_insert_cycles: u64,
    /// Bytes of memory per key.
    bytes_per_key: f64,
    flows: u32,
    /// Fraction of the time in which the program had a processor. Below 1 the figures are too high.
    cpu_share: f64,
}

impl Results for Figures {
    fn text(&self) -> String {
        format!(
            "{:.1} cycles/lookup ({:.1} to {:.1} in {} rounds), {:.1} cycles/insert (worst {}), growing {:.1} \
             cycles/insert (worst {}), {:.0} bytes/key",
            self.lookup_cycles,
            self.lookup.min,
            self.lookup.max,
            self.lookup.rounds,
            self.insert_cycles,
            self.worst_insert_cycles,
            self.growing_insert_cycles,
            self.growing_worst_insert_cycles,
            self.bytes_per_key
        )
    }

    fn cpu_share(&self) -> Option<f64> {
        Some(self.cpu_share)
    }

    fn spread(&self) -> Option<f64> {
        Some(self.lookup.spread)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<Figures, Failure> {
    pin(arguments.timing.core)?;
    match arguments.key {
        // Two addresses, two ports and the protocol.
        Key::Ipv4 => measure(arguments, |a, b| [a, b & 0xffff_ffff | 17 << 32]),
        Key::Ipv6 => measure(arguments, |a, b| {
            [0xfd00 << 48, a, 0xfd00 << 48 | 1, b, a.rotate_left(32) & 0xffff_ffff | 17 << 32]
        }),
    }
}

/// Number of involuntary context switches of this thread (proc(5), status).
fn switches() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Lookups between two reads of the clock. Their keys are contiguous in memory.
const ROUND: usize = 1 << 20;

fn measure<const N: usize>(arguments: &Arguments, key: impl Fn(u64, u64) -> [u64; N]) -> Result<Figures, Failure> {
    let count = arguments.flows as usize;
    let mut random = fastrand::Rng::with_seed(1);
    let keys: Vec<[u64; N]> = (0..count).map(|_| key(random.u64(..), random.u64(..))).collect();
    let started = (Instant::now(), cpu_time());

    // The mean is measured without reading the counter for every key; the maximum is measured with it.
    let fill = |capacity: usize| {
        let mut table = ExactMatchTable::<N>::with_capacity(capacity);
        let from = clock::ticks();
        for (key, value) in keys.iter().zip(0..) {
            table.insert(key, value);
        }
        (table, (clock::ticks() - from) as f64 / count as f64)
    };
    let worst = |capacity: usize| {
        let mut table = ExactMatchTable::<N>::with_capacity(capacity);
        let (mut worst, mut switches) = (0, switches());
        for (i, (key, value)) in keys.iter().zip(0..).enumerate() {
            /// Insertions between two reads of the number of context switches.
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
    // The first pass over new memory includes page faults. They are a real cost of filling a table, so they
    // count.
    let (table, insert_cycles) = fill(count);
    let (_, growing_insert_cycles) = fill(0);
    let (worst_insert_cycles, growing_worst_insert_cycles) = (worst(count), worst(0));

    let sequence: Vec<[u64; N]> = (0..ROUND).map(|_| keys[random.usize(..count)]).collect();
    let mut found = vec![None; 64];
    let (mut all_lookups, mut hits) = (0, 0);
    let mut look_up = |length: Duration| {
        let (mut ticks, mut lookups) = (0, 0);
        let until = Instant::now() + length;
        while lookups == 0 || Instant::now() < until {
            let from = clock::ticks();
            for keys in sequence.chunks_exact(64) {
                table.find_batch(keys, &mut found);
                hits += found.iter().filter(|found| found.is_some()).count();
                black_box(&mut found);
            }
            ticks += clock::ticks() - from;
            lookups += sequence.len();
        }
        all_lookups += lookups;
        ticks as f64 / lookups as f64
    };
    let timing = &arguments.timing;
    look_up(Duration::from_secs_f64(timing.warm_up));
    let lookup = Spread::new((0..timing.rounds).map(|_| look_up(timing.round())));
    if hits != all_lookups {
        return Err(Failure::failed(format!("{} of {all_lookups} keys were not found", all_lookups - hits)));
    }
    let cpu_share = (cpu_time() - started.1) / started.0.elapsed().as_secs_f64();
    Ok(Figures {
        lookup_cycles: lookup.median,
        lookup,
        insert_cycles,
        worst_insert_cycles,
        growing_insert_cycles,
        growing_worst_insert_cycles,
        bytes_per_key: table.bytes() as f64 / count as f64,
        flows: arguments.flows,
        cpu_share: cpu_share.min(1.0),
    })
}
