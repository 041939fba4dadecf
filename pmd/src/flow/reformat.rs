//! The header bytes of encapsulations and decapsulations, checked when the rule is made.
//!
//! Length fields and IPv4 and UDP checksums in the bytes mean nothing: whoever puts the header on a packet, NIC or software,
//! writes them for that packet. The other bytes are taken as they are.

use std::fmt;

use wirepath_wire::{EtherType, IpProtocol, L3, ParseError, Parser, Tunnels, ethernet, ipv4, ipv6, udp, vlan, vxlan};

/// UDP destination port of VXLAN-GPE (IANA).
pub const GPE_PORT: u16 = 4790;
/// UDP destination port of GENEVE (RFC 8926 section 3.3).
pub const GENEVE_PORT: u16 = 6081;
/// UDP destination port of MPLS (RFC 7510 section 3).
pub const MPLS_PORT: u16 = 6635;
/// EtherType of Ethernet inside GRE and GENEVE: transparent Ethernet bridging.
pub const TEB: u16 = 0x6558;

/// The four kinds of reformat, as mlx5dv names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReformatKind {
    /// `decap l2`: takes everything before the inner Ethernet header off.
    L2TunnelToL2,
    /// `encap l2`: puts outer headers before the Ethernet header.
    L2ToL2Tunnel,
    /// `decap l3`: takes everything before the inner IP header off and puts a new Ethernet header there.
    L3TunnelToL2,
    /// `encap l3`: replaces the Ethernet header by outer headers.
    L2ToL3Tunnel,
}

impl ReformatKind {
    /// Action and its first word.
    pub const fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::L2TunnelToL2 => ("decap", "l2"),
            Self::L2ToL2Tunnel => ("encap", "l2"),
            Self::L3TunnelToL2 => ("decap", "l3"),
            Self::L2ToL3Tunnel => ("encap", "l3"),
        }
    }

    /// Whether headers come off.
    pub const fn is_decap(self) -> bool {
        matches!(self, Self::L2TunnelToL2 | Self::L3TunnelToL2)
    }
}

/// How an outer header stack ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HeaderEnd {
    /// An Ethernet header, tagged or not: no tunnel.
    Link,
    /// IP directly before IP.
    Ip,
    /// VXLAN.
    Vxlan,
    /// VXLAN-GPE.
    VxlanGpe,
    /// GENEVE.
    Geneve,
    /// GRE.
    Gre,
    /// MPLS label stack.
    Mpls,
}

/// Where the headers of a checked header stack lie: offsets in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeaderLayout {
    /// VLAN tags.
    pub tags: u8,
    /// 4, 6, or 0 without IP.
    pub ip_version: u8,
    /// Start of the IP header, or of what follows Ethernet.
    pub l3: u8,
    /// Start of what follows the IP header; as `l3` without IP.
    pub l4: u8,
    /// Start of the tunnel header; the length of the stack if it has none.
    pub tunnel: u8,
    /// How it ends.
    pub end: HeaderEnd,
}

/// A reformat with its checked header bytes.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reformat {
    kind: ReformatKind,
    bytes: Box<[u8]>,
    layout: Option<HeaderLayout>,
}

impl fmt::Debug for Reformat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (action, kind) = self.kind.words();
        write!(f, "{action} {kind} {}", self.hex())
    }
}

/// What is wrong with header bytes, and at which byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderError {
    /// Offset of the header at fault.
    pub offset: usize,
    /// What is wrong.
    pub message: String,
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: {}", self.offset, self.message)
    }
}

impl std::error::Error for HeaderError {}

/// Longest header stack. mlx5 devices take at most 128 bytes; a packet's headroom is 256.
pub const MAX_HEADER: usize = 192;

impl Reformat {
    /// Checks the bytes: a complete header stack, and one that the kind can use. `L2TunnelToL2` has none.
    pub fn new(kind: ReformatKind, bytes: &[u8]) -> Result<Self, HeaderError> {
        let layout = match kind {
            ReformatKind::L2TunnelToL2 if bytes.is_empty() => None,
            ReformatKind::L2TunnelToL2 => {
                return refuse(0, "decap l2 takes no header: the inner Ethernet header stays");
            }
            ReformatKind::L3TunnelToL2 => Some(link(bytes)?),
            ReformatKind::L2ToL2Tunnel => Some(stack(bytes, true)?),
            ReformatKind::L2ToL3Tunnel => Some(stack(bytes, false)?),
        };
        Ok(Self { kind, bytes: bytes.into(), layout })
    }

