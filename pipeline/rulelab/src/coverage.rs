//! What a run has shown: a judge that never saw an item hit has judged nothing about it.

use std::collections::BTreeMap;

use wirepath_pmd::flow::{ACTIONS, FIELDS, ITEMS, Layer, ReformatKind, Rule};

use crate::reference::{Fate, Outcome};

/// How often each thing was seen in a packet that hit a rule.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    /// Packets.
    pub packets: u64,
    /// Packets that hit a rule.
    pub hits: u64,
    seen: BTreeMap<String, u64>,
}

fn inner(inner: bool) -> &'static str {
    if inner { "inner " } else { "" }
}

impl Coverage {
    /// Takes note of a packet and the rule that it hit.
    pub fn note(&mut self, rule: Option<&Rule>, outcome: &Outcome) {
        self.packets += 1;
        let mut seen = |what: String| *self.seen.entry(what).or_default() += 1;
        if let Fate::Dropped(cause) = outcome.fate {
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
                wirepath_pmd::flow::Action::Reformat(r) => {
                    let (action, kind) = r.kind().words();
                    seen(format!("{action} {kind}"));
                }
                wirepath_pmd::flow::Action::Set { field, .. } => {
                    seen(format!("set {} {}", field.spec().item.spec().name, field.spec().name));
                }
                action => seen(action.spec().name.to_owned()),
            }
        }
    }

    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.hits += other.hits;
        for (what, n) in &other.seen {
            *self.seen.entry(what.clone()).or_default() += n;
        }
    }

    /// Everything that can be seen.
    fn everything() -> Vec<String> {
        let mut all = Vec::new();
        for item in ITEMS {
            for level in [false, true] {
                if level && item.layer == Layer::Outside {
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
            "Ruled",
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

    /// What was seen less than `least` times.
    pub fn missing(&self, least: u64) -> Vec<String> {
        let mut all = Self::everything();
        all.retain(|what| self.seen.get(what).copied().unwrap_or(0) < least);
        all
    }

    /// Share of the packets that hit a rule, in per cent.
    pub fn hit_rate(&self) -> u64 {
        self.hits * 100 / self.packets.max(1)
    }
}
