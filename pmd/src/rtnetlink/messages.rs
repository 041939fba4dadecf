//! Messages about links, forwarding databases, neighbours and routes. Formats: `linux/if_link.h`,
//! `linux/neighbour.h`, `linux/rtnetlink.h`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::drivers::kernel::common::netlink::{Attributes, IFINFOMSG, read_string, read_u16, read_u32};
use crate::port::MacAddr;

pub(super) const RTM_NEWLINK: u16 = 16;
pub(super) const RTM_DELLINK: u16 = 17;
pub(super) const RTM_NEWADDR: u16 = 20;
pub(super) const RTM_DELADDR: u16 = 21;
pub(super) const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
pub(super) const RTM_NEWNEIGH: u16 = 28;
pub(super) const RTM_DELNEIGH: u16 = 29;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
pub(super) const RTM_NEWNEXTHOP: u16 = 104;
const RTM_DELNEXTHOP: u16 = 105;

pub(super) const IFLA_ADDRESS: u16 = 1;
pub(super) const IFLA_IFNAME: u16 = 3;
pub(super) const IFLA_MASTER: u16 = 10;
pub(super) const IFLA_LINKINFO: u16 = 18;
pub(super) const IFLA_IFALIAS: u16 = 20;
pub(super) const IFLA_INFO_KIND: u16 = 1;
pub(super) const IFLA_INFO_DATA: u16 = 2;
pub(super) const IFLA_VXLAN_ID: u16 = 1;
pub(super) const IFLA_VXLAN_LOCAL: u16 = 4;
pub(super) const IFLA_VXLAN_LEARNING: u16 = 7;
pub(super) const IFLA_VXLAN_PORT: u16 = 15;
pub(super) const IFLA_VXLAN_LOCAL6: u16 = 17;
const IFLA_VXLAN_COLLECT_METADATA: u16 = 25;
pub(super) const IFF_UP: u32 = 1;

/// Length of `struct ndmsg`.
pub(super) const NDMSG: usize = 12;
pub(super) const NDA_DST: u16 = 1;
pub(super) const NDA_LLADDR: u16 = 2;
const NDA_VLAN: u16 = 5;
const NDA_VNI: u16 = 7;
const NDA_MASTER: u16 = 9;
pub(super) const NDA_PROTOCOL: u16 = 12;
const NDA_NH_ID: u16 = 13;
const NTF_SELF: u8 = 0x02;
pub(super) const NTF_EXT_LEARNED: u8 = 0x10;
pub(super) const NTF_ROUTER: u8 = 0x80;

/// Length of `struct rtmsg`.
pub(super) const RTMSG: usize = 12;
pub(super) const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_MULTIPATH: u16 = 9;
const RTA_TABLE: u16 = 15;
const RTA_VIA: u16 = 18;
const RTA_ENCAP: u16 = 22;
const RTN_UNICAST: u8 = 1;
/// Flag of exceptions, such as path MTUs and redirects.
const RTM_F_CLONED: u32 = 0x200;
/// `RTNH_F_DEAD` and `RTNH_F_LINKDOWN`.
const RTNH_UNUSABLE: u8 = 1 | 16;
/// Length of `struct rtnexthop`.
const RTNEXTHOP: usize = 8;
/// Most next hops of a route that are read.
const MAX_HOPS: usize = 256;

/// Length of `struct nhmsg`.
pub(super) const NHMSG: usize = 8;
const NHA_ID: u16 = 1;
const NHA_GROUP: u16 = 2;
const NHA_GATEWAY: u16 = 6;
const NHA_FDB: u16 = 11;
const NHA_OP_FLAGS: u16 = 14;
/// Reserved fields of `struct nexthop_grp` are zero where they have no meaning.
const NHA_OP_FLAG_RESP_GRP_RESVD_0: u32 = 1 << 31;
/// Length of `struct nexthop_grp`.
const NEXTHOP_GRP: usize = 8;

/// Longest name or alias that is kept, in bytes.
const MAX_TEXT: usize = 256;

/// A message whose header or attributes are too short or contradict its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// A message of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A link exists.
    Link(Link),
    /// The link with this index was removed.
    LinkRemoved(u32),
    /// An entry of a forwarding database exists, or does not.
    Fdb(Fdb),
    /// An entry of an ARP or ND table exists, or does not.
    Neighbour(Neighbour),
    /// A route exists, or does not.
    Route(Route),
    /// A nexthop object exists, or does not. Routes and forwarding databases refer to such objects.
    Nexthop(Nexthop),
    /// Rules changed, so any route may lead elsewhere.
    Routing,
    /// The link with this index got or lost an IP address.
    AddressesChanged(u32),
    /// IPv6 was set on at the link with this index, or has other properties there.
    Ipv6Changed(u32),
}

