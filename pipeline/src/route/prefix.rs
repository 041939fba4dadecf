use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An IPv4 or IPv6 network: an address whose host bits are zero, and a prefix length.
///
/// Networks are ordered as in a listing: IPv4 first, then by address, and a shorter prefix before a longer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetworkPrefix {
    is_v6: bool,
    /// The address from the most significant bit on.
    bits: u128,
    len: u8,
}

/// Error of parsing a [`NetworkPrefix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    /// The text is not an address, a slash and a number.
    #[error("expected an address and a prefix length, such as 10.0.0.0/8 or fd00::/16")]
    Syntax,
    /// The prefix length exceeds that of an address.
    #[error("a prefix length is at most 32 for IPv4 and 128 for IPv6")]
    Length,
    /// The address has bits behind the prefix.
    #[error("the address has host bits; its network is {0}")]
    HostBits(NetworkPrefix),
}

impl NetworkPrefix {
    /// Returns the network of an address, whose host bits may be set. Returns `None` if `len` exceeds 32 for IPv4 or
    /// 128 for IPv6.
    pub const fn new(address: IpAddr, len: u8) -> Option<Self> {
        let (is_v6, bits, width) = match address {
            IpAddr::V4(v4) => (false, (v4.to_bits() as u128) << 96, 32),
            IpAddr::V6(v6) => (true, v6.to_bits(), 128),
        };
        if len > width {
            return None;
        }
        Some(Self { is_v6, bits: bits & mask(len), len })
    }

    /// Network address.
    pub const fn address(self) -> IpAddr {
        if self.is_v6 {
            IpAddr::V6(Ipv6Addr::from_bits(self.bits))
        } else {
            IpAddr::V4(Ipv4Addr::from_bits((self.bits >> 96) as u32))
        }
    }

    /// Prefix length in bits.
    #[expect(clippy::len_without_is_empty, reason = "a prefix length is not a number of elements")]
    pub const fn len(self) -> u8 {
        self.len
    }

    /// Returns whether the network is one of IPv6.
    pub const fn is_ipv6(self) -> bool {
        self.is_v6
    }

    /// Returns whether an address is in the network.
    pub fn contains(self, address: IpAddr) -> bool {
        Self::new(address, self.len) == Some(self)
    }

    /// Returns the address from the most significant bit on.
    pub(super) const fn bits(self) -> u128 {
        self.bits
    }

    /// Creates a network of bits that [`Self::bits`] returned. Bits behind `len` must be zero.
    pub(super) const fn from_bits(is_v6: bool, bits: u128, len: u8) -> Self {
        Self { is_v6, bits, len }
    }
}

/// Returns a number whose `len` most significant bits are set.
const fn mask(len: u8) -> u128 {
    match u128::MAX.checked_shr(len as u32) {
        Some(host) => !host,
        None => u128::MAX,
    }
}

impl FromStr for NetworkPrefix {
    type Err = PrefixError;

    /// Parses a network such as `10.9.0.0/24` or `fd00:9::/64`.
    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let (address, len) = text.split_once('/').ok_or(PrefixError::Syntax)?;
        let address: IpAddr = address.parse().map_err(|_| PrefixError::Syntax)?;
        let len = len.parse().map_err(|_| PrefixError::Syntax)?;
        let network = Self::new(address, len).ok_or(PrefixError::Length)?;
        if network.address() == address { Ok(network) } else { Err(PrefixError::HostBits(network)) }
    }
}

impl fmt::Display for NetworkPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address(), self.len)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn networks_are_parsed_and_displayed() {
        for text in ["0.0.0.0/0", "10.9.0.0/24", "255.255.255.255/32", "::/0", "fd00:9::/64", "::1/128"] {
            let network: NetworkPrefix = text.parse().unwrap();
            assert_eq!(network.to_string(), text);
        }
        let parse = |text: &str| text.parse::<NetworkPrefix>();
        assert_eq!(parse("10.0.0.1"), Err(PrefixError::Syntax));
        assert_eq!(parse("10.0.0.1/x"), Err(PrefixError::Syntax));
        assert_eq!(parse("10.0.0.0/33"), Err(PrefixError::Length));
        assert_eq!(parse("::/129"), Err(PrefixError::Length));
        assert_eq!(parse("10.0.0.1/8"), Err(PrefixError::HostBits(parse("10.0.0.0/8").unwrap())));
    }

    #[test]
    fn a_network_contains_its_addresses_only() {
        let network: NetworkPrefix = "10.9.0.0/23".parse().unwrap();
        assert!(network.contains("10.9.1.255".parse().unwrap()) && !network.contains("10.9.2.0".parse().unwrap()));
        assert!(!network.contains("::a09:0".parse().unwrap()), "another family");
        let all: NetworkPrefix = "::/0".parse().unwrap();
        assert!(all.contains("ffff::1".parse().unwrap()) && !all.contains("1.2.3.4".parse().unwrap()));
    }
}
