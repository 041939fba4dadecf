//! Flow rules in the programs: real traffic, every kind of action, the kernel's own address beside a
//! forwarder, and changes at run time.

use std::time::Duration;

use wirepath_testlab::{FramePort, Lab, Requirement, eventually, oracle, require};

use crate::l2fwd::{Star, address, star};
use crate::program::{Program, Summary};
use crate::world::{L2FWD, VNI, Variant, WAIT_LIMIT, World, colons, host_address, pings};

/// Address of the forwarding machine in its own kernel.
fn own(variant: Variant) -> &'static str {
    if variant.ipv6 { "fd00:3::64" } else { "10.3.0.100" }
}

/// Returns datagrams from host 0 to host 1, one for each port, with a VLAN tag if one is given.
fn datagrams(variant: Variant, ports: &[(u16, Option<u16>)]) -> Vec<Vec<u8>> {
    let (from, to) = (address(variant, 0), address(variant, 1));
    let ip = if variant.ipv6 { "IPv6" } else { "IP" };
    let mut script = String::new();
    for (port, tag) in ports {
        let tag = tag.map_or(String::new(), |vid| format!("Dot1Q(vlan={vid})/"));
        script += &format!(
            "emit(Ether(src='02:00:00:00:00:aa', dst='02:00:00:00:00:bb')/{tag}{ip}(src='{from}', \
            dst='{to}')/UDP(sport=1, dport={port})/(b'x'*30))\n"
        );
    }
    oracle::scapy::<Vec<u8>>(&[], &script).frames
}

/// Returns the UDP destination port after VLAN tags and an IP header without options.
fn port(frame: &[u8]) -> Option<u16> {
    let mut at = 12;
    while frame.get(at..at + 2)? == [0x81, 0] {
        at += 4;
    }
    let (l4, protocol) = match frame.get(at..at + 2)? {
        [0x08, 0x00] => (at + 22, frame.get(at + 11)?),
        [0x86, 0xdd] => (at + 42, frame.get(at + 8)?),
        _ => return None,
    };
    (*protocol == 17).then(|| Some(u16::from_be_bytes([*frame.get(l4 + 2)?, *frame.get(l4 + 3)?])))?
}

/// Sends a frame repeatedly until it arrives. Earlier frames have then arrived or were dropped.
fn until_through(from: &FramePort, to: &mut FramePort, last: &[u8]) -> Vec<Vec<u8>> {
    let mut seen = Vec::new();
    let through = eventually(WAIT_LIMIT, || {
        from.send(last).expect("sent");
        std::thread::sleep(Duration::from_millis(50));
        seen.extend(to.drain().into_iter().map(|frame| frame.bytes));
        seen.iter().any(|frame| frame == last)
    });
    assert!(through, "the last frame does not come through");
    seen
}

fn of(frames: &[Vec<u8>], wanted: u16) -> Vec<&Vec<u8>> {
    frames.iter().filter(|frame| port(frame) == Some(wanted)).collect()
}

fn packets(summary: &Summary, words: &str) -> u64 {
    let rules = summary.json["app"]["rules"].as_array().unwrap_or_else(|| panic!("no rules: {}", summary.json));
    let rule = rules.iter().find(|rule| rule["rule"].as_str().is_some_and(|text| text.contains(words)));
    rule.unwrap_or_else(|| panic!("no rule with {words}: {rules:?}"))["packets"].as_u64().expect("a number")
}

/// Number of packets dropped by rules. Those that a NIC dropped are among them, and in the drops of its port.
fn ruled_out(summary: &Summary) -> u64 {
    let rules = summary.json["app"]["rules"].as_array().expect("rules");
    let in_nic = |rule: &&serde_json::Value| {
        let ports = rule["ports"].as_array().expect("ports");
        rule["rule"].as_str().is_some_and(|text| text.ends_with("drop"))
            && ports.iter().any(|at| at["where"] == "hardware")
    };
    let of_rules: u64 = rules.iter().filter(in_nic).map(|rule| rule["packets"].as_u64().expect("a number")).sum();
    let ports = summary.json["ports"].as_array().expect("ports");
    let of_ports: u64 = ports.iter().filter_map(|port| port["device_drops"]["rule_drop"].as_u64()).sum();
    assert_eq!(of_ports, of_rules, "{}", summary.json);
    summary.drops("rule_drop")
}

fn forwarder(variant: Variant, star: &Star, rules: &str) -> Program {
    // The kernel sees AF_PACKET frames only with this setting.
    let beside = if variant.driver == "af_packet" { "[port.af_packet]\nexclusive = false\n\n" } else { "" };
    let ports: String = star.ports.split_inclusive("\n\n").map(|port| port.to_owned() + beside).collect();
    let pairs =
        "[[port]]\nname = \"spare\"\ndriver = \"null\"\n[l2fwd]\npairs = [[\"p0\", \"p1\"], [\"p2\", \"spare\"]]\n";
    Program::start(&star.middle, L2FWD, &(ports + pairs + rules))
}

