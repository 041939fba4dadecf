//! Traces: the way of single packets through a program.
//!
//! A worker compares received packets with the patterns of the traces. It passes a matching packet through its stages
//! in a batch of its own, between those before and behind it. Meanwhile stages report what they consult
//! ([`crate::Context::trace`]), and the worker reports each change of the headers and each end.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, PortId};
use wirepath_wire::Parser;

use super::filter::{Filters, Pattern};
use super::headers::Headers;

/// Bytes of text of a trace.
const MAX_TEXT: usize = 16 << 10;
/// Steps of a trace.
const MAX_STEPS: usize = 256;
/// Ends of a trace: a flooded packet has many.
const MAX_ENDS: usize = 256;
/// Traces that wait for their reader.
const BUFFERS: usize = 64;
/// Bytes of a packet that are compared to find changes. They hold all headers that the parser follows.
const HEAD: usize = 256;
/// Largest number of packets of one request.
pub const MAX_TRACES: u32 = 10_000;

/// The packets to trace.
#[derive(Clone, Debug)]
pub struct TraceSpec {
    /// Only packets received by this port.
    pub port: Option<PortId>,
    /// Only packets that match as they are received.
    pub pattern: Option<Pattern>,
    /// Number of packets, at most [`MAX_TRACES`].
    pub count: u32,
}

/// A report of a stage or of the worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceStep {
    /// Name of the stage.
    pub stage: &'static str,
    /// The report.
    pub text: String,
}

/// An end of a packet on the worker that received it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceEnd {
    /// The transmit queue of a port accepted packets.
    Sent {
        /// Port.
        port: PortId,
        /// Index of the queue.
        queue: u16,
        /// Number of packets.
        packets: usize,
    },
    /// Packets were dropped.
    Dropped {
        /// Reason, as counted.
        reason: DropReason,
        /// Number of packets.
        packets: usize,
    },
    /// The control thread has the packet.
    Punted {
        /// Code of [`crate::Context::punt`].
        code: u32,
    },
    /// Another worker has the packet, and its first stage receives it. The trace does not follow it.
    HandedOver {
        /// The worker.
        worker: usize,
    },
    /// Another worker, which owns the transmit queue, has the packet to send it. The trace does not follow it.
    SentByWorker {
        /// The worker.
        worker: usize,
        /// Output port.
        port: PortId,
    },
    /// The kernel has the packet.
    Kernel,
}

/// A finished trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Value of [`crate::clock::ticks`] at the receipt.
    pub ticks: u64,
    /// Index of the worker.
    pub worker: usize,
    /// Input port.
    pub port: PortId,
    /// Index of the receive queue.
    pub queue: u16,
    /// Steps in their order.
    pub steps: Vec<TraceStep>,
    /// Ends of the packet and of the packets that were made from it or because of it. If there is none, a stage kept
    /// or freed the packet without a report.
    pub ends: Vec<TraceEnd>,
    /// True if steps or ends are missing, because there were too many.
    pub truncated: bool,
}

/// A trace while it is made. It never allocates.
#[derive(Debug)]
pub(super) struct TraceBuffer {
    text: String,
    /// Stage of each step, and the end of its text.
    steps: Vec<(&'static str, usize)>,
    ends: Vec<TraceEnd>,
    truncated: bool,
    ticks: u64,
    worker: usize,
    port: PortId,
    queue: u16,
}

impl TraceBuffer {
    fn new() -> Self {
        Self {
            text: String::with_capacity(MAX_TEXT),
            steps: Vec::with_capacity(MAX_STEPS),
            ends: Vec::with_capacity(MAX_ENDS),
            truncated: false,
            ticks: 0,
            worker: 0,
            port: PortId::new(0),
            queue: 0,
        }
    }

    /// Empties the buffer for a packet.
    pub(super) fn begin(&mut self, ticks: u64, worker: usize, port: PortId, queue: u16) {
        self.text.clear();
        self.steps.clear();
        self.ends.clear();
        (self.truncated, self.ticks, self.worker, self.port, self.queue) = (false, ticks, worker, port, queue);
    }

