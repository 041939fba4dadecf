//! The mirror beside a plain model of the kernel's tables, for the fuzzer and for a test with random bytes.
//!
//! The bytes choose changes of the kernel's tables. Each change has its messages, which the mirror gets, or does not
//! after a loss (`ENOBUFS`). A dump of all tables ends the loss, while the tables go on changing. Whenever nothing is
//! lost, the changes that the mirror has reported amount to what follows from the tables.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;

use wirepath_pipeline::route::NetworkPrefix;
use wirepath_pipeline::tunnel::ExternalPlace;
use wirepath_pmd::rtnetlink::{
    BridgeEntry, Fdb, Link, LinkKind, Message, Neighbour, Nexthop, NexthopTarget, NudState, Route, RouteHop,
    TunnelEntry, Vxlan,
};
use wirepath_wire::MacAddr;

use super::mirror::{Counts, Mirror};
use crate::fuzz_input::Input;

const VNIS: [u32; 2] = [100, 200];
/// Bridges, VXLAN devices and other devices. Two of the VXLAN devices have one VNI.
const BRIDGES: [u32; 2] = [1, 2];
const TUNNELS: [(u32, u32); 3] = [(11, 100), (12, 200), (13, 100)];
const OTHERS: [u32; 2] = [21, 22];
/// Steps of a sequence.
const STEPS: usize = 200;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum To {
    Vtep(IpAddr),
    Nexthop(u32),
}

fn vtep(number: u8) -> IpAddr {
    [10, 9, 0, number % 4].into()
}

fn mac(number: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, number % 4])
}

/// Returns an address of a host, or of a VTEP, whose neighbour entry has the address of its router.
fn address(number: u8) -> IpAddr {
    match number % 6 {
        4 => [0xfd00, 0, 0, 0, 0, 0, 0, 4].into(),
        5 => [192, 0, 2, 5].into(),
        _ => vtep(number),
    }
}

fn prefix(number: u8) -> NetworkPrefix {
    let (to, len): (IpAddr, u8) = match number % 4 {
        0 => ([10, 1, 0, 0].into(), 16),
        1 => ([10, 1, 2, 0].into(), 24),
        2 => ([0xfd01, 0, 0, 0, 0, 0, 0, 0].into(), 64),
        _ => ([0, 0, 0, 0].into(), 0),
    };
    NetworkPrefix::new(to, len).expect("a network")
}

/// Tables of the kernel.
#[derive(Clone, Debug, Default)]
struct Kernel {
    links: BTreeMap<u32, Link>,
    tunnels: BTreeMap<(u32, MacAddr), BTreeSet<To>>,
    nexthops: BTreeMap<u32, NexthopTarget>,
    bridges: BTreeMap<(u32, MacAddr), (u32, bool)>,
    neighbours: BTreeMap<(u32, IpAddr), (MacAddr, bool, bool)>,
    /// By network, table and metric.
    routes: BTreeMap<(NetworkPrefix, u32, u32), Vec<RouteHop>>,
}

/// State of segments by VNI: flood list, addresses, bindings and routes; and the weights of the VTEPs of groups.
type Items = (
    BTreeSet<(u32, IpAddr)>,
    BTreeMap<(u32, MacAddr), ExternalPlace>,
    BTreeMap<(u32, IpAddr), (MacAddr, bool)>,
    BTreeMap<(u32, NetworkPrefix), Vec<MacAddr>>,
    BTreeMap<u32, BTreeMap<IpAddr, u16>>,
);

fn tunnel_message((device, mac): (u32, MacAddr), to: To, removed: bool) -> Message {
    let (vtep, nexthop) = match to {
        To::Vtep(vtep) => (Some(vtep), None),
        To::Nexthop(id) => (None, Some(id)),
    };
    Message::Fdb(Fdb::Tunnel(TunnelEntry { removed, device, mac, vtep, nexthop, vni: None }))
}

fn bridge_message((bridge, mac): (u32, MacAddr), (port, external): (u32, bool), removed: bool) -> Message {
    Message::Fdb(Fdb::Bridge(BridgeEntry { removed, bridge, port, mac, vlan: None, external }))
}

fn neighbour_message((index, address): (u32, IpAddr), host: Option<(MacAddr, bool, bool)>) -> Message {
    let (mac, external, is_router) = host.map_or((None, false, false), |(mac, a, b)| (Some(mac), a, b));
    let state = if mac.is_some() { NudState::Fixed } else { NudState::None };
    Message::Neighbour(Neighbour { index, address, state, mac, external, is_router, protocol: 11 })
}

