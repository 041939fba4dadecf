//! Storm control: limits of the frames that local ports may flood in a segment.
//!
//! All workers share the buckets of a segment, so a limit holds for the segment as a whole. It applies to frames from
//! local ports only: frames from tunnels passed the limits of the gateway that sent them, and one remote must not use
//! up the limit of the others.

use std::sync::Arc;

use wirepath_settings::{Integer, Key, Settings};
use wirepath_wire::MacAddr;

use super::config::Result;
use crate::token_bucket::TokenBucket;

const MAX_RATE: i64 = u32::MAX as i64;

pub(super) const BROADCAST_LIMIT: Key<Integer<u32>> = Key::integer("broadcast_limit", 1..=MAX_RATE)
    .unit("frames per second")
    .absent("no limit")
    .about("Most broadcast frames that local ports flood. A tenth of a second, at least 10, may come at once.");
pub(super) const MULTICAST_LIMIT: Key<Integer<u32>> = Key::integer("multicast_limit", 1..=MAX_RATE)
    .unit("frames per second")
    .absent("no limit")
    .about("Most multicast frames that local ports flood.");
pub(super) const UNKNOWN_UNICAST_LIMIT: Key<Integer<u32>> = Key::integer("unknown_unicast_limit", 1..=MAX_RATE)
    .unit("frames per second")
    .absent("no limit")
    .about("Most frames to unknown unicast addresses that local ports flood.");

/// Smallest burst in frames. A host that starts sends a few broadcast frames at once.
const MIN_BURST: u32 = 10;

/// Kind of a flooded frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FloodKind {
    Broadcast,
    Multicast,
    UnknownUnicast,
}

impl FloodKind {
    /// Returns the kind of a flooded frame with this destination.
    pub(super) fn of(destination: MacAddr) -> Self {
        if destination == MacAddr::BROADCAST {
            Self::Broadcast
        } else if destination.is_multicast() {
            Self::Multicast
        } else {
            Self::UnknownUnicast
        }
    }
}

/// Limits of a segment in frames per second; `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StormLimits {
    /// Limit of broadcast frames.
    pub broadcast: Option<u32>,
    /// Limit of multicast frames.
    pub multicast: Option<u32>,
    /// Limit of unicast frames to unknown addresses.
    pub unknown_unicast: Option<u32>,
}

impl StormLimits {
    pub(super) fn read(table: &Settings<'_>) -> Result<Self> {
        Ok(Self {
            broadcast: table.read(&BROADCAST_LIMIT)?,
            multicast: table.read(&MULTICAST_LIMIT)?,
            unknown_unicast: table.read(&UNKNOWN_UNICAST_LIMIT)?,
        })
    }
}

/// Buckets of the limits of a segment.
#[derive(Debug)]
pub(super) struct StormControl {
    limits: StormLimits,
    /// By [`FloodKind`].
    buckets: [Option<TokenBucket>; 3],
}

impl StormControl {
    /// Returns full buckets for these limits, or those of `known` if it has the same limits.
    pub(super) fn new(limits: StormLimits, known: Option<&Arc<Self>>) -> Arc<Self> {
        if let Some(known) = known.filter(|known| known.limits == limits) {
            return Arc::clone(known);
        }
        let bucket = |rate: u32| TokenBucket::new(rate.into(), (rate / 10).max(MIN_BURST).into());
        let buckets = [limits.broadcast, limits.multicast, limits.unknown_unicast].map(|rate| rate.map(bucket));
        Arc::new(Self { limits, buckets })
    }

    /// Returns the limits.
    pub(super) fn limits(&self) -> StormLimits {
        self.limits
    }

    /// Returns whether a frame is within the limit of its kind. `now` is in nanoseconds.
    pub(super) fn admits(&self, kind: FloodKind, now: u64) -> bool {
        self.buckets[kind as usize].as_ref().is_none_or(|bucket| bucket.take(1, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_limits_of_their_own() {
        let limits = StormLimits { broadcast: Some(1000), multicast: Some(1), unknown_unicast: None };
        let control = StormControl::new(limits, None);
        let passed = |kind, now| (0..500).filter(|_| control.admits(kind, now)).count();
        assert_eq!(passed(FloodKind::Broadcast, 0), 100, "a tenth of a second");
        assert_eq!(passed(FloodKind::Multicast, 0), 10);
        assert_eq!(passed(FloodKind::UnknownUnicast, 0), 500);
        assert_eq!(passed(FloodKind::Broadcast, 20_000_000), 20);
        assert_eq!(FloodKind::of(MacAddr::BROADCAST), FloodKind::Broadcast);
        assert_eq!(FloodKind::of(MacAddr([1, 0, 0x5e, 0, 0, 1])), FloodKind::Multicast);
        assert_eq!(FloodKind::of(MacAddr([2, 0, 0, 0, 0, 1])), FloodKind::UnknownUnicast);
    }

    #[test]
    fn the_same_limits_keep_their_buckets() {
        let limits = StormLimits { broadcast: Some(7), ..StormLimits::default() };
        let control = StormControl::new(limits, None);
        assert!(Arc::ptr_eq(&StormControl::new(limits, Some(&control)), &control));
        assert!(!Arc::ptr_eq(&StormControl::new(StormLimits::default(), Some(&control)), &control));
    }
}
