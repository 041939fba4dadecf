//! Symmetric routing between subnets (RFC 9135, RFC 9136): the gateway and a kernel leaf route over an L3VNI. FRR of
//! both exchanges the subnets.
//!
//! ```text
//! host0 --- lan0 | gateway: blue, transit | wan --- eth0 | leaf: br4001, br44 | port44 --- beyond
//! 10.1.0.1/24      10.1.0.254              VNI 4001        10.4.0.254/24                   10.4.0.1/24
//! ```

use std::collections::BTreeSet;
use std::net::UdpSocket;

use serde_json::Value;
use wirepath_testlab::{LinuxGuest, Namespace, Requirement, Veth, eventually, run, skip_or_fail};

use crate::evpn::{BGPD, Fabric, Frr, Gateway, SPEAKERS, ZEBRA, bgpd_text, is_missing};
use crate::evpn_leaves::neighbour_lines;
use crate::frr::{PREPARE_GUEST, guest_daemon};
use crate::tcp::transfer;
use crate::underlay::SHARED;
use crate::world::{VNI, Variant, WAIT_LIMIT, colons, host_address, pings};

/// VNI of the packets between the routers.
const L3VNI: u32 = 4001;
/// VNI of the subnet that only the other leaf has.
const FAR_VNI: u32 = 44;
/// Router of the gateway.
const ROUTER_MAC: &str = "02:00:00:00:40:01";
/// Networks of both sides, each with the router's address and a host's.
const NEAR: [[&str; 3]; 2] = [["10.1.0.0/24", "10.1.0.254", "10.1.0.1"], ["fd01::/64", "fd01::fe", "fd01::1"]];
const FAR: [[&str; 3]; 2] = [["10.4.0.0/24", "10.4.0.254", "10.4.0.1"], ["fd04::/64", "fd04::fe", "fd04::1"]];

/// Returns an address with the prefix length of its network.
fn with_len([network, address]: [&str; 2]) -> String {
    let (_, len) = network.split_once('/').expect("a network");
    format!("{address}/{len}")
}

/// Gives a host its addresses, and a default route by the router.
fn plug_host(host: &Namespace, networks: [[&str; 3]; 2]) {
    host.ipv6("eth0");
    for [network, router, address] in networks {
        let own = with_len([network, address]);
        let nodad = if address.contains(':') { " nodad" } else { "" };
        if address != host_address(0) {
            host.ip(&format!("addr add {own} dev eth0{nodad}"));
        }
        let family = if address.contains(':') { "-6 " } else { "" };
        host.ip(&format!("{family}route add default via {router}"));
    }
}

/// Makes leaf `n` a router with a subnet of its own. Returns the host there.
fn plug_router(fabric: &Fabric, n: usize) -> Namespace {
    let leaf = &fabric.world.remotes[n];
    let local = fabric.world.variant.remote(n);
    let far_vni = FAR_VNI + n as u32;
    for vni in [L3VNI, far_vni] {
        leaf.ip(&format!("link add br{vni} type bridge mcast_snooping 0"));
        leaf.ip(&format!("link add vx{vni} type vxlan id {vni} dstport 4789 local {local} nolearning"));
        leaf.ip(&format!("link set vx{vni} master br{vni} up"));
        leaf.run(&["bridge", "link", "set", "dev", &format!("vx{vni}"), "learning", "off", "neigh_suppress", "on"])
            .expect();
    }
    let beyond = fabric.world.lab.namespace(&format!("beyond{n}"));
    Veth::new((leaf, "port44"), (&beyond, "eth0")).mtu(fabric.world.inner_mtu()).plug();
    leaf.ip(&format!("link set port44 master br{far_vni}"));
    for vni in [L3VNI, far_vni] {
        leaf.ipv6(&format!("br{vni}"));
        leaf.ip(&format!("link set br{vni} up"));
    }
    for [network, router, _] in FAR {
        let nodad = if router.contains(':') { " nodad" } else { "" };
        leaf.ip(&format!("addr add {} dev br{far_vni}{nodad}", with_len([network, router])));
    }
    for key in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
        leaf.run(&["sysctl", "-qw", &format!("{key}=1")]).expect();
    }
    plug_host(&beyond, FAR);
    beyond
}

