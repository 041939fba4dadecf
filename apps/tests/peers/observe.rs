use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use wirepath::cli::Stop;
use wirepath::control_socket::Client;
use wirepath_testlab::{Namespace, eventually, oracle};

use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, host_address, pings, remote_address};

/// Frames with an unknown VNI that a test sends.
const STRANGE: usize = 20;

/// Traces show the lookups in both directions and end as the counters and the peers say. A capture has the drops with
/// their reason, and all packets with their direction.
pub(crate) fn traces_and_captures_tell_the_truth(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let config = world.one_segment() + "[control]\nsocket = 'operators.sock'\n[rules]\nhardware = \"off\"\n";
    let mut gateway = world.start_with(&config);
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    world.wait_for(&mut gateway, host, &remote_address(0));
    let socket = gateway.path("operators.sock");
    let files = tempfile::tempdir().expect("a folder");
    let (all, drops) = (files.path().join("all.pcapng"), files.path().join("drops.pcapng"));
    let inner = files.path().join("inner.pcapng");
    let captures = [
        capture(&socket, &all, &[]),
        capture(&socket, &drops, &["--drops=unknown_vni"]),
        capture(&socket, &inner, &["--segment", "blue", "--rule", "icmp"]),
    ];
    let refused = Client::connect(&socket).expect("a connection").ask(&json!({
        "request": "capture", "segment": "blu", "count": 1
    }));
    assert!(format!("{refused:?}").contains("did you mean"), "{refused:?}");

    // A ping of the host goes out of the tunnel port, and the answer comes back.
    let mut out = Trace::start(&socket, &json!({ "port": "lan0", "pattern": "icmp", "count": 2 }));
    let mut back = Trace::start(&socket, &json!({ "port": "wan", "pattern": "udp dst 4789 / vxlan", "count": 2 }));
    assert!(pings(host, &remote_address(0), 56, 2), "answered");
    let (near, far) = (mac(host, "eth0"), mac(remote, "vx0"));
    let (vtep, address) = (variant.vtep(), variant.remote(0));
    let outer = if variant.ipv6 { "ipv6" } else { "ipv4" };
    for (n, trace) in out.read(2).iter().enumerate() {
        check(
            trace,
            "wan",
            &[
                "port lan0 queue 0 worker 0, 98 bytes".to_owned(),
                "icmp echo request id".to_owned(),
                format!("seq {}", n + 1),
                format!("frame from port lan0: segment of VNI {VNI}"),
                format!("FDB {far} in segment {VNI}: remote {address}"),
                format!("remote {address}: next hop is resolved"),
                format!("bytes added; now eth {} > {}", mac(&world.gateway, "wan"), mac(remote, "eth0")),
                format!("{outer} {vtep} > {address}"),
                format!("vxlan vni {VNI} / eth {near} > {far} / ipv4 {} > {}", host_address(0), remote_address(0)),
            ],
        );
    }
    for trace in back.read(2) {
        check(
            &trace,
            "lan0",
            &[
                format!("{outer} {address} > {vtep}"),
                format!("frame from remote {address}: segment of VNI {VNI}"),
                format!("FDB {near} in segment {VNI}: port lan0"),
                format!("bytes removed; now eth {far} > {near} / ipv4 {} > {}", remote_address(0), host_address(0)),
                "icmp echo reply".to_owned(),
            ],
        );
    }

    // Tunnel packets of an unknown network are dropped.
    let mut strange = Trace::start(&socket, &json!({ "pattern": "udp / vxlan vni 99", "count": STRANGE }));
    let ip = if variant.ipv6 { "IPv6" } else { "IP" };
    let script = format!(
        "emit(Ether(src='{}', dst='{}')/{ip}(src='{address}', dst='{vtep}')/UDP(sport=50000, dport=4789)\
         /VXLAN(vni=99, flags='Instance')/Ether(src='{far}', dst='{near}')/IP()/UDP())",
        mac(remote, "eth0"),
        mac(&world.gateway, "wan"),
    );
    let none: [&[u8]; 0] = [];
    let frame = oracle::scapy(&none, &script).frames.remove(0);
    let outside = remote.frames("eth0");
    (0..STRANGE).for_each(|_| outside.send(&frame).expect("sent"));
    for trace in strange.read(STRANGE) {
        assert_eq!((&trace["ends"][0]["end"], &trace["ends"][0]["reason"]), (&json!("dropped"), &json!("unknown_vni")));
        assert_eq!(trace["ends"].as_array().map(Vec::len), Some(1), "{trace}");
    }

    // The packets are in the files before the program stops, because a capture is live.
    assert!(eventually(WAIT_LIMIT, || count(&drops, "frame.comment contains \"unknown_vni: \"") == STRANGE));
    for capture in captures {
        end(capture);
    }
    assert_eq!(count(&drops, ""), STRANGE, "no other packet");
    let inbound = |filter: &str| format!("frame.packet_flags_direction == 1 && {filter}");
    assert_eq!(count(&all, &inbound("frame.interface_name == \"wan\" && vxlan.vni == 99")), STRANGE);
    assert_eq!(count(&all, &inbound("frame.interface_name == \"lan0\" && icmp.type == 8")), 2);
    assert_eq!(count(&all, "frame.packet_flags_direction == 2 && vxlan.vni == 42 && icmp.type == 8"), 2);
    assert_eq!(count(&all, "frame.packet_flags_direction == 2 && !vxlan && icmp.type == 0"), 2);
    assert_eq!(count(&all, "frame.comment && vxlan.vni == 99"), STRANGE);
    // Each ping and its answer enter the segment once.
    assert_eq!((count(&inner, "icmp.type == 8"), count(&inner, "icmp.type == 0"), count(&inner, "")), (2, 2, 4));
    assert_eq!(count(&inner, "vxlan || frame.len != 98"), 0);
    assert_eq!(count(&inner, "frame.interface_name == \"lan0\""), 2);
    let summary = gateway.stop();
    assert_eq!(summary.drops("unknown_vni"), STRANGE as u64, "{}", summary.json);
}

