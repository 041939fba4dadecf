//! Rings against a device that the tests play in plain memory.

// UNSAFETY: plays the device, which accesses buffers by address.
#![allow(unsafe_code)]

use std::sync::Arc;
use wirepath_packet::PortId;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::*;

use super::cq::Positions;
use super::rx::{RxQueueMemory, RxRing};
use super::tx::{TxQueueMemory, TxRing};
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::ring_handoff::RingHandoff;
use crate::drivers::nic::common::rx_queue::{NicRxQueue, RssGroup};
use crate::drivers::nic::common::test_support::{memory, mrs, packet, send, tx_queue};
use crate::drivers::nic::common::tx_queue::NicTxQueue;
use crate::port::{RxDriver, TxDriver};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Batch, DATA_ROOM, HeaderLengths, Packet, Pool, PtypeL3, PtypeL4};

const LKEY: u32 = 0x4711;
const QUEUE: u32 = 0x2c05;
const CQ: u32 = 0x99;

/// The device's side of a work queue and its completion queue.
struct FakeDevice {
    ring: DeviceMemory,
    completions: DeviceMemory,
    page: DeviceMemory,
    is_sq: bool,
    /// Free-running counter of the next completion.
    produced: u32,
    /// Position of the next WQE, in units.
    at: u32,
}

/// A WQE as the device reads it.
#[derive(Debug)]
struct Read {
    at: u32,
    last: WqeLast,
    flags: WqeFlags,
    oob: [u32; 4],
    sges: Vec<(u64, u32, u32)>,
}

impl FakeDevice {
    fn new(depth: u32, ring_bytes: usize, is_sq: bool) -> Self {
        let completions = memory(depth as usize * 64);
        Self { ring: memory(ring_bytes), completions, page: memory(4096), is_sq, produced: depth, at: 0 }
    }

    /// Returns the driver's ring for this device.
    fn tx_ring(&self, pool: &Pool, vport: u32) -> TxRing {
        let queue_memory = TxQueueMemory {
            ring: self.ring.clone(),
            completions: self.completions.clone(),
            sq: QUEUE,
            cq: CQ,
            vport,
            doorbell: Doorbell::new(&self.page, DOORBELL_SQ),
        };
        TxRing::new(QueueTeardown::empty(), mrs(pool, LKEY), queue_memory, Positions::UNKNOWN).unwrap()
    }

    fn depth(&self) -> u32 {
        (self.completions.bytes() / 64) as u32
    }

    /// Writes a completion; `words` contains pairs of offset and value.
    fn complete(&mut self, words: &[(u32, u32)]) {
        let owner = owner(self.produced, self.depth());
        self.complete_as(owner, QUEUE, words);
        self.produced += 1;
    }

    fn complete_as(&mut self, owner: u32, queue: u32, words: &[(u32, u32)]) {
        let base = (self.produced % self.depth()) as usize * 64;
        (0..15).for_each(|word| self.completions.store32(base + word * 4, 0));
        for (offset, value) in words {
            self.completions.store32(base + *offset as usize, *value);
        }
        let tail = CqeTail::default().with_queue(queue).with_is_sq(self.is_sq.into()).with_owner(owner);
        self.completions.store32(base + 60, tail.0);
    }

    /// Returns the tail in bytes that the last doorbell announced.
    fn tail(&self) -> u32 {
        let value = self.page.load64(if self.is_sq { DOORBELL_SQ } else { DOORBELL_RQ });
        assert_eq!(value as u32, if value == 0 { 0 } else { QUEUE }, "number in the doorbell, and nothing else");
        (value >> 32) as u32
    }

    fn word(&self, offset: u32) -> u32 {
        self.ring.load32(offset as usize % self.ring.bytes())
    }

    /// Reads the next WQE.
    fn next(&mut self) -> Option<Read> {
        let start = self.at * WQE_UNIT;
        if self.tail() == start {
            return None;
        }
        let flags = WqeFlags(self.word(start + 4));
        let oob = flags.oob_words() * 4;
        let sge = |i: u32| {
            let at = start + 8 + oob + i * 16;
            (u64::from(self.word(at)) | u64::from(self.word(at + 4)) << 32, self.word(at + 8), self.word(at + 12))
        };
        let read = Read {
            at: self.at,
            last: WqeLast(self.word(start)),
            flags,
            oob: [8, 12, 16, 20].map(|at| self.word(start + at)),
            sges: (0..flags.sges()).map(sge).collect(),
        };
        self.at += wqe_units(oob, flags.sges());
        assert!(
            self.tail().wrapping_sub(self.at * WQE_UNIT) <= self.ring.bytes() as u32,
            "the doorbell tells of whole WQEs"
        );
        Some(read)
    }

