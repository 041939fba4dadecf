//! Ethernet II frames (IEEE 802.3 clause 3) and their addresses.

use core::fmt;
use core::str::FromStr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::{BufferTooShort, ParseError};
use crate::field::{Field, get, header_mut, put};

/// An Ethernet address: six bytes in wire order.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(transparent)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: MacAddr = MacAddr([0xff; 6]);
    /// 00:00:00:00:00:00, which is no host's address.
    pub const ZERO: MacAddr = MacAddr([0; 6]);

    /// Creates an address from six bytes in wire order.
    pub const fn new(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) -> Self {
        MacAddr([a, b, c, d, e, f])
    }

    /// Returns the bytes in wire order.
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }

    /// True for ff:ff:ff:ff:ff:ff.
    #[inline]
    pub const fn is_broadcast(self) -> bool {
        self.to_u64() == 0xffff_ffff_ffff
    }

    /// True if the group bit is set, so for the broadcast address too (IEEE 802 clause 8.2.2).
    #[inline]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// True for the address of a single host: neither a group address nor zero.
    #[inline]
    pub const fn is_unicast(self) -> bool {
        !self.is_multicast() && self.to_u64() != 0
    }

    /// True if the locally administered bit is set.
    pub const fn is_local(self) -> bool {
        self.0[0] & 2 != 0
    }

    /// True for 01:80:c2:00:00:00 to 0f, which bridges do not forward (IEEE 802.1Q table 8-1).
    #[inline]
    pub const fn is_link_local(self) -> bool {
        self.to_u64() & !0xf == 0x0180_c200_0000
    }

    /// Returns the address as a number below 2^48, first byte most significant.
    #[inline]
    pub const fn to_u64(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }

    /// Creates an address from a number. Bits above 48 are ignored.
    #[inline]
    pub const fn from_u64(value: u64) -> Self {
        let [_, _, a, b, c, d, e, f] = value.to_be_bytes();
        MacAddr([a, b, c, d, e, f])
    }

    /// Returns the group address of an IPv6 multicast address (RFC 2464 section 7).
    pub const fn multicast_v6(group: core::net::Ipv6Addr) -> Self {
        let o = group.octets();
        MacAddr([0x33, 0x33, o[12], o[13], o[14], o[15]])
    }
}

impl Field<6> for MacAddr {
    #[inline(always)]
    fn read(bytes: [u8; 6]) -> Self {
        MacAddr(bytes)
    }
    #[inline(always)]
    fn write(self) -> [u8; 6] {
        self.0
    }
}

impl From<[u8; 6]> for MacAddr {
    fn from(bytes: [u8; 6]) -> Self {
        MacAddr(bytes)
    }
}

impl From<MacAddr> for [u8; 6] {
    fn from(mac: MacAddr) -> Self {
        mac.0
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        f.pad_integral(true, "", core::str::from_utf8(&hex([a, b, c, d, e, g])).unwrap_or(""))
    }
}

/// Formats as `xx:xx:xx:xx:xx:xx`.
fn hex(bytes: [u8; 6]) -> [u8; 17] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = [b':'; 17];
    for (to, b) in out.chunks_mut(3).zip(bytes) {
        to[0] = DIGITS[usize::from(b >> 4)];
        to[1] = DIGITS[usize::from(b & 15)];
    }
    out
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not an Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddrError;

impl fmt::Display for MacAddrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "an Ethernet address is six pairs of hexadecimal digits joined by colons, such as 02:00:00:00:00:01",
        )
    }
}

impl core::error::Error for MacAddrError {}

impl FromStr for MacAddr {
    type Err = MacAddrError;

    /// Parses six pairs of hexadecimal digits, all joined by `:` or all joined by `-`.
    fn from_str(text: &str) -> Result<Self, MacAddrError> {
        let separator = if text.as_bytes().get(2) == Some(&b'-') { '-' } else { ':' };
        let mut out = [0; 6];
        let mut parts = text.split(separator);
        for byte in &mut out {
            let part = parts.next().ok_or(MacAddrError)?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(MacAddrError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| MacAddrError)?;
        }
        if parts.next().is_some() { Err(MacAddrError) } else { Ok(MacAddr(out)) }
    }
}

code! {
    /// EtherType (IANA "ieee-802-numbers"). Values below 0x600 are lengths of IEEE 802.3 frames.
    pub struct EtherType(u16) 2 {
        IPV4 = 0x0800 "IPv4",
        ARP = 0x0806 "ARP",
        TRANSPARENT_ETHERNET = 0x6558 "Transparent Ethernet",
        VLAN = 0x8100 "802.1Q",
        IPV6 = 0x86dd "IPv6",
        MPLS = 0x8847 "MPLS",
        MPLS_UPSTREAM = 0x8848 "MPLS upstream-assigned",
        QINQ = 0x88a8 "802.1ad",
        LLDP = 0x88cc "LLDP",
    }
}

impl EtherType {
    /// True for the TPID of a VLAN tag (802.1Q or 802.1ad).
    #[inline]
    pub const fn is_vlan(self) -> bool {
        self.0 == EtherType::VLAN.0 || self.0 == EtherType::QINQ.0
    }

