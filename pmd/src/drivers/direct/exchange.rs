//! How a queue's ring goes between the worker that owns the queue and the device that mends it.
//!
//! A worker alone touches its ring. When the ring is broken, or the device has gone, the worker hands it over here; whoever looks
//! after the port (`Device::events`) destroys it, which is when the hardware lets go of the memory, makes a new one and puts it here.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use super::fault::Fault;

/// The worker has the ring.
const OUT: u32 = 0;
/// The worker has it and shall bring it.
const RECALLED: u32 = 1;
/// The worker has brought it.
const BACK: u32 = 2;
/// A new one waits for the worker.
const READY: u32 = 3;
/// There will be no other.
const LOST: u32 = 4;
/// The worker has it and shall look whether it is stuck.
const DOUBTED: u32 = 5;

#[derive(Debug)]
pub(crate) struct Exchange<R> {
    state: AtomicU32,
    desk: Mutex<Desk<R>>,
    /// Bursts that a send ring was told of, and that it was given; written by the worker alone.
    landed: AtomicU32,
    launched: AtomicU32,
}

#[derive(Debug)]
struct Desk<R> {
    ring: Option<R>,
    fault: Option<Fault>,
}

impl<R> Exchange<R> {
    /// The worker has the ring.
    pub(crate) fn new() -> Self {
        let desk = Mutex::new(Desk { ring: None, fault: None });
        Self { state: AtomicU32::new(OUT), desk, landed: AtomicU32::new(0), launched: AtomicU32::new(0) }
    }

    fn desk(&self) -> std::sync::MutexGuard<'_, Desk<R>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Worker: whether there is something to do here. One load.
    #[inline(always)]
    pub(crate) fn calls(&self) -> bool {
        self.state.load(Ordering::Relaxed) != OUT
    }

    /// Worker: brings the ring if it shall, takes a new one if there is one. `false`: the device is lost.
    #[cold]
    pub(crate) fn visit(&self, ring: &mut Option<R>) -> bool {
        // Most visits while a queue is being mended end here, without the lock.
        match self.state.load(Ordering::Acquire) {
            BACK => return true,
            LOST => return false,
            _ => {}
        }
        let mut desk = self.desk();
        match self.state.load(Ordering::Relaxed) {
            RECALLED => {
                (desk.ring, desk.fault) = (ring.take(), None);
                self.state.store(BACK, Ordering::Release);
            }
            READY => {
                *ring = desk.ring.take();
                self.state.store(OUT, Ordering::Release);
            }
            _ => {}
        }
        true
    }

    /// Worker: brings a broken ring.
    #[cold]
    pub(crate) fn give_up(&self, ring: &mut Option<R>, fault: Fault) {
        let mut desk = self.desk();
        (desk.ring, desk.fault) = (ring.take(), Some(fault));
        self.state.store(BACK, Ordering::Release);
    }

    /// Device: asks for the ring.
    pub(crate) fn recall(&self) {
        let mut desk = self.desk();
        match self.state.load(Ordering::Relaxed) {
            OUT | DOUBTED => self.state.store(RECALLED, Ordering::Release),
            READY => {
                desk.fault = None;
                self.state.store(BACK, Ordering::Release);
            }
            _ => {}
        }
    }

    /// Worker: how far the ring is. Two stores.
    #[inline(always)]
    pub(crate) fn note(&self, (landed, launched): (u32, u32)) {
        self.landed.store(landed, Ordering::Relaxed);
        self.launched.store(launched, Ordering::Relaxed);
    }

    /// Device: bursts that came back and that were given to the device, as the worker last saw it.
    pub(crate) fn progress(&self) -> (u32, u32) {
        (self.landed.load(Ordering::Relaxed), self.launched.load(Ordering::Relaxed))
    }

    /// Device: asks the worker to look whether its ring is stuck, and to bring it then.
    pub(crate) fn doubt(&self) {
        let _desk = self.desk();
        if self.state.load(Ordering::Relaxed) == OUT {
            self.state.store(DOUBTED, Ordering::Release);
        }
    }

    /// Worker: whether it was asked to look.
    pub(crate) fn is_doubted(&self) -> bool {
        self.state.load(Ordering::Relaxed) == DOUBTED
    }

    /// Worker: the ring is not stuck.
    pub(crate) fn trust(&self) {
        let _desk = self.desk();
        if self.is_doubted() {
            self.state.store(OUT, Ordering::Release);
        }
    }

    /// Device: whether the worker has brought the ring, or has none.
    pub(crate) fn is_back(&self) -> bool {
        self.state.load(Ordering::Acquire) == BACK
    }

    /// Device: whether the worker brought the ring because it is broken.
    pub(crate) fn fault(&self) -> Option<Fault> {
        if self.is_back() { self.desk().fault } else { None }
    }

    /// Device: the same, once.
    pub(crate) fn take_fault(&self) -> Option<Fault> {
        if self.is_back() { self.desk().fault.take() } else { None }
    }

    /// Device: takes the ring that the worker has brought.
    pub(crate) fn collect(&self) -> Option<R> {
        if self.is_back() { self.desk().ring.take() } else { None }
    }

    /// Device: puts a new ring here for the worker.
    pub(crate) fn hand_out(&self, ring: R) {
        let mut desk = self.desk();
        (desk.ring, desk.fault) = (Some(ring), None);
        self.state.store(READY, Ordering::Release);
    }

    /// Device: tells the worker that there is nothing to wait for. The ring must be back.
    pub(crate) fn lose(&self) {
        self.desk().ring = None;
        self.state.store(LOST, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_goes_to_be_mended_and_comes_back() {
        let exchange = Exchange::new();
        let mut ring = Some(1);
        assert!(!exchange.calls() && !exchange.is_back());
        exchange.give_up(&mut ring, Fault::Stopped);
        assert!(ring.is_none() && exchange.calls());
        assert!(exchange.visit(&mut ring) && ring.is_none());
        assert_eq!((exchange.fault(), exchange.collect(), exchange.collect()), (Some(Fault::Stopped), Some(1), None));
        exchange.hand_out(2);
        assert!(!exchange.is_back());
        assert!(exchange.visit(&mut ring));
        assert_eq!((ring, exchange.calls()), (Some(2), false));
    }

    #[test]
    fn a_doubted_ring_stays_where_it_is_unless_it_is_stuck_or_recalled() {
        let exchange = Exchange::new();
        let mut ring = Some(1);
        exchange.note((3, 5));
        assert_eq!(exchange.progress(), (3, 5));
        exchange.doubt();
        assert!(exchange.calls() && exchange.is_doubted() && !exchange.is_back());
        exchange.trust();
        assert!(!exchange.calls());
        exchange.doubt();
        exchange.recall();
        exchange.trust();
        assert!(exchange.calls() && !exchange.is_doubted(), "a recall counts more");
        assert!(exchange.visit(&mut ring) && ring.is_none());
        exchange.doubt();
        assert!(exchange.is_back(), "nothing to doubt");
        assert_eq!(exchange.collect(), Some(1));
    }

    #[test]
    fn a_ring_is_recalled_wherever_it_is() {
        let exchange = Exchange::new();
        let mut ring = Some(1);
        exchange.recall();
        assert!(exchange.calls() && !exchange.is_back());
        assert!(exchange.visit(&mut ring) && exchange.is_back());
        assert_eq!((exchange.fault(), exchange.collect()), (None, Some(1)));
        exchange.hand_out(2);
        exchange.recall();
        assert_eq!(exchange.collect(), Some(2), "before the worker fetched it");
        exchange.lose();
        assert!(!exchange.visit(&mut ring) && ring.is_none());
    }
}
