//! A flow table as the kernel fills it: groups of entries with one mask each, an entry with one value. Source: Linux
//! `drivers/net/ethernet/mellanox/mlx5/core/fs_core.c` (automatic groups).
//!
//! A new mask gets a group; the first few groups are large, later ones have one entry. The device asks groups in the order in which they
//! lie. For looking things up, groups of the same mask are one: a value stands in one of them only.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use rustix::io::Errno;

use super::key::{Key, WORDS};
use super::{Action, Counter};
use crate::device::ObjectId;

/// Large groups of a table.
const LARGE_GROUPS: u32 = 6;
/// Entries that are compared one after the other; more are hashed.
const FEW: usize = 3;
/// Words of a short mask.
const SHORT: usize = 6;

/// Which bits of a key a group compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mask {
    /// Parts that are looked at.
    pub(super) criteria: u8,
    /// It looks at the bits that say whether layers are in order.
    pub(super) checks: bool,
    words: Box<[(u8, u64)]>,
}

impl Mask {
    pub(super) fn new(key: &Key, criteria: u8) -> Self {
        let words = (0u8..).zip(key.0).filter(|(_, word)| *word != 0).collect();
        Self { criteria, checks: super::looks_at_checks(key), words }
    }

    /// Words that are looked at, and which of their bits.
    pub(super) fn words(&self) -> &[(u8, u64)] {
        &self.words
    }

    /// The words of a key that count.
    fn of(&self, key: &Key) -> Arc<[u64]> {
        self.words.iter().map(|(at, mask)| key.0[usize::from(*at)] & mask).collect()
    }
}

/// Where an entry's packets go.
#[derive(Clone, Debug)]
pub(super) struct Destination {
    /// The rule that wants it.
    pub(super) rule: ObjectId,
    pub(super) qp: Option<ObjectId>,
    pub(super) counter: Option<Arc<Counter>>,
}

/// An entry.
#[derive(Debug)]
pub(super) struct Entry {
    /// First index of its group.
    group: u32,
    pub(super) action: Action,
    pub(super) destinations: Vec<Destination>,
}

/// A run of indexes.
#[derive(Debug)]
struct Group {
    start: u32,
    size: u32,
    used: u32,
    mask: u32,
}

/// All groups of a mask.
#[derive(Debug)]
struct Masked {
    id: u32,
    mask: Mask,
    entries: HashMap<Arc<[u64]>, Entry, BuildHasherDefault<Mix>>,
}

/// A hash of few words. Programs that choose values which collide slow down nobody but themselves.
#[derive(Clone, Copy, Debug, Default)]
struct Mix(u64);

