use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Key;
use super::hash_table::{Entry, HashTable, NO_DESTINATION};
use crate::epoch::{Domain, Guard, Reader, Shared};
use crate::wheel::{TimerId, TimerWheel};

/// A forwarding database (FDB) as the workers see it.
#[derive(Debug)]
pub struct Fdb {
    table: Shared<HashTable>,
    generation: AtomicU32,
}

/// Limits of a forwarding database. They bound the memory that a flood of forged addresses can use.
#[derive(Clone, Copy, Debug)]
pub struct FdbLimits {
    /// Maximum number of entries. Each takes at most 64 bytes of table memory (the table and its successor
    /// during a rebuild) and about 100 bytes on the control thread.
    pub entries: usize,
    /// Maximum number of learned entries of one segment, so that no segment can use all entries. Static
    /// entries count only against `entries`.
    pub per_segment: usize,
    /// Maximum number of external entries. They count against no other limit.
    pub external: usize,
    /// Seconds after which an unseen address is removed, unless [`FdbWriter::set_ageing`] sets another time;
    /// 0: never.
    pub ageing: u32,
}

impl Default for FdbLimits {
    /// 65 536 entries, 16 384 of them for one segment, besides them 131 072 external ones, and 300 seconds (IEEE 802.1Q
    /// table 8-6).
    fn default() -> Self {
        Self { entries: 65_536, per_segment: 16_384, external: 131_072, ageing: 300 }
    }
}

/// Limits for one address to learn, besides those of the database; `None`: no further limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnLimits {
    /// Maximum number of learned entries of its segment.
    pub segment: Option<usize>,
    /// Maximum number of learned entries with its destination. It also applies to addresses that move there.
    pub destination: Option<usize>,
}

/// Result of learning an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// The address was not known.
    New,
    /// The address was known at this destination.
    Known,
    /// The address was known at another destination.
    Moved {
        /// The previous destination.
        from: u32,
    },
    /// A static entry has another destination and is not changed.
    Static,
    /// The address is not a unicast address.
    NotUnicast,
    /// A limit is reached, or the probe sequence of the address is full.
    Full,
}

/// One entry, for listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdbEntry {
    /// Segment and address.
    pub key: Key,
    /// Destination of the address.
    pub destination: u32,
    /// Second in which the address was last seen; `None` for static entries.
    pub seen: Option<u32>,
    /// True if another control plane put it there ([`FdbWriter::insert_external`]).
    pub external: bool,
}

/// Changed entries of the watched segments.
#[derive(Debug, Default)]
struct Watch {
    segments: HashSet<u16>,
    changed: HashSet<Key>,
}

/// The only writer of an [`Fdb`], on the control thread.
#[derive(Debug)]
pub struct FdbWriter {
    fdb: Arc<Fdb>,
    domain: Domain,
    reader: Reader,
    limits: FdbLimits,
    /// Entries that are not removed. Those that age have a timer.
    entries: HashMap<Key, Option<TimerId>>,
    /// Entries of another control plane. They do not age, and move when their address is learned elsewhere.
    external: HashSet<Key>,
    watch: Watch,
    learned: HashMap<u16, usize>,
    /// Number of learned entries of each destination.
    learned_at: HashMap<u32, usize>,
    /// Ageing times of segments that do not use the default.
    ageing: HashMap<u16, u32>,
    wheel: TimerWheel<Key>,
    /// Slots of the table that hold a key, removed or not.
    used: usize,
    /// Number of tables that replaced another one.
    rebuilds: u64,
}

/// Capacity of the first table, in keys.
const INITIAL_CAPACITY: usize = 512;

impl Fdb {
    /// Returns the table for the lifetime of the guard.
    #[inline(always)]
    pub fn table<'g>(&'g self, guard: Guard<'g>) -> &'g HashTable {
        self.table.read(guard)
    }

    /// Returns a number that changes whenever a lookup might have a different result. Code that caches
    /// results compares it first.
    #[inline(always)]
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }
}

