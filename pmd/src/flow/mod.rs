//! Flow rules: which packets, and what becomes of them.
//!
//! ```
//! use wirepath_pmd::flow::Rule;
//! let text = "ingress prio 10: eth / ipv4 dst 10.0.0.0/8 / udp dst 4789 / vxlan vni 42 => decap l2, mark 7, queue 3";
//! let rule: Rule = text.parse()?;
//! assert_eq!(rule.to_string(), text);
//! # Ok::<(), wirepath_pmd::flow::TextError>(())
//! ```
//!
//! # What a rule means
//! - Of the rules of one direction that a packet fits, the one with the **lowest** priority number runs, and no other; among
//!   equal numbers the one that was added first.
//! - An **item** says that its header is there and that the named fields have these values. **What is left out is not looked
//!   at**: `udp dst 53` is UDP over IPv4 or IPv6, tagged or not. Only an MPLS label stack is never skipped: `eth / ipv4` does
//!   not fit an IPv4 packet behind labels, nor `udp / inner ipv4` one behind labels in UDP.
//! - Items stand in the order of headers. What follows a tunnel header belongs to the inner stack; `inner` says so where the
//!   tunnel is left out (`ipv4 proto 4 / inner ipv4 dst 10.0.0.1`). There are two stacks; nothing is looked at behind the second.
//! - `eth type` is the EtherType behind all VLAN tags. A layer-4 item never fits a later fragment; `ipv4 proto 17` does.
//! - A tunnel header that is broken is not there, nor is a stack in a tunnel that is broken; nothing is looked for behind the
//!   layer-4 header of a fragment. GRE fits with any flags, but only version 0 without routing is known to carry something.
//! - Nothing tells what labels carry but the first four bits behind them: 4 is IPv4, 6 is IPv6, all else is taken for Ethernet (without
//!   control word). Where a stack has labels at two places, the fields of `mpls` are those of the first.
//! - `vxlan`, `vxlan-gpe` and `geneve` fit what the port's parser takes for that tunnel, on the UDP ports that it is told.
//! - A **value** is compared as a whole, as a prefix (`10.0.0.0/8`), under `mask`, or by names of bits (`syn+!ack`).
//! - **Actions** run in order. The one that decides where the packet goes is the last. Without one, the packet goes on.
//!
//! # What is checked where
//! [`Rule::new`] refuses what means nothing whoever runs it: impossible stacks, contradictions, actions on headers that the
//! pattern does not promise. What only a NIC cannot do is no error: encapsulation at ingress and decapsulation at egress are
//! sound in software and barred from every NIC ([`Rule::nic_bar`]); what one NIC cannot do is its driver's to say.
//!
//! # Forms
//! Text ([`str::parse`], [`Rule::parse`]; grammar in [`text`]), TOML ([`from_settings`]), JSON ([`Rule::to_json`],
//! [`Rule::from_json`]); whole files of any of them: [`list`]. All are read through the same tables ([`ITEMS`], [`FIELDS`], [`ACTIONS`]), which
//! [`items_reference`] and [`actions_reference`] print. [`verbs`] translates rules to the specs of `ibv_create_flow` and back.

mod action;
mod bits;
mod config;
mod fields;
mod items;
mod json;
pub mod list;
mod packet;
mod queue_pair;
mod reason;
mod reformat;
mod rule;
pub mod text;
mod tree;
pub mod verbs;

#[cfg(test)]
pub(crate) mod tests;

pub use action::{ACTIONS, Action, ActionSpec, HashFields, Limit, MAX_RSS_QUEUES, RateUnit, Rss, actions_reference};
pub use bits::{Bits, Format, Ports};
pub use config::{from_settings, list_from_settings};
pub use fields::{FieldSet, Key, LEVELS, What, covers, overlaps};
pub use items::{
    FIELDS, Fact, Field, FieldSpec, ITEMS, Item, ItemKind, ItemSpec, Layer, ext, items_reference, mpls, network, tunnel,
};
pub use json::JsonError;
pub use packet::{Outside, fact, value};
pub use queue_pair::{NoQueuePairEncap, queue_pair_encap};
pub use reason::{At, Reason, RuleError};
pub use reformat::{
    GENEVE_PORT, GPE_PORT, HeaderEnd, HeaderError, HeaderLayout, MAX_HEADER, MPLS_PORT, Reformat, ReformatKind, TEB,
};
pub use rule::{Direction, NicBar, Rule};
pub use text::TextError;
