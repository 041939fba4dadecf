//! What the workers of a gateway know: ports and segments, which stay as configured, and remotes, which change.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_pmd::packet::Packet;
use wirepath_pmd::port::{Offloads, PortId};
use wirepath_wire::build::VxlanEncap;
use wirepath_wire::{MacAddr, checksum};

use super::config::{GatewayConfig, InnerVlans};
use crate::PortInfo;

/// Bytes of an Ethernet header.
pub(super) const ETHERNET: usize = 14;
/// Bytes of a VLAN tag.
pub(super) const TAG: usize = 4;
/// "No attachment."
const NONE: u32 = u32::MAX;

/// Where a forwarding entry points: an attachment or a remote, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Index in [`Layout::attachments`].
    Attachment(u32),
    /// Index in [`Remotes::list`].
    Remote(u32),
}

impl Destination {
    const REMOTE: u32 = 1 << 30;

    /// As forwarding tables keep it.
    #[inline(always)]
    pub const fn pack(self) -> u32 {
        match self {
            Self::Attachment(index) => index,
            Self::Remote(index) => index | Self::REMOTE,
        }
    }

    /// Back from [`Self::pack`].
    #[inline(always)]
    pub const fn unpack(value: u32) -> Self {
        if value & Self::REMOTE == 0 { Self::Attachment(value) } else { Self::Remote(value & !Self::REMOTE) }
    }
}

/// The underlay as the workers see it.
#[derive(Clone, Debug)]
pub struct Underlay {
    /// Its port.
    pub port: PortId,
    /// Our Ethernet address there.
    pub mac: MacAddr,
    /// Tag of its frames.
    pub vlan: Option<u16>,
    /// Our IPv4 addresses.
    pub v4: Vec<Ipv4Addr>,
    /// Our IPv6 addresses.
    pub v6: Vec<Ipv6Addr>,
    /// Destination port of tunnel packets.
    pub udp_port: u16,
    /// First outer source port, and how many there are.
    pub source_ports: (u16, u32),
    /// Bits of the inner traffic class that the outer one takes: the ECN mark always, the DSCP if so configured (the template's is zero
    /// then).
    pub copied_class: u8,
    /// Whether datagrams without checksum are taken over IPv6 (RFC 6935).
    pub zero_checksum6: bool,
    /// Largest IP packet.
    pub mtu: u16,
}

impl Underlay {
    /// The outer source port for a flow.
    #[inline(always)]
    pub fn source_port(&self, entropy: u32) -> u16 {
        let (first, count) = self.source_ports;
        first.wrapping_add(((u64::from(entropy) * u64::from(count)) >> 32) as u16)
    }

    /// Whether an address is one of ours.
    pub fn has(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.v4.contains(&ip),
            IpAddr::V6(ip) => self.v6.contains(&ip),
        }
    }
}

/// A segment as the workers see it. Its index is the segment part of forwarding keys.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Identifier in the overlay.
    pub vni: u32,
    /// Indices of its attachments.
    pub attachments: Vec<u32>,
    /// Indices of its configured remotes: the replication list.
    pub remotes: Vec<u32>,
    /// Whether addresses are learned.
    pub learning: bool,
    /// VLAN tags inside the tunnel.
    pub inner_vlans: InnerVlans,
    /// Whether frames of other VTEPs than the configured ones are taken.
    pub accept_unknown_remotes: bool,
}

/// A place where a segment touches a port.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// The port.
    pub port: PortId,
    /// Tag of its frames.
    pub vlan: Option<u16>,
    /// Index of the segment.
    pub segment: u16,
    /// Whether the port inserts tags by itself.
    pub inserts_vlan: bool,
    /// Longest frame without tag, bytes.
    pub max_frame: usize,
}

/// What a port is for.
#[derive(Clone, Debug)]
enum Role {
    None,
    Underlay,
    Local(LocalPort),
}

/// Attachments of a port.
#[derive(Clone, Debug)]
pub struct LocalPort {
    untagged: u32,
    /// By VLAN; empty if the port has none.
    tagged: Vec<u32>,
}

impl LocalPort {
    /// Attachment of frames without tag (and with priority tags).
    #[inline(always)]
    pub fn untagged(&self) -> Option<u32> {
        (self.untagged != NONE).then_some(self.untagged)
    }

    /// Attachment of frames with this VLAN id.
    #[inline(always)]
    pub fn vlan(&self, id: u16) -> Option<u32> {
        self.tagged.get(usize::from(id)).copied().filter(|index| *index != NONE)
    }

    /// Whether the port has attachments with a VLAN.
    #[inline(always)]
    pub fn has_vlans(&self) -> bool {
        !self.tagged.is_empty()
    }
}

/// What never changes while the gateway runs.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The underlay.
    pub underlay: Underlay,
    /// Segments, as configured.
    pub segments: Vec<Segment>,
    /// Attachments of all segments, in order.
    pub attachments: Vec<Attachment>,
    roles: Vec<Role>,
    vnis: HashMap<u32, u16>,
}

