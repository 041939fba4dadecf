//! Tunnels: which are looked into, and what their headers say of the stack inside.

use super::{Bytes, L3, L4, Layers, Parser};
use crate::ethernet::EtherType;
use crate::field::{be16, get};
use crate::ip::IpProtocol;
use crate::vxlan::{self, Vni};
use crate::{ParseError, geneve, gre, mpls, udp, vxlan_gpe};

/// A tunnel inside a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Tunnel {
    /// None.
    #[default]
    None,
    /// VXLAN (RFC 7348).
    Vxlan,
    /// VXLAN-GPE (draft-ietf-nvo3-vxlan-gpe).
    VxlanGpe,
    /// GENEVE (RFC 8926).
    Geneve,
    /// GRE (RFC 2784, RFC 2890), NVGRE (RFC 7637) among them. What it carries may lie behind an MPLS label stack (RFC 4023).
    Gre,
    /// A label stack in UDP (RFC 7510), or one behind Ethernet that carries Ethernet (RFC 4448 without control word).
    Mpls,
    /// IP directly in IP (RFC 2003, RFC 2473, RFC 4213): no header of its own.
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

/// Which tunnels are looked into, and on which UDP destination ports.
///
/// ```
/// use wirepath_wire::{Parser, Tunnels};
/// // VXLAN where Linux puts it when it is not told, GENEVE and the others where they belong.
/// let parser = Parser { tunnels: Tunnels::default().with_vxlan(Some(8472)), ..Parser::default() };
/// // VXLAN only.
/// let vxlan = Parser { tunnels: Tunnels::NONE.with_vxlan(Some(4789)), ..parser };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnels {
    /// VXLAN, VXLAN-GPE, GENEVE, MPLS; [`NO_PORT`] for what is not looked into.
    ports: [u32; 4],
    gre: bool,
    ip: bool,
    ethernet_in_mpls: bool,
}

/// No port has this number.
const NO_PORT: u32 = u32::MAX;

impl Tunnels {
    /// None at all.
    pub const NONE: Tunnels = Tunnels { ports: [NO_PORT; 4], gre: false, ip: false, ethernet_in_mpls: false };

    /// All: VXLAN on 4789, VXLAN-GPE on 4790, GENEVE on 6081, MPLS on 6635, GRE, IP in IP, Ethernet in MPLS.
    pub const ALL: Tunnels = Tunnels { gre: true, ip: true, ethernet_in_mpls: true, ..Tunnels::NONE }
        .with_vxlan(Some(vxlan::PORT))
        .with_vxlan_gpe(Some(vxlan_gpe::PORT))
        .with_geneve(Some(geneve::PORT))
        .with_mpls(Some(mpls::PORT));

    const fn with(mut self, index: usize, port: Option<u16>) -> Tunnels {
        self.ports[index] = match port {
            Some(port) => port as u32,
            None => NO_PORT,
        };
        self
    }

    /// With VXLAN on this port, or nowhere.
    pub const fn with_vxlan(self, port: Option<u16>) -> Tunnels {
        self.with(0, port)
    }

    /// With VXLAN-GPE on this port, or nowhere.
    pub const fn with_vxlan_gpe(self, port: Option<u16>) -> Tunnels {
        self.with(1, port)
    }

    /// With GENEVE on this port, or nowhere.
    pub const fn with_geneve(self, port: Option<u16>) -> Tunnels {
        self.with(2, port)
    }

    /// With label stacks in UDP on this port, or nowhere.
    pub const fn with_mpls(self, port: Option<u16>) -> Tunnels {
        self.with(3, port)
    }

    /// Whether GRE is looked into. (Its header is layer 4 and found in any case.)
    pub const fn with_gre(mut self, wanted: bool) -> Tunnels {
        self.gre = wanted;
        self
    }

    /// Whether IP in IP is looked into.
    pub const fn with_ip(mut self, wanted: bool) -> Tunnels {
        self.ip = wanted;
        self
    }

