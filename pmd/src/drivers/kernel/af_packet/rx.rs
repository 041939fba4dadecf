// UNSAFETY: recvmmsg(2) takes the addresses of packet buffers.
#![allow(unsafe_code)]

//! Receive: short frames by a ring, longer ones by recvmmsg(2).
//!
//! Frames that a slot of the ring holds cost no system call. The kernel copies longer ones directly into packet
//! buffers. A `TPACKET_V3` ring would need a block for each superframe. The kernel releases a block after a timeout of
//! a millisecond, a round trip of many superframes.

use std::any::Any;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;
use wirepath_wire::vlan::Tag;

use super::ring::{Ring, SlotFrame};
use super::socket::Socket;
use crate::drivers::kernel::common::frame_buffers::{BUFFERS, FrameBuffers};
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr, VnetOffload};
use crate::port::{RxDriver, bytes_of};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool};

/// Frames of one system call. Each has buffers for a superframe.
const FRAMES: usize = 16;

/// Room for one frame and its virtio header.
struct Room {
    header: [u8; vnet_hdr::HEADER],
    parts: [libc::iovec; BUFFERS + 1],
    buffers: FrameBuffers,
}

/// Frames that were too long for the ring.
struct LongFrames {
    rooms: Box<[Room; FRAMES]>,
    messages: Box<[libc::mmsghdr; FRAMES]>,
    /// Rooms from the first to the second number hold frames that were not delivered yet.
    received: (usize, usize),
}

// SAFETY: the addresses in `messages` and `parts` are used only within `receive`, which writes them before each
// use. They point into boxes and packets that this value owns.
unsafe impl Send for LongFrames {}

impl LongFrames {
    fn new() -> Self {
        let room = |_| Room {
            header: [0; vnet_hdr::HEADER],
            parts: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BUFFERS + 1],
            buffers: FrameBuffers::new(),
        };
        // SAFETY: zero bytes are valid for `mmsghdr`: no name, no control data, no buffers.
        let messages = unsafe { Box::new(zeroed()) };
        Self { rooms: Box::new(std::array::from_fn(room)), messages, received: (0, 0) }
    }

    fn is_empty(&self) -> bool {
        self.received.0 == self.received.1
    }

    /// Receives at most `most` frames, fewer if the pool has not enough buffers. Returns false if the socket has none.
    fn receive(&mut self, socket: &Socket, most: usize, pool: &Pool) -> bool {
        let mut n = 0;
        for (room, message) in self.rooms.iter_mut().zip(self.messages.iter_mut()).take(most) {
            if !room.buffers.fill(pool) {
                // Frames wait in the kernel, which counts those that it drops.
                break;
            }
            let header = room.header.as_mut_slice();
            let all = std::iter::once(header).chain(room.buffers.parts());
            for (part, bytes) in room.parts.iter_mut().zip(all) {
                *part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            }
            message.msg_hdr.msg_iov = room.parts.as_mut_ptr();
            message.msg_hdr.msg_iovlen = room.parts.len();
            message.msg_hdr.msg_flags = 0;
            n += 1;
        }
        self.received = (0, 0);
        if n == 0 {
            return true;
        }
        let (fd, no_timeout) = (socket.as_fd().as_raw_fd(), std::ptr::null_mut());
        // SAFETY: the first `n` messages point to buffers of the rooms, which
        // this value owns exclusively and which live until after the call.
        let rc = unsafe { libc::recvmmsg(fd, self.messages.as_mut_ptr(), n as u32, libc::MSG_DONTWAIT, no_timeout) };
        self.received.1 = usize::try_from(rc).unwrap_or(0).min(n);
        // Other errors are those of an interface that went down or was lost. The socket reports each once, before
        // its frames.
        rc > 0 || Errno::from_io_error(&std::io::Error::last_os_error()) != Some(Errno::AGAIN)
    }

    /// Takes the next received frame.
    fn next(&mut self) -> Option<Result<(Packet, VirtioNetHdr), DropReason>> {
        if self.is_empty() {
            return None;
        }
        let (room, message) = (&mut self.rooms[self.received.0], &self.messages[self.received.0]);
        self.received.0 += 1;
        if message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
            return Some(Err(DropReason::TooLong));
        }
        let len = (message.msg_len as usize).checked_sub(vnet_hdr::HEADER);
        let packet = len.and_then(|len| room.buffers.take(len)).ok_or(DropReason::BadDescriptor);
        Some(packet.map(|packet| (packet, VirtioNetHdr::read(&room.header))))
    }
}

/// Receive queue of one socket.
pub(super) struct Receiver {
    socket: Arc<Socket>,
    ring: Ring,
    long: LongFrames,
    offload: VnetOffload,
    counters: Arc<QueueCounters>,
}

impl Receiver {
    pub(super) fn new(socket: Arc<Socket>, ring: Ring, offload: VnetOffload) -> Self {
        Self { socket, ring, long: LongFrames::new(), offload, counters: Arc::default() }
    }

    /// Delivers the frame of the current slot, or drops and counts it. Returns false if there is none, or if it waits
    /// for buffers.
    #[inline(always)]
    fn deliver(&mut self, batch: &mut Batch) -> bool {
        let Some((frame, tag)) = self.ring.frame() else { return false };
        match frame {
            SlotFrame::Whole(bytes, header) => {
                let Some(mut packet) = self.offload.pool().take() else { return false };
                // A packet buffer is longer than a slot.
                match packet.append(bytes.len()) {
                    Some(data) => {
                        data.copy_from_slice(bytes);
                        self.offload.receive_packet(packet, header, tag, batch, &self.counters);
                    }
                    None => self.counters.drops.add(DropReason::TooLong, 1),
                }
            }
            SlotFrame::InSocket => return self.deliver_long(tag, batch),
            SlotFrame::Lost => self.counters.drops.add(DropReason::RxFull, 1),
            SlotFrame::Malformed => self.counters.drops.add(DropReason::BadDescriptor, 1),
        }
        self.ring.release();
        true
    }

    /// Delivers the frame of the current slot, which the socket has.
    #[inline(never)]
    fn deliver_long(&mut self, tag: Option<Tag>, batch: &mut Batch) -> bool {
        if self.long.is_empty() {
            let most = self.ring.in_socket(FRAMES.min(batch.space()));
            if !self.long.receive(&self.socket, most, self.offload.pool()) {
                self.counters.drops.add(DropReason::BadDescriptor, 1);
                self.ring.release();
                return true;
            }
        }
        match self.long.next() {
            None => return false,
            Some(Ok((packet, header))) => self.offload.receive_packet(packet, header, tag, batch, &self.counters),
            Some(Err(reason)) => self.counters.drops.add(reason, 1),
        }
        self.ring.release();
        true
    }
}

impl RxDriver for Receiver {
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        self.offload.resume(batch, &self.counters);
        while !batch.is_full() && !self.offload.is_cutting() && self.deliver(batch) {}
        let got = &batch.as_slice()[before..];
        self.counters.count_burst(got.len() as u64, bytes_of(got));
    }

    fn waiting(&mut self) -> Option<u32> {
        Some(self.ring.filled() as u32)
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        if self.ring.is_ready() || self.offload.is_cutting() {
            return None;
        }
        self.socket.clear_error();
        Some(self.socket.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
