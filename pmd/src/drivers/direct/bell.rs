//! How a worker that sleeps is woken: each receive queue has a channel, on which the device announces the next packet once it was asked to.

use std::os::fd::{AsFd, BorrowedFd};

use wirepath_verbs::{CompletionChannel, CompletionQueueOptions, Context, Result};

/// The channel of a receive queue.
#[derive(Debug)]
pub(crate) struct Bell(CompletionChannel);

impl Bell {
    /// A channel for queue `index`, if it is one of the first `waking`, and completions that are announced on it by an interrupt of their
    /// own, as far as there are as many.
    pub(crate) fn of_queue(
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

    /// Takes what was announced: how often. `None`: the channel cannot be read.
    pub(crate) fn answer(&self) -> Option<u32> {
        let mut times = 0;
        loop {
            match self.0.next_event() {
                // A queue announces once for each time that it is asked.
                Ok(Some(_)) => times += 1,
                Ok(None) => return Some(times),
                Err(_) => return None,
            }
        }
    }

    /// Readable once there is an announcement.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
