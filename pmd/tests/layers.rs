//! The lengths that packets carry for offloads, out of what the parser finds in every header stack.

#[path = "../../pipeline/wire/tests/common/stacks.rs"]
mod stacks;

use stacks::{Random, TUNNELS, Wish};
use wirepath_pmd::packet::{L3, L4, Layers};
use wirepath_wire::parse;

#[test]
fn lengths_add_up_to_the_headers() {
    let mut seen = [0; 3];
    for seed in 0..3000 {
        let random = &mut Random::new(seed);
        let tunnel = Some(random.pick(&TUNNELS)).filter(|_| !seed.is_multiple_of(4));
        let made = stacks::frame(random, Wish { tunnel, ..Wish::default() });
        let parsed = parse(&made.bytes).unwrap();
        let layers = Layers::from(&parsed);
        let own = u8::from(parsed.inner().is_some());
        // Where the headers were written.
        let first = |level, names: &[&str]| {
            made.marks.iter().find(|m| m.level == level && names.contains(&m.name)).map(|m| (m.name, m.at))
        };
        let ip = first(own, &["ip", "ipv6"]);
        let l4 = first(own, &["tcp", "udp"]);
        let start = made.marks.iter().find(|m| m.level == own).map_or(0, |m| m.at);
        let l3 = match ip {
            Some(("ip", _)) => L3::Ipv4,
            Some(_) => L3::Ipv6,
            None => L3::Other,
        };
        assert_eq!(usize::from(layers.outer_len), start, "{seed} {:?}", made.marks);
        assert_eq!(layers.l3(), l3);
        if let Some((_, at)) = ip {
            assert_eq!(start + usize::from(layers.l2_len), at, "{seed} {:?}", made.marks);
        }
        match l4 {
            Some((name, at)) => {
                assert_eq!(layers.l4(), if name == "tcp" { L4::Tcp } else { L4::Udp });
                assert_eq!(start + usize::from(layers.l2_len) + usize::from(layers.l3_len), at, "{seed}");
                let len = if name == "tcp" { made.bytes[at + 12] >> 4 << 2 } else { 8 };
                assert_eq!(layers.l4_len, len);
                seen[usize::from(own)] += 1;
            }
            None => assert_eq!((layers.l4(), layers.l4_len), (L4::Other, 0)),
        }
        if own == 1 {
            let outer = first(0, &["ip", "ipv6"]);
            let kind = outer.map_or(L3::Other, |(name, _)| if name == "ip" { L3::Ipv4 } else { L3::Ipv6 });
            assert_eq!(layers.outer_l3(), kind);
            if let Some((_, at)) = outer {
                assert_eq!(usize::from(layers.outer_l2_len), at);
                seen[2] += 1;
            }
        }
    }
    assert!(seen.iter().all(|n| *n > 100), "{seen:?}");
}

#[test]
fn what_does_not_fit_is_unknown() {
    // IPv6 with two destination options headers of 136 bytes each.
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0, 1, 24, 60, 64];
    frame.extend([0xfd; 32]);
    for next in [60, 17] {
        frame.extend([next, 16, 1, 132]);
        frame.extend([0; 132]);
    }
    frame.extend([0, 1, 0, 2, 0, 8, 0, 0]);
    assert_eq!(parse(&frame).unwrap().outer().l4(), 14 + 40 + 272);
    assert_eq!(Layers::from(&parse(&frame).unwrap()), Layers::default());
}
