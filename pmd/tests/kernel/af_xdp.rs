//! `af_xdp` on a real kernel: checksums, VLAN tags, foreign XDP programs, frames for the kernel, and `auto`.

use std::net::UdpSocket;
use std::time::Duration;

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Pool};
use wirepath_pmd::port::{PortEvent, StartedPort, VlanTags};
use wirepath_testlab::{Namespace, Requirement, VlanTagger, eventually, oracle, require, spawn};

use crate::common;
use crate::forwarder::{self, Forwarder};
use crate::topology::{Line, Pair, Requests};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Keys of the table `[port.af_xdp]`, and the mode that they select.
const WAYS: [(&str, &str); 3] = [
    ("", "native XDP, copy, fragments, need-wakeup"),
    ("mode = \"generic\"\n", "generic XDP, copy, fragments, need-wakeup"),
    ("pool_as_umem = false\n", "native XDP, copy, fragments, need-wakeup, separate UMEM"),
];

/// Forwards between the two hosts of a line. `keys` belong to the table `[port.af_xdp]`.
fn forward(line: &Line, mtu: u32, keys: &str) -> Forwarder {
    if keys.contains("generic") {
        // As the port's notes say. Native XDP on a veth disables segmentation at the peer by itself.
        for host in [&line.left, &line.right] {
            host.run(&["ethtool", "-K", "eth0", "tso", "off", "gso", "off"]).expect();
        }
    }
    let table = |device| format!("driver = \"af_xdp\"\ndevice = \"{device}\"\nmtu = {mtu}\n[port.af_xdp]\n{keys}");
    Forwarder::start(&line.dut, [table("west"), table("east")])
}

impl Pair {
    /// Starts an `af_xdp` port. `keys` belong to the table `[port.af_xdp]`.
    fn start(&self, keys: &str) -> Result<StartedPort, String> {
        self.start_with("driver = \"af_xdp\"\n", keys)
    }

    fn start_with(&self, port_keys: &str, keys: &str) -> Result<StartedPort, String> {
        let table = format!("device = \"eth0\"\n{port_keys}[port.af_xdp]\n{keys}");
        common::start(&table, &self.pool).map_err(|error| error.to_string())
    }
}

/// An experimental frame (EtherType 0x88b5) with a number.
fn numbered(number: u8) -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &[0x88, 0xb5], &[number; 46]].concat()
}

/// Polls all queues until `count` frames that `wanted` accepts have arrived.
fn collect(port: &mut StartedPort, count: usize, wanted: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
    let mut got: Vec<Vec<u8>> = Vec::new();
    eventually(TIMEOUT, || {
        for queue in &mut port.rx {
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            got.extend(
                batch
                    .iter()
                    .map(|packet| packet.segments().flatten().copied().collect::<Vec<u8>>())
                    .filter(|f| wanted(f)),
            );
        }
        got.len() >= count
    });
    got
}

fn ours(frame: &[u8]) -> bool {
    frame[..6] == [2; 6]
}

fn stop(it: StartedPort) {
    it.port.stop(it.rx, it.tx).expect("stops");
}

#[test]
fn partial_checksums_are_completed() {
    require!(all Requirement::LAB, Requirement::Program("tshark"), Requirement::Program("ethtool"));
    for (how, mode) in WAYS {
        let line = Line::new("sums", 1500);
        let forwarder = forward(&line, 1500, how);
        let mut tap = line.right.frames("eth0");
        forwarder::tcp(&line.left, &line.right, "192.0.2.2".parse().unwrap(), 1 << 20);
        let frames: Vec<_> = tap.drain().into_iter().map(|frame| frame.bytes).take(300).collect();
        forwarder::tcp(&line.left, &line.right, "2001:db8::2".parse().unwrap(), 1 << 20);
        udp(&line.left, &line.right, 1400);
        let done = forwarder.finish();
        assert_eq!(done.modes, [mode, mode]);
        assert!(done.rx[0].completed_checksums > 0, "{mode}: {done:?}");
        done.assert_no_drops();
        assert!(frames.len() > 50 && frames.iter().all(|frame| frame.len() <= 1514));
        oracle::assert_clean(&frames);
    }
}

