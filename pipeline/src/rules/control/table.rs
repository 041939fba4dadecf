mod change;
mod reclaim;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use wirepath_flow::Rule;

use super::change_log::{Added, ChangeLog};
use crate::epoch::{Domain, Shared};
use crate::rules::classifier::hash_table::MAX_VALUE;
use crate::rules::classifier::lookup::EpochPin;
use crate::rules::classifier::match_key::Pattern;
use crate::rules::classifier::records::{InstalledRule, Slab};
use crate::rules::classifier::tuple_space::TupleSpace;
use crate::rules::classifier::view::{Engine, direction_index};
use crate::rules::{Lookup, Program, RuleLookup, RuleTableError};
use crate::wheel::{TimerId, TimerWheel};

pub use change::Change;
pub(in crate::rules) use reclaim::QuiescenceToken;
use reclaim::Reclaimer;

/// Id of a rule in a [`RuleTable`]. An id is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(u64);

impl RuleId {
    /// Returns the id with this number. A rule with this id need not exist.
    pub fn of_number(number: u64) -> Self {
        Self(number)
    }

    /// Returns the id as a number, for displays and other programs.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Limits of a [`RuleTable`].
#[derive(Clone, Copy, Debug)]
pub struct RuleLimits {
    /// Rules of both directions together.
    pub rules: usize,
    /// Different masks among the rules of one direction, at most 4096. A mask is the set of all bits that a
    /// rule compares. Each mask adds a table lookup for every packet of a flow that is not in the cache.
    pub masks: usize,
    /// Rules with the same pattern.
    pub duplicates: usize,
    /// Removed rules that a stalled worker may still use. The limit is raised to the number of rules if that
    /// is larger. Further changes are refused.
    pub pending_removals: usize,
    /// Flows in the cache of each worker and direction, 88 bytes each. Memory is used only when flows arrive.
    pub flows: usize,
}

impl Default for RuleLimits {
    /// Four million rules, 128 masks, 64 rules of one pattern, 131 072 pending removals, 131 072 flows.
    fn default() -> Self {
        Self { rules: 4 << 20, masks: 128, duplicates: 64, pending_removals: 1 << 17, flows: 1 << 17 }
    }
}

/// Timeouts after which a rule is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Timeouts {
    /// Seconds without a packet; 0: never.
    pub idle: u32,
    /// Seconds since the rule was added; 0: never.
    pub hard: u32,
}

impl Timeouts {
    /// No timeout: the rule stays until it is removed.
    pub const NONE: Self = Self { idle: 0, hard: 0 };
}

/// Counters of a rule, summed over all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RuleCounters {
    /// Packets that matched the rule.
    pub packets: u64,
    /// Bytes of these packets at the time of the match (or of the action `count`). A stripped VLAN tag is
    /// included, the FCS is not.
    pub bytes: u64,
    /// Time of the last match in nanoseconds of [`crate::Context::now`]; 0: none.
    pub last_hit: u64,
}

impl RuleCounters {
    fn plus(self, other: Self) -> Self {
        Self {
            packets: self.packets + other.packets,
            bytes: self.bytes + other.bytes,
            last_hit: self.last_hit.max(other.last_hit),
        }
    }
}

/// Reason why a rule was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// [`RuleTable::remove`] was called.
    Removed,
    /// [`Timeouts::idle`] expired.
    Idle,
    /// [`Timeouts::hard`] expired.
    Hard,
}

/// A removed rule that no worker can match any more.
#[derive(Clone, Debug)]
pub struct RemovedRule {
    /// Id of the rule.
    pub id: RuleId,
    /// The rule.
    pub rule: Arc<Rule>,
    /// Reason of the removal.
    pub reason: RemovalReason,
    /// Final counters of the rule.
    pub counters: RuleCounters,
}

/// The rules, as the control thread has them.
///
/// Each rule takes [`Self::bytes_per_rule`] bytes in addition to the rule itself.
#[derive(Debug)]
pub struct RuleTable {
    domain: Domain,
    engine: Arc<Engine>,
    limits: RuleLimits,
    slab: Slab,
    /// Records without a rule.
    free: Vec<u32>,
    masks: TupleSpace,
    /// A tree, because growing it copies nothing.
    rules: BTreeMap<RuleId, Box<Entry>>,
    /// Counters that replacement rules inherited from the rules they replaced.
    carried: HashMap<RuleId, CarriedCounters>,
    next: u64,
    wheel: TimerWheel<RuleId>,
    /// Current time in nanoseconds.
    now: u64,
    reclaimer: Reclaimer,
    removed: BTreeMap<RuleId, RemovedRule>,
}

#[derive(Debug)]
struct Entry {
    rule: Arc<Rule>,
    linked: Linked,
    /// Order among rules of equal priority.
    sequence: u64,
    timeouts: Timeouts,
    added: u64,
    timer: Option<TimerId>,
}

