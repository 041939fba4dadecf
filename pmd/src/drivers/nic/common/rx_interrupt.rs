//! Receive interrupts. Each receive queue has a completion channel, which becomes readable at the next packet
//! after the CQ was armed.

use std::os::fd::{AsFd, BorrowedFd};

use wirepath_verbs::{CompletionChannel, CompletionQueueOptions, Context, Result};

/// Completion channel of a receive queue.
#[derive(Debug)]
pub(crate) struct RxInterrupt(CompletionChannel);

impl RxInterrupt {
    /// Creates a channel for queue `index` if it is one of the first `waking`, and sets the completion vector
    /// of its CQ. Queues share vectors if the device has fewer vectors than queues.
    pub(crate) fn for_queue(
        context: &Context,
        index: usize,
        waking: usize,
        options: CompletionQueueOptions,
    ) -> Result<(Option<Self>, CompletionQueueOptions)> {
        if index >= waking {
            return Ok((None, options));
        }
        let channel = CompletionChannel::new(context)?;
        let vector = index as u32 % context.completion_vectors().max(1);
        let options = CompletionQueueOptions { channel: Some(channel.clone()), vector, ..options };
        Ok((Some(Self(channel)), options))
    }

    /// Reads all pending events and returns their number. `None` if the channel cannot be read.
    pub(crate) fn drain_events(&self) -> Option<u32> {
        let mut times = 0;
        loop {
            match self.0.next_event() {
                // A CQ raises one event each time it is armed.
                Ok(Some(_)) => times += 1,
                Ok(None) => return Some(times),
                Err(_) => return None,
            }
        }
    }

    /// Returns the descriptor, which is readable while an event is pending.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
