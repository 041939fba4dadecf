//! Filters: flow rules for the frames of a segment, and for the packets that the routers of a VRF take.
//!
//! Each frame of a segment enters the gateway once, from a local port or from a tunnel, and is compared there. The
//! rules see it without tunnel headers and without the VLAN tag of its port. Each filter is a rule table of its own, so
//! segments have nothing in common. Workers compare one packet at a time: while a segment has a filter, frames take the
//! slow path. A segment without one pays nothing on its ports.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use wirepath_flow::{Action, Direction, Ports, Rule};
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, Pool, PortId};
use wirepath_settings::{Key, List, Settings, Text};
use wirepath_wire::Parser;

use super::config::{GatewayConfig, Result};
use super::places::Places;
use super::stage::{StageState, View};
use crate::Context;
use crate::epoch::Domain;
use crate::parsed::parse_packet;
use crate::registry::{Column, Row, TableSpec, Unit};
use crate::rules::{
    Environment, Hit, Lookup, LookupBuffers, Outcome, RuleCounters, RuleId, RuleLimits, RuleTable, RuleTableError,
    Timeouts, Toeplitz, rule_text,
};

/// Maximum number of rules of a filter.
const MAX_RULES: usize = 4096;
/// Limits of the rule table of a filter. The cache remembers fewer flows than that of all rules.
const LIMITS: RuleLimits =
    RuleLimits { rules: 2 * MAX_RULES, masks: 128, duplicates: 64, pending_removals: 1 << 16, flows: 1 << 14 };
/// Fewest flows that the cache of a filter remembers. Few rules are found fast without it.
const MIN_FLOWS: usize = 64;
/// Flows that the cache of a filter remembers for each rule.
const FLOWS_PER_RULE: usize = 4;
const SECOND: u64 = 1_000_000_000;
const STAGE: &str = "filter";

const RULE: &str = "a flow rule such as \"ingress prio 10: tcp dst 23 => count, drop\"";

/// Key `filter` of a segment.
pub(super) const SEGMENT_FILTER: Key<List<Text>> = Key::text("filter", RULE).list().absent("all frames pass").about(
    "Flow rules at ingress for the frames of the segment, from local ports and from tunnels. Actions are count, drop \
     and limit.",
);
/// Key `filter` of a VRF.
pub(super) const VRF_FILTER: Key<List<Text>> = Key::text("filter", RULE).list().absent("all packets pass").about(
    "Flow rules at ingress for the packets that the routers of the VRF take, also those for themselves. Actions are \
     count, drop and limit. ARP and ND pass.",
);

pub(super) static TABLE: TableSpec = TableSpec {
    name: "filters",
    about: "Rules of the filters of segments and VRFs",
    metric: Some("filter"),
    columns: &[
        Column::key("of", "segment or vrf"),
        Column::key("name", "Name of the segment or VRF"),
        Column::key("rule", "The rule as text"),
        Column::counter("packets", Unit::Packets, "Packets that the rule matched"),
        Column::counter("bytes", Unit::Bytes, "Bytes of those packets with their Ethernet headers"),
    ],
};

/// Reads the rules of a filter.
///
/// # Errors
/// If a text is no rule, if its actions are not those of a filter, or if the rule table refuses it.
pub(super) fn read_filter(table: &Settings<'_>, key: &Key<List<Text>>, ports: &[&str]) -> Result<Vec<Rule>> {
    let texts = table.read(key)?;
    if texts.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<(&str, PortId)> = (0..).zip(ports).map(|(number, name)| (*name, PortId::new(number))).collect();
    if texts.len() > MAX_RULES {
        let message = format!("found {} rules, expected at most {MAX_RULES}", texts.len());
        return Err(table.error_in(key, message));
    }
    let mut rules = Vec::new();
    // The table of the running program has the same limits.
    let domain = Domain::new();
    let mut trial = RuleTable::new(&domain, LIMITS, 0);
    for text in texts {
        let read = Rule::parse(&text.value, Ports(&names)).map_err(|error| error.to_string()).and_then(|rule| {
            check(&rule)?;
            trial.add(rule.clone(), Timeouts::NONE).map_err(|error| error.to_string())?;
            Ok(rule)
        });
        match read {
            Ok(rule) => rules.push(rule),
            Err(message) => table.record(text.error(message)),
        }
    }
    Ok(rules)
}

