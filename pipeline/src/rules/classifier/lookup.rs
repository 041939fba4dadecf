use std::sync::Arc;

use wirepath_flow::{Direction, Rule};
use wirepath_packet::{BATCH, Packet};
use wirepath_wire::Parsed;

use super::flow_cache::{CacheLookup, FlowCache, FlowCacheStats};
use super::hash_seed::HashSeed;
use super::match_key::WORDS;
use super::records::{InstalledRule, NO_RECORD, Records, WorkerCounters};
use super::view::{DirectionView, Engine, direction_index, first_valid};
use crate::epoch::Guard;
use crate::rules::actions::frame_len;
use crate::rules::{Program, RuleId};
use crate::sync::{AtomicU64, Ordering};
use crate::table::prefetch;

/// The rule that a packet matched.
#[derive(Clone, Copy, Debug)]
pub struct Hit<'g> {
    installed: &'g InstalledRule,
    count: &'g WorkerCounters,
}

impl<'g> Hit<'g> {
    /// Returns the id of the rule.
    pub fn id(self) -> RuleId {
        self.installed.id
    }

    /// Returns the rule.
    pub fn rule(self) -> &'g Rule {
        &self.installed.rule
    }

    /// Returns the actions of the rule, compiled.
    #[inline]
    pub fn program(self) -> &'g Program {
        &self.installed.program
    }

    /// Counts a packet of this length in bytes, as the action `count` does. Rules without that action are
    /// counted by the lookup.
    #[inline]
    pub fn count(self, bytes: usize) {
        self.count.packets.add(1);
        self.count.bytes.add(bytes as u64);
    }
}

/// The version of the rules that both directions of a worker use in one iteration. A packet sees one version
/// on its whole path.
#[derive(Debug)]
pub(crate) struct EpochPin {
    turn: AtomicU64,
    version: AtomicU64,
}

impl EpochPin {
    pub(crate) fn new() -> Self {
        Self { turn: AtomicU64::new(u64::MAX), version: AtomicU64::new(0) }
    }

    /// Returns the pinned version, and pins the present one on the first call of an iteration. Only one
    /// worker calls this; the atomics only make the type `Sync`.
    #[inline(always)]
    fn version(&self, turn: u64, present: impl FnOnce() -> u64) -> u64 {
        if self.turn.load(Ordering::Relaxed) == turn {
            return self.version.load(Ordering::Relaxed);
        }
        let version = present();
        self.version.store(version, Ordering::Relaxed);
        self.turn.store(turn, Ordering::Relaxed);
        version
    }
}

/// Finds rules of one direction for one worker.
#[derive(Debug)]
pub struct RuleLookup {
    lookup: Lookup,
    buffers: LookupBuffers,
}

/// A [`RuleLookup`] without buffers. All lookups of a worker can share them.
#[derive(Debug)]
pub(crate) struct Lookup {
    engine: Arc<Engine>,
    direction: Direction,
    worker: usize,
    pin: Arc<EpochPin>,
    cache: FlowCache,
    /// Seed of the hashes in the cache.
    seed: HashSeed,
    /// Version up to which the cache is valid.
    cache_version: u64,
    /// Id of the key layout that the keys in the cache use.
    layout: u64,
}

/// Buffers of one batch.
#[derive(Debug)]
pub(crate) struct LookupBuffers(Box<Scratch>);

#[derive(Debug)]
struct Scratch {
    rows: [u64; BATCH * WORDS],
    hashes: [u32; BATCH],
    candidates: [u32; BATCH],
    rules: [u32; BATCH],
    misses: [u8; BATCH],
    /// Hash products of the packets in `misses`.
    products: Vec<[u64; BATCH]>,
    pending: PendingKeys,
    /// Packets (indices as in `products`) and the first record that each found in a table; at most
    /// [`MATCHES`].
    matches: Vec<(u8, u32)>,
}

