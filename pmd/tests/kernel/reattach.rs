//! Interfaces that are removed, renamed or moved while a port runs on them, and that return.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Pool};
use wirepath_pmd::port::{MacAddr, PortEvent};
use wirepath_testlab::{FramePort, Lab, Namespace, Requirement, Veth, eventually, require};

use crate::common;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Final counters of a port that sent back what it received.
struct Done {
    rx: Vec<QueueStats>,
    tx: Vec<QueueStats>,
    extra: Vec<(&'static str, u64)>,
    mac: Option<MacAddr>,
}

/// A port whose worker sends every received frame back, and whose control thread reads the events.
struct Echo {
    stop: Arc<AtomicBool>,
    events: Arc<Mutex<Vec<PortEvent>>>,
    thread: JoinHandle<Done>,
}

impl Echo {
    fn start(namespace: &Arc<Namespace>, table: &str) -> Self {
        let (stop, events) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (there, stopped, seen) = (Arc::clone(namespace), Arc::clone(&stop), Arc::clone(&events));
        let (ready, wait) = std::sync::mpsc::channel();
        let table = table.to_owned();
        let thread = std::thread::spawn(move || {
            let pool = common::pool();
            let mut port = there.inside(|| common::start(&table, &pool).unwrap_or_else(|error| panic!("{error}")));
            ready.send(()).expect("the test waits");
            // Outside of the namespace on purpose: the port must find the way back to its interface.
            while !stopped.load(Ordering::Relaxed) {
                for (rx, tx) in port.rx.iter_mut().zip(&mut port.tx) {
                    let mut batch = Batch::new();
                    rx.receive(&mut batch);
                    while !batch.is_empty() {
                        tx.transmit(&mut batch);
                    }
                    tx.reclaim();
                }
                seen.lock().unwrap().extend(port.port.events());
                std::thread::sleep(Duration::from_micros(200));
            }
            let done = Done {
                rx: port.port.rx_statistics(),
                tx: port.port.tx_statistics(),
                extra: port.port.extra_statistics(),
                mac: port.port.capabilities().mac,
            };
            port.port.stop(port.rx, port.tx).expect("stops");
            assert_eq!(pool.outstanding(), 0, "buffers that did not come back");
            done
        });
        wait.recv().expect("the port starts");
        Self { stop, events, thread }
    }

    fn saw(&self, wanted: impl Fn(&PortEvent) -> bool) -> bool {
        eventually(TIMEOUT, || self.events.lock().unwrap().iter().any(&wanted))
    }

    fn saw_lost(&self) -> bool {
        self.events.lock().unwrap().iter().any(|event| matches!(event, PortEvent::Lost(_)))
    }

    /// Waits until the port has reported `n` losses and returns.
    #[track_caller]
    fn wait_lost(&self, n: usize) {
        let lost = |event: &&PortEvent| matches!(event, PortEvent::Lost(_));
        assert!(
            eventually(TIMEOUT, || self.events.lock().unwrap().iter().filter(lost).count() == n),
            "{:?}",
            self.events
        );
    }

    #[track_caller]
    fn wait_returned(&self, n: usize) {
        let back = |event: &&PortEvent| **event == PortEvent::Returned;
        assert!(
            eventually(TIMEOUT, || self.events.lock().unwrap().iter().filter(back).count() == n),
            "{:?}",
            self.events
        );
    }

    fn finish(self) -> Done {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the port ends in peace")
    }
}

/// A frame with EtherType 0x88b5 to another host, with a number.
fn numbered(number: u32) -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &[0x88, 0xb5], &number.to_be_bytes(), &[7; 46]].concat()
}

fn number(frame: &[u8]) -> Option<u32> {
    (frame.get(12..14)? == [0x88, 0xb5]).then(|| u32::from_be_bytes(*frame[14..].first_chunk().expect("a number")))
}

/// Sends frames with the numbers of `range` and checks that each comes back, in order.
#[track_caller]
fn exchange(wire: &mut FramePort, range: std::ops::Range<u32>) {
    wire.drain();
    for frame in range.clone() {
        wire.send(&numbered(frame)).expect("sends");
    }
    let mut got = Vec::new();
    eventually(TIMEOUT, || {
        got.extend(wire.receive(Duration::from_millis(50)).and_then(|frame| number(&frame.bytes)));
        got.len() >= range.len()
    });
    assert_eq!(got, range.collect::<Vec<_>>());
}

