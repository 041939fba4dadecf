#![no_main]

//! Completions that no honest device writes, compressed ones among them, read by the `mlx5` driver's queues: no panic, no buffer lost or
//! handed out twice.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_pmd::drivers::mlx5::hostile::play(data));
