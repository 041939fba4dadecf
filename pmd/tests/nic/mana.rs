//! Tests of the `mana` driver on emulated NICs, beyond the contract of all drivers: offloads, corrupted
//! completions, device resets and ports that the kernel uses. Each test starts itself again in a process with
//! the NICs.

use crate::common::bytes;
use crate::emulated::{
    EmulatedNic, checksum_cases, finish, has_valid_checksums, large_tcp, nic_tests, oversized_tcp, packet, receive,
    send, send_until_received, statistic, under, wakeups,
};
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Pool, PtypeL3, PtypeL4};
use wirepath_pmd::drivers::nic::mana::Options;
use wirepath_pmd::port::{OpenPort, StartedPort};
use wirepath_testlab::{Requirement, require};

const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mana.driver");
const MANA: EmulatedNic = EmulatedNic { driver: "mana", device: "mana0", modes: &[""] };

nic_tests!(
    "mana",
    MANA,
    RDMA,
    &[
        ("rx", "owner"),
        ("rx", "queue"),
        ("rx", "kind"),
        ("rx", "length"),
        ("rx", "empty"),
        ("rx", "type"),
        ("rx", "position"),
        ("rx", "twice"),
        ("rx", "nothing"),
        ("tx", "owner"),
        ("tx", "queue"),
        ("tx", "kind"),
        ("tx", "type"),
        ("tx", "position"),
        ("tx", "twice"),
        ("tx", "nothing"),
    ]
);

#[test]
fn checksums_and_tags_are_the_devices_work() {
    require!(RDMA);
    MANA.under("mana::checksums_and_tags_are_the_devices_work", "", |nics| {
        let pool = Pool::new("offloads", 8192).expect("memory");
        let mut port = MANA.start(&pool, "", |_| ());
        checksum_cases(&mut port, &pool, |case, got| {
            assert_eq!((got.len(), got.in_port()), (case.len, Some(PortId::new(3))));
            assert!(has_valid_checksums(&bytes(got)), "{:?} {:?} {}", case.l3, case.l4, case.len);
            // The completion does not contain the priority.
            assert_eq!(got.vlan(), case.tag.map(|tag| tag & 0xfff));
            let l3_status = if case.l3 == PtypeL3::Ipv4 { ChecksumStatus::L3_GOOD } else { ChecksumStatus::NONE };
            assert_eq!(got.checksum_status(), l3_status.with(ChecksumStatus::L4_GOOD));
            assert!(got.rss_hash().is_some());
        });
        // A wrong checksum is not corrected, but reported.
        let mut wrong = packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 50);
        wrong.set_flags(Flags::NONE);
        send(&mut port, [wrong]);
        assert_eq!(receive(&mut port, 1)[0].checksum_status(), ChecksumStatus::L3_BAD.with(ChecksumStatus::L4_BAD));
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn sleeping_workers_are_woken_by_packets() {
    require!(RDMA);
    wakeups(MANA, "mana::sleeping_workers_are_woken_by_packets", "", "");
}

#[test]
fn without_interrupts_workers_do_not_wait() {
    require!(RDMA);
    MANA.under("mana::without_interrupts_workers_do_not_wait", "doorbells = 'scan'\n", |_| {
        let pool = Pool::new("p", 2048).expect("memory");
        let mut port = MANA.start(&pool, "", |_| ());
        assert!(!port.port.capabilities().can_wait && port.rx[0].wait_descriptor().is_none());
        finish(port, &pool);
    });
}

#[test]
fn large_tcp_packets_are_cut_by_the_device() {
    require!(RDMA);
    large_tcp(MANA, "mana::large_tcp_packets_are_cut_by_the_device");
}

#[test]
fn oversized_tcp_packets_are_cut_in_software() {
    require!(RDMA);
    oversized_tcp(MANA, "mana::oversized_tcp_packets_are_cut_in_software", "", 65_482);
}

#[test]
fn error_completions_are_counted_and_queues_recover() {
    require!(RDMA);
    MANA.under("mana::error_completions_are_counted_and_queues_recover", "", |nics| {
        let pool = Pool::new("errors", 4096).expect("memory");
        let mut port = MANA.start(&pool, "", |_| ());
        send_until_received(&mut port, &pool);
        let errors = |port: &StartedPort| port.tx[0].counters().drops.get(DropReason::TxError);
        for code in 33..=41 {
            nics.inject(&format!("kind = 'completion-error'\ncode = {code}\nafter = 2"));
            let before = errors(&port);
            // The third of eight packets fails; the others arrive.
            send(&mut port, (0..8).map(|_| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)));
            assert_eq!(receive(&mut port, 7).len(), 7);
            port.tx[0].reclaim();
            assert_eq!(errors(&port), before + 1, "type {code}");
        }
        assert_eq!(statistic(&mut port, "queue_resets"), 0);
        nics.inject("kind = 'completion-error'\ncode = 42");
        send(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)]);
        send_until_received(&mut port, &pool);
        assert_eq!(statistic(&mut port, "queue_resets"), 1);
        assert!(errors(&port) > 9);
        finish(port, &pool);
    });
}

#[test]
fn an_error_names_the_command_that_frees_the_port() {
    require!(RDMA);
    let topology = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\nnetdev = 'eth7'\n";
    under("mana::an_error_names_the_command_that_frees_the_port", topology, |nics| {
        let open = || OpenPort::open("dut", Box::new(Options::new("eth7"))).unwrap_or_else(|error| panic!("{error}"));
        drop(open());
        for errno in ["EBUSY", "ENODEV"] {
            nics.inject(&format!("kind = 'port-held'\nerrno = '{errno}'"));
            for name in ["mana0", "eth7"] {
                let error = OpenPort::open("dut", Box::new(Options::new(name))).expect_err("held").to_string();
                assert!(error.starts_with(&format!("mana: {name}: ")), "{error}");
                assert!(error.contains("the kernel's network interface eth7 holds the port"), "{error}");
                assert!(error.ends_with("ip link set dev eth7 down"), "{error}");
            }
        }
        nics.inject("kind = 'port-freed'");
        let can = open().capabilities();
        assert_eq!((can.driver, can.device.as_str()), ("mana", "eth7"));
        assert!(can.mac.is_some() && can.max_rx_queues >= 2);
        assert!(can.notes.iter().any(|note| note.contains("no flow rules in the device")), "{:?}", can.notes);
    });
}

#[test]
fn missing_devices_are_named_in_errors() {
    require!(RDMA);
    let topology = "[[device]]\nkind = 'mana'\nname = 'left'\n[[device.port]]\nnetdev = 'eth8'\n";
    under("mana::missing_devices_are_named_in_errors", topology, |_| {
        let error = OpenPort::open("dut", Box::new(Options::new("eth9"))).expect_err("no such").to_string();
        assert_eq!(error, "mana: no device 'eth9': no RDMA device has this name or interface; available: left (eth8)");
        let error = OpenPort::open("dut", Box::new(Options::new("left/2"))).expect_err("one port").to_string();
        assert!(error.starts_with("mana: left/2: "), "{error}");
        let first = OpenPort::open("dut", Box::new(Options::new("eth8"))).unwrap();
        let error = OpenPort::open("again", Box::new(Options::new("left"))).expect_err("open already").to_string();
        assert_eq!(error, "mana: left: port 1 of left is already open in this process");
        drop(first);
        OpenPort::open("again", Box::new(Options::new("left"))).unwrap();
    });
}
