//! Flow cache of a worker: an exact-match cache of the rule that each flow matched. It stays valid across
//! changes of the rules.
//!
//! A flow is a row of masked words ([`super::extract`]). Eight flows share a bucket. A new flow replaces a
//! random one if the bucket is full, so that no order of packets can make the cache useless.
//!
//! # Validity
//! Each entry has a *stamp*: the version of the rules at which it was known to be right. It can become wrong
//! in two ways.
//! - Its rule is removed. The rule's own record shows this at every hit.
//! - A rule is added that the flow matches too. The worker reads the table and the hash of each new rule from
//!   the [log](crate::rules::control::change_log).
//!
//! At most two tables that get new rules are *tracked*. For these, an index over the hashes in that table
//! names the cache entries that a new rule can affect. Nearly always there are none. Otherwise only those
//! entries are checked again.
//!
//! Tables that are not tracked, and tables with too many flows in one index slot, are recorded in
//! `last_changed` with the version. Entries with an older stamp search that one table again at their next
//! hit. If there are more than two such tables, the flow is looked up with the misses of its batch. That
//! costs less than searching the tables one by one.
//!
//! So an added rule costs a worker one memory access, and not its cache.

use super::records::{NO_RECORD, Records};
use super::view::{DirectionView, TableView};
use crate::rules::control::change_log::Added;
use crate::table::prefetch;
use crate::zeroed_memory::{Pages, Zeroable, Zeroed};

const WAYS: usize = 8;
/// Number of tables whose additions are tracked.
const TRACKED: usize = 2;
/// Versions after which a table without additions is not tracked any more.
const TRACKING_TIMEOUT: u64 = 1024;
/// Maximum number of changed tables that an entry is rechecked against.
const MAX_RECHECKED_TABLES: usize = 2;
/// Entries in one slot of the index.
const INDEX_SLOT_ENTRIES: usize = 8;
/// Value of the first entry of an index slot that overflowed.
const INDEX_SLOT_FULL: u32 = u32::MAX;
/// Words per entry in the initial allocation. Longer keys leave room for fewer entries.
const WORDS_PER_ENTRY: usize = 8;

/// Tags and rules of eight entries, in one cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Hash of each entry; 0: free.
    tags: [u32; WAYS],
    /// Index of the rule's record; [`NO_RECORD`]: no rule matches.
    rules: [u32; WAYS],
}

#[expect(unsafe_code, reason = "numbers")]
// SAFETY: `Bucket` consists of `u32` arrays. All-zero bytes are a valid value that needs no drop, and `zero`
// returns that value.
unsafe impl Zeroable for Bucket {
    fn zero() -> Self {
        Self { tags: [0; WAYS], rules: [0; WAYS] }
    }
}

/// Cache entries (index plus one) whose keys fall into the same index slot; 0: free.
#[repr(C, align(32))]
#[derive(Clone, Copy, Debug)]
struct IndexSlot([u32; INDEX_SLOT_ENTRIES]);

#[expect(unsafe_code, reason = "numbers")]
// SAFETY: `IndexSlot` is an array of `u32`. All-zero bytes are a valid value that needs no drop, and `zero`
// returns that value.
unsafe impl Zeroable for IndexSlot {
    fn zero() -> Self {
        Self([0; INDEX_SLOT_ENTRIES])
    }
}

/// Validity of cache entries with regard to one table.
#[derive(Clone, Copy, Debug, Default)]
struct ValidSince {
    /// Entries with an older stamp must search the table again.
    since: u64,
}

#[derive(Clone, Copy, Debug)]
struct Tracked {
    table: u32,
    /// Version of the last addition.
    last: u64,
}

/// Result of a cache lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheLookup {
    /// The record of the rule, or [`NO_RECORD`] if no rule matches.
    Hit(u32),
    /// The flow is not in the cache.
    Miss,
}

/// Size and statistics of a flow cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCacheStats {
    /// Packets whose flow was in the cache.
    pub hits: u64,
    /// Packets whose flow was looked up in the tables.
    pub misses: u64,
    /// Entries that were checked again because a rule was added.
    pub checked: u64,
    /// Number of times that the cache was flushed.
    pub flushes: u64,
    /// Capacity in entries.
    pub entries: usize,
    /// Memory in bytes.
    pub bytes: usize,
}

