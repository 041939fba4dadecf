//! The rule list of a program, in the order in which rules of equal priority are matched.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use wirepath_flow::{Action, Rule};

use crate::rules::RuleId;

/// A rule in force.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: RuleId,
    pub(super) rule: Arc<Rule>,
}

/// An ordered list that finds, removes and appends rules without a scan.
#[derive(Debug, Default)]
pub(super) struct RuleList {
    entries: BTreeMap<u64, Entry>,
    places: HashMap<RuleId, u64>,
    next: u64,
    /// Number of rules that end at the kernel.
    to_kernel: usize,
}

/// Returns true if a rule ends at the kernel's network stack. Such rules, and all rules with them, are set on
/// the ports.
pub(super) fn ends_at_kernel(rule: &Rule) -> bool {
    rule.actions().last() == Some(&Action::Kernel)
}

impl RuleList {
    /// Appends a rule.
    pub(super) fn push(&mut self, entry: Entry) {
        self.to_kernel += usize::from(ends_at_kernel(&entry.rule));
        self.places.insert(entry.id, self.next);
        self.entries.insert(self.next, entry);
        self.next += 1;
    }

    pub(super) fn remove(&mut self, id: RuleId) -> Option<Entry> {
        let entry = self.entries.remove(&self.places.remove(&id)?)?;
        self.to_kernel -= usize::from(ends_at_kernel(&entry.rule));
        Some(entry)
    }

    pub(super) fn get(&self, id: RuleId) -> Option<&Entry> {
        self.entries.get(self.places.get(&id)?)
    }

    /// Returns a rule and its position, which grows with the order of the list.
    pub(super) fn position(&self, id: RuleId) -> Option<(u64, &Entry)> {
        let position = *self.places.get(&id)?;
        Some((position, self.entries.get(&position)?))
    }

    pub(super) fn has(&self, id: RuleId) -> bool {
        self.places.contains_key(&id)
    }

    /// Returns true if some rule ends at the kernel.
    pub(super) fn has_kernel_rules(&self) -> bool {
        self.to_kernel > 0
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Entry> + ExactSizeIterator {
        self.entries.values()
    }
}
