// UNSAFETY: a ring of blocks in memory that is shared with the kernel.
#![allow(unsafe_code)]

//! The `TPACKET_V3` receive ring (Documentation/networking/packet_mmap.rst): blocks of frames of any length, closed by the kernel when
//! full or after a while, and given back whole.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::socket::Socket;

/// Bytes of a block. The largest superframe (64 KiB and headers) must fit into one, and blocks are powers of two of pages. What an
/// administrator made larger still (`gso_max_size`, "BIG TCP") is cut off by the kernel, and then dropped and counted as too long.
pub(super) const BLOCK: usize = 128 << 10;
/// Milliseconds after which a block that is not full is handed over: the least that the kernel can do, and thus the longest that a
/// lone frame waits.
const RETIRE_MS: u32 = 1;
/// Fewest blocks, 8 MiB: a worker that is kept from its core for some turns of the scheduler must not lose frames, even if each
/// millisecond closes a block with one frame in it.
const MIN_BLOCKS: usize = 64;

/// `block_status` in `struct tpacket_block_desc`.
const STATUS: usize = 8;

/// The ring, mapped.
pub(super) struct Ring {
    base: NonNull<u8>,
    blocks: usize,
    current: usize,
}

// SAFETY: the mapping belongs to this value alone, on whatever thread it is.
unsafe impl Send for Ring {}

/// Blocks for `depth` frames of 2 KiB. A frame of full Ethernet size takes 1.6 KiB in a block, a small one 150 bytes.
pub(super) fn blocks_for(depth: u32) -> usize {
    (depth as usize * 2048).div_ceil(BLOCK).max(MIN_BLOCKS)
}

impl Ring {
    /// Gives the socket a ring of `blocks` blocks and maps it. The socket must not be bound yet: what arrived before would not be in
    /// the ring.
    pub(super) fn new(socket: &Socket, blocks: usize) -> io::Result<Self> {
        const FRAME: u32 = 2048;
        socket.set(libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V3 as libc::c_int))?;
        let request = libc::tpacket_req3 {
            tp_block_size: BLOCK as u32,
            tp_block_nr: blocks as u32,
            // Only checked for consistency: the frames of this version have any length.
            tp_frame_size: FRAME,
            tp_frame_nr: BLOCK as u32 / FRAME * blocks as u32,
            tp_retire_blk_tov: RETIRE_MS,
            tp_sizeof_priv: 0,
            tp_feature_req_word: 0,
        };
        socket.set(libc::PACKET_RX_RING, &request)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { mmap(ptr::null_mut(), blocks * BLOCK, protection, MapFlags::SHARED, socket.as_fd(), 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, blocks, current: 0 })
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `current < blocks`.
        unsafe { self.base.as_ptr().add(self.current * BLOCK) }
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: inside the block, which is page-aligned; the kernel too writes the word whole.
        unsafe { AtomicU32::from_ptr(self.start().add(STATUS).cast()) }
    }

    /// Whether the current block has been handed over.
    #[inline(always)]
    pub(super) fn is_ready(&self) -> bool {
        self.status().load(Ordering::Acquire) & libc::TP_STATUS_USER != 0
    }

    /// The current block, if it has been handed over: its descriptor, then frames.
    #[inline(always)]
    pub(super) fn block(&mut self) -> Option<&[u8; BLOCK]> {
        // SAFETY: the block is ours until `release`, which needs the exclusive borrow back; the acquire load comes after all that the
        // kernel wrote.
        self.is_ready().then(|| unsafe { &*self.start().cast::<[u8; BLOCK]>() })
    }

    /// Gives the current block back to the kernel and goes on to the next.
    #[inline]
    pub(super) fn release(&mut self) {
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.current += 1;
        if self.current == self.blocks {
            self.current = 0;
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and all borrows of it have ended.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.blocks * BLOCK) };
    }
}
