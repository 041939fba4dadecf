//! One measurement: run a pipeline, let it warm up, count packets and cycles.

use std::time::{Duration, Instant};

use serde::Serialize;
use wirepath_apps::cli::{self, Failure, Rate};
use wirepath_pipeline::{Idle, Running, Runtime, RuntimeConfig, Stage, WorkerInfo, clock};
use wirepath_pmd::drivers::{self, PortSettings};
use wirepath_pmd::settings::Source;

/// Time before the figures are taken: caches, branch predictors and the clock of the core settle.
pub(crate) const WARM_UP: Duration = Duration::from_millis(300);

/// What every measurement takes.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Common {
    /// Core to run on
    #[arg(long, value_name = "N")]
    pub(crate) core: Option<usize>,

    /// Length of the measurement, after a warm-up of 0.3 seconds
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = positive)]
    pub(crate) seconds: f64,

    /// Buffers in rotation for each source; up to 64 stays within the first-level cache, 8192 is like the ring of a NIC
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(32..=65_536))]
    pub(crate) buffers: u32,
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.01..=3600.0).contains(s)).ok_or("expected a number from 0.01 to 3600".to_owned())
}

impl Common {
    /// The setting of a null source that keeps that many buffers in rotation: without a ring, each burst takes the buffers that the one
    /// before gave back.
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
    /// Packets dropped since the start, for whatever reason.
    pub(crate) dropped: u64,
    /// The same for the time only in which the program had its core: what to look at on a machine that is not quiet. Caches that others
    /// have emptied still count.
    pub(crate) own_cycles_per_packet: f64,
    /// Part of the time that the program really had a processor; below 1 the core was shared, and the figures are too high.
    pub(crate) cpu_share: f64,
}

impl Figures {
    /// Of `packets` that took `elapsed` seconds or `ticks` of the time-stamp counter, with a processor for `cpu_share` of the time.
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

/// Ports from the text of a configuration.
pub(crate) fn ports(text: &str) -> Result<Vec<PortSettings>, Failure> {
    let source = Source::new("wirepath-bench", text);
    let document = source.parse().map_err(Failure::usage)?;
    let settings = document.settings();
    settings.tables("port").and_then(|tables| tables.into_iter().map(drivers::plan).collect()).map_err(Failure::usage)
}

/// Runs a pipeline on one core and measures it.
pub(crate) fn run<S: Stage + 'static>(
    ports: Vec<PortSettings>,
    common: &Common,
    prepare: impl FnOnce(&Runtime) -> Result<Box<dyn FnMut(&WorkerInfo) -> S>, Failure>,
) -> Result<Figures, Failure> {
    let config = RuntimeConfig {
        workers: vec![common.core],
        idle: Idle::Busy,
        buffers: 4096 + 2 * common.ring() * ports.len() as u32,
        ..RuntimeConfig::default()
    };
    let runtime = Runtime::open(ports, config)?;
    let make = prepare(&runtime)?;
    let running = runtime.start(make).map_err(Failure::failed)?;
    // The control thread sleeps while it is measured: on a machine with few cores it would take part of the worker's.
    std::thread::sleep(WARM_UP);
    let (before, cpu_before, at, ticks_at) = (sent(&running), cpu_time(), Instant::now(), clock::ticks());
    std::thread::sleep(Duration::from_secs_f64(common.seconds));
    let (after, ticks, elapsed) = (sent(&running), clock::ticks() - ticks_at, at.elapsed().as_secs_f64());
    let cpu_share = (cpu_time() - cpu_before) / elapsed;
    let failed = running.failed();
    let summary = running.stop(&mut ());
    if failed || !summary.failures.is_empty() {
        return Err(Failure::failed(summary.failures.join("; ")));
    }
    Figures::new(after - before, summary.drops().values().sum(), elapsed, ticks, cpu_share)
}

/// One part of a measurement with several.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    /// Cycles of the time-stamp counter per packet, of the time in which the worker had its core.
    pub(crate) cycles: f64,
    /// What the part's own work returned.
    pub(crate) extra: f64,
}

/// Runs a pipeline on one core while `work` runs on the control thread, which calls what it is given for each part that is measured.
pub(crate) fn run_phases<S: Stage + 'static>(
    ports: Vec<PortSettings>,
    common: &Common,
    prepare: impl FnOnce(&Runtime) -> Result<Box<dyn FnMut(&WorkerInfo) -> S>, Failure>,
    work: impl FnOnce(&mut dyn FnMut(&mut dyn FnMut() -> f64) -> Phase) -> Vec<Phase>,
) -> Result<Vec<Phase>, Failure> {
    let config = RuntimeConfig {
        workers: vec![common.core],
        idle: Idle::Busy,
        buffers: 4096 + 2 * common.ring() * ports.len() as u32,
        ..RuntimeConfig::default()
    };
    let runtime = Runtime::open(ports, config)?;
    let make = prepare(&runtime)?;
    let running = runtime.start(make).map_err(Failure::failed)?;
    std::thread::sleep(WARM_UP);
    let phases = work(&mut |part| {
        let (packets, cpu, at, ticks) = (sent(&running), worker_time(), Instant::now(), clock::ticks());
        let extra = part();
        let (packets, ticks) = (sent(&running) - packets, clock::ticks() - ticks);
        let share = ((worker_time() - cpu) / at.elapsed().as_secs_f64()).min(1.0);
        Phase { cycles: ticks as f64 * share / packets.max(1) as f64, extra }
    });
    let failed = running.failed();
    let summary = running.stop(&mut ());
    if failed || !summary.failures.is_empty() {
        return Err(Failure::failed(summary.failures.join("; ")));
    }
    Ok(phases)
}

/// Seconds of processor time that the workers have had (proc(5), schedstat: nanoseconds).
fn worker_time() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of = |path: std::path::PathBuf| {
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let times = std::fs::read_to_string(path.join("schedstat")).ok()?;
        if name.starts_with("worker-") { times.split_whitespace().next()?.parse::<f64>().ok() } else { None }
    };
    tasks.filter_map(|task| of(task.path())).sum::<f64>() / 1e9
}

/// Seconds of processor time that this thread has had.
pub(crate) fn thread_time() -> f64 {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    times.split_whitespace().next().and_then(|time| time.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// Keeps this thread on a core.
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

/// Seconds of processor time that the program has had: user and system time of `/proc/self/stat` (proc(5)), in ticks of 10 ms. Not by
/// clock_gettime through rustix, whose look at the vDSO ends the program under valgrind.
pub(crate) fn cpu_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name in parentheses may contain anything; behind it, the fields from the third on.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
