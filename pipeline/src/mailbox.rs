//! What reaches a worker from outside: packets of other workers, and the call to look up.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use rustix::event::{EventfdFlags, eventfd};
use wirepath_pmd::packet::Packet;

use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// Packets that may wait for a worker in each of its two queues.
pub(crate) const MAILBOX: usize = 1024;

/// Two flags, by which who brings work and who may sleep miss each other never.
///
/// The sleeper writes `sleeping` and then looks at `rung`; who brings work puts it down, writes `rung` and then looks at `sleeping`.
/// Between each pair stands a fence, so that at least one of the two sees the other: no work is slept through.
#[derive(Debug)]
struct Handshake {
    rung: CachePadded<AtomicBool>,
    sleeping: AtomicBool,
}

impl Handshake {
    fn new() -> Self {
        Self { rung: CachePadded::new(AtomicBool::new(false)), sleeping: AtomicBool::new(false) }
    }

    /// After work was put down. `true`: the other side must be woken.
    fn ring(&self) -> bool {
        // Not a plain store: that would hide what another thread put down just before from the one who answers both at once.
        self.rung.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        self.sleeping.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn answer(&self) -> bool {
        self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::Acquire)
    }

    /// Before sleep. `false`: it rang meanwhile, so do not sleep.
    fn lie_down(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let quiet = !self.rung.load(Ordering::Relaxed);
        if !quiet {
            self.get_up();
        }
        quiet
    }

    fn get_up(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}

/// A flag that a thread looks at between two pieces of work, and a descriptor that wakes it if it sleeps.
#[derive(Debug)]
pub(crate) struct Bell {
    handshake: Handshake,
    event: OwnedFd,
}

impl Bell {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self { handshake: Handshake::new(), event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)? })
    }

    /// Says that work was put down. A system call only if the other side sleeps.
    pub(crate) fn ring(&self) {
        if self.handshake.ring() {
            // The counter cannot overflow in practice, and a full one is as good as a written one.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Whether the bell rang since the last call.
    #[inline(always)]
    pub(crate) fn answer(&self) -> bool {
        self.handshake.answer()
    }

    /// Before sleep. `false`: it rang meanwhile, so do not sleep.
    pub(crate) fn lie_down(&self) -> bool {
        self.handshake.lie_down()
    }

    /// After sleep.
    pub(crate) fn get_up(&self) {
        self.handshake.get_up();
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

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// Two threads put work down and ring; the worker sleeps when it finds none. If work could be slept through, a model run would end
    /// with everybody waiting, which loom reports as a deadlock. (Bounded: with more than two preemptions it would take hours, and the
    /// plain store in `ring` that hid one sender from the other was found with two.)
    #[test]
    fn no_work_is_slept_through() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let shared = Arc::new((Handshake::new(), AtomicU64::new(0), Mutex::new(false), Condvar::new()));
            let senders: Vec<_> = (0..2)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        let (handshake, work, event, wake) = &*shared;
                        work.fetch_add(1, Ordering::Relaxed);
                        if handshake.ring() {
                            *event.lock().unwrap() = true;
                            wake.notify_one();
                        }
                    })
                })
                .collect();
            let (handshake, work, event, wake) = &*shared;
            let mut done = 0;
            while done < 2 {
                if handshake.answer() {
                    done += work.swap(0, Ordering::Relaxed);
                } else if handshake.lie_down() {
                    let mut woken = event.lock().unwrap();
                    while !*woken {
                        woken = wake.wait(woken).unwrap();
                    }
                    *woken = false;
                    drop(woken);
                    handshake.get_up();
                }
            }
            senders.into_iter().for_each(|sender| sender.join().unwrap());
        });
    }
}
