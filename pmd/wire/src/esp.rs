//! ESP (RFC 4303): the part of the header that is not encrypted.

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};

header! {
    /// The unencrypted start of an ESP packet (RFC 4303 section 2). Everything after it is encrypted,
    /// including the pad length.
    8 bytes, short: EspTruncated {
        /// Security parameters index; 1 to 255 are reserved (RFC 4303 section 2.1).
        [0; 4] spi, set_spi: u32;
        /// Sequence number; the low half if it has 64 bits (RFC 4303 section 2.2.1).
        [4; 4] sequence, set_sequence: u32;
    }
}

fn split(_: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    Ok((0, rest))
}

/// The header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Security parameters index.
    pub spi: u32,
    /// Sequence number.
    pub sequence: u32,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { spi: view.spi(), sequence: view.sequence() }
    }

    /// Writes the header to the front of `out` and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        put::<0, 4, HEADER_LEN>(h, self.spi.write());
        put::<4, 4, HEADER_LEN>(h, self.sequence.write());
        Ok(HEADER_LEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc4303_figure_1() {
        let mut out = [0xa5; 9];
        let header = Repr { spi: 0x0102_0304, sequence: 0x0506_0708 };
        assert_eq!(header.emit(&mut out), Ok(8));
        assert_eq!(out, [1, 2, 3, 4, 5, 6, 7, 8, 0xa5]);
        let view = View::new(&out).unwrap();
        assert_eq!((Repr::parse(&view), view.payload()), (header, &[0xa5][..]));
        assert_eq!(View::new(&out[..7]).unwrap_err(), ParseError::EspTruncated);
    }
}
