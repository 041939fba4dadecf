use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flag that is set when a queue was destroyed.
///
/// Until then, the device may access the buffers that were posted to the queue. If the queue could not be destroyed,
/// the flag is never set, and its packets must not be reused.
#[derive(Clone, Debug, Default)]
pub struct DestroyedFlag(Arc<AtomicBool>);

impl DestroyedFlag {
    /// Returns true if the queue was destroyed.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Marks the queue as destroyed.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
}
