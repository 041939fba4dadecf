use wirepath_testlab::print_uncaptured;

use crate::faults::Usage;
use crate::world::{Variant, World, pings, remote_address};

/// A two-port gateway with default settings uses less than 64 MiB of resident memory, also after traffic.
/// Huge pages are not included, because the kernel counts them separately.
pub(crate) fn stays_small(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 100));
    crate::tcp::transfer(&world.hosts[0], &world.remotes[0], &remote_address(0), 64 << 20);
    let usage = Usage::of(gateway.id());
    print_uncaptured(&format!("{}: {} KiB resident", variant.name, usage.memory >> 10));
    assert!(usage.memory < 64 << 20, "{usage:?}");
    gateway.stop();
}
