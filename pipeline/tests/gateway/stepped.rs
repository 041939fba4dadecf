//! The gateway step by step with simulated time: timers, limits, and accounting of every packet.

use std::net::IpAddr;

use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::neighbour::NeighbourState;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_wire::{MacAddr, ipv4, parse};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, US, WAN, frame, tagged, vxlan};

#[test]
fn frames_for_an_unresolved_next_hop_are_queued_or_dropped() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    lab.settle();
    for _ in 0..10 {
        lab.send(LAN, &frame(FAR, HOST));
    }
    assert_eq!(lab.tunnelled(), 0);
    assert_eq!((lab.state(), lab.dropped(DropReason::NoNeighbour)), (NeighbourState::Incomplete, 2), "eight wait");
    for _ in 0..35 {
        lab.stepped.advance(SECOND / 10);
        lab.settle();
    }
    assert_eq!((lab.state(), lab.dropped(DropReason::NoNeighbour)), (NeighbourState::Failed, 10));
    // While the neighbour entry is failed, no frame is queued and the control thread is not notified.
    let punted = lab.stepped.punted();
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!((lab.dropped(DropReason::NoNeighbour), lab.stepped.punted()), (11, punted));
    // The next hop returns.
    let mut lab = lab.with_peer();
    lab.stepped.advance(31 * SECOND);
    lab.settle();
    lab.stepped.advance(SECOND);
    lab.settle();
    assert_eq!(lab.state(), NeighbourState::Reachable);
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(lab.tunnelled(), 1);
}

#[test]
fn a_flood_to_an_unresolved_next_hop_lets_the_reply_in() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    for _ in 0..5000 {
        lab.send(LAN, &frame(FAR, HOST));
    }
    let mut lab = lab.with_peer();
    assert!(lab.tunnelled() <= 8);
    assert_eq!(lab.state(), NeighbourState::Reachable);
    assert_eq!(lab.dropped(DropReason::QueueFull), 0);
}

#[test]
fn unused_addresses_age_out() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']\nageing = 10").with_peer();
    lab.settle();
    lab.send(LAN, &frame(FAR, HOST));
    lab.settle();
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).learned), (1, 1));
    for _ in 0..30 {
        // The address is seen every second, so it stays.
        lab.stepped.advance(SECOND);
        lab.send(LAN, &frame(FAR, HOST));
        lab.settle();
    }
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).aged), (1, 0));
    for _ in 0..11 {
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).aged), (0, 1));
}

#[test]
fn the_gateway_announces_itself_when_it_starts() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    let announced = |sent: &[(PortId, Vec<u8>)]| {
        let of_us = |bytes: &[u8]| bytes[28..32] == [10, 9, 0, 1] && bytes[38..42] == [10, 9, 0, 1];
        sent.iter().filter(|(port, bytes)| *port == WAN && bytes[12..14] == [8, 6] && of_us(bytes)).count()
    };
    assert_eq!(announced(&lab.settle()), 1);
    lab.stepped.advance(2 * SECOND);
    assert_eq!(announced(&lab.settle()), 1, "and once more");
    lab.stepped.advance(2 * SECOND);
    assert_eq!(announced(&lab.settle()), 0);
}

