// UNSAFETY: leaves out the bounds check of a masked index, which is a good part of a lookup.
#![allow(unsafe_code)]

use crate::sync::{AtomicU32, AtomicU64, Ordering};

use super::Key;
use super::hash::prefetch;

/// Destination of an entry that was removed, or of no entry at all.
pub const NO_DESTINATION: u32 = u32::MAX;

/// Key of a slot that was never used: the all-zero address, which no station has, of segment 0.
const FREE: u64 = 0;

/// Longest distance of an entry from the slot that its hash names: bounds what a lookup costs, also when somebody chooses addresses
/// whose hashes collide. An insertion that would go farther is refused.
const MAX_PROBE: usize = 64;

/// An open-addressing hash table with one writer and readers that take no lock.
///
/// **Why a reader is never led astray:** within one table a slot's key is written once, from `FREE` to its key, after its destination.
/// Removal only sets the destination to [`NO_DESTINATION`]; the slot stays that key's. So whoever finds a key reads a destination of
/// that key, the present one or one that was replaced while it looked. Slots of removed keys come free when the writer builds the next
/// table ([`super::FdbWriter`] does so when they become many).
#[derive(Debug)]
pub struct HashTable {
    entries: Box<[Entry]>,
    mask: usize,
}

/// Key, destination and the last second in which the key was seen as source. Four of them fill a cache line.
#[derive(Debug)]
#[repr(C, align(16))]
pub struct Entry {
    key: AtomicU64,
    destination: AtomicU32,
    seen: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Entry>() == 16);

impl Entry {
    /// The key.
    #[inline(always)]
    pub fn key(&self) -> Key {
        Key::from_u64(self.key.load(Ordering::Acquire))
    }

    /// Where the key's packets go; [`NO_DESTINATION`] if it was removed.
    #[inline(always)]
    pub fn destination(&self) -> u32 {
        self.destination.load(Ordering::Acquire)
    }

    /// Last second in which the key was seen; `u32::MAX` for a static entry, which is not refreshed.
    #[inline(always)]
    pub fn seen(&self) -> u32 {
        self.seen.load(Ordering::Relaxed)
    }

