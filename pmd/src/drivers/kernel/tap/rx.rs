use std::any::Any;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::device::TapQueue;
use crate::drivers::kernel::common::frame_buffers::{BUFFERS, FrameBuffers};
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr, VnetOffload};
use crate::port::{RxDriver, bytes_of};
use wirepath_packet::Batch;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;

/// Receives by readv(2) into packet buffers, one frame per call: the kernel has no other interface for a TAP device.
/// Superframes reduce the number of calls.
pub(super) struct Receiver {
    queue: Arc<TapQueue>,
    buffers: FrameBuffers,
    /// Bytes of a virtio header.
    header_len: usize,
    removed: bool,
    offload: VnetOffload,
    counters: Arc<QueueCounters>,
}

impl Receiver {
    /// Makes a queue of a device with virtio headers of `header_len` bytes.
    pub(super) fn new(queue: Arc<TapQueue>, offload: VnetOffload, header_len: usize) -> Self {
        Self { queue, buffers: FrameBuffers::new(), header_len, removed: false, offload, counters: Arc::default() }
    }

    fn receive_frames(&mut self, batch: &mut Batch) {
        let Self { buffers, header_len, .. } = self;
        let mut header = [0; vnet_hdr::TUNNEL_HEADER];
        self.offload.resume(batch, &self.counters);
        // Without buffers, frames wait in the kernel, which counts those that it drops.
        while !batch.is_full() && buffers.fill(self.offload.pool()) {
            let read = {
                let mut bytes = std::iter::once(&mut header[..*header_len]).chain(buffers.parts());
                let mut parts: [IoSliceMut<'_>; BUFFERS + 1] =
                    std::array::from_fn(|_| IoSliceMut::new(bytes.next().unwrap_or(&mut [])));
                rustix::io::readv(self.queue.as_fd(), &mut parts)
            };
            let Some(n) = finish_read(read, &mut self.removed) else { break };
            let frame = n.checked_sub(*header_len).and_then(|len| buffers.take(len));
            let (Some(packet), Some(fields)) = (frame, header.first_chunk()) else {
                self.counters.drops.add(DropReason::BadDescriptor, 1);
                continue;
            };
            self.offload.receive_packet(packet, VirtioNetHdr::read(fields), None, batch, &self.counters);
        }
    }
}

/// Returns the bytes of a frame, `None` if there is none. Notes whether the device was removed.
fn finish_read(result: Result<usize, Errno>, removed: &mut bool) -> Option<usize> {
    match result {
        Ok(n @ 1..) => Some(n),
        Err(Errno::BADFD) => {
            *removed = true;
            None
        }
        // EIO: the interface is down.
        Ok(0) | Err(_) => None,
    }
}

impl RxDriver for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        self.receive_frames(batch);
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
        (!self.offload.is_cutting() && !self.removed).then(|| self.queue.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
