//! A receive queue against a kernel that writes anything into slots and messages, for the fuzzer and for a test with
//! random bytes.
//!
//! The ring lies in memory of this process, and the socket is one of a pair. A plain reading of each slot says what the
//! queue must make of it: these bytes of the slot, a message of the socket, or a drop with its reason. Checksums and
//! superframes are the work of `kernel::vnet_hdr`: of them, only that no frame disappears is checked.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::messages::tag_of;
use super::rx::Receiver;
use super::slots::{SLOT, SLOT_HEADER, SlotRing};
use super::socket::Socket;
use crate::drivers::kernel::common::frame_buffers::BUFFERS;
use crate::drivers::kernel::common::vnet_hdr::{self, VnetOffload};
use crate::port::RxDriver;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, DATA_ROOM, HEADROOM, Pool, PortId};

const SLOTS: usize = 8;
const PORT: PortId = PortId::new(3);
/// Steps of a sequence.
const STEPS: usize = 64;
/// Offset of a frame in its slot, as the kernel chooses it.
const START: usize = 82;
/// Shortest frame.
const ETHERNET: usize = 14;
/// Longest frame of a message, in bytes.
const ROOM: usize = BUFFERS * (HEADROOM + DATA_ROOM) - HEADROOM;

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn half(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn copy_to(&mut self, to: &mut [u8]) {
        let bytes = self.bytes(to.len());
        to[..bytes.len()].copy_from_slice(bytes);
    }
}

/// Fate of a slot.
#[derive(Debug)]
enum Expected {
    /// One packet of these bytes.
    Frame(Vec<u8>),
    /// A drop.
    Dropped(DropReason),
    /// One packet or drop at least: the kernel left a checksum open, or it is a superframe.
    Some,
}

/// The kernel's side, and what the queue must make of it.
struct Kernel {
    memory: File,
    socket: UnixDatagram,
    /// Messages that the queue has not taken.
    messages: VecDeque<Vec<u8>>,
    /// Slots that the queue has not taken. The socket has the frames of those with a length.
    filled: VecDeque<Result<usize, Expected>>,
    /// Number of the next slot.
    next: usize,
}

/// Returns what becomes of a frame with its virtio header and its tag, if it has as many bytes as announced.
fn expect_frame(header: &[u8], frame: &[u8], tag: Option<[u8; 4]>) -> Expected {
    const NEEDS_CSUM: u8 = 1;
    if frame.len() < ETHERNET {
        return Expected::Dropped(DropReason::TooShort);
    }
    if header[0] & NEEDS_CSUM != 0 || header[1] != 0 {
        return Expected::Some;
    }
    let (addresses, rest) = frame.split_at(12);
    Expected::Frame([addresses, tag.as_ref().map_or(&[], |tag| &tag[..]), rest].concat())
}

/// Returns what becomes of a slot, or the length of its frame in the socket.
fn expect_slot(slot: &[u8; SLOT]) -> Result<usize, Expected> {
    let word = |at: usize| u32::from_ne_bytes(slot[at..at + 4].try_into().expect("four bytes"));
    let half = |at: usize| u16::from_ne_bytes(slot[at..at + 2].try_into().expect("two bytes"));
    let (status, len, kept, start) = (word(0), word(4) as usize, word(8) as usize, usize::from(half(12)));
    if status & libc::TP_STATUS_COPY != 0 {
        return Ok(len);
    }
    if kept != len {
        return Err(Expected::Dropped(DropReason::RxFull));
    }
    if start < SLOT_HEADER + vnet_hdr::HEADER || start + len > SLOT {
        return Err(Expected::Dropped(DropReason::BadDescriptor));
    }
    let tpid = if status & libc::TP_STATUS_VLAN_TPID_VALID != 0 { half(26) } else { 0x8100 };
    let ([p0, p1], [c0, c1]) = (tpid.to_be_bytes(), half(24).to_be_bytes());
    let tag = (status & libc::TP_STATUS_VLAN_VALID != 0).then_some([p0, p1, c0, c1]);
    Err(expect_frame(&slot[start - vnet_hdr::HEADER..start], &slot[start..start + len], tag))
}

impl Kernel {
    /// Writes the next slot. It is the queue's from now on if its status says so.
    fn write(&mut self, slot: &[u8; SLOT]) {
        let [s0, s1, s2, s3, ..] = *slot;
        self.memory.write_all_at(slot, (self.next * SLOT) as u64).expect("memory");
        if u32::from_ne_bytes([s0, s1, s2, s3]) & libc::TP_STATUS_USER != 0 {
            self.filled.push_back(expect_slot(slot));
            self.next = (self.next + 1) % SLOTS;
        }
    }

    fn send(&mut self, message: Vec<u8>) {
        // A full socket takes no further message.
        if self.socket.send(&message).is_ok() {
            self.messages.push_back(message);
        }
    }

