//! Header bytes of encapsulations and decapsulations, checked when the rule is created.
//!
//! Length fields and IPv4 and UDP checksums in the bytes are ignored: the NIC or the software writes them for
//! each packet. All other bytes are used unchanged.

use std::fmt;

use wirepath_wire::{
    EtherType, IpProtocol, L3Type, ParseError, Parser, Tunnels, ethernet, geneve, gre, ipv4, ipv6, mpls, udp, vlan,
    vxlan, vxlan_gpe,
};

use super::action::hex;

/// UDP destination port of VXLAN-GPE (IANA).
pub const GPE_PORT: u16 = vxlan_gpe::PORT;
/// UDP destination port of GENEVE (RFC 8926 section 3.3).
pub const GENEVE_PORT: u16 = geneve::PORT;
/// UDP destination port of MPLS (RFC 7510 section 3).
pub const MPLS_PORT: u16 = mpls::PORT;
/// EtherType of Ethernet in GRE and GENEVE: transparent Ethernet bridging.
pub const TEB: u16 = EtherType::TRANSPARENT_ETHERNET.0;

/// The four kinds of packet reformat, named as in mlx5dv.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReformatKind {
    /// `decap l2`: removes everything before the inner Ethernet header.
    L2TunnelToL2,
    /// `encap l2`: inserts outer headers before the Ethernet header.
    L2ToL2Tunnel,
    /// `decap l3`: replaces everything before the inner IP header by a new Ethernet header.
    L3TunnelToL2,
    /// `encap l3`: replaces the Ethernet header by outer headers.
    L2ToL3Tunnel,
}

impl ReformatKind {
    /// Returns the name of the action and its first argument.
    pub const fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::L2TunnelToL2 => ("decap", "l2"),
            Self::L2ToL2Tunnel => ("encap", "l2"),
            Self::L3TunnelToL2 => ("decap", "l3"),
            Self::L2ToL3Tunnel => ("encap", "l3"),
        }
    }

    /// True if headers are removed.
    pub const fn is_decap(self) -> bool {
        matches!(self, Self::L2TunnelToL2 | Self::L3TunnelToL2)
    }
}

/// Last header of an outer header stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HeaderEnd {
    /// An Ethernet header, tagged or not, without a tunnel.
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

/// Offsets of the headers of a checked header stack, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeaderLayout {
    /// Number of VLAN tags.
    pub tags: u8,
    /// IP version: 4, 6, or 0 without IP.
    pub ip_version: u8,
    /// End of the Ethernet header and its tags, where the IP header or labels start.
    pub l3: u8,
    /// End of the IP header; equal to `l3` without IP.
    pub l4: u8,
    /// Start of the tunnel header; the length of the stack without one.
    pub tunnel: u8,
    /// Last header.
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

/// Error in header bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderError {
    /// Offset of the invalid header.
    pub offset: usize,
    /// Description of the error.
    pub message: String,
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: {}", self.offset, self.message)
    }
}

impl std::error::Error for HeaderError {}

/// Maximum length of a header stack. mlx5 devices support at most 128 bytes; the headroom of a packet is 256.
pub const MAX_HEADER: usize = 192;

impl Reformat {
    /// Checks that the bytes are a complete header stack that the kind can use. `L2TunnelToL2` has no bytes.
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

    /// Returns the kind of reformat.
    pub fn kind(&self) -> ReformatKind {
        self.kind
    }

    /// Returns the header bytes; empty for `L2TunnelToL2`.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the offsets of the headers; `None` for `L2TunnelToL2`.
    pub fn layout(&self) -> Option<HeaderLayout> {
        self.layout
    }

    /// Returns the header bytes as hexadecimal digits.
    pub(super) fn hex(&self) -> String {
        hex(&self.bytes)
    }
}

fn refuse<T>(offset: usize, message: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError { offset, message: message.into() })
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|b| u16::from_be_bytes(*b))
}

/// Checks the new Ethernet header of `decap l3`.
fn link(bytes: &[u8]) -> Result<HeaderLayout, HeaderError> {
    let (l3, tags, ethertype) = ethernet_and_tags(bytes)?;
    if bytes.len() != l3 || tags > 1 {
        return refuse(
            l3.min(bytes.len()),
            "decap l3 takes an Ethernet header of 14 bytes, or 18 with a VLAN tag, and nothing after it",
        );
    }
    if ethertype != EtherType::IPV4 && ethertype != EtherType::IPV6 {
        return refuse(l3 - 2, format!("the EtherType must be that of the IP packet, not {:#06x}", ethertype.0));
    }
    let l3 = l3 as u8;
    Ok(HeaderLayout { tags: tags as u8, ip_version: 0, l3, l4: l3, tunnel: l3, end: HeaderEnd::Link })
}

