//! Where the headers of one stack lie, as three words.

use core::fmt;
use core::ops::Range;

use crate::ethernet::{self, EtherType};
use crate::ip::IpProtocol;
use crate::vlan::{self, Tag};
use crate::{arp, esp, gre, icmpv4, icmpv6, ipv4, ipv6, tcp, udp};

/// What layer 3 is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum L3 {
    /// Something else; [`Layers::ethertype`] says what.
    #[default]
    Other,
    /// ARP for Ethernet and IPv4 (RFC 826); of other formats it is [`L3::Other`].
    Arp,
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// What layer 4 is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum L4 {
    /// None: not an IP packet, or a later fragment.
    #[default]
    None,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP in IPv4.
    Icmpv4,
    /// ICMPv6 in IPv6.
    Icmpv6,
    /// Something else; [`Layers::protocol`] says what.
    Other,
    /// GRE, with the optional fields that its flags name (RFC 2784, RFC 2890).
    Gre,
    /// ESP (RFC 4303).
    Esp,
}

/// Where the headers of one stack (the frame's own, or a tunnel's inner one) lie. Offsets count from the frame's start.
///
/// Three words, so that it is made, stored and copied as words: fields of a byte or two, stored one by one and then copied
/// as a block, stall the processor's store forwarding (measured: 50 cycles per packet).
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Layers {
    /// Layer 2, layer 3, layer 4, payload; 16 bits each, the first lowest.
    offsets: u64,
    /// End (32 bits), EtherType (16), protocol (8), flags (8).
    span: u64,
    /// Two TCIs (16 bits each), kind of layer 3 (8), kind of layer 4 (8), IPv6 extension headers (8), more flags (8).
    kinds: u64,
}

/// [`Layers`] field by field.
#[derive(Clone, Copy, Default)]
pub(super) struct Found {
    pub(super) end: u32,
    pub(super) l2: u16,
    pub(super) l3: u16,
    pub(super) l4: u16,
    pub(super) payload: u16,
    pub(super) ethertype: u16,
    pub(super) tags: [u16; 2],
    pub(super) protocol: u8,
    pub(super) l3_kind: L3,
    pub(super) l4_kind: L4,
    pub(super) flags: u8,
    pub(super) extensions: u8,
    pub(super) shape: u8,
}

impl Found {
    #[inline(always)]
    pub(super) fn pack(self) -> Layers {
        let [a, b, c, d] = [self.l2, self.l3, self.l4, self.payload].map(u64::from);
        let [tag0, tag1] = self.tags.map(u64::from);
        Layers {
            offsets: a | b << 16 | c << 32 | d << 48,
            span: u64::from(self.end)
                | u64::from(self.ethertype) << 32
                | u64::from(self.protocol) << 48
                | u64::from(self.flags) << 56,
            kinds: tag0
                | tag1 << 16
                | (self.l3_kind as u64) << 32
                | (self.l4_kind as u64) << 40
                | u64::from(self.extensions) << 48
                | u64::from(self.shape) << 56,
        }
    }

    /// Layer 3 begins here, and nothing is known behind it.
    pub(super) fn set_l3(&mut self, at: u16) {
        (self.l3, self.l4, self.payload) = (at, at, at);
    }

    pub(super) fn is_fragment(&self) -> bool {
        self.flags & (flag::FRAGMENT_FIRST | flag::FRAGMENT_LATER) != 0
    }

    pub(super) fn is_later_fragment(&self) -> bool {
        self.flags & flag::FRAGMENT_LATER != 0
    }
}

/// Flags of [`Layers`].
pub(super) mod flag {
    /// How many VLAN tags.
    pub(in super::super) const TAGS: u8 = 0b11;
    /// The first, the second tag is 802.1ad.
    pub(in super::super) const QINQ: [u8; 2] = [1 << 2, 1 << 3];
    pub(in super::super) const FRAGMENT_FIRST: u8 = 1 << 4;
    pub(in super::super) const FRAGMENT_LATER: u8 = 1 << 5;
    pub(in super::super) const IP_OPTIONS: u8 = 1 << 6;
}

/// More flags of [`Layers`].
pub(super) mod shape {
    /// The stack begins with IP.
    pub(in super::super) const NO_LINK: u8 = 1 << 0;
    /// There is a label stack between Ethernet and layer 3.
    pub(in super::super) const LABELS: u8 = 1 << 1;
}

