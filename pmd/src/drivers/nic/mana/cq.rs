//! Completion queues: ownership and validation of entries.

use std::sync::atomic::{AtomicU32, Ordering};

use wirepath_memory::{DeviceMemory, Slots, SlotsView};
use wirepath_nic_defs::mana::{CQE_BYTES, CQE_TAIL, CqeHead, CqeTail, OWNER_VALUES, WQE_UNIT};

use crate::drivers::nic::common::queue_fault::QueueFault;

/// Words of an entry.
const WORDS: usize = CQE_BYTES as usize / 4;

/// A completion queue that one work queue uses. Owner bits identify the pass over the ring, so that entries
/// need not be cleared. The device writes the last word last.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    entries: Slots<RawCqe>,
    /// Log2 of the number of entries.
    shift: u32,
    /// Free-running counter of the next entry. It starts one pass ahead, so that zeroed memory counts as the
    /// previous pass.
    next: u32,
    /// Queue number and kind that every entry must have.
    from: u32,
}

/// An entry in memory, valid or not.
pub(super) type RawCqe = [AtomicU32; WORDS];

/// Bits of the last word that are not reserved.
const KNOWN: u32 = CqeTail(0).with_queue(u32::MAX).with_is_sq(1).with_owner(u32::MAX).0;

/// A valid entry, which the device has written.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a>(&'a RawCqe);

impl<'a> Entry<'a> {
    /// Returns the entry if its last word is `expected` ([`CompletionQueue::rest`]).
    #[inline(always)]
    pub(super) fn expect(whole: &'a RawCqe, expected: u32) -> Option<Self> {
        // Acquire: the other words must be read after the owner bits.
        let tail = whole[CQE_TAIL as usize / 4].load(Ordering::Acquire);
        if tail & KNOWN == expected { Some(Self(whole)) } else { None }
    }

    /// Returns an entry that was found valid before.
    #[inline(always)]
    pub(super) fn reread(whole: &'a RawCqe) -> Self {
        Self(whole)
    }

    /// Returns the word at this offset, below 64.
    #[inline(always)]
    pub(super) fn word(self, offset: u32) -> u32 {
        self.0[offset as usize / 4 % WORDS].load(Ordering::Relaxed)
    }

    /// Returns the type of the completion.
    #[inline(always)]
    pub(super) fn cqe_type(self) -> u32 {
        CqeHead(self.word(0)).cqe_type()
    }
}

impl CompletionQueue {
    /// Creates the queue of send queue or receive queue `queue`. `None` if the number of entries is not a
    /// power of two.
    pub(super) fn new(memory: &DeviceMemory, queue: u32, is_sq: bool) -> Option<Self> {
        let entries = Slots::new(memory)?;
        let from = CqeTail::default().with_queue(queue).with_is_sq(is_sq.into()).0;
        let count = entries.count();
        Some(Self { entries, shift: count.trailing_zeros(), next: count, from })
    }

    /// Returns a copy of the queue's state for reading in a loop. [`Self::resume`] takes over its position.
    #[inline(always)]
    pub(super) fn reader(&self) -> Reader<'_> {
        let mut reader =
            Reader { entries: self.entries.view(), shift: self.shift, next: self.next, from: self.from, expected: 0 };
        reader.expect();
        reader
    }

    /// Returns the entries from the next one to the end of the ring, and the expected bits of their last
    /// words.
    #[inline(always)]
    pub(super) fn rest(&self) -> (&[RawCqe], u32) {
        (self.entries.view().run(self.next), self.reader().expected)
    }

    /// Advances by `count` entries.
    #[inline(always)]
    pub(super) fn advance(&mut self, count: u32) {
        self.next = self.next.wrapping_add(count);
    }

    /// Takes over the position of a reader.
    #[inline(always)]
    pub(super) fn resume(&mut self, next: u32) {
        self.next = next;
    }

    /// Returns the number of entries that the device has written. A coalesced one has up to four packets.
    pub(super) fn waiting(&self) -> u32 {
        let mut reader = self.reader();
        (0..self.count())
            .take_while(|_| {
                let is_written = matches!(reader.peek(), Ok(Some(_)));
                reader.advance();
                is_written
            })
            .count() as u32
    }

    /// Returns the consumer index for doorbells: modulo all passes that owner bits distinguish.
    pub(super) fn taken(&self) -> u32 {
        self.next & (self.count() * OWNER_VALUES - 1)
    }

    /// Returns the number of entries.
    pub(super) fn count(&self) -> u32 {
        self.entries.count()
    }
}

