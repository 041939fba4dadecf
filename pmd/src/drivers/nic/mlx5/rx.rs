//! Receive queues.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell, Slots};
use wirepath_nic_defs::mlx5::RECORD_RECEIVE;
use wirepath_verbs::WorkQueue;

use super::cq::CompletionQueue;
use super::cqe::{CqeParser, ParsedCqe, Steps};
use super::rx_fast::{BufferSlots, RxFastPath, post};
use super::wqe::{Segment, Segments, pointer};
use crate::drivers::nic::common;
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::registered_memory::Sink;
use crate::drivers::nic::common::rx_interrupt::RxInterrupt;
use crate::drivers::nic::common::rx_queue::{
    self, PoolExhausted, PostedBuffers, RssGroup, RxResources, buffers_for, swap_received,
};
use wirepath_packet::driver::{LengthRange, PoolCacheHandle};
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, DATA_ROOM, MetaTemplate, Packet, Pool};

/// Bytes of an Ethernet header.
const ETHERNET_HEADER: u32 = common::ETHERNET_HEADER as u32;

/// Memory of a receive queue, as `mlx5dv_init_obj` reports it.
#[derive(Debug)]
pub(super) struct RxQueueMemory {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// Its doorbell records.
    pub(super) records: DeviceMemory,
    /// Number of work requests.
    pub(super) entries: u32,
    /// Bytes of a work request.
    pub(super) stride: u32,
    /// The completion queue and its doorbell records.
    pub(super) completions: DeviceMemory,
    pub(super) completion_records: DeviceMemory,
}

/// Wakes a sleeping worker.
#[derive(Debug)]
pub(super) struct Waker {
    pub(super) interrupt: RxInterrupt,
    /// Number of the completion queue.
    pub(super) number: u32,
    /// Doorbell register that arms completion queues.
    pub(super) doorbell: Doorbell,
    /// Free-running number of events.
    pub(super) announced: u32,
}

/// Layout of packets in buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Layout {
    /// A work request for each packet. The sink follows its buffers, if there is room.
    Linear {
        /// Buffers of a work request.
        buffers: usize,
    },
    /// A work request of 2^`log` strides, each of which is a buffer.
    Striding {
        /// Log2 of the strides.
        log: u32,
    },
}

impl Layout {
    /// Returns the buffers of a work request; each is a segment.
    pub(super) const fn buffers(self) -> usize {
        match self {
            Self::Linear { buffers } => buffers,
            Self::Striding { log } => 1 << log,
        }
    }

    /// Returns the number of segments in front of the first buffer's.
    const fn lead(self) -> u32 {
        match self {
            Self::Linear { .. } => 0,
            Self::Striding { .. } => 1,
        }
    }
}

/// Configuration of a receive ring.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RxConfig {
    pub(super) layout: Layout,
    /// Format of compressed completions (`MINI_FORMAT_*`), if enabled.
    pub(super) format: Option<u8>,
    /// Nanoseconds of a clock tick, in 32.32 bits. 0: no timestamps.
    pub(super) tick: u64,
    /// Bytes of the longest accepted frame.
    pub(super) longest: u32,
}

/// Layout of the work requests.
enum Requests {
    /// One buffer each, without a sink: the work requests are the segments.
    Single,
    /// One buffer each, and the sink.
    WithSink(Slots<[AtomicU64; 4]>),
    /// Several buffers each.
    Multi,
}

/// A receive ring. All its work requests are always posted: a received buffer is swapped for a free one or
/// stays in place. Slot and segment of a buffer therefore never change.
pub(super) struct RxRing {
    ring: Segments,
    requests: Requests,
    records: DeviceMemory,
    completions: CompletionQueue,
    mode: RxConfig,
    /// Lengths of single-buffer packets.
    lengths: LengthRange,
    /// Number of work requests, and segments of each.
    entries: u32,
    segments_per_wqe: u32,
    /// Offset from an address of this process to the device's IOVA.
    iova_offset: u64,
    parser: CqeParser,
    /// lkey of the buffers, and the sink behind them.
    lkey: u32,
    sink: Option<Sink>,
    /// Number of consecutive empty polls.
    idle: u32,
    /// An invalid entry in front of a valid one, and the time since then.
    gap: Option<(u32, Instant)>,
    /// The hardware queue, for restarting it.
    queue: Option<WorkQueue>,
    waker: Option<Waker>,
    posted: PostedBuffers,
}