#[derive(Debug)]
pub(crate) struct FlowCache {
    buckets: Zeroed<Bucket>,
    /// Stamp and key of each entry.
    entries: Zeroed<u64>,
    index: Zeroed<IndexSlot>,
    /// Bloom-like filter with eight bits per index slot, by more bits of the hash. Most additions end here.
    filter: Zeroed<u64>,
    /// Words of a key.
    width: usize,
    stride: usize,
    /// Number of used buckets, minus one.
    mask: usize,
    valid_since: Vec<ValidSince>,
    /// The last changed tables with their versions, latest first. Entries with the first version or a later
    /// one need no recheck.
    last_changed: [(u32, u64); MAX_RECHECKED_TABLES + 1],
    tracked: [Option<Tracked>; TRACKED],
    /// Entries in the index since it was cleared.
    index_entries: usize,
    random: fastrand::Rng,
    pub(crate) stats: FlowCacheStats,
}

impl FlowCache {
    /// Creates a cache for about `entries` flows of up to seven words each.
    pub(crate) fn new(entries: usize) -> Self {
        // At least eight buckets, so that one bucket of the longest keys fits.
        let buckets = (entries / WAYS).next_power_of_two().max(8);
        let mut cache = Self {
            buckets: Zeroed::new(buckets, Pages::Huge),
            entries: Zeroed::new(buckets * WAYS * WORDS_PER_ENTRY, Pages::Huge),
            index: Zeroed::new(buckets * WAYS, Pages::Huge),
            filter: Zeroed::new((buckets * WAYS / 8).max(1), Pages::Huge),
            width: 0,
            stride: 0,
            mask: 0,
            valid_since: Vec::new(),
            last_changed: [(u32::MAX, 0); MAX_RECHECKED_TABLES + 1],
            tracked: [None; TRACKED],
            index_entries: 0,
            random: fastrand::Rng::with_seed(0),
            stats: FlowCacheStats::default(),
        };
        cache.stats.bytes = size_of_val(&*cache.buckets) + size_of_val(&*cache.entries);
        cache.stats.bytes += size_of_val(&*cache.index) + size_of_val(&*cache.filter);
        cache.reset(0);
        cache.stats.flushes = 0;
        cache
    }

    /// Flushes the cache and sets the key length to `width` words. Writes all tags.
    pub(crate) fn reset(&mut self, width: usize) {
        self.width = width;
        self.stride = (width + 1).next_power_of_two().max(4);
        let places = self.entries.len() / self.stride.max(WORDS_PER_ENTRY);
        self.mask = (places / WAYS).max(1) - 1;
        self.stats.entries = (self.mask + 1) * WAYS;
        self.flush();
    }

    /// Flushes the cache.
    pub(crate) fn flush(&mut self) {
        self.buckets.iter_mut().for_each(|bucket| bucket.tags = [0; WAYS]);
        self.clear_index();
        self.tracked = [None; TRACKED];
        self.stats.flushes += 1;
    }

    fn clear_index(&mut self) {
        if self.index_entries > 0 {
            self.index.fill(IndexSlot([0; INDEX_SLOT_ENTRIES]));
            self.filter.fill(0);
            self.index_entries = 0;
        }
    }

    fn bucket(&self, hash: u32) -> usize {
        hash as usize & self.mask
    }

    #[inline(always)]
    pub(crate) fn prefetch_bucket(&self, hash: u32) {
        prefetch(&self.buckets[hash as usize & self.mask]);
    }

    /// Returns the entry whose tag equals the hash, with its rule, and prefetches the entry.
    #[inline(always)]
    pub(crate) fn candidate(&self, hash: u32) -> Option<(u32, u32)> {
        let tag = hash.max(1);
        let index = self.bucket(hash);
        let bucket = &self.buckets[index];
        let mut ways = 0u32;
        for (way, other) in bucket.tags.iter().enumerate() {
            ways |= u32::from(*other == tag) << way;
        }
        if ways == 0 {
            return None;
        }
        let way = ways.trailing_zeros() as usize;
        let entry = index * WAYS + way;
        prefetch(&self.entries[entry * self.stride]);
        Some((entry as u32, bucket.rules[way]))
    }

    #[inline(always)]
    fn is_key(&self, entry: u32, row: &[u64]) -> bool {
        let at = entry as usize * self.stride + 1;
        let key = &self.entries[at..at + row.len()];
        key.iter().zip(row).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    }

    #[inline(always)]
    fn stamp(&self, entry: u32) -> u64 {
        self.entries[entry as usize * self.stride]
    }