    /// Which of the four.
    pub fn kind(&self) -> ReformatKind {
        self.kind
    }

    /// The header bytes; empty for `L2TunnelToL2`.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where the headers lie; `None` for `L2TunnelToL2`.
    pub fn layout(&self) -> Option<HeaderLayout> {
        self.layout
    }

    /// The header bytes as hexadecimal digits.
    pub(super) fn hex(&self) -> String {
        self.bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn refuse<T>(offset: usize, message: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError { offset, message: message.into() })
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|b| u16::from_be_bytes(*b))
}

/// The new Ethernet header of `decap l3`.
fn link(bytes: &[u8]) -> Result<HeaderLayout, HeaderError> {
    let (l3, tags, ethertype) = ethernet_and_tags(bytes)?;
    if bytes.len() != l3 || tags > 1 {
        return refuse(
            l3.min(bytes.len()),
            "decap l3 takes an Ethernet header of 14 bytes, or 18 with a VLAN tag, and nothing behind it",
        );
    }
    if ethertype != EtherType::IPV4 && ethertype != EtherType::IPV6 {
        return refuse(
            l3 - 2,
            format!("the EtherType must be that of the IP packet which follows, not {:#06x}", ethertype.0),
        );
    }
    let l3 = l3 as u8;
    Ok(HeaderLayout { tags: tags as u8, ip_version: 0, l3, l4: l3, tunnel: l3, end: HeaderEnd::Link })
}

/// End of Ethernet and its tags, their number, and the EtherType behind.
fn ethernet_and_tags(bytes: &[u8]) -> Result<(usize, usize, EtherType), HeaderError> {
    let head = ethernet::View::new(bytes).map_err(|e| HeaderError { offset: 0, message: e.to_string() })?;
    let (mut at, mut tags, mut ethertype) = (ethernet::HEADER_LEN, 0, head.ethertype());
    if !head.src().is_unicast() {
        return refuse(6, format!("{} is no source address", head.src()));
    }
    while ethertype.is_vlan() {
        let tag = bytes.get(at..).map(vlan::View::new);
        let Some(Ok(tag)) = tag else { return refuse(at, ParseError::VlanTruncated.to_string()) };
        if tags == 2 {
            return refuse(at, ParseError::VlanTooDeep.to_string());
        }
        ethertype = tag.ethertype();
        at += vlan::TAG_LEN;
        tags += 1;
    }
    Ok((at, tags, ethertype))
}

/// What a tunnel header says that it carries.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carries {
    Ethernet,
    Ip,
    Either,
}

impl Carries {
    fn of(ethertype: u16) -> Option<Self> {
        match ethertype {
            TEB => Some(Self::Ethernet),
            0x0800 | 0x86dd => Some(Self::Ip),
            _ => None,
        }
    }
}

