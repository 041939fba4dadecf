//! Control side of flow rules: the table of single rules, and the rule list of a program with its ports.

pub(super) mod change_log;
mod location;
mod parts;
mod rule_control;
mod rule_list;
pub(super) mod table;

pub use location::{
    RuleLocation, RuleLocations, RuleRefused, check, check_on, in_priority_order, judge, locate_rule, priority_order,
};
pub use parts::Meanwhile;
pub use rule_control::{ActiveRule, ListEntry, RuleControl, RuleControlError};
pub use table::{Change, RemovalReason, RemovedRule, RuleCounters, RuleId, RuleLimits, RuleTable, Timeouts};
