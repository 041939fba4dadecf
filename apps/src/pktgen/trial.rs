//! A trial: the threads that send and receive for a time, and what they counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use wirepath::Failure;
use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::port::{LinkState, MacAddr, Offloads, PortEvent, RxQueue, StartedPort, TxQueue};

use super::clock::Clock;
use super::density::Density;
use super::flows::{FlowSource, Part, Source, Traffic, filler_sums};
use super::nic_clock::{Follower, StampCounts, Stamps};
use super::ports::{self, PortCounts, Role, Started};
use super::rate::{Pacer, Rate};
use super::signature::{MAX_STREAMS, Reading, Signature};
use super::size::FCS;
use super::tracker::{Order, Tracker, histogram};
use super::usage::{ThreadUsage, check_cores, pin};

/// Packets that a sender gives to a port at once.
const BURST: usize = 32;
/// Time after the end in which a late sender sends what was due before, and a port must take the last packets.
const FLUSH: u64 = 100_000_000;
/// Interval at which the control thread looks at the run.
const TICK: Duration = Duration::from_millis(10);
/// Time after the last expected packet in which duplicates may arrive.
const QUIET: Duration = Duration::from_millis(50);
/// Gap between two turns of a thread that counts as a stall, in nanoseconds.
const STALL: u64 = 100_000;
/// Bytes of a frame and of the longest captured one, for frames of several segments.
pub(super) const SCRATCH: usize = 1 << 16;

/// End of the sending of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// After this time.
    Time(Duration),
    /// After this number of packets of each port.
    Packets(u64),
    /// When the capture was sent this often.
    Passes(u64),
    /// When it is stopped.
    None,
}

/// Packets that the windows of all flows for the densities of RFC 5236 may have. Each takes about 100 bytes, and each
/// flow as much as six more of them.
const MAX_REORDER_WINDOWS: usize = 1 << 22;

/// Offered packets and their rate.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The packets.
    pub traffic: Traffic,
    /// Load of each sending port; `None`: the timing of the capture.
    pub rate: Option<Rate>,
    /// End of the sending.
    pub limit: Limit,
    /// Time after the sending in which packets may arrive.
    pub drain: Duration,
    /// Threshold of the densities of RFC 5236; `None`: they are not measured.
    pub reorder_threshold: Option<u16>,
}

/// Counts at a moment of a trial.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Packets that ports have accepted, and their bytes with frame check sequences.
    pub sent: (u64, u64),
    /// Packets that have arrived intact for the first time, and their bytes. For a capture: all packets.
    pub received: (u64, u64),
    /// Longest delay since the last progress, in nanoseconds.
    pub max_latency: u64,
}

/// Counts of a port.
#[derive(Clone, Debug)]
pub struct PortResult {
    /// Name.
    pub name: String,
    /// Part in the run.
    pub role: Role,
    /// Counts of the transmit queues during the trial.
    pub tx: QueueStats,
    /// Counts of the receive queues during the trial.
    pub rx: QueueStats,
    /// Packets that the device or the kernel dropped before the receive queues during the trial.
    pub device_drops: Vec<(DropReason, u64)>,
    /// Packets that this port sent and that arrived intact at each port of the run, in the order of the ports. Further
    /// copies do not count, at whichever port they arrive.
    pub delivered: Vec<u64>,
    /// Packets without the signature of the run.
    pub foreign: u64,
    /// Packets of the run that arrived at a port that does not receive: something sends them back.
    pub looped: u64,
    /// Use of the receive timestamps, if delays of the port end by the clock of its NIC.
    pub stamps: Option<StampResult>,
}

/// Use of the receive timestamps of a port.
#[derive(Clone, Debug, PartialEq)]
pub struct StampResult {
    /// Largest error of the relation between the clock of the NIC and that of the run, in nanoseconds.
    pub uncertainty: u64,
    /// Packets by the use of their timestamps.
    pub counts: StampCounts,
}