/// Keys that passed the filter of a table and are still to be searched there.
#[derive(Debug)]
struct PendingKeys {
    /// Packets (indices as in `products`) and their hashes.
    which: Box<[u8; MATCHES]>,
    hashes: Box<[u32; MATCHES]>,
    len: usize,
    /// Index of each table, and the end of its keys.
    groups: Vec<(usize, usize)>,
}

/// Maximum number of keys between prefetch and search, and of records between prefetch and use.
const MATCHES: usize = 4 * BATCH;

/// Marks a packet without a cache entry.
const NO_ENTRY: u32 = u32::MAX;

impl LookupBuffers {
    pub(crate) fn new() -> Self {
        Self(Box::new(Scratch {
            rows: [0; BATCH * WORDS],
            hashes: [0; BATCH],
            candidates: [NO_ENTRY; BATCH],
            rules: [NO_RECORD; BATCH],
            misses: [0; BATCH],
            products: Vec::new(),
            pending: PendingKeys {
                which: Box::new([0; MATCHES]),
                hashes: Box::new([0; MATCHES]),
                len: 0,
                groups: Vec::with_capacity(MATCHES),
            },
            matches: Vec::with_capacity(MATCHES),
        }))
    }
}

impl RuleLookup {
    pub(crate) fn new(lookup: Lookup) -> Self {
        Self { lookup, buffers: LookupBuffers::new() }
    }

    /// Returns the direction of the rules.
    pub fn direction(&self) -> Direction {
        self.lookup.direction
    }

    /// Pins the version of the rules for this iteration of the worker, as the first [`Self::find`] of the
    /// iteration would.
    #[inline(always)]
    pub(crate) fn pin(&self, guard: Guard<'_>) {
        self.lookup.pin.version(guard.quiescent_count(), || self.lookup.engine.log.version());
    }

    /// Returns true if a rule may be found. Must be called after [`Self::pin`].
    #[inline(always)]
    pub(crate) fn has_rules(&self, guard: Guard<'_>) -> bool {
        // A table is published before the version in which its first rule is valid, and removed when no
        // worker can see its last rule.
        let Lookup { engine, direction, .. } = &self.lookup;
        !engine.view.read(guard).directions[direction_index(*direction)].tables.is_empty()
    }

    /// Finds the rule of each packet: `found[i]` is the rule that packet *i* matches, or `None`. Each packet
    /// is counted for its rule, unless the rule has the action `count` ([`Hit::count`]). `parsed[i]` is the
    /// parser's result for packet *i*; `now` is [`crate::Context::now`].
    ///
    /// Between two quiescent states of the guard's reader, all calls use one version of the rules. Changes
    /// are visible from the next iteration on.
    ///
    /// # Panics
    /// Panics if the slices differ in length or are longer than a batch, or if the guard belongs to another
    /// domain than the table.
    #[inline]
    pub fn find<'g>(
        &'g mut self,
        guard: Guard<'g>,
        now: u64,
        packets: &[Packet],
        parsed: &[Parsed],
        found: &mut [Option<Hit<'g>>],
    ) {
        self.lookup.find(&mut self.buffers, guard, now, packets, parsed, found);
    }

    /// Returns the rule of a record that the tag of a packet refers to. The packet matched it in a NIC. Does
    /// not count the packet.
    pub(crate) fn hit_of_record<'g>(&'g self, guard: Guard<'g>, now: u64, record: u32) -> Option<Hit<'g>> {
        let slab = Records::read(&self.lookup.engine.slab, guard);
        let installed = slab.record(record).installed().read(guard).as_ref()?;
        let count = slab.count(self.lookup.worker, record);
        count.last_hit.set(now);
        Some(Hit { installed, count })
    }

    /// Returns the transmit metadata that selects the rule's actions in a NIC at egress; 0: the worker runs
    /// the actions.
    pub(crate) fn tx_metadata(&self, guard: Guard<'_>, hit: Hit<'_>) -> u32 {
        Records::read(&self.lookup.engine.slab, guard).record(hit.installed.record).tx_metadata()
    }

    /// Returns the statistics of the cache.
    pub fn stats(&self) -> FlowCacheStats {
        self.lookup.cache.stats
    }
}