    /// Returns what becomes of the next slot.
    fn expect(&mut self) -> Option<Expected> {
        let len = match self.filled.pop_front()? {
            Ok(len) => len,
            Err(expected) => return Some(expected),
        };
        let message = self.messages.pop_front();
        Some(match message.as_deref().and_then(|message| message.split_at_checked(vnet_hdr::HEADER)) {
            Some((_, frame)) if frame.len() > ROOM => Expected::Dropped(DropReason::TooLong),
            Some((header, frame)) if frame.len() == len => expect_frame(header, frame, None),
            _ => Expected::Dropped(DropReason::BadDescriptor),
        })
    }

    /// Carries a step out.
    fn step(&mut self, kind: u8, input: &mut Input<'_>) {
        let mut slot = [0; SLOT];
        let number = self.next as u8;
        slot[SLOT_HEADER..].iter_mut().zip(0u8..=255).for_each(|(byte, at)| *byte = at ^ number);
        let put = |slot: &mut [u8; SLOT], status: u32, len: usize, kept: usize| {
            slot[..4].copy_from_slice(&(libc::TP_STATUS_USER | status).to_ne_bytes());
            slot[4..8].copy_from_slice(&(len as u32).to_ne_bytes());
            slot[8..12].copy_from_slice(&(kept as u32).to_ne_bytes());
            slot[12..14].copy_from_slice(&(START as u16).to_ne_bytes());
        };
        // With a header of the input, the frame begins with further bytes of it.
        let is_plain = kind & 0x40 == 0;
        let mut header = [0; vnet_hdr::HEADER];
        match kind % 8 {
            // A frame as the kernel writes it, with or without a tag.
            0 | 1 => {
                let bits = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
                let len = usize::from(input.byte()) * 8;
                put(&mut slot, if kind & 1 == 0 { 0 } else { bits }, len, len);
                slot[24..28].copy_from_slice(&[1, 2, 0x88, 0xa8]);
                if !is_plain {
                    input.copy_to(&mut header);
                    let n = usize::from(input.byte());
                    input.copy_to(&mut slot[START..START + n]);
                }
                slot[START - vnet_hdr::HEADER..START].copy_from_slice(&header);
                self.write(&slot);
            }
            // A long frame in the socket.
            2 | 3 => {
                let len = usize::from(input.half()) + if kind & 1 == 0 { 0 } else { 10_000 };
                let mut frame: Vec<u8> = (0..len).map(|at| at as u8 ^ number).collect();
                if !is_plain {
                    input.copy_to(&mut header);
                    let n = usize::from(input.byte()).min(len);
                    input.copy_to(&mut frame[..n]);
                }
                self.send([&header[..], &frame].concat());
                put(&mut slot, libc::TP_STATUS_COPY, len, SLOT - START);
                self.write(&slot);
            }
            // Any header of a slot.
            4 => {
                input.copy_to(&mut slot[..SLOT_HEADER]);
                self.write(&slot);
            }
            // Any message, without a slot.
            5 => {
                let n = usize::from(input.byte());
                self.send(input.bytes(n).to_vec());
            }
            // A slot of any lengths, without a message.
            6 => {
                let (len, kept) = (usize::from(input.half()), usize::from(input.half()));
                let copied = if is_plain { libc::TP_STATUS_COPY } else { 0 };
                put(&mut slot, copied, len, kept);
                self.write(&slot);
            }
            _ => {
                let n = usize::from(input.byte());
                check_control(input.bytes(n));
            }
        }
    }
}

/// Compares the tag in a control message with a plain reading.
fn check_control(control: &[u8]) {
    let word = |at: usize| control.get(at..at + 4).map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes")));
    // `struct cmsghdr` of 16 bytes, and 20 bytes of `struct tpacket_auxdata`.
    let is_there = control.len() >= 36
        && word(8) == Some(libc::SOL_PACKET as u32)
        && word(12) == Some(libc::PACKET_AUXDATA as u32)
        && word(16).is_some_and(|status| status & libc::TP_STATUS_VLAN_VALID != 0);
    assert_eq!(tag_of(control).is_some(), is_there, "{control:?}");
}

/// The queue and what it has delivered.
struct Queue {
    receiver: Receiver,
    packets: u64,
}

