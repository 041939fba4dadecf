//! Rings against a device that writes arbitrary completions, for the fuzzer and for a test with random bytes.

use std::sync::Arc;
use wirepath_packet::PortId;

use wirepath_memory::DeviceMemory;
use wirepath_nic_defs::mlx5::{CQE_BYTES, CQE_OWNER, MINI_FORMAT_CSUM, MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH};

use super::rx::{Layout, RxConfig, RxQueueMemory, RxRing};
use super::tx::{Registers, TxConfig, TxQueueMemory, TxRing};
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::registered_memory::Sink;
use crate::drivers::nic::common::ring_handoff::RingHandoff;
use crate::drivers::nic::common::rx_queue::{NicRxQueue, RssGroup};
use crate::drivers::nic::common::test_support::{memory, mrs};
use crate::drivers::nic::common::tx_queue::NicTxQueue;
use crate::port::{RxDriver, TxDriver};
use wirepath_packet::{Batch, Pool};

/// Work requests of the receive rings, and basic blocks of the send ring.
const REQUESTS: u32 = 8;
const BLOCKS: u32 = 64;
const QUEUE: u32 = 0x2c05;
const LOG_STRIDES: u32 = 3;

/// Writes completions as the device does.
struct Writer {
    ring: DeviceMemory,
    produced: u32,
}

impl Writer {
    /// Writes 64 bytes. `honest`: sets the owner bit that makes them a valid entry.
    fn write(&mut self, bytes: &[u8], is_valid: bool) {
        let entries = (self.ring.bytes() / CQE_BYTES) as u32;
        let mut entry = [0; CQE_BYTES];
        let n = bytes.len().min(CQE_BYTES);
        entry[..n].copy_from_slice(&bytes[..n]);
        if is_valid {
            let owner = ((self.produced / entries) & 1) as u8;
            entry[CQE_OWNER] = entry[CQE_OWNER] & !1 | owner;
        }
        let base = (self.produced % entries) as usize * CQE_BYTES;
        for (i, word) in entry.as_chunks::<8>().0.iter().enumerate() {
            self.ring.store64(base + i * 8, u64::from_ne_bytes(*word));
        }
        self.produced = self.produced.wrapping_add(1);
    }
}

/// The worker's side of a queue, the device's side, the handoff between them, and the configuration.
type QueueUnderTest<Q, R, M> = (Q, Writer, Arc<RingHandoff<R>>, M);

/// Configuration of a receive queue, and whether its work requests have a sink.
type RxSetup = (RxConfig, bool);

/// Queues of every kind.
struct FuzzQueues {
    pool: Pool,
    receive: Vec<QueueUnderTest<NicRxQueue<RxRing>, RxRing, RxSetup>>,
    send: Vec<QueueUnderTest<NicTxQueue<TxRing>, TxRing, TxConfig>>,
}

fn receive_ring(pool: &Pool, (mode, with_sink): RxSetup) -> (RxRing, Writer) {
    let segments = mode.layout.buffers() + usize::from(with_sink || matches!(mode.layout, Layout::Striding { .. }));
    let stride = (16 * segments as u32).next_power_of_two();
    let completions = memory((mode.layout.buffers() * REQUESTS as usize).next_power_of_two() * CQE_BYTES);
    let queue_memory = RxQueueMemory {
        ring: memory((stride * REQUESTS) as usize),
        records: memory(8),
        entries: REQUESTS,
        stride,
        completions: completions.clone(),
        completion_records: memory(8),
    };
    let sink = Sink { address: 0x1000, lkey: 3, bytes: 16384 };
    let template = pool.meta_template().in_port(PortId::new(1));
    let ring =
        RxRing::new(RssGroup::new(QueueTeardown::empty()), &mrs(pool, 7), sink, queue_memory, pool, &template, mode);
    (ring.expect("buffers").expect("sizes"), Writer { ring: completions, produced: 0 })
}

