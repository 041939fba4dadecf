//! Atomic changes of a rule table, with rollback.

use std::sync::Arc;

use wirepath_flow::Rule;

use super::super::change_log::Added;
use super::reclaim::{CountersTo, RetiredRecord};
use super::{Entry, RemovalReason, RuleId, RuleTable, Timeouts};
use crate::rules::RuleTableError;
use crate::rules::classifier::records::NEVER;

/// A set of changes that take effect atomically.
#[derive(Debug)]
pub struct Change<'t> {
    table: &'t mut RuleTable,
    /// Version in which the changes take effect.
    version: u64,
    added: Vec<Added>,
    undo_log: Vec<UndoEntry>,
}

/// A step that must be rolled back if the change fails.
#[derive(Debug)]
enum UndoEntry {
    Added(RuleId),
    Removed(RuleId, Box<Entry>, RemovalReason),
    Replaced(RuleId, Box<Entry>),
}

impl<'t> Change<'t> {
    pub(super) fn new(table: &'t mut RuleTable, version: u64) -> Self {
        Self { table, version, added: Vec::new(), undo_log: Vec::new() }
    }

    /// Returns the table as it will be after the commit.
    pub(in crate::rules) fn table(&mut self) -> &mut RuleTable {
        self.table
    }

    /// Adds a rule; see [`RuleTable::add`].
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
        self.undo_log.push(UndoEntry::Added(id));
        Ok(id)
    }

    /// Removes a rule; see [`RuleTable::remove`].
    pub fn remove(&mut self, id: RuleId) -> Result<(), RuleTableError> {
        self.take(id, RemovalReason::Removed)
    }

    pub(super) fn take(&mut self, id: RuleId, reason: RemovalReason) -> Result<(), RuleTableError> {
        let entry = self.table.rules.remove(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        self.table.slab.record(entry.linked.record).retire_at(self.version);
        self.undo_log.push(UndoEntry::Removed(id, entry, reason));
        Ok(())
    }

    /// Replaces a rule; see [`RuleTable::replace`].
    pub fn replace(&mut self, id: RuleId, rule: Rule) -> Result<(), RuleTableError> {
        let table = &*self.table;
        let old = table.rules.get(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        let (from, to) = (old.rule.direction(), rule.direction());
        if from != to {
            return Err(RuleTableError::OtherDirection { from, to });
        }
        let same = old.rule.priority() == rule.priority();
        let sequence = if same { old.sequence } else { table.next };
        self.relink(id, Arc::new(rule), sequence)
    }

    /// Moves a rule behind all rules of its priority. It keeps its id, its counters and its timeouts.
    pub fn move_last(&mut self, id: RuleId) -> Result<(), RuleTableError> {
        let old = self.table.rules.get(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        let (rule, sequence) = (Arc::clone(&old.rule), self.table.next);
        self.relink(id, rule, sequence)
    }

    /// Links a rule again under the id of an existing one, which the workers match until the commit.
    fn relink(&mut self, id: RuleId, rule: Arc<Rule>, sequence: u64) -> Result<(), RuleTableError> {
        let table = &mut *self.table;
        let old = table.rules.get(&id).ok_or(RuleTableError::NoSuchRule(id))?;
        let (timeouts, added) = (old.timeouts, old.added);
        let (linked, note) = table.link(id, &rule, sequence, self.version)?;
        table.next += 1;
        let entry = Entry { rule, linked, sequence, timeouts, added, timer: None };
        let Some(mut old) = table.rules.insert(id, Box::new(entry)) else { return Ok(()) };
        if let Some(entry) = table.rules.get_mut(&id) {
            entry.timer = old.timer.take();
        }
        table.slab.record(old.linked.record).retire_at(self.version);
        table.carried.entry(id).or_default().records.push(old.linked.record);
        self.added.push(note);
        self.undo_log.push(UndoEntry::Replaced(id, old));
        Ok(())
    }

    /// Makes the changes visible to the workers.
    pub(super) fn commit(&mut self) {
        if self.undo_log.is_empty() {
            return;
        }
        let table = &mut *self.table;
        table.publish_view();
        table.engine.log.publish(&self.added);
        for undo_log in self.undo_log.drain(..) {
            match undo_log {
                UndoEntry::Added(_) => {}
                UndoEntry::Removed(id, entry, reason) => {
                    if let Some(timer) = entry.timer {
                        table.wheel.cancel(timer);
                    }
                    table
                        .reclaimer
                        .retired
                        .push(RetiredRecord { linked: entry.linked, end: CountersTo::Report(id, entry.rule, reason) });
                }
                UndoEntry::Replaced(id, old) => {
                    table.reclaimer.retired.push(RetiredRecord { linked: old.linked, end: CountersTo::Successor(id) });
                }
            }
        }
    }
}

impl Drop for Change<'_> {
    /// Rolls back uncommitted changes after an error or a panic of the caller.
    fn drop(&mut self) {
        let table = &mut *self.table;
        for undo_log in self.undo_log.drain(..).rev() {
            let new_entry = match undo_log {
                UndoEntry::Added(id) => table.rules.remove(&id),
                UndoEntry::Removed(id, entry, _) => {
                    table.slab.record(entry.linked.record).retire_at(NEVER);
                    table.rules.insert(id, entry);
                    None
                }
                UndoEntry::Replaced(id, mut old) => {
                    table.slab.record(old.linked.record).retire_at(NEVER);
                    if let Some(carried) = table.carried.get_mut(&id) {
                        carried.records.pop();
                    }
                    let mut new_entry = table.rules.remove(&id);
                    old.timer = new_entry.as_mut().and_then(|new_entry| new_entry.timer.take());
                    table.rules.insert(id, old);
                    new_entry
                }
            };
            if let Some(new_entry) = new_entry {
                if let Some(timer) = new_entry.timer {
                    table.wheel.cancel(timer);
                }
                table.slab.record(new_entry.linked.record).cancel();
                table.reclaimer.retired.push(RetiredRecord { linked: new_entry.linked, end: CountersTo::Nobody });
            }
        }
        // A table may have been replaced by a larger one in spite of the rollback. Records are unlinked only
        // from the larger table, so workers must use it before a record is reused.
        table.publish_view();
    }
}
