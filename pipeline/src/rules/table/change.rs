//! Changes of a table: what they do, and what undoes them.

use std::sync::Arc;

use wirepath_pmd::flow::Rule;

use super::super::RuleTableError;
use super::super::log::Added;
use super::super::records::NEVER;
use super::limbo::{Dead, End};
use super::{Entry, RuleId, RuleTable, Timeouts, Why};

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

impl<'t> Change<'t> {
    pub(super) fn new(table: &'t mut RuleTable, version: u64) -> Self {
        Self { table, version, added: Vec::new(), done: Vec::new() }
    }

    /// The table, as it will be if nothing goes wrong from here on.
    pub(in super::super) fn table(&mut self) -> &mut RuleTable {
        self.table
    }

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

    pub(super) fn take(&mut self, id: RuleId, why: Why) -> Result<(), RuleTableError> {
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
    pub(super) fn commit(&mut self) {
        if self.done.is_empty() {
            return;
        }
        let table = &mut *self.table;
        table.publish_view();
        table.engine.log.publish(&self.added);
        for done in self.done.drain(..) {
            match done {
                Done::Added(_) => {}
                Done::Removed(id, entry, why) => {
                    if let Some(timer) = entry.timer {
                        table.wheel.cancel(timer);
                    }
                    table.leaving.insert(id, entry.linked.record);
                    table.limbo.dead.push(Dead { linked: entry.linked, end: End::Gone(id, entry.rule, why) });
                }
                Done::Replaced(id, old) => {
                    table.limbo.dead.push(Dead { linked: old.linked, end: End::Replaced(id) });
                }
            }
        }
    }
}

impl Drop for Change<'_> {
    /// What is not committed never was: the change failed, or whoever made it panicked.
    fn drop(&mut self) {
        let table = &mut *self.table;
        for done in self.done.drain(..).rev() {
            let fresh = match done {
                Done::Added(id) => table.rules.remove(&id),
                Done::Removed(id, entry, _) => {
                    table.slab.record(entry.linked.record).die(NEVER);
                    table.rules.insert(id, entry);
                    None
                }
                Done::Replaced(id, mut old) => {
                    table.slab.record(old.linked.record).die(NEVER);
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
        // Tables may have been replaced by larger ones all the same. Records are taken out of chains in those only, so workers must see
        // them before a record is used again.
        table.publish_view();
    }
}
