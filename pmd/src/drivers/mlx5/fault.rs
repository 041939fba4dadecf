use std::fmt;

use wirepath_nic_defs::mlx5::{SYNDROME_LOCAL_QP_OPERATION, syndrome_text};

/// Why a queue is stopped and made anew: what the device reported, or what it did that no device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// An error completion: the device has stopped the queue.
    Refused {
        /// `SYNDROME_*`.
        syndrome: u8,
        /// The vendor's number for it.
        vendor: u8,
        /// Counter of the descriptor.
        position: u16,
    },
    /// A completion for another queue.
    ForeignQueue,
    /// A completion of a type that has no place in this queue.
    UnknownType,
    /// A received packet of a length that its buffers cannot hold.
    BadLength,
    /// A compressed session of a number of packets that cannot be.
    BadSession,
    /// A completion for another descriptor than the one whose turn it is: twice for one, or one left out.
    OutOfOrder,
    /// A completion although nothing is on its way.
    NothingOnItsWay,
}

impl Fault {
    /// Whether the device called a descriptor malformed.
    pub(super) fn is_malformed(self) -> bool {
        matches!(self, Self::Refused { syndrome: SYNDROME_LOCAL_QP_OPERATION, .. })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused { syndrome, vendor, position } => {
                return write!(
                    f,
                    "the device stopped it at descriptor {position:#06x} with syndrome {syndrome:#04x}, vendor's {vendor:#04x}: {}",
                    syndrome_text(*syndrome)
                );
            }
            Self::ForeignQueue => "a completion for another queue",
            Self::UnknownType => "a completion of a type that does not belong there",
            Self::BadLength => "a received packet of an impossible length",
            Self::BadSession => "a compressed session of an impossible number of packets",
            Self::OutOfOrder => "a completion out of order",
            Self::NothingOnItsWay => "a completion of nothing",
        })
    }
}
