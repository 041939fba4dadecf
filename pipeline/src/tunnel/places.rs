//! Indices of segments, attachments and remotes in the tables of the workers.
//!
//! Forwarding entries, learned addresses and packets that wait refer to these indices. A part that a change of the
//! configuration leaves alone therefore keeps its index. A free index is used again only after all events of workers
//! about its previous owner have been processed.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use super::config::{GatewayConfig, MAX_REMOTES, MAX_SEGMENTS};
use super::learned::INDICES;

/// Seconds until a free index is used again.
pub(super) const REUSE_DELAY: u32 = 10;
/// Maximum number of attachments, including those whose index is free.
const MAX_ATTACHMENTS: usize = 1 << 22;

/// Indices of one kind.
#[derive(Clone, Debug)]
pub(super) struct Indices {
    /// Free indices in the order in which they became free, each with the second from which it may be used.
    free: VecDeque<(u32, u32)>,
    /// Number of indices in use or free.
    len: u32,
    limit: usize,
}

impl Indices {
    pub(super) fn new(limit: usize) -> Self {
        Self { free: VecDeque::new(), len: 0, limit }
    }

    /// Returns an index that nothing refers to; `None` if there are too many that wait for their delay.
    pub(super) fn take(&mut self, now: u32) -> Option<u32> {
        if let Some((_, index)) = self.free.pop_front_if(|(from, _)| *from <= now) {
            return Some(index);
        }
        ((self.len as usize) < self.limit).then(|| {
            self.len += 1;
            self.len - 1
        })
    }

    /// Gives an index back.
    pub(super) fn release(&mut self, index: u32, now: u32) {
        self.free.push_back((now + REUSE_DELAY, index));
    }
}

/// Indices of a segment and its parts, in the order of the configuration.
#[derive(Clone, Debug)]
pub(super) struct SegmentPlace {
    pub(super) index: u16,
    pub(super) attachments: Vec<u32>,
    pub(super) remotes: Vec<u32>,
}

/// Indices of all parts of a configuration.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// The segments in the order of the configuration.
    pub(super) segments: Vec<SegmentPlace>,
    /// Position in the configuration of each segment index.
    positions: HashMap<u16, usize>,
    segment_indices: Indices,
    attachment_indices: Indices,
    /// Indices of configured and learned remotes.
    pub(super) remote_indices: Indices,
}

impl Places {
    /// Creates the indices of a configuration without segments.
    pub(super) fn new() -> Self {
        Self {
            segments: Vec::new(),
            positions: HashMap::new(),
            segment_indices: Indices::new(2 * MAX_SEGMENTS),
            attachment_indices: Indices::new(MAX_ATTACHMENTS),
            remote_indices: Indices::new(2 * MAX_REMOTES + INDICES),
        }
    }

    /// Iterates over the indices of all configured remotes.
    pub(super) fn remotes(&self) -> impl Iterator<Item = u32> {
        self.segments.iter().flat_map(|place| place.remotes.iter().copied())
    }

    /// Returns the position in the configuration of the segment with this index.
    pub(super) fn position(&self, index: u16) -> Option<usize> {
        self.positions.get(&index).copied()
    }

    /// Returns the indices after a change of the configuration. `learned` finds a learned remote by the index of its
    /// segment and its address; it keeps its index if it is configured now.
    ///
    /// # Errors
    /// If too many indices wait for [`REUSE_DELAY`].
    pub(super) fn after(
        &self,
        old: &GatewayConfig,
        new: &GatewayConfig,
        learned: impl Fn(u16, IpAddr) -> Option<u32>,
        now: u32,
    ) -> Result<Self, String> {
        let mut next =
            Self { segments: Vec::with_capacity(new.segments.len()), positions: HashMap::new(), ..self.clone() };
        let mut before: HashMap<_, usize> =
            old.segments.iter().enumerate().map(|(position, segment)| (segment.identity(), position)).collect();
        let full = || format!("too many parts were removed in the last {REUSE_DELAY} seconds; try again later");
        for segment in &new.segments {
            let position = before.remove(&segment.identity());
            let known = position.and_then(|position| Some((old.segments.get(position)?, self.segments.get(position)?)));
            let index = match known {
                Some((_, place)) => place.index,
                None => next.segment_indices.take(now).and_then(|index| u16::try_from(index).ok()).ok_or_else(full)?,
            };
            let (mut attachments, mut remotes) = (HashMap::new(), HashMap::new());
            if let Some((old, place)) = known {
                attachments.extend(old.attachments.iter().map(|it| (it.port, it.vlan)).zip(&place.attachments));
                remotes.extend(old.remotes.iter().map(|it| it.address).zip(&place.remotes));
            }
            let mut place = SegmentPlace { index, attachments: Vec::new(), remotes: Vec::new() };
            for attachment in &segment.attachments {
                let known = attachments.remove(&(attachment.port, attachment.vlan)).copied();
                place.attachments.push(match known {
                    Some(known) => known,
                    None => next.attachment_indices.take(now).ok_or_else(full)?,
                });
            }
            for remote in &segment.remotes {
                let known = remotes.remove(&remote.address).copied();
                place.remotes.push(match known.or_else(|| learned(index, remote.address)) {
                    Some(known) => known,
                    None => next.remote_indices.take(now).ok_or_else(full)?,
                });
            }
            attachments.into_values().for_each(|index| next.attachment_indices.release(*index, now));
            remotes.into_values().for_each(|index| next.remote_indices.release(*index, now));
            next.positions.insert(index, next.segments.len());
            next.segments.push(place);
        }
        for place in before.into_values().filter_map(|position| self.segments.get(position)) {
            next.segment_indices.release(place.index.into(), now);
            place.attachments.iter().for_each(|index| next.attachment_indices.release(*index, now));
            place.remotes.iter().for_each(|index| next.remote_indices.release(*index, now));
        }
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_used_again_after_a_delay() {
        let mut indices = Indices::new(3);
        assert_eq!((indices.take(0), indices.take(0)), (Some(0), Some(1)));
        indices.release(0, 5);
        assert_eq!(indices.take(5 + REUSE_DELAY - 1), Some(2));
        assert_eq!(indices.take(5 + REUSE_DELAY - 1), None, "the limit");
        assert_eq!(indices.take(5 + REUSE_DELAY), Some(0));
    }
}