    /// Notes that the key was seen in this second. Writes only when the second has changed, so that the line stays shared between the
    /// workers' caches.
    #[inline(always)]
    pub fn touch(&self, second: u32) {
        let seen = self.seen();
        if seen != second && seen != u32::MAX {
            // Exchanged, not stored: the writer may have made the entry a static one since. Once a second for an entry.
            let _ = self.seen.compare_exchange(seen, second, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    pub(super) fn set_destination(&self, destination: u32) {
        self.destination.store(destination, Ordering::Release);
    }

    pub(super) fn set_seen(&self, second: u32) {
        // An exchange like that of `touch`, so that the two have one order in loom's model too; writer only.
        self.seen.swap(second, Ordering::Relaxed);
    }
}

impl HashTable {
    /// An empty table with room for `capacity` keys before it is half full.
    pub fn new(capacity: usize) -> Self {
        let slots = (capacity.max(8) * 2).next_power_of_two();
        let free = || Entry {
            key: AtomicU64::new(FREE),
            destination: AtomicU32::new(NO_DESTINATION),
            seen: AtomicU32::new(0),
        };
        Self { entries: (0..slots).map(|_| free()).collect(), mask: slots - 1 }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.entries.len()
    }

    #[inline(always)]
    fn slot(&self, index: usize) -> &Entry {
        // SAFETY: the mask is the length less one, and the length a power of two.
        unsafe { self.entries.get_unchecked(index & self.mask) }
    }

    /// The entry of a key, removed or not.
    #[inline(always)]
    pub fn find(&self, key: Key) -> Option<&Entry> {
        self.find_hashed(key, key.hash())
    }

    #[inline(always)]
    fn find_hashed(&self, key: Key, hash: u32) -> Option<&Entry> {
        for distance in 0..MAX_PROBE {
            let entry = self.slot(hash as usize + distance);
            let found = entry.key.load(Ordering::Acquire);
            if found == key.to_u64() {
                return (found != FREE).then_some(entry);
            }
            if found == FREE {
                return None;
            }
        }
        None
    }

    /// Where a key's packets go, or [`NO_DESTINATION`].
    #[inline(always)]
    pub fn lookup(&self, key: Key) -> u32 {
        self.find(key).map_or(NO_DESTINATION, Entry::destination)
    }

    /// Looks up all keys of a batch: first every line is asked for, then every one is looked at, so that the misses overlap. Calls
    /// `found` with the position and the entry, removed ones left out.
    ///
    /// # Panics
    /// If there are more keys than a batch holds.
    #[inline(always)]
    pub fn find_batch(&self, keys: &[Key], mut found: impl FnMut(usize, Option<&Entry>)) {
        let mut hashes = [0; wirepath_pmd::packet::BATCH];
        let hashes = &mut hashes[..keys.len()];
        for (hash, key) in hashes.iter_mut().zip(keys) {
            *hash = key.hash();
            prefetch(self.slot(*hash as usize));
        }
        for (i, (key, hash)) in keys.iter().zip(&*hashes).enumerate() {
            found(i, self.find_hashed(*key, *hash).filter(|entry| entry.destination() != NO_DESTINATION));
        }
    }

    /// [`Self::lookup`] for all keys of a batch; `destinations` has the length of `keys`.
    #[inline(always)]
    pub fn lookup_batch(&self, keys: &[Key], destinations: &mut [u32]) {
        self.find_batch(keys, |i, entry| destinations[i] = entry.map_or(NO_DESTINATION, Entry::destination));
    }

    /// Puts a key in, or gives it a new destination. Writer only: two writers at a time could take one slot for two keys.
    /// `None`: its neighbourhood is full. `Some(true)`: a slot was taken.
    pub(super) fn insert(&self, key: Key, destination: u32, seen: u32) -> Option<bool> {
        debug_assert!(key.to_u64() != FREE && destination != NO_DESTINATION);
        let hash = key.hash() as usize;
        for distance in 0..MAX_PROBE {
            let entry = self.slot(hash + distance);
            let found = entry.key.load(Ordering::Relaxed);
            if found == key.to_u64() {
                entry.set_seen(seen);
                entry.set_destination(destination);
                return Some(false);
            }
            if found == FREE {
                entry.set_seen(seen);
                entry.destination.store(destination, Ordering::Relaxed);
                // Release: who sees the key sees the destination.
                entry.key.store(key.to_u64(), Ordering::Release);
                return Some(true);
            }
        }
        None
    }

    /// All entries that are not removed.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.destination() != NO_DESTINATION)
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// While the writer puts in, moves, removes and puts in again, a reader finds a key either not at all or with a destination that was
    /// the key's own; never with that of the neighbour that collides with it.
    #[test]
    fn readers_never_see_the_destination_of_another_key() {
        loom::model(|| {
            let table = Arc::new(HashTable::new(8));
            let (a, b) = colliding(&table);
            let reader = {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    for (key, own) in [(a, [10, 11, 12]), (b, [20, 20, 20])] {
                        let found = table.lookup(key);
                        assert!(found == NO_DESTINATION || own.contains(&found), "{found}");
                    }
                })
            };
            table.insert(a, 10, 0).unwrap();
            table.insert(a, 11, 0).unwrap();
            table.find(a).unwrap().set_destination(NO_DESTINATION);
            table.insert(b, 20, 0).unwrap();
            table.insert(a, 12, 0).unwrap();
            reader.join().unwrap();
            assert_eq!((table.lookup(a), table.lookup(b)), (12, 20));
        });
    }

    #[test]
    fn a_touch_does_not_undo_a_static_entry() {
        loom::model(|| {
            let table = Arc::new(HashTable::new(8));
            let key = Key::from_u64(0x0001_0200_0000_0001);
            table.insert(key, 10, 7).unwrap();
            let worker = {
                let table = Arc::clone(&table);
                thread::spawn(move || table.find(key).unwrap().touch(8))
            };
            table.insert(key, 11, u32::MAX).unwrap();
            worker.join().unwrap();
            assert_eq!(table.find(key).unwrap().seen(), u32::MAX);
        });
    }

    /// Two keys whose search starts at the same slot.
    fn colliding(table: &HashTable) -> (Key, Key) {
        let slot = |key: Key| key.hash() as usize & table.mask;
        let first = Key::from_u64(0x0001_0200_0000_0001);
        let second = (2..1000).map(|i| Key::from_u64(0x0001_0200_0000_0000 | i)).find(|key| slot(*key) == slot(first));
        (first, second.unwrap())
    }
}
