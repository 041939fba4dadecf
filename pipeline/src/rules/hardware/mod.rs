//! The hardware stage: rules that a port's NIC can take over are put there; all keep their one meaning.
//!
//! **The software engine always has every rule.** A packet that comes without a tag is treated by it as on any port. A packet with a tag
//! has met the rule that the tag names, in the NIC, and no other: what is left of that rule's actions is done, and nothing is looked up.
//! So all that must be true is that the NIC gives a packet to a rule only if no rule above fits it, and that is what `plan` sees to:
//! a rule may be in the NIC only if all rules above it that overlap are there too.
//!
//! # Changes
//! What is in the NIC is right for the rules that the workers have at that moment, all the time:
//! 1. Rules that must go (removed, moved, or below one that goes) leave the NIC, from below.
//! 2. The workers get the new rules, all at one moment.
//! 3. Rules that may be in the NIC are installed, from above. One that the NIC refuses stays in software, and so do those below it.
//!
//! A rule that becomes another is one that goes and one that comes, even where only its actions change: a device has one entry for a match
//! at a priority, and the kernel refuses a second that does something else (mlx5: `EEXIST`), so that the new one cannot lie beside the old.
//! Between the two, workers find the rule; nothing below it is in the NIC meanwhile.
//!
//! At every moment a packet meets the rules as they were before or as they are afterwards. Those in a receive ring have met the rules
//! that were there when they came: their tags keep their meaning until the rings are drained.
//!
//! # Egress
//! Here software comes first: the workers find the rule, and instead of putting headers on they note the rule's number as transmit
//! metadata; the NIC does what the number says. A number that the NIC does not know (any more) is dropped there, never sent bare.

mod drain;
mod fit;
mod overlap;
mod plan;
mod tags;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use wirepath_pmd::flow::{Action, Bits, Direction, Field, FieldSet, Item, ItemKind, Key, Reformat, Rule};
use wirepath_pmd::packet::BATCH;
use wirepath_pmd::port::hardware::{
    FateKind, HardwareCount, HardwareRule, HardwareRuleId, RefusalKind, RuleCapabilities, RuleFate, RuleHardware,
    RuleRefusal,
};
use wirepath_pmd::port::{Port, PortId};
use wirepath_wire::Tunnels;

use super::words::Pattern;
use super::{Program, RuleCounters, RuleId, RuleTable};
use crate::epoch::Domain;
use drain::{Batch, Drains};
pub use fit::Obstacle;
use fit::{Fit, Judge, Rest};
use overlap::Index;
use plan::{Place, Plan, Why};
use tags::Space;
pub(super) use tags::{Tagged, Tags};

/// Set in every number that workers give as transmit metadata, so that one rule of the NIC finds all that it does not know.
pub const METADATA: u32 = 1 << 31;

/// Set in the marks of packets that have met a rule of the program's own ([`super::RuleControl::own_decap`]): no mark of a user's rule has
/// it.
pub const OWN: u32 = 1 << 24;

/// Nanoseconds between two attempts to install what a device has refused.
const AGAIN: u64 = 1_000_000_000;
/// Refusals for want of room after which the device is not asked about the rest.
const ENOUGH: usize = 16;
/// Refused rules that a device is asked about at one time.
const ANEW: usize = 1024;

/// Where a rule runs on a port with rule hardware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In the NIC; software does no more than note the mark and count. Which of the rule's packets are left to software all the same, in
    /// words, if any are.
    Hardware(Option<String>),
    /// The NIC does a part and software the rest; what stands in the way of the whole.
    Split(Obstacle),
    /// In software; what stands in the way of the NIC.
    Software(Obstacle),
}

impl Placement {
    /// In a word.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Hardware(_) => "hardware",
            Self::Split(_) => "split",
            Self::Software(_) => "software",
        }
    }

    /// What stands in the way of the NIC.
    pub fn why(&self) -> Option<String> {
        match self {
            Self::Hardware(left) => left.as_ref().map(|left| format!("left to software: packets {left}")),
            Self::Split(obstacle) | Self::Software(obstacle) => Some(obstacle.to_string()),
        }
    }
}