impl Layout {
    /// Of a checked configuration and the ports that it names, in its order.
    pub fn new(config: &GatewayConfig, ports: &[PortInfo]) -> Self {
        let mut roles: Vec<Role> = ports.iter().map(|_| Role::None).collect();
        let (mut segments, mut attachments) = (Vec::new(), Vec::new());
        let mut vnis = HashMap::new();
        let mut first_remote = 0;
        for (index, segment) in config.segments.iter().enumerate() {
            let first = attachments.len() as u32;
            for attachment in &segment.attachments {
                let Some(port) = ports.get(attachment.port) else { continue };
                let Some(role) = roles.get_mut(attachment.port) else { continue };
                if let Role::None = role {
                    *role = Role::Local(LocalPort { untagged: NONE, tagged: Vec::new() });
                }
                if let Role::Local(local) = role {
                    let here = attachments.len() as u32;
                    match attachment.vlan {
                        None => local.untagged = here,
                        Some(vlan) => {
                            local.tagged.resize(4096, NONE);
                            if let Some(slot) = local.tagged.get_mut(usize::from(vlan)) {
                                *slot = here;
                            }
                        }
                    }
                }
                attachments.push(Attachment {
                    port: port.id,
                    vlan: attachment.vlan,
                    segment: index as u16,
                    inserts_vlan: port.capabilities.offloads.contains(Offloads::TX_VLAN_INSERT),
                    max_frame: usize::from(port.mtu) + ETHERNET + inner_tag(segment.inner_vlans),
                });
            }
            let remotes = segment.remotes.len() as u32;
            vnis.insert(segment.vni.get(), index as u16);
            segments.push(Segment {
                vni: segment.vni.get(),
                attachments: (first..attachments.len() as u32).collect(),
                remotes: (first_remote..first_remote + remotes).collect(),
                learning: segment.learning,
                inner_vlans: segment.inner_vlans,
                accept_unknown_remotes: segment.accept_unknown_remotes,
            });
            first_remote += remotes;
        }
        let u = &config.underlay;
        if let Some(role) = roles.get_mut(u.port) {
            *role = Role::Underlay;
        }
        let port = ports.get(u.port);
        let (v4, v6) = u.addresses.iter().fold((Vec::new(), Vec::new()), |(mut v4, mut v6), prefix| {
            match prefix.address {
                IpAddr::V4(ip) => v4.push(ip),
                IpAddr::V6(ip) => v6.push(ip),
            }
            (v4, v6)
        });
        let underlay = Underlay {
            port: u.port as PortId,
            mac: port.and_then(|port| port.mac).unwrap_or_else(|| made_up_mac(u.addresses.first().map(|p| p.address))),
            vlan: u.vlan,
            v4,
            v6,
            udp_port: u.udp_port,
            source_ports: (u.source_ports.0, u32::from(u.source_ports.1 - u.source_ports.0) + 1),
            copied_class: if u.dscp.is_none() { 0xff } else { 3 },
            zero_checksum6: u.checksum == wirepath_wire::build::OuterChecksum::Zero,
            mtu: port.map_or(1500, |port| port.mtu),
        };
        Self { underlay, segments, attachments, roles, vnis }
    }

    /// Whether the port is the underlay's.
    #[inline(always)]
    pub fn is_underlay(&self, port: PortId) -> bool {
        matches!(self.roles.get(usize::from(port)), Some(Role::Underlay))
    }

    /// The port's attachments, if it has any.
    #[inline(always)]
    pub fn local(&self, port: PortId) -> Option<&LocalPort> {
        match self.roles.get(usize::from(port)) {
            Some(Role::Local(local)) => Some(local),
            _ => None,
        }
    }

    /// Index of the segment with this identifier.
    pub fn segment_of(&self, vni: u32) -> Option<u16> {
        self.vnis.get(&vni).copied()
    }
}

/// Room for a tag inside the tunnel.
pub(super) fn inner_tag(policy: InnerVlans) -> usize {
    if policy == InnerVlans::Carry { TAG } else { 0 }
}

/// A locally administered address for a port that has none, always the same for the same VTEP address.
fn made_up_mac(ip: Option<IpAddr>) -> MacAddr {
    let bits = match ip {
        Some(IpAddr::V4(ip)) => u64::from(ip.to_bits()),
        Some(IpAddr::V6(ip)) => {
            let bits = ip.to_bits();
            (bits ^ bits >> 40 ^ bits >> 80) as u64 & 0xff_ffff_ffff
        }
        None => 1,
    };
    MacAddr::from_u64(0x0200_0000_0000 | bits & 0xff_ffff_ffff)
}

/// What can be done with packets for a remote at the moment.
#[derive(Clone, Copy, Debug)]
pub enum Reach {
    /// Put these headers in front.
    Ready(VxlanEncap),
    /// The NIC puts them in front of packets with this number as transmit metadata; these, of those that it cannot do.
    InNic(VxlanEncap, u32),
    /// The next hop is being asked for: the control thread keeps a few packets.
    Resolving,
    /// The next hop does not answer.
    Unreachable,
}

/// A remote VTEP of a segment.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Its address.
    pub address: IpAddr,
    /// Index of the segment.
    pub segment: u16,
    /// Longest inner frame, bytes.
    pub max_frame: usize,
    /// How to get there.
    pub reach: Reach,
}

