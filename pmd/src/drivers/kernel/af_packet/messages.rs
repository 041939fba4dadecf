// UNSAFETY: recvmmsg(2) takes the addresses of packet buffers, and writes control messages.
#![allow(unsafe_code)]

//! Frames by recvmmsg(2). The kernel copies each once, into packet buffers.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use wirepath_wire::vlan::Tag;

use super::socket::{Socket, vlan_tag};
use crate::drivers::kernel::common::frame_buffers::{BUFFERS, FrameBuffers};
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr};
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Packet, Pool};

/// Most frames of one system call. Each has buffers for a superframe.
const FRAMES: usize = 16;
/// Bytes for control messages: `struct cmsghdr` and `struct tpacket_auxdata`, padded.
const CONTROL: usize = 64;
/// Most errors of the interface that one call skips.
const MAX_ERRORS: u32 = 8;
/// Share of the pool that the rooms of a queue may keep: one of so many parts.
const POOL_PARTS: usize = 8;

/// Room for one frame and what the kernel says about it.
#[repr(C, align(8))]
struct Room {
    control: [u8; CONTROL],
    header: [u8; vnet_hdr::HEADER],
    parts: [libc::iovec; BUFFERS + 1],
    buffers: FrameBuffers,
}

/// Frames of a socket without a ring.
pub(super) struct Messages {
    socket: Arc<Socket>,
    rooms: Box<[Room]>,
    messages: Box<[libc::mmsghdr]>,
    /// Rooms from the first to the second number hold frames that were not taken yet.
    received: (usize, usize),
}

/// A frame with what the kernel says about it.
pub(super) struct Message {
    pub(super) packet: Packet,
    pub(super) header: VirtioNetHdr,
    pub(super) tag: Option<Tag>,
}

/// Result of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// So many frames, of which each can be taken. With fewer than the rooms, there were no more.
    Frames(usize),
    /// The socket has no frames.
    Nothing,
    /// The pool has too few buffers.
    NoBuffer,
    /// The kernel could not describe a frame, and dropped it.
    Dropped,
}

// SAFETY: the addresses in `messages` and `parts` are used only within `receive`, which writes them before each
// use. They point into boxes and packets that this value owns.
unsafe impl Send for Messages {}

impl Messages {
    /// Makes rooms for frames. Those of a small pool are fewer, so that its queues do not keep all buffers.
    pub(super) fn new(socket: Arc<Socket>, pool: &Pool) -> Self {
        let rooms = (pool.capacity() as usize / POOL_PARTS / BUFFERS).clamp(1, FRAMES);
        let room = |_| Room {
            control: [0; CONTROL],
            header: [0; vnet_hdr::HEADER],
            parts: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BUFFERS + 1],
            buffers: FrameBuffers::new(),
        };
        // SAFETY: zero bytes are valid for `mmsghdr`: no name, no control data, no buffers.
        let messages = (0..rooms).map(|_| unsafe { zeroed() }).collect();
        Self { socket, rooms: (0..rooms).map(room).collect(), messages, received: (0, 0) }
    }

    /// Returns the most frames of one call.
    pub(super) fn rooms(&self) -> usize {
        self.rooms.len()
    }

    /// Returns whether all received frames were taken.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.received.0 == self.received.1
    }

    /// Gives the buffers back that no received frame uses.
    #[cold]
    pub(super) fn give_back(&mut self) {
        let (first, end) = self.received;
        for (index, room) in self.rooms.iter_mut().enumerate() {
            if !(first..end).contains(&index) {
                room.buffers.clear();
            }
        }
    }

    /// Receives at most `most` frames. Frames of the former call must have been taken.
    pub(super) fn receive(&mut self, most: usize, pool: &Pool) -> Received {
        let (mut n, mut is_short) = (0, false);
        for (room, message) in self.rooms.iter_mut().zip(self.messages.iter_mut()).take(most) {
            if !room.buffers.fill(pool) {
                // Frames wait in the kernel, which counts those that it drops.
                is_short = true;
                break;
            }
            let header = room.header.as_mut_slice();
            let all = std::iter::once(header).chain(room.buffers.parts());
            for (part, bytes) in room.parts.iter_mut().zip(all) {
                *part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            }
            message.msg_hdr.msg_iov = room.parts.as_mut_ptr();
            message.msg_hdr.msg_iovlen = room.parts.len();
            message.msg_hdr.msg_control = room.control.as_mut_ptr().cast();
            message.msg_hdr.msg_controllen = CONTROL;
            message.msg_hdr.msg_flags = 0;
            n += 1;
        }
        if is_short {
            // Other rooms may keep what is missing.
            self.rooms[n..].iter_mut().for_each(|room| room.buffers.clear());
        }
        self.received = (0, 0);
        if n == 0 {
            return Received::NoBuffer;
        }
        let (fd, no_timeout) = (self.socket.as_fd().as_raw_fd(), std::ptr::null_mut());
        for _ in 0..MAX_ERRORS {
            // SAFETY: the first `n` messages point to buffers of the rooms, which
            // this value owns exclusively and which live until after the call.
            let rc =
                unsafe { libc::recvmmsg(fd, self.messages.as_mut_ptr(), n as u32, libc::MSG_DONTWAIT, no_timeout) };
            if let Ok(received) = usize::try_from(rc) {
                self.received.1 = received.min(n);
                return Received::Frames(self.received.1);
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN) => return Received::Nothing,
                // `packet_rcv_vnet` in net/packet/af_packet.c.
                Some(libc::EINVAL) => return Received::Dropped,
                // An interface that is down or lost, which the port notices. The socket reports it once, before its
                // frames.
                _ => {}
            }
        }
        Received::Nothing
    }

    /// Takes the next frame, or the reason why it is dropped. `None` if all frames were taken.
    pub(super) fn take(&mut self) -> Option<Result<Message, DropReason>> {
        if self.is_empty() {
            return None;
        }
        let index = self.received.0;
        self.received.0 += 1;
        let (room, message) = (&mut self.rooms[index], &self.messages[index]);
        let truncated = message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        let len = (message.msg_len as usize).checked_sub(vnet_hdr::HEADER);
        let packet = len.filter(|_| !truncated).and_then(|len| room.buffers.take(len));
        let reason = if truncated { DropReason::TooLong } else { DropReason::BadDescriptor };
        let header = VirtioNetHdr::read(&room.header);
        let tag = tag_of(&room.control[..message.msg_hdr.msg_controllen.min(CONTROL)]);
        Some(packet.map(|packet| Message { packet, header, tag }).ok_or(reason))
    }
}

/// Returns the VLAN tag in the control message `PACKET_AUXDATA`, if there is one.
pub(super) fn tag_of(control: &[u8]) -> Option<Tag> {
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
    vlan_tag(word(MESSAGE)?, half(MESSAGE + 16)?, half(MESSAGE + 18)?)
}

#[cfg(test)]
mod tests {
    use wirepath_wire::EtherType;

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
