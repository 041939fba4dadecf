//! Transmit queues.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell, View};
use wirepath_nic_defs::mlx5::{
    CQE_REQUEST, CQE_REQUEST_ERROR, FORMAT_NONE, OPCODE_ENHANCED_MPW, OPCODE_SEND, RECORD_SEND, SEGMENTS_PER_BLOCK,
};

use super::cq::{CompletionQueue, kind};
use super::offload::{self, MAX_TSO_HEADER, REQUESTS};
use super::wqe::{COMPLETE, MAX_BLOCKS, Segment, Segments, Wishes, Wqe, blocks, control, pointer};
use crate::counters::QueueCounters;
use crate::drivers::direct::SHORTEST;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::send::{self, Burst, Flight, Limits};
use crate::drops::DropReason;
use crate::packet::{Batch, Packet};

/// Most packets of a multi-packet descriptor: what DPDK goes up to.
const MULTI_PACKET: usize = 32;
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
}

impl SendMode {
    /// Whether packets are described by a pointer alone.
    fn pointers(&self) -> bool {
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
    /// Its registers, which take turns; both are the same if there is one only.
    pub(super) doorbells: [Doorbell; 2],
}

/// A send queue.
pub(super) struct SendRing {
    ring: Segments,
    records: DeviceMemory,
    completions: CompletionQueue,
    doorbells: [Doorbell; 2],
    keys: Arc<Keys>,
    number: u32,
    mode: SendMode,
    /// Basic blocks of the ring.
    blocks: u32,
    /// Descriptor that the register is told.
    last: u32,
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
            doorbells: place.doorbells,
            keys,
            number: place.number,
            // Where something has to lie in the descriptor, there is one descriptor for each packet.
            mode: SendMode { multi_packet: mode.multi_packet && mode.pointers(), ..mode },
            blocks,
            last: 0,
            // Each burst takes a block at least.
            flight: Flight::new(depth, blocks, ending),
        })
    }

    /// What is known of every plain packet, as values: as far as the compiler knows, what is written to the ring could change fields.
    #[inline(always)]
    fn plain(&self, limits: &Limits<'_>) -> Plain<'_> {
        let (home, home_bytes, key, distance) = self.keys.home().bounds();
        let range = limits.longest - SHORTEST;
        Plain { ring: self.ring.view(), home, home_bytes, key, distance, range, number: self.number }
    }

    /// Describes one packet by a pointer; packets, bytes and blocks, all zero if that is not possible.
    #[inline(always)]
    fn point(plain: &Plain<'_>, packet: &Packet, at: u32, room: u32) -> (usize, u64, u32) {
        let Some((data, bytes)) = plain.pointer(packet).filter(|_| room > 0) else { return (0, 0, 0) };
        let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
        plain.ring.write(first.wrapping_add(2), data);
        plain.ring.write(first.wrapping_add(1), [0, 0]);
        plain.ring.write(first, [control(OPCODE_SEND, at, plain.number, 3), 0]);
        (1, bytes, 1)
    }

    /// Describes packets from the front by pointers in one descriptor; packets, bytes and blocks, all zero if that is not possible.
    #[inline(always)]
    fn pack(plain: &Plain<'_>, packets: &[Packet], at: u32, room: u32) -> (usize, u64, u32) {
        let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
        let most = ((room * SEGMENTS_PER_BLOCK).saturating_sub(LEAD) as usize).min(MULTI_PACKET);
        let (mut count, mut bytes) = (0, 0);
        for packet in packets.iter().take(most) {
            let Some((data, len)) = plain.pointer(packet) else { break };
            plain.ring.write(first.wrapping_add(LEAD + count), data);
            bytes += len;
            count += 1;
        }
        if count == 0 {
            return (0, 0, 0);
        }
        plain.ring.write(first.wrapping_add(1), [0, 0]);
        plain.ring.write(first, [control(OPCODE_ENHANCED_MPW, at, plain.number, LEAD + count), 0]);
        (count as usize, bytes, blocks(LEAD + count))
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
        let most = self.flight.room().min(batch.len());
        let (mut n, mut bytes, mut result) = (0, 0, Ok(()));
        let start = self.flight.next;
        let free = self.blocks - self.flight.used();
        let (mut at, mut last) = (start, start);
        let packets = &mut batch.as_mut_slice()[..most];
        let (plain, multi_packet, pointers) = (self.plain(limits), self.mode.multi_packet, self.mode.pointers());
        while n < most {
            let room = free - at.wrapping_sub(start);
            let (count, sum, taken) = if multi_packet {
                Self::pack(&plain, &packets[n..], at, room)
            } else if pointers {
                Self::point(&plain, &packets[n], at, room)
            } else {
                (0, 0, 0)
            };
            if count > 0 {
                (last, at) = (at, at.wrapping_add(taken));
                n += count;
                bytes += sum;
                continue;
            }
            let packet = &mut packets[n];
            match self.describe(packet, limits, at, room) {
                Ok(Some(taken)) => {
                    (last, at) = (at, at.wrapping_add(taken));
                    n += 1;
                    bytes += packet.len() as u64;
                }
                Ok(None) => break,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
            }
        }
        if n > 0 {
            // The first word of the control segment is in place; the device reads none of it before it is told.
            self.ring.at(last.wrapping_mul(SEGMENTS_PER_BLOCK))[1].store(COMPLETE, Ordering::Relaxed);
            self.last = last;
            self.flight.launch(batch, Burst { packets: n as u32, last, end: at });
        }
        (n, bytes, result)
    }

    /// The record, which counts, then the register, which makes the device look.
    #[inline(always)]
    fn ring_doorbell(&mut self) {
        self.records.store32_release(4 * RECORD_SEND, (self.flight.next & 0xffff).to_be());
        let word = self.ring.at(self.last.wrapping_mul(SEGMENTS_PER_BLOCK))[0].load(Ordering::Relaxed);
        self.doorbells[0].ring(word);
        self.doorbells.swap(0, 1);
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
struct Plain<'a> {
    ring: View<'a, Segment>,
    /// The region of the port's pool.
    home: u64,
    home_bytes: u64,
    key: u32,
    /// What is added to an address of ours to make it the device's.
    distance: u64,
    /// Bytes of the longest frame, less those of the shortest.
    range: usize,
    number: u32,
}

impl Plain<'_> {
    /// The segment that points to a packet, with its bytes, if that is all that there is to say of it.
    #[inline(always)]
    fn pointer(&self, packet: &Packet) -> Option<([u64; 2], u64)> {
        let data = packet.data();
        let (address, len) = (data.as_ptr() as u64, data.len());
        let is_plain = !packet.flags().intersects(REQUESTS)
            & !packet.is_chain()
            & (len.wrapping_sub(SHORTEST) <= self.range)
            & (address.wrapping_sub(self.home) < self.home_bytes);
        is_plain.then(|| (pointer(address.wrapping_add(self.distance), self.key, len as u32), len as u64))
    }
}

const _: () = assert!(MAX_TSO_HEADER < super::wqe::MAX_INLINE);