fn route_message((to, table, metric): (NetworkPrefix, u32, u32), hops: &[RouteHop], removed: bool) -> Message {
    Message::Route(Route { removed, to: to.address(), len: to.len(), table, metric, hops: hops.to_vec() })
}

impl Kernel {
    /// Makes a change that the bytes choose. Returns its messages.
    fn change(&mut self, input: &mut Input<'_>) -> Vec<Message> {
        let what = input.byte();
        match what % 16 {
            0..3 => self.set_link(input),
            3 => self.remove_link(input),
            4..7 => self.set_tunnel(input),
            7 => {
                let key = (input.pick(&TUNNELS).0, input.pick(&[MacAddr::ZERO, mac(0), mac(1), mac(2), mac(3)]));
                let Some(all) = self.tunnels.get_mut(&key) else { return Vec::new() };
                let to = input.byte();
                let to = all.iter().copied().nth(usize::from(to) % all.len()).expect("an entry");
                all.remove(&to);
                if all.is_empty() {
                    self.tunnels.remove(&key);
                }
                vec![tunnel_message(key, to, true)]
            }
            8 | 9 => self.set_place(input),
            10 => {
                let key = (input.pick(&BRIDGES), mac(input.byte()));
                let place = self.bridges.remove(&key);
                place.into_iter().map(|place| bridge_message(key, place, true)).collect()
            }
            11 | 12 => {
                let key = (input.pick(&BRIDGES), address(input.byte()));
                if !self.links.contains_key(&key.0) {
                    return Vec::new();
                }
                let flags = input.byte();
                if flags < 64 {
                    return self.neighbours.remove(&key).map(|_| neighbour_message(key, None)).into_iter().collect();
                }
                let host = (mac(flags >> 2), flags & 1 == 1, flags & 2 == 2);
                self.neighbours.insert(key, host);
                vec![neighbour_message(key, Some(host))]
            }
            13 => {
                let id = 1 + u32::from(input.byte() % 4);
                let how = input.byte();
                if how < 64 {
                    if self.nexthops.remove(&id).is_some() {
                        // The entries go along, without messages.
                        self.tunnels.values_mut().for_each(|all| all.retain(|to| *to != To::Nexthop(id)));
                        self.tunnels.retain(|_, all| !all.is_empty());
                    }
                    return vec![Message::Nexthop(Nexthop { id, to: None })];
                }
                let to = match id {
                    // Groups have single objects as members.
                    3 | 4 => {
                        let weight = 1 + u16::from(how >> 4 & 1);
                        NexthopTarget::Group((1..3).filter(|it| how >> it & 1 == 1).map(|it| (it, weight)).collect())
                    }
                    _ => NexthopTarget::Vtep(vtep(how)),
                };
                self.nexthops.insert(id, to.clone());
                vec![Message::Nexthop(Nexthop { id, to: Some(to) })]
            }
            _ => self.set_route(input),
        }
    }

    fn set_link(&mut self, input: &mut Input<'_>) -> Vec<Message> {
        let (which, how) = (input.byte(), input.byte());
        let all: Vec<u32> = BRIDGES.into_iter().chain(TUNNELS.map(|it| it.0)).chain(OTHERS).collect();
        let index = all[usize::from(which) % all.len()];
        let kind = match TUNNELS.iter().find(|(it, _)| *it == index) {
            Some((_, vni)) => LinkKind::Vxlan(Vxlan { vni: *vni, local: None, port: 4789, learning: false }),
            None if BRIDGES.contains(&index) => LinkKind::Bridge,
            None => LinkKind::Other,
        };
        let bridge = BRIDGES[usize::from(how) % 2];
        let may_have_master = kind != LinkKind::Bridge && self.links.contains_key(&bridge);
        let master = Some(bridge).filter(|_| how & 2 == 2 && may_have_master);
        let up = how & 0x0c != 0;
        let link = Link { index, name: format!("link{index}"), alias: None, mac: None, master, up, kind };
        let mut messages = Vec::new();
        let old = self.links.insert(index, link.clone()).and_then(|old| old.master);
        if old != master {
            messages.extend(self.leave_bridge(index));
        }
        if !up {
            messages.extend(self.remove_hops(index));
        }
        messages.push(Message::Link(link));
        messages
    }