impl FdbWriter {
    /// Creates an empty database and its writer. `now` is the current second (see
    /// [`crate::Context::seconds`]).
    pub fn new(domain: &Domain, limits: FdbLimits, now: u32) -> Self {
        let fdb = Fdb { table: Shared::new(domain, HashTable::new(INITIAL_CAPACITY)), generation: AtomicU32::new(0) };
        Self {
            fdb: Arc::new(fdb),
            domain: domain.clone(),
            reader: domain.join(),
            limits,
            entries: HashMap::new(),
            external: HashSet::new(),
            watch: Watch::default(),
            learned: HashMap::new(),
            learned_at: HashMap::new(),
            ageing: HashMap::new(),
            wheel: TimerWheel::new(now.into()),
            used: 0,
            rebuilds: 0,
        }
    }

    /// Sets the ageing times of segments in seconds (0: never), for the addresses that they have learned too.
    pub fn set_ageing(&mut self, segments: impl IntoIterator<Item = (u16, u32)>) {
        let changed: HashMap<u16, u32> = segments.into_iter().collect();
        self.ageing.extend(&changed);
        if changed.keys().all(|segment| self.learned.get(segment).is_none_or(|n| *n == 0)) {
            return;
        }
        for entry in self.list() {
            let (Some(seconds), Some(seen)) = (changed.get(&entry.key.segment()), entry.seen) else { continue };
            if entry.external {
                continue;
            }
            let timer = (*seconds > 0).then(|| self.wheel.arm(u64::from(seen) + u64::from(*seconds), entry.key));
            if let Some(Some(old)) = self.entries.insert(entry.key, timer) {
                self.wheel.cancel(old);
            }
        }
    }

    fn ageing_of(&self, segment: u16) -> u32 {
        self.ageing.get(&segment).copied().unwrap_or(self.limits.ageing)
    }

    /// Sets new limits. Existing entries stay, even beyond the limits.
    pub fn set_limits(&mut self, limits: FdbLimits) {
        self.limits = limits;
    }

    /// Returns the limits.
    pub fn limits(&self) -> FdbLimits {
        self.limits
    }

