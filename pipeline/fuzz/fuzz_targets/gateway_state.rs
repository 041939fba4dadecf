//! Fuzzes a gateway beside a reference model, with frames, changes of the configuration and time. After each step the
//! gateway has sent and dropped what the model says, and its forwarding database is that of the model.
//!
//! The bytes choose a configuration and steps; the module says how. A test of the pipeline runs random sequences of it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_packet::Pool;

#[path = "../../tests/gateway/model/mod.rs"]
mod model;

thread_local! {
    static POOL: Pool = model::pool();
}

fuzz_target!(|data: &[u8]| POOL.with(|pool| _ = model::run(data, pool)));