    /// Whether label stacks behind Ethernet are looked into where they do not carry IP.
    pub const fn with_ethernet_in_mpls(mut self, wanted: bool) -> Tunnels {
        self.ethernet_in_mpls = wanted;
        self
    }

    /// The tunnel whose UDP port this is; of several, the first in the order of [`Tunnel`].
    pub fn on_port(&self, port: u16) -> Tunnel {
        const KINDS: [Tunnel; 4] = [Tunnel::Vxlan, Tunnel::VxlanGpe, Tunnel::Geneve, Tunnel::Mpls];
        let found = self.ports.iter().zip(KINDS).find(|(known, _)| **known == u32::from(port));
        found.map_or(Tunnel::None, |(_, kind)| kind)
    }

    /// The UDP port of a tunnel, where it is looked for.
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

    /// Whether some tunnel is on this port; `port` above 16 bits for what has none.
    #[inline(always)]
    pub(super) const fn any_on(&self, port: u32) -> bool {
        // Without branches: one vector comparison.
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

/// What a stack's last headers carry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Carried {
    pub(super) tunnel: Tunnel,
    /// Whether the tunnel header is in order.
    pub(super) in_order: bool,
    /// Whether a label stack lies behind the UDP or GRE header.
    pub(super) labels: bool,
    pub(super) vni: Option<Vni>,
    /// The stack inside, if it is of a kind that is looked into.
    pub(super) inside: Option<Inside>,
    pub(super) error: Option<ParseError>,
}

/// A stack in a tunnel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inside {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) first: First,
}

/// What a stack begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    Ethernet,
    Ipv4,
    Ipv6,
}

impl First {
    fn of(ethertype: EtherType) -> Option<First> {
        match ethertype {
            EtherType::TRANSPARENT_ETHERNET => Some(First::Ethernet),
            EtherType::IPV4 => Some(First::Ipv4),
            EtherType::IPV6 => Some(First::Ipv6),
            _ => None,
        }
    }
}

impl Carried {
    fn broken(tunnel: Tunnel, error: ParseError) -> Carried {
        Carried { tunnel, error: Some(error), ..Carried::default() }
    }

    fn holding(tunnel: Tunnel, vni: Option<Vni>, inside: Option<Inside>) -> Carried {
        Carried { tunnel, in_order: true, vni, inside, ..Carried::default() }
    }
}

impl Parser {
    /// Whether it is plain that a stack carries no tunnel: most do not.
    #[inline(always)]
    pub(super) fn carries_nothing(&self, head: &[u8], layers: &Layers) -> bool {
        match layers.l4_kind() {
            L4::Tcp | L4::Icmpv4 | L4::Icmpv6 | L4::Esp => true,
            L4::Udp => match head.get(layers.l4()..).and_then(|b| b.first_chunk::<4>()) {
                Some(h) => !self.tunnels.any_on(u32::from(be16::<2, 4>(h))),
                None => true,
            },
            L4::None => !layers.ethertype().is_mpls(),
            L4::Other | L4::Gre => false,
        }
    }

