use crate::world::{Variant, World, pings, remote_address};

/// Frames that do not fit into the underlay with the tunnel header are dropped and counted. The largest
/// fitting frame passes.
pub(crate) fn too_big_is_refused_and_counted(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let host = &world.hosts[0];
    // The host assumes a larger MTU than the tunnel has.
    host.ip("link set eth0 mtu 1500");
    world.gateway.ip("link set lan0 mtu 1500");
    let fits = world.inner_mtu();
    let ports = world.ports().replace(&format!("mtu = {fits}\n"), "mtu = 1500\n");
    let mut gateway =
        world.start_with(&(ports + &world.segment("blue", crate::world::VNI, &["{ port = \"lan0\" }".to_owned()])));
    world.wait_for(&mut gateway, host, &remote_address(0));
    // 28 bytes of IPv4 and ICMP headers.
    assert!(pings(host, &remote_address(0), fits - 28, 5), "{fits} bytes fit");
    assert!(!pings(host, &remote_address(0), fits - 27, 1), "{} bytes do not", fits + 1);
    assert!(pings(host, &remote_address(0), fits - 28, 5), "and what fits goes on");
    let summary = gateway.stop();
    assert!(summary.drops("too_big") >= 1, "{}", summary.json);
}
