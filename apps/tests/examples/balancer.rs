//! The example `balancer`.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use wirepath::prelude::*;

use crate::lab::{A, B, Lab, SERVER, checked, read, tcp, udp};

#[path = "../../examples/balancer.rs"]
#[expect(dead_code, reason = "the tests drive the stage, not `main`")]
mod example;

use example::{Balancer, Service};

const VIRTUAL: ([u8; 4], u16) = ([192, 0, 2, 1], 80);
const FLOWS: u16 = 1000;

fn service(backends: &[u8]) -> Service {
    let mut text = "[balancer]\naddress = '192.0.2.1'\nport = 80\n".to_owned();
    for host in backends {
        text += &format!("[[balancer.backend]]\naddress = '10.0.0.{host}'\nmac = '02:00:00:00:01:0{host}'\n");
    }
    read(&text).unwrap()
}

fn lab(service: Service) -> (Lab<Balancer>, Arc<Shared<Service>>) {
    let domain = Domain::new();
    let service = Arc::new(Shared::new(&domain, service));
    (Lab::new(&domain, Balancer(Arc::clone(&service))), service)
}

/// Sends a packet of each flow. Returns the last byte of its backend's address.
fn backends(lab: &mut Lab<Balancer>) -> Vec<u8> {
    let flow = |port| {
        let client = ([198, 51, 100, 7], 1024 + port);
        let sent = lab.pass(A, &[udp(client, VIRTUAL, 1), tcp(client, VIRTUAL, "S", 1, 0)]);
        let host = |(port, frame): &(PortId, Vec<u8>)| {
            let (src, dst) = checked(frame);
            assert_eq!((*port, src, dst.1), (B, (client.0.into(), client.1), 80));
            let [10, 0, 0, host] = dst.0.octets() else { panic!("{dst:?}") };
            assert_eq!(frame[..6], [2, 0, 0, 0, 1, host]);
            host
        };
        assert_eq!(sent.len(), 2);
        assert_eq!(*sent[0].1.last().unwrap(), 1, "the payload");
        (host(&sent[0]), host(&sent[1]))
    };
    (0..FLOWS).map(flow).map(|(udp, _)| udp).collect()
}

#[test]
fn a_change_moves_only_the_flows_of_its_backend() {
    let (mut lab, shared) = lab(service(&[1, 2, 3]));
    let three = backends(&mut lab);
    let mut shares = BTreeMap::<u8, usize>::new();
    three.iter().for_each(|host| *shares.entry(*host).or_default() += 1);
    assert_eq!(shares.len(), 3);
    assert!(shares.values().all(|share| (250..420).contains(share)), "{shares:?}");

    // The order in the file has no effect.
    shared.replace(service(&[4, 3, 2, 1]));
    let four = backends(&mut lab);
    let moved = three.iter().zip(&four).filter(|(before, after)| before != after);
    assert!(moved.clone().all(|(_, after)| *after == 4));
    assert!((170..330).contains(&moved.count()));

    shared.replace(service(&[1, 3, 4]));
    let without = backends(&mut lab);
    assert!(four.iter().zip(&without).all(|(before, after)| if *before == 2 { *after != 2 } else { before == after }));
    assert!(four.contains(&2));
    assert_eq!(lab.drops(""), 0);
}

#[test]
fn replies_come_from_the_virtual_address() {
    let (mut lab, _) = lab(service(&[1, 2]));
    let client = ([198, 51, 100, 7], 1024);
    let sent = lab.pass(B, &[udp(([10, 0, 0, 2], 80), client, 5), tcp(([10, 0, 0, 1], 80), client, "SA", 1, 2)]);
    assert_eq!(sent.len(), 2);
    for (port, frame) in sent {
        assert_eq!((port, checked(&frame).0), (A, (Ipv4Addr::from(VIRTUAL.0), 80)));
        assert_eq!(frame[..6], SERVER);
    }
    // Other addresses and ports pass unchanged, in both directions.
    let others = [udp(([10, 0, 0, 2], 81), client, 5), udp(([10, 0, 0, 3], 80), client, 6)];
    assert_eq!(lab.pass(B, &others), others.map(|frame| (A, frame)));
    let others = [udp(client, (VIRTUAL.0, 81), 7), udp(client, ([192, 0, 2, 2], 80), 8)];
    assert_eq!(lab.pass(A, &others), others.map(|frame| (B, frame)));
}

#[test]
fn all_mistakes_of_the_table_are_reported() {
    let error = |text| read::<Service>(text).unwrap_err();
    let two = error("[balancer]\naddress = 'x'\nport = 80\n[[balancer.backend]]\naddress = '10.0.0.1'\nmac = 'y'\n");
    assert!(two.contains("balancer.address: found 'x'") && two.contains("mac: found 'y'"), "{two}");
    let none = error("[balancer]\naddress = '192.0.2.1'\nport = 80\n");
    assert!(none.contains("at least one table [[balancer.backend]]"), "{none}");
}
