//! Offload plan of one port: which rules can be in the device, and at which level.
//!
//! A rule may be in the device only if every overlapping rule above it is there too, at an earlier level.
//! Otherwise a packet would match the lower rule in the device before the upper rule was checked. The rules
//! above are queried by groups of rules ([`super::overlap`]). A change affects only rules for which the
//! changed rule is the uppermost one of its state. So the cost of an update is proportional to the rules it
//! affects.

use std::collections::{BTreeSet, HashMap};
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use wirepath_flow::{Direction, FieldSet, Key, MaskedValue, Rule};
use wirepath_pmd::port::hardware::{RuleCapabilities, RuleRefusal};

use super::overlap::{OffloadState, OverlapIndex};
use super::translate::{CapabilityCheck, Obstacle, OffloadRule};
use crate::rules::RuleId;
use crate::rules::classifier::match_key::Pattern;

/// Matching order of a rule: priority, then order of addition.
pub(super) type RuleOrder = (u32, u64);

/// The rules of one port. Egress rules are independent of each other, because software matches them.
#[derive(Debug)]
pub(super) struct OffloadPlan {
    pub(super) capabilities: CapabilityCheck,
    nodes: HashMap<RuleId, u32>,
    slots: Vec<Option<Node>>,
    free: Vec<u32>,
    index: OverlapIndex,
    extras: ExtraDemands,
    changes: PendingChanges,
    refused: BTreeSet<(RuleOrder, RuleId)>,
}

#[derive(Debug)]
struct Node {
    id: RuleId,
    order: RuleOrder,
    rule: Arc<Rule>,
    /// True if the device could run the rule.
    fits: bool,
    /// Number of levels that the rule takes.
    span: u8,
    /// Number of the extra demands of its device pattern.
    extra: u8,
    refused: Option<Box<RuleRefusal>>,
    /// True for an implicit rule, which exists only in the device.
    implicit: bool,
    /// True for an ingress rule, false for an egress rule.
    ingress: bool,
    target: Option<u16>,
}

/// Rules whose level may have changed.
#[derive(Debug, Default)]
struct PendingChanges {
    rules: BTreeSet<(RuleOrder, u32)>,
    /// Rules that were added.
    new: Vec<RuleId>,
    notified: usize,
    /// True if so many rules are affected that all are updated once, from the highest.
    all: bool,
}

impl PendingChanges {
    /// Records the rule in slot `at` if the new state of a rule above it affects it.
    fn notify(
        &mut self,
        slots: &[Option<Node>],
        (order, at): (RuleOrder, u32),
        above: Option<OffloadState>,
        max: usize,
    ) {
        if slots.get(at as usize).and_then(Option::as_ref).is_some_and(|node| node.is_affected(above)) {
            self.note(order, at, max);
        }
    }

    fn note(&mut self, order: RuleOrder, at: u32, max: usize) {
        /// Number of affected rules that are always tracked one by one.
        const FEW: usize = 64;
        if self.all {
            return;
        }
        self.notified += 1;
        self.rules.insert((order, at));
        if self.notified > max.max(FEW) {
            self.mark_all();
        }
    }

    fn mark_all(&mut self) {
        self.all = true;
        self.rules.clear();
    }
}

/// Keys that device patterns require beyond their rules: outer ECN 0 of IPv4 or IPv6, and valid headers.
/// There is hardly ever anything else.
#[derive(Debug, Default)]
struct ExtraDemands(Vec<Extra>);

#[derive(Debug)]
struct Extra {
    demands: Box<[(Key, MaskedValue)]>,
    pattern: Pattern,
    require_integrity: bool,
}

/// Maximum number of distinct extra demands. Further ones share this number, and no rule satisfies it.
const EXTRAS: u8 = 15;

impl ExtraDemands {
    /// Returns the number of a translation's extra demands; 0: none.
    fn number(&mut self, fit: &OffloadRule) -> u8 {
        let OffloadRule { extra, require_integrity, .. } = fit;
        if extra.is_empty() && !require_integrity {
            return 0;
        }
        if let Some(at) =
            self.0.iter().position(|known| *known.demands == **extra && known.require_integrity == *require_integrity)
        {
            return at as u8 + 1;
        }
        if self.0.len() + 1 < usize::from(EXTRAS) {
            let (demands, pattern) = (extra.as_slice().into(), Pattern::of_keys(extra));
            self.0.push(Extra { demands, pattern, require_integrity: *require_integrity });
            return self.0.len() as u8;
        }
        EXTRAS
    }

