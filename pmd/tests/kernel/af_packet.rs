// UNSAFETY: sets a UDP socket option and makes a TAP device, for which no safe crate is available. Stands in for a
// function of the C library.
#![allow(unsafe_code)]

//! `af_packet` on a real kernel: superframes, tunnels, VLAN tags and exclusive use.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{PidfdFlags, PidfdGetfdFlags};
use wirepath_packet::drops::DropReason;
use wirepath_packet::gro::Gro;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::Cutter;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_pmd::port::{LinkState, StartedPort};
use wirepath_testlab::{
    Frame, FramePort, Lab, Requirement, VlanTagger, allocations, eventually, oracle, require, spawn,
};
use wirepath_wire::checksum;

use crate::common::{self, packet};
use crate::forwarder::{self, Forwarder};
use crate::topology::{Line, Pair};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Forwards between the two hosts of a line. Superframes are cut as they are received.
fn forward(line: &Line, mtu: u32) -> Forwarder {
    let cut = "[port.af_packet]\nsuperframes = \"cut\"\n";
    let table = |device| format!("driver = \"af_packet\"\ndevice = \"{device}\"\nmtu = {mtu}\n{cut}");
    Forwarder::start(&line.dut, [table("west"), table("east")])
}

#[test]
fn superframes_and_partial_checksums_are_finished() {
    require!(all Requirement::LAB, Requirement::Program("tshark"));
    let line = Line::new("tso", 1500);
    let forwarder = forward(&line, 1500);
    let mut tap = line.right.frames("eth0");
    forwarder::tcp(&line.left, &line.right, "192.0.2.2".parse().unwrap(), 4 << 20);
    let frames: Vec<_> = tap.drain().into_iter().map(|frame| frame.bytes).take(400).collect();
    forwarder::tcp(&line.left, &line.right, "2001:db8::2".parse().unwrap(), 4 << 20);
    let done = forwarder.finish();
    assert!(done.rx[0].segmented > 0, "no superframe came: {done:?}");
    assert!(done.rx[0].completed_checksums > 0, "{done:?}");
    done.assert_no_drops();
    assert!(frames.len() > 50 && frames.iter().all(|frame| frame.len() <= 1514));
    oracle::assert_clean(&frames);
}

#[test]
fn tcp_survives_injected_faults() {
    require!(all Requirement::LAB);
    let line = Line::new("faults", 1500);
    let faults = "loss = 0.01, duplicate = 0.02, reorder = 0.02, distance = 5, corrupt = 0.002";
    let cut = "[port.af_packet]\nsuperframes = \"cut\"\n";
    let table = |device| format!("driver = \"af_packet\"\ndevice = \"{device}\"\nmtu = 1500\n{cut}");
    let faulty = format!("[port.faults]\nseed = 11\nrx = {{ {faults} }}\ntx = {{ {faults}, full = 0.01 }}\n");
    let forwarder = Forwarder::start(&line.dut, [format!("{}{faulty}", table("west")), table("east")]);
    forwarder::tcp(&line.left, &line.right, "192.0.2.2".parse().unwrap(), 4 << 20);
    let done = forwarder.finish();
    let of = |queue: &wirepath_packet::counters::QueueStats| {
        let lost = queue.drops.iter().find(|(reason, _)| *reason == DropReason::InjectedFault);
        (lost.map_or(0, |(_, n)| *n), queue.injected_copies)
    };
    let (lost, copies) = of(&done.rx[0]);
    assert!(lost > 0 && copies > 0, "{done:?}");
    let (lost, copies) = of(&done.tx[0]);
    assert!(lost > 0 && copies > 0, "{done:?}");
    assert_eq!((of(&done.rx[1]), of(&done.tx[1])), ((0, 0), (0, 0)), "the other port has no faults");
}

/// Frames of one superframe.
const FRAMES: usize = 8;
/// Source address of the frames of [`streams`].
const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Streams of [`streams`].
const STREAMS: usize = 2 * 2 * (1 + 2 * (2 * 6 + 5) + 1);
/// Streams of [`streams`] in tunnels with an outer checksum.
const WITH_CHECKSUM: usize = 2 * 2 * 2 * 6;

/// Returns frames of TCP and UDP streams over both IP versions, plain and in tunnels over both. Tunnels over UDP are
/// those with outer checksums and those without.
fn streams() -> Vec<Vec<u8>> {
    let script = format!(
        "from scapy.contrib.geneve import GENEVE, GeneveOptions\n\
         def ip(version, i): return IP(src='10.1.0.1', dst='10.1.0.2', id=70 + i) if version == 4 else \
         IPv6(src='fd00::1', dst='fd00::2')\n\
         def stream(wrap):\n\
         \x20 for version, is_tcp in ((4, True), (6, True), (4, False), (6, False)):\n\
         \x20   for i in range({FRAMES}):\n\
         \x20     last = i == {FRAMES} - 1\n\
         \x20     l4 = TCP(sport=5000, dport=80, seq=9 + 1200 * i, ack=5, flags='PA' if last else 'A', \
         options=[('NOP', None), ('NOP', None), ('Timestamp', (7, 8))]) if is_tcp else UDP(sport=5000, dport=80)\n\
         \x20     ether = Ether(src='02:00:00:00:00:01', dst='02:00:00:00:00:02')\n\
         \x20     emit(wrap(ether/ip(version, i)/l4/bytes([i] * (700 if last else 1200)), i))\n\
         stream(lambda inner, i: inner)\n\
         ethertype = lambda inner: 0x0800 if IP in inner else 0x86dd\n\
         def gpe(inner):\n\
         \x20 return Raw(bytes([12, 0, 0, 3 if Ether in inner else 1 if IP in inner else 2, 0, 0, 77, 0]))\n\
         udp = [\n\
         \x20 (4789, lambda inner: VXLAN(flags=8, vni=77)/inner),\n\
         \x20 (6081, lambda inner: GENEVE(vni=77, proto=0x6558)/inner),\n\
         \x20 (6081, lambda inner: GENEVE(vni=77, proto=ethertype(inner), options=[GeneveOptions(data=b'abcd')])/\
         inner.payload),\n\
         \x20 (6081, lambda inner: GENEVE(vni=77, proto=ethertype(inner))/inner.payload),\n\
         \x20 (4790, lambda inner: gpe(inner)/inner),\n\
         \x20 (4790, lambda inner: gpe(inner.payload)/inner.payload),\n\
         ]\n\
         others = [\n\
         \x20 lambda inner: GRE(proto=0x6558)/inner,\n\
         \x20 lambda inner: GRE(key_present=1, key=9, proto=0x6558)/inner,\n\
         \x20 lambda inner: GRE(proto=ethertype(inner))/inner.payload,\n\
         \x20 lambda inner: GRE(key_present=1, key=9, proto=ethertype(inner))/inner.payload,\n\
         \x20 lambda inner: inner.payload,\n\
         ]\n\
         ether = Ether(src='02:00:00:00:00:01', dst='02:00:00:00:00:02')\n\
         for version in (4, 6):\n\
         \x20 for port, wrap in udp:\n\
         \x20   for checksum in (0, None):\n\
         \x20     header = UDP(sport=50000, dport=port, chksum=checksum)\n\
         \x20     stream(lambda inner, i: ether/ip(version, i)/header/wrap(inner))\n\
         \x20 for wrap in others:\n\
         \x20   stream(lambda inner, i: ether/ip(version, i)/wrap(inner))\n\
         srh = IPv6ExtHdrSegmentRouting(addresses=['fd00::2', 'fd00::3'], segleft=1, lastentry=1)\n\
         stream(lambda inner, i: ether/IPv6(src='fd00::1', dst='fd00::3')/srh/inner.payload)\n"
    );
    let frames = oracle::scapy::<Vec<u8>>(&[], &script).frames;
    assert_eq!(frames.len(), FRAMES * STREAMS);
    frames
}

