//! Tests of the `verbs` driver on the emulated ConnectX, under the unmodified libmlx5, beyond the contract of
//! all drivers.

use crate::common::bytes;
use crate::emulated::{
    EmulatedNic, checksum_cases, finish, has_valid_checksums, nic_tests, packet, receive, send, send_until_received,
    under,
};
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Pool, PtypeL3, PtypeL4};
use wirepath_pmd::port::OpenPort;
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
