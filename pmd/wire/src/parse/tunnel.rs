//! Tunnels: which ones the parser recognises, and what their headers carry.

use super::{Bytes, HeaderOffsets, L3Type, L4Type, Parser};
use crate::ethernet::EtherType;
use crate::field::{be16, get};
use crate::ip::IpProtocol;
use crate::vxlan::{self, Vni};
use crate::{ParseError, geneve, gre, mpls, udp, vxlan_gpe};

/// Type of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Tunnel {
    /// No tunnel.
    #[default]
    None,
    /// VXLAN (RFC 7348).
    Vxlan,
    /// VXLAN-GPE (draft-ietf-nvo3-vxlan-gpe).
    VxlanGpe,
    /// GENEVE (RFC 8926).
    Geneve,
    /// GRE (RFC 2784, RFC 2890), including NVGRE (RFC 7637). An MPLS label stack may follow (RFC 4023).
    Gre,
    /// A label stack in UDP (RFC 7510), or a label stack after Ethernet that carries Ethernet (RFC 4448
    /// without control word).
    Mpls,
    /// IP (RFC 2003, RFC 2473, RFC 4213) or Ethernet (RFC 8986 section 10.1) directly in IP, without a header of its
    /// own. A segment routing header may precede it.
    Ip,
}

impl Tunnel {
    #[inline]
    pub(super) const fn from_bits(bits: u8) -> Tunnel {
        match bits {
            1 => Tunnel::Vxlan,
            2 => Tunnel::VxlanGpe,
            3 => Tunnel::Geneve,
            4 => Tunnel::Gre,
            5 => Tunnel::Mpls,
            6 => Tunnel::Ip,
            _ => Tunnel::None,
        }
    }
}

/// Set of tunnels that the parser recognises, with their UDP destination ports.
///
/// ```
/// use wirepath_wire::{Parser, Tunnels};
/// // VXLAN on the default port of Linux, all other tunnels on their IANA ports.
/// let parser = Parser { tunnels: Tunnels::default().with_vxlan(Some(8472)), ..Parser::default() };
/// // VXLAN only.
/// let vxlan = Parser { tunnels: Tunnels::NONE.with_vxlan(Some(4789)), ..parser };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnels {
    /// Ports of VXLAN, VXLAN-GPE, GENEVE and MPLS; [`UNUSED_PORT`] for tunnels that are not recognised.
    ports: [u32; 4],
    gre: bool,
    ip: bool,
    ethernet_in_mpls: bool,
}

/// Marker for "no port". It is above all port numbers.
const UNUSED_PORT: u32 = u32::MAX;

impl Tunnels {
    /// No tunnels.
    pub const NONE: Tunnels = Tunnels { ports: [UNUSED_PORT; 4], gre: false, ip: false, ethernet_in_mpls: false };

    /// All tunnels: VXLAN on 4789, VXLAN-GPE on 4790, GENEVE on 6081, MPLS on 6635, GRE, IP or Ethernet in IP,
    /// Ethernet in MPLS.
    pub const ALL: Tunnels = Tunnels { gre: true, ip: true, ethernet_in_mpls: true, ..Tunnels::NONE }
        .with_vxlan(Some(vxlan::PORT))
        .with_vxlan_gpe(Some(vxlan_gpe::PORT))
        .with_geneve(Some(geneve::PORT))
        .with_mpls(Some(mpls::PORT));

    const fn with(mut self, index: usize, port: Option<u16>) -> Tunnels {
        self.ports[index] = match port {
            Some(port) => port as u32,
            None => UNUSED_PORT,
        };
        self
    }

    /// Sets the port of VXLAN; `None` disables it.
    pub const fn with_vxlan(self, port: Option<u16>) -> Tunnels {
        self.with(0, port)
    }

    /// Sets the port of VXLAN-GPE; `None` disables it.
    pub const fn with_vxlan_gpe(self, port: Option<u16>) -> Tunnels {
        self.with(1, port)
    }

    /// Sets the port of GENEVE; `None` disables it.
    pub const fn with_geneve(self, port: Option<u16>) -> Tunnels {
        self.with(2, port)
    }

    /// Sets the port of label stacks in UDP; `None` disables them.
    pub const fn with_mpls(self, port: Option<u16>) -> Tunnels {
        self.with(3, port)
    }

    /// Enables or disables the inner stack of GRE. The GRE header is layer 4 and is found in any case.
    pub const fn with_gre(mut self, wanted: bool) -> Tunnels {
        self.gre = wanted;
        self
    }

    /// Enables or disables IP and Ethernet in IP.
    pub const fn with_ip(mut self, wanted: bool) -> Tunnels {
        self.ip = wanted;
        self
    }

