//! Transmit queues.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell, View};
use wirepath_nic_defs::mlx5::{
    CQE_REQUEST, CQE_REQUEST_ERROR, FORMAT_NONE, OPCODE_ENHANCED_MPW, OPCODE_SEND, RECORD_SEND, SEGMENTS_PER_BLOCK,
    SEND_BLOCK,
};

use super::cq::{CompletionQueue, kind};
use super::offload::{self, MAX_TSO_HEADER, REQUESTS};
use super::wqe::{COMPLETE, MAX_BLOCKS, Segment, Segments, Wishes, Wqe, blocks, control, pointer};
use crate::counters::QueueCounters;
use crate::drivers::direct::SHORTEST;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::send::{self, Flight, Limits};
use crate::drops::DropReason;
use crate::packet::front::{Front, Plain};
use crate::packet::{Batch, Packet};

/// Most packets of a multi-packet descriptor: what DPDK goes up to.
const MULTI_PACKET: u32 = 32;
/// Segments of a multi-packet descriptor in front of its packets.
const LEAD: u32 = 2;

/// How packets are described to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SendMode {
    /// Bytes of every packet that have to lie in the descriptor.
    pub(super) inline_minimum: usize,
    /// Packets of up to this length lie in the descriptor whole.
    pub(super) inline: usize,
    /// Several packets in one descriptor, where none asks for anything.
    pub(super) multi_packet: bool,
    /// Most payload bytes of a packet that is cut.
    pub(super) max_tso: usize,
    /// `TUNNEL_*`: what the device looks into.
    pub(super) tunnels: u32,
    /// A burst of one descriptor of up to this many bytes is written to the register whole.
    pub(super) blue_flame: usize,
}

impl SendMode {
    /// Whether packets are described by a pointer alone.
    fn by_pointer(&self) -> bool {
        self.inline_minimum == 0 && self.inline == 0
    }
}

/// Where a send queue is, as `mlx5dv_init_obj` says.
#[derive(Debug)]
pub(super) struct SendPlace {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// Its doorbell records.
    pub(super) records: DeviceMemory,
    /// The completion queue, and its doorbell records.
    pub(super) completions: DeviceMemory,
    pub(super) completion_records: DeviceMemory,
    /// Number of the queue.
    pub(super) number: u32,
    pub(super) registers: Registers,
}

/// The registers of a send queue, which take turns; both are the same if there is one only.
#[derive(Debug)]
pub(super) struct Registers {
    doorbells: [Doorbell; 2],
    /// Bytes of the buffer (BlueFlame) that each begins, for whole descriptors; 0: there is none.
    buffer: usize,
    /// Whose turn it is.
    turn: usize,
    /// Held by everybody who uses these registers: libmlx5 gives them to several queues if there are many.
    users: Arc<()>,
}

impl Registers {
    /// Those at `register` of a page, and at `buffer` bytes behind; `users` is held by everybody who has the same.
    ///
    /// # Panics
    /// They are not in the page.
    pub(super) fn new(page: &DeviceMemory, register: usize, buffer: usize, users: Arc<()>) -> Self {
        Self { doorbells: [register, register + buffer].map(|at| Doorbell::new(page, at)), buffer, turn: 0, users }
    }

    /// Whether no other queue writes there, whose words would get among those of a descriptor.
    #[inline(always)]
    fn are_ours_alone(&self) -> bool {
        Arc::strong_count(&self.users) == 1
    }

    #[inline(always)]
    fn next(&mut self) -> &Doorbell {
        self.turn ^= 1;
        &self.doorbells[self.turn ^ 1]
    }
}

/// A send queue.
pub(super) struct SendRing {
    ring: Segments,
    records: DeviceMemory,
    completions: CompletionQueue,
    registers: Registers,
    keys: Arc<Keys>,
    number: u32,
    mode: SendMode,
    /// Basic blocks of the ring.
    blocks: u32,
    /// Descriptor that the register is told.
    last: u32,
    /// End of what the device was told of.
    told: u32,
    /// Blocks of the longest descriptor that the register gets whole.
    blue_flame: u32,
    /// Positions are block counters. Last: whoever keeps the hardware's queue goes before.
    flight: Flight,
}

impl fmt::Debug for SendRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRing").field("number", &self.number).field("flight", &self.flight).finish_non_exhaustive()
    }
}