/// Lines of the EVPN address family by which bgpd advertises the networks of a VRF.
const ADVERTISED: &str = "  advertise ipv4 unicast\n  advertise ipv6 unicast\n";

/// Returns the lines by which these networks are in the tables of bgpd.
fn network_lines(networks: [[&str; 3]; 2]) -> String {
    let [v4, v6] = networks.map(|[network, ..]| network);
    format!(
        " address-family ipv4 unicast\n  network {v4}\n exit-address-family\n \
         address-family ipv6 unicast\n  network {v6}\n exit-address-family\n"
    )
}

/// Starts FRR of a leaf. It advertises these networks.
fn frr<'a>(namespace: &'a Namespace, local: &str, peer: &str, networks: [[&str; 3]; 2]) -> Frr<'a> {
    let zebra = format!("vni {L3VNI}\n");
    Frr::routing(namespace, local, peer, &zebra, &network_lines(networks), ADVERTISED)
}

/// Waits until the gateway has exactly these routes from the kernel.
#[track_caller]
fn wait_for_routes(gateway: &Gateway, expected: &[String]) {
    gateway.wait("routes", &format!("{expected:?}"), |rows| {
        let of_kernel = rows.iter().filter(|row| row["origin"] == "kernel");
        let mut found: Vec<&str> = of_kernel.filter_map(|row| row["to"].as_str()).collect();
        found.sort_unstable();
        found == expected
    });
}

/// Returns the TTLs or hop limits of the echo requests (8 or 128) and replies that a host has received.
fn hop_limits(frames: &[Vec<u8>], kinds: [u8; 2]) -> Vec<u8> {
    let of = |frame: &Vec<u8>| match frame.get(12..14)? {
        [8, 0] if frame.get(23) == Some(&1) && frame.get(34) == Some(&kinds[0]) => frame.get(22).copied(),
        [0x86, 0xdd] if frame.get(20) == Some(&58) && frame.get(54) == Some(&kinds[1]) => frame.get(21).copied(),
        _ => None,
    };
    frames.iter().filter_map(of).collect()
}

/// Returns the table of a segment whose remotes come from the kernel.
fn segment(name: &str, vni: u32, keys: &str) -> String {
    format!("[[segment]]\nname = \"{name}\"\nvni = {vni}\ncontrol = \"kernel\"\n{keys}\n")
}

/// Returns the two segments of the gateway: that of its hosts, with the routers' addresses, and the L3VNI.
fn segments(vrf: &str) -> String {
    let addresses = NEAR.map(|[network, router, _]| format!("\"{}\"", with_len([network, router]))).join(", ");
    let blue = format!("ports = [{{ port = \"lan0\" }}]\nvrf = \"{vrf}\"\naddresses = [{addresses}]");
    let transit = format!("vrf = \"{vrf}\"\nrouter_mac = \"{ROUTER_MAC}\"");
    segment("blue", VNI, &blue) + &segment("transit", L3VNI, &transit)
}

