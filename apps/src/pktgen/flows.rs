//! The packets that a port sends: flows of header stacks in an order, or the frames of a capture.

use std::fs::File;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use wirepath_pmd::drivers::r#virtual::pcap::Reader;
use wirepath_pmd::port::MacAddr;
use wirepath_wire::checksum::{self, Sum};

use super::headers::{MAX_FLOWS, Stack};
use super::signature::{FILLER, LEN, MAX_PAYLOAD, MAX_STREAMS, Signature};
use super::size::{FCS, Sizes};

/// Bytes that the headers of all flows of a port may take, and the frames of a capture.
const MAX_MEMORY: usize = 1 << 30;
/// Frames of a capture.
const MAX_FRAMES: usize = 1 << 22;

/// Order in which the packets of the flows are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Pick {
    /// One after the other.
    #[default]
    Turn,
    /// Each with the same probability.
    Random,
    /// Flow `n` with a probability that is proportional to `1 / n^s` (Zipf).
    Zipf(f64),
}

impl FromStr for Pick {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.split_once(':')) {
            ("turn", _) => Ok(Self::Turn),
            ("random", _) => Ok(Self::Random),
            ("zipf", _) => Ok(Self::Zipf(1.0)),
            (_, Some(("zipf", s))) => match s.parse() {
                Ok(s) if (0.0..=10.0).contains(&s) => Ok(Self::Zipf(s)),
                _ => Err(format!("found \"{s}\", expected an exponent from 0 to 10")),
            },
            _ => Err(format!("found \"{text}\", expected turn, random, zipf or zipf:EXPONENT")),
        }
    }
}

/// Traffic of the sending ports.
#[derive(Clone, Debug)]
pub enum Traffic {
    /// Flows with signatures, which the receiver measures.
    Flows(FlowSet),
    /// Frames of a capture, as they are.
    Replay(Arc<Replay>),
}

impl Traffic {
    /// Mean length of the frames in bytes, with frame check sequence.
    pub fn mean_size(&self) -> f64 {
        match self {
            Self::Flows(flows) => flows.sizes.mean(),
            Self::Replay(replay) => replay.mean(),
        }
    }
}

/// Flows of one or more stacks.
#[derive(Clone, Debug)]
pub struct FlowSet {
    /// The header stacks. Their flows follow each other.
    pub stacks: Vec<Stack>,
    /// Largest number of flows of each stack; `None`: all.
    pub flows: Option<u64>,
    /// Lengths of the frames.
    pub sizes: Sizes,
    /// Order of the flows.
    pub pick: Pick,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl FlowSet {
    /// Number of flows of a stack.
    fn flows_of(&self, stack: &Stack) -> u64 {
        self.flows.map_or(stack.flows(), |most| most.min(stack.flows()))
    }

    /// Number of flows of a port.
    ///
    /// # Errors
    /// If they are too many.
    pub fn count(&self) -> Result<usize, String> {
        let total: u64 = self.stacks.iter().fold(0, |sum, stack| sum.saturating_add(self.flows_of(stack)));
        if total > MAX_FLOWS {
            return Err(format!(
                "the ranges have {total} flows, and {MAX_FLOWS} are possible; make a range smaller, or give --flows"
            ));
        }
        Ok(total as usize)
    }

    /// Checks the sizes against the headers and the longest frame that a port sends, without frame check sequence.
    ///
    /// # Errors
    /// The limit.
    pub fn check_sizes(&self, longest: usize, port: &str) -> Result<(), String> {
        let (least, most) = self.sizes.limits();
        for stack in &self.stacks {
            let needed = stack.len() + LEN + FCS;
            if least < needed {
                return Err(format!(
                    "size {least} is too short: the headers need {} bytes, the signature {LEN} and the frame check \
                     sequence {FCS}, so at least {needed}",
                    stack.len()
                ));
            }
        }
        if most - FCS > longest {
            return Err(format!(
                "size {most} is too long: port {port} sends at most {} bytes with the frame check sequence (its MTU)",
                longest + FCS
            ));
        }
        Ok(())
    }
}

/// Frames of a capture, with the intervals between them.
#[derive(Debug, Default)]
pub struct Replay {
    bytes: Vec<u8>,
    /// End of each frame in `bytes`, and nanoseconds from its start to that of the next frame.
    frames: Vec<(usize, u64)>,
}

impl Replay {
    /// Reads a pcap or pcapng file into memory.
    ///
    /// # Errors
    /// If the file cannot be read, is malformed, too large or empty.
    pub fn load(path: &Path) -> Result<Self, String> {
        let error = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let file = File::open(path).map_err(|e| error(&e))?;
        let mut reader = Reader::new(file).map_err(|e| error(&e))?;
        let (mut replay, mut last) = (Self::default(), None);
        while let Some(record) = reader.next().map_err(|e| error(&e))? {
            if record.data.is_empty() {
                continue;
            }
            if let Some(last) = last.replace(record.timestamp)
                && let Some((_, interval)) = replay.frames.last_mut()
            {
                *interval = record.timestamp.saturating_sub(last);
            }
            replay.push(record.data).map_err(|why| error(&why))?;
        }
        if replay.frames.is_empty() {
            return Err(error(&"the file has no frames"));
        }
        Ok(replay)
    }

