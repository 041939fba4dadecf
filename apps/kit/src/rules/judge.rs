//! Judgement of a rule list before any port is opened. The start, `--check`, `flow check` and `flow explain` use
//! it, so they refuse the same lists.

use wirepath_flow::Rule;
use wirepath_packet::{Pool, PoolError, PortId};
use wirepath_pipeline::PortInfo;
use wirepath_pipeline::rules::{RuleLimits, RuleLocations, in_priority_order, judge};
use wirepath_pmd::drivers::{DEFAULT_MTU, PortSettings};
use wirepath_pmd::port::{Capabilities, KernelRule};

use super::RuleSettings;
use crate::cli::Failure;

/// Ports with the properties that their settings tell, and their answers about the rules of a list.
#[derive(Debug)]
pub struct UnopenedPorts {
    /// The ports.
    pub ports: Vec<PortInfo>,
    /// For each port, its decisions about rules that end at the kernel.
    pub decided: Vec<Vec<KernelRule>>,
}

impl UnopenedPorts {
    /// Asks the settings of the ports about the rules.
    pub fn ask(settings: &[PortSettings], rules: &[Rule]) -> Result<Self, PoolError> {
        Self::ask_numbered(settings.iter().map(Some), rules)
    }

    /// Asks the settings of the ports about the rules. A number without a port is `None`.
    fn ask_numbered<'p>(
        settings: impl Iterator<Item = Option<&'p PortSettings>>,
        rules: &[Rule],
    ) -> Result<Self, PoolError> {
        let settings: Vec<(PortId, Option<&PortSettings>)> = (0..).map(PortId::new).zip(settings).collect();
        let pool = Pool::new("paper", 64)?;
        let info = |(id, port): &(PortId, Option<&PortSettings>)| {
            let Some(port) = port else {
                let none = PortInfo::simulated(*id, "", None, DEFAULT_MTU, &pool);
                return PortInfo { is_removed: true, ..none };
            };
            let plain = Capabilities::plain(port.plan.driver(), port.device.clone().unwrap_or_default());
            PortInfo {
                queues: port.queues,
                capabilities: Capabilities { kernel_punt: port.plan.kernel_punt(), ..plain },
                ..PortInfo::simulated(*id, &port.name, None, port.mtu.unwrap_or(DEFAULT_MTU), &pool)
            }
        };
        let answer = |sorted: &[Rule]| -> Result<Vec<Vec<KernelRule>>, PoolError> {
            let ask = |(id, port): &(PortId, Option<&PortSettings>)| {
                port.map_or_else(Vec::new, |port| port.plan.kernel_rules(sorted, *id))
            };
            Ok(settings.iter().map(ask).collect())
        };
        let decided = in_priority_order(rules, answer)?;
        Ok(Self { ports: settings.iter().map(info).collect(), decided })
    }

    /// Returns for each rule where it runs, or why the program would not start.
    pub fn judge(&self, rules: &[Rule]) -> Vec<Result<RuleLocations, String>> {
        judge(rules, Some(&self.ports), &self.decided, &RuleLimits::default())
    }
}

impl RuleSettings {
    /// Checks the rules as far as possible without opening a port. The first rule that cannot run is an error.
    /// `settings` are the ports by number.
    pub(crate) fn check<'p>(&self, settings: impl Iterator<Item = Option<&'p PortSettings>>) -> Result<(), Failure> {
        let rules: Vec<Rule> = self.entries.iter().map(|entry| entry.rule.clone()).collect();
        let judged = UnopenedPorts::ask_numbered(settings, &rules)?.judge(&rules);
        match self.entries.iter().zip(judged).find_map(|(entry, judged)| Some((entry, judged.err()?))) {
            Some((entry, why)) => Err(entry.span.error(why).into()),
            None => Ok(()),
        }
    }
}