/// Reads entries in order.
pub(super) struct Reader<'a> {
    entries: SlotsView<'a, RawCqe>,
    shift: u32,
    next: u32,
    from: u32,
    /// Expected bits of the last word in this pass.
    expected: u32,
}

impl<'a> Reader<'a> {
    /// Updates the expected bits at the start of a pass.
    #[inline(always)]
    fn expect(&mut self) {
        self.expected = self.from | (self.next >> self.shift) << (u32::BITS - OWNER_VALUES.ilog2());
    }

    /// Returns the next entry, if it is valid.
    #[inline(always)]
    pub(super) fn peek(&self) -> Result<Option<Entry<'a>>, QueueFault> {
        let entry = self.entries.at(self.next);
        // Read once, because the device may write it meanwhile. Acquire: the other words must be read after
        // the owner bits.
        let tail = entry[CQE_TAIL as usize / 4].load(Ordering::Acquire);
        if tail & KNOWN == self.expected {
            return Ok(Some(Entry(entry)));
        }
        let turn = self.next >> self.shift;
        let owner = CqeTail(tail).owner();
        if owner == turn.wrapping_sub(1) % OWNER_VALUES {
            Ok(None)
        } else if owner == turn % OWNER_VALUES {
            Err(QueueFault::ForeignQueue)
        } else {
            Err(QueueFault::BadOwnerBits)
        }
    }

    /// Advances to the next entry.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.next = self.next.wrapping_add(1);
        if self.next & self.entries.mask() == 0 {
            self.expect();
        }
    }

    /// Returns the counter of the next entry.
    #[inline(always)]
    pub(super) fn next(&self) -> u32 {
        self.next
    }
}

/// Checks the position in a completion against the expected one.
///
/// Work queues complete in order, so that the position is redundant. However, it reveals a repeated
/// completion, after which a packet's buffer would be delivered while the device still writes to it. Sources
/// disagree on the unit (openvmm: bytes in its device, units in its driver; rdma-core: bytes). The unit is
/// therefore learned from the first completions that determine it. If a device follows neither unit, its
/// positions are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Positions {
    unit: Unit,
    /// Right shift from the device's number to units, and mask of the compared bits. The mask is 0 until the
    /// unit is known.
    shift: u32,
    mask: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Unknown,
    Known,
    Unused,
}

impl Positions {
    /// The unit is to be learned.
    pub(super) const UNKNOWN: Self = Self { unit: Unit::Unknown, shift: 0, mask: 0 };
    /// Positions are ignored.
    pub(super) const UNUSED: Self = Self { unit: Unit::Unused, shift: 0, mask: 0 };

    /// Returns true if `reported` may be a position from `at` on, less than `size` units further. Positions
    /// count modulo the ring of `mask + 1` units.
    #[inline(always)]
    pub(super) fn fits(&mut self, reported: u32, at: u32, size: u32, mask: u32) -> bool {
        if self.unit == Unit::Unknown {
            self.learn(reported, at, mask);
        }
        (reported >> self.shift).wrapping_sub(at) & self.mask < size
    }

    /// Returns the distance of the position behind `from`, below `size` units. `None` if it is unknown. While
    /// the unit is unknown, a position counts only if it is plausible in exactly one unit.
    pub(super) fn distance(&self, reported: u32, from: u32, size: u32, mask: u32) -> Option<u32> {
        let distance_in =
            |shift: u32| Some((reported >> shift).wrapping_sub(from) & mask).filter(|distance_in| *distance_in < size);
        let bytes = WQE_UNIT.ilog2();
        match self.unit {
            Unit::Known => distance_in(self.shift),
            // Position 0 may mean the start of the ring, or a device that reports no positions.
            Unit::Unknown if reported == 0 => None,
            Unit::Unknown => match (distance_in(0), distance_in(bytes).filter(|_| reported.is_multiple_of(WQE_UNIT))) {
                (Some(_), Some(_)) => None,
                (units, bytes) => units.or(bytes),
            },
            Unit::Unused => None,
        }
    }

