//! Receive queues.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use wirepath_memory::{DeviceMemory, Doorbell, write_slot};
use wirepath_nic_defs::mana::{
    CQE_RX_COALESCED_4, CQE_RX_OBJECT_FENCE, CQE_RX_OKAY, CQE_RX_TRUNCATED, CqDoorbell, OOB_SHORT, RX_COALESCED,
    RX_FLAGS, RX_PACKET_BYTES, RX_PACKETS, RX_WQE_OFFSET, RqDoorbell, RxFlags, wqe_units,
};

use super::cq::{CompletionQueue, Entry, Positions, RawCqe};
use super::wqe::{UNIT, Units, Wqe, pair, short_header, tail};
use crate::drivers::nic::common;
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::rx_interrupt::RxInterrupt;
use crate::drivers::nic::common::rx_queue::{self, PoolExhausted, PostedBuffers, RssGroup, RxResources, swap_received};
use wirepath_packet::driver::{LengthRange, OffloadResult, RxDescriptorOps, RxPacketInfo};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::ChecksumStatus;
use wirepath_packet::{BATCH, Batch, DATA_ROOM, MetaTemplate, Packet, Pool};

/// Bytes of an Ethernet header.
const ETHERNET_HEADER: u32 = common::ETHERNET_HEADER as u32;

/// Memory of a receive queue, as `manadv_init_obj` reports it.
#[derive(Debug)]
pub(super) struct RxQueueMemory {
    /// The work queue.
    pub(super) ring: DeviceMemory,
    /// The completion queue, with as many bytes as the requested entries need.
    pub(super) completions: DeviceMemory,
    /// Number of the receive queue.
    pub(super) rq: u32,
    /// Doorbell register of receive queues.
    pub(super) doorbell: Doorbell,
}

/// Wakes a sleeping worker.
#[derive(Debug)]
pub(super) struct Waker {
    pub(super) interrupt: RxInterrupt,
    /// Number of the completion queue.
    pub(super) cq: u32,
    /// Doorbell register of completion queues.
    pub(super) doorbell: Doorbell,
}

/// Most packets of one completion.
const COALESCED: usize = RX_COALESCED as usize;

/// Most completions without a packet per parse. The bound keeps a device that writes them endlessly from
/// blocking the worker.
const FENCES: u32 = 8;

/// A received packet, as described by a completion.
#[derive(Clone, Copy, Debug, Default)]
struct ParsedCqe {
    /// Length in bytes; 0 for [`TRUNCATED`].
    len: u32,
    /// [`RxFlags`].
    flags: u32,
    hash: u32,
}

/// A packet that did not fit in its buffers.
const TRUNCATED: ParsedCqe = ParsedCqe { len: 0, flags: 0, hash: 0 };

/// Fraction of the ring that is reposted before the doorbell is rung: 1 / this number.
const DOORBELL_FRACTION: u32 = 8;

/// A receive ring.
pub(super) struct RxRing {
    ring: Units,
    completions: CompletionQueue,
    doorbell: Doorbell,
    number: u32,
    lkey: u32,
    /// Offset from an address of this process to the device's IOVA.
    iova_offset: u64,
    /// Lengths of single-buffer packets.
    lengths: LengthRange,
    /// Buffers and units of a work request.
    buffers: usize,
    units: u32,
    /// Free-running counter of the next work request. A whole ring of requests is posted from there.
    next: u32,
    /// Value of `next` at the last doorbell.
    published: u32,
    positions: Positions,
    /// Packets that were parsed but not delivered: the first `known`.
    parsed: Box<[ParsedCqe; BATCH + COALESCED]>,
    pending: usize,
    waker: Option<Waker>,
    posted: PostedBuffers,
}

impl fmt::Debug for RxRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RxRing").field("number", &self.number).field("buffers", &self.buffers).finish_non_exhaustive()
    }
}

