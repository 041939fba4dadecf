//! Offload of rules to NICs. A rule has the same meaning in software and in a NIC.
//!
//! **The software engine always has every rule.** It looks up each packet without a tag as on any port. A
//! packet with a tag has already matched the rule of that tag in the NIC. Workers run the remaining actions
//! of that rule and look nothing up.
//!
//! So the only condition is that the NIC matches a packet against a rule only if no rule above it matches.
//! "Above" means earlier in matching order. `plan` ensures this: a rule may be in the NIC only if all
//! overlapping rules above it are there too.
//!
//! # Changes
//! The NIC is always consistent with the rules that the workers have:
//! 1. Rules that must go (removed, reordered, or below such a rule) leave the NIC, lowest first.
//! 2. The workers get the new rules atomically.
//! 3. Rules that may be in the NIC are installed, highest first. A rule that the NIC refuses stays in
//!    software, and so do the rules below it.
//!
//! A replaced rule is removed and added, even if only its actions change. A device has one entry for a match
//! at a priority, and the kernel refuses a second one with other actions (mlx5: `EEXIST`). So the new rule
//! cannot be installed next to the old one. In between, workers find the rule, and nothing below it is in the
//! NIC.
//!
//! At any time a packet matches either the rules before a change or those after it. Packets in a receive ring
//! matched the rules at their arrival. Their tags keep their meaning until the rings are drained.
//!
//! # Egress
//! At egress software matches first. The workers find the rule and store its number as transmit metadata
//! instead of adding headers. The NIC runs the actions of that number. The NIC drops packets with an unknown
//! number, so they are never sent without headers.

mod drain;
mod overlap;
mod plan;
mod tag_allocator;
#[cfg(all(test, not(loom)))]
mod tests;
mod translate;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use wirepath_flow::{Action, Direction, Field, FieldSet, Item, ItemKind, Key, MaskedValue, Ports, Rule};
use wirepath_packet::BATCH;
use wirepath_pmd::port::hardware::{
    DestinationKind, HardwareCount, HardwareRule, HardwareRuleId, RefusalKind, RuleCapabilities, RuleDestination,
    RuleHardware, RuleRefusal,
};
use wirepath_pmd::port::{Port, PortId};
use wirepath_wire::Tunnels;

use super::{Program, RuleCounters, RuleId, RuleTable};
use crate::epoch::Domain;
use crate::rules::classifier::match_key::Pattern;
use drain::{DrainBatch, DrainQueue};
use overlap::OverlapIndex;
use plan::{OffloadBlocker, OffloadPlan, RuleOrder};
use tag_allocator::TagAllocator;
pub(super) use tag_allocator::{TagEntry, TagTable};
use translate::{CapabilityCheck, OffloadRule, RemainingActions};
pub use translate::{ImplicitEncap, Obstacle};

/// Bit set in all transmit metadata numbers, so that one rule of the NIC matches all unknown numbers.
pub const TX_METADATA_BIT: u32 = 1 << 31;

/// Bit set in the marks of packets that matched an implicit rule
/// ([`super::RuleControl::add_implicit_decap`]). Marks of user rules do not have it.
pub const IMPLICIT_MARK: u32 = 1 << 24;

/// Nanoseconds between two attempts to install refused rules.
const RETRY_INTERVAL: u64 = 1_000_000_000;
/// Number of refusals for lack of space after which the remaining rules are not tried.
const MAX_FULL_REFUSALS: usize = 16;
/// Maximum number of refused rules that are tried again at a time.
const MAX_RETRIES: usize = 1024;

/// Location of a rule on a port with rule hardware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The NIC runs the rule. Software only sets the mark and counts. The text describes the packets of the
    /// rule that are left to software, if there are any.
    Hardware(Option<String>),
    /// The NIC runs a part and software the rest. The obstacle prevents full offload.
    Split(Obstacle),
    /// Software runs the rule. The obstacle prevents offload.
    Software(Obstacle),
}

impl Placement {
    /// Returns the name of the location.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Hardware(_) => "hardware",
            Self::Split(_) => "split",
            Self::Software(_) => "software",
        }
    }

    /// Returns the reason why the rule is not completely in the NIC.
    pub fn why(&self) -> Option<String> {
        match self {
            Self::Hardware(left) => left.as_ref().map(|left| format!("left to software: packets {left}")),
            Self::Split(obstacle) | Self::Software(obstacle) => Some(obstacle.to_string()),
        }
    }
}

/// Access to the rule hardware of ports.
pub trait Devices {
    /// Returns the rule hardware of a port, if it has one.
    fn rule_hardware(&mut self, port: PortId) -> Option<&mut dyn RuleHardware>;

    /// Returns the counters of each receive queue of a port.
    fn receive_rings(&self, port: PortId) -> Vec<RingCounters> {
        let _ = port;
        Vec::new()
    }
}

