//! Anything that a program may do with a device: commands in both forms, doorbells, writes to its own memory, in any order.
//!
//! A record is a kind (one byte), a length (two), and so many bytes: 0 a command by write(2), 1 a doorbell (offset, value), 2 memory
//! (offset, bytes), 3 a command by ioctl(2), 4 a look of the device thread, 5 an RDMA netlink message, 6 a fault in words.

use wirepath_nic_emulator::device::Store;
use wirepath_nic_emulator::vectors::{BASE, Bench};

/// Plays a program against a device of this topology.
pub fn play(nic: &str, data: &[u8]) {
    let bench = Bench::new(nic);
    let mut rest = data;
    while let Some((&[kind, low, high], tail)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes([low, high])).min(tail.len());
        let (bytes, next) = tail.split_at(length);
        rest = next;
        match kind % 7 {
            0 => _ = bench.write(BASE, bytes),
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
                    bench.emulator.doorbell(bench.context, store);
                }
            }
            2 => {
                if let Some((&offset, bytes)) = bytes.split_first_chunk::<4>() {
                    bench.poke(BASE + u64::from(u32::from_le_bytes(offset)) % (1 << 20), bytes);
                }
            }
            3 => {
                bench.poke(BASE, bytes);
                _ = bench.emulator.ioctl(bench.fd, 0xc018_1b01, BASE);
            }
            4 => _ = bench.emulator.serve(),
            5 => {
                bench.emulator.netlink_open(-7);
                bench.emulator.netlink_send(-7, bytes);
                while bench.emulator.netlink_receive(-7, false).is_ok() {}
            }
            _ => _ = bench.emulator.order_text(&String::from_utf8_lossy(bytes)),
        }
    }
    bench.emulator.counters();
}