fn send_ring(pool: &Pool, mode: TxConfig) -> (TxRing, Writer) {
    let completions = memory(BLOCKS as usize * CQE_BYTES);
    let queue_memory = TxQueueMemory {
        ring: memory(BLOCKS as usize * 64),
        records: memory(8),
        completions: completions.clone(),
        completion_records: memory(8),
        number: QUEUE,
        registers: Registers::new(&memory(4096), 0x800, 256, Arc::default()),
    };
    let ring = TxRing::new(QueueTeardown::empty(), mrs(pool, 7), queue_memory, mode, 64).expect("sizes");
    (ring, Writer { ring: completions, produced: 0 })
}

impl FuzzQueues {
    /// Creates queues in every receive mode and with both kinds of send descriptors. `name` is the name of
    /// the pool.
    fn new(name: &str) -> Self {
        let pool = Pool::new(name, 2048).expect("a pool");
        let layouts = [
            (Layout::Linear { buffers: 1 }, None, false),
            (Layout::Linear { buffers: 1 }, Some(MINI_FORMAT_HASH), true),
            (Layout::Linear { buffers: 3 }, Some(MINI_FORMAT_CSUM), true),
            (Layout::Striding { log: LOG_STRIDES }, None, false),
            (Layout::Striding { log: LOG_STRIDES }, Some(MINI_FORMAT_CSUM_STRIDE), false),
        ];
        let receive = layouts.map(|(layout, format, with_sink)| {
            let mode = (RxConfig { layout, format, tick: 1 << 32, longest: 1522 }, with_sink);
            let (ring, writer) = receive_ring(&pool, mode);
            let handoff = RingHandoff::with_ring(ring);
            (NicRxQueue::new(Arc::clone(&handoff), pool.clone(), pool.meta_template()), writer, handoff, mode)
        });
        let send = [false, true].map(|multi_packet| {
            let mode = TxConfig {
                inline_minimum: 0,
                inline: 0,
                multi_packet,
                max_tso: 65536,
                tunnels: 7,
                sw_parser: true,
                blue_flame: 64,
            };
            let (ring, writer) = send_ring(&pool, mode);
            let handoff = RingHandoff::with_ring(ring);
            (NicTxQueue::new(Arc::clone(&handoff), pool.clone(), 1500), writer, handoff, mode)
        });
        Self { pool, receive: receive.into(), send: send.into() }
    }

    /// Writes the completions in `input`. The first byte of each selects the queue and whether the owner bit
    /// is valid; 64 bytes of content follow. Broken queues are recreated.
    fn write_and_poll(&mut self, input: &[u8]) {
        for step in input.chunks(1 + CQE_BYTES) {
            let Some((choice, bytes)) = step.split_first() else { return };
            let (queue, is_valid, look) = (usize::from(choice & 7), choice & 8 != 0, choice & 0x10 != 0);
            if let Some((receiver, writer, handoff, mode)) = self.receive.get_mut(queue) {
                writer.write(bytes, is_valid);
                if !look {
                    continue;
                }
                let mut batch = Batch::new();
                receiver.receive(&mut batch);
                for packet in batch.iter() {
                    assert!(packet.len() <= 1522 && packet.segments().map(<[u8]>::len).sum::<usize>() == packet.len());
                }
                if handoff.is_returned() {
                    drop((handoff.take_returned(), batch));
                    let (ring, new_writer) = receive_ring(&self.pool, *mode);
                    handoff.hand_off(ring);
                    *writer = new_writer;
                }
            } else if let Some((sender, writer, handoff, mode)) = self.send.get_mut(queue - self.receive.len()) {
                let mut batch = Batch::new();
                self.pool.take_batch_from_template(
                    usize::from(choice >> 5),
                    &mut batch,
                    &self.pool.meta_template().len(60),
                );
                sender.transmit(&mut batch);
                writer.write(bytes, is_valid);
                sender.reclaim();
                if handoff.is_returned() {
                    drop(handoff.take_returned());
                    let (ring, new_writer) = send_ring(&self.pool, *mode);
                    handoff.hand_off(ring);
                    *writer = new_writer;
                }
            }
        }
    }
}

/// Runs queues of every kind against a device that writes `data`.
///
/// # Panics
/// A buffer was lost, or a packet is inconsistent.
pub fn run(data: &[u8]) {
    let mut hostile = FuzzQueues::new("hostile");
    hostile.write_and_poll(data);
    let pool = hostile.pool.clone();
    drop(hostile);
    assert_eq!(pool.outstanding(), 0, "buffers were lost");
}
