//! TCP (RFC 9293).

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, header_mut, next_option, put};

/// Flags, the low byte of [`View::offset_flags`].
pub mod flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset.
    pub const RST: u8 = 0x04;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgment number is valid.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer is valid.
    pub const URG: u8 = 0x20;
    /// ECN echo (RFC 3168).
    pub const ECE: u8 = 0x40;
    /// Congestion window reduced (RFC 3168).
    pub const CWR: u8 = 0x80;
}

/// Maximum length of a header with options, bytes.
pub const MAX_HEADER_LEN: usize = 60;

header! {
    /// A TCP header with its options.
    20 bytes, short: TcpTruncated {
        /// Source port.
        [0; 2] src_port, set_src_port: u16;
        /// Destination port.
        [2; 2] dst_port, set_dst_port: u16;
        /// Sequence number.
        [4; 4] seq, set_seq: u32;
        /// Acknowledgment number.
        [8; 4] ack, set_ack: u32;
        /// Data offset in words (4 bits), reserved (4 bits), [`flags`] (8 bits).
        [12; 2] offset_flags, set_offset_flags: u16;
        /// Window.
        [14; 2] window, set_window: u16;
        /// Checksum. See [`crate::checksum::Transport`].
        [16; 2] checksum, set_checksum: u16;
        /// Urgent pointer.
        [18; 2] urgent, set_urgent: u16;
    }
}

fn split(header: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    let options = (usize::from(header[12] >> 4) * 4).checked_sub(HEADER_LEN).ok_or(ParseError::TcpBadOffset)?;
    match rest.checked_sub(options) {
        Some(payload) => Ok((options, payload)),
        None => Err(ParseError::TcpTruncated),
    }
}

impl<'a> View<'a> {
    /// Returns the [`flags`].
    pub fn flags(&self) -> u8 {
        self.offset_flags() as u8
    }

    /// Iterates over the options: kind and value.
    pub fn options(&self) -> Options<'a> {
        Options { rest: self.options }
    }
}

impl ViewMut<'_> {
    /// Replaces the [`flags`].
    pub fn set_flags(&mut self, value: u8) {
        self.header[13] = value;
    }
}

/// Iterator over the options of a TCP header (RFC 9293 section 3.2), without padding. An error is the last
/// item.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Options<'a> {
    type Item = Result<(u8, &'a [u8]), ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        next_option(&mut self.rest, ParseError::TcpBadOption)
    }
}

/// A TCP header without options as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgment number.
    pub ack: u32,
    /// The [`flags`].
    pub flags: u8,
    /// Window.
    pub window: u16,
    /// Urgent pointer.
    pub urgent: u16,
}

impl Repr {
    /// Returns the values of a view, without its options.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr {
            src_port: view.src_port(),
            dst_port: view.dst_port(),
            seq: view.seq(),
            ack: view.ack(),
            flags: view.flags(),
            window: view.window(),
            urgent: view.urgent(),
        }
    }

    /// Writes the header with checksum zero to the front of `out`, and returns its length.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let h = header_mut::<HEADER_LEN>(out)?;
        put::<0, 2, HEADER_LEN>(h, self.src_port.write());
        put::<2, 2, HEADER_LEN>(h, self.dst_port.write());
        put::<4, 4, HEADER_LEN>(h, self.seq.write());
        put::<8, 4, HEADER_LEN>(h, self.ack.write());
        put::<12, 2, HEADER_LEN>(h, [0x50, self.flags]);
        put::<14, 2, HEADER_LEN>(h, self.window.write());
        put::<16, 2, HEADER_LEN>(h, [0, 0]);
        put::<18, 2, HEADER_LEN>(h, self.urgent.write());
        Ok(HEADER_LEN)
    }
}
