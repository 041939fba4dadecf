//! Which rules stand above a rule and overlap with it, asked of groups of rules, not of every rule.
//!
//! Rules of one mask and one stack of headers are a **group**. Whether rules of two groups can overlap at all, and by which bits that is
//! decided, is a matter of the two groups: two stacks that exclude each other never meet; otherwise two rules overlap if they agree in
//! the bits that both masks have. Over these bits each of the two groups has a **table**, in which its rules are sorted: those with one
//! value lie together, and among them those of one standing in the device, the uppermost first. So
//!
//! - what a rule has above it is, for each group that its own can meet, one look for each standing that there is;
//! - a rule that comes, goes or stands differently matters below only if it is the uppermost of its standing, and then only as far
//!   down as the next one: nobody below that is told.
//!
//! Both take time by the number of groups, not of rules.
//!
//! Patterns are compared bit by bit: rules that exclude each other only through several masked protocol numbers at once are taken to
//! overlap. So are rules whose values have one hash, and those of a group that would need more tables than [`TABLES`], by fewer bits than
//! they have in common. That keeps rules apart which need not be, never the other way round.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;

use super::super::words::{PER_LEVEL, Pattern};
use super::plan::Place;

/// How a rule stands in the device, as the plan has it; the index only tells them apart.
pub(super) type Standing = u32;

/// Most tables of one group, one more for no bits at all.
const TABLES: usize = 32;
/// Groups without rules that are kept: a rule that comes again finds its tables.
const EMPTY: usize = 16;

type Mask = Box<[(u8, u64)]>;

/// Rules by their patterns. `u32` is the caller's number of a rule, which are few and small.
#[derive(Debug, Default)]
pub(super) struct Index {
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
    place: Place,
    /// `None`: it is not in the tables yet.
    standing: Option<Standing>,
}

/// What the rules of a group compare, and the headers that they are about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Shape {
    mask: Mask,
    /// Values of the words that say which headers there are.
    stacks: [u64; 2],
}

#[derive(Debug)]
struct Group {
    shape: Shape,
    rules: usize,
    /// The first is over all bits.
    tables: Vec<Table>,
    meets: Vec<Meeting>,
}

/// Another group, or the same, whose rules can overlap with those of this one, and by which tables of both.
#[derive(Clone, Copy, Debug)]
struct Meeting {
    other: u32,
    mine: u32,
    theirs: u32,
}

#[derive(Debug, Default)]
struct Table {
    bits: Mask,
    /// Meetings that need it.
    users: u32,
    rules: BTreeMap<(u64, Standing, Place), u32>,
}

const TOP: Place = (0, 0);
const BOTTOM: Place = (u32::MAX, u64::MAX);

impl Table {
    /// How far down a rule with this value matters that stands like this, apart from itself: to the next that does, or not at all.
    fn reach(&self, key: u64, standing: Standing, place: Place) -> Place {
        let first = self.rules.range((key, standing, TOP)..=(key, standing, BOTTOM)).next();
        match first {
            None => BOTTOM,
            Some((&(_, _, first), _)) if first > place => first,
            Some(_) => place,
        }
    }

    /// For each standing that there is among rules with this value.
    fn standings<'a>(&'a self, key: u64) -> impl Iterator<Item = (Standing, Place, u32)> + 'a {
        let mut next = Some(0);
        std::iter::from_fn(move || {
            let (&(found, standing, place), &rule) = self.rules.range((key, next?, TOP)..).next()?;
            if found != key {
                return None;
            }
            next = standing.checked_add(1);
            Some((standing, place, rule))
        })
    }

    /// Rules with this value below a place, down to another: the one there included, for which the next above is no longer itself.
    fn between(&self, key: u64, (above, last): (Place, Place), mut each: impl FnMut(Place, u32)) {
        for (standing, first, _) in self.standings(key) {
            if first > last {
                continue;
            }
            let range = (Bound::Excluded((key, standing, above)), Bound::Included((key, standing, last)));
            self.rules.range(range).for_each(|((_, _, place), rule)| each(*place, *rule));
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
        self.tables.get(table as usize).map_or(0, |table| under(&table.bits, &self.shape.mask, value))
    }
}

impl Index {
    /// Puts a rule in, which others do not see before it is said how it stands.
    pub(super) fn insert(&mut self, rule: u32, place: Place, pattern: &Pattern) {
        let group = self.group(pattern);
        let at = rule as usize;
        if at >= self.members.len() {
            self.members.resize_with(at + 1, || None);
        }
        self.members[at] = Some(Member { group, value: pattern.value.clone(), place, standing: None });
        if let Some(group) = self.group_mut(group) {
            group.rules += 1;
        }
    }