    pub(super) fn copy_from(&mut self, from: &Self) {
        self.begin(from.ticks, from.worker, from.port, from.queue);
        self.text.push_str(&from.text);
        self.steps.extend_from_slice(&from.steps);
        self.ends.extend_from_slice(&from.ends);
        self.truncated = from.truncated;
    }

    pub(super) fn step(&mut self, stage: &'static str, write: impl FnOnce(&mut TraceText<'_>) -> fmt::Result) {
        if self.steps.len() == MAX_STEPS {
            self.truncated = true;
            return;
        }
        // The text never fails: what does not fit is left out.
        let _ = write(&mut TraceText { text: &mut self.text, truncated: &mut self.truncated });
        self.steps.push((stage, self.text.len()));
    }

    pub(super) fn end(&mut self, end: TraceEnd) {
        match self.ends.len() < MAX_ENDS {
            true => self.ends.push(end),
            false => self.truncated = true,
        }
    }

    fn to_trace(&self) -> Trace {
        let starts = std::iter::once(0).chain(self.steps.iter().map(|(_, end)| *end));
        let step = |(start, (stage, end)): (usize, &(&'static str, usize))| TraceStep {
            stage,
            text: self.text.get(start..*end).unwrap_or_default().to_owned(),
        };
        Trace {
            ticks: self.ticks,
            worker: self.worker,
            port: self.port,
            queue: self.queue,
            steps: starts.zip(&self.steps).map(step).collect(),
            ends: self.ends.clone(),
            truncated: self.truncated,
        }
    }
}

/// Text of a step, for [`crate::Context::trace`]. It has a limit; what does not fit is left out.
#[derive(Debug)]
pub struct TraceText<'a> {
    text: &'a mut String,
    truncated: &'a mut bool,
}

impl fmt::Write for TraceText<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.text.capacity() - self.text.len();
        let fits = text.floor_char_boundary(room.min(text.len()));
        self.text.push_str(&text[..fits]);
        *self.truncated |= fits < text.len();
        Ok(())
    }
}

/// Headers and metadata of a packet at the last report.
#[derive(Debug)]
pub(super) struct Snapshot {
    head: [u8; HEAD],
    stored: usize,
    len: usize,
    vlan: Option<u16>,
    mark: Option<u32>,
}

impl Snapshot {
    pub(super) fn new() -> Self {
        Self { head: [0; HEAD], stored: 0, len: 0, vlan: None, mark: None }
    }

    pub(super) fn take(&mut self, packet: &Packet) {
        let data = packet.data();
        self.stored = data.len().min(HEAD);
        self.head[..self.stored].copy_from_slice(&data[..self.stored]);
        (self.len, self.vlan, self.mark) = (packet.len(), packet.vlan(), packet.mark());
    }

    /// Returns true if the packet differs. A part of the head that another buffer holds by now does not count.
    pub(super) fn differs(&self, packet: &Packet) -> bool {
        let data = packet.data();
        let same = data.len().min(self.stored);
        (self.len, self.vlan, self.mark) != (packet.len(), packet.vlan(), packet.mark())
            || self.head[..same] != data[..same]
    }

    /// Writes how the packet differs, and its headers.
    pub(super) fn write_change(&self, packet: &Packet, parser: &Parser, text: &mut TraceText<'_>) -> fmt::Result {
        match packet.len() as i64 - self.len as i64 {
            0 => {}
            n if n > 0 => write!(text, "{n} bytes added; ")?,
            n => write!(text, "{} bytes removed; ", -n)?,
        }
        match (self.vlan, packet.vlan()) {
            (old, new) if old == new => {}
            (_, Some(tci)) => write!(text, "VLAN tag {} for the device to insert; ", tci & 0xfff)?,
            (Some(tci), None) => write!(text, "stripped VLAN tag {} taken; ", tci & 0xfff)?,
            _ => {}
        }
        match (self.mark, packet.mark()) {
            (old, new) if old == new => {}
            (_, Some(mark)) => write!(text, "mark {mark}; ")?,
            _ => text.write_str("no mark; ")?,
        }
        write!(text, "now {}", Headers { frame: packet.data(), len: packet.len(), parser })
    }
}

