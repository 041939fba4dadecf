//! VLAN tags: IEEE 802.1Q (TPID 0x8100) and 802.1ad (TPID 0x88a8).

use crate::error::{BufferTooShort, ParseError};
use crate::ethernet::EtherType;
use crate::field::{Field, header_mut, put};

/// Length of a tag, bytes.
pub const TAG_LEN: usize = 4;
/// Largest usable VLAN id. 0 means "priority only", 4095 is reserved (IEEE 802.1Q table 9-2).
pub const MAX_ID: u16 = 4094;

/// A VLAN tag: TPID and TCI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// [`EtherType::VLAN`] or [`EtherType::QINQ`].
    pub tpid: EtherType,
    /// Priority (3 bits), drop eligible (1 bit), VLAN id (12 bits).
    pub tci: u16,
}

impl Tag {
    /// Creates an 802.1Q tag with priority 0.
    pub const fn new(id: u16) -> Self {
        Tag { tpid: EtherType::VLAN, tci: id & 0xfff }
    }

    /// Returns the VLAN id, 0 to 4095.
    #[inline]
    pub const fn id(self) -> u16 {
        self.tci & 0xfff
    }

    /// Returns the priority code point, 0 to 7.
    pub const fn pcp(self) -> u8 {
        (self.tci >> 13) as u8
    }

    /// Returns the drop eligible indicator.
    pub const fn dei(self) -> bool {
        self.tci & 0x1000 != 0
    }

    /// Returns the four bytes of the tag, which lie between the source address and the EtherType.
    #[inline]
    pub const fn bytes(self) -> [u8; TAG_LEN] {
        let ([a, b], [c, d]) = (self.tpid.0.to_be_bytes(), self.tci.to_be_bytes());
        [a, b, c, d]
    }
}

header! {
    /// The bytes after the TPID: TCI and the EtherType of the next header. (The TPID is the EtherType of the
    /// header before.)
    4 bytes, short: VlanTruncated {
        /// Priority, drop eligible, VLAN id.
        [0; 2] tci, set_tci: u16;
        /// EtherType of the next header.
        [2; 2] ethertype, set_ethertype: EtherType;
    }
}

fn split(_: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    Ok((0, rest))
}

/// TCI and EtherType as values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Priority, drop eligible, VLAN id.
    pub tci: u16,
    /// EtherType of the next header.
    pub ethertype: EtherType,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { tci: view.tci(), ethertype: view.ethertype() }
    }

    /// Writes TCI and EtherType to the front of `out`, and returns their length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let header = header_mut::<HEADER_LEN>(out)?;
        put::<0, 2, HEADER_LEN>(header, self.tci.write());
        put::<2, 2, HEADER_LEN>(header, self.ethertype.write());
        Ok(HEADER_LEN)
    }
}

/// Inserts a tag into the frame that starts at byte `TAG_LEN` of `frame`. The addresses move to the front.
///
/// Returns false and changes nothing if there is no complete Ethernet header.
#[inline]
pub fn push(frame: &mut [u8], tag: Tag) -> bool {
    let Some(head) = frame.first_chunk_mut::<18>() else { return false };
    head.copy_within(4..16, 0);
    put::<12, 4, 18>(head, tag.bytes());
    true
}

/// Removes the outermost tag. The addresses move `TAG_LEN` bytes towards the end, and the frame then starts
/// there.
///
/// Returns `None` and changes nothing if the frame has no tag.
#[inline]
pub fn pop(frame: &mut [u8]) -> Option<Tag> {
    let head = frame.first_chunk_mut::<18>()?;
    let tpid = EtherType(crate::field::be16::<12, 18>(head));
    if !tpid.is_vlan() {
        return None;
    }
    let tci = crate::field::be16::<14, 18>(head);
    head.copy_within(0..12, 4);
    Some(Tag { tpid, tci })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn push_and_pop() {
        let mut frame = [0xa5u8; 24];
        crate::ethernet::Repr { dst: [1; 6].into(), src: [2; 6].into(), ethertype: EtherType::IPV4 }
            .emit(&mut frame[4..])
            .unwrap();
        let plain = frame;
        let tag = Tag { tpid: EtherType::QINQ, tci: 0xb00a };
        assert!(push(&mut frame, tag));
        assert_eq!(frame[..18], [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0x88, 0xa8, 0xb0, 0x0a, 8, 0]);
        assert_eq!((tag.id(), tag.pcp(), tag.dei()), (10, 5, true));
        assert_eq!(pop(&mut frame), Some(tag));
        assert_eq!(frame[4..], plain[4..]);
        assert_eq!(pop(&mut frame[4..]), None);
        assert!(!push(&mut frame[..17], tag));
    }
}
