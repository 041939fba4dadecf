//! Every frame that an interface gets is received by the port, dropped for a counted reason, or passed to the kernel.

use std::net::UdpSocket;
use std::time::Duration;

use wirepath_packet::Batch;
use wirepath_packet::drops::DropReason;
use wirepath_pmd::port::{PortEvent, StartedPort};
use wirepath_testlab::{Lab, Requirement, eventually, require};

use crate::common;
use crate::topology::Pair;

const TIMEOUT: Duration = Duration::from_secs(20);
/// Frames that come while nobody polls: more than any ring of these tests holds.
const BURST: u64 = 12_000;
/// Frames that are longer than the MTU of the interface.
const LONG: u64 = 30;
/// Frames that the port passes to the kernel, if it can.
const ARP: u64 = 7;

/// Returns a frame of `len` bytes with an EtherType.
fn frame(kind: [u8; 2], len: usize) -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &kind, &vec![7; len - 14]].concat()
}

/// Receives all packets.
fn receive(it: &mut StartedPort) {
    let mut batch = Batch::new();
    while it.rx[0].receive(&mut batch) > 0 {
        batch.clear();
    }
}

/// Receives all packets, and returns the frames that are accounted for: received, dropped, passed to the kernel.
fn accounted(it: &mut StartedPort) -> (u64, Vec<(DropReason, u64)>) {
    receive(it);
    let rx = it.port.rx_statistics().remove(0);
    let mut drops = rx.drops.clone();
    drops.extend(it.port.device_drops());
    let extra = it.port.extra_statistics();
    let kernel = extra.iter().find(|(name, _)| *name == "xdp_passed_to_kernel").map_or(0, |(_, n)| *n);
    (rx.packets + kernel + drops.iter().map(|(_, n)| n).sum::<u64>(), drops)
}

/// Asserts that exactly `sent` frames are accounted for, and that the given reasons occurred.
#[track_caller]
fn assert_balance(name: &str, it: &mut StartedPort, sent: u64, reasons: &[DropReason]) {
    eventually(TIMEOUT, || accounted(it).0 >= sent);
    // Frames that are counted twice come late.
    std::thread::sleep(Duration::from_millis(50));
    let (sum, drops) = accounted(it);
    let (rx, extra) = (it.port.rx_statistics(), it.port.extra_statistics());
    assert_eq!(sum, sent, "{name}: {drops:?} {rx:?} {extra:?}");
    for reason in reasons {
        assert!(drops.iter().any(|(other, n)| other == reason && *n > 0), "{name}: {reason:?} of {drops:?}");
    }
}

#[test]
fn frames_of_an_interface_are_all_counted() {
    require!(all Requirement::LAB);
    let full = DropReason::RxFull;
    for (driver, keys) in [
        ("af_packet", ""),
        ("af_packet", "superframes = 'cut'"),
        ("af_xdp", "kernel = ['arp']"),
        ("af_xdp", "kernel = ['arp']\nmode = 'generic'"),
        ("af_xdp", "kernel = ['arp']\npool_as_umem = false"),
    ] {
        let name = &format!("{driver} {keys}");
        let pair = Pair::new("balance", 1500, 1);
        pair.peer.ip("addr add 192.0.2.1/24 dev eth0");
        pair.peer.ip("neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev eth0 nud permanent");
        let socket = pair.peer.inside(|| UdpSocket::bind("192.0.2.1:0").unwrap());
        let wire = pair.peer.frames("eth0");
        pair.dut.inside(|| {
            let table = format!("driver = '{driver}'\ndevice = 'eth0'\ndepth = 64\n[port.{driver}]\n{keys}\n");
            let mut it = common::start(&table, &pair.pool).unwrap();
            let mut sent = 0;
            for _ in 0..ARP {
                wire.send(&frame([8, 6], 60)).unwrap();
            }
            sent += ARP;
            assert_balance(name, &mut it, sent, &[]);
            for _ in 0..BURST {
                wire.send(&frame([0x88, 0xb5], 1400)).unwrap();
            }
            sent += BURST;
            assert_balance(name, &mut it, sent, &[full]);
            pair.dut.ip("link set eth0 mtu 1000");
            for _ in 0..LONG {
                // A packet socket would report that the interface refuses the frame, and `send` would try again.
                socket.send_to(&[7; 1472], "192.0.2.9:9").unwrap();
            }
            sent += LONG;
            assert_balance(name, &mut it, sent, &[full, DropReason::InterfaceDrop]);
            assert!(eventually(TIMEOUT, || it.port.events().contains(&PortEvent::Mtu(1000))), "{name}");
            // The port refuses to send such frames, and says so.
            let long = common::packet(&pair.pool, &frame([0x88, 0xb5], 1514));
            let mut batch: Batch = [long].into_iter().collect();
            it.tx[0].transmit(&mut batch);
            let tx = it.port.tx_statistics().remove(0);
            assert_eq!((tx.packets, tx.drops), (0, vec![(DropReason::TooLong, 1)]), "{name}");
            pair.dut.ip("link set eth0 mtu 1500");
            for _ in 0..1000 {
                wire.send(&frame([0x88, 0xb5], 1514)).unwrap();
                receive(&mut it);
            }
            sent += 1000;
            assert_balance(name, &mut it, sent, &[]);
            it.port.stop(it.rx, it.tx).unwrap();
        });
        assert_eq!(pair.pool.outstanding(), 0, "{name}");
    }
}