/// Returns the end of Ethernet and its tags, the number of tags, and the EtherType after them.
fn ethernet_and_tags(bytes: &[u8]) -> Result<(usize, usize, EtherType), HeaderError> {
    let head = ethernet::View::new(bytes).map_err(|e| HeaderError { offset: 0, message: e.to_string() })?;
    let (mut at, mut tags, mut ethertype) = (ethernet::HEADER_LEN, 0, head.ethertype());
    if !head.src().is_unicast() {
        return refuse(6, format!("{} is not a source address", head.src()));
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

/// Payload type that a tunnel header announces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TunnelPayload {
    Ethernet,
    Ip,
    Either,
}

impl TunnelPayload {
    fn of(ethertype: u16) -> Option<Self> {
        match ethertype {
            TEB => Some(Self::Ethernet),
            0x0800 | 0x86dd => Some(Self::Ip),
            _ => None,
        }
    }
}

/// Checks the outer headers of an encapsulation, including the tunnel header.
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
        (layout(0, l3, l3, HeaderEnd::Mpls), labels(bytes, l3)?, TunnelPayload::Either)
    } else {
        let (version, l4, protocol) = ip(bytes, l3)?;
        match protocol {
            IpProtocol::IPV4 | IpProtocol::IPV6 => (layout(version, l4, l4, HeaderEnd::Ip), l4, TunnelPayload::Ip),
            IpProtocol::GRE => {
                let (end, carries) = gre(bytes, l4)?;
                match carries {
                    Some(carries) => (layout(version, l4, l4, HeaderEnd::Gre), end, carries),
                    None => (layout(version, l4, end, HeaderEnd::Mpls), labels(bytes, end)?, TunnelPayload::Either),
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
                    MPLS_PORT => (HeaderEnd::Mpls, labels(bytes, at)?, TunnelPayload::Either),
                    // VXLAN may run on any other port.
                    _ => match bytes.get(at..).map(vxlan::View::new) {
                        Some(Ok(_)) => (HeaderEnd::Vxlan, at + vxlan::HEADER_LEN, TunnelPayload::Ethernet),
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
        (TunnelPayload::Ethernet, false) => {
            refuse(at, "the tunnel carries Ethernet frames, but encap l3 encapsulates IP packets")
        }
        (TunnelPayload::Ip, true) => {
            refuse(at, "the tunnel carries IP packets, but encap l2 encapsulates Ethernet frames")
        }
        _ => Ok(layout),
    }
}

/// Returns IP version, end of the IP header, and protocol. Lengths are set before the bytes are parsed.
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
        // The UDP length is set too. The UDP header may follow IPv4 options.
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
        .parse_stack(&copy, 0, copy.len())
        .map_err(|e| HeaderError { offset: l3.min(bytes.len()), message: e.to_string() })?;
    let version = match layers.l3_type() {
        L3Type::Ipv4 => 4,
        L3Type::Ipv6 => 6,
        _ => return refuse(l3 - 2, format!("EtherType {:#06x} carries no tunnel", layers.ethertype().0)),
    };
    if layers.is_fragment() {
        return refuse(l3, "the outer packet must not be a fragment");
    }
    if version == 6 && layers.has_ip_options() {
        return refuse(l3 + ipv6::HEADER_LEN, "extension headers are not supported in outer headers");
    }
    Ok((version, layers.l4(), layers.protocol()))
}

/// Returns the end of a GRE header and its payload type; `None` for MPLS.
fn gre(bytes: &[u8], at: usize) -> Result<(usize, Option<TunnelPayload>), HeaderError> {
    let (Some(flags), Some(protocol)) = (be16(bytes, at), be16(bytes, at + 2)) else {
        return refuse(at, "the header stack ends inside the GRE header");
    };
    // RFC 2784 section 2.3 and RFC 2890: checksum and sequence number differ per packet, the version is 0,
    // and the other bits are zero.
    if flags & !gre::FLAG_KEY != 0 {
        return refuse(at, format!("GRE flags {flags:#06x}: only the key flag (0x2000) is supported"));
    }
    let end = at + gre::HEADER_LEN + gre::options_len(flags);
    if end > bytes.len() {
        return refuse(at, "the header stack ends inside the GRE header");
    }
    match (TunnelPayload::of(protocol), protocol) {
        (Some(carries), _) => Ok((end, Some(carries))),
        (None, 0x8847 | 0x8848) => Ok((end, None)),
        _ => refuse(at + 2, format!("GRE protocol {protocol:#06x} is neither Ethernet (0x6558), IP nor MPLS")),
    }
}

fn gpe(bytes: &[u8], at: usize) -> Result<TunnelPayload, HeaderError> {
    let Some(h) = bytes.get(at..).and_then(|b| b.first_chunk::<8>()) else {
        return refuse(at, "the header stack ends inside the VXLAN-GPE header");
    };
    // draft-ietf-nvo3-vxlan-gpe section 3.1: flags I (VNI valid) and P (next protocol valid).
    if h[0] & 0x0c != 0x0c {
        return refuse(at, "VXLAN-GPE needs the flags I and P (0x0c)");
    }
    match h[3] {
        1 | 2 => Ok(TunnelPayload::Ip),
        3 => Ok(TunnelPayload::Ethernet),
        next => refuse(at + 3, format!("VXLAN-GPE next protocol {next} is neither IP (1, 2) nor Ethernet (3)")),
    }
}

fn geneve(bytes: &[u8], at: usize) -> Result<(usize, TunnelPayload), HeaderError> {
    let header = match geneve::View::new(bytes.get(at..).unwrap_or_default()) {
        Ok(header) => header,
        Err(error) => return refuse(at, error.to_string()),
    };
    let mut end = at + geneve::HEADER_LEN;
    for option in header.options() {
        match option {
            Ok(option) => end += geneve::OPTION_HEADER_LEN + option.value.len(),
            Err(error) => return refuse(end, error.to_string()),
        }
    }
    let protocol = header.protocol().0;
    match TunnelPayload::of(protocol) {
        Some(payload) => Ok((end, payload)),
        None => refuse(at + 2, format!("GENEVE protocol {protocol:#06x} is neither Ethernet (0x6558) nor IP")),
    }
}

/// Returns the end of a label stack: the first entry with the bottom-of-stack bit (RFC 3032 section 2.1).
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
