//! Flow bifurcation: a port takes only some packets of its interface, and the kernel keeps all others.

use std::net::IpAddr;

/// Packets that a port takes. All others stay with the kernel, which owns the addresses.
///
/// Packets have no VLAN tag and one of these destinations. Extension headers of IPv6 other than a fragment header are
/// not skipped. Flow rules of a NIC see neither, so a NIC takes such packets too, and no fragments of UDP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bifurcation {
    /// Destinations.
    pub addresses: Vec<IpAddr>,
    /// UDP destination ports.
    pub udp_ports: Vec<u16>,
    /// Protocol numbers of IP, for packets without ports.
    pub protocols: Vec<u8>,
    /// If true, the port also takes the later fragments of datagrams whose first fragment it took. Otherwise these stay
    /// with the kernel. Later fragments that come before the first one stay with it in any case.
    pub later_fragments: bool,
}
