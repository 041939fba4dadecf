use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};
use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;
use wirepath_pmd::port::Port;

use super::WorkerInfo;
use crate::context::WorkerCounters;
use crate::counter::CounterId;
use crate::registry::Unit;

/// Counters of all queues at one point in time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Name, receive queues and transmit queues of each port.
    pub ports: Vec<(String, Vec<QueueStats>, Vec<QueueStats>)>,
    /// Packets of each port that its device dropped before a receive queue saw them; empty if it was not read.
    pub device_drops: Vec<u64>,
    /// Packets dropped by workers and the control thread.
    pub worker_drops: u64,
    /// Cycles of the time-stamp counter of all workers in iterations that found packets, and in those that found none.
    pub cycles: (u64, u64),
}

/// Rates of a port over an interval.
#[derive(Clone, Debug)]
pub struct PortRates {
    /// Name of the port.
    pub name: String,
    /// Packets received per second.
    pub rx_pps: f64,
    /// Bits received per second, from the first byte of the Ethernet header to the last byte of the payload.
    pub rx_bps: f64,
    /// Packets sent per second.
    pub tx_pps: f64,
    /// Bits sent per second.
    pub tx_bps: f64,
    /// Packets dropped per second by the port's device and queues.
    pub drop_pps: f64,
}

/// Rates over an interval.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Time since the start.
    pub elapsed: Duration,
    /// Rates of each port.
    pub ports: Vec<PortRates>,
    /// Packets dropped per second by workers.
    pub worker_drop_pps: f64,
}

/// Returns the sum of the counters of several queues.
pub(crate) fn total(queues: &[QueueStats]) -> QueueStats {
    let mut sum = QueueStats::default();
    queues.iter().for_each(|queue| sum.add(queue));
    sum
}

impl Rates {
    /// Computes the rates between two snapshots taken `time` apart. The later one was taken `elapsed` after
    /// the start.
    pub fn between(before: &Snapshot, after: &Snapshot, time: Duration, elapsed: Duration) -> Self {
        let seconds = time.as_secs_f64().max(1e-9);
        let rate = |before: u64, after: u64| after.saturating_sub(before) as f64 / seconds;
        let ports = after.ports.iter().enumerate().map(|(at, (name, rx, tx))| {
            let device = |snapshot: &Snapshot, at| snapshot.device_drops.get(at).copied().unwrap_or(0);
            // The ports may have changed meanwhile.
            let old = before.ports.iter().enumerate().find(|(_, (it, ..))| it == name);
            let old_drops = old.map_or(0, |(at, _)| device(before, at));
            let none = || (QueueStats::default(), QueueStats::default());
            let (old_rx, old_tx) = old.map_or_else(none, |(_, (_, rx, tx))| (total(rx), total(tx)));
            let (rx, tx) = (total(rx), total(tx));
            PortRates {
                name: name.clone(),
                rx_pps: rate(old_rx.packets, rx.packets),
                rx_bps: rate(old_rx.bytes, rx.bytes) * 8.0,
                tx_pps: rate(old_tx.packets, tx.packets),
                tx_bps: rate(old_tx.bytes, tx.bytes) * 8.0,
                drop_pps: rate(
                    old_drops + old_rx.dropped() + old_tx.dropped(),
                    device(after, at) + rx.dropped() + tx.dropped(),
                ),
            }
        });
        Self { elapsed, ports: ports.collect(), worker_drop_pps: rate(before.worker_drops, after.worker_drops) }
    }
}

/// Formats a number with its decimal prefix, such as `12.3 M`.
fn scaled(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.2} G", v / 1e9),
        v if v >= 1e6 => format!("{:.2} M", v / 1e6),
        v if v >= 1e3 => format!("{:.2} k", v / 1e3),
        v => format!("{v:.0} "),
    }
}

