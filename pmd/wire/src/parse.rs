//! Parses a frame in one pass: the offset and the type of each header. It copies nothing, allocates nothing
//! and never panics.
//!
//! [`parse`] covers the frame's outer header stack and the inner stack of its tunnel:
//! - A stack is Ethernet, up to two VLAN tags and an MPLS label stack. ARP, or IPv4 with options and
//!   fragments, or IPv6 with extension headers follows. TCP, UDP, ICMP, ICMPv6, ESP or GRE ends it. Later
//!   fragments have no layer-4 header, and no fragment has a tunnel.
//! - A tunnel is VXLAN, VXLAN-GPE, GENEVE or MPLS on its UDP port, GRE, or MPLS in GRE. IP or Ethernet in IP, and
//!   Ethernet over MPLS over Ethernet, are tunnels too. The inner stack starts with Ethernet or with IP.
//! - The tunnel header at the end of the inner stack is parsed. What that tunnel carries is not.
//!
//! Only the first four bits tell what follows a label stack (RFC 4928 section 2): 4 is IPv4, 6 is IPv6, and
//! everything else is treated as Ethernet. Control words are therefore not recognised.
//!
//! The result is `Copy` and fits a cache line.
//!
//! A frame is refused for errors in its outer stack up to layer 4. Errors in its tunnel or after its labels
//! are reported by [`Parsed::tunnel_error`]: the frame can still be forwarded.
//!
//! A packet may consist of several buffers: [`Parser::parse_chain`] takes the first one and the total length.
//! All headers must lie in the first buffer, else the result is [`ParseError::HeaderSplit`].

mod header_offsets;
mod ip;
mod tunnel;

use header_offsets::{HeaderFields, flag, stack_flag};
pub use header_offsets::{HeaderOffsets, L3Type, L4Type, extension};
use tunnel::{FirstHeader, InnerStack};
pub use tunnel::{Tunnel, Tunnels};

use core::fmt;

use crate::ethernet::{self, EtherType};
use crate::field::{be16, get};
use crate::ip::IpProtocol;
use crate::vxlan::{self, Vni};
use crate::{ParseError, arp, ipv4, tcp, udp};

/// Header offsets and types of a frame, in seven words.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Parsed {
    outer: HeaderOffsets,
    inner: HeaderOffsets,
    /// Packed fields, lowest first: VNI (24 bits), tunnel type (8), [`word`] flags (8), index of the error
    /// plus one (8). The inner stack's tunnel type (8) and MPLS flag (1) follow.
    tunnel: u64,
}

/// Flags in the last word of [`Parsed`].
mod word {
    pub(super) const VNI_KNOWN: u64 = 1 << 32;
    pub(super) const TUNNEL_VALID: u64 = 1 << 33;
    pub(super) const INNER: u64 = 1 << 34;
    pub(super) const LABELS: u64 = 1 << 35;
    pub(super) const INNER_LABELS: u64 = 1 << 56;
}

impl Parsed {
    /// Returns the seven words. Functions that are not inlined return this form.
    ///
    /// If they returned a `Parsed`, the compiler would merge it in memory with the registers of the common
    /// path. It would then read words as vectors right after it wrote them: a store-forwarding stall
    /// (measured: 10 cycles per packet of the common path).
    fn words(self) -> [u64; 7] {
        let ([a, b, c], [d, e, f]) = (self.outer.words(), self.inner.words());
        [a, b, c, d, e, f, self.tunnel]
    }

    #[inline(always)]
    fn from_words([a, b, c, d, e, f, tunnel]: [u64; 7]) -> Parsed {
        Parsed { outer: HeaderOffsets::from_words([a, b, c]), inner: HeaderOffsets::from_words([d, e, f]), tunnel }
    }

    /// Returns the outer stack.
    #[inline]
    pub fn outer(&self) -> &HeaderOffsets {
        &self.outer
    }

    /// Returns the inner stack, if the frame has a tunnel and all inner headers are valid.
    #[inline]
    pub fn inner(&self) -> Option<&HeaderOffsets> {
        (self.tunnel & word::INNER != 0).then_some(&self.inner)
    }

    /// Returns the outer stack (level 0) or the inner stack (level 1).
    #[inline]
    pub fn stack(&self, level: usize) -> Option<&HeaderOffsets> {
        match level {
            0 => Some(&self.outer),
            1 => self.inner(),
            _ => None,
        }
    }

    /// Returns the tunnel type that the UDP port or the IP protocol names, even if the tunnel header is
    /// invalid.
    #[inline]
    pub fn tunnel(&self) -> Tunnel {
        Tunnel::from_bits((self.tunnel >> 24) as u8)
    }

