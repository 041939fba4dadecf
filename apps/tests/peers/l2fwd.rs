use std::time::Duration;

use wirepath_testlab::{Lab, Namespace, Veth, announce, eventually};

use crate::program::Program;
use crate::world::{L2FWD, PATIENCE, Way, ethernet, pings};

/// Hosts around one machine that runs `l2fwd`: `p0 .. pN` there, `eth0` with 10.3.0.1 and up here.
pub(crate) struct Star {
    pub(crate) hosts: Vec<Namespace>,
    pub(crate) middle: Namespace,
    pub(crate) ports: String,
    _lab: Lab,
}

pub(crate) fn star(way: Way, count: usize) -> Star {
    let lab = Lab::new(&way.name.replace("::", "-"));
    let middle = lab.namespace("middle");
    let (mut hosts, mut ports) = (Vec::new(), String::new());
    for n in 0..count {
        let host = lab.namespace(&format!("host{n}"));
        Veth::new((&middle, &format!("p{n}")), (&host, "eth0")).plug();
        if way.ipv6 {
            host.ipv6("eth0");
        }
        host.ip(&format!("addr add {}/{} dev eth0", address(way, n), if way.ipv6 { 64 } else { 24 }));
        ports += &way.port(n, &format!("p{n}"), "");
        hosts.push(host);
    }
    Star { hosts, middle, ports, _lab: lab }
}

pub(crate) fn address(way: Way, n: usize) -> String {
    if way.ipv6 { format!("fd00:3::{:x}", n + 1) } else { format!("10.3.0.{}", n + 1) }
}

fn wait_for(program: &mut Program, host: &Namespace, to: &str) {
    let reached = eventually(PATIENCE, || {
        assert!(program.running(), "l2fwd has ended");
        pings(host, to, 56, 1)
    });
    assert!(reached, "{} does not reach {to}", host.name());
}

/// Two ports joined: pings of every size, TCP with the offloads that the kernel likes, and a summary that adds up.
pub(crate) fn joins_a_pair(way: Way) {
    let star = star(way, 2);
    let config = star.ports.clone() + "[l2fwd]\nmode = \"pairs\"\npairs = [[\"p0\", \"p1\"]]\n";
    let mut l2fwd = Program::start(&star.middle, L2FWD, &config);
    wait_for(&mut l2fwd, &star.hosts[0], &address(way, 1));
    for size in [0, 56, 1400] {
        assert!(pings(&star.hosts[0], &address(way, 1), size, 20), "{size} bytes");
    }
    let (sent, received) = crate::tcp::transfer(&star.hosts[1], &star.hosts[0], &address(way, 0), 64 << 20);
    assert_eq!(sent, received);
    let summary = l2fwd.stop();
    assert!(summary.number("rx_packets") > (64 << 20) / 1500, "{}", summary.json);
    assert!(summary.number("tx_packets") > (64 << 20) / 1500, "{}", summary.json);
}

/// A learning bridge of three ports: everybody reaches everybody, and a known address is not flooded.
pub(crate) fn bridges_and_learns(way: Way) {
    let star = star(way, 3);
    let config = star.ports.clone() + "[l2fwd]\nmode = \"bridge\"\n";
    let mut l2fwd = Program::start(&star.middle, L2FWD, &config);
    for from in 0..3 {
        for to in (0..3).filter(|to| *to != from) {
            wait_for(&mut l2fwd, &star.hosts[from], &address(way, to));
        }
    }
    let [a, mut b, mut c] = [0, 1, 2].map(|n| star.hosts[n].frames("eth0"));
    let (here, there) = ([2, 0, 0, 0, 3, 1], [2, 0, 0, 0, 3, 2]);
    b.send(&ethernet([0xff; 6], there, "announce")).expect("sent");
    let mut attempt = 0;
    let learned = eventually(PATIENCE, || {
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

/// TCP that this machine's kernel leaves to be cut by whoever sends it: the NIC does, and the peer's kernel gets every byte in place.
pub(crate) fn superframes_are_cut_by_the_nic(way: Way) {
    const BYTES: u64 = 32 << 20;
    let star = star(way, 1);
    let tap = "[[port]]\nname = \"local\"\ndriver = \"tap\"\ndevice = \"tap0\"\n[port.tap]\naddress = [\"10.3.0.100/24\"]\nsuperframes = \"whole\"\n";
    let config = star.ports.clone() + tap + "[l2fwd]\nmode = \"pairs\"\npairs = [[\"p0\", \"local\"]]\n";
    let mut l2fwd = Program::start(&star.middle, L2FWD, &config);
    wait_for(&mut l2fwd, &star.middle, &address(way, 0));
    let (sent, received) = crate::tcp::transfer(&star.middle, &star.hosts[0], &address(way, 0), BYTES);
    assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum, sent and received");
    let counters = l2fwd.nic_counters();
    let queue = &counters["devices"][0]["send_queues"][0];
    let (cut, left) = (queue["segmented"].as_u64().expect("a number"), queue["packets"].as_u64().expect("a number"));
    // Some are cut into many, and what left are frames.
    assert!(cut > 0 && left > 2 * cut && left >= BYTES / 1500, "{counters}");
    announce(&format!("{}: {cut} superframes among {left} frames that left", way.name));
    let summary = l2fwd.stop();
    assert_eq!(summary.drops("kernel_offload"), 0, "{}", summary.json);
}