/// Position of a record in the tables.
#[derive(Clone, Debug)]
struct Linked {
    record: u32,
    table: u32,
    key: Box<[u64]>,
}

#[derive(Debug, Default)]
struct CarriedCounters {
    counters: RuleCounters,
    /// Records that workers may still increment.
    records: Vec<u32>,
}

const SECOND: u64 = 1_000_000_000;

impl RuleTable {
    /// Creates an empty table. `now` is in nanoseconds of [`crate::Context::now`].
    pub fn new(domain: &Domain, limits: RuleLimits, now: u64) -> Self {
        // Additions that a worker may lag behind before it flushes its cache.
        let log_entries = (limits.rules / 64).next_power_of_two().clamp(64, 1 << 16);
        let limits =
            RuleLimits { rules: limits.rules.min(MAX_VALUE as usize / 2), masks: limits.masks.min(4096), ..limits };
        let (mut masks, slab) = (TupleSpace::new(), Slab::new(limits.rules));
        let engine = Engine {
            log: ChangeLog::new(log_entries),
            view: Shared::new(domain, masks.all()),
            slab: Shared::new(domain, slab.clone()),
        };
        Self {
            domain: domain.clone(),
            engine: Arc::new(engine),
            limits,
            slab,
            free: Vec::new(),
            masks,
            rules: BTreeMap::new(),
            carried: HashMap::new(),
            next: 0,
            wheel: TimerWheel::new(now / SECOND),
            now,
            reclaimer: Reclaimer::default(),
            removed: BTreeMap::new(),
        }
    }

    /// Adds a worker and returns its lookups for ingress and egress. Both see a change at the same packet.
    pub fn lookups(&mut self) -> (RuleLookup, RuleLookup) {
        use wirepath_flow::Direction::{Egress, Ingress};
        let worker = self.add_worker();
        let pin = Arc::new(EpochPin::new());
        let lookup = |direction| {
            RuleLookup::new(Lookup::new(
                Arc::clone(&self.engine),
                direction,
                worker,
                Arc::clone(&pin),
                self.limits.flows,
            ))
        };
        (lookup(Ingress), lookup(Egress))
    }

    /// Adds a worker and returns its number.
    pub(crate) fn add_worker(&mut self) -> usize {
        let worker = self.slab.workers();
        self.slab.add_worker();
        self.engine.slab.replace(self.slab.clone());
        worker
    }

    /// Returns a lookup of a worker for ingress, with a cache for this number of flows.
    pub(crate) fn ingress_lookup(&self, worker: usize, flows: usize) -> Lookup {
        let pin = Arc::new(EpochPin::new());
        Lookup::new(Arc::clone(&self.engine), wirepath_flow::Direction::Ingress, worker, pin, flows)
    }

    /// Adds a rule, ordered after the existing rules of equal priority.
    pub fn add(&mut self, rule: Rule, timeouts: Timeouts) -> Result<RuleId, RuleTableError> {
        self.change(|change| change.add(rule, timeouts))
    }

    /// Removes a rule. [`Self::age`] reports its final counters.
    pub fn remove(&mut self, id: RuleId) -> Result<(), RuleTableError> {
        self.change(|change| change.remove(id))
    }

    /// Replaces a rule by another of the same direction, which gets its id, counters and timeouts. With equal
    /// priority it also keeps its position in the order.
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> Result<(), RuleTableError> {
        self.change(|change| change.replace(id, rule))
    }

