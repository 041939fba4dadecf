//! Limits and rules of a segment: storm control, MAC limits, moves of addresses.

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_wire::MacAddr;

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, SPARE, WAN, frame, tagged, vxlan};

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
    let mut lab =
        Lab::with_attachments("", TWO, "remotes = ['10.9.0.2']\nmac_limit = 25\nremote_mac_limit = 5").with_peer();
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

/// Returns the column `kind` of the forwarding entry of an address.
fn kind(lab: &mut Lab, mac: MacAddr) -> String {
    let rows = lab.rows("fdb");
    let row = rows.iter().find(|row| row[1] == mac.to_string().as_str());
    row.map_or_else(String::new, |row| row[3].as_str().unwrap().to_owned())
}

/// Shows the host at the port, or at the remote.
fn seen(lab: &mut Lab, local: bool) {
    if local {
        lab.send(LAN, &frame(FAR, HOST));
    } else {
        let inner = frame(MacAddr([0xff; 6]), HOST);
        lab.send(WAN, &vxlan(&peer(), &inner));
        assert!(lab.settle().contains(&(LAN, inner)), "the frame is forwarded from any place");
    }
    lab.stepped.advance(SECOND / 2);
    lab.settle();
}

#[test]
fn an_address_that_moves_too_often_is_frozen() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']\nmove_limit = 3\nmove_window = 60\nfreeze_time = 30").with_peer();
    lab.settle();
    let moves = |lab: &Lab| {
        let stats = lab.control.learn_stats(0);
        (stats.moved, stats.frozen, stats.moves_refused)
    };
    for local in [true, false, true] {
        seen(&mut lab, local);
    }
    assert_eq!((moves(&lab), kind(&mut lab, HOST).as_str()), ((2, 0, 0), "learned"));
    seen(&mut lab, false);
    assert_eq!((moves(&lab), kind(&mut lab, HOST).as_str()), ((3, 1, 0), "frozen"));
    seen(&mut lab, true);
    assert_eq!((moves(&lab), kind(&mut lab, HOST).as_str()), ((3, 1, 1), "frozen"));
    // Frames to it go to the last place, the remote.
    lab.send(LAN, &frame(HOST, MacAddr([2, 0, 0, 0, 1, 2])));
    assert_eq!((lab.tunnelled(), lab.control.segment_stats(0).unknown_unicast), (1, 3));
    for _ in 0..30 {
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!(kind(&mut lab, HOST), "learned");
    seen(&mut lab, true);
    assert_eq!(moves(&lab), (4, 1, 1));
}

