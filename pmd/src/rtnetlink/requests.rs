//! Requests: whole tables, devices and their addresses, entries of bridges, routes to a destination, and neighbours.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;

use super::messages::{
    IFF_UP, IFLA_ADDRESS, IFLA_IFALIAS, IFLA_IFNAME, IFLA_INFO_DATA, IFLA_INFO_KIND, IFLA_LINKINFO, IFLA_MASTER,
    IFLA_VXLAN_ID, IFLA_VXLAN_LEARNING, IFLA_VXLAN_LOCAL, IFLA_VXLAN_LOCAL6, IFLA_VXLAN_PORT, NDA_DST, NDA_LLADDR,
    NDA_PROTOCOL, NDMSG, NHMSG, NTF_EXT_LEARNED, NTF_ROUTER, RTA_DST, RTM_DELADDR, RTM_DELLINK, RTM_DELNEIGH,
    RTM_NEWADDR, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWROUTE, RTMSG, read_address, read_hops,
};
use super::{Malformed, Message, Neighbour, RouteHop, Vxlan};
use crate::drivers::kernel::common::netlink::{Attributes, Netlink, ifinfomsg, put, read_u32};
use crate::port::MacAddr;

const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_GETADDR: u16 = 22;
const RTM_GETROUTE: u16 = 26;
const RTM_GETNEIGH: u16 = 30;
const RTM_GETNEXTHOP: u16 = 106;
/// `NLM_F_CREATE`.
const CREATE_OR_KEEP: u16 = 0x400;
/// `NLM_F_CREATE` and `NLM_F_EXCL`.
const CREATE: u16 = 0x600;
/// `NLM_F_CREATE` and `NLM_F_REPLACE`.
const CREATE_OR_REPLACE: u16 = 0x500;

const IFLA_PROTINFO: u16 = 12;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_BR_FORWARD_DELAY: u16 = 1;
const IFLA_BR_MCAST_SNOOPING: u16 = 23;
/// `BR_STATE_LISTENING` of linux/if_bridge.h.
const LISTENING: u8 = 1;
const IFLA_BRPORT_STATE: u16 = 1;
const IFLA_BRPORT_LEARNING: u16 = 8;
const IFLA_BRPORT_NEIGH_SUPPRESS: u16 = 32;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
/// `IN6_ADDR_GEN_MODE_NONE`: the interface gets no link-local address.
const NO_ADDRESS: u8 = 1;
const VETH_INFO_PEER: u16 = 1;
/// `NLA_F_NESTED`.
const NESTED: u16 = 1 << 15;
/// `RTM_F_FIB_MATCH`: the reply is the whole route, with all next hops.
const RTM_F_FIB_MATCH: u32 = 0x2000;
const NTF_USE: u8 = 0x01;
const NTF_MASTER: u8 = 0x04;
const NUD_REACHABLE: u16 = 0x02;
const NUD_PERMANENT: u16 = 0x80;

/// Length of `struct ifaddrmsg`.
const IFADDRMSG: usize = 8;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// `IFA_F_NODAD`: the address is used at once, without a search for others that use it.
const IFA_F_NODAD: u8 = 0x02;

/// A table of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// All links.
    Links,
    /// The forwarding databases of all devices.
    Fdb,
    /// The ARP and ND tables.
    Neighbours,
    /// Nexthop objects. Kernels before Linux 5.3 have none.
    Nexthops,
    /// The routes of all tables.
    Routes,
}

/// An IP address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// The address.
    pub address: IpAddr,
    /// An address of the network on the link (`IFA_ADDRESS`): the same one, or that of the other host on a link between
    /// two hosts.
    pub network: IpAddr,
    /// Prefix length of the network, in bits.
    pub len: u8,
}

impl LinkAddress {
    /// Address in a network of this prefix length.
    pub fn new(address: IpAddr, len: u8) -> Self {
        Self { address, network: address, len }
    }