    fn all(&mut self) -> Vec<Read> {
        std::iter::from_fn(|| self.next()).collect()
    }
}

struct Transmit {
    device: FakeDevice,
    queue: NicTxQueue<TxRing>,
    handoff: Arc<RingHandoff<TxRing>>,
    pool: Pool,
}

fn transmit(depth: u32, ring_bytes: usize, vport: u32) -> Transmit {
    let pool = Pool::new("tx", 600).unwrap();
    let device = FakeDevice::new(depth, ring_bytes, true);
    let ring = device.tx_ring(&pool, vport);
    let (queue, handoff) = tx_queue(&pool, ring);
    Transmit { device, queue, handoff, pool }
}

impl Transmit {
    fn send(&mut self, packets: impl IntoIterator<Item = Packet>) -> usize {
        send(&mut self.queue, packets)
    }

    fn packets(&self, n: usize) -> Vec<Packet> {
        (0..n).map(|_| packet(&self.pool, 64)).collect()
    }

    /// Completes the WQE at `at` with a completion of type `kind`.
    fn complete(&mut self, kind: u32, at: u32) {
        self.device.complete(&[(0, CqeHead::default().with_cqe_type(kind).with_client_type(1).0), (8, at << 5)]);
    }
}

#[test]
fn plain_packets_take_one_unit_and_the_last_is_signaled() {
    let mut it = transmit(64, 4096, 5);
    for round in 0..100 {
        let packets = it.packets(3);
        let want: Vec<_> = packets.iter().map(|p| (p.data().as_ptr() as u64, LKEY, 64)).collect();
        assert_eq!(it.send(packets), 3);
        let wqes = it.device.all();
        assert_eq!(wqes.iter().flat_map(|wqe| wqe.sges.clone()).collect::<Vec<_>>(), want);
        for (i, wqe) in wqes.iter().enumerate() {
            assert_eq!((wqe.flags.0, wqe.last.0, wqe.at), (1 | 2 << 8, 0, 3 * round + i as u32));
            let suppress = u32::from(i < 2);
            assert_eq!(wqe.oob[0], CQ << 8 | suppress << 7, "short, no checksums");
            assert_eq!(wqe.oob[1], (QUEUE >> 10) << 10 | 5 << 24);
        }
        assert_eq!(it.pool.outstanding(), 3);
        it.complete(CQE_TX_OKAY, 3 * round + 2);
        it.queue.reclaim();
        assert_eq!(it.pool.outstanding(), 0, "one completion stands for all");
    }
    assert_eq!(it.queue.counters().packets.get(), 300);
    assert!(!it.handoff.needs_poll());
}

#[test]
fn a_full_ring_leaves_the_rest_in_the_batch() {
    // 64 completions, 128 units.
    let mut it = transmit(64, 4096, 0);
    let mut batch: Batch = it.packets(40).into_iter().collect();
    it.queue.transmit(&mut batch);
    let mut more: Batch = it.packets(40).into_iter().collect();
    it.queue.transmit(&mut more);
    assert_eq!((batch.len(), more.len()), (0, 16), "as many as there are completions");
    it.complete(CQE_TX_OKAY, 39);
    it.queue.transmit(&mut more);
    assert!(more.is_empty());
    // Chains use up the units first: three segments take two units, and room for the longest WQE is required.
    let mut it = transmit(256, 4096, 0);
    let chains: Vec<_> = (0..64).map(|_| packet(&it.pool, 5000)).collect();
    assert_eq!(it.send(chains), (128 - 16) / 2 + 1);
}

#[test]
fn chains_tags_and_long_vports_are_encoded() {
    let mut it = transmit(64, 4096, 0x345);
    let mut tagged = packet(&it.pool, 100);
    tagged.set_vlan(0xb064);
    let chain = packet(&it.pool, 9000);
    let expected: Vec<_> = chain.segments().map(|s| (s.as_ptr() as u64, LKEY, s.len() as u32)).collect();
    assert_eq!(it.send([tagged, chain]), 2);
    let wqes = it.device.all();
    assert_eq!((wqes[0].flags.oob_words(), wqes[0].oob[0] & 3), (6, 1), "long");
    assert_eq!(wqes[0].oob[2], 1 << 3 | 5 << 16 | 1 << 19 | 0x64 << 20);
    assert_eq!(wqes[0].oob[3], 0x345 << 16);
    assert_eq!(wqes[0].oob[1] >> 24, 0x45, "the low bits in the short form as well");
    assert_eq!((wqes[1].oob[2], wqes[1].oob[3]), (0, 0x345 << 16));
    assert_eq!(wqes[1].sges, expected);
    assert_eq!(expected.len(), 5);
}

