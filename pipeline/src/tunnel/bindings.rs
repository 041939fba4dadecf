//! Bindings of IP addresses to Ethernet addresses of the hosts in segments, on the control thread.
//!
//! Bindings come from the configuration, from ARP and ND messages that pass, and from other sources such as a routing
//! protocol. Workers read a published copy ([`super::suppression`]). Publishing copies only the segments that changed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use wirepath_wire::MacAddr;

use crate::table::Key;

/// Maximum number of bindings of one segment that are learned from messages.
const PER_SEGMENT: usize = 4096;
/// Maximum number of learned bindings of one Ethernet address. A host has a few IPv6 addresses; a router that
/// answers for others must not fill the table.
const PER_MAC: u32 = 32;
/// Maximum number of learned bindings of all segments.
const LEARNED: usize = 65_536;

/// Source of a binding. A binding of a later kind replaces those of earlier kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BindingOrigin {
    /// An ARP or ND message.
    Learned,
    /// Another source than messages, such as a routing protocol.
    External,
    /// The configuration.
    Static,
}

impl BindingOrigin {
    /// Name in displays.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Learned => "learned",
            Self::External => "external",
            Self::Static => "static",
        }
    }
}

/// Ethernet address of the host with an IP address.
#[derive(Debug)]
pub(super) struct Binding {
    pub(super) mac: MacAddr,
    pub(super) origin: BindingOrigin,
    /// Router flag of its neighbour advertisements (RFC 4861 section 4.4), if it is known.
    pub(super) is_router: Option<bool>,
    /// Second of the last message that confirmed the binding.
    seen: AtomicU32,
}

impl Binding {
    /// Records a message that confirms the binding.
    pub(super) fn touch(&self, second: u32) {
        if self.seen.load(Ordering::Relaxed) != second {
            self.seen.store(second, Ordering::Relaxed);
        }
    }

    /// Second of the last message that confirmed the binding.
    pub(super) fn seen(&self) -> u32 {
        self.seen.load(Ordering::Relaxed)
    }
}

/// Bindings of one segment.
pub(super) type SegmentBindings = BTreeMap<IpAddr, Arc<Binding>>;
/// Bindings of all segments by index, as the workers read them.
pub(super) type PublishedBindings = BTreeMap<u16, Arc<SegmentBindings>>;

/// The sender of a message claims an IP address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) segment: u16,
    pub(super) ip: IpAddr,
    pub(super) mac: MacAddr,
    /// Router flag, if the message has one.
    pub(super) is_router: Option<bool>,
    /// True if the claim replaces a binding of another control plane, which follows the move.
    pub(super) overrides: bool,
}

/// Result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claimed {
    New,
    Known,
    /// Another Ethernet address had the IP address.
    Moved,
    /// A limit is reached, or a binding that is not learned says otherwise.
    Refused,
}

/// All bindings.
#[derive(Debug, Default)]
pub(super) struct Bindings {
    segments: PublishedBindings,
    /// Number of learned bindings of each Ethernet address.
    by_mac: HashMap<Key, u32>,
    learned: HashMap<u16, usize>,
    changed: bool,
    /// Segments whose changes are recorded.
    watched: HashSet<u16>,
    /// Addresses in watched segments whose bindings changed.
    changes: HashSet<(u16, IpAddr)>,
}

