//! A port under test and the other end of its wire.

use std::path::Path;
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use wirepath_nic_emulator::launch;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pmd::port::{ConfiguredPort, OpenPort, PortConfig, RxQueue, StartedPort};
use wirepath_testlab::{print_uncaptured, skip_or_fail};
use wirepath_wire::checksum;

use crate::common::{bytes, packet, settings};
use crate::fixture::{Emulation, Fixture, Property, Wire, WireTraits};

/// Time without any progress after which a test fails. It only ends a hopeless wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// Default number of buffers in the pool of a test.
const BUFFERS: u32 = 8192;
/// Port id of the port under test.
pub(crate) const PORT: u16 = 7;

/// Checks one property of one driver.
pub(crate) fn check(name: &str, fixture: &dyn Fixture, property: Property, body: fn(&mut Bench)) {
    if let Some(why) = fixture.exempt(property) {
        print_uncaptured(&format!("not for {}: {property:?}: {why}", fixture.driver()));
        return;
    }
    let Some(Emulation { topology, environment, folder }) = fixture.emulation() else {
        return check_here(fixture, property, body);
    };
    let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, &**value)).collect();
    launch::run_test_with_env(name, &topology, &environment, || {
        let log_guard = LogOnFailure(&folder);
        check_here(fixture, property, body);
        drop(log_guard);
        // The log may contain only injected faults.
        let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        let refused: Vec<_> = log.lines().filter(|line| !line.contains("injected fault")).collect();
        assert!(refused.is_empty(), "a NIC would have refused:\n{}", refused.join("\n"));
    });
    let _ = std::fs::remove_dir_all(folder);
}

/// Prints the log of the NICs if the test fails.
struct LogOnFailure<'a>(&'a Path);

impl Drop for LogOnFailure<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the NICs' log:\n{}", std::fs::read_to_string(self.0.join("log")).unwrap_or_default());
        }
    }
}

/// Checks one property in this process.
fn check_here(fixture: &dyn Fixture, property: Property, body: fn(&mut Bench)) {
    let setup = match fixture.set_up() {
        Ok(setup) => setup,
        Err(why) => return skip_or_fail(file!(), line!(), &format!("{}: {property:?}: {why}", fixture.driver())),
    };
    let (wire, namespace, lab) = (setup.wire, setup.namespace, setup.lab);
    let run = || {
        let mut bench = Bench::new(wire);
        body(&mut bench);
        bench.finish();
    };
    match &namespace {
        Some(namespace) => namespace.inside(run),
        None => run(),
    }
    drop(namespace);
    drop(lab);
}

/// A port under test and the other end of its wire.
pub(crate) struct Bench {
    pub(crate) wire: Box<dyn Wire>,
    pub(crate) traits: WireTraits,
    pub(crate) pool: Pool,
    pub(crate) port: Option<StartedPort>,
    stopped: Option<ConfiguredPort>,
    /// Test frames that the port has sent so far.
    pub(crate) arrived: Vec<Vec<u8>>,
}

impl Bench {
    pub(crate) fn new(wire: Box<dyn Wire>) -> Self {
        let pool = Pool::new("contract", BUFFERS).expect("memory for a pool");
        Self { traits: wire.traits(), wire, pool, port: None, stopped: None, arrived: Vec::new() }
    }

    /// Starts the port with an MTU of 9202, or the largest that it supports.
    pub(crate) fn start(&mut self, feed: &[Vec<u8>]) {
        self.start_with(feed, |_| ());
    }

    /// Opens, configures and starts the port.
    pub(crate) fn start_with(&mut self, feed: &[Vec<u8>], change: impl FnOnce(&mut PortConfig)) {
        // Some devices can be opened only once.
        self.stopped = None;
        let settings = settings(&self.wire.port(feed));
        let mut config = settings.config(PortId::new(PORT), self.pool.clone());
        let open = OpenPort::open("dut", settings.plan).unwrap_or_else(|error| panic!("open: {error}"));
        config.mtu = open.capabilities().max_mtu.min(9202);
        change(&mut config);
        let configured = open.configure(config).unwrap_or_else(|error| panic!("configure: {error}"));
        let started = configured.start().unwrap_or_else(|error| panic!("start: {error}"));
        for packet_queue in &started.rx {
            assert_eq!(packet_queue.port(), PortId::new(PORT));
        }
        self.port = Some(started);
        self.wire.settle();
    }

    /// Returns the started port.
    pub(crate) fn started(&mut self) -> &mut StartedPort {
        self.port.as_mut().expect("the test has started the port")
    }

    /// Returns the length of the longest configured frame.
    pub(crate) fn longest(&mut self) -> usize {
        usize::from(self.started().port.config().mtu) + 14
    }

