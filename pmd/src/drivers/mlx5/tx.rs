//! Transmit queues.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mlx5::{
    CQE_REQUEST, CQE_REQUEST_ERROR, FORMAT_NONE, OPCODE_ENHANCED_MPW, OPCODE_SEND, RECORD_SEND, SEGMENTS_PER_BLOCK,
};

use super::Exchange;
use super::cq::{CompletionQueue, kind};
use super::fault::Fault;
use super::offload::{self, MAX_TSO_HEADER, REQUESTS};
use super::wqe::{COMPLETE, MAX_BLOCKS, Segments, Wishes, Wqe, blocks, control, pointer};
use crate::counters::QueueCounters;
use crate::drivers::direct::keys::Keys;
use crate::drops::DropReason;
use crate::packet::{Batch, Held, Packet, Pool};
use crate::port::TransmitQueue;

/// Bytes of an Ethernet header.
const SHORTEST: usize = 14;
/// VLAN tags that may come on top of the MTU.
const TAGS: usize = 8;
/// Most packets of a multi-packet descriptor: what DPDK goes up to.
const MULTI_PACKET: usize = 32;
/// Segments of a multi-packet descriptor in front of its packets.
const LEAD: u32 = 2;

/// How packets are described to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Packets of one burst: only its last descriptor gets a completion, which stands for all.
#[derive(Clone, Copy, Debug, Default)]
struct Burst {
    packets: u32,
    /// Block counter of the last descriptor, and of what follows it.
    last: u32,
    end: u32,
}

/// A send queue with the packets that are on their way. Dropped, it first destroys the hardware's queue, then frees the packets.
pub(super) struct SendRing {
    // What keeps the hardware's queue comes before what that queue reads; so does the rest that keeps its memory.
    _hardware: Box<dyn Any + Send>,
    ring: Segments,
    records: DeviceMemory,
    completions: CompletionQueue,
    doorbells: [Doorbell; 2],
    held: Held,
    keys: Arc<Keys>,
    number: u32,
    mode: SendMode,
    /// Basic blocks of the ring.
    blocks: u32,
    /// Block counters: of the next descriptor, and of the eldest that is on its way.
    next: u32,
    eldest: u32,
    /// Bursts on their way, `first_burst` the eldest; as many slots as blocks, of which each burst takes one at least.
    bursts: Box<[Burst]>,
    first_burst: u32,
    end_burst: u32,
}

impl fmt::Debug for SendRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRing").field("number", &self.number).field("held", &self.held).finish_non_exhaustive()
    }
}

impl SendRing {
    /// A ring that no packet has gone through, for `depth` packets. `hardware` is what is dropped before the packets are freed. `None` if
    /// sizes are no powers of two, or one of them too small.
    pub(super) fn new(
        hardware: Box<dyn Any + Send>,
        keys: Arc<Keys>,
        place: SendPlace,
        mode: SendMode,
        depth: u32,
    ) -> Option<Self> {
        let ring = Segments::new(&place.ring)?;
        let blocks = ring.count() / SEGMENTS_PER_BLOCK;
        let completions = CompletionQueue::new(&place.completions, &place.completion_records)?;
        // Each descriptor may complete with an error.
        if blocks < 2 * MAX_BLOCKS || completions.count() < blocks {
            return None;
        }
        Some(Self {
            _hardware: hardware,
            ring,
            records: place.records,
            completions,
            doorbells: place.doorbells,
            held: Held::with_room_for(depth),
            keys,
            number: place.number,
            // Where something has to lie in the descriptor, there is one descriptor for each packet.
            mode: SendMode { multi_packet: mode.multi_packet && mode.pointers(), ..mode },
            blocks,
            next: 0,
            eldest: 0,
            bursts: vec![Burst::default(); blocks as usize].into(),
            first_burst: 0,
            end_burst: 0,
        })
    }

    /// Packets on their way.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    #[inline(always)]
    fn burst(&mut self, counter: u32) -> &mut Burst {
        let mask = self.bursts.len() - 1;
        &mut self.bursts[counter as usize & mask]
    }