/// Result of a trial.
#[derive(Clone, Debug)]
pub struct TrialResult {
    /// Number of the run in the signatures of its packets; `None` for a capture.
    pub run: Option<u16>,
    /// Packets per second that were asked of all ports together; `None`: no fixed number.
    pub asked_pps: Option<f64>,
    /// Time from the moment when the first packet was due to the end of the sending.
    pub duration: Duration,
    /// Packets that the ports accepted and did not drop themselves.
    pub sent: u64,
    /// Bytes of these packets, with frame check sequences.
    pub sent_bytes: u64,
    /// Packets that a sending port dropped itself.
    pub dropped_at_port: u64,
    /// True if the packets had signatures, so that loss, order and delay are known.
    pub is_measured: bool,
    /// Loss, order and duplicates.
    pub order: Order,
    /// Densities of RFC 5236, if they were asked for.
    pub density: Option<Density>,
    /// Bytes of the received packets, with frame check sequences: first copies, or all packets of a capture.
    pub received_bytes: u64,
    /// Packets of the run whose payload had changed. They count as lost too.
    pub corrupt: u64,
    /// Delays of the first copies, in nanoseconds. Those of a port with [`PortResult::stamps`] end when its NIC
    /// received the packet, all others when it was polled.
    pub latency: Histogram<u64>,
    /// Mean and largest interarrival jitter of the streams, in nanoseconds (RFC 3550 section 6.4.1).
    pub jitter: Option<(f64, f64)>,
    /// Intervals between the packets that a sender gave to a port, in nanoseconds. Packets of one burst have 0.
    pub departures: Histogram<u64>,
    /// Attempts to send that found the port full.
    pub full: u64,
    /// Attempts to send that found no free packet buffer.
    pub no_buffers: u64,
    /// Time of the schedule that senders had to leave out because they were too late.
    pub skipped: Duration,
    /// Longest time between two turns of a thread: the thread did not run, or a driver took that long.
    pub longest_stall: Duration,
    /// Number of such times above 100 microseconds.
    pub stalls: u64,
    /// Interruptions and page faults of the threads; `None` if the kernel does not report them.
    pub usage: Option<ThreadUsage>,
    /// The ports.
    pub ports: Vec<PortResult>,
    /// Streams that were sent.
    pub streams: usize,
    /// Packets that a stream may be late before a duplicate looks like a first copy.
    pub window: u64,
    /// Reason why the trial ended early.
    pub failure: Option<String>,
    /// True if the trial was stopped before its limit.
    pub is_stopped: bool,
}

impl TrialResult {
    /// Packets that arrived: first copies, or all packets of a capture.
    pub fn received(&self) -> u64 {
        if self.is_measured { self.order.distinct } else { self.ports.iter().map(|port| port.foreign).sum() }
    }

    /// Packets that were sent and did not arrive intact; `None` without signatures.
    pub fn lost(&self) -> Option<u64> {
        self.is_measured.then(|| self.sent.saturating_sub(self.order.distinct))
    }

    /// Share of the sent packets that were lost (RFC 1242 section 3.6); `None` without signatures or packets.
    pub fn loss_ratio(&self) -> Option<f64> {
        self.lost().filter(|_| self.sent > 0).map(|lost| lost as f64 / self.sent as f64)
    }

    /// Sent packets per second.
    pub fn sent_pps(&self) -> f64 {
        self.sent as f64 / self.duration.as_secs_f64().max(1e-9)
    }

    /// Received packets per second of the time in which they were sent.
    pub fn received_pps(&self) -> f64 {
        self.received() as f64 / self.duration.as_secs_f64().max(1e-9)
    }

    /// Packets without the signature of the run, at all ports.
    pub fn foreign(&self) -> u64 {
        if self.is_measured { self.ports.iter().map(|port| port.foreign).sum() } else { 0 }
    }

    /// Packets of the run that came back to a port that only sends.
    pub fn looped(&self) -> u64 {
        self.ports.iter().map(|port| port.looped).sum()
    }
}

/// Started ports, on which trials run.
pub struct Generator {
    ports: Vec<Started>,
    pool: Pool,
    senders: u16,
    cores: Vec<usize>,
    is_shared: bool,
}

impl std::fmt::Debug for Generator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generator").field("senders", &self.senders).finish_non_exhaustive()
    }
}

/// State that the threads of a trial share.
struct Shared {
    /// Senders that have not ended.
    sending: AtomicUsize,
    /// Ends the sending.
    stop: AtomicBool,
    /// Ends all threads.
    finish: AtomicBool,
    sent: [AtomicU64; 2],
    received: [AtomicU64; 2],
    max_latency: AtomicU64,
}

/// A sender on one port.
struct Lane<'a> {
    queue: &'a mut TxQueue,
    source: Source,
    pacer: Pacer,
    /// The intervals of a capture are used.
    is_timed: bool,
    batch: Batch,
    left: u64,
    is_done: bool,
    last: Option<u64>,
}

