//! What a receiving device found out about a packet, and what a transmitting device is asked to do with it.

macro_rules! bits {
    ($(#[$doc:meta])* $name:ident: $repr:ty { $($(#[$fdoc:meta])* $flag:ident = $bit:expr;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Default)]
        #[repr(transparent)]
        pub struct $name($repr);

        impl $name {
            /// No bit set.
            pub const NONE: Self = Self(0);
            $($(#[$fdoc])* pub const $flag: Self = Self(1 << $bit);)*

            /// These bits, for code that gets them in the same order from elsewhere.
            #[allow(dead_code)]
            #[inline(always)]
            pub(crate) const fn from_bits(bits: $repr) -> Self {
                Self(bits)
            }

            /// The bits as they lie in memory.
            #[allow(dead_code)]
            #[inline(always)]
            pub(crate) const fn bits(self) -> $repr {
                self.0
            }

            /// Whether all bits of `other` are set.
            #[inline(always)]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Whether any bit of `other` is set.
            #[inline(always)]
            pub const fn intersects(self, other: Self) -> bool {
                self.0 & other.0 != 0
            }

            /// Whether no bit is set.
            #[inline(always)]
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// These bits and those of `other`.
            #[inline(always)]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// These bits but those of `other`.
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
pub(crate) use bits;

bits! {
    /// What the device says of the checksums of a received packet. Neither good nor bad: not checked.
    Verdicts: u8 {
        /// The (inner, if the device looked into a tunnel) IPv4 header checksum is right.
        L3_GOOD = 0;
        /// The (inner) IPv4 header checksum is wrong.
        L3_BAD = 1;
        /// The (inner) TCP or UDP checksum is right.
        L4_GOOD = 2;
        /// The (inner) TCP or UDP checksum is wrong.
        L4_BAD = 3;
        /// The outer IPv4 header checksum of a tunnelled packet is right.
        OUTER_L3_GOOD = 4;
        /// The outer IPv4 header checksum of a tunnelled packet is wrong.
        OUTER_L3_BAD = 5;
        /// The outer UDP checksum of a tunnelled packet is right (a zero one is neither).
        OUTER_L4_GOOD = 6;
        /// The outer UDP checksum of a tunnelled packet is wrong.
        OUTER_L4_BAD = 7;
    }
}

bits! {
    /// Which metadata is valid (receive), and what the device is asked to do (transmit). Requests count only on a port whose
    /// capabilities name them; a port that lacks one does the work in software before it transmits, or refuses the packet with a
    /// counted reason.
    Flags: u16 {
        /// The RSS hash is valid.
        RSS_HASH = 0;
        /// The flow mark is valid.
        MARK = 1;
        /// Receive: the device took this VLAN tag off the frame. Transmit: it shall insert it.
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
        /// Transmit: the flow mark is metadata for the NIC's egress rules.
        TX_METADATA = 10;
        /// The packet is an IP fragment other than the first: no transport header.
        LATER_FRAGMENT = 11;
    }
}
