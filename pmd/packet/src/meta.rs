#![deny(unsafe_code)]

use std::sync::atomic::AtomicU16;

use wirepath_wire::Parsed;

use super::PortId;
use super::offload::{ChecksumStatus, Flags};

/// Bytes of the metadata line at the start of every buffer.
pub(super) const META: usize = 64;
/// Free bytes between the metadata line and the data of an empty packet; encapsulation prepends headers
/// there.
pub const HEADROOM: usize = 256;
/// Bytes of a buffer behind its headroom.
pub const DATA_ROOM: usize = 2048;
/// Bytes of a buffer: metadata line, headroom and data room.
pub const BUFFER_BYTES: usize = META + HEADROOM + DATA_ROOM;
/// Bytes behind each buffer that AddressSanitizer protects, in its build only.
const RED_ZONE: usize = if cfg!(asan) { 128 } else { 0 };
/// Distance of two buffers in bytes, deliberately not a power of two.
///
/// With 2048 or 4096, the hot lines of all buffers map to the same few cache sets, which costs 15 to 23
/// cycles per packet. An odd multiple of 64 spreads them over all sets.
pub const STRIDE: usize = BUFFER_BYTES + RED_ZONE;
const _: () = assert!(BUFFER_BYTES == 2368 && (STRIDE / 64) % 2 == 1);

/// Smallest offset of data, default offset of data, and end of a buffer, in bytes from its start.
pub(super) const BUFFER_START: usize = META;
pub(super) const DATA_START: usize = META + HEADROOM;
pub(super) const BUFFER_END: usize = BUFFER_BYTES;

/// Value of `next` in the last segment.
pub(super) const NO_SEGMENT: u32 = u32::MAX;

/// Metadata line of a buffer.
///
/// Its fields are private to this crate, which guarantees three things:
/// - `BUFFER_START <= data_off`
/// - `data_off + data_len <= BUFFER_END`
/// - `packet_len` of the first segment is the sum over the chain
#[repr(C, align(64))]
pub(super) struct Meta {
    pub(super) data_off: u16,
    pub(super) data_len: u16,
    pub(super) packet_len: u32,
    /// Packed [`super::Handle`] of the next segment, or `NO_SEGMENT`.
    pub(super) next: u32,
    pub(super) pool: u8,
    pub(super) checksum_status: ChecksumStatus,
    pub(super) flags: Flags,
    pub(super) in_port: Option<PortId>,
    pub(super) out_port: Option<PortId>,
    pub(super) rss_hash: u32,
    pub(super) mark: u32,
    pub(super) vlan_tci: u16,
    pub(super) mss: u16,
    pub(super) header_lengths: HeaderLengths,
    /// Number of references to a shared segment; 0 in a private one.
    pub(super) references: AtomicU16,
    pub(super) timestamp: u64,
    pub(super) app: [u64; 2],
}
const _: () = assert!(size_of::<Meta>() == META);

/// Bit position of the [`Meta`] field at `offset` in word `word` of the metadata line.
pub(super) const fn shift(offset: usize, word: usize) -> u32 {
    assert!(cfg!(target_endian = "little") && offset / 8 == word);
    (offset % 8 * 8) as u32
}

/// Header lengths of a packet, for transmit offloads. A parser fills them in.
///
/// Lengths stay valid when an outer header is prepended or removed; offsets would not. All zero: unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HeaderLengths {
    /// Bytes of the outer encapsulation up to the inner Ethernet header: outer L2, L3, UDP and tunnel header.
    /// 0 in a packet that is not encapsulated.
    pub outer_len: u8,
    /// Bytes of the outer Ethernet header with its VLAN tags, if there is an outer header.
    pub outer_l2_len: u8,
    /// Bytes of the (inner) Ethernet header with its VLAN tags.
    pub l2_len: u8,
    /// Bytes of the (inner) IP header with options or extension headers.
    pub l3_len: u8,
    /// Bytes of the (inner) TCP or UDP header.
    pub l4_len: u8,
    /// Packet types, those of the inner headers if encapsulated. Bits 0 and 1: [`PtypeL3`]; bits 2 and 3:
    /// [`PtypeL4`]; bits 4 and 5: outer [`PtypeL3`].
    kinds: u8,
}

/// Network layer of a packet, as far as offloads need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PtypeL3 {
    /// Unknown, or not IP.
    Other = 0,
    /// IPv4.
    Ipv4 = 1,
    /// IPv6.
    Ipv6 = 2,
}