/// Checks that both directions lose nothing, and that each router takes one from the TTL. The packets carry the VNI of
/// the routers, and the devices of the kernel beside the gateway carry none.
fn check_both_ways(fabric: &Fabric, beyond: &Namespace) {
    let (host, leaf, near) = (fabric.host(), fabric.leaf(), &fabric.world.gateway);
    for ([_, _, near_address], [_, _, far_address]) in NEAR.into_iter().zip(FAR) {
        let (mut at_host, mut at_far) = (host.frames("eth0"), beyond.frames("eth0"));
        assert!(pings(host, far_address, 56, 50) && pings(beyond, near_address, 1300, 50), "{far_address}");
        let bytes = |frames: Vec<wirepath_testlab::Frame>| frames.into_iter().map(|it| it.bytes).collect::<Vec<_>>();
        let requests = hop_limits(&bytes(at_far.drain()), [8, 128]);
        let replies = hop_limits(&bytes(at_host.drain()), [0, 129]);
        assert!(requests.len() >= 50 && requests.iter().all(|ttl| *ttl == 62 || *ttl == 64), "{requests:?}");
        assert!(requests.iter().filter(|ttl| **ttl == 62).count() >= 50, "{requests:?}");
        assert!(replies.iter().filter(|ttl| **ttl == 62).count() >= 50, "{replies:?}");
    }
    for (from, to, address) in [(host, beyond, FAR[0][2]), (beyond, host, NEAR[0][2])] {
        let (sent, received) = transfer(from, to, address, 8 << 20);
        assert_eq!((sent, sent.0), (received, 8 << 20));
    }
    for vni in [VNI, L3VNI] {
        for statistic in ["rx_packets", "tx_packets"] {
            let count = near.statistic(&format!("wpvx{vni}"), statistic);
            assert_eq!(count, 0, "{statistic} of the shadow device of VNI {vni}");
        }
    }
    let received = leaf.statistic(&format!("vx{L3VNI}"), "rx_packets");
    assert!(received > 200, "{received} packets with the VNI {L3VNI}");
}

/// Routes between subnets by VTEPs with IPv6 addresses, for networks of both versions. FRR 8.4 knows no such VTEPs, so
/// `ip` and `bridge` write what a daemon would.
pub(crate) fn subnets_are_routed_by_ipv6_vteps(variant: Variant) {
    let fabric = Fabric::shared(variant);
    let (host, leaf, near) = (fabric.host(), fabric.leaf(), &fabric.world.gateway);
    // The kernel refuses an IPv6 next hop on a bridge if a route of the same table leads to it by another interface. A
    // default route is no such one (linux: net/ipv6/route.c, ip6_route_check_nh_onlink). A VRF has its own table.
    for (namespace, device) in [(near, "wan"), (leaf, "eth0")] {
        namespace.ip(&format!("-6 route del fd00:9::/64 dev {device}"));
        namespace.ip(&format!("-6 route add default dev {device}"));
    }
    let beyond = plug_router(&fabric, 0);
    plug_host(host, NEAR);
    near.run(&["sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=0"]).expect();
    let gateway = fabric.gateway_of(&(SHARED.to_owned() + &segments("default")));
    gateway.wait("evpn", "the devices", |rows| rows.len() == 2 && rows.iter().all(|row| row["state"] == "ready"));
    // A bridge that was set up gets its address again after a second. The kernel drops its neighbours then, which zebra
    // would write again.
    std::thread::sleep(std::time::Duration::from_secs(2));
    let (own, remote) = (variant.vtep().to_string(), variant.remote(0).to_string());
    let far_router = colons(leaf.mac(&format!("br{L3VNI}")));
    // What zebra writes for a type-5 route: the router's address behind the VTEP, and the route by the bridge.
    let write = |namespace: &Namespace, [bridge, vxlan]: [&str; 2], vtep: &str, mac: &str, networks: [[&str; 3]; 2]| {
        namespace.ip(&format!("-6 neigh replace {vtep} lladdr {mac} dev {bridge} nud noarp extern_learn"));
        for place in [&format!("dst {vtep} self extern_learn"), "master extern_learn"] {
            let text = format!("bridge fdb replace {mac} dev {vxlan} {place}");
            namespace.run(&text.split(' ').collect::<Vec<_>>()).expect();
        }
        for [network, ..] in networks {
            let via = if network.contains(':') { "via" } else { "via inet6" };
            namespace.ip(&format!("route replace {network} {via} {vtep} dev {bridge} onlink proto bgp metric 20"));
        }
    };
    let (shadow, far) =
        ([format!("wpbr{L3VNI}"), format!("wpvx{L3VNI}")], [format!("br{L3VNI}"), format!("vx{L3VNI}")]);
    write(near, shadow.each_ref().map(String::as_str), &remote, &far_router, FAR);
    write(leaf, far.each_ref().map(String::as_str), &own, ROUTER_MAC, NEAR);
    let all = FAR.map(|[network, ..]| network.to_owned());
    wait_for_routes(&gateway, &all);
    for [_, _, address] in FAR {
        assert!(eventually(WAIT_LIMIT, || pings(host, address, 56, 1)), "{address}: {:?}", gateway.rows("routes"));
    }
    check_both_ways(&fabric, &beyond);

    // The router of the leaf gets another address, which its neighbour entry tells.
    let other = "02:00:00:00:40:02";
    leaf.ip(&format!("link set br{L3VNI} address {other}"));
    write(near, shadow.each_ref().map(String::as_str), &remote, other, FAR);
    // The leaf's kernel has dropped the neighbours of its bridge.
    write(leaf, far.each_ref().map(String::as_str), &own, ROUTER_MAC, NEAR);
    let via: Value = format!("{other} in segment transit").into();
    gateway.wait("routes", "the other address", |rows| {
        let mut of_kernel = rows.iter().filter(|row| row["origin"] == "kernel");
        of_kernel.all(|row| row["via"] == via)
    });
    for [_, _, address] in FAR {
        assert!(eventually(WAIT_LIMIT, || pings(host, address, 56, 20)), "{address}: {:?}", gateway.rows("routes"));
    }
    for [network, ..] in FAR {
        near.ip(&format!("route del {network}"));
    }
    wait_for_routes(&gateway, &[]);
    gateway.program.stop();
}

