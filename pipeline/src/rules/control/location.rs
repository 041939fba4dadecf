//! Where the rules of a list run: in the workers, or in the XDP program of a port.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use wirepath_flow::{Action, Direction, Field, ItemKind, Key, KeyKind, Rule};
use wirepath_pmd::port::{KernelPunt, KernelRule, PortId, VlanTags};

use super::rule_list::ends_at_kernel;
use super::table::RuleLimits;
use crate::rules::RuleTableError;
use crate::rules::classifier::match_key::Pattern;
use crate::runtime::PortInfo;

/// A rule that the program cannot run.
#[derive(Debug)]
pub struct RuleRefused {
    /// Index of the rule in the given list.
    pub rule: usize,
    /// Reason of the refusal.
    pub reason: String,
}

/// Location where a rule runs on a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleLocation {
    /// The software engine of the workers.
    Software,
    /// The XDP program, before packets reach the port.
    Xdp,
    /// The software engine of the workers, which injects the packets into the kernel's receive path one by
    /// one. The text says why the rule is not in the XDP program.
    Injected(String),
}

/// Locations where a rule runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleLocations {
    /// Location on each port whose packets can match the rule.
    pub ports: Vec<(PortId, RuleLocation)>,
}

/// Returns the reason why a rule cannot run on these ports, or `None` if it can.
///
/// The answer about port modes is final only when the ports have started.
pub fn check(rule: &Rule, ports: &[PortInfo]) -> Option<String> {
    check_where(rule, ports, |_| true)
}

/// Returns the reason why a rule cannot run on one of these ports. The other ports are not considered.
pub fn check_on(rule: &Rule, ports: &[PortInfo], port: PortId) -> Option<String> {
    check_where(rule, ports, |at| at == port)
}

fn check_where(rule: &Rule, ports: &[PortInfo], at: impl Fn(PortId) -> bool) -> Option<String> {
    let name = |port: PortId| match ports.get(port.index()).filter(|port| !port.is_removed) {
        Some(_) => None,
        None => Some(format!("there is no port {port}; the ports are numbered 0 to {}", ports.len().saturating_sub(1))),
    };
    let set = rule.fields();
    let on = set.get(Key::field(0, Field::PortId));
    if let Some(bits) = on.filter(|bits| bits.mask == 0xffff) {
        let missing = PortId::checked(bits.value).and_then(name);
        if missing.is_some() {
            return missing;
        }
    }
    let fits = |port: &&PortInfo| {
        !port.is_removed && at(port.id) && on.is_none_or(|bits| bits.matches(port.id.number().into()))
    };
    for action in rule.actions() {
        let queue = match action {
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
        if let Some(port) = ports.iter().filter(fits).find(|port| queue >= port.queues) {
            let (name, queues) = (&port.name, port.queues);
            return Some(format!("port \"{name}\" has no queue {queue}; it has {queues} (queues = {queues})"));
        }
    }
    let tags = set.list().iter().any(|(key, _)| {
        let KeyKind::Field(field) = key.kind else { return false };
        key.level == 0 && (field == Field::EthTags || field.spec().item == ItemKind::Vlan)
    });
    if tags && rule.direction() == Direction::Ingress {
        let loses = |port: &&PortInfo| fits(port) && port.capabilities.vlan_tags == VlanTags::Lost;
        if let Some(port) = ports.iter().find(loses) {
            let (name, driver) = (&port.name, port.capabilities.driver);
            return Some(format!(
                "port \"{name}\" (driver {driver}) loses the VLAN tags of received frames, so the rule would not \
                 match there; driver = \"af_packet\" keeps them"
            ));
        }
    }
    None
}

/// Returns where a rule runs on a port, or why it cannot. `decided` is the answer of the port about the rule.
fn location(rule: &Rule, port: &PortInfo, decided: Option<&Result<(), String>>) -> Result<RuleLocation, String> {
    if !ends_at_kernel(rule) {
        return Ok(RuleLocation::Software);
    }
    let (name, driver) = (&port.name, port.capabilities.driver);
    let changes = |action: &&Action| {
        matches!(
            action,
            Action::Set { .. } | Action::DecTtl | Action::PushVlan(_) | Action::PopVlan | Action::Reformat(_)
        )
    };
    match (port.capabilities.kernel_punt, decided) {
        (KernelPunt::No(why), _) => {
            let named = rule.fields().get(Key::field(0, Field::PortId)).is_some();
            let hint = if named { "" } else { "; if the rule is for other ports, name them (port id NAME)" };
            Err(format!("\"kernel\" cannot be done on port \"{name}\" (driver {driver}): {why}{hint}"))
        }
        (KernelPunt::Copy, _) => match rule.actions().iter().find(changes) {
            Some(action) => Err(format!(
                "\"kernel\" behind \"{}\" cannot be done on port \"{name}\" (driver {driver}): \
                 the kernel there gets every frame unchanged",
                action.spec().name
            )),
            None => Ok(RuleLocation::Software),
        },
        (KernelPunt::XdpPass | KernelPunt::XdpPassOnly(_), Some(Ok(()))) => Ok(RuleLocation::Xdp),
        (KernelPunt::XdpPass, Some(Err(why))) => Ok(RuleLocation::Injected(why.clone())),
        (KernelPunt::XdpPassOnly(reason), Some(Err(why))) => {
            Err(format!("\"kernel\" cannot be done on port \"{name}\" (driver {driver}): {why}, and {reason}"))
        }
        (KernelPunt::Loopback, _) | (_, None) => Ok(RuleLocation::Software),
    }
}

/// Judges a rule list: returns for each rule where it runs, or why the program refuses the list.
///
/// `ports` are the ports, and `decided` their answers about rules that end at the kernel; `rule` in them is an
/// index into `rules`, and each list is sorted by it. Without ports, only the limits are checked. A rule beyond a
/// limit is refused, and the rules before it are not.
pub fn judge(
    rules: &[Rule],
    ports: Option<&[PortInfo]>,
    decided: &[Vec<KernelRule>],
    limits: &RuleLimits,
) -> Vec<Result<RuleLocations, String>> {
    let mut judge = ListJudge::new(ports, decided, limits);
    rules.iter().map(|rule| judge.next(rule)).collect()
}

/// Judges the rules of a list one by one, like [`judge`].
pub(super) struct ListJudge<'a> {
    ports: Option<&'a [PortInfo]>,
    decided: &'a [Vec<KernelRule>],
    limits: &'a RuleLimits,
    /// Index of the next rule.
    number: usize,
    counts: ListCounts,
}