/// Joins frames and sends the superframes. Returns their number.
fn send_joined(it: &mut StartedPort, pool: &Pool, frames: &[Vec<u8>]) -> usize {
    let mut sent = 0;
    for frames in frames.chunks(FRAMES) {
        let mut batch: Batch = frames.iter().map(|frame| packet(pool, frame)).collect();
        Gro::new().join(&mut batch, 0);
        assert_eq!(batch.len(), 1, "all frames of a stream are joined: {:02x?}", &frames[0][..100]);
        sent += batch.len();
        it.tx[0].transmit(&mut batch);
        assert!(batch.is_empty(), "stream {}", sent - 1);
    }
    sent
}

#[test]
fn the_kernel_cuts_superframes_of_all_kinds_as_they_were() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 6), Requirement::Scapy, Requirement::Program("ethtool"));
    let frames = streams();
    let Pair { dut, peer, pool, .. } = &Pair::new("cutall", 1500, 1);
    // The cable takes no superframes, so that the kernel cuts them and computes all checksums.
    let off = "tx off tso off tx-udp-segmentation off tx-udp_tnl-segmentation off tx-udp_tnl-csum-segmentation off \
               tx-gre-segmentation off tx-ipxip4-segmentation off tx-ipxip6-segmentation off";
    dut.run(&[&["ethtool", "-K", "eth0"][..], &off.split(' ').collect::<Vec<_>>()].concat()).expect();
    let mut wire = peer.frames("eth0");
    dut.inside(|| {
        let mut it = common::start("driver = \"af_packet\"\ndevice = \"eth0\"\n", pool).unwrap();
        for (number, frames) in frames.chunks(FRAMES).enumerate() {
            send_joined(&mut it, pool, frames);
            for (i, frame) in frames.iter().enumerate() {
                let got = wire.receive_where(TIMEOUT, |frame| frame.bytes[6..12] == SENDER).expect("a frame");
                assert!(got.bytes == *frame, "stream {number}, frame {i}:\n{:02x?}\n{frame:02x?}", got.bytes);
            }
        }
        assert_eq!(it.port.tx_statistics()[0].drops, []);
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pool.outstanding(), 0);
}

/// A superframe that the kernel refuses leaves in frames, and those of other forms stay whole.
#[test]
fn a_refused_superframe_is_cut_and_others_stay_whole() {
    // The kernel reserves this segment size (`GSO_BY_FRAGS`).
    const RESERVED: u16 = 0xffff;
    require!(all Requirement::LAB, Requirement::Kernel(6, 6), Requirement::Scapy);
    let frames = streams();
    let plain = &frames[..4 * FRAMES];
    // In VXLAN over IPv4 without checksum: TCP in IPv4, which the program marks.
    let tunnel = &frames[4 * FRAMES..5 * FRAMES];
    assert_eq!((tunnel[0][36..38].to_vec(), is_tcp(&tunnel[0][50..])), (vec![0x12, 0xb5], true));
    let Pair { dut, peer, pool, .. } = &Pair::new("refused", 1500, 1);
    let start = || common::start("driver = \"af_packet\"\ndevice = \"eth0\"\n", pool).unwrap();
    let (mut from, mut to) = (dut.inside(start), peer.inside(start));
    from.port.segment_superframes();
    for (refused, in_datagrams) in [(&plain[..FRAMES], false), (tunnel, false), (tunnel, true)] {
        let mut batch: Batch = refused[..1].iter().map(|frame| packet(pool, frame)).collect();
        for packet in batch.iter_mut() {
            packet.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L3_CHECKSUM).with(Flags::TX_L4_CHECKSUM));
            packet.set_mss(RESERVED);
        }
        for _ in 0..3 {
            from.tx[0].transmit(&mut batch);
        }
        assert!(batch.is_empty(), "{in_datagrams}");
        assert_eq!(from.port.tx_statistics()[0].drops, []);
        let (got, whole) = collect_frames(&mut from, &mut to, pool, 1);
        assert_eq!((got, whole), (vec![refused[0][..].to_vec()], 0));
    }
    // Both IP versions, TCP and UDP.
    assert_eq!(send_joined(&mut from, pool, plain), 4);
    let (got, whole) = collect_frames(&mut from, &mut to, pool, plain.len());
    assert_eq!((got.len(), whole), (plain.len(), 4));
    // Superframes in tunnels go as datagrams of UDP.
    assert_eq!(send_joined(&mut from, pool, tunnel), 1);
    let (got, _) = collect_frames(&mut from, &mut to, pool, tunnel.len());
    assert_eq!(got.len(), tunnel.len());
    assert_eq!(from.port.tx_statistics()[0].drops, []);
    from.port.stop(from.rx, from.tx).unwrap();
    to.port.stop(to.rx, to.tx).unwrap();
    assert_eq!(pool.outstanding(), 0);
}

thread_local! {
    /// True in a thread whose kernel takes no UDP superframes, as one before Linux 6.2.
    static REFUSES_UDP: Cell<bool> = const { Cell::new(false) };
}

/// Stands in for sendmmsg(2) of the C library in this program, because of [`REFUSES_UDP`].
///
/// # Safety
///
/// The arguments are those of the system call, and each message begins with a virtio header.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendmmsg(
    socket: libc::c_int,
    messages: *mut libc::mmsghdr,
    count: libc::c_uint,
    flags: libc::c_int,
) -> libc::c_int {
    /// Kind of a UDP superframe (`VIRTIO_NET_HDR_GSO_UDP_L4`).
    const GSO_UDP_L4: u8 = 5;
    let is_refused = |n: &libc::c_uint| {
        // SAFETY: the caller passes `count` messages, whose first segments have the ten bytes of a virtio header.
        let kind = unsafe { (*(*messages.add(*n as usize)).msg_hdr.msg_iov).iov_base.cast::<u8>().add(1).read() };
        kind == GSO_UDP_L4
    };
    let first = if REFUSES_UDP.get() { (0..count).find(is_refused) } else { None };
    if first == Some(0) {
        // SAFETY: the address is that of this thread's error number.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return -1;
    }
    // SAFETY: the arguments are those of the caller, with as many messages or fewer.
    unsafe { libc::syscall(libc::SYS_sendmmsg, socket, messages, first.unwrap_or(count), flags) as libc::c_int }
}

