//! GRE (RFC 2784) with key and sequence number (RFC 2890); NVGRE (RFC 7637).

use crate::checksum;
use crate::error::{BufferTooShort, ParseError};
use crate::ethernet::EtherType;
use crate::field::{Field, header_mut, put};
use crate::vxlan::Vni;

/// Flag C: a checksum (and two reserved bytes) follows.
pub const FLAG_CHECKSUM: u16 = 0x8000;
/// Flag R of RFC 1701: an offset and routing entries follow. Their length is not in the header.
pub const FLAG_ROUTING: u16 = 0x4000;
/// Flag K: a key follows.
pub const FLAG_KEY: u16 = 0x2000;
/// Flag S: a sequence number follows.
pub const FLAG_SEQUENCE: u16 = 0x1000;
/// Version number; 1 is PPTP (RFC 2637).
pub const VERSION: u16 = 0x0007;
/// Bits for which a receiver must discard a packet. RFC 2784 section 2.3 names bits 1 to 5, of which RFC 2890
/// uses two. Section 2.3.1 names the version.
pub const MUST_BE_ZERO: u16 = FLAG_ROUTING | 0x0c00 | VERSION;

header! {
    /// A GRE header with its optional fields. Headers with unknown flags or versions are refused, because the
    /// length of what follows is unknown.
    4 bytes, short: GreTruncated {
        /// Flags and version.
        [0; 2] flags, set_flags: u16;
        /// EtherType of the payload.
        [2; 2] protocol, set_protocol: EtherType;
    }
}

/// Returns the length of the optional fields that the flags announce, bytes.
#[inline]
pub const fn options_len(flags: u16) -> usize {
    (flags & (FLAG_CHECKSUM | FLAG_ROUTING) != 0) as usize * 4
        + (flags & FLAG_KEY != 0) as usize * 4
        + (flags & FLAG_SEQUENCE != 0) as usize * 4
}

/// Returns the offset of the key from the start of the header, bytes; `None` without a key.
#[inline]
pub const fn key_offset(flags: u16) -> Option<usize> {
    if flags & FLAG_KEY == 0 {
        return None;
    }
    Some(HEADER_LEN + options_len(flags & (FLAG_CHECKSUM | FLAG_ROUTING)))
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    let flags = crate::field::be16::<0, HEADER_LEN>(header);
    let options = options_len(flags);
    match rest.checked_sub(options) {
        None => Err(ParseError::GreTruncated),
        Some(_) if flags & MUST_BE_ZERO != 0 => Err(ParseError::GreBadFlags),
        Some(payload) => Ok((options, payload)),
    }
}

impl View<'_> {
    fn word(&self, flag: u16, at: usize) -> Option<u32> {
        if self.flags() & flag == 0 {
            return None;
        }
        Some(u32::from_be_bytes(*self.options.get(at..)?.first_chunk()?))
    }

    /// Returns the checksum of header and payload; `None` without one.
    pub fn checksum(&self) -> Option<u16> {
        self.word(FLAG_CHECKSUM, 0).map(|word| (word >> 16) as u16)
    }

    /// True if the checksum is right or absent.
    pub fn checksum_is_valid(&self) -> bool {
        let sum = checksum::sum(self.header).and(checksum::sum(self.options)).and(checksum::sum(self.payload));
        self.flags() & FLAG_CHECKSUM == 0 || sum.is_valid()
    }

    /// Returns the key.
    pub fn key(&self) -> Option<u32> {
        self.word(FLAG_KEY, key_offset(self.flags())? - HEADER_LEN)
    }

    /// Returns the sequence number.
    pub fn sequence(&self) -> Option<u32> {
        self.word(FLAG_SEQUENCE, options_len(self.flags() & !FLAG_SEQUENCE))
    }

    /// Returns virtual subnet id and flow id if the header is NVGRE: Ethernet payload, a key, and no other
    /// flag (RFC 7637 section 3.2).
    pub fn nvgre(&self) -> Option<(Vni, u8)> {
        if self.flags() != FLAG_KEY || self.protocol() != EtherType::TRANSPARENT_ETHERNET {
            return None;
        }
        self.key().map(|key| (Vni::from_low_bits(key >> 8), key as u8))
    }
}

/// A GRE header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// EtherType of the payload.
    pub protocol: EtherType,
    /// True if the header has a checksum.
    pub checksum: bool,
    /// Key.
    pub key: Option<u32>,
    /// Sequence number.
    pub sequence: Option<u32>,
}