/// Applies every kind of action to real frames. The kernel's own address stays reachable beside the
/// forwarder.
pub(crate) fn l2fwd_acts(variant: Variant) {
    let star = star(variant, 3);
    let (ip, own, prefix) = if variant.ipv6 { ("ipv6", own(variant), 64) } else { ("ipv4", own(variant), 24) };
    if variant.ipv6 {
        star.middle.ipv6("p0");
    }
    star.middle.ip(&format!("addr add {own}/{prefix} dev p0"));
    let ask =
        if variant.ipv6 { "ipv6 dst ff02::1:ff00:64 / icmpv6 type 135".to_owned() } else { format!("arp tpa {own}") };
    let texts = [
        format!("ingress prio 1: port id p0 / {ip} dst {own} => count, kernel"),
        format!("ingress prio 1: port id p0 / {ask} => kernel"),
        "ingress prio 5: udp dst 9999 => count, drop".to_owned(),
        format!("ingress prio 5: port id p0 / {ip} / udp dst 7001 => set udp dst 7002, set {ip} dscp 10, count"),
        "ingress prio 5: port id p0 / udp dst 7003 => push-vlan vid 77".to_owned(),
        "ingress prio 5: port id p1 / vlan vid 77 / udp dst 7004 => pop-vlan".to_owned(),
        "ingress prio 5: port id p0 / udp dst 7005 => redirect p2".to_owned(),
        "ingress prio 5: port id p0 / udp dst 7006 => mirror p2".to_owned(),
        "ingress prio 5: port id p0 / udp dst 7007 => limit 1 pps burst 3".to_owned(),
        "egress prio 1: port id p1 / udp dst 7008 => count, drop".to_owned(),
    ];
    // An emulated NIC has no kernel interface.
    let kernel = !variant.is_emulated();
    let texts = texts.iter().filter(|text| kernel || !text.contains("kernel"));
    let rules: String = texts.map(|text| format!("[[rule]]\nrule = \"{text}\"\n")).collect();
    let mut program = forwarder(variant, &star, &rules);
    let [mut a, mut b, mut c] = [0, 1, 2].map(|n| star.hosts[n].frames("eth0"));
    let reached = eventually(WAIT_LIMIT, || {
        assert!(program.running(), "l2fwd has ended");
        pings(&star.hosts[0], &address(variant, 1), 56, 1)
    });
    assert!(reached, "what no rule is about is forwarded");
    assert!(!kernel || pings(&star.hosts[0], own, 56, 20), "the kernel's own address");

    let sent = datagrams(variant, &[9999, 7001, 7003, 7005, 7006, 7008].map(|port| (port, None)));
    sent.iter().for_each(|frame| a.send(frame).expect("sent"));
    let many = datagrams(variant, &[(7007, None), (7000, None)]);
    (0..20).for_each(|_| a.send(&many[0]).expect("sent"));
    let there = until_through(&a, &mut b, &many[1]);
    assert!(of(&there, 9999).is_empty() && of(&there, 7001).is_empty() && of(&there, 7005).is_empty());
    assert!(of(&there, 7008).is_empty(), "dropped at egress");
    let changed = of(&there, 7002);
    assert_eq!(changed.len(), 1, "rewritten");
    let traffic_class = if variant.ipv6 { (changed[0][14] & 15) << 4 | changed[0][15] >> 4 } else { changed[0][15] };
    assert_eq!(traffic_class >> 2, 10, "DSCP");
    oracle::assert_clean(&changed);
    let tagged = of(&there, 7003);
    assert_eq!(tagged.len(), 1);
    assert_eq!(tagged[0][..], [&sent[2][..12], &[0x81, 0, 0, 77], &sent[2][12..]].concat());
    assert_eq!(of(&there, 7006), [&sent[4]], "the packet itself");
    let limited = of(&there, 7007).len();
    assert!((3..15).contains(&limited), "{limited} of 20 at one a second");
    let probe: Vec<Vec<u8>> = c.drain().into_iter().map(|frame| frame.bytes).collect();
    assert_eq!((of(&probe, 7005), of(&probe, 7006)), (vec![&sent[3]], vec![&sent[4]]), "redirected; a copy");
    // The reverse direction.
    let back = datagrams(variant, &[(7004, Some(77)), (7000, None)]);
    b.send(&back[0]).expect("sent");
    let here = until_through(&b, &mut a, &back[1]);
    let untagged = [&back[0][..12], &back[0][16..]].concat();
    assert_eq!(of(&here, 7004), [&untagged]);

    let summary = program.stop();
    assert!(!kernel || packets(&summary, "count, kernel") >= 20, "{}", summary.json);
    assert_eq!([packets(&summary, "9999"), packets(&summary, "7002"), packets(&summary, "7007")], [1, 1, 20]);
    assert_eq!([packets(&summary, "redirect"), packets(&summary, "7008")], [1, 1]);
    assert_eq!((ruled_out(&summary), summary.drops("meter_exceeded")), (2, 20 - limited as u64), "{}", summary.json);
    if !kernel {
        return;
    }
    let first = &summary.json["app"]["rules"][0]["ports"][0];
    let location = if variant.driver == "af_xdp" { "xdp" } else { "software" };
    assert_eq!((first["port"].as_str(), first["where"].as_str()), (Some("p0"), Some(location)));
}

