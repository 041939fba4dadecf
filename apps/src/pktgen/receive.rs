//! A receiver alone: counts of all packets that arrive at ports, while the generator is another process or machine.
//!
//! The receiver knows no run in advance. The first intact packet with a new run number begins a run. The first one with
//! a new stream number begins a stream of its run. Sequence numbers below the first received one count apart, not as
//! lost: the generator may have begun before the receiver. Packets after the last received one are unknown.
//!
//! The time in a signature is that of the sender's clock, which is not the receiver's. So there are no delays.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod report;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use wirepath::Failure;
use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::port::{LinkState, PortEvent, RxQueue, StartedPort};
use wirepath_wire::vlan::TAG_LEN;

use super::clock::Clock;
use super::ports::{self, PortCounts, Role, Started};
use super::signature::Signature;
use super::size::{FCS, GAP};
use super::tracker::{Order, Sequence, window};
use super::trial::{SCRATCH, Stalls, discard, linear};
use super::usage::{check_cores, pin};

/// Interval at which the control thread looks at the ports and the limits.
const TICK: Duration = Duration::from_millis(10);
const SECOND: u64 = 1_000_000_000;
/// Place of a run that has not begun.
const NO_RUN: u32 = u32::MAX;

/// Longest frames of the size classes of RFC 2819, in bytes with the frame check sequence. Longer frames are the last
/// class. The first class has undersize frames, which only virtual interfaces pass on.
const CLASSES: [usize; 7] = [63, 64, 127, 255, 511, 1023, 1518];

/// Names of the size classes.
pub const CLASS_NAMES: [&str; CLASSES.len() + 1] =
    ["below 64", "64", "65-127", "128-255", "256-511", "512-1023", "1024-1518", "above 1518"];

/// End of a reception.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReceiveLimit {
    /// After this time.
    pub time: Option<Duration>,
    /// After this number of packets of all ports, of whatever kind.
    pub packets: Option<u64>,
    /// Largest number of streams that are followed. Packets of further ones are counted as untracked.
    pub streams: usize,
}

/// Rates: packets, bits on layer 2 and bits on layer 1, each per second.
pub type Rates = [f64; 3];

/// Counts of packets and bytes, and their rates.
///
/// Seconds begin with the first packet. A second is whole if a packet arrives after its end. So the time before the
/// first packet and that after the last one belong to no rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    /// Packets.
    pub packets: u64,
    /// Bytes of the packets, with frame check sequences.
    pub bytes: u64,
    /// Times of the first and the last packet.
    times: Option<(u64, u64)>,
    /// Start of the current second, and the counts at it.
    second: (u64, u64, u64),
    /// Lowest and highest counts of a whole second.
    limits: Option<([u64; 3], [u64; 3])>,
}

/// Returns packets, and their bits on layers 2 and 1.
fn figures(packets: u64, bytes: u64) -> [u64; 3] {
    [packets, bytes * 8, (bytes + packets * GAP as u64) * 8]
}

impl Meter {
    /// Counts packets that arrived at a time in nanoseconds.
    #[inline]
    pub fn add(&mut self, now: u64, packets: u64, bytes: u64) {
        match &mut self.times {
            Some((_, last)) => *last = now,
            None => {
                self.times = Some((now, now));
                self.second.0 = now;
            }
        }
        if now.saturating_sub(self.second.0) >= SECOND {
            self.end_seconds(now);
        }
        self.packets += packets;
        self.bytes += bytes;
    }

    /// Ends the seconds before a time.
    #[cold]
    fn end_seconds(&mut self, now: u64) {
        let (start, packets, bytes) = self.second;
        let passed = (now - start) / SECOND;
        let ended = figures(self.packets - packets, self.bytes - bytes);
        let (mut lowest, mut highest) = self.limits.unwrap_or((ended, ended));
        for i in 0..ended.len() {
            // Nothing arrived in the seconds after the first of them.
            lowest[i] = if passed > 1 { 0 } else { lowest[i].min(ended[i]) };
            highest[i] = highest[i].max(ended[i]);
        }
        self.limits = Some((lowest, highest));
        self.second = (start + passed * SECOND, self.packets, self.bytes);
    }

    /// Time from the first packet to the end of the interval after the last one; zero if they arrived at once.
    pub fn duration(&self) -> Duration {
        let passed = self.times.map_or(0, |(first, last)| last.saturating_sub(first));
        let intervals = self.packets.saturating_sub(1).max(1) as f64;
        Duration::from_nanos(passed).mul_f64((self.packets as f64 / intervals).max(1.0))
    }

