// UNSAFETY: the writer frees a replaced table only after no reader can hold a reference to it.
#![allow(unsafe_code)]

//! Shared values that workers read without locks while the control thread replaces them.
//!
//! This is quiescent-state-based reclamation (QSBR). Between two batches a reader announces that it holds no
//! reference ([`Reader::quiescent`]). A replaced value is freed when every reader has announced this after
//! the replacement. Reading costs one load. Announcing costs one load if nothing was replaced, which is the
//! usual case.
//!
//! ```
//! use wirepath_pipeline::epoch::{Domain, Shared};
//!
//! let domain = Domain::new();
//! let table = Shared::new(&domain, vec![1, 2, 3]);
//! let mut reader = domain.join(); // each worker has one; a stage gets the guard from its context
//! assert_eq!(table.read(reader.guard()), &[1, 2, 3]);
//! table.replace(vec![4]);
//! assert_eq!(domain.pending_reclaims(), 1, "the old table may still be in use");
//! reader.quiescent();
//! domain.collect();
//! assert_eq!((table.read(reader.guard()).len(), domain.pending_reclaims()), (1, 0));
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;

use crossbeam_utils::CachePadded;

use crate::sync::{Arc, AtomicPtr, AtomicU64, Mutex, Ordering, fence};

/// Epoch of an offline reader, which holds no reference.
const OFFLINE: u64 = u64::MAX;

/// A group of readers and the values that they read. Clones are cheap and refer to the same domain.
#[derive(Clone)]
pub struct Domain {
    inner: Arc<Inner>,
}

struct Inner {
    /// Number of values retired so far.
    epoch: CachePadded<AtomicU64>,
    slots: Mutex<Vec<Arc<ReaderSlot>>>,
    /// Retired values, ordered by epoch.
    retired: Mutex<VecDeque<Retired>>,
}

/// Last epoch in which the reader was quiescent. Only its reader writes it.
struct ReaderSlot(CachePadded<AtomicU64>);

struct Retired {
    epoch: u64,
    /// The value; dropping it frees the memory.
    _value: Box<dyn Send>,
}

macro_rules! lock {
    ($mutex:expr) => {
        $mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    };
}

impl Domain {
    /// Creates a domain without readers.
    pub fn new() -> Self {
        let inner = Inner {
            epoch: CachePadded::new(AtomicU64::new(0)),
            slots: Mutex::new(vec![]),
            retired: Mutex::new(VecDeque::new()),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Adds a reader, which can be moved to the thread that reads. The reader must call [`Reader::quiescent`]
    /// regularly, or nothing is freed.
    pub fn join(&self) -> Reader {
        let slot = Arc::new(ReaderSlot(CachePadded::new(AtomicU64::new(OFFLINE))));
        lock!(self.inner.slots).push(Arc::clone(&slot));
        let mut reader = Reader { domain: self.clone(), slot, announced_epoch: 0, quiescent_count: 0 };
        reader.online();
        reader
    }

    /// Frees `value` when no reader can hold a reference to it any more.
    pub(crate) fn retire(&self, value: Box<dyn Send>) {
        // Release here and acquire in the reader: a reader that loads this epoch or a later one sees all
        // earlier writes. It cannot find the old value any more.
        {
            let mut retired = lock!(self.inner.retired);
            let epoch = self.inner.epoch.fetch_add(1, Ordering::AcqRel) + 1;
            retired.push_back(Retired { epoch, _value: value });
        }
        self.collect();
    }

    /// Frees the retired values that no reader can reference. Every replacement calls this, and the control
    /// thread calls it periodically.
    pub fn collect(&self) {
        let free: Vec<Retired> = {
            let mut retired = lock!(self.inner.retired);
            if retired.is_empty() {
                return;
            }
            // Pairs with the fence in `Reader::online`: either this thread sees the slot of a reader that
            // comes online, or that reader sees the new tables.
            fence(Ordering::SeqCst);
            let oldest =
                lock!(self.inner.slots).iter().map(|slot| slot.0.load(Ordering::Acquire)).min().unwrap_or(OFFLINE);
            let some = retired.partition_point(|it| it.epoch <= oldest);
            retired.drain(..some).collect()
        };
        drop(free);
    }

    /// Number of replaced values that are not freed yet.
    pub fn pending_reclaims(&self) -> usize {
        lock!(self.inner.retired).len()
    }

    fn is_same(&self, other: &Self) -> bool {
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
        f.debug_struct("Domain").field("pending_reclaims", &self.pending_reclaims()).finish_non_exhaustive()
    }
}

/// A thread's membership in a [`Domain`].
pub struct Reader {
    domain: Domain,
    slot: Arc<ReaderSlot>,
    /// Epoch that this reader announced last.
    announced_epoch: u64,
    /// Number of quiescent states so far.
    quiescent_count: u64,
}

/// Permission to read the values of a domain. It borrows the reader and thus ends before the reader's next
/// quiescent state.
#[derive(Clone, Copy)]
pub struct Guard<'r> {
    domain: &'r Domain,
    quiescent_count: u64,
    epoch: u64,
    _reader: PhantomData<&'r Reader>,
}

impl<'r> Guard<'r> {
    /// Returns a number that changes at every quiescent state of the reader.
    #[inline(always)]
    pub(crate) fn quiescent_count(self) -> u64 {
        self.quiescent_count
    }

