//! Transmit queues.

use std::fmt;
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell, SlotsView};
use wirepath_nic_defs::mlx5::{
    CQE_REQUEST, CQE_REQUEST_ERROR, FORMAT_NONE, OPCODE_ENHANCED_MPW, OPCODE_SEND, RECORD_SEND, SEGMENTS_PER_BLOCK,
    SEND_BLOCK,
};

use super::cq::{CompletionQueue, kind};
use super::offload::{self, MAX_TSO_HEADER, REQUESTS};
use super::wqe::{
    COMPLETE, MAX_BLOCKS, Segment, Segments, TxOffloads, Wqe, blocks, control, opcode_and_segments, pointer,
};
use crate::drivers::nic::common::ETHERNET_HEADER;
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::tso;
use crate::drivers::nic::common::tx_queue::{self, TxInFlight, TxLimits};
use crate::port::TunnelTso;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::driver::{FastPathFilter, TxBurst};
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet};

/// Most packets of a multi-packet descriptor: DPDK's limit.
const MULTI_PACKET: u32 = 32;
/// Segments of a multi-packet descriptor in front of its packets.
const LEAD: u32 = 2;

/// Configuration of a send ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TxConfig {
    /// Bytes of every packet that must be inline.
    pub(super) inline_minimum: usize,
    /// Packets up to this length are entirely inline.
    pub(super) inline: usize,
    /// Packets without offload requests share a descriptor.
    pub(super) multi_packet: bool,
    /// Most payload bytes of a TSO packet. 0: no TSO.
    pub(super) max_tso: usize,
    /// Tunnel types that the device parses (`TUNNEL_*`).
    pub(super) tunnels: u32,
    /// The device segments packets whose header offsets are in the descriptor.
    pub(super) sw_parser: bool,
    /// A burst of one descriptor up to this many bytes is written to the BlueFlame register.
    pub(super) blue_flame: usize,
}

impl TxConfig {
    /// Returns true if descriptors contain only pointers, no packet bytes.
    fn by_pointer(&self) -> bool {
        self.inline_minimum == 0 && self.inline == 0
    }
}

/// Memory of a send queue, as `mlx5dv_init_obj` reports it.
#[derive(Debug)]
pub(super) struct TxQueueMemory {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// Its doorbell records.
    pub(super) records: DeviceMemory,
    /// The completion queue and its doorbell records.
    pub(super) completions: DeviceMemory,
    pub(super) completion_records: DeviceMemory,
    /// Number of the send queue.
    pub(super) number: u32,
    pub(super) registers: Registers,
}

/// The doorbell registers of a send queue, used alternately. Both are the same if there is only one.
#[derive(Debug)]
pub(super) struct Registers {
    doorbells: [Doorbell; 2],
    /// Bytes of the BlueFlame buffer behind each register. 0: none.
    buffer: usize,
    /// Index of the next register.
    turn: usize,
    /// Token held by all users of these registers: libmlx5 assigns them to several queues if there are many.
    users: Arc<()>,
}

impl Registers {
    /// Creates the registers at offset `register` of a page and `buffer` bytes behind. `users` is the token
    /// of all their users.
    ///
    /// # Panics
    /// They are outside the page.
    pub(super) fn new(page: &DeviceMemory, register: usize, buffer: usize, users: Arc<()>) -> Self {
        Self { doorbells: [register, register + buffer].map(|at| Doorbell::new(page, at)), buffer, turn: 0, users }
    }

    /// Returns true if no other queue uses the registers. Its words would mix with those of a descriptor.
    #[inline(always)]
    fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.users) == 1
    }

    #[inline(always)]
    fn next(&mut self) -> &Doorbell {
        self.turn ^= 1;
        &self.doorbells[self.turn ^ 1]
    }
}

/// A send ring.
pub(super) struct TxRing {
    ring: Segments,
    records: DeviceMemory,
    completions: CompletionQueue,
    registers: Registers,
    mrs: Arc<MrTable>,
    number: u32,
    mode: TxConfig,
    /// Basic blocks of the ring.
    blocks: u32,
    /// Last posted descriptor, which goes to the doorbell register.
    last: u32,
    /// End of the descriptors that were announced by a doorbell.
    published: u32,
    /// Basic blocks of the longest descriptor for BlueFlame.
    blue_flame: u32,
    /// True if the next ring can send the packets of a descriptor that the device refuses as malformed.
    resends: bool,
    /// Packets for which an earlier ring had such a descriptor.
    backlog: Vec<Packet>,
    /// Packets in flight; positions are block counters. Last field, so that the owner of the hardware queue
    /// is dropped first.
    in_flight: TxInFlight,
}