/// Where the rule hardware of ports is found.
pub trait Devices {
    /// That of a port, if it has some.
    fn rule_hardware(&mut self, port: PortId) -> Option<&mut dyn RuleHardware>;

    /// What each receive queue of a port has counted: packets, polls that found nothing, and the length of its ring.
    fn receive_rings(&self, port: PortId) -> Vec<Ring> {
        let _ = port;
        Vec::new()
    }
}

/// What is known of a receive ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Packets taken out of it.
    pub packets: u64,
    /// Polls that found it empty.
    pub empty: u64,
    /// Most packets that lie in it.
    pub depth: u64,
}

impl Ring {
    /// Of the queues of a started port.
    pub fn of(port: &Port) -> Vec<Self> {
        let depth = u64::from(port.config().depth);
        let ring =
            |queue: wirepath_pmd::counters::QueueStats| Self { packets: queue.packets, empty: queue.empty, depth };
        port.rx_statistics().into_iter().map(ring).collect()
    }

    /// Whether nothing is left of what lay in it then. A poll that had begun then may have found it empty before.
    fn drained_since(self, then: Self) -> bool {
        self.empty >= then.empty + 2 || self.packets >= then.packets + 2 * then.depth + BATCH as u64
    }
}

/// The hardware stage of a program.
#[derive(Debug)]
pub struct HardwareRules {
    domain: Domain,
    ports: Vec<PortRules>,
    space: Space,
    draining: Drains,
    /// What devices have counted for rules that they no longer have.
    banked: HashMap<RuleId, HardwareCount>,
    /// Marks of rules that only devices have.
    own: HashMap<RuleId, u32>,
    /// Encapsulations of the program's own, by port and number.
    encaps: HashMap<(PortId, u32), HardwareRuleId>,
    /// Changes when encapsulations are lost with their device.
    lost: u64,
}

/// One port.
#[derive(Debug)]
struct PortRules {
    port: PortId,
    plan: Plan,
    installed: HashMap<RuleId, Installed>,
    /// Rules that are to be installed.
    wanted: BTreeSet<(Place, RuleId)>,
    /// The rules above all others; they are installed as soon as there are others.
    aside: Vec<HardwareRuleId>,
    /// What a device did not give back.
    stuck: Vec<HardwareRuleId>,
    epoch: u64,
    again: u64,
    /// The refused rule that the device was asked about last, unless all were.
    asked: Option<(Place, RuleId)>,
    counters: u32,
}

/// A rule in a device.
#[derive(Debug)]
struct Installed {
    /// Its guards first.
    ids: Vec<HardwareRuleId>,
    level: u16,
    direction: Direction,
    tag: Option<u32>,
    /// `None`: the program's own.
    record: Option<u32>,
    counted: bool,
}

impl HardwareRules {
    /// Without ports.
    pub(super) fn new(domain: &Domain) -> Self {
        Self {
            domain: domain.clone(),
            ports: Vec::new(),
            space: Space::new(domain),
            draining: Drains::default(),
            banked: HashMap::new(),
            own: HashMap::new(),
            encaps: HashMap::new(),
            lost: 0,
        }
    }

    /// Whether a port has rule hardware that is used.
    pub fn has(&self, port: PortId) -> bool {
        self.ports.iter().any(|it| it.port == port)
    }

    /// Changes when [`super::RuleControl::own_encap`] must be called anew for all.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// See [`super::RuleControl::own_decap`].
    pub(super) fn own_decap(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        rule: Rule,
        mark: u32,
        now: u64,
    ) {
        let id = RuleId::of_number(u64::MAX - self.own.len() as u64);
        self.own.insert(id, OWN | mark);
        self.begin(devices, table, &[], &[(id, Arc::new(rule))], now);
        self.finish(devices, table, now);
    }