    /// Takes a rule out.
    pub(super) fn remove(&mut self, rule: u32, told: impl FnMut(Place, u32)) {
        let Some(standing) = self.member(rule).map(|member| member.standing) else { return };
        self.moved(rule, standing, None, told);
        let Some(member) = self.members[rule as usize].take() else { return };
        let Some(group) = self.group_mut(member.group) else { return };
        group.rules -= 1;
        if group.rules == 0 {
            self.empty.push_back(member.group);
            if self.empty.len() > EMPTY {
                self.forget();
            }
        }
    }

    /// How a rule stands now. `told` is given the rules below it (place, number) for which that may mean something.
    pub(super) fn stand(&mut self, rule: u32, standing: Standing, told: impl FnMut(Place, u32)) {
        let Some(Some(member)) = self.members.get_mut(rule as usize) else { return };
        let from = member.standing.replace(standing);
        if from != Some(standing) {
            self.moved(rule, from, Some(standing), told);
        }
    }

    /// Of the rules above that overlap, the uppermost of each standing in each group: its standing, place and number.
    pub(super) fn above(&self, rule: u32, each: impl FnMut(Standing, Place, u32)) {
        if let Some((member, group)) = self.member(rule).and_then(|member| Some((member, self.group_of(member.group)?)))
        {
            self.uppermost(group, &member.value, member.place, each);
        }
    }

    /// The uppermost of all rules that overlap with a pattern. Keeps a group for patterns of its kind.
    pub(super) fn first(&mut self, pattern: &Pattern) -> Option<Place> {
        let group = self.group(pattern);
        let mut first: Option<Place> = None;
        let look = |_, place: Place, _| first = Some(first.map_or(place, |first| first.min(place)));
        self.uppermost(self.group_of(group)?, &pattern.value, BOTTOM, look);
        first
    }

    /// Rules below that overlap.
    pub(super) fn below(&self, rule: u32, mut each: impl FnMut(Place, u32)) {
        let Some(member) = self.member(rule) else { return };
        let Some(group) = self.group_of(member.group) else { return };
        for meeting in &group.meets {
            let key = group.key(meeting.mine, &member.value);
            if let Some(table) = self.table(meeting.other, meeting.theirs) {
                table.between(key, (member.place, BOTTOM), &mut each);
            }
        }
    }

    /// Whether a rule demands all of this.
    pub(super) fn demands(&self, rule: u32, what: &Pattern) -> bool {
        let Some(member) = self.member(rule) else { return false };
        let Some(group) = self.group_of(member.group) else { return false };
        what.mask.iter().zip(&what.value).all(|(&(word, mask), value)| {
            let mut words = group.shape.mask.iter().zip(&member.value);
            words.any(|(&(own, bits), own_value)| own == word && bits & mask == mask && own_value & mask == *value)
        })
    }

    /// Entries in all tables: what the memory of the index grows with.
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

    fn uppermost(&self, group: &Group, value: &[u64], place: Place, mut each: impl FnMut(Standing, Place, u32)) {
        for meeting in &group.meets {
            let Some(table) = self.table(meeting.other, meeting.theirs).filter(|table| !table.rules.is_empty()) else {
                continue;
            };
            let found = table.standings(group.key(meeting.mine, value));
            found
                .filter(|(_, found, _)| *found < place)
                .for_each(|(standing, found, rule)| each(standing, found, rule));
        }
    }

    /// A rule stands differently, has come (`from` is `None`), or goes.
    fn moved(&mut self, rule: u32, from: Option<Standing>, to: Option<Standing>, mut told: impl FnMut(Place, u32)) {
        let Self { members, groups, .. } = self;
        let Some(member) = members.get(rule as usize).and_then(Option::as_ref) else { return };
        let (at, place) = (member.group, member.place);
        let Some(group) = groups.get_mut(at as usize).and_then(Option::as_mut) else { return };
        let mut keys = [(0, TOP); TABLES + 1];
        for (table, (key, reach)) in group.tables.iter_mut().zip(&mut keys) {
            if table.users == 0 {
                continue;
            }
            *key = under(&table.bits, &group.shape.mask, &member.value);
            *reach = place;
            if let Some(from) = from {
                table.rules.remove(&(*key, from, place));
                *reach = table.reach(*key, from, place).max(*reach);
            }
            if let Some(to) = to {
                *reach = table.reach(*key, to, place).max(*reach);
                table.rules.insert((*key, to, place), rule);
            }
        }
        let Some(group) = self.group_of(at) else { return };
        for meeting in &group.meets {
            let (key, reach) = keys[meeting.mine as usize];
            if let Some(table) = self.table(meeting.other, meeting.theirs).filter(|_| reach > place) {
                table.between(key, (place, reach), &mut told);
            }
        }
    }

