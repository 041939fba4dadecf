//! The kernel's next hops to the remotes: which are needed, which the kernel has, and what changed.
//!
//! It has no socket. The thread passes messages of the kernel in, asks what [`NextHopTable::due`] names, and takes the
//! changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_pipeline::tunnel::KernelNextHop;
use wirepath_pipeline::tunnel::neighbour::NeighbourState;
use wirepath_pmd::rtnetlink::{Message, Neighbour, NudState, RouteHop};
use wirepath_wire::MacAddr;

use crate::gateway::exchange;

/// Changes for the control thread, by destination. A later change replaces an earlier one.
pub(super) type Changes = HashMap<IpAddr, Option<KernelNextHop>>;

/// A destination whose next hop the gateway needs.
#[derive(Debug, Default)]
struct Destination {
    /// Next hops of the kernel's route on the interface of the underlay.
    hops: Vec<IpAddr>,
    /// Next hop that the gateway knows, if it was told one or none.
    published: Option<Option<KernelNextHop>>,
}

/// A next hop in use.
#[derive(Debug, Default)]
struct Hop {
    /// Destinations whose routes have it.
    users: BTreeSet<IpAddr>,
    state: NudState,
    mac: Option<MacAddr>,
}

/// The next hops of the gateway.
#[derive(Debug, Default)]
pub(super) struct NextHopTable {
    /// Name of the interface of the underlay port.
    device: String,
    /// Index of that interface, if it exists.
    interface: Option<u32>,
    destinations: BTreeMap<IpAddr, Destination>,
    hops: BTreeMap<IpAddr, Hop>,
    /// Destinations whose route has to be looked up.
    due: BTreeSet<IpAddr>,
    /// Next hops whose neighbour entry has to be read.
    unread: BTreeSet<IpAddr>,
    failed_routes: BTreeSet<IpAddr>,
    failed_entries: BTreeSet<IpAddr>,
    pub(super) changes: Changes,
}

impl NextHopTable {
    /// Sets the name of the interface. Its messages tell the index.
    pub(super) fn set_device(&mut self, device: &str) {
        if self.device != device {
            device.clone_into(&mut self.device);
            self.set_interface(None);
        }
    }

    fn set_interface(&mut self, interface: Option<u32>) {
        if self.interface != interface {
            self.interface = interface;
            self.read_again();
        }
    }

    /// Returns the index of the interface.
    pub(super) fn interface(&self) -> Option<u32> {
        self.interface
    }

