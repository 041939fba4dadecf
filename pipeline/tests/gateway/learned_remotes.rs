//! VTEPs that a segment learns: forged sources, limits, ageing and eviction.

use std::net::Ipv4Addr;

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::{Addresses, UnderlayHost};
use wirepath_wire::{MacAddr, parse};

use crate::lab::{FAR, HOST, LAN, Lab, SECOND, US, WAN, frame, vxlan};

const MILLISECOND: u64 = 1_000_000;
const ROUTER: MacAddr = MacAddr([2, 9, 9, 9, 9, 254]);

/// Returns a gateway that accepts all VTEPs, with a peer that is also the router.
fn lab() -> Lab {
    let mut lab = Lab::of("gateways = ['10.9.0.254']", "accept_unknown_remotes = true");
    let addresses = vec!["10.9.0.254/24".parse().unwrap()];
    lab.peer = Some(UnderlayHost::new(Addresses { mac: ROUTER, addresses, gateways: vec![] }));
    lab.settle();
    lab
}

fn from(address: impl std::fmt::Display) -> Addresses {
    Addresses { mac: ROUTER, addresses: vec![format!("{address}/32").parse().unwrap()], gateways: vec![] }
}

/// Sends one packet from each of `count` forged VTEPs, one per millisecond, with as many inner sources.
fn forge(lab: &mut Lab, first: u32, count: u32) {
    for n in first..first + count {
        let [_, a, b, c] = n.to_be_bytes();
        let inner = frame(HOST, MacAddr([2, 0xee, 0, a, b, c]));
        lab.send(WAN, &vxlan(&from(Ipv4Addr::from_bits(0x1401_0000 + n)), &inner));
        lab.stepped.advance(MILLISECOND);
        if n % 10 == 0 {
            lab.settle();
        }
    }
    lab.settle();
}

/// A real VTEP sends a frame, and the local host answers. Returns whether both frames arrive.
fn converse(lab: &mut Lab, vtep: &str, far: MacAddr) -> bool {
    let inner = frame(HOST, far);
    lab.send(WAN, &vxlan(&from(vtep), &inner));
    let came = lab.settle().contains(&(LAN, inner));
    let reply = frame(far, HOST);
    lab.send(LAN, &reply);
    let vtep: Ipv4Addr = vtep.parse().unwrap();
    let went = lab.settle().iter().any(|(port, bytes)| {
        *port == WAN
            && bytes.ends_with(&reply)
            && bytes[..6] == ROUTER.0
            && parse(bytes).is_ok_and(|p| p.outer().ipv4(bytes).is_some_and(|ip| ip.dst() == vtep))
    });
    came && went
}

#[test]
fn forged_vteps_make_room_for_real_ones() {
    let mut lab = lab();
    assert!(converse(&mut lab, "192.0.2.1", FAR));
    // Twelve seconds fill all places of the segment.
    forge(&mut lab, 0, 12_000);
    let places = lab.control.learned_remotes();
    assert!(places >= 1000, "{places}");
    lab.stepped.advance(SECOND);
    assert!(converse(&mut lab, "192.0.2.2", MacAddr([2, 0, 0, 0, 2, 2])));
    // Both are in use, so further forged ones do not displace them.
    forge(&mut lab, 12_000, 30_000);
    assert_eq!(lab.control.learned_remotes(), places);
    assert!(lab.control.learned_remote_stats().evicted > 2_000);
    assert!(lab.dropped(DropReason::RateLimited) > 30_000, "{:?}", lab.stepped.drops());
    let neighbours: Vec<_> = lab.control.neighbours().map(|(ip, ..)| ip.to_string()).collect();
    assert_eq!(neighbours, ["10.9.0.254"], "nobody asks for forged addresses");
    let learned = lab.control.learned_remote_stats().learned;
    for (vtep, far) in [("192.0.2.1", FAR), ("192.0.2.2", MacAddr([2, 0, 0, 0, 2, 2]))] {
        assert!(converse(&mut lab, vtep, far), "{vtep}: {:?}", lab.stepped.drops());
    }
    assert_eq!(lab.control.learned_remote_stats().learned, learned, "they were never removed");
}