/// State of a request that its reader and all workers share.
#[derive(Debug)]
pub(super) struct TraceSession {
    pub(super) spec: TraceSpec,
    pub(super) filters: Filters,
    pub(super) parser: Parser,
    /// Packets that may still be traced.
    left: AtomicU32,
    free: ArrayQueue<Box<TraceBuffer>>,
    done: ArrayQueue<Box<TraceBuffer>>,
    /// Matching packets that were not traced, because the reader was too slow.
    left_out: AtomicU64,
    /// Threads that have not taken the request yet.
    pub(super) missing: AtomicUsize,
    pub(super) ended: Arc<AtomicBool>,
}

impl TraceSession {
    pub(super) fn new(spec: TraceSpec, filters: Filters, parser: Parser, threads: usize) -> Self {
        let free = ArrayQueue::new(BUFFERS);
        for _ in 0..BUFFERS.min(spec.count as usize) {
            let _ = free.push(Box::new(TraceBuffer::new()));
        }
        Self {
            filters,
            parser: Parser { verify_ipv4: false, ..parser },
            left: AtomicU32::new(spec.count.min(MAX_TRACES)),
            free,
            done: ArrayQueue::new(BUFFERS),
            left_out: AtomicU64::new(0),
            missing: AtomicUsize::new(threads),
            ended: Arc::default(),
            spec,
        }
    }

    pub(super) fn wants(&self, port: PortId) -> bool {
        self.spec.port.is_none_or(|only| only == port)
            && self.left.load(Ordering::Relaxed) > 0
            && !self.ended.load(Ordering::Relaxed)
    }

    /// Returns a buffer for a packet, if it is to be traced.
    pub(super) fn take(&self) -> Option<Box<TraceBuffer>> {
        if self.left.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let Some(buffer) = self.free.pop() else {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        match taken {
            Ok(_) => Some(buffer),
            Err(_) => {
                let _ = self.free.push(buffer);
                None
            }
        }
    }

    pub(super) fn finish(&self, buffer: Box<TraceBuffer>) {
        // The queue has room for all buffers.
        let _ = self.done.push(buffer);
    }
}

/// The reader of traces. The request ends when it is dropped.
#[derive(Debug)]
pub struct TraceReader {
    session: Arc<TraceSession>,
    read: u32,
}

impl TraceReader {
    pub(super) fn new(session: Arc<TraceSession>) -> Self {
        Self { session, read: 0 }
    }

    /// Returns the next finished trace, if there is one.
    pub fn next_trace(&mut self) -> Option<Trace> {
        let buffer = self.session.done.pop()?;
        let trace = buffer.to_trace();
        let _ = self.session.free.push(buffer);
        self.read += 1;
        Some(trace)
    }

    /// Returns true if all threads that forward take part.
    pub fn has_begun(&self) -> bool {
        self.session.missing.load(Ordering::Acquire) == 0
    }

    /// Returns true if all packets of the request were read, or the program stops.
    pub fn is_complete(&self) -> bool {
        self.read >= self.session.spec.count
            || (self.session.ended.load(Ordering::Acquire) && self.session.done.is_empty())
    }

    /// Number of traces that were read.
    pub fn read(&self) -> u32 {
        self.read
    }

    /// Number of matching packets that were not traced, because the reader was too slow.
    pub fn left_out(&self) -> u64 {
        self.session.left_out.load(Ordering::Relaxed)
    }
}

impl Drop for TraceReader {
    fn drop(&mut self) {
        self.session.ended.store(true, Ordering::Release);
    }
}
