//! One pass over a frame: where each header lies and what it is. No copy, no allocation, no panic.
//!
//! [`parse`] looks through Ethernet, up to two VLAN tags, ARP, IPv4 with options and fragments, IPv6 with extension
//! headers, TCP, UDP, ICMP and ICMPv6, and through VXLAN into the same headers once more. Layer-4 headers are not
//! looked for in later fragments. What it returns is `Copy` and fits a cache line.
//!
//! A packet may consist of several buffers: [`Parser::parse_chain`] takes the first and the length of all. Headers must
//! lie in the first one; [`ParseError::HeaderSplit`] says that they do not.

mod ip;

use core::fmt;
use core::ops::Range;

use crate::ethernet::{self, EtherType};
use crate::field::{be16, get};
use crate::ip::IpProtocol;
use crate::vlan::Tag;
use crate::vxlan::{self, Vni};
use crate::{ParseError, arp, icmpv4, icmpv6, ipv4, ipv6, tcp, udp};

/// What layer 3 is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum L3 {
    /// Something else; [`Layers::ethertype`] says what.
    #[default]
    Other,
    /// ARP, at least 28 bytes.
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
    /// Two TCIs (16 bits each), kind of layer 3 (8), kind of layer 4 (8).
    kinds: u64,
}

/// [`Layers`] field by field.
#[derive(Clone, Copy, Default)]
struct Found {
    end: u32,
    l2: u16,
    l3: u16,
    l4: u16,
    payload: u16,
    ethertype: u16,
    tags: [u16; 2],
    protocol: u8,
    l3_kind: L3,
    l4_kind: L4,
    flags: u8,
}

impl Found {
    #[inline(always)]
    fn pack(self) -> Layers {
        let [a, b, c, d] = [self.l2, self.l3, self.l4, self.payload].map(u64::from);
        let [tag0, tag1] = self.tags.map(u64::from);
        Layers {
            offsets: a | b << 16 | c << 32 | d << 48,
            span: u64::from(self.end)
                | u64::from(self.ethertype) << 32
                | u64::from(self.protocol) << 48
                | u64::from(self.flags) << 56,
            kinds: tag0 | tag1 << 16 | (self.l3_kind as u64) << 32 | (self.l4_kind as u64) << 40,
        }
    }

    fn is_fragment(&self) -> bool {
        self.flags & (flag::FRAGMENT_FIRST | flag::FRAGMENT_LATER) != 0
    }

    fn is_later_fragment(&self) -> bool {
        self.flags & flag::FRAGMENT_LATER != 0
    }
}

/// Flags of [`Layers`].
mod flag {
    /// How many VLAN tags.
    pub(super) const TAGS: u8 = 0b11;
    /// The first, the second tag is 802.1ad.
    pub(super) const QINQ: [u8; 2] = [1 << 2, 1 << 3];
    pub(super) const FRAGMENT_FIRST: u8 = 1 << 4;
    pub(super) const FRAGMENT_LATER: u8 = 1 << 5;
    pub(super) const IP_OPTIONS: u8 = 1 << 6;
}

impl Layers {
    /// Start of the Ethernet header.
    #[inline]
    pub fn l2(&self) -> usize {
        usize::from(self.offsets as u16)
    }

    /// Start of what follows Ethernet and tags.
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
            _ => L4::None,
        }
    }

    /// EtherType behind the tags; below 0x600 a length.
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

    /// The Ethernet header in `frame`, which must be what was parsed.
    pub fn ethernet<'a>(&self, frame: &'a [u8]) -> Option<ethernet::View<'a>> {
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
        let shift = |at: usize| u16::try_from(at as i64 + i64::from(by)).ok().map(u64::from);
        let end = u32::try_from(self.end() as i64 + i64::from(by)).ok()?;
        let offsets =
            shift(self.l2())? | shift(self.l3())? << 16 | shift(self.l4())? << 32 | shift(self.payload())? << 48;
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

