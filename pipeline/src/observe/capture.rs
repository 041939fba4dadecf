//! Captures: copies of packets for a reader in another thread.
//!
//! A capture has a fixed number of [`Chunk`]s, which it allocates at its start. Threads that forward fill free chunks
//! and pass them to the reader, which returns them. They take no buffer of a port's pool and allocate nothing. A packet
//! for which no chunk is free is left out and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crossbeam_queue::ArrayQueue;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, PortId};

use super::filter::{Filters, Pattern};
use crate::clock;
use crate::token_bucket::TokenBucket;

/// Bytes of a chunk. Most packets of a network need one or three.
const CHUNK: usize = 512;
/// Chunks of a capture: 4 MiB.
const CHUNKS: usize = 8192;
/// Nanoseconds after which the time-stamp counter is compared with the clock again.
const RESYNC: u64 = 100_000_000;

/// The packets of a capture.
#[derive(Clone, Debug)]
pub struct CaptureSpec {
    /// Received packets, as the port delivered them.
    pub rx: bool,
    /// Packets that the device of a port accepted, as they were given to it.
    pub tx: bool,
    /// Packets that stages, workers and the control thread dropped, as they were at that time.
    pub drops: bool,
    /// Only drops for this reason.
    pub reason: Option<DropReason>,
    /// Only packets of this port.
    pub port: Option<PortId>,
    /// Instead of all these: the frames that enter this segment, without tunnel headers. See
    /// [`crate::Control::follow_segment`].
    pub segment: Option<FollowedSegment>,
    /// Only packets that match.
    pub pattern: Option<Pattern>,
    /// Bytes of each packet that are copied.
    pub snap: usize,
    /// Packets per second.
    pub rate: Option<u64>,
}

/// A segment that a capture follows by its name. The application keeps a copy and tells the segment's present index.
#[derive(Clone, Debug)]
pub struct FollowedSegment {
    index: Arc<AtomicU32>,
}

impl FollowedSegment {
    /// Index of a segment that was removed.
    const REMOVED: u32 = u32::MAX;

    /// Follows the segment with this index.
    pub fn new(index: u16) -> Self {
        Self { index: Arc::new(AtomicU32::new(index.into())) }
    }

    /// Takes the index that the segment has now; `None`: the segment was removed.
    pub fn set_index(&self, index: Option<u16>) {
        self.index.store(index.map_or(Self::REMOVED, u32::from), Ordering::Release);
    }

    /// Returns true if the segment was removed.
    pub fn is_removed(&self) -> bool {
        self.index.load(Ordering::Acquire) == Self::REMOVED
    }

    /// Returns true if another copy exists, such as that of a capture.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.index) > 1
    }

    fn has_index(&self, index: u16) -> bool {
        self.index.load(Ordering::Relaxed) == u32::from(index)
    }
}

/// Point at which a packet was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Received.
    Rx,
    /// Accepted by the device of the output port.
    Tx,
    /// Dropped for this reason.
    Drop(DropReason),
}

/// Numbers of packets that a capture left out at one port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// The reader did not return memory fast enough.
    pub queue_full: u64,
    /// The rate of the capture was exceeded.
    pub rate: u64,
    /// The drop was counted without a packet, for example because there was no buffer for it.
    pub no_packet: u64,
}

impl LeftOut {
    /// Sum of all reasons.
    pub fn total(self) -> u64 {
        self.queue_full + self.rate + self.no_packet
    }
}

#[derive(Debug, Default)]
struct LeftOutCounters {
    queue_full: AtomicU64,
    rate: AtomicU64,
    no_packet: AtomicU64,
}

/// Memory for a part of a packet.
#[derive(Debug)]
struct Chunk {
    bytes: [u8; CHUNK],
    len: usize,
    next: Option<Box<Self>>,
}

/// A copied packet.
#[derive(Debug)]
pub struct CapturedPacket {
    /// Value of [`clock::ticks`] at the copy; see [`WallClock`].
    pub ticks: u64,
    /// Port: the input port, the output port for [`Point::Tx`], or none.
    pub port: Option<PortId>,
    /// Point at which the packet was copied.
    pub point: Point,
    /// Bytes of the packet on the wire, without frame check sequence.
    pub len: usize,
    chunks: Box<Chunk>,
}

impl CapturedPacket {
    /// Returns the copied bytes in parts. A VLAN tag that the device strips or inserts is part of them.
    pub fn data(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::successors(Some(&*self.chunks), |chunk| chunk.next.as_deref()).map(|chunk| &chunk.bytes[..chunk.len])
    }

    /// Number of copied bytes.
    pub fn captured(&self) -> usize {
        self.data().map(<[u8]>::len).sum()
    }
}

