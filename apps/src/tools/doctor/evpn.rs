//! Checks for segments with `control = "kernel"`: the kernel's features and tables, the routing daemon, and VXLAN
//! devices in bridges.
//!
//! Neighbours that the daemon or the gateway writes do not count against `gc_thresh3`, nor do socket buffers count
//! against `rmem_max`. So only next hops of the underlay need room in the ARP and ND tables.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use wirepath_pmd::rtnetlink::{Link, LinkKind, Message, NudState, Requests, Table};

use super::checks::{ok, warn};
use super::{Facts, Finding};
use crate::gateway::DEVICE_ALIAS;

/// Modules of the devices that the gateway makes for a VNI.
const MODULES: [&str; 3] = ["bridge", "vxlan", "veth"];
/// Daemon that writes the kernel's tables.
const ZEBRA: &str = "usr/lib/frr/zebra";
/// Oldest tested version of FRR.
const MIN_FRR: (u32, u32) = (8, 4);
/// State of a bridge port that passes frames, in sysfs.
const FORWARDING: &str = "3";

/// A VXLAN device in a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VxlanFacts {
    /// Name.
    pub name: String,
    /// Name of the bridge.
    pub bridge: String,
    /// True if the gateway made the device.
    pub own: bool,
    /// Address of tunnel packets.
    pub local: Option<IpAddr>,
    /// True if the device learns addresses from tunnel packets.
    pub learning: bool,
    /// True if the port of the bridge learns addresses.
    pub port_learning: Option<bool>,
    /// True if the bridge answers ARP and ND requests for remote hosts.
    pub neigh_suppress: Option<bool>,
    /// True if IPv6 is off on the bridge.
    pub lacks_ipv6: bool,
    /// True if the gateway has a port in the bridge, and the bridge forwards what the device receives. The gateway
    /// gives ports of bridges that it made another state.
    pub leaks: bool,
    /// True if the bridge has a spanning tree, which owns the states of ports.
    pub has_stp: bool,
}

/// An ARP or ND table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourTable {
    /// `ipv4` or `ipv6`.
    pub version: &'static str,
    /// Entries that count against the limit.
    pub used: usize,
    /// Most entries (`gc_thresh3`).
    pub limit: usize,
}

/// Facts about EVPN.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvpnFacts {
    /// Modules that the kernel has neither built in nor as a file.
    pub missing_modules: Vec<&'static str>,
    /// Version of FRR; `None`: not installed.
    pub frr: Option<String>,
    /// VXLAN devices in bridges.
    pub devices: Vec<VxlanFacts>,
    /// The ARP and ND tables whose limits can be read.
    pub neighbours: Vec<NeighbourTable>,
}

impl EvpnFacts {
    /// Reads the facts. Files are below `root`; devices and neighbours are those of this network namespace.
    pub fn read(root: &Path) -> Self {
        let mut facts =
            Self { missing_modules: missing_modules(root), frr: frr_version(&root.join(ZEBRA)), ..Self::default() };
        // Without netlink there are no such devices.
        if let Ok(mut requests) = Requests::new() {
            facts.devices = devices(root, &mut requests);
            facts.neighbours = neighbours(root, &mut requests);
        }
        facts
    }
}

/// Returns the modules that the lists of the running kernel lack. Without lists, none is reported.
fn missing_modules(root: &Path) -> Vec<&'static str> {
    let text = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let release = text("proc/sys/kernel/osrelease").unwrap_or_default();
    let list = |name: &str| text(&format!("lib/modules/{}/{name}", release.trim()));
    let (Some(built_in), Some(files)) = (list("modules.builtin"), list("modules.dep")) else { return Vec::new() };
    let is_listed = |module: &str| {
        let file = format!("/{module}.ko");
        built_in.lines().chain(files.lines()).any(|line| line.split(':').next().is_some_and(|it| it.contains(&file)))
    };
    let is_missing = |module: &&str| !root.join("sys/module").join(module).exists() && !is_listed(module);
    MODULES.into_iter().filter(is_missing).collect()
}

