//! One measurement: runs a pipeline, waits for the warm-up, and counts packets and cycles.

use std::time::{Duration, Instant};

use serde::Serialize;
use wirepath::cli::{self, Failure, Rate};
use wirepath_pipeline::{Idle, Running, Runtime, RuntimeConfig, Stage, Summary, WorkerInfo, clock};
use wirepath_pmd::drivers::{self, PortSettings};
use wirepath_settings::Source;

/// Warm-up time before the measurement. Caches, branch predictors and the clock of the core settle.
pub(crate) const WARM_UP: Duration = Duration::from_millis(300);

/// Options of every measurement.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Common {
    /// Core to run on
    #[arg(long, value_name = "N")]
    pub(crate) core: Option<usize>,

    /// Length of the measurement, after a warm-up of 0.3 seconds
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = positive)]
    pub(crate) seconds: f64,

    /// Buffers in rotation for each source; up to 64 fit into the first-level cache, 8192 are like the ring
    /// of a NIC
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(32..=65_536))]
    pub(crate) buffers: u32,
}

/// Length of a measurement in packets.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PacketLimit {
    /// Stop after about this number of packets instead of after a time, without a warm-up, for tools that count
    /// instructions
    #[arg(long, value_name = "N", conflicts_with = "seconds")]
    pub(crate) packets: Option<u64>,
}

/// Returns the parser of a number within a range.
pub(crate) fn count(range: std::ops::RangeInclusive<i64>) -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(range)
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.01..=3600.0).contains(s)).ok_or("expected a number from 0.01 to 3600".to_owned())
}

impl Common {
    /// Returns the `ring` setting of a null source that rotates this number of buffers. Without a ring, each
    /// burst reuses the buffers of the previous burst.
    pub(crate) fn ring(&self) -> u32 {
        if self.buffers <= 64 { 0 } else { self.buffers }
    }
}

/// Figures of one measurement.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    /// Packets sent per second, over all ports.
    pub(crate) pps: f64,
    /// Nanoseconds per packet.
    pub(crate) ns_per_packet: f64,
    /// Cycles of the time-stamp counter per packet.
    pub(crate) cycles_per_packet: f64,
    /// Packets sent during the measurement.
    pub(crate) packets: u64,
    /// Packets dropped since the start, for any reason.
    pub(crate) dropped: u64,
    /// Cycles per packet in the time in which the program had its core. Use this value on a machine that is
    /// not quiet. It still includes cache misses that other programs cause.
    pub(crate) own_cycles_per_packet: f64,
    /// Fraction of the time in which the program had a processor. Below 1 the core was shared, and the
    /// figures are too high.
    pub(crate) cpu_share: f64,
}

impl Figures {
    /// Computes the figures of `packets` that took `elapsed` seconds or `ticks` of the time-stamp counter,
    /// with a processor for `cpu_share` of the time.
    pub(crate) fn new(packets: u64, dropped: u64, elapsed: f64, ticks: u64, cpu_share: f64) -> Result<Self, Failure> {
        if packets == 0 {
            return Err(Failure::failed("no packet was moved"));
        }
        let (count, cpu_share) = (packets as f64, cpu_share.min(1.0));
        Ok(Self {
            pps: count / elapsed,
            ns_per_packet: elapsed * 1e9 / count,
            cycles_per_packet: ticks as f64 / count,
            own_cycles_per_packet: ticks as f64 * cpu_share / count,
            packets,
            dropped,
            cpu_share,
        })
    }

    pub(crate) fn print(&self, json: bool) -> Result<(), Failure> {
        if json {
            return cli::print_json(self);
        }
        cli::print(format_args!(
            "{:.1} cycles/packet, {:.2} ns/packet, {} packets/s, {} dropped\n",
            self.cycles_per_packet,
            self.ns_per_packet,
            Rate(self.pps),
            self.dropped
        ))?;
        if self.cpu_share < 0.97 {
            eprintln!(
                "note: the program had its core for {:.0} % of the time only; {:.1} cycles/packet in that time",
                100.0 * self.cpu_share,
                self.own_cycles_per_packet
            );
        }
        Ok(())
    }
}

/// Reads ports from the text of a configuration.
pub(crate) fn ports(text: &str) -> Result<Vec<PortSettings>, Failure> {
    let source = Source::new("wirepath-bench", text);
    let document = source.parse().map_err(Failure::usage)?;
    let settings = document.settings();
    settings.tables("port").and_then(|tables| tables.into_iter().map(drivers::plan).collect()).map_err(Failure::usage)
}

/// Creates the stages of a worker.
type MakeStage<S> = Box<dyn FnMut(&WorkerInfo) -> S>;

/// Starts a pipeline on one core.
fn start<S: Stage + 'static>(
    ports: Vec<PortSettings>,
    common: &Common,
    prepare: impl FnOnce(&Runtime) -> Result<MakeStage<S>, Failure>,
) -> Result<Running<S>, Failure> {
    let config = RuntimeConfig {
        workers: vec![common.core],
        idle: Idle::Busy,
        buffers: 4096 + 2 * common.ring() * ports.len() as u32,
        ..RuntimeConfig::default()
    };
    let runtime = Runtime::open(ports, config)?;
    let make = prepare(&runtime)?;
    runtime.start(make).map_err(Failure::failed)
}

