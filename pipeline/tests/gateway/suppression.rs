//! ARP and ND suppression. The reply of the gateway must be the one that the host itself would give.

use std::net::IpAddr;

use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{ExternalChanges, ExternalPlace};
use wirepath_wire::MacAddr;

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, WAN, tagged, vxlan};

const SUPPRESSED: &str = "remotes = ['10.9.0.2']\nneighbour_suppression = true";
/// The port `lan` without tag, and with VLAN 5.
const TWO: &str = "{ port = 'lan' }, { port = 'lan', vlan = 5 }";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A host inside the segment, with an IPv4 and an IPv6 address.
fn host(mac: MacAddr, n: u8) -> Addresses {
    let addresses = [format!("10.1.0.{n}/24"), format!("fd01::{n:x}/64")];
    Addresses { mac, addresses: addresses.map(|it| it.parse().unwrap()).to_vec(), gateways: vec![] }
}

/// Returns the reply of a host to a request.
fn reply(host: &Addresses, request: &[u8]) -> Vec<u8> {
    match UnderlayHost::new(host.clone()).handle(request, 0).reply {
        HostReply::Frame(reply) => reply,
        other => panic!("{other:?}"),
    }
}

/// Sends a frame behind the remote into the tunnel.
fn from_remote(lab: &mut Lab, inner: &[u8]) {
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &vxlan(&peer, inner));
    lab.settle();
}

/// Sends a frame from the port and returns what the port got, and the number of frames in the tunnel.
fn from_port(lab: &mut Lab, bytes: &[u8]) -> (Vec<Vec<u8>>, usize) {
    lab.send(LAN, bytes);
    let sent = lab.settle();
    let local = sent.iter().filter(|(port, _)| *port == LAN).map(|(_, bytes)| bytes.clone()).collect();
    (local, sent.iter().filter(|(port, seen)| *port == WAN && seen.ends_with(bytes)).count())
}

/// Number of replies so far.
fn replies(lab: &Lab) -> u64 {
    lab.control.segment_stats(0).neighbour_replies
}

#[test]
fn known_addresses_are_answered_and_unknown_ones_flooded() {
    let (near, far) = (host(HOST, 1), host(FAR, 9));
    for (target, other) in [("10.1.0.9", "10.1.0.8"), ("fd01::9", "fd01::8")] {
        let mut lab = Lab::new(SUPPRESSED).with_peer();
        lab.settle();
        let request = near.solicitation(ip(target), None).unwrap();
        assert_eq!(from_port(&mut lab, &request), (vec![], 1), "flooded");
        let answer = reply(&far, &request);
        from_remote(&mut lab, &answer);
        assert_eq!(from_port(&mut lab, &request), (vec![answer.clone()], 0));
        // Another asker gets a reply of its own.
        let asker = host(MacAddr([2, 0, 0, 0, 1, 2]), 2);
        let question = asker.solicitation(ip(target), None).unwrap();
        assert_eq!(from_port(&mut lab, &question), (vec![reply(&far, &question)], 0));
        assert_eq!((replies(&lab), lab.control.segment_stats(0).flooded), (2, 1));
        // Unknown targets, and a question to the host alone.
        let unknown = near.solicitation(ip(other), None).unwrap();
        assert_eq!(from_port(&mut lab, &unknown), (vec![], 1));
        let alone = near.solicitation(ip(target), Some(FAR)).unwrap();
        assert_eq!(from_port(&mut lab, &alone), (vec![], 1));
        // The hosts are known to operators, and those of requests too.
        let rows = lab.rows("bindings");
        let row = rows.iter().find(|row| row[1] == target).unwrap();
        assert_eq!((&row[0], &row[2], &row[3]), (&"vni42".into(), &FAR.to_string().into(), &"learned".into()));
        assert_eq!(rows.len(), 3, "{rows:?}");
    }
}