impl Queue {
    /// Polls until all slots are taken, and compares what became of them with the expectation.
    fn poll(&mut self, kernel: &mut Kernel) {
        let filled = kernel.filled.len() as u32;
        assert_eq!(self.receiver.waiting(), Some(filled));
        let before = self.drops();
        let mut frames = Vec::new();
        loop {
            let mut batch = Batch::new();
            self.receiver.receive(&mut batch);
            for packet in batch.iter() {
                assert_eq!(packet.in_port(), Some(PORT));
                let bytes: Vec<u8> = packet.segments().flatten().copied().collect();
                assert_eq!(bytes.len(), packet.len());
                frames.push(bytes);
            }
            if batch.is_empty() {
                break;
            }
        }
        assert_eq!(self.receiver.waiting(), Some(0), "{filled} slots were filled");
        self.packets += frames.len() as u64;
        assert_eq!(self.receiver.counters().packets.get(), self.packets);

        // Frames arrive in the order of their slots. Between them lie those that the kernel left to the driver.
        let mut frames_left = frames.iter();
        let (mut delivered, mut dropped, mut open) = (0, Vec::<(DropReason, u64)>::new(), 0);
        while let Some(expected) = kernel.expect() {
            match expected {
                Expected::Frame(bytes) => {
                    assert!(frames_left.any(|frame| *frame == bytes), "{} bytes are missing", bytes.len());
                    delivered += 1;
                }
                Expected::Dropped(reason) => match dropped.iter_mut().find(|(it, _)| *it == reason) {
                    Some((_, n)) => *n += 1,
                    None => dropped.push((reason, 1)),
                },
                Expected::Some => open += 1,
            }
        }
        let now = self.drops();
        let new = |reason: DropReason| count(&now, reason) - count(&before, reason);
        assert!(dropped.iter().all(|(reason, n)| new(*reason) >= *n), "{dropped:?} {before:?} {now:?}");
        let all: u64 = now.iter().map(|(reason, _)| new(*reason)).sum();
        let further = frames.len() as u64 - delivered + all - dropped.iter().map(|(_, n)| n).sum::<u64>();
        assert!(further >= open && (open > 0 || further == 0), "{further} of {open}: {before:?} {now:?}");
    }

    fn drops(&self) -> Vec<(DropReason, u64)> {
        self.receiver.counters().snapshot().drops
    }
}

fn count(drops: &[(DropReason, u64)], reason: DropReason) -> u64 {
    drops.iter().find(|(it, _)| *it == reason).map_or(0, |(_, n)| *n)
}

/// Runs a queue that keeps superframes, and one that cuts them, against a kernel that does what the bytes say. Each
/// step has a byte for its kind and more by its kind.
///
/// # Panics
/// A frame is not that of its slot, a drop is not counted, or a buffer was lost.
pub fn run(data: &[u8]) {
    run_queue(data, true);
    run_queue(data, false);
}

fn run_queue(data: &[u8], keep_superframes: bool) {
    let pool = Pool::new("slots", 1024).expect("a pool");
    let memory = memfd_create("slots", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&memory, (SLOTS * SLOT) as u64).expect("memory");
    let ring = SlotRing::of_memory(memory.as_fd(), SLOTS).expect("memory");
    let (near, far) = UnixDatagram::pair().expect("sockets");
    far.set_nonblocking(true).expect("a socket");
    let socket = Arc::new(Socket::of_descriptor(OwnedFd::from(near)));
    let receiver = Receiver::new(socket, Some(ring), VnetOffload::new(pool.clone(), PORT, keep_superframes));
    let mut queue = Queue { receiver, packets: 0 };
    let mut kernel =
        Kernel { memory: File::from(memory), socket: far, messages: VecDeque::new(), filled: VecDeque::new(), next: 0 };
    let mut input = Input(data);
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        let kind = input.byte();
        kernel.step(kind, &mut input);
        if kind & 0x80 != 0 || kernel.filled.len() == SLOTS {
            queue.poll(&mut kernel);
        }
    }
    queue.poll(&mut kernel);
    drop(queue);
    assert_eq!(pool.outstanding(), 0, "buffers were lost");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random bytes seldom have two equal lengths, without which the bounds of a slot do not matter.
    #[test]
    fn frames_at_any_place_lie_in_their_slots() {
        let mut random = fastrand::Rng::with_seed(8);
        for _ in 0..200 {
            let steps = (0..20).map(|_| {
                let mut slot = [0; SLOT_HEADER];
                let len = random.u32(..2100).to_ne_bytes();
                let start = if random.bool() { random.u16(..100) } else { random.u16(..2100) };
                slot[..4].copy_from_slice(&libc::TP_STATUS_USER.to_ne_bytes());
                slot[4..8].copy_from_slice(&len);
                slot[8..12].copy_from_slice(&len);
                slot[12..14].copy_from_slice(&start.to_ne_bytes());
                [&[0x84][..], &slot].concat()
            });
            run(&steps.flatten().collect::<Vec<u8>>());
        }
    }

    #[test]
    fn any_slots_are_read_as_a_plain_reading_does() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..300 {
            let bytes: Vec<u8> = (0..random.usize(..1000)).map(|_| random.u8(..)).collect();
            run(&bytes);
        }
    }
}
