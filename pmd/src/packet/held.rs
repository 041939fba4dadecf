// UNSAFETY: an array of which only the entries between two counters are initialised.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use super::front::Front;
use super::meta::Meta;
use super::{BATCH, Batch, Packet, pool};

/// Packets that a device holds, first in first out: they move in and are freed in bulk. Its room is fixed; nothing is allocated later.
pub struct Held {
    slots: Box<[MaybeUninit<Packet>]>,
    /// Free-running; a slot is the counter modulo the number of slots, a power of two.
    first: u32,
    end: u32,
    /// Counter behind the last packet that is, or may be, a chain or of another pool than `pool`.
    odd: u32,
    pool: u8,
}

impl Held {
    /// Room for `packets` packets, rounded up to a power of two.
    ///
    /// # Panics
    /// Above 2³¹ packets.
    pub fn with_room_for(packets: u32) -> Self {
        let count = packets.next_power_of_two();
        Self { slots: (0..count).map(|_| MaybeUninit::uninit()).collect(), first: 0, end: 0, odd: 0, pool: 0 }
    }

    /// Packets that are held.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.end.wrapping_sub(self.first) as usize
    }

    /// Whether nothing is held.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// How many packets still fit.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.slots.len() - self.len()
    }

    #[inline(always)]
    fn slot(&self, counter: u32) -> usize {
        counter as usize & (self.slots.len() - 1)
    }

    /// Takes in the first `n` packets of a batch.
    ///
    /// # Panics
    /// If the batch has not as many, or there is no room for them.
    #[inline(always)]
    pub fn take_front(&mut self, batch: &mut Batch, n: usize) {
        self.take_in(batch, n, None);
    }

    /// Takes in the packets that were gone through.
    ///
    /// # Panics
    /// If there is no room for them.
    #[inline(always)]
    pub(crate) fn take(&mut self, front: Front<'_>) {
        let (batch, n, pool) = front.into_parts();
        self.take_in(batch, n, pool);
    }

    /// Takes in packets, all of one segment and of `pool` if there is one.
    #[inline(always)]
    fn take_in(&mut self, batch: &mut Batch, n: usize, pool: Option<u8>) {
        assert!(n <= batch.len() && n <= self.room());
        let at = self.slot(self.end);
        let before_end = n.min(self.slots.len() - at);
        let from: *const MaybeUninit<Packet> = batch.as_slice().as_ptr().cast();
        // SAFETY: `n` packets move from the front of the batch, which then forgets them, to free slots, in at most two runs.
        unsafe {
            ptr::copy_nonoverlapping(from, self.slots.as_mut_ptr().add(at), before_end);
            ptr::copy_nonoverlapping(from.add(before_end), self.slots.as_mut_ptr(), n - before_end);
            batch.remove_front(n);
        }
        self.end = self.end.wrapping_add(n as u32);
        match pool {
            Some(pool) if pool == self.pool => {}
            // Of what is held already, nobody knows any more which of it was of the pool before.
            Some(pool) => (self.pool, self.odd) = (pool, self.end),
            None => self.odd = self.end,
        }
    }

    /// Frees the `n` packets that have been held longest (all, if there are fewer).
    #[inline(always)]
    pub fn free_front(&mut self, n: usize) {
        let mut left = n.min(self.len());
        while left > 0 {
            let at = self.slot(self.first);
            let run = left.min(self.slots.len() - at).min(BATCH);
            let is_odd = self.odd.wrapping_sub(self.first).cast_signed() > 0;
            // First, so that nothing is freed twice should freeing panic.
            self.first = self.first.wrapping_add(run as u32);
            // SAFETY: the run is initialised, a packet is a pointer to its metadata, and the counter has moved past it. Behind `odd`, each is
            // of one segment and of the pool.
            unsafe {
                let packets = std::slice::from_raw_parts(self.slots.as_ptr().add(at).cast::<NonNull<Meta>>(), run);
                if is_odd {
                    pool::release_all(packets);
                } else {
                    // Kept close, so that it does not seem to be ahead when the others have gone round.
                    self.odd = self.first;
                    pool::release_plain(packets, self.pool);
                }
            }
            left -= run;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.free_front(usize::MAX);
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("len", &self.len()).field("room", &self.room()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Pool;

    #[test]
    fn moves_in_and_frees_in_order_round_the_ring() {
        let pool = Pool::new("held", 300).unwrap();
        let mut held = Held::with_room_for(100);
        assert_eq!(held.room(), 128);
        let mut batch = Batch::new();
        for round in 0..20 {
            assert_eq!(pool.take_batch(50, &mut batch), 50);
            for packet in batch.iter_mut() {
                packet.append(60 + round).unwrap();
            }
            held.take_front(&mut batch, 40);
            assert_eq!((held.len(), batch.len()), (40, 10));
            batch.clear();
            held.free_front(30);
            assert_eq!(held.len(), 10);
            held.free_front(usize::MAX);
            assert!(held.is_empty());
        }
        assert_eq!(pool.take_batch(64, &mut batch), 64);
        held.take_front(&mut batch, 64);
        assert_eq!(pool.take_batch(64, &mut batch), 64);
        held.take_front(&mut batch, 64);
        assert_eq!((held.room(), pool.outstanding()), (0, 128));
        drop(held);
        assert_eq!(pool.outstanding(), 0);
    }
}