impl RxRing {
    /// Posts a work request of `buffers` buffers for each entry of the completion queue, and rings the
    /// doorbell. `None` if the ring is too small or sizes are not powers of two; `Err` if the pool is
    /// exhausted.
    pub(super) fn new(
        rss_group: Arc<RssGroup>,
        mrs: &MrTable,
        queue_memory: RxQueueMemory,
        pool: &Pool,
        template: &MetaTemplate,
        buffers: usize,
        positions: Positions,
    ) -> Result<Option<Self>, PoolExhausted> {
        let Some(completions) = CompletionQueue::new(&queue_memory.completions, queue_memory.rq, false) else {
            return Ok(None);
        };
        let Some(ring) = Units::new(&queue_memory.ring) else { return Ok(None) };
        let (depth, units) = (completions.count(), wqe_units(OOB_SHORT, buffers as u32));
        if depth.checked_mul(units).is_none_or(|all| all > ring.count()) {
            return Ok(None);
        }
        let posted = PostedBuffers::allocate(depth as usize * buffers, pool, template, rss_group)?;
        let mut this = Self {
            ring,
            completions,
            doorbell: queue_memory.doorbell,
            number: queue_memory.rq,
            lkey: mrs.primary_mr().lkey(),
            iova_offset: mrs.primary_mr().iova_offset(),
            lengths: LengthRange::new(ETHERNET_HEADER, DATA_ROOM as u32),
            buffers,
            units,
            next: 0u32.wrapping_sub(depth),
            published: 0,
            positions,
            parsed: Box::new([TRUNCATED; BATCH + COALESCED]),
            pending: 0,
            waker: None,
            posted,
        };
        for _ in 0..depth {
            this.post();
        }
        this.ring_doorbell();
        Ok(Some(this))
    }

    /// Sets the waker.
    pub(super) fn set_waker(&mut self, waker: Option<Waker>) {
        self.waker = waker;
    }

    /// Returns the number of work requests minus one.
    #[inline(always)]
    fn mask(&self) -> u32 {
        self.completions.count() - 1
    }

    /// Returns the position in units of a work request.
    #[inline(always)]
    fn position(&self, counter: u32) -> u32 {
        counter.wrapping_mul(self.units)
    }

    /// Delivers single-buffer packets directly, until there are no more of this kind. Returns their bytes,
    /// and whether other completions follow, for [`Self::look`].
    #[inline(always)]
    fn run(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, bool) {
        let Some(cache) = resources.cache_handle() else { return (0, true) };
        let mut burst = cache.burst(batch, self.lengths);
        loop {
            let (entries, expected) = self.completions.rest();
            let mut by = Entries {
                expected,
                next: self.next,
                positions: self.positions,
                mask: self.ring.count() - 1,
                shortest: self.lengths.shortest(),
                iova_offset: self.iova_offset,
                what: pair(self.lkey, DATA_ROOM as u32),
            };
            let (at, ring_slots) =
                ((self.next & self.mask()) as usize, self.next.wrapping_add(self.completions.count()));
            let (slots, ring_slots) = (&mut self.posted[at..], self.ring.view().run(ring_slots));
            let n = burst.receive(slots, ring_slots, usize::MAX, |at| &entries[at..], &mut by);
            (self.next, self.positions) = (by.next, by.positions);
            self.completions.advance(n as u32);
            if burst.is_full() {
                return (burst.bytes(), false);
            }
            match self.completions.reader().peek() {
                Ok(None) => return (burst.bytes(), false),
                // End of the ring; continues at its start.
                Ok(Some(_)) if n > 0 => {}
                _ => return (burst.bytes(), true),
            }
        }
    }

