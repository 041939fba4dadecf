//! Send rings and parsers against a device that the tests play in plain memory.

use std::sync::Arc;

use wirepath_memory::DeviceMemory;
use wirepath_nic_defs::mlx5::*;
use wirepath_settings::Source;

use super::cq::CompletionQueue;
use super::cqe::{CqeParser, Steps};
use super::tx::{Registers, TxConfig, TxQueueMemory, TxRing};
use super::{Mlx5, fuzz};
use crate::drivers::Driver;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::ring_handoff::RingHandoff;
use crate::drivers::nic::common::test_support::{memory, mrs, packet, send, tx_queue};
use crate::drivers::nic::common::tx_queue::NicTxQueue;
use crate::port::{TunnelTso, TxDriver};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, Pool, PtypeL3, PtypeL4};

const LKEY: u32 = 0x4711;
const QUEUE: u32 = 0x123;
const POINTERS: TxConfig = TxConfig {
    inline_minimum: 0,
    inline: 0,
    multi_packet: false,
    max_tso: 1 << 18,
    tunnels: 7,
    sw_parser: true,
    blue_flame: 0,
};

/// A send queue and the device's side of it.
struct Transmit {
    ring: DeviceMemory,
    records: DeviceMemory,
    page: DeviceMemory,
    completions: DeviceMemory,
    produced: u32,
    queue: NicTxQueue<TxRing>,
    handoff: Arc<RingHandoff<TxRing>>,
    pool: Pool,
}

fn transmit(blocks: u32, mode: TxConfig) -> Transmit {
    let pool = Pool::new("tx", 600).unwrap();
    let completions = memory(blocks as usize * CQE_BYTES);
    let (ring, records, page) = (memory(blocks as usize * 64), memory(8), memory(4096));
    let queue_memory = TxQueueMemory {
        ring: ring.clone(),
        records: records.clone(),
        completions: completions.clone(),
        completion_records: memory(8),
        number: QUEUE,
        registers: Registers::new(&page, 0x800, 256, Arc::default()),
    };
    let tx_ring = TxRing::new(QueueTeardown::empty(), mrs(&pool, LKEY), queue_memory, mode, 256).unwrap();
    let (queue, handoff) = tx_queue(&pool, tx_ring);
    Transmit { ring, records, page, completions, produced: 0, queue, handoff, pool }
}

impl Transmit {
    fn packet(&self, len: usize) -> Packet {
        packet(&self.pool, len)
    }

    fn send(&mut self, packets: impl IntoIterator<Item = Packet>) -> usize {
        send(&mut self.queue, packets)
    }

    /// Returns bytes of the ring from a basic block on.
    fn bytes(&self, block: usize, count: usize) -> Vec<u8> {
        (0..count / 8).flat_map(|i| self.ring.load64((block * 64 + i * 8) % self.ring.bytes()).to_ne_bytes()).collect()
    }

    /// Returns the producer index in the doorbell record.
    fn posted(&self) -> u32 {
        u32::from_be(self.records.load32(4))
    }

    fn complete(&mut self, opcode: u8, position: u16, syndrome: u8) {
        let base = self.produced as usize % (self.completions.bytes() / CQE_BYTES) * CQE_BYTES;
        let owner = ((self.produced as usize / (self.completions.bytes() / CQE_BYTES)) & 1) as u64;
        self.completions.store64(base + 0x30, u64::from(syndrome).to_be());
        let tail = u64::from(QUEUE) << 32 | u64::from(position) << 16 | u64::from(opcode) << 4 | owner;
        self.completions.store64(base + 0x38, tail.to_be());
        self.produced += 1;
    }
}

fn words(text: &[u32]) -> Vec<u8> {
    text.iter().flat_map(|word| word.to_be_bytes()).collect()
}