    /// Enables or disables the Ethernet frames that label stacks after Ethernet carry.
    pub const fn with_ethernet_in_mpls(mut self, wanted: bool) -> Tunnels {
        self.ethernet_in_mpls = wanted;
        self
    }

    /// Returns the tunnel on a UDP port. If several use the port, the first in the order of [`Tunnel`] wins.
    pub fn on_port(&self, port: u16) -> Tunnel {
        const KINDS: [Tunnel; 4] = [Tunnel::Vxlan, Tunnel::VxlanGpe, Tunnel::Geneve, Tunnel::Mpls];
        let found = self.ports.iter().zip(KINDS).find(|(known, _)| **known == u32::from(port));
        found.map_or(Tunnel::None, |(_, kind)| kind)
    }

    /// Returns the UDP port of a tunnel, if the tunnel is enabled and uses UDP.
    pub fn port_of(&self, tunnel: Tunnel) -> Option<u16> {
        let at = match tunnel {
            Tunnel::Vxlan => 0,
            Tunnel::VxlanGpe => 1,
            Tunnel::Geneve => 2,
            Tunnel::Mpls => 3,
            _ => return None,
        };
        u16::try_from(self.ports[at]).ok()
    }

    /// True if a tunnel uses this port. Callers pass a value above 16 bits if there is no port.
    #[inline(always)]
    pub(super) const fn any_on(&self, port: u32) -> bool {
        // No branches: this compiles to one vector comparison.
        let [a, b, c, d] = self.ports;
        (a == port) | (b == port) | (c == port) | (d == port)
    }

    #[inline(always)]
    pub(super) const fn is_vxlan(&self, port: u32) -> bool {
        self.ports[0] == port
    }
}

impl Default for Tunnels {
    fn default() -> Tunnels {
        Tunnels::ALL
    }
}

/// Tunnel at the end of a stack.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TunnelInfo {
    pub(super) tunnel: Tunnel,
    /// True if the tunnel header is valid.
    pub(super) header_valid: bool,
    /// True if a label stack follows the UDP or GRE header.
    pub(super) labels: bool,
    pub(super) vni: Option<Vni>,
    /// The inner stack, if its first header is of a recognised type.
    pub(super) inside: Option<InnerStack>,
    pub(super) error: Option<ParseError>,
}

/// Byte range and first header of an inner stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct InnerStack {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) first: FirstHeader,
}

/// First header of an inner stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstHeader {
    Ethernet,
    Ipv4,
    Ipv6,
}

impl FirstHeader {
    fn of(ethertype: EtherType) -> Option<FirstHeader> {
        match ethertype {
            EtherType::TRANSPARENT_ETHERNET => Some(FirstHeader::Ethernet),
            EtherType::IPV4 => Some(FirstHeader::Ipv4),
            EtherType::IPV6 => Some(FirstHeader::Ipv6),
            _ => None,
        }
    }
}

impl TunnelInfo {
    fn broken(tunnel: Tunnel, error: ParseError) -> TunnelInfo {
        TunnelInfo { tunnel, error: Some(error), ..TunnelInfo::default() }
    }

    fn valid(tunnel: Tunnel, vni: Option<Vni>, inside: Option<InnerStack>) -> TunnelInfo {
        TunnelInfo { tunnel, header_valid: true, vni, inside, ..TunnelInfo::default() }
    }
}

impl Parser {
    /// True if a cheap check shows that the stack has no tunnel, as for most packets.
    #[inline(always)]
    pub(super) fn has_no_tunnel(&self, head: &[u8], layers: &HeaderOffsets) -> bool {
        match layers.l4_type() {
            L4Type::Tcp | L4Type::Icmpv4 | L4Type::Icmpv6 | L4Type::Esp => true,
            L4Type::Udp => match head.get(layers.l4()..).and_then(|b| b.first_chunk::<4>()) {
                Some(h) => !self.tunnels.any_on(u32::from(be16::<2, 4>(h))),
                None => true,
            },
            L4Type::None => !layers.ethertype().is_mpls(),
            L4Type::Other | L4Type::Gre => false,
        }
    }