    /// Parses completions until `room` packets are known.
    #[inline(never)]
    fn look(&mut self, room: usize) -> Result<(), QueueFault> {
        let longest = (self.buffers * DATA_ROOM) as u32;
        let (units, step) = (self.ring.count() - 1, self.units);
        // Local copies: from fields, the compiler would reload them after each write.
        let mut reader = self.completions.reader();
        let (next, mut pending, mut positions) = (self.next, self.pending, self.positions);
        let parsed = &mut *self.parsed;
        let mut fences = 0;
        let result = loop {
            if pending >= room.min(BATCH) {
                break Ok(());
            }
            let entry = match reader.peek() {
                Ok(Some(entry)) => entry,
                Ok(None) => break Ok(()),
                Err(fault) => break Err(fault),
            };
            let counter = next.wrapping_add(pending as u32);
            let (at, reported) = (counter.wrapping_mul(step), entry.word(RX_WQE_OFFSET));
            if entry.cqe_type() == CQE_RX_OKAY {
                if !positions.fits(reported, at, step, units) {
                    break Err(QueueFault::OutOfOrder);
                }
                let cqe = packet_of(entry, 0);
                if cqe.len.wrapping_sub(1) >= longest {
                    break Err(QueueFault::BadLength);
                }
                parsed[pending] = cqe;
                pending += 1;
            } else {
                match unusual(entry, &mut parsed[pending..], longest) {
                    Ok(n) if n > 0 && !positions.fits(reported, at, n as u32 * step, units) => {
                        break Err(QueueFault::OutOfOrder);
                    }
                    Ok(n) => {
                        pending += n;
                        fences += u32::from(n == 0);
                    }
                    Err(fault) => break Err(fault),
                }
            }
            reader.advance();
            if fences == FENCES {
                break Ok(());
            }
        };
        let read = reader.next();
        self.completions.resume(read);
        (self.pending, self.positions) = (pending, positions);
        result
    }

    /// Delivers known packets, as many as the batch has room for, and reposts their work requests. Returns
    /// packets and bytes.
    fn deliver(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, u64) {
        let n = self.pending.min(batch.space());
        if n == 0 {
            return (0, 0);
        }
        let cache = resources.cache_handle();
        let (mut packets, mut bytes) = (0, 0);
        for i in 0..n {
            let cqe = self.parsed[i];
            let first = (self.next & self.mask()) as usize * self.buffers;
            let slots = &mut self.posted[first..first + self.buffers];
            let taken = cache.as_ref().filter(|_| cqe.len >= ETHERNET_HEADER);
            match taken.and_then(|cache| swap_received(cache, slots, cqe.len)) {
                Some(mut packet) => {
                    note(&mut packet, cqe);
                    // There is room: the caller has checked.
                    drop(batch.push(packet));
                    packets += 1;
                    bytes += u64::from(cqe.len);
                }
                None => resources.count_drop(reason(cqe)),
            }
            self.post();
        }
        // A coalesced completion may contain more packets than there was room for.
        self.parsed.copy_within(n..self.pending, 0);
        self.pending -= n;
        (packets, bytes)
    }

    /// Reposts the next work request and advances.
    fn post(&mut self) {
        let first = (self.next & self.mask()) as usize * self.buffers;
        let mut wqe = Wqe::new(&[short_header(self.buffers as u32), 0]);
        for packet in &self.posted[first..first + self.buffers] {
            let address = packet.default_data_address().wrapping_add(self.iova_offset);
            let pushed = wqe.push(address, self.lkey, DATA_ROOM);
            debug_assert!(pushed, "no frame has as many buffers as a WQE has room for");
        }
        let at = self.position(self.next.wrapping_add(self.completions.count()));
        let start = wqe.write_rest(&self.ring, at);
        self.ring.write(at, start);
        self.next = self.next.wrapping_add(1);
    }

    /// Rings the doorbell: tells the device how far the ring is filled.
    #[inline(always)]
    fn ring_doorbell(&mut self) {
        self.published = self.next;
        let tail = tail(self.position(self.next.wrapping_add(self.completions.count())));
        self.doorbell.ring(RqDoorbell::default().with_id(self.number.into()).with_tail(tail.into()).0);
    }
}

impl RxRing {
    /// Receives any kind of completion.
    #[inline(never)]
    fn receive_any(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, u64, Result<(), QueueFault>) {
        let looked = self.look(batch.space());
        let (packets, bytes) = self.deliver(batch, resources);
        (packets, bytes, looked)
    }
}

