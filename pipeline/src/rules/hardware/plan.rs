//! Which rules can be in the device of one port, and on which level.
//!
//! A rule may be there only if every rule above it that it overlaps is there too, on a lower level: else a packet would meet the lower
//! rule in the device before anybody asked the upper one. What a rule has above it is asked of groups of rules ([`super::overlap`]), and
//! a change tells only those for which it is the uppermost of its kind: one rule more or less among very many costs what it changes.

use std::collections::{BTreeSet, HashMap};
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use wirepath_pmd::flow::{Bits, Direction, FieldSet, Key, Rule};
use wirepath_pmd::port::hardware::{RuleCapabilities, RuleRefusal};

use super::super::RuleId;
use super::super::words::Pattern;
use super::fit::{Fit, Judge, Obstacle};
use super::overlap::{Index, Standing};

/// Where a rule stands in the order: priority, then when it was added.
pub(super) type Place = (u32, u64);

/// Rules of one port. At egress, software finds the rules, so that nothing stands in anybody's way.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) judge: Judge,
    nodes: HashMap<RuleId, u32>,
    slots: Vec<Option<Node>>,
    free: Vec<u32>,
    index: Index,
    extras: Extras,
    changes: Changes,
    refused: BTreeSet<(Place, RuleId)>,
}

#[derive(Debug)]
struct Node {
    id: RuleId,
    place: Place,
    rule: Arc<Rule>,
    /// The device could take it over.
    fits: bool,
    /// Levels that it takes.
    span: u8,
    /// What its pattern in the device demands beyond the rule, by its number.
    extra: u8,
    refused: Option<Box<RuleRefusal>>,
    /// One of the program's own: only in the device.
    own: bool,
    /// Of its direction: egress otherwise.
    ingress: bool,
    target: Option<u16>,
}

/// Rules whose target may be another now.
#[derive(Debug, Default)]
struct Changes {
    rules: BTreeSet<(Place, u32)>,
    /// Rules that have come.
    new: Vec<RuleId>,
    told: usize,
    /// There are so many that all are looked at, once, from above.
    all: bool,
}

impl Changes {
    /// One of `slots` is below a rule that stands like this now.
    fn tell(&mut self, slots: &[Option<Node>], (place, at): (Place, u32), above: Option<Standing>, most: usize) {
        if slots.get(at as usize).and_then(Option::as_ref).is_some_and(|node| node.is_concerned(above)) {
            self.note(place, at, most);
        }
    }

    fn note(&mut self, place: Place, at: u32, most: usize) {
        /// So few are kept apart whatever there is.
        const FEW: usize = 64;
        if self.all {
            return;
        }
        self.told += 1;
        self.rules.insert((place, at));
        if self.told > most.max(FEW) {
            self.everything();
        }
    }

    fn everything(&mut self) {
        self.all = true;
        self.rules.clear();
    }
}

/// What patterns in the device demand beyond their rules: outer ECN 0 of IPv4, of IPv6, headers in order; hardly ever anything else.
#[derive(Debug, Default)]
struct Extras(Vec<Extra>);

#[derive(Debug)]
struct Extra {
    demands: Box<[(Key, Bits)]>,
    pattern: Pattern,
    in_order: bool,
}

/// How many of them are told apart; what more there are, no rule demands.
const EXTRAS: u8 = 15;

impl Extras {
    /// Its number; 0: nothing.
    fn number(&mut self, fit: &Fit) -> u8 {
        let Fit { extra, in_order, .. } = fit;
        if extra.is_empty() && !in_order {
            return 0;
        }
        if let Some(at) = self.0.iter().position(|known| *known.demands == **extra && known.in_order == *in_order) {
            return at as u8 + 1;
        }
        if self.0.len() + 1 < usize::from(EXTRAS) {
            let (demands, pattern) = (extra.as_slice().into(), Pattern::of_keys(extra));
            self.0.push(Extra { demands, pattern, in_order: *in_order });
            return self.0.len() as u8;
        }
        EXTRAS
    }

    fn get(&self, number: u8) -> Option<&Extra> {
        self.0.get(usize::from(number).checked_sub(1)?)
    }
}