impl fmt::Display for Rates {
    /// Writes one line per port.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.ports.iter().map(|port| port.name.len()).max().unwrap_or(0);
        for (i, port) in self.ports.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            let at = if i == 0 { format!("{:5.0} s", self.elapsed.as_secs_f64()) } else { " ".repeat(7) };
            write!(
                f,
                "{at}  {:width$}  rx {:>9}pps {:>9}bit/s   tx {:>9}pps {:>9}bit/s",
                port.name,
                scaled(port.rx_pps),
                scaled(port.rx_bps),
                scaled(port.tx_pps),
                scaled(port.tx_bps),
            )?;
            if port.drop_pps > 0.0 {
                write!(f, "   dropped {}pps", scaled(port.drop_pps))?;
            }
        }
        if self.worker_drop_pps > 0.0 {
            write!(f, "   workers dropped {}pps", scaled(self.worker_drop_pps))?;
        }
        Ok(())
    }
}

/// Final figures of a port.
#[derive(Clone, Debug)]
pub struct PortSummary {
    /// Name.
    pub name: String,
    /// Driver.
    pub driver: &'static str,
    /// Device that the driver opened.
    pub device: String,
    /// Actual operating mode.
    pub mode: String,
    /// Receive queues.
    pub rx: Vec<QueueStats>,
    /// Transmit queues.
    pub tx: Vec<QueueStats>,
    /// Device counters beyond those of the queues.
    pub extra: Vec<(&'static str, u64)>,
    /// Packets that the device or the kernel dropped before a receive queue saw them, by reason. Rules in a NIC
    /// are among the reasons.
    pub device_drops: Vec<(DropReason, u64)>,
    /// Reasons of such drops whose number is unknown, because the device does not count them.
    pub uncounted_drops: Vec<DropReason>,
    /// Number of times that the port lost its device.
    pub losses: u64,
    /// The device was lost at the end of the run.
    pub away: bool,
}

impl PortSummary {
    /// Name of the sum of all removed ports.
    pub const REMOVED: &str = "removed ports";

    /// Returns the sum of no removed port.
    pub(super) fn of_removed() -> Self {
        Self {
            name: Self::REMOVED.to_owned(),
            driver: "",
            device: String::new(),
            mode: String::new(),
            rx: vec![QueueStats::default()],
            tx: vec![QueueStats::default()],
            extra: Vec::new(),
            device_drops: Vec::new(),
            uncounted_drops: Vec::new(),
            losses: 0,
            away: false,
        }
    }

    /// Adds the figures of a removed port.
    pub(super) fn add(&mut self, other: Self) {
        for (sum, queues) in [(&mut self.rx, other.rx), (&mut self.tx, other.tx)] {
            let Some(sum) = sum.first_mut() else { continue };
            queues.iter().for_each(|queue| sum.add(queue));
            sum.waiting = None;
        }
        for (reason, n) in other.device_drops {
            match self.device_drops.iter_mut().find(|(it, _)| *it == reason) {
                Some((_, sum)) => *sum += n,
                None => self.device_drops.push((reason, n)),
            }
        }
        for reason in other.uncounted_drops {
            if !self.uncounted_drops.contains(&reason) {
                self.uncounted_drops.push(reason);
            }
        }
        self.losses += other.losses;
    }

    /// Returns the figures that need no call of the device. Such a call takes long while the kernel is busy.
    pub(super) fn without_device(port: &Port, losses: u64, rule_drops: u64) -> Self {
        Self {
            name: port.name().to_owned(),
            rx: port.rx_statistics(),
            tx: port.tx_statistics(),
            device_drops: Vec::from_iter((rule_drops > 0).then_some((DropReason::RuleDrop, rule_drops))),
            losses,
            ..Self::of_removed()
        }
    }