#[test]
fn vteps_that_never_answer_make_room() {
    let mut lab = lab();
    // Frames have to be sent to 100 on-link VTEPs that do not answer ARP.
    for n in 10..110u8 {
        let far = MacAddr([2, 0xdd, 0, 0, 0, n]);
        lab.send(WAN, &vxlan(&from(Ipv4Addr::new(10, 9, 0, n)), &frame(HOST, far)));
        lab.stepped.advance(20 * MILLISECOND);
        lab.settle();
        lab.send(LAN, &frame(far, HOST));
        lab.settle();
    }
    assert_eq!(lab.control.neighbours().count(), 100);
    // Real ones fill the other places, and then displace those.
    for n in 0..1200u32 {
        let vtep = Ipv4Addr::from_bits(0xc612_0000 + n).to_string();
        lab.stepped.advance(20 * MILLISECOND);
        let [.., a, b] = n.to_be_bytes();
        let came = converse(&mut lab, &vtep, MacAddr([2, 0xcc, 0, 0, a, b]));
        assert_eq!(came, n < 1024, "{n}: {:?}", lab.stepped.drops());
    }
    assert_eq!(lab.control.learned_remote_stats().evicted, 100);
    assert_eq!(lab.control.neighbours().count(), 1, "only the router");
    assert_eq!(lab.dropped(DropReason::RemoteLimit), 1200 - 1024);
}

#[test]
fn unused_vteps_expire() {
    let mut lab = Lab::of("gateways = ['10.9.0.254']", "accept_unknown_remotes = true\nageing = 20");
    let addresses = vec!["10.9.0.254/24".parse().unwrap()];
    lab.peer = Some(UnderlayHost::new(Addresses { mac: ROUTER, addresses, gateways: vec![] }));
    lab.settle();
    assert!(converse(&mut lab, "192.0.2.1", FAR));
    forge(&mut lab, 0, 50);
    assert_eq!(lab.control.learned_remotes(), 51);
    // Only the first one stays in use.
    for _ in 0..200 {
        lab.stepped.advance(SECOND);
        lab.send(WAN, &vxlan(&from("192.0.2.1"), &frame(HOST, FAR)));
        lab.settle();
    }
    assert_eq!((lab.control.learned_remotes(), lab.control.fdb_entries()), (1, 1));
    assert_eq!(lab.control.learned_remote_stats().aged, 50);
    for _ in 0..100 {
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!((lab.control.learned_remotes(), lab.control.neighbours().count()), (0, 0));
    // The index of a removed VTEP serves another one.
    assert!(converse(&mut lab, "192.0.2.9", FAR));
}

#[test]
fn impossible_sources_are_refused() {
    let mut lab = lab();
    let impossible = ["10.9.0.1", "10.9.0.0", "10.9.0.255", "224.0.0.5", "255.255.255.255", "0.0.0.0", "127.0.0.1"];
    for source in impossible {
        let mut packet = vxlan(&from("192.0.2.1"), &frame(HOST, FAR));
        packet[26..30].copy_from_slice(&source.parse::<Ipv4Addr>().unwrap().octets());
        packet[24..26].fill(0);
        let sum = wirepath_wire::checksum::ipv4_header(&packet[14..34]);
        packet[24..26].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(packet[..6], US.0);
        lab.send(WAN, &packet);
        lab.settle();
    }
    for source in ["fd00:9::1", "fd00:9::", "ff02::1", "::"] {
        let sender =
            Addresses { mac: ROUTER, addresses: vec![format!("{source}/128").parse().unwrap()], gateways: vec![] };
        lab.send(WAN, &vxlan(&sender, &frame(HOST, FAR)));
        lab.settle();
    }
    assert_eq!(
        (lab.dropped(DropReason::BadSource), lab.control.learned_remotes()),
        (11, 0),
        "{:?}",
        lab.stepped.drops()
    );
    assert_eq!(lab.stepped.punted(), 0);
}