impl fmt::Debug for TxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxRing").field("number", &self.number).field("flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl TxRing {
    /// Creates an unused ring for `depth` packets. `None` if sizes are too small or not powers of two.
    pub(super) fn new(
        teardown: QueueTeardown,
        mrs: Arc<MrTable>,
        queue_memory: TxQueueMemory,
        mode: TxConfig,
        depth: u32,
    ) -> Option<Self> {
        let ring = Segments::new(&queue_memory.ring)?;
        let blocks = ring.count() / SEGMENTS_PER_BLOCK;
        let completions = CompletionQueue::new(&queue_memory.completions, &queue_memory.completion_records)?;
        // Each descriptor may complete with an error.
        if blocks < 2 * MAX_BLOCKS || completions.count() < blocks {
            return None;
        }
        Some(Self {
            ring,
            records: queue_memory.records,
            completions,
            blue_flame: (mode.blue_flame.min(queue_memory.registers.buffer) as u32 / SEND_BLOCK).min(blocks),
            registers: queue_memory.registers,
            mrs,
            number: queue_memory.number,
            // Inline data needs one descriptor per packet.
            mode: TxConfig { multi_packet: mode.multi_packet && mode.by_pointer(), ..mode },
            blocks,
            last: 0,
            published: 0,
            resends: false,
            backlog: Vec::new(),
            // Each burst takes at least one block.
            in_flight: TxInFlight::new(depth, blocks, teardown),
        })
    }

    /// Sets whether the next ring can send what the device refuses here as malformed.
    pub(super) fn resending(self, resends: bool) -> Self {
        Self { resends, ..self }
    }

    /// Returns the packets that a block range describes. `None` if no descriptor starts at its end.
    fn packets_between(&self, start: u32, end: u32) -> Option<usize> {
        let (mut at, mut packets) = (start, 0);
        while at != end {
            let word = self.ring.at(at.wrapping_mul(SEGMENTS_PER_BLOCK))[0].load(Ordering::Relaxed);
            let (opcode, segments) = opcode_and_segments(word);
            packets += if opcode == OPCODE_ENHANCED_MPW { segments.checked_sub(LEAD)? } else { 1 };
            let size = blocks(segments);
            if size == 0 || size > end.wrapping_sub(at) {
                return None;
            }
            at = at.wrapping_add(size);
        }
        Some(packets as usize)
    }