    /// Number of destinations, of next hops, and of destinations whose route has to be looked up.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.destinations.len(), self.hops.len(), self.due.len())
    }

    /// Reads everything again, for example because messages were lost.
    pub(super) fn read_again(&mut self) {
        self.due = self.destinations.keys().copied().collect();
        self.unread = self.hops.keys().copied().collect();
    }

    /// Adds a destination or removes it. One that is there is reported again.
    pub(super) fn set_needed(&mut self, to: IpAddr, is_needed: bool) {
        if is_needed {
            let destination = self.destinations.entry(to).or_default();
            if destination.published.take().is_none() {
                self.due.insert(to);
            } else {
                self.publish(to);
            }
        } else if let Some(destination) = self.destinations.remove(&to) {
            self.due.remove(&to);
            self.changes.remove(&to);
            for hop in destination.hops {
                self.remove_user(hop, to);
            }
        }
    }

    fn remove_user(&mut self, hop: IpAddr, to: IpAddr) {
        if let Some(it) = self.hops.get_mut(&hop) {
            it.users.remove(&to);
            if it.users.is_empty() {
                self.hops.remove(&hop);
                self.unread.remove(&hop);
            }
        }
    }

    /// Takes a message of the kernel.
    pub(super) fn apply(&mut self, message: &Message) {
        match message {
            Message::Link(link) if link.name == self.device => {
                let before = self.interface;
                self.set_interface(Some(link.index));
                if before.is_some() {
                    // The link may have been lost or have returned, of which routes of IPv6 tell nothing.
                    self.read_again();
                }
            }
            Message::Link(link) if self.interface == Some(link.index) => {
                tracing::info!("interface {} is called {} now; the underlay keeps it", self.device, link.name);
                self.device.clone_from(&link.name);
            }
            Message::LinkRemoved(index) if self.interface == Some(*index) => self.set_interface(None),
            Message::Neighbour(neighbour) if self.interface == Some(neighbour.index) => {
                self.set_neighbour(neighbour.address, neighbour.state, neighbour.mac);
            }
            Message::Route(route) => {
                let (first, last) = range(route.to, route.len);
                self.due.extend(self.destinations.range(first..=last).map(|(to, _)| *to));
            }
            Message::Routing | Message::Nexthop(_) => self.due = self.destinations.keys().copied().collect(),
            Message::Link(_)
            | Message::LinkRemoved(_)
            | Message::Fdb(_)
            | Message::Neighbour(_)
            | Message::AddressesChanged(_)
            | Message::Ipv6Changed(_) => {}
        }
    }

    /// Takes the neighbour entry of a next hop; `None`: it has none.
    pub(super) fn set_entry(&mut self, hop: IpAddr, entry: Option<Neighbour>) {
        let (state, mac) = entry.map_or((NudState::None, None), |entry| (entry.state, entry.mac));
        self.set_neighbour(hop, state, mac);
    }

    fn set_neighbour(&mut self, hop: IpAddr, state: NudState, mac: Option<MacAddr>) {
        let Some(it) = self.hops.get_mut(&hop) else { return };
        let mac = mac.filter(|mac| mac.is_unicast());
        self.unread.remove(&hop);
        // While somebody asks for a silent neighbour, the kernel solicits it every few seconds. It stays failed until
        // its address is known: each change would concern all remotes behind it.
        let is_solicited_again = it.state == NudState::Failed && state == NudState::Incomplete;
        let state = if is_solicited_again { NudState::Failed } else { state };
        if (it.state, it.mac) == (state, mac) {
            return;
        }
        (it.state, it.mac) = (state, mac);
        for to in it.users.clone() {
            self.publish(to);
        }
    }

    /// Removes and returns a destination whose route has to be looked up.
    pub(super) fn due(&mut self) -> Option<IpAddr> {
        self.due.pop_first()
    }

    /// Removes and returns a next hop whose neighbour entry has to be read.
    pub(super) fn unread(&mut self) -> Option<IpAddr> {
        self.unread.pop_first()
    }

    /// Remembers a destination whose route the kernel did not tell. What it told before stays in use.
    pub(super) fn route_failed(&mut self, to: IpAddr) {
        self.failed_routes.insert(to);
    }

    /// Remembers a next hop whose neighbour entry the kernel did not tell.
    pub(super) fn entry_failed(&mut self, hop: IpAddr) {
        self.failed_entries.insert(hop);
    }

    /// Asks again for what the kernel did not tell.
    pub(super) fn retry(&mut self) {
        let failed = std::mem::take(&mut self.failed_routes);
        self.due.extend(failed.into_iter().filter(|to| self.destinations.contains_key(to)));
        let failed = std::mem::take(&mut self.failed_entries);
        self.unread.extend(failed.into_iter().filter(|hop| self.hops.contains_key(hop)));
    }

    /// Returns whether a next hop is in use and has no neighbour entry yet.
    pub(super) fn is_unresolved(&self, hop: IpAddr) -> bool {
        self.hops.get(&hop).is_some_and(|hop| hop.state == NudState::None)
    }

    /// Returns whether the kernel does not solicit a next hop.
    pub(super) fn is_fixed(&self, hop: IpAddr) -> bool {
        self.hops.get(&hop).is_some_and(|hop| hop.state == NudState::Fixed)
    }

    /// Returns whether something has to be asked.
    pub(super) fn has_work(&self) -> bool {
        !self.due.is_empty() || !self.unread.is_empty()
    }

    /// Takes the kernel's route to a destination.
    pub(super) fn set_route(&mut self, to: IpAddr, route: &[RouteHop]) {
        let interface = self.interface;
        let Some(destination) = self.destinations.get_mut(&to) else { return };
        let on_link = |hop: &&RouteHop| Some(hop.index) == interface;
        let mut hops: Vec<IpAddr> = route.iter().filter(on_link).map(|hop| hop.via.unwrap_or(to)).collect();
        hops.sort_unstable();
        hops.dedup();
        let before = std::mem::replace(&mut destination.hops, hops.clone());
        for hop in &hops {
            let it = self.hops.entry(*hop).or_insert_with(|| {
                self.unread.insert(*hop);
                Hop::default()
            });
            it.users.insert(to);
        }
        for hop in before.into_iter().filter(|hop| !hops.contains(hop)) {
            self.remove_user(hop, to);
        }
        self.publish(to);
    }

    /// Reports the next hop to a destination if it changed.
    fn publish(&mut self, to: IpAddr) {
        let Some(destination) = self.destinations.get(&to) else { return };
        let next_hop = self.choose(to, &destination.hops);
        let Some(destination) = self.destinations.get_mut(&to) else { return };
        if destination.published != Some(next_hop) {
            destination.published = Some(next_hop);
            self.changes.insert(to, next_hop);
        }
    }

    /// Chooses one of several next hops: among those with a known address, the one with the highest weight for the
    /// destination. So a next hop that goes moves no destination of the others.
    fn choose(&self, to: IpAddr, hops: &[IpAddr]) -> Option<KernelNextHop> {
        let weight = |via: &IpAddr| {
            let has_mac = self.hops.get(via).is_some_and(|hop| hop.mac.is_some());
            (has_mac, exchange::weight(to, via))
        };
        let via = *hops.iter().max_by_key(|via| weight(via))?;
        let hop = self.hops.get(&via)?;
        let state = match hop.state {
            NudState::None | NudState::Incomplete => NeighbourState::Incomplete,
            NudState::Reachable | NudState::Fixed => NeighbourState::Reachable,
            NudState::Stale => NeighbourState::Stale,
            NudState::Probe => NeighbourState::Probe,
            NudState::Failed => NeighbourState::Failed,
        };
        Some(KernelNextHop { via, state, mac: hop.mac })
    }

    /// Returns the first next hop after `last` that the kernel has to keep alive. It does not solicit fixed ones.
    pub(super) fn next_to_keep(&self, last: Option<IpAddr>) -> Option<IpAddr> {
        let from = last.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
        let mut hops = self.hops.range((from, std::ops::Bound::Unbounded));
        // The state of the others is not known yet.
        hops.find(|(ip, hop)| hop.state != NudState::Fixed && !self.unread.contains(*ip)).map(|(ip, _)| *ip)
    }
}