    /// Mean rates between the first and the last packet; `None` if all packets arrived at once.
    pub fn mean(&self) -> Option<Rates> {
        let seconds = self.duration().as_secs_f64();
        (seconds > 0.0).then(|| figures(self.packets, self.bytes).map(|n| n as f64 / seconds))
    }

    /// Lowest and highest rates of a whole second; `None` if no second was whole.
    pub fn limits(&self) -> Option<(Rates, Rates)> {
        self.limits.map(|(lowest, highest)| (lowest.map(|n| n as f64), highest.map(|n| n as f64)))
    }
}

/// Counts of a port.
#[derive(Clone, Debug, Default)]
pub struct ReceivedPort {
    /// Name.
    pub name: String,
    /// All packets.
    pub meter: Meter,
    /// Packets without an intact signature of any run, and not of a known run either.
    pub foreign: u64,
    /// Packets by size, in the order of [`CLASS_NAMES`].
    pub sizes: [u64; CLASSES.len() + 1],
    /// Counts of the receive queues.
    pub rx: QueueStats,
    /// Packets that the device or the kernel dropped before the receive queues.
    pub device_drops: Vec<(DropReason, u64)>,
    /// Times that the link went down.
    pub link_downs: u64,
}

/// Counts of one stream.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedStream {
    /// Number of its run.
    pub run: u16,
    /// Number in the run.
    pub number: u32,
    /// Order and duplicates.
    pub order: Order,
    /// Lowest received sequence number, modulo 2^32. It is the number of packets that were sent before.
    pub first: u32,
    /// Highest received sequence number, modulo 2^32.
    pub highest: u32,
    /// Sequence numbers between the lowest and the highest received one that did not arrive intact.
    pub lost: u64,
    /// Packets that the stream may be late before a duplicate looks like a first copy.
    pub window: u64,
}

/// Counts of the packets of one run.
#[derive(Clone, Debug, Default)]
pub struct ReceivedRun {
    /// Number in the signatures.
    pub number: u16,
    /// Intact packets, with duplicates.
    pub meter: Meter,
    /// Packets whose payload has changed.
    pub corrupt: u64,
    /// Intact packets of streams that are not followed.
    pub untracked: u64,
    /// Its streams.
    pub streams: Vec<ReceivedStream>,
}

/// Sum of the counts of streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceivedSum {
    /// Packets that arrived intact for the first time.
    pub received: u64,
    /// Sequence numbers between received ones that did not arrive intact.
    pub lost: u64,
    /// Sequence numbers below the first received ones.
    pub before_first: u64,
    /// Further copies.
    pub duplicates: u64,
    /// Packets with a sequence number below one that arrived before (RFC 4737).
    pub reordered: u64,
    /// Largest difference between the expected sequence number and that of a reordered packet.
    pub max_distance: u64,
    /// Reordered packets so late that duplicates are not recognised.
    pub beyond_window: u64,
    /// Packets whose payload has changed. They are lost too.
    pub corrupt: u64,
    /// Intact packets of streams that are not followed.
    pub untracked: u64,
}

impl ReceivedSum {
    fn add(&mut self, other: &Self) {
        self.received += other.received;
        // A hostile sender chooses the sequence numbers.
        self.lost = self.lost.saturating_add(other.lost);
        self.before_first += other.before_first;
        self.duplicates += other.duplicates;
        self.reordered += other.reordered;
        self.max_distance = self.max_distance.max(other.max_distance);
        self.beyond_window += other.beyond_window;
        self.corrupt += other.corrupt;
        self.untracked += other.untracked;
    }

    /// Share of the packets between received ones that were lost; `None` without packets.
    pub fn loss_ratio(&self) -> Option<f64> {
        let all = self.received.saturating_add(self.lost);
        (all > 0).then(|| self.lost as f64 / all as f64)
    }
}

impl ReceivedRun {
    /// Returns the sum over its streams.
    pub fn sum(&self) -> ReceivedSum {
        let mut sum = ReceivedSum { corrupt: self.corrupt, untracked: self.untracked, ..ReceivedSum::default() };
        for stream in &self.streams {
            let order = &stream.order;
            sum.add(&ReceivedSum {
                received: order.distinct,
                lost: stream.lost,
                before_first: stream.first.into(),
                duplicates: order.duplicates,
                reordered: order.reordered,
                max_distance: order.max_distance,
                beyond_window: order.beyond_window,
                corrupt: 0,
                untracked: 0,
            });
        }
        sum
    }
}

