//! The `verbs` driver on the emulated ConnectX, under the unmodified libmlx5: what the contract of all drivers does not ask for.

#[path = "common/nic.rs"]
mod nic;

use nic::{Kind, bytes, every_nic, finish, is_sound, packet, receive, send};
use wirepath_pmd::packet::offload::{Flags, Verdicts};
use wirepath_pmd::packet::{L3, L4, Pool};
use wirepath_testlab::{Need, require};

const RDMA: Need = Need::File("/etc/libibverbs.d/mlx5.driver");

const VERBS: Kind = Kind { driver: "verbs", device: "mlx50", modes: &["", "checksums = false"] };

every_nic!(
    VERBS,
    RDMA,
    // Those that reach the driver: libmlx5 counts the completions of a receive queue instead of reading their positions, and makes something of
    // its own of one of the wrong kind.
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

#[test]
fn checksums_are_the_devices_work_or_the_drivers() {
    require!(RDMA);
    VERBS.under("checksums_are_the_devices_work_or_the_drivers", "", |nics| {
        for mode in VERBS.modes {
            let pool = Pool::new("offloads", 8192).expect("memory");
            let mut port = VERBS.start(&pool, mode, |_| ());
            for l3 in [L3::Ipv4, L3::Ipv6] {
                for l4 in [L4::Tcp, L4::Udp] {
                    for (payload, tag) in [(100, None), (1, None), (8000, None), (1400, Some(0xb123))] {
                        let mut sent = packet(&pool, l3, l4, payload);
                        if let Some(tag) = tag {
                            sent.set_vlan(tag);
                        }
                        let len = sent.len();
                        send(&mut port, [sent]);
                        let got = bytes(&receive(&mut port, 1)[0]);
                        // The tag lies in the frame.
                        let untagged = match tag {
                            Some(tag) => {
                                assert_eq!((&got[12..14], &got[14..16]), (&[0x81, 0][..], &u16::to_be_bytes(tag)[..]));
                                [&got[..12], &got[16..]].concat()
                            }
                            None => got,
                        };
                        assert!(untagged.len() == len && is_sound(&untagged), "{mode} {l3:?} {l4:?} {payload}");
                    }
                }
            }
            // libmlx5 tells nothing of checksums in work queues, good or bad.
            for flags in [Flags::NONE, Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM)] {
                let mut sent = packet(&pool, L3::Ipv4, L4::Udp, 50);
                sent.set_flags(flags);
                send(&mut port, [sent]);
                assert_eq!(receive(&mut port, 1)[0].verdicts(), Verdicts::NONE);
            }
            assert_eq!(nics.refused(), [""; 0]);
            finish(port, &pool);
        }
    });
}

#[test]
fn checksums_that_the_library_does_not_know_of_are_computed_in_software() {
    const NAME: &str = "checksums_that_the_library_does_not_know_of_are_computed_in_software";
    require!(RDMA);
    VERBS.under(NAME, "", |nics| {
        let pool = Pool::new("granted", 8192).expect("memory");
        let port = VERBS.start(&pool, "", |_| ());
        let capabilities = port.port.capabilities();
        assert!(capabilities.mode.contains("checksums sent by the device"), "{:?}", capabilities.notes);
        finish(port, &pool);
        for command in ["query_device", "query_port"] {
            // The first is the library's own, as it opens the device; those that follow are answered.
            nics.order(&format!("kind = 'refuse'\ncommand = '{command}'\nerrno = 'EAGAIN'"));
            let pool = Pool::new("refused", 8192).expect("memory");
            let mut port = VERBS.start(&pool, "", |_| ());
            let capabilities = port.port.capabilities();
            assert!(capabilities.mode.contains("checksums in software"), "{command}: {}", capabilities.mode);
            let is_told = |note: &String| note.contains("libmlx5 refuses them") && note.contains(command);
            assert!(capabilities.notes.iter().any(is_told), "{command}: {:?}", capabilities.notes);
            send(&mut port, [packet(&pool, L3::Ipv4, L4::Tcp, 100)]);
            assert!(is_sound(&bytes(&receive(&mut port, 1)[0])), "{command}");
            finish(port, &pool);
        }
        assert_eq!(nics.refused(), [""; 0]);
    });
}
