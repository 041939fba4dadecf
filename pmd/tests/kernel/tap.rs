//! `tap` on a real kernel: TCP with segmentation offload, addresses, and existing interfaces.

use std::sync::Arc;
use std::time::Duration;

use wirepath_packet::Batch;
use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;
use wirepath_testlab::{FramePort, Lab, Requirement, VlanTagger, eventually, require};

use crate::common;
use crate::forwarder::{self, Forwarder};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Two TAP interfaces of one program. Both are created in the namespace of the program, so the second one is
/// moved to another host. Superframes are cut as they are received.
fn tables(mtu: u32) -> [String; 2] {
    let cut = "[port.tap]\nsuperframes = \"cut\"\n";
    ["left", "right"].map(|name| format!("driver = \"tap\"\ndevice = \"{name}\"\nmtu = {mtu}\n{cut}"))
}

#[test]
fn tcp_of_the_kernel_arrives_whole() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 6));
    for mtu in [1500, 9202] {
        let lab = Lab::new("taptcp");
        let (dut, other) = (Arc::new(lab.namespace("dut")), lab.namespace("other"));
        let forwarder = Forwarder::start(&dut, tables(mtu));
        dut.ip(&format!("link set right netns {}", other.name()));
        for (host, name, number) in [(&*dut, "left", 1), (&other, "right", 2)] {
            host.ip(&format!("link set {name} up mtu {mtu}"));
            host.ipv6(name);
            host.ip(&format!("addr add 192.0.2.{number}/24 dev {name}"));
            host.ip(&format!("addr add 2001:db8::{number}/64 dev {name} nodad"));
        }
        forwarder::tcp(&dut, &other, "192.0.2.2".parse().unwrap(), 4 << 20);
        forwarder::tcp(&dut, &other, "2001:db8::2".parse().unwrap(), 4 << 20);
        // VLAN tags in superframes.
        let _taggers = [VlanTagger::new(&dut, "left", 5), VlanTagger::new(&other, "right", 5)];
        forwarder::tcp(&dut, &other, "192.0.2.2".parse().unwrap(), 1 << 20);
        let done = forwarder.finish();
        assert!(done.rx[0].segmented > 0 && done.rx[0].completed_checksums > 0, "MTU {mtu}: {done:?}");
        assert!(done.rx.iter().all(|queue| queue.dropped() == 0), "MTU {mtu}: {done:?}");
        // The interface was down while it was moved to the other host.
        let harmless = |queue: &QueueStats| queue.drops.iter().all(|(reason, _)| *reason == DropReason::LinkDown);
        assert!(done.tx.iter().all(harmless), "MTU {mtu}: {done:?}");
        assert!(done.tx[1].packets > 2 * done.rx[0].segmented, "MTU {mtu}: {done:?}");
    }
}

#[test]
fn the_interface_is_as_configured_and_goes_with_the_port() {
    require!(all Requirement::LAB);
    let lab = Lab::new("tapconf");
    let host = lab.namespace("host");
    let pool = common::pool();
    host.inside(|| {
        let table = "driver = \"tap\"\ndevice = \"tap0\"\n[port.tap]\naddress = \"2001:db8::1/64\"\n";
        let error = common::start(table, &pool).unwrap_err().to_string();
        assert!(error.ends_with("; `sysctl -w net.ipv6.conf.tap0.disable_ipv6=0`"), "{error}");
    });
    host.sysctl("net.ipv6.conf.default.disable_ipv6", "0");
    host.inside(|| {
        let table = "driver = \"tap\"\ndevice = \"wp%d\"\nqueues = 2\nmtu = 4000\n[port.tap]\n\
                     address = [\"192.0.2.1/24\", \"2001:db8::1/64\"]\nmac = \"02:00:00:00:00:77\"\n";
        let it = common::start(table, &pool).unwrap();
        assert!(it.port.capabilities().mode.contains("wp0"), "{:?}", it.port.capabilities());
        assert_ne!(it.port.capabilities().mac.unwrap().0, [2, 0, 0, 0, 0, 0x77], "the port is another station");
        let shown = host.ip("addr show wp0");
        for part in ["mtu 4000", "link/ether 02:00:00:00:00:77", "inet 192.0.2.1/24", "inet6 2001:db8::1/64", "UP"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let stopped = it.port.stop(it.rx, it.tx).unwrap();
        assert!(host.ip("link show").contains("wp0"), "a stopped port keeps its interface");
        let it = stopped.start().unwrap();
        drop((it.port, it.rx, it.tx));
        assert!(!host.ip("link show").contains("wp0"), "goes with the port");
    });
}

#[test]
fn an_interface_for_one_queue_is_taken_as_it_is() {
    require!(all Requirement::LAB);
    let lab = Lab::new("tapone");
    let host = lab.namespace("host");
    host.ip("tuntap add dev solo mode tap");
    let pool = common::pool();
    host.inside(|| {
        let it = common::start("driver = \"tap\"\ndevice = \"solo\"\n", &pool).unwrap();
        assert_eq!(it.port.capabilities().max_rx_queues, 1);
        let wire = FramePort::open("solo").unwrap();
        let stopped = it.port.stop(it.rx, it.tx).unwrap();
        let mut it = stopped.start().unwrap();
        wire.send(&[7; 60]).unwrap();
        let mut batch = Batch::new();
        eventually(TIMEOUT, || {
            it.rx[0].receive(&mut batch);
            batch.iter().any(|packet| packet.data() == [7; 60])
        });
        assert!(batch.iter().any(|packet| packet.data() == [7; 60]));
        let refused = common::start("driver = \"tap\"\ndevice = \"solo\"\n", &pool).unwrap_err().to_string();
        assert_eq!(refused, "tap: solo: another program uses the interface; stop it, or choose another name");
        host.ip("link add veth0 type veth peer name veth1");
        let refused = common::start("driver = \"tap\"\ndevice = \"veth0\"\n", &pool).unwrap_err().to_string();
        assert_eq!(
            refused,
            "tap: veth0: an interface of this name exists, but it is not a TAP interface; `ip link del veth0`, or \
             choose another name"
        );
    });
}