impl fmt::Debug for RxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RxRing").field("entries", &self.entries).field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl RxRing {
    /// Posts buffers for all work requests and rings the doorbell. `None` if the sizes are inconsistent;
    /// `Err` if the pool is exhausted.
    pub(super) fn new(
        rss_group: Arc<RssGroup>,
        mrs: &MrTable,
        sink: Sink,
        queue_memory: RxQueueMemory,
        pool: &Pool,
        template: &MetaTemplate,
        mode: RxConfig,
    ) -> Result<Option<Self>, PoolExhausted> {
        let layout = mode.layout;
        let (buffers, lead) = (layout.buffers(), layout.lead());
        let Some(completions) = CompletionQueue::new(&queue_memory.completions, &queue_memory.completion_records)
        else {
            return Ok(None);
        };
        let Some(ring) = Segments::new(&queue_memory.ring) else { return Ok(None) };
        let segments_per_wqe = queue_memory.stride / 16;
        let max_completions = match layout {
            Layout::Linear { .. } => queue_memory.entries,
            Layout::Striding { log } => queue_memory.entries << log,
        };
        let fits = queue_memory.entries.is_power_of_two()
            && queue_memory.entries <= 1 << 15
            && u64::from(queue_memory.entries) * u64::from(segments_per_wqe) == u64::from(ring.count())
            && u64::from(lead) + buffers as u64 <= u64::from(segments_per_wqe)
            && completions.count() >= max_completions;
        if !fits {
            return Ok(None);
        }
        let (lkey, iova_offset) = (mrs.primary_mr().lkey(), mrs.primary_mr().iova_offset());
        let posted = PostedBuffers::allocate(queue_memory.entries as usize * buffers, pool, template, rss_group)?;
        let sink = Some(sink).filter(|_| segments_per_wqe as usize > buffers);
        let steps = match layout {
            // The device reports packets that end in the sink; they are dropped.
            Layout::Linear { buffers } => {
                Steps::Requests { bytes: (buffers * DATA_ROOM) as u32 + sink.map_or(0, |sink| sink.bytes) }
            }
            Layout::Striding { log } => Steps::Strides { log },
        };
        let requests = match (layout, segments_per_wqe) {
            (Layout::Linear { buffers: 1 }, 1) => Requests::Single,
            (Layout::Linear { buffers: 1 }, 2) => {
                Slots::new(&queue_memory.ring).map_or(Requests::Multi, Requests::WithSink)
            }
            _ => Requests::Multi,
        };
        let this = Self {
            requests,
            ring,
            records: queue_memory.records,
            completions,
            mode,
            lengths: LengthRange::new(ETHERNET_HEADER, mode.longest),
            entries: queue_memory.entries,
            segments_per_wqe,
            iova_offset,
            parser: CqeParser::new(steps, max_completions, mode.format, mode.tick),
            lkey,
            sink,
            idle: 0,
            gap: None,
            queue: None,
            waker: None,
            posted,
        };
        this.write_requests();
        this.publish(0);
        Ok(Some(this))
    }

    /// Writes all work requests.
    fn write_requests(&self) {
        let Self { ring, mode: RxConfig { layout, .. }, segments_per_wqe, iova_offset, lkey, sink, posted, .. } = self;
        let (buffers, lead) = (layout.buffers(), layout.lead());
        for request in 0..self.entries {
            let first = request * segments_per_wqe;
            (0..*segments_per_wqe).for_each(|i| ring.write(first + i, NOTHING));
            for i in 0..buffers as u32 {
                let packet = &posted[request as usize * buffers + i as usize];
                let address = packet.default_data_address().wrapping_add(*iova_offset);
                ring.write(first + lead + i, pointer(address, *lkey, DATA_ROOM as u32));
            }
            match layout {
                Layout::Linear { .. } => {
                    if let Some(Sink { address, lkey, bytes }) = *sink {
                        ring.write(first + buffers as u32, pointer(address, lkey, bytes));
                    }
                }
                Layout::Striding { .. } => ring.write(first, [0, 0]),
            }
        }
    }

    /// Sets the hardware queue and the waker.
    pub(super) fn set_hardware(&mut self, queue: WorkQueue, waker: Option<Waker>) {
        (self.queue, self.waker) = (Some(queue), waker);
    }

    /// Restarts a queue that the device has stopped. Rules, tables and buffers stay. `None` if this is
    /// impossible.
    pub(super) fn restart(mut self) -> Option<Self> {
        let queue = self.queue.clone()?;
        // Once reset, the device writes neither buffers nor completions.
        queue
            .reset()
            .and_then(|()| {
                self.completions.skip();
                self.parser.restart();
                // Another process may have written the descriptor that stopped the queue.
                self.write_requests();
                queue.start()
            })
            .map_err(|error| tracing::warn!("{error}"))
            .ok()?;
        // The library has written the doorbell records without knowing which entries were read.
        self.completions.clear();
        self.publish(0);
        Some(self)
    }

    /// Returns the segment of a buffer slot.
    fn segment(&self, slot: u32) -> &Segment {
        self.ring.at(match self.mode.layout {
            Layout::Linear { buffers } => slot / buffers as u32 * self.segments_per_wqe + slot % buffers as u32,
            Layout::Striding { log } => (slot >> log) * self.segments_per_wqe + 1 + (slot & ((1 << log) - 1)),
        })
    }

    /// Publishes the producer index: everything before this step is posted again.
    #[inline(always)]
    fn publish(&self, step: u32) {
        let request = match self.mode.layout {
            Layout::Linear { .. } => step,
            Layout::Striding { log } => step >> log,
        };
        let head = request.wrapping_add(self.entries) & 0xffff;
        self.records.store32_release(4 * RECORD_RECEIVE, head.to_be());
    }

    /// Rewrites the doorbell records after a long idle time, and checks for missed completions. A process
    /// that shares the queues may have overwritten the records. If the RQ doorbell record is stale, the NIC
    /// stalls silently.
    #[cold]
    fn re_arm(&mut self) -> Result<(), QueueFault> {
        self.completions.publish();
        self.publish(self.parser.step());
        let position = self.completions.position();
        if !self.completions.has_gap() {
            self.gap = None;
            return Ok(());
        }
        // A gap counts only after some time, because a device may write a later entry first.
        let since = self.gap.filter(|(there, _)| *there == position).map_or_else(Instant::now, |(_, since)| since);
        self.gap = Some((position, since));
        if since.elapsed() < GAP_TIMEOUT { Ok(()) } else { Err(QueueFault::BadOwnerBits) }
    }

    /// Delivers the pending packets, and swaps their buffers for free ones. Returns packets and bytes.
    fn deliver(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, u64) {
        let cache = resources.cache_handle();
        let (mut packets, mut bytes) = (0, 0);
        for i in 0..self.parser.pending().len() {
            let cqe = self.parser.pending()[i];
            let is_one = cqe.len.wrapping_sub(ETHERNET_HEADER) <= self.mode.longest - ETHERNET_HEADER;
            let taken = cache.as_ref().filter(|_| is_one).and_then(|cache| self.swap_buffers(cache, cqe));
            let Some(mut packet) = taken else {
                resources.count_drop(reason(cqe, self.mode.longest));
                continue;
            };
            cqe.note(&mut packet);
            // There is room: no more completions were parsed.
            drop(batch.push(packet));
            packets += 1;
            bytes += u64::from(cqe.len);
        }
        (packets, bytes)
    }

    /// Swaps the buffers of a packet for free ones.
    fn swap_buffers(&mut self, cache: &PoolCacheHandle<'_>, cqe: ParsedCqe) -> Option<Packet> {
        let (mask, per_step) = match self.mode.layout {
            Layout::Linear { buffers } => (self.entries - 1, buffers as u32),
            Layout::Striding { log } => ((self.entries << log) - 1, 1),
        };
        let slot = (cqe.at & mask) * per_step;
        let packet = swap_received(cache, &mut self.posted[slot as usize..], cqe.len)?;
        for i in slot..slot + buffers_for(cqe.len as usize) as u32 {
            post(self.segment(i), self.posted[i as usize].default_data_address().wrapping_add(self.iova_offset));
        }
        Some(packet)
    }

    /// Delivers single-buffer packets directly. Returns their bytes, and whether other completions follow.
    #[inline(always)]
    fn run(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, bool) {
        let Self { ring, requests, completions, parser, mode, segments_per_wqe, iova_offset, lengths, posted, .. } =
            self;
        let Some(cache) = resources.cache_handle() else { return (0, true) };
        let (iova_offset, posted) = (*iova_offset, &mut posted[..]);
        let mut burst = cache.burst(batch, *lengths);
        let more = match (mode.layout, requests) {
            (Layout::Linear { .. }, Requests::Single) => {
                let ring_slots = BufferSlots { ring: ring.view(), log: 0, segments_per_wqe: 1, lead: 0 };
                RxFastPath { ring_slots, completions, parser, posted, iova_offset }.run::<false>(&mut burst)
            }
            (Layout::Linear { .. }, Requests::WithSink(requests)) => {
                let ring_slots = BufferSlots { ring: requests.view(), log: 0, segments_per_wqe: 1, lead: 0 };
                RxFastPath { ring_slots, completions, parser, posted, iova_offset }.run::<false>(&mut burst)
            }
            (Layout::Striding { log }, _) => {
                let ring_slots = BufferSlots {
                    ring: ring.view(),
                    log,
                    segments_per_wqe: *segments_per_wqe,
                    lead: mode.layout.lead(),
                };
                RxFastPath { ring_slots, completions, parser, posted, iova_offset }.run::<true>(&mut burst)
            }
            _ => true,
        };
        (burst.bytes(), more)
    }

    /// Publishes reposted work requests and consumed entries.
    #[inline(always)]
    fn publish_progress(&mut self) {
        self.completions.publish();
        self.publish(self.parser.step());
        self.idle = 0;
    }

    /// Continues after packets and bytes that were received since the CQ was at `before`. `more`: parses any
    /// kind of completion.
    #[inline(never)]
    fn receive_more(
        &mut self,
        batch: &mut Batch,
        resources: &RxResources<'_>,
        (mut packets, mut bytes, before): (u64, u64, u32),
        more: bool,
    ) -> (u64, u64, Result<(), QueueFault>) {
        let mut result = Ok(());
        if more {
            result = self.parser.parse(&mut self.completions, batch.space()).map(drop);
            let moved = if self.parser.pending().is_empty() { (0, 0) } else { self.deliver(batch, resources) };
            self.parser.clear();
            (packets, bytes) = (packets + moved.0, bytes + moved.1);
        }
        if packets > 0 || self.completions.position() != before {
            self.publish_progress();
        } else if self.idle >= RE_ARM_POLLS {
            self.idle = 0;
            result = result.and(self.re_arm());
        }
        (packets, bytes, result)
    }
}

