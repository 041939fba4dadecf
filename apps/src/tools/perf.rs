//! `wirepath perf`: what the workers of a running program spend their cycles on.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use wirepath::cli::{Failure, Stop, Table, print, print_control, print_json};
use wirepath::control_socket::SocketArgument;

/// Measures what the workers of a running program spend their cycles on
///
/// For each worker: cycles per turn and per packet, cycles of each stage, packets per batch, histograms, and turns that
/// took long. A turn is one pass over the receive queues. The workers measure only while this runs; the cost is shown.
/// It needs the right to change the program. The program is the only one that runs, or the one whose control socket
/// --socket names.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// Seconds of the measurement
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = wirepath::cli::seconds)]
    seconds: Duration,

    /// Show only the worker with this index
    #[arg(short, long, value_name = "N")]
    worker: Option<u64>,

    /// Show the last 1000 busy turns
    #[arg(short, long)]
    turns: bool,

    /// Microseconds above which a turn is suspicious [default: 100]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    slow: Option<u64>,

    /// Repeat until Ctrl-C
    #[arg(long)]
    watch: bool,

    #[command(flatten)]
    socket: SocketArgument,
}

const HELP: &str = "\
With --json: an object with `seconds` and `workers`. With --watch, one object in each line.

LEFT is the number of packets that a turn left in receive queues, `-` if a driver cannot tell.
The part `other` is the worker's own loop, with the polls of empty queues.

Examples:
  wirepath perf                          # one second, all workers
  wirepath perf --worker 0 --turns --seconds 0.1
  wirepath perf --slow 20 --watch        # turns that take more than 20 microseconds";

/// Names of the histograms in an answer, and their headings.
const HISTOGRAMS: [(&str, &str); 5] = [
    ("cycles_per_turn", "CYCLES/TURN"),
    ("packets_per_turn", "PKTS/TURN"),
    ("cycles_per_packet", "CYCLES/PKT"),
    ("packets_per_batch", "PKTS/BATCH"),
    ("punts_per_turn", "PUNTS/TURN"),
];
/// Lines of a histogram above which its buckets are joined.
const MAX_BUCKETS: usize = 16;
const PERCENTILES: [(&str, &str); 6] =
    [("mean", "MEAN"), ("p50", "P50"), ("p90", "P90"), ("p99", "P99"), ("p99.9", "P99.9"), ("max", "MAX")];

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer or refuses the measurement.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let mut request = json!({ "request": "perf", "seconds": options.seconds.as_secs_f64(), "turns": options.turns });
    if let Some(worker) = options.worker {
        request["worker"] = worker.into();
    }
    if let Some(slow) = options.slow {
        request["slow_us"] = slow.into();
    }
    let mut client = options.socket.connect()?;
    let stop = options.watch.then(Stop::on_signals).transpose()?;
    loop {
        let workers = client.perf(&request, options.seconds)?;
        if json {
            print_json(&json!({ "seconds": request["seconds"], "workers": workers }))?;
        } else {
            if options.watch && std::io::stdout().is_terminal() {
                // Clears the terminal (ECMA-48: cursor to the first cell, erase the display).
                print_control("\x1b[H\x1b[2J")?;
            }
            print(workers.iter().map(text).collect::<Vec<_>>().join("\n"))?;
        }
        if stop.as_ref().is_none_or(|stop| stop.wait(Duration::ZERO)) {
            return Ok(());
        }
    }
}

/// Returns the figures of a worker as text.
fn text(worker: &Value) -> String {
    let it = |key: &str| number(&worker[key], 1);
    if worker["answered"] != true {
        return format!("worker {}: does not answer\n", it("worker"));
    }
    let mut text = format!(
        "worker {}\n\
         turns        {} busy, {} idle, {} suspicious (over {} us)\n\
         cycles       {} per busy turn, {} per idle turn, {} per packet\n\
         packets      {}, {} per batch, {} per busy turn; {} drops, {} punts\n\
         measurement  {} cycles per packet, {} of the time\n\n",
        it("worker"),
        it("busy_turns"),
        it("idle_turns"),
        it("suspicious_turns"),
        it("suspicious_limit_us"),
        it("cycles_per_turn"),
        it("cycles_per_idle_turn"),
        it("cycles_per_packet"),
        it("packets"),
        it("packets_per_batch"),
        it("packets_per_turn"),
        it("drops"),
        it("punts"),
        number(&worker["measurement"]["cycles_per_packet"], 1),
        percent(&worker["measurement"]["share"]),
    );
    let right = |headings: &[&str]| {
        let first = headings.iter().take(1).map(|heading| ((*heading).to_owned(), false));
        Table::with_columns(first.chain(headings.iter().skip(1).map(|heading| ((*heading).to_owned(), true))))
    };
    let mut stages = right(&["STAGE", "CYCLES/PKT", "SHARE", "RUNS"]);
    for stage in list(&worker["stages"]) {
        let name = stage["name"].as_str().unwrap_or_default().to_owned();
        stages.row([name, number(&stage["cycles_per_packet"], 1), percent(&stage["share"]), number(&stage["runs"], 0)]);
    }
    text += &format!("{stages}\n");

    let mut figures = right(&["", "MEAN", "P50", "P90", "P99", "P99.9", "MAX"]);
    let mut columns = Vec::new();
    for (name, heading) in HISTOGRAMS {
        let histogram = &worker["histograms"][name];
        let cells = PERCENTILES.iter().map(|(key, _)| number(&histogram[key], 1));
        figures.push(std::iter::once(heading.to_owned()).chain(cells));
        let bucket = |(last, count): (u64, u64)| [format!("<={last}"), count.to_string()];
        columns.push(buckets(histogram).into_iter().map(bucket).collect::<Vec<_>>());
    }
    text += &format!("{figures}\n");
    let headings = HISTOGRAMS.iter().flat_map(|(_, heading)| [((*heading).to_owned(), true), ("N".to_owned(), true)]);
    let mut table = Table::with_columns(headings);
    for i in 0..columns.iter().map(Vec::len).max().unwrap_or(0) {
        table.push(columns.iter().flat_map(|column| column.get(i).cloned().unwrap_or_default()));
    }
    text += &table.to_string();

    for (key, title) in [("slow_turns", "suspicious turns"), ("turns", "last busy turns")] {
        let mut turns = list(&worker[key]).peekable();
        if turns.peek().is_none() {
            continue;
        }
        let slow = key == "slow_turns";
        let mut headings = vec!["SECONDS", "CYCLES", "PACKETS", "BATCHES", "DROPS", "PUNTS", "LEFT", "IDLE BEFORE"];
        headings.extend(slow.then_some("LONGEST PART"));
        let mut table = Table::with_columns(headings.iter().map(|heading| ((*heading).to_owned(), true)));
        for turn in turns {
            let seconds = number(&turn["time"], 6);
            let counts = ["cycles", "packets", "batches", "drops", "punts", "left", "idle_before"];
            let counts = counts.iter().map(|key| number(&turn[key], 0));
            let longest = turn["longest"].as_str().unwrap_or_default();
            let longest = slow.then(|| format!("{longest} {}", number(&turn["longest_cycles"], 0)));
            table.push(std::iter::once(seconds).chain(counts).chain(longest));
        }
        text += &format!("\n{title}\n{table}");
    }
    text
}