    /// Makes several changes atomically: every packet is matched against the rules before all of them or
    /// after all of them, at ingress and egress. If `f` fails or panics, nothing has changed.
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
        // Batched, because each pass costs every worker two cache lines.
        const FEW: usize = 64;
        if self.reclaimer.len() >= FEW {
            self.reap();
        }
        result
    }

    /// Returns the record of a rule. Tags of packets that matched the rule in a NIC refer to it.
    pub(in crate::rules) fn record(&self, id: RuleId) -> Option<u32> {
        self.rules.get(&id).map(|entry| entry.linked.record)
    }

    /// Returns the order of a rule among the rules of its priority.
    pub(in crate::rules) fn sequence(&self, id: RuleId) -> Option<u64> {
        self.rules.get(&id).map(|entry| entry.sequence)
    }

    /// Returns a shared reference to a rule.
    pub(in crate::rules) fn rule_arc(&self, id: RuleId) -> Option<Arc<Rule>> {
        self.rules.get(&id).map(|entry| Arc::clone(&entry.rule))
    }

    /// Sets the transmit metadata that workers give to packets instead of running the actions of an egress
    /// rule; 0: they run them.
    pub(in crate::rules) fn set_tx_metadata(&self, record: u32, number: u32) {
        self.slab.record(record).set_tx_metadata(number);
    }

    /// Returns a rule.
    pub fn get(&self, id: RuleId) -> Option<&Rule> {
        self.rules.get(&id).map(|entry| &*entry.rule)
    }

    /// Returns the counters of a rule until now.
    pub fn counters(&self, id: RuleId) -> Option<RuleCounters> {
        Some(self.sum(id, self.rules.get(&id)?.linked.record))
    }

    fn sum(&self, id: RuleId, record: u32) -> RuleCounters {
        let mut sum = self.counted(record);
        if let Some(carried) = self.carried.get(&id) {
            sum = sum.plus(carried.counters);
            sum = carried.records.iter().fold(sum, |sum, record| sum.plus(self.counted(*record)));
        }
        sum
    }

    fn counted(&self, record: u32) -> RuleCounters {
        self.slab.counts(record).fold(RuleCounters::default(), |sum, count| {
            sum.plus(RuleCounters {
                packets: count.packets.get(),
                bytes: count.bytes.get(),
                last_hit: count.last_hit.get(),
            })
        })
    }

    /// Returns all rules, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (RuleId, &Rule)> {
        self.rules.iter().map(|(id, entry)| (*id, &*entry.rule))
    }

    /// Returns the number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Returns true if the table has no rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns the limits.
    pub fn limits(&self) -> RuleLimits {
        self.limits
    }

    /// Returns the number of masks in use at ingress and at egress.
    pub fn masks(&self) -> [usize; 2] {
        [self.masks.len(0), self.masks.len(1)]
    }

    /// Returns the number of records, used or free.
    #[cfg(test)]
    pub(in crate::rules) fn records(&self) -> usize {
        self.slab.len()
    }

    /// Returns the bytes that a rule takes in addition to the [`Rule`] itself, at the current number of
    /// rules: tables, records, counters, lists.
    pub fn bytes_per_rule(&self) -> usize {
        let lists = size_of::<(RuleId, Box<Entry>)>() + size_of::<Entry>();
        self.slab.bytes_per_rule() + lists + self.masks.bytes() / self.rules.len().max(1)
    }

    /// Removes rules whose [`Timeouts`] expired, frees what no worker uses any more, and reports every rule
    /// that is gone since the last call. Should be called about once a second. `now` is in nanoseconds of
    /// [`crate::Context::now`].
    pub fn age(&mut self, now: u64, removed: impl FnMut(RemovedRule)) {
        self.now = self.now.max(now);
        self.domain.collect();
        // Otherwise they expire in a later call.
        if self.make_room().is_ok() {
            self.expire();
        }
        self.reap();
        if self.masks.gc() {
            self.publish_view();
        }
        std::mem::take(&mut self.removed).into_values().for_each(removed);
    }

    fn expire(&mut self) {
        let mut due = Vec::new();
        self.wheel.advance(self.now / SECOND, |_, id| due.push(id));
        let mut over = Vec::new();
        for id in due {
            match self.expiry(id) {
                Some(reason) => over.push((id, reason)),
                None => self.arm(id),
            }
        }
        if !over.is_empty() {
            // The change cannot fail: every rule exists, and the limit of pending removals is not reached.
            let _ = self.change(|change| over.into_iter().try_for_each(|(id, reason)| change.take(id, reason)));
        }
    }

    /// Returns the timeout that has expired for a rule.
    fn expiry(&self, id: RuleId) -> Option<RemovalReason> {
        let entry = self.rules.get(&id)?;
        let since = |at: u64, limit: u32| limit > 0 && self.now.saturating_sub(at) / SECOND >= u64::from(limit);
        if since(entry.added, entry.timeouts.hard) {
            return Some(RemovalReason::Hard);
        }
        let seen = self.counters(id)?.last_hit.max(entry.added);
        since(seen, entry.timeouts.idle).then_some(RemovalReason::Idle)
    }

    /// Sets the timer to the earliest time at which a timeout of the rule can expire.
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

    /// Takes a free record for a rule and links it where workers of `version` find it.
    fn link(
        &mut self,
        id: RuleId,
        rule: &Arc<Rule>,
        sequence: u64,
        version: u64,
    ) -> Result<(Linked, Added), RuleTableError> {
        let pattern = Pattern::of(&rule.fields());
        let table = self.masks.number(direction_index(rule.direction()), &pattern.mask, self.limits.masks)?;
        if self.free.is_empty() {
            let new = self.slab.grow(&self.domain);
            self.engine.slab.replace(self.slab.clone());
            self.free.extend(new.rev());
        }
        let record = *self.free.last().expect("just made");
        let installed = InstalledRule { id, rule: Arc::clone(rule), program: Program::compile(rule), record };
        let old = self.slab.record(record).activate(installed, version, rule.priority(), sequence);
        self.reclaimer.garbage.push(old);
        match self.masks.link(&self.slab, table, &pattern.value, record, self.limits.duplicates) {
            Ok(hash) => {
                self.free.pop();
                Ok((Linked { record, table, key: pattern.value }, Added { table, hash }))
            }
            Err(error) => {
                // The record is not linked, so no worker can find it.
                self.reclaimer.garbage.push(self.slab.record(record).clear());
                Err(error)
            }
        }
    }
}
