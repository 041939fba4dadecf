//! Frames: the parser never panics, and all offsets and views lie in the frame, in order.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_wire::{
    EtherType, HeaderOffsets, IpProtocol, L4Type, ParseError, Parser, build, checksum_offload, mpls, ndp, tuple,
};

fn check(frame: &[u8], layers: &HeaderOffsets) {
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
    let _ = (layers.gre(frame).and_then(|gre| gre.key()), layers.esp(frame));
    let labels = layers.labels();
    assert!(layers.l2() <= labels.start && labels.end == layers.l3() && labels.is_empty() != layers.has_labels());
    assert!(!layers.has_labels() || mpls::Entries::of(&frame[labels.clone()]).count() * 4 == labels.len());
    let mut out = [0; 2048];
    for from in ["10.0.0.1", "fd00::1"] {
        for error in [build::IcmpError::TooBig(1400), build::IcmpError::TimeExceeded] {
            let _ = build::icmp_error(&mut out, frame, layers, Default::default(), from.parse().unwrap(), error);
        }
    }
    let mut copy = frame.to_vec();
    let _ = build::echo_reply(&mut copy, layers);
}

fuzz_target!(|data: &[u8]| {
    for verify_ipv4 in [false, true] {
        let parser = Parser { verify_ipv4, ..Parser::default() };
        let Ok(parsed) = parser.parse(data) else { continue };
        check(data, parsed.outer());
        if let Some(inner) = parsed.inner() {
            check(data, inner);
        }
        if let (Some(at), Some(inner)) = (parsed.tunnel_header(), parsed.inner()) {
            assert!(at <= inner.l2() && inner.end() <= parsed.outer().end());
            assert_eq!(parsed.tunnel_of(0), parsed.tunnel());
        }
        // A chain whose first buffer holds all headers gives the same result.
        let cut = parsed.innermost().payload();
        match parser.parse_chain(&data[..cut], data.len()) {
            Ok(again) => assert_eq!(again.outer(), parsed.outer()),
            // These were read but are not part of the found headers: errors after labels, a truncated GRE
            // header in a fragment, and ARP of other formats.
            Err(error) => {
                let outer = parsed.outer();
                let cut_off = outer.protocol() == IpProtocol::GRE && outer.l4_type() == L4Type::Other;
                let was_read = parsed.tunnel_error().is_some() || cut_off || outer.ethertype() == EtherType::ARP;
                assert!(error == ParseError::HeaderSplit && was_read, "{error}");
            }
        }
        let mut copy = data.to_vec();
        for level in 0..2 {
            let headers = if level == 0 { Some(parsed.outer_mut(&mut copy)) } else { parsed.inner_mut(&mut copy) };
            let Some(mut headers) = headers else { continue };
            // After a label stack, the first bits of an address tell Ethernet from IP.
            if let Some(mut link) = headers.ethernet().filter(|_| level == 0) {
                link.swap_addresses();
            }
            if let Some(mut ip) = headers.ipv4() {
                ip.set_src([192, 0, 2, 1].into());
            }
            if let Some(mut ip) = headers.ipv6() {
                ip.swap_addresses();
            }
            if let Some(mut udp) = headers.udp() {
                udp.set_src_port(7);
            }
            if let Some(mut tcp) = headers.tcp() {
                tcp.set_seq(7);
            }
        }
        // The checksums of IPv4 headers are right again, and no length or type changed.
        assert_eq!(parser.parse(&copy).as_ref(), Ok(&parsed));
        let mut copy = data.to_vec();
        if checksum_offload::complete(&mut copy, &parsed).any() {
            assert!(!checksum_offload::complete(&mut copy, &parsed).any());
        }
    }
});
