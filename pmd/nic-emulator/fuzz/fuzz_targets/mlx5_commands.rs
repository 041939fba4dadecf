//! Commands and doorbells of a program for an emulated ConnectX; see [`shared`].

#![no_main]

mod shared;

use libfuzzer_sys::fuzz_target;

const NIC: &str = "[[device]]\nkind = 'mlx5'\nsteering = { table_entries = 64 }\n\
                   [[device.port]]\nlink = 'loop'\nmtu = 1500\n\
                   [[device.port]]\nlink = 'sink'\n";

fuzz_target!(|data: &[u8]| shared::play(NIC, data));
