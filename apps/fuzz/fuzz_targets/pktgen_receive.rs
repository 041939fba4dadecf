//! Fuzzes the receivers of `wirepath pktgen` beside a plain model that remembers every sequence number. Packets are
//! genuine, changed or foreign. Runs, streams and all counts agree, and memory has its limits.
//!
//! The bytes choose the packets; the module says how. A test runs random sequences of it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_apps::pktgen::receive::fuzz::run(data));
