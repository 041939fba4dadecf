//! Tunnels between local segments and remote VTEPs.
//!
//! ```text
//! local port ──> stage: encap ──────────────> underlay port
//!                  │  flood, too big
//!                  v
//!               control <── ARP, ND, unresolved, learned
//!                  ^
//! local port <── stage: decap <────────────── underlay port
//! ```
//!
//! - [`config`]: the gateway's configuration, checked.
//! - [`tables`]: the data that workers read: ports, segments and remotes.
//! - [`neighbour`], [`underlay`]: the neighbour table, ARP and neighbour discovery.
//! - `next_hops`: these for one network, and the remotes that each next hop serves.
//! - `host`: classification of the underlay packets for the gateway itself, and echo, on the workers.
//! - `storm_control`: limits of flooded frames.
//! - `policer`: rate limits of these packets.
//! - `outer_fragments`: fragments of tunnel packets that are longer than the path takes.
//! - `reassembly`: received fragments of tunnel packets.
//! - `path_mtu`: the MTU of the path to each remote, from ICMP errors.
//! - [`bfd`]: liveness of remotes.
//! - `bindings`: IP addresses of the hosts in segments.
//! - `suppression`: replies to ARP and ND requests of local hosts.
//! - `mirror`: copies of the frames of a segment.
//! - `filter`: flow rules of segments and VRFs.
//! - `mss`: the maximum segment size of TCP connections through tunnels.
//! - `learning`: rules for learned addresses: limits, sticky places.
//! - `move_damping`: addresses that move too often.
//! - `learned`: limits, ageing and eviction of learned VTEPs.
//! - `control`: combines these on the control thread.
//! - `external`: remotes and addresses from another control plane, such as the kernel's tables.
//! - `reconfigure`: changes of the configuration while the workers forward.
//! - `state`: what a process passes to its successor.
//! - `places`: indices of segments, attachments and remotes, which stay over such a change.
//! - [`counters`]: counters per segment and worker.
//! - [`kinds`]: the kinds of tunnels, such as VXLAN, each with its header.
//! - `outer`: outer headers of a remote, and recognition of received ones.
//! - [`ecn`]: congestion marks (RFC 6040).
//! - [`router`]: routing between segments.
//!
//! [`GatewayControl`] is created from a [`GatewayConfig`] and the opened ports. It creates a [`Gateway`]
//! stage for each worker.

pub mod bfd;
mod bindings;
mod change;
pub mod config;
mod control;
pub mod counters;
mod decap;
pub mod ecn;
mod encap;
mod external;
mod filter;
mod flood;
mod groups;
mod headers;
mod host;
pub mod kinds;
mod known_outer;
mod learned;
mod learning;
mod listing;
mod mirror;
mod move_damping;
mod mss;
pub mod neighbour;
mod next_hops;
mod outer;
mod outer_fragments;
mod path_mtu;
mod places;
mod policer;
mod reassembly;
mod reconfigure;
mod report;
pub mod router;
mod stage;
mod state;
mod storm_control;
mod suppression;
pub mod tables;
pub mod underlay;

pub use config::GatewayConfig;
pub use control::{GatewayControl, LearnStats, Tunnel, TunnelPlacement};
pub use external::{ExternalChanges, ExternalPlace, ExternalStats, LocalAddress, LocalBinding};
pub use groups::ExternalGroup;
pub use learned::LearnedRemoteStats;
pub use learning::{AttachmentRules, LearnRules};
pub use move_damping::MoveLimits;
pub use next_hops::KernelNextHop;
pub use outer::{ActiveKind, TunnelId, outer_headers};
pub use path_mtu::PathMtuStats;
pub use reconfigure::Reconfiguration;
pub use stage::{Gateway, GatewayTables, PuntCode};
pub use state::{Fact, PARTS, Part, Passed, Place, Restored, StatePass};
pub use storm_control::StormLimits;
pub use suppression::{StaticBinding, SuppressionConfig};
pub use tables::NicNumbers;
