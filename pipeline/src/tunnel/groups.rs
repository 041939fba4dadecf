//! Groups of remotes, which share the flows to the addresses behind them.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::places::Indices;
use super::tables::{Destination, put};
use crate::route::{GroupMember, NO_ROUTE, NextHopGroup};

/// Most groups of all segments. A group that several segments use counts in each one.
const MAX_GROUPS: usize = 1 << 16;
/// Most buckets of a group.
const MAX_BUCKETS: usize = 1 << 12;

/// Members of a group with the weights of their shares. Each VTEP is there once.
pub type ExternalGroup = Vec<(IpAddr, u16)>;

/// The groups as workers read them. Their next hops are indices of remotes.
#[derive(Clone, Debug, Default)]
pub(super) struct RemoteGroups {
    shares: Vec<Arc<NextHopGroup>>,
}

impl RemoteGroups {
    /// Returns the member of a group for a flow. Other destinations, and groups without members, stay as they are.
    #[inline(always)]
    pub(super) fn choose(&self, destination: Destination, entropy: u32) -> Destination {
        let Destination::Group(index) = destination else { return destination };
        // The source port depends on the upper bits. Members would else get ports of a part of the range only, and
        // routers on the way could not spread their packets.
        let member = self.shares.get(index as usize).map_or(NO_ROUTE, |share| share.select(entropy.rotate_left(16)));
        if member == NO_ROUTE { destination } else { Destination::Remote(member) }
    }

    /// Does the same for a packed destination.
    #[inline(always)]
    pub(super) fn choose_packed(&self, destination: u32, entropy: u32) -> u32 {
        if Destination::is_packed_group(destination) {
            self.choose(Destination::unpack(destination), entropy).pack()
        } else {
            destination
        }
    }

    /// Returns the members of the group with this index.
    pub(super) fn members(&self, index: u32) -> &[GroupMember] {
        self.shares.get(index as usize).map_or(&[], |share| share.members())
    }
}

/// A VTEP as a remote of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Index of the remote.
    pub(super) index: u32,
    /// True if BFD keeps it out.
    pub(super) is_lost: bool,
}

/// The groups of all segments, as another control plane has them and as the workers have them.
#[derive(Debug)]
pub(super) struct Groups {
    /// Members by number.
    members: HashMap<u32, ExternalGroup>,
    /// Index of each group in use, by VNI and number.
    indices: HashMap<(u32, u32), u32>,
    numbers: Indices,
    published: RemoteGroups,
    /// Groups by VNI and number that may differ from what the workers have.
    changed: HashSet<(u32, u32)>,
    /// Groups that found no index, and the second in which they were last tried.
    refused: HashSet<(u32, u32)>,
    tried_at: u32,
}

/// Result of [`Groups::update`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Updated {
    /// True if the workers need the new groups.
    pub(super) shares: bool,
    /// VNIs with addresses that could not be placed before.
    pub(super) found_room: HashSet<u32>,
}

impl Default for Groups {
    fn default() -> Self {
        Self {
            members: HashMap::new(),
            indices: HashMap::new(),
            numbers: Indices::new(MAX_GROUPS),
            published: RemoteGroups::default(),
            changed: HashSet::new(),
            refused: HashSet::new(),
            tried_at: 0,
        }
    }
}

impl Groups {
    /// Returns the members of a group.
    pub(super) fn members(&self, id: u32) -> &[(IpAddr, u16)] {
        self.members.get(&id).map_or(&[], Vec::as_slice)
    }

    /// Sets the members of a group, and returns the former ones.
    pub(super) fn set_members(&mut self, id: u32, members: ExternalGroup) -> ExternalGroup {
        match members.is_empty() {
            true => self.members.remove(&id),
            false => self.members.insert(id, members),
        }
        .unwrap_or_default()
    }

    /// Takes note that a group has other members, or is used in a segment, or no more.
    pub(super) fn mark(&mut self, vni: u32, id: u32) {
        self.changed.insert((vni, id));
    }

