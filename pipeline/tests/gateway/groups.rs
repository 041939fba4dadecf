//! Addresses behind groups of VTEPs, which share the flows to them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use wirepath_packet::drops::DropReason;
use wirepath_pipeline::tunnel::underlay::{Addresses, UnderlayHost};
use wirepath_pipeline::tunnel::{ExternalChanges, ExternalPlace};
use wirepath_wire::{MacAddr, parse};

use crate::bfd::datagram;
use crate::lab::{FAR, HOST, LAN, Lab, PEER, US, WAN, vxlan};

const GROUP: u32 = 10;
const FLOWS: u16 = 2000;

fn vtep(n: u8) -> IpAddr {
    [10, 9, 0, n].into()
}

/// Returns a datagram of one of many flows.
fn flow(dst: MacAddr, src: MacAddr, flow: u16) -> Vec<u8> {
    flow_to(Ipv4Addr::new(192, 0, 2, 9), dst, src, flow)
}

fn flow_to(to: Ipv4Addr, dst: MacAddr, src: MacAddr, flow: u16) -> Vec<u8> {
    let from = Ipv4Addr::new(192, 0, 2, 1);
    datagram((src, dst), (from.into(), to.into()), (1024 + flow, 4242), 64, &[0; 18])
}

/// Returns a gateway with a segment of the kernel, and an underlay in which all VTEPs answer.
fn lab() -> Lab {
    connect(Lab::new("control = 'kernel'"))
}

fn connect(mut lab: Lab) -> Lab {
    let addresses = (2..9).map(|n| format!("10.9.0.{n}/24").parse().unwrap()).collect();
    lab.peer = Some(UnderlayHost::new(Addresses { mac: PEER, addresses, gateways: vec![] }));
    lab.settle();
    lab
}

fn apply(lab: &mut Lab, changes: ExternalChanges) {
    let Lab { stepped, control, .. } = lab;
    stepped.with_plane(|plane| control.apply_external(changes, plane.ports(), plane.seconds()));
    lab.settle();
}

fn set_members(lab: &mut Lab, members: &[(u8, u16)]) {
    let members = members.iter().map(|(n, weight)| (vtep(*n), *weight)).collect();
    apply(lab, ExternalChanges { groups: [(GROUP, members)].into(), ..ExternalChanges::default() });
    // A change of the remotes waits for its share of the control thread's time.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let Lab { stepped, control, .. } = lab;
    stepped.with_plane(|plane| control.update_external_remotes(plane.ports(), plane.seconds()));
    lab.settle();
}

fn put_behind(lab: &mut Lab, mac: MacAddr, place: Option<ExternalPlace>) {
    apply(lab, ExternalChanges { macs: [((42, mac), place)].into(), ..ExternalChanges::default() });
}

/// Sends a frame of each flow. Returns the VTEP and the outer source port of each flow that left.
fn spread(lab: &mut Lab, dst: MacAddr, flows: u16, together: bool) -> BTreeMap<u16, (IpAddr, u16)> {
    let frames: Vec<Vec<u8>> = (0..flows).map(|n| flow(dst, HOST, n)).collect();
    spread_frames(lab, &frames, together)
}

fn spread_frames(lab: &mut Lab, frames: &[Vec<u8>], together: bool) -> BTreeMap<u16, (IpAddr, u16)> {
    let mut sent = Vec::new();
    for part in frames.chunks(if together { 128 } else { 1 }) {
        lab.send_all(LAN, part.iter().map(Vec::as_slice));
        sent.extend(lab.settle());
    }
    let outer = |(port, bytes): (_, Vec<u8>)| {
        assert_eq!(port, WAN);
        let parsed = parse(&bytes).unwrap();
        assert_eq!(parsed.vni().unwrap().get(), 42);
        let (_, to) = parsed.outer().ip_addresses(&bytes).unwrap();
        let inner = parsed.innermost().udp(&bytes).unwrap().src_port();
        (inner - 1024, (to, parsed.outer().udp(&bytes).unwrap().src_port()))
    };
    let count = sent.len();
    let by_flow: BTreeMap<_, _> = sent.into_iter().map(outer).collect();
    assert_eq!(by_flow.len(), count, "a frame left twice");
    by_flow
}

fn share(flows: &BTreeMap<u16, (IpAddr, u16)>, n: u8) -> usize {
    flows.values().filter(|(to, _)| *to == vtep(n)).count()
}

