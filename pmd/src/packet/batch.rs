// UNSAFETY: an array of which only the first `len` entries are initialised.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::{self, NonNull};

use super::meta::Meta;
use super::{Packet, pool};

/// Most packets of a [`Batch`].
pub const BATCH: usize = 64;

/// Up to [`BATCH`] packets in order: what a worker carries from queue to stage to queue.
pub struct Batch {
    len: usize,
    slots: [MaybeUninit<Packet>; BATCH],
}

impl Batch {
    /// An empty batch.
    pub const fn new() -> Self {
        Self { len: 0, slots: [const { MaybeUninit::uninit() }; BATCH] }
    }

    /// Packets in the batch.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no packet.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether no packet fits any more.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.len == BATCH
    }

    /// How many packets still fit.
    #[inline(always)]
    pub fn space(&self) -> usize {
        BATCH - self.len
    }

    /// Appends a packet; gives it back if the batch is full.
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

    /// Appends `n` packets made by `make(0..n)`.
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

    /// Where the next packets go: room for [`Self::space`].
    #[inline(always)]
    pub(super) fn spare(&mut self) -> *mut MaybeUninit<Packet> {
        self.slots[self.len..].as_mut_ptr()
    }

    /// Takes in `n` packets that were written to [`Self::spare`].
    ///
    /// # Safety
    /// There was room for them, and they were.
    #[inline(always)]
    pub(super) unsafe fn grow(&mut self, n: usize) {
        self.len += n;
    }

    /// Takes the last packet.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Packet> {
        self.len = self.len.checked_sub(1)?;
        // SAFETY: was initialised, and is outside of the batch now.
        Some(unsafe { self.slots[self.len].assume_init_read() })
    }

    /// The packets.
    #[inline(always)]
    pub fn as_slice(&self) -> &[Packet] {
        // SAFETY: the first `len` are initialised.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr().cast(), self.len) }
    }

    /// The packets, to change them.
    #[inline(always)]
    pub fn as_mut_slice(&mut self) -> &mut [Packet] {
        // SAFETY: the first `len` are initialised.
        unsafe { std::slice::from_raw_parts_mut(self.slots.as_mut_ptr().cast(), self.len) }
    }

    /// The packets in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Packet> {
        self.as_slice().iter()
    }

    /// The packets in order, to change them.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Packet> {
        self.as_mut_slice().iter_mut()
    }

    /// Asks the processor to fetch the line where the data of each fresh packet starts. For stages that read it: a driver of a NIC has not
    /// touched it, and what is fetched in vain is taken from whoever writes there next.
    #[inline(always)]
    pub fn prefetch_data(&self) {
        self.iter().for_each(Packet::prefetch_data);
    }

    /// Takes the first `n` packets out (all, if there are fewer), handing each to `consume` in order.
    #[inline(always)]
    pub fn drain_front(&mut self, n: usize, mut consume: impl FnMut(Packet)) {
        let n = n.min(self.len);
        let mut guard = Gap { batch: self, taken: 0 };
        while guard.taken < n {
            let at = guard.taken;
            guard.taken += 1;
            // SAFETY: initialised, and left to the gap from here on, also if `consume` panics.
            consume(unsafe { guard.batch.slots[at].assume_init_read() });
        }
    }

    /// Gives each packet to `decide`, which keeps it (`Some`) or consumes it (`None`): the shape of every filtering stage.
    #[inline(always)]
    pub fn filter_map(&mut self, mut decide: impl FnMut(Packet) -> Option<Packet>) {
        // A panic in `decide` leaks the packets that were not looked at yet, but frees none twice.
        let len = std::mem::take(&mut self.len);
        let mut kept = 0;
        for at in 0..len {
            // SAFETY: initialised and taken once; `kept` <= `at`, so no packet that is still to be read is overwritten.
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

    /// Moves packets from the front of `other` to the end of this batch, as many as fit; returns how many.
    pub fn append(&mut self, other: &mut Self) -> usize {
        let n = other.len.min(self.space());
        // SAFETY: `n` initialised packets move to free slots; `remove_front` then forgets them at their old place.
        unsafe {
            ptr::copy_nonoverlapping(other.slots.as_ptr(), self.slots.as_mut_ptr().add(self.len), n);
            other.remove_front(n);
        }
        self.len += n;
        n
    }

    /// Frees the first `n` packets (all, if there are fewer) at once; returns their bytes.
    #[inline(always)]
    pub fn free_front(&mut self, n: usize) -> u64 {
        let n = n.min(self.len);
        // SAFETY: a packet is a pointer to its metadata; they are freed here and forgotten by `remove_front`.
        unsafe {
            let bytes = pool::release_all(std::slice::from_raw_parts(self.slots.as_ptr().cast::<NonNull<Meta>>(), n));
            self.remove_front(n);
            bytes
        }
    }

    /// Frees all packets at once; returns their bytes.
    #[inline(always)]
    pub fn clear(&mut self) -> u64 {
        self.free_front(BATCH)
    }

    /// Forgets the first `n` packets and closes the gap.
    ///
    /// # Safety
    /// `n` <= `len`, and the packets have been moved out.
    #[inline(always)]
    pub(super) unsafe fn remove_front(&mut self, n: usize) {
        let rest = self.len - n;
        self.len = rest;
        if n > 0 && rest > 0 {
            // SAFETY: `n + rest` entries were initialised.
            unsafe { ptr::copy(self.slots.as_ptr().add(n), self.slots.as_mut_ptr(), rest) };
        }
    }
}

/// Closes the gap at the front even if a consumer panics.
struct Gap<'a> {
    batch: &'a mut Batch,
    taken: usize,
}

impl Drop for Gap<'_> {
    fn drop(&mut self) {
        // SAFETY: `taken` packets were moved out.
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
    /// Appends what fits and frees the rest.
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
