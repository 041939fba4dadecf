//! Receivers under packets of anybody, beside a plain model, for the fuzzer and for a test with random bytes.
//!
//! The bytes choose frames: genuine packets of a few streams, changed ones, signatures that lie about their length, and
//! frames of any bytes. The model remembers every sequence number, so it needs memory for each packet. All counts of
//! the receiver alone and of the one in the generator must be those of the model.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{ReceiveResult, ReceivedPort, Streams};
use crate::fuzz_input::Input;
use crate::pktgen::signature::{FILLER, LEN, Reading, Signature};
use crate::pktgen::size::FCS;
use crate::pktgen::tracker::{Order, Tracker};

/// Numbers of runs. The generator in the test has the first one.
const RUNS: [u16; 4] = [0xbeef, 0, 0xffff, 0x1234];
/// Numbers of streams. Those of the generator in the test are below [`OWN_STREAMS`].
const STREAMS: [u32; 4] = [0, 1, 2, 0xff_ffff];
const OWN_STREAMS: usize = 2;
/// Threshold of the densities.
const THRESHOLD: u16 = 5;
/// Frames of a sequence.
const STEPS: usize = 2000;
/// Longest window of a stream in packets, by the documentation of the figure `late`.
const LONGEST_WINDOW: u64 = 1 << 16;

/// A stream that remembers every sequence number.
#[derive(Default)]
struct Model {
    seen: BTreeSet<u64>,
    /// Sequence number after the highest one.
    next: u64,
    order: Order,
}

impl Model {
    /// Takes a packet. Its whole sequence number is the one nearest to the expected one.
    fn receive(&mut self, number: u32, window: u64) {
        let (next, turn) = (i128::from(self.next), 1i128 << 32);
        let first = (next >> 32) * turn + i128::from(number);
        let near =
            [first - turn, first, first + turn].into_iter().find(|it| (-turn / 2..turn / 2).contains(&(it - next)));
        let Ok(sequence) = u64::try_from(near.expect("one of them is near")) else {
            self.order.unknown_stream += 1;
            return;
        };
        let is_new = self.seen.insert(sequence);
        if sequence >= self.next {
            self.next = sequence + 1;
        } else {
            let distance = self.next - sequence;
            if distance > window {
                self.order.beyond_window += 1;
            } else if !is_new {
                self.order.duplicates += 1;
                return;
            }
            self.order.reordered += 1;
            self.order.max_distance = self.order.max_distance.max(distance);
        }
        self.order.distinct += 1;
    }
}

/// Counts of a run in the model.
#[derive(Default)]
struct RunModel {
    intact: u64,
    bytes: u64,
    corrupt: u64,
    untracked: u64,
    streams: BTreeMap<u32, Model>,
}

/// Both receivers and their models.
struct Receivers {
    streams: Streams,
    port: ReceivedPort,
    now: u64,
    /// Runs in the order of their first packets.
    runs: Vec<(u16, RunModel)>,
    tracker: Tracker,
    own: Vec<Model>,
    /// Intact packets of streams that the generator does not have.
    unknown: u64,
}

impl Receivers {
    fn new(limit: usize) -> Self {
        Self {
            streams: Streams::new(limit),
            port: ReceivedPort { name: "fuzz".to_owned(), ..ReceivedPort::default() },
            now: 0,
            runs: Vec::new(),
            tracker: Tracker::new(OWN_STREAMS, Some(THRESHOLD)),
            own: (0..OWN_STREAMS).map(|_| Model::default()).collect(),
            unknown: 0,
        }
    }

    /// Gives a frame to both receivers and their models, as their threads do.
    fn receive(&mut self, frame: &[u8]) {
        let len = (frame.len() + FCS) as u64;
        let found = Signature::read_any(frame);
        self.port.meter.add(self.now, 1, len);
        let is_of_run = self.streams.receive(frame, len, self.now);
        assert_eq!(is_of_run, self.expect(found, len), "{found:?}");
        self.port.foreign += u64::from(!is_of_run);

        let own = Signature::read(frame, RUNS[0]);
        let expected = match found {
            Some((magic, _)) if magic != RUNS[0] => Reading::Foreign,
            Some((_, signature)) => signature.map_or(Reading::Corrupt, Reading::Valid),
            None => Reading::Foreign,
        };
        assert_eq!(own, expected);
        if let Reading::Valid(signature) = own {
            self.tracker.receive(&signature, self.now);
            match self.own.get_mut(signature.stream as usize) {
                Some(model) => model.receive(signature.sequence, self.tracker.window()),
                None => self.unknown += 1,
            }
        }
    }

