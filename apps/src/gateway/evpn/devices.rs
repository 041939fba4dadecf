//! The devices in the kernel by which a routing daemon sees a segment: a bridge, a VXLAN device in it, and a port that
//! stands for the local ports of the segment.
//!
//! ```text
//! wpbr42 (bridge) ─┬─ wpvx42 (VXLAN device, VNI 42)   addresses behind remotes
//!                  └─ wpac42 (veth)                   addresses behind local ports
//! ```
//!
//! The kernel forwards nothing between them. If the segment has a router, the bridge has its addresses, so that the
//! daemon knows the router and its networks. A VXLAN device with the VNI that exists already is used instead, and its
//! bridge. The alias of a device tells whether the gateway made it, also after a crash.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;

use wirepath_pmd::rtnetlink::{Link, LinkAddress, LinkKind, Message, Requests, Table, Vxlan};
use wirepath_wire::MacAddr;

/// Alias of the devices that the gateway made.
pub const DEVICE_ALIAS: &str = "made by tunnel-gateway";

/// Properties of a segment for its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::gateway) struct EvpnSegment {
    /// Name of the segment.
    pub(in crate::gateway) name: String,
    /// VNI.
    pub(in crate::gateway) vni: u32,
    /// Address of the gateway, which the routing daemon advertises as VTEP.
    pub(in crate::gateway) local: Option<IpAddr>,
    /// UDP port of the tunnels.
    pub(in crate::gateway) udp_port: u16,
    /// Seconds from the last frame of an address to its withdrawal; 0: never.
    pub(in crate::gateway) ageing: u32,
    /// Router of the segment, which the bridge stands for.
    pub(in crate::gateway) router: Option<EvpnRouter>,
}

/// Properties of a segment's router for the bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::gateway) struct EvpnRouter {
    /// Ethernet address, which the routing daemon advertises as that of the router.
    pub(in crate::gateway) mac: MacAddr,
    /// Name of the VRF; `None`: the default one.
    pub(in crate::gateway) vrf: Option<String>,
    /// IP addresses with their prefix lengths. Their networks are connected routes of the kernel.
    pub(in crate::gateway) addresses: Vec<(IpAddr, u8)>,
}

/// Names of the devices of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) bridge: String,
    pub(super) vxlan: String,
    pub(super) access: String,
    /// Other end of the cable whose one end is `access`.
    peer: String,
}

impl Names {
    pub(super) fn new(vni: u32) -> Self {
        let name = |kind: &str| format!("wp{kind}{vni}");
        Self { bridge: name("br"), vxlan: name("vx"), access: name("ac"), peer: name("pe") }
    }
}

/// The links of the kernel.
#[derive(Debug, Default)]
struct Links {
    by_name: HashMap<String, Link>,
    by_index: HashMap<u32, String>,
    /// Names of the VXLAN devices by VNI.
    by_vni: HashMap<u32, String>,
}

impl Links {
    fn read(requests: &mut Requests) -> io::Result<Self> {
        let mut links = Self::default();
        // An incomplete list is completed by the next call: what is missing cannot be made twice.
        requests.dump(Table::Links, |message| {
            let Ok(Message::Link(link)) = message else { return };
            if let LinkKind::Vxlan(vxlan) = link.kind {
                let is_better = |known: &String| {
                    let known: Option<&Link> = links.by_name.get(known);
                    known.is_none_or(|known| known.master.is_none() && link.master.is_some())
                };
                if links.by_vni.get(&vxlan.vni).is_none_or(is_better) {
                    links.by_vni.insert(vxlan.vni, link.name.clone());
                }
            }
            links.by_index.insert(link.index, link.name.clone());
            links.by_name.insert(link.name.clone(), link);
        })?;
        Ok(links)
    }

    fn named(&self, name: &str) -> Option<&Link> {
        self.by_name.get(name)
    }

    fn of_vni(&self, vni: u32) -> Option<(&Link, Vxlan)> {
        let link = self.named(self.by_vni.get(&vni)?)?;
        match link.kind {
            LinkKind::Vxlan(vxlan) => Some((link, vxlan)),
            LinkKind::Bridge | LinkKind::Other => None,
        }
    }

