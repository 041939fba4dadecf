//! Reclamation of removed rules that workers may still use.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wirepath_flow::Rule;

use super::{Linked, RemovalReason, RemovedRule, RuleId, RuleTable};
use crate::rules::RuleTableError;

/// Records of removed rules, on their way to be reused.
///
/// A record is *retired* until no worker uses a version in which it is valid. Then it is unlinked from its
/// chain. It is *unlinked* until no worker holds a reference to it. Then it is free.
#[derive(Default)]
pub(super) struct Reclaimer {
    pub(super) retired: Vec<RetiredRecord>,
    unlinked: Vec<RetiredRecord>,
    /// Former contents of records, to be freed.
    pub(super) garbage: Vec<Box<dyn Send>>,
    /// Records and garbage that wait for all workers to pass a quiescent state.
    waiting: Option<Waiting>,
    /// Records that packets may still refer to ([`RuleTable::pin_record`]), and the number of pins of each.
    pinned: HashMap<u32, u32>,
    /// Pinned records that are already unlinked.
    pinned_unlinked: HashMap<u32, RetiredRecord>,
}

#[derive(Debug)]
struct Waiting {
    over: Arc<AtomicBool>,
    retired: Vec<RetiredRecord>,
    unlinked: Vec<RetiredRecord>,
}

#[derive(Debug)]
pub(super) struct RetiredRecord {
    pub(super) linked: Linked,
    pub(super) end: CountersTo,
}

/// Receiver of the final counters of a record.
#[derive(Debug)]
pub(super) enum CountersTo {
    /// None: the rule was rolled back.
    Nobody,
    /// The rule that replaced this one.
    Successor(RuleId),
    Report(RuleId, Arc<Rule>, RemovalReason),
}

impl fmt::Debug for Reclaimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reclaimer of {}", self.len())
    }
}

impl Reclaimer {
    pub(super) fn len(&self) -> usize {
        self.retired.len() + self.unlinked.len() + self.garbage.len()
    }

    /// Returns the number of objects that wait for workers.
    fn pending_removals(&self) -> usize {
        let waiting = self.waiting.as_ref().map_or(0, |waiting| waiting.retired.len() + waiting.unlinked.len());
        self.len() + waiting
    }
}

/// Sets its flag when it is dropped, which the epoch domain does when every worker has passed a quiescent
/// state.
pub(in crate::rules) struct QuiescenceToken(pub(in crate::rules) Arc<AtomicBool>);

impl Drop for QuiescenceToken {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl RuleTable {
    /// Returns an error if the limit of pending removals is reached and the workers cannot release any.
    pub(super) fn make_room(&mut self) -> Result<(), RuleTableError> {
        let limit = self.limits.pending_removals.max(self.rules.len());
        if self.reclaimer.pending_removals() < limit {
            return Ok(());
        }
        self.reap();
        if self.reclaimer.pending_removals() < limit {
            Ok(())
        } else {
            Err(RuleTableError::TooManyPendingRemovals { limit })
        }
    }

    /// Reclaims records as far as the workers have progressed.
    pub(super) fn reap(&mut self) {
        loop {
            if let Some(waiting) = &self.reclaimer.waiting {
                if !waiting.over.load(Ordering::Acquire) {
                    self.domain.collect();
                    if !waiting.over.load(Ordering::Acquire) {
                        return;
                    }
                }
                if let Some(waiting) = self.reclaimer.waiting.take() {
                    for retired in waiting.unlinked {
                        match self.reclaimer.pinned.contains_key(&retired.linked.record) {
                            true => drop(self.reclaimer.pinned_unlinked.insert(retired.linked.record, retired)),
                            false => self.finish(retired),
                        }
                    }
                    for retired in waiting.retired {
                        let Linked { record, table, key } = &retired.linked;
                        self.masks.unlink(&self.slab, *table, key, *record);
                        self.reclaimer.unlinked.push(retired);
                    }
                }
            }
            let reclaimer = &mut self.reclaimer;
            if reclaimer.len() == 0 {
                return;
            }
            let over = Arc::new(AtomicBool::new(false));
            let (retired, unlinked) = (std::mem::take(&mut reclaimer.retired), std::mem::take(&mut reclaimer.unlinked));
            reclaimer.waiting = Some(Waiting { over: Arc::clone(&over), retired, unlinked });
            let garbage = std::mem::take(&mut reclaimer.garbage);
            self.domain.retire(Box::new((garbage, QuiescenceToken(over))));
        }
    }

    /// Keeps a record with its program and counters, even if its rule is removed, until it is unpinned as
    /// often as it was pinned.
    pub(in crate::rules) fn pin_record(&mut self, record: u32) {
        *self.reclaimer.pinned.entry(record).or_default() += 1;
    }

    /// Releases one pin of [`Self::pin_record`].
    pub(in crate::rules) fn unpin_record(&mut self, record: u32) {
        if let Some(times) = self.reclaimer.pinned.get_mut(&record) {
            *times -= 1;
            if *times == 0 {
                self.reclaimer.pinned.remove(&record);
                self.reclaimer.unlinked.extend(self.reclaimer.pinned_unlinked.remove(&record));
            }
        }
    }

    /// Frees a record that no worker uses any more, and passes on its counters.
    fn finish(&mut self, retired: RetiredRecord) {
        let record = retired.linked.record;
        let counters = self.counted(record);
        for count in self.slab.counts(record) {
            count.packets.set(0);
            count.bytes.set(0);
            count.last_hit.set(0);
        }
        self.reclaimer.garbage.push(self.slab.record(record).clear());
        self.free.push(record);
        match retired.end {
            CountersTo::Nobody => {}
            CountersTo::Successor(successor) => {
                let carried = self.carried.entry(successor).or_default();
                carried.counters = carried.counters.plus(counters);
                carried.records.retain(|other| *other != record);
            }
            CountersTo::Report(id, rule, reason) => {
                let carried = self.carried.remove(&id).unwrap_or_default();
                self.removed.insert(id, RemovedRule { id, rule, reason, counters: counters.plus(carried.counters) });
            }
        }
    }
}
