//! The rules of a program: checked against its ports, run by its workers, told to its ports.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use wirepath_pmd::flow::{Action, Direction, Field, ItemKind, Key, Reformat, Rule, What};
use wirepath_pmd::port::{KernelRule, PortId, ToKernel, VlanTags};
use wirepath_wire::{Parser, Tunnels};

use super::hardware::{HardwareRules, Obstacle, Placement};
use super::listed::{Entry, Listed, ends_at_kernel};
use super::{
    Around, Change, Gone, PUNT_TO_KERNEL, RuleCounters, RuleId, RuleLimits, RuleTable, RuleTableError, Ruled, Timeouts,
};
use crate::WorkerInfo;
use crate::epoch::Domain;
use crate::events::Punt;
use crate::runtime::{ControlPlane, PortInfo, Runtime, RuntimeError};

/// A rule that the program cannot honour.
#[derive(Debug)]
pub struct RuleRefused {
    /// Place of the rule in the list that was given.
    pub rule: usize,
    /// What stands in the way.
    pub reason: String,
}

/// Where a rule runs on a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the engine of the workers.
    Software,
    /// In the XDP program, before packets reach the port.
    Xdp,
    /// In the engine of the workers, and its packets are injected into the kernel's receive path one by one; why it is not in the XDP
    /// program.
    Injected(String),
}

/// Where a rule runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// On each port whose packets may fit it.
    pub ports: Vec<(PortId, Place)>,
}

/// A rule that is in force.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Its number, never given to another rule.
    pub id: RuleId,
    /// The rule.
    pub rule: Arc<Rule>,
    /// What it has counted, where a port decides it included.
    pub counters: RuleCounters,
}

/// The control side of [`Ruled`] stages: the rules, in the order in which equal priorities are asked.
#[derive(Debug)]
pub struct RuleControl {
    table: RuleTable,
    hardware: HardwareRules,
    ports: Vec<PortInfo>,
    around: Arc<Around>,
    rules: Listed,
    /// Where those run that end at the kernel; all others run in the workers, or in devices.
    to_kernel: HashMap<RuleId, Placed>,
    /// Rules that were taken out and put in again, to keep their order: whose counters are still to come.
    moved: HashMap<RuleId, RuleId>,
    aged: u64,
    /// What is taken for a tunnel.
    tunnels: Tunnels,
}

/// What stands in the way of a rule on these ports, whichever they are told; `None`: nothing.
///
/// Certain of the modes of ports only once they are started.
pub fn check(rule: &Rule, ports: &[PortInfo]) -> Option<String> {
    check_where(rule, ports, |_| true)
}

/// What stands in the way of a rule on one of these ports, the others aside.
pub fn check_on(rule: &Rule, ports: &[PortInfo], port: PortId) -> Option<String> {
    check_where(rule, ports, |at| at == port)
}

fn check_where(rule: &Rule, ports: &[PortInfo], at: impl Fn(PortId) -> bool) -> Option<String> {
    let name = |port: PortId| match ports.get(usize::from(port)) {
        Some(_) => None,
        None => Some(format!("there is no port {port}; the ports are numbered 0 to {}", ports.len().saturating_sub(1))),
    };
    let set = rule.fields();
    let on = set.get(Key::field(0, Field::PortId));
    if let Some(bits) = on.filter(|bits| bits.mask == 0xffff) {
        let missing = PortId::try_from(bits.value).ok().and_then(name);
        if missing.is_some() {
            return missing;
        }
    }
    let fits = |port: &&PortInfo| at(port.id) && on.is_none_or(|bits| bits.matches(port.id.into()));
    for action in rule.actions() {
        let most = match action {
            Action::Redirect(port) | Action::Mirror(port) => {
                let missing = name(*port);
                if missing.is_some() {
                    return missing;
                }
                continue;
            }
            Action::Queue(queue) => *queue,
            Action::Rss(rss) => rss.queues.iter().copied().max().unwrap_or(0),
            _ => continue,
        };
        if let Some(port) = ports.iter().filter(fits).find(|port| most >= port.queues) {
            let (name, queues) = (&port.name, port.queues);
            return Some(format!("port \"{name}\" has no queue {most}; it has {queues} (queues = {queues})"));
        }
    }
    let tags = set.list().iter().any(|(key, _)| {
        key.level == 0
            && matches!(key.what, What::Field(field) if field == Field::EthTags || field.spec().item == ItemKind::Vlan)
    });
    if tags && rule.direction() == Direction::Ingress {
        let loses = |port: &&PortInfo| fits(port) && port.capabilities.vlan_tags == VlanTags::Lost;
        if let Some(port) = ports.iter().find(loses) {
            let (name, driver) = (&port.name, port.capabilities.driver);
            return Some(format!(
                "port \"{name}\" (driver {driver}) loses the VLAN tags of received frames, so the rule would not see them there; \
                 driver = \"af_packet\" keeps them"
            ));
        }
    }
    None
}