/// A nexthop object (ip-nexthop(8)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nexthop {
    /// Its number.
    pub id: u32,
    /// Where packets go; `None` if the object was removed or does not belong to forwarding databases.
    pub to: Option<NexthopTarget>,
}

/// Where the packets of a nexthop object for forwarding databases go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NexthopTarget {
    /// A VTEP.
    Vtep(IpAddr),
    /// One of these objects, each with the weight of its share.
    Group(Vec<(u32, u16)>),
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// Alias that an operator or a program gave it (ip-link(8)).
    pub alias: Option<String>,
    /// Ethernet address, if the link has one.
    pub mac: Option<MacAddr>,
    /// Index of the bridge whose port it is.
    pub master: Option<u32>,
    /// Administratively up.
    pub up: bool,
    /// Kind, with the properties of that kind.
    pub kind: LinkKind,
}

/// Kind of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// A bridge.
    Bridge,
    /// A VXLAN device.
    Vxlan(Vxlan),
    /// Any other device.
    Other,
}

/// Properties of a VXLAN device with one VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vxlan {
    /// VNI.
    pub vni: u32,
    /// Source address of its packets.
    pub local: Option<IpAddr>,
    /// UDP destination port.
    pub port: u16,
    /// True if the device itself learns addresses.
    pub learning: bool,
}

/// An entry of a forwarding database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fdb {
    /// An address is behind a port of a bridge.
    Bridge(BridgeEntry),
    /// An address is behind the VTEP of a VXLAN device.
    Tunnel(TunnelEntry),
}

/// Entry of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BridgeEntry {
    /// True if the entry was removed.
    pub removed: bool,
    /// Index of the bridge.
    pub bridge: u32,
    /// Index of the port.
    pub port: u32,
    /// Ethernet address.
    pub mac: MacAddr,
    /// VLAN of the entry, if it has one.
    pub vlan: Option<u16>,
    /// True if a program outside of the bridge put it there (`NTF_EXT_LEARNED`).
    pub external: bool,
}

/// Entry of a VXLAN device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelEntry {
    /// True if the entry was removed.
    pub removed: bool,
    /// Index of the device.
    pub device: u32,
    /// Ethernet address; zero for frames without an entry of their own (flood list).
    pub mac: MacAddr,
    /// VTEP, unless the entry refers to a nexthop object.
    pub vtep: Option<IpAddr>,
    /// Number of the nexthop object.
    pub nexthop: Option<u32>,
    /// VNI of the packets, if it is not that of the device.
    pub vni: Option<u32>,
}

/// An entry of an ARP or ND table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Index of the interface.
    pub index: u32,
    /// IP address.
    pub address: IpAddr,
    /// State of the entry.
    pub state: NudState,
    /// Ethernet address; `None` if the entry was removed or has no usable address.
    pub mac: Option<MacAddr>,
    /// True if a program outside of the kernel put it there (`NTF_EXT_LEARNED`).
    pub external: bool,
    /// Router flag (RFC 4861 section 4.4).
    pub is_router: bool,
    /// Number of the program that wrote the entry, as the `proto` of `ip neigh` (`NDA_PROTOCOL`); 0: not stated.
    pub protocol: u8,
}

/// State of an entry of an ARP or ND table (`NUD_*`, RFC 4861 section 7.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NudState {
    /// There is no entry, or it was not used yet.
    #[default]
    None,
    /// Solicited, without a reply yet.
    Incomplete,
    /// Confirmed recently.
    Reachable,
    /// Known, but not confirmed recently. `NUD_DELAY` counts as this state.
    Stale,
    /// Known and solicited again.
    Probe,
    /// Solicited without a reply.
    Failed,
    /// The kernel does not solicit the address: `NUD_NOARP` and `NUD_PERMANENT`.
    Fixed,
}

impl NudState {
    fn read(bits: u16) -> Self {
        match bits {
            0x01 => Self::Incomplete,
            0x02 => Self::Reachable,
            0x04 | 0x08 => Self::Stale,
            0x10 => Self::Probe,
            0x20 => Self::Failed,
            0x40 | 0x80 => Self::Fixed,
            _ => Self::None,
        }
    }

    fn has_address(self) -> bool {
        matches!(self, Self::Reachable | Self::Stale | Self::Probe | Self::Fixed)
    }
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// True if the route was removed. Of an IPv6 route with several next hops, only those that are named here may be
    /// removed.
    pub removed: bool,
    /// Destination.
    pub to: IpAddr,
    /// Prefix length of the destination, in bits.
    pub len: u8,
    /// Number of the routing table.
    pub table: u32,
    /// Metric. Of several routes to a destination, that with the lowest one is used.
    pub metric: u32,
    /// Usable next hops. Routes of other kinds than unicast have none here, and next hops whose packets get further
    /// headers are left out.
    pub hops: Vec<RouteHop>,
}

