//! IPv6 (RFC 8200) and its extension headers. Jumbograms (RFC 2675) are refused.

use core::net::Ipv6Addr;

use crate::checksum;
use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};
use crate::ip::IpProtocol;

/// Maximum number of extension headers of a packet.
pub const MAX_EXTENSIONS: usize = 8;
/// Smallest MTU of a link for IPv6 (RFC 8200 section 5), bytes.
pub const MIN_MTU: usize = 1280;
/// Jumbo payload option (RFC 2675 section 2).
pub const OPTION_JUMBO: u8 = 0xc2;
/// Home address option (RFC 6275 section 6.3).
pub const OPTION_HOME_ADDRESS: u8 = 0xc9;
/// Length of a fragment header, bytes.
pub const FRAGMENT_HEADER_LEN: usize = 8;

header! {
    /// The fixed IPv6 header. The payload starts with the extension headers. The payload length determines
    /// its end.
    40 bytes, short: Ipv6Truncated {
        /// Version (4 bits), traffic class (8 bits), flow label (20 bits).
        [0; 4] first_word, set_first_word: u32;
        /// Length of everything after this header, bytes.
        [4; 2] payload_len, set_payload_len: u16;
        /// Type of the next header.
        [6; 1] next_header, set_next_header: IpProtocol;
        /// Hop limit.
        [7; 1] hop_limit, set_hop_limit: u8;
        /// Source address.
        [8; 16] src, set_src: Ipv6Addr;
        /// Destination address.
        [24; 16] dst, set_dst: Ipv6Addr;
    }
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    if header[0] >> 4 != 6 {
        return Err(ParseError::Ipv6BadVersion);
    }
    let payload = usize::from(crate::field::be16::<4, HEADER_LEN>(header));
    if payload > rest {
        return Err(ParseError::Ipv6BadPayloadLength);
    }
    if payload == 0 && IpProtocol(header[6]) == IpProtocol::HOP_BY_HOP {
        return Err(ParseError::Ipv6Jumbogram);
    }
    Ok((0, payload))
}

impl<'a> View<'a> {
    /// Returns DSCP and ECN.
    pub fn traffic_class(&self) -> u8 {
        (self.first_word() >> 20) as u8
    }

    /// Returns the differentiated services code point.
    pub fn dscp(&self) -> u8 {
        self.traffic_class() >> 2
    }

    /// Returns the ECN codepoint; see [`crate::ip::ecn`].
    pub fn ecn(&self) -> u8 {
        self.traffic_class() & 3
    }

    /// Returns the flow label, 20 bits.
    pub fn flow_label(&self) -> u32 {
        self.first_word() & 0xf_ffff
    }

    /// Iterates over the extension headers, in order.
    pub fn extensions(&self) -> Extensions<'a> {
        Extensions::new(self.next_header(), self.payload)
    }
}

impl ViewMut<'_> {
    /// Replaces DSCP and ECN.
    pub fn set_traffic_class(&mut self, value: u8) {
        let word = self.view().first_word() & !0x0ff0_0000;
        self.set_first_word(word | u32::from(value) << 20);
    }
}

/// True if a next header value is a supported extension header.
#[inline]
pub const fn is_extension(next: IpProtocol) -> bool {
    matches!(
        next,
        IpProtocol::HOP_BY_HOP
            | IpProtocol::ROUTING
            | IpProtocol::FRAGMENT
            | IpProtocol::DESTINATION_OPTIONS
            | IpProtocol::AH
    )
}

/// Returns the length of an extension header from its second byte. The unit is 8 bytes beyond the first 8, in
/// AH 4 bytes beyond the first 8 (RFC 4302 section 2.2). A fragment header has no length field.
#[inline]
pub(crate) const fn extension_len(kind: IpProtocol, second: u8) -> usize {
    match kind {
        IpProtocol::FRAGMENT => FRAGMENT_HEADER_LEN,
        IpProtocol::AH => (second as usize + 2) * 4,
        _ => (second as usize + 1) * 8,
    }
}

/// An extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension<'a> {
    /// Type of the header.
    pub kind: IpProtocol,
    /// Bytes of the header, at least 8. The first byte is the type of the next header.
    pub bytes: &'a [u8],
}

impl<'a> Extension<'a> {
    /// Returns the options, if the header carries options.
    pub fn options(&self) -> Option<Options<'a>> {
        matches!(self.kind, IpProtocol::HOP_BY_HOP | IpProtocol::DESTINATION_OPTIONS).then(|| Options::of(self.bytes))
    }

    /// Returns offset (bytes), "more fragments" and identification of a fragment header; `None` for other
    /// headers.
    pub fn fragment(&self) -> Option<(usize, bool, u32)> {
        let &[_, _, a, b, c, d, e, f] = self.bytes.first_chunk()?;
        let word = u16::from_be_bytes([a, b]);
        (self.kind == IpProtocol::FRAGMENT)
            .then(|| (usize::from(word & 0xfff8), word & 1 != 0, u32::from_be_bytes([c, d, e, f])))
    }
}