    /// Checks whether a candidate is the flow, and returns its rule in `version`.
    #[inline(always)]
    pub(crate) fn check(
        &mut self,
        view: &DirectionView,
        slab: Records<'_>,
        version: u64,
        entry: u32,
        row: &[u64],
    ) -> CacheLookup {
        let stamp = self.stamp(entry);
        // The rule is read again, because an earlier packet of the batch may have caused a recheck of the
        // entry.
        let rule = self.buckets[entry as usize / WAYS].rules[entry as usize % WAYS];
        if !self.is_key(entry, row) || (rule != NO_RECORD && !slab.record(rule).is_still_valid(stamp, version)) {
            return CacheLookup::Miss;
        }
        if rule != NO_RECORD {
            slab.record(rule).installed().prefetch();
        }
        if stamp < self.last_changed[0].1 {
            let many = stamp < self.last_changed[MAX_RECHECKED_TABLES].1;
            return if many { CacheLookup::Miss } else { self.recheck(view, slab, version, entry) };
        }
        CacheLookup::Hit(rule)
    }

    /// Searches the changed tables for a better rule than the one in an entry.
    #[cold]
    fn recheck(&mut self, view: &DirectionView, slab: Records<'_>, version: u64, entry: u32) -> CacheLookup {
        self.stats.checked += 1;
        let stamp = self.stamp(entry);
        let (index, way) = (entry as usize / WAYS, entry as usize % WAYS);
        let mut rule = self.buckets[index].rules[way];
        if rule != NO_RECORD && !slab.record(rule).is_still_valid(stamp, version) {
            self.buckets[index].tags[way] = 0;
            return CacheLookup::Miss;
        }
        let at = entry as usize * self.stride;
        for table in &view.tables {
            let doubt = self.valid_since.get(table.number as usize).is_some_and(|doubt| stamp < doubt.since);
            if !doubt {
                continue;
            }
            let key = &self.entries[at + 1..at + 1 + self.width];
            let hash = table.hash(&view.seed, key);
            let better = table.find(slab, version, hash, key);
            rule = better_of(slab, rule, better);
            if self.is_tracked(table.number) {
                self.add_to_index(view, hash, entry);
            }
        }
        self.buckets[index].rules[way] = rule;
        self.entries[at] = version;
        CacheLookup::Hit(rule)
    }

    /// Stores the rule of a flow as of `version`.
    #[inline]
    pub(crate) fn insert(&mut self, view: &DirectionView, hash: u32, row: &[u64], version: u64, rule: u32) {
        let (tag, index) = (hash.max(1), self.bucket(hash));
        let bucket = &self.buckets[index];
        let (mut same, mut free) = (0u32, 0u32);
        for (way, other) in bucket.tags.iter().enumerate() {
            same |= u32::from(*other == tag) << way;
            free |= u32::from(*other == 0) << way;
        }
        // An entry with this tag is the flow itself, or another flow with the same hash, which is rare.
        let way = if same != 0 {
            same.trailing_zeros() as usize
        } else if free != 0 {
            free.trailing_zeros() as usize
        } else {
            self.random.u64(..) as usize % WAYS
        };
        let entry = index * WAYS + way;
        let at = entry * self.stride;
        self.entries[at] = version;
        self.entries[at + 1..at + 1 + row.len()].copy_from_slice(row);
        let bucket = &mut self.buckets[index];
        bucket.tags[way] = tag;
        bucket.rules[way] = rule;
        for i in 0..TRACKED {
            if let Some(table) = self.tracked[i].and_then(|tracked| view.table(tracked.table)) {
                let hash = table.hash(&view.seed, row);
                self.add_to_index(view, hash, entry as u32);
            }
        }
    }

    fn filter_bit(&self, hash: u32) -> (usize, u64) {
        let bit = hash as usize & (self.filter.len() * 64 - 1);
        (bit / 64, 1 << (bit % 64))
    }

    fn is_tracked(&self, table: u32) -> bool {
        self.tracked.iter().flatten().any(|tracked| tracked.table == table)
    }

    /// Adds an entry to the index of tracked tables under its hash.
    fn add_to_index(&mut self, view: &DirectionView, hash: u32, entry: u32) {
        let slot = hash as usize & (self.index.len() - 1);
        let (word, bit) = self.filter_bit(hash);
        self.filter[word] |= bit;
        let index = &mut self.index[slot].0;
        if let Some(name) = index.iter_mut().find(|name| **name == 0 || **name == entry + 1) {
            self.index_entries += usize::from(*name == 0);
            *name = entry + 1;
        } else {
            self.replace_stale_entry(view, slot, entry);
        }
    }

