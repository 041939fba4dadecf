//! A VXLAN frame: what the one-pass parser says of the inner frame is what a parser that starts there says.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_wire::{Parser, Tunnel, vxlan};

fuzz_target!(|data: &[u8]| {
    let parser = Parser { verify_ipv4: false, ..Parser::default() };
    let Ok(parsed) = parser.parse(data) else { return };
    if parsed.tunnel() == Tunnel::None {
        assert!(parsed.inner().is_none() && parsed.vni().is_none() && parsed.tunnel_header().is_none());
        return;
    }
    let datagram = parsed.outer().udp(data).expect("a tunnel lies in a datagram");
    let at = parsed.tunnel_header().expect("there is a tunnel");
    let header = match vxlan::View::new(datagram.payload()) {
        Ok(header) => header,
        Err(error) => return assert_eq!(parsed.tunnel_error(), Some(error)),
    };
    assert_eq!(parsed.vni(), Some(header.vni()));
    // The headroom moved over the outer headers: the frame is now the inner one.
    let frame = header.payload();
    match (Parser { vxlan_port: None, ..parser }).parse(frame) {
        Ok(alone) => {
            let moved = parsed.inner().expect("in order").moved(-((at + vxlan::HEADER_LEN) as i32));
            assert_eq!(moved.as_ref(), Some(alone.outer()));
        }
        Err(error) => assert_eq!(parsed.tunnel_error(), Some(error)),
    }
});
