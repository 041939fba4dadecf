//! Descriptors and frames of a device that is set up right: the input is the memory of the rings and of the packets, then doorbells.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_nic_emulator::vectors::{BASE, Bench};

const NIC: &str = "[[device]]\nkind = 'mana'\ncoalesce = true\n[[device.port]]\nlink = 'loop'\n";
/// Commands that make a send queue (number 1040, 8 KiB at 0x2000) and a receive queue (2050, 8 KiB at 0x6000) over memory at 0x10000.
const SETUP: &[u8] = include_bytes!("../corpus/commands/mana_loop");
const SQ: u64 = BASE + 0x2000;
const RQ: u64 = BASE + 0x6000;
const BUFFERS: u64 = BASE + 0x1_0000;

fuzz_target!(|data: &[u8]| {
    let bench = Bench::new(NIC);
    let mut rest = SETUP;
    while let Some((&[kind, low, high], tail)) = rest.split_first_chunk::<3>() {
        let (bytes, next) = tail.split_at(usize::from(u16::from_le_bytes([low, high])));
        rest = next;
        if kind == 0 {
            bench.write(BASE, bytes).expect("the seed sets up");
        }
    }
    // A third each: send ring, receive ring, packets.
    let third = data.len() / 3;
    bench.poke(SQ, &data[..third]);
    bench.poke(RQ, &data[third..2 * third]);
    bench.poke(BUFFERS, &data[2 * third..]);
    let units = (third as u64).div_ceil(32);
    for tail in 1..=units {
        bench.ring(0x400, tail * 32 << 32 | 2050);
        bench.ring(0x000, tail * 32 << 32 | 1040);
    }
    bench.emulator.counters();
});