    /// See [`super::RuleControl::own_encap`].
    pub(super) fn own_encap(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        (port, reformat): (PortId, &Reformat),
        now: u64,
    ) -> Result<u32, Obstacle> {
        self.renew(devices, table, now);
        let stop = |why: String| Obstacle::new("encap", why);
        let it = self.ports.iter_mut().find(|it| it.port == port).ok_or_else(|| stop("no rule hardware".to_owned()))?;
        it.plan.judge.own_encap(reformat)?;
        let device = devices.rule_hardware(port).ok_or_else(|| stop("the port is gone".to_owned()))?;
        it.set_aside(device).map_err(|refusal| stop(refusal.reason))?;
        let tag = self.space.take(u32::MAX).ok_or_else(|| stop("all numbers are in use".to_owned()))?;
        let number = METADATA | tag;
        let rule = at_egress(number, vec![Action::Reformat(reformat.clone())]);
        match device.install(&rule) {
            Ok(id) => {
                self.encaps.insert((port, number), id);
                Ok(number)
            }
            Err(refusal) => {
                self.space.give_back(tag);
                Err(stop(refusal.reason))
            }
        }
    }

    /// See [`super::RuleControl::drop_encap`].
    pub(super) fn drop_encap(&mut self, port: PortId, number: u32, now: u64) {
        if let Some(id) = self.encaps.remove(&(port, number)) {
            let mut batch = Batch::new(port, Vec::new(), now);
            batch.push(number & !METADATA, None, vec![id]);
            self.draining.push(batch);
        }
    }

    pub(super) fn tags(&self) -> &Arc<Tags> {
        self.space.tags()
    }

    /// Uses the rule hardware of a port from the next change on.
    pub(super) fn add_port(&mut self, port: PortId, hardware: &dyn RuleHardware, tunnels: Tunnels) {
        self.ports.push(PortRules {
            port,
            plan: Plan::new(Judge::new(hardware.capabilities(), port, tunnels)),
            installed: HashMap::new(),
            wanted: BTreeSet::new(),
            aside: Vec::new(),
            stuck: Vec::new(),
            epoch: hardware.epoch(),
            again: 0,
            asked: None,
            counters: 0,
        });
    }

    /// Whether there is a port with rule hardware.
    pub(super) fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// First half of a change, before the workers see it: plans, and takes out of the devices what must not be there any more.
    pub(super) fn begin(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        gone: &[RuleId],
        added: &[(RuleId, Arc<Rule>)],
        now: u64,
    ) {
        self.renew(devices, table, now);
        let Self { ports, draining, banked, own, .. } = self;
        for it in ports {
            let added: Vec<(RuleId, &Arc<Rule>, FieldSet)> = added
                .iter()
                .map(|(id, rule)| (*id, rule, rule.fields()))
                .filter(|(.., set)| is_of(set, it.port))
                .collect();
            let place = |(id, rule, _): &(RuleId, &Arc<Rule>, FieldSet)| (rule.priority(), id.number());
            let mut evict = Evict::default();
            let mut coming = Index::default();
            if !gone.is_empty() {
                let ingress = added.iter().filter(|(_, rule, _)| rule.direction() == Direction::Ingress);
                for (number, new) in (0..).zip(ingress) {
                    coming.insert(number, place(new), &Pattern::of(&new.2));
                    coming.stand(number, 0, |_, _| {});
                }
            }
            for id in gone.iter().filter(|id| it.installed.contains_key(id)) {
                // Its packets may be for a rule that comes: nobody below that may have them in between.
                let pattern = it.plan.rule(*id).filter(|_| !added.is_empty()).map(|rule| Pattern::of(&rule.fields()));
                evict.add(it, *id, pattern.and_then(|pattern| coming.first(&pattern)));
            }
            for id in gone {
                if let Some(place) = it.plan.place(*id) {
                    it.wanted.remove(&(place, *id));
                }
                it.plan.remove(*id);
            }
            for new in &added {
                let (id, rule, set) = new;
                it.plan.add(*id, place(new), Arc::clone(rule), set, own.contains_key(id));
            }
            it.replan(&mut evict);
            it.evict(devices, table, evict, (draining, banked), now);
        }
    }

    /// Second half, when the workers have the new rules: installs what may be in the devices.
    pub(super) fn finish(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { ports, draining, banked, space, own, .. } = self;
        for it in ports {
            it.install(devices, table, (space, own), (draining, banked), now);
        }
    }