    fn get(&self, number: u8) -> Option<&Extra> {
        self.0.get(usize::from(number).checked_sub(1)?)
    }
}

/// State of a rule that is not in the device. Overlapping rules below it cannot be there either.
const ABSENT: OffloadState = 0;

/// Returns the state of a rule in the device. `end` is its last level.
fn present(end: u16, extra: u8) -> OffloadState {
    1 + (u32::from(end) << 4 | u32::from(extra))
}

/// Returns last level and extra demands of a rule in the device, or `None` if it is absent.
fn decode(state: OffloadState) -> Option<(u16, u8)> {
    let bits = state.checked_sub(1)?;
    Some(((bits >> 4) as u16, bits as u8 & EXTRAS))
}

impl Node {
    /// Returns true if the level of this rule may change because a rule above has this state now, or was
    /// removed (`None`). A rule in the device keeps its level as long as it is below all overlapping rules
    /// above it. So few of very many rules are updated.
    fn is_affected(&self, above: Option<OffloadState>) -> bool {
        match (self.target, above.map(decode)) {
            _ if !self.fits || self.refused.is_some() => false,
            (None, _) | (_, Some(None)) => true,
            (Some(_), None) => false,
            (Some(level), Some(Some((end, extra)))) => extra != 0 || end >= level,
        }
    }

    fn state(&self) -> OffloadState {
        self.target.map_or(ABSENT, |level| present(level + u16::from(self.span) - 1, self.extra))
    }
}

/// Reason why a rule is not in the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OffloadBlocker {
    /// The device cannot run it.
    Obstacle(Obstacle),
    /// This rule above it is not in the device, or only partly.
    Above(RuleId),
    /// More rules overlap above it than the device has levels.
    TooDeep(u16),
    /// The device refused it.
    Refused(RuleRefusal),
}

impl OffloadPlan {
    pub(super) fn new(capabilities: CapabilityCheck) -> Self {
        Self {
            capabilities,
            nodes: HashMap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            index: OverlapIndex::default(),
            extras: ExtraDemands::default(),
            changes: PendingChanges::default(),
            refused: BTreeSet::new(),
        }
    }

    fn levels(&self) -> u16 {
        self.capabilities.can.table(Direction::Ingress).map_or(0, |table| table.levels)
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

    pub(super) fn order(&self, id: RuleId) -> Option<RuleOrder> {
        Some(self.find(id)?.order)
    }

    /// Returns the translation of a rule for the device.
    pub(super) fn fit(&self, id: RuleId) -> Option<Result<OffloadRule, Obstacle>> {
        let node = self.find(id)?;
        Some(self.capabilities.fit(&node.rule, &node.rule.fields(), node.implicit))
    }

    /// Returns the level at which the rule is to be in the device.
    pub(super) fn target(&self, id: RuleId) -> Option<u16> {
        self.find(id)?.target
    }

    /// Adds a rule. `set` is what it requires.
    pub(super) fn add(&mut self, id: RuleId, order: RuleOrder, rule: Arc<Rule>, set: &FieldSet, implicit: bool) {
        let (fits, span, extra) = match self.capabilities.fit(&rule, set, implicit) {
            Ok(fit) => (true, fit.span(), self.extras.number(&fit)),
            Err(_) => (false, 1, 0),
        };
        let ingress = rule.direction() == Direction::Ingress;
        let mut node = Node { id, order, fits, span, extra, refused: None, implicit, ingress, target: None, rule };
        let at = self.free.pop().unwrap_or(self.slots.len() as u32);
        if at as usize == self.slots.len() {
            self.slots.push(None);
        }
        self.nodes.insert(id, at);
        if node.ingress {
            self.index.insert(at, order, &Pattern::of(set));
            // The level is chosen from the present state above, so that rules below are notified only of the
            // final state.
            if !self.changes.all {
                node.target = self.desired_level(at, &node);
            }
            self.set_state(at, node.state());
        }
        self.changes.new.push(id);
        self.changes.note(order, at, self.nodes.len());
        self.slots[at as usize] = Some(node);
    }

    pub(super) fn remove(&mut self, id: RuleId) {
        let Some(at) = self.nodes.remove(&id) else { return };
        let Some(node) = self.slots[at as usize].take() else { return };
        let Self { index, changes, nodes, refused, free, slots, .. } = self;
        index.remove(at, |order, at| changes.notify(slots, (order, at), None, nodes.len()));
        changes.rules.remove(&(node.order, at));
        refused.remove(&(node.order, id));
        free.push(at);
    }

    /// Records that the device refused a rule (`Some`), or that it may be tried again (`None`).
    pub(super) fn refuse(&mut self, id: RuleId, refusal: Option<RuleRefusal>) {
        let Some(&at) = self.nodes.get(&id) else { return };
        let Some(node) = &mut self.slots[at as usize] else { return };
        match &refusal {
            Some(_) => self.refused.insert((node.order, id)),
            None => self.refused.remove(&(node.order, id)),
        };
        node.refused = refusal.map(Box::new);
        self.changes.note(node.order, at, self.nodes.len());
    }

    /// Returns refused rules that may be tried again, after the given one.
    pub(super) fn refused_behind(
        &self,
        behind: Option<(RuleOrder, RuleId)>,
    ) -> impl Iterator<Item = (RuleOrder, RuleId)> + '_ {
        let from = behind.map_or(Bound::Unbounded, Bound::Excluded);
        self.refused.range((from, Bound::Unbounded)).copied()
    }

