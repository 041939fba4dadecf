use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the device has let go of a queue, and so of everything that it read or wrote for it. A queue that could not be destroyed never is:
/// its packets must not be used again.
#[derive(Clone, Debug, Default)]
pub struct Fate(Arc<AtomicBool>);

impl Fate {
    /// Whether the queue was destroyed.
    pub fn is_gone(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Notes that it was.
    pub fn set_gone(&self) {
        self.0.store(true, Ordering::Release);
    }
}