#[test]
fn flows_are_shared_by_weight_and_keep_their_member() {
    let mut lab = lab();
    set_members(&mut lab, &[(2, 1), (3, 1), (4, 2)]);
    put_behind(&mut lab, FAR, Some(ExternalPlace::Group(GROUP)));
    set_members(&mut lab, &[(2, 1), (3, 1), (4, 2)]);
    let before = spread(&mut lab, FAR, FLOWS, true);
    assert_eq!(before.len(), usize::from(FLOWS), "{:?}", lab.stepped.drops());
    // Four standard deviations of a binomial distribution are below 5 % of the flows.
    for (n, expected) in [(2, 500), (3, 500), (4, 1000)] {
        assert!(share(&before, n).abs_diff(expected) < 100, "{n}: {}", share(&before, n));
    }
    // Frames one by one, and frames that take the slow path, go the same way.
    assert!(spread(&mut lab, FAR, 200, false).iter().all(|(flow, to)| before[flow] == *to));
    // The source ports of a member are of all parts of the range, so that routers on the way spread its packets.
    let ports: BTreeSet<u16> = before.values().filter(|it| it.0 == vtep(2)).map(|it| it.1 >> 11).collect();
    assert_eq!(ports.len(), 8, "{ports:?}");

    // A member leaves. The flows of the others stay.
    set_members(&mut lab, &[(2, 1), (4, 2)]);
    let without = spread(&mut lab, FAR, FLOWS, true);
    assert_eq!(without.len(), usize::from(FLOWS));
    for (flow, (to, _)) in &without {
        assert!(*to != vtep(3) && (before[flow].0 == vtep(3) || before[flow].0 == *to), "{flow}");
    }
    assert!(share(&without, 2).abs_diff(667) < 100, "{}", share(&without, 2));
    let rows = lab.rows("fdb");
    assert!(rows.iter().any(|row| row[1] == FAR.to_string() && row[2] == "10.9.0.2, 10.9.0.4"), "{rows:?}");
    assert_eq!(lab.rows("remotes").len(), 2);

    // A frame from a tunnel to the address goes to no tunnel.
    let from = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &vxlan(&from, &flow(FAR, MacAddr([2, 0, 0, 0, 2, 7]), 1)));
    assert_eq!((lab.settle(), lab.dropped(DropReason::SplitHorizon)), (vec![], 1));

    // All members leave, and the group returns with another one.
    set_members(&mut lab, &[]);
    assert_eq!(spread(&mut lab, FAR, 100, true).len(), 0);
    assert_eq!(lab.dropped(DropReason::RemoteDown), 100);
    set_members(&mut lab, &[(7, 1)]);
    assert_eq!(share(&spread(&mut lab, FAR, 100, true), 7), 100);
    // The address goes to another place, and away.
    put_behind(&mut lab, FAR, Some(ExternalPlace::Vtep(vtep(7))));
    assert_eq!(share(&spread(&mut lab, FAR, 100, true), 7), 100);
    assert_eq!(lab.control.external_stats().groups, 0);
    put_behind(&mut lab, FAR, None);
    assert!(lab.rows("fdb").iter().all(|row| row[1] != FAR.to_string()));
}

/// Many addresses behind two groups of one segment, whose members come late.
#[test]
fn addresses_may_come_before_their_group() {
    let mut lab = lab();
    let mac = |n: u8| MacAddr([2, 0, 0, 0, 3, n]);
    let macs = (0..50).map(|n| ((42, mac(n)), Some(ExternalPlace::Group(GROUP + u32::from(n % 2))))).collect();
    apply(&mut lab, ExternalChanges { macs, ..ExternalChanges::default() });
    assert_eq!(spread(&mut lab, mac(0), 10, true).len(), 0);
    assert_eq!(lab.dropped(DropReason::RemoteDown), 10);
    let groups = [(GROUP, vec![(vtep(2), 1)]), (GROUP + 1, vec![(vtep(3), 1), (vtep(4), 1)])].into();
    apply(&mut lab, ExternalChanges { groups, ..ExternalChanges::default() });
    set_members(&mut lab, &[(2, 1)]);
    assert_eq!(lab.control.external_stats().groups, 2);
    for n in 0..50 {
        let flows = spread(&mut lab, mac(n), 40, true);
        assert_eq!(flows.len(), 40);
        assert_eq!(share(&flows, 2), if n % 2 == 0 { 40 } else { 0 }, "{n}");
        assert!(n % 2 == 0 || share(&flows, 3) > 5 && share(&flows, 4) > 5, "{n}");
    }
    // The segment goes with all its groups, and the members with it.
    for n in 0..50 {
        put_behind(&mut lab, mac(n), None);
    }
    set_members(&mut lab, &[(2, 1)]);
    assert_eq!((lab.control.external_stats().groups, lab.rows("remotes").len()), (0, 0));
}

/// A router behind a group of VTEPs, to which a route leads.
#[test]
fn routed_flows_are_shared_too() {
    let text = "[[segment]]\nname = 'one'\naddresses = ['10.1.0.1/24']\nports = [{ port = 'lan' }]\n\
                [[segment]]\nname = 'transit'\nvni = 42\nvrf = 'default'\ncontrol = 'kernel'\n\
                [[vrf]]\nname = 'default'\n";
    let mut lab = connect(Lab::of_segments("", text));
    let mut changes = ExternalChanges::default();
    changes.routes.insert((42, "10.3.0.0/16".parse().unwrap()), vec![FAR]);
    changes.macs.insert((42, FAR), Some(ExternalPlace::Group(GROUP)));
    apply(&mut lab, changes);
    set_members(&mut lab, &[(2, 1), (3, 1)]);
    set_members(&mut lab, &[(2, 1), (3, 1)]);
    // Many flows to one destination, and many destinations.
    let to = |flow: u16| Ipv4Addr::new(10, 3, 0, if flow < 500 { 5 } else { (flow % 200) as u8 });
    let frames: Vec<Vec<u8>> = (0..1000).map(|n| flow_to(to(n), US, HOST, n)).collect();
    let flows = spread_frames(&mut lab, &frames, true);
    assert_eq!(flows.len(), 1000, "{:?}", lab.stepped.drops());
    for n in [2, 3] {
        let to_one = flows.iter().filter(|(flow, it)| **flow < 500 && it.0 == vtep(n)).count();
        assert!(to_one.abs_diff(250) < 50 && share(&flows, n).abs_diff(500) < 80, "{n}: {to_one} {}", share(&flows, n));
    }
    assert!(spread_frames(&mut lab, &frames[..100], false).iter().all(|(flow, to)| flows[flow] == *to));
}