    /// Returns the tunnel at the end of the stack. Fragments have none.
    #[inline(always)]
    pub(super) fn tunnel_info(&self, head: &[u8], layers: &HeaderOffsets) -> TunnelInfo {
        let mut at = Bytes { head, end: layers.end() };
        if layers.is_fragment() {
            return TunnelInfo::default();
        }
        match (layers.l3_type(), layers.l4_type()) {
            (L3Type::Other, _) if layers.ethertype().is_mpls() && self.tunnels.ethernet_in_mpls => {
                self.mpls_after_ethernet(at, layers)
            }
            (_, L4Type::Udp) => {
                // The datagram may end before the packet. Its length was checked to be at least 8.
                let Ok(header) = at.header::<{ udp::HEADER_LEN }>(layers.l4(), ParseError::UdpTruncated) else {
                    return TunnelInfo::default();
                };
                at.end = at.end.min(layers.l4() + usize::from(be16::<4, 8>(header)));
                match self.tunnels.on_port(be16::<2, 8>(header)) {
                    Tunnel::None => Ok(TunnelInfo::default()),
                    Tunnel::Vxlan => vxlan(at, layers.payload()),
                    Tunnel::VxlanGpe => gpe(at, layers.payload()),
                    Tunnel::Geneve => geneve(at, layers.payload()),
                    _ => {
                        let found = mpls_in_tunnel(at, layers.payload(), Tunnel::Mpls);
                        Ok(TunnelInfo { header_valid: found.labels, ..found })
                    }
                }
                .unwrap_or_else(|error| TunnelInfo::broken(self.tunnels.on_port(be16::<2, 8>(header)), error))
            }
            (_, L4Type::Gre) if self.tunnels.gre => gre(at, layers),
            (_, L4Type::Other) => match layers.protocol() {
                IpProtocol::GRE if self.tunnels.gre => TunnelInfo::broken(Tunnel::Gre, ParseError::GreTruncated),
                protocol @ (IpProtocol::IPV4 | IpProtocol::IPV6 | IpProtocol::ETHERNET) if self.tunnels.ip => {
                    let first = match protocol {
                        IpProtocol::IPV4 => FirstHeader::Ipv4,
                        IpProtocol::IPV6 => FirstHeader::Ipv6,
                        _ => FirstHeader::Ethernet,
                    };
                    let inside = InnerStack { start: layers.l4(), end: at.end, first };
                    TunnelInfo::valid(Tunnel::Ip, None, Some(inside))
                }
                _ => TunnelInfo::default(),
            },
            _ => TunnelInfo::default(),
        }
    }

    /// Returns the tunnel of labels after Ethernet whose payload is not a valid IP packet.
    fn mpls_after_ethernet(&self, at: Bytes<'_>, layers: &HeaderOffsets) -> TunnelInfo {
        if !layers.has_labels() {
            let error = mpls_end(at, layers.l3()).err();
            return TunnelInfo { tunnel: Tunnel::Mpls, error, ..TunnelInfo::default() };
        }
        match after_labels(at, layers.l3()) {
            Ok(Some(inside)) if inside.first == FirstHeader::Ethernet => {
                TunnelInfo::valid(Tunnel::Mpls, None, Some(inside))
            }
            // The outer stack would include the IP packet if it were valid: report its error.
            Ok(Some(inside)) => {
                let error = self.parse_inner(at.head, inside).err();
                TunnelInfo { error, ..TunnelInfo::valid(Tunnel::Mpls, None, None) }
            }
            Ok(None) => TunnelInfo::valid(Tunnel::Mpls, None, None),
            Err(error) => TunnelInfo { error: Some(error), ..TunnelInfo::valid(Tunnel::Mpls, None, None) },
        }
    }
}

fn vxlan(at: Bytes<'_>, start: usize) -> Result<TunnelInfo, ParseError> {
    let h: &[u8; vxlan::HEADER_LEN] = at.header(start, ParseError::VxlanTruncated)?;
    if h[0] & vxlan::FLAG_VNI == 0 {
        return Err(ParseError::VxlanBadFlags);
    }
    let inside = InnerStack { start: start + vxlan::HEADER_LEN, end: at.end, first: FirstHeader::Ethernet };
    Ok(TunnelInfo::valid(Tunnel::Vxlan, Some(vni(h)), Some(inside)))
}

/// Returns the VNI, which lies at the same offset in VXLAN, VXLAN-GPE and GENEVE.
fn vni(h: &[u8; 8]) -> Vni {
    Vni::from_low_bits(u32::from_be_bytes(get::<4, 4, 8>(h)) >> 8)
}

fn gpe(at: Bytes<'_>, start: usize) -> Result<TunnelInfo, ParseError> {
    let h: &[u8; vxlan_gpe::HEADER_LEN] = at.header(start, ParseError::VxlanGpeTruncated)?;
    if h[0] & vxlan_gpe::FLAGS_VERSION != 0 {
        return Err(ParseError::VxlanGpeBadVersion);
    }
    let vni = (h[0] & vxlan_gpe::FLAG_VNI != 0).then(|| vni(h));
    let first = match vxlan_gpe::NextProtocol(h[3]) {
        _ if h[0] & vxlan_gpe::FLAG_NEXT == 0 => None,
        vxlan_gpe::NextProtocol::IPV4 => Some(FirstHeader::Ipv4),
        vxlan_gpe::NextProtocol::IPV6 => Some(FirstHeader::Ipv6),
        vxlan_gpe::NextProtocol::ETHERNET => Some(FirstHeader::Ethernet),
        _ => None,
    };
    let inside = first.map(|first| InnerStack { start: start + vxlan_gpe::HEADER_LEN, end: at.end, first });
    Ok(TunnelInfo::valid(Tunnel::VxlanGpe, vni, inside))
}

