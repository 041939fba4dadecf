//! IP addresses of local hosts: FRR advertises what the gateway writes to the kernel's neighbours, so another leaf
//! answers ARP and ND requests for these hosts.

use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_testlab::{Frame, Namespace, eventually};
use wirepath_wire::MacAddr;

use crate::evpn::{Fabric, Gateway, is_missing, wait_for_entry};
use crate::world::{VNI, Variant, WAIT_LIMIT, colons, host_address, pings, remote_address};

/// IPv6 addresses of both hosts.
const HOST6: &str = "fd00:1::1";
const FAR6: &str = "fd00:1::101";
/// Most IP addresses of one host that a segment learns.
const PER_HOST: u64 = 32;

/// Waits until the entry of an address among the neighbours of a device has these words, or there is none.
#[track_caller]
fn wait_for_neighbour(namespace: &Namespace, device: &str, address: &str, words: Option<&[&str]>) {
    let mut entries = Vec::new();
    let met = eventually(WAIT_LIMIT, || {
        let shown = namespace.run(&["ip", "neigh", "show", "dev", device, "nud", "all"]).stdout;
        let of_address = |line: &&str| line.split(' ').next() == Some(address);
        entries = shown.lines().filter(of_address).map(str::to_owned).collect();
        match words {
            Some(words) => entries.iter().any(|entry| words.iter().all(|word| entry.split(' ').any(|it| it == *word))),
            None => entries.iter().all(|entry| entry.contains("FAILED")),
        }
    });
    assert!(met, "{address} on {device}, {words:?}: {entries:?}");
}

/// Number of neighbours of the shadow bridge that the gateway wrote.
fn own_entries(namespace: &Namespace) -> usize {
    let shown = namespace.run(&["ip", "neigh", "show", "dev", &format!("wpbr{VNI}"), "nud", "permanent"]).stdout;
    shown.lines().filter(|line| line.contains("proto 119")).count()
}

/// Prepares both hosts and the bridges of both leaves for IPv6.
fn enable_ipv6(fabric: &Fabric) {
    fabric.world.gateway.sysctl("net/ipv6/conf/default/disable_ipv6", "0");
    fabric.leaf().ipv6(&format!("br{VNI}"));
    for (namespace, address) in [(fabric.host(), HOST6), (&fabric.far, FAR6)] {
        namespace.ipv6("eth0");
        namespace.ip(&format!("addr add {address}/64 dev eth0 nodad"));
    }
}

/// Returns an announcement of an address by ARP or ND (RFC 5227 section 1.1, RFC 4861 section 7.2.6).
fn announcement(mac: [u8; 6], address: &str) -> Vec<u8> {
    let host = Addresses { mac: MacAddr(mac), addresses: Vec::new(), gateways: Vec::new() };
    host.announcement(address.parse().expect("an address"))
}

/// Returns whether a frame is a tunnel packet (VXLAN over IPv4) that solicits the first host by ARP or ND.
fn is_tunnelled_request(frame: &Frame) -> bool {
    let bytes = &frame.bytes;
    let is_tunnel = bytes.len() >= 92 && bytes[12..14] == [8, 0] && bytes[23] == 17 && bytes[36..38] == [0x12, 0xb5];
    let Some(inner) = bytes.get(50..).filter(|_| is_tunnel) else { return false };
    let is_arp = inner[12..14] == [8, 6] && inner[20..22] == [0, 1] && inner[38..42] == [10, 1, 0, 1];
    let solicits = inner.len() >= 78 && inner[12..14] == [0x86, 0xdd] && inner[20] == 58 && inner[54] == 135;
    is_arp || solicits && inner[62..78] == HOST6.parse::<std::net::Ipv6Addr>().expect("an address").octets()
}

#[track_caller]
fn wait_for_count(gateway: &Gateway, count: u64) {
    gateway.wait("evpn", &format!("{count} IP addresses"), |rows| rows[0]["advertised_ips"] == count);
}

