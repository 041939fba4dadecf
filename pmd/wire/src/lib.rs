//! Views and builders of packet headers. They copy nothing, allocate nothing, contain no unsafe code and
//! never panic.
//!
//! - There is one module per protocol: [`ethernet`], [`vlan`], [`arp`], [`ipv4`], [`ipv6`], [`icmpv4`],
//!   [`icmpv6`], [`ndp`], [`tcp`], [`udp`], [`esp`], [`gre`], [`mpls`], [`vxlan`], [`vxlan_gpe`],
//!   [`geneve`] and [`srh`]. All have the same shape. `View` and `ViewMut` give access to the fields of bytes that one
//!   constructor has checked. `Repr` is the header as a plain value with `parse` and `emit`.
//! - [`mod@parse`] walks a whole frame once and records where each header lies, inside a tunnel too. The
//!   burst path uses it, and lays views over the offsets that it found.
//! - [`edit`] changes fields of a parsed frame and keeps all checksums right.
//! - [`checksum`] is RFC 1071 arithmetic. [`checksum_offload`] completes the checksums that a kernel left to
//!   hardware.
//! - [`segment`] cuts superframes (TCP or UDP segmentation offload, inside VXLAN too) into frames.
//! - [`build`] makes outer headers, and the ARP, NDP and ICMP packets that a gateway originates.
//!
//! Numbers are in host order and lengths in bytes unless a name says otherwise. Codes from the wire are open
//! newtypes with constants, so that values without a name are valid too.
//!
//! ```
//! use wirepath_wire::{FiveTuple, parse};
//!
//! fn summary(frame: &[u8]) -> Result<String, wirepath_wire::ParseError> {
//!     let parsed = parse(frame)?;
//!     let flow = FiveTuple::of(frame, parsed.innermost());
//!     Ok(format!("VNI {:?}, flow {flow:?}", parsed.vni()))
//! }
//! assert_eq!(summary(&[0; 13]).unwrap_err().name(), "ethernet_truncated");
//! assert_eq!(summary(&[0; 14]).unwrap(), "VNI None, flow None");
//! ```
//!
//! # Adding a protocol
//! Add one file with a `header!` table, its `split` function and a `Repr`. Add one arm in [`mod@parse`] if
//! the parser is to recognise the header.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

#[macro_use]
mod field;

pub mod arp;
pub mod build;
pub mod checksum;
pub mod checksum_offload;
pub mod edit;
pub mod error;
pub mod esp;
pub mod ethernet;
pub mod geneve;
pub mod gre;
pub mod icmpv4;
pub mod icmpv6;
pub mod ip;
pub mod ipv4;
pub mod ipv6;
pub mod mpls;
pub mod ndp;
pub mod parse;
pub mod segment;
pub mod srh;
pub mod tcp;
pub mod tuple;
pub mod udp;
pub mod vlan;
pub mod vxlan;
pub mod vxlan_gpe;

pub use checksum::Sum;
pub use edit::HeadersMut;
pub use error::{BufferTooShort, ParseError};
pub use ethernet::{EtherType, MacAddr};
pub use field::Field;
pub use ip::IpProtocol;
pub use parse::{HeaderOffsets, L3Type, L4Type, Parsed, Parser, Tunnel, Tunnels, extension, parse};
pub use tuple::{FiveTuple, entropy};
pub use vlan::Tag;
pub use vxlan::Vni;