    /// Returns the tunnel at the end of a stack (0: outer, 1: inner). [`Tunnel::None`] if its header is
    /// invalid.
    #[inline]
    pub fn tunnel_of(&self, level: usize) -> Tunnel {
        match level {
            0 if self.tunnel & word::TUNNEL_VALID != 0 => self.tunnel(),
            1 => Tunnel::from_bits((self.tunnel >> 48) as u8),
            _ => Tunnel::None,
        }
    }

    /// True if the tunnel at the end of that stack has a valid label stack after its UDP or GRE header.
    #[inline]
    pub fn has_tunnel_labels(&self, level: usize) -> bool {
        match level {
            0 => self.tunnel & word::LABELS != 0,
            1 => self.tunnel & word::INNER_LABELS != 0,
            _ => false,
        }
    }

    /// Returns the start of the tunnel header, if the frame has a tunnel. If the inner stack is valid, the
    /// header ends where [`Parsed::inner`] starts. The header of IP in IP is empty.
    pub fn tunnel_header(&self) -> Option<usize> {
        match self.tunnel() {
            Tunnel::None => None,
            Tunnel::Gre => Some(self.outer.l4()),
            Tunnel::Mpls if self.outer.l3_type() == L3Type::Other => Some(self.outer.labels().start),
            _ => Some(self.outer.payload()),
        }
    }

    /// Returns the VNI of VXLAN, of GENEVE, and of VXLAN-GPE if its I flag is set. The tunnel header must be
    /// valid; the inner frame need not be.
    #[inline]
    pub fn vni(&self) -> Option<Vni> {
        (self.tunnel & word::VNI_KNOWN != 0).then_some(Vni::from_low_bits(self.tunnel as u32))
    }

    /// Returns the error in the tunnel or in the inner frame. The outer stack is valid: only a tunnel
    /// endpoint has to drop the frame.
    #[inline]
    pub fn tunnel_error(&self) -> Option<ParseError> {
        ParseError::ALL.get(usize::from((self.tunnel >> 40) as u8).wrapping_sub(1)).copied()
    }

    /// Returns the innermost valid stack, which an endpoint would deliver.
    #[inline]
    pub fn innermost(&self) -> &HeaderOffsets {
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

/// Parser options: recognised tunnels and strictness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parser {
    /// The recognised tunnels.
    pub tunnels: Tunnels,
    /// If true, IPv4 header checksums are verified, in the inner stack too.
    pub verify_ipv4: bool,
}

impl Default for Parser {
    /// Recognises all tunnels on their IANA ports and verifies IPv4 header checksums.
    fn default() -> Self {
        Parser { tunnels: Tunnels::ALL, verify_ipv4: true }
    }
}

/// Parses a frame with the default parser; see [`Parser::parse`].
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

    /// Parses a packet of `total` bytes whose first buffer is `head`.
    #[inline]
    pub fn parse_chain(&self, head: &[u8], total: usize) -> Result<Parsed, ParseError> {
        let end = total.max(head.len());
        let Some(outer) = self.parse_common(head, 0, end) else {
            let outer = HeaderOffsets::from_words(self.parse_general(head, 0, end)?);
            if self.has_no_tunnel(head, &outer) {
                return Ok(Parsed { outer, ..Parsed::default() });
            }
            return Ok(Parsed::from_words(self.parse_tunnel(head, &outer)));
        };
        if outer.port == NOT_UDP || !self.tunnels.any_on(outer.port) {
            return Ok(Parsed { outer: outer.layers, ..Parsed::default() });
        }
        match self.parse_common_vxlan(head, &outer) {
            Some(parsed) => Ok(parsed),
            None => Ok(Parsed::from_words(self.parse_tunnel(head, &outer.layers))),
        }
    }

    /// Parses VXLAN whose outer and inner stacks both are of the common form. Returns `None` for all others.
    #[inline(always)]
    fn parse_common_vxlan(&self, head: &[u8], outer: &Common) -> Option<Parsed> {
        let header: &[u8; vxlan::HEADER_LEN] = head.get(outer.payload..)?.first_chunk()?;
        if !self.tunnels.is_vxlan(outer.port) || header[0] & vxlan::FLAG_VNI == 0 {
            return None;
        }
        let inner = self.parse_common(head, outer.payload + vxlan::HEADER_LEN, outer.payload_end)?;
        if self.tunnels.any_on(inner.port) {
            return None;
        }
        let vni = u64::from(u32::from_be_bytes(get::<4, 4, 8>(header)) >> 8);
        const VXLAN: u64 = (Tunnel::Vxlan as u64) << 24 | word::VNI_KNOWN | word::TUNNEL_VALID | word::INNER;
        Some(Parsed { outer: outer.layers, inner: inner.layers, tunnel: VXLAN | vni })
    }

