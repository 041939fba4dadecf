//! Parser tests with every header stack, compared with the written headers and with tshark.

use std::collections::BTreeSet;

use fastrand::Rng;
use wirepath_testlab::{Requirement, oracle, require};
use wirepath_wire::{HeaderOffsets, L3Type, L4Type, ParseError, Parsed, Parser, Tunnel, mpls, parse};

use crate::stacks::{self, HeaderMark, StackSpec, frame};

/// Returns the headers that the parser found.
fn found(parsed: &Parsed, bytes: &[u8]) -> Vec<HeaderMark> {
    let mut marks = Vec::new();
    for level in 0..2u8 {
        let Some(layers) = parsed.stack(level.into()) else { break };
        let mut mark = |name, at| marks.push(HeaderMark { level, name, at });
        if layers.has_ethernet() {
            mark("eth", layers.l2());
        }
        (0..layers.tag_count()).for_each(|nth| mark("vlan", layers.l2() + 14 + nth * 4));
        layers.labels().step_by(4).for_each(|at| mark("mpls", at));
        match layers.l3_type() {
            L3Type::Arp => mark("arp", layers.l3()),
            L3Type::Ipv4 => mark("ip", layers.l3()),
            L3Type::Ipv6 => mark("ipv6", layers.l3()),
            L3Type::Other => {}
        }
        match layers.l4_type() {
            L4Type::Tcp => mark("tcp", layers.l4()),
            L4Type::Udp => mark("udp", layers.l4()),
            L4Type::Icmpv4 => mark("icmp", layers.l4()),
            L4Type::Icmpv6 => mark("icmpv6", layers.l4()),
            L4Type::Gre => mark("gre", layers.l4()),
            L4Type::Esp => mark("esp", layers.l4()),
            L4Type::None | L4Type::Other => {}
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

fn in_order(layers: &HeaderOffsets, bytes: &[u8]) {
    assert!(layers.l2() <= layers.l3() && layers.l3() <= layers.l4(), "{layers:?}");
    assert!(layers.l4() <= layers.payload() && layers.payload() <= layers.end() && layers.end() <= bytes.len());
    assert!(layers.l2() <= layers.labels().start && layers.labels().end == layers.l3());
    let _ = (layers.ethernet(bytes), layers.gre(bytes), layers.esp(bytes), layers.udp(bytes), layers.tcp(bytes));
}

#[test]
fn every_header_is_found_where_it_was_written() {
    let mut tunnels = BTreeSet::new();
    for (i, spec) in stacks::all_specs(40).into_iter().enumerate() {
        for seed in 0..100 {
            let made = frame(&mut Rng::with_seed(i as u64 * 1000 + seed), spec);
            let parsed = parse(&made.bytes).unwrap_or_else(|e| panic!("{spec:?} {seed}: {e}\n{made:02x?}"));
            assert_eq!(found(&parsed, &made.bytes), made.marks, "{spec:?} {seed}: {parsed:?}\n{:02x?}", made.bytes);
            assert_eq!(parsed.tunnel_error(), None, "{spec:?} {seed}");
            if let Some(inner) = parsed.inner() {
                in_order(inner, &made.bytes);
                assert!(parsed.tunnel_header().unwrap() <= inner.l2() && parsed.outer().l4() <= inner.l2());
                assert!(inner.end() <= parsed.outer().end());
                tunnels.insert((parsed.tunnel() as u8, inner.has_ethernet(), parsed.has_tunnel_labels(0)));
                // A parser that starts at the inner stack finds the same.
                if inner.has_ethernet() {
                    let alone = Parser::default().parse(&made.bytes[inner.l2()..inner.end()]).unwrap();
                    assert_eq!(alone.outer().moved(inner.l2() as i32).unwrap(), *inner);
                    assert_eq!(alone.tunnel_of(0), parsed.tunnel_of(1));
                    assert_eq!(alone.has_tunnel_labels(0), parsed.has_tunnel_labels(1));
                }
            }
        }
    }
    // VXLAN; GPE and GENEVE with Ethernet and IP; GRE with both, with and without labels; MPLS with both; IP;
    // Ethernet in MPLS.
    assert_eq!(tunnels.len(), 1 + 2 + 2 + 4 + 2 + 1 + 1, "{tunnels:?}");
}

/// The corpora of the fuzz targets that take frames have a seed for each tunnel with each inner header.
/// `WIREPATH_WRITE_SEEDS=1` in the environment writes them.
#[test]
fn fuzz_seeds_cover_every_stack() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpora = ["fuzz/corpus/parse", "fuzz/corpus/decapsulate", "../../pmd/fuzz/corpus/flow_value"];
    for (i, spec) in stacks::all_specs(40).into_iter().enumerate().filter(|(_, spec)| spec.tunnel.is_some()) {
        let StackSpec { tunnel, outer_ip: around, inner: inside, .. } = spec;
        let name = format!("{}_{:?}_{:?}", tunnel.unwrap(), around.unwrap(), inside.unwrap()).to_lowercase();
        let made = frame(&mut Rng::with_seed(i as u64), StackSpec { unfragmented: true, ..spec });
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
fn truncated_and_changed_frames_do_not_panic() {
    let (mut broken_tunnels, mut errors) = (0, BTreeSet::new());
    for (i, spec) in stacks::all_specs(40).into_iter().enumerate() {
        let random = &mut Rng::with_seed(i as u64);
        for _ in 0..8 {
            let made = frame(random, spec);
            let whole = parse(&made.bytes).unwrap();
            for len in 0..made.bytes.len() {
                let cut = &made.bytes[..len];
                if let Ok(parsed) = parse(cut) {
                    in_order(parsed.outer(), cut);
                    parsed.inner().into_iter().for_each(|inner| in_order(inner, cut));
                }
                // A chain is complete, but all headers must lie in its first buffer. Otherwise the frame is
                // refused, or the tunnel error says so if only tunnel headers are missing.
                match Parser::default().parse_chain(cut, made.bytes.len()) {
                    Ok(parsed) if parsed.tunnel_error().is_none() => {
                        assert_eq!((parsed.outer(), parsed.inner()), (whole.outer(), whole.inner()), "{spec:?} {len}");
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
                for _ in 0..1 + random.usize(..3) {
                    let at = random.usize(..bytes.len().min(120));
                    bytes[at] = random.u8(..);
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

/// Returns tshark's names of the headers. tshark must be told that Ethernet follows the label.
fn protocols(frames: &[Vec<u8>]) -> Vec<Vec<String>> {
    let rows = oracle::fields_with(&["-d", "mpls.label==500,pwethnocw"], frames, &["frame.protocols"]);
    let known = |name: &&str| !["ethertype", "pwethnocw", "ah"].contains(name) && !name.starts_with("ipv6.");
    let name = |name: &str| if name == "ieee8021ad" { "vlan" } else { name }.to_owned();
    rows.iter().map(|row| row[0].split(':').filter(known).map(name).collect()).collect()
}

#[test]
fn tshark_finds_the_same_headers() {
    require!(Requirement::Program("tshark"));
    let mut frames = Vec::new();
    for (i, spec) in stacks::all_specs(40).into_iter().enumerate() {
        for seed in 0..15 {
            let made = frame(&mut Rng::with_seed(i as u64 * 1000 + seed), StackSpec { unfragmented: true, ..spec });
            frames.push(made.bytes);
        }
    }
    // tshark names a label stack once, and two service tags once.
    fn once<T: AsRef<str> + PartialEq>(names: &mut Vec<T>) {
        names.dedup_by(|a, b| ["mpls", "vlan"].contains(&a.as_ref()) && a == b);
    }
    for (bytes, mut dissected) in frames.iter().zip(protocols(&frames)) {
        let parsed = parse(bytes).unwrap();
        // tshark does not name VXLAN-GPE.
        let mut ours: Vec<&str> = found(&parsed, bytes).iter().map(|m| m.name).filter(|n| *n != "vxlan-gpe").collect();
        once(&mut ours);
        once(&mut dissected);
        assert!(
            dissected.len() >= ours.len() && dissected[..ours.len()] == ours[..],
            "{ours:?}, tshark {dissected:?}\n{parsed:?}\n{bytes:02x?}"
        );
        // After our headers there is only payload, except after the tunnel of the second stack.
        let tunnel = parsed.inner().is_some();
        let rest = &dissected[ours.len()..];
        assert!(tunnel || rest.iter().all(|name| name == "data"), "{ours:?}, tshark {dissected:?}\n{bytes:02x?}");
    }
}