    /// Returns true if a rule above blocks this rule, and the first level that is free for it.
    fn constraints_above(&self, at: u32, node: &Node) -> (bool, u16) {
        let (mut blocked, mut least) = (false, self.capabilities.first_level(Direction::Ingress));
        self.index.above(at, |state, _, _| {
            blocked |= self.blocks(state, at, node);
            if let Some((end, _)) = decode(state) {
                least = least.max(end.saturating_add(1));
            }
        });
        (blocked, least)
    }

    /// Returns true if a rule above with this state blocks a rule. Either it is absent from the device, or it
    /// leaves packets to software that the device would match against the lower rule.
    fn blocks(&self, state: OffloadState, at: u32, node: &Node) -> bool {
        let Some((_, extra)) = decode(state) else { return true };
        let require_integrity = self.extras.get(node.extra).is_some_and(|extra| extra.require_integrity);
        let demands = |it: &Extra| (require_integrity || !it.require_integrity) && self.index.demands(at, &it.pattern);
        extra != 0 && (extra != node.extra || extra == EXTRAS) && !self.extras.get(extra).is_some_and(demands)
    }

    /// Returns the level for a rule, given the rules above it.
    fn desired_level(&self, at: u32, node: &Node) -> Option<u16> {
        if !node.fits || node.refused.is_some() {
            return None;
        }
        if !node.ingress {
            return Some(0);
        }
        let (blocked, least) = self.constraints_above(at, node);
        let max = self.levels().checked_sub(node.span.into())?;
        match node.target {
            _ if blocked => None,
            // The rule keeps its level as long as it is below all overlapping rules above it.
            Some(level) if level >= least && level <= max => Some(level),
            _ => (least <= max).then_some(least),
        }
    }

    /// Updates all affected rules. Returns the rules whose level has changed, and the new rules.
    pub(super) fn update(&mut self) -> Vec<RuleId> {
        let mut changed = Vec::new();
        let mut behind = Bound::Unbounded;
        while let Some((order, at)) = self.changes.rules.pop_first() {
            changed.extend(self.update_rule(at));
            behind = Bound::Excluded(order);
        }
        if self.changes.all {
            let all = self.slots.iter().flatten();
            let mut all: Vec<(RuleOrder, u32)> =
                all.filter_map(|node| Some((node.order, *self.nodes.get(&node.id)?))).collect();
            all.retain(|(order, _)| (behind, Bound::Unbounded).contains(order));
            all.sort_unstable();
            // No notification is needed, because all lower rules follow.
            changed.extend(all.into_iter().filter_map(|(_, at)| self.update_rule(at)));
        }
        changed.append(&mut self.changes.new);
        self.changes = PendingChanges::default();
        changed
    }

