//! Header offsets and types of one stack, packed into three words.

use core::fmt;
use core::net::IpAddr;
use core::ops::Range;

use crate::ethernet::{self, EtherType};
use crate::field::get;
use crate::ip::IpProtocol;
use crate::tuple::FiveTuple;
use crate::vlan::{self, Tag};
use crate::{arp, esp, gre, icmpv4, icmpv6, ipv4, ipv6, tcp, udp};

/// Type of the layer-3 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum L3Type {
    /// Another protocol, named by [`HeaderOffsets::ethertype`].
    #[default]
    Other,
    /// ARP for Ethernet and IPv4 (RFC 826). ARP of other formats is [`L3Type::Other`].
    Arp,
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// Type of the layer-4 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum L4Type {
    /// No layer-4 header: not an IP packet, or a later fragment.
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
    /// Another protocol, named by [`HeaderOffsets::protocol`].
    Other,
    /// GRE, with the optional fields that its flags announce (RFC 2784, RFC 2890).
    Gre,
    /// ESP (RFC 4303).
    Esp,
}

/// Header offsets and types of one stack: the outer one, or the inner one of a tunnel. Offsets are bytes from
/// the start of the frame.
///
/// The value is three words, so that it is built, stored and copied as words. Fields of one or two bytes that
/// are stored one by one and copied as a block stall store forwarding (measured: 50 cycles per packet).
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct HeaderOffsets {
    /// Offsets of layer 2, layer 3, layer 4 and payload: 16 bits each, layer 2 lowest.
    offsets: u64,
    /// End (32 bits), EtherType (16), protocol (8), flags (8).
    end_and_protocol: u64,
    /// Two TCIs (16 bits each), layer-3 type (8), layer-4 type (8), IPv6 extension headers (8), stack flags
    /// (8).
    tags_and_types: u64,
}

/// [`HeaderOffsets`] as separate fields, while a stack is parsed.
#[derive(Clone, Copy, Default)]
pub(super) struct HeaderFields {
    pub(super) end: u32,
    pub(super) l2: u16,
    pub(super) l3: u16,
    pub(super) l4: u16,
    pub(super) payload: u16,
    pub(super) ethertype: u16,
    pub(super) tags: [u16; 2],
    pub(super) protocol: u8,
    pub(super) l3_type: L3Type,
    pub(super) l4_type: L4Type,
    pub(super) flags: u8,
    pub(super) extensions: u8,
    pub(super) stack_flags: u8,
}

impl HeaderFields {
    #[inline(always)]
    pub(super) fn pack(self) -> HeaderOffsets {
        let [a, b, c, d] = [self.l2, self.l3, self.l4, self.payload].map(u64::from);
        let [tag0, tag1] = self.tags.map(u64::from);
        HeaderOffsets {
            offsets: a | b << 16 | c << 32 | d << 48,
            end_and_protocol: u64::from(self.end)
                | u64::from(self.ethertype) << 32
                | u64::from(self.protocol) << 48
                | u64::from(self.flags) << 56,
            tags_and_types: tag0
                | tag1 << 16
                | (self.l3_type as u64) << 32
                | (self.l4_type as u64) << 40
                | u64::from(self.extensions) << 48
                | u64::from(self.stack_flags) << 56,
        }
    }

    /// Sets the start of layer 3. Layer 4 and payload start there too until they are found.
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

/// Flags of [`HeaderOffsets`].
pub(super) mod flag {
    /// Number of VLAN tags.
    pub(in super::super) const TAGS: u8 = 0b11;
    /// One bit for each tag, set if its TPID is 802.1ad.
    pub(in super::super) const QINQ: [u8; 2] = [1 << 2, 1 << 3];
    pub(in super::super) const FRAGMENT_FIRST: u8 = 1 << 4;
    pub(in super::super) const FRAGMENT_LATER: u8 = 1 << 5;
    pub(in super::super) const IP_OPTIONS: u8 = 1 << 6;
}

/// Stack flags of [`HeaderOffsets`].
pub(super) mod stack_flag {
    /// The stack starts with IP.
    pub(in super::super) const NO_ETHERNET: u8 = 1 << 0;
    /// An MPLS label stack lies between Ethernet and layer 3.
    pub(in super::super) const LABELS: u8 = 1 << 1;
}

/// Bits of [`HeaderOffsets::extensions`].
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

