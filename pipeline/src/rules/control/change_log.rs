//! Version of the rules, and a log of the rules that each version added.
//!
//! The version is the number of log entries that were ever written. A change set is published by one store of
//! the version: a worker that sees the new version sees everything that was written before it.
//!
//! Workers read the entries between their last version and the current one, and invalidate cached results
//! that these affect. A worker that missed too many entries flushes its cache.

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU64, Ordering, fence};

/// An added rule: number of the table in the upper half of the entry, hash of the rule's key in the lower
/// half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Added {
    pub(crate) table: u32,
    pub(crate) hash: u32,
}

/// Entry of a change set that only removed rules.
const NO_ADDITION: u64 = u64::MAX;

/// The reader missed entries and must flush its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

/// A log with one writer and any number of readers.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    version: CachePadded<AtomicU64>,
    entries: Box<[AtomicU64]>,
    /// Largest change set that is logged entry by entry.
    max_per_set: u64,
}

impl ChangeLog {
    /// Creates a log with room for `entries`, rounded up to a power of two.
    pub(crate) fn new(entries: usize) -> Self {
        let entries: Box<[AtomicU64]> = (0..entries.next_power_of_two()).map(|_| AtomicU64::new(NO_ADDITION)).collect();
        Self { version: CachePadded::new(AtomicU64::new(0)), max_per_set: entries.len() as u64 / 2, entries }
    }

    /// Returns the current version.
    #[inline(always)]
    pub(crate) fn version(&self) -> u64 {
        // Acquire: everything that was written before this version is visible.
        self.version.load(Ordering::Acquire)
    }

    fn entry(&self, position: u64) -> &AtomicU64 {
        &self.entries[position as usize & (self.entries.len() - 1)]
    }

    /// Makes a change set visible. Only the writer may call this.
    pub(crate) fn publish(&self, added: &[Added]) {
        let version = self.version.load(Ordering::Relaxed);
        let count = (added.len() as u64).max(1);
        if count > self.max_per_set {
            // The set is too large for the log, so all readers get an overrun.
            self.version.store(version + self.entries.len() as u64 + count, Ordering::Release);
            return;
        }
        // A reader that loads one of the entries below and then executes its acquire fence sees the current
        // version or a later one.
        fence(Ordering::Release);
        if added.is_empty() {
            self.entry(version).store(NO_ADDITION, Ordering::Relaxed);
        }
        for (position, added) in (version..).zip(added) {
            self.entry(position).store(u64::from(added.table) << 32 | u64::from(added.hash), Ordering::Relaxed);
        }
        self.version.store(version + count, Ordering::Release);
    }

    /// Passes the entries between two versions to `each`. After an overrun, these values may be wrong.
    pub(crate) fn read(&self, from: u64, to: u64, mut each: impl FnMut(Added)) -> Result<(), Overrun> {
        // The writer may be overwriting the oldest entries with the next change set.
        let reach = self.entries.len() as u64 - self.max_per_set;
        if to - from > reach {
            return Err(Overrun);
        }
        for position in from..to {
            let entry = self.entry(position).load(Ordering::Relaxed);
            if entry != NO_ADDITION {
                each(Added { table: (entry >> 32) as u32, hash: entry as u32 });
            }
        }
        fence(Ordering::Acquire);
        if self.version.load(Ordering::Relaxed) - from > reach { Err(Overrun) } else { Ok(()) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn read(log: &ChangeLog, from: u64) -> Result<Vec<u32>, Overrun> {
        let mut entries = Vec::new();
        log.read(from, log.version(), |added| entries.push(added.hash)).map(|()| entries)
    }

    fn added(hashes: &[u32]) -> Vec<Added> {
        hashes.iter().map(|&hash| Added { table: 7, hash }).collect()
    }

    #[test]
    fn readers_get_new_entries_or_an_overrun() {
        let log = ChangeLog::new(8);
        log.publish(&added(&[1, 2]));
        log.publish(&[]);
        assert_eq!((log.version(), read(&log, 0)), (3, Ok(vec![1, 2])));
        log.publish(&added(&[3]));
        assert_eq!(read(&log, 3), Ok(vec![3]));
        log.publish(&added(&[4, 5, 6, 7]));
        assert_eq!(read(&log, 4), Ok(vec![4, 5, 6, 7]));
        assert_eq!(read(&log, 3), Err(Overrun), "could be overwritten by the next set");
        let version = log.version();
        log.publish(&added(&[0; 5]));
        assert_eq!(read(&log, version), Err(Overrun), "a set too large for the log");
        let version = log.version();
        log.publish(&added(&[9]));
        assert_eq!(read(&log, version), Ok(vec![9]));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;
    use loom::thread;

    /// A reader without overrun has read exactly the entries of its versions, and sees the data that each set
    /// published.
    #[test]
    fn log_entries_belong_to_their_versions() {
        loom::model(|| {
            let log = Arc::new(ChangeLog::new(4));
            let table: Arc<[AtomicU64; 3]> = Arc::new([AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)]);
            let writer = {
                let (log, table) = (Arc::clone(&log), Arc::clone(&table));
                thread::spawn(move || {
                    for (n, hashes) in [&[10, 11][..], &[12], &[13, 14]].iter().enumerate() {
                        table[n].store(1, Ordering::Relaxed);
                        let added: Vec<_> = hashes.iter().map(|&hash| Added { table: 0, hash }).collect();
                        log.publish(&added);
                    }
                })
            };
            let mut from = 0;
            for _ in 0..2 {
                let to = log.version();
                let mut entries = Vec::new();
                if log.read(from, to, |added| entries.push(added.hash)).is_ok() {
                    let expected: Vec<u32> = (from..to).map(|position| 10 + position as u32).collect();
                    assert_eq!(entries, expected);
                }
                for (at, n) in [(2, 0), (3, 1), (5, 2)] {
                    assert!(to < at || table[n].load(Ordering::Relaxed) == 1, "the data of the version is visible");
                }
                from = to;
            }
            writer.join().unwrap();
            assert_eq!(log.version(), 5);
        });
    }
}