#[test]
fn descriptors_match_the_documentation() {
    let mut it = transmit(64, POINTERS);
    let five: Vec<_> = (0..5).map(|_| it.packet(60)).collect();
    assert_eq!(it.send(five), 5);
    let mut packet = it.packet(100);
    let mut layers = packet.header_lengths();
    (layers.l2_len, layers.l3_len, layers.l4_len) = (14, 20, 8);
    packet.set_header_lengths(layers.with_types(PtypeL3::Ipv4, PtypeL4::Udp, PtypeL3::Other));
    packet.set_flags(Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM));
    let at = packet.data().as_ptr() as u64;
    assert_eq!(it.send([packet]), 1);
    let want = [0x0000_050a, 0x0001_2303, 8, 0, 0, 0xc000_0000, 0, 0, 100, LKEY, (at >> 32) as u32, at as u32];
    assert_eq!(it.bytes(5, 48), words(&want));
    assert_eq!(it.posted(), 6);
    // Registers alternate; each gets the first eight bytes of the last descriptor.
    assert_eq!(it.page.load64(0x800).to_ne_bytes(), words(&[0x0000_040a, 0x0001_2303])[..]);
    assert_eq!(it.page.load64(0x900).to_ne_bytes(), words(&[0x0000_050a, 0x0001_2303])[..]);
    // Only the last descriptor of the first burst requested a completion.
    let asks: Vec<u8> = (0..5).map(|block| it.bytes(block, 16)[11]).collect();
    assert_eq!(asks, [0, 0, 0, 0, CONTROL_COMPLETE]);
    it.complete(CQE_REQUEST, 4, 0);
    it.queue.reclaim();
    assert_eq!(it.pool.outstanding(), 1, "one completion stands for all before it");
}

#[test]
fn segmentation_in_tunnels_names_the_headers() {
    let mut it = transmit(64, POINTERS);
    // VXLAN in IPv4 with TCP in IPv6 inside: 14 + 20 + 8 + 8 bytes, then 14 + 40 + 20.
    let superframe = |it: &Transmit, port: u16| {
        let mut packet = it.packet(1100);
        let data = packet.data_mut();
        data[12..15].copy_from_slice(&[8, 0, 0x45]);
        data[23] = 17;
        data[36..42].copy_from_slice(&[(port >> 8) as u8, port as u8, 4, 42, 0, 0]);
        data[62..65].copy_from_slice(&[0x86, 0xdd, 0x60]);
        data[70] = 6;
        let mut layers = packet.header_lengths();
        (layers.outer_len, layers.outer_l2_len) = (50, 14);
        (layers.l2_len, layers.l3_len, layers.l4_len) = (14, 40, 20);
        packet.set_header_lengths(layers.with_types(PtypeL3::Ipv6, PtypeL4::Tcp, PtypeL3::Ipv4));
        packet.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM));
        packet.set_mss(500);
        packet
    };
    let others = superframe(&it, 8472);
    let at = others.data().as_ptr() as u64 + 124;
    assert_eq!(it.send([superframe(&it, 4789), others]), 2);
    // Each takes three blocks: control, 14 bytes and 124 of headers, data.
    assert_eq!(it.bytes(0, 32)[..30], [words(&[0xe, 0x0001_230b, 0, 0, 0, 0x7000_01f4, 0]), vec![0, 124]].concat());
    // The device does not know this port. Offsets count in units of two bytes.
    let want = [words(&[0x30e, 0x0001_230b, 8, 0, 0x1107_3420, 0x7021_01f4, 0]), vec![0, 124]].concat();
    assert_eq!(it.bytes(3, 32)[..30], want);
    assert_eq!(it.bytes(5, 48)[32..], words(&[976, LKEY, (at >> 32) as u32, at as u32]));
    // The device leaves an outer checksum as it is. It is not right in segments of other lengths, or if it is missing.
    let mut summed = superframe(&it, 4789);
    summed.data_mut()[41] = 1;
    let mut requested = superframe(&it, 4789);
    requested.set_flags(requested.flags().with(Flags::TX_OUTER_L4_CHECKSUM));
    for packet in [summed, requested] {
        assert_eq!(it.queue.tunnel_tso(&packet), TunnelTso::EqualSegments);
        assert_eq!(it.send([packet]), 1);
    }
    assert_eq!((it.posted(), it.queue.counters().drops.get(DropReason::KernelOffload)), (6, 2));
    let mut equal = superframe(&it, 4789);
    equal.data_mut()[41] = 1;
    equal.set_mss(244);
    assert_eq!((it.send([equal]), it.posted()), (1, 9));
    let of_both = |config| {
        let it = transmit(64, config);
        [4789, 8472].map(|port| it.queue.tunnel_tso(&superframe(&it, port)))
    };
    let (no, whole) = (TunnelTso::No, TunnelTso::Whole);
    assert_eq!(of_both(POINTERS), [whole, whole]);
    assert_eq!(of_both(TxConfig { sw_parser: false, ..POINTERS }), [whole, no]);
    assert_eq!(of_both(TxConfig { tunnels: 0, ..POINTERS }), [whole, whole]);
    assert_eq!(of_both(TxConfig { tunnels: 0, sw_parser: false, ..POINTERS }), [no, no]);
    assert_eq!(of_both(TxConfig { max_tso: 975, ..POINTERS }), [no, no]);
    // The device finds frames and IP packets behind GRE, but no labels. Offsets serve all of them.
    for (kind, found) in [(0x6558u16, whole), (0x0800, whole), (0x86dd, whole), (0x8847, no)] {
        for (sw_parser, want) in [(false, found), (true, whole)] {
            let it = transmit(64, TxConfig { sw_parser, ..POINTERS });
            let mut packet = superframe(&it, 4789);
            packet.data_mut()[23] = 47;
            packet.data_mut()[34..36].fill(0);
            packet.data_mut()[36..38].copy_from_slice(&kind.to_be_bytes());
            assert_eq!(it.queue.tunnel_tso(&packet), want, "{kind:#x}");
        }
    }
}

