//! Remotes that segments learn from received tunnel packets: limits, ageing and eviction.
//!
//! Anybody who reaches the underlay can forge the source of a tunnel packet. A learned remote is therefore
//! provisional until a frame for an address behind it had to be sent and its next hop has answered.
//! Provisional remotes are the first to make room for others.
//!
//! The index of a remote is its identity in forwarding entries ([`super::places`]).

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::places::REUSE_DELAY;
use crate::table::Key;

/// Maximum number of learned remotes of one segment.
const PER_SEGMENT: usize = 1024;
/// Maximum number of learned remotes of all segments.
pub(super) const LEARNED_REMOTES: usize = 4096;
/// Maximum number of indices, including those that wait for [`REUSE_DELAY`].
pub(super) const INDICES: usize = 2 * LEARNED_REMOTES;
/// Seconds without a forwarding entry after which a remote is removed.
const IDLE_TIME: u32 = 60;
/// Seconds after which a remote is removed to which no frame had to be sent.
const PROVISIONAL_TIME: u32 = 300;

/// A learned remote.
#[derive(Debug)]
struct LearnedRemote {
    segment: u16,
    /// Second in which it was learned.
    since: u32,
    /// Second of its last change from one forwarding entry to none.
    idle_since: u32,
    /// True if a frame had to be sent to it.
    contacted: bool,
    /// Its forwarding entries.
    keys: HashSet<Key>,
}

/// Numbers of remotes since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnedRemoteStats {
    /// Remotes learned.
    pub learned: u64,
    /// Remotes removed because they were not used.
    pub aged: u64,
    /// Remotes removed to make room for others.
    pub evicted: u64,
}

/// The learned remotes of all segments.
#[derive(Debug, Default)]
pub(super) struct LearnedRemotes {
    live: BTreeMap<u32, LearnedRemote>,
    by_segment: HashMap<u16, usize>,
    /// For each removed remote the second from which its index may be used again.
    removed: VecDeque<u32>,
    pub(super) stats: LearnedRemoteStats,
}

impl LearnedRemotes {
    /// Returns whether an index belongs to a learned remote that was not removed.
    pub(super) fn contains(&self, index: u32) -> bool {
        self.live.contains_key(&index)
    }

    /// Iterates over the indices of the learned remotes of a segment.
    pub(super) fn of_segment(&self, segment: u16) -> impl Iterator<Item = u32> {
        self.live.iter().filter(move |(_, remote)| remote.segment == segment).map(|(index, _)| *index)
    }

    /// Iterates over the indices of all learned remotes.
    pub(super) fn indices(&self) -> impl Iterator<Item = u32> {
        self.live.keys().copied()
    }

    /// Iterates over the indices of the learned remotes to which a frame had to be sent.
    pub(super) fn contacted(&self) -> impl Iterator<Item = u32> {
        self.live.iter().filter(|(_, remote)| remote.contacted).map(|(index, _)| *index)
    }

    /// Returns whether a frame had to be sent to a learned remote.
    pub(super) fn is_contacted(&self, index: u32) -> bool {
        self.live.get(&index).is_some_and(|remote| remote.contacted)
    }

    /// Returns whether a segment needs an eviction before it can learn a remote.
    pub(super) fn is_full(&self, segment: u16) -> bool {
        self.live.len() >= LEARNED_REMOTES || self.segment_is_full(segment)
    }

    fn segment_is_full(&self, segment: u16) -> bool {
        self.by_segment.get(&segment).is_some_and(|n| *n >= PER_SEGMENT)
    }

    /// Returns the remote to evict for a new one of `segment`: the oldest one that never had to be contacted,
    /// else the oldest one whose next hop does not answer. `None`: all are in use.
    pub(super) fn victim(&self, segment: u16, answers: impl Fn(u32) -> bool) -> Option<u32> {
        let own_only = self.segment_is_full(segment);
        let candidates = self.live.iter().filter(|(index, remote)| {
            (!own_only || remote.segment == segment) && !(remote.contacted && answers(**index))
        });
        candidates.min_by_key(|(_, remote)| (remote.contacted, remote.since)).map(|(index, _)| *index)
    }

    /// Returns whether too many indices are in use or wait for [`REUSE_DELAY`].
    pub(super) fn is_exhausted(&mut self, now: u32) -> bool {
        while self.removed.pop_front_if(|until| *until <= now).is_some() {}
        self.live.len() + self.removed.len() >= INDICES
    }

