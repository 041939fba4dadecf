//! Results of a trial as text, as JSON and as an HdrHistogram log.

use std::fmt::Write as _;
use std::io::Write;
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};
use serde_json::{Value, json};
use wirepath::Failure;
use wirepath::cli::Rate as Scaled;
use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;

use super::clock::Clock;
use super::density::Density;
use super::flows::{FlowSet, Pick, Traffic};
use super::headers::Stack;
use super::nic_clock::StampCounts;
use super::ports::{PortName, Role};
use super::rate::Rate;
use super::size::{GAP, Sizes};
use super::trial::{Generator, Limit, PortResult, StampResult, Trial, TrialResult};

/// Percentiles of delays and intervals, and their names in JSON.
pub const PERCENTILES: [(&str, f64); 5] =
    [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9), ("p99.99", 99.99)];

/// Rate of the check of the own loop, at most.
const CHECK_RATE: f64 = 10_000.0;
/// Length of the check.
const CHECK_TIME: Duration = Duration::from_millis(200);

/// The error of the generator itself, measured over a cable in memory.
#[derive(Clone, Debug)]
pub struct SelfCheck {
    /// Nanoseconds that a read of the clock takes.
    pub clock_read: f64,
    /// Result of a trial over the cable. Its delays are those of the generator alone.
    pub trial: TrialResult,
}

impl SelfCheck {
    /// Measures for 0.2 s with as many threads as the run.
    ///
    /// # Errors
    /// If the threads or memory cannot be had.
    pub fn measure(threads: u16, cores: Vec<usize>) -> Result<Self, Failure> {
        let name = format!("memory:pktgen self-check {}", fastrand::u64(..));
        let name: PortName = name.parse().map_err(Failure::failed)?;
        let ends = [Role { sends: true, receives: false }, Role { sends: false, receives: true }];
        let mut settings = Vec::new();
        for (role, end) in ends.into_iter().zip(["near", "far"]) {
            for (mut port, role) in PortName::settings(&[(name.clone(), role)], Vec::new())? {
                end.clone_into(&mut port.name);
                settings.push((port, role));
            }
        }
        let mut generator = Generator::open(settings, threads, cores)?;
        let flows = FlowSet {
            stacks: vec![Stack::parse("ipv4 / udp").map_err(Failure::failed)?],
            flows: None,
            sizes: Sizes::Round(vec![64]),
            pick: Pick::Turn,
            seed: 0,
        };
        let trial = Trial {
            traffic: Traffic::Flows(flows),
            rate: Some(Rate::Packets(CHECK_RATE)),
            limit: Limit::Time(CHECK_TIME),
            drain: Duration::from_millis(20),
            reorder_threshold: None,
        };
        let trial = generator.run(&trial, &std::sync::atomic::AtomicBool::new(false), |_| {})?;
        generator.close()?;
        Ok(Self { clock_read: Clock::start().read_cost(), trial })
    }

    /// Returns the figures as text.
    pub fn text(&self) -> String {
        let delay = |percent| time(self.trial.latency.value_at_percentile(percent) as f64);
        format!(
            "own error: delay of the generator itself p50 {}, p99 {}, max {}; clock read {}; longest stall {}\n",
            delay(50.0),
            delay(99.0),
            time(self.trial.latency.max() as f64),
            time(self.clock_read),
            time(self.trial.longest_stall.as_nanos() as f64),
        )
    }

    /// Returns the figures as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "latency_ns": histogram_json(&self.trial.latency),
            "departures_ns": histogram_json(&self.trial.departures),
            "clock_read_ns": self.clock_read,
            "longest_stall_ns": self.trial.longest_stall.as_nanos() as u64,
        })
    }
}

/// Returns a time with its unit.
pub fn time(nanoseconds: f64) -> String {
    match nanoseconds {
        t if t < 1e3 => format!("{t:.0} ns"),
        t if t < 1e6 => format!("{:.2} us", t / 1e3),
        t if t < 1e9 => format!("{:.2} ms", t / 1e6),
        t => format!("{:.2} s", t / 1e9),
    }
}