#[test]
fn multi_packet_descriptors_wrap_around_the_ring() {
    let mut it = transmit(64, TxConfig { multi_packet: true, ..POINTERS });
    let mut block = 0usize;
    for round in 0..40 {
        let packets: Vec<_> = (0..7).map(|i| it.packet(60 + i)).collect();
        let addresses: Vec<_> = packets.iter().map(|packet| packet.data().as_ptr() as u64).collect();
        assert_eq!(it.send(packets), 7);
        let bytes = it.bytes(block, (2 + 7) * 16);
        let index = block as u32 & 0xffff;
        assert_eq!(bytes[..16], words(&[index << 8 | 0x29, QUEUE << 8 | 9, 8, 0]), "round {round}");
        for (i, at) in addresses.iter().enumerate() {
            let want = words(&[60 + i as u32, LKEY, (at >> 32) as u32, *at as u32]);
            assert_eq!(bytes[32 + i * 16..48 + i * 16], want);
        }
        it.complete(CQE_REQUEST, block as u16, 0);
        it.queue.reclaim();
        assert_eq!(it.pool.outstanding(), 0);
        block += 3;
        assert_eq!(it.posted(), block as u32);
    }
    // A full ring leaves the remaining packets: 32 packets take nine blocks.
    let mut sent = 0;
    for _ in 0..10 {
        let more: Vec<_> = (0..32).map(|_| it.packet(60)).collect();
        sent += it.send(more);
    }
    assert!((200..256).contains(&sent), "{sent}");
}

#[test]
fn single_short_descriptors_use_blueflame() {
    let page =
        |it: &Transmit, at: usize| (0..32).flat_map(|i| it.page.load64(at + i * 8).to_ne_bytes()).collect::<Vec<_>>();
    let mut it = transmit(64, TxConfig { multi_packet: true, blue_flame: 128, ..POINTERS });
    // One packet takes one block. Registers alternate.
    assert_eq!(it.send([it.packet(60)]), 1);
    assert_eq!(page(&it, 0x800)[..64], it.bytes(0, 64));
    assert_eq!(page(&it, 0x900), [0; 256]);
    // Five packets take seven segments in two blocks; the rest of the second block is copied along.
    let five: Vec<_> = (0..5).map(|_| it.packet(60)).collect();
    assert_eq!(it.send(five), 5);
    assert_eq!(page(&it, 0x900)[..128], it.bytes(1, 128));
    assert_eq!(page(&it, 0x900)[128..], [0; 128]);
    // A too long descriptor, then two descriptors: plain doorbells.
    let before = (page(&it, 0x800), page(&it, 0x900));
    let many: Vec<_> = (0..7).map(|_| it.packet(60)).collect();
    assert_eq!(it.send(many), 7);
    let mut asking = it.packet(60);
    asking.set_vlan(5);
    assert_eq!(it.send([it.packet(60), asking]), 2);
    let after = (page(&it, 0x800), page(&it, 0x900));
    assert_eq!((&after.0[..8], &after.1[..8]), (&it.bytes(3, 8)[..], &it.bytes(7, 8)[..]));
    assert_eq!((&after.0[8..], &after.1[8..]), (&before.0[8..], &before.1[8..]));
    assert_eq!(it.posted(), 8);
}

