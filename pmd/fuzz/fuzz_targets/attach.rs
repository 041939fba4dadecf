#![no_main]

//! Messages of the attach socket, which passes queues of a port to another process, read by both sides.
//! Neither side may panic, or access a region that it did not lease.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_pmd::ipc::fuzz::messages(data));
