//! Configurations of a gateway that a sequence of bytes chooses.
//!
//! Each segment of the configurations has a *slot*: its kind of tunnel, its identifier, and the ports and remotes that
//! it may have. A configuration says which slots are in use, and how.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_wire::MacAddr;

use super::Input;
use super::wire::{Kind, OUR_SID};

mod routes;

use routes::target;
pub(crate) use routes::{Member, NETWORKS, Routes, Target, neighbour_slot, silent_at};

pub(crate) const PORTS: [&str; 4] = ["wan", "lan", "lan2", "lan3"];
/// Largest layer-3 packets of the ports.
pub(crate) const PORT_MTU: [u16; 4] = [1500, 1500, 1400, 1300];
const LAN: u16 = 1;
const LAN2: u16 = 2;
const LAN3: u16 = 3;

/// A segment: its name, kind and identifier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) id: Option<u32>,
    /// Number of the network of its router.
    pub(crate) network: Option<u8>,
}

const fn slot(name: &'static str, kind: Kind, id: Option<u32>, network: Option<u8>) -> Slot {
    Slot { name, kind, id, network }
}

pub(crate) const SLOTS: [Slot; 12] = [
    slot("red", Kind::Vxlan, Some(100), Some(1)),
    slot("blue", Kind::Vxlan, Some(200), Some(3)),
    slot("green", Kind::Geneve, Some(100), Some(2)),
    slot("grey", Kind::VxlanGpe, Some(100), None),
    slot("keyed", Kind::Gretap, Some(7), None),
    slot("plain", Kind::Gretap, None, None),
    slot("subnet", Kind::Nvgre, Some(300), None),
    slot("label", Kind::MplsUdp, Some(400), None),
    slot("label2", Kind::MplsGre, Some(400), None),
    slot("sid", Kind::Srv6, None, None),
    slot("tunnel", Kind::Gre, Some(9), None),
    slot("tunnel2", Kind::Ipip, None, None),
];
pub(crate) const NVGRE: usize = 6;
const SRV6: usize = 9;
const GRE: usize = 10;
const IPIP: usize = 11;
/// Slot with a network that may be in the second VRF, as [`IPIP`] may.
const GREEN: usize = 2;

/// VRFs: that of nearly all segments, and another one.
pub(crate) const VRFS: [&str; 2] = ["default", "other"];

/// A local port, and a VLAN.
pub(crate) type Attached = (u16, Option<u16>);

/// Returns the attachment of a slot with this number below 3.
pub(crate) fn attached(slot: usize, number: usize) -> Attached {
    let vlan = slot as u16;
    match (slot, number) {
        (0, 0) => (LAN, None),
        (0, 1) => (LAN2, None),
        (1, 0) => (LAN3, None),
        (_, 1) => (LAN2, Some(10 + vlan)),
        (_, 2) => (LAN, Some(40 + vlan)),
        _ => (LAN, Some(10 + vlan)),
    }
}

/// Remotes: two with IPv4 addresses, two with IPv6 addresses.
pub(crate) const REMOTES: [u8; 4] = [2, 3, 4, 5];
/// Remote of the slot with a SID, which is the gateway to the SID too.
const SID_REMOTE: u8 = 4;

pub(crate) fn remote_address(remote: u8) -> IpAddr {
    match remote {
        2 | 3 => Ipv4Addr::new(10, 9, 0, remote).into(),
        _ => Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, remote.into()).into(),
    }
}

pub(crate) fn remote_mac(remote: u8) -> MacAddr {
    MacAddr([2, 9, 9, 9, 9, remote])
}

/// Returns the SID behind [`SID_REMOTE`].
pub(crate) fn remote_sid() -> Ipv6Addr {
    Ipv6Addr::new(0xfc00, SID_REMOTE.into(), 0, 0, 0, 0, 0, 1)
}

/// Ethernet address of a host.
pub(crate) fn host(number: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 1, number % 8])
}

/// Ethernet address of the router behind a remote of the first slot.
pub(crate) fn far_router(remote: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 9, remote])
}

/// Returns the addresses of both versions with this number in a network.
pub(crate) fn addresses(network: u8, number: u8) -> [IpAddr; 2] {
    let v6 = Ipv6Addr::new(0xfd00, network.into(), 0, 0, 0, 0, 0, number.into());
    [Ipv4Addr::new(10, network, 0, number).into(), v6.into()]
}