/// A kernel before Linux 6.2 refuses the first UDP superframe. It leaves in its datagrams, like those behind it, and
/// superframes of TCP stay whole.
#[test]
fn a_refused_superframe_of_udp_leaves_in_datagrams() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 6), Requirement::Scapy);
    let mut streams: Vec<Vec<Vec<u8>>> = streams().chunks(FRAMES).take(4).map(<[_]>::to_vec).collect();
    // TCP over IPv4, UDP over IPv4, TCP over IPv6, UDP over IPv6, and a frame in between that nobody joins.
    streams.swap(1, 2);
    let single = [&[2, 0, 0, 0, 0, 2][..], &SENDER, &[0x88, 0xb5], &[9; 46]].concat();
    streams.insert(2, vec![single]);
    let expected = streams.concat();
    let Pair { dut, peer, pool, .. } = &Pair::new("oldkernel", 1500, 1);
    let start = || common::start("driver = \"af_packet\"\ndevice = \"eth0\"\n", pool).unwrap();
    let (mut from, mut to) = (dut.inside(start), peer.inside(start));
    from.port.segment_superframes();
    REFUSES_UDP.set(true);
    for (calls, cut) in [(2, 2), (1, 4)] {
        let mut batch = Batch::new();
        for frames in &streams {
            let mut joined: Batch = frames.iter().map(|frame| packet(pool, frame)).collect();
            Gro::new().join(&mut joined, 0);
            assert_eq!(joined.len(), 1);
            joined.drain_front(1, |packet| assert!(batch.push(packet).is_ok()));
        }
        for _ in 0..calls {
            assert!(!batch.is_empty());
            from.tx[0].transmit(&mut batch);
        }
        assert!(batch.is_empty());
        let (got, whole) = collect_frames(&mut from, &mut to, pool, expected.len());
        for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert!(got == expected, "frame {n}:\n{got:02x?}\n{expected:02x?}");
        }
        let sent = &from.port.tx_statistics()[0];
        assert_eq!((got.len(), whole), (expected.len(), 2), "those of TCP");
        assert_eq!((sent.segmented, &sent.drops[..]), (cut, &[][..]), "those of UDP");
    }
    REFUSES_UDP.set(false);
    from.port.stop(from.rx, from.tx).unwrap();
    to.port.stop(to.rx, to.tx).unwrap();
    assert_eq!(pool.outstanding(), 0);
}

/// Collects the frames that the peer of [`send_joined`] gets, with those that a device would make of superframes, until
/// there are `count`. Returns them, and the number of superframes.
fn collect_frames(from: &mut StartedPort, to: &mut StartedPort, pool: &Pool, count: usize) -> (Vec<Vec<u8>>, usize) {
    let (mut got, mut whole, mut batch) = (Vec::new(), 0, Batch::new());
    eventually(TIMEOUT, || {
        to.rx[0].receive(&mut batch);
        let all = batch.len();
        batch.drain_front(all, |packet| {
            if packet.data()[6..12] != SENDER {
                return;
            }
            if !packet.flags().contains(Flags::TX_SEGMENT) {
                return got.push(common::bytes(&packet));
            }
            whole += 1;
            let mut cutter = Cutter::new(packet, None).unwrap();
            while let Some(frame) = cutter.next_frame(pool) {
                got.push(common::bytes(&frame.unwrap()));
            }
        });
        from.tx[0].reclaim();
        got.len() >= count
    });
    (got, whole)
}

/// Returns whether an IP packet without options in a frame is one of TCP.
fn is_tcp(frame: &[u8]) -> bool {
    frame[if frame[12] == 0x08 { 23 } else { 20 }] == 6
}

/// The kernel drops superframes that the device does not segment, because the port bypasses the queueing discipline.
#[test]
fn devices_with_a_qdisc_get_what_they_segment() {
    require!(all Requirement::LAB, Requirement::Scapy, Requirement::Program("ethtool"));
    let frames: Vec<Vec<u8>> = streams().into_iter().take(4 * FRAMES).collect();
    // The device's settings, the marks of the superframes, and how many of the four arrive whole: TCP and UDP over IPv4
    // and IPv6.
    for (features, gso_max_size, cwr, vlan, expected) in [
        ("tso on", "65536", false, None, 4),
        ("tx-tcp6-segmentation off", "65536", false, None, 3),
        ("tx-udp-segmentation off", "65536", false, None, 2),
        ("tx-tcp-ecn-segmentation off", "65536", false, None, 4),
        ("tx-tcp-ecn-segmentation off", "65536", true, None, 2),
        ("tso on", "65536", true, None, 4),
        ("tso on", "5000", false, None, 0),
        ("tso on", "65536", false, Some(7), 0),
        ("tso off", "65536", false, None, 2),
    ] {
        let Pair { dut, peer, pool, .. } = &Pair::new("qdisc", 1500, 1);
        dut.run(&[&["ethtool", "-K", "eth0"][..], &features.split(' ').collect::<Vec<_>>()].concat()).expect();
        dut.run(&["ip", "link", "set", "eth0", "gso_max_size", gso_max_size]).expect();
        dut.run(&["tc", "qdisc", "add", "dev", "eth0", "root", "pfifo"]).expect();
        let mut from = dut.inside(|| common::start("driver = \"af_packet\"\ndevice = \"eth0\"\n", pool)).unwrap();
        from.port.segment_superframes();
        let mut to = peer.inside(|| common::start("driver = \"af_packet\"\ndevice = \"eth0\"\n", pool)).unwrap();
        for frames in frames.chunks(FRAMES) {
            let mut batch: Batch = frames.iter().map(|frame| packet(pool, frame)).collect();
            Gro::new().join(&mut batch, 0);
            for packet in batch.iter_mut() {
                let flags = if packet.data()[12] == 0x08 { 14 + 20 + 13 } else { 14 + 40 + 13 };
                if is_tcp(packet.data()) {
                    packet.data_mut()[flags] |= u8::from(cwr) << 7;
                }
                if let Some(id) = vlan {
                    packet.set_vlan(id);
                }
            }
            from.tx[0].transmit(&mut batch);
            assert!(batch.is_empty());
        }
        let (got, whole) = collect_frames(&mut from, &mut to, pool, frames.len());
        let name = format!("{features}, gso_max_size {gso_max_size}, CWR {cwr}, VLAN {vlan:?}");
        assert_eq!((got.len(), from.port.tx_statistics()[0].drops.clone()), (frames.len(), vec![]), "{name}");
        assert_eq!(whole, expected, "{name}");
        for (i, (got, want)) in got.iter().zip(&frames).enumerate() {
            let got = if vlan.is_some() && got[12..14] == [0x81, 0] {
                [&got[..12], &got[16..]].concat()
            } else {
                got.clone()
            };
            let l4 = if want[12] == 0x08 { 34 } else { 54 };
            if !is_tcp(want) {
                assert_eq!(&got, want, "{name}, datagram {i}");
                continue;
            }
            assert_eq!(got[l4 + 13] & 0x80 != 0, cwr && i % FRAMES == 0, "{name}, frame {i}: only the first has CWR");
            // The checksum covers the flags.
            let rest = |frame: &[u8]| [&frame[..l4 + 13], &frame[l4 + 14..l4 + 16], &frame[l4 + 18..]].concat();
            assert_eq!(rest(&got), rest(want), "{name}, frame {i}");
        }
        from.port.stop(from.rx, from.tx).unwrap();
        to.port.stop(to.rx, to.tx).unwrap();
        assert_eq!(pool.outstanding(), 0, "{name}");
    }
}

