//! Routing between segments: VRFs, routes, and the router that a segment may have.
//!
//! The router of a segment is a member of it, beside the attachments and the remotes. Frames to its Ethernet address
//! find [`Destination::Router`](super::tables::Destination::Router) in the forwarding database, and are routed in the
//! segment's VRF. A routed frame is rewritten in its place and then bridged in the segment of its next hop, to an
//! attachment or into a tunnel. So a route leads to whatever a segment leads to, and symmetric IRB (RFC 9135) is a
//! segment without attachments.
//!
//! ```text
//! frame to the router ─> longest-prefix match in the VRF ─> hop ─┬─> Ethernet addresses, TTL ─> bridge of its segment
//!                            (route tables)                      ├─> own address: echo, ICMP errors
//!                                                                └─> control thread: ARP or ND for the next hop
//! ```
//!
//! - [`config`]: the tables `[[vrf]]` with their routes, checked.
//! - `tables`: interfaces and hops that the workers read. The routes themselves are in [`crate::route`].
//! - `forward`: the workers' part: lookup, checks, ICMP errors.
//! - `fast`: the same for the plain packets of a batch.
//! - `host`: packets for the router itself.
//! - `control`: the control thread's part: routes, neighbours of each segment, packets that wait for them.
//!
//! Neighbours that packets were sent to have host routes. A packet to another host of a connected network goes to the
//! control thread. That thread resolves the address and returns the packet to a worker, which routes it again.

pub mod config;
mod control;
mod fast;
mod forward;
mod host;
mod tables;

pub(super) use control::RouterControl;
pub(super) use fast::RouteScratch;
pub use tables::Interface;
pub(super) use tables::{Hops, RouterTag, interfaces, router_macs};
