//! Superframes of the kernel through the gateway, of TCP and of UDP: whole, or cut by the port that sends them.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use wirepath_testlab::{Lab, Namespace, SetOnDrop, Veth, eventually, print_uncaptured};

use crate::program::Program;
use crate::world::{GATEWAY, VNI, Variant, WAIT_LIMIT, World, host_address, pings, remote_address};

/// Key of a port that cuts superframes as it receives them. All others pass them on.
pub(crate) const CUT: &str = "superframes = \"cut\"";
/// Bytes of TCP in each direction.
const BYTES: u64 = 32 << 20;
/// Datagrams of a UDP stream.
pub(crate) const DATAGRAMS: u32 = 5000;
/// Datagrams of a superframe of UDP.
const BURST: u32 = 40;
/// Superframes of UDP in all directions of [`bursts`].
const BURSTS: u64 = 4 * (DATAGRAMS / BURST) as u64;

/// Adds IPv6 addresses inside the tunnel. Returns that of the host and that of the remote.
fn inner_ipv6(host: &Namespace, host_interface: &str, remote: &Namespace) -> [&'static str; 2] {
    for (namespace, interface, address) in [(host, host_interface, "fd00:1::1"), (remote, "vx0", "fd00:1::2")] {
        namespace.ipv6(interface);
        namespace.ip(&format!("addr add {address}/64 dev {interface} nodad"));
    }
    ["fd00:1::1", "fd00:1::2"]
}

/// Sends TCP and UDP in both directions over both IP versions. Both ends see the same bytes.
fn streams(host: &Namespace, remote: &Namespace, inner6: [&str; 2]) {
    let inner4 = [host_address(0), remote_address(0)];
    for [here, there] in [[inner4[0].as_str(), inner4[1].as_str()], inner6] {
        assert!(eventually(WAIT_LIMIT, || pings(host, there, 56, 1)), "{there} does not answer");
        for (from, to, address) in [(host, remote, there), (remote, host, here)] {
            let (sent, received) = crate::tcp::transfer(from, to, address, BYTES);
            assert_eq!((sent, sent.0), (received, BYTES), "bytes and checksum to {address}");
            let arrived = datagrams(from, to, address);
            // A receiver that waits for the processor of a busy machine loses some.
            assert!(arrived > DATAGRAMS / 2, "{arrived} datagrams to {address}");
        }
    }
}

/// Sends superframes of UDP in both directions over both IP versions. The receivers get the datagrams of the senders.
fn bursts(host: &Namespace, remote: &Namespace, inner6: [&str; 2]) {
    let inner4 = [host_address(0), remote_address(0)];
    for [here, there] in [[inner4[0].as_str(), inner4[1].as_str()], inner6] {
        assert!(eventually(WAIT_LIMIT, || pings(host, there, 56, 1)), "{there} does not answer");
        for (from, to, address) in [(host, remote, there), (remote, host, here)] {
            let arrived = segmented_datagrams(from, to, address);
            assert!(arrived > DATAGRAMS / 2, "{arrived} datagrams to {address}");
        }
    }
}

/// Sends numbered datagrams by `UDP_SEGMENT`: those of a burst have one length, but the last one is shorter. They
/// arrive as if each was sent by itself. Returns how many arrived.
fn segmented_datagrams(from: &Namespace, to: &Namespace, address: &str) -> u32 {
    const SIZE: usize = 1200;
    const LAST: usize = 700;
    let content = |number: u32| {
        let len = if number % BURST == BURST - 1 { LAST } else { SIZE };
        [&number.to_be_bytes()[..], &vec![number as u8; len - 4]].concat()
    };
    numbered(to, address, content, || {
        let script = format!(
            "import socket, sys, time\n\
             it = socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)\n\
             it.connect((sys.argv[1], 5002))\n\
             # SOL_UDP and UDP_SEGMENT of linux/udp.h\n\
             it.setsockopt(17, 103, {SIZE})\n\
             for first in range(0, {DATAGRAMS}, {BURST}):\n\
             \x20 length = lambda n: {LAST} if n == first + {BURST} - 1 else {SIZE}\n\
             \x20 it.send(b''.join(n.to_bytes(4, 'big') + bytes([n & 255]) * (length(n) - 4) \
             for n in range(first, first + {BURST})))\n\
             \x20 time.sleep(0.002)\n"
        );
        let sent = from.run(&["python3", "-c", &script, address]);
        assert!(sent.success, "{}", sent.stderr);
    })
}

