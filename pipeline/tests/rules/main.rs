//! Tests of flow rules in the software engine.

mod actions;
mod changes;
mod differential;
mod oracle;
mod rule_stage;
mod script;
