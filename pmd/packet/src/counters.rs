//! Counters with one writer. Readers do not stop the writer.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::drops::{DropCounters, DropReason};

/// Counter that one thread adds to and any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Creates a counter of value zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. Single writer: the addition is not atomic, so a second writer would lose counts, but do no
    /// other harm.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Sets the value, for a counter that copies another one.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Returns the value.
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that one thread sets and any thread reads, and that may be unknown.
#[derive(Debug)]
pub struct Gauge(AtomicU64);

impl Gauge {
    const UNKNOWN: u64 = u64::MAX;

    /// Sets the value.
    #[inline(always)]
    pub fn set(&self, value: Option<u32>) {
        self.0.store(value.map_or(Self::UNKNOWN, u64::from), Ordering::Relaxed);
    }

    /// Returns the value.
    pub fn get(&self) -> Option<u32> {
        u32::try_from(self.0.load(Ordering::Relaxed)).ok()
    }
}

impl Default for Gauge {
    /// An unknown number.
    fn default() -> Self {
        Self(AtomicU64::new(Self::UNKNOWN))
    }
}

/// Counters of one receive or transmit queue. They have cache lines of their own, so that readers do not slow
/// other data down.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueCounters {
    /// Packets delivered to the program (receive), or accepted by the device and not known to be lost (transmit).
    pub packets: Counter,
    /// Bytes of those packets, without preamble, frame check sequence and inter-frame gap.
    pub bytes: Counter,
    /// Bursts of at least one packet.
    pub bursts: Counter,
    /// Polls without a packet (receive), or attempts to send without success (transmit).
    pub empty: Counter,
    /// Packets whose checksum the kernel had left to a device, and which the driver completed in software.
    pub completed_checksums: Counter,
    /// Superframes that were segmented into frames: by the driver (receive), or by the port in software (transmit).
    pub segmented: Counter,
    /// Received packets that became part of a superframe, behind its first packet (GRO).
    pub joined: Counter,
    /// Packets copied into or out of the pool: their region is not registered, or the device has no
    /// scatter-gather.
    pub copied: Counter,
    /// Packets in addition to those that arrived or were handed over: duplicates of injected faults, and further
    /// frames of superframes that the port cuts.
    pub injected_copies: Counter,
    /// Packets that waited in the queue (receive), or in the device (transmit), when its worker last looked.
    pub waiting: Gauge,
    /// Dropped packets by reason.
    pub drops: DropCounters,
}

/// Snapshot of [`QueueCounters`], or the sum of several snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Packets delivered or accepted.
    pub packets: u64,
    /// Bytes of those packets.
    pub bytes: u64,
    /// Bursts of at least one packet.
    pub bursts: u64,
    /// Polls or attempts to send without a packet.
    pub empty: u64,
    /// Checksums completed in software.
    pub completed_checksums: u64,
    /// GSO packets segmented into frames.
    pub segmented: u64,
    /// Received packets that became part of a superframe, behind its first packet.
    pub joined: u64,
    /// Packets copied into or out of the pool.
    pub copied: u64,
    /// Duplicates of injected faults.
    pub injected_copies: u64,
    /// Packets that waited in the queue or the device when its worker last looked; `None` if the driver cannot tell.
    pub waiting: Option<u32>,
    /// Dropped packets by reason, without reasons that did not occur.
    pub drops: Vec<(DropReason, u64)>,
}

impl QueueCounters {
    /// Counts one poll or one attempt to send. Single writer.
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

    /// Counts packets as dropped that [`Self::packets`] counts as accepted: the device never sent them. Single writer.
    /// `bytes` are those of the packets.
    #[cold]
    pub fn count_unsent(&self, reason: DropReason, packets: u64, bytes: u64) {
        self.packets.set(self.packets.get().saturating_sub(packets));
        self.bytes.set(self.bytes.get().saturating_sub(bytes));
        self.drops.add(reason, packets);
    }

    /// Copies the counters. Each value is exact; together they may differ by a few packets while the queue is
    /// in use.
    pub fn snapshot(&self) -> QueueStats {
        QueueStats {
            packets: self.packets.get(),
            bytes: self.bytes.get(),
            bursts: self.bursts.get(),
            empty: self.empty.get(),
            completed_checksums: self.completed_checksums.get(),
            segmented: self.segmented.get(),
            joined: self.joined.get(),
            copied: self.copied.get(),
            injected_copies: self.injected_copies.get(),
            waiting: self.waiting.get(),
            drops: self.drops.nonzero().collect(),
        }
    }
}

impl QueueStats {
    /// Adds the values of another queue.
    pub fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.bursts += other.bursts;
        self.empty += other.empty;
        self.completed_checksums += other.completed_checksums;
        self.segmented += other.segmented;
        self.joined += other.joined;
        self.copied += other.copied;
        self.injected_copies += other.injected_copies;
        self.waiting = match (self.waiting, other.waiting) {
            (Some(own), Some(others)) => Some(own.saturating_add(others)),
            (own, others) => own.or(others),
        };
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
