//! What workers tell the control thread.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crossbeam_queue::ArrayQueue;
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::Packet;

use crate::mailbox::Bell;
use crate::table::Key;

/// A packet that a stage gave to the control thread: slow path, such as ARP.
#[derive(Debug)]
pub struct Punt {
    /// The packet, its metadata as the stage left it.
    pub packet: Packet,
    /// What the stage means by it; a number of the application's.
    pub code: u32,
    /// Worker that it comes from.
    pub worker: usize,
}

/// An address was seen as source where the table does not have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learn {
    /// Segment and address.
    pub key: Key,
    /// Where it was seen; a number of the application's.
    pub destination: u32,
}

/// A packet that was dropped, for who wants to see it.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) packet: Packet,
    pub(crate) reason: DropReason,
}

/// Dropped packets that may wait to be looked at.
const REFUSED: usize = 256;
/// Punted packets that may wait for the control thread.
const PUNTS: usize = 1024;
/// Learn events that may wait for the control thread.
const LEARNS: usize = 4096;

/// What the workers are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Carry packets.
    Run = 0,
    /// Receive no more, but finish what other workers hand over.
    Drain = 1,
    /// Return.
    Exit = 2,
}

/// What all workers and the control thread share.
#[derive(Debug)]
pub(crate) struct ControlQueues {
    pub(crate) bell: Bell,
    pub(crate) punts: ArrayQueue<Punt>,
    pub(crate) learns: ArrayQueue<Learn>,
    refused: ArrayQueue<Refused>,
    /// Whether somebody wants to see what is dropped.
    capture: AtomicBool,
    phase: AtomicU8,
}

impl ControlQueues {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            bell: Bell::new()?,
            punts: ArrayQueue::new(PUNTS),
            learns: ArrayQueue::new(LEARNS),
            refused: ArrayQueue::new(REFUSED),
            capture: AtomicBool::new(false),
            phase: AtomicU8::new(0),
        })
    }

    /// Keeps what is dropped from now on for [`Self::refused`], as far as there is room.
    pub(crate) fn capture(&self) {
        self.capture.store(true, Ordering::Relaxed);
    }

    /// Ends a packet that was counted as dropped.
    #[inline(always)]
    pub(crate) fn bury(&self, packet: Packet, reason: DropReason) {
        if self.capture.load(Ordering::Relaxed) {
            // Without room it is not seen, but it was counted.
            let _ = self.refused.push(Refused { packet, reason });
        }
    }

    /// Whether dropped packets are kept.
    #[inline(always)]
    pub(crate) fn is_capturing(&self) -> bool {
        self.capture.load(Ordering::Relaxed)
    }

    /// The next packet that was dropped.
    pub(crate) fn refused(&self) -> Option<Refused> {
        self.refused.pop()
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
