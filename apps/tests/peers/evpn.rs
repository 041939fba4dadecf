//! The gateway as a leaf that FRR drives through the kernel's tables, with FRR and the kernel's VXLAN device as the
//! other leaf.
//!
//! ```text
//! host0 --- lan0 | gateway | wan --- bridge --- eth0 | leaf: vx42 in br42 | port --- far
//!                | FRR     | bgp ---------------- bgp | FRR               |
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use serde_json::{Map, Value};
use wirepath::control_socket::Client;
use wirepath_testlab::{Background, Namespace, Requirement, Veth, eventually, oracle, skip_or_fail};
use wirepath_wire::parse;

use crate::frr::Daemons;
use crate::program::Program;
use crate::tcp::transfer;
use crate::underlay::{SHARED, plug_router, share};
use crate::world::{GATEWAY, VNI, Variant, WAIT_LIMIT, World, colons, host_address, pings, remote_address};

/// FRR's daemons (Debian: frr). They have no programs in the search path.
pub(crate) const ZEBRA: &str = "/usr/lib/frr/zebra";
pub(crate) const BGPD: &str = "/usr/lib/frr/bgpd";
/// Addresses of the BGP session.
pub(crate) const SPEAKERS: [&str; 2] = ["10.8.0.1", "10.8.0.2"];

/// Returns the configuration of bgpd for an EVPN session from `local` to `peer`, with further lines, and with those of
/// the EVPN address family.
pub(crate) fn bgpd_text(local: &str, peer: &str, bgp: &str, evpn: &str) -> String {
    format!(
        "router bgp 65000\n bgp router-id {local}\n no bgp default ipv4-unicast\n \
         neighbor {peer} remote-as 65000\n neighbor {peer} timers 2 9\n neighbor {peer} timers connect 1\n{bgp} \
         address-family l2vpn evpn\n  neighbor {peer} activate\n  advertise-all-vni\n{evpn} exit-address-family\n"
    )
}

/// Zebra and bgpd in a namespace.
pub(crate) struct Frr<'a> {
    daemons: Daemons<'a>,
    zebra: Option<Background>,
    bgpd: Option<Background>,
}

impl<'a> Frr<'a> {
    /// Starts the daemons with an EVPN session from `local` to `peer`.
    pub(crate) fn start(namespace: &'a Namespace, local: &str, peer: &str) -> Self {
        Self::routing(namespace, local, peer, "", "", "")
    }

    /// Starts the daemons with lines for zebra, for bgpd, and for the EVPN address family of bgpd.
    pub(crate) fn routing(
        namespace: &'a Namespace,
        local: &str,
        peer: &str,
        zebra: &str,
        bgp: &str,
        evpn: &str,
    ) -> Self {
        let text = bgpd_text(local, peer, bgp, evpn);
        let daemons = Daemons::new(namespace, &[("bgpd", &text), ("zebra", zebra)]);
        let mut frr = Self { daemons, zebra: None, bgpd: None };
        frr.start_zebra();
        frr.start_bgpd();
        frr
    }

    fn start_zebra(&mut self) {
        self.zebra = Some(self.daemons.start(ZEBRA, "zebra", false));
    }

    pub(crate) fn start_bgpd(&mut self) {
        self.bgpd = Some(self.daemons.start(BGPD, "bgpd", false));
    }

    fn kill_zebra(&mut self) {
        self.zebra.take().expect("a running zebra").kill();
    }

    pub(crate) fn kill_bgpd(&mut self) {
        self.bgpd.take().expect("a running bgpd").kill();
    }

    /// Runs commands in the same shell.
    pub(crate) fn vtysh_all(&self, commands: &[&str]) {
        self.daemons.vtysh(commands).expect();
    }

    pub(crate) fn vtysh(&self, command: &str) -> String {
        let outcome = self.daemons.vtysh(&[command]);
        format!("{}{}", outcome.stdout, outcome.stderr)
    }
}

pub(crate) fn is_missing(variant: Variant) -> bool {
    let needs = [Requirement::File(ZEBRA), Requirement::File(BGPD), Requirement::Program("vtysh")];
    for need in needs.into_iter().chain([Requirement::Program("bridge")]) {
        if let Err(why) = need.check() {
            skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
            return true;
        }
    }
    false
}

/// Namespaces of both leaves and their hosts.
pub(crate) struct Fabric {
    pub(crate) world: World,
    /// Host of the other leaf.
    pub(crate) far: Namespace,
}

impl Fabric {
    /// Creates the namespaces, with a link of its own for BGP.
    pub(crate) fn new(variant: Variant) -> Self {
        Self::with(variant, |gateway, leaf| {
            Veth::new((gateway, "bgp"), (leaf, "bgp")).plug();
            for (namespace, address) in [gateway, leaf].into_iter().zip(SPEAKERS) {
                namespace.ip(&format!("addr add {address}/30 dev bgp"));
            }
            // BGP needs a route to the VTEPs. The gateway's port is not the kernel's.
            gateway.ip(&format!("route add {}/32 via {}", variant.remote(0), SPEAKERS[1]));
        })
    }

