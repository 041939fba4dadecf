//! Segmentation of superframes: each frame must equal what a sender with a small MTU would send.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use wirepath_wire::build::{OuterChecksum, OuterHeaders, VxlanConfig};
use wirepath_wire::checksum::{self, State};
use wirepath_wire::checksum_offload::{self, ChecksumSpan};
use wirepath_wire::segment::{MAX_DATAGRAMS, MAX_SEGMENTS, SegmentError, Segmenter};
use wirepath_wire::{HeaderOffsets, IpProtocol, L4Type, MacAddr, Tag, Vni, ethernet, ipv4, ipv6, parse, tcp, udp};

/// Builds a frame whose layer-4 checksum is left to hardware.
fn superframe(v6: bool, is_tcp: bool, options: usize, flags: u8, payload: &[u8]) -> Vec<u8> {
    let l4_len = if is_tcp { 20 + options * 4 } else { 8 };
    let ethertype = if v6 { ethernet::EtherType::IPV6 } else { ethernet::EtherType::IPV4 };
    let at = 14 + if v6 { 40 } else { 20 };
    let mut frame = vec![1u8; at + l4_len];
    ethernet::Repr { dst: MacAddr::new(2, 0, 0, 0, 0, 2), src: MacAddr::new(2, 0, 0, 0, 0, 1), ethertype }
        .emit(&mut frame)
        .unwrap();
    let protocol = if is_tcp { IpProtocol::TCP } else { IpProtocol::UDP };
    let payload_len = (l4_len + payload.len()) as u16;
    if v6 {
        let (src, dst) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        ipv6::Repr { src, dst, next_header: protocol, payload_len, hop_limit: 64, traffic_class: 2, flow_label: 5 }
            .emit(&mut frame[14..])
            .unwrap();
    } else {
        let (src, dst) = (Ipv4Addr::new(10, 1, 0, 1), Ipv4Addr::new(10, 1, 0, 2));
        let fragment_word = ipv4::DONT_FRAGMENT;
        ipv4::Repr { src, dst, protocol, payload_len, ttl: 64, traffic_class: 2, ident: 0xfffe, fragment_word }
            .emit(&mut frame[14..])
            .unwrap();
    }
    if is_tcp {
        tcp::Repr { src_port: 5000, dst_port: 80, seq: u32::MAX - 100, ack: 7, flags, window: 512, urgent: 0 }
            .emit(&mut frame[at..])
            .unwrap();
        frame[at + 12] = (5 + options as u8) << 4;
    } else {
        udp::Repr { src_port: 5000, dst_port: 80, payload_len: payload.len() as u16 }.emit(&mut frame[at..]).unwrap();
    }
    frame.extend(payload);
    let layers = *parse(&frame).unwrap().outer();
    leave_partial(&mut frame, &layers);
    frame
}

/// Writes the sum of the pseudo header to the checksum field.
fn leave_partial(frame: &mut [u8], layers: &HeaderOffsets) {
    let cover = ChecksumSpan::of(frame, layers).unwrap();
    cover.transport.set_field(&mut frame[cover.start..], cover.pseudo.fold());
}

fn wrap(inner: &[u8], v6: bool, tags: &[Tag], mode: OuterChecksum) -> Vec<u8> {
    let (src, dst): (IpAddr, IpAddr) = if v6 {
        (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 9, 1).into(), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 9, 2).into())
    } else {
        (Ipv4Addr::new(10, 9, 0, 1).into(), Ipv4Addr::new(10, 9, 0, 2).into())
    };
    let mac = MacAddr::new(2, 0, 0, 0, 9, 1);
    let encap = OuterHeaders::vxlan(&VxlanConfig {
        src_mac: mac,
        dst_mac: mac,
        tags,
        src,
        dst,
        dst_port: 4789,
        vni: Vni::new(77).unwrap(),
        ttl: 64,
        traffic_class: 0,
        flow_label: 0,
        checksum: mode,
    })
    .unwrap();
    let mut frame = vec![0; encap.len()];
    let mut patch = encap.fields(inner.len(), 50000);
    patch.inner_sum = checksum::sum(inner);
    encap.emit(&mut frame, &patch).unwrap();
    frame.extend(inner);
    frame
}

