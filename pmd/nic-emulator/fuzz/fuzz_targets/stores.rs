//! Instructions that faulted on a doorbell page or on a clock page.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_nic_emulator::load_decoder::{self, Destination};
use wirepath_nic_emulator::store_decoder::{LONGEST, Registers, decode};

fuzz_target!(|data: &[u8]| {
    let registers = Registers { general: [0x0123_4567_89ab_cdef; 16], vector: [[0x5a; 32]; 16] };
    if let Some(decoded) = decode(data, &registers) {
        assert!(decoded.length <= data.len() && decoded.length > 1);
        assert!([1, 2, 4, 8, 16, 32].contains(&decoded.size));
        // Bytes behind an instruction do not change its decoding.
        if decoded.length <= LONGEST {
            assert_eq!(decode(&data[..decoded.length], &registers), Some(decoded));
        }
    }
    if let Some(load) = load_decoder::decode(data) {
        assert!(load.length <= data.len() && load.length > 1);
        match load.to {
            Destination::General(register) => {
                assert!(register < 16 && [2, 4, 8].contains(&load.size));
                load.general(u64::MAX, [0x5a; 16]);
            }
            Destination::Vector(register) => assert!(register < 16 && load.size == 16),
        }
        assert_eq!(load_decoder::decode(&data[..load.length]), Some(load));
    }
});
