use std::net::IpAddr;

use crate::world::{Variant, WAIT_LIMIT, World, pings, remote_address};

/// The underlay's link is lost, and the remote has another Ethernet address when the link returns. The gateway
/// asks all hosts for the remote's address at once, and the tunnel works again.
pub(crate) fn a_new_address_is_found(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let mut wire = remote.frames("eth0");
    world.net.ip("link set gw down");
    remote.ip("link set eth0 address 02:00:00:00:77:01");
    // The driver reports the loss of the link after some time.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    wire.drain();
    world.net.ip("link set gw up");
    let mac = world.gateway.mac("wan");
    let asks = wire.receive_where(WAIT_LIMIT, |frame| {
        let bytes = &frame.bytes;
        let solicits = match variant.remote(0) {
            IpAddr::V4(ip) => bytes[12..14] == [8, 6] && bytes[38..42] == ip.octets() && bytes[28..32] != ip.octets(),
            IpAddr::V6(ip) => bytes.len() >= 78 && bytes[20] == 58 && bytes[54] == 135 && bytes[62..78] == ip.octets(),
        };
        solicits && bytes[6..12] == mac && bytes[0] & 1 == 1
    });
    assert!(asks.is_some(), "the gateway does not ask all hosts for the address");
    world.wait_for(&mut gateway, host, &remote_address(0));
    assert!(pings(host, &remote_address(0), 1200, 50), "traffic goes on");
    gateway.stop();
}