    /// Returns the bit of an extension header.
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

impl HeaderOffsets {
    /// Packs Ethernet without tags and IPv4 without options, not fragmented. `start` plus the length of the
    /// headers must fit 16 bits.
    #[inline(always)]
    pub(super) fn ipv4_plain(start: usize, end: usize, protocol: u8, l4: L4Type, l4_len: usize) -> HeaderOffsets {
        // The four offsets of a stack that starts at 0, plus `start` in each.
        let at_zero = (14 << 16) | (34 << 32) | ((34 + l4_len as u64) << 48);
        HeaderOffsets {
            offsets: at_zero + start as u64 * 0x0001_0001_0001_0001,
            end_and_protocol: end as u64 | u64::from(EtherType::IPV4.0) << 32 | u64::from(protocol) << 48,
            tags_and_types: (L3Type::Ipv4 as u64) << 32 | (l4 as u64) << 40,
        }
    }

    #[inline(always)]
    pub(super) fn words(self) -> [u64; 3] {
        [self.offsets, self.end_and_protocol, self.tags_and_types]
    }

    #[inline(always)]
    pub(super) fn from_words([offsets, end_and_protocol, tags_and_types]: [u64; 3]) -> HeaderOffsets {
        HeaderOffsets { offsets, end_and_protocol, tags_and_types }
    }

    /// Returns the start of the stack: the Ethernet header, or the IP header if
    /// [`HeaderOffsets::has_ethernet`] is false.
    #[inline]
    pub fn l2(&self) -> usize {
        usize::from(self.offsets as u16)
    }

    /// Returns the start of layer 3, after Ethernet, VLAN tags and MPLS labels.
    #[inline]
    pub fn l3(&self) -> usize {
        usize::from((self.offsets >> 16) as u16)
    }

    /// Returns the start of layer 4, or of the data of a later fragment, after the IP headers. Without IP it
    /// equals [`HeaderOffsets::l3`].
    #[inline]
    pub fn l4(&self) -> usize {
        usize::from((self.offsets >> 32) as u16)
    }

    /// Returns the start of the payload, after the last recognised header.
    #[inline]
    pub fn payload(&self) -> usize {
        usize::from((self.offsets >> 48) as u16)
    }

    /// Returns the end of the IP packet, or of the frame if it has none. Padding lies after the IP packet.
    #[inline]
    pub fn end(&self) -> usize {
        self.end_and_protocol as u32 as usize
    }

    /// Returns the layer-3 type.
    #[inline]
    pub fn l3_type(&self) -> L3Type {
        match (self.tags_and_types >> 32) as u8 {
            1 => L3Type::Arp,
            2 => L3Type::Ipv4,
            3 => L3Type::Ipv6,
            _ => L3Type::Other,
        }
    }

    /// Returns the layer-4 type.
    #[inline]
    pub fn l4_type(&self) -> L4Type {
        match (self.tags_and_types >> 40) as u8 {
            1 => L4Type::Tcp,
            2 => L4Type::Udp,
            3 => L4Type::Icmpv4,
            4 => L4Type::Icmpv6,
            5 => L4Type::Other,
            6 => L4Type::Gre,
            7 => L4Type::Esp,
            _ => L4Type::None,
        }
    }

    /// Returns the EtherType after the tags; a value below 0x600 is a length. For a stack without Ethernet it
    /// is the EtherType of its IP version.
    #[inline]
    pub fn ethertype(&self) -> EtherType {
        EtherType((self.end_and_protocol >> 32) as u16)
    }

    /// Returns the protocol after the IP headers, or 0 without IP. A later IPv6 fragment may name another
    /// protocol than the first (RFC 8200 section 4.5).
    #[inline]
    pub fn protocol(&self) -> IpProtocol {
        IpProtocol((self.end_and_protocol >> 48) as u8)
    }

