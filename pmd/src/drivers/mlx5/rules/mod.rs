//! Rules by mlx5dv: matchers of the device's own parameters, header modification, packet reformat, flow counters.
//!
//! Rules that compare the same bits at the same priority share a matcher, rules that do the same to headers share that action, and all
//! entries of a rule share a counter.

mod can;
mod commands;
mod compare;
mod way;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::Hash;

use wirepath_verbs::Result;
use wirepath_verbs::mlx5::{
    Actions, Egress, EgressFate, FlowCounter, FlowTag, Ingress, IngressFate, LinkHeader, MatchParameters, Matcher,
    Mlx5, Modification, ModifyHeader, Reformat, SteeringRule, Table,
};

use self::can::capabilities;
pub(super) use self::way::{Way, Wish};
use crate::drivers::direct::rules::ibv::{self, Ibv};
use crate::drivers::direct::rules::{Backend, Place, refused, unsupported};
use crate::flow::{self, Action, FieldSet, ReformatKind};
use crate::port::hardware::{HardwareCount, HardwareRule, RuleFate, RuleRefusal};

/// What is shared by rules of a table.
struct Shared<T: Table> {
    matchers: HashMap<(u16, MatchParameters), Matcher<T>>,
    reformats: HashMap<flow::Reformat, Reformat<T>>,
    modifications: HashMap<Vec<Modification>, ModifyHeader<T>>,
}

impl<T: Table> Default for Shared<T> {
    fn default() -> Self {
        Self { matchers: HashMap::new(), reformats: HashMap::new(), modifications: HashMap::new() }
    }
}

/// What is there for a key, or what `make` makes.
fn shared<K: Eq + Hash, V: Clone>(
    all: &mut HashMap<K, V>,
    key: K,
    make: impl FnOnce(&K) -> Result<V>,
) -> std::result::Result<V, RuleRefusal> {
    if let Some(there) = all.get(&key) {
        return Ok(there.clone());
    }
    let made = make(&key).map_err(|error| refused(&error))?;
    all.insert(key, made.clone());
    Ok(made)
}

/// A table whose actions this module can make.
trait Side: Table {
    fn reformat(mlx5: &Mlx5, reformat: &flow::Reformat) -> Option<Result<Reformat<Self>>>;
    fn fate(rule: &HardwareRule, place: &Place) -> Option<Self::Fate>;
    /// Whether the kernel leaves rules at their priority.
    fn keeps_place(mask: &MatchParameters, value: &MatchParameters) -> bool;
}

impl Side for Ingress {
    fn reformat(mlx5: &Mlx5, reformat: &flow::Reformat) -> Option<Result<Reformat<Self>>> {
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

    fn fate(rule: &HardwareRule, place: &Place) -> Option<IngressFate> {
        let tag = match rule.tag {
            Some(tag) => Some(FlowTag::new(tag)?),
            None => None,
        };
        match rule.fate {
            RuleFate::Next | RuleFate::Queue(_) => Some(IngressFate::Deliver { to: place.target.clone()?, tag }),
            RuleFate::Drop => Some(IngressFate::Drop),
            RuleFate::Kernel => Some(IngressFate::DefaultMiss),
            RuleFate::Rss(_) => None,
        }
    }

    fn keeps_place(mask: &MatchParameters, value: &MatchParameters) -> bool {
        !compare::is_of_groups(mask, value)
    }
}

impl Side for Egress {
    fn reformat(mlx5: &Mlx5, reformat: &flow::Reformat) -> Option<Result<Reformat<Self>>> {
        match reformat.kind() {
            ReformatKind::L2ToL2Tunnel => Some(Reformat::l2_to_l2_tunnel(mlx5, reformat.bytes())),
            ReformatKind::L2ToL3Tunnel => Some(Reformat::l2_to_l3_tunnel(mlx5, reformat.bytes())),
            _ => None,
        }
    }

    fn fate(rule: &HardwareRule, _: &Place) -> Option<EgressFate> {
        match rule.fate {
            RuleFate::Next => Some(EgressFate::Send),
            RuleFate::Drop => Some(EgressFate::Drop),
            _ => None,
        }
    }

