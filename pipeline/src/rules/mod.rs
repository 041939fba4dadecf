//! The software engine of flow rules ([`wirepath_pmd::flow`]): which rule each packet meets, and what became of the rules.
//!
//! [`RuleTable`] belongs to the control thread: it adds, removes, replaces and ages rules while the workers forward. Each worker has a
//! [`RuleLookup`] for each direction, which finds the rule of every packet of a batch, and around its stages a [`Ruled`] that does what the
//! rules say.
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
//! })?; // every packet meets the one rule or the other
//! assert_eq!((table.len(), table.counters(dns)), (1, None));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod around;
mod cache;
mod control;
mod error;
mod exact;
mod extract;
mod growing;
pub mod hardware;
mod hash;
mod listed;
mod log;
mod lookup;
mod masks;
mod memory;
mod packet;
pub mod program;
mod records;
mod slots;
mod table;
#[cfg(all(test, not(loom)))]
mod tests;
mod view;
mod words;

pub use around::{Around, PUNT_TO_KERNEL, Ruled};
pub use cache::CacheStats;
pub use control::{
    Place, Placed, RuleControl, RuleControlError, RuleRefused, Standing, check, check_on, in_order, order, place_all,
    place_rule,
};
pub use error::RuleTableError;
pub use exact::ExactTable;
pub use lookup::{Hit, RuleLookup};
pub use packet::outside;
pub use program::{Environment, Outcome, Program, Toeplitz};
pub use table::{Change, Gone, RuleCounters, RuleId, RuleLimits, RuleTable, Timeouts, Why};