/// Both leaves route between their subnets: networks and single hosts by type-5 and type-2 routes, IPv4 and IPv6.
pub(crate) fn subnets_are_routed_both_ways(variant: Variant) {
    if !is_missing(variant) {
        route_subnets(&Fabric::new(variant), "", SPEAKERS.map(str::to_owned));
    }
}

/// The same, with an underlay that the gateway shares with the kernel.
pub(crate) fn subnets_are_routed_over_a_shared_underlay(variant: Variant) {
    if !is_missing(variant) {
        let speakers = [variant.vtep().to_string(), variant.remote(0).to_string()];
        route_subnets(&Fabric::shared(variant), SHARED, speakers);
    }
}

fn route_subnets(fabric: &Fabric, underlay: &str, speakers: [String; 2]) {
    let variant = fabric.world.variant;
    let (host, leaf, near) = (fabric.host(), fabric.leaf(), &fabric.world.gateway);
    let beyond = plug_router(fabric, 0);
    plug_host(host, NEAR);
    near.run(&["sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=0"]).expect();
    let gateway = fabric.gateway_of(&(underlay.to_owned() + &segments("default")));
    gateway.wait("evpn", "the devices", |rows| rows.len() == 2 && rows.iter().all(|row| row["state"] == "ready"));
    // FRR 8.4 lacks the router's address if it learns routes before the L3VNI is up.
    let [at_near, at_far] = &speakers;
    let daemons = [frr(near, at_near, at_far, NEAR), frr(leaf, at_far, at_near, FAR)];

    // The routers know each other, and the gateway's one has the address of the configuration.
    let (own, remote) = (variant.vtep().to_string(), variant.remote(0).to_string());
    let bridge = near.ip(&format!("-o addr show dev wpbr{VNI}"));
    assert!(NEAR.iter().all(|[_, router, _]| bridge.contains(&format!(" {router}/"))), "{bridge}");
    let reached = eventually(WAIT_LIMIT, || {
        let neighbours = leaf.ip(&format!("neigh show dev br{L3VNI}"));
        neighbours.lines().any(|line| line.contains(&own) && line.contains(ROUTER_MAC))
    });
    assert!(reached, "{}", daemons[1].vtysh("show evpn rmac vni all"));
    for [_, _, address] in FAR {
        assert!(eventually(WAIT_LIMIT, || pings(host, address, 56, 1)), "{address}: {:?}", gateway.rows("routes"));
    }
    // The host of the other leaf has answered the leaf, which advertises its addresses too.
    let far_router = colons(leaf.mac(&format!("br{L3VNI}")));
    let all = ["10.4.0.0/24", "10.4.0.1/32", "fd04::/64", "fd04::1/128"].map(str::to_owned);
    wait_for_routes(&gateway, &all);
    let via: Value = format!("{far_router} in segment transit").into();
    let rows = gateway.rows("routes");
    let mut of_kernel = rows.iter().filter(|row| row["origin"] == "kernel");
    assert!(of_kernel.all(|row| row["via"] == via && row["vrf"] == "default"), "{rows:?}");
    gateway.wait("evpn", "the figures", |rows| {
        let row = rows.iter().find(|row| row["segment"] == "transit").expect("a row");
        row["routes"] == 4 && row["macs"] == 1 && row["flood"] == 0 && row["remotes"] == 1
    });

    check_both_ways(fabric, &beyond);

    // A withdrawn network is unreachable at once, and returns.
    let change = |line: &str| {
        let commands = ["configure terminal", "router bgp 65000", "address-family ipv4 unicast", line];
        daemons[1].vtysh_all(&commands);
    };
    change(&format!("no network {}", FAR[0][0]));
    wait_for_routes(&gateway, &all[1..]);
    let lost = host.run(&["ping", "-n", "-c", "1", "-W", "3", "10.4.0.77"]);
    assert!(lost.stdout.contains(&format!("From {} ", NEAR[0][1])), "{}", lost.stdout);
    change(&format!("network {}", FAR[0][0]));
    wait_for_routes(&gateway, &all);

    // A kernel that sets the bridge down forgets its routes without a message.
    near.ip(&format!("link set wpbr{L3VNI} down"));
    wait_for_routes(&gateway, &[]);
    // If zebra sees both changes at once, it finds its routes unchanged and does not write them again.
    let shown = || daemons[0].vtysh(&format!("show interface wpbr{L3VNI}"));
    assert!(eventually(WAIT_LIMIT, || shown().contains("is down")), "{}", shown());
    near.ip(&format!("link set wpbr{L3VNI} up"));
    wait_for_routes(&gateway, &all);
    assert!(eventually(WAIT_LIMIT, || pings(host, FAR[1][2], 56, 3)), "{remote}");

    // A bridge that somebody changes is as the router again. It keeps its neighbours.
    let shadow = format!("wpbr{VNI}");
    let mac = near.mac(&shadow);
    let is_router = || {
        let shown = near.ip(&format!("-o addr show dev {shadow}"));
        let addresses = shown.lines().filter(|line| !line.contains("fe80")).count();
        addresses == 2 && NEAR.iter().all(|[_, router, _]| shown.contains(&format!(" {router}/")))
    };
    near.ip(&format!("neigh add 10.1.0.99 lladdr 02:00:00:00:77:99 dev {shadow} nud permanent"));
    near.ip(&format!("addr add 192.0.2.77/32 dev {shadow}"));
    assert!(eventually(WAIT_LIMIT, is_router), "{}", near.ip(&format!("-o addr show dev {shadow}")));
    assert!(near.ip(&format!("neigh show dev {shadow}")).contains("10.1.0.99"), "the neighbour is gone");
    // Another address of the same network is a primary one, with which the kernel removes the secondary ones.
    near.ip(&format!("addr flush dev {shadow} scope global"));
    near.ip(&format!("addr add 10.1.0.77/24 dev {shadow}"));
    assert!(eventually(WAIT_LIMIT, is_router), "{}", near.ip(&format!("-o addr show dev {shadow}")));
    near.ip(&format!("addr add {}/24 peer 10.1.7.7/32 dev {shadow}", NEAR[0][1]));
    assert!(eventually(WAIT_LIMIT, is_router), "{}", near.ip(&format!("-o addr show dev {shadow}")));
    near.ip(&format!("addr flush dev {shadow}"));
    assert!(eventually(WAIT_LIMIT, is_router), "{}", near.ip(&format!("-o addr show dev {shadow}")));
    near.ip(&format!("link set {shadow} address 02:00:00:00:77:98"));
    assert!(eventually(WAIT_LIMIT, || near.mac(&shadow) == mac), "{}", near.ip(&format!("link show dev {shadow}")));
    // IPv6 that is off takes the address, which returns with it.
    let ipv6 = format!("net/ipv6/conf/{shadow}/disable_ipv6");
    near.sysctl(&ipv6, "1");
    assert!(eventually(WAIT_LIMIT, || !is_router()));
    near.ip(&format!("addr add 192.0.2.78/32 dev {shadow}"));
    let is_checked = || !near.ip(&format!("-o addr show dev {shadow}")).contains("192.0.2.78");
    assert!(eventually(WAIT_LIMIT, is_checked), "the other address stays");
    near.sysctl(&ipv6, "0");
    assert!(eventually(WAIT_LIMIT, is_router), "{}", near.ip(&format!("-o addr show dev {shadow}")));
    assert!(eventually(WAIT_LIMIT, || pings(host, FAR[1][2], 56, 3) && pings(host, FAR[0][2], 56, 3)));
    let (_, log) = gateway.program.stop_with_log();
    assert_eq!(log.matches("IPv6 is off there").count(), 1, "{log}");
    let links = near.ip("-o link show");
    assert!(!links.contains(": wp"), "{links}");
}

