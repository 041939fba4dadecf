//! Latency of stages and of ports.
//!
//! Stages: a worker reads the clock before a batch enters the stages, and again when they have handed it over for
//! transmission. Each packet of the batch has waited for that time. Ports: the generator of `wirepath pktgen` sends
//! frames through two ports of a worker that forwards, and back to itself.

use std::any::{Any, TypeId};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::Value;
use wirepath::cli::Failure;
use wirepath_apps::pktgen::clock::Clock;
use wirepath_apps::pktgen::flows::{FlowSet, Pick, Traffic};
use wirepath_apps::pktgen::headers::Stack;
use wirepath_apps::pktgen::ports::{PortName, Role};
use wirepath_apps::pktgen::rate::Rate;
use wirepath_apps::pktgen::report::{PERCENTILES, SelfCheck, histogram_json, time};
use wirepath_apps::pktgen::size::Sizes;
use wirepath_apps::pktgen::tracker::histogram;
use wirepath_apps::pktgen::{Generator, Limit, Trial, TrialResult};
use wirepath_packet::Batch;
use wirepath_pipeline::{Context, Idle, Runtime, RuntimeConfig, Stage, StageTimers};
use wirepath_pmd::drivers::PortSettings;

use crate::measure::{self, Results, Spread, Timing, measured};
use crate::{forward, router, tunnel};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    of: Of,
}

#[derive(Subcommand)]
enum Of {
    /// Delay of stages that forward between ports without a device
    Forward(forward::Arguments),
    /// Delay of stages that encapsulate or decapsulate
    Tunnel(tunnel::Arguments),
    /// Delay of stages that route
    Router(router::Arguments),
    /// Delay of two ports and the worker between them, from the generator and back to it
    Ports(PortArguments),
}

#[derive(clap::Args)]
pub(crate) struct PortArguments {
    /// Driver of the ports, which two cables in memory or two veth pairs in a new network namespace join
    #[arg(long, value_enum, default_value_t = Driver::Memory)]
    driver: Driver,

    /// Ports of the generator, which sends at the first and receives at the second one, instead of --driver; they are
    /// cabled to those of --through
    #[arg(long, value_name = "TX,RX", value_delimiter = ',', requires = "through", conflicts_with = "driver")]
    generator: Vec<PortName>,

    /// Ports between which the worker forwards
    #[arg(long, value_name = "IN,OUT", value_delimiter = ',', requires = "generator")]
    through: Vec<PortName>,

    /// Load, as for `wirepath pktgen`
    #[arg(long, value_name = "RATE", default_value = "100000")]
    rate: Rate,