/// A next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteHop {
    /// Index of the interface.
    pub index: u32,
    /// Address of the router; `None` if the destination itself is on the link. It may be of another IP version
    /// (RFC 8950).
    pub via: Option<IpAddr>,
}

impl Message {
    /// Reads a message of this type. Returns `None` for messages that concern nothing of the above.
    ///
    /// # Errors
    /// If the message is malformed.
    pub fn read(kind: u16, body: &[u8]) -> Result<Option<Self>, Malformed> {
        match kind {
            RTM_NEWLINK | RTM_DELLINK => read_link(kind, body),
            RTM_NEWNEIGH | RTM_DELNEIGH => read_neighbour(kind == RTM_DELNEIGH, body),
            RTM_NEWROUTE | RTM_DELROUTE => read_route(kind == RTM_DELROUTE, body),
            RTM_NEWNEXTHOP | RTM_DELNEXTHOP => read_nexthop(kind == RTM_DELNEXTHOP, body),
            RTM_NEWRULE | RTM_DELRULE => Ok(Some(Self::Routing)),
            RTM_NEWADDR | RTM_DELADDR => {
                read_u32(body, 4).map(|index| Some(Self::AddressesChanged(index))).ok_or(Malformed)
            }
            _ => Ok(None),
        }
    }
}

fn read_link(kind: u16, body: &[u8]) -> Result<Option<Message>, Malformed> {
    let (Some(&family), Some(index), Some(flags)) = (body.first(), read_u32(body, 4), read_u32(body, 8)) else {
        return Err(Malformed);
    };
    match i32::from(family) {
        libc::AF_UNSPEC => {}
        libc::AF_INET6 if index != 0 => return Ok(Some(Message::Ipv6Changed(index))),
        // Messages of family AF_BRIDGE concern the ports of bridges.
        _ => return Ok(None),
    }
    if index == 0 || body.len() < IFINFOMSG {
        return Err(Malformed);
    }
    if kind == RTM_DELLINK {
        return Ok(Some(Message::LinkRemoved(index)));
    }
    let attributes = Attributes::after_header(body, IFINFOMSG);
    let text = |kind| attributes.find(kind).filter(|value| value.len() <= MAX_TEXT).map(read_string);
    let info = attributes.find(IFLA_LINKINFO).map(Attributes);
    let info_kind = info.and_then(|info| info.find(IFLA_INFO_KIND)).map(read_string).unwrap_or_default();
    let data = info.and_then(|info| info.find(IFLA_INFO_DATA)).map(Attributes);
    let kind = match (info_kind.as_str(), data) {
        ("bridge", _) => LinkKind::Bridge,
        ("vxlan", Some(data)) => read_vxlan(data).map_or(LinkKind::Other, LinkKind::Vxlan),
        _ => LinkKind::Other,
    };
    Ok(Some(Message::Link(Link {
        index,
        name: text(IFLA_IFNAME).ok_or(Malformed)?,
        alias: text(IFLA_IFALIAS),
        mac: attributes.find(IFLA_ADDRESS).and_then(|value| Some(MacAddr(value.try_into().ok()?))),
        master: attributes.find(IFLA_MASTER).and_then(|value| read_u32(value, 0)).filter(|index| *index != 0),
        up: flags & IFF_UP != 0,
        kind,
    })))
}

/// Reads the properties of a VXLAN device. Returns `None` for a device without a VNI of its own.
fn read_vxlan(data: Attributes<'_>) -> Option<Vxlan> {
    let byte = |kind| data.find(kind).and_then(|value| value.first().copied());
    if byte(IFLA_VXLAN_COLLECT_METADATA) == Some(1) {
        return None;
    }
    let local = [IFLA_VXLAN_LOCAL, IFLA_VXLAN_LOCAL6].into_iter().find_map(|kind| read_address(data.find(kind)?));
    Some(Vxlan {
        vni: data.find(IFLA_VXLAN_ID).and_then(|value| read_u32(value, 0)).filter(|vni| *vni < 1 << 24)?,
        local: local.filter(|local| !local.is_unspecified()),
        port: data.find(IFLA_VXLAN_PORT).and_then(|value| read_u16(value, 0)).map_or(0, u16::from_be),
        learning: byte(IFLA_VXLAN_LEARNING) == Some(1),
    })
}

