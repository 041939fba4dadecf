//! The limit of the maximum segment size, with TCP of the kernel at both ends.

use wirepath_testlab::oracle;

use crate::world::{Variant, World, host_address, remote_address};

/// Bytes of each connection.
const BYTES: u64 = 1 << 20;
/// MTU of the networks of both ends. The tunnel takes less.
const MTU: u32 = 1500;

/// Both ends announce what their own networks take, and see an announcement that fits the tunnel.
pub(crate) fn is_lowered(variant: Variant) {
    let world = World::new(variant, 1, 1, MTU);
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    let inner = world.inner_mtu();
    host.ip(&format!("link set eth0 mtu {MTU}"));
    world.gateway.ip(&format!("link set lan0 mtu {MTU}"));
    // The device vx0 knows what the tunnel takes, but a remote may announce more.
    let (source, own_mss) = (remote_address(0), MTU - 40);
    remote.ip(&format!("route replace 10.1.0.0/24 dev vx0 src {source} advmss {own_mss}"));
    let ports = world.ports().replace(&format!("mtu = {inner}"), &format!("mtu = {MTU}"));
    let segment = world.segment("blue", 42, &["{ port = \"lan0\" }".to_owned()]);
    let mut gateway = world.start_with(&format!("{ports}{segment}clamp_mss = true\n"));
    world.wait_for(&mut gateway, host, &remote_address(0));
    let mut ends = [host.frames("eth0"), remote.frames("vx0")];
    for (from, to, address) in [(host, remote, remote_address(0)), (remote, host, host_address(0))] {
        let (sent, received) = crate::tcp::transfer(from, to, &address, BYTES);
        assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum to {address}");
    }
    let lowered = (inner - 40).to_string();
    for (end, source) in ends.iter_mut().zip([remote_address(0), host_address(0)]) {
        let frames: Vec<Vec<u8>> = end.drain().into_iter().map(|frame| frame.bytes).collect();
        let rows = oracle::fields(&frames, &["ip.src", "tcp.options.mss_val"]);
        let found: Vec<&String> =
            rows.iter().filter(|row| row[0] == source && !row[1].is_empty()).map(|row| &row[1]).collect();
        assert!(found.len() == 2 && found.iter().all(|it| **it == lowered), "{source}: {found:?} not {lowered}");
    }
    let summary = gateway.stop();
    let clamped = &summary.json["app"]["segments"][0]["mss_clamped"];
    assert_eq!(clamped.as_u64(), Some(4), "{}", summary.json);
    crate::superframes::assert_no_loss(&summary.json);
}