impl<'a> ListJudge<'a> {
    pub(super) fn new(ports: Option<&'a [PortInfo]>, decided: &'a [Vec<KernelRule>], limits: &'a RuleLimits) -> Self {
        Self { ports, decided, limits, number: 0, counts: ListCounts::default() }
    }

    /// Returns where the next rule of the list runs, or why the program refuses it.
    pub(super) fn next(&mut self, rule: &Rule) -> Result<RuleLocations, String> {
        let number = self.number;
        self.number += 1;
        let ports = match self.ports {
            None => Vec::new(),
            Some(ports) => match check(rule, ports) {
                Some(reason) => return Err(reason),
                None => locate_rule(rule, number, ports, self.decided)
                    .into_iter()
                    .map(|(port, location)| Ok((port, location?)))
                    .collect::<Result<_, String>>()?,
            },
        };
        self.counts.add(rule, self.limits).map_err(|error| error.to_string())?;
        Ok(RuleLocations { ports })
    }
}

/// A direction and the bits that a rule compares.
type DirectedMask = (Direction, Box<[(u8, u64)]>);

/// Counts of a rule list, to compare with [`RuleLimits`].
#[derive(Default)]
struct ListCounts {
    rules: usize,
    /// Numbers of the masks of each direction.
    masks: HashMap<DirectedMask, usize>,
    masks_of: HashMap<Direction, usize>,
    /// Rules of each mask and value.
    patterns: HashMap<(usize, Box<[u64]>), usize>,
}

impl ListCounts {
    /// Counts a rule, unless it exceeds a limit.
    fn add(&mut self, rule: &Rule, limits: &RuleLimits) -> Result<(), RuleTableError> {
        let (direction, pattern) = (rule.direction(), Pattern::of(&rule.fields()));
        if self.rules >= limits.rules {
            return Err(RuleTableError::TooManyRules { limit: limits.rules });
        }
        let known = self.masks.len();
        let mask = match self.masks.entry((direction, pattern.mask)) {
            Entry::Occupied(mask) => *mask.get(),
            Entry::Vacant(vacant) => {
                let masks = self.masks_of.entry(direction).or_default();
                if *masks >= limits.masks {
                    return Err(RuleTableError::TooManyMasks { limit: limits.masks });
                }
                *masks += 1;
                *vacant.insert(known)
            }
        };
        let same = self.patterns.entry((mask, pattern.value)).or_default();
        if *same >= limits.duplicates {
            return Err(RuleTableError::TooManyDuplicates { limit: limits.duplicates });
        }
        *same += 1;
        self.rules += 1;
        Ok(())
    }
}

/// Returns where one rule runs on each port whose packets can match it, or why it cannot. `number` is its
/// index in the list that the ports were given.
pub fn locate_rule(
    rule: &Rule,
    number: usize,
    ports: &[PortInfo],
    decided: &[Vec<KernelRule>],
) -> Vec<(PortId, Result<RuleLocation, String>)> {
    let locate = |port: &PortInfo| {
        let decided = decided.get(port.id.index()).map_or(&[][..], Vec::as_slice);
        let it = decided.binary_search_by_key(&number, |it| it.rule).ok().map(|i| &decided[i].decided);
        (port.id, location(rule, port, it))
    };
    matching_ports(rule, ports).map(locate).collect()
}

/// Returns the ports whose packets can match a rule.
pub(super) fn matching_ports<'p>(rule: &Rule, ports: &'p [PortInfo]) -> impl Iterator<Item = &'p PortInfo> {
    let on = rule.fields().get(Key::field(0, Field::PortId));
    ports.iter().filter(move |port| !port.is_removed && on.is_none_or(|bits| bits.matches(port.id.number().into())))
}

/// Returns the indices of the rules in matching order: by direction, then priority, then position in the
/// list.
pub fn priority_order(rules: &[Rule]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rules.len()).collect();
    order.sort_by_key(|&i| (rules[i].direction(), rules[i].priority()));
    order
}

/// Passes the rules to `tell` in matching order, and translates the answers of the ports back to indices of
/// this list.
pub fn in_priority_order<E>(
    rules: &[Rule],
    tell: impl FnOnce(&[Rule]) -> Result<Vec<Vec<KernelRule>>, E>,
) -> Result<Vec<Vec<KernelRule>>, E> {
    let order = priority_order(rules);
    let sorted: Vec<Rule> = order.iter().map(|&i| rules[i].clone()).collect();
    let mut decided = tell(&sorted)?;
    for list in &mut decided {
        list.iter_mut().for_each(|it| it.rule = order[it.rule]);
        list.sort_by_key(|it| it.rule);
    }
    Ok(decided)
}
