use super::NO_ROUTE;

/// A next hop of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// Value that [`NextHopGroup::select`] returns.
    pub next_hop: u32,
    /// Part of the traffic, relative to the weights of the other members. 0 takes none.
    pub weight: u16,
}

/// A next-hop group: several next hops that share the traffic of a route by weight (ECMP, RFC 2992).
///
/// A table of buckets maps the hash of a flow to a member. The group is *resilient*, as in Linux (ip-nexthop(8)): a
/// member that leaves gives its buckets to the others, and all other buckets keep their member. A member that joins
/// takes only as many buckets as its share needs. Other flows keep their next hop.
///
/// A group is a plain value. The control thread changes a clone and replaces the group that the workers read
/// ([`crate::epoch::Shared::replace`]).
///
/// ```
/// use wirepath_pipeline::route::{GroupMember, NextHopGroup};
///
/// let member = |next_hop, weight| GroupMember { next_hop, weight };
/// let mut group = NextHopGroup::new(256, &[member(7, 1), member(8, 3)]);
/// assert_eq!((group.buckets_of(7), group.buckets_of(8)), (64, 192));
/// group.set_members(&[member(8, 3)]);
/// assert_eq!(group.select(0x1234_5678), 8);
/// ```
#[derive(Clone, Debug)]
pub struct NextHopGroup {
    /// Next hop of each bucket; [`NO_ROUTE`] if the group has no member with a weight.
    buckets: Box<[u32]>,
    members: Vec<GroupMember>,
}

/// A member while the buckets are distributed.
struct Share {
    member: GroupMember,
    buckets: usize,
    /// The member's part of the traffic is smaller than before.
    shrinks: bool,
}

impl Share {
    /// Returns by how much the member's share exceeds its buckets, in parts of a bucket: positive if it lacks buckets.
    fn deficit(&self, buckets: usize, total: u64) -> i64 {
        self.member.weight as i64 * buckets as i64 - self.buckets as i64 * total as i64
    }
}

/// Sum of the weights.
fn total(members: &[GroupMember]) -> u64 {
    members.iter().map(|member| u64::from(member.weight)).sum()
}

impl NextHopGroup {
    /// Most buckets of a group.
    pub const MAX_BUCKETS: usize = 1 << 16;

    /// Returns the number of buckets for these members: at least 64 for each one, and 4 for each unit of their weights.
    pub fn buckets_for(members: &[GroupMember]) -> usize {
        let weights: usize = members.iter().map(|member| usize::from(member.weight)).sum();
        (64 * members.len()).max(4 * weights)
    }

    /// Creates a group of 1 to [`Self::MAX_BUCKETS`] buckets; other numbers are brought into this range. With 64
    /// buckets for each member of equal weight, the parts are exact to 1.6 %.
    ///
    /// The first one of several members with the same next hop counts.
    pub fn new(buckets: usize, members: &[GroupMember]) -> Self {
        let buckets = vec![NO_ROUTE; buckets.clamp(1, Self::MAX_BUCKETS)].into();
        let mut group = Self { buckets, members: vec![] };
        group.set_members(members);
        group
    }

    /// Returns the next hop for the hash of a flow; [`NO_ROUTE`] if no member has a weight. The upper bits of the hash
    /// choose the bucket.
    #[inline(always)]
    pub fn select(&self, hash: u32) -> u32 {
        let bucket = ((u64::from(hash) * self.buckets.len() as u64) >> 32) as usize;
        self.buckets[bucket]
    }

    /// Members, with their weights.
    pub fn members(&self) -> &[GroupMember] {
        &self.members
    }

    /// Next hop of each bucket.
    pub fn buckets(&self) -> &[u32] {
        &self.buckets
    }

    /// Number of buckets of a next hop.
    pub fn buckets_of(&self, next_hop: u32) -> usize {
        self.buckets.iter().filter(|bucket| **bucket == next_hop).count()
    }