/// Sends a datagram there and back.
fn udp(left: &Namespace, right: &Namespace, bytes: usize) {
    let to = right.inside(|| UdpSocket::bind("192.0.2.2:0").unwrap());
    let from = left.inside(|| UdpSocket::bind("192.0.2.1:0").unwrap());
    for socket in [&to, &from] {
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    }
    let (data, mut got) = (forwarder::pattern(bytes), vec![0; bytes + 1]);
    from.send_to(&data, to.local_addr().unwrap()).unwrap();
    let (n, back) = to.recv_from(&mut got).unwrap();
    assert!(got[..n] == data);
    to.send_to(&data, back).unwrap();
    assert_eq!(from.recv(&mut got).unwrap(), bytes);
}

#[test]
fn generic_xdp_drops_and_counts_superframes() {
    require!(all Requirement::LAB);
    let line = Line::new("super", 1500);
    let pool = common::pool();
    let listener = line.right.inside(|| std::net::TcpListener::bind("192.0.2.2:0").unwrap());
    let table = |device| format!("driver = \"af_xdp\"\ndevice = \"{device}\"\n[port.af_xdp]\nmode = \"generic\"\n");
    line.dut.inside(|| {
        let [mut west, mut east] = ["west", "east"].map(|device| common::start(&table(device), &pool).unwrap());
        assert!(west.port.capabilities().notes.iter().any(|note| note.contains("tso off gso off")));
        let dropped = |port: &StartedPort| {
            let drops = port.port.rx_statistics().remove(0).drops;
            drops.iter().any(|(reason, n)| *reason == DropReason::KernelOffload && *n > 0)
        };
        // The client starts after the ports. Its address resolution fails after three seconds without them.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                line.left.inside(|| {
                    // The connection succeeds, but a long write does not: its superframes cannot be segmented.
                    let address = listener.local_addr().unwrap();
                    let mut stream = std::net::TcpStream::connect_timeout(&address, TIMEOUT).unwrap();
                    std::io::Write::write_all(&mut stream, &forwarder::pattern(60_000)).unwrap();
                    std::thread::sleep(Duration::from_millis(300));
                });
            });
            assert!(eventually(TIMEOUT, || {
                forwarder::carry(&mut west.rx[0], &mut east.tx[0]);
                forwarder::carry(&mut east.rx[0], &mut west.tx[0]);
                dropped(&west)
            }));
        });
        assert_eq!(east.port.tx_statistics()[0].dropped(), 0);
        stop(west);
        stop(east);
    });
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn jumbo_frames_with_partial_checksums_come_as_chains() {
    require!(all Requirement::LAB, Requirement::Program("ethtool"));
    for (how, mode) in WAYS {
        let line = Line::new("jumbo", 9202);
        let forwarder = forward(&line, 9202, how);
        forwarder::tcp(&line.left, &line.right, "192.0.2.2".parse().unwrap(), 4 << 20);
        udp(&line.left, &line.right, 9000);
        let done = forwarder.finish();
        assert!(done.tx[1].bytes / done.tx[1].packets > 4096, "{mode}: not in large frames: {done:?}");
        assert!(done.rx[0].completed_checksums > 0, "{mode}: {done:?}");
        done.assert_no_drops();
    }
}

#[test]
fn vxlan_with_partial_checksums_inside_is_completed() {
    require!(all Requirement::LAB, Requirement::Program("tshark"), Requirement::LinkType("vxlan"));
    let line = Line::new("vxlan", 1500);
    for (host, me, other) in [(&line.left, 1, 2), (&line.right, 2, 1)] {
        host.ip(&format!(
            "link add vx0 type vxlan id 42 local 192.0.2.{me} remote 192.0.2.{other} dstport 4789 udpcsum"
        ));
        host.ip(&format!("link add vx1 type vxlan id 43 local 2001:db8::{me} remote 2001:db8::{other} dstport 4789"));
        for (name, number) in [("vx0", 0), ("vx1", 1)] {
            host.ip(&format!("addr add 198.51.{number}.{me}/24 dev {name}"));
            host.ip(&format!("link set {name} up"));
        }
    }
    let forwarder = forward(&line, 1500, "");
    let mut tap = line.right.frames("eth0");
    let mut frames = Vec::new();
    for number in 0..2 {
        forwarder::tcp(&line.left, &line.right, format!("198.51.{number}.2").parse().unwrap(), 1 << 20);
        frames.extend(tap.drain().into_iter().map(|frame| frame.bytes).take(200));
    }
    let done = forwarder.finish();
    assert!(done.rx[0].completed_checksums > 100, "{done:?}");
    done.assert_no_drops();
    oracle::assert_clean(&frames);
}

