//! The `mana` driver on emulated NICs: what the contract of all drivers does not ask for. Offloads, hostile completions, a device that
//! is reset, a port that the kernel holds. Each test starts itself again in a process with the NICs.

#[path = "common/nic.rs"]
mod nic;

use nic::{
    Kind, bytes, every_nic, figure, finish, is_sound, large_tcp, packet, receive, send, sleepers_are_woken, under,
    until_it_flows,
};
use wirepath_pmd::drivers::mana::Options;
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::offload::{Flags, Verdicts};
use wirepath_pmd::packet::{L3, L4, Pool};
use wirepath_pmd::port::{OpenPort, StartedPort};
use wirepath_testlab::{Need, require};

const RDMA: Need = Need::File("/etc/libibverbs.d/mana.driver");
const MANA: Kind = Kind { driver: "mana", device: "mana0", modes: &[""] };

every_nic!(
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
    MANA.under("checksums_and_tags_are_the_devices_work", "", |nics| {
        let pool = Pool::new("offloads", 8192).expect("memory");
        let mut port = MANA.start(&pool, "", |_| ());
        for l3 in [L3::Ipv4, L3::Ipv6] {
            for l4 in [L4::Tcp, L4::Udp] {
                for (payload, tag) in [(100, None), (1, None), (8000, None), (1400, Some(0xb123))] {
                    let mut sent = packet(&pool, l3, l4, payload);
                    if let Some(tag) = tag {
                        sent.set_vlan(tag);
                    }
                    let len = sent.len();
                    send(&mut port, [sent]);
                    let got = receive(&mut port, 1).remove(0);
                    assert_eq!((got.len(), got.in_port()), (len, 3));
                    assert!(is_sound(&bytes(&got)), "{l3:?} {l4:?} {payload}");
                    // The completion has no room for the priority.
                    assert_eq!(got.vlan(), tag.map(|tag| tag & 0xfff));
                    let good = if l3 == L3::Ipv4 { Verdicts::L3_GOOD } else { Verdicts::NONE };
                    assert_eq!(got.verdicts(), good.with(Verdicts::L4_GOOD));
                    assert!(got.rss_hash().is_some());
                }
            }
        }
        // A wrong one is not mended on the way, and is told of.
        let mut wrong = packet(&pool, L3::Ipv4, L4::Udp, 50);
        wrong.set_flags(Flags::NONE);
        send(&mut port, [wrong]);
        assert_eq!(receive(&mut port, 1)[0].verdicts(), Verdicts::L3_BAD.with(Verdicts::L4_BAD));
        assert_eq!(nics.refused(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn workers_that_sleep_are_woken_by_packets() {
    require!(RDMA);
    sleepers_are_woken(MANA, "workers_that_sleep_are_woken_by_packets", "", "");
}

#[test]
fn without_interrupts_nobody_waits() {
    require!(RDMA);
    MANA.under("without_interrupts_nobody_waits", "doorbells = 'scan'\n", |_| {
        let pool = Pool::new("p", 2048).expect("memory");
        let mut port = MANA.start(&pool, "", |_| ());
        assert!(!port.port.capabilities().can_wait && port.rx[0].wait_descriptor().is_none());
        finish(port, &pool);
    });
}

#[test]
fn large_tcp_packets_are_cut_by_the_device() {
    require!(RDMA);
    large_tcp(MANA, "large_tcp_packets_are_cut_by_the_device");
}

#[test]
fn error_completions_are_counted_and_a_stopped_queue_is_made_anew() {
    require!(RDMA);
    MANA.under("error_completions_are_counted_and_a_stopped_queue_is_made_anew", "", |nics| {
        let pool = Pool::new("errors", 4096).expect("memory");
        let mut port = MANA.start(&pool, "", |_| ());
        until_it_flows(&mut port, &pool);
        let errors = |port: &StartedPort| port.tx[0].counters().drops.get(DropReason::TxError);
        for code in 33..=41 {
            nics.order(&format!("kind = 'completion-error'\ncode = {code}\nafter = 2"));
            let before = errors(&port);
            // The third of eight fails; the others arrive.
            send(&mut port, (0..8).map(|_| packet(&pool, L3::Ipv4, L4::Udp, 30)));
            assert_eq!(receive(&mut port, 7).len(), 7);
            port.tx[0].reclaim();
            assert_eq!(errors(&port), before + 1, "type {code}");
        }
        assert_eq!(figure(&mut port, "queue_resets"), 0);
        nics.order("kind = 'completion-error'\ncode = 42");
        send(&mut port, [packet(&pool, L3::Ipv4, L4::Udp, 30)]);
        until_it_flows(&mut port, &pool);
        assert_eq!(figure(&mut port, "queue_resets"), 1);
        assert!(errors(&port) > 9);
        finish(port, &pool);
    });
}

#[test]
fn a_port_that_the_kernel_holds_comes_with_the_command_that_frees_it() {
    require!(RDMA);
    let topology = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\nnetdev = 'eth7'\n";
    under("a_port_that_the_kernel_holds_comes_with_the_command_that_frees_it", topology, |nics| {
        let open = || OpenPort::open("dut", Box::new(Options::new("eth7"))).unwrap_or_else(|error| panic!("{error}"));
        drop(open());
        for errno in ["EBUSY", "ENODEV"] {
            nics.order(&format!("kind = 'port-held'\nerrno = '{errno}'"));
            for name in ["mana0", "eth7"] {
                let error = OpenPort::open("dut", Box::new(Options::new(name))).expect_err("held").to_string();
                assert!(error.starts_with(&format!("mana: {name}: ")), "{error}");
                assert!(error.contains("the kernel's network interface eth7 holds the port"), "{error}");
                assert!(error.ends_with("ip link set dev eth7 down"), "{error}");
            }
        }
        nics.order("kind = 'port-freed'");
        let can = open().capabilities();
        assert_eq!((can.driver, can.device.as_str()), ("mana", "eth7"));
        assert!(can.mac.is_some() && can.max_rx_queues >= 2);
        assert!(can.notes.iter().any(|note| note.contains("no flow rules in this hardware")), "{:?}", can.notes);
    });
}

#[test]
fn what_is_not_there_is_named() {
    require!(RDMA);
    let topology = "[[device]]\nkind = 'mana'\nname = 'left'\n[[device.port]]\nnetdev = 'eth8'\n";
    under("what_is_not_there_is_named", topology, |_| {
        let error = OpenPort::open("dut", Box::new(Options::new("eth9"))).expect_err("no such").to_string();
        assert_eq!(
            error,
            "mana: no device 'eth9': no RDMA device of that name or behind that interface; there are left (eth8)"
        );
        let error = OpenPort::open("dut", Box::new(Options::new("left/2"))).expect_err("one port").to_string();
        assert!(error.starts_with("mana: left/2: "), "{error}");
        let first = OpenPort::open("dut", Box::new(Options::new("eth8"))).unwrap();
        let error = OpenPort::open("again", Box::new(Options::new("left"))).expect_err("open already").to_string();
        assert_eq!(error, "mana: left: port 1 of left is open in this program already");
        drop(first);
        OpenPort::open("again", Box::new(Options::new("left"))).unwrap();
    });
}