/// Checks that a filter can carry a rule out.
fn check(rule: &Rule) -> std::result::Result<(), String> {
    if rule.direction() != Direction::Ingress {
        return Err("found a rule at egress, expected one at ingress: packets are compared as they enter".to_owned());
    }
    let carries_out = |action: &Action| matches!(action, Action::Count | Action::Drop | Action::Limit(_));
    match rule.actions().iter().find(|action| !carries_out(action)) {
        Some(action) => Err(format!("found the action \"{action}\", expected only count, drop and limit in a filter")),
        None => Ok(()),
    }
}

/// The rules of a segment or VRF, for the workers.
#[derive(Debug)]
pub(super) struct Filter {
    parser: Parser,
    /// Lookup of each worker, which alone locks it.
    lookups: Box<[Mutex<Lookup>]>,
    /// Buffers of each worker, which alone locks them.
    buffers: Buffers,
}

/// Buffers of each worker, which all filters share.
type Buffers = Arc<[Mutex<LookupBuffers>]>;

/// Owner of a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum FilterOwner {
    /// Index of a segment.
    Segment(u16),
    /// Number of a VRF.
    Vrf(u16),
}

impl FilterOwner {
    fn kind(self) -> &'static str {
        match self {
            Self::Segment(_) => "segment",
            Self::Vrf(_) => "vrf",
        }
    }
}

/// A filter of the control thread.
#[derive(Debug)]
struct Entry {
    /// The rules in the order of the configuration.
    rules: Vec<(Rule, RuleId)>,
    table: RuleTable,
    /// Flows that the cache of each worker remembers.
    flows: usize,
    filter: Arc<Filter>,
}

/// Returns the flows that the cache of a filter with so many rules remembers.
fn flows_for(rules: usize) -> usize {
    (FLOWS_PER_RULE * rules).next_power_of_two().clamp(MIN_FLOWS, LIMITS.flows)
}

impl Entry {
    fn new(domain: &Domain, buffers: &Buffers, now: u64) -> Self {
        let mut table = RuleTable::new(domain, LIMITS, now);
        for _ in buffers.iter() {
            table.add_worker();
        }
        let filter = Arc::new(Filter::new(&table, buffers, MIN_FLOWS));
        Self { rules: Vec::new(), table, flows: MIN_FLOWS, filter }
    }

    /// Takes over a list of rules. Rules before the first difference keep their counters.
    fn set(&mut self, rules: &[Rule]) -> std::result::Result<(), RuleTableError> {
        let same = self.rules.iter().zip(rules).take_while(|((old, _), new)| old == *new).count();
        let (old, new) = (self.rules.get(same..).unwrap_or_default(), rules.get(same..).unwrap_or_default());
        if old.is_empty() && new.is_empty() {
            return Ok(());
        }
        let added = self.table.change(|change| {
            old.iter().try_for_each(|(_, id)| change.remove(*id))?;
            new.iter().map(|rule| Ok((rule.clone(), change.add(rule.clone(), Timeouts::NONE)?))).collect()
        })?;
        self.rules.truncate(same);
        let added: Vec<(Rule, RuleId)> = added;
        self.rules.extend(added);
        let flows = flows_for(self.rules.len());
        // Fewer rules give memory back, but not for a few that come and go.
        if flows > self.flows || flows * 4 <= self.flows {
            self.flows = flows;
            self.filter = Arc::new(Filter::new(&self.table, &self.filter.buffers, flows));
        }
        Ok(())
    }
}