#[test]
fn an_address_learned_at_a_sticky_port_does_not_move() {
    let sticky = "{ port = 'lan', sticky = true }";
    let mut lab = Lab::with_attachments("", sticky, "remotes = ['10.9.0.2']\nageing = 20").with_peer();
    lab.settle();
    seen(&mut lab, false);
    assert_eq!(kind(&mut lab, HOST), "learned");
    seen(&mut lab, true);
    assert_eq!(kind(&mut lab, HOST), "sticky");
    seen(&mut lab, false);
    let stats = lab.control.learn_stats(0);
    assert_eq!((stats.moved, stats.moves_refused, kind(&mut lab, HOST).as_str()), (1, 1, "sticky"));
    // Frames from the other place do not keep the entry alive.
    for _ in 0..25 {
        seen(&mut lab, false);
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!((kind(&mut lab, HOST).as_str(), lab.control.learn_stats(0).aged), ("learned", 1));
}

#[test]
fn isolated_ports_reach_all_but_each_other() {
    let ports = "{ port = 'lan', isolated = true }, { port = 'lan', vlan = 5, isolated = true }, \
                 { port = 'lan', vlan = 6 }";
    let mut lab = Lab::with_attachments("", ports, "remotes = ['10.9.0.2']").with_peer();
    lab.settle();
    // One host at each attachment, and one behind the remote.
    let hosts = [host(0), host(5), host(6), host(9)];
    let tags = [None, Some(5), Some(6)];
    let send = |lab: &mut Lab, from: usize, dst: MacAddr| {
        let bytes = frame(dst, hosts[from]);
        match tags.get(from) {
            Some(None) => lab.send(LAN, &bytes),
            Some(Some(tag)) => lab.send(LAN, &tagged(&bytes, *tag)),
            None => lab.send(WAN, &vxlan(&peer(), &bytes)),
        }
        let sent = lab.settle();
        let tunnelled = sent.iter().any(|(port, seen)| *port == WAN && seen.ends_with(&bytes));
        let mut reached: Vec<bool> = tags
            .iter()
            .map(|tag| tag.map_or_else(|| bytes.clone(), |tag| tagged(&bytes, tag)))
            .map(|expected| sent.contains(&(LAN, expected)))
            .collect();
        reached.push(tunnelled);
        reached
    };
    let broadcast = MacAddr([0xff; 6]);
    assert_eq!(send(&mut lab, 3, broadcast), [true, true, true, false]);
    send(&mut lab, 0, host(9));
    assert_eq!(send(&mut lab, 0, broadcast), [false, false, true, true]);
    assert_eq!(send(&mut lab, 1, broadcast), [false, false, true, true]);
    assert_eq!(send(&mut lab, 2, broadcast), [true, true, false, true]);
    // All addresses are known now.
    assert_eq!(send(&mut lab, 0, host(6)), [false, false, true, false]);
    assert_eq!(send(&mut lab, 2, host(0)), [true, false, false, false]);
    assert_eq!(send(&mut lab, 0, host(9)), [false, false, false, true]);
    assert_eq!(send(&mut lab, 3, host(5)), [false, true, false, false]);
    assert_eq!(send(&mut lab, 0, host(5)), [false; 4]);
    assert_eq!(lab.dropped(DropReason::IsolatedPort), 1);
}

#[test]
fn a_mirror_gets_each_frame_once() {
    let text = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n[[segment]]\nvni = 42\n\
                remotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\nmirror = 'spare'\n";
    let mut lab = Lab::with_ports(text, &["wan", "lan", "spare"]).with_peer();
    lab.settle();
    let copies = |lab: &mut Lab| -> Vec<Vec<u8>> {
        lab.settle().into_iter().filter(|(port, _)| *port == SPARE).map(|(_, bytes)| bytes).collect()
    };
    let (out, back) = (frame(FAR, HOST), frame(HOST, FAR));
    for flooded in [true, false] {
        lab.send(LAN, &out);
        assert_eq!(copies(&mut lab), std::slice::from_ref(&out), "flooded: {flooded}");
        lab.send(WAN, &vxlan(&peer(), &back));
        assert_eq!(copies(&mut lab), std::slice::from_ref(&back));
    }
    let stats = lab.control.segment_stats(0);
    assert_eq!((stats.mirrored, stats.flooded, stats.overlay_tx.0, stats.local_tx.0), (4, 1, 2, 2));
    // What comes from the mirror belongs to no segment.
    lab.send(SPARE, &out);
    assert_eq!((lab.settle().len(), lab.dropped(DropReason::NoSegment)), (0, 1));
}

/// A tag in the frame or in the metadata. The segment of the port has no tags, so it drops the frame.
#[test]
fn dropped_frames_with_a_tag_teach_nothing() {
    for in_metadata in [false, true] {
        let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
        lab.settle();
        let inner = frame(FAR, HOST);
        let mut packet = lab.pool.take().unwrap();
        if in_metadata {
            packet.set_vlan(9);
        }
        let bytes = if in_metadata { inner } else { tagged(&inner, 9) };
        assert!(packet.extend_from_slice(&bytes, &lab.pool));
        lab.stepped.process(Some(LAN), &mut [packet].into_iter().collect());
        assert_eq!((lab.settle(), lab.dropped(DropReason::NoSegment)), (vec![], 1));
        assert_eq!(lab.control.fdb_entries(), 0, "in the metadata: {in_metadata}");
    }
}