/// Counters of a receive ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingCounters {
    /// Packets received from the ring.
    pub packets: u64,
    /// Polls that found the ring empty.
    pub empty: u64,
    /// Capacity of the ring in packets.
    pub depth: u64,
}

impl RingCounters {
    /// Returns the counters of the queues of a started port.
    pub fn of(port: &Port) -> Vec<Self> {
        let depth = u64::from(port.config().depth);
        let ring =
            |queue: wirepath_packet::counters::QueueStats| Self { packets: queue.packets, empty: queue.empty, depth };
        port.rx_statistics().into_iter().map(ring).collect()
    }

    /// Returns true if all packets that were in the ring at time `then` have been received. A poll that was
    /// running at that time may have seen the ring empty before.
    fn drained_since(self, then: Self) -> bool {
        self.empty >= then.empty + 2 || self.packets >= then.packets + 2 * then.depth + BATCH as u64
    }
}

/// The rules of a program that are in NICs.
#[derive(Debug)]
pub struct HardwareRules {
    domain: Domain,
    ports: Vec<PortRules>,
    tag_allocator: TagAllocator,
    draining: DrainQueue,
    /// Counters of rules that are no longer in a NIC.
    final_counts: HashMap<RuleId, HardwareCount>,
    /// Marks of implicit rules.
    implicit: HashMap<RuleId, u32>,
    /// Implicit rules by their marks.
    implicit_by_mark: HashMap<u32, Vec<RuleId>>,
    /// Number of implicit rules up to now.
    implicit_count: u64,
    /// Implicit encapsulations, by port and number.
    encaps: HashMap<(PortId, u32), HardwareRuleId>,
    /// Number of times that a NIC lost its encapsulations.
    encap_losses: u64,
}

/// The rules of one port.
#[derive(Debug)]
struct PortRules {
    port: PortId,
    plan: OffloadPlan,
    installed: HashMap<RuleId, InstalledRule>,
    /// Rules that are to be installed.
    pending: BTreeSet<(RuleOrder, RuleId)>,
    /// Rules above all others. They are installed with the first rule.
    exclusions: Vec<HardwareRuleId>,
    /// Rules that the device failed to remove.
    unremovable: Vec<HardwareRuleId>,
    epoch: u64,
    retry_at: u64,
    /// Last refused rule that was tried again; `None` if all were.
    retried_up_to: Option<(RuleOrder, RuleId)>,
    counters: u32,
    /// Packets dropped by rules that are no longer in the device.
    dropped: u64,
}

/// A rule in a device.
#[derive(Debug)]
struct InstalledRule {
    /// Hardware rules: first the guards, then the rule itself.
    ids: Vec<HardwareRuleId>,
    level: u16,
    direction: Direction,
    tag: Option<u32>,
    /// Record of the rule; `None` for an implicit rule.
    record: Option<u32>,
    counted: bool,
    /// The device drops the packets of the rule.
    drops: bool,
}

impl HardwareRules {
    /// Creates the object without ports.
    pub(super) fn new(domain: &Domain) -> Self {
        Self {
            domain: domain.clone(),
            ports: Vec::new(),
            tag_allocator: TagAllocator::new(domain),
            draining: DrainQueue::default(),
            final_counts: HashMap::new(),
            implicit: HashMap::new(),
            implicit_by_mark: HashMap::new(),
            implicit_count: 0,
            encaps: HashMap::new(),
            encap_losses: 0,
        }
    }

    /// Returns true if the rule hardware of a port is in use.
    pub fn has(&self, port: PortId) -> bool {
        self.ports.iter().any(|it| it.port == port)
    }

    /// Returns a counter that changes when all [`super::RuleControl::add_implicit_encap`] calls must be
    /// repeated.
    pub fn encap_losses(&self) -> u64 {
        self.encap_losses
    }

    /// See [`super::RuleControl::add_implicit_decap`].
    pub(super) fn add_implicit_decap(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        rule: Rule,
        mark: u32,
        now: u64,
    ) {
        let id = RuleId::of_number(u64::MAX - self.implicit_count);
        self.implicit_count += 1;
        self.implicit.insert(id, IMPLICIT_MARK | mark);
        self.implicit_by_mark.entry(mark).or_default().push(id);
        self.begin(devices, table, &[], &[(id, Arc::new(rule))], now);
        self.finish(devices, table, now);
    }

    /// See [`super::RuleControl::remove_implicit_decap`].
    pub(super) fn remove_implicit_decap(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        mark: u32,
        now: u64,
    ) {
        let Some(ids) = self.implicit_by_mark.remove(&mark) else { return };
        self.begin(devices, table, &ids, &[], now);
        ids.iter().for_each(|id| _ = self.implicit.remove(id));
        self.finish(devices, table, now);
    }

