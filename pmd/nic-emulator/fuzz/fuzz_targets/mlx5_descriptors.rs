//! Descriptors of an emulated ConnectX that is set up right.
//!
//! A record is a kind (one byte), a length (two), and so many bytes: 0 a send descriptor with its right index and queue (blocks, bytes), 1 the
//! same as it is, 2 a receive descriptor (receiver, slot, bytes), 3 the send queue started anew, 4 memory that is sent, 5 a look at what
//! arrived.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_nic_emulator::vectors::Connectx;

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
                nic.spoil_receive(usize::from(*receiver), u32::from(*slot), descriptor);
            }
            (3, _) => nic.restart(),
            (4, memory) => nic.fill(memory),
            (5, _) => drop(nic.arrivals()),
            _ => {}
        }
    }
    drop(nic.arrivals());
    nic.bench.emulator.counters();
});