#[test]
fn headers_are_inlined_where_required() {
    let mut it = transmit(64, TxConfig { inline_minimum: 18, ..POINTERS });
    let mut tagged = it.packet(60);
    tagged.set_vlan(0xb064);
    let (short, plain) = (it.packet(15), it.packet(60));
    let at = plain.data().as_ptr() as u64;
    assert_eq!(it.send([plain, tagged, short]), 3);
    let bytes = it.bytes(0, 64);
    assert_eq!((bytes[7], &bytes[28..30]), (4, &[0, 18][..]));
    assert_eq!(bytes[30..48], (0..18).collect::<Vec<u8>>());
    assert_eq!(bytes[48..], words(&[42, LKEY, ((at + 18) >> 32) as u32, (at + 18) as u32]));
    // The tag is in the inline header, because the descriptor has no field for both.
    let bytes = it.bytes(1, 64);
    assert_eq!(bytes[30 + 10..48], [10, 11, 0x81, 0, 0xb0, 0x64, 12, 13]);
    // The packet is padded and entirely inline.
    let bytes = it.bytes(2, 48);
    assert_eq!((bytes[7], bytes[30 + 14], bytes[30 + 15]), (3, 14, 0));
}

#[test]
fn error_completions_end_the_queue() {
    let mut it = transmit(64, POINTERS);
    let packets: Vec<_> = (0..3).map(|_| it.packet(60)).collect();
    assert_eq!(it.send(packets), 3);
    it.complete(CQE_REQUEST_ERROR, 1, SYNDROME_LOCAL_PROTECTION);
    it.queue.reclaim();
    let fault = it.handoff.fault().unwrap();
    assert_eq!(fault, QueueFault::ErrorCqe { syndrome: 4, vendor: 0, position: 1 });
    assert!(fault.to_string().ends_with("a key or address outside the registered memory"), "{fault}");
    assert_eq!(it.queue.counters().drops.get(DropReason::TxError), 3);
    drop(it.handoff.take_returned());
    assert_eq!(it.pool.outstanding(), 0);
}

/// A completion queue as a device writes it.
struct FakeDevice {
    ring: DeviceMemory,
    records: DeviceMemory,
    produced: u32,
}

impl FakeDevice {
    const ENTRIES: u32 = 64;

    fn new() -> Self {
        Self { ring: memory(Self::ENTRIES as usize * CQE_BYTES), records: memory(8), produced: 0 }
    }

    fn store(&self, slot: u32, offset: usize, word: u64) {
        self.ring.store64((slot % Self::ENTRIES) as usize * CQE_BYTES + offset, word.to_be());
    }

    /// Writes an entry; `format` as in its last byte.
    fn entry(&mut self, slot: u32, format: u8, position: u32, bytes: u32, request: u32) {
        self.store(slot, 0x00, u64::from(request) << 32);
        self.store(slot, 0x08, 0x5555);
        self.store(slot, 0x10, 0x44 << 56);
        self.store(slot, 0x18, 0x0700_0000);
        self.store(slot, 0x28, bytes.into());
        let owner = u64::from((slot / Self::ENTRIES) & 1);
        let last = CqeOwner(0).with_opcode(CQE_RESPONDER_SEND).with_format(format).0;
        self.store(slot, 0x38, u64::from(position & 0xffff) << 16 | u64::from(last) | owner);
    }

