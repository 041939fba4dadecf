//! One pass over a frame: where each header lies and what it is. No copy, no allocation, no panic.
//!
//! [`parse`] looks through a frame's own stack and the one inside its tunnel:
//! - a stack is Ethernet, up to two VLAN tags, an MPLS label stack, ARP or IPv4 with options and fragments or IPv6 with
//!   extension headers, and TCP, UDP, ICMP, ICMPv6, ESP or GRE. Layer-4 headers are not looked for in later fragments,
//!   tunnels in no fragment;
//! - a tunnel is VXLAN, VXLAN-GPE, GENEVE or a label stack on their UDP ports, GRE, GRE with a label stack, IP in IP, or
//!   Ethernet behind labels behind Ethernet. The stack inside begins with Ethernet or with IP;
//! - of the stack inside, the tunnel header that ends it is looked at, but not what that carries.
//!
//! Nothing tells what lies behind a label stack but the first four bits (RFC 4928 section 2): 4 is IPv4, 6 is IPv6, and
//! all else is taken for Ethernet. Control words are therefore not known.
//!
//! What it returns is `Copy` and fits a cache line.
//!
//! A frame is refused for what is wrong with its own stack up to layer 4. What is wrong with its tunnel, or behind its
//! labels, is [`Parsed::tunnel_error`]: the frame itself can be forwarded.
//!
//! A packet may consist of several buffers: [`Parser::parse_chain`] takes the first and the length of all. Headers must
//! lie in the first one; [`ParseError::HeaderSplit`] says that they do not.

mod ip;
mod layers;
mod tunnel;

use layers::{Found, flag, shape};
pub use layers::{L3, L4, Layers, extension};
use tunnel::{First, Inside};
pub use tunnel::{Tunnel, Tunnels};

use core::fmt;

use crate::ethernet::{self, EtherType};
use crate::field::{be16, get};
use crate::ip::IpProtocol;
use crate::vxlan::{self, Vni};
use crate::{ParseError, arp, ipv4, tcp, udp};

/// Where the headers of a frame lie. Seven words.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Parsed {
    outer: Layers,
    inner: Layers,
    /// VNI (24 bits), kind of tunnel (8), [`word`] flags (8), error's index plus one (8), kind of the inner stack's tunnel
    /// (8), whether it has labels (1).
    tunnel: u64,
}

/// Flags of [`Parsed`]'s last word.
mod word {
    pub(super) const VNI_KNOWN: u64 = 1 << 32;
    pub(super) const IN_ORDER: u64 = 1 << 33;
    pub(super) const INNER: u64 = 1 << 34;
    pub(super) const LABELS: u64 = 1 << 35;
    pub(super) const INNER_LABELS: u64 = 1 << 56;
}

impl Parsed {
    /// How functions that are not inlined return it. As a `Parsed` the compiler would join it in memory with what the common path
    /// has in registers, and read that in vectors right after it was written in words: a store-forwarding stall (measured: 10
    /// cycles per packet of the common path).
    fn words(self) -> [u64; 7] {
        let ([a, b, c], [d, e, f]) = (self.outer.words(), self.inner.words());
        [a, b, c, d, e, f, self.tunnel]
    }

    #[inline(always)]
    fn from_words([a, b, c, d, e, f, tunnel]: [u64; 7]) -> Parsed {
        Parsed { outer: Layers::from_words([a, b, c]), inner: Layers::from_words([d, e, f]), tunnel }
    }

    /// The frame's own stack.
    #[inline]
    pub fn outer(&self) -> &Layers {
        &self.outer
    }

    /// The stack inside the tunnel, if there is a tunnel and its headers are in order.
    #[inline]
    pub fn inner(&self) -> Option<&Layers> {
        (self.tunnel & word::INNER != 0).then_some(&self.inner)
    }

    /// The frame's own stack (0) or the one inside its tunnel (1).
    #[inline]
    pub fn stack(&self, level: usize) -> Option<&Layers> {
        match level {
            0 => Some(&self.outer),
            1 => self.inner(),
            _ => None,
        }
    }

    /// The kind of tunnel whose UDP port (or protocol) the frame has, in order or not.
    #[inline]
    pub fn tunnel(&self) -> Tunnel {
        Tunnel::from_bits((self.tunnel >> 24) as u8)
    }

    /// The tunnel that ends a stack: 0 the frame's own, 1 the inner one. [`Tunnel::None`] unless its header is in order.
    #[inline]
    pub fn tunnel_of(&self, level: usize) -> Tunnel {
        match level {
            0 if self.tunnel & word::IN_ORDER != 0 => self.tunnel(),
            1 => Tunnel::from_bits((self.tunnel >> 48) as u8),
            _ => Tunnel::None,
        }
    }

