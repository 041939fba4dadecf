//! Rules that are gone and that workers may still see.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wirepath_pmd::flow::Rule;

use super::super::RuleTableError;
use super::{Gone, Linked, RuleId, RuleTable, Why};

/// Records whose rules are gone for new versions, on their way to be used again.
///
/// A record is *dead* until no worker sees a version in which it was there; then it is taken out of its chain. It is *loose* until no
/// worker stands on it any more; then it is free.
#[derive(Default)]
pub(super) struct Limbo {
    pub(super) dead: Vec<Dead>,
    loose: Vec<Dead>,
    /// What records held.
    pub(super) garbage: Vec<Box<dyn Send>>,
    /// The same, waiting for the workers.
    waiting: Option<Waiting>,
    /// Records that packets may still name ([`RuleTable::hold`]), and how often each is held.
    held: HashMap<u32, u32>,
    /// Of these, those that were loose.
    kept: HashMap<u32, Dead>,
}

#[derive(Debug)]
struct Waiting {
    over: Arc<AtomicBool>,
    dead: Vec<Dead>,
    loose: Vec<Dead>,
}

#[derive(Debug)]
pub(super) struct Dead {
    pub(super) linked: Linked,
    pub(super) end: End,
}

/// Who is told of a record's last counters.
#[derive(Debug)]
pub(super) enum End {
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
    pub(super) fn len(&self) -> usize {
        self.dead.len() + self.loose.len() + self.garbage.len()
    }

    /// What is kept because of workers that have not moved on.
    fn passing(&self) -> usize {
        let waiting = self.waiting.as_ref().map_or(0, |waiting| waiting.dead.len() + waiting.loose.len());
        self.len() + waiting
    }
}

/// Dropped when every worker has been through a quiescent moment.
pub(in super::super) struct Token(pub(in super::super) Arc<AtomicBool>);

impl Drop for Token {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl RuleTable {
    /// Whether rules may go: as long as the workers let go of those that have gone before.
    pub(super) fn make_room(&mut self) -> Result<(), RuleTableError> {
        let limit = self.limits.passing.max(self.rules.len());
        if self.limbo.passing() < limit {
            return Ok(());
        }
        self.reap();
        if self.limbo.passing() < limit { Ok(()) } else { Err(RuleTableError::TooManyPassing { limit }) }
    }

    /// Moves records on as far as the workers allow.
    pub(super) fn reap(&mut self) {
        loop {
            if let Some(waiting) = &self.limbo.waiting {
                if !waiting.over.load(Ordering::Acquire) {
                    self.domain.collect();
                    if !waiting.over.load(Ordering::Acquire) {
                        return;
                    }
                }
                if let Some(waiting) = self.limbo.waiting.take() {
                    for dead in waiting.loose {
                        match self.limbo.held.contains_key(&dead.linked.record) {
                            true => drop(self.limbo.kept.insert(dead.linked.record, dead)),
                            false => self.finish(dead),
                        }
                    }
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

    /// Keeps a record with its program and counters, even when its rule is gone, until it is released as often.
    pub(in super::super) fn hold(&mut self, record: u32) {
        *self.limbo.held.entry(record).or_default() += 1;
    }

    /// Undoes one [`Self::hold`].
    pub(in super::super) fn release(&mut self, record: u32) {
        if let Some(times) = self.limbo.held.get_mut(&record) {
            *times -= 1;
            if *times == 0 {
                self.limbo.held.remove(&record);
                self.limbo.loose.extend(self.limbo.kept.remove(&record));
            }
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
                self.leaving.remove(&id);
                self.gone.insert(id, Gone { id, rule, why, counters: counters.and(carried.counters) });
            }
        }
    }
}
