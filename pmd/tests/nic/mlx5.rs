//! Tests of the `mlx5` driver on emulated NICs, beyond the contract of all drivers: offloads, corrupted
//! completions, errors and device resets, in every mode. Each test starts itself again in a process with the
//! NICs.

use std::path::Path;
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use crate::common::bytes;
use crate::emulated::{
    EmulatedNic, TIMEOUT, checksum_cases, finish, has_valid_checksums, large_tcp, nic_tests, oversized_tcp, packet,
    receive, send, send_until_received, statistic, two_queues, under, wakeups,
};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Batch, Packet, Pool, PtypeL3, PtypeL4};
use wirepath_pmd::drivers::nic::mlx5::MODES;
use wirepath_pmd::port::{Offloads, OpenPort, StartedPort};
use wirepath_testlab::{Requirement, eventually, require};

const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mlx5.driver");

const MLX5: EmulatedNic = EmulatedNic { driver: "mlx5", device: "mlx50", modes: MODES };

nic_tests!(
    "mlx5",
    MLX5,
    RDMA,
    &[
        ("rx", "owner"),
        ("rx", "kind"),
        ("rx", "length"),
        ("rx", "empty"),
        ("rx", "type"),
        ("rx", "position"),
        ("rx", "twice"),
        ("rx", "nothing"),
        ("tx", "owner"),
        ("tx", "queue"),
        ("tx", "kind"),
        ("tx", "type"),
        ("tx", "position"),
        ("tx", "twice"),
        ("tx", "nothing"),
    ]
);

#[test]
fn checksums_and_tags_are_the_devices_work() {
    require!(RDMA);
    MLX5.under("mlx5::checksums_and_tags_are_the_devices_work", "", |nics| {
        for mode in MODES {
            let pool = Pool::new("offloads", 8192).expect("memory");
            let mut port = MLX5.start(&pool, mode, |_| ());
            checksum_cases(&mut port, &pool, |case, got| {
                // A tag that was inserted is stripped again.
                assert_eq!((got.len(), got.in_port(), got.vlan()), (case.len, Some(PortId::new(3)), case.tag));
                assert!(has_valid_checksums(&bytes(got)), "{mode} {:?} {:?} {}", case.l3, case.l4, case.len);
                assert_eq!(got.checksum_status(), ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_GOOD));
                assert_eq!((got.mark(), got.timestamp()), (None, None));
                // The completion of a single packet is not compressed.
                assert!(got.rss_hash().is_some());
            });
            // A wrong checksum is not corrected, but reported. For UDP the device cannot know whether there
            // should be one.
            for (l4, flags, checksum_status) in [
                (PtypeL4::Udp, Flags::NONE, ChecksumStatus::L3_BAD),
                (PtypeL4::Udp, Flags::TX_L3_CHECKSUM, ChecksumStatus::L3_GOOD),
                (PtypeL4::Tcp, Flags::TX_L3_CHECKSUM, ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_BAD)),
            ] {
                let mut wrong = packet(&pool, PtypeL3::Ipv4, l4, 50);
                wrong.set_flags(flags);
                send(&mut port, [wrong]);
                assert_eq!(receive(&mut port, 1)[0].checksum_status(), checksum_status);
            }
            assert_eq!(nics.violations(), [""; 0]);
            finish(port, &pool);
        }
    });
}

/// MTU of the port and of the kernel's interface: descriptors of several buffers, of one buffer and a sink,
/// of one buffer.
const MTUS: [(u16, u16); 3] = [(9000, 9000), (1500, 9000), (1500, 1500)];

/// Returns every receive mode with every kind of descriptor.
fn with_mtus() -> impl Iterator<Item = (&'static str, u16, u16)> {
    MTUS.into_iter().flat_map(|(port, interface)| MODES.iter().map(move |mode| (*mode, port, interface)))
}

