//! Scripts of rule changes. Rules have names of their own, so that a part of a script can be replayed. Steps
//! for a rule that was not added are skipped by the engine and by the reference.

use std::collections::{HashMap, HashSet};
use std::fmt;

use wirepath_flow::{Action, Rule};
use wirepath_pipeline::rules::{RuleId, RuleTable, Timeouts};
use wirepath_rule_oracle::{Reference, Rng, generate, shrink};

/// Name of a rule in a script.
pub(crate) type Name = u64;

/// One change of a rule.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Add(Name, Rule),
    Remove(Name),
    Replace(Name, Rule),
}

impl Step {
    pub(crate) fn rule(&self) -> Option<&Rule> {
        match self {
            Self::Add(_, rule) | Self::Replace(_, rule) => Some(rule),
            Self::Remove(_) => None,
        }
    }

    pub(crate) fn with_rule(&self, rule: &Rule) -> Self {
        match *self {
            Self::Add(name, _) => Self::Add(name, rule.clone()),
            Self::Replace(name, _) => Self::Replace(name, rule.clone()),
            Self::Remove(name) => Self::Remove(name),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add(name, rule) => write!(f, "add {name}: {rule}"),
            Self::Remove(name) => write!(f, "remove {name}"),
            Self::Replace(name, rule) => write!(f, "replace {name}: {rule}"),
        }
    }
}

/// Returns the steps of one change that are possible with the present rules.
fn possible(steps: &[Step], is_there: impl Fn(Name) -> bool) -> Vec<&Step> {
    // One change may touch each rule only once.
    let mut touched = HashSet::new();
    let possible = |step: &&Step| match step {
        Step::Add(name, _) => !is_there(*name) && touched.insert(*name),
        Step::Remove(name) | Step::Replace(name, _) => is_there(*name) && touched.insert(*name),
    };
    steps.iter().filter(possible).collect()
}

/// Applies the steps to the engine atomically.
pub(crate) fn change(table: &mut RuleTable, ids: &mut HashMap<Name, RuleId>, steps: &[Step]) {
    let steps = possible(steps, |name| ids.contains_key(&name));
    let added = table
        .change(|change| {
            let mut added = Vec::new();
            for step in &steps {
                match step {
                    Step::Add(name, rule) => added.push((*name, change.add(rule.clone(), Timeouts::NONE)?)),
                    Step::Remove(name) => change.remove(ids[name])?,
                    Step::Replace(name, rule) => change.replace(ids[name], rule.clone())?,
                }
            }
            Ok(added)
        })
        .expect("a possible change");
    for step in steps {
        if let Step::Remove(name) = step {
            ids.remove(name);
        }
    }
    ids.extend(added);
}

/// An error planted in the reference, which the test must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// Removals are ignored for names divisible by three.
    Removal,
    /// Replacements are ignored for names divisible by three.
    Replacement,
}

/// The reference, with the rule names of a script.
#[derive(Clone)]
pub(crate) struct Named {
    pub(crate) reference: Reference,
    planted: Planted,
    numbers: HashMap<Name, u64>,
    /// Names by rule number of the reference.
    names: Vec<Name>,
}

impl Named {
    pub(crate) fn new(reference: Reference, planted: Planted) -> Self {
        Self { reference, planted, numbers: HashMap::new(), names: Vec::new() }
    }

    /// Returns the name of a rule of the reference.
    pub(crate) fn name(&self, number: u64) -> Name {
        self.names[number as usize]
    }

    pub(crate) fn change(&mut self, steps: &[Step]) {
        for step in possible(steps, |name| self.numbers.contains_key(&name)) {
            match step {
                Step::Add(name, rule) => {
                    self.numbers.insert(*name, self.reference.add(rule.clone()));
                    self.names.push(*name);
                }
                Step::Remove(name) => {
                    let number = self.numbers.remove(name).expect("possible");
                    let wrong = self.planted == Planted::Removal && name % 3 == 0;
                    assert!(wrong || self.reference.remove(number));
                }
                Step::Replace(name, rule) => {
                    let wrong = self.planted == Planted::Replacement && name % 3 == 0;
                    assert!(wrong || self.reference.replace(self.numbers[name], rule.clone()));
                }
            }
        }
    }
}

/// The present rules while a script is generated.
#[derive(Default)]
pub(crate) struct Rules {
    pub(crate) known: Vec<(Name, Rule)>,
    next: Name,
}

impl Rules {
    pub(crate) fn list(&self) -> Vec<Rule> {
        self.known.iter().map(|(_, rule)| rule.clone()).collect()
    }

    /// Returns a step that adds a rule. The rule counts as present after `done`.
    pub(crate) fn add(&mut self, rule: Rule) -> Step {
        self.next += 1;
        Step::Add(self.next - 1, rule)
    }

    /// Records the steps of one change.
    pub(crate) fn done(&mut self, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Add(name, rule) => self.known.push((*name, rule.clone())),
                Step::Remove(name) => self.known.retain(|(known, _)| known != name),
                Step::Replace(name, rule) => {
                    let known = self.known.iter_mut().find(|(known, _)| known == name);
                    known.expect("a rule that is there").1 = rule.clone();
                }
            }
        }
    }

    /// Returns a replacement of the same direction for a rule.
    pub(crate) fn another(
        &self,
        rng: &mut Rng,
        old: &Rule,
        mut generate: impl FnMut(&mut Rng, &[Rule]) -> Rule,
    ) -> Rule {
        let rules = self.list();
        loop {
            let rule = generate(rng, &rules);
            if rule.direction() == old.direction() {
                return rule;
            }
        }
    }
}

/// Returns a rule that only marks its packets.
pub(crate) fn marking(rng: &mut Rng, known: &[Rule], mark: u32) -> Rule {
    let rule = generate::rule(rng, known);
    Rule::new(rule.direction(), rule.priority(), rule.pattern().to_vec(), vec![Action::Mark(mark)]).expect("a rule")
}

/// Simplifies the rules of the steps as far as the steps still fail.
pub(crate) fn simplest<S: Clone>(
    steps: &[S],
    rule: impl Fn(&S) -> Option<&Rule>,
    with: impl Fn(&S, &Rule) -> S,
    mut fails: impl FnMut(&[S]) -> bool,
) -> Vec<S> {
    let rules: Vec<Rule> = steps.iter().filter_map(|step| rule(step).cloned()).collect();
    let put = |rules: &[Rule]| -> Vec<S> {
        let mut rules = rules.iter();
        let of = |step: &S| match rule(step).and_then(|_| rules.next()) {
            Some(rule) => with(step, rule),
            None => step.clone(),
        };
        steps.iter().map(of).collect()
    };
    put(&shrink::simplest(&rules, |rules| fails(&put(rules))))
}
