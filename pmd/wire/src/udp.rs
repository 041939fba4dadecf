//! UDP (RFC 768).

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, put};

header! {
    /// A UDP header. The length field determines the end of the payload.
    8 bytes, short: UdpTruncated {
        /// Source port.
        [0; 2] src_port, set_src_port: u16;
        /// Destination port.
        [2; 2] dst_port, set_dst_port: u16;
        /// Length of header and payload, bytes.
        [4; 2] length, set_length: u16;
        /// Checksum; 0 means "no checksum". See [`crate::checksum::Transport`].
        [6; 2] checksum, set_checksum: u16;
    }
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    let payload = usize::from(crate::field::be16::<4, HEADER_LEN>(header)).checked_sub(HEADER_LEN);
    match payload {
        Some(payload) if payload <= rest => Ok((0, payload)),
        _ => Err(ParseError::UdpBadLength),
    }
}

/// A UDP header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Length of the payload, bytes; at most 65527.
    pub payload_len: u16,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { src_port: view.src_port(), dst_port: view.dst_port(), payload_len: view.payload.len() as u16 }
    }

    /// Writes the header with checksum zero to the front of `out`, and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        put::<0, 2, HEADER_LEN>(h, self.src_port.write());
        put::<2, 2, HEADER_LEN>(h, self.dst_port.write());
        put::<4, 2, HEADER_LEN>(h, self.payload_len.saturating_add(HEADER_LEN as u16).write());
        put::<6, 2, HEADER_LEN>(h, [0, 0]);
        Ok(HEADER_LEN)
    }
}