/// Sends numbered datagrams of several lengths. They arrive as they were sent and in order; datagrams that overflow
/// the receiver may be missing. Returns how many arrived.
pub(crate) fn datagrams(from: &Namespace, to: &Namespace, address: &str) -> u32 {
    let content = |number: u32| [&number.to_be_bytes()[..], &vec![number as u8; number as usize % 1300]].concat();
    let any = if address.contains(':') { "::" } else { "0.0.0.0" };
    let sender = from.inside(|| UdpSocket::bind((any, 0)).expect("bind"));
    numbered(to, address, content, || {
        for number in 0..DATAGRAMS {
            sender.send_to(&content(number), (address, 5002)).expect("sent");
            if number % 32 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    })
}

/// Receives the datagrams that `send` sends. Each begins with its number, for which `content` returns all bytes.
/// Returns how many arrived.
fn numbered(to: &Namespace, address: &str, content: impl Fn(u32) -> Vec<u8> + Sync, send: impl FnOnce()) -> u32 {
    let receiver = to.inside(|| UdpSocket::bind((address, 5002)).expect("bind"));
    receiver.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout");
    // All datagrams wait if the machine is busy.
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, 32 << 20).expect("a buffer");
    let is_sent = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let arrived = scope.spawn(|| {
            let (mut buffer, mut next, mut count) = (vec![0; 65_536], 0, 0);
            while next < DATAGRAMS {
                let n = match receiver.recv(&mut buffer) {
                    Ok(n) => n,
                    Err(_) if is_sent.load(Ordering::Acquire) => break,
                    // A sender may take long to start.
                    Err(_) => continue,
                };
                let number = u32::from_be_bytes(*buffer.first_chunk().expect("a number"));
                assert!(
                    number >= next && buffer[..n] == content(number),
                    "datagram {number} of {n} bytes after {next}"
                );
                (next, count) = (number + 1, count + 1);
            }
            count
        });
        {
            let _end = SetOnDrop(&is_sent);
            send();
        }
        arrived.join().expect("the receiver")
    })
}

/// Returns the sum of a counter over the queues of a kind.
pub(crate) fn total(json: &Value, queues: &str, counter: &str) -> u64 {
    let ports = json["ports"].as_array().expect("ports");
    let queues = ports.iter().flat_map(|port| port[queues].as_array().expect("queues"));
    queues.map(|queue| queue[counter].as_u64().unwrap_or(0)).sum()
}

/// Ports drop frames that are not for the gateway, that meet an interface that is down, or that overflow a receive
/// ring, and no others. TCP raises its rate until a queue on the way overflows (RFC 5681), here a receive ring.
pub(crate) fn assert_no_loss(json: &Value) {
    assert_no_loss_but(json, &[]);
}

/// Ports drop no frames but those of [`assert_no_loss`], and of these reasons.
pub(crate) fn assert_no_loss_but(json: &Value, expected: &[&str]) {
    let drops = json["drops"].as_object().expect("drops");
    let harmless = [&["not_for_us", "link_down", "rx_full"], expected].concat();
    let lost: Vec<_> = drops.iter().filter(|(reason, _)| !harmless.contains(&reason.as_str())).collect();
    assert!(lost.is_empty(), "{lost:?}");
    assert_eq!(json["in_flight"], 0, "{json}");
}

/// Superframes pass from kernel to kernel as one packet.
fn assert_whole(json: &Value) {
    assert_no_loss(json);
    let (packets, bytes) = (total(json, "tx_queues", "packets"), total(json, "tx_queues", "bytes"));
    // Four streams of TCP. Their acknowledgements and the datagrams are small.
    assert!(bytes > 4 * BYTES && packets < bytes / 2500, "{packets} packets have {bytes} bytes");
}

/// Streams between veth interfaces.
pub(crate) fn pass_whole(variant: Variant) {
    let json = veth_streams(variant);
    assert_whole(&json);
    assert_eq!(total(&json, "tx_queues", "segmented"), 0, "{json}");
}

/// Streams between ports that cut superframes as they receive them.
pub(crate) fn are_cut_at_once(variant: Variant) {
    let json = veth_streams(variant);
    assert_no_loss(&json);
    let (cut, left) = (total(&json, "rx_queues", "segmented"), total(&json, "tx_queues", "packets"));
    assert!(cut > 100 && left > 4 * BYTES / 1500, "{cut} superframes cut, {left} packets sent");
}

