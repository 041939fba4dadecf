//! Fuzzes the mirror of the kernel's tables, which segments with `control = "kernel"` follow, beside a plain model of
//! these tables: changes with their messages, losses, and dumps while the tables change.
//!
//! The bytes choose the changes; the module says how. A test runs random sequences of it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| wirepath_apps::gateway::mirror_sequences::run(data));
