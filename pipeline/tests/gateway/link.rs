//! Loss and return of the underlay's link.

use std::net::IpAddr;

use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::neighbour::NeighbourState;
use wirepath_pipeline::tunnel::underlay::{Addresses, UnderlayHost};
use wirepath_pmd::port::{Link, PortEvent};
use wirepath_wire::{MacAddr, parse};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, US, WAN, frame, vxlan};

const OTHER: MacAddr = MacAddr([2, 7, 7, 7, 7, 7]);

/// Longest time for which frames wait for the reply of a neighbour after the link returned.
const HOLD_TIME: u64 = SECOND / 50;

/// Returns the addresses that solicitations ask for, and whether they go to all hosts.
fn solicited(sent: &[(PortId, Vec<u8>)]) -> Vec<(IpAddr, bool)> {
    let of = |bytes: &[u8]| {
        let group = MacAddr(*bytes.first_chunk().unwrap()).is_multicast();
        if bytes[12..14] == [8, 6] && bytes[21] == 1 && bytes[28..32] != bytes[38..42] && bytes[28..32] != [0; 4] {
            return Some((IpAddr::from(*bytes[38..].first_chunk::<4>().unwrap()), group));
        }
        let asks = bytes[12..14] == [0x86, 0xdd] && bytes[54] == 135 && bytes[22..38] != [0; 16];
        asks.then(|| (IpAddr::from(*bytes[62..].first_chunk::<16>().unwrap()), group))
    };
    sent.iter().filter(|(port, _)| *port == WAN).filter_map(|(_, bytes)| of(bytes)).collect()
}

fn flap(lab: &mut Lab) {
    lab.port_event(WAN, &PortEvent::Link(Link::DOWN));
    lab.port_event(WAN, &PortEvent::Link(Link::UP));
}

#[test]
fn a_neighbour_with_a_new_address_is_found_at_once() {
    let mut lab = Lab::new("remotes = ['10.9.0.2', 'fd00:9::2']").with_peer();
    lab.settle();
    let peer = lab.peer.as_ref().unwrap().addresses().clone();
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    lab.stepped.advance(4 * SECOND);
    lab.settle();
    lab.peer = Some(UnderlayHost::new(Addresses { mac: OTHER, ..peer }));
    flap(&mut lab);
    // The gateway announces its own addresses, which the peer does not answer.
    let announced =
        lab.settle().iter().filter(|(_, bytes)| bytes[6..12] == US.0 && bytes[28..32] == [10, 9, 0, 1]).count();
    assert!(announced > 0, "no announcement");
    lab.send(LAN, &frame(FAR, HOST));
    let sent = lab.settle();
    let tunnelled: Vec<_> = sent.iter().filter(|(_, b)| parse(b).is_ok_and(|p| p.vni().is_some())).collect();
    assert_eq!((tunnelled.len(), &tunnelled[0].1[..6]), (1, &OTHER.0[..]));
    assert!(lab.control.neighbours().all(|(_, state, mac)| (state, mac) == (NeighbourState::Reachable, Some(OTHER))));
}

