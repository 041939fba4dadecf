//! Outer headers: the template of a remote, and recognition of received tunnel packets.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use wirepath_packet::drops::DropReason;
use wirepath_wire::build::{EncapError, OuterConfig, OuterHeaders, Transport};
use wirepath_wire::{EtherType, HeaderOffsets, IpProtocol, L4Type, MacAddr, Tag, ipv4, ipv6};

use super::config::{SegmentConfig, UnderlayConfig};
use super::kinds::mpls::Service;
use super::kinds::srv6::Behaviour;
use super::kinds::{Carrier, HeaderTemplate, KINDS, Payload, TunnelHeader, TunnelKind};
use super::tables::Underlay;

/// Returns the outer headers of a segment's packets from the gateway to a remote. The Ethernet header is from
/// the first one of `macs` to the next hop, the second one.
///
/// # Errors
/// If the addresses are of different IP versions, or the headers too long.
pub fn outer_headers(
    underlay: &UnderlayConfig,
    segment: &SegmentConfig,
    macs: (MacAddr, MacAddr),
    (src, dst): (IpAddr, IpAddr),
) -> Result<OuterHeaders, EncapError> {
    let ends = (src, segment.destination(dst));
    let tag = underlay.vlan.map(Tag::new);
    tunnel_headers(underlay, segment.kind, segment.payload, segment.header(), tag, macs, ends)
}

/// Returns outer headers with this tunnel header and VLAN tag.
pub(super) fn tunnel_headers(
    underlay: &UnderlayConfig,
    kind: &'static TunnelKind,
    payload: Payload,
    mut header: HeaderTemplate,
    tag: Option<Tag>,
    (src_mac, dst_mac): (MacAddr, MacAddr),
    (src, dst): (IpAddr, IpAddr),
) -> Result<OuterHeaders, EncapError> {
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
            carrier => Transport::Protocol(carrier.protocol(payload, &header.bytes)),
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
    /// Offset of a byte of entropy in the tunnel header, which differs between packets.
    pub(super) flow_id: Option<u8>,
}

impl ActiveKind {
    pub(super) fn new(kind: &'static TunnelKind, underlay: &UnderlayConfig) -> Self {
        Self::with_port(kind, underlay.port_of(kind))
    }

    fn with_port(kind: &'static TunnelKind, udp_port: Option<u16>) -> Self {
        let payload = kind.payloads.first().copied().unwrap_or(Payload::Ethernet);
        let HeaderTemplate { variable, .. } = (kind.write)(None, payload, &[]);
        Self { kind, number: kind.number(), udp_port, flow_id: variable.flow_id }
    }
}

/// UDP port and tunnel header of the received packets of one kind, which [`super::decap`] takes by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlainPackets {
    /// UDP destination port; a number above all ports if no kind has plain packets.
    pub(super) udp_port: u64,
    /// Value and mask of the tunnel header's bits.
    pub(super) value: u64,
    pub(super) mask: u64,
    /// Number of the kind.
    pub(super) kind: u8,
}

impl PlainPackets {
    /// Returns those of the first kind that has plain packets.
    pub(super) fn new<'k>(kinds: impl IntoIterator<Item = &'k ActiveKind>) -> Self {
        let plain = kinds.into_iter().find_map(|active| {
            let (plain, udp_port) = (active.kind.plain?, active.udp_port?);
            let value = plain.value & plain.mask;
            Some(Self { udp_port: udp_port.into(), value, mask: plain.mask, kind: active.number })
        });
        plain.unwrap_or(Self { udp_port: u64::MAX, value: 0, mask: 0, kind: 0 })
    }

    /// Returns whether no kind has plain packets.
    #[inline(always)]
    pub(super) fn is_none(&self) -> bool {
        self.udp_port > u16::MAX.into()
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
    /// SID of the gateway, for kinds whose segments are chosen by the destination address.
    pub sid: Option<Ipv6Addr>,
}

impl fmt::Display for TunnelId {
    /// Writes name and value, such as `VNI 42`, or `gretap` for tunnels without identifier.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = KINDS.get(usize::from(self.kind));
        if let Some(sid) = self.sid {
            return write!(f, "SID {sid}");
        }
        match self.id {
            Some(id) => write!(f, "{} {id}", kind.map_or("identifier", |kind| kind.id_name)),
            None => f.write_str(kind.map_or("no identifier", |kind| kind.name)),
        }
    }
}