fn read_neighbour(removed: bool, body: &[u8]) -> Result<Option<Message>, Malformed> {
    let header: [u8; NDMSG] = *body.first_chunk().ok_or(Malformed)?;
    let (family, flags) = (i32::from(header[0]), header[10]);
    let index = read_u32(&header, 4).filter(|index| *index != 0).ok_or(Malformed)?;
    let state = read_u16(&header, 8).ok_or(Malformed)?;
    let attributes = Attributes::after_header(body, NDMSG);
    let mac = attributes.find(NDA_LLADDR).and_then(|value| Some(MacAddr(value.try_into().ok()?)));
    let destination = attributes.find(NDA_DST);
    let number = |kind| attributes.find(kind).and_then(|value| read_u32(value, 0));
    let external = flags & NTF_EXT_LEARNED != 0;
    match family {
        libc::AF_BRIDGE => {
            let mac = mac.ok_or(Malformed)?;
            if let Some(bridge) = number(NDA_MASTER) {
                let vlan = attributes.find(NDA_VLAN).and_then(|value| read_u16(value, 0));
                let entry = BridgeEntry { removed, bridge, port: index, mac, vlan, external };
                return Ok(Some(Message::Fdb(Fdb::Bridge(entry))));
            }
            let vtep = match destination {
                Some(value) => Some(read_address(value).ok_or(Malformed)?),
                None => None,
            };
            let nexthop = number(NDA_NH_ID);
            let is_tunnel = vtep.is_some() || nexthop.is_some();
            // Other devices have lists of addresses that they accept, without a destination.
            if flags & NTF_SELF == 0 || !is_tunnel {
                return Ok(None);
            }
            let entry = TunnelEntry { removed, device: index, mac, vtep, nexthop, vni: number(NDA_VNI) };
            Ok(Some(Message::Fdb(Fdb::Tunnel(entry))))
        }
        libc::AF_INET | libc::AF_INET6 => {
            let address = destination.and_then(read_address).ok_or(Malformed)?;
            if address.is_ipv4() != (family == libc::AF_INET) {
                return Err(Malformed);
            }
            let state = if removed { NudState::None } else { NudState::read(state) };
            // Entries of devices without Ethernet addresses have others, or none.
            let mac = mac.filter(|_| state.has_address());
            let is_router = flags & NTF_ROUTER != 0;
            let protocol = attributes.find(NDA_PROTOCOL).and_then(|value| value.first().copied()).unwrap_or(0);
            Ok(Some(Message::Neighbour(Neighbour { index, address, state, mac, external, is_router, protocol })))
        }
        _ => Ok(None),
    }
}

/// Reads a nexthop object. Those of routes have no target here.
fn read_nexthop(removed: bool, body: &[u8]) -> Result<Option<Message>, Malformed> {
    if body.len() < NHMSG {
        return Err(Malformed);
    }
    let attributes = Attributes::after_header(body, NHMSG);
    let id = attributes.find(NHA_ID).and_then(|value| read_u32(value, 0)).filter(|id| *id != 0).ok_or(Malformed)?;
    let is_fdb = !removed && attributes.find(NHA_FDB).is_some();
    let to = match (attributes.find(NHA_GROUP), attributes.find(NHA_GATEWAY)) {
        (Some(members), _) if is_fdb => {
            let flags = attributes.find(NHA_OP_FLAGS).and_then(|value| read_u32(value, 0)).unwrap_or(0);
            let read_member = |member| read_member(member, flags & NHA_OP_FLAG_RESP_GRP_RESVD_0 != 0);
            let members = members.chunks_exact(NEXTHOP_GRP).take(MAX_HOPS);
            Some(NexthopTarget::Group(members.filter_map(read_member).collect()))
        }
        (None, Some(gateway)) if is_fdb => Some(NexthopTarget::Vtep(read_address(gateway).ok_or(Malformed)?)),
        _ => None,
    };
    Ok(Some(Message::Nexthop(Nexthop { id, to })))
}

/// Reads `struct nexthop_grp` (linux/nexthop.h), whose weight is one less than that of the member. Linux before 6.12
/// has no upper byte of the weight, and older kernels leave anything there. A flag tells whether the byte counts.
fn read_member(member: &[u8], has_upper_byte: bool) -> Option<(u32, u16)> {
    let upper = if has_upper_byte { *member.get(5)? } else { 0 };
    let weight = u16::from_be_bytes([upper, *member.get(4)?]);
    Some((read_u32(member, 0)?, weight.saturating_add(1)))
}