    /// Whether that tunnel has a label stack in order behind its UDP or GRE header.
    #[inline]
    pub fn has_tunnel_labels(&self, level: usize) -> bool {
        match level {
            0 => self.tunnel & word::LABELS != 0,
            1 => self.tunnel & word::INNER_LABELS != 0,
            _ => false,
        }
    }

    /// Start of the tunnel header, if there is a tunnel. If what it carries is in order it ends where [`Parsed::inner`]
    /// begins; that of IP in IP is empty.
    pub fn tunnel_header(&self) -> Option<usize> {
        match self.tunnel() {
            Tunnel::None => None,
            Tunnel::Gre => Some(self.outer.l4()),
            Tunnel::Mpls if self.outer.l3_kind() == L3::Other => Some(self.outer.labels().start),
            _ => Some(self.outer.payload()),
        }
    }

    /// Network identifier of VXLAN, VXLAN-GPE (if its flag says that it is valid) and GENEVE, if the header is in order
    /// (the inner frame need not be).
    #[inline]
    pub fn vni(&self) -> Option<Vni> {
        (self.tunnel & word::VNI_KNOWN != 0).then_some(Vni::from_low_bits(self.tunnel as u32))
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
    /// Which tunnels are looked into.
    pub tunnels: Tunnels,
    /// Whether IPv4 header checksums are verified, inside the tunnel too.
    pub verify_ipv4: bool,
}

impl Default for Parser {
    /// All tunnels on the ports that IANA assigned, IPv4 header checksums verified.
    fn default() -> Self {
        Parser { tunnels: Tunnels::ALL, verify_ipv4: true }
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
        let end = total.max(head.len());
        let Some(outer) = self.common(head, 0, end) else {
            let outer = Layers::from_words(self.any(head, 0, end)?);
            if self.carries_nothing(head, &outer) {
                return Ok(Parsed { outer, ..Parsed::default() });
            }
            return Ok(Parsed::from_words(self.tunnelled(head, &outer)));
        };
        if outer.port == NOT_UDP || !self.tunnels.any_on(outer.port) {
            return Ok(Parsed { outer: outer.layers, ..Parsed::default() });
        }
        match self.common_vxlan(head, &outer) {
            Some(parsed) => Ok(parsed),
            None => Ok(Parsed::from_words(self.tunnelled(head, &outer.layers))),
        }
    }

    /// The common stack in VXLAN in the common stack; `None` for whatever else.
    #[inline(always)]
    fn common_vxlan(&self, head: &[u8], outer: &Common) -> Option<Parsed> {
        let header: &[u8; vxlan::HEADER_LEN] = head.get(outer.payload..)?.first_chunk()?;
        if !self.tunnels.is_vxlan(outer.port) || header[0] & vxlan::FLAG_VNI == 0 {
            return None;
        }
        let inner = self.common(head, outer.payload + vxlan::HEADER_LEN, outer.payload_end)?;
        if self.tunnels.any_on(inner.port) {
            return None;
        }
        let vni = u64::from(u32::from_be_bytes(get::<4, 4, 8>(header)) >> 8);
        const VXLAN: u64 = (Tunnel::Vxlan as u64) << 24 | word::VNI_KNOWN | word::IN_ORDER | word::INNER;
        Some(Parsed { outer: outer.layers, inner: inner.layers, tunnel: VXLAN | vni })
    }

    /// What is in a frame whose own stack is in order.
    #[inline(never)]
    fn tunnelled(&self, head: &[u8], outer: &Layers) -> [u64; 7] {
        let carried = self.carried(head, outer);
        let mut parsed = Parsed { outer: *outer, ..Parsed::default() };
        if carried.tunnel == Tunnel::None {
            return parsed.words();
        }
        let mut error = carried.error;
        parsed.tunnel = (carried.tunnel as u64) << 24;
        if let Some(vni) = carried.vni {
            parsed.tunnel |= word::VNI_KNOWN | u64::from(vni.get());
        }
        if carried.in_order {
            parsed.tunnel |= word::IN_ORDER;
        }
        if carried.labels {
            parsed.tunnel |= word::LABELS;
        }
        match carried.inside.map(|inside| self.stack(head, inside)) {
            None => {}
            Some(Ok(inner)) => {
                parsed.inner = inner;
                parsed.tunnel |= word::INNER;
                if !self.carries_nothing(head, &inner) {
                    parsed.tunnel |= self.ending(head, &inner);
                }
            }
            Some(Err(wrong)) => error = Some(wrong),
        }
        if let Some(error) = error {
            parsed.tunnel |= (error as u64 + 1) << 40;
        }
        parsed.words()
    }

    /// What [`Parsed`]'s last word says of the tunnel header that ends the inner stack.
    #[inline(never)]
    fn ending(&self, head: &[u8], inner: &Layers) -> u64 {
        let carried = self.carried(head, inner);
        let tunnel = if carried.in_order { (carried.tunnel as u64) << 48 } else { 0 };
        tunnel | if carried.labels { word::INNER_LABELS } else { 0 }
    }