    /// Returns the constants of fast-path packets as values. From fields, the compiler would reload them
    /// after each write to the ring.
    #[inline(always)]
    fn pointers(&self, limits: &TxLimits<'_>) -> Pointers<'_> {
        let primary = self.mrs.primary_mr();
        let range = limits.longest - ETHERNET_HEADER;
        Pointers {
            ring: self.ring.view(),
            key: primary.lkey(),
            iova_offset: primary.iova_offset(),
            range,
            number: self.number,
        }
    }

    /// Describes fast-path packets by one descriptor each. Returns bytes, last descriptor and end.
    #[inline(always)]
    fn post_single(pointers: &Pointers<'_>, burst: &mut TxBurst<'_>, start: u32, room: u32) -> Described {
        let (mut bytes, mut at) = (0, start);
        burst.describe_fast(room as usize, |address, len| {
            let Some(data) = pointers.to(address, len) else { return false };
            let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
            pointers.ring.write(first.wrapping_add(2), data);
            pointers.ring.write(first.wrapping_add(1), [0, 0]);
            pointers.ring.write(first, [control(OPCODE_SEND, at, pointers.number, 3), 0]);
            at = at.wrapping_add(1);
            bytes += len as u64;
            true
        });
        Described { bytes, last: at.wrapping_sub(1), end: at }
    }

    /// Describes fast-path packets by one shared descriptor. Returns bytes, this descriptor and its end,
    /// which is `at` if there are none.
    #[inline(always)]
    fn post_multi_packet(pointers: &Pointers<'_>, burst: &mut TxBurst<'_>, at: u32, room: u32) -> Described {
        let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
        let max_packets = (room * SEGMENTS_PER_BLOCK).saturating_sub(LEAD).min(MULTI_PACKET);
        let (mut bytes, mut segments) = (0, LEAD);
        burst.describe_fast(max_packets as usize, |address, len| {
            let Some(data) = pointers.to(address, len) else { return false };
            pointers.ring.write(first.wrapping_add(segments), data);
            segments += 1;
            bytes += len as u64;
            true
        });
        if segments == LEAD {
            return Described { bytes: 0, last: at, end: at };
        }
        pointers.ring.write(first.wrapping_add(1), [0, 0]);
        pointers.ring.write(first, [control(OPCODE_ENHANCED_MPW, at, pointers.number, segments), 0]);
        Described { bytes, last: at, end: at.wrapping_add(blocks(segments)) }
    }

    /// Describes any packet. Returns the number of blocks. `None`: the ring has no room at the moment.
    #[inline(never)]
    fn describe(
        &self,
        packet: &mut Packet,
        limits: &TxLimits<'_>,
        at: u32,
        room: u32,
    ) -> Result<Option<u32>, DropReason> {
        // Room for the longest descriptor, so that no packet is processed twice for lack of room.
        if room < MAX_BLOCKS {
            return Ok(None);
        }
        let mode = &self.mode;
        let minimum = mode.inline_minimum;
        if packet.len() < ETHERNET_HEADER {
            return Err(DropReason::TooShort);
        }
        let offloads = if packet.flags().intersects(REQUESTS) {
            offload::tx_offloads(packet, mode)?
        } else {
            TxOffloads::default()
        };
        let longest = offloads.segment.map_or(limits.longest, |tso| mode.max_tso + usize::from(tso.header));
        let len = packet.len();
        if len > longest {
            return Err(DropReason::TooLong);
        }
        if offloads.segment.is_some_and(|tso| usize::from(tso.header) + usize::from(tso.mss) > limits.longest) {
            return Err(DropReason::KernelOffload);
        }
        let inline = match offloads.segment {
            Some(tso) => tso.header.into(),
            None if len <= mode.inline && offloads.tag.is_none() => len,
            None => minimum,
        };
        if packet.data().len() < inline && !pad(packet, inline) {
            return Err(DropReason::TooShort);
        }
        let wqe = match self.gather(packet, &offloads, inline) {
            Some(wqe) => wqe,
            None => {
                // Too many segments, or a segment outside registered memory.
                let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
                limits.counters.copied.add(1);
                *packet = copy;
                self.gather(packet, &offloads, inline).ok_or(DropReason::TxError)?
            }
        };
        Ok(Some(wqe.write(&self.ring, at, self.number)))
    }

    /// Returns the packet's descriptor with `inline` bytes inline. `None` if it has too many segments, or one
    /// outside registered memory.
    fn gather(&self, packet: &Packet, offloads: &TxOffloads, inline: usize) -> Option<Wqe> {
        let mut wqe = Wqe::new(offloads, packet.data().get(..inline)?)?;
        let mut skip = inline;
        for segment in packet.segments() {
            let piece = &segment[skip.min(segment.len())..];
            skip = skip.saturating_sub(segment.len());
            if piece.is_empty() {
                continue;
            }
            let address = piece.as_ptr() as u64;
            let (iova, key) = self.mrs.translate(address)?;
            if !wqe.push(iova, key, piece.len()) {
                return None;
            }
        }
        Some(wqe)
    }
}

impl tx_queue::TxRing for TxRing {
    #[inline(always)]
    fn in_flight(&self) -> &TxInFlight {
        &self.in_flight
    }

    /// The device executes descriptors in order, and none from the malformed one on.
    fn unsent(&self, fault: QueueFault) -> usize {
        let QueueFault::ErrorCqe { position, .. } = fault else { return 0 };
        let Some(burst) = self.in_flight.oldest_burst().filter(|_| self.resends && fault.is_malformed()) else {
            return 0;
        };
        let start = self.in_flight.oldest;
        let distance = u32::from(position.wrapping_sub(start as u16));
        if distance >= burst.end.wrapping_sub(start) {
            return 0;
        }
        let sent = self.packets_between(start, start.wrapping_add(distance));
        sent.map_or(0, |sent| self.in_flight.len().saturating_sub(sent))
    }

    fn take_unsent(self, fault: QueueFault) -> Vec<Packet> {
        let unsent = self.unsent(fault);
        let Self { ring, records, completions, registers, in_flight, .. } = self;
        // These hold the hardware queue.
        drop((ring, records, completions, registers));
        in_flight.take_newest(unsent)
    }

    fn segments(&self, packet: &Packet) -> Option<bool> {
        if tso::fits(packet, MAX_TSO_HEADER, self.mode.max_tso) { None } else { Some(false) }
    }

    fn tunnel_tso(&self, packet: &Packet, longest: usize) -> TunnelTso {
        offload::tunnel_tso(packet, &self.mode, longest)
    }

    fn set_backlog(&mut self, packets: Vec<Packet>) {
        self.backlog = packets;
    }

    fn take_backlog(&mut self) -> Vec<Packet> {
        take(&mut self.backlog)
    }

