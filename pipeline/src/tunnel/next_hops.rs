//! Next hops of a network: which Ethernet address each has, which remotes it serves, and the frames that wait for it.
//!
//! The gateway is a host of that network, with addresses of its own. [`NextHops`] combines this host, the neighbour
//! table, and the lists of next hops to ask. It sends nothing: the caller carries out [`NextHops::take_actions`].
//!
//! If the addresses are the kernel's, so are routes and neighbours. Each destination is then an entry of the neighbour
//! table, and its Ethernet address that of the kernel's next hop ([`KernelNextHop`]). The kernel sends all ARP and ND
//! messages.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};

use wirepath_packet::Packet;
use wirepath_wire::MacAddr;

use super::neighbour::{Millis, NeighbourAction, NeighbourState, Neighbours, Timing};
use super::underlay::{Addresses, HostOutcome, Prefix, UnderlayHost};

/// Maximum number of neighbours for which resolution starts in one tick, so that a long list does not overrun
/// the queue to the workers.
const RESOLVES_PER_TICK: usize = 128;
/// Milliseconds between two announcements of an address, and their number (RFC 5227 section 1.1).
const ANNOUNCEMENTS: (Millis, u32) = (2_000, 2);
/// Milliseconds between two ticks of the neighbour table.
const NEIGHBOUR_TICK: Millis = 100;

/// A frame that waits for the next hop of its remote, and the index of the remote.
pub(super) type QueuedFrame = (Packet, u32);

/// The next hop to a destination, from the kernel's routes and neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelNextHop {
    /// IP address of the next hop.
    pub via: IpAddr,
    /// State of the kernel's neighbour entry.
    pub state: NeighbourState,
    /// Ethernet address, if it is known.
    pub mac: Option<MacAddr>,
}

/// State of next hops that come from the kernel.
#[derive(Debug, Default)]
struct KernelSource {
    /// Destinations whose next hop is needed (true), or is not any more.
    requests: HashMap<IpAddr, bool>,
    /// Next hop of each destination that has one.
    via: HashMap<IpAddr, IpAddr>,
}

/// The next hops of one network.
#[derive(Debug)]
pub(super) struct NextHops {
    host: UnderlayHost,
    neighbours: Neighbours<QueuedFrame>,
    /// Indices of the remotes that each next hop serves. A learned remote is one of them once a frame has to be
    /// sent to it.
    users: HashMap<IpAddr, Vec<u32>>,
    /// `None` if the gateway resolves the next hops itself.
    kernel: Option<KernelSource>,
    /// Next hops whose resolution has not started.
    unresolved: VecDeque<IpAddr>,
    /// Next hops to solicit again, because the link was lost.
    unconfirmed: VecDeque<IpAddr>,
    actions: Vec<NeighbourAction<QueuedFrame>>,
    ticks_at: Millis,
    announce_at: Millis,
    announcements_left: u32,
}

impl NextHops {
    /// Creates the next hops of a network in which the gateway has these addresses. `from_kernel` is true if the kernel
    /// has them too, and resolves the next hops.
    pub(super) fn new(addresses: Addresses, from_kernel: bool) -> Self {
        Self {
            kernel: from_kernel.then(KernelSource::default),
            host: UnderlayHost::new(addresses),
            neighbours: Neighbours::new(Timing::default()),
            users: HashMap::new(),
            unresolved: VecDeque::new(),
            unconfirmed: VecDeque::new(),
            actions: Vec::new(),
            ticks_at: 0,
            announce_at: 0,
            announcements_left: ANNOUNCEMENTS.1,
        }
    }

    /// Returns the gateway's addresses.
    pub(super) fn addresses(&self) -> &Addresses {
        self.host.addresses()
    }

    /// Changes the gateway's addresses and its routes, and announces the addresses.
    pub(super) fn set_addresses(&mut self, addresses: Vec<Prefix>, gateways: Vec<IpAddr>) {
        self.host.set_addresses(addresses, gateways);
        self.announce();
    }

    /// Changes the gateway's SIDs.
    pub(super) fn set_sids(&mut self, sids: impl Iterator<Item = Ipv6Addr>) {
        self.host.set_sids(sids);
    }

    /// Changes the gateway's Ethernet address, and announces it.
    pub(super) fn set_mac(&mut self, mac: MacAddr) {
        self.host.set_mac(mac);
        self.announce();
    }

    /// Starts to announce the gateway's addresses.
    fn announce(&mut self) {
        (self.announcements_left, self.announce_at) = (ANNOUNCEMENTS.1, 0);
    }