/// Two leaves advertise the same network and the same host. Flows are spread over both routers, and go to the other one
/// while one leaf has no BGP.
pub(crate) fn leaves_share_a_network(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let mut fabric = Fabric::shared(variant);
    fabric.world.plug_remote();
    let (host, near, leaves) = (fabric.host(), &fabric.world.gateway, &fabric.world.remotes);
    let beyond = [0, 1].map(|n| plug_router(&fabric, n));
    plug_host(host, NEAR);
    let gateway = fabric.gateway_of(&(SHARED.to_owned() + &segments("default")));
    gateway.wait("evpn", "the devices", |rows| rows.len() == 2 && rows.iter().all(|row| row["state"] == "ready"));
    let own = variant.vtep().to_string();
    let vteps = [0, 1].map(|n| variant.remote(n).to_string());
    let [second, activate] = neighbour_lines(&vteps[1]);
    let (zebra, bgp, evpn) =
        (format!("vni {L3VNI}\n"), second + &network_lines(NEAR), ADVERTISED.to_owned() + &activate);
    let _near = Frr::routing(near, &own, &vteps[0], &zebra, &bgp, &evpn);
    // FRR 8.4 drops the router's address of a leaf when another leaf joins the last route of an IP version. So each
    // leaf has networks of its own too.
    let mut far = [0, 1].map(|n| {
        let networks = [format!("10.5.{n}.0/24"), format!("fd05:{n}::/64")];
        leaves[n].ip(&format!("addr add 10.5.{n}.1/24 dev br{L3VNI}"));
        leaves[n].ip(&format!("addr add fd05:{n}::1/64 dev br{L3VNI} nodad"));
        let bgp = network_lines(FAR) + &network_lines(networks.each_ref().map(|network| [network.as_str(), "", ""]));
        Frr::routing(&leaves[n], &vteps[n], &own, &zebra, &bgp, ADVERTISED)
    });

    // A leaf advertises its host when it knows the address of the host.
    let [network, router, address] = FAR[0];
    let routers = [0, 1].map(|n| colons(leaves[n].mac(&format!("br{L3VNI}"))));
    let wait_for_routers = |expected: &[usize]| {
        let is_expected = |via: &str| (0..2).all(|n| via.contains(&routers[n]) == expected.contains(&n));
        gateway.wait("routes", &format!("routers {expected:?}"), |rows| {
            let reach = |to: &str| {
                let row = rows.iter().find(|row| row["to"] == *to && row["origin"] == "kernel");
                row.and_then(|row| row["via"].as_str()).is_some_and(is_expected)
            };
            beyond.iter().for_each(|host| _ = pings(host, router, 56, 1));
            reach(network) && reach(&format!("{address}/32"))
        });
        expected.iter().for_each(|n| gateway.wait_for_mac(&routers[*n], Some((&vteps[*n], "external"))));
    };
    let flows = || spread_flows(host, &beyond, address);
    wait_for_routers(&[0, 1]);
    let both = flows();
    assert!(both.iter().all(|arrived| arrived.len() > usize::from(FLOWS / 4)), "{both:?}");

    for n in [0, 1] {
        far[n].kill_bgpd();
        wait_for_routers(&[1 - n]);
        let one = flows();
        assert!(one[n].is_empty() && one[1 - n].len() == usize::from(FLOWS), "without leaf {n}: {one:?}");
        far[n].start_bgpd();
        wait_for_routers(&[0, 1]);
        let again = flows();
        assert!(again.iter().all(|arrived| arrived.len() > usize::from(FLOWS / 4)), "{again:?}");
    }
    gateway.program.stop();
}