/// Bits of [`Layers::extensions`].
pub mod extension {
    /// Hop-by-hop options.
    pub const HOP_BY_HOP: u8 = 1;
    /// Routing header.
    pub const ROUTING: u8 = 2;
    /// Fragment header.
    pub const FRAGMENT: u8 = 4;
    /// Destination options.
    pub const DESTINATION: u8 = 8;
    /// Authentication header.
    pub const AH: u8 = 16;

    /// The bit of an extension header.
    pub(in super::super) const fn of(next: crate::IpProtocol) -> u8 {
        match next {
            crate::IpProtocol::HOP_BY_HOP => HOP_BY_HOP,
            crate::IpProtocol::ROUTING => ROUTING,
            crate::IpProtocol::FRAGMENT => FRAGMENT,
            crate::IpProtocol::DESTINATION_OPTIONS => DESTINATION,
            crate::IpProtocol::AH => AH,
            _ => 0,
        }
    }
}

impl Layers {
    /// Ethernet without tags, IPv4 without options, not a fragment; `start` is at most 2^16 - 1 - the length of the headers.
    #[inline(always)]
    pub(super) fn ipv4_plain(start: usize, end: usize, protocol: u8, l4: L4, l4_len: usize) -> Layers {
        // The four offsets of a stack that starts at 0, and `start` added to each.
        let at_zero = (14 << 16) | (34 << 32) | ((34 + l4_len as u64) << 48);
        Layers {
            offsets: at_zero + start as u64 * 0x0001_0001_0001_0001,
            span: end as u64 | u64::from(EtherType::IPV4.0) << 32 | u64::from(protocol) << 48,
            kinds: (L3::Ipv4 as u64) << 32 | (l4 as u64) << 40,
        }
    }

    #[inline(always)]
    pub(super) fn words(self) -> [u64; 3] {
        [self.offsets, self.span, self.kinds]
    }

    #[inline(always)]
    pub(super) fn from_words([offsets, span, kinds]: [u64; 3]) -> Layers {
        Layers { offsets, span, kinds }
    }

    /// Start of the stack: of the Ethernet header, or of the IP header if [`Layers::has_link`] says that there is none.
    #[inline]
    pub fn l2(&self) -> usize {
        usize::from(self.offsets as u16)
    }

    /// Start of what follows Ethernet, VLAN tags and MPLS labels.
    #[inline]
    pub fn l3(&self) -> usize {
        usize::from((self.offsets >> 16) as u16)
    }

    /// Start of what follows the IP headers; for later fragments, of their piece of payload. Else as [`Layers::l3`].
    #[inline]
    pub fn l4(&self) -> usize {
        usize::from((self.offsets >> 32) as u16)
    }

    /// Start of what follows the innermost header known.
    #[inline]
    pub fn payload(&self) -> usize {
        usize::from((self.offsets >> 48) as u16)
    }

    /// End of the packet: of the IP packet where there is one (padding lies behind), else of the frame.
    #[inline]
    pub fn end(&self) -> usize {
        self.span as u32 as usize
    }

    /// What layer 3 is.
    #[inline]
    pub fn l3_kind(&self) -> L3 {
        match (self.kinds >> 32) as u8 {
            1 => L3::Arp,
            2 => L3::Ipv4,
            3 => L3::Ipv6,
            _ => L3::Other,
        }
    }

    /// What layer 4 is.
    #[inline]
    pub fn l4_kind(&self) -> L4 {
        match (self.kinds >> 40) as u8 {
            1 => L4::Tcp,
            2 => L4::Udp,
            3 => L4::Icmpv4,
            4 => L4::Icmpv6,
            5 => L4::Other,
            6 => L4::Gre,
            7 => L4::Esp,
            _ => L4::None,
        }
    }

    /// EtherType behind the tags; below 0x600 a length. In a stack without Ethernet, the one that IP would have.
    #[inline]
    pub fn ethertype(&self) -> EtherType {
        EtherType((self.span >> 32) as u16)
    }

    /// Protocol behind the IP headers (0 if there is no IP). In later IPv6 fragments it may differ from the first's
    /// (RFC 8200 section 4.5).
    #[inline]
    pub fn protocol(&self) -> IpProtocol {
        IpProtocol((self.span >> 48) as u8)
    }

