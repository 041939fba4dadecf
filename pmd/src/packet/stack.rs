//! A stack of small numbers that any thread pushes to and pops from, without locks.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Numbers below a bound, each in the stack at most once.
pub(super) struct Stack {
    /// A tag that changes with every operation in the upper half, against ABA; the number on top plus one in the lower half.
    top: AtomicU64,
    /// For each number in the stack: the one below it, plus one. Apart from what the numbers stand for, because a thread that loses the
    /// race for a number may read its entry while the winner already uses the thing.
    below: Box<[AtomicU32]>,
}

impl Stack {
    /// An empty stack for numbers below `bound`.
    pub(super) fn new(bound: u32) -> Self {
        Self { top: AtomicU64::new(0), below: (0..bound).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Pushes a number that is not in the stack. What the caller wrote before is visible to the one who pops it.
    pub(super) fn push(&self, number: u32) {
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            self.below[number as usize].store(top as u32, Ordering::Relaxed);
            let next = next_tag(top) | u64::from(number + 1);
            match self.top.compare_exchange_weak(top, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    /// Pops the number on top.
    pub(super) fn pop(&self) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let number = (top as u32).checked_sub(1)?;
            // If the number was popped and pushed meanwhile this may be the wrong one, but then the tag has changed.
            let below = self.below[number as usize].load(Ordering::Relaxed);
            let next = next_tag(top) | u64::from(below);
            // Release too: who acquires the new top must also see what lies below it.
            match self.top.compare_exchange_weak(top, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(number),
                Err(now) => top = now,
            }
        }
    }
}

fn next_tag(top: u64) -> u64 {
    ((top >> 32).wrapping_add(1)) << 32
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    /// Three numbers go round between two threads. Each number guards a cell that only its holder writes: loom reports two holders, and
    /// a holder that does not see what the one before it wrote.
    #[test]
    fn a_number_has_one_holder() {
        loom::model(|| {
            let shared = Arc::new((Stack::new(3), [0; 3].map(|_| UnsafeCell::new(0u32))));
            for number in 0..3 {
                shared.0.push(number);
            }
            let work = |shared: &(Stack, [UnsafeCell<u32>; 3])| {
                if let Some(number) = shared.0.pop() {
                    // SAFETY: the holder is the only one; loom checks just that.
                    #[allow(unsafe_code)]
                    shared.1[number as usize].with_mut(|cell| unsafe { *cell += 1 });
                    shared.0.push(number);
                }
            };
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || work(&other));
            work(&shared);
            thread.join().unwrap();
            let mut left: Vec<u32> = std::iter::from_fn(|| shared.0.pop()).collect();
            left.sort_unstable();
            assert_eq!(left, [0, 1, 2]);
        });
    }
}