#[test]
fn wqes_wrap_at_the_end_of_the_ring() {
    let mut it = transmit(64, 4096, 0);
    for _ in 0..200 {
        let chain = packet(&it.pool, 9000);
        let want: Vec<_> = chain.segments().map(|s| (s.as_ptr() as u64, LKEY, s.len() as u32)).collect();
        assert_eq!(it.send([chain]), 1);
        let wqe = it.device.next().unwrap();
        assert_eq!(wqe.sges, want);
        it.complete(CQE_TX_OKAY, wqe.at);
    }
    it.queue.reclaim();
    assert_eq!(it.pool.outstanding(), 0);
}

fn layers(l2_len: u8, l3_len: u8, l4_len: u8) -> HeaderLengths {
    let mut layers = HeaderLengths::default();
    (layers.l2_len, layers.l3_len, layers.l4_len) = (l2_len, l3_len, l4_len);
    layers
}

fn tcp(pool: &Pool, payload: usize, l3: PtypeL3) -> Packet {
    let mut packet = packet(pool, 14 + if l3 == PtypeL3::Ipv4 { 20 } else { 40 } + 20 + payload);
    let l3_len = if l3 == PtypeL3::Ipv4 { 20 } else { 40 };
    packet.set_header_lengths(layers(14, l3_len, 20).with_types(l3, PtypeL4::Tcp, PtypeL3::Other));
    packet.set_flags(Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM));
    packet
}

#[test]
fn checksums_are_requested() {
    let mut it = transmit(64, 4096, 0);
    let mut udp = packet(&it.pool, 100);
    udp.set_header_lengths(layers(18, 40, 8).with_types(PtypeL3::Ipv6, PtypeL4::Udp, PtypeL3::Other));
    udp.set_flags(Flags::TX_L4_CHECKSUM);
    let tcp = tcp(&it.pool, 100, PtypeL3::Ipv4);
    let header = tcp.data().as_ptr();
    assert_eq!(it.send([udp, tcp]), 2);
    let wqes = it.device.all();
    assert_eq!((wqes[0].oob[0] & 0x7f, wqes[0].oob[1] & 0x3ff), (1 << 3 | 1 << 6, 58));
    assert_eq!((wqes[1].oob[0] & 0x7f, wqes[1].oob[1] & 0x3ff), (1 << 2 | 1 << 4 | 1 << 5, 34));
    assert_eq!(wqes[1].oob[0] >> 7 & 1, 0);
    // SAFETY: the queue holds the packet in flight, so that the buffer is alive. Its first segment is longer
    // than 26 bytes. Nothing writes to it.
    let field = unsafe { std::slice::from_raw_parts(header.add(24), 2) };
    assert_eq!(field, [0, 0], "the IPv4 checksum is not summed up with the rest");
}

#[test]
fn segmentation_splits_headers_from_payload() {
    for (l3, headers) in [(PtypeL3::Ipv4, 54), (PtypeL3::Ipv6, 74)] {
        let mut it = transmit(64, 4096, 0);
        let mut lso = tcp(&it.pool, 20_000, l3);
        lso.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM));
        lso.set_mss(1440);
        let start = lso.data().as_ptr() as u64;
        let mut too_short = tcp(&it.pool, 0, l3);
        too_short.set_flags(Flags::TX_SEGMENT);
        too_short.set_mss(1440);
        let plain = packet(&it.pool, 60);
        assert_eq!(it.send([lso, too_short, plain]), 3);
        let wqes = it.device.all();
        assert_eq!(wqes.len(), 2);
        let wqe = &wqes[0];
        assert_eq!(wqe.last.last_vbytes(), headers);
        assert_eq!((wqe.flags.oob_in_sgl(), wqe.flags.client_data_unit()), (1, 1440));
        assert_eq!(wqe.sges[0], (start, LKEY, headers));
        assert_eq!(wqe.sges[1].0, start + u64::from(headers));
        assert_eq!(wqe.sges.iter().map(|sge| sge.2).sum::<u32>(), headers + 20_000);
        assert_eq!(wqe.oob[0] >> 5 & 1, 1, "TCP checksum");
        assert_eq!(it.queue.counters().drops.get(DropReason::KernelOffload), 1, "no payload, nothing to cut");
    }
}

