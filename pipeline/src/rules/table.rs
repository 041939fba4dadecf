use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// The name of a rule in a [`RuleTable`]; never given to another rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(u64);

impl RuleId {
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
    /// Flows that the cache of each worker and direction has room for; 88 bytes each. Takes memory only as flows come.
    pub flows: usize,
}

impl Default for RuleLimits {
    /// Four million rules, 128 masks, 64 rules of one pattern, 131 072 flows.
    fn default() -> Self {
        Self { rules: 4 << 20, masks: 128, alike: 64, flows: 1 << 17 }
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
    /// Bytes of these packets as they were when they met it (or its action `count`), without FCS.
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
    rules: HashMap<RuleId, Box<Entry>>,
    /// What rules that were put in the place of others have from these.
    carried: HashMap<RuleId, Carried>,
    next: u64,
    wheel: TimerWheel<RuleId>,
    /// Nanoseconds.
    now: u64,
    limbo: Limbo,
    gone: Vec<Gone>,
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

/// Records whose rules are gone for new versions, on their way to be used again.
///
/// A record is *dead* until no worker sees a version in which it was there; then it is taken out of its chain. It is *loose* until no
/// worker stands on it any more; then it is free.
#[derive(Default)]
struct Limbo {
    dead: Vec<Dead>,
    loose: Vec<Dead>,
    /// What records held.
    garbage: Vec<Box<dyn Send>>,
    /// The same, waiting for the workers.
    waiting: Option<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    over: Arc<AtomicBool>,
    dead: Vec<Dead>,
    loose: Vec<Dead>,
}

#[derive(Debug)]
struct Dead {
    linked: Linked,
    end: End,
}

/// Who is told of a record's last counters.
#[derive(Debug)]
enum End {
    /// It never was.
    Undone,
    /// The rule that has taken its place.
    Replaced(RuleId),
    Gone(RuleId, Arc<Rule>, Why),
}

impl fmt::Debug for Limbo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Limbo of {}", self.len())
    }
}

impl Limbo {
    fn len(&self) -> usize {
        self.dead.len() + self.loose.len() + self.garbage.len()
    }
}

/// Dropped when every worker has been through a quiescent moment.
struct Token(Arc<AtomicBool>);

impl Drop for Token {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Changes that take effect at one moment.
#[derive(Debug)]
pub struct Change<'t> {
    table: &'t mut RuleTable,
    /// Version in which they do.
    version: u64,
    added: Vec<Added>,
    done: Vec<Done>,
}

/// What is to be undone if the change fails.
#[derive(Debug)]
enum Done {
    Added(RuleId),
    Removed(RuleId, Box<Entry>, Why),
    Replaced(RuleId, Box<Entry>),
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
            rules: HashMap::new(),
            carried: HashMap::new(),
            next: 0,
            wheel: TimerWheel::new(now / SECOND),
            now,
            limbo: Limbo::default(),
            gone: Vec::new(),
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
    /// they are after, at ingress and egress. If `f` fails, nothing has changed.
    pub fn change<R>(
        &mut self,
        f: impl FnOnce(&mut Change<'_>) -> Result<R, RuleTableError>,
    ) -> Result<R, RuleTableError> {
        let version = self.engine.log.version() + 1;
        let mut change = Change { table: self, version, added: Vec::new(), done: Vec::new() };
        let result = f(&mut change);
        if result.is_ok() {
            change.commit();
        } else {
            change.undo();
            // Tables may have been replaced by larger ones all the same. Records are taken out of chains in those only, so workers must
            // see them before a record is used again.
            self.publish_view();
        }
        // Many at a time: each time costs every worker two cache lines.
        const FEW: usize = 64;
        if self.limbo.len() >= FEW {
            self.reap();
        }
        result
    }

    /// A rule.
    pub fn get(&self, id: RuleId) -> Option<&Rule> {
        self.rules.get(&id).map(|entry| &*entry.rule)
    }

    /// What a rule has counted until now.
    pub fn counters(&self, id: RuleId) -> Option<RuleCounters> {
        let entry = self.rules.get(&id)?;
        let mut sum = self.counted(entry.linked.record);
        if let Some(carried) = self.carried.get(&id) {
            sum = sum.and(carried.counters);
            sum = carried.records.iter().fold(sum, |sum, record| sum.and(self.counted(*record)));
        }
        Some(sum)
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

    /// All rules, in no particular order.
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
            // Every one of them is there.
            let _ = self.change(|change| over.into_iter().try_for_each(|(id, why)| change.take(id, why)));
        }
        self.domain.collect();
        self.reap();
        if self.masks.tidy() {
            self.publish_view();
        }
        self.gone.drain(..).for_each(gone);
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
        let installed = Installed { id, rule: Arc::clone(rule), program: Program::compile(rule) };
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

    /// Moves records on as far as the workers allow.
    fn reap(&mut self) {
        loop {
            if let Some(waiting) = &self.limbo.waiting {
                if !waiting.over.load(Ordering::Acquire) {
                    self.domain.collect();
                    if !waiting.over.load(Ordering::Acquire) {
                        return;
                    }
                }
                if let Some(waiting) = self.limbo.waiting.take() {
                    waiting.loose.into_iter().for_each(|dead| self.finish(dead));
                    for dead in waiting.dead {
                        let Linked { record, table, key } = &dead.linked;
                        self.masks.unlink(&self.slab, *table, key, *record);
                        self.limbo.loose.push(dead);
                    }
                }
            }
            let limbo = &mut self.limbo;
            if limbo.len() == 0 {
                return;
            }
            let over = Arc::new(AtomicBool::new(false));
            let (dead, loose) = (std::mem::take(&mut limbo.dead), std::mem::take(&mut limbo.loose));
            limbo.waiting = Some(Waiting { over: Arc::clone(&over), dead, loose });
            let garbage = std::mem::take(&mut limbo.garbage);
            self.domain.retire(Box::new((garbage, Token(over))));
        }
    }

    /// No worker has anything to do with the record any more.
    fn finish(&mut self, dead: Dead) {
        let record = dead.linked.record;
        let counters = self.counted(record);
        for count in self.slab.counts(record) {
            count.packets.set(0);
            count.bytes.set(0);
            count.last_hit.set(0);
        }
        self.limbo.garbage.push(self.slab.record(record).end());
        self.free.push(record);
        match dead.end {
            End::Undone => {}
            End::Replaced(heir) => {
                let carried = self.carried.entry(heir).or_default();
                carried.counters = carried.counters.and(counters);
                carried.records.retain(|other| *other != record);
            }
            End::Gone(id, rule, why) => {
                let carried = self.carried.remove(&id).unwrap_or_default();
                self.gone.push(Gone { id, rule, why, counters: counters.and(carried.counters) });
            }
        }
    }
}

impl Change<'_> {
    /// As [`RuleTable::add`].
    pub fn add(&mut self, rule: Rule, timeouts: Timeouts) -> Result<RuleId, RuleTableError> {
        let table = &mut *self.table;
        if table.rules.len() >= table.limits.rules {
            return Err(RuleTableError::TooManyRules { limit: table.limits.rules });
        }
        let (id, sequence, rule) = (RuleId(table.next), table.next, Arc::new(rule));
        let (linked, added) = table.link(id, &rule, sequence, self.version)?;
        table.next += 1;
        let entry = Entry { rule, linked, sequence, timeouts, added: table.now, timer: None };
        table.rules.insert(id, Box::new(entry));
        table.arm(id);
        self.added.push(added);
        self.done.push(Done::Added(id));
        Ok(id)
    }

