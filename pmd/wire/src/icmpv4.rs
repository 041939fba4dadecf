//! ICMP (RFC 792; next-hop MTU RFC 1191).

use crate::checksum;
use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};

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
    /// True for error messages, which never cause another error (RFC 1122 section 3.2.2).
    pub const fn is_error(self) -> bool {
        matches!(self.0, 3 | 4 | 5 | 11 | 12)
    }
}

/// Code of [`Type::DESTINATION_UNREACHABLE`]: the packet is too long and must not be fragmented.
pub const FRAGMENTATION_NEEDED: u8 = 4;

header! {
    /// The first eight bytes, common to all ICMP messages.
    8 bytes, short: Icmpv4Truncated {
        /// Message type.
        [0; 1] kind, set_kind: Type;
        /// Code within the type.
        [1; 1] code, set_code: u8;
        /// Checksum of the whole message.
        [2; 2] checksum, set_checksum: u16;
        /// Depends on the type: identifier and sequence number, or unused and next-hop MTU.
        [4; 4] rest, set_rest: u32;
    }
}

fn split(_: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    Ok((0, rest))
}

impl View<'_> {
    /// Returns the next-hop MTU of a "fragmentation needed" message (RFC 1191 section 4). Routers that do not
    /// support it send 0.
    pub fn next_hop_mtu(&self) -> u16 {
        self.rest() as u16
    }

    /// True if the checksum is right.
    pub fn checksum_is_valid(&self) -> bool {
        checksum::sum(self.header).and(checksum::sum(self.payload)).is_valid()
    }
}

/// The header of an ICMP message as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Message type.
    pub kind: Type,
    /// Code within the type.
    pub code: u8,
    /// The four bytes after the checksum.
    pub rest: u32,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { kind: view.kind(), code: view.code(), rest: view.rest() }
    }

    /// Writes the header with its checksum to the front of `message`, which must be the whole message.
    pub fn emit(&self, message: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(message)?;
        put::<0, 4, HEADER_LEN>(h, [self.kind.0, self.code, 0, 0]);
        put::<4, 4, HEADER_LEN>(h, self.rest.write());
        let checksum = checksum::sum(message).checksum();
        put::<2, 2, HEADER_LEN>(header_mut(message)?, checksum.write());
        Ok(HEADER_LEN)
    }
}