/// The other leaf knows the IP addresses of the gateway's host and answers for it. An address moves to another
/// Ethernet address, to the other leaf and back, and is withdrawn with its host.
pub(crate) fn other_leaves_answer_for_hosts(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let fabric = Fabric::new(variant);
    let (host, far, leaf, near) = (fabric.host(), &fabric.far, fabric.leaf(), &fabric.world.gateway);
    enable_ipv6(&fabric);
    let _frr = fabric.frr();
    let mut gateway = fabric.gateway("neighbour_suppression = true");
    let (bridge, shadow, address) = (format!("br{VNI}"), format!("wpbr{VNI}"), host_address(0));
    let (near_mac, far_mac) = (colons(host.mac("eth0")), colons(far.mac("eth0")));
    // The host has said nothing yet, so the first requests pass the tunnel.
    let mut wire = near.frames("wan");
    for address in [&address, HOST6] {
        fabric.world.wait_for(&mut gateway.program, far, address);
        assert!(wire.drain().iter().any(is_tunnelled_request), "no request for {address} passes the tunnel");
    }
    for address in [&address, HOST6] {
        wait_for_neighbour(near, &shadow, address, Some(&[&near_mac, "PERMANENT"]));
        wait_for_neighbour(leaf, &bridge, address, Some(&[&near_mac, "extern_learn"]));
    }
    wait_for_entry(leaf, &format!("vx{VNI}"), &near_mac, Some("extern_learn"));
    // The host may use more addresses at any time, such as that of its link.
    gateway.wait("evpn", "the IP addresses of the host", |rows| {
        rows[0]["advertised_ips"].as_u64().is_some_and(|count| count >= 2 && count == own_entries(near) as u64)
    });

    // The other leaf answers requests itself.
    let mut at_host = host.frames("eth0");
    for address in [&address, HOST6] {
        far.ip("neigh flush all");
        wire.drain();
        assert!(pings(far, address, 56, 10));
        let frames = wire.drain();
        assert!(frames.len() >= 10, "{} frames of the pings", frames.len());
        assert!(!frames.iter().any(is_tunnelled_request), "a request for {address} passes the tunnel");
    }
    assert!(at_host.drain().len() >= 20, "the host gets the pings");

    // An entry that somebody removes returns.
    near.ip(&format!("neigh del {address} dev {shadow}"));
    wait_for_neighbour(near, &shadow, &address, Some(&[&near_mac, "PERMANENT"]));
    wait_for_neighbour(leaf, &bridge, &address, Some(&[&near_mac, "extern_learn"]));

    // A bridge without IPv6 loses the entry of a host, and gets it again with IPv6. The host is silent meanwhile.
    let (silent, silent_mac) = ("fd00:1::77", [2, 0, 0, 0, 0x77, 9]);
    let announced = || {
        host.frames("eth0").send(&announcement(silent_mac, silent)).expect("sent");
        near.ip(&format!("neigh show dev {shadow}")).contains(silent)
    };
    assert!(eventually(WAIT_LIMIT, announced), "no entry of {silent}");
    wait_for_neighbour(leaf, &bridge, silent, Some(&["extern_learn"]));
    assert_eq!(gateway.rows("evpn_sync")[0]["write_errors"], 0);
    near.sysctl(&format!("net/ipv6/conf/{shadow}/disable_ipv6"), "1");
    wait_for_neighbour(near, &shadow, silent, None);
    gateway.wait("evpn_sync", "refused writes", |rows| rows[0]["write_errors"].as_u64() > Some(0));
    near.sysctl(&format!("net/ipv6/conf/{shadow}/disable_ipv6"), "0");
    wait_for_neighbour(near, &shadow, silent, Some(&[&colons(silent_mac), "PERMANENT"]));
    wait_for_neighbour(leaf, &bridge, silent, Some(&["extern_learn"]));
    let refused = gateway.rows("evpn_sync")[0]["write_errors"].clone();

    // The address moves to another Ethernet address at the same port.
    let other_mac = "02:00:00:00:77:02";
    host.ip(&format!("link set eth0 address {other_mac}"));
    let send = |mac: &str, address: &str| {
        let mac: Vec<u8> = mac.split(':').map(|byte| u8::from_str_radix(byte, 16).expect("a number")).collect();
        let frame = announcement(mac.try_into().expect("six bytes"), address);
        host.frames("eth0").send(&frame).expect("sent");
    };
    send(other_mac, "10.1.0.1");
    wait_for_neighbour(leaf, &bridge, &address, Some(&[other_mac, "extern_learn"]));
    far.ip("neigh flush all");
    assert!(pings(far, &address, 56, 10));

    // The address moves to a host of the other leaf, whose entry replaces that of the gateway.
    leaf.ip(&format!("neigh replace {address} lladdr {far_mac} dev {bridge} nud reachable"));
    wait_for_neighbour(near, &shadow, &address, Some(&[&far_mac, "extern_learn", "zebra"]));
    let is_at = |mac: &str, origin: &str, send: &dyn Fn()| {
        gateway.wait("bindings", &format!("{address} at {mac}, {origin}"), |rows| {
            send();
            rows.iter().any(|row| row["address"] == *address && row["mac"] == *mac && row["origin"] == *origin)
        });
    };
    is_at(&far_mac, "external", &|| ());
    // The local host claims it back. It repeats the claim, as hosts do: FRR may write the entry of the other leaf once
    // more before it knows of the claim, and remove it then.
    is_at(other_mac, "learned", &|| send(other_mac, "10.1.0.1"));
    wait_for_neighbour(near, &shadow, &address, Some(&[other_mac, "PERMANENT"]));
    wait_for_neighbour(leaf, &bridge, &address, Some(&[other_mac, "extern_learn"]));

    // A host that claims very many addresses gets some of them.
    (0..=255).for_each(|n| send(other_mac, &format!("10.1.7.{n}")));
    gateway.wait("segments", "refused claims", |rows| rows[0]["bindings_refused"].as_u64() > Some(100));
    wait_for_neighbour(leaf, &bridge, "10.1.7.1", Some(&[other_mac, "extern_learn"]));
    let met = eventually(WAIT_LIMIT, || {
        let shown = near.run(&["ip", "neigh", "show", "dev", &shadow, "nud", "permanent"]).stdout;
        shown.lines().filter(|line| line.contains(other_mac)).count() as u64 == PER_HOST
    });
    assert!(met, "{} entries", own_entries(near));

    // The host leaves: all of its addresses are withdrawn.
    host.ip("link set eth0 down");
    wait_for_count(&gateway, 0);
    assert_eq!(own_entries(near), 0);
    for address in [&address, HOST6, "10.1.7.1"] {
        wait_for_neighbour(leaf, &bridge, address, None);
    }
    assert_eq!(gateway.rows("evpn_sync")[0]["write_errors"], refused);
    gateway.program.stop();
}