/// Result of a reception.
#[derive(Clone, Debug)]
pub struct ReceiveResult {
    /// Time from the start to the end.
    pub duration: Duration,
    /// The ports.
    pub ports: Vec<ReceivedPort>,
    /// The runs in the order of their first packets.
    pub runs: Vec<ReceivedRun>,
    /// Longest time between two turns of the thread.
    pub longest_stall: Duration,
    /// Number of such times above 100 microseconds.
    pub stalls: u64,
    /// Reason why the reception ended early.
    pub failure: Option<String>,
    /// True if it was stopped before a limit.
    pub is_stopped: bool,
}

impl ReceiveResult {
    /// Returns the sum over all runs.
    pub fn sum(&self) -> ReceivedSum {
        let mut sum = ReceivedSum::default();
        self.runs.iter().for_each(|run| sum.add(&run.sum()));
        sum
    }

    /// Packets without a signature, at all ports.
    pub fn foreign(&self) -> u64 {
        self.ports.iter().map(|port| port.foreign).sum()
    }
}

/// Counts at a moment of a reception.
#[derive(Clone, Debug, Default)]
pub struct ReceiveProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Packets of each port, and their bytes with frame check sequences.
    pub ports: Vec<(u64, u64)>,
}

/// A stream that is followed.
struct Stream {
    run: u32,
    number: u32,
    sequence: Sequence,
    /// Lowest sequence number.
    lowest: u64,
    order: Order,
    bits: Box<[u64]>,
}

/// The runs and streams of all packets. Its memory is limited by the number of streams, whatever arrives.
struct Streams {
    /// Place in `runs` of each run number.
    places: Vec<u32>,
    runs: Vec<ReceivedRun>,
    /// Place in `streams` of each run and stream number. Its hashes have random keys.
    index: HashMap<(u32, u32), u32>,
    streams: Vec<Stream>,
    limit: usize,
}

impl Streams {
    fn new(limit: usize) -> Self {
        let places = vec![NO_RUN; 1 << 16];
        // Growth would hold the thread up for milliseconds.
        let few = limit.min(1 << 16);
        Self { places, runs: Vec::new(), index: HashMap::with_capacity(few), streams: Vec::with_capacity(few), limit }
    }

    /// Takes a frame of `len` bytes with frame check sequence. Returns false if it is foreign.
    #[inline]
    fn receive(&mut self, frame: &[u8], len: u64, now: u64) -> bool {
        let Some((magic, signature)) = Signature::read_any(frame) else { return false };
        let place = self.places[usize::from(magic)];
        let Some(signature) = signature else {
            if let Some(run) = self.runs.get_mut(place as usize) {
                run.corrupt += 1;
                return true;
            }
            return false;
        };
        let place = if place == NO_RUN { self.begin_run(magic) } else { place };
        self.runs[place as usize].meter.add(now, 1, len);
        let key = (place, signature.stream);
        let at = match self.index.get(&key) {
            Some(at) => *at as usize,
            None if self.streams.len() < self.limit => self.begin_stream(key, signature.sequence),
            None => {
                self.runs[place as usize].untracked += 1;
                return true;
            }
        };
        let Stream { sequence, lowest, order, bits, .. } = &mut self.streams[at];
        if let Some(number) = sequence.receive(signature.sequence, bits, order) {
            *lowest = number.min(*lowest);
        }
        true
    }

    #[cold]
    fn begin_run(&mut self, number: u16) -> u32 {
        let place = self.runs.len() as u32;
        self.places[usize::from(number)] = place;
        self.runs.push(ReceivedRun { number, ..ReceivedRun::default() });
        place
    }

    #[cold]
    fn begin_stream(&mut self, key: (u32, u32), sequence: u32) -> usize {
        let at = self.streams.len();
        self.index.insert(key, at as u32);
        // Reordered packets may have lower numbers than the first one.
        let next = (1 << 32) | u64::from(sequence);
        self.streams.push(Stream {
            run: key.0,
            number: key.1,
            sequence: Sequence { next },
            lowest: next,
            order: Order::default(),
            bits: vec![0; window(at + 1) / 64].into(),
        });
        at
    }

