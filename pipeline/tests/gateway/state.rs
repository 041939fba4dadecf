//! Facts that one gateway has learned and another one restores.

use wirepath_pipeline::tunnel::underlay::{Addresses, UnderlayHost};
use wirepath_pipeline::tunnel::{Fact, Place, Restored, StatePass};
use wirepath_wire::MacAddr;

use crate::lab::{FAR, HOST, LAN, Lab, PEER, WAN, frame, vxlan};

const SEGMENT: &str = "name = 'blue'\nremotes = ['10.9.0.2']\naccept_unknown_remotes = true\nageing = 100\n\
                       neighbour_suppression = true";
/// A remote that the configuration does not have.
const UNKNOWN: &str = "10.9.0.7";

fn lab(more: &str) -> Lab {
    let mut lab = Lab::of_segments(
        "",
        &format!(
            "{more}\n[[segment]]\nvni = 42\nports = [{{ port = 'lan' }}, {{ port = 'lan', vlan = 7 }}]\n{SEGMENT}"
        ),
    );
    let addresses = ["10.9.0.2/24", "10.9.0.7/24"].map(|it| it.parse().unwrap()).to_vec();
    lab.peer = Some(UnderlayHost::new(Addresses { mac: PEER, addresses, gateways: vec![] }));
    lab.settle();
    lab
}

fn collect(lab: &mut Lab) -> Vec<Fact> {
    let Lab { stepped, control, .. } = lab;
    stepped.with_plane(|plane| {
        let mut pass = StatePass::default();
        while !control.collect_state(&mut pass, plane.ports(), plane.seconds()) {}
        pass.into_facts()
    })
}

fn restore(lab: &mut Lab, facts: &[Fact], elapsed: u32) -> Restored {
    let Lab { stepped, control, .. } = lab;
    stepped.with_plane(|plane| control.restore(facts, plane.ports(), elapsed, plane.seconds()))
}

fn mac(n: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 9, n])
}

fn behind(n: u8, segment: &str, place: Place, age: u32) -> Fact {
    Fact::Address { segment: segment.to_owned(), mac: mac(n), place, age }
}

fn remote(address: &str) -> Place {
    Place::Remote(address.parse().unwrap())
}

fn port(name: &str, vlan: Option<u16>) -> Place {
    Place::Port(name.to_owned(), vlan)
}

/// The second gateway forwards to all places of the first one, and floods nothing.
#[test]
fn another_gateway_goes_on() {
    let mut first = lab("");
    let from = Addresses { mac: PEER, addresses: vec![format!("{UNKNOWN}/24").parse().unwrap()], gateways: vec![] };
    first.send(LAN, &frame(FAR, HOST));
    first.send(WAN, &vxlan(&from, &frame(HOST, FAR)));
    first.settle();
    first.send(LAN, &frame(FAR, HOST));
    first.settle();
    let facts = collect(&mut first);
    let names: Vec<String> = facts.iter().map(|fact| fact.to_json()[0].as_str().unwrap().to_owned()).collect();
    assert_eq!(names, ["remote", "address", "address"], "{facts:?}");

    let mut second = lab("");
    let restored = restore(&mut second, &facts, 3);
    assert_eq!(restored, Restored { addresses: 2, remotes: 1, ..Restored::default() });
    second.settle();
    let inner = frame(FAR, HOST);
    second.send(LAN, &inner);
    let sent = second.settle();
    let to: Vec<_> = sent.iter().filter(|(_, bytes)| bytes.ends_with(&inner)).map(|(to, bytes)| (*to, bytes)).collect();
    assert!(matches!(to[..], [(WAN, bytes)] if bytes[30..34] == [10, 9, 0, 7]), "{to:?}");
    assert_eq!(second.control.segment_stats(0).unknown_unicast, 0);
    assert_eq!(collect(&mut second), facts, "it has the same facts");
    assert_eq!(restore(&mut second, &facts, 3).left_out, 3, "all are known already");
}

#[test]
fn old_and_foreign_facts_are_left_out() {
    let facts = [
        behind(1, "blue", port("lan", None), 96),
        behind(2, "blue", port("lan", Some(7)), 0),
        behind(3, "blue", remote("10.9.0.2"), 0),
        behind(4, "blue", port("lan", None), 97),
        behind(5, "red", port("lan", None), 0),
        behind(6, "blue", port("lan", Some(8)), 0),
        behind(7, "blue", port("other", None), 0),
        behind(8, "blue", remote("10.9.0.3"), 0),
        Fact::Address { segment: "blue".to_owned(), mac: MacAddr::BROADCAST, place: port("lan", None), age: 0 },
        Fact::Remote { segment: "blue".to_owned(), address: "224.0.0.1".parse().unwrap(), contacted: true },
        Fact::Remote { segment: "red".to_owned(), address: UNKNOWN.parse().unwrap(), contacted: true },
    ];
    let mut lab = lab("");
    let restored = restore(&mut lab, &facts, 3);
    assert_eq!(restored, Restored { addresses: 3, left_out: 8, ..Restored::default() });
    lab.settle();
    let places: Vec<(String, String)> =
        lab.rows("fdb").iter().map(|row| (row[1].to_string(), row[2].to_string())).collect();
    for (n, to) in [(1, "lan"), (2, "lan.7"), (3, "10.9.0.2")] {
        let expected = (format!("\"{}\"", mac(n)), format!("\"{to}\""));
        assert!(places.contains(&expected), "{expected:?} in {places:?}");
    }
}

/// A remote with BFD may never be reached, so nothing is sent there for what a former gateway knew.
#[test]
fn addresses_behind_remotes_with_bfd_are_left_out() {
    let mut lab = lab("[bfd]\n");
    let facts = [behind(1, "blue", remote("10.9.0.2"), 0), behind(2, "blue", port("lan", None), 0)];
    let restored = restore(&mut lab, &facts, 0);
    assert_eq!(restored, Restored { addresses: 1, left_out: 1, ..Restored::default() });
}

#[test]
fn bindings_and_path_mtus_are_restored() {
    let ip = |text: &str| text.parse().unwrap();
    let binding = |host: &str, age| Fact::Binding {
        segment: "blue".to_owned(),
        ip: ip(host),
        mac: mac(1),
        is_router: Some(false),
        age,
    };
    let path = |remote: &str, left| Fact::PathMtu { local: ip("10.9.0.1"), remote: ip(remote), mtu: 1400, left };
    let facts = [
        binding("10.1.0.1", 5),
        binding("10.1.0.2", 100),
        path("10.9.0.2", 60),
        path("10.9.0.2", 3),
        path("10.9.0.9", 60),
    ];
    let mut lab = lab("");
    let restored = restore(&mut lab, &facts, 3);
    assert_eq!(restored, Restored { bindings: 1, path_mtus: 1, left_out: 3, ..Restored::default() });
    lab.settle();
    let bindings = lab.rows("bindings");
    assert_eq!((bindings.len(), bindings[0][1].as_str()), (1, Some("10.1.0.1")));
    let remotes = lab.rows("remotes");
    let mtu = remotes.iter().find(|row| row[1] == "10.9.0.2").and_then(|row| row[8].as_u64());
    assert_eq!(mtu, Some(1400), "{remotes:?}");
}