/// Counts of a sender.
#[derive(Default)]
struct SenderCounts {
    departures: Option<Histogram<u64>>,
    full: u64,
    no_buffers: u64,
    skipped: f64,
    end: u64,
}

/// Counts of the receiver.
struct ReceiverCounts {
    tracker: Tracker,
    bytes: u64,
    corrupt: u64,
    /// Foreign and looped packets of each port.
    ports: Vec<(u64, u64)>,
    /// First copies by the sending and then by the receiving port.
    delivered: Vec<Vec<u64>>,
    /// Receive timestamps of each port, if they are used.
    stamps: Vec<Option<Stamps>>,
}

/// Times between two turns of a thread.
#[derive(Clone, Copy, Default)]
pub(super) struct Stalls {
    pub(super) longest: u64,
    pub(super) count: u64,
    before: Option<u64>,
}

impl Stalls {
    #[inline]
    pub(super) fn turn(&mut self, now: u64) {
        if let Some(before) = self.before.replace(now) {
            let gap = now.saturating_sub(before);
            if gap > STALL {
                self.count += 1;
            }
            self.longest = self.longest.max(gap);
        }
    }
}

/// The sending half of a thread.
struct Sender<'a> {
    lanes: Vec<Lane<'a>>,
    pool: &'a Pool,
    clock: Clock,
    shared: &'a Shared,
    /// Time at which the sending ends.
    end: u64,
    counts: SenderCounts,
    is_done: bool,
}

/// The receiving half of a thread.
struct Receiver<'a> {
    queues: Vec<(usize, Role, &'a mut RxQueue)>,
    clock: Clock,
    shared: &'a Shared,
    magic: u16,
    is_measured: bool,
    /// Number behind the last stream of each port.
    stream_ends: Vec<usize>,
    counts: ReceiverCounts,
    batch: Batch,
    scratch: Vec<u8>,
}

impl Sender<'_> {
    /// Sends what is due. After its end it only lets the ports finish.
    #[inline]
    fn turn(&mut self) {
        let now = self.clock.now();
        let stop = self.shared.stop.load(Ordering::Relaxed);
        let is_over = now >= self.end.saturating_add(FLUSH);
        let mut working = false;
        for lane in &mut self.lanes {
            if lane.is_done {
                lane.queue.reclaim();
                continue;
            }
            if lane.batch.is_empty() {
                // Packets that were due before the end belong to the offered load.
                if stop || is_over || lane.left == 0 || (now >= self.end && !lane.pacer.is_late(self.end)) {
                    if !stop && lane.left > 0 {
                        lane.pacer.give_up(self.end);
                    }
                    lane.is_done = true;
                    continue;
                }
                lane.fill(now.min(self.end), self.clock, self.pool, &mut self.counts);
            } else if is_over {
                // A port that takes nothing would hold the run for ever.
                lane.batch.clear();
                if !stop {
                    lane.pacer.give_up(self.end);
                }
                lane.is_done = true;
                continue;
            }
            working = true;
            lane.transmit(self.clock, self.shared, &mut self.counts);
        }
        if !working && !self.is_done {
            self.is_done = true;
            self.counts.end = self.lanes.iter().filter_map(|lane| lane.last).max().unwrap_or_else(|| self.clock.now());
            self.shared.sending.fetch_sub(1, Ordering::Release);
        }
        // A stop is an end too, with the same time for the last packets.
        if stop && self.end > now {
            self.end = now;
        }
    }
}

