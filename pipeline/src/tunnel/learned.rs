//! Remotes that segments learn from received tunnel packets: limits, ageing and eviction.
//!
//! Anybody who reaches the underlay can forge the source of a tunnel packet. A learned remote is therefore
//! provisional until a frame for an address behind it had to be sent and its next hop has answered.
//! Provisional remotes are the first to make room for others.
//!
//! The index of a remote is its identity in forwarding entries. A free index is used again only after all
//! events of workers about the previous remote have been processed.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::table::Key;

/// Maximum number of learned remotes of one segment.
const PER_SEGMENT: usize = 1024;
/// Maximum number of learned remotes of all segments.
pub(super) const LEARNED_REMOTES: usize = 4096;
/// Maximum number of indices, including those that wait for [`REUSE_DELAY`].
const INDICES: usize = 2 * LEARNED_REMOTES;
/// Seconds until a free index is used again.
const REUSE_DELAY: u32 = 10;
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
#[derive(Debug)]
pub(super) struct LearnedRemotes {
    /// Number of configured remotes, whose indices come first.
    configured: u32,
    live: BTreeMap<u32, LearnedRemote>,
    by_segment: HashMap<u16, usize>,
    /// Free indices, each with the second from which it may be used.
    free: VecDeque<(u32, u32)>,
    /// Number of indices in use or free.
    indices: u32,
    pub(super) stats: LearnedRemoteStats,
}

impl LearnedRemotes {
    pub(super) fn new(configured: usize) -> Self {
        Self {
            configured: configured as u32,
            live: BTreeMap::new(),
            by_segment: HashMap::new(),
            free: VecDeque::new(),
            indices: 0,
            stats: LearnedRemoteStats::default(),
        }
    }

    /// Number of configured remotes.
    pub(super) fn configured(&self) -> usize {
        self.configured as usize
    }

    /// Returns whether an index belongs to a configured remote or to a learned one that was not removed.
    pub(super) fn is_live(&self, index: u32) -> bool {
        index < self.configured || self.live.contains_key(&index)
    }

    /// Iterates over the indices of the learned remotes to which a frame had to be sent.
    pub(super) fn contacted(&self) -> impl Iterator<Item = u32> {
        self.live.iter().filter(|(_, remote)| remote.contacted).map(|(index, _)| *index)
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

    /// Adds a remote and returns its index. Returns `None` if no index is free.
    pub(super) fn add(&mut self, segment: u16, now: u32) -> Option<u32> {
        let index = match self.free.front() {
            Some((from, index)) if *from <= now => {
                let index = *index;
                self.free.pop_front();
                index
            }
            _ if (self.indices as usize) < INDICES => {
                self.indices += 1;
                self.configured + self.indices - 1
            }
            _ => return None,
        };
        let remote = LearnedRemote { segment, since: now, idle_since: now, contacted: false, keys: HashSet::new() };
        self.live.insert(index, remote);
        *self.by_segment.entry(segment).or_default() += 1;
        self.stats.learned += 1;
        Some(index)
    }

    /// Removes a remote and returns its forwarding entries, and whether a frame had to be sent to it.
    pub(super) fn remove(&mut self, index: u32, now: u32) -> Option<(HashSet<Key>, bool)> {
        let remote = self.live.remove(&index)?;
        if let Some(n) = self.by_segment.get_mut(&remote.segment) {
            *n -= 1;
        }
        self.free.push_back((now + REUSE_DELAY, index));
        Some((remote.keys, remote.contacted))
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

    #[test]
    fn provisional_and_silent_remotes_are_evicted_first() {
        let mut learned = LearnedRemotes::new(2);
        let all: Vec<u32> = (0..4).map(|second| learned.add(7, second).unwrap()).collect();
        assert_eq!(all, [2, 3, 4, 5]);
        assert!(learned.contact(2) && learned.contact(3) && !learned.contact(3));
        let answers = |index| index == 2;
        assert_eq!(learned.victim(7, answers), Some(4), "the oldest that never had to be contacted");
        learned.remove(4, 9);
        learned.remove(5, 9);
        assert_eq!(learned.victim(7, answers), Some(3), "it does not answer");
        learned.remove(3, 9);
        assert_eq!(learned.victim(7, answers), None);
        assert!(learned.is_live(0) && learned.is_live(2) && !learned.is_live(3));
    }

    #[test]
    fn indices_are_reused_after_a_delay() {
        let mut learned = LearnedRemotes::new(0);
        assert_eq!((learned.add(0, 0), learned.add(0, 0)), (Some(0), Some(1)));
        learned.remove(0, 5);
        assert_eq!(learned.add(0, 5 + REUSE_DELAY - 1), Some(2));
        assert_eq!(learned.add(0, 5 + REUSE_DELAY), Some(0));
    }

    #[test]
    fn one_segment_cannot_use_all_places() {
        let mut learned = LearnedRemotes::new(0);
        for _ in 0..PER_SEGMENT {
            assert!(!learned.is_full(1));
            learned.add(1, 0);
        }
        let first = learned.add(2, 0).unwrap();
        assert!(learned.is_full(1) && !learned.is_full(2));
        assert_ne!(learned.victim(1, |_| false), Some(first));
    }

    #[test]
    fn unused_remotes_expire() {
        let mut learned = LearnedRemotes::new(0);
        let (a, b) = (learned.add(0, 0).unwrap(), learned.add(0, 0).unwrap());
        let key = Key::new(0, [2, 0, 0, 0, 0, 1]);
        learned.add_key(a, key);
        learned.contact(a);
        assert_eq!(learned.unused(IDLE_TIME), [b]);
        learned.remove_key(a, key, 500);
        assert!(!learned.unused(500 + IDLE_TIME - 1).contains(&a));
        assert!(learned.unused(500 + IDLE_TIME).contains(&a));
    }
}