/// A tunnel inside a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Tunnel {
    /// None.
    #[default]
    None,
    /// VXLAN (RFC 7348).
    Vxlan,
}

/// Where the headers of a frame lie. Seven words.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Parsed {
    outer: Layers,
    inner: Layers,
    /// VNI (24 bits), kind of tunnel (8 bits), whether the VNI is known (1 bit, at 32), error's index plus one (8 bits, at 40).
    tunnel: u64,
}

const VNI_KNOWN: u64 = 1 << 32;

impl Parsed {
    /// The frame's own stack.
    #[inline]
    pub fn outer(&self) -> &Layers {
        &self.outer
    }

    /// The kind of tunnel whose UDP port (or protocol) the frame has.
    #[inline]
    pub fn tunnel(&self) -> Tunnel {
        match (self.tunnel >> 24) as u8 {
            1 => Tunnel::Vxlan,
            _ => Tunnel::None,
        }
    }

    /// Start of the tunnel header, if there is a tunnel.
    #[inline]
    pub fn tunnel_header(&self) -> Option<usize> {
        (self.tunnel() != Tunnel::None).then_some(self.outer.payload())
    }

    /// The VXLAN network identifier, if the VXLAN header is valid (the inner frame need not be).
    #[inline]
    pub fn vni(&self) -> Option<Vni> {
        (self.tunnel & VNI_KNOWN != 0).then_some(Vni::from_low_bits(self.tunnel as u32))
    }

    /// The stack inside the tunnel, if there is a tunnel and its headers are in order.
    #[inline]
    pub fn inner(&self) -> Option<&Layers> {
        (self.tunnel >> 32 == VNI_KNOWN >> 32).then_some(&self.inner)
    }

    /// What is wrong with the tunnel or the frame in it. The frame itself is in order: who does not end the tunnel has
    /// no reason to refuse it.
    #[inline]
    pub fn tunnel_error(&self) -> Option<ParseError> {
        ParseError::ALL.get(usize::from((self.tunnel >> 40) as u8).wrapping_sub(1)).copied()
    }

    /// The innermost stack in order: what an endpoint would deliver.
    #[inline]
    pub fn innermost(&self) -> &Layers {
        self.inner().unwrap_or(&self.outer)
    }
}

impl fmt::Debug for Parsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Parsed");
        out.field("outer", &self.outer).field("tunnel", &self.tunnel()).field("vni", &self.vni());
        out.field("inner", &self.inner()).field("tunnel_error", &self.tunnel_error()).finish()
    }
}

/// What is looked for and how strictly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parser {
    /// UDP destination port of VXLAN; `None` to look into no tunnel.
    pub vxlan_port: Option<u16>,
    /// Whether IPv4 header checksums are verified, inside the tunnel too.
    pub verify_ipv4: bool,
}

impl Default for Parser {
    /// VXLAN on port 4789, IPv4 header checksums verified.
    fn default() -> Self {
        Parser { vxlan_port: Some(vxlan::PORT), verify_ipv4: true }
    }
}

/// [`Parser::parse`] with the default parser.
#[inline]
pub fn parse(frame: &[u8]) -> Result<Parsed, ParseError> {
    Parser::default().parse(frame)
}

impl Parser {
    /// Parses a frame that lies in one buffer.
    #[inline]
    pub fn parse(&self, frame: &[u8]) -> Result<Parsed, ParseError> {
        self.parse_chain(frame, frame.len())
    }

    /// Parses a packet of `total` bytes of which `head` is the first buffer.
    #[inline]
    pub fn parse_chain(&self, head: &[u8], total: usize) -> Result<Parsed, ParseError> {
        let outer = self.layers(head, 0, total.max(head.len()))?;
        let vxlan = (Tunnel::Vxlan as u64) << 24;
        let broken = |error: ParseError| (error as u64 + 1) << 40;
        Ok(match self.vxlan(head, &outer) {
            None => Parsed { outer, ..Parsed::default() },
            Some(Err(error)) => Parsed { outer, tunnel: vxlan | broken(error), ..Parsed::default() },
            Some(Ok((vni, frame))) => {
                let tunnel = vxlan | VNI_KNOWN | u64::from(vni.get());
                match self.layers(head, frame.start, frame.end) {
                    Ok(inner) => Parsed { outer, inner, tunnel },
                    Err(error) => Parsed { outer, tunnel: tunnel | broken(error), ..Parsed::default() },
                }
            }
        })
    }

