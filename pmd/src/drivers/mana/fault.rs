use std::fmt;

/// What a device did that no device does. The queue is stopped at once and made anew; until then it moves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Owner bits that belong neither to this pass of the ring nor to the one before: entries were overwritten before they were read.
    OwnerOutOfTurn,
    /// A completion for another queue.
    ForeignQueue,
    /// A completion of a type that does not exist.
    UnknownType,
    /// A received packet without a byte, or longer than the buffers that were posted.
    BadLength,
    /// A completion for another work request than the one whose turn it is: twice for one, or one left out.
    OutOfOrder,
    /// A completion although nothing is on its way.
    NothingOnItsWay,
    /// The device has stopped the queue (`CQE_TX_GDMA_ERR`).
    Stopped,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OwnerOutOfTurn => "a completion with owner bits out of turn",
            Self::ForeignQueue => "a completion for another queue",
            Self::UnknownType => "a completion of an unknown type",
            Self::BadLength => "a received packet of an impossible length",
            Self::OutOfOrder => "a completion out of order",
            Self::NothingOnItsWay => "a completion of nothing",
            Self::Stopped => "the device stopped the queue",
        })
    }
}
