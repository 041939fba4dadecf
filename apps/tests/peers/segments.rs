//! Limits and rules of segments, with Linux hosts and Linux' vxlan devices.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use wirepath_testlab::{FramePort, Namespace, eventually};

use crate::program::Summary;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, ethernet, host_address, pings, remote_address};

const BROADCAST: [u8; 6] = [0xff; 6];
const MOVING: [u8; 6] = [2, 0, 0, 0, 0xaa, 1];
const FIXED: [u8; 6] = [2, 0, 0, 0, 0xbb, 1];
/// Long enough for frames on the way to arrive.
const QUIET: Duration = Duration::from_millis(500);

/// Returns the frames with this payload that arrive until none arrives for a while.
fn arrived(port: &mut FramePort, mark: &str) -> usize {
    let mut count = 0;
    while let Some(frame) = port.receive(QUIET) {
        count += usize::from(frame.bytes.get(14..).is_some_and(|payload| payload.starts_with(mark.as_bytes())));
    }
    count
}

/// Returns a counter of the only segment.
fn counter(summary: &Summary, name: &str) -> u64 {
    let segment = &summary.json["app"]["segments"][0];
    name.split('.').fold(segment, |value, key| &value[key]).as_u64().unwrap_or_else(|| panic!("{name}: {segment}"))
}

/// A flood of broadcast frames comes through the gateway only as far as the limit allows. Frames that are not flooded
/// pass.
pub(crate) fn storms_are_limited(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let mut gateway = world.start_with(&(world.one_segment() + "broadcast_limit = 100\n"));
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let mut ends = [world.remotes[0].frames("vx0"), world.hosts[1].frames("eth0")];
    let sender = world.hosts[0].frames("eth0");
    const SENT: usize = 2000;
    for n in 0..SENT {
        sender.send(&ethernet(BROADCAST, MOVING, &format!("storm {n}"))).expect("sent");
        if n % 20 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let counts = ends.each_mut().map(|port| arrived(port, "storm"));
    assert!(counts[0] >= 10 && counts[0] < SENT / 2, "{counts:?}");
    assert_eq!(counts[0], counts[1]);
    assert!(pings(&world.hosts[0], &remote_address(0), 56, 20), "known addresses pass");
    let summary = gateway.stop();
    let dropped = counter(&summary, "storm_drops.broadcast");
    assert_eq!(dropped, summary.drops("storm_control"));
    assert!(dropped as usize + counts[0] >= SENT - summary.drops("rx_full") as usize, "{dropped} {counts:?}");
}

/// A flood of invented source addresses fills its limit and nothing more. Known hosts lose no ping meanwhile.
pub(crate) fn address_floods_are_limited(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let config = world.one_segment().replace("{ port = \"lan1\" }", "{ port = \"lan1\", mac_limit = 20 }");
    let mut gateway = world.start_with(&config);
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let flood = world.hosts[1].frames("eth0");
    let mut remote = world.remotes[0].frames("vx0");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..5000u16 {
                let [high, low] = n.to_be_bytes();
                flood.send(&ethernet(BROADCAST, [2, 0x77, 0, 0, high, low], &format!("address {n}"))).expect("sent");
                if n % 10 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        assert!(pings(&world.hosts[0], &remote_address(0), 56, 100), "known hosts are not disturbed");
    });
    let count = arrived(&mut remote, "address");
    let summary = gateway.stop();
    let entries = summary.json["app"]["fdb_entries"].as_u64();
    assert!(entries.is_some_and(|entries| (20..=30).contains(&entries)), "{}", summary.json);
    assert!(counter(&summary, "not_learned") > 100, "{}", summary.json);
    assert!(count as u64 + summary.drops("rx_full") >= 5000, "frames of refused addresses pass: {count}");
}