    /// To be called now and then: asks again where a device has refused, and takes tags back.
    pub(super) fn tick(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        self.renew(devices, table, now);
        let Self { ports, draining, banked, space, own, .. } = self;
        for it in ports.iter_mut() {
            let Some(device) = devices.rule_hardware(it.port) else { continue };
            it.stuck.retain(|id| device.remove(*id).is_err());
            if now >= it.again {
                let some: Vec<(Place, RuleId)> = it.plan.refused_behind(it.asked).take(ANEW).collect();
                it.asked = some.last().copied().filter(|_| some.len() == ANEW);
                // As long as it takes them, it is asked about more at once; a refusal puts that off.
                it.again = if it.asked.is_some() { now } else { now + AGAIN };
                some.into_iter().for_each(|(_, id)| it.plan.refuse(id, None));
                let mut evict = Evict::default();
                it.replan(&mut evict);
                it.evict(devices, table, evict, (draining, banked), now);
                it.install(devices, table, (space, own), (draining, banked), now);
            }
        }
        self.drain(devices, table, now);
    }

    /// Begins anew with devices that have lost rules. Before anything else is done with them: what is said to be installed must be, or
    /// rules below it would have its packets.
    fn renew(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { ports, draining, banked, encaps, lost, .. } = self;
        for it in ports {
            let Some(device) = devices.rule_hardware(it.port) else { continue };
            if device.epoch() == it.epoch {
                continue;
            }
            it.epoch = device.epoch();
            let can = device.capabilities();
            it.lost(devices, table, can, (&mut *draining, &mut *banked), now);
            let mut own = Batch::new(it.port, Vec::new(), now);
            for ((_, number), id) in encaps.extract_if(|(port, _), _| *port == it.port) {
                own.push(number & !METADATA, None, vec![id]);
            }
            draining.push(own);
            *lost += 1;
        }
    }

    /// Takes back the tags that no packet can carry any more.
    fn drain(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { draining, space, domain, ports, .. } = self;
        let stuck = |at: PortId, id| {
            ports.iter_mut().filter(|it| it.port == at).for_each(|it| it.stuck.push(id));
        };
        draining.turn(devices, table, (space, domain), stuck, now);
    }

    /// Takes everything out of the devices.
    pub(super) fn stop(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { ports, draining, banked, encaps, .. } = self;
        for ((port, _), id) in encaps.drain() {
            if let Some(device) = devices.rule_hardware(port) {
                let _ = device.remove(id);
            }
        }
        for it in ports {
            let mut evict = Evict::default();
            let all: Vec<RuleId> = it.installed.keys().copied().collect();
            all.into_iter().for_each(|id| evict.add(it, id, None));
            it.evict(devices, table, evict, (draining, banked), now);
            it.wanted.clear();
            if let Some(device) = devices.rule_hardware(it.port) {
                for id in it.aside.drain(..).rev() {
                    let _ = device.remove(id);
                }
            }
        }
    }

    /// What devices have counted for a rule.
    pub(super) fn counted(&self, devices: &mut dyn Devices, id: RuleId) -> RuleCounters {
        let mut sum = self.banked.get(&id).copied().unwrap_or_default();
        for it in &self.ports {
            let Some(installed) = it.installed.get(&id).filter(|installed| installed.counted) else { continue };
            let main = installed.ids.last().copied();
            if let Some(count) = main.and_then(|main| devices.rule_hardware(it.port)?.count(main)) {
                sum.packets += count.packets;
                sum.bytes += count.bytes;
            }
        }
        RuleCounters { packets: sum.packets, bytes: sum.bytes, last_hit: 0 }
    }

    /// The same for one that is gone, for the last time.
    pub(super) fn last_counted(&mut self, id: RuleId) -> RuleCounters {
        let sum = self.banked.remove(&id).unwrap_or_default();
        RuleCounters { packets: sum.packets, bytes: sum.bytes, last_hit: 0 }
    }

