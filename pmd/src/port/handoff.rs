//! Handoff of a ring between the worker that polls the queue and the control thread that recreates it.
//!
//! Only the worker accesses its ring. When the ring is broken or the device is gone, the worker returns it
//! here. The control thread (`Port::events`) drops it, which destroys the queue of the device and releases its
//! memory. It then creates a new ring and leaves it here.
//!
//! A port hands off whole queues of its driver (`port::reattach`). A NIC also hands off single rings, with the
//! fault `F` for which a ring is recreated.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The worker has the ring.
const IN_USE: u32 = 0;
/// The worker has the ring and must return it.
const RETURN_REQUESTED: u32 = 1;
/// The worker has returned the ring.
const RETURNED: u32 = 2;
/// A new ring waits for the worker.
const READY: u32 = 3;
/// The device is lost; no new ring will come.
const LOST: u32 = 4;
/// The worker has the ring and must check whether it has stalled.
const STALL_CHECK: u32 = 5;

#[derive(Debug)]
pub(crate) struct RingHandoff<R, F> {
    state: AtomicU32,
    parked: Mutex<Parked<R, F>>,
    /// Completed and posted bursts of a send ring. Only the worker writes them.
    completed: AtomicU32,
    posted: AtomicU32,
}

#[derive(Debug)]
struct Parked<R, F> {
    ring: Option<R>,
    fault: Option<F>,
}

impl<R, F: Copy> RingHandoff<R, F> {
    /// Creates a handoff whose ring is with the worker.
    pub(crate) fn new() -> Self {
        let parked = Mutex::new(Parked { ring: None, fault: None });
        Self { state: AtomicU32::new(IN_USE), parked, completed: AtomicU32::new(0), posted: AtomicU32::new(0) }
    }

    /// Creates a handoff whose ring waits for the worker.
    pub(crate) fn with_ring(ring: R) -> Arc<Self> {
        let handoff = Self::new();
        handoff.hand_off(ring);
        Arc::new(handoff)
    }

    fn parked(&self) -> std::sync::MutexGuard<'_, Parked<R, F>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Worker: returns true if [`Self::poll`] has something to do. One load.
    #[inline(always)]
    pub(crate) fn needs_poll(&self) -> bool {
        self.state.load(Ordering::Relaxed) != IN_USE
    }

    /// Worker: returns the ring if requested, or takes a new one if available. Returns false if the device is
    /// lost.
    #[cold]
    pub(crate) fn poll(&self, ring: &mut Option<R>) -> bool {
        // Most polls while a queue is recreated end here, without the lock.
        match self.state.load(Ordering::Acquire) {
            RETURNED => return true,
            LOST => return false,
            _ => {}
        }
        let mut parked = self.parked();
        match self.state.load(Ordering::Relaxed) {
            RETURN_REQUESTED => {
                (parked.ring, parked.fault) = (ring.take(), None);
                self.state.store(RETURNED, Ordering::Release);
            }
            READY => {
                *ring = parked.ring.take();
                self.state.store(IN_USE, Ordering::Release);
            }
            _ => {}
        }
        true
    }

    /// Worker: returns a broken ring.
    #[cold]
    pub(crate) fn return_broken(&self, ring: &mut Option<R>, fault: F) {
        let mut parked = self.parked();
        (parked.ring, parked.fault) = (ring.take(), Some(fault));
        self.state.store(RETURNED, Ordering::Release);
    }

    /// Device: requests the ring.
    pub(crate) fn recall(&self) {
        let mut parked = self.parked();
        match self.state.load(Ordering::Relaxed) {
            IN_USE | STALL_CHECK => self.state.store(RETURN_REQUESTED, Ordering::Release),
            READY => {
                parked.fault = None;
                self.state.store(RETURNED, Ordering::Release);
            }
            _ => {}
        }
    }

    /// Worker: records completed and posted bursts. Two stores.
    #[inline(always)]
    pub(crate) fn set_progress(&self, (completed, posted): (u32, u32)) {
        self.completed.store(completed, Ordering::Relaxed);
        self.posted.store(posted, Ordering::Relaxed);
    }

    /// Device: returns completed and posted bursts, as last recorded by the worker.
    pub(crate) fn progress(&self) -> (u32, u32) {
        (self.completed.load(Ordering::Relaxed), self.posted.load(Ordering::Relaxed))
    }