    #[inline]
    fn flags(&self) -> u8 {
        (self.end_and_protocol >> 56) as u8
    }

    /// Returns the number of VLAN tags: 0, 1 or 2.
    #[inline]
    pub fn tag_count(&self) -> usize {
        usize::from(self.flags() & flag::TAGS)
    }

    /// Returns a VLAN tag. Index 0 is the outermost.
    #[inline]
    pub fn tag(&self, index: usize) -> Option<Tag> {
        if index >= self.tag_count() {
            return None;
        }
        let qinq = self.flags() & flag::QINQ.get(index)? != 0;
        let tpid = if qinq { EtherType::QINQ } else { EtherType::VLAN };
        Some(Tag { tpid, tci: (self.tags_and_types >> (16 * index)) as u16 })
    }

    /// True if the stack starts with Ethernet. The outer stack always does; an inner stack may start with IP.
    #[inline]
    pub fn has_ethernet(&self) -> bool {
        self.stack_flags() & stack_flag::NO_ETHERNET == 0
    }

    /// True if an MPLS label stack lies between Ethernet and layer 3.
    #[inline]
    pub fn has_labels(&self) -> bool {
        self.stack_flags() & stack_flag::LABELS != 0
    }

    /// Returns the byte range of the MPLS label stack; empty if there is none.
    pub fn labels(&self) -> Range<usize> {
        let link = if self.has_ethernet() { ethernet::HEADER_LEN + vlan::TAG_LEN * self.tag_count() } else { 0 };
        if self.has_labels() { self.l2() + link..self.l3() } else { self.l3()..self.l3() }
    }

    /// Returns the extension headers of the IPv6 header as bits of [`extension`].
    #[inline]
    pub fn extensions(&self) -> u8 {
        (self.tags_and_types >> 48) as u8
    }

    #[inline]
    fn stack_flags(&self) -> u8 {
        (self.tags_and_types >> 56) as u8
    }

    /// True if this is a fragment of a packet.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.flags() & (flag::FRAGMENT_FIRST | flag::FRAGMENT_LATER) != 0
    }

    /// True if this is the fragment with offset 0.
    #[inline]
    pub fn is_first_fragment(&self) -> bool {
        self.flags() & flag::FRAGMENT_FIRST != 0
    }

    /// True if this is a fragment with an offset above 0. It has no layer-4 header.
    #[inline]
    pub fn is_later_fragment(&self) -> bool {
        self.flags() & flag::FRAGMENT_LATER != 0
    }

    /// True if the IPv4 header has options, or the IPv6 header has extension headers.
    #[inline]
    pub fn has_ip_options(&self) -> bool {
        self.flags() & flag::IP_OPTIONS != 0
    }

    /// True if layer 3 is IPv4 or IPv6.
    #[inline]
    pub fn is_ip(&self) -> bool {
        matches!(self.l3_type(), L3Type::Ipv4 | L3Type::Ipv6)
    }