    /// See [`super::RuleControl::add_implicit_encap`].
    pub(super) fn add_implicit_encap(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        (port, encap): (PortId, &ImplicitEncap),
        now: u64,
    ) -> Result<u32, Obstacle> {
        self.resync(devices, table, now);
        let stop = |why: String| Obstacle::new("encap", why);
        let it = self.ports.iter_mut().find(|it| it.port == port).ok_or_else(|| stop("no rule hardware".to_owned()))?;
        it.plan.capabilities.check_encap(encap)?;
        let device = devices.rule_hardware(port).ok_or_else(|| stop("the port does not exist any more".to_owned()))?;
        it.install_exclusions(device).map_err(|refusal| stop(refusal.reason))?;
        let tag =
            self.tag_allocator.allocate(u32::MAX).ok_or_else(|| stop("all metadata numbers are in use".to_owned()))?;
        let number = TX_METADATA_BIT | tag;
        let rule = egress_rule(number, vec![Action::Reformat(encap.header.clone())]);
        match device.install(&rule) {
            Ok(id) => {
                self.encaps.insert((port, number), id);
                Ok(number)
            }
            Err(refusal) => {
                self.tag_allocator.free(tag);
                Err(stop(refusal.reason))
            }
        }
    }

    /// See [`super::RuleControl::remove_implicit_encap`].
    pub(super) fn remove_implicit_encap(&mut self, port: PortId, number: u32, now: u64) {
        if let Some(id) = self.encaps.remove(&(port, number)) {
            let mut batch = DrainBatch::new(port, Vec::new(), now);
            batch.push(number & !TX_METADATA_BIT, None, vec![id]);
            self.draining.push(batch);
        }
    }

    pub(super) fn tags(&self) -> &Arc<TagTable> {
        self.tag_allocator.tags()
    }

    /// Uses the rule hardware of a port from the next change on.
    pub(super) fn add_port(&mut self, port: PortId, hardware: &dyn RuleHardware, tunnels: Tunnels) {
        self.ports.push(PortRules {
            port,
            plan: OffloadPlan::new(CapabilityCheck::new(hardware.capabilities(), port, tunnels)),
            installed: HashMap::new(),
            pending: BTreeSet::new(),
            exclusions: Vec::new(),
            unremovable: Vec::new(),
            epoch: hardware.epoch(),
            retry_at: 0,
            retried_up_to: None,
            counters: 0,
            dropped: 0,
        });
    }

    /// Returns true if no port has rule hardware.
    pub(super) fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// First half of a change, before the workers see it: plans the offload, and removes rules from the NICs
    /// that must not be there any more.
    pub(super) fn begin(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        removed: &[RuleId],
        added: &[(RuleId, Arc<Rule>)],
        now: u64,
    ) {
        self.resync(devices, table, now);
        let Self { ports, draining, final_counts, implicit, .. } = self;
        for it in ports {
            // Implicit rules are not in the table. Their ids place them behind all others.
            let order = |id: RuleId, rule: &Rule| (rule.priority(), table.sequence(id).unwrap_or(id.number()));
            let added: Vec<(RuleId, RuleOrder, &Arc<Rule>, FieldSet)> = added
                .iter()
                .map(|(id, rule)| (*id, order(*id, rule), rule, rule.fields()))
                .filter(|(.., set)| may_match_port(set, it.port))
                .collect();
            let mut evict = Eviction::default();
            let mut coming = OverlapIndex::default();
            if !removed.is_empty() {
                let ingress = added.iter().filter(|(.., rule, _)| rule.direction() == Direction::Ingress);
                for (number, (_, order, _, set)) in (0..).zip(ingress) {
                    coming.insert(number, *order, &Pattern::of(set));
                    coming.set_state(number, 0, |_, _| {});
                }
            }
            for id in removed.iter().filter(|id| it.installed.contains_key(id)) {
                // Packets of this rule may belong to a new rule. So no rule below the new one may be in the
                // NIC in between.
                let pattern = it.plan.rule(*id).filter(|_| !added.is_empty()).map(|rule| Pattern::of(&rule.fields()));
                evict.add(it, *id, pattern.and_then(|pattern| coming.first(&pattern)));
            }
            for id in removed {
                if let Some(order) = it.plan.order(*id) {
                    it.pending.remove(&(order, *id));
                }
                it.plan.remove(*id);
            }
            for (id, order, rule, set) in &added {
                it.plan.add(*id, *order, Arc::clone(rule), set, implicit.contains_key(id));
            }
            it.replan(&mut evict);
            it.evict(devices, table, evict, (draining, final_counts), now);
        }
    }

