//! Tunnels in the NIC, with the kernel's VXLAN device at the other end.

use std::time::Duration;

use crate::world::{Variant, World, host_address, pings, remote_address};

/// After address learning, the NIC removes and adds all tunnel headers.
pub(crate) fn software_touches_no_tunnel_header(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start();
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    // The gateway checks its tunnels a few times per second.
    std::thread::sleep(Duration::from_secs(2));
    for size in [56, 1400] {
        assert!(pings(host, &remote_address(0), size, 200), "{size} bytes from the host");
        assert!(pings(remote, &host_address(0), size, 200), "{size} bytes from the remote");
    }
    let summary = gateway.stop();
    let segment = &summary.json["app"]["segments"][0];
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or_else(|| panic!("{}", summary.json));
    for (all, by_nic) in [("overlay_rx", "nic_decapsulated"), ("overlay_tx", "nic_encapsulated")] {
        let (all, by_nic) = (number(&segment[all]["packets"]), number(&segment[by_nic]));
        assert!(by_nic >= 800, "the NIC did {by_nic} of {all}: {}", summary.json);
        // Packets from the time before the NIC had the tunnel.
        assert!(all - by_nic < 50, "the NIC did {by_nic} of {all}: {}", summary.json);
    }
}

/// A command that the NIC rejects for a while is retried. Software handles the packets meanwhile.
pub(crate) fn a_nic_that_refuses_is_asked_again(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start_refused("create_flow_action", 4);
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    // Two rejections per direction, one second apart.
    std::thread::sleep(Duration::from_secs(5));
    assert!(pings(&world.hosts[0], &remote_address(0), 56, 200));
    let summary = gateway.stop();
    let segment = &summary.json["app"]["segments"][0];
    for by_nic in ["nic_decapsulated", "nic_encapsulated"] {
        assert!(segment[by_nic].as_u64().is_some_and(|packets| packets >= 200), "{by_nic}: {}", summary.json);
    }
}

/// The same traffic with the offload disabled.
pub(crate) fn off_is_off(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let mut gateway = world.start_without_nic();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    std::thread::sleep(Duration::from_secs(1));
    assert!(pings(&world.hosts[0], &remote_address(0), 56, 50));
    let summary = gateway.stop();
    let segment = &summary.json["app"]["segments"][0];
    assert_eq!(
        (&segment["nic_decapsulated"], &segment["nic_encapsulated"]),
        (&0.into(), &0.into()),
        "{}",
        summary.json
    );
}
