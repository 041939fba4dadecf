//! Joins ports two by two, and limits the packets that each of them may receive.
//!
//! The example shows a stage with state of its own, a table of the configuration that a reload changes, a drop reason
//! and a counter:
//!
//!     cargo run --release --example policer -- --seconds 3              # on generated traffic
//!     cargo run --release --example policer -- --config my-ports.toml   # on the ports of a file with [policer]
//!
//! While it runs, SIGHUP reads the file again. `wirepath show drops` and `wirepath show counters` show what it does.

use std::sync::Arc;

use wirepath::prelude::*;

const DEMONSTRATION: &str = "
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

[policer]
rate = 100_000      # packets per second
burst = 1000        # packets
";

/// Units of a token. Whole numbers stay exact at any rate.
const TOKEN: u64 = 1_000_000_000;

/// The table `[policer]`. The limits hold for each port on each worker that polls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Packets per second.
    pub(crate) rate: u64,
    /// Packets that may follow each other without a pause.
    pub(crate) burst: u64,
}

impl AppSettings for Limits {
    fn read(top: &Settings<'_>, ports: &[String]) -> Result<Self, ConfigError> {
        if !ports.len().is_multiple_of(2) {
            top.record(top.error_in("port", format!("found {}, expected an even number", ports.len())));
        }
        top.required_table("policer")?.complete(|table| {
            // Both keys are read before the first error returns, so that both mistakes are reported.
            let rate = table.required_integer("rate", 1..=1_000_000_000);
            let burst = table.required_integer("burst", 1..=1_000_000);
            Ok(Self { rate: rate?, burst: burst? })
        })
    }
}

/// Tokens of a port. It starts full.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Billionths of a packet.
    tokens: u64,
    /// Time of the last update, nanoseconds.
    updated: u64,
}

/// A token bucket per port. Each worker has a policer of its own, so its buckets need no lock.
#[derive(Clone)]
pub(crate) struct Policer {
    /// Limits that the control thread can replace.
    limits: Arc<Shared<Limits>>,
    policed: DropReason,
    policed_bytes: CounterId,
    buckets: Vec<Bucket>,
}

impl Policer {
    /// Creates the stage, its drop reason and its counter.
    pub(crate) fn new(ports: usize, limits: Arc<Shared<Limits>>) -> Result<Self, Failure> {
        let policed = DropReason::register("policed", "the port exceeds its rate")?;
        let about = "Bytes of the packets above the rate";
        let policed_bytes = CounterId::register("policed_bytes", Unit::Bytes, about)?;
        // More tokens than any burst: the first update reduces them to the burst.
        let buckets = vec![Bucket { tokens: 1_000_000 * TOKEN, updated: 0 }; ports];
        Ok(Self { limits, policed, policed_bytes, buckets })
    }
}

impl Stage for Policer {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        // All packets of a received batch come from the same port, so one access to its bucket is enough.
        let Some(port) = context.in_port() else { return };
        let limits = self.limits.read(context.guard());
        let bucket = &mut self.buckets[port.index()];
        // A second fills any bucket whose burst is not above its rate. The limit avoids an overflow.
        let elapsed = context.now().saturating_sub(bucket.updated).min(1_000_000_000);
        bucket.updated = context.now();
        bucket.tokens = (bucket.tokens + elapsed * limits.rate).min(limits.burst * TOKEN);
        let pass = ((bucket.tokens / TOKEN) as usize).min(batch.len());
        bucket.tokens -= pass as u64 * TOKEN;
        // The last packets of the batch are above the rate; the others keep their order.
        while batch.len() > pass {
            let Some(packet) = batch.pop() else { break };
            context.count(self.policed_bytes, packet.len() as u64);
            context.drop(packet, self.policed);
        }
    }
}

/// A stage can be a function: sends packets to the other port of a pair.
pub(crate) fn cross(context: &mut Context<'_>, batch: &mut Batch) {
    if let Some(port) = context.in_port() {
        context.send_batch(port.paired(), batch);
    }
}

/// The control thread's part: the limits that a reload replaces.
struct PolicerControl(Arc<Shared<Limits>>);

impl Control for PolicerControl {}

fn main() -> ExitCode {
    wirepath::main(|| {
        let about = "Joins ports two by two, and limits the packets that each of them may receive.";
        let app = App::<Limits>::from_args("policer", about, DEMONSTRATION)?;
        app.run_changeable(
            |runtime, limits| {
                let limits = runtime.share(*limits);
                let policer = Policer::new(runtime.ports().len(), Arc::clone(&limits))?;
                // A tuple of stages is a stage.
                Ok((move |_: &_| (policer.clone(), cross), PolicerControl(limits)))
            },
            &["policer"],
            |control, limits, _| control.0.replace(limits),
        )
    })
}
