//! Work queues: rings with doorbell records.

use wirepath_nic_defs::mlx5::{self as defs, ControlDs, ControlOpcode, RECORD_RECEIVE, RECORD_SEND, SEND_BLOCK};

use crate::device::{ContextId, EventTarget, ObjectId};
use crate::host::Region;

/// Prefetch distance in bytes.
const PREFETCH_BYTES: u64 = 256;

/// States of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// RESET: nothing is processed.
    Reset,
    /// INIT.
    Init,
    /// RTR.
    ReadyToReceive,
    /// RTS of a queue pair, RDY of a work queue: packets are processed.
    Ready,
    /// ERROR: everything that is posted completes as flushed.
    Error,
}

/// A send queue.
#[derive(Debug)]
pub(super) struct Sq<R> {
    pub(super) number: u32,
    /// Number that completions of version 1 carry.
    pub(super) user_index: u32,
    pub(super) ring: R,
    record: R,
    /// Number of basic blocks of the ring, a power of two.
    pub(super) blocks: u32,
    /// Number of consumed basic blocks, modulo 2^16.
    pub(super) head: u16,
    /// Number of posted basic blocks as last read from the record, modulo 2^16.
    tail: u16,
    pub(super) state: State,
    /// True if the register was written after the record was read last.
    pub(super) rung: bool,
    pub(super) cq: ObjectId,
    pub(super) context: ContextId,
    pub(super) pd: ObjectId,
    pub(super) port: usize,
    pub(super) owner: EventTarget,
    /// Number of blocks since the last signaled completion.
    pub(super) unsignaled: u32,
    pub(super) sent: u64,
    pub(super) sent_bytes: u64,
    pub(super) errors: u64,
    pub(super) completions: u64,
    pub(super) descriptors: u64,
    /// Number of packets that were segmented.
    pub(super) segmented: u64,
    /// Number of those in tunnels.
    pub(super) segmented_in_tunnels: u64,
    pub(super) doorbells: u64,
    /// Doorbell register of the queue, if pages are not objects.
    pub(super) register: Option<usize>,
    /// Number of descriptors that were copied into a BlueFlame buffer.
    pub(super) blue_flames: u64,
    pub(super) wrong_doorbells: u64,
}

impl<R: Region> Sq<R> {
    #[allow(clippy::too_many_arguments, reason = "called in one place")]
    pub(super) fn new(
        number: u32,
        user_index: u32,
        (ring, blocks): (R, u32),
        record: R,
        cq: ObjectId,
        context: ContextId,
        pd: ObjectId,
        owner: EventTarget,
    ) -> Self {
        Self {
            number,
            user_index,
            ring,
            record,
            blocks,
            head: 0,
            tail: 0,
            state: State::Reset,
            rung: false,
            cq,
            context,
            pd,
            port: 0,
            owner,
            unsignaled: 0,
            sent: 0,
            sent_bytes: 0,
            errors: 0,
            completions: 0,
            descriptors: 0,
            segmented: 0,
            segmented_in_tunnels: 0,
            doorbells: 0,
            register: None,
            blue_flames: 0,
            wrong_doorbells: 0,
        }
    }

    /// Returns the number of posted blocks in the record, modulo 2^16.
    #[inline]
    pub(super) fn posted_counter(&self) -> u32 {
        u32::from_be(self.record.load(4 * RECORD_SEND as u64))
    }

    /// Reads the doorbell record.
    #[inline]
    pub(super) fn read_record(&mut self) {
        self.tail = self.posted_counter() as u16;
    }

    /// Returns true if anything is posted. Reads the record only when everything known is consumed.
    #[inline]
    pub(super) fn has_more(&mut self) -> bool {
        if self.tail == self.head {
            self.read_record();
        }
        self.tail != self.head
    }

    /// Returns the number of blocks that were posted when the record was read and are not consumed.
    #[inline]
    pub(super) fn posted(&self) -> u32 {
        u32::from(self.tail.wrapping_sub(self.head))
    }

    /// Returns the number of blocks that are posted now and not consumed.
    pub(super) fn unserved(&self) -> u32 {
        u32::from((self.posted_counter() as u16).wrapping_sub(self.head))
    }

    /// Returns the ring offset of the byte at `bytes` behind the head.
    #[inline]
    pub(super) fn at(&self, bytes: u32) -> u64 {
        u64::from((u32::from(self.head) * SEND_BLOCK).wrapping_add(bytes) & (self.blocks * SEND_BLOCK - 1))
    }

