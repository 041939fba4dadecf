//! Tests of the `verbs` driver on the emulated ConnectX, under the unmodified libmlx5, beyond the contract of
//! all drivers.

use crate::common::bytes;
use crate::emulated::{
    EmulatedNic, checksum_cases, finish, has_valid_checksums, nic_tests, packet, receive, send, send_until_received,
    statistic, under,
};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::superframe::Cutter;
use wirepath_packet::{Packet, Pool, PtypeL3, PtypeL4};
use wirepath_pmd::port::{Offloads, OpenPort, StartedPort};
use wirepath_testlab::{Requirement, require};

const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mlx5.driver");

const VERBS: EmulatedNic = EmulatedNic { driver: "verbs", device: "mlx50", modes: &["", "checksums = false"] };

nic_tests!(
    "verbs",
    VERBS,
    RDMA,
    // The corruptions that reach the driver. libmlx5 counts the completions of a receive queue instead of
    // reading their positions, and handles a wrong kind of completion itself.
    &[
        ("rx", "length"),
        ("rx", "empty"),
        ("tx", "owner"),
        ("tx", "queue"),
        ("tx", "position"),
        ("tx", "twice"),
        ("tx", "nothing"),
    ]
);

/// With CQE version 0 libmlx5 finds no receive work queues. The mlx5 driver, which reads completions itself, works.
#[test]
fn cqe_version_0_is_refused_at_the_start() {
    require!(RDMA);
    let device = VERBS.topology().replace("[[device.port]]", "cqe_version = 0\n[[device.port]]");
    under("verbs::cqe_version_0_is_refused_at_the_start", &device, |nics| {
        let Err(error) = OpenPort::open("dut", VERBS.plan(VERBS.device, "")) else { panic!("opened") };
        let text = error.to_string();
        assert!(["mlx50", "version 0", "driver = \"mlx5\""].iter().all(|part| text.contains(part)), "{text}");
        let pool = Pool::new("version_0", 4096).expect("memory");
        let mut port = EmulatedNic { driver: "mlx5", ..VERBS }.start(&pool, "", |_| ());
        send_until_received(&mut port, &pool);
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn checksums_are_the_devices_work_or_the_drivers() {
    require!(RDMA);
    VERBS.under("verbs::checksums_are_the_devices_work_or_the_drivers", "", |nics| {
        for mode in VERBS.modes {
            let pool = Pool::new("offloads", 8192).expect("memory");
            let mut port = VERBS.start(&pool, mode, |_| ());
            checksum_cases(&mut port, &pool, |case, got| {
                let got = bytes(got);
                // The tag is in the frame.
                let untagged = match case.tag {
                    Some(tag) => {
                        assert_eq!((&got[12..14], &got[14..16]), (&[0x81, 0][..], &u16::to_be_bytes(tag)[..]));
                        [&got[..12], &got[16..]].concat()
                    }
                    None => got,
                };
                assert_eq!(untagged.len(), case.len, "{mode}");
                assert!(has_valid_checksums(&untagged), "{mode} {:?} {:?} {}", case.l3, case.l4, case.len);
            });
            // libmlx5 does not report the checksum status of work queues.
            for flags in [Flags::NONE, Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM)] {
                let mut sent = packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 50);
                sent.set_flags(flags);
                send(&mut port, [sent]);
                assert_eq!(receive(&mut port, 1)[0].checksum_status(), ChecksumStatus::NONE);
            }
            assert_eq!(nics.violations(), [""; 0]);
            finish(port, &pool);
        }
    });
}

#[test]
fn unsupported_checksums_are_computed_in_software() {
    const NAME: &str = "verbs::unsupported_checksums_are_computed_in_software";
    require!(RDMA);
    VERBS.under(NAME, "", |nics| {
        let pool = Pool::new("granted", 8192).expect("memory");
        let port = VERBS.start(&pool, "", |_| ());
        let capabilities = port.port.capabilities();
        assert!(capabilities.mode.contains("transmit checksums by the device"), "{:?}", capabilities.notes);
        finish(port, &pool);
        for command in ["query_device", "query_port"] {
            // libmlx5 issues the first of these commands when it opens the device. The later ones succeed.
            nics.inject(&format!("kind = 'refuse'\ncommand = '{command}'\nerrno = 'EAGAIN'"));
            let pool = Pool::new("refused", 8192).expect("memory");
            let mut port = VERBS.start(&pool, "", |_| ());
            let capabilities = port.port.capabilities();
            assert!(capabilities.mode.contains("checksums in software"), "{command}: {}", capabilities.mode);
            let is_told = |note: &String| note.contains("libmlx5 refuses them") && note.contains(command);
            assert!(capabilities.notes.iter().any(is_told), "{command}: {:?}", capabilities.notes);
            send(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Tcp, 100)]);
            assert!(has_valid_checksums(&bytes(&receive(&mut port, 1)[0])), "{command}");
            finish(port, &pool);
        }
        assert_eq!(nics.violations(), [""; 0]);
    });
}

