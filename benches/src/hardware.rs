//! Many rules in a ConnectX: inserting them, explaining them, changing them while a worker forwards, and
//! removing them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use wirepath::cli::Failure;
use wirepath_flow::{Ports, Rule};
use wirepath_packet::Batch;
use wirepath_packet::PortId;
use wirepath_pipeline::rules::offload::{Placement, predict_placements};
use wirepath_pipeline::rules::{RuleControl, RuleId, RuleLimits};
use wirepath_pipeline::{Context, ControlPlane, Runtime, RuntimeConfig};
use wirepath_wire::Parser;

use crate::measure::{self, Results, count};
use crate::nic;
use crate::rules::{Flow, any, overlapping};

/// Time before the changes, in which the traffic settles.
const WARM_UP: Duration = Duration::from_millis(300);

/// Maximum number of printed reasons why rules run in the workers.
const MOST_REASONS: usize = 5;

/// Number of packets in the loop and number of flows, one packet each.
const FLOWS: usize = 32;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Rules: three kinds that overlap with each other, and one below them for all packets
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = count(2..=1_000_000))]
    rules: u32,

    /// A real ConnectX in loopback; without it, one is emulated
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Core of the worker
    #[arg(long, value_name = "N")]
    core: Option<usize>,

    /// Time in which rules change, after a warm-up of 0.3 seconds
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = measure::positive)]
    seconds: f64,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Figures {
    rules: u32,
    /// Rules that run in the NIC, wholly or in part.
    in_hardware: usize,
    /// Reasons for the other rules, most frequent first.
    in_software: Vec<(String, usize)>,
    /// Seconds to decide where each rule runs, without a device.
    place_seconds: f64,
    place_us_per_rule: f64,
    /// Seconds to insert the rules: tables of the workers, placement and device.
    insert_seconds: f64,
    insert_us_per_rule: f64,
    /// Memory that became resident during the insertion, including that of an emulated device.
    bytes_per_rule: f64,
    /// Seconds to report where all rules run.
    explain_seconds: f64,
    /// Seconds to remove all rules at once.
    remove_seconds: f64,
    /// Changes per second made by the control thread while the worker forwards. Each change adds or removes
    /// one rule of a flow of the traffic.
    changes_per_second: f64,
    /// Packets received during the changes, and packets sent but not received.
    packets: u64,
    lost: u64,
}

impl Results for Figures {
    fn text(&self) -> String {
        let mut text = format!(
            "{} rules, {} in the NIC: placed in {:.2} s ({:.1} us each), inserted in {:.2} s ({:.1} us each), {:.0} \
             bytes each, explained in {:.2} s, removed in {:.2} s\n{:.0} changes/s beside {} packets, {} lost\n",
            self.rules,
            self.in_hardware,
            self.place_seconds,
            self.place_us_per_rule,
            self.insert_seconds,
            self.insert_us_per_rule,
            self.bytes_per_rule,
            self.explain_seconds,
            self.remove_seconds,
            self.changes_per_second,
            self.packets,
            self.lost
        );
        for (why, count) in &self.in_software {
            text += &format!("{count} in the workers: {why}\n");
        }
        text
    }
}

struct Ticks<'r>(&'r mut RuleControl);

impl wirepath_pipeline::Control for Ticks<'_> {
    fn tick(&mut self, plane: &mut ControlPlane) {
        self.0.tick(plane);
    }
}

/// Packets that the worker has sent and received.
#[derive(Default)]
struct Traffic {
    sent: AtomicU64,
    seen: AtomicU64,
    /// If true, received packets are not sent again.
    end: AtomicBool,
}

impl Traffic {
    fn turn(&self, context: &mut Context<'_>, batch: &mut Batch) {
        self.seen.fetch_add(batch.len() as u64, Ordering::Release);
        if !self.end.load(Ordering::Acquire) {
            self.sent.fetch_add(batch.len() as u64, Ordering::Release);
            context.send_batch(PortId::new(0), batch);
        }
        batch.filter_map(|_| None);
    }

    fn missing(&self) -> u64 {
        let seen = self.seen.load(Ordering::Acquire);
        self.sent.load(Ordering::Acquire).saturating_sub(seen)
    }
}

/// Resident memory of this program in bytes (proc(5), statm: pages).
fn resident() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<f64>().ok()).unwrap_or(0.0) * 4096.0
}

fn timed<R>(work: impl FnOnce() -> R) -> (R, f64) {
    let start = Instant::now();
    let done = work();
    (done, start.elapsed().as_secs_f64())
}

/// Runs the benchmark. `None`: a copy of the program ran on an emulated NIC and has printed its figures.
pub(crate) fn run(arguments: &Arguments) -> Result<Option<Figures>, Failure> {
    match &arguments.device {
        Some(device) => on(arguments, device).map(Some),
        None => nic::rerun_emulated("[[device]]\nkind = 'mlx5'\nname = 'nic0'\n[[device.port]]\nlink = 'loop'\n")
            .map(|()| None),
    }
}