    /// Takes frames without intervals between them.
    ///
    /// # Errors
    /// If they are too many.
    pub fn from_frames<'a>(frames: impl Iterator<Item = &'a [u8]>) -> Result<Self, String> {
        let mut replay = Self::default();
        for frame in frames {
            replay.push(frame)?;
        }
        Ok(replay)
    }

    fn push(&mut self, frame: &[u8]) -> Result<(), String> {
        self.bytes.extend_from_slice(frame);
        self.frames.push((self.bytes.len(), 0));
        if self.bytes.len() > MAX_MEMORY || self.frames.len() > MAX_FRAMES {
            return Err(format!("at most {MAX_FRAMES} frames and {} MiB are replayed", MAX_MEMORY >> 20));
        }
        Ok(())
    }

    /// Number of frames.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns true if there are no frames.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Length of the longest frame in bytes, without frame check sequence.
    pub fn longest(&self) -> usize {
        (0..self.len()).map(|n| self.frame(n).0.len()).max().unwrap_or(0)
    }

    /// Mean length of the frames in bytes, with frame check sequence.
    pub fn mean(&self) -> f64 {
        self.bytes.len() as f64 / self.len().max(1) as f64 + FCS as f64
    }

    fn frame(&self, n: usize) -> (&[u8], u64) {
        let start = n.checked_sub(1).map_or(0, |before| self.frames[before].0);
        let (end, interval) = self.frames[n];
        (&self.bytes[start..end], interval)
    }
}

/// Packets of a sender on one port.
pub(super) enum Source {
    Flows(Box<FlowSource>),
    /// Begins again after the last frame.
    Replay {
        replay: Arc<Replay>,
        next: usize,
    },
}

/// A frame that is to be sent.
pub(super) struct Frame<'a> {
    pub(super) bytes: &'a [u8],
    /// Recorded nanoseconds until the next frame.
    pub(super) interval: u64,
}

impl Source {
    /// Returns the next frame. `now` is the time of its signature.
    #[inline]
    pub(super) fn next(&mut self, now: impl FnOnce() -> u64) -> Frame<'_> {
        match self {
            Self::Flows(flows) => Frame { bytes: flows.next(now()), interval: 0 },
            Self::Replay { replay, next } => {
                let (bytes, interval) = replay.frame(*next);
                *next = (*next + 1) % replay.len();
                Frame { bytes, interval }
            }
        }
    }
}

/// The flows of one sender on one port.
pub(super) struct FlowSource {
    stacks: Vec<Stack>,
    /// Stack and start of the headers of each flow.
    flows: Vec<(u32, u32)>,
    headers: Vec<u8>,
    sequences: Vec<u32>,
    sizes: Sizes,
    pick: Pick,
    /// Sums of the probabilities of the flows, for Zipf.
    cumulated: Vec<f64>,
    random: fastrand::Rng,
    /// Share of the packets of the port.
    share: f64,
    /// Sum of each number of filler bytes.
    sums: Arc<Vec<Sum>>,
    magic: u16,
    first_stream: u32,
    next: usize,
    sent: u64,
    scratch: Vec<u8>,
}

