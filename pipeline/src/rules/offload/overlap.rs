//! Overlap index: finds the rules above a rule that overlap it, by groups of rules and not rule by rule.
//!
//! Rules of one mask and one header stack form a **group**. Two groups whose header stacks exclude each other
//! never overlap. In all other pairs of groups, two rules overlap if they agree in the bits that both masks
//! have. Each of the two groups has a **table** over these bits. It sorts the rules by value, then by state
//! in the device, then by matching order. This has two consequences.
//!
//! - The rules above a rule are found with one lookup for each overlapping group and each state.
//! - A changed rule affects rules below only if it is the uppermost of its state. It affects them only down
//!   to the next rule of that state.
//!
//! Both costs depend on the number of groups and not on the number of rules.
//!
//! The index compares patterns bit by bit. It never misses an overlap, but it may report one that does not
//! exist:
//!
//! - for rules that exclude each other only through several masked protocol numbers together,
//! - for values with equal hashes,
//! - for groups that would need more than [`TABLES`] tables, which compare fewer bits.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;

use super::plan::RuleOrder;
use crate::rules::classifier::match_key::{PER_LEVEL, Pattern};

/// State of a rule in the device, as the plan encodes it. The index only compares states.
pub(super) type OffloadState = u32;

/// Maximum number of tables of a group, in addition to one over no bits.
const TABLES: usize = 32;
/// Number of empty groups that are kept, so that a rule that is added again finds its tables.
const EMPTY: usize = 16;

type Mask = Box<[(u8, u64)]>;

/// The index. Callers identify rules by small numbers (`u32`).
#[derive(Debug, Default)]
pub(super) struct OverlapIndex {
    members: Vec<Option<Member>>,
    groups: Vec<Option<Group>>,
    free: Vec<u32>,
    empty: VecDeque<u32>,
    by_shape: HashMap<Shape, u32>,
}

#[derive(Debug)]
struct Member {
    group: u32,
    value: Box<[u64]>,
    order: RuleOrder,
    /// State of the rule; `None`: the rule is not in the tables yet.
    state: Option<OffloadState>,
}

/// Mask and header stacks that the rules of a group share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Shape {
    mask: Mask,
    /// Values of the words that identify the headers.
    stacks: [u64; 2],
}

#[derive(Debug)]
struct Group {
    shape: Shape,
    rules: usize,
    /// Tables of the group. The first one covers all bits.
    tables: Vec<Table>,
    pairs: Vec<GroupPair>,
}

/// A group whose rules can overlap those of this group, and the tables of both. It can be the group itself.
#[derive(Clone, Copy, Debug)]
struct GroupPair {
    other: u32,
    own_table: u32,
    other_table: u32,
}

#[derive(Debug, Default)]
struct Table {
    bits: Mask,
    /// Number of group pairs that use the table.
    users: u32,
    rules: BTreeMap<(u64, OffloadState, RuleOrder), u32>,
}

const TOP: RuleOrder = (0, 0);
const BOTTOM: RuleOrder = (u32::MAX, u64::MAX);

impl Table {
    /// Returns how far down a rule with this value and state affects other rules: to the next rule of the
    /// same state, or not at all.
    fn affected_until(&self, key: u64, state: OffloadState, order: RuleOrder) -> RuleOrder {
        let first = self.rules.range((key, state, TOP)..=(key, state, BOTTOM)).next();
        match first {
            None => BOTTOM,
            Some((&(_, _, first), _)) if first > order => first,
            Some(_) => order,
        }
    }

    /// Returns the uppermost rule of each state among the rules with this value.
    fn states<'a>(&'a self, key: u64) -> impl Iterator<Item = (OffloadState, RuleOrder, u32)> + 'a {
        let mut next = Some(0);
        std::iter::from_fn(move || {
            let (&(found, state, order), &rule) = self.rules.range((key, next?, TOP)..).next()?;
            if found != key {
                return None;
            }
            next = state.checked_add(1);
            Some((state, order, rule))
        })
    }

    /// Passes the rules with this value that lie below `above`, down to and including `last`, to `each`. The
    /// rule at `last` is included because its next rule above is not itself.
    fn between(&self, key: u64, (above, last): (RuleOrder, RuleOrder), mut each: impl FnMut(RuleOrder, u32)) {
        for (state, first, _) in self.states(key) {
            if first > last {
                continue;
            }
            let range = (Bound::Excluded((key, state, above)), Bound::Included((key, state, last)));
            self.rules.range(range).for_each(|((_, _, order), rule)| each(*order, *rule));
        }
    }
}