/// Addresses of the router of a slot with this network.
pub(crate) fn router_addresses(network: u8) -> [IpAddr; 2] {
    addresses(network, 1)
}

/// Addresses and Ethernet address of the host in a network that answers ARP and neighbour discovery. It is at the first
/// attachment.
pub(crate) fn neighbour(network: u8) -> ([IpAddr; 2], MacAddr) {
    (addresses(network, 10), MacAddr([2, 0, 0, 0, 3, network]))
}

/// Returns the IP addresses of a host in a slot.
pub(crate) fn host_addresses(slot: usize, number: u8) -> [IpAddr; 2] {
    addresses(SLOTS[slot].network.unwrap_or(1), 100 + number % 8)
}

/// Addresses of a host in a network that never answers.
pub(crate) fn silent_host(network: u8) -> [IpAddr; 2] {
    addresses(network, 200)
}

/// Addresses of another such host, which is a member of groups.
pub(crate) fn silent_member(network: u8) -> [IpAddr; 2] {
    addresses(network, 201)
}

/// Addresses of a network over IPv4 that no host has.
pub(crate) fn reserved_addresses(network: u8) -> [IpAddr; 2] {
    [addresses(network, 0)[0], addresses(network, 255)[0]]
}

/// Place of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Port(Attached),
    Remote(u8),
    Router,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) at: Attached,
    pub(crate) isolated: bool,
    pub(crate) sticky: bool,
    pub(crate) limit: Option<usize>,
}

/// A fixed binding of an IP address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StaticBinding {
    pub(crate) ip: IpAddr,
    pub(crate) mac: MacAddr,
    pub(crate) is_router: bool,
}

/// Settings of a slot in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) ports: Vec<Port>,
    pub(crate) remotes: Vec<u8>,
    pub(crate) accept_unknown: bool,
    pub(crate) learning: bool,
    pub(crate) carries_tags: bool,
    /// Largest IP packet in the tunnels.
    pub(crate) mtu: Option<u16>,
    pub(crate) ageing: u32,
    pub(crate) limit: Option<usize>,
    pub(crate) remote_limit: Option<usize>,
    /// Moves that freeze an address; 0: no limit. [`MOVE_WINDOW`] and [`FREEZE_TIME`] are the times.
    pub(crate) moves: u32,
    /// Limits of flooded frames per second: broadcast, multicast and unknown unicast.
    pub(crate) storm: [Option<u32>; 3],
    /// Messages of ARP and neighbour discovery are answered for hosts.
    pub(crate) suppression: bool,
    pub(crate) bindings: Vec<StaticBinding>,
    /// Hosts at fixed places.
    pub(crate) statics: Vec<(u8, Place)>,
    /// Number of the router's VRF in [`VRFS`].
    pub(crate) vrf: usize,
}

pub(crate) const MOVE_WINDOW: u32 = 10;
pub(crate) const FREEZE_TIME: u32 = 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// Settings of the slots in use.
    pub(crate) segments: [Option<Segment>; SLOTS.len()],
    /// Targets of the routes to [`NETWORKS`] in each of [`VRFS`].
    pub(crate) routes: Routes,
}

impl Config {
    pub(crate) fn read(input: &mut Input<'_>) -> Self {
        let used = input.byte() | 1;
        let more = input.byte();
        let in_use = |slot: usize| match slot {
            0..8 => used >> slot & 1 == 1,
            _ => more >> (slot - 8) & 1 == 1,
        };
        let mut config = Self { segments: Default::default(), routes: Routes::default() };
        for slot in (0..SLOTS.len()).filter(|slot| in_use(*slot)) {
            config.segments[slot] = Some(segment(input, slot));
        }
        config.complete();
        config.routes.as_flattened_mut().fill_with(|| target(input));
        config
    }

