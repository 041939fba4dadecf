//! Any bytes: the parser never panics, and what it returns lies inside the frame, in order; so do the views.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_wire::{Layers, Parser, build, finish, ndp, tuple};

fn look(frame: &[u8], layers: &Layers) {
    assert!(layers.l2() <= layers.l3() && layers.l3() <= layers.l4());
    assert!(layers.l4() <= layers.payload() && layers.payload() <= layers.end() && layers.end() <= frame.len());
    let _ = (layers.ethernet(frame), layers.arp(frame), layers.tag(0), layers.tag(1), layers.tag(2));
    let _ = (tuple::FiveTuple::of(frame, layers), tuple::entropy(frame, layers));
    if let Some(ip) = layers.ipv4(frame) {
        ip.options().count();
    }
    if let Some(ip) = layers.ipv6(frame) {
        assert!(ip.extensions().count() <= wirepath_wire::ipv6::MAX_EXTENSIONS);
        ip.extensions().flatten().filter_map(|e| e.options()).flatten().count();
        let _ = ndp::Repr::parse(&ip);
    }
    if let Some(tcp) = layers.tcp(frame) {
        tcp.options().count();
    }
    let _ = (layers.udp(frame), layers.icmpv4(frame), layers.icmpv6(frame));
    let mut out = [0; 2048];
    for from in ["10.0.0.1", "fd00::1"] {
        let _ = build::too_big(&mut out, frame, layers, Default::default(), from.parse().unwrap(), 1400);
    }
    let mut copy = frame.to_vec();
    let _ = build::echo_reply(&mut copy, layers);
}

fuzz_target!(|data: &[u8]| {
    for verify_ipv4 in [false, true] {
        let parser = Parser { verify_ipv4, ..Parser::default() };
        let Ok(parsed) = parser.parse(data) else { continue };
        look(data, parsed.outer());
        if let Some(inner) = parsed.inner() {
            look(data, inner);
        }
        // A chain whose first buffer holds all headers reads the same.
        let cut = parsed.innermost().payload();
        let again = parser.parse_chain(&data[..cut], data.len()).expect("headers are at hand");
        assert_eq!(again.outer(), parsed.outer());
        let mut copy = data.to_vec();
        if finish::complete(&mut copy, &parsed).any() {
            assert!(!finish::complete(&mut copy, &parsed).any());
        }
    }
});
