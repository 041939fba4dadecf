// UNSAFETY: an array of which only the first `len` entries are initialised.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::{self, NonNull};

use super::meta::Meta;
use super::{Packet, pool};

/// Largest number of packets of a [`Batch`].
pub const BATCH: usize = 64;

/// Up to [`BATCH`] packets in order, which a worker passes from queue to stage to queue.
pub struct Batch {
    len: usize,
    slots: [MaybeUninit<Packet>; BATCH],
}

impl Batch {
    /// Creates an empty batch.
    pub const fn new() -> Self {
        Self { len: 0, slots: [const { MaybeUninit::uninit() }; BATCH] }
    }

    /// Number of packets in the batch.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the batch has no packet.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if the batch has no more room.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.len == BATCH
    }

    /// Number of packets that still fit.
    #[inline(always)]
    pub fn space(&self) -> usize {
        BATCH - self.len
    }

    /// Appends a packet. Returns it in `Err` if the batch is full.
    #[inline(always)]
    pub fn push(&mut self, packet: Packet) -> Result<(), Packet> {
        match self.slots.get_mut(self.len) {
            Some(slot) => {
                slot.write(packet);
                self.len += 1;
                Ok(())
            }
            None => Err(packet),
        }
    }

    /// Appends the packets `make(0)` to `make(n - 1)`.
    ///
    /// # Panics
    /// If there is no room for them.
    #[inline(always)]
    pub(super) fn push_with(&mut self, n: usize, mut make: impl FnMut(usize) -> Packet) {
        assert!(n <= self.space());
        let start = self.len;
        for (i, slot) in self.slots[start..start + n].iter_mut().enumerate() {
            slot.write(make(i));
        }
        self.len = start + n;
    }

    /// The number of packets, and the address of the free entries behind them, [`Self::space`] in number.
    ///
    /// They are given out together: a later use of the whole batch would invalidate the address.
    ///
    /// # Safety
    /// The caller raises the number only by that of the packets that it has written to the first free entries.
    #[inline(always)]
    pub(super) unsafe fn len_and_spare_slots(&mut self) -> (&mut usize, *mut MaybeUninit<Packet>) {
        let spare = self.slots[self.len..].as_mut_ptr();
        (&mut self.len, spare)
    }

    /// Removes the last packet and returns it.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Packet> {
        self.len = self.len.checked_sub(1)?;
        // SAFETY: the first `len` entries were initialised, and this one is outside of the shortened batch.
        Some(unsafe { self.slots[self.len].assume_init_read() })
    }

    /// The packets as a slice.
    #[inline(always)]
    pub fn as_slice(&self) -> &[Packet] {
        // SAFETY: the first `len` entries are initialised.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr().cast(), self.len) }
    }

    /// The packets as a mutable slice.
    #[inline(always)]
    pub fn as_mut_slice(&mut self) -> &mut [Packet] {
        // SAFETY: the first `len` entries are initialised.
        unsafe { std::slice::from_raw_parts_mut(self.slots.as_mut_ptr().cast(), self.len) }
    }

    /// Iterates over the packets in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Packet> {
        self.as_slice().iter()
    }

    /// Iterates over the packets in order, with mutable access.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Packet> {
        self.as_mut_slice().iter_mut()
    }

    /// Prefetches the cache line at the default data offset of each packet.
    ///
    /// For stages that read packet data: a NIC driver has not touched it. A needless prefetch costs time,
    /// since the line is taken from the cache of its next writer.
    #[inline(always)]
    pub fn prefetch_data(&self) {
        self.iter().for_each(Packet::prefetch_data);
    }

    /// Removes the first `n` packets, or all if there are fewer, and passes each to `consume` in order.
    #[inline(always)]
    pub fn drain_front(&mut self, n: usize, mut consume: impl FnMut(Packet)) {
        let n = n.min(self.len);
        let mut guard = DrainGuard { batch: self, taken: 0 };
        while guard.taken < n {
            let at = guard.taken;
            guard.taken += 1;
            // SAFETY: the entry is initialised. From here on it counts as removed, also if `consume` panics.
            consume(unsafe { guard.batch.slots[at].assume_init_read() });
        }
    }

    /// Passes each packet to `decide`, which returns it to keep it in the batch, or consumes it and returns
    /// `None`.
    #[inline(always)]
    pub fn filter_map(&mut self, mut decide: impl FnMut(Packet) -> Option<Packet>) {
        // A panic in `decide` leaks the packets that follow, but frees none twice.
        let len = std::mem::take(&mut self.len);
        let mut kept = 0;
        for at in 0..len {
            // SAFETY: the first `len` entries are initialised, and each is read once. `kept` is at most `at`,
            // so no packet is overwritten before it is read.
            unsafe {
                let packet = self.slots.get_unchecked(at).assume_init_read();
                if let Some(packet) = decide(packet) {
                    self.slots.get_unchecked_mut(kept).write(packet);
                    kept += 1;
                }
            }
        }
        self.len = kept;
    }

    /// Moves as many packets as fit from the front of `other` to the end of this batch; returns their number.
    pub fn append(&mut self, other: &mut Self) -> usize {
        let n = other.len.min(self.space());
        // SAFETY: `other` has at least `n` packets, and this batch has room for them. `remove_front` then
        // removes them from `other` without a drop.
        unsafe {
            ptr::copy_nonoverlapping(other.slots.as_ptr(), self.slots.as_mut_ptr().add(self.len), n);
            other.remove_front(n);
        }
        self.len += n;
        n
    }

    /// Frees the first `n` packets, or all if there are fewer; returns the sum of their lengths in bytes.
    #[inline(always)]
    pub fn free_front(&mut self, n: usize) -> u64 {
        let n = n.min(self.len);
        // SAFETY: the first `n` entries are initialised, and a packet is a pointer to its metadata line.
        // `remove_front` removes the freed packets without another drop.
        unsafe {
            let bytes = pool::release_all(std::slice::from_raw_parts(self.slots.as_ptr().cast::<NonNull<Meta>>(), n));
            self.remove_front(n);
            bytes
        }
    }

    /// Frees all packets; returns the sum of their lengths in bytes.
    #[inline(always)]
    pub fn clear(&mut self) -> u64 {
        self.free_front(BATCH)
    }

    /// Removes the first `n` entries without a drop and moves the others to the front.
    ///
    /// # Safety
    /// `n` is at most `len`, and the first `n` packets have been moved out.
    #[inline(always)]
    pub(super) unsafe fn remove_front(&mut self, n: usize) {
        let rest = self.len - n;
        self.len = rest;
        if n > 0 && rest > 0 {
            // SAFETY: `n + rest` entries were initialised, so source and destination lie inside the array.
            unsafe {
                let slots = self.slots.as_mut_ptr();
                ptr::copy(slots.add(n), slots, rest);
            }
        }
    }
}

/// Removes the packets taken so far from the front of a batch, also if a consumer panics.
struct DrainGuard<'a> {
    batch: &'a mut Batch,
    taken: usize,
}

impl Drop for DrainGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: the first `taken` packets were moved out, and `taken` is at most `len`.
        unsafe { self.batch.remove_front(self.taken) };
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Extend<Packet> for Batch {
    /// Appends the packets that fit and frees the others.
    fn extend<T: IntoIterator<Item = Packet>>(&mut self, packets: T) {
        for packet in packets {
            let _ = self.push(packet);
        }
    }
}

impl FromIterator<Packet> for Batch {
    fn from_iter<T: IntoIterator<Item = Packet>>(packets: T) -> Self {
        let mut batch = Self::new();
        batch.extend(packets);
        batch
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

const _: () = assert!(size_of::<ManuallyDrop<Packet>>() == size_of::<NonNull<Meta>>());