fn on(arguments: &Arguments, device: &str) -> Result<Figures, Failure> {
    let text = format!("[[port]]\nname = 'nic'\ndriver = 'mlx5'\ndevice = '{device}'\n");
    let config = RuntimeConfig { workers: vec![arguments.core], ..RuntimeConfig::default() };
    let runtime = Runtime::open(measure::ports(&text)?, config)?;
    let (pool, traffic) = (runtime.pools()[0].clone(), Arc::new(Traffic::default()));
    let mut control = RuleControl::new(&runtime, Parser::default(), RuleLimits::default());
    let started = runtime.start(|worker| {
        let traffic = Arc::clone(&traffic);
        control.stage(worker, move |context: &mut Context<'_>, batch: &mut Batch| traffic.turn(context, batch))
    });
    let mut running = started.map_err(Failure::failed)?;
    let capabilities = running.plane().rule_hardware(PortId::new(0)).map(|hardware| hardware.capabilities());
    let capabilities = capabilities.ok_or_else(|| Failure::failed("this NIC takes no rules"))?;
    control.enable_hardware(running.plane(), [PortId::new(0)]);

    let mut random = fastrand::Rng::with_seed(1);
    let flows: Vec<Flow> = (0..FLOWS).map(|_| Flow::random(&mut random)).collect();
    let mut rules: Vec<Rule> = (1..arguments.rules).map(overlapping).collect();
    rules.push(any(200));
    let each = f64::from(arguments.rules);
    let mut figures = Figures { rules: arguments.rules, ..Figures::default() };
    figures.place_seconds = timed(|| {
        predict_placements(&capabilities, PortId::new(0), Parser::default().tunnels, (&rules, 0), Ports::default())
    })
    .1;
    figures.place_us_per_rule = figures.place_seconds * 1e6 / each;

    let before = resident();
    let (ids, seconds) = timed(|| control.change(running.plane(), &[], rules));
    let ids = ids.map_err(Failure::failed)?;
    (figures.insert_seconds, figures.insert_us_per_rule) = (seconds, seconds * 1e6 / each);
    figures.bytes_per_rule = (resident() - before) / each;
    let (left, seconds) = timed(|| {
        let mut left: HashMap<String, usize> = HashMap::new();
        for (_, placement) in ids.iter().flat_map(|id| control.placement(*id)) {
            if let Placement::Software(obstacle) = placement {
                *left.entry(obstacle.why).or_default() += 1;
            }
        }
        left
    });
    figures.explain_seconds = seconds;
    figures.in_hardware = ids.len() - left.values().sum::<usize>();
    figures.in_software = left.into_iter().collect();
    figures.in_software.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    figures.in_software.truncate(MOST_REASONS);

    for flow in &flows {
        let mut packet = pool.take().ok_or_else(|| Failure::failed("no packet buffers"))?;
        packet.append(64).ok_or_else(|| Failure::failed("no room"))?.copy_from_slice(&flow.frame());
        traffic.sent.fetch_add(1, Ordering::Release);
        running.plane().send(PortId::new(0), packet);
    }
    std::thread::sleep(WARM_UP);
    let (seen, start, mut made) = (traffic.seen.load(Ordering::Acquire), Instant::now(), 0u32);
    let mut added: Vec<RuleId> = Vec::new();
    while start.elapsed().as_secs_f64() < arguments.seconds && !running.failed() {
        // Adds one rule of a flow, then removes it.
        let new = match added.is_empty() {
            true => vec![flows[made as usize / 2 % FLOWS].exact_rule(made)],
            false => Vec::new(),
        };
        added = control.change(running.plane(), &added, new).map_err(Failure::failed)?;
        made += 1;
        running.tick(&mut Ticks(&mut control));
    }
    figures.changes_per_second = f64::from(made) / start.elapsed().as_secs_f64();
    figures.packets = traffic.seen.load(Ordering::Acquire) - seen;
    traffic.end.store(true, Ordering::Release);
    let start = Instant::now();
    while traffic.missing() > 0 && start.elapsed() < Duration::from_secs(2) {
        running.tick(&mut Ticks(&mut control));
        std::thread::yield_now();
    }
    figures.lost = traffic.missing();
    let (removed, seconds) = timed(|| control.change(running.plane(), &ids, Vec::new()));
    removed.map_err(Failure::failed)?;
    figures.remove_seconds = seconds;
    let failures = running.stop(&mut Ticks(&mut control)).failures;
    if failures.is_empty() { Ok(figures) } else { Err(Failure::failed(failures.join("; "))) }
}