    /// Replaces an index entry that is out of date.
    #[cold]
    fn replace_stale_entry(&mut self, view: &DirectionView, slot: usize, entry: u32) {
        if self.index[slot].0[0] == INDEX_SLOT_FULL {
            return;
        }
        for i in 0..INDEX_SLOT_ENTRIES {
            let other = (self.index[slot].0[i] - 1) as usize;
            let at = other * self.stride;
            let key = &self.entries[at + 1..at + 1 + self.width];
            let here = |tracked: &Tracked| {
                let table = view.table(tracked.table);
                table.is_some_and(|table| table.hash(&view.seed, key) as usize & (self.index.len() - 1) == slot)
            };
            if self.buckets[other / WAYS].tags[other % WAYS] == 0 || !self.tracked.iter().flatten().any(here) {
                self.index[slot].0[i] = entry + 1;
                return;
            }
        }
        self.index[slot].0[0] = INDEX_SLOT_FULL;
    }

    /// Handles an added rule.
    pub(crate) fn added(&mut self, view: &DirectionView, slab: Records<'_>, version: u64, added: Added) {
        let Some(table) = view.table(added.table) else {
            // The table has another number by now.
            self.flush();
            return;
        };
        if self.many_tables_change(version) {
            for tracked in std::mem::take(&mut self.tracked).into_iter().flatten() {
                self.mark_changed(tracked.table, version);
            }
            self.mark_changed(added.table, version);
            return;
        }
        if !self.is_tracked(added.table) {
            self.track(added.table, version);
            self.mark_changed(added.table, version);
            return;
        }
        for tracked in self.tracked.iter_mut().flatten().filter(|tracked| tracked.table == added.table) {
            tracked.last = version;
        }
        if self.index_entries > 2 * self.index.len() {
            // Most index entries belong to flows that have left the cache. The index of all tracked tables
            // starts over.
            self.clear_index();
            for table in self.tracked.map(|tracked| tracked.map(|tracked| tracked.table)).into_iter().flatten() {
                self.mark_changed(table, version);
            }
            return;
        }
        let (word, bit) = self.filter_bit(added.hash);
        if self.filter[word] & bit == 0 {
            return;
        }
        let index = self.index[added.hash as usize & (self.index.len() - 1)].0;
        if index[0] == INDEX_SLOT_FULL {
            self.mark_changed(added.table, version);
            return;
        }
        for entry in index.into_iter().take_while(|name| *name != 0).map(|name| name - 1) {
            self.recheck_entry((view, table), slab, version, entry, added.hash);
        }
    }

    /// Returns true if rules are added to so many tables that tracking some of them saves nothing.
    fn many_tables_change(&self, version: u64) -> bool {
        let (table, since) = self.last_changed[MAX_RECHECKED_TABLES];
        table != u32::MAX && version - since <= TRACKING_TIMEOUT
    }

    /// Tracks the additions of a table if there is room.
    fn track(&mut self, table: u32, version: u64) {
        let tracked = Tracked { table, last: version };
        if let Some(entry) =
            self.tracked.iter_mut().find(|entry| entry.is_none_or(|other| version - other.last > TRACKING_TIMEOUT))
        {
            *entry = Some(tracked);
        }
    }

    fn mark_changed(&mut self, table: u32, version: u64) {
        if self.valid_since.len() <= table as usize {
            self.valid_since.resize(table as usize + 1, ValidSince::default());
        }
        self.valid_since[table as usize].since = version;
        let known = self.last_changed.iter().position(|(other, _)| *other == table);
        let known = known.unwrap_or(MAX_RECHECKED_TABLES);
        self.last_changed[..=known].rotate_right(1);
        self.last_changed[0] = (table, version);
    }

    /// Searches one table for a better rule for one entry, if its key has this hash there.
    fn recheck_entry(
        &mut self,
        (view, table): (&DirectionView, &TableView),
        slab: Records<'_>,
        version: u64,
        entry: u32,
        hash: u32,
    ) {
        let (index, way) = (entry as usize / WAYS, entry as usize % WAYS);
        let at = entry as usize * self.stride;
        if self.buckets[index].tags[way] == 0 {
            return;
        }
        let key = &self.entries[at + 1..at + 1 + self.width];
        if table.hash(&view.seed, key) != hash {
            return;
        }
        self.stats.checked += 1;
        let rule = self.buckets[index].rules[way];
        let better = table.find(slab, version, hash, key);
        // The entry is removed and not updated: its stamp stays old for the other tables, and the new rule is
        // younger than the stamp.
        if better_of(slab, rule, better) != rule {
            self.buckets[index].tags[way] = 0;
        }
    }
}

/// Returns the rule that comes first in matching order.
fn better_of(slab: Records<'_>, rule: u32, other: Option<u32>) -> u32 {
    match other {
        Some(other) if rule == NO_RECORD || slab.record(other).order() < slab.record(rule).order() => other,
        _ => rule,
    }
}
