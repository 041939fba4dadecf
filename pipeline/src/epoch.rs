// UNSAFETY: a table that was replaced is freed by the writer once no reader can hold a reference to it any more.
#![allow(unsafe_code)]

//! Tables that workers read without locks while the control thread replaces them.
//!
//! Quiescent-state based reclamation: a reader announces, between two batches, that it holds no reference
//! ([`Reader::quiescent`]); what the writer took out of use is freed when every reader has announced that after it was taken out.
//! Reading costs one load; announcing costs one load in the usual case that nothing was replaced.
//!
//! ```
//! use wirepath_pipeline::epoch::{Domain, Shared};
//!
//! let domain = Domain::new();
//! let table = Shared::new(&domain, vec![1, 2, 3]);
//! let mut reader = domain.join(); // each worker has one; a stage gets the guard from its context
//! assert_eq!(table.read(reader.guard()), &[1, 2, 3]);
//! table.replace(vec![4]);
//! assert_eq!(domain.waiting(), 1, "the old table may still be in use");
//! reader.quiescent();
//! domain.collect();
//! assert_eq!((table.read(reader.guard()).len(), domain.waiting()), (1, 0));
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;

use crossbeam_utils::CachePadded;

use crate::sync::{Arc, AtomicPtr, AtomicU64, Mutex, Ordering, fence};

/// Epoch of a reader that holds no reference and takes none until it says so.
const OFFLINE: u64 = u64::MAX;

/// A group of readers and the tables that they read. Cheap to clone; clones are the same domain.
#[derive(Clone)]
pub struct Domain {
    inner: Arc<Inner>,
}

struct Inner {
    /// Counts what was retired.
    epoch: CachePadded<AtomicU64>,
    slots: Mutex<Vec<Arc<Slot>>>,
    /// In the order of their epochs.
    retired: Mutex<VecDeque<Retired>>,
}

/// The last epoch that a reader has seen with empty hands. Written by its reader only.
struct Slot(CachePadded<AtomicU64>);

struct Retired {
    epoch: u64,
    /// Dropped to free it.
    _value: Box<dyn Send>,
}

macro_rules! lock {
    ($mutex:expr) => {
        $mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    };
}

impl Domain {
    /// A domain without readers.
    pub fn new() -> Self {
        let inner = Inner {
            epoch: CachePadded::new(AtomicU64::new(0)),
            slots: Mutex::new(vec![]),
            retired: Mutex::new(VecDeque::new()),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Adds a reader, which moves to the thread that reads. As long as it lives it must say [`Reader::quiescent`] now and then, or
    /// nothing is freed.
    pub fn join(&self) -> Reader {
        let slot = Arc::new(Slot(CachePadded::new(AtomicU64::new(OFFLINE))));
        lock!(self.inner.slots).push(Arc::clone(&slot));
        let mut reader = Reader { domain: self.clone(), slot, seen: 0, turn: 0 };
        reader.online();
        reader
    }

    /// Frees `value` when no reader can hold a reference to it any more.
    pub(crate) fn retire(&self, value: Box<dyn Send>) {
        // A reader that loads this epoch or a later one sees, by the release here and its acquire, what was done before: it cannot
        // find the value any more.
        {
            let mut retired = lock!(self.inner.retired);
            let epoch = self.inner.epoch.fetch_add(1, Ordering::AcqRel) + 1;
            retired.push_back(Retired { epoch, _value: value });
        }
        self.collect();
    }

    /// Frees what no reader can hold any more. Called by every replacement; the control thread calls it now and then besides.
    pub fn collect(&self) {
        let free: Vec<Retired> = {
            let mut retired = lock!(self.inner.retired);
            if retired.is_empty() {
                return;
            }
            // Against a reader that just comes online: either its slot is seen here, or it sees the new tables (`Reader::online`).
            fence(Ordering::SeqCst);
            let oldest =
                lock!(self.inner.slots).iter().map(|slot| slot.0.load(Ordering::Acquire)).min().unwrap_or(OFFLINE);
            let some = retired.partition_point(|it| it.epoch <= oldest);
            retired.drain(..some).collect()
        };
        drop(free);
    }

    /// How many replaced values are not freed yet.
    pub fn waiting(&self) -> usize {
        lock!(self.inner.retired).len()
    }

    fn same(&self, other: &Self) -> bool {
        std::ptr::eq(&raw const *self.inner, &raw const *other.inner)
    }
}

impl Default for Domain {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("waiting", &self.waiting()).finish_non_exhaustive()
    }
}

/// One thread's membership of a [`Domain`].
pub struct Reader {
    domain: Domain,
    slot: Arc<Slot>,
    seen: u64,
    /// Counts quiescent moments.
    turn: u64,
}

/// Leave to read tables of a domain, until the reader's next quiescent moment: the borrow of the reader sees to that.
#[derive(Clone, Copy)]
pub struct Guard<'r> {
    domain: &'r Domain,
    turn: u64,
    _reader: PhantomData<&'r Reader>,
}

