//! The `mlx5` driver on emulated NICs: what the contract of all drivers does not ask for. Offloads, hostile completions, errors, a device
//! that is reset, and all of it in every mode. Each test starts itself again in a process with the NICs.

#[path = "common/nic.rs"]
mod nic;

use std::path::Path;
use std::time::Duration;

use nic::{
    Kind, bytes, every_nic, figure, finish, is_sound, large_tcp, packet, receive, send, sleepers_are_woken, two_queues,
    under, until_it_flows,
};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::offload::{Flags, Verdicts};
use wirepath_pmd::packet::{Batch, L3, L4, Packet, Pool};
use wirepath_pmd::port::{Offloads, OpenPort, StartedPort};
use wirepath_testlab::{Need, require};

const RDMA: Need = Need::File("/etc/libibverbs.d/mlx5.driver");

/// Settings of the driver for every receive mode and every transmit mode.
const MODES: &[&str] = &[
    "compress = 'off'",
    "compress = 'hash'\nmulti_packet = false",
    "compress = 'checksum'\ninline = 300",
    "receive = 'striding'\ncompress = 'off'\nmin_inline = '18'",
    "receive = 'striding'\ncompress = 'stride'",
];

const MLX5: Kind = Kind { driver: "mlx5", device: "mlx50", modes: MODES };

every_nic!(
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
    MLX5.under("checksums_and_tags_are_the_devices_work", "", |nics| {
        for mode in MODES {
            let pool = Pool::new("offloads", 8192).expect("memory");
            let mut port = MLX5.start(&pool, mode, |_| ());
            for l3 in [L3::Ipv4, L3::Ipv6] {
                for l4 in [L4::Tcp, L4::Udp] {
                    for (payload, tag) in [(100, None), (1, None), (8000, None), (1400, Some(0xb123))] {
                        let mut sent = packet(&pool, l3, l4, payload);
                        if let Some(tag) = tag {
                            sent.set_vlan(tag);
                        }
                        // A tag that lies in the packet is taken off again.
                        let len = sent.len();
                        send(&mut port, [sent]);
                        let got = receive(&mut port, 1).remove(0);
                        assert_eq!((got.len(), got.in_port()), (len, 3));
                        assert!(is_sound(&bytes(&got)), "{mode} {l3:?} {l4:?} {payload}");
                        assert_eq!(got.vlan(), tag);
                        assert_eq!(got.verdicts(), Verdicts::L3_GOOD.with(Verdicts::L4_GOOD));
                        assert_eq!((got.mark(), got.timestamp()), (None, None));
                        // Alone, a packet is not compressed.
                        assert!(got.rss_hash().is_some());
                    }
                }
            }
            // A wrong one is not mended on the way, and called wrong; of UDP, nobody knows whether it was to have a checksum.
            for (l4, flags, verdicts) in [
                (L4::Udp, Flags::NONE, Verdicts::L3_BAD),
                (L4::Udp, Flags::TX_L3_CHECKSUM, Verdicts::L3_GOOD),
                (L4::Tcp, Flags::TX_L3_CHECKSUM, Verdicts::L3_GOOD.with(Verdicts::L4_BAD)),
            ] {
                let mut wrong = packet(&pool, L3::Ipv4, l4, 50);
                wrong.set_flags(flags);
                send(&mut port, [wrong]);
                assert_eq!(receive(&mut port, 1)[0].verdicts(), verdicts);
            }
            assert_eq!(nics.refused(), [""; 0]);
            finish(port, &pool);
        }
    });
}

/// Longest packets of the port and of the kernel's interface: descriptors of several buffers, of one and a sink, of one.
const MTUS: [(u16, u16); 3] = [(9000, 9000), (1500, 9000), (1500, 1500)];

/// Every receive mode with every kind of descriptor.
fn with_mtus() -> impl Iterator<Item = (&'static str, u16, u16)> {
    MTUS.into_iter().flat_map(|(port, interface)| MODES.iter().map(move |mode| (*mode, port, interface)))
}