/// Sends frames until sending fails, as it does when the peer of the interface is removed.
fn flood(namespace: &Namespace, interface: &str) -> JoinHandle<u32> {
    let wire = namespace.frames(interface);
    std::thread::spawn(move || (1_000_000..).find(|&frame| wire.send(&numbered(frame)).is_err()).expect("an end"))
}

/// Drivers of interfaces that others create, with their keys.
const DRIVERS: [&str; 4] = [
    "driver = \"af_packet\"\n",
    "driver = \"af_xdp\"\n",
    "driver = \"af_xdp\"\n[port.af_xdp]\npool_as_umem = false\nattach_by_link = false\n",
    "driver = \"auto\"\n",
];

fn net(name: &str) -> (Arc<Namespace>, Arc<Namespace>, Lab) {
    let lab = Lab::new(name);
    (Arc::new(lab.namespace("dut")), Arc::new(lab.namespace("peer")), lab)
}

#[test]
fn a_recreated_interface_is_taken_again() {
    require!(all Requirement::LAB);
    for driver in DRIVERS {
        let (dut, peer, _lab) = net("again");
        Veth::new((&dut, "eth0"), (&peer, "eth0")).macs("02:00:00:00:00:11", "02:00:00:00:00:12").plug();
        let echo = Echo::start(&dut, &format!("device = \"eth0\"\n{driver}"));
        exchange(&mut peer.frames("eth0"), 0..50);
        for round in 1..4 {
            let flood = flood(&peer, "eth0");
            std::thread::sleep(Duration::from_millis(20));
            dut.ip("link del eth0");
            flood.join().expect("the flood ends");
            echo.wait_lost(round);
            let mac = format!("02:00:00:00:0{round}:11");
            Veth::new((&dut, "eth0"), (&peer, "eth0")).macs(&mac, "02:00:00:00:00:12").plug();
            echo.wait_returned(round);
            let mac = MacAddr([2, 0, 0, 0, round as u8, 0x11]);
            assert!(echo.saw(|event| *event == PortEvent::Address(mac)), "{driver}");
            assert!(dut.ip("-d link show eth0").contains("promiscuity 1"), "{driver}");
            exchange(&mut peer.frames("eth0"), 100..150);
        }
        let done = echo.finish();
        assert_eq!(done.mac, Some(MacAddr([2, 0, 0, 0, 3, 0x11])), "{driver}");
        let (rx, tx) = (&done.rx[0], &done.tx[0]);
        assert!(rx.packets >= 200, "{driver}: the counters continue: {rx:?}");
        assert_eq!(rx.packets, tx.packets + tx.dropped(), "{driver}: {rx:?} {tx:?}");
        assert!(tx.drops.iter().all(|(why, _)| [DropReason::DeviceLost, DropReason::LinkDown].contains(why)), "{tx:?}");
    }
}

#[test]
fn packets_for_an_absent_port_are_counted() {
    require!(all Requirement::LAB);
    for driver in DRIVERS {
        let (dut, peer, _lab) = net("away");
        Veth::new((&dut, "eth0"), (&peer, "eth0")).plug();
        let pool = Pool::new("test", 8192).unwrap();
        dut.inside(|| {
            let mut it = common::start(&format!("device = \"eth0\"\n{driver}"), &pool).unwrap();
            dut.ip("link del eth0");
            assert!(eventually(TIMEOUT, || it.port.events().iter().any(|event| matches!(event, PortEvent::Lost(_)))));
            let mut batch: Batch = (0..5).map(|n| common::packet(&pool, &numbered(n))).collect();
            assert_eq!(it.tx[0].transmit(&mut batch), 5);
            assert_eq!(it.port.tx_statistics()[0].drops, [(DropReason::DeviceLost, 5)], "{driver}");
            assert_eq!(it.rx[0].receive(&mut batch), 0);
            assert!(it.rx[0].is_away() && it.port.is_away(), "{driver}: the queue is given back");
            for _ in 0..3 {
                assert_eq!(it.port.events(), []);
            }
            it.port.stop(it.rx, it.tx).unwrap();
        });
        assert_eq!(pool.outstanding(), 0, "{driver}");
    }
}

