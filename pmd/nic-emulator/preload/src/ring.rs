//! The ring of doorbell stores in a device's file: from other processes to the owner of the device.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use wirepath_nic_emulator::DOORBELL_BYTES;
use wirepath_nic_emulator::device::Store;

/// Number of stores that fit into the ring.
pub(crate) const SLOTS: u32 = 1024;
/// Number of polls after which a reserved but empty slot is skipped, because its producer has died.
const STUCK_POLLS: u32 = 1 << 20;
/// Bit position of the size of a store; the offset is in the bits below.
const SIZE_SHIFT: u32 = 20;
const _: () = assert!(DOORBELL_BYTES <= 1 << SIZE_SHIFT);

/// A ring of stores in the shared file, with many producers in other processes and one consumer (D. Vyukov's
/// bounded queue).
#[repr(C)]
pub(crate) struct Ring {
    /// Number of slots that producers have reserved.
    head: AtomicU32,
    /// Number of slots that the owner has consumed.
    tail: AtomicU32,
    stuck: AtomicU32,
    _rest: [u32; 13],
    slots: [Slot; SLOTS as usize],
}

#[repr(C)]
struct Slot {
    /// Sequence number: even if the slot is free, odd if it contains a store. It counts from zero in each
    /// slot, so that an empty file is a valid ring.
    turn: AtomicU32,
    /// Offset of the store, and its size in the upper bits.
    offset_and_size: AtomicU32,
    value: AtomicU64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("head", &self.head).field("tail", &self.tail).finish_non_exhaustive()
    }
}

impl Ring {
    /// Appends a store; waits while the ring is full.
    pub(crate) fn push(&self, store: Store) {
        let number = self.head.fetch_add(1, Ordering::Relaxed);
        let slot = &self.slots[(number % SLOTS) as usize];
        let turn = number / SLOTS * 2;
        // The wait is bounded, because an owner that has died consumes nothing.
        for _ in 0..10_000_000u32 {
            if slot.turn.load(Ordering::Acquire) == turn {
                slot.offset_and_size.store(store.offset as u32 | (store.size as u32) << SIZE_SHIFT, Ordering::Relaxed);
                slot.value.store(store.value, Ordering::Relaxed);
                slot.turn.store(turn + 1, Ordering::Release);
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Returns the next store.
    pub(crate) fn pop(&self) -> Option<Store> {
        let number = self.tail.load(Ordering::Relaxed);
        let slot = &self.slots[(number % SLOTS) as usize];
        let turn = number / SLOTS * 2;
        if slot.turn.load(Ordering::Acquire) != turn + 1 {
            if self.head.load(Ordering::Relaxed) != number && self.stuck.fetch_add(1, Ordering::Relaxed) > STUCK_POLLS {
                self.stuck.store(0, Ordering::Relaxed);
                slot.turn.store(turn + 2, Ordering::Release);
                self.tail.store(number.wrapping_add(1), Ordering::Relaxed);
            }
            return None;
        }
        self.stuck.store(0, Ordering::Relaxed);
        let (packed, value) = (slot.offset_and_size.load(Ordering::Relaxed), slot.value.load(Ordering::Relaxed));
        slot.turn.store(turn + 2, Ordering::Release);
        self.tail.store(number.wrapping_add(1), Ordering::Relaxed);
        // The values come from another process. The device checks their meaning; here only the offset is
        // limited.
        let offset = packed as usize % DOORBELL_BYTES as usize;
        Some(Store { offset, size: (packed >> SIZE_SHIFT & 0xf) as usize, value })
    }
}
