//! Arbitrary use of a device by a program: commands in both forms, doorbells and memory writes in any order.
//!
//! A record consists of a kind (one byte), a length (two bytes) and that many bytes:
//!
//! - 0: a command by write(2)
//! - 1: a doorbell (offset, value)
//! - 2: a memory write (offset, bytes)
//! - 3: a command by ioctl(2)
//! - 4: a poll of the device thread
//! - 5: an RDMA netlink message
//! - 6: a fault in TOML

use wirepath_nic_emulator::device::Store;
use wirepath_nic_emulator::mem_host::{BASE, EmulatorHarness};

/// Runs the records of an input against a device of a topology.
pub fn play(nic: &str, data: &[u8]) {
    let harness = EmulatorHarness::new(nic);
    let mut rest = data;
    while let Some((&[kind, low, high], tail)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes([low, high])).min(tail.len());
        let (bytes, next) = tail.split_at(length);
        rest = next;
        match kind % 7 {
            0 => _ = harness.write(BASE, bytes),
            1 => {
                if let Some((&offset, value)) = bytes.split_first_chunk::<2>() {
                    let mut wide = [0; 8];
                    let size = value.len().min(8);
                    wide[..size].copy_from_slice(&value[..size]);
                    let store = Store {
                        offset: usize::from(u16::from_le_bytes(offset)) % 4096,
                        size,
                        value: u64::from_le_bytes(wide),
                    };
                    harness.emulator.doorbell(harness.context, store);
                }
            }
            2 => {
                if let Some((&offset, bytes)) = bytes.split_first_chunk::<4>() {
                    harness.poke(BASE + u64::from(u32::from_le_bytes(offset)) % (1 << 20), bytes);
                }
            }
            3 => {
                harness.poke(BASE, bytes);
                _ = harness.emulator.ioctl(harness.fd, 0xc018_1b01, BASE);
            }
            4 => _ = harness.emulator.serve(),
            5 => {
                harness.emulator.netlink_open(-7);
                harness.emulator.netlink_send(-7, bytes);
                while harness.emulator.netlink_receive(-7, false).is_ok() {}
            }
            _ => _ = harness.emulator.inject_toml(&String::from_utf8_lossy(bytes)),
        }
    }
    harness.emulator.counters();
}