    /// Creates the namespaces. The kernel beside the gateway has the address of the gateway, on the same interface.
    pub(crate) fn shared(variant: Variant) -> Self {
        Self::with(variant, |gateway, _| share(gateway, variant))
    }

    fn with(variant: Variant, connect: impl FnOnce(&Namespace, &Namespace)) -> Self {
        let mut world = World::new(variant, 1, 0, 1500);
        world.plug_remote();
        let (gateway, leaf) = (&world.gateway, &world.remotes[0]);
        connect(gateway, leaf);
        leaf.ip(&format!("link add br{VNI} type bridge mcast_snooping 0"));
        let local = variant.remote(0);
        leaf.ip(&format!("link add vx{VNI} type vxlan id {VNI} dstport 4789 local {local} nolearning"));
        leaf.ip(&format!("link set vx{VNI} master br{VNI} up"));
        leaf.run(&["bridge", "link", "set", "dev", &format!("vx{VNI}"), "learning", "off", "neigh_suppress", "on"])
            .expect();
        let far = world.lab.namespace("far");
        Veth::new((leaf, "port"), (&far, "eth0")).mtu(world.inner_mtu()).plug();
        leaf.ip(&format!("link set port master br{VNI}"));
        leaf.ip(&format!("link set br{VNI} up"));
        far.ip(&format!("addr add {}/24 dev eth0", remote_address(0)));
        Self { world, far }
    }

    pub(crate) fn leaf(&self) -> &Namespace {
        &self.world.remotes[0]
    }

    pub(crate) fn host(&self) -> &Namespace {
        &self.world.hosts[0]
    }

    /// Starts FRR beside the gateway and on the other leaf.
    pub(crate) fn frr(&self) -> [Frr<'_>; 2] {
        [Frr::start(&self.world.gateway, SPEAKERS[0], SPEAKERS[1]), Frr::start(self.leaf(), SPEAKERS[1], SPEAKERS[0])]
    }

    pub(crate) fn gateway(&self, keys: &str) -> Gateway {
        self.gateway_with("", keys)
    }

    /// Starts the gateway with keys of the underlay and of the segment.
    pub(crate) fn gateway_with(&self, underlay: &str, keys: &str) -> Gateway {
        self.gateway_of(&(underlay.to_owned() + &blue_segment(&["lan0"], keys)))
    }

    /// Starts the gateway with keys of the underlay and tables of segments.
    pub(crate) fn gateway_of(&self, text: &str) -> Gateway {
        Gateway::start(&self.world.gateway, &(self.world.ports() + text))
    }

    /// Returns the entries of a device of a leaf for an address.
    fn entries(namespace: &Namespace, device: &str, mac: &str) -> Vec<String> {
        let shown = namespace.run(&["bridge", "fdb", "show", "dev", device]).stdout;
        shown.lines().filter(|line| line.starts_with(mac)).map(str::to_owned).collect()
    }
}

/// Returns the table of a segment that the kernel drives, with these ports and further keys.
pub(crate) fn blue_segment(ports: &[&str], keys: &str) -> String {
    let ports: Vec<String> = ports.iter().map(|port| format!("{{ port = \"{port}\" }}")).collect();
    let ports = ports.join(", ");
    format!("[[segment]]\nname = \"blue\"\nvni = {VNI}\ncontrol = \"kernel\"\nports = [{ports}]\n{keys}\n")
}

/// The gateway and its operator.
pub(crate) struct Gateway {
    pub(crate) program: Program,
}

impl Gateway {
    /// Starts a gateway with a configuration and a control socket, and waits until it takes requests.
    #[track_caller]
    pub(crate) fn start(namespace: &Namespace, config: &str) -> Self {
        let config = format!("[control]\nsocket = 'operators.sock'\n{config}");
        let program = Program::start(namespace, GATEWAY, &config);
        let socket = program.path("operators.sock");
        assert!(eventually(WAIT_LIMIT, || Client::connect(&socket).is_ok()), "no control socket");
        Self { program }
    }

    pub(crate) fn rows(&self, table: &str) -> Vec<Map<String, Value>> {
        self.program.rows(table)
    }

    /// Waits until a table satisfies a condition.
    #[track_caller]
    pub(crate) fn wait(&self, table: &str, what: &str, is_met: impl Fn(&[Map<String, Value>]) -> bool) {
        let mut rows = Vec::new();
        let met = eventually(WAIT_LIMIT, || {
            rows = self.rows(table);
            is_met(&rows)
        });
        assert!(met, "{what}: {rows:?}\n{:?}", self.rows("evpn_sync"));
    }