impl rx_queue::RxRing for RxRing {
    #[inline(always)]
    fn is_idle(&mut self) -> bool {
        self.pending == 0 && matches!(self.completions.reader().peek(), Ok(None))
    }

    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch, resources: &RxResources<'_>) -> (u64, u64, Result<(), QueueFault>) {
        let start = batch.len();
        let plain = self.buffers == 1 && self.pending == 0;
        let (mut bytes, unusual) = if plain { self.run(batch, resources) } else { (0, true) };
        let (mut packets, mut result) = ((batch.len() - start) as u64, Ok(()));
        if unusual {
            let (more, further, looked) = self.receive_any(batch, resources);
            (packets, bytes, result) = (packets + more, bytes + further, looked);
        }
        // Not for every few packets: a register write is expensive, and the device still has the rest of the
        // ring.
        if self.next.wrapping_sub(self.published) >= (self.completions.count() / DOORBELL_FRACTION).max(1) {
            self.ring_doorbell();
        }
        (packets, bytes, result)
    }

    fn waiting(&self) -> Option<u32> {
        Some(self.pending as u32 + self.completions.waiting())
    }

    fn arm_interrupt(&mut self) -> Option<BorrowedFd<'_>> {
        let Waker { interrupt, cq, doorbell } = self.waker.as_ref()?;
        interrupt.drain_events()?;
        let value = CqDoorbell::default().with_id((*cq).into()).with_tail(self.completions.taken().into()).with_arm(1);
        doorbell.ring(value.0);
        // Packets that arrived before arming raise no event.
        let is_empty = self.pending == 0 && matches!(self.completions.reader().peek(), Ok(None));
        is_empty.then(|| interrupt.descriptor())
    }
}

/// Source of packets with a completion each, in work requests of one unit.
#[derive(Clone, Copy)]
struct Entries {
    /// Expected bits of the last words.
    expected: u32,
    /// The next work request, which is also its position.
    next: u32,
    positions: Positions,
    mask: u32,
    /// Bytes of the shortest packet.
    shortest: u32,
    iova_offset: u64,
    /// lkey and size of a buffer.
    what: u64,
}

impl RxDescriptorOps for Entries {
    type Completion = RawCqe;
    type Descriptor = [AtomicU64; UNIT];

    #[inline(always)]
    fn default_offload(&self) -> OffloadResult {
        const { OffloadResult::new(ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_GOOD), true) }
    }

    #[inline(always)]
    fn parse(&mut self, entry: &RawCqe) -> Option<RxPacketInfo> {
        let entry = Entry::expect(entry, self.expected)?;
        let ParsedCqe { len, flags, hash } = packet_of(entry, 0);
        if entry.cqe_type() != CQE_RX_OKAY || !self.positions.fits(entry.word(RX_WQE_OFFSET), self.next, 1, self.mask) {
            return None;
        }
        let offload = Some(OffloadResult::new(checksum_status(flags), is_hashed(flags)));
        Some(RxPacketInfo {
            excess_len: len.wrapping_sub(self.shortest).into(),
            offload,
            hash: Some(hash),
            has_metadata: flags & RARE != 0,
        })
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    #[inline(always)]
    fn post(&self, slot: &[AtomicU64; UNIT], address: u64) {
        write_slot(slot, [short_header(1), 0, address.wrapping_add(self.iova_offset), self.what]);
    }

    #[cold]
    #[inline(never)]
    fn write_metadata(entry: &RawCqe, packet: &mut Packet) {
        note_rare(packet, Entry::reread(entry).word(RX_FLAGS));
    }
}

/// Returns the reason for dropping a packet whose buffers stay posted.
#[cold]
fn reason(cqe: ParsedCqe) -> DropReason {
    match cqe.len {
        0 => DropReason::TooLong,
        1..ETHERNET_HEADER => DropReason::TooShort,
        _ => DropReason::NoBuffer,
    }
}