/// Where a rule runs on a port, or why it cannot: `decided` is what the port answered for it.
fn place(rule: &Rule, port: &PortInfo, decided: Option<&Result<(), String>>) -> Result<Place, String> {
    if !ends_at_kernel(rule) {
        return Ok(Place::Software);
    }
    let (name, driver) = (&port.name, port.capabilities.driver);
    let changes = |action: &&Action| {
        matches!(
            action,
            Action::Set { .. } | Action::DecTtl | Action::PushVlan(_) | Action::PopVlan | Action::Reformat(_)
        )
    };
    match (port.capabilities.to_kernel, decided) {
        (ToKernel::No(why), _) => {
            let named = rule.fields().get(Key::field(0, Field::PortId)).is_some();
            let hint = if named { "" } else { "; if it is about other ports, name them (port id NAME)" };
            Err(format!("\"kernel\" cannot be done on port \"{name}\" (driver {driver}): {why}{hint}"))
        }
        (ToKernel::Beside, _) => match rule.actions().iter().find(changes) {
            Some(action) => Err(format!(
                "\"kernel\" behind \"{}\" cannot be done on port \"{name}\" (driver {driver}): the kernel there has every frame as it \
                 came in",
                action.spec().name
            )),
            None => Ok(Place::Software),
        },
        (ToKernel::InFront | ToKernel::InFrontOnly(_), Some(Ok(()))) => Ok(Place::Xdp),
        (ToKernel::InFront, Some(Err(why))) => Ok(Place::Injected(why.clone())),
        (ToKernel::InFrontOnly(reason), Some(Err(why))) => {
            Err(format!("\"kernel\" cannot be done on port \"{name}\" (driver {driver}): {why}, and {reason}"))
        }
        (ToKernel::Back, _) | (_, None) => Ok(Place::Software),
    }
}

/// Where each rule runs on these ports, told what the ports answered (`rule` counts from 0 in `rules`, each list is sorted by it); the
/// first that cannot be honoured is refused.
pub fn place_all(rules: &[Rule], ports: &[PortInfo], decided: &[Vec<KernelRule>]) -> Result<Vec<Placed>, RuleRefused> {
    let place = |number: usize| {
        let refuse = |reason| RuleRefused { rule: number, reason };
        if let Some(reason) = check(&rules[number], ports) {
            return Err(refuse(reason));
        }
        let ports = place_rule(&rules[number], number, ports, decided).into_iter();
        let ports = ports.map(|(port, place)| Ok((port, place?))).collect::<Result<_, String>>();
        Ok(Placed { ports: ports.map_err(refuse)? })
    };
    (0..rules.len()).map(place).collect()
}

