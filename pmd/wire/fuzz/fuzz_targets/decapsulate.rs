//! Tunnels: the result of the parser agrees with the views of the tunnel header, and with a parser that
//! starts at the inner stack.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_wire::{
    EtherType, HeaderOffsets, L4Type, ParseError, Parsed, Parser, Tunnel, Tunnels, Vni, geneve, gre, mpls, vxlan,
    vxlan_gpe,
};

/// Tunnel header as its view reads it: VNI, EtherType of the payload, and length.
struct TunnelHeader {
    vni: Option<Vni>,
    carries: Option<EtherType>,
    len: usize,
}

fn labels(bytes: &[u8], len: usize) -> Result<TunnelHeader, ParseError> {
    let mut entries = mpls::Entries::of(bytes);
    for entry in entries.by_ref() {
        entry?;
    }
    let carries = entries.rest().first().map(|first| match first >> 4 {
        4 => EtherType::IPV4,
        6 => EtherType::IPV6,
        _ => EtherType::TRANSPARENT_ETHERNET,
    });
    Ok(TunnelHeader { vni: None, carries, len: len + bytes.len() - entries.rest().len() })
}

fn header(parsed: &Parsed, bytes: &[u8]) -> Result<TunnelHeader, ParseError> {
    match parsed.tunnel() {
        Tunnel::None => unreachable!(),
        Tunnel::Vxlan => vxlan::View::new(bytes).map(|header| TunnelHeader {
            vni: Some(header.vni()),
            carries: Some(EtherType::TRANSPARENT_ETHERNET),
            len: header.header_len(),
        }),
        Tunnel::VxlanGpe => vxlan_gpe::View::new(bytes).map(|header| TunnelHeader {
            vni: header.vni(),
            carries: match header.next() {
                Some(vxlan_gpe::NextProtocol::IPV4) => Some(EtherType::IPV4),
                Some(vxlan_gpe::NextProtocol::IPV6) => Some(EtherType::IPV6),
                Some(vxlan_gpe::NextProtocol::ETHERNET) => Some(EtherType::TRANSPARENT_ETHERNET),
                _ => None,
            },
            len: header.header_len(),
        }),
        Tunnel::Geneve => {
            let header = geneve::View::new(bytes)?;
            for option in header.options() {
                option?;
            }
            Ok(TunnelHeader { vni: Some(header.vni()), carries: Some(header.protocol()), len: header.header_len() })
        }
        Tunnel::Gre => {
            let header = gre::View::new(bytes)?;
            if header.protocol().is_mpls() {
                return labels(header.payload(), header.header_len());
            }
            Ok(TunnelHeader { vni: None, carries: Some(header.protocol()), len: header.header_len() })
        }
        Tunnel::Mpls => labels(bytes, 0),
        Tunnel::Ip => {
            let carries = match parsed.outer().protocol().0 {
                4 => EtherType::IPV4,
                41 => EtherType::IPV6,
                _ => EtherType::TRANSPARENT_ETHERNET,
            };
            Ok(TunnelHeader { vni: None, carries: Some(carries), len: 0 })
        }
    }
}

/// Parses the inner stack without tunnels. Returns its start in the parsed bytes, and the stack.
fn alone(parser: Parser, bytes: &[u8], carries: EtherType) -> Option<(usize, Result<HeaderOffsets, ParseError>)> {
    let parser = Parser { tunnels: Tunnels::NONE, ..parser };
    match carries {
        EtherType::TRANSPARENT_ETHERNET => Some((0, parser.parse_stack(bytes, 0, bytes.len()))),
        EtherType::IPV4 | EtherType::IPV6 => {
            let mut frame = vec![0; 12];
            frame.extend(carries.0.to_be_bytes());
            frame.extend(bytes);
            Some((14, parser.parse_stack(&frame, 0, frame.len())))
        }
        _ => None,
    }
}

fuzz_target!(|data: &[u8]| {
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let Ok(parsed) = parser.parse(data) else { return };
    let outer = parsed.outer();
    if parsed.tunnel() == Tunnel::None {
        assert!(parsed.inner().is_none() && parsed.vni().is_none() && parsed.tunnel_header().is_none());
        assert_eq!(
            (parsed.tunnel_of(0), parsed.tunnel_of(1), parsed.tunnel_error()),
            (Tunnel::None, Tunnel::None, None)
        );
        return;
    }
    let at = parsed.tunnel_header().expect("there is a tunnel");
    let end = match outer.l4_type() {
        L4Type::Udp => outer.udp_end(data).expect("a datagram"),
        _ => outer.end(),
    };
    let tunnel = match header(&parsed, &data[at..end]) {
        Ok(tunnel) => tunnel,
        Err(error) => {
            assert!(parsed.inner().is_none());
            return assert_eq!(parsed.tunnel_error(), Some(error));
        }
    };
    assert_eq!(parsed.vni(), tunnel.vni);
    assert_eq!(parsed.tunnel_of(0), parsed.tunnel());
    let inside = at + tunnel.len;
    let expected = tunnel.carries.and_then(|carries| alone(parser, &data[inside..end], carries));
    match (expected, parsed.inner()) {
        (Some((before, Ok(alone))), Some(inner)) => {
            assert_eq!(inner.l2(), inside);
            let by = inside as i32 - before as i32;
            // An inner stack without Ethernet was parsed with an Ethernet header in front. Everything else is
            // equal.
            assert_eq!(inner.has_ethernet(), before == 0);
            assert_eq!(inner.l3(), (alone.l3() as i32 + by) as usize);
            assert_eq!(
                (inner.l4() as i32, inner.payload() as i32),
                (alone.l4() as i32 + by, alone.payload() as i32 + by)
            );
            assert_eq!(inner.end() as i32, alone.end() as i32 + by);
            assert_eq!((inner.l3_type(), inner.l4_type()), (alone.l3_type(), alone.l4_type()));
            assert_eq!((inner.ethertype(), inner.protocol()), (alone.ethertype(), alone.protocol()));
            assert_eq!((inner.extensions(), inner.tag_count()), (alone.extensions(), alone.tag_count()));
            assert_eq!(inner.labels().len(), alone.labels().len());
            if before == 0 {
                assert_eq!(inner.moved(-by), Some(alone));
            }
        }
        (Some((_, Err(error))), None) => assert_eq!(parsed.tunnel_error(), Some(error)),
        (None, None) => assert_eq!(parsed.tunnel_error(), None),
        (expected, inner) => panic!("{inner:?} in {outer:?}, alone {:?}", expected.map(|(_, j)| j)),
    }
});
