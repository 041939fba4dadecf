//! ICMP (RFC 792; next-hop MTU RFC 1191).

use crate::checksum;
use crate::error::{NoRoom, ParseError};
use crate::field::{Field, put, room};

code! {
    /// ICMP type (IANA "icmp-parameters").
    pub struct Type(u8) 1 {
        ECHO_REPLY = 0 "echo reply",
        DESTINATION_UNREACHABLE = 3 "destination unreachable",
        REDIRECT = 5 "redirect",
        ECHO_REQUEST = 8 "echo request",
        TIME_EXCEEDED = 11 "time exceeded",
        PARAMETER_PROBLEM = 12 "parameter problem",
    }
}

impl Type {
    /// Whether messages of this type report an error: none is sent in answer to one (RFC 1122 section 3.2.2).
    pub const fn is_error(self) -> bool {
        matches!(self.0, 3 | 4 | 5 | 11 | 12)
    }
}

/// Code of [`Type::DESTINATION_UNREACHABLE`]: the packet must not be fragmented and is too long.
pub const FRAGMENTATION_NEEDED: u8 = 4;

header! {
    /// The first eight bytes, which all ICMP messages have.
    8 bytes, short: Icmpv4Truncated {
        /// What the message is.
        [0; 1] kind, set_kind: Type;
        /// Which of its kind.
        [1; 1] code, set_code: u8;
        /// Checksum of the whole message.
        [2; 2] checksum, set_checksum: u16;
        /// Means what the type says: identifier and sequence number, or unused and next-hop MTU.
        [4; 4] rest, set_rest: u32;
    }
}

fn split(_: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    Ok((0, rest))
}

impl View<'_> {
    /// Identifier of an echo message.
    pub fn echo_ident(&self) -> u16 {
        (self.rest() >> 16) as u16
    }

    /// Sequence number of an echo message.
    pub fn echo_sequence(&self) -> u16 {
        self.rest() as u16
    }

    /// Next-hop MTU of a "fragmentation needed" message (RFC 1191 section 4); 0 from routers that do not say.
    pub fn next_hop_mtu(&self) -> u16 {
        self.rest() as u16
    }

    /// Whether the checksum is right.
    pub fn checksum_is_valid(&self) -> bool {
        checksum::sum(self.header).and(checksum::sum(self.payload)).is_valid()
    }
}

/// The header of an ICMP message as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// What the message is.
    pub kind: Type,
    /// Which of its kind.
    pub code: u8,
    /// The four bytes behind the checksum.
    pub rest: u32,
}

impl Repr {
    /// The values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { kind: view.kind(), code: view.code(), rest: view.rest() }
    }

    /// Writes the header to the front of `message`, all of which is the message, with the checksum of it all.
    pub fn emit(&self, message: &mut [u8]) -> Result<usize, NoRoom> {
        let h = room::<HEADER_LEN>(message)?;
        put::<0, 4, HEADER_LEN>(h, [self.kind.0, self.code, 0, 0]);
        put::<4, 4, HEADER_LEN>(h, self.rest.write());
        let checksum = checksum::sum(message).checksum();
        put::<2, 2, HEADER_LEN>(room(message)?, checksum.write());
        Ok(HEADER_LEN)
    }
}
