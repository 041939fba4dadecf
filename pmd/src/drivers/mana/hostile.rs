//! A device that writes whatever it is told to: for the fuzzer, and for a test with random bytes.

use std::sync::Arc;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::{CQE_BYTES, CQE_TAIL, CqeTail, owner, wqe_units};

use super::cq::Positions;
use super::rx::{ReceivePlace, ReceiveRing};
use super::tx::{SendPlace, SendRing};
use crate::drivers::direct::exchange::Exchange;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::hostile::{keys, memory};
use crate::drivers::direct::receive::{Receiver, Spread};
use crate::drivers::direct::send::Sender;
use crate::packet::{Batch, Blank, Packet, Pool};
use crate::port::{ReceiveQueue, TransmitQueue};

const DEPTH: u32 = 16;
const QUEUE: u32 = 0x2c05;
const RING: usize = 4096;

/// Completions as the device writes them.
struct Writer {
    completions: DeviceMemory,
    produced: u32,
    is_sq: bool,
}

impl Writer {
    fn new(is_sq: bool) -> Self {
        Self { completions: memory((DEPTH * CQE_BYTES) as usize), produced: DEPTH, is_sq }
    }

    /// An entry that begins with `bytes`; `honest`: queue and owner are right, so that what is behind them is read.
    fn write(&mut self, bytes: &[u8], honest: bool) {
        let base = (self.produced % DEPTH * CQE_BYTES) as usize;
        let mut entry = [0; CQE_BYTES as usize];
        entry[..bytes.len()].copy_from_slice(bytes);
        for (i, word) in entry.as_chunks::<4>().0.iter().enumerate() {
            self.completions.store32(base + i * 4, u32::from_le_bytes(*word));
        }
        if honest {
            let tail = CqeTail::default().with_queue(QUEUE).with_is_sq(self.is_sq.into());
            let tail = tail.with_owner(owner(self.produced, DEPTH));
            self.completions.store32(base + CQE_TAIL as usize, tail.0);
        }
        self.produced = self.produced.wrapping_add(1);
    }
}

/// Plays the script in `data`: a byte says what is next, a completion or a poll, and whether the completion is honest about its queue.
///
/// # Panics
/// If a buffer is lost or handed out twice.
pub fn play(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else { return };
    let pool = Pool::new("hostile", 256).expect("memory");
    if first & 1 == 0 {
        receive(&pool, rest, if first & 2 == 0 { 1 } else { 5 });
    } else {
        transmit(&pool, rest);
    }
    assert_eq!(pool.outstanding(), 0, "buffers were lost");
}

/// What the script says next.
enum Step<'a> {
    Completion(&'a [u8], bool),
    Poll(u8),
}

fn step<'a>(rest: &mut &'a [u8]) -> Option<Step<'a>> {
    let (&what, behind) = rest.split_first()?;
    if what & 3 == 0 {
        *rest = behind;
        return Some(Step::Poll(what >> 2));
    }
    let (entry, behind) = behind.split_at(behind.len().min(CQE_BYTES as usize));
    *rest = behind;
    Some(Step::Completion(entry, what & 3 != 1))
}

fn receive(pool: &Pool, mut rest: &[u8], buffers: usize) {
    let blank = pool.blank().in_port(1);
    let exchange = Arc::new(Exchange::new());
    let (ring, mut device) = receive_ring(pool, &blank, buffers);
    exchange.hand_out(ring);
    let mut queue = Receiver::new(Arc::clone(&exchange), pool.clone(), blank);
    let mut kept: Vec<Packet> = Vec::new();
    while let Some(step) = step(&mut rest) {
        match step {
            Step::Completion(entry, honest) => device.write(entry, honest),
            Step::Poll(much) => {
                let mut batch = Batch::new();
                queue.receive(&mut batch);
                for packet in batch.iter() {
                    assert!(packet.segments().map(<[u8]>::len).sum::<usize>() == packet.len() && packet.len() >= 14);
                }
                let taken = much & 1 == 0;
                batch.drain_front(usize::MAX, |packet| kept.extend(taken.then_some(packet)));
                let mut handles: Vec<_> =
                    kept.iter().map(|packet| (packet.handle().pool, packet.handle().index)).collect();
                handles.sort_unstable();
                assert!(handles.windows(2).all(|two| two[0] != two[1]), "a buffer was handed out twice");
                if kept.len() > 100 {
                    kept.clear();
                }
            }
        }
        if exchange.is_back() {
            kept.clear();
            drop(exchange.collect());
            let (ring, next) = receive_ring(pool, &blank, buffers);
            exchange.hand_out(ring);
            device = next;
        }
    }
}

fn receive_ring(pool: &Pool, blank: &Blank, buffers: usize) -> (ReceiveRing, Writer) {
    let device = Writer::new(false);
    let bytes = (DEPTH * wqe_units(8, buffers as u32) * 32).next_power_of_two().max(RING as u32);
    let place = ReceivePlace {
        ring: memory(bytes as usize),
        completions: device.completions.clone(),
        rq: QUEUE,
        doorbell: Doorbell::new(&memory(8), 0),
    };
    let spread = Spread::new(Ending::none());
    let ring = ReceiveRing::new(spread, &keys(pool, 1), place, pool, blank, buffers, Positions::UNKNOWN);
    (ring.expect("buffers").expect("powers of two"), device)
}

fn transmit(pool: &Pool, mut rest: &[u8]) {
    let exchange = Arc::new(Exchange::new());
    let (ring, mut device) = send_ring(pool);
    exchange.hand_out(ring);
    let mut queue = Sender::new(Arc::clone(&exchange), pool.clone(), 9000);
    while let Some(step) = step(&mut rest) {
        match step {
            Step::Completion(entry, honest) => device.write(entry, honest),
            Step::Poll(much) => {
                let mut batch = Batch::new();
                pool.take_batch(usize::from(much & 15), &mut batch);
                for packet in batch.iter_mut() {
                    assert!(packet.append(60).is_some());
                }
                queue.transmit(&mut batch);
                queue.reclaim();
            }
        }
        if exchange.is_back() {
            drop(exchange.collect());
            let (ring, next) = send_ring(pool);
            exchange.hand_out(ring);
            device = next;
        }
    }
}

fn send_ring(pool: &Pool) -> (SendRing, Writer) {
    let device = Writer::new(true);
    let place = SendPlace {
        ring: memory(RING),
        completions: device.completions.clone(),
        sq: QUEUE,
        cq: 0x99,
        vport: 0,
        doorbell: Doorbell::new(&memory(8), 0),
    };
    (SendRing::new(Ending::none(), keys(pool, 1), place, Positions::UNKNOWN).expect("powers of two"), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_completions_lose_no_buffer() {
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..400 {
            let mut script = vec![next() as u8];
            for _ in 0..next() % 40 {
                if next() % 3 == 0 {
                    script.push((next() as u8) & !3);
                    continue;
                }
                // Types and lengths that are mostly possible: pure noise gets no further than the first check.
                script.push([2, 3, 2, 1][next() as usize % 4]);
                let mut entry = [0u8; 64];
                entry.iter_mut().for_each(|byte| *byte = next() as u8);
                entry[0] = [1, 1, 2, 3, 4, 32, 33, 42, 63, 0][next() as usize % 10];
                for at in [8, 20, 32, 44] {
                    entry[at + 1] &= 0x0f;
                }
                if next() % 2 == 0 {
                    entry[56..60].fill(0);
                }
                script.extend(entry);
            }
            play(&script);
        }
    }
}
