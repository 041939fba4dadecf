//! Interfaces and hops, as the workers read them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use wirepath_wire::MacAddr;

use super::config::{Discard, SourceCheck};
use crate::route::NextHopGroup;
use crate::tunnel::config::GatewayConfig;
use crate::tunnel::filter::Filter;
use crate::tunnel::places::Places;
use crate::tunnel::underlay::Prefix;

/// Maximum number of VRFs that one packet may pass.
pub(super) const MAX_LOOKUPS: usize = 4;

/// The router of a segment.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Ethernet address of the router.
    pub mac: MacAddr,
    /// Number of its VRF.
    pub vrf: u16,
    /// Check of source addresses.
    pub source_check: SourceCheck,
    /// Addresses in the segment.
    pub addresses: Vec<Prefix>,
    /// Source of ICMP errors over IPv4: an address of the segment, else one of the VRF.
    pub(super) error_source4: Option<Ipv4Addr>,
    /// Source of ICMP errors over IPv6.
    pub(super) error_source6: Option<Ipv6Addr>,
    /// Largest IP packet that the segment takes by its configuration, in bytes.
    pub(super) mtu: usize,
    /// Rules for the packets that the router takes.
    pub(in crate::tunnel) filter: Option<Arc<Filter>>,
}

impl Interface {
    /// Returns whether an address is one of the router's in this segment.
    pub fn has_address(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|prefix| prefix.address == ip)
    }
}

/// Returns the routers of all segments by the position of the segment. `mac` is the Ethernet address of routers without
/// one of their own, and `vrfs` has the number of each VRF of the configuration.
pub(in crate::tunnel) fn interfaces(config: &GatewayConfig, vrfs: &[u16], mac: MacAddr) -> Vec<Option<Interface>> {
    let mut sources: HashMap<(usize, bool), IpAddr> = HashMap::new();
    for router in config.segments.iter().filter_map(|segment| segment.router.as_ref()) {
        for prefix in &router.addresses {
            sources.entry((router.vrf, prefix.address.is_ipv4())).or_insert(prefix.address);
        }
    }
    let of_segment = |segment: &crate::tunnel::config::SegmentConfig| {
        let router = segment.router.as_ref()?;
        let source = |v4: bool| {
            let own = router.addresses.iter().map(|prefix| prefix.address).find(|ip| ip.is_ipv4() == v4);
            own.or_else(|| sources.get(&(router.vrf, v4)).copied())
        };
        Some(Interface {
            mac: router.mac.unwrap_or(mac),
            vrf: vrfs.get(router.vrf).copied().unwrap_or_default(),
            source_check: config.routing.vrfs.get(router.vrf).map_or(SourceCheck::Off, |vrf| vrf.source_check),
            addresses: router.addresses.clone(),
            error_source4: source(true).and_then(|ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None }),
            error_source6: source(false).and_then(|ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None }),
            mtu: segment.mtu.map_or(usize::from(u16::MAX), usize::from),
            filter: None,
        })
    };
    config.segments.iter().map(of_segment).collect()
}

/// Returns the key of the router of each segment in the forwarding database.
pub(in crate::tunnel) fn router_macs<'c>(
    config: &'c GatewayConfig,
    places: &'c Places,
    mac: MacAddr,
) -> impl Iterator<Item = (u16, MacAddr)> + 'c {
    // Packets of layer-3 tunnels go to the router without a look at the forwarding database.
    let routers = config.segments.iter().zip(&places.segments).filter(|(segment, _)| !segment.is_routed_tunnel());
    routers.filter_map(move |(segment, place)| Some((place.index, segment.router.as_ref()?.mac.unwrap_or(mac))))
}