    /// Second half of a change, when the workers have the new rules: installs rules in the NICs.
    pub(super) fn finish(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { ports, draining, final_counts, tag_allocator, implicit, .. } = self;
        for it in ports {
            it.install(devices, table, (tag_allocator, implicit), (draining, final_counts), now);
        }
    }

    /// Retries refused rules and frees tags. Must be called regularly.
    pub(super) fn tick(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        self.resync(devices, table, now);
        let Self { ports, draining, final_counts, tag_allocator, implicit, .. } = self;
        for it in ports.iter_mut() {
            let Some(device) = devices.rule_hardware(it.port) else { continue };
            it.unremovable.retain(|id| device.remove(*id).is_err());
            if now >= it.retry_at {
                let some: Vec<(RuleOrder, RuleId)> =
                    it.plan.refused_behind(it.retried_up_to).take(MAX_RETRIES).collect();
                it.retried_up_to = some.last().copied().filter(|_| some.len() == MAX_RETRIES);
                // While the device accepts rules, the next batch follows at once. A refusal delays it.
                it.retry_at = if it.retried_up_to.is_some() { now } else { now + RETRY_INTERVAL };
                some.into_iter().for_each(|(_, id)| it.plan.refuse(id, None));
                let mut evict = Eviction::default();
                it.replan(&mut evict);
                it.evict(devices, table, evict, (draining, final_counts), now);
                it.install(devices, table, (tag_allocator, implicit), (draining, final_counts), now);
            }
        }
        self.drain(devices, table, now);
    }

    /// Resynchronises devices that lost their rules. This must precede every other operation. Otherwise a
    /// rule that counts as installed would be missing, and rules below it would match its packets.
    fn resync(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { ports, draining, final_counts, encaps, encap_losses, .. } = self;
        for it in ports {
            let Some(device) = devices.rule_hardware(it.port) else { continue };
            if device.epoch() == it.epoch {
                continue;
            }
            it.epoch = device.epoch();
            let can = device.capabilities();
            it.handle_device_loss(devices, table, can, (&mut *draining, &mut *final_counts), now);
            let mut batch = DrainBatch::new(it.port, Vec::new(), now);
            for ((_, number), id) in encaps.extract_if(|(port, _), _| *port == it.port) {
                batch.push(number & !TX_METADATA_BIT, None, vec![id]);
            }
            draining.push(batch);
            *encap_losses += 1;
        }
    }

    /// Frees the tags that no packet can carry any more.
    fn drain(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { draining, tag_allocator, domain, ports, .. } = self;
        let unremovable = |at: PortId, id| {
            ports.iter_mut().filter(|it| it.port == at).for_each(|it| it.unremovable.push(id));
        };
        draining.poll(devices, table, (tag_allocator, domain), unremovable, now);
    }

    /// Removes all rules from the NICs.
    pub(super) fn stop(&mut self, devices: &mut dyn Devices, table: &mut RuleTable, now: u64) {
        let Self { ports, draining, final_counts, encaps, .. } = self;
        for ((port, _), id) in encaps.drain() {
            if let Some(device) = devices.rule_hardware(port) {
                let _ = device.remove(id);
            }
        }
        for it in ports {
            let mut evict = Eviction::default();
            let all: Vec<RuleId> = it.installed.keys().copied().collect();
            all.into_iter().for_each(|id| evict.add(it, id, None));
            it.evict(devices, table, evict, (draining, final_counts), now);
            it.pending.clear();
            if let Some(device) = devices.rule_hardware(it.port) {
                for id in it.exclusions.drain(..).rev() {
                    let _ = device.remove(id);
                }
            }
        }
    }