impl Group {
    fn has_room(&self, bits: &Mask) -> bool {
        bits.is_empty()
            || self.tables.len() < TABLES
            || self.tables.iter().any(|table| table.users == 0 || table.bits == *bits)
    }

    fn key(&self, table: u32, value: &[u64]) -> u64 {
        self.tables.get(table as usize).map_or(0, |table| masked_hash(&table.bits, &self.shape.mask, value))
    }
}

impl OverlapIndex {
    /// Inserts a rule. Other rules do not see it until its state is set.
    pub(super) fn insert(&mut self, rule: u32, order: RuleOrder, pattern: &Pattern) {
        let group = self.group(pattern);
        let at = rule as usize;
        if at >= self.members.len() {
            self.members.resize_with(at + 1, || None);
        }
        self.members[at] = Some(Member { group, value: pattern.value.clone(), order, state: None });
        if let Some(group) = self.group_mut(group) {
            group.rules += 1;
        }
    }

    /// Removes a rule.
    pub(super) fn remove(&mut self, rule: u32, notify: impl FnMut(RuleOrder, u32)) {
        let Some(state) = self.member(rule).map(|member| member.state) else { return };
        self.update_tables(rule, state, None, notify);
        let Some(member) = self.members[rule as usize].take() else { return };
        let Some(group) = self.group_mut(member.group) else { return };
        group.rules -= 1;
        if group.rules == 0 {
            self.empty.push_back(member.group);
            if self.empty.len() > EMPTY {
                self.remove_empty_group();
            }
        }
    }

    /// Sets the state of a rule. The rules below that it may affect are passed to `notify` (order, number).
    pub(super) fn set_state(&mut self, rule: u32, state: OffloadState, notify: impl FnMut(RuleOrder, u32)) {
        let Some(Some(member)) = self.members.get_mut(rule as usize) else { return };
        let from = member.state.replace(state);
        if from != Some(state) {
            self.update_tables(rule, from, Some(state), notify);
        }
    }

    /// Passes the overlapping rules above to `each`: the uppermost rule of each state in each group, with
    /// state, order and number.
    pub(super) fn above(&self, rule: u32, each: impl FnMut(OffloadState, RuleOrder, u32)) {
        if let Some((member, group)) = self.member(rule).and_then(|member| Some((member, self.group_of(member.group)?)))
        {
            self.uppermost(group, &member.value, member.order, each);
        }
    }

    /// Returns the order of the uppermost rule that overlaps a pattern. Creates the group of the pattern if
    /// necessary.
    pub(super) fn first(&mut self, pattern: &Pattern) -> Option<RuleOrder> {
        let group = self.group(pattern);
        let mut first: Option<RuleOrder> = None;
        let look = |_, order: RuleOrder, _| first = Some(first.map_or(order, |first| first.min(order)));
        self.uppermost(self.group_of(group)?, &pattern.value, BOTTOM, look);
        first
    }

    /// Passes the overlapping rules below to `each`.
    pub(super) fn below(&self, rule: u32, mut each: impl FnMut(RuleOrder, u32)) {
        let Some(member) = self.member(rule) else { return };
        let Some(group) = self.group_of(member.group) else { return };
        for pair in &group.pairs {
            let key = group.key(pair.own_table, &member.value);
            if let Some(table) = self.table(pair.other, pair.other_table) {
                table.between(key, (member.order, BOTTOM), &mut each);
            }
        }
    }

    /// Returns true if a rule requires all of this pattern.
    pub(super) fn demands(&self, rule: u32, what: &Pattern) -> bool {
        let Some(member) = self.member(rule) else { return false };
        let Some(group) = self.group_of(member.group) else { return false };
        what.mask.iter().zip(&what.value).all(|(&(word, mask), value)| {
            let mut words = group.shape.mask.iter().zip(&member.value);
            words.any(|(&(own, bits), own_value)| own == word && bits & mask == mask && own_value & mask == *value)
        })
    }

    /// Returns the number of entries in all tables, which determine the memory of the index.
    pub(super) fn entries(&self) -> usize {
        self.groups.iter().flatten().flat_map(|group| &group.tables).map(|table| table.rules.len()).sum()
    }

    fn member(&self, rule: u32) -> Option<&Member> {
        self.members.get(rule as usize)?.as_ref()
    }

    fn group_of(&self, group: u32) -> Option<&Group> {
        self.groups.get(group as usize)?.as_ref()
    }

    fn group_mut(&mut self, group: u32) -> Option<&mut Group> {
        self.groups.get_mut(group as usize)?.as_mut()
    }

