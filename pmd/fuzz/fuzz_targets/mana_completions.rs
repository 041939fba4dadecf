#![no_main]

//! Invalid completions in the queues of the `mana` driver: no panic, and no buffer is lost or delivered
//! twice.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_pmd::drivers::nic::mana::fuzz::run(data));
