use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wirepath_packet::PortId;
use wirepath_pipeline::observe::{CaptureReader, CapturedPacket, LeftOut, Point, WallClock};
use wirepath_pmd::drivers::r#virtual::pcap::Precision;
use wirepath_pmd::drivers::r#virtual::pcap::blocks::{
    self, Interface, InterfaceStatistics, PacketBlock, PacketDirection,
};

/// Bytes of a part, about.
const PART: usize = 256 << 10;

/// When a capture ends by itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct CaptureLimits {
    /// Number of packets in the file.
    pub count: Option<u64>,
    /// Largest number of bytes of the file without the statistics at its end.
    pub bytes: Option<u64>,
    /// Length of the capture.
    pub time: Option<Duration>,
}

/// Reason why a capture has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// [`CaptureLimits::count`].
    Count,
    /// [`CaptureLimits::bytes`].
    Bytes,
    /// [`CaptureLimits::time`].
    Time,
    /// The program has stopped.
    Stop,
    /// The reader of the file does not want more.
    Client,
    /// The segment of the capture was removed.
    SegmentRemoved,
}

impl EndReason {
    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Bytes => "bytes",
            Self::Time => "seconds",
            Self::Stop => "stop",
            Self::Client => "client",
            Self::SegmentRemoved => "segment_removed",
        }
    }
}

/// The blocks of a capture.
#[derive(Debug)]
pub(super) struct Pcapng {
    reader: CaptureReader,
    limits: CaptureLimits,
    clock: WallClock,
    /// Names of the interfaces.
    names: Vec<String>,
    /// Packets in the file by interface.
    written: Vec<u64>,
    bytes: u64,
    begin: Instant,
    begin_time: u64,
    end: Option<EndReason>,
}

impl Pcapng {
    /// Creates a capture of a program with these ports.
    pub(super) fn new(reader: CaptureReader, limits: CaptureLimits, ports: &[String]) -> Self {
        let names: Vec<String> = ports.iter().cloned().chain(["program".to_owned()]).collect();
        let mut clock = WallClock::new();
        let begin_time = clock.now();
        let written = vec![0; names.len()];
        Self { reader, limits, clock, names, written, bytes: 0, begin: Instant::now(), begin_time, end: None }
    }

    pub(super) fn reader(&self) -> &CaptureReader {
        &self.reader
    }

    /// Appends the blocks at the beginning.
    pub(super) fn append_head(&mut self, out: &mut Vec<u8>) {
        blocks::section(out);
        let last = self.names.len() - 1;
        for (i, name) in self.names.iter().enumerate() {
            let description = if i == last { "packets without a port" } else { "" };
            let snap = self.reader.spec().snap as u32;
            blocks::interface(out, &Interface { name, description, snap, precision: Precision::Nano });
        }
        self.bytes = out.len() as u64;
    }

    /// Appends the packets that are there, up to a number of bytes. Returns true if there will be no others.
    pub(super) fn append_packets(&mut self, out: &mut Vec<u8>) -> bool {
        if self.limits.time.is_some_and(|time| self.begin.elapsed() >= time) {
            self.end(EndReason::Time);
        }
        if self.reader.has_lost_segment() {
            self.end(EndReason::SegmentRemoved);
        }
        // Packets that were copied before the end are still written.
        let ended = self.reader.has_ended();
        while out.len() < PART {
            if self.limits.count.is_some_and(|count| self.written.iter().sum::<u64>() >= count) {
                self.end(EndReason::Count);
                return true;
            }
            let Self { reader, clock, names, written, bytes, limits, .. } = self;
            let before = out.len();
            let Some(interface) = reader.read_next(|packet| append_packet(packet, clock, names.len(), out)) else {
                if ended {
                    self.end(EndReason::Stop);
                }
                return ended;
            };
            let len = (out.len() - before) as u64;
            if limits.bytes.is_some_and(|most| *bytes + len > most) {
                out.truncate(before);
                self.end(EndReason::Bytes);
                return true;
            }
            *bytes += len;
            written[interface] += 1;
        }
        false
    }

    /// Ends the capture for this reason, unless it has ended.
    pub(super) fn end(&mut self, reason: EndReason) {
        self.reader.end();
        self.end.get_or_insert(reason);
    }

    fn left_out(&self, interface: usize) -> LeftOut {
        let port = (interface + 1 < self.names.len()).then(|| PortId::new(interface as u16));
        self.reader.left_out(port)
    }

    /// Appends the blocks at the end.
    pub(super) fn append_statistics(&mut self, out: &mut Vec<u8>) {
        let now = self.clock.now();
        for (i, delivered) in self.written.iter().enumerate() {
            let left_out = self.left_out(i);
            let comment = match left_out.total() {
                0 => String::new(),
                _ => format!(
                    "left out: {} queue full, {} rate, {} without a packet",
                    left_out.queue_full, left_out.rate, left_out.no_packet
                ),
            };
            let statistics = InterfaceStatistics {
                interface: i as u32,
                period: (self.begin_time, now),
                received: delivered + left_out.total(),
                dropped: left_out.total(),
                delivered: *delivered,
                comment: &comment,
            };
            blocks::statistics(out, &statistics);
        }
    }

    /// Returns the figures of the capture.
    pub(super) fn summary(&self) -> Value {
        let all: Vec<LeftOut> = (0..self.names.len()).map(|i| self.left_out(i)).collect();
        let sum = |part: fn(&LeftOut) -> u64| all.iter().map(part).sum::<u64>();
        json!({
            "captured": self.written.iter().sum::<u64>(),
            "left_out": {
                "queue_full": sum(|it| it.queue_full),
                "rate": sum(|it| it.rate),
                "no_packet": sum(|it| it.no_packet),
            },
            "end": self.end.map(EndReason::name),
        })
    }
}

/// Appends a packet. Returns the index of its interface.
fn append_packet(packet: &CapturedPacket, clock: &mut WallClock, interfaces: usize, out: &mut Vec<u8>) -> usize {
    let interface = packet.port.map_or(usize::MAX, PortId::index).min(interfaces - 1);
    let comment;
    let (direction, comment) = match packet.point {
        Point::Rx => (PacketDirection::Inbound, ""),
        Point::Tx => (PacketDirection::Outbound, ""),
        Point::Drop(reason) => {
            comment = format!("{}: {}", reason.name(), reason.text());
            (PacketDirection::Unknown, comment.as_str())
        }
    };
    let block = PacketBlock {
        interface: interface as u32,
        timestamp: clock.time_of(packet.ticks),
        captured: packet.captured(),
        len: packet.len,
        direction,
        comment,
    };
    blocks::packet(out, &block, packet.data());
    interface
}
