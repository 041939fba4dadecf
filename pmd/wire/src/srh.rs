//! Segment routing header of IPv6 (SRH, RFC 8754 section 2): the path of a packet as a list of segment identifiers.

use core::net::Ipv6Addr;

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};
use crate::ip::IpProtocol;

/// Routing type of the header.
pub const ROUTING_TYPE: u8 = 4;
/// Length of a segment identifier, bytes.
pub const SID_LEN: usize = 16;
/// Maximum number of segment identifiers that a header has room for.
pub const MAX_SEGMENTS: usize = 127;
/// Type of the TLV that pads by one byte and has no length field (section 2.1.1.1).
pub const TLV_PAD1: u8 = 0;
/// Type of the TLV that pads by several bytes (section 2.1.1.2).
pub const TLV_PADN: u8 = 4;
/// Type of the TLV with a keyed hash over the header (section 2.1.2).
pub const TLV_HMAC: u8 = 5;

header! {
    /// A segment routing header. Its list of segments lies within its length; TLVs may follow the list.
    8 bytes, short: ExtensionTruncated {
        /// Type of the header behind this one.
        [0; 1] next_header, set_next_header: IpProtocol;
        /// Length behind the first 8 bytes, in units of 8 bytes.
        [1; 1] hdr_ext_len, set_hdr_ext_len: u8;
        /// Routing type: [`ROUTING_TYPE`].
        [2; 1] routing_type, set_routing_type: u8;
        /// Number of segments that the packet has still to visit: index of the current one in the list.
        [3; 1] segments_left, set_segments_left: u8;
        /// Index of the last element of the list, which is the first one of the path.
        [4; 1] last_entry, set_last_entry: u8;
        /// Flags. None is defined; a receiver ignores them.
        [5; 1] flags, set_flags: u8;
        /// Tag of a class of packets.
        [6; 2] tag, set_tag: u16;
    }
}

/// Section 4.3.1.1: the list must lie within the header. "Segments Left" of a reduced header is one more than its list
/// has elements before the last one (section 4.1.1).
fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    let [_, units, kind, left, last, ..] = *header;
    let options = usize::from(units) * 8;
    let entries = usize::from(last) + 1;
    if kind != ROUTING_TYPE || entries * SID_LEN > options || usize::from(left) > entries {
        return Err(ParseError::ExtensionMalformed);
    }
    Ok((options, rest.saturating_sub(options)))
}

impl<'a> View<'a> {
    /// Iterates over the list of segments, whose first element is the last segment of the path.
    pub fn segments(&self) -> impl DoubleEndedIterator<Item = Ipv6Addr> + ExactSizeIterator + use<'a> {
        let len = (usize::from(self.last_entry()) + 1) * SID_LEN;
        let list = self.options.get(..len).unwrap_or_default().as_chunks().0;
        list.iter().map(|sid| Ipv6Addr::from_octets(*sid))
    }

    /// Iterates over the TLVs.
    pub fn tlvs(&self) -> Tlvs<'a> {
        let at = (usize::from(self.last_entry()) + 1) * SID_LEN;
        Tlvs { rest: self.options.get(at..).unwrap_or_default() }
    }
}

/// Iterator over the TLVs of a header (section 2.1): type and value, without single bytes of padding. An error is the
/// last item.
#[derive(Clone, Copy, Debug)]
pub struct Tlvs<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Tlvs<'a> {
    type Item = Result<(u8, &'a [u8]), ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some((&kind, rest)) = self.rest.split_first() {
            if kind == TLV_PAD1 {
                self.rest = rest;
                continue;
            }
            let parts = rest.split_first().and_then(|(&len, rest)| rest.split_at_checked(usize::from(len)));
            let Some((value, rest)) = parts else {
                self.rest = &[];
                return Some(Err(ParseError::ExtensionMalformed));
            };
            self.rest = rest;
            return Some(Ok((kind, value)));
        }
        None
    }
}

/// A header without TLVs, as a sender writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr<'a> {
    /// Type of the header behind this one.
    pub next_header: IpProtocol,
    /// Number of segments that the packet has still to visit.
    pub segments_left: u8,
    /// Tag of a class of packets.
    pub tag: u16,
    /// Segments in the order of the path, at least one and at most [`MAX_SEGMENTS`]. A reduced header lacks the first
    /// one of the path (section 4.1.1).
    pub path: &'a [Ipv6Addr],
}

