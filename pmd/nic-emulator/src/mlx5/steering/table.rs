//! A flow table, as the kernel fills it. Source: Linux `drivers/net/ethernet/mellanox/mlx5/core/fs_core.c`
//! (automatic groups).
//!
//! A flow group holds entries with one mask; an entry has one value. Every new mask gets a group. The first
//! few groups are large, later ones have one entry. The device looks up groups in order of their index. This
//! lookup combines the groups of a mask, because a value exists in only one of them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use rustix::io::Errno;

use super::key::{Key, WORDS};
use super::{Action, Counter};
use crate::device::ObjectId;

/// Number of large groups of a table.
const LARGE_GROUPS: u32 = 6;
/// Maximum number of entries that are compared linearly; more are hashed.
const MAX_LINEAR: usize = 3;
/// Number of words of a short mask.
const SHORT_MASK_WORDS: usize = 6;

/// Mask of a flow group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mask {
    /// Compared parts, as bits of `match_criteria_enable`.
    pub(super) criteria: u8,
    /// True if the mask contains integrity bits.
    pub(super) checks: bool,
    words: Box<[(u8, u64)]>,
}

impl Mask {
    pub(super) fn new(key: &Key, criteria: u8) -> Self {
        let words = (0u8..).zip(key.0).filter(|(_, word)| *word != 0).collect();
        Self { criteria, checks: super::matches_integrity_bits(key), words }
    }

    /// Returns index and mask of the compared words.
    pub(super) fn words(&self) -> &[(u8, u64)] {
        &self.words
    }

    /// Returns the masked words of a key.
    fn of(&self, key: &Key) -> Arc<[u64]> {
        self.words.iter().map(|(at, mask)| key.0[usize::from(*at)] & mask).collect()
    }
}

/// Destination of an entry's packets.
#[derive(Clone, Debug)]
pub(super) struct Destination {
    /// Rule that the destination belongs to.
    pub(super) rule: ObjectId,
    pub(super) qp: Option<ObjectId>,
    pub(super) counter: Option<Arc<Counter>>,
}

/// A table entry.
#[derive(Debug)]
pub(super) struct Entry {
    /// Index of the first entry of its group.
    group: u32,
    pub(super) action: Action,
    pub(super) destinations: Vec<Destination>,
}

/// A flow group: a range of indexes.
#[derive(Debug)]
struct Group {
    start: u32,
    size: u32,
    used: u32,
    mask: u32,
}

/// All entries of one mask.
#[derive(Debug)]
struct MaskGroup {
    id: u32,
    mask: Mask,
    entries: HashMap<Arc<[u64]>, Entry, BuildHasherDefault<MixHasher>>,
}

/// A fast hash of few words. Colliding values slow down only the program that chooses them.
#[derive(Clone, Copy, Debug, Default)]
struct MixHasher(u64);

impl Hasher for MixHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.write_u64(u64::from_ne_bytes(*word));
        }
        for byte in rest {
            self.write_u64(u64::from(*byte));
        }
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product ^ product >> 64) as u64;
    }

    #[inline]
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

impl MaskGroup {
    #[inline]
    fn find(&self, key: &Key) -> Option<&Entry> {
        if self.entries.len() <= MAX_LINEAR {
            let fits = |value: &[u64]| {
                self.mask.words.iter().zip(value).all(|((at, mask), value)| key.0[usize::from(*at)] & mask == *value)
            };
            return self.entries.iter().find(|(value, _)| fits(value)).map(|(_, entry)| entry);
        }
        // A buffer for short masks is cheaper, and most masks are short.
        if self.mask.words.len() <= SHORT_MASK_WORDS {
            self.hashed::<SHORT_MASK_WORDS>(key)
        } else {
            self.hashed::<WORDS>(key)
        }
    }

    #[inline]
    fn hashed<const ROOM: usize>(&self, key: &Key) -> Option<&Entry> {
        let mut room = [0; ROOM];
        let words = room.get_mut(..self.mask.words.len())?;
        for (word, (at, mask)) in words.iter_mut().zip(&self.mask.words) {
            *word = key.0[usize::from(*at)] & mask;
        }
        self.entries.get(&*words)
    }
}

/// Identifies an entry for its removal.
#[derive(Clone, Debug)]
pub(super) struct EntryRef {
    mask: u32,
    value: Arc<[u64]>,
}

