use wirepath_testlab::print_uncaptured;

use crate::world::{Variant, World, pings, remote_address};

/// A two-port gateway with default settings uses less than 64 MiB of resident memory, also after traffic.
/// Huge pages are not included, because the kernel counts them separately.
pub(crate) fn stays_small(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 100));
    crate::tcp::transfer(&world.hosts[0], &world.remotes[0], &remote_address(0), 64 << 20);
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.id())).expect("status");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number");
    print_uncaptured(&format!("{}: {kib} KiB resident", variant.name));
    assert!(kib < 64 << 10, "{status}");
    gateway.stop();
}