impl Lane<'_> {
    /// Builds the packets that are due.
    #[inline]
    fn fill(&mut self, now: u64, clock: Clock, pool: &Pool, counts: &mut SenderCounts) {
        while self.batch.len() < BURST && self.left > 0 && self.pacer.is_due(now) {
            let Some(mut packet) = pool.take() else {
                counts.no_buffers += 1;
                break;
            };
            let frame = self.source.next(|| clock.now());
            if !packet.extend_from_slice(frame.bytes, pool) {
                counts.no_buffers += 1;
                break;
            }
            if self.is_timed {
                self.pacer.wait(frame.interval);
            } else {
                self.pacer.sent(frame.bytes.len() + FCS);
            }
            self.left -= 1;
            let _ = self.batch.push(packet);
        }
    }

    /// Gives the packets to the port.
    #[inline]
    fn transmit(&mut self, clock: Clock, shared: &Shared, counts: &mut SenderCounts) {
        if self.batch.is_empty() {
            self.queue.reclaim();
            return;
        }
        let mut lengths = [0u32; BATCH];
        lengths.iter_mut().zip(self.batch.iter()).for_each(|(len, packet)| *len = (packet.len() + FCS) as u32);
        let taken = self.queue.transmit(&mut self.batch);
        if taken == 0 {
            counts.full += 1;
            self.queue.reclaim();
            return;
        }
        let now = clock.now();
        let departures = counts.departures.get_or_insert_with(histogram);
        if let Some(last) = self.last.replace(now) {
            departures.saturating_record(now.saturating_sub(last));
        }
        departures.record_n(0, taken as u64 - 1).unwrap_or_default();
        let bytes: u64 = lengths[..taken].iter().map(|len| u64::from(*len)).sum();
        shared.sent[0].fetch_add(taken as u64, Ordering::Relaxed);
        shared.sent[1].fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Receiver<'_> {
    /// Takes what has arrived.
    #[inline]
    fn turn(&mut self) {
        let Self { queues, clock, shared, magic, is_measured, stream_ends, counts, batch, scratch } = self;
        for (port, role, queue) in queues {
            if queue.receive(batch) == 0 {
                continue;
            }
            let now = clock.now();
            if let Some(stamps) = &mut counts.stamps[*port] {
                stamps.refresh();
            }
            let before = counts.tracker.order.distinct;
            let (mut all, mut bytes) = (0, 0);
            batch.drain_front(BATCH, |packet| {
                let len = (packet.len() + FCS) as u64;
                if !*is_measured {
                    if role.receives {
                        counts.ports[*port].0 += 1;
                        (all, bytes) = (all + 1, bytes + len);
                    }
                    return;
                }
                match Signature::read(linear(&packet, scratch), *magic) {
                    Reading::Valid(_) if !role.receives => counts.ports[*port].1 += 1,
                    Reading::Valid(signature) => {
                        let distinct = counts.tracker.order.distinct;
                        let arrival = match &mut counts.stamps[*port] {
                            Some(stamps) => stamps.arrival(packet.timestamp(), &signature, now),
                            None => now,
                        };
                        counts.tracker.receive(&signature, arrival);
                        if counts.tracker.order.distinct > distinct {
                            bytes += len;
                            let sender = stream_ends.partition_point(|end| *end <= signature.stream as usize);
                            counts.delivered[sender][*port] += 1;
                            shared.max_latency.fetch_max(signature.age(arrival), Ordering::Relaxed);
                        }
                    }
                    Reading::Corrupt => counts.corrupt += 1,
                    Reading::Foreign => counts.ports[*port].0 += 1,
                }
            });
            all += counts.tracker.order.distinct - before;
            if all > 0 {
                counts.bytes += bytes;
                shared.received[0].fetch_add(all, Ordering::Relaxed);
                shared.received[1].fetch_add(bytes, Ordering::Relaxed);
            }
        }
    }
}

/// Returns the bytes of a packet, copied if they lie in several segments.
#[inline]
pub(super) fn linear<'a>(packet: &'a Packet, scratch: &'a mut [u8]) -> &'a [u8] {
    if !packet.is_chain() {
        return packet.data();
    }
    let len = packet.copy_to(scratch);
    &scratch[..len]
}

/// Runs the halves of a thread until the end of the trial.
fn run_thread(
    mut sender: Option<Sender<'_>>,
    mut receiver: Option<Receiver<'_>>,
    (clock, shared, core): (Clock, &Shared, Option<usize>),
) -> (Option<SenderCounts>, Option<ReceiverCounts>, Stalls, Option<ThreadUsage>) {
    pin(core);
    let mut stalls = Stalls::default();
    let before = ThreadUsage::read();
    while !shared.finish.load(Ordering::Relaxed) {
        stalls.turn(clock.now());
        if let Some(sender) = &mut sender {
            sender.turn();
        }
        if let Some(receiver) = &mut receiver {
            receiver.turn();
        }
    }
    let usage = ThreadUsage::read().zip(before).map(|(now, before)| now.since(before));
    let counts = sender.map(|sender| {
        let skipped = sender.lanes.iter().map(|lane| lane.pacer.skipped).fold(0.0, f64::max);
        SenderCounts { skipped, ..sender.counts }
    });
    (counts, receiver.map(|receiver| receiver.counts), stalls, usage)
}