#[test]
fn tags_beside_the_frame_are_restored_by_native_xdp() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 8));
    let line = Line::new("tags", 1500);
    let _left = VlanTagger::new(&line.left, "eth0", 100);
    let _right = VlanTagger::new(&line.right, "eth0", 100);
    let mut tap = line.right.frames("eth0");
    let forwarder = forward(&line, 1500, "");
    forwarder::tcp(&line.left, &line.right, "192.0.2.2".parse().unwrap(), 1 << 20);
    let done = forwarder.finish();
    done.assert_no_drops();
    assert!(done.rx[0].completed_checksums > 0, "behind the tag too: {done:?}");
    let frames = tap.drain();
    assert!(!frames.is_empty() && frames.iter().all(|frame| frame.bytes[12..16] == [0x81, 0, 0, 100]));
}

#[test]
fn tags_in_frames_stay_and_lost_ones_are_admitted() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 8));
    let pair = Pair::new("intags", 1500, 1);
    let wire = pair.peer.frames("eth0");
    let frame = |tags: &[u8]| [&[2; 6], &[4; 6], tags, &[0x88, 0xb5], &[7; 50]].concat();
    let sent: Vec<_> = [&[0x81, 0, 0x60, 100][..], &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 8], &[0x81, 0, 0, 0], &[]]
        .iter()
        .map(|tags| frame(tags))
        .collect();
    pair.dut.inside(|| {
        let mut it = pair.start("").unwrap();
        assert_eq!(it.port.capabilities().vlan_tags, VlanTags::Kept, "{:?}", it.port.capabilities());
        sent.iter().for_each(|frame| wire.send(frame).unwrap());
        assert_eq!(collect(&mut it, sent.len(), ours), sent);
        stop(it);

        let it = pair.start("mode = \"generic\"\n").unwrap();
        let capabilities = it.port.capabilities();
        assert_eq!(capabilities.vlan_tags, VlanTags::Lost);
        assert!(capabilities.notes.iter().any(|note| note.contains("ethtool -K PEER txvlan off")), "{capabilities:?}");
        stop(it);
    });
}

