//! The table of sources of a worker.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

const SLOTS: usize = 4096;
/// Slots in which a source can be.
const WAYS: usize = 4;

/// A source. One worker writes it, and the control thread reads it, so plain loads and stores are enough.
#[derive(Default)]
struct Source {
    /// IPv4 address; 0 if the slot is free.
    address: AtomicU32,
    /// Second of the last SYN.
    seen: AtomicU32,
    /// SYNs within this second.
    syns: AtomicU32,
}

/// The sources of one worker.
pub(crate) struct Sources(Vec<Source>);

impl Sources {
    /// Creates an empty table.
    pub(crate) fn new() -> Self {
        Self((0..SLOTS).map(|_| Source::default()).collect())
    }

    /// Returns the sources: address, second of the last SYN, and SYNs within this second.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Ipv4Addr, u32, u32)> {
        let used = self.0.iter().filter(|source| source.address.load(Relaxed) != 0);
        used.map(|it| (it.address.load(Relaxed).into(), it.seen.load(Relaxed), it.syns.load(Relaxed)))
    }

    /// Counts a SYN. A new source replaces the one in its slots that was not seen for the longest time.
    pub(crate) fn count(&self, address: Ipv4Addr, now: u32) -> Option<u32> {
        let address = address.to_bits();
        let set = address.wrapping_mul(0x9e37_79b9) as usize % (SLOTS / WAYS);
        let set = &self.0[set * WAYS..][..WAYS];
        let is_known = |source: &&Source| source.address.load(Relaxed) == address;
        let free_or_oldest = |source: &&Source| (source.address.load(Relaxed) != 0, source.seen.load(Relaxed));
        let source = set.iter().find(is_known).or_else(|| set.iter().min_by_key(free_or_oldest))?;
        let goes_on = is_known(&source) && source.seen.load(Relaxed) == now;
        let syns = if goes_on { source.syns.load(Relaxed).saturating_add(1) } else { 1 };
        source.address.store(address, Relaxed);
        source.seen.store(now, Relaxed);
        source.syns.store(syns, Relaxed);
        Some(syns)
    }

    /// Frees the slots of old sources.
    pub(crate) fn forget(&self, is_old: impl Fn(u32) -> bool) {
        let old = self.0.iter().filter(|source| is_old(source.seen.load(Relaxed)));
        old.for_each(|source| source.address.store(0, Relaxed));
    }
}
