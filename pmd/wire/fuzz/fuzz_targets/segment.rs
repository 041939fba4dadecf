//! Superframes and segment sizes: the segments cover the payload exactly, and each is a valid frame with
//! right checksums.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_wire::checksum::State;
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::segment::Segmenter;
use wirepath_wire::{L4Type, Parser, Tunnels};

fuzz_target!(|data: &[u8]| {
    let Some((size, frame)) = data.split_first_chunk() else { return };
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let Ok(parsed) = parser.parse(frame) else { return };
    let layers = *parsed.innermost();
    let Ok(mut segmenter) = Segmenter::new(frame, &parsed, layers.l4(), u16::from_be_bytes(*size)) else { return };
    let mut headers = vec![0xa5; segmenter.header_len()];
    let mut at = layers.payload();
    // An inner frame that is invalid as a whole may be valid in a segment.
    let tunnels = if parsed.inner().is_some() { parser.tunnels } else { Tunnels::NONE };
    let reader = Parser { tunnels, ..Parser::default() };
    while let Some(segment) = segmenter.next_into(&mut headers, frame) {
        let segment = segment.expect("there is room");
        assert_eq!((segment.header_len, segment.payload.start), (headers.len(), at));
        at = segment.payload.end;
        let piece = [&headers[..], &frame[segment.payload]].concat();
        let again = reader.parse(&piece).expect("a valid frame");
        let state = ChecksumSpan::of(&piece, again.innermost()).expect("TCP or UDP").state(&piece);
        assert!(state == State::Good || (state == State::Absent && layers.l4_type() == L4Type::Udp), "{state:?}");
        assert_eq!(again.innermost().end(), piece.len());
    }
    assert_eq!(at, layers.udp_end(frame).unwrap_or(layers.end()));
});