/// Flows of [`spread_flows`]. Their datagrams fit in the buffer of a socket.
const FLOWS: u16 = 100;

/// Sends a datagram of each flow to both hosts with an address. Returns the flows that each of them has received.
#[track_caller]
fn spread_flows(from: &Namespace, hosts: &[Namespace; 2], address: &str) -> [BTreeSet<u16>; 2] {
    let receivers = hosts.each_ref().map(|host| {
        let socket = host.inside(|| UdpSocket::bind((address, 7000)).expect("a socket"));
        socket.set_nonblocking(true).expect("set");
        socket
    });
    from.inside(|| {
        for flow in 0..FLOWS {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            socket.send_to(&flow.to_be_bytes(), (address, 7000)).expect("sent");
        }
    });
    let mut arrived = [BTreeSet::new(), BTreeSet::new()];
    let mut count = 0;
    let all = eventually(WAIT_LIMIT, || {
        for (receiver, flows) in receivers.iter().zip(&mut arrived) {
            let mut bytes = [0; 2];
            while receiver.recv(&mut bytes).is_ok() {
                flows.insert(u16::from_be_bytes(bytes));
                count += 1;
            }
        }
        count >= FLOWS
    });
    assert!(all && count == FLOWS && arrived[0].is_disjoint(&arrived[1]), "{count} datagrams: {arrived:?}");
    arrived
}

