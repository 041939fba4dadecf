// UNSAFETY: omits the bounds check of a masked index, which is a significant part of a lookup; entries are zero bytes.
#![allow(unsafe_code)]

//! The hash table of the FDB.
//!
//! Flow rules have a table of their own (`rules::classifier`). Readers of this one also store a timestamp in the
//! entry that they find. Four entries of key, destination and timestamp fill a cache line. Readers of the
//! other write nothing, and its buckets pack keys of several words. One layout cannot serve both without a cost.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

use super::Key;
use super::hash::prefetch;
use crate::zeroed_memory::{Pages, Zeroable, Zeroed};

/// Destination of a removed or missing entry.
pub const NO_DESTINATION: u32 = u32::MAX;

/// Key of an unused slot: the all-zero address in segment 0, which is not a unicast address.
const FREE: u64 = 0;

/// Maximum distance of an entry from the slot that its hash selects. It bounds the cost of a lookup, even if
/// addresses are chosen so that their hashes collide. An insertion beyond this distance fails.
const MAX_PROBE: usize = 64;

/// An open-addressing hash table with one writer and lock-free readers.
///
/// **Why concurrent reads are consistent:** within one table, the key of a slot is written once, from `FREE`
/// to its final value, after its destination. Removal only sets the destination to [`NO_DESTINATION`], and
/// the slot keeps its key. Therefore a reader that finds a key reads a destination of that key, either the
/// current one or one that is just being replaced. The slots of removed keys are recovered when the writer
/// builds the next table, which [`super::FdbWriter`] does when they become many.
#[derive(Debug)]
pub struct HashTable {
    /// In huge pages if they are many, because lookups of random keys would miss the TLB.
    entries: Zeroed<Entry>,
    mask: usize,
}

/// Key, destination and the last second in which the key was seen as a source. Four entries fill a cache
/// line.
#[derive(Debug)]
#[repr(C, align(16))]
pub struct Entry {
    key: AtomicU64,
    /// Complement of the destination, so that an entry of zero bytes has none.
    inverse_destination: AtomicU32,
    seen: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Entry>() == 16);

// SAFETY: zero bytes are atomics of value 0, which need no drop. Under loom, `Zeroed` calls `zero` instead.
unsafe impl Zeroable for Entry {
    fn zero() -> Self {
        Self { key: AtomicU64::new(FREE), inverse_destination: AtomicU32::new(0), seen: AtomicU32::new(0) }
    }
}

impl Entry {
    /// The key.
    #[inline(always)]
    pub fn key(&self) -> Key {
        Key::from_u64(self.key.load(Ordering::Acquire))
    }

    /// Destination of the key's packets; [`NO_DESTINATION`] if the entry was removed or is free.
    #[inline(always)]
    pub fn destination(&self) -> u32 {
        !self.inverse_destination.load(Ordering::Acquire)
    }

    /// Last second in which the key was seen. `u32::MAX` marks a static entry, which is not refreshed.
    #[inline(always)]
    pub fn seen(&self) -> u32 {
        self.seen.load(Ordering::Relaxed)
    }

