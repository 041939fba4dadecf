mod change;
mod limbo;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use wirepath_pmd::flow::Rule;

use super::log::{Added, Log};
use super::lookup::Pin;
use super::masks::Masks;
use super::records::{Installed, Slab};
use super::slots::MAX_VALUE;
use super::view::{Engine, side};
use super::words::Pattern;
use super::{Program, RuleLookup, RuleTableError};
use crate::epoch::{Domain, Shared};
use crate::wheel::{TimerId, TimerWheel};

pub use change::Change;
use limbo::Limbo;
pub(super) use limbo::Token;

/// The name of a rule in a [`RuleTable`]; never given to another rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(u64);

impl RuleId {
    /// What has this number, if anything has.
    pub fn of_number(number: u64) -> Self {
        Self(number)
    }

    /// As a number, for people and other programs.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Bounds of a [`RuleTable`].
#[derive(Clone, Copy, Debug)]
pub struct RuleLimits {
    /// Rules of both directions together.
    pub rules: usize,
    /// Different masks among the rules of one direction, 4096 at most. A mask is the set of all bits that a rule compares; each costs a
    /// look into another table for every packet of a flow that is not in the cache.
    pub masks: usize,
    /// Rules with one and the same pattern.
    pub alike: usize,
    /// Rules that are gone while a worker that does not move on may still see them; if there are more rules than that, as many as
    /// there are. Further changes are refused.
    pub passing: usize,
    /// Flows that the cache of each worker and direction has room for; 88 bytes each. Takes memory only as flows come.
    pub flows: usize,
}

impl Default for RuleLimits {
    /// Four million rules, 128 masks, 64 rules of one pattern, 131 072 rules that pass, 131 072 flows.
    fn default() -> Self {
        Self { rules: 4 << 20, masks: 128, alike: 64, passing: 1 << 17, flows: 1 << 17 }
    }
}

/// When a rule goes by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Timeouts {
    /// Seconds without a packet; 0: never.
    pub idle: u32,
    /// Seconds after it was added; 0: never.
    pub hard: u32,
}

impl Timeouts {
    /// The rule stays until it is removed.
    pub const NONE: Self = Self { idle: 0, hard: 0 };
}

/// What a rule has counted, over all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RuleCounters {
    /// Packets that met the rule.
    pub packets: u64,
    /// Bytes of these packets as they were when they met it (or its action `count`), a tag beside the frame included, without FCS.
    pub bytes: u64,
    /// Nanoseconds (of [`crate::Context::now`]) of the last one; 0: none.
    pub last_hit: u64,
}

impl RuleCounters {
    fn and(self, other: Self) -> Self {
        Self {
            packets: self.packets + other.packets,
            bytes: self.bytes + other.bytes,
            last_hit: self.last_hit.max(other.last_hit),
        }
    }
}

/// Why a rule is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// [`RuleTable::remove`].
    Removed,
    /// [`Timeouts::idle`].
    Idle,
    /// [`Timeouts::hard`].
    Hard,
}

/// A rule that is gone for good: no worker will meet it any more.
#[derive(Clone, Debug)]
pub struct Gone {
    /// Its id.
    pub id: RuleId,
    /// The rule.
    pub rule: Arc<Rule>,
    /// Why.
    pub why: Why,
    /// All that it has ever counted.
    pub counters: RuleCounters,
}

/// The rules, as the control thread has them.
///
/// Memory: [`Self::bytes_per_rule`] beside the rule itself.
#[derive(Debug)]
pub struct RuleTable {
    domain: Domain,
    engine: Arc<Engine>,
    limits: RuleLimits,
    slab: Slab,
    /// Records without a rule.
    free: Vec<u32>,
    masks: Masks,
    /// By a tree: a larger one takes no copy.
    rules: BTreeMap<RuleId, Box<Entry>>,
    /// What rules that were put in the place of others have from these.
    carried: HashMap<RuleId, Carried>,
    next: u64,
    wheel: TimerWheel<RuleId>,
    /// Nanoseconds.
    now: u64,
    limbo: Limbo,
    /// Records of rules that were taken out, as long as workers may still count for them.
    leaving: HashMap<RuleId, u32>,
    gone: BTreeMap<RuleId, Gone>,
}

#[derive(Debug)]
struct Entry {
    rule: Arc<Rule>,
    linked: Linked,
    /// Order among those of its priority.
    sequence: u64,
    timeouts: Timeouts,
    added: u64,
    timer: Option<TimerId>,
}

/// Where a record is.
#[derive(Clone, Debug)]
struct Linked {
    record: u32,
    table: u32,
    key: Box<[u64]>,
}

#[derive(Debug, Default)]
struct Carried {
    counters: RuleCounters,
    /// Records that workers may still count for.
    records: Vec<u32>,
}

const SECOND: u64 = 1_000_000_000;