    /// Stops the port.
    pub(crate) fn stop(&mut self) {
        if let Some(StartedPort { port, rx, tx }) = self.port.take() {
            self.stopped = Some(port.stop(rx, tx).unwrap_or_else(|error| panic!("stop: {error}")));
        }
        self.take_arrived();
    }

    /// Starts the stopped port again.
    pub(crate) fn start_again(&mut self) {
        let stopped = self.stopped.take().expect("the test has stopped the port");
        self.port = Some(stopped.start().unwrap_or_else(|error| panic!("start again: {error}")));
        self.wire.settle();
    }

    /// Polls every queue once and returns the frames. Each must carry the port id.
    pub(crate) fn poll(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        for queue in &mut self.started().rx {
            poll_queue(queue, &mut frames);
        }
        frames
    }

    /// Offers frames to the port, within the capacity of the wire, until all have arrived or nothing moves.
    /// Returns the received test frames. A wire that generates its own frames is polled for as many.
    pub(crate) fn feed(&mut self, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut received: Vec<Vec<u8>> = Vec::new();
        let (mut offered, mut last_move) = (0, Instant::now());
        while received.len() < frames.len() && last_move.elapsed() < TIMEOUT {
            let before = (offered, received.len());
            while offered < frames.len()
                && offered - received.len() < self.traits.capacity
                && self.wire.offer(&frames[offered])
            {
                offered += 1;
            }
            let polled = self.poll();
            let delivers = self.traits.delivers;
            received.extend(polled.into_iter().filter(|frame| !delivers || identify(frame).is_some()));
            if before != (offered, received.len()) {
                last_move = Instant::now();
            } else {
                std::thread::yield_now();
            }
        }
        received
    }

    /// Returns a packet with these bytes, in as many segments as it needs.
    pub(crate) fn packet(&self, bytes: &[u8]) -> Packet {
        packet(&self.pool, bytes)
    }

    /// Sends frames on transmit queue 0, within the capacity of the wire. Panics if the port stops accepting
    /// them.
    pub(crate) fn send(&mut self, frames: &[Vec<u8>]) {
        let mut left: Vec<Packet> = frames.iter().rev().map(|frame| self.packet(frame)).collect();
        self.send_packets(&mut left);
    }

