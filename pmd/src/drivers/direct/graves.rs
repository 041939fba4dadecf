//! When the device has let go of packets, and what becomes of those that it never lets go of.

use std::any::Any;
use std::fmt;
use std::mem::forget;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_verbs::Fate;

/// Packets that are given up, because the device may still read or write them: counted, never back in their pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graves(Arc<AtomicU64>);

impl Graves {
    /// Packets that were given up.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn bury<T>(&self, packets: T, count: usize) {
        forget(packets);
        self.0.fetch_add(count as u64, Ordering::Relaxed);
        tracing::error!(
            "{count} packets are given up: the device, or a process that was attached, may still write them"
        );
    }
}

/// What has to go before packets are free, and how it is seen to be gone.
pub(crate) struct Ending {
    hardware: Option<Box<dyn Any + Send + Sync>>,
    fates: Vec<Fate>,
    graves: Graves,
}

impl Ending {
    /// `hardware` is dropped first; whoever else keeps the queues goes before [`Self::release`] is called. `fates` are those of the queues.
    pub(crate) fn new(hardware: Box<dyn Any + Send + Sync>, fates: Vec<Fate>, graves: &Graves) -> Self {
        Self { hardware: Some(hardware), fates, graves: graves.clone() }
    }

    /// More of the same.
    pub(crate) fn also(&mut self, hardware: Box<dyn Any + Send + Sync>, fates: Vec<Fate>) {
        self.hardware = Some(Box::new((self.hardware.take(), hardware)));
        self.fates.extend(fates);
    }

    /// The same queues, kept by somebody else: to free what outlives this.
    pub(crate) fn behind(&self) -> Self {
        Self::new(Box::new(()), self.fates.clone(), &self.graves)
    }

    /// Buries `count` packets that somebody else may still write to.
    pub(crate) fn bury<T>(&self, packets: T, count: usize) {
        self.graves.bury(packets, count);
    }

    /// Drops what keeps the hardware, and judges nothing yet: somebody else keeps it as well.
    pub(crate) fn let_go(&mut self) {
        self.hardware = None;
    }

    /// Nothing that a device knows of.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn none() -> Self {
        Self::new(Box::new(()), Vec::new(), &Graves::default())
    }

    /// Ends the hardware, then frees `count` packets, or buries them if a queue could not be destroyed.
    pub(crate) fn release<T>(&mut self, packets: T, count: usize) {
        self.hardware = None;
        if count > 0 && !self.fates.iter().all(Fate::is_gone) {
            self.graves.bury(packets, count);
        }
    }
}

impl fmt::Debug for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ending").field("fates", &self.fates).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Held, Pool};

    #[test]
    fn what_the_device_keeps_is_buried_and_the_rest_freed() {
        let pool = Pool::new("graves", 16).unwrap();
        let (graves, fate) = (Graves::default(), Fate::default());
        let take = || pool.take().unwrap();
        for gone in [false, true] {
            if gone {
                fate.set_gone();
            }
            let mut ending = Ending::new(Box::new(()), vec![fate.clone()], &graves);
            ending.release(Held::with_room_for(1), 0);
            ending.release([take(), take()], 2);
        }
        assert_eq!((graves.count(), pool.outstanding()), (2, 2));
    }
}