    /// Returns the Ethernet header. `frame` must be the parsed frame. `None` if the stack starts with IP.
    pub fn ethernet<'a>(&self, frame: &'a [u8]) -> Option<ethernet::View<'a>> {
        if !self.has_ethernet() {
            return None;
        }
        ethernet::View::new(frame.get(self.l2()..)?).ok()
    }

    /// Returns the ARP packet.
    pub fn arp<'a>(&self, frame: &'a [u8]) -> Option<arp::View<'a>> {
        (self.l3_type() == L3Type::Arp).then(|| arp::View::new(frame.get(self.l3()..)?).ok())?
    }

    /// Returns the IPv4 header. `None` also if the packet continues in another buffer; then use
    /// [`HeaderOffsets::ipv4_header`].
    pub fn ipv4<'a>(&self, frame: &'a [u8]) -> Option<ipv4::View<'a>> {
        (self.l3_type() == L3Type::Ipv4).then(|| ipv4::View::new(frame.get(self.l3()..)?).ok())?
    }

    /// Returns the IPv6 header. `None` also if the packet continues in another buffer; then use
    /// [`HeaderOffsets::ipv6_header`].
    pub fn ipv6<'a>(&self, frame: &'a [u8]) -> Option<ipv6::View<'a>> {
        (self.l3_type() == L3Type::Ipv6).then(|| ipv6::View::new(frame.get(self.l3()..)?).ok())?
    }

    /// Returns the fixed part of the IPv4 header.
    #[inline]
    pub fn ipv4_header<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8; ipv4::HEADER_LEN]> {
        if self.l3_type() != L3Type::Ipv4 {
            return None;
        }
        frame.get(self.l3()..)?.first_chunk()
    }

    /// Returns the fixed IPv6 header.
    #[inline]
    pub fn ipv6_header<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8; ipv6::HEADER_LEN]> {
        if self.l3_type() != L3Type::Ipv6 {
            return None;
        }
        frame.get(self.l3()..)?.first_chunk()
    }

    /// Returns source and destination of the IP header; `None` without one.
    #[inline]
    pub fn ip_addresses(&self, frame: &[u8]) -> Option<(IpAddr, IpAddr)> {
        match self.l3_type() {
            L3Type::Ipv4 => {
                let h = self.ipv4_header(frame)?;
                Some((IpAddr::from(get::<12, 4, 20>(h)), IpAddr::from(get::<16, 4, 20>(h))))
            }
            L3Type::Ipv6 => {
                let h = self.ipv6_header(frame)?;
                Some((IpAddr::from(get::<8, 16, 40>(h)), IpAddr::from(get::<24, 16, 40>(h))))
            }
            L3Type::Arp | L3Type::Other => None,
        }
    }

    /// Returns the TTL of the IPv4 header or the hop limit of the IPv6 header; `None` without one.
    #[inline]
    pub fn hop_limit(&self, frame: &[u8]) -> Option<u8> {
        match self.l3_type() {
            L3Type::Ipv4 => Some(self.ipv4_header(frame)?[8]),
            L3Type::Ipv6 => Some(self.ipv6_header(frame)?[7]),
            L3Type::Arp | L3Type::Other => None,
        }
    }

    /// Returns the addresses of the IPv6 header that the pseudo header of layer 4 does not contain.
    #[inline]
    pub fn hidden_addresses(&self, frame: &[u8]) -> ipv6::HiddenAddresses {
        if self.l3_type() == L3Type::Ipv6 && self.has_ip_options() {
            self.find_hidden_addresses(frame)
        } else {
            ipv6::HiddenAddresses::default()
        }
    }

    /// Searches for a routing header with segments left, which holds the final destination, and for a home
    /// address option, which holds the source.
    #[cold]
    fn find_hidden_addresses(&self, frame: &[u8]) -> ipv6::HiddenAddresses {
        let mut hidden = ipv6::HiddenAddresses::default();
        let (mut next, mut at) = (frame.get(self.l3() + 6).copied(), self.l3() + ipv6::HEADER_LEN);
        while at < self.l4() {
            let (Some(kind), Some(fixed)) = (next, frame.get(at..).and_then(|b| b.first_chunk::<8>())) else { break };
            let len = ipv6::extension_len(IpProtocol(kind), fixed[1]);
            match IpProtocol(kind) {
                IpProtocol::ROUTING if fixed[3] != 0 => hidden.dst = true,
                IpProtocol::DESTINATION_OPTIONS => {
                    let options = ipv6::Options::of(frame.get(at..at + len).unwrap_or_default());
                    hidden.src |= options.map_while(Result::ok).any(|(code, _)| code == ipv6::OPTION_HOME_ADDRESS);
                }
                _ => {}
            }
            (next, at) = (Some(fixed[0]), at + len);
        }
        hidden
    }

    /// Returns addresses, protocol and ports; see [`FiveTuple::of`]. For a hash see [`crate::tuple::entropy`].
    #[inline]
    pub fn five_tuple(&self, frame: &[u8]) -> Option<FiveTuple> {
        FiveTuple::of(frame, self)
    }

    /// Returns the end of the UDP datagram, which may lie before the end of the packet. `None` if layer 4 is
    /// not UDP.
    #[inline]
    pub fn udp_end(&self, frame: &[u8]) -> Option<usize> {
        if self.l4_type() != L4Type::Udp {
            return None;
        }
        let len = frame.get(self.l4() + 4..)?.first_chunk()?;
        Some(self.l4() + usize::from(u16::from_be_bytes(*len)))
    }

    /// Returns the bytes after the IP headers, without padding. `None` if the packet continues in another
    /// buffer.
    #[inline]
    pub fn l4_bytes<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8]> {
        frame.get(self.l4()..self.end())
    }

    /// Returns the UDP header.
    pub fn udp<'a>(&self, frame: &'a [u8]) -> Option<udp::View<'a>> {
        (self.l4_type() == L4Type::Udp).then(|| udp::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// Returns the TCP header.
    pub fn tcp<'a>(&self, frame: &'a [u8]) -> Option<tcp::View<'a>> {
        (self.l4_type() == L4Type::Tcp).then(|| tcp::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// Returns the GRE header.
    pub fn gre<'a>(&self, frame: &'a [u8]) -> Option<gre::View<'a>> {
        (self.l4_type() == L4Type::Gre).then(|| gre::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// Returns the ESP header.
    pub fn esp<'a>(&self, frame: &'a [u8]) -> Option<esp::View<'a>> {
        (self.l4_type() == L4Type::Esp).then(|| esp::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// Returns the ICMP header.
    pub fn icmpv4<'a>(&self, frame: &'a [u8]) -> Option<icmpv4::View<'a>> {
        (self.l4_type() == L4Type::Icmpv4).then(|| icmpv4::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// Returns the ICMPv6 header.
    pub fn icmpv6<'a>(&self, frame: &'a [u8]) -> Option<icmpv6::View<'a>> {
        (self.l4_type() == L4Type::Icmpv6).then(|| icmpv6::View::new(self.l4_bytes(frame)?).ok())?
    }

    /// Returns the offsets after a change at the start of the frame. `by` is the number of bytes added
    /// there, negative for removed bytes.
    ///
    /// `None` if an offset would not fit 16 bits.
    pub fn moved(&self, by: i32) -> Option<HeaderOffsets> {
        self.shifted(by, by)
    }

    /// Returns the offsets after a change of the VLAN tags. `by` is the number of inserted bytes, negative for removed
    /// bytes. The start of the Ethernet header does not change. The tags in the
    /// result are not updated.
    ///
    /// `None` if an offset would not fit 16 bits.
    pub fn retagged(&self, by: i32) -> Option<HeaderOffsets> {
        self.shifted(0, by)
    }

    /// Adds `l2_by` to the start of layer 2, and `by` to all later offsets.
    fn shifted(&self, l2_by: i32, by: i32) -> Option<HeaderOffsets> {
        let add = |at: usize, by: i32| u16::try_from(at as i64 + i64::from(by)).ok().map(u64::from);
        let shift = |at| add(at, by);
        let end = u32::try_from(self.end() as i64 + i64::from(by)).ok()?;
        let offsets =
            add(self.l2(), l2_by)? | shift(self.l3())? << 16 | shift(self.l4())? << 32 | shift(self.payload())? << 48;
        let end_and_protocol = self.end_and_protocol & !u64::from(u32::MAX) | u64::from(end);
        Some(HeaderOffsets { offsets, end_and_protocol, ..*self })
    }
}

impl fmt::Debug for HeaderOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("HeaderOffsets");
        out.field("l2", &self.l2()).field("l3", &self.l3()).field("l4", &self.l4()).field("payload", &self.payload());
        out.field("end", &self.end()).field("ethertype", &self.ethertype()).field("protocol", &self.protocol());
        out.field("l3_type", &self.l3_type()).field("l4_type", &self.l4_type());
        out.field("tags", &[self.tag(0), self.tag(1)]).field("flags", &self.flags()).finish()
    }
}
