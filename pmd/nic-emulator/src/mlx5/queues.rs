//! Work queues: rings with doorbell records.

use wirepath_nic_defs::mlx5::{self as defs, ControlDs, ControlOpcode, RECORD_RECEIVE, RECORD_SEND, SEND_BLOCK};

use crate::device::{ContextId, ObjectId, Owner};
use crate::host::Region;

/// How far ahead of their use descriptors are asked for, in bytes.
const AHEAD: u64 = 256;

/// State of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing moves.
    Reset,
    /// On the way up.
    Init,
    /// On the way up.
    ReadyToReceive,
    /// Packets move.
    Ready,
    /// Everything that is posted completes as flushed.
    Error,
}

/// A send queue.
#[derive(Debug)]
pub(super) struct Sq<R> {
    pub(super) number: u32,
    /// What completions name in version 1.
    pub(super) user_index: u32,
    pub(super) ring: R,
    record: R,
    /// Basic blocks, a power of two.
    pub(super) blocks: u32,
    /// Basic blocks consumed, modulo 2^16.
    pub(super) head: u16,
    /// Basic blocks posted, as the record said when it was last looked at.
    tail: u16,
    pub(super) state: State,
    /// The register was written since the record was looked at.
    pub(super) rung: bool,
    pub(super) cq: ObjectId,
    pub(super) context: ContextId,
    pub(super) pd: ObjectId,
    pub(super) port: usize,
    pub(super) owner: Owner,
    /// Blocks since the last completion that was asked for.
    pub(super) silent: u32,
    pub(super) sent: u64,
    pub(super) sent_bytes: u64,
    pub(super) errors: u64,
    pub(super) completions: u64,
    pub(super) descriptors: u64,
    /// Packets that were cut.
    pub(super) segmented: u64,
    pub(super) doorbells: u64,
    /// Where pages are not objects, its register.
    pub(super) register: Option<usize>,
    /// Descriptors that were written to a register whole.
    pub(super) blue_flames: u64,
    pub(super) wrong_doorbells: u64,
}

impl<R: Region> Sq<R> {
    #[allow(clippy::too_many_arguments, reason = "made in one place")]
    pub(super) fn new(
        number: u32,
        user_index: u32,
        (ring, blocks): (R, u32),
        record: R,
        cq: ObjectId,
        context: ContextId,
        pd: ObjectId,
        owner: Owner,
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
            silent: 0,
            sent: 0,
            sent_bytes: 0,
            errors: 0,
            completions: 0,
            descriptors: 0,
            segmented: 0,
            doorbells: 0,
            register: None,
            blue_flames: 0,
            wrong_doorbells: 0,
        }
    }

    /// What the record says: blocks posted, modulo 2^16.
    #[inline]
    pub(super) fn posted_counter(&self) -> u32 {
        u32::from_be(self.record.load(4 * RECORD_SEND as u64))
    }

    /// Looks at the record.
    #[inline]
    pub(super) fn look(&mut self) {
        self.tail = self.posted_counter() as u16;
    }

    /// Whether anything is posted; looks at the record if nothing is left of what it said before.
    #[inline]
    pub(super) fn has_more(&mut self) -> bool {
        if self.tail == self.head {
            self.look();
        }
        self.tail != self.head
    }

    /// Blocks that were posted at the last look and are not consumed.
    #[inline]
    pub(super) fn posted(&self) -> u32 {
        u32::from(self.tail.wrapping_sub(self.head))
    }

    /// Blocks that are posted by now and not consumed.
    pub(super) fn unserved(&self) -> u32 {
        u32::from((self.posted_counter() as u16).wrapping_sub(self.head))
    }

    /// Offset in the ring of `bytes` behind the head.
    #[inline]
    pub(super) fn at(&self, bytes: u32) -> u64 {
        u64::from((u32::from(self.head) * SEND_BLOCK).wrapping_add(bytes) & (self.blocks * SEND_BLOCK - 1))
    }

    /// Reads the descriptor at the head, over the end of the ring if need be.
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

    /// Whether the register says what the descriptor in the ring says, and the record was written before it.
    pub(super) fn check_register(&self, first: ControlOpcode, second: ControlDs) -> Result<(), String> {
        let index = first.index() as u16;
        // Told of late, by another process or a thread: the record had it sent already, and another descriptor may lie there by now.
        if self.head.wrapping_sub(index).cast_signed() > 0 {
            return Ok(());
        }
        let ahead = (self.posted_counter() as u16).wrapping_sub(index);
        if ahead == 0 || u32::from(ahead) > self.blocks {
            return Err(format!(
                "the register names the descriptor at {index:#x}, and the record says {:#x}: the record must be written before",
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
                "the register says {said:02x?}, and the descriptor at {index:#x} begins with {bytes:02x?}"
            ));
        }
        Ok(())
    }

    /// Whether what is written to the BlueFlame buffer `offset` behind the register, which was told the descriptor's first words, is what the
    /// ring has there. The buffer is written while the device may be done with the descriptor, so that the ring may have another by then.
    pub(super) fn check_buffer(&self, told: u64, offset: usize, value: u64) -> Result<(), String> {
        let index = ControlOpcode((told as u32).swap_bytes()).index();
        let read = |at: usize| {
            let mut bytes = [0; 8];
            let at = u64::from(index * SEND_BLOCK) + at as u64;
            let _ = self.ring.read(at & u64::from(self.blocks * SEND_BLOCK - 1), &mut bytes);
            u64::from_le_bytes(bytes)
        };
        if read(0) == told && read(offset) != value {
            return Err(format!(
                "{value:#x} is written {offset:#x} behind the register, and the descriptor at {index:#x} has {:#x} there",
                read(offset)
            ));
        }
        Ok(())
    }

    /// As new.
    pub(super) fn reset(&mut self) {
        self.head = 0;
        self.tail = 0;
        self.silent = 0;
        self.rung = false;
    }
}