    /// As [`RuleTable::remove`].
    pub fn remove(&mut self, id: RuleId) -> Result<(), RuleTableError> {
        self.take(id, Why::Removed)
    }

    fn take(&mut self, id: RuleId, why: Why) -> Result<(), RuleTableError> {
        let entry = self.table.rules.remove(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        self.table.slab.record(entry.linked.record).die(self.version);
        self.done.push(Done::Removed(id, entry, why));
        Ok(())
    }

    /// As [`RuleTable::replace`].
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> Result<(), RuleTableError> {
        let table = &mut *self.table;
        let old = table.rules.get(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        let (from, to) = (old.rule.direction(), rule.direction());
        if from != to {
            return Err(RuleTableError::OtherDirection { from, to });
        }
        let same = old.rule.priority() == rule.priority();
        let sequence = if same { old.sequence } else { table.next };
        let (timeouts, added) = (old.timeouts, old.added);
        let rule = Arc::new(rule);
        let (linked, note) = table.link(id, &rule, sequence, self.version)?;
        table.next += 1;
        let entry = Entry { rule, linked, sequence, timeouts, added, timer: None };
        let Some(mut old) = table.rules.insert(id, Box::new(entry)) else { return Ok(()) };
        if let Some(entry) = table.rules.get_mut(&id) {
            entry.timer = old.timer.take();
        }
        table.slab.record(old.linked.record).die(self.version);
        table.carried.entry(id).or_default().records.push(old.linked.record);
        self.added.push(note);
        self.done.push(Done::Replaced(id, old));
        Ok(())
    }

    /// All of it becomes visible.
    fn commit(self) {
        if self.done.is_empty() {
            return;
        }
        let table = self.table;
        table.publish_view();
        table.engine.log.publish(&self.added);
        for done in self.done {
            match done {
                Done::Added(_) => {}
                Done::Removed(id, entry, why) => {
                    if let Some(timer) = entry.timer {
                        table.wheel.cancel(timer);
                    }
                    table.limbo.dead.push(Dead { linked: entry.linked, end: End::Gone(id, entry.rule, why) });
                }
                Done::Replaced(id, old) => {
                    table.limbo.dead.push(Dead { linked: old.linked, end: End::Replaced(id) });
                }
            }
        }
    }

    /// None of it ever was.
    fn undo(self) {
        let table = self.table;
        for done in self.done.into_iter().rev() {
            let fresh = match done {
                Done::Added(id) => table.rules.remove(&id),
                Done::Removed(id, entry, _) => {
                    table.slab.record(entry.linked.record).die(super::records::NEVER);
                    table.rules.insert(id, entry);
                    None
                }
                Done::Replaced(id, mut old) => {
                    table.slab.record(old.linked.record).die(super::records::NEVER);
                    if let Some(carried) = table.carried.get_mut(&id) {
                        carried.records.pop();
                    }
                    let mut fresh = table.rules.remove(&id);
                    old.timer = fresh.as_mut().and_then(|fresh| fresh.timer.take());
                    table.rules.insert(id, old);
                    fresh
                }
            };
            if let Some(fresh) = fresh {
                if let Some(timer) = fresh.timer {
                    table.wheel.cancel(timer);
                }
                table.slab.record(fresh.linked.record).undo();
                table.limbo.dead.push(Dead { linked: fresh.linked, end: End::Undone });
            }
        }
    }
}
