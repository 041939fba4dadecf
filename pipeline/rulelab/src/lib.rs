//! Judge of rule engines: a naive reference, random rules and packets, and their comparison.
//!
//! For tests only. It takes the rule types of `wirepath_pmd::flow` as data and nothing else of the project: its parser, its
//! evaluation of patterns and its rewriting are its own, written down from the RFCs and from what the rule language is documented
//! to mean. An engine and this crate can be wrong together only where both read the same sentence wrongly.
//!
//! - [`Reference`]: what becomes of a packet, rule after rule, byte after byte. [`Fault`] plants an error in it.
//! - [`make`]: random rules that overlap and random packets that hit them, from one seed.
//! - [`compare`]: equality of frames on the wire, but for what each engine may choose.
//! - [`shrink`]: the smallest rules and packets that still fail.
//! - [`Coverage`]: what a run has seen at all.

#![forbid(unsafe_code)]

pub mod compare;
mod coverage;
pub mod fields;
mod fit;
pub mod headers;
pub mod make;
mod reference;
pub mod rewrite;
mod rng;
mod rss;
pub mod show;
pub mod shrink;

pub use coverage::Coverage;
pub use fields::Noted;
pub use reference::{Cause, Count, Fate, Fault, Outcome, Reference, RuleId};
pub use rewrite::Frame;
pub use rng::Rng;
