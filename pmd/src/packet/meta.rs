use std::sync::atomic::AtomicU16;

use wirepath_wire::Parsed;

use super::offload::{Flags, Verdicts};

/// Bytes of the metadata line in front of every buffer.
pub(super) const META: usize = 64;
/// Free bytes between the metadata line and the data of a fresh packet: what encapsulation grows into.
pub const HEADROOM: usize = 256;
/// Data bytes of a buffer behind its headroom.
pub const DATA_ROOM: usize = 2048;
/// Distance of two buffers. Deliberately no power of two: with 2048 or 4096 the hot lines of all buffers fall into the same few
/// cache sets, which costs 15 to 23 cycles per packet; an odd multiple of 64 spreads them over all sets.
pub const STRIDE: usize = META + HEADROOM + DATA_ROOM;
const _: () = assert!(STRIDE == 2368 && (STRIDE / 64) % 2 == 1);

/// First offset at which data can start, and the end of a buffer; both from the buffer's first byte.
pub(super) const FIRST: usize = META;
pub(super) const FRESH: usize = META + HEADROOM;
pub(super) const END: usize = STRIDE;

/// "No next segment."
pub(super) const NO_SEGMENT: u32 = u32::MAX;

/// The metadata line. Its fields are private to `packet`, which keeps three things true:
/// `FIRST <= data_off`, `data_off + data_len <= END`, and `packet_len` is the sum over the chain (first segment only).
#[repr(C, align(64))]
pub(super) struct Meta {
    pub(super) data_off: u16,
    pub(super) data_len: u16,
    pub(super) packet_len: u32,
    /// Handle of the next segment ([`super::Handle`]) or `NO_SEGMENT`.
    pub(super) next: u32,
    pub(super) pool: u8,
    pub(super) verdicts: Verdicts,
    pub(super) flags: Flags,
    pub(super) in_port: u16,
    pub(super) out_port: u16,
    pub(super) rss_hash: u32,
    pub(super) mark: u32,
    pub(super) vlan_tci: u16,
    pub(super) mss: u16,
    pub(super) layers: Layers,
    /// References to a frozen segment; 0 in a private one.
    pub(super) references: AtomicU16,
    pub(super) timestamp: u64,
    pub(super) app: [u64; 2],
}
const _: () = assert!(size_of::<Meta>() == META);

/// Where the field of [`Meta`] at an offset lies in its line read by words: bits below it in that word.
pub(super) const fn shift(offset: usize, word: usize) -> u32 {
    assert!(cfg!(target_endian = "little") && offset / 8 == word);
    (offset % 8 * 8) as u32
}

/// Where the headers of a packet are: what a transmit offload needs to know, and what a parser found out.
///
/// Lengths rather than offsets: they stay true when an outer header is put in front or taken off. All zero means unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Layers {
    /// Bytes of the outer encapsulation up to the inner Ethernet header (UDP header and tunnel header included, outer L2 and L3
    /// too); 0 for a packet that is not encapsulated.
    pub outer_len: u8,
    /// Bytes of the outer Ethernet header with its VLAN tags, if there is an outer header.
    pub outer_l2_len: u8,
    /// Bytes of the (inner) Ethernet header with its VLAN tags.
    pub l2_len: u8,
    /// Bytes of the (inner) IP header with options or extension headers.
    pub l3_len: u8,
    /// Bytes of the (inner) TCP or UDP header.
    pub l4_len: u8,
    /// [`L3`] and [`L4`] of the packet (inner ones if encapsulated) in the low two and next two bits, the outer [`L3`] in the two
    /// above.
    kinds: u8,
}

/// Network layer of a packet as far as offloads care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum L3 {
    /// Not known, or not IP.
    Other = 0,
    /// IPv4.
    Ipv4 = 1,
    /// IPv6.
    Ipv6 = 2,
}

/// Transport layer of a packet as far as offloads care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum L4 {
    /// Not known, neither TCP nor UDP, or a fragment that has no transport header.
    Other = 0,
    /// TCP.
    Tcp = 1,
    /// UDP.
    Udp = 2,
}

impl L3 {
    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            1 => Self::Ipv4,
            2 => Self::Ipv6,
            _ => Self::Other,
        }
    }
}

impl Layers {
    /// Network layer of the (inner) packet.
    pub const fn l3(&self) -> L3 {
        L3::from_bits(self.kinds)
    }

    /// Transport layer of the (inner) packet.
    pub const fn l4(&self) -> L4 {
        match (self.kinds >> 2) & 3 {
            1 => L4::Tcp,
            2 => L4::Udp,
            _ => L4::Other,
        }
    }

    /// Network layer of the outer header.
    pub const fn outer_l3(&self) -> L3 {
        L3::from_bits(self.kinds >> 4)
    }

    /// The same lengths with these kinds.
    pub const fn with_kinds(mut self, l3: L3, l4: L4, outer_l3: L3) -> Self {
        self.kinds = l3 as u8 | (l4 as u8) << 2 | (outer_l3 as u8) << 4;
        self
    }
}

impl From<&Parsed> for Layers {
    /// What a parser found. All zero if a length is beyond what there is room for (chains of IPv6 extension headers).
    ///
    /// MPLS labels behind Ethernet count as part of it. A packet in a tunnel that is broken inside counts as not encapsulated.
    fn from(parsed: &Parsed) -> Self {
        Self::of(parsed).unwrap_or_default()
    }
}

impl Layers {
    fn of(parsed: &Parsed) -> Option<Self> {
        let length = |from: usize, to: usize| u8::try_from(to.checked_sub(from)?).ok();
        let kind = |layers: &wirepath_wire::Layers| match layers.l3_kind() {
            wirepath_wire::L3::Ipv4 => L3::Ipv4,
            wirepath_wire::L3::Ipv6 => L3::Ipv6,
            _ => L3::Other,
        };
        let (outer, own) = (parsed.outer(), parsed.innermost());
        let (l4, l4_len) = match own.l4_kind() {
            wirepath_wire::L4::Tcp => (L4::Tcp, length(own.l4(), own.payload())?),
            wirepath_wire::L4::Udp => (L4::Udp, length(own.l4(), own.payload())?),
            _ => (L4::Other, 0),
        };
        let mut layers = Self {
            outer_len: 0,
            outer_l2_len: 0,
            l2_len: length(own.l2(), own.l3())?,
            l3_len: length(own.l3(), own.l4())?,
            l4_len,
            kinds: 0,
        };
        let mut outer_l3 = L3::Other;
        if parsed.inner().is_some() {
            layers.outer_len = length(0, own.l2())?;
            layers.outer_l2_len = length(0, outer.l3())?;
            outer_l3 = kind(outer);
        }
        Some(layers.with_kinds(kind(own), l4, outer_l3))
    }
}

impl Meta {
    /// Metadata of a fresh, empty packet. The reset of the receive path: one line, written whole.
    #[inline(always)]
    pub(super) const fn fresh(pool: u8) -> Self {
        Self {
            data_off: FRESH as u16,
            data_len: 0,
            packet_len: 0,
            next: NO_SEGMENT,
            pool,
            verdicts: Verdicts::NONE,
            flags: Flags::NONE,
            in_port: 0,
            out_port: crate::port::NO_PORT,
            rss_hash: 0,
            mark: 0,
            vlan_tci: 0,
            mss: 0,
            layers: Layers { outer_len: 0, outer_l2_len: 0, l2_len: 0, l3_len: 0, l4_len: 0, kinds: 0 },
            references: AtomicU16::new(0),
            timestamp: 0,
            app: [0; 2],
        }
    }
}