    /// Writes a session of `count` packets. `mini` returns the first word of a mini CQE, and the length.
    fn session(&mut self, count: u32, position: u32, request: u32, mini: impl Fn(u32) -> (u32, u32)) {
        for i in 0..count {
            let (reported, bytes) = mini(i);
            let slot = self.produced + if i < 8 { 1 } else { i / 8 * 8 };
            self.store(slot, (i % 8) as usize * 8, u64::from(reported) << 32 | u64::from(bytes));
        }
        self.entry(self.produced, FORMAT_COMPRESSED, position, count, request);
        self.produced += count;
    }
}

/// Parses everything, `room` packets at a time. Returns lengths and steps.
fn read(parser: &mut CqeParser, queue: &mut CompletionQueue, room: usize) -> Result<Vec<(u32, u32)>, QueueFault> {
    let mut all = Vec::new();
    while parser.parse(queue, room)? {
        assert!(parser.pending().len() <= room);
        all.extend(parser.pending().iter().map(|cqe| (cqe.len, cqe.at)));
        parser.clear();
    }
    Ok(all)
}

#[test]
fn sessions_of_every_length_are_read_in_any_portions() {
    for (format, room) in [(MINI_FORMAT_HASH, 64), (MINI_FORMAT_CSUM, 7), (MINI_FORMAT_HASH, 3), (MINI_FORMAT_CSUM, 64)]
    {
        let mut device = FakeDevice::new();
        let mut queue = CompletionQueue::new(&device.ring, &device.records).unwrap();
        let mut parser = CqeParser::new(Steps::Requests { bytes: 2048 }, FakeDevice::ENTRIES, Some(format), 0);
        let mut step = 0;
        for count in (2..=64).chain([2, 9, 64, 17]) {
            // Plain entries up to the end of the ring, where a session would wrap around.
            while device.produced % FakeDevice::ENTRIES + count > FakeDevice::ENTRIES {
                device.entry(device.produced, FORMAT_NONE, step, 77, 0);
                device.produced += 1;
                assert_eq!(read(&mut parser, &mut queue, room).unwrap(), [(77, step)]);
                step += 1;
            }
            device.session(count, step, 0, |i| (0x1000 + i, 60 + i));
            let got = read(&mut parser, &mut queue, room).unwrap();
            assert_eq!(got, (0..count).map(|i| (60 + i, step + i)).collect::<Vec<_>>(), "{count}");
            step += count;
            assert_eq!(u32::from_be(device.records.load32(0)), device.produced, "published when it is read");
        }
    }
}

#[test]
fn strides_and_fillers_are_parsed() {
    let mut device = FakeDevice::new();
    let mut queue = CompletionQueue::new(&device.ring, &device.records).unwrap();
    let mut parser = CqeParser::new(Steps::Strides { log: 3 }, FakeDevice::ENTRIES, Some(MINI_FORMAT_CSUM_STRIDE), 0);
    let strides = |strides, length| StrideCount(0).with_strides(strides).with_length(length).0;
    // Two strides, then five single ones in a session, and a filler for the last.
    device.entry(0, FORMAT_NONE, 0, strides(2, 3000), 0);
    device.produced = 1;
    device.session(5, 2, 0, |i| (2 + i, strides(1, 60 + i)));
    device.entry(6, FORMAT_NONE, 7, StrideCount(strides(1, 0)).with_filler(1).0, 0);
    device.entry(7, FORMAT_NONE, 0, strides(8, 16384), 1);
    device.produced = 8;
    let got = read(&mut parser, &mut queue, 64).unwrap();
    assert_eq!(got, [(3000, 0), (60, 2), (61, 3), (62, 4), (63, 5), (64, 6), (16384, 8)]);
    assert_eq!(parser.clear(), 16);
}