impl RuleTable {
    /// Without rules; `now` in nanoseconds of [`crate::Context::now`].
    pub fn new(domain: &Domain, limits: RuleLimits, now: u64) -> Self {
        /// Additions that a worker may be behind before it forgets its cache.
        const NOTES: usize = 1 << 16;
        let limits =
            RuleLimits { rules: limits.rules.min(MAX_VALUE as usize / 2), masks: limits.masks.min(4096), ..limits };
        let mut masks = Masks::new();
        let engine = Engine {
            log: Log::new(NOTES),
            view: Shared::new(domain, masks.all()),
            slab: Shared::new(domain, Slab::default()),
        };
        Self {
            domain: domain.clone(),
            engine: Arc::new(engine),
            limits,
            slab: Slab::default(),
            free: Vec::new(),
            masks,
            rules: BTreeMap::new(),
            carried: HashMap::new(),
            next: 0,
            wheel: TimerWheel::new(now / SECOND),
            now,
            limbo: Limbo::default(),
            leaving: HashMap::new(),
            gone: BTreeMap::new(),
        }
    }

    /// What one more worker needs to look rules up at ingress and at egress. Both see a change at the same packet.
    pub fn lookups(&mut self) -> (RuleLookup, RuleLookup) {
        use wirepath_pmd::flow::Direction::{Egress, Ingress};
        let worker = self.slab.workers();
        self.slab.add_worker();
        self.engine.slab.replace(self.slab.clone());
        let pin = Arc::new(Pin::new());
        let lookup = |direction| {
            RuleLookup::new(Arc::clone(&self.engine), direction, worker, Arc::clone(&pin), self.limits.flows)
        };
        (lookup(Ingress), lookup(Egress))
    }

    /// Adds a rule, behind those of its priority that are there.
    pub fn add(&mut self, rule: Rule, timeouts: Timeouts) -> Result<RuleId, RuleTableError> {
        self.change(|change| change.add(rule, timeouts))
    }

    /// Removes a rule. What it counted at last is reported by [`Self::age`].
    pub fn remove(&mut self, id: RuleId) -> Result<(), RuleTableError> {
        self.change(|change| change.remove(id))
    }

    /// Puts a rule of the same direction in the place of another; it has its id, and if the priority is the same its place in the order.
    /// Its counters and timeouts go on.
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> Result<(), RuleTableError> {
        self.change(|change| change.replace(id, rule))
    }

    /// Several changes that take effect at one moment: every packet is treated by the rules as they were before all of them, or as
    /// they are after, at ingress and egress. If `f` fails or panics, nothing has changed.
    pub fn change<R>(
        &mut self,
        f: impl FnOnce(&mut Change<'_>) -> Result<R, RuleTableError>,
    ) -> Result<R, RuleTableError> {
        self.make_room()?;
        let version = self.engine.log.version() + 1;
        let mut change = Change::new(self, version);
        let result = f(&mut change);
        if result.is_ok() {
            change.commit();
        }
        drop(change);
        // Many at a time: each time costs every worker two cache lines.
        const FEW: usize = 64;
        if self.limbo.len() >= FEW {
            self.reap();
        }
        result
    }

    /// The record of a rule: what packets name that have met it in a device.
    pub(super) fn record(&self, id: RuleId) -> Option<u32> {
        self.rules.get(&id).map(|entry| entry.linked.record)
    }

    /// A rule, to be kept.
    pub(super) fn shared(&self, id: RuleId) -> Option<Arc<Rule>> {
        self.rules.get(&id).map(|entry| Arc::clone(&entry.rule))
    }

    /// What workers give as transmit metadata instead of running the actions of a rule at egress; 0: they run them.
    pub(super) fn mark_egress(&self, record: u32, number: u32) {
        self.slab.record(record).mark_egress(number);
    }

    /// A rule.
    pub fn get(&self, id: RuleId) -> Option<&Rule> {
        self.rules.get(&id).map(|entry| &*entry.rule)
    }

    /// What a rule has counted until now.
    pub fn counters(&self, id: RuleId) -> Option<RuleCounters> {
        Some(self.sum(id, self.rules.get(&id)?.linked.record))
    }

    /// The same of one that was taken out, until [`Self::age`] tells of it.
    pub(super) fn last_counters(&self, id: RuleId) -> Option<RuleCounters> {
        let gone = || self.gone.get(&id).map(|gone| gone.counters);
        self.leaving.get(&id).map(|record| self.sum(id, *record)).or_else(gone)
    }

    fn sum(&self, id: RuleId, record: u32) -> RuleCounters {
        let mut sum = self.counted(record);
        if let Some(carried) = self.carried.get(&id) {
            sum = sum.and(carried.counters);
            sum = carried.records.iter().fold(sum, |sum, record| sum.and(self.counted(*record)));
        }
        sum
    }

    fn counted(&self, record: u32) -> RuleCounters {
        self.slab.counts(record).fold(RuleCounters::default(), |sum, count| {
            sum.and(RuleCounters {
                packets: count.packets.get(),
                bytes: count.bytes.get(),
                last_hit: count.last_hit.get(),
            })
        })
    }

    /// All rules, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (RuleId, &Rule)> {
        self.rules.iter().map(|(id, entry)| (*id, &*entry.rule))
    }

