//! Mailbox of a worker: packets and wake-ups from other threads.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crossbeam_queue::{ArrayQueue, SegQueue};
use crossbeam_utils::CachePadded;
use rustix::event::{EventfdFlags, eventfd};
use wirepath_packet::{Packet, PortId};
use wirepath_pmd::port::TxQueue;

use crate::context::Output;
use crate::job::MailboxJob;
use crate::measure::Recording;
use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};
use crate::worker::Input;

/// Capacity of each of the two packet queues of a mailbox.
pub(crate) const MAILBOX_LEN: usize = 1024;

/// Capacity of the queue of jobs.
const JOBS: usize = 64;

/// Capacity of the queues of recordings.
const RECORDINGS: usize = 8;

/// Two flags that guarantee that a sender and a worker about to sleep never miss each other.
///
/// The worker writes `sleeping` and then reads `notified`. The sender enqueues its work, writes `notified`
/// and then reads `sleeping`. A fence between the two accesses on each side guarantees that at least one side
/// sees the other. Therefore no work is left while the worker sleeps.
#[derive(Debug)]
struct Handshake {
    notified: CachePadded<AtomicBool>,
    sleeping: AtomicBool,
}

impl Handshake {
    fn new() -> Self {
        Self { notified: CachePadded::new(AtomicBool::new(false)), sleeping: AtomicBool::new(false) }
    }

    /// Called after work was enqueued. Returns `true` if the worker sleeps and must be woken.
    fn notify(&self) -> bool {
        // A read-modify-write, not a plain store. A plain store would break the release sequence of another
        // sender, and the worker could miss that sender's work.
        self.notified.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        self.sleeping.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn take_notification(&self) -> bool {
        self.notified.load(Ordering::Relaxed) && self.notified.swap(false, Ordering::Acquire)
    }

    /// Called before sleeping. Returns `false` if a notification arrived meanwhile, so that the worker must
    /// not sleep.
    fn prepare_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let quiet = !self.notified.load(Ordering::Relaxed);
        if !quiet {
            self.wake();
        }
        quiet
    }

    fn wake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}

/// A flag that a worker polls between batches, and an eventfd that wakes the worker if it sleeps.
#[derive(Debug)]
pub(crate) struct Notifier {
    handshake: Handshake,
    event: OwnedFd,
}

impl Notifier {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self { handshake: Handshake::new(), event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)? })
    }

    /// Signals that work was enqueued. This makes a system call only if the worker sleeps.
    pub(crate) fn notify(&self) {
        if self.handshake.notify() {
            // The counter cannot overflow in practice, and a full counter wakes the worker as well.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Returns whether a notification arrived since the last call, and clears it.
    #[inline(always)]
    pub(crate) fn take_notification(&self) -> bool {
        self.handshake.take_notification()
    }

    /// Called before sleeping. Returns `false` if a notification arrived meanwhile, so that the worker must
    /// not sleep.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.handshake.prepare_sleep()
    }

    /// Called after sleeping. Clears the eventfd.
    pub(crate) fn wake(&self) {
        self.handshake.wake();
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }

    /// Descriptor that becomes readable when a notification arrives during sleep.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// A change of the ports, for a worker. The control thread allocates the lists.
pub(crate) enum PortOrder {
    /// Use the queues of a new port. The lists of room are empty and have room for all inputs and outputs.
    Add { port: PortId, inputs: Vec<Input>, output: Box<Output>, inputs_room: Vec<Input>, outputs_room: Vec<Output> },
    /// Return the queues of a port. `inputs` is empty and has room for them.
    Remove { port: PortId, inputs: Vec<Input> },
    /// Reply when all packets that were in the mailbox before are processed.
    Mark { port: PortId },
}

/// Reply of a worker to an order.
pub(crate) enum PortReply {
    /// The port is in use.
    Added,
    /// The worker does not use the port any more. These are its queues.
    Removed { port: PortId, inputs: Vec<Input>, output: Option<TxQueue> },
    /// See [`PortOrder::Mark`].
    Marked { port: PortId },
}

/// The shared part of a worker, which other threads use to send it packets.
pub(crate) struct Mailbox {
    pub(crate) notifier: Notifier,
    /// Packets to pass through the worker's stages.
    pub(crate) work: ArrayQueue<Packet>,
    /// Packets to send to their output port, on a queue that this worker owns.
    pub(crate) transmit: ArrayQueue<Packet>,
    /// Functions that the worker runs between two batches.
    pub(crate) jobs: ArrayQueue<MailboxJob>,
    /// True if the worker has ended and runs no job any more.
    closed: AtomicBool,
    /// Recordings that the worker fills from now on, one after the other; `None`: it stops to record.
    pub(crate) recording_orders: ArrayQueue<Option<Box<Recording>>>,
    /// Recordings that the worker returns.
    pub(crate) recordings: ArrayQueue<Box<Recording>>,
    /// True while the worker fills a recording.
    pub(crate) is_recording: AtomicBool,
    /// Changes of ports that the worker carries out.
    pub(crate) port_orders: SegQueue<PortOrder>,
    /// Orders that the worker has carried out.
    pub(crate) port_replies: SegQueue<PortReply>,
    /// Number of idle turns after polling has stopped.
    pub(crate) drained: AtomicU64,
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("work", &self.work.len()).finish_non_exhaustive()
    }
}

impl Mailbox {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            notifier: Notifier::new()?,
            work: ArrayQueue::new(MAILBOX_LEN),
            transmit: ArrayQueue::new(MAILBOX_LEN),
            jobs: ArrayQueue::new(JOBS),
            closed: AtomicBool::new(false),
            recording_orders: ArrayQueue::new(RECORDINGS),
            recordings: ArrayQueue::new(RECORDINGS),
            is_recording: AtomicBool::new(false),
            port_orders: SegQueue::new(),
            port_replies: SegQueue::new(),
            drained: AtomicU64::new(0),
        })
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.is_recording.load(Ordering::Relaxed)
    }

    /// Called by a worker that ends. Jobs that it has not run get no result.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        // Either this thread sees a job that is given now, or the thread that gives it sees the end.
        fence(Ordering::SeqCst);
        self.discard_jobs();
    }

    /// Returns whether the worker has ended. Called after a job was enqueued.
    pub(crate) fn is_closed(&self) -> bool {
        fence(Ordering::SeqCst);
        self.closed.load(Ordering::Relaxed)
    }

    pub(crate) fn discard_jobs(&self) {
        while self.jobs.pop().is_some() {}
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

    /// Two threads enqueue work and notify; the worker sleeps when it finds none. If work could be missed, a
    /// model run would end with all threads waiting, which loom reports as a deadlock. The preemption bound
    /// is two, because larger bounds take hours. Two preemptions suffice to find the bug of a plain store in
    /// `notify`, which hides one sender from the other.
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
                        let (handshake, work, event, condvar) = &*shared;
                        work.fetch_add(1, Ordering::Relaxed);
                        if handshake.notify() {
                            *event.lock().unwrap() = true;
                            condvar.notify_one();
                        }
                    })
                })
                .collect();
            let (handshake, work, event, condvar) = &*shared;
            let mut done = 0;
            while done < 2 {
                if handshake.take_notification() {
                    done += work.swap(0, Ordering::Relaxed);
                } else if handshake.prepare_sleep() {
                    let mut woken = event.lock().unwrap();
                    while !*woken {
                        woken = condvar.wait(woken).unwrap();
                    }
                    *woken = false;
                    drop(woken);
                    handshake.wake();
                }
            }
            senders.into_iter().for_each(|sender| sender.join().unwrap());
        });
    }
}
