//! Why a frame was refused: one table gives the value, the counter name and the text.

use core::fmt;

macro_rules! parse_errors {
    ($($(#[$doc:meta])* $name:ident $counter:literal $text:literal,)*) => {
        /// Why bytes are not the header they were taken for.
        ///
        /// One byte, so that it can be kept per packet. [`ParseError::name`] is the counter, [`fmt::Display`] the text.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum ParseError {
            $(#[doc = $text] $(#[$doc])* $name,)*
        }

        impl ParseError {
            /// Every error, in the order of [`ParseError::index`].
            pub const ALL: &'static [ParseError] = &[$(ParseError::$name,)*];

            /// Counter name: lower case, words joined by underscores, stable.
            pub const fn name(self) -> &'static str {
                match self { $(ParseError::$name => $counter,)* }
            }

            /// One line of text for a person.
            pub const fn text(self) -> &'static str {
                match self { $(ParseError::$name => $text,)* }
            }
        }
    };
}

parse_errors! {
    HeaderSplit "header_split" "a header is not contiguous in the first segment of the packet",
    EthernetTruncated "ethernet_truncated" "the frame ends inside the Ethernet header",
    VlanTruncated "vlan_truncated" "the frame ends inside a VLAN tag",
    VlanTooDeep "vlan_too_deep" "more than two VLAN tags",
    ArpTruncated "arp_truncated" "the frame ends inside the ARP packet",
    ArpBadFormat "arp_bad_format" "the ARP packet is not for Ethernet and IPv4",
    Ipv4Truncated "ipv4_truncated" "the frame ends inside the IPv4 header",
    Ipv4BadVersion "ipv4_bad_version" "the version in an IPv4 header is not 4",
    Ipv4BadHeaderLength "ipv4_bad_header_length" "the IPv4 header length is below 20 or above the total length",
    Ipv4BadTotalLength "ipv4_bad_total_length" "the IPv4 total length lies beyond the end of the frame",
    Ipv4BadChecksum "ipv4_bad_checksum" "the IPv4 header checksum is wrong",
    Ipv4BadOption "ipv4_bad_option" "an IPv4 option runs out of the header",
    FragmentOverlap "fragment_overlap" "a fragment at offset 8 would overlap the TCP header (RFC 3128)",
    FragmentTooLong "fragment_too_long" "a fragment reaches beyond the longest possible packet",
    FragmentUnaligned "fragment_unaligned" "a fragment with more to follow is not a multiple of 8 bytes long",
    Ipv6Truncated "ipv6_truncated" "the frame ends inside the IPv6 header",
    Ipv6BadVersion "ipv6_bad_version" "the version in an IPv6 header is not 6",
    Ipv6BadPayloadLength "ipv6_bad_payload_length" "the IPv6 payload length lies beyond the end of the frame",
    Ipv6Jumbogram "ipv6_jumbogram" "IPv6 jumbograms are not taken",
    ExtensionTruncated "extension_truncated" "the packet ends inside an IPv6 extension header",
    ExtensionOrder "extension_order" "an IPv6 extension header stands where it must not, or twice",
    ExtensionMalformed "extension_malformed" "an option runs out of its IPv6 extension header",
    ExtensionTooMany "extension_too_many" "more IPv6 extension headers than are followed",
    TcpTruncated "tcp_truncated" "the packet ends inside the TCP header",
    TcpBadOffset "tcp_bad_offset" "the TCP data offset is below 5",
    TcpBadOption "tcp_bad_option" "a TCP option runs out of the header",
    UdpTruncated "udp_truncated" "the packet ends inside the UDP header",
    UdpBadLength "udp_bad_length" "the UDP length is below 8 or lies beyond the end of the packet",
    UdpBadChecksum "udp_bad_checksum" "the UDP checksum is wrong",
    TcpBadChecksum "tcp_bad_checksum" "the TCP checksum is wrong",
    Icmpv4Truncated "icmpv4_truncated" "the packet ends inside the ICMP header",
    Icmpv4BadChecksum "icmpv4_bad_checksum" "the ICMP checksum is wrong",
    Icmpv6Truncated "icmpv6_truncated" "the packet ends inside the ICMPv6 header",
    Icmpv6BadChecksum "icmpv6_bad_checksum" "the ICMPv6 checksum is wrong",
    NdpInvalid "ndp_invalid" "a neighbour discovery message fails the checks of RFC 4861 section 7.1",
    EspTruncated "esp_truncated" "the packet ends inside the ESP header",
    GreTruncated "gre_truncated" "the packet ends inside the GRE header",
    GreBadFlags "gre_bad_flags" "a GRE header has a version or flags that say nothing known of what follows (RFC 2784 section 2.3)",
    MplsTruncated "mpls_truncated" "the packet ends before the bottom of its MPLS label stack",
    MplsTooDeep "mpls_too_deep" "more MPLS labels than are followed",
    VxlanTruncated "vxlan_truncated" "the datagram ends inside the VXLAN header",
    VxlanBadFlags "vxlan_bad_flags" "the VXLAN header has no valid VNI (I flag clear)",
    VxlanGpeTruncated "vxlan_gpe_truncated" "the datagram ends inside the VXLAN-GPE header",
    VxlanGpeBadVersion "vxlan_gpe_bad_version" "the version in a VXLAN-GPE header is not 0",
    GeneveTruncated "geneve_truncated" "the datagram ends inside the GENEVE header",
    GeneveBadVersion "geneve_bad_version" "the version in a GENEVE header is not 0",
    GeneveBadOption "geneve_bad_option" "a GENEVE option runs out of the header",
}

impl ParseError {
    /// Place in [`ParseError::ALL`]; for arrays of counters.
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl core::error::Error for ParseError {}

/// A header does not fit the buffer it is to be written into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Bytes the header takes.
    pub need: usize,
    /// Bytes there were.
    pub have: usize,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the header takes {} bytes, the buffer has {}", self.need, self.have)
    }
}

impl core::error::Error for NoRoom {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_consistent() {
        for (i, e) in ParseError::ALL.iter().enumerate() {
            assert_eq!(e.index(), i);
            assert!(e.name().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'));
            assert!(ParseError::ALL[..i].iter().all(|o| o.name() != e.name() && o.text() != e.text()));
        }
    }
}