fn cut(frame: &[u8], l4: usize, size: u16) -> Result<Vec<Vec<u8>>, SegmentError> {
    let parsed = parse(frame).unwrap();
    let mut segmenter = Segmenter::new(frame, &parsed, l4, size)?;
    let mut out = Vec::new();
    let expected = segmenter.remaining();
    let mut headers = vec![0xa5; segmenter.header_len()];
    while let Some(segment) = segmenter.next_into(&mut headers, frame) {
        let segment = segment?;
        out.push([&headers[..segment.header_len], &frame[segment.payload]].concat());
    }
    assert_eq!((out.len(), segmenter.remaining()), (expected, 0));
    Ok(out)
}

fn state(frame: &[u8], layers: &HeaderOffsets) -> State {
    ChecksumSpan::of(frame, layers).unwrap().state(frame)
}

proptest! {
    #[test]
    fn every_segment_is_a_valid_frame(
        v6: bool, is_tcp: bool, options in 0usize..11, flags: u8,
        tunnel in proptest::option::of((any::<bool>(), 0usize..2)),
        mode in prop_oneof![Just(OuterChecksum::Standard), Just(OuterChecksum::Always), Just(OuterChecksum::Zero)],
        payload in proptest::collection::vec(any::<u8>(), 0..5000), size in 8u16..1500,
    ) {
        // The kernel makes at most this number of datagrams.
        let size = if is_tcp { size } else { size.max(5000_u16.div_ceil(MAX_DATAGRAMS as u16)) };
        let inner = superframe(v6, is_tcp, options, flags, &payload);
        let tags = [Tag::new(3)];
        let frame = match tunnel {
            Some((outer_v6, n)) => wrap(&inner, outer_v6, &tags[..n], mode),
            None => inner.clone(),
        };
        let whole = parse(&frame).unwrap();
        let segments = cut(&frame, whole.innermost().l4(), size).unwrap();
        prop_assert_eq!(segments.len(), payload.len().div_ceil(usize::from(size)).max(1));
        let mut joined: Vec<u8> = Vec::new();
        let last = segments.len() - 1;
        for (i, segment) in segments.iter().enumerate() {
            // The parser verifies IPv4 header checksums and lengths.
            let parsed = parse(segment).unwrap();
            let layers = parsed.innermost();
            prop_assert_eq!(parsed.tunnel_error(), None);
            prop_assert_eq!(layers.end(), segment.len());
            prop_assert_eq!(parsed.outer().end(), segment.len());
            // A UDP checksum field whose partial value is zero counts as absent and stays so. All others are
            // right.
            let absent = !is_tcp && state(&frame, whole.innermost()) == State::Absent;
            prop_assert_eq!(state(segment, layers), if absent { State::Absent } else { State::Good });
            if let Some((outer_v6, _)) = tunnel {
                let computed = match mode {
                    OuterChecksum::Standard => outer_v6,
                    OuterChecksum::Always => true,
                    OuterChecksum::Zero => false,
                };
                prop_assert_eq!(state(segment, parsed.outer()), if computed { State::Good } else { State::Absent });
                prop_assert_eq!(parsed.vni().unwrap().get(), 77);
                if !outer_v6 {
                    prop_assert_eq!(parsed.outer().ipv4(segment).unwrap().ident(), i as u16);
                }
            }
            if !v6 {
                prop_assert_eq!(layers.ipv4(segment).unwrap().ident(), 0xfffeu16.wrapping_add(i as u16));
            }
            let body = match layers.l4_type() {
                L4Type::Tcp => {
                    let h = layers.tcp(segment).unwrap();
                    prop_assert_eq!(h.seq(), (u32::MAX - 100).wrapping_add(joined.len() as u32));
                    let not_last = if i == last { 0 } else { tcp::flags::FIN | tcp::flags::PSH };
                    let not_first = if i == 0 { 0 } else { tcp::flags::CWR };
                    prop_assert_eq!(h.flags(), flags & !(not_last | not_first));
                    prop_assert_eq!(h.header_len(), 20 + options * 4);
                    h.payload()
                }
                _ => layers.udp(segment).unwrap().payload(),
            };
            joined.extend(body);
        }
        prop_assert_eq!(joined, payload);
    }

    #[test]
    fn partial_checksums_of_the_kernel_are_completed(
        v6: bool, is_tcp: bool, tunnel in proptest::option::of(any::<bool>()),
        payload in proptest::collection::vec(any::<u8>(), 0..300), outer_partial: bool,
    ) {
        let inner = superframe(v6, is_tcp, 2, 0x18, &payload);
        let mut frame = inner.clone();
        if let Some(outer_v6) = tunnel {
            // Linux sums the outer datagram as if the inner checksum were complete.
            let mut done = inner.clone();
            let parsed = parse(&done).unwrap();
            prop_assume!(checksum_offload::complete(&mut done, &parsed).outer);
            frame = wrap(&done, outer_v6, &[], OuterChecksum::Always);
            let at = frame.len() - inner.len();
            frame[at..].copy_from_slice(&inner);
            if outer_partial {
                let layers = *parse(&frame).unwrap().outer();
                leave_partial(&mut frame, &layers);
            }
        }
        let parsed = parse(&frame).unwrap();
        prop_assume!(state(&frame, parsed.innermost()) == State::Partial);
        let done = checksum_offload::complete(&mut frame, &parsed);
        prop_assert!(done.any());
        prop_assert_eq!(done.inner, tunnel.is_some());
        prop_assert_eq!(state(&frame, parsed.outer()), State::Good);
        prop_assert_eq!(state(&frame, parsed.innermost()), State::Good);
        let before = frame.clone();
        prop_assert!(!checksum_offload::complete(&mut frame, &parsed).any());
        prop_assert_eq!(frame, before);
    }

    #[test]
    fn completion_across_buffers_equals_one_buffer(
        v6: bool, payload in proptest::collection::vec(any::<u8>(), 40..300), at: prop::sample::Index,
    ) {
        let frame = superframe(v6, true, 0, 0x10, &payload);
        let layers = *parse(&frame).unwrap().outer();
        let mut whole = frame.clone();
        let done = checksum_offload::complete_stack(&mut whole, &layers, || checksum::Sum::ZERO);
        let cut = layers.payload() + at.index(payload.len());
        let mut split = frame.clone();
        let (head, tail) = split.split_at_mut(cut);
        prop_assert_eq!(checksum_offload::complete_stack(head, &layers, || checksum::sum(tail)), done);
        prop_assert_eq!(split, whole);
    }
}

