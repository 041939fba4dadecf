// UNSAFETY: an allocator is an unsafe trait.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static HELD: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, counting for each thread. A test program installs it:
/// `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`
#[derive(Debug)]
pub struct CountingAllocator;

/// How often `work` made this thread allocate or reallocate. Zero means something only where [`CountingAllocator`] is installed,
/// which this checks.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    drop(std::hint::black_box(Box::new(1)));
    let start = COUNT.get();
    assert!(start > before, "CountingAllocator is not the global allocator of this program");
    work();
    COUNT.get() - start
}

/// What `work` returns, and how many bytes more this thread holds then than before. Same condition; what other threads free of this one's
/// is not seen.
pub fn held<R>(work: impl FnOnce() -> R) -> (R, i64) {
    allocations(|| {});
    let before = HELD.get();
    let done = work();
    (done, HELD.get() - before)
}

fn count(bytes: usize) {
    COUNT.set(COUNT.get() + 1);
    hold(bytes as i64);
}

fn hold(bytes: i64) {
    // A thread that ends frees after its own counters are gone.
    let _ = HELD.try_with(|held| held.set(held.get() + bytes));
}

// SAFETY: everything is the system allocator's; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        hold(-(layout.size() as i64));
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        hold(-(layout.size() as i64));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn counts_what_allocates_and_nothing_else() {
        assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))), 1);
        assert_eq!(allocations(|| _ = std::hint::black_box([1u8; 100])), 0);
        let (list, bytes) = held(|| std::hint::black_box(vec![1u8; 100]));
        assert_eq!(bytes, 100);
        assert_eq!(held(|| drop(list)).1, -100);
    }
}