    /// Returns the packets and bytes that NICs counted for a rule.
    pub(super) fn counted(&self, devices: &mut dyn Devices, id: RuleId) -> RuleCounters {
        let mut sum = self.final_counts.get(&id).copied().unwrap_or_default();
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

    /// Returns the packets that the NIC of each port dropped by rules, as far as it counts them.
    pub(super) fn dropped(&self, devices: &mut dyn Devices) -> Vec<(PortId, u64)> {
        let mut all = Vec::with_capacity(self.ports.len());
        for it in &self.ports {
            let drops = it.installed.values().filter(|installed| installed.drops && installed.counted);
            let count = |id| devices.rule_hardware(it.port)?.count(id).map(|count| count.packets);
            let installed: u64 = drops.filter_map(|installed| installed.ids.last().copied()).filter_map(count).sum();
            all.push((it.port, it.dropped + installed));
        }
        all
    }

    /// Returns the final counters of a removed rule, and forgets them.
    pub(super) fn last_counted(&mut self, id: RuleId) -> RuleCounters {
        let sum = self.final_counts.remove(&id).unwrap_or_default();
        RuleCounters { packets: sum.packets, bytes: sum.bytes, last_hit: 0 }
    }

    /// Returns where a rule runs on each port with rule hardware whose packets can match it. `name` returns
    /// the text of a rule.
    pub(super) fn placements(&self, id: RuleId, name: &dyn Fn(RuleId) -> String) -> Vec<(PortId, Placement)> {
        let of = |it: &PortRules| Some((it.port, placement(&it.plan, id, name)?));
        self.ports.iter().filter_map(of).collect()
    }

    /// See [`super::RuleControl::implicit_decap_placement`].
    pub(super) fn implicit_placement(
        &self,
        port: PortId,
        mark: u32,
        name: &dyn Fn(RuleId) -> String,
    ) -> Option<Placement> {
        let it = self.ports.iter().find(|it| it.port == port)?;
        let all = self.implicit_by_mark.get(&mark)?.iter().filter_map(|id| placement(&it.plan, *id, name));
        all.reduce(|one, other| if matches!(one, Placement::Hardware(None)) { other } else { one })
    }

    /// Returns the number of rules in the NIC of each port.
    pub fn installed(&self) -> impl Iterator<Item = (PortId, usize)> {
        self.ports.iter().map(|it| (it.port, it.installed.len()))
    }

    /// Returns the number of entries in the tables of the overlap index, which determine its memory. Each
    /// rule has one entry for each set of bits that separates its group (mask and headers) from others; at
    /// most 33.
    pub fn entries(&self) -> usize {
        self.ports.iter().map(|it| it.plan.entries()).sum()
    }

    /// Returns the number of tags that wait until their rings are drained.
    pub fn draining(&self) -> usize {
        self.draining.len()
    }
}

/// Returns the reason why a port with such a NIC would refuse an encapsulation, without opening it.
pub fn predict_encap(can: &RuleCapabilities, port: PortId, encap: &ImplicitEncap) -> Result<(), Obstacle> {
    CapabilityCheck::new(can.clone(), port, Tunnels::NONE).check_encap(encap)
}

/// Returns where a rule runs, or `None` if the plan does not contain it. `name` returns the text of a rule.
fn placement(plan: &OffloadPlan, id: RuleId, name: &dyn Fn(RuleId) -> String) -> Option<Placement> {
    let obstacle = match plan.blocker(id) {
        None => {
            return Some(match plan.fit(id)? {
                Ok(OffloadRule { split: Some(obstacle), .. }) => Placement::Split(obstacle),
                Ok(fit) => Placement::Hardware(fit.left()),
                Err(obstacle) => Placement::Software(obstacle),
            });
        }
        Some(OffloadBlocker::Obstacle(obstacle)) => obstacle,
        Some(OffloadBlocker::Above(other)) => {
            let why = format!("a rule above it overlaps and runs in software, at least partly: {}", name(other));
            Obstacle::new("priority", why)
        }
        Some(OffloadBlocker::TooDeep(levels)) => {
            Obstacle::new("priority", format!("more rules overlap above it than the NIC has levels ({levels})"))
        }
        Some(OffloadBlocker::Refused(refusal)) => Obstacle::new("refused", refusal.reason),
    };
    Some(Placement::Software(obstacle))
}

/// Predicts where rules would run on a port with such a NIC, without opening it. The last `implicit` rules are implicit
/// ones. The entry is `None` if packets of the port cannot match the rule. Reasons name ports as `names` does.
pub fn predict_placements(
    can: &RuleCapabilities,
    port: PortId,
    tunnels: Tunnels,
    (rules, implicit): (&[Rule], usize),
    names: Ports<'_>,
) -> Vec<Option<Placement>> {
    let mut plan = OffloadPlan::new(CapabilityCheck::new(can.clone(), port, tunnels));
    let explicit = rules.len().saturating_sub(implicit) as u64;
    for (number, rule) in (0..).zip(rules) {
        let set = rule.fields();
        if may_match_port(&set, port) {
            let (order, rule) = ((rule.priority(), number), Arc::new(rule.clone()));
            plan.add(RuleId::of_number(number), order, rule, &set, number >= explicit);
        }
    }
    plan.update();
    let name =
        |id: RuleId| rules.get(id.number() as usize).map_or_else(String::new, |rule| rule.named(names).to_string());
    (0..rules.len() as u64).map(|number| placement(&plan, RuleId::of_number(number), &name)).collect()
}

/// Returns true if packets of a port can match a rule.
fn may_match_port(set: &FieldSet, port: PortId) -> bool {
    set.get(Key::field(0, Field::PortId)).is_none_or(|bits| bits.matches(port.number().into()))
}

/// Rules that leave a device, lowest first.
#[derive(Debug, Default)]
struct Eviction {
    rules: BTreeSet<(RuleOrder, RuleId)>,
    /// Pairs of a rule and an order `below` that were visited already.
    visited: HashSet<(RuleId, Option<RuleOrder>)>,
}

impl Eviction {
    /// Adds a rule, and the installed rules that overlap it from the order `below` on, and everything below
    /// those. Otherwise the packets of the removed rules would match other rules in the device.
    fn add(&mut self, it: &PortRules, id: RuleId, below: Option<RuleOrder>) {
        let mut list = vec![(id, below)];
        while let Some((id, below)) = list.pop() {
            if !self.visited.insert((id, below)) {
                continue;
            }
            let Some(order) = it.plan.order(id) else { continue };
            self.rules.insert((order, id));
            let Some(from) =
                below.filter(|_| it.installed.get(&id).is_some_and(|it| it.direction == Direction::Ingress))
            else {
                continue;
            };
            it.plan.below(id, |order, other| {
                if order > from && it.installed.contains_key(&other) {
                    list.push((other, Some(RuleOrder::default())));
                }
            });
        }
    }
}

type RemovalState<'a> = (&'a mut DrainQueue, &'a mut HashMap<RuleId, HardwareCount>);

impl PortRules {
    /// Updates the plan: the rules that must leave, and those that are to be installed.
    fn replan(&mut self, evict: &mut Eviction) {
        for id in self.plan.update() {
            let (Some(order), target) = (self.plan.order(id), self.plan.target(id)) else { continue };
            self.pending.remove(&(order, id));
            match self.installed.get(&id) {
                Some(installed) if Some(installed.level) == target => {}
                Some(_) => evict.add(self, id, Some(RuleOrder::default())),
                None => {}
            }
            if target.is_some() && !self.installed.contains_key(&id) {
                self.pending.insert((order, id));
            }
        }
    }

