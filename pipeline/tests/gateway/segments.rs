//! Limits and rules of a segment: storm control, MAC limits, moves of addresses.

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_wire::MacAddr;

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, WAN, frame, tagged, vxlan};

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

/// The port `lan` without tag, and with VLAN 5.
const TWO: &str = "{ port = 'lan', mac_limit = 10 }, { port = 'lan', vlan = 5 }";

fn host(n: u32) -> MacAddr {
    let [_, b, c, d] = n.to_be_bytes();
    MacAddr([2, 7, 0, b, c, d])
}

#[test]
fn full_limits_refuse_addresses_and_forward_their_frames() {
    let mut lab = Lab::with_attachments("", TWO, "remotes = ['10.9.0.2']\nmac_limit = 25\nremote_mac_limit = 5").with_peer();
    lab.settle();
    // Ten addresses of the port, then five of the remote, then as many as the segment still has room for.
    for n in 0..40 {
        lab.send(LAN, &frame(FAR, host(n)));
        lab.settle();
    }
    let counts = |lab: &Lab| {
        let stats = lab.control.learn_stats(0);
        (stats.learned, stats.refused)
    };
    assert_eq!(counts(&lab), (10, 30));
    for n in 100..140 {
        let inner = frame(host(0), host(n));
        lab.send(WAN, &vxlan(&peer(), &inner));
        assert!(lab.settle().contains(&(LAN, inner)), "frames of refused addresses are forwarded");
    }
    assert_eq!(counts(&lab), (15, 65));
    for n in 200..240 {
        lab.send(LAN, &tagged(&frame(FAR, host(n)), 5));
        lab.settle();
    }
    assert_eq!((counts(&lab), lab.control.fdb_entries()), ((25, 95), 25));
    // Known addresses have their entries still, frames to refused ones are flooded.
    let before = lab.control.segment_stats(0).unknown_unicast;
    lab.send(LAN, &frame(host(100), host(0)));
    assert_eq!((lab.tunnelled(), lab.control.segment_stats(0).unknown_unicast), (1, before));
    lab.send(LAN, &frame(host(130), host(0)));
    assert_eq!((lab.tunnelled(), lab.control.segment_stats(0).unknown_unicast), (1, before + 1));
}
