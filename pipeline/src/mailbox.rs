//! What reaches a worker from outside: packets of other workers, and the call to look up.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use rustix::event::{EventfdFlags, eventfd};
use wirepath_pmd::packet::Packet;

/// Packets that may wait for a worker in each of its two queues.
pub(crate) const MAILBOX: usize = 1024;

/// A flag that a thread looks at between two pieces of work, and a descriptor that wakes it if it sleeps.
///
/// The sleeper writes `sleeping` and then looks for work; who brings work puts it down and then looks at `sleeping`. Between each pair
/// stands a fence, so that at least one of the two sees the other: no work is slept through.
#[derive(Debug)]
pub(crate) struct Bell {
    rung: CachePadded<AtomicBool>,
    sleeping: AtomicBool,
    event: OwnedFd,
}

impl Bell {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            rung: CachePadded::new(AtomicBool::new(false)),
            sleeping: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    /// Says that work was put down. A system call only if the other side sleeps.
    pub(crate) fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) {
            // The counter cannot overflow in practice, and a full one is as good as a written one.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Whether the bell rang since the last call.
    #[inline(always)]
    pub(crate) fn answer(&self) -> bool {
        self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::Acquire)
    }

    /// Before sleep. `false`: it rang meanwhile, so do not sleep.
    pub(crate) fn lie_down(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let quiet = !self.rung.load(Ordering::Relaxed);
        if !quiet {
            self.sleeping.store(false, Ordering::Relaxed);
        }
        quiet
    }

    /// After sleep.
    pub(crate) fn get_up(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }

    /// Becomes readable when the bell rings during sleep.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// The ends that others see of a worker.
#[derive(Debug)]
pub(crate) struct Mailbox {
    pub(crate) bell: Bell,
    /// Packets to be taken through the stages.
    pub(crate) work: ArrayQueue<Packet>,
    /// Packets to be sent by their output port, on a queue that this worker owns.
    pub(crate) transmit: ArrayQueue<Packet>,
    /// Turns that ended with nothing done after polling had stopped.
    pub(crate) drained: AtomicU64,
}

impl Mailbox {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            bell: Bell::new()?,
            work: ArrayQueue::new(MAILBOX),
            transmit: ArrayQueue::new(MAILBOX),
            drained: AtomicU64::new(0),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.work.is_empty() && self.transmit.is_empty()
    }
}