    /// Number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there is no rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The bounds.
    pub fn limits(&self) -> RuleLimits {
        self.limits
    }

    /// Masks in use at ingress and at egress.
    pub fn masks(&self) -> [usize; 2] {
        [self.masks.len(0), self.masks.len(1)]
    }

    /// Records that there are, used or not.
    #[cfg(test)]
    pub(super) fn records(&self) -> usize {
        self.slab.len()
    }

    /// Bytes that a rule takes beside the [`Rule`] itself, of as many rules as there are now: tables, records, counters, lists.
    pub fn bytes_per_rule(&self) -> usize {
        let lists = size_of::<(RuleId, Box<Entry>)>() + size_of::<Entry>();
        self.slab.bytes_per_rule() + lists + self.masks.bytes() / self.rules.len().max(1)
    }

    /// To be called about once a second: removes what has outlived its [`Timeouts`], frees what no worker sees any more, and reports
    /// every rule that is gone since the last call. `now` in nanoseconds of [`crate::Context::now`].
    pub fn age(&mut self, now: u64, gone: impl FnMut(Gone)) {
        self.now = self.now.max(now);
        self.domain.collect();
        // Else their time comes with a later call.
        if self.make_room().is_ok() {
            self.expire();
        }
        self.reap();
        if self.masks.tidy() {
            self.publish_view();
        }
        std::mem::take(&mut self.gone).into_values().for_each(gone);
    }

    fn expire(&mut self) {
        let mut due = Vec::new();
        self.wheel.advance(self.now / SECOND, |_, id| due.push(id));
        let mut over = Vec::new();
        for id in due {
            match self.is_over(id) {
                Some(why) => over.push((id, why)),
                None => self.arm(id),
            }
        }
        if !over.is_empty() {
            // Every one of them is there, and there is room.
            let _ = self.change(|change| over.into_iter().try_for_each(|(id, why)| change.take(id, why)));
        }
    }

    /// Whether a rule's time is over.
    fn is_over(&self, id: RuleId) -> Option<Why> {
        let entry = self.rules.get(&id)?;
        let since = |at: u64, limit: u32| limit > 0 && self.now.saturating_sub(at) / SECOND >= u64::from(limit);
        if since(entry.added, entry.timeouts.hard) {
            return Some(Why::Hard);
        }
        let seen = self.counters(id)?.last_hit.max(entry.added);
        since(seen, entry.timeouts.idle).then_some(Why::Idle)
    }

    /// Sets the timer for the next moment at which a rule's time might be over.
    fn arm(&mut self, id: RuleId) {
        let Some(seen) = self.counters(id).map(|counters| counters.last_hit) else { return };
        let Some(entry) = self.rules.get_mut(&id) else { return };
        let due = |at: u64, limit: u32| (limit > 0).then(|| (at + u64::from(limit) * SECOND).div_ceil(SECOND));
        let idle = due(seen.max(entry.added), entry.timeouts.idle);
        let next = idle.into_iter().chain(due(entry.added, entry.timeouts.hard)).min();
        entry.timer = next.map(|due| self.wheel.arm(due, id));
    }

    fn publish_view(&mut self) {
        if let Some(view) = self.masks.view() {
            self.engine.view.replace(view);
        }
    }

    /// Takes a record for a rule and puts it where workers of `version` will find it.
    fn link(
        &mut self,
        id: RuleId,
        rule: &Arc<Rule>,
        sequence: u64,
        version: u64,
    ) -> Result<(Linked, Added), RuleTableError> {
        let pattern = Pattern::of(&rule.fields());
        let table = self.masks.number(side(rule.direction()), &pattern.mask, self.limits.masks)?;
        if self.free.is_empty() {
            let first = self.slab.len() as u32;
            self.slab.grow(&self.domain);
            self.engine.slab.replace(self.slab.clone());
            self.free.extend((first..self.slab.len() as u32).rev());
        }
        let record = *self.free.last().expect("just made");
        let installed = Installed { id, rule: Arc::clone(rule), program: Program::compile(rule), record };
        let old = self.slab.record(record).begin(installed, version, rule.priority(), sequence);
        self.limbo.garbage.push(old);
        match self.masks.link(&self.slab, table, &pattern.value, record, self.limits.alike) {
            Ok(hash) => {
                self.free.pop();
                Ok((Linked { record, table, key: pattern.value }, Added { table, hash }))
            }
            Err(error) => {
                // Not linked anywhere: nobody can find it.
                self.limbo.garbage.push(self.slab.record(record).end());
                Err(error)
            }
        }
    }
}
