#![no_main]

//! Invalid completions, including compressed ones, in the queues of the `mlx5` driver: no panic, and no
//! buffer is lost or delivered twice.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_pmd::drivers::nic::mlx5::fuzz::run(data));