#[test]
fn superframes_of_all_kinds_reach_every_kind_of_port() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 6), Requirement::Scapy);
    let frames = streams();
    // Those with an outer checksum are sent as datagrams.
    let all = STREAMS - WITH_CHECKSUM;
    for (receiver, expected) in [
        ("driver = \"af_packet\"\ndevice = \"eth0\"\n", all..all + 1),
        ("driver = \"af_packet\"\ndevice = \"eth0\"\n[port.af_packet]\nsuperframes = \"cut\"\n", 0..1),
        ("driver = \"af_xdp\"\ndevice = \"eth0\"\n", 0..1),
        ("driver = \"af_xdp\"\ndevice = \"eth0\"\ngro = true\n", 1..usize::MAX),
    ] {
        let Pair { dut, peer, pool, .. } = &Pair::new("allkinds", 1500, 1);
        let mut from = dut.inside(|| common::start("driver = \"af_packet\"\ndevice = \"eth0\"\n", pool)).unwrap();
        let mut to = peer.inside(|| common::start(receiver, pool)).unwrap();
        let (mut sent, mut got, mut whole) = (0, Vec::new(), 0);
        // A receive ring holds half of them.
        for frames in frames.chunks(FRAMES * STREAMS / 2) {
            sent += send_joined(&mut from, pool, frames);
            let arrived = collect_frames(&mut from, &mut to, pool, frames.len());
            got.extend(arrived.0);
            whole += arrived.1;
        }
        assert_eq!((got.len(), from.port.tx_statistics()[0].drops.clone()), (frames.len(), vec![]), "{receiver}");
        for (i, (got, want)) in got.iter().zip(&frames).enumerate() {
            assert!(got == want, "{receiver}, frame {i}:\n{got:02x?}\n{want:02x?}");
        }
        assert!(expected.contains(&whole), "{receiver}: {whole} of {sent} superframes arrived whole");
        from.port.stop(from.rx, from.tx).unwrap();
        to.port.stop(to.rx, to.tx).unwrap();
        assert_eq!(pool.outstanding(), 0, "{receiver}");
    }
}

#[test]
fn jumbo_superframes_become_chains() {
    require!(all Requirement::LAB);
    let line = Line::new("jumbo", 9202);
    let forwarder = forward(&line, 9202);
    forwarder::tcp(&line.left, &line.right, "192.0.2.2".parse().unwrap(), 8 << 20);
    let done = forwarder.finish();
    assert!(done.rx[0].segmented > 0, "no superframe came: {done:?}");
    assert!(done.tx[1].bytes / done.tx[1].packets > 4096, "not in large frames: {done:?}");
    done.assert_no_drops();
}

#[test]
fn udp_superframes_are_cut() {
    const UDP_SEGMENT: libc::c_int = 103;
    require!(all Requirement::LAB);
    let line = Line::new("uso", 1500);
    let forwarder = forward(&line, 1500);
    let to = line.right.inside(|| UdpSocket::bind("192.0.2.2:0").unwrap());
    to.set_read_timeout(Some(TIMEOUT)).unwrap();
    let from = line.left.inside(|| UdpSocket::bind("192.0.2.1:0").unwrap());
    from.connect(to.local_addr().unwrap()).unwrap();
    let size: libc::c_int = 1001;
    let address = (&raw const size).cast();
    // SAFETY: the kernel reads `size`, a `c_int` of 4 bytes that outlives the call.
    assert_eq!(unsafe { libc::setsockopt(from.as_raw_fd(), libc::SOL_UDP, UDP_SEGMENT, address, 4) }, 0);
    // The first datagram resolves the neighbours; the kernel queues it meanwhile.
    let data = forwarder::pattern(20 * 1001 + 7);
    from.send(&data).unwrap();
    let mut got = Vec::new();
    for _ in 0..21 {
        let mut datagram = [0; 2000];
        let n = to.recv(&mut datagram).unwrap();
        assert!(n == 1001 || n == 7);
        got.extend_from_slice(&datagram[..n]);
    }
    assert!(got == data);
    let done = forwarder.finish();
    assert_eq!(done.rx[0].segmented, 1, "{done:?}");
    done.assert_no_drops();
}

#[test]
fn vxlan_superframes_are_cut_inside_the_tunnel() {
    require!(all Requirement::LAB, Requirement::Program("tshark"), Requirement::LinkType("vxlan"));
    let line = Line::new("vxlan", 1500);
    for (host, me, other) in [(&line.left, 1, 2), (&line.right, 2, 1)] {
        let tunnels = [
            ("vx4", format!("local 192.0.2.{me} remote 192.0.2.{other} dstport 4789 udpcsum")),
            ("vx6", format!("local 2001:db8::{me} remote 2001:db8::{other} dstport 4789")),
            // A port that no parser takes for VXLAN, and no outer checksum.
            ("vx8", format!("local 192.0.2.{me} remote 192.0.2.{other} dstport 8472 noudpcsum")),
        ];
        for (number, (name, how)) in tunnels.iter().enumerate() {
            host.ip(&format!("link add {name} type vxlan id {} {how}", 42 + number));
            host.ip(&format!("addr add 198.51.{number}.{me}/24 dev {name}"));
            host.ip(&format!("link set {name} up"));
        }
    }
    let forwarder = forward(&line, 1500);
    let mut tap = line.right.frames("eth0");
    let mut frames = Vec::new();
    for number in 0..3 {
        forwarder::tcp(&line.left, &line.right, format!("198.51.{number}.2").parse().unwrap(), 2 << 20);
        frames.extend(tap.drain().into_iter().map(|frame| frame.bytes).take(200));
    }
    let done = forwarder.finish();
    assert!(done.rx[0].segmented > 10, "no superframes came: {done:?}");
    done.assert_no_drops();
    oracle::assert_clean(&frames);
}

