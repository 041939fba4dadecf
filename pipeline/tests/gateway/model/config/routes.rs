//! Static routes of the configurations.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::super::Input;
use super::{Config, GRE, GREEN, IPIP, REMOTES, SLOTS, VRFS, far_router, neighbour, remote_address, silent_member};

/// Target of a static route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Blackhole,
    Prohibit,
    Unreachable,
    /// The tunnel of this slot.
    Tunnel(usize),
    /// The router behind a remote of the first slot.
    Router(u8),
    /// The neighbour in the network of the first slot, or in that of [`GREEN`] in the second VRF.
    Neighbour,
    /// The route of the other VRF.
    Lookup,
    /// Next hops that share the flows: those of [`MEMBERS`] whose bits are set, as far as they exist.
    Group(u8),
}

/// Networks of static routes. Some contain others, or networks of segments.
pub(crate) const NETWORKS: [(IpAddr, u8); 9] = [
    v4(50, 0, 16),
    v4(60, 0, 16),
    v4(60, 1, 24),
    v4(0, 0, 8),
    v4(2, 0, 16),
    v6(0x50, 0, 32),
    v6(0x60, 0, 32),
    v6(0x60, 1, 48),
    v6(2, 0, 32),
];

const fn v4(second: u8, third: u8, len: u8) -> (IpAddr, u8) {
    (IpAddr::V4(Ipv4Addr::new(10, second, third, 0)), len)
}

const fn v6(second: u16, third: u16, len: u8) -> (IpAddr, u8) {
    (IpAddr::V6(Ipv6Addr::new(0xfd00, second, third, 0, 0, 0, 0, 0)), len)
}

/// Next hop of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Member {
    Neighbour,
    /// A host that never answers.
    Silent,
    Tunnel(usize),
    Router(u8),
}

/// Members of groups by their bit.
const MEMBERS: [Member; 8] = [
    Member::Neighbour,
    Member::Silent,
    Member::Tunnel(GRE),
    Member::Tunnel(IPIP),
    Member::Router(REMOTES[0]),
    Member::Router(REMOTES[1]),
    Member::Router(REMOTES[2]),
    Member::Router(REMOTES[3]),
];

impl Member {
    /// Writes the next hop of a route in a VRF.
    fn text(self, vrf: usize, is_v6: bool) -> String {
        let network = SLOTS[neighbour_slot(vrf)].network.expect("a router");
        match self {
            Self::Neighbour => format!("{{ via = '{}', weight = 2 }}", neighbour(network).0[usize::from(is_v6)]),
            Self::Silent => format!("{{ via = '{}', weight = 3 }}", silent_at(vrf, is_v6).1),
            Self::Tunnel(slot) => format!("{{ segment = '{}' }}", SLOTS[slot].name),
            Self::Router(remote) => format!(
                "{{ segment = '{}', remote = '{}', mac = '{}', weight = {} }}",
                SLOTS[0].name,
                remote_address(remote),
                far_router(remote),
                remote
            ),
        }
    }
}

pub(crate) type Routes = [[Option<Target>; NETWORKS.len()]; VRFS.len()];

impl Config {
    /// Returns the route to a network in a VRF, if its target exists.
    pub(crate) fn route(&self, vrf: usize, number: usize) -> Option<Target> {
        self.routes[vrf][number].filter(|target| match target {
            Target::Tunnel(slot) => self.segment_in(*slot, vrf).is_some(),
            Target::Router(remote) => self.segment_in(0, vrf).is_some_and(|it| it.remotes.contains(remote)),
            Target::Neighbour => self.segment_in(neighbour_slot(vrf), vrf).is_some(),
            Target::Group(mask) => !self.members(vrf, *mask).is_empty(),
            Target::Blackhole | Target::Prohibit | Target::Unreachable | Target::Lookup => true,
        })
    }

    /// Returns the members of a group that exist in a VRF.
    pub(crate) fn members(&self, vrf: usize, mask: u8) -> Vec<Member> {
        let exists = |member: &Member| match member {
            Member::Neighbour | Member::Silent => self.segment_in(neighbour_slot(vrf), vrf).is_some(),
            Member::Tunnel(slot) => self.segment_in(*slot, vrf).is_some(),
            Member::Router(remote) => self.segment_in(0, vrf).is_some_and(|it| it.remotes.contains(remote)),
        };
        let chosen = MEMBERS.into_iter().enumerate().filter(|(bit, _)| mask >> bit & 1 == 1);
        chosen.map(|(_, member)| member).filter(exists).collect()
    }