    /// Takes note of what the device has sent, and frees it.
    #[inline(always)]
    fn complete(&mut self) -> Result<(), Fault> {
        let mut through = 0;
        let mut result = Ok(());
        // A device that writes without an end must not keep the worker here.
        for _ in 0..self.bursts.len() {
            let Some((entry, tail)) = self.completions.look() else { break };
            if tail.kind() != kind(CQE_REQUEST, FORMAT_NONE) {
                result = Err(if tail.opcode() == CQE_REQUEST_ERROR { entry.failure(tail) } else { Fault::UnknownType });
                break;
            }
            if tail.low24() != self.number {
                result = Err(Fault::ForeignQueue);
                break;
            }
            if self.first_burst == self.end_burst {
                result = Err(Fault::NothingOnItsWay);
                break;
            }
            let burst = *self.burst(self.first_burst);
            if tail.position() != burst.last as u16 {
                result = Err(Fault::OutOfOrder);
                break;
            }
            self.completions.advance(1);
            through += burst.packets as usize;
            self.eldest = burst.end;
            self.first_burst = self.first_burst.wrapping_add(1);
        }
        if through > 0 {
            self.completions.publish();
            self.held.free_front(through);
        }
        result
    }

    /// Describes packets from the front of the batch to the device, tells it, and takes them in. Returns how many, with their bytes; an error
    /// is about the packet behind them, which can never be sent.
    #[inline(always)]
    fn post(&mut self, batch: &mut Batch, limits: &Limits<'_>) -> (usize, u64, Result<(), DropReason>) {
        let most = self.held.room().min(batch.len());
        let (mut n, mut bytes, mut result) = (0, 0, Ok(()));
        let start = self.next;
        let free = self.blocks - start.wrapping_sub(self.eldest);
        let (mut at, mut last) = (start, start);
        let packets = &mut batch.as_mut_slice()[..most];
        while n < most {
            let room = free - at.wrapping_sub(start);
            let (count, sum, taken) = if self.mode.multi_packet {
                self.pack(&packets[n..], at, room, limits)
            } else {
                self.point(&packets[n], at, room, limits)
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
            self.next = at;
            *self.burst(self.end_burst) = Burst { packets: n as u32, last, end: at };
            self.end_burst = self.end_burst.wrapping_add(1);
            self.held.take_front(batch, n);
        }
        (n, bytes, result)
    }

    /// Whether a pointer is all that there is to say of the packet.
    #[inline(always)]
    fn is_plain(packet: &Packet, limits: &Limits<'_>) -> bool {
        !packet.flags().intersects(REQUESTS) & !packet.is_chain() & limits.allow(packet.data().len())
    }

    /// Describes one packet by a pointer; packets, bytes and blocks, all zero if that is not possible.
    #[inline(always)]
    fn point(&self, packet: &Packet, at: u32, room: u32, limits: &Limits<'_>) -> (usize, u64, u32) {
        let data = packet.data();
        let address = data.as_ptr() as u64;
        let Some(key) = self.keys.home().find(address) else { return (0, 0, 0) };
        if !Self::is_plain(packet, limits) | (room == 0) | !limits.pointers {
            return (0, 0, 0);
        }
        let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
        self.ring.write(first.wrapping_add(2), pointer(address, key, data.len() as u32));
        self.ring.write(first.wrapping_add(1), [0, 0]);
        self.ring.write(first, [control(OPCODE_SEND, at, self.number, 3), 0]);
        (1, data.len() as u64, 1)
    }

    /// Describes packets from the front by pointers in one descriptor; packets, bytes and blocks, all zero if that is not possible.
    #[inline(always)]
    fn pack(&self, packets: &[Packet], at: u32, room: u32, limits: &Limits<'_>) -> (usize, u64, u32) {
        let first = at.wrapping_mul(SEGMENTS_PER_BLOCK);
        let most = ((room * SEGMENTS_PER_BLOCK).saturating_sub(LEAD) as usize).min(MULTI_PACKET);
        let home = self.keys.home();
        let (mut count, mut bytes) = (0, 0);
        for packet in packets.iter().take(most) {
            let data = packet.data();
            let address = data.as_ptr() as u64;
            let Some(key) = home.find(address) else { break };
            if !Self::is_plain(packet, limits) {
                break;
            }
            self.ring.write(first.wrapping_add(LEAD + count), pointer(address, key, data.len() as u32));
            bytes += data.len() as u64;
            count += 1;
        }
        if count == 0 {
            return (0, 0, 0);
        }
        self.ring.write(first.wrapping_add(1), [0, 0]);
        self.ring.write(first, [control(OPCODE_ENHANCED_MPW, at, self.number, LEAD + count), 0]);
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
            if !wqe.push(address, self.keys.find(address)?, piece.len()) {
                return None;
            }
        }
        Some(wqe)
    }