#[test]
fn tags_are_put_back() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 6));
    let line = Line::new("tags", 1500);
    let _tagger = VlanTagger::new(&line.left, "eth0", 100);
    let _other = VlanTagger::new(&line.right, "eth0", 100);
    let mut tap = line.right.frames("eth0");
    let forwarder = forward(&line, 1500);
    // Superframes and partial checksums with a stripped tag.
    forwarder::tcp(&line.left, &line.right, "192.0.2.2".parse().unwrap(), 1 << 20);
    let done = forwarder.finish();
    assert!(done.rx[0].segmented > 0, "{done:?}");
    done.assert_no_drops();
    let frames = tap.drain();
    assert!(!frames.is_empty() && frames.iter().all(|frame| frame.bytes[12..16] == [0x81, 0, 0, 100]));

    // Tags inside the sent frame: the kernel strips the outer one on the way.
    let raw = line.left.frames("eth0");
    let frame = |tags: &[u8]| [&[2; 6], &[4; 6], tags, &[0x88, 0xb5], &[7; 50]].concat();
    let sent: Vec<_> = [&[0x81, 0, 0x60, 100][..], &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 8], &[0x81, 0, 0, 0], &[]]
        .iter()
        .map(|tags| frame(tags))
        .collect();
    drop(_tagger);
    line.dut.inside(|| {
        let pool = common::pool();
        let mut it = common::start("driver = \"af_packet\"\ndevice = \"west\"", &pool).unwrap();
        sent.iter().for_each(|frame| raw.send(frame).unwrap());
        let mut got: Vec<Vec<u8>> = Vec::new();
        eventually(TIMEOUT, || {
            let mut batch = Batch::new();
            it.rx[0].receive(&mut batch);
            got.extend(batch.iter().map(|packet| packet.data().to_vec()).filter(|frame| frame[..6] == [2; 6]));
            got.len() >= sent.len()
        });
        assert_eq!(got, sent);
    });
}

/// Returns an ARP request for 192.0.2.9 from 192.0.2.`sender`.
fn arp_request(sender: u8) -> Vec<u8> {
    let body = [0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, sender, 192, 0, 2, sender, 0, 0, 0, 0, 0, 0, 192, 0, 2, 9];
    [&[0xff; 6][..], &[2, 0, 0, 0, 0, sender, 8, 6], &body, &[0; 18]].concat()
}

/// Returns a TCP SYN to port 9 of 192.0.2.9, which is closed. Scapy computes the checksums.
fn syn(mac: [u8; 6], from: u8) -> Vec<u8> {
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    let script = format!(
        "emit(Ether(dst='{mac}', src='02:00:00:00:00:{from:02x}')/IP(src='192.0.2.{from}', \
         dst='192.0.2.9')/TCP(sport=1234, dport=9, flags='S'))"
    );
    oracle::scapy::<Vec<u8>>(&[], &script).frames.remove(0)
}

/// Waits for `count` frames to the test hosts and returns the last address byte of each.
fn answered(wire: &mut FramePort, count: usize) -> Vec<u8> {
    let ours = |frame: &Frame| frame.bytes[..5] == [2, 0, 0, 0, 0];
    (0..count).map_while(|_| wire.receive_where(TIMEOUT, ours)).map(|frame| frame.bytes[5]).collect()
}

/// Copies the descriptors of all BPF links of this process.
fn copies_of_bpf_links() -> Vec<OwnedFd> {
    let this = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
    let is_link = |path: &PathBuf| std::fs::read_link(path).is_ok_and(|to| to.ends_with("anon_inode:bpf_link"));
    let paths = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let numbers = paths.filter(is_link).map(|path| path.file_name().unwrap().to_str().unwrap().parse().unwrap());
    numbers.filter_map(|fd| rustix::process::pidfd_getfd(&this, fd, PidfdGetfdFlags::empty()).ok()).collect()
}

#[test]
fn the_kernel_answers_only_while_it_may() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 6), Requirement::Scapy);
    let Pair { dut, peer, .. } = &Pair::new("exclusive", 1500, 1);
    dut.ip("addr add 192.0.2.9/24 dev eth0");
    for station in 1..=4 {
        dut.ip(&format!("neigh add 192.0.2.{station} lladdr 02:00:00:00:00:{station:02x} dev eth0 nud permanent"));
    }
    let mut wire = peer.frames("eth0");
    let mac = dut.mac("eth0");
    let ask = |wire: &FramePort, station: u8, syn: &[u8]| {
        wire.send(&arp_request(station)).unwrap();
        wire.send(syn).unwrap();
    };
    let syns: Vec<_> = (1..=4).map(|station| syn(mac, station)).collect();
    let pool = common::pool();
    dut.inside(|| {
        ask(&wire, 1, &syns[0]);
        assert_eq!(answered(&mut wire, 2), [1, 1], "an ARP reply and a reset, without a port");

        let mut it = common::start("driver = \"af_packet\"\ndevice = \"eth0\"", &pool).unwrap();
        assert!(it.port.capabilities().mode.ends_with(", exclusive"), "{:?}", it.port.capabilities());
        ask(&wire, 2, &syns[1]);
        let mut seen = 0;
        eventually(TIMEOUT, || {
            seen += it.rx[0].receive(&mut Batch::new());
            seen >= 2
        });
        assert_eq!(seen, 2, "the tap is in front of the program that drops");
        // A program that another thread starts holds such copies between fork and exec.
        let copies = copies_of_bpf_links();
        assert!(!copies.is_empty(), "the port holds a BPF link");
        it.port.stop(it.rx, it.tx).unwrap();
        // The kernel has the interface again. An answer to host 2 would arrive first.
        ask(&wire, 3, &syns[2]);
        assert_eq!(answered(&mut wire, 2), [3, 3], "answers while the port was exclusive");

        let table = "driver = \"af_packet\"\ndevice = \"eth0\"\n[port.af_packet]\nexclusive = false\n";
        let it = common::start(table, &pool).unwrap();
        let notes = it.port.capabilities().notes;
        assert!(notes.iter().any(|note| note.contains("kernel also processes")), "{notes:?}");
        ask(&wire, 4, &syns[3]);
        assert_eq!(answered(&mut wire, 2), [4, 4]);
        drop(copies);
        it.port.stop(it.rx, it.tx).unwrap();
    });
}

