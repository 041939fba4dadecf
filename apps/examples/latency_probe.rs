//! Measures the time from each TCP SYN to its SYN/ACK, on connections that pass through two ports unchanged:
//!
//!     cargo run --release --example latency_probe -- --seconds 3              # on generated handshakes
//!     cargo run --release --example latency_probe -- --config my-ports.toml   # on two ports, one worker
//!     wirepath show handshakes                    # p50, p99, p99.9 and the maximum; `wirepath metrics` has them too
//!
//! RSS without a symmetric hash gives a SYN and its SYN/ACK to different workers, so the probe has one worker. It reads
//! the time-stamp counter for each batch, because `Context::now` changes every few turns only.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::{hash::BuildHasher, hash::RandomState, mem::replace};

use hdrhistogram::Histogram;
use wirepath::pipeline::clock::Clock;
use wirepath::prelude::*;
use wirepath::wire::tcp::flags::{ACK, SYN};

const DEMONSTRATION: &str = "port = [
    { name = 'clients', driver = 'null', null = { source = 'tcp4_syn', flows = 1000 } },
    { name = 'servers', driver = 'null', null = { source = 'tcp4_syn_ack', flows = 1000 } },
]";

/// SYNs that can wait for their answers.
const SLOTS: usize = 1 << 16;
/// Longest time that is measured, in nanoseconds. Longer ones count as this.
const LONGEST: u64 = 60_000_000_000;
const PERCENTILES: [(&str, f64); 4] = [("p50", 50.0), ("p99", 99.0), ("p99.9", 99.9), ("max", 100.0)];

/// The stage of the only worker.
#[derive(Clone)]
pub(crate) struct Probe {
    /// Flow and time of the SYNs without an answer. A new SYN replaces another one in its slot.
    waiting: Box<[Option<(FiveTuple, u64)>]>,
    /// Random, so that no sender can choose flows of one slot.
    hash: RandomState,
    /// Nanoseconds, exact to a thousandth. Its size is fixed, so a batch allocates nothing.
    times: Histogram<u64>,
    /// `None`: the clock of the context, for tests.
    clock: Option<Clock>,
    handshakes: CounterId,
    filled: Sender<Histogram<u64>>,
}

impl Probe {
    pub(crate) fn new(clock: Option<Clock>) -> Result<(Self, ProbeControl), Failure> {
        let handshakes = CounterId::register("handshakes", Unit::None, "SYN/ACKs that answer a SYN")?;
        let times = Histogram::new_with_bounds(1, LONGEST, 3).map_err(Failure::failed)?;
        let ((filled, from_stage), waiting) = (channel(), vec![None; SLOTS].into());
        let control = ProbeControl { all: times.clone(), empty: Some(times.clone()), from_stage };
        Ok((Self { waiting, hash: RandomState::new(), times, clock, handshakes, filled }, control))
    }

    /// Returns the time since the SYN, if this packet is its SYN/ACK.
    fn observe(&mut self, frame: &[u8], headers: &Parsed, now: u64) -> Option<u64> {
        let flags = headers.outer().tcp(frame)?.flags() & (SYN | ACK);
        let flow = FiveTuple::of(frame, headers.outer()).filter(|_| flags & SYN != 0)?;
        let slot = |flow| self.hash.hash_one(flow) as usize % SLOTS;
        if flags == SYN {
            // The time of a SYN that is sent again begins anew.
            self.waiting[slot(flow)] = Some((flow, now));
            return None;
        }
        let syn = FiveTuple::new(flow.dst(), flow.src(), flow.protocol(), flow.dst_port(), flow.src_port())?;
        self.waiting[slot(syn)].take_if(|(waiting, _)| *waiting == syn).map(|(_, sent)| now.saturating_sub(sent))
    }
}

impl Stage for Probe {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let now = self.clock.as_mut().map_or(context.now(), Clock::now);
        context.parse_each(batch, |context, mut packet, headers| {
            if let Some(time) = self.observe(packet.data(), headers, now) {
                self.times.saturating_record(time);
                context.count(self.handshakes, 1);
            }
            packet.set_out_port(packet.in_port().map(PortId::paired));
            Some(packet)
        });
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.filled.send(self.times.clone());
    }
}

static HANDSHAKES: TableSpec = TableSpec {
    name: "handshakes",
    about: "Times from TCP SYN to SYN/ACK",
    metric: Some("handshake"),
    columns: &[
        Column::key("percentile", "Share of the handshakes"),
        Column::gauge("time", Unit::Seconds, "Time that this share does not exceed"),
    ],
};

/// The control thread's part: all times, and the empty histogram that the stage gets for its filled one.
pub(crate) struct ProbeControl {
    pub(crate) all: Histogram<u64>,
    empty: Option<Histogram<u64>>,
    from_stage: Receiver<Histogram<u64>>,
}

impl ProbeControl {
    fn times(&self) -> impl Iterator<Item = (&'static str, f64)> {
        PERCENTILES.iter().map(|(name, percent)| (*name, self.all.value_at_percentile(*percent) as f64 / 1e9))
    }
}

impl Control for ProbeControl {
    fn tick(&mut self, plane: &mut ControlPlane) {
        while let Ok(mut filled) = self.from_stage.try_recv() {
            self.all += &filled;
            filled.reset();
            self.empty = Some(filled);
        }
        if let Some(empty) = self.empty.take() {
            // The worker exchanges the histograms between two batches. A worker that has ended has sent its own.
            let _ = plane.run_on_stage(0, |it: &mut Probe, _| it.filled.send(replace(&mut it.times, empty)));
        }
    }

    fn stop(&mut self, plane: &mut ControlPlane) {
        self.tick(plane);
    }

    fn tables(&mut self) -> Vec<&'static TableSpec> {
        vec![&HANDSHAKES]
    }

    fn list(&mut self, _: &'static TableSpec, page: &mut Page<'_>, _: &mut ControlPlane) {
        page.extend(self.times(), |(name, seconds)| vec![name.into(), seconds.into()]);
    }

    fn summary(&mut self) -> Option<Value> {
        Some(self.times().map(|(name, seconds)| (format!("handshake_{name}_seconds"), json!(seconds))).collect())
    }
}

fn main() -> ExitCode {
    wirepath::main(|| {
        let app: App = App::from_args("latency_probe", "Measures times from TCP SYN to SYN/ACK.", DEMONSTRATION)?;
        if (app.config.ports.len(), app.config.runtime.workers.len()) != (2, 1) {
            return Err(Failure::usage("the probe needs two ports and one worker"));
        }
        app.run(|_, ()| Probe::new(Some(Clock::new())).map(|(probe, control)| (move |_: &_| probe.clone(), control)))
    })
}