#[test]
fn long_frames_without_room_in_the_socket_are_counted() {
    require!(all Requirement::LAB);
    let pair = Pair::new("balancelong", 9202, 1);
    let wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        let table = "driver = 'af_packet'\ndevice = 'eth0'\nmtu = 9202\ndepth = 64\n";
        let mut it = common::start(table, &pair.pool).unwrap();
        let mut sent = 0;
        for round in 0..2 {
            // The ring has room for the short ones, and the socket for some of the long ones.
            for number in 0..7500 {
                let len = if number % 7 == 0 { 60 } else { 9000 };
                wire.send(&frame([0x88, 0xb5], len)).unwrap();
            }
            sent += 7500;
            assert_balance("long frames", &mut it, sent, &[DropReason::RxFull]);
            let received = it.port.rx_statistics().remove(0).packets;
            assert!(received > (round + 1) * 2000, "{received} of {sent}: all short ones and some long ones");
            // Frames that the kernel has dropped are not waited for.
            for _ in 0..10_000 {
                receive(&mut it);
            }
            let last = it.port.rx_statistics().remove(0).packets;
            wire.send(&frame([0x88, 0xb5], 3014)).unwrap();
            sent += 1;
            assert!(eventually(TIMEOUT, || {
                receive(&mut it);
                it.port.rx_statistics().remove(0).packets == last + 1
            }));
        }
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn an_empty_pool_is_told_from_a_full_ring() {
    require!(all Requirement::LAB);
    let pair = Pair::new("balancepool", 1500, 1);
    let wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        let table = "driver = 'af_xdp'\ndevice = 'eth0'\ndepth = 64\n[port.af_xdp]\nkernel = ['arp']\n";
        let mut it = common::start(table, &pair.pool).unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| pair.pool.take()).collect();
        let mut kept = Vec::new();
        for _ in 0..BURST {
            wire.send(&[[2; 6], [4; 6], [0x88; 6]].concat()).unwrap();
            let mut batch = Batch::new();
            if it.rx[0].receive(&mut batch) > 0 {
                kept.push(batch);
            }
        }
        assert_balance("empty pool", &mut it, BURST, &[DropReason::NoBuffer]);
        assert!(it.port.device_drops().iter().all(|(reason, n)| *reason != DropReason::RxFull || *n == 0));
        drop((taken, kept));
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn frames_of_a_lost_interface_stay_counted() {
    require!(all Requirement::LAB);
    for driver in ["af_packet", "af_xdp"] {
        let pair = Pair::new("balancelost", 1500, 1);
        let wire = pair.peer.frames("eth0");
        pair.dut.inside(|| {
            let table = format!("driver = '{driver}'\ndevice = 'eth0'\ndepth = 64\n");
            let mut it = common::start(&table, &pair.pool).unwrap();
            for _ in 0..BURST {
                wire.send(&[[2; 6], [4; 6], [0x88; 6]].concat()).unwrap();
            }
            assert_balance(driver, &mut it, BURST, &[]);
            pair.dut.ip("link del eth0");
            wirepath_testlab::Veth::new((&pair.dut, "eth0"), (&pair.peer, "eth0")).plug();
            let returned = eventually(TIMEOUT, || {
                accounted(&mut it);
                it.tx[0].reclaim();
                it.port.events().contains(&PortEvent::Returned)
            });
            assert!(returned, "{driver}");
            assert_balance(driver, &mut it, BURST, &[]);
            it.port.stop(it.rx, it.tx).unwrap();
        });
    }
}

#[test]
fn frames_of_a_tap_are_all_counted() {
    require!(all Requirement::LAB);
    let lab = Lab::new("balancetap");
    let host = lab.namespace("host");
    let pool = common::pool();
    host.inside(|| {
        let table = "driver = 'tap'\ndevice = 'tap0'\ndepth = 64\n[port.tap]\naddress = '192.0.2.1/24'\n";
        let mut it = common::start(table, &pool).unwrap();
        host.ip("neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev tap0 nud permanent");
        let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
        for _ in 0..BURST {
            socket.send_to(&[7; 1000], "192.0.2.2:9").unwrap();
        }
        assert_balance("tap", &mut it, BURST, &[DropReason::RxFull]);
        it.port.stop(it.rx, it.tx).unwrap();
    });
}
