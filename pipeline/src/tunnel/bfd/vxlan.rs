//! Control packets inside VXLAN tunnels (RFC 8971). They have a VNI of their own, the management VNI, which belongs to
//! no segment. So workers see them only where they would drop a packet of an unknown VNI.

use std::net::{IpAddr, Ipv4Addr};

use wirepath_packet::drops::DropReason;
use wirepath_wire::{HeaderOffsets, MacAddr, Parser, Tunnels};

use super::packet::{SINGLE_HOP_PORT, TTL};
use crate::tunnel::kinds::vxlan::KIND;
use crate::tunnel::outer::TunnelId;
use crate::tunnel::tables::Underlay;

/// Destination of the inner frames, which no tenant has: 00-52-02 below the prefix of IANA (RFC 8971 section 8).
pub(in crate::tunnel) const MANAGEMENT_MAC: MacAddr = MacAddr([0, 0, 0x5e, 0, 0x52, 2]);

/// Returns the identifier of tunnel packets with the management VNI.
pub(super) fn management_tunnel(vni: u32) -> TunnelId {
    TunnelId { kind: KIND.number(), id: Some(vni), sid: None }
}

/// Returns the inner destination of packets from a local address (RFC 8971 section 5). No router forwards it.
pub(super) fn inner_destination(local: IpAddr) -> IpAddr {
    match local {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(),
    }
}

impl Underlay {
    /// Returns the inner headers of a control packet, whose inner frame lies from `start` to `end`.
    ///
    /// RFC 8971 section 5 recommends the inner Ethernet address without requiring it. The management VNI has no
    /// tenants, so any address is that of the gateway.
    pub(super) fn open_bfd(&self, frame: &[u8], start: usize, end: usize) -> Result<HeaderOffsets, DropReason> {
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        let layers = parser.parse_stack(frame, start, end).map_err(DropReason::from)?;
        if layers.tag_count() > 0 || layers.has_labels() || layers.is_fragment() {
            return Err(DropReason::BfdInvalid);
        }
        let (_, to) = layers.ip_addresses(frame).ok_or(DropReason::BfdInvalid)?;
        let is_loopback = match to {
            IpAddr::V4(ip) => ip.is_loopback(),
            IpAddr::V6(ip) => ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback()),
        };
        let port = layers.udp(frame).ok_or(DropReason::BfdInvalid)?.dst_port();
        if port != SINGLE_HOP_PORT || !(is_loopback || self.has_address(to)) {
            return Err(DropReason::BfdInvalid);
        }
        if layers.hop_limit(frame) != Some(TTL) {
            return Err(DropReason::BfdTtl);
        }
        Ok(layers)
    }

    /// Finds the inner headers of a control packet in a whole frame with these outer headers to `to`.
    pub(super) fn find_bfd(
        &self,
        tunnel: TunnelId,
        frame: &[u8],
        outer: &HeaderOffsets,
        to: IpAddr,
    ) -> Result<HeaderOffsets, DropReason> {
        let found = self.find_tunnel(frame, outer, to).ok_or(DropReason::BfdNoSession)?;
        let packet = found.read(frame)?;
        if packet.id != tunnel {
            return Err(DropReason::BfdNoSession);
        }
        self.open_bfd(frame, packet.inner, found.end)
    }
}