/// Returns the first and the last address of a network.
fn range(address: IpAddr, len: u8) -> (IpAddr, IpAddr) {
    match address {
        IpAddr::V4(ip) => {
            let hosts = u32::MAX.checked_shr(len.into()).unwrap_or(0);
            let first = ip.to_bits() & !hosts;
            (Ipv4Addr::from_bits(first).into(), Ipv4Addr::from_bits(first | hosts).into())
        }
        IpAddr::V6(ip) => {
            let hosts = u128::MAX.checked_shr(len.into()).unwrap_or(0);
            let first = ip.to_bits() & !hosts;
            (Ipv6Addr::from_bits(first).into(), Ipv6Addr::from_bits(first | hosts).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use wirepath_pmd::rtnetlink::{Link, LinkKind, Route};

    use super::*;

    const INTERFACE: u32 = 7;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn mac(n: u8) -> MacAddr {
        MacAddr([2, 0, 0, 0, 0, n])
    }

    fn link(name: &str, index: u32) -> Message {
        let name = name.to_owned();
        Message::Link(Link { index, name, alias: None, mac: None, master: None, up: true, kind: LinkKind::Other })
    }

    fn route(to: &str, len: u8) -> Message {
        Message::Route(Route { removed: false, to: ip(to), len, table: 254, metric: 0, hops: Vec::new() })
    }

    fn neighbour(index: u32, address: &str, state: NudState, mac: Option<MacAddr>) -> Message {
        let address = ip(address);
        let entry = Neighbour { index, address, state, mac, external: false, is_router: false, protocol: 0 };
        Message::Neighbour(entry)
    }

    fn via(text: &str) -> RouteHop {
        RouteHop { index: INTERFACE, via: Some(ip(text)) }
    }

    fn table() -> NextHopTable {
        let mut table = NextHopTable::default();
        table.set_device("wan");
        table.apply(&link("wan", INTERFACE));
        table
    }

    fn due(table: &mut NextHopTable) -> Vec<IpAddr> {
        std::iter::from_fn(|| table.due()).collect()
    }

    fn changes(table: &mut NextHopTable) -> Changes {
        std::mem::take(&mut table.changes)
    }

    /// Returns the next hop in the only change.
    fn changed(table: &mut NextHopTable) -> Option<KernelNextHop> {
        let changes = changes(table);
        assert_eq!(changes.len(), 1, "{changes:?}");
        changes.into_values().next().unwrap()
    }

    #[test]
    fn a_next_hop_is_found_changes_and_goes() {
        let (mut table, to) = (table(), ip("10.77.0.1"));
        table.set_needed(to, true);
        assert_eq!(due(&mut table), [to]);
        table.set_route(to, &[via("10.9.0.2")]);
        assert_eq!(table.unread(), Some(ip("10.9.0.2")));
        let found = |state, mac| Some(KernelNextHop { via: ip("10.9.0.2"), state, mac });
        assert_eq!(changed(&mut table), found(NeighbourState::Incomplete, None));
        table.apply(&neighbour(INTERFACE, "10.9.0.2", NudState::Reachable, Some(mac(1))));
        assert_eq!(changed(&mut table), found(NeighbourState::Reachable, Some(mac(1))));
        // Other interfaces and addresses have no effect.
        table.apply(&neighbour(8, "10.9.0.2", NudState::Reachable, Some(mac(9))));
        table.apply(&neighbour(INTERFACE, "10.9.0.3", NudState::Reachable, Some(mac(9))));
        assert_eq!(changes(&mut table), Changes::new());
        table.apply(&neighbour(INTERFACE, "10.9.0.2", NudState::Stale, Some(mac(2))));
        assert_eq!(changed(&mut table), found(NeighbourState::Stale, Some(mac(2))));
        table.apply(&neighbour(INTERFACE, "10.9.0.2", NudState::Failed, None));
        assert_eq!(changed(&mut table), found(NeighbourState::Failed, None));
        for state in [NudState::Incomplete, NudState::Failed] {
            table.apply(&neighbour(INTERFACE, "10.9.0.2", state, None));
            assert_eq!(changes(&mut table), Changes::new(), "a silent next hop stays failed");
        }
        table.apply(&neighbour(INTERFACE, "10.9.0.2", NudState::Reachable, Some(mac(2))));
        assert_eq!(changed(&mut table), found(NeighbourState::Reachable, Some(mac(2))));
        table.apply(&route("10.77.0.0", 24));
        assert_eq!(due(&mut table), [to]);
        table.set_route(to, &[]);
        assert_eq!(changed(&mut table), None);
        table.set_needed(to, false);
        assert_eq!((table.counts(), table.changes.len()), ((0, 0, 0), 0));
    }

    #[test]
    fn only_routes_to_destinations_are_looked_up() {
        let mut table = table();
        let all = ["10.77.0.1", "10.77.0.2", "10.78.0.1", "fd00:9::1"].map(ip);
        all.iter().for_each(|to| table.set_needed(*to, true));
        assert_eq!(due(&mut table), all);
        for (network, len, expected) in [
            ("10.77.0.0", 30, &all[..2]),
            ("10.77.0.2", 32, &all[1..2]),
            ("10.79.0.0", 16, &[]),
            ("0.0.0.0", 0, &all[..3]),
            ("::", 0, &all[3..]),
            ("fd00:9::", 64, &all[3..]),
        ] {
            table.apply(&route(network, len));
            assert_eq!(due(&mut table), expected, "{network}/{len}");
        }
        table.apply(&Message::Routing);
        assert_eq!(due(&mut table), all);
        // The interface is removed and comes again with another index.
        table.apply(&Message::LinkRemoved(INTERFACE));
        assert_eq!(due(&mut table), all);
        table.apply(&link("wan", 9));
        assert_eq!((due(&mut table), table.interface()), (all.to_vec(), Some(9)));
    }

    /// Routes by other interfaces do not count, and a direct route has the destination as its next hop.
    #[test]
    fn only_routes_by_the_interface_are_used() {
        let (mut table, to) = (table(), ip("10.9.0.2"));
        table.set_needed(to, true);
        table.set_route(to, &[RouteHop { index: 8, via: None }]);
        assert_eq!(changed(&mut table), None);
        table.set_route(to, &[RouteHop { index: INTERFACE, via: None }]);
        assert_eq!(changed(&mut table).map(|it| it.via), Some(to));
    }

    #[test]
    fn equal_paths_share_the_destinations() {
        let mut table = table();
        let destinations: Vec<IpAddr> = (0..64).map(|n| ip(&format!("10.77.0.{n}"))).collect();
        let routers = ["10.9.0.2", "10.9.0.3", "10.9.0.4"];
        for to in &destinations {
            table.set_needed(*to, true);
            table.set_route(*to, &routers.map(via));
        }
        let chosen = |table: &NextHopTable| -> Vec<Option<IpAddr>> {
            let one = |to: &IpAddr| table.destinations[to].published.unwrap();
            destinations.iter().map(|to| one(to).filter(|it| it.mac.is_some()).map(|it| it.via)).collect()
        };
        assert!(chosen(&table).iter().all(Option::is_none));
        for (n, router) in (0..).zip(routers) {
            table.apply(&neighbour(INTERFACE, router, NudState::Reachable, Some(mac(n))));
        }
        let all = chosen(&table);
        for router in routers {
            let share = all.iter().filter(|it| **it == Some(ip(router))).count();
            assert!(share > 5, "{router} has {share} of 64");
        }
        // A router that fails moves its destinations only.
        table.apply(&neighbour(INTERFACE, routers[0], NudState::Failed, None));
        let without = chosen(&table);
        for (before, after) in all.iter().zip(&without) {
            assert!(after.is_some() && *after != Some(ip(routers[0])));
            assert!(*before == Some(ip(routers[0])) || before == after);
        }
        assert_eq!(table.counts().1, 3, "the failed one is still asked");
    }

    #[test]
    fn what_the_kernel_did_not_tell_is_asked_again() {
        let (mut table, to) = (table(), ip("10.9.0.2"));
        table.set_needed(to, true);
        table.set_needed(ip("10.9.0.3"), true);
        table.set_route(to, &[RouteHop { index: INTERFACE, via: None }]);
        due(&mut table);
        assert_eq!(table.unread(), Some(to));
        table.route_failed(to);
        table.route_failed(ip("10.9.0.3"));
        table.entry_failed(to);
        assert!(!table.has_work(), "not at once");
        table.set_needed(ip("10.9.0.3"), false);
        table.retry();
        assert_eq!((due(&mut table), table.unread(), table.unread()), (vec![to], Some(to), None));
    }

    /// A destination that is asked for again is reported again, because the gateway has forgotten it meanwhile.
    #[test]
    fn a_repeated_request_is_answered() {
        let (mut table, to) = (table(), ip("10.9.0.2"));
        table.set_needed(to, true);
        table.set_route(to, &[RouteHop { index: INTERFACE, via: None }]);
        changes(&mut table);
        table.set_needed(to, true);
        assert_eq!(changed(&mut table).map(|it| it.via), Some(to));
    }

    #[test]
    fn fixed_entries_are_not_kept_alive() {
        let mut table = table();
        for to in ["10.9.0.2", "10.9.0.3", "10.9.0.4"].map(ip) {
            table.set_needed(to, true);
            table.set_route(to, &[RouteHop { index: INTERFACE, via: None }]);
        }
        assert_eq!(table.next_to_keep(None), None, "their states are not known");
        table.set_entry(ip("10.9.0.2"), None);
        table.apply(&neighbour(INTERFACE, "10.9.0.3", NudState::Fixed, Some(mac(3))));
        table.apply(&neighbour(INTERFACE, "10.9.0.4", NudState::Failed, None));
        let first = table.next_to_keep(None);
        assert_eq!((first, table.next_to_keep(first)), (Some(ip("10.9.0.2")), Some(ip("10.9.0.4"))));
        assert_eq!(table.next_to_keep(Some(ip("10.9.0.4"))), None);
    }
}