#[test]
fn bursts_are_compressed_and_hashed_alike_in_every_mode() {
    require!(RDMA);
    MLX5.under("bursts_are_compressed_and_hashed_alike_in_every_mode", "", |nics| {
        for (mode, mtu, interface) in with_mtus() {
            set_interface_mtu("mlx50", interface);
            let pool = Pool::new("bursts", 8192).expect("memory");
            let mut port =
                MLX5.start(&pool, mode, |config| (config.mtu, config.rx_queues, config.tx_queues) = (mtu, 2, 2));
            for round in 0..100usize {
                let n = 1 + round % 60;
                // Runs of one flow, which compress, and of several, which do not.
                let most = usize::from(mtu) / 2 - 50;
                let lengths: Vec<_> = (0..n).map(|i| if round % 3 == 0 { 30 } else { 30 + i * 7 % most }).collect();
                send(&mut port, lengths.iter().map(|payload| packet(&pool, L3::Ipv4, L4::Udp, *payload)));
                let got = receive(&mut port, n);
                assert!(got.iter().all(|packet| is_sound(&bytes(packet))), "{mode}, {mtu}: round {round}");
                let lens: Vec<_> = got.iter().map(|packet| packet.len() - 42).collect();
                assert_eq!(lens, lengths, "{mode}, {mtu}: round {round}");
                if !mode.contains("checksum") && !mode.contains("stride") {
                    let hash = got[0].rss_hash();
                    assert!(hash.is_some() && got.iter().all(|packet| packet.rss_hash() == hash), "{mode}, {mtu}");
                }
            }
            assert_eq!(nics.refused(), [""; 0]);
            assert_eq!(figure(&mut port, "queue_resets"), 0);
            finish(port, &pool);
        }
    });
}

/// Packets of many flows share sessions in every format; where minis tell no hash, nobody is told that of another packet.
#[test]
fn flows_share_sessions_and_keep_their_hashes() {
    require!(RDMA);
    MLX5.under("flows_share_sessions_and_keep_their_hashes", "", |nics| {
        let sessions = || {
            let all: serde_json::Value = serde_json::from_str(&nics.ask("counters")).expect("counters");
            all["devices"][0]["compressed_sessions"].as_u64().expect("a number")
        };
        let mut told = Vec::new();
        for (mode, mtu, interface) in with_mtus() {
            set_interface_mtu("mlx50", interface);
            let pool = Pool::new("flows", 8192).expect("memory");
            let mut port = MLX5.start(&pool, mode, |config| config.mtu = mtu);
            let before = sessions();
            let (mut hashes, mut several) = (Vec::new(), 0);
            for round in 0..20u16 {
                let flows = (0..48u16).map(|flow| {
                    let mut packet = packet(&pool, L3::Ipv4, L4::Udp, 30);
                    packet.data_mut()[34..36].copy_from_slice(&(round * 48 + flow).to_be_bytes());
                    packet
                });
                send(&mut port, flows);
                let got = receive(&mut port, 48);
                assert!(got.iter().all(|packet| (packet.len(), packet.in_port()) == (72, 3)), "{mode}, {mtu}");
                hashes.extend(got.iter().map(Packet::rss_hash));
                several = sessions() - before;
            }
            if told.is_empty() {
                assert!(hashes.iter().all(Option::is_some));
                told.clone_from(&hashes);
            }
            if mode.contains("'off'") {
                assert_eq!(several, 0, "{mode}");
                assert_eq!(hashes, told, "{mode}, {mtu}");
            } else {
                // Of 960 packets of as many flows.
                assert!((1..480).contains(&several), "{mode}: {several} sessions");
                let some = hashes.iter().filter(|hash| hash.is_some()).count();
                let wrong = hashes.iter().zip(&told).filter(|(hash, own)| hash.is_some() && hash != own).count();
                assert_eq!((some == told.len(), wrong), (mode.contains("'hash'"), 0), "{mode}, {mtu}");
            }
            finish(port, &pool);
        }
        assert_eq!(nics.refused(), [""; 0]);
    });
}