/// Number of empty polls after which the doorbell records are rewritten.
const RE_ARM_POLLS: u32 = 1 << 12;

/// Time that an entry may be invalid in front of a valid one.
const GAP_TIMEOUT: Duration = Duration::from_secs(1);

/// End of a segment list, in memory byte order.
const NOTHING: [u64; 2] = pointer(0, wirepath_nic_defs::mlx5::INVALID_LKEY, 0);

impl rx_queue::RxRing for RxRing {
    #[inline(always)]
    fn is_idle(&mut self) -> bool {
        if self.parser.session.is_some() || self.completions.peek().is_some() {
            return false;
        }
        self.idle += 1;
        self.idle < RE_ARM_POLLS
    }

    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, u64, Result<(), QueueFault>) {
        let (before, start) = (self.completions.position(), batch.len());
        let (bytes, more) = self.run(batch, resources);
        let packets = (batch.len() - start) as u64;
        if packets == 0 || more {
            return self.receive_more(batch, resources, (packets, bytes, before), more);
        }
        self.publish_progress();
        (packets, bytes, Ok(()))
    }

    fn waiting(&self) -> Option<u32> {
        let taken = self.parser.session.as_ref().map_or(0, |session| session.read);
        Some(self.completions.waiting().saturating_sub(taken))
    }

    fn arm_interrupt(&mut self) -> Option<BorrowedFd<'_>> {
        let Waker { interrupt, number, doorbell, announced } = self.waker.as_mut()?;
        *announced = announced.wrapping_add(interrupt.drain_events()?);
        doorbell.ring(self.completions.arm(*announced, *number));
        // Packets that arrived before arming raise no event.
        let is_empty = self.parser.session.is_none() && self.completions.peek().is_none();
        is_empty.then(|| interrupt.descriptor())
    }
}

/// Returns the reason for dropping a packet whose buffers stay posted.
#[cold]
fn reason(cqe: ParsedCqe, longest: u32) -> DropReason {
    match cqe.len {
        0..ETHERNET_HEADER => DropReason::TooShort,
        len if len > longest => DropReason::TooLong,
        _ => DropReason::NoBuffer,
    }
}