#[test]
fn duplicate_detection_and_announcements_pass() {
    let mut lab = Lab::new(SUPPRESSED).with_peer();
    lab.settle();
    let far = host(FAR, 9);
    let near = host(HOST, 1);
    for target in ["10.1.0.9", "fd01::9"] {
        let request = near.solicitation(ip(target), None).unwrap();
        from_port(&mut lab, &request);
        from_remote(&mut lab, &reply(&far, &request));
        assert_eq!(from_port(&mut lab, &request).1, 0);
        // A host that is about to take the address.
        assert_eq!(from_port(&mut lab, &near.conflict_probe(ip(target))), (vec![], 1));
        // A host that asks for its own address is not told that it has it.
        let same = host(FAR, 7).solicitation(ip(target), None).unwrap();
        assert_eq!(from_port(&mut lab, &same), (vec![], 1));
        // A host that takes the address. Afterwards its own switch answers for it, not the gateway.
        let taken = host(HOST, 9);
        assert_eq!(from_port(&mut lab, &taken.announcement(ip(target))), (vec![], 1));
        let other = host(MacAddr([2, 0, 0, 0, 1, 3]), 3).solicitation(ip(target), None).unwrap();
        assert_eq!(from_port(&mut lab, &other), (vec![], 1), "the host is behind the same port");
        let rows = lab.rows("bindings");
        let row = rows.iter().find(|row| row[1] == target).unwrap();
        assert_eq!(row[2], HOST.to_string().as_str(), "the address has moved");
    }
    assert_eq!(lab.control.learn_stats(0).bindings_moved, 2);
}

#[test]
fn an_address_without_a_known_place_is_flooded() {
    let mut lab = Lab::new(&format!("{SUPPRESSED}\nageing = 10")).with_peer();
    lab.settle();
    let (near, far) = (host(HOST, 1), host(FAR, 9));
    let request = near.solicitation(ip("10.1.0.9"), None).unwrap();
    from_remote(&mut lab, &reply(&far, &request));
    assert_eq!(from_port(&mut lab, &request).1, 0);
    for _ in 0..9 {
        lab.stepped.advance(SECOND);
        assert_eq!(from_port(&mut lab, &request).1, 0);
    }
    // Requests for a host do not keep it alive.
    lab.stepped.advance(SECOND);
    lab.settle();
    assert_eq!(from_port(&mut lab, &request).1, 1);
    let rows = lab.rows("bindings");
    assert!(rows.iter().all(|row| row[1] == "10.1.0.1"), "{rows:?}");
}

#[test]
fn local_hosts_are_answered_for_across_ports() {
    let mut lab = Lab::with_attachments("", TWO, SUPPRESSED).with_peer();
    lab.settle();
    let (first, second) = (host(HOST, 1), host(MacAddr([2, 0, 0, 0, 5, 5]), 5));
    lab.send(LAN, &tagged(&second.announcement(ip("10.1.0.5")), 5));
    lab.settle();
    let request = first.solicitation(ip("10.1.0.5"), None).unwrap();
    assert_eq!(from_port(&mut lab, &request), (vec![reply(&second, &request)], 0));
    // The other way round, the reply has the tag.
    let request = second.solicitation(ip("10.1.0.1"), None).unwrap();
    lab.send(LAN, &tagged(&request, 5));
    assert_eq!(lab.settle(), [(LAN, tagged(&reply(&first, &request), 5))]);
}

/// The control thread has removed a binding, and the workers know that at once: the next message teaches it anew.
#[test]
fn a_message_right_after_ageing_teaches_the_binding() {
    let mut lab = Lab::new(&format!("{SUPPRESSED}\nageing = 10")).with_peer();
    lab.settle();
    let near = host(HOST, 1);
    lab.send(LAN, &near.announcement(ip("10.1.0.1")));
    lab.settle();
    lab.stepped.advance(10 * SECOND);
    let Lab { stepped, control, .. } = &mut lab;
    stepped.control(control);
    assert_eq!(lab.rows("bindings").len(), 0, "it has aged");
    lab.send(LAN, &near.announcement(ip("10.1.0.1")));
    lab.settle();
    assert_eq!(lab.rows("bindings").len(), 1);
}

