use std::fmt;

use wirepath_nic_defs::mlx5::{SYNDROME_LOCAL_QP_OPERATION, syndrome_text};

/// Why a queue is stopped and made anew: what the device reported, or what it did that no device does. Until then it moves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An error completion of an mlx5: the device has stopped the queue.
    Refused {
        /// `SYNDROME_*`.
        syndrome: u8,
        /// The vendor's number for it.
        vendor: u8,
        /// Counter of the descriptor.
        position: u16,
    },
    /// An error completion as libibverbs tells it (`enum ibv_wc_status`): the device has stopped the queue.
    Failed {
        /// `IBV_WC_*`.
        status: u32,
        /// The vendor's number for it.
        vendor: u32,
    },
    /// The provider's library refused to post, or could not read a completion.
    Library,
    /// An error completion of a MANA that has stopped the queue (`CQE_TX_GDMA_ERR`).
    Stopped,
    /// An error completion of which nobody knows whether its burst is still open.
    Unplaced,
    /// Owner bits that belong neither to this pass of the ring nor to the one before: entries were overwritten before they were read.
    OwnerOutOfTurn,
    /// A completion for another queue.
    ForeignQueue,
    /// A completion of a type that has no place in this queue.
    UnknownType,
    /// A received packet without a byte, or longer than the buffers that were posted.
    BadLength,
    /// A compressed session of a number of packets that cannot be.
    BadSession,
    /// A completion for another descriptor than the one whose turn it is: twice for one, or one left out.
    OutOfOrder,
    /// A completion although nothing is on its way.
    NothingOnItsWay,
    /// No completion for a long time, although packets are on their way and the link is up.
    Stalled,
}

impl Fault {
    /// Whether the device called a descriptor malformed.
    pub(crate) fn is_malformed(self) -> bool {
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
            Self::Failed { status, vendor } => {
                return write!(
                    f,
                    "the device stopped it with status {status}, vendor's {vendor:#04x}: {}",
                    wirepath_verbs::status_text(*status)
                );
            }
            Self::Library => "the provider's library can no longer work with it",
            Self::Stopped => "the device stopped it",
            Self::Unplaced => "an error completion without the position of its packet",
            Self::OwnerOutOfTurn => "a completion with owner bits out of turn",
            Self::ForeignQueue => "a completion for another queue",
            Self::UnknownType => "a completion of a type that does not belong there",
            Self::BadLength => "a received packet of an impossible length",
            Self::BadSession => "a compressed session of an impossible number of packets",
            Self::OutOfOrder => "a completion out of order",
            Self::NothingOnItsWay => "a completion of nothing",
            Self::Stalled => "no completion for a long time",
        })
    }
}