    #[inline(always)]
    fn complete(&mut self, _: &QueueCounters) -> Result<(), QueueFault> {
        let mut through = 0;
        let mut result = Ok(());
        // The bound keeps a device that writes endlessly from blocking the worker.
        for _ in 0..self.in_flight.max_bursts() {
            let Some((entry, tail)) = self.completions.peek() else { break };
            if tail.kind() != kind(CQE_REQUEST, FORMAT_NONE) {
                result =
                    Err(if tail.opcode() == CQE_REQUEST_ERROR { entry.failure(tail) } else { QueueFault::UnknownType });
                break;
            }
            if tail.low24() != self.number {
                result = Err(QueueFault::ForeignQueue);
                break;
            }
            let Some(burst) = self.in_flight.oldest_burst() else {
                result = Err(QueueFault::UnexpectedCompletion);
                break;
            };
            if tail.position() != burst.last as u16 {
                result = Err(QueueFault::OutOfOrder);
                break;
            }
            self.completions.advance(1);
            through += burst.packets as usize;
            self.in_flight.complete_oldest(burst);
        }
        if through > 0 {
            self.completions.publish();
            self.in_flight.free(through);
        }
        result
    }

    #[inline(always)]
    fn post(&mut self, batch: &mut Batch, limits: &TxLimits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let mut burst = TxBurst::new(batch, self.in_flight.room(), FastPathFilter::new(limits.pool, REQUESTS));
        let (mut bytes, mut result) = (0, Ok(()));
        let start = self.in_flight.next;
        let free = self.blocks - self.in_flight.used();
        let (mut at, mut last) = (start, start);
        let (pointers, multi_packet, by_pointer) =
            (self.pointers(limits), self.mode.multi_packet, self.mode.by_pointer());
        while burst.remaining() > 0 {
            let room = free - at.wrapping_sub(start);
            if by_pointer {
                let described = if multi_packet {
                    Self::post_multi_packet(&pointers, &mut burst, at, room)
                } else {
                    Self::post_single(&pointers, &mut burst, at, room)
                };
                if described.end != at {
                    (last, at) = (described.last, described.end);
                    bytes += described.bytes;
                    continue;
                }
            }
            match burst.describe_any(|packet| self.describe(packet, limits, at, room)) {
                Ok(Some((blocks, len))) => {
                    (last, at) = (at, at.wrapping_add(blocks));
                    bytes += len;
                }
                Ok(None) => break,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
            }
        }
        let taken = burst.taken();
        if taken > 0 {
            // The control segment is complete but for this word; the device reads it only after the doorbell.
            self.ring.at(last.wrapping_mul(SEGMENTS_PER_BLOCK))[1].store(COMPLETE, Ordering::Relaxed);
            self.last = last;
            self.in_flight.post_burst(burst, last, at);
        }
        (taken, bytes, result)
    }

    /// Writes the doorbell record, which counts, then the register, which triggers the device. A single short
    /// descriptor is written to the BlueFlame buffer: the device need not fetch it, and write-combining
    /// memory sends one line either way. For several descriptors the device fetches the others anyway
    /// (rdma-core: providers/mlx5/qp.c, post_send_db).
    #[inline(always)]
    fn ring_doorbell(&mut self) {
        let (last, next) = (self.last, self.in_flight.next);
        self.records.store32_release(4 * RECORD_SEND, (next & 0xffff).to_be());
        let first = last.wrapping_mul(SEGMENTS_PER_BLOCK);
        let Self { ring, registers, .. } = self;
        let word = |at: usize| ring.at(first.wrapping_add(at as u32 / 2))[at % 2].load(Ordering::Relaxed);
        let blocks = next.wrapping_sub(last);
        if self.published == last && blocks <= self.blue_flame && registers.is_exclusive() {
            registers.next().ring_with((blocks * SEND_BLOCK / 8) as usize, word);
        } else {
            registers.next().ring(word(0));
        }
        self.published = next;
    }
}

/// Makes the first `n` bytes contiguous. A shorter packet is padded, as the device would do.
#[cold]
fn pad(packet: &mut Packet, n: usize) -> bool {
    let len = packet.len();
    if !packet.pull_up(len.min(n)) {
        return false;
    }
    if len < n {
        match packet.append(n - len) {
            Some(padding) => padding.fill(0),
            None => return false,
        }
    }
    true
}

/// Constants of fast-path packets.
struct Pointers<'a> {
    ring: SlotsView<'a, Segment>,
    key: u32,
    /// Offset from an address of this process to the device's IOVA.
    iova_offset: u64,
    /// Bytes of the longest frame minus those of the shortest.
    range: usize,
    number: u32,
}

impl Pointers<'_> {
    /// Returns the data segment of a packet in the port's pool. `None` if the port does not accept its
    /// length.
    #[inline(always)]
    fn to(&self, address: u64, len: usize) -> Option<[u64; 2]> {
        let is_in_range = len.wrapping_sub(ETHERNET_HEADER) <= self.range;
        is_in_range.then(|| pointer(address.wrapping_add(self.iova_offset), self.key, len as u32))
    }
}

/// Result of describing packets.
struct Described {
    bytes: u64,
    /// The last descriptor, and the position of the next one.
    last: u32,
    end: u32,
}

const _: () = assert!(MAX_TSO_HEADER < super::wqe::MAX_INLINE);