    /// Where a rule runs on each port with rule hardware whose packets may fit it. `name` tells people of a rule.
    pub(super) fn placements(&self, id: RuleId, name: &dyn Fn(RuleId) -> String) -> Vec<(PortId, Placement)> {
        let of = |it: &PortRules| Some((it.port, placement(&it.plan, id, name)?));
        self.ports.iter().filter_map(of).collect()
    }

    /// Rules in devices, by port.
    pub fn installed(&self) -> impl Iterator<Item = (PortId, usize)> {
        self.ports.iter().map(|it| (it.port, it.installed.len()))
    }

    /// Entries of the tables by which rules that overlap are found: what memory grows with beside the rules themselves. Each rule is in
    /// one for each set of bits by which its own kind (mask and headers) is told from others; at most 33.
    pub fn entries(&self) -> usize {
        self.ports.iter().map(|it| it.plan.entries()).sum()
    }

    /// Tags that wait for their rings to be drained.
    pub fn draining(&self) -> usize {
        self.draining.len()
    }
}

/// Where a rule runs; `None` if the plan does not have it. `name` tells people of a rule.
fn placement(plan: &Plan, id: RuleId, name: &dyn Fn(RuleId) -> String) -> Option<Placement> {
    let obstacle = match plan.why_not(id) {
        None => {
            return Some(match plan.fit(id)? {
                Ok(Fit { split: Some(obstacle), .. }) => Placement::Split(obstacle),
                Ok(fit) => Placement::Hardware(fit.left()),
                Err(obstacle) => Placement::Software(obstacle),
            });
        }
        Some(Why::Obstacle(obstacle)) => obstacle,
        Some(Why::Above(other)) => {
            let why = format!("above it and overlapping with it, this runs (partly) in software: {}", name(other));
            Obstacle::new("priority", why)
        }
        Some(Why::TooDeep(levels)) => {
            Obstacle::new("priority", format!("more rules overlap above it than the NIC has levels ({levels})"))
        }
        Some(Why::Refused(refusal)) => Obstacle::new("refused", refusal.reason),
    };
    Some(Placement::Software(obstacle))
}

/// Where rules would run on a port with such a NIC: nothing is opened. `None`: its packets cannot fit the rule.
pub fn on_paper(can: &RuleCapabilities, port: PortId, tunnels: Tunnels, rules: &[Rule]) -> Vec<Option<Placement>> {
    let mut plan = Plan::new(Judge::new(can.clone(), port, tunnels));
    for (number, rule) in (0..).zip(rules) {
        let set = rule.fields();
        if is_of(&set, port) {
            plan.add(RuleId::of_number(number), (rule.priority(), number), Arc::new(rule.clone()), &set, false);
        }
    }
    plan.settle();
    let name = |id: RuleId| rules.get(id.number() as usize).map_or_else(String::new, ToString::to_string);
    (0..rules.len() as u64).map(|number| placement(&plan, RuleId::of_number(number), &name)).collect()
}

/// Whether packets of a port can fit a rule.
fn is_of(set: &FieldSet, port: PortId) -> bool {
    set.get(Key::field(0, Field::PortId)).is_none_or(|bits| bits.matches(port.into()))
}

/// Rules that leave a device, the lowest first.
#[derive(Debug, Default)]
struct Evict {
    rules: BTreeSet<(Place, RuleId)>,
    seen: HashSet<(RuleId, Option<Place>)>,
}

impl Evict {
    /// With what is installed below it, from a place on, and all that is below these: else the packets of those that leave would meet
    /// others in the device.
    fn add(&mut self, it: &PortRules, id: RuleId, below: Option<Place>) {
        let mut list = vec![(id, below)];
        while let Some((id, below)) = list.pop() {
            if !self.seen.insert((id, below)) {
                continue;
            }
            let Some(place) = it.plan.place(id) else { continue };
            self.rules.insert((place, id));
            let Some(from) =
                below.filter(|_| it.installed.get(&id).is_some_and(|it| it.direction == Direction::Ingress))
            else {
                continue;
            };
            it.plan.below(id, |place, other| {
                if place > from && it.installed.contains_key(&other) {
                    list.push((other, Some(Place::default())));
                }
            });
        }
    }
}

