//! Finds the throughput of a device by multiple loss ratio search (MLRsearch, RFC 9971).
//!
//! [`search`] decides which trials are needed and what they show; it knows no ports. [`measure()`] makes the trials on
//! a [`Generator`](crate::pktgen::Generator). [`qualify`] judges whether the machine leaves a measurement alone, and
//! [`report`] writes results. The program `wirepath ndr` is a user of them.

mod measure;
pub mod qualify;
pub mod report;
pub mod search;

pub use measure::{End, Faults, LATENCY_SHARES, Latency, Measurement, Plan, TrialRecord, measure};