    /// What the stack carries. Nothing is looked for in fragments.
    #[inline(always)]
    pub(super) fn carried(&self, head: &[u8], layers: &Layers) -> Carried {
        let mut at = Bytes { head, end: layers.end() };
        if layers.is_fragment() {
            return Carried::default();
        }
        match (layers.l3_kind(), layers.l4_kind()) {
            (L3::Other, _) if layers.ethertype().is_mpls() && self.tunnels.ethernet_in_mpls => {
                self.behind_link(at, layers)
            }
            (_, L4::Udp) => {
                // The datagram may end before the packet; that its length is not below 8 was checked.
                let Ok(header) = at.header::<{ udp::HEADER_LEN }>(layers.l4(), ParseError::UdpTruncated) else {
                    return Carried::default();
                };
                at.end = at.end.min(layers.l4() + usize::from(be16::<4, 8>(header)));
                match self.tunnels.on_port(be16::<2, 8>(header)) {
                    Tunnel::None => Ok(Carried::default()),
                    Tunnel::Vxlan => vxlan(at, layers.payload()),
                    Tunnel::VxlanGpe => gpe(at, layers.payload()),
                    Tunnel::Geneve => geneve(at, layers.payload()),
                    _ => {
                        let found = labels_in_tunnel(at, layers.payload(), Tunnel::Mpls);
                        Ok(Carried { in_order: found.labels, ..found })
                    }
                }
                .unwrap_or_else(|error| Carried::broken(self.tunnels.on_port(be16::<2, 8>(header)), error))
            }
            (_, L4::Gre) if self.tunnels.gre => gre(at, layers),
            (_, L4::Other) => match layers.protocol() {
                IpProtocol::GRE if self.tunnels.gre => Carried::broken(Tunnel::Gre, ParseError::GreTruncated),
                IpProtocol::IPV4 | IpProtocol::IPV6 if self.tunnels.ip => {
                    let first = if layers.protocol() == IpProtocol::IPV4 { First::Ipv4 } else { First::Ipv6 };
                    let inside = Inside { start: layers.l4(), end: at.end, first };
                    Carried::holding(Tunnel::Ip, None, Some(inside))
                }
                _ => Carried::default(),
            },
            _ => Carried::default(),
        }
    }

    /// What lies behind labels behind Ethernet, where it is not IP in order.
    fn behind_link(&self, at: Bytes<'_>, layers: &Layers) -> Carried {
        if !layers.has_labels() {
            let error = mpls_end(at, layers.l3()).err();
            return Carried { tunnel: Tunnel::Mpls, error, ..Carried::default() };
        }
        match behind_labels(at, layers.l3()) {
            Ok(Some(inside)) if inside.first == First::Ethernet => Carried::holding(Tunnel::Mpls, None, Some(inside)),
            // It was looked at, and found wanting.
            Ok(Some(inside)) => {
                let error = self.stack(at.head, inside).err();
                Carried { error, ..Carried::holding(Tunnel::Mpls, None, None) }
            }
            Ok(None) => Carried::holding(Tunnel::Mpls, None, None),
            Err(error) => Carried { error: Some(error), ..Carried::holding(Tunnel::Mpls, None, None) },
        }
    }
}

fn vxlan(at: Bytes<'_>, start: usize) -> Result<Carried, ParseError> {
    let h: &[u8; vxlan::HEADER_LEN] = at.header(start, ParseError::VxlanTruncated)?;
    if h[0] & vxlan::FLAG_VNI == 0 {
        return Err(ParseError::VxlanBadFlags);
    }
    let inside = Inside { start: start + vxlan::HEADER_LEN, end: at.end, first: First::Ethernet };
    Ok(Carried::holding(Tunnel::Vxlan, Some(vni(h)), Some(inside)))
}

/// The VNI where VXLAN, VXLAN-GPE and GENEVE have it.
fn vni(h: &[u8; 8]) -> Vni {
    Vni::from_low_bits(u32::from_be_bytes(get::<4, 4, 8>(h)) >> 8)
}

fn gpe(at: Bytes<'_>, start: usize) -> Result<Carried, ParseError> {
    let h: &[u8; vxlan_gpe::HEADER_LEN] = at.header(start, ParseError::VxlanGpeTruncated)?;
    if h[0] & vxlan_gpe::FLAGS_VERSION != 0 {
        return Err(ParseError::VxlanGpeBadVersion);
    }
    let vni = (h[0] & vxlan_gpe::FLAG_VNI != 0).then(|| vni(h));
    let first = match vxlan_gpe::NextProtocol(h[3]) {
        _ if h[0] & vxlan_gpe::FLAG_NEXT == 0 => None,
        vxlan_gpe::NextProtocol::IPV4 => Some(First::Ipv4),
        vxlan_gpe::NextProtocol::IPV6 => Some(First::Ipv6),
        vxlan_gpe::NextProtocol::ETHERNET => Some(First::Ethernet),
        _ => None,
    };
    let inside = first.map(|first| Inside { start: start + vxlan_gpe::HEADER_LEN, end: at.end, first });
    Ok(Carried::holding(Tunnel::VxlanGpe, vni, inside))
}

