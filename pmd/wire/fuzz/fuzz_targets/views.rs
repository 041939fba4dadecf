//! Tunnel headers: views never panic, and writing the value of a header gives the same header.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_wire::{esp, geneve, gre, mpls, srh, vxlan, vxlan_gpe};

/// Reads a header, writes it to a buffer with other contents, and reads it again.
macro_rules! round_trip {
    ($protocol:ident, $data:expr) => {
        if let Ok(view) = $protocol::View::new($data) {
            assert!(view.header_len() + view.payload().len() <= $data.len());
            let header = $protocol::Repr::parse(&view);
            let mut out = [0xa5; 300];
            let len = header.emit(&mut out).expect("room");
            assert!(len <= view.header_len() && out[len..].iter().all(|b| *b == 0xa5));
            out[len..].fill(0);
            let written = $protocol::View::new(&out).expect("the written header is valid");
            assert_eq!($protocol::Repr::parse(&written), header);
            assert!(len == 0 || header.emit(&mut out[..len - 1]).is_err());
            let mut copy = $data.to_vec();
            assert_eq!($protocol::ViewMut::new(&mut copy).expect("the same bytes").view().header(), view.header());
        }
    };
}

fuzz_target!(|data: &[u8]| {
    round_trip!(esp, data);
    round_trip!(mpls, data);
    round_trip!(vxlan, data);
    round_trip!(vxlan_gpe, data);
    round_trip!(geneve, data);
    if let Ok(view) = gre::View::new(data) {
        let header = gre::Repr::parse(&view);
        assert_eq!(header.header_len(), view.header_len());
        // The checksum covers the payload.
        let mut out = vec![0xa5; header.header_len()];
        out.extend(view.payload());
        header.emit(&mut out).expect("room");
        let written = gre::View::new(&out).expect("the written header is valid");
        assert!(written.checksum_is_valid());
        assert_eq!((gre::Repr::parse(&written), written.payload()), (header, view.payload()));
        // The key lies at the offset that rules use.
        let at = gre::key_offset(view.flags());
        assert_eq!(view.key().is_some(), at.is_some());
        if let (Some(key), Some(at)) = (view.key(), at) {
            assert_eq!(data[at..at + 4], key.to_be_bytes());
        }
    }
    if let Ok(view) = srh::View::new(data) {
        assert!(view.header_len() + view.payload().len() <= data.len());
        let path: Vec<_> = view.segments().rev().collect();
        let (mut covered, mut whole) = (srh::HEADER_LEN + path.len() * srh::SID_LEN, true);
        for tlv in view.tlvs() {
            match tlv {
                Ok((kind, value)) => {
                    assert_ne!(kind, srh::TLV_PAD1);
                    covered += 2 + value.len();
                }
                Err(_) => whole = false,
            }
        }
        assert!(covered <= view.header_len() && usize::from(view.segments_left()) <= path.len());
        let header = srh::Repr {
            next_header: view.next_header(),
            segments_left: view.segments_left(),
            tag: view.tag(),
            path: &path,
        };
        let mut out = vec![0xa5; header.header_len()];
        assert_eq!(header.emit(&mut out), Ok(out.len()));
        let written = srh::View::new(&out).expect("the written header is valid");
        assert!(written.segments().eq(view.segments()) && written.tlvs().next().is_none());
        assert_eq!(written.segments_left(), view.segments_left());
        // Without TLVs and flags, nothing else is in the header.
        if whole && out.len() == view.header_len() && view.flags() == 0 {
            assert_eq!(out, data[..out.len()]);
        }
    }
    let mut entries = mpls::Entries::of(data);
    let (mut count, mut bottoms) = (0, 0);
    for entry in entries.by_ref() {
        count += 1;
        bottoms += usize::from(entry.is_ok_and(|entry| entry.bottom));
    }
    assert!(count <= mpls::MAX_ENTRIES + 1 && bottoms <= 1);
    let options = geneve::Options::of(data);
    let mut out = vec![0xa5; data.len()];
    let mut len = 0;
    let mut whole = true;
    for option in options {
        match option {
            Ok(option) => len += option.emit(&mut out[len..]).expect("as long as it was"),
            Err(_) => whole = false,
        }
    }
    if whole {
        assert_eq!(len, data.len());
        assert!(geneve::Options::of(&out).eq(geneve::Options::of(data)));
    }
});
