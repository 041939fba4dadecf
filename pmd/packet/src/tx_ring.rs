// UNSAFETY: an array of which only the entries between two counters are initialised.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use super::meta::Meta;
use super::tx_burst::TxBurst;
use super::{BATCH, Batch, Packet, pool};

/// Packets that a device transmits, in order. They are added and freed in bulk; the capacity is fixed.
///
/// At most 2³⁰ packets exist (64 pools of fewer than 2²⁴ buffers), so counters that differ by more than 2³¹
/// do not occur.
pub struct InFlight {
    slots: Box<[MaybeUninit<Packet>]>,
    /// Free-running counter of the oldest packet. Its slot is the counter modulo the number of slots, which
    /// is a power of two.
    first: u32,
    /// Free-running counter behind the newest packet.
    end: u32,
    /// Counter behind the last packet that may be a chain or belong to another pool than `pool`.
    mixed_end: u32,
    /// Pool of all packets from `mixed_end` on.
    pool: u8,
}

impl InFlight {
    /// An empty queue with room for `packets` packets, rounded up to a power of two.
    ///
    /// # Panics
    /// If `packets` is above 2³¹.
    pub fn with_capacity(packets: u32) -> Self {
        let count = packets.checked_next_power_of_two().expect("at most 2³¹ packets");
        Self { slots: (0..count).map(|_| MaybeUninit::uninit()).collect(), first: 0, end: 0, mixed_end: 0, pool: 0 }
    }