    fn table(&self, group: u32, table: u32) -> Option<&Table> {
        self.group_of(group)?.tables.get(table as usize)
    }

    fn uppermost(
        &self,
        group: &Group,
        value: &[u64],
        order: RuleOrder,
        mut each: impl FnMut(OffloadState, RuleOrder, u32),
    ) {
        for pair in &group.pairs {
            let Some(table) = self.table(pair.other, pair.other_table).filter(|table| !table.rules.is_empty()) else {
                continue;
            };
            let found = table.states(group.key(pair.own_table, value));
            found.filter(|(_, found, _)| *found < order).for_each(|(state, found, rule)| each(state, found, rule));
        }
    }

    /// Updates the tables when a rule changes its state, is added (`from` is `None`) or is removed (`to` is
    /// `None`).
    fn update_tables(
        &mut self,
        rule: u32,
        from: Option<OffloadState>,
        to: Option<OffloadState>,
        mut notify: impl FnMut(RuleOrder, u32),
    ) {
        let Self { members, groups, .. } = self;
        let Some(member) = members.get(rule as usize).and_then(Option::as_ref) else { return };
        let (at, order) = (member.group, member.order);
        let Some(group) = groups.get_mut(at as usize).and_then(Option::as_mut) else { return };
        let mut keys = [(0, TOP); TABLES + 1];
        for (table, (key, affected_until)) in group.tables.iter_mut().zip(&mut keys) {
            if table.users == 0 {
                continue;
            }
            *key = masked_hash(&table.bits, &group.shape.mask, &member.value);
            *affected_until = order;
            if let Some(from) = from {
                table.rules.remove(&(*key, from, order));
                *affected_until = table.affected_until(*key, from, order).max(*affected_until);
            }
            if let Some(to) = to {
                *affected_until = table.affected_until(*key, to, order).max(*affected_until);
                table.rules.insert((*key, to, order), rule);
            }
        }
        let Some(group) = self.group_of(at) else { return };
        for pair in &group.pairs {
            let (key, affected_until) = keys[pair.own_table as usize];
            if let Some(table) = self.table(pair.other, pair.other_table).filter(|_| affected_until > order) {
                table.between(key, (order, affected_until), &mut notify);
            }
        }
    }

    /// Returns the group of a pattern, and creates it if necessary.
    fn group(&mut self, pattern: &Pattern) -> u32 {
        let shape = Shape::of(pattern);
        if let Some(&at) = self.by_shape.get(&shape) {
            self.empty.retain(|empty| *empty != at);
            return at;
        }
        let group = Group { shape: shape.clone(), rules: 0, tables: Vec::new(), pairs: Vec::new() };
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                self.groups.push(None);
                self.groups.len() as u32 - 1
            }
        };
        self.groups[at as usize] = Some(group);
        self.by_shape.insert(shape, at);
        self.pair_groups(at, at);
        for other in 0..self.groups.len() as u32 {
            if other != at && self.group_of(other).is_some() {
                self.pair_groups(at, other);
            }
        }
        at
    }

    /// Records how the rules of two groups can overlap, if they can.
    fn pair_groups(&mut self, a: u32, b: u32) {
        let (Some(first), Some(second)) = (self.group_of(a), self.group_of(b)) else { return };
        let Some(bits) = common(&first.shape, &second.shape) else { return };
        let both = |bits: &Mask| first.has_room(bits) && second.has_room(bits);
        let bits = if both(&bits) {
            bits
        } else {
            // Not all common bits get a table, so the largest available subset is used.
            let tables = first.tables.iter().chain(&second.tables).map(|table| &table.bits);
            let found = tables.filter(|other| is_within(other, &bits) && both(other));
            found
                .max_by_key(|other| other.iter().map(|(_, bits)| bits.count_ones()).sum::<u32>())
                .cloned()
                .unwrap_or_default()
        };
        let (Some(table_a), Some(table_b)) = (self.table_for(a, &bits), self.table_for(b, &bits)) else { return };
        let mut note = |group: u32, pair: GroupPair| {
            if let Some(group) = self.group_mut(group) {
                group.tables[pair.own_table as usize].users += 1;
                group.pairs.push(pair);
            }
        };
        note(a, GroupPair { other: b, own_table: table_a, other_table: table_b });
        if a != b {
            note(b, GroupPair { other: a, own_table: table_b, other_table: table_a });
        }
    }

    /// Returns the table of a group over these bits. Creates and fills it if necessary.
    fn table_for(&mut self, group: u32, bits: &Mask) -> Option<u32> {
        let Self { members, groups, .. } = self;
        let group = groups.get_mut(group as usize)?.as_mut()?;
        if let Some(at) = group.tables.iter().position(|table| table.users > 0 && table.bits == *bits) {
            return Some(at as u32);
        }
        let mut table = Table { bits: bits.clone(), ..Table::default() };
        // The first table contains all rules.
        for (&(_, state, order), &rule) in group.tables.first().into_iter().flat_map(|first| &first.rules) {
            if let Some(member) = members.get(rule as usize).and_then(Option::as_ref) {
                table.rules.insert((masked_hash(bits, &group.shape.mask, &member.value), state, order), rule);
            }
        }
        let at = group.tables.iter().position(|table| table.users == 0).unwrap_or(group.tables.len());
        match group.tables.get_mut(at) {
            Some(free) => *free = table,
            None => group.tables.push(table),
        }
        Some(at as u32)
    }

    /// Removes the group that has been empty the longest.
    fn remove_empty_group(&mut self) {
        let Some(at) = self.empty.pop_front() else { return };
        let Some(group) = self.groups[at as usize].take() else { return };
        self.by_shape.remove(&group.shape);
        self.free.push(at);
        for pair in group.pairs.iter().filter(|pair| pair.other != at) {
            let Some(other) = self.group_mut(pair.other) else { continue };
            other.pairs.retain(|back| back.other != at);
            if let Some(table) = other.tables.get_mut(pair.other_table as usize) {
                table.users -= 1;
                if table.users == 0 {
                    *table = Table::default();
                }
            }
        }
    }
}