/// Position of the tunnel header of a received packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'u> {
    /// Kinds that the gateway uses.
    kinds: &'u [ActiveKind],
    /// Services by label.
    services: &'u HashMap<TunnelId, Service>,
    /// Destination of the packet, if it is a SID of the gateway, and the behaviour of the SID.
    sid: Option<(Ipv6Addr, Behaviour)>,
    /// Protocol number of the header in front of the tunnel header, and UDP destination port of the packet.
    protocol: IpProtocol,
    pub(super) udp_port: Option<u16>,
    /// Offset of the tunnel header.
    pub(super) start: usize,
    /// End of the tunnel packet. Padding may follow.
    pub(super) end: usize,
}

/// Contents of a received tunnel header, which is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TunnelPacket {
    pub(super) header: TunnelHeader,
    /// Identifier of the segment.
    pub(super) id: TunnelId,
    pub(super) payload: Payload,
    /// Offset of the inner packet.
    pub(super) inner: usize,
}

impl Underlay {
    /// Finds the tunnel header behind the outer headers of a frame, which is no fragment and goes to `dst`. Returns
    /// `None` if it is no packet of a kind that the gateway uses.
    pub(super) fn find_tunnel(&self, frame: &[u8], outer: &HeaderOffsets, dst: IpAddr) -> Option<Found<'_>> {
        let l4 = outer.l4();
        let sid = self.find_sid(dst);
        let (protocol, udp_port, start, end) = match outer.l4_type() {
            _ if sid.is_some() => {
                let protocol = IpProtocol(outer.ipv6_header(frame)?[6]);
                (protocol, None, outer.l3() + ipv6::HEADER_LEN, outer.end())
            }
            L4Type::Udp => {
                let udp: &[u8; 8] = frame.get(l4..)?.first_chunk()?;
                let [port, len] = [[udp[2], udp[3]], [udp[4], udp[5]]].map(u16::from_be_bytes);
                (IpProtocol::UDP, Some(port), l4 + udp.len(), l4 + usize::from(len))
            }
            L4Type::Gre => (IpProtocol::GRE, None, l4, outer.end()),
            L4Type::Other => (outer.protocol(), None, l4, outer.end()),
            _ => return None,
        };
        let found = Found { kinds: &self.kinds, services: &self.services, sid, protocol, udp_port, start, end };
        found.kinds().next().is_some().then_some(found)
    }
}