#[test]
fn the_kernel_gets_what_is_meant_for_it_and_nothing_else() {
    require!(all Requirement::LAB, Requirement::Scapy);
    let pair = Pair::new("kernel", 1500, 2);
    let requests = Requests::to(&pair.dut);
    let mut wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        for mode in ["native", "generic"] {
            for (kernel, answers) in [
                ("\"nothing\"", [false, false]),
                ("[\"arp\"]", [true, false]),
                ("[\"udp port 9\"]", [false, true]),
                ("[\"udp port 10\", \"tcp port 9\", \"udp port 9 to 192.0.2.8\", \"ipv6\"]", [false, false]),
                ("[\"to 192.0.2.9\", \"icmpv6\", \"udp to 2001:db8::1\", \"ethertype 0x0806\"]", [true, true]),
            ] {
                let mut it = pair.start(&format!("mode = \"{mode}\"\nkernel = {kernel}\n")).unwrap();
                assert_eq!(requests.answered(&mut wire), answers, "{mode}, kernel = {kernel}");
                let for_us = answers.iter().filter(|answered| !**answered).count();
                let ours = collect(&mut it, for_us, |frame| requests.0.iter().any(|request| request == frame));
                assert_eq!(ours.len(), for_us, "{mode}, kernel = {kernel}");
                let counted = it.port.extra_statistics();
                let passed = counted.iter().find(|(name, _)| *name == "xdp_passed_to_kernel").unwrap().1;
                assert!(passed >= 2 - for_us as u64, "{counted:?}");
                stop(it);
            }
        }
        assert_eq!(requests.answered(&mut wire), [true, true], "without a port");
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn foreign_programs_are_removed_only_by_force() {
    require!(all Requirement::LAB);
    let pair = Pair::new("foreign", 1500, 1);
    // Its interface has the same index in another namespace.
    let other = Pair::new("bystander", 1500, 1);
    let mut bystander = other.dut.inside(|| other.start("").unwrap());
    pair.dut.inside(|| {
        // A second port counts as a foreign user too.
        let first = pair.start("").unwrap();
        let error = pair.start("").unwrap_err();
        assert!(error.contains("another AF_XDP socket holds the queue"), "{error}");
        stop(first);

        let foreign = foreign::Attached::new("eth0");
        let error = pair.start("").unwrap_err();
        assert!(
            error.starts_with("af_xdp: eth0: foreign XDP program 'somebody' (id ")
                && error.ends_with("remove it with `ip link set dev eth0 xdp off`, or set force = true"),
            "{error}"
        );
        let it = pair.start("force = true\n").unwrap();
        let notes = it.port.capabilities().notes;
        assert!(notes.iter().any(|note| note.contains("'somebody'") && note.contains("force is set")), "{notes:?}");
        let wire = pair.peer.frames("eth0");
        let mut it = it;
        wire.send(&numbered(7)).unwrap();
        assert_eq!(collect(&mut it, 1, ours), [numbered(7)]);
        stop(it);
        drop(foreign);
    });
    other.peer.frames("eth0").send(&numbered(8)).unwrap();
    assert_eq!(collect(&mut bystander, 1, ours), [numbered(8)], "a port of another namespace is left alone");
    stop(bystander);
    assert_eq!(pair.pool.outstanding() + other.pool.outstanding(), 0);
}

/// A foreign XDP program.
mod foreign {
    // UNSAFETY: the bpf(2) system call.
    #![allow(unsafe_code)]

    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    pub(crate) struct Attached {
        _link: OwnedFd,
    }

    fn call(command: libc::c_long, attribute: &mut [u64; 16]) -> OwnedFd {
        // SAFETY: the attributes have the given size, and their pointers point to data that outlives the
        // call.
        let rc = unsafe { libc::syscall(libc::SYS_bpf, command, attribute.as_mut_ptr(), size_of_val(attribute)) };
        assert!(rc >= 0, "bpf({command}): {}", std::io::Error::last_os_error());
        // SAFETY: the command returned this descriptor just now, so nothing else owns it.
        unsafe { OwnedFd::from_raw_fd(rc as i32) }
    }

    impl Attached {
        /// Attaches a program that passes all frames to the kernel.
        pub(crate) fn new(interface: &str) -> Self {
            const PROG_LOAD: libc::c_long = 5;
            const LINK_CREATE: libc::c_long = 28;
            const XDP: u64 = 6;
            const ATTACH_XDP: u64 = 37;
            // r0 = XDP_PASS; exit
            let code: [u64; 2] = [0xb7 | 2 << 32, 0x95];
            let license = c"GPL";
            let mut load = [0u64; 16];
            load[0] = XDP | 2 << 32;
            load[1] = code.as_ptr() as u64;
            load[2] = license.as_ptr() as u64;
            load[6] = u64::from_ne_bytes(*b"somebody");
            let program = call(PROG_LOAD, &mut load);
            let text =
                std::process::Command::new("ip").args(["-o", "link", "show", interface]).output().unwrap().stdout;
            let index: u64 = String::from_utf8(text).unwrap().split(':').next().unwrap().parse().unwrap();
            let mut link = [0u64; 16];
            link[0] = program.as_raw_fd() as u64 | index << 32;
            link[1] = ATTACH_XDP;
            Self { _link: call(LINK_CREATE, &mut link) }
        }
    }
}

#[test]
fn every_queue_of_the_interface_is_served() {
    require!(all Requirement::LAB);
    let pair = Pair::new("queues", 1500, 4);
    let wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        for queues in [1, 2, 3, 4] {
            let mut it = pair.start_with(&format!("driver = \"af_xdp\"\nqueues = {queues}\n"), "").unwrap();
            assert_eq!((it.rx.len(), it.tx.len()), (queues, queues));
            let frames: Vec<Vec<u8>> = (0..200u8)
                .map(|flow| {
                    let ip = [0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, flow];
                    [&[2; 6][..], &[4; 6], &[8, 0], &ip, &[4, flow, 0, 9, 0, 26, 0, 0], &[flow; 18]].concat()
                })
                .collect();
            frames.iter().for_each(|frame| wire.send(frame).unwrap());
            let mut got = collect(&mut it, frames.len(), ours);
            got.sort();
            assert_eq!(got, frames, "with {queues} queues");
            stop(it);
        }
        let error = pair.start_with("driver = \"af_xdp\"\nqueues = 5\n", "").unwrap_err();
        assert!(error.contains("supports receive queues from 0 to 4, not 5"), "{error}");
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn a_packet_of_another_pool_is_copied() {
    require!(all Requirement::LAB);
    let pair = Pair::new("copies", 9202, 1);
    let mut wire = pair.peer.frames("eth0");
    let other = Pool::new("other", 64).unwrap();
    pair.dut.inside(|| {
        let mut it = pair.start_with("driver = \"af_xdp\"\nmtu = 9202\n", "").unwrap();
        for len in [60, 2048, 2300, 9000] {
            let frame: Vec<u8> = numbered(3).into_iter().chain(forwarder::pattern(9000)).take(len).collect();
            let mut packet = other.take().unwrap();
            assert!(packet.extend_from_slice(&frame, &other));
            let mut batch = Batch::new();
            batch.push(packet).unwrap();
            assert_eq!(it.tx[0].transmit(&mut batch), 1);
            let got = wire.receive_where(TIMEOUT, |frame| ours(&frame.bytes)).expect("a frame");
            assert!(got.bytes == frame, "{len} bytes");
            assert_eq!(other.outstanding(), 0, "a copy went out, the packet is free");
        }
        assert_eq!(it.port.tx_statistics()[0].copied, 4);
        stop(it);
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn a_frozen_payload_goes_out_many_times_at_once() {
    require!(all Requirement::LAB);
    let pair = Pair::new("flood", 1500, 1);
    let mut wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        let mut it = pair.start("").unwrap();
        let mut payload = pair.pool.take().unwrap();
        payload.append(1000).unwrap().copy_from_slice(&forwarder::pattern(1000));
        let payload = payload.into_shared();
        let mut batch = Batch::new();
        for number in 0..40 {
            let mut header = pair.pool.take().unwrap();
            header.append(20).unwrap().copy_from_slice(&numbered(number)[..20]);
            batch.push(header.append_shared(&payload).unwrap()).unwrap();
        }
        drop(payload);
        assert_eq!(it.tx[0].transmit(&mut batch), 40);
        for number in 0..40 {
            let got = wire.receive_where(TIMEOUT, |frame| ours(&frame.bytes)).expect("a frame");
            assert!(got.bytes[14] == number && got.bytes[20..] == forwarder::pattern(1000), "{number}");
        }
        assert_eq!(it.port.tx_statistics()[0].copied, 0);
        stop(it);
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn refusals_say_what_to_do() {
    require!(all Requirement::LAB);
    let pair = Pair::new("refusals", 1500, 1);
    pair.dut.inside(|| {
        let error = pair.start_with("driver = \"af_xdp\"\nmtu = 9000\n", "").unwrap_err();
        assert!(error.contains("`ip link set dev eth0 mtu 9000`"), "{error}");
        let error = common::start("driver = \"af_xdp\"\ndevice = \"eth7\"\n", &pair.pool).unwrap_err().to_string();
        assert!(error.starts_with("af_xdp: no device 'eth7': ") && error.contains("eth0"), "{error}");
        pair.dut.ip("link set eth0 mtu 9000");
        pair.peer.ip("link set eth0 mtu 9000");
        let error = pair.start_with("driver = \"af_xdp\"\nmtu = 2026\n", "fragments = false\nmode = \"native\"\n");
        let error = error.err().unwrap_or_default();
        assert!(error.contains("attaching as native XDP"), "without fragments veth ends at 3500: {error}");
        let error = pair.start_with("driver = \"af_xdp\"\nmtu = 2026\n", "fragments = false\n").unwrap_err();
        assert!(error.contains("use driver = \"af_packet\", or set mode = \"generic\""), "{error}");
        let it =
            pair.start_with("driver = \"af_xdp\"\nmtu = 2026\n", "fragments = false\nmode = \"generic\"\n").unwrap();
        let capabilities = it.port.capabilities();
        assert_eq!(capabilities.mode, "generic XDP, copy, need-wakeup");
        assert_eq!(capabilities.max_mtu, 2026);
        stop(it);
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn a_port_set_down_is_set_up_and_says_so() {
    require!(all Requirement::LAB);
    let pair = Pair::new("down", 1500, 1);
    pair.dut.ip("link set eth0 down");
    let wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        let mut it = pair.start("").unwrap();
        let notes = it.port.capabilities().notes;
        assert!(notes.iter().any(|note| note.contains("was down and has been set up")), "{notes:?}");
        assert!(eventually(TIMEOUT, || wire.send(&numbered(9)).is_ok()));
        assert_eq!(collect(&mut it, 1, ours)[0], numbered(9));
        stop(it);
    });
}

#[test]
fn a_removed_interface_ends_its_port_only() {
    require!(all Requirement::LAB);
    let pair = Pair::new("removed", 1500, 1);
    pair.dut.inside(|| {
        let mut it = pair.start("").unwrap();
        pair.dut.ip("link del eth0");
        let mut events = Vec::new();
        assert!(eventually(TIMEOUT, || {
            events.extend(it.port.events());
            events.iter().any(|event| matches!(event, PortEvent::Lost(_)))
        }));
        let Some(PortEvent::Lost(text)) = events.last() else { panic!("{events:?}") };
        assert!(text.contains("eth0"), "{text}");
        // Packets sent now are counted as lost with the device. A sleeping worker does not wake repeatedly.
        let mut batch = Batch::new();
        batch.push(pair.pool.take().unwrap()).unwrap();
        assert_eq!(it.tx[0].transmit(&mut batch), 1);
        assert_eq!(it.port.tx_statistics()[0].drops, [(DropReason::DeviceLost, 1)]);
        stop(it);
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn auto_takes_af_packet_and_says_so() {
    require!(all Requirement::LAB);
    let pair = Pair::new("auto", 1500, 1);
    pair.dut.ip("addr add 192.0.2.9/24 dev eth0");
    pair.dut.ipv6("eth0");
    pair.dut.inside(|| {
        let start = |more: &str| common::start(&format!("device = \"eth0\"\n{more}"), &pair.pool);
        let it = start("").unwrap();
        let capabilities = it.port.capabilities();
        assert_eq!((capabilities.driver, capabilities.notes[0].as_str()), ("af_packet", "auto took af_packet"));
        stop(it);

        // Behind an XDP program it would receive nothing, and a second port of af_xdp too.
        let it = start("driver = \"af_xdp\"\n").unwrap();
        let error = common::start("device = \"eth0\"\n", &common::pool()).unwrap_err().to_string();
        assert!(error.starts_with("af_xdp: eth0: ") && error.contains("holds the queue"), "{error}");
        stop(it);

        // A foreign XDP program prevents only the first choice.
        let foreign = foreign::Attached::new("eth0");
        let it = start("").unwrap();
        let capabilities = it.port.capabilities();
        assert_eq!(capabilities.driver, "af_packet");
        let why = "auto passed over af_xdp: eth0: foreign XDP program 'somebody'";
        assert!(capabilities.notes.iter().any(|note| note.starts_with(why)), "{capabilities:?}");
        stop(it);
        drop(foreign);

        for route in ["default via 192.0.2.1", "-6 default via fe80::1", "default nexthop via 192.0.2.1 dev eth0"] {
            let (family, route) = route.strip_prefix("-6 ").map_or(("", route), |rest| ("-6 ", rest));
            let device = if route.contains("dev") { "" } else { " dev eth0" };
            pair.dut.ip(&format!("{family}route add {route}{device}"));
            let error = start("").unwrap_err().to_string();
            assert!(
                error.starts_with("auto: eth0: carries a default route") && error.contains("force = true"),
                "{route}: {error}"
            );
            let it = start("[port.auto]\nforce = true\n").unwrap();
            let notes = it.port.capabilities().notes;
            assert!(notes.iter().any(|note| note.contains("carries a default route")), "{notes:?}");
            stop(it);
            pair.dut.ip(&format!("{family}route del default"));
        }
        stop(start("").unwrap());
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn a_missing_privilege_names_the_remedy() {
    require!(all Requirement::LAB, Requirement::Program("setpriv"));
    let program = std::env::current_exe().unwrap();
    let run = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "env", "WIREPATH_TEST_UNPRIVILEGED=1"];
    let test = [program.to_str().unwrap(), "--exact", "af_xdp::unprivileged", "--nocapture"];
    let pair = Pair::new("rights", 1500, 1);
    let outcome = pair.dut.inside(|| spawn(&[&run[..], &test].concat()).wait(TIMEOUT));
    assert!(outcome.success, "{outcome:?}");
    assert!(
        outcome.stdout.contains(
            "af_xdp: eth0: opening an AF_XDP socket needs CAP_NET_RAW and CAP_NET_ADMIN; run as root, or `setcap"
        ),
        "{outcome:?}"
    );
}

/// Child process that [`a_missing_privilege_names_the_remedy`] runs without privileges.
#[test]
fn unprivileged() {
    if std::env::var_os("WIREPATH_TEST_UNPRIVILEGED").is_some() {
        let error = common::start("driver = \"af_xdp\"\ndevice = \"eth0\"", &common::pool()).unwrap_err();
        println!("{error}");
    }
}

#[test]
fn busy_polling_moves_packets_too() {
    require!(all Requirement::LAB, Requirement::Kernel(5, 11));
    let pair = Pair::new("busy", 1500, 1);
    let mut wire = pair.peer.frames("eth0");
    pair.dut.inside(|| {
        let mut it = pair.start("busy_poll = true\n").unwrap();
        assert_eq!(it.port.capabilities().mode, "native XDP, copy, fragments, need-wakeup, busy-poll");
        for number in 0..100 {
            wire.send(&numbered(number)).unwrap();
            assert_eq!(collect(&mut it, 1, ours), [numbered(number)]);
            let mut packet = pair.pool.take().unwrap();
            assert!(packet.extend_from_slice(&numbered(number), &pair.pool));
            let mut batch = Batch::new();
            batch.push(packet).unwrap();
            assert_eq!(it.tx[0].transmit(&mut batch), 1);
            assert!(wire.receive_where(TIMEOUT, |frame| frame.bytes == numbered(number)).is_some());
        }
        stop(it);
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

#[test]
fn a_program_left_behind_by_a_killed_run_is_taken_off() {
    require!(all Requirement::LAB);
    let pair = Pair::new("leftover", 1500, 1);
    let program = std::env::current_exe().unwrap();
    let run =
        ["env", "WIREPATH_TEST_LEAVE=1", program.to_str().unwrap(), "--exact", "af_xdp::left_behind", "--nocapture"];
    pair.dut.inside(|| {
        let child = spawn(&run);
        let attached = || pair.dut.ip("-d link show eth0").contains("prog/xdp");
        assert!(eventually(TIMEOUT, attached));
        child.kill();
        assert!(attached(), "what netlink attached stays");
        let it = pair.start("").unwrap();
        let notes = it.port.capabilities().notes;
        assert!(notes.iter().any(|note| note.contains("program of an earlier run")), "{notes:?}");
        stop(it);
        assert!(eventually(TIMEOUT, || !attached()), "a link takes its program with it");
    });
    assert_eq!(pair.pool.outstanding(), 0);
}

/// Child process that [`a_program_left_behind_by_a_killed_run_is_taken_off`] kills.
#[test]
fn left_behind() {
    if std::env::var_os("WIREPATH_TEST_LEAVE").is_some() {
        let table = "driver = \"af_xdp\"\ndevice = \"eth0\"\n[port.af_xdp]\nattach_by_link = false\n";
        let _it = common::start(table, &common::pool()).unwrap();
        std::thread::sleep(Duration::from_secs(60));
    }
}