/// The outer headers of an encapsulation, up to and with the tunnel header.
fn stack(bytes: &[u8], ethernet_inside: bool) -> Result<HeaderLayout, HeaderError> {
    if bytes.len() > MAX_HEADER {
        return refuse(MAX_HEADER, format!("{} bytes; a header stack has at most {MAX_HEADER}", bytes.len()));
    }
    let (l3, tags, ethertype) = ethernet_and_tags(bytes)?;
    let layout = |ip_version, l4: usize, tunnel: usize, end| HeaderLayout {
        tags: tags as u8,
        ip_version,
        l3: l3 as u8,
        l4: l4 as u8,
        tunnel: tunnel as u8,
        end,
    };
    let (layout, end, carries) = if ethertype.0 == 0x8847 || ethertype.0 == 0x8848 {
        (layout(0, l3, l3, HeaderEnd::Mpls), labels(bytes, l3)?, Carries::Either)
    } else {
        let (version, l4, protocol) = ip(bytes, l3)?;
        match protocol {
            IpProtocol::IPV4 | IpProtocol::IPV6 => (layout(version, l4, l4, HeaderEnd::Ip), l4, Carries::Ip),
            IpProtocol::GRE => {
                let (end, carries) = gre(bytes, l4)?;
                match carries {
                    Some(carries) => (layout(version, l4, l4, HeaderEnd::Gre), end, carries),
                    None => (layout(version, l4, end, HeaderEnd::Mpls), labels(bytes, end)?, Carries::Either),
                }
            }
            IpProtocol::UDP => {
                let at = l4 + udp::HEADER_LEN;
                let Some(port) = be16(bytes, l4 + 2).filter(|_| bytes.len() >= at) else {
                    return refuse(l4, ParseError::UdpTruncated.to_string());
                };
                let (kind, end, carries) = match port {
                    GPE_PORT => (HeaderEnd::VxlanGpe, at + 8, gpe(bytes, at)?),
                    GENEVE_PORT => geneve(bytes, at).map(|(end, carries)| (HeaderEnd::Geneve, end, carries))?,
                    MPLS_PORT => (HeaderEnd::Mpls, labels(bytes, at)?, Carries::Either),
                    // VXLAN is the one that people run on other ports.
                    _ => match bytes.get(at..).map(vxlan::View::new) {
                        Some(Ok(_)) => (HeaderEnd::Vxlan, at + vxlan::HEADER_LEN, Carries::Ethernet),
                        Some(Err(e)) => return refuse(at, e.to_string()),
                        None => return refuse(at, ParseError::VxlanTruncated.to_string()),
                    },
                };
                (layout(version, l4, at, kind), end, carries)
            }
            other => return refuse(l3, format!("IP protocol {} carries no tunnel", other.0)),
        }
    };
    if end != bytes.len() {
        return refuse(end, format!("the header stack ends here, but {} more bytes follow", bytes.len() - end));
    }
    let at = usize::from(layout.tunnel);
    match (carries, ethernet_inside) {
        (Carries::Ethernet, false) => refuse(at, "the tunnel carries Ethernet frames, but encap l3 puts IP packets in"),
        (Carries::Ip, true) => refuse(at, "the tunnel carries IP packets, but encap l2 puts Ethernet frames in"),
        _ => Ok(layout),
    }
}

/// IP version, end of the IP header, and protocol. Lengths and checksums are put right before the parser looks.
fn ip(bytes: &[u8], l3: usize) -> Result<(u8, usize, IpProtocol), HeaderError> {
    let mut copy = bytes.to_vec();
    let rest = (bytes.len() - l3) as u16;
    let version = bytes.get(l3).map_or(0, |b| b >> 4);
    let header = match version {
        4 => ipv4::HEADER_LEN,
        6 => ipv6::HEADER_LEN,
        _ => 0,
    };
    if let Some(ip) = copy.get_mut(l3..).filter(|ip| ip.len() >= header) {
        match version {
            4 => ip[2..4].copy_from_slice(&rest.to_be_bytes()),
            6 => ip[4..6].copy_from_slice(&(rest - header as u16).to_be_bytes()),
            _ => {}
        }
        // A UDP length as well, which may lie behind IPv4 options.
        let l4 = if version == 4 { usize::from(ip[0] & 15) * 4 } else { header };
        let protocol = match version {
            4 => ip[9],
            6 => ip[6],
            _ => 0,
        };
        if let Some(udp) = ip.get_mut(l4..).filter(|udp| protocol == IpProtocol::UDP.0 && udp.len() >= udp::HEADER_LEN)
        {
            let length = (udp.len() as u16).to_be_bytes();
            udp[4..6].copy_from_slice(&length);
        }
    }
    let parser = Parser { tunnels: Tunnels::NONE, verify_ipv4: false };
    let layers = parser
        .layers(&copy, 0, copy.len())
        .map_err(|e| HeaderError { offset: l3.min(bytes.len()), message: e.to_string() })?;
    let version = match layers.l3_kind() {
        L3::Ipv4 => 4,
        L3::Ipv6 => 6,
        _ => return refuse(l3 - 2, format!("EtherType {:#06x} carries no tunnel", layers.ethertype().0)),
    };
    if layers.is_fragment() {
        return refuse(l3, "the outer packet must not be a fragment");
    }
    if version == 6 && layers.has_ip_options() {
        return refuse(l3 + ipv6::HEADER_LEN, "extension headers are not put on packets");
    }
    Ok((version, layers.l4(), layers.protocol()))
}

