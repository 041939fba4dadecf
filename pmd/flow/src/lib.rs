//! Flow rules: patterns of packet headers and the actions for the packets that match.
//!
//! ```
//! use wirepath_flow::Rule;
//! let text = "ingress prio 10: eth / ipv4 dst 10.0.0.0/8 / udp dst 4789 / vxlan vni 42 => decap l2, mark 7, queue 3";
//! let rule: Rule = text.parse()?;
//! assert_eq!(rule.to_string(), text);
//! # Ok::<(), wirepath_flow::TextError>(())
//! ```
//!
//! # Semantics
//! - Each direction has its own rules. Of the rules that a packet matches, only the one with the **lowest**
//!   priority number runs. If two have the same number, the one that was added first runs.
//! - An **item** requires its header and the named field values. **Omitted headers and fields are not
//!   compared**: `udp dst 53` is UDP over IPv4 or IPv6, tagged or not. An MPLS label stack is the exception
//!   and is never skipped. `eth / ipv4` does not match an IPv4 packet after labels, and `udp / inner ipv4`
//!   does not match one after labels in UDP.
//! - Items stand in the order of headers. Items after a tunnel header belong to the inner stack. The word
//!   `inner` marks them if the tunnel item is omitted (`ipv4 proto 4 / inner ipv4 dst 10.0.0.1`). There are
//!   two stacks; headers after the second one are not parsed.
//! - `eth type` is the EtherType after all VLAN tags. A layer-4 item never matches a later fragment; `ipv4
//!   proto 17` does.
//! - An invalid tunnel header counts as absent, and so does the inner stack of an invalid tunnel. Nothing is
//!   parsed after the layer-4 header of a fragment. GRE matches with any flags, but only version 0 without
//!   routing has an inner stack.
//! - Only the first four bits after labels tell what they carry: 4 is IPv4, 6 is IPv6, and everything else is
//!   Ethernet (without control word). If a stack has labels at two positions, the fields of `mpls` are those
//!   of the first.
//! - `vxlan`, `vxlan-gpe` and `geneve` match on the UDP ports that the parser of the port is configured with.
//! - A **value** is compared as a whole, as a prefix (`10.0.0.0/8`), under a `mask`, or by names of bits
//!   (`syn+!ack`).
//! - **Actions** run in order. A terminating action decides the packet's destination and is the last. Without
//!   one, the packet continues: at ingress to the next stage, at egress out of the port.
//!
//! # Validation
//! [`Rule::new`] refuses rules that are invalid for every engine: impossible header stacks, contradictions,
//! and actions on headers that the pattern does not require. Limits of NICs are not errors. Encapsulation at
//! ingress and decapsulation at egress run only in software ([`Rule::software_only`]). The driver of a NIC
//! reports what that NIC cannot do.
//!
//! # Formats
//! There are three formats: text ([`str::parse`], [`Rule::parse`]; grammar in [`text`]), TOML
//! ([`from_settings`]) and JSON ([`Rule::to_json`], [`Rule::from_json`]). [`rule_file`] reads whole files of
//! any of them. All use the same tables ([`ITEMS`], [`FIELDS`], [`ACTIONS`]), which [`items_reference`] and
//! [`actions_reference`] print.

mod action;
mod ast;
mod config;
mod fields;
mod items;
mod json;
mod masked_value;
mod packet_value;
mod reason;
mod reformat;
mod rule;
pub mod rule_file;
pub mod text;

#[cfg(test)]
pub(crate) mod tests;

pub use action::{ACTIONS, Action, ActionSpec, HashFields, Limit, MAX_RSS_QUEUES, RateUnit, Rss, actions_reference};
pub use config::{RULE, from_settings, list_from_settings};
pub use fields::{FieldSet, Key, KeyKind, LEVELS, covers, overlaps};
pub use items::{
    FIELDS, Field, FieldSpec, HeaderType, ITEMS, Item, ItemKind, ItemSpec, Layer, ext, items_reference, mpls, network,
    tunnel,
};
pub use json::JsonError;
pub use masked_value::{Format, MaskedValue, Ports, ones};
pub use packet_value::{Metadata, header_type, packet_value};
pub use reason::{ErrorLocation, Reason, RuleError};
pub use reformat::{
    GENEVE_PORT, GPE_PORT, HeaderEnd, HeaderError, HeaderLayout, MAX_HEADER, MPLS_PORT, Reformat, ReformatKind, TEB,
};
pub use rule::{Direction, NamedRule, Rule, SoftwareOnly};
pub use text::TextError;
