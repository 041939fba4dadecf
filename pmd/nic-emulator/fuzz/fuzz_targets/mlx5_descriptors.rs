//! Descriptors of a configured ConnectX.
//!
//! A record consists of a kind (one byte), a length (two bytes) and that many bytes:
//!
//! - 0: a send descriptor with corrected index and queue number (blocks, bytes)
//! - 1: a send descriptor as it is (blocks, bytes)
//! - 2: a receive descriptor (receiver, slot, bytes)
//! - 3: a reset of the send queue
//! - 4: content of the send buffers
//! - 5: a poll for received packets

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_nic_emulator::mem_host::Connectx;

fuzz_target!(|data: &[u8]| {
    let mut nic = Connectx::new("");
    nic.receive_everything();
    let mut rest = data;
    while let Some((&[kind, low, high], tail)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes([low, high])).min(tail.len());
        let (bytes, next) = tail.split_at(length);
        rest = next;
        match (kind % 6, bytes) {
            (honest @ (0 | 1), [blocks, descriptor @ ..]) => nic.post(descriptor, u32::from(*blocks), honest == 0),
            (2, [receiver, slot, descriptor @ ..]) => {
                nic.overwrite_rx_wqe(usize::from(*receiver), u32::from(*slot), descriptor);
            }
            (3, _) => nic.restart(),
            (4, memory) => nic.fill(memory),
            (5, _) => drop(nic.arrivals()),
            _ => {}
        }
    }
    drop(nic.arrivals());
    nic.harness.emulator.counters();
});