/// All filters of a gateway.
#[derive(Debug)]
pub(super) struct Filters {
    domain: Domain,
    buffers: Buffers,
    entries: HashMap<FilterOwner, Entry>,
    /// Owners with their names, in the order of the configuration.
    order: Vec<(FilterOwner, String)>,
}

impl Filters {
    pub(super) fn new(domain: &Domain, workers: usize) -> Self {
        let buffers = (0..workers).map(|_| Mutex::new(LookupBuffers::new())).collect();
        Self { domain: domain.clone(), buffers, entries: HashMap::new(), order: Vec::new() }
    }

    /// Takes over the filters of a configuration. `vrfs` has the number of each VRF, `now` is in seconds.
    pub(super) fn install(&mut self, config: &GatewayConfig, places: &Places, vrfs: &[u16], now: u32) {
        let now = u64::from(now) * SECOND;
        self.order = filters(config, places, vrfs).map(|(owner, name, _)| (owner, name.to_owned())).collect();
        let wanted: HashSet<FilterOwner> = self.order.iter().map(|(owner, _)| *owner).collect();
        self.entries.retain(|owner, _| wanted.contains(owner));
        for (owner, _, rules) in filters(config, places, vrfs) {
            let (domain, buffers) = (&self.domain, &self.buffers);
            let entry = self.entries.entry(owner).or_insert_with(|| Entry::new(domain, buffers, now));
            if entry.set(rules).is_err() {
                // Workers have not yet left the rules of earlier changes. A new table takes these rules: it has the
                // limits that the configuration was checked with.
                *entry = Entry::new(domain, buffers, now);
                if let Err(error) = entry.set(rules) {
                    tracing::error!("filter: {error}");
                }
            }
        }
    }

    /// Returns the filter of a segment or VRF.
    pub(super) fn get(&self, owner: FilterOwner) -> Option<Arc<Filter>> {
        self.entries.get(&owner).map(|entry| Arc::clone(&entry.filter))
    }

    /// Frees what no worker uses any more. `now` is in seconds.
    pub(super) fn collect(&mut self, now: u32) {
        for entry in self.entries.values_mut() {
            entry.table.age(u64::from(now) * SECOND, |_| {});
        }
    }

    /// Returns the row of each rule, in the order of the configuration.
    pub(super) fn rows(&self, ports: Ports<'_>) -> Vec<Row> {
        let entries = self.order.iter().filter_map(|(owner, name)| Some((owner, name, self.entries.get(owner)?)));
        let rows = entries.flat_map(|(owner, name, entry)| {
            entry.rules.iter().map(move |(rule, id)| {
                let RuleCounters { packets, bytes, .. } = entry.table.counters(*id).unwrap_or_default();
                let text = rule.named(ports).to_string();
                vec![owner.kind().into(), name.clone().into(), text.into(), packets.into(), bytes.into()]
            })
        });
        rows.collect()
    }
}

/// Iterates over the filters of a configuration: owner, name of the owner, and rules.
fn filters<'c>(
    config: &'c GatewayConfig,
    places: &'c Places,
    vrfs: &'c [u16],
) -> impl Iterator<Item = (FilterOwner, &'c str, &'c [Rule])> {
    let segments = config.segments.iter().zip(&places.segments);
    let segments =
        segments.map(|(it, place)| (FilterOwner::Segment(place.index), it.name.as_str(), it.filter.as_slice()));
    let vrfs = config.routing.vrfs.iter().zip(vrfs);
    let vrfs = vrfs.map(|(it, number)| (FilterOwner::Vrf(*number), it.name.as_str(), it.filter.as_slice()));
    segments.chain(vrfs).filter(|(_, _, rules)| !rules.is_empty())
}