/// Returns the buckets of a histogram: largest value and number of values. Many buckets are joined by powers of two.
fn buckets(histogram: &Value) -> Vec<(u64, u64)> {
    let pair = |pair: &Value| Some((pair[0].as_u64()?, pair[1].as_u64()?));
    let buckets: Vec<(u64, u64)> = list(&histogram["buckets"]).filter_map(pair).collect();
    if buckets.len() <= MAX_BUCKETS {
        return buckets;
    }
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (last, count) in buckets {
        match joined.last_mut() {
            Some(before) if before.0.max(1).ilog2() == last.max(1).ilog2() => *before = (last, before.1 + count),
            _ => joined.push((last, count)),
        }
    }
    joined
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Returns a number with some decimals if it is not a whole one; `-` if there is none.
fn number(value: &Value, decimals: usize) -> String {
    match (value.as_u64(), value.as_f64()) {
        (Some(whole), _) => whole.to_string(),
        (None, Some(real)) => format!("{real:.decimals$}"),
        (None, None) => "-".to_owned(),
    }
}

fn percent(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.1}%", share * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_histograms_are_joined_by_powers_of_two() {
        let histogram = |n: u64| json!({ "buckets": (1..=n).map(|i| [i, 2 * i]).collect::<Vec<_>>() });
        assert_eq!(buckets(&histogram(16)).len(), 16);
        let joined = buckets(&histogram(40));
        assert_eq!(joined.iter().map(|(last, _)| *last).collect::<Vec<_>>(), [1, 3, 7, 15, 31, 40]);
        assert_eq!(joined.iter().map(|(_, count)| count).sum::<u64>(), 40 * 41);
        assert!(buckets(&json!({ "buckets": [[1], "x", null] })).is_empty());
    }

    #[test]
    fn all_figures_are_in_the_text() {
        let histogram = json!({ "n": 3, "mean": 2.5, "p50": 2, "p90": 4, "p99": 4, "p99.9": 4, "max": 4,
            "buckets": [[2, 2], [4, 1]] });
        let histograms: serde_json::Map<String, Value> =
            HISTOGRAMS.iter().map(|(name, _)| ((*name).to_owned(), histogram.clone())).collect();
        let turn = json!({ "time": 1.5, "cycles": 900, "packets": 64, "batches": 2, "drops": 1, "punts": 0,
            "left": null, "idle_before": 7, "longest": "Gateway", "longest_cycles": 800 });
        let worker = json!({ "worker": 3, "answered": true, "busy_turns": 3, "idle_turns": 4, "suspicious_turns": 1,
            "suspicious_limit_us": 100.0, "cycles_per_turn": 812.25, "cycles_per_idle_turn": null,
            "cycles_per_packet": 12.34, "packets": 192, "packets_per_batch": 32.0, "packets_per_turn": 64.0,
            "drops": 1, "punts": 0, "measurement": { "cycles_per_packet": 0.51, "share": 0.0312 },
            "stages": [{ "name": "Gateway", "cycles_per_packet": 10.04, "share": 0.81, "runs": 6 }],
            "histograms": histograms, "slow_turns": [turn.clone()], "turns": [turn] });
        let text = text(&worker);
        for wanted in [
            "worker 3\n",
            "3 busy, 4 idle, 1 suspicious (over 100.0 us)",
            "812.2 per busy turn, - per idle turn, 12.3 per packet",
            "192, 32.0 per batch, 64.0 per busy turn; 1 drops, 0 punts",
            "0.5 cycles per packet, 3.1% of the time",
            "Gateway        10.0  81.0%     6",
            "suspicious turns\n",
            "Gateway 800",
            "last busy turns\n",
            "1.500000",
        ] {
            assert!(text.contains(wanted), "{wanted}:\n{text}");
        }
        assert!(text.lines().any(|line| line.split_whitespace().eq(["CYCLES/TURN", "2.5", "2", "4", "4", "4", "4"])));
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
        assert_eq!(super::text(&json!({ "worker": 1, "answered": false })), "worker 1: does not answer\n");
    }
}
