//! A host at two leaves (EVPN multihoming, RFC 7432), which FRR puts behind a group of VTEPs.
//!
//! ```text
//! host0 --- lan0 | gateway | wan --- bridge --- guest: br-wan --- leaf a, leaf b === bond0 of the host
//!                | FRR     |                                      FRR     FRR
//! ```
//!
//! The leaves are namespaces of a guest with Debian's kernel, because Ethernet segments of FRR are bonds.

use std::net::UdpSocket;

use wirepath_testlab::{LinuxGuest, Requirement, eventually, skip_or_fail};

use crate::evpn::{BGPD, Frr, Gateway, ZEBRA, bgpd_text, blue_segment, is_missing};
use crate::evpn_leaves::neighbour_lines;
use crate::frr::{PREPARE_GUEST, guest_daemon};
use crate::underlay::{SHARED, share};
use crate::world::{VNI, Variant, WAIT_LIMIT, World, pings, remote_address};

/// Ethernet address of the host at two leaves.
const HOST: &str = "02:00:00:00:77:01";
const FLOWS: u16 = 200;

pub(crate) fn leaves_share_the_flows_to_their_host(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    for need in Requirement::GUEST {
        if let Err(why) = need.check() {
            return skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
        }
    }
    let world = World::new(variant, 1, 0, 1500);
    share(&world.gateway, variant);
    world.net.ip("tuntap add guest mode tap vnet_hdr");
    world.net.ip("link set guest mtu 1500 master br0 up");
    let mut guest = LinuxGuest::boot(&world.net, &["guest"], &[ZEBRA, BGPD, "vtysh"]);
    let own = variant.vtep().to_string();
    let leaves = [3, 4].map(|n| variant.address(n).to_string());
    guest.sh(&format!(
        "set -e
        {PREPARE_GUEST}
        mkdir -p /var/run/netns
        modprobe -a bridge vxlan veth bonding
        ip netns add host
        ip link add br-wan type bridge mcast_snooping 0
        ip link set br-wan up
        ip link set eth0 mtu 1500 master br-wan up
        ip -n host link add bond0 type bond mode balance-xor miimon 100
        ip -n host link set bond0 address {HOST}"
    ));
    for (leaf, address, other) in [("a", &leaves[0], &leaves[1]), ("b", &leaves[1], &leaves[0])] {
        let [bgp, evpn] = neighbour_lines(other);
        let bgpd = bgpd_text(address, &own, &bgp, &evpn);
        // At once, not three minutes after the start.
        let zebra =
            "evpn mh startup-delay 0\ninterface bond0\n evpn mh es-id 1\n evpn mh es-sys-mac 44:38:39:ff:00:01\n";
        guest.sh(&format!(
            "set -e
            ip netns add {leaf}
            ip -n {leaf} link set lo up
            ip link add wan-{leaf} type veth peer name wan netns {leaf}
            ip link set wan-{leaf} master br-wan up
            ip -n {leaf} addr add {address}/24 dev wan
            ip -n {leaf} link set wan up
            ip -n {leaf} link add br{VNI} type bridge mcast_snooping 0
            ip -n {leaf} link add vx{VNI} type vxlan id {VNI} dstport 4789 local {address} nolearning
            ip -n {leaf} link set vx{VNI} master br{VNI} up
            ip netns exec {leaf} bridge link set dev vx{VNI} learning off neigh_suppress on
            ip -n {leaf} link add bond0 type bond mode balance-xor miimon 100
            ip -n {leaf} link add member type veth peer name to-{leaf} netns host
            ip -n {leaf} link set member master bond0
            ip -n {leaf} link set member up
            ip -n {leaf} link set bond0 master br{VNI} up
            ip -n {leaf} link set br{VNI} up
            ip -n host link set to-{leaf} master bond0
            ip -n host link set to-{leaf} up
            mkdir /tmp/{leaf}
            cat >/tmp/{leaf}/bgpd.conf <<'END'\n{bgpd}\nEND
            cat >/tmp/{leaf}/zebra.conf <<'END'\n{zebra}\nEND"
        ));
    }
    guest.sh(&format!(
        "ip -n host link set bond0 mtu {} up
        ip -n host addr add {}/24 dev bond0",
        world.inner_mtu(),
        remote_address(0)
    ));
    for (leaf, daemon) in [("a", "zebra"), ("b", "zebra"), ("a", "bgpd"), ("b", "bgpd")] {
        let start = guest_daemon(daemon, &format!("/tmp/{leaf}"));
        guest.sh(&format!("ip netns exec {leaf} {start}"));
    }
    let gateway = Gateway::start(&world.gateway, &format!("{}{SHARED}{}", world.ports(), blue_segment(&["lan0"], "")));
    gateway.wait("evpn", "the devices", |rows| rows[0]["state"] == "ready");
    let [bgp, evpn] = neighbour_lines(&leaves[1]);
    let _frr = Frr::routing(&world.gateway, &own, &leaves[0], "", &bgp, &evpn);
    let host = &world.hosts[0];

    // The far host says where it is, and the near one too.
    let at = |guest: &mut LinuxGuest, gateway: &Gateway, place: &str| {
        let met = eventually(2 * WAIT_LIMIT, || {
            guest.run(&format!("ip netns exec host ping -c 1 -W 1 {}", crate::world::host_address(0)));
            let rows = gateway.rows("fdb");
            rows.iter().any(|row| row["mac"] == HOST && row["to"] == place && row["kind"] == "external")
        });
        assert!(
            met,
            "{place}: {:?}\n{}\n{}\n{}",
            gateway.rows("fdb"),
            world.gateway.run(&["bridge", "fdb", "show"]).stdout,
            world.gateway.ip("nexthop"),
            guest.sh(
                "for leaf in a b; do vtysh --vty_socket /tmp/$leaf -c 'show evpn es detail' -c 'show evpn mac vni all' \
                 -c 'show bgp l2vpn evpn'; done"
            )
        );
    };
    at(&mut guest, &gateway, &leaves.join(", "));
    let shown = world.gateway.run(&["bridge", "fdb", "show", "dev", &format!("wpvx{VNI}")]).stdout;
    assert!(shown.lines().any(|line| line.starts_with(HOST) && line.contains("nhid")), "{shown}");

    host.ip(&format!("neigh replace {} lladdr {HOST} dev eth0", remote_address(0)));
    // Packets from the tunnels to each leaf, and datagrams that the far host got.
    let counts = |guest: &mut LinuxGuest| -> [u64; 3] {
        let text = guest.sh(&format!(
            "for leaf in a b; do ip netns exec $leaf cat /sys/class/net/vx{VNI}/statistics/rx_packets; done
            ip netns exec host grep ^Udp: /proc/net/snmp | tail -1 | cut -d' ' -f3"
        ));
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        numbers.try_into().expect("three numbers")
    };
    let spread = |guest: &mut LinuxGuest| -> [u64; 3] {
        let before = counts(guest);
        host.inside(|| {
            for port in 20_000..20_000 + FLOWS {
                let socket = UdpSocket::bind(("0.0.0.0", port)).expect("a socket");
                socket.send_to(&[0; 64], (remote_address(0).as_str(), 4242)).expect("sent");
            }
        });
        let mut now = [0; 3];
        eventually(WAIT_LIMIT, || {
            now = counts(guest);
            now[2] - before[2] >= u64::from(FLOWS)
        });
        std::array::from_fn(|i| now[i] - before[i])
    };
    let [a, b, arrived] = spread(&mut guest);
    // Five standard deviations of a binomial distribution are 36 flows. Other packets of the hosts count too.
    assert!(arrived == u64::from(FLOWS) && a > 60 && b > 60, "{a} and {b} packets, {arrived} arrived");
    assert!(pings(host, &remote_address(0), 56, 20));

    // One leaf loses its link to the host and leaves the group.
    guest.sh("ip -n a link set member down");
    at(&mut guest, &gateway, &leaves[1]);
    let [a, b, arrived] = spread(&mut guest);
    assert!(arrived == u64::from(FLOWS) && a < 20 && b >= u64::from(FLOWS), "{a} and {b} packets, {arrived} arrived");
    guest.sh("ip -n a link set member up");
    at(&mut guest, &gateway, &leaves.join(", "));
    let [a, b, arrived] = spread(&mut guest);
    assert!(arrived == u64::from(FLOWS) && a > 60 && b > 60, "{a} and {b} packets, {arrived} arrived");
    gateway.program.stop();
}