/// A rule with `kernel` that the XDP program cannot apply: the workers apply it, and the kernel gets the
/// modified packet.
pub(crate) fn software_decides_for_the_kernel(variant: Variant) {
    let star = star(variant, 3);
    let (ip, own, prefix) = if variant.ipv6 { ("ipv6", own(variant), 64) } else { ("ipv4", own(variant), 24) };
    if variant.ipv6 {
        star.middle.ipv6("p0");
    }
    star.middle.ip(&format!("addr add {own}/{prefix} dev p0"));
    star.middle.run(&["sysctl", "-qw", "net.ipv4.icmp_ratelimit=0"]);
    // A preceding rule that inspects tunnels excludes the rules below from the XDP program.
    let ask =
        if variant.ipv6 { "ipv6 dst ff02::1:ff00:64 / icmpv6 type 135".to_owned() } else { format!("arp tpa {own}") };
    let texts = [
        "ingress prio 0: udp dst 4789 / vxlan vni 9 => drop".to_owned(),
        format!("ingress prio 1: port id p0 / {ip} dst {own} => count, kernel"),
        format!("ingress prio 1: port id p0 / {ask} => kernel"),
    ];
    let rules: String = texts.iter().map(|text| format!("[[rule]]\nrule = \"{text}\"\n")).collect();
    let mut program = forwarder(variant, &star, &rules);
    if variant.is_emulated() {
        assert!(
            eventually(WAIT_LIMIT, || !program.running()),
            "without a kernel behind the port the rules are refused"
        );
        return;
    }
    let reached = eventually(WAIT_LIMIT, || {
        assert!(program.running(), "l2fwd has ended");
        // The kernel answers itself until the program runs.
        pings(&star.hosts[0], &address(variant, 1), 56, 1)
    });
    assert!(reached);
    assert!(pings(&star.hosts[0], own, 1200, 50));
    let summary = program.stop();
    assert!(summary.number("to_kernel") >= 50, "{}", summary.json);
    let location = summary.json["app"]["rules"][1]["ports"][0]["where"].as_str();
    assert_eq!(location, Some(if variant.driver == "af_xdp" { "injected" } else { "software" }));
}

/// A rule file is read again on SIGHUP. An invalid file changes nothing.
pub(crate) fn changed_while_it_runs(variant: Variant) {
    let star = star(variant, 3);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("acl.rules");
    let write = |text: &str| std::fs::write(&file, text).expect("written");
    write("ingress: udp dst 7100 => count, drop\n");
    let mut program = forwarder(variant, &star, &format!("[rules]\nfile = \"{}\"\n", file.display()));
    let [a, mut b] = [0, 1].map(|n| star.hosts[n].frames("eth0"));
    let frames = datagrams(variant, &[(7100, None), (7101, None), (7000, None)]);
    let hang_up = |program: &mut Program| {
        let id = rustix::process::Pid::from_raw(program.id() as i32).expect("a process");
        rustix::process::kill_process(id, rustix::process::Signal::HUP).expect("signalled");
    };
    // Waits until exactly the wanted frames pass.
    let mut through = |wanted: [bool; 2]| {
        eventually(WAIT_LIMIT, || {
            frames[..2].iter().for_each(|frame| a.send(frame).expect("sent"));
            let seen = until_through(&a, &mut b, &frames[2]);
            [0, 1].map(|i| seen.contains(&frames[i])) == wanted
        })
    };
    assert!(through([false, true]), "the first rule");
    write("ingress: udp dst 7101 => count, drop\n");
    hang_up(&mut program);
    assert!(through([true, false]), "the second rule");
    write("ingress: udp dst 7100 = drop\n");
    hang_up(&mut program);
    assert!(through([true, false]), "a file that is wrong");
    write("\n");
    hang_up(&mut program);
    assert!(through([true, true]), "no rule");
    assert!(program.running());
    program.stop();
}