    /// Records that the key was seen in this second. Writes only if the second has changed, so that the cache
    /// line stays shared between the workers.
    #[inline(always)]
    pub fn touch(&self, second: u32) {
        let seen = self.seen();
        if seen != second && seen != u32::MAX {
            // A compare-exchange, because the writer may have made the entry static since the load. It runs
            // once per second and entry.
            let _ = self.seen.compare_exchange(seen, second, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    pub(super) fn set_destination(&self, destination: u32) {
        self.inverse_destination.store(!destination, Ordering::Release);
    }

    pub(super) fn set_seen(&self, second: u32) {
        // A read-modify-write like that of `touch`, so that loom's model orders the two. Only the writer
        // calls this.
        self.seen.swap(second, Ordering::Relaxed);
    }
}

impl HashTable {
    /// Creates an empty table with room for `capacity` keys before it is half full.
    pub fn new(capacity: usize) -> Self {
        let slots = (capacity.max(8) * 2).next_power_of_two();
        Self { entries: Zeroed::new(slots, Pages::Huge), mask: slots - 1 }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.entries.len()
    }

    #[inline(always)]
    fn slot(&self, index: usize) -> &Entry {
        // SAFETY: `mask` is the length minus one and the length is a power of two, so the masked index is
        // less than the length.
        unsafe { self.entries.get_unchecked(index & self.mask) }
    }

    /// Returns the entry of a key. Removed entries are `None`.
    #[inline(always)]
    pub fn find(&self, key: Key) -> Option<&Entry> {
        self.find_prepared(key, key.hash())
    }

    /// Begins a lookup: starts to load the slot of a key and returns what [`Self::find_prepared`] takes. Work between
    /// the two hides a cache miss.
    #[inline(always)]
    pub fn prepare(&self, key: Key) -> u32 {
        let hash = key.hash();
        prefetch(self.slot(hash as usize));
        hash
    }

    /// Ends a lookup that [`Self::prepare`] began. Removed entries are `None`.
    #[inline(always)]
    pub fn find_prepared(&self, key: Key, hash: u32) -> Option<&Entry> {
        self.find_hashed(key, hash).filter(|entry| entry.destination() != NO_DESTINATION)
    }

    /// Returns the destination of a key whose lookup [`Self::prepare`] began, or [`NO_DESTINATION`].
    #[inline(always)]
    pub fn lookup_prepared(&self, key: Key, hash: u32) -> u32 {
        self.find_hashed(key, hash).map_or(NO_DESTINATION, Entry::destination)
    }

    /// Does the same as [`Self::lookup_prepared`] for the keys of a batch.
    #[inline(never)]
    pub fn lookup_all_prepared(&self, keys: &[Key], hashes: &[u32], destinations: &mut [u32]) {
        for ((key, hash), destination) in keys.iter().zip(hashes).zip(destinations) {
            *destination = self.lookup_prepared(*key, *hash);
        }
    }

    #[inline(always)]
    fn find_hashed(&self, key: Key, hash: u32) -> Option<&Entry> {
        // Most keys are in their first slot.
        let entry = self.slot(hash as usize);
        let found = entry.key.load(Ordering::Acquire);
        if found == key.to_u64() && found != FREE {
            return Some(entry);
        }
        if found == FREE {
            return None;
        }
        for distance in 1..MAX_PROBE {
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

    /// Returns the destination of a key, or [`NO_DESTINATION`].
    #[inline(always)]
    pub fn lookup(&self, key: Key) -> u32 {
        self.lookup_prepared(key, key.hash())
    }

    /// Looks up all keys of a batch. It first prefetches the slots of all keys and then examines them, so
    /// that the cache misses overlap. Calls `found` with the index and the entry; removed entries are
    /// reported as `None`.
    ///
    /// # Panics
    /// Panics if there are more keys than a batch can hold.
    #[inline(always)]
    pub fn find_batch(&self, keys: &[Key], mut found: impl FnMut(usize, Option<&Entry>)) {
        let mut hashes = [0; wirepath_packet::BATCH];
        let hashes = &mut hashes[..keys.len()];
        for (hash, key) in hashes.iter_mut().zip(keys) {
            *hash = self.prepare(*key);
        }
        for (i, (key, hash)) in keys.iter().zip(&*hashes).enumerate() {
            found(i, self.find_prepared(*key, *hash));
        }
    }

    /// Stores the result of [`Self::lookup`] for each key of a batch. `destinations` must be as long as
    /// `keys`.
    #[inline(always)]
    pub fn lookup_batch(&self, keys: &[Key], destinations: &mut [u32]) {
        self.find_batch(keys, |i, entry| destinations[i] = entry.map_or(NO_DESTINATION, Entry::destination));
    }

    /// Inserts a key or changes its destination. Only the writer may call this: two writers could use one
    /// slot for two keys. Returns `None` if the probe sequence is full, and `Some(true)` if a free slot was
    /// used.
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
                entry.inverse_destination.store(!destination, Ordering::Relaxed);
                // Release: a reader that sees the key also sees the destination.
                entry.key.store(key.to_u64(), Ordering::Release);
                return Some(true);
            }
        }
        None
    }

    /// Returns the slots from a position on, free or not.
    pub(super) fn slots_from(&self, position: usize) -> &[Entry] {
        self.entries.get(position..).unwrap_or_default()
    }

    /// Iterates over all entries that are not removed.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.destination() != NO_DESTINATION)
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// While the writer inserts, moves, removes and inserts again, a reader either misses a key or reads one
    /// of its own destinations. It never reads the destination of a colliding key.
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

    /// Returns two keys whose probe sequences start at the same slot.
    fn colliding(table: &HashTable) -> (Key, Key) {
        let slot = |key: Key| key.hash() as usize & table.mask;
        let first = Key::from_u64(0x0001_0200_0000_0001);
        let second = (2..1000).map(|i| Key::from_u64(0x0001_0200_0000_0000 | i)).find(|key| slot(*key) == slot(first));
        (first, second.unwrap())
    }
}