    /// Waits until the gateway has an address at a place.
    #[track_caller]
    pub(crate) fn wait_for_mac(&self, mac: &str, place: Option<(&str, &str)>) {
        self.wait_for_sender(mac, place, || ());
    }

    /// Waits until the gateway has an address at a place, with a call of `send` before each look.
    #[track_caller]
    pub(crate) fn wait_for_sender(&self, mac: &str, place: Option<(&str, &str)>, send: impl Fn()) {
        self.wait("fdb", &format!("{mac} at {place:?}"), |rows| {
            send();
            let found = rows.iter().find(|row| row["mac"] == mac);
            found.map(|row| (row["to"].clone(), row["kind"].clone()))
                == place.map(|(to, kind)| (to.into(), kind.into()))
        });
    }

    /// Waits until the flood list of the gateway has these remotes.
    #[track_caller]
    pub(crate) fn wait_for_remotes(&self, expected: &[String]) {
        self.wait("remotes", &format!("{expected:?}"), |rows| {
            let mut found: Vec<&str> = rows.iter().filter_map(|row| row["remote"].as_str()).collect();
            found.sort_unstable();
            found == expected && rows.iter().all(|row| row["origin"] == "kernel")
        });
    }
}

/// Waits until an entry of a kernel leaf for an address contains a text, or there is none.
#[track_caller]
pub(crate) fn wait_for_entry(namespace: &Namespace, device: &str, mac: &str, text: Option<&str>) {
    let mut entries = Vec::new();
    let met = eventually(WAIT_LIMIT, || {
        entries = Fabric::entries(namespace, device, mac);
        match text {
            Some(text) => entries.iter().any(|entry| entry.contains(text)),
            None => entries.is_empty(),
        }
    });
    assert!(met, "{mac} on {device}, {text:?}: {entries:?}");
}

/// Flood list, addresses in both directions, suppression, and withdrawal of all of it.
pub(crate) fn leaves_exchange_addresses(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let fabric = Fabric::new(variant);
    let (host, far, leaf) = (fabric.host(), &fabric.far, fabric.leaf());
    let [_near, other] = fabric.frr();
    let mut gateway = fabric.gateway("neighbour_suppression = true");
    let (own, remote) = (variant.vtep().to_string(), variant.remote(0).to_string());
    let vxlan = format!("vx{VNI}");

    // Type-3 routes make the flood lists of both.
    gateway.wait_for_remotes(std::slice::from_ref(&remote));
    wait_for_entry(leaf, &vxlan, "00:00:00:00:00:00", Some(&format!("dst {own} ")));
    fabric.world.wait_for(&mut gateway.program, host, &remote_address(0));

    // Type-2 routes make entries, not received packets.
    let (near_mac, far_mac) = (colons(host.mac("eth0")), colons(far.mac("eth0")));
    gateway.wait_for_mac(&far_mac, Some((&remote, "external")));
    gateway.wait_for_mac(&near_mac, Some(("lan0", "learned")));
    wait_for_entry(leaf, &vxlan, &near_mac, Some(&format!("dst {own} ")));
    let access = Fabric::entries(&fabric.world.gateway, &format!("wpac{VNI}"), &near_mac);
    assert!(access.iter().any(|entry| entry.contains("extern_learn")), "{access:?}");
    assert!(pings(host, &remote_address(0), 56, 20) && pings(far, &host_address(0), 1400, 20));
    gateway.wait("evpn", "the figures", |rows| {
        let expected = [("flood", 1), ("macs", 1), ("remotes", 1), ("advertised", 1)];
        rows[0]["state"] == "ready" && expected.iter().all(|(key, n)| rows[0][*key] == *n)
    });

    // The other leaf knows the IP address of its host, and so the gateway answers for it.
    leaf.ip(&format!("neigh replace {} lladdr {far_mac} dev br{VNI} nud reachable", remote_address(0)));
    let binding = remote_address(0);
    gateway.wait("bindings", &binding, |rows| {
        rows.iter().any(|row| row["address"] == *binding && row["mac"] == *far_mac && row["origin"] == "external")
    });
    let replies = || gateway.rows("segments")[0]["neighbour_replies"].as_u64().expect("a counter");
    let before = replies();
    let mut wire = far.frames("eth0");
    wire.drain();
    host.ip("neigh flush all");
    assert!(pings(host, &remote_address(0), 56, 3));
    assert_eq!(replies(), before + 1);
    let is_request = |bytes: &[u8]| bytes[12..14] == [8, 6] && bytes[20..22] == [0, 1] && bytes[..6] == [0xff; 6];
    assert!(!wire.drain().iter().any(|frame| is_request(&frame.bytes)), "the request is flooded");

    // A host that leaves is withdrawn on both sides.
    host.ip("link set eth0 down");
    wait_for_entry(leaf, &vxlan, &near_mac, None);
    host.ip("link set eth0 up");
    far.ip("link set eth0 down");
    gateway.wait_for_mac(&far_mac, None);
    far.ip("link set eth0 up");
    fabric.world.wait_for(&mut gateway.program, host, &remote_address(0));
    gateway.wait_for_mac(&far_mac, Some((&remote, "external")));
    wait_for_entry(leaf, &vxlan, &near_mac, Some(&format!("dst {own} ")));

    // The kernel's devices have carried nothing.
    for statistic in ["rx_packets", "tx_packets"] {
        let count = fabric.world.gateway.statistic(&format!("wpvx{VNI}"), statistic);
        assert_eq!(count, 0, "{statistic} of the shadow device");
    }
    // The gateway leaves the fabric.
    gateway.program.stop();
    wait_for_entry(leaf, &vxlan, "00:00:00:00:00:00", None);
    wait_for_entry(leaf, &vxlan, &near_mac, None);
    let links = fabric.world.gateway.ip("-o link show");
    assert!(!links.contains(": wp"), "{links}");
    assert!(other.vtysh("show bgp l2vpn evpn summary").contains(SPEAKERS[0]));
}

