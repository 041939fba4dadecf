//! Routes of the kernel by the bridges of segments: those that a routing daemon writes for an L3VNI (RFC 9136).
//!
//! A next hop is the address of a VTEP. The neighbour entry of that address on the bridge has the Ethernet address of
//! the router there.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use wirepath_pipeline::route::NetworkPrefix;
use wirepath_pmd::rtnetlink::{Route, RouteHop};

/// A route of one table with one metric.
#[derive(Clone, Debug)]
struct Known {
    table: u32,
    metric: u32,
    hops: Vec<RouteHop>,
    /// Dump in which it was last seen.
    dump: u32,
}

/// All routes with a next hop behind a bridge, or behind an interface that is not known yet.
#[derive(Debug, Default)]
pub(super) struct Routes {
    /// Routes of each destination, ordered by table and metric.
    known: HashMap<NetworkPrefix, Vec<Known>>,
    entries: usize,
    /// Destinations by the interface and the address of their next hops.
    users: HashMap<u32, HashMap<IpAddr, HashSet<NetworkPrefix>>>,
}

/// Effect of a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Applied {
    /// Interfaces by which the routes to the destination may have changed.
    pub(super) interfaces: BTreeSet<u32>,
    /// True if there was no room for the route.
    pub(super) refused: bool,
}