    /// Returns the epoch that the reader announced last. While it stays the same, no value that the reader saw at this
    /// epoch is freed, so an equal address is the same value.
    #[inline(always)]
    pub(crate) fn epoch(self) -> u64 {
        self.epoch
    }

    /// Checks that the guard protects what is retired in `domain`.
    ///
    /// # Panics
    /// Panics if the guard belongs to another domain.
    #[inline(always)]
    pub(crate) fn assert_domain(self, domain: &Domain) {
        assert!(self.domain.is_same(domain), "guard of another epoch domain");
    }
}

impl Reader {
    /// Returns a guard for reading. References obtained through the guard end before the next call that needs
    /// `&mut self`.
    #[inline(always)]
    pub fn guard(&self) -> Guard<'_> {
        Guard {
            domain: &self.domain,
            quiescent_count: self.quiescent_count,
            epoch: self.announced_epoch,
            _reader: PhantomData,
        }
    }

    /// Announces that this thread holds no reference now.
    #[inline(always)]
    pub fn quiescent(&mut self) {
        self.quiescent_count = self.quiescent_count.wrapping_add(1);
        // Acquire: later reads see values at least as new as this epoch.
        let epoch = self.domain.inner.epoch.load(Ordering::Acquire);
        if epoch != self.announced_epoch {
            self.announced_epoch = epoch;
            // Release: earlier reads are complete before the store is visible.
            self.slot.0.store(epoch, Ordering::Release);
        }
    }

    /// Runs `f`, which may sleep, without delaying reclamation.
    pub fn offline<R>(&mut self, f: impl FnOnce() -> R) -> R {
        /// Brings the reader back online even if `f` panics. The guard of an offline reader would protect
        /// nothing.
        struct OnlineGuard<'r>(&'r mut Reader);
        impl Drop for OnlineGuard<'_> {
            fn drop(&mut self) {
                self.0.online();
            }
        }
        self.quiescent_count = self.quiescent_count.wrapping_add(1);
        self.slot.0.store(OFFLINE, Ordering::Release);
        let _online = OnlineGuard(self);
        f()
    }

    fn online(&mut self) {
        self.announced_epoch = self.domain.inner.epoch.load(Ordering::Acquire);
        self.slot.0.store(self.announced_epoch, Ordering::Release);
        // Pairs with the fence in `collect`: the store above precedes every later load of a table.
        fence(Ordering::SeqCst);
        // Values that were replaced before the store may be free already, so their epoch must not be announced.
        self.quiescent();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        lock!(self.domain.inner.slots).retain(|slot| !Arc::ptr_eq(slot, &self.slot));
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("announced_epoch", &self.announced_epoch).finish_non_exhaustive()
    }
}

