//! Liveness of remotes by BFD (RFC 5880 in asynchronous mode, RFC 5881, RFC 5883, RFC 8971).
//!
//! - [`config`]: the configuration.
//! - `packet`: control packets and their frames.
//! - `vxlan`: control packets inside VXLAN tunnels.
//! - `session`: the state machine of a session.
//! - `host`: received packets on the workers.
//! - `control`: the sessions of the control thread, and their effect on the tables.
//!
//! A session belongs to a pair of underlay addresses. All remotes of segments with these addresses share it. A remote
//! that is *out* is in no replication list, no entry that was learned refers to it, and frames for it are dropped.
//! Workers do not know of sessions: the control thread changes the tables that they read.

pub mod config;
mod control;
mod host;
mod packet;
mod session;
mod vxlan;

pub(super) use control::{BfdControl, Out, TABLE};
pub(super) use vxlan::MANAGEMENT_MAC;

/// Microseconds since the start of the program, or a duration.
type Micros = u64;

/// Maximum number of sessions.
pub const MAX_SESSIONS: usize = 4096;
/// Most packets per second in one direction of all sessions. Workers pass no more to the control thread.
pub const MAX_RATE: u64 = 20_000;
/// Interval between two calls of [`BfdControl`]'s timers.
const TICK: Micros = 10_000;
