//! Rings against a device that writes arbitrary completions, for the fuzzer and for a test with random bytes.

use std::sync::Arc;
use wirepath_packet::PortId;

use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::{CQE_BYTES, CQE_TAIL, CqeTail, owner, wqe_units};

use super::cq::Positions;
use super::rx::{RxQueueMemory, RxRing};
use super::tx::{TxQueueMemory, TxRing};
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::ring_handoff::RingHandoff;
use crate::drivers::nic::common::rx_queue::{NicRxQueue, RssGroup};
use crate::drivers::nic::common::test_support::{memory, mrs};
use crate::drivers::nic::common::tx_queue::NicTxQueue;
use crate::port::{RxDriver, TxDriver};
use wirepath_packet::{Batch, MetaTemplate, Packet, Pool};

const DEPTH: u32 = 16;
const QUEUE: u32 = 0x2c05;
const RING: usize = 4096;

/// Writes completions as the device does.
struct Writer {
    completions: DeviceMemory,
    produced: u32,
    is_sq: bool,
}

impl Writer {
    fn new(is_sq: bool) -> Self {
        Self { completions: memory((DEPTH * CQE_BYTES) as usize), produced: DEPTH, is_sq }
    }

    /// Writes an entry that begins with `bytes`. `honest`: sets valid queue and owner fields, so that the
    /// content is read.
    fn write(&mut self, bytes: &[u8], is_valid: bool) {
        let base = (self.produced % DEPTH * CQE_BYTES) as usize;
        let mut entry = [0; CQE_BYTES as usize];
        entry[..bytes.len()].copy_from_slice(bytes);
        for (i, word) in entry.as_chunks::<4>().0.iter().enumerate() {
            self.completions.store32(base + i * 4, u32::from_le_bytes(*word));
        }
        if is_valid {
            let tail = CqeTail::default().with_queue(QUEUE).with_is_sq(self.is_sq.into());
            let tail = tail.with_owner(owner(self.produced, DEPTH));
            self.completions.store32(base + CQE_TAIL as usize, tail.0);
        }
        self.produced = self.produced.wrapping_add(1);
    }
}

/// Runs the script in `data`. A byte selects the next step, a completion or a poll, and whether the
/// completion has valid queue fields.
///
/// # Panics
/// A buffer was lost, or delivered twice.
pub fn run(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else { return };
    let pool = Pool::new("hostile", 256).expect("memory");
    if first & 1 == 0 {
        receive(&pool, rest, if first & 2 == 0 { 1 } else { 5 });
    } else {
        transmit(&pool, rest);
    }
    assert_eq!(pool.outstanding(), 0, "buffers were lost");
}

/// A step of the script.
enum Step<'a> {
    Completion(&'a [u8], bool),
    Poll(u8),
}

fn step<'a>(rest: &mut &'a [u8]) -> Option<Step<'a>> {
    let (&what, remaining) = rest.split_first()?;
    if what & 3 == 0 {
        *rest = remaining;
        return Some(Step::Poll(what >> 2));
    }
    let (entry, remaining) = remaining.split_at(remaining.len().min(CQE_BYTES as usize));
    *rest = remaining;
    Some(Step::Completion(entry, what & 3 != 1))
}

fn receive(pool: &Pool, mut rest: &[u8], buffers: usize) {
    let template = pool.meta_template().in_port(PortId::new(1));
    let (ring, mut device) = receive_ring(pool, &template, buffers);
    let handoff = RingHandoff::with_ring(ring);
    let mut queue = NicRxQueue::new(Arc::clone(&handoff), pool.clone(), template);
    let mut delivered: Vec<Packet> = Vec::new();
    while let Some(step) = step(&mut rest) {
        match step {
            Step::Completion(entry, is_valid) => device.write(entry, is_valid),
            Step::Poll(bits) => {
                let mut batch = Batch::new();
                queue.receive(&mut batch);
                for packet in batch.iter() {
                    assert!(packet.segments().map(<[u8]>::len).sum::<usize>() == packet.len() && packet.len() >= 14);
                }
                let taken = bits & 1 == 0;
                batch.drain_front(usize::MAX, |packet| delivered.extend(taken.then_some(packet)));
                let mut handles: Vec<_> =
                    delivered.iter().map(|packet| (packet.handle().pool, packet.handle().index)).collect();
                handles.sort_unstable();
                assert!(handles.windows(2).all(|two| two[0] != two[1]), "a buffer was handed out twice");
                if delivered.len() > 100 {
                    delivered.clear();
                }
            }
        }
        if handoff.is_returned() {
            delivered.clear();
            drop(handoff.take_returned());
            let (ring, next) = receive_ring(pool, &template, buffers);
            handoff.hand_off(ring);
            device = next;
        }
    }
}

fn receive_ring(pool: &Pool, template: &MetaTemplate, buffers: usize) -> (RxRing, Writer) {
    let device = Writer::new(false);
    let bytes = (DEPTH * wqe_units(8, buffers as u32) * 32).next_power_of_two().max(RING as u32);
    let queue_memory = RxQueueMemory {
        ring: memory(bytes as usize),
        completions: device.completions.clone(),
        rq: QUEUE,
        doorbell: Doorbell::new(&memory(8), 0),
    };
    let rss_group = RssGroup::new(QueueTeardown::empty());
    let ring = RxRing::new(rss_group, &mrs(pool, 1), queue_memory, pool, template, buffers, Positions::UNKNOWN);
    (ring.expect("buffers").expect("powers of two"), device)
}

fn transmit(pool: &Pool, mut rest: &[u8]) {
    let (ring, mut device) = send_ring(pool);
    let handoff = RingHandoff::with_ring(ring);
    let mut queue = NicTxQueue::new(Arc::clone(&handoff), pool.clone(), 9000);
    while let Some(step) = step(&mut rest) {
        match step {
            Step::Completion(entry, is_valid) => device.write(entry, is_valid),
            Step::Poll(bits) => {
                let mut batch = Batch::new();
                pool.take_batch(usize::from(bits & 15), &mut batch);
                for packet in batch.iter_mut() {
                    assert!(packet.append(60).is_some());
                }
                queue.transmit(&mut batch);
                queue.reclaim();
            }
        }
        if handoff.is_returned() {
            drop(handoff.take_returned());
            let (ring, next) = send_ring(pool);
            handoff.hand_off(ring);
            device = next;
        }
    }
}

fn send_ring(pool: &Pool) -> (TxRing, Writer) {
    let device = Writer::new(true);
    let queue_memory = TxQueueMemory {
        ring: memory(RING),
        completions: device.completions.clone(),
        sq: QUEUE,
        cq: 0x99,
        vport: 0,
        doorbell: Doorbell::new(&memory(8), 0),
    };
    (
        TxRing::new(QueueTeardown::empty(), mrs(pool, 1), queue_memory, Positions::UNKNOWN).expect("powers of two"),
        device,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_completions_lose_no_buffer() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut next = || rng.u64(..);
        for _ in 0..400 {
            let mut script = vec![next() as u8];
            for _ in 0..next() % 40 {
                if next() % 3 == 0 {
                    script.push((next() as u8) & !3);
                    continue;
                }
                // Mostly valid types and lengths: pure noise fails the first check.
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
            run(&script);
        }
    }
}
