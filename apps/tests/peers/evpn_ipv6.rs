//! VTEPs with IPv6 addresses. FRR 8.4 knows none, so `bridge` and `ip` (Debian: iproute2) write what a daemon would.

use crate::evpn::Fabric;
use crate::tcp::transfer;
use crate::underlay::SHARED;
use crate::world::{VNI, Variant, colons, host_address, pings, remote_address};

/// The address of the flood list.
const FLOOD: &str = "00:00:00:00:00:00";

/// Flood list, addresses, groups of nexthop objects and suppression, with traffic both ways.
pub(crate) fn vteps_have_ipv6_addresses(variant: Variant) {
    const BYTES: u64 = 16 << 20;
    let fabric = Fabric::shared(variant);
    let (host, far, leaf, near) = (fabric.host(), &fabric.far, fabric.leaf(), &fabric.world.gateway);
    let gateway = fabric.gateway_with(SHARED, "neighbour_suppression = true");
    gateway.wait("evpn", "the devices", |rows| rows[0]["state"] == "ready");
    let (vxlan, shadow) = (format!("vx{VNI}"), format!("wpvx{VNI}"));
    let (own, remote, other) =
        (variant.vtep().to_string(), variant.remote(0).to_string(), variant.address(7).to_string());
    let (near_mac, far_mac) = (colons(host.mac("eth0")), colons(far.mac("eth0")));
    let shown = near.ip(&format!("-d link show {shadow}"));
    assert!(shown.contains(&format!("local {own} ")), "{shown}");

    let near_fdb = |verb: &str, mac: &str, rest: &str| {
        let text = format!("bridge fdb {verb} {mac} dev {shadow} {rest}");
        near.run(&text.split(' ').collect::<Vec<_>>()).expect();
    };
    let leaf_fdb = |verb: &str, mac: &str, rest: &str| {
        let text = format!("bridge fdb {verb} {mac} dev {vxlan} {rest}");
        leaf.run(&text.split(' ').collect::<Vec<_>>()).expect();
    };
    near_fdb("append", FLOOD, &format!("dst {remote} self permanent"));
    gateway.wait_for_remotes(std::slice::from_ref(&remote));
    near_fdb("append", FLOOD, &format!("dst {other} self permanent"));
    gateway.wait_for_remotes(&[remote.clone(), other.clone()]);
    near_fdb("del", FLOOD, &format!("dst {other} self"));
    gateway.wait_for_remotes(std::slice::from_ref(&remote));
    leaf_fdb("append", FLOOD, &format!("dst {own} self permanent"));

    // The address moves between two VTEPs and comes to stay at the leaf.
    for vtep in [&other, &remote] {
        near_fdb("replace", &far_mac, &format!("dst {vtep} self extern_learn"));
        near_fdb("replace", &far_mac, "master extern_learn");
        gateway.wait_for_mac(&far_mac, Some((vtep, "external")));
    }
    leaf_fdb("replace", &near_mac, &format!("dst {own} self extern_learn"));
    leaf_fdb("replace", &near_mac, "master extern_learn");
    near.ip(&format!("neigh replace {} lladdr {far_mac} dev wpbr{VNI} nud noarp extern_learn", remote_address(0)));
    gateway.wait("bindings", "the far host", |rows| {
        rows.iter().any(|row| row["address"] == *remote_address(0) && row["origin"] == "external")
    });
    let mut program = gateway.program;
    fabric.world.wait_for(&mut program, host, &remote_address(0));
    let gateway = crate::evpn::Gateway { program };
    assert!(pings(host, &remote_address(0), 1400, 50) && pings(far, &host_address(0), 56, 50));
    for (from, to, address) in [(host, far, remote_address(0)), (far, host, host_address(0))] {
        let (sent, received) = transfer(from, to, &address, BYTES);
        assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum");
    }
    gateway.wait("evpn", "the figures", |rows| {
        let expected = [("flood", 1), ("macs", 1), ("neighbours", 1), ("advertised", 1), ("advertised_ips", 1)];
        expected.iter().all(|(key, n)| rows[0][*key] == *n)
    });
    // A request of the far host may have told the other one the answer before.
    gateway.wait("segments", "answers for the far host", |rows| {
        host.ip("neigh flush all");
        pings(host, &remote_address(0), 56, 1);
        rows[0]["neighbour_replies"].as_u64() >= Some(1)
    });

    // A group of nexthop objects with IPv6 addresses.
    near.ip(&format!("nexthop add id 1 via {remote} fdb"));
    near.ip("nexthop add id 10 group 1 fdb");
    near_fdb("add", "02:00:00:00:77:20", "nhid 10 self");
    gateway.wait_for_mac("02:00:00:00:77:20", Some((&remote, "external")));
    near.ip(&format!("nexthop replace id 1 via {other} fdb"));
    gateway.wait_for_mac("02:00:00:00:77:20", Some((&other, "external")));
    near.ip("nexthop del id 10");
    gateway.wait_for_mac("02:00:00:00:77:20", None);

    // The last entries go, and the remote with them.
    near_fdb("del", &far_mac, &format!("dst {remote} self"));
    gateway.wait_for_mac(&far_mac, None);
    near_fdb("del", FLOOD, &format!("dst {remote} self"));
    gateway.wait_for_remotes(&[]);
    for statistic in ["rx_packets", "tx_packets"] {
        assert_eq!(near.statistic(&shadow, statistic), 0, "{statistic} of the shadow device");
    }
    gateway.program.stop();
}
