//! Limits of what the tests of a process have at the same time.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// A number of threads that may have something at a time. It depends on the number of processors.
#[derive(Debug)]
pub(crate) struct Limit {
    per_processor: usize,
    most: usize,
    /// Threads with permits, and how many each of them has.
    holders: Mutex<Vec<(ThreadId, u32)>>,
    free: Condvar,
}

/// The right of a thread, until it is dropped. A thread that has it may take it repeatedly.
#[derive(Debug)]
pub(crate) struct Permit {
    limit: &'static Limit,
    thread: ThreadId,
}

impl Limit {
    pub(crate) const fn new(per_processor: usize, most: usize) -> Self {
        Self { per_processor, most, holders: Mutex::new(Vec::new()), free: Condvar::new() }
    }

    /// Waits until the calling thread may have a permit.
    pub(crate) fn take(&'static self) -> Permit {
        let thread = std::thread::current().id();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let limit = (processors * self.per_processor).min(self.most);
        let mut held = self.lock();
        loop {
            if let Some((_, times)) = held.iter_mut().find(|(owner, _)| *owner == thread) {
                *times += 1;
                return Permit { limit: self, thread };
            }
            if held.len() < limit {
                held.push((thread, 1));
                return Permit { limit: self, thread };
            }
            held = self.free.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(ThreadId, u32)>> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = self.limit.lock();
        if let Some((_, times)) = held.iter_mut().find(|(owner, _)| *owner == self.thread) {
            *times -= 1;
        }
        held.retain(|(_, times)| *times > 0);
        self.limit.free.notify_all();
    }
}
