//! A worker's memory of which rule each flow met: an exact-match cache that survives changes of the rules.
//!
//! A flow is a row of masked words ([`super::extract`]). Eight flows share a bucket; a new one takes the place of one of them by lot
//! where no place is free, so that no order of packets makes the cache useless altogether.
//!
//! # What keeps it true
//! Each entry has a *stamp*: the version of the rules at which it was known to be right. It may become wrong in two ways.
//! - Its rule goes away: seen in the rule's own record at every hit.
//! - A rule is added that the flow fits too. The worker reads from the [log](super::log) which table and hash each new rule has. For
//!   the tables that rules are being added to (two at most are *tracked*) it keeps, for every entry, where it would be found: an array
//!   over the hashes in that table. Nearly always nobody is there. If somebody is, just those entries are looked at again. In tables
//!   that are not tracked, and where too many flows share a place in the array, the table is noted as *doubtful* from this version on:
//!   entries with an older stamp look into that one table again at their next hit. If there are more than two such tables, the flow is
//!   looked up with the misses of its batch, which costs less than to look into one table after another.
//!
//! So an addition costs a worker one memory access, and not its cache.

use super::log::Added;
use super::memory::{Pages, Zero, Zeroed};
use super::records::{NONE, Records};
use super::view::{Side, TableView};
use crate::table::prefetch;

const WAYS: usize = 8;
/// Tables whose additions are followed closely.
const TRACKED: usize = 2;
/// Versions after which a table to which nothing was added is not followed any more.
const QUIET: u64 = 1024;
/// Doubtful tables that an entry is compared with by itself.
const FEW: usize = 2;
/// Entries that one place of the array names.
const NAMES: usize = 8;
/// Name that says "more than these".
const MANY: u32 = u32::MAX;
/// Words of an entry for which there is room for all entries; longer ones leave room for fewer.
const WORDS_PER_ENTRY: usize = 8;

/// Tags and rules of eight entries: one cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// 0: free.
    tags: [u32; WAYS],
    /// Index of the rule's record; [`NONE`]: no rule fits.
    rules: [u32; WAYS],
}

#[expect(unsafe_code, reason = "numbers")]
// SAFETY: numbers.
unsafe impl Zero for Bucket {
    fn zero() -> Self {
        Self { tags: [0; WAYS], rules: [0; WAYS] }
    }
}

/// Entries (plus one) whose key would be in the same place of a tracked table; 0: free.
#[repr(C, align(32))]
#[derive(Clone, Copy, Debug)]
struct Names([u32; NAMES]);

#[expect(unsafe_code, reason = "numbers")]
// SAFETY: numbers.
unsafe impl Zero for Names {
    fn zero() -> Self {
        Self([0; NAMES])
    }
}

/// What is known of a table's additions.
#[derive(Clone, Copy, Debug, Default)]
struct Doubt {
    /// Entries with an older stamp must look into the table again.
    since: u64,
}

#[derive(Clone, Copy, Debug)]
struct Tracked {
    table: u32,
    /// Version of the last addition.
    last: u64,
}

/// What became of a look into the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// This rule, or none ([`NONE`]).
    Hit(u32),
    /// Not known.
    Miss,
}

/// Sizes and counts, for people and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Flows found.
    pub hits: u64,
    /// Flows that had to be looked up.
    pub misses: u64,
    /// Entries that were looked at again because of an addition.
    pub checked: u64,
    /// Times that everything was forgotten.
    pub flushes: u64,
    /// Places of the cache.
    pub entries: usize,
    /// Bytes of memory.
    pub bytes: usize,
}

#[derive(Debug)]
pub(super) struct Cache {
    buckets: Zeroed<Bucket>,
    /// Stamp and key of each entry.
    entries: Zeroed<u64>,
    names: Zeroed<Names>,
    /// Eight bits for each place of `names`, by more bits of the hash: most additions end here.
    filter: Zeroed<u64>,
    /// Words of a key, and of an entry.
    width: usize,
    stride: usize,
    /// Buckets that are used, less one.
    mask: usize,
    doubts: Vec<Doubt>,
    /// The tables with the latest doubts, the latest first. Entries with its stamp or a later one need no second look.
    doubtful: [(u32, u64); FEW + 1],
    tracked: [Option<Tracked>; TRACKED],
    /// Names given since the array was cleared.
    named: usize,
    random: u64,
    pub(super) stats: CacheStats,
}

impl Cache {
    /// For about so many flows of up to seven words each.
    pub(super) fn new(entries: usize) -> Self {
        // Eight at least: then there is room for one bucket of the longest keys.
        let buckets = (entries / WAYS).next_power_of_two().max(8);
        let mut cache = Self {
            buckets: Zeroed::new(buckets, Pages::Huge),
            entries: Zeroed::new(buckets * WAYS * WORDS_PER_ENTRY, Pages::Huge),
            names: Zeroed::new(buckets * WAYS, Pages::Huge),
            filter: Zeroed::new((buckets * WAYS / 8).max(1), Pages::Huge),
            width: 0,
            stride: 0,
            mask: 0,
            doubts: Vec::new(),
            doubtful: [(u32::MAX, 0); FEW + 1],
            tracked: [None; TRACKED],
            named: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            stats: CacheStats::default(),
        };
        cache.stats.bytes = size_of_val(&*cache.buckets) + size_of_val(&*cache.entries);
        cache.stats.bytes += size_of_val(&*cache.names) + size_of_val(&*cache.filter);
        cache.reset(0);
        cache.stats.flushes = 0;
        cache
    }

