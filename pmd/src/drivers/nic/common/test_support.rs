//! Device memory and queues for tests and fuzzers of rings.

// UNSAFETY: creates device memory from the address of a heap buffer.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use wirepath_memory::DeviceMemory;

use super::mr_table::{MrTable, RegisteredRegion};
#[cfg(test)]
use super::{
    ring_handoff::RingHandoff,
    tx_queue::{NicTxQueue, TxRing},
};
#[cfg(test)]
use crate::port::TxDriver;
use wirepath_packet::Pool;
#[cfg(test)]
use wirepath_packet::{Batch, Packet};

/// Allocates memory that a ring shares with a device.
pub(crate) fn memory(bytes: usize) -> DeviceMemory {
    let buffer: Arc<[AtomicU64]> = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: the third argument keeps the buffer alive. It is aligned to 8 bytes, as an array of
    // `AtomicU64`. It is accessed through views of the device memory only.
    unsafe { DeviceMemory::new(NonNull::from(&*buffer).cast(), bytes, Arc::new(buffer)) }
}

/// Returns a table with the pool's region under `lkey`.
pub(crate) fn mrs(pool: &Pool, lkey: u32) -> Arc<MrTable> {
    Arc::new(MrTable::new(RegisteredRegion::new(pool.region(), lkey), Vec::new(), Box::new(())))
}

/// Returns a transmit queue of MTU 9000 over the ring, and its handoff.
#[cfg(test)]
pub(crate) fn tx_queue<R: TxRing>(pool: &Pool, ring: R) -> (NicTxQueue<R>, Arc<RingHandoff<R>>) {
    let handoff = RingHandoff::with_ring(ring);
    (NicTxQueue::new(Arc::clone(&handoff), pool.clone(), 9000), handoff)
}

/// Returns a packet of `len` bytes that count up from 0.
#[cfg(test)]
pub(crate) fn packet(pool: &Pool, len: usize) -> Packet {
    let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
    let mut packet = pool.take().unwrap();
    assert!(packet.extend_from_slice(&bytes, pool));
    packet
}

/// Transmits packets in one batch. Returns the number of those that were accepted or dropped.
#[cfg(test)]
pub(crate) fn send<R: TxRing>(queue: &mut NicTxQueue<R>, packets: impl IntoIterator<Item = Packet>) -> usize {
    let mut batch: Batch = packets.into_iter().collect();
    let before = batch.len();
    queue.transmit(&mut batch);
    before - batch.len()
}