    /// The group of a pattern, which is made if there is none.
    fn group(&mut self, pattern: &Pattern) -> u32 {
        let shape = Shape::of(pattern);
        if let Some(&at) = self.by_shape.get(&shape) {
            self.empty.retain(|empty| *empty != at);
            return at;
        }
        let group = Group { shape: shape.clone(), rules: 0, tables: Vec::new(), meets: Vec::new() };
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                self.groups.push(None);
                self.groups.len() as u32 - 1
            }
        };
        self.groups[at as usize] = Some(group);
        self.by_shape.insert(shape, at);
        self.meet(at, at);
        for other in 0..self.groups.len() as u32 {
            if other != at && self.group_of(other).is_some() {
                self.meet(at, other);
            }
        }
        at
    }

    /// Says how the rules of two groups meet, if they can.
    fn meet(&mut self, a: u32, b: u32) {
        let (Some(first), Some(second)) = (self.group_of(a), self.group_of(b)) else { return };
        let Some(bits) = common(&first.shape, &second.shape) else { return };
        let both = |bits: &Mask| first.has_room(bits) && second.has_room(bits);
        let bits = if both(&bits) {
            bits
        } else {
            // As many of them as there is a table for.
            let tables = first.tables.iter().chain(&second.tables).map(|table| &table.bits);
            let found = tables.filter(|other| is_within(other, &bits) && both(other));
            found
                .max_by_key(|other| other.iter().map(|(_, bits)| bits.count_ones()).sum::<u32>())
                .cloned()
                .unwrap_or_default()
        };
        let (Some(mine), Some(theirs)) = (self.table_for(a, &bits), self.table_for(b, &bits)) else { return };
        let mut note = |group: u32, meeting: Meeting| {
            if let Some(group) = self.group_mut(group) {
                group.tables[meeting.mine as usize].users += 1;
                group.meets.push(meeting);
            }
        };
        note(a, Meeting { other: b, mine, theirs });
        if a != b {
            note(b, Meeting { other: a, mine: theirs, theirs: mine });
        }
    }

    /// The table of a group over these bits, which is made and filled if there is none.
    fn table_for(&mut self, group: u32, bits: &Mask) -> Option<u32> {
        let Self { members, groups, .. } = self;
        let group = groups.get_mut(group as usize)?.as_mut()?;
        if let Some(at) = group.tables.iter().position(|table| table.users > 0 && table.bits == *bits) {
            return Some(at as u32);
        }
        let mut table = Table { bits: bits.clone(), ..Table::default() };
        // The first has them all.
        for (&(_, standing, place), &rule) in group.tables.first().into_iter().flat_map(|first| &first.rules) {
            if let Some(member) = members.get(rule as usize).and_then(Option::as_ref) {
                table.rules.insert((under(bits, &group.shape.mask, &member.value), standing, place), rule);
            }
        }
        let at = group.tables.iter().position(|table| table.users == 0).unwrap_or(group.tables.len());
        match group.tables.get_mut(at) {
            Some(free) => *free = table,
            None => group.tables.push(table),
        }
        Some(at as u32)
    }

    /// Forgets the group that has been empty the longest.
    fn forget(&mut self) {
        let Some(at) = self.empty.pop_front() else { return };
        let Some(group) = self.groups[at as usize].take() else { return };
        self.by_shape.remove(&group.shape);
        self.free.push(at);
        for meeting in group.meets.iter().filter(|meeting| meeting.other != at) {
            let Some(other) = self.group_mut(meeting.other) else { continue };
            other.meets.retain(|back| back.other != at);
            if let Some(table) = other.tables.get_mut(meeting.theirs as usize) {
                table.users -= 1;
                if table.users == 0 {
                    *table = Table::default();
                }
            }
        }
    }
}

/// Whether a word says which headers there are.
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

/// By which bits rules of two shapes are told apart, apart from their stacks; `None`: no packet has the stacks of both.
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

/// Whether all of these bits are among those.
fn is_within(these: &[(u8, u64)], those: &[(u8, u64)]) -> bool {
    these.iter().all(|(word, bits)| those.iter().any(|(other, all)| other == word && bits & !all == 0))
}