impl Generator {
    /// Opens and starts the ports. With one thread, it sends and receives in turn. Of several threads, the last one
    /// receives and the others send. `cores` are the processors of the threads, if they are to be pinned.
    ///
    /// # Errors
    /// If a port cannot be opened or lacks what is needed, or its link is down.
    pub fn open(ports: Vec<(PortSettings, Role)>, threads: u16, cores: Vec<usize>) -> Result<Self, Failure> {
        if !ports.iter().any(|(_, role)| role.sends) {
            return Err(Failure::usage("no port sends"));
        }
        let senders = threads.saturating_sub(1).max(1);
        check_cores(&cores)?;
        let threads_of_run = usize::from(threads.max(1));
        if !cores.is_empty() && cores.len() != threads_of_run {
            return Err(Failure::usage(format!(
                "{} cores for {threads_of_run} threads; name one for each",
                cores.len()
            )));
        }
        let (ports, pool) = ports::open(ports, senders)?;
        Ok(Self { ports, pool, senders, cores, is_shared: threads <= 1 })
    }

    /// Returns the number of senders: one for each sending port and thread that sends.
    pub fn senders(&self) -> usize {
        self.ports.iter().filter(|port| port.role.sends).count() * usize::from(self.senders)
    }

    /// Returns notes about the ports that concern the measurement.
    pub fn notes(&self) -> Vec<String> {
        let stamps =
            |port: &&Started| port.capabilities.offloads.contains(Offloads::RX_TIMESTAMP) && !port.has_readable_clock;
        let note = |port: &Started| {
            format!(
                "port {}: its receive time stamps have no relation to the clock of the sender and are not used",
                port.port.port.name()
            )
        };
        self.ports.iter().filter(stamps).map(note).collect()
    }

    /// Returns the name, the driver and the mode of each port.
    pub fn describe(&self) -> Vec<(String, String)> {
        self.ports.iter().map(Started::describe).collect()
    }

    /// Checks whether a trial is possible on the ports: [`Self::run`] does it too.
    ///
    /// # Errors
    /// The limit that is exceeded.
    pub fn check(&self, trial: &Trial) -> Result<(), Failure> {
        self.rates(trial).map(drop)
    }

    /// Returns the packets per second of the sending port with the lowest rate; `None` if the rate is no number.
    ///
    /// # Errors
    /// If the trial is not possible on the ports.
    pub fn packets_per_second(&self, trial: &Trial) -> Result<Option<f64>, Failure> {
        let mean = trial.traffic.mean_size();
        let rates = self.rates(trial)?.into_iter().map(|rate| rate.and_then(|rate| rate.packets(mean)));
        Ok(rates.collect::<Option<Vec<f64>>>().and_then(|all| all.into_iter().reduce(f64::min)))
    }

    /// Checks what a trial needs of the ports, and returns the rate of each sending port.
    fn rates(&self, trial: &Trial) -> Result<Vec<Option<Rate>>, Failure> {
        let sending: Vec<&Started> = self.ports.iter().filter(|port| port.role.sends).collect();
        let mean = trial.traffic.mean_size();
        let mut rates = Vec::new();
        for port in &sending {
            let name = port.port.port.name();
            // An Ethernet header with two tags, as ports count it.
            let longest = usize::from(port.mtu) + 22;
            match &trial.traffic {
                Traffic::Flows(flows) => flows.check_sizes(longest, name).map_err(Failure::usage)?,
                Traffic::Replay(replay) if replay.longest() > longest => {
                    return Err(Failure::usage(format!(
                        "a frame of the capture has {} bytes, and port {name} sends at most {longest} (its MTU)",
                        replay.longest()
                    )));
                }
                Traffic::Replay(_) => {}
            }
            let rate = trial.rate.map(|rate| rate.on_link(port.speed, mean, name)).transpose();
            rates.push(rate.map_err(Failure::usage)?);
        }
        if let Traffic::Flows(flows) = &trial.traffic {
            let streams = flows.count().map_err(Failure::usage)?.saturating_mul(sending.len());
            let threshold = usize::from(trial.reorder_threshold.unwrap_or(0));
            if threshold > 0 && streams.saturating_mul(threshold + 6) > MAX_REORDER_WINDOWS {
                return Err(Failure::usage(format!(
                    "a reorder threshold of {threshold} for {streams} flows of all ports needs too much memory; at \
                     most {} flows are possible with it",
                    MAX_REORDER_WINDOWS / (threshold + 6)
                )));
            }
            if streams > MAX_STREAMS {
                return Err(Failure::usage(format!(
                    "{streams} flows of all ports; at most {MAX_STREAMS} are possible"
                )));
            }
        }
        Ok(rates)
    }