#[test]
fn right_checksums_that_look_partial_stay_unchanged() {
    let mut frame = superframe(false, true, 0, 0x10, &[0; 8]);
    let parsed = parse(&frame).unwrap();
    let cover = ChecksumSpan::of(&frame, parsed.outer()).unwrap();
    assert_eq!(cover.state(&frame), State::Partial);
    // The last payload word makes the checksum right for this field value.
    let end = frame.len();
    let missing = cover.pseudo.and(checksum::sum(&frame[cover.start..])).checksum();
    frame[end - 2..].copy_from_slice(&missing.to_be_bytes());
    assert_eq!(cover.transport.field(&frame[cover.start..]), Some(cover.pseudo.fold()));
    assert_eq!(cover.state(&frame), State::Good);
    assert!(!cover.transport.is_partial(&frame[cover.start..], cover.pseudo));
    let before = frame.clone();
    assert!(!checksum_offload::complete(&mut frame, &parsed).any());
    assert_eq!(frame, before);
}

/// Adds an outer stack without UDP: GRE with these flags, IP in IP, or a label stack.
fn wrap_otherwise(inner: &[u8], kind: &str, flags: u8) -> Vec<u8> {
    let mut frame =
        [&[2u8, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1][..], if kind == "mpls" { &[0x88, 0x47] } else { &[8, 0] }].concat();
    if kind == "mpls" {
        frame.extend([0, 1, 1, 64]);
        frame.extend(inner);
        return frame;
    }
    let (protocol, header, carried): (u8, Vec<u8>, &[u8]) = match kind {
        "ip" => (if inner[14] >> 4 == 4 { 4 } else { 41 }, vec![], &inner[14..]),
        _ => {
            let options = 4 * (flags & 0xb0).count_ones() as usize;
            (47, [&[flags, 0, 0x65, 0x58][..], &vec![9; options]].concat(), inner)
        }
    };
    let payload_len = (header.len() + carried.len()) as u16;
    let (src, dst) = (Ipv4Addr::new(10, 9, 0, 1), Ipv4Addr::new(10, 9, 0, 2));
    let mut ip = [0; 20];
    let protocol = IpProtocol(protocol);
    ipv4::Repr { src, dst, protocol, payload_len, ttl: 64, traffic_class: 0, ident: 7, fragment_word: 0 }
        .emit(&mut ip)
        .unwrap();
    [&frame[..], &ip, &header, carried].concat()
}

