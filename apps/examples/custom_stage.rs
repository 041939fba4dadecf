//! A custom stage, combined with a closure.
//!
//! [`Policer`] is a token bucket per port. It drops packets above a rate. The example shows the parts of a
//! stage: state that belongs to one worker, the coarse clock, drops with a reason of its own, and composition
//! with tuples.
//!
//!     cargo run --release --example custom_stage -- --seconds 3

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use wirepath::cli::{self, Failure};
use wirepath_packet::Batch;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::{Context, Control, Rates, RunOptions, Runtime, RuntimeConfig, Stage};
use wirepath_settings::Source;

/// Two generators that send as fast as they can.
const PORTS: &str = "
[[port]]
name = 'east'
driver = 'null'
[port.null]
source = 'udp4'

[[port]]
name = 'west'
driver = 'null'
[port.null]
source = 'udp4'
";

/// Passes at most `rate` packets per second from each port, with bursts of `burst` packets.
struct Policer {
    rate: u64,
    burst: u64,
    /// Reason of the drops.
    policed: DropReason,
    /// Tokens of each port in billionths of a packet, and the time of their last update in nanoseconds.
    buckets: Vec<(u64, u64)>,
}

impl Policer {
    fn new(ports: usize, rate: u64, burst: u64, policed: DropReason) -> Self {
        Self { rate, burst, policed, buckets: vec![(burst * 1_000_000_000, 0); ports] }
    }
}

impl Stage for Policer {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        // All packets of a received batch come from the same port, so one access to its bucket is enough.
        let Some(port) = context.in_port() else { return };
        let (tokens, counted) = &mut self.buckets[port.index()];
        let now = context.now();
        *tokens =
            (*tokens + now.saturating_sub(*counted).min(1_000_000_000) * self.rate).min(self.burst * 1_000_000_000);
        *counted = now;
        let pass = ((*tokens / 1_000_000_000) as usize).min(batch.len());
        *tokens -= pass as u64 * 1_000_000_000;
        while batch.len() > pass {
            let Some(packet) = batch.pop() else { break };
            context.drop(packet, self.policed);
        }
    }
}

/// Sends packets to the other of two ports.
fn cross(context: &mut Context<'_>, batch: &mut Batch) {
    let port = context.in_port().map_or(PortId::new(0), PortId::paired);
    context.send_batch(port, batch);
}

struct Print;

impl Control for Print {
    fn rates(&mut self, rates: &Rates) {
        cli::show(format_args!("{rates}\n"));
    }
}

#[derive(Parser)]
struct Arguments {
    /// Stop after this many seconds
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Packets per second that may pass from each port
    #[arg(long, default_value_t = 100_000)]
    rate: u64,
}

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        let source = Source::new("built in", PORTS);
        let ports = RuntimeConfig::ports_from_settings(&source.parse()?.settings())?;
        let runtime = Runtime::open(ports, RuntimeConfig::default())?;
        let options = RunOptions {
            duration: Some(Duration::from_secs(arguments.seconds)),
            stop: Some(cli::Stop::on_signals()?.flag()),
            report_every: Some(Duration::from_secs(1)),
        };
        // The burst is the traffic of ten milliseconds. A tuple of stages is a stage.
        let burst = arguments.rate / 100 + 1;
        let policed = DropReason::register("policed", "the port exceeds its rate").map_err(Failure::failed)?;
        let chain = |_: &_| (Policer::new(2, arguments.rate, burst, policed), cross);
        let summary = runtime.run(chain, &mut Print, &options).map_err(Failure::failed)?;
        let limit = 2.0 * (arguments.rate as f64 * summary.elapsed.as_secs_f64() + burst as f64);
        cli::print_summary(&summary, "", false)?;
        let sent = summary.tx().packets;
        if sent as f64 > limit * 1.05 {
            return Err(Failure::failed(format!("{sent} packets passed, {limit:.0} may")));
        }
        Ok(())
    })
}
