//! One pass over a frame: where each header lies and what it is. No copy, no allocation, no panic.
//!
//! [`parse`] looks through Ethernet, up to two VLAN tags, ARP, IPv4 with options and fragments, IPv6 with extension
//! headers, TCP, UDP, ICMP and ICMPv6, and through VXLAN into the same headers once more. Layer-4 headers are not
//! looked for in later fragments. What it returns is `Copy` and fits a cache line.
//!
//! A packet may consist of several buffers: [`Parser::parse_chain`] takes the first and the length of all. Headers must
//! lie in the first one; [`ParseError::HeaderSplit`] says that they do not.

mod ip;
mod layers;

use layers::{Found, flag};
pub use layers::{L3, L4, Layers};

use core::fmt;
use core::ops::Range;

use crate::ethernet::{self, EtherType};
use crate::field::{be16, get};
use crate::ip::IpProtocol;
use crate::vxlan::{self, Vni};
use crate::{ParseError, arp, ipv4, tcp, udp};

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
        Some(Layers::ipv4_plain(start, packet_end, protocol, l4_kind, l4_len))
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
