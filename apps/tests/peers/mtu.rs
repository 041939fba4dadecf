use crate::world::{Way, World, pings, remote_address};

/// What would not fit into the underlay with its tunnel header is not sent, and is counted; what just fits goes.
pub(crate) fn too_big_is_refused_and_counted(way: Way) {
    let world = World::new(way, 1, 1, 1500);
    let host = &world.hosts[0];
    // The host believes in more than the tunnel carries.
    host.ip("link set eth0 mtu 1500");
    world.gateway.ip("link set lan0 mtu 1500");
    let fits = world.inner_mtu();
    let ports = world.ports().replace(&format!("mtu = {fits}\n"), "mtu = 1500\n");
    let mut gateway =
        world.start_with(&(ports + &world.segment("blue", crate::world::VNI, &["{ port = \"lan0\" }".to_owned()])));
    world.wait_for(&mut gateway, host, &remote_address(0));
    // 28 bytes of IPv4 and ICMP header.
    assert!(pings(host, &remote_address(0), fits - 28, 5), "{fits} bytes fit");
    assert!(!pings(host, &remote_address(0), fits - 27, 1), "{} bytes do not", fits + 1);
    assert!(pings(host, &remote_address(0), fits - 28, 5), "and what fits goes on");
    let summary = gateway.stop();
    assert!(summary.drops("too_big") >= 1, "{}", summary.json);
}