/// Not in the device: whoever is below and overlaps cannot be there either.
const ABSENT: Standing = 0;

/// In the device; `end` is the last level that it takes.
fn present(end: u16, extra: u8) -> Standing {
    1 + (u32::from(end) << 4 | u32::from(extra))
}

/// Last level and extra demands of what is in the device.
fn read(standing: Standing) -> Option<(u16, u8)> {
    let bits = standing.checked_sub(1)?;
    Some(((bits >> 4) as u16, bits as u8 & EXTRAS))
}

impl Node {
    /// Whether its place may be another now that one above it stands like this, or is gone (`None`). A rule in the device stays where it is
    /// as long as it is below all that it must be below, so that of very many only those are looked at for which something changes.
    fn is_concerned(&self, above: Option<Standing>) -> bool {
        match (self.target, above.map(read)) {
            _ if !self.fits || self.refused.is_some() => false,
            (None, _) | (_, Some(None)) => true,
            (Some(_), None) => false,
            (Some(level), Some(Some((end, extra)))) => extra != 0 || end >= level,
        }
    }

    fn standing(&self) -> Standing {
        self.target.map_or(ABSENT, |level| present(level + u16::from(self.span) - 1, self.extra))
    }
}

/// Why a rule is not in the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// It could not be.
    Obstacle(Obstacle),
    /// This rule above it is not either, or only in part.
    Above(RuleId),
    /// More rules overlap above it than there are levels.
    TooDeep(u16),
    /// The device did not take it.
    Refused(RuleRefusal),
}

impl Plan {
    pub(super) fn new(judge: Judge) -> Self {
        Self {
            judge,
            nodes: HashMap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            index: Index::default(),
            extras: Extras::default(),
            changes: Changes::default(),
            refused: BTreeSet::new(),
        }
    }

    fn levels(&self) -> u16 {
        self.judge.can.table(Direction::Ingress).map_or(0, |table| table.levels)
    }

    fn node(&self, at: u32) -> Option<&Node> {
        self.slots.get(at as usize)?.as_ref()
    }

    fn find(&self, id: RuleId) -> Option<&Node> {
        self.node(*self.nodes.get(&id)?)
    }

    pub(super) fn rule(&self, id: RuleId) -> Option<&Arc<Rule>> {
        Some(&self.find(id)?.rule)
    }

    pub(super) fn place(&self, id: RuleId) -> Option<Place> {
        Some(self.find(id)?.place)
    }

    /// What the device is given for a rule.
    pub(super) fn fit(&self, id: RuleId) -> Option<Result<Fit, Obstacle>> {
        let node = self.find(id)?;
        Some(self.judge.fit(&node.rule, &node.rule.fields(), node.own))
    }

    /// Where the rule is to be in the device.
    pub(super) fn target(&self, id: RuleId) -> Option<u16> {
        self.find(id)?.target
    }

    /// Adds a rule. `set` is what it demands.
    pub(super) fn add(&mut self, id: RuleId, place: Place, rule: Arc<Rule>, set: &FieldSet, own: bool) {
        let (fits, span, extra) = match self.judge.fit(&rule, set, own) {
            Ok(fit) => (true, fit.span(), self.extras.number(&fit)),
            Err(_) => (false, 1, 0),
        };
        let ingress = rule.direction() == Direction::Ingress;
        let mut node = Node { id, place, fits, span, extra, refused: None, own, ingress, target: None, rule };
        let at = self.free.pop().unwrap_or(self.slots.len() as u32);
        if at as usize == self.slots.len() {
            self.slots.push(None);
        }
        self.nodes.insert(id, at);
        if node.ingress {
            self.index.insert(at, place, &Pattern::of(set));
            // As things are above it now, so that nobody below is told of what will not be.
            if !self.changes.all {
                node.target = self.wanted(at, &node);
            }
            self.stand(at, node.standing());
        }
        self.changes.new.push(id);
        self.changes.note(place, at, self.nodes.len());
        self.slots[at as usize] = Some(node);
    }