impl Lookup {
    pub(crate) fn new(
        engine: Arc<Engine>,
        direction: Direction,
        worker: usize,
        pin: Arc<EpochPin>,
        flows: usize,
    ) -> Self {
        let (cache, seed) = (FlowCache::new(flows), HashSeed::new());
        Self { engine, direction, worker, pin, cache, seed, cache_version: 0, layout: 0 }
    }

    /// Finds the rule of each packet, as [`RuleLookup::find`] does.
    pub(crate) fn find<'g>(
        &'g mut self,
        buffers: &mut LookupBuffers,
        guard: Guard<'g>,
        now: u64,
        packets: &[Packet],
        parsed: &[Parsed],
        found: &mut [Option<Hit<'g>>],
    ) {
        let count = packets.len();
        assert!(count <= BATCH && count == parsed.len() && count == found.len());
        let engine = &*self.engine;
        // The version must be read first; see [`Engine`].
        let version = self.pin.version(guard.quiescent_count(), || engine.log.version());
        let slab = Records::read(&engine.slab, guard);
        let rules = &engine.view.read(guard).directions[direction_index(self.direction)];
        if rules.layout.id != self.layout {
            self.layout = rules.layout.id;
            self.cache.reset(rules.layout.words.len());
            self.cache_version = version;
        } else if version != self.cache_version {
            let cache = &mut self.cache;
            let read = engine.log.read(self.cache_version, version, |added| {
                if added.table as usize % 2 == direction_index(self.direction) {
                    cache.added(rules, slab, version, added);
                }
            });
            if read.is_err() {
                cache.flush();
            }
            self.cache_version = version;
        }
        if rules.tables.is_empty() {
            found.fill(None);
            return;
        }
        let scratch = &mut *buffers.0;
        rules.layout.extract(self.direction, packets, parsed, &mut scratch.rows);
        let misses = scratch.look_up_cache(&mut self.cache, &self.seed, rules, slab, version, self.worker, count);
        if misses > 0 {
            scratch.search_tables(rules, slab, version, misses);
            let width = rules.layout.words.len();
            for &i in &scratch.misses[..misses] {
                let i = usize::from(i);
                let row = &scratch.rows[i * width..(i + 1) * width];
                let rule = scratch.rules[i];
                if rule != NO_RECORD {
                    prefetch(slab.count(self.worker, rule));
                    slab.record(rule).installed().prefetch();
                }
                self.cache.insert(rules, scratch.hashes[i], row, version, rule);
            }
            self.cache.stats.misses += misses as u64;
        }
        self.cache.stats.hits += (count - misses) as u64;
        for ((packet, &rule), found) in packets.iter().zip(&scratch.rules).zip(found) {
            *found = None;
            if rule == NO_RECORD {
                continue;
            }
            let record = slab.record(rule);
            // Every valid record contains a rule.
            let Some(installed) = record.installed().read(guard) else { continue };
            // The caller reads the rule next.
            prefetch(installed);
            let count = slab.count(self.worker, rule);
            let hit = Hit { installed, count };
            if !record.has_count_action() {
                hit.count(frame_len(packet));
            }
            count.last_hit.set(now);
            *found = Some(hit);
        }
    }
}