#[test]
fn invalid_sessions_and_strides_are_faults() {
    let strided = Steps::Strides { log: 3 };
    let linear = Steps::Requests { bytes: 2048 };
    let strides = |strides, length| StrideCount(0).with_strides(strides).with_length(length).0;
    let try_session = |steps, format, count, position, request, mini: &dyn Fn(u32) -> (u32, u32)| {
        let mut device = FakeDevice::new();
        let mut queue = CompletionQueue::new(&device.ring, &device.records).unwrap();
        let mut parser = CqeParser::new(steps, FakeDevice::ENTRIES, format, 0);
        for i in 0..8 {
            let (reported, bytes) = mini(i);
            device.store(1, i as usize * 8, u64::from(reported) << 32 | u64::from(bytes));
        }
        device.entry(0, FORMAT_COMPRESSED, position, count, request);
        read(&mut parser, &mut queue, 64).err()
    };
    let hash = Some(MINI_FORMAT_HASH);
    let good = |i| (i, 60);
    for count in [0, 1, 65, 1 << 16, u32::MAX] {
        assert_eq!(try_session(linear, hash, count, 0, 0, &good), Some(QueueFault::BadSession), "{count}");
    }
    assert_eq!(try_session(linear, hash, 4, 0, 0, &good), None);
    assert_eq!(try_session(linear, None, 4, 0, 0, &good), Some(QueueFault::UnknownType), "not asked for");
    assert_eq!(try_session(linear, hash, 4, 1, 0, &good), Some(QueueFault::OutOfOrder));
    assert_eq!(try_session(linear, hash, 4, 0, 0, &|i| (0, if i == 2 { 0 } else { 60 })), Some(QueueFault::BadLength));
    assert_eq!(try_session(linear, hash, 12, 0, 0, &good), Some(QueueFault::BadLength), "an array nobody wrote");
    let stride = Some(MINI_FORMAT_CSUM_STRIDE);
    let good = |i| (i, strides(1, 60));
    assert_eq!(try_session(strided, stride, 4, 0, 0, &good), None);
    assert_eq!(try_session(strided, stride, 4, 0, 3, &good), Some(QueueFault::OutOfOrder), "another work request");
    assert_eq!(try_session(strided, stride, 4, 0, 0, &|i| (i * 9, strides(1, 60))), Some(QueueFault::OutOfOrder));
    assert_eq!(try_session(strided, stride, 4, 0, 0, &|i| (i, strides(9, 60))), Some(QueueFault::BadLength));
    assert_eq!(try_session(strided, stride, 4, 0, 0, &|i| (i, strides(0, 60))), Some(QueueFault::BadLength));
    assert_eq!(try_session(strided, stride, 4, 0, 0, &|i| (i, strides(1, 2049))), Some(QueueFault::BadLength));
    assert_eq!(try_session(strided, stride, 4, 0, 0, &|i| (i, strides(1, 0))), Some(QueueFault::BadLength));
}

#[test]
fn random_completions_lose_no_buffer() {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut random = || rng.u64(..);
    for _ in 0..300 {
        let mut data = Vec::new();
        for _ in 0..40 {
            let mut step: Vec<u8> = (0..65).map(|_| random() as u8).collect();
            // Mostly content that passes the first checks.
            step[0] |= 8;
            step[1 + CQE_OWNER] = [0x20, 0x2c, 0x2c, 0x00, 0xe0, 0xd0, 0x20, 0x90][random() as usize % 8];
            if random() & 3 != 0 {
                step[0x2d..0x2d + 3].fill(0);
                step[1 + 0x3c..1 + 0x3e].fill(0);
            }
            data.extend(step);
        }
        fuzz::run(&data);
    }
}

#[test]
fn former_names_of_keys_are_errors_with_the_new_name() {
    for (text, new) in [
        ("receive = \"striding\"", "rx_mode"),
        ("compress = \"off\"", "cqe_compression"),
        ("inline = 100", "tx_inline"),
        ("seconds_stalled = 1", "tx_timeout"),
        ("seconds_after_fatal = 1", "[[port]] loss_timeout"),
    ] {
        let source = Source::new("test", text);
        let error = Mlx5.plan(Some("eth0"), &source.parse().unwrap().settings()).err().unwrap().to_string();
        assert!(error.contains(&format!("this key is now called \"{new}\"")), "{text}: {error}");
    }
}