    /// Returns the next hop to `to`; `None` if there is no route. If the next hops are the kernel's, it is `to`, whose
    /// entry has the Ethernet address of the next hop.
    pub(super) fn next_hop(&self, to: IpAddr) -> Option<IpAddr> {
        if self.kernel.is_some() {
            return Some(to);
        }
        self.host.addresses().next_hop(to)
    }

    /// Returns all neighbours: address, state and Ethernet address.
    pub(super) fn list(&self) -> Vec<(IpAddr, NeighbourState, Option<MacAddr>)> {
        let Some(kernel) = &self.kernel else { return self.neighbours.iter().collect() };
        let via = |(to, state, mac)| Some((*kernel.via.get(&to)?, (state, mac)));
        let by_address: BTreeMap<_, _> = self.neighbours.iter().filter_map(via).collect();
        by_address.into_iter().map(|(ip, (state, mac))| (ip, state, mac)).collect()
    }

    /// Returns the IP address to which packets go that have the next hop `next_hop`.
    pub(super) fn via(&self, next_hop: IpAddr) -> Option<IpAddr> {
        self.kernel.as_ref().map_or(Some(next_hop), |kernel| kernel.via.get(&next_hop).copied())
    }

    /// Returns whether the next hops are the kernel's.
    pub(super) fn are_kernels(&self) -> bool {
        self.kernel.is_some()
    }

    /// Removes and returns at most `limit` destinations whose next hop is needed (true), or is not any more.
    pub(super) fn take_requests(&mut self, limit: usize) -> Vec<(IpAddr, bool)> {
        let Some(kernel) = &mut self.kernel else { return Vec::new() };
        if kernel.requests.len() <= limit {
            return std::mem::take(&mut kernel.requests).into_iter().collect();
        }
        let taken: Vec<IpAddr> = kernel.requests.keys().take(limit).copied().collect();
        taken.into_iter().filter_map(|to| kernel.requests.remove_entry(&to)).collect()
    }

    /// Takes the kernel's next hop to a destination; `None`: it has none.
    pub(super) fn set_kernel(&mut self, to: IpAddr, next_hop: Option<KernelNextHop>) {
        let Some(kernel) = &mut self.kernel else { return };
        // The destination may be forgotten meanwhile.
        if self.neighbours.state(to).is_none() {
            return;
        }
        match next_hop {
            Some(next_hop) => kernel.via.insert(to, next_hop.via),
            None => kernel.via.remove(&to),
        };
        let (state, mac) = next_hop.map_or((NeighbourState::Failed, None), |it| (it.state, it.mac));
        self.neighbours.set(to, state, mac, &mut self.actions);
    }

    /// Removes a next hop from the neighbour table.
    fn forget_entry(&mut self, next_hop: IpAddr) {
        if let Some(kernel) = &mut self.kernel {
            kernel.via.remove(&next_hop);
            kernel.requests.insert(next_hop, false);
        }
        self.neighbours.forget(next_hop, &mut self.actions);
    }

    /// Returns the Ethernet address of a next hop, if it is known.
    pub(super) fn mac(&self, next_hop: IpAddr) -> Option<MacAddr> {
        self.neighbours.mac(next_hop)
    }

    /// Returns the state of a next hop whose resolution has started.
    pub(super) fn state(&self, next_hop: IpAddr) -> Option<NeighbourState> {
        self.neighbours.state(next_hop)
    }

    /// Returns whether an address has not answered all its solicitations.
    pub(super) fn has_failed(&self, ip: IpAddr) -> bool {
        self.neighbours.has_failed(ip)
    }

    /// Returns whether frames are held although the Ethernet address is known.
    pub(super) fn is_held(&self, next_hop: IpAddr) -> bool {
        self.neighbours.is_held(next_hop)
    }

    /// Number of frames that wait.
    pub(super) fn waiting(&self) -> usize {
        self.neighbours.waiting()
    }

    /// Iterates over the next hops that serve remotes.
    pub(super) fn used(&self) -> impl Iterator<Item = IpAddr> {
        self.users.keys().copied()
    }

    /// Returns the remotes that a next hop serves.
    pub(super) fn users(&self, next_hop: IpAddr) -> &[u32] {
        self.users.get(&next_hop).map(Vec::as_slice).unwrap_or_default()
    }

    /// Adds a remote to those that a next hop serves.
    pub(super) fn add_user(&mut self, next_hop: IpAddr, remote: u32) {
        self.users.entry(next_hop).or_default().push(remote);
    }