impl<'r> Guard<'r> {
    /// Changes at every quiescent moment of the reader.
    #[inline(always)]
    pub(crate) fn turn(self) -> u64 {
        self.turn
    }
}

impl Reader {
    /// Leave to read. References taken through the guard end before the next call that needs `&mut self`.
    #[inline(always)]
    pub fn guard(&self) -> Guard<'_> {
        Guard { domain: &self.domain, turn: self.turn, _reader: PhantomData }
    }

    /// Says that this thread holds no reference now.
    #[inline(always)]
    pub fn quiescent(&mut self) {
        self.turn = self.turn.wrapping_add(1);
        // Acquire: what is read from here on is at least as new as this epoch.
        let epoch = self.domain.inner.epoch.load(Ordering::Acquire);
        if epoch != self.seen {
            self.seen = epoch;
            // Release: what was read before is done with.
            self.slot.0.store(epoch, Ordering::Release);
        }
    }

    /// Runs `f`, which may sleep, without keeping anything from being freed meanwhile.
    pub fn offline<R>(&mut self, f: impl FnOnce() -> R) -> R {
        /// Comes back online also if `f` panics: a guard of an offline reader would protect nothing.
        struct Back<'r>(&'r mut Reader);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                self.0.online();
            }
        }
        self.turn = self.turn.wrapping_add(1);
        self.slot.0.store(OFFLINE, Ordering::Release);
        let _back = Back(self);
        f()
    }

    fn online(&mut self) {
        self.seen = self.domain.inner.epoch.load(Ordering::Acquire);
        self.slot.0.store(self.seen, Ordering::Release);
        // Against `collect`, see there: the store comes before every later load of a table.
        fence(Ordering::SeqCst);
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        lock!(self.domain.inner.slots).retain(|slot| !Arc::ptr_eq(slot, &self.slot));
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("seen", &self.seen).finish_non_exhaustive()
    }
}

impl fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guard")
    }
}

/// A value that readers of a domain see whole, and that is only ever replaced whole.
pub struct Shared<T: Send + Sync + 'static> {
    current: AtomicPtr<T>,
    domain: Domain,
    _owns: PhantomData<T>,
}

// SAFETY: hands out `&T` to any thread and drops `T` on any thread: sound for `T: Send + Sync`.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T: Send + Sync + 'static> Shared<T> {
    /// A first value.
    pub fn new(domain: &Domain, value: T) -> Self {
        Self { current: AtomicPtr::new(Box::into_raw(Box::new(value))), domain: domain.clone(), _owns: PhantomData }
    }

    /// The current value.
    ///
    /// # Panics
    /// If the guard is of another domain.
    #[inline(always)]
    pub fn read<'g>(&'g self, guard: Guard<'g>) -> &'g T {
        assert!(guard.domain.same(&self.domain), "guard of another epoch domain");
        // SAFETY: the pointer came from a Box. If it is replaced meanwhile it is retired, and freed only after the guard's reader was
        // quiescent, which needs `&mut Reader` and thus ends 'g.
        unsafe { &*self.current.load(Ordering::Acquire) }
    }

    /// Asks the processor to fetch the current value.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        crate::table::prefetch_at(self.current.load(Ordering::Relaxed).cast_const());
    }

    /// Puts another value in place and returns the old one, which may still be read: to be given to [`Domain::retire`].
    pub(crate) fn exchange(&self, value: T) -> Box<dyn Send> {
        Box::new(Replaced(self.current.swap(Box::into_raw(Box::new(value)), Ordering::AcqRel)))
    }

    /// Puts another value in place; the old one is freed when no reader can see it any more.
    pub fn replace(&self, value: T) {
        let old = self.exchange(value);
        self.domain.retire(old);
    }
}

