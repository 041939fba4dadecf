//! Common parts of IPv4 and IPv6: protocol numbers and the ECN bits of the traffic class.

code! {
    /// IP protocol or IPv6 next header (IANA "protocol-numbers").
    pub struct IpProtocol(u8) 1 {
        HOP_BY_HOP = 0 "hop-by-hop options",
        ICMPV4 = 1 "ICMP",
        IPV4 = 4 "IPv4 in IP",
        TCP = 6 "TCP",
        UDP = 17 "UDP",
        DCCP = 33 "DCCP",
        IPV6 = 41 "IPv6 in IP",
        ROUTING = 43 "routing header",
        FRAGMENT = 44 "fragment header",
        GRE = 47 "GRE",
        ESP = 50 "ESP",
        AH = 51 "AH",
        ICMPV6 = 58 "ICMPv6",
        NO_NEXT_HEADER = 59 "no next header",
        DESTINATION_OPTIONS = 60 "destination options",
        SCTP = 132 "SCTP",
        UDP_LITE = 136 "UDP-Lite",
        ETHERNET = 143 "Ethernet in IP",
    }
}

/// ECN field, the low two bits of the traffic class (RFC 3168 section 5).
pub mod ecn {
    /// Not ECN-capable transport.
    pub const NOT_ECT: u8 = 0;
    /// ECN-capable transport, codepoint 1.
    pub const ECT_1: u8 = 1;
    /// ECN-capable transport, codepoint 0.
    pub const ECT_0: u8 = 2;
    /// Congestion experienced.
    pub const CE: u8 = 3;
}
