//! The software engine of flow rules ([`wirepath_flow`]): it finds the rule that each packet matches and runs
//! its actions.
//!
//! [`RuleTable`] belongs to the control thread, which adds, removes, replaces and ages rules while the
//! workers forward. Each worker has one [`RuleLookup`] for each direction. A [`RuleStage`] wraps the stages
//! of the worker and runs the actions of the rules.
//!
//! ```
//! use wirepath_pipeline::epoch::Domain;
//! use wirepath_pipeline::rules::{RuleLimits, RuleTable, Timeouts};
//!
//! let domain = Domain::new(); // in a program: runtime.domain()
//! let mut table = RuleTable::new(&domain, RuleLimits::default(), 0);
//! let dns = table.add("ingress prio 10: udp dst 53 => mark 1".parse()?, Timeouts::NONE)?;
//! table.change(|change| {
//!     change.remove(dns)?;
//!     change.add("ingress prio 10: udp dst 5353 => mark 1".parse().unwrap(), Timeouts::NONE)
//! })?; // every packet sees either the old rule or the new one
//! assert_eq!((table.len(), table.counters(dns)), (1, None));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod actions;
mod classifier;
mod control;
mod error;
pub mod offload;
mod rule_stage;
#[cfg(all(test, not(loom)))]
mod tests;

pub use actions::{Environment, Outcome, Program, Toeplitz};
pub use classifier::{ExactMatchTable, FlowCacheStats, Hit, RuleLookup};
pub(crate) use classifier::{Lookup, LookupBuffers};
pub use control::{
    ActiveRule, Change, ListEntry, Meanwhile, RemovalReason, RemovedRule, RuleControl, RuleControlError, RuleCounters,
    RuleId, RuleLimits, RuleLocation, RuleLocations, RuleRefused, RuleTable, Timeouts, check, check_on,
    in_priority_order, judge, locate_rule, priority_order,
};
pub use error::RuleTableError;
pub(crate) use rule_stage::rule_text;
pub use rule_stage::{PUNT_TO_KERNEL, RulePorts, RuleStage};