    /// Length of a frame in bytes, with its frame check sequence
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(64..=1518))]
    size: u16,

    /// Flows, which differ in their UDP source port
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=60_000))]
    flows: u16,

    /// Behaviour of the worker while it finds no packets
    #[arg(long, value_enum, default_value_t = IdleMode::Busy)]
    idle: IdleMode,

    /// Core of the generator; the worker has that of --core
    #[arg(long, value_name = "N")]
    generator_core: Option<usize>,

    #[command(flatten)]
    timing: Timing,

    /// The program runs in the namespace that it has made.
    #[arg(long, hide = true)]
    in_namespace: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Driver {
    /// Cables inside the process
    Memory,
    /// Packet sockets on veth
    AfPacket,
    /// AF_XDP sockets on veth
    AfXdp,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum IdleMode {
    /// Polls without pause
    Busy,
    /// Polls for a while, and then sleeps until a packet arrives
    Adaptive,
    /// Sleeps after the first empty turn
    Sleep,
}

/// Receives the times that batches spend in the stages of a worker.
#[derive(Debug)]
pub(crate) struct Probe {
    clock: Clock,
    is_on: AtomicBool,
    /// Nanoseconds of each packet, by round.
    rounds: Mutex<Vec<Histogram<u64>>>,
}

impl Probe {
    fn new() -> Self {
        Self { clock: Clock::start(), is_on: AtomicBool::new(false), rounds: Mutex::default() }
    }

    /// Begins a round: from here on, times belong to it.
    pub(crate) fn begin_round(&self) {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner).push(histogram());
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Ends the last round. Later times do not count.
    pub(crate) fn end(&self) {
        self.is_on.store(false, Ordering::Relaxed);
    }

    /// Records the time since `from` for each of some packets.
    fn record(&self, from: u64, packets: usize) {
        let passed = self.clock.now().saturating_sub(from);
        if !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        // The control thread has this lock only between two rounds.
        if let Some(round) = self.rounds.lock().unwrap_or_else(PoisonError::into_inner).last_mut() {
            round.saturating_record_n(passed, packets as u64);
        }
    }

    fn take(&self) -> Vec<Histogram<u64>> {
        std::mem::take(&mut *self.rounds.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A chain of stages whose time is measured, if there is a probe.
pub(crate) struct Timed<S> {
    pub(crate) stage: S,
    pub(crate) probe: Option<Arc<Probe>>,
}

impl<S: Stage + 'static> Stage for Timed<S> {
    #[inline(always)]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let packets = batch.len();
        let from = self.probe.as_ref().map(|probe| probe.clock.now());
        self.stage.process(context, batch);
        if let (Some(probe), Some(from)) = (&self.probe, from) {
            probe.record(from, packets);
        }
    }

    #[inline(always)]
    fn idle(&mut self, context: &mut Context<'_>) {
        self.stage.idle(context);
    }

    fn run_timers(&mut self, timers: &mut StageTimers, context: &mut Context<'_>) {
        self.stage.run_timers(timers, context);
    }

    fn find_stage(&mut self, stage: TypeId) -> Option<&mut dyn Any> {
        self.stage.find_stage(stage)
    }

    fn name(&self) -> &'static str {
        self.stage.name()
    }
}

/// Figures in nanoseconds.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// Ports of the generator and of the worker with their drivers; empty for stages alone.
    ports: Vec<String>,
    /// Percentiles of the delays of all packets.
    latency_ns: Value,
    /// Median delay by round.
    p50_ns: Spread,
    /// 99th percentile by round.
    p99_ns: Spread,
    /// Error of the measurement: delays of the generator over a cable in memory, or of two reads of the clock.
    own_error_ns: Value,
    /// Packets whose delay is known, and lost ones.
    packets: u64,
    lost: u64,
    /// Packets per second that the generator offered, or that the stages took.
    pps: f64,
    /// Fraction of the time in which the program had a processor, if it is known.
    cpu_share: Option<f64>,
}

impl Figures {
    /// Computes the figures of the histograms of rounds.
    fn new(rounds: &[Histogram<u64>], own_error: &Histogram<u64>) -> Result<Self, Failure> {
        let mut all = histogram();
        for round in rounds {
            all.add(round).map_err(Failure::failed)?;
        }
        if rounds.iter().any(Histogram::is_empty) || all.is_empty() {
            return Err(Failure::failed("a round has no packet whose delay is known"));
        }
        let by_round = |percent| Spread::new(rounds.iter().map(|it| it.value_at_percentile(percent) as f64));
        Ok(Self {
            ports: Vec::new(),
            latency_ns: histogram_json(&all),
            p50_ns: by_round(50.0),
            p99_ns: by_round(99.0),
            own_error_ns: histogram_json(own_error),
            packets: all.len(),
            lost: 0,
            pps: 0.0,
            cpu_share: None,
        })
    }
}

/// Returns the percentiles of a histogram, which [`histogram_json`] has made, as text.
fn percentiles(histogram: &Value) -> String {
    let value = |name: &str| time(histogram[name].as_f64().unwrap_or(0.0));
    let names = PERCENTILES.iter().map(|(name, _)| *name);
    std::iter::once("min")
        .chain(names)
        .chain(["max"])
        .map(|name| format!("{name} {}", value(name)))
        .collect::<Vec<_>>()
        .join(", ")
}

impl Results for Figures {
    fn text(&self) -> String {
        let mut text: String = self.ports.iter().map(|port| format!("port {port}\n")).collect();
        let Spread { rounds, min, max, .. } = self.p50_ns;
        text += &format!(
            "latency {}\np50 by round: {} to {} in {rounds} rounds; {} packets at {:.0}/s, {} lost\nown error {}\n",
            percentiles(&self.latency_ns),
            time(min),
            time(max),
            self.packets,
            self.pps,
            self.lost,
            percentiles(&self.own_error_ns)
        );
        text
    }

    fn cpu_share(&self) -> Option<f64> {
        self.cpu_share
    }

    fn spread(&self) -> Option<f64> {
        Some(self.p50_ns.spread)
    }
}

