//! The version of the rules, and what changed on the way to it.
//!
//! The version is the number of notes that were ever written. Publishing a change set is one store of it: whoever sees the new version
//! sees everything that was written before. Workers read the notes between the version that they knew and the one they see, and forget
//! what these make untrue. A worker that slept through too many of them forgets everything.

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU64, Ordering, fence};

/// A rule was added to a table: its number in the upper, the hash of the rule's key in the lower half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Added {
    pub(super) table: u32,
    pub(super) hash: u32,
}

/// Note that says nothing: something was only removed.
const NOTHING: u64 = u64::MAX;

/// The worker must forget everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overrun;

/// One writer, any number of readers.
#[derive(Debug)]
pub(super) struct Log {
    version: CachePadded<AtomicU64>,
    notes: Box<[AtomicU64]>,
    /// Most notes of one change set that are written one by one.
    most: u64,
}

impl Log {
    /// With room for `notes`, a power of two.
    pub(super) fn new(notes: usize) -> Self {
        let notes: Box<[AtomicU64]> = (0..notes.next_power_of_two()).map(|_| AtomicU64::new(NOTHING)).collect();
        Self { version: CachePadded::new(AtomicU64::new(0)), most: notes.len() as u64 / 2, notes }
    }

    /// The present version.
    #[inline(always)]
    pub(super) fn version(&self) -> u64 {
        // Acquire: with the version comes all that was written before it.
        self.version.load(Ordering::Acquire)
    }

    fn note(&self, position: u64) -> &AtomicU64 {
        &self.notes[position as usize & (self.notes.len() - 1)]
    }

    /// Makes a change set visible. Writer only.
    pub(super) fn publish(&self, added: &[Added]) {
        let version = self.version.load(Ordering::Relaxed);
        let count = (added.len() as u64).max(1);
        if count > self.most {
            // More than anybody keeps up with.
            self.version.store(version + self.notes.len() as u64 + count, Ordering::Release);
            return;
        }
        // Whoever reads one of the notes below sees, behind its own acquire fence, the present version or a later one.
        fence(Ordering::Release);
        if added.is_empty() {
            self.note(version).store(NOTHING, Ordering::Relaxed);
        }
        for (position, added) in (version..).zip(added) {
            self.note(position).store(u64::from(added.table) << 32 | u64::from(added.hash), Ordering::Relaxed);
        }
        self.version.store(version + count, Ordering::Release);
    }

    /// Gives the notes between two versions to `each`. After an overrun, what `each` was given may be wrong.
    pub(super) fn read(&self, from: u64, to: u64, mut each: impl FnMut(Added)) -> Result<(), Overrun> {
        // A change set may just be written over the oldest notes.
        let reach = self.notes.len() as u64 - self.most;
        if to - from > reach {
            return Err(Overrun);
        }
        for position in from..to {
            let note = self.note(position).load(Ordering::Relaxed);
            if note != NOTHING {
                each(Added { table: (note >> 32) as u32, hash: note as u32 });
            }
        }
        fence(Ordering::Acquire);
        if self.version.load(Ordering::Relaxed) - from > reach { Err(Overrun) } else { Ok(()) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn read(log: &Log, from: u64) -> Result<Vec<u32>, Overrun> {
        let mut notes = Vec::new();
        log.read(from, log.version(), |added| notes.push(added.hash)).map(|()| notes)
    }

    fn added(hashes: &[u32]) -> Vec<Added> {
        hashes.iter().map(|&hash| Added { table: 7, hash }).collect()
    }

    #[test]
    fn readers_get_what_they_have_not_seen_or_know_that_they_are_too_late() {
        let log = Log::new(8);
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
        assert_eq!(read(&log, version), Err(Overrun), "a set too large for notes");
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

    /// A reader that is told "no overrun" has read exactly the notes of the versions in question, and sees what each set was about.
    #[test]
    fn notes_are_those_of_the_versions() {
        loom::model(|| {
            let log = Arc::new(Log::new(4));
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
                let mut notes = Vec::new();
                if log.read(from, to, |added| notes.push(added.hash)).is_ok() {
                    let expected: Vec<u32> = (from..to).map(|position| 10 + position as u32).collect();
                    assert_eq!(notes, expected);
                }
                for (at, n) in [(2, 0), (3, 1), (5, 2)] {
                    assert!(to < at || table[n].load(Ordering::Relaxed) == 1, "what the version is about is there");
                }
                from = to;
            }
            writer.join().unwrap();
            assert_eq!(log.version(), 5);
        });
    }
}
