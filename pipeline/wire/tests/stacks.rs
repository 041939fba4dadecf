//! The parser on every header stack: against what was written, and against tshark.

#[path = "common/stacks.rs"]
mod stacks;

use std::collections::BTreeSet;

use stacks::{First, Mark, Random, TUNNELS, Wish, frame};
use wirepath_testlab::{Need, judge, require};
use wirepath_wire::{L3, L4, Layers, ParseError, Parsed, Parser, Tunnel, mpls, parse};

/// The headers that the parser found.
fn found(parsed: &Parsed, bytes: &[u8]) -> Vec<Mark> {
    let mut marks = Vec::new();
    for level in 0..2u8 {
        let Some(layers) = parsed.stack(level.into()) else { break };
        let mut mark = |name, at| marks.push(Mark { level, name, at });
        if layers.has_link() {
            mark("eth", layers.l2());
        }
        (0..layers.tag_count()).for_each(|nth| mark("vlan", layers.l2() + 14 + nth * 4));
        layers.labels().step_by(4).for_each(|at| mark("mpls", at));
        match layers.l3_kind() {
            L3::Arp => mark("arp", layers.l3()),
            L3::Ipv4 => mark("ip", layers.l3()),
            L3::Ipv6 => mark("ipv6", layers.l3()),
            L3::Other => {}
        }
        match layers.l4_kind() {
            L4::Tcp => mark("tcp", layers.l4()),
            L4::Udp => mark("udp", layers.l4()),
            L4::Icmpv4 => mark("icmp", layers.l4()),
            L4::Icmpv6 => mark("icmpv6", layers.l4()),
            L4::Gre => mark("gre", layers.l4()),
            L4::Esp => mark("esp", layers.l4()),
            L4::None | L4::Other => {}
        }
        match parsed.tunnel_of(level.into()) {
            Tunnel::Vxlan => mark("vxlan", layers.payload()),
            Tunnel::VxlanGpe => mark("vxlan-gpe", layers.payload()),
            Tunnel::Geneve => mark("geneve", layers.payload()),
            _ => {}
        }
        if parsed.has_tunnel_labels(level.into()) {
            let entries = mpls::Entries::of(&bytes[layers.payload()..]).count();
            (0..entries).for_each(|nth| mark("mpls", layers.payload() + nth * 4));
        }
    }
    marks
}

/// Every tunnel in both versions of IP with everything inside.
fn wishes() -> Vec<Wish> {
    let mut wishes = vec![Wish::default(); 40];
    for tunnel in TUNNELS {
        for around in [First::Ipv4, First::Ipv6] {
            for inside in [First::Ethernet, First::Ipv4, First::Ipv6] {
                wishes.push(Wish { tunnel: Some(tunnel), around: Some(around), inside: Some(inside), whole: false });
            }
        }
    }
    wishes
}

fn in_order(layers: &Layers, bytes: &[u8]) {
    assert!(layers.l2() <= layers.l3() && layers.l3() <= layers.l4(), "{layers:?}");
    assert!(layers.l4() <= layers.payload() && layers.payload() <= layers.end() && layers.end() <= bytes.len());
    assert!(layers.l2() <= layers.labels().start && layers.labels().end == layers.l3());
    let _ = (layers.ethernet(bytes), layers.gre(bytes), layers.esp(bytes), layers.udp(bytes), layers.tcp(bytes));
}

#[test]
fn every_header_is_found_where_it_was_written() {
    let mut tunnels = BTreeSet::new();
    for (i, wish) in wishes().into_iter().enumerate() {
        for seed in 0..100 {
            let made = frame(&mut Random::new(i as u64 * 1000 + seed), wish);
            let parsed = parse(&made.bytes).unwrap_or_else(|e| panic!("{wish:?} {seed}: {e}\n{made:02x?}"));
            assert_eq!(found(&parsed, &made.bytes), made.marks, "{wish:?} {seed}: {parsed:?}\n{:02x?}", made.bytes);
            assert_eq!(parsed.tunnel_error(), None, "{wish:?} {seed}");
            if let Some(inner) = parsed.inner() {
                in_order(inner, &made.bytes);
                assert!(parsed.tunnel_header().unwrap() <= inner.l2() && parsed.outer().l4() <= inner.l2());
                assert!(inner.end() <= parsed.outer().end());
                tunnels.insert((parsed.tunnel() as u8, inner.has_link(), parsed.has_tunnel_labels(0)));
                // Someone who starts at the inner stack sees the same.
                if inner.has_link() {
                    let alone = Parser::default().parse(&made.bytes[inner.l2()..inner.end()]).unwrap();
                    assert_eq!(alone.outer().moved(inner.l2() as i32).unwrap(), *inner);
                    assert_eq!(alone.tunnel_of(0), parsed.tunnel_of(1));
                    assert_eq!(alone.has_tunnel_labels(0), parsed.has_tunnel_labels(1));
                }
            }
        }
    }
    // VXLAN; GPE and GENEVE with both; GRE with both, with labels and without; MPLS with both; IP; Ethernet in MPLS.
    assert_eq!(tunnels.len(), 1 + 2 + 2 + 4 + 2 + 1 + 1, "{tunnels:?}");
}