/// Runs the benchmark. `None`: a copy of the program ran in a namespace and has printed its figures.
pub(crate) fn run(arguments: Arguments) -> Result<Option<Figures>, Failure> {
    let probe = Arc::new(Probe::new());
    let figures = match arguments.of {
        Of::Forward(mut of) => {
            of.common.probe = Some(Arc::clone(&probe));
            measured(forward::run(&of)?)?
        }
        Of::Tunnel(mut of) => {
            of.common.probe = Some(Arc::clone(&probe));
            measured(tunnel::run(&of)?)?
        }
        Of::Router(mut of) => {
            of.common.probe = Some(Arc::clone(&probe));
            measured(router::run(&of)?)?
        }
        Of::Ports(of) => return ports(&of),
    };
    let rounds = probe.take();
    if rounds.is_empty() {
        return Err(Failure::usage("--packets: latency is measured for a time, in rounds"));
    }
    let latency = Figures::new(&rounds, &clock_error(probe.clock))?;
    Ok(Some(Figures { pps: figures.pps, cpu_share: Some(figures.cpu_share), ..latency }))
}

/// Measures the time between two reads of the clock.
fn clock_error(clock: Clock) -> Histogram<u64> {
    const READS: u32 = 100_000;
    let mut error = histogram();
    for _ in 0..READS {
        let from = clock.now();
        error.saturating_record(clock.now().saturating_sub(from));
    }
    error
}

/// Network interfaces of the veth pairs: generator and worker.
const PAIRS: [(&str, &str); 2] = [("east", "in"), ("west", "out")];

/// Returns the ports of the generator and those of the worker.
fn port_names(arguments: &PortArguments) -> Result<[Vec<PortName>; 2], Failure> {
    let names = |names: [String; 2]| -> Result<Vec<PortName>, Failure> {
        names.into_iter().map(|name| name.parse().map_err(Failure::usage)).collect()
    };
    if !arguments.generator.is_empty() {
        let both = [arguments.generator.clone(), arguments.through.clone()];
        return if both.iter().all(|ports| ports.len() == 2) {
            Ok(both)
        } else {
            Err(Failure::usage("--generator and --through: two ports each, joined by a comma"))
        };
    }
    match arguments.driver {
        Driver::Memory => {
            // The two ports of a cable have its name.
            let run = fastrand::u64(..);
            let cables = PAIRS.map(|(name, _)| format!("memory:{name} {run:x}"));
            Ok([names(cables.clone())?, names(cables)?])
        }
        Driver::AfPacket | Driver::AfXdp => {
            let driver = if arguments.driver == Driver::AfPacket { "af_packet" } else { "af_xdp" };
            let near = PAIRS.map(|(near, _)| format!("{driver}:{near}"));
            Ok([names(near)?, names(PAIRS.map(|(_, far)| format!("{driver}:{far}")))?])
        }
    }
}

/// Runs this program again with the same arguments in a network namespace with two veth pairs.
fn rerun_in_namespace() -> Result<(), Failure> {
    let mut script = "ip link set lo up\necho 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6\n".to_owned();
    for (near, far) in PAIRS {
        script += &format!("ip link add {near} type veth peer name {far}\n");
        for name in [near, far] {
            script += &format!("ip link set {name} up promisc on\n");
        }
    }
    script += "exec \"$@\"\n";
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let status = Command::new("unshare")
        .args(["--net", "sh", "-euc", &script, "sh"])
        .arg(program)
        .args(std::env::args_os().skip(1))
        .arg("--in-namespace")
        .status()
        .map_err(|error| Failure::failed(format!("unshare (util-linux): {error}")))?;
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => Err(Failure::Ended(code as u8)),
        None => Err(Failure::failed("the program in the network namespace was ended by a signal")),
    }
}

/// Measures the latency of ports.
fn ports(arguments: &PortArguments) -> Result<Option<Figures>, Failure> {
    let is_veth = arguments.generator.is_empty() && arguments.driver != Driver::Memory;
    if is_veth && !arguments.in_namespace {
        return rerun_in_namespace().map(|()| None);
    }
    let [near, far] = port_names(arguments)?;
    let forwarding = Role { sends: true, receives: true };
    let far: Vec<(PortName, Role)> = far.into_iter().map(|name| (name, forwarding)).collect();
    let roles = [Role { sends: true, receives: false }, Role { sends: false, receives: true }];
    let near: Vec<(PortName, Role)> = near.into_iter().zip(roles).collect();
    let near = PortName::settings(&near, Vec::new())?;
    let far: Vec<PortSettings> = PortName::settings(&far, Vec::new())?.into_iter().map(|(port, _)| port).collect();

    let timing = &arguments.timing;
    let config = RuntimeConfig {
        workers: vec![timing.core],
        idle: match arguments.idle {
            IdleMode::Busy => Idle::Busy,
            IdleMode::Adaptive => Idle::Adaptive,
            IdleMode::Sleep => Idle::Sleep(Idle::SLEEP_BELOW),
        },
        buffers: 16_384,
        ..RuntimeConfig::default()
    };
    let own_error = SelfCheck::measure(1, arguments.generator_core.into_iter().collect())?.trial.latency;
    // The ports of a cable in memory come up when both ends have started, and the generator waits for them.
    let running = Runtime::open(far, config)?.start(|_| forward::cross(|_| ())).map_err(Failure::failed)?;
    let measured = generate(arguments, near);
    let summary = measure::stop(running)?;
    let (rounds, ports) = measured?;
    let (sent, lost) = rounds.iter().fold((0, 0), |(sent, lost), it| (sent + it.sent, lost + it.lost().unwrap_or(0)));
    let seconds: f64 = rounds.iter().map(|it| it.duration.as_secs_f64()).sum();
    let histograms: Vec<Histogram<u64>> = rounds.into_iter().map(|it| it.latency).collect();
    let mut all = ports;
    all.extend(
        summary.ports.iter().map(|port| format!("{}: {}:{} ({})", port.name, port.driver, port.device, port.mode)),
    );
    let figures = Figures::new(&histograms, &own_error)?;
    Ok(Some(Figures { ports: all, lost, pps: sent as f64 / seconds, ..figures }))
}