/// Where one rule runs on each port whose packets may fit it, or why it cannot; `number` is its place in the list that the ports were
/// told.
pub fn place_rule(
    rule: &Rule,
    number: usize,
    ports: &[PortInfo],
    decided: &[Vec<KernelRule>],
) -> Vec<(PortId, Result<Place, String>)> {
    let place = |port: &PortInfo| {
        let decided = decided.get(usize::from(port.id)).map_or(&[][..], Vec::as_slice);
        let it = decided.binary_search_by_key(&number, |it| it.rule).ok().map(|i| &decided[i].decided);
        (port.id, place(rule, port, it))
    };
    fitting(rule, ports).map(place).collect()
}

/// The ports whose packets may fit a rule.
fn fitting<'p>(rule: &Rule, ports: &'p [PortInfo]) -> impl Iterator<Item = &'p PortInfo> {
    let on = rule.fields().get(Key::field(0, Field::PortId));
    ports.iter().filter(move |port| on.is_none_or(|bits| bits.matches(port.id.into())))
}

/// Rules in the order in which they are asked: their places in the list.
pub fn order(rules: &[Rule]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rules.len()).collect();
    order.sort_by_key(|&i| (rules[i].direction(), rules[i].priority()));
    order
}

/// Tells ports rules in the order in which they are asked; their answers are about the list as it is here.
pub fn in_order<E>(
    rules: &[Rule],
    tell: impl FnOnce(&[Rule]) -> Result<Vec<Vec<KernelRule>>, E>,
) -> Result<Vec<Vec<KernelRule>>, E> {
    let order = order(rules);
    let sorted: Vec<Rule> = order.iter().map(|&i| rules[i].clone()).collect();
    let mut decided = tell(&sorted)?;
    for list in &mut decided {
        list.iter_mut().for_each(|it| it.rule = order[it.rule]);
        list.sort_by_key(|it| it.rule);
    }
    Ok(decided)
}