    /// Removes rules from the device, lowest first. Rules that stay in the plan are installed again later.
    fn evict(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        evict: Eviction,
        (draining, final_counts): RemovalState<'_>,
        now: u64,
    ) {
        if evict.rules.is_empty() {
            return;
        }
        let mut tags = DrainBatch::new(self.port, devices.receive_rings(self.port), now);
        for &(_, id) in evict.rules.iter().rev() {
            let Some(installed) = self.installed.remove(&id) else { continue };
            // A rule that moves has another order in the plan than the one that it leaves.
            if let Some(order) = self.plan.order(id).filter(|_| self.plan.target(id).is_some()) {
                self.pending.insert((order, id));
            }
            if installed.direction == Direction::Egress {
                installed.record.into_iter().for_each(|record| table.set_tx_metadata(record, 0));
            }
            let Some(device) = devices.rule_hardware(self.port) else { continue };
            if installed.direction == Direction::Egress {
                installed.tag.into_iter().for_each(|tag| tags.push(tag, installed.record, installed.ids.clone()));
                continue;
            }
            // The rule is removed before its guards, because the guards keep packets away from it.
            for (nth, hardware) in installed.ids.iter().rev().enumerate() {
                match device.remove(*hardware) {
                    Ok(count) if nth == 0 && installed.counted => {
                        let sum = final_counts.entry(id).or_default();
                        sum.packets += count.packets;
                        sum.bytes += count.bytes;
                        self.dropped += if installed.drops { count.packets } else { 0 };
                    }
                    Ok(_) => {}
                    Err(refusal) if refusal.kind == RefusalKind::DeviceLost => {}
                    Err(refusal) => {
                        tracing::error!("port {}: cannot remove a rule from the device: {refusal}", self.port);
                        self.unremovable.push(*hardware);
                    }
                }
            }
            self.counters -= u32::from(installed.counted);
            installed.tag.into_iter().for_each(|tag| tags.push(tag, installed.record, Vec::new()));
        }
        draining.push(tags);
    }

    /// Installs the pending rules, highest first.
    fn install(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        (tag_allocator, implicit): (&mut TagAllocator, &HashMap<RuleId, u32>),
        (draining, final_counts): RemovalState<'_>,
        now: u64,
    ) {
        let mut full = 0;
        while let Some((order, id)) = self.pending.pop_first() {
            let (Some(level), Some(Ok(fit))) = (self.plan.target(id), self.plan.fit(id)) else { continue };
            let record = table.record(id);
            let implicit = implicit.get(&id).copied();
            if record.is_none() && implicit.is_none() {
                continue;
            }
            let done = match full < MAX_FULL_REFUSALS {
                true => self.install_one(devices, table, tag_allocator, (id, level, record, implicit), fit),
                false => Err(RuleRefusal {
                    kind: RefusalKind::Full,
                    errno: None,
                    reason: "the NIC has had no room for the rules above it".to_owned(),
                }),
            };
            let Err(refusal) = done else { continue };
            match refusal.kind {
                // The device lost all its rules. They are installed again when it is back.
                RefusalKind::DeviceLost => {
                    self.pending.insert((order, id));
                    return;
                }
                RefusalKind::Full => full += 1,
                _ => {}
            }
            tracing::debug!("port {}: a rule stays in software: {refusal}", self.port);
            self.retry_at = now + RETRY_INTERVAL;
            self.plan.refuse(id, Some(refusal));
            let mut evict = Eviction::default();
            self.replan(&mut evict);
            self.evict(devices, table, evict, (&mut *draining, &mut *final_counts), now);
        }
    }