/// Reads packet `i` of a completion.
#[inline(always)]
fn packet_of(entry: Entry<'_>, i: u32) -> ParsedCqe {
    let at = RX_PACKETS + i * RX_PACKET_BYTES;
    ParsedCqe { len: entry.word(at) & 0xffff, flags: entry.word(RX_FLAGS), hash: entry.word(at + 8) }
}

/// Parses a completion other than a single packet. Returns the number of consumed work requests.
#[inline(never)]
fn unusual(entry: Entry<'_>, parsed: &mut [ParsedCqe], longest: u32) -> Result<usize, QueueFault> {
    match entry.cqe_type() {
        CQE_RX_COALESCED_4 => {
            let mut n = 0;
            for (i, cqe) in (0..RX_COALESCED).zip(parsed) {
                *cqe = packet_of(entry, i);
                if cqe.len == 0 {
                    break;
                }
                if cqe.len > longest {
                    return Err(QueueFault::BadLength);
                }
                n += 1;
            }
            if n == 0 { Err(QueueFault::BadLength) } else { Ok(n) }
        }
        CQE_RX_TRUNCATED => {
            let Some(first) = parsed.first_mut() else { return Ok(0) };
            *first = TRUNCATED;
            Ok(1)
        }
        CQE_RX_OBJECT_FENCE => Ok(0),
        _ => Err(QueueFault::UnknownType),
    }
}

/// Writes the metadata into the packet.
fn note(packet: &mut Packet, cqe: ParsedCqe) {
    packet.set_checksum_status(checksum_status(cqe.flags));
    if is_hashed(cqe.flags) {
        packet.set_rss_hash(cqe.hash);
    }
    if cqe.flags & RARE != 0 {
        note_rare(packet, cqe.flags);
    }
}

/// Flags of metadata that few packets have: a stripped VLAN tag, or a checksum status of an outer header.
const RARE: u32 = RxFlags(0).with_vlan_present(1).with_outer_ip_ok(1).with_outer_ip_bad(1).0;

#[cold]
#[inline(never)]
fn note_rare(packet: &mut Packet, flags: u32) {
    let flags = RxFlags(flags);
    if flags.vlan_present() != 0 {
        packet.set_vlan(flags.vlan_id() as u16);
    }
    let outer = match (flags.outer_ip_ok(), flags.outer_ip_bad()) {
        (_, 1) => ChecksumStatus::OUTER_L3_BAD,
        (1, _) => ChecksumStatus::OUTER_L3_GOOD,
        _ => ChecksumStatus::NONE,
    };
    packet.set_checksum_status(packet.checksum_status().with(outer));
}

#[inline(always)]
fn is_hashed(flags: u32) -> bool {
    flags & RxFlags(0).with_hash_type(u32::MAX).0 != 0
}

/// Checksum status for the device's six bits, from IPv4 good to UDP bad. A checksum that is reported as both
/// good and bad counts as bad.
static VERDICTS: [ChecksumStatus; 64] = {
    let mut table = [ChecksumStatus::NONE; 64];
    let mut bits = 0;
    while bits < 64 {
        let flags = RxFlags((bits as u32) << IP_OK);
        let mut checksum_status = ChecksumStatus::NONE;
        if flags.ip_bad() == 1 {
            checksum_status = checksum_status.with(ChecksumStatus::L3_BAD);
        } else if flags.ip_ok() == 1 {
            checksum_status = checksum_status.with(ChecksumStatus::L3_GOOD);
        }
        if flags.tcp_bad() == 1 || flags.udp_bad() == 1 {
            checksum_status = checksum_status.with(ChecksumStatus::L4_BAD);
        } else if flags.tcp_ok() == 1 || flags.udp_ok() == 1 {
            checksum_status = checksum_status.with(ChecksumStatus::L4_GOOD);
        }
        table[bits] = checksum_status;
        bits += 1;
    }
    table
};
const IP_OK: u32 = RxFlags(0).with_ip_ok(1).0.trailing_zeros();

#[inline(always)]
fn checksum_status(flags: u32) -> ChecksumStatus {
    VERDICTS[(flags >> IP_OK) as usize % VERDICTS.len()]
}