    /// Parses the tunnel of a frame whose outer stack is valid.
    #[inline(never)]
    fn parse_tunnel(&self, head: &[u8], outer: &HeaderOffsets) -> [u64; 7] {
        let carried = self.tunnel_info(head, outer);
        let mut parsed = Parsed { outer: *outer, ..Parsed::default() };
        if carried.tunnel == Tunnel::None {
            return parsed.words();
        }
        let mut error = carried.error;
        parsed.tunnel = (carried.tunnel as u64) << 24;
        if let Some(vni) = carried.vni {
            parsed.tunnel |= word::VNI_KNOWN | u64::from(vni.get());
        }
        if carried.header_valid {
            parsed.tunnel |= word::TUNNEL_VALID;
        }
        if carried.labels {
            parsed.tunnel |= word::LABELS;
        }
        match carried.inside.map(|inside| self.parse_inner(head, inside)) {
            None => {}
            Some(Ok(inner)) => {
                parsed.inner = inner;
                parsed.tunnel |= word::INNER;
                if !self.has_no_tunnel(head, &inner) {
                    parsed.tunnel |= self.inner_tunnel(head, &inner);
                }
            }
            Some(Err(inner)) => error = Some(inner),
        }
        if let Some(error) = error {
            parsed.tunnel |= (error as u64 + 1) << 40;
        }
        parsed.words()
    }

    /// Returns the bits of [`Parsed`]'s last word for the tunnel header at the end of the inner stack.
    #[inline(never)]
    fn inner_tunnel(&self, head: &[u8], inner: &HeaderOffsets) -> u64 {
        let carried = self.tunnel_info(head, inner);
        let tunnel = if carried.header_valid { (carried.tunnel as u64) << 48 } else { 0 };
        tunnel | if carried.labels { word::INNER_LABELS } else { 0 }
    }

    /// Parses an inner stack without its own tunnel.
    fn parse_inner(
        &self,
        head: &[u8],
        InnerStack { start, end, first }: InnerStack,
    ) -> Result<HeaderOffsets, ParseError> {
        let at = Bytes { head, end };
        let l3 = offset(start)?;
        let mut layers = HeaderFields {
            l2: l3,
            l3,
            l4: l3,
            payload: l3,
            stack_flags: stack_flag::NO_ETHERNET,
            ..HeaderFields::default()
        };
        match first {
            FirstHeader::Ethernet => return self.parse_stack(head, start, end),
            FirstHeader::Ipv4 => {
                layers.ethertype = EtherType::IPV4.0;
                self.ipv4(at, start, &mut layers)?;
            }
            FirstHeader::Ipv6 => {
                layers.ethertype = EtherType::IPV6.0;
                ip::ipv6(at, start, &mut layers)?;
            }
        }
        Ok(layers.pack())
    }

    /// Parses the Ethernet stack from `start` to `end`, without its tunnel.
    #[inline(always)]
    pub fn parse_stack(&self, head: &[u8], start: usize, end: usize) -> Result<HeaderOffsets, ParseError> {
        match self.parse_common(head, start, end) {
            Some(common) => Ok(common.layers),
            None => self.parse_general(head, start, end).map(HeaderOffsets::from_words),
        }
    }

    /// Parses the common form: Ethernet, IPv4 with 20 bytes of header, not fragmented, UDP or TCP. Returns
    /// `None` for all others and for invalid headers.
    #[inline(always)]
    fn parse_common(&self, head: &[u8], start: usize, end: usize) -> Option<Common> {
        const UDP_END: usize = ethernet::HEADER_LEN + ipv4::HEADER_LEN + udp::HEADER_LEN;
        let bytes = head.get(start..)?;
        let h = bytes.first_chunk::<UDP_END>()?;
        let length = usize::from(be16::<16, UDP_END>(h));
        let packet_end = start + ethernet::HEADER_LEN + length;
        let plain =
            u32::from_be_bytes(get::<12, 4, UDP_END>(h)) >> 8 == 0x08_0045 && be16::<20, UDP_END>(h) & 0x3fff == 0;
        // One bound for all offsets below, so that none can overflow 16 bits.
        if !plain || packet_end > end || start > usize::from(u16::MAX) - 0x100 {
            return None;
        }
        if self.verify_ipv4 && !ip::header_sum_is_valid(&get::<14, 20, UDP_END>(h)) {
            return None;
        }
        let protocol = h[23];
        let payload = start + UDP_END;
        let (l4_type, l4_len, port, payload_end) = match IpProtocol(protocol) {
            IpProtocol::UDP => {
                let udp_len = usize::from(be16::<38, UDP_END>(h));
                if udp_len < udp::HEADER_LEN || udp_len + ipv4::HEADER_LEN > length {
                    return None;
                }
                let port = u32::from(be16::<36, UDP_END>(h));
                (L4Type::Udp, udp::HEADER_LEN, port, payload - udp::HEADER_LEN + udp_len)
            }
            IpProtocol::TCP => {
                let offset = usize::from(*bytes.get(46)? >> 4) * 4;
                if offset < tcp::HEADER_LEN || offset + ipv4::HEADER_LEN > length || 34 + offset > bytes.len() {
                    return None;
                }
                (L4Type::Tcp, offset, NOT_UDP, packet_end)
            }
            _ => return None,
        };
        let layers = HeaderOffsets::ipv4_plain(start, packet_end, protocol, l4_type, l4_len);
        Some(Common { layers, port, payload, payload_end })
    }