/// Returns the number of the ports that a frame to `MOVING` reaches.
fn reached(talker: &FramePort, ends: &mut [FramePort], mark: &str) -> Vec<usize> {
    for port in &mut *ends {
        port.drain();
    }
    talker.send(&ethernet(MOVING, FIXED, mark)).expect("sent");
    ends.iter_mut().map(|port| arrived(port, mark)).collect()
}

/// An address that two hosts use moves some times and then stays.
pub(crate) fn a_moving_address_is_frozen(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let mut gateway = world.start_with(&(world.one_segment() + "move_limit = 5\nfreeze_time = 3600\n"));
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let mut talker = world.hosts[0].frames("eth0");
    let mut ends = [world.hosts[1].frames("eth0"), world.remotes[0].frames("vx0")];
    talker.send(&ethernet(BROADCAST, FIXED, "here")).expect("sent");
    // The first frame is learned, the next five move the address, and further ones change nothing.
    for round in 0..12 {
        let here = ethernet(FIXED, MOVING, &format!("move {round}"));
        ends[round % 2].send(&here).expect("sent");
        let passed = talker.receive_where(WAIT_LIMIT, |frame| frame.bytes == here);
        assert!(passed.is_some(), "frames from both places are forwarded");
        std::thread::sleep(Duration::from_millis(300));
    }
    assert_eq!(reached(&talker, &mut ends, "frozen"), [0, 1], "the place of the fifth move");
    let summary = gateway.stop();
    let counters = ["moved", "frozen"].map(|name| counter(&summary, name));
    assert_eq!(counters, [5, 1], "{}", summary.json);
    assert!(counter(&summary, "moves_refused") >= 3, "{}", summary.json);
}

/// A remote that uses the address of a host behind a sticky port does not get its frames.
pub(crate) fn a_sticky_address_stays(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let config = world.one_segment().replace("{ port = \"lan1\" }", "{ port = \"lan1\", sticky = true }");
    let mut gateway = world.start_with(&config);
    world.wait_for(&mut gateway, &world.hosts[0], &host_address(1));
    let thief = world.remotes[0].frames("vx0");
    let stolen = world.hosts[1].mac("eth0");
    for n in 0..20 {
        thief.send(&ethernet(BROADCAST, stolen, &format!("mine {n}"))).expect("sent");
        assert!(pings(&world.hosts[0], &host_address(1), 56, 3), "the host keeps its frames");
    }
    let summary = gateway.stop();
    assert!(counter(&summary, "moves_refused") >= 1, "{}", summary.json);
}

/// Isolated hosts reach remotes, but not each other.
pub(crate) fn isolated_hosts_reach_remotes(variant: Variant) {
    let world = World::new(variant, 3, 1, 1500);
    let isolated = |text: String, n: usize| {
        text.replace(&format!("{{ port = \"lan{n}\" }}"), &format!("{{ port = \"lan{n}\", isolated = true }}"))
    };
    let mut gateway = world.start_with(&isolated(isolated(world.one_segment(), 0), 1));
    for host in &world.hosts {
        world.wait_for(&mut gateway, host, &remote_address(0));
    }
    world.wait_for(&mut gateway, &world.hosts[0], &host_address(2));
    world.wait_for(&mut gateway, &world.hosts[2], &host_address(1));
    assert!(!pings(&world.hosts[0], &host_address(1), 56, 1), "not even ARP passes");
    // With a fixed neighbour entry, unicast frames do not pass either.
    let mac = colons(world.hosts[1].mac("eth0"));
    world.hosts[0].ip(&format!("neigh replace {} lladdr {mac} dev eth0", host_address(1)));
    assert!(!pings(&world.hosts[0], &host_address(1), 56, 1));
    let summary = gateway.stop();
    assert!(summary.drops("isolated_port") >= 1, "{}", summary.json);
}

/// Gives a host an address of the test's IPv6 network.
fn add_ipv6(host: &Namespace, interface: &str, n: usize) {
    host.ipv6(interface);
    host.ip(&format!("addr add fd01::{n:x}/64 dev {interface}"));
}

