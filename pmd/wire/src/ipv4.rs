//! IPv4 (RFC 791; traffic class RFC 2474 and RFC 3168).

use core::net::Ipv4Addr;

use crate::checksum;
use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, next_option, put};
use crate::ip::IpProtocol;

/// "Don't fragment" in [`View::fragment_word`].
pub const DONT_FRAGMENT: u16 = 0x4000;
/// "More fragments" in [`View::fragment_word`].
pub const MORE_FRAGMENTS: u16 = 0x2000;
/// Fragment offset in [`View::fragment_word`], units of 8 bytes.
pub const FRAGMENT_OFFSET: u16 = 0x1fff;
/// Maximum length of a header with options, bytes.
pub const MAX_HEADER_LEN: usize = 60;
/// Smallest MTU of a link for IPv4 (RFC 791 section 3.2), bytes.
pub const MIN_MTU: usize = 68;

header! {
    /// An IPv4 header with its options. The total length determines the end of the payload.
    20 bytes, short: Ipv4Truncated {
        /// Version and header length in words.
        [0; 1] version_ihl, set_version_ihl: u8;
        /// DSCP (6 bits) and ECN (2 bits).
        [1; 1] traffic_class, set_traffic_class: u8;
        /// Length of header and payload, bytes.
        [2; 2] total_len, set_total_len: u16;
        /// Identification, equal in all fragments of a packet.
        [4; 2] ident, set_ident: u16;
        /// Flags and fragment offset.
        [6; 2] fragment_word, set_fragment_word: u16;
        /// Time to live, hops.
        [8; 1] ttl, set_ttl: u8;
        /// Protocol of the payload.
        [9; 1] protocol, set_protocol: IpProtocol;
        /// Header checksum. The setters do not update it: call [`ViewMut::fill_checksum`].
        [10; 2] checksum, set_checksum: u16;
        /// Source address.
        [12; 4] src, set_src: Ipv4Addr;
        /// Destination address.
        [16; 4] dst, set_dst: Ipv4Addr;
    }
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    if header[0] >> 4 != 4 {
        return Err(ParseError::Ipv4BadVersion);
    }
    let header_len = usize::from(header[0] & 15) * 4;
    let total = usize::from(crate::field::be16::<2, HEADER_LEN>(header));
    if header_len < HEADER_LEN || total < header_len {
        return Err(ParseError::Ipv4BadHeaderLength);
    }
    if total > HEADER_LEN + rest {
        return Err(ParseError::Ipv4BadTotalLength);
    }
    Ok((header_len - HEADER_LEN, total - header_len))
}

impl<'a> View<'a> {
    /// Returns the options, padding included.
    pub fn options(&self) -> Options<'a> {
        Options { rest: self.options }
    }

    /// Returns the differentiated services code point.
    pub fn dscp(&self) -> u8 {
        self.traffic_class() >> 2
    }

    /// Returns the ECN codepoint; see [`crate::ip::ecn`].
    pub fn ecn(&self) -> u8 {
        self.traffic_class() & 3
    }

    /// Returns the "don't fragment" flag.
    pub fn dont_fragment(&self) -> bool {
        self.fragment_word() & DONT_FRAGMENT != 0
    }

    /// True if this is a fragment of a packet.
    pub fn is_fragment(&self) -> bool {
        self.fragment_word() & (MORE_FRAGMENTS | FRAGMENT_OFFSET) != 0
    }

    /// True if the header checksum is right.
    pub fn checksum_is_valid(&self) -> bool {
        checksum::sum(self.header).and(checksum::sum(self.options)).is_valid()
    }

    /// Returns the sum of the pseudo header for the payload.
    pub fn pseudo(&self) -> checksum::Sum {
        checksum::pseudo4(self.src(), self.dst(), self.protocol(), self.payload.len() as u16)
    }
}

impl ViewMut<'_> {
    /// Computes and writes the header checksum.
    pub fn fill_checksum(&mut self) {
        self.set_checksum(0);
        let checksum = checksum::sum(self.header).and(checksum::sum(self.options)).checksum();
        self.set_checksum(checksum);
    }
}

/// Iterator over the options of an IPv4 header: kind and value. It ends at "end of options". An option that
/// exceeds the header gives an error, which is the last item.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Options<'a> {
    /// Returns the bytes that are not consumed yet.
    pub fn bytes(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<(u8, &'a [u8]), ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        next_option(&mut self.rest, ParseError::Ipv4BadOption)
    }
}

/// An IPv4 header without options as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// Protocol of the payload.
    pub protocol: IpProtocol,
    /// Length of the payload, bytes; at most 65515.
    pub payload_len: u16,
    /// Time to live, hops.
    pub ttl: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Identification.
    pub ident: u16,
    /// Flags and fragment offset.
    pub fragment_word: u16,
}

impl Repr {
    /// Returns the values of a view, without its options.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr {
            src: view.src(),
            dst: view.dst(),
            protocol: view.protocol(),
            payload_len: view.payload.len() as u16,
            ttl: view.ttl(),
            traffic_class: view.traffic_class(),
            ident: view.ident(),
            fragment_word: view.fragment_word(),
        }
    }

    /// Writes the header with its checksum to the front of `out` and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        let total = self.payload_len.saturating_add(HEADER_LEN as u16);
        put::<0, 2, HEADER_LEN>(h, [0x45, self.traffic_class]);
        put::<2, 2, HEADER_LEN>(h, total.write());
        put::<4, 2, HEADER_LEN>(h, self.ident.write());
        put::<6, 2, HEADER_LEN>(h, self.fragment_word.write());
        put::<8, 4, HEADER_LEN>(h, [self.ttl, self.protocol.0, 0, 0]);
        put::<12, 4, HEADER_LEN>(h, self.src.write());
        put::<16, 4, HEADER_LEN>(h, self.dst.write());
        let checksum = checksum::ipv4_header(h);
        put::<10, 2, HEADER_LEN>(h, checksum.write());
        Ok(HEADER_LEN)
    }

    /// Returns the sum of the pseudo header for the payload.
    pub fn pseudo(&self) -> checksum::Sum {
        checksum::pseudo4(self.src, self.dst, self.protocol, self.payload_len)
    }
}
