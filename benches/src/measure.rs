//! One measurement: runs a pipeline, waits for the warm-up, and counts packets and cycles in several rounds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use wirepath::cli::{self, Failure, Rate};
use wirepath_pipeline::{Idle, Running, Runtime, RuntimeConfig, Stage, Summary, WorkerInfo, clock};
use wirepath_pmd::drivers::{self, PortSettings};
use wirepath_settings::Source;

use crate::latency::{Probe, Timed};
use crate::machine::{Conditions, Observer};
use crate::real::{Offered, RealPorts};

/// Core and length of a measurement.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Timing {
    /// Core to run on
    #[arg(long, value_name = "N")]
    pub(crate) core: Option<usize>,

    /// Length of the measurement: all rounds together, after the warm-up
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = positive)]
    pub(crate) seconds: f64,

    /// Number of rounds; the figures are their medians, and the spread is that of the rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = count(1..=1000))]
    pub(crate) rounds: u32,

    /// Seconds before the first round, in which caches, branch predictors and the clock of the core settle
    #[arg(long, value_name = "N", default_value_t = 0.3, value_parser = warm_up)]
    pub(crate) warm_up: f64,
}

impl Timing {
    /// Returns the length of a round.
    pub(crate) fn round(&self) -> Duration {
        Duration::from_secs_f64(self.seconds / f64::from(self.rounds))
    }

    /// Waits for the end of the warm-up.
    pub(crate) fn sleep_warm_up(&self) {
        std::thread::sleep(Duration::from_secs_f64(self.warm_up));
    }
}

/// Options of measurements with packet sources.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Common {
    #[command(flatten)]
    pub(crate) timing: Timing,

    /// Buffers in rotation for each source; up to 64 fit into the first-level cache, 8192 are like the ring
    /// of a NIC
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(32..=65_536))]
    pub(crate) buffers: u32,

    /// Number of workers; 0: one.
    #[arg(skip)]
    workers: u16,

    /// Receives the times that batches spend in the stages.
    #[arg(skip)]
    pub(crate) probe: Option<Arc<Probe>>,
}

/// Length of a measurement in packets.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct PacketLimit {
    /// Stop after about this number of packets instead of after a time, without warm-up and rounds, for tools that
    /// count instructions
    #[arg(long, value_name = "N", conflicts_with_all = ["seconds", "rounds", "warm_up"])]
    pub(crate) packets: Option<u64>,
}

/// Returns the parser of a number within a range.
pub(crate) fn count(range: std::ops::RangeInclusive<i64>) -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(range)
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.01..=3600.0).contains(s)).ok_or("expected a number from 0.01 to 3600".to_owned())
}

fn warm_up(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.0..=60.0).contains(s)).ok_or("expected a number from 0 to 60".to_owned())
}

impl Common {
    /// Returns the `ring` setting of a null source that rotates this number of buffers. Without a ring, each
    /// burst reuses the buffers of the previous burst.
    pub(crate) fn ring(&self) -> u32 {
        if self.buffers <= 64 { 0 } else { self.buffers }
    }

    /// Returns the options for a number of workers.
    pub(crate) fn with_workers(&self, workers: u16) -> Self {
        Self { workers, ..self.clone() }
    }

    fn workers(&self) -> u16 {
        self.workers.max(1)
    }

    /// Returns the core of each worker, from `--core` on.
    fn cores(&self) -> Vec<Option<usize>> {
        (0..usize::from(self.workers())).map(|index| self.timing.core.map(|first| first + index)).collect()
    }

    /// Returns the processor time of a worker in seconds, the mean of all.
    fn worker_time(&self) -> f64 {
        worker_time() / f64::from(self.workers())
    }
}

/// Median and range of the rounds of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// Number of rounds.
    pub(crate) rounds: usize,
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// Range as a fraction of the median.
    pub(crate) spread: f64,
}

impl Spread {
    /// Computes the spread of the values of rounds.
    pub(crate) fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (values.first(), values.last()) else { return Self::default() };
        let median = median_of_sorted(&values);
        let spread = if median > 0.0 { (max - min) / median } else { 0.0 };
        Self { rounds: values.len(), median, min, max, spread }
    }
}

