//! Numbers of the two file formats: draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.

use crate::packet::MAX_PACKET;

/// Longest frame that is read or written: what the framework carries, which is also the limit of libpcap (`MAXIMUM_SNAPLEN`).
pub const MAX_FRAME: usize = MAX_PACKET;

/// Ethernet, the only link type that ports have.
pub(super) const LINKTYPE_ETHERNET: u32 = 1;

/// pcap: timestamps in microseconds and in nanoseconds, and the length of the file header.
pub(super) const MAGIC_MICRO: u32 = 0xa1b2_c3d4;
pub(super) const MAGIC_NANO: u32 = 0xa1b2_3c4d;
pub(super) const PCAP_HEADER: usize = 24;
pub(super) const RECORD_HEADER: usize = 16;

/// pcapng: block types, and the byte-order magic of a section.
pub(super) const SECTION: u32 = 0x0a0d_0d0a;
pub(super) const BYTE_ORDER: u32 = 0x1a2b_3c4d;
pub(super) const INTERFACE: u32 = 1;
pub(super) const OLD_PACKET: u32 = 2;
pub(super) const SIMPLE_PACKET: u32 = 3;
pub(super) const ENHANCED_PACKET: u32 = 6;

/// Longest pcapng block; libpcap has the same limit.
pub(super) const MAX_BLOCK: u32 = 16 << 20;

/// Names of link types that captures often have, for the message that refuses them.
pub(super) fn link_type_name(link_type: u32) -> &'static str {
    match link_type {
        0 => "BSD loopback",
        LINKTYPE_ETHERNET => "Ethernet",
        6 => "token ring",
        9 => "PPP",
        101 | 12 | 14 => "raw IP",
        105 => "802.11",
        108 => "OpenBSD loopback",
        113 => "Linux cooked",
        127 => "802.11 with radiotap",
        147..=162 => "user-defined",
        189 => "USB",
        228 => "raw IPv4",
        229 => "raw IPv6",
        276 => "Linux cooked version 2",
        _ => "unnamed here",
    }
}

/// How a file is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The old format: one header, then records.
    Pcap,
    /// The new one: blocks, several interfaces.
    Pcapng,
}

/// Unit of the timestamps of a file that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Microseconds, which every tool reads.
    Micro,
    /// Nanoseconds.
    Nano,
}

/// Why a file cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refuses.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The file is not what it should be.
    #[error("at byte {offset}: {what}")]
    Malformed {
        /// Where the record or block starts.
        offset: u64,
        /// What was found and what would be right.
        what: String,
    },
    /// The file ends inside a record or block, as one does whose writer was killed. All frames before were read.
    #[error("at byte {offset}: the file ends inside a record")]
    CutOff {
        /// Where the record or block starts.
        offset: u64,
    },
}