fn geneve(at: Bytes<'_>, start: usize) -> Result<TunnelInfo, ParseError> {
    let h: &[u8; geneve::HEADER_LEN] = at.header(start, ParseError::GeneveTruncated)?;
    if h[0] >> 6 != 0 {
        return Err(ParseError::GeneveBadVersion);
    }
    let options = usize::from(h[0] & 0x3f) * 4;
    let bytes = at.bytes(start + geneve::HEADER_LEN, options, ParseError::GeneveTruncated)?;
    for option in geneve::Options::of(bytes) {
        option?;
    }
    let start = start + geneve::HEADER_LEN + options;
    let inside = FirstHeader::of(EtherType(be16::<2, 8>(h))).map(|first| InnerStack { start, end: at.end, first });
    Ok(TunnelInfo::valid(Tunnel::Geneve, Some(vni(h)), inside))
}

fn gre(at: Bytes<'_>, layers: &HeaderOffsets) -> TunnelInfo {
    let Ok(h) = at.header::<{ gre::HEADER_LEN }>(layers.l4(), ParseError::GreTruncated) else {
        return TunnelInfo::broken(Tunnel::Gre, ParseError::GreTruncated);
    };
    if be16::<0, 4>(h) & gre::MUST_BE_ZERO != 0 {
        // The header is present, but what follows it is unknown.
        let header = TunnelInfo::valid(Tunnel::Gre, None, None);
        return TunnelInfo { error: Some(ParseError::GreBadFlags), ..header };
    }
    let start = layers.payload();
    let ethertype = EtherType(be16::<2, 4>(h));
    if ethertype.is_mpls() {
        return mpls_in_tunnel(at, start, Tunnel::Gre);
    }
    let inside = FirstHeader::of(ethertype).map(|first| InnerStack { start, end: at.end, first });
    TunnelInfo::valid(Tunnel::Gre, None, inside)
}

/// Returns the tunnel of a label stack at `start`. The header before it is valid.
fn mpls_in_tunnel(at: Bytes<'_>, start: usize, tunnel: Tunnel) -> TunnelInfo {
    let carried = TunnelInfo::valid(tunnel, None, None);
    match mpls_end(at, start) {
        Ok(end) => match after_labels(at, end) {
            Ok(inside) => TunnelInfo { labels: true, inside, ..carried },
            Err(error) => TunnelInfo { labels: true, error: Some(error), ..carried },
        },
        Err(error) => TunnelInfo { error: Some(error), ..carried },
    }
}

/// Returns the end of the label stack at `start`, after the entry with the bottom-of-stack bit.
pub(super) fn mpls_end(at: Bytes<'_>, start: usize) -> Result<usize, ParseError> {
    for nth in 0..mpls::MAX_ENTRIES {
        let entry: &[u8; mpls::HEADER_LEN] = at.header(start + nth * mpls::HEADER_LEN, ParseError::MplsTruncated)?;
        if entry[2] & 1 != 0 {
            return Ok(start + (nth + 1) * mpls::HEADER_LEN);
        }
    }
    Err(ParseError::MplsTooDeep)
}

/// Returns the stack after a label stack. Only the first four bits tell its type (RFC 4928 section 2): 4 and
/// 6 are IP, all others are treated as Ethernet. `None` if nothing follows.
pub(super) fn after_labels(at: Bytes<'_>, start: usize) -> Result<Option<InnerStack>, ParseError> {
    if start >= at.end {
        return Ok(None);
    }
    let [byte]: &[u8; 1] = at.header(start, ParseError::MplsTruncated)?;
    let first = match byte >> 4 {
        4 => FirstHeader::Ipv4,
        6 => FirstHeader::Ipv6,
        _ => FirstHeader::Ethernet,
    };
    Ok(Some(InnerStack { start, end: at.end, first }))
}

/// Returns the length of the GRE header at `start`, with the optional fields that its flags announce.
pub(super) fn gre_len(at: Bytes<'_>, start: usize) -> Result<usize, ParseError> {
    let h: &[u8; gre::HEADER_LEN] = at.header(start, ParseError::GreTruncated)?;
    let len = gre::HEADER_LEN + gre::options_len(be16::<0, 4>(h));
    at.bytes(start, len, ParseError::GreTruncated)?;
    Ok(len)
}
