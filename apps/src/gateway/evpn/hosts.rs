//! Hosts behind local ports, which the routing daemon advertises: Ethernet addresses and IP addresses.
//!
//! An IP address is written as a permanent neighbour of the bridge without `extern_learn`, which FRR takes for a local
//! host (`netlink_ipneigh_change` in zebra/rt_netlink.c). The kernel never removes such an entry by itself: neither by
//! probes nor for want of room. `NUD_NOARP` would count against `gc_thresh3`. `NDA_PROTOCOL` tells own entries from
//! those of others, also after a crash.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use wirepath_pmd::rtnetlink::Requests;
use wirepath_wire::MacAddr;

use super::mirror::{Host, Mirror, NeighbourEntry};
use super::writer::{Entry, Kernel, WRITES, Writer, WriterStats};

/// `NDA_PROTOCOL` of own entries, a number that `/etc/iproute2/rt_protos` does not have.
pub(super) const PROTOCOL: u8 = 119;

impl Kernel<MacAddr, ()> for Requests {
    const NAME: &str = "local addresses";

    fn put(&mut self, port: u32, mac: MacAddr, (): ()) -> io::Result<bool> {
        self.put_address(port, mac).map(|()| true)
    }

    fn remove(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
        self.remove_address(port, mac)
    }
}

impl Kernel<IpAddr, Host> for Requests {
    const NAME: &str = "IP addresses of local hosts";

    fn put(&mut self, bridge: u32, address: IpAddr, (mac, is_router): Host) -> io::Result<bool> {
        self.put_neighbour(bridge, address, mac, is_router, PROTOCOL)
    }

    fn remove(&mut self, bridge: u32, address: IpAddr) -> io::Result<()> {
        self.remove_neighbour(bridge, address)
    }
}

/// Returns what the mirror knows about an Ethernet address behind a port.
pub(super) fn known_mac(mirror: &Mirror, vni: u32, port: u32, mac: MacAddr) -> Entry<()> {
    match mirror.place(vni, mac) {
        Some(place) if place.port == port && place.external => Entry::Own(()),
        _ => Entry::Unknown,
    }
}

fn known_neighbour(mirror: &Mirror, vni: u32, address: IpAddr) -> Entry<Host> {
    match mirror.neighbour(vni, address) {
        NeighbourEntry::None => Entry::Unknown,
        NeighbourEntry::Own(host) => Entry::Own(host),
        NeighbourEntry::Foreign => Entry::Foreign,
    }
}

/// The hosts, and what the kernel has of them.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    macs: Writer<MacAddr, ()>,
    /// IP addresses of hosts behind local ports.
    addresses: Writer<IpAddr, Host>,
    /// IP addresses of all hosts whose messages passed, also of those behind remotes.
    bindings: HashMap<(u32, IpAddr), Host>,
    by_mac: HashMap<(u32, MacAddr), HashSet<IpAddr>>,
}

impl Hosts {
    /// Takes an Ethernet address that appeared at a local port or went from there.
    pub(super) fn change_mac(&mut self, vni: u32, mac: MacAddr, present: bool) {
        self.macs.change(vni, mac, present.then_some(()));
        let Self { addresses, bindings, by_mac, .. } = self;
        for address in by_mac.get(&(vni, mac)).into_iter().flatten() {
            addresses.change(vni, *address, bindings.get(&(vni, *address)).copied().filter(|_| present));
        }
    }

    /// Takes the host of an IP address, which may be behind a remote, or `None` if it is not known any more.
    pub(super) fn change_binding(&mut self, vni: u32, address: IpAddr, host: Option<Host>) {
        let Self { macs, addresses, bindings, by_mac } = self;
        let before = match host {
            Some(host) => bindings.insert((vni, address), host),
            None => bindings.remove(&(vni, address)),
        };
        if let Some((mac, _)) = before
            && let Some(of_mac) = by_mac.get_mut(&(vni, mac))
        {
            of_mac.remove(&address);
            if of_mac.is_empty() {
                by_mac.remove(&(vni, mac));
            }
        }
        if let Some((mac, _)) = host {
            by_mac.entry((vni, mac)).or_default().insert(address);
        }
        let local = host.filter(|(mac, _)| macs.is_wanted(vni, *mac));
        if local.is_some() || addresses.is_wanted(vni, address) {
            addresses.change(vni, address, local);
        }
    }