    fn install_one(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        tag_allocator: &mut TagAllocator,
        (id, level, record, implicit): (RuleId, u16, Option<u32>, Option<u32>),
        fit: OffloadRule,
    ) -> Result<(), RuleRefusal> {
        let Some(rule) = self.plan.rule(id).map(Arc::clone) else { return Ok(()) };
        let direction = rule.direction();
        let full = |reason: String| RuleRefusal { kind: RefusalKind::Full, errno: None, reason };
        let can = &self.plan.capabilities.can;
        let (limit, counters) = can.table(direction).map_or((Some(0), 0), |it| (it.rules, it.most_counters()));
        if limit.is_some_and(|limit| self.installed.len() + self.exclusions.len() >= limit as usize) {
            return Err(full(format!("{} has no room for more rules", can.device)));
        }
        if fit.counted && self.counters >= counters {
            return Err(full(format!("{} has no more counters", can.device)));
        }
        let tag = match (direction, &fit.rest) {
            (Direction::Ingress, RemainingActions::None) => None,
            _ => {
                // Egress numbers are not marks of received packets, so `max_tag` does not apply.
                let max_tag = if direction == Direction::Egress { u32::MAX } else { can.max_tag() };
                let none = || full(format!("all tags of {} are in use", can.device));
                Some(tag_allocator.allocate(max_tag).ok_or_else(none)?)
            }
        };
        let port = self.port;
        let Some(device) = devices.rule_hardware(port) else {
            return Err(RuleRefusal {
                kind: RefusalKind::DeviceLost,
                errno: None,
                reason: "the port does not exist any more".to_owned(),
            });
        };
        if let Err(refusal) = self.install_exclusions(device) {
            tag.into_iter().for_each(|tag| tag_allocator.free(tag));
            return Err(refusal);
        }
        if let (Direction::Ingress, Some(tag)) = (direction, tag) {
            record.into_iter().for_each(|record| table.pin_record(record));
            let mut entry = tag_entry(record, &rule, &fit);
            entry.implicit_mark = implicit.unwrap_or(0);
            tag_allocator.set(tag, entry);
        }
        let mut ids = Vec::new();
        for guard in &fit.guards {
            let guard = HardwareRule {
                direction,
                level,
                pattern: guard.clone(),
                actions: Vec::new(),
                destination: RuleDestination::Next,
                tag: None,
                count: false,
                require_integrity: false,
            };
            match device.install(&guard) {
                Ok(id) => ids.push(id),
                Err(refusal) => {
                    remove_all(device, ids, &mut self.unremovable);
                    return_tag(tag, direction, record, tag_allocator, table);
                    return Err(refusal);
                }
            }
        }
        let drops = direction == Direction::Ingress && matches!(fit.destination, RuleDestination::Drop);
        let main = match direction {
            Direction::Ingress => HardwareRule {
                direction,
                level: level + u16::from(!fit.guards.is_empty()),
                pattern: fit.pattern,
                actions: fit.actions,
                destination: fit.destination,
                tag,
                count: fit.counted,
                require_integrity: fit.require_integrity,
            },
            Direction::Egress => egress_rule(TX_METADATA_BIT | tag.unwrap_or_default(), fit.actions),
        };
        match device.install(&main) {
            Ok(main) => ids.push(main),
            Err(refusal) => {
                remove_all(device, ids, &mut self.unremovable);
                return_tag(tag, direction, record, tag_allocator, table);
                return Err(refusal);
            }
        }
        if let (Direction::Egress, Some(tag), Some(record)) = (direction, tag, record) {
            table.pin_record(record);
            table.set_tx_metadata(record, TX_METADATA_BIT | tag);
        }
        self.counters += u32::from(fit.counted);
        self.installed.insert(id, InstalledRule { ids, level, direction, tag, record, counted: fit.counted, drops });
        Ok(())
    }

    /// Installs the rules above all others, if they are missing.
    fn install_exclusions(&mut self, device: &mut dyn RuleHardware) -> Result<(), RuleRefusal> {
        if self.exclusions.is_empty() {
            self.exclusions = install_excluded_patterns(device, &self.plan.capabilities)?;
        }
        Ok(())
    }