    /// Returns the bridge of a VNI.
    fn bridge(&self, vni: u32) -> Option<&Link> {
        let master = self.of_vni(vni).and_then(|(link, _)| self.named(self.by_index.get(&link.master?)?));
        master.or_else(|| self.named(&Names::new(vni).bridge))
    }
}

/// Returns whether the gateway made a device, in this or a former run.
pub(super) fn is_own(link: &Link) -> bool {
    link.alias.as_deref() == Some(DEVICE_ALIAS)
}

/// Returns whether a device is the bridge that the gateway made for a VNI.
pub(super) fn is_bridge_of(link: &Link, vni: u32) -> bool {
    is_own(link) && link.name == Names::new(vni).bridge
}

/// An error with the request that failed.
fn failed(what: &str, name: &str) -> impl FnOnce(io::Error) -> io::Error {
    let text = format!("{what} {name}");
    move |error| {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => "; it needs CAP_NET_ADMIN",
            io::ErrorKind::Unsupported => "; the kernel needs the modules bridge, vxlan and veth",
            _ => "",
        };
        io::Error::new(error.kind(), format!("{text}: {error}{hint}"))
    }
}

/// Outcome of [`ensure`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Ensured {
    /// False if another call is due.
    pub(super) is_complete: bool,
    /// True if a bridge was not as it must be.
    pub(super) has_changed: bool,
}

/// Makes the devices that segments lack, and configures those that the gateway made. `warnings` has the warnings of the
/// last call and gets those of this one, so that the same is not logged again. `restarted` has the bridges that were
/// set down or up since the last call.
pub(super) fn ensure(
    requests: &mut Requests,
    segments: &[EvpnSegment],
    warnings: &mut HashSet<String>,
    restarted: &HashSet<u32>,
) -> io::Result<Ensured> {
    // A failure at one segment keeps nothing from the others.
    let mut outcome = make(requests, segments);
    let links = Links::read(requests)?;
    let (addresses, is_complete) = requests.addresses().map_err(failed("read the addresses of", "the bridges"))?;
    let mut setup = Setup { requests, links, addresses, restarted, warnings: HashSet::new(), has_changed: false };
    for segment in segments {
        outcome = outcome.and(setup.configure(segment));
    }
    for warning in setup.warnings.difference(warnings) {
        tracing::warn!("{warning}");
    }
    *warnings = setup.warnings;
    outcome.map(|()| Ensured { is_complete, has_changed: setup.has_changed })
}

/// Makes the devices that segments lack.
fn make(requests: &mut Requests, segments: &[EvpnSegment]) -> io::Result<()> {
    let mut outcome = Ok(());
    for step in [make_bridge, make_ports] {
        let links = Links::read(requests)?;
        for segment in segments {
            outcome = outcome.and(step(requests, &links, segment));
        }
    }
    outcome
}

fn make_bridge(requests: &mut Requests, links: &Links, segment: &EvpnSegment) -> io::Result<()> {
    // An own device of former settings is replaced.
    if let Some((link, vxlan)) = links.of_vni(segment.vni)
        && is_own(link)
        && (vxlan.local, vxlan.port) != (segment.local, segment.udp_port)
    {
        requests.remove_link(link.index).map_err(failed("remove the VXLAN device", &link.name))?;
    }
    let names = Names::new(segment.vni);
    if links.bridge(segment.vni).is_none() {
        requests.add_bridge(&names.bridge).map_err(failed("create the bridge", &names.bridge))?;
        mark(requests, &names.bridge)?;
    }
    Ok(())
}

fn make_ports(requests: &mut Requests, links: &Links, segment: &EvpnSegment) -> io::Result<()> {
    let names = Names::new(segment.vni);
    if links.of_vni(segment.vni).is_none() {
        let EvpnSegment { vni, local, udp_port: port, .. } = *segment;
        requests
            .add_vxlan(&names.vxlan, &Vxlan { vni, local, port, learning: false })
            .map_err(failed("create the VXLAN device", &names.vxlan))?;
        mark(requests, &names.vxlan)?;
    }
    if links.named(&names.access).is_none() {
        requests.add_veth(&names.access, &names.peer).map_err(failed("create the cable", &names.access))?;
        mark(requests, &names.access)?;
        mark(requests, &names.peer)?;
    }
    Ok(())
}