/// Part of the flows that one of several senders of a port has: number `index` of `of`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) index: usize,
    pub(super) of: usize,
}

/// Returns the sum of each possible number of filler bytes.
pub(super) fn filler_sums() -> Arc<Vec<Sum>> {
    Arc::new((0..=MAX_PAYLOAD).map(|n| checksum::sum(&FILLER[..n])).collect())
}

impl FlowSource {
    /// Makes the flows of a sender. Its streams are numbered from `first_stream`.
    pub(super) fn new(
        set: &FlowSet,
        addresses: (Option<MacAddr>, Option<MacAddr>),
        part: Part,
        (magic, first_stream): (u16, u32),
        sums: Arc<Vec<Sum>>,
    ) -> Result<Self, String> {
        let total = set.count()?;
        let mut stacks = set.stacks.clone();
        stacks.iter_mut().for_each(|stack| stack.set_addresses(addresses.0, addresses.1));
        let (mut headers, mut flows) = (Vec::new(), Vec::new());
        let mut number = 0;
        for (index, stack) in stacks.iter().enumerate() {
            for flow in 0..set.flows_of(stack) {
                if number % part.of == part.index {
                    flows.push((index as u32, headers.len() as u32));
                    stack.emit(flow, &mut headers);
                }
                number += 1;
            }
            if headers.len() > MAX_MEMORY {
                return Err(format!("the headers of {total} flows need more than {} MiB", MAX_MEMORY >> 20));
            }
        }
        let mut cumulated = Vec::new();
        let mut share = flows.len() as f64 / number.max(1) as f64;
        if let Pick::Zipf(s) = set.pick {
            let mut sum = 0.0;
            cumulated.extend((0..flows.len()).map(|n| {
                // The rank is that among all flows of the port.
                sum += ((n * part.of + part.index + 1) as f64).powf(-s);
                sum
            }));
            share = sum / (1..=number).map(|rank| (rank as f64).powf(-s)).sum::<f64>();
        }
        Ok(Self {
            sequences: vec![0; flows.len()],
            stacks,
            flows,
            headers,
            sizes: set.sizes.clone(),
            pick: set.pick,
            cumulated,
            share,
            random: fastrand::Rng::with_seed(set.seed.wrapping_add(part.index as u64)),
            sums,
            magic,
            first_stream,
            next: 0,
            sent: 0,
            scratch: vec![0; MAX_PAYLOAD + 512],
        })
    }

    /// Number of streams.
    pub(super) fn streams(&self) -> usize {
        self.flows.len()
    }

    /// Share of the packets of the port, from 0 to 1, that this sender sends.
    pub(super) fn share(&self) -> f64 {
        self.share
    }

    #[inline]
    fn pick(&mut self) -> usize {
        let n = self.flows.len();
        match self.pick {
            Pick::Turn => {
                let flow = self.next;
                self.next = if flow + 1 == n { 0 } else { flow + 1 };
                flow
            }
            Pick::Random => self.random.usize(..n),
            Pick::Zipf(_) => {
                let point = self.random.f64() * self.cumulated[n - 1];
                self.cumulated.partition_point(|sum| *sum <= point).min(n - 1)
            }
        }
    }

