//! Parse errors: one table gives the value, the counter name and the text.

use core::fmt;

macro_rules! parse_errors {
    ($($(#[$doc:meta])* $name:ident $counter:literal $text:literal,)*) => {
        /// Reasons why bytes are not a valid header.
        ///
        /// The type has one byte, so that it can be stored per packet. [`ParseError::name`] is the counter
        /// name, [`fmt::Display`] the text.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum ParseError {
            $(#[doc = $text] $(#[$doc])* $name,)*
        }

        impl ParseError {
            /// All errors, in the order of [`ParseError::index`].
            pub const ALL: &'static [ParseError] = &[$(ParseError::$name,)*];

            /// Returns the counter name: lower case, words joined by underscores. Names are stable.
            pub const fn name(self) -> &'static str {
                match self { $(ParseError::$name => $counter,)* }
            }

            /// Returns a one-line description.
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
    Ipv4BadOption "ipv4_bad_option" "an IPv4 option exceeds the header",
    FragmentOverlap "fragment_overlap" "a fragment at offset 8 would overlap the TCP header (RFC 3128)",
    FragmentTooLong "fragment_too_long" "a fragment reaches beyond the longest possible packet",
    FragmentUnaligned "fragment_unaligned" "the length of a fragment other than the last is not a multiple of 8",
    Ipv6Truncated "ipv6_truncated" "the frame ends inside the IPv6 header",
    Ipv6BadVersion "ipv6_bad_version" "the version in an IPv6 header is not 6",
    Ipv6BadPayloadLength "ipv6_bad_payload_length" "the IPv6 payload length lies beyond the end of the frame",
    Ipv6Jumbogram "ipv6_jumbogram" "IPv6 jumbograms are not supported",
    ExtensionTruncated "extension_truncated" "the packet ends inside an IPv6 extension header",
    ExtensionOrder "extension_order" "an IPv6 extension header is out of order or repeated",
    ExtensionMalformed "extension_malformed" "an option exceeds its IPv6 extension header",
    ExtensionTooMany "extension_too_many" "too many IPv6 extension headers",
    TcpTruncated "tcp_truncated" "the packet ends inside the TCP header",
    TcpBadOffset "tcp_bad_offset" "the TCP data offset is below 5",
    TcpBadOption "tcp_bad_option" "a TCP option exceeds the header",
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
    GreBadFlags "gre_bad_flags" "a GRE header has an unknown version or unknown flags (RFC 2784 section 2.3)",
    MplsTruncated "mpls_truncated" "the packet ends before the bottom of its MPLS label stack",
    MplsTooDeep "mpls_too_deep" "too many MPLS labels",
    VxlanTruncated "vxlan_truncated" "the datagram ends inside the VXLAN header",
    VxlanBadFlags "vxlan_bad_flags" "the VXLAN header has no valid VNI (I flag clear)",
    VxlanGpeTruncated "vxlan_gpe_truncated" "the datagram ends inside the VXLAN-GPE header",
    VxlanGpeBadVersion "vxlan_gpe_bad_version" "the version in a VXLAN-GPE header is not 0",
    GeneveTruncated "geneve_truncated" "the datagram ends inside the GENEVE header",
    GeneveBadVersion "geneve_bad_version" "the version in a GENEVE header is not 0",
    GeneveBadOption "geneve_bad_option" "a GENEVE option exceeds the header",
}

impl ParseError {
    /// Returns the index in [`ParseError::ALL`], for arrays of counters.
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

/// The buffer is shorter than the header to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferTooShort {
    /// Length of the header, bytes.
    pub need: usize,
    /// Length of the buffer, bytes.
    pub have: usize,
}

impl fmt::Display for BufferTooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the header takes {} bytes, the buffer has {}", self.need, self.have)
    }
}

impl core::error::Error for BufferTooShort {}

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