    /// Returns the database that the workers read.
    pub fn fdb(&self) -> Arc<Fdb> {
        Arc::clone(&self.fdb)
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Records that an address was seen at a destination (any number except [`NO_DESTINATION`]).
    pub fn learn(&mut self, key: Key, destination: u32, now: u32) -> Learned {
        self.learn_within(key, destination, now, LearnLimits::default())
    }

    /// Does the same as [`Self::learn`] within further limits.
    pub fn learn_within(&mut self, key: Key, destination: u32, now: u32, limits: LearnLimits) -> Learned {
        if !key.is_unicast() || destination == NO_DESTINATION {
            return Learned::NotUnicast;
        }
        let known = self.entries.contains_key(&key);
        let there = self.learned_at(destination);
        let is_full = limits.destination.is_some_and(|limit| there >= limit);
        let in_segment = self.learned.get(&key.segment()).copied().unwrap_or(0);
        let per_segment = limits.segment.map_or(self.limits.per_segment, |limit| limit.min(self.limits.per_segment));
        let is_full_for_new =
            is_full || in_segment >= per_segment || self.entries.len() - self.external.len() >= self.limits.entries;
        self.reader.quiescent();
        if known && let Some(entry) = self.fdb.table(self.reader.guard()).find(key) {
            let from = entry.destination();
            let is_external = self.external.contains(&key);
            return if from == destination {
                entry.touch(now);
                Learned::Known
            } else if entry.seen() == u32::MAX {
                Learned::Static
            } else if is_external && is_full_for_new || is_full {
                Learned::Full
            } else {
                entry.touch(now);
                entry.set_destination(destination);
                self.bump_generation();
                self.note(key);
                if is_external {
                    self.external.remove(&key);
                    self.count_new(key, now);
                } else {
                    self.count_learned(from, -1);
                }
                self.count_learned(destination, 1);
                Learned::Moved { from }
            };
        }
        if is_full_for_new {
            return Learned::Full;
        }
        if !self.insert_entry(key, destination, now) {
            return Learned::Full;
        }
        self.count_new(key, now);
        self.count_learned(destination, 1);
        self.note(key);
        Learned::New
    }

    /// Counts a new learned entry of a segment, which ages from now on.
    fn count_new(&mut self, key: Key, now: u32) {
        let ageing = self.ageing_of(key.segment());
        let timer = (ageing > 0).then(|| self.wheel.arm(u64::from(now) + u64::from(ageing), key));
        self.entries.insert(key, timer);
        *self.learned.entry(key.segment()).or_default() += 1;
    }

    /// Inserts an entry that another control plane owns, or moves it. It takes the place of a learned one, does not
    /// age, and moves when its address is learned elsewhere. Returns `false`, and changes nothing, if there are too
    /// many, if a static entry has the address, or if the address is not unicast.
    pub fn insert_external(&mut self, key: Key, destination: u32, now: u32) -> bool {
        if !key.is_unicast() || destination == NO_DESTINATION {
            return false;
        }
        match self.get(key) {
            Some(FdbEntry { seen: None, .. }) => return false,
            Some(entry) if entry.external => {
                if entry.destination != destination {
                    self.reader.quiescent();
                    if let Some(entry) = self.fdb.table(self.reader.guard()).find(key) {
                        entry.set_destination(destination);
                    }
                    self.bump_generation();
                    self.note(key);
                }
                return true;
            }
            _ if self.external.len() >= self.limits.external => return false,
            Some(_) => _ = self.remove(key),
            None => {}
        }
        // The largest second stands for static entries.
        if !self.insert_entry(key, destination, now.min(u32::MAX - 1)) {
            return false;
        }
        self.entries.insert(key, None);
        self.external.insert(key);
        self.note(key);
        true
    }

    /// Number of external entries.
    pub fn externals(&self) -> usize {
        self.external.len()
    }

    /// Records the changes of these segments for [`Self::take_changed`], and no longer those of others. All entries of
    /// a segment that was not watched before count as changed. The caller takes the changes often enough, since removed
    /// entries stay among them.
    pub fn watch(&mut self, segments: HashSet<u16>) {
        self.watch.changed.retain(|key| segments.contains(&key.segment()));
        let old = std::mem::replace(&mut self.watch.segments, segments);
        if self.watch.segments.is_subset(&old) {
            return;
        }
        for key in self.entries.keys() {
            if self.watch.segments.contains(&key.segment()) && !old.contains(&key.segment()) {
                self.watch.changed.insert(*key);
            }
        }
    }

    /// Returns at most `limit` keys of the watched segments whose entry changed, in any order. A key may have its
    /// former entry again.
    pub fn take_changed(&mut self, limit: usize) -> Vec<Key> {
        if self.watch.changed.is_empty() {
            return Vec::new();
        }
        if self.watch.changed.len() <= limit {
            return self.watch.changed.drain().collect();
        }
        let keys: Vec<Key> = self.watch.changed.iter().take(limit).copied().collect();
        keys.iter().for_each(|key| _ = self.watch.changed.remove(key));
        keys
    }

    /// Records a change of an entry.
    fn note(&mut self, key: Key) {
        if self.watch.segments.contains(&key.segment()) {
            self.watch.changed.insert(key);
        }
    }

    /// Number of learned entries with this destination.
    pub fn learned_at(&self, destination: u32) -> usize {
        self.learned_at.get(&destination).copied().unwrap_or(0)
    }

    /// Changes the number of learned entries of a destination by 1 or -1.
    fn count_learned(&mut self, destination: u32, change: isize) {
        let count = self.learned_at.entry(destination).or_default();
        *count = count.saturating_add_signed(change);
        if *count == 0 {
            self.learned_at.remove(&destination);
        }
    }

    /// Inserts an entry that does not age, does not move and does not count against its segment. It takes the room of
    /// a learned entry if there is no other. Returns `false` if static entries fill the database or the address is not
    /// unicast.
    pub fn insert_static(&mut self, key: Key, destination: u32) -> bool {
        if !key.is_unicast() || destination == NO_DESTINATION {
            return false;
        }
        self.remove(key);
        if self.entries.len() - self.external.len() >= self.limits.entries {
            // Entries with a timer are learned.
            let victim = self.entries.iter().find(|(_, timer)| timer.is_some()).map(|(key, _)| *key);
            let Some(victim) = victim else { return false };
            self.remove(victim);
        }
        if !self.insert_entry(key, destination, u32::MAX) {
            return false;
        }
        self.entries.insert(key, None);
        self.note(key);
        true
    }

    /// Returns an entry of any kind.
    pub fn get(&mut self, key: Key) -> Option<FdbEntry> {
        self.reader.quiescent();
        let entry = self.entries.contains_key(&key).then(|| self.fdb.table(self.reader.guard()).find(key))??;
        Some(fdb_entry(entry, &self.external))
    }

    /// Removes an entry of any kind.
    pub fn remove(&mut self, key: Key) -> Option<FdbEntry> {
        let timer = self.entries.remove(&key)?;
        if let Some(timer) = timer {
            self.wheel.cancel(timer);
        }
        self.reader.quiescent();
        let entry = self.fdb.table(self.reader.guard()).find(key)?;
        let removed = fdb_entry(entry, &self.external);
        entry.set_destination(NO_DESTINATION);
        self.external.remove(&key);
        self.note(key);
        if removed.seen.is_some() && !removed.external {
            if let Some(n) = self.learned.get_mut(&key.segment()) {
                *n -= 1;
            }
            self.count_learned(removed.destination, -1);
        }
        self.bump_generation();
        Some(removed)
    }

    /// Removes all learned entries for which `select` returns true, for example those of a port that went
    /// down. Returns their number.
    pub fn flush(&mut self, mut select: impl FnMut(FdbEntry) -> bool) -> usize {
        self.remove_all(|entry| entry.seen.is_some() && !entry.external && select(entry))
    }

    /// Removes all entries, static and external ones too, for which `select` returns true. Returns their number.
    pub fn remove_all(&mut self, mut select: impl FnMut(FdbEntry) -> bool) -> usize {
        let keys: Vec<Key> = self.list().into_iter().filter(|entry| select(*entry)).map(|entry| entry.key).collect();
        keys.iter().filter(|key| self.remove(**key).is_some()).count()
    }

    /// Removes the entries that were not seen for the ageing time, and calls `expired` for each. Call this
    /// about once a second.
    pub fn age(&mut self, now: u32, mut expired: impl FnMut(FdbEntry)) {
        let mut due = Vec::new();
        self.wheel.advance(now.into(), |_, key| due.push(key));
        for key in due {
            self.reader.quiescent();
            let Some(entry) = self.fdb.table(self.reader.guard()).find(key) else { continue };
            // The workers may have recorded a second that this thread has not reached yet.
            let seen = entry.seen().min(now);
            let ageing = self.ageing_of(key.segment());
            if ageing == 0 || now - seen < ageing {
                let timer = self.wheel.arm(u64::from(seen) + u64::from(ageing.max(1)), key);
                self.entries.insert(key, Some(timer));
            } else if let Some(entry) = self.remove(key) {
                expired(entry);
            }
        }
        if self.used > INITIAL_CAPACITY && self.used > 4 * self.entries.len() {
            self.rebuild();
        }
        self.reader.quiescent();
        self.domain.collect();
    }

    /// Returns all entries in any order.
    pub fn list(&mut self) -> Vec<FdbEntry> {
        self.reader.quiescent();
        let external = &self.external;
        self.fdb.table(self.reader.guard()).iter().map(|entry| fdb_entry(entry, external)).collect()
    }

    /// Number of times that the table was rebuilt. Entries have other positions then.
    pub fn rebuilds(&self) -> u64 {
        self.rebuilds
    }

    /// Iterates over the slots of the table from a position on, with `None` for a free slot. A table that is rebuilt
    /// has other positions.
    pub fn slots_from(&mut self, position: u64) -> impl Iterator<Item = (u64, Option<FdbEntry>)> {
        self.reader.quiescent();
        let slots = self.fdb.table(self.reader.guard()).slots_from(usize::try_from(position).unwrap_or(usize::MAX));
        let external = &self.external;
        (position..).zip(slots.iter().map(move |entry| {
            let used = entry.destination() != NO_DESTINATION;
            used.then(|| fdb_entry(entry, external))
        }))
    }

    fn insert_entry(&mut self, key: Key, destination: u32, seen: u32) -> bool {
        self.reader.quiescent();
        if self.used * 2 >= self.fdb.table(self.reader.guard()).slots() {
            self.rebuild();
        }
        let mut took = self.fdb.table(self.reader.guard()).insert(key, destination, seen);
        if took.is_none() && self.used > self.entries.len() {
            // Removed keys may fill the probe sequence.
            self.rebuild();
            took = self.fdb.table(self.reader.guard()).insert(key, destination, seen);
        }
        let Some(took_slot) = took else { return false };
        self.used += usize::from(took_slot);
        self.bump_generation();
        true
    }

    /// Builds the next table with the right size and without removed keys.
    fn rebuild(&mut self) {
        let next = HashTable::new(INITIAL_CAPACITY.max(self.entries.len() * 2));
        self.used = 0;
        let old = self.fdb.table(self.reader.guard());
        let mut lost = Vec::new();
        // Static entries are inserted first, so that no choice of learned addresses can displace them.
        let is_static = |entry: &&Entry| entry.seen() == u32::MAX;
        for entry in old.iter().filter(is_static).chain(old.iter().filter(|entry| !is_static(entry))) {
            match next.insert(entry.key(), entry.destination(), entry.seen()) {
                Some(_) => self.used += 1,
                None => lost.push(fdb_entry(entry, &self.external)),
            }
        }
        // A table that is a quarter full rejects an entry only if keys were chosen to collide. The address is
        // learned again or flooded.
        for FdbEntry { key, destination, seen, external } in lost {
            if let Some(Some(timer)) = self.entries.remove(&key) {
                self.wheel.cancel(timer);
            }
            self.external.remove(&key);
            self.note(key);
            if seen.is_some() && !external {
                if let Some(n) = self.learned.get_mut(&key.segment()) {
                    *n -= 1;
                }
                self.count_learned(destination, -1);
            }
        }
        self.fdb.table.replace(next);
        self.rebuilds += 1;
        self.bump_generation();
        self.reader.quiescent();
        self.domain.collect();
    }

    fn bump_generation(&self) {
        // Release: a reader that sees the new number also sees the change.
        self.fdb.generation.fetch_add(1, Ordering::Release);
    }
}

fn fdb_entry(entry: &super::Entry, external: &HashSet<Key>) -> FdbEntry {
    let (key, seen) = (entry.key(), entry.seen());
    let seen = (seen != u32::MAX).then_some(seen);
    FdbEntry { key, destination: entry.destination(), seen, external: external.contains(&key) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_wire::MacAddr;

    fn key(i: u32) -> Key {
        let [a, b, c, d] = i.to_be_bytes();
        Key::new(3, MacAddr::new(2, 0, a, b, c, d))
    }

    fn lookup(writer: &FdbWriter, domain: &Domain, key: Key) -> u32 {
        let reader = domain.join();
        writer.fdb.table(reader.guard()).lookup(key)
    }

    #[test]
    fn learns_moves_and_keeps_static_entries() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits::default(), 0);
        assert_eq!(writer.learn(key(1), 7, 0), Learned::New);
        assert_eq!(writer.learn(key(1), 7, 1), Learned::Known);
        let before = writer.fdb.generation();
        assert_eq!(writer.learn(key(1), 8, 1), Learned::Moved { from: 7 });
        assert_ne!(writer.fdb.generation(), before);
        assert_eq!(lookup(&writer, &domain, key(1)), 8);
        assert!(writer.insert_static(key(1), 9));
        assert_eq!(writer.learn(key(1), 7, 2), Learned::Static);
        assert_eq!((lookup(&writer, &domain, key(1)), writer.len()), (9, 1));
        assert_eq!(writer.learn(Key::new(3, MacAddr::new(1, 0, 0, 0, 0, 1)), 7, 0), Learned::NotUnicast);
        assert_eq!(writer.learn(Key::new(0, MacAddr::ZERO), 7, 0), Learned::NotUnicast);
        assert_eq!(lookup(&writer, &domain, Key::new(0, MacAddr::ZERO)), NO_DESTINATION);
    }

