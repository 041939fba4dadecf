// UNSAFETY: recvmmsg(2) takes the addresses of packet buffers, and writes control messages.
#![allow(unsafe_code)]

//! Receive by recvmmsg(2), for ports that receive superframes whole.
//!
//! The kernel copies each frame once, into packet buffers. With a ring it would copy a superframe of 64 KiB into
//! a block of 128 KiB, where no second one fits. Such a block is released after a timeout of a millisecond,
//! which is a round trip of many superframes.

use std::any::Any;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use wirepath_wire::EtherType;
use wirepath_wire::vlan::Tag;

use super::socket::Socket;
use crate::drivers::kernel::common::frame_buffers::{BUFFERS, FrameBuffers};
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr, VnetOffload};
use crate::port::{RxDriver, bytes_of};
use wirepath_packet::Batch;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;

/// Frames of one system call. Each has buffers for a superframe.
const FRAMES: usize = 16;
/// Bytes for control messages: `struct cmsghdr` and `struct tpacket_auxdata`, padded.
const CONTROL: usize = 64;

/// Room for one frame and what the kernel says about it.
#[repr(C, align(8))]
struct Slot {
    control: [u8; CONTROL],
    header: [u8; vnet_hdr::HEADER],
    parts: [libc::iovec; BUFFERS + 1],
    buffers: FrameBuffers,
}

/// Receive queue of one socket without a ring.
pub(super) struct WholeReceiver {
    socket: Arc<Socket>,
    slots: Box<[Slot; FRAMES]>,
    messages: Box<[libc::mmsghdr; FRAMES]>,
    /// Slots from the first to the second number hold frames that were not delivered yet.
    received: (usize, usize),
    offload: VnetOffload,
    counters: Arc<QueueCounters>,
}

// SAFETY: the addresses in `messages` and `parts` are used only within `receive`, which writes them before each
// use. They point into boxes and packets that this value owns.
unsafe impl Send for WholeReceiver {}

impl WholeReceiver {
    pub(super) fn new(socket: Arc<Socket>, offload: VnetOffload) -> Self {
        let slot = |_| Slot {
            control: [0; CONTROL],
            header: [0; vnet_hdr::HEADER],
            parts: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BUFFERS + 1],
            buffers: FrameBuffers::new(),
        };
        // SAFETY: zero bytes are valid for `mmsghdr`: no name, no control data, no buffers.
        let messages = unsafe { Box::new(zeroed()) };
        let slots = Box::new(std::array::from_fn(slot));
        Self { socket, slots, messages, received: (0, 0), offload, counters: Arc::default() }
    }

    /// Receives frames into the slots, at most `most`.
    fn fill_slots(&mut self, most: usize) {
        let mut n = 0;
        for (slot, message) in self.slots.iter_mut().zip(self.messages.iter_mut()).take(most) {
            if !slot.buffers.fill(self.offload.pool()) {
                // Frames wait in the kernel, which counts those that it drops.
                break;
            }
            let header = slot.header.as_mut_slice();
            let all = std::iter::once(header).chain(slot.buffers.parts());
            for (part, bytes) in slot.parts.iter_mut().zip(all) {
                *part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            }
            message.msg_hdr.msg_iov = slot.parts.as_mut_ptr();
            message.msg_hdr.msg_iovlen = slot.parts.len();
            message.msg_hdr.msg_control = slot.control.as_mut_ptr().cast();
            message.msg_hdr.msg_controllen = CONTROL;
            message.msg_hdr.msg_flags = 0;
            n += 1;
        }
        self.received = (0, 0);
        if n == 0 {
            return;
        }
        let (fd, no_timeout) = (self.socket.as_fd().as_raw_fd(), std::ptr::null_mut());
        // SAFETY: the first `n` messages point to buffers of the slots, which
        // this value owns exclusively and which live until after the call.
        let rc = unsafe { libc::recvmmsg(fd, self.messages.as_mut_ptr(), n as u32, libc::MSG_DONTWAIT, no_timeout) };
        // Errors are those of an empty queue, an interface that is down, or a lost one, which the port notices.
        self.received.1 = usize::try_from(rc).unwrap_or(0).min(n);
    }

    /// Delivers the frame of a slot, or drops and counts it.
    fn deliver(&mut self, index: usize, batch: &mut Batch) {
        let (slot, message) = (&mut self.slots[index], &self.messages[index]);
        let truncated = message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        let len = (message.msg_len as usize).checked_sub(vnet_hdr::HEADER);
        let packet = len.filter(|_| !truncated).and_then(|len| slot.buffers.take(len));
        let Some(packet) = packet else {
            let reason = if truncated { DropReason::TooLong } else { DropReason::BadDescriptor };
            return self.counters.drops.add(reason, 1);
        };
        let tag = tag_of(&slot.control[..message.msg_hdr.msg_controllen.min(CONTROL)]);
        let header = VirtioNetHdr::read(&slot.header);
        self.offload.receive_packet(packet, header, tag, batch, &self.counters);
    }
}

