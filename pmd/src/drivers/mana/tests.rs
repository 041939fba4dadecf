//! Rings against a device that is played here, in plain memory: what is written to it word by word, and what it may write.

// UNSAFETY: plays a device, which writes to buffers by address.
#![allow(unsafe_code)]

use std::sync::Arc;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::*;

use super::cq::Positions;
use super::rx::{ReceivePlace, ReceiveRing};
use super::tx::{SendPlace, SendRing};
use crate::drivers::direct::exchange::Exchange;
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::hostile::{keys, memory};
use crate::drivers::direct::receive::{Receiver, Spread};
use crate::drivers::direct::send::Sender;
use crate::drops::DropReason;
use crate::packet::offload::{Flags, Verdicts};
use crate::packet::{Batch, DATA_ROOM, L3, L4, Layers, Packet, Pool};
use crate::port::{ReceiveQueue, TransmitQueue};

const LKEY: u32 = 0x4711;
const QUEUE: u32 = 0x2c05;
const CQ: u32 = 0x99;

/// The device's side of a work queue and its completion queue.
struct Played {
    ring: DeviceMemory,
    completions: DeviceMemory,
    page: DeviceMemory,
    is_sq: bool,
    /// Next completion, as the device counts.
    produced: u32,
    /// Position in units of the next WQE.
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

impl Played {
    fn new(depth: u32, ring_bytes: usize, is_sq: bool) -> Self {
        let completions = memory(depth as usize * 64);
        Self { ring: memory(ring_bytes), completions, page: memory(4096), is_sq, produced: depth, at: 0 }
    }

    fn depth(&self) -> u32 {
        (self.completions.bytes() / 64) as u32
    }

    /// Writes a completion; `words` are pairs of offset and value.
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

    /// Bytes that the doorbell of the queue's kind told of.
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
    device: Played,
    queue: Sender<SendRing>,
    exchange: Arc<Exchange<SendRing>>,
    pool: Pool,
}

fn transmit(depth: u32, ring_bytes: usize, vport: u32) -> Transmit {
    let pool = Pool::new("tx", 600).unwrap();
    let device = Played::new(depth, ring_bytes, true);
    let place = SendPlace {
        ring: device.ring.clone(),
        completions: device.completions.clone(),
        sq: QUEUE,
        cq: CQ,
        vport,
        doorbell: Doorbell::new(&device.page, DOORBELL_SQ),
    };
    let ring = SendRing::new(Ending::none(), keys(&pool, LKEY), place, Positions::UNKNOWN).unwrap();
    let exchange = Arc::new(Exchange::new());
    exchange.hand_out(ring);
    let queue = Sender::new(Arc::clone(&exchange), pool.clone(), 9000);
    Transmit { device, queue, exchange, pool }
}

fn packet(pool: &Pool, len: usize) -> Packet {
    let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
    let mut packet = pool.take().unwrap();
    assert!(packet.extend_from_slice(&bytes, pool));
    packet
}

impl Transmit {
    fn send(&mut self, packets: impl IntoIterator<Item = Packet>) -> usize {
        let mut batch: Batch = packets.into_iter().collect();
        let before = batch.len();
        self.queue.transmit(&mut batch);
        before - batch.len()
    }

    fn packets(&self, n: usize) -> Vec<Packet> {
        (0..n).map(|_| packet(&self.pool, 64)).collect()
    }