    /// Handles a device that lost its rules and may have new capabilities. All rules count as missing, and
    /// any that remain are removed.
    fn handle_device_loss(
        &mut self,
        devices: &mut dyn Devices,
        table: &mut RuleTable,
        can: RuleCapabilities,
        books: RemovalState<'_>,
        now: u64,
    ) {
        let mut evict = Eviction::default();
        let all: Vec<RuleId> = self.installed.keys().copied().collect();
        all.into_iter().for_each(|id| evict.add(self, id, None));
        self.evict(devices, table, evict, books, now);
        let exclusions = std::mem::take(&mut self.exclusions);
        if let Some(device) = devices.rule_hardware(self.port).filter(|_| !exclusions.is_empty()) {
            remove_all(device, exclusions, &mut self.unremovable);
            // Packets with earlier numbers may be waiting to be sent, and must not be sent without headers.
            // If this fails, it is tried again later.
            let _ = self.install_exclusions(device);
        }
        self.retried_up_to = None;
        self.retry_at = now;
        self.pending.clear();
        self.plan.recheck_all(can);
        let mut evict = Eviction::default();
        self.replan(&mut evict);
        // Rules whose level is unchanged must be installed too.
        self.pending.extend(self.plan.targets());
    }
}

/// Installs the rules above all others: patterns that the device parses differently, and unknown numbers at
/// egress.
fn install_excluded_patterns(
    device: &mut dyn RuleHardware,
    capabilities: &CapabilityCheck,
) -> Result<Vec<HardwareRuleId>, RuleRefusal> {
    let mut ids = Vec::new();
    let next = |pattern: Vec<Item>, direction, level, destination| HardwareRule {
        direction,
        level,
        pattern,
        actions: Vec::new(),
        destination,
        tag: None,
        count: false,
        require_integrity: false,
    };
    let mut rules: Vec<HardwareRule> = Vec::new();
    for pattern in capabilities.excluded_patterns(Direction::Ingress) {
        rules.push(next(pattern.items().to_vec(), Direction::Ingress, 0, RuleDestination::Next));
    }
    if let Some(egress) = capabilities.can.egress.as_ref() {
        let unknown = MaskedValue { value: TX_METADATA_BIT.into(), mask: TX_METADATA_BIT.into() };
        let masks = egress.item(ItemKind::Meta, false).and_then(|item| item.field(Field::MetaData));
        let drops = egress.actions.destinations.contains(&DestinationKind::Drop);
        if drops && egress.levels > 1 && masks.is_some_and(|masks| masks.allow(unknown.mask, 32)) {
            let pattern = vec![Item::new(ItemKind::Meta).with(Field::MetaData, unknown)];
            rules.push(next(pattern, Direction::Egress, egress.levels - 1, RuleDestination::Drop));
        }
    }
    for rule in &rules {
        match device.install(rule) {
            Ok(id) => ids.push(id),
            Err(refusal) => {
                remove_all(device, ids, &mut Vec::new());
                return Err(refusal);
            }
        }
    }
    Ok(ids)
}

/// Returns the hardware rule for packets with this transmit metadata.
fn egress_rule(number: u32, actions: Vec<Action>) -> HardwareRule {
    HardwareRule {
        direction: Direction::Egress,
        level: 0,
        pattern: vec![Item::new(ItemKind::Meta).exact(Field::MetaData, number.into())],
        actions,
        destination: RuleDestination::Next,
        tag: None,
        count: false,
        require_integrity: false,
    }
}

fn remove_all(device: &mut dyn RuleHardware, ids: Vec<HardwareRuleId>, unremovable: &mut Vec<HardwareRuleId>) {
    unremovable.extend(ids.into_iter().rev().filter(|id| device.remove(*id).is_err()));
}

/// Frees a tag that no packet has carried.
fn return_tag(
    tag: Option<u32>,
    direction: Direction,
    record: Option<u32>,
    tag_allocator: &mut TagAllocator,
    table: &mut RuleTable,
) {
    if let Some(tag) = tag {
        tag_allocator.free(tag);
        if direction == Direction::Ingress {
            record.into_iter().for_each(|record| table.unpin_record(record));
        }
    }
}

/// Returns what workers do with the packets of a rule that is in a device.
fn tag_entry(record: Option<u32>, rule: &Rule, fit: &OffloadRule) -> TagEntry {
    let (rest, counts) = match &fit.rest {
        RemainingActions::All => (None, !rule.actions().contains(&Action::Count)),
        RemainingActions::None => (None, false),
        RemainingActions::Only(actions) => {
            let counts = !fit.counted && !actions.contains(&Action::Count);
            (Some(Program::from_actions(actions)), counts)
        }
    };
    let whole = matches!(fit.rest, RemainingActions::All);
    let needs_headers = |action: &Action| {
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
    TagEntry {
        implicit_mark: 0,
        record,
        rest,
        counts,
        needs_headers: whole && rule.actions().iter().any(needs_headers),
    }
}