/// Transport layer of a packet, as far as offloads need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PtypeL4 {
    /// Unknown, neither TCP nor UDP, or a fragment without transport header.
    Other = 0,
    /// TCP.
    Tcp = 1,
    /// UDP.
    Udp = 2,
}

impl PtypeL3 {
    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            1 => Self::Ipv4,
            2 => Self::Ipv6,
            _ => Self::Other,
        }
    }
}

impl HeaderLengths {
    /// Network layer of the (inner) packet.
    pub const fn l3(&self) -> PtypeL3 {
        PtypeL3::from_bits(self.kinds)
    }

    /// Transport layer of the (inner) packet.
    pub const fn l4(&self) -> PtypeL4 {
        match (self.kinds >> 2) & 3 {
            1 => PtypeL4::Tcp,
            2 => PtypeL4::Udp,
            _ => PtypeL4::Other,
        }
    }

    /// Network layer of the outer header.
    pub const fn outer_l3(&self) -> PtypeL3 {
        PtypeL3::from_bits(self.kinds >> 4)
    }

    /// Returns the same lengths with these packet types.
    pub const fn with_types(mut self, l3: PtypeL3, l4: PtypeL4, outer_l3: PtypeL3) -> Self {
        self.kinds = l3 as u8 | (l4 as u8) << 2 | (outer_l3 as u8) << 4;
        self
    }
}

impl From<&Parsed> for HeaderLengths {
    /// Converts the offsets of a parser. All zero if a length exceeds 255 bytes, as with long chains of IPv6
    /// extension headers.
    ///
    /// MPLS labels behind the Ethernet header count as part of it. A tunnel packet whose inner headers are
    /// malformed counts as not encapsulated.
    fn from(parsed: &Parsed) -> Self {
        Self::of(parsed).unwrap_or_default()
    }
}

impl HeaderLengths {
    fn of(parsed: &Parsed) -> Option<Self> {
        let length = |from: usize, to: usize| u8::try_from(to.checked_sub(from)?).ok();
        let kind = |layers: &wirepath_wire::HeaderOffsets| match layers.l3_type() {
            wirepath_wire::L3Type::Ipv4 => PtypeL3::Ipv4,
            wirepath_wire::L3Type::Ipv6 => PtypeL3::Ipv6,
            _ => PtypeL3::Other,
        };
        let (outer, own) = (parsed.outer(), parsed.innermost());
        let (l4, l4_len) = match own.l4_type() {
            wirepath_wire::L4Type::Tcp => (PtypeL4::Tcp, length(own.l4(), own.payload())?),
            wirepath_wire::L4Type::Udp => (PtypeL4::Udp, length(own.l4(), own.payload())?),
            _ => (PtypeL4::Other, 0),
        };
        let mut layers = Self {
            outer_len: 0,
            outer_l2_len: 0,
            l2_len: length(own.l2(), own.l3())?,
            l3_len: length(own.l3(), own.l4())?,
            l4_len,
            kinds: 0,
        };
        let mut outer_l3 = PtypeL3::Other;
        if parsed.inner().is_some() {
            layers.outer_len = length(0, own.l2())?;
            layers.outer_l2_len = length(0, outer.l3())?;
            outer_l3 = kind(outer);
        }
        Some(layers.with_types(kind(own), l4, outer_l3))
    }
}

impl Meta {
    /// Sets the output port of a packet whose bytes change, so that its checksum status is unknown.
    #[inline(always)]
    pub(super) fn redirect(&mut self, port: PortId) {
        self.out_port = Some(port);
        self.checksum_status = ChecksumStatus::NONE;
    }

    /// Metadata of an empty packet. The receive path writes it as one whole line.
    #[inline(always)]
    pub(super) const fn empty(pool: u8) -> Self {
        Self {
            data_off: DATA_START as u16,
            data_len: 0,
            packet_len: 0,
            next: NO_SEGMENT,
            pool,
            checksum_status: ChecksumStatus::NONE,
            flags: Flags::NONE,
            in_port: None,
            out_port: None,
            rss_hash: 0,
            mark: 0,
            vlan_tci: 0,
            mss: 0,
            header_lengths: HeaderLengths { outer_len: 0, outer_l2_len: 0, l2_len: 0, l3_len: 0, l4_len: 0, kinds: 0 },
            references: AtomicU16::new(0),
            timestamp: 0,
            app: [0; 2],
        }
    }
}
