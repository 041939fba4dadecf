//! The kernel's end of a TAP device: its network interface.

use std::io;
use std::net::IpAddr;
use std::str::FromStr;

use crate::drivers::kernel::common::netlink::{Netlink, ifinfomsg, put};
use crate::port::MacAddr;

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const NLM_F_CREATE_OR_REPLACE: u16 = 0x500;
const IFLA_ADDRESS: u16 = 1;
const IFLA_MTU: u16 = 4;
const IFLA_TXQLEN: u16 = 13;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFA_F_NODAD: u32 = 2;
const IFF_UP: u32 = 1;

/// IP address with a prefix length: `10.0.0.1/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    address: IpAddr,
    length: u8,
}

impl FromStr for Prefix {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, length) = text.split_once('/').ok_or(())?;
        let address: IpAddr = address.parse().map_err(drop)?;
        let length = length.parse().map_err(drop)?;
        let max_length = if address.is_ipv4() { 32 } else { 128 };
        if length > max_length { Err(()) } else { Ok(Self { address, length }) }
    }
}

/// Configuration of the interface.
pub(super) struct InterfaceConfig {
    pub(super) mtu: u16,
    /// Transmit queue length: frames that may wait for the port in each queue.
    pub(super) depth: u32,
    pub(super) mac: Option<MacAddr>,
}

impl InterfaceConfig {
    /// Applies the configuration and sets the interface up.
    pub(super) fn apply(&self, netlink: &mut Netlink, index: u32) -> io::Result<()> {
        let mut body = ifinfomsg(index, 0, 0);
        put(&mut body, IFLA_MTU, &u32::from(self.mtu).to_ne_bytes());
        put(&mut body, IFLA_TXQLEN, &self.depth.to_ne_bytes());
        if let Some(mac) = self.mac {
            put(&mut body, IFLA_ADDRESS, &mac.0);
        }
        netlink.request(RTM_NEWLINK, 0, &body, |_, _| {})?;
        netlink.request(RTM_NEWLINK, 0, &ifinfomsg(index, IFF_UP, IFF_UP), |_, _| {})?;
        Ok(())
    }
}

impl Prefix {
    /// Adds the address to the interface.
    pub(super) fn add(self, netlink: &mut Netlink, index: u32) -> io::Result<()> {
        let (family, bytes) = match self.address {
            IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
            IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
        };
        // struct ifaddrmsg: family, prefix length, flags, scope, index.
        let mut body = vec![family as u8, self.length, 0, 0];
        body.extend_from_slice(&index.to_ne_bytes());
        put(&mut body, IFA_LOCAL, &bytes);
        put(&mut body, IFA_ADDRESS, &bytes);
        // Nobody else can be on this link yet, so duplicate address detection is not needed.
        put(&mut body, IFA_FLAGS, &IFA_F_NODAD.to_ne_bytes());
        netlink.request(RTM_NEWADDR, NLM_F_CREATE_OR_REPLACE, &body, |_, _| {})
    }

    pub(super) fn is_ipv6(self) -> bool {
        self.address.is_ipv6()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes() {
        assert_eq!("10.0.0.1/24".parse(), Ok(Prefix { address: [10, 0, 0, 1].into(), length: 24 }));
        assert!("fd00::1/128".parse::<Prefix>().is_ok());
        for wrong in ["10.0.0.1", "10.0.0.1/33", "fd00::1/129", "10.0.0/8", "/8", "10.0.0.1/-1"] {
            assert!(wrong.parse::<Prefix>().is_err(), "{wrong}");
        }
    }
}