    /// Parses a stack in a tunnel, its own tunnels left alone.
    fn stack(&self, head: &[u8], Inside { start, end, first }: Inside) -> Result<Layers, ParseError> {
        let at = Bytes { head, end };
        let l3 = offset(start)?;
        let mut layers = Found { l2: l3, l3, l4: l3, payload: l3, shape: shape::NO_LINK, ..Found::default() };
        match first {
            First::Ethernet => return self.layers(head, start, end),
            First::Ipv4 => {
                layers.ethertype = EtherType::IPV4.0;
                self.ipv4(at, start, &mut layers)?;
            }
            First::Ipv6 => {
                layers.ethertype = EtherType::IPV6.0;
                ip::ipv6(at, start, &mut layers)?;
            }
        }
        Ok(layers.pack())
    }

    /// Parses the Ethernet stack that starts at `start` and ends at `end`, tunnels left alone.
    #[inline(always)]
    pub fn layers(&self, head: &[u8], start: usize, end: usize) -> Result<Layers, ParseError> {
        match self.common(head, start, end) {
            Some(common) => Ok(common.layers),
            None => self.any(head, start, end).map(Layers::from_words),
        }
    }

    /// Ethernet, IPv4 of 20 bytes, not fragmented, UDP or TCP, all in order; `None` for whatever else.
    #[inline(always)]
    fn common(&self, head: &[u8], start: usize, end: usize) -> Option<Common> {
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
        let payload = start + UDP_END;
        let (l4_kind, l4_len, port, payload_end) = match IpProtocol(protocol) {
            IpProtocol::UDP => {
                let udp_len = usize::from(be16::<38, UDP_END>(h));
                if udp_len < udp::HEADER_LEN || udp_len + ipv4::HEADER_LEN > length {
                    return None;
                }
                let port = u32::from(be16::<36, UDP_END>(h));
                (L4::Udp, udp::HEADER_LEN, port, payload - udp::HEADER_LEN + udp_len)
            }
            IpProtocol::TCP => {
                let offset = usize::from(*bytes.get(46)? >> 4) * 4;
                if offset < tcp::HEADER_LEN || offset + ipv4::HEADER_LEN > length || 34 + offset > bytes.len() {
                    return None;
                }
                (L4::Tcp, offset, NOT_UDP, packet_end)
            }
            _ => return None,
        };
        let layers = Layers::ipv4_plain(start, packet_end, protocol, l4_kind, l4_len);
        Some(Common { layers, port, payload, payload_end })
    }

    /// The same for any stack.
    #[inline(never)]
    fn any(&self, head: &[u8], start: usize, end: usize) -> Result<[u64; 3], ParseError> {
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
        layers.set_l3(offset(l3)?);
        layers.end = u32::try_from(end).unwrap_or(u32::MAX);
        match EtherType(ethertype) {
            EtherType::IPV4 => self.ipv4(at, l3, &mut layers)?,
            EtherType::IPV6 => ip::ipv6(at, l3, &mut layers)?,
            EtherType::ARP => {
                let header: &[u8; arp::HEADER_LEN] = at.header(l3, ParseError::ArpTruncated)?;
                if arp::is_known(header) {
                    layers.l3_kind = L3::Arp;
                    layers.payload = offset(l3 + arp::HEADER_LEN)?;
                }
            }
            EtherType::MPLS | EtherType::MPLS_UPSTREAM => self.labelled(at, l3, &mut layers)?,
            _ => {}
        }
        Ok(layers.pack().words())
    }

    /// Labels behind Ethernet, and the IP packet behind them if there is one. What is broken here is not the frame's fault, which is
    /// forwarded by its addresses or its top label: it is left out, and found again where tunnels are looked into.
    fn labelled(&self, at: Bytes<'_>, l3: usize, layers: &mut Found) -> Result<(), ParseError> {
        let split = |error| if error == ParseError::HeaderSplit { Err(error) } else { Ok(()) };
        let l3 = match tunnel::mpls_end(at, l3) {
            Ok(end) => end,
            Err(error) => return split(error),
        };
        layers.set_l3(offset(l3)?);
        layers.shape |= shape::LABELS;
        let mut found = *layers;
        let tried = match tunnel::behind_labels(at, l3) {
            Ok(Some(Inside { first: First::Ipv4, .. })) => self.ipv4(at, l3, &mut found),
            Ok(Some(Inside { first: First::Ipv6, .. })) => ip::ipv6(at, l3, &mut found),
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

/// What [`Parser::common`] found.
struct Common {
    layers: Layers,
    /// UDP destination port, or [`NOT_UDP`].
    port: u32,
    /// Start and end of a datagram's payload.
    payload: usize,
    payload_end: usize,
}

/// No port has this number.
const NOT_UDP: u32 = 0x1_0000;

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
