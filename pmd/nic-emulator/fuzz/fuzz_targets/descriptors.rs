//! Descriptors and frames of a configured MANA: the input fills the rings and the packet memory, then
//! doorbells are rung.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_nic_emulator::mem_host::{BASE, EmulatorHarness};

const NIC: &str = "[[device]]\nkind = 'mana'\ncoalesce = true\n[[device.port]]\nlink = 'loop'\n";
/// Commands that create queues over memory at 0x10000: a send queue (number 1040, 8 KiB at 0x2000) and a
/// receive queue (2050, 8 KiB at 0x6000).
const SETUP: &[u8] = include_bytes!("../corpus/commands/mana_loop");
const SQ: u64 = BASE + 0x2000;
const RQ: u64 = BASE + 0x6000;
const BUFFERS: u64 = BASE + 0x1_0000;

fuzz_target!(|data: &[u8]| {
    let harness = EmulatorHarness::new(NIC);
    let mut rest = SETUP;
    while let Some((&[kind, low, high], tail)) = rest.split_first_chunk::<3>() {
        let (bytes, next) = tail.split_at(usize::from(u16::from_le_bytes([low, high])));
        rest = next;
        if kind == 0 {
            harness.write(BASE, bytes).expect("the seed sets up");
        }
    }
    // The input is divided into thirds: send ring, receive ring, packets.
    let third = data.len() / 3;
    harness.poke(SQ, &data[..third]);
    harness.poke(RQ, &data[third..2 * third]);
    harness.poke(BUFFERS, &data[2 * third..]);
    let units = (third as u64).div_ceil(32);
    for tail in 1..=units {
        harness.ring_doorbell(0x400, tail * 32 << 32 | 2050);
        harness.ring_doorbell(0x000, tail * 32 << 32 | 1040);
    }
    harness.emulator.counters();
});