#[test]
fn tunnels_without_udp() {
    for v6 in [false, true] {
        let payload: Vec<u8> = (0..3000).map(|i| i as u8).collect();
        let inner = superframe(v6, true, 3, 0x18, &payload);
        for (kind, flags) in [("gre", 0), ("gre", 0x20), ("ip", 0), ("mpls", 0)] {
            let frame = wrap_otherwise(&inner, kind, flags);
            let whole = parse(&frame).unwrap();
            let l4 = whole.inner().unwrap_or_else(|| panic!("{kind}: {whole:?}")).l4();
            let segments = cut(&frame, l4, 1000).unwrap();
            assert_eq!(segments.len(), 3);
            let first_buffer = &frame[..whole.innermost().payload()];
            assert_eq!(Segmenter::new(first_buffer, &whole, l4, 1000).unwrap().remaining(), 3, "{kind}");
            let mut joined: Vec<u8> = Vec::new();
            for (i, segment) in segments.iter().enumerate() {
                let parsed = parse(segment).unwrap();
                let layers = parsed.inner().unwrap();
                assert_eq!((parsed.outer().end(), layers.end()), (segment.len(), segment.len()));
                assert_eq!(state(segment, layers), State::Good);
                if let Some(ip) = parsed.outer().ipv4(segment) {
                    assert_eq!(ip.ident(), 7 + i as u16);
                }
                joined.extend(layers.tcp(segment).unwrap().payload());
            }
            assert_eq!(joined, payload);
        }
        // These GRE fields would differ in each frame.
        for flags in [0x80, 0x10, 0xb0] {
            let frame = wrap_otherwise(&inner, "gre", flags);
            let l4 = parse(&frame).unwrap().inner().unwrap().l4();
            assert_eq!(cut(&frame, l4, 1000).unwrap_err(), SegmentError::NotTransport);
        }
    }
}

#[test]
fn segmentation_errors() {
    let frame = superframe(false, true, 0, 0x10, &[0; 3000]);
    assert_eq!(cut(&frame, 34, 0).unwrap_err(), SegmentError::NoSize);
    assert_eq!(cut(&frame, 33, 100).unwrap_err(), SegmentError::NotTransport);
    assert_eq!(cut(&frame, 34, 2).unwrap_err(), SegmentError::TooMany);
    assert_eq!(cut(&frame, 34, 3).unwrap().len(), 1000);
    const { assert!(MAX_SEGMENTS >= 65535 / 88) };
    let datagrams = superframe(false, false, 0, 0, &[0; MAX_DATAGRAMS * 20]);
    assert_eq!(cut(&datagrams, 34, 20).unwrap().len(), MAX_DATAGRAMS);
    assert_eq!(cut(&datagrams, 34, 19).unwrap_err(), SegmentError::TooMany);
    assert_eq!(cut(&datagrams, 34, 0).unwrap_err(), SegmentError::NoSize);
    assert_eq!(cut(&datagrams, 34, u16::MAX).unwrap().len(), 1);
    let parsed = parse(&frame).unwrap();
    assert_eq!(Segmenter::new(&frame[..53], &parsed, 34, 100).unwrap_err(), SegmentError::HeaderSplit);
    let mut segmenter = Segmenter::new(&frame, &parsed, 34, 1000).unwrap();
    assert_eq!(segmenter.next_into(&mut [0; 53], &frame), Some(Err(SegmentError::BufferTooShort)));
    assert_eq!(segmenter.remaining(), 3, "an error does not lose a segment");
    // The offset selects the VXLAN datagram's own UDP payload.
    let wrapped = wrap(&frame, false, &[], OuterChecksum::Zero);
    assert_eq!(cut(&wrapped, 34, 1000).unwrap().len(), 4);
    assert_eq!(cut(&wrapped, 34 + 50, 1000).unwrap().len(), 3);
    let mut fragment = frame.clone();
    fragment[20] = 0x20;
    fragment[16..18].copy_from_slice(&(20u16 + 16 + 20 + 4).to_be_bytes());
    ipv4::ViewMut::new(&mut fragment[14..]).unwrap().fill_checksum();
    assert_eq!(cut(&fragment, 34, 1000).unwrap_err(), SegmentError::Fragment);
}
