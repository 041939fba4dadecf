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

/// Option "maximum segment size" (RFC 9293 section 3.7.1).
const OPTION_MSS: u8 = 2;

/// Lowers the option "maximum segment size" to `most` in a segment that begins a connection. `segment` begins with the
/// TCP header and has all its options; the payload may lie elsewhere. If `update_checksum` is true, the checksum is
/// updated (RFC 1624). Returns whether the segment was changed.
///
/// Segments without the option stay as they are: their sender takes what every host takes.
pub fn lower_mss(segment: &mut [u8], most: u16, update_checksum: bool) -> bool {
    let Some(header) = segment.first_chunk::<HEADER_LEN>() else { return false };
    if header[13] & flags::SYN == 0 {
        return false;
    }
    let end = usize::from(header[12] >> 4) * 4;
    let mut at = HEADER_LEN;
    loop {
        let option = segment.get(at..end).and_then(|rest| Some((*rest.first()?, rest)));
        let (value, odd) = match option {
            Some((1, _)) => {
                at += 1;
                continue;
            }
            Some((OPTION_MSS, [_, 4, high, low, ..])) => (u16::from_be_bytes([*high, *low]), at % 2 == 1),
            Some((kind, [_, len @ 2..=255, ..])) if kind > 1 && kind != OPTION_MSS => {
                at += usize::from(*len);
                continue;
            }
            // The end of the list, or a broken one.
            _ => return false,
        };
        if value <= most {
            return false;
        }
        if let Some(field) = segment.get_mut(at + 2..at + 4) {
            field.copy_from_slice(&most.to_be_bytes());
        }
        if update_checksum && let Some(field) = segment.get_mut(16..18) {
            // At an odd offset, both bytes belong to other words, which swaps them in the sum (RFC 1071 section 2).
            let word = |value: u16| if odd { value.swap_bytes() } else { value };
            let sum = u16::from_be_bytes([field[0], field[1]]);
            field.copy_from_slice(&crate::checksum::update(sum, word(value), word(most)).to_be_bytes());
        }
        return true;
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

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn the_mss_is_lowered_and_the_checksum_stays_right() {
        let segment = |flags: u8, options: &[u8]| {
            let mut bytes = vec![0x12, 0x34, 0, 80, 1, 2, 3, 4, 0, 0, 0, 0, (5 + options.len() as u8 / 4) << 4, flags];
            bytes.extend([0xff, 0xff, 0, 0, 0, 0]);
            bytes.extend(options);
            bytes.extend(b"payload");
            let sum = crate::checksum::sum(&bytes).checksum();
            bytes[16..18].copy_from_slice(&sum.to_be_bytes());
            bytes
        };
        // The option first, behind others, and at an odd offset.
        for options in
            [&[2, 4, 5, 180][..], &[1, 1, 4, 2, 2, 4, 5, 180], &[1, 2, 4, 5, 180, 1, 1, 0], &[3, 3, 7, 2, 4, 5, 180, 0]]
        {
            for flags in [flags::SYN, flags::SYN | flags::ACK] {
                for most in [0, 88, 1360, 1459] {
                    let before = segment(flags, options);
                    let mut bytes = before.clone();
                    assert!(lower_mss(&mut bytes, most, true));
                    assert!(crate::checksum::sum(&bytes).is_valid(), "{options:?} {most}");
                    let at = 20 + options.windows(2).position(|it| it == [2, 4]).unwrap() + 2;
                    assert_eq!(bytes[at..at + 2], most.to_be_bytes());
                    bytes[at..at + 2].copy_from_slice(&before[at..at + 2]);
                    bytes[16..18].copy_from_slice(&before[16..18]);
                    assert_eq!(bytes, before);
                }
                for most in [1460, u16::MAX] {
                    assert!(!lower_mss(&mut segment(flags, options), most, true));
                }
            }
            assert!(!lower_mss(&mut segment(flags::ACK, options), 100, true));
        }
        for broken in
            [&[2, 3, 5, 180][..], &[2, 0, 0, 0], &[9, 0, 2, 4], &[9, 200, 2, 4], &[0, 2, 4, 5], &[1, 1, 2, 4], &[]]
        {
            assert!(!lower_mss(&mut segment(flags::SYN, broken), 100, true), "{broken:?}");
        }
        let whole = segment(flags::SYN, &[2, 4, 5, 180]);
        for cut in 0..24 {
            assert!(!lower_mss(&mut whole[..cut].to_vec(), 100, true), "{cut}");
        }
        // A header length without options, or beyond the segment.
        for length in [0, 4, 5, 15] {
            let mut bytes = segment(flags::SYN, &[2, 4, 5, 180]);
            bytes[12] = length << 4;
            lower_mss(&mut bytes, 100, true);
        }
    }
}