    /// Tells the device how far the ring is filled: the record, which counts, then the register, which makes it look.
    #[inline(always)]
    fn ring_doorbell(&mut self) {
        self.records.store32_release(4 * RECORD_SEND, (self.next & 0xffff).to_be());
        let last = self.burst(self.end_burst.wrapping_sub(1)).last;
        let word = self.ring.at(last.wrapping_mul(SEGMENTS_PER_BLOCK))[0].load(Ordering::Relaxed);
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

/// What a port lets through, and where copies come from.
struct Limits<'a> {
    longest: usize,
    pointers: bool,
    pool: &'a Pool,
    counters: &'a QueueCounters,
}

impl Limits<'_> {
    #[inline(always)]
    fn allow(&self, len: usize) -> bool {
        len.wrapping_sub(SHORTEST) <= self.longest - SHORTEST
    }
}

/// Sends packets of one worker.
pub(super) struct Sender {
    ring: Option<SendRing>,
    exchange: Arc<Exchange<SendRing>>,
    counters: Arc<QueueCounters>,
    pool: Pool,
    /// Bytes of the longest frame.
    longest: usize,
}

impl Sender {
    /// Sends by the ring that waits in `exchange`; copies of packets that the device cannot reach come from `pool`.
    pub(super) fn new(exchange: Arc<Exchange<SendRing>>, pool: Pool, mtu: u16) -> Self {
        let longest = usize::from(mtu) + SHORTEST + TAGS;
        let mut ring = None;
        exchange.visit(&mut ring);
        Self { ring, exchange, counters: Arc::default(), pool, longest }
    }

    /// Whether nothing is on its way any more, after a look.
    pub(super) fn is_idle(&mut self) -> bool {
        self.reclaim();
        self.ring.as_ref().is_none_or(|ring| ring.len() == 0)
    }

    /// What is on its way will not arrive: nobody knows which of it did.
    #[cold]
    fn give_up(&mut self, fault: Fault) {
        let lost = self.ring.as_ref().map_or(0, SendRing::len);
        self.counters.drops.add(DropReason::TxError, lost as u64);
        self.exchange.give_up(&mut self.ring, fault);
    }

    #[cold]
    fn visit(&mut self) -> bool {
        let lost = self.ring.as_ref().map_or(0, SendRing::len);
        let living = self.exchange.visit(&mut self.ring);
        if self.ring.is_none() {
            self.counters.drops.add(DropReason::DeviceLost, lost as u64);
        }
        living
    }
}

impl TransmitQueue for Sender {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        if self.exchange.calls() && !self.visit() {
            self.counters.drops.add(DropReason::DeviceLost, batch.len() as u64);
            batch.clear();
            return;
        }
        let Some(ring) = &mut self.ring else { return self.counters.empty.add(1) };
        if let Err(fault) = ring.complete() {
            self.give_up(fault);
            return self.counters.empty.add(1);
        }
        let limits = Limits {
            longest: self.longest,
            pointers: ring.mode.pointers(),
            pool: &self.pool,
            counters: &self.counters,
        };
        let (mut packets, mut bytes) = (0, 0);
        loop {
            let (n, sum, result) = ring.post(batch, &limits);
            packets += n as u64;
            bytes += sum;
            match result {
                Ok(()) => break,
                Err(reason) => {
                    self.counters.drops.add(reason, 1);
                    batch.free_front(1);
                }
            }
        }
        if packets > 0 {
            ring.ring_doorbell();
        }
        self.counters.count_burst(packets, bytes);
    }

    fn reclaim(&mut self) {
        if self.exchange.calls() {
            self.visit();
        }
        if let Some(Err(fault)) = self.ring.as_mut().map(SendRing::complete) {
            self.give_up(fault);
        }
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

const _: () = assert!(MAX_TSO_HEADER < super::wqe::MAX_INLINE);
