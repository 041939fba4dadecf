// UNSAFETY: sendmmsg(2) takes the packets' bytes as addresses.
#![allow(unsafe_code)]

//! Transmit by sendmmsg(2): one system call for a burst.
//!
//! A transmit ring would be slower and less general. The kernel does not copy the frames of a ring, but lends
//! them to the receiver. On veth each frame is then copied again, into new pages, where the namespaces meet.
//! All slots of a ring have one size, so frames of 9216 bytes and chains would need slots of 16 KiB. sendmmsg
//! gathers chains of any shape and copies once.

use std::any::Any;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use super::socket::Socket;
use crate::drivers::kernel::common::link_probe::LinkProbe;
use crate::drivers::sw_offload;
use crate::port::{TxDriver, bytes_of};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch};

/// Segments of one burst, and the maximum of one packet (`UIO_MAXIOV`).
const SEGMENTS: usize = 1024;
/// Bytes of an Ethernet header. The kernel refuses shorter frames.
const ETHERNET: usize = 14;

/// Transmit queue on one socket.
pub(super) struct Sender {
    socket: Socket,
    link_probe: Arc<LinkProbe>,
    messages: Box<[libc::mmsghdr; BATCH]>,
    segments: Box<[libc::iovec; SEGMENTS]>,
    counters: Arc<QueueCounters>,
}

// SAFETY: the addresses in `messages` and `segments` are used only within `transmit`, which writes them
// before each use.
unsafe impl Send for Sender {}

impl Sender {
    pub(super) fn new(socket: Socket, link_probe: Arc<LinkProbe>) -> Self {
        // SAFETY: zero bytes are valid for `mmsghdr` and `iovec`: no name, no control data, no buffers.
        let (messages, segments) = unsafe { (Box::new(zeroed()), Box::new(zeroed())) };
        Self { socket, link_probe, messages, segments, counters: Arc::default() }
    }

    /// Fills messages for packets from the front of the batch, as many as fit. An error concerns the first
    /// packet, which can never be sent.
    #[inline]
    fn fill_messages(&mut self, batch: &mut Batch) -> Result<usize, DropReason> {
        let mut used = 0;
        let stop = |n: usize, reason| if n == 0 { Err(reason) } else { Ok(n) };
        for (n, (message, packet)) in self.messages.iter_mut().zip(batch.iter_mut()).enumerate() {
            if let Err(reason) = sw_offload::apply(packet) {
                return stop(n, reason);
            }
            if packet.len() < ETHERNET {
                return stop(n, DropReason::TooShort);
            }
            let first = used;
            for segment in packet.segments() {
                let Some(slot) = self.segments.get_mut(used) else { return stop(n, DropReason::TxError) };
                *slot = libc::iovec { iov_base: segment.as_ptr().cast_mut().cast(), iov_len: segment.len() };
                used += 1;
            }
            message.msg_hdr.msg_iov = &raw mut self.segments[first];
            message.msg_hdr.msg_iovlen = used - first;
        }
        Ok(batch.len())
    }

    fn drop_front(&self, batch: &mut Batch, n: usize, reason: DropReason) {
        self.counters.drops.add(reason, n as u64);
        batch.free_front(n);
    }
}

impl TxDriver for Sender {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        let mut sent = 0;
        while !batch.is_empty() {
            let n = match self.fill_messages(batch) {
                Ok(n) => n,
                Err(reason) => {
                    self.drop_front(batch, 1, reason);
                    continue;
                }
            };
            let fd = self.socket.as_fd().as_raw_fd();
            // SAFETY: the first `n` messages point to segments of packets in the batch, which live until
            // after the call.
            let rc = unsafe { libc::sendmmsg(fd, self.messages.as_mut_ptr(), n as u32, libc::MSG_DONTWAIT) };
            if let Ok(taken @ 1..) = usize::try_from(rc) {
                let taken = taken.min(n);
                self.counters.packets.add(taken as u64);
                self.counters.bytes.add(bytes_of(&batch.as_slice()[..taken]));
                batch.free_front(taken);
                sent += taken;
                continue;
            }
            // The error concerns the first packet. After a partial send the kernel returns the count, and the
            // error with the next call.
            let all = batch.len();
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                // A device without carrier returns these errors too.
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) if self.link_probe.is_up() => break,
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) if self.link_probe.exists() => {
                    self.drop_front(batch, all, DropReason::LinkDown);
                }
                Some(libc::ENETDOWN) if self.link_probe.exists() => self.drop_front(batch, all, DropReason::LinkDown),
                Some(libc::ENXIO | libc::ENODEV | libc::ENETDOWN | libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                    self.drop_front(batch, all, DropReason::DeviceLost);
                }
                Some(libc::EMSGSIZE) => self.drop_front(batch, 1, DropReason::TooLong),
                _ => self.drop_front(batch, 1, DropReason::TxError),
            }
        }
        if sent > 0 {
            self.counters.bursts.add(1);
        } else {
            self.counters.empty.add(1);
        }
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