impl SendRing {
    /// A ring that no packet has gone through, for `depth` packets. `None` if sizes are no powers of two, or one of them too small.
    pub(super) fn new(ending: Ending, keys: Arc<Keys>, place: SendPlace, mode: SendMode, depth: u32) -> Option<Self> {
        let ring = Segments::new(&place.ring)?;
        let blocks = ring.count() / SEGMENTS_PER_BLOCK;
        let completions = CompletionQueue::new(&place.completions, &place.completion_records)?;
        // Each descriptor may complete with an error.
        if blocks < 2 * MAX_BLOCKS || completions.count() < blocks {
            return None;
        }
        Some(Self {
            ring,
            records: place.records,
            completions,
            blue_flame: (mode.blue_flame.min(place.registers.buffer) as u32 / SEND_BLOCK).min(blocks),
            registers: place.registers,
            keys,
            number: place.number,
            // Where something has to lie in the descriptor, there is one descriptor for each packet.
            mode: SendMode { multi_packet: mode.multi_packet && mode.by_pointer(), ..mode },
            blocks,
            last: 0,
            told: 0,
            // Each burst takes a block at least.
            flight: Flight::new(depth, blocks, ending),
        })
    }

    /// What is known of every plain packet, as values: as far as the compiler knows, what is written to the ring could change fields.
    #[inline(always)]
    fn pointers(&self, limits: &Limits<'_>) -> Pointers<'_> {
        let home = self.keys.home();
        let range = limits.longest - SHORTEST;
        Pointers { ring: self.ring.view(), key: home.lkey(), distance: home.distance(), range, number: self.number }
    }

    /// Describes plain packets by a pointer each, as long as there are any; bytes, last descriptor and end.
    #[inline(always)]
    fn point(pointers: &Pointers<'_>, front: &mut Front<'_>, start: u32, room: u32) -> Described {
        let (mut bytes, mut at) = (0, start);
        front.plain(room as usize, |address, len| {
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

    /// Describes plain packets by pointers in one descriptor; bytes, that descriptor and its end, which is `at` if there are none.
    #[inline(always)]
    fn pack(pointers: &Pointers<'_>, front: &mut Front<'_>, at: u32, room: u32) -> Described {
        let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
        let most = (room * SEGMENTS_PER_BLOCK).saturating_sub(LEAD).min(MULTI_PACKET);
        let (mut bytes, mut segments) = (0, LEAD);
        front.plain(most as usize, |address, len| {
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

    /// Describes any packet; returns the blocks that it takes. `None`: no room in the ring at the moment.
    #[inline(never)]
    fn describe(
        &self,
        packet: &mut Packet,
        limits: &Limits<'_>,
        at: u32,
        room: u32,
    ) -> Result<Option<u32>, DropReason> {
        // Enough for the longest, so that nothing is worked on twice for want of room.
        if room < MAX_BLOCKS {
            return Ok(None);
        }
        let mode = &self.mode;
        let minimum = mode.inline_minimum;
        if packet.len() < SHORTEST {
            return Err(DropReason::TooShort);
        }
        let wishes = if packet.flags().intersects(REQUESTS) {
            offload::wishes(packet, minimum > 0, mode.tunnels)?
        } else {
            Wishes::default()
        };
        let longest = wishes.segment.map_or(limits.longest, |tso| mode.max_tso + usize::from(tso.header));
        let len = packet.len();
        if len > longest {
            return Err(DropReason::TooLong);
        }
        if wishes.segment.is_some_and(|tso| usize::from(tso.header) + usize::from(tso.mss) > limits.longest) {
            return Err(DropReason::KernelOffload);
        }
        let inline = match wishes.segment {
            Some(tso) => tso.header.into(),
            None if len <= mode.inline && wishes.tag.is_none() => len,
            None => minimum,
        };
        if packet.data().len() < inline && !fill_up(packet, inline) {
            return Err(DropReason::TooShort);
        }
        let wqe = match self.gather(packet, &wishes, inline) {
            Some(wqe) => wqe,
            None => {
                // Too many segments, or in memory that the device cannot reach.
                let copy = packet.duplicate(limits.pool).ok_or(DropReason::NoBuffer)?;
                limits.counters.copied.add(1);
                *packet = copy;
                self.gather(packet, &wishes, inline).ok_or(DropReason::TxError)?
            }
        };
        Ok(Some(wqe.write(&self.ring, at, self.number)))
    }

    /// The packet's descriptor with its first bytes `inline`; `None` if it has too many segments, or one where the device cannot read.
    fn gather(&self, packet: &Packet, wishes: &Wishes, inline: usize) -> Option<Wqe> {
        let mut wqe = Wqe::new(wishes, packet.data().get(..inline)?)?;
        let mut skip = inline;
        for segment in packet.segments() {
            let piece = &segment[skip.min(segment.len())..];
            skip = skip.saturating_sub(segment.len());
            if piece.is_empty() {
                continue;
            }
            let address = piece.as_ptr() as u64;
            let (there, key) = self.keys.reach(address)?;
            if !wqe.push(there, key, piece.len()) {
                return None;
            }
        }
        Some(wqe)
    }
}

impl send::SendRing for SendRing {
    #[inline(always)]
    fn flight(&self) -> &Flight {
        &self.flight
    }

    #[inline(always)]
    fn complete(&mut self, _: &QueueCounters) -> Result<(), Fault> {
        let mut through = 0;
        let mut result = Ok(());
        // A device that writes without an end must not keep the worker here.
        for _ in 0..self.flight.most_bursts() {
            let Some((entry, tail)) = self.completions.look() else { break };
            if tail.kind() != kind(CQE_REQUEST, FORMAT_NONE) {
                result = Err(if tail.opcode() == CQE_REQUEST_ERROR { entry.failure(tail) } else { Fault::UnknownType });
                break;
            }
            if tail.low24() != self.number {
                result = Err(Fault::ForeignQueue);
                break;
            }
            let Some(burst) = self.flight.eldest_burst() else {
                result = Err(Fault::NothingOnItsWay);
                break;
            };
            if tail.position() != burst.last as u16 {
                result = Err(Fault::OutOfOrder);
                break;
            }
            self.completions.advance(1);
            through += burst.packets as usize;
            self.flight.landed(burst);
        }
        if through > 0 {
            self.completions.publish();
            self.flight.free(through);
        }
        result
    }

    #[inline(always)]
    fn post(&mut self, batch: &mut Batch, limits: &Limits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let mut front = Front::new(batch, self.flight.room(), Plain::of(limits.pool, REQUESTS));
        let (mut bytes, mut result) = (0, Ok(()));
        let start = self.flight.next;
        let free = self.blocks - self.flight.used();
        let (mut at, mut last) = (start, start);
        let (pointers, multi_packet, by_pointer) =
            (self.pointers(limits), self.mode.multi_packet, self.mode.by_pointer());
        while front.left() > 0 {
            let room = free - at.wrapping_sub(start);
            if by_pointer {
                let described = if multi_packet {
                    Self::pack(&pointers, &mut front, at, room)
                } else {
                    Self::point(&pointers, &mut front, at, room)
                };
                if described.end != at {
                    (last, at) = (described.last, described.end);
                    bytes += described.bytes;
                    continue;
                }
            }
            match front.any(|packet| self.describe(packet, limits, at, room)) {
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
        let taken = front.taken();
        if taken > 0 {
            // The first word of the control segment is in place; the device reads none of it before it is told.
            self.ring.at(last.wrapping_mul(SEGMENTS_PER_BLOCK))[1].store(COMPLETE, Ordering::Relaxed);
            self.last = last;
            self.flight.launch_front(front, last, at);
        }
        (taken, bytes, result)
    }

    /// The record, which counts, then the register, which makes the device look. A lone short descriptor goes into the register's buffer
    /// whole: the device need not fetch it, and write-combining memory sends one line either way. Of several, the device fetches the others
    /// anyway (rdma-core: providers/mlx5/qp.c, post_send_db).
    #[inline(always)]
    fn ring_doorbell(&mut self) {
        let (last, next) = (self.last, self.flight.next);
        self.records.store32_release(4 * RECORD_SEND, (next & 0xffff).to_be());
        let first = last.wrapping_mul(SEGMENTS_PER_BLOCK);
        let Self { ring, registers, .. } = self;
        let word = |at: usize| ring.at(first.wrapping_add(at as u32 / 2))[at % 2].load(Ordering::Relaxed);
        let blocks = next.wrapping_sub(last);
        if self.told == last && blocks <= self.blue_flame && registers.are_ours_alone() {
            registers.next().ring_with((blocks * SEND_BLOCK / 8) as usize, word);
        } else {
            registers.next().ring(word(0));
        }
        self.told = next;
    }
}

/// Makes the first `n` bytes lie in the first segment; a packet shorter than that is padded, which a device would do as well.
#[cold]
fn fill_up(packet: &mut Packet, n: usize) -> bool {
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

/// What is known of every plain packet.
struct Pointers<'a> {
    ring: View<'a, Segment>,
    key: u32,
    /// What is added to an address of ours to make it the device's.
    distance: u64,
    /// Bytes of the longest frame, less those of the shortest.
    range: usize,
    number: u32,
}

impl Pointers<'_> {
    /// The segment that points to a packet's data in the port's pool, if the port lets that many bytes through.
    #[inline(always)]
    fn to(&self, address: u64, len: usize) -> Option<[u64; 2]> {
        let is_in_range = len.wrapping_sub(SHORTEST) <= self.range;
        is_in_range.then(|| pointer(address.wrapping_add(self.distance), self.key, len as u32))
    }
}

/// What came of packets.
struct Described {
    bytes: u64,
    /// The last descriptor, and where the next one begins.
    last: u32,
    end: u32,
}

const _: () = assert!(MAX_TSO_HEADER < super::wqe::MAX_INLINE);
