//! Lock-free stack of small numbers, which any thread pushes to and pops from.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Stack of numbers below a bound, each in it at most once.
pub(super) struct Stack {
    /// Upper half: a tag against ABA, which changes with every operation. Lower half: the number on top, plus
    /// one.
    top: AtomicU64,
    /// For each number in the stack, the number below it, plus one.
    ///
    /// It is not stored in the objects that the numbers stand for. A thread that loses the race for a number
    /// may read its entry while the winner already uses the object.
    below: Box<[AtomicU32]>,
}

impl Stack {
    /// Creates an empty stack for numbers below `bound`.
    pub(super) fn new(bound: u32) -> Self {
        Self { top: AtomicU64::new(0), below: (0..bound).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Pushes a number that is not in the stack. The thread that pops it sees everything that the caller
    /// wrote before.
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

    /// Pops the number on top; `None` if the stack is empty.
    pub(super) fn pop(&self) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let number = (top as u32).checked_sub(1)?;
            // The value is stale if the number was popped and pushed meanwhile. The tag has changed then, and
            // the exchange fails.
            let below = self.below[number as usize].load(Ordering::Relaxed);
            let next = next_tag(top) | u64::from(below);
            // `Release` too: a thread that acquires the new top must also see the entries below it.
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

    /// Moves three numbers between two threads. Each number guards a cell that only its holder writes.
    ///
    /// Loom reports a second holder, and a holder that does not see the writes of the one before.
    #[test]
    fn a_number_has_one_holder() {
        loom::model(|| {
            let shared = Arc::new((Stack::new(3), [0; 3].map(|_| UnsafeCell::new(0u32))));
            for number in 0..3 {
                shared.0.push(number);
            }
            let work = |shared: &(Stack, [UnsafeCell<u32>; 3])| {
                if let Some(number) = shared.0.pop() {
                    // SAFETY: a thread that popped the number is its only holder, which is the property that
                    // loom checks.
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