    /// Device: requests that the worker checks its ring and returns it if it has stalled.
    pub(crate) fn request_stall_check(&self) {
        let _desk = self.parked();
        if self.state.load(Ordering::Relaxed) == IN_USE {
            self.state.store(STALL_CHECK, Ordering::Release);
        }
    }

    /// Worker: returns true if a stall check is requested.
    pub(crate) fn is_stall_check_requested(&self) -> bool {
        self.state.load(Ordering::Relaxed) == STALL_CHECK
    }

    /// Worker: reports that the ring has not stalled.
    pub(crate) fn clear_stall_check(&self) {
        let _desk = self.parked();
        if self.is_stall_check_requested() {
            self.state.store(IN_USE, Ordering::Release);
        }
    }

    /// Device: returns true if the worker has returned the ring, or has none.
    pub(crate) fn is_returned(&self) -> bool {
        self.state.load(Ordering::Acquire) == RETURNED
    }

    /// Device: returns the fault for which the worker returned the ring.
    pub(crate) fn fault(&self) -> Option<F> {
        if self.is_returned() { self.parked().fault } else { None }
    }

    /// Device: takes the fault for which the worker returned the ring.
    pub(crate) fn take_fault(&self) -> Option<F> {
        if self.is_returned() { self.parked().fault.take() } else { None }
    }

    /// Device: takes the returned ring.
    pub(crate) fn take_returned(&self) -> Option<R> {
        if self.is_returned() { self.parked().ring.take() } else { None }
    }

    /// Device: leaves a new ring for the worker.
    pub(crate) fn hand_off(&self, ring: R) {
        let mut parked = self.parked();
        (parked.ring, parked.fault) = (Some(ring), None);
        self.state.store(READY, Ordering::Release);
    }

    /// Device: tells the worker that no ring will come. The ring must have been returned.
    pub(crate) fn mark_lost(&self) {
        self.parked().ring = None;
        self.state.store(LOST, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAULT: u8 = 7;

    #[test]
    fn broken_rings_are_replaced() {
        let handoff = RingHandoff::<_, u8>::new();
        let mut ring = Some(1);
        assert!(!handoff.needs_poll() && !handoff.is_returned());
        handoff.return_broken(&mut ring, FAULT);
        assert!(ring.is_none() && handoff.needs_poll());
        assert!(handoff.poll(&mut ring) && ring.is_none());
        assert_eq!((handoff.fault(), handoff.take_returned(), handoff.take_returned()), (Some(FAULT), Some(1), None));
        handoff.hand_off(2);
        assert!(!handoff.is_returned());
        assert!(handoff.poll(&mut ring));
        assert_eq!((ring, handoff.needs_poll()), (Some(2), false));
    }

    #[test]
    fn stall_checks_end_or_give_way_to_a_recall() {
        let handoff = RingHandoff::<_, u8>::new();
        let mut ring = Some(1);
        handoff.set_progress((3, 5));
        assert_eq!(handoff.progress(), (3, 5));
        handoff.request_stall_check();
        assert!(handoff.needs_poll() && handoff.is_stall_check_requested() && !handoff.is_returned());
        handoff.clear_stall_check();
        assert!(!handoff.needs_poll());
        handoff.request_stall_check();
        handoff.recall();
        handoff.clear_stall_check();
        assert!(handoff.needs_poll() && !handoff.is_stall_check_requested(), "a recall counts more");
        assert!(handoff.poll(&mut ring) && ring.is_none());
        handoff.request_stall_check();
        assert!(handoff.is_returned(), "nothing to doubt");
        assert_eq!(handoff.take_returned(), Some(1));
    }

    #[test]
    fn rings_are_recalled_in_every_state() {
        let handoff = RingHandoff::<_, u8>::new();
        let mut ring = Some(1);
        handoff.recall();
        assert!(handoff.needs_poll() && !handoff.is_returned());
        assert!(handoff.poll(&mut ring) && handoff.is_returned());
        assert_eq!((handoff.fault(), handoff.take_returned()), (None, Some(1)));
        handoff.hand_off(2);
        handoff.recall();
        assert_eq!(handoff.take_returned(), Some(2), "before the worker fetched it");
        handoff.mark_lost();
        assert!(!handoff.poll(&mut ring) && ring.is_none());
    }
}