/// Offers the load in rounds; returns their results and the names of the generator's ports.
fn generate(
    arguments: &PortArguments,
    ports: Vec<(PortSettings, Role)>,
) -> Result<(Vec<TrialResult>, Vec<String>), Failure> {
    let timing = &arguments.timing;
    let mut generator = Generator::open(ports, 1, arguments.generator_core.into_iter().collect())?;
    let names = generator.describe().into_iter().map(|(name, about)| format!("{name}: {about}")).collect();
    let last = 1023 + u32::from(arguments.flows);
    let trial = |length: Duration| -> Result<Trial, Failure> {
        let stack = Stack::parse(&format!("ipv4 / udp src 1024-{last}")).map_err(Failure::failed)?;
        let flows = FlowSet {
            stacks: vec![stack],
            flows: None,
            sizes: Sizes::Round(vec![arguments.size]),
            pick: Pick::Turn,
            seed: 0,
        };
        Ok(Trial {
            traffic: Traffic::Flows(flows),
            rate: Some(arguments.rate),
            limit: Limit::Time(length),
            drain: Duration::from_millis(200),
            reorder_threshold: None,
        })
    };
    let stop = AtomicBool::new(false);
    let mut run = |length| {
        let result = generator.run(&trial(length)?, &stop, |_| {})?;
        match &result.failure {
            Some(why) => Err(Failure::failed(why)),
            None => Ok(result),
        }
    };
    if timing.warm_up > 0.0 {
        run(Duration::from_secs_f64(timing.warm_up))?;
    }
    let rounds = (0..timing.rounds).map(|_| run(timing.round())).collect::<Result<Vec<_>, _>>()?;
    generator.close()?;
    Ok((rounds, names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_records_the_packets_of_rounds_only() {
        let probe = Probe::new();
        probe.record(probe.clock.now(), 7);
        probe.begin_round();
        let from = probe.clock.now();
        std::thread::sleep(Duration::from_millis(2));
        probe.record(from, 32);
        probe.begin_round();
        probe.record(probe.clock.now(), 1);
        probe.end();
        probe.record(from, 64);
        let rounds = probe.take();
        assert_eq!(rounds.iter().map(Histogram::len).collect::<Vec<_>>(), [32, 1]);
        assert!(rounds[0].min() >= 1_990_000 && rounds[1].max() < rounds[0].min(), "{rounds:?}");
    }

    #[test]
    fn figures_have_the_spread_of_the_rounds() {
        let round = |ns: u64| {
            let mut round = histogram();
            round.record_n(ns, 10).unwrap();
            round
        };
        let figures = Figures::new(&[round(100), round(300), round(200)], &round(20)).unwrap();
        assert_eq!((figures.packets, figures.p50_ns.median, figures.p50_ns.spread), (30, 200.0, 1.0));
        assert_eq!((figures.latency_ns["min"].as_u64(), figures.latency_ns["n"].as_u64()), (Some(100), Some(30)));
        let text = figures.text();
        assert!(text.starts_with("latency min 100 ns, p50 200 ns, "), "{text}");
        assert!(text.contains("p50 by round: 100 ns to 300 ns in 3 rounds; 30 packets"), "{text}");
        assert!(Figures::new(&[round(1), histogram()], &round(1)).is_err());
        assert!(Figures::new(&[], &round(1)).is_err());
    }
}
