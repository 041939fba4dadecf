//! Drop reasons: one table for drivers, stages and applications.

#![deny(unsafe_code)]

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use wirepath_wire::ParseError;

use crate::counters::Counter;
use crate::registered::{RegisterError, check_name, check_text};

/// Reason of a packet drop: one of the constants, or one that the application has registered.
///
/// The names are stable: they are keys in JSON and metrics. The order is not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DropReason(u8);

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, $text:literal;)*) => {
        /// Indices of the reasons, in the order of the table.
        #[repr(u8)]
        enum Index { $($variant,)* }

        #[expect(non_upper_case_globals, reason = "the reasons are the values of an open enumeration")]
        impl DropReason {
            $(#[doc = $text] pub const $variant: Self = Self(Index::$variant as u8);)*

            /// The reasons of drivers, of the runtime and of its stages, without those of the application.
            pub const BUILT_IN: &'static [Self] = &[$(Self::$variant,)*];
        }

        /// Name and text of each built-in reason.
        const TABLE: &[(&str, &str)] = &[$(($name, $text),)*];
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
    InjectedFault, "injected_fault", "the configuration of the port injects losses (table faults)";
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
    UnknownVni, "unknown_vni", "the network identifier in the tunnel header belongs to no segment";
    BadTunnelHeader, "bad_tunnel_header", "the tunnel header is malformed";
    TunnelVersion, "tunnel_version", "the tunnel header has a version that is not known";
    TunnelFlags, "tunnel_flags", "the tunnel header has flags that are not known or not allowed (RFC 2784 section 2.3)";
    TunnelPayload, "tunnel_payload", "the tunnel carries another protocol than its segment";
    TunnelControl, "tunnel_control", "control packet of a tunnel (O bit of RFC 8926; RFC 4385 section 5), not sent on";
    CriticalOption, "critical_option", "the tunnel header has an unknown critical option (RFC 8926 section 3.5)";
    SegmentsLeft, "segments_left", "the SRv6 packet has segments left at the last SID of a path (RFC 8986 section 4.6)";
    RoutingType, "routing_type", "the routing header has segments left and an unknown type (RFC 8200 section 4.4)";
    LabelStack, "label_stack", "the MPLS label is not the last one: only explicit null may precede it (RFC 4182)";
    ReservedLabel, "reserved_label", "the MPLS label is for special purposes, not for a segment (RFC 3032 section 2.1)";
    LabelTtl, "label_ttl", "the TTL of the MPLS label is exhausted (RFC 3032 section 2.4.2)";
    ControlWord, "control_word", "the pseudowire frame has no control word, but its segment has (RFC 4385 section 3)";
    SidUpperLayer, "sid_upper_layer", "the behaviour of the SID takes no such payload (RFC 8986 section 4.1.1)";
    UnknownRemote, "unknown_remote", "the tunnel packet comes from an address that is not a remote of its segment";
    RemoteLimit, "remote_limit", "the segment has learned as many VTEPs as it may, and all of them are in use";
    NotForUs, "not_for_us", "neither the Ethernet nor the IP destination is an own address";
    BadSource, "bad_source", "the source address is not a unicast address";
    SplitHorizon, "split_horizon", "the frame would return to the side that it came from";
    NoDestination, "no_destination", "there is no port and no remote to flood to";
    SamePort, "same_port", "the destination is behind the port that the frame came from";
    StormControl, "storm_control", "more flooded frames from local ports than the segment allows (storm control)";
    IsolatedPort, "isolated_port", "the frame would go from one isolated port to another";
    NoNeighbour, "no_neighbour", "the link-layer address of the next hop is unknown";
    RemoteDown, "remote_down", "BFD has found the remote down, or the remote is a backup that is not needed";
    BfdInvalid, "bfd_invalid", "the BFD packet is malformed (RFC 5880 section 6.8.6, RFC 8971 section 5)";
    BfdAuthentication, "bfd_authentication", "the BFD packet has authentication, which no session uses";
    BfdTtl, "bfd_ttl", "the TTL of the BFD packet is too small: it passed a router (RFC 5881 section 5)";
    BfdNoSession, "bfd_no_session", "no BFD session has the addresses, port, VNI and discriminator of the BFD packet";
    BadIcmpQuote, "bad_icmp_quote", "the ICMP error quotes no packet that the gateway can have sent to a remote";
    NoRoute, "no_route", "there is no route to the destination or to the tunnel's remote";
    NotRoutable, "not_routable", "the destination is a group, broadcast or link-local address, which is not routed";
    Blackhole, "blackhole", "a blackhole route drops the packet";
    Prohibited, "prohibited", "a route prohibits packets to the destination";
    SourceCheck, "source_check", "the route to the source does not lead back (uRPF, RFC 3704)";
    TooBigForMtu, "too_big", "the encapsulated packet exceeds the MTU of the underlay";
    OuterFragment, "outer_fragment", "fragment of a packet that the program does not join (key reassembly)";
    FragmentTimeout, "fragment_timeout", "other fragments of the packet did not arrive in time (RFC 8200 section 4.5)";
    FragmentOverlap, "fragment_overlap", "fragments of the packet overlap, so all of them are dropped (RFC 5722)";
    FragmentLimit, "fragment_limit", "more fragments wait for others than the memory for them takes";
    FragmentDuplicate, "fragment_duplicate", "the fragment arrived before";
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
    HopLimit, "hop_limit", "the TTL or hop limit is exhausted where a rule or a router decrements it";
    NoKernel, "no_kernel", "a rule passes the packet to the kernel's network stack, which cannot be reached";
    RuleMismatch, "rule_mismatch", "a rule changes a header that the packet does not have";
}

/// Name and text of each reason that the application has registered, in the order of registration.
static REGISTERED: [OnceLock<(&str, &str)>; DropReason::MAX_REGISTERED] =
    [const { OnceLock::new() }; DropReason::MAX_REGISTERED];

impl DropReason {
    /// Maximum number of reasons that an application can register.
    pub const MAX_REGISTERED: usize = 64;

    /// Registers a reason of the application for the whole process, or returns the one with the same name and text.
    /// A program registers its reasons at the start: the call takes a lock, and its texts stay in memory.
    ///
    /// `name` has at most [`MAX_NAME`](crate::registered::MAX_NAME) lower-case letters, digits and `_`, and begins
    /// with a letter. `about` is one line for operators, such as `the sender is not a customer`. Captures, traces,
    /// summaries, tables and metrics show the reason like a built-in one.
    ///
    /// ```
    /// use wirepath_packet::drops::DropReason;
    ///
    /// let stranger = DropReason::register("stranger", "the sender is not a customer")?;
    /// assert_eq!((stranger.name(), DropReason::of_name("stranger")), ("stranger", Some(stranger)));
    /// # Ok::<(), wirepath_packet::registered::RegisterError>(())
    /// ```
    ///
    /// # Errors
    /// If the name or the text is not valid, if the name belongs to another reason, or if there are
    /// [`Self::MAX_REGISTERED`] reasons.
    pub fn register(name: &str, about: &str) -> Result<Self, RegisterError> {
        static LOCK: Mutex<()> = Mutex::new(());
        const WHAT: &str = "drop reason";
        check_name(WHAT, name)?;
        check_text(WHAT, name, about)?;
        let _lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = Self::of_name(name) {
            let same = known.is_registered() && known.text() == about;
            return if same {
                Ok(known)
            } else {
                Err(RegisterError::Taken { what: WHAT, name: name.to_owned(), about: known.text().to_owned() })
            };
        }
        let count = Self::registered_count();
        let place = REGISTERED.get(count).ok_or_else(|| RegisterError::TooMany {
            what: WHAT,
            name: name.to_owned(),
            most: Self::MAX_REGISTERED,
        })?;
        place.get_or_init(|| (String::from(name).leak(), String::from(about).leak()));
        Ok(Self((TABLE.len() + count) as u8))
    }

    /// Returns all reasons: the built-in ones, followed by those of the application.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..TABLE.len() + Self::registered_count()).map(|index| Self(index as u8))
    }

    /// Returns the reason with this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::all().find(|reason| reason.name() == name)
    }

    /// Returns true if the application has registered the reason.
    pub fn is_registered(self) -> bool {
        usize::from(self.0) >= TABLE.len()
    }

    /// Name of the counter: lower-case words joined by `_`.
    pub fn name(self) -> &'static str {
        self.entry().0
    }

    /// Description of the reason.
    pub fn text(self) -> &'static str {
        self.entry().1
    }

    fn entry(self) -> (&'static str, &'static str) {
        let index = usize::from(self.0);
        let registered = || REGISTERED.get(index - TABLE.len()).and_then(OnceLock::get).copied();
        // Only registration makes other reasons than those of the table, so there is an entry.
        TABLE.get(index).copied().or_else(registered).unwrap_or_default()
    }

    /// Number of reasons that the application has registered.
    fn registered_count() -> usize {
        REGISTERED.iter().take_while(|entry| entry.get().is_some()).count()
    }
}