    /// Forgets everything; keys have `width` words from now on. Costs a write to all tags.
    pub(super) fn reset(&mut self, width: usize) {
        self.width = width;
        self.stride = (width + 1).next_power_of_two().max(4);
        let places = self.entries.len() / self.stride.max(WORDS_PER_ENTRY);
        self.mask = (places / WAYS).max(1) - 1;
        self.stats.entries = (self.mask + 1) * WAYS;
        self.flush();
    }

    /// Forgets everything.
    pub(super) fn flush(&mut self) {
        self.buckets.iter_mut().for_each(|bucket| bucket.tags = [0; WAYS]);
        self.clear_names();
        self.tracked = [None; TRACKED];
        self.stats.flushes += 1;
    }

    fn clear_names(&mut self) {
        if self.named > 0 {
            self.names.fill(Names([0; NAMES]));
            self.filter.fill(0);
            self.named = 0;
        }
    }

    fn bucket(&self, hash: u32) -> usize {
        hash as usize & self.mask
    }

    #[inline(always)]
    pub(super) fn prefetch_bucket(&self, hash: u32) {
        prefetch(&self.buckets[hash as usize & self.mask]);
    }

    /// The entry that has the flow if any has, and its rule; asks for the entry's line.
    #[inline(always)]
    pub(super) fn candidate(&self, hash: u32) -> Option<(u32, u32)> {
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

    /// Whether a candidate is the flow, and what its rule is in `version`.
    #[inline(always)]
    pub(super) fn check(&mut self, side: &Side, slab: Records<'_>, version: u64, entry: u32, row: &[u64]) -> Look {
        let stamp = self.stamp(entry);
        // Not what `candidate` said: a packet before this one may have made the entry look again.
        let rule = self.buckets[entry as usize / WAYS].rules[entry as usize % WAYS];
        if !self.is_key(entry, row) || (rule != NONE && !slab.record(rule).is_still_there(stamp, version)) {
            return Look::Miss;
        }
        if rule != NONE {
            slab.record(rule).installed().prefetch();
        }
        if stamp < self.doubtful[0].1 {
            let many = stamp < self.doubtful[FEW].1;
            return if many { Look::Miss } else { self.check_again(side, slab, version, entry) };
        }
        Look::Hit(rule)
    }

    /// Looks into the tables that may have a better rule than the one that an entry names.
    #[cold]
    fn check_again(&mut self, side: &Side, slab: Records<'_>, version: u64, entry: u32) -> Look {
        self.stats.checked += 1;
        let stamp = self.stamp(entry);
        let (index, way) = (entry as usize / WAYS, entry as usize % WAYS);
        let mut rule = self.buckets[index].rules[way];
        if rule != NONE && !slab.record(rule).is_still_there(stamp, version) {
            self.buckets[index].tags[way] = 0;
            return Look::Miss;
        }
        let at = entry as usize * self.stride;
        for table in &side.tables {
            let doubt = self.doubts.get(table.number as usize).is_some_and(|doubt| stamp < doubt.since);
            if !doubt {
                continue;
            }
            let key = &self.entries[at + 1..at + 1 + self.width];
            let hash = table.hash(&side.secret, key);
            let better = table.find(slab, version, hash, key);
            rule = better_of(slab, rule, better);
            if self.is_tracked(table.number) {
                self.name(side, hash, entry);
            }
        }
        self.buckets[index].rules[way] = rule;
        self.entries[at] = version;
        Look::Hit(rule)
    }

    /// Notes the rule of a flow, as of `version`.
    #[inline]
    pub(super) fn insert(&mut self, side: &Side, hash: u32, row: &[u64], version: u64, rule: u32) {
        let (tag, index) = (hash.max(1), self.bucket(hash));
        let bucket = &self.buckets[index];
        let (mut same, mut free) = (0u32, 0u32);
        for (way, other) in bucket.tags.iter().enumerate() {
            same |= u32::from(*other == tag) << way;
            free |= u32::from(*other == 0) << way;
        }
        // What has the tag is the flow itself, or another that it hardly ever meets.
        let way = if same != 0 {
            same.trailing_zeros() as usize
        } else if free != 0 {
            free.trailing_zeros() as usize
        } else {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.random as usize % WAYS
        };
        let entry = index * WAYS + way;
        let at = entry * self.stride;
        self.entries[at] = version;
        self.entries[at + 1..at + 1 + row.len()].copy_from_slice(row);
        let bucket = &mut self.buckets[index];
        bucket.tags[way] = tag;
        bucket.rules[way] = rule;
        for i in 0..TRACKED {
            if let Some(table) = self.tracked[i].and_then(|tracked| side.table(tracked.table)) {
                let hash = table.hash(&side.secret, row);
                self.name(side, hash, entry as u32);
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

    /// Notes that an entry's key has this hash in a tracked table.
    fn name(&mut self, side: &Side, hash: u32, entry: u32) {
        let place = hash as usize & (self.names.len() - 1);
        let (word, bit) = self.filter_bit(hash);
        self.filter[word] |= bit;
        let names = &mut self.names[place].0;
        if let Some(name) = names.iter_mut().find(|name| **name == 0 || **name == entry + 1) {
            self.named += usize::from(*name == 0);
            *name = entry + 1;
        } else {
            self.name_instead(side, place, entry);
        }
    }

    /// Takes the place of a name that is out of date.
    #[cold]
    fn name_instead(&mut self, side: &Side, place: usize, entry: u32) {
        if self.names[place].0[0] == MANY {
            return;
        }
        for i in 0..NAMES {
            let other = (self.names[place].0[i] - 1) as usize;
            let at = other * self.stride;
            let key = &self.entries[at + 1..at + 1 + self.width];
            let here = |tracked: &Tracked| {
                let table = side.table(tracked.table);
                table.is_some_and(|table| table.hash(&side.secret, key) as usize & (self.names.len() - 1) == place)
            };
            if self.buckets[other / WAYS].tags[other % WAYS] == 0 || !self.tracked.iter().flatten().any(here) {
                self.names[place].0[i] = entry + 1;
                return;
            }
        }
        self.names[place].0[0] = MANY;
    }

    /// A rule was added.
    pub(super) fn added(&mut self, side: &Side, slab: Records<'_>, version: u64, added: Added) {
        let Some(table) = side.table(added.table) else {
            // It has another number by now.
            self.flush();
            return;
        };
        if self.many_grow(version) {
            for tracked in std::mem::take(&mut self.tracked).into_iter().flatten() {
                self.doubt(tracked.table, version);
            }
            self.doubt(added.table, version);
            return;
        }
        if !self.is_tracked(added.table) {
            self.track(added.table, version);
            self.doubt(added.table, version);
            return;
        }
        for tracked in self.tracked.iter_mut().flatten().filter(|tracked| tracked.table == added.table) {
            tracked.last = version;
        }
        if self.named > 2 * self.names.len() {
            // Most of it is about flows that have left the cache. All that are tracked begin anew.
            self.clear_names();
            for table in self.tracked.map(|tracked| tracked.map(|tracked| tracked.table)).into_iter().flatten() {
                self.doubt(table, version);
            }
            return;
        }
        let (word, bit) = self.filter_bit(added.hash);
        if self.filter[word] & bit == 0 {
            return;
        }
        let names = self.names[added.hash as usize & (self.names.len() - 1)].0;
        if names[0] == MANY {
            self.doubt(added.table, version);
            return;
        }
        for entry in names.into_iter().take_while(|name| *name != 0).map(|name| name - 1) {
            self.check_one((side, table), slab, version, entry, added.hash);
        }
    }

    /// Whether rules are being added to so many tables that to follow some of them saves nothing.
    fn many_grow(&self, version: u64) -> bool {
        let (table, since) = self.doubtful[FEW];
        table != u32::MAX && version - since <= QUIET
    }

    /// Follows a table's additions, if there is a place for it.
    fn track(&mut self, table: u32, version: u64) {
        let tracked = Tracked { table, last: version };
        if let Some(place) =
            self.tracked.iter_mut().find(|place| place.is_none_or(|other| version - other.last > QUIET))
        {
            *place = Some(tracked);
        }
    }

    fn doubt(&mut self, table: u32, version: u64) {
        if self.doubts.len() <= table as usize {
            self.doubts.resize(table as usize + 1, Doubt::default());
        }
        self.doubts[table as usize].since = version;
        let known = self.doubtful.iter().position(|(other, _)| *other == table);
        let known = known.unwrap_or(FEW);
        self.doubtful[..=known].rotate_right(1);
        self.doubtful[0] = (table, version);
    }

    /// Looks for a better rule for one entry in one table, if its key has this hash there.
    fn check_one(
        &mut self,
        (side, table): (&Side, &TableView),
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
        if table.hash(&side.secret, key) != hash {
            return;
        }
        self.stats.checked += 1;
        let rule = self.buckets[index].rules[way];
        let better = table.find(slab, version, hash, key);
        // Not replaced: the entry is as old as it was for the other tables, and the new rule is younger than that.
        if better_of(slab, rule, better) != rule {
            self.buckets[index].tags[way] = 0;
        }
    }
}

/// The rule that goes first.
fn better_of(slab: Records<'_>, rule: u32, other: Option<u32>) -> u32 {
    match other {
        Some(other) if rule == NONE || slab.record(other).order() < slab.record(rule).order() => other,
        _ => rule,
    }
}