    /// Updates one rule. Returns its id if its level has changed.
    fn update_rule(&mut self, at: u32) -> Option<RuleId> {
        let node = self.node(at)?;
        let wanted = self.desired_level(at, node);
        let node = self.slots[at as usize].as_mut().filter(|node| node.target != wanted)?;
        node.target = wanted;
        let (id, state) = (node.id, node.state());
        self.set_state(at, state);
        Some(id)
    }

    /// Sets the state of a rule and notifies the affected rules below it.
    fn set_state(&mut self, at: u32, state: OffloadState) {
        let Self { index, changes, nodes, slots, .. } = self;
        index.set_state(at, state, |order, at| changes.notify(slots, (order, at), Some(state), nodes.len()));
    }

    /// Checks all rules again, because the capabilities of the device changed.
    pub(super) fn recheck_all(&mut self, can: RuleCapabilities) {
        let nodes: Vec<Node> = self.slots.drain(..).flatten().collect();
        let capabilities = self.capabilities.with(can);
        *self = Self::new(capabilities);
        self.changes.mark_all();
        for node in nodes {
            let set = node.rule.fields();
            self.add(node.id, node.order, node.rule, &set, node.implicit);
        }
    }

    /// Returns the rules that are to be in the device.
    pub(super) fn targets(&self) -> impl Iterator<Item = (RuleOrder, RuleId)> {
        self.slots.iter().flatten().filter(|node| node.target.is_some()).map(|node| (node.order, node.id))
    }

    /// Passes the overlapping rules below a rule to `each`.
    pub(super) fn below(&self, id: RuleId, mut each: impl FnMut(RuleOrder, RuleId)) {
        if let Some(&at) = self.nodes.get(&id) {
            self.index.below(at, |order, other| self.node(other).into_iter().for_each(|node| each(order, node.id)));
        }
    }

    /// Returns the reason why a rule is not in the device, or `None` if it is.
    pub(super) fn blocker(&self, id: RuleId) -> Option<OffloadBlocker> {
        let at = *self.nodes.get(&id)?;
        let node = self.node(at)?;
        if node.target.is_some() {
            return None;
        }
        if let Some(refusal) = &node.refused {
            return Some(OffloadBlocker::Refused((**refusal).clone()));
        }
        if !node.fits {
            return self
                .capabilities
                .fit(&node.rule, &node.rule.fields(), node.implicit)
                .err()
                .map(OffloadBlocker::Obstacle);
        }
        let mut first: Option<(RuleOrder, u32)> = None;
        self.index.above(at, |state, order, other| {
            if self.blocks(state, at, node) && first.is_none_or(|(upper, _)| order < upper) {
                first = Some((order, other));
            }
        });
        match first.and_then(|(_, other)| self.node(other)) {
            Some(other) => Some(OffloadBlocker::Above(other.id)),
            None => Some(OffloadBlocker::TooDeep(self.levels())),
        }
    }

    /// Returns the number of entries in the overlap index, which determine its memory.
    pub(super) fn entries(&self) -> usize {
        self.index.entries()
    }

    /// Checks the plan by comparing every rule with every other rule.
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
            let (mut blocked, mut least) = (false, self.capabilities.first_level(Direction::Ingress));
            let above = nodes
                .iter()
                .filter(|(other, _, that)| other.order < node.order && super::overlap::overlap(that, pattern));
            for (other, ..) in above {
                let Some(level) = other.target else {
                    blocked = true;
                    continue;
                };
                least = least.max(level + u16::from(other.span));
                let fit = self.fit(other.id).unwrap().unwrap();
                let (extra, require_integrity) =
                    self.fit(node.id).unwrap().map_or((Vec::new(), false), |fit| (fit.extra, fit.require_integrity));
                blocked |= fit.require_integrity && !require_integrity;
                blocked |= fit.extra.iter().any(|(key, bits)| {
                    let own_bits = extra.iter().find(|(own_key, _)| own_key == key).map(|(_, bits)| *bits);
                    !own_bits.or_else(|| set.get(*key)).is_some_and(|other| bits.covers(other))
                });
            }
            let possible = node.fits && node.refused.is_none() && !blocked;
            let max = self.levels().checked_sub(node.span.into()).filter(|max| possible && least <= *max);
            match (node.target, max) {
                (Some(level), Some(max)) => assert!((least..=max).contains(&level), "{}", node.rule),
                (target, max) => assert_eq!(target.is_some(), max.is_some(), "{}", node.rule),
            }
        }
    }
}