#[test]
fn long_chains_are_split_into_two_descriptors() {
    for (l3, headers, payload) in
        [(PtypeL3::Ipv4, 54, 65_000), (PtypeL3::Ipv6, 74, 60_000), (PtypeL3::Ipv4, 54, 2 * 32_000)]
    {
        let mut it = transmit(64, 4096, 0);
        let l4 = headers - 20;
        let mut lso = tcp(&it.pool, payload, l3);
        lso.data_mut()[14 + 4..14 + 6].copy_from_slice(&[0xff, 0xfe]);
        lso.data_mut()[l4 + 4..l4 + 8].copy_from_slice(&0xffff_ff00u32.to_be_bytes());
        // CWR, ACK, PSH, FIN.
        lso.data_mut()[l4 + 13] = 0x99;
        lso.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM));
        lso.set_mss(1440);
        let (before, after) = (packet(&it.pool, 60), packet(&it.pool, 60));
        let expected = lso.segments().map(|piece| (piece.as_ptr() as u64, piece.len())).collect::<Vec<_>>();
        assert_eq!(it.send([before, lso, after]), 3);
        let wqes = it.device.all();
        assert_eq!(wqes.len(), 4);
        assert_eq!((it.queue.counters().copied.get(), it.queue.counters().drops.total()), (0, 0));
        // Each byte appears once, in order. The first descriptor ends with a whole segment.
        let bytes = |wqe: &Read| wqe.sges[1..].iter().map(|sge| sge.2 as usize).sum::<usize>();
        let (first, second) = (&wqes[1], &wqes[2]);
        assert_eq!(bytes(first) + bytes(second), payload);
        assert!(bytes(first) % 1440 == 0 && bytes(first) > 0);
        let (mut queue_memory, mut at) = (0, headers);
        for sge in first.sges[1..].iter().chain(&second.sges[1..]) {
            assert_eq!(sge.0, expected[queue_memory].0 + at as u64);
            at += sge.2 as usize;
            if at == expected[queue_memory].1 {
                (queue_memory, at) = (queue_memory + 1, 0);
            }
        }
        assert_eq!(queue_memory, expected.len());
        let read = |wqe: &Read| {
            assert_eq!((wqe.last.last_vbytes(), wqe.sges[0].2), (headers as u32, headers as u32));
            assert_eq!((wqe.flags.oob_in_sgl(), wqe.flags.client_data_unit()), (1, 1440));
            // SAFETY: the queue holds the packet in flight, so that the buffer at this address is alive. The
            // entry covers `headers` bytes. Nothing writes to them.
            unsafe { std::slice::from_raw_parts(wqe.sges[0].0 as *const u8, headers) }.to_vec()
        };
        let (one, two) = (read(first), read(second));
        assert_eq!((one[l4 + 13], two[l4 + 13]), (0x90, 0x19));
        let sequence = u32::from_be_bytes(two[l4 + 4..l4 + 8].try_into().unwrap());
        assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(bytes(first) as u32));
        if l3 == PtypeL3::Ipv4 {
            let id = u16::from_be_bytes(two[18..20].try_into().unwrap());
            assert_eq!(id, 0xfffeu16.wrapping_add((bytes(first) / 1440) as u16));
        }
        assert_eq!(wqes.iter().map(|wqe| wqe.oob[0] >> 7 & 1).collect::<Vec<_>>(), [1, 1, 1, 0]);
        it.complete(CQE_TX_OKAY, wqes[3].at);
        it.queue.reclaim();
        assert_eq!(it.pool.outstanding(), 0);
    }
}

#[test]
fn unsendable_packets_are_dropped_and_others_sent() {
    let mut it = transmit(64, 4096, 0);
    let packets = [64, 10, 64, 9500, 64].map(|len| packet(&it.pool, len));
    assert_eq!(it.send(packets), 5);
    let wqes = it.device.all();
    assert_eq!(wqes.len(), 3);
    let drops = &it.queue.counters().drops;
    assert_eq!((drops.get(DropReason::TooShort), drops.get(DropReason::TooLong), drops.total()), (1, 1, 2));
    assert_eq!(it.queue.counters().packets.get(), 3);
    // The last packet of each run requests a completion, so that no packet waits for one that may never come.
    assert_eq!(wqes.iter().map(|wqe| wqe.oob[0] >> 7 & 1).collect::<Vec<_>>(), [0, 0, 0]);
}