/// Returns true if a word identifies headers.
fn is_stack(word: u8) -> bool {
    usize::from(word).is_multiple_of(PER_LEVEL) && usize::from(word) < 2 * PER_LEVEL
}

impl Shape {
    fn of(pattern: &Pattern) -> Self {
        let mut stacks = [0; 2];
        for (&(word, _), value) in pattern.mask.iter().zip(&pattern.value).filter(|((word, _), _)| is_stack(*word)) {
            stacks[usize::from(word) / PER_LEVEL] = *value;
        }
        Self { mask: pattern.mask.clone(), stacks }
    }
}

/// Returns the bits that two shapes have in common, header words excluded, or `None` if no packet has the
/// header stacks of both.
fn common(a: &Shape, b: &Shape) -> Option<Mask> {
    let (mut i, mut j, mut both) = (0, 0, Vec::new());
    while let (Some(&(word_a, mask_a)), Some(&(word_b, mask_b))) = (a.mask.get(i), b.mask.get(j)) {
        match word_a.cmp(&word_b) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                let bits = mask_a & mask_b;
                if is_stack(word_a) {
                    let stack = usize::from(word_a) / PER_LEVEL;
                    if (a.stacks[stack] ^ b.stacks[stack]) & bits != 0 {
                        return None;
                    }
                } else if bits != 0 {
                    both.push((word_a, bits));
                }
                (i, j) = (i + 1, j + 1);
            }
        }
    }
    Some(both.into())
}

/// Returns true if all bits of `these` are in `those`.
fn is_within(these: &[(u8, u64)], those: &[(u8, u64)]) -> bool {
    these.iter().all(|(word, bits)| those.iter().any(|(other, all)| other == word && bits & !all == 0))
}

/// Returns the hash of the values in some bits. All their words are in `mask`.
fn masked_hash(bits: &[(u8, u64)], mask: &[(u8, u64)], value: &[u64]) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    if bits.is_empty() {
        return 0;
    }
    let mut words = mask.iter().zip(value);
    let mut hasher = DefaultHasher::new();
    for &(word, bits) in bits {
        let found = words.by_ref().find(|((other, _), _)| *other == word);
        hasher.write_u64(found.map_or(0, |(_, value)| value & bits));
    }
    hasher.finish()
}