impl Bindings {
    /// Iterates over the bindings of all segments in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u16, IpAddr, &Binding)> {
        self.iter_after(None)
    }

    /// Iterates over the bindings of all segments in order, behind this one.
    pub(super) fn iter_after(&self, after: Option<(u16, IpAddr)>) -> impl Iterator<Item = (u16, IpAddr, &Binding)> {
        let first = after.map_or(0, |(segment, _)| segment);
        self.segments.range(first..).flat_map(move |(segment, all)| {
            let from = match after {
                Some((of, ip)) if of == *segment => Bound::Excluded(ip),
                _ => Bound::Unbounded,
            };
            all.range((from, Bound::Unbounded)).map(|(ip, binding)| (*segment, *ip, &**binding))
        })
    }

    /// Number of bindings of a segment.
    pub(super) fn len_of(&self, segment: u16) -> usize {
        self.segments.get(&segment).map_or(0, |all| all.len())
    }

    /// Returns the bindings for the workers if they changed since the last call.
    pub(super) fn take_changed(&mut self) -> Option<PublishedBindings> {
        std::mem::take(&mut self.changed).then(|| self.segments.clone())
    }

    /// Records the changes of these segments for [`Self::take_watched`], and no longer those of others. All bindings of
    /// a segment that was not watched before count as changed.
    pub(super) fn watch(&mut self, segments: HashSet<u16>) {
        self.changes.retain(|(segment, _)| segments.contains(segment));
        for segment in segments.difference(&self.watched) {
            let all = self.segments.get(segment).into_iter().flat_map(|all| all.keys());
            self.changes.extend(all.map(|ip| (*segment, *ip)));
        }
        self.watched = segments;
    }

    /// Returns at most `limit` addresses of watched segments whose bindings changed, in any order. A binding may be as
    /// it was.
    pub(super) fn take_watched(&mut self, limit: usize) -> Vec<(u16, IpAddr)> {
        if self.changes.len() <= limit {
            return self.changes.drain().collect();
        }
        let taken: Vec<(u16, IpAddr)> = self.changes.iter().take(limit).copied().collect();
        taken.iter().for_each(|key| _ = self.changes.remove(key));
        taken
    }

    /// Returns the binding of an address.
    pub(super) fn get(&self, segment: u16, ip: IpAddr) -> Option<&Arc<Binding>> {
        self.segments.get(&segment)?.get(&ip)
    }

    /// Processes a claim. Later claims replace earlier ones, so that an address can move to another host.
    pub(super) fn claim(&mut self, claim: Claim, now: u32) -> Claimed {
        let Claim { segment, ip, mac, is_router, overrides } = claim;
        let mut new_router = is_router;
        let is_learned = self.get(segment, ip).is_some_and(|known| known.origin == BindingOrigin::Learned);
        let outcome = match self.get(segment, ip) {
            Some(known) if overrides && known.origin == BindingOrigin::External => {
                if known.mac == mac {
                    new_router = is_router.or(known.is_router);
                }
                Claimed::Moved
            }
            Some(known) if known.mac == mac => {
                known.touch(now);
                if known.origin != BindingOrigin::Learned || is_router.is_none() || known.is_router == is_router {
                    return Claimed::Known;
                }
                new_router = is_router.or(known.is_router);
                Claimed::Known
            }
            Some(known) if known.origin != BindingOrigin::Learned => return Claimed::Refused,
            Some(_) => Claimed::Moved,
            None => Claimed::New,
        };
        let of_mac = self.by_mac.get(&Key::new(segment, mac)).copied().unwrap_or(0);
        let in_segment = self.learned.get(&segment).copied().unwrap_or(0);
        let is_full = match outcome {
            Claimed::Moved if is_learned => of_mac >= PER_MAC,
            Claimed::New | Claimed::Moved => of_mac >= PER_MAC || in_segment >= PER_SEGMENT || self.total() >= LEARNED,
            Claimed::Known | Claimed::Refused => false,
        };
        if is_full {
            return Claimed::Refused;
        }
        self.put(segment, ip, Binding { mac, origin: BindingOrigin::Learned, is_router: new_router, seen: now.into() });
        outcome
    }

    /// Number of learned bindings.
    fn total(&self) -> usize {
        self.learned.values().sum()
    }

    /// Sets a binding that is not learned. It replaces one of the same or of a lower origin.
    pub(super) fn set(&mut self, segment: u16, ip: IpAddr, mac: MacAddr, is_router: bool, origin: BindingOrigin) {
        if let Some(known) = self.get(segment, ip)
            && (known.origin > origin || (known.origin, known.mac, known.is_router) == (origin, mac, Some(is_router)))
        {
            return;
        }
        self.put(segment, ip, Binding { mac, origin, is_router: Some(is_router), seen: 0.into() });
    }

    /// Removes a binding of this origin.
    pub(super) fn remove(&mut self, segment: u16, ip: IpAddr, origin: BindingOrigin) {
        if self.get(segment, ip).is_some_and(|known| known.origin == origin) {
            self.take(segment, ip);
        }
    }

    /// Removes the bindings for which `select` returns true. Returns their number.
    pub(super) fn remove_all(&mut self, mut select: impl FnMut(u16, IpAddr, &Binding) -> bool) -> usize {
        let selected: Vec<(u16, IpAddr)> = self
            .iter()
            .filter(|(segment, ip, binding)| select(*segment, *ip, binding))
            .map(|(segment, ip, _)| (segment, ip))
            .collect();
        selected.iter().for_each(|(segment, ip)| self.take(*segment, *ip));
        selected.len()
    }

    /// Removes learned bindings that no message confirmed for the ageing time of their segment in seconds; 0: never.
    pub(super) fn age(&mut self, now: u32, ageing: impl Fn(u16) -> u32) {
        self.remove_all(|segment, _, binding| {
            let ageing = ageing(segment);
            // The workers may have recorded a second that this thread has not reached yet.
            binding.origin == BindingOrigin::Learned && ageing > 0 && now.saturating_sub(binding.seen()) >= ageing
        });
    }

    fn put(&mut self, segment: u16, ip: IpAddr, binding: Binding) {
        self.take(segment, ip);
        if binding.origin == BindingOrigin::Learned {
            *self.by_mac.entry(Key::new(segment, binding.mac)).or_default() += 1;
            *self.learned.entry(segment).or_default() += 1;
        }
        Arc::make_mut(self.segments.entry(segment).or_default()).insert(ip, Arc::new(binding));
        self.note_change(segment, ip);
    }

    fn note_change(&mut self, segment: u16, ip: IpAddr) {
        self.changed = true;
        if self.watched.contains(&segment) {
            self.changes.insert((segment, ip));
        }
    }

    fn take(&mut self, segment: u16, ip: IpAddr) {
        let Some(all) = self.segments.get_mut(&segment).filter(|all| all.contains_key(&ip)) else { return };
        let map = Arc::make_mut(all);
        let removed = map.remove(&ip);
        if map.is_empty() {
            self.segments.remove(&segment);
        }
        self.note_change(segment, ip);
        let Some(removed) = removed.filter(|removed| removed.origin == BindingOrigin::Learned) else { return };
        let key = Key::new(segment, removed.mac);
        if let Some(n) = self.by_mac.get_mut(&key) {
            *n -= 1;
            if *n == 0 {
                self.by_mac.remove(&key);
            }
        }
        if let Some(n) = self.learned.get_mut(&segment) {
            *n -= 1;
            if *n == 0 {
                self.learned.remove(&segment);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(n: u32) -> IpAddr {
        IpAddr::from((0x0a00_0000 | n).to_be_bytes())
    }

    fn mac(n: u32) -> MacAddr {
        MacAddr::from_u64(0x0200_0000_0000 | u64::from(n))
    }

    fn claim(segment: u16, address: u32, host: u32) -> Claim {
        Claim { segment, ip: ip(address), mac: mac(host), is_router: None, overrides: false }
    }

    #[test]
    fn claims_move_addresses_but_not_static_ones() {
        let mut bindings = Bindings::default();
        assert_eq!(bindings.claim(claim(1, 1, 1), 0), Claimed::New);
        assert_eq!(bindings.take_changed().map(|it| it.len()), Some(1));
        assert_eq!(bindings.claim(claim(1, 1, 1), 5), Claimed::Known);
        assert!(bindings.take_changed().is_none(), "a confirmation is not published");
        assert_eq!(bindings.claim(claim(1, 1, 2), 5), Claimed::Moved);
        assert_eq!(bindings.claim(claim(2, 1, 3), 5), Claimed::New, "another segment");
        bindings.set(1, ip(1), mac(9), false, BindingOrigin::External);
        assert_eq!(bindings.claim(claim(1, 1, 2), 6), Claimed::Refused);
        bindings.set(1, ip(1), mac(8), true, BindingOrigin::Static);
        bindings.set(1, ip(1), mac(9), false, BindingOrigin::External);
        bindings.remove(1, ip(1), BindingOrigin::External);
        let all: Vec<_> = bindings.iter().map(|(segment, _, it)| (segment, it.mac, it.origin)).collect();
        assert_eq!(all, [(1, mac(8), BindingOrigin::Static), (2, mac(3), BindingOrigin::Learned)]);
        bindings.age(304, |_| 300);
        assert_eq!(bindings.iter().count(), 2);
        bindings.age(305, |_| 300);
        bindings.remove(1, ip(1), BindingOrigin::Static);
        assert!(bindings.segments.is_empty() && bindings.by_mac.is_empty() && bindings.learned.is_empty());
    }

    #[test]
    fn local_hosts_take_addresses_from_another_control_plane() {
        let mut bindings = Bindings::default();
        let overriding = |address, host| Claim { overrides: true, ..claim(1, address, host) };
        bindings.set(1, ip(1), mac(9), true, BindingOrigin::External);
        bindings.set(1, ip(2), mac(9), false, BindingOrigin::Static);
        assert_eq!(bindings.claim(overriding(2, 1), 0), Claimed::Refused, "a static one stays");
        assert_eq!(bindings.claim(overriding(1, 9), 0), Claimed::Moved, "the same host at a local port");
        let known = bindings.get(1, ip(1)).unwrap();
        assert_eq!((known.origin, known.is_router), (BindingOrigin::Learned, Some(true)));
        bindings.set(1, ip(1), mac(9), false, BindingOrigin::External);
        assert_eq!(bindings.claim(overriding(1, 3), 0), Claimed::Moved);
        let known = bindings.get(1, ip(1)).unwrap();
        assert_eq!((known.mac, known.is_router), (mac(3), None));
        bindings.set(1, ip(3), mac(8), false, BindingOrigin::External);
        let of_host = (10..10 + PER_MAC - 1).filter(|n| bindings.claim(overriding(*n, 3), 0) == Claimed::New).count();
        assert_eq!(of_host, PER_MAC as usize - 1);
        assert_eq!(bindings.claim(overriding(3, 3), 0), Claimed::Refused, "the limit of a host holds");
    }

    #[test]
    fn changes_of_watched_segments_are_recorded_once() {
        let mut bindings = Bindings::default();
        let take = |bindings: &mut Bindings, limit| {
            let mut taken = bindings.take_watched(limit);
            taken.sort_unstable();
            taken
        };
        (1..4).for_each(|n| _ = bindings.claim(claim(1, n, n), 0));
        bindings.claim(claim(2, 1, 1), 0);
        assert_eq!(take(&mut bindings, 9), []);
        bindings.watch(HashSet::from([1]));
        let first = bindings.take_watched(2);
        let mut all = [first, bindings.take_watched(2)].concat();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3].map(|n| (1, ip(n))), "what was there before");
        bindings.watch(HashSet::from([1]));
        bindings.claim(claim(1, 1, 1), 5);
        assert_eq!(take(&mut bindings, 9), [], "a confirmation is no change");
        bindings.claim(claim(1, 1, 4), 5);
        bindings.claim(claim(1, 1, 5), 5);
        bindings.set(1, ip(2), mac(9), false, BindingOrigin::External);
        bindings.claim(claim(2, 1, 2), 5);
        assert_eq!(take(&mut bindings, 9), [(1, ip(1)), (1, ip(2))]);
        bindings.remove(1, ip(2), BindingOrigin::External);
        bindings.age(300, |_| 300);
        assert_eq!(take(&mut bindings, 9), [(1, ip(2)), (1, ip(3))]);
        bindings.claim(claim(1, 7, 7), 300);
        bindings.watch(HashSet::from([2]));
        assert_eq!(take(&mut bindings, 9), [(2, ip(1))], "no changes of a segment that is not watched any more");
    }

    #[test]
    fn the_router_flag_is_kept_when_a_message_has_none() {
        let mut bindings = Bindings::default();
        bindings.claim(claim(1, 1, 1), 0);
        bindings.claim(Claim { is_router: Some(true), ..claim(1, 1, 1) }, 0);
        bindings.claim(claim(1, 1, 1), 0);
        assert_eq!(bindings.iter().next().unwrap().2.is_router, Some(true));
        bindings.claim(claim(1, 1, 2), 0);
        assert_eq!(bindings.iter().next().unwrap().2.is_router, None, "another host");
        assert_eq!(bindings.by_mac.len(), 1);
    }

    #[test]
    fn hosts_and_segments_have_limits() {
        let mut bindings = Bindings::default();
        let new = |bindings: &mut Bindings, all: &mut dyn Iterator<Item = Claim>| {
            all.filter(|it| bindings.claim(*it, 0) == Claimed::New).count()
        };
        assert_eq!(new(&mut bindings, &mut (0..100).map(|n| claim(1, n, 1))), PER_MAC as usize);
        assert_eq!(new(&mut bindings, &mut (0..10_000).map(|n| claim(2, n, n))), PER_SEGMENT);
        assert_eq!(bindings.claim(claim(2, 5, 6), 0), Claimed::Moved, "a full segment still follows moves");
        let of_many = |n: u32| claim(3 + (n / 4000) as u16, n, n);
        let rest = LEARNED - PER_SEGMENT - PER_MAC as usize;
        assert_eq!(new(&mut bindings, &mut (0..100_000).map(of_many)), rest);
    }
}