/// The state of a capture that its reader and all threads that forward share.
#[derive(Debug)]
pub(super) struct CaptureSession {
    pub(super) spec: CaptureSpec,
    pub(super) filters: Filters,
    bucket: Option<TokenBucket>,
    free: ArrayQueue<Box<Chunk>>,
    filled: ArrayQueue<CapturedPacket>,
    /// Counters of each port, and at the end those of packets without a port.
    left_out: Box<[LeftOutCounters]>,
    /// Threads that have not taken the capture yet.
    pub(super) missing: AtomicUsize,
    pub(super) ended: Arc<AtomicBool>,
}

/// Result for a packet that a capture wants.
#[derive(Debug)]
pub(super) enum Copied {
    Packet(CapturedPacket),
    QueueFull,
    OverRate,
}

impl CaptureSession {
    pub(super) fn new(spec: CaptureSpec, filters: Filters, ports: usize, threads: usize) -> Self {
        let free = ArrayQueue::new(CHUNKS);
        for _ in 0..CHUNKS {
            let _ = free.push(Box::new(Chunk { bytes: [0; CHUNK], len: 0, next: None }));
        }
        let bucket = spec.rate.map(|rate| TokenBucket::new(rate, u128::from(rate / 10 + 1)));
        Self {
            filters,
            bucket,
            free,
            filled: ArrayQueue::new(CHUNKS),
            left_out: (0..=ports).map(|_| LeftOutCounters::default()).collect(),
            missing: AtomicUsize::new(threads),
            ended: Arc::default(),
            spec,
        }
    }

    /// Returns whether packets at this point and port are wanted, before the pattern is compared.
    pub(super) fn wants(&self, point: Point, port: Option<PortId>) -> bool {
        let wants = self.spec.segment.is_none()
            && match point {
                Point::Rx => self.spec.rx,
                Point::Tx => self.spec.tx,
                Point::Drop(reason) => self.spec.drops && self.spec.reason.is_none_or(|only| only == reason),
            };
        wants && (self.spec.port.is_none() || self.spec.port == port) && !self.ended.load(Ordering::Relaxed)
    }

    /// Returns whether a frame that enters a segment is wanted, before the pattern is compared.
    pub(super) fn wants_segment(&self, segment: u16, port: Option<PortId>) -> bool {
        self.spec.segment.as_ref().is_some_and(|followed| followed.has_index(segment))
            && (self.spec.port.is_none() || self.spec.port == port)
            && !self.ended.load(Ordering::Relaxed)
    }

    /// Copies a packet, but does not pass it to the reader yet. `now` is the time of the worker in nanoseconds.
    pub(super) fn copy(&self, packet: &Packet, point: Point, port: Option<PortId>, now: u64, ticks: u64) -> Copied {
        if self.bucket.as_ref().is_some_and(|bucket| !bucket.take(1, now)) {
            return Copied::OverRate;
        }
        let tag = packet.vlan().filter(|_| packet.data().len() >= 12).map(|tci| {
            let [a, b] = if packet.flags().contains(Flags::VLAN_SERVICE) { [0x88, 0xa8] } else { [0x81, 0x00] };
            [a, b, (tci >> 8) as u8, tci as u8]
        });
        let len = packet.len() + tag.map_or(0, |tag| tag.len());
        let (data, mut segments) = (packet.data(), packet.segments());
        let head: [&[u8]; 3] = match &tag {
            Some(tag) => {
                let _ = segments.next();
                let (addresses, rest) = data.split_at(12);
                [addresses, tag, rest]
            }
            None => [&[]; 3],
        };
        match self.fill(head.into_iter().chain(segments), len.min(self.spec.snap)) {
            Some(chunks) => Copied::Packet(CapturedPacket { ticks, port, point, len, chunks }),
            None => Copied::QueueFull,
        }
    }