#[test]
fn bursts_are_compressed_and_hashed_alike_in_every_mode() {
    require!(RDMA);
    MLX5.under("mlx5::bursts_are_compressed_and_hashed_alike_in_every_mode", "", |nics| {
        for (mode, mtu, interface) in with_mtus() {
            set_interface_mtu("mlx50", interface);
            let pool = Pool::new("bursts", 8192).expect("memory");
            let mut port =
                MLX5.start(&pool, mode, |config| (config.mtu, config.rx_queues, config.tx_queues) = (mtu, 2, 2));
            for round in 0..100usize {
                let n = 1 + round % 60;
                // Bursts of one flow, which are compressed, and of several flows, which are not.
                let max_len = usize::from(mtu) / 2 - 50;
                let lengths: Vec<_> = (0..n).map(|i| if round % 3 == 0 { 30 } else { 30 + i * 7 % max_len }).collect();
                send(&mut port, lengths.iter().map(|payload| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, *payload)));
                let got = receive(&mut port, n);
                assert!(got.iter().all(|packet| has_valid_checksums(&bytes(packet))), "{mode}, {mtu}: round {round}");
                let lens: Vec<_> = got.iter().map(|packet| packet.len() - 42).collect();
                assert_eq!(lens, lengths, "{mode}, {mtu}: round {round}");
                if !mode.contains("checksum") && !mode.contains("stride") {
                    let hash = got[0].rss_hash();
                    assert!(hash.is_some() && got.iter().all(|packet| packet.rss_hash() == hash), "{mode}, {mtu}");
                }
            }
            assert_eq!(nics.violations(), [""; 0]);
            assert_eq!(statistic(&mut port, "queue_resets"), 0);
            finish(port, &pool);
        }
    });
}

/// Packets of many flows share compression sessions in every format. If mini CQEs hold no hash, no packet
/// gets the hash of another one.
#[test]
fn flows_share_sessions_and_keep_their_hashes() {
    require!(RDMA);
    MLX5.under("mlx5::flows_share_sessions_and_keep_their_hashes", "", |nics| {
        let sessions = || {
            let all: serde_json::Value = serde_json::from_str(&nics.request("counters")).expect("counters");
            all["devices"][0]["compressed_sessions"].as_u64().expect("a number")
        };
        let mut expected = Vec::new();
        for (mode, mtu, interface) in with_mtus() {
            set_interface_mtu("mlx50", interface);
            let pool = Pool::new("flows", 8192).expect("memory");
            let mut port = MLX5.start(&pool, mode, |config| config.mtu = mtu);
            let before = sessions();
            let (mut hashes, mut several) = (Vec::new(), 0);
            for round in 0..20u16 {
                let flows = (0..48u16).map(|flow| {
                    let mut packet = packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30);
                    packet.data_mut()[34..36].copy_from_slice(&(round * 48 + flow).to_be_bytes());
                    packet
                });
                send(&mut port, flows);
                let got = receive(&mut port, 48);
                assert!(
                    got.iter().all(|packet| (packet.len(), packet.in_port()) == (72, Some(PortId::new(3)))),
                    "{mode}, {mtu}"
                );
                hashes.extend(got.iter().map(Packet::rss_hash));
                several = sessions() - before;
            }
            if expected.is_empty() {
                assert!(hashes.iter().all(Option::is_some));
                expected.clone_from(&hashes);
            }
            if mode.contains("'off'") {
                assert_eq!(several, 0, "{mode}");
                assert_eq!(hashes, expected, "{mode}, {mtu}");
            } else {
                // 960 packets of 960 flows were sent.
                assert!((1..480).contains(&several), "{mode}: {several} sessions");
                let some = hashes.iter().filter(|hash| hash.is_some()).count();
                let wrong = hashes.iter().zip(&expected).filter(|(hash, own)| hash.is_some() && hash != own).count();
                assert_eq!((some == expected.len(), wrong), (mode.contains("'hash'"), 0), "{mode}, {mtu}");
            }
            finish(port, &pool);
        }
        assert_eq!(nics.violations(), [""; 0]);
    });
}