/// Kernel hosts resolve each other by the replies of the gateway. Requests for known hosts go to no remote, and the
/// kernel still finds duplicates of its addresses.
pub(crate) fn requests_are_answered(variant: Variant) {
    let world = World::new(variant, 2, 2, 1500);
    let config = world.one_segment() + "neighbour_suppression = true\n";
    let mut gateway = world.start_with(&config);
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    add_ipv6(host, "eth0", 1);
    add_ipv6(&world.hosts[1], "eth0", 2);
    add_ipv6(remote, "vx0", 0x65);
    add_ipv6(&world.remotes[1], "vx0", 0x66);
    for target in [&remote_address(0), "fd01::65"] {
        world.wait_for(&mut gateway, host, target);
    }
    // The gateway has seen the replies. Now neither remote sees a request of a host that asks anew.
    let mac = remote.mac("vx0");
    let hardware = colons(mac);
    let mut others = [world.remotes[1].frames("vx0"), remote.frames("vx0"), world.hosts[1].frames("eth0")];
    for target in [&remote_address(0), "fd01::65"] {
        // The control thread has learned the address when the first request is answered.
        let answered = eventually(WAIT_LIMIT, || {
            host.ip("neigh flush all");
            others.iter_mut().for_each(|port| drop(port.drain()));
            let works = pings(host, target, 56, 1);
            std::thread::sleep(QUIET);
            let is_request = |frame: &[u8]| {
                frame[..2] == [0x33, 0x33] && frame.get(54) == Some(&135)
                    || frame[12..14] == [8, 6] && frame[..6] == BROADCAST
            };
            works && others.iter_mut().all(|port| !port.drain().iter().any(|frame| is_request(&frame.bytes)))
        });
        assert!(answered, "requests for {target} are flooded");
        let entry = host.ip(&format!("neigh show {target} dev eth0"));
        assert!(entry.contains(&hardware), "{entry}");
    }
    // Duplicate address detection of the kernel finds the host behind the tunnel.
    host.sysctl("net.ipv6.conf.eth0.accept_dad", "1");
    host.ip("addr add fd01::65/64 dev eth0");
    let found = eventually(WAIT_LIMIT, || host.ip("addr show dev eth0").contains("dadfailed"));
    assert!(found, "{}", host.ip("addr show dev eth0"));
    host.ip("addr del fd01::65/64 dev eth0");
    // An address that moves to another host is found there.
    remote.ip(&format!("addr del {}/24 dev vx0", remote_address(0)));
    world.remotes[1].ip(&format!("addr add {}/24 dev vx0", remote_address(0)));
    announce(&world.remotes[1], &remote_address(0));
    let moved = colons(world.remotes[1].mac("vx0"));
    let followed = eventually(WAIT_LIMIT, || {
        host.ip("neigh flush all");
        pings(host, &remote_address(0), 56, 1)
            && host.ip(&format!("neigh show {} dev eth0", remote_address(0))).contains(&moved)
    });
    assert!(followed, "{}", host.ip("neigh show"));
    let summary = gateway.stop();
    assert!(counter(&summary, "neighbour_replies") >= 2, "{}", summary.json);
    assert_eq!(counter(&summary, "vni"), u64::from(VNI));
}

/// Sends a gratuitous ARP request.
fn announce(from: &Namespace, address: &str) {
    let (mac, ip): ([u8; 6], std::net::Ipv4Addr) = (from.mac("vx0"), address.parse().expect("an address"));
    let frame =
        [&BROADCAST[..], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &mac, &ip.octets(), &[0; 6], &ip.octets(), &[0; 18]]
            .concat();
    from.frames("vx0").send(&frame).expect("sent");
}

