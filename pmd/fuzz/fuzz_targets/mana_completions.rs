#![no_main]

//! Completions that no honest device writes, read by the `mana` driver's queues: no panic, no buffer lost or handed out twice.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_pmd::drivers::mana::hostile::play(data));