type Books<'a> = (&'a mut Drains, &'a mut HashMap<RuleId, HardwareCount>);

impl PortRules {
    /// Plans anew: what must leave, and what is wanted.
    fn replan(&mut self, evict: &mut Evict) {
        for id in self.plan.settle() {
            let (Some(place), target) = (self.plan.place(id), self.plan.target(id)) else { continue };
            self.wanted.remove(&(place, id));
            match self.installed.get(&id) {
                Some(installed) if Some(installed.level) == target => {}
                Some(_) => evict.add(self, id, Some(Place::default())),
                None => {}
            }
            if target.is_some() && !self.installed.contains_key(&id) {
                self.wanted.insert((place, id));
            }
        }
    }

    /// Takes rules out of the device, from below. Those that are still to be there are wanted again.
    fn evict(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        evict: Evict,
        (draining, banked): Books<'_>,
        now: u64,
    ) {
        if evict.rules.is_empty() {
            return;
        }
        let mut tags = Batch::new(self.port, devices.receive_rings(self.port), now);
        for &(place, id) in evict.rules.iter().rev() {
            let Some(installed) = self.installed.remove(&id) else { continue };
            if self.plan.target(id).is_some() {
                self.wanted.insert((place, id));
            }
            if installed.direction == Direction::Egress {
                installed.record.into_iter().for_each(|record| table.mark_egress(record, 0));
            }
            let Some(device) = devices.rule_hardware(self.port) else { continue };
            if installed.direction == Direction::Egress {
                installed.tag.into_iter().for_each(|tag| tags.push(tag, installed.record, installed.ids.clone()));
                continue;
            }
            // The rule before its guards: what they keep away from it must not come to it.
            for (nth, hardware) in installed.ids.iter().rev().enumerate() {
                match device.remove(*hardware) {
                    Ok(count) if nth == 0 && installed.counted => {
                        let sum = banked.entry(id).or_default();
                        sum.packets += count.packets;
                        sum.bytes += count.bytes;
                    }
                    Ok(_) => {}
                    Err(refusal) if refusal.kind == RefusalKind::Gone => {}
                    Err(refusal) => {
                        tracing::error!("port {}: a rule stays in the device: {refusal}", self.port);
                        self.stuck.push(*hardware);
                    }
                }
            }
            self.counters -= u32::from(installed.counted);
            installed.tag.into_iter().for_each(|tag| tags.push(tag, installed.record, Vec::new()));
        }
        draining.push(tags);
    }

    /// Installs what is wanted, from above.
    fn install(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        (space, own): (&mut Space, &HashMap<RuleId, u32>),
        (draining, banked): Books<'_>,
        now: u64,
    ) {
        let mut full = 0;
        while let Some((place, id)) = self.wanted.pop_first() {
            let (Some(level), Some(Ok(fit))) = (self.plan.target(id), self.plan.fit(id)) else { continue };
            let record = table.record(id);
            let own = own.get(&id).copied();
            if record.is_none() && own.is_none() {
                continue;
            }
            let done = match full < ENOUGH {
                true => self.install_one(devices, table, space, (id, level, record, own), fit),
                false => Err(RuleRefusal {
                    kind: RefusalKind::Full,
                    errno: None,
                    reason: "the NIC has had no room for the rules above it".to_owned(),
                }),
            };
            let Err(refusal) = done else { continue };
            match refusal.kind {
                // All of its rules are gone: they are installed when it is back.
                RefusalKind::Gone => {
                    self.wanted.insert((place, id));
                    return;
                }
                RefusalKind::Full => full += 1,
                _ => {}
            }
            tracing::debug!("port {}: a rule stays in software: {refusal}", self.port);
            self.again = now + AGAIN;
            self.plan.refuse(id, Some(refusal));
            let mut evict = Evict::default();
            self.replan(&mut evict);
            self.evict(devices, table, evict, (&mut *draining, &mut *banked), now);
        }
    }