/// Effect of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tunnel) enum Hop {
    /// The destination is an address of the router.
    Local,
    /// The destination is a host of a network of this segment that is not resolved.
    Connected(u16),
    /// The packet goes to this Ethernet address in this segment.
    Neighbour(u16, MacAddr),
    /// The next hop, which is in this segment, is being resolved. The number is the index of this hop.
    Resolving(u16, u32),
    /// The next hop in this segment does not reply to ARP or ND.
    Unreachable(u16),
    /// Index of a group of next hops.
    Group(u32),
    /// Number of the VRF whose routes decide.
    Vrf(u16),
    /// The packet is dropped.
    Discard(Discard),
    /// The destination is a broadcast or network address.
    NotUnicast,
}

/// All hops. A change replaces the lists, in which each hop keeps its index.
#[derive(Clone, Debug, Default)]
pub(in crate::tunnel) struct Hops {
    pub(super) list: Vec<Hop>,
    pub(super) groups: Vec<Arc<NextHopGroup>>,
}

impl Hops {
    /// Returns the hop of a route, which may be a group.
    #[inline(always)]
    pub(super) fn get(&self, index: u32) -> Option<Hop> {
        self.list.get(index as usize).copied()
    }

    /// Returns the hop of a route, which is no group. `hash` chooses a member of a group.
    #[inline]
    pub(super) fn find(&self, index: u32, hash: u32) -> Option<Hop> {
        match *self.list.get(index as usize)? {
            Hop::Group(group) => {
                // Groups have no groups as members.
                let member = self.groups.get(group as usize)?.select(hash);
                self.list.get(member as usize).copied()
            }
            hop => Some(hop),
        }
    }
}

/// Next hop that the control thread has to resolve. It is in the packet's application metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tunnel) enum Unresolved {
    /// The destination of the packet, in this segment.
    Destination(u16),
    /// The hop with this index.
    Hop(u32),
}

impl Unresolved {
    const HOP: u64 = 1 << 32;

    /// Encodes the next hop.
    pub(super) const fn pack(self) -> u64 {
        match self {
            Self::Destination(segment) => segment as u64,
            Self::Hop(index) => Self::HOP | index as u64,
        }
    }

    /// Decodes a value made by [`Self::pack`].
    pub(super) const fn unpack(value: u64) -> Self {
        if value & Self::HOP == 0 { Self::Destination(value as u16) } else { Self::Hop(value as u32) }
    }
}

/// State of a packet that the control thread holds for the router, and what a worker does with it when it returns. It
/// is in the packet's application metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tunnel) enum RouterTag {
    /// A frame to be routed, from this segment.
    Route(u16),
    /// As before, but its next hop does not reply: its sender gets an ICMP error.
    Unreachable(u16),
    /// A frame of the router itself for this segment.
    Send(u16),
}

impl RouterTag {
    /// Encodes the tag for [`wirepath_packet::Packet::set_app`].
    pub(in crate::tunnel) const fn pack(self) -> [u64; 2] {
        let (code, segment) = match self {
            Self::Route(segment) => (1, segment),
            Self::Unreachable(segment) => (2, segment),
            Self::Send(segment) => (3, segment),
        };
        [code << 16 | segment as u64, 0]
    }

    /// Decodes a tag.
    pub(in crate::tunnel) const fn unpack(app: [u64; 2]) -> Option<Self> {
        let segment = app[0] as u16;
        match app[0] >> 16 {
            1 => Some(Self::Route(segment)),
            2 => Some(Self::Unreachable(segment)),
            3 => Some(Self::Send(segment)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_survive_packing() {
        for tag in [RouterTag::Route(0), RouterTag::Unreachable(7), RouterTag::Send(u16::MAX)] {
            assert_eq!(RouterTag::unpack(tag.pack()), Some(tag));
        }
        for next in [Unresolved::Destination(u16::MAX), Unresolved::Hop(u32::MAX)] {
            assert_eq!(Unresolved::unpack(next.pack()), next);
        }
        assert_eq!(RouterTag::unpack([0; 2]), None);
        assert_eq!(RouterTag::unpack([u64::MAX; 2]), None);
    }
}
