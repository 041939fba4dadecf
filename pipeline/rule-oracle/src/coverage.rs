//! Coverage of a run: the items, fields, actions and drop causes that were tested.

use std::collections::BTreeMap;

use wirepath_flow::{ACTIONS, FIELDS, ITEMS, Layer, ReformatKind, Rule};

use crate::reference::{Outcome, Verdict};

/// Number of occurrences of each item, field, action and drop cause in packets that matched a rule.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    /// Packets.
    pub packets: u64,
    /// Packets that matched a rule.
    pub hits: u64,
    seen: BTreeMap<String, u64>,
}

fn inner(inner: bool) -> &'static str {
    if inner { "inner " } else { "" }
}

impl Coverage {
    /// Records a packet and the rule that it matched.
    pub fn note(&mut self, rule: Option<&Rule>, outcome: &Outcome) {
        self.packets += 1;
        let mut seen = |what: String| *self.seen.entry(what).or_default() += 1;
        if let Verdict::Dropped(cause) = outcome.verdict {
            seen(format!("dropped: {cause:?}"));
        }
        let Some(rule) = rule else { return };
        self.hits += 1;
        for item in rule.pattern() {
            let name = item.kind.spec().name;
            seen(format!("{}{name}", inner(item.inner)));
            for (field, _) in item.fields() {
                seen(format!("{}{name} {}", inner(item.inner), field.spec().name));
            }
        }
        for action in rule.actions() {
            match action {
                wirepath_flow::Action::Reformat(r) => {
                    let (action, kind) = r.kind().words();
                    seen(format!("{action} {kind}"));
                }
                wirepath_flow::Action::Set { field, .. } => {
                    seen(format!("set {} {}", field.spec().item.spec().name, field.spec().name));
                }
                action => seen(action.spec().name.to_owned()),
            }
        }
    }

    /// Adds the coverage of another run.
    pub fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.hits += other.hits;
        for (what, n) in &other.seen {
            *self.seen.entry(what.clone()).or_default() += n;
        }
    }

    /// Returns the names of everything that can be covered.
    fn everything() -> Vec<String> {
        let mut all = Vec::new();
        for item in ITEMS {
            for level in [false, true] {
                if level && item.layer == Layer::Metadata {
                    continue;
                }
                all.push(format!("{}{}", inner(level), item.name));
                for field in item.fields {
                    all.push(format!("{}{} {}", inner(level), item.name, field.spec().name));
                }
            }
        }
        for spec in FIELDS.iter().filter(|spec| spec.settable) {
            all.push(format!("set {} {}", spec.item.spec().name, spec.name));
        }
        for action in ACTIONS.iter().filter(|a| !["encap", "decap", "set"].contains(&a.name)) {
            all.push(action.name.to_owned());
        }
        use ReformatKind as K;
        for kind in [K::L2TunnelToL2, K::L2ToL2Tunnel, K::L3TunnelToL2, K::L2ToL3Tunnel] {
            let (action, kind) = kind.words();
            all.push(format!("{action} {kind}"));
        }
        for cause in [
            "RuleDrop",
            "NoHopsLeft",
            "RateLimited",
            "Congestion",
            "NothingInside",
            "OuterFragment",
            "ThirdTag",
            "Malformed",
        ] {
            all.push(format!("dropped: {cause}"));
        }
        all
    }

    /// Returns the names that occurred less than `least` times.
    pub fn missing(&self, least: u64) -> Vec<String> {
        let mut all = Self::everything();
        all.retain(|what| self.seen.get(what).copied().unwrap_or(0) < least);
        all
    }

    /// Returns the percentage of packets that matched a rule.
    pub fn hit_rate(&self) -> u64 {
        self.hits * 100 / self.packets.max(1)
    }
}
