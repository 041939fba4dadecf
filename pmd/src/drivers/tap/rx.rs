use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::device::Queue;
use crate::counters::QueueCounters;
use crate::drivers::kernel::vnet::{self, Finisher, Header};
use crate::drops::DropReason;
use crate::packet::Batch;
use crate::port::{ReceiveQueue, bytes_of};

/// Longest thing that one read gives: a superframe of 64 KiB with its headers and tags, and what describes it.
const LONGEST: usize = 70_000;

/// Receives by read(2): the kernel has no other way for a TAP device. Superframes keep the number of calls low.
pub(super) struct Receiver {
    queue: Arc<Queue>,
    buffer: Box<[u8; LONGEST]>,
    /// Bytes in `buffer` of a superframe that is not yet all delivered.
    pending: usize,
    gone: bool,
    finisher: Finisher,
    counters: Arc<QueueCounters>,
}

impl Receiver {
    pub(super) fn new(queue: Arc<Queue>, finisher: Finisher) -> Self {
        Self { queue, buffer: Box::new([0; LONGEST]), pending: 0, gone: false, finisher, counters: Arc::default() }
    }

    /// Reads the next frame into the buffer; `false` if there is none.
    fn read(&mut self) -> bool {
        match rustix::io::read(self.queue.as_fd(), &mut self.buffer[..]) {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => false,
            Ok(n) => {
                self.pending = n;
                true
            }
            Err(Errno::BADFD) => {
                self.gone = true;
                false
            }
            // EIO: the interface is switched off.
            Err(_) => false,
        }
    }
}

impl ReceiveQueue for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        while !batch.is_full() {
            if self.pending == 0 && !self.read() {
                break;
            }
            let Some((header, frame)) = self.buffer[..self.pending].split_first_chunk::<{ vnet::HEADER }>() else {
                self.counters.drops.add(DropReason::BadDescriptor, 1);
                self.pending = 0;
                continue;
            };
            if !self.finisher.accept(frame, Header::read(header), None, batch, &self.counters) {
                break;
            }
            self.pending = 0;
        }
        let got = &batch.as_slice()[before..];
        self.counters.count_burst(got.len() as u64, bytes_of(got));
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        // The descriptor of a device that is gone is always ready.
        (self.pending == 0 && !self.gone).then(|| self.queue.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
