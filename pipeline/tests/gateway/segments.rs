//! Limits and rules of a segment: storm control, MAC limits, moves of addresses.

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_wire::MacAddr;

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, WAN, frame, vxlan};

const BROADCAST: MacAddr = MacAddr([0xff; 6]);
const GROUP: MacAddr = MacAddr([1, 0, 0x5e, 1, 2, 3]);

fn peer() -> Addresses {
    Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] }
}

/// Sends `count` frames and returns the number that went into the tunnel.
fn flooded(lab: &mut Lab, dst: MacAddr, count: usize) -> usize {
    let bytes = frame(dst, HOST);
    lab.send_all(LAN, std::iter::repeat_n(bytes.as_slice(), count));
    lab.tunnelled()
}

#[test]
fn storm_control_limits_each_kind() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']\nbroadcast_limit = 1000\nmulticast_limit = 50").with_peer();
    lab.settle();
    assert_eq!(flooded(&mut lab, FAR, 1), 1, "the next hop is resolved");
    assert_eq!(flooded(&mut lab, BROADCAST, 300), 100, "the burst");
    assert_eq!((flooded(&mut lab, GROUP, 100), flooded(&mut lab, FAR, 200)), (10, 200));
    lab.stepped.advance(SECOND / 100);
    assert_eq!(flooded(&mut lab, BROADCAST, 100), 10);
    let stats = lab.control.segment_stats(0);
    assert_eq!((stats.storm_drops, stats.unknown_unicast), ([290, 90, 0], 201));
    assert_eq!(lab.dropped(DropReason::StormControl), 380);
    // Frames from tunnels have no limit, and known addresses are not flooded.
    let inner = frame(BROADCAST, FAR);
    for _ in 0..200 {
        lab.send(WAN, &vxlan(&peer(), &inner));
    }
    assert_eq!(lab.settle().iter().filter(|(port, bytes)| *port == LAN && *bytes == inner).count(), 200);
    assert_eq!(flooded(&mut lab, FAR, 64), 64);
    assert_eq!(lab.control.segment_stats(0).unknown_unicast, 201);
}