/// A host moves to the other leaf and back.
pub(crate) fn a_host_moves_between_leaves(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let fabric = Fabric::new(variant);
    let (host, far, leaf) = (fabric.host(), &fabric.far, fabric.leaf());
    let _frr = fabric.frr();
    let mut gateway = fabric.gateway("");
    let remote = variant.remote(0).to_string();
    fabric.world.wait_for(&mut gateway.program, host, &remote_address(0));
    // The same address at both ends, one after the other.
    let mac = "02:00:00:00:77:07";
    let announce = |namespace: &Namespace| {
        let source = [2, 0, 0, 0, 0x77, 7];
        let frame = crate::world::ethernet([0xff; 6], source, "moved");
        namespace.frames("eth0").send(&frame).expect("sent");
    };
    for _ in 0..3 {
        // A worker reports the same address again only after a while.
        gateway.wait_for_sender(mac, Some(("lan0", "learned")), || announce(host));
        // The device keeps its entry when the address leaves it, so the entry of the bridge counts.
        wait_for_entry(leaf, &format!("vx{VNI}"), mac, Some("extern_learn master"));
        gateway.wait_for_sender(mac, Some((&remote, "external")), || announce(far));
        wait_for_entry(leaf, "port", mac, Some("master"));
    }
    assert!(pings(host, &remote_address(0), 56, 10));
    gateway.program.stop();
}

/// Zebra ends and starts again, and the gateway is killed and starts again. Known flows lose nothing while zebra is
/// away.
pub(crate) fn daemons_start_again(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let fabric = Fabric::new(variant);
    let (host, far, leaf) = (fabric.host(), &fabric.far, fabric.leaf());
    let [mut near, _other] = fabric.frr();
    let mut gateway = fabric.gateway("");
    let (own, remote) = (variant.vtep().to_string(), variant.remote(0).to_string());
    fabric.world.wait_for(&mut gateway.program, host, &remote_address(0));
    let (near_mac, far_mac) = (colons(host.mac("eth0")), colons(far.mac("eth0")));
    gateway.wait_for_mac(&far_mac, Some((&remote, "external")));
    wait_for_entry(leaf, &format!("vx{VNI}"), &near_mac, Some(&format!("dst {own} ")));

    near.kill_zebra();
    assert!(pings(host, &remote_address(0), 56, 100), "known flows go on without zebra");
    gateway.wait_for_mac(&far_mac, Some((&remote, "external")));
    near.start_zebra();
    // FRR never withdraws an address that goes before zebra knows it again.
    let is_known = || {
        let shown = near.vtysh(&format!("show evpn mac vni {VNI}"));
        shown.lines().any(|line| line.contains(&near_mac) && line.contains("local"))
    };
    assert!(eventually(WAIT_LIMIT, is_known), "{}", near.vtysh("show evpn mac vni all"));
    wait_for_entry(leaf, &format!("vx{VNI}"), &near_mac, Some(&format!("dst {own} ")));
    fabric.world.wait_for(&mut gateway.program, host, &remote_address(0));
    gateway.wait_for_remotes(std::slice::from_ref(&remote));

    // A killed gateway leaves its devices and entries, so the fabric keeps them, and the next run uses them.
    gateway.program.kill();
    let index = |name: &str| fabric.world.gateway.ip(&format!("-o link show {name}"));
    let before = index(&format!("wpvx{VNI}"));
    let mut gateway = fabric.gateway("ageing = 2");
    gateway.wait_for_mac(&far_mac, Some((&remote, "external")));
    assert_eq!(index(&format!("wpvx{VNI}")).split(':').next(), before.split(':').next(), "the same device");
    fabric.world.wait_for(&mut gateway.program, host, &remote_address(0));
    // An entry of the former run whose host does not return goes after the ageing time.
    host.ip("link set eth0 down");
    wait_for_entry(leaf, &format!("vx{VNI}"), &near_mac, None);
    gateway.program.stop();
    let links = fabric.world.gateway.ip("-o link show");
    assert!(!links.contains(": wp"), "{links}");
}