/// Returns the number of a run as results have it.
pub(super) fn run_name(run: u16) -> String {
    format!("{run:#06x}")
}

/// Returns the percentiles of a histogram as JSON.
pub fn histogram_json(histogram: &Histogram<u64>) -> Value {
    if histogram.is_empty() {
        return json!({ "n": 0 });
    }
    let mut object = json!({
        "n": histogram.len(),
        "min": histogram.min(),
        "mean": histogram.mean(),
        "max": histogram.max(),
    });
    for (name, percent) in PERCENTILES {
        object[name] = histogram.value_at_percentile(percent).into();
    }
    object
}

fn histogram_text(name: &str, histogram: &Histogram<u64>) -> String {
    if histogram.is_empty() {
        return format!("{name:12} none\n");
    }
    let mut text = format!("{name:12} min {}", time(histogram.min() as f64));
    for (name, percent) in PERCENTILES {
        let _ = write!(text, ", {name} {}", time(histogram.value_at_percentile(percent) as f64));
    }
    text + &format!(", max {}\n", time(histogram.max() as f64))
}

/// Returns the clock by which the delays of a receiving port end as JSON.
fn clock_json(port: &PortResult) -> Value {
    match &port.stamps {
        None => json!({ "source": "tsc" }),
        Some(StampResult { uncertainty, counts }) => json!({
            "source": "nic",
            "uncertainty_ns": uncertainty,
            "used": counts.used,
            "missing": counts.missing,
            "invalid": counts.invalid,
            "waits_ns": histogram_json(&counts.waits),
        }),
    }
}

/// Returns the clock by which the delays of a receiving port end as text.
fn clock_text(port: &PortResult) -> String {
    let clock = match &port.stamps {
        None => "time-stamp counter".to_owned(),
        Some(StampResult { uncertainty, counts: StampCounts { used, missing, invalid, waits } }) => {
            let mut text = format!("NIC, ±{}", time(*uncertainty as f64));
            if *used > 0 {
                let wait = |percent| time(waits.value_at_percentile(percent) as f64);
                let _ = write!(text, "; polled p50 {}, p99 {} later", wait(50.0), wait(99.0));
            }
            for (n, what) in [(missing, "no time stamp"), (invalid, "a wrong time stamp")] {
                if *n > 0 {
                    let _ = write!(text, "; {n} packets had {what}");
                }
            }
            text
        }
    };
    format!("{:12} of port {}: {clock}\n", "clock", port.name)
}

pub(super) fn drops_json(drops: &[(DropReason, u64)]) -> Value {
    drops.iter().map(|(reason, n)| (reason.name().to_owned(), json!(n))).collect::<serde_json::Map<_, _>>().into()
}

/// Returns the numbers of packets that were dropped where a port receives, each with the place and the reason in words.
pub(super) fn receive_drops(rx: &QueueStats, device: &[(DropReason, u64)]) -> Vec<(u64, String)> {
    let queues = rx.drops.iter().map(|drops| ("while receiving", drops));
    let device = device.iter().map(|drops| ("before the receive queues", drops));
    queues.chain(device).map(|(place, (reason, n))| (*n, format!("{place}: {}", reason.name()))).collect()
}

impl TrialResult {
    /// Bits per second of the sent packets on layers 2 and 1.
    pub fn sent_bits(&self) -> (f64, f64) {
        self.bits(self.sent_bytes, self.sent + self.dropped_at_port)
    }

    /// Bits per second of the received packets on layers 2 and 1.
    pub fn received_bits(&self) -> (f64, f64) {
        self.bits(self.received_bytes, self.received())
    }

    fn bits(&self, bytes: u64, packets: u64) -> (f64, f64) {
        let seconds = self.duration.as_secs_f64().max(1e-9);
        (bytes as f64 * 8.0 / seconds, (bytes + packets * GAP as u64) as f64 * 8.0 / seconds)
    }