    #[test]
    fn ages_what_is_not_seen_and_only_that() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits { ageing: 10, ..FdbLimits::default() }, 100);
        for i in 0..1000 {
            assert_eq!(writer.learn(key(i), i, 100), Learned::New);
        }
        writer.insert_static(key(5000), 1);
        let reader = domain.join();
        for i in (0..1000).step_by(2) {
            writer.fdb.table(reader.guard()).find(key(i)).unwrap().touch(106);
        }
        drop(reader);
        let mut expired = Vec::new();
        writer.age(109, |entry| expired.push(entry.destination));
        assert!(expired.is_empty());
        writer.age(110, |entry| expired.push(entry.destination));
        expired.sort_unstable();
        assert!(expired.iter().copied().eq((1..1000).step_by(2)));
        writer.age(115, |_| panic!("seen at 106"));
        let mut n = 0;
        writer.age(116, |_| n += 1);
        assert_eq!((n, writer.len(), domain.pending_reclaims()), (500, 1, 0));
    }

    #[test]
    fn segments_age_at_their_own_pace() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits { ageing: 100, ..FdbLimits::default() }, 0);
        let of = |segment| Key::new(segment, MacAddr::new(2, 0, 0, 0, 0, 1));
        writer.set_ageing([(1, 10), (2, 0)]);
        for segment in 0..3 {
            writer.learn(of(segment), 1, 0);
        }
        let mut expired = Vec::new();
        for now in [9, 10, 99, 100, 100_000] {
            writer.age(now, |entry| expired.push((now, entry.key.segment())));
        }
        assert_eq!(expired, [(10, 1), (100, 0)]);
    }

    #[test]
    fn floods_are_bounded_and_the_table_shrinks_again() {
        let domain = Domain::new();
        let limits = FdbLimits { entries: 3000, per_segment: 2000, ageing: 5, ..FdbLimits::default() };
        let mut writer = FdbWriter::new(&domain, limits, 0);
        let learned = (0..100_000).filter(|&i| writer.learn(key(i), 1, 0) == Learned::New).count();
        assert_eq!(learned, 2000);
        let other = |i: u32| Key::from_u64(key(i).to_u64() ^ 1 << 48);
        let learned = (0..100_000).filter(|&i| writer.learn(other(i), 1, 0) == Learned::New).count();
        assert_eq!(learned, 1000);
        writer.age(5, |_| ());
        let reader = domain.join();
        assert!(writer.is_empty() && writer.fdb.table(reader.guard()).slots() <= 4 * INITIAL_CAPACITY);
        drop(reader);
        assert_eq!(writer.learn(key(1), 1, 6), Learned::New, "room again");
    }

    #[test]
    fn destinations_have_limits() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits { ageing: 5, ..FdbLimits::default() }, 0);
        let limits = LearnLimits { segment: Some(3), destination: Some(2) };
        let learn = |writer: &mut FdbWriter, i, to| writer.learn_within(key(i), to, 0, limits);
        assert_eq!([1, 2, 3].map(|i| learn(&mut writer, i, 7)), [Learned::New, Learned::New, Learned::Full]);
        assert_eq!([3, 4].map(|i| learn(&mut writer, i, 8)), [Learned::New, Learned::Full], "the segment is full");
        assert_eq!(learn(&mut writer, 3, 7), Learned::Full, "no move either");
        assert_eq!(lookup(&writer, &domain, key(3)), 8);
        assert_eq!(learn(&mut writer, 1, 8), Learned::Moved { from: 7 });
        assert_eq!(learn(&mut writer, 3, 7), Learned::Moved { from: 8 });
        assert_eq!((writer.learned_at(7), writer.learned_at(8)), (2, 1));
        assert!(writer.insert_static(key(2), 7), "a static entry takes the place of a learned one");
        assert_eq!(writer.learned_at(7), 1);
        writer.age(5, |_| ());
        assert!(writer.learned_at.is_empty());
    }

    #[test]
    fn external_entries_stay_until_they_are_learned_elsewhere() {
        let domain = Domain::new();
        let limits = FdbLimits { external: 2, ageing: 10, ..FdbLimits::default() };
        let mut writer = FdbWriter::new(&domain, limits, 0);
        writer.watch([3].into());
        assert_eq!(writer.learn(key(1), 7, 0), Learned::New);
        assert!(writer.insert_external(key(1), 20, 0), "it takes the place of a learned entry");
        assert!(writer.insert_external(key(2), 20, 0) && !writer.insert_external(key(3), 20, 0), "the limit");
        assert!(writer.insert_external(key(2), 21, 0), "a move needs no room");
        writer.insert_static(key(4), 9);
        assert!(!writer.insert_external(key(4), 20, 0));
        assert_eq!((writer.learned_at(7), writer.externals(), writer.len()), (0, 2, 3));
        assert_eq!(writer.flush(|_| true), 0);
        writer.set_ageing([(3, 5)]);
        writer.age(1000, |entry| panic!("{entry:?} ages"));
        let mut changed = writer.take_changed(100);
        changed.sort_unstable();
        assert_eq!(changed, [key(1), key(2), key(4)]);
        assert!(writer.take_changed(100).is_empty());

        assert_eq!(writer.learn(key(2), 8, 1000), Learned::Moved { from: 21 });
        assert_eq!((writer.learned_at(8), writer.externals(), lookup(&writer, &domain, key(2))), (1, 1, 8));
        assert_eq!(writer.take_changed(100), [key(2)]);
        let mut aged = Vec::new();
        writer.age(1005, |entry| aged.push(entry.key));
        assert_eq!(aged, [key(2)], "it is learned now");
        assert_eq!(writer.take_changed(100), [key(2)]);
        assert!(writer.remove(key(1)).is_some_and(|entry| entry.external));
        assert_eq!((writer.externals(), writer.len(), writer.learned_at(20)), (0, 1, 0));
        writer.watch([4].into());
        writer.remove(key(4));
        assert!(writer.take_changed(100).is_empty(), "no longer watched");
    }

    #[test]
    fn a_new_watch_reports_all_entries_in_parts() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits::default(), 0);
        (0..100).for_each(|i| _ = writer.learn(key(i), 1, 0));
        writer.watch([3].into());
        let (first, second) = (writer.take_changed(70), writer.take_changed(70));
        assert_eq!((first.len(), second.len()), (70, 30));
        let all: HashSet<Key> = first.into_iter().chain(second).collect();
        assert_eq!(all.len(), 100);
    }

    #[test]
    fn a_churn_of_addresses_keeps_what_is_alive() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits { ageing: 3, ..FdbLimits::default() }, 0);
        writer.insert_static(key(u32::MAX), 77);
        for now in 0..200 {
            for i in 0..100 {
                assert_eq!(writer.learn(key(now * 100 + i), now, now), Learned::New);
            }
            writer.age(now, |_| ());
            for back in 0..3.min(now + 1) {
                for i in 0..100 {
                    assert_eq!(lookup(&writer, &domain, key((now - back) * 100 + i)), now - back);
                }
            }
            assert_eq!(lookup(&writer, &domain, key(u32::MAX)), 77);
            assert!(writer.len() <= 301);
        }
    }

    #[test]
    fn batched_lookups_find_what_single_ones_do() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits::default(), 0);
        for i in 0..10_000 {
            writer.learn(key(i), i, 0);
        }
        writer.remove(key(4));
        let reader = domain.join();
        let keys: Vec<Key> = (0..64).map(|i| key(if i % 3 == 0 { 1 << 20 | i } else { i })).collect();
        let mut out = [0; 64];
        writer.fdb.table(reader.guard()).lookup_batch(&keys, &mut out);
        for (i, key) in keys.iter().enumerate() {
            assert_eq!(out[i], lookup(&writer, &domain, *key));
            assert_eq!(out[i] != NO_DESTINATION, i % 3 != 0 && i != 4);
        }
    }

    /// Keys whose hashes have the same lowest 16 bits. They collide in every table of up to 65 536 slots.
    fn colliding(ending: u32) -> impl Iterator<Item = Key> {
        (0..).map(key).filter(move |key| key.hash() & 0xffff == ending)
    }

    #[test]
    fn no_choice_of_addresses_displaces_a_static_entry() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits { ageing: 5, ..FdbLimits::default() }, 0);
        // A large table, in which the static entry is far from the others.
        for i in 0..6000 {
            writer.learn(Key::from_u64(key(i).to_u64() ^ 1 << 48), 1, 0);
        }
        let fixed = colliding(5 + (1 << 12)).next().unwrap();
        assert!(writer.insert_static(fixed, 77));
        // The table shrinks. These keys fill the probe sequence of the static entry and were in lower slots
        // before.
        for key in (0..=70).flat_map(|ending| colliding(ending).take(2)) {
            writer.learn(key, 2, 5);
        }
        writer.age(5, |_| ());
        assert_eq!(lookup(&writer, &domain, fixed), 77);
        assert_eq!(writer.learn(fixed, 2, 6), Learned::Static);
    }

    #[test]
    fn removed_entries_free_their_slots() {
        let domain = Domain::new();
        let mut writer = FdbWriter::new(&domain, FdbLimits { ageing: 5, ..FdbLimits::default() }, 0);
        let keys: Vec<Key> = colliding(5).take(66).collect();
        for key in &keys[..64] {
            assert_eq!(writer.learn(*key, 1, 0), Learned::New);
        }
        assert_eq!(writer.learn(keys[64], 1, 0), Learned::Full, "the neighbourhood is full");
        writer.age(5, |_| ());
        assert_eq!(writer.learn(keys[64], 1, 6), Learned::New);
        assert!(writer.insert_static(keys[65], 3));
        assert_eq!((lookup(&writer, &domain, keys[64]), lookup(&writer, &domain, keys[65])), (1, 3));
    }
}