/// Streams where superframes come in by one port, and the other one sends frames.
pub(crate) fn are_cut_in_software(variant: Variant) {
    let json = veth_streams(variant);
    assert_no_loss(&json);
    let (cut, left) = (total(&json, "tx_queues", "segmented"), total(&json, "tx_queues", "packets"));
    assert!(cut > 100 && left > BYTES / 1500 + cut, "{cut} superframes cut, {left} packets sent");
}

/// Streams where superframes come in by a port of the kernel and leave in tunnels by a NIC that segments them.
pub(crate) fn are_segmented_by_the_nic(variant: Variant) {
    let (json, nics) = between_veths(variant, "", streams);
    assert_no_loss(&json);
    let queue = &nics["devices"][0]["send_queues"][0];
    let (whole, left) = (queue["segmented_in_tunnels"].as_u64(), queue["packets"].as_u64());
    assert!(whole > Some(100) && left > Some(2 * BYTES / 1500), "{nics}");
    // Two of the four streams come from the tunnel as frames. Software cuts superframes of two frames if the outer
    // header has a checksum, as over IPv6.
    let cut = total(&json, "tx_queues", "segmented");
    assert!(if variant.ipv6 { Some(cut * 10) < whole } else { cut == 0 }, "{cut} cut: {json}");
    print_uncaptured(&format!("{}: {whole:?} superframes in {left:?} frames, {cut} cut", variant.name));
}

/// Streams where each port joins the packets that it receives.
pub(crate) fn are_joined(variant: Variant) {
    let json = streams_with(variant, "gro = true");
    assert_no_loss(&json);
    let (joined, left) = (total(&json, "rx_queues", "joined"), total(&json, "tx_queues", "packets"));
    assert!(joined > 1000, "{joined} packets joined, {left} packets sent");
}

/// Superframes of UDP between veth interfaces.
pub(crate) fn datagrams_pass_whole(variant: Variant) {
    assert_datagrams_whole(&bursts_with(variant, ""));
}

/// Superframes of UDP pass from kernel to kernel as one packet.
fn assert_datagrams_whole(json: &Value) {
    assert_no_loss(json);
    let (packets, bytes) = (total(json, "tx_queues", "packets"), total(json, "tx_queues", "bytes"));
    // The others are pings, and messages of ARP and ND.
    assert!(bytes > BURSTS * 40_000 && packets < BURSTS + 200, "{packets} packets have {bytes} bytes");
    assert_eq!(total(json, "tx_queues", "segmented"), 0, "{json}");
}

/// Superframes of UDP between ports that cut them as they receive them.
pub(crate) fn datagrams_are_cut_at_once(variant: Variant) {
    let json = bursts_with(variant, "");
    assert_no_loss(&json);
    let (cut, left) = (total(&json, "rx_queues", "segmented"), total(&json, "tx_queues", "packets"));
    assert!(cut >= BURSTS && left >= BURSTS * u64::from(BURST), "{cut} superframes cut, {left} packets sent");
}

/// Superframes of UDP come in by one port, and the other one sends datagrams.
pub(crate) fn datagrams_are_cut_in_software(variant: Variant) {
    let json = bursts_with(variant, "");
    assert_no_loss(&json);
    let (cut, left) = (total(&json, "tx_queues", "segmented"), total(&json, "tx_queues", "packets"));
    assert!(cut >= BURSTS / 2 && left > cut * u64::from(BURST), "{cut} superframes cut, {left} packets sent");
}

/// Each port joins the datagrams that it receives.
pub(crate) fn datagrams_are_joined(variant: Variant) {
    let json = bursts_with(variant, "gro = true");
    assert_no_loss(&json);
    let (joined, left) = (total(&json, "rx_queues", "joined"), total(&json, "tx_queues", "packets"));
    assert!(joined > 1000, "{joined} datagrams joined, {left} packets sent");
}

fn veth_streams(variant: Variant) -> Value {
    streams_with(variant, "")
}

/// `keys` are keys of each port.
fn streams_with(variant: Variant, keys: &str) -> Value {
    between_veths(variant, keys, streams).0
}

fn bursts_with(variant: Variant, keys: &str) -> Value {
    between_veths(variant, keys, bursts).0
}

/// Sends something between host and remote with the IPv6 addresses of both ends.
type Traffic = fn(&Namespace, &Namespace, [&str; 2]);