    /// Removes the places of addresses behind a port that leaves its bridge.
    fn leave_bridge(&mut self, port: u32) -> Vec<Message> {
        let gone: Vec<_> = self.bridges.extract_if(.., |_, place| place.0 == port).collect();
        gone.into_iter().map(|(key, place)| bridge_message(key, place, true)).collect()
    }

    /// Removes the next hops of routes behind an interface. IPv4 has no messages about it.
    fn remove_hops(&mut self, index: u32) -> Vec<Message> {
        let mut messages = Vec::new();
        for (key, hops) in &mut self.routes {
            let gone: Vec<RouteHop> = hops.extract_if(.., |hop| hop.index == index).collect();
            if !gone.is_empty() && key.0.is_ipv6() {
                messages.push(route_message(*key, &gone, true));
            }
        }
        self.routes.retain(|_, hops| !hops.is_empty());
        messages
    }

    fn remove_link(&mut self, input: &mut Input<'_>) -> Vec<Message> {
        let all: Vec<u32> = self.links.keys().copied().collect();
        if all.is_empty() {
            return Vec::new();
        }
        let index = input.pick(&all);
        let mut messages = Vec::new();
        if BRIDGES.contains(&index) {
            // The ports of a bridge stay.
            let ports: Vec<u32> =
                self.links.values().filter(|link| link.master == Some(index)).map(|link| link.index).collect();
            for port in ports {
                messages.extend(self.leave_bridge(port));
                let link = self.links.get_mut(&port).expect("a link");
                link.master = None;
                messages.push(Message::Link(link.clone()));
            }
        }
        messages.extend(self.leave_bridge(index));
        messages.extend(self.remove_hops(index));
        self.links.remove(&index);
        self.tunnels.retain(|(device, _), _| *device != index);
        self.bridges.retain(|(bridge, _), _| *bridge != index);
        self.neighbours.retain(|(interface, _), _| *interface != index);
        messages.push(Message::LinkRemoved(index));
        messages
    }

    fn set_tunnel(&mut self, input: &mut Input<'_>) -> Vec<Message> {
        let (which, to) = (input.byte(), input.byte());
        let device = TUNNELS[usize::from(which) % 3].0;
        if !self.links.contains_key(&device) {
            return Vec::new();
        }
        let is_flood = which & 0x80 != 0;
        let key = (device, if is_flood { MacAddr::ZERO } else { mac(which >> 3) });
        let to = match to {
            // Entries may refer to objects that exist.
            0..80 if !is_flood && self.nexthops.contains_key(&(1 + u32::from(to % 4))) => {
                To::Nexthop(1 + u32::from(to % 4))
            }
            _ => To::Vtep(vtep(to)),
        };
        let all = self.tunnels.entry(key).or_default();
        if !is_flood {
            // A unicast address has one destination. The kernel does not report the removal of the former one.
            all.clear();
        }
        all.insert(to);
        vec![tunnel_message(key, to, false)]
    }

    fn set_place(&mut self, input: &mut Input<'_>) -> Vec<Message> {
        let bridge = input.pick(&BRIDGES);
        let ports: Vec<u32> =
            self.links.values().filter(|link| link.master == Some(bridge)).map(|link| link.index).collect();
        if ports.is_empty() {
            return Vec::new();
        }
        let (key, place) = ((bridge, mac(input.byte())), (input.pick(&ports), input.byte() & 1 == 1));
        self.bridges.insert(key, place);
        vec![bridge_message(key, place, false)]
    }

    fn set_route(&mut self, input: &mut Input<'_>) -> Vec<Message> {
        let (which, how) = (input.byte(), input.byte());
        let key = (prefix(which), 254 + u32::from(which >> 2 & 1), 20 + u32::from(which >> 3 & 1));
        if how < 64 {
            let Some(hops) = self.routes.get_mut(&key) else { return Vec::new() };
            if key.0.is_ipv6() && hops.len() > 1 {
                let hop = hops.remove(usize::from(how) % hops.len());
                return vec![route_message(key, &[hop], true)];
            }
            let hops = self.routes.remove(&key).unwrap_or_default();
            return vec![route_message(key, &hops, true)];
        }
        let bridges: Vec<u32> =
            BRIDGES.into_iter().filter(|it| self.links.get(it).is_some_and(|link| link.up)).collect();
        if bridges.is_empty() {
            return Vec::new();
        }
        let mut hops: Vec<RouteHop> =
            (0..1 + how % 2).map(|_| RouteHop { index: input.pick(&bridges), via: Some(vtep(input.byte())) }).collect();
        hops.sort_by_key(|hop| (hop.index, hop.via));
        hops.dedup();
        self.routes.insert(key, hops.clone());
        vec![route_message(key, &hops, false)]
    }

