//! Changes of the gateway's configuration under traffic.

use std::io::{BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use wirepath_testlab::{Namespace, print_uncaptured};

use crate::program::Program;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, host_address, pings, remote_address};

/// VNI of the segment that changes.
const OTHER: u32 = 43;
const RELOADS: usize = 200;
/// Time between two datagrams of a stream.
const PACE: Duration = Duration::from_micros(500);

/// Sets a flag when it is dropped.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A connection to the control socket of a program.
struct Client(BufReader<UnixStream>);

impl Client {
    fn new(program: &Program) -> Self {
        let stream = wirepath_control_socket::connect(&program.file("control.sock"), WAIT_LIMIT).expect("the socket");
        Self(BufReader::new(stream))
    }

    fn ask(&mut self, request: &Value) -> Value {
        writeln!(self.0.get_mut(), "{request}").expect("a request");
        let mut line = String::new();
        self.0.read_line(&mut line).expect("an answer");
        serde_json::from_str(&line).expect("JSON")
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
    let mut client = Client::new(&gateway);

    let stop = AtomicBool::new(false);
    let (counts, worked) = std::thread::scope(|scope| {
        let outward = scope.spawn(|| stream(host, remote, &remote_address(0), &stop));
        let inward = scope.spawn(|| stream(remote, host, &host_address(0), &stop));
        // The streams end with a failure too.
        let end = StopAtEnd(&stop);
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
