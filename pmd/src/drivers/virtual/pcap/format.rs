//! Constants of the two file formats: draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.

use wirepath_packet::MAX_PACKET;

/// Length of the longest frame: the maximum of a packet, which equals that of libpcap (`MAXIMUM_SNAPLEN`).
pub const MAX_FRAME: usize = MAX_PACKET;

/// Ethernet, the only supported link type.
pub(super) const LINKTYPE_ETHERNET: u32 = 1;

/// pcap: magic numbers for microseconds and nanoseconds, and the lengths of the file and record headers.
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
pub(super) const INTERFACE_STATISTICS: u32 = 5;
pub(super) const ENHANCED_PACKET: u32 = 6;

/// Length of the longest pcapng block, as in libpcap.
pub(super) const MAX_BLOCK: u32 = 16 << 20;

/// Returns the name of a common link type, for error messages.
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

/// File format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The classic format: one header, then records.
    Pcap,
    /// The next-generation format: blocks, several interfaces.
    Pcapng,
}

/// Unit of the timestamps in a written file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Microseconds, which every tool supports.
    Micro,
    /// Nanoseconds.
    Nano,
}

/// Failure to read a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The file violates its format.
    #[error("at byte {offset}: {what}")]
    Malformed {
        /// Offset of the record or block.
        offset: u64,
        /// Value that was found, and what was expected.
        what: String,
    },
    /// The file ends inside a record or block, as after its writer was killed. All earlier frames were read.
    #[error("at byte {offset}: the file ends inside a record")]
    Truncated {
        /// Offset of the record or block.
        offset: u64,
    },
}