/// An access list of a gateway, applied to the inner packets and to the packets of local hosts.
pub(crate) fn gateway_list(variant: Variant) {
    let world = World::new(variant, 1, 1, 1600);
    let rules = [
        format!(
            "ingress prio 1: port id wan / udp / vxlan vni {VNI} / ipv4 dst {} / udp dst 7777 => count, drop",
            host_address(0)
        ),
        "ingress prio 2: port id lan0 / udp dst 7778 => count, drop".to_owned(),
        format!("egress prio 3: port id wan / udp / vxlan vni {VNI} / ipv4 / icmp type 8 => count"),
        "egress prio 4: port id lan0 / ipv4 / udp dst 7779 => set ipv4 ttl 3".to_owned(),
    ];
    let rules: String = rules.iter().map(|text| format!("[[rule]]\nrule = \"{text}\"\n")).collect();
    let segment = world.segment("blue", VNI, &["{ port = \"lan0\" }".to_owned()]);
    let mut program = world.start_with(&(world.ports() + &segment + &rules));
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut program, host, &crate::world::remote_address(0));
    let (here, there) = (colons(host.mac("eth0")), colons(remote.mac("vx0")));
    let mut script = String::new();
    for (from, to, source, destination) in [
        (&there, &here, crate::world::remote_address(0), host_address(0)),
        (&here, &there, host_address(0), crate::world::remote_address(0)),
    ] {
        for port in [7777, 7778, 7779, 7000] {
            script += &format!(
                "emit(Ether(src='{from}', dst='{to}')/IP(src='{source}', dst='{destination}')/UDP(sport=1, \
                dport={port})/(b'x'*30))\n"
            );
        }
    }
    let frames = oracle::scapy::<Vec<u8>>(&[], &script).frames;
    let (mut local, mut far) = (host.frames("eth0"), remote.frames("vx0"));
    frames[..3].iter().for_each(|frame| far.send(frame).expect("sent"));
    let seen = until_through(&far, &mut local, &frames[3]);
    assert!(of(&seen, 7777).is_empty(), "the rule looks into the tunnel");
    assert_eq!(of(&seen, 7778), [&frames[1]]);
    let changed = of(&seen, 7779);
    assert_eq!((changed.len(), changed[0][22]), (1, 3), "TTL set as it leaves");
    oracle::assert_clean(&changed);
    frames[4..7].iter().for_each(|frame| local.send(frame).expect("sent"));
    let seen = until_through(&local, &mut far, &frames[7]);
    assert_eq!((of(&seen, 7777), of(&seen, 7778).len()), (vec![&frames[4]], 0));
    let summary = program.stop();
    assert_eq!((packets(&summary, "7777"), packets(&summary, "7778")), (1, 1));
    assert!(packets(&summary, "icmp type 8") >= 1, "counted behind encapsulation: {}", summary.json);
    assert_eq!(ruled_out(&summary), 2, "{}", summary.json);
}

/// On a TAP device, `kernel` returns the packet as the rule has changed it. A datagram that the kernel sends
/// comes back to its own socket.
#[test]
fn tap_returns_packets_changed_by_rules() {
    require!(all Requirement::LAB);
    let lab = Lab::new("rules-tap");
    let host = lab.namespace("host");
    let config = "[[port]]\nname = \"t\"\ndriver = \"tap\"\ndevice = \"tap0\"\n\
                  [[port]]\nname = \"sink\"\ndriver = \"null\"\n\
                  [[rule]]\nrule = \"ingress: port id t / ipv4 dst 10.4.0.2 / udp dst 5000 => \
                  set ipv4 src 10.4.0.2, set ipv4 dst 10.4.0.1, set eth dst 02:00:00:00:04:01, \
                  set eth src 02:00:00:00:04:02, count, kernel\"\n";
    let mut program = Program::start(&host, L2FWD, config);
    assert!(eventually(WAIT_LIMIT, || program.running() && host.run(&["ip", "link", "show", "tap0"]).success));
    host.ip("link set tap0 address 02:00:00:00:04:01");
    host.ip("link set tap0 up");
    host.ip("addr add 10.4.0.1/24 dev tap0");
    host.ip("neigh add 10.4.0.2 lladdr 02:00:00:00:04:02 dev tap0 nud permanent");
    host.inside(|| {
        let socket = std::net::UdpSocket::bind("10.4.0.1:5000").expect("bound");
        socket.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
        let mut bytes = [0; 64];
        let mut from = None;
        let came = eventually(WAIT_LIMIT, || {
            socket.send_to(b"there and back", "10.4.0.2:5000").expect("sent");
            from = socket.recv_from(&mut bytes).ok();
            from.is_some()
        });
        assert!(came, "the kernel gets it");
        assert_eq!(
            from.map(|(n, from)| (bytes[..n].to_vec(), from.to_string())),
            Some((b"there and back".to_vec(), "10.4.0.2:5000".to_owned()))
        );
    });
    let summary = program.stop();
    assert!(packets(&summary, "kernel") >= 1 && summary.number("to_kernel") >= 1, "{}", summary.json);
}
