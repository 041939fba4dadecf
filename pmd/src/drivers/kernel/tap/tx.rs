use std::any::Any;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::{Errno, writev};

use super::device::TapQueue;
use crate::drivers::kernel::common::vnet_hdr;
use crate::drivers::sw_offload;
use crate::port::{TxDriver, bytes_of};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet};

/// Segments in the usual case. A frame of 9216 bytes has five, or six with a separate header.
const SEGMENTS: usize = 16;

/// Sends by writev(2), one frame per call: the kernel has no other interface for a TAP device.
pub(super) struct Sender {
    queue: Arc<TapQueue>,
    /// Length of the longest frame in bytes. The interface itself accepts any length.
    max_frame: usize,
    counters: Arc<QueueCounters>,
}

impl Sender {
    pub(super) fn new(queue: Arc<TapQueue>, max_frame: usize) -> Self {
        Self { queue, max_frame, counters: Arc::default() }
    }

    #[inline]
    fn send(&self, packet: &Packet) -> Result<(), Errno> {
        self.gather::<{ SEGMENTS + 1 }>(packet).unwrap_or_else(|| self.send_long_chain(packet))
    }

    /// Sends a chain of many small segments.
    #[cold]
    #[inline(never)]
    fn send_long_chain(&self, packet: &Packet) -> Result<(), Errno> {
        /// `UIO_MAXIOV`.
        const MOST: usize = 1024;
        self.gather::<MOST>(packet).unwrap_or(Err(Errno::MSGSIZE))
    }

    /// Writes the packet from at most `N` parts, including the virtio header. `None` if it has more.
    #[inline(always)]
    fn gather<const N: usize>(&self, packet: &Packet) -> Option<Result<(), Errno>> {
        /// `virtio_net_hdr` of a complete frame.
        const COMPLETE: [u8; vnet_hdr::HEADER] = [0; vnet_hdr::HEADER];
        let mut parts = [IoSlice::new(&[]); N];
        parts[0] = IoSlice::new(&COMPLETE);
        let mut used = 1;
        for segment in packet.segments() {
            *parts.get_mut(used)? = IoSlice::new(segment);
            used += 1;
        }
        Some(writev(self.queue.as_fd(), &parts[..used]).map(drop))
    }

    fn drop_front(&self, batch: &mut Batch, n: usize, reason: DropReason) {
        self.counters.drops.add(reason, n as u64);
        batch.free_front(n);
    }

    /// Counts and frees the first `n` packets.
    fn sent(&self, batch: &mut Batch, n: usize) {
        self.counters.packets.add(n as u64);
        self.counters.bytes.add(bytes_of(&batch.as_slice()[..n]));
        batch.free_front(n);
    }
}

impl TxDriver for Sender {
    fn transmit(&mut self, batch: &mut Batch) {
        let (mut any, mut sent) = (false, 0);
        while let Some(packet) = batch.as_mut_slice().get_mut(sent) {
            let result = match sw_offload::apply(packet) {
                Ok(()) if packet.len() > self.max_frame => Err(Errno::MSGSIZE),
                Ok(()) => self.send(packet),
                Err(reason) => {
                    any |= sent > 0;
                    self.sent(batch, sent);
                    sent = 0;
                    self.drop_front(batch, 1, reason);
                    continue;
                }
            };
            let error = match result {
                Ok(()) => {
                    sent += 1;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(error) => error,
            };
            any |= sent > 0;
            self.sent(batch, sent);
            sent = 0;
            let all = batch.len();
            match error {
                Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM => break,
                Errno::MSGSIZE => self.drop_front(batch, 1, DropReason::TooLong),
                // The frame is shorter than an Ethernet header.
                Errno::INVAL => self.drop_front(batch, 1, DropReason::TooShort),
                Errno::IO => self.drop_front(batch, all, DropReason::LinkDown),
                Errno::BADFD => self.drop_front(batch, all, DropReason::DeviceLost),
                _ => self.drop_front(batch, 1, DropReason::TxError),
            }
        }
        any |= sent > 0;
        self.sent(batch, sent);
        if any { self.counters.bursts.add(1) } else { self.counters.empty.add(1) }
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
