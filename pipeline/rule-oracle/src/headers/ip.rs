//! IPv4 and IPv6 headers, up to the payload.

use super::{EXTENSIONS, Fragment, InnerStart, Network, Stack, TunnelPorts, u16_at};

impl Stack {
    pub(super) fn ip(&mut self, frame: &[u8], version: u8, at: usize, ports: &TunnelPorts) -> InnerStart {
        if version == 4 { self.ipv4(frame, at, ports) } else { self.ipv6(frame, at, ports) }
    }

    /// Parses IPv4 (RFC 791 section 3.1).
    fn ipv4(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> InnerStart {
        if at + 20 > self.end {
            return self.malformed("IPv4 header cut off");
        }
        if frame[at] >> 4 != 4 {
            return self.malformed("not version 4");
        }
        let header = usize::from(frame[at] & 15) * 4;
        let total = usize::from(u16_at(frame, at + 2));
        if header < 20 || at + header > self.end {
            return self.malformed("IPv4 header length");
        }
        if total < header || at + total > self.end {
            return self.malformed("IPv4 total length");
        }
        if ports.checksums && crate::rewrite::sum(&[&frame[at..at + header]]) != 0xffff {
            return self.malformed("IPv4 header checksum");
        }
        // Options concern only the destination of the packet, so they are not checked.
        self.network = Network::Ipv4(at);
        self.end = at + total;
        self.protocol = frame[at + 9];
        let flags = u16_at(frame, at + 6);
        self.fragment = match (flags & 0x1fff, flags & 0x2000) {
            (0, 0) => Fragment::No,
            (0, _) => Fragment::First,
            _ => Fragment::Later,
        };
        let (piece, offset) = (total - header, usize::from(flags & 0x1fff) * 8);
        if let Some(what) = bad_piece(piece, offset, flags & 0x2000 != 0, offset + piece, self.protocol) {
            return self.malformed(what);
        }
        self.layer4(frame, at + header, ports)
    }

    /// Parses IPv6 (RFC 8200 sections 3 and 4).
    fn ipv6(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> InnerStart {
        if at + 40 > self.end {
            return self.malformed("IPv6 header cut off");
        }
        if frame[at] >> 4 != 6 {
            return self.malformed("not version 6");
        }
        let payload = usize::from(u16_at(frame, at + 4));
        if at + 40 + payload > self.end {
            return self.malformed("IPv6 payload length");
        }
        self.network = Network::Ipv6(at);
        self.end = at + 40 + payload;
        let mut next = frame[at + 6];
        let mut here = at + 40;
        let mut piece = None;
        while EXTENSIONS.contains(&next) {
            if self.extensions.len() == 8 {
                return self.malformed("too many extension headers");
            }
            if next == 44 && self.extensions.contains(&44) {
                return self.malformed("a second fragment header");
            }
            if next == 0 && here != at + 40 {
                return self.malformed("hop-by-hop options are not the first");
            }
            if here + 8 > self.end {
                return self.malformed("extension header cut off");
            }
            let length = match next {
                44 => 8,
                // RFC 4302 section 2.2: the length is in words of four bytes, minus two.
                51 => (usize::from(frame[here + 1]) + 2) * 4,
                _ => (usize::from(frame[here + 1]) + 1) * 8,
            };
            // RFC 4302 section 2: AH has at least twelve bytes.
            if here + length > self.end || next == 51 && length < 12 {
                return self.malformed("extension header cut off");
            }
            self.extensions.push(next);
            match next {
                0 | 60 => {
                    if let Some(what) = self.options(next, &frame[here + 2..here + length]) {
                        return self.malformed(what);
                    }
                }
                43 => self.has_segments_left |= frame[here + 3] > 0,
                44 => {
                    let word = u16_at(frame, here + 2);
                    piece = Some((here + 8, usize::from(word & 0xfff8), word & 1 == 1));
                    self.fragment = match (word >> 3, word & 1) {
                        // RFC 6946: an atomic fragment is the whole packet.
                        (0, 0) => self.fragment,
                        (0, _) => Fragment::First,
                        _ => Fragment::Later,
                    };
                }
                _ => {}
            }
            next = frame[here];
            here += length;
            if self.fragment == Fragment::Later {
                break;
            }
        }
        self.protocol = next;
        if let Some((start, offset, more)) = piece {
            let length = self.end - start;
            let whole = start - 8 - (at + 40) + offset + length;
            // The upper layer starts behind the fragment header only if no other extension header follows.
            if let Some(what) = bad_piece(length, offset, more, whole, next) {
                return self.malformed(what);
            }
        }
        self.layer4(frame, here, ports)
    }

    /// Parses options (RFC 8200 section 4.2: Pad1, and options with a length). RFC 2675 section 2: jumbograms
    /// use a hop-by-hop option.
    fn options(&mut self, header: u8, mut options: &[u8]) -> Option<&'static str> {
        while let [kind, rest @ ..] = options {
            if *kind == 0 {
                options = rest;
                continue;
            }
            let Some(length) = rest.first().map(|length| usize::from(*length)).filter(|l| *l < rest.len()) else {
                return Some("option of an extension header");
            };
            match kind {
                0xc2 if header == 0 => return Some("jumbogram"),
                0xc9 if header == 60 && length == 16 => self.has_home_address = true,
                _ => {}
            }
            options = &rest[1 + length..];
        }
        None
    }
}

/// Returns the error of an impossible fragment. `whole` is the minimum payload length of the reassembled
/// packet.
fn bad_piece(piece: usize, offset: usize, more: bool, whole: usize, protocol: u8) -> Option<&'static str> {
    if (offset > 0 || more) && whole > 65535 {
        return Some("a fragment beyond the longest packet");
    }
    if more && !piece.is_multiple_of(8) {
        return Some("a fragment in the middle that is not a multiple of 8 bytes long");
    }
    // RFC 3128.
    (offset == 8 && protocol == 6).then_some("a fragment that overlaps the TCP header")
}