    fn install_one(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        space: &mut Space,
        (id, level, record, own): (RuleId, u16, Option<u32>, Option<u32>),
        fit: Fit,
    ) -> Result<(), RuleRefusal> {
        let Some(rule) = self.plan.rule(id).map(Arc::clone) else { return Ok(()) };
        let direction = rule.direction();
        let full = |reason: String| RuleRefusal { kind: RefusalKind::Full, errno: None, reason };
        let can = &self.plan.judge.can;
        let (limit, counters) = can.table(direction).map_or((Some(0), 0), |it| (it.rules, it.most_counters()));
        if limit.is_some_and(|limit| self.installed.len() + self.aside.len() >= limit as usize) {
            return Err(full(format!("{} has no room for more rules", can.device)));
        }
        if fit.counted && self.counters >= counters {
            return Err(full(format!("{} has no more counters", can.device)));
        }
        let tag = match (direction, &fit.rest) {
            (Direction::Ingress, Rest::Gone) => None,
            _ => {
                // Numbers at egress are not marks of received packets.
                let most = if direction == Direction::Egress { u32::MAX } else { can.max_tag() };
                let none = || full(format!("all tags of {} are in use", can.device));
                Some(space.take(most).ok_or_else(none)?)
            }
        };
        let port = self.port;
        let Some(device) = devices.rule_hardware(port) else {
            return Err(RuleRefusal { kind: RefusalKind::Gone, errno: None, reason: "the port is gone".to_owned() });
        };
        if let Err(refusal) = self.set_aside(device) {
            tag.into_iter().for_each(|tag| space.give_back(tag));
            return Err(refusal);
        }
        if let (Direction::Ingress, Some(tag)) = (direction, tag) {
            record.into_iter().for_each(|record| table.hold(record));
            let mut entry = tagged(record, &rule, &fit);
            entry.own = own.unwrap_or(0);
            space.set(tag, entry);
        }
        let mut ids = Vec::new();
        for guard in &fit.guards {
            let guard = HardwareRule {
                direction,
                level,
                pattern: guard.clone(),
                actions: Vec::new(),
                fate: RuleFate::Next,
                tag: None,
                count: false,
                in_order: false,
            };
            match device.install(&guard) {
                Ok(id) => ids.push(id),
                Err(refusal) => {
                    undo(device, ids, &mut self.stuck);
                    back(tag, direction, record, space, table);
                    return Err(refusal);
                }
            }
        }
        let main = match direction {
            Direction::Ingress => HardwareRule {
                direction,
                level: level + u16::from(!fit.guards.is_empty()),
                pattern: fit.pattern,
                actions: fit.actions,
                fate: fit.fate,
                tag,
                count: fit.counted,
                in_order: fit.in_order,
            },
            Direction::Egress => at_egress(METADATA | tag.unwrap_or_default(), fit.actions),
        };
        match device.install(&main) {
            Ok(main) => ids.push(main),
            Err(refusal) => {
                undo(device, ids, &mut self.stuck);
                back(tag, direction, record, space, table);
                return Err(refusal);
            }
        }
        if let (Direction::Egress, Some(tag), Some(record)) = (direction, tag, record) {
            table.hold(record);
            table.mark_egress(record, METADATA | tag);
        }
        self.counters += u32::from(fit.counted);
        self.installed.insert(id, Installed { ids, level, direction, tag, record, counted: fit.counted });
        Ok(())
    }

    /// The rules above all others, unless they are there.
    fn set_aside(&mut self, device: &mut dyn RuleHardware) -> Result<(), RuleRefusal> {
        if self.aside.is_empty() {
            self.aside = put_aside(device, &self.plan.judge)?;
        }
        Ok(())
    }

    /// The device has lost rules, and may be another now. Nothing is taken to be there any more; what is, goes.
    fn lost(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        can: RuleCapabilities,
        books: Books<'_>,
        now: u64,
    ) {
        let mut evict = Evict::default();
        let all: Vec<RuleId> = self.installed.keys().copied().collect();
        all.into_iter().for_each(|id| evict.add(self, id, None));
        self.evict(devices, table, evict, books, now);
        let aside = std::mem::take(&mut self.aside);
        if let Some(device) = devices.rule_hardware(self.port).filter(|_| !aside.is_empty()) {
            undo(device, aside, &mut self.stuck);
            // Packets with numbers of before are on their way: they are not to go out bare. What is refused is asked for again later.
            let _ = self.set_aside(device);
        }
        self.asked = None;
        self.again = now;
        self.wanted.clear();
        self.plan.judge_anew(can);
        let mut evict = Evict::default();
        self.replan(&mut evict);
        // Those whose place is as it was are to be installed all the same.
        self.wanted.extend(self.plan.targets());
    }
}