/// A lone packet goes by BlueFlame and a burst by the register, in both models of their pages.
fn blue_flame(name: &str, pages: &str, doorbells: &str) {
    require!(RDMA);
    let device = MLX5.topology().replace("[[device.port]]", &format!("doorbell_pages = '{pages}'\n[[device.port]]"));
    under(name, &format!("doorbells = '{doorbells}'\n{device}"), |nics| {
        for (mode, lone, burst) in [
            ("", 1, 0),
            ("blue_flame = 0", 0, 0),
            ("multi_packet = false", 1, 0),
            // Nine packets take eleven segments, three blocks.
            ("blue_flame = 256", 1, 1),
            ("inline = 300\nblue_flame = 256", 1, 0),
        ] {
            let pool = Pool::new("flame", 4096).expect("memory");
            let mut port = MLX5.start(&pool, mode, two_queues);
            assert_eq!(port.port.capabilities().mode.contains("BlueFlame"), !mode.contains("blue_flame = 0"));
            for count in [1, 9, 1, 9] {
                for queue in 0..2 {
                    let mut batch: Batch = (0..count).map(|_| packet(&pool, L3::Ipv4, L4::Udp, 30)).collect();
                    let sent: Vec<_> = batch.iter().map(bytes).collect();
                    // Those that ask for nothing share a descriptor.
                    batch.iter_mut().for_each(|packet| packet.set_flags(Flags::NONE));
                    port.tx[queue].transmit(&mut batch);
                    assert!(batch.is_empty());
                    assert_eq!(receive(&mut port, count).iter().map(bytes).collect::<Vec<_>>(), sent, "{mode}");
                }
            }
            let of_each = 2 * (lone + burst);
            assert_eq!(nics.sent("blue_flames"), [of_each; 2], "{pages} pages, {mode}");
            assert_eq!((nics.sent("doorbells"), nics.sent("wrong_doorbells")), (vec![4; 2], vec![0; 2]));
            assert_eq!(nics.refused(), [""; 0]);
            finish(port, &pool);
        }
        // More queues than registers: those that share one leave it at the doorbell.
        let pool = Pool::new("flames", 16384).expect("memory");
        let mut port = MLX5.start(&pool, "", |config| (config.tx_queues, config.depth) = (20, 64));
        for queue in 0..20 {
            let mut batch: Batch = [packet(&pool, L3::Ipv4, L4::Udp, 30)].into_iter().collect();
            port.tx[queue].transmit(&mut batch);
            assert!(is_sound(&bytes(&receive(&mut port, 1)[0])));
        }
        assert_eq!(nics.sent("doorbells"), [1; 20]);
        let registers = if pages == "static" { 15 } else { 16 };
        assert_eq!(nics.sent("blue_flames").iter().sum::<u64>(), 20 - 2 * (20 - registers));
        assert_eq!(nics.refused(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn blue_flame_in_pages_that_are_objects() {
    blue_flame("blue_flame_in_pages_that_are_objects", "objects", "trap");
}

#[test]
fn blue_flame_in_pages_of_old() {
    blue_flame("blue_flame_in_pages_of_old", "static", "trap");
}

#[test]
fn blue_flame_beside_a_device_that_looks_later() {
    blue_flame("blue_flame_beside_a_device_that_looks_later", "objects", "queue");
}

/// A packet with this frame in VXLAN, whose own checksums are left to the device.
fn in_vxlan(pool: &Pool, frame: &[u8]) -> Packet {
    let mut packet = packet(pool, L3::Ipv4, L4::Udp, 8 + frame.len());
    let data = packet.data_mut();
    data[36..38].copy_from_slice(&4789u16.to_be_bytes());
    data[42..50].copy_from_slice(&[8, 0, 0, 0, 0, 0, 42, 0]);
    data[50..].copy_from_slice(frame);
    packet
}

#[test]
fn of_a_tunnel_the_inner_checksums_are_told_where_the_device_is_to_look_into_it() {
    require!(RDMA);
    MLX5.under("of_a_tunnel_the_inner_checksums_are_told_where_the_device_is_to_look_into_it", "", |nics| {
        let right = Verdicts::L3_GOOD.with(Verdicts::L4_GOOD);
        let wrong = Verdicts::L3_GOOD.with(Verdicts::L4_BAD);
        for (mode, told) in [("", wrong), ("receive = 'striding'", wrong), ("tunnels = false", right)] {
            let pool = Pool::new("tunnels", 4096).expect("memory");
            let mut port = MLX5.start(&pool, mode, |_| ());
            assert_eq!(port.port.capabilities().offloads.contains(Offloads::TX_TUNNEL_CHECKSUM), told == wrong);
            send(&mut port, [packet(&pool, L3::Ipv4, L4::Tcp, 40)]);
            let mut inner = bytes(&receive(&mut port, 1)[0]);
            send(&mut port, [in_vxlan(&pool, &inner)]);
            assert_eq!(receive(&mut port, 1)[0].verdicts(), right, "{mode}");
            *inner.last_mut().expect("a payload") ^= 1;
            send(&mut port, [in_vxlan(&pool, &inner)]);
            assert_eq!(receive(&mut port, 1)[0].verdicts(), told, "{mode}");
            assert_eq!(nics.refused(), [""; 0]);
            finish(port, &pool);
        }
    });
}

#[test]
fn a_device_that_wants_headers_in_descriptors_is_found_out() {
    require!(RDMA);
    let topology = MLX5.topology().replace("[[device.port]]", "min_inline = 'l2'\n[[device.port]]");
    under("a_device_that_wants_headers_in_descriptors_is_found_out", &topology, |_| {
        let pool = Pool::new("inline", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "", |_| ());
        assert!(port.port.capabilities().mode.contains("multi-packet send"));
        until_it_flows(&mut port, &pool);
        let can = port.port.capabilities();
        assert!(can.mode.contains("send with 18 bytes inline"), "{}", can.mode);
        assert!(can.notes.iter().any(|note| note.contains("18 bytes of each packet")), "{:?}", can.notes);
        assert_eq!(figure(&mut port, "queue_resets"), 1);
        finish(port, &pool);
    });
}

#[test]
fn what_the_device_lacks_is_not_used_and_said() {
    require!(RDMA);
    let keys = "compression = false\nmulti_packet = false\nstriding = false\n[[device.port]]";
    under("what_the_device_lacks_is_not_used_and_said", &MLX5.topology().replace("[[device.port]]", keys), |nics| {
        let pool = Pool::new("plain", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "receive = 'striding'", |_| ());
        let can = port.port.capabilities();
        assert!(
            can.mode.starts_with("direct verbs, linear receive, plain completions, send by pointer"),
            "{}",
            can.mode
        );
        for what in ["strides", "compress", "multi-packet"] {
            assert!(can.notes.iter().any(|note| note.contains(what)), "{what}: {:?}", can.notes);
        }
        until_it_flows(&mut port, &pool);
        assert_eq!(nics.refused(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn timestamps_count_nanoseconds() {
    require!(RDMA);
    MLX5.under("timestamps_count_nanoseconds", "", |nics| {
        let pool = Pool::new("times", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "timestamps = true", |_| ());
        let mut last = 0;
        for _ in 0..3 {
            send(&mut port, [packet(&pool, L3::Ipv4, L4::Udp, 30)]);
            let time = receive(&mut port, 1)[0].timestamp().expect("a timestamp");
            assert!(time > last);
            last = time;
            std::thread::sleep(Duration::from_millis(2));
        }
        finish(port, &pool);
        assert_eq!(nics.refused(), [""; 0]);
    });
}

/// Has sysfs tell of another MTU of the kernel's interface than the device has.
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
    under("a_frame_too_long_costs_itself_alone", &(device(0) + &device(1)), |nics| {
        let mut errors = 0;
        for (mode, mtu) in MODES.iter().flat_map(|mode| [(mode, 9000), (mode, 1500)]) {
            // The interface had this one when queues were made; by now it has more.
            set_interface_mtu("mlx51", mtu);
            let pool = Pool::new("long", 8192).expect("memory");
            let mut far = MLX5.start(&pool, "", |_| ());
            let mut port = MLX5.start_on("mlx51", &pool, mode, |config| config.mtu = 1500);
            // More of each than a ring holds.
            for round in 1..=300 {
                send(&mut far, [5000, 8900, 1400, 30].map(|payload| packet(&pool, L3::Ipv4, L4::Udp, payload)));
                let received = receive(&mut port, 2);
                assert_eq!([received[0].len(), received[1].len()], [1442, 72], "{mode}");
                assert!(received.iter().all(|packet| is_sound(&bytes(packet))), "{mode}");
                assert_eq!(port.rx[0].counters().drops.get(DropReason::TooLong), 2 * round, "{mode}");
                drop(port.port.events());
            }
            assert_eq!(figure(&mut port, "queue_resets"), 0);
            errors += if mtu == 1500 && !mode.contains("striding") { 600 } else { 0 };
            let refused = nics.refused();
            assert!(refused.iter().all(|line| line.contains("found no room")), "{refused:?}");
            assert_eq!(refused.len(), errors, "{mode}: without a sink, and only then, the device tells of errors");
            for port in [far, port] {
                let StartedPort { port, rx, tx } = port;
                drop(port.stop(rx, tx).expect("the port stops"));
            }
            assert_eq!(pool.outstanding(), 0);
        }
    });
}

#[test]
fn workers_that_sleep_are_woken_by_packets() {
    require!(RDMA);
    sleepers_are_woken(MLX5, "workers_that_sleep_are_woken_by_packets", "", "");
}

#[test]
fn workers_that_sleep_are_woken_by_packets_in_strides() {
    require!(RDMA);
    let name = "workers_that_sleep_are_woken_by_packets_in_strides";
    sleepers_are_woken(MLX5, name, "", "receive = 'striding'\n");
}

#[test]
fn workers_that_sleep_are_woken_by_a_device_that_looks_at_records() {
    require!(RDMA);
    let name = "workers_that_sleep_are_woken_by_a_device_that_looks_at_records";
    sleepers_are_woken(MLX5, name, "doorbells = 'scan'\n", "");
}

#[test]
fn large_tcp_packets_are_cut_by_the_device() {
    require!(RDMA);
    large_tcp(MLX5, "large_tcp_packets_are_cut_by_the_device");
}

#[test]
fn a_queue_that_the_device_stopped_is_made_anew() {
    require!(RDMA);
    MLX5.under("a_queue_that_the_device_stopped_is_made_anew", "", |nics| {
        let pool = Pool::new("errors", 4096).expect("memory");
        let mut port = MLX5.start(&pool, "", |_| ());
        let errors = |port: &StartedPort| port.tx[0].counters().drops.get(DropReason::TxError);
        for (round, code) in (1..).zip([1, 4, 5, 0x14]) {
            until_it_flows(&mut port, &pool);
            let before = errors(&port);
            nics.order(&format!("kind = 'completion-error'\ncode = {code}"));
            send(&mut port, (0..8).map(|_| packet(&pool, L3::Ipv4, L4::Udp, 30)));
            until_it_flows(&mut port, &pool);
            assert_eq!(figure(&mut port, "queue_resets"), round, "syndrome {code:#x}");
            assert!(errors(&port) >= before + 8);
            assert!(port.port.capabilities().mode.contains("multi-packet"), "nothing is concluded from this one");
        }
        finish(port, &pool);
    });
}

#[test]
fn one_receive_queue_that_the_device_stopped_is_started_anew_alone() {
    require!(RDMA);
    MLX5.under("one_receive_queue_that_the_device_stopped_is_started_anew_alone", "", |nics| {
        for (mode, mtu) in MODES.iter().flat_map(|mode| [(mode, 9000), (mode, 1500)]) {
            set_interface_mtu("mlx50", mtu);
            let pool = Pool::new("stopped", 4096).expect("memory");
            let mut port = MLX5.start(&pool, mode, |config| {
                two_queues(config);
                config.mtu = mtu;
            });
            // The first does not stop a queue by itself, but the others of the ring are flushed.
            for (round, code) in (1..=3).zip([1, 4, 2]) {
                for _ in 0..10 {
                    until_it_flows(&mut port, &pool);
                }
                nics.order(&format!("kind = 'completion-error'\nqueue = 'rx'\ncode = {code}"));
                send(&mut port, (0..6).map(|_| packet(&pool, L3::Ipv4, L4::Udp, 30)));
                until_it_flows(&mut port, &pool);
                assert_eq!(figure(&mut port, "queue_resets"), round, "{mode}");
            }
            // As many as the ring holds, and more.
            for _ in 0..300 {
                send(&mut port, [packet(&pool, L3::Ipv4, L4::Udp, usize::from(mtu).min(3100) - 100)]);
                assert!(is_sound(&bytes(&receive(&mut port, 1)[0])), "{mode}");
            }
            assert_eq!(figure(&mut port, "buried_packets"), 0);
            finish(port, &pool);
        }
    });
}

#[test]
fn auto_tells_of_rdma_devices_and_why_one_was_not_taken() {
    require!(RDMA);
    MLX5.under("auto_tells_of_rdma_devices_and_why_one_was_not_taken", "", |nics| {
        let auto = Kind { driver: "auto", ..MLX5 };
        let refused = |device: &str| match OpenPort::open("dut", auto.plan(device, "")) {
            Ok(_) => panic!("there is no {device}"),
            Err(error) => error.to_string(),
        };
        // Somebody listens for orders once a device was open.
        drop(MLX5.open("mlx50", ""));
        let text = refused("mlx57");
        assert!(text.contains("no device 'mlx57'") && text.contains("RDMA devices: mlx50 (nic0)"), "{text}");
        nics.order("kind = 'refuse'\ncommand = 'alloc_pd'\ncount = 1000");
        for device in ["mlx50", "mlx50/1"] {
            let text = refused(device);
            assert!(text.contains(&format!("no driver can open '{device}'")), "{text}");
            assert!(text.contains("ibv_alloc_pd on mlx50 failed: ENOMEM"), "{text}");
        }
    });
}
