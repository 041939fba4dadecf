//! The rule list of a program: it is checked against the ports, run by the workers, and set on the ports.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use wirepath_flow::{Direction, Ports, Rule};
use wirepath_pmd::port::{KernelRule, PortError, PortId};
use wirepath_wire::{Parser, Tunnels};

use super::location::{ListJudge, matching_ports};
use super::parts::{Meanwhile, Parts};
use super::rule_list::{Entry, RuleList, ends_at_kernel};
use crate::WorkerInfo;
use crate::epoch::Domain;
use crate::events::Punt;
use crate::rules::offload::{HardwareRules, ImplicitEncap, Obstacle, Placement};
use crate::rules::{
    Change, PUNT_TO_KERNEL, RemovedRule, RuleCounters, RuleId, RuleLimits, RuleLocation, RuleLocations, RulePorts,
    RuleRefused, RuleStage, RuleTable, RuleTableError, Timeouts, check, in_priority_order,
};
use crate::runtime::{ControlPlane, PortInfo, Runtime, RuntimeError};

/// A rule in force.
#[derive(Clone, Debug)]
pub struct ActiveRule {
    /// Id of the rule, which no other rule ever gets.
    pub id: RuleId,
    /// The rule.
    pub rule: Arc<Rule>,
    /// Counters of the rule, including the packets that a port decides about.
    pub counters: RuleCounters,
}

/// An entry of a new rule list.
#[derive(Clone, Debug)]
pub enum ListEntry {
    /// A rule in force, which keeps its id and its counters. It may move in the list.
    Keep(RuleId),
    /// A rule that gets a new id.
    New(Rule),
}

/// Control side of [`RuleStage`]s: the rule list, in the order in which rules of equal priority are matched.
#[derive(Debug)]
pub struct RuleControl {
    table: RuleTable,
    hardware: HardwareRules,
    ports: Vec<PortInfo>,
    rule_ports: Arc<RulePorts>,
    rules: RuleList,
    /// Locations of rules that end at the kernel. All other rules run in the workers or in NICs.
    to_kernel: HashMap<RuleId, RuleLocations>,
    aged: u64,
    /// UDP ports of tunnels.
    tunnels: Tunnels,
}