/// All remotes. Replaced as a whole when one changes; indices never do.
#[derive(Clone, Debug, Default)]
pub struct Remotes {
    /// Configured ones first, segment by segment.
    pub list: Vec<Remote>,
    /// Whether the NIC may have taken tunnel headers off; packets say so by their mark.
    pub opened_by_nic: bool,
    sources: Sources,
}

impl Remotes {
    /// Of a list; `vni` gives the identifier of a segment.
    pub fn new(list: Vec<Remote>, vni: impl Fn(u16) -> u32) -> Self {
        let sources = Sources::new(list.iter().map(|remote| (vni(remote.segment), remote.address)));
        Self { list, opened_by_nic: false, sources }
    }

    /// Index of the remote that sends with this identifier from this address.
    #[inline(always)]
    pub fn source(&self, vni: u32, address: IpAddr) -> Option<u32> {
        self.sources.find(vni, address)
    }
}

/// (identifier, address) to remote: open addressing, at most half full.
#[derive(Clone, Debug, Default)]
struct Sources {
    slots: Vec<(u64, u128, u32)>,
}

impl Sources {
    fn new(remotes: impl ExactSizeIterator<Item = (u32, IpAddr)>) -> Self {
        let mut slots = vec![(u64::MAX, 0, 0); (remotes.len() * 2).next_power_of_two().max(2)];
        let mask = slots.len() - 1;
        for (index, (vni, address)) in remotes.enumerate() {
            let (key, bits) = Self::key(vni, address);
            let mut at = Self::hash(key, bits) & mask;
            while slots[at].0 != u64::MAX {
                at = (at + 1) & mask;
            }
            slots[at] = (key, bits, index as u32);
        }
        Self { slots }
    }

    #[inline(always)]
    fn key(vni: u32, address: IpAddr) -> (u64, u128) {
        match address {
            IpAddr::V4(ip) => (u64::from(vni), u128::from(ip.to_bits())),
            IpAddr::V6(ip) => (u64::from(vni) | 1 << 32, ip.to_bits()),
        }
    }

    #[inline(always)]
    fn hash(key: u64, bits: u128) -> usize {
        let x = (key ^ bits as u64 ^ ((bits >> 64) as u64).rotate_left(23)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x >> 32) as usize
    }

    #[inline(always)]
    fn find(&self, vni: u32, address: IpAddr) -> Option<u32> {
        let (key, bits) = Self::key(vni, address);
        let mask = self.slots.len().checked_sub(1)?;
        let mut at = Self::hash(key, bits) & mask;
        loop {
            let slot = self.slots.get(at)?;
            if slot.0 == key && slot.1 == bits {
                return Some(slot.2);
            }
            if slot.0 == u64::MAX {
                return None;
            }
            at = (at + 1) & mask;
        }
    }
}

/// Sum of the bytes of a packet, over all its segments.
pub(super) fn packet_sum(packet: &Packet) -> checksum::Sum {
    let mut at = 0;
    packet.segments().fold(checksum::Sum::ZERO, |sum, bytes| {
        let sum = sum.and_at(at, checksum::sum(bytes));
        at += bytes.len();
        sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_survive_packing() {
        for destination in
            [Destination::Attachment(0), Destination::Attachment(77), Destination::Remote(0), Destination::Remote(9)]
        {
            assert_eq!(Destination::unpack(destination.pack()), destination);
            assert_ne!(destination.pack(), crate::table::NO_DESTINATION);
        }
    }

    #[test]
    fn remotes_are_found_by_identifier_and_address() {
        let remote = |segment, address: &str| Remote {
            address: address.parse().unwrap(),
            segment,
            max_frame: 1500,
            reach: Reach::Resolving,
        };
        let mut list = vec![remote(0, "10.0.0.1"), remote(1, "10.0.0.1"), remote(0, "fd00::1"), remote(0, "::a00:1")];
        for i in 0..1000u32 {
            list.push(remote(2, &Ipv4Addr::from(0x0b00_0000 + i).to_string()));
        }
        let remotes = Remotes::new(list.clone(), |segment| u32::from(segment) + 100);
        for (i, r) in list.iter().enumerate() {
            assert_eq!(remotes.source(u32::from(r.segment) + 100, r.address), Some(i as u32));
            assert_eq!(remotes.source(99, r.address), None);
        }
        assert_eq!(Remotes::new(Vec::new(), |_| 0).source(1, list[0].address), None);
    }

    #[test]
    fn source_ports_stay_in_their_range() {
        let mut underlay = Underlay {
            port: 0,
            mac: MacAddr::ZERO,
            vlan: None,
            v4: Vec::new(),
            v6: Vec::new(),
            udp_port: 4789,
            source_ports: (49152, 16384),
            copied_class: 3,
            zero_checksum6: false,
            mtu: 1500,
        };
        assert_eq!((underlay.source_port(0), underlay.source_port(u32::MAX)), (49152, 65535));
        underlay.source_ports = (7, 1);
        assert_eq!((underlay.source_port(0), underlay.source_port(u32::MAX)), (7, 7));
    }
}
