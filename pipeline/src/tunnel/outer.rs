//! Outer headers: the template of a remote, and recognition of received tunnel packets.

use std::fmt;
use std::net::IpAddr;

use wirepath_packet::drops::DropReason;
use wirepath_wire::build::{EncapError, OuterConfig, OuterHeaders, Transport};
use wirepath_wire::{HeaderOffsets, IpProtocol, L4Type, MacAddr, Tag};

use super::config::{SegmentConfig, UnderlayConfig};
use super::kinds::{Carrier, KINDS, TunnelHeader, TunnelKind};
use super::tables::Underlay;

/// Returns the outer headers of a segment's packets from the gateway to a remote. The Ethernet header is from
/// `src_mac` to the next hop `dst_mac`.
///
/// # Errors
/// If the addresses are of different IP versions, or the headers too long.
pub fn outer_headers(
    underlay: &UnderlayConfig,
    segment: &SegmentConfig,
    (src_mac, dst_mac): (MacAddr, MacAddr),
    (src, dst): (IpAddr, IpAddr),
) -> Result<OuterHeaders, EncapError> {
    let kind = segment.kind;
    let tag = underlay.vlan.map(Tag::new);
    let mut header = segment.header();
    // Without UDP ports, the flow label spreads the flows over the paths of the underlay (RFC 6438).
    header.variable.flow_label = dst.is_ipv6() && kind.default_port().is_none();
    OuterHeaders::new(&OuterConfig {
        src_mac,
        dst_mac,
        tags: tag.as_slice(),
        src,
        dst,
        ttl: underlay.ttl,
        traffic_class: underlay.dscp.unwrap_or(0) << 2,
        flow_label: 0,
        transport: match kind.carrier {
            Carrier::Udp(port) => {
                Transport::Udp { dst_port: underlay.port_of(kind).unwrap_or(port), checksum: underlay.checksum }
            }
            Carrier::Ip(protocol) => Transport::Protocol(protocol),
        },
        tunnel_header: &header.bytes,
        variable: header.variable,
    })
}

/// A kind of tunnel that a gateway uses.
#[derive(Clone, Copy, Debug)]
pub struct ActiveKind {
    /// The kind.
    pub kind: &'static TunnelKind,
    /// Number of the kind in [`TunnelId`].
    pub(super) number: u8,
    /// UDP destination port of its packets; `None` without UDP.
    pub udp_port: Option<u16>,
}

impl ActiveKind {
    pub(super) fn new(kind: &'static TunnelKind, underlay: &UnderlayConfig) -> Self {
        Self { kind, number: kind.number(), udp_port: underlay.port_of(kind) }
    }
}

/// UDP port and tunnel header of received packets on the fast path.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlainPackets {
    /// UDP destination port; a number above all ports if the default kind has no fast path.
    pub(super) udp_port: u64,
    /// Value and mask of the tunnel header's bits.
    pub(super) value: u64,
    pub(super) mask: u64,
    /// Number of the kind.
    pub(super) kind: u8,
}

impl PlainPackets {
    /// The first kind is the default.
    pub(super) fn new(kinds: &[ActiveKind]) -> Self {
        let plain = kinds.first().and_then(|active| {
            let (plain, udp_port) = (active.kind.plain?, active.udp_port?);
            let value = plain.value & plain.mask;
            Some(Self { udp_port: udp_port.into(), value, mask: plain.mask, kind: active.number })
        });
        plain.unwrap_or(Self { udp_port: u64::MAX, value: 0, mask: 0, kind: 0 })
    }
}

/// Identifier of a segment in tunnel headers. Segments whose headers have no identifier share one value; the addresses
/// of their remotes distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TunnelId {
    /// Number of the kind: its position in [`super::kinds::KINDS`].
    pub kind: u8,
    /// The identifier within the kind, such as a VNI; `None` if the headers have none.
    pub id: Option<u32>,
}

impl fmt::Display for TunnelId {
    /// Writes name and value, such as `VNI 42`, or `gretap` for tunnels without identifier.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = KINDS.get(usize::from(self.kind));
        match self.id {
            Some(id) => write!(f, "{} {id}", kind.map_or("identifier", |kind| kind.id_name)),
            None => f.write_str(kind.map_or("no identifier", |kind| kind.name)),
        }
    }
}

/// Position of the tunnel header of a received packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'u> {
    active: &'u ActiveKind,
    /// Offset of the tunnel header.
    pub(super) start: usize,
    /// End of the tunnel packet. Padding may follow.
    pub(super) end: usize,
}

impl Underlay {
    /// Finds the tunnel header behind the outer headers of a frame, which is no fragment. Returns `None` if it is no
    /// packet of a kind that the gateway uses.
    pub(super) fn find_tunnel(&self, frame: &[u8], outer: &HeaderOffsets) -> Option<Found<'_>> {
        let l4 = outer.l4();
        if outer.l4_type() == L4Type::Udp {
            let udp: &[u8; 8] = frame.get(l4..)?.first_chunk()?;
            let port = u16::from_be_bytes([udp[2], udp[3]]);
            let active = self.kinds.iter().find(|active| active.udp_port == Some(port))?;
            let end = l4 + usize::from(u16::from_be_bytes([udp[4], udp[5]]));
            return Some(Found { active, start: l4 + udp.len(), end });
        }
        let protocol = match outer.l4_type() {
            L4Type::Gre => IpProtocol::GRE,
            L4Type::Other => outer.protocol(),
            _ => return None,
        };
        let active = self.kinds.iter().find(|active| active.kind.carrier == Carrier::Ip(protocol))?;
        Some(Found { active, start: l4, end: outer.end() })
    }
}

impl Found<'_> {
    /// Reads and checks the tunnel header. Returns its values, the identifier of its segment, and the offset of the
    /// inner packet.
    pub(super) fn read(&self, frame: &[u8]) -> Result<(TunnelHeader, TunnelId, usize), DropReason> {
        let bytes = frame.get(self.start..self.end.min(frame.len())).ok_or(DropReason::BadTunnelHeader)?;
        let header = (self.active.kind.parse)(bytes)?;
        Ok((header, TunnelId { kind: self.active.number, id: header.id }, self.start + header.len))
    }
}