/// Error of [`RuleControl`].
#[derive(Debug, thiserror::Error)]
pub enum RuleControlError {
    /// A rule cannot run.
    #[error("rule {}: {}", .0.rule, .0.reason)]
    Refused(RuleRefused),
    /// The rule table refused the change.
    #[error("{0}")]
    Table(#[from] RuleTableError),
    /// A port refused the rules.
    #[error("{0}")]
    Port(#[from] PortError),
    /// A port refused the rules before the start.
    #[error("{0}")]
    Runtime(#[from] RuntimeError),
}

impl RuleControl {
    /// Creates an empty rule list for the ports of a runtime that has not started.
    pub fn new(runtime: &Runtime, parser: Parser, limits: RuleLimits) -> Self {
        Self::for_ports(runtime.domain(), runtime.ports().to_vec(), runtime.queue_workers(), parser, limits)
    }

    /// Creates an empty rule list for these ports, which need not be opened. `workers` is the worker of each
    /// receive queue, by port and queue.
    pub fn for_ports(
        domain: &Domain,
        ports: Vec<PortInfo>,
        workers: Vec<Vec<usize>>,
        parser: Parser,
        limits: RuleLimits,
    ) -> Self {
        let hardware = HardwareRules::new(domain);
        let rule_ports = RulePorts::new(domain, &ports, workers, parser).with_tags(Arc::clone(hardware.tags()));
        Self {
            table: RuleTable::new(domain, limits, 0),
            hardware,
            tunnels: parser.tunnels,
            ports,
            rule_ports: Arc::new(rule_ports),
            rules: RuleList::default(),
            to_kernel: HashMap::new(),
            aged: 0,
        }
    }

    /// Wraps the stage of a worker in a [`RuleStage`].
    pub fn stage<S>(&mut self, worker: &WorkerInfo, stage: S) -> RuleStage<S> {
        RuleStage::new(stage, &mut self.table, Arc::clone(&self.rule_ports), worker.index)
    }

    /// Sets the rules before the start. On error no rule is in force.
    pub fn begin(&mut self, runtime: &mut Runtime, rules: &[Rule]) -> Result<(), RuleControlError> {
        let mut parts = Parts::one(None);
        let decided = in_priority_order(rules, |sorted| runtime.set_rules(sorted))?;
        let placed = self.judge(rules.iter(), &decided, &mut parts)?;
        self.set_table(self.match_by_content(rules.to_vec()), &mut parts)?;
        self.keep_locations(placed);
        Ok(())
    }

    /// Checks the rules again when the ports have started, because their modes are final only then.
    pub fn started(&mut self, plane: &mut ControlPlane) -> Result<(), RuleControlError> {
        self.ports = plane.ports().to_vec();
        self.rule_ports.started(&self.ports);
        let decided = self.set_port_rules(plane, self.rules().map(|(_, rule)| &**rule))?;
        let placed = self.judge(self.rules().map(|(_, rule)| &**rule), &decided, &mut Parts::one(None))?;
        self.keep_locations(placed);
        Ok(())
    }

    /// Takes over ports that were added or removed. Rules that name no port apply to the new ones too.
    ///
    /// # Errors
    /// If a rule cannot run on a new port. The caller removes that port and calls this again.
    pub fn set_ports(&mut self, plane: &mut ControlPlane) -> Result<(), RuleControlError> {
        self.ports = plane.ports().to_vec();
        self.rule_ports.set_ports(&self.ports, plane.queue_workers());
        let decided = self.set_port_rules(plane, self.rules().map(|(_, rule)| &**rule))?;
        let placed = self.judge(self.rules().map(|(_, rule)| &**rule), &decided, &mut Parts::one(None))?;
        self.keep_locations(placed);
        Ok(())
    }

    /// Returns whether the NIC of a port holds rules. Such a port cannot be removed.
    pub fn uses_hardware(&self, port: PortId) -> bool {
        self.hardware.has(port)
    }

    /// Stores the locations of the rules in the list.
    fn keep_locations(&mut self, placed: Vec<RuleLocations>) {
        let all = self.rules.iter().zip(placed);
        self.to_kernel =
            all.filter(|(entry, _)| ends_at_kernel(&entry.rule)).map(|(entry, placed)| (entry.id, placed)).collect();
    }

    /// Enables the rule hardware of these started ports, and installs the rules there that it can hold.
    pub fn enable_hardware(&mut self, plane: &mut ControlPlane, ports: impl IntoIterator<Item = PortId>) {
        for port in ports {
            if let Some(hardware) = plane.rule_hardware(port) {
                self.hardware.add_port(port, hardware, self.tunnels);
                self.rule_ports.set_offloaded(port);
            }
        }
        let all = self.rules.iter().filter_map(|entry| Some((entry.id, self.table.rule_arc(entry.id)?)));
        let all: Vec<(RuleId, Arc<Rule>)> = all.collect();
        let now = plane.now();
        self.hardware.begin(plane, &mut self.table, &[], &all, now);
        self.hardware.finish(plane, &mut self.table, now);
    }

    /// Returns where a rule runs on each port whose packets can match it, rule hardware excluded. The result
    /// is empty if the rule is not in force.
    pub fn locations(&self, id: RuleId) -> RuleLocations {
        let known = self.to_kernel.get(&id).cloned();
        let elsewhere = || {
            let rule = self.table.get(id).filter(|_| self.rules.has(id));
            let ports = rule
                .map(|rule| matching_ports(rule, &self.ports).map(|port| (port.id, RuleLocation::Software)).collect());
            RuleLocations { ports: ports.unwrap_or_default() }
        };
        known.unwrap_or_else(elsewhere)
    }

    /// Returns where each rule runs on the ports with rule hardware, in list order.
    pub fn placements(&self) -> Vec<Vec<(PortId, Placement)>> {
        self.rules.iter().map(|entry| self.placement(entry.id)).collect()
    }

    /// Returns where one rule runs on the ports with rule hardware.
    pub fn placement(&self, id: RuleId) -> Vec<(PortId, Placement)> {
        self.hardware.placements(id, &|id| self.text(id))
    }

    /// Returns where the implicit rules with a mark run on a port, or where one of them does that is not completely in
    /// the NIC; `None`: there are none, or the port has no rule hardware.
    pub fn implicit_decap_placement(&self, port: PortId, mark: u32) -> Option<Placement> {
        self.hardware.implicit_placement(port, mark, &|id| self.text(id))
    }

    /// Returns the text of a rule with the names of the ports.
    fn text(&self, id: RuleId) -> String {
        let names: Vec<_> = self.ports.iter().map(|port| (&*port.name, port.id)).collect();
        self.table.get(id).map_or_else(String::new, |rule| rule.named(Ports(&names)).to_string())
    }

    /// Adds an implicit rule to the NICs, ordered after all other rules. The program does the same in
    /// software for packets that did not match the rule in a NIC. Packets that matched carry `mark` (24 bits)
    /// and [`IMPLICIT_MARK`](crate::rules::offload::IMPLICIT_MARK). Several rules may have the same mark.
    pub fn add_implicit_decap(&mut self, plane: &mut ControlPlane, rule: Rule, mark: u32) {
        let now = plane.now();
        self.hardware.add_implicit_decap(plane, &mut self.table, rule, mark, now);
    }

    /// Removes the implicit rules with this mark. Packets that matched them before may still arrive.
    pub fn remove_implicit_decap(&mut self, plane: &mut ControlPlane, mark: u32) {
        let now = plane.now();
        self.hardware.remove_implicit_decap(plane, &mut self.table, mark, now);
    }

    /// Installs an encapsulation in the NIC of a port, and returns its number. The NIC adds the header to
    /// packets that are sent with this number as transmit metadata. The sender must check their length, and
    /// must leave no transmit offload to be done.
    pub fn add_implicit_encap(
        &mut self,
        plane: &mut ControlPlane,
        port: PortId,
        encap: &ImplicitEncap,
    ) -> Result<u32, Obstacle> {
        let now = plane.now();
        self.hardware.add_implicit_encap(plane, &mut self.table, (port, encap), now)
    }

    /// Removes an encapsulation. The caller must not send any more packets with this number.
    pub fn remove_implicit_encap(&mut self, plane: &ControlPlane, port: PortId, number: u32) {
        self.hardware.remove_implicit_encap(port, number, plane.now());
    }

    /// Returns the rules in NICs.
    pub fn hardware(&self) -> &HardwareRules {
        &self.hardware
    }

    /// Removes all rules from the NICs. Workers match the packets afterwards.
    pub fn disable_hardware(&mut self, plane: &mut ControlPlane) {
        let now = plane.now();
        self.hardware.stop(plane, &mut self.table, now);
        self.count_device_drops(plane);
    }

    /// Tells the control plane how many packets the NICs dropped by rules, for the summary.
    fn count_device_drops(&self, plane: &mut ControlPlane) {
        for (port, n) in self.hardware.dropped(plane) {
            plane.set_rule_drops(port, n);
        }
    }

    /// Replaces the rule list atomically. A rule that is equal to one in force keeps its id and its counters.
    /// After an error the old list is in force.
    pub fn replace(&mut self, plane: &mut ControlPlane, rules: &[Rule]) -> Result<(), RuleControlError> {
        let list = self.match_by_content(rules.to_vec());
        self.rearrange(plane, list).map(drop)
    }

    /// Replaces the rule list atomically like [`Self::replace`], but the caller says which rules stay. Returns
    /// the ids of the list. A refused rule is reported by its index in `list`.
    ///
    /// An id that is not in force, or that the list names twice, is an error.
    pub fn rearrange(
        &mut self,
        plane: &mut ControlPlane,
        list: Vec<ListEntry>,
    ) -> Result<Vec<RuleId>, RuleControlError> {
        self.rearrange_in_parts(plane, list, &mut |_| true)
    }

    /// Like [`Self::rearrange`], but calls `meanwhile` between parts of the work. Workers see no part of the change
    /// before all of it.
    ///
    /// Some of the work is not divided: the program of a port for rules that end at the kernel, and the changes in
    /// NICs.
    pub fn rearrange_in_parts(
        &mut self,
        plane: &mut ControlPlane,
        list: Vec<ListEntry>,
        meanwhile: &mut Meanwhile<'_>,
    ) -> Result<Vec<RuleId>, RuleControlError> {
        let mut named = HashSet::with_capacity(list.len());
        let mut rules: Vec<&Rule> = Vec::with_capacity(list.len());
        let mut parts = Parts::new(&mut *plane, &mut *meanwhile);
        for entry in &list {
            parts.step()?;
            rules.push(match entry {
                ListEntry::New(rule) => rule,
                ListEntry::Keep(id) => match self.rules.get(*id).filter(|_| named.insert(*id)) {
                    Some(entry) => &entry.rule,
                    None => return Err(RuleTableError::NoSuchRule(*id).into()),
                },
            });
        }
        // Ports only need the rules if some of them end at the kernel.
        let ports_need_rules = self.rules.has_kernel_rules() || rules.iter().any(|rule| ends_at_kernel(rule));
        let decided = if ports_need_rules { self.set_port_rules(plane, rules.iter().copied()) } else { Ok(Vec::new()) };
        let judged = decided
            .and_then(|decided| self.judge(rules.into_iter(), &decided, &mut Parts::new(&mut *plane, &mut *meanwhile)));
        let changed =
            judged.and_then(|placed| self.set_table(list, &mut Parts::new(&mut *plane, meanwhile)).map(|()| placed));
        match changed {
            Ok(placed) => {
                self.keep_locations(placed);
                Ok(self.rules.iter().map(|entry| entry.id).collect())
            }
            Err(error) => {
                if ports_need_rules {
                    // The ports get the old rules back.
                    self.set_port_rules(plane, self.rules().map(|(_, rule)| &**rule))?;
                }
                Err(error)
            }
        }
    }

    /// Finds the rules in force that are equal to those of a list. Of several equal rules, the first ones stay.
    fn match_by_content(&self, rules: Vec<Rule>) -> Vec<ListEntry> {
        let mut there: HashMap<&Rule, VecDeque<RuleId>> = HashMap::new();
        for entry in self.rules.iter() {
            there.entry(&entry.rule).or_default().push_back(entry.id);
        }
        let find = |rule: Rule| match there.get_mut(&rule).and_then(VecDeque::pop_front) {
            Some(id) => ListEntry::Keep(id),
            None => ListEntry::New(rule),
        };
        rules.into_iter().map(find).collect()
    }

    /// Removes rules and adds others atomically. New rules are ordered after those of equal priority, and are
    /// appended to the list.
    ///
    /// The cost does not depend on the number of other rules, unless some rule ends at the kernel. Such
    /// rules, and with them all others, must be set on the ports again. A refused rule is reported by its
    /// index in the resulting list. After an error the rules are unchanged.
    pub fn change(
        &mut self,
        plane: &mut ControlPlane,
        removed: &[RuleId],
        new: Vec<Rule>,
    ) -> Result<Vec<RuleId>, RuleControlError> {
        let mut going = HashSet::new();
        if let Some(none) = removed.iter().find(|id| !self.rules.has(**id) || !going.insert(**id)) {
            return Err(RuleTableError::NoSuchRule(*none).into());
        }
        let stay = self.rules.iter().len() - going.len();
        if new.iter().any(ends_at_kernel) || self.rules.has_kernel_rules() {
            let rest = self.rules.iter().map(|entry| entry.id).filter(|id| !going.contains(id));
            let list = rest.map(ListEntry::Keep).chain(new.into_iter().map(ListEntry::New)).collect();
            return Ok(self.rearrange(plane, list)?.split_off(stay));
        }
        for (rule, number) in new.iter().zip(stay..) {
            if let Some(reason) = check(rule, &self.ports) {
                return Err(RuleControlError::Refused(RuleRefused { rule: number, reason }));
            }
        }
        let mut parts = Parts::one(Some(plane));
        let entries = self.change_table(&mut parts, |change, _, leaving, coming| {
            removed.iter().try_for_each(|id| change.remove(*id))?;
            leaving.extend(removed);
            for rule in new {
                let id = change.add(rule, Timeouts::NONE)?;
                coming.extend(change.table().rule_arc(id).map(|rule| (id, rule)));
            }
            Ok(coming.clone())
        })?;
        removed.iter().for_each(|id| drop(self.rules.remove(*id)));
        let ids = entries.iter().map(|(id, _)| *id).collect();
        for (id, rule) in entries {
            self.rules.push(Entry { id, rule });
        }
        Ok(ids)
    }

    /// Adds one rule; see [`Self::change`].
    pub fn add(&mut self, plane: &mut ControlPlane, rule: Rule) -> Result<RuleId, RuleControlError> {
        let mut ids = self.change(plane, &[], vec![rule])?;
        Ok(ids.pop().expect("a change returns one id for each added rule"))
    }

    /// Removes one rule; see [`Self::change`].
    pub fn remove(&mut self, plane: &mut ControlPlane, id: RuleId) -> Result<(), RuleControlError> {
        self.change(plane, &[id], Vec::new()).map(drop)
    }

    /// Changes the table and the NICs together. `f` lists the removed and the added rules.
    fn change_table<R>(
        &mut self,
        parts: &mut Parts<'_, '_>,
        f: impl FnOnce(
            &mut Change<'_>,
            &mut Parts<'_, '_>,
            &mut Vec<RuleId>,
            &mut Vec<(RuleId, Arc<Rule>)>,
        ) -> Result<R, RuleTableError>,
    ) -> Result<R, RuleTableError> {
        let (table, hardware) = (&mut self.table, &mut self.hardware);
        // Without rule hardware, no NIC needs the change.
        let in_nics = !hardware.is_empty();
        let changed = table.change(|change| {
            let (mut removed, mut added) = (Vec::new(), Vec::new());
            let done = f(change, parts, &mut removed, &mut added)?;
            // The change cannot fail any more, and no worker sees it yet.
            if let Some(plane) = parts.plane.as_deref_mut().filter(|_| in_nics) {
                let now = plane.now();
                hardware.begin(plane, change.table(), &removed, &added, now);
            }
            Ok(done)
        })?;
        if let Some(plane) = parts.plane.as_deref_mut().filter(|_| in_nics) {
            let now = plane.now();
            hardware.finish(plane, table, now);
        }
        Ok(changed)
    }

    /// Sets a list of rules on the ports and returns their answers, by index in the list.
    fn set_port_rules<'r>(
        &self,
        plane: &mut ControlPlane,
        rules: impl Iterator<Item = &'r Rule>,
    ) -> Result<Vec<Vec<KernelRule>>, RuleControlError> {
        let rules: Vec<Rule> = rules.cloned().collect();
        let set = |sorted: &[Rule]| self.ports.iter().map(|port| plane.set_rules(port.id, sorted)).collect();
        let decided: Result<_, PortError> = in_priority_order(&rules, set);
        Ok(decided?)
    }

    /// Returns where each rule would run. `decided` are the answers of the ports.
    fn judge<'r>(
        &self,
        rules: impl Iterator<Item = &'r Rule>,
        decided: &[Vec<KernelRule>],
        parts: &mut Parts<'_, '_>,
    ) -> Result<Vec<RuleLocations>, RuleControlError> {
        let limits = self.table.limits();
        let mut judge = ListJudge::new(Some(&self.ports), decided, &limits);
        let judge_one = |(number, rule): (usize, &Rule)| {
            parts.step()?;
            judge.next(rule).map_err(|reason| RuleControlError::Refused(RuleRefused { rule: number, reason }))
        };
        rules.enumerate().map(judge_one).collect()
    }

    /// Changes the table to contain exactly this list. The ids of the list are in force and named once.
    fn set_table(&mut self, list: Vec<ListEntry>, parts: &mut Parts<'_, '_>) -> Result<(), RuleControlError> {
        let mut stays: HashSet<RuleId> = HashSet::with_capacity(list.len());
        for entry in &list {
            parts.step()?;
            stays.extend(if let ListEntry::Keep(id) = entry { Some(*id) } else { None });
        }
        let mut going = Vec::new();
        for entry in self.rules.iter() {
            parts.step()?;
            going.extend(Some(entry.id).filter(|id| !stays.contains(id)));
        }
        let moves = self.moves(&list, parts)?;
        self.rules = self.change_table(parts, |change, parts, removed, added| {
            for id in going {
                parts.step()?;
                change.remove(id)?;
                removed.push(id);
            }
            let mut rules = RuleList::default();
            for (entry, moves) in list.into_iter().zip(moves) {
                parts.step()?;
                let (id, is_new) = match entry {
                    ListEntry::Keep(id) => (id, moves),
                    ListEntry::New(rule) => (change.add(rule, Timeouts::NONE)?, true),
                };
                if moves {
                    change.move_last(id)?;
                    removed.push(id);
                }
                let rule = change.table().rule_arc(id).ok_or(RuleTableError::NoSuchRule(id))?;
                if is_new {
                    added.push((id, Arc::clone(&rule)));
                }
                rules.push(Entry { id, rule });
            }
            Ok(rules)
        })?;
        Ok(())
    }

    /// Finds the rules of a list that must move behind all others of their direction and priority. Those are the
    /// rules that stay, but stand behind a new rule or behind one that is later in the old list.
    fn moves(&self, list: &[ListEntry], parts: &mut Parts<'_, '_>) -> Result<Vec<bool>, RuleTableError> {
        // Position of the last rule that stays in its place, or none if a rule of the group is new or moves.
        let mut groups: HashMap<(Direction, u32), Option<u64>> = HashMap::new();
        let mut moves = |entry: &ListEntry| match entry {
            ListEntry::New(rule) => {
                groups.insert((rule.direction(), rule.priority()), None);
                false
            }
            ListEntry::Keep(id) => {
                let Some((position, entry)) = self.rules.position(*id) else { return false };
                let group = groups.entry((entry.rule.direction(), entry.rule.priority())).or_insert(Some(0));
                *group = group.filter(|last| *last <= position).map(|_| position);
                group.is_none()
            }
        };
        list.iter().map(|entry| parts.step().map(|()| moves(entry))).collect()
    }

    /// Handles a punted packet. Returns it if another stage punted it.
    pub fn punt(punt: Punt, plane: &mut ControlPlane) -> Option<Punt> {
        if punt.code != PUNT_TO_KERNEL {
            return Some(punt);
        }
        plane.inject(punt.packet);
        None
    }

    /// Frees what no worker uses any more. Must be called on every tick.
    pub fn tick(&mut self, plane: &mut ControlPlane) {
        const SECOND: u64 = 1_000_000_000;
        let now = plane.now();
        if !self.hardware.is_empty() {
            self.hardware.tick(plane, &mut self.table, now);
        }
        if now - self.aged < SECOND {
            return;
        }
        self.aged = now;
        let hardware = &mut self.hardware;
        self.table.age(now, |RemovedRule { id, .. }| {
            hardware.last_counted(id);
        });
    }

    /// Returns the rules in force, in list order.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = (RuleId, &Arc<Rule>)> {
        self.rules.iter().map(|entry| (entry.id, &entry.rule))
    }