impl Routes {
    /// Number of routes.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries
    }

    /// Takes a route, or its removal. `is_wanted` tells of an interface whether it may be a bridge. Beyond `most`
    /// routes, new ones are refused.
    pub(super) fn apply(
        &mut self,
        route: &Route,
        dump: u32,
        is_wanted: impl Fn(u32) -> bool,
        most: usize,
    ) -> Option<(NetworkPrefix, Applied)> {
        let to = NetworkPrefix::new(route.to, route.len)?;
        let key = (route.table, route.metric);
        let position = self.known.get(&to).map(|all| all.binary_search_by_key(&key, |it| (it.table, it.metric)));
        let old = match position {
            Some(Ok(at)) => self.known.get(&to).and_then(|all| all.get(at)).map(|known| known.hops.clone()),
            _ => None,
        };
        let before = old.clone().unwrap_or_default();
        let hops: Vec<RouteHop> = match route.removed {
            // IPv6 has messages about the removal of single next hops.
            true if to.is_ipv6() && !route.hops.is_empty() => {
                before.iter().filter(|hop| !route.hops.contains(hop)).copied().collect()
            }
            true => Vec::new(),
            false => route.hops.iter().filter(|hop| hop.via.is_some() && is_wanted(hop.index)).copied().collect(),
        };
        // Another route to the destination may count now, or no longer.
        let interfaces = self.interfaces(to).into_iter().chain(hops.iter().map(|hop| hop.index)).collect();
        if old.is_none() && (hops.is_empty() || self.entries >= most) {
            let refused = !hops.is_empty();
            return refused.then_some((to, Applied { interfaces: BTreeSet::new(), refused }));
        }
        let all = self.known.entry(to).or_default();
        match (position, hops.is_empty()) {
            (Some(Ok(at)), true) => {
                all.remove(at);
                self.entries -= 1;
            }
            (Some(Ok(at)), false) => all[at] = Known { table: route.table, metric: route.metric, hops, dump },
            (Some(Err(at)), _) => all.insert(at, Known { table: route.table, metric: route.metric, hops, dump }),
            (None, _) => all.push(Known { table: route.table, metric: route.metric, hops, dump }),
        }
        self.entries += usize::from(old.is_none());
        self.index(to, &before);
        Some((to, Applied { interfaces, refused: false }))
    }

    /// Brings the index of next hops up to date for a destination, of which a route had the next hops `before`.
    fn index(&mut self, to: NetworkPrefix, before: &[RouteHop]) {
        let now: HashSet<(u32, IpAddr)> = (self.known.get(&to).into_iter().flatten())
            .flat_map(|known| &known.hops)
            .filter_map(|hop| Some((hop.index, hop.via?)))
            .collect();
        for (index, via) in before.iter().filter_map(|hop| Some((hop.index, hop.via?))) {
            if now.contains(&(index, via)) {
                continue;
            }
            let Some(of_index) = self.users.get_mut(&index) else { continue };
            if let Some(users) = of_index.get_mut(&via) {
                users.remove(&to);
                if users.is_empty() {
                    of_index.remove(&via);
                }
            }
            if of_index.is_empty() {
                self.users.remove(&index);
            }
        }
        for (index, via) in now {
            self.users.entry(index).or_default().entry(via).or_default().insert(to);
        }
        if self.known.get(&to).is_some_and(Vec::is_empty) {
            self.known.remove(&to);
        }
    }

    /// Returns the removals of all routes that were not seen in a dump.
    pub(super) fn stale(&self, dump: u32) -> Vec<Route> {
        let removal = |to: &NetworkPrefix, known: &Known| Route {
            removed: true,
            to: to.address(),
            len: to.len(),
            table: known.table,
            metric: known.metric,
            hops: known.hops.clone(),
        };
        let of = |(to, all): (&NetworkPrefix, &Vec<Known>)| -> Vec<Route> {
            all.iter().filter(|known| known.dump != dump).map(|known| removal(to, known)).collect()
        };
        self.known.iter().flat_map(of).collect()
    }

    /// Removes all next hops behind an interface. The kernel removes such routes of IPv4 without a message when the
    /// interface goes or is set down. Returns their destinations.
    pub(super) fn remove_interface(&mut self, index: u32) -> Vec<NetworkPrefix> {
        let of_index = self.users.get(&index);
        let all: HashSet<NetworkPrefix> = of_index.into_iter().flat_map(HashMap::values).flatten().copied().collect();
        for to in &all {
            let Some(known) = self.known.get_mut(to) else { continue };
            let before: Vec<RouteHop> = known.iter().flat_map(|it| &it.hops).copied().collect();
            known.iter_mut().for_each(|it| it.hops.retain(|hop| hop.index != index));
            let count = known.len();
            known.retain(|it| !it.hops.is_empty());
            self.entries -= count - known.len();
            self.index(*to, &before);
        }
        all.into_iter().collect()
    }

    /// Returns the interfaces of all next hops of a destination.
    pub(super) fn interfaces(&self, to: NetworkPrefix) -> BTreeSet<u32> {
        self.known.get(&to).into_iter().flatten().flat_map(|known| &known.hops).map(|hop| hop.index).collect()
    }

    /// Returns the destinations with this next hop.
    pub(super) fn users(&self, index: u32, via: IpAddr) -> Vec<NetworkPrefix> {
        self.users.get(&index).and_then(|of_index| of_index.get(&via)).into_iter().flatten().copied().collect()
    }

    /// Returns the destinations with a next hop behind this interface.
    pub(super) fn by_interface(&self, index: u32) -> HashSet<NetworkPrefix> {
        self.users.get(&index).into_iter().flat_map(HashMap::values).flatten().copied().collect()
    }

    /// Returns the next hops of a destination behind this interface. The lowest metric of a table counts.
    pub(super) fn next_hops(&self, index: u32, to: NetworkPrefix) -> impl Iterator<Item = IpAddr> {
        let all = self.known.get(&to).map(Vec::as_slice).unwrap_or_default();
        let is_first = move |at: usize| at == 0 || all[at - 1].table != all[at].table;
        let first = (0..all.len()).filter(move |at| is_first(*at)).map(|at| &all[at]);
        first.flat_map(|known| &known.hops).filter(move |hop| hop.index == index).filter_map(|hop| hop.via)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(index: u32, n: u8) -> RouteHop {
        RouteHop { index, via: Some([10, 9, 0, n].into()) }
    }

    fn route(to: &str, metric: u32, hops: &[RouteHop]) -> Route {
        let (address, len) = to.split_once('/').unwrap();
        let (to, len) = (address.parse().unwrap(), len.parse().unwrap());
        Route { removed: false, to, len, table: 254, metric, hops: hops.to_vec() }
    }

    fn removed(route: Route) -> Route {
        Route { removed: true, ..route }
    }

    fn apply(routes: &mut Routes, route: &Route) {
        routes.apply(route, 1, |index| index != 2, 8);
    }

    fn vteps(routes: &Routes, index: u32, to: &str) -> Vec<String> {
        routes.next_hops(index, to.parse().unwrap()).map(|it| it.to_string()).collect()
    }

    #[test]
    fn the_lowest_metric_counts_and_single_next_hops_go() {
        let mut routes = Routes::default();
        let (v4, v6) = ("10.2.0.0/24", "fd02::/64");
        apply(&mut routes, &route(v4, 20, &[hop(8, 2), hop(8, 3)]));
        apply(&mut routes, &route(v4, 30, &[hop(8, 4)]));
        // A route by an interface that is no bridge, and one without a router.
        apply(&mut routes, &route("10.3.0.0/24", 0, &[hop(2, 2)]));
        apply(&mut routes, &route("10.4.0.0/24", 0, &[RouteHop { index: 8, via: None }]));
        assert_eq!((routes.len(), vteps(&routes, 8, v4)), (2, vec!["10.9.0.2".to_owned(), "10.9.0.3".to_owned()]));
        assert_eq!(vteps(&routes, 9, v4), [""; 0]);
        apply(&mut routes, &removed(route(v4, 20, &[hop(8, 2)])));
        assert_eq!(vteps(&routes, 8, v4), ["10.9.0.4"], "a route of IPv4 goes as a whole");
        apply(&mut routes, &removed(route(v4, 20, &[])));
        apply(&mut routes, &removed(route(v4, 30, &[])));
        assert_eq!((routes.len(), routes.known.len(), routes.users.len()), (0, 0, 0));

        apply(&mut routes, &route(v6, 20, &[hop(8, 2), hop(8, 3)]));
        apply(&mut routes, &removed(route(v6, 20, &[hop(8, 2)])));
        assert_eq!(vteps(&routes, 8, v6), ["10.9.0.3"]);
        assert_eq!((routes.users(8, [10, 9, 0, 2].into()).len(), routes.users(8, [10, 9, 0, 3].into()).len()), (0, 1));
        // The route moves to another bridge.
        let (_, applied) = routes.apply(&route(v6, 20, &[hop(9, 3)]), 1, |_| true, 8).unwrap();
        assert_eq!(applied.interfaces, [8, 9].into());
        assert_eq!((vteps(&routes, 8, v6).len(), vteps(&routes, 9, v6).len()), (0, 1));
        apply(&mut routes, &removed(route(v6, 20, &[hop(9, 3)])));
        assert_eq!((routes.len(), routes.known.len(), routes.users.len()), (0, 0, 0));
    }

    #[test]
    fn a_route_affects_those_with_a_higher_metric() {
        let mut routes = Routes::default();
        let interfaces = |routes: &mut Routes, route: &Route| {
            let (_, applied) = routes.apply(route, 1, |_| true, 8).unwrap();
            applied.interfaces.into_iter().collect::<Vec<_>>()
        };
        let (low, high) = (route("10.2.0.0/24", 20, &[hop(8, 2)]), route("10.2.0.0/24", 30, &[hop(9, 3)]));
        assert_eq!(interfaces(&mut routes, &high), [9]);
        assert_eq!(interfaces(&mut routes, &low), [8, 9]);
        assert_eq!(vteps(&routes, 9, "10.2.0.0/24"), [""; 0]);
        assert_eq!(interfaces(&mut routes, &removed(low)), [8, 9]);
        assert_eq!(vteps(&routes, 9, "10.2.0.0/24"), ["10.9.0.3"]);
    }

    #[test]
    fn routes_go_with_their_interface() {
        let mut routes = Routes::default();
        apply(&mut routes, &route("10.2.0.0/24", 20, &[hop(8, 2), hop(9, 3)]));
        apply(&mut routes, &route("10.3.0.0/24", 20, &[hop(8, 2)]));
        let mut gone = routes.remove_interface(8);
        gone.sort_unstable();
        assert_eq!(gone, ["10.2.0.0/24", "10.3.0.0/24"].map(|it| it.parse().unwrap()));
        assert_eq!((routes.len(), vteps(&routes, 9, "10.2.0.0/24")), (1, vec!["10.9.0.3".to_owned()]));
        assert_eq!((routes.by_interface(8).len(), routes.by_interface(9).len()), (0, 1));
        assert_eq!(routes.remove_interface(8), []);
    }

    #[test]
    fn room_is_bounded_and_a_dump_removes_the_rest() {
        let mut routes = Routes::default();
        for n in 0..20 {
            let new = route(&format!("10.{n}.0.0/16"), 20, &[hop(8, 2)]);
            let applied = routes.apply(&new, 1, |_| true, 8).map(|(_, applied)| applied.refused);
            assert_eq!(applied, Some(n >= 8));
        }
        assert_eq!((routes.len(), routes.known.len()), (8, 8));
        routes.apply(&route("10.1.0.0/16", 20, &[hop(8, 3)]), 2, |_| true, 8);
        let stale = routes.stale(2);
        assert_eq!(stale.len(), 7);
        stale.iter().for_each(|route| apply(&mut routes, route));
        assert_eq!((routes.len(), vteps(&routes, 8, "10.1.0.0/16")), (1, vec!["10.9.0.3".to_owned()]));
    }
}