    /// Returns the name of the clock by which delays end; `None` if no port receives.
    fn latency_clock(&self) -> Option<&'static str> {
        let receiving = || self.ports.iter().filter(|port| port.role.receives);
        match (receiving().any(|port| port.stamps.is_some()), receiving().any(|port| port.stamps.is_none())) {
            (true, true) => Some("mixed"),
            (true, false) => Some("nic"),
            (false, true) => Some("tsc"),
            (false, false) => None,
        }
    }

    /// Returns the result as JSON. Times are in nanoseconds, if their names do not say otherwise.
    pub fn to_json(&self) -> Value {
        let ((tx_l2, tx_l1), (rx_l2, rx_l1)) = (self.sent_bits(), self.received_bits());
        let delivered = |port: &PortResult| -> serde_json::Map<String, Value> {
            let counts = self.ports.iter().zip(&port.delivered).filter(|(_, n)| **n > 0);
            counts.map(|(to, n)| (to.name.clone(), json!(n))).collect()
        };
        let ports: Vec<Value> = self
            .ports
            .iter()
            .map(|port| {
                json!({
                    "name": port.name,
                    "sends": port.role.sends,
                    "receives": port.role.receives,
                    "tx_packets": port.tx.packets,
                    "rx_packets": port.rx.packets,
                    "rx_injected_copies": port.rx.injected_copies,
                    "tx_drops": drops_json(&port.tx.drops),
                    "rx_drops": drops_json(&port.rx.drops),
                    "device_drops": drops_json(&port.device_drops),
                    "delivered": (port.role.sends && self.is_measured).then(|| delivered(port)),
                    "foreign": if self.is_measured { port.foreign } else { 0 },
                    "looped": port.looped,
                    "clock": (port.role.receives && self.is_measured).then(|| clock_json(port)),
                })
            })
            .collect();
        let mut object = json!({
            "run": self.run.map(run_name),
            "seconds": self.duration.as_secs_f64(),
            "asked_pps": self.asked_pps,
            "sent": self.sent,
            "sent_pps": self.sent_pps(),
            "sent_bps_l2": tx_l2,
            "sent_bps_l1": tx_l1,
            "dropped_at_port": self.dropped_at_port,
            "received": self.received(),
            "received_pps": self.received_pps(),
            "received_bps_l2": rx_l2,
            "received_bps_l1": rx_l1,
            "lost": self.lost(),
            "loss_ratio": self.loss_ratio(),
            "departures_ns": histogram_json(&self.departures),
            "full": self.full,
            "no_buffers": self.no_buffers,
            "skipped_seconds": self.skipped.as_secs_f64(),
            "longest_stall_ns": self.longest_stall.as_nanos() as u64,
            "stalls": self.stalls,
            "involuntary_switches": self.usage.map(|usage| usage.involuntary_switches),
            "page_faults": self.usage.map(|usage| usage.minor_faults + usage.major_faults),
            "streams": self.streams,
            "stopped": self.is_stopped,
            "failure": self.failure,
            "ports": ports,
        });
        if self.is_measured {
            let order = &self.order;
            let measured = json!({
                "duplicates": order.duplicates,
                "reordered": order.reordered,
                "max_reorder_distance": order.max_distance,
                "beyond_window": order.beyond_window,
                "window": self.window,
                "corrupt": self.corrupt,
                "foreign": self.foreign(),
                "looped": self.looped(),
                "unknown_stream": order.unknown_stream,
                "latency_ns": histogram_json(&self.latency),
                "latency_clock": self.latency_clock(),
                "jitter_ns": self.jitter.map(|(mean, max)| json!({ "mean": mean, "max": max })),
            });
            if let Some(density) = &self.density {
                object["reorder_density"] = density.to_json();
            }
            if let (Value::Object(object), Value::Object(measured)) = (&mut object, measured) {
                object.extend(measured);
            }
        }
        object
    }

    /// Returns the result as text.
    pub fn text(&self) -> String {
        let rate = |packets: u64, pps: f64, (l2, l1): (f64, f64)| {
            format!("{packets} packets, {}pps, {}bit/s layer 2, {}bit/s layer 1", Scaled(pps), Scaled(l2), Scaled(l1))
        };
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:12} {value}");
        };
        let asked = self.asked_pps.map_or_else(String::new, |asked| {
            format!(" ({:.2} % of the asked {}pps)", self.sent_pps() / asked * 100.0, Scaled(asked))
        });
        if let Some(run) = self.run {
            line("run", run_name(run));
        }
        line("sent", rate(self.sent, self.sent_pps(), self.sent_bits()) + &asked);
        if self.ports.iter().any(|port| port.role.receives) {
            line("received", rate(self.received(), self.received_pps(), self.received_bits()));
        }
        if let Some(lost) = self.lost() {
            line("lost", format!("{lost} ({:.4} %)", self.loss_ratio().unwrap_or(0.0) * 100.0));
            line("duplicates", self.order.duplicates.to_string());
            let distance = self.order.max_distance;
            line("reordered", format!("{} (RFC 4737), by at most {distance} sequence numbers", self.order.reordered));
            line("corrupt", self.corrupt.to_string());
        }
        for (name, n, about) in [
            ("foreign", self.foreign(), "packets without the signature of this run"),
            ("looped", self.looped(), "packets that came back to a port that only sends"),
            ("late", self.order.beyond_window, "reordered packets so late that duplicates are not recognised"),
            ("unknown", self.order.unknown_stream, "packets of streams that were not sent"),
            ("not sent", self.dropped_at_port, "packets that a sending port dropped"),
            ("full", self.full, "attempts to send that found the port full"),
            ("no buffers", self.no_buffers, "attempts to send without a free buffer"),
        ] {
            if n > 0 {
                line(name, format!("{n} {about}"));
            }
        }
        for port in &self.ports {
            for (reason, n) in &port.tx.drops {
                line("dropped", format!("{n} by port {} while sending: {}", port.name, reason.name()));
            }
            for (n, how) in receive_drops(&port.rx, &port.device_drops) {
                line("dropped", format!("{n} by port {} {how}", port.name));
            }
        }
        if !self.skipped.is_zero() {
            line("skipped", format!("{} of the schedule: the senders were late", time(self.skipped.as_nanos() as f64)));
        }
        if self.stalls > 0 {
            let longest = time(self.longest_stall.as_nanos() as f64);
            line("stalls", format!("{} times above 100 us between two turns, the longest {longest}", self.stalls));
        }
        if self.is_measured {
            text += &histogram_text("latency", &self.latency);
            if let Some((mean, max)) = self.jitter {
                let _ = writeln!(text, "{:12} mean {}, max {} (RFC 3550)", "jitter", time(mean), time(max));
            }
            text.extend(self.ports.iter().filter(|port| port.role.receives).map(clock_text));
            text.extend(self.density.iter().map(Density::text));
        }
        text += &histogram_text("departures", &self.departures);
        if self.is_stopped {
            text += "stopped before the end\n";
        }
        text
    }

    /// Writes the histograms of delays and departure intervals in the HdrHistogram log format, version 2. The tags are
    /// `latency` and `departures`, the unit is nanoseconds.
    ///
    /// # Errors
    /// If the log cannot be written.
    pub fn write_hlog(&self, mut out: impl Write, start: SystemTime) -> std::io::Result<()> {
        let other = |error: &dyn std::fmt::Debug| std::io::Error::other(format!("HdrHistogram log: {error:?}"));
        let mut serializer = V2DeflateSerializer::new();
        let mut log = IntervalLogWriterBuilder::new()
            .add_comment("wirepath pktgen; values are nanoseconds")
            .with_start_time(start)
            .with_base_time(start)
            .with_max_value_divisor(1.0)
            .begin_log_with(&mut out, &mut serializer)?;
        for (tag, histogram) in [("latency", &self.latency), ("departures", &self.departures)] {
            log.write_histogram(histogram, Duration::ZERO, self.duration, Tag::new(tag)).map_err(|e| other(&e))?;
        }
        out.flush()
    }
}