#[test]
fn foreign_memory_and_too_many_segments_are_copied() {
    let mut it = transmit(64, 4096, 0);
    let other = Pool::new("elsewhere", 100).unwrap();
    let foreign = packet(&other, 3000);
    let mut pieces = packet(&it.pool, 60);
    for _ in 0..40 {
        pieces.append_segment(packet(&it.pool, 10)).unwrap();
    }
    assert_eq!(it.send([foreign, pieces]), 2);
    assert_eq!((it.queue.counters().copied.get(), other.outstanding()), (2, 0));
    let wqes = it.device.all();
    assert_eq!(wqes[0].sges.iter().map(|sge| sge.2).sum::<u32>(), 3000);
    assert_eq!(wqes[1].sges.iter().map(|sge| sge.2).sum::<u32>(), 460);
}

#[test]
fn failed_packets_are_counted_and_free_only_their_burst() {
    let mut it = transmit(64, 4096, 0);
    let packets = it.packets(4);
    it.send(packets);
    // The second packet, which requested no completion.
    it.complete(CQE_TX_SA_DROP, 1);
    it.queue.reclaim();
    assert_eq!((it.queue.counters().drops.get(DropReason::TxError), it.pool.outstanding()), (1, 4));
    it.complete(CQE_TX_OKAY, 3);
    it.queue.reclaim();
    assert_eq!(it.pool.outstanding(), 0);
    // The last packet: no other completion follows.
    let packets = it.packets(4);
    it.send(packets);
    it.complete(CQE_TX_MTU_DROP, 7);
    it.queue.reclaim();
    assert_eq!((it.queue.counters().drops.get(DropReason::TxError), it.pool.outstanding()), (2, 0));
    assert!(!it.handoff.needs_poll());
}

#[test]
fn invalid_tx_completions_end_only_the_ring() {
    type Act = fn(&mut Transmit);
    let cases: &[(QueueFault, Act)] = &[
        (QueueFault::UnknownType, |it| it.complete(CQE_RX_OKAY, 3)),
        (QueueFault::UnknownType, |it| it.complete(63, 3)),
        (QueueFault::Stopped, |it| it.complete(CQE_TX_GDMA_ERR, 3)),
        // The last packet of the burst or an earlier one: without positions from the device this is unknown.
        (QueueFault::UnknownPosition, |it| it.complete(CQE_TX_SA_DROP, 0)),
        (QueueFault::UnknownPosition, |it| it.complete(CQE_TX_SA_DROP, 4)),
        (QueueFault::ForeignQueue, |it| it.device.complete_as(1, QUEUE + 1, &[(0, 32)])),
        (QueueFault::BadOwnerBits, |it| it.device.complete_as(5, QUEUE, &[(0, 32)])),
        (QueueFault::UnexpectedCompletion, |it| {
            it.complete(CQE_TX_OKAY, 3);
            it.complete(CQE_TX_OKAY, 3);
        }),
        (QueueFault::OutOfOrder, |it| {
            let more = it.packets(2);
            it.send(more);
            it.complete(CQE_TX_OKAY, 3);
            it.complete(CQE_TX_OKAY, 3);
        }),
    ];
    for (fault, act) in cases {
        let mut it = transmit(64, 4096, 0);
        let packets = it.packets(4);
        it.send(packets);
        act(&mut it);
        let extra = it.packets(1);
        assert_eq!(it.send(extra), 0, "{fault}: a broken ring takes nothing");
        assert_eq!(it.handoff.fault(), Some(*fault));
        drop(it.handoff.take_returned());
        assert_eq!(it.pool.outstanding(), 0, "{fault}");
        assert!(it.queue.counters().drops.get(DropReason::TxError) > 0 || *fault == QueueFault::UnexpectedCompletion);
        // The worker continues to poll and gets a new ring.
        it.queue.reclaim();
        let next = FakeDevice::new(64, 4096, true);
        it.handoff.hand_off(next.tx_ring(&it.pool, 0));
        it.device = next;
        let packets = it.packets(2);
        assert_eq!((it.send(packets), it.device.all().len()), (2, 2));
    }
}

