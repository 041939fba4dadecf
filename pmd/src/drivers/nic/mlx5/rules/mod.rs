//! Flow rules by mlx5dv: matchers, header modification, packet reformat and flow counters.
//!
//! Rules that compare the same bits at the same priority share a matcher. Rules with the same header
//! modification or reformat share that action. All entries of a rule share a counter.

mod backend;
mod commands;
mod matcher;
mod probe;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::Hash;

use wirepath_verbs::Result;
use wirepath_verbs::mlx5::{
    Actions, Egress, EgressDestination, FlowCounter, FlowTag, Ingress, IngressDestination, LinkHeader, MatchParameters,
    Matcher, Mlx5, Modification, ModifyHeader, Reformat, SteeringRule, Table,
};

pub(super) use self::backend::{AnyBackend, RuleBackendChoice};
use self::probe::capabilities;
use crate::drivers::nic::common::rules::ibv::{self, IbvBackend};
use crate::drivers::nic::common::rules::{Backend, SteeringEntry, refused, unsupported};
use crate::port::hardware::{HardwareCount, HardwareRule, RuleDestination, RuleRefusal};
use wirepath_flow::{self, Action, FieldSet, ReformatKind};

/// Objects that rules of a table share.
struct Shared<T: Table> {
    matchers: HashMap<(u16, MatchParameters), Matcher<T>>,
    reformats: HashMap<wirepath_flow::Reformat, Reformat<T>>,
    modifications: HashMap<Vec<Modification>, ModifyHeader<T>>,
}

impl<T: Table> Default for Shared<T> {
    fn default() -> Self {
        Self { matchers: HashMap::new(), reformats: HashMap::new(), modifications: HashMap::new() }
    }
}

/// Returns the object of a key, created by `make` if missing.
fn shared<K: Eq + Hash, V: Clone>(
    all: &mut HashMap<K, V>,
    key: K,
    make: impl FnOnce(&K) -> Result<V>,
) -> std::result::Result<V, RuleRefusal> {
    if let Some(existing) = all.get(&key) {
        return Ok(existing.clone());
    }
    let created = make(&key).map_err(|error| refused(&error))?;
    all.insert(key, created.clone());
    Ok(created)
}

/// A table, with the actions that this module supports in it.
trait SteeringTable: Table {
    fn reformat(mlx5: &Mlx5, reformat: &wirepath_flow::Reformat) -> Option<Result<Reformat<Self>>>;
    fn destination(rule: &HardwareRule, entry: &SteeringEntry) -> Option<Self::Destination>;
    /// Returns true if the kernel keeps the rule at its priority.
    fn keeps_priority(mask: &MatchParameters, value: &MatchParameters) -> bool;
}

impl SteeringTable for Ingress {
    fn reformat(mlx5: &Mlx5, reformat: &wirepath_flow::Reformat) -> Option<Result<Reformat<Self>>> {
        match reformat.kind() {
            ReformatKind::L2TunnelToL2 => Some(Reformat::l2_tunnel_to_l2(mlx5)),
            ReformatKind::L3TunnelToL2 => {
                let untagged = reformat.bytes().try_into().map(LinkHeader::Untagged);
                let link = untagged.or_else(|_| reformat.bytes().try_into().map(LinkHeader::Tagged)).ok()?;
                Some(Reformat::l3_tunnel_to_l2(mlx5, &link))
            }
            _ => None,
        }
    }

    fn destination(rule: &HardwareRule, entry: &SteeringEntry) -> Option<IngressDestination> {
        let tag = match rule.tag {
            Some(tag) => Some(FlowTag::new(tag)?),
            None => None,
        };
        match rule.destination {
            RuleDestination::Next | RuleDestination::Queue(_) => {
                Some(IngressDestination::Deliver { to: entry.target.clone()?, tag })
            }
            RuleDestination::Drop => Some(IngressDestination::Drop),
            RuleDestination::Kernel => Some(IngressDestination::DefaultMiss),
            RuleDestination::Rss(_) => None,
        }
    }

    fn keeps_priority(mask: &MatchParameters, value: &MatchParameters) -> bool {
        !matcher::is_multicast(mask, value)
    }
}

impl SteeringTable for Egress {
    fn reformat(mlx5: &Mlx5, reformat: &wirepath_flow::Reformat) -> Option<Result<Reformat<Self>>> {
        match reformat.kind() {
            ReformatKind::L2ToL2Tunnel => Some(Reformat::l2_to_l2_tunnel(mlx5, reformat.bytes())),
            ReformatKind::L2ToL3Tunnel => Some(Reformat::l2_to_l3_tunnel(mlx5, reformat.bytes())),
            _ => None,
        }
    }

    fn destination(rule: &HardwareRule, _: &SteeringEntry) -> Option<EgressDestination> {
        match rule.destination {
            RuleDestination::Next => Some(EgressDestination::Send),
            RuleDestination::Drop => Some(EgressDestination::Drop),
            _ => None,
        }
    }

    fn keeps_priority(mask: &MatchParameters, value: &MatchParameters) -> bool {
        !matcher::is_multicast(mask, value)
    }
}