#[test]
fn static_bindings_need_no_message() {
    let fixed = "neighbours = [{ address = '10.1.0.9', mac = '02:00:00:00:02:01' }, \
                 { address = 'fd01::9', mac = '02:00:00:00:02:01', router = true }]";
    let mut lab = Lab::new(&format!("{SUPPRESSED}\n{fixed}")).with_peer();
    lab.settle();
    let (near, far) = (host(HOST, 1), host(FAR, 9));
    let request = near.solicitation(ip("10.1.0.9"), None).unwrap();
    assert_eq!(from_port(&mut lab, &request), (vec![reply(&far, &request)], 0));
    let request = near.solicitation(ip("fd01::9"), None).unwrap();
    let (answer, tunnelled) = from_port(&mut lab, &request);
    assert_eq!((answer.len(), tunnelled, answer[0][58] >> 5), (1, 0, 7), "router, solicited and override");
    // Another host does not take the address.
    from_port(&mut lab, &host(HOST, 9).announcement(ip("10.1.0.9")));
    let rows = lab.rows("bindings");
    assert_eq!(rows.iter().filter(|row| row[3] == "static" && row[2] == FAR.to_string().as_str()).count(), 2);
}

#[test]
fn without_the_key_nothing_is_learned() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
    lab.settle();
    let request = host(HOST, 1).solicitation(ip("10.1.0.9"), None).unwrap();
    from_remote(&mut lab, &reply(&host(FAR, 9), &request));
    assert_eq!((from_port(&mut lab, &request).1, replies(&lab), lab.rows("bindings").len()), (1, 0, 0));
}

#[test]
fn malformed_messages_are_flooded() {
    let mut lab = Lab::new(SUPPRESSED).with_peer();
    lab.settle();
    let (near, far) = (host(HOST, 1), host(FAR, 9));
    let requests = ["10.1.0.9", "fd01::9"].map(|target| near.solicitation(ip(target), None).unwrap());
    for request in &requests {
        from_remote(&mut lab, &reply(&far, request));
    }
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..20_000 {
        let mut bytes = requests[random.usize(0..2)].clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(12..bytes.len());
            bytes[at] = random.u8(..);
        }
        bytes.truncate(random.usize(15..=bytes.len()));
        lab.send(LAN, &bytes);
        lab.stepped.advance(SECOND / 1000);
        if random.u8(0..8) == 0 {
            lab.settle();
        }
    }
    lab.settle();
    let pool = lab.pool.clone();
    drop(lab);
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn bindings_of_other_sources_hold_until_they_are_removed() {
    let mut lab = Lab::new(&format!("{SUPPRESSED}\nname = 'blue'")).with_peer();
    lab.settle();
    let (near, far) = (host(HOST, 1), host(FAR, 9));
    lab.control.set_binding("blue", ip("10.1.0.9"), FAR, false).unwrap();
    assert!(lab.control.set_binding("bleu", ip("10.1.0.9"), FAR, false).unwrap_err().contains("blue"));
    lab.settle();
    // The host has a place as soon as one of its frames has come.
    let request = near.solicitation(ip("10.1.0.9"), None).unwrap();
    assert_eq!(from_port(&mut lab, &request).1, 1);
    from_remote(&mut lab, &far.announcement(ip("10.1.0.7")));
    assert_eq!(from_port(&mut lab, &request), (vec![reply(&far, &request)], 0));
    from_remote(&mut lab, &host(MacAddr([2, 0, 0, 0, 2, 2]), 9).announcement(ip("10.1.0.9")));
    assert_eq!(from_port(&mut lab, &request).0, [reply(&far, &request)], "messages do not override it");
    lab.control.remove_binding("blue", ip("10.1.0.9")).unwrap();
    lab.settle();
    assert_eq!(from_port(&mut lab, &request).1, 1);
}