/// A TCP superframe with a payload of `len` bytes, and the number of its segments.
fn superframe(pool: &Pool, l3: PtypeL3, len: usize, mss: u16, tcp_flags: u8) -> (Packet, usize) {
    let mut packet = packet(pool, l3, PtypeL4::Tcp, len);
    packet.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM).with(Flags::TX_L3_CHECKSUM));
    packet.set_mss(mss);
    let tcp = usize::from(packet.header_lengths().l2_len) + usize::from(packet.header_lengths().l3_len);
    packet.data_mut()[tcp + 13] = tcp_flags;
    (packet, len.div_ceil(mss.into()))
}

const ACK: u8 = 0x10;
const FIN_PSH_ACK: u8 = 0x19;
const CWR_ACK: u8 = 0x90;

/// Sends superframes of all kinds between other packets, and returns the received frames.
fn exchange_superframes(port: &mut StartedPort, pool: &Pool) -> Vec<Vec<u8>> {
    port.port.segment_superframes();
    let mut all = Vec::new();
    let mut exchange = |port: &mut StartedPort, packets: Vec<Packet>, frames| {
        send(port, packets);
        all.extend(receive(port, frames).iter().map(bytes));
    };
    for l3 in [PtypeL3::Ipv4, PtypeL3::Ipv6] {
        // 65 450 bytes have more buffers than libmlx5 takes segments. The device does not segment CWR.
        for len in [1441, 20_000, 61_000, 65_450] {
            for (mss, tcp_flags) in [(1440, FIN_PSH_ACK), (8900, ACK), (1440, CWR_ACK)] {
                let (packet, frames) = superframe(pool, l3, len, mss, tcp_flags);
                exchange(port, vec![packet], frames);
            }
        }
        let (mut tagged, frames) = superframe(pool, l3, 5000, 1000, ACK);
        tagged.set_vlan(0x6123);
        exchange(port, vec![tagged], frames);
    }
    // Bursts that end at every block of the ring, over several rounds.
    for round in 0..2000usize {
        let (mut burst, mut frames) = (Vec::new(), 0);
        for n in 0..1 + round % 5 {
            let (packet, segments) = superframe(pool, PtypeL3::Ipv6, 1500 + 700 * (round % 9), 1400, ACK);
            burst.push(packet);
            frames += segments;
            let others = (round + n) % 3;
            burst.extend((0..others).map(|i| self::packet(pool, PtypeL3::Ipv4, PtypeL4::Udp, 20 + 900 * i)));
            frames += others;
        }
        exchange(port, burst, frames);
    }
    all
}

/// Superframes that the device cuts must leave as those that software cuts. `keys` are keys of the device.
fn compare_with_software_gso(name: &str, keys: &str) {
    let device = VERBS.topology().replace("[[device.port]]", &format!("{keys}[[device.port]]"));
    under(name, &device, |nics| {
        let mut by_mode = Vec::new();
        for mode in VERBS.modes {
            let pool = Pool::new("tso", 8192).expect("memory");
            let mut port = VERBS.start(&pool, mode, |_| ());
            let by_device = mode.is_empty();
            assert_eq!(port.port.capabilities().offloads.contains(Offloads::TX_SEGMENT), by_device);
            by_mode.push(exchange_superframes(&mut port, &pool));
            assert_eq!(statistic(&mut port, "queue_resets"), 0, "{mode}");
            let cut = port.tx[0].counters().segmented.get();
            let segmented: u64 = nics.sent("segmented").iter().sum();
            // In software: those with CWR and those of 65 450 bytes.
            let expected = if by_device { (6014, 12) } else { (0, 6026) };
            assert_eq!((segmented, cut), expected, "{mode}");
            finish(port, &pool);
        }
        assert_eq!(by_mode[0].len(), by_mode[1].len());
        for (n, (device, software)) in by_mode[0].iter().zip(&by_mode[1]).enumerate() {
            assert!(has_valid_checksums(&untagged(device)), "frame {n}");
            assert_eq!(device, software, "frame {n}");
        }
        assert_eq!(nics.violations(), [""; 0]);
    });
}