    /// Parses a stack of any form.
    #[inline(never)]
    fn parse_general(&self, head: &[u8], start: usize, end: usize) -> Result<[u64; 3], ParseError> {
        let at = Bytes { head, end };
        let header: &[u8; ethernet::HEADER_LEN] = at.header(start, ParseError::EthernetTruncated)?;
        let mut ethertype = be16::<12, { ethernet::HEADER_LEN }>(header);
        let mut layers = HeaderFields { l2: offset(start)?, ..HeaderFields::default() };
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
        layers.set_l3(offset(l3)?);
        layers.end = u32::try_from(end).unwrap_or(u32::MAX);
        match EtherType(ethertype) {
            EtherType::IPV4 => self.ipv4(at, l3, &mut layers)?,
            EtherType::IPV6 => ip::ipv6(at, l3, &mut layers)?,
            EtherType::ARP => {
                let header: &[u8; arp::HEADER_LEN] = at.header(l3, ParseError::ArpTruncated)?;
                if arp::is_known(header) {
                    layers.l3_type = L3Type::Arp;
                    layers.payload = offset(l3 + arp::HEADER_LEN)?;
                }
            }
            EtherType::MPLS | EtherType::MPLS_UPSTREAM => self.parse_mpls(at, l3, &mut layers)?,
            _ => {}
        }
        Ok(layers.pack().words())
    }

    /// Parses labels after Ethernet, and the IP packet after them if there is one.
    ///
    /// An error here is not an error of the frame, which is forwarded by its addresses or its top label. The
    /// error is ignored here. The tunnel parser finds it again.
    fn parse_mpls(&self, at: Bytes<'_>, l3: usize, layers: &mut HeaderFields) -> Result<(), ParseError> {
        let split = |error| if error == ParseError::HeaderSplit { Err(error) } else { Ok(()) };
        let l3 = match tunnel::mpls_end(at, l3) {
            Ok(end) => end,
            Err(error) => return split(error),
        };
        layers.set_l3(offset(l3)?);
        layers.stack_flags |= stack_flag::LABELS;
        let mut found = *layers;
        let tried = match tunnel::after_labels(at, l3) {
            Ok(Some(InnerStack { first: FirstHeader::Ipv4, .. })) => self.ipv4(at, l3, &mut found),
            Ok(Some(InnerStack { first: FirstHeader::Ipv6, .. })) => ip::ipv6(at, l3, &mut found),
            Ok(_) => return Ok(()),
            Err(error) => return split(error),
        };
        match tried {
            Ok(()) => *layers = found,
            Err(error) => return split(error),
        }
        Ok(())
    }
}

/// Result of [`Parser::parse_common`].
struct Common {
    layers: HeaderOffsets,
    /// UDP destination port, or [`NOT_UDP`].
    port: u32,
    /// Start and end of the UDP payload.
    payload: usize,
    payload_end: usize,
}

/// Marker in place of a UDP port. It is above all port numbers.
const NOT_UDP: u32 = 0x1_0000;

/// Bytes of the first buffer, and the end of the packet (possibly in a later buffer).
#[derive(Clone, Copy)]
struct Bytes<'a> {
    head: &'a [u8],
    end: usize,
}

impl<'a> Bytes<'a> {
    /// Returns the `N` bytes at `at`. The error is `short` if the packet ends before them, and `HeaderSplit`
    /// if only the buffer does.
    #[inline(always)]
    fn header<const N: usize>(&self, at: usize, short: ParseError) -> Result<&'a [u8; N], ParseError> {
        if at + N > self.end {
            return Err(short);
        }
        self.head.get(at..).and_then(|b| b.first_chunk()).ok_or(ParseError::HeaderSplit)
    }

    /// Returns the `len` bytes at `at`.
    #[inline(always)]
    fn bytes(&self, at: usize, len: usize, short: ParseError) -> Result<&'a [u8], ParseError> {
        if at + len > self.end {
            return Err(short);
        }
        self.head.get(at..at + len).ok_or(ParseError::HeaderSplit)
    }
}

/// Converts a header offset to 16 bits. Real packets have no headers beyond 64 KiB: a superframe is long only
/// in its payload.
#[inline(always)]
fn offset(at: usize) -> Result<u16, ParseError> {
    u16::try_from(at).map_err(|_| ParseError::HeaderSplit)
}