/// Stops a pipeline. Fails if a worker or a port has failed.
fn stop<S: Stage + 'static>(running: Running<S>) -> Result<Summary, Failure> {
    let failed = running.failed();
    let summary = running.stop(&mut ());
    if failed || !summary.failures.is_empty() {
        return Err(Failure::failed(summary.failures.join("; ")));
    }
    Ok(summary)
}

/// Runs a pipeline on one core and measures it.
pub(crate) fn run<S: Stage + 'static>(
    ports: Vec<PortSettings>,
    common: &Common,
    limit: &PacketLimit,
    prepare: impl FnOnce(&Runtime) -> Result<MakeStage<S>, Failure>,
) -> Result<Figures, Failure> {
    let running = start(ports, common, prepare)?;
    if let Some(packets) = limit.packets {
        return run_packets(running, packets);
    }
    // The control thread sleeps during the measurement. On a machine with few cores it would use the worker's
    // core.
    std::thread::sleep(WARM_UP);
    let (before, cpu_before, at, ticks_at) = (sent(&running), cpu_time(), Instant::now(), clock::ticks());
    std::thread::sleep(Duration::from_secs_f64(common.seconds));
    let (after, ticks, elapsed) = (sent(&running), clock::ticks() - ticks_at, at.elapsed().as_secs_f64());
    let cpu_share = (cpu_time() - cpu_before) / elapsed;
    let summary = stop(running)?;
    Figures::new(after - before, summary.drops().values().sum(), elapsed, ticks, cpu_share)
}

/// Waits until a pipeline has sent `packets` packets, stops it, and returns the figures of all packets that it
/// has sent since its start.
fn run_packets<S: Stage + 'static>(running: Running<S>, packets: u64) -> Result<Figures, Failure> {
    let (cpu_before, at, ticks_at) = (cpu_time(), Instant::now(), clock::ticks());
    while sent(&running) < packets && !running.failed() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let summary = stop(running)?;
    let (ticks, elapsed) = (clock::ticks() - ticks_at, at.elapsed().as_secs_f64());
    let packets = summary.tx().packets;
    let cpu_share = (cpu_time() - cpu_before) / elapsed;
    Figures::new(packets, summary.drops().values().sum(), elapsed, ticks, cpu_share)
}

/// One phase of a measurement with several phases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    /// Cycles of the time-stamp counter per packet, in the time in which the worker had its core.
    pub(crate) cycles: f64,
    /// Return value of the phase's own work.
    pub(crate) extra: f64,
}

/// Runs a pipeline on one core and `work` on the control thread. `work` calls its argument for each phase to
/// measure.
pub(crate) fn run_phases<S: Stage + 'static>(
    ports: Vec<PortSettings>,
    common: &Common,
    prepare: impl FnOnce(&Runtime) -> Result<MakeStage<S>, Failure>,
    work: impl FnOnce(&mut dyn FnMut(&mut dyn FnMut() -> f64) -> Phase) -> Vec<Phase>,
) -> Result<Vec<Phase>, Failure> {
    let running = start(ports, common, prepare)?;
    std::thread::sleep(WARM_UP);
    let phases = work(&mut |part| {
        let (packets, cpu, at, ticks) = (sent(&running), worker_time(), Instant::now(), clock::ticks());
        let extra = part();
        let (packets, ticks) = (sent(&running) - packets, clock::ticks() - ticks);
        let share = ((worker_time() - cpu) / at.elapsed().as_secs_f64()).min(1.0);
        Phase { cycles: ticks as f64 * share / packets.max(1) as f64, extra }
    });
    stop(running)?;
    Ok(phases)
}

/// Processor time of the workers in seconds (proc(5), schedstat: nanoseconds).
fn worker_time() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of = |path: std::path::PathBuf| {
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let times = std::fs::read_to_string(path.join("schedstat")).ok()?;
        if name.starts_with("worker-") { times.split_whitespace().next()?.parse::<f64>().ok() } else { None }
    };
    tasks.filter_map(|task| of(task.path())).sum::<f64>() / 1e9
}

/// Processor time of this thread in seconds.
pub(crate) fn thread_time() -> f64 {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    times.split_whitespace().next().and_then(|time| time.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// Pins this thread to a core.
pub(crate) fn pin(core: Option<usize>) -> Result<(), Failure> {
    match core {
        Some(id) if !core_affinity::set_for_current(core_affinity::CoreId { id }) => {
            Err(Failure::usage(format!("core {id}: this program may not run there")))
        }
        _ => Ok(()),
    }
}

/// Packets sent over all ports.
fn sent<S: Stage + 'static>(running: &Running<S>) -> u64 {
    running.snapshot().ports.iter().flat_map(|(_, _, tx)| tx).map(|queue| queue.packets).sum()
}

/// Processor time of the program in seconds: user and system time of `/proc/self/stat` (proc(5)), in ticks of
/// 10 ms. This does not use clock_gettime through rustix, because its access to the vDSO ends the program
/// under valgrind.
pub(crate) fn cpu_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may contain any character. The fields from the third on follow it.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
