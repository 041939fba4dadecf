//! VXLAN (RFC 7348).

use core::fmt;
use core::str::FromStr;

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};

/// UDP destination port that IANA assigned (RFC 7348 section 5).
pub const PORT: u16 = 4789;
/// I flag: the VNI is valid. RFC 7348 section 5: it MUST be set.
pub const FLAG_VNI: u8 = 0x08;

/// VXLAN network identifier, 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Vni(u32);

impl Vni {
    /// Largest value.
    pub const MAX: u32 = 0xff_ffff;

    /// Creates a VNI. `None` if the value has more than 24 bits.
    pub const fn new(value: u32) -> Option<Vni> {
        if value > Vni::MAX { None } else { Some(Vni(value)) }
    }

    /// Creates a VNI from the low 24 bits of a value. The high 8 bits are ignored.
    #[inline]
    pub const fn from_low_bits(value: u32) -> Vni {
        Vni(value & Vni::MAX)
    }

    /// Returns the VNI as a number.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl From<Vni> for u32 {
    fn from(vni: Vni) -> u32 {
        vni.0
    }
}

impl TryFrom<u32> for Vni {
    type Error = VniError;
    fn try_from(value: u32) -> Result<Vni, VniError> {
        Vni::new(value).ok_or(VniError)
    }
}

/// The number or text is not a VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VniError;

impl fmt::Display for VniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a VNI is a number from 0 to 16777215")
    }
}

impl core::error::Error for VniError {}

impl FromStr for Vni {
    type Err = VniError;
    fn from_str(text: &str) -> Result<Vni, VniError> {
        text.parse().ok().and_then(Vni::new).ok_or(VniError)
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vni({})", self.0)
    }
}

header! {
    /// A VXLAN header. The payload is the inner Ethernet frame. A header without the I flag is an error.
    8 bytes, short: VxlanTruncated {
        /// Flags; all but [`FLAG_VNI`] are reserved and ignored.
        [0; 1] flags, set_flags: u8;
        /// VNI (24 bits) and reserved (8 bits, ignored).
        [4; 4] vni_word, set_vni_word: u32;
    }
}

/// Refuses a header without the I flag. A VXLAN header has no options, so `rest` is payload.
fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    if header[0] & FLAG_VNI == 0 {
        return Err(ParseError::VxlanBadFlags);
    }
    Ok((0, rest))
}

impl View<'_> {
    /// Returns the VNI of the overlay segment.
    #[inline]
    pub fn vni(&self) -> Vni {
        Vni(self.vni_word() >> 8)
    }
}

/// A VXLAN header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// VNI of the overlay segment.
    pub vni: Vni,
}

impl Repr {
    /// Returns the values of a view. Reserved bits are dropped.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { vni: view.vni() }
    }

    /// Writes the header to the front of `out`, and returns its length. Reserved bits are zero (RFC 7348
    /// section 5).
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        put::<0, 4, HEADER_LEN>(h, [FLAG_VNI, 0, 0, 0]);
        put::<4, 4, HEADER_LEN>(h, (self.vni.0 << 8).write());
        Ok(HEADER_LEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vni_is_24_bits() {
        assert_eq!(Vni::new(0xff_ffff).map(Vni::get), Some(0xff_ffff));
        assert_eq!(Vni::new(0x100_0000), None);
        assert_eq!("16777216".parse::<Vni>(), Err(VniError));
        assert_eq!("42".parse::<Vni>(), Ok(Vni(42)));
    }

    #[test]
    fn rfc7348_section_5() {
        // "The I flag MUST be set to 1 for a valid VXLAN Network ID"
        assert_eq!(View::new(&[0xf7, 0, 0, 0, 0, 0, 1, 0]).unwrap_err(), ParseError::VxlanBadFlags);
        // "the other 7 bits are reserved fields and MUST be set to zero on transmission and ignored on receipt"
        let view = View::new(&[0xff, 1, 2, 3, 0, 0, 42, 0xee, 9]).unwrap();
        assert_eq!((view.vni(), view.payload()), (Vni(42), &[9][..]));
        let mut out = [0xa5; 9];
        assert_eq!(Repr::parse(&view).emit(&mut out), Ok(8));
        assert_eq!(out, [8, 0, 0, 0, 0, 0, 42, 0, 0xa5]);
    }
}