fn frr_version(zebra: &Path) -> Option<String> {
    let output = Command::new(zebra).arg("--version").output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// Returns the version from a first line such as `zebra version 8.4.4`.
fn parse_version(text: &str) -> Option<String> {
    let mut words = text.lines().next()?.split_whitespace();
    words.find(|word| *word == "version")?;
    words.next().map(str::to_owned)
}

fn devices(root: &Path, requests: &mut Requests) -> Vec<VxlanFacts> {
    let mut links: HashMap<u32, Link> = HashMap::new();
    // An incomplete list has fewer findings.
    _ = requests.dump(Table::Links, |message| {
        if let Ok(Message::Link(link)) = message {
            links.insert(link.index, link);
        }
    });
    let flag = |path: String| match std::fs::read_to_string(root.join(path)) {
        Ok(text) => Some(text.trim() != "0"),
        Err(_) => None,
    };
    let has_gateway = |bridge: u32| {
        let is_cable = |link: &&Link| link.master == Some(bridge) && link.kind == LinkKind::Other;
        links.values().filter(is_cable).any(|link| link.alias.as_deref() == Some(DEVICE_ALIAS))
    };
    let is_forwarding = |name: &str| {
        let state = std::fs::read_to_string(root.join(format!("sys/class/net/{name}/brport/state")));
        state.is_ok_and(|state| state.trim() == FORWARDING)
    };
    let device = |link: &Link| {
        let LinkKind::Vxlan(vxlan) = link.kind else { return None };
        let master = links.get(&link.master?)?;
        let (name, bridge) = (link.name.clone(), master.name.clone());
        Some(VxlanFacts {
            own: link.alias.as_deref() == Some(DEVICE_ALIAS),
            local: vxlan.local,
            learning: vxlan.learning,
            port_learning: flag(format!("sys/class/net/{name}/brport/learning")),
            neigh_suppress: flag(format!("sys/class/net/{name}/brport/neigh_suppress")),
            lacks_ipv6: flag(format!("proc/sys/net/ipv6/conf/{bridge}/disable_ipv6")) == Some(true),
            has_stp: flag(format!("sys/class/net/{bridge}/bridge/stp_state")) == Some(true),
            leaks: has_gateway(master.index) && is_forwarding(&name),
            name,
            bridge,
        })
    };
    let mut devices: Vec<VxlanFacts> = links.values().filter_map(device).collect();
    devices.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    devices
}

fn neighbours(root: &Path, requests: &mut Requests) -> Vec<NeighbourTable> {
    let mut used = [0; 2];
    _ = requests.dump(Table::Neighbours, |message| {
        let Ok(Message::Neighbour(neighbour)) = message else { return };
        if !neighbour.external && neighbour.state != NudState::Fixed {
            used[usize::from(neighbour.address.is_ipv6())] += 1;
        }
    });
    let limit = |version: &str| {
        let path = format!("proc/sys/net/{version}/neigh/default/gc_thresh3");
        std::fs::read_to_string(root.join(path)).ok()?.trim().parse().ok()
    };
    let table = |(version, used)| Some(NeighbourTable { version, used, limit: limit(version)? });
    ["ipv4", "ipv6"].into_iter().zip(used).filter_map(table).collect()
}

/// Runs the checks. Each problem of a device is a finding of its own.
pub(super) fn run_checks(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![kernel(facts), daemon(&facts.evpn)];
    findings.extend(tables(&facts.evpn));
    findings.extend(vxlan_devices(&facts.evpn));
    findings
}

fn kernel(facts: &Facts) -> Finding {
    const CHECK: &str = "EVPN kernel";
    if !facts.evpn.missing_modules.is_empty() {
        let missing = facts.evpn.missing_modules.join(", ");
        return warn(
            CHECK,
            format!("no {missing}: segments with control = \"kernel\" do not start"),
            "apt install linux-image-amd64   # or a kernel with CONFIG_BRIDGE, CONFIG_VXLAN and CONFIG_VETH",
        );
    }
    match facts.kernel {
        Some(version) if version < (5, 8) => warn(
            CHECK,
            "no nexthop objects for forwarding databases (since 5.8), so no multihoming",
            "apt install -t bookworm-backports linux-image-amd64   # or any Linux from 5.8 on",
        ),
        _ => ok(CHECK, "bridge, vxlan and veth, nexthop objects"),
    }
}

fn daemon(facts: &EvpnFacts) -> Finding {
    const CHECK: &str = "EVPN daemon";
    let Some(version) = &facts.frr else { return ok(CHECK, format!("no FRR: /{ZEBRA} does not run")) };
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < MIN_FRR => warn(
            CHECK,
            format!("FRR {version} is older than {}.{}, the oldest tested", MIN_FRR.0, MIN_FRR.1),
            "apt install frr",
        ),
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < (10, 6) => {
            ok(CHECK, format!("FRR {version}: VTEPs with IPv4 addresses (with IPv6 ones since 10.6)"))
        }
        _ => ok(CHECK, format!("FRR {version}")),
    }
}

