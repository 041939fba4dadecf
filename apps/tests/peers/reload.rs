//! Changes of the gateway's configuration under traffic.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wirepath_testlab::{Namespace, SetOnDrop, eventually, print_uncaptured};

use crate::program::Program;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, host_address, pings, remote_address};

/// VNI of the segment that changes.
const OTHER: u32 = 43;
const RELOADS: usize = 200;
/// Times that a port is added and removed.
const PORT_CHANGES: usize = 50;
/// Time between two datagrams of a stream.
const PACE: Duration = Duration::from_micros(500);

/// A client of the control socket of a program.
pub(crate) struct Client {
    socket: PathBuf,
    /// Process ID of the program.
    id: u32,
}

impl Client {
    pub(crate) fn new(program: &mut Program) -> Self {
        Self { socket: program.file("control.sock"), id: program.id() }
    }

    /// Sends a request on a connection of its own, because the program closes a connection that is idle for ten
    /// seconds. A test that writes a file takes longer on a busy disk.
    pub(crate) fn ask(&self, request: &Value) -> Value {
        let stream = wirepath_control_socket::connect(&self.socket, WAIT_LIMIT).expect("the socket");
        writeln!(&stream, "{request}").expect("a request");
        let (mut stream, mut line) = (BufReader::new(stream), String::new());
        // The kernel may take long to open and to close a device. Nothing else may.
        for _ in 0..6 {
            match stream.read_line(&mut line) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && self.is_in_kernel() => {}
                read => {
                    read.expect("an answer");
                    break;
                }
            }
        }
        serde_json::from_str(&line).expect("JSON")
    }

    /// Returns whether a thread that opens or closes ports waits in an uninterruptible system call.
    fn is_in_kernel(&self) -> bool {
        let is_waiting = |task: &Path| {
            let read = |name| std::fs::read_to_string(task.join(name)).unwrap_or_default();
            let works = ["wirepath-config", "wirepath-close"].contains(&read("comm").trim());
            works && read("stat").rsplit(") ").next().is_some_and(|state| state.starts_with('D'))
        };
        let tasks = PathBuf::from(format!("/proc/{}/task", self.id));
        // The thread may be between two calls.
        eventually(Duration::from_secs(1), || {
            std::fs::read_dir(&tasks)
                .is_ok_and(|mut all| all.any(|task| task.is_ok_and(|task| is_waiting(&task.path()))))
        })
    }
}

/// Reloads 200 configurations in turn. Two streams of a segment that stays lose no datagram, and the segment that
/// comes and goes works whenever it is there.
pub(crate) fn a_segment_that_stays_loses_nothing(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    world.vxlan(0, "vx1", OTHER);
    let (host, other, remote) = (&world.hosts[0], &world.hosts[1], &world.remotes[0]);
    remote.ip("addr add 10.2.0.101/24 dev vx1");
    other.ip("addr add 10.2.0.2/24 dev eth0");
    let ports = |n: usize| [format!("{{ port = \"lan{n}\" }}")];
    // The port of the other segment is in use by a rule when the segment is gone.
    let rules = "[rules]\n[[rule]]\nrule = 'ingress prio 9: port id lan1 / ipv4 dst 192.0.2.1 => drop'\n";
    let control = "[control]\nsocket = 'control.sock'\n";
    let alone = world.ports() + control + rules + &world.segment("blue", VNI, &ports(0));
    // The nowhere of `remotes` never answers ARP or ND.
    let nowhere = variant.address(200);
    let both = |n: usize| {
        let more =
            format!("ageing = {}\nmtu = {}\nremotes = [\"{}\", \"{nowhere}\"]\n", 100 + n, 1200 + n, variant.remote(0));
        let red = world.segment("red", OTHER, &ports(1));
        let red: String =
            red.lines().filter(|line| !line.starts_with("remotes")).map(|line| format!("{line}\n")).collect();
        // The segment comes before the one that stays.
        alone.replacen("[[segment]]", &format!("{}{more}\n[[segment]]", red.trim_end().to_owned() + "\n"), 1)
    };
    let mut gateway = world.start_with(&alone);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let client = Client::new(&mut gateway);

    let stop = AtomicBool::new(false);
    let (counts, worked) = std::thread::scope(|scope| {
        let outward = scope.spawn(|| stream(host, remote, &remote_address(0), &stop));
        let inward = scope.spawn(|| stream(remote, host, &host_address(0), &stop));
        // The streams end with a failure too.
        let end = SetOnDrop(&stop);
        let mut worked = 0;
        for n in 0..RELOADS {
            gateway.write_config(&if n % 2 == 0 { both(n) } else { alone.clone() });
            let answer = client.ask(&json!({ "request": "reload" }));
            assert_eq!((&answer["ok"], &answer["applied"]), (&json!(true), &json!(true)), "reload {n}: {answer}");
            assert!(answer["differences"].as_array().is_some_and(|list| !list.is_empty()), "{answer}");
            if n % 40 == 0 {
                // The first packets of a new segment may wait for ARP.
                assert!((0..20).any(|_| pings(other, "10.2.0.101", 56, 1)), "the segment of reload {n} works");
                worked += 1;
            }
        }
        drop(end);
        ([outward.join().expect("a stream"), inward.join().expect("a stream")], worked)
    });
    print_uncaptured(&format!(
        "{}: {RELOADS} reloads, the new segment worked {worked} times; datagrams sent, received: {counts:?}",
        variant.name
    ));
    for (sent, received) in counts {
        assert_eq!(sent, received, "a segment that stays lost datagrams");
        assert!(sent > RELOADS as u64, "too few datagrams to tell");
    }
    // What needs a restart is refused whole.
    gateway.write_config(&both(0).replacen("name = \"lan0\"", "name = \"lan0\"\nqueues = 1", 1));
    let refused = client.ask(&json!({ "request": "reload" }));
    let error = refused["error"].as_str().unwrap_or_default();
    assert!(error.contains("needs a restart") && error.contains("port.lan0.queues"), "{refused}");
    let rows = client.ask(&json!({ "request": "show", "table": "segments" }));
    assert_eq!(rows["rows"].as_array().map(Vec::len), Some(1), "nothing was changed: {rows}");
    gateway.stop();
}

