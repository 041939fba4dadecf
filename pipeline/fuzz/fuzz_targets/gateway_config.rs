//! Fuzzes the configuration reader with arbitrary text. It is refused with a position and a message, or a
//! gateway can be created from it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_packet::{Pool, PortId};
use wirepath_pipeline::PortInfo;
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::tunnel::{GatewayConfig, GatewayControl};
use wirepath_settings::Source;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let source = Source::new("fuzz", text);
    let Ok(document) = source.parse() else { return };
    match GatewayConfig::read(&document.settings(), &["wan", "lan", "lan2"]) {
        Err(error) => {
            let (line, column) = error.position.expect("the text was read");
            assert!(line >= 1 && column >= 1 && line <= text.matches('\n').count() + 1);
            assert!(!error.message.is_empty());
        }
        Ok(config) => {
            let fits = config.check_mtus([1500, 1500, 9000][config.underlay.port]).is_ok();
            let pool = Pool::new("fuzz", 8).expect("memory");
            let ports: Vec<PortInfo> = ["wan", "lan", "lan2"]
                .iter()
                .enumerate()
                .map(|(id, name)| PortInfo::simulated(PortId::new(id as u16), name, None, 1500, &pool))
                .collect();
            let control = GatewayControl::new(&config, &ports, &Domain::new(), 1, 0);
            assert!(!fits || control.config().segments.len() == config.segments.len());
        }
    }
});