/// Returns the median of values in order. Of an even number, it is the mean of the middle two.
fn median_of_sorted(values: &[f64]) -> f64 {
    let middle = values.len() / 2;
    match values {
        [] => 0.0,
        _ if values.len() % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// Figures of a command that have text, and conditions that tell whether the run was disturbed.
pub(crate) trait Results: Serialize {
    /// Returns the figures as text, one or several lines.
    fn text(&self) -> String;

    /// Returns the fraction of the time in which the program had a processor, if the command measures it.
    fn cpu_share(&self) -> Option<f64> {
        None
    }

    /// Returns the spread of the rounds, if the command has rounds.
    fn spread(&self) -> Option<f64> {
        None
    }
}

/// Fraction of idle cycles from which on all cycles say less about packets than the busy ones.
const MAX_IDLE_SHARE: f64 = 0.01;

/// Counts of one round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    /// Packets sent.
    pub(crate) packets: u64,
    /// Length in seconds.
    pub(crate) elapsed: f64,
    /// Length in cycles of the time-stamp counter, of all workers together.
    pub(crate) ticks: u64,
    /// Fraction of the time in which the program had a processor.
    pub(crate) cpu_share: f64,
}

impl Round {
    /// Measures `work`, which returns its number of packets. `cpu` returns the processor time of the measured threads
    /// in seconds.
    pub(crate) fn measure<E>(cpu: impl Fn() -> f64, work: impl FnOnce() -> Result<u64, E>) -> Result<Self, E> {
        let (cpu_before, at, ticks_at) = (cpu(), Instant::now(), clock::ticks());
        let packets = work()?;
        let (ticks, elapsed) = (clock::ticks() - ticks_at, at.elapsed().as_secs_f64());
        Ok(Self { packets, elapsed, ticks, cpu_share: ((cpu() - cpu_before) / elapsed).min(1.0) })
    }
}

/// Figures of one measurement: medians of its rounds.
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
    /// Cycles per packet in turns over the receive queues that found packets.
    pub(crate) busy_cycles_per_packet: f64,
    /// Fraction of the cycles in turns that found none. `cycles_per_packet` includes them.
    pub(crate) idle_share: f64,
    /// Cycles per packet in the time in which the program had its core. Use this value on a machine that is
    /// not quiet. It still includes cache misses that other programs cause.
    pub(crate) own_cycles_per_packet: f64,
    /// Fraction of the time in which the program had a processor. Below 1 the core was shared, and the
    /// figures are too high.
    pub(crate) cpu_share: f64,
    /// Cycles per packet by round.
    pub(crate) cycles: Spread,
}

impl Figures {
    /// Computes the figures of rounds.
    pub(crate) fn new(rounds: &[Round], dropped: u64) -> Result<Self, Failure> {
        if rounds.is_empty() || rounds.iter().any(|round| round.packets == 0) {
            return Err(Failure::failed("no packet was moved in a round"));
        }
        let median = |of: &dyn Fn(&Round) -> f64| Spread::new(rounds.iter().map(of));
        let cycles = median(&|round| round.ticks as f64 / round.packets as f64);
        let elapsed: f64 = rounds.iter().map(|round| round.elapsed).sum();
        Ok(Self {
            pps: median(&|round| round.packets as f64 / round.elapsed).median,
            ns_per_packet: median(&|round| round.elapsed * 1e9 / round.packets as f64).median,
            cycles_per_packet: cycles.median,
            own_cycles_per_packet: median(&|round| round.ticks as f64 * round.cpu_share / round.packets as f64).median,
            packets: rounds.iter().map(|round| round.packets).sum(),
            dropped,
            busy_cycles_per_packet: cycles.median,
            idle_share: 0.0,
            cpu_share: rounds.iter().map(|round| round.cpu_share * round.elapsed).sum::<f64>() / elapsed,
            cycles,
        })
    }
}

impl Results for Figures {
    fn text(&self) -> String {
        let Spread { rounds, min, max, .. } = self.cycles;
        let range = if rounds > 1 { format!(" ({min:.1} to {max:.1} in {rounds} rounds)") } else { String::new() };
        let mut text = format!(
            "{:.1} cycles/packet{range}, {:.2} ns/packet, {} packets/s, {} dropped\n",
            self.cycles_per_packet,
            self.ns_per_packet,
            Rate(self.pps),
            self.dropped
        );
        if self.idle_share > MAX_IDLE_SHARE {
            text += &format!(
                "{:.0} % of the cycles found no packet; the others are {:.1} cycles/packet\n",
                100.0 * self.idle_share,
                self.busy_cycles_per_packet
            );
        }
        text
    }

    fn cpu_share(&self) -> Option<f64> {
        Some(self.cpu_share)
    }

    fn spread(&self) -> Option<f64> {
        Some(self.cycles.spread)
    }
}

/// Prints figures and the conditions under which they were measured.
pub(crate) fn report(figures: &impl Results, observer: &Observer, json: bool) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Report<'f, F> {
        #[serde(flatten)]
        figures: &'f F,
        #[serde(flatten)]
        conditions: Conditions,
    }
    let conditions = observer.conditions(figures.cpu_share(), figures.spread());
    if json {
        return cli::print_json(&Report { figures, conditions });
    }
    let text = figures.text();
    cli::print(format_args!("{}\n{}", text.trim_end(), conditions.text()))
}

