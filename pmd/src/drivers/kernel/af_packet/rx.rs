//! Receive queues.
//!
//! Short frames come by a ring of slots, without a system call ([`super::slots`]). Longer ones, such as superframes,
//! wait in the socket for recvmmsg(2) ([`super::messages`]). A ring of blocks would need a block of 128 KiB for each
//! superframe. The kernel releases such a block after a timeout of a millisecond, a round trip of many superframes.
//!
//! Rings have a fault in many kernels. A superframe that virtio_net_hdr cannot describe leaves the next slot reserved
//! for ever, and the socket receives nothing any more (`tpacket_rcv` in net/packet/af_packet.c). Such superframes are
//! those of SCTP, and those of UDP before Linux 6.2. Linux 6.1.189 and 6.12.117 are without the fault. So a queue
//! without frames looks whether the socket drops some, and then gives its ring up: all frames come by recvmmsg(2) from
//! then on. The kernel receives nothing for some milliseconds meanwhile, and flows may move to another queue.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::messages::{Messages, Received};
use super::slots::{SlotFrame, SlotRing};
use super::socket::Socket;
use crate::drivers::kernel::common::vnet_hdr::VnetOffload;
use crate::port::{RxDriver, bytes_of};
use wirepath_packet::Batch;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;

/// Polls without a frame between two looks at a ring.
const IDLE_POLLS: u32 = 4096;
/// Least time between two looks of a worker that sleeps.
const IDLE_TIME: Duration = Duration::from_millis(10);
/// A ring is given up after so many looks that found dropped frames and no others, and after so many of these frames. A
/// kernel without the fault drops single frames.
const MAX_LOOKS: u32 = 3;
const MAX_DROPS: u64 = 4;

/// Most frames that the kernel could not describe, and dropped, during one poll without a ring.
const MAX_DROPPED: u32 = 64;

/// Source of frames.
enum Source {
    /// The ring, and the socket for long frames.
    Ring(SlotRing),
    /// The ring is not used any more, but the kernel has refused to remove it.
    RefusedRemoval,
    /// The socket.
    Socket,
}

/// Receive queue of one socket.
pub(super) struct Receiver {
    socket: Arc<Socket>,
    source: Source,
    messages: Messages,
    looks: Looks,
    offload: VnetOffload,
    counters: Arc<QueueCounters>,
}

/// Looks at a ring that has no frames.
struct Looks {
    /// Polls without a frame since the last look.
    polls: u32,
    /// A frame came since the last look.
    is_used: bool,
    last: Instant,
    /// Frames that the socket had dropped then.
    dropped: u64,
    /// Looks since the last frame that found dropped frames, and the number of these frames.
    suspicious: (u32, u64),
}

impl Receiver {
    /// Makes a queue of a socket, which has the ring.
    pub(super) fn new(socket: Arc<Socket>, ring: Option<SlotRing>, offload: VnetOffload) -> Self {
        let looks = Looks { polls: 0, is_used: true, last: Instant::now(), dropped: 0, suspicious: (0, 0) };
        let messages = Messages::new(Arc::clone(&socket), offload.pool());
        let source = ring.map_or(Source::Socket, Source::Ring);
        Self { socket, source, messages, looks, offload, counters: Arc::default() }
    }

    /// Delivers a message with its VLAN tag, or drops and counts it.
    fn deliver_message(&mut self, batch: &mut Batch) {
        match self.messages.take() {
            Some(Ok(it)) => self.offload.receive_packet(it.packet, it.header, it.tag, batch, &self.counters),
            Some(Err(reason)) => self.counters.drops.add(reason, 1),
            None => {}
        }
    }

    /// Receives frames without a ring.
    fn receive_messages(&mut self, batch: &mut Batch) {
        let mut dropped = 0;
        while !batch.is_full() && dropped < MAX_DROPPED {
            let mut is_last = false;
            if self.messages.is_empty() {
                match self.messages.receive(batch.space(), self.offload.pool()) {
                    // A call that did not fill all rooms has emptied the socket.
                    Received::Frames(frames) => is_last = frames < self.messages.rooms(),
                    Received::Dropped => {
                        self.counters.drops.add(DropReason::BadDescriptor, 1);
                        dropped += 1;
                    }
                    Received::Nothing | Received::NoBuffer => return,
                }
            }
            while !self.messages.is_empty() && !batch.is_full() && !self.offload.is_cutting() {
                self.deliver_message(batch);
            }
            if is_last || self.offload.is_cutting() {
                return;
            }
        }
    }

