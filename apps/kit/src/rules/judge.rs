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
        let pool = Pool::new("paper", 64)?;
        let info = |(id, port): (u16, &PortSettings)| {
            let plain = Capabilities::plain(port.plan.driver(), port.device.clone().unwrap_or_default());
            PortInfo {
                queues: port.queues,
                capabilities: Capabilities { kernel_punt: port.plan.kernel_punt(), ..plain },
                ..PortInfo::simulated(PortId::new(id), &port.name, None, port.mtu.unwrap_or(DEFAULT_MTU), &pool)
            }
        };
        let answer = |sorted: &[Rule]| -> Result<Vec<Vec<KernelRule>>, PoolError> {
            Ok((0..).zip(settings).map(|(id, port)| port.plan.kernel_rules(sorted, PortId::new(id))).collect())
        };
        let decided = in_priority_order(rules, answer)?;
        Ok(Self { ports: (0..).zip(settings).map(info).collect(), decided })
    }

    /// Returns for each rule where it runs, or why the program would not start.
    pub fn judge(&self, rules: &[Rule]) -> Vec<Result<RuleLocations, String>> {
        judge(rules, Some(&self.ports), &self.decided, &RuleLimits::default())
    }
}

impl RuleSettings {
    /// Checks the rules as far as possible without opening a port. The first rule that cannot run is an error.
    pub fn check(&self, settings: &[PortSettings]) -> Result<(), Failure> {
        let rules: Vec<Rule> = self.entries.iter().map(|entry| entry.rule.clone()).collect();
        let judged = UnopenedPorts::ask(settings, &rules)?.judge(&rules);
        match self.entries.iter().zip(judged).find_map(|(entry, judged)| Some((entry, judged.err()?))) {
            Some((entry, why)) => Err(entry.span.error(why).into()),
            None => Ok(()),
        }
    }
}