fn read_route(removed: bool, body: &[u8]) -> Result<Option<Message>, Malformed> {
    let header: [u8; RTMSG] = *body.first_chunk().ok_or(Malformed)?;
    let (family, len) = (i32::from(header[0]), header[1]);
    let (any, most): (IpAddr, u8) = match family {
        libc::AF_INET => (Ipv4Addr::UNSPECIFIED.into(), 32),
        libc::AF_INET6 => (Ipv6Addr::UNSPECIFIED.into(), 128),
        _ => return Ok(None),
    };
    if read_u32(&header, 8).is_some_and(|flags| flags & RTM_F_CLONED != 0) {
        // An exception of a route, such as a lower path MTU.
        return Ok(None);
    }
    let attributes = Attributes::after_header(body, RTMSG);
    let to = match attributes.find(RTA_DST) {
        Some(value) => read_address(value).ok_or(Malformed)?,
        None => any,
    };
    if len > most || to.is_ipv4() != any.is_ipv4() {
        return Err(Malformed);
    }
    let number = |kind| attributes.find(kind).and_then(|value| read_u32(value, 0));
    let table = number(RTA_TABLE).unwrap_or(header[4].into());
    let metric = number(RTA_PRIORITY).unwrap_or(0);
    // A route that is removed may have been unusable.
    let hops = if removed { read_all_hops(body, 0)? } else { read_hops(body)? };
    Ok(Some(Message::Route(Route { removed, to, len, table, metric, hops })))
}

/// Reads the usable next hops of a route. Those whose packets get further headers are left out.
pub(super) fn read_hops(body: &[u8]) -> Result<Vec<RouteHop>, Malformed> {
    read_all_hops(body, RTNH_UNUSABLE)
}