impl Repr<'_> {
    /// Returns the length of the header, bytes.
    pub fn header_len(&self) -> usize {
        HEADER_LEN + self.path.len() * SID_LEN
    }

    /// Writes the header to the front of `out`, and returns its length. Elements beyond [`MAX_SEGMENTS`] have no place:
    /// the result is an error as for a short buffer.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let (len, count) = (self.header_len(), self.path.len());
        let short = BufferTooShort { need: len, have: out.len() };
        let out = out.get_mut(..len).filter(|_| (1..=MAX_SEGMENTS).contains(&count)).ok_or(short)?;
        let h = header_mut::<HEADER_LEN>(out)?;
        put::<0, 4, HEADER_LEN>(h, [self.next_header.0, count as u8 * 2, ROUTING_TYPE, self.segments_left]);
        put::<4, 4, HEADER_LEN>(h, [count as u8 - 1, 0, self.tag.write()[0], self.tag.write()[1]]);
        let list = out.get_mut(HEADER_LEN..).unwrap_or_default().as_chunks_mut().0;
        for (place, sid) in list.iter_mut().zip(self.path.iter().rev()) {
            *place = sid.octets();
        }
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;

    fn sid(n: u16) -> Ipv6Addr {
        Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, n)
    }

    fn header(path: &[Ipv6Addr], segments_left: u8) -> Vec<u8> {
        let header = Repr { next_header: IpProtocol::IPV6, segments_left, tag: 0x0102, path };
        let mut out = vec![0xa5; header.header_len()];
        assert_eq!(header.emit(&mut out), Ok(out.len()));
        assert!(header.emit(&mut vec![0; out.len() - 1]).is_err());
        out
    }

    /// RFC 8754 section 6.2.1: the packet <S1, S2, S3> from a source has the list (S3, S2, S1) and two segments left.
    #[test]
    fn rfc8754_section_2() {
        let path = [sid(1), sid(2), sid(3)];
        let bytes = header(&path, 2);
        assert_eq!(bytes[..8], [41, 6, 4, 2, 2, 0, 1, 2]);
        assert_eq!(bytes[8..24], sid(3).octets());
        assert_eq!(bytes[40..], sid(1).octets());
        let view = View::new(&bytes).unwrap();
        assert_eq!((view.header_len(), view.segments_left(), view.last_entry(), view.tag()), (56, 2, 2, 0x0102));
        assert!(view.segments().rev().eq(path));
        assert_eq!((view.segments().len(), view.tlvs().next()), (3, None));
    }

    /// A reduced header lacks the first segment: "Segments Left" is the number of its elements.
    #[test]
    fn rfc8754_section_4_1_1() {
        let bytes = header(&[sid(2), sid(3)], 2);
        assert_eq!(bytes[..5], [41, 4, 4, 2, 1]);
        assert!(View::new(&bytes).unwrap().segments().eq([sid(3), sid(2)]));
    }

    #[test]
    fn rfc8754_section_4_3_1_1() {
        let good = header(&[sid(1), sid(2)], 1);
        // Routing type, segments left, last entry, and a length that does not hold the list.
        for (at, value) in [(2, 0), (2, 3), (3, 3), (3, 255), (4, 2), (4, 255), (1, 3), (1, 0)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(View::new(&bad).unwrap_err(), ParseError::ExtensionMalformed, "{at} {value}");
        }
        let mut longer = good.clone();
        longer[1] = 5;
        assert_eq!(View::new(&longer).unwrap_err(), ParseError::ExtensionTruncated);
        for cut in 0..good.len() {
            assert!(View::new(&good[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn rfc8754_section_2_1() {
        let mut bytes = header(&[sid(1)], 0);
        bytes[1] += 5;
        // One byte of padding, several of them, and a keyed hash of 32 bytes with its ID.
        bytes.extend([0, 4, 1, 0, 5, 34, 0, 0]);
        bytes.extend([0xcc; 32]);
        let found: Vec<_> =
            View::new(&bytes).unwrap().tlvs().map(|it| it.map(|(kind, value)| (kind, value.len()))).collect();
        assert_eq!(found, [Ok((TLV_PADN, 1)), Ok((TLV_HMAC, 34))]);
        // A TLV that ends behind the header.
        bytes[24 + 5] = 35;
        assert!(View::new(&bytes).unwrap().tlvs().any(|it| it == Err(ParseError::ExtensionMalformed)));
        bytes[63] = 9;
        bytes[24 + 5] = 33;
        assert!(View::new(&bytes).unwrap().tlvs().any(|it| it.is_err()), "a type without length");
    }

    #[test]
    fn the_longest_list() {
        let path: Vec<Ipv6Addr> = (0..127).map(sid).collect();
        let bytes = header(&path, 126);
        assert!(View::new(&bytes).unwrap().segments().rev().eq(path.iter().copied()));
        for path in [&[][..], &[sid(0); 128]] {
            let header = Repr { next_header: IpProtocol::IPV4, segments_left: 0, tag: 0, path };
            assert!(header.emit(&mut [0; 4096]).is_err());
        }
    }
}