#[test]
fn an_interface_returns_from_another_namespace() {
    require!(all Requirement::LAB);
    for driver in DRIVERS {
        let (dut, peer, lab) = net("moved");
        let other = lab.namespace("other");
        Veth::new((&dut, "eth0"), (&peer, "eth0")).plug();
        let echo = Echo::start(&dut, &format!("device = \"eth0\"\n{driver}"));
        exchange(&mut peer.frames("eth0"), 0..50);
        dut.ip(&format!("link set eth0 netns {}", other.name()));
        echo.wait_lost(1);
        other.ip(&format!("link set eth0 netns {}", dut.name()));
        dut.ip("link set eth0 up");
        echo.wait_returned(1);
        assert!(eventually(TIMEOUT, || peer.ip("-o link show eth0").contains(" state UP ")));
        exchange(&mut peer.frames("eth0"), 50..100);
        let done = echo.finish();
        assert_eq!(done.rx[0].packets, done.tx[0].packets + done.tx[0].dropped(), "{driver}");
    }
}

#[test]
fn a_port_survives_renames_flaps_and_mtu_changes() {
    require!(all Requirement::LAB);
    for driver in DRIVERS {
        let (dut, peer, _lab) = net("renamed");
        Veth::new((&dut, "eth0"), (&peer, "eth0")).plug();
        let echo = Echo::start(&dut, &format!("device = \"eth0\"\n{driver}"));
        let steps: [&[&str]; 4] = [
            &["link set eth0 down", "link set eth0 name lan0", "link set lan0 up"],
            &["link set lan0 down", "link set lan0 name eth0", "link set eth0 up"],
            &["link set eth0 down", "link set eth0 up"],
            &["link set eth0 mtu 1400", "link set eth0 mtu 1600"],
        ];
        for step in steps {
            step.iter().for_each(|words| drop(dut.ip(words)));
            assert!(eventually(TIMEOUT, || peer.ip("-o link show eth0").contains(" state UP ")));
            exchange(&mut peer.frames("eth0"), 0..50);
        }
        assert!(!echo.saw_lost(), "{driver}");
        dut.ip("link set eth0 address 02:00:00:00:00:77");
        assert!(echo.saw(|event| *event == PortEvent::Address(MacAddr([2, 0, 0, 0, 0, 0x77]))), "{driver}");
        echo.finish();
    }
}

/// The number of channels of the interface changes while the port runs (`ethtool -L`). The port keeps its queues.
#[test]
fn a_port_survives_changed_channels() {
    require!(all Requirement::LAB, Requirement::Program("ethtool"));
    for driver in &DRIVERS[..2] {
        let (dut, peer, _lab) = net("channels");
        Veth::new((&dut, "eth0"), (&peer, "eth0")).queues(4).plug();
        let set = |count: u32| {
            let count = count.to_string();
            dut.run(&["ethtool", "-L", "eth0", "rx", &count, "tx", &count])
        };
        set(2).expect();
        // Native XDP needs a receive queue for each transmit queue of the peer.
        peer.run(&["ethtool", "-L", "eth0", "tx", "2"]).expect();
        let echo = Echo::start(&dut, &format!("device = \"eth0\"\nqueues = 2\n{driver}"));
        exchange(&mut peer.frames("eth0"), 0..50);
        // The kernel refuses to take away the queues of XDP sockets. A packet socket does not depend on them.
        for count in [4, 2, 1, 2] {
            let result = set(count);
            let may_fail = count == 1 && driver.contains("af_xdp");
            assert!(result.success || may_fail, "{driver} {count}: {result:?}");
            exchange(&mut peer.frames("eth0"), 100..400);
        }
        assert!(!echo.saw_lost(), "{driver}");
        let done = echo.finish();
        let sum = |queues: &[QueueStats], of: fn(&QueueStats) -> u64| queues.iter().map(of).sum::<u64>();
        assert_eq!(sum(&done.rx, |q| q.packets), sum(&done.tx, |q| q.packets + q.dropped()), "{driver}");
    }
}

