use std::sync::Arc;

use wirepath_pmd::flow::{Direction, Rule};
use wirepath_pmd::packet::{BATCH, Packet};
use wirepath_wire::Parsed;

use super::cache::{Cache, CacheStats, Look};
use super::hash::Secret;
use super::program::length;
use super::records::{Count, Installed, NONE, Records};
use super::view::{Engine, Side, first_there, side};
use super::words::WORDS;
use super::{Program, RuleId};
use crate::epoch::Guard;
use crate::sync::{AtomicU64, Ordering};
use crate::table::prefetch;

/// The rule that a packet meets.
#[derive(Clone, Copy, Debug)]
pub struct Hit<'g> {
    installed: &'g Installed,
    count: &'g Count,
}

impl<'g> Hit<'g> {
    /// Its id.
    pub fn id(self) -> RuleId {
        self.installed.id
    }

    /// The rule.
    pub fn rule(self) -> &'g Rule {
        &self.installed.rule
    }

    /// What it does.
    #[inline]
    pub fn program(self) -> &'g Program {
        &self.installed.program
    }

    /// Counts a packet of so many bytes: what the rule's action `count` does. Rules without that action are counted as they are found.
    #[inline]
    pub fn count(self, bytes: usize) {
        self.count.packets.add(1);
        self.count.bytes.add(bytes as u64);
    }
}

/// The version that both directions of a worker see in one turn, so that a packet meets the rules of one moment on its whole way.
#[derive(Debug)]
pub(super) struct Pin {
    turn: AtomicU64,
    version: AtomicU64,
}

impl Pin {
    pub(super) fn new() -> Self {
        Self { turn: AtomicU64::new(u64::MAX), version: AtomicU64::new(0) }
    }

    /// Only the one worker calls this: atomic for the compiler's sake.
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

/// Finds rules of one direction, for one worker.
#[derive(Debug)]
pub struct RuleLookup {
    engine: Arc<Engine>,
    direction: Direction,
    worker: usize,
    pin: Arc<Pin>,
    cache: Cache,
    /// Of the hashes in the cache.
    secret: Secret,
    /// Version up to which the cache is true.
    seen: u64,
    /// Plan that the keys in the cache follow.
    plan: u64,
    scratch: Box<Scratch>,
}

/// What belongs to one batch.
#[derive(Debug)]
struct Scratch {
    rows: [u64; BATCH * WORDS],
    hashes: [u32; BATCH],
    candidates: [u32; BATCH],
    rules: [u32; BATCH],
    misses: [u8; BATCH],
    /// Of the packets in `misses`.
    products: Vec<[u64; BATCH]>,
    asked: Asked,
    /// Packets (as `products`) and the first records that they found in the tables. Never more than [`MATCHES`].
    matches: Vec<(u8, u32)>,
}

/// Keys that tables may have, and that are still to be looked for.
#[derive(Debug)]
struct Asked {
    /// Packets (as `products`) and their hashes.
    which: Box<[u8; MATCHES]>,
    hashes: Box<[u32; MATCHES]>,
    len: usize,
    /// Index of a table, and where its keys end.
    groups: Vec<(usize, usize)>,
}

/// Keys that are asked for before they are looked for, and records that are found before they are looked at.
const MATCHES: usize = 4 * BATCH;

/// "No entry of the cache."
const NO_ENTRY: u32 = u32::MAX;

impl RuleLookup {
    pub(super) fn new(engine: Arc<Engine>, direction: Direction, worker: usize, pin: Arc<Pin>, entries: usize) -> Self {
        let scratch = Scratch {
            rows: [0; BATCH * WORDS],
            hashes: [0; BATCH],
            candidates: [NO_ENTRY; BATCH],
            rules: [NONE; BATCH],
            misses: [0; BATCH],
            products: Vec::new(),
            asked: Asked {
                which: Box::new([0; MATCHES]),
                hashes: Box::new([0; MATCHES]),
                len: 0,
                groups: Vec::with_capacity(MATCHES),
            },
            matches: Vec::with_capacity(MATCHES),
        };
        Self {
            engine,
            direction,
            worker,
            pin,
            cache: Cache::new(entries),
            secret: Secret::new(),
            seen: 0,
            plan: 0,
            scratch: Box::new(scratch),
        }
    }