/// Returns the summary and the counters of emulated NICs, if there are any.
fn between_veths(variant: Variant, keys: &str, send: Traffic) -> (Value, Value) {
    let world = World::new(variant, 1, 1, 1500);
    let gateway = world.start_with(&world.one_segment().replace("[[port]]\n", &format!("[[port]]\n{keys}\n")));
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    remote.ip("link set vx0 mtu 1430");
    host.ip("link set eth0 mtu 1430");
    let inner6 = inner_ipv6(host, "eth0", remote);
    send(host, remote, inner6);
    let nics = if variant.is_emulated() { gateway.nic_counters() } else { Value::Null };
    (gateway.stop().json, nics)
}

/// Streams between TAP interfaces.
pub(crate) fn pass_whole_between_taps(variant: Variant) {
    assert_whole(&to_taps(variant, "", streams));
}

/// Superframes of UDP between TAP interfaces.
pub(crate) fn datagrams_pass_whole_between_taps(variant: Variant) {
    assert_datagrams_whole(&to_taps(variant, "", bursts));
}

/// Datagrams in tunnels are joined as they arrive by a veth interface, and reach a TAP interface as superframes.
pub(crate) fn datagrams_are_joined_for_a_tap(variant: Variant) {
    let json = to_taps(variant, "gro = true", bursts);
    assert_no_loss(&json);
    let ports = json["ports"].as_array().expect("ports");
    let lan = ports.iter().find(|port| port["name"] == "lan").expect("the TAP interface");
    let packets = lan["tx_queues"][0]["packets"].as_u64().expect("a number");
    let joined = total(&json, "rx_queues", "joined");
    assert!(joined > 1000 && packets < u64::from(DATAGRAMS), "{joined} datagrams joined, {packets} sent to the host");
    assert_eq!(lan["tx_queues"][0]["segmented"], 0, "{json}");
}

/// Sends something between two TAP interfaces, which the gateway creates and which move to the namespaces of their
/// hosts. With another driver of the underlay port, that one is a veth interface.
fn to_taps(variant: Variant, keys: &str, send: Traffic) -> Value {
    let lab = Lab::new(&variant.name.replace("::", "-"));
    let [gateway, host, remote] = ["gw", "host", "remote"].map(|name| lab.namespace(name));
    let (vtep, peer) = (variant.vtep(), variant.remote(0));
    let prefix = if variant.ipv6 { 64 } else { 24 };
    let ports = variant.port(0, "wan", keys) + &variant.port(1, "lan", keys);
    let taps: &[_] = if variant.driver == "tap" { &[("wan", &remote), ("lan", &host)] } else { &[("lan", &host)] };
    if variant.driver != "tap" {
        Veth::new((&gateway, "wan"), (&remote, "wan")).mtu(1500).plug();
    }
    let config = format!(
        "{ports}[underlay]\nport = \"wan\"\naddresses = [\"{vtep}/{prefix}\"]\n[[segment]]\nname = \"blue\"\nvni = \
         {VNI}\nremotes = [\"{peer}\"]\nports = [{{ port = \"lan\" }}]\n"
    );
    let program = Program::start(&gateway, GATEWAY, &config);
    let is_up = |name| gateway.run(&["ip", "link", "show", name, "up"]).stdout.contains("LOWER_UP");
    assert!(eventually(WAIT_LIMIT, || is_up("wan") && is_up("lan")), "the gateway creates its interfaces");
    // The start uses the interfaces by name until its end.
    std::thread::sleep(Duration::from_millis(500));
    for (name, to) in taps {
        gateway.ip(&format!("link set {name} netns {}", to.name()));
        to.ip(&format!("link set {name} up"));
    }
    if variant.ipv6 {
        remote.ipv6("wan");
        remote.ip(&format!("addr add {peer}/{prefix} dev wan nodad"));
    } else {
        remote.ip(&format!("addr add {peer}/{prefix} dev wan"));
    }
    remote.ip(&format!("link add vx0 type vxlan id {VNI} local {peer} remote {vtep} dev wan dstport 4789"));
    remote.ip("link set vx0 mtu 1430 up");
    remote.ip(&format!("addr add {}/24 dev vx0", remote_address(0)));
    host.ip("link set lan mtu 1430");
    host.ip(&format!("addr add {}/24 dev lan", host_address(0)));
    let inner6 = inner_ipv6(&host, "lan", &remote);
    send(&host, &remote, inner6);
    program.stop().json
}