    /// Takes note that other VTEPs may be remotes that take frames.
    pub(super) fn mark_all(&mut self) {
        self.changed.extend(self.indices.keys());
    }

    /// Returns the index of a group in a segment.
    pub(super) fn index(&self, vni: u32, id: u32) -> Option<u32> {
        self.indices.get(&(vni, id)).copied()
    }

    /// Returns the groups for the workers.
    pub(super) fn published(&self) -> &RemoteGroups {
        &self.published
    }

    /// Brings the groups up to date. `is_used` tells whether a segment has addresses behind a group. `is_pending` tells
    /// whether the remotes of a segment change soon. `remote` returns the remote of a VTEP in a segment.
    pub(super) fn update(
        &mut self,
        now: u32,
        is_used: impl Fn(u32, u32) -> bool,
        is_pending: impl Fn(u32) -> bool,
        remote: impl Fn(u32, IpAddr) -> Option<Candidate>,
    ) -> Updated {
        let mut updated = Updated::default();
        if !self.refused.is_empty() && self.tried_at != now {
            self.tried_at = now;
            self.changed.extend(&self.refused);
        }
        for key in std::mem::take(&mut self.changed) {
            let (vni, id) = key;
            if !is_used(vni, id) {
                self.refused.remove(&key);
                // Forwarding entries may still have the index, so the members stay until it is used again.
                if let Some(index) = self.indices.remove(&key) {
                    self.numbers.release(index, now);
                }
                continue;
            }
            let index = match self.index(vni, id) {
                Some(index) => index,
                None => {
                    let Some(index) = self.numbers.take(now) else {
                        self.refused.insert(key);
                        continue;
                    };
                    put(&mut self.published.shares, index as usize, Arc::new(NextHopGroup::new(1, &[])));
                    self.indices.insert(key, index);
                    updated.shares = true;
                    if self.refused.remove(&key) {
                        updated.found_room.insert(vni);
                    }
                    index
                }
            };
            let remotes: Vec<(Candidate, u16)> =
                self.members(id).iter().filter_map(|(vtep, weight)| Some((remote(vni, *vtep)?, *weight))).collect();
            if remotes.is_empty() && !self.members(id).is_empty() && is_pending(vni) {
                // The VTEPs become remotes later. Those of before carry the flows until then.
                continue;
            }
            let members: Vec<GroupMember> = (remotes.into_iter())
                .filter(|(it, _)| !it.is_lost)
                .map(|(it, weight)| GroupMember { next_hop: it.index, weight })
                .collect();
            if let Some(share) = self.published.shares.get_mut(index as usize)
                && share.members() != members
            {
                let next = Arc::make_mut(share);
                next.refine(NextHopGroup::buckets_for(&members).min(MAX_BUCKETS));
                next.set_members(&members);
                updated.shares = true;
            }
        }
        updated
    }