    /// Copies the descriptor at the head, which may wrap around.
    #[inline]
    pub(super) fn fetch(&self, to: &mut [u8]) {
        let at = self.at(0);
        let size = u64::from(self.blocks * SEND_BLOCK);
        let first = (size - at).min(to.len() as u64) as usize;
        let (front, back) = to.split_at_mut(first);
        let _ = self.ring.read(at, front);
        if !back.is_empty() {
            let _ = self.ring.read(0, back);
        }
    }

    /// Checks that the register contains the start of the descriptor in the ring, and that the record was
    /// written first.
    pub(super) fn check_register(&self, first: ControlOpcode, second: ControlDs) -> Result<(), String> {
        let index = first.index() as u16;
        // The doorbell arrives late, from another process or thread. The descriptor was sent already because
        // of the record, and may be overwritten.
        if self.head.wrapping_sub(index).cast_signed() > 0 {
            return Ok(());
        }
        let ahead = (self.posted_counter() as u16).wrapping_sub(index);
        if ahead == 0 || u32::from(ahead) > self.blocks {
            return Err(format!(
                "the register names the descriptor at {index:#x}, but the record is {:#x}: it must be written first",
                self.posted_counter() as u16
            ));
        }
        let at = u64::from((u32::from(index) * SEND_BLOCK) & (self.blocks * SEND_BLOCK - 1));
        let mut bytes = [0; 8];
        let _ = self.ring.read(at, &mut bytes);
        let mut said = [0; 8];
        said[..4].copy_from_slice(&first.0.to_be_bytes());
        said[4..].copy_from_slice(&second.0.to_be_bytes());
        if bytes != said {
            return Err(format!(
                "the register contains {said:02x?}, but the descriptor at {index:#x} begins with {bytes:02x?}"
            ));
        }
        Ok(())
    }

    /// Checks that a store into the BlueFlame buffer, `offset` behind the register, equals the content of the
    /// ring. `register` is the last value of the register. The device may have processed the descriptor already,
    /// so the ring may contain another descriptor by then.
    pub(super) fn check_buffer(&self, register: u64, offset: usize, value: u64) -> Result<(), String> {
        let index = ControlOpcode((register as u32).swap_bytes()).index();
        let read = |at: usize| {
            let mut bytes = [0; 8];
            let at = u64::from(index * SEND_BLOCK) + at as u64;
            let _ = self.ring.read(at & u64::from(self.blocks * SEND_BLOCK - 1), &mut bytes);
            u64::from_le_bytes(bytes)
        };
        if read(0) == register && read(offset) != value {
            return Err(format!(
                "{value:#x} is stored {offset:#x} behind the register, but the descriptor at {index:#x} has {:#x}",
                read(offset)
            ));
        }
        Ok(())
    }

    /// Resets the queue.
    pub(super) fn reset(&mut self) {
        self.head = 0;
        self.tail = 0;
        self.unsignaled = 0;
        self.rung = false;
    }
}

/// Layouts of receive descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Linear: one descriptor per frame.
    Linear,
    /// Striding: a descriptor is divided into strides.
    Striding {
        /// Base-2 logarithm of the stride size in bytes.
        log_bytes: u32,
        /// Base-2 logarithm of the number of strides of a descriptor.
        log_strides: u32,
    },
}

/// A receive queue.
#[derive(Debug)]
pub(super) struct Rq<R> {
    pub(super) number: u32,
    pub(super) user_index: u32,
    ring: R,
    record: R,
    /// Number of entries, a power of two.
    pub(super) entries: u32,
    /// Base-2 logarithm of the entry size in bytes.
    pub(super) log_entry: u32,
    pub(super) layout: Layout,
    /// Number of consumed entries, modulo 2^16.
    pub(super) head: u16,
    /// Number of posted entries as last read from the record, modulo 2^16.
    tail: u16,
    /// Number of strides consumed of the entry at the head.
    pub(super) strides: u32,
    /// Position of the next stride: index in the scatter list, and offset in that segment.
    pub(super) scatter_position: (usize, usize),
    pub(super) state: State,
    pub(super) strip: bool,
    pub(super) cq: ObjectId,
    pub(super) pd: ObjectId,
    pub(super) owner: EventTarget,
    /// Content of [`Self::scatter_list`].
    list: [Segment; MAX_SEGMENTS],
    segments: usize,
    pub(super) received: u64,
    pub(super) received_bytes: u64,
    pub(super) no_buffer: u64,
    pub(super) errors: u64,
    pub(super) fillers: u64,
}

