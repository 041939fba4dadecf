//! Events that workers send to the control thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crossbeam_queue::ArrayQueue;
use wirepath_packet::Packet;

use crate::mailbox::Notifier;
use crate::table::Key;

/// A packet that a stage passed to the control thread (slow path, ARP for example).
#[derive(Debug)]
pub struct Punt {
    /// The packet, with its metadata as the stage left it.
    pub packet: Packet,
    /// Application-defined code that states the reason.
    pub code: u32,
    /// Worker that sent the packet.
    pub worker: usize,
}

/// A source address that the table does not have at this destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learn {
    /// Segment and address.
    pub key: Key,
    /// Application-defined destination at which the address was seen.
    pub destination: u32,
}

/// Capacity of each queue of punted packets.
const PUNT_QUEUE_LEN: usize = 1024;
/// Capacity of the queue of learn events.
const LEARN_QUEUE_LEN: usize = 4096;

/// Phase of all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Forward packets.
    Run = 0,
    /// Stop receiving, but finish packets that other workers hand over.
    Drain = 1,
    /// Return from the run loop.
    Exit = 2,
}

/// State shared by all workers and the control thread.
#[derive(Debug)]
pub(crate) struct ControlQueues {
    pub(crate) notifier: Notifier,
    pub(crate) punts: ArrayQueue<Punt>,
    /// Punted packets that the control thread takes before all others.
    pub(crate) priority_punts: ArrayQueue<Punt>,
    pub(crate) learns: ArrayQueue<Learn>,
    /// True if another thread has called [`ControlWaker::wake`].
    woken: AtomicBool,
    phase: AtomicU8,
}

impl ControlQueues {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            notifier: Notifier::new()?,
            punts: ArrayQueue::new(PUNT_QUEUE_LEN),
            priority_punts: ArrayQueue::new(PUNT_QUEUE_LEN),
            learns: ArrayQueue::new(LEARN_QUEUE_LEN),
            woken: AtomicBool::new(false),
            phase: AtomicU8::new(0),
        })
    }

    /// Takes the next punted packet.
    pub(crate) fn next_punt(&self) -> Option<Punt> {
        self.priority_punts.pop().or_else(|| self.punts.pop())
    }

    /// Returns whether another thread has called [`ControlWaker::wake`] since the last call.
    pub(crate) fn take_woken(&self) -> bool {
        self.woken.load(Ordering::Relaxed) && self.woken.swap(false, Ordering::Acquire)
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Run,
            1 => Phase::Drain,
            _ => Phase::Exit,
        }
    }
}

/// Wakes the control thread from another thread of the application, which has work for it.
#[derive(Clone, Debug)]
pub struct ControlWaker(pub(crate) Arc<ControlQueues>);

impl ControlWaker {
    /// Makes the control thread call [`Control::woken`](crate::Control::woken) soon. Several calls can lead to one.
    pub fn wake(&self) {
        // Release: the control thread sees what the caller has written before.
        self.0.woken.store(true, Ordering::Release);
        self.0.notifier.notify();
    }
}