    /// Removes a remote from those that a next hop serves. Forgets the next hop if it was the last one.
    pub(super) fn remove_user(&mut self, next_hop: IpAddr, remote: u32) {
        let Some(users) = self.users.get_mut(&next_hop) else { return };
        users.retain(|user| *user != remote);
        if users.is_empty() {
            self.users.remove(&next_hop);
            self.forget_entry(next_hop);
        }
    }

    /// Replaces all pairs of a next hop and a remote that it serves. New next hops are resolved in the next ticks,
    /// unused ones are forgotten. The table has room for `spare` next hops more.
    pub(super) fn set_users(&mut self, pairs: impl Iterator<Item = (IpAddr, u32)>, spare: usize) {
        let mut users: HashMap<IpAddr, Vec<u32>> = HashMap::new();
        self.unresolved.clear();
        for (next_hop, remote) in pairs {
            let remotes = users.entry(next_hop).or_default();
            if remotes.is_empty() && self.neighbours.state(next_hop).is_none() {
                self.unresolved.push_back(next_hop);
            }
            remotes.push(remote);
        }
        self.neighbours.set_capacity(users.len() + spare);
        let old = std::mem::replace(&mut self.users, users);
        let unused: Vec<IpAddr> = old.into_keys().filter(|next_hop| !self.users.contains_key(next_hop)).collect();
        unused.into_iter().for_each(|next_hop| self.forget_entry(next_hop));
    }

    /// Starts to resolve a next hop, if this has not happened.
    pub(super) fn resolve(&mut self, next_hop: IpAddr, now: Millis) {
        self.neighbours.resolve(next_hop, now, &mut self.actions);
    }

    /// Forgets a next hop. Frames that wait for it are dropped.
    pub(super) fn forget(&mut self, next_hop: IpAddr) {
        self.forget_entry(next_hop);
    }

    /// Queues a frame until its next hop is resolved or released.
    pub(super) fn enqueue(&mut self, next_hop: IpAddr, frame: QueuedFrame) {
        self.neighbours.enqueue(next_hop, frame, &mut self.actions);
    }

    /// Drops the frames for a remote that wait for this next hop.
    pub(super) fn discard(&mut self, next_hop: IpAddr, remote: u32) {
        self.neighbours.discard(next_hop, |(_, to)| *to == remote, &mut self.actions);
    }

    /// Removes and returns all frames that wait.
    pub(super) fn drain_queues(&mut self) -> impl Iterator<Item = QueuedFrame> {
        self.neighbours.drain_queues()
    }

    /// Processes an ARP or ND message, also for the neighbour table.
    pub(super) fn handle(&mut self, frame: &[u8], now: Millis) -> HostOutcome {
        let outcome = self.host.handle(frame, now);
        if let Some((ip, mac, how)) = outcome.nd_event {
            self.neighbours.handle_event(ip, mac, how, now, &mut self.actions);
        }
        outcome
    }

    /// Advances all timers. Returns `true` every [`NEIGHBOUR_TICK`].
    pub(super) fn tick(&mut self, now: Millis) -> bool {
        for _ in 0..RESOLVES_PER_TICK {
            let Some(ip) = self.unresolved.pop_front() else { break };
            self.neighbours.resolve(ip, now, &mut self.actions);
        }
        for _ in 0..RESOLVES_PER_TICK {
            let Some(ip) = self.unconfirmed.pop_front() else { break };
            self.neighbours.revalidate(ip, now, &mut self.actions);
        }
        self.neighbours.release_held(now, &mut self.actions);
        if now < self.ticks_at {
            return false;
        }
        self.ticks_at = now + NEIGHBOUR_TICK;
        if self.kernel.is_none() {
            self.neighbours.tick(now, &mut self.actions);
        }
        true
    }

    /// Returns the frames that announce the gateway's addresses when they are due. The first announcement follows a
    /// probe for another host with the address.
    pub(super) fn announcements(&mut self, now: Millis) -> Vec<Vec<u8>> {
        if self.announcements_left == 0 || now < self.announce_at || self.kernel.is_some() {
            return Vec::new();
        }
        let addresses = self.host.addresses();
        let is_first = self.announcements_left == ANNOUNCEMENTS.1;
        let frames = |prefix: &Prefix| {
            let probe = is_first.then(|| addresses.conflict_probe(prefix.address));
            probe.into_iter().chain([addresses.announcement(prefix.address)])
        };
        let frames = addresses.addresses.iter().flat_map(frames).collect();
        self.announcements_left -= 1;
        self.announce_at = now + ANNOUNCEMENTS.0;
        frames
    }