/// A scatter entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) size: u32,
}

/// Maximum number of scatter entries of a receive descriptor.
pub(super) const MAX_SEGMENTS: usize = super::MAX_RECV_WQE as usize / defs::DATA_BYTES;

impl<R: Region> Rq<R> {
    #[allow(clippy::too_many_arguments, reason = "called in one place")]
    pub(super) fn new(
        number: u32,
        user_index: u32,
        (ring, entries, log_entry): (R, u32, u32),
        record: R,
        layout: Layout,
        strip: bool,
        cq: ObjectId,
        pd: ObjectId,
        owner: EventTarget,
    ) -> Self {
        Self {
            number,
            user_index,
            ring,
            record,
            entries,
            log_entry,
            layout,
            head: 0,
            tail: 0,
            strides: 0,
            scatter_position: (0, 0),
            state: State::Reset,
            strip,
            cq,
            pd,
            owner,
            list: [Segment::default(); MAX_SEGMENTS],
            segments: 0,
            received: 0,
            received_bytes: 0,
            no_buffer: 0,
            errors: 0,
            fillers: 0,
        }
    }

    /// Returns the number of entries that are posted and not consumed. 16 bits of the record are valid;
    /// drivers may write more. The record is in a cache line that drivers write for each burst. It is
    /// therefore read only when everything known is consumed.
    #[inline]
    pub(super) fn posted(&mut self) -> u32 {
        if self.tail == self.head {
            self.read_record();
        }
        u32::from(self.tail.wrapping_sub(self.head))
    }

    /// Reads the doorbell record.
    pub(super) fn read_record(&mut self) {
        self.tail = u32::from_be(self.record.load(4 * RECORD_RECEIVE as u64)) as u16;
    }

    /// Returns the scatter list of the last entry that was fetched.
    #[inline]
    pub(super) fn scatter_list(&self) -> &[Segment] {
        &self.list[..self.segments]
    }

    /// Consumes strides of the entry at the head.
    #[inline]
    pub(super) fn consume_strides(&mut self, strides: u32, log_bytes: u32) {
        self.strides += strides;
        let (mut at, mut offset) = self.scatter_position;
        offset += (strides as usize) << log_bytes;
        while let Some(size) =
            self.scatter_list().get(at).map(|segment| segment.size as usize).filter(|size| *size <= offset)
        {
            (at, offset) = (at + 1, offset - size);
        }
        self.scatter_position = (at, offset);
    }

    /// Fetches the scatter list of the entry at the head.
    #[inline]
    pub(super) fn fetch(&mut self) {
        let start = u64::from(u32::from(self.head) & (self.entries - 1)) << self.log_entry;
        self.ring.prefetch(start + PREFETCH_BYTES);
        self.segments = 0;
        self.scatter_position = (0, 0);
        let skip = if self.layout == Layout::Linear { 0 } else { size_of::<defs::NextSegment>() };
        if skip + defs::DATA_BYTES == 1 << self.log_entry {
            self.add(start + skip as u64);
            return;
        }
        for at in (skip..(1 << self.log_entry).min(usize::from(super::MAX_RECV_WQE))).step_by(defs::DATA_BYTES) {
            if !self.add(start + at as u64) {
                break;
            }
        }
    }

    /// Adds the segment at ring offset `at` to the scatter list; returns false at the end of the list.
    #[inline(always)]
    fn add(&mut self, at: u64) -> bool {
        let [first, address] = self.ring.load_pairs(at).map(u64::from_le).map(u64::swap_bytes);
        let (size, key) = ((first >> 32) as u32, first as u32);
        if size == 0 {
            // A reserved key terminates a short list. Other empty segments are skipped.
            return key != defs::INVALID_LKEY;
        }
        self.list[self.segments % MAX_SEGMENTS] = Segment { size, key, address };
        self.segments += 1;
        true
    }

    /// Resets the queue.
    pub(super) fn reset(&mut self) {
        self.head = 0;
        self.tail = 0;
        self.strides = 0;
    }
}