/// Reads ports from the text of a configuration.
pub(crate) fn ports(text: &str) -> Result<Vec<PortSettings>, Failure> {
    let source = Source::new("wirepath-bench", text);
    let document = source.parse().map_err(Failure::usage)?;
    let settings = document.settings();
    settings.tables("port").and_then(|tables| tables.into_iter().map(drivers::plan).collect()).map_err(Failure::usage)
}

/// Creates the stages of a worker.
pub(crate) type MakeStage<S> = Box<dyn FnMut(&WorkerInfo) -> S>;

/// Starts a pipeline.
fn start<S: Stage + 'static>(
    ports: Vec<PortSettings>,
    common: &Common,
    idle: Idle,
    prepare: impl FnOnce(&Runtime) -> Result<MakeStage<S>, Failure>,
) -> Result<Running<S>, Failure> {
    let config = RuntimeConfig {
        workers: common.cores(),
        idle,
        buffers: 4096 + 2 * common.ring() * ports.iter().map(|port| u32::from(port.queues)).sum::<u32>(),
        ..RuntimeConfig::default()
    };
    let runtime = Runtime::open(ports, config)?;
    let make = prepare(&runtime)?;
    runtime.start(make).map_err(Failure::failed)
}

/// Stops a pipeline. Fails if a worker or a port has failed.
pub(crate) fn stop<S: Stage + 'static>(running: Running<S>) -> Result<Summary, Failure> {
    let failed = running.failed();
    let summary = running.stop(&mut ());
    if failed || !summary.failures.is_empty() {
        return Err(Failure::failed(summary.failures.join("; ")));
    }
    Ok(summary)
}

/// Work to measure: the stages, and the frames that a generator or a capture for generators has.
pub(crate) struct Work<S> {
    pub(crate) stages: MakeStage<S>,
    pub(crate) offered: Offered,
}

/// Runs a pipeline and measures it. `None`: the frames were only written.
pub(crate) fn run<S: Stage + 'static>(
    ports: Vec<PortSettings>,
    common: &Common,
    limit: &PacketLimit,
    real: &RealPorts,
    prepare: impl FnOnce(&Runtime) -> Result<Work<S>, Failure>,
) -> Result<Option<Figures>, Failure> {
    let probe = common.probe.clone();
    // Between its last packet and its end a worker that never sleeps would poll, under valgrind for a long time. Such
    // turns are no cost of packets.
    let idle = if limit.packets.is_some() { Idle::Adaptive } else { Idle::Busy };
    let mut offered = Offered::default();
    let running = start(ports, common, idle, |runtime| {
        let Work { mut stages, offered: frames } = prepare(runtime)?;
        offered = frames;
        Ok(Box::new(move |worker| Timed { stage: stages(worker), probe: probe.clone() }))
    })?;
    if real.only_captures() {
        stop(running)?;
        return real.write(&offered).map(|()| None);
    }
    let generator = real.start(offered)?;
    if let Some(packets) = limit.packets {
        return run_packets(running, packets, common.workers()).map(Some);
    }
    // The control thread sleeps during the measurement. On a machine with few cores it would use the worker's
    // core.
    common.timing.sleep_warm_up();
    let (busy, idle) = running.snapshot().cycles;
    let rounds: Result<Vec<Round>, Failure> = (0..common.timing.rounds)
        .map(|_| {
            if let Some(probe) = &common.probe {
                probe.begin_round();
            }
            let mut round = Round::measure(
                || common.worker_time(),
                || {
                    let before = sent(&running);
                    std::thread::sleep(common.timing.round());
                    // On a busy machine, a worker may have no processor in a short round.
                    wait_until_sent(&running, before + 1, Some(Instant::now() + FIRST_PACKET_LIMIT));
                    Ok::<u64, Failure>(sent(&running) - before)
                },
            )?;
            round.ticks *= u64::from(common.workers());
            Ok(round)
        })
        .collect();
    if let Some(probe) = &common.probe {
        probe.end();
    }
    let now = running.snapshot().cycles;
    let (busy, idle) = (now.0 - busy, now.1 - idle);
    if let Some(generator) = generator {
        generator.stop()?;
    }
    let summary = stop(running)?;
    let figures = Figures::new(&rounds?, summary.drops().values().sum())?;
    Ok(Some(Figures {
        busy_cycles_per_packet: busy as f64 / figures.packets as f64,
        idle_share: idle as f64 / (busy + idle).max(1) as f64,
        ..figures
    }))
}

