// UNSAFETY: sendmmsg(2) takes the packets' bytes as addresses.
#![allow(unsafe_code)]

//! Sending by sendmmsg(2): one system call for a burst.
//!
//! Not a transmit ring. A ring's frames are not copied by the kernel but lent to whoever gets them, so that a ring on veth has each
//! frame copied into fresh pages where the namespaces meet, after it was copied into the ring; and its slots are of one size, so that
//! 9216-byte frames and chains would need a slot of 16 KiB each. sendmmsg gathers a chain of any shape and copies once.

use std::any::Any;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use super::socket::Socket;
use crate::counters::QueueCounters;
use crate::drivers::kernel::control::Control;
use crate::drivers::requests;
use crate::drops::DropReason;
use crate::packet::{BATCH, Batch};
use crate::port::{TransmitQueue, bytes_of};

/// Segments of one burst, and at most of one packet (`UIO_MAXIOV`).
const SEGMENTS: usize = 1024;
/// Bytes of an Ethernet header: shorter frames are refused by the kernel.
const ETHERNET: usize = 14;

/// Sends on one socket.
pub(super) struct Sender {
    socket: Socket,
    control: Arc<Control>,
    messages: Box<[libc::mmsghdr; BATCH]>,
    segments: Box<[libc::iovec; SEGMENTS]>,
    counters: Arc<QueueCounters>,
}

// SAFETY: the addresses in `messages` and `segments` are used only within `transmit`, which writes them first.
unsafe impl Send for Sender {}

impl Sender {
    pub(super) fn new(socket: Socket, control: Arc<Control>) -> Self {
        // SAFETY: all zero is valid for both: no name, no control data, no bytes.
        let (messages, segments) = unsafe { (Box::new(zeroed()), Box::new(zeroed())) };
        Self { socket, control, messages, segments, counters: Arc::default() }
    }

    /// Describes packets from the front of the batch, as many as there is room for. An error is about the first packet, which can
    /// never be sent.
    #[inline]
    fn describe(&mut self, batch: &mut Batch) -> Result<usize, DropReason> {
        let mut used = 0;
        let stop = |n: usize, reason| if n == 0 { Err(reason) } else { Ok(n) };
        for (n, (message, packet)) in self.messages.iter_mut().zip(batch.iter_mut()).enumerate() {
            if let Err(reason) = requests::fulfil(packet) {
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

impl TransmitQueue for Sender {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        let mut sent = 0;
        while !batch.is_empty() {
            let n = match self.describe(batch) {
                Ok(n) => n,
                Err(reason) => {
                    self.drop_front(batch, 1, reason);
                    continue;
                }
            };
            let fd = self.socket.as_fd().as_raw_fd();
            // SAFETY: the first `n` messages describe segments of packets in the batch, which stay until after the call.
            let rc = unsafe { libc::sendmmsg(fd, self.messages.as_mut_ptr(), n as u32, libc::MSG_DONTWAIT) };
            if let Ok(taken @ 1..) = usize::try_from(rc) {
                let taken = taken.min(n);
                self.counters.packets.add(taken as u64);
                self.counters.bytes.add(bytes_of(&batch.as_slice()[..taken]));
                batch.free_front(taken);
                sent += taken;
                continue;
            }
            // The error is about the first packet: after some were sent the kernel says how many, and the error with the next call.
            let all = batch.len();
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                // Also what a device without carrier says.
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) if self.control.is_up() => break,
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) if self.control.exists() => {
                    self.drop_front(batch, all, DropReason::LinkDown);
                }
                Some(libc::ENETDOWN) if self.control.exists() => self.drop_front(batch, all, DropReason::LinkDown),
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

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