#[test]
fn a_killed_program_gives_the_interface_back() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 6));
    let Pair { dut, peer, .. } = &Pair::new("killed", 1500, 1);
    dut.ip("addr add 192.0.2.9/24 dev eth0");
    let mut wire = peer.frames("eth0");
    let program = std::env::current_exe().unwrap();
    let child = dut.spawn(&["env", "WIREPATH_TEST_HOLD=1", program.to_str().unwrap(), "--exact", "af_packet::hold"]);
    assert!(wire.receive_where(TIMEOUT, |frame| frame.bytes == [5; 60]).is_some(), "the child has the port");
    wire.send(&arp_request(2)).unwrap();
    child.kill();
    wire.send(&arp_request(3)).unwrap();
    assert_eq!(answered(&mut wire, 1), [3], "the kernel answers again, and did not before");
    assert!(dut.ip("-d link show eth0").contains("promiscuity 0"));
}

/// Child process that [`a_killed_program_gives_the_interface_back`] kills. It starts the port, sends a frame
/// and waits.
#[test]
fn hold() {
    if std::env::var_os("WIREPATH_TEST_HOLD").is_some() {
        let pool = common::pool();
        let mut it = common::start("driver = \"af_packet\"\ndevice = \"eth0\"", &pool).unwrap();
        let mut batch = Batch::new();
        batch.extend([packet(&pool, &[5; 60])]);
        it.tx[0].transmit(&mut batch);
        std::thread::sleep(3 * TIMEOUT);
    }
}

#[test]
fn four_queues_share_the_flows() {
    require!(all Requirement::LAB);
    let Pair { dut, peer, .. } = &Pair::new("fanout", 1500, 1);
    let wire = peer.frames("eth0");
    let pool = common::pool();
    let frame = |flow: u8, number: u8| {
        let ip = [0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, flow];
        let udp = [4, flow, 0, 9, 0, 26, 0, 0, flow, number];
        [&[2; 6][..], &[4; 6], &[8, 0], &ip, &udp, &[0; 16]].concat()
    };
    dut.inside(|| {
        for how in ["hash", "cpu", "queue"] {
            let table =
                format!("driver = \"af_packet\"\ndevice = \"eth0\"\nqueues = 4\n[port.af_packet]\nfanout = \"{how}\"");
            let mut it = common::start(&table, &pool).unwrap();
            assert_eq!((it.rx.len(), it.tx.len()), (4, 4));
            (0..4).for_each(|number| (0..64).for_each(|flow| wire.send(&frame(flow, number)).unwrap()));
            let mut got: Vec<Vec<(u8, u8)>> = vec![Vec::new(); 4];
            eventually(TIMEOUT, || {
                for (queue, got) in it.rx.iter_mut().zip(&mut got) {
                    let mut batch = Batch::new();
                    queue.receive(&mut batch);
                    got.extend(batch.iter().map(|packet| (packet.data()[42], packet.data()[43])));
                }
                got.iter().map(Vec::len).sum::<usize>() >= 256
            });
            let flows: Vec<u8> = got.concat().iter().map(|(flow, _)| *flow).collect();
            assert_eq!(flows.len(), 256, "{how}: neither lost nor doubled");
            for flow in 0..64 {
                let numbers: Vec<_> = got.concat().into_iter().filter(|(f, _)| *f == flow).map(|(_, n)| n).collect();
                assert_eq!(numbers, [0, 1, 2, 3], "{how}: flow {flow}");
            }
            if how == "hash" {
                assert!(got.iter().all(|queue| !queue.is_empty()), "flows by queue: {got:?}");
            }
            it.port.stop(it.rx, it.tx).unwrap();
        }
    });
}

#[test]
fn frames_for_others_only_when_promiscuous() {
    require!(all Requirement::LAB);
    let Pair { dut, peer, .. } = &Pair::new("promisc", 1500, 1);
    let (wire, mac, pool) = (peer.frames("eth0"), dut.mac("eth0"), common::pool());
    dut.inside(|| {
        for (promiscuous, want) in [(true, &[1, 2, 3][..]), (false, &[2, 3])] {
            let table = format!("driver = \"af_packet\"\ndevice = \"eth0\"\npromiscuous = {promiscuous}\n");
            let mut it = common::start(&table, &pool).unwrap();
            for (to, number) in [([2; 6], 1), (mac, 2), ([0xff; 6], 3)] {
                wire.send(&[&to[..], &[4; 6], &[0x88, 0xb5], &[number; 46]].concat()).unwrap();
            }
            let mut got = Vec::new();
            eventually(TIMEOUT, || {
                let mut batch = Batch::new();
                it.rx[0].receive(&mut batch);
                got.extend(batch.iter().map(|packet| packet.data()[14]));
                got.last() == Some(&3)
            });
            assert_eq!(got, want, "promiscuous = {promiscuous}");
            let flags = dut.ip("-d link show eth0");
            assert_eq!(flags.contains("promiscuity 0"), !promiscuous, "{flags}");
            it.port.stop(it.rx, it.tx).unwrap();
        }
    });
}