impl<'u> Found<'u> {
    /// Iterates over the kinds that the packet may have.
    fn kinds(&self) -> impl Iterator<Item = &'u ActiveKind> {
        let (protocol, port, is_sid) = (self.protocol, self.udp_port, self.sid.is_some());
        self.kinds.iter().filter(move |active| match active.kind.carrier {
            Carrier::Srv6 => is_sid,
            carrier => !is_sid && carrier.takes(protocol) && active.udp_port == port,
        })
    }

    /// Reads and checks the tunnel header. The payload decides between kinds that are alike below it.
    pub(super) fn read(&self, frame: &[u8]) -> Result<TunnelPacket, DropReason> {
        let bytes = frame.get(self.start..self.end.min(frame.len())).ok_or(DropReason::BadTunnelHeader)?;
        for active in self.kinds() {
            let mut header = (active.kind.parse)(self.protocol, bytes)?;
            if self.sid.is_some_and(|(_, behaviour)| !behaviour.takes(header.payload)) {
                return Err(DropReason::SidUpperLayer);
            }
            if !active.kind.takes(header.payload) {
                continue;
            }
            let id = TunnelId { kind: active.number, id: header.id, sid: self.sid.map(|(sid, _)| sid) };
            if active.kind.has_labels() {
                header = self.services.get(&id).ok_or(DropReason::UnknownVni)?.complete(header, bytes)?;
            }
            let Some(payload) = Payload::of(header.payload) else { continue };
            let inner = self.start + header.len;
            return Ok(TunnelPacket { header, id, payload, inner });
        }
        Err(DropReason::TunnelPayload)
    }

    /// Checks that an inner IP packet has a header, whose version is that of the type in front of it.
    pub(super) fn check_packet(&self, packet: &TunnelPacket, frame: &[u8]) -> Result<(), DropReason> {
        let (version, least, other) = match packet.header.payload {
            EtherType::IPV4 => (4, ipv4::HEADER_LEN, IpProtocol::IPV6),
            _ => (6, ipv6::HEADER_LEN, IpProtocol::IPV4),
        };
        if self.end < packet.inner + least {
            return Err(DropReason::Truncated);
        }
        let is_right = frame.get(packet.inner).is_some_and(|byte| byte >> 4 == version) && self.protocol != other;
        if is_right { Ok(()) } else { Err(DropReason::BadVersion) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wirepath_packet::Pool;
    use wirepath_pmd::port::PortId;
    use wirepath_wire::{Parser, Tunnels};

    use super::super::encap::encapsulate;
    use super::super::stage::Flow;
    use super::super::{ecn, kinds};
    use super::*;

    /// Returns the underlay of a gateway that uses these kinds.
    fn underlay(names: &[&str]) -> Underlay {
        let active = |name: &&str| {
            let kind = kinds::KINDS.iter().find(|kind| kind.name == *name).unwrap();
            ActiveKind::with_port(kind, kind.default_port())
        };
        Underlay {
            port: PortId::new(0),
            mac: MacAddr::ZERO,
            vlan: None,
            v4: Vec::new(),
            v6: Vec::new(),
            networks: Vec::new(),
            sids: HashMap::new(),
            services: HashMap::new(),
            kinds: names.iter().map(active).collect(),
            plain: PlainPackets::new(&[]),
            source_ports: (49152, 16384),
            copied_class: 3,
            accept_zero_checksum6: false,
            reassembly: true,
            is_host: true,
            mtu: 1500,
        }
    }

    /// Returns a frame with an outer header of this version, and the length of its headers.
    fn frame(v6: bool, protocol: u8, rest: &[u8]) -> (Vec<u8>, usize) {
        let len = rest.len() as u16;
        let mut ip = if v6 { vec![0x60; 40] } else { vec![0x45; 20] };
        if v6 {
            ip[4..6].copy_from_slice(&len.to_be_bytes());
            ip[6] = protocol;
        } else {
            ip[2..4].copy_from_slice(&(len + 20).to_be_bytes());
            ip[6..12].copy_from_slice(&[0, 0, 64, protocol, 0, 0]);
        }
        let start = 14 + ip.len();
        let ethertype = if v6 { EtherType::IPV6 } else { EtherType::IPV4 };
        ([&[0; 12][..], &ethertype.0.to_be_bytes(), &ip, rest].concat(), start)
    }

    #[track_caller]
    fn read(underlay: &Underlay, frame: &[u8]) -> Option<Result<TunnelPacket, DropReason>> {
        let parser = Parser { tunnels: Tunnels::NONE, verify_ipv4: false };
        let outer = parser.parse_stack(frame, 0, frame.len()).unwrap();
        let (_, dst) = outer.ip_addresses(frame).unwrap();
        let found = underlay.find_tunnel(frame, &outer, dst)?;
        Some(found.read(frame).and_then(|packet| {
            if packet.payload == Payload::Ip {
                found.check_packet(&packet, frame)?;
            }
            Ok(packet)
        }))
    }

    fn inner(version: u8) -> Vec<u8> {
        vec![if version == 4 { 0x45 } else { 0x60 }; 40]
    }

    #[test]
    fn ip_in_ip() {
        let underlay = underlay(&["vxlan", "ipip"]);
        for v6 in [false, true] {
            for (version, protocol, payload) in [(4, 4, EtherType::IPV4), (6, 41, EtherType::IPV6)] {
                let (bytes, inner_at) = frame(v6, protocol, &inner(version));
                let found = read(&underlay, &bytes).unwrap().unwrap();
                let header = TunnelHeader { id: None, len: 0, payload, has_checksum: false };
                let id = TunnelId { kind: 5, id: None, sid: None };
                assert_eq!(found, TunnelPacket { header, id, payload: Payload::Ip, inner: inner_at });
                // The other protocol number, another version, and a header that is cut off.
                let (bytes, _) = frame(v6, if protocol == 4 { 41 } else { 4 }, &inner(version));
                assert_eq!(read(&underlay, &bytes), Some(Err(DropReason::BadVersion)));
                let (bytes, _) = frame(v6, protocol, &[0x50; 40]);
                assert_eq!(read(&underlay, &bytes), Some(Err(DropReason::BadVersion)));
                let (bytes, _) = frame(v6, protocol, &inner(version)[..19]);
                assert_eq!(read(&underlay, &bytes), Some(Err(DropReason::Truncated)));
                let (bytes, _) = frame(v6, protocol, &[]);
                assert_eq!(read(&underlay, &bytes), Some(Err(DropReason::BadTunnelHeader)));
            }
            assert_eq!(read(&underlay, &frame(v6, 47, &[0; 40]).0), None, "no kind is GRE");
        }
        // A tunnel encapsulation limit (RFC 2473 section 4.1.1) is skipped.
        let limit = [4, 0, 4, 1, 3, 1, 1, 0];
        let (bytes, start) = frame(true, 60, &[&limit[..], &inner(4)].concat());
        assert_eq!(read(&underlay, &bytes).unwrap().unwrap().inner, start + 8);
    }

    /// The Ethernet header of the router's frame is removed, and the mark of the packet is copied.
    #[test]
    fn packets_without_ethernet_header_are_encapsulated() {
        let pool = Pool::new("bare", 64).unwrap();
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        let mut packet6 = vec![0; 48];
        packet6[..8].copy_from_slice(&[0x6b, 0x90, 0, 0, 0, 8, 17, 64]);
        packet6[40..].copy_from_slice(&[1, 2, 3, 4, 0, 8, 0, 0]);
        let framed = [&[2; 12][..], &EtherType::IPV6.0.to_be_bytes(), &packet6].concat();
        let flow = Flow::from_frame(&framed, framed.len(), &parser);
        assert_eq!(flow.class, 0xb9);
        assert_ne!(flow.entropy, 0);
        let underlay = underlay(&["ipip", "gre"]);
        for remote in ["10.9.0.2", "fd00:9::2"] {
            for (name, protocol, header) in [("ipip", 41, &[][..]), ("gre", 47, &[0x10, 0, 0x86, 0xdd, 0, 0, 0, 0])] {
                let kind = kinds::KINDS.iter().find(|kind| kind.name == name).unwrap();
                let tunnel = (kind.write)(None, Payload::Ip, &[0x10]);
                let src = if remote.contains('.') { "10.9.0.1" } else { "fd00:9::1" };
                let template = OuterHeaders::new(&OuterConfig {
                    src_mac: MacAddr::ZERO,
                    dst_mac: MacAddr::ZERO,
                    tags: &[],
                    src: src.parse().unwrap(),
                    dst: remote.parse().unwrap(),
                    ttl: 64,
                    traffic_class: 0,
                    flow_label: 0,
                    transport: Transport::Protocol(IpProtocol(if name == "gre" { protocol } else { 4 })),
                    tunnel_header: &tunnel.bytes,
                    variable: tunnel.variable,
                })
                .unwrap();
                let mut packet = pool.take().unwrap();
                assert!(packet.extend_from_slice(&framed, &pool));
                encapsulate(&mut packet, &template, &underlay, flow, &Some(Arc::default())).unwrap();
                let bytes = packet.data();
                // Class, protocol and tunnel header, and the packet unchanged.
                assert!(bytes.ends_with(&[header, &packet6].concat()), "{name} {bytes:02x?}");
                let outer = parser.parse_stack(bytes, 0, bytes.len()).unwrap();
                assert_eq!((outer.protocol(), outer.l4()), (IpProtocol(protocol), template.len() - header.len()));
                let class = ecn::traffic_class(bytes);
                assert_eq!(class, Some(0xb9 & 3), "the mark is copied, the DSCP is not configured to be");
                let found = read(&underlay, bytes).unwrap().unwrap();
                assert_eq!((found.payload, &bytes[found.inner..]), (Payload::Ip, &packet6[..]));
            }
        }
    }

    /// GRE packets have the kind that carries their payload.
    #[test]
    fn payload_decides_between_kinds() {
        let gre = |proto: u16, inner: &[u8]| [&[0, 0], &proto.to_be_bytes()[..], inner].concat();
        let kind = |names: &[&str], proto, version| {
            let (bytes, start) = frame(false, 47, &gre(proto, &inner(version)));
            let found = read(&underlay(names), &bytes).unwrap()?;
            assert_eq!(found.inner, start + 4);
            Ok((kinds::KINDS[usize::from(found.id.kind)].name, found.payload))
        };
        for names in [["gretap", "gre"], ["gre", "gretap"]] {
            assert_eq!(kind(&names, 0x6558, 4), Ok(("gretap", Payload::Ethernet)));
            assert_eq!(kind(&names, 0x0800, 4), Ok(("gre", Payload::Ip)));
            assert_eq!(kind(&names, 0x86dd, 6), Ok(("gre", Payload::Ip)));
            assert_eq!(kind(&names, 0x86dd, 4), Err(DropReason::BadVersion));
            assert_eq!(kind(&names, 0x8847, 4), Err(DropReason::TunnelPayload));
        }
        assert_eq!(kind(&["nvgre", "gre"], 0x0800, 4), Ok(("gre", Payload::Ip)));
        assert_eq!(kind(&["nvgre", "gre"], 0x6558, 4), Err(DropReason::TunnelFlags));
        assert_eq!(kind(&["gretap"], 0x0800, 4), Err(DropReason::TunnelPayload));
    }
}