fn mac(namespace: &Namespace, device: &str) -> String {
    colons(namespace.mac(device))
}

/// Checks the only end of a trace, and parts of its text in their order.
#[track_caller]
fn check(trace: &Value, port: &str, parts: &[String]) {
    assert_eq!(trace["ends"], json!([{ "end": "sent", "port": port, "queue": 0, "packets": 1 }]), "{trace}");
    let steps = trace["steps"].as_array().expect("a list");
    let text: String = steps.iter().map(|step| format!("{}\n", step["text"].as_str().expect("a text"))).collect();
    let mut rest = text.as_str();
    for part in parts {
        let at = rest.find(part.as_str()).unwrap_or_else(|| panic!("{part} is missing:\n{text}"));
        rest = &rest[at..];
    }
}

/// A request for traces to which all workers have agreed.
struct Trace {
    client: Client,
    stop: Stop,
}

impl Trace {
    fn start(socket: &Path, arguments: &Value) -> Self {
        let mut request = arguments.clone();
        request["request"] = "trace".into();
        request["seconds"] = WAIT_LIMIT.as_secs().into();
        let mut client = Client::connect(socket).expect("a connection");
        client.subscribe(&request).expect("sent");
        let stop = Stop::manual().expect("a stop request");
        let line = client.next_line(&stop).expect("accepted").expect("a line");
        assert_eq!(line["more"], true);
        Self { client, stop }
    }

    /// Returns all traces, of which there must be `expected`.
    #[track_caller]
    fn read(&mut self, expected: usize) -> Vec<Value> {
        let mut traces = Vec::new();
        loop {
            let mut line = self.client.next_line(&self.stop).expect("an answer").expect("a line");
            if line["more"] != true {
                assert_eq!((traces.len(), line["traced"].as_u64()), (expected, Some(expected as u64)), "{line}");
                return traces;
            }
            traces.push(line["trace"].take());
        }
    }
}

/// Starts a capture, and returns when it has begun.
fn capture(socket: &Path, file: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
    command.arg("capture").arg("--socket").arg(socket).arg("-w").arg(file).args(arguments);
    let child = command.stderr(Stdio::null()).spawn().expect("the tool starts");
    assert!(eventually(WAIT_LIMIT, || file.metadata().is_ok_and(|data| data.len() > 0)), "it begins");
    child
}

fn end(mut capture: Child) {
    kill_process(Pid::from_child(&capture), Signal::INT).expect("a signal");
    assert_eq!(capture.wait().expect("an end").code(), Some(0));
}

/// Returns the number of packets in a file that match a filter of tshark. The file may still grow.
fn count(file: &Path, filter: &str) -> usize {
    let output = Command::new("tshark").arg("-n").arg("-r").arg(file).args(["-Y", filter]).output().expect("tshark");
    String::from_utf8_lossy(&output.stdout).lines().count()
}
