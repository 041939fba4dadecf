//! VXLAN-GPE (draft-ietf-nvo3-vxlan-gpe-13): VXLAN with a next protocol field.

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};
use crate::vxlan::Vni;

/// UDP destination port that IANA assigned.
pub const PORT: u16 = 4790;
/// Version bits; the version must be 0.
pub const FLAGS_VERSION: u8 = 0x30;
/// I flag: the VNI is valid.
pub const FLAG_VNI: u8 = 0x08;
/// P flag: the next protocol is valid.
pub const FLAG_NEXT: u8 = 0x04;
/// B flag: broadcast, unknown unicast or multicast.
pub const FLAG_BUM: u8 = 0x02;
/// O flag: an OAM packet.
pub const FLAG_OAM: u8 = 0x01;

code! {
    /// Protocol of the payload (section 3.2).
    pub struct NextProtocol(u8) 1 {
        IPV4 = 1 "IPv4",
        IPV6 = 2 "IPv6",
        ETHERNET = 3 "Ethernet",
        NSH = 4 "NSH",
        MPLS = 5 "MPLS",
    }
}

header! {
    /// A VXLAN-GPE header of version 0.
    8 bytes, short: VxlanGpeTruncated {
        /// Flags and version.
        [0; 1] flags, set_flags: u8;
        /// Protocol of the payload, valid if [`FLAG_NEXT`] is set.
        [3; 1] next_protocol, set_next_protocol: NextProtocol;
        /// VNI (24 bits, valid if [`FLAG_VNI`] is set) and reserved (8 bits, ignored).
        [4; 4] vni_word, set_vni_word: u32;
    }
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    if header[0] & FLAGS_VERSION != 0 {
        return Err(ParseError::VxlanGpeBadVersion);
    }
    Ok((0, rest))
}

impl View<'_> {
    /// Returns the VNI of the overlay segment, if its flag is set.
    pub fn vni(&self) -> Option<Vni> {
        (self.flags() & FLAG_VNI != 0).then(|| Vni::from_low_bits(self.vni_word() >> 8))
    }

    /// Returns the protocol of the payload, if its flag is set.
    pub fn next(&self) -> Option<NextProtocol> {
        (self.flags() & FLAG_NEXT != 0).then(|| self.next_protocol())
    }
}

/// A VXLAN-GPE header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// VNI of the overlay segment.
    pub vni: Option<Vni>,
    /// Protocol of the payload.
    pub next: Option<NextProtocol>,
    /// An OAM packet.
    pub oam: bool,
}

impl Repr {
    /// Returns the values of a view. Reserved bits and the B flag are dropped.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { vni: view.vni(), next: view.next(), oam: view.flags() & FLAG_OAM != 0 }
    }

    /// Writes the header to the front of `out`, and returns its length. Reserved bits are zero.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        let flag = |wanted, flag| if wanted { flag } else { 0 };
        let flags =
            flag(self.vni.is_some(), FLAG_VNI) | flag(self.next.is_some(), FLAG_NEXT) | flag(self.oam, FLAG_OAM);
        put::<0, 4, HEADER_LEN>(h, [flags, 0, 0, self.next.unwrap_or_default().0]);
        put::<4, 4, HEADER_LEN>(h, (self.vni.unwrap_or_default().get() << 8).write());
        Ok(HEADER_LEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draft_section_3_1() {
        let mut out = [0xa5; 9];
        let header = Repr { vni: Vni::new(42), next: Some(NextProtocol::ETHERNET), oam: false };
        assert_eq!(header.emit(&mut out), Ok(8));
        assert_eq!(out, [0x0c, 0, 0, 3, 0, 0, 42, 0, 0xa5]);
        assert_eq!(Repr::parse(&View::new(&out).unwrap()), header);
        // "If a receiver does not support the version indicated it MUST drop the packet."
        assert_eq!(View::new(&[0x1c, 0, 0, 3, 0, 0, 42, 0]).unwrap_err(), ParseError::VxlanGpeBadVersion);
        let none = View::new(&[0xc1, 9, 9, 3, 0, 0, 42, 9]).map(|view| Repr::parse(&view)).unwrap();
        assert_eq!(none, Repr { vni: None, next: None, oam: true });
        assert_eq!(none.emit(&mut out), Ok(8));
        assert_eq!(out[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    }
}