/// Adds and removes a port with its segment 50 times. Two streams of a segment on another port lose no datagram. The
/// segment of the new port works whenever it is there.
pub(crate) fn ports_come_and_go_beside_a_stream(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    world.vxlan(0, "vx1", OTHER);
    let (host, other, remote) = (&world.hosts[0], &world.hosts[1], &world.remotes[0]);
    remote.ip("addr add 10.2.0.101/24 dev vx1");
    other.ip("addr add 10.2.0.2/24 dev eth0");
    let ports = world.ports() + "[control]\nsocket = 'control.sock'\n";
    let [alone, both] = with_one_and_two_segments(&world, &ports);
    let mut gateway = world.start_with(&alone);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let client = Client::new(&mut gateway);

    let stop = AtomicBool::new(false);
    let counts = std::thread::scope(|scope| {
        let outward = scope.spawn(|| stream(host, remote, &remote_address(0), &stop));
        let inward = scope.spawn(|| stream(remote, host, &host_address(0), &stop));
        let end = SetOnDrop(&stop);
        for n in 0..PORT_CHANGES {
            for text in [&both, &alone] {
                gateway.write_config(text);
                let answer = client.ask(&json!({ "request": "reload" }));
                assert_eq!((&answer["ok"], &answer["applied"]), (&json!(true), &json!(true)), "{n}: {answer}");
                if n % 10 == 0 && *text == both {
                    assert!((0..20).any(|_| pings(other, "10.2.0.101", 56, 1)), "the port of change {n} works");
                }
            }
        }
        drop(end);
        [outward.join().expect("a stream"), inward.join().expect("a stream")]
    });
    print_uncaptured(&format!(
        "{}: {PORT_CHANGES} ports came and went; datagrams sent, received: {counts:?}",
        variant.name
    ));
    for (sent, received) in counts {
        assert_eq!(sent, received, "a segment on another port lost datagrams");
        assert!(sent > PORT_CHANGES as u64, "too few datagrams to tell");
    }
    gateway.stop();
}

/// Adds a port that receives superframes to ports that have none. They cut those that go to them.
pub(crate) fn superframes_of_a_new_port_are_cut(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    world.vxlan(0, "vx1", OTHER);
    let (other, remote) = (&world.hosts[1], &world.remotes[0]);
    remote.ip("addr add 10.2.0.101/24 dev vx1");
    other.ip("addr add 10.2.0.2/24 dev eth0");
    let ports = world.ports() + "[control]\nsocket = 'control.sock'\n";
    let [alone, both] = with_one_and_two_segments(&world, &ports);
    let at = both.rfind(crate::superframes::CUT).expect("a port that cuts superframes");
    let both = format!("{}superframes = \"whole\"{}", &both[..at], &both[at + crate::superframes::CUT.len()..]);
    let mut gateway = world.start_with(&alone);
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    gateway.write_config(&both);
    let answer = Client::new(&mut gateway).ask(&json!({ "request": "reload" }));
    assert_eq!(answer["applied"], true, "{answer}");
    assert!((0..20).any(|_| pings(other, "10.2.0.101", 56, 1)), "the new port works");
    let (sent, received) = crate::tcp::transfer(other, remote, "10.2.0.101", 8 << 20);
    assert_eq!(sent, received, "bytes and checksum, sent and received");
    let json = gateway.stop().json;
    assert!(crate::superframes::total(&json, "tx_queues", "segmented") > 10, "{json}");
    assert_eq!(json["drops"]["kernel_offload"], serde_json::Value::Null, "{json}");
}