/// A killed gateway leaves its entries, and the fabric notices nothing. The next run takes them over, withdraws those
/// of hosts that do not return, and at its end withdraws all.
pub(crate) fn addresses_survive_a_restart(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    const SUPPRESSION: &str = "neighbour_suppression = true";
    let fabric = Fabric::new(variant);
    let (host, leaf, near) = (fabric.host(), fabric.leaf(), &fabric.world.gateway);
    let _frr = fabric.frr();
    let mut gateway = fabric.gateway(SUPPRESSION);
    let (bridge, shadow, address) = (format!("br{VNI}"), format!("wpbr{VNI}"), host_address(0));
    let near_mac = colons(host.mac("eth0"));
    let gone = (announcement([2, 0, 0, 0, 0x77, 3], "10.1.0.77"), "10.1.0.77");
    let announced = || {
        host.frames("eth0").send(&gone.0).expect("sent");
        own_entries(near) > 0
    };
    assert!(eventually(WAIT_LIMIT, announced), "no entry of {}", gone.1);
    fabric.world.wait_for(&mut gateway.program, host, &remote_address(0));
    for address in [&address, gone.1] {
        wait_for_neighbour(leaf, &bridge, address, Some(&["extern_learn"]));
    }
    let entry = |namespace: &Namespace, device: &str| namespace.ip(&format!("neigh show {address} dev {device}"));
    let before = entry(leaf, &bridge);
    gateway.program.kill();
    assert_eq!((entry(leaf, &bridge), own_entries(near)), (before.clone(), 2));

    // One host is heard again. The entry of the other one goes after the ageing time.
    let mut gateway = fabric.gateway(&format!("{SUPPRESSION}\nageing = 8"));
    let heard = || {
        host.ip("neigh flush all");
        pings(host, &remote_address(0), 56, 1)
    };
    let met = eventually(WAIT_LIMIT, || heard() && own_entries(near) == 1);
    assert!(met, "{} entries", own_entries(near));
    wait_for_neighbour(near, &shadow, &address, Some(&[&near_mac, "PERMANENT"]));
    let met = eventually(WAIT_LIMIT, || {
        // The other host is heard meanwhile, so that it stays.
        heard() && !leaf.ip(&format!("neigh show dev {bridge}")).contains(gone.1)
    });
    assert!(met, "{}", leaf.ip(&format!("neigh show dev {bridge}")));
    let rows = gateway.rows("evpn_sync");
    assert_eq!((&rows[0]["written_ips"], &rows[0]["removed_ips"]), (&0.into(), &1.into()), "{rows:?}");
    assert!(heard());
    assert_eq!(entry(leaf, &bridge), before);
    assert!(gateway.program.running());
    gateway.program.stop();
    wait_for_neighbour(leaf, &bridge, &address, None);
}