#[test]
fn superframes_leave_as_the_segments_of_software_gso() {
    require!(RDMA);
    compare_with_software_gso("verbs::superframes_leave_as_the_segments_of_software_gso", "");
}

#[test]
fn superframes_leave_with_inline_headers_too() {
    require!(RDMA);
    compare_with_software_gso("verbs::superframes_leave_with_inline_headers_too", "min_inline = 'l2'\n");
}

/// An Ethernet frame of `len` bytes without checksums, and with a number.
fn numbered(pool: &Pool, len: usize, number: u8) -> Packet {
    let mut packet = pool.take().expect("a buffer");
    let header = [2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 0x88, 0xb5];
    assert!(packet.extend_from_slice(&[&header[..], &vec![number; len - header.len()]].concat(), pool));
    packet
}

/// Reasons of [`refused`] packets.
const REFUSALS: [DropReason; 3] = [DropReason::TooLong, DropReason::TooShort, DropReason::KernelOffload];

/// A packet that the driver drops for a reason.
fn refused(pool: &Pool, reason: DropReason) -> Packet {
    let (mut whole, _) = superframe(pool, PtypeL3::Ipv4, 5000, 1400, ACK);
    match reason {
        DropReason::TooLong => return numbered(pool, 9100, 0),
        DropReason::TooShort => {
            whole.set_flags(Flags::NONE);
            assert!(whole.truncate(13));
        }
        _ => whole.set_mss(0),
    }
    whole
}

/// Superframes leave in their places behind packets that the driver drops, wherever in the ring they are. `keys` are
/// keys of the device.
fn send_behind_refused(name: &str, keys: &str) {
    const ROUNDS: usize = 4000;
    let device = VERBS.topology().replace("[[device.port]]", &format!("{keys}[[device.port]]"));
    under(name, &device, |nics| {
        for mode in VERBS.modes {
            let pool = Pool::new("behind", 8192).expect("memory");
            // A short ring ends more often.
            let mut port = VERBS.start(&pool, mode, |config| config.depth = 64);
            port.port.segment_superframes();
            let (mut superframes, mut drops) = (0u64, [0; 3]);
            for round in 0..ROUNDS {
                let (mut burst, mut expected) = (Vec::new(), Vec::new());
                for n in 0..1 + round % 3 {
                    // The driver cannot lengthen the request of a frame of 19 bytes if 18 of them are in its headers.
                    // So software cuts the superframe that would begin in the last block of the ring.
                    let lengths = [19, 19, if round % 8 == 0 { 1500 } else { 19 }];
                    for len in lengths.into_iter().take((round + n) % 4) {
                        let plain = numbered(&pool, len, expected.len() as u8);
                        expected.push(bytes(&plain));
                        burst.push(plain);
                    }
                    let kind = (round / 3 + n) % 3;
                    drops[kind] += 1;
                    burst.push(refused(&pool, REFUSALS[kind]));
                    let whole = || {
                        let (mut whole, _) = superframe(&pool, PtypeL3::Ipv4, 1500 + 700 * (round % 9), 1400, ACK);
                        whole.data_mut()[38..42].copy_from_slice(&[round as u8, n as u8, 0, 1]);
                        whole
                    };
                    burst.push(whole());
                    superframes += 1;
                    let mut cutter = Cutter::new(whole(), None).unwrap();
                    expected.extend(std::iter::from_fn(|| cutter.next_frame(&pool)).map(|it| bytes(&it.unwrap())));
                }
                send(&mut port, burst);
                let received: Vec<_> = receive(&mut port, expected.len()).iter().map(bytes).collect();
                assert!(received == expected, "{mode} {round}:\n{received:02x?}\n{expected:02x?}");
            }
            let counters = port.tx[0].counters();
            assert_eq!(REFUSALS.map(|reason| counters.drops.get(reason)), drops, "{mode}");
            let cut = counters.segmented.get();
            if mode.is_empty() {
                let segmented: u64 = nics.sent("segmented").iter().sum();
                assert_eq!((cut + segmented, cut > 0), (superframes, !keys.is_empty()), "{cut} at the end of the ring");
            }
            assert_eq!(statistic(&mut port, "queue_resets"), 0, "{mode}");
            finish(port, &pool);
        }
        assert_eq!(nics.violations(), [""; 0]);
    });
}