#[test]
fn a_duplicate_vtep_address_is_reported() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    lab.settle();
    let twin = Addresses { mac: HOST, addresses: vec!["10.9.0.1/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &twin.announcement("10.9.0.1".parse::<IpAddr>().unwrap()));
    let defended = lab.settle();
    assert_eq!(lab.control.conflicts(), 1);
    assert!(defended.iter().any(|(port, bytes)| *port == WAN && bytes[6..12] == US.0 && bytes[12..14] == [8, 6]));
}

#[test]
fn the_underlay_may_have_a_vlan() {
    let mut lab = Lab::of("vlan = 9", "accept_unknown_remotes = true");
    let sent = lab.settle();
    assert!(
        !sent.is_empty() && sent.iter().all(|(_, bytes)| bytes[12..16] == [0x81, 0, 0, 9]),
        "what we say ourselves"
    );
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    let ask = peer.solicitation("10.9.0.1".parse().unwrap(), None).unwrap();
    lab.send(WAN, &ask);
    assert_eq!((lab.settle().len(), lab.dropped(DropReason::NotForUs)), (0, 1), "without the tag it is not for us");
    lab.send(WAN, &tagged(&ask, 8));
    assert_eq!((lab.settle().len(), lab.dropped(DropReason::NotForUs)), (0, 2));
    lab.send(WAN, &tagged(&ask, 9));
    let reply = lab.settle();
    assert_eq!((reply.len(), &reply[0].1[..6], &reply[0].1[12..18]), (1, &peer.mac.0[..], &[0x81, 0, 0, 9, 8, 6][..]));
    // A tunnel packet of an unknown VTEP passes the control thread and returns, and keeps its order.
    let inner = frame(HOST, FAR);
    lab.send(WAN, &tagged(&vxlan(&peer, &inner), 9));
    let sent = lab.settle();
    assert!(sent.iter().any(|(port, bytes)| *port == LAN && *bytes == inner), "{:?}", lab.stepped.drops());
    // Frames to the VTEP get the tag after the next hop has answered.
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(lab.settle().len(), 1, "a solicitation");
    let mut answer = peer.solicitation("10.9.0.1".parse().unwrap(), Some(US)).unwrap();
    answer[21] = 2;
    answer[32..38].copy_from_slice(&US.0);
    lab.send(WAN, &tagged(&answer, 9));
    let sent = lab.settle();
    let out: Vec<_> = sent.iter().filter(|(port, bytes)| *port == WAN && bytes[16..18] == [8, 0]).collect();
    assert_eq!((out.len(), &out[0].1[12..16]), (1, &[0x81, 0, 0, 9][..]));
    assert_eq!(parse(&out[0].1).unwrap().vni().unwrap().get(), 42);
}

/// Returns a tunnel packet to the gateway from the first address of `from`.
#[test]
fn a_segment_with_inner_tags_keeps_them_in_both_directions() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']\ninner_vlans = 'carry'").with_peer();
    lab.settle();
    let inner = tagged(&frame(FAR, HOST), 5);
    lab.send(LAN, &inner);
    let sent = lab.settle();
    let out = sent.iter().find(|(port, bytes)| *port == WAN && parse(bytes).is_ok_and(|p| p.vni().is_some())).unwrap();
    assert!(out.1.ends_with(&inner));
    let peer = lab.peer.as_ref().unwrap().addresses().clone();
    let back = tagged(&frame(HOST, FAR), 5);
    lab.send(WAN, &vxlan(&peer, &back));
    assert!(lab.settle().contains(&(LAN, back)));
}

#[test]
fn every_buffer_returns_to_the_pool() {
    let mut lab = Lab::new("remotes = ['10.9.0.2', 'fd00:9::2']").with_peer();
    for i in 0..200u8 {
        lab.send(LAN, &frame(MacAddr([0xff; 6]), MacAddr([2, 0, 0, 0, 3, i])));
        lab.send(LAN, &frame(FAR, HOST)[..14 + usize::from(i % 40)]);
        lab.settle();
    }
    let pool = lab.pool.clone();
    drop(lab);
    assert_eq!(pool.outstanding(), 0);
}

/// A port does not know the UDP ports of the gateway. It may join tunnel packets like other datagrams, and the gateway
/// cuts them before it reads them.
#[test]
fn superframes_of_tunnel_packets_are_cut() {
    let keys = "remotes = ['10.9.0.2']\naccept_unknown_remotes = true";
    let mut lab = Lab::of("udp_port = 5000", keys).with_peer();
    lab.settle();
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    let tunnelled = |number: u8| {
        let mut inner = frame(HOST, FAR);
        inner[20..].fill(number);
        let mut bytes = vxlan(&peer, &inner);
        bytes[36..38].copy_from_slice(&5000u16.to_be_bytes());
        // Reserved bits have no meaning (RFC 7348 section 5). Ports would take other headers for VXLAN.
        bytes[43..46].fill(1);
        (bytes, inner)
    };
    let (bytes, inner) = tunnelled(7);
    lab.send(LAN, &frame(FAR, HOST));
    lab.settle();
    lab.send(WAN, &bytes);
    assert_eq!(lab.settle(), [(LAN, inner)], "{:?}", lab.stepped.drops());
    let all: Vec<_> = (0..3).map(tunnelled).collect();
    let mut superframe = all[0].0.clone();
    all[1..].iter().for_each(|(bytes, _)| superframe.extend(&bytes[42..]));
    let size = superframe.len() as u16;
    superframe[16..18].copy_from_slice(&(size - 14).to_be_bytes());
    superframe[38..40].copy_from_slice(&(size - 34).to_be_bytes());
    ipv4::ViewMut::new(&mut superframe[14..]).unwrap().fill_checksum();
    lab.send_superframe(WAN, &superframe, bytes.len() as u16 - 42);
    let expected: Vec<_> = all.into_iter().map(|(_, inner)| (LAN, inner)).collect();
    assert_eq!(lab.settle(), expected, "{:?}", lab.stepped.drops());
    lab.assert_balanced();
}
