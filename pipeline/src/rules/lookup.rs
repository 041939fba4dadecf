use std::sync::Arc;

use wirepath_pmd::counters::Counter;
use wirepath_pmd::flow::{Direction, FieldSet, Rule};
use wirepath_pmd::packet::{BATCH, Packet};
use wirepath_wire::Parsed;

use super::table::Rules;
use super::{RuleId, value};
use crate::epoch::{Guard, Shared};

/// A rule as a worker meets it.
#[derive(Debug)]
pub struct Installed {
    pub(super) id: RuleId,
    pub(super) rule: Arc<Rule>,
    pub(super) fields: FieldSet,
    pub(super) packets: Counter,
    pub(super) bytes: Counter,
    pub(super) last_hit: Counter,
}

impl Installed {
    /// Its id.
    pub fn id(&self) -> RuleId {
        self.id
    }

    /// The rule.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }
}

/// Finds rules of one direction, for one worker.
#[derive(Debug)]
pub struct RuleLookup {
    rules: Arc<Shared<Rules>>,
    direction: Direction,
}

impl RuleLookup {
    pub(super) fn new(rules: Arc<Shared<Rules>>, direction: Direction) -> Self {
        Self { rules, direction }
    }

    /// The rule of each packet, in the order of the packets: `found[i]` is what packet *i* meets, `None` if no rule fits. Each packet
    /// is counted by its rule. `parsed[i]` is what the port's parser says of packet *i*; `now` is [`crate::Context::now`].
    ///
    /// # Panics
    /// If the slices differ in length or are longer than a batch, or the guard is of another domain than the table.
    pub fn find<'g>(
        &'g mut self,
        guard: Guard<'g>,
        now: u64,
        packets: &[Packet],
        parsed: &[Parsed],
        found: &mut [Option<&'g Installed>],
    ) {
        assert!(packets.len() <= BATCH && packets.len() == parsed.len() && packets.len() == found.len());
        let rules = self.rules.read(guard);
        let rules = if self.direction == Direction::Ingress { &rules.ingress } else { &rules.egress };
        for ((packet, parsed), found) in packets.iter().zip(parsed).zip(found) {
            let fits = |rule: &&Arc<Installed>| rule.fields.matches(|key| value(packet, parsed, self.direction, key));
            *found = rules.iter().find(fits).map(|rule| &**rule);
            if let Some(rule) = found {
                rule.packets.add(1);
                rule.bytes.add(packet.len() as u64);
                rule.last_hit.set(now);
            }
        }
    }
}
