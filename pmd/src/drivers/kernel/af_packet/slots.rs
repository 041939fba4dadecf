// UNSAFETY: a ring of slots in memory that is shared with the kernel.
#![allow(unsafe_code)]

//! The `TPACKET_V2` receive ring (Documentation/networking/packet_mmap.rst).
//!
//! The kernel fills slots of one size in order, and the driver returns them in order. Of a frame that is too long for a
//! slot, the slot holds the first bytes. The whole frame waits in the socket (`PACKET_COPY_THRESH`, `tpacket_rcv` in
//! net/packet/af_packet.c). Both get it under one lock, so the frames in the socket have the order of their slots.

use std::io;
use std::os::fd::AsFd;
#[cfg(any(test, fuzzing))]
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use wirepath_wire::vlan::Tag;

use super::socket::{Socket, vlan_tag};
use crate::drivers::kernel::common::mapping::Mapping;
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr};

/// Bytes of a slot. It holds a frame of 1900 bytes with its headers.
pub(super) const SLOT: usize = 2048;
/// Bytes of memory that the kernel allocates at a time.
const BLOCK: usize = 128 << 10;
/// Minimum number of slots: 8 MiB. A worker that the scheduler suspends for a while must not lose frames.
const MIN_SLOTS: usize = 4096;
/// Bytes of `struct tpacket2_hdr` (linux/if_packet.h), which begins with the status.
pub(super) const SLOT_HEADER: usize = 32;

/// The mapped ring.
pub(super) struct SlotRing {
    mapping: Mapping,
    slots: usize,
    current: usize,
}

/// A frame in the ring.
pub(super) enum SlotFrame<'a> {
    /// The slot has the whole frame, and its VLAN tag beside it.
    Whole(&'a [u8], VirtioNetHdr, Option<Tag>),
    /// The socket has the frame, which has so many bytes.
    InSocket(usize),
    /// The socket had no room for the frame.
    Lost,
    /// The header of the slot is wrong.
    Malformed,
}

/// Returns the number of slots for `depth` frames: full blocks.
fn slots_for(depth: u32) -> usize {
    (depth as usize).max(MIN_SLOTS).next_multiple_of(BLOCK / SLOT)
}

impl SlotRing {
    /// Creates a ring of at least `depth` slots for the socket, and maps it. The socket must not be bound yet: earlier
    /// frames would not be in the ring.
    pub(super) fn new(socket: &Socket, depth: u32) -> io::Result<Self> {
        let slots = slots_for(depth);
        socket.set_option(libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V2 as libc::c_int))?;
        let on: libc::c_int = 1;
        socket.set_option(libc::PACKET_COPY_THRESH, &on)?;
        let request = libc::tpacket_req {
            tp_block_size: BLOCK as u32,
            tp_block_nr: (slots * SLOT / BLOCK) as u32,
            tp_frame_size: SLOT as u32,
            tp_frame_nr: slots as u32,
        };
        socket.set_option(libc::PACKET_RX_RING, &request)?;
        let mapping = Mapping::new(socket.as_fd(), 0, slots * SLOT, false).inspect_err(|_| {
            // Frames would go to a ring that nobody reads.
            let _ = socket.remove_ring();
        })?;
        Ok(Self { mapping, slots, current: 0 })
    }

    /// Makes a ring of so many slots in the memory of a descriptor, which the caller fills in place of the kernel.
    #[cfg(any(test, fuzzing))]
    pub(super) fn of_memory(memory: BorrowedFd<'_>, slots: usize) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::new(memory, 0, slots * SLOT, false)?, slots, current: 0 })
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    fn start(&self, slot: usize) -> *mut u8 {
        debug_assert!(slot < self.slots);
        // SAFETY: `slot < slots`, and the mapping has `slots * SLOT` bytes.
        unsafe { self.mapping.start().as_ptr().add(slot * SLOT) }
    }

    fn status(&self, slot: usize) -> &AtomicU32 {
        // SAFETY: the word lies inside the mapping and is aligned, because slots are. The kernel writes it as a whole.
        unsafe { AtomicU32::from_ptr(self.start(slot).cast()) }
    }

    /// Returns the slot that is `distance` behind the current one.
    fn index(&self, distance: usize) -> usize {
        let index = self.current + distance;
        if index < self.slots { index } else { index - self.slots }
    }

    fn is_filled(&self, distance: usize) -> bool {
        self.status(self.index(distance)).load(Ordering::Acquire) & libc::TP_STATUS_USER != 0
    }

    /// Returns whether the kernel has filled the current slot.
    #[inline(always)]
    pub(super) fn is_ready(&self) -> bool {
        self.is_filled(0)
    }

    /// Returns the number of filled slots.
    pub(super) fn filled(&self) -> usize {
        // The filled slots are in a row. Slots that several processors fill may become ready in another order, which
        // makes the number inexact.
        let (mut least, mut most) = (0, self.slots);
        while least < most {
            let middle = least + (most - least) / 2;
            if self.is_filled(middle) { least = middle + 1 } else { most = middle }
        }
        least
    }

    /// Returns the number of frames from the current slot on that are in the socket, at most `most`.
    pub(super) fn in_socket(&self, most: usize) -> usize {
        const BOTH: u32 = libc::TP_STATUS_USER | libc::TP_STATUS_COPY;
        let slots = (0..most.min(self.slots)).map(|distance| self.status(self.index(distance)));
        slots.take_while(|status| status.load(Ordering::Acquire) & BOTH == BOTH).count()
    }

    /// Returns the frame of the current slot, if the kernel has filled the slot.
    #[inline(always)]
    pub(super) fn frame(&self) -> Option<SlotFrame<'_>> {
        if !self.is_ready() {
            return None;
        }
        // SAFETY: the kernel does not write the slot until `release`, which needs an exclusive borrow. The acquire load
        // orders these reads behind the kernel's writes.
        Some(read(unsafe { &*self.start(self.current).cast::<[u8; SLOT]>() }))
    }

    /// Returns the current slot to the kernel and advances to the next.
    #[inline(always)]
    pub(super) fn release(&mut self) {
        self.status(self.current).store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.current = self.index(1);
    }
}