/// Returns the VLAN tag in the control message `PACKET_AUXDATA`, if there is one.
fn tag_of(control: &[u8]) -> Option<Tag> {
    /// Bytes of `struct cmsghdr`.
    const MESSAGE: usize = size_of::<libc::cmsghdr>();
    let word = |at: usize| Some(u32::from_ne_bytes(*control.get(at..)?.first_chunk()?));
    let half = |at: usize| Some(u16::from_ne_bytes(*control.get(at..)?.first_chunk()?));
    // The only option that produces control messages is PACKET_AUXDATA, so that there is one.
    let (level, kind) = (word(size_of::<usize>())?, word(size_of::<usize>() + 4)?);
    if level != libc::SOL_PACKET as u32 || kind != libc::PACKET_AUXDATA as u32 {
        return None;
    }
    // `struct tpacket_auxdata`: status, length, snapped length, two offsets, TCI, TPID.
    let status = word(MESSAGE)?;
    let (tci, tpid) = (half(MESSAGE + 16)?, half(MESSAGE + 18)?);
    let named = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    let tpid = if named { EtherType(tpid) } else { EtherType::VLAN };
    (status & libc::TP_STATUS_VLAN_VALID != 0).then_some(Tag { tpid, tci })
}

impl RxDriver for WholeReceiver {
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        self.offload.resume(batch, &self.counters);
        while !batch.is_full() {
            if self.received.0 == self.received.1 {
                let most = FRAMES.min(batch.space());
                self.fill_slots(most);
                if self.received.1 == 0 {
                    break;
                }
            }
            let full = self.received.1 - self.received.0 < FRAMES;
            while self.received.0 < self.received.1 && !batch.is_full() && !self.offload.is_cutting() {
                self.deliver(self.received.0, batch);
                self.received.0 += 1;
            }
            // A call that did not fill all slots has emptied the socket.
            if full && self.received.0 == self.received.1 {
                break;
            }
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
        if self.received.0 < self.received.1 || self.offload.is_cutting() {
            return None;
        }
        self.socket.clear_error();
        Some(self.socket.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(status: u32, tci: u16, tpid: u16) -> Vec<u8> {
        let mut bytes = 36usize.to_ne_bytes().to_vec();
        bytes.extend((libc::SOL_PACKET as u32).to_ne_bytes());
        bytes.extend((libc::PACKET_AUXDATA as u32).to_ne_bytes());
        bytes.extend(status.to_ne_bytes());
        bytes.extend([0; 12]);
        bytes.extend(tci.to_ne_bytes());
        bytes.extend(tpid.to_ne_bytes());
        bytes
    }

    #[test]
    fn tags_are_read_from_control_messages() {
        let both = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
        assert_eq!(tag_of(&control(both, 0x2064, 0x88a8)), Some(Tag { tpid: EtherType::QINQ, tci: 0x2064 }));
        let one = tag_of(&control(libc::TP_STATUS_VLAN_VALID, 5, 0));
        assert_eq!(one, Some(Tag { tpid: EtherType::VLAN, tci: 5 }));
        assert_eq!(tag_of(&control(0, 5, 0x8100)), None);
        let whole = control(both, 5, 0x8100);
        for len in 0..whole.len() {
            assert_eq!(tag_of(&whole[..len]), None, "{len} bytes");
        }
        let mut other = whole.clone();
        other[8] ^= 1;
        assert_eq!(tag_of(&other), None);
    }
}
