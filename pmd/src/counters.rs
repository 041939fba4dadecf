//! Counters with one writer, read by others without stopping it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::drops::{DropCounters, DropReason};

/// A counter that one thread adds to and any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. A plain addition, not an atomic one: two writers would lose counts, but nothing worse.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Sets the value, for counters that mirror one kept elsewhere.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value.
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one receive or transmit queue did. On lines of its own, so that readers disturb nobody else.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueCounters {
    /// Packets handed to the program (receive) or accepted by the device (transmit).
    pub packets: Counter,
    /// Bytes of those packets, without preamble, frame check sequence and gap.
    pub bytes: Counter,
    /// Bursts that moved at least one packet.
    pub bursts: Counter,
    /// Polls that found nothing (receive), or could send nothing (transmit).
    pub empty: Counter,
    /// Packets whose checksum the kernel had left to a device and which the driver completed.
    pub completed_checksums: Counter,
    /// Superframes that the driver cut into frames.
    pub segmented: Counter,
    /// Packets that had to be copied into or out of the pool (foreign region, chain on a device without gather).
    pub copied: Counter,
    /// Packets that the queue dropped, by reason.
    pub drops: DropCounters,
}

/// A copy of [`QueueCounters`] at one moment, or the sum of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bursts that moved at least one packet.
    pub bursts: u64,
    /// Polls or sends without result.
    pub empty: u64,
    /// Checksums completed for the kernel.
    pub completed_checksums: u64,
    /// Superframes cut.
    pub segmented: u64,
    /// Packets copied.
    pub copied: u64,
    /// Drops by reason; only those that occurred.
    pub drops: Vec<(DropReason, u64)>,
}

impl QueueCounters {
    /// Counts one poll, or one attempt to send: what it moved, or that it moved nothing. Single writer.
    #[inline(always)]
    pub fn count_burst(&self, packets: u64, bytes: u64) {
        if packets == 0 {
            self.empty.add(1);
        } else {
            self.packets.add(packets);
            self.bytes.add(bytes);
            self.bursts.add(1);
        }
    }

    /// Copies the counters. Each value is exact; together they may be a few packets apart if the queue is at work.
    pub fn snapshot(&self) -> QueueStats {
        QueueStats {
            packets: self.packets.get(),
            bytes: self.bytes.get(),
            bursts: self.bursts.get(),
            empty: self.empty.get(),
            completed_checksums: self.completed_checksums.get(),
            segmented: self.segmented.get(),
            copied: self.copied.get(),
            drops: self.drops.nonzero().collect(),
        }
    }
}

impl QueueStats {
    /// Adds another queue's figures.
    pub fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.bursts += other.bursts;
        self.empty += other.empty;
        self.completed_checksums += other.completed_checksums;
        self.segmented += other.segmented;
        self.copied += other.copied;
        for &(reason, n) in &other.drops {
            match self.drops.iter_mut().find(|(r, _)| *r == reason) {
                Some((_, sum)) => *sum += n,
                None => self.drops.push((reason, n)),
            }
        }
    }

    /// Sum of all drops.
    pub fn dropped(&self) -> u64 {
        self.drops.iter().map(|(_, n)| n).sum()
    }
}
