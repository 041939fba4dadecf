//! Packet classification: finds the rule that each packet of a batch matches.
//!
//! A worker first looks a packet up in its exact-match [flow cache](flow_cache). Flows that miss go through a
//! [tuple space](tuple_space): one hash table for each set of bits that rules compare. The control thread
//! changes these tables while workers read them.

mod exact_match;
pub(super) mod extract;
pub(super) mod flow_cache;
pub(super) mod hash_seed;
pub(super) mod hash_table;
mod incremental_resize;
pub(super) mod lookup;
pub(super) mod match_key;
pub(super) mod records;
pub(super) mod tuple_space;
pub(super) mod view;

pub use exact_match::ExactMatchTable;
pub use flow_cache::FlowCacheStats;
pub use lookup::{Hit, RuleLookup};
pub(crate) use lookup::{Lookup, LookupBuffers};
