//! Drop reasons: one table for drivers, stages and applications.

#![deny(unsafe_code)]

use wirepath_wire::ParseError;

use crate::counters::Counter;

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, $text:literal;)*) => {
        /// Reason of a packet drop.
        ///
        /// The names are stable: they are keys in JSON and metrics. The order is not.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason { $(#[doc = $text] $variant,)* }

        impl DropReason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Name of the counter: lower-case words joined by `_`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Description of the reason.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

drop_reasons! {
    // Ports.
    NoBuffer, "no_buffer", "the packet pool had no free buffer";
    RxFull, "rx_full", "the receive ring of the device or of the kernel was full";
    InterfaceDrop, "interface_drop", "the interface dropped the frame before the port; one reason is its MTU";
    TxFull, "tx_full", "the transmit queue remained full";
    TxError, "tx_error", "the device or the kernel refused to transmit the packet";
    TooLong, "too_long", "the frame is longer than the port or the framework supports";
    TooShort, "too_short", "the frame is shorter than an Ethernet header";
    BadDescriptor, "bad_descriptor", "the device reported a packet that is impossible";
    DeviceLost, "device_lost", "the device failed or disappeared while packets were in flight";
    LinkDown, "link_down", "the link of the output port is down";
    KernelOffload, "kernel_offload", "segmentation or a checksum that the kernel left to the device is not possible";
    // Parsing.
    Truncated, "truncated", "the frame ends inside a header";
    BadVersion, "bad_version", "the version in the IP header does not match the EtherType";
    BadHeaderLength, "bad_header_length", "a header length is below its minimum or exceeds the packet";
    BadTotalLength, "bad_total_length", "a length field exceeds the frame";
    BadChecksum, "bad_checksum", "an IPv4 header checksum is wrong";
    BadL4Checksum, "bad_l4_checksum", "a UDP or TCP checksum is wrong";
    TooManyHeaders, "too_many_headers", "more VLAN tags, extension headers or tunnels than the parser follows";
    BadFragment, "bad_fragment", "an IP fragment is unaligned, overlaps the TCP header, or ends beyond 65 535 bytes";
    UnknownEtherType, "unknown_ethertype", "no stage handles this EtherType";
    // Switching and tunnels.
    NoOutputPort, "no_output_port", "no stage set an output port";
    NoSegment, "no_segment", "the port and VLAN belong to no segment";
    UnknownVni, "unknown_vni", "the VXLAN network identifier belongs to no segment";
    BadTunnelHeader, "bad_tunnel_header", "the tunnel header is malformed";
    UnknownRemote, "unknown_remote", "the tunnel packet comes from an address that is not a remote of its segment";
    RemoteLimit, "remote_limit", "the segment has learned as many VTEPs as it may, and all of them are in use";
    NotForUs, "not_for_us", "neither the Ethernet nor the IP destination is an own address";
    BadSource, "bad_source", "the source address is not a unicast address";
    SplitHorizon, "split_horizon", "the frame would return to the side that it came from";
    NoDestination, "no_destination", "there is no port and no remote to flood to";
    SamePort, "same_port", "the destination is behind the port that the frame came from";
    NoNeighbour, "no_neighbour", "the link-layer address of the next hop is unknown";
    NoRoute, "no_route", "there is no route to the tunnel's remote";
    TooBigForMtu, "too_big", "the encapsulated packet exceeds the MTU of the underlay";
    OuterFragment, "outer_fragment", "fragmented tunnel packet; a VTEP does not reassemble (RFC 7348 section 4.3)";
    BadEcn, "bad_ecn", "the underlay marked congestion on a packet whose sender does not support ECN (RFC 6040)";
    InnerVlan, "inner_vlan", "inner frame with a VLAN tag that its segment does not carry (RFC 7348 section 6.1)";
    RateLimited, "rate_limited", "more requests to the program itself, or more new VTEPs, than a rate limit allows";
    NoHeadroom, "no_headroom", "the headroom is too small for another header";
    LinkLocalMulticast, "link_local_multicast", "reserved group address (IEEE 802.1D), which bridges do not forward";
    // Workers.
    QueueFull, "queue_full", "the queue to another worker or to the control thread is full";
    Stopping, "stopping", "the program is stopping";
    RuleDrop, "rule_drop", "a rule drops the packet";
    MeterExceeded, "meter_exceeded", "the packet exceeds the rate of a meter";
    HopLimit, "hop_limit", "the TTL or hop limit is exhausted where a rule decrements it";
    NoKernel, "no_kernel", "a rule passes the packet to the kernel's network stack, which cannot be reached";
    RuleMismatch, "rule_mismatch", "a rule changes a header that the packet does not have";
}

impl From<ParseError> for DropReason {
    fn from(error: ParseError) -> Self {
        use ParseError as E;
        match error {
            E::EthernetTruncated => Self::TooShort,
            E::Ipv4BadVersion | E::Ipv6BadVersion => Self::BadVersion,
            E::ArpBadFormat | E::Ipv4BadHeaderLength | E::Ipv4BadOption | E::TcpBadOffset | E::TcpBadOption => {
                Self::BadHeaderLength
            }
            E::ExtensionOrder | E::ExtensionMalformed | E::NdpInvalid => Self::BadHeaderLength,
            E::Ipv4BadTotalLength | E::Ipv6BadPayloadLength | E::Ipv6Jumbogram | E::UdpBadLength => {
                Self::BadTotalLength
            }
            E::Ipv4BadChecksum => Self::BadChecksum,
            E::UdpBadChecksum | E::TcpBadChecksum | E::Icmpv4BadChecksum | E::Icmpv6BadChecksum => Self::BadL4Checksum,
            E::VlanTooDeep | E::ExtensionTooMany | E::MplsTooDeep => Self::TooManyHeaders,
            E::FragmentOverlap | E::FragmentTooLong | E::FragmentUnaligned => Self::BadFragment,
            E::VxlanTruncated | E::VxlanBadFlags | E::VxlanGpeTruncated | E::VxlanGpeBadVersion => {
                Self::BadTunnelHeader
            }
            E::GeneveTruncated | E::GeneveBadVersion | E::GeneveBadOption => Self::BadTunnelHeader,
            E::GreTruncated | E::GreBadFlags | E::MplsTruncated => Self::BadTunnelHeader,
            // Truncated headers, and headers that lie in several buffers.
            _ => Self::Truncated,
        }
    }
}

/// One counter for each drop reason.
#[derive(Debug)]
pub struct DropCounters {
    counters: [Counter; DropReason::ALL.len()],
}

impl DropCounters {
    /// Creates counters of value zero.
    pub const fn new() -> Self {
        Self { counters: [const { Counter::new() }; DropReason::ALL.len()] }
    }

    /// Adds `n` packets. Single writer.
    #[inline(always)]
    pub fn add(&self, reason: DropReason, n: u64) {
        self.counters[reason as usize].add(n);
    }

    /// Number of packets dropped for this reason.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.counters[reason as usize].get()
    }

    /// The reasons that occurred, with their counts.
    pub fn nonzero(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL.iter().map(|&reason| (reason, self.get(reason))).filter(|&(_, n)| n > 0)
    }

    /// Sum over all reasons.
    pub fn total(&self) -> u64 {
        self.counters.iter().map(Counter::get).sum()
    }
}

impl Default for DropCounters {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_counter_like() {
        let mut names: Vec<_> = DropReason::ALL.iter().map(|r| r.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DropReason::ALL.len());
        assert!(names.iter().all(|n| n.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')));
    }

    #[test]
    fn counts_by_reason() {
        let drops = DropCounters::new();
        drops.add(DropReason::TxFull, 2);
        drops.add(DropReason::TxFull, 3);
        assert_eq!(drops.nonzero().collect::<Vec<_>>(), [(DropReason::TxFull, 5)]);
        assert_eq!(drops.total(), 5);
    }
}