    /// Number of packets in flight.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.end.wrapping_sub(self.first) as usize
    }

    /// True if no packet is in flight.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// Number of packets that still fit.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.slots.len() - self.len()
    }

    #[inline(always)]
    fn slot(&self, counter: u32) -> usize {
        counter as usize & (self.slots.len() - 1)
    }

    /// Moves the first `n` packets of a batch to the end of the queue.
    ///
    /// # Panics
    /// If the batch has fewer packets, or there is no room for them.
    #[inline(always)]
    pub fn push_from(&mut self, batch: &mut Batch, n: usize) {
        self.push(batch, n, None);
    }

    /// Moves the described packets of a burst to the end of the queue.
    ///
    /// # Panics
    /// If there is no room for them.
    #[inline(always)]
    pub fn push_burst(&mut self, burst: TxBurst<'_>) {
        let (batch, n, pool) = burst.into_parts();
        self.push(batch, n, pool);
    }

    /// Moves packets to the end of the queue. With `pool`, all of them have one segment and belong to this pool.
    #[inline(always)]
    fn push(&mut self, batch: &mut Batch, n: usize, pool: Option<u8>) {
        assert!(n <= batch.len() && n <= self.room());
        let at = self.slot(self.end);
        let before_end = n.min(self.slots.len() - at);
        let from: *const MaybeUninit<Packet> = batch.as_slice().as_ptr().cast();
        // SAFETY: the assertion above guarantees `n` packets in the batch and `n` free slots. The packets are
        // copied to the free slots in at most two runs, and `remove_front` removes them from the batch
        // without a drop.
        unsafe {
            ptr::copy_nonoverlapping(from, self.slots.as_mut_ptr().add(at), before_end);
            ptr::copy_nonoverlapping(from.add(before_end), self.slots.as_mut_ptr(), n - before_end);
            batch.remove_front(n);
        }
        self.end = self.end.wrapping_add(n as u32);
        match pool {
            Some(pool) if pool == self.pool => {}
            // Packets in flight are of the previous pool, so all of them count as mixed.
            Some(pool) => (self.pool, self.mixed_end) = (pool, self.end),
            None => self.mixed_end = self.end,
        }
    }

    /// Sum of the lengths of the `n` oldest packets in bytes, or of all if there are fewer.
    pub fn front_bytes(&self, n: usize) -> u64 {
        let slots = (0..n.min(self.len()) as u32).map(|i| self.slot(self.first.wrapping_add(i)));
        // SAFETY: slots between the two counters are initialised, and the reference ends before they change.
        slots.map(|slot| unsafe { self.slots[slot].assume_init_ref() }.len() as u64).sum()
    }

    /// Takes all packets, the oldest first.
    pub fn take_all(&mut self) -> Vec<Packet> {
        let (first, count) = (self.first, self.len());
        // The counter moves first, so that a panic in the allocation frees nothing twice.
        self.first = self.end;
        self.mixed_end = self.end;
        let slots = (0..count as u32).map(|i| self.slot(first.wrapping_add(i)));
        // SAFETY: slots between the two counters were initialised, and `first` has moved past them, so each packet is
        // read once.
        slots.map(|slot| unsafe { self.slots[slot].assume_init_read() }).collect()
    }

    /// Frees the `n` oldest packets, or all if there are fewer.
    #[inline(always)]
    pub fn free_front(&mut self, n: usize) {
        let mut left = n.min(self.len());
        while left > 0 {
            let at = self.slot(self.first);
            let run = left.min(self.slots.len() - at).min(BATCH);
            let is_mixed = self.mixed_end.wrapping_sub(self.first).cast_signed() > 0;
            // The counter moves first, so that a panic in `release_all` frees nothing twice.
            self.first = self.first.wrapping_add(run as u32);
            // SAFETY: slots between the two counters are initialised, and `first` has moved past this run, so
            // it is freed once. A packet is a pointer to its metadata line. From `mixed_end` on, every packet
            // has one segment and belongs to `pool`.
            unsafe {
                let packets = std::slice::from_raw_parts(self.slots.as_ptr().add(at).cast::<NonNull<Meta>>(), run);
                if is_mixed {
                    pool::release_all(packets);
                } else {
                    // `mixed_end` follows `first`; otherwise it would seem to be ahead once the counters have
                    // wrapped round.
                    self.mixed_end = self.first;
                    pool::release_single_segments(packets, self.pool);
                }
            }
            left -= run;
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.free_front(usize::MAX);
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("len", &self.len()).field("room", &self.room()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn taken_packets_keep_their_order_across_the_wrap() {
        let pool = Pool::new("take_all", 64).unwrap();
        let mut in_flight = InFlight::with_capacity(4);
        let mut earlier: Batch = (0..2).map(|_| pool.take().unwrap()).collect();
        in_flight.push_from(&mut earlier, 2);
        in_flight.free_front(2);
        for round in 0..3u8 {
            let mut batch: Batch = (0..4).map(|_| pool.take().unwrap()).collect();
            for (i, packet) in batch.as_mut_slice().iter_mut().enumerate() {
                assert!(packet.extend_from_slice(&[round, i as u8], &pool));
            }
            in_flight.push_from(&mut batch, 4);
            in_flight.free_front(1);
            let taken: Vec<_> = in_flight.take_all().iter().map(|packet| packet.data().to_vec()).collect();
            assert_eq!(taken, [[round, 1], [round, 2], [round, 3]]);
            assert!(in_flight.is_empty() && pool.outstanding() == 0);
        }
    }

    #[test]
    fn packets_are_freed_in_order_round_the_ring() {
        let pool = Pool::new("in-flight", 300).unwrap();
        let mut in_flight = InFlight::with_capacity(100);
        assert_eq!(in_flight.room(), 128);
        let mut batch = Batch::new();
        for round in 0..20 {
            assert_eq!(pool.take_batch(50, &mut batch), 50);
            for packet in batch.iter_mut() {
                packet.append(60 + round).unwrap();
            }
            in_flight.push_from(&mut batch, 40);
            assert_eq!((in_flight.len(), batch.len()), (40, 10));
            batch.clear();
            in_flight.free_front(30);
            assert_eq!(in_flight.len(), 10);
            in_flight.free_front(usize::MAX);
            assert!(in_flight.is_empty());
        }
        assert_eq!(pool.take_batch(64, &mut batch), 64);
        in_flight.push_from(&mut batch, 64);
        assert_eq!(pool.take_batch(64, &mut batch), 64);
        in_flight.push_from(&mut batch, 64);
        assert_eq!((in_flight.room(), pool.outstanding()), (0, 128));
        drop(in_flight);
        assert_eq!(pool.outstanding(), 0);
    }
}