impl View<'_> {
    /// Passes a frame that enters a segment to captures, to the segment's mirror and to its filter. Returns the frame
    /// unless the filter drops it.
    #[inline]
    pub(super) fn inspect(
        &self,
        state: &StageState,
        context: &mut Context<'_>,
        packet: Packet,
        segment: u16,
    ) -> Option<Packet> {
        if self.layout.inspects || context.is_watched() {
            return self.inspect_entered(state, context, packet, segment);
        }
        Some(packet)
    }

    #[cold]
    #[inline(never)]
    fn inspect_entered(
        &self,
        state: &StageState,
        context: &mut Context<'_>,
        mut packet: Packet,
        segment: u16,
    ) -> Option<Packet> {
        context.entered_segment(&packet, segment);
        self.mirror(state, context, &packet, segment);
        let filter = self.layout.segments.get(usize::from(segment)).and_then(|segment| segment.filter.as_deref());
        match filter.map_or(Ok(()), |filter| filter.admit(state.worker, context, &mut packet)) {
            Ok(()) => Some(packet),
            Err(reason) => {
                context.drop(packet, reason);
                None
            }
        }
    }
}

impl Filter {
    /// Creates the lookups of the workers of a table, each with a cache of this size.
    fn new(table: &RuleTable, buffers: &Buffers, flows: usize) -> Self {
        let lookups = (0..buffers.len()).map(|worker| Mutex::new(table.ingress_lookup(worker, flows))).collect();
        // A forwarder does not verify header checksums.
        let parser = Parser { verify_ipv4: false, ..Parser::default() };
        Self { parser, lookups, buffers: Arc::clone(buffers) }
    }

    /// Compares a packet with the rules, and counts it for the one that matches.
    ///
    /// # Errors
    /// The reason why the packet is to be dropped.
    #[cold]
    #[inline(never)]
    pub(super) fn admit(
        &self,
        worker: usize,
        context: &mut Context<'_>,
        packet: &mut Packet,
    ) -> std::result::Result<(), DropReason> {
        // No rule can be matched reliably against malformed headers.
        let parsed = parse_packet(&self.parser, packet)?;
        // Only this worker locks its lookup and its buffers.
        let (lookup, buffers) = self.lookups.get(worker).zip(self.buffers.get(worker)).ok_or(DropReason::RuleDrop)?;
        let mut lookup = lookup.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffers = buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let (guard, now) = (context.guard(), context.now());
        let mut found = [None];
        lookup.find(&mut buffers, guard, now, std::slice::from_ref(packet), &[parsed], &mut found);
        let Some(hit) = found[0] else {
            context.trace(STAGE, |text| text.write_str("no rule matches"));
            return Ok(());
        };
        if context.is_tracing() {
            let rule = rule_text(context, hit);
            context.trace(STAGE, |text| text.write_str(&rule));
        }
        match hit.program().run(packet, &parsed, &mut FilterActions { now, hit }) {
            Outcome::Drop(reason) => Err(reason),
            Outcome::Next | Outcome::Redirect(_) | Outcome::Queue(_) | Outcome::Kernel => Ok(()),
        }
    }
}

/// [`Environment`] of the actions of a filter, of which none needs a port.
struct FilterActions<'g> {
    now: u64,
    hit: Hit<'g>,
}

static TOEPLITZ: LazyLock<Toeplitz> = LazyLock::new(Toeplitz::default);

impl Environment for FilterActions<'_> {
    fn now(&self) -> u64 {
        self.now
    }

    fn pool(&self) -> Option<&Pool> {
        None
    }

    fn toeplitz(&self) -> &Toeplitz {
        &TOEPLITZ
    }

    fn count(&mut self, bytes: usize) {
        self.hit.count(bytes);
    }

    fn mirror(&mut self, _: PortId, _: Packet) {}

    fn mirror_failed(&mut self, _: DropReason) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_have_their_least_and_greatest_size() {
        assert_eq!([0, 3, 16].map(flows_for), [MIN_FLOWS; 3]);
        assert_eq!([17, 100].map(flows_for), [128, 512]);
        assert_eq!(flows_for(usize::from(u16::MAX)), LIMITS.flows);
    }
}
