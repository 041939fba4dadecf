use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use wirepath_pmd::counters::Counter;
use wirepath_pmd::flow::{Direction, Rule};

use super::{Installed, RuleLookup, RuleTableError};
use crate::epoch::{Domain, Shared};

/// The name of a rule in a [`RuleTable`]; never given to another rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(u64);

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
    /// Different masks among the rules of one direction. A mask is the set of all bits that a rule compares.
    pub masks: usize,
}

impl Default for RuleLimits {
    /// Four million rules, 256 masks.
    fn default() -> Self {
        Self { rules: 4 << 20, masks: 256 }
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
    /// Bytes of these packets as they were when they met it, without FCS.
    pub bytes: u64,
    /// Nanoseconds (of [`crate::Context::now`]) of the last one; 0: none.
    pub last_hit: u64,
}

/// Why a rule is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// [`RuleTable::remove`], or replaced.
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
#[derive(Debug)]
pub struct RuleTable {
    shared: Arc<Shared<Rules>>,
    rules: BTreeMap<RuleId, Entry>,
    next: u64,
    limits: RuleLimits,
    gone: Vec<Gone>,
    now: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    installed: Arc<Installed>,
    timeouts: Timeouts,
    born: u64,
    order: u64,
}

/// The rules of each direction in the order in which they are asked.
#[derive(Debug, Default)]
pub(super) struct Rules {
    pub(super) ingress: Vec<Arc<Installed>>,
    pub(super) egress: Vec<Arc<Installed>>,
}

/// Changes that take effect at one moment.
#[derive(Debug)]
pub struct Change<'t> {
    table: &'t mut RuleTable,
}

impl RuleTable {
    /// Without rules; `now` in nanoseconds of [`crate::Context::now`].
    pub fn new(domain: &Domain, limits: RuleLimits, now: u64) -> Self {
        let shared = Arc::new(Shared::new(domain, Rules::default()));
        Self { shared, rules: BTreeMap::new(), next: 0, limits, gone: Vec::new(), now }
    }

    /// What one worker needs to look rules up at ingress and at egress. Both see a change at the same packet.
    pub fn lookups(&mut self) -> (RuleLookup, RuleLookup) {
        let lookup = |direction| RuleLookup::new(Arc::clone(&self.shared), direction);
        (lookup(Direction::Ingress), lookup(Direction::Egress))
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
    /// Its counters go on.
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> Result<(), RuleTableError> {
        self.change(|change| change.replace(id, rule))
    }

    /// Several changes that take effect at one moment: every packet is treated by the rules as they were before all of them, or as
    /// they are after. If `f` fails, nothing has changed.
    pub fn change<R>(
        &mut self,
        f: impl FnOnce(&mut Change<'_>) -> Result<R, RuleTableError>,
    ) -> Result<R, RuleTableError> {
        let (before, gone) = (self.rules.clone(), self.gone.len());
        let result = f(&mut Change { table: self });
        match result {
            Ok(_) => self.publish(),
            Err(_) => {
                self.rules = before;
                self.gone.truncate(gone);
            }
        }
        result
    }

    fn publish(&mut self) {
        let mut all: Vec<&Entry> = self.rules.values().collect();
        all.sort_by_key(|entry| (entry.installed.rule.priority(), entry.order));
        let of = |direction| {
            let these = all.iter().filter(|entry| entry.installed.rule.direction() == direction);
            these.map(|entry| Arc::clone(&entry.installed)).collect()
        };
        let rules = Rules { ingress: of(Direction::Ingress), egress: of(Direction::Egress) };
        self.shared.replace(rules);
    }

    /// A rule.
    pub fn get(&self, id: RuleId) -> Option<&Rule> {
        self.rules.get(&id).map(|entry| &*entry.installed.rule)
    }

    /// What a rule has counted until now.
    pub fn counters(&self, id: RuleId) -> Option<RuleCounters> {
        self.rules.get(&id).map(|entry| entry.installed.counters())
    }

    /// All rules, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (RuleId, &Rule)> {
        self.rules.iter().map(|(id, entry)| (*id, &*entry.installed.rule))
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

    /// To be called about once a second: removes what has outlived its [`Timeouts`], frees what no worker sees any more, and reports
    /// every rule that is gone since the last call. `now` in nanoseconds of [`crate::Context::now`].
    pub fn age(&mut self, now: u64, gone: impl FnMut(Gone)) {
        self.now = now;
        const SECOND: u64 = 1_000_000_000;
        let mut due = Vec::new();
        for (&id, entry) in &self.rules {
            let since = |at: u64, limit: u32| limit > 0 && now.saturating_sub(at) >= u64::from(limit) * SECOND;
            let seen = entry.installed.counters().last_hit.max(entry.born);
            if since(entry.born, entry.timeouts.hard) {
                due.push((id, Why::Hard));
            } else if since(seen, entry.timeouts.idle) {
                due.push((id, Why::Idle));
            }
        }
        for (id, why) in due {
            let _ = self.change(|change| change.take(id, why));
        }
        self.gone.drain(..).for_each(gone);
    }
}

impl Change<'_> {
    /// As [`RuleTable::add`].
    pub fn add(&mut self, rule: Rule, timeouts: Timeouts) -> Result<RuleId, RuleTableError> {
        let table = &mut *self.table;
        if table.rules.len() >= table.limits.rules {
            return Err(RuleTableError::TooManyRules { limit: table.limits.rules });
        }
        let id = RuleId(table.next);
        table.next += 1;
        let installed = Arc::new(Installed::new(id, rule));
        table.rules.insert(id, Entry { installed, timeouts, born: table.now, order: id.0 });
        Ok(id)
    }

    /// As [`RuleTable::remove`].
    pub fn remove(&mut self, id: RuleId) -> Result<(), RuleTableError> {
        self.take(id, Why::Removed)
    }

    fn take(&mut self, id: RuleId, why: Why) -> Result<(), RuleTableError> {
        let entry = self.table.rules.remove(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        let (rule, counters) = (Arc::clone(&entry.installed.rule), entry.installed.counters());
        self.table.gone.push(Gone { id, rule, why, counters });
        Ok(())
    }

    /// As [`RuleTable::replace`].
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> Result<(), RuleTableError> {
        let entry = self.table.rules.get_mut(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        if entry.installed.rule.direction() != rule.direction() {
            return Err(RuleTableError::Unusable("a rule cannot be replaced by one of the other direction".to_owned()));
        }
        if entry.installed.rule.priority() != rule.priority() {
            entry.order = self.table.next;
            self.table.next += 1;
        }
        let fresh = Installed::new(id, rule);
        let counters = entry.installed.counters();
        fresh.packets.set(counters.packets);
        fresh.bytes.set(counters.bytes);
        fresh.last_hit.set(counters.last_hit);
        entry.installed = Arc::new(fresh);
        Ok(())
    }
}

impl Installed {
    fn new(id: RuleId, rule: Rule) -> Self {
        let fields = rule.fields();
        let (packets, bytes, last_hit) = (Counter::new(), Counter::new(), Counter::new());
        Self { id, rule: Arc::new(rule), fields, packets, bytes, last_hit }
    }

    fn counters(&self) -> RuleCounters {
        RuleCounters { packets: self.packets.get(), bytes: self.bytes.get(), last_hit: self.last_hit.get() }
    }
}