    #[inline]
    fn flags(&self) -> u8 {
        (self.span >> 56) as u8
    }

    /// How many VLAN tags: 0, 1 or 2.
    #[inline]
    pub fn tag_count(&self) -> usize {
        usize::from(self.flags() & flag::TAGS)
    }

    /// A VLAN tag, the outermost first.
    #[inline]
    pub fn tag(&self, index: usize) -> Option<Tag> {
        if index >= self.tag_count() {
            return None;
        }
        let qinq = self.flags() & flag::QINQ.get(index)? != 0;
        let tpid = if qinq { EtherType::QINQ } else { EtherType::VLAN };
        Some(Tag { tpid, tci: (self.kinds >> (16 * index)) as u16 })
    }

    /// Whether the stack begins with Ethernet. A frame's own always does, that inside a tunnel may begin with IP.
    #[inline]
    pub fn has_link(&self) -> bool {
        self.shape() & shape::NO_LINK == 0
    }

    /// Whether an MPLS label stack lies between Ethernet and layer 3.
    #[inline]
    pub fn has_labels(&self) -> bool {
        self.shape() & shape::LABELS != 0
    }

    /// Where that label stack lies; empty if there is none.
    pub fn labels(&self) -> Range<usize> {
        let link = if self.has_link() { ethernet::HEADER_LEN + vlan::TAG_LEN * self.tag_count() } else { 0 };
        if self.has_labels() { self.l2() + link..self.l3() } else { self.l3()..self.l3() }
    }

    /// Which extension headers the IPv6 header has: bits of [`extension`].
    #[inline]
    pub fn extensions(&self) -> u8 {
        (self.kinds >> 48) as u8
    }

    #[inline]
    fn shape(&self) -> u8 {
        (self.kinds >> 56) as u8
    }