    /// Copies the first `left` bytes of `parts` into free chunks; `None` if there are too few.
    fn fill<'p>(&self, parts: impl Iterator<Item = &'p [u8]>, mut left: usize) -> Option<Box<Chunk>> {
        let mut chunks = self.free.pop()?;
        let mut last = &mut chunks;
        for part in parts {
            let mut bytes = &part[..part.len().min(left)];
            left -= bytes.len();
            while !bytes.is_empty() {
                if last.len == CHUNK {
                    let Some(next) = self.free.pop() else {
                        self.recycle(chunks);
                        return None;
                    };
                    last = last.next.insert(next);
                }
                let n = bytes.len().min(CHUNK - last.len);
                last.bytes[last.len..last.len + n].copy_from_slice(&bytes[..n]);
                last.len += n;
                bytes = &bytes[n..];
            }
        }
        Some(chunks)
    }

    /// Passes a copy to the reader, or counts why there is none.
    pub(super) fn deliver(&self, copied: Copied, port: Option<PortId>) {
        let counter = match copied {
            Copied::Packet(packet) => match self.filled.push(packet) {
                Ok(()) => return,
                // There are as many places as chunks.
                Err(packet) => {
                    self.recycle(packet.chunks);
                    &self.left_out_at(port).queue_full
                }
            },
            Copied::QueueFull => &self.left_out_at(port).queue_full,
            Copied::OverRate => &self.left_out_at(port).rate,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the memory of a copy.
    pub(super) fn discard(&self, copied: Copied) {
        if let Copied::Packet(packet) = copied {
            self.recycle(packet.chunks);
        }
    }

    /// Counts drops of `n` packets that do not exist.
    pub(super) fn count_without_packet(&self, n: u64) {
        self.left_out_at(None).no_packet.fetch_add(n, Ordering::Relaxed);
    }

    fn left_out_at(&self, port: Option<PortId>) -> &LeftOutCounters {
        let last = self.left_out.len() - 1;
        &self.left_out[port.map_or(last, PortId::index).min(last)]
    }

    fn recycle(&self, chunks: Box<Chunk>) {
        let mut rest = Some(chunks);
        while let Some(mut chunk) = rest {
            rest = chunk.next.take();
            chunk.len = 0;
            // The queue has room for all chunks.
            let _ = self.free.push(chunk);
        }
    }
}

/// The reader of a capture, for a thread of its own. The capture ends when it is dropped.
#[derive(Debug)]
pub struct CaptureReader {
    session: Arc<CaptureSession>,
}

impl CaptureReader {
    pub(super) fn new(session: Arc<CaptureSession>) -> Self {
        Self { session }
    }

    /// Passes the next packet to `read`. Returns `None` if there is none at present.
    pub fn read_next<R>(&mut self, read: impl FnOnce(&CapturedPacket) -> R) -> Option<R> {
        let packet = self.session.filled.pop()?;
        let result = read(&packet);
        self.session.recycle(packet.chunks);
        Some(result)
    }

    /// Returns true if all threads that forward take part. Before, packets are missing.
    pub fn has_begun(&self) -> bool {
        self.session.missing.load(Ordering::Acquire) == 0
    }

    /// Returns true if no further packets are added, because [`Self::end`] was called or the program stops.
    pub fn has_ended(&self) -> bool {
        self.session.ended.load(Ordering::Acquire)
    }

    /// Returns true if the segment of the capture was removed.
    pub fn has_lost_segment(&self) -> bool {
        self.session.spec.segment.as_ref().is_some_and(FollowedSegment::is_removed)
    }

    /// Ends the capture. Packets that were copied before can still be read.
    pub fn end(&self) {
        self.session.ended.store(true, Ordering::Release);
    }

    /// Returns the packets that were left out at a port; `None`: those of no port.
    pub fn left_out(&self, port: Option<PortId>) -> LeftOut {
        let counters = self.session.left_out_at(port);
        LeftOut {
            queue_full: counters.queue_full.load(Ordering::Relaxed),
            rate: counters.rate.load(Ordering::Relaxed),
            no_packet: counters.no_packet.load(Ordering::Relaxed),
        }
    }

    /// Returns what is captured.
    pub fn spec(&self) -> &CaptureSpec {
        &self.session.spec
    }
}

impl Drop for CaptureReader {
    fn drop(&mut self) {
        self.end();
    }
}

/// Converts [`clock::ticks`] to the time since 1970. It follows corrections of the system's clock.
#[derive(Debug)]
pub struct WallClock {
    ticks: u64,
    /// Nanoseconds since 1970 at `ticks`.
    time: u64,
    nanoseconds_per_tick: f64,
}

impl WallClock {
    /// Creates a clock. The first call in a process may take 10 ms.
    pub fn new() -> Self {
        let mut clock = Self { ticks: 0, time: 0, nanoseconds_per_tick: 1e9 / clock::tick_hz() };
        clock.sync();
        clock
    }

    fn sync(&mut self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (self.ticks, self.time) = (clock::ticks(), u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Returns the current time in nanoseconds since 1970.
    pub fn now(&mut self) -> u64 {
        self.sync();
        self.time
    }

    /// Converts a recent value of the counter to nanoseconds since 1970.
    pub fn time_of(&mut self, ticks: u64) -> u64 {
        let offset = |clock: &Self| (ticks.wrapping_sub(clock.ticks) as i64 as f64 * clock.nanoseconds_per_tick) as i64;
        let mut since = offset(self);
        if since.unsigned_abs() > RESYNC {
            self.sync();
            since = offset(self);
        }
        self.time.saturating_add_signed(since)
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::new()
    }
}