/// Returns the figures of a command that must measure.
pub(crate) fn measured(figures: Option<Figures>) -> Result<Figures, Failure> {
    figures.ok_or_else(|| Failure::usage("--capture: here, only a measurement is possible"))
}

/// Longest time that a round goes on because no packet was moved in it.
const FIRST_PACKET_LIMIT: Duration = Duration::from_secs(5);

/// Waits until a pipeline has sent so many packets, has failed, or until a time.
fn wait_until_sent<S: Stage + 'static>(running: &Running<S>, packets: u64, end: Option<Instant>) {
    while sent(running) < packets && !running.failed() && end.is_none_or(|end| Instant::now() < end) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a pipeline has sent `packets` packets, stops it, and returns the figures of all packets that it
/// has sent since its start.
fn run_packets<S: Stage + 'static>(running: Running<S>, packets: u64, workers: u16) -> Result<Figures, Failure> {
    let (cpu_before, at, ticks_at) = (cpu_time(), Instant::now(), clock::ticks());
    wait_until_sent(&running, packets, None);
    let summary = stop(running)?;
    let (ticks, elapsed) = (clock::ticks() - ticks_at, at.elapsed().as_secs_f64());
    let cpu_share = ((cpu_time() - cpu_before) / elapsed / f64::from(workers)).min(1.0);
    let all = Round { packets: summary.tx().packets, elapsed, ticks: ticks * u64::from(workers), cpu_share };
    Figures::new(&[all], summary.drops().values().sum())
}

/// One phase of a measurement with several phases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    /// Packets sent.
    pub(crate) packets: u64,
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
    let running = start(ports, common, Idle::Busy, prepare)?;
    common.timing.sleep_warm_up();
    let phases = work(&mut |part| {
        let (packets, cpu, at, ticks) = (sent(&running), worker_time(), Instant::now(), clock::ticks());
        let extra = part();
        let (packets, ticks) = (sent(&running) - packets, clock::ticks() - ticks);
        let share = ((worker_time() - cpu) / at.elapsed().as_secs_f64()).min(1.0);
        Phase { packets, cycles: ticks as f64 * share / packets.max(1) as f64, extra }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn round(packets: u64, ticks: u64, cpu_share: f64) -> Round {
        Round { packets, elapsed: ticks as f64 / 2e9, ticks, cpu_share }
    }

    #[test]
    fn figures_are_medians_of_the_rounds() {
        let rounds = [round(10, 100, 1.0), round(10, 300, 0.5), round(20, 240, 1.0)];
        let figures = Figures::new(&rounds, 7).unwrap();
        assert_eq!((figures.cycles_per_packet, figures.own_cycles_per_packet), (12.0, 12.0));
        assert_eq!((figures.packets, figures.dropped), (40, 7));
        assert!((figures.pps - 20.0 / 120e-9).abs() < 1.0, "{}", figures.pps);
        assert!((figures.ns_per_packet - 6.0).abs() < 1e-9);
        let share = (100.0 + 150.0 + 240.0) / 640.0;
        assert!((figures.cpu_share - share).abs() < 1e-9);
        assert_eq!(figures.cycles, Spread { rounds: 3, median: 12.0, min: 10.0, max: 30.0, spread: 20.0 / 12.0 });
        assert!(figures.text().starts_with("12.0 cycles/packet (10.0 to 30.0 in 3 rounds), 6.00 ns/packet, "));
    }

    #[test]
    fn a_round_without_packets_is_a_failure() {
        assert!(Figures::new(&[round(10, 100, 1.0), round(0, 100, 1.0)], 0).is_err());
        assert!(Figures::new(&[], 0).is_err());
    }

    #[test]
    fn the_median_of_an_even_number_is_between_two() {
        assert_eq!(Spread::new([4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Spread::new([]), Spread::default());
        assert_eq!(Spread::new([0.0, 0.0]).spread, 0.0);
    }

    #[test]
    fn a_round_has_the_time_of_its_work() {
        let work = || {
            std::thread::sleep(Duration::from_millis(20));
            Ok::<u64, ()>(20)
        };
        let round = Round::measure(|| 0.0, work).unwrap();
        assert_eq!((round.packets, round.cpu_share), (20, 0.0));
        assert!(round.elapsed >= 0.02 && round.ticks > 0);
        let busy = std::cell::Cell::new(0.0);
        let round = Round::measure(|| busy.replace(1e6), || Ok::<u64, ()>(1)).unwrap();
        assert_eq!(round.cpu_share, 1.0);
        assert_eq!(Round::measure(|| 0.0, || Err::<u64, u8>(3)).unwrap_err(), 3);
    }
}