impl Hasher for Mix {
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

impl Masked {
    #[inline]
    fn find(&self, key: &Key) -> Option<&Entry> {
        if self.entries.len() <= FEW {
            let fits = |value: &[u64]| {
                self.mask.words.iter().zip(value).all(|((at, mask), value)| key.0[usize::from(*at)] & mask == *value)
            };
            return self.entries.iter().find(|(value, _)| fits(value)).map(|(_, entry)| entry);
        }
        // Most masks are short; room for others costs more.
        if self.mask.words.len() <= SHORT { self.hashed::<SHORT>(key) } else { self.hashed::<WORDS>(key) }
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

/// What finds an entry again.
#[derive(Clone, Debug)]
pub(super) struct Place {
    mask: u32,
    value: Arc<[u64]>,
}

/// A table.
#[derive(Debug)]
pub(super) struct Table {
    size: u32,
    /// In the order of their indexes.
    groups: Vec<Group>,
    large: u32,
    masks: Vec<Masked>,
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

    /// The first entry that a key fits.
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

    /// Adds a rule: to the entry of its value if there is one.
    ///
    /// # Errors
    /// `EEXIST` if that entry does something else, `ENOSPC` if there is no room.
    pub(super) fn add(
        &mut self,
        mask: Mask,
        value: &Key,
        action: Action,
        destination: Destination,
    ) -> Result<Place, (Errno, String)> {
        let at = self.masks.iter().position(|masked| masked.mask == mask);
        let value = at.map_or_else(|| mask.of(value), |at| self.masks[at].mask.of(value));
        if let Some(masked) = at.map(|at| &mut self.masks[at])
            && let Some(entry) = masked.entries.get_mut(&value)
        {
            if let Some(why) = entry.action.contradicts(&action) {
                return Err((Errno::EXIST, format!("a rule with this match {why}")));
            }
            entry.action.join(&action);
            entry.destinations.push(destination);
            return Ok(Place { mask: masked.id, value });
        }
        let id = at.map_or(self.next_mask, |at| self.masks[at].id);
        let group = self.room(id)?;
        if at.is_none() {
            self.next_mask += 1;
            self.masks.push(Masked { id, mask, entries: HashMap::default() });
        }
        let masked = match at {
            Some(at) => &mut self.masks[at],
            None => self.masks.last_mut().expect("it was just added"),
        };
        masked.entries.insert(Arc::clone(&value), Entry { group, action, destinations: vec![destination] });
        self.entries += 1;
        Ok(Place { mask: id, value })
    }

    /// An index in a group of this mask: the start of the group.
    fn room(&mut self, mask: u32) -> Result<u32, (Errno, String)> {
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

    /// Takes a rule out.
    pub(super) fn remove(&mut self, place: &Place, rule: ObjectId) {
        let Some(at) = self.masks.iter().position(|masked| masked.id == place.mask) else { return };
        let masked = &mut self.masks[at];
        let Some(entry) = masked.entries.get_mut(&place.value) else { return };
        entry.destinations.retain(|destination| destination.rule != rule);
        if !entry.destinations.is_empty() {
            return;
        }
        let start = entry.group;
        masked.entries.remove(&place.value);
        self.entries -= 1;
        if masked.entries.is_empty() {
            // Those behind keep their order.
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

    fn add(table: &mut Table, rule: ObjectId, word: usize, mask: u64, value: u64, tag: u32) -> Result<Place, Errno> {
        let action = Action { tag: Some(tag), ..Action::default() };
        let destination = Destination { rule, qp: Some(rule), counter: None };
        table.add(Mask::new(&key(word, mask), 1), &key(word, value), action, destination).map_err(|(errno, _)| errno)
    }

    fn found(table: &Table, key: &Key) -> Option<Vec<ObjectId>> {
        table.find(key).map(|entry| entry.destinations.iter().map(|destination| destination.rule).collect())
    }

    #[test]
    fn groups_are_asked_in_the_order_in_which_they_were_made() {
        let mut table = Table::new(70);
        add(&mut table, 1, 0, 0xff, 7, 0).unwrap();
        let wide = add(&mut table, 2, 0, 0xffff, 7, 0).unwrap();
        add(&mut table, 3, 0, 0xff, 8, 0).unwrap();
        assert_eq!(found(&table, &key(0, 7)), Some(vec![1]), "the first mask, though the second says more");
        assert_eq!(found(&table, &key(0, 0x108)), Some(vec![3]));
        assert_eq!(found(&table, &key(0, 9)), None);
        // What is gone leaves its place to the next mask.
        table.remove(&Place { mask: 0, value: Arc::from([7u64]) }, 1);
        table.remove(&Place { mask: 0, value: Arc::from([8u64]) }, 3);
        add(&mut table, 4, 1, 0, 0, 0).unwrap();
        assert_eq!(found(&table, &key(0, 7)), Some(vec![4]), "before the second mask now");
        table.remove(&wide, 2);
        assert_eq!(found(&table, &key(0, 7)), Some(vec![4]));
    }

    #[test]
    fn the_same_match_goes_to_all_and_may_not_do_something_else() {
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
        // Another mask finds only single entries, ten of them.
        for rule in 0..10 {
            add(&mut table, 100 + rule, 1, 0xff, u64::from(rule), 0).unwrap();
        }
        assert_eq!(add(&mut table, 200, 1, 0xff, 99, 0).unwrap_err(), Errno::NOSPC);
        assert_eq!(add(&mut table, 200, 0, 0xff, 99, 0).unwrap_err(), Errno::NOSPC);
        assert_eq!(found(&table, &key(0, 59)), Some(vec![59]));
        assert_eq!(found(&table, &key(1, 9)), Some(vec![0]), "zero of the first mask comes first");
    }

    #[test]
    fn a_hundred_thousand_rules_are_found_and_go_again() {
        let mut table = Table::new(1 << 17);
        let places: Vec<Place> =
            (0..100_000).map(|rule| add(&mut table, rule, 3, u64::MAX, u64::from(rule) << 20, 0).unwrap()).collect();
        for rule in [0, 1, 50_000, 99_999] {
            assert_eq!(found(&table, &key(3, u64::from(rule) << 20)), Some(vec![rule]));
        }
        for (rule, place) in (0..).zip(&places) {
            table.remove(place, rule);
        }
        assert!(table.is_empty() && table.groups.is_empty() && table.large == 0);
    }
}
