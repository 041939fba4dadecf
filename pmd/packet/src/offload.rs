//! Offload results of received packets, and offload requests of packets to transmit.

#![deny(unsafe_code)]

/// Declares a set of flags with named bits.
#[macro_export]
macro_rules! flag_set {
    ($(#[$doc:meta])* $name:ident: $repr:ty { $($(#[$fdoc:meta])* $flag:ident = $bit:expr;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Default)]
        #[repr(transparent)]
        pub struct $name($repr);

        impl $name {
            /// No bit set.
            pub const NONE: Self = Self(0);
            $($(#[$fdoc])* pub const $flag: Self = Self(1 << $bit);)*

            /// The raw bits.
            #[inline(always)]
            pub const fn bits(self) -> $repr {
                self.0
            }

            /// True if all bits of `other` are set.
            #[inline(always)]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// True if any bit of `other` is set.
            #[inline(always)]
            pub const fn intersects(self, other: Self) -> bool {
                self.0 & other.0 != 0
            }

            /// True if no bit is set.
            #[inline(always)]
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// Returns the union of both sets.
            #[inline(always)]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// Returns these bits without those of `other`.
            #[inline(always)]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut set = f.debug_set();
                $(if self.contains(Self::$flag) { set.entry(&stringify!($flag)); })*
                set.finish()
            }
        }
    };
}

flag_set! {
    /// Checksum status of a received packet, as reported by the device. Neither good nor bad: not checked.
    ChecksumStatus: u8 {
        /// The (inner, if the device parses the tunnel) IPv4 header checksum is correct.
        L3_GOOD = 0;
        /// The (inner) IPv4 header checksum is wrong.
        L3_BAD = 1;
        /// The (inner) TCP or UDP checksum is correct.
        L4_GOOD = 2;
        /// The (inner) TCP or UDP checksum is wrong.
        L4_BAD = 3;
        /// The outer IPv4 header checksum of a tunnel packet is correct.
        OUTER_L3_GOOD = 4;
        /// The outer IPv4 header checksum of a tunnel packet is wrong.
        OUTER_L3_BAD = 5;
        /// The outer UDP checksum of a tunnel packet is correct. A zero checksum is neither good nor bad.
        OUTER_L4_GOOD = 6;
        /// The outer UDP checksum of a tunnel packet is wrong.
        OUTER_L4_BAD = 7;
    }
}

flag_set! {
    /// Valid metadata fields (receive) and offload requests to the device (transmit).
    ///
    /// A device handles the requests that the capabilities of its port name. For others, the driver does the
    /// work in software before it transmits, or it drops the packet with a counted reason.
    Flags: u16 {
        /// The RSS hash is valid.
        RSS_HASH = 0;
        /// The flow mark is valid.
        MARK = 1;
        /// Receive: the device stripped this VLAN tag. Transmit: the device shall insert it.
        VLAN = 2;
        /// The stripped or inserted tag is an 802.1ad service tag.
        VLAN_SERVICE = 3;
        /// The timestamp is valid.
        TIMESTAMP = 4;
        /// Transmit: compute the (inner) IPv4 header checksum.
        TX_L3_CHECKSUM = 5;
        /// Transmit: compute the (inner) TCP or UDP checksum; the field holds the pseudo-header sum.
        TX_L4_CHECKSUM = 6;
        /// Transmit: compute the outer IPv4 header checksum.
        TX_OUTER_L3_CHECKSUM = 7;
        /// Transmit: compute the outer UDP checksum.
        TX_OUTER_L4_CHECKSUM = 8;
        /// Transmit: segment to [`super::Packet::mss`].
        TX_SEGMENT = 9;
        /// Transmit: the flow mark is transmit metadata for the NIC's egress rules.
        TX_METADATA = 10;
        /// The packet is an IP fragment other than the first, without transport header.
        LATER_FRAGMENT = 11;
    }
}