    /// Takes what a frame shows into the model. Returns false if it is foreign.
    fn expect(&mut self, found: Option<(u16, Option<Signature>)>, len: u64) -> bool {
        let Some((magic, signature)) = found else { return false };
        let followed: usize = self.runs.iter().map(|(_, run)| run.streams.len()).sum();
        let known = self.runs.iter().position(|(number, _)| *number == magic);
        let Some(signature) = signature else {
            let Some(known) = known else { return false };
            self.runs[known].1.corrupt += 1;
            return true;
        };
        let at = known.unwrap_or_else(|| {
            self.runs.push((magic, RunModel::default()));
            self.runs.len() - 1
        });
        let run = &mut self.runs[at].1;
        (run.intact, run.bytes) = (run.intact + 1, run.bytes + len);
        if followed == self.streams.limit && !run.streams.contains_key(&signature.stream) {
            run.untracked += 1;
            return true;
        }
        // Numbers below the first one are possible.
        let first = || Model { next: (1 << 32) | u64::from(signature.sequence), ..Model::default() };
        // Fewer streams than in the documentation of the window lead to the longest one.
        run.streams.entry(signature.stream).or_insert_with(first).receive(signature.sequence, LONGEST_WINDOW);
        true
    }

    /// Compares the receiver alone with its model.
    fn check_streams(self, frames: u64) {
        let Self { streams, port, runs, .. } = self;
        // Memory is that of the allowed streams, and of the runs that have begun.
        assert!(streams.streams.len() <= streams.limit && streams.streams.len() == streams.index.len());
        assert!(streams.streams.iter().all(|stream| stream.bits.len() as u64 * 64 <= LONGEST_WINDOW));
        assert_eq!((streams.runs.len(), streams.places.len()), (runs.len(), 1 << 16));
        let found = streams.finish();
        for (run, (number, expected)) in found.iter().zip(&runs) {
            assert_eq!(run.number, *number, "runs are in the order of their first packets");
            let counts = (run.meter.packets, run.meter.bytes, run.corrupt, run.untracked);
            assert_eq!(counts, (expected.intact, expected.bytes, expected.corrupt, expected.untracked));
            assert_eq!(run.streams.len(), expected.streams.len());
            for (stream, (number, model)) in run.streams.iter().zip(&expected.streams) {
                assert_eq!((stream.run, stream.number, stream.order), (run.number, *number, model.order));
                let lowest = model.seen.first().copied().unwrap_or(model.next);
                assert_eq!((stream.first, stream.highest), (lowest as u32, (model.next - 1) as u32));
                let lost = model.next - lowest - model.seen.len() as u64;
                // Copies beyond the window count as first ones.
                let copies = model.order.distinct - model.seen.len() as u64;
                assert!(copies <= model.order.beyond_window && model.order.unknown_stream == 0);
                assert_eq!(stream.lost, lost.saturating_sub(copies));
            }
            let sum = run.sum();
            assert_eq!(run.meter.packets, sum.received + sum.duplicates + sum.untracked);
            assert!(sum.reordered <= sum.received && sum.beyond_window <= sum.reordered);
        }
        let result = ReceiveResult {
            duration: Duration::from_nanos(self.now),
            ports: vec![port],
            runs: found,
            longest_stall: Duration::ZERO,
            stalls: 0,
            failure: None,
            is_stopped: false,
        };
        let sum = result.sum();
        assert_eq!(frames, sum.received + sum.duplicates + sum.untracked + sum.corrupt + result.foreign());
        assert!(sum.loss_ratio().is_none_or(|ratio| (0.0..=1.0).contains(&ratio)));
        let json = result.to_json();
        assert_eq!((&json["packets"], &json["lost"]), (&frames.into(), &sum.lost.into()));
        assert!(result.text().contains(&format!("port fuzz: {frames} packets, ")));
    }