/// A flow table.
#[derive(Debug)]
pub(super) struct Table {
    size: u32,
    /// Groups in order of their indexes.
    groups: Vec<Group>,
    large: u32,
    masks: Vec<MaskGroup>,
    next_mask: u32,
    entries: u32,
}

impl Table {
    pub(super) fn new(size: u32) -> Self {
        Self { size, groups: Vec::new(), large: 0, masks: Vec::new(), next_mask: 0, entries: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries == 0
    }

    pub(super) fn masks(&self) -> impl Iterator<Item = &Mask> {
        self.masks.iter().map(|masked| &masked.mask)
    }

    /// Returns the first entry that matches a key.
    #[inline]
    pub(super) fn find(&self, key: &Key) -> Option<&Entry> {
        let mut best: Option<&Entry> = None;
        for masked in &self.masks {
            if let Some(entry) = masked.find(key)
                && best.is_none_or(|best| entry.group < best.group)
            {
                best = Some(entry);
            }
        }
        best
    }

    /// Adds a rule; rules with the same match share an entry.
    ///
    /// # Errors
    /// `EEXIST` if the existing entry has another action, `ENOSPC` if the table is full.
    pub(super) fn add(
        &mut self,
        mask: Mask,
        value: &Key,
        action: Action,
        destination: Destination,
    ) -> Result<EntryRef, (Errno, String)> {
        let at = self.masks.iter().position(|masked| masked.mask == mask);
        let value = at.map_or_else(|| mask.of(value), |at| self.masks[at].mask.of(value));
        if let Some(masked) = at.map(|at| &mut self.masks[at])
            && let Some(entry) = masked.entries.get_mut(&value)
        {
            if let Some(why) = entry.action.conflict_with(&action) {
                return Err((Errno::EXIST, format!("a rule with this match {why}")));
            }
            entry.action.join(&action);
            entry.destinations.push(destination);
            return Ok(EntryRef { mask: masked.id, value });
        }
        let id = at.map_or(self.next_mask, |at| self.masks[at].id);
        let group = self.alloc_index(id)?;
        if at.is_none() {
            self.next_mask += 1;
            self.masks.push(MaskGroup { id, mask, entries: HashMap::default() });
        }
        let masked = match at {
            Some(at) => &mut self.masks[at],
            None => self.masks.last_mut().expect("it was just added"),
        };
        masked.entries.insert(Arc::clone(&value), Entry { group, action, destinations: vec![destination] });
        self.entries += 1;
        Ok(EntryRef { mask: id, value })
    }

    /// Allocates an index in a group of this mask; returns the start of the group.
    fn alloc_index(&mut self, mask: u32) -> Result<u32, (Errno, String)> {
        if let Some(group) = self.groups.iter_mut().find(|group| group.mask == mask && group.used < group.size) {
            group.used += 1;
            return Ok(group.start);
        }
        let large = self.size / (LARGE_GROUPS + 1);
        let size = if self.large < LARGE_GROUPS && large > 0 { large } else { 1 };
        let mut start = 0;
        let mut at = 0;
        for group in &self.groups {
            if start + size <= group.start {
                break;
            }
            start = group.start + group.size;
            at += 1;
        }
        if start + size > self.size {
            let why =
                format!("the table is full: {} rules of {} masks in {}", self.entries, self.masks.len(), self.size);
            return Err((Errno::NOSPC, why));
        }
        self.large += u32::from(size == large);
        self.groups.insert(at, Group { start, size, used: 1, mask });
        Ok(start)
    }

    /// Removes a rule.
    pub(super) fn remove(&mut self, entry_ref: &EntryRef, rule: ObjectId) {
        let Some(at) = self.masks.iter().position(|masked| masked.id == entry_ref.mask) else { return };
        let masked = &mut self.masks[at];
        let Some(entry) = masked.entries.get_mut(&entry_ref.value) else { return };
        entry.destinations.retain(|destination| destination.rule != rule);
        if !entry.destinations.is_empty() {
            return;
        }
        let start = entry.group;
        masked.entries.remove(&entry_ref.value);
        self.entries -= 1;
        if masked.entries.is_empty() {
            // The order of the other masks is preserved.
            self.masks.remove(at);
        }
        if let Ok(at) = self.groups.binary_search_by_key(&start, |group| group.start) {
            let large = self.size / (LARGE_GROUPS + 1);
            let group = &mut self.groups[at];
            group.used -= 1;
            if group.used == 0 {
                self.large -= u32::from(group.size == large);
                self.groups.remove(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(word: usize, value: u64) -> Key {
        let mut key = Key::from_parameters(&[]).unwrap();
        key.0[word] = value;
        key
    }

    fn add(table: &mut Table, rule: ObjectId, word: usize, mask: u64, value: u64, tag: u32) -> Result<EntryRef, Errno> {
        let action = Action { tag: Some(tag), ..Action::default() };
        let destination = Destination { rule, qp: Some(rule), counter: None };
        table.add(Mask::new(&key(word, mask), 1), &key(word, value), action, destination).map_err(|(errno, _)| errno)
    }

    fn found(table: &Table, key: &Key) -> Option<Vec<ObjectId>> {
        table.find(key).map(|entry| entry.destinations.iter().map(|destination| destination.rule).collect())
    }

    #[test]
    fn groups_are_matched_in_creation_order() {
        let mut table = Table::new(70);
        add(&mut table, 1, 0, 0xff, 7, 0).unwrap();
        let wide = add(&mut table, 2, 0, 0xffff, 7, 0).unwrap();
        add(&mut table, 3, 0, 0xff, 8, 0).unwrap();
        assert_eq!(found(&table, &key(0, 7)), Some(vec![1]), "the first mask, though the second says more");
        assert_eq!(found(&table, &key(0, 0x108)), Some(vec![3]));
        assert_eq!(found(&table, &key(0, 9)), None);
        // A removed group is free for the next mask.
        table.remove(&EntryRef { mask: 0, value: Arc::from([7u64]) }, 1);
        table.remove(&EntryRef { mask: 0, value: Arc::from([8u64]) }, 3);
        add(&mut table, 4, 1, 0, 0, 0).unwrap();
        assert_eq!(found(&table, &key(0, 7)), Some(vec![4]), "before the second mask now");
        table.remove(&wide, 2);
        assert_eq!(found(&table, &key(0, 7)), Some(vec![4]));
    }

    #[test]
    fn rules_with_equal_matches_share_an_entry_and_action() {
        let mut table = Table::new(70);
        let first = add(&mut table, 1, 0, 0xff, 7, 5).unwrap();
        add(&mut table, 2, 0, 0xff, 7, 5).unwrap();
        assert_eq!(add(&mut table, 3, 0, 0xff, 7, 6).unwrap_err(), Errno::EXIST);
        assert_eq!(found(&table, &key(0, 7)), Some(vec![1, 2]));
        table.remove(&first, 1);
        assert_eq!(found(&table, &key(0, 7)), Some(vec![2]));
    }

    #[test]
    fn a_table_has_six_large_groups_and_single_entries() {
        let mut table = Table::new(70);
        for rule in 0..60 {
            add(&mut table, rule, 0, 0xff, u64::from(rule), 0).unwrap();
        }
        // The next mask gets only single entries; ten are left.
        for rule in 0..10 {
            add(&mut table, 100 + rule, 1, 0xff, u64::from(rule), 0).unwrap();
        }
        assert_eq!(add(&mut table, 200, 1, 0xff, 99, 0).unwrap_err(), Errno::NOSPC);
        assert_eq!(add(&mut table, 200, 0, 0xff, 99, 0).unwrap_err(), Errno::NOSPC);
        assert_eq!(found(&table, &key(0, 59)), Some(vec![59]));
        assert_eq!(found(&table, &key(1, 9)), Some(vec![0]), "zero of the first mask comes first");
    }

    #[test]
    fn hundred_thousand_rules_are_found_and_removed() {
        let mut table = Table::new(1 << 17);
        let entry_refs: Vec<EntryRef> =
            (0..100_000).map(|rule| add(&mut table, rule, 3, u64::MAX, u64::from(rule) << 20, 0).unwrap()).collect();
        for rule in [0, 1, 50_000, 99_999] {
            assert_eq!(found(&table, &key(3, u64::from(rule) << 20)), Some(vec![rule]));
        }
        for (rule, entry_ref) in (0..).zip(&entry_refs) {
            table.remove(entry_ref, rule);
        }
        assert!(table.is_empty() && table.groups.is_empty() && table.large == 0);
    }
}
