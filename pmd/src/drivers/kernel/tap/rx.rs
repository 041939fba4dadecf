use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::device::TapQueue;
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr, VnetOffload};
use crate::port::{RxDriver, bytes_of};
use wirepath_packet::Batch;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;

/// Maximum bytes of a read: a superframe of 64 KiB with headers, tags and the virtio header.
const MAX_READ: usize = 70_000;

/// Receives by read(2), one frame per call: the kernel has no other interface for a TAP device. Superframes
/// reduce the number of calls.
pub(super) struct Receiver {
    queue: Arc<TapQueue>,
    buffer: Box<[u8; MAX_READ]>,
    /// Bytes in `buffer` of a superframe that was not delivered completely.
    pending: usize,
    removed: bool,
    offload: VnetOffload,
    counters: Arc<QueueCounters>,
}

impl Receiver {
    pub(super) fn new(queue: Arc<TapQueue>, offload: VnetOffload) -> Self {
        Self { queue, buffer: Box::new([0; MAX_READ]), pending: 0, removed: false, offload, counters: Arc::default() }
    }

    /// Reads the next frame into the buffer. Returns `false` if there is none.
    fn read(&mut self) -> bool {
        match rustix::io::read(self.queue.as_fd(), &mut self.buffer[..]) {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => false,
            Ok(n) => {
                self.pending = n;
                true
            }
            Err(Errno::BADFD) => {
                self.removed = true;
                false
            }
            // EIO: the interface is down.
            Err(_) => false,
        }
    }
}

impl RxDriver for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        while !batch.is_full() {
            if self.pending == 0 && !self.read() {
                break;
            }
            let Some((header, frame)) = self.buffer[..self.pending].split_first_chunk::<{ vnet_hdr::HEADER }>() else {
                self.counters.drops.add(DropReason::BadDescriptor, 1);
                self.pending = 0;
                continue;
            };
            if !self.offload.receive_frame(frame, VirtioNetHdr::read(header), None, batch, &self.counters) {
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

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        // The descriptor of a removed device is always ready.
        (self.pending == 0 && !self.removed).then(|| self.queue.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