    /// Writes the next packet, whose signature has the time `now`.
    #[inline]
    fn next(&mut self, now: u64) -> &[u8] {
        let flow = self.pick();
        let (stack, start) = self.flows[flow];
        let stack = &self.stacks[stack as usize];
        let headers = stack.len();
        // The caller has checked the sizes.
        let len = self.sizes.of(self.sent, &mut self.random) - FCS;
        self.sent += 1;
        let payload_len = len - headers;
        let fill = payload_len - LEN;
        let sequence = self.sequences[flow];
        self.sequences[flow] = sequence.wrapping_add(1);
        let stream = self.first_stream + flow as u32;
        let signature = Signature { payload_len: payload_len as u16, stream, sequence, time: now }.emit(self.magic);
        let sum = self.sums[fill].and_at(fill, checksum::sum(&signature));
        let frame = &mut self.scratch[..len];
        frame[..headers].copy_from_slice(&self.headers[start as usize..][..headers]);
        frame[headers..headers + fill].copy_from_slice(&FILLER[..fill]);
        frame[headers + fill..].copy_from_slice(&signature);
        stack.complete(frame, sum, payload_len);
        frame
    }
}

const _: () = assert!(MAX_FLOWS as usize * 16 <= MAX_STREAMS);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pktgen::signature::Reading;

    fn source(text: &str, sizes: &str, pick: Pick, part: Part) -> FlowSource {
        let set = FlowSet {
            stacks: vec![Stack::parse(text).unwrap()],
            flows: None,
            sizes: sizes.parse().unwrap(),
            pick,
            seed: 7,
        };
        FlowSource::new(&set, (None, None), part, (9, 100), filler_sums()).unwrap()
    }

    const WHOLE: Part = Part { index: 0, of: 1 };

    #[test]
    fn frames_have_signatures_in_sequence() {
        let mut source = source("ipv4 / udp src 1-3", "64,1518,65", Pick::Turn, WHOLE);
        for n in 0..9u32 {
            let frame = source.next(n.into()).to_vec();
            assert_eq!(frame.len(), [60, 1514, 61][n as usize % 3]);
            let Reading::Valid(signature) = Signature::read(&frame, 9) else { panic!("{frame:?}") };
            assert_eq!((signature.stream, signature.sequence, signature.time), (100 + n % 3, n / 3, n.into()));
            let headers = wirepath_wire::parse(&frame).unwrap();
            let ip = headers.outer().ipv4(&frame).unwrap();
            assert!(checksum::Transport::Udp.verify(&frame[34..], ip.pseudo().word(0)), "frame {n}");
        }
    }

    #[test]
    fn senders_share_the_flows() {
        let flows = |index| source("ipv4 / udp src 1-5", "64", Pick::Turn, Part { index, of: 2 }).streams();
        assert_eq!((flows(0), flows(1)), (3, 2));
    }

    #[test]
    fn zipf_prefers_the_first_flows() {
        let mut source = source("ipv4 / udp src 1-100", "64", Pick::Zipf(1.0), WHOLE);
        let mut counts = [0f64; 100];
        (0..100_000).for_each(|_| counts[source.pick()] += 1.0);
        // 1 / H(100) = 0.1928; the second flow has half of it.
        assert!((counts[0] / 1e5 - 0.1928).abs() < 0.01, "{}", counts[0]);
        assert!((counts[1] / counts[0] - 0.5).abs() < 0.05, "{}", counts[1]);
        assert!("zipf:x".parse::<Pick>().is_err() && "zipf:1.2".parse() == Ok(Pick::Zipf(1.2)));
    }

    #[test]
    fn too_many_flows_and_wrong_sizes_name_the_limit() {
        let mut set = FlowSet {
            stacks: vec![Stack::parse("ipv4 src 10.0.0.0/8 / udp").unwrap()],
            flows: None,
            sizes: "64".parse().unwrap(),
            pick: Pick::Turn,
            seed: 0,
        };
        assert!(set.count().unwrap_err().contains("16777216 flows, and 1048576 are possible"));
        set.flows = Some(10);
        assert_eq!((set.count(), set.check_sizes(1514, "p")), (Ok(10), Ok(())));
        set.stacks = vec![Stack::parse("ipv6 / udp").unwrap()];
        assert!(set.check_sizes(1514, "p").unwrap_err().contains("so at least 84"));
        set.sizes = "1519".parse().unwrap();
        assert!(set.check_sizes(1514, "p").unwrap_err().contains("port p sends at most 1518"));
    }
}
