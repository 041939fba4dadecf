// UNSAFETY: `GlobalAlloc` is an unsafe trait.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static RETAINED: Cell<i64> = const { Cell::new(0) };
}

/// The system allocator with counters for each thread. A test program installs it: `#[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator;`
#[derive(Debug)]
pub struct CountingAllocator;

/// Returns how often `work` allocates or reallocates on this thread. Panics unless [`CountingAllocator`] is
/// installed.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    drop(std::hint::black_box(Box::new(1)));
    let start = COUNT.get();
    assert!(start > before, "CountingAllocator is not the global allocator of this program");
    work();
    COUNT.get() - start
}

/// Returns the result of `work` and the bytes that this thread has allocated and not freed in it. Memory that
/// other threads free is not counted. Panics unless [`CountingAllocator`] is installed.
pub fn retained_bytes<R>(work: impl FnOnce() -> R) -> (R, i64) {
    allocations(|| {});
    let before = RETAINED.get();
    let done = work();
    (done, RETAINED.get() - before)
}

fn count(bytes: usize) {
    COUNT.set(COUNT.get() + 1);
    add_retained(bytes as i64);
}

fn add_retained(bytes: i64) {
    // An ending thread frees memory after its thread-local counters are gone.
    let _ = RETAINED.try_with(|held| held.set(held.get() + bytes));
}

// SAFETY: every call is forwarded to the system allocator. Counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller guarantees that `layout` has a non-zero size.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller guarantees that `layout` has a non-zero size.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        add_retained(-(layout.size() as i64));
        // SAFETY: the caller guarantees that `at` was allocated here with `layout`, and that `size` is not
        // zero and does not overflow.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        add_retained(-(layout.size() as i64));
        // SAFETY: the caller guarantees that `at` was allocated here with `layout` and is not used again.
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
        let (list, bytes) = retained_bytes(|| std::hint::black_box(vec![1u8; 100]));
        assert_eq!(bytes, 100);
        assert_eq!(retained_bytes(|| drop(list)).1, -100);
    }
}
