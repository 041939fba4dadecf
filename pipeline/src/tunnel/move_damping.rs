//! Move damping: an address that moves too often stays where it is.
//!
//! Two hosts with one Ethernet address, or a loop, make an address move with each frame. As RFC 7432 section 15.1
//! demands of a PE, an address that moves [`MoveLimits::moves`] times within [`MoveLimits::window`] seconds is frozen
//! at its last place.

use std::collections::HashMap;

use wirepath_settings::{Integer, Key as ConfigKey, Settings, WithDefault};

use super::config::Result;
use crate::table::Key;

pub(super) const MOVE_LIMIT: ConfigKey<WithDefault<Integer<u32>>> = ConfigKey::integer("move_limit", 0..=1000)
    .default(0)
    .about("Moves within `move_window` after which an address stays at its last place. 0: any number. RFC 7432: 5.");
pub(super) const MOVE_WINDOW: ConfigKey<WithDefault<Integer<u32>>> = ConfigKey::integer("move_window", 1..=86_400)
    .unit("seconds")
    .default(180)
    .about("Time in which the moves of an address are counted, from the first one on.");
pub(super) const FREEZE_TIME: ConfigKey<WithDefault<Integer<u32>>> = ConfigKey::integer("freeze_time", 0..=86_400)
    .unit("seconds")
    .default(180)
    .about("Time for which such an address stays. 0: until it is removed from the forwarding database.");

/// Most addresses whose moves are counted. The moves of further addresses are not limited.
const MAX_HISTORIES: usize = 65_536;

/// Limit of the moves of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveLimits {
    /// Number of moves that freezes an address; 0: no limit.
    pub moves: u32,
    /// Seconds in which they are counted.
    pub window: u32,
    /// Seconds for which the address is frozen; 0: until it is removed.
    pub freeze_time: u32,
}

impl MoveLimits {
    pub(super) fn read(table: &Settings<'_>) -> Result<Self> {
        Ok(Self {
            moves: table.read(&MOVE_LIMIT)?,
            window: table.read(&MOVE_WINDOW)?,
            freeze_time: table.read(&FREEZE_TIME)?,
        })
    }
}

impl Default for MoveLimits {
    fn default() -> Self {
        Self { moves: 0, window: 180, freeze_time: 180 }
    }
}

/// Recent moves of an address.
#[derive(Clone, Copy, Debug)]
struct MoveHistory {
    moves: u32,
    /// Second from which on the history counts no more; `None`: the address is frozen until it is removed.
    until: Option<u32>,
    frozen: bool,
}

/// Recent moves of all addresses.
#[derive(Debug, Default)]
pub(super) struct MoveDamping {
    histories: HashMap<Key, MoveHistory>,
}

impl MoveDamping {
    /// Returns whether an address is frozen.
    pub(super) fn is_frozen(&self, key: Key, limits: MoveLimits, now: u32) -> bool {
        limits.moves > 0 && self.histories.get(&key).is_some_and(|history| history.frozen && !history.is_over(now))
    }

    /// Counts a move. Returns true if it freezes the address.
    pub(super) fn record(&mut self, key: Key, limits: MoveLimits, now: u32) -> bool {
        if limits.moves == 0 || self.histories.len() >= MAX_HISTORIES && !self.histories.contains_key(&key) {
            return false;
        }
        let new = MoveHistory { moves: 0, until: Some(now.saturating_add(limits.window)), frozen: false };
        let history = self.histories.entry(key).or_insert(new);
        if history.frozen || history.is_over(now) {
            // A frozen address moves only after its time, or after it was learned anew.
            *history = new;
        }
        history.moves += 1;
        if history.moves < limits.moves {
            return false;
        }
        let freeze_time = limits.freeze_time;
        *history =
            MoveHistory { frozen: true, until: (freeze_time > 0).then(|| now.saturating_add(freeze_time)), ..*history };
        true
    }

    /// Forgets the moves of an address.
    pub(super) fn forget(&mut self, key: Key) {
        self.histories.remove(&key);
    }

    /// Forgets the moves of all addresses for which `select` returns true.
    pub(super) fn forget_all(&mut self, mut select: impl FnMut(Key) -> bool) {
        self.histories.retain(|key, _| !select(*key));
    }

    /// Forgets old moves, and frozen addresses without an entry.
    pub(super) fn expire(&mut self, now: u32, mut has_entry: impl FnMut(Key) -> bool) {
        self.histories.retain(|key, history| match history.until {
            Some(until) => now < until,
            None => has_entry(*key),
        });
    }
}

impl MoveHistory {
    fn is_over(&self, now: u32) -> bool {
        self.until.is_some_and(|until| now >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: MoveLimits = MoveLimits { moves: 3, window: 10, freeze_time: 20 };

    #[test]
    fn moves_are_counted_in_their_window() {
        let (mut damping, key) = (MoveDamping::default(), Key::from_u64(7));
        let record = |damping: &mut MoveDamping, now| damping.record(key, LIMITS, now);
        assert!(![0, 9, 10, 19].into_iter().any(|now| record(&mut damping, now)), "two in each window");
        assert!(![20, 21].into_iter().any(|now| record(&mut damping, now)) && record(&mut damping, 29));
        assert!(damping.is_frozen(key, LIMITS, 48) && !damping.is_frozen(key, LIMITS, 49));
        assert!(!damping.is_frozen(key, MoveLimits::default(), 30), "without a limit");
        assert!(!damping.is_frozen(Key::from_u64(8), LIMITS, 30));
        damping.expire(49, |_| true);
        assert!(damping.histories.is_empty());
    }

    #[test]
    fn an_address_may_be_frozen_until_it_is_removed() {
        let limits = MoveLimits { moves: 1, freeze_time: 0, ..LIMITS };
        let (mut damping, key) = (MoveDamping::default(), Key::from_u64(7));
        assert!(damping.record(key, limits, 0));
        damping.expire(1_000_000, |_| true);
        assert!(damping.is_frozen(key, limits, 1_000_000));
        damping.expire(1_000_000, |_| false);
        assert!(!damping.is_frozen(key, limits, 1_000_000));
    }

    #[test]
    fn histories_are_bounded() {
        let mut damping = MoveDamping::default();
        for n in 0..2 * MAX_HISTORIES as u64 {
            damping.record(Key::from_u64(n), LIMITS, 0);
        }
        assert_eq!(damping.histories.len(), MAX_HISTORIES);
    }
}