fn geneve(at: Bytes<'_>, start: usize) -> Result<Carried, ParseError> {
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
    let inside = First::of(EtherType(be16::<2, 8>(h))).map(|first| Inside { start, end: at.end, first });
    Ok(Carried::holding(Tunnel::Geneve, Some(vni(h)), inside))
}

fn gre(at: Bytes<'_>, layers: &Layers) -> Carried {
    let Ok(h) = at.header::<{ gre::HEADER_LEN }>(layers.l4(), ParseError::GreTruncated) else {
        return Carried::broken(Tunnel::Gre, ParseError::GreTruncated);
    };
    if be16::<0, 4>(h) & gre::MUST_BE_ZERO != 0 {
        // The header is there, but what lies behind it is not known.
        let header = Carried::holding(Tunnel::Gre, None, None);
        return Carried { error: Some(ParseError::GreBadFlags), ..header };
    }
    let start = layers.payload();
    let ethertype = EtherType(be16::<2, 4>(h));
    if ethertype.is_mpls() {
        return labels_in_tunnel(at, start, Tunnel::Gre);
    }
    let inside = First::of(ethertype).map(|first| Inside { start, end: at.end, first });
    Carried::holding(Tunnel::Gre, None, inside)
}

/// A label stack at `start`, and what it carries. The header before it is in order.
fn labels_in_tunnel(at: Bytes<'_>, start: usize, tunnel: Tunnel) -> Carried {
    let carried = Carried::holding(tunnel, None, None);
    match mpls_end(at, start) {
        Ok(end) => match behind_labels(at, end) {
            Ok(inside) => Carried { labels: true, inside, ..carried },
            Err(error) => Carried { labels: true, error: Some(error), ..carried },
        },
        Err(error) => Carried { error: Some(error), ..carried },
    }
}

/// End of the label stack at `start`: behind the entry with the bottom bit.
pub(super) fn mpls_end(at: Bytes<'_>, start: usize) -> Result<usize, ParseError> {
    for nth in 0..mpls::MAX_ENTRIES {
        let entry: &[u8; mpls::HEADER_LEN] = at.header(start + nth * mpls::HEADER_LEN, ParseError::MplsTruncated)?;
        if entry[2] & 1 != 0 {
            return Ok(start + (nth + 1) * mpls::HEADER_LEN);
        }
    }
    Err(ParseError::MplsTooDeep)
}

/// What begins behind a label stack. Nothing says so but the first four bits (RFC 4928 section 2): 4 and 6 are IP, all else
/// is taken for Ethernet. `None` where nothing follows.
pub(super) fn behind_labels(at: Bytes<'_>, start: usize) -> Result<Option<Inside>, ParseError> {
    if start >= at.end {
        return Ok(None);
    }
    let [byte]: &[u8; 1] = at.header(start, ParseError::MplsTruncated)?;
    let first = match byte >> 4 {
        4 => First::Ipv4,
        6 => First::Ipv6,
        _ => First::Ethernet,
    };
    Ok(Some(Inside { start, end: at.end, first }))
}

/// Length of the GRE header at `start`, with the optional fields that its flags name.
pub(super) fn gre_len(at: Bytes<'_>, start: usize) -> Result<usize, ParseError> {
    let h: &[u8; gre::HEADER_LEN] = at.header(start, ParseError::GreTruncated)?;
    let len = gre::HEADER_LEN + gre::options_len(be16::<0, 4>(h));
    at.bytes(start, len, ParseError::GreTruncated)?;
    Ok(len)
}