/// Seeds of the fuzz targets that take frames: one for each tunnel with each thing inside. With `WIREPATH_WRITE_SEEDS=1` in the
/// environment they are written.
#[test]
fn seeds_of_the_fuzz_targets_have_every_stack() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpora = ["fuzz/corpus/parse", "fuzz/corpus/decapsulate", "../../pmd/fuzz/corpus/flow_value"];
    for (i, wish) in wishes().into_iter().enumerate().filter(|(_, wish)| wish.tunnel.is_some()) {
        let Wish { tunnel, around, inside, .. } = wish;
        let name = format!("{}_{:?}_{:?}", tunnel.unwrap(), around.unwrap(), inside.unwrap()).to_lowercase();
        let made = frame(&mut Random::new(i as u64), Wish { whole: true, ..wish });
        for corpus in corpora {
            let path = root.join(corpus).join(&name);
            if std::env::var_os("WIREPATH_WRITE_SEEDS").is_some() {
                std::fs::write(&path, &made.bytes).unwrap();
            }
            let seed = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let parsed = parse(&seed).unwrap();
            assert_eq!(
                (parsed.tunnel(), parsed.tunnel_error()),
                (parse(&made.bytes).unwrap().tunnel(), None),
                "{name}"
            );
        }
    }
}

#[test]
fn cut_and_changed_frames_do_no_harm() {
    let (mut broken_tunnels, mut errors) = (0, BTreeSet::new());
    for (i, wish) in wishes().into_iter().enumerate() {
        let random = &mut Random::new(i as u64);
        for _ in 0..8 {
            let made = frame(random, wish);
            let whole = parse(&made.bytes).unwrap();
            for len in 0..made.bytes.len() {
                let cut = &made.bytes[..len];
                if let Ok(parsed) = parse(cut) {
                    in_order(parsed.outer(), cut);
                    parsed.inner().into_iter().for_each(|inner| in_order(inner, cut));
                }
                // In a chain nothing is missing, but the headers must be at hand: of the frame's own stack all, else it is refused;
                // of the tunnel all, else that is what is said.
                match Parser::default().parse_chain(cut, made.bytes.len()) {
                    Ok(parsed) if parsed.tunnel_error().is_none() => {
                        assert_eq!((parsed.outer(), parsed.inner()), (whole.outer(), whole.inner()), "{wish:?} {len}");
                        assert_eq!(parsed.tunnel_of(0), whole.tunnel_of(0));
                    }
                    Ok(parsed) => {
                        assert_eq!(parsed.outer(), whole.outer());
                        assert_eq!((parsed.tunnel_error(), parsed.inner()), (Some(ParseError::HeaderSplit), None));
                    }
                    Err(error) => assert_eq!(error, ParseError::HeaderSplit),
                }
            }
            for _ in 0..50 {
                let mut bytes = made.bytes.clone();
                for _ in 0..1 + random.below(3) {
                    let at = random.below(bytes.len().min(120));
                    bytes[at] = random.next() as u8;
                }
                let lenient = Parser { verify_ipv4: false, ..Parser::default() };
                let Ok(parsed) = lenient.parse(&bytes) else { continue };
                in_order(parsed.outer(), &bytes);
                parsed.inner().into_iter().for_each(|inner| in_order(inner, &bytes));
                found(&parsed, &bytes);
                if let Some(error) = parsed.tunnel_error() {
                    assert_eq!(parsed.inner(), None);
                    broken_tunnels += 1;
                    errors.insert(error);
                }
            }
        }
    }
    assert!(broken_tunnels > 500 && errors.len() > 15, "{broken_tunnels} {errors:?}");
}

/// What tshark calls the headers; Ethernet behind labels has to be announced to it.
fn protocols(frames: &[Vec<u8>]) -> Vec<Vec<String>> {
    let rows = judge::fields_with(&["-d", "mpls.label==500,pwethnocw"], frames, &["frame.protocols"]);
    let known = |name: &&str| !["ethertype", "pwethnocw", "ah"].contains(name) && !name.starts_with("ipv6.");
    let name = |name: &str| if name == "ieee8021ad" { "vlan" } else { name }.to_owned();
    rows.iter().map(|row| row[0].split(':').filter(known).map(name).collect()).collect()
}

#[test]
fn tshark_sees_the_same_headers() {
    require!(Need::Program("tshark"));
    let mut frames = Vec::new();
    for (i, wish) in wishes().into_iter().enumerate() {
        for seed in 0..15 {
            let made = frame(&mut Random::new(i as u64 * 1000 + seed), Wish { whole: true, ..wish });
            frames.push(made.bytes);
        }
    }
    // Tshark names a label stack once, and of two service tags one.
    fn once<T: AsRef<str> + PartialEq>(names: &mut Vec<T>) {
        names.dedup_by(|a, b| ["mpls", "vlan"].contains(&a.as_ref()) && a == b);
    }
    for (bytes, mut said) in frames.iter().zip(protocols(&frames)) {
        let parsed = parse(bytes).unwrap();
        // It does not name VXLAN-GPE.
        let mut ours: Vec<&str> = found(&parsed, bytes).iter().map(|m| m.name).filter(|n| *n != "vxlan-gpe").collect();
        once(&mut ours);
        once(&mut said);
        assert!(
            said.len() >= ours.len() && said[..ours.len()] == ours[..],
            "{ours:?}, tshark {said:?}\n{parsed:?}\n{bytes:02x?}"
        );
        // Behind what we found there is payload, unless it is behind the second stack's tunnel.
        let tunnel = parsed.inner().is_some();
        let rest = &said[ours.len()..];
        assert!(tunnel || rest.iter().all(|name| name == "data"), "{ours:?}, tshark {said:?}\n{bytes:02x?}");
    }
}