    pub(super) fn new(port: &mut Port, losses: u64, rule_drops: u64) -> Self {
        let mut device_drops = port.device_drops();
        if rule_drops > 0 {
            device_drops.push((DropReason::RuleDrop, rule_drops));
        }
        let capabilities = port.capabilities();
        Self {
            name: port.name().to_owned(),
            driver: capabilities.driver,
            device: capabilities.device,
            mode: capabilities.mode,
            rx: port.rx_statistics(),
            tx: port.tx_statistics(),
            extra: port.extra_statistics(),
            device_drops,
            uncounted_drops: port.uncounted_drops(),
            losses,
            away: port.is_away(),
        }
    }
}

/// Final figures of a worker.
#[derive(Clone, Debug)]
pub struct WorkerSummary {
    /// Index.
    pub index: usize,
    /// Core to which the worker was pinned.
    pub core: Option<usize>,
    /// Drops of the worker's stages.
    pub drops: Vec<(DropReason, u64)>,
    /// Iterations over the queues, and how many of them found no packets.
    pub turns: (u64, u64),
    /// Number of times that the worker slept.
    pub sleeps: u64,
    /// Packets handed over to other workers.
    pub handed_over: u64,
    /// Packets passed to the control thread.
    pub punted: u64,
    /// Packets that a rule passed to the kernel.
    pub to_kernel: u64,
    /// Packets in `to_kernel` that also left through a transmit queue.
    pub looped_back: u64,
    /// Copies that stages made of packets.
    pub copies: u64,
    /// Packets that stages made themselves.
    pub generated: u64,
    /// Fragments that stages joined to packets, which count as generated.
    pub joined: u64,
    /// Counters of the application.
    pub counters: Vec<(CounterId, u64)>,
}

impl WorkerSummary {
    pub(super) fn new(info: &WorkerInfo, counters: &WorkerCounters) -> Self {
        Self {
            index: info.index,
            core: info.core,
            drops: counters.drops.nonzero().collect(),
            turns: (counters.turns.get(), counters.idle_turns.get()),
            sleeps: counters.sleeps.get(),
            handed_over: counters.handed_over.get(),
            punted: counters.punted.get(),
            to_kernel: counters.to_kernel.get(),
            looped_back: counters.looped_back.get(),
            copies: counters.copies.get(),
            generated: counters.generated.get(),
            joined: counters.joined.get(),
            counters: counters.application.all().collect(),
        }
    }
}

/// Origins and destinations of packets. Each packet that a receive queue delivered, that a stage copied, or
/// that the program made itself, has one destination:
///
/// ```text
/// received + copies + generated = sent + dropped + to_kernel + consumed + joined + in flight
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketBalance {
    /// Packets that receive queues delivered.
    pub received: u64,
    /// Copies made by replication and mirroring, without the originals.
    pub copies: u64,
    /// Packets that the program made itself.
    pub generated: u64,
    /// Packets that transmit queues accepted.
    pub sent: u64,
    /// Drops of workers, the control thread and transmit queues.
    pub dropped: u64,
    /// Packets passed to the kernel, except those that left through a transmit queue.
    pub to_kernel: u64,
    /// Packets that the control thread processed without a further packet.
    pub consumed: u64,
    /// Received packets that became part of a superframe, or fragments of another packet.
    pub joined: u64,
}

impl PacketBalance {
    /// Number of packets that have no destination yet. A negative value means that a packet was counted twice.
    pub fn in_flight(&self) -> i64 {
        let origins = self.received + self.copies + self.generated;
        let destinations = self.sent + self.dropped + self.to_kernel + self.consumed + self.joined;
        origins.cast_signed() - destinations.cast_signed()
    }
}

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Time from the start of the workers to the stop request.
    pub elapsed: Duration,
    /// Figures of each port.
    pub ports: Vec<PortSummary>,
    /// Figures of each worker.
    pub workers: Vec<WorkerSummary>,
    /// Drops of the control thread.
    pub control_drops: Vec<(DropReason, u64)>,
    /// Counters of the application on the control thread.
    pub control_counters: Vec<(CounterId, u64)>,
    /// Packets that the control thread injected into the kernel's receive path.
    pub injected: u64,
    /// Packets that the control thread made itself.
    pub generated: u64,
    /// Packets that the control thread consumed, by kind.
    pub consumed: BTreeMap<&'static str, u64>,
    /// Buffers that were not returned to their pools. A value other than 0 is a bug.
    pub leaked_buffers: u32,
    /// Panics of workers and failures of ports, with the reason. If there are any, the program exits with
    /// code 1.
    pub failures: Vec<String>,
    /// Figures of the application.
    pub app: Option<Value>,
}