#[test]
fn lost_devices_drop_packets() {
    let mut it = transmit(64, 4096, 0);
    let packets = it.packets(2);
    it.send(packets);
    it.handoff.recall();
    it.queue.reclaim();
    drop(it.handoff.take_returned());
    it.handoff.mark_lost();
    let packets = it.packets(3);
    assert_eq!(it.send(packets), 3);
    assert_eq!(it.queue.counters().drops.get(DropReason::DeviceLost), 5);
    assert_eq!(it.pool.outstanding(), 0);
}

struct Receive {
    device: FakeDevice,
    queue: NicRxQueue<RxRing>,
    handoff: Arc<RingHandoff<RxRing>>,
    pool: Pool,
    rss_group: Arc<RssGroup>,
    /// WQEs that the device has read but not used.
    posted: std::collections::VecDeque<Read>,
}

fn receive(depth: u32, buffers: usize, spare: u32) -> Receive {
    let pool = Pool::new("rx", depth * buffers as u32 + spare).unwrap();
    let bytes = (depth * wqe_units(8, buffers as u32) * 32).next_power_of_two().max(4096);
    let device = FakeDevice::new(depth, bytes as usize, false);
    let queue_memory = RxQueueMemory {
        ring: device.ring.clone(),
        completions: device.completions.clone(),
        rq: QUEUE,
        doorbell: Doorbell::new(&device.page, DOORBELL_RQ),
    };
    let rss_group = RssGroup::new(QueueTeardown::empty());
    let template = pool.meta_template().in_port(PortId::new(3));
    let mrs = mrs(&pool, LKEY);
    let ring = RxRing::new(Arc::clone(&rss_group), &mrs, queue_memory, &pool, &template, buffers, Positions::UNKNOWN)
        .unwrap()
        .unwrap();
    let handoff = RingHandoff::with_ring(ring);
    let queue = NicRxQueue::new(Arc::clone(&handoff), pool.clone(), template);
    Receive { device, queue, handoff, pool, rss_group, posted: Default::default() }
}

impl Receive {
    /// Writes a frame into the next posted buffers. Returns the position of the work request.
    fn fill(&mut self, frame: &[u8]) -> u32 {
        self.posted.extend(self.device.all());
        let wqe = self.posted.pop_front().expect("buffers are posted");
        let mut left = frame;
        for (address, key, size) in &wqe.sges {
            assert_eq!(*key, LKEY);
            let n = left.len().min(*size as usize);
            // SAFETY: the driver posted this buffer of `size` bytes, so that only the device accesses it. `n`
            // is at most `size` and at most the length of `left`.
            unsafe { std::ptr::copy_nonoverlapping(left.as_ptr(), *address as *mut u8, n) };
            left = &left[n..];
        }
        assert!(left.is_empty(), "the frame fits");
        wqe.at
    }

    fn arrive(&mut self, frame: &[u8], flags: RxFlags, hash: u32) {
        let at = self.fill(frame);
        let words = [(0, CQE_RX_OKAY | 1 << 6), (RX_FLAGS, flags.0), (8, frame.len() as u32), (16, hash), (56, at)];
        self.device.complete(&words);
    }

    fn poll(&mut self) -> Batch {
        let mut batch = Batch::new();
        self.queue.receive(&mut batch);
        batch
    }
}

fn frame(number: u32, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u32 + number) as u8).collect()
}

fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().collect::<Vec<_>>().concat()
}

#[test]
fn packets_arrive_with_metadata() {
    let mut it = receive(64, 1, 64);
    assert_eq!(it.device.tail(), 64 * 32, "everything is posted");
    let mut number = 0;
    for round in 0..100 {
        let n = 1 + round % 5;
        for i in 0..n {
            let flags = RxFlags::default().with_ip_ok(1).with_udp_bad(1).with_hash_type(HASH_UDP_IPV4);
            let flags = if i == 0 { flags.with_vlan_present(1).with_vlan_id(0x123) } else { flags };
            it.arrive(&frame(number + i, 60 + number as usize % 1900), flags, 0xabcd + i);
        }
        let batch = it.poll();
        assert_eq!(batch.len(), n as usize);
        for (i, packet) in (0..).zip(batch.iter()) {
            assert_eq!(bytes(packet), frame(number + i, 60 + number as usize % 1900));
            assert_eq!(packet.checksum_status(), ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_BAD));
            assert_eq!((packet.rss_hash(), packet.in_port()), (Some(0xabcd + i), Some(PortId::new(3))));
            assert_eq!(packet.vlan(), (i == 0).then_some(0x123));
        }
        number += n;
    }
    assert!(it.poll().is_empty());
    drop(it.queue);
    assert_eq!(it.pool.outstanding(), 64, "the device may still write to them");
    drop(it.rss_group);
    assert_eq!(it.pool.outstanding(), 0);
}