/// Returns true if a packet can match both patterns.
#[cfg(test)]
pub(super) fn overlap(a: &Pattern, b: &Pattern) -> bool {
    a.mask.iter().zip(&a.value).all(|((word, mask), value)| {
        let mut others = b.mask.iter().zip(&b.value).filter(|((other, _), _)| other == word);
        others.all(|((_, other), other_value)| (value ^ other_value) & mask & other == 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_rule_oracle::{Rng, generate};

    /// A rule in the index.
    struct TestRule {
        pattern: Pattern,
        order: RuleOrder,
        state: OffloadState,
    }

    /// Updates the uppermost order of a state.
    fn uppermost(found: &mut BTreeMap<OffloadState, RuleOrder>, state: OffloadState, order: RuleOrder) {
        let first = found.entry(state).or_insert(order);
        *first = order.min(*first);
    }

    #[test]
    fn index_reports_overlaps_and_affected_rules_exactly() {
        for seed in 0..30 {
            let mut rng = Rng::new(seed);
            let rules = generate::rules(&mut rng, 120);
            let mut index = OverlapIndex::default();
            let mut present: BTreeMap<u32, TestRule> = BTreeMap::new();
            // States above each rule at its last notification.
            let mut known: BTreeMap<u32, Vec<OffloadState>> = BTreeMap::new();
            let mut notify = Vec::new();
            for (i, rule) in rules.iter().enumerate() {
                let (number, order) = (i as u32, (rule.priority(), i as u64));
                let pattern = Pattern::of(&rule.fields());
                let state = rng.below(4) as OffloadState;
                index.insert(number, order, &pattern);
                index.set_state(number, state, |_, rule| notify.push(rule));
                present.insert(number, TestRule { pattern, order, state });
                notify.push(number);
                let other = *present.keys().nth(rng.index(present.len())).unwrap();
                match rng.below(3) {
                    0 => {
                        index.remove(other, |_, rule| notify.push(rule));
                        present.remove(&other);
                    }
                    1 => {
                        let state = rng.below(4) as OffloadState;
                        index.set_state(other, state, |_, rule| notify.push(rule));
                        present.get_mut(&other).unwrap().state = state;
                    }
                    _ => {}
                }
                let look = |rule| {
                    let mut above = BTreeMap::new();
                    index.above(rule, |state, order, _| uppermost(&mut above, state, order));
                    above
                };
                for rule in notify.drain(..) {
                    known.insert(rule, look(rule).into_keys().collect());
                }
                for (number, it) in &present {
                    let mut expected = BTreeMap::new();
                    let (mut lower, mut found) = (Vec::new(), Vec::new());
                    for (other, that) in present.iter().filter(|(_, that)| overlap(&it.pattern, &that.pattern)) {
                        if that.order < it.order {
                            uppermost(&mut expected, that.state, that.order);
                        } else if that.order > it.order {
                            lower.push(*other);
                        }
                    }
                    assert_eq!(look(*number), expected, "seed {seed}, step {i}, rule {number}");
                    assert!(
                        known[number].iter().eq(expected.keys()),
                        "seed {seed}, step {i}, rule {number} knows {:?}, not {expected:?}",
                        known[number]
                    );
                    index.below(*number, |_, rule| found.push(rule));
                    found.sort_unstable();
                    assert_eq!(found, lower, "seed {seed}, step {i}, rule {number}");
                }
                // Every overlap that the rule types report must be found.
                for (&other, that) in &present {
                    if wirepath_flow::overlaps(&rules[i].fields(), &rules[other as usize].fields()) {
                        assert!(
                            overlap(&Pattern::of(&rule.fields()), &that.pattern),
                            "{rule} and {}",
                            rules[other as usize]
                        );
                    }
                }
                let first = present.values().filter(|that| overlap(&Pattern::of(&rule.fields()), &that.pattern));
                let expected = first.map(|that| that.order).min();
                if present.contains_key(&number) {
                    assert_eq!(index.first(&Pattern::of(&rule.fields())), expected);
                }
            }
            (0..120).for_each(|rule| index.remove(rule, |_, _| {}));
            assert_eq!(index.entries(), 0, "seed {seed}");
            assert!(index.by_shape.len() <= EMPTY && index.by_shape.len() == index.empty.len());
        }
    }

    #[test]
    fn more_masks_than_tables_only_adds_false_overlaps() {
        let text = |i: u32, j: u32| format!("ingress: ipv4 src 10.0.0.0/{i} dst 10.0.0.0/{j} => drop");
        let mut index = OverlapIndex::default();
        let mut patterns = Vec::new();
        for (i, j) in (8..32).flat_map(|i| (8..32).step_by(5).map(move |j| (i, j))) {
            let rule: wirepath_flow::Rule = text(i, j).parse().unwrap();
            let pattern = Pattern::of(&rule.fields());
            let number = patterns.len() as u32;
            index.insert(number, (0, number.into()), &pattern);
            index.set_state(number, 0, |_, _| {});
            patterns.push(pattern);
        }
        assert!(index.groups.iter().flatten().all(|group| group.tables.len() <= TABLES + 1));
        for (a, pattern) in patterns.iter().enumerate() {
            let mut found = Vec::new();
            index.below(a as u32, |_, rule| found.push(rule as usize));
            for (b, other) in patterns.iter().enumerate().skip(a + 1) {
                assert!(found.contains(&b) || !overlap(pattern, other), "{a} and {b}");
            }
        }
    }
}