impl<T: SteeringTable> Shared<T> {
    fn install(
        &mut self,
        mlx5: &Mlx5,
        rule: &HardwareRule,
        entries: &[SteeringEntry],
        counter: Option<&FlowCounter>,
    ) -> std::result::Result<Vec<SteeringRule<T>>, RuleRefusal> {
        let reformat = rule.actions.iter().find_map(|action| match action {
            Action::Reformat(reformat) => Some(reformat.clone()),
            _ => None,
        });
        let level = u8::from(reformat.as_ref().is_some_and(|reformat| reformat.kind().is_decap()));
        let reformat = match reformat {
            Some(reformat) => Some(shared(&mut self.reformats, reformat, |reformat| {
                let created = T::reformat(mlx5, reformat);
                created.unwrap_or_else(|| {
                    Err(wirepath_verbs::Error::InvalidRequest("a reformat of the other table".to_owned()))
                })
            })?),
            None => None,
        };
        let mut rules = Vec::new();
        for entry in entries {
            let (mut mask, mut value) = matcher::parameters(&entry.fields).map_err(unsupported)?;
            if rule.require_integrity {
                matcher::require_valid_headers(&mut mask, &mut value);
            }
            if !T::keeps_priority(&mask, &value) {
                return Err(unsupported(
                    "rules that match only multicast addresses: the kernel puts them behind all others",
                ));
            }
            let commands = commands::of(&rule.actions, &entry.fields, level).map_err(unsupported)?;
            let modify = match commands.is_empty() {
                true => None,
                false => Some(shared(&mut self.modifications, commands, |commands| ModifyHeader::new(mlx5, commands))?),
            };
            let key = (entry.priority, mask);
            let matcher = shared(&mut self.matchers, key, |(priority, mask)| Matcher::new(mlx5, *priority, mask))?;
            let destination = T::destination(rule, entry)
                .ok_or_else(|| unsupported(format!("{:?} here", rule.destination.kind())))?;
            let actions = Actions { destination, modify, reformat: reformat.clone(), counter: counter.cloned() };
            rules.push(SteeringRule::new(&matcher, &value, &actions).map_err(|error| refused(&error))?);
        }
        Ok(rules)
    }

    /// Returns the number of shared objects.
    fn count(&self) -> usize {
        self.matchers.len() + self.reformats.len() + self.modifications.len()
    }

    fn gc(&mut self) {
        self.matchers.retain(|_, matcher| matcher.is_used());
        self.reformats.retain(|_, reformat| reformat.is_used());
        self.modifications.retain(|_, modify| modify.is_used());
    }
}

/// Flow rules of an open device.
pub(super) struct DvBackend {
    ingress: Shared<Ingress>,
    egress: Shared<Egress>,
    mlx5: Mlx5,
    /// Installs counting rules where mlx5dv has no counters. Rules of both interfaces with the same priority
    /// are in the same kernel table, and tables are searched by priority (Linux
    /// `drivers/infiniband/hw/mlx5/fs.c`, `get_flow_table` and `_get_flow_table`).
    counting: Option<IbvBackend>,
    /// Rules removed since the last garbage collection.
    removed: usize,
}

/// Device entries of a rule.
pub(super) enum Entries {
    Ingress { _rules: Vec<SteeringRule<Ingress>> },
    Egress { _rules: Vec<SteeringRule<Egress>> },
}

/// An installed rule.
pub(super) enum InstalledRule {
    Dv {
        // Dropped before the counter that the entries use.
        _entries: Entries,
        counter: Option<FlowCounter>,
    },
    Counting(ibv::InstalledRule),
}

impl DvBackend {
    pub(super) fn new(mlx5: &Mlx5, port: u8) -> Self {
        let counting = FlowCounter::new(mlx5).is_err().then(|| IbvBackend::for_counting(mlx5.context(), port));
        Self { ingress: Shared::default(), egress: Shared::default(), mlx5: mlx5.clone(), counting, removed: 0 }
    }
}

impl Backend for DvBackend {
    type InstalledRule = InstalledRule;

    fn can_match(&self, _: &HardwareRule, fields: &FieldSet) -> std::result::Result<(), String> {
        matcher::parameters(fields).map(drop)
    }

    fn install(
        &mut self,
        rule: &HardwareRule,
        entries: &[SteeringEntry],
    ) -> std::result::Result<InstalledRule, RuleRefusal> {
        let counter = match (rule.count, &mut self.counting) {
            (true, Some(counting)) => return counting.install(rule, entries).map(InstalledRule::Counting),
            (true, None) => Some(FlowCounter::new(&self.mlx5).map_err(|error| refused(&error))?),
            (false, _) => None,
        };
        let entries = match rule.direction {
            wirepath_flow::Direction::Ingress => {
                Entries::Ingress { _rules: self.ingress.install(&self.mlx5, rule, entries, counter.as_ref())? }
            }
            wirepath_flow::Direction::Egress => {
                Entries::Egress { _rules: self.egress.install(&self.mlx5, rule, entries, counter.as_ref())? }
            }
        };
        Ok(InstalledRule::Dv { _entries: entries, counter })
    }

    fn count(&mut self, installed: &InstalledRule) -> Option<HardwareCount> {
        match installed {
            InstalledRule::Dv { counter, .. } => {
                let (packets, bytes) = counter.as_ref()?.read().ok()?;
                Some(HardwareCount { packets, bytes })
            }
            InstalledRule::Counting(installed) => self.counting.as_mut()?.count(installed),
        }
    }

    fn gc(&mut self) {
        self.removed += 1;
        // Run so rarely that the amortised cost per rule is small.
        if self.removed * 2 > self.ingress.count() + self.egress.count() {
            self.ingress.gc();
            self.egress.gc();
            self.removed = 0;
        }
    }
}