/// Hash of the values in some bits, of which all words are in `mask`.
fn under(bits: &[(u8, u64)], mask: &[(u8, u64)], value: &[u64]) -> u64 {
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

/// Whether a packet can fit both.
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
    use wirepath_rulelab::{Rng, make};

    /// What stands where.
    struct There {
        pattern: Pattern,
        place: Place,
        standing: Standing,
    }

    /// For each standing, the uppermost above.
    fn uppermost(found: &mut BTreeMap<Standing, Place>, standing: Standing, place: Place) {
        let first = found.entry(standing).or_insert(place);
        *first = place.min(*first);
    }

    #[test]
    fn rules_see_exactly_those_above_that_overlap_and_hear_of_what_matters() {
        for seed in 0..30 {
            let mut rng = Rng::new(seed);
            let rules = make::rules(&mut rng, 120);
            let mut index = Index::default();
            let mut there: BTreeMap<u32, There> = BTreeMap::new();
            // Which standings there were above each rule when it was last told.
            let mut known: BTreeMap<u32, Vec<Standing>> = BTreeMap::new();
            let mut told = Vec::new();
            for (i, rule) in rules.iter().enumerate() {
                let (number, place) = (i as u32, (rule.priority(), i as u64));
                let pattern = Pattern::of(&rule.fields());
                let standing = rng.below(4) as Standing;
                index.insert(number, place, &pattern);
                index.stand(number, standing, |_, rule| told.push(rule));
                there.insert(number, There { pattern, place, standing });
                told.push(number);
                let other = *there.keys().nth(rng.index(there.len())).unwrap();
                match rng.below(3) {
                    0 => {
                        index.remove(other, |_, rule| told.push(rule));
                        there.remove(&other);
                    }
                    1 => {
                        let standing = rng.below(4) as Standing;
                        index.stand(other, standing, |_, rule| told.push(rule));
                        there.get_mut(&other).unwrap().standing = standing;
                    }
                    _ => {}
                }
                let look = |rule| {
                    let mut above = BTreeMap::new();
                    index.above(rule, |standing, place, _| uppermost(&mut above, standing, place));
                    above
                };
                for rule in told.drain(..) {
                    known.insert(rule, look(rule).into_keys().collect());
                }
                for (number, it) in &there {
                    let mut expected = BTreeMap::new();
                    let (mut lower, mut found) = (Vec::new(), Vec::new());
                    for (other, that) in there.iter().filter(|(_, that)| overlap(&it.pattern, &that.pattern)) {
                        if that.place < it.place {
                            uppermost(&mut expected, that.standing, that.place);
                        } else if that.place > it.place {
                            lower.push(*other);
                        }
                    }
                    assert_eq!(look(*number), expected, "seed {seed}, step {i}, rule {number}");
                    assert!(
                        known[number].iter().eq(expected.keys()),
                        "seed {seed}, step {i}, rule {number} was told of {:?}, not {expected:?}",
                        known[number]
                    );
                    index.below(*number, |_, rule| found.push(rule));
                    found.sort_unstable();
                    assert_eq!(found, lower, "seed {seed}, step {i}, rule {number}");
                }
                // What the rule types say overlaps must be among them.
                for (&other, that) in &there {
                    if wirepath_pmd::flow::overlaps(&rules[i].fields(), &rules[other as usize].fields()) {
                        assert!(
                            overlap(&Pattern::of(&rule.fields()), &that.pattern),
                            "{rule} and {}",
                            rules[other as usize]
                        );
                    }
                }
                let first = there.values().filter(|that| overlap(&Pattern::of(&rule.fields()), &that.pattern));
                let expected = first.map(|that| that.place).min();
                if there.contains_key(&number) {
                    assert_eq!(index.first(&Pattern::of(&rule.fields())), expected);
                }
            }
            (0..120).for_each(|rule| index.remove(rule, |_, _| {}));
            assert_eq!(index.entries(), 0, "seed {seed}");
            assert!(index.by_shape.len() <= EMPTY && index.by_shape.len() == index.empty.len());
        }
    }

    #[test]
    fn with_more_kinds_of_masks_than_tables_rules_are_kept_apart_at_most_too_often() {
        let text = |i: u32, j: u32| format!("ingress: ipv4 src 10.0.0.0/{i} dst 10.0.0.0/{j} => drop");
        let mut index = Index::default();
        let mut patterns = Vec::new();
        for (i, j) in (8..32).flat_map(|i| (8..32).step_by(5).map(move |j| (i, j))) {
            let rule: wirepath_pmd::flow::Rule = text(i, j).parse().unwrap();
            let pattern = Pattern::of(&rule.fields());
            let number = patterns.len() as u32;
            index.insert(number, (0, number.into()), &pattern);
            index.stand(number, 0, |_, _| {});
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