#[test]
fn every_flag_gives_a_checksum_status() {
    let cases = [
        (RxFlags::default(), ChecksumStatus::NONE),
        (RxFlags::default().with_ip_ok(1), ChecksumStatus::L3_GOOD),
        (RxFlags::default().with_ip_bad(1), ChecksumStatus::L3_BAD),
        (RxFlags::default().with_tcp_ok(1), ChecksumStatus::L4_GOOD),
        (RxFlags::default().with_tcp_bad(1), ChecksumStatus::L4_BAD),
        (RxFlags::default().with_udp_ok(1), ChecksumStatus::L4_GOOD),
        (RxFlags::default().with_udp_bad(1), ChecksumStatus::L4_BAD),
        (RxFlags::default().with_outer_ip_ok(1), ChecksumStatus::OUTER_L3_GOOD),
        (RxFlags::default().with_outer_ip_bad(1), ChecksumStatus::OUTER_L3_BAD),
        // Both at once counts as bad.
        (RxFlags::default().with_tcp_ok(1).with_udp_bad(1), ChecksumStatus::L4_BAD),
        (RxFlags::default().with_vlan_id(0xfff).with_hash_type(0x1ff), ChecksumStatus::NONE),
    ];
    for (flags, want) in cases {
        let mut it = receive(64, 1, 4);
        it.arrive(&frame(0, 60), flags, 0);
        assert_eq!(it.poll().as_slice()[0].checksum_status(), want, "{flags:?}");
    }
}

#[test]
fn long_frames_arrive_in_chains() {
    let mut it = receive(16, 5, 40);
    for (number, len) in [60, 2048, 2049, 9022, 10_240, 64, 4096, 9000].into_iter().cycle().take(200).enumerate() {
        it.arrive(&frame(number as u32, len), RxFlags::default().with_ip_ok(1), 0);
        let batch = it.poll();
        assert_eq!(batch.len(), 1);
        let packet = &batch.as_slice()[0];
        assert_eq!(bytes(packet), frame(number as u32, len), "{len}");
        assert_eq!(packet.segment_count(), len.div_ceil(DATA_ROOM));
        assert_eq!((packet.checksum_status(), packet.in_port()), (ChecksumStatus::L3_GOOD, Some(PortId::new(3))));
    }
    assert_eq!(it.pool.outstanding(), 80);
}

#[test]
fn coalesced_completions_hold_several_packets() {
    let mut it = receive(64, 1, 128);
    let mut next = 0;
    for n in [4, 1, 3, 2, 4, 4, 4, 4] {
        let mut words = vec![(0, CQE_RX_COALESCED_4 | 1 << 6), (RX_FLAGS, RxFlags::default().with_hash_type(1).0)];
        for i in 0..n {
            let at = it.fill(&frame(next + i, 100 + i as usize));
            words.extend([(8 + 12 * i, 100 + i), (16 + 12 * i, 7000 + next + i)]);
            if i == 0 {
                words.push((56, at));
            }
        }
        it.device.complete(&words);
        next += n;
    }
    // A batch with room for three packets at a time.
    let mut seen = 0;
    while seen < next {
        let mut batch: Batch = (0..61).map(|_| it.pool.take().unwrap()).collect();
        it.queue.receive(&mut batch);
        assert!(batch.len() > 61, "{seen} of {next}");
        for packet in &batch.as_slice()[61..] {
            assert_eq!(packet.rss_hash(), Some(7000 + seen));
            assert_eq!(bytes(packet)[0], seen as u8);
            seen += 1;
        }
    }
    assert!(it.poll().is_empty() && !it.handoff.needs_poll());
    assert_eq!(it.queue.counters().packets.get(), u64::from(next));
}