    /// Changes one thing.
    pub(crate) fn change(&mut self, input: &mut Input<'_>) {
        let slot = usize::from(input.byte()) % SLOTS.len();
        let what = input.byte();
        if what >= 200 {
            let keeps = slot == 0 || self.segments[slot].is_none();
            self.segments[slot] = keeps.then(|| segment(input, slot));
            return self.complete();
        }
        let Some(it) = &mut self.segments[slot] else { return };
        let value = input.byte();
        match what % 8 {
            0 if !SLOTS[slot].kind.carries_ip() && slot != SRV6 => {
                let remote = REMOTES[usize::from(value) % 4];
                match it.remotes.iter().position(|known| *known == remote) {
                    Some(at) => _ = it.remotes.remove(at),
                    None => it.remotes.push(remote),
                }
            }
            1 if !SLOTS[slot].kind.carries_ip() => {
                let at = attached(slot, 1 + usize::from(value) % 2);
                match it.ports.iter().position(|port| port.at == at) {
                    Some(at) => _ = it.ports.remove(at),
                    None => it.ports.push(Port { at, isolated: false, sticky: false, limit: None }),
                }
            }
            7 => it.mtu = MTU[usize::from(value) % MTU.len()],
            // Other changes of the same limits leave their buckets as they are.
            3 if value >= 128 && !SLOTS[slot].kind.carries_ip() => it.storm = storm(value.rotate_left(3) | 0x80),
            2 => it.ageing = AGEING[usize::from(value) % AGEING.len()],
            3 if slot != SRV6 && !SLOTS[slot].kind.carries_ip() => it.accept_unknown ^= true,
            4 if value < 128 => it.learning ^= true,
            4 => (it.suppression, it.bindings) = suppression(value.rotate_left(1) ^ 1, slot),
            6 if [GREEN, IPIP].contains(&slot) => it.vrf ^= 1,
            5 if !SLOTS[slot].kind.carries_ip() => {
                let fresh =
                    segment(&mut Input(&[value, value.rotate_left(3), value.rotate_left(5), value, value]), slot);
                (it.limit, it.remote_limit, it.moves) = (fresh.limit, fresh.remote_limit, fresh.moves);
                for (port, with) in it.ports.iter_mut().zip(fresh.ports) {
                    *port = Port { at: port.at, ..with };
                }
            }
            _ => {}
        }
        self.complete();
    }

    /// Adds or replaces the route to a network, or removes it.
    pub(crate) fn change_route(&mut self, input: &mut Input<'_>) {
        let routes = self.routes.as_flattened_mut();
        routes[usize::from(input.byte()) % routes.len()] = target(input);
    }

    /// Makes a configuration valid.
    fn complete(&mut self) {
        if self.segments[NVGRE].is_some() {
            // Packets of both kinds are alike.
            (self.segments[4], self.segments[5]) = (None, None);
        }
        for (slot, segment) in SLOTS.iter().zip(&mut self.segments) {
            let Some(segment) = segment else { continue };
            segment.accept_unknown |= segment.remotes.is_empty() && slot.network.is_none();
            segment.keep_statics();
        }
    }

    /// Returns the segment of a slot that is in use, with its router in this VRF.
    pub(crate) fn segment_in(&self, slot: usize, vrf: usize) -> Option<&Segment> {
        self.segments[slot].as_ref().filter(|segment| segment.vrf == vrf)
    }

    /// Writes the configuration as a file.
    pub(crate) fn text(&self) -> String {
        let mut text = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
                        gateways = ['fd00:9::4']\n"
            .to_owned();
        for (slot, segment) in SLOTS.iter().zip(&self.segments) {
            if let Some(segment) = segment {
                segment.write(*slot, &mut text);
            }
        }
        for (vrf, name) in VRFS.iter().enumerate() {
            let routes = self.routes_text(vrf).join(", ");
            writeln!(text, "[[vrf]]\nname = '{name}'\nroutes = [{routes}]").unwrap();
        }
        text
    }
}

const MTU: [Option<u16>; 8] = [None, None, None, None, Some(1400), Some(1280), Some(600), Some(300)];
const AGEING: [u32; 5] = [300, 0, 5, 30, 2];

/// Returns limits of flooded frames, none for half of the values. The rates divide a second.
fn storm(byte: u8) -> [Option<u32>; 3] {
    let limit = |at: u8| [None, None, Some(1), Some(20)][usize::from(byte >> at & 3)];
    if byte & 0x80 == 0 {
        [None; 3]
    } else {
        [limit(0), limit(2), limit(4)].map(|it| it.map(|rate| if byte & 0x40 == 0 { rate } else { 10 * rate }))
    }
}