#[test]
fn the_interface_is_switched_off_and_on() {
    require!(all Requirement::LAB);
    let Pair { dut, peer, .. } = &Pair::new("updown", 1500, 1);
    dut.ip("link set eth0 down");
    let (mut wire, pool) = (peer.frames("eth0"), common::pool());
    dut.inside(|| {
        // The interface is down at the start too.
        let mut it = common::start("driver = \"af_packet\"\ndevice = \"eth0\"\nqueues = 2\n", &pool).unwrap();
        assert_eq!(it.port.link().state, LinkState::Down);
        for round in 0..3 {
            let mut batch = Batch::new();
            batch.extend([packet(&pool, &[9; 60])]);
            it.tx[0].transmit(&mut batch);
            assert!(batch.is_empty());
            assert_eq!(it.tx[0].counters().drops.get(DropReason::LinkDown), round + 1);
            // Once all earlier frames are received, the queue can wait.
            let waits = eventually(TIMEOUT, || {
                it.rx[0].receive(&mut Batch::new());
                it.rx[0].wait_descriptor().is_some()
            });
            assert!(waits, "an idle worker can sleep");

            dut.ip("link set eth0 up");
            assert!(eventually(TIMEOUT, || it.port.link().state == LinkState::Up));
            let mut got = 0;
            let mut number = 0;
            let heard = eventually(TIMEOUT, || {
                number += 1;
                let _ = wire.send(&[&[2; 6][..], &[number; 6], &[0x88, 0xb5], &[0; 46]].concat());
                got += it.rx.iter_mut().map(|queue| queue.receive(&mut Batch::new())).sum::<usize>();
                got > 0
            });
            assert!(heard, "receives again");
            batch.extend([packet(&pool, &[9; 60])]);
            it.tx[1].transmit(&mut batch);
            assert!(wire.receive_where(TIMEOUT, |frame| frame.bytes == [9; 60]).is_some(), "sends again");
            dut.ip("link set eth0 down");
        }
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn software_offloads_are_applied_before_transmit() {
    require!(all Requirement::LAB);
    let Pair { dut, peer, .. } = &Pair::new("requests", 1500, 1);
    let (mut wire, pool) = (peer.frames("eth0"), common::pool());
    dut.inside(|| {
        let mut it = common::start("driver = \"af_packet\"\ndevice = \"eth0\"\n", &pool).unwrap();
        let mut batch = Batch::new();
        let mut tagged = packet(&pool, &[9; 60]);
        tagged.set_vlan(0x2064);
        let mut impossible = packet(&pool, &[8; 60]);
        impossible.set_flags(Flags::TX_SEGMENT);
        let pieces: Vec<Packet> = (0..1100).map(|_| packet(&pool, &[7])).collect();
        let many = pieces.into_iter().reduce(|mut chain, piece| {
            chain.append_segment(piece).unwrap();
            chain
        });
        batch.extend([packet(&pool, &[1; 13]), tagged, impossible, many.unwrap(), packet(&pool, &[6; 60])]);
        it.tx[0].transmit(&mut batch);
        assert!(batch.is_empty());
        let arrived = wire.receive(TIMEOUT).unwrap().bytes;
        assert_eq!((&arrived[12..16], arrived.len()), (&[0x81, 0, 0x20, 0x64][..], 64));
        assert_eq!(wire.receive(TIMEOUT).unwrap().bytes, [6; 60]);
        let stats = it.port.tx_statistics().remove(0);
        let drops = [(DropReason::TxError, 1), (DropReason::TooShort, 1), (DropReason::KernelOffload, 1)];
        assert!(drops.iter().all(|drop| stats.drops.contains(drop)) && stats.packets == 2, "{stats:?}");
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn nothing_is_allocated_for_a_packet() {
    require!(all Requirement::LAB);
    let Pair { dut, peer, .. } = &Pair::new("alloc", 9202, 1);
    let (wire, pool) = (peer.frames("eth0"), common::pool());
    dut.inside(|| {
        let mut it = common::start("driver = \"af_packet\"\ndevice = \"eth0\"\nmtu = 9202\n", &pool).unwrap();
        let mut received = 0;
        let mut counted = 0;
        for round in 0..20 {
            for size in [60, 1514, 9216] {
                wire.send(&vec![2; size]).unwrap();
            }
            eventually(TIMEOUT, || {
                let made = allocations(|| {
                    let mut batch = Batch::new();
                    received += it.rx[0].receive(&mut batch);
                    it.tx[0].transmit(&mut batch);
                    it.tx[0].reclaim();
                });
                // The first packet of a thread allocates the thread's pool cache.
                if round > 0 {
                    counted += made;
                }
                received == (round + 1) * 3
            });
        }
        assert_eq!((received, counted), (60, 0));
        it.port.stop(it.rx, it.tx).unwrap();
    });
}

#[test]
fn short_and_long_frames_keep_their_order() {
    require!(all Requirement::LAB);
    let Pair { dut, peer, .. } = &Pair::new("order", 9202, 1);
    let (wire, pool) = (peer.frames("eth0"), common::pool());
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for keys in ["", "superframes = 'cut'"] {
        dut.inside(|| {
            let table = format!("driver = 'af_packet'\ndevice = 'eth0'\nmtu = 9202\n[port.af_packet]\n{keys}\n");
            let mut it = common::start(&table, &pool).unwrap();
            for round in 0..60 {
                let frames: Vec<Vec<u8>> = (0..200u8)
                    .map(|number| {
                        // The ring gets frames of at most 1900 bytes.
                        let len = match random.u8(..4) {
                            0 => random.usize(60..1900),
                            1 => random.usize(1890..1910),
                            _ => random.usize(60..9216),
                        };
                        let mut frame = [&[2; 6][..], &[4; 6], &[0x88, 0xb5, round, number]].concat();
                        frame.extend((16..len).map(|at| number.wrapping_add(at as u8).wrapping_add((at >> 8) as u8)));
                        frame
                    })
                    .collect();
                frames.iter().for_each(|frame| wire.send(frame).unwrap());
                let mut got: Vec<Vec<u8>> = Vec::new();
                eventually(TIMEOUT, || {
                    let mut batch = Batch::new();
                    it.rx[0].receive(&mut batch);
                    got.extend(batch.iter().map(common::bytes).filter(|frame| frame[12..14] == [0x88, 0xb5]));
                    got.len() >= frames.len()
                });
                assert!(got == frames, "round {round}: {} frames", got.len());
            }
            it.port.stop(it.rx, it.tx).unwrap();
        });
        assert_eq!(pool.outstanding(), 0);
    }
}

/// Makes a TAP device `tap0` of the calling thread's namespace. Each write is a virtio header and a frame.
fn tap_device() -> File {
    /// `TUNSETIFF`, `IFF_TAP`, `IFF_NO_PI`, `IFF_VNET_HDR` (linux/if_tun.h).
    const SET_INTERFACE: libc::c_ulong = 0x4004_54ca;
    const FLAGS: u16 = 0x0002 | 0x1000 | 0x4000;
    let file = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = [0u8; 40];
    request[..4].copy_from_slice(b"tap0");
    request[16..18].copy_from_slice(&FLAGS.to_ne_bytes());
    // SAFETY: the request is a `struct ifreq` of 40 bytes, which outlives the call.
    assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), SET_INTERFACE, request.as_mut_ptr()) }, 0);
    file
}

/// Kinds of frames that [`numbered`] makes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Short,
    Long,
    /// TCP, to be cut.
    Superframe,
    /// A UDP datagram to be fragmented (UFO). The kernel cannot describe it to a packet socket.
    Undescribed,
}

/// Returns a virtio header and a frame that carries a number.
fn numbered(kind: Kind, number: u32, random: &mut fastrand::Rng) -> Vec<u8> {
    let (protocol, header): (u8, [u8; 4]) = match kind {
        Kind::Short | Kind::Long => {
            let len = if kind == Kind::Short { random.usize(60..=1900) } else { random.usize(1901..9000) };
            let frame = [&[2; 6][..], &[4; 6], &[0x88, 0xb5], &number.to_be_bytes(), &vec![7; len - 18]].concat();
            return [&[0; 10][..], &frame].concat();
        }
        // Kind of superframe, length of the headers, start and offset of the checksum.
        Kind::Superframe => (6, [1, 54, 34, 16]),
        Kind::Undescribed => (17, [3, 42, 34, 6]),
    };
    let [gso, headers, start, offset] = header;
    let payload = vec![7; random.usize(1001..8000)];
    let tcp = [&[0, 80, 0, 80][..], &number.to_be_bytes(), &[0; 4], &[0x50, 0x10, 255, 255, 0, 0, 0, 0]].concat();
    let udp = [&[0, 80, 0, 80][..], &(8 + payload.len() as u16).to_be_bytes(), &[0; 2]].concat();
    let l4 = if protocol == 6 { tcp } else { udp };
    let len = (20 + l4.len() + payload.len()) as u16;
    let mut ip =
        [&[0x45, 0][..], &len.to_be_bytes(), &[0, 0, 0, 0, 64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]].concat();
    let sum = checksum::sum(&ip).checksum();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let virtio = [&[1, gso][..], &u16::from(headers).to_ne_bytes(), &1000u16.to_ne_bytes()].concat();
    let checksum = [u16::from(start).to_ne_bytes(), u16::from(offset).to_ne_bytes()].concat();
    [&virtio, &checksum, &[2; 6][..], &[4; 6], &[8, 0], &ip, &l4, &payload].concat()
}

/// Receives the frames that [`numbered`] has made, until there are `count`. Returns the number of each, and whether it
/// is a superframe.
fn receive_numbered(it: &mut StartedPort, count: usize) -> Vec<(u32, bool)> {
    let mut got = Vec::new();
    eventually(TIMEOUT, || {
        let mut batch = Batch::new();
        it.rx[0].receive(&mut batch);
        for packet in batch.iter() {
            let bytes = common::bytes(packet);
            let at = match bytes[12..14] {
                [0x88, 0xb5] => 14,
                // The sequence number of TCP over IPv4.
                [8, 0] => 38,
                // Frames of the kernel itself.
                _ => continue,
            };
            let number = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
            got.push((number, packet.flags().contains(Flags::TX_SEGMENT)));
        }
        got.len() >= count
    });
    got
}

#[test]
fn superframes_keep_their_order_and_stop_no_queue() {
    require!(all Requirement::LAB, Requirement::File("/dev/net/tun"));
    let lab = Lab::new("superorder");
    let dut = lab.namespace("dut");
    let pool = common::pool();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut number, mut undescribed) = (0u32, 0);
    let mut exchange = |tap: &mut File, it: &mut StartedPort, kinds: &[Kind], undescribed: &mut u64| {
        // More frames than the ring has slots.
        for round in 0..60 {
            let mut expected = Vec::new();
            for _ in 0..100 {
                number += 1;
                let kind = kinds[random.usize(..kinds.len())];
                tap.write_all(&numbered(kind, number, &mut random)).unwrap();
                match kind {
                    Kind::Undescribed => *undescribed += 1,
                    _ => expected.push((number, kind == Kind::Superframe)),
                }
            }
            assert_eq!(receive_numbered(it, expected.len()), expected, "round {round}");
        }
    };
    let mut kinds = vec![Kind::Short, Kind::Short, Kind::Short, Kind::Long, Kind::Superframe, Kind::Superframe];
    dut.inside(|| {
        let mut tap = tap_device();
        dut.ip("link set tap0 mtu 9202 up");
        let mut it = common::start("driver = 'af_packet'\ndevice = 'tap0'\nmtu = 9202\n", &pool).unwrap();
        exchange(&mut tap, &mut it, &kinds, &mut undescribed);
        assert!(it.port.device_drops().iter().all(|(_, n)| *n == 0), "{:?}", it.port.device_drops());
        // In many kernels this frame stops the ring, and the queue goes on without it. Until then, frames are lost.
        let mut random = fastrand::Rng::with_seed(seed);
        tap.write_all(&numbered(Kind::Undescribed, 0, &mut random)).unwrap();
        let mut tries = 0;
        assert!(eventually(TIMEOUT, || {
            tries += 1;
            tap.write_all(&numbered(Kind::Short, tries, &mut random)).unwrap();
            let mut batch = Batch::new();
            for _ in 0..10_000 {
                it.rx[0].receive(&mut batch);
            }
            batch.iter().any(|packet| packet.data()[12..14] == [0x88, 0xb5])
        }));
        println!("received after {tries} frames");
        let lost: u64 = it.port.device_drops().iter().map(|(_, n)| n).sum();
        assert_eq!(lost, u64::from(tries), "the first one and those behind it but the last");
        kinds.push(Kind::Undescribed);
        exchange(&mut tap, &mut it, &kinds, &mut undescribed);
        assert!(undescribed > 500);
        // The last frames may be some that the kernel drops only when the port asks for them.
        let mut drops = Vec::new();
        eventually(TIMEOUT, || {
            it.rx[0].receive(&mut Batch::new());
            drops = it.port.rx_statistics().remove(0).drops;
            drops.extend(it.port.device_drops());
            drops.iter().map(|(_, n)| n).sum::<u64>() >= lost + undescribed
        });
        assert_eq!(drops.iter().map(|(_, n)| n).sum::<u64>(), lost + undescribed, "{drops:?}");
        it.port.stop(it.rx, it.tx).unwrap();
    });
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn refusals_say_what_to_do() {
    require!(all Requirement::LAB);
    let lab = Lab::new("refusals");
    let dut = lab.namespace("dut");
    dut.ip("link add eth0 type veth peer name eth1");
    let pool = common::pool();
    let refused = |table: &str| {
        dut.inside(|| common::start(&format!("driver = \"af_packet\"\n{table}"), &pool)).unwrap_err().to_string()
    };
    assert_eq!(
        refused("device = \"eth0\"\nmtu = 9000\n"),
        "driver af_packet supports mtu from 68 to 1500, not 9000; `ip link set dev eth0 mtu 9000`"
    );
    let error = refused("device = \"eth7\"\n");
    assert!(error.starts_with("af_packet: no device 'eth7': ") && error.contains("eth0"), "{error}");
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_missing_privilege_names_the_remedy() {
    require!(all Requirement::LAB, Requirement::Program("setpriv"));
    let program = std::env::current_exe().unwrap();
    let run = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "env", "WIREPATH_TEST_UNPRIVILEGED=1"];
    let test = [program.to_str().unwrap(), "--exact", "af_packet::unprivileged", "--nocapture"];
    let outcome = spawn(&[&run[..], &test].concat()).wait(TIMEOUT);
    assert!(outcome.success, "{outcome:?}");
    assert!(
        outcome.stdout.contains("af_packet: lo: opening a packet socket needs CAP_NET_RAW; run as root, or `setcap")
    );
}

/// Child process that [`a_missing_privilege_names_the_remedy`] runs without privileges.
#[test]
fn unprivileged() {
    if std::env::var_os("WIREPATH_TEST_UNPRIVILEGED").is_some() {
        let error = common::start("driver = \"af_packet\"\ndevice = \"lo\"", &common::pool()).unwrap_err();
        println!("{error}");
    }
}
