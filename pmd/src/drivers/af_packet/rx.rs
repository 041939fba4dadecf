use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use wirepath_wire::EtherType;
use wirepath_wire::vlan::Tag;

use super::ring::{BLOCK, Ring};
use super::socket::Socket;
use crate::counters::QueueCounters;
use crate::drivers::kernel::vnet::{self, Finisher, Header};
use crate::drops::DropReason;
use crate::packet::Batch;
use crate::port::{ReceiveQueue, bytes_of};

/// Offsets in `struct tpacket_block_desc`.
const NUM_PKTS: usize = 12;
const FIRST_PKT: usize = 16;
/// Bytes of `struct tpacket3_hdr`.
const FRAME_HEADER: usize = size_of::<libc::tpacket3_hdr>();
const _: () = assert!(FRAME_HEADER == 48);

/// Receives from one ring.
pub(super) struct Receiver {
    socket: Arc<Socket>,
    ring: Ring,
    /// Frames of the current block that are still to be taken, and where the next one is; `None` between blocks.
    place: Option<Place>,
    finisher: Finisher,
    counters: Arc<QueueCounters>,
}

#[derive(Clone, Copy)]
struct Place {
    left: u32,
    offset: usize,
}

/// A frame in a block.
struct Frame<'a> {
    bytes: &'a [u8],
    header: Header,
    tag: Option<Tag>,
    /// Whether the kernel had to cut it off.
    cut_off: bool,
    /// Distance to the next one.
    next: usize,
}

impl Receiver {
    pub(super) fn new(socket: Arc<Socket>, ring: Ring, finisher: Finisher) -> Self {
        Self { socket, ring, place: None, finisher, counters: Arc::default() }
    }
}

/// Reads what is at `offset` of a block. Nothing there is believed: `None` if it cannot be.
#[inline(always)]
fn frame_at(block: &[u8; BLOCK], offset: usize) -> Option<Frame<'_>> {
    let h: &[u8; FRAME_HEADER] = block.get(offset..)?.first_chunk()?;
    let word = |at: usize| u32::from_ne_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
    let half = |at: usize| u16::from_ne_bytes([h[at], h[at + 1]]);
    let (next, kept, len, status, mac) = (word(0), word(12), word(16), word(20), half(24));
    let start = offset + usize::from(mac);
    let bytes = block.get(start..start + kept as usize)?;
    let header = block.get(start.checked_sub(vnet::HEADER)?..start)?.first_chunk()?;
    let tag = (status & libc::TP_STATUS_VLAN_VALID != 0).then(|| {
        let named = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
        Tag { tpid: if named { EtherType(half(36)) } else { EtherType::VLAN }, tci: word(32) as u16 }
    });
    Some(Frame { bytes, header: Header::read(header), tag, cut_off: len != kept, next: next as usize })
}

/// Where the first frame of a fresh block is.
#[inline]
fn first_place(block: &[u8; BLOCK]) -> Place {
    let word = |at: usize| u32::from_ne_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    Place { left: word(NUM_PKTS), offset: word(FIRST_PKT) as usize }
}

impl ReceiveQueue for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        while !batch.is_full() {
            let Some(block) = self.ring.block() else { break };
            let place = self.place.get_or_insert_with(|| first_place(block));
            while place.left > 0 {
                let Some(frame) = frame_at(block, place.offset) else {
                    self.counters.drops.add(DropReason::BadDescriptor, place.left.into());
                    self.finisher.abandon();
                    place.left = 0;
                    break;
                };
                if frame.cut_off {
                    self.counters.drops.add(DropReason::TooLong, 1);
                } else if !self.finisher.accept(frame.bytes, frame.header, frame.tag, batch, &self.counters) {
                    break;
                }
                place.left -= 1;
                // The kernel leaves zero in the last one.
                if place.left > 0 && frame.next < FRAME_HEADER {
                    self.counters.drops.add(DropReason::BadDescriptor, place.left.into());
                    place.left = 0;
                }
                place.offset += frame.next;
            }
            if place.left > 0 {
                break;
            }
            self.place = None;
            self.ring.release();
        }
        let got = &batch.as_slice()[before..];
        self.counters.count_burst(got.len() as u64, bytes_of(got));
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        if self.ring.is_ready() {
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

    fn block() -> Box<[u8; BLOCK]> {
        vec![0u8; BLOCK].into_boxed_slice().try_into().unwrap()
    }

    fn put(block: &mut [u8; BLOCK], at: usize, value: u32) {
        block[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    #[test]
    fn a_frame_is_found_with_its_tag() {
        let mut b = block();
        put(&mut b, 48, 144);
        put(&mut b, 48 + 12, 60);
        put(&mut b, 48 + 16, 60);
        put(&mut b, 48 + 20, libc::TP_STATUS_USER | libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID);
        put(&mut b, 48 + 24, 82);
        put(&mut b, 48 + 32, 0x2064);
        put(&mut b, 48 + 36, 0x88a8);
        b[48 + 82] = 0xab;
        let frame = frame_at(&b, 48).unwrap();
        assert_eq!((frame.bytes.len(), frame.bytes[0], frame.next, frame.cut_off), (60, 0xab, 144, false));
        assert_eq!(frame.tag, Some(Tag { tpid: EtherType::QINQ, tci: 0x2064 }));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut b = block();
        assert!(frame_at(&b, 0).is_none(), "no room for the header in front of the frame");
        assert!(frame_at(&b, BLOCK - 47).is_none());
        assert!(frame_at(&b, usize::MAX - 3).is_none());
        put(&mut b, 12, u32::MAX);
        put(&mut b, 24, 80);
        assert!(frame_at(&b, 0).is_none());
        put(&mut b, 12, (BLOCK - 80) as u32);
        assert!(frame_at(&b, 0).is_some());
        put(&mut b, 12, (BLOCK - 79) as u32);
        assert!(frame_at(&b, 0).is_none());
    }
}