impl Scratch {
    /// Looks all packets up in the cache. Fills `rules` for the hits and `misses` for the others. Each step
    /// runs over the whole batch, so that the memory accesses of the next step overlap.
    #[expect(clippy::too_many_arguments, reason = "parts of the lookup, borrowed one by one")]
    fn look_up_cache(
        &mut self,
        cache: &mut FlowCache,
        seed: &HashSeed,
        rules: &DirectionView,
        slab: Records<'_>,
        version: u64,
        worker: usize,
        count: usize,
    ) -> usize {
        let width = rules.layout.words.len();
        let rows = &self.rows[..count * width];
        for (row, hash) in rows.chunks_exact(width).zip(&mut self.hashes) {
            *hash = seed.hash_row(row);
            cache.prefetch_bucket(*hash);
        }
        for (hash, candidate) in self.hashes[..count].iter().zip(&mut self.candidates) {
            *candidate = NO_ENTRY;
            if let Some((entry, rule)) = cache.candidate(*hash) {
                *candidate = entry;
                if rule != NO_RECORD {
                    prefetch(slab.record(rule));
                    prefetch(slab.count(worker, rule));
                }
            }
        }
        let mut misses = 0;
        for (i, row) in rows.chunks_exact(width).enumerate() {
            let candidate = self.candidates[i];
            let look = if candidate == NO_ENTRY {
                CacheLookup::Miss
            } else {
                cache.check(rules, slab, version, candidate, row)
            };
            match look {
                CacheLookup::Hit(rule) => self.rules[i] = rule,
                CacheLookup::Miss => {
                    self.misses[misses] = i as u8;
                    misses += 1;
                }
            }
        }
        misses
    }

    /// Runs the tuple-space search for the first `misses` packets of the list. Each table is searched for all
    /// packets that can still find a better rule there.
    fn search_tables(&mut self, rules: &DirectionView, slab: Records<'_>, version: u64, misses: usize) {
        let width = rules.layout.words.len();
        let Self { rows, misses: which, products, pending, matches, rules: out, .. } = self;
        let (rows, which) = (&rows[..], &which[..misses]);
        if products.len() < rules.products.len() {
            // The vector grows only when masks are added.
            products.resize(rules.products.len(), [0; BATCH]);
        }
        rules.fill_products(rows, width, which, products);
        let (mut found, mut orders) = ([NO_RECORD; BATCH], [u128::MAX; BATCH]);
        let mut active: [u8; BATCH] = std::array::from_fn(|j| j as u8);
        let (mut left, mut priority) = (misses, 0);
        // Records are used some time after they were found, when their cache lines have arrived.
        let settle = |matches: &mut Vec<(u8, u32)>, orders: &mut [u128; BATCH], found: &mut [u32; BATCH]| {
            for (j, head) in matches.drain(..) {
                let Some(rule) = first_valid(slab, version, head) else { continue };
                let (order, j) = (slab.record(rule).order(), usize::from(j));
                if order < orders[j] {
                    (orders[j], found[j]) = (order, rule);
                }
            }
        };
        // Likewise, keys are searched some tables after their prefetch.
        let look = |pending: &mut PendingKeys, matches: &mut Vec<(u8, u32)>| {
            let mut start = 0;
            for (table, end) in pending.groups.drain(..) {
                let keys = (&pending.which[start..end], &pending.hashes[start..end]);
                rules.tables[table].find_batch((rows, width, which), keys, |j, head| {
                    prefetch(slab.record(head));
                    matches.push((j, head));
                });
                start = end;
            }
            pending.len = 0;
        };
        for (at, table) in rules.tables.iter().enumerate() {
            if table.priority != priority {
                priority = table.priority;
                look(pending, matches);
                settle(matches, &mut orders, &mut found);
                // A rule of a lower priority number comes before all rules of this table and of the following
                // ones.
                let bound = u128::from(priority) << 64;
                let mut kept = 0;
                for at in 0..left {
                    let j = active[at];
                    active[kept] = j;
                    kept += usize::from(orders[usize::from(j)] >= bound);
                }
                left = kept;
                if left == 0 {
                    break;
                }
            }
            if pending.len + left > MATCHES {
                look(pending, matches);
                settle(matches, &mut orders, &mut found);
            }
            let start = pending.len;
            let room = (&mut pending.which[start..], &mut pending.hashes[start..]);
            pending.len += table.hash_batch(&rules.seed, products, &active[..left], room);
            if pending.len > start {
                table.prefetch(&pending.hashes[start..pending.len]);
                pending.groups.push((at, pending.len));
            }
        }
        look(pending, matches);
        settle(matches, &mut orders, &mut found);
        for (&i, &rule) in which.iter().zip(&found) {
            out[usize::from(i)] = rule;
        }
    }
}