/// A storm of 20 000 entries while the gateway stands still: the kernel drops messages, and the gateway has exactly
/// the entries of the kernel afterwards.
pub(crate) fn a_storm_of_entries_loses_none(variant: Variant) {
    if let Err(why) = Requirement::Program("bridge").check() {
        return skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
    }
    const ENTRIES: u32 = 20_000;
    let fabric = Fabric::new(variant);
    let gateway_namespace = &fabric.world.gateway;
    let mut gateway = fabric.gateway("");
    gateway.wait("evpn", "the devices", |rows| rows[0]["state"] == "ready");
    let mac = |n: u32| {
        let [_, a, b, c] = n.to_be_bytes();
        format!("02:00:00:{a:02x}:{b:02x}:{c:02x}")
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let batch = |name: &str, verb: &str, range: std::ops::Range<u32>, vtep: Ipv4Addr| {
        let mut text = String::new();
        for n in range {
            let dst = if verb == "del" { String::new() } else { format!(" dst {vtep}") };
            writeln!(text, "fdb {verb} {} dev wpvx{VNI}{dst} self", mac(n)).expect("a string grows");
        }
        let path = folder.path().join(name).display().to_string();
        std::fs::write(&path, text).expect("write the batch");
        gateway_namespace.run(&["bridge", "-batch", &path]).expect();
    };
    let (first, second) = (Ipv4Addr::new(10, 9, 0, 2), Ipv4Addr::new(10, 9, 0, 3));
    batch("add", "add", 0..ENTRIES, first);
    gateway.wait("evpn", "all entries", |rows| rows[0]["macs"] == ENTRIES);
    let id = rustix::process::Pid::from_raw(gateway.program.id() as i32).expect("a process");
    rustix::process::kill_process(id, rustix::process::Signal::STOP).expect("stopped");
    for round in 0..16 {
        let vtep = if round % 2 == 0 { second } else { first };
        batch("replace", "replace", 0..ENTRIES, vtep);
    }
    // The final state: half of the addresses are behind the second VTEP, and a quarter is gone.
    batch("replace", "replace", 0..ENTRIES / 2, second);
    batch("del", "del", ENTRIES / 4..ENTRIES / 2, second);
    rustix::process::kill_process(id, rustix::process::Signal::CONT).expect("continued");
    gateway.wait("evpn_sync", "an overflow and another dump", |rows| {
        rows[0]["overflows"].as_u64() > Some(0) && rows[0]["dumps"].as_u64() > Some(1) && rows[0]["pending"] == 0
    });
    gateway.wait("evpn", "the entries that remain", |rows| rows[0]["macs"] == ENTRIES * 3 / 4);
    let at = |n: u32| if n < ENTRIES / 4 { Some(second) } else { (n >= ENTRIES / 2).then_some(first) };
    let expected: std::collections::BTreeMap<String, String> =
        (0..ENTRIES).filter_map(|n| Some((mac(n), at(n)?.to_string()))).collect();
    let met = eventually(WAIT_LIMIT, || {
        let rows = gateway.rows("fdb").into_iter().filter(|row| row["kind"] == "external");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        rows.map(|row| (text(&row["mac"]), text(&row["to"]))).collect::<std::collections::BTreeMap<_, _>>() == expected
    });
    assert!(met, "the forwarding table differs from the kernel's");
    assert!(gateway.program.running());
    gateway.program.stop();
}

/// VTEPs share the flows to an address behind a group of nexthop objects, by their weights. If a member leaves, the
/// flows of the others stay with them. A group that is removed takes its addresses along.
pub(crate) fn groups_of_nexthops_share_flows(variant: Variant) {
    const FLOWS: u16 = 400;
    const FIRST_PORT: u16 = 20_000;
    if let Err(why) = Requirement::Program("bridge").check() {
        return skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
    }
    let fabric = Fabric::new(variant);
    let (kernel, host, far, leaf) = (&fabric.world.gateway, fabric.host(), &fabric.far, fabric.leaf());
    let gateway = fabric.gateway("");
    gateway.wait("evpn", "the devices", |rows| rows[0]["state"] == "ready");
    // The leaf is all VTEPs.
    let vteps = [2, 3, 4].map(|n| variant.address(n).to_string());
    for vtep in &vteps[1..] {
        leaf.ip(&format!("addr add {vtep}/24 dev eth0"));
    }
    for (id, vtep) in (1..).zip(&vteps) {
        kernel.ip(&format!("nexthop add id {id} via {vtep} fdb"));
    }
    kernel.ip("nexthop add id 10 group 1/2/3,2 fdb");
    let far_mac = colons(far.mac("eth0"));
    let other = |n: u8| format!("02:00:00:00:00:{n:02x}");
    for mac in (0..100).map(other).chain([far_mac.clone()]) {
        kernel.run(&["bridge", "fdb", "add", &mac, "dev", &format!("wpvx{VNI}"), "nhid", "10", "self"]).expect();
    }
    let wait = |members: &[&str]| {
        let to = members.join(", ");
        [far_mac.clone(), other(0), other(99)]
            .iter()
            .for_each(|mac| gateway.wait_for_mac(mac, Some((&to, "external"))));
        // Only some packets wait for a next hop that is not known yet.
        let known: Vec<&str> = members.iter().copied().filter(|it| vteps.iter().any(|vtep| vtep == it)).collect();
        gateway.wait("remotes", "next hops", |rows| {
            known.iter().all(|it| rows.iter().any(|row| row["remote"] == **it && row["state"] == "ready"))
        });
    };
    let [first, second, third] = vteps.each_ref().map(String::as_str);
    wait(&[first, second, third]);

    host.ip(&format!("neigh replace {} lladdr {far_mac} dev eth0", remote_address(0)));
    let listener = far.inside(|| UdpSocket::bind((remote_address(0).as_str(), 4242)).expect("a socket"));
    listener.set_read_timeout(Some(Duration::from_secs(5))).expect("a time limit");
    // Sends a datagram of each flow. Returns the VTEP of each one.
    let spread = || -> BTreeMap<u16, String> {
        let mut wire = leaf.frames("eth0");
        let mut arrived = BTreeSet::new();
        // The buffer of a socket does not hold all of them.
        for first in (FIRST_PORT..FIRST_PORT + FLOWS).step_by(50) {
            host.inside(|| {
                for port in first..first + 50 {
                    let socket = UdpSocket::bind((host_address(0).as_str(), port)).expect("a socket");
                    socket.send_to(&port.to_be_bytes(), (remote_address(0).as_str(), 4242)).expect("sent");
                }
            });
            for _ in 0..50 {
                let mut bytes = [0; 2];
                let (len, from) = listener.recv_from(&mut bytes).expect("a datagram of each flow");
                assert_eq!((len, u16::from_be_bytes(bytes)), (2, from.port()));
                assert!(arrived.insert(from.port()), "a datagram came twice");
            }
        }
        let frames: Vec<Vec<u8>> = wire.drain().into_iter().map(|frame| frame.bytes).collect();
        let vtep = |frame: &Vec<u8>| {
            let parsed = parse(frame).ok().filter(|parsed| parsed.vni().is_some())?;
            let udp = parsed.innermost().udp(frame).filter(|udp| udp.dst_port() == 4242)?;
            Some((udp.src_port(), parsed.outer().ip_addresses(frame)?.1.to_string()))
        };
        frames.iter().filter_map(vtep).collect()
    };
    let count = |flows: &BTreeMap<u16, String>, vtep: &str| flows.values().filter(|it| *it == vtep).count();
    let before = spread();
    assert_eq!(before.len(), usize::from(FLOWS));
    // Five standard deviations of a binomial distribution are 50 flows.
    for (vtep, expected) in [(first, 100), (second, 100), (third, 200)] {
        assert!(count(&before, vtep).abs_diff(expected) < 50, "{vtep} has {} flows", count(&before, vtep));
    }
    assert_eq!(spread(), before, "each flow stays with its VTEP");

    kernel.ip("nexthop replace id 10 group 1/3,2 fdb");
    wait(&[first, third]);
    let without = spread();
    for (port, vtep) in &before {
        assert!(vtep == second || without[port] == *vtep, "flow {port} went from {vtep} to {}", without[port]);
    }
    assert_eq!(count(&without, second), 0);
    kernel.ip("nexthop replace id 10 group 1/2/3,2 fdb");
    wait(&[first, second, third]);
    assert!(count(&spread(), second).abs_diff(100) < 50);
    // A member gets another VTEP, which nobody is.
    let absent = variant.address(9).to_string();
    kernel.ip(&format!("nexthop replace id 3 via {absent} fdb"));
    wait(&[first, second, &absent]);
    kernel.ip("nexthop del id 10");
    gateway.wait("evpn", "no entries", |rows| rows[0]["macs"] == 0);
    gateway.wait("evpn_sync", "three objects", |rows| rows[0]["nexthops"] == 3 && rows[0]["unsupported"] == 0);
    gateway.program.stop();
}

/// The address of the gateway is the kernel's, bgpd speaks from it, and next hops come from the kernel.
pub(crate) fn the_underlay_is_shared_with_the_kernel(variant: Variant) {
    const BYTES: u64 = 64 << 20;
    if is_missing(variant) {
        return;
    }
    let fabric = Fabric::shared(variant);
    let (world, host, far, leaf) = (&fabric.world, fabric.host(), &fabric.far, fabric.leaf());
    let kernel = &world.gateway;
    let routers = [21, 22].map(|n| plug_router(world, n));
    let (own, remote) = (variant.vtep().to_string(), variant.remote(0).to_string());
    let [near, _other] = [Frr::start(kernel, &own, &remote), Frr::start(leaf, &remote, &own)];
    let mut gateway = fabric.gateway_with(SHARED, "neighbour_suppression = true");
    gateway.wait_for_remotes(std::slice::from_ref(&remote));
    world.wait_for(&mut gateway.program, host, &remote_address(0));
    let session = || -> Value {
        let shown = near.vtysh(&format!("show bgp neighbors {remote} json"));
        let json: Value = serde_json::from_str(&shown).unwrap_or_else(|error| panic!("{error}: {shown}"));
        json[&remote].clone()
    };
    assert_eq!(session()["bgpState"], "Established", "{}", session());
    let dropped = session()["connectionsDropped"].clone();
    let leaf_wire = &mut leaf.frames("eth0");

    // Addresses both ways, and traffic both ways.
    let (near_mac, far_mac) = (colons(host.mac("eth0")), colons(far.mac("eth0")));
    gateway.wait_for_mac(&far_mac, Some((&remote, "external")));
    wait_for_entry(leaf, &format!("vx{VNI}"), &near_mac, Some(&format!("dst {own} ")));
    assert!(pings(host, &remote_address(0), 56, 50) && pings(far, &host_address(0), 1400, 50));
    for (from, to, address) in [(host, far, remote_address(0)), (far, host, host_address(0))] {
        let (sent, received) = transfer(from, to, &address, BYTES);
        assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum");
    }
    // Everything else stays with the kernel, beside the tunnels.
    assert!(pings(leaf, &own, 56, 50), "the kernel answers for its address");

    let next_hop = |via: &str, mac: [u8; 6]| {
        gateway.wait("remotes", &format!("{via} at {}", colons(mac)), |rows| {
            rows.len() == 1
                && rows[0]["next_hop"] == *via
                && rows[0]["mac"] == *colons(mac)
                && ["ready", "in_nic"].iter().any(|state| rows[0]["state"] == *state)
        });
    };
    let passed = |router: &Namespace| router.statistic("eth0", "rx_packets");
    // Sends 50 pings and requires that all leave by one router, or by none.
    let leaves_by = |expected: Option<usize>| {
        let before = [0, 1].map(|n| passed(&routers[n]));
        assert!(pings(host, &remote_address(0), 56, 50), "{:?}", gateway.rows("remotes"));
        for n in 0..2 {
            let count = passed(&routers[n]) - before[n];
            // BGP, ARP and others pass too.
            assert_eq!(count >= 50, expected == Some(n), "router {n}: {count} packets, expected by {expected:?}");
        }
    };
    next_hop(&remote, leaf.mac("eth0"));
    leaves_by(None);

    // An entry of the kernel moves the traffic, and its end moves it back.
    let router_mac = routers[0].mac("eth0");
    kernel.ip(&format!("neigh replace {remote} lladdr {} dev wan nud permanent", colons(router_mac)));
    next_hop(&remote, router_mac);
    leaves_by(Some(0));
    // The gateway reports next hops as in use each second, which would take the entry its permanence.
    std::thread::sleep(Duration::from_millis(2500));
    let entry = kernel.ip(&format!("neigh show {remote} dev wan"));
    assert!(entry.contains("PERMANENT") && entry.contains(&colons(router_mac)), "{entry}");
    kernel.ip(&format!("neigh del {remote} dev wan"));
    next_hop(&remote, leaf.mac("eth0"));
    leaves_by(None);

    // The leaf gets another Ethernet address.
    leaf.ip("link set eth0 address 02:00:00:00:77:01");
    next_hop(&remote, [2, 0, 0, 0, 0x77, 1]);
    leaves_by(None);

    // Routes move the traffic, also those with several next hops.
    let route = |hops: &str| kernel.ip(&format!("route replace {remote}/32 {hops}"));
    route("via 10.9.0.21 dev wan");
    next_hop("10.9.0.21", routers[0].mac("eth0"));
    leaves_by(Some(0));
    route("via 10.9.0.22 dev wan");
    next_hop("10.9.0.22", routers[1].mac("eth0"));
    leaves_by(Some(1));
    route("nexthop via 10.9.0.21 dev wan nexthop via 10.9.0.22 dev wan");
    gateway.wait("underlay_sync", "both next hops", |rows| rows[0]["next_hops"] == 2);
    assert!(pings(host, &remote_address(0), 56, 50));
    // The router of the pair that fails is left.
    let chosen = gateway.rows("remotes")[0]["next_hop"].clone();
    let failed = usize::from(chosen == "10.9.0.22");
    routers[failed].ip("link set eth0 down");
    kernel.ip(&format!("neigh del 10.9.0.2{} dev wan", failed + 1));
    next_hop(["10.9.0.22", "10.9.0.21"][failed], routers[1 - failed].mac("eth0"));
    leaves_by(Some(1 - failed));
    kernel.ip(&format!("route del {remote}/32"));
    next_hop(&remote, leaf.mac("eth0"));
    leaves_by(None);

    // The session has lasted, no tunnel packet has reached the kernel, and it has refused none.
    assert_eq!((&session()["bgpState"], &session()["connectionsDropped"]), (&"Established".into(), &dropped));
    for statistic in ["rx_packets", "rx_dropped", "rx_errors", "tx_packets"] {
        let count = kernel.statistic(&format!("wpvx{VNI}"), statistic);
        assert_eq!(count, 0, "{statistic} of the shadow device");
    }
    let is_unreachable = |bytes: &[u8]| bytes[12..14] == [8, 0] && bytes[23] == 1 && bytes[34] == 3;
    assert!(!leaf_wire.drain().iter().any(|frame| is_unreachable(&frame.bytes)), "ICMP errors about tunnel packets");
    // Fragments that a port leaves to the kernel become a packet of its VXLAN device. The bridge drops the inner frame.
    let inner = format!(
        "outer = IP(src='{remote}', dst='{own}', id=4711)/UDP(dport=4789, chksum=0)/VXLAN(flags=8, vni={VNI})
inner = Ether(src='02:00:00:00:77:31', dst='ff:ff:ff:ff:ff:ff')/IP(dst='10.1.0.255')/UDP()/(b'x' * 1300)
for part in reversed(fragment(outer/inner, fragsize=800)):
    emit(Ether(src='{}', dst='{}')/part)
",
        colons(leaf.mac("eth0")),
        colons(kernel.mac("wan")),
    );
    let none: [&[u8]; 0] = [];
    let parts = oracle::scapy(&none, &inner).frames;
    assert_eq!(parts.len(), 2);
    let mut at_host = host.frames("eth0");
    let carried = || kernel.statistic(&format!("wpbr{VNI}"), "rx_packets");
    let before = carried();
    for part in &parts {
        leaf_wire.send(part).expect("sent");
    }
    // Rules of a NIC take no fragments of UDP.
    let received = || kernel.statistic(&format!("wpvx{VNI}"), "rx_packets");
    let state = |file: &str| kernel.run(&["cat", &format!("/sys/class/net/{file}")]).stdout;
    let port = format!("wpvx{VNI}/brport");
    assert_eq!(state(&format!("{port}/state")), "1\n", "the port is not in the state listening");
    assert_eq!(state(&format!("{port}/forward_delay_timer")), "0\n", "a timer will let the port forward");
    assert!(!variant.is_emulated() || eventually(WAIT_LIMIT, || received() == 1), "the kernel has the datagram");
    assert!(pings(host, &remote_address(0), 56, 50));
    assert_eq!(carried(), before, "the bridge has the inner frame");
    // The other drivers take such fragments too, and the gateway joins them.
    let is_inner = |frame: &wirepath_testlab::Frame| frame.bytes[6..12] == [2, 0, 0, 0, 0x77, 0x31];
    assert!(!variant.is_emulated() || !at_host.drain().iter().any(is_inner), "a host has the inner frame");
    // The devices come back as they were when somebody sets them down.
    for device in ["wpvx", "wpac"].map(|kind| format!("{kind}{VNI}")) {
        kernel.ip(&format!("link set {device} down"));
        let is_back = || state(&format!("{port}/state")) == "1\n" && state(&format!("{device}/carrier")) == "1\n";
        assert!(eventually(WAIT_LIMIT, is_back), "{}", kernel.ip("link show"));
    }
    // A black hole drops the frames, like the packets of the session, until it goes.
    kernel.ip(&format!("route replace blackhole {remote}/32"));
    gateway.wait("remotes", "no next hop", |rows| {
        rows.first().is_some_and(|row| row["state"] == "unreachable" && row["next_hop"].is_null())
    });
    kernel.ip(&format!("route del blackhole {remote}/32"));
    next_hop(&remote, leaf.mac("eth0"));
    world.wait_for(&mut gateway.program, host, &remote_address(0));
    gateway.program.stop();
    // An emulated NIC ends with the program.
    assert!(variant.is_emulated() || pings(leaf, &own, 56, 5), "the interface is the kernel's again");
}
