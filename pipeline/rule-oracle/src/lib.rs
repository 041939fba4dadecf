//! Test oracle for rule engines: a reference engine, random rules and packets, and the comparison of results.
//!
//! The crate is for tests only. It takes the rule types of `wirepath_flow` as data and shares nothing else
//! with the project. Its parser, its pattern matching and its rewriting are written from the RFCs and from
//! the documentation of the rule language. An engine and this crate can be wrong together only if both
//! misread the same sentence.
//!
//! - [`Reference`]: computes the result for a packet, rule by rule and byte by byte. [`Fault`] plants an
//!   error in it.
//! - [`generate`]: makes random overlapping rules and random packets that match them, from one seed.
//! - [`compare`]: compares frames, except for fields that an engine may choose.
//! - [`shrink`]: minimises failing rules and packets.
//! - [`Coverage`]: records what a run has tested.

#![forbid(unsafe_code)]

pub mod compare;
mod coverage;
pub mod fields;
pub mod generate;
pub mod headers;
mod pattern_match;
mod reference;
pub mod rewrite;
mod rng;
mod rss;
pub mod show;
pub mod shrink;

pub use coverage::Coverage;
pub use fields::PacketMetadata;
pub use reference::{Count, DropCause, Fault, Outcome, Reference, RuleId, Verdict};
pub use rewrite::Frame;
pub use rng::Rng;