/// A value that was taken out of a [`Shared`]. Stays a raw pointer while readers may hold references: a box would claim it alone.
struct Replaced<T>(*mut T);

// SAFETY: owns the value.
unsafe impl<T: Send> Send for Replaced<T> {}

impl<T> Drop for Replaced<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a Box and was swapped out once; `Domain::collect` drops this when no reader is left.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl<T: Send + Sync + 'static> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: from a Box; references to it borrow `self`, so there are none.
        drop(unsafe { Box::from_raw(self.current.load(Ordering::Acquire)) });
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use crate::sync::AtomicBool;
    use loom::cell::UnsafeCell;
    use loom::thread;

    /// A value that loom sees being freed: a read at the same time as the write in `drop`, or unordered with it, is an error.
    struct Guarded(UnsafeCell<u32>);

    // SAFETY: a cell that loom watches.
    unsafe impl Sync for Guarded {}

    impl Guarded {
        fn new(value: u32) -> Self {
            Self(UnsafeCell::new(value))
        }

        fn get(&self) -> u32 {
            // SAFETY: loom checks that nobody writes meanwhile.
            self.0.with(|value| unsafe { *value })
        }
    }

    impl Drop for Guarded {
        fn drop(&mut self) {
            // SAFETY: loom checks that nobody reads meanwhile.
            self.0.with_mut(|value| unsafe { *value = u32::MAX });
        }
    }

    #[test]
    fn nothing_is_freed_while_it_is_read() {
        loom::model(|| {
            let domain = Domain::new();
            let table = Arc::new(Shared::new(&domain, Guarded::new(1)));
            let mut reader = domain.join();
            let worker = {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    let mut last = 0;
                    for _ in 0..2 {
                        let value = table.read(reader.guard()).get();
                        assert!((last..=2).contains(&value) && value > 0, "whole, and never older than before");
                        last = value;
                        reader.quiescent();
                    }
                })
            };
            table.replace(Guarded::new(2));
            domain.collect();
            worker.join().unwrap();
            domain.collect();
            assert_eq!(domain.waiting(), 0, "the reader is gone");
        });
    }

    #[test]
    fn a_sleeping_reader_holds_nothing_up_and_comes_back_to_the_new_table() {
        loom::model(|| {
            let domain = Domain::new();
            let table = Arc::new(Shared::new(&domain, Guarded::new(1)));
            let asleep = Arc::new(AtomicBool::new(false));
            let mut reader = domain.join();
            let worker = {
                let (table, asleep) = (Arc::clone(&table), Arc::clone(&asleep));
                thread::spawn(move || {
                    reader.offline(|| asleep.store(true, Ordering::Release));
                    assert!((1..=2).contains(&table.read(reader.guard()).get()));
                    reader.quiescent();
                })
            };
            table.replace(Guarded::new(2));
            domain.collect();
            worker.join().unwrap();
            domain.collect();
            assert_eq!(domain.waiting(), 0);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod threads {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    #[should_panic(expected = "another epoch domain")]
    fn guards_of_other_domains_are_refused() {
        let table = Shared::new(&Domain::new(), 1);
        let other = Domain::new();
        table.read(other.join().guard());
    }

    #[test]
    fn readers_see_whole_values_while_they_are_replaced() {
        let domain = Domain::new();
        let (table, stop) = (Shared::new(&domain, [0u64; 64]), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let mut reader = domain.join();
                let (table, stop) = (&table, &stop);
                scope.spawn(move || {
                    let mut last = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let value = table.read(reader.guard());
                        assert!(value[0] >= last && value.iter().all(|x| *x == value[0]));
                        last = value[0];
                        reader.quiescent();
                    }
                });
            }
            for i in 1..2000 {
                table.replace([i; 64]);
            }
            stop.store(true, Ordering::Relaxed);
        });
        domain.collect();
        assert_eq!(domain.waiting(), 0);
    }
}