/// Returns a frame with a number.
fn numbered(number: u16) -> Vec<u8> {
    let mut bytes = frame(FAR, HOST);
    bytes[14..16].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Returns the Ethernet destinations and the numbers of the sent tunnel packets.
fn numbers(sent: &[(PortId, Vec<u8>)]) -> Vec<(MacAddr, u16)> {
    let number = |bytes: &[u8]| u16::from_be_bytes(*bytes[64..].first_chunk().unwrap());
    let tunnelled = sent.iter().filter(|(port, bytes)| *port == WAN && parse(bytes).is_ok_and(|p| p.vni().is_some()));
    tunnelled.map(|(_, bytes)| (MacAddr(*bytes.first_chunk().unwrap()), number(bytes))).collect()
}

/// Returns a gateway with one remote, behind which a host is known.
fn known() -> Lab {
    let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
    lab.settle();
    let peer = lab.peer.as_ref().unwrap().addresses().clone();
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    lab
}

#[test]
fn frames_after_a_flap_wait_for_the_new_address() {
    let mut lab = known();
    let peer = lab.peer.take().unwrap().addresses().clone();
    lab.port_event(WAN, &PortEvent::Link(Link::DOWN));
    lab.send_all(LAN, (0..10).map(numbered).collect::<Vec<_>>().iter().map(Vec::as_slice));
    assert_eq!(numbers(&lab.settle()), [], "the link is down");
    lab.peer = Some(UnderlayHost::new(Addresses { mac: OTHER, ..peer }));
    lab.port_event(WAN, &PortEvent::Link(Link::UP));
    // These frames are sent before the control thread asks for the neighbour.
    lab.send_all(LAN, (10..20).map(numbered).collect::<Vec<_>>().iter().map(Vec::as_slice));
    let expected: Vec<_> = (0..20).map(|number| (OTHER, number)).collect();
    assert_eq!(numbers(&lab.settle()), expected, "all in order to the new address");
    lab.send(LAN, &numbered(20));
    assert_eq!(numbers(&lab.settle()), [(OTHER, 20)]);
}

#[test]
fn frames_that_cannot_wait_go_to_the_known_address() {
    let mut lab = known();
    let peer = lab.peer.take();
    flap(&mut lab);
    // More than the queue takes, and more than may be passed to the control thread.
    lab.send_all(LAN, (0..200).map(numbered).collect::<Vec<_>>().iter().map(Vec::as_slice));
    let at_once = numbers(&lab.settle());
    assert_eq!((at_once.len(), lab.control.waiting_frames()), (136, 64));
    lab.stepped.advance(HOLD_TIME);
    let mut all: Vec<_> = at_once.into_iter().chain(numbers(&lab.settle())).collect();
    all.sort_unstable_by_key(|(_, number)| *number);
    assert_eq!(all, (0..200).map(|number| (PEER, number)).collect::<Vec<_>>(), "none is lost");
    assert_eq!(lab.dropped(DropReason::NoNeighbour), 0);
    lab.peer = peer;
    lab.stepped.advance(SECOND);
    lab.settle();
    assert_eq!(lab.state(), NeighbourState::Reachable);
}

#[test]
fn a_silent_neighbour_stays_in_use_while_it_is_asked() {
    let mut lab = Lab::new("remotes = ['10.9.0.2', 'fd00:9::2']").with_peer();
    lab.settle();
    let peer = lab.peer.take();
    flap(&mut lab);
    let mut asked = solicited(&lab.settle());
    asked.sort_unstable();
    assert_eq!(asked, [("10.9.0.2".parse().unwrap(), true), ("fd00:9::2".parse().unwrap(), true)]);
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(lab.tunnelled(), 0, "held");
    lab.stepped.advance(HOLD_TIME);
    assert_eq!(lab.tunnelled(), 2, "flooded to the known addresses");
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(lab.tunnelled(), 2, "not held any more");
    lab.peer = peer;
    lab.stepped.advance(SECOND);
    lab.settle();
    assert_eq!(lab.state(), NeighbourState::Reachable);
}

#[test]
fn many_neighbours_are_asked_in_several_ticks() {
    let addresses: Vec<String> = (0..2000).map(|n| format!("'fd00:9::1:{n:x}'")).collect();
    let mut lab = Lab::new(&format!("remotes = [{}]", addresses.join(", ")));
    // The first round resolves, the second one asks again after the link was lost.
    for round in 0..2 {
        if round == 1 {
            flap(&mut lab);
        }
        let mut all = std::collections::BTreeSet::new();
        for _ in 0..2000 / 128 + 1 {
            lab.stepped.control(&mut lab.control);
            let asked = solicited(&lab.sent());
            assert!(asked.len() <= 128, "{}", asked.len());
            all.extend(asked.into_iter().map(|(ip, _)| ip));
        }
        assert_eq!(all.len(), 2000);
    }
}

/// An IPv4 packet of `len` bytes with "don't fragment" from HOST to FAR.
fn ipv4(len: usize) -> Vec<u8> {
    let mut out = [frame(FAR, HOST)[..12].to_vec(), vec![8, 0], vec![0; len]].concat();
    let ip = wirepath_wire::ipv4::Repr {
        src: [10, 1, 0, 1].into(),
        dst: [10, 1, 0, 2].into(),
        protocol: wirepath_wire::IpProtocol(253),
        payload_len: (len - 20) as u16,
        ttl: 64,
        traffic_class: 0,
        ident: 0,
        fragment_word: 0x4000,
    };
    ip.emit(&mut out[14..]).unwrap();
    out
}

#[test]
fn a_lowered_mtu_of_the_underlay_is_told_to_senders() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
    lab.settle();
    let peer = lab.peer.as_ref().unwrap().addresses().clone();
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    // Outer headers without the outer Ethernet header, and the inner Ethernet header.
    const OVERHEAD: usize = 20 + 8 + 8 + 14;
    for (mtu, fits) in [(None, 1500), (Some(1400), 1400), (Some(1300), 1300), (Some(9000), 1500)] {
        if let Some(mtu) = mtu {
            lab.port_event(WAN, &PortEvent::Mtu(mtu));
        }
        lab.send(LAN, &ipv4(fits - OVERHEAD));
        assert_eq!(lab.tunnelled(), 1, "{mtu:?}");
        lab.send(LAN, &ipv4(fits - OVERHEAD + 1));
        let sent = lab.settle();
        let [(LAN, answer)] = &sent[..] else { panic!("{mtu:?}: {sent:?}") };
        assert_eq!((answer[34], answer[35]), (3, 4), "fragmentation needed");
        assert_eq!(usize::from(u16::from_be_bytes([answer[40], answer[41]])), fits - OVERHEAD, "{mtu:?}");
        lab.stepped.advance(SECOND);
    }
    assert_eq!(lab.dropped(wirepath_packet::drops::DropReason::TooBigForMtu), 4);
}
