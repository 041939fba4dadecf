//! Conversion of parsed headers to the header lengths of packet metadata, for random header stacks.

#[path = "../../wire/tests/wire/stacks.rs"]
mod stacks;

use fastrand::Rng;
use stacks::{StackSpec, TUNNELS};
use wirepath_packet::{HeaderLengths, PtypeL3, PtypeL4};
use wirepath_wire::parse;

#[test]
fn lengths_add_up_to_the_headers() {
    let mut seen = [0; 3];
    for seed in 0..3000 {
        let random = &mut Rng::with_seed(seed);
        let tunnel = Some(stacks::pick(random, &TUNNELS)).filter(|_| !seed.is_multiple_of(4));
        let made = stacks::frame(random, StackSpec { tunnel, ..StackSpec::default() });
        let parsed = parse(&made.bytes).unwrap();
        let lengths = HeaderLengths::from(&parsed);
        let innermost = u8::from(parsed.inner().is_some());
        // Name and offset of the first header with one of these names.
        let first = |level, names: &[&str]| {
            made.marks.iter().find(|m| m.level == level && names.contains(&m.name)).map(|m| (m.name, m.at))
        };
        let ip = first(innermost, &["ip", "ipv6"]);
        let l4 = first(innermost, &["tcp", "udp"]);
        let start = made.marks.iter().find(|m| m.level == innermost).map_or(0, |m| m.at);
        let l3 = match ip {
            Some(("ip", _)) => PtypeL3::Ipv4,
            Some(_) => PtypeL3::Ipv6,
            None => PtypeL3::Other,
        };
        assert_eq!(usize::from(lengths.outer_len), start, "{seed} {:?}", made.marks);
        assert_eq!(lengths.l3(), l3);
        if let Some((_, at)) = ip {
            assert_eq!(start + usize::from(lengths.l2_len), at, "{seed} {:?}", made.marks);
        }
        match l4 {
            Some((name, at)) => {
                assert_eq!(lengths.l4(), if name == "tcp" { PtypeL4::Tcp } else { PtypeL4::Udp });
                assert_eq!(start + usize::from(lengths.l2_len) + usize::from(lengths.l3_len), at, "{seed}");
                let len = if name == "tcp" { made.bytes[at + 12] >> 4 << 2 } else { 8 };
                assert_eq!(lengths.l4_len, len);
                seen[usize::from(innermost)] += 1;
            }
            None => assert_eq!((lengths.l4(), lengths.l4_len), (PtypeL4::Other, 0)),
        }
        if innermost == 1 {
            let outer = first(0, &["ip", "ipv6"]);
            let kind =
                outer.map_or(PtypeL3::Other, |(name, _)| if name == "ip" { PtypeL3::Ipv4 } else { PtypeL3::Ipv6 });
            assert_eq!(lengths.outer_l3(), kind);
            if let Some((_, at)) = outer {
                assert_eq!(usize::from(lengths.outer_l2_len), at);
                seen[2] += 1;
            }
        }
    }
    assert!(seen.iter().all(|n| *n > 100), "{seen:?}");
}

#[test]
fn oversized_headers_are_unknown() {
    // IPv6 with two destination options headers of 136 bytes each.
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0, 1, 24, 60, 64];
    frame.extend([0xfd; 32]);
    for next in [60, 17] {
        frame.extend([next, 16, 1, 132]);
        frame.extend([0; 132]);
    }
    frame.extend([0, 1, 0, 2, 0, 8, 0, 0]);
    assert_eq!(parse(&frame).unwrap().outer().l4(), 14 + 40 + 272);
    assert_eq!(HeaderLengths::from(&parse(&frame).unwrap()), HeaderLengths::default());
}
