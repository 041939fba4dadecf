use wirepath_testlab::announce;

use crate::world::{Way, World, pings, remote_address};

/// A two-port gateway with default settings stays under 64 MiB of resident memory, huge pages not counted (the kernel counts those
/// apart), also after traffic.
pub(crate) fn stays_small(way: Way) {
    let world = World::new(way, 1, 1, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 100));
    crate::tcp::transfer(&world.hosts[0], &world.remotes[0], &remote_address(0), 64 << 20);
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.id())).expect("status");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number");
    announce(&format!("{}: {kib} KiB resident", way.name));
    assert!(kib < 64 << 10, "{status}");
    gateway.stop();
}