    /// Takes the losses of the mirror since the last turn. `port` returns the port of a VNI for its local ports.
    pub(super) fn follow(&mut self, mirror: &mut Mirror, port: impl Fn(u32) -> Option<u32>) {
        std::mem::take(&mut mirror.ipv6_changed).into_iter().for_each(|vni| self.addresses.retry(vni));
        for (vni, mac, at) in std::mem::take(&mut mirror.vanished) {
            if port(vni) == Some(at) {
                self.macs.vanished(vni, mac);
            }
        }
        for (vni, address) in std::mem::take(&mut mirror.vanished_neighbours) {
            match mirror.neighbour(vni, address) {
                NeighbourEntry::None => self.addresses.vanished(vni, address),
                // The daemon has heard of the address from another leaf, and the gateway reads that too.
                NeighbourEntry::Foreign => self.addresses.replaced(vni, address),
                NeighbourEntry::Own(_) => {}
            }
        }
    }

    /// Takes the entries of a former run behind a port whose hosts were not heard again.
    pub(super) fn sweep(&mut self, mirror: &Mirror, vni: u32, port: u32) {
        mirror.addresses_at(vni, port).into_iter().for_each(|mac| self.macs.stale(vni, mac));
        mirror.own_neighbours(vni).into_iter().for_each(|address| self.addresses.stale(vni, address));
    }

    /// Writes all Ethernet addresses of a VNI again, whose port is new.
    pub(super) fn repeat_macs(&mut self, vni: u32) {
        self.macs.repeat(vni);
    }

    /// Writes all IP addresses of a VNI again, whose bridge is new.
    pub(super) fn repeat_addresses(&mut self, vni: u32) {
        self.addresses.repeat(vni);
    }

    /// Forgets the hosts of VNIs for which `keep` is false.
    pub(super) fn retain(&mut self, keep: impl Fn(u32) -> bool) {
        self.macs.retain(&keep);
        self.addresses.retain(&keep);
        self.bindings.retain(|(vni, _), _| keep(*vni));
        self.by_mac.retain(|(vni, _), _| keep(*vni));
    }

    /// Writes what waits, within the limits. `port` returns the port of a VNI that stands for its local ports, `now` is
    /// the time since the start.
    pub(super) fn run(
        &mut self,
        kernel: &mut (impl Kernel<MacAddr, ()> + Kernel<IpAddr, Host>),
        mirror: &Mirror,
        port: impl Fn(u32) -> Option<u32>,
        now: Duration,
    ) -> io::Result<()> {
        let bridge = |vni| port(vni).and(mirror.devices(vni)).and_then(|devices| devices.bridge);
        let macs = self.macs.run(kernel, WRITES, |vni, port, mac| known_mac(mirror, vni, port, mac), &port, now);
        let known = |vni, _, address| known_neighbour(mirror, vni, address);
        let addresses = self.addresses.run(kernel, WRITES, known, bridge, now);
        macs.and(addresses)
    }

    /// Number of changes that wait.
    pub(super) fn waiting(&self) -> usize {
        self.macs.waiting() + self.addresses.waiting()
    }

    /// Numbers of Ethernet and IP addresses that the kernel has, by VNI.
    pub(super) fn written(&self) -> [HashMap<u32, usize>; 2] {
        [self.macs.written(), self.addresses.written()]
    }

