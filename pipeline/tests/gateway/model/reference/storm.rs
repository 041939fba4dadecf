//! Storm control of the reference: buckets of frames that local ports may flood.

use wirepath_wire::MacAddr;

use super::Model;

const SECOND: u128 = 1_000_000_000;

/// Names of the kinds of flooded frames, as in [`super::super::config::Segment::storm`].
const KINDS: [&str; 3] = ["broadcast above its limit", "multicast above its limit", "unknown unicast above its limit"];

/// Bucket of a limit in frames per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    limit: u32,
    /// Frames that may come at once, in parts of a frame: a second has as many as a frame has parts.
    parts: u128,
    /// Time at which it had these.
    filled_at: u64,
}

impl Bucket {
    fn full(limit: u32, now: u64) -> Self {
        Self { limit, parts: Self::most(limit), filled_at: now }
    }

    /// A tenth of a second's frames, at least 10.
    fn most(limit: u32) -> u128 {
        u128::from(limit / 10).max(10) * SECOND
    }

    fn take(&mut self, now: u64) -> bool {
        let new = u128::from(now - self.filled_at) * u128::from(self.limit);
        self.parts = (self.parts + new).min(Self::most(self.limit));
        self.filled_at = now;
        let is_there = self.parts >= SECOND;
        if is_there {
            self.parts -= SECOND;
        }
        is_there
    }
}

impl Model {
    /// Returns whether a port may flood a frame to this address.
    pub(super) fn may_flood(&mut self, slot: usize, dst: MacAddr) -> bool {
        let kind = match dst {
            MacAddr([0xff, 0xff, 0xff, 0xff, 0xff, 0xff]) => 0,
            _ if dst.is_multicast() => 1,
            _ => 2,
        };
        let Some(limit) = self.segment(slot).storm[kind] else { return true };
        let now = self.now;
        let passes = self.buckets.entry((slot, kind)).or_insert_with(|| Bucket::full(limit, now)).take(now);
        self.count(if passes { "flooded within a limit" } else { KINDS[kind] });
        passes
    }
}