/// Returns a configuration with the first two of three ports, and one with all. A segment belongs to each port but the
/// first.
fn with_one_and_two_segments(world: &World, ports: &str) -> [String; 2] {
    let at = ports.match_indices("[[port]]").nth(2).map(|(at, _)| at).expect("three ports");
    let end = ports.find("[underlay]").expect("an underlay");
    let blue = world.segment("blue", VNI, &["{ port = \"lan0\" }".to_owned()]);
    let red = world.segment("red", OTHER, &["{ port = \"lan1\" }".to_owned()]);
    [format!("{}{}{blue}", &ports[..at], &ports[end..]), format!("{ports}{blue}{red}")]
}

/// Bridges whose removal keeps the kernel's network configuration (RTNL) locked for some seconds.
const BRIDGES: usize = 200;

/// Adds and removes a port while the kernel's network configuration is locked. The program answers other requests, and
/// carries the change out afterwards.
pub(crate) fn a_busy_kernel_stops_no_operator(variant: Variant) {
    let world = World::new(variant, 2, 1, 1500);
    let ports = world.ports() + "[control]\nsocket = 'control.sock'\n";
    let [alone, both] = with_one_and_two_segments(&world, &ports);
    let mut gateway = world.start_with(&alone);
    let host = &world.hosts[0];
    world.wait_for(&mut gateway, host, &remote_address(0));
    let client = Client::new(&mut gateway);
    let mut bridges = String::new();
    for n in 0..BRIDGES {
        writeln!(bridges, "link add b{n} group 7 type bridge").expect("a string grows");
    }
    let batch = gateway.file("bridges");
    std::fs::write(&batch, bridges).expect("a file");
    for (change, text) in [("add", &both), ("remove", &alone)] {
        host.ip(&format!("-batch {}", batch.display()));
        gateway.write_config(text);
        let done = AtomicBool::new(false);
        let (locked, changed, slowest) = std::thread::scope(|scope| {
            let locked = scope.spawn(|| {
                let begin = Instant::now();
                host.ip("link del group 7");
                begin.elapsed()
            });
            std::thread::sleep(Duration::from_millis(200));
            let changed = scope.spawn(|| {
                let _end = SetOnDrop(&done);
                let begin = Instant::now();
                let answer = client.ask(&json!({ "request": "reload" }));
                assert_eq!((&answer["ok"], &answer["applied"]), (&json!(true), &json!(true)), "{answer}");
                begin.elapsed()
            });
            let mut slowest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let begin = Instant::now();
                assert_eq!(client.ask(&json!({ "request": "status" }))["ok"], json!(true));
                slowest = slowest.max(begin.elapsed());
                std::thread::sleep(Duration::from_millis(20));
            }
            (locked.join().expect("a removal"), changed.join().expect("a change"), slowest)
        });
        print_uncaptured(&format!(
            "{}: {change}: locked {locked:?}, changed {changed:?}, answer {slowest:?}",
            variant.name
        ));
        assert!(changed > locked / 2, "the change needs no answer of the kernel, so the test shows nothing");
        assert!(slowest < locked / 2, "{change}: no answer for {slowest:?}, while the kernel was busy for {locked:?}");
    }
    gateway.stop();
}

/// Sends numbered datagrams until `stop`. Returns the numbers of sent and of received ones.
fn stream(from: &Namespace, to: &Namespace, address: &str, stop: &AtomicBool) -> (u64, u64) {
    let receiver = to.inside(|| UdpSocket::bind((address, 7000)).expect("bind"));
    receiver.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout");
    let sender = from.inside(|| UdpSocket::bind("0.0.0.0:0").expect("bind"));
    std::thread::scope(|scope| {
        let received = scope.spawn(|| {
            let (mut count, mut bytes) = (0, [0; 8]);
            while receiver.recv(&mut bytes).is_ok() {
                assert_eq!(u64::from_be_bytes(bytes), count, "the next datagram, in order");
                count += 1;
            }
            count
        });
        let mut sent = 0u64;
        while !stop.load(Ordering::Relaxed) {
            sender.send_to(&sent.to_be_bytes(), (address, 7000)).expect("send");
            sent += 1;
            std::thread::sleep(PACE);
        }
        (sent, received.join().expect("the receiver"))
    })
}