    /// Adds a remote with this index.
    pub(super) fn add(&mut self, index: u32, segment: u16, now: u32) {
        let remote = LearnedRemote { segment, since: now, idle_since: now, contacted: false, keys: HashSet::new() };
        self.live.insert(index, remote);
        *self.by_segment.entry(segment).or_default() += 1;
        self.stats.learned += 1;
    }

    /// Removes a remote and returns its forwarding entries, and whether a frame had to be sent to it. The caller frees
    /// the index.
    pub(super) fn remove(&mut self, index: u32, now: u32) -> Option<(HashSet<Key>, bool)> {
        let removed = self.forget(index)?;
        self.removed.push_back(now + REUSE_DELAY);
        Some((removed.keys, removed.contacted))
    }

    /// Removes a remote that keeps its index and its forwarding entries, because it is configured now.
    pub(super) fn promote(&mut self, index: u32) {
        self.forget(index);
    }

    fn forget(&mut self, index: u32) -> Option<LearnedRemote> {
        let remote = self.live.remove(&index)?;
        if let Some(n) = self.by_segment.get_mut(&remote.segment) {
            *n -= 1;
        }
        Some(remote)
    }

    /// Records that a frame has to be sent to a remote. Returns `true` for the first one.
    pub(super) fn contact(&mut self, index: u32) -> bool {
        self.live.get_mut(&index).is_some_and(|remote| !std::mem::replace(&mut remote.contacted, true))
    }

    /// Records a new forwarding entry of a remote.
    pub(super) fn add_key(&mut self, index: u32, key: Key) {
        if let Some(remote) = self.live.get_mut(&index) {
            remote.keys.insert(key);
        }
    }

    /// Records that a forwarding entry of a remote was removed or has moved.
    pub(super) fn remove_key(&mut self, index: u32, key: Key, now: u32) {
        if let Some(remote) = self.live.get_mut(&index)
            && remote.keys.remove(&key)
        {
            remote.idle_since = now;
        }
    }

    /// Returns the remotes that are no longer used.
    pub(super) fn unused(&self, now: u32) -> Vec<u32> {
        let unused = |remote: &LearnedRemote| {
            remote.keys.is_empty() && now.saturating_sub(remote.idle_since) >= IDLE_TIME
                || !remote.contacted && now.saturating_sub(remote.since) >= PROVISIONAL_TIME
        };
        self.live.iter().filter(|(_, remote)| unused(remote)).map(|(index, _)| *index).collect()
    }

    /// Number of learned remotes.
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_wire::MacAddr;

    #[test]
    fn provisional_and_silent_remotes_are_evicted_first() {
        let mut learned = LearnedRemotes::default();
        (0..4).for_each(|second| learned.add(2 + second, 7, second));
        assert!(learned.contact(2) && learned.contact(3) && !learned.contact(3));
        let answers = |index| index == 2;
        assert_eq!(learned.victim(7, answers), Some(4), "the oldest that never had to be contacted");
        learned.remove(4, 9);
        learned.remove(5, 9);
        assert_eq!(learned.victim(7, answers), Some(3), "it does not answer");
        learned.remove(3, 9);
        assert_eq!(learned.victim(7, answers), None);
        assert!(learned.contains(2) && !learned.contains(3));
    }

    #[test]
    fn indices_that_wait_are_limited() {
        let mut learned = LearnedRemotes::default();
        for index in 0..INDICES as u32 {
            assert!(!learned.is_exhausted(5));
            learned.add(index, 0, 5);
            learned.remove(index, 5);
        }
        assert!(learned.is_exhausted(5 + REUSE_DELAY - 1) && !learned.is_exhausted(5 + REUSE_DELAY));
    }

    #[test]
    fn one_segment_cannot_use_all_places() {
        let mut learned = LearnedRemotes::default();
        for index in 0..PER_SEGMENT as u32 {
            assert!(!learned.is_full(1));
            learned.add(index, 1, 0);
        }
        learned.add(9999, 2, 0);
        assert!(learned.is_full(1) && !learned.is_full(2));
        assert_ne!(learned.victim(1, |_| false), Some(9999));
    }

    #[test]
    fn unused_remotes_expire() {
        let mut learned = LearnedRemotes::default();
        let (a, b) = (0, 1);
        learned.add(a, 0, 0);
        learned.add(b, 0, 0);
        let key = Key::new(0, MacAddr::new(2, 0, 0, 0, 0, 1));
        learned.add_key(a, key);
        learned.contact(a);
        assert_eq!(learned.unused(IDLE_TIME), [b]);
        learned.remove_key(a, key, 500);
        assert!(!learned.unused(500 + IDLE_TIME - 1).contains(&a));
        assert!(learned.unused(500 + IDLE_TIME).contains(&a));
    }
}
