//! Fuzzes the routing tables with changes from arbitrary bytes. Lookups must find what a map of all routes gives.
//!
//! Five bytes are one change: kind and VRF, prefix length, value, and two bytes of which the address is made.

#![no_main]

use std::collections::BTreeMap;
use std::net::IpAddr;

use libfuzzer_sys::fuzz_target;
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::route::{NO_ROUTE, NetworkPrefix, RouteLimits, RouteWriter};

/// Makes an address whose bits are those of two bytes, repeated or at one end.
fn address(is_v6: bool, how: u8, bytes: [u8; 2]) -> IpAddr {
    let bits = u128::from(u16::from_be_bytes(bytes));
    let bits = match how & 3 {
        0 => bits << 112,
        1 => bits << 96 | bits,
        2 => bits * (u128::MAX / 0xffff),
        _ => bits << 112 | u128::MAX >> 16,
    };
    if is_v6 { IpAddr::V6(bits.into()) } else { IpAddr::V4(((bits >> 96) as u32).into()) }
}

fuzz_target!(|data: &[u8]| {
    let domain = Domain::new();
    let mut reader = domain.join();
    let mut writer = RouteWriter::new(&domain, RouteLimits { bytes: 4 << 20 });
    let tables = writer.tables();
    let mut oracles: [BTreeMap<NetworkPrefix, u32>; 2] = Default::default();
    for change in data.chunks_exact(5) {
        let [kind, len, value, bytes @ ..] = change else { return };
        let (vrf, is_v6) = (usize::from(kind & 1), kind & 2 != 0);
        let width = if is_v6 { 128 } else { 32 };
        let address = address(is_v6, kind >> 2, [bytes[0], bytes[1]]);
        let Some(network) = NetworkPrefix::new(address, len % (width + 1)) else { return };
        let oracle = &mut oracles[vrf];
        match kind >> 4 {
            0 if value & 7 == 0 => {
                writer.remove_vrf(vrf as u16);
                oracle.clear();
                assert_eq!(writer.vrf_memory(vrf as u16), 0);
            }
            0..6 => assert_eq!(writer.remove(vrf as u16, network), oracle.remove(&network)),
            _ => {
                // Values from 32767 on are long entries.
                let value = u32::from(*value) * 0x101;
                let old = oracle.insert(network, value);
                assert_eq!(writer.insert(vrf as u16, network, value), Ok(old));
            }
        }
        reader.quiescent();
        let view = tables.view(reader.guard());
        let found = match address {
            IpAddr::V4(v4) => view.lookup4(vrf as u16, v4.to_bits()),
            IpAddr::V6(v6) => view.lookup6(vrf as u16, v6.to_bits()),
        };
        let networks = (0..=width).rev().filter_map(|len| NetworkPrefix::new(address, len));
        let expected = networks.filter_map(|network| oracle.get(&network)).next();
        assert_eq!(found, expected.copied().unwrap_or(NO_ROUTE));
    }
    for (vrf, oracle) in (0..).zip(&oracles) {
        assert!(writer.iter(vrf).eq(oracle.iter().map(|(network, value)| (*network, *value))));
    }
});