impl Summary {
    /// Returns the totals of all receive queues.
    pub fn rx(&self) -> QueueStats {
        total(&self.ports.iter().flat_map(|port| port.rx.iter().cloned()).collect::<Vec<_>>())
    }

    /// Returns the totals of all transmit queues.
    pub fn tx(&self) -> QueueStats {
        total(&self.ports.iter().flat_map(|port| port.tx.iter().cloned()).collect::<Vec<_>>())
    }

    /// Returns all drops by reason: those of devices, queues, workers and the control thread.
    pub fn drops(&self) -> BTreeMap<DropReason, u64> {
        let queues = self.ports.iter().flat_map(|port| port.rx.iter().chain(&port.tx)).flat_map(|queue| &queue.drops);
        let workers = self.workers.iter().flat_map(|worker| &worker.drops);
        let mut sum = BTreeMap::new();
        let devices = self.ports.iter().flat_map(|port| &port.device_drops);
        for &(reason, n) in devices.chain(queues).chain(workers).chain(&self.control_drops) {
            *sum.entry(reason).or_default() += n;
        }
        sum
    }

    /// Returns the counters of the application: the sums over the workers and the control thread.
    pub fn counters(&self) -> BTreeMap<CounterId, u64> {
        let workers = self.workers.iter().flat_map(|worker| &worker.counters);
        let mut sum = BTreeMap::new();
        for &(counter, n) in workers.chain(&self.control_counters) {
            *sum.entry(counter).or_default() += n;
        }
        sum
    }

    /// Number of received packets that rules passed to the kernel's network stack. Packets that a device
    /// passes to the kernel itself are in the device's counters.
    pub fn to_kernel(&self) -> u64 {
        self.injected + self.workers.iter().map(|worker| worker.to_kernel).sum::<u64>()
    }

    /// Returns the balance of all packets. At the end of a run no packet is in flight.
    pub fn balance(&self) -> PacketBalance {
        let (rx, tx) = (self.rx(), self.tx());
        let of_workers = |value: fn(&WorkerSummary) -> u64| self.workers.iter().map(value).sum::<u64>();
        // Packets that a receive queue dropped were never delivered to the program.
        let drops = self.workers.iter().flat_map(|worker| &worker.drops).chain(&self.control_drops);
        PacketBalance {
            received: rx.packets,
            copies: of_workers(|worker| worker.copies) + rx.injected_copies + tx.injected_copies,
            generated: self.generated + of_workers(|worker| worker.generated),
            sent: tx.packets,
            dropped: tx.dropped() + drops.map(|(_, n)| n).sum::<u64>(),
            to_kernel: self.to_kernel() - of_workers(|worker| worker.looped_back),
            consumed: self.consumed.values().sum(),
            joined: rx.joined + of_workers(|worker| worker.joined),
        }
    }