    /// True if a label stack follows (RFC 3032 section 5, RFC 5332 section 2).
    #[inline]
    pub const fn is_mpls(self) -> bool {
        self.0 == EtherType::MPLS.0 || self.0 == EtherType::MPLS_UPSTREAM.0
    }
}

header! {
    /// An Ethernet II header. VLAN tags count as payload.
    14 bytes, short: EthernetTruncated {
        /// Destination address.
        [0; 6] dst, set_dst: MacAddr;
        /// Source address.
        [6; 6] src, set_src: MacAddr;
        /// EtherType of the payload.
        [12; 2] ethertype, set_ethertype: EtherType;
    }
}

fn split(_: &[u8; HEADER_LEN], rest: usize) -> Result<(usize, usize), ParseError> {
    Ok((0, rest))
}

impl ViewMut<'_> {
    /// Swaps destination and source address.
    #[inline]
    pub fn swap_addresses(&mut self) {
        swap_addresses(self.header);
    }
}

/// Swaps destination and source address of a header.
#[inline(always)]
pub(crate) fn swap_addresses(header: &mut [u8; HEADER_LEN]) {
    // Two words instead of six and six bytes. The next reader of the header reads words, and a load that
    // spans two stores cannot be forwarded from the store buffer.
    let dst = u64::from_le_bytes(get::<0, 8, HEADER_LEN>(header)) & 0xffff_ffff_ffff;
    let src = u64::from_le_bytes(get::<4, 8, HEADER_LEN>(header)) >> 16;
    put::<0, 8, HEADER_LEN>(header, (src | dst << 48).to_le_bytes());
    put::<8, 4, HEADER_LEN>(header, ((dst >> 16) as u32).to_le_bytes());
}

/// An Ethernet II header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Destination address.
    pub dst: MacAddr,
    /// Source address.
    pub src: MacAddr,
    /// EtherType of the payload.
    pub ethertype: EtherType,
}

impl Repr {
    /// Returns the values of a view.
    pub fn parse(view: &View<'_>) -> Repr {
        Repr { dst: view.dst(), src: view.src(), ethertype: view.ethertype() }
    }

    /// Writes the header to the front of `out` and returns its length.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, BufferTooShort> {
        let header = header_mut::<HEADER_LEN>(out)?;
        put::<0, 6, HEADER_LEN>(header, self.dst.0);
        put::<6, 6, HEADER_LEN>(header, self.src.0);
        put::<12, 2, HEADER_LEN>(header, self.ethertype.write());
        Ok(HEADER_LEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::string::ToString;

    #[test]
    fn swap_exchanges_only_the_addresses() {
        let mut frame: [u8; 16] = core::array::from_fn(|i| i as u8);
        ViewMut::new(&mut frame).unwrap().swap_addresses();
        assert_eq!(frame, [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 12, 13, 14, 15]);
    }

    #[test]
    fn addresses_as_text() {
        let mac: MacAddr = "02:00:5e:AB:cd:0f".parse().unwrap();
        assert_eq!(mac.to_string(), "02:00:5e:ab:cd:0f");
        assert_eq!(format!("{mac:?}|{mac:>20}|"), "02:00:5e:ab:cd:0f|   02:00:5e:ab:cd:0f|");
        assert_eq!("02-00-5e-ab-cd-0f".parse(), Ok(mac));
        for bad in
            ["", "02:00:5e:ab:cd", "02:00:5e:ab:cd:0f:11", "2:0:5e:ab:cd:f", "02:00:5e:ab:cd:+f", "02:00:5e:ab-cd:0f"]
        {
            assert_eq!(bad.parse::<MacAddr>(), Err(MacAddrError), "{bad}");
        }
        assert_eq!(MacAddr::from_u64(mac.to_u64()), mac);
    }

    #[test]
    fn kinds_of_addresses() {
        assert!(
            MacAddr::BROADCAST.is_broadcast() && MacAddr::BROADCAST.is_multicast() && !MacAddr::BROADCAST.is_unicast()
        );
        assert!(!MacAddr::ZERO.is_unicast());
        assert!(MacAddr::new(1, 0x80, 0xc2, 0, 0, 0x0e).is_link_local());
        assert!(!MacAddr::new(1, 0x80, 0xc2, 0, 0, 0x10).is_link_local());
        // RFC 2464 section 7: the low 32 bits.
        assert_eq!(
            MacAddr::multicast_v6("ff02::1:ff28:9c5a".parse().unwrap()),
            MacAddr::new(0x33, 0x33, 0xff, 0x28, 0x9c, 0x5a)
        );
    }

    #[test]
    fn addresses_of_bytes() {
        let bytes = [0x02, 0, 0, 0, 0, 7, 0xff];
        let (mac, rest) = MacAddr::ref_from_prefix(&bytes).unwrap();
        assert_eq!((*mac, rest), (MacAddr::new(2, 0, 0, 0, 0, 7), &[0xff][..]));
        assert_eq!(mac.as_bytes(), &bytes[..6]);
        assert_eq!(<[u8; 6]>::from(*mac), bytes[..6]);
    }

    #[test]
    fn ethertypes_as_text() {
        assert_eq!(EtherType::IPV4.to_string(), "IPv4");
        assert_eq!(EtherType(0x1234).to_string(), "0x1234");
    }
}