/// Reports ARP and ND tables that are four fifths full. The kernel refuses next hops that find no room.
fn tables(facts: &EvpnFacts) -> Vec<Finding> {
    const CHECK: &str = "EVPN next hops";
    let is_full = |table: &&NeighbourTable| 5 * table.used >= 4 * table.limit;
    let finding = |table: &NeighbourTable| {
        let NeighbourTable { version, used, limit } = *table;
        let (name, needed) = (if version == "ipv4" { "ARP" } else { "ND" }, (4 * used).next_power_of_two());
        let key = format!("net.{version}.neigh.default.gc_thresh");
        let remedy = format!("sysctl {key}3={needed} {key}2={} {key}1={}", needed / 2, needed / 4);
        warn(CHECK, format!("{used} of {limit} {name} entries are in use: VTEPs may stay unreachable"), remedy)
    };
    let found: Vec<Finding> = facts.neighbours.iter().filter(is_full).map(finding).collect();
    if !found.is_empty() {
        return found;
    }
    let used = |table: &NeighbourTable| format!("{} of {} for {}", table.used, table.limit, table.version);
    let all: Vec<String> = facts.neighbours.iter().map(used).collect();
    let text = if all.is_empty() { "no limits here".to_owned() } else { format!("entries: {}", all.join(", ")) };
    vec![ok(CHECK, text)]
}