    /// Returns a `struct ifaddrmsg` for the address on a link, with its attributes.
    fn message(self, index: u32) -> Vec<u8> {
        let (family, octets) = family_and_octets(self.address);
        let mut body = vec![family, self.len, IFA_F_NODAD, 0];
        body.extend_from_slice(&index.to_ne_bytes());
        put(&mut body, IFA_LOCAL, &octets);
        put(&mut body, IFA_ADDRESS, &family_and_octets(self.network).1);
        body
    }
}

/// A socket for requests.
#[derive(Debug)]
pub struct Requests {
    netlink: Netlink,
}

impl Requests {
    /// Opens the socket.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { netlink: Netlink::route()? })
    }

    /// Passes all entries of a table to `each`. Returns false if the table changed meanwhile, so that entries may be
    /// missing (`NLM_F_DUMP_INTR`).
    ///
    /// # Errors
    /// If the kernel refuses the request.
    pub fn dump(&mut self, table: Table, mut each: impl FnMut(Result<Message, Malformed>)) -> io::Result<bool> {
        let (kind, body) = match table {
            Table::Links => (RTM_GETLINK, ifinfomsg(0, 0, 0)),
            Table::Fdb => {
                let mut body = ifinfomsg(0, 0, 0);
                body[0] = libc::AF_BRIDGE as u8;
                (RTM_GETNEIGH, body)
            }
            Table::Neighbours => (RTM_GETNEIGH, vec![0; NDMSG]),
            Table::Nexthops => (RTM_GETNEXTHOP, vec![0; NHMSG]),
            Table::Routes => (RTM_GETROUTE, vec![0; RTMSG]),
        };
        let dumped = self.netlink.dump(kind, &body, |kind, body| {
            if let Some(message) = Message::read(kind, body).transpose() {
                each(message);
            }
        });
        match dumped {
            // A kernel without such objects has none.
            Err(error) if table == Table::Nexthops && error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(true),
            dumped => dumped,
        }
    }

    /// Creates a bridge without multicast snooping.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn add_bridge(&mut self, name: &str) -> io::Result<()> {
        let mut data = Vec::new();
        // With a delay, the kernel has timers that let a port forward, also without a spanning tree.
        put(&mut data, IFLA_BR_FORWARD_DELAY, &0_u32.to_ne_bytes());
        put(&mut data, IFLA_BR_MCAST_SNOOPING, &[0]);
        self.add_link(name, "bridge", &data)
    }

    /// Creates a VXLAN device.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn add_vxlan(&mut self, name: &str, vxlan: &Vxlan) -> io::Result<()> {
        let mut data = Vec::new();
        put(&mut data, IFLA_VXLAN_ID, &vxlan.vni.to_ne_bytes());
        match vxlan.local {
            Some(IpAddr::V4(local)) => put(&mut data, IFLA_VXLAN_LOCAL, &local.octets()),
            Some(IpAddr::V6(local)) => put(&mut data, IFLA_VXLAN_LOCAL6, &local.octets()),
            None => {}
        }
        put(&mut data, IFLA_VXLAN_PORT, &vxlan.port.to_be_bytes());
        put(&mut data, IFLA_VXLAN_LEARNING, &[vxlan.learning.into()]);
        self.add_link(name, "vxlan", &data)
    }

    /// Creates a virtual cable with these ends.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn add_veth(&mut self, name: &str, peer: &str) -> io::Result<()> {
        let mut end = ifinfomsg(0, 0, 0);
        put_name(&mut end, peer);
        let mut data = Vec::new();
        put(&mut data, VETH_INFO_PEER, &end);
        self.add_link(name, "veth", &data)
    }

    fn add_link(&mut self, name: &str, kind: &str, data: &[u8]) -> io::Result<()> {
        let mut info = Vec::new();
        put(&mut info, IFLA_INFO_KIND, kind.as_bytes());
        put(&mut info, IFLA_INFO_DATA | NESTED, data);
        let mut body = ifinfomsg(0, 0, 0);
        put_name(&mut body, name);
        put(&mut body, IFLA_LINKINFO | NESTED, &info);
        self.netlink.request(RTM_NEWLINK, CREATE, &body, |_, _| {})
    }

    /// Sets the alias of the link with this name.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_alias(&mut self, name: &str, alias: &str) -> io::Result<()> {
        let mut body = ifinfomsg(0, 0, 0);
        put_name(&mut body, name);
        put(&mut body, IFLA_IFALIAS, alias.as_bytes());
        self.netlink.request(RTM_SETLINK, 0, &body, |_, _| {})
    }

    /// Makes a link a port of a bridge.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_master(&mut self, index: u32, bridge: u32) -> io::Result<()> {
        let mut body = ifinfomsg(index, 0, 0);
        put(&mut body, IFLA_MASTER, &bridge.to_ne_bytes());
        self.netlink.request(RTM_SETLINK, 0, &body, |_, _| {})
    }

    /// Sets the Ethernet address of a link.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_mac(&mut self, index: u32, mac: MacAddr) -> io::Result<()> {
        let mut body = ifinfomsg(index, 0, 0);
        put(&mut body, IFLA_ADDRESS, &mac.0);
        self.netlink.request(RTM_SETLINK, 0, &body, |_, _| {})
    }

    /// Returns the IP addresses of all links by the index of the link. Link-local ones of IPv6 are left out. The second
    /// value is false if addresses changed meanwhile, so that some may be missing.
    ///
    /// # Errors
    /// If the kernel refuses the request.
    pub fn addresses(&mut self) -> io::Result<(HashMap<u32, Vec<LinkAddress>>, bool)> {
        let mut found: HashMap<u32, Vec<LinkAddress>> = HashMap::new();
        let is_complete = self.netlink.dump(RTM_GETADDR, &[0; IFADDRMSG], |kind, body| {
            let index = read_u32(body, 4).filter(|_| kind == RTM_NEWADDR);
            let attributes = Attributes::after_header(body, IFADDRMSG);
            let read = |kind| attributes.find(kind).and_then(read_address);
            let address = read(IFA_LOCAL).or(read(IFA_ADDRESS)).filter(|address| match address {
                IpAddr::V6(address) => !address.is_unicast_link_local(),
                IpAddr::V4(_) => true,
            });
            if let (Some(index), Some(address), Some(&len)) = (index, address, body.get(1)) {
                let network = read(IFA_ADDRESS).unwrap_or(address);
                found.entry(index).or_default().push(LinkAddress { address, network, len });
            }
        })?;
        Ok((found, is_complete))
    }

    /// Gives a link an IP address. Does nothing if it has it.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn add_address(&mut self, index: u32, address: LinkAddress) -> io::Result<()> {
        self.netlink.request(RTM_NEWADDR, CREATE_OR_REPLACE, &address.message(index), |_, _| {})
    }

    /// Takes an IP address from a link, unless it does not have it.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn remove_ip_address(&mut self, index: u32, address: LinkAddress) -> io::Result<()> {
        match self.netlink.request(RTM_DELADDR, 0, &address.message(index), |_, _| {}) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::ENODEV)) => Ok(()),
            removed => removed,
        }
    }

    /// Sets a link up.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        self.netlink.request(RTM_SETLINK, 0, &ifinfomsg(index, IFF_UP, IFF_UP), |_, _| {})
    }

    /// Leaves the link with this name without an IPv6 link-local address, so that the kernel sends nothing there by
    /// itself. Does nothing in a kernel without IPv6.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_no_link_local(&mut self, name: &str) -> io::Result<()> {
        let mut mode = Vec::new();
        put(&mut mode, IFLA_INET6_ADDR_GEN_MODE, &[NO_ADDRESS]);
        let mut families = Vec::new();
        put(&mut families, libc::AF_INET6 as u16 | NESTED, &mode);
        let mut body = ifinfomsg(0, 0, 0);
        put_name(&mut body, name);
        put(&mut body, IFLA_AF_SPEC | NESTED, &families);
        match self.netlink.request(RTM_SETLINK, 0, &body, |_, _| {}) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP)) => Ok(()),
            set => set,
        }
    }

    /// Sets whether a port of a bridge learns addresses, and whether the bridge answers ARP and ND requests there.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_bridge_port(&mut self, index: u32, learning: bool, neigh_suppress: bool) -> io::Result<()> {
        let mut port = Vec::new();
        put(&mut port, IFLA_BRPORT_LEARNING, &[learning.into()]);
        put(&mut port, IFLA_BRPORT_NEIGH_SUPPRESS, &[neigh_suppress.into()]);
        self.change_bridge_port(index, &port)
    }

    /// Lets a port of a bridge drop all frames in both directions, as one does in the state "listening" of a spanning
    /// tree. Without a spanning tree and with a forward delay of 0, the port stays so until it or the bridge is set up
    /// again. Both have to be up.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_bridge_port_listening(&mut self, index: u32) -> io::Result<()> {
        let mut port = Vec::new();
        put(&mut port, IFLA_BRPORT_STATE, &[LISTENING]);
        self.change_bridge_port(index, &port)
    }

    fn change_bridge_port(&mut self, index: u32, attributes: &[u8]) -> io::Result<()> {
        let mut body = ifinfomsg(index, 0, 0);
        body[0] = libc::AF_BRIDGE as u8;
        put(&mut body, IFLA_PROTINFO | NESTED, attributes);
        self.netlink.request(RTM_SETLINK, 0, &body, |_, _| {})
    }

    /// Removes a link, unless it does not exist.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn remove_link(&mut self, index: u32) -> io::Result<()> {
        match self.netlink.request(RTM_DELLINK, 0, &ifinfomsg(index, 0, 0), |_, _| {}) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            removed => removed,
        }
    }

    /// Puts an address behind a port of a bridge, as `bridge fdb replace MAC dev PORT master extern_learn dynamic`.
    /// The bridge does not age the entry.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn put_address(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
        let body = bridge_entry(port, mac, NUD_REACHABLE, NTF_MASTER | NTF_EXT_LEARNED);
        self.netlink.request(RTM_NEWNEIGH, CREATE_OR_REPLACE, &body, |_, _| {})
    }

    /// Removes an address behind a port of a bridge, unless it is not there.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn remove_address(&mut self, port: u32, mac: MacAddr) -> io::Result<()> {
        match self.netlink.request(RTM_DELNEIGH, 0, &bridge_entry(port, mac, 0, NTF_MASTER), |_, _| {}) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            removed => removed,
        }
    }

    /// Puts an entry into the ARP or ND table:
    /// `ip neigh replace IP dev LINK lladdr MAC nud permanent protocol NUMBER`.
    /// The kernel neither solicits the address nor removes the entry for want of room, and its limits (`gc_thresh`) do
    /// not count the entry. Returns false if the kernel or the interface does not have the IP version.
    ///
    /// # Errors
    /// If the kernel refuses it for another reason.
    pub fn put_neighbour(
        &mut self,
        index: u32,
        address: IpAddr,
        mac: MacAddr,
        is_router: bool,
        protocol: u8,
    ) -> io::Result<bool> {
        let mut body = neighbour_entry(index, address, if is_router { NTF_ROUTER } else { 0 });
        body[8..10].copy_from_slice(&NUD_PERMANENT.to_ne_bytes());
        put(&mut body, NDA_LLADDR, &mac.0);
        put(&mut body, NDA_PROTOCOL, &[protocol]);
        match self.netlink.request(RTM_NEWNEIGH, CREATE_OR_REPLACE, &body, |_, _| {}) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EINVAL)) => Ok(false),
            written => written.map(|()| true),
        }
    }

    /// Removes an entry of the ARP or ND table, unless it is not there.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn remove_neighbour(&mut self, index: u32, address: IpAddr) -> io::Result<()> {
        match self.netlink.request(RTM_DELNEIGH, 0, &neighbour_entry(index, address, 0), |_, _| {}) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::EAFNOSUPPORT)) => {
                Ok(())
            }
            removed => removed,
        }
    }

    /// Returns the usable next hops of the kernel's route to a destination, which are none without a route.
    ///
    /// # Errors
    /// If the kernel refuses the request or its reply is malformed.
    pub fn route_to(&mut self, destination: IpAddr) -> io::Result<Vec<RouteHop>> {
        let (family, octets) = family_and_octets(destination);
        let mut body = vec![0; RTMSG];
        (body[0], body[1]) = (family, 8 * octets.len() as u8);
        body[8..].copy_from_slice(&RTM_F_FIB_MATCH.to_ne_bytes());
        put(&mut body, RTA_DST, &octets);
        let mut hops = Ok(Vec::new());
        let asked = self.netlink.request(RTM_GETROUTE, 0, &body, |kind, body| {
            if kind == RTM_NEWROUTE {
                hops = read_hops(body);
            }
        });
        match asked {
            Ok(()) => hops.map_err(|Malformed| io::ErrorKind::InvalidData.into()),
            // The errors of missing routes and of routes of the kinds unreachable, prohibit and blackhole.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL)
                ) =>
            {
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the entry of an address in the ARP or ND table; `None` if there is none.
    ///
    /// # Errors
    /// If the kernel refuses the request (before Linux 5.0).
    pub fn neighbour(&mut self, index: u32, address: IpAddr) -> io::Result<Option<Neighbour>> {
        let mut found = None;
        let asked = self.netlink.request(RTM_GETNEIGH, 0, &neighbour_entry(index, address, 0), |kind, body| {
            if let Ok(Some(Message::Neighbour(neighbour))) = Message::read(kind, body) {
                found = Some(neighbour);
            }
        });
        match asked {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(None),
            asked => asked.map(|()| found),
        }
    }

    /// Tells the kernel that an address is in use, as a packet to it would. The kernel then solicits the address
    /// unless it is confirmed. The entry must not be a permanent one, which would lose that property. Returns false if
    /// the interface is gone or down, or the table of the kernel is full.
    ///
    /// # Errors
    /// If the kernel refuses the request for another reason.
    pub fn use_neighbour(&mut self, index: u32, address: IpAddr) -> io::Result<bool> {
        let entry = neighbour_entry(index, address, NTF_USE);
        match self.netlink.request(RTM_NEWNEIGH, CREATE_OR_KEEP, &entry, |_, _| {}) {
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENODEV | libc::ENETDOWN | libc::EINVAL | libc::ENOBUFS)
                ) =>
            {
                Ok(false)
            }
            used => used.map(|()| true),
        }
    }
}

fn family_and_octets(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, address.octets().to_vec()),
    }
}

/// Returns a `struct ndmsg` for an entry of an ARP or ND table, with its IP address.
fn neighbour_entry(index: u32, address: IpAddr, flags: u8) -> Vec<u8> {
    let (family, octets) = family_and_octets(address);
    let mut body = vec![family, 0, 0, 0];
    body.extend_from_slice(&index.to_ne_bytes());
    body.extend_from_slice(&[0, 0, flags, 0]);
    put(&mut body, NDA_DST, &octets);
    body
}

/// Returns a `struct ndmsg` for an entry of a bridge, with its address.
fn bridge_entry(port: u32, mac: MacAddr, state: u16, flags: u8) -> Vec<u8> {
    let mut body = vec![libc::AF_BRIDGE as u8, 0, 0, 0];
    body.extend_from_slice(&port.to_ne_bytes());
    body.extend_from_slice(&state.to_ne_bytes());
    body.extend_from_slice(&[flags, 0]);
    put(&mut body, NDA_LLADDR, &mac.0);
    body
}

fn put_name(body: &mut Vec<u8>, name: &str) {
    let mut text = name.as_bytes().to_vec();
    text.push(0);
    put(body, IFLA_IFNAME, &text);
}