impl fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guard")
    }
}

/// A value that readers of a domain always see as a whole. It is only replaced as a whole.
pub struct Shared<T: Send + Sync + 'static> {
    current: AtomicPtr<T>,
    domain: Domain,
    _owns: PhantomData<T>,
}

// SAFETY: `Shared` hands out `&T` to any thread, which needs `T: Sync`, and drops `T` on any thread, which
// needs `T: Send`.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: a shared `Shared` hands out `&T`, which needs `T: Sync`, and `replace` moves a `T` to another
// thread, which needs `T: Send`.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T: Send + Sync + 'static> Shared<T> {
    /// Creates a shared value with its first content.
    pub fn new(domain: &Domain, value: T) -> Self {
        Self { current: AtomicPtr::new(Box::into_raw(Box::new(value))), domain: domain.clone(), _owns: PhantomData }
    }

    /// Returns the current value.
    ///
    /// # Panics
    /// Panics if the guard belongs to another domain.
    #[inline(always)]
    pub fn read<'g>(&'g self, guard: Guard<'g>) -> &'g T {
        guard.assert_domain(&self.domain);
        // SAFETY: the pointer came from a `Box`. A replaced value is retired and is freed only after the
        // guard's reader was quiescent. Becoming quiescent needs `&mut Reader` and thus ends `'g`.
        unsafe { &*self.current.load(Ordering::Acquire) }
    }

    /// Prefetches the cache line of the current value.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        crate::table::prefetch_at(self.current.load(Ordering::Relaxed).cast_const());
    }

    /// Replaces the value and returns the old one, which readers may still use. The caller passes it to
    /// [`Domain::retire`].
    pub(crate) fn swap(&self, value: T) -> Box<dyn Send> {
        Box::new(Replaced(self.current.swap(Box::into_raw(Box::new(value)), Ordering::AcqRel)))
    }

    /// Replaces the value. The old value is freed when no reader can reference it any more.
    pub fn replace(&self, value: T) {
        let old = self.swap(value);
        self.domain.retire(old);
    }
}

/// A value taken out of a [`Shared`]. It stays a raw pointer, because a `Box` would claim unique access while
/// readers may hold references.
struct Replaced<T>(*mut T);

// SAFETY: `Replaced` owns the value, so sending it to another thread needs only `T: Send`.
unsafe impl<T: Send> Send for Replaced<T> {}

impl<T> Drop for Replaced<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a `Box` and was swapped out exactly once. `Domain::collect` drops
        // this only when no reader can reference the value.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl<T: Send + Sync + 'static> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a `Box`. All references to the value borrow `self`, so none exist
        // during `drop`.
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

    /// A value whose release loom can observe. A read that is concurrent with, or unordered with, the write
    /// in `drop` is an error.
    struct Guarded(UnsafeCell<u32>);

    // SAFETY: loom's `UnsafeCell` checks every access for data races.
    unsafe impl Sync for Guarded {}

    impl Guarded {
        fn new(value: u32) -> Self {
            Self(UnsafeCell::new(value))
        }

        fn get(&self) -> u32 {
            // SAFETY: loom checks that no thread writes at the same time.
            self.0.with(|value| unsafe { *value })
        }
    }

    impl Drop for Guarded {
        fn drop(&mut self) {
            // SAFETY: loom checks that no thread reads at the same time.
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
            assert_eq!(domain.pending_reclaims(), 0, "no reader is left");
        });
    }

    #[test]
    fn offline_readers_do_not_delay_reclamation() {
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
            assert_eq!(domain.pending_reclaims(), 0);
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
            for i in 1..if cfg!(miri) { 50 } else { 2000 } {
                table.replace([i; 64]);
            }
            stop.store(true, Ordering::Relaxed);
        });
        domain.collect();
        assert_eq!(domain.pending_reclaims(), 0);
    }
}
