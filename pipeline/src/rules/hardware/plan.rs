//! Which rules can be in the device of one port, and on which level.
//!
//! A rule may be there only if every rule above it that it overlaps is there too, on a lower level: else a packet would meet the lower
//! rule in the device before anybody asked the upper one. Each rule keeps count of the rules above it that stand in its way
//! (*blockers*) and of the levels of the others, so that a change costs what it changes: the rules that overlap with it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use wirepath_pmd::flow::{Bits, Direction, FieldSet, Key, Rule};
use wirepath_pmd::port::hardware::{RuleCapabilities, RuleRefusal};

use super::super::RuleId;
use super::super::words::Pattern;
use super::fit::{Fit, Judge, Obstacle};
use super::overlap::Index;

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
    /// Rules whose target may be another now.
    dirty: BTreeSet<(Place, u32)>,
}

#[derive(Debug)]
struct Node {
    id: RuleId,
    place: Place,
    rule: Arc<Rule>,
    pattern: Pattern,
    /// The device could take it over.
    fits: bool,
    /// Levels that it takes.
    span: u8,
    /// What its pattern in the device demands beyond the rule.
    extra: Box<[(Key, Bits)]>,
    refused: Option<Box<RuleRefusal>>,
    /// One of the program's own: only in the device.
    own: bool,
    /// Rules above that overlap and are not in the device, or leave packets of this one to software.
    blockers: u32,
    /// Rules above that overlap and are in the device, by their last level.
    above: Box<[u32]>,
    target: Option<u16>,
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
            dirty: BTreeSet::new(),
        }
    }

    fn levels(&self) -> u16 {
        self.judge.can.table(Direction::Ingress).map_or(0, |table| table.levels)
    }

    fn node(&self, at: u32) -> Option<&Node> {
        self.slots.get(at as usize)?.as_ref()
    }

    pub(super) fn rule(&self, id: RuleId) -> Option<&Arc<Rule>> {
        Some(&self.node(*self.nodes.get(&id)?)?.rule)
    }

    pub(super) fn place(&self, id: RuleId) -> Option<Place> {
        Some(self.node(*self.nodes.get(&id)?)?.place)
    }

    /// What the device is given for a rule.
    pub(super) fn fit(&self, id: RuleId) -> Option<Result<Fit, Obstacle>> {
        let node = self.node(*self.nodes.get(&id)?)?;
        Some(self.judge.fit(&node.rule, &node.rule.fields(), node.own))
    }

    /// Where the rule is to be in the device.
    pub(super) fn target(&self, id: RuleId) -> Option<u16> {
        self.node(*self.nodes.get(&id)?)?.target
    }

    /// Adds a rule. `set` is what it demands.
    pub(super) fn add(&mut self, id: RuleId, place: Place, rule: Arc<Rule>, set: &FieldSet, own: bool) {
        let (fits, span, extra) = match self.judge.fit(&rule, set, own) {
            Ok(fit) => (true, fit.span(), fit.extra.into()),
            Err(_) => (false, 1, Box::default()),
        };
        let pattern = Pattern::of(set);
        let node = Node {
            id,
            place,
            pattern,
            fits,
            span,
            extra,
            refused: None,
            own,
            blockers: 0,
            above: vec![0; usize::from(self.levels())].into(),
            target: None,
            rule,
        };
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                self.slots.push(None);
                self.slots.len() as u32 - 1
            }
        };
        self.nodes.insert(id, at);
        let overlapping = self.neighbours(&node);
        let ingress = node.rule.direction() == Direction::Ingress;
        if ingress {
            self.index.insert(at, &node.pattern);
        }
        self.slots[at as usize] = Some(node);
        for other in overlapping {
            let (upper, lower) = if self.place_at(other) < place { (other, at) } else { (at, other) };
            self.weigh(upper, lower, 1);
        }
        self.dirty.insert((place, at));
    }

    fn place_at(&self, at: u32) -> Place {
        self.node(at).map_or((u32::MAX, u64::MAX), |node| node.place)
    }

    /// Rules at ingress that overlap with this one.
    fn neighbours(&mut self, node: &Node) -> Vec<u32> {
        let mut found = Vec::new();
        if node.rule.direction() == Direction::Ingress {
            self.index.overlapping(&node.pattern, |at| found.push(at));
        }
        found
    }

    pub(super) fn remove(&mut self, id: RuleId) {
        let Some(at) = self.nodes.remove(&id) else { return };
        let Some(node) = self.slots[at as usize].take() else { return };
        if node.rule.direction() == Direction::Ingress {
            self.index.remove(at, &node.pattern);
        }
        let below: Vec<u32> =
            self.neighbours(&node).into_iter().filter(|other| self.place_at(*other) > node.place).collect();
        self.dirty.remove(&(node.place, at));
        // Weighed as it was.
        self.slots[at as usize] = Some(node);
        for other in below {
            self.weigh(at, other, -1);
        }
        self.slots[at as usize] = None;
        self.free.push(at);
    }

    /// The device did not take a rule (`Some`), or may be asked again.
    pub(super) fn refuse(&mut self, id: RuleId, refusal: Option<RuleRefusal>) {
        let Some(&at) = self.nodes.get(&id) else { return };
        if let Some(node) = &mut self.slots[at as usize] {
            node.refused = refusal.map(Box::new);
            self.dirty.insert((node.place, at));
        }
    }

    /// Rules that were refused and might not be now.
    pub(super) fn refused(&self) -> Vec<RuleId> {
        let refused = |node: &&Node| node.refused.is_some();
        self.slots.iter().flatten().filter(refused).map(|node| node.id).collect()
    }

    /// Counts an upper rule for a lower one, or no longer.
    fn weigh(&mut self, upper: u32, lower: u32, by: i32) {
        let (Some(above), Some(below)) = (self.node(upper), self.node(lower)) else { return };
        let blocks = match above.target {
            None => true,
            Some(_) => !above.extra.is_empty() && !demands(below, &above.extra),
        };
        let level = above.target.map(|level| level + u16::from(above.span) - 1);
        let (place, Some(node)) = (self.place_at(lower), &mut self.slots[lower as usize]) else { return };
        if blocks {
            node.blockers = node.blockers.wrapping_add_signed(by);
        }
        if let Some(count) = level.and_then(|level| node.above.get_mut(usize::from(level))) {
            *count = count.wrapping_add_signed(by);
        }
        self.dirty.insert((place, lower));
    }

    /// Where a rule is to be, as things are above it.
    fn wanted(&self, node: &Node) -> Option<u16> {
        if !node.fits || node.refused.is_some() {
            return None;
        }
        if node.rule.direction() == Direction::Egress {
            return Some(0);
        }
        if node.blockers > 0 {
            return None;
        }
        let least = self.least(node);
        let most = self.levels().checked_sub(node.span.into())?;
        match node.target {
            // As long as it is below all that it must be below, it stays.
            Some(level) if level >= least && level <= most => Some(level),
            _ => (least <= most).then_some(least),
        }
    }

    fn least(&self, node: &Node) -> u16 {
        let above = node.above.iter().rposition(|count| *count > 0);
        above.map_or(self.judge.first_level(Direction::Ingress), |level| level as u16 + 1)
    }

    /// Decides anew about all rules whose neighbours have changed; gives those whose place in the device is another.
    pub(super) fn settle(&mut self) -> Vec<RuleId> {
        let mut changed = Vec::new();
        while let Some((_, at)) = self.dirty.pop_first() {
            let Some(node) = self.node(at) else { continue };
            let wanted = self.wanted(node);
            if wanted == node.target {
                continue;
            }
            let (id, place) = (node.id, node.place);
            let pattern = node.pattern.clone();
            let mut below = Vec::new();
            if node.rule.direction() == Direction::Ingress {
                self.index.overlapping(&pattern, |other| below.push(other));
            }
            below.retain(|other| self.place_at(*other) > place);
            below.iter().for_each(|other| self.weigh(at, *other, -1));
            if let Some(node) = &mut self.slots[at as usize] {
                node.target = wanted;
            }
            below.iter().for_each(|other| self.weigh(at, *other, 1));
            changed.push(id);
        }
        changed
    }

    /// The device can do other things now: judges all rules anew.
    pub(super) fn judge_anew(&mut self, can: RuleCapabilities) {
        let nodes: Vec<Node> = self.slots.drain(..).flatten().collect();
        let judge = self.judge.with(can);
        *self = Self::new(judge);
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
    pub(super) fn below(&mut self, id: RuleId) -> Vec<RuleId> {
        let Some(node) = self.nodes.get(&id).and_then(|at| self.node(*at)) else { return Vec::new() };
        let (place, pattern) = (node.place, node.pattern.clone());
        let mut found = Vec::new();
        self.index.overlapping(&pattern, |at| found.push(at));
        let node = |at: u32| self.node(at).filter(|node| node.place > place).map(|node| node.id);
        found.into_iter().filter_map(node).collect()
    }

    /// Why a rule is not in the device; `None`: it is.
    pub(super) fn why_not(&mut self, id: RuleId) -> Option<Why> {
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
        if node.blockers == 0 {
            return Some(Why::TooDeep(self.levels()));
        }
        let (place, pattern) = (node.place, node.pattern.clone());
        let mut found = Vec::new();
        self.index.overlapping(&pattern, |at| found.push(at));
        let node = self.node(at)?;
        let blocks = |other: &&Node| {
            other.place < place && (other.target.is_none() || (!other.extra.is_empty() && !demands(node, &other.extra)))
        };
        let first = found.into_iter().filter_map(|at| self.node(at)).filter(blocks).min_by_key(|other| other.place);
        first.map(|other| Why::Above(other.id))
    }

    /// Whether what every rule was told of those above it is what they are.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let nodes: Vec<&Node> =
            self.slots.iter().flatten().filter(|node| node.rule.direction() == Direction::Ingress).collect();
        for node in &nodes {
            let above = nodes
                .iter()
                .filter(|other| other.place < node.place && super::overlap::overlap(&other.pattern, &node.pattern));
            let (mut blockers, mut levels) = (0, vec![0u32; node.above.len()]);
            for other in above {
                match other.target {
                    None => blockers += 1,
                    Some(level) => {
                        levels[usize::from(level) + usize::from(other.span) - 1] += 1;
                        blockers += u32::from(!other.extra.is_empty() && !demands(node, &other.extra));
                        if let Some(own) = node.target {
                            assert!(own >= level + u16::from(other.span), "{} above {}", other.rule, node.rule);
                        }
                    }
                }
            }
            assert_eq!((node.blockers, &*node.above), (blockers, &levels[..]), "{}", node.rule);
            assert!(node.target.is_none() || (node.blockers == 0 && node.fits), "{}", node.rule);
            assert_eq!(node.target, self.wanted(node), "{}", node.rule);
        }
    }
}

/// Whether a rule in the device demands this too.
fn demands(node: &Node, extra: &[(Key, Bits)]) -> bool {
    let set = node.rule.fields();
    let own = |key: &Key| node.extra.iter().find(|(own, _)| own == key).map(|(_, bits)| *bits);
    extra.iter().all(|(key, bits)| own(key).or_else(|| set.get(*key)).is_some_and(|other| bits.covers(other)))
}