/// Reads a slot. Each field is checked.
#[inline(always)]
fn read(slot: &[u8; SLOT]) -> SlotFrame<'_> {
    let word = |at: usize| u32::from_ne_bytes([slot[at], slot[at + 1], slot[at + 2], slot[at + 3]]);
    let half = |at: usize| u16::from_ne_bytes([slot[at], slot[at + 1]]);
    let (status, len, kept, start) = (word(0), word(4), word(8), usize::from(half(12)));
    if status & libc::TP_STATUS_COPY != 0 {
        return SlotFrame::InSocket(len as usize);
    }
    if len != kept {
        return SlotFrame::Lost;
    }
    let header = start.checked_sub(vnet_hdr::HEADER).filter(|header| *header >= SLOT_HEADER);
    let header = header.and_then(|header| slot.get(header..start)?.first_chunk());
    let bytes = slot.get(start..).and_then(|bytes| bytes.get(..kept as usize));
    match (bytes, header) {
        (Some(bytes), Some(header)) => {
            SlotFrame::Whole(bytes, VirtioNetHdr::read(header), vlan_tag(status, half(24), half(26)))
        }
        _ => SlotFrame::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use wirepath_wire::EtherType;

    use super::*;

    /// Returns a slot with a frame of `len` bytes, of which `kept` begin at `start`.
    fn slot(status: u32, len: u32, kept: u32, start: u16) -> Box<[u8; SLOT]> {
        let mut slot: Box<[u8; SLOT]> = vec![0u8; SLOT].into_boxed_slice().try_into().unwrap();
        for (at, value) in [(0, status), (4, len), (8, kept)] {
            slot[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        slot[12..14].copy_from_slice(&start.to_ne_bytes());
        slot[24..26].copy_from_slice(&0x2064u16.to_ne_bytes());
        slot[26..28].copy_from_slice(&0x88a8u16.to_ne_bytes());
        slot
    }

    #[test]
    fn a_frame_is_found_with_its_tag() {
        let both = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
        for (status, expected) in [
            (0, None),
            (libc::TP_STATUS_VLAN_VALID, Some(Tag { tpid: EtherType::VLAN, tci: 0x2064 })),
            (both, Some(Tag { tpid: EtherType::QINQ, tci: 0x2064 })),
        ] {
            let mut slot = slot(libc::TP_STATUS_USER | status, 60, 60, 76);
            slot[76] = 0xab;
            let SlotFrame::Whole([0xab, rest @ ..], _, tag) = read(&slot) else { panic!("no whole frame") };
            assert_eq!((rest.len(), tag), (59, expected));
        }
        let status = libc::TP_STATUS_USER | libc::TP_STATUS_COPY;
        assert!(matches!(read(&slot(status, 60_000, 1900, 76)), SlotFrame::InSocket(60_000)));
        assert!(matches!(read(&slot(libc::TP_STATUS_USER, 60_000, 1900, 76)), SlotFrame::Lost));
    }

    #[test]
    fn malformed_slots_are_refused() {
        let is_whole = |len: u32, start: u16| match read(&slot(libc::TP_STATUS_USER, len, len, start)) {
            SlotFrame::Whole(bytes, ..) => Some(bytes.len()),
            _ => None,
        };
        assert_eq!(is_whole(60, 0), None, "no room for the header in front of the frame");
        assert_eq!(is_whole(60, 41), None, "the header would lie in that of the slot");
        assert_eq!(is_whole(60, 42), Some(60));
        assert_eq!(is_whole(u32::MAX, 76), None);
        assert_eq!(is_whole(0, u16::MAX), None);
        assert_eq!(is_whole((SLOT - 76) as u32, 76), Some(SLOT - 76));
        assert_eq!(is_whole((SLOT - 75) as u32, 76), None);
        assert_eq!(is_whole(0, SLOT as u16), Some(0));
    }

    #[test]
    fn rings_have_full_blocks() {
        for (depth, slots) in [(0, MIN_SLOTS), (4096, 4096), (4097, 4160), (65_536, 65_536)] {
            assert_eq!(slots_for(depth), slots);
        }
    }
}