    /// Multiplies the number of buckets until there are at least `buckets`, or until [`Self::MAX_BUCKETS`] allows no
    /// more. Each bucket becomes several ones with its next hop, so no flow moves.
    pub fn refine(&mut self, buckets: usize) {
        let count = self.buckets.len();
        let factor = buckets.div_ceil(count).min(Self::MAX_BUCKETS / count);
        if factor > 1 {
            self.buckets = self.buckets.iter().flat_map(|next_hop| std::iter::repeat_n(*next_hop, factor)).collect();
        }
    }

    /// Sets the members and moves as few buckets as their shares demand. Returns the number of buckets that moved.
    ///
    /// A bucket leaves a member only if the member is not in the group any more, or if its part of the traffic became
    /// smaller.
    pub fn set_members(&mut self, members: &[GroupMember]) -> usize {
        let mut next: Vec<GroupMember> = vec![];
        for member in members {
            if next.iter().all(|known| known.next_hop != member.next_hop) && member.next_hop != NO_ROUTE {
                next.push(*member);
            }
        }
        let (count, before, after) = (self.buckets.len(), total(&self.members), total(&next));
        let mut shares: Vec<Share> = next
            .iter()
            .map(|member| {
                let old = self.members.iter().find(|old| old.next_hop == member.next_hop);
                let old = old.map_or(0, |old| u64::from(old.weight));
                let shrinks = u64::from(member.weight) * before < old * after;
                Share { member: *member, buckets: self.buckets_of(member.next_hop), shrinks }
            })
            .collect();
        self.members = next;
        let mut moved = 0;
        if after == 0 {
            moved = self.buckets.iter().filter(|bucket| **bucket != NO_ROUTE).count();
            self.buckets.fill(NO_ROUTE);
            return moved;
        }
        // The buckets of members that left, and those of a member beyond its share, rounded up.
        let mut free: Vec<usize> = vec![];
        for (i, bucket) in self.buckets.iter().enumerate() {
            match shares.iter_mut().find(|share| share.member.next_hop == *bucket) {
                Some(share) if share.shrinks && share.deficit(count, after) <= -(after as i64) => {
                    share.buckets -= 1;
                    free.push(i);
                }
                Some(_) => {}
                None => free.push(i),
            }
        }
        loop {
            // The member that lacks most, in fractions of a bucket. There is one: the shares make up all buckets.
            let Some((least, _)) = (0..).zip(&shares).max_by_key(|(_, share)| share.deficit(count, after)) else {
                return moved;
            };
            let bucket = match free.pop() {
                Some(bucket) => bucket,
                None if shares[least].deficit(count, after) >= after as i64 => {
                    // A whole bucket is missing. The member with most of a bucket too many gives one.
                    let giver = (0..)
                        .zip(&shares)
                        .filter(|(_, share)| share.shrinks && share.deficit(count, after) < 0)
                        .min_by_key(|(_, share)| share.deficit(count, after));
                    let Some((giver, _)) = giver else { return moved };
                    let next_hop = shares[giver].member.next_hop;
                    let Some(bucket) = self.buckets.iter().rposition(|bucket| *bucket == next_hop) else {
                        return moved;
                    };
                    shares[giver].buckets -= 1;
                    bucket
                }
                None => return moved,
            };
            self.buckets[bucket] = shares[least].member.next_hop;
            shares[least].buckets += 1;
            moved += 1;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use fastrand::Rng;

    fn member(next_hop: u32, weight: u16) -> GroupMember {
        GroupMember { next_hop, weight }
    }

    /// Panics unless each member has the buckets of its weight, but for the rounding.
    fn check_shares(group: &NextHopGroup, slack: f64) {
        let (count, total) = (group.buckets().len() as f64, total(group.members()) as f64);
        for member in group.members() {
            let share = count * f64::from(member.weight) / total;
            let found = group.buckets_of(member.next_hop) as f64;
            assert!((found - share).abs() < slack, "{member:?}: {found} buckets, share {share}");
        }
    }

    #[test]
    fn hashes_follow_the_weights() {
        let group = NextHopGroup::new(1024, &[member(1, 1), member(2, 2), member(3, 5), member(4, 0)]);
        let mut random = Rng::with_seed(1);
        let mut counts = [0; 5];
        const FLOWS: u32 = 1_000_000;
        for _ in 0..FLOWS {
            counts[group.select(random.u32(..)) as usize] += 1;
        }
        assert_eq!(counts[4], 0);
        for (next_hop, weight) in [(1, 1.0), (2, 2.0), (3, 5.0)] {
            let ratio = f64::from(counts[next_hop]) / (f64::from(FLOWS) * weight / 8.0);
            assert!((0.99..1.01).contains(&ratio), "{next_hop}: {ratio}");
        }
    }

    #[test]
    fn only_buckets_of_a_changed_member_move() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = Rng::with_seed(seed);
        for _ in 0..200 {
            let all: Vec<GroupMember> = (0..random.u32(2..20)).map(|i| member(i, random.u16(1..30))).collect();
            let mut group = NextHopGroup::new(64 * all.len() + random.usize(..64), &all);
            check_shares(&group, 1.0);
            for _ in 0..10 {
                let gone = random.usize(..all.len());
                let rest: Vec<GroupMember> = all.iter().copied().filter(|it| it.next_hop != gone as u32).collect();
                let before = group.clone();
                let moved = group.set_members(&rest);
                assert_eq!(moved, before.buckets_of(gone as u32));
                for (old, new) in before.buckets().iter().zip(group.buckets()) {
                    assert!(*old == gone as u32 || old == new, "a bucket of another member moved");
                }
                check_shares(&group, 2.0);
                let before = group.clone();
                let moved = group.set_members(&all);
                assert_eq!(moved, group.buckets_of(gone as u32), "only the member that returns gets buckets");
                for (old, new) in before.buckets().iter().zip(group.buckets()) {
                    assert!(*new == gone as u32 || old == new, "a bucket moved between other members");
                }
                check_shares(&group, 2.0);
            }
        }
    }

    #[test]
    fn a_change_of_weights_moves_only_what_it_must() {
        let mut group = NextHopGroup::new(1000, &[member(1, 1), member(2, 1), member(3, 1), member(4, 1)]);
        assert_eq!(group.set_members(&[member(1, 2), member(2, 1), member(3, 1), member(4, 1)]), 150);
        check_shares(&group, 1.0);
        assert_eq!(group.set_members(&[member(1, 2), member(2, 1), member(3, 1), member(4, 1)]), 0);
        assert_eq!(group.set_members(&[member(4, 20), member(3, 10), member(2, 10), member(1, 20)]), 133);
        check_shares(&group, 1.0);
    }

    #[test]
    fn more_buckets_move_no_flow() {
        let mut random = Rng::with_seed(2);
        for (count, wanted, found) in
            [(1, 5, 5), (96, 97, 192), (96, 1000, 1056), (64, 64, 64), (40_000, 80_000, 40_000)]
        {
            let mut group = NextHopGroup::new(count, &[member(1, 1), member(2, 3)]);
            let before = group.clone();
            group.refine(wanted);
            assert_eq!(group.buckets().len(), found);
            for hash in (0..10_000).map(|_| random.u32(..)).chain([0, u32::MAX]) {
                assert_eq!(group.select(hash), before.select(hash), "{hash:#x}");
            }
        }
    }

    #[test]
    fn groups_without_members_have_no_route() {
        let mut group = NextHopGroup::new(0, &[]);
        assert_eq!((group.select(u32::MAX), group.buckets().len()), (NO_ROUTE, 1));
        assert_eq!(group.set_members(&[member(5, 1), member(5, 9), member(NO_ROUTE, 1)]), 1);
        assert_eq!((group.select(0), group.members()), (5, &[member(5, 1)][..]));
        assert_eq!(group.set_members(&[member(5, 0)]), 1);
        assert_eq!(group.select(0), NO_ROUTE);
        assert_eq!(NextHopGroup::new(usize::MAX, &[]).buckets().len(), NextHopGroup::MAX_BUCKETS);
    }
}