impl fmt::Debug for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
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
    /// One counter for each value of the index, so that an access needs no check of bounds.
    counters: [Counter; 1 << u8::BITS],
}

const _: () = assert!(TABLE.len() + DropReason::MAX_REGISTERED <= 1 << u8::BITS);

impl DropCounters {
    /// Creates counters of value zero.
    pub const fn new() -> Self {
        Self { counters: [const { Counter::new() }; 1 << u8::BITS] }
    }

    /// Adds `n` packets. Single writer.
    #[inline(always)]
    pub fn add(&self, reason: DropReason, n: u64) {
        self.counters[usize::from(reason.0)].add(n);
    }

    /// Number of packets dropped for this reason.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.counters[usize::from(reason.0)].get()
    }

    /// The reasons that occurred, with their counts.
    pub fn nonzero(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::all().map(|reason| (reason, self.get(reason))).filter(|&(_, n)| n > 0)
    }

    /// Sum over all reasons.
    pub fn total(&self) -> u64 {
        DropReason::all().map(|reason| self.get(reason)).sum()
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
        let mut names: Vec<_> = TABLE.iter().map(|(name, _)| *name).collect();
        assert!(TABLE.iter().all(|(name, text)| check_name("", name).is_ok() && check_text("", name, text).is_ok()));
        names.sort_unstable();
        names.dedup();
        assert_eq!((names.len(), DropReason::BUILT_IN.len()), (TABLE.len(), TABLE.len()));
    }

    #[test]
    fn counts_by_reason() {
        let drops = DropCounters::new();
        drops.add(DropReason::TxFull, 2);
        drops.add(DropReason::TxFull, 3);
        assert_eq!(drops.nonzero().collect::<Vec<_>>(), [(DropReason::TxFull, 5)]);
        assert_eq!(drops.total(), 5);
    }

    #[test]
    fn reasons_of_an_application_are_like_built_in_ones() {
        let reason = DropReason::register("stranger_2", "the sender is not a customer").unwrap();
        assert_eq!(DropReason::register("stranger_2", "the sender is not a customer"), Ok(reason));
        assert_eq!((reason.name(), reason.text()), ("stranger_2", "the sender is not a customer"));
        assert!(reason.is_registered() && !DropReason::RuleMismatch.is_registered());
        assert!(!DropReason::BUILT_IN.contains(&reason) && DropReason::all().any(|other| other == reason));
        assert_eq!((DropReason::of_name("stranger_2"), format!("{reason:?}")), (Some(reason), "stranger_2".to_owned()));
        let drops = DropCounters::new();
        drops.add(reason, 3);
        drops.add(DropReason::RuleMismatch, 1);
        assert_eq!(drops.nonzero().collect::<Vec<_>>(), [(DropReason::RuleMismatch, 1), (reason, 3)]);
        assert_eq!(drops.total(), 4);
        assert!(matches!(DropReason::RuleDrop, DropReason::RuleDrop), "a reason is a pattern");
    }

    #[test]
    fn names_and_texts_of_others_are_refused() {
        let error = |name, about| DropReason::register(name, about).unwrap_err().to_string();
        let built_in = error("rule_drop", "a rule drops the packet");
        assert_eq!(built_in, "the drop reason \"rule_drop\" exists already: \"a rule drops the packet\"");
        DropReason::register("twice", "the first text").unwrap();
        assert_eq!(error("twice", "the second"), "the drop reason \"twice\" exists already: \"the first text\"");
        assert!(error("Upper", "text").contains("lower-case"));
    }
}