/// Iterator over the extension headers of a packet, at most [`MAX_EXTENSIONS`]. An error is the last item.
#[derive(Clone, Copy, Debug)]
pub struct Extensions<'a> {
    next: IpProtocol,
    rest: &'a [u8],
    left: usize,
    later: bool,
}

impl<'a> Extensions<'a> {
    /// Iterates over the extension headers at the front of `bytes`, which follow a fixed IPv6 header. The first one has
    /// the type `next`.
    pub fn new(next: IpProtocol, bytes: &'a [u8]) -> Self {
        Extensions { next, rest: bytes, left: MAX_EXTENSIONS, later: false }
    }

    /// Returns the type of the header after the consumed ones.
    pub fn next_header(&self) -> IpProtocol {
        self.next
    }

    /// Returns the bytes after the consumed headers.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Extensions<'a> {
    type Item = Result<Extension<'a>, ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.later || !is_extension(self.next) {
            return None;
        }
        let kind = self.next;
        if self.left == 0 {
            self.later = true;
            return Some(Err(ParseError::ExtensionTooMany));
        }
        self.left -= 1;
        let bytes = match *self.rest {
            [next, second, ..] => {
                self.next = IpProtocol(next);
                self.rest.split_at_checked(extension_len(kind, second))
            }
            _ => None,
        };
        let Some((bytes, rest)) = bytes else {
            self.later = true;
            return Some(Err(ParseError::ExtensionTruncated));
        };
        self.rest = rest;
        let extension = Extension { kind, bytes };
        self.later = extension.fragment().is_some_and(|(offset, _, _)| offset != 0);
        Some(Ok(extension))
    }
}

/// Iterator over the options of a hop-by-hop or destination options header (RFC 8200 section 4.2), without
/// padding. An error is the last item.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Options<'a> {
    /// Iterates over the options in a whole extension header.
    pub fn of(header: &'a [u8]) -> Self {
        Options { rest: header.get(2..).unwrap_or(&[]) }
    }
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<(u8, &'a [u8]), ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (&kind, rest) = self.rest.split_first()?;
            if kind == 0 {
                self.rest = rest;
                continue;
            }
            let parts = rest.split_first().and_then(|(&len, rest)| rest.split_at_checked(usize::from(len)));
            let Some((value, rest)) = parts else {
                self.rest = &[];
                return Some(Err(ParseError::ExtensionMalformed));
            };
            self.rest = rest;
            if kind != 1 {
                return Some(Ok((kind, value)));
            }
        }
    }
}

/// The fixed IPv6 header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Source address.
    pub src: Ipv6Addr,
    /// Destination address.
    pub dst: Ipv6Addr,
    /// Type of the next header.
    pub next_header: IpProtocol,
    /// Length of everything after the header, bytes.
    pub payload_len: u16,
    /// Hop limit.
    pub hop_limit: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label; only its low 20 bits are written.
    pub flow_label: u32,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr {
            src: view.src(),
            dst: view.dst(),
            next_header: view.next_header(),
            payload_len: view.payload_len(),
            hop_limit: view.hop_limit(),
            traffic_class: view.traffic_class(),
            flow_label: view.flow_label(),
        }
    }

    /// Writes the header to the front of `out` and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0xf_ffff;
        put::<0, 4, HEADER_LEN>(h, first.write());
        put::<4, 2, HEADER_LEN>(h, self.payload_len.write());
        put::<6, 2, HEADER_LEN>(h, [self.next_header.0, self.hop_limit]);
        put::<8, 16, HEADER_LEN>(h, self.src.write());
        put::<24, 16, HEADER_LEN>(h, self.dst.write());
        Ok(HEADER_LEN)
    }

    /// Returns the sum of the pseudo header if no extension headers follow.
    pub fn pseudo(&self) -> checksum::Sum {
        checksum::pseudo6(self.src, self.dst, self.next_header, u32::from(self.payload_len))
    }
}

/// The addresses of a header that the pseudo header of layer 4 does not contain, because an extension header has
/// others for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HiddenAddresses {
    /// A home address option has the source (RFC 6275 section 11.3.1).
    pub src: bool,
    /// A routing header with segments left has the final destination (RFC 8200 section 8.1).
    pub dst: bool,
}

/// Returns the link-local address that is derived from an Ethernet address (RFC 4862, RFC 2464 section 4).
pub fn link_local(mac: crate::MacAddr) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from_octets([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// Returns the solicited-node group of an address (RFC 4291 section 2.7.1).
pub fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let o = address.octets();
    Ipv6Addr::from_octets([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, o[13], o[14], o[15]])
}