    /// Numbers of writes of Ethernet and IP addresses.
    pub(super) fn stats(&self) -> [WriterStats; 2] {
        [self.macs.stats, self.addresses.stats]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_pmd::rtnetlink::{Link, LinkKind, Message, Neighbour, NudState, Vxlan};

    const BRIDGE: u32 = 8;
    const PORT: u32 = 10;

    /// A kernel that tells the mirror of what it gets.
    #[derive(Debug, Default)]
    struct Recorder {
        macs: Vec<(MacAddr, bool)>,
        neighbours: Vec<(IpAddr, Option<Host>)>,
        lacks_ipv6: bool,
    }

    impl Kernel<MacAddr, ()> for Recorder {
        const NAME: &str = "local addresses";

        fn put(&mut self, port: u32, mac: MacAddr, (): ()) -> io::Result<bool> {
            assert_eq!(port, PORT);
            self.macs.push((mac, true));
            Ok(true)
        }

        fn remove(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
            assert_eq!(port, PORT);
            self.macs.push((mac, false));
            Ok(())
        }
    }

    impl Kernel<IpAddr, Host> for Recorder {
        const NAME: &str = "IP addresses";

        fn put(&mut self, bridge: u32, address: IpAddr, host: Host) -> io::Result<bool> {
            assert_eq!(bridge, BRIDGE);
            if self.lacks_ipv6 && address.is_ipv6() {
                return Ok(false);
            }
            self.neighbours.push((address, Some(host)));
            Ok(true)
        }

        fn remove(&mut self, bridge: u32, address: IpAddr) -> io::Result<()> {
            assert_eq!(bridge, BRIDGE);
            self.neighbours.push((address, None));
            Ok(())
        }
    }

    fn mac(n: u32) -> MacAddr {
        MacAddr::from_u64(0x0200_0000_0000 | u64::from(n))
    }

    fn ip(n: u32) -> IpAddr {
        IpAddr::from((0x0a00_0000 | n).to_be_bytes())
    }

    /// The VXLAN device of VNI 1.
    fn vxlan() -> Message {
        Message::Link(Link {
            index: 9,
            name: "vx".to_owned(),
            alias: None,
            mac: None,
            master: Some(BRIDGE),
            up: true,
            kind: LinkKind::Vxlan(Vxlan { vni: 1, local: None, port: 4789, learning: false }),
        })
    }

    fn mirror() -> Mirror {
        let mut mirror = Mirror::default();
        mirror.watch(&HashSet::from([1]));
        mirror.apply(&vxlan());
        mirror
    }

    /// Returns an entry of this program, or one that zebra learned from another leaf.
    fn neighbour(address: IpAddr, host: Option<u32>, own: bool) -> Message {
        let (mac, protocol) = (host.map(mac), if own { PROTOCOL } else { 11 });
        let state = NudState::Fixed;
        let (index, external, is_router) = (BRIDGE, !own, false);
        Message::Neighbour(Neighbour { index, address, state, mac, external, is_router, protocol })
    }

    /// Runs a turn. The mirror reads what was written to the neighbours.
    fn turn(hosts: &mut Hosts, kernel: &mut Recorder, mirror: &mut Mirror, ms: u64) -> Vec<(IpAddr, Option<Host>)> {
        hosts.follow(mirror, |_| Some(PORT));
        hosts.run(kernel, mirror, |vni| (vni == 1).then_some(PORT), Duration::from_millis(ms)).unwrap();
        let mut written = std::mem::take(&mut kernel.neighbours);
        for (address, host) in &written {
            let state = NudState::Fixed;
            let (mac, is_router) = host.map_or((None, false), |(mac, is_router)| (Some(mac), is_router));
            let (index, address, protocol) = (BRIDGE, *address, PROTOCOL);
            let entry = Neighbour { index, address, state, mac, external: false, is_router, protocol };
            mirror.apply(&Message::Neighbour(entry));
        }
        written.sort_unstable();
        written
    }

    #[test]
    fn addresses_are_those_of_hosts_behind_local_ports() {
        let (mut hosts, mut kernel, mut mirror) = (Hosts::default(), Recorder::default(), mirror());
        // The address is known before the host is, and another one belongs to a host behind a remote.
        hosts.change_binding(1, ip(1), Some((mac(1), false)));
        hosts.change_binding(1, ip(9), Some((mac(9), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 0), []);
        hosts.change_mac(1, mac(1), true);
        hosts.change_binding(1, ip(2), Some((mac(1), true)));
        let both = [(ip(1), Some((mac(1), false))), (ip(2), Some((mac(1), true)))];
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 1), both);
        hosts.change_mac(1, mac(1), true);
        hosts.change_binding(1, ip(1), Some((mac(1), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 2), [], "nothing is written twice");
        // One moves to another local host, and then to one behind a remote.
        hosts.change_mac(1, mac(2), true);
        hosts.change_binding(1, ip(1), Some((mac(2), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 3), [(ip(1), Some((mac(2), false)))]);
        hosts.change_binding(1, ip(1), Some((mac(9), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 4), [(ip(1), None)]);
        // The host leaves its port, and comes back with what is known of it.
        hosts.change_mac(1, mac(1), false);
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 5), [(ip(2), None)]);
        hosts.change_mac(1, mac(1), true);
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 6), [(ip(2), Some((mac(1), true)))]);
        hosts.change_binding(1, ip(2), None);
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 7), [(ip(2), None)]);
        hosts.change_binding(1, ip(1), None);
        hosts.change_binding(1, ip(9), None);
        assert!(hosts.bindings.is_empty() && hosts.by_mac.is_empty() && mirror.own_neighbours(1).is_empty());
        assert_eq!(hosts.stats()[1], WriterStats { written: 4, removed: 3, refused: 0 });
    }

    #[test]
    fn entries_of_the_daemon_are_replaced_by_claims_alone() {
        let (mut hosts, mut kernel, mut mirror) = (Hosts::default(), Recorder::default(), mirror());
        hosts.change_mac(1, mac(1), true);
        hosts.change_binding(1, ip(1), Some((mac(1), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 0).len(), 1);
        // The address moves to another leaf, whose entry stays when the gateway takes its own back.
        mirror.apply(&neighbour(ip(1), Some(5), false));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 1), []);
        hosts.change_binding(1, ip(1), None);
        assert_eq!((turn(&mut hosts, &mut kernel, &mut mirror, 2), hosts.written()[1].len()), (vec![], 0));
        // The local host claims it again.
        hosts.change_binding(1, ip(1), Some((mac(1), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 3), [(ip(1), Some((mac(1), false)))]);
        // The entry goes between the removal of the host and the message about its replacement.
        hosts.change_binding(1, ip(1), None);
        mirror.apply(&neighbour(ip(1), Some(5), false));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 4), []);
    }

    #[test]
    fn lost_entries_return_and_those_of_a_former_run_go() {
        let (mut hosts, mut kernel, mut mirror) = (Hosts::default(), Recorder::default(), mirror());
        (1..4).for_each(|n| mirror.apply(&neighbour(ip(n), Some(n), true)));
        mirror.apply(&neighbour(ip(4), Some(4), false));
        hosts.change_mac(1, mac(1), true);
        hosts.change_binding(1, ip(1), Some((mac(1), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 0), [], "the entry of the former run is taken over");
        // A dump after a loss of messages does not have it.
        mirror.begin();
        (2..4).for_each(|n| mirror.apply(&neighbour(ip(n), Some(n), true)));
        mirror.apply(&neighbour(ip(4), Some(4), false));
        mirror.apply(&vxlan());
        mirror.finish();
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 1), [(ip(1), Some((mac(1), false)))]);
        hosts.sweep(&mirror, 1, PORT);
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 2), [(ip(2), None), (ip(3), None)]);
        hosts.repeat_addresses(1);
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 3), [], "the mirror has the entry");
        // A kernel without IPv6 keeps no other entry from being written.
        kernel.lacks_ipv6 = true;
        hosts.change_binding(1, "fd00::1".parse().unwrap(), Some((mac(1), false)));
        hosts.change_binding(1, ip(7), Some((mac(1), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 4), [(ip(7), Some((mac(1), false)))]);
        assert_eq!((hosts.stats()[1].refused, hosts.waiting()), (1, 0));
        // The device has IPv6 later.
        hosts.change_binding(1, "fd00::2".parse().unwrap(), Some((mac(1), false)));
        hosts.change_binding(1, "fd00::3".parse().unwrap(), Some((mac(1), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 5), []);
        mirror.apply(&Message::Ipv6Changed(BRIDGE));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 6), [], "still without IPv6");
        kernel.lacks_ipv6 = false;
        hosts.change_binding(1, "fd00::3".parse().unwrap(), None);
        mirror.apply(&Message::Ipv6Changed(BRIDGE + 1));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 7), [], "another device");
        mirror.apply(&Message::Ipv6Changed(BRIDGE));
        let of_host = |address: &str| (address.parse().unwrap(), Some((mac(1), false)));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 8), [of_host("fd00::1"), of_host("fd00::2")]);
        mirror.apply(&Message::Ipv6Changed(BRIDGE));
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 9), []);
        assert_eq!((hosts.stats()[1].refused, hosts.waiting()), (6, 0));
        hosts.retain(|_| false);
        assert_eq!((hosts.waiting(), hosts.bindings.len(), hosts.by_mac.len()), (0, 0, 0));
    }

    #[test]
    fn a_flood_of_announcements_is_limited() {
        let (mut hosts, mut kernel, mut mirror) = (Hosts::default(), Recorder::default(), mirror());
        hosts.change_mac(1, mac(1), true);
        (0..20_000).for_each(|n| hosts.change_binding(1, ip(n), Some((mac(1), false))));
        let burst = (0..10).map(|_| turn(&mut hosts, &mut kernel, &mut mirror, 1).len()).sum::<usize>();
        assert_eq!(burst, 2000);
        // A known one overtakes the others.
        let known = mirror.own_neighbours(1)[0];
        hosts.change_binding(1, known, None);
        assert_eq!(turn(&mut hosts, &mut kernel, &mut mirror, 1), [(known, None)]);
        (0..20_000).for_each(|n| hosts.change_binding(1, ip(n), None));
        let removed = (0..10).map(|_| turn(&mut hosts, &mut kernel, &mut mirror, 1).len()).sum::<usize>();
        assert_eq!((removed, hosts.waiting()), (1999, 0));
    }
}