/// Runs the gateway and FRR in a guest, whose kernel has VRF devices. The routes are those of a VRF.
///
/// ```text
/// gateway's namespace: wan -- bridge -- TAP eth0 | guest    bgp -- bridge -- TAP eth1 | guest    lan0 ... eth2
/// ```
pub(crate) fn a_vrf_of_the_kernel_has_the_routes(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    for need in Requirement::GUEST.into_iter().chain([Requirement::Program("strip")]) {
        if let Err(why) = need.check() {
            return skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
        }
    }
    let fabric = Fabric::new(variant);
    let (host, leaf, near) = (fabric.host(), fabric.leaf(), &fabric.world.gateway);
    let beyond = plug_router(&fabric, 0);
    plug_host(host, NEAR);
    near.ip("addr flush dev bgp");
    for port in ["wan", "bgp", "lan0"] {
        near.ip(&format!("link add br-{port} type bridge mcast_snooping 0"));
        near.ip(&format!("tuntap add tap-{port} mode tap vnet_hdr"));
        for device in [port, &format!("tap-{port}")] {
            near.ip(&format!("link set {device} master br-{port} up"));
        }
        near.ip(&format!("link set br-{port} up"));
    }
    // The guest keeps its files in memory.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let stripped =
        [("tunnel-gateway", env!("CARGO_BIN_EXE_tunnel-gateway")), ("wirepath", env!("CARGO_BIN_EXE_wirepath"))].map(
            |(name, program)| {
                let path = folder.path().join(name).display().to_string();
                run(&["strip", "-o", &path, program]).expect();
                path
            },
        );
    let programs = [&stripped[0], &stripped[1], ZEBRA, BGPD, "vtysh"];
    let mut guest = LinuxGuest::boot(near, &["tap-wan", "tap-bgp", "tap-lan0"], &programs);
    let [at_near, at_far] = SPEAKERS;
    let port = |name: &str, device: &str| {
        format!("[[port]]\nname = \"{name}\"\ndriver = \"af_packet\"\ndevice = \"{device}\"\n")
    };
    let config = format!(
        "{}{}[underlay]\nport = \"wan\"\naddresses = [\"{}/24\"]\n[[vrf]]\nname = \"red\"\n[control]\n\
         socket = \"/tmp/gw.sock\"\n{}",
        port("wan", "eth0"),
        port("lan0", "eth2"),
        variant.vtep(),
        segments("red"),
    );
    let networks = network_lines(NEAR);
    let bgp = bgpd_text(at_near, at_far, "", "")
        + &format!(
            "router bgp 65000 vrf red\n{networks} address-family l2vpn evpn\n{ADVERTISED} exit-address-family\n"
        );
    guest.sh(&format!(
        "set -e
        {PREPARE_GUEST}
        modprobe -a vrf bridge vxlan veth
        ip link add red type vrf table 100
        ip link set red up
        ip link set eth0 mtu 1500 up
        ip link set eth2 mtu {} up
        ip addr add {at_near}/30 dev eth1
        ip link set eth1 up
        ip route add {}/32 via {at_far}
        cat >/tmp/gw.toml <<'END'\n{config}\nEND
        cat >/tmp/bgpd.conf <<'END'\n{bgp}\nEND
        printf 'vrf red\\n vni {L3VNI}\\nexit-vrf\\n' >/tmp/zebra.conf",
        fabric.world.inner_mtu(),
        variant.remote(0),
    ));
    let gateway = guest.start("exec tunnel-gateway --config /tmp/gw.toml --json");
    let wait = |guest: &mut LinuxGuest, what: &str, script: &str| {
        let met = eventually(WAIT_LIMIT, || guest.run(script).success);
        assert!(met, "{what}: {}", guest.sh("cat /tmp/job*.err; ip link; ip -4 route show vrf red; true"));
    };
    wait(&mut guest, "the devices", &format!("ip addr show dev wpbr{VNI} | grep -q {}/", NEAR[0][1]));
    for daemon in ["zebra", "bgpd"] {
        guest.sh(&guest_daemon(daemon, "/tmp"));
    }
    let _far = frr(leaf, at_far, at_near, FAR);
    for vni in [VNI, L3VNI] {
        wait(&mut guest, "the VRF of the bridge", &format!("ip link show dev wpbr{vni} | grep -q 'master red'"));
    }
    for [_, _, address] in FAR {
        let reached = eventually(WAIT_LIMIT, || pings(host, address, 56, 1));
        assert!(
            reached,
            "{address}: {}",
            guest.sh("wirepath show routes --socket /tmp/gw.sock; ip route show vrf red")
        );
    }
    // The route is in the table of the VRF, in the kernel and in the gateway, and not in the main one.
    let kernel = guest.sh("ip route show vrf red; echo main; ip route");
    let (red, main) = kernel.split_once("main\n").expect("both tables");
    assert!(red.contains("10.4.0.0/24 ") && !main.contains("10.4.0.0/24 "), "{kernel}");
    let shown = guest.sh("wirepath show routes --socket /tmp/gw.sock");
    let is_route = |line: &str| line.starts_with("red ") && line.contains("10.4.0.0/24") && line.contains("kernel");
    assert!(shown.lines().any(is_route), "{shown}");
    assert!(
        pings(host, FAR[0][2], 1300, 20) && pings(&beyond, NEAR[0][2], 56, 20) && pings(&beyond, NEAR[1][2], 56, 20)
    );
    guest.sh("kill $(pidof tunnel-gateway)");
    let outcome = guest.wait(gateway);
    assert!(outcome.success && outcome.stdout.contains("\"leaked_buffers\":0"), "{}{}", outcome.stdout, outcome.stderr);
}