    /// Which rules it finds.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Fixes the version of the rules for this turn of the worker, as the first [`Self::find`] of the turn would.
    #[inline(always)]
    pub(super) fn pin(&self, guard: Guard<'_>) {
        self.pin.version(guard.turn(), || self.engine.log.version());
    }

    /// Whether any rule might be found: one that is there, or was a moment ago. To be asked behind [`Self::pin`].
    #[inline(always)]
    pub(super) fn has_rules(&self, guard: Guard<'_>) -> bool {
        // A table comes before the version in which its first rule is there, and goes when no worker sees its last one.
        !self.engine.view.read(guard).sides[side(self.direction)].tables.is_empty()
    }

    /// The rule of each packet, in the order of the packets: `found[i]` is what packet *i* meets, `None` if no rule fits. Each packet
    /// is counted by its rule, unless the rule has the action `count` ([`Hit::count`]). `parsed[i]` is what the parser says of packet
    /// *i*; `now` is [`crate::Context::now`].
    ///
    /// Between two quiescent moments of the guard's reader, the rules are those of one moment: changes are seen from the next turn on.
    ///
    /// # Panics
    /// If the slices differ in length or are longer than a batch, or the guard is of another domain than the table.
    pub fn find<'g>(
        &'g mut self,
        guard: Guard<'g>,
        now: u64,
        packets: &[Packet],
        parsed: &[Parsed],
        found: &mut [Option<Hit<'g>>],
    ) {
        let count = packets.len();
        assert!(count <= BATCH && count == parsed.len() && count == found.len());
        let engine = &*self.engine;
        // The version first, see `Engine`.
        let version = self.pin.version(guard.turn(), || engine.log.version());
        let slab = Records::read(&engine.slab, guard);
        let rules = &engine.view.read(guard).sides[side(self.direction)];
        if rules.plan.id != self.plan {
            self.plan = rules.plan.id;
            self.cache.reset(rules.plan.words.len());
            self.seen = version;
        } else if version != self.seen {
            let cache = &mut self.cache;
            let read = engine.log.read(self.seen, version, |added| {
                if added.table as usize % 2 == side(self.direction) {
                    cache.added(rules, slab, version, added);
                }
            });
            if read.is_err() {
                cache.flush();
            }
            self.seen = version;
        }
        if rules.tables.is_empty() {
            found.fill(None);
            return;
        }
        let scratch = &mut *self.scratch;
        rules.plan.extract(self.direction, packets, parsed, &mut scratch.rows);
        let misses = scratch.look(&mut self.cache, &self.secret, rules, slab, version, self.worker, count);
        if misses > 0 {
            scratch.search(rules, slab, version, misses);
            let width = rules.plan.words.len();
            for &i in &scratch.misses[..misses] {
                let i = usize::from(i);
                let row = &scratch.rows[i * width..(i + 1) * width];
                let rule = scratch.rules[i];
                if rule != NONE {
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
            if rule == NONE {
                continue;
            }
            let record = slab.record(rule);
            // There is a rule in every record that is there.
            let Some(installed) = record.installed().read(guard) else { continue };
            // Whoever asked wants to know what it says.
            prefetch(installed);
            let count = slab.count(self.worker, rule);
            let hit = Hit { installed, count };
            if !record.counts_itself() {
                hit.count(length(packet));
            }
            count.last_hit.set(now);
            *found = Some(hit);
        }
    }

    /// The rule of a record that a packet names: one that it has met before it came here. Not counted.
    pub(super) fn met<'g>(&'g self, guard: Guard<'g>, now: u64, record: u32) -> Option<Hit<'g>> {
        let slab = Records::read(&self.engine.slab, guard);
        let installed = slab.record(record).installed().read(guard).as_ref()?;
        let count = slab.count(self.worker, record);
        count.last_hit.set(now);
        Some(Hit { installed, count })
    }

    /// What a packet at egress is told instead of being changed, where a device does that; 0: nothing.
    pub(super) fn egress_number(&self, guard: Guard<'_>, hit: Hit<'_>) -> u32 {
        Records::read(&self.engine.slab, guard).record(hit.installed.record).egress()
    }

    /// What the cache did.
    pub fn stats(&self) -> CacheStats {
        self.cache.stats
    }
}

impl Scratch {
    /// Looks for all flows in the cache: rules of those that it has, list of those that it has not. Each step is done for the whole
    /// batch, so that the memory accesses of the next one overlap.
    #[expect(clippy::too_many_arguments, reason = "parts of the lookup, borrowed one by one")]
    fn look(
        &mut self,
        cache: &mut Cache,
        secret: &Secret,
        rules: &Side,
        slab: Records<'_>,
        version: u64,
        worker: usize,
        count: usize,
    ) -> usize {
        let width = rules.plan.words.len();
        let rows = &self.rows[..count * width];
        for (row, hash) in rows.chunks_exact(width).zip(&mut self.hashes) {
            *hash = secret.hash_row(row);
            cache.prefetch_bucket(*hash);
        }
        for (hash, candidate) in self.hashes[..count].iter().zip(&mut self.candidates) {
            *candidate = NO_ENTRY;
            if let Some((entry, rule)) = cache.candidate(*hash) {
                *candidate = entry;
                if rule != NONE {
                    prefetch(slab.record(rule));
                    prefetch(slab.count(worker, rule));
                }
            }
        }
        let mut misses = 0;
        for (i, row) in rows.chunks_exact(width).enumerate() {
            let candidate = self.candidates[i];
            let look =
                if candidate == NO_ENTRY { Look::Miss } else { cache.check(rules, slab, version, candidate, row) };
            match look {
                Look::Hit(rule) => self.rules[i] = rule,
                Look::Miss => {
                    self.misses[misses] = i as u8;
                    misses += 1;
                }
            }
        }
        misses
    }

    /// Tuple space search for the first `misses` packets of the list: table after table, each for all packets that might still find a
    /// better rule there.
    fn search(&mut self, rules: &Side, slab: Records<'_>, version: u64, misses: usize) {
        let width = rules.plan.words.len();
        let Self { rows, misses: which, products, asked, matches, rules: out, .. } = self;
        let (rows, which) = (&rows[..], &which[..misses]);
        if products.len() < rules.products.len() {
            // Only when there are new masks.
            products.resize(rules.products.len(), [0; BATCH]);
        }
        rules.fill_products(rows, width, which, products);
        let (mut found, mut orders) = ([NONE; BATCH], [u128::MAX; BATCH]);
        let mut active: [u8; BATCH] = std::array::from_fn(|j| j as u8);
        let (mut left, mut priority) = (misses, 0);
        // Records are looked at some time after they were found, when their lines have come.
        let settle = |matches: &mut Vec<(u8, u32)>, orders: &mut [u128; BATCH], found: &mut [u32; BATCH]| {
            for (j, head) in matches.drain(..) {
                let Some(rule) = first_there(slab, version, head) else { continue };
                let (order, j) = (slab.record(rule).order(), usize::from(j));
                if order < orders[j] {
                    (orders[j], found[j]) = (order, rule);
                }
            }
        };
        // Likewise keys, some tables later.
        let look = |asked: &mut Asked, matches: &mut Vec<(u8, u32)>| {
            let mut start = 0;
            for (table, end) in asked.groups.drain(..) {
                let keys = (&asked.which[start..end], &asked.hashes[start..end]);
                rules.tables[table].find_batch((rows, width, which), keys, |j, head| {
                    prefetch(slab.record(head));
                    matches.push((j, head));
                });
                start = end;
            }
            asked.len = 0;
        };
        for (at, table) in rules.tables.iter().enumerate() {
            if table.priority != priority {
                priority = table.priority;
                look(asked, matches);
                settle(matches, &mut orders, &mut found);
                // Nothing here or in the tables behind goes before a rule of a lower priority.
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
            if asked.len + left > MATCHES {
                look(asked, matches);
                settle(matches, &mut orders, &mut found);
            }
            let start = asked.len;
            let room = (&mut asked.which[start..], &mut asked.hashes[start..]);
            asked.len += table.hash_batch(&rules.secret, products, &active[..left], room);
            if asked.len > start {
                table.prefetch(&asked.hashes[start..asked.len]);
                asked.groups.push((at, asked.len));
            }
        }
        look(asked, matches);
        settle(matches, &mut orders, &mut found);
        for (&i, &rule) in which.iter().zip(&found) {
            out[usize::from(i)] = rule;
        }
    }
}
