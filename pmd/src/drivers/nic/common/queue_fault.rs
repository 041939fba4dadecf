use std::fmt;

use wirepath_nic_defs::mlx5::{SYNDROME_LOCAL_QP_OPERATION, syndrome_text};

/// The reason why a queue is recreated: an error that the device reported, or a violation of its interface.
/// Until then the queue moves no packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueFault {
    /// An error CQE of mlx5. The device has stopped the queue.
    ErrorCqe {
        /// `SYNDROME_*`.
        syndrome: u8,
        /// Vendor syndrome.
        vendor: u8,
        /// WQE counter.
        position: u16,
    },
    /// An error completion of libibverbs (`enum ibv_wc_status`). The device has stopped the queue.
    ErrorStatus {
        /// `IBV_WC_*`.
        status: u32,
        /// Vendor error code.
        vendor: u32,
    },
    /// A call of the provider library failed: to post a request, or to read a completion.
    ProviderFailed {
        /// Name of the function.
        call: &'static str,
    },
    /// An error completion with which MANA stops the queue (`CQE_TX_GDMA_ERR`).
    Stopped,
    /// An error completion without a usable position: it is unknown whether its burst is complete.
    UnknownPosition,
    /// Owner bits that match neither this pass over the ring nor the previous one: entries were overwritten
    /// before they were read.
    BadOwnerBits,
    /// A completion for another queue.
    ForeignQueue,
    /// A completion type that is invalid in this queue.
    UnknownType,
    /// A received packet of length 0, or longer than the posted buffers.
    BadLength,
    /// A compressed session with an invalid number of packets.
    BadSession,
    /// A completion for a descriptor other than the next one: repeated or skipped.
    OutOfOrder,
    /// A completion while no packets are in flight.
    UnexpectedCompletion,
    /// No completion within the timeout, although packets are in flight and the link is up.
    Stalled,
}

impl QueueFault {
    /// Returns true if the device rejected a descriptor as malformed.
    pub(crate) fn is_malformed(self) -> bool {
        matches!(self, Self::ErrorCqe { syndrome: SYNDROME_LOCAL_QP_OPERATION, .. })
    }
}

impl fmt::Display for QueueFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ErrorCqe { syndrome, vendor, position } => {
                return write!(
                    f,
                    "the device stopped it at WQE {position:#06x} with syndrome {syndrome:#04x}, vendor syndrome \
                     {vendor:#04x}: {}",
                    syndrome_text(*syndrome)
                );
            }
            Self::ErrorStatus { status, vendor } => {
                return write!(
                    f,
                    "the device stopped it with status {status}, vendor error {vendor:#04x}: {}",
                    wirepath_verbs::status_text(*status)
                );
            }
            Self::ProviderFailed { call } => return write!(f, "{call} of the provider library failed"),
            Self::Stopped => "the device stopped it",
            Self::UnknownPosition => "an error completion without a position",
            Self::BadOwnerBits => "a completion with unexpected owner bits",
            Self::ForeignQueue => "a completion for another queue",
            Self::UnknownType => "a completion of an invalid type",
            Self::BadLength => "a received packet of an invalid length",
            Self::BadSession => "a compressed session with an invalid number of packets",
            Self::OutOfOrder => "a completion out of order",
            Self::UnexpectedCompletion => "a completion without packets in flight",
            Self::Stalled => "no completion within `tx_timeout`",
        })
    }
}