/// An error of [`RuleControl`].
#[derive(Debug, thiserror::Error)]
pub enum RuleControlError {
    /// A rule that cannot be honoured.
    #[error("rule {}: {}", .0.rule, .0.reason)]
    Refused(RuleRefused),
    /// The table is full.
    #[error("{0}")]
    Table(#[from] RuleTableError),
    /// A port did not take the rules.
    #[error("{0}")]
    Port(#[from] wirepath_pmd::port::PortError),
    /// The same, before the start.
    #[error("{0}")]
    Runtime(#[from] RuntimeError),
}

impl RuleControl {
    /// For the ports of a runtime that is not started, without rules.
    pub fn new(runtime: &Runtime, parser: Parser, limits: RuleLimits) -> Self {
        Self::for_ports(runtime.domain(), runtime.ports().to_vec(), runtime.queue_workers(), parser, limits)
    }

    /// For ports that may exist on paper only. `workers` has the worker of each receive queue.
    pub fn for_ports(
        domain: &Domain,
        ports: Vec<PortInfo>,
        workers: Vec<Vec<usize>>,
        parser: Parser,
        limits: RuleLimits,
    ) -> Self {
        let hardware = HardwareRules::new(domain);
        let around = Around::new(&ports, workers, parser).with_tags(Arc::clone(hardware.tags()));
        Self {
            table: RuleTable::new(domain, limits, 0),
            hardware,
            tunnels: parser.tunnels,
            ports,
            around: Arc::new(around),
            rules: Listed::default(),
            to_kernel: HashMap::new(),
            moved: HashMap::new(),
            aged: 0,
        }
    }

    /// The rules around the stage of a worker.
    pub fn stage<S>(&mut self, worker: &WorkerInfo, stage: S) -> Ruled<S> {
        Ruled::new(stage, &mut self.table, Arc::clone(&self.around), worker.index)
    }

    /// The rules before the start; nothing is in force if one cannot be honoured.
    pub fn begin(&mut self, runtime: &mut Runtime, rules: &[Rule]) -> Result<(), RuleControlError> {
        let placed = self.ask(rules, |_, sorted| runtime.set_rules(sorted).map_err(RuleControlError::from))?;
        self.put(rules, None)?;
        self.note(placed);
        Ok(())
    }

    /// Once the ports are started, and their modes are certain: looks at the rules again.
    pub fn started(&mut self, plane: &mut ControlPlane) -> Result<(), RuleControlError> {
        self.ports = plane.ports().to_vec();
        self.around.started(&self.ports);
        let rules = self.list();
        let placed = self.ask(&rules, |ports, sorted| tell(ports, plane, sorted))?;
        self.note(placed);
        Ok(())
    }

    fn list(&self) -> Vec<Rule> {
        self.rules().map(|(_, rule)| Rule::clone(rule)).collect()
    }

    /// Keeps where the rules of the list run.
    fn note(&mut self, placed: Vec<Placed>) {
        let all = self.rules.iter().zip(placed);
        self.to_kernel =
            all.filter(|(entry, _)| ends_at_kernel(&entry.rule)).map(|(entry, placed)| (entry.id, placed)).collect();
    }

    /// Puts what can be put there into the rule hardware of these started ports, from now on.
    pub fn use_hardware(&mut self, plane: &mut ControlPlane, ports: impl IntoIterator<Item = PortId>) {
        for port in ports {
            if let Some(hardware) = plane.rule_hardware(port) {
                self.hardware.add_port(port, hardware, self.tunnels);
                self.around.has_device(port);
            }
        }
        let all = self.rules.iter().filter_map(|entry| Some((entry.id, self.table.shared(entry.id)?)));
        let all: Vec<(RuleId, Arc<Rule>)> = all.collect();
        let now = plane.now();
        self.hardware.begin(plane, &mut self.table, &[], &all, now);
        self.hardware.finish(plane, &mut self.table, now);
    }

    /// Where a rule runs on each port whose packets may fit it, rule hardware aside; nowhere, if it is not in force.
    pub fn placed(&self, id: RuleId) -> Placed {
        let known = self.to_kernel.get(&id).cloned();
        let elsewhere = || {
            let rule = self.table.get(id).filter(|_| self.rules.has(id));
            let ports = rule.map(|rule| fitting(rule, &self.ports).map(|port| (port.id, Place::Software)).collect());
            Placed { ports: ports.unwrap_or_default() }
        };
        known.unwrap_or_else(elsewhere)
    }

    /// Where each rule runs on the ports with rule hardware, in the order of the list.
    pub fn placements(&self) -> Vec<Vec<(PortId, Placement)>> {
        self.rules.iter().map(|entry| self.placement(entry.id)).collect()
    }

    /// The same of one.
    pub fn placement(&self, id: RuleId) -> Vec<(PortId, Placement)> {
        let name = |id: RuleId| self.table.get(id).map_or_else(String::new, ToString::to_string);
        self.hardware.placements(id, &name)
    }

    /// A rule that only devices have: where its packets come without the device having met it, the program does the same by itself. It
    /// stands behind all others. Packets that have met it come with this mark (24 bits) and [`hardware::OWN`](super::hardware::OWN).
    pub fn own_decap(&mut self, plane: &mut ControlPlane, rule: Rule, mark: u32) {
        let now = plane.now();
        self.hardware.own_decap(plane, &mut self.table, rule, mark, now);
    }

    /// Leaves an encapsulation to the device of a port: packets that are sent there with this number as transmit metadata get the header.
    /// The sender has checked their length, and left nothing to be done behind it.
    pub fn own_encap(&mut self, plane: &mut ControlPlane, port: PortId, header: &Reformat) -> Result<u32, Obstacle> {
        let now = plane.now();
        self.hardware.own_encap(plane, &mut self.table, (port, header), now)
    }

    /// No packet is sent with this number any more.
    pub fn drop_encap(&mut self, plane: &ControlPlane, port: PortId, number: u32) {
        self.hardware.drop_encap(port, number, plane.now());
    }

    /// The hardware stage.
    pub fn hardware(&self) -> &HardwareRules {
        &self.hardware
    }

    /// Takes all rules out of the devices: packets meet them in the workers.
    pub fn leave_hardware(&mut self, plane: &mut ControlPlane) {
        let now = plane.now();
        self.hardware.stop(plane, &mut self.table, now);
    }

    /// Puts other rules in force, at one moment. Rules that stay keep their counters. After an error the old ones are in force.
    pub fn replace(&mut self, plane: &mut ControlPlane, rules: &[Rule]) -> Result<(), RuleControlError> {
        let placed = self.ask(rules, |ports, sorted| tell(ports, plane, sorted));
        match placed.and_then(|placed| self.put(rules, Some(&mut *plane)).map(|()| placed)) {
            Ok(placed) => {
                self.note(placed);
                Ok(())
            }
            Err(error) => {
                // The ports as they were.
                let old = self.list();
                self.ask(&old, |ports, sorted| tell(ports, plane, sorted))?;
                Err(error)
            }
        }
    }

    /// Takes rules out of force and puts others in, all at one moment; these stand behind those of their priority, and behind all in the
    /// list. What that costs does not depend on how many other rules there are, unless some end at the kernel: of these and those around
    /// them the ports are told. A rule that is refused is told by its place in the list as it was to become. After an error the rules are
    /// as they were.
    pub fn change(
        &mut self,
        plane: &mut ControlPlane,
        gone: &[RuleId],
        new: Vec<Rule>,
    ) -> Result<Vec<RuleId>, RuleControlError> {
        let mut going = HashSet::new();
        if let Some(none) = gone.iter().find(|id| !self.rules.has(**id) || !going.insert(**id)) {
            return Err(RuleTableError::NoSuchRule(*none).into());
        }
        let stay = self.rules.iter().len() - going.len();
        if new.iter().any(ends_at_kernel) || self.rules.have_to_kernel() {
            let rest = self.rules.iter().filter(|entry| !going.contains(&entry.id));
            let mut rules: Vec<Rule> = rest.map(|entry| Rule::clone(&entry.rule)).collect();
            rules.extend(new);
            self.replace(plane, &rules)?;
            return Ok(self.rules.iter().skip(stay).map(|entry| entry.id).collect());
        }
        for (rule, number) in new.iter().zip(stay..) {
            if let Some(reason) = check(rule, &self.ports) {
                return Err(RuleControlError::Refused(RuleRefused { rule: number, reason }));
            }
        }
        let entries = self.alter(Some(plane), |change, leaving, coming| {
            gone.iter().try_for_each(|id| change.remove(*id))?;
            leaving.extend(gone);
            for rule in new {
                let id = change.add(rule, Timeouts::NONE)?;
                coming.extend(change.table().shared(id).map(|rule| (id, rule)));
            }
            Ok(coming.clone())
        })?;
        gone.iter().for_each(|id| drop(self.rules.remove(*id)));
        let ids = entries.iter().map(|(id, _)| *id).collect();
        for (id, rule) in entries {
            self.rules.push(Entry { id, rule, before: RuleCounters::default() });
        }
        Ok(ids)
    }

    /// One more rule; see [`Self::change`].
    pub fn add(&mut self, plane: &mut ControlPlane, rule: Rule) -> Result<RuleId, RuleControlError> {
        let mut ids = self.change(plane, &[], vec![rule])?;
        Ok(ids.pop().expect("a change gives one for each that comes"))
    }

    /// One rule less; see [`Self::change`].
    pub fn remove(&mut self, plane: &mut ControlPlane, id: RuleId) -> Result<(), RuleControlError> {
        self.change(plane, &[id], Vec::new()).map(drop)
    }

    /// Changes the table, and what the devices have of it: `f` says what goes and what comes.
    fn alter<R>(
        &mut self,
        plane: Option<&mut ControlPlane>,
        f: impl FnOnce(&mut Change<'_>, &mut Vec<RuleId>, &mut Vec<(RuleId, Arc<Rule>)>) -> Result<R, RuleTableError>,
    ) -> Result<R, RuleTableError> {
        let (table, hardware) = (&mut self.table, &mut self.hardware);
        // Without ports that have rule hardware, there is nothing to tell them.
        let mut plane = plane.filter(|_| !hardware.is_empty());
        let changed = table.change(|change| {
            let (mut gone, mut added) = (Vec::new(), Vec::new());
            let done = f(change, &mut gone, &mut added)?;
            // Nothing can go wrong any more, and no worker sees it yet.
            if let Some(plane) = &mut plane {
                let now = plane.now();
                hardware.begin(*plane, change.table(), &gone, &added, now);
            }
            Ok(done)
        })?;
        if let Some(plane) = plane {
            let now = plane.now();
            hardware.finish(plane, table, now);
        }
        Ok(changed)
    }

    /// Where each rule would run; `tell` tells the ports.
    fn ask(
        &self,
        rules: &[Rule],
        tell: impl FnOnce(&[PortInfo], &[Rule]) -> Result<Vec<Vec<KernelRule>>, RuleControlError>,
    ) -> Result<Vec<Placed>, RuleControlError> {
        let decided = in_order(rules, |sorted| tell(&self.ports, sorted))?;
        place_all(rules, &self.ports, &decided).map_err(RuleControlError::Refused)
    }

    /// Makes the table have these rules.
    fn put(&mut self, rules: &[Rule], plane: Option<&mut ControlPlane>) -> Result<(), RuleControlError> {
        let old = self.rules.take();
        let kept = Kept::of(&old, rules);
        let changed = self.alter(plane, |change, gone, added| {
            for (entry, _) in old.iter().zip(&kept.old).filter(|(_, kept)| !**kept) {
                change.remove(entry.id)?;
                gone.push(entry.id);
            }
            let mut ids = Vec::with_capacity(rules.len());
            for (rule, from) in rules.iter().zip(&kept.new) {
                ids.push(match from {
                    Some(i) => old[*i].id,
                    None => {
                        let id = change.add(rule.clone(), Timeouts::NONE)?;
                        added.extend(change.table().shared(id).map(|rule| (id, rule)));
                        id
                    }
                });
            }
            Ok(ids)
        });
        let ids = match changed {
            Ok(ids) => ids,
            Err(error) => {
                self.rules = old.into_iter().collect();
                return Err(error.into());
            }
        };
        // What goes on under another number.
        let mut gone: HashMap<&Rule, &Entry> = HashMap::new();
        for (entry, _) in old.iter().zip(&kept.old).filter(|(_, kept)| !**kept) {
            gone.entry(&entry.rule).or_insert(entry);
        }
        for ((rule, id), from) in rules.iter().zip(ids).zip(&kept.new) {
            let Some(shared) = self.table.shared(id) else { continue };
            let mut entry = Entry { id, rule: shared, before: RuleCounters::default() };
            if let Some(i) = from {
                entry.before = old[*i].before;
            } else if let Some(same) = gone.remove(rule) {
                entry.before = same.before;
                // What was to come from still earlier places comes here now.
                self.moved.values_mut().filter(|to| **to == same.id).for_each(|to| *to = id);
                self.moved.insert(same.id, id);
            }
            self.rules.push(entry);
        }
        Ok(())
    }

    /// A packet that a [`Ruled`] stage punted; `Some`: it is of another stage.
    pub fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) -> Option<Punt> {
        if punt.code != PUNT_TO_KERNEL {
            return Some(punt);
        }
        plane.inject(punt.packet);
        None
    }

    /// To be called on every tick: frees what no worker sees any more.
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
        let (rules, moved, hardware) = (&mut self.rules, &mut self.moved, &mut self.hardware);
        self.table.age(now, |Gone { id, counters, .. }| {
            let counters = sum(counters, hardware.last_counted(id));
            if let Some(to) = moved.remove(&id)
                && let Some(entry) = rules.get_mut(to)
            {
                entry.before = sum(entry.before, counters);
            }
        });
    }

    /// The rules in force, in the order of the list.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = (RuleId, &Arc<Rule>)> {
        self.rules.iter().map(|entry| (entry.id, &entry.rule))
    }

    /// The rules in force with their counters. `plane` asks the ports; without, what ports decide is not counted.
    pub fn standing(&self, mut plane: Option<&mut ControlPlane>) -> Vec<Standing> {
        // Ports know rules by what they say: of those that say the same, the first is the one that runs.
        let mut asked = HashSet::new();
        // What they counted under other numbers, for which workers may still count.
        let mut earlier: HashMap<RuleId, RuleCounters> = HashMap::new();
        for (from, to) in &self.moved {
            let mut counters = self.table.last_counters(*from).unwrap_or_default();
            if let Some(plane) = &mut plane {
                counters = sum(counters, self.hardware.counted(*plane, *from));
            }
            let all = earlier.entry(*to).or_default();
            *all = sum(*all, counters);
        }
        let all = self.rules.iter().map(|Entry { id, rule, before }| {
            let mut counters = sum(*before, self.table.counters(*id).unwrap_or_default());
            counters = sum(counters, earlier.get(id).copied().unwrap_or_default());
            if let Some(plane) = &mut plane {
                counters = sum(counters, self.hardware.counted(*plane, *id));
            }
            let first = asked.insert(rule);
            for port in (0..self.ports.len() as PortId).filter(|_| first) {
                if let Some((packets, bytes)) = plane.as_mut().and_then(|plane| plane.rule_counters(port, rule)) {
                    counters = sum(counters, RuleCounters { packets, bytes, last_hit: 0 });
                }
            }
            Standing { id: *id, rule: Arc::clone(rule), counters }
        });
        all.collect()
    }

    /// The ports, as they were looked at last.
    pub fn ports(&self) -> &[PortInfo] {
        &self.ports
    }
}

/// Which rules stay where they are.
struct Kept {
    old: Vec<bool>,
    /// Place in the old list.
    new: Vec<Option<usize>>,
}

impl Kept {
    /// Which of the old rules can stay where they are: of each direction and priority those that both lists begin with. The others must
    /// be added again, behind them, for the order to be right.
    fn of(there: &[Entry], rules: &[Rule]) -> Self {
        let mut kept = Self { old: vec![false; there.len()], new: vec![None; rules.len()] };
        let mut groups: HashMap<(Direction, u32), (Vec<usize>, Vec<usize>)> = HashMap::new();
        for (i, entry) in there.iter().enumerate() {
            groups.entry((entry.rule.direction(), entry.rule.priority())).or_default().0.push(i);
        }
        for (i, rule) in rules.iter().enumerate() {
            groups.entry((rule.direction(), rule.priority())).or_default().1.push(i);
        }
        for (old, new) in groups.into_values() {
            // What is only taken out between two that stay does not change their order.
            let mut old = old.into_iter();
            for i in new {
                let Some(same) = old.by_ref().find(|&j| *there[j].rule == rules[i]) else { break };
                kept.old[same] = true;
                kept.new[i] = Some(same);
            }
        }
        kept
    }
}

fn tell(
    ports: &[PortInfo],
    plane: &mut ControlPlane,
    sorted: &[Rule],
) -> Result<Vec<Vec<KernelRule>>, RuleControlError> {
    ports.iter().map(|port| plane.set_rules(port.id, sorted).map_err(RuleControlError::from)).collect()
}

fn sum(a: RuleCounters, b: RuleCounters) -> RuleCounters {
    RuleCounters { packets: a.packets + b.packets, bytes: a.bytes + b.bytes, last_hit: a.last_hit.max(b.last_hit) }
}