    /// Sends packets like [`Self::send`], the last one first.
    pub(crate) fn send_packets(&mut self, left: &mut Vec<Packet>) {
        let (mut batch, mut sent, before, mut last_move) = (Batch::new(), 0, self.arrived.len(), Instant::now());
        while !(left.is_empty() && batch.is_empty()) {
            assert!(
                last_move.elapsed() < TIMEOUT,
                "the port takes no more after {sent} packets: \
                 {}",
                self.diagnostics()
            );
            let watch = self.traits.shows_sent && !self.traits.shows_sent_after_stop;
            let on_wire = if watch { sent + batch.len() - (self.arrived.len() - before).min(sent) } else { 0 };
            let room = self.traits.capacity.saturating_sub(on_wire).min(batch.space());
            let from = left.len().saturating_sub(room);
            batch.extend(left.drain(from..).rev());
            let queue = &mut self.started().tx[0];
            let n = queue.transmit(&mut batch);
            if n == 0 {
                queue.reclaim();
            }
            sent += n;
            let arrived = self.arrived.len();
            self.take_arrived();
            if n > 0 || self.arrived.len() > arrived {
                last_move = Instant::now();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Waits until the port has sent `count` test frames and takes them. Stops the port if the wire shows
    /// them only then.
    pub(crate) fn take_sent(&mut self, count: usize) -> Vec<Vec<u8>> {
        if self.traits.shows_sent_after_stop {
            self.stop();
        }
        let (mut last, mut last_move) = (self.arrived.len(), Instant::now());
        while self.traits.shows_sent && self.arrived.len() < count && last_move.elapsed() < TIMEOUT {
            if let Some(port) = &mut self.port {
                port.tx.iter_mut().for_each(|queue| queue.reclaim());
            }
            self.take_arrived();
            if self.arrived.len() > last {
                (last, last_move) = (self.arrived.len(), Instant::now());
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        std::mem::take(&mut self.arrived)
    }

    /// Collects the frames that the port has sent.
    pub(crate) fn take_arrived(&mut self) {
        let frames = self.wire.arrived();
        self.arrived.extend(frames.into_iter().filter(|frame| identify(frame).is_some()));
    }

    /// Returns the counters as text, for messages.
    pub(crate) fn diagnostics(&mut self) -> String {
        match &mut self.port {
            None => "not started".to_owned(),
            Some(it) => format!(
                "{:?}; received {:?}; sent {:?}; {:?}",
                it.port.capabilities().mode,
                it.port.rx_statistics(),
                it.port.tx_statistics(),
                it.port.extra_statistics()
            ),
        }
    }

    /// Checks that both directions carry these frames in order and without loss.
    #[track_caller]
    pub(crate) fn assert_exchanges(&mut self, frames: &[Vec<u8>]) {
        let received = self.feed(frames);
        if self.traits.delivers {
            let diagnostics = self.diagnostics();
            assert_same(&received, frames, "received", &diagnostics);
        } else {
            assert!(
                received.len() >= frames.len(),
                "received {} generated frames: {}",
                received.len(),
                self.diagnostics()
            );
        }
        self.send(frames);
        let diagnostics = self.diagnostics();
        let sent = self.take_sent(frames.len());
        if self.traits.shows_sent {
            assert_same(&sent, frames, "sent", &diagnostics);
        }
    }

    /// Stops the port and checks that every buffer has returned.
    fn finish(mut self) {
        self.stop();
        drop((self.port.take(), self.stopped.take(), self.wire));
        assert_eq!(self.pool.outstanding(), 0, "buffers that did not come back to the pool");
    }
}

/// Polls a queue once.
pub(crate) fn poll_queue(queue: &mut RxQueue, frames: &mut Vec<Vec<u8>>) {
    let mut batch = Batch::new();
    let n = queue.receive(&mut batch);
    assert_eq!(n, batch.len());
    for packet in batch.iter() {
        assert_eq!(packet.in_port().map(PortId::number), Some(PORT));
        frames.push(bytes(packet));
    }
}

/// Panics at the first difference.
#[track_caller]
pub(crate) fn assert_same(got: &[Vec<u8>], want: &[Vec<u8>], what: &str, diagnostics: &str) {
    if let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) {
        panic!(
            "{what}: frame {at} is {:?} of {} bytes, expected {:?} of {} bytes: {diagnostics}",
            identify(&got[at]),
            got[at].len(),
            identify(&want[at]),
            want[at].len()
        );
    }
    assert_eq!(got.len(), want.len(), "{what}: number of frames: {diagnostics}");
}

/// Marks the payload of a test frame.
const MAGIC: [u8; 4] = *b"WPCT";
/// Length of the shortest test frame.
pub(crate) const SHORTEST: usize = 60;

/// Returns a test frame of `size` bytes without frame check sequence: a UDP datagram with flow, number and a
/// pattern. Datagrams of odd flows have a checksum.
pub(crate) fn frame(flow: u32, number: u32, size: usize) -> Vec<u8> {
    assert!(size >= SHORTEST);
    let mut frame = vec![0; size];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 0xd0, 2, 0, 0, 0, 0, 0xe0]);
    frame[12..14].copy_from_slice(&[8, 0]);
    let total = (size - 14) as u16;
    frame[14..24].copy_from_slice(&[0x45, 0, (total >> 8) as u8, total as u8, 0, 0, 0x40, 0, 64, 17]);
    frame[18..20].copy_from_slice(&(number as u16).to_be_bytes());
    frame[26..34].copy_from_slice(&[198, 18, 0, 1, 198, 18, 1, 1]);
    let sum: u32 = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    frame[24..26].copy_from_slice(&(!(folded as u16 + (folded >> 16) as u16)).to_be_bytes());
    frame[34..36].copy_from_slice(&(0x4000 + (flow as u16 & 0x3fff)).to_be_bytes());
    frame[36..38].copy_from_slice(&9999u16.to_be_bytes());
    frame[38..40].copy_from_slice(&(total - 20).to_be_bytes());
    frame[42..46].copy_from_slice(&MAGIC);
    frame[46..50].copy_from_slice(&flow.to_be_bytes());
    frame[50..54].copy_from_slice(&number.to_be_bytes());
    for (at, byte) in frame[54..].iter_mut().enumerate() {
        *byte = (at as u32 ^ number) as u8;
    }
    if flow % 2 == 1 {
        checksum::udp4([198, 18, 0, 1].into(), [198, 18, 1, 1].into(), &mut frame[34..]);
    }
    frame
}

/// Returns flow and number of a test frame; `None` for other frames. Panics if a test frame is corrupted.
pub(crate) fn identify(bytes: &[u8]) -> Option<(u32, u32)> {
    if bytes.len() < SHORTEST || bytes[42..46] != MAGIC {
        return None;
    }
    let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let (flow, number) = (word(46), word(50));
    assert!(
        bytes == frame(flow, number, bytes.len()),
        "frame {number} of flow {flow}, {} bytes, is damaged",
        bytes.len()
    );
    Some((flow, number))
}

/// Returns test frames of one flow with consecutive numbers and mixed sizes.
pub(crate) fn frames(numbers: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    numbers.map(|number| frame(0, number, SHORTEST + (number as usize * 97) % 1454)).collect()
}