#[test]
fn local_hosts_claim_for_themselves_only() {
    let keys = "control = 'kernel'\nneighbour_suppression = true\naddresses = ['10.1.0.254/24']";
    let mut lab = Lab::new(keys).with_peer();
    lab.settle();
    let mut changes = ExternalChanges::default();
    changes.flood.insert((42, ip("10.9.0.2")), true);
    let Lab { stepped, control, .. } = &mut lab;
    stepped.with_plane(|plane| control.apply_external(changes, plane.ports(), plane.seconds()));
    lab.settle();
    let claimed = |lab: &mut Lab| -> Vec<(IpAddr, Option<MacAddr>)> {
        lab.settle();
        let changed = lab.control.take_local_bindings(100).into_iter();
        changed.map(|it| (it.ip, it.host.map(|(mac, _)| mac))).collect()
    };
    // The frame teaches the place of the host, so the first claim may come too early.
    let near = host(HOST, 1);
    for target in ["10.1.0.1", "fd01::1"] {
        from_port(&mut lab, &near.announcement(ip(target)));
        assert_eq!(claimed(&mut lab), [(ip(target), Some(HOST))]);
    }
    // The address of somebody else: of another host at the port, of the router, of a VTEP, and of the gateway.
    let other = host(FAR, 9).announcement(ip("10.1.0.9"));
    from_port(&mut lab, &[&other[..6], &HOST.0, &other[12..]].concat());
    let asker = MacAddr([2, 0, 0, 0, 1, 9]);
    for target in ["10.1.0.254/24", "10.9.0.2/24", "10.9.0.1/24"] {
        let forged = Addresses { mac: HOST, addresses: vec![target.parse().unwrap()], gateways: vec![] };
        let address = ip(target.split('/').next().unwrap());
        let victim = Addresses { mac: asker, addresses: vec!["10.1.0.8/24".parse().unwrap()], gateways: vec![] };
        let request = victim.solicitation(address, None).unwrap();
        from_port(&mut lab, &reply(&forged, &request));
    }
    // A host behind a VTEP, of which the other control plane knows.
    from_remote(&mut lab, &host(FAR, 7).announcement(ip("10.1.0.7")));
    assert_eq!(claimed(&mut lab), []);
    assert_eq!(lab.rows("bindings").len(), 2, "{:?}", lab.rows("bindings"));
    assert_eq!(lab.control.learn_stats(0).bindings_refused, 3);
}

/// Workers know an address of another control plane before the next tick, which may be some time away.
#[test]
fn addresses_of_the_kernel_are_answered_at_once() {
    let mut lab = Lab::new("control = 'kernel'\nneighbour_suppression = true").with_peer();
    lab.settle();
    let apply = |lab: &mut Lab, changes: ExternalChanges| {
        let Lab { stepped, control, .. } = lab;
        stepped.with_plane(|plane| control.apply_external(changes, plane.ports(), plane.seconds()));
    };
    let mut changes = ExternalChanges::default();
    changes.flood.insert((42, ip("10.9.0.2")), true);
    changes.macs.insert((42, FAR), Some(ExternalPlace::Vtep(ip("10.9.0.2"))));
    apply(&mut lab, changes);
    lab.settle();
    let request = host(HOST, 1).solicitation(ip("10.1.0.9"), None).unwrap();
    assert_eq!(from_port(&mut lab, &request).1, 1);
    for (binding, answers) in [(Some((FAR, false)), 1), (None, 0)] {
        let mut changes = ExternalChanges::default();
        changes.bindings.insert((42, ip("10.1.0.9")), binding);
        apply(&mut lab, changes);
        let (answered, flooded) = from_port(&mut lab, &request);
        assert_eq!((answered.len(), flooded), (answers, 1 - answers));
    }
}
