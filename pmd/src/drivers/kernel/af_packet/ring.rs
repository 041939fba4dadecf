// UNSAFETY: a ring of blocks in memory that is shared with the kernel.
#![allow(unsafe_code)]

//! The `TPACKET_V3` receive ring (Documentation/networking/packet_mmap.rst).
//!
//! It consists of blocks with frames of any length. The kernel closes a block when it is full or after a
//! timeout. The driver returns blocks as a whole.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use super::socket::Socket;
use crate::drivers::kernel::common::mapping::Mapping;

/// Bytes of a block: a power-of-two number of pages that holds the largest superframe (64 KiB and headers).
/// Larger superframes (`gso_max_size`, "BIG TCP") are truncated by the kernel; the driver drops them and
/// counts them as too long.
pub(super) const BLOCK: usize = 128 << 10;
/// Milliseconds after which the kernel closes a block that is not full: the minimum that it supports. A lone
/// frame waits at most this long.
const RETIRE_MS: u32 = 1;
/// Minimum number of blocks: 8 MiB. A worker that the scheduler suspends for a while must not lose frames.
/// That must hold even if each millisecond closes a block with a single frame.
const MIN_BLOCKS: usize = 64;

/// Offset of `num_pkts` in `struct tpacket_block_desc`.
pub(super) const NUM_PKTS: usize = 12;
/// Offset of `block_status` in `struct tpacket_block_desc`.
const STATUS: usize = 8;

/// The mapped ring.
pub(super) struct Ring {
    mapping: Mapping,
    blocks: usize,
    current: usize,
}

/// Returns the number of blocks for `depth` frames of 2 KiB. A full-size Ethernet frame takes 1.6 KiB of a
/// block, a small one 150 bytes.
pub(super) fn blocks_for(depth: u32) -> usize {
    (depth as usize * 2048).div_ceil(BLOCK).max(MIN_BLOCKS)
}

impl Ring {
    /// Creates a ring of `blocks` blocks for the socket and maps it. The socket must not be bound yet:
    /// earlier frames would not be in the ring.
    pub(super) fn new(socket: &Socket, blocks: usize) -> io::Result<Self> {
        const FRAME: u32 = 2048;
        socket.set_option(libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V3 as libc::c_int))?;
        let request = libc::tpacket_req3 {
            tp_block_size: BLOCK as u32,
            tp_block_nr: blocks as u32,
            // The kernel only checks this value for consistency: TPACKET_V3 frames have any length.
            tp_frame_size: FRAME,
            tp_frame_nr: BLOCK as u32 / FRAME * blocks as u32,
            tp_retire_blk_tov: RETIRE_MS,
            tp_sizeof_priv: 0,
            tp_feature_req_word: 0,
        };
        socket.set_option(libc::PACKET_RX_RING, &request)?;
        let mapping = Mapping::new(socket.as_fd(), 0, blocks * BLOCK, false)?;
        Ok(Self { mapping, blocks, current: 0 })
    }

    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `current < blocks`, and the mapping has `blocks * BLOCK` bytes.
        unsafe { self.mapping.start().as_ptr().add(self.current * BLOCK) }
    }

    fn status(&self) -> &AtomicU32 {
        self.word(self.current, STATUS)
    }

    /// Returns a word of the descriptor of a block.
    fn word(&self, block: usize, offset: usize) -> &AtomicU32 {
        debug_assert!(block < self.blocks && offset.is_multiple_of(4) && offset + 4 <= BLOCK);
        // SAFETY: the word lies inside the mapped block and is aligned, since blocks are page-aligned and the
        // offsets are constants of this module. The kernel writes it as a whole.
        unsafe { AtomicU32::from_ptr(self.mapping.start().as_ptr().add(block * BLOCK + offset).cast()) }
    }

    /// Returns the number of frames in the blocks that the kernel has released to the driver.
    pub(super) fn frames(&self) -> u32 {
        let blocks = (self.current..self.blocks).chain(0..self.current);
        // The acquire load orders the number of frames after the status.
        let ready =
            blocks.take_while(|block| self.word(*block, STATUS).load(Ordering::Acquire) & libc::TP_STATUS_USER != 0);
        ready.fold(0, |sum: u32, block| sum.saturating_add(self.word(block, NUM_PKTS).load(Ordering::Relaxed)))
    }

    /// Returns whether the kernel has released the current block to the driver.
    #[inline(always)]
    pub(super) fn is_ready(&self) -> bool {
        self.status().load(Ordering::Acquire) & libc::TP_STATUS_USER != 0
    }

    /// Returns the current block if the kernel has released it: the block descriptor, then frames.
    #[inline(always)]
    pub(super) fn block(&mut self) -> Option<&[u8; BLOCK]> {
        // SAFETY: the kernel does not write the block until `release`, which needs an exclusive borrow. The
        // acquire load orders these reads after the kernel's writes.
        self.is_ready().then(|| unsafe { &*self.start().cast::<[u8; BLOCK]>() })
    }

    /// Returns the current block to the kernel and advances to the next.
    #[inline]
    pub(super) fn release(&mut self) {
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.current += 1;
        if self.current == self.blocks {
            self.current = 0;
        }
    }
}
