//! VXLAN (RFC 7348).

use core::fmt;
use core::str::FromStr;

use crate::error::{NoRoom, ParseError};
use crate::field::{Field, put, room};

/// UDP destination port that IANA assigned (RFC 7348 section 5).
pub const PORT: u16 = 4789;
/// The I flag: the VNI is valid. RFC 7348 section 5: it MUST be set.
pub const FLAG_VNI: u8 = 0x08;

/// VXLAN network identifier, 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Vni(u32);

impl Vni {
    /// Largest value.
    pub const MAX: u32 = 0xff_ffff;

    /// `None` above 24 bits.
    pub const fn new(value: u32) -> Option<Vni> {
        if value > Vni::MAX { None } else { Some(Vni(value)) }
    }

    /// From the low 24 bits; the others are ignored.
    #[inline]
    pub const fn from_low_bits(value: u32) -> Vni {
        Vni(value & Vni::MAX)
    }

    /// As a number.
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

/// A number or text that is no VNI.
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
    /// A VXLAN header; the payload is the inner Ethernet frame. Headers without a valid VNI are refused.
    8 bytes, short: VxlanTruncated {
        /// Flags; all but [`FLAG_VNI`] are reserved and ignored.
        [0; 1] flags, set_flags: u8;
        /// VNI (24 bits) and reserved (8 bits, ignored).
        [4; 4] vni_word, set_vni_word: u32;
    }
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    if header[0] & FLAG_VNI == 0 {
        return Err(ParseError::VxlanBadFlags);
    }
    Ok((0, rest))
}

impl View<'_> {
    /// Which overlay segment the frame belongs to.
    #[inline]
    pub fn vni(&self) -> Vni {
        Vni(self.vni_word() >> 8)
    }
}

/// A VXLAN header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Which overlay segment the frame belongs to.
    pub vni: Vni,
}

impl Repr {
    /// The values of a view; reserved bits are left out.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { vni: view.vni() }
    }

    /// Writes the header to the front of `out`, reserved bits zero (RFC 7348 section 5), and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, NoRoom> {
        let h = room::<HEADER_LEN>(out)?;
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