    /// Returns the messages of a dump, one list for each table.
    fn dump(&self) -> [Vec<Message>; 6] {
        let tunnels = self.tunnels.iter().flat_map(|(key, all)| all.iter().map(|to| tunnel_message(*key, *to, false)));
        [
            self.links.values().cloned().map(Message::Link).collect(),
            tunnels.collect(),
            self.nexthops.iter().map(|(id, to)| Message::Nexthop(Nexthop { id: *id, to: Some(to.clone()) })).collect(),
            self.bridges.iter().map(|(key, place)| bridge_message(*key, *place, false)).collect(),
            self.neighbours.iter().map(|(key, host)| neighbour_message(*key, Some(*host))).collect(),
            self.routes.iter().map(|(key, hops)| route_message(*key, hops, false)).collect(),
        ]
    }

    /// Returns what follows from the tables for segments with these VNIs.
    fn items(&self, watched: &HashSet<u32>) -> Items {
        let mut items = Items::default();
        for vni in VNIS.into_iter().filter(|vni| watched.contains(vni)) {
            let of_vni = TUNNELS.iter().filter(|(_, of)| *of == vni).filter_map(|(index, _)| self.links.get(index));
            let Some(device) = of_vni.min_by_key(|link| (link.master.is_none(), link.index)) else { continue };
            let (vxlan, bridge) = (device.index, device.master);
            for ((_, mac), all) in self.tunnels.range((vxlan, MacAddr::ZERO)..=(vxlan, MacAddr([0xff; 6]))) {
                if *mac == MacAddr::ZERO {
                    let vteps = all.iter().filter_map(|to| if let To::Vtep(vtep) = to { Some(*vtep) } else { None });
                    items.0.extend(vteps.map(|vtep| (vni, vtep)));
                    continue;
                }
                let place = bridge.and_then(|bridge| self.bridges.get(&(bridge, *mac)));
                if place.is_none_or(|(port, _)| *port == vxlan)
                    && let Some(to) = all.first()
                {
                    let place = match to {
                        To::Vtep(vtep) => ExternalPlace::Vtep(*vtep),
                        To::Nexthop(id) => ExternalPlace::Group(*id),
                    };
                    items.1.insert((vni, *mac), place);
                }
            }
            let Some(bridge) = bridge else { continue };
            let host = |address: IpAddr| {
                let (mac, external, is_router) = self.neighbours.get(&(bridge, address))?;
                external.then_some((*mac, *is_router))
            };
            for address in self.neighbours.keys().filter(|(index, _)| *index == bridge).map(|(_, address)| *address) {
                items.2.extend(host(address).map(|host| ((vni, address), host)));
            }
            let mut best: BTreeMap<(NetworkPrefix, u32), &[RouteHop]> = BTreeMap::new();
            for ((to, table, _), hops) in &self.routes {
                // They are in the order of their metrics.
                best.entry((*to, *table)).or_insert(hops);
            }
            for ((to, _), hops) in best {
                let vteps = hops.iter().filter(|hop| hop.index == bridge).filter_map(|hop| hop.via);
                let routers: Vec<MacAddr> = vteps.filter_map(|vtep| Some(host(vtep)?.0)).collect();
                if !routers.is_empty() {
                    items.3.entry((vni, to)).or_default().extend(routers);
                }
            }
        }
        for (id, to) in &self.nexthops {
            let members = match to {
                NexthopTarget::Vtep(_) => vec![(*id, 1)],
                NexthopTarget::Group(members) => members.clone(),
            };
            for (member, weight) in members {
                if let Some(NexthopTarget::Vtep(vtep)) = self.nexthops.get(&member) {
                    *items.4.entry(*id).or_default().entry(*vtep).or_default() += weight;
                }
            }
        }
        for routers in items.3.values_mut() {
            routers.sort_unstable();
            routers.dedup();
        }
        items
    }
}