/// Rules of a segment act on frames of hosts and of remotes, and change while the gateway runs.
pub(crate) fn filters_hold_in_both_directions(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let config = world.ports() + &world.segment("blue", VNI, &["{ port = \"lan0\" }".to_owned()]);
    let filter = "filter = ['ingress prio 1: icmp => count', 'ingress prio 2: udp dst 7000 => count, drop']\n";
    let mut gateway = world.start_with(&(config + filter + "[control]\nsocket = 'control.sock'\n"));
    let socket = gateway.path("control.sock");
    let wirepath = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
        let output = command.args(arguments).arg("--socket").arg(&socket).output().expect("wirepath");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    // Each end sends to two ports of the other one, of which the rule drops one.
    let exchange = |port: u16| {
        let mut counts = [0, 0];
        for (count, (from, to, address)) in
            counts.iter_mut().zip([(host, remote, remote_address(0)), (remote, host, host_address(0))])
        {
            let receiver = to.inside(|| std::net::UdpSocket::bind(("0.0.0.0", port)).expect("a socket"));
            receiver.set_read_timeout(Some(QUIET)).expect("a timeout");
            let sender = from.inside(|| std::net::UdpSocket::bind(("0.0.0.0", 0)).expect("a socket"));
            for _ in 0..20 {
                sender.send_to(b"x", (address.as_str(), port)).expect("sent");
            }
            *count = std::iter::from_fn(|| receiver.recv(&mut [0; 9]).ok()).count();
        }
        counts
    };
    assert_eq!((exchange(7000), exchange(7001)), ([0, 0], [20, 20]));
    assert!(pings(host, &remote_address(0), 56, 5));
    let rows: Value = serde_json::from_str(&wirepath(&["show", "filters", "--json"])).expect("JSON");
    let packets = [0, 1].map(|at| rows["rows"][at]["packets"].as_u64().unwrap_or_else(|| panic!("{rows}")));
    assert!(packets[0] >= 10 && packets[1] == 40, "{rows}");
    let rule = "rule=ingress prio 2: udp dst 7000 => count, drop";
    wirepath(&["remove", "segment_filter", "segment=blue", rule]);
    assert_eq!((exchange(7000), exchange(7001)), ([20, 20], [20, 20]));
    wirepath(&["add", "segment_filter", "segment=blue", "rule=ingress prio 3: udp dst 7001 => drop"]);
    assert_eq!((exchange(7000), exchange(7001)), ([20, 20], [0, 0]));
    let summary = gateway.stop();
    assert_eq!(summary.drops("rule_drop"), 80, "{}", summary.json);
}

/// The host behind the mirror sees each ping and its answer once, without tunnel headers.
pub(crate) fn a_mirror_shows_both_directions(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let config = world.ports() + &world.segment("blue", VNI, &["{ port = \"lan0\" }".to_owned()]);
    let mut gateway = world.start_with(&(config + "mirror = \"lan1\"\n"));
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let mut watcher = world.hosts[1].frames("eth0");
    std::thread::sleep(QUIET);
    watcher.drain();
    assert!(pings(&world.hosts[0], &remote_address(0), 1000, 10));
    let (near, far) = (world.hosts[0].mac("eth0"), world.remotes[0].mac("vx0"));
    let (mut requests, mut answers) = (Vec::new(), Vec::new());
    while let Some(frame) = watcher.receive(QUIET) {
        if frame.bytes.len() == 14 + 20 + 8 + 1000 {
            let number = u16::from_be_bytes([frame.bytes[40], frame.bytes[41]]);
            if frame.bytes[..6] == far && frame.bytes[6..12] == near {
                requests.push(number);
            } else if frame.bytes[..6] == near && frame.bytes[6..12] == far {
                answers.push(number);
            }
        }
    }
    // While an answer is late, ping sends more than ten.
    let sent: Vec<u16> = (1..).take(requests.len()).collect();
    assert!(sent.len() >= 10 && requests == sent && answers == sent, "{requests:?}, {answers:?}");
    let summary = gateway.stop();
    assert!(counter(&summary, "mirrored") >= 20, "{}", summary.json);
}
