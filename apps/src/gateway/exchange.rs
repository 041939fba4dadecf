//! Exchange between the control thread and a thread that talks to the kernel. Neither waits for the other.
//!
//! Both sides leave changes for the other one. A later change replaces an earlier one of the same item. So what waits
//! is bounded by the tables.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde_json::Value;
use wirepath_pipeline::ControlWaker;

/// Changes for the control thread.
#[derive(Debug, Default)]
pub(super) struct Outbox<C> {
    pub(super) changes: C,
    /// Time of the first message behind the changes.
    pub(super) since: Option<Instant>,
}

/// State of both threads: orders `O` of the control thread, changes `C` for it, and figures `S` for operators.
#[derive(Debug)]
pub(super) struct Shared<O, C, S> {
    pub(super) orders: Mutex<O>,
    pub(super) outbox: Mutex<Outbox<C>>,
    pub(super) status: Mutex<S>,
    /// Event by which the control thread wakes the other one.
    event: OwnedFd,
    /// Wakes the control thread.
    control: ControlWaker,
}

impl<O: Default, C: Default, S: Default> Shared<O, C, S> {
    /// Creates the state with the first orders.
    ///
    /// # Errors
    /// If there is no room for a descriptor.
    pub(super) fn new(orders: O, control: ControlWaker) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            orders: Mutex::new(orders),
            outbox: Mutex::default(),
            status: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            control,
        }))
    }

    /// Changes the orders, and wakes the other thread.
    pub(super) fn order(&self, change: impl FnOnce(&mut O)) {
        change(&mut lock(&self.orders));
        // The event is pending already if the counter is full.
        _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Takes the orders, on the other thread.
    pub(super) fn take_orders(&self) -> O {
        std::mem::take(&mut *lock(&self.orders))
    }

    /// Waits on the other thread for messages of the kernel or an order, at most for `time`.
    pub(super) fn wait(&self, messages: impl AsFd, time: Duration) {
        let mut fds = [
            PollFd::from_borrowed_fd(messages.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN),
        ];
        let timeout = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() };
        if poll(&mut fds, Some(&timeout)).is_ok() && !fds[1].revents().is_empty() {
            _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
    }

    /// Adds changes to those that wait, and wakes the control thread. `since` is the time of their messages.
    pub(super) fn publish(&self, since: Instant, add: impl FnOnce(&mut C)) {
        let mut outbox = lock(&self.outbox);
        add(&mut outbox.changes);
        outbox.since.get_or_insert(since);
        drop(outbox);
        self.control.wake();
    }

    /// Takes the changes, on the control thread.
    pub(super) fn take_changes(&self) -> Outbox<C> {
        std::mem::take(&mut lock(&self.outbox))
    }
}

/// Times from a message of the kernel to the tables of the gateway.
#[derive(Debug, Default)]
pub(super) struct Lag {
    last: Duration,
    max: Duration,
}

impl Lag {
    /// Records that changes are applied whose first message came at `since`.
    pub(super) fn record(&mut self, since: Instant) {
        self.last = since.elapsed();
        self.max = self.max.max(self.last);
    }

    /// Returns the last and the longest time in microseconds, for the columns `lag_us` and `max_lag_us`.
    pub(super) fn columns(&self) -> [Value; 2] {
        [self.last, self.max].map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX).into())
    }
}

/// Locks a mutex. Its data are valid even if another thread panicked.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the weight of a member for an item. The member with the highest weight has the item (rendezvous hashing), so
/// a member that leaves moves only its own items.
pub(super) fn weight(item: impl Hash, member: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    (item, member).hash(&mut hasher);
    hasher.finish()
}