fn vxlan_devices(facts: &EvpnFacts) -> Vec<Finding> {
    const CHECK: &str = "EVPN devices";
    let own_local = facts.devices.iter().find(|device| device.own).and_then(|device| device.local);
    let mut found = Vec::new();
    for device in &facts.devices {
        let VxlanFacts { name, bridge, .. } = device;
        let mut problem = |text: String, remedy: String| found.push(warn(CHECK, text, remedy));
        if device.learning {
            problem(
                format!("{name} learns addresses from tunnel packets, beside those of the daemon"),
                format!("ip link set {name} type vxlan nolearning"),
            );
        }
        if device.port_learning == Some(true) {
            problem(
                format!("the port {name} of {bridge} learns addresses, which FRR then takes for local ones"),
                format!("bridge link set dev {name} learning off"),
            );
        }
        if device.neigh_suppress == Some(false) {
            problem(
                format!("{bridge} does not answer ARP and ND requests for hosts behind {name}"),
                format!("bridge link set dev {name} neigh_suppress on"),
            );
        }
        match (device.local, own_local) {
            (None, _) => problem(
                format!("{name} has no local address, so FRR advertises no VTEP for it"),
                format!("ip link set {name} type vxlan local ADDRESS   # that of [underlay]"),
            ),
            (Some(local), Some(own)) if local != own => problem(
                format!("{name} has the local address {local}, devices of the gateway have {own}"),
                format!("ip link set {name} type vxlan local {own}"),
            ),
            _ => {}
        }
        if device.leaks {
            problem(
                format!(
                    "{bridge} forwards late fragments of tunnel packets, which the gateway leaves to {name}, unless a \
                     filter drops them"
                ),
                match device.has_stp {
                    true => {
                        format!("tc qdisc add dev {name} clsact; tc filter add dev {name} ingress matchall action drop")
                    }
                    false => {
                        format!("ip link set {bridge} type bridge forward_delay 0; bridge link set dev {name} state 1")
                    }
                },
            );
        }
        if device.lacks_ipv6 {
            problem(
                format!("IPv6 is off on {bridge}, so FRR gets no IPv6 addresses of hosts"),
                format!("sysctl net.ipv6.conf.{bridge}.disable_ipv6=0"),
            );
        }
    }
    if !found.is_empty() {
        return found;
    }
    let names: Vec<&str> = facts.devices.iter().map(|device| device.name.as_str()).collect();
    let text = if names.is_empty() { "no VXLAN device is in a bridge".to_owned() } else { names.join(", ") };
    vec![ok(CHECK, text)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::doctor::Level;

    fn device(n: u8) -> VxlanFacts {
        VxlanFacts {
            name: format!("vx{n}"),
            bridge: format!("br{n}"),
            own: n == 1,
            local: Some([10, 9, 0, 1].into()),
            learning: false,
            port_learning: Some(false),
            neigh_suppress: Some(true),
            lacks_ipv6: false,
            leaks: false,
            has_stp: false,
        }
    }

    fn facts() -> Facts {
        let table = |version| NeighbourTable { version, used: 100, limit: 1024 };
        let evpn = EvpnFacts {
            missing_modules: Vec::new(),
            frr: Some("8.4.4".to_owned()),
            devices: vec![device(1), device(2)],
            neighbours: vec![table("ipv4"), table("ipv6")],
        };
        Facts { kernel: Some((6, 6)), evpn, ..Facts::default() }
    }

    #[test]
    fn each_problem_has_a_finding_with_its_remedy() {
        type Problem = (&'static str, fn(&mut Facts), &'static str);
        let problems: [Problem; 13] = [
            ("EVPN kernel", |f| f.evpn.missing_modules = vec!["vxlan"], "CONFIG_VXLAN"),
            ("EVPN kernel", |f| f.kernel = Some((5, 7)), "5.8"),
            ("EVPN daemon", |f| f.evpn.frr = Some("8.1-my".to_owned()), "apt install frr"),
            (
                "EVPN next hops",
                |f| f.evpn.neighbours[1].used = 820,
                "sysctl net.ipv6.neigh.default.gc_thresh3=4096 net.ipv6.neigh.default.gc_thresh2=2048 \
                 net.ipv6.neigh.default.gc_thresh1=1024",
            ),
            ("EVPN devices", |f| f.evpn.devices[1].learning = true, "ip link set vx2 type vxlan nolearning"),
            ("EVPN devices", |f| f.evpn.devices[1].port_learning = Some(true), "bridge link set dev vx2 learning off"),
            (
                "EVPN devices",
                |f| f.evpn.devices[0].neigh_suppress = Some(false),
                "bridge link set dev vx1 neigh_suppress on",
            ),
            ("EVPN devices", |f| f.evpn.devices[1].local = None, "ip link set vx2 type vxlan local ADDRESS"),
            (
                "EVPN devices",
                |f| f.evpn.devices[1].local = Some([10, 9, 0, 7].into()),
                "ip link set vx2 type vxlan local 10.9.0.1",
            ),
            ("EVPN devices", |f| f.evpn.devices[1].lacks_ipv6 = true, "sysctl net.ipv6.conf.br2.disable_ipv6=0"),
            (
                "EVPN devices",
                |f| f.evpn.devices[1].leaks = true,
                "br2 type bridge forward_delay 0; bridge link set dev vx2 state 1",
            ),
            (
                "EVPN devices",
                |f| (f.evpn.devices[1].leaks, f.evpn.devices[1].has_stp) = (true, true),
                "tc qdisc add dev vx2 clsact; tc filter add dev vx2 ingress",
            ),
            ("EVPN devices", |f| f.evpn.devices[0].local = None, "ip link set vx1 type vxlan local ADDRESS"),
        ];
        assert!(run_checks(&facts()).iter().all(|finding| finding.level == Level::Ok && finding.remedy.is_none()));
        for (check, introduce, remedy) in problems {
            let mut facts = facts();
            introduce(&mut facts);
            let findings = run_checks(&facts);
            let found: Vec<&Finding> = findings.iter().filter(|finding| finding.level == Level::Warn).collect();
            assert_eq!(found.len(), 1, "{findings:?}");
            assert!(found[0].check == check && found[0].remedy.as_ref().unwrap().contains(remedy), "{found:?}");
        }
        // Devices that the sysfs of this namespace does not show, and several problems of one.
        let mut facts = facts();
        (facts.evpn.devices[0].port_learning, facts.evpn.devices[0].neigh_suppress) = (None, None);
        (facts.evpn.devices[1].learning, facts.evpn.devices[1].lacks_ipv6) = (true, true);
        assert_eq!(run_checks(&facts).iter().filter(|finding| finding.level == Level::Warn).count(), 2);
    }

    #[test]
    fn a_machine_without_evpn_has_no_warnings() {
        let findings = run_checks(&Facts::default());
        assert!(findings.iter().all(|finding| finding.level == Level::Ok), "{findings:?}");
        assert_eq!(parse_version("zebra version 8.4.4\nCopyright"), Some("8.4.4".to_owned()));
        assert_eq!((parse_version(""), parse_version("zebra 9")), (None, None));
    }

    #[test]
    fn modules_are_looked_up_in_the_lists_of_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| wirepath_testlab::write_below(root.path(), path, text);
        write("proc/sys/kernel/osrelease", "6.1.0\n");
        assert!(missing_modules(root.path()).is_empty(), "no lists");
        write("lib/modules/6.1.0/modules.builtin", "kernel/net/bridge/bridge.ko\n");
        write("lib/modules/6.1.0/modules.dep", "kernel/net/x.ko.xz: kernel/drivers/net/veth.ko.xz\n");
        assert_eq!(missing_modules(root.path()), ["vxlan", "veth"], "what another module needs is no entry of its own");
        write("lib/modules/6.1.0/modules.dep", "kernel/drivers/net/veth.ko.xz: kernel/net/x.ko.xz\n");
        write("sys/module/vxlan/refcnt", "1\n");
        assert!(missing_modules(root.path()).is_empty());
    }
}