impl Repr {
    /// Creates an NVGRE header (RFC 7637 section 3.2).
    pub fn nvgre(subnet: Vni, flow: u8) -> Repr {
        let key = Some(subnet.get() << 8 | u32::from(flow));
        Repr { protocol: EtherType::TRANSPARENT_ETHERNET, checksum: false, key, sequence: None }
    }

    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        let checksum = view.checksum().is_some();
        Repr { protocol: view.protocol(), checksum, key: view.key(), sequence: view.sequence() }
    }

    fn flags(&self) -> u16 {
        let flag = |present, flag| if present { flag } else { 0 };
        flag(self.checksum, FLAG_CHECKSUM)
            | flag(self.key.is_some(), FLAG_KEY)
            | flag(self.sequence.is_some(), FLAG_SEQUENCE)
    }

    /// Returns the length of the header, bytes.
    pub fn header_len(&self) -> usize {
        HEADER_LEN + options_len(self.flags())
    }

    /// Writes the header to the front of `packet` and returns its length. With a checksum, `packet` must be
    /// exactly the GRE packet, because the checksum covers its payload.
    pub fn emit(&self, packet: &mut [u8]) -> Result<usize, BufferTooShort> {
        let (need, have) = (self.header_len(), packet.len());
        let out = packet.get_mut(..need).ok_or(BufferTooShort { need, have })?;
        let (header, mut options) = out.split_at_mut(HEADER_LEN);
        let header = header_mut::<HEADER_LEN>(header)?;
        put::<0, 2, HEADER_LEN>(header, self.flags().write());
        put::<2, 2, HEADER_LEN>(header, self.protocol.write());
        for word in [self.checksum.then_some(0), self.key, self.sequence].into_iter().flatten() {
            put::<0, 4, 4>(header_mut(options)?, word.write());
            options = options.get_mut(4..).unwrap_or_default();
        }
        if self.checksum {
            let checksum = checksum::sum(packet).checksum();
            put::<4, 2, 8>(header_mut(packet)?, checksum.write());
        }
        Ok(need)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_optional_fields_round_trip() {
        for bits in 0..8u32 {
            let header = Repr {
                protocol: EtherType::IPV4,
                checksum: bits & 1 != 0,
                key: (bits & 2 != 0).then_some(0x0102_0304),
                sequence: (bits & 4 != 0).then_some(0x0506_0708),
            };
            let mut out = [0xa5; 19];
            let len = header.emit(&mut out).unwrap();
            assert_eq!((len, out[len]), (4 + 4 * bits.count_ones() as usize, 0xa5));
            let view = View::new(&out).unwrap();
            assert_eq!((Repr::parse(&view), view.header_len()), (header, len));
            assert!(view.checksum_is_valid());
            out[18] ^= 1;
            assert_eq!(View::new(&out).unwrap().checksum_is_valid(), !header.checksum);
            assert_eq!(View::new(&out[..len - 1]).unwrap_err(), ParseError::GreTruncated);
            assert_eq!(header.emit(&mut out[..len - 1]), Err(BufferTooShort { need: len, have: len - 1 }));
        }
    }

    #[test]
    fn rfc2784_section_2_3() {
        // "A receiver MUST discard a packet where any of the bits 1-5 are non-zero"; K and S are RFC 2890's.
        for bit in [1, 4, 5, 13, 14, 15] {
            let [a, b] = (0x8000u16 >> bit).to_be_bytes();
            assert_eq!(View::new(&[a, b, 8, 0, 0, 0, 0, 0]).unwrap_err(), ParseError::GreBadFlags, "{bit}");
        }
        // "Bits 6-12 are reserved for future use. These bits [...] MUST be ignored on receipt."
        assert_eq!(View::new(&[0x03, 0xf8, 8, 0, 9]).unwrap().payload(), [9]);
    }

    #[test]
    fn rfc7637_section_3_2() {
        let mut out = [0xa5; 9];
        assert_eq!(Repr::nvgre(Vni::from_low_bits(0x01_0203), 4).emit(&mut out), Ok(8));
        assert_eq!(out, [0x20, 0, 0x65, 0x58, 1, 2, 3, 4, 0xa5]);
        assert_eq!(View::new(&out).unwrap().nvgre(), Some((Vni::from_low_bits(0x01_0203), 4)));
        out[0] = 0x30;
        assert_eq!(View::new(&[&out[..], &[0; 4]].concat()).unwrap().nvgre(), None);
    }
}