/// Returns whether a slot answers messages for hosts, and with which bindings.
fn suppression(byte: u8, slot: usize) -> (bool, Vec<StaticBinding>) {
    let is_on = byte & 1 == 1 && !SLOTS[slot].kind.carries_ip();
    let number = byte >> 3 & 7;
    let ip = host_addresses(slot, number)[usize::from(byte >> 2 & 1)];
    let binding = StaticBinding { ip, mac: host(number ^ byte >> 7), is_router: byte & 0x40 != 0 };
    (is_on, if is_on && byte & 2 != 0 { vec![binding] } else { vec![] })
}

fn segment(input: &mut Input<'_>, slot: usize) -> Segment {
    let (places, rules, flags) = (input.byte(), input.byte(), input.byte());
    let carries_ip = SLOTS[slot].kind.carries_ip();
    // The first attachment has the host that answers ARP.
    let has = |number: usize| !carries_ip && (number == 0 || places >> number & 1 == 1);
    let port = |number: usize| Port {
        at: attached(slot, number),
        isolated: rules >> number & 1 == 1 && rules & 0x80 != 0,
        sticky: rules >> (3 + number) & 1 == 1 && rules & 0x40 != 0,
        limit: (rules & 0xc7 == 0xc7).then_some(1),
    };
    let mut remotes: Vec<u8> =
        REMOTES.into_iter().enumerate().filter(|(at, _)| places >> (4 + at) & 1 == 1).map(|(_, it)| it).collect();
    if carries_ip {
        remotes = vec![remotes.first().copied().unwrap_or(REMOTES[0])];
    } else if slot == SRV6 {
        remotes = vec![SID_REMOTE];
    }
    let mut segment = Segment {
        ports: (0..3).filter(|number| has(*number)).map(port).collect(),
        remotes,
        accept_unknown: flags & 3 == 3 && !carries_ip && slot != SRV6,
        learning: flags & 0x1c != 0x1c,
        carries_tags: slot == 1 && flags & 0x20 != 0,
        mtu: None,
        ageing: AGEING[usize::from(input.byte()) % AGEING.len()],
        limit: (flags & 0xc0 == 0xc0).then_some(2),
        remote_limit: (flags & 0xa0 == 0xa0).then_some(1),
        moves: if flags & 0x60 == 0x60 { 2 } else { 0 },
        storm: [None; 3],
        suppression: false,
        bindings: Vec::new(),
        statics: Vec::new(),
        vrf: usize::from([GREEN, IPIP].contains(&slot) && flags & 1 == 1),
    };
    let fixed = input.byte();
    segment.storm = storm(input.byte());
    (segment.suppression, segment.bindings) = suppression(input.byte(), slot);
    segment.mtu = MTU[usize::from(input.byte()) % MTU.len()];
    if fixed & 3 == 3 && !carries_ip {
        let place = match segment.remotes.get(usize::from(fixed >> 5)) {
            Some(remote) => Place::Remote(*remote),
            None => Place::Port(segment.ports[usize::from(fixed >> 5) % segment.ports.len()].at),
        };
        segment.statics.push((fixed >> 2 & 7, place));
    }
    if carries_ip {
        (segment.limit, segment.remote_limit, segment.moves, segment.learning) = (None, None, 0, true);
        segment.ageing = 300;
    }
    segment
}

impl Segment {
    pub(crate) fn port(&self, at: Attached) -> Option<&Port> {
        self.ports.iter().find(|port| port.at == at)
    }

    /// Returns the number of bytes in front of an IP packet in a frame of the segment: its tag counts if the segment
    /// carries tags, whether the frame has one or not.
    pub(crate) fn link_len(&self) -> usize {
        if self.carries_tags { 18 } else { 14 }
    }

    pub(crate) fn has(&self, place: Place) -> bool {
        match place {
            Place::Port(at) => self.port(at).is_some(),
            Place::Remote(remote) => self.remotes.contains(&remote),
            Place::Router => true,
        }
    }