#[test]
fn superframes_leave_behind_refused_packets() {
    require!(RDMA);
    send_behind_refused("verbs::superframes_leave_behind_refused_packets", "");
}

#[test]
fn superframes_leave_behind_refused_ones_with_inline_too() {
    require!(RDMA);
    let name = "verbs::superframes_leave_behind_refused_ones_with_inline_too";
    send_behind_refused(name, "min_inline = 'l2'\n");
}

/// Removes the VLAN tag of a frame.
fn untagged(frame: &[u8]) -> Vec<u8> {
    if frame[12..14] == [0x81, 0x00] { [&frame[..12], &frame[16..]].concat() } else { frame.to_vec() }
}

#[test]
fn a_refusing_provider_leaves_superframes_to_software() {
    require!(RDMA);
    VERBS.under("verbs::a_refusing_provider_leaves_superframes_to_software", "", |nics| {
        let pool = Pool::new("refused", 8192).expect("memory");
        // The control socket exists once a device was opened.
        drop(VERBS.open(VERBS.device, ""));
        // The second queue pair is that of the probe of TCP segmentation.
        nics.inject("kind = 'refuse'\ncommand = 'create_qp'\nafter = 1\nerrno = 'EPERM'");
        let mut port = VERBS.start(&pool, "", |_| ());
        let capabilities = port.port.capabilities();
        assert!(!capabilities.offloads.contains(Offloads::TX_SEGMENT));
        let is_told = |note: &String| note.contains("TCP segmentation in software") && note.contains("EPERM");
        assert!(capabilities.notes.iter().any(is_told), "{:?}", capabilities.notes);
        port.port.segment_superframes();
        let (packet, frames) = superframe(&pool, PtypeL3::Ipv4, 20_000, 1440, ACK);
        send(&mut port, [packet]);
        assert!(receive(&mut port, frames).iter().all(|frame| has_valid_checksums(&bytes(frame))));
        assert_eq!(nics.sent("segmented"), [0]);
        finish(port, &pool);
    });
}

#[test]
fn a_queue_that_stopped_at_a_superframe_is_recreated() {
    require!(RDMA);
    VERBS.under("verbs::a_queue_that_stopped_at_a_superframe_is_recreated", "", |nics| {
        let pool = Pool::new("stopped", 8192).expect("memory");
        let mut port = VERBS.start(&pool, "", |_| ());
        let count = |port: &StartedPort, reason| port.tx[0].counters().drops.get(reason);
        for (round, code) in (1..).zip([1, 4, 0x14]) {
            nics.inject(&format!("kind = 'completion-error'\ncode = {code}"));
            let (first, frames) = superframe(&pool, PtypeL3::Ipv4, 20_000, 1440, ACK);
            send(&mut port, [first]);
            send_until_received(&mut port, &pool);
            assert_eq!(statistic(&mut port, "queue_resets"), round);
            assert!(count(&port, DropReason::TxError) >= round);
            let (second, _) = superframe(&pool, PtypeL3::Ipv4, 20_000, 1440, ACK);
            send(&mut port, [second]);
            assert!(receive(&mut port, frames).iter().all(|frame| has_valid_checksums(&bytes(frame))));
        }
        // Malformed requests of an application, without software GSO: each is dropped and counted.
        let malformed: [fn(&mut Packet); 4] = [
            |packet| packet.set_mss(0),
            |packet| packet.set_mss(9000),
            |packet| packet.set_header_lengths(Default::default()),
            |packet| assert!(packet.truncate(54)),
        ];
        for (n, spoil) in (1..).zip(malformed) {
            let (mut packet, _) = superframe(&pool, PtypeL3::Ipv4, 20_000, 1440, ACK);
            spoil(&mut packet);
            send(&mut port, [packet]);
            assert_eq!(count(&port, DropReason::KernelOffload), n);
        }
        let (long, _) = superframe(&pool, PtypeL3::Ipv4, 65_450, 1440, ACK);
        let before = count(&port, DropReason::TxError);
        send(&mut port, [long]);
        assert_eq!(count(&port, DropReason::TxError), before + 1);
        send_until_received(&mut port, &pool);
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}