/// Adds the changes of a mirror to what it has reported.
fn report(mirror: &mut Mirror, reported: &mut Items) {
    let changes = std::mem::take(&mut mirror.changes);
    for (key, listed) in changes.flood {
        _ = if listed { reported.0.insert(key) } else { reported.0.remove(&key) };
    }
    for (id, members) in changes.groups {
        _ = match members.is_empty() {
            true => reported.4.remove(&id),
            false => reported.4.insert(id, members.into_iter().collect()),
        };
    }
    for (key, place) in changes.macs {
        _ = match place {
            Some(place) => reported.1.insert(key, place),
            None => reported.1.remove(&key),
        };
    }
    for (key, host) in changes.bindings {
        _ = match host {
            Some(host) => reported.2.insert(key, host),
            None => reported.2.remove(&key),
        };
    }
    for (key, routers) in changes.routes {
        _ = if routers.is_empty() { reported.3.remove(&key) } else { reported.3.insert(key, routers) };
    }
    mirror.vanished.clear();
    mirror.vanished_neighbours.clear();
}

/// Runs the steps that these bytes choose.
///
/// # Panics
/// If the mirror differs from the tables of the kernel.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let (mut kernel, mut mirror) = (Kernel::default(), Mirror::default());
    let mut watched: HashSet<u32> = VNIS.into();
    mirror.watch(&watched);
    let mut reported = Items::default();
    let mut lost = false;
    let mut log = Vec::new();
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        match input.byte() {
            0..220 => {
                let messages = kernel.change(&mut input);
                log.push(format!("{messages:?}{}", if lost { " lost" } else { "" }));
                if !lost {
                    messages.iter().for_each(|message| mirror.apply(message));
                }
            }
            220..230 => {
                lost = true;
                log.push("loss".to_owned());
            }
            230..248 => {
                let how = input.byte();
                log.push("dump".to_owned());
                mirror.begin();
                for number in 0..6 {
                    // The tables are read at different times, in any order.
                    let table = (number + usize::from(how)) % 6;
                    kernel.dump()[table].iter().for_each(|message| mirror.apply(message));
                    if how >> number & 1 == 1 {
                        let messages = kernel.change(&mut input);
                        log.push(format!("{messages:?} during the dump, behind table {table}"));
                        messages.iter().for_each(|message| mirror.apply(message));
                    }
                }
                mirror.finish();
                lost = false;
            }
            _ => {
                watched = VNIS.into_iter().filter(|_| input.byte() & 1 == 1).collect();
                log.push(format!("watch {watched:?}"));
                mirror.watch(&watched);
            }
        }
        report(&mut mirror, &mut reported);
        let is_watched = |vni: &u32| watched.contains(vni);
        reported.0.retain(|(vni, _)| is_watched(vni));
        reported.1.retain(|(vni, _), _| is_watched(vni));
        reported.2.retain(|(vni, _), _| is_watched(vni));
        reported.3.retain(|(vni, _), _| is_watched(vni));
        if lost {
            continue;
        }
        let expected = kernel.items(&watched);
        assert!(reported == expected, "{}\nreported {reported:?}\nexpected {expected:?}", log.join("\n"));
        for vni in VNIS {
            let counts = Counts {
                flood: expected.0.iter().filter(|it| it.0 == vni).count(),
                macs: expected.1.keys().filter(|it| it.0 == vni).count(),
                bindings: expected.2.keys().filter(|it| it.0 == vni).count(),
                routes: expected.3.keys().filter(|it| it.0 == vni).count(),
            };
            assert_eq!(mirror.counts(vni), counts, "{}", log.join("\n"));
        }
    }
    assert_eq!(mirror.stats.refused, 0);
}

#[cfg(test)]
mod tests {
    use super::run;

    /// Prints the seed of a sequence that fails.
    struct Seed(u64);

    impl Drop for Seed {
        fn drop(&mut self) {
            if std::thread::panicking() {
                println!("the seed is {}", self.0);
            }
        }
    }

    #[test]
    fn random_sequences_agree_with_the_tables_of_the_kernel() {
        for seed in 0..5000 {
            let _printed = Seed(seed);
            let mut random = fastrand::Rng::with_seed(seed);
            let data: Vec<u8> = (0..random.usize(20..800)).map(|_| random.u8(..)).collect();
            run(&data);
        }
    }
}