    /// Parses the Ethernet stack that starts at `start` and ends at `end`, tunnels left alone.
    #[inline(always)]
    pub fn layers(&self, head: &[u8], start: usize, end: usize) -> Result<Layers, ParseError> {
        match self.common(head, start, end) {
            Some(layers) => Ok(layers),
            None => self.any(head, start, end),
        }
    }

    /// Ethernet, IPv4 of 20 bytes, not fragmented, UDP or TCP, all in order; `None` for whatever else.
    #[inline(always)]
    fn common(&self, head: &[u8], start: usize, end: usize) -> Option<Layers> {
        const UDP_END: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN + udp::HEADER_LEN;
        let bytes = head.get(start..)?;
        let h = bytes.first_chunk::<UDP_END>()?;
        let length = usize::from(be16::<16, UDP_END>(h));
        let packet_end = start + ethernet::HEADER_LEN + length;
        let plain =
            u32::from_be_bytes(get::<12, 4, UDP_END>(h)) >> 8 == 0x08_0045 && be16::<20, UDP_END>(h) & 0x3fff == 0;
        // One bound for every offset below, so that none can wrap.
        if !plain || packet_end > end || start > usize::from(u16::MAX) - 0x100 {
            return None;
        }
        if self.verify_ipv4 && !ip::header_sum_is_valid(&get::<14, 20, UDP_END>(h)) {
            return None;
        }
        let protocol = h[23];
        let (l4_kind, l4_len) = match IpProtocol(protocol) {
            IpProtocol::UDP => {
                let udp_len = usize::from(be16::<38, UDP_END>(h));
                if udp_len < udp::HEADER_LEN || udp_len + ipv4::HEADER_LEN > length {
                    return None;
                }
                (L4::Udp, udp::HEADER_LEN)
            }
            IpProtocol::TCP => {
                let offset = usize::from(*bytes.get(46)? >> 4) * 4;
                if offset < tcp::HEADER_LEN || offset + ipv4::HEADER_LEN > length || 34 + offset > bytes.len() {
                    return None;
                }
                (L4::Tcp, offset)
            }
            _ => return None,
        };
        // The four offsets of a stack that starts at 0, and `start` added to each.
        let at_zero = (14 << 16) | (34 << 32) | ((34 + l4_len as u64) << 48);
        Some(Layers {
            offsets: at_zero + start as u64 * 0x0001_0001_0001_0001,
            span: packet_end as u64 | u64::from(EtherType::IPV4.0) << 32 | u64::from(protocol) << 48,
            kinds: (L3::Ipv4 as u64) << 32 | (l4_kind as u64) << 40,
        })
    }

