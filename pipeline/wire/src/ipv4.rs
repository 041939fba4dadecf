//! IPv4 (RFC 791; traffic class RFC 2474 and RFC 3168).

use core::net::Ipv4Addr;

use crate::checksum;
use crate::error::{NoRoom, ParseError};
use crate::field::{Field, put, room};
use crate::ip::IpProtocol;

/// "Don't fragment" in [`View::fragment_word`].
pub const DONT_FRAGMENT: u16 = 0x4000;
/// "More fragments" in [`View::fragment_word`].
pub const MORE_FRAGMENTS: u16 = 0x2000;
/// Fragment offset in [`View::fragment_word`], units of 8 bytes.
pub const FRAGMENT_OFFSET: u16 = 0x1fff;
/// Longest header with options, bytes.
pub const MAX_HEADER_LEN: usize = 60;
/// Smallest MTU that a link for IPv4 has (RFC 791 section 3.2).
pub const MIN_MTU: usize = 68;

header! {
    /// An IPv4 header with its options; the payload ends where the total length says.
    20 bytes, short: Ipv4Truncated {
        /// Version and header length in words.
        [0; 1] version_ihl, set_version_ihl: u8;
        /// DSCP (6 bits) and ECN (2 bits).
        [1; 1] traffic_class, set_traffic_class: u8;
        /// Length of header and payload, bytes.
        [2; 2] total_len, set_total_len: u16;
        /// Identification: the same in all fragments of a packet.
        [4; 2] ident, set_ident: u16;
        /// Flags and fragment offset.
        [6; 2] fragment_word, set_fragment_word: u16;
        /// Time to live, hops.
        [8; 1] ttl, set_ttl: u8;
        /// What follows.
        [9; 1] protocol, set_protocol: IpProtocol;
        /// Header checksum. Setters do not keep it right: [`ViewMut::fill_checksum`].
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
    /// The option bytes, padding included.
    pub fn options(&self) -> Options<'a> {
        Options { rest: self.options }
    }

    /// Differentiated services code point.
    pub fn dscp(&self) -> u8 {
        self.traffic_class() >> 2
    }

    /// ECN codepoint, see [`crate::ip::ecn`].
    pub fn ecn(&self) -> u8 {
        self.traffic_class() & 3
    }

    /// "Don't fragment".
    pub fn dont_fragment(&self) -> bool {
        self.fragment_word() & DONT_FRAGMENT != 0
    }

    /// "More fragments".
    pub fn more_fragments(&self) -> bool {
        self.fragment_word() & MORE_FRAGMENTS != 0
    }

    /// Where this fragment's payload belongs, bytes.
    pub fn fragment_offset(&self) -> usize {
        usize::from(self.fragment_word() & FRAGMENT_OFFSET) * 8
    }

    /// Whether this is a piece of a fragmented packet.
    pub fn is_fragment(&self) -> bool {
        self.fragment_word() & (MORE_FRAGMENTS | FRAGMENT_OFFSET) != 0
    }

    /// Whether the header checksum is right.
    pub fn checksum_is_valid(&self) -> bool {
        checksum::sum(self.header).and(checksum::sum(self.options)).is_valid()
    }

    /// Sum of the pseudo header for the payload.
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

    /// Takes one hop off the time to live and keeps the checksum right; false (nothing changed) if none is left to
    /// forward with (RFC 1812 section 5.3.1).
    pub fn decrement_ttl(&mut self) -> bool {
        let (ttl, protocol) = (self.header[8], self.header[9]);
        if ttl <= 1 {
            return false;
        }
        let old = u16::from_be_bytes([ttl, protocol]);
        self.set_checksum(checksum::update(self.view().checksum(), old, old - 0x100));
        self.set_ttl(ttl - 1);
        true
    }

    /// Replaces the traffic class and keeps the checksum right.
    pub fn replace_traffic_class(&mut self, value: u8) {
        let (first, old) = (self.header[0], self.header[1]);
        let (old, new) = (u16::from_be_bytes([first, old]), u16::from_be_bytes([first, value]));
        self.set_checksum(checksum::update(self.view().checksum(), old, new));
        self.set_traffic_class(value);
    }
}

/// Options of an IPv4 header: kind and value. Ends at "end of options"; an option that runs out of the header is an
/// error, and the last item.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Options<'a> {
    /// The bytes not yet looked at.
    pub fn bytes(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<(u8, &'a [u8]), ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (&kind, rest) = self.rest.split_first()?;
            match kind {
                0 => {
                    self.rest = &[];
                    return None;
                }
                1 => self.rest = rest,
                _ => {
                    let value = rest.first().and_then(|&len| rest.get(1..usize::from(len).checked_sub(1)?));
                    self.rest = value.and_then(|v| rest.get(1 + v.len()..)).unwrap_or(&[]);
                    return Some(value.map(|v| (kind, v)).ok_or(ParseError::Ipv4BadOption));
                }
            }
        }
    }
}

/// An IPv4 header without options as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// What follows.
    pub protocol: IpProtocol,
    /// Length of what follows, bytes; at most 65515.
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
    /// The values of a view; its options are left out.
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
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, NoRoom> {
        let h = room::<HEADER_LEN>(out)?;
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

    /// Sum of the pseudo header for the payload.
    pub fn pseudo(&self) -> checksum::Sum {
        checksum::pseudo4(self.src, self.dst, self.protocol, self.payload_len)
    }
}