/// Single packets are sent by BlueFlame and bursts by the doorbell register, with both kinds of UAR pages.
fn blue_flame(name: &str, pages: &str, doorbells: &str) {
    require!(RDMA);
    let device = MLX5.topology().replace("[[device.port]]", &format!("doorbell_pages = '{pages}'\n[[device.port]]"));
    under(name, &format!("doorbells = '{doorbells}'\n{device}"), |nics| {
        for (mode, lone, burst) in [
            ("", 1, 0),
            ("blue_flame = 0", 0, 0),
            ("multi_packet = false", 1, 0),
            // Nine packets take eleven segments, which are three WQE basic blocks.
            ("blue_flame = 256", 1, 1),
            ("tx_inline = 300\nblue_flame = 256", 1, 0),
        ] {
            let pool = Pool::new("flame", 4096).expect("memory");
            let mut port = MLX5.start(&pool, mode, two_queues);
            assert_eq!(port.port.capabilities().mode.contains("BlueFlame"), !mode.contains("blue_flame = 0"));
            for count in [1, 9, 1, 9] {
                for queue in 0..2 {
                    let mut batch: Batch = (0..count).map(|_| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)).collect();
                    let sent: Vec<_> = batch.iter().map(bytes).collect();
                    // Packets without requested offloads share a descriptor.
                    batch.iter_mut().for_each(|packet| packet.set_flags(Flags::NONE));
                    port.tx[queue].transmit(&mut batch);
                    assert!(batch.is_empty());
                    assert_eq!(receive(&mut port, count).iter().map(bytes).collect::<Vec<_>>(), sent, "{mode}");
                }
            }
            let of_each = 2 * (lone + burst);
            // The device counts a descriptor after it has sent the packet.
            eventually(crate::emulated::TIMEOUT, || nics.sent("blue_flames") == [of_each; 2]);
            assert_eq!(nics.sent("blue_flames"), [of_each; 2], "{pages} pages, {mode}");
            assert_eq!((nics.sent("doorbells"), nics.sent("wrong_doorbells")), (vec![4; 2], vec![0; 2]));
            assert_eq!(nics.violations(), [""; 0]);
            finish(port, &pool);
        }
        // More queues than registers: queues that share a register use the doorbell.
        let pool = Pool::new("flames", 16384).expect("memory");
        let mut port = MLX5.start(&pool, "", |config| (config.tx_queues, config.depth) = (20, 64));
        for queue in 0..20 {
            let mut batch: Batch = [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)].into_iter().collect();
            port.tx[queue].transmit(&mut batch);
            assert!(has_valid_checksums(&bytes(&receive(&mut port, 1)[0])));
        }
        assert_eq!(nics.sent("doorbells"), [1; 20]);
        let registers = if pages == "static" { 15 } else { 16 };
        assert_eq!(nics.sent("blue_flames").iter().sum::<u64>(), 20 - 2 * (20 - registers));
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn blue_flame_in_pages_that_are_objects() {
    blue_flame("mlx5::blue_flame_in_pages_that_are_objects", "objects", "trap");
}

#[test]
fn blue_flame_in_pages_of_old() {
    blue_flame("mlx5::blue_flame_in_pages_of_old", "static", "trap");
}

#[test]
fn blue_flame_beside_a_device_that_looks_later() {
    blue_flame("mlx5::blue_flame_beside_a_device_that_looks_later", "objects", "queue");
}

/// Returns a packet with this frame in VXLAN and with requested outer checksums.
fn in_vxlan(pool: &Pool, frame: &[u8]) -> Packet {
    let mut packet = packet(pool, PtypeL3::Ipv4, PtypeL4::Udp, 8 + frame.len());
    let data = packet.data_mut();
    data[36..38].copy_from_slice(&4789u16.to_be_bytes());
    data[42..50].copy_from_slice(&[8, 0, 0, 0, 0, 0, 42, 0]);
    data[50..].copy_from_slice(frame);
    packet
}

#[test]
fn inner_checksum_status_follows_the_tunnels_setting() {
    require!(RDMA);
    MLX5.under("mlx5::inner_checksum_status_follows_the_tunnels_setting", "", |nics| {
        let right = ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_GOOD);
        let wrong = ChecksumStatus::L3_GOOD.with(ChecksumStatus::L4_BAD);
        for (mode, expected) in [("", wrong), ("rx_mode = 'striding'", wrong), ("tunnels = false", right)] {
            let pool = Pool::new("tunnels", 4096).expect("memory");
            let mut port = MLX5.start(&pool, mode, |_| ());
            assert_eq!(port.port.capabilities().offloads.contains(Offloads::TX_TUNNEL_CHECKSUM), expected == wrong);
            send(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Tcp, 40)]);
            let mut inner = bytes(&receive(&mut port, 1)[0]);
            send(&mut port, [in_vxlan(&pool, &inner)]);
            assert_eq!(receive(&mut port, 1)[0].checksum_status(), right, "{mode}");
            *inner.last_mut().expect("a payload") ^= 1;
            send(&mut port, [in_vxlan(&pool, &inner)]);
            assert_eq!(receive(&mut port, 1)[0].checksum_status(), expected, "{mode}");
            assert_eq!(nics.violations(), [""; 0]);
            finish(port, &pool);
        }
    });
}