/// Gives a new device the alias, and keeps the kernel from sending there.
fn mark(requests: &mut Requests, name: &str) -> io::Result<()> {
    requests.set_alias(name, DEVICE_ALIAS).map_err(failed("set the alias of", name))?;
    requests.set_no_link_local(name).map_err(failed("set the address mode of", name))
}

/// The state of the kernel when its devices are configured.
struct Setup<'a> {
    requests: &'a mut Requests,
    links: Links,
    /// IP addresses by the index of their interface.
    addresses: HashMap<u32, Vec<LinkAddress>>,
    restarted: &'a HashSet<u32>,
    warnings: HashSet<String>,
    /// True if the VRF or an address of a bridge was not as it must be.
    has_changed: bool,
}

impl Setup<'_> {
    fn configure(&mut self, segment: &EvpnSegment) -> io::Result<()> {
        let Self { requests, links, warnings, .. } = self;
        let names = Names::new(segment.vni);
        let Some(bridge) = links.bridge(segment.vni).cloned() else { return Ok(()) };
        if let Some((link, vxlan)) = links.of_vni(segment.vni) {
            if vxlan.learning {
                warnings.insert(format!(
                    "the VXLAN device {} learns addresses; create it with nolearning for EVPN",
                    link.name
                ));
            }
            if vxlan.local != segment.local {
                let shown = |local: Option<IpAddr>| local.map_or("none".to_owned(), |local| local.to_string());
                warnings.insert(format!(
                    "the VXLAN device {} has the local address {}, segment {} has {}; the routing daemon \
                     advertises that of the device",
                    link.name,
                    shown(vxlan.local),
                    segment.name,
                    shown(segment.local)
                ));
            }
            if link.master.is_none() {
                requests.set_master(link.index, bridge.index).map_err(failed("put into the bridge", &link.name))?;
            }
            if link.master.is_none() || is_own(link) {
                requests
                    .set_bridge_port(link.index, false, true)
                    .map_err(failed("set the bridge port options of", &link.name))?;
            }
            up(requests, link)?;
        }
        if let Some(access) = links.named(&names.access) {
            if access.master != Some(bridge.index) {
                requests.set_master(access.index, bridge.index).map_err(failed("put into the bridge", &access.name))?;
                requests
                    .set_bridge_port(access.index, false, false)
                    .map_err(failed("set the bridge port options of", &access.name))?;
            }
            up(requests, access)?;
        }
        if let Some(peer) = links.named(&names.peer) {
            up(requests, peer)?;
        }
        if is_bridge_of(&bridge, segment.vni) {
            self.configure_router(segment, &bridge)?;
            self.configure_addresses(segment, &bridge)?;
        } else if is_own(&bridge) && segment.router.is_some() {
            let (name, segment) = (&bridge.name, &segment.name);
            self.warnings
                .insert(format!("{name} is not the bridge of segment {segment}; it gets no address of its router"));
        }
        up(self.requests, &bridge)?;
        // The kernel has the tunnel packets that the port leaves to it, such as late fragments, and would take them to
        // the bridge. This comes after the bridge is up, which lets its ports forward.
        if let Some((link, _)) = self.links.of_vni(segment.vni).filter(|(link, _)| is_own(link) && is_own(&bridge)) {
            let (name, index) = (link.name.clone(), link.index);
            if let Err(error) = self.requests.set_bridge_port_listening(index) {
                self.warnings.insert(format!("the bridge port of {name} passes frames of the kernel: {error}"));
            }
        }
        Ok(())
    }

    /// Gives the bridge the VRF and the Ethernet address of the segment's router, whose interface in the kernel it is.
    fn configure_router(&mut self, segment: &EvpnSegment, bridge: &Link) -> io::Result<()> {
        let Self { requests, links, addresses, restarted, warnings, has_changed } = self;
        let (name, index) = (&bridge.name, bridge.index);
        let Some(router) = &segment.router else { return Ok(()) };
        // The kernel drops all neighbours of an interface whose address is set, even to the same one. After a restart
        // it has none. Then zebra 8.4 may lack the addresses of routers, and the kernel's message mends that.
        if bridge.mac != Some(router.mac) || restarted.contains(&index) {
            *has_changed |= bridge.mac != Some(router.mac);
            requests.set_mac(index, router.mac).map_err(failed("set the Ethernet address of", name))?;
        }
        // The interface loses its IPv6 addresses when it enters a VRF or leaves it.
        let mut forget_ipv6 = || {
            *has_changed = true;
            addresses.entry(index).or_default().retain(|it| it.address.is_ipv4());
        };
        match &router.vrf {
            Some(vrf) => match links.named(vrf) {
                Some(device) if bridge.master != Some(device.index) => {
                    requests.set_master(index, device.index).map_err(failed("put into the VRF device", name))?;
                    forget_ipv6();
                }
                Some(_) => {}
                None => {
                    warnings.insert(format!(
                        "the kernel has no VRF device {vrf}; create it (ip link add {vrf} type vrf table N), so that \
                         the routing daemon sees segment {} in that VRF",
                        segment.name
                    ));
                }
            },
            None if bridge.master.is_some() => {
                requests.set_master(index, 0).map_err(failed("take out of its VRF device", name))?;
                forget_ipv6();
            }
            None => {}
        }
        Ok(())
    }

    /// Gives the bridge the IP addresses of the segment's router, and takes others from it.
    fn configure_addresses(&mut self, segment: &EvpnSegment, bridge: &Link) -> io::Result<()> {
        let Self { requests, addresses, warnings, has_changed, .. } = self;
        let (name, index) = (&bridge.name, bridge.index);
        let wanted = segment.router.iter().flat_map(|router| &router.addresses);
        let wanted: Vec<LinkAddress> = wanted.map(|(address, len)| LinkAddress::new(*address, *len)).collect();
        let present = addresses.get(&index).map(Vec::as_slice).unwrap_or_default();
        let others: Vec<LinkAddress> = present.iter().filter(|it| !wanted.contains(it)).copied().collect();
        let mut add = |requests: &mut Requests, added: LinkAddress| {
            let address = added.address;
            match requests.add_address(index, added) {
                Err(error) if address.is_ipv6() && is_without_ipv6(&error) => {
                    warnings.insert(format!(
                        "{name} does not get {address}: IPv6 is off there (sysctl net.ipv6.conf.{name}.disable_ipv6), \
                         so the routing daemon does not see that network"
                    ));
                    Ok(())
                }
                added => added.map_err(failed("give an address to", name)),
            }
        };
        // An interface that loses its last IPv4 address forgets its neighbours, so the new ones come first.
        for address in wanted.iter().filter(|it| !present.contains(it)) {
            *has_changed = true;
            add(requests, *address)?;
        }
        for other in &others {
            *has_changed = true;
            let LinkAddress { address, len, .. } = other;
            tracing::info!("{name} loses {address}/{len}, which the router of segment {} does not have", segment.name);
            requests.remove_ip_address(index, *other).map_err(failed("remove an address of", name))?;
        }
        // The kernel removes the secondary addresses of a network together with its primary one.
        for address in wanted.iter().filter(|it| it.address.is_ipv4() && !others.is_empty()) {
            add(requests, *address)?;
        }
        Ok(())
    }
}

/// Returns whether the kernel refused an IPv6 address because IPv6 is off on the interface or altogether.
fn is_without_ipv6(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
}

fn up(requests: &mut Requests, link: &Link) -> io::Result<()> {
    if link.up || !is_own(link) {
        return Ok(());
    }
    requests.set_up(link.index).map_err(failed("set up", &link.name))
}

/// Removes the devices of a VNI that the gateway made. If the VXLAN device is not one of them, the port for local
/// addresses stays too, with its entries.
pub(super) fn remove(requests: &mut Requests, vnis: impl IntoIterator<Item = u32>) -> io::Result<()> {
    let links = Links::read(requests)?;
    for vni in vnis {
        let names = Names::new(vni);
        if links.of_vni(vni).is_some_and(|(link, _)| !is_own(link)) {
            continue;
        }
        // The addresses behind a port are withdrawn with it, before the VTEP itself.
        for name in [&names.access, &names.vxlan, &names.bridge] {
            if let Some(link) = links.named(name).filter(|link| is_own(link)) {
                requests.remove_link(link.index).map_err(failed("remove", name))?;
            }
        }
    }
    Ok(())
}
