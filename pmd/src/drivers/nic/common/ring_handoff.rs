use super::queue_fault::QueueFault;

/// Handoff of a NIC's ring, with the fault for which it is recreated.
pub(crate) type RingHandoff<R> = crate::port::RingHandoff<R, QueueFault>;