    pub(super) fn remove(&mut self, id: RuleId) {
        let Some(at) = self.nodes.remove(&id) else { return };
        let Some(node) = self.slots[at as usize].take() else { return };
        let Self { index, changes, nodes, refused, free, slots, .. } = self;
        index.remove(at, |place, at| changes.tell(slots, (place, at), None, nodes.len()));
        changes.rules.remove(&(node.place, at));
        refused.remove(&(node.place, id));
        free.push(at);
    }

    /// The device did not take a rule (`Some`), or may be asked again.
    pub(super) fn refuse(&mut self, id: RuleId, refusal: Option<RuleRefusal>) {
        let Some(&at) = self.nodes.get(&id) else { return };
        let Some(node) = &mut self.slots[at as usize] else { return };
        match &refusal {
            Some(_) => self.refused.insert((node.place, id)),
            None => self.refused.remove(&(node.place, id)),
        };
        node.refused = refusal.map(Box::new);
        self.changes.note(node.place, at, self.nodes.len());
    }

    /// Some of the rules that were refused and might not be now, from behind a place on.
    pub(super) fn refused_behind(&self, behind: Option<(Place, RuleId)>) -> impl Iterator<Item = (Place, RuleId)> + '_ {
        let from = behind.map_or(Bound::Unbounded, Bound::Excluded);
        self.refused.range((from, Bound::Unbounded)).copied()
    }

    /// What is above a rule: whether something keeps it out of the device, and the first level that is free for it.
    fn situation(&self, at: u32, node: &Node) -> (bool, u16) {
        let (mut blocked, mut least) = (false, self.judge.first_level(Direction::Ingress));
        self.index.above(at, |standing, _, _| {
            blocked |= self.blocks(standing, at, node);
            if let Some((end, _)) = read(standing) {
                least = least.max(end.saturating_add(1));
            }
        });
        (blocked, least)
    }

    /// Whether a rule above that stands like this keeps a rule out of the device: it is not there itself, or leaves packets to software
    /// which the device would give to this one.
    fn blocks(&self, standing: Standing, at: u32, node: &Node) -> bool {
        let Some((_, extra)) = read(standing) else { return true };
        let in_order = self.extras.get(node.extra).is_some_and(|own| own.in_order);
        let demands = |it: &Extra| (in_order || !it.in_order) && self.index.demands(at, &it.pattern);
        extra != 0 && (extra != node.extra || extra == EXTRAS) && !self.extras.get(extra).is_some_and(demands)
    }

    /// Where a rule is to be, as things are above it.
    fn wanted(&self, at: u32, node: &Node) -> Option<u16> {
        if !node.fits || node.refused.is_some() {
            return None;
        }
        if !node.ingress {
            return Some(0);
        }
        let (blocked, least) = self.situation(at, node);
        let most = self.levels().checked_sub(node.span.into())?;
        match node.target {
            _ if blocked => None,
            // As long as it is below all that it must be below, it stays.
            Some(level) if level >= least && level <= most => Some(level),
            _ => (least <= most).then_some(least),
        }
    }

    /// Decides anew about all rules whose neighbours have changed; gives those whose place in the device is another, and those that came.
    pub(super) fn settle(&mut self) -> Vec<RuleId> {
        let mut changed = Vec::new();
        let mut behind = Bound::Unbounded;
        while let Some((place, at)) = self.changes.rules.pop_first() {
            changed.extend(self.decide(at));
            behind = Bound::Excluded(place);
        }
        if self.changes.all {
            let all = self.slots.iter().flatten();
            let mut all: Vec<(Place, u32)> =
                all.filter_map(|node| Some((node.place, *self.nodes.get(&node.id)?))).collect();
            all.retain(|(place, _)| (behind, Bound::Unbounded).contains(place));
            all.sort_unstable();
            // Nobody need be told: whoever is below comes later.
            changed.extend(all.into_iter().filter_map(|(_, at)| self.decide(at)));
        }
        changed.append(&mut self.changes.new);
        self.changes = Changes::default();
        changed
    }

    /// Decides anew about one; `Some`: its place in the device is another.
    fn decide(&mut self, at: u32) -> Option<RuleId> {
        let node = self.node(at)?;
        let wanted = self.wanted(at, node);
        let node = self.slots[at as usize].as_mut().filter(|node| node.target != wanted)?;
        node.target = wanted;
        let (id, standing) = (node.id, node.standing());
        self.stand(at, standing);
        Some(id)
    }

    /// A rule stands like this from here on, and those below hear of it.
    fn stand(&mut self, at: u32, standing: Standing) {
        let Self { index, changes, nodes, slots, .. } = self;
        index.stand(at, standing, |place, at| changes.tell(slots, (place, at), Some(standing), nodes.len()));
    }

    /// The device can do other things now: judges all rules anew.
    pub(super) fn judge_anew(&mut self, can: RuleCapabilities) {
        let nodes: Vec<Node> = self.slots.drain(..).flatten().collect();
        let judge = self.judge.with(can);
        *self = Self::new(judge);
        self.changes.everything();
        for node in nodes {
            let set = node.rule.fields();
            self.add(node.id, node.place, node.rule, &set, node.own);
        }
    }

    /// Rules that are to be in the device.
    pub(super) fn targets(&self) -> impl Iterator<Item = (Place, RuleId)> {
        self.slots.iter().flatten().filter(|node| node.target.is_some()).map(|node| (node.place, node.id))
    }

    /// Rules below this one that overlap with it.
    pub(super) fn below(&self, id: RuleId, mut each: impl FnMut(Place, RuleId)) {
        if let Some(&at) = self.nodes.get(&id) {
            self.index.below(at, |place, other| self.node(other).into_iter().for_each(|node| each(place, node.id)));
        }
    }

    /// Why a rule is not in the device; `None`: it is.
    pub(super) fn why_not(&self, id: RuleId) -> Option<Why> {
        let at = *self.nodes.get(&id)?;
        let node = self.node(at)?;
        if node.target.is_some() {
            return None;
        }
        if let Some(refusal) = &node.refused {
            return Some(Why::Refused((**refusal).clone()));
        }
        if !node.fits {
            return self.judge.fit(&node.rule, &node.rule.fields(), node.own).err().map(Why::Obstacle);
        }
        let mut first: Option<(Place, u32)> = None;
        self.index.above(at, |standing, place, other| {
            if self.blocks(standing, at, node) && first.is_none_or(|(upper, _)| place < upper) {
                first = Some((place, other));
            }
        });
        match first.and_then(|(_, other)| self.node(other)) {
            Some(other) => Some(Why::Above(other.id)),
            None => Some(Why::TooDeep(self.levels())),
        }
    }

    /// Entries of the index: what memory grows with beside the rules themselves.
    pub(super) fn entries(&self) -> usize {
        self.index.entries()
    }

    /// Whether all is as it must be, by asking every rule of every other.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let nodes: Vec<(&Node, FieldSet, Pattern)> = self
            .slots
            .iter()
            .flatten()
            .filter(|node| node.ingress)
            .map(|node| (node, node.rule.fields(), Pattern::of(&node.rule.fields())))
            .collect();
        for (node, set, pattern) in &nodes {
            let (mut blocked, mut least) = (false, self.judge.first_level(Direction::Ingress));
            let above = nodes
                .iter()
                .filter(|(other, _, that)| other.place < node.place && super::overlap::overlap(that, pattern));
            for (other, ..) in above {
                let Some(level) = other.target else {
                    blocked = true;
                    continue;
                };
                least = least.max(level + u16::from(other.span));
                let fit = self.fit(other.id).unwrap().unwrap();
                let (own, in_order) =
                    self.fit(node.id).unwrap().map_or((Vec::new(), false), |fit| (fit.extra, fit.in_order));
                blocked |= fit.in_order && !in_order;
                blocked |= fit.extra.iter().any(|(key, bits)| {
                    let own = own.iter().find(|(own, _)| own == key).map(|(_, bits)| *bits);
                    !own.or_else(|| set.get(*key)).is_some_and(|other| bits.covers(other))
                });
            }
            let possible = node.fits && node.refused.is_none() && !blocked;
            let most = self.levels().checked_sub(node.span.into()).filter(|most| possible && least <= *most);
            match (node.target, most) {
                (Some(level), Some(most)) => assert!((least..=most).contains(&level), "{}", node.rule),
                (target, most) => assert_eq!(target.is_some(), most.is_some(), "{}", node.rule),
            }
        }
    }
}
