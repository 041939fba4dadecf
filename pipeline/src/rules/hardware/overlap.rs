//! Which rules a packet can fit both: found through the bits that two sets of rules have in common, not by asking every rule.
//!
//! Rules with the same mask are a group. Two rules overlap if they agree in the bits that both compare, so the rules of a group that
//! overlap with another rule are those that have its values in the bits common to both masks: one look into a hash table of the group
//! over these bits, which is made when it is first needed. Where there are no common bits, all of the group overlap.
//!
//! Patterns are compared bit by bit: rules that exclude each other only through several masked protocol numbers at once are taken to
//! overlap. That keeps rules apart which need not be, never the other way round.

use std::collections::HashMap;

use super::super::words::Pattern;

/// Groups up to this size are looked through one by one.
const FEW: usize = 32;
/// Most hash tables of one group; rules that would need more are looked through one by one.
const TABLES: usize = 24;

type Mask = Box<[(u8, u64)]>;

/// Rules by their patterns. `u32` is the caller's name of a rule.
#[derive(Debug, Default)]
pub(super) struct Index {
    groups: Vec<Group>,
    by_mask: HashMap<Mask, usize>,
}

#[derive(Debug)]
struct Group {
    mask: Mask,
    members: Vec<(u32, Box<[u64]>)>,
    place: HashMap<u32, usize>,
    /// By common mask: rules by their values in it.
    tables: HashMap<Mask, HashMap<u64, Vec<u32>>>,
}

impl Index {
    pub(super) fn insert(&mut self, rule: u32, pattern: &Pattern) {
        let at = *self.by_mask.entry(pattern.mask.clone()).or_insert_with(|| {
            self.groups.push(Group {
                mask: pattern.mask.clone(),
                members: Vec::new(),
                place: HashMap::new(),
                tables: HashMap::new(),
            });
            self.groups.len() - 1
        });
        let group = &mut self.groups[at];
        group.place.insert(rule, group.members.len());
        group.members.push((rule, pattern.value.clone()));
        for (common, table) in &mut group.tables {
            table.entry(under(common, &group.mask, &pattern.value)).or_default().push(rule);
        }
    }

    pub(super) fn remove(&mut self, rule: u32, pattern: &Pattern) {
        let Some(&at) = self.by_mask.get(&pattern.mask) else { return };
        let group = &mut self.groups[at];
        let Some(place) = group.place.remove(&rule) else { return };
        group.members.swap_remove(place);
        if let Some((moved, _)) = group.members.get(place) {
            group.place.insert(*moved, place);
        }
        for (common, table) in &mut group.tables {
            let hash = under(common, &group.mask, &pattern.value);
            if let Some(rules) = table.get_mut(&hash) {
                rules.retain(|other| *other != rule);
                if rules.is_empty() {
                    table.remove(&hash);
                }
            }
        }
        if group.members.len() <= FEW {
            group.tables.clear();
        }
    }

    /// All rules that overlap with a pattern, itself included if it is there.
    pub(super) fn overlapping(&mut self, pattern: &Pattern, mut each: impl FnMut(u32)) {
        for group in &mut self.groups {
            if group.members.is_empty() {
                continue;
            }
            let common = common(&group.mask, &pattern.mask);
            if common.is_empty() {
                group.members.iter().for_each(|(rule, _)| each(*rule));
                continue;
            }
            let wanted = under_values(&common, &pattern.mask, &pattern.value);
            let known = group.tables.contains_key(&common);
            if group.members.len() > FEW && (known || group.tables.len() < TABLES) {
                let Group { mask, members, tables, place, .. } = group;
                let table = tables.entry(common.clone()).or_insert_with(|| {
                    let mut table: HashMap<u64, Vec<u32>> = HashMap::with_capacity(members.len());
                    for (rule, value) in members.iter() {
                        table.entry(under(&common, mask, value)).or_default().push(*rule);
                    }
                    table
                });
                let Some(rules) = table.get(&hash(&wanted)) else { continue };
                // Two values may have one hash.
                for rule in rules {
                    let agrees = place.get(rule).and_then(|at| members.get(*at));
                    if agrees.is_some_and(|(_, value)| under_values(&common, mask, value) == wanted) {
                        each(*rule);
                    }
                }
            } else {
                for (rule, value) in &group.members {
                    if under_values(&common, &group.mask, value) == wanted {
                        each(*rule);
                    }
                }
            }
        }
    }
}

/// Bits of both.
fn common(a: &[(u8, u64)], b: &[(u8, u64)]) -> Mask {
    let (mut i, mut j, mut both) = (0, 0, Vec::new());
    while let (Some(&(word_a, mask_a)), Some(&(word_b, mask_b))) = (a.get(i), b.get(j)) {
        match word_a.cmp(&word_b) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                if mask_a & mask_b != 0 {
                    both.push((word_a, mask_a & mask_b));
                }
                (i, j) = (i + 1, j + 1);
            }
        }
    }
    both.into()
}

/// Values in the bits of `common`, of which all words are in `mask`.
fn under_values(common: &[(u8, u64)], mask: &[(u8, u64)], value: &[u64]) -> Vec<u64> {
    let mut words = mask.iter().zip(value);
    let mut out = Vec::with_capacity(common.len());
    for &(word, bits) in common {
        let found = words.by_ref().find(|((other, _), _)| *other == word);
        out.push(found.map_or(0, |(_, value)| value & bits));
    }
    out
}

fn under(common: &[(u8, u64)], mask: &[(u8, u64)], value: &[u64]) -> u64 {
    hash(&under_values(common, mask, value))
}

fn hash(words: &[u64]) -> u64 {
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
    BuildHasherDefault::<DefaultHasher>::default().hash_one(words)
}

/// Whether a packet can fit both.
#[cfg(test)]
pub(super) fn overlap(a: &Pattern, b: &Pattern) -> bool {
    let common = common(&a.mask, &b.mask);
    under_values(&common, &a.mask, &a.value) == under_values(&common, &b.mask, &b.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_rulelab::{Rng, make};

    #[test]
    fn finds_exactly_those_that_overlap() {
        for seed in 0..30 {
            let mut rng = Rng::new(seed);
            let rules = make::rules(&mut rng, 120);
            let patterns: Vec<Pattern> = rules.iter().map(|rule| Pattern::of(&rule.fields())).collect();
            let mut index = Index::default();
            let mut there: Vec<usize> = Vec::new();
            for (i, pattern) in patterns.iter().enumerate() {
                index.insert(i as u32, pattern);
                there.push(i);
                if i % 3 == 2 {
                    let gone = there.swap_remove(rng.below(there.len() as u64) as usize);
                    index.remove(gone as u32, &patterns[gone]);
                }
                let mut found = Vec::new();
                index.overlapping(pattern, |rule| found.push(rule as usize));
                found.sort_unstable();
                let mut expected: Vec<usize> =
                    there.iter().copied().filter(|j| overlap(pattern, &patterns[*j])).collect();
                expected.sort_unstable();
                assert_eq!(found, expected, "seed {seed}, rule {i}");
                // What the rule types say overlaps must be among them.
                for &j in &there {
                    if wirepath_pmd::flow::overlaps(&rules[i].fields(), &rules[j].fields()) {
                        assert!(overlap(pattern, &patterns[j]), "{} and {}", rules[i], rules[j]);
                    }
                }
            }
        }
    }
}