/// What is above all rules: packets that the device takes apart differently, and at egress numbers that it does not know.
fn put_aside(device: &mut dyn RuleHardware, judge: &Judge) -> Result<Vec<HardwareRuleId>, RuleRefusal> {
    let mut ids = Vec::new();
    let next = |pattern: Vec<Item>, direction, level, fate| HardwareRule {
        direction,
        level,
        pattern,
        actions: Vec::new(),
        fate,
        tag: None,
        count: false,
        in_order: false,
    };
    let mut rules: Vec<HardwareRule> = Vec::new();
    for pattern in judge.aside(Direction::Ingress) {
        rules.push(next(pattern.items().to_vec(), Direction::Ingress, 0, RuleFate::Next));
    }
    if let Some(egress) = judge.can.egress.as_ref() {
        let unknown = Bits { value: METADATA.into(), mask: METADATA.into() };
        let masks = egress.item(ItemKind::Meta, false).and_then(|item| item.field(Field::MetaData));
        let drops = egress.actions.fates.contains(&FateKind::Drop);
        if drops && egress.levels > 1 && masks.is_some_and(|masks| masks.allow(unknown.mask, 32)) {
            let pattern = vec![Item::new(ItemKind::Meta).with(Field::MetaData, unknown)];
            rules.push(next(pattern, Direction::Egress, egress.levels - 1, RuleFate::Drop));
        }
    }
    for rule in &rules {
        match device.install(rule) {
            Ok(id) => ids.push(id),
            Err(refusal) => {
                undo(device, ids, &mut Vec::new());
                return Err(refusal);
            }
        }
    }
    Ok(ids)
}

/// What a packet with this number as transmit metadata is done to.
fn at_egress(number: u32, actions: Vec<Action>) -> HardwareRule {
    HardwareRule {
        direction: Direction::Egress,
        level: 0,
        pattern: vec![Item::new(ItemKind::Meta).exact(Field::MetaData, number.into())],
        actions,
        fate: RuleFate::Next,
        tag: None,
        count: false,
        in_order: false,
    }
}

fn undo(device: &mut dyn RuleHardware, ids: Vec<HardwareRuleId>, stuck: &mut Vec<HardwareRuleId>) {
    stuck.extend(ids.into_iter().rev().filter(|id| device.remove(*id).is_err()));
}

/// A tag that no packet has ever carried.
fn back(tag: Option<u32>, direction: Direction, record: Option<u32>, space: &mut Space, table: &mut RuleTable) {
    if let Some(tag) = tag {
        space.give_back(tag);
        if direction == Direction::Ingress {
            record.into_iter().for_each(|record| table.release(record));
        }
    }
}

/// What workers do with the packets of a rule that is in a device.
fn tagged(record: Option<u32>, rule: &Rule, fit: &Fit) -> Tagged {
    let (rest, counts) = match &fit.rest {
        Rest::Whole => (None, !rule.actions().contains(&Action::Count)),
        Rest::Gone => (None, false),
        Rest::Only(actions) => {
            let counts = !fit.counted && !actions.contains(&Action::Count);
            (Some(Program::of_actions(actions)), counts)
        }
    };
    let whole = matches!(fit.rest, Rest::Whole);
    let looks = |action: &Action| {
        !matches!(
            action,
            Action::Count
                | Action::Mark(_)
                | Action::Limit(_)
                | Action::Drop
                | Action::Kernel
                | Action::Queue(_)
                | Action::Redirect(_)
        )
    };
    Tagged { own: 0, record, rest, counts, looks: whole && rule.actions().iter().any(looks) }
}