#[test]
fn packets_without_free_buffers_are_dropped_and_reposted() {
    for buffers in [1, 5] {
        let mut it = receive(16, buffers, 3 * buffers as u32);
        let hoard: Vec<_> = std::iter::from_fn(|| it.pool.take()).collect();
        for number in 0..40 {
            it.arrive(&frame(number, 1000), RxFlags::default(), 0);
            assert!(it.poll().is_empty());
        }
        assert_eq!(it.queue.counters().drops.get(DropReason::NoBuffer), 40);
        drop(hoard);
        it.arrive(&frame(99, 1000), RxFlags::default(), 0);
        assert_eq!(bytes(&it.poll().as_slice()[0]), frame(99, 1000));
    }
}

#[test]
fn invalid_frames_are_dropped() {
    let mut it = receive(16, 1, 16);
    it.arrive(&frame(0, 13), RxFlags::default(), 0);
    let at = it.fill(&frame(1, 2048));
    it.device.complete(&[(0, CQE_RX_TRUNCATED | 1 << 6), (8, 2048), (56, at)]);
    it.device.complete(&[(0, CQE_RX_OBJECT_FENCE | 1 << 6)]);
    it.arrive(&frame(2, 60), RxFlags::default(), 0);
    assert_eq!(bytes(&it.poll().as_slice()[0]), frame(2, 60));
    let drops = &it.queue.counters().drops;
    assert_eq!((drops.get(DropReason::TooShort), drops.get(DropReason::TooLong), drops.total()), (1, 1, 2));
    assert_eq!(it.pool.outstanding(), 16);
}

#[test]
fn fences_do_not_block_the_worker() {
    let mut it = receive(64, 1, 16);
    for _ in 0..9 {
        it.device.complete(&[(0, CQE_RX_OBJECT_FENCE | 1 << 6)]);
    }
    it.arrive(&frame(0, 60), RxFlags::default(), 0);
    assert!(it.poll().is_empty(), "eight at a time");
    assert_eq!(bytes(&it.poll().as_slice()[0]), frame(0, 60));
    assert!(!it.handoff.needs_poll());
}

#[test]
fn invalid_rx_completions_end_only_the_ring() {
    let okay = |len: u32, at: u32| [(0, CQE_RX_OKAY | 1 << 6), (8, len), (56, at)];
    type Act = fn(&mut Receive, &dyn Fn(u32, u32) -> [(u32, u32); 3]);
    let cases: &[(QueueFault, Act)] = &[
        (QueueFault::BadLength, |it, okay| it.device.complete(&okay(0, 2))),
        (QueueFault::BadLength, |it, okay| it.device.complete(&okay(2049, 2))),
        (QueueFault::BadLength, |it, okay| it.device.complete(&okay(0xffff, 2))),
        (QueueFault::BadLength, |it, _| it.device.complete(&[(0, CQE_RX_COALESCED_4), (56, 2)])),
        (QueueFault::BadLength, |it, _| it.device.complete(&[(0, CQE_RX_COALESCED_4), (8, 60), (20, 5000), (56, 2)])),
        (QueueFault::UnknownType, |it, _| it.device.complete(&[(0, 0)])),
        (QueueFault::UnknownType, |it, _| it.device.complete(&[(0, CQE_TX_OKAY)])),
        (QueueFault::UnknownType, |it, _| it.device.complete(&[(0, 63)])),
        (QueueFault::ForeignQueue, |it, okay| it.device.complete_as(1, QUEUE - 1, &okay(60, 2))),
        (QueueFault::BadOwnerBits, |it, okay| it.device.complete_as(4, QUEUE, &okay(60, 2))),
        // The same work request twice: the next buffer still belongs to the device.
        (QueueFault::OutOfOrder, |it, okay| it.device.complete(&okay(60, 1))),
    ];
    for (fault, act) in cases {
        let mut it = receive(16, 1, 16);
        it.arrive(&frame(0, 60), RxFlags::default(), 0);
        it.arrive(&frame(1, 60), RxFlags::default(), 0);
        act(&mut it, &okay);
        let batch = it.poll();
        assert_eq!(batch.len(), 2, "{fault}: what came before is good");
        assert_eq!(it.handoff.fault(), Some(*fault));
        assert_eq!(it.queue.counters().drops.get(DropReason::BadDescriptor), 1);
        assert!(it.poll().is_empty());
        drop((batch, it.handoff.take_returned()));
        assert_eq!(it.pool.outstanding(), 16, "{fault}: posted buffers wait for the hardware to go");
        drop(it.rss_group);
        assert_eq!(it.pool.outstanding(), 0);
    }
}