#[test]
fn rules_and_their_counters_survive_a_recreation() {
    require!(all Requirement::LAB);
    let (dut, peer, _lab) = net("rules");
    Veth::new((&dut, "eth0"), (&peer, "eth0")).plug();
    dut.ip("addr add 192.0.2.9/24 dev eth0");
    let table = "driver = \"af_xdp\"\ndevice = \"eth0\"\n[port.af_xdp]\nkernel = [\"arp\"]\n";
    let echo = Echo::start(&dut, table);
    let arp = arp_request();
    let replies = |wire: &mut FramePort| {
        wire.drain();
        for _ in 0..3 {
            wire.send(&arp).unwrap();
            let reply = |frame: &wirepath_testlab::Frame| frame.bytes[12..14] == [8, 6] && frame.bytes[21] == 2;
            assert!(wire.receive_where(TIMEOUT, reply).is_some(), "the kernel answers");
        }
    };
    replies(&mut peer.frames("eth0"));
    dut.ip("link del eth0");
    echo.wait_lost(1);
    Veth::new((&dut, "eth0"), (&peer, "eth0")).plug();
    dut.ip("addr add 192.0.2.9/24 dev eth0");
    echo.wait_returned(1);
    replies(&mut peer.frames("eth0"));
    let done = echo.finish();
    let passed = done.extra.iter().find(|(name, _)| name.contains("kernel")).map(|(_, n)| *n);
    assert!(passed.is_some_and(|n| n >= 6), "{:?}", done.extra);
}

/// An ARP request for 192.0.2.9 from 192.0.2.1.
fn arp_request() -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    frame.extend([2, 0, 0, 0, 0, 1, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2, 9]);
    frame.resize(60, 0);
    frame
}

#[test]
fn a_persistent_tap_is_taken_again() {
    require!(all Requirement::LAB);
    for queues in ["", " multi_queue"] {
        let lab = Lab::new("tapagain");
        let (dut, other) = (Arc::new(lab.namespace("dut")), lab.namespace("other"));
        dut.ip(&format!("tuntap add dev tap0 mode tap{queues}"));
        let table = "driver = \"tap\"\ndevice = \"tap0\"\n[port.tap]\naddress = \"192.0.2.1/24\"\n";
        let echo = Echo::start(&dut, table);
        exchange(&mut dut.frames("tap0"), 0..50);
        for round in 1..3 {
            let flood = flood(&dut, "tap0");
            std::thread::sleep(Duration::from_millis(20));
            dut.ip("link del tap0");
            flood.join().expect("the flood ends");
            echo.wait_lost(round);
            assert!(!dut.ip("link show").contains("tap0"), "somebody else creates it");
            dut.ip(&format!("tuntap add dev tap0 mode tap{queues}"));
            echo.wait_returned(round);
            assert!(dut.ip("addr show tap0").contains("192.0.2.1/24"));
            exchange(&mut dut.frames("tap0"), 100..150);
        }
        // The queues of a TAP interface work in whichever namespace it is.
        dut.ip(&format!("link set tap0 netns {}", other.name()));
        other.ip("link set tap0 up");
        exchange(&mut other.frames("tap0"), 200..250);
        other.ip(&format!("link set tap0 netns {}", dut.name()));
        dut.ip("link set tap0 up");
        exchange(&mut dut.frames("tap0"), 300..350);
        assert_eq!(echo.events.lock().unwrap().iter().filter(|event| matches!(event, PortEvent::Lost(_))).count(), 2);
        let done = echo.finish();
        assert_eq!(done.rx[0].packets, done.tx[0].packets + done.tx[0].dropped());
    }
}

#[test]
fn a_tap_of_the_port_is_created_again() {
    require!(all Requirement::LAB);
    let lab = Lab::new("tapown");
    let dut = Arc::new(lab.namespace("dut"));
    let echo = Echo::start(&dut, "driver = \"tap\"\ndevice = \"tap0\"\nqueues = 2\n");
    dut.ip("link del tap0");
    echo.wait_returned(1);
    exchange(&mut dut.frames("tap0"), 0..1);
    echo.finish();
    assert!(!dut.ip("link show").contains("tap0"), "goes with the port");
}