    /// The link has returned. Switches may have lost the gateway's address, and a neighbour may have got another
    /// Ethernet address.
    pub(super) fn link_returned(&mut self) {
        if self.kernel.is_some() {
            return;
        }
        self.announce();
        self.unconfirmed = self.users.keys().copied().collect();
    }

    /// The link is lost. The last frames before its return must not go to an old Ethernet address.
    pub(super) fn link_lost(&mut self) {
        if self.kernel.is_some() {
            return;
        }
        for next_hop in self.users.keys() {
            self.neighbours.hold(*next_hop, &mut self.actions);
        }
    }

    /// Takes the actions that the caller must carry out.
    pub(super) fn take_actions(&mut self) -> Vec<NeighbourAction<QueuedFrame>> {
        let mut actions = std::mem::take(&mut self.actions);
        if let Some(kernel) = &mut self.kernel {
            actions.retain(|action| match action {
                NeighbourAction::Solicit(to, _) => {
                    kernel.requests.insert(*to, true);
                    false
                }
                _ => true,
            });
        }
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn of_kernel() -> NextHops {
        let addresses = vec!["10.9.0.1/32".parse().unwrap()];
        NextHops::new(Addresses { mac: MacAddr::ZERO, addresses, gateways: Vec::new() }, true)
    }

    /// Returns the actions as text, because packets cannot be compared.
    fn actions(hops: &mut NextHops) -> Vec<String> {
        hops.take_actions().iter().map(|action| format!("{action:?}")).collect()
    }

    fn reached(via: &str, mac: Option<MacAddr>) -> Option<KernelNextHop> {
        let state = if mac.is_some() { NeighbourState::Stale } else { NeighbourState::Incomplete };
        Some(KernelNextHop { via: ip(via), state, mac })
    }

    #[test]
    fn next_hops_of_the_kernel_are_requested_and_followed() {
        let (mut hops, to) = (of_kernel(), ip("192.0.2.1"));
        assert_eq!(hops.next_hop(to), Some(to), "without a network or a gateway");
        hops.set_users([(to, 3)].into_iter(), 8);
        hops.tick(0);
        assert!(actions(&mut hops).is_empty(), "the gateway does not ask hosts itself");
        assert_eq!(hops.take_requests(10), [(to, true)]);
        assert_eq!((hops.take_requests(10), hops.announcements(0)), (vec![], vec![]));
        hops.set_kernel(to, reached("10.9.0.2", None));
        assert!(actions(&mut hops).is_empty());
        assert_eq!((hops.via(to), hops.mac(to)), (Some(ip("10.9.0.2")), None));
        hops.set_kernel(to, reached("10.9.0.2", Some(MAC)));
        assert_eq!(actions(&mut hops), [format!("Resolved({to}, {MAC:?})")]);
        // Another router with the same address changes nothing for the workers.
        hops.set_kernel(to, reached("10.9.0.3", Some(MAC)));
        assert!(actions(&mut hops).is_empty());
        assert_eq!(hops.list(), [(ip("10.9.0.3"), NeighbourState::Stale, Some(MAC))]);
        // Timers and the link are the kernel's.
        hops.link_lost();
        hops.link_returned();
        hops.tick(1_000_000);
        assert!(actions(&mut hops).is_empty() && !hops.is_held(to));
        hops.set_kernel(to, None);
        assert_eq!(actions(&mut hops), [format!("Unreachable({to})")]);
        assert_eq!((hops.via(to), hops.list()), (None, vec![]));
        hops.set_users([].into_iter(), 8);
        assert_eq!(hops.take_requests(10), [(to, false)]);
        hops.set_kernel(to, reached("10.9.0.2", Some(MAC)));
        assert!(actions(&mut hops).is_empty() && hops.list().is_empty(), "nobody needs it any more");
    }

    #[test]
    fn a_part_of_the_requests_leaves_the_others() {
        let mut hops = of_kernel();
        for n in 0..5 {
            hops.resolve(ip(&format!("192.0.2.{n}")), 0);
        }
        hops.take_actions();
        let taken = [hops.take_requests(2), hops.take_requests(2), hops.take_requests(2)];
        assert_eq!(taken.each_ref().map(Vec::len), [2, 2, 1]);
        let all: std::collections::HashSet<_> = taken.concat().into_iter().collect();
        assert_eq!(all.len(), 5);
    }
}