    /// Whether this is a piece of a fragmented packet.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.flags() & (flag::FRAGMENT_FIRST | flag::FRAGMENT_LATER) != 0
    }

    /// The piece with offset 0, of several.
    #[inline]
    pub fn is_first_fragment(&self) -> bool {
        self.flags() & flag::FRAGMENT_FIRST != 0
    }

    /// A piece with an offset above 0: it has no layer-4 header.
    #[inline]
    pub fn is_later_fragment(&self) -> bool {
        self.flags() & flag::FRAGMENT_LATER != 0
    }

    /// Whether the IPv4 header has options or the IPv6 header extension headers.
    #[inline]
    pub fn has_ip_options(&self) -> bool {
        self.flags() & flag::IP_OPTIONS != 0
    }

    /// Whether layer 3 is IPv4 or IPv6.
    #[inline]
    pub fn is_ip(&self) -> bool {
        matches!(self.l3_kind(), L3::Ipv4 | L3::Ipv6)
    }

    /// The Ethernet header in `frame`, which must be what was parsed; `None` also where the stack begins with IP.
    pub fn ethernet<'a>(&self, frame: &'a [u8]) -> Option<ethernet::View<'a>> {
        if !self.has_link() {
            return None;
        }
        ethernet::View::new(frame.get(self.l2()..)?).ok()
    }

    /// The ARP packet.
    pub fn arp<'a>(&self, frame: &'a [u8]) -> Option<arp::View<'a>> {
        (self.l3_kind() == L3::Arp).then(|| arp::View::new(frame.get(self.l3()..)?).ok())?
    }

    /// The IPv4 header. `None` also where the packet goes on in another buffer; then see [`Layers::ipv4_header`].
    pub fn ipv4<'a>(&self, frame: &'a [u8]) -> Option<ipv4::View<'a>> {
        (self.l3_kind() == L3::Ipv4).then(|| ipv4::View::new(frame.get(self.l3()..)?).ok())?
    }

    /// The IPv6 header. `None` also where the packet goes on in another buffer; then see [`Layers::ipv6_header`].
    pub fn ipv6<'a>(&self, frame: &'a [u8]) -> Option<ipv6::View<'a>> {
        (self.l3_kind() == L3::Ipv6).then(|| ipv6::View::new(frame.get(self.l3()..)?).ok())?
    }

    /// The fixed part of the IPv4 header.
    #[inline]
    pub fn ipv4_header<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8; ipv4::HEADER_LEN]> {
        if self.l3_kind() != L3::Ipv4 {
            return None;
        }
        frame.get(self.l3()..)?.first_chunk()
    }

    /// The fixed IPv6 header.
    #[inline]
    pub fn ipv6_header<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8; ipv6::HEADER_LEN]> {
        if self.l3_kind() != L3::Ipv6 {
            return None;
        }
        frame.get(self.l3()..)?.first_chunk()
    }

    /// End of the UDP datagram, which may lie before the end of the packet; `None` if layer 4 is not UDP.
    #[inline]
    pub fn udp_end(&self, frame: &[u8]) -> Option<usize> {
        if self.l4_kind() != L4::Udp {
            return None;
        }
        let len = frame.get(self.l4() + 4..)?.first_chunk()?;
        Some(self.l4() + usize::from(u16::from_be_bytes(*len)))
    }

    /// The bytes behind the IP headers, without padding; `None` if the packet goes on in another buffer.
    #[inline]
    pub fn l4_bytes<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8]> {
        frame.get(self.l4()..self.end())
    }

    /// The same, writable.
    #[inline]
    pub fn l4_bytes_mut<'a>(&self, frame: &'a mut [u8]) -> Option<&'a mut [u8]> {
        frame.get_mut(self.l4()..self.end())
    }

    /// The UDP header.
    pub fn udp<'a>(&self, frame: &'a [u8]) -> Option<udp::View<'a>> {
        (self.l4_kind() == L4::Udp).then(|| udp::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// The TCP header.
    pub fn tcp<'a>(&self, frame: &'a [u8]) -> Option<tcp::View<'a>> {
        (self.l4_kind() == L4::Tcp).then(|| tcp::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// The GRE header.
    pub fn gre<'a>(&self, frame: &'a [u8]) -> Option<gre::View<'a>> {
        (self.l4_kind() == L4::Gre).then(|| gre::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// The ESP header.
    pub fn esp<'a>(&self, frame: &'a [u8]) -> Option<esp::View<'a>> {
        (self.l4_kind() == L4::Esp).then(|| esp::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// The ICMP header.
    pub fn icmpv4<'a>(&self, frame: &'a [u8]) -> Option<icmpv4::View<'a>> {
        (self.l4_kind() == L4::Icmpv4).then(|| icmpv4::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// The ICMPv6 header.
    pub fn icmpv6<'a>(&self, frame: &'a [u8]) -> Option<icmpv6::View<'a>> {
        (self.l4_kind() == L4::Icmpv6).then(|| icmpv6::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// The same layers of a frame whose start moved: `by` bytes were put in front (positive) or taken off (negative).
    ///
    /// `None` if an offset would not fit.
    pub fn moved(&self, by: i32) -> Option<Layers> {
        self.moved_behind(by, by)
    }

    /// The same layers of a frame whose tags grew (positive) or shrank by `by` bytes: its Ethernet header starts where it did. The tags
    /// that the layers name are not changed.
    ///
    /// `None` if an offset would not fit.
    pub fn retagged(&self, by: i32) -> Option<Layers> {
        self.moved_behind(0, by)
    }

    fn moved_behind(&self, link: i32, by: i32) -> Option<Layers> {
        let by_link = |at: usize, by: i32| u16::try_from(at as i64 + i64::from(by)).ok().map(u64::from);
        let shift = |at| by_link(at, by);
        let end = u32::try_from(self.end() as i64 + i64::from(by)).ok()?;
        let offsets = by_link(self.l2(), link)?
            | shift(self.l3())? << 16
            | shift(self.l4())? << 32
            | shift(self.payload())? << 48;
        let span = self.span & !u64::from(u32::MAX) | u64::from(end);
        Some(Layers { offsets, span, ..*self })
    }
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Layers");
        out.field("l2", &self.l2()).field("l3", &self.l3()).field("l4", &self.l4()).field("payload", &self.payload());
        out.field("end", &self.end()).field("ethertype", &self.ethertype()).field("protocol", &self.protocol());
        out.field("l3_kind", &self.l3_kind()).field("l4_kind", &self.l4_kind());
        out.field("tags", &[self.tag(0), self.tag(1)]).field("flags", &self.flags()).finish()
    }
}
