//! The list of a program's rules, in the order in which equal priorities are asked.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use wirepath_pmd::flow::{Action, Rule};

use super::{RuleCounters, RuleId};

/// A rule in force.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: RuleId,
    pub(super) rule: Arc<Rule>,
    /// What it counted in earlier places of the order.
    pub(super) before: RuleCounters,
}

/// Finds, takes out and appends without going through the others.
#[derive(Debug, Default)]
pub(super) struct Listed {
    entries: BTreeMap<u64, Entry>,
    places: HashMap<RuleId, u64>,
    next: u64,
    /// Those that end at the kernel.
    to_kernel: usize,
}

/// Whether a rule ends at the kernel's network stack: such rules, and with them those around them, are told to the ports.
pub(super) fn ends_at_kernel(rule: &Rule) -> bool {
    rule.actions().last() == Some(&Action::Kernel)
}

impl Listed {
    /// Behind all others.
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

    pub(super) fn get_mut(&mut self, id: RuleId) -> Option<&mut Entry> {
        self.entries.get_mut(self.places.get(&id)?)
    }

    pub(super) fn has(&self, id: RuleId) -> bool {
        self.places.contains_key(&id)
    }

    /// Whether some of them end at the kernel.
    pub(super) fn have_to_kernel(&self) -> bool {
        self.to_kernel > 0
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Entry> + ExactSizeIterator {
        self.entries.values()
    }

    /// All, to be put in again.
    pub(super) fn take(&mut self) -> Vec<Entry> {
        std::mem::take(self).entries.into_values().collect()
    }
}

impl FromIterator<Entry> for Listed {
    fn from_iter<T: IntoIterator<Item = Entry>>(entries: T) -> Self {
        let mut listed = Self::default();
        entries.into_iter().for_each(|entry| listed.push(entry));
        listed
    }
}
