//! Views and builders of packet headers: no copy, no allocation, no unsafe code, no panic on any input.
//!
//! - One module per protocol ([`ethernet`], [`vlan`], [`arp`], [`ipv4`], [`ipv6`], [`icmpv4`], [`icmpv6`], [`ndp`],
//!   [`tcp`], [`udp`], [`esp`], [`gre`], [`mpls`], [`vxlan`], [`vxlan_gpe`], [`geneve`]), all of the same shape: `View` and `ViewMut` lay names over bytes that one constructor
//!   has checked, `Repr` is the header as a plain value with `parse` and `emit`.
//! - [`mod@parse`] walks a whole frame once and says where each header lies, inside a tunnel too. It is what the burst path
//!   uses; views are then laid over the offsets it found.
//! - [`checksum`] is RFC 1071 arithmetic; [`finish`] completes the checksums that a kernel left to hardware.
//! - [`segment`] cuts superframes (TCP or UDP segmentation offload, inside VXLAN too) into frames.
//! - [`build`] makes outer headers, and the ARP, NDP and ICMP packets that a gateway sends of itself.
//!
//! Numbers are in host order and lengths in bytes unless a name says otherwise. Codes that come from the wire are open
//! newtypes with constants: a value without a name is a value all the same.
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
//! One file with a `header!` table, its `split` function and a `Repr`; one arm in [`mod@parse`] if frames of it are to be
//! looked into.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

#[macro_use]
mod field;

pub mod arp;
pub mod build;
pub mod checksum;
pub mod error;
pub mod esp;
pub mod ethernet;
pub mod finish;
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
pub mod tcp;
pub mod tuple;
pub mod udp;
pub mod vlan;
pub mod vxlan;
pub mod vxlan_gpe;

pub use checksum::Sum;
pub use error::{NoRoom, ParseError};
pub use ethernet::{EtherType, MacAddr};
pub use field::Field;
pub use ip::IpProtocol;
pub use parse::{L3, L4, Layers, Parsed, Parser, Tunnel, Tunnels, extension, parse};
pub use tuple::FiveTuple;
pub use vlan::Tag;
pub use vxlan::Vni;