    /// Returns the runs with their streams.
    fn finish(mut self) -> Vec<ReceivedRun> {
        self.streams.sort_unstable_by_key(|stream| (stream.run, stream.number));
        for stream in self.streams {
            let run = &mut self.runs[stream.run as usize];
            run.streams.push(ReceivedStream {
                run: run.number,
                number: stream.number,
                order: stream.order,
                first: stream.lowest as u32,
                highest: stream.sequence.next.wrapping_sub(1) as u32,
                // Duplicates beyond the window count as first copies.
                lost: (stream.sequence.next - stream.lowest).saturating_sub(stream.order.distinct),
                window: stream.bits.len() as u64 * 64,
            });
        }
        self.runs
    }
}

/// State that the two threads share.
struct Shared {
    finish: AtomicBool,
    /// Packets and bytes of each port.
    ports: Vec<[AtomicU64; 2]>,
}

/// The thread that receives.
struct Reader<'a> {
    queues: Vec<(usize, &'a mut RxQueue)>,
    clock: Clock,
    shared: &'a Shared,
    ports: Vec<ReceivedPort>,
    streams: Streams,
    stalls: Stalls,
    left: u64,
}

impl Reader<'_> {
    fn run(mut self) -> Self {
        let (mut batch, mut scratch) = (Batch::new(), vec![0; SCRATCH]);
        while !self.shared.finish.load(Ordering::Relaxed) && self.left > 0 {
            self.stalls.turn(self.clock.now());
            self.turn(&mut batch, &mut scratch);
        }
        self
    }

    /// Takes the packets that have arrived.
    #[inline]
    fn turn(&mut self, batch: &mut Batch, scratch: &mut [u8]) {
        let Self { queues, clock, shared, ports, streams, left, .. } = self;
        for (at, queue) in queues {
            if queue.receive(batch) == 0 {
                continue;
            }
            let now = clock.now();
            let port = &mut ports[*at];
            let (mut packets, mut bytes) = (0, 0);
            batch.drain_front(usize::try_from(*left).unwrap_or(BATCH).min(BATCH), |packet| {
                // The NIC may have taken a VLAN tag out of the frame.
                let len = packet.len() + FCS + if packet.vlan().is_some() { TAG_LEN } else { 0 };
                (packets, bytes) = (packets + 1, bytes + len as u64);
                port.sizes[CLASSES.partition_point(|longest| *longest < len)] += 1;
                if !streams.receive(linear(&packet, scratch), len as u64, now) {
                    port.foreign += 1;
                }
            });
            batch.clear();
            *left -= packets;
            port.meter.add(now, packets, bytes);
            let counts = &shared.ports[*at];
            counts[0].store(port.meter.packets, Ordering::Relaxed);
            counts[1].store(port.meter.bytes, Ordering::Relaxed);
            if *left == 0 {
                break;
            }
        }
    }
}

/// Started ports that only receive.
pub struct Receiver {
    ports: Vec<Started>,
    core: Option<usize>,
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").field("core", &self.core).finish_non_exhaustive()
    }
}

impl Receiver {
    /// Opens and starts the ports. One thread receives, on the core if there is one.
    ///
    /// # Errors
    /// If a port cannot be opened, its link is down, or the core is not available.
    pub fn open(ports: Vec<(PortSettings, Role)>, core: Option<usize>) -> Result<Self, Failure> {
        check_cores(core.as_slice())?;
        let (ports, _) = ports::open(ports, 1)?;
        Ok(Self { ports, core })
    }

    /// Returns the name, the driver and the mode of each port.
    pub fn describe(&self) -> Vec<(String, String)> {
        self.ports.iter().map(Started::describe).collect()
    }

