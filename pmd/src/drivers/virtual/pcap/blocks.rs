//! Blocks of pcapng files (draft-ietf-opsawg-pcapng), appended to a vector.
//!
//! Each function appends one whole block. The length of a block is a multiple of 4.

use super::format::{
    BYTE_ORDER, ENHANCED_PACKET, INTERFACE, INTERFACE_STATISTICS, LINKTYPE_ETHERNET, MAX_FRAME, Precision, SECTION,
};

/// Longest comment of a packet or of statistics in bytes. The rest of a longer one is left out.
pub const MAX_COMMENT: usize = 255;

/// Direction of a packet, for the option `epb_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketDirection {
    /// Not stated.
    Unknown,
    /// Received by the interface.
    Inbound,
    /// Sent by the interface.
    Outbound,
}

/// An interface description block.
#[derive(Clone, Copy, Debug)]
pub struct Interface<'a> {
    /// Name; only the first 255 bytes are written.
    pub name: &'a str,
    /// Description; only the first 255 bytes are written. If it is empty, the option is left out.
    pub description: &'a str,
    /// Maximum number of bytes of a packet that are stored.
    pub snap: u32,
    /// Unit of the timestamps.
    pub precision: Precision,
}

/// An enhanced packet block without the bytes of its packet.
#[derive(Clone, Copy, Debug)]
pub struct PacketBlock<'a> {
    /// Index of the interface in the section.
    pub interface: u32,
    /// Time since 1970 in units of the interface's precision.
    pub timestamp: u64,
    /// Bytes of the packet that are stored.
    pub captured: usize,
    /// Bytes of the packet.
    pub len: usize,
    /// Direction.
    pub direction: PacketDirection,
    /// Comment of at most [`MAX_COMMENT`] bytes; if it is empty, the option is left out.
    pub comment: &'a str,
}

/// An interface statistics block.
#[derive(Clone, Copy, Debug)]
pub struct InterfaceStatistics<'a> {
    /// Index of the interface in the section.
    pub interface: u32,
    /// Start and end of the capture: time since 1970 in units of the interface's precision.
    pub period: (u64, u64),
    /// Packets that passed the interface (`isb_ifrecv`).
    pub received: u64,
    /// Packets that were left out for lack of resources (`isb_ifdrop`).
    pub dropped: u64,
    /// Packets that are in the file (`isb_usrdeliv`).
    pub delivered: u64,
    /// Comment, as in [`PacketBlock::comment`].
    pub comment: &'a str,
}

/// Option codes.
const END: u32 = 0;
const COMMENT: u16 = 1;
const NAME: u16 = 2;
const DESCRIPTION: u16 = 3;
const PACKET_FLAGS: u16 = 2;
const USER_APPLICATION: u16 = 4;
const TIME_RESOLUTION: u16 = 9;
const START_TIME: u16 = 2;
const END_TIME: u16 = 3;
const RECEIVED: u16 = 4;
const DROPPED: u16 = 5;
const DELIVERED: u16 = 8;

/// Appends a section header block.
pub fn section(out: &mut Vec<u8>) {
    block(out, SECTION, |out| {
        // Version 1.0, section of unknown length.
        words(out, &[BYTE_ORDER, 1, u32::MAX, u32::MAX]);
        option(out, USER_APPLICATION, b"wirepath");
        words(out, &[END]);
    });
}

/// Appends an interface description block.
pub fn interface(out: &mut Vec<u8>, it: &Interface<'_>) {
    block(out, INTERFACE, |out| {
        words(out, &[LINKTYPE_ETHERNET, it.snap.min(MAX_FRAME as u32)]);
        text(out, NAME, it.name);
        text(out, DESCRIPTION, it.description);
        option(out, TIME_RESOLUTION, &[if it.precision == Precision::Nano { 9 } else { 6 }]);
        words(out, &[END]);
    });
}

/// Appends an enhanced packet block. `data` are at least the captured bytes, in parts.
pub fn packet<'d>(out: &mut Vec<u8>, it: &PacketBlock<'_>, data: impl Iterator<Item = &'d [u8]>) {
    block(out, ENHANCED_PACKET, |out| {
        let (high, low) = halves(it.timestamp);
        words(out, &[it.interface, high, low, it.captured as u32, it.len as u32]);
        bytes(out, data, it.captured);
        pad(out);
        let flags: u32 = match it.direction {
            PacketDirection::Unknown => 0,
            PacketDirection::Inbound => 1,
            PacketDirection::Outbound => 2,
        };
        text(out, COMMENT, it.comment);
        if flags != 0 {
            option(out, PACKET_FLAGS, &flags.to_le_bytes());
        }
        if flags != 0 || !it.comment.is_empty() {
            words(out, &[END]);
        }
    });
}

/// Appends an interface statistics block.
pub fn statistics(out: &mut Vec<u8>, it: &InterfaceStatistics<'_>) {
    block(out, INTERFACE_STATISTICS, |out| {
        let ((start_high, start_low), (high, low)) = (halves(it.period.0), halves(it.period.1));
        words(out, &[it.interface, high, low]);
        text(out, COMMENT, it.comment);
        let time = |high: u32, low: u32| (u64::from(low) << 32 | u64::from(high)).to_le_bytes();
        option(out, START_TIME, &time(start_high, start_low));
        option(out, END_TIME, &time(high, low));
        for (code, value) in [(RECEIVED, it.received), (DROPPED, it.dropped), (DELIVERED, it.delivered)] {
            option(out, code, &value.to_le_bytes());
        }
        words(out, &[END]);
    });
}

/// Appends 32-bit words.
pub(super) fn words(out: &mut Vec<u8>, words: &[u32]) {
    for word in words {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

/// Appends the first `captured` bytes of `data`.
pub(super) fn bytes<'d>(out: &mut Vec<u8>, data: impl Iterator<Item = &'d [u8]>, captured: usize) {
    let mut left = captured;
    for part in data {
        let n = part.len().min(left);
        out.extend_from_slice(&part[..n]);
        left -= n;
    }
    debug_assert_eq!(left, 0);
}

fn halves(timestamp: u64) -> (u32, u32) {
    ((timestamp >> 32) as u32, timestamp as u32)
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    words(out, &[u32::from(code) | (value.len() as u32) << 16]);
    out.extend_from_slice(value);
    pad(out);
}

/// Appends an option with a text, unless it is empty.
fn text(out: &mut Vec<u8>, code: u16, text: &str) {
    if !text.is_empty() {
        option(out, code, &text.as_bytes()[..text.floor_char_boundary(MAX_COMMENT)]);
    }
}

fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    // Blocks start at multiples of 4, also in the buffer: the length of every block is such a multiple.
    let start = out.len();
    words(out, &[kind, 0]);
    body(out);
    let length = (out.len() - start + 4) as u32;
    out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
    words(out, &[length]);
}
