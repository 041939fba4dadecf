use std::time::Duration;

use wirepath_testlab::{Lab, Namespace, Veth, eventually, print_uncaptured};

use crate::program::Program;
use crate::world::{L2FWD, Variant, WAIT_LIMIT, ethernet, pings};

/// Hosts around one machine that runs `l2fwd`. The machine has the ports `p0 .. pN`; each host has `eth0`
/// with an address from 10.3.0.1 on.
pub(crate) struct Star {
    pub(crate) hosts: Vec<Namespace>,
    pub(crate) middle: Namespace,
    pub(crate) ports: String,
    _lab: Lab,
}

pub(crate) fn star(variant: Variant, count: usize) -> Star {
    let lab = Lab::new(&variant.name.replace("::", "-"));
    let middle = lab.namespace("middle");
    let (mut hosts, mut ports) = (Vec::new(), String::new());
    for n in 0..count {
        let host = lab.namespace(&format!("host{n}"));
        Veth::new((&middle, &format!("p{n}")), (&host, "eth0")).plug();
        if variant.ipv6 {
            host.ipv6("eth0");
        }
        host.ip(&format!("addr add {}/{} dev eth0", address(variant, n), if variant.ipv6 { 64 } else { 24 }));
        ports += &variant.port(n, &format!("p{n}"), "");
        hosts.push(host);
    }
    Star { hosts, middle, ports, _lab: lab }
}

pub(crate) fn address(variant: Variant, n: usize) -> String {
    if variant.ipv6 { format!("fd00:3::{:x}", n + 1) } else { format!("10.3.0.{}", n + 1) }
}

fn wait_for(program: &mut Program, host: &Namespace, to: &str) {
    let reached = eventually(WAIT_LIMIT, || {
        assert!(program.running(), "l2fwd has ended");
        pings(host, to, 56, 1)
    });
    assert!(reached, "{} does not reach {to}", host.name());
}

/// Joins two ports: pings of every size, TCP with the kernel's default offloads, and a consistent summary.
pub(crate) fn joins_a_pair(variant: Variant) {
    let star = star(variant, 2);
    let config = star.ports.clone() + "[l2fwd]\nmode = \"pairs\"\npairs = [[\"p0\", \"p1\"]]\n";
    let mut l2fwd = Program::start(&star.middle, L2FWD, &config);
    wait_for(&mut l2fwd, &star.hosts[0], &address(variant, 1));
    for size in [0, 56, 1400] {
        assert!(pings(&star.hosts[0], &address(variant, 1), size, 20), "{size} bytes");
    }
    let (sent, received) = crate::tcp::transfer(&star.hosts[1], &star.hosts[0], &address(variant, 0), 64 << 20);
    assert_eq!(sent, received);
    let summary = l2fwd.stop();
    assert!(summary.number("rx_bytes") > (64 << 20), "{}", summary.json);
    assert!(summary.number("tx_bytes") > (64 << 20), "{}", summary.json);
}

/// A learning bridge of three ports: all hosts reach each other, and frames to a known address are not
/// flooded.
pub(crate) fn bridges_and_learns(variant: Variant) {
    let star = star(variant, 3);
    let config = star.ports.clone() + "[l2fwd]\nmode = \"bridge\"\n";
    let mut l2fwd = Program::start(&star.middle, L2FWD, &config);
    for from in 0..3 {
        for to in (0..3).filter(|to| *to != from) {
            wait_for(&mut l2fwd, &star.hosts[from], &address(variant, to));
        }
    }
    let [a, mut b, mut c] = [0, 1, 2].map(|n| star.hosts[n].frames("eth0"));
    let (here, there) = ([2, 0, 0, 0, 3, 1], [2, 0, 0, 0, 3, 2]);
    b.send(&ethernet([0xff; 6], there, "announce")).expect("sent");
    let mut attempt = 0;
    let learned = eventually(WAIT_LIMIT, || {
        attempt += 1;
        let frame = ethernet(there, here, &format!("to {attempt}"));
        a.send(&frame).expect("sent");
        let arrived = b.receive_where(Duration::from_secs(2), |seen| seen.bytes == frame).is_some();
        std::thread::sleep(Duration::from_millis(50));
        arrived && !c.drain().iter().any(|seen| seen.bytes == frame)
    });
    assert!(learned, "frames to a known address go to its port alone");
    l2fwd.stop();
}

/// TCP segmentation offload: the kernel leaves segmentation to the sender. The NIC segments the packets, and
/// the peer's kernel receives every byte.
pub(crate) fn superframes_are_cut_by_the_nic(variant: Variant) {
    const BYTES: u64 = 32 << 20;
    let star = star(variant, 1);
    let tap = "[[port]]\nname = \"local\"\ndriver = \"tap\"\ndevice = \"tap0\"\n[port.tap]\naddress = \
    [\"10.3.0.100/24\"]\nsuperframes = \"whole\"\n";
    let config = star.ports.clone() + tap + "[l2fwd]\nmode = \"pairs\"\npairs = [[\"p0\", \"local\"]]\n";
    let mut l2fwd = Program::start(&star.middle, L2FWD, &config);
    wait_for(&mut l2fwd, &star.middle, &address(variant, 0));
    let (sent, received) = crate::tcp::transfer(&star.middle, &star.hosts[0], &address(variant, 0), BYTES);
    assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum, sent and received");
    let counters = l2fwd.nic_counters();
    let queue = &counters["devices"][0]["send_queues"][0];
    let (cut, left) = (queue["segmented"].as_u64().expect("a number"), queue["packets"].as_u64().expect("a number"));
    // Some packets are segmented into many, and all transmitted packets are normal frames.
    assert!(cut > 0 && left > 2 * cut && left >= BYTES / 1500, "{counters}");
    print_uncaptured(&format!("{}: {cut} superframes among {left} frames that left", variant.name));
    let summary = l2fwd.stop();
    assert_eq!(summary.drops("kernel_offload"), 0, "{}", summary.json);
}

/// An interface that is made again has another address. Frames that leave by it have the new one as source.
pub(crate) fn a_new_address_is_the_source(variant: Variant) {
    let star = star(variant, 2);
    let config = star.ports.clone() + "[l2fwd]\nmode = \"pairs\"\npairs = [[\"p0\", \"p1\"]]\nrewrite_mac = true\n";
    let l2fwd = Program::start(&star.middle, L2FWD, &config);
    let source = |number: u32| {
        let (here, mut there) = (star.hosts[0].frames("eth0"), star.hosts[1].frames("eth0"));
        let mac = star.middle.mac("p1");
        let payload = format!("frame {number}");
        let sent = ethernet([2; 6], [4; 6], &payload);
        let arrived = eventually(WAIT_LIMIT, || {
            here.send(&sent).expect("sent");
            let ours = |seen: &wirepath_testlab::Frame| seen.bytes[12..] == sent[12..] && seen.bytes[6..12] == mac;
            there.receive_where(Duration::from_millis(100), ours).is_some()
        });
        assert!(arrived, "no frame from {mac:02x?}");
    };
    source(0);
    star.middle.ip("link del p1");
    Veth::new((&star.middle, "p1"), (&star.hosts[1], "eth0")).macs("02:00:00:00:77:01", "02:00:00:00:77:02").plug();
    source(1);
    star.middle.ip("link set p1 address 02:00:00:00:77:03");
    source(2);
    let summary = l2fwd.stop();
    assert_eq!(summary.json["ports"][1]["losses"], 1, "{}", summary.json);
}