    /// Receives until a limit, the end of all files, or a stop. `progress` is called about each second.
    ///
    /// # Errors
    /// If the thread has panicked. Failures of ports are in the result.
    pub fn run(
        &mut self,
        limit: &ReceiveLimit,
        stop: &AtomicBool,
        mut progress: impl FnMut(&ReceiveProgress),
    ) -> Result<ReceiveResult, Failure> {
        let core = self.core;
        let (mut controls, mut queues, mut ports) = (Vec::new(), Vec::new(), Vec::new());
        for (index, Started { port: StartedPort { port, rx, .. }, .. }) in self.ports.iter_mut().enumerate() {
            // What arrived while other ports were opened belongs to no count. A file has not begun before.
            if port.capabilities().driver != "pcap" {
                rx.iter_mut().for_each(discard);
            }
            queues.extend(rx.iter_mut().map(|queue| (index, queue)));
            ports.push(ReceivedPort { name: port.name().to_owned(), ..ReceivedPort::default() });
            controls.push(port);
        }
        let shared =
            Shared { finish: AtomicBool::new(false), ports: ports.iter().map(|_| Default::default()).collect() };
        let reader = Reader {
            queues,
            clock: Clock::start(),
            shared: &shared,
            ports,
            streams: Streams::new(limit.streams),
            stalls: Stalls::default(),
            left: limit.packets.unwrap_or(u64::MAX),
        };
        let before: Vec<PortCounts> = controls.iter_mut().map(|port| PortCounts::read(port)).collect();
        let mut failure = None;
        let mut is_stopped = false;
        let mut downs = vec![0; controls.len()];
        let mut is_finished = vec![false; controls.len()];
        let begin = Instant::now();
        let (reader, duration) = thread::scope(|scope| {
            let handle = scope.spawn(move || {
                pin(core);
                reader.run()
            });
            let mut last = begin;
            loop {
                thread::sleep(TICK);
                let now = Instant::now();
                // A thread that has panicked ends the reception too.
                if handle.is_finished() || limit.time.is_some_and(|time| now - begin >= time) {
                    break;
                }
                if stop.load(Ordering::Relaxed) {
                    is_stopped = true;
                    break;
                }
                for ((port, downs), is_finished) in controls.iter_mut().zip(&mut downs).zip(&mut is_finished) {
                    for event in port.events() {
                        match event {
                            PortEvent::Lost(why) => {
                                failure.get_or_insert(format!("port {} is lost: {why}", port.name()));
                            }
                            PortEvent::Link(link) if link.state == LinkState::Down => *downs += 1,
                            PortEvent::Finished => *is_finished = true,
                            _ => {}
                        }
                    }
                }
                if failure.is_some() || is_finished.iter().all(|it| *it) {
                    break;
                }
                if now - last >= Duration::from_secs(1) {
                    last = now;
                    let pair = |[packets, bytes]: &[AtomicU64; 2]| {
                        (packets.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
                    };
                    let ports = shared.ports.iter().map(pair).collect();
                    progress(&ReceiveProgress { elapsed: now - begin, ports });
                }
            }
            shared.finish.store(true, Ordering::Relaxed);
            (handle.join(), begin.elapsed())
        });
        let Ok(Reader { mut ports, streams, stalls, .. }) = reader else {
            return Err(Failure::failed("the thread of the receiver has panicked"));
        };
        let ends = controls.iter_mut().zip(before).zip(downs);
        for (port, ((control, before), downs)) in ports.iter_mut().zip(ends) {
            let PortCounts { rx, device_drops, .. } = PortCounts::read(control).since(&before);
            (port.rx, port.device_drops, port.link_downs) = (rx, device_drops, downs);
        }
        Ok(ReceiveResult {
            duration,
            ports,
            runs: streams.finish(),
            longest_stall: Duration::from_nanos(stalls.longest),
            stalls: stalls.count,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pktgen::signature::{FILLER, LEN};

    fn frame(magic: u16, stream: u32, sequence: u32) -> Vec<u8> {
        let payload = LEN + 4;
        let mut frame = vec![0; 42];
        frame.extend_from_slice(&FILLER[..payload - LEN]);
        let signature = Signature { payload_len: payload as u16, stream, sequence, time: 0 };
        frame.extend_from_slice(&signature.emit(magic));
        frame
    }

    fn receive(streams: &mut Streams, frames: &[(u16, u32, u32)]) {
        for (magic, stream, sequence) in frames {
            assert!(streams.receive(&frame(*magic, *stream, *sequence), 68, 0));
        }
    }

    #[test]
    fn runs_and_streams_are_apart() {
        let mut streams = Streams::new(100);
        receive(&mut streams, &[(7, 1, 0), (7, 1, 2), (9, 1, 0), (7, 0, 0), (7, 1, 1), (9, 1, 0), (7, 1, 5)]);
        let runs = streams.finish();
        assert_eq!(runs.iter().map(|run| run.number).collect::<Vec<_>>(), [7, 9], "in the order of arrival");
        let sum = ReceivedSum { received: 5, lost: 2, reordered: 1, max_distance: 2, ..ReceivedSum::default() };
        assert_eq!(runs[0].sum(), sum);
        assert_eq!(runs[0].streams.iter().map(|it| (it.number, it.lost)).collect::<Vec<_>>(), [(0, 0), (1, 2)]);
        assert_eq!(runs[1].sum(), ReceivedSum { received: 1, duplicates: 1, ..ReceivedSum::default() });
    }

    #[test]
    fn a_late_receiver_begins_in_the_middle_of_a_stream() {
        let mut streams = Streams::new(100);
        // Above 2^31 too, and across the end of 32 bits.
        receive(&mut streams, &[(1, 0, 1002), (1, 0, 1000), (1, 0, 1004), (1, 1, u32::MAX - 1), (1, 1, 1)]);
        let runs = streams.finish();
        let found: Vec<_> = runs[0].streams.iter().map(|it| (it.first, it.highest, it.lost)).collect();
        assert_eq!(found, [(1000, 1004, 2), (u32::MAX - 1, 1, 2)]);
        assert_eq!((runs[0].sum().reordered, runs[0].sum().received), (1, 5));
    }

    #[test]
    fn corruption_belongs_to_a_known_run() {
        let mut streams = Streams::new(100);
        let mut broken = frame(7, 0, 1);
        broken[43] ^= 1;
        assert!(!streams.receive(&broken, 68, 0), "the run is not known yet");
        receive(&mut streams, &[(7, 0, 0), (7, 0, 2)]);
        assert!(streams.receive(&broken, 68, 0));
        assert!(!streams.receive(&[0; 60], 64, 0) && !streams.receive(&[7; 10], 64, 0), "foreign");
        assert_eq!(streams.finish()[0].sum(), ReceivedSum { received: 2, lost: 1, corrupt: 1, ..Default::default() });
    }

    #[test]
    fn memory_has_a_limit_that_is_counted() {
        let mut streams = Streams::new(1000);
        for number in 0..3000u32 {
            // Every packet has a new run or a new stream.
            receive(&mut streams, &[(number as u16, number << 12, number.wrapping_mul(0x9e37_79b9))]);
        }
        receive(&mut streams, &[(0, 0, 1)]);
        assert_eq!((streams.streams.len(), streams.index.len(), streams.runs.len()), (1000, 1000, 3000));
        let words: usize = streams.streams.iter().map(|stream| stream.bits.len()).sum();
        assert!(words * 8 <= 8 << 20, "{words}");
        let sum: u64 = streams.finish().iter().map(|run| run.untracked).sum();
        assert_eq!(sum, 2000);
    }

    #[test]
    fn rates_are_those_of_whole_seconds() {
        let mut meter = Meter::default();
        let start = 5 * SECOND;
        assert_eq!((meter.mean(), meter.limits()), (None, None));
        // 10 packets, then 30, then none for a second, then 20 in a part of a second.
        for (second, packets) in [(0, 10), (1, 30), (3, 20)] {
            (0..packets).for_each(|n| meter.add(start + second * SECOND + n * 10_000_000, 1, 100));
        }
        let (lowest, highest) = meter.limits().unwrap();
        assert_eq!((lowest, highest), ([0.0; 3], [30.0, 24_000.0, 28_800.0]));
        // 60 packets with 59 intervals in 3.19 s.
        let [pps, ..] = meter.mean().unwrap();
        assert!((pps - 59.0 / 3.19).abs() < 1e-6, "{pps}");
        let mut even = Meter::default();
        (0..25).for_each(|n| even.add(start + n * SECOND / 10, 1, 100));
        assert_eq!(even.limits().map(|(low, high)| (low[0], high[0])), Some((10.0, 10.0)));
        assert_eq!(even.mean().map(|[pps, ..]| pps.round()), Some(10.0));
    }

    #[test]
    fn sizes_are_the_classes_of_the_rfc() {
        let class = |len: usize| CLASS_NAMES[CLASSES.partition_point(|longest| *longest < len)];
        for (len, name) in [
            (63, "below 64"),
            (64, "64"),
            (65, "65-127"),
            (127, "65-127"),
            (128, "128-255"),
            (256, "256-511"),
            (1023, "512-1023"),
            (1024, "1024-1518"),
            (1518, "1024-1518"),
            (1519, "above 1518"),
        ] {
            assert_eq!(class(len), name, "{len}");
        }
    }
}
