//! Teardown of queues, and packets that can never be freed because a queue was not destroyed.

use std::any::Any;
use std::fmt;
use std::mem::forget;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_verbs::DestroyedFlag;

/// Counter of leaked packets. A packet is leaked instead of freed if the device may still access its buffer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quarantine(Arc<AtomicU64>);

impl Quarantine {
    /// Returns the number of leaked packets.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn leak<T>(&self, packets: T, count: usize) {
        forget(packets);
        self.0.fetch_add(count as u64, Ordering::Relaxed);
        tracing::error!("{count} packets are leaked: the device or an attached process may still write to them");
    }
}

/// Hardware objects of queues that must be destroyed before their packets are freed.
pub(crate) struct QueueTeardown {
    hardware: Option<Box<dyn Any + Send + Sync>>,
    destroyed_flags: Vec<DestroyedFlag>,
    quarantine: Quarantine,
}

impl QueueTeardown {
    /// `hardware` is dropped first. All other owners of the queues must drop them before [`Self::release`] is
    /// called. `destroyed_flags` are the destroyed flags of the queues.
    pub(crate) fn new(
        hardware: Box<dyn Any + Send + Sync>,
        destroyed_flags: Vec<DestroyedFlag>,
        quarantine: &Quarantine,
    ) -> Self {
        Self { hardware: Some(hardware), destroyed_flags, quarantine: quarantine.clone() }
    }

    /// Adds further objects and flags.
    pub(crate) fn extend(&mut self, hardware: Box<dyn Any + Send + Sync>, destroyed_flags: Vec<DestroyedFlag>) {
        self.hardware = Some(Box::new((self.hardware.take(), hardware)));
        self.destroyed_flags.extend(destroyed_flags);
    }

    /// Returns the teardown of the same queues without their hardware, for packets that outlive this value.
    pub(crate) fn without_hardware(&self) -> Self {
        Self::new(Box::new(()), self.destroyed_flags.clone(), &self.quarantine)
    }

    /// Leaks `count` packets that another process may still write to.
    pub(crate) fn leak<T>(&self, packets: T, count: usize) {
        self.quarantine.leak(packets, count);
    }

    /// Drops the hardware without checking the flags, because another owner still holds it.
    pub(crate) fn drop_hardware(&mut self) {
        self.hardware = None;
    }

    /// Returns a teardown without hardware.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn empty() -> Self {
        Self::new(Box::new(()), Vec::new(), &Quarantine::default())
    }

    /// Destroys the hardware. Returns true if all queues are destroyed.
    pub(crate) fn destroy(&mut self) -> bool {
        self.hardware = None;
        self.destroyed_flags.iter().all(DestroyedFlag::is_set)
    }

    /// Destroys the hardware. Then frees `count` packets, or leaks them if a queue could not be destroyed.
    pub(crate) fn release<T>(&mut self, packets: T, count: usize) {
        if !self.destroy() && count > 0 {
            self.quarantine.leak(packets, count);
        }
    }
}

impl fmt::Debug for QueueTeardown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueTeardown").field("destroyed_flags", &self.destroyed_flags).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_packet::Pool;
    use wirepath_packet::driver::InFlight;

    #[test]
    fn packets_of_live_queues_leak_and_others_are_freed() {
        let pool = Pool::new("quarantine", 16).unwrap();
        let (quarantine, destroyed) = (Quarantine::default(), DestroyedFlag::default());
        let take = || pool.take().unwrap();
        for gone in [false, true] {
            if gone {
                destroyed.set();
            }
            let mut teardown = QueueTeardown::new(Box::new(()), vec![destroyed.clone()], &quarantine);
            teardown.release(InFlight::with_capacity(1), 0);
            teardown.release([take(), take()], 2);
        }
        assert_eq!((quarantine.count(), pool.outstanding()), (2, 2));
    }
}
