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

/// Maximum bytes of a read: a superframe of 64 KiB with headers, tags and the virtio header.
const MAX_READ: usize = 70_000;

/// Receives by read(2), one frame per call: the kernel has no other interface for a TAP device. Superframes
/// reduce the number of calls.
pub(super) struct Receiver {
    queue: Arc<TapQueue>,
    memory: Memory,
    removed: bool,
    offload: VnetOffload,
    counters: Arc<QueueCounters>,
}

/// Where the kernel writes frames.
enum Memory {
    /// Superframes are cut while they are copied from here. `pending` are the bytes of a superframe that was not
    /// delivered completely.
    Copied { buffer: Box<[u8; MAX_READ]>, pending: usize },
    /// Superframes stay whole, in packet buffers. The virtio header has `header_len` bytes.
    Direct { buffers: FrameBuffers, header_len: usize },
}

impl Receiver {
    /// Makes a queue that cuts superframes.
    pub(super) fn new(queue: Arc<TapQueue>, offload: VnetOffload) -> Self {
        Self::with_memory(queue, offload, Memory::Copied { buffer: Box::new([0; MAX_READ]), pending: 0 })
    }

    /// Makes a queue that receives superframes whole, with virtio headers of `header_len` bytes.
    pub(super) fn whole(queue: Arc<TapQueue>, offload: VnetOffload, header_len: usize) -> Self {
        Self::with_memory(queue, offload, Memory::Direct { buffers: FrameBuffers::new(), header_len })
    }

    fn with_memory(queue: Arc<TapQueue>, offload: VnetOffload, memory: Memory) -> Self {
        Self { queue, memory, removed: false, offload, counters: Arc::default() }
    }

    fn receive_copied(&mut self, batch: &mut Batch) {
        let Memory::Copied { buffer, pending } = &mut self.memory else { return };
        while !batch.is_full() {
            if *pending == 0 {
                let Some(n) = finish_read(rustix::io::read(self.queue.as_fd(), &mut buffer[..]), &mut self.removed)
                else {
                    break;
                };
                *pending = n;
            }
            let Some((header, frame)) = buffer[..*pending].split_first_chunk::<{ vnet_hdr::HEADER }>() else {
                self.counters.drops.add(DropReason::BadDescriptor, 1);
                *pending = 0;
                continue;
            };
            if !self.offload.receive_frame(frame, VirtioNetHdr::read(header), None, batch, &self.counters) {
                break;
            }
            *pending = 0;
        }
    }

    fn receive_direct(&mut self, batch: &mut Batch) {
        let Memory::Direct { buffers, header_len } = &mut self.memory else { return };
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
        match self.memory {
            Memory::Copied { .. } => self.receive_copied(batch),
            Memory::Direct { .. } => self.receive_direct(batch),
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
        let is_idle = match &self.memory {
            Memory::Copied { pending, .. } => *pending == 0,
            Memory::Direct { .. } => !self.offload.is_cutting(),
        };
        // The descriptor of a removed device is always ready.
        (is_idle && !self.removed).then(|| self.queue.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