    /// Compares the receiver in the generator with its model.
    fn check_tracker(&mut self) {
        let mut expected = Order { unknown_stream: self.unknown, ..Order::default() };
        for Model { order, .. } in &self.own {
            expected.distinct += order.distinct;
            expected.duplicates += order.duplicates;
            expected.reordered += order.reordered;
            expected.max_distance = expected.max_distance.max(order.max_distance);
            expected.beyond_window += order.beyond_window;
            expected.unknown_stream += order.unknown_stream;
        }
        assert_eq!(self.tracker.order, expected);
        assert_eq!(self.tracker.latency.len(), expected.distinct);
        assert!(
            self.tracker.jitter().is_none_or(|(mean, max)| mean >= 0.0 && mean <= max && max < (1u64 << 39) as f64)
        );
        let density = self.tracker.take_density().expect("a threshold");
        assert_eq!(density.displacements.values().sum::<u64>() + density.left_out, expected.distinct);
        assert!(density.held.keys().all(|held| *held <= THRESHOLD.into()));
        assert!(density.displacements.keys().all(|by| by.unsigned_abs() <= THRESHOLD.into()));
    }
}

/// Returns a genuine packet.
fn genuine(magic: u16, signature: Signature, headers: usize) -> Vec<u8> {
    let mut frame = vec![0; headers];
    frame.extend_from_slice(&FILLER[..usize::from(signature.payload_len) - LEN]);
    frame.extend_from_slice(&signature.emit(magic));
    frame
}

/// Checks the receivers with the frames that the bytes choose. The first byte is the number of streams that the
/// receiver alone follows. A frame has a byte for its kind, another one for its run and stream, and more by its kind.
///
/// # Panics
/// If a receiver does not agree with its model.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut receivers = Receivers::new(usize::from(input.byte() % 8) + 1);
    let mut sequences = [[0u32; STREAMS.len()]; RUNS.len()];
    let mut frames = 0;
    while !input.0.is_empty() && frames < STEPS as u64 {
        let (kind, which) = (input.byte(), usize::from(input.byte()));
        let (run, stream) = (which % RUNS.len(), which / RUNS.len() % STREAMS.len());
        // Seconds pass sometimes.
        receivers.now += if kind & 0x80 == 0 { 1000 } else { 300_000_000 };
        let before = &mut sequences[run][stream];
        let number = match kind % 8 {
            0 | 5 | 6 => before.wrapping_add(1),
            1 => before.wrapping_add_signed((input.byte() as i8).into()),
            2 => before.wrapping_add_signed((input.half() as i16).into()),
            // Around the end of a window, and of half of all numbers.
            3 => before.wrapping_add_signed((input.byte() as i8).into()) ^ (1 << 16),
            _ => before.wrapping_add_signed((input.byte() as i8).into()) ^ (1 << 31),
        };
        let payload_len = (LEN + which / 16) as u16;
        // Clocks of others are anywhere.
        let time = if kind & 0x40 == 0 { receivers.now } else { u64::from(which as u8) << 32 };
        let mut signature = Signature { payload_len, stream: STREAMS[stream], sequence: number, time };
        let headers = usize::from(kind / 8 % 4) * 14;
        let frame = match kind % 8 {
            5 => {
                // One byte of the payload changes, of its headers, or nothing.
                let mut frame = genuine(RUNS[run], signature, headers);
                let (at, change) = (usize::from(input.byte()) % frame.len(), input.byte());
                frame[at] ^= change;
                let is_intact = change == 0 || at < headers;
                assert_eq!(matches!(Signature::read_any(&frame), Some((_, Some(_)))), is_intact);
                frame
            }
            6 => {
                // The signature has any length.
                let mut frame = vec![0; headers];
                frame.extend_from_slice(&FILLER[..which / 16]);
                signature.payload_len = input.half();
                frame.extend_from_slice(&signature.emit(RUNS[run]));
                let fill = usize::from(signature.payload_len).checked_sub(LEN);
                let is_intact = fill
                    .is_some_and(|fill| fill <= FILLER.len() && frame[..frame.len() - LEN].ends_with(&FILLER[..fill]));
                assert_eq!(matches!(Signature::read_any(&frame), Some((_, Some(_)))), is_intact);
                frame
            }
            7 => input.bytes(which).to_vec(),
            _ => {
                *before = number;
                let frame = genuine(RUNS[run], signature, headers);
                let time = time & ((1 << 40) - 1);
                assert_eq!(Signature::read_any(&frame), Some((RUNS[run], Some(Signature { time, ..signature }))));
                frame
            }
        };
        receivers.receive(&frame);
        frames += 1;
    }
    receivers.check_tracker();
    receivers.check_streams(frames);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_agree_with_a_plain_model() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..200 {
            let bytes: Vec<u8> = (0..random.usize(..6000)).map(|_| random.u8(..)).collect();
            run(&bytes);
        }
    }
}