    /// Runs a trial. `progress` is called about each second.
    ///
    /// # Errors
    /// If the trial is not possible on these ports. Failures during the trial are in the result.
    pub fn run(
        &mut self,
        trial: &Trial,
        stop: &AtomicBool,
        mut progress: impl FnMut(&Progress),
    ) -> Result<TrialResult, Failure> {
        let rates = self.rates(trial)?;
        let Self { ports, pool, senders, cores, is_shared } = self;
        let senders = match &trial.traffic {
            Traffic::Flows(_) => usize::from(*senders),
            // The frames of a capture keep their order.
            Traffic::Replay(_) => 1,
        };
        let clock = Clock::start();
        // Frames end with zeros (padding) more often than with anything else.
        let magic = fastrand::u16(1..u16::MAX);
        let sums = filler_sums();
        let receiving: Vec<(usize, Option<MacAddr>)> = ports
            .iter()
            .enumerate()
            .filter(|(_, it)| it.role.receives)
            .map(|(i, it)| (i, it.capabilities.mac))
            .collect();
        let receives = ports.iter().any(|port| port.role.receives);
        let is_measured = receives && matches!(trial.traffic, Traffic::Flows(_));

        let shared = Shared {
            sending: AtomicUsize::new(senders),
            stop: AtomicBool::new(false),
            finish: AtomicBool::new(false),
            sent: Default::default(),
            received: Default::default(),
            max_latency: AtomicU64::new(0),
        };
        let (mut controls, mut lanes, mut queues) = (Vec::new(), Vec::new(), Vec::new());
        lanes.resize_with(senders, Vec::new);
        let (mut streams, mut sending, mut asked) = (0, 0, Some(0.0));
        let mut stream_ends = Vec::new();
        let (mut followers, mut stamps) = (Vec::new(), Vec::new());
        for (index, Started { port, role, capabilities, has_readable_clock, .. }) in ports.iter_mut().enumerate() {
            let StartedPort { port, rx, tx } = port;
            let follows = is_measured && role.receives && *has_readable_clock;
            let follower = follows.then(|| Follower::start(clock, || port.read_clock())).flatten();
            stamps.push(follower.as_ref().map(Follower::stamps));
            followers.push(follower);
            queues.extend(rx.iter_mut().map(|queue| (index, *role, queue)));
            controls.push(port);
            if !role.sends {
                stream_ends.push(streams);
                continue;
            }
            // No port sends to itself: a bridge forwards no such frame.
            let others: Vec<Option<MacAddr>> =
                receiving.iter().filter(|(other, _)| *other != index).map(|(_, mac)| *mac).collect();
            let peer = others.get(sending % others.len().max(1)).copied().flatten();
            let rate = rates[sending];
            sending += 1;
            let pps = rate.and_then(|rate| rate.packets(trial.traffic.mean_size()));
            asked = asked.zip(pps).map(|(sum, pps)| sum + pps);
            // Flows may be fewer than senders.
            let active = match &trial.traffic {
                Traffic::Flows(flows) => flows.count().map_err(Failure::usage)?.min(senders),
                Traffic::Replay(_) => 1,
            };
            let mut planned = 0;
            for ((part, lanes), queue) in lanes.iter_mut().enumerate().take(active).zip(tx.iter_mut()) {
                // A sender has the load of its flows.
                let mut share = 1.0;
                let source = match &trial.traffic {
                    Traffic::Flows(flows) => {
                        let part = Part { index: part, of: active };
                        let addresses = (capabilities.mac, peer);
                        let source =
                            FlowSource::new(flows, addresses, part, (magic, streams as u32), Arc::clone(&sums))
                                .map_err(Failure::usage)?;
                        streams += source.streams();
                        share = source.share();
                        Source::Flows(Box::new(source))
                    }
                    Traffic::Replay(replay) => Source::Replay { replay: Arc::clone(replay), next: 0 },
                };
                let left = match (trial.limit, &trial.traffic) {
                    (Limit::Packets(n), _) if part + 1 == active => n - planned,
                    (Limit::Packets(n), _) => ((n as f64 * share).round() as u64).min(n - planned),
                    (Limit::Passes(n), Traffic::Replay(replay)) => n.saturating_mul(replay.len() as u64),
                    _ => u64::MAX,
                };
                planned = left.saturating_add(planned);
                lanes.push(Lane {
                    queue,
                    source,
                    pacer: Pacer::new(rate.unwrap_or(Rate::Max).scaled(share), 0),
                    is_timed: rate.is_none(),
                    batch: Batch::new(),
                    left,
                    is_done: false,
                    last: None,
                });
            }
            stream_ends.push(streams);
        }
        let tracker = Tracker::new(streams, trial.reorder_threshold);
        let window = tracker.window();
        let count = controls.len();
        let delivered = vec![vec![0; count]; count];
        let counts = ReceiverCounts { tracker, bytes: 0, corrupt: 0, ports: vec![(0, 0); count], delivered, stamps };
        let mut receiver = Some(Receiver {
            queues,
            clock,
            shared: &shared,
            magic,
            is_measured,
            stream_ends,
            counts,
            batch: Batch::new(),
            scratch: vec![0; SCRATCH],
        });
        // What arrived before the trial, while its packets were prepared too, belongs to no count.
        for (.., queue) in receiver.iter_mut().flat_map(|receiver| &mut receiver.queues) {
            discard(queue);
        }
        let before: Vec<PortCounts> = controls.iter_mut().map(|port| PortCounts::read(port)).collect();
        // The threads need a moment to start.
        let start = clock.now() + 5_000_000;
        let end = match trial.limit {
            Limit::Time(time) => start.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
            _ => u64::MAX,
        };
        let mut threads: Vec<(Option<Sender<'_>>, Option<Receiver<'_>>)> = Vec::new();
        for mut lanes in lanes {
            // Senders of one port take turns.
            let of = senders as u64;
            let index = threads.len() as u64;
            for lane in &mut lanes {
                lane.pacer.start_at(start, index, of);
            }
            let sender =
                Sender { lanes, pool, clock, shared: &shared, end, counts: SenderCounts::default(), is_done: false };
            threads.push((Some(sender), None));
        }
        if *is_shared {
            threads[0].1 = receiver.take();
        } else {
            threads.push((None, receiver.take()));
        }

        let mut failure = None;
        let mut is_stopped = false;
        let results = thread::scope(|scope| {
            let shared = &shared;
            let handles: Vec<_> = threads
                .into_iter()
                .zip(0..)
                .map(|((sender, receiver), i): (_, usize)| {
                    let core = cores.get(i).copied();
                    scope.spawn(move || run_thread(sender, receiver, (clock, shared, core)))
                })
                .collect();
            let begin = Instant::now();
            let mut last = begin;
            let mut sent_at: Option<Instant> = None;
            loop {
                thread::sleep(TICK);
                let now = Instant::now();
                if stop.load(Ordering::Relaxed) {
                    // A stop after the sending ends the wait for late packets.
                    if sent_at.is_some() && !is_stopped {
                        break;
                    }
                    is_stopped |= sent_at.is_none() && !shared.stop.swap(true, Ordering::Relaxed);
                }
                for (port, follower) in controls.iter_mut().zip(&mut followers) {
                    if let Some(follower) = follower {
                        follower.update(clock, || port.read_clock());
                    }
                    for event in port.events() {
                        let why = match event {
                            PortEvent::Lost(why) => format!("port {} is lost: {why}", port.name()),
                            PortEvent::Link(link) if link.state == LinkState::Down => {
                                format!("the link of port {} went down during the run", port.name())
                            }
                            _ => continue,
                        };
                        failure.get_or_insert(why);
                        shared.stop.store(true, Ordering::Relaxed);
                    }
                }
                // A thread that has panicked ends the trial.
                if handles.iter().any(thread::ScopedJoinHandle::is_finished) {
                    failure.get_or_insert("a thread of the generator has ended".to_owned());
                    break;
                }
                if now - last >= Duration::from_secs(1) {
                    last = now;
                    progress(&shared.progress(begin.elapsed()));
                }
                if shared.sending.load(Ordering::Acquire) > 0 {
                    continue;
                }
                let since = now - *sent_at.get_or_insert(now);
                let has_all =
                    is_measured && shared.received[0].load(Ordering::Relaxed) >= shared.sent[0].load(Ordering::Relaxed);
                if since >= trial.drain || (has_all && since >= QUIET.min(trial.drain)) {
                    break;
                }
            }
            shared.finish.store(true, Ordering::Relaxed);
            handles.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
        });

        let mut departures = histogram();
        let (mut full, mut no_buffers, mut skipped) = (0, 0, 0f64);
        let mut last = 0;
        let (mut longest, mut stalls) = (0, 0);
        let mut usage = Some(ThreadUsage::default());
        let mut received = None;
        for result in results {
            let Ok((sender, receiver, of_thread, used)) = result else {
                return Err(Failure::failed("a thread of the generator has panicked"));
            };
            longest = longest.max(of_thread.longest);
            stalls += of_thread.count;
            usage = usage.zip(used).map(|(sum, used)| sum.plus(used));
            if let Some(counts) = sender {
                if let Some(other) = &counts.departures {
                    departures.add(other).map_err(Failure::failed)?;
                }
                full += counts.full;
                no_buffers += counts.no_buffers;
                skipped = skipped.max(counts.skipped);
                last = last.max(counts.end);
            }
            received = receiver.or(received);
        }
        let mut received: ReceiverCounts = received.ok_or_else(|| Failure::failed("the receiver has no result"))?;
        let sent = shared.sent[0].load(Ordering::Relaxed);
        let passed = Duration::from_nanos(last.saturating_sub(start));
        let duration = match trial.limit {
            // Between the last packet and the end, none was due. A late sender needed longer.
            Limit::Time(time) if !is_stopped && failure.is_none() => time.max(passed),
            // The interval after the last packet of each port belongs to it.
            _ => {
                let each = (sent / sending.max(1) as u64).max(2) as f64;
                passed.mul_f64(each / (each - 1.0))
            }
        };
        let mut dropped_at_port = 0;
        let mut results = Vec::new();
        let stamps = followers.iter().zip(received.stamps).map(|(follower, stamps)| {
            let (follower, stamps) = follower.as_ref().zip(stamps)?;
            Some(StampResult { uncertainty: follower.uncertainty(), counts: stamps.counts })
        });
        for (
            (((Started { port: StartedPort { port, .. }, role, .. }, before), (foreign, looped)), delivered),
            stamps,
        ) in ports.iter_mut().zip(&before).zip(&received.ports).zip(received.delivered).zip(stamps)
        {
            let PortCounts { rx, tx, device_drops } = PortCounts::read(port).since(before);
            if role.sends {
                dropped_at_port += tx.dropped();
            }
            results.push(PortResult {
                name: port.name().to_owned(),
                role: *role,
                tx,
                rx,
                device_drops,
                delivered,
                foreign: *foreign,
                looped: *looped,
                stamps,
            });
        }
        let (jitter, density) = (received.tracker.jitter(), received.tracker.take_density());
        Ok(TrialResult {
            run: matches!(trial.traffic, Traffic::Flows(_)).then_some(magic),
            asked_pps: asked.filter(|_| trial.rate.is_some()),
            duration,
            sent: sent.saturating_sub(dropped_at_port),
            // Which of the accepted packets the ports dropped is not known.
            sent_bytes: (shared.sent[1].load(Ordering::Relaxed) as f64
                * (sent.saturating_sub(dropped_at_port) as f64 / sent.max(1) as f64)) as u64,
            dropped_at_port,
            is_measured,
            order: received.tracker.order,
            density,
            received_bytes: received.bytes,
            corrupt: received.corrupt,
            latency: received.tracker.latency,
            jitter,
            departures,
            full,
            no_buffers,
            skipped: Duration::from_nanos(skipped as u64),
            longest_stall: Duration::from_nanos(longest),
            stalls,
            usage,
            ports: results,
            streams,
            window,
            failure,
            is_stopped,
        })
    }

    /// Stops the ports.
    ///
    /// # Errors
    /// If a port cannot be stopped.
    pub fn close(self) -> Result<(), Failure> {
        for Started { port: StartedPort { port, rx, tx }, .. } in self.ports {
            port.stop(rx, tx)?;
        }
        Ok(())
    }
}

impl Shared {
    fn progress(&self, elapsed: Duration) -> Progress {
        let pair = |counts: &[AtomicU64; 2]| (counts[0].load(Ordering::Relaxed), counts[1].load(Ordering::Relaxed));
        let max_latency = self.max_latency.swap(0, Ordering::Relaxed);
        Progress { elapsed, sent: pair(&self.sent), received: pair(&self.received), max_latency }
    }
}

/// Drops the packets that arrived before a trial.
pub(super) fn discard(queue: &mut RxQueue) {
    let mut batch = Batch::new();
    // A port that never becomes empty must not hold the trial.
    for _ in 0..1024 {
        if queue.receive(&mut batch) == 0 {
            break;
        }
        batch.clear();
    }
}

#[cfg(test)]
mod tests;
