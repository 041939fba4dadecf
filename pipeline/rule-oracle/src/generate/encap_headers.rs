//! Random outer headers for encapsulations.

use wirepath_flow::{Field, Reformat, ReformatKind};

use super::values;
use crate::rng::Rng;

fn push(out: &mut Vec<u8>, value: u128, bytes: usize) {
    out.extend(&value.to_be_bytes()[16 - bytes..]);
}

fn ethernet(rng: &mut Rng, most_tags: u64, ether_type: u16) -> Vec<u8> {
    let mut out = Vec::new();
    push(&mut out, values::value(rng, Field::EthDst), 6);
    push(&mut out, 0x0200_0000_00aa + u128::from(rng.below(4)), 6);
    let tags = if rng.one_in(2) { 0 } else { rng.below(most_tags + 1) };
    for _ in 0..tags {
        push(&mut out, rng.pick(&[0x8100, 0x88a8]), 2);
        push(&mut out, u128::from(rng.below(16) << 12 | rng.below(4095)), 2);
    }
    push(&mut out, ether_type.into(), 2);
    out
}

fn labels(rng: &mut Rng, out: &mut Vec<u8>) {
    let count = 1 + rng.below(3);
    for n in 1..=count {
        let bottom = u128::from(n == count);
        push(out, u128::from(16 + rng.below(9)) << 12 | bottom << 8 | u128::from(rng.below(255) + 1), 4);
    }
}

/// Returns the new Ethernet header of a `decap l3`.
pub(super) fn link(rng: &mut Rng, version: u8) -> Option<Reformat> {
    let bytes = ethernet(rng, 1, if version == 4 { 0x0800 } else { 0x86dd });
    Reformat::new(ReformatKind::L3TunnelToL2, &bytes).ok()
}

/// Returns outer headers for Ethernet frames, or for IP packets of this version. Their lengths and checksums
/// are random on purpose.
pub(super) fn encap(rng: &mut Rng, version: Option<u8>) -> Option<Reformat> {
    let kind = if version.is_some() { ReformatKind::L2ToL3Tunnel } else { ReformatKind::L2ToL2Tunnel };
    let carried: u128 = match version {
        None => 0x6558,
        Some(4) => 0x0800,
        Some(_) => 0x86dd,
    };
    if rng.one_in(10) {
        let ether_type = rng.pick(&[0x8847, 0x8848]);
        let mut out = ethernet(rng, 2, ether_type);
        labels(rng, &mut out);
        return Reformat::new(kind, &out).ok();
    }
    let mut tunnel = Vec::new();
    let ip_in_ip = if carried == 0x0800 { 4 } else { 41 };
    // UDP destination port and IP protocol.
    let (port, protocol): (u16, u8) = match rng.below(8) {
        0 | 1 if version.is_none() => (rng.pick(&[4789, 4789, 8472]), 17),
        2 => (4790, 17),
        3 => (6081, 17),
        4 => (6635, 17),
        5 if version.is_some() => (0, ip_in_ip),
        _ => (0, 47),
    };
    if protocol == 17 {
        push(&mut tunnel, rng.below(65536).into(), 2);
        push(&mut tunnel, port.into(), 2);
        push(&mut tunnel, rng.below(1 << 32).into(), 4);
    }
    let vni = u128::from(rng.below(1 << 24)) << 8;
    match (protocol, port) {
        (17, 4790) => {
            let next = match carried {
                0x0800 => 1,
                0x86dd => 2,
                _ => 3,
            };
            push(&mut tunnel, 0x0c00_0000 | next, 4);
            push(&mut tunnel, vni, 4);
        }
        (17, 6081) => {
            let options = rng.below(3);
            push(&mut tunnel, u128::from(options * 2) << 24 | carried, 4);
            push(&mut tunnel, vni, 4);
            for _ in 0..options {
                push(&mut tunnel, 0x0102_0301, 4);
                push(&mut tunnel, rng.below(1 << 32).into(), 4);
            }
        }
        (17, 6635) => labels(rng, &mut tunnel),
        (17, _) => {
            push(&mut tunnel, 0x0800_0000, 4);
            push(&mut tunnel, vni, 4);
        }
        (47, _) if rng.one_in(6) => {
            push(&mut tunnel, rng.pick(&[0x8847, 0x8848]), 4);
            labels(rng, &mut tunnel);
        }
        (47, _) => {
            let key = rng.one_in(2);
            push(&mut tunnel, if key { 0x2000 << 16 | carried } else { carried }, 4);
            if key {
                push(&mut tunnel, rng.below(1 << 32).into(), 4);
            }
        }
        _ => {}
    }
    let outer = rng.pick(&[4u8, 6]);
    let mut out = ethernet(rng, 2, if outer == 4 { 0x0800 } else { 0x86dd });
    if outer == 4 {
        let options = if rng.one_in(6) { rng.below(3) } else { 0 };
        push(&mut out, u128::from(0x45 + options), 1);
        push(&mut out, rng.below(256).into(), 1);
        push(&mut out, rng.below(65536).into(), 2);
        push(&mut out, rng.below(65536).into(), 2);
        push(&mut out, rng.pick(&[0, 0x4000]), 2);
        push(&mut out, u128::from(rng.below(255)) + 1, 1);
        push(&mut out, protocol.into(), 1);
        push(&mut out, rng.below(65536).into(), 2);
        push(&mut out, values::value(rng, Field::Ipv4Src), 4);
        push(&mut out, values::value(rng, Field::Ipv4Dst), 4);
        for _ in 0..options {
            push(&mut out, 0x0101_0101, 4);
        }
    } else {
        push(&mut out, 6 << 28 | u128::from(rng.below(1 << 28)), 4);
        push(&mut out, rng.below(65536).into(), 2);
        push(&mut out, protocol.into(), 1);
        push(&mut out, u128::from(rng.below(255)) + 1, 1);
        push(&mut out, values::value(rng, Field::Ipv6Src), 16);
        push(&mut out, values::value(rng, Field::Ipv6Dst), 16);
    }
    out.extend(tunnel);
    Reformat::new(kind, &out).ok()
}
