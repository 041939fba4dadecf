#![no_main]

//! Slots and messages of a kernel that writes anything, in the receive queue of `af_packet`. Each frame lies in its
//! slot or message, each refused one is counted, and no buffer is lost.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_pmd::drivers::kernel::af_packet::fuzz::run(data));