/// End of a GRE header and what it carries; `None` for MPLS.
fn gre(bytes: &[u8], at: usize) -> Result<(usize, Option<Carries>), HeaderError> {
    let (Some(flags), Some(protocol)) = (be16(bytes, at), be16(bytes, at + 2)) else {
        return refuse(at, "the header stack ends inside the GRE header");
    };
    // RFC 2784 section 2.3 and RFC 2890: checksum and sequence number change with each packet, version 0, the rest zero.
    if flags & !0x2000 != 0 {
        return refuse(at, format!("GRE flags {flags:#06x}: only a key (0x2000) can be put on packets"));
    }
    let end = at + if flags & 0x2000 != 0 { 8 } else { 4 };
    if end > bytes.len() {
        return refuse(at, "the header stack ends inside the GRE header");
    }
    match (Carries::of(protocol), protocol) {
        (Some(carries), _) => Ok((end, Some(carries))),
        (None, 0x8847 | 0x8848) => Ok((end, None)),
        _ => refuse(at + 2, format!("GRE protocol {protocol:#06x} is neither Ethernet (0x6558), IP nor MPLS")),
    }
}

fn gpe(bytes: &[u8], at: usize) -> Result<Carries, HeaderError> {
    let Some(h) = bytes.get(at..).and_then(|b| b.first_chunk::<8>()) else {
        return refuse(at, "the header stack ends inside the VXLAN-GPE header");
    };
    // draft-ietf-nvo3-vxlan-gpe section 3.1: I (VNI valid) and P (next protocol valid).
    if h[0] & 0x0c != 0x0c {
        return refuse(at, "VXLAN-GPE needs the flags I and P (0x0c)");
    }
    match h[3] {
        1 | 2 => Ok(Carries::Ip),
        3 => Ok(Carries::Ethernet),
        next => refuse(at + 3, format!("VXLAN-GPE next protocol {next} is neither IP (1, 2) nor Ethernet (3)")),
    }
}

fn geneve(bytes: &[u8], at: usize) -> Result<(usize, Carries), HeaderError> {
    let Some(h) = bytes.get(at..).and_then(|b| b.first_chunk::<8>()) else {
        return refuse(at, "the header stack ends inside the GENEVE header");
    };
    if h[0] >> 6 != 0 {
        return refuse(at, "the GENEVE version is not 0");
    }
    let end = at + 8 + usize::from(h[0] & 0x3f) * 4;
    if end > bytes.len() {
        return refuse(at, "the header stack ends inside the GENEVE options");
    }
    let mut option = at + 8;
    while option < end {
        // RFC 8926 section 3.5: class (2), type (1), length in the low five bits, 4 bytes each beyond the first 4.
        let len = 4 + usize::from(bytes[option + 3] & 0x1f) * 4;
        if option + len > end {
            return refuse(option, "a GENEVE option runs out of the header");
        }
        option += len;
    }
    let protocol = u16::from_be_bytes([h[2], h[3]]);
    match Carries::of(protocol) {
        Some(carries) => Ok((end, carries)),
        None => refuse(at + 2, format!("GENEVE protocol {protocol:#06x} is neither Ethernet (0x6558) nor IP")),
    }
}

/// End of a label stack: the first entry with the bottom bit (RFC 3032 section 2.1).
fn labels(bytes: &[u8], mut at: usize) -> Result<usize, HeaderError> {
    loop {
        let Some(entry) = bytes.get(at..).and_then(|b| b.first_chunk::<4>()) else {
            return refuse(at.min(bytes.len()), "the header stack ends before the bottom of the MPLS label stack");
        };
        at += 4;
        if entry[2] & 1 != 0 {
            return Ok(at);
        }
    }
}