    /// Returns the hosts that never answer and are members of groups, each with its routes: slot and address, VRF and
    /// number.
    pub(crate) fn silent_members(&self) -> HashMap<(usize, IpAddr), Vec<(usize, usize)>> {
        let mut hosts: HashMap<_, Vec<_>> = HashMap::new();
        for (vrf, number) in (0..VRFS.len()).flat_map(|vrf| (0..NETWORKS.len()).map(move |number| (vrf, number))) {
            if let Some(Target::Group(mask)) = self.route(vrf, number)
                && self.members(vrf, mask).contains(&Member::Silent)
            {
                hosts.entry(silent_at(vrf, NETWORKS[number].0.is_ipv6())).or_default().push((vrf, number));
            }
        }
        hosts
    }

    /// Takes hosts that never answer from all groups if it depends on the order of changes whether one is asked anew:
    /// it leaves all its routes and gets others.
    pub(crate) fn avoid_exchanged_members(&mut self, before: &Self) {
        let (old, new) = (before.silent_members(), self.silent_members());
        let is_exchanged = |(host, routes): (&(usize, IpAddr), &Vec<(usize, usize)>)| {
            old.get(host).is_some_and(|old| !old.iter().any(|route| routes.contains(route)))
        };
        if new.iter().any(is_exchanged) {
            for target in self.routes.as_flattened_mut().iter_mut().flatten() {
                if let Target::Group(mask) = target {
                    *mask &= !2;
                }
            }
        }
    }

    pub(super) fn routes_text(&self, vrf: usize) -> Vec<String> {
        let mut routes = Vec::new();
        for (number, (network, len)) in NETWORKS.iter().enumerate() {
            let Some(target) = self.route(vrf, number) else { continue };
            let target = match target {
                Target::Blackhole => "discard = 'blackhole'".to_owned(),
                Target::Prohibit => "discard = 'prohibit'".to_owned(),
                Target::Unreachable => "discard = 'unreachable'".to_owned(),
                Target::Tunnel(slot) => format!("next_hops = [{{ segment = '{}' }}]", SLOTS[slot].name),
                Target::Router(remote) => format!(
                    "next_hops = [{{ segment = '{}', remote = '{}', mac = '{}' }}]",
                    SLOTS[0].name,
                    remote_address(remote),
                    far_router(remote)
                ),
                Target::Neighbour => {
                    let (addresses, _) = neighbour(SLOTS[neighbour_slot(vrf)].network.expect("a router"));
                    format!("via = ['{}']", addresses[usize::from(network.is_ipv6())])
                }
                Target::Group(mask) => {
                    let hop = |member: Member| member.text(vrf, network.is_ipv6());
                    let hops: Vec<_> = self.members(vrf, mask).into_iter().map(hop).collect();
                    format!("next_hops = [{}]", hops.join(", "))
                }
                Target::Lookup => format!("lookup = '{}'", VRFS[1 - vrf]),
            };
            routes.push(format!("{{ to = '{network}/{len}', {target} }}"));
        }
        routes
    }
}

/// Returns the host that never answers in groups of this VRF: its slot and address.
pub(crate) fn silent_at(vrf: usize, is_v6: bool) -> (usize, IpAddr) {
    let slot = neighbour_slot(vrf);
    (slot, silent_member(SLOTS[slot].network.expect("a router"))[usize::from(is_v6)])
}

/// Returns the slot whose neighbour is a next hop in this VRF.
pub(crate) fn neighbour_slot(vrf: usize) -> usize {
    [0, GREEN][vrf]
}

pub(super) fn target(input: &mut Input<'_>) -> Option<Target> {
    match input.byte() % 16 {
        0 => Some(Target::Blackhole),
        1 => Some(Target::Prohibit),
        2 => Some(Target::Unreachable),
        3 => Some(Target::Tunnel(GRE)),
        4 => Some(Target::Tunnel(IPIP)),
        5..=7 => Some(Target::Router(REMOTES[usize::from(input.byte()) % 4])),
        8 | 9 => Some(Target::Neighbour),
        10 => Some(Target::Lookup),
        11..=14 => Some(Target::Group(input.byte())),
        _ => None,
    }
}