    fn keeps_place(mask: &MatchParameters, value: &MatchParameters) -> bool {
        !compare::is_of_groups(mask, value)
    }
}

impl<T: Side> Shared<T> {
    fn install(
        &mut self,
        mlx5: &Mlx5,
        rule: &HardwareRule,
        places: &[Place],
        counter: Option<&FlowCounter>,
    ) -> std::result::Result<Vec<SteeringRule<T>>, RuleRefusal> {
        let reformat = rule.actions.iter().find_map(|action| match action {
            Action::Reformat(reformat) => Some(reformat.clone()),
            _ => None,
        });
        let level = u8::from(reformat.as_ref().is_some_and(|reformat| reformat.kind().is_decap()));
        let reformat = match reformat {
            Some(reformat) => Some(shared(&mut self.reformats, reformat, |reformat| {
                let made = T::reformat(mlx5, reformat);
                made.unwrap_or_else(|| Err(wirepath_verbs::Error::Request("a reformat of the other table".to_owned())))
            })?),
            None => None,
        };
        let mut rules = Vec::new();
        for place in places {
            let (mut mask, mut value) = compare::parameters(&place.fields).map_err(unsupported)?;
            if rule.in_order {
                compare::demand_order(&mut mask, &mut value);
            }
            if !T::keeps_place(&mask, &value) {
                return Err(unsupported("rules of group addresses alone: the kernel puts them behind all others"));
            }
            let commands = commands::of(&rule.actions, &place.fields, level).map_err(unsupported)?;
            let modify = match commands.is_empty() {
                true => None,
                false => Some(shared(&mut self.modifications, commands, |commands| ModifyHeader::new(mlx5, commands))?),
            };
            let key = (place.priority, mask);
            let matcher = shared(&mut self.matchers, key, |(priority, mask)| Matcher::new(mlx5, *priority, mask))?;
            let fate = T::fate(rule, place).ok_or_else(|| unsupported(format!("{:?} here", rule.fate.kind())))?;
            let actions = Actions { fate, modify, reformat: reformat.clone(), counter: counter.cloned() };
            rules.push(SteeringRule::new(&matcher, &value, &actions).map_err(|error| refused(&error))?);
        }
        Ok(rules)
    }

    /// How much there is.
    fn count(&self) -> usize {
        self.matchers.len() + self.reformats.len() + self.modifications.len()
    }

    fn tidy(&mut self) {
        self.matchers.retain(|_, matcher| matcher.is_used());
        self.reformats.retain(|_, reformat| reformat.is_used());
        self.modifications.retain(|_, modify| modify.is_used());
    }
}

/// Rules of an open device.
pub(super) struct Dv {
    ingress: Shared<Ingress>,
    egress: Shared<Egress>,
    mlx5: Mlx5,
    /// For rules that count, where mlx5dv has no counters. Rules of both ways that have the same priority are in the same table of the
    /// kernel, and tables are asked by priority (Linux `drivers/infiniband/hw/mlx5/fs.c`, `get_flow_table` and `_get_flow_table`).
    counting: Option<Ibv>,
    /// Rules that went since it was last looked what is not used any more.
    gone: usize,
}

/// The entries of a rule.
pub(super) enum Entries {
    Ingress { _rules: Vec<SteeringRule<Ingress>> },
    Egress { _rules: Vec<SteeringRule<Egress>> },
}

/// A rule in the device.
pub(super) enum Live {
    Dv {
        // Before what it counts in.
        _entries: Entries,
        counter: Option<FlowCounter>,
    },
    Counting(ibv::Live),
}

impl Dv {
    pub(super) fn new(mlx5: &Mlx5, port: u8) -> Self {
        let counting = FlowCounter::new(mlx5).is_err().then(|| Ibv::beside(mlx5.context(), port));
        Self { ingress: Shared::default(), egress: Shared::default(), mlx5: mlx5.clone(), counting, gone: 0 }
    }
}

impl Backend for Dv {
    type Live = Live;

    fn tells(&self, _: &HardwareRule, fields: &FieldSet) -> std::result::Result<(), String> {
        compare::parameters(fields).map(drop)
    }

    fn install(&mut self, rule: &HardwareRule, places: &[Place]) -> std::result::Result<Live, RuleRefusal> {
        let counter = match (rule.count, &mut self.counting) {
            (true, Some(counting)) => return counting.install(rule, places).map(Live::Counting),
            (true, None) => Some(FlowCounter::new(&self.mlx5).map_err(|error| refused(&error))?),
            (false, _) => None,
        };
        let entries = match rule.direction {
            flow::Direction::Ingress => {
                Entries::Ingress { _rules: self.ingress.install(&self.mlx5, rule, places, counter.as_ref())? }
            }
            flow::Direction::Egress => {
                Entries::Egress { _rules: self.egress.install(&self.mlx5, rule, places, counter.as_ref())? }
            }
        };
        Ok(Live::Dv { _entries: entries, counter })
    }

    fn count(&mut self, live: &Live) -> Option<HardwareCount> {
        match live {
            Live::Dv { counter, .. } => {
                let (packets, bytes) = counter.as_ref()?.read().ok()?;
                Some(HardwareCount { packets, bytes })
            }
            Live::Counting(live) => self.counting.as_mut()?.count(live),
        }
    }

    fn tidy(&mut self) {
        self.gone += 1;
        // As seldom as makes the effort for each rule small.
        if self.gone * 2 > self.ingress.count() + self.egress.count() {
            self.ingress.tidy();
            self.egress.tidy();
            self.gone = 0;
        }
    }
}