    /// Packets sent per second over all ports.
    pub fn pps(&self) -> f64 {
        self.tx().packets as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Returns a JSON object with `rx_packets`, `tx_packets`, `drops` by reason and `pps`, and the same for
    /// each port and queue.
    pub fn to_json(&self) -> Value {
        let (rx, tx, balance) = (self.rx(), self.tx(), self.balance());
        let mut object = json!({
            "seconds": self.elapsed.as_secs_f64(),
            "rx_packets": rx.packets,
            "rx_bytes": rx.bytes,
            "tx_packets": tx.packets,
            "tx_bytes": tx.bytes,
            "pps": self.pps(),
            "drops": drops_json(self.drops()),
            "ports": self.ports.iter().map(port_json).collect::<Vec<_>>(),
            "workers": self.workers.iter().map(worker_json).collect::<Vec<_>>(),
            "to_kernel": self.to_kernel(),
            "copies": balance.copies,
            "generated": balance.generated,
            "consumed": self.consumed,
            "joined": self.balance().joined,
            "counters": counters_json(self.counters()),
            "in_flight": balance.in_flight(),
            "leaked_buffers": self.leaked_buffers,
            "failures": self.failures,
        });
        if let (Some(app), Value::Object(map)) = (&self.app, &mut object) {
            map.insert("app".to_owned(), app.clone());
        }
        object
    }
}

fn drops_json(drops: impl IntoIterator<Item = (DropReason, u64)>) -> Value {
    Value::Object(drops.into_iter().map(|(reason, n)| (reason.name().to_owned(), n.into())).collect())
}

fn counters_json(counters: impl IntoIterator<Item = (CounterId, u64)>) -> Value {
    Value::Object(counters.into_iter().map(|(counter, n)| (counter.name().to_owned(), n.into())).collect())
}

fn queue_json(queue: &QueueStats) -> Value {
    json!({
        "packets": queue.packets,
        "bytes": queue.bytes,
        "bursts": queue.bursts,
        "empty": queue.empty,
        "completed_checksums": queue.completed_checksums,
        "segmented": queue.segmented,
        "joined": queue.joined,
        "copied": queue.copied,
        "drops": drops_json(queue.drops.iter().copied()),
    })
}

fn port_json(port: &PortSummary) -> Value {
    let (rx, tx) = (total(&port.rx), total(&port.tx));
    let mut device_drops = drops_json(port.device_drops.iter().copied());
    for reason in &port.uncounted_drops {
        device_drops[reason.name()] = Value::Null;
    }
    json!({
        "name": port.name,
        "driver": port.driver,
        "device": port.device,
        "mode": port.mode,
        "rx_packets": rx.packets,
        "rx_bytes": rx.bytes,
        "tx_packets": tx.packets,
        "tx_bytes": tx.bytes,
        "rx_queues": port.rx.iter().map(queue_json).collect::<Vec<_>>(),
        "tx_queues": port.tx.iter().map(queue_json).collect::<Vec<_>>(),
        "device_drops": device_drops,
        "losses": port.losses,
        "away": port.away,
        "device_counters": Value::Object(port.extra.iter().map(|&(name, n)| (name.to_owned(), n.into())).collect()),
    })
}

fn worker_json(worker: &WorkerSummary) -> Value {
    json!({
        "index": worker.index,
        "core": worker.core,
        "turns": worker.turns.0,
        "idle_turns": worker.turns.1,
        "sleeps": worker.sleeps,
        "handed_over": worker.handed_over,
        "punted": worker.punted,
        "to_kernel": worker.to_kernel,
        "drops": drops_json(worker.drops.iter().copied()),
        "counters": counters_json(worker.counters.iter().copied()),
    })
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.elapsed.as_secs_f64();
        let (rx, tx) = (self.rx(), self.tx());
        writeln!(
            f,
            "{seconds:.1} s: received {} packets, sent {} ({}pps)",
            rx.packets,
            tx.packets,
            scaled(self.pps()).trim_start()
        )?;
        for port in &self.ports {
            let (rx, tx) = (total(&port.rx), total(&port.tx));
            writeln!(
                f,
                "  {} ({}): rx {} packets, {} bytes; tx {} packets, {} bytes",
                port.name, port.driver, rx.packets, rx.bytes, tx.packets, tx.bytes
            )?;
        }
        for (reason, n) in self.drops() {
            writeln!(f, "  dropped {n}: {} ({})", reason.text(), reason.name())?;
        }
        if self.to_kernel() > 0 {
            writeln!(f, "  passed to the kernel {}", self.to_kernel())?;
        }
        for (kind, n) in &self.consumed {
            writeln!(f, "  consumed {n}: {kind}")?;
        }
        for (counter, n) in self.counters().into_iter().filter(|(_, n)| *n > 0) {
            let unit = if counter.unit() == Unit::None { "" } else { " " };
            let unit = format!("{unit}{}", counter.unit().name());
            writeln!(f, "  counted {n}{unit}: {} ({})", counter.about(), counter.name())?;
        }
        for failure in &self.failures {
            writeln!(f, "  {failure}")?;
        }
        if self.leaked_buffers > 0 {
            writeln!(f, "  {} packet buffers were not returned", self.leaked_buffers)?;
        }
        Ok(())
    }
}
