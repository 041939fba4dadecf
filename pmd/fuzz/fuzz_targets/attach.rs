#![no_main]

//! Foreign bytes on the socket over which a port's queues go to another process, as either process reads them: no panic, and nothing of a
//! region that was not lent.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_pmd::attach::hostile::attach(data));
