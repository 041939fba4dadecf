//! ICMPv6 (RFC 4443). Neighbour discovery is in [`crate::ndp`].

use core::net::Ipv6Addr;

use crate::checksum::{self, Transport};
use crate::error::{BufferTooShort, ParseError};
use crate::field::{header_mut, put};

code! {
    /// ICMPv6 type (IANA "icmpv6-parameters").
    pub struct Type(u8) 1 {
        DESTINATION_UNREACHABLE = 1 "destination unreachable",
        PACKET_TOO_BIG = 2 "packet too big",
        TIME_EXCEEDED = 3 "time exceeded",
        PARAMETER_PROBLEM = 4 "parameter problem",
        ECHO_REQUEST = 128 "echo request",
        ECHO_REPLY = 129 "echo reply",
        ROUTER_SOLICITATION = 133 "router solicitation",
        ROUTER_ADVERTISEMENT = 134 "router advertisement",
        NEIGHBOR_SOLICITATION = 135 "neighbor solicitation",
        NEIGHBOR_ADVERTISEMENT = 136 "neighbor advertisement",
        REDIRECT = 137 "redirect",
    }
}

impl Type {
    /// True for error messages, which never cause another error (RFC 4443 section 2.4 (e.1)).
    pub const fn is_error(self) -> bool {
        self.0 < 128
    }
}

header! {
    /// The first four bytes, common to all ICMPv6 messages.
    4 bytes, short: Icmpv6Truncated {
        /// Message type.
        [0; 1] kind, set_kind: Type;
        /// Code within the type.
        [1; 1] code, set_code: u8;
        /// Checksum of pseudo header and message.
        [2; 2] checksum, set_checksum: u16;
    }
}

fn split(_: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    Ok((0, rest))
}

impl View<'_> {
    /// Returns the four bytes after the checksum (identifier and sequence number, MTU, ...), if the message
    /// has them.
    pub fn rest(&self) -> Option<u32> {
        self.payload.first_chunk().map(|b| u32::from_be_bytes(*b))
    }

    /// True if the checksum is right for these addresses.
    pub fn checksum_is_valid(&self, src: Ipv6Addr, dst: Ipv6Addr) -> bool {
        let len = (HEADER_LEN + self.payload.len()) as u32;
        let pseudo = checksum::pseudo6(src, dst, Transport::Icmpv6.protocol(), len);
        pseudo.and(checksum::sum(self.header)).and(checksum::sum(self.payload)).is_valid()
    }
}

/// The header of an ICMPv6 message as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Message type.
    pub kind: Type,
    /// Code within the type.
    pub code: u8,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { kind: view.kind(), code: view.code() }
    }

    /// Writes the header to the front of `message`, which must be the whole message. The checksum is that for
    /// these addresses.
    pub fn emit(&self, message: &mut [u8], src: Ipv6Addr, dst: Ipv6Addr) -> Result<usize, BufferTooShort> {
        put::<0, 4, HEADER_LEN>(header_mut(message)?, [self.kind.0, self.code, 0, 0]);
        checksum::icmpv6(src, dst, message);
        Ok(HEADER_LEN)
    }
}
