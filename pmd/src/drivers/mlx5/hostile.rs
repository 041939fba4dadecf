//! A device that writes whatever it is told to: for the fuzzer, and for a test with random bytes.

use std::sync::Arc;

use wirepath_memory::DeviceMemory;
use wirepath_nic_defs::mlx5::{CQE_BYTES, CQE_OWNER, MINI_FORMAT_CSUM, MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH};

use super::rx::{Layout, ReceiveMode, ReceivePlace, ReceiveRing};
use super::tx::{Registers, SendMode, SendPlace, SendRing};
use crate::drivers::direct::exchange::Exchange;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::hostile::{keys, memory};
use crate::drivers::direct::receive::{Receiver, Spread};
use crate::drivers::direct::registered::Sink;
use crate::drivers::direct::send::Sender;
use crate::packet::{Batch, Pool};
use crate::port::{ReceiveQueue, TransmitQueue};

/// Work requests of the receive rings, and blocks of the send ring.
const REQUESTS: u32 = 8;
const BLOCKS: u32 = 64;
const QUEUE: u32 = 0x2c05;
const LOG_STRIDES: u32 = 3;

/// Completions as the device writes them.
struct Writer {
    ring: DeviceMemory,
    produced: u32,
}

impl Writer {
    /// Writes 64 bytes, and with `honest` the owner bit that makes them an entry.
    fn write(&mut self, bytes: &[u8], honest: bool) {
        let entries = (self.ring.bytes() / CQE_BYTES) as u32;
        let mut entry = [0; CQE_BYTES];
        let n = bytes.len().min(CQE_BYTES);
        entry[..n].copy_from_slice(&bytes[..n]);
        if honest {
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

/// The worker's end of a queue, the device's, and what is between.
type Played<Q, R, M> = (Q, Writer, Arc<Exchange<R>>, M);

/// How a receive queue works, and whether its work requests end in the sink.
type Receiving = (ReceiveMode, bool);

/// Queues of every kind, with a device behind them that has no manners.
struct Hostile {
    pool: Pool,
    receive: Vec<Played<Receiver<ReceiveRing>, ReceiveRing, Receiving>>,
    send: Vec<Played<Sender<SendRing>, SendRing, SendMode>>,
}

fn receive_ring(pool: &Pool, (mode, with_sink): Receiving) -> (ReceiveRing, Writer) {
    let segments = mode.layout.buffers() + usize::from(with_sink || matches!(mode.layout, Layout::Striding { .. }));
    let stride = (16 * segments as u32).next_power_of_two();
    let completions = memory((mode.layout.buffers() * REQUESTS as usize).next_power_of_two() * CQE_BYTES);
    let place = ReceivePlace {
        ring: memory((stride * REQUESTS) as usize),
        records: memory(8),
        entries: REQUESTS,
        stride,
        completions: completions.clone(),
        completion_records: memory(8),
    };
    let sink = Sink { address: 0x1000, lkey: 3, bytes: 16384 };
    let blank = pool.blank().in_port(1);
    let ring = ReceiveRing::new(Spread::new(Ending::none()), &keys(pool, 7), sink, place, pool, &blank, mode);
    (ring.expect("buffers").expect("sizes"), Writer { ring: completions, produced: 0 })
}

fn send_ring(pool: &Pool, mode: SendMode) -> (SendRing, Writer) {
    let completions = memory(BLOCKS as usize * CQE_BYTES);
    let place = SendPlace {
        ring: memory(BLOCKS as usize * 64),
        records: memory(8),
        completions: completions.clone(),
        completion_records: memory(8),
        number: QUEUE,
        registers: Registers::new(&memory(4096), 0x800, 256, Arc::default()),
    };
    let ring = SendRing::new(Ending::none(), keys(pool, 7), place, mode, 64).expect("sizes");
    (ring, Writer { ring: completions, produced: 0 })
}

impl Hostile {
    /// Queues in every receive mode and with both kinds of send descriptors; `name` of the pool.
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
            let mode = (ReceiveMode { layout, format, tick: 1 << 32, longest: 1522 }, with_sink);
            let (ring, writer) = receive_ring(&pool, mode);
            let exchange = Arc::new(Exchange::new());
            exchange.hand_out(ring);
            (Receiver::new(Arc::clone(&exchange), pool.clone(), pool.blank()), writer, exchange, mode)
        });
        let send = [false, true].map(|multi_packet| {
            let mode =
                SendMode { inline_minimum: 0, inline: 0, multi_packet, max_tso: 65536, tunnels: 7, blue_flame: 64 };
            let (ring, writer) = send_ring(&pool, mode);
            let exchange = Arc::new(Exchange::new());
            exchange.hand_out(ring);
            (Sender::new(Arc::clone(&exchange), pool.clone(), 1500), writer, exchange, mode)
        });
        Self { pool, receive: receive.into(), send: send.into() }
    }

    /// The device writes what `input` says: for each completion a byte that chooses the queue and whether the owner bit is right, then 64
    /// bytes of it. Queues that were given up are made anew.
    fn play(&mut self, input: &[u8]) {
        for step in input.chunks(1 + CQE_BYTES) {
            let Some((choice, bytes)) = step.split_first() else { return };
            let (queue, honest, look) = (usize::from(choice & 7), choice & 8 != 0, choice & 0x10 != 0);
            if let Some((receiver, writer, exchange, mode)) = self.receive.get_mut(queue) {
                writer.write(bytes, honest);
                if !look {
                    continue;
                }
                let mut batch = Batch::new();
                receiver.receive(&mut batch);
                for packet in batch.iter() {
                    assert!(packet.len() <= 1522 && packet.segments().map(<[u8]>::len).sum::<usize>() == packet.len());
                }
                if exchange.is_back() {
                    drop((exchange.collect(), batch));
                    let (ring, fresh) = receive_ring(&self.pool, *mode);
                    exchange.hand_out(ring);
                    *writer = fresh;
                }
            } else if let Some((sender, writer, exchange, mode)) = self.send.get_mut(queue - self.receive.len()) {
                let mut batch = Batch::new();
                self.pool.take_batch_like(usize::from(choice >> 5), &mut batch, &self.pool.blank().len(60));
                sender.transmit(&mut batch);
                writer.write(bytes, honest);
                sender.reclaim();
                if exchange.is_back() {
                    drop(exchange.collect());
                    let (ring, fresh) = send_ring(&self.pool, *mode);
                    exchange.hand_out(ring);
                    *writer = fresh;
                }
            }
        }
    }
}

/// Queues of every kind against a device that writes `data`; no buffer may be lost.
///
/// # Panics
/// If something is wrong.
pub fn play(data: &[u8]) {
    let mut hostile = Hostile::new("hostile");
    hostile.play(data);
    let pool = hostile.pool.clone();
    drop(hostile);
    assert_eq!(pool.outstanding(), 0, "buffers were lost");
}