    /// Removes static entries whose place has left.
    fn keep_statics(&mut self) {
        let statics = std::mem::take(&mut self.statics);
        self.statics = statics.into_iter().filter(|(_, place)| self.has(*place)).collect();
    }

    fn write(&self, slot: Slot, text: &mut String) {
        let Slot { name, kind, id, network } = slot;
        writeln!(text, "[[segment]]\nname = '{name}'\nkind = '{}'", kind.name()).unwrap();
        if let Some(id) = id {
            writeln!(text, "vni = {id}").unwrap();
        }
        let remotes: Vec<_> = self.remotes.iter().map(|remote| format!("'{}'", remote_address(*remote))).collect();
        writeln!(text, "remotes = [{}]", remotes.join(", ")).unwrap();
        if let Some(mtu) = self.mtu {
            writeln!(text, "mtu = {mtu}").unwrap();
        }
        if kind.carries_ip() {
            writeln!(text, "payload = 'ip'\nvrf = '{}'", VRFS[self.vrf]).unwrap();
            return;
        }
        if kind == Kind::Srv6 {
            let sid = remote_sid();
            writeln!(
                text,
                "local = 'fd00:9::1'\nsrv6 = {{ local_sid = '{OUR_SID}', segs = ['{sid}'], mode = 'encaps_red' }}"
            )
            .unwrap();
        }
        let port = |it: &Port| {
            let (port, vlan) = it.at;
            let vlan = vlan.map_or_else(String::new, |vlan| format!(", vlan = {vlan}"));
            let limit = it.limit.map_or_else(String::new, |limit| format!(", mac_limit = {limit}"));
            let name = PORTS[usize::from(port)];
            format!("{{ port = '{name}'{vlan}, isolated = {}, sticky = {}{limit} }}", it.isolated, it.sticky)
        };
        let ports: Vec<_> = self.ports.iter().map(port).collect();
        writeln!(text, "ports = [{}]", ports.join(", ")).unwrap();
        writeln!(text, "accept_unknown_remotes = {}\nlearning = {}", self.accept_unknown, self.learning).unwrap();
        writeln!(text, "ageing = {}", self.ageing).unwrap();
        if self.carries_tags {
            text.push_str("inner_vlans = 'carry'\n");
        }
        for (key, limit) in [("mac_limit", self.limit), ("remote_mac_limit", self.remote_limit)] {
            if let Some(limit) = limit {
                writeln!(text, "{key} = {limit}").unwrap();
            }
        }
        let binding =
            |it: &StaticBinding| format!("{{ address = '{}', mac = '{}', router = {} }}", it.ip, it.mac, it.is_router);
        let bindings: Vec<_> = self.bindings.iter().map(binding).collect();
        writeln!(text, "neighbour_suppression = {}", self.suppression).unwrap();
        writeln!(text, "neighbours = [{}]", bindings.join(", ")).unwrap();
        for (kind, limit) in ["broadcast", "multicast", "unknown_unicast"].into_iter().zip(self.storm) {
            if let Some(limit) = limit {
                writeln!(text, "{kind}_limit = {limit}").unwrap();
            }
        }
        if self.moves > 0 {
            let moves = self.moves;
            writeln!(text, "move_limit = {moves}\nmove_window = {MOVE_WINDOW}\nfreeze_time = {FREEZE_TIME}").unwrap();
        }
        if let Some(network) = network {
            let [v4, v6] = router_addresses(network);
            writeln!(text, "addresses = ['{v4}/24', '{v6}/64']\nvrf = '{}'", VRFS[self.vrf]).unwrap();
        }
        let fixed = |(number, place): &(u8, Place)| {
            let place = match *place {
                Place::Port((port, vlan)) => {
                    let vlan = vlan.map_or_else(String::new, |vlan| format!(", vlan = {vlan}"));
                    format!("port = '{}'{vlan}", PORTS[usize::from(port)])
                }
                Place::Remote(remote) => format!("remote = '{}'", remote_address(remote)),
                Place::Router => panic!("no host is at the router"),
            };
            format!("{{ mac = '{}', {place} }}", host(*number))
        };
        let statics: Vec<_> = self.statics.iter().map(fixed).collect();
        writeln!(text, "static = [{}]", statics.join(", ")).unwrap();
    }
}
