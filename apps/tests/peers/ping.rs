use crate::world::{Way, World, host_address, pings, remote_address};

/// Ping with 56, 1400 and 8900 bytes, in both directions, unfragmented.
pub(crate) fn small_and_jumbo(way: Way) {
    let world = World::new(way, 1, 1, 9000);
    let mut gateway = world.start();
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    for size in [56, 1400, 8900] {
        assert!(pings(host, &remote_address(0), size, 50), "{size} bytes from the host");
        assert!(pings(remote, &host_address(0), size, 50), "{size} bytes from the remote");
    }
    let summary = gateway.stop();
    // Request and answer of 301 pings, received once and sent once.
    assert!(summary.number("rx_packets") >= 602, "{}", summary.json);
    assert!(summary.number("tx_packets") >= 602, "{}", summary.json);
    assert!(summary.number("tx_packets") <= summary.number("rx_packets") + 100, "{}", summary.json);
    assert_eq!(summary.drops("too_big"), 0, "{}", summary.json);
}