    /// Returns a rule in force.
    pub fn rule(&self, id: RuleId) -> Option<&Arc<Rule>> {
        self.rules.get(id).map(|entry| &entry.rule)
    }

    /// Returns the rules in force with their counters. Without `plane`, packets that ports decide about are
    /// not counted.
    pub fn active_rules(&self, mut plane: Option<&mut ControlPlane>) -> Vec<ActiveRule> {
        let mut asked = HashSet::new();
        let ids: Vec<RuleId> = self.rules.iter().map(|entry| entry.id).collect();
        ids.into_iter().filter_map(|id| self.active_rule(id, plane.as_deref_mut(), &mut asked)).collect()
    }

    /// Returns a rule in force with its counters, for lists that are made in parts. `asked` holds the rules that
    /// the ports were asked about for this list.
    pub fn active_rule(
        &self,
        id: RuleId,
        mut plane: Option<&mut ControlPlane>,
        asked: &mut HashSet<Arc<Rule>>,
    ) -> Option<ActiveRule> {
        let rule = &self.rules.get(id)?.rule;
        let mut counters = self.table.counters(id).unwrap_or_default();
        if let Some(plane) = &mut plane {
            counters = sum(counters, self.hardware.counted(*plane, id));
        }
        // Ports identify rules by content: of equal rules, only the first one runs. Without a rule that ends at
        // the kernel, the ports decide about none.
        if self.rules.has_kernel_rules() && asked.insert(Arc::clone(rule)) {
            for port in self.ports.iter().map(|port| port.id) {
                if let Some((packets, bytes)) = plane.as_mut().and_then(|plane| plane.rule_counters(port, rule)) {
                    counters = sum(counters, RuleCounters { packets, bytes, last_hit: 0 });
                }
            }
        }
        Some(ActiveRule { id, rule: Arc::clone(rule), counters })
    }

    /// Returns the ports as of the last check.
    pub fn ports(&self) -> &[PortInfo] {
        &self.ports
    }
}

fn sum(a: RuleCounters, b: RuleCounters) -> RuleCounters {
    RuleCounters { packets: a.packets + b.packets, bytes: a.bytes + b.bytes, last_hit: a.last_hit.max(b.last_hit) }
}