/// Reads the next hops of a route without one of the flags `unusable`.
fn read_all_hops(body: &[u8], unusable: u8) -> Result<Vec<RouteHop>, Malformed> {
    let header: [u8; RTMSG] = *body.first_chunk().ok_or(Malformed)?;
    let (kind, flags) = (header[7], read_u32(&header, 8).unwrap_or(0));
    if kind != RTN_UNICAST {
        return Ok(Vec::new());
    }
    let attributes = Attributes::after_header(body, RTMSG);
    let Some(mut list) = attributes.find(RTA_MULTIPATH) else {
        let index = attributes.find(RTA_OIF).and_then(|value| read_u32(value, 0));
        let hop = index.map(|index| read_hop(index, flags as u8 & unusable, attributes)).transpose()?;
        return Ok(hop.flatten().into_iter().collect());
    };
    let mut hops = Vec::new();
    while !list.is_empty() && hops.len() < MAX_HOPS {
        let (len, index) = (read_u16(list, 0).ok_or(Malformed)?, read_u32(list, 4).ok_or(Malformed)?);
        let hop = list.get(..usize::from(len)).ok_or(Malformed)?;
        let attributes = Attributes(hop.get(RTNEXTHOP..).ok_or(Malformed)?);
        hops.extend(read_hop(index, hop[2] & unusable, attributes)?);
        list = list.get(usize::from(len).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(hops)
}

fn read_hop(index: u32, flags: u8, attributes: Attributes<'_>) -> Result<Option<RouteHop>, Malformed> {
    if flags != 0 || attributes.find(RTA_ENCAP).is_some() {
        return Ok(None);
    }
    let via = match (attributes.find(RTA_GATEWAY), attributes.find(RTA_VIA)) {
        (Some(value), _) => Some(read_address(value).ok_or(Malformed)?),
        // struct rtvia: family, address.
        (None, Some(value)) => Some(value.get(2..).and_then(read_address).ok_or(Malformed)?),
        (None, None) => None,
    };
    Ok(Some(RouteHop { index, via }))
}

pub(super) fn read_address(value: &[u8]) -> Option<IpAddr> {
    if let Ok(octets) = <[u8; 4]>::try_from(value) {
        return Some(Ipv4Addr::from(octets).into());
    }
    <[u8; 16]>::try_from(value).ok().map(|octets| Ipv6Addr::from(octets).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::kernel::common::netlink::{ifinfomsg, put};

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

    fn ndmsg(family: i32, index: u32, state: u16, flags: u8) -> Vec<u8> {
        let mut body = vec![family as u8, 0, 0, 0];
        body.extend_from_slice(&index.to_ne_bytes());
        body.extend_from_slice(&state.to_ne_bytes());
        body.extend_from_slice(&[flags, 0]);
        body
    }

    fn vxlan_link() -> Vec<u8> {
        let mut data = Vec::new();
        put(&mut data, IFLA_VXLAN_ID, &42u32.to_ne_bytes());
        put(&mut data, IFLA_VXLAN_LOCAL, &[10, 9, 0, 1]);
        put(&mut data, IFLA_VXLAN_PORT, &4789u16.to_be_bytes());
        put(&mut data, IFLA_VXLAN_LEARNING, &[0]);
        let mut info = Vec::new();
        put(&mut info, IFLA_INFO_KIND, b"vxlan\0");
        put(&mut info, IFLA_INFO_DATA, &data);
        let mut body = ifinfomsg(9, IFF_UP, 0);
        put(&mut body, IFLA_IFNAME, b"vx42\0");
        put(&mut body, IFLA_ADDRESS, &MAC.0);
        put(&mut body, IFLA_MASTER, &8u32.to_ne_bytes());
        put(&mut body, IFLA_LINKINFO, &info);
        body
    }

    fn fdb(mac: MacAddr, vtep: [u8; 4]) -> Vec<u8> {
        let mut body = ndmsg(libc::AF_BRIDGE, 9, 0x80, NTF_SELF | NTF_EXT_LEARNED);
        put(&mut body, NDA_LLADDR, &mac.0);
        put(&mut body, NDA_DST, &vtep);
        body
    }

    fn of_bridge() -> Vec<u8> {
        let mut body = ndmsg(libc::AF_BRIDGE, 9, 0x02, NTF_EXT_LEARNED);
        put(&mut body, NDA_LLADDR, &MAC.0);
        put(&mut body, NDA_MASTER, &8u32.to_ne_bytes());
        put(&mut body, NDA_VLAN, &7u16.to_ne_bytes());
        body
    }

    fn neighbour(state: u16) -> Vec<u8> {
        let mut body = ndmsg(libc::AF_INET6, 8, state, NTF_EXT_LEARNED | NTF_ROUTER);
        put(&mut body, NDA_DST, &[0xfd; 16]);
        put(&mut body, NDA_LLADDR, &MAC.0);
        put(&mut body, NDA_PROTOCOL, &[11]);
        body
    }

    #[test]
    fn messages_are_read() {
        let vxlan = Vxlan { vni: 42, local: Some([10, 9, 0, 1].into()), port: 4789, learning: false };
        let link = Link {
            index: 9,
            name: "vx42".to_owned(),
            alias: None,
            mac: Some(MAC),
            master: Some(8),
            up: true,
            kind: LinkKind::Vxlan(vxlan),
        };
        assert_eq!(Message::read(RTM_NEWLINK, &vxlan_link()), Ok(Some(Message::Link(link))));
        assert_eq!(Message::read(RTM_DELLINK, &vxlan_link()), Ok(Some(Message::LinkRemoved(9))));
        let tunnel = TunnelEntry {
            removed: false,
            device: 9,
            mac: MAC,
            vtep: Some([10, 9, 0, 2].into()),
            nexthop: None,
            vni: None,
        };
        let read = Message::read(RTM_NEWNEIGH, &fdb(MAC, [10, 9, 0, 2]));
        assert_eq!(read, Ok(Some(Message::Fdb(Fdb::Tunnel(tunnel)))));
        let entry = BridgeEntry { removed: true, bridge: 8, port: 9, mac: MAC, vlan: Some(7), external: true };
        assert_eq!(Message::read(RTM_DELNEIGH, &of_bridge()), Ok(Some(Message::Fdb(Fdb::Bridge(entry)))));
        let address = IpAddr::from([0xfd; 16]);
        let state = NudState::Fixed;
        let mac = Some(MAC);
        let known = Neighbour { index: 8, address, state, mac, external: true, is_router: true, protocol: 11 };
        assert_eq!(Message::read(RTM_NEWNEIGH, &neighbour(0x40)), Ok(Some(Message::Neighbour(known))));
        let unknown = Neighbour { mac: None, state: NudState::None, ..known };
        assert_eq!(Message::read(RTM_DELNEIGH, &neighbour(0x40)), Ok(Some(Message::Neighbour(unknown))));
        let failed = Neighbour { state: NudState::Failed, ..unknown };
        assert_eq!(Message::read(RTM_NEWNEIGH, &neighbour(0x20)), Ok(Some(Message::Neighbour(failed))));
    }

    #[test]
    fn nexthop_objects_are_read() {
        let with = |attributes: &[(u16, &[u8])]| {
            let mut body = vec![0; NHMSG];
            attributes.iter().for_each(|(kind, value)| put(&mut body, *kind, value));
            body
        };
        let read = |kind, attributes: &[(u16, &[u8])]| Message::read(kind, &with(attributes));
        let is = |id, to| Ok(Some(Message::Nexthop(Nexthop { id, to })));
        let id: (u16, &[u8]) = (NHA_ID, &7u32.to_ne_bytes());
        let fdb: (u16, &[u8]) = (NHA_FDB, &[]);
        let vtep: (u16, &[u8]) = (NHA_GATEWAY, &[10, 9, 0, 2]);
        let to = Some(NexthopTarget::Vtep([10, 9, 0, 2].into()));
        assert_eq!(read(RTM_NEWNEXTHOP, &[id, vtep, fdb]), is(7, to));
        let mut members = Vec::new();
        for (member, weight) in [(1u32, [0, 0]), (2, [4, 1]), (3, [0xff, 0xff])] {
            members.extend_from_slice(&member.to_ne_bytes());
            members.extend_from_slice(&[weight[0], weight[1], 0, 0]);
        }
        members.push(9);
        let group: (u16, &[u8]) = (NHA_GROUP, &members);
        let flags: (u16, &[u8]) = (NHA_OP_FLAGS, &NHA_OP_FLAG_RESP_GRP_RESVD_0.to_ne_bytes());
        let of = |weights: [u16; 3]| is(7, Some(NexthopTarget::Group((1..).zip(weights).collect())));
        assert_eq!(read(RTM_NEWNEXTHOP, &[id, group, fdb, flags]), of([1, 261, u16::MAX]));
        assert_eq!(read(RTM_NEWNEXTHOP, &[id, group, fdb]), of([1, 5, 256]), "the upper byte may be anything");
        assert_eq!(read(RTM_DELNEXTHOP, &[id, group, fdb]), is(7, None), "removed");
        assert_eq!(read(RTM_NEWNEXTHOP, &[id, vtep]), is(7, None), "of routes");
        assert_eq!(read(RTM_NEWNEXTHOP, &[vtep, fdb]), Err(Malformed), "no number");
        assert_eq!(read(RTM_NEWNEXTHOP, &[id, (NHA_GATEWAY, &[1, 2]), fdb]), Err(Malformed), "no address");
        assert_eq!(Message::read(RTM_NEWNEXTHOP, &[0; NHMSG - 1]), Err(Malformed));
    }

    fn rtmsg(family: i32, len: u8, kind: u8) -> Vec<u8> {
        vec![family as u8, len, 0, 0, 254, 0, 0, kind, 0, 0, 0, 0]
    }

    /// A route by two routers, one of them of the other IP version, and by three next hops that are not usable.
    fn multipath() -> Vec<u8> {
        let mut hops = Vec::new();
        let mut hop = |flags: u8, kind: u16, value: &[u8]| {
            let mut attributes = Vec::new();
            put(&mut attributes, kind, value);
            hops.extend_from_slice(&((RTNEXTHOP + attributes.len()) as u16).to_ne_bytes());
            hops.extend_from_slice(&[flags, 0]);
            hops.extend_from_slice(&7u32.to_ne_bytes());
            hops.extend_from_slice(&attributes);
        };
        hop(0, RTA_GATEWAY, &[10, 9, 0, 2]);
        hop(0, RTA_VIA, &[&(libc::AF_INET6 as u16).to_ne_bytes()[..], &[0xfd; 16]].concat());
        hop(1, RTA_GATEWAY, &[10, 9, 0, 3]);
        hop(16, RTA_GATEWAY, &[10, 9, 0, 4]);
        hop(0, RTA_ENCAP, &[0; 4]);
        let mut body = rtmsg(libc::AF_INET, 16, RTN_UNICAST);
        put(&mut body, RTA_DST, &[10, 77, 0, 0]);
        put(&mut body, RTA_MULTIPATH, &hops);
        body
    }

    #[test]
    fn routes_are_read() {
        let body = multipath();
        let to = IpAddr::from([10, 77, 0, 0]);
        let hop = |via: Option<IpAddr>| RouteHop { index: 7, via };
        let via = [Some(IpAddr::from([10, 9, 0, 2])), Some(IpAddr::from([0xfd; 16]))];
        let unusable = [[10, 9, 0, 3], [10, 9, 0, 4]].map(|address| hop(Some(address.into())));
        let hops = [via.map(hop), unusable].concat();
        let route = Route { removed: true, to, len: 16, table: 254, metric: 0, hops };
        assert_eq!(Message::read(RTM_DELROUTE, &body), Ok(Some(Message::Route(route.clone()))));
        let mut numbered = body.clone();
        put(&mut numbered, RTA_TABLE, &4001u32.to_ne_bytes());
        put(&mut numbered, RTA_PRIORITY, &20u32.to_ne_bytes());
        let route = Route { removed: false, table: 4001, metric: 20, hops: via.map(hop).to_vec(), ..route };
        assert_eq!(Message::read(RTM_NEWROUTE, &numbered), Ok(Some(Message::Route(route))));
        let mut exception = body.clone();
        exception[8..12].copy_from_slice(&RTM_F_CLONED.to_ne_bytes());
        assert_eq!(Message::read(RTM_NEWROUTE, &exception), Ok(None));
        let mut on_link = rtmsg(libc::AF_INET6, 0, RTN_UNICAST);
        assert_eq!(read_hops(&on_link), Ok(vec![]), "no interface");
        put(&mut on_link, RTA_OIF, &7u32.to_ne_bytes());
        assert_eq!(read_hops(&on_link), Ok(vec![hop(None)]));
        let any = Ipv6Addr::UNSPECIFIED.into();
        let route = Route { removed: false, to: any, len: 0, table: 254, metric: 0, hops: vec![hop(None)] };
        assert_eq!(Message::read(RTM_NEWROUTE, &on_link), Ok(Some(Message::Route(route))));
        on_link[7] = 6;
        assert_eq!(read_hops(&on_link), Ok(vec![]), "a black hole");
        assert_eq!(Message::read(RTM_NEWRULE, &[]), Ok(Some(Message::Routing)));
        assert_eq!(Message::read(RTM_NEWROUTE, &rtmsg(libc::AF_INET, 33, 1)), Err(Malformed));
        assert_eq!(Message::read(RTM_NEWROUTE, &rtmsg(127, 0, 1)), Ok(None));
        for cut in 0..body.len() {
            _ = read_hops(&body[..cut]);
            let mut wrong = body.clone();
            for flip in [0xff, 0x01] {
                wrong[cut] = body[cut] ^ flip;
                _ = read_hops(&wrong);
                _ = Message::read(RTM_NEWROUTE, &wrong);
            }
        }
    }

    #[test]
    fn changes_of_addresses_name_their_link() {
        let body = [&[libc::AF_INET6 as u8, 64, 0, 0][..], &7u32.to_ne_bytes()].concat();
        for kind in [RTM_NEWADDR, RTM_DELADDR] {
            assert_eq!(Message::read(kind, &body), Ok(Some(Message::AddressesChanged(7))));
            assert_eq!(Message::read(kind, &body[..7]), Err(Malformed));
        }
    }

    #[test]
    fn other_messages_are_ignored() {
        let mut of_port = vxlan_link();
        of_port[0] = libc::AF_BRIDGE as u8;
        assert_eq!(Message::read(RTM_DELLINK, &of_port), Ok(None), "a port left its bridge");
        assert_eq!(Message::read(64, &[0; 12]), Ok(None));
        let mut ipv6 = vxlan_link();
        ipv6[0] = libc::AF_INET6 as u8;
        assert_eq!(Message::read(RTM_NEWLINK, &ipv6), Ok(Some(Message::Ipv6Changed(9))));
        let mut own = ndmsg(libc::AF_BRIDGE, 3, 0x80, NTF_SELF);
        put(&mut own, NDA_LLADDR, &[0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(Message::read(RTM_NEWNEIGH, &own), Ok(None), "a multicast address that a device accepts");
        assert_eq!(Message::read(RTM_NEWNEIGH, &ndmsg(127, 3, 0, 0)), Ok(None));
    }

    #[test]
    fn malformed_messages_are_refused() {
        for (kind, body) in [
            (RTM_NEWLINK, vxlan_link()),
            (RTM_NEWNEIGH, fdb(MAC, [10, 9, 0, 2])),
            (RTM_NEWNEIGH, of_bridge()),
            (RTM_NEWNEIGH, neighbour(0x02)),
        ] {
            assert_eq!(Message::read(kind, &body[..NDMSG - 1]), Err(Malformed));
            for cut in 0..body.len() {
                _ = Message::read(kind, &body[..cut]);
                let mut wrong = body.clone();
                wrong[cut] = !wrong[cut];
                _ = Message::read(kind, &wrong);
            }
        }
        let mut short = ndmsg(libc::AF_BRIDGE, 9, 0x80, NTF_SELF);
        put(&mut short, NDA_LLADDR, &[2, 0, 0, 0, 0]);
        put(&mut short, NDA_DST, &[10, 9, 0, 2]);
        assert_eq!(Message::read(RTM_NEWNEIGH, &short), Err(Malformed));
        assert_eq!(Message::read(RTM_NEWNEIGH, &fdb(MAC, [10, 9, 0, 2])[..NDMSG + 12 + 7]), Ok(None), "no VTEP");
        let mut of_other_version = ndmsg(libc::AF_INET, 8, 0x02, 0);
        put(&mut of_other_version, NDA_DST, &[0xfd; 16]);
        assert_eq!(Message::read(RTM_NEWNEIGH, &of_other_version), Err(Malformed));
        assert_eq!(Message::read(RTM_NEWNEIGH, &ndmsg(libc::AF_INET, 0, 0x02, 0)), Err(Malformed), "no index");
    }
}