    /// Everything is on its way back from here on.
    fn complete(&mut self, kind: u32, at: u32) {
        self.device.complete(&[(0, CqeHead::default().with_cqe_type(kind).with_client_type(1).0), (8, at << 5)]);
    }
}

#[test]
fn plain_packets_are_one_unit_each_and_the_last_asks_for_a_completion() {
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
    assert!(!it.exchange.calls());
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
    // Chains fill the units first: three segments take two, and room for the longest WQE is asked for.
    let mut it = transmit(256, 4096, 0);
    let chains: Vec<_> = (0..64).map(|_| packet(&it.pool, 5000)).collect();
    assert_eq!(it.send(chains), (128 - 16) / 2 + 1);
}

#[test]
fn chains_vlan_tags_and_far_ports() {
    let mut it = transmit(64, 4096, 0x345);
    let mut tagged = packet(&it.pool, 100);
    tagged.set_vlan(0xb064);
    let chain = packet(&it.pool, 9000);
    let places: Vec<_> = chain.segments().map(|s| (s.as_ptr() as u64, LKEY, s.len() as u32)).collect();
    assert_eq!(it.send([tagged, chain]), 2);
    let wqes = it.device.all();
    assert_eq!((wqes[0].flags.oob_words(), wqes[0].oob[0] & 3), (6, 1), "long");
    assert_eq!(wqes[0].oob[2], 1 << 3 | 5 << 16 | 1 << 19 | 0x64 << 20);
    assert_eq!(wqes[0].oob[3], 0x345 << 16);
    assert_eq!(wqes[0].oob[1] >> 24, 0x45, "the low bits in the short form as well");
    assert_eq!((wqes[1].oob[2], wqes[1].oob[3]), (0, 0x345 << 16));
    assert_eq!(wqes[1].sges, places);
    assert_eq!(places.len(), 5);
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

fn layers(l2_len: u8, l3_len: u8, l4_len: u8) -> Layers {
    let mut layers = Layers::default();
    (layers.l2_len, layers.l3_len, layers.l4_len) = (l2_len, l3_len, l4_len);
    layers
}

fn tcp(pool: &Pool, payload: usize, l3: L3) -> Packet {
    let mut packet = packet(pool, 14 + if l3 == L3::Ipv4 { 20 } else { 40 } + 20 + payload);
    let l3_len = if l3 == L3::Ipv4 { 20 } else { 40 };
    packet.set_layers(layers(14, l3_len, 20).with_kinds(l3, L4::Tcp, L3::Other));
    packet.set_flags(Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM));
    packet
}

#[test]
fn checksums_are_asked_for() {
    let mut it = transmit(64, 4096, 0);
    let mut udp = packet(&it.pool, 100);
    udp.set_layers(layers(18, 40, 8).with_kinds(L3::Ipv6, L4::Udp, L3::Other));
    udp.set_flags(Flags::TX_L4_CHECKSUM);
    let tcp = tcp(&it.pool, 100, L3::Ipv4);
    let header = tcp.data().as_ptr();
    assert_eq!(it.send([udp, tcp]), 2);
    let wqes = it.device.all();
    assert_eq!((wqes[0].oob[0] & 0x7f, wqes[0].oob[1] & 0x3ff), (1 << 3 | 1 << 6, 58));
    assert_eq!((wqes[1].oob[0] & 0x7f, wqes[1].oob[1] & 0x3ff), (1 << 2 | 1 << 4 | 1 << 5, 34));
    assert_eq!(wqes[1].oob[0] >> 7 & 1, 0);
    // SAFETY: the packet is on its way and lives in the queue.
    let field = unsafe { std::slice::from_raw_parts(header.add(24), 2) };
    assert_eq!(field, [0, 0], "the IPv4 checksum is not summed up with the rest");
}

#[test]
fn segmentation_splits_headers_from_payload() {
    for (l3, headers) in [(L3::Ipv4, 54), (L3::Ipv6, 74)] {
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
fn what_has_more_segments_than_a_descriptor_is_cut_in_two_of_them() {
    for (l3, headers, payload) in [(L3::Ipv4, 54, 65_000), (L3::Ipv6, 74, 60_000), (L3::Ipv4, 54, 2 * 32_000)] {
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
        let places = lso.segments().map(|piece| (piece.as_ptr() as u64, piece.len())).collect::<Vec<_>>();
        assert_eq!(it.send([before, lso, after]), 3);
        let wqes = it.device.all();
        assert_eq!(wqes.len(), 4);
        assert_eq!((it.queue.counters().copied.get(), it.queue.counters().drops.total()), (0, 0));
        // Each byte once, in order, and whole segments in the first.
        let bytes = |wqe: &Read| wqe.sges[1..].iter().map(|sge| sge.2 as usize).sum::<usize>();
        let (first, second) = (&wqes[1], &wqes[2]);
        assert_eq!(bytes(first) + bytes(second), payload);
        assert!(bytes(first) % 1440 == 0 && bytes(first) > 0);
        let (mut place, mut at) = (0, headers);
        for sge in first.sges[1..].iter().chain(&second.sges[1..]) {
            assert_eq!(sge.0, places[place].0 + at as u64);
            at += sge.2 as usize;
            if at == places[place].1 {
                (place, at) = (place + 1, 0);
            }
        }
        assert_eq!(place, places.len());
        let read = |wqe: &Read| {
            assert_eq!((wqe.last.last_vbytes(), wqe.sges[0].2), (headers as u32, headers as u32));
            assert_eq!((wqe.flags.oob_in_sgl(), wqe.flags.client_data_unit()), (1, 1440));
            // SAFETY: the packet is on its way and lives in the queue.
            unsafe { std::slice::from_raw_parts(wqe.sges[0].0 as *const u8, headers) }.to_vec()
        };
        let (one, two) = (read(first), read(second));
        assert_eq!((one[l4 + 13], two[l4 + 13]), (0x90, 0x19));
        let sequence = u32::from_be_bytes(two[l4 + 4..l4 + 8].try_into().unwrap());
        assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(bytes(first) as u32));
        if l3 == L3::Ipv4 {
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
fn what_cannot_be_sent_is_dropped_and_the_rest_goes_on() {
    let mut it = transmit(64, 4096, 0);
    let packets = [64, 10, 64, 9500, 64].map(|len| packet(&it.pool, len));
    assert_eq!(it.send(packets), 5);
    let wqes = it.device.all();
    assert_eq!(wqes.len(), 3);
    let drops = &it.queue.counters().drops;
    assert_eq!((drops.get(DropReason::TooShort), drops.get(DropReason::TooLong), drops.total()), (1, 1, 2));
    assert_eq!(it.queue.counters().packets.get(), 3);
    // The last of a run asks for a completion, so that nothing waits for packets that may never come.
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
fn a_failed_packet_is_counted_and_ends_no_more_than_it_should() {
    let mut it = transmit(64, 4096, 0);
    let packets = it.packets(4);
    it.send(packets);
    // The second one, which asked for no completion.
    it.complete(CQE_TX_SA_DROP, 1);
    it.queue.reclaim();
    assert_eq!((it.queue.counters().drops.get(DropReason::TxError), it.pool.outstanding()), (1, 4));
    it.complete(CQE_TX_OKAY, 3);
    it.queue.reclaim();
    assert_eq!(it.pool.outstanding(), 0);
    // The last one: there will be no other completion.
    let packets = it.packets(4);
    it.send(packets);
    it.complete(CQE_TX_MTU_DROP, 7);
    it.queue.reclaim();
    assert_eq!((it.queue.counters().drops.get(DropReason::TxError), it.pool.outstanding()), (2, 0));
    assert!(!it.exchange.calls());
}

#[test]
fn hostile_transmit_completions_end_the_ring_and_nothing_else() {
    type Act = fn(&mut Transmit);
    let cases: &[(Fault, Act)] = &[
        (Fault::UnknownType, |it| it.complete(CQE_RX_OKAY, 3)),
        (Fault::UnknownType, |it| it.complete(63, 3)),
        (Fault::Stopped, |it| it.complete(CQE_TX_GDMA_ERR, 3)),
        // The last of the burst, or one before it: a device that does not tell leaves that open.
        (Fault::Unplaced, |it| it.complete(CQE_TX_SA_DROP, 0)),
        (Fault::Unplaced, |it| it.complete(CQE_TX_SA_DROP, 4)),
        (Fault::ForeignQueue, |it| it.device.complete_as(1, QUEUE + 1, &[(0, 32)])),
        (Fault::OwnerOutOfTurn, |it| it.device.complete_as(5, QUEUE, &[(0, 32)])),
        (Fault::NothingOnItsWay, |it| {
            it.complete(CQE_TX_OKAY, 3);
            it.complete(CQE_TX_OKAY, 3);
        }),
        (Fault::OutOfOrder, |it| {
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
        assert_eq!(it.exchange.fault(), Some(*fault));
        drop(it.exchange.collect());
        assert_eq!(it.pool.outstanding(), 0, "{fault}");
        assert!(it.queue.counters().drops.get(DropReason::TxError) > 0 || *fault == Fault::NothingOnItsWay);
        // The worker polls on, and gets a new one.
        it.queue.reclaim();
        let next = Played::new(64, 4096, true);
        let place = SendPlace {
            ring: next.ring.clone(),
            completions: next.completions.clone(),
            sq: QUEUE,
            cq: CQ,
            vport: 0,
            doorbell: Doorbell::new(&next.page, DOORBELL_SQ),
        };
        it.exchange.hand_out(SendRing::new(Ending::none(), keys(&it.pool, LKEY), place, Positions::UNKNOWN).unwrap());
        it.device = next;
        let packets = it.packets(2);
        assert_eq!((it.send(packets), it.device.all().len()), (2, 2));
    }
}

#[test]
fn a_lost_device_takes_packets_and_drops_them() {
    let mut it = transmit(64, 4096, 0);
    let packets = it.packets(2);
    it.send(packets);
    it.exchange.recall();
    it.queue.reclaim();
    drop(it.exchange.collect());
    it.exchange.lose();
    let packets = it.packets(3);
    assert_eq!(it.send(packets), 3);
    assert_eq!(it.queue.counters().drops.get(DropReason::DeviceLost), 5);
    assert_eq!(it.pool.outstanding(), 0);
}

struct Receive {
    device: Played,
    queue: Receiver<ReceiveRing>,
    exchange: Arc<Exchange<ReceiveRing>>,
    pool: Pool,
    spread: Arc<Spread>,
    /// WQEs that the device has read and not used.
    posted: std::collections::VecDeque<Read>,
}

fn receive(depth: u32, buffers: usize, spare: u32) -> Receive {
    let pool = Pool::new("rx", depth * buffers as u32 + spare).unwrap();
    let bytes = (depth * wqe_units(8, buffers as u32) * 32).next_power_of_two().max(4096);
    let device = Played::new(depth, bytes as usize, false);
    let place = ReceivePlace {
        ring: device.ring.clone(),
        completions: device.completions.clone(),
        rq: QUEUE,
        doorbell: Doorbell::new(&device.page, DOORBELL_RQ),
    };
    let spread = Spread::new(Ending::none());
    let blank = pool.blank().in_port(3);
    let keys = keys(&pool, LKEY);
    let ring = ReceiveRing::new(Arc::clone(&spread), &keys, place, &pool, &blank, buffers, Positions::UNKNOWN)
        .unwrap()
        .unwrap();
    let exchange = Arc::new(Exchange::new());
    exchange.hand_out(ring);
    let queue = Receiver::new(Arc::clone(&exchange), pool.clone(), blank);
    Receive { device, queue, exchange, pool, spread, posted: Default::default() }
}

impl Receive {
    /// Writes a frame into the next posted buffers; returns the position of the work request.
    fn fill(&mut self, frame: &[u8]) -> u32 {
        self.posted.extend(self.device.all());
        let wqe = self.posted.pop_front().expect("buffers are posted");
        let mut left = frame;
        for (address, key, size) in &wqe.sges {
            assert_eq!(*key, LKEY);
            let n = left.len().min(*size as usize);
            // SAFETY: the driver posted this buffer, so nobody else touches it; the device writes no more than was posted.
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
fn packets_arrive_with_what_the_device_found_out() {
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
            assert_eq!(packet.verdicts(), Verdicts::L3_GOOD.with(Verdicts::L4_BAD));
            assert_eq!((packet.rss_hash(), packet.in_port()), (Some(0xabcd + i), 3));
            assert_eq!(packet.vlan(), (i == 0).then_some(0x123));
        }
        number += n;
    }
    assert!(it.poll().is_empty());
    drop(it.queue);
    assert_eq!(it.pool.outstanding(), 64, "the device may still write to them");
    drop(it.spread);
    assert_eq!(it.pool.outstanding(), 0);
}

#[test]
fn every_bit_of_the_verdict() {
    let cases = [
        (RxFlags::default(), Verdicts::NONE),
        (RxFlags::default().with_ip_ok(1), Verdicts::L3_GOOD),
        (RxFlags::default().with_ip_bad(1), Verdicts::L3_BAD),
        (RxFlags::default().with_tcp_ok(1), Verdicts::L4_GOOD),
        (RxFlags::default().with_tcp_bad(1), Verdicts::L4_BAD),
        (RxFlags::default().with_udp_ok(1), Verdicts::L4_GOOD),
        (RxFlags::default().with_udp_bad(1), Verdicts::L4_BAD),
        (RxFlags::default().with_outer_ip_ok(1), Verdicts::OUTER_L3_GOOD),
        (RxFlags::default().with_outer_ip_bad(1), Verdicts::OUTER_L3_BAD),
        // Both at once: the careful one.
        (RxFlags::default().with_tcp_ok(1).with_udp_bad(1), Verdicts::L4_BAD),
        (RxFlags::default().with_vlan_id(0xfff).with_hash_type(0x1ff), Verdicts::NONE),
    ];
    for (flags, want) in cases {
        let mut it = receive(64, 1, 4);
        it.arrive(&frame(0, 60), flags, 0);
        assert_eq!(it.poll().as_slice()[0].verdicts(), want, "{flags:?}");
    }
}

#[test]
fn long_frames_arrive_in_chains_and_unused_buffers_stay() {
    let mut it = receive(16, 5, 40);
    for (number, len) in [60, 2048, 2049, 9022, 10_240, 64, 4096, 9000].into_iter().cycle().take(200).enumerate() {
        it.arrive(&frame(number as u32, len), RxFlags::default().with_ip_ok(1), 0);
        let batch = it.poll();
        assert_eq!(batch.len(), 1);
        let packet = &batch.as_slice()[0];
        assert_eq!(bytes(packet), frame(number as u32, len), "{len}");
        assert_eq!(packet.segment_count(), len.div_ceil(DATA_ROOM));
        assert_eq!((packet.verdicts(), packet.in_port()), (Verdicts::L3_GOOD, 3));
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
    // A batch with room for three at a time.
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
    assert!(it.poll().is_empty() && !it.exchange.calls());
    assert_eq!(it.queue.counters().packets.get(), u64::from(next));
}

#[test]
fn without_buffers_packets_are_dropped_and_counted_and_their_buffers_serve_again() {
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
fn frames_that_are_none_are_dropped() {
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
fn fences_do_not_keep_the_worker() {
    let mut it = receive(64, 1, 16);
    for _ in 0..9 {
        it.device.complete(&[(0, CQE_RX_OBJECT_FENCE | 1 << 6)]);
    }
    it.arrive(&frame(0, 60), RxFlags::default(), 0);
    assert!(it.poll().is_empty(), "eight at a time");
    assert_eq!(bytes(&it.poll().as_slice()[0]), frame(0, 60));
    assert!(!it.exchange.calls());
}

#[test]
fn hostile_receive_completions_end_the_ring_and_nothing_else() {
    let okay = |len: u32, at: u32| [(0, CQE_RX_OKAY | 1 << 6), (8, len), (56, at)];
    type Act = fn(&mut Receive, &dyn Fn(u32, u32) -> [(u32, u32); 3]);
    let cases: &[(Fault, Act)] = &[
        (Fault::BadLength, |it, okay| it.device.complete(&okay(0, 2))),
        (Fault::BadLength, |it, okay| it.device.complete(&okay(2049, 2))),
        (Fault::BadLength, |it, okay| it.device.complete(&okay(0xffff, 2))),
        (Fault::BadLength, |it, _| it.device.complete(&[(0, CQE_RX_COALESCED_4), (56, 2)])),
        (Fault::BadLength, |it, _| it.device.complete(&[(0, CQE_RX_COALESCED_4), (8, 60), (20, 5000), (56, 2)])),
        (Fault::UnknownType, |it, _| it.device.complete(&[(0, 0)])),
        (Fault::UnknownType, |it, _| it.device.complete(&[(0, CQE_TX_OKAY)])),
        (Fault::UnknownType, |it, _| it.device.complete(&[(0, 63)])),
        (Fault::ForeignQueue, |it, okay| it.device.complete_as(1, QUEUE - 1, &okay(60, 2))),
        (Fault::OwnerOutOfTurn, |it, okay| it.device.complete_as(4, QUEUE, &okay(60, 2))),
        // Twice for one work request: its successor's buffer is still the device's.
        (Fault::OutOfOrder, |it, okay| it.device.complete(&okay(60, 1))),
    ];
    for (fault, act) in cases {
        let mut it = receive(16, 1, 16);
        it.arrive(&frame(0, 60), RxFlags::default(), 0);
        it.arrive(&frame(1, 60), RxFlags::default(), 0);
        act(&mut it, &okay);
        let batch = it.poll();
        assert_eq!(batch.len(), 2, "{fault}: what came before is good");
        assert_eq!(it.exchange.fault(), Some(*fault));
        assert_eq!(it.queue.counters().drops.get(DropReason::BadDescriptor), 1);
        assert!(it.poll().is_empty());
        drop((batch, it.exchange.collect()));
        assert_eq!(it.pool.outstanding(), 16, "{fault}: posted buffers wait for the hardware to go");
        drop(it.spread);
        assert_eq!(it.pool.outstanding(), 0);
    }
}