/// Sends 200 packets of different lengths in bursts, and returns the payload lengths of those that come back.
fn sent_and_received(port: &mut StartedPort, pool: &Pool) -> (Vec<usize>, Vec<usize>) {
    let lengths: Vec<usize> = (0..200).map(|i| 30 + i * 7).collect();
    let (start, mut batch, mut left) = (Instant::now(), Batch::new(), lengths.iter());
    let mut received = Vec::new();
    while received.len() < lengths.len() {
        assert!(start.elapsed() < TIMEOUT, "{} received, {:?}", received.len(), port.port.tx_statistics());
        while batch.len() < 20
            && let Some(length) = left.next()
        {
            drop(batch.push(packet(pool, PtypeL3::Ipv4, PtypeL4::Udp, *length)));
        }
        port.tx[0].transmit(&mut batch);
        port.tx[0].reclaim();
        drop(port.port.events());
        let mut came = Batch::new();
        port.rx[0].receive(&mut came);
        came.drain_front(usize::MAX, |packet| {
            assert!(has_valid_checksums(&bytes(&packet)));
            received.push(packet.len() - 42);
        });
    }
    (lengths, received)
}

#[test]
fn required_inline_headers_are_known_at_the_start() {
    require!(RDMA);
    let topology = MLX5.topology().replace("[[device.port]]", "min_inline = 'l2'\n[[device.port]]");
    under("mlx5::required_inline_headers_are_known_at_the_start", &topology, |nics| {
        let pool = Pool::new("inline", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "", |_| ());
        let mode = port.port.capabilities().mode;
        assert!(mode.contains("send with 18 bytes inline"), "{mode}");
        let (sent, received) = sent_and_received(&mut port, &pool);
        assert_eq!(sent, received);
        assert_eq!(statistic(&mut port, "queue_resets"), 0);
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

/// The device needs the header inline, but reports that it does not. The first descriptor is refused; its packets are
/// sent again.
#[test]
fn packets_without_required_inline_headers_are_resent() {
    require!(RDMA);
    let topology = MLX5.topology().replace("[[device.port]]", "min_inline = 'l2-unreported'\n[[device.port]]");
    under("mlx5::packets_without_required_inline_headers_are_resent", &topology, |_| {
        for mode in ["", "multi_packet = false"] {
            let pool = Pool::new("resent", 4096).expect("memory");
            let mut port = MLX5.start(&pool, mode, |_| ());
            assert!(!port.port.capabilities().mode.contains("inline"), "{mode}");
            let (sent, received) = sent_and_received(&mut port, &pool);
            assert_eq!(sent, received, "{mode}");
            let can = port.port.capabilities();
            assert!(can.mode.contains("send with 18 bytes inline"), "{mode}: {}", can.mode);
            assert!(can.notes.iter().any(|note| note.contains("18 bytes of each packet")), "{:?}", can.notes);
            assert_eq!(statistic(&mut port, "queue_resets"), 1, "{mode}");
            assert_eq!(port.tx[0].counters().drops.nonzero().count(), 0, "{mode}: {:?}", port.port.tx_statistics());
            assert_eq!(port.tx[0].counters().packets.get(), 200);
            finish(port, &pool);
        }
    });
}

/// The device reports its limits of flow rules, so that the driver provokes no refusal to find them.
#[test]
fn rule_limits_are_asked_for() {
    require!(RDMA);
    let keys =
        "class = 'connectx-5'\nsteering = { devx = true, modify_actions = 6, encap_bytes = 70 }\n[[device.port]]";
    under("mlx5::rule_limits_are_asked_for", &MLX5.topology().replace("[[device.port]]", keys), |nics| {
        let mut port = MLX5.open(MLX5.device, "");
        let rules = port.rule_hardware().expect("rules").capabilities();
        for table in [rules.ingress.as_ref(), rules.egress.as_ref()] {
            assert_eq!(table.expect("a table").actions.commands, 6);
        }
        let egress = &rules.egress.as_ref().expect("a table").actions.reformats;
        assert!(!egress.is_empty() && egress.iter().all(|reformat| reformat.max_header == 70), "{egress:?}");
        let refused: Vec<_> = nics.violations();
        let limits = |line: &&String| line.contains("header modifications; ") || line.contains("a header of ");
        assert_eq!(refused.iter().filter(limits).collect::<Vec<_>>(), [&""; 0]);
    });
}

#[test]
fn missing_device_features_are_reported() {
    require!(RDMA);
    let keys = "compression = false\nmulti_packet = false\nstriding = false\n[[device.port]]";
    under("mlx5::missing_device_features_are_reported", &MLX5.topology().replace("[[device.port]]", keys), |nics| {
        let pool = Pool::new("plain", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "rx_mode = 'striding'", |_| ());
        let can = port.port.capabilities();
        assert!(
            can.mode.starts_with("direct verbs, linear receive, plain completions, send by pointer"),
            "{}",
            can.mode
        );
        for what in ["strides", "compress", "multi-packet"] {
            assert!(can.notes.iter().any(|note| note.contains(what)), "{what}: {:?}", can.notes);
        }
        send_until_received(&mut port, &pool);
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn timestamps_are_times_of_the_devices_clock() {
    require!(RDMA);
    MLX5.under("mlx5::timestamps_are_times_of_the_devices_clock", "", |nics| {
        for mode in ["", "rx_mode = 'striding'"] {
            let pool = Pool::new("times", 4096).expect("memory");
            let mut port = MLX5.start(&pool, &format!("timestamps = true\n{mode}"), |_| ());
            assert!(port.port.capabilities().offloads.contains(Offloads::RX_TIMESTAMP));
            let start = (Instant::now(), port.port.read_clock().expect("a clock"));
            for count in [1, 1, 20] {
                let before = port.port.read_clock().expect("a clock");
                send(&mut port, (0..count).map(|_| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)));
                let received = receive(&mut port, count);
                let after = port.port.read_clock().expect("a clock");
                let mut times = vec![before];
                times.extend(received.iter().map(|packet| packet.timestamp().expect("a timestamp")));
                times.push(after);
                assert!(times.is_sorted() && before < after, "{mode}: {times:?}");
                std::thread::sleep(Duration::from_millis(2));
            }
            // Nanoseconds, although a tick of the device has 6.4 of them.
            let passed = port.port.read_clock().expect("a clock") - start.1;
            let most = start.0.elapsed().as_nanos() as u64;
            assert!((6_000_000..most).contains(&passed), "{passed} of at most {most}");
            finish(port, &pool);
        }
        let pool = Pool::new("times", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "", |_| ());
        assert_eq!(port.port.read_clock(), None, "timestamps are off");
        finish(port, &pool);
        assert_eq!(nics.violations(), [""; 0]);
    });
}

#[test]
fn timestamps_are_refused_if_the_clock_cannot_be_read() {
    require!(RDMA);
    let topology = MLX5.topology().replace("[[device.port]]", "clock_page = false\n[[device.port]]");
    under("mlx5::timestamps_are_refused_if_the_clock_cannot_be_read", &topology, |_| {
        let open = |settings: &str| OpenPort::open("dut", MLX5.plan(MLX5.device, settings));
        let error = open("timestamps = true").unwrap_err().to_string();
        assert!(error.contains("timestamps = true is not possible: its clock cannot be read"), "{error}");
        assert!(error.contains("ibv_query_rt_values_ex"), "{error}");
        open("timestamps = false").unwrap();
    });
}

#[test]
fn timestamps_of_another_clock_are_refused() {
    require!(RDMA);
    let topology = MLX5.topology().replace("[[device.port]]", "timestamps = 'real-time'\n[[device.port]]");
    under("mlx5::timestamps_of_another_clock_are_refused", &topology, |_| {
        let error = OpenPort::open("dut", MLX5.plan(MLX5.device, "timestamps = true")).unwrap_err().to_string();
        assert!(error.contains("the NIC stamps packets only with the time of day"), "{error}");
    });
}

/// Sets the MTU of the kernel's interface in sysfs, without changing the device.
fn set_interface_mtu(device: &str, mtu: u16) {
    let sysfs = std::env::var_os("SYSFS_PATH").expect("set for this process");
    let interfaces = Path::new(&sysfs).join("class/infiniband").join(device).join("device/net");
    for interface in interfaces.read_dir().expect("the device's interfaces") {
        std::fs::write(interface.expect("an interface").path().join("mtu"), mtu.to_string()).expect("its MTU");
    }
}

#[test]
fn a_frame_too_long_costs_itself_alone() {
    require!(RDMA);
    let device =
        |number| format!("[[device]]\nkind = 'mlx5'\nname = 'mlx5{number}'\n[[device.port]]\nlink = 'cable:a'\n");
    under("mlx5::a_frame_too_long_costs_itself_alone", &(device(0) + &device(1)), |nics| {
        let mut errors = 0;
        for (mode, mtu) in MODES.iter().flat_map(|mode| [(mode, 9000), (mode, 1500)]) {
            // The MTU when the queues are created; the sender uses a larger one.
            set_interface_mtu("mlx51", mtu);
            let pool = Pool::new("long", 8192).expect("memory");
            let mut far = MLX5.start(&pool, "", |_| ());
            let mut port = MLX5.start_on("mlx51", &pool, mode, |config| config.mtu = 1500);
            // More packets of each length than a ring holds.
            for round in 1..=300 {
                send(
                    &mut far,
                    [5000, 8900, 1400, 30].map(|payload| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, payload)),
                );
                let received = receive(&mut port, 2);
                assert_eq!([received[0].len(), received[1].len()], [1442, 72], "{mode}");
                assert!(received.iter().all(|packet| has_valid_checksums(&bytes(packet))), "{mode}");
                assert_eq!(port.rx[0].counters().drops.get(DropReason::TooLong), 2 * round, "{mode}");
                drop(port.port.events());
            }
            assert_eq!(statistic(&mut port, "queue_resets"), 0);
            errors += if mtu == 1500 && !mode.contains("striding") { 600 } else { 0 };
            let refused = nics.violations();
            assert!(refused.iter().all(|line| line.contains("do not fit")), "{refused:?}");
            assert_eq!(refused.len(), errors, "{mode}: without a sink, and only then, the device reports errors");
            for port in [far, port] {
                let StartedPort { port, rx, tx } = port;
                drop(port.stop(rx, tx).expect("the port stops"));
            }
            assert_eq!(pool.outstanding(), 0);
        }
    });
}

#[test]
fn sleeping_workers_are_woken_by_packets() {
    require!(RDMA);
    wakeups(MLX5, "mlx5::sleeping_workers_are_woken_by_packets", "", "");
}

#[test]
fn sleeping_workers_wake_with_striding_rq() {
    require!(RDMA);
    let name = "mlx5::sleeping_workers_wake_with_striding_rq";
    wakeups(MLX5, name, "", "rx_mode = 'striding'\n");
}

#[test]
fn sleeping_workers_wake_with_doorbell_scanning() {
    require!(RDMA);
    let name = "mlx5::sleeping_workers_wake_with_doorbell_scanning";
    wakeups(MLX5, name, "doorbells = 'scan'\n", "");
}

#[test]
fn large_tcp_packets_are_cut_by_the_device() {
    require!(RDMA);
    large_tcp(MLX5, "mlx5::large_tcp_packets_are_cut_by_the_device");
}

#[test]
fn oversized_tcp_packets_are_cut_in_software() {
    require!(RDMA);
    oversized_tcp(MLX5, "mlx5::oversized_tcp_packets_are_cut_in_software", "max_tso = 20000", 20_000);
}

#[test]
fn a_stopped_transmit_queue_is_recreated() {
    require!(RDMA);
    MLX5.under("mlx5::a_stopped_transmit_queue_is_recreated", "", |nics| {
        let pool = Pool::new("errors", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "", |_| ());
        let errors = |port: &StartedPort| port.tx[0].counters().drops.get(DropReason::TxError);
        for (round, code) in (1..).zip([1, 4, 5, 0x14]) {
            send_until_received(&mut port, &pool);
            let before = errors(&port);
            nics.inject(&format!("kind = 'completion-error'\ncode = {code}"));
            send(&mut port, (0..8).map(|_| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)));
            send_until_received(&mut port, &pool);
            assert_eq!(statistic(&mut port, "queue_resets"), round, "syndrome {code:#x}");
            assert!(errors(&port) >= before + 8);
            assert!(port.port.capabilities().mode.contains("multi-packet"), "nothing is concluded from this one");
        }
        finish(port, &pool);
    });
}

#[test]
fn a_stopped_receive_queue_restarts_alone() {
    require!(RDMA);
    MLX5.under("mlx5::a_stopped_receive_queue_restarts_alone", "", |nics| {
        for (mode, mtu) in MODES.iter().flat_map(|mode| [(mode, 9000), (mode, 1500)]) {
            set_interface_mtu("mlx50", mtu);
            let pool = Pool::new("stopped", 4096).expect("memory");
            let mut port = MLX5.start(&pool, mode, |config| {
                two_queues(config);
                config.mtu = mtu;
            });
            // The first error does not stop the queue by itself, but the other descriptors of the ring are
            // flushed.
            for (round, code) in (1..=3).zip([1, 4, 2]) {
                for _ in 0..10 {
                    send_until_received(&mut port, &pool);
                }
                nics.inject(&format!("kind = 'completion-error'\nqueue = 'rx'\ncode = {code}"));
                send(&mut port, (0..6).map(|_| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)));
                send_until_received(&mut port, &pool);
                assert_eq!(statistic(&mut port, "queue_resets"), round, "{mode}");
            }
            // More packets than the ring holds.
            for _ in 0..300 {
                send(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, usize::from(mtu).min(3100) - 100)]);
                assert!(has_valid_checksums(&bytes(&receive(&mut port, 1)[0])), "{mode}");
            }
            assert_eq!(statistic(&mut port, "buried_packets"), 0);
            finish(port, &pool);
        }
    });
}

#[test]
fn auto_names_rdma_devices_and_why_one_was_refused() {
    require!(RDMA);
    MLX5.under("mlx5::auto_names_rdma_devices_and_why_one_was_refused", "", |nics| {
        let auto = EmulatedNic { driver: "auto", ..MLX5 };
        let refused = |device: &str| match OpenPort::open("dut", auto.plan(device, "")) {
            Ok(_) => panic!("there is no {device}"),
            Err(error) => error.to_string(),
        };
        // The control socket exists once a device was opened.
        drop(MLX5.open("mlx50", ""));
        let text = refused("mlx57");
        assert!(text.contains("no device 'mlx57'") && text.contains("RDMA devices: mlx50 (nic0)"), "{text}");
        nics.inject("kind = 'refuse'\ncommand = 'alloc_pd'\ncount = 1000");
        for device in ["mlx50", "mlx50/1"] {
            let text = refused(device);
            assert!(text.contains(&format!("no driver can open '{device}'")), "{text}");
            assert!(text.contains("ibv_alloc_pd on mlx50 failed: ENOMEM"), "{text}");
        }
    });
}