    /// Receives frames in the order of their slots.
    fn receive_slots(&mut self, batch: &mut Batch) {
        let mut is_used = false;
        while !batch.is_full() && !self.offload.is_cutting() && self.deliver_slot(batch) {
            is_used = true;
        }
        if is_used {
            self.looks.is_used = true;
            self.looks.polls = 0;
            return;
        }
        self.looks.polls += 1;
        if self.looks.polls >= IDLE_POLLS {
            self.look();
        }
    }

    /// Delivers the frame of the current slot, or drops and counts it. Returns false if there is none, or if it waits
    /// for buffers.
    #[inline(always)]
    fn deliver_slot(&mut self, batch: &mut Batch) -> bool {
        let Source::Ring(ring) = &mut self.source else { return false };
        let Some(frame) = ring.frame() else { return false };
        match frame {
            SlotFrame::Whole(bytes, header, tag) => {
                let Some(mut packet) = self.offload.pool().take() else {
                    // The frame waits in the ring, and the kernel counts those that it drops.
                    self.messages.give_back();
                    return false;
                };
                // A packet buffer is longer than a slot.
                match packet.append(bytes.len()) {
                    Some(data) => {
                        data.copy_from_slice(bytes);
                        self.offload.receive_packet(packet, header, tag, batch, &self.counters);
                    }
                    None => self.counters.drops.add(DropReason::TooLong, 1),
                }
            }
            SlotFrame::InSocket(len) => return self.deliver_long(len, batch),
            SlotFrame::Lost => self.counters.drops.add(DropReason::RxFull, 1),
            SlotFrame::Malformed => self.counters.drops.add(DropReason::BadDescriptor, 1),
        }
        ring.release();
        true
    }

    /// Delivers the frame of the current slot, which the socket has, with `len` bytes. Returns false if it waits for
    /// buffers.
    #[inline(never)]
    fn deliver_long(&mut self, len: usize, batch: &mut Batch) -> bool {
        let Source::Ring(ring) = &mut self.source else { return false };
        if self.messages.is_empty() {
            let most = ring.in_socket(batch.space());
            if self.messages.receive(most, self.offload.pool()) == Received::NoBuffer {
                return false;
            }
        }
        match self.messages.take() {
            Some(Ok(it)) if it.packet.len() == len => {
                self.offload.receive_packet(it.packet, it.header, it.tag, batch, &self.counters);
            }
            Some(Ok(_)) | None => self.counters.drops.add(DropReason::BadDescriptor, 1),
            Some(Err(reason)) => self.counters.drops.add(reason, 1),
        }
        ring.release();
        true
    }

    /// Looks whether the ring still works, and gives it up otherwise.
    #[cold]
    fn look(&mut self) {
        // Rooms that nobody needs now may be what other queues of the pool wait for.
        self.messages.give_back();
        let dropped = self.socket.statistics().drops;
        let new = dropped - self.looks.dropped;
        let (mut looks, mut drops) = self.looks.suspicious;
        match &self.source {
            Source::Ring(ring) if self.looks.is_used || ring.is_ready() => (looks, drops) = (0, 0),
            Source::Ring(_) if new > 0 => (looks, drops) = (looks + 1, drops + new),
            _ => {}
        }
        if looks >= MAX_LOOKS && drops >= MAX_DROPS || matches!(self.source, Source::RefusedRemoval) {
            // The kernel refuses to remove a ring that is mapped.
            self.source = Source::RefusedRemoval;
            if self.socket.give_up_ring().is_ok() {
                self.source = Source::Socket;
            }
        }
        let suspicious = (looks, drops);
        self.looks = Looks { polls: 0, is_used: false, last: Instant::now(), dropped, suspicious };
    }
}

impl RxDriver for Receiver {
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        self.offload.resume(batch, &self.counters);
        match self.source {
            Source::Ring(_) | Source::RefusedRemoval => self.receive_slots(batch),
            Source::Socket => self.receive_messages(batch),
        }
        let got = &batch.as_slice()[before..];
        self.counters.count_burst(got.len() as u64, bytes_of(got));
    }

    fn waiting(&mut self) -> Option<u32> {
        match &self.source {
            Source::Ring(ring) => Some(ring.filled() as u32),
            _ => None,
        }
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        let is_ready = match &self.source {
            Source::Ring(ring) => ring.is_ready(),
            _ => !self.messages.is_empty(),
        };
        if is_ready || self.offload.is_cutting() {
            return None;
        }
        if !matches!(self.source, Source::Socket) && self.looks.last.elapsed() >= IDLE_TIME {
            self.look();
        }
        if self.socket.take_error() == Some(libc::EINVAL) {
            // The error of a frame that the kernel could not describe, which no call has returned.
            self.counters.drops.add(DropReason::BadDescriptor, 1);
        }
        Some(self.socket.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