/// How a receive queue takes frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One descriptor for each.
    Linear,
    /// A descriptor is cut into strides.
    Striding {
        /// Bytes of a stride, logarithm.
        log_bytes: u32,
        /// Strides of a descriptor, logarithm.
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
    /// Entries, a power of two.
    pub(super) entries: u32,
    /// Bytes of an entry, logarithm.
    pub(super) log_entry: u32,
    pub(super) layout: Layout,
    /// Entries consumed, modulo 2^16.
    pub(super) head: u16,
    /// Entries posted, as the record said when it was last looked at.
    tail: u16,
    /// Strides consumed of the entry at the head.
    pub(super) strides: u32,
    /// Where the next one begins: which of the scatter list, and the offset in that.
    pub(super) place: (usize, usize),
    pub(super) state: State,
    pub(super) strip: bool,
    pub(super) cq: ObjectId,
    pub(super) pd: ObjectId,
    pub(super) owner: Owner,
    /// See [`Self::list`].
    list: [Segment; MOST_SEGMENTS],
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

/// Scatter entries of one receive descriptor at most.
pub(super) const MOST_SEGMENTS: usize = super::MAX_RECV_WQE as usize / defs::DATA_BYTES;

impl<R: Region> Rq<R> {
    #[allow(clippy::too_many_arguments, reason = "made in one place")]
    pub(super) fn new(
        number: u32,
        user_index: u32,
        (ring, entries, log_entry): (R, u32, u32),
        record: R,
        layout: Layout,
        strip: bool,
        cq: ObjectId,
        pd: ObjectId,
        owner: Owner,
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
            place: (0, 0),
            state: State::Reset,
            strip,
            cq,
            pd,
            owner,
            list: [Segment::default(); MOST_SEGMENTS],
            segments: 0,
            received: 0,
            received_bytes: 0,
            no_buffer: 0,
            errors: 0,
            fillers: 0,
        }
    }

    /// Entries that are posted and not consumed. The record has 16 bits that count; drivers may write more. It lies in a line that drivers
    /// write for each burst, so that it is looked at only when nothing is left of what it said before.
    #[inline]
    pub(super) fn posted(&mut self) -> u32 {
        if self.tail == self.head {
            self.look();
        }
        u32::from(self.tail.wrapping_sub(self.head))
    }

    /// Looks at the record.
    pub(super) fn look(&mut self) {
        self.tail = u32::from_be(self.record.load(4 * RECORD_RECEIVE as u64)) as u16;
    }

    /// The scatter list of the entry at the head, if strides of it are consumed, or from its last fetch.
    #[inline]
    pub(super) fn list(&self) -> &[Segment] {
        &self.list[..self.segments]
    }

    /// So many strides of the entry at the head are consumed.
    #[inline]
    pub(super) fn pass(&mut self, strides: u32, log_bytes: u32) {
        self.strides += strides;
        let (mut at, mut offset) = self.place;
        offset += (strides as usize) << log_bytes;
        while let Some(size) = self.list().get(at).map(|segment| segment.size as usize).filter(|size| *size <= offset) {
            (at, offset) = (at + 1, offset - size);
        }
        self.place = (at, offset);
    }

    /// Fetches the scatter list of the entry at the head.
    #[inline]
    pub(super) fn fetch(&mut self) {
        let start = u64::from(u32::from(self.head) & (self.entries - 1)) << self.log_entry;
        self.ring.ask(start + AHEAD);
        self.segments = 0;
        self.place = (0, 0);
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

    /// Adds what lies at `at` of the ring to the scatter list; false at its end.
    #[inline(always)]
    fn add(&mut self, at: u64) -> bool {
        let [first, address] = self.ring.load_pairs(at).map(u64::from_le).map(u64::swap_bytes);
        let (size, key) = ((first >> 32) as u32, first as u32);
        if size == 0 {
            // The end of a short list has a key of its own; other empty entries are passed over.
            return key != defs::INVALID_LKEY;
        }
        self.list[self.segments % MOST_SEGMENTS] = Segment { size, key, address };
        self.segments += 1;
        true
    }

    /// As new.
    pub(super) fn reset(&mut self) {
        self.head = 0;
        self.tail = 0;
        self.strides = 0;
    }
}