    #[cold]
    fn learn(&mut self, reported: u32, at: u32, mask: u32) {
        // The start of the ring is 0 in every unit. A device that reports no positions writes 0.
        if at & mask == 0 || reported == 0 {
            return;
        }
        let bytes = WQE_UNIT.ilog2();
        *self = if (reported ^ at) & mask == 0 {
            Self { unit: Unit::Known, shift: 0, mask }
        } else if reported.is_multiple_of(WQE_UNIT) && ((reported >> bytes) ^ at) & mask == 0 {
            Self { unit: Unit::Known, shift: bytes, mask }
        } else {
            Self::UNUSED
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::nic::common::test_support::memory;

    fn write(memory: &DeviceMemory, counter: u32, count: u32, queue: u32, is_sq: u32) {
        let tail = CqeTail::default()
            .with_queue(queue)
            .with_is_sq(is_sq)
            .with_owner(wirepath_nic_defs::mana::owner(counter, count));
        memory.store32((counter % count) as usize * 64 + 60, tail.0);
    }

    #[test]
    fn entries_are_new_once_per_pass() {
        let memory = memory(8 * 64);
        let mut queue = CompletionQueue::new(&memory, 0x12_3456, true).unwrap();
        assert_eq!(queue.count(), 8);
        for counter in 8..8 * 40 {
            assert!(queue.reader().peek().unwrap().is_none(), "{counter}");
            write(&memory, counter, 8, 0x12_3456, 1);
            let mut reader = queue.reader();
            assert!(reader.peek().unwrap().is_some(), "{counter}");
            reader.advance();
            let next = reader.next();
            queue.resume(next);
        }
    }

    #[test]
    fn invalid_entries_are_faults() {
        let memory = memory(8 * 64);
        let queue = CompletionQueue::new(&memory, 7, false).unwrap();
        write(&memory, 8, 8, 8, 0);
        assert_eq!(queue.reader().peek().err(), Some(QueueFault::ForeignQueue));
        write(&memory, 8, 8, 7, 1);
        assert_eq!(queue.reader().peek().err(), Some(QueueFault::ForeignQueue), "a send queue");
        for pass in 2..8 {
            write(&memory, 8 * pass, 8, 7, 0);
            assert_eq!(queue.reader().peek().err(), Some(QueueFault::BadOwnerBits), "pass {pass}");
        }
        write(&memory, 8, 8, 7, 0);
        memory.store32(60, memory.load32(60) | 0xf << 25);
        assert!(queue.reader().peek().unwrap().is_some(), "reserved bits mean nothing");
    }

    #[test]
    fn the_unit_of_positions_is_learned() {
        for unit in [1, 32] {
            let mut positions = Positions::UNKNOWN;
            for at in 0..40u32 {
                assert!(positions.fits(at * unit, at, 1, 127), "{at}");
            }
            assert!(!positions.fits(40 * unit, 41, 1, 127), "twice");
            assert!(!positions.fits(43 * unit, 42, 1, 127), "one left out");
            assert!(positions.fits(45 * unit, 42, 4, 127), "one of four");
            // Free-running, or modulo the ring.
            assert!(positions.fits(130 * unit, 130, 1, 127) && positions.fits(3 * unit, 131, 1, 127));
        }
        let mut known = Positions::UNKNOWN;
        assert!(known.fits(5, 5, 1, 127));
        assert_eq!((known.distance(7, 5, 4, 127), known.distance(9, 5, 4, 127)), (Some(2), None));
        let unknown = Positions::UNKNOWN;
        assert_eq!((unknown.distance(7, 5, 4, 127), unknown.distance(7 << 5, 5, 4, 127)), (Some(2), Some(2)));
        assert_eq!((unknown.distance(0, 0, 4, 127), unknown.distance(32, 0, 64, 127)), (None, None), "either way");
        assert_eq!(Positions::UNUSED.distance(7, 5, 4, 127), None);
        let mut silent = Positions::UNKNOWN;
        assert!((0..40).all(|at| silent.fits(0, at, 1, 127)));
        let mut inconsistent = Positions::UNKNOWN;
        assert!((0..40).all(|at| inconsistent.fits(at * 7, at, 1, 127)));
        assert_eq!(inconsistent, Positions::UNUSED);
    }
}
