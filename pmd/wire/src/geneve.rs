//! GENEVE (RFC 8926).

use crate::error::{BufferTooShort, ParseError};
use crate::ethernet::EtherType;
use crate::field::{Field, header_mut, put};
use crate::vxlan::Vni;

/// UDP destination port that IANA assigned (RFC 8926 section 3.3).
pub const PORT: u16 = 6081;
/// Maximum length of the options, bytes: 63 words.
pub const MAX_OPTIONS_LEN: usize = 252;
/// O flag of [`View::flags`]: a control packet.
pub const FLAG_CONTROL: u8 = 0x80;
/// C flag of [`View::flags`]: critical options are present.
pub const FLAG_CRITICAL: u8 = 0x40;

header! {
    /// A GENEVE header of version 0 with its options. All options must lie within it.
    8 bytes, short: GeneveTruncated {
        /// Version (2 bits) and length of the options (6 bits, words).
        [0; 1] version_len, set_version_len: u8;
        /// [`FLAG_CONTROL`], [`FLAG_CRITICAL`], six reserved bits.
        [1; 1] flags, set_flags: u8;
        /// EtherType of the payload.
        [2; 2] protocol, set_protocol: EtherType;
        /// VNI (24 bits) and reserved (8 bits, ignored).
        [4; 4] vni_word, set_vni_word: u32;
    }
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    if header[0] >> 6 != 0 {
        return Err(ParseError::GeneveBadVersion);
    }
    let options = usize::from(header[0] & 0x3f) * 4;
    match rest.checked_sub(options) {
        Some(payload) => Ok((options, payload)),
        None => Err(ParseError::GeneveTruncated),
    }
}

impl<'a> View<'a> {
    /// Returns the VNI of the overlay segment.
    pub fn vni(&self) -> Vni {
        Vni::from_low_bits(self.vni_word() >> 8)
    }

    /// Returns the options.
    pub fn options(&self) -> Options<'a> {
        Options { rest: self.options }
    }
}

/// An option (RFC 8926 section 3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionTlv<'a> {
    /// Namespace of the type.
    pub class: u16,
    /// Type within the class. The highest bit marks a critical option.
    pub kind: u8,
    /// Value, a multiple of 4 bytes.
    pub value: &'a [u8],
}

/// Length of the fixed part of an option, bytes.
pub const OPTION_HEADER_LEN: usize = 4;

impl OptionTlv<'_> {
    /// Writes the option to the front of `out` and returns its length. At most 124 bytes of the value are
    /// written, padded with zeros to whole words.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let value = self.value.get(..124).unwrap_or(self.value);
        let words = value.len().div_ceil(4);
        let (need, have) = (OPTION_HEADER_LEN + words * 4, out.len());
        let out = out.get_mut(..need).ok_or(BufferTooShort { need, have })?;
        let [a, b] = self.class.to_be_bytes();
        let (header, rest) = out.split_at_mut(OPTION_HEADER_LEN);
        header.copy_from_slice(&[a, b, self.kind, words as u8]);
        let (room, padding) = rest.split_at_mut(value.len());
        room.copy_from_slice(value);
        padding.fill(0);
        Ok(need)
    }
}

/// Iterator over the options of a header. An option that exceeds the header gives an error, which is the last
/// item.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Options<'a> {
    /// Iterates over the options that fill `bytes`.
    pub fn of(bytes: &'a [u8]) -> Options<'a> {
        Options { rest: bytes }
    }

    /// Returns the bytes that are not consumed yet.
    pub fn bytes(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<OptionTlv<'a>, ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let parts = self.rest.split_first_chunk::<OPTION_HEADER_LEN>();
        let parts = parts.and_then(|(h, rest)| Some((h, rest.split_at_checked(usize::from(h[3] & 0x1f) * 4)?)));
        let Some((&[a, b, kind, _], (value, rest))) = parts else {
            self.rest = &[];
            return Some(Err(ParseError::GeneveBadOption));
        };
        self.rest = rest;
        Some(Ok(OptionTlv { class: u16::from_be_bytes([a, b]), kind, value }))
    }
}

/// A GENEVE header as a value. Its options follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// VNI of the overlay segment.
    pub vni: Vni,
    /// EtherType of the payload.
    pub protocol: EtherType,
    /// Length of the options after this header, bytes: a multiple of 4, at most [`MAX_OPTIONS_LEN`].
    pub options_len: u8,
    /// A control packet.
    pub control: bool,
    /// Critical options are present.
    pub critical: bool,
}

impl Repr {
    /// Returns the values of a view. Reserved bits are dropped.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr {
            vni: view.vni(),
            protocol: view.protocol(),
            options_len: view.options.len() as u8,
            control: view.flags() & FLAG_CONTROL != 0,
            critical: view.flags() & FLAG_CRITICAL != 0,
        }
    }

    /// Writes the header without its options to the front of `out`, and returns its length. Reserved bits are
    /// zero (RFC 8926 section 3.4).
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        let flag = |wanted, flag| if wanted { flag } else { 0 };
        let flags = flag(self.control, FLAG_CONTROL) | flag(self.critical, FLAG_CRITICAL);
        put::<0, 2, HEADER_LEN>(h, [self.options_len / 4, flags]);
        put::<2, 2, HEADER_LEN>(h, self.protocol.write());
        put::<4, 4, HEADER_LEN>(h, (self.vni.get() << 8).write());
        Ok(HEADER_LEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc8926_figure_4() {
        let header = Repr {
            vni: Vni::from_low_bits(0x01_0203),
            protocol: EtherType::TRANSPARENT_ETHERNET,
            options_len: 12,
            control: false,
            critical: true,
        };
        let mut out = [0xa5; 21];
        assert_eq!(header.emit(&mut out), Ok(8));
        assert_eq!(out[..9], [3, 0x40, 0x65, 0x58, 1, 2, 3, 0, 0xa5]);
        let first = OptionTlv { class: 0x0102, kind: 0x83, value: &[7, 8, 9, 0] };
        let second = OptionTlv { class: 0xffff, kind: 1, value: &[] };
        assert_eq!(OptionTlv { value: &[7, 8, 9], ..first }.emit(&mut out[8..]), Ok(8));
        assert_eq!(second.emit(&mut out[16..]), Ok(4));
        let view = View::new(&out).unwrap();
        assert_eq!((Repr::parse(&view), view.header_len(), view.payload()), (header, 20, &[0xa5][..]));
        assert!(view.options().eq([Ok(first), Ok(second)]));
        assert_eq!(View::new(&out[..19]).unwrap_err(), ParseError::GeneveTruncated);
    }

    #[test]
    fn invalid_options_are_refused() {
        assert_eq!(View::new(&[0x40, 0, 0, 0, 0, 0, 0, 0]).unwrap_err(), ParseError::GeneveBadVersion);
        assert_eq!(Options::of(&[0, 1, 2]).last(), Some(Err(ParseError::GeneveBadOption)));
        let mut options = Options::of(&[0, 1, 2, 0, 0, 1, 2, 0xe1]);
        assert!(options.next().is_some_and(|o| o.is_ok()));
        assert_eq!(options.next(), Some(Err(ParseError::GeneveBadOption)));
        assert_eq!(options.next(), None);
        let long = OptionTlv { class: 0, kind: 0, value: &[0; 200] };
        assert_eq!(long.emit(&mut [0; 200]), Ok(128));
        assert_eq!(long.emit(&mut [0; 127]), Err(BufferTooShort { need: 128, have: 127 }));
    }
}
