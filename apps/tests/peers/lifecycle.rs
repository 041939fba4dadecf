use crate::world::{Variant, World, pings, remote_address};

/// On SIGTERM the program exits with code 0 and a summary, and restores the interfaces: no XDP program is
/// attached, and the offload settings are unchanged.
pub(crate) fn ends_cleanly(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let before = state(&world);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    if variant.driver == "af_xdp" {
        assert!(world.gateway.ip("-d link show wan").contains("xdp"), "a program is attached while it runs");
    }
    let summary = gateway.stop();
    assert!(summary.number("rx_packets") > 0);
    assert_eq!(state(&world), before, "left behind");
}

/// After SIGKILL under traffic, twice, the next start works normally and restores the interfaces at its end.
pub(crate) fn starts_again_after_a_kill(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let before = state(&world);
    for _ in 0..2 {
        let mut gateway = world.start();
        world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
        let _traffic = world.hosts[0].spawn(&["ping", "-n", "-i", "0.01", &remote_address(0)]);
        gateway.kill();
    }
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 50));
    gateway.stop();
    assert_eq!(state(&world), before, "left behind");
}

/// After an interface or its NIC disappears, the other ports continue. When the port has waited long enough, the
/// program names it as failed.
pub(crate) fn goes_on_without_a_port(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let keys = "on_loss = \"fail-after\"\nloss_timeout = 1\n";
    let config = world.one_segment().replace("mtu = ", &format!("{keys}mtu = "));
    let mut gateway = world.start_with(&config);
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    world.wait_for(&mut gateway, &world.hosts[1], &remote_address(0));
    if variant.is_emulated() {
        gateway.lose_nic("lan1");
    } else {
        world.gateway.ip("link del lan1");
    }
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 100), "the other port goes on");
    // The control thread polls the ports a few times per second.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 100), "and on");
    assert!(gateway.running());
    let (summary, log) = gateway.stop_after_failure();
    let failures = summary.json["failures"].as_array().expect("a list");
    assert!(failures.len() == 1 && failures[0].as_str().is_some_and(|f| f.starts_with("port lan1")), "{failures:?}");
    assert!(log.contains("port lan1 has failed"), "{log}");
    assert!(!log.contains("port lan0 has failed") && !log.contains("port wan has failed"), "{log}");
}

/// Interfaces that are removed and made again, with other addresses, work as before: a port of hosts, and the
/// underlay.
pub(crate) fn goes_on_when_interfaces_return(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    world.replace_interfaces(&mut gateway);
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 50));
    assert!(pings(&world.remotes[0], &crate::world::host_address(0), 1200, 50));
    let summary = gateway.stop();
    let losses = |port: usize| summary.json["ports"][port]["losses"].clone();
    assert_eq!((losses(0), losses(1)), (1.into(), 1.into()), "{}", summary.json);
    assert_eq!(summary.json["leaked_buffers"], 0);
}

/// State that a program could leave behind: attached programs, promiscuous mode and offload settings.
fn state(world: &World) -> Vec<String> {
    let mut lines = Vec::new();
    for port in ["wan", "lan0"] {
        let link = world.gateway.ip(&format!("-d link show {port}"));
        let words: Vec<&str> = link.split_whitespace().collect();
        let after = |word: &str| words.iter().position(|w| *w == word).map_or("", |at| words[at + 1]);
        lines.push(format!("{port}: xdp {}, promiscuity {}", link.contains("xdp"), after("promiscuity")));
        lines.push(world.gateway.run(&["ethtool", "-k", port]).expect());
        lines.push(world.gateway.run(&["tc", "filter", "show", "dev", port, "ingress"]).stdout);
    }
    lines
}