    /// Number of groups that found no index.
    pub(super) fn refused(&self) -> usize {
        self.refused.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::places::REUSE_DELAY;
    use super::*;

    fn vtep(n: u8) -> IpAddr {
        [10, 9, 0, n].into()
    }

    fn remote(vni: u32, vtep: IpAddr) -> Option<Candidate> {
        let IpAddr::V4(vtep) = vtep else { return None };
        Some(Candidate { index: vni * 100 + u32::from(vtep.octets()[3]), is_lost: false })
    }

    fn with(groups: &[(u32, &[(u8, u16)])]) -> Groups {
        let mut all = Groups::default();
        for (id, members) in groups {
            all.set_members(*id, members.iter().map(|(n, weight)| (vtep(*n), *weight)).collect());
        }
        all
    }

    #[test]
    fn an_index_is_used_again_after_a_delay() {
        let mut groups = with(&[(10, &[(2, 1), (3, 3)]), (11, &[(2, 1)])]);
        let update = |groups: &mut Groups, now, key: (u32, u32), used| {
            groups.mark(key.0, key.1);
            groups.update(now, |_, _| used, |_| false, remote).shares
        };
        assert!(update(&mut groups, 0, (1, 10), true));
        assert!(!update(&mut groups, 0, (1, 10), true), "nothing changed");
        let share = Arc::clone(&groups.published.shares[0]);
        assert_eq!((share.buckets_of(102) * 3, share.buckets_of(104)), (share.buckets_of(103), 0));
        // Forwarding entries may refer to a group for a moment after its last address has gone.
        assert!(!update(&mut groups, 0, (1, 10), false));
        assert_eq!((groups.index(1, 10), groups.published.members(0).len()), (None, 2));
        assert!(update(&mut groups, REUSE_DELAY - 1, (2, 11), true));
        assert_eq!((groups.index(2, 11), groups.published.shares[1].select(7)), (Some(1), 202));
        assert!(update(&mut groups, REUSE_DELAY, (1, 11), true));
        assert_eq!((groups.index(1, 11), groups.published.shares[0].buckets().len()), (Some(0), 64));
        assert_eq!(groups.published.shares[0].select(7), 102);
    }

    #[test]
    fn members_that_are_no_remotes_yet_leave_the_former_ones() {
        let mut groups = with(&[(10, &[(2, 1), (3, 1)])]);
        groups.mark(1, 10);
        groups.update(0, |_, _| true, |_| true, remote);
        groups.set_members(10, vec![(vtep(4), 1)]);
        groups.mark(1, 10);
        assert_eq!(groups.update(0, |_, _| true, |_| true, |_, _| None), Updated::default());
        assert_eq!(groups.published.members(0).len(), 2);
        groups.mark_all();
        assert!(groups.update(0, |_, _| true, |_| true, remote).shares);
        assert_eq!(groups.published.members(0), [GroupMember { next_hop: 104, weight: 1 }]);
        // A remote that is down carries nothing, also if it is the only one.
        let lost = |vni, vtep| Some(Candidate { is_lost: true, ..remote(vni, vtep)? });
        groups.mark_all();
        assert!(groups.update(0, |_, _| true, |_| true, lost).shares);
        assert_eq!(groups.published.choose(Destination::Group(0), 7), Destination::Group(0));
        // VTEPs that will be no remotes leave none: the indices of before may soon belong to others.
        groups.mark_all();
        groups.update(0, |_, _| true, |_| true, remote);
        groups.mark_all();
        assert!(groups.update(0, |_, _| true, |_| false, |_, _| None).shares);
        assert_eq!(groups.published.members(0), []);
    }

    #[test]
    fn groups_without_an_index_get_one_later() {
        let mut groups = with(&[(10, &[(2, 1)])]);
        groups.numbers = Indices::new(2);
        (1..=3).for_each(|vni| groups.mark(vni, 10));
        groups.update(0, |_, _| true, |_| false, remote);
        let refused = (1..=3).find(|vni| groups.index(*vni, 10).is_none()).unwrap();
        assert_eq!((groups.refused(), groups.indices.len()), (1, 2));
        let other = refused % 3 + 1;
        groups.mark(other, 10);
        let is_used = |vni, _| vni != other;
        assert_eq!(groups.update(1, is_used, |_| false, remote), Updated::default());
        let updated = groups.update(1 + REUSE_DELAY, is_used, |_| false, remote);
        assert_eq!(updated, Updated { shares: true, found_room: HashSet::from([refused]) });
        assert_eq!((groups.refused(), groups.index(refused, 10).is_some()), (0, true));
    }

    #[test]
    fn heavy_weights_take_bounded_memory() {
        let mut groups = with(&[(10, &[(2, u16::MAX), (3, u16::MAX)])]);
        groups.mark(1, 10);
        groups.update(0, |_, _| true, |_| false, remote);
        let share = &groups.published.shares[0];
        assert_eq!((share.buckets().len() <= MAX_BUCKETS, share.buckets_of(102)), (true, share.buckets_of(103)));
    }
}