    /// The same for any stack.
    #[inline(never)]
    fn any(&self, head: &[u8], start: usize, end: usize) -> Result<Layers, ParseError> {
        let at = Bytes { head, end };
        let header: &[u8; ethernet::HEADER_LEN] = at.header(start, ParseError::EthernetTruncated)?;
        let mut ethertype = be16::<12, { ethernet::HEADER_LEN }>(header);
        let mut layers = Found { l2: offset(start)?, ..Found::default() };
        let mut l3 = start + ethernet::HEADER_LEN;
        while EtherType(ethertype).is_vlan() {
            let index = usize::from(layers.flags & flag::TAGS);
            let (Some(slot), Some(qinq)) = (layers.tags.get_mut(index), flag::QINQ.get(index)) else {
                return Err(ParseError::VlanTooDeep);
            };
            let tag: &[u8; 4] = at.header(l3, ParseError::VlanTruncated)?;
            *slot = be16::<0, 4>(tag);
            if ethertype == EtherType::QINQ.0 {
                layers.flags |= qinq;
            }
            layers.flags += 1;
            ethertype = be16::<2, 4>(tag);
            l3 += 4;
        }
        layers.ethertype = ethertype;
        layers.l3 = offset(l3)?;
        layers.l4 = layers.l3;
        layers.payload = layers.l3;
        layers.end = u32::try_from(end).unwrap_or(u32::MAX);
        match EtherType(ethertype) {
            EtherType::IPV4 => self.ipv4(at, l3, &mut layers)?,
            EtherType::IPV6 => ip::ipv6(at, l3, &mut layers)?,
            EtherType::ARP => {
                let _: &[u8; arp::HEADER_LEN] = at.header(l3, ParseError::ArpTruncated)?;
                layers.l3_kind = L3::Arp;
                layers.payload = offset(l3 + arp::HEADER_LEN)?;
            }
            _ => {}
        }
        Ok(layers.pack())
    }

    /// The VXLAN header behind the UDP header at `outer`: network identifier, and where the inner frame starts and ends.
    ///
    /// `None` if `outer` is not a datagram to [`Parser::vxlan_port`], or a fragment of one. For who moves the inner frame
    /// on by its Ethernet header and has no use for the rest of [`Parser::parse`].
    #[inline(always)]
    pub fn vxlan(&self, head: &[u8], outer: &Layers) -> Option<Result<(Vni, Range<usize>), ParseError>> {
        if outer.l4_kind() != L4::Udp || outer.is_fragment() {
            return None;
        }
        let at = outer.l4();
        let bytes = head.get(at..)?;
        let udp = bytes.first_chunk::<{ udp::HEADER_LEN }>()?;
        if Some(be16::<2, 8>(udp)) != self.vxlan_port {
            return None;
        }
        // The UDP length may leave bytes of the IP packet out; that it is not below 8 was checked.
        let end = at + usize::from(be16::<4, 8>(udp));
        const BOTH: usize = udp::HEADER_LEN + vxlan::HEADER_LEN;
        let header = match bytes.first_chunk::<BOTH>() {
            Some(header) if at + BOTH <= end => header,
            Some(_) => return Some(Err(ParseError::VxlanTruncated)),
            None if at + BOTH > end => return Some(Err(ParseError::VxlanTruncated)),
            None => return Some(Err(ParseError::HeaderSplit)),
        };
        if header[8] & vxlan::FLAG_VNI == 0 {
            return Some(Err(ParseError::VxlanBadFlags));
        }
        let vni = Vni::from_low_bits(u32::from_be_bytes(get::<12, 4, BOTH>(header)) >> 8);
        Some(Ok((vni, at + BOTH..end)))
    }
}

/// The bytes at hand, and where the packet ends (perhaps in a later buffer).
#[derive(Clone, Copy)]
struct Bytes<'a> {
    head: &'a [u8],
    end: usize,
}

impl<'a> Bytes<'a> {
    /// The `N` bytes at `at`. `short` if the packet ends before them; `HeaderSplit` if only the buffer does.
    #[inline(always)]
    fn header<const N: usize>(&self, at: usize, short: ParseError) -> Result<&'a [u8; N], ParseError> {
        if at + N > self.end {
            return Err(short);
        }
        self.head.get(at..).and_then(|b| b.first_chunk()).ok_or(ParseError::HeaderSplit)
    }

    /// The `len` bytes at `at`.
    #[inline(always)]
    fn bytes(&self, at: usize, len: usize, short: ParseError) -> Result<&'a [u8], ParseError> {
        if at + len > self.end {
            return Err(short);
        }
        self.head.get(at..at + len).ok_or(ParseError::HeaderSplit)
    }
}

/// Headers beyond 64 KiB do not exist in a real packet; a superframe is long only in its payload.
#[inline(always)]
fn offset(at: usize) -> Result<u16, ParseError> {
    u16::try_from(at).map_err(|_| ParseError::HeaderSplit)
}
