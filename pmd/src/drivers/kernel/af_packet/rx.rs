use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use wirepath_wire::vlan::Tag;

use super::ring::{BLOCK, NUM_PKTS, Ring};
use super::socket::{Socket, vlan_tag};
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr, VnetOffload};
use crate::port::{RxDriver, bytes_of};
use wirepath_packet::Batch;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;

/// Offset in `struct tpacket_block_desc`.
const FIRST_PKT: usize = 16;
/// Bytes of `struct tpacket3_hdr`.
const FRAME_HEADER: usize = size_of::<libc::tpacket3_hdr>();
const _: () = assert!(FRAME_HEADER == 48);

/// Receive queue of one socket.
pub(super) struct Receiver {
    socket: Arc<Socket>,
    ring: Ring,
    /// Position in the current block; `None` between blocks.
    cursor: Option<BlockCursor>,
    offload: VnetOffload,
    counters: Arc<QueueCounters>,
}

#[derive(Clone, Copy)]
struct BlockCursor {
    left: u32,
    offset: usize,
}

/// A frame inside a block.
struct Frame<'a> {
    bytes: &'a [u8],
    header: VirtioNetHdr,
    tag: Option<Tag>,
    /// True if the kernel truncated the frame.
    truncated: bool,
    /// Distance to the next frame in bytes.
    next: usize,
}

impl Receiver {
    pub(super) fn new(socket: Arc<Socket>, ring: Ring, offload: VnetOffload) -> Self {
        Self { socket, ring, cursor: None, offload, counters: Arc::default() }
    }
}

/// Parses the frame at `offset` of a block. Every field is validated; `None` means that the frame is
/// malformed.
#[inline(always)]
fn frame_at(block: &[u8; BLOCK], offset: usize) -> Option<Frame<'_>> {
    let h: &[u8; FRAME_HEADER] = block.get(offset..)?.first_chunk()?;
    let word = |at: usize| u32::from_ne_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
    let half = |at: usize| u16::from_ne_bytes([h[at], h[at + 1]]);
    let (next, kept, len, status, mac) = (word(0), word(12), word(16), word(20), half(24));
    let start = offset + usize::from(mac);
    let bytes = block.get(start..start + kept as usize)?;
    let header = block.get(start.checked_sub(vnet_hdr::HEADER)?..start)?.first_chunk()?;
    let tag = vlan_tag(status, word(32) as u16, half(36));
    Some(Frame { bytes, header: VirtioNetHdr::read(header), tag, truncated: len != kept, next: next as usize })
}

/// Returns the position of the first frame in a block.
#[inline]
fn first_frame(block: &[u8; BLOCK]) -> BlockCursor {
    let word = |at: usize| u32::from_ne_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    BlockCursor { left: word(NUM_PKTS), offset: word(FIRST_PKT) as usize }
}

impl RxDriver for Receiver {
    #[inline]
    fn receive(&mut self, batch: &mut Batch) {
        let before = batch.len();
        while !batch.is_full() {
            let Some(block) = self.ring.block() else { break };
            let cursor = self.cursor.get_or_insert_with(|| first_frame(block));
            while cursor.left > 0 {
                let Some(frame) = frame_at(block, cursor.offset) else {
                    self.counters.drops.add(DropReason::BadDescriptor, cursor.left.into());
                    self.offload.reset();
                    cursor.left = 0;
                    break;
                };
                if frame.truncated {
                    self.counters.drops.add(DropReason::TooLong, 1);
                } else if !self.offload.receive_frame(frame.bytes, frame.header, frame.tag, batch, &self.counters) {
                    break;
                }
                cursor.left -= 1;
                // The kernel writes zero into the last frame.
                if cursor.left > 0 && frame.next < FRAME_HEADER {
                    self.counters.drops.add(DropReason::BadDescriptor, cursor.left.into());
                    cursor.left = 0;
                }
                cursor.offset += frame.next;
            }
            if cursor.left > 0 {
                break;
            }
            self.cursor = None;
            self.ring.release();
        }
        let got = &batch.as_slice()[before..];
        self.counters.count_burst(got.len() as u64, bytes_of(got));
    }

    fn waiting(&mut self) -> Option<u32> {
        let current = self.ring.block().map(first_frame).map_or(0, |cursor| cursor.left);
        let taken = self.cursor.map_or(0, |cursor| current.saturating_sub(cursor.left));
        Some(self.ring.frames().saturating_sub(taken))
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        if self.ring.is_ready() {
            return None;
        }
        self.socket.take_error();
        Some(self.socket.as_fd())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use wirepath_wire::EtherType;

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
        assert_eq!((frame.bytes.len(), frame.bytes[0], frame.next, frame.truncated), (60, 0xab, 144, false));
        assert_eq!(frame.tag, Some(Tag { tpid: EtherType::QINQ, tci: 0x2064 }));
    }

    #[test]
    fn malformed_blocks_are_refused() {
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
