use std::io::Write;

use wirepath_testlab::Namespace;

use crate::guest::{BOTH, LONGEST, SHORTEST, TUNNEL, ping_all};
use crate::world::{Variant, World, host_address, pings, remote_address};

/// Pings with 56, 1400 and 8900 bytes in both directions, without fragmentation.
pub(crate) fn small_and_jumbo(variant: Variant) {
    let world = World::new(variant, 1, 1, 9000);
    let mut gateway = world.start();
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    for size in [56, 1400, 8900] {
        assert!(answered(host, &remote_address(0), size), "{size} bytes from the host");
        assert!(answered(remote, &host_address(0), size), "{size} bytes from the remote");
    }
    let summary = gateway.stop();
    // Requests and answers of 301 pings, each received once and sent once.
    assert!(summary.number("rx_packets") >= 602, "{}", summary.json);
    assert!(summary.number("tx_packets") >= 602, "{}", summary.json);
    assert!(summary.number("tx_packets") <= summary.number("rx_packets") + 100, "{}", summary.json);
    assert_eq!(summary.drops("too_big"), 0, "{}", summary.json);
}

/// Echo requests in frames of each length, with both IP versions inside. The kernel of the remote returns the same
/// bytes.
pub(crate) fn frames_of_each_length(variant: Variant) {
    let world = World::new(variant, 1, 1, (LONGEST + TUNNEL) as u32);
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    host.ipv6("eth0");
    remote.ipv6("vx0");
    for inner in BOTH.iter().filter(|inner| inner.is_ipv6()) {
        host.ip(&format!("addr add {} dev eth0 nodad", inner.host[1]));
        remote.ip(&format!("addr add {} dev vx0 nodad", inner.guest[1]));
    }
    let mut gateway = world.start();
    let count = LONGEST - SHORTEST + 1;
    for inner in BOTH {
        world.wait_for(&mut gateway, host, inner.guest[0]);
        let result = ping_all(host, inner, count as u16, |number| SHORTEST + usize::from(number) - inner.headers);
        result.unwrap_or_else(|why| panic!("{}: {why}", inner.name));
    }
    let summary = gateway.stop();
    // Requests and replies.
    let frames = (2 * 2 * count) as u64;
    assert!(summary.number("rx_packets") >= frames, "{}", summary.json);
    assert!(summary.number("tx_packets") >= frames, "{}", summary.json);
    assert_eq!(summary.drops("too_big"), 0, "{}", summary.json);
}

/// Returns whether 50 consecutive pings are answered. A failed attempt is reported and repeated once, because
/// the kernels at both ends sometimes drop a packet on an overloaded machine.
fn answered(from: &Namespace, to: &str, size: u32) -> bool {
    pings(from, to, size, 50) || {
        let _ = writeln!(std::io::stderr(), "a ping of {size} bytes to {to} was not answered; once more");
        pings(from, to, size, 50)
    }
}
